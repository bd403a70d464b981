"""The table of docs/appendix/step_measurements.md: what is fast and what is not, as ratios of CPU time within one run.

    python -m benchmarks.speed_page [--only newton batched] [--log FILE] [--peers FILE] [--repeats 3]

Each row times one thing of torchngvi and another way to the same result, in turns in one process on one thread, and
takes the least CPU time of each.  The ratio is that of the other way over ours: above 1 we are faster.  The floor is
the time of the matrix products that our way cannot do without, by their number of operations and the rate of a large
product of float64 in the same run; the last column is our time over it.  Rows that are measured replace those of the
log, and the page is written from the log.  ``--peers`` reads a log of `benchmarks/peers.py`.  A row whose peer is not
installed keeps what the log has.
"""

import argparse
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchngvi import VN, CholeskyGaussian, GeneralizedLinear, MixedModel, fit

TREE = Path(__file__).resolve().parents[1]
LOG, PAGE = TREE / "benchmarks" / "speed.json", TREE / "docs" / "appendix" / "step_measurements.md"
BEGIN, END = "<!-- table: python -m benchmarks.speed_page -->", "<!-- end of table -->"
HEADER = ("what", "beside", "ratio of CPU time", "our time over the floor")
Row = dict[str, Any]


def cpu(call: Callable[[], Any]) -> float:
    """CPU seconds of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def least(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The least CPU seconds of each call, which take turns; the first round warms up."""
    rounds = [{name: cpu(call) for name, call in calls.items()} for _ in range(repeats + 1)]
    return {name: min(each[name] for each in rounds[1:]) for name in calls}


