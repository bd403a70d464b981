"""Steps to a gap: three geometries by two estimators, over dimension, condition, and on a logistic regression."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import torch

from examples.compare_methods.plots import blank_figure, color, legend, save, style
from examples.papers.kim2024.runs import reference_target
from examples.papers.kim2026.runs import ESTIMATORS, GEOMETRIES, divergence, steps_to
from torchngvi import fit
from torchngvi.expectations import Quadrature
from torchngvi.models import GeneralizedLinear, LogJoint
from torchngvi.posteriors import CholeskyGaussian

_PANELS = {"d": "Gaussian, κ = 4: gap 0.1", "κ": "Gaussian, d = 4: gap 0.1", "1/gap": "Logistic regression, d = 5"}


def run_geometries(
    dims: Sequence[int] = (2, 4, 8, 16),
    kappas: Sequence[float] = (1, 4, 16, 64),
    inverse_gaps: Sequence[float] = (1, 2, 5, 10, 20),
    gap: float = 0.1,  # nats, on Gaussian targets
    runs: int = 8,
    limit: int = 1000,
    full: bool = False,
) -> pd.DataFrame:
    """The steps of each geometry with each estimator, at the best constant step of a grid for each."""
    if full:
        dims, kappas, runs, limit = (*dims, 32), (*kappas, 256), 4 * runs, 10 * limit
    rows = []
    for names in _pairs():
        for varied, values in (("d", dims), ("κ", kappas)):
            for x in values:
                dim, kappa = (int(x), 4.0) if varied == "d" else (4, float(x))
                target = reference_target(dim, kappa)
                longest = 1.0 if names[0] == "natural" else 2.0 / kappa
                found = steps_to(
                    LogJoint(target.log_joint), functools.partial(divergence, target=target), dim, names, longest,
                    [gap], runs=runs, limit=limit,
                )  # fmt: skip
                rows.append(_row(varied, x, names, found[0]))
        rows += _on_logistic(names, inverse_gaps, runs, limit)
    return pd.DataFrame(rows)


def _pairs() -> Iterator[tuple[str, str]]:
    """Every geometry with every estimator."""
    for geometry in GEOMETRIES:
        for estimator in ESTIMATORS:
            yield geometry, estimator


def _row(varied: str, x: float, names: tuple[str, str], found: tuple[int, float]) -> dict[str, float | str]:
    return {"varied": varied, "x": x, "geometry": names[0], "estimator": names[1], "steps": found[0], "lr": found[1]}


def _on_logistic(
    names: tuple[str, str], inverse_gaps: Sequence[float], runs: int, limit: int
) -> list[dict[str, float | str]]:
    """The same on 100 rows of a logistic regression, whose optimum is found by quadrature."""
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(100, 5, dtype=torch.float64, generator=generator)
    y = (torch.rand(100, dtype=torch.float64, generator=generator) < torch.sigmoid(X[:, 0] - X[:, 1])).double()
    model = GeneralizedLinear(X, y)
    best = CholeskyGaussian(5, dtype=torch.float64)
    fit(best, model, progress=False)
    exact = Quadrature()
    with torch.no_grad():
        least = float(best.loss(exact(best, model)))
    largest = float(torch.linalg.eigvalsh(X.mT @ X / 4)[-1]) + 1
    longest = 1.0 if names[0] == "natural" else 2.0 / largest
    found = steps_to(
        model, lambda q: q.loss(exact(q, model)) - least, 5, names, longest, [1 / x for x in inverse_gaps],
        runs=runs, limit=limit,
    )  # fmt: skip
    return [_row("1/gap", x, names, each) for x, each in zip(inverse_gaps, found, strict=True)]


def draw_geometries(log: pd.DataFrame, path: Path) -> None:
    """Draw the steps against each of d, κ and 1/gap: a colour for each geometry, a dash for each estimator."""
    figure = blank_figure(
        12.4, 3.9, "Steps to a mean gap from the optimum, one draw a step, best constant step of a grid",
        "Start N(0, I), means of independent runs; a point is left "
        "out where no step of the grid reached the gap before the limit.",
    )  # fmt: skip
    for axes, (varied, title) in zip(figure.subplots(1, 3), _PANELS.items(), strict=True):
        style(axes, title, varied, "steps" if varied == "d" else "")
        part = log[(log["varied"] == varied) & (log["steps"] > 0)]
        for index, geometry in enumerate(GEOMETRIES):
            for kind, estimator in enumerate(ESTIMATORS):
                line = part[(part["geometry"] == geometry) & (part["estimator"] == estimator)]
                axes.loglog(line["x"], line["steps"], color=color(index), marker="o", markersize=4, linewidth=1.4,
                            linestyle=("-", (0, (4, 2)))[kind], label=f"{geometry}, {estimator}")  # fmt: skip
        ticks = sorted(log.loc[log["varied"] == varied, "x"].unique())
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()
    legend(figure)
    save(figure, path)
    table = log.pivot_table(index=["varied", "x"], columns=["geometry", "estimator"], values="steps").astype(int)
    print(table.astype(str).replace("-1", "beyond").to_string())
