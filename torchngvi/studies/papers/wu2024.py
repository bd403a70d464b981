"""Wu and Gardner (2024), Understanding stochastic natural-gradient variational inference: Figures 1 and 2."""

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from torchngvi.app import datasets
from torchngvi.averaging import ExpectationAverage
from torchngvi.diagnostics import predictor_moments
from torchngvi.errors import RejectedStepWarning
from torchngvi.expectations import BonnetPrice, Independent, Quadrature, Reparametrized
from torchngvi.interfaces import Estimator
from torchngvi.methods import NGVI, VN
from torchngvi.models import GeneralizedLinear
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors import CholeskyGaussian, NaturalGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.rules import ProjectedRootGradient
from torchngvi.stepsizes import theorem_schedule
from torchngvi.studies import figures
from torchngvi.studies.papers import Study
from torchngvi.studies.papers.mnist import images
from torchngvi.studies.stepping import steps
from torchngvi.theory.wu2024 import limiting_variance

CLAMP = 1e-10  # smallest diagonal entry of C under SGD
_LOST = 30.0  # times the starting objective: a run beyond it has diverged
_ALL, _FEW = "17 features", "13 features"


def _due(iterations: int, points: int) -> set[int]:
    """Steps after which a run is looked at, even on a logarithmic axis."""
    return {0, *np.geomspace(1, iterations, points).round().astype(int).tolist()}


# ------------------------------------------------------------------------------------ Figure 1


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
        VN(exact, lr=1.0).step(model)
        limit = limiting_variance(model, exact, batch)
        for method in methods:
            length = (full_iterations if full else iterations) if method == "SGD" else iterations
            log = _regression(model, exact, method, seeds, length, batch)
            rows.append(log.assign(version=version, limit=limit))
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
        opt = NaturalGradientVI(q, ProjectedRootGradient(CLAMP), lr=1.0)
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
    for t, *_ in steps(step, iterations, _due(iterations, 60)):
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
    return pd.DataFrame(
        {"method": method, "iteration": t, "seed": range(len(nlpd)), "kl": q.kl(exact).numpy(), "nlpd": nlpd.numpy()}
    )


def slope(log: pd.DataFrame, low: int, high: int) -> float:
    """The slope of log mean KL over log iteration, between two iterations."""
    means = log[log["iteration"].between(low, high)].groupby("iteration")["kl"].mean()
    return float(np.polyfit(np.log(means.index.to_numpy(float)), np.log(means.to_numpy()), 1)[0])


def draw_regression(log: pd.DataFrame, path: Path) -> None:
    """Draw two panels for each version of the data, and print slopes and a table."""
    versions = list(dict.fromkeys(log["version"]))
    figure = figures.blank_figure(
        8.6, 2.9 * len(versions) + 0.6, "Linear regression on Bike: stochastic natural gradients and SGD in (m, C)",
        "means over the seeds, bands from the smallest to the largest; dashed: (2/3) V∞/(t + 1)",
    )  # fmt: skip
    grid = figure.subplots(len(versions), 2, squeeze=False)
    for row, version in enumerate(versions):
        part = log[log["version"] == version]
        titles = ("KL(q‖posterior), nats", "training NLPD")
        for axes, column, title in zip(grid[row], ("kl", "nlpd"), titles, strict=True):
            figures.style(axes, f"{version}: {title}", "iteration")
            for index, method in enumerate(dict.fromkeys(part["method"])):
                _band(axes, part[part["method"] == method], column, method, index)
            axes.set_xscale("log")
        grid[row, 0].set_yscale("log")
        steps = np.array([1, part[part["method"] != "SGD"]["iteration"].max()])  # of none: not a number, no line
        grid[row, 0].plot(steps, 2 / 3 * part["limit"].iloc[0] / (steps + 1), color="#222222", lw=0.9, ls=(0, (5, 3)))
    grid[0, 0].legend(fontsize=7.5, frameon=False)
    figures.save(figure, path)
    _print_regression(log)


def _band(axes: Axes, log: pd.DataFrame, column: str, label: str, index: int) -> None:
    grouped = log[log["iteration"] > 0].groupby("iteration")[column]
    mean, low, high = grouped.mean(), grouped.min(), grouped.max()
    line = ("-", (0, (1, 1)), "-")[index % 3]
    axes.plot(mean.index, mean, color=figures.color(index), linewidth=1.4, label=label, linestyle=line)
    axes.fill_between(mean.index, low, high, color=figures.color(index), alpha=0.15, linewidth=0)


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


