"""Runs of one method over a flat posterior, and the lines of their log."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from examples.compare_methods.stepping import steps
from torchngvi.ifvb import (
    AIFVB,
    Averaging,
    FlatPosterior,
    GradientEstimator,
    PreconditionedVI,
)
from torchngvi.interfaces import Metric
from torchngvi.rules import ExponentialAverage
from torchngvi.stepsizes import Clip, Constant, PowerSchedule

Build = Callable[[Any, torch.Generator], PreconditionedVI]  # q, the source of its draws
_REPORTS = 60  # lines of a log a run


def recipe(
    metric: Callable[[], Metric],
    lr: float = 1.0,
    *,
    estimator: Callable[[], GradientEstimator],
    schedule: PowerSchedule = PowerSchedule(0.75, 100.0),  # noqa: B008  frozen
    clip: float | None = None,
    momentum: float | None = None,
    averaging: Averaging | None = None,
) -> Build:
    """A function that makes an optimizer of one method, whose schedule moves on with each step."""

    def build(q: FlatPosterior, generator: torch.Generator) -> PreconditionedVI:
        parts: list[Any] = [metric(), estimator()]
        for part in parts:
            part.generator = generator
        learnt, gradient = parts
        settings: dict[str, Any] = {
            "estimator": gradient,
            "step_size": Constant() if clip is None else Clip(clip),
            "momentum": None if momentum is None else ExponentialAverage(momentum),
        }
        if averaging is None:
            optimizer = PreconditionedVI(q, learnt, lr, **settings)
        else:
            optimizer = AIFVB(q, lr, metric=learnt, averaging=averaging, **settings)
        scheduler = LambdaLR(optimizer, schedule)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    return build


def _moments(iterations: int) -> set[int]:
    """When to write a line: 0, 1, 2, 5, 10 .. and evenly."""
    early = {base * 10**power for base in (1, 2, 5) for power in range(5)}
    even = {round(iterations * part / _REPORTS) for part in range(1, _REPORTS + 1)}
    return {0} | {step for step in early | even if 1 <= step <= iterations}


def logged(
    name: str,
    q: FlatPosterior,
    build: Build,
    target: Any,
    iterations: int,
    measure: Callable[[Tensor], Mapping[str, Tensor]],  # λ (seeds, D) -> columns, (seeds,) each
    *,
    seed: int = 0,
    both: bool = False,
) -> list[dict[str, Any]]:
    """Run one method, and log it; with an average its values are logged, and with ``both`` the iterate's as well."""
    optimizer = build(q, torch.Generator().manual_seed(seed))
    lines: list[dict[str, Any]] = []
    for at, spent, _ in steps(lambda _: optimizer.step(target), iterations, _moments(iterations)):
        estimates = {name: q.vector.detach()}
        if isinstance(optimizer, AIFVB):
            estimates = {name: optimizer.average} | ({f"{name}, iterate": q.vector.detach()} if both else {})
        memory, seeds = optimizer.memory, q.batch_shape.numel()
        for label, lam in estimates.items():
            columns = {key: np.atleast_1d(value.numpy()) for key, value in measure(lam).items()}
            for index in range(seeds):
                lines.append(
                    {"method": label, "seed": index, "iteration": at}
                    | {key: float(value[index]) for key, value in columns.items()}
                    | {
                        "log_joint_draws": optimizer.gradients + optimizer.values,
                        "fisher_draws": memory["metric"]["fisher_draws"],
                        "seconds": spent / seeds,
                        "rejected": float(memory["rejections"].reshape(-1)[index]),
                    }
                )
    return lines
