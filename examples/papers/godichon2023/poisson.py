"""Example 3, Figure 4: the Gaussian approximation of a Poisson regression."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from examples.compare_methods import plots
from examples.compare_methods.plots import blank_figure, legend, save, style
from examples.papers.godichon2023.drawing import RANGE, median_and_range, summary
from examples.papers.godichon2023.problems import (
    FLOAT,
    poisson_data,
)
from examples.papers.godichon2023.runs import Build, logged, recipe
from torchngvi import fit
from torchngvi.ifvb import (
    Adam,
    Averaging,
    BatchFisher,
    ClosedForm,
    Exact,
    FlatCholesky,
    Recursive,
)
from torchngvi.interfaces import Metric
from torchngvi.models import LogJoint
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.stepsizes import PowerSchedule


def _poisson_methods() -> dict[str, Build]:
    def recursion() -> Recursive:
        return Recursive(1, eps=1.0, c_beta=1.0, beta=0.1, warmup=1000)

    def plain(metric: Callable[[], Metric], lr: float = 1.0, **settings: Any) -> Build:
        return recipe(metric, lr, estimator=ClosedForm, **({"schedule": PowerSchedule(0.75, 1000.0)} | settings))

    return {
        "exact natural gradient": plain(Exact),
        "IFVB": plain(recursion),
        "AIFVB": plain(recursion, averaging=Averaging()),
        "damped batch Fisher": plain(lambda: BatchFisher(50)),
        "Adam": plain(Adam, 0.01, schedule=PowerSchedule(0.0)),
    }


def run_poisson(
    iterations: int = 2000, seeds: int = 10, data: Sequence[int] = (0, 1), full: bool = False
) -> pd.DataFrame:
    """Run Example 3: the lower bound of each method, from exact gradients."""
    rows = []
    for case in data:
        model = poisson_data(case)
        best = float(model.bound(*model.optimum()))
        eye = torch.eye(3, dtype=FLOAT)
        q = CholeskyGaussian(3, scale=0.1, dtype=FLOAT)
        target = LogJoint(model.log_joint)
        shape = FlatCholesky(torch.zeros(3, dtype=FLOAT), 0.01 * eye)

        def bound(lam: Tensor, model: Any = model, shape: FlatCholesky = shape) -> Tensor:
            mean, root = shape.parts(lam)
            return model.bound(mean, root @ root.mT)

        def measure(lam: Tensor, bound: Callable[[Tensor], Tensor] = bound) -> dict[str, Tensor]:
            return {"bound": bound(lam)}

        for name, build in _poisson_methods().items():
            family = FlatCholesky(torch.zeros(seeds, 3, dtype=FLOAT), (0.01 * eye).expand(seeds, 3, 3))
            runs = logged(name, family, build, bound, 5000 if full else iterations, measure)
            rows += [{"case": f"seed {case}", "best": best} | line for line in runs]
        begin = time.process_time()
        result = fit(q, target, progress=False)
        spent = time.process_time() - begin
        value = float(model.bound(q.mean, q.covariance))
        rows.append(
            {"case": f"seed {case}", "best": best, "method": "torchngvi.fit", "seed": 0, "bound": value}
            | {"iteration": result.evaluations, "seconds": spent, "rejected": 0.0}
            | {"log_joint_draws": result.trace[-1].gradients, "fisher_draws": 0}
        )
    return pd.DataFrame(rows)


def draw_poisson(log: pd.DataFrame, path: Path) -> None:
    """Draw Figure 4, the distance of the lower bound from that of the best Gaussian."""
    cases = list(dict.fromkeys(log["case"]))
    figure = blank_figure(
        4.2 * len(cases) + 2, 3.7, "Figure 4: Gaussian approximation of a Poisson regression",
        RANGE,
    )  # fmt: skip
    log = log.assign(gap=plots.gap(log["bound"], log["best"]))
    for axes, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        part = log[log["case"] == case]
        best = part["best"].iloc[0]
        style(axes, f"data of {case}: optimum {best:.5f}", "iterations", "nats below it" if case == cases[0] else "")
        curves = part[(part["iteration"] > 0) & (part["method"] != "torchngvi.fit")]
        median_and_range(axes, curves, "gap", floor=1e-12)
        done = part[part["method"] == "torchngvi.fit"].iloc[-1]
        label = "fit, over its gradients"
        axes.plot(done["log_joint_draws"], max(done["gap"], 1e-7), "k*", markersize=9, label=label)
        axes.set(xscale="log", yscale="log", ylim=(1e-7, 2e3))
    legend(figure)
    save(figure, path)
    summary(log, "gap", path, "Example 3: nats below the bound of the best Gaussian")