# ------------------------------------------------------------------------------------ Figure 2


def mushrooms() -> tuple[Tensor, Tensor]:
    """The mushrooms of LIBSVM, X (8124, 112) and y (8124,), float64."""
    X, y = datasets.load("mushrooms")
    return torch.as_tensor(X), torch.as_tensor(y)


def digits(one: int = 1, other: int = 7) -> tuple[Tensor, Tensor]:
    """Two digits of MNIST's training part, pixels in [0, 1], float32."""
    X, labels = images("MNIST of Figure 2")
    kept = (labels == one) | (labels == other)
    return X[kept], (labels[kept] == other).to(X)


def standardized_digits() -> tuple[Tensor, Tensor]:
    """The same with every pixel that varies standardised; the others are 0."""
    X, y = digits()
    spread = X.std(0, unbiased=False)
    return (X - X.mean(0)) / spread.where(spread > 0, 1.0), y


_DATA = {"mushrooms": mushrooms, "mnist": digits, "mnist, standardised": standardized_digits}


def run_logistic(
    data: Sequence[str] = ("mushrooms", "mnist"),
    seeds: Sequence[int] = (3, 2),  # one a data set
    draws: int = 10,
    iterations: Sequence[int] = (200, 50),
    full_iterations: Sequence[int] = (2000, 400),
    ngd: Sequence[Sequence[float]] = ((5e-1, 1e-1, 1e-2, 1e-3), (1e-1, 1e-2, 1e-3)),
    sgd: Sequence[Sequence[float]] = ((1e-3, 1e-4, 1e-5, 1e-6), (1e-5, 1e-6, 1e-7)),
    points: int = 25,
    full: bool = False,
) -> pd.DataFrame:
    """Run logistic regression under NGD with Price's gradient, SGD (r) and SGD (p): the negative ELBO."""
    rows = []
    grid = zip(data, seeds, iterations, full_iterations, ngd, sgd, strict=True)
    for name, members, short, long, natural, euclidean in grid:
        X, y = _DATA[name]()
        model = GeneralizedLinear(X, y)
        for method, rates in (("NGD (p)", natural), ("SGD (p)", euclidean), ("SGD (r)", euclidean)):
            for lr in rates:
                log = _logistic(model, method, lr, members, draws, long if full else short, points)
                rows.append(log.assign(data=name, method=method, lr=lr))
                end = log[log["iteration"] == log["iteration"].max()]
                print(f"{name}, {method}, {lr:g}: {end['objective'].mean():.6g} after {end['iteration'].iloc[0]}"
                      + (", diverged" if end["diverged"].any() else ""))  # fmt: skip
    return pd.concat(rows, ignore_index=True)


def _logistic(
    model: GeneralizedLinear, method: str, lr: float, seeds: int, draws: int, iterations: int, points: int
) -> pd.DataFrame:
    """One method with one step size; a run that diverges ends there."""
    noise = Independent(draws, torch.Generator().manual_seed(0))
    estimator: Estimator = Reparametrized(noise) if method == "SGD (r)" else BonnetPrice(noise)
    if method == "NGD (p)":
        q: Gaussian = NaturalGaussian(model.dim, (seeds,), dtype=model.X.dtype)
        opt: NaturalGradientVI = NGVI(q, lr, estimator=estimator)
    else:
        q = CholeskyGaussian(model.dim, (seeds,), dtype=model.X.dtype)
        opt = NaturalGradientVI(q, ProjectedRootGradient(CLAMP), lr, estimator=estimator)
    records: list[pd.DataFrame] = []
    start = math.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RejectedStepWarning)
        for t, *_ in steps(lambda _: opt.step(model), iterations, _due(iterations, points)):
            records.append(_scored(q, model, t))
            start = float(records[0]["objective"].mean())
            if t > 0 and (not float(records[-1]["objective"].max()) < _LOST * start or opt.rejections):
                break
    log = pd.concat(records)
    lost = not log["objective"].max() < _LOST * start or opt.rejections > 0
    return log.assign(diverged=lost, rejections=opt.rejections)