def script(name: str) -> Any:
    """A benchmark that is run by its path, and finds those beside it in its own folder."""
    folder = str(TREE / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def rate() -> float:
    """Operations a second of a product of large matrices."""
    A = torch.randn(1000, 1000, dtype=torch.float64)
    return 2 * 1000**3 / least({"product": lambda: A @ A}, 5)["product"]


def row(what: str, beside: str, ours: float, other: float, operations: float | None = None) -> Row:
    """One line of the log."""
    floor = None if operations is None else ours * rate() / operations
    return {"what": what, "beside": beside, "ratio": other / ours, "floor": floor}


def logistic(rows: int, dim: int, batch: tuple[int, ...] = ()) -> GeneralizedLinear:
    """A logistic regression of simulated rows, or a batch of them."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(*batch, rows, dim, generator=generator, dtype=torch.float64)
    theta = torch.randn(*batch, dim, 1, generator=generator, dtype=torch.float64) / dim**0.5
    return GeneralizedLinear(X, torch.bernoulli((X @ theta)[..., 0].sigmoid(), generator=generator))


def newton(repeats: int) -> list[Row]:
    """Fits of single regressions, beside VN from where q stands."""
    found = []
    for rows, dim in ((500, 10), (2000, 50), (2000, 100)):
        model, results = logistic(rows, dim), {}

        def run(name: str, optimizer: Any, model: Any = model, results: Any = results) -> None:
            q = CholeskyGaussian(model.dim, dtype=torch.float64)
            results[name] = fit(q, model, optimizer(q), progress=False)

        calls = {"ours": lambda run=run: run("ours", lambda q: None), "VN": lambda run=run: run("VN", VN)}
        times, result = least(calls, repeats), results["ours"]
        # XC, and its products with diag(β) and α, in an evaluation; XᵀDX in a pass; products with H are left out
        passes = result.gradients - result.evaluations
        operations = (4 * result.evaluations + 2 * passes) * rows * dim**2
        found.append(row(f"logistic regression, {rows} x {dim}", "`VN(q)`", times["ours"], times["VN"], operations))
    return found


def batched(repeats: int) -> list[Row]:
    """Many small regressions as one, beside a loop over sixteen of them, scaled up."""
    members, rows, dim, some = 512, 100, 10, 16
    whole, results = logistic(rows, dim, (members,)), []
    alone = [GeneralizedLinear(whole.X[i], whole.y[i] > 0) for i in range(some)]

    def loop() -> None:
        for model in alone:
            fit(CholeskyGaussian(dim, dtype=torch.float64), model, progress=False)

    def batch() -> None:
        results.append(fit(CholeskyGaussian(dim, (members,), dtype=torch.float64), whole, progress=False))

    times, result = least({"ours": batch, "loop": loop}, repeats), results[0]
    operations = (4 * result.evaluations + 2 * (result.gradients - result.evaluations)) * members * rows * dim**2
    what = f"{members} logistic regressions of {rows} x {dim}"
    return [row(what, f"a loop ({some} of them)", times["ours"], times["loop"] * members / some, operations)]


def expectations(repeats: int) -> list[Row]:
    """The expectations of 20,000 logistic rows by the compiled kernel, or PyTorch, beside a mixture of 27 normals."""
    from benchmarks import logistic_kernel

    generator, found = torch.Generator().manual_seed(0), []
    for low, high in ((0.01, 0.24), (0.24, 0.6), (1.0, 4.0)):
        e = 3 * torch.randn(20_000, dtype=torch.float64, generator=generator)
        v = torch.empty_like(e).uniform_(low, high, generator=generator).square()
        calls = {name: partial(form, e, v) for name, form in logistic_kernel.FORMS.items()}
        times = least(calls, 3 * repeats)
        for form, words in (("kernel", "compiled"), ("eager", "without a compiler")):
            what = f"20,000 logistic expectations, s in {low:g} to {high:g}, {words}"
            found.append(row(what, "a mixture of 27 normals", times[form], times["mixture"]))
    os.environ.pop("TORCHNGVI_KERNELS")  # which the forms have set
    return found


def mixed(repeats: int) -> list[Row]:
    """A linear mixed model, beside restricted maximum likelihood by statsmodels."""
    try:
        import statsmodels.api as sm
    except ImportError:
        print("statsmodels is not installed: mixed models are left out")
        return []
    generator = torch.Generator().manual_seed(0)
    group = torch.arange(500).repeat_interleave(5)
    X = torch.stack([torch.ones(2500), torch.randn(2500, generator=generator)], -1).double()
    y = X.sum(-1) + torch.randn(500, generator=generator)[group] + 0.6 * torch.randn(2500, generator=generator)
    calls = {
        "ours": lambda: MixedModel(X, y, (X[:, :1], group), "gaussian").fit(progress=False),
        "MixedLM": lambda: sm.MixedLM(y.numpy(), X.numpy(), groups=group.numpy()).fit(),
    }
    times = least(calls, repeats)
    return [row("linear mixed model, 500 groups of 5", "`statsmodels.MixedLM`", times["ours"], times["MixedLM"])]


def svgp(repeats: int) -> list[Row]:
    """A step of a sparse Gaussian process with its hyper-parameters, beside GPyTorch's NGD."""
    if importlib.util.find_spec("gpytorch") is None:
        print("GPyTorch is not installed: sparse Gaussian processes are left out")
        return []
    steps = script("svgp")
    torch.manual_seed(0)
    x, Z = torch.rand(steps.BATCH, 8).double(), torch.rand(256, 8).double()
    y, likelihood = (torch.sin(3 * x.sum(-1)) > 0).double(), steps.gp.likelihoods.BernoulliLikelihood().double()
    common = (Z, likelihood, x, y, 20000, True)
    calls = {
        "ours": steps.through_autograd(steps.NaturalGradientVariationalDistribution(256), *common),
        "NGD": steps.through_autograd(steps.v.NaturalVariationalDistribution(256), *common),
    }
    times = least(calls, 4 * repeats)
    # A = L⁻¹K_x and AᵀC are of B rows; each with its backward pass three times
    operations = 3 * 2 * 2 * steps.BATCH * 256**2 / 2
    what = f"step of a sparse Gaussian process, M = 256, batch {steps.BATCH}, with hyper-parameters"
    return [row(what, "GPyTorch's `NGD`", times["ours"], times["NGD"], operations)]


def network(repeats: int) -> list[Row]:
    """A training step with a posterior attached, beside AdamW alone."""
    cost = script("network_cost")
    torch.manual_seed(0)
    width, batch = 512, 128
    batches = [(torch.randn(batch, 784), torch.randint(10, (batch,))) for _ in range(cost.STEPS)]
    names = {"ours": "attach, AdamW(foreach)", "AdamW": "AdamW(foreach)"}
    cases = {name: cost.CASES[case](width) for name, case in names.items()}
    times = least({name: lambda c=case: cost.steps(*c, batches, False) for name, case in cases.items()}, repeats)
    what = f"{cost.STEPS} training steps of a network of width {width}, with a posterior"
    return [row(what, "AdamW alone", times["ours"], times["AdamW"])]


ROWS = {
    "newton": newton,
    "batched": batched,
    "expectations": expectations,
    "mixed": mixed,
    "svgp": svgp,
    "network": network,
}


def of_peers(path: Path) -> list[Row]:
    """The rows of a log of `benchmarks/peers.py`: one JSON object a line."""
    found = []
    for line in path.read_text().splitlines():
        run = json.loads(line)
        what = f"logistic regression, {run['data']}, to {run['gap']:g} nats"
        at_least = run["seconds"] is None
        other = run["patience"] if at_least else run["seconds"]
        beside = f"{run['peer']}, AutoMultivariateNormal with Adam"
        found.append({**row(what, beside, run["ours"], other), "at_least": at_least})
    return found


def table(log: dict[str, list[Row]]) -> str:
    """The table of a log, in Markdown."""
    lines = [HEADER, ("---",) * len(HEADER)]
    for rows in log.values():
        for each in rows:
            ratio = ("above " if each.get("at_least") else "") + f"{each['ratio']:.3g}"
            floor = "" if each["floor"] is None else f"{each['floor']:.3g}"
            lines.append((each["what"], each["beside"], ratio, floor))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def written(page: str, log: dict[str, list[Row]]) -> str:
    """The page with the table of the log between its markers."""
    return re.sub(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: f"{BEGIN}\n\n{table(log)}\n\n{END}", page, flags=re.DOTALL
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=tuple(ROWS), default=list(ROWS), help="with no name, none")
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--peers", type=Path, help="a log of benchmarks/peers.py")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    log = json.loads(given.log.read_text()) if given.log.exists() else {}
    for name in given.only:
        log[name] = ROWS[name](given.repeats) or log.get(name, [])
    if given.peers is not None:
        log["peers"] = of_peers(given.peers)
    given.log.write_text(json.dumps(log, indent=1) + "\n")
    PAGE.write_text(written(PAGE.read_text(), log))
    print(table(log))


if __name__ == "__main__":
    main()
