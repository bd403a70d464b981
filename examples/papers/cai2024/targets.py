"""Batch and match beside natural gradients from as many gradients: the gap of the ELBO over gradients."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from examples.compare_methods.plots import blank_figure, color, legend, save, style
from examples.compare_methods.stepping import steps as looks
from examples.compare_methods.stepping import unguarded
from examples.papers.cai2024.matching import BatchAndMatch
from examples.papers.kim2024.runs import reference_target
from examples.papers.kim2026.runs import divergence
from examples.papers.open_questions.problems import MODELS, exact_loss, solved
from torchngvi.errors import RejectedStepWarning
from torchngvi.expectations import Independent, LeastSquaresStein, Stein
from torchngvi.interfaces import Target
from torchngvi.methods import SRVN, VN
from torchngvi.models import GeneralizedLinear, LogJoint
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.stepsizes import Constant

_START = 0.3  # C = 0.3 I and m = 0 for all
MATCHING = "batch and match"
METHODS = {"SR-VN, Stein": (SRVN, Stein), "VN, Stein": (VN, Stein), "VN, least squares": (VN, LeastSquaresStein)}


class Problem(NamedTuple):
    """A target, and the gap of a batch of posteriors in nats above the optimum among Gaussians.

    >>> problem("Gaussian").dim
    8
    """

    dim: int
    target: Target
    gap: Callable[[CholeskyGaussian], Tensor]


def problem(name: str) -> Problem:
    """A Gaussian target with condition 16 in 8 dimensions, or a model of `open_questions`."""
    if name == "Gaussian":
        goal = reference_target(8, 16.0)
        return Problem(8, LogJoint(goal.log_joint), lambda q: divergence(q, goal))
    model: GeneralizedLinear = MODELS[name]()
    least = solved(model)[1]
    return Problem(model.dim, model, lambda q: exact_loss(q, model) - least)


def run_targets(
    targets: Sequence[str] = ("Gaussian", "diabetes", "Poisson, 60 rows", "logistic, 30 rows"),
    draws: int = 32,
    runs: int = 16,
    length: int = 400,
    steps: Sequence[float] = (1.0, 0.5, 0.2, 0.1, 0.05),
    factors: Sequence[float] = (0.1, 1.0, 10.0),
    full: bool = False,
) -> pd.DataFrame:
    """Run each method with each constant of its grid; λ_t = factor · BD/(t + 1), γ_t = step · min(1, 100/(t + 1))."""
    rows = []
    for name in targets:
        each = problem(name)
        limit = limit_of(each, 4096 if length > 50 else 256)
        for method, grid in {MATCHING: factors, **dict.fromkeys(METHODS, steps)}.items():
            for constant in grid:
                log = _runs(each, method, constant, draws, 4 * runs if full else runs, length)
                rows.append(log.assign(target=name, method=method, constant=constant, limit=limit))
    return pd.concat(rows, ignore_index=True)


def limit_of(each: Problem, draws: int) -> float:
    """The mean gap at which batch and match stays with many draws, where its own divergence is least, not
    the ELBO's.
    """
    q = CholeskyGaussian(each.dim, scale=_START, dtype=torch.float64)
    matching, gaps = BatchAndMatch(q, draws, torch.Generator().manual_seed(1)), []
    for number in range(40):
        matching.step(each.target, 100.0 if number < 15 else 1.0)
        gaps.append(float(each.gap(q).detach()))
    return sum(gaps[-20:]) / 20


def _runs(each: Problem, method: str, constant: float, draws: int, runs: int, length: int) -> pd.DataFrame:
    q, generator = CholeskyGaussian(each.dim, (runs,), scale=_START, dtype=torch.float64), torch.Generator()
    generator.manual_seed(0)
    if method == MATCHING:
        matching = BatchAndMatch(q, draws, generator)

        def step(number: int) -> None:
            matching.step(each.target, constant * draws * each.dim / number)
    else:
        make, estimator = METHODS[method]
        opt = unguarded(make(q, lr=constant, step_size=Constant(), estimator=estimator(Independent(draws, generator))))

        def step(number: int) -> None:
            opt.param_groups[0]["lr"] = constant * min(1.0, 100 / number)
            opt.step(each.target)

    due = {0, *np.geomspace(1, length, 30).round().astype(int).tolist()}
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RejectedStepWarning)
        for t, *_ in looks(step, length, due):
            with torch.no_grad():
                gap = each.gap(q).nan_to_num(torch.inf, torch.inf)
            rows.append({"step": t, "gradients": t * draws, "gap": float(gap.mean()), "median": float(gap.median())})
    return pd.DataFrame(rows)


def best(log: pd.DataFrame) -> pd.DataFrame:
    """Of each target and method the runs with the constant that has the least mean log gap over the records."""
    score = np.log(log["gap"].clip(1e-12, 1e12)).groupby([log[key] for key in ("target", "method", "constant")]).mean()
    chosen = score.reset_index().sort_values("gap", kind="stable").drop_duplicates(["target", "method"])
    return log.merge(chosen[["target", "method", "constant"]])


def draw_targets(log: pd.DataFrame, path: Path) -> None:
    """Draw the mean gaps of the best constants over gradients, one panel a target."""
    targets = list(dict.fromkeys(log["target"]))
    figure = blank_figure(
        3.1 * len(targets) + 1.9, 3.5, "Gap of the ELBO over gradients, 32 a step, the best constant of a grid",
        "means of the runs from N(0, 0.09 I). In each panel the constants, in the order of the legend",
    )  # fmt: skip
    kept = best(log)
    for axes, target in zip(figure.subplots(1, len(targets), squeeze=False)[0], targets, strict=True):
        style(axes, target, "gradients", "nats" if target == targets[0] else "")
        constants = []
        for index, method in enumerate((MATCHING, *METHODS)):
            line = kept[(kept["target"] == target) & (kept["method"] == method) & (kept["step"] > 0)]
            axes.loglog(line["gradients"], line["gap"].clip(lower=1e-9), color=color(index), linewidth=1.4,
                        label=method)  # fmt: skip
            constants.append(f"{line['constant'].iloc[0]:g}")
        axes.text(0.97, 0.97, ", ".join(constants), transform=axes.transAxes, fontsize=7, ha="right", va="top")
    legend(figure)
    save(figure, path)
    print(summary(log).to_string())


def summary(log: pd.DataFrame, goals: Sequence[float] = (1.0, 0.1, 0.01)) -> pd.DataFrame:
    """The gradients to each gap with the best constant for each gap, "beyond" if none, and the last gap of the best."""
    rows = []
    for (target, method), part in log.groupby(["target", "method"], sort=False):
        row: dict[str, object] = {"target": target, "method": method}
        for goal in goals:
            reached = part.loc[(part["gap"] <= goal) & (part["step"] > 0), "gradients"]
            row[f"to {goal:g}"] = int(reached.min()) if len(reached) else "beyond"
        row["limit"] = f"{part['limit'].iloc[0]:.2g}" if method == MATCHING else ""
        row["last"] = f"{part.loc[part['step'] == part['step'].max(), 'gap'].min():.2g}"
        rows.append(row)
    return pd.DataFrame(rows).set_index(["target", "method"])
