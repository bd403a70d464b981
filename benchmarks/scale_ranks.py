"""Two processes beside one: equal results, equal bits, sums an evaluation; what faults say; bytes and times of a step.

python benchmarks/scale_ranks.py equality        the cases of tests/scale_*.py, as a table
python benchmarks/scale_ranks.py faults          what each rank says, and how fast
python benchmarks/scale_ranks.py speed           a step of one process against one of two, for three sizes
python benchmarks/scale_ranks.py groups          a mixed model with up to 100,000 groups, whole fits of one and of two
"""

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import scale_cases as cases  # noqa: E402
from workers import Ranks  # noqa: E402

from torchngvi import VN, CholeskyGaussian, GeneralizedLinear, Sharded, fit  # noqa: E402
from torchngvi.models import MixedLogJoint  # noqa: E402

EQUALITY = {
    "rows of a regression, whole fit: Cholesky": ("rows", "cholesky"),
    "the same: precision": ("rows", "precision"),
    "the same: natural": ("rows", "natural"),
    "the same: mean field": ("rows", "diagonal"),
    "the same, a rank without rows": ("rows", "cholesky", cases.ROWS),
    "a class on each rank": ("sorted_rows",),
    "batches of rows on each rank": ("rows_of_batches", "cholesky"),
    "the same in batches: mean field": ("rows_of_batches", "diagonal"),
    "three posteriors at once, 5 steps": ("batch_of_posteriors",),
    "log joint in batches, 8 steps by trial": ("data_log_joint",),
    "log joint by rows, whole fit": ("whole_log_joint",),
    "log joint by draws, whole fit": ("draws",),
    "log joint in batches by draws, whole fit": ("data_in_batches_by_draws",),
    "Stein with fixed draws apart, 10 steps": ("stein",),
    "closure over negative_elbo, 6 steps by trial": ("closure", "rows"),
    "the same, in batches": ("closure", "streamed"),
    "loss.backward(), summed by a hook, 8 steps": ("dropped_in",),
    "Hessian of a log joint by double backward": ("hessian",),
    "members of a batch apart, gathered": ("members",),
    "groups of a mixed model, over all coordinates: counts": ("scale_mixed.over_all", "poisson_log", 2),
    "groups over all coordinates: two classes": ("scale_mixed.over_all", "bernoulli_logit", 2),
    "`train_svgp_in_batches`, 3 epochs: Gaussian": ("scale_hosts.svgp", "gaussian"),
    "`train_svgp_in_batches`, 3 epochs: two classes": ("scale_hosts.svgp", "bernoulli"),
    "Pyro, `fit_guide` with its draws apart": ("scale_hosts.pyro_guide",),
    "Pyro, `NaturalSVI`, 20 steps with their draws apart": ("scale_hosts.pyro_guide", 20),
    "weights of a network, 12 steps under DistributedDataParallel": ("scale_hosts.network",),
}
MODULES = ("scale_cases", "scale_mixed", "scale_hosts")  # of tests
GROUPS = (1_000, 10_000, 100_000)
SIZES = [(200_000, 30), (50_000, 128), (10_000, 512)]


def equality(ranks):
    print("| case | largest difference | same bits on ranks | evaluations | meetings |")
    print("|---|---|---|---|---|")
    for name, (case, *arguments) in EQUALITY.items():
        first, second = ranks.values(case, *arguments)
        *module, case = case.split(".")
        one = getattr(importlib.import_module(*module or ["scale_cases"]), case)(None, *arguments)
        difference = float((first["q"] - one["q"]).abs().max() / one["q"].abs().max().clamp_min(1.0))
        same = torch.equal(first["q"], second["q"])
        print(f"| {name} | {difference:.1e} | {same} | {first.get('evaluations', '')} | {first.get('sums', '')} |")


def faults(ranks):
    print("| fault | what every rank says | seconds |")
    print("|---|---|---|")
    for module in MODULES:
        for name in sorted(name for name in dir(importlib.import_module(module)) if name.startswith("fault_")):
            arguments = ("day_2.npy",) if name == "fault_file" else ()
            (first, second), seconds = ranks.errors(f"{module}.{name}", *arguments)
            assert first == second
            print(f"| {name.removeprefix('fault_').replace('_', ' ')} | {first[0]}: {first[1]} | {seconds:.2f} |")


