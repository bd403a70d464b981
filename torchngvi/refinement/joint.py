"""The log joint that a refinement is about, each evaluation of it counted, and how near a density comes to it."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.diagnostics.psis import smoothed, worth
from torchngvi.errors import InputError
from torchngvi.interfaces import Target
from torchngvi.models.guarded import Guarded
from torchngvi.refinement.density import Density

_AT_ONCE = 4096  # values in one call
DRAWS = 1024  # by which a density is judged

LogDensity = Callable[[Tensor], Tensor]  # points (N, D) -> (N,), differentiable


class Joint:
    """log p^(1/γ) as a function of points (N, D), with counts of what was asked.

    Attributes:
        target: the log joint, its errors become -∞.
        values: points at which no gradient was wanted.

    >>> from torchngvi import LogJoint
    >>> joint = Joint(LogJoint(lambda theta: -0.5 * theta.square().sum(-1)))
    >>> joint(torch.ones(3, 2)).tolist(), joint.values
    ([-1.0, -1.0, -1.0], 3)
    """

    def __init__(self, target: Target) -> None:
        if target.temperature == 0:
            raise InputError(
                "refine looks for the density exp(log joint / temperature), and there is none at temperature 0. Use a "
                "positive temperature."
            )
        if not target.comparable:
            raise InputError(
                f"refine compares values of the log joint, and {type(target).__name__} gives others at each call. "
                "Give the log joint of all data, or a DataLogJoint."
            )
        self.target = Guarded(target)
        self.temperature = target.temperature
        self.values = 0

    @property
    def gradients(self) -> int:
        """Points at which a gradient was wanted."""
        return self.target.gradients

    def __call__(self, theta: Tensor) -> Tensor:
        """log p(θ)/γ, (N,); -∞ or NaN where the log joint fails."""
        if torch.is_grad_enabled() and theta.requires_grad:
            return self.target.log_joint(theta) / self.temperature
        self.values += len(theta)
        return torch.cat([self.target.log_joint(part) for part in theta.split(_AT_ONCE)]) / self.temperature


def value_and_gradient(
    log_density: LogDensity,
    points: Tensor,  # (N, D)
    at_once: int = 2048,
) -> tuple[Tensor, Tensor]:  # (N,), (N, D)
    """Evaluate a log density and its gradient at points.

    >>> value_and_gradient(lambda x: -0.5 * x.square().sum(-1), torch.ones(1, 2))
    (tensor([-1.]), tensor([[-1., -1.]]))
    """
    values, gradients = [], []
    for part in points.split(at_once):
        with torch.enable_grad():
            x = part.detach().requires_grad_()
            value = log_density(x)
            (gradient,) = torch.autograd.grad(value.sum(), x)
        values.append(value.detach())
        gradients.append(gradient)
    return torch.cat(values), torch.cat(gradients)


class Quality(NamedTuple):
    """How near a density comes to the posterior, by importance weights w = p^(1/γ)/q at its own draws."""

    elbo: float  # mean of log w, in nats at temperature 1; -∞ where a draw has no finite log joint
    error: float  # its standard error
    log_evidence: float  # log of the mean of w
    effective: float  # what the smoothed weights are worth, of 1,024 draws
    k_hat: float

    @property
    def worth(self) -> str:
        """What the importance weights are worth, in words."""
        return worth(self.k_hat, self.effective, DRAWS)


@torch.no_grad()
def quality(density: Density, joint: Joint, seed: int) -> Quality:
    """Judge a density by log w = log p/γ - log q at 1,024 of its draws.

    >>> from torchngvi import LogJoint
    >>> from torchngvi.refinement import LayeredGaussian
    >>> q = LayeredGaussian(torch.zeros(1), torch.eye(1))
    >>> found = quality(q, Joint(LogJoint(lambda theta: -0.5 * theta.square().sum(-1))), seed=0)
    >>> round(found.elbo, 4), found.k_hat  # ½ log 2π
    (0.9189, 0.0)
    """
    device = next(density.buffers()).device
    theta = density.sample(DRAWS, torch.Generator(device).manual_seed(seed))
    log_weights = joint(theta) - density.log_prob(theta)
    return quality_of(log_weights)


def quality_of(
    log_weights: Tensor,  # (S,)
) -> Quality:
    """Judge a density by its log importance weights at its own draws.

    >>> round(quality_of(torch.zeros(256)).effective)
    1024
    """
    weights = smoothed(log_weights)
    elbo, error = float(log_weights.mean()), float(log_weights.std()) / math.sqrt(len(log_weights))
    if not math.isfinite(elbo):
        elbo, error = -math.inf, math.nan
    share = DRAWS / len(log_weights)
    evidence = float(log_weights.logsumexp(0)) - math.log(len(log_weights))
    return Quality(elbo, error, evidence, share * float(weights.effective), float(weights.k_hat))