@torch.no_grad()
def _scored(q: Gaussian, model: GeneralizedLinear, t: int) -> pd.DataFrame:
    value = Quadrature()(q, model).value - q.entropy()
    mean, variance = predictor_moments(model, q, model.X)
    nodes, weights = (torch.as_tensor(part).to(mean) for part in np.polynomial.hermite_e.hermegauss(32))
    eta = mean + variance.sqrt() * nodes[:, None, None]
    chance = (torch.sigmoid(model.y * eta) * (weights / weights.sum())[:, None, None]).sum(0)
    return pd.DataFrame(
        {
            "iteration": t,
            "seed": range(len(value)),
            "objective": value.numpy(),
            "nlpd": -chance.clamp_min(1e-30).log().mean(-1).numpy(),
        }
    )


def draw_logistic(log: pd.DataFrame, path: Path) -> None:
    """Draw one panel for each data set and method, and one with the best step of each."""
    log = _judged(log)
    data, methods = (list(dict.fromkeys(log[column])) for column in ("data", "method"))
    figure = figures.blank_figure(
        15.0, 2.9 * len(data) + 0.6, "Logistic regression: negative ELBO, constant steps",
        "means over the seeds, bands from the smallest to the largest; runs that diverged are not drawn",
    )  # fmt: skip
    grid = figure.subplots(len(data), len(methods) + 2, squeeze=False)
    for row, name in enumerate(data):
        part = log[(log["data"] == name) & ~log["diverged"]]
        for column, method in enumerate(methods):
            axes = grid[row, column]
            figures.style(axes, f"{name}: {method}", "iteration", "nats" if column == 0 else "")
            rates = list(dict.fromkeys(log[(log["data"] == name) & (log["method"] == method)]["lr"]))
            for index, lr in enumerate(rates):
                of_step = part[(part["method"] == method) & (part["lr"] == lr)]
                if len(of_step):
                    _band(axes, of_step, "objective", f"{lr:g}", index)
            if axes.lines:
                axes.legend(fontsize=7, frameon=False, title="step", title_fontsize=7)
        for axes, metric, title in zip(grid[row, -2:], ("objective", "nlpd"), ("", ", NLPD"), strict=True):
            figures.style(axes, f"{name}: best steps{title}", "iteration")
            for index, method in enumerate(methods):
                if method not in set(part["method"]):
                    continue
                best, of_method = _best(part[part["method"] == method])
                _band(axes, of_method, metric, f"{method}, {best:g}", index)
        grid[row, -2].legend(fontsize=7, frameon=False, loc="upper right")
        limits = (0.9 * part["objective"].min(), 1.6 * part[part["iteration"] == 0]["objective"].max())
        for place, axes in enumerate(grid[row]):
            axes.set_xscale("log")
            axes.set_yscale("log")
            if place < len(methods) + 1:
                axes.set_ylim(*limits)
        grid[row, -2].set_ylim(limits[0], 10 * limits[1])  # room for the names
    figures.save(figure, path)
    _print_logistic(log)


def _judged(log: pd.DataFrame) -> pd.DataFrame:
    """Runs that end above their start are marked as diverged, too."""
    keys = ["data", "method", "lr"]
    ordered = log.groupby([*keys, "iteration"])["objective"].mean().groupby(keys)
    above = (ordered.last() > ordered.first()).rename("above").reset_index()
    judged = log.merge(above, on=keys, how="left")
    return judged.assign(diverged=judged["diverged"] | judged["above"]).drop(columns="above")


def _best(log: pd.DataFrame) -> tuple[float, pd.DataFrame]:
    """The step with the smallest last value."""
    last = log[log["iteration"] == log["iteration"].max()].groupby("lr")["objective"].mean()
    return float(last.idxmin()), log[log["lr"] == last.idxmin()]


def _print_logistic(log: pd.DataFrame) -> None:
    for (name, method, lr), part in log.groupby(["data", "method", "lr"], sort=False):
        means = part.groupby("iteration")["objective"].mean()
        late = means[means.index >= means.index.max() // 2]
        rises = int((late.diff() > 1e-4 * late.abs()).sum())
        tail = (f", last half {late.min():.6g} to {late.max():.6g}, standard deviation {late.std():.2g}, "
                f"rises in {rises} of {len(late) - 1} records")  # fmt: skip
        print(f"{name}, {method}, {lr:g}: {means.iloc[-1]:.6g} after {means.index[-1]}"
              + (" (diverged)" if part["diverged"].any() else tail))  # fmt: skip


STUDIES: dict[str, Study] = {
    "fig1": Study(run_regression, draw_regression),
    "fig2": Study(run_logistic, draw_logistic),
}
