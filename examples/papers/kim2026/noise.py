"""The noise of one draw of either gradient, at the start and at the optimum, measured and in closed form."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch

from examples.compare_methods.plots import blank_figure, color, legend, save, style
from examples.papers.kim2024.runs import optimum, reference_target
from examples.papers.kim2026.runs import ESTIMATORS
from torchngvi.diagnostics import compare_estimators
from torchngvi.expectations import Independent
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.theory.kim2024 import GaussianTarget


def exact_variance(estimator: str, q: CholeskyGaussian, target: GaussianTarget) -> float:
    """E‖ĝ - g‖² of one draw in the squared natural norm, on a Gaussian target.

    >>> target = GaussianTarget(torch.zeros(3), torch.eye(3))
    >>> [exact_variance(name, CholeskyGaussian(3), target) for name in ESTIMATORS]
    [3.0, 9.0]
    """
    C = q.scale_tril
    A, b = C.mT @ target.precision @ C, C.mT @ (target.precision @ (q.mean - target.mean))
    size = float(A.square().sum())
    if estimator == "Price":
        return size
    squares = 0.5 * ((q.dim + 4) * size + float(A.trace()) ** 2) - size
    return size + 0.5 * (0.5 * (q.dim + 1) * float(b.square().sum()) + squares)


def run_noise(
    dims: Sequence[int] = (2, 4, 8, 16, 32), kappa: float = 4.0, repeats: int = 200, full: bool = False
) -> pd.DataFrame:
    """The variance of each estimator at N(0, I) and at the optimum, over the dimension."""
    rows = []
    for dim in dims:
        target = reference_target(dim, kappa)
        q = CholeskyGaussian(dim, dtype=torch.float64)
        for place in ("start", "optimum"):
            if place == "optimum":
                q.initialize_(target.mean, optimum(target))
            noise = Independent(1, torch.Generator().manual_seed(0))
            made = {name: make(noise) for name, make in ESTIMATORS.items()}
            found = compare_estimators(q, target.log_joint, made, repeats=10 * repeats if full else repeats)
            for name in ESTIMATORS:
                rows.append({"place": place, "dim": dim, "estimator": name, "norm2": found.norm**2,
                             "variance": found[name].variance, "exact": exact_variance(name, q, target)})  # fmt: skip
    return pd.DataFrame(rows)


def draw_noise(log: pd.DataFrame, path: Path) -> None:
    """Draw the variances over the dimension: points measured, lines in closed form."""
    figure = blank_figure(
        9.4, 3.7, "Variance of one draw of the gradient, squared natural norm, Gaussian target, κ = 4",
        "points: measured; lines: closed form",
    )  # fmt: skip
    for axes, place in zip(figure.subplots(1, 2, sharey=True), ("start", "optimum"), strict=True):
        style(axes, {"start": "at the start N(0, I)", "optimum": "at the optimum"}[place], "d")
        for index, name in enumerate(ESTIMATORS):
            part = log[(log["place"] == place) & (log["estimator"] == name)]
            axes.loglog(part["dim"], part["variance"], "o", color=color(index), markersize=5,
                        label=f"{name}, measured")  # fmt: skip
            axes.loglog(part["dim"], part["exact"], color=color(index), linewidth=1.3, label=f"{name}, closed form")
        ticks = sorted(log["dim"].unique())
        axes.set_xticks(ticks, [str(dim) for dim in ticks])
        axes.minorticks_off()
    legend(figure)
    save(figure, path)
    print(
        log.pivot_table(index=["place", "dim"], columns="estimator", values=["variance", "exact"]).round(1).to_string()
    )
