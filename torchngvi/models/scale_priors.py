"""Priors of standard deviations and correlations, as densities of the coordinates that a fit moves.

With b ~ N(0, Σ), Σ = diag(τ) R diag(τ) = (W Wᵀ)⁻¹ and ω the entries of W (`torchngvi.models.mixed_prior`),

    log p(ω) = Σ_k log p(τ_k) + log p(R) - r Σ_k log τ_k - 2(r + 1) Σ_k ω_kk + Σ_k (r - k + 2) ω_kk:

the Jacobians of Σ by (τ, R), 2^r Π τ_k^r, of Σ by Ω, |Ω|^-(r+1), and of Ω by ω, 2^r Π W_kk^(r-k+2).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.models.mixed_prior import is_positive, scales_of, starts
from torchngvi.numerics.linalg import cholesky
from torchngvi.numerics.special import normal_rule

_NODES = {1: 25, 3: 9, 6: 3}  # in each dimension of ω, of one, two and three random effects
_POINTS = 512  # of which each has its mirror image, in more dimensions


class HalfNormal(NamedTuple):
    """The prior p(τ) = 2 N(τ; 0, scale²) of a standard deviation τ > 0.

    Attributes:
        scale: in the units of τ, positive.

    >>> round(HalfNormal(2.0).log_prob(torch.tensor(0.0)).exp().item(), 6)  # 2/(2 √(2π))
    0.398942
    """

    scale: float = 1.0

    def log_prob(self, sd: Tensor) -> Tensor:
        """The log density of each standard deviation."""
        constant = 0.5 * math.log(2 / math.pi) - math.log(self.scale)
        return constant - 0.5 * (sd / self.scale).square()


class HalfT(NamedTuple):
    """The prior of |x| where x has Student's t distribution with ``dof`` degrees of freedom and a scale.

    Use it where a standard deviation may be much larger than the scale says: its tail is that of a power.

    Attributes:
        dof: the degrees of freedom, positive; 1 is the half-Cauchy distribution.
        scale: in the units of τ, positive.

    >>> round(HalfT(1.0, 1.0).log_prob(torch.tensor(0.0)).exp().item(), 6)  # 2/π
    0.63662
    """

    dof: float = 3.0
    scale: float = 1.0

    def log_prob(self, sd: Tensor) -> Tensor:
        """The log density of each standard deviation."""
        half = 0.5 * (self.dof + 1)
        constant = math.lgamma(half) - math.lgamma(0.5 * self.dof) - 0.5 * math.log(self.dof * math.pi)
        return constant + math.log(2 / self.scale) - half * torch.log1p((sd / self.scale).square() / self.dof)


class Exponential(NamedTuple):
    """The prior p(τ) = rate · exp(-rate · τ) of a standard deviation τ > 0.

    Attributes:
        rate: of the units 1/τ, positive; the mean of τ is its inverse.

    >>> Exponential(2.0).log_prob(torch.tensor(0.0)).exp().item()
    2.0
    """

    rate: float = 1.0

    def log_prob(self, sd: Tensor) -> Tensor:
        """The log density of each standard deviation."""
        return math.log(self.rate) - self.rate * sd


ScalePrior = HalfNormal | HalfT | Exponential


def checked_scale(what: str, prior: object) -> ScalePrior:
    """Check the prior of a standard deviation.

    >>> checked_scale("sd", HalfT())
    HalfT(dof=3.0, scale=1.0)
    """
    if not isinstance(prior, ScalePrior):
        raise InputError(f"{what} is the prior of a standard deviation, HalfNormal, HalfT or Exponential; got {prior}.")
    if not all(is_positive(x) for x in prior):
        raise InputError(f"{what} must have positive and finite numbers; got {prior}.")
    return prior


class ScalesPrior:
    """Independent priors of the standard deviations of random effects, and LKJ of their correlations.

    R has the density |R|^(concentration - 1)/Z (Lewandowski, Kurowicka and Joe 2009).

    >>> prior = ScalesPrior(Exponential(1.0), 1.0, 1)
    >>> -prior.energy(torch.tensor([0.0])).item()  # τ = 1, and |dτ/dω| = 1
    -1.0
    """

    def __init__(self, sd: object, concentration: float, size: int, unit: float | Tensor = 1.0) -> None:
        given = list(sd) if isinstance(sd, Sequence) and not isinstance(sd, ScalePrior) else [sd] * size
        if len(given) != size:
            raise InputError(f"sd must be one prior, or one for each of the {size} random effects; got {len(given)}.")
        self.sd = [checked_scale("sd", one) for one in given]
        if not is_positive(concentration):
            raise InputError(f"concentration is that of the LKJ density, positive and finite; got {concentration!r}.")
        self.concentration, self.size, self.diagonal = float(concentration), size, starts(size)
        self.unit = torch.as_tensor(unit, dtype=torch.float64)
        self.log_normaliser = 0.0  # log Z
        for k in range(1, size):
            rest = size - k
            shape = concentration + 0.5 * (rest - 1)
            beta = 2 * math.lgamma(shape) - math.lgamma(2 * shape)
            self.log_normaliser += rest * ((2 * concentration - 2 + rest) * math.log(2) + beta)

    def energy(
        self,
        omega: Tensor,  # (*any, *batch, q)
    ) -> Tensor:
        """-log p(ω), (*any, *batch)."""
        (tau, _), unit = scales_of(omega, self.size), self.unit.to(omega)
        log_tau, diagonal = tau.log().sum(-1), omega[..., self.diagonal]
        half = diagonal.sum(-1)  # ½ log|Ω|
        log_R = -2 * (half + log_tau)
        jacobian = _to_scales(log_tau, diagonal)
        of_sd = sum(prior.log_prob(tau[..., k] / unit) - unit.log() for k, prior in enumerate(self.sd))
        return -(of_sd + (self.concentration - 1) * log_R - self.log_normaliser + jacobian)

    def expected_energy(
        self,
        mean: Tensor,  # of ω, (*batch, q)
        covariance: Tensor,  # (*batch, q, q)
    ) -> Tensor:
        """Compute E[-log p(ω)] under a Gaussian, (*batch,), by quadrature, differentiable in both."""
        z, log_w = _rule(mean.shape[-1], mean)
        omega = mean + torch.einsum("kj,...ij->k...i", z, cholesky(covariance)[0])
        return torch.einsum("k,k...->...", log_w.exp(), self.energy(omega))

    def settings(self) -> tuple[object, ...]:
        """Return the numbers of the priors."""
        unit = tuple(self.unit.flatten().tolist())
        return (*((type(one).__name__, *one) for one in self.sd), self.concentration, *unit)


def _rule(dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and log weights for expectations over ω under a standard normal distribution."""
    if dim in _NODES:
        return normal_rule(_NODES[dim], dim, like)
    sobol = torch.quasirandom.SobolEngine(dim, scramble=True, seed=0).draw(_POINTS, dtype=torch.float64)
    z = torch.special.ndtri(sobol.clamp(1e-9, 1 - 1e-9))
    z = torch.cat([z, -z])
    z = torch.linalg.solve_triangular(torch.linalg.cholesky(z.mT @ z / len(z)), z.mT, upper=False).mT
    return z.to(like), torch.full((len(z),), -math.log(len(z)), dtype=like.dtype, device=like.device)


def _to_scales(
    log_tau: Tensor,  # Σ log τ_k, (*any,)
    diagonal: Tensor,  # ω_kk, (*any, r)
) -> Tensor:
    """log |∂(τ, R)/∂ω|, (*any,)."""
    r = diagonal.shape[-1]
    powers = torch.arange(r + 1, 1, -1, dtype=diagonal.dtype, device=diagonal.device) - 2 * (r + 1)
    return -r * log_tau + diagonal @ powers