def step_time(rows, dim, rank=None, repeats=6):
    """The shortest of some steps at the optimum's neighbourhood, in seconds."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    y = (X[:, 0] + torch.randn(rows, generator=generator, dtype=torch.float64) > 0).double()
    mine = slice(None) if rank is None else slice(rank * rows // 2, (rank + 1) * rows // 2)
    target = GeneralizedLinear(X[mine], y[mine], classes=(0, 1))
    target = target if rank is None else Sharded(target, rows)
    q = CholeskyGaussian(dim, scale=0.1, dtype=torch.float64)
    opt, times = VN(q, lr=0.5), []
    for _ in range(repeats):
        began = time.perf_counter()
        opt.step(target)
        times.append(time.perf_counter() - began)
    return min(times)


def speed(folder):
    ranks = Ranks("scale_ranks", folder)
    print("| rows x D | one process, s a step | two, s a step | ratio | bytes of the sum |")
    print("|---|---|---|---|---|")
    for rows, dim in SIZES:
        one, two = step_time(rows, dim), max(ranks.values("timed", rows, dim))
        size = 8 * (1 + dim + dim * (dim + 1) // 2 + 12)
        print(f"| {rows} x {dim} | {one:.3f} | {two:.3f} | {one / two:.2f} | {size} |")
    ranks.stop()


def timed(rank, rows, dim):
    return step_time(rows, dim, rank)


def mixed(rank, n, rows=5):
    """A logistic model with an intercept for each of n groups, fitted over all coordinates; processor seconds."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(n * rows, 3, generator=generator, dtype=torch.float64)
    X[:, 0] = 1.0
    group = torch.arange(n).repeat_interleave(rows)
    eta = X @ torch.tensor([0.3, 0.5, -0.2], dtype=torch.float64)
    eta = eta + torch.randn(n, generator=generator, dtype=torch.float64)[group]
    y = (torch.rand(n * rows, generator=generator, dtype=torch.float64) < eta.sigmoid()).double()
    first, end = {None: (0, n), 0: (0, n // 3), 1: (n // 3, n)}[rank]
    mine = slice(first * rows, end * rows)
    model = Sharded(MixedLogJoint(X[mine], y[mine], (X[mine, :1], group[mine] - first)), n * rows)
    began = time.process_time()
    q = model.posterior()
    started, sums = time.process_time() - began, model.processes.sums
    result = fit(q, model, progress=False)
    seconds = time.process_time() - began
    size = q.dim - end + first
    V = model.structure.parts(q.frame().marginals())[-1].square
    return {
        "q": torch.cat([q.mean[-size:], V.flatten()]).detach(),
        "groups": torch.stack([q.mean[:-size], q.stddev[:-size]]).detach(),
        "evaluations": result.evaluations,
        "converged": result.converged,
        "sums": model.processes.sums - sums,
        "numbers": model.processes.numbers,
        "start": started,
        "seconds": seconds,
    }


def groups(folder):
    ranks = Ranks("scale_ranks", folder, limit=1800.0)
    print("| groups | globals apart | groups apart | same bits | evaluations | meetings | bytes | one, s | two, s |")
    print("|---|---|---|---|---|---|---|---|---|")
    mixed(None, 10)  # imports
    for n in GROUPS:
        one, (first, second) = mixed(None, n), ranks.values("mixed", n)
        apart = (torch.cat([first["groups"], second["groups"]], -1) - one["groups"]).abs().max()
        cells = [n, f"{(first['q'] - one['q']).abs().max():.1e}", f"{apart:.1e}", torch.equal(first["q"], second["q"])]
        cells += [first["evaluations"], first["sums"], 8 * (first["numbers"] + 12)]
        cells += [f"{one['seconds']:.1f}", f"{first['seconds']:.1f}, {second['seconds']:.1f}"]
        assert one["converged"]
        assert one["evaluations"] == first["evaluations"]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    ranks.stop()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["equality", "faults", "speed", "groups"])
    what = parser.parse_args(arguments).what
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if what in ("speed", "groups"):
            sys.path.insert(0, str(Path(__file__).parent))
            {"speed": speed, "groups": groups}[what](Path(folder))
            return
        ranks = Ranks("scale_cases", Path(folder))
        {"equality": equality, "faults": faults}[what](ranks)
        ranks.stop()


if __name__ == "__main__":
    main()
