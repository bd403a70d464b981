"""Five tutorials of GPyTorch, as they are and with our steps for q: the lines that change, and the results.

    git clone --branch v1.15.2 https://github.com/cornellius-gp/gpytorch
    TORCHNGVI_DATA=... python benchmarks/gpytorch_tutorials.py gpytorch [NAME ...] [--rows 2000] [--seeds 1]

The notebooks are read from the clone, their lines changed by `SWITCHES`, and both versions run from the same seed on
one thread.  They are those of SVGP regression, classification, multitask regression, a deep GP, and a likelihood of
one's own (Pólya-Gamma).  The two that download the elevators data read ``gp_uci/elevators_data.csv.gz`` in the folder
TORCHNGVI_DATA, of which ``--rows`` are used; without it they draw a function of their own.
"""

import argparse
import contextlib
import difflib
import io
import json
import os
import re
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gpytorch.mlls._approximate_mll import _ApproximateMarginalLogLikelihood

LAST = 20  # steps whose median loss is told: single ones spike where Adam is fast
IMPORT = "from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, natural_optimizer"
OURS = "NaturalGradientVariationalDistribution("


class Switch(NamedTuple):
    """A change of lines: those that match get the replacement, and a line may follow the first of them."""

    pattern: str
    replacement: str
    after: str = ""


def steps(lr: float) -> list[Switch]:
    """Of a tutorial that trains q by Adam: the import, the distribution, and an optimizer for q beside Adam."""
    return [
        Switch(r"^import gpytorch$", "import gpytorch", IMPORT),
        Switch(r"(?<!import )(gpytorch\.variational\.)?CholeskyVariationalDistribution\($", OURS),
        Switch(r"= (gpytorch\.variational\.)?CholeskyVariationalDistribution\(", "= " + OURS),
        Switch(r"^(mll = .*)$", r"\1", f"natural_optimizer(mll, lr={lr}, hyper_optimizer=optimizer)"),
    ]


BESIDE_NGD = [  # natural_optimizer stands in the loop in the place of NGD, and is built where the objective is
    Switch(r"^import gpytorch$", "import gpytorch", IMPORT),
    Switch(r"= gpytorch\.variational\.NaturalVariationalDistribution\(", "= " + OURS),
    Switch(r"^variational_ngd_optimizer = gpytorch\.optim\.NGD\(.*$", ""),
    Switch(r"^(mll = .*)$", r"\1", "variational_ngd_optimizer = natural_optimizer(mll, lr=0.1)"),
]


class Tutorial(NamedTuple):
    """A notebook, the changes, and what is read from it when it has run."""

    notebook: str
    switches: list[Switch]
    results: Callable[[dict[str, Any]], dict[str, float]]


# ------------------------------------------------------------------------------------------ results


def loss_of(names: dict[str, Any], x: Any, y: Any) -> float:
    """The negative objective per datum on all of the training data."""
    names["model"].train()
    with torch.no_grad():
        return float(-names["mll"](names["model"](x), y))


def regression(names: dict[str, Any]) -> dict[str, float]:
    """Loss, and held-out score."""
    loss = loss_of(names, names["train_x"], names["train_y"])
    model, likelihood = names["model"].eval(), names["likelihood"].eval()
    with torch.no_grad():
        prediction = likelihood(model(names["test_x"]))
        score = torch.distributions.Normal(prediction.mean, prediction.stddev).log_prob(names["test_y"])
    return {"loss": loss, "test NLL": -float(score.mean())}


def classification(names: dict[str, Any]) -> dict[str, float]:
    """Loss, and the training labels that are wrong."""
    loss = loss_of(names, names["train_x"], names["train_y"])
    with torch.no_grad():
        p = names["likelihood"](names["model"].eval()(names["train_x"]))
    wrong = (p.mean.mean(0) if p.mean.ndim > 1 else p.mean).ge(0.5) != names["train_y"].bool()
    return {"loss": loss, "wrong labels of 10": float(wrong.sum())}


def multitask(names: dict[str, Any]) -> dict[str, float]:
    """Loss, and the error of the mean against the noiseless functions."""
    loss = loss_of(names, names["train_x"], names["train_y"])
    t = names["test_x"] * 2 * np.pi
    truth = torch.stack([t.sin(), t.cos(), t.sin() + 2 * t.cos(), -t.cos()], -1)
    return {"loss": loss, "error of the mean": float((names["mean"] - truth).square().mean().sqrt())}


def deep(names: dict[str, Any]) -> dict[str, float]:
    """What the notebook prints."""
    return {"test RMSE": float(names["rmse"]), "test NLL": -float(names["test_lls"].mean())}


def own_likelihood(names: dict[str, Any]) -> dict[str, float]:
    """Loss, and what the notebook prints."""
    loss = loss_of(names, names["train_x"], names["train_y"])
    return {"loss": loss, "test NLL": float(names["nlls"].mean())}


