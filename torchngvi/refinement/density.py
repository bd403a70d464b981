"""Refined densities: draws, moments, the log joint that they are about, and importance sampling."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchngvi.diagnostics.importance import Proposal, smoothed, worth
from torchngvi.diagnostics.linear_response import third_order
from torchngvi.errors import InputError
from torchngvi.expectations.draws import Fixed
from torchngvi.interfaces import Frame, Target
from torchngvi.models.guarded import Guarded
from torchngvi.numerics.arrays import writable
from torchngvi.posteriors.gaussian import Gaussian

# What a refined posterior offers: draws, a density, moments

_DRAWS = 16_384  # of moments and quantiles that have no closed form
_SEED = 0


class Density(nn.Module, ABC):
    """A distribution over θ that can be drawn from and evaluated, without a graph.

    Moments and quantiles that have no closed form are those of 16,384 draws, the same at each call.

    >>> from torchngvi.refinement import LayeredGaussian
    >>> density = LayeredGaussian(torch.zeros(2), torch.eye(2))
    >>> isinstance(density, Density), density.sample(5).shape
    (True, torch.Size([5, 2]))
    """

    dim: int

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n times θ, (n, D)."""

    @abstractmethod
    def log_prob(
        self,
        theta: Tensor,  # (*sample, D)
    ) -> Tensor:
        """log q(θ), (*sample,).

        Raises:
            InputError: θ of another width than D.
        """

    def _flat(self, theta: Tensor) -> Tensor:
        """θ as (N, D)."""
        if theta.shape[-1] != self.dim:
            raise InputError(f"theta must end in D = {self.dim}; got shape {tuple(theta.shape)}.")
        return theta.reshape(-1, self.dim)

    def _draws(self) -> Tensor:
        device = next(self.buffers()).device
        return self.sample(_DRAWS, torch.Generator(device).manual_seed(_SEED))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (D,) and covariance (D, D)."""
        draws = self._draws()
        apart = draws - draws.mean(0)
        return draws.mean(0), apart.mT @ apart / (len(draws) - 1)

    @property
    def mean(self) -> Tensor:
        """The mean E[θ], (D,)."""
        return self.moments()[0]

    @property
    def covariance(self) -> Tensor:
        """The covariance matrix Cov[θ], (D, D)."""
        return self.moments()[1]

    @property
    def variance(self) -> Tensor:
        """The marginal variances Var[θ_k], (D,)."""
        return self.covariance.diagonal()

    @property
    def stddev(self) -> Tensor:
        """The marginal standard deviations √Var[θ_k], (D,)."""
        return self.variance.sqrt()

    def quantile(self, levels: Sequence[float] | Tensor) -> Tensor:
        """Quantiles of each coordinate, (len(levels), D).

        Raises:
            InputError: a level outside of (0, 1).
        """
        draws = self._draws()
        at = torch.as_tensor(writable(levels), dtype=draws.dtype, device=draws.device).reshape(-1)
        if not bool(((at > 0) & (at < 1)).all()):
            raise InputError(f"levels are probabilities between 0 and 1; got {at.tolist()}.")
        return draws.quantile(at, dim=0)


# The log joint that a refinement is about, each evaluation of it counted, and how near a density comes to it

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


# Weighted draws: importance sampling from q and wide t distributions beside it, from values of the log joint

_IMPORTANCE_DRAWS = 2048
_FEWEST, _EACH = 512, 16  # draws of the residuals, and a coordinate


class WeightedDraws(Density):
    """Draws of θ with weights that sum to one: moments, quantiles and resampling, and no density.

    Args:
        theta: (S, D).
        log_weights: (S,), of which the exponentials sum to one.

    >>> q = WeightedDraws(torch.tensor([[0.0], [2.0]]), torch.tensor([0.75, 0.25]).log())
    >>> q.mean.item(), q.variance.item()
    (0.5, 0.75)
    """

    theta: Tensor
    log_weights: Tensor

    def __init__(self, theta: Tensor, log_weights: Tensor) -> None:
        super().__init__()
        self.register_buffer("theta", theta)
        self.register_buffer("log_weights", log_weights.to(theta))
        self.dim = theta.shape[-1]

    def log_prob(self, theta: Tensor) -> Tensor:
        """Refused: weighted draws have none.

        Raises:
            InputError: always.
        """
        raise InputError(
            'weighted draws have no density to be evaluated. Use kind="fan" or kind="mixture" of refine for one.'
        )

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n times θ, (n, D): systematic resampling, in any order."""
        like = self.theta
        place = torch.rand((), dtype=torch.float64, device=like.device, generator=generator)
        ranks = (torch.randperm(n, device=like.device, generator=generator) + place) / n
        cumulated = self.log_weights.double().softmax(0).cumsum(0)
        return like[torch.searchsorted(cumulated, ranks).clamp_max(len(like) - 1)]

    def moments(self) -> tuple[Tensor, Tensor]:
        """The weighted mean (D,) and covariance (D, D)."""
        weights = self.log_weights.exp()
        mean = weights @ self.theta
        apart = self.theta - mean
        return mean, (apart.mT * weights) @ apart

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> "WeightedDraws":
        """The draws that a state_dict is of."""
        return cls(state["theta"], state["log_weights"])


class Wider(NamedTuple):
    """What weighted draws come from."""

    proposal: Proposal
    frame: Frame

    def draws(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw θ, (count, D), and compute the log density of the proposal there."""
        x = self.proposal.sample(count, generator)
        return self.frame.mean + self.frame.push(x), self.proposal.log_density(x)[0]


@torch.no_grad()
def weigh(q: Gaussian, joint: Joint, seed: int) -> tuple[WeightedDraws, Quality, Wider] | None:
    """Draw 2,048 times from q and from t distributions as wide as its linear response, and weigh by p."""
    frame = q.frame()
    z = Fixed(max(_FEWEST, _EACH * q.dim), seed=seed)(frame.mean)
    value, gradient = value_and_gradient(joint, frame.mean + frame.push(z))
    residual = -frame.pull(gradient) - z
    pair = (value.isfinite() & residual.isfinite().all(-1)).reshape(2, -1).all(0).repeat(2)
    M = third_order(z[pair], residual[pair]).matrix if int(pair.sum()) >= _FEWEST // 2 else None
    wider = Wider(Proposal(q, M), frame)
    theta, log_density = wider.draws(_IMPORTANCE_DRAWS, torch.Generator().manual_seed(seed))
    log_weights = joint(theta) - log_density
    if not bool(log_weights.isfinite().any()) or bool(log_weights.isnan().any()):
        return None
    return WeightedDraws(theta, smoothed(log_weights).log_weights), quality_of(log_weights), wider
