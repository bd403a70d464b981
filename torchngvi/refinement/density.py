"""Refined densities: draws, moments, the log joint that they are about, and importance sampling."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from torchngvi.derivatives import energy_and_gradient
from torchngvi.diagnostics.importance import Proposal, smoothed, worth
from torchngvi.diagnostics.linear_response import Residuals, finite_pairs, third_order
from torchngvi.errors import InputError
from torchngvi.expectations.draws import Fixed
from torchngvi.interfaces import Target
from torchngvi.models import LogJoint
from torchngvi.models.factors import Guarded
from torchngvi.numerics.arrays import writable
from torchngvi.posteriors.gaussian import Gaussian

DRAWS = 1024  # by which a density is judged
LOG_TAU = 0.5 * math.log(2 * math.pi)
LogDensity = Callable[[Tensor], Tensor]  # points (N, D) -> (N,), differentiable

# What a refined posterior offers: draws, a density, moments


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
    def log_prob(self, theta: Tensor) -> Tensor:
        """log q(θ), (*sample,), at θ (*sample, D).

        Raises:
            InputError: θ of another width than D.
        """

    def _flat(self, theta: Tensor) -> Tensor:
        """θ as (N, D)."""
        if theta.shape[-1] != self.dim:
            raise InputError(f"theta must end in D = {self.dim}; got shape {tuple(theta.shape)}.")
        return theta.reshape(-1, self.dim)

    def _seeded(self, count: int, seed: int) -> Tensor:
        """Draw so many times by a seed."""
        return self.sample(count, torch.Generator(next(self.buffers()).device).manual_seed(seed))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (D,) and covariance (D, D)."""
        draws = self._seeded(16_384, 0)
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
        draws = self._seeded(16_384, 0)
        at = torch.as_tensor(writable(levels), dtype=draws.dtype, device=draws.device).reshape(-1)
        if not bool(((at > 0) & (at < 1)).all()):
            raise InputError(f"levels are probabilities between 0 and 1; got {at.tolist()}.")
        return draws.quantile(at, dim=0)


# The log joint that a refinement is about, each evaluation of it counted, and how near a density comes to it


class Joint:
    """log p^(1/γ) as a function of points (N, D), with counts of what was asked; errors become -∞."""

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

    @property
    def gradients(self) -> int:
        """Points at which a gradient was wanted."""
        return self.target.gradients

    @property
    def values(self) -> int:
        """Points at which none was."""
        return self.target.values

    def __call__(self, theta: Tensor) -> Tensor:
        """log p(θ)/γ, (N,); -∞ or NaN where the log joint fails."""
        if torch.is_grad_enabled() and theta.requires_grad:
            return self.target.log_joint(theta) / self.temperature
        return torch.cat([self.target.log_joint(part) for part in theta.split(4096)]) / self.temperature


def residuals_of(log_density: LogDensity, fewest: int, seed: int, like: Tensor) -> Residuals:
    """How far the gradient of a log density is from that of N(0, I), at so many draws or 16 D; less those that fail."""
    z = Fixed(max(fewest, 16 * len(like)), seed=seed)(like)
    energy, gradient = energy_and_gradient(LogJoint(log_density), z)
    return finite_pairs(Residuals(z, torch.where(energy.isfinite()[:, None], gradient - z, torch.nan)))


def widened(q: Gaussian, log_density: LogDensity, seed: int, fewest: int = 512) -> Proposal:
    """A proposal as wide as the linear response of a log density in the frame of q."""
    kept = residuals_of(log_density, fewest, seed, q.mean_probe.detach())
    return Proposal(q, third_order(*kept).matrix if len(kept.z) >= fewest // 2 else None)


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

    @classmethod
    def of(cls, log_weights: Tensor) -> Self:
        """Judge a density by its log importance weights at its own draws, (S,)."""
        weights = smoothed(log_weights)
        elbo, error = float(log_weights.mean()), float(log_weights.std()) / math.sqrt(len(log_weights))
        if not math.isfinite(elbo):
            elbo, error = -math.inf, math.nan
        share = DRAWS / len(log_weights)
        evidence = float(log_weights.logsumexp(0)) - math.log(len(log_weights))
        return cls(elbo, error, evidence, share * float(weights.effective), float(weights.k_hat))


@torch.no_grad()
def quality(density: Density, joint: Joint, seed: int) -> Quality:
    """Judge a density by log w = log p/γ - log q at 1,024 of its draws."""
    theta = density._seeded(DRAWS, seed)
    return Quality.of(joint(theta) - density.log_prob(theta))


# Weighted draws: importance sampling from q and wide t distributions beside it, from values of the log joint


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


@torch.no_grad()
def weighted_draws(q: Gaussian, joint: Joint, seed: int) -> tuple[WeightedDraws, Quality, Proposal] | None:
    """Draw 2,048 times from q and from t distributions as wide as its linear response, and weigh by p."""
    frame = q.frame()
    wider = widened(q, lambda x: joint(frame.mean + frame.push(x)), seed)
    theta, x = wider.draws(2048, torch.Generator().manual_seed(seed))
    log_weights = joint(theta) - wider.log_density(x)[0]
    if not bool(log_weights.isfinite().any()) or bool(log_weights.isnan().any()):
        return None
    return WeightedDraws(theta, smoothed(log_weights).log_weights), Quality.of(log_weights), wider