VARIATIONAL = "04_Variational_and_Approximate_GPs"
TUTORIALS = {
    "regression": Tutorial(f"{VARIATIONAL}/SVGP_Regression_CUDA", steps(0.5), regression),
    "classification": Tutorial(f"{VARIATIONAL}/Non_Gaussian_Likelihoods", steps(0.5), classification),
    "multitask": Tutorial(f"{VARIATIONAL}/SVGP_Multitask_GP_Regression", steps(0.1), multitask),
    "deep": Tutorial("05_Deep_Gaussian_Processes/Deep_Gaussian_Processes", steps(0.1), deep),
    "own likelihood": Tutorial(f"{VARIATIONAL}/PolyaGamma_Binary_Classification", BESIDE_NGD, own_likelihood),
}


# -------------------------------------------------------------------------------- reading and running


def lines_of(source: Path, tutorial: Tutorial) -> list[str]:
    """The lines of a notebook's code."""
    path = source / "examples" / f"{tutorial.notebook}.ipynb"
    if not path.is_file():
        raise SystemExit(f"{path} is not there: give the folder of a clone of GPyTorch, with its examples.")
    cells = json.loads(path.read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return [line for line in text.splitlines() if not line.startswith("%")]


def switched(lines: Sequence[str], switches: Sequence[Switch]) -> list[str]:
    """The lines with the changes made."""
    result, added = [], set()
    for line in lines:
        follows = []
        for switch in switches:
            if re.search(switch.pattern, line):
                line = re.sub(switch.pattern, switch.replacement, line)
                if switch.after and switch.after not in added:
                    follows.append(switch.after)
                    added.add(switch.after)
        result += [line, *follows]
    return result


def changes(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """The lines of a diff that begin with + or -."""
    diff = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
    return [line for line in diff if line[0] in "+-"]


def elevators(rows: int) -> np.ndarray:
    """Inputs and a standardised target in the last column, or a function of three inputs where there are no data."""
    path = Path(os.environ.get("TORCHNGVI_DATA", ".")) / "gp_uci" / "elevators_data.csv.gz"
    generator = np.random.default_rng(0)
    if path.is_file():
        data = generator.permutation(np.loadtxt(path, delimiter=","))[:rows]
        data[:, -1] = (data[:, -1] - data[:, -1].mean()) / data[:, -1].std()
        return data[:, np.ptp(data, 0) > 0]  # the tutorials divide by the range
    x = generator.uniform(-1, 1, (rows, 3))
    y = np.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.3 * generator.standard_normal(rows)
    return np.column_stack([x, y])


@contextlib.contextmanager
def notebook_modules(rows: int) -> Iterator[None]:
    """No figures, no bars, and the elevators data in the place of a download."""
    import matplotlib.pyplot as plt
    import scipy.io
    import tqdm

    plt.switch_backend("Agg")
    quiet = types.SimpleNamespace(tqdm=lambda it, **_: tqdm.tqdm(it, disable=True))
    before = (tqdm.__dict__.get("notebook"), tqdm.tqdm_notebook, scipy.io.loadmat, os.path.isfile)
    tqdm.notebook, tqdm.tqdm_notebook = quiet, quiet.tqdm
    scipy.io.loadmat = lambda _: {"data": elevators(rows)}
    os.path.isfile = lambda path: str(path).endswith("elevators.mat") or before[3](path)
    try:
        yield
    finally:
        tqdm.notebook, tqdm.tqdm_notebook, scipy.io.loadmat, os.path.isfile = before


@contextlib.contextmanager
def losses_kept() -> Iterator[list[float]]:
    """The values of every objective that is evaluated."""
    kept: list[float] = []
    forward = _ApproximateMarginalLogLikelihood.forward

    def told(mll: Any, *arguments: Any, **options: Any) -> Any:
        value = forward(mll, *arguments, **options)
        kept.append(-float(value.detach().mean()))
        return value

    _ApproximateMarginalLogLikelihood.forward = told
    try:
        yield kept
    finally:
        _ApproximateMarginalLogLikelihood.forward = forward


def ran(lines: Sequence[str], results: Callable[[dict[str, Any]], dict[str, float]], seed: int) -> dict[str, float]:
    """The results of a notebook's code, and the processor seconds it took."""
    torch.manual_seed(seed)
    names: dict[str, Any] = {"__name__": "notebook"}
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), losses_kept() as losses:
        warnings.simplefilter("ignore")
        exec(compile("\n".join(lines), "notebook", "exec"), names)
    last = losses[-LAST:]
    seconds = time.process_time() - start
    torch.manual_seed(seed)
    return {f"loss of the last {len(last)} steps": float(np.median(last)), **results(names), "seconds": seconds}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the tutorials and print what changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of a clone of GPyTorch, of the version that is installed")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TUTORIALS)}; all without any")
    parser.add_argument("--rows", type=int, default=2000, help="of the elevators data")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    everything = {}
    for name in options.names or TUTORIALS:
        tutorial = TUTORIALS[name]
        before = lines_of(options.source, tutorial)
        after = switched(before, tutorial.switches)
        print(f"\n{name}: {tutorial.notebook}.ipynb", *changes(before, after), sep="\n    ", flush=True)
        with notebook_modules(options.rows):
            for seed in range(options.seeds):
                for label, lines in (("GPyTorch", before), ("ours", after)):
                    result = ran(lines, tutorial.results, seed)
                    everything[name, label, seed] = result
                    print(f"  {label:9}", *(f"{what} {value:.4g}  " for what, value in result.items()), flush=True)
    return everything


if __name__ == "__main__":
    main(sys.argv[1:])
