"""Example 4, Figure 5: a network with the group lasso on red wine."""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from examples.compare_methods.datasets import provided
from examples.compare_methods.plots import blank_figure, legend, save, style
from examples.compare_methods.stepping import steps
from examples.papers.godichon2023.drawing import X_LABELS, median_and_range, summary
from examples.papers.godichon2023.problems import (
    FLOAT,
)
from examples.papers.godichon2023.runs import Build, recipe
from torchngvi.ifvb import (
    AIFVB,
    Adam,
    Averaging,
    BatchFisher,
    Exact,
    GroupLassoNetwork,
    Pathwise,
    PreconditionedVI,
    PublishedNAGVAC,
    RankOneGaussian,
    Recursive,
)
from torchngvi.interfaces import Metric
from torchngvi.stepsizes import PowerSchedule


def _wine(seed: int) -> tuple[Tensor, ...]:
    """800, 100 and 100 of the red wines, standardised by the first; 11 covariates as in the paper's data."""
    path = provided("uci_regression/wine_red.npz", "the table of Example 4 (red wine for Direct Marketing)")
    with np.load(path) as arrays:
        X, y = arrays["X"].astype(float), arrays["y"].astype(float).reshape(-1)
    rows = np.random.default_rng(seed).permutation(len(y))[:1000]
    X, y = X[rows], y[rows]
    X, y = (X - X[:800].mean(0)) / X[:800].std(0), (y - y[:800].mean()) / y[:800].std()
    return torch.as_tensor(X), torch.as_tensor(y)


def _network_methods(draws: int) -> dict[str, Build]:
    constant = PowerSchedule(0.0)

    def plain(metric: Callable[[], Metric], lr: float, **settings: Any) -> Build:
        limited: dict[str, Any] = {"schedule": constant, "momentum": 0.6, "clip": 100.0} | settings
        return recipe(metric, lr, estimator=lambda: Pathwise(draws), **limited)

    def recursion() -> Recursive:
        return Recursive(20, eps=1.0, c_beta=0.001, beta=0.09, warmup=0)

    return {
        "NAGVAC": plain(PublishedNAGVAC, 0.05),
        "exact natural gradient": plain(Exact, 0.05),
        "IFVB": plain(recursion, 0.01),
        "AIFVB": plain(recursion, 0.01, averaging=Averaging(2.0)),
        "damped batch Fisher": plain(lambda: BatchFisher(50), 0.01),
        "Adam": plain(Adam, 0.005, momentum=None, clip=None),
    }


def _step(optimizer: PreconditionedVI, network: GroupLassoNetwork, number: int) -> Tensor:
    """One step of q, one of the penalties, and after the first ten one of the noise; the mean of q."""
    optimizer.step(network)
    mean, b, c = optimizer.posterior.vector.detach().chunk(3)
    network.update_groups(mean, b.square() + c.square())
    if number > 10:
        network.update_noise(mean)
    return mean


def run_network(
    iterations: int = 400, seeds: int = 3, draws: int = 10, hidden: Sequence[int] = (10, 10), full: bool = False
) -> pd.DataFrame:
    """Run Example 4: errors on validation and test data, "best" where validation was lowest so far."""
    lines = []
    for seed in range(10 if full else seeds):
        X, y = _wine(seed)
        for name, build in _network_methods(draws).items():
            generator = torch.Generator().manual_seed(seed)
            network = GroupLassoNetwork(X[:800], y[:800], hidden)
            start, d = network.start(generator), network.dim
            factor = 0.01 * torch.randn(d, dtype=FLOAT, generator=generator)
            q = RankOneGaussian(start, factor, torch.full((d,), 0.01, dtype=FLOAT))
            optimizer = build(q, generator)
            best, at_best = math.inf, math.nan
            step = functools.partial(_step, optimizer, network)
            for number, spent, mean in steps(step, 1000 if full else iterations):
                at = optimizer.average[:d] if isinstance(optimizer, AIFVB) else mean
                error = (network.predict(at, X[800:]) - y[800:]).square()
                validation, test = float(error[:100].mean()), float(error[100:].mean())
                if validation < best:
                    best, at_best = validation, test
                lines.append(
                    {"method": name, "seed": seed, "iteration": number, "validation": validation, "test": test}
                    | {"best_validation": best, "best": at_best, "seconds": spent, "rejected": optimizer.rejections}
                    | {"log_joint_draws": optimizer.gradients + optimizer.values}
                    | {"fisher_draws": optimizer.memory["metric"]["fisher_draws"]}
                )
    return pd.DataFrame(lines)


def draw_network(log: pd.DataFrame, path: Path) -> None:
    """Draw Figure 5, the error on validation data over iterations and over time."""
    title = "Figure 5: a network with the group lasso on red wine"
    figure = blank_figure(
        10.5, 3.7, title, "lowest error so far on the 100 validation rows: median over splits, band of the middle half"
    )
    for axes, x in zip(figure.subplots(1, 2), ("iteration", "seconds"), strict=True):
        style(axes, "", X_LABELS[x], "mean squared error (standardised)" if x == "iteration" else "")
        median_and_range(axes, log, "best_validation", x, levels=(0.25, 0.75))
        axes.set(xscale="log")
    legend(figure)
    save(figure, path)
    summary(log, "best_validation", path, "Example 4: lowest validation error")
    summary(
        log, "best", path.with_name(path.name + "-test"), "Example 4: test error of the iterate chosen by validation"
    )
