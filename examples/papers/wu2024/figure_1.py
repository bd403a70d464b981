"""Figure 1: linear regression on UCI Bike, where everything is known."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from examples.compare_methods import datasets, plots
from examples.compare_methods.stepping import steps
from examples.papers.wu2024.runs import CLAMP, NAMES, band, due
from torchngvi.averaging import ExpectationAverage
from torchngvi.diagnostics import predictor_moments
from torchngvi.methods import NGVI, VN
from torchngvi.models import GeneralizedLinear
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors import CholeskyGaussian, NaturalGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.rules import ProjectedRootGradient
from torchngvi.stepsizes import Constant, theorem_schedule
from torchngvi.theory.wu2024 import limiting_variance

_ALL, _FEW = "17 features", "13 features"


def bike() -> dict[str, tuple[Tensor, Tensor]]:
    """UCI Bike with standardised inputs: all features, and those without copies and without parts of the target."""
    path = datasets.provided("gp_uci/bike_data.csv.gz", "UCI Bike of Figure 1")
    table = pd.read_csv(path, header=None).to_numpy()
    X, y = torch.tensor(table[:, :-1]), torch.tensor(table[:, -1])
    X = (X - X.mean(0)) / X.std(0, unbiased=False)
    kept = [column for column in range(17) if column not in (4, 5, 15, 16)]
    return {_ALL: (X, y), _FEW: (X[:, kept], y)}


def run_regression(
    seeds: int = 5,
    iterations: int = 10_000,
    full_iterations: int = 600_000,
    batch: int = 1000,
    versions: Sequence[str] = (_ALL, _FEW),
    methods: Sequence[str] = ("NGD", "SGD"),
    full: bool = False,
) -> pd.DataFrame:
    """Run stochastic NGD and SGD on Bike: KL to the posterior and training NLPD, with seeds as members of a batch."""
    rows, data = [], bike()
    for version in versions:
        X, y = data[version]
        model = GeneralizedLinear(X, y, "gaussian")
        exact = NaturalGaussian(model.dim, dtype=torch.float64)
        VN(exact, lr=1.0, step_size=Constant()).step(model)
        limit = limiting_variance(model, exact, batch)
        for method in methods:
            length = (full_iterations if full else iterations) if method == "SGD" else iterations
            log = _regression(model, exact, method, seeds, length, batch)
            known = float(_fit_of(exact, model, exact, method, 0)["nlpd"].iloc[0])
            rows.append(log.assign(version=version, limit=limit, nlpd_exact=known))
    return pd.concat(rows, ignore_index=True)


def _regression(
    model: GeneralizedLinear, exact: Gaussian, method: str, seeds: int, iterations: int, batch: int
) -> pd.DataFrame:
    generator = torch.Generator().manual_seed(0)
    q: Gaussian
    if method == "NGD":
        q = NaturalGaussian(model.dim, (seeds,), dtype=torch.float64)
        opt: NaturalGradientVI = NGVI(q)
        schedule: Callable[[int], float] = theorem_schedule
    else:
        q = CholeskyGaussian(model.dim, (seeds,), dtype=torch.float64)
        opt = NaturalGradientVI(q, ProjectedRootGradient(CLAMP), lr=1.0, step_size=Constant())
        schedule = _bike_step
    scheduler, average = LambdaLR(opt, schedule), ExpectationAverage(q)
    weights = torch.full((seeds, batch), len(model.X) / batch, dtype=torch.float64)

    def step(_: int) -> None:
        index = torch.randint(len(model.X), (seeds, batch), generator=generator)  # with replacement
        opt.step(GeneralizedLinear(model.X[index], model.y[index], "gaussian", weights=weights))
        scheduler.step()
        if method == "NGD":
            average.update(q)

    records = []
    for t, *_ in steps(step, iterations, due(iterations, 60)):
        records.append(_fit_of(q, model, exact, method, t))
        if method == "NGD" and t > 0:
            records.append(_fit_of(average.posterior(), model, exact, "NGD, average", t))
    return pd.concat(records)


def _bike_step(t: int) -> float:
    """The schedule γ_t = 1/(10⁵ + t) of SGD."""
    return 1 / (1e5 + t)


@torch.no_grad()
def _fit_of(q: Gaussian, model: GeneralizedLinear, exact: Gaussian, method: str, t: int) -> pd.DataFrame:
    mean, variance = predictor_moments(model, q, model.X)
    spread = 1 + variance
    nlpd = 0.5 * ((model.y - mean).square() / spread + spread.log() + math.log(2 * math.pi)).mean(-1)
    values = {"kl": q.kl(exact).reshape(-1).numpy(), "nlpd": nlpd.reshape(-1).numpy()}
    return pd.DataFrame({"method": method, "iteration": t, "seed": range(nlpd.numel())} | values)


def slope(log: pd.DataFrame, low: int, high: int) -> float:
    """The slope of log mean KL over log iteration, between two iterations."""
    means = log[log["iteration"].between(low, high)].groupby("iteration")["kl"].mean()
    return float(np.polyfit(np.log(means.index.to_numpy(float)), np.log(means.to_numpy()), 1)[0])


def draw_regression(log: pd.DataFrame, path: Path) -> None:
    """Draw two panels for each version of the data, log-log, and print slopes and a table."""
    versions = list(dict.fromkeys(log["version"]))
    figure = plots.blank_figure(
        10.8, 2.9 * len(versions) + 0.6, "Figure 1: linear regression on Bike, batches of 1000 rows",
        "means over the seeds, bands from the smallest to the largest",
    )  # fmt: skip
    grid = figure.subplots(len(versions), 2, squeeze=False)
    for row, version in enumerate(versions):
        part = log[log["version"] == version]
        titles = ("KL(q‖posterior) in nats", "training NLPD in nats a row")
        for axes, column, title in zip(grid[row], ("kl", "nlpd"), titles, strict=True):
            plots.style(axes, version, "iterations", title)
            for index, method in enumerate(dict.fromkeys(part["method"])):
                band(axes, part[part["method"] == method], column, NAMES[method], index)
            axes.set(xscale="log", yscale="log")
        steps = np.array([1, part[part["method"] != "SGD"]["iteration"].max()])  # of none: not a number, no line
        look: dict[str, Any] = {"color": plots.INK, "linewidth": 0.9}
        grid[row, 0].plot(
            steps, 2 / 3 * part["limit"].iloc[0] / (steps + 1), linestyle="--", label="(2/3) V∞/(t + 1)", **look
        )
        grid[row, 1].axhline(part["nlpd_exact"].iloc[0], linestyle=":", label="exact posterior", **look)
        grid[row, 1].yaxis.set_major_formatter("{x:.2g}")
        grid[row, 1].yaxis.set_minor_formatter("{x:.2g}")
    plots.legend(figure)
    plots.save(figure, path)
    _print_regression(log)


def _print_regression(log: pd.DataFrame) -> None:
    for (version, method), part in log.groupby(["version", "method"], sort=False):
        last = part["iteration"].max()
        means = part.groupby("iteration")["kl"].mean()
        shown = []
        for t in (1, 10, 100, 1000, 10_000, 100_000, 600_000, 1_000_000):
            if t <= last:
                near = means.index[np.abs(means.index - t).argmin()]
                shown.append(f"{near}: {means[near]:.3g}")
        middle = max(10, last // 100)
        slopes = (f"{slope(part, low, last):.2f} from {low} on" for low in (10, middle, max(10, last // 10)))
        print(f"{version}, {method}: KL at {', '.join(shown)}; slope {', '.join(slopes)}")
