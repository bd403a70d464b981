"""The steps of `torchngvi.fit` for a flat posterior without an optimizer: which method, and how long its steps are."""

from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from torchngvi.errors import InputError
from torchngvi.expectations import StatisticRegression
from torchngvi.fitting.smoothed import SmoothedSteps
from torchngvi.methods.ifvb import IFVB
from torchngvi.models.arguments import bound
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors.flat import ExponentialFamily
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior
from torchngvi.rules import NaturalGradient
from torchngvi.stepsizes import KLRadius, PowerSchedule

_TOLERANCE = 1e-6  # of exponential families
_TRUST = 0.245  # nats, ½ · 0.7², a step of an exponential family
_UNTIL = 20  # steps of γ near 1, before they fall
_FIRST = _UNTIL**0.75


def usual_steps(q: FlatPosterior, target: Any, tolerance: object = None) -> SmoothedSteps:
    """The engine of `torchngvi.fit` for a flat posterior without an optimizer.

    It is `IFVB` with ρ_k = (100 + k)^-¾; of an `ExponentialFamily` natural gradients by `StatisticRegression`, with
    γ_k = (1 + k/20)^-¾, which solve a conjugate problem to rounding.

    Args:
        q: the posterior, without batch dimensions.
        target: a log joint, or a `Target`.
        tolerance: the natural-gradient norm at which a family has converged; for others it has to be None.

    Returns:
        The engine; none of its steps is longer than 0.1 nats, of a family 0.245.

    Raises:
        InputError: a batch of runs, a tolerance for a posterior that is no exponential family.

    >>> import torch
    >>> from torchngvi.posteriors.flat import MeanFieldGaussian
    >>> engine = usual_steps(MeanFieldGaussian(torch.zeros(2)), lambda theta: -theta.square().sum(-1))
    >>> engine.name, engine.window
    ('IFVB', 100)
    """
    if isinstance(q, ExponentialFamily):
        tolerance = _TOLERANCE if tolerance is None else bound("tolerance", tolerance, "bounds the norm")
        steps = NaturalGradientVI(
            q, NaturalGradient(), _FIRST, step_size=KLRadius(_TRUST), estimator=StatisticRegression()
        )
        return SmoothedSteps(steps, target, LambdaLR(steps, PowerSchedule(0.75, _UNTIL - 1)), tolerance=tolerance)
    if tolerance is not None:
        raise InputError(
            "tolerance bounds the natural-gradient norm, and that of stochastic gradients does not vanish: "
            f"{type(q).__name__} is fitted until its smoothed bound stops rising. Leave tolerance out, or say when to "
            "end by stop=."
        )
    optimizer = IFVB(q)
    return SmoothedSteps(optimizer, target, LambdaLR(optimizer, PowerSchedule(0.75, 100.0)))
