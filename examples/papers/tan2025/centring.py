"""Reparametrised variational Bayes of mixed models: local variables that hardly depend on the global ones.

    b_i = λ_i + L_i b̃_i,   L_i L_iᵀ = Λ_i = (Ω + Z_iᵀ H_i Z_i)⁻¹,   H_i = diag A''(η̂_i)

λ_i and Λ_i are those of the Gaussian to which p(b_i | β, ω, y_i) comes when log p(y_i | η_i) is expanded to second
order at η̂_i, so that b̃_i | β, ω is close to N(0, I) and a q that factorises over (b̃_1, ..., b̃_n, (β, ω)) loses little
(Tan 2021, Use of model reparametrization to improve variational Bayes).  RVB1 expands at what the counts of a row alone
say of η, RVB2 at the mode of p(b_i | β, ω, y_i), which is found by Newton's method.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.models import BernoulliLogit, LogJoint, MixedLogJoint, PoissonLog
from torchngvi.models.mixed_prior import root_of
from torchngvi.numerics import linalg

_NEWTON = 50  # iterations, of which a handful are needed
_HALVINGS = 40  # of one step
_SETTLED = 1e-6  # the longest step after which one more, which is differentiated, is the last


class Locals(NamedTuple):
    """The Gaussians N(λ_i, L_i L_iᵀ) to which the groups are referred."""

    location: Tensor  # λ, (*any, n, r)
    root: Tensor  # L, lower triangular, (*any, n, r, r)
    log_det: Tensor  # Σ_i log det L_i, (*any,)


class _Shape(NamedTuple):
    """Newton's view of p(b | β, ω, y) at some b: its negative logarithm of each group, and two derivatives."""

    energy: Tensor  # (*any, n)
    slope: Tensor  # of the logarithm, upwards, (*any, n, r)
    curvature: Tensor  # Ω + ZᵀHZ, (*any, n, r, r)


class Centring(ABC):
    """A map from θ̃ = (b̃, β, ω) to θ = (b, β, ω), and the log joint of θ̃: abstract, see `DataCentred`, `ModeCentred`."""

    def __init__(self, model: MixedLogJoint) -> None:
        rows, likelihood = model.rows, model.rows.likelihood
        if not isinstance(likelihood, PoissonLog | BernoulliLogit) or not bool((rows.weights == 1).all()):
            raise InputError(
                "the locals are centred for poisson_log and bernoulli_logit, every row with weight 1; got "
                f"{type(likelihood).__name__} and weights from {float(rows.weights.min()):g} to "
                f"{float(rows.weights.max()):g}."
            )
        self.model, self.rows, self.poisson = model, rows, isinstance(likelihood, PoissonLog)
        self.counts = rows.y if self.poisson else 0.5 * (1 + rows.y)
        self.squares = (rows.Z[:, :, None] * rows.Z[:, None, :]).flatten(1)  # z zᵀ of each row
        half = self.counts + 0.5
        self.eta = torch.digamma(half) - (0.0 if self.poisson else torch.digamma(2 - half))  # by the counts alone
        mean, self.H = self.link(self.eta)
        self.ZHZ = self.by_group(self.H[:, None] * self.squares).unflatten(-1, (rows.r, rows.r))
        self.ZHX = self.by_group((self.H[:, None, None] * rows.Z[:, :, None] * rows.X[:, None, :]).flatten(1))
        self.ZHX = self.ZHX.unflatten(-1, (rows.r, rows.p))
        shift = self.counts - mean + self.H * (self.eta - rows.offset)
        self.constant = self.by_group(shift[:, None] * rows.Z)

    def link(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """A'(η) and A''(η), the mean and the variance of a row."""
        if self.poisson:
            mean = eta.exp()
            return mean, mean
        mean = eta.sigmoid()
        return mean, mean * (1 - mean)

    def by_group(self, terms: Tensor) -> Tensor:
        """Sums over the rows of each group, (*any, N, k) to (*any, n, k)."""
        zeros = terms.new_zeros(*terms.shape[:-2], self.rows.n, terms.shape[-1])
        return zeros.index_add(-2, self.rows.groups, terms)

    @abstractmethod
    def locals(self, beta: Tensor, precision: Tensor) -> Locals:
        """The Gaussians of the groups, given β (*any, p) and Ω (*any, r, r), differentiable in both."""

    def theta(self, transformed: Tensor) -> tuple[Tensor, Tensor]:
        """Map θ̃ (*any, D) to θ, and give the log determinant of that map, (*any,)."""
        b, beta, omega = self.rows.parts(transformed)
        W = root_of(omega, self.rows.r)
        at = self.locals(beta, W @ W.mT)
        moved = at.location + linalg.small_product(at.root, b[..., None])[..., 0]
        return torch.cat([moved.flatten(-2), beta, omega], -1), at.log_det

    def log_joint(self, transformed: Tensor) -> Tensor:
        """log p(y, θ̃) with all its constants, (*any,)."""
        theta, log_det = self.theta(transformed)
        return self.model.log_joint(theta) + log_det

    def target(self) -> LogJoint:
        """The log joint as a target of the library, whose gradient is by autograd."""
        return LogJoint(self.log_joint)


class DataCentred(Centring):
    """RVB1: the expansion is at η̂ = ψ(y + ½) of a count, ±2 of a class, so that nothing of it depends on θ."""

    def locals(self, beta: Tensor, precision: Tensor) -> Locals:
        """λ_i = Λ_i Z_iᵀ[y_i - A'(η̂_i) + H_i(η̂_i - X_i β)]."""
        vector = self.constant - (self.ZHX @ beta[..., None, :, None])[..., 0]
        return _gaussian(precision[..., None, :, :] + self.ZHZ, vector)


class ModeCentred(Centring):
    """RVB2: the expansion is at the mode b̂_i of p(b_i | β, ω, y_i), a function of β and ω."""

    def locals(self, beta: Tensor, precision: Tensor) -> Locals:
        """λ_i = b̂_i, and H_i = diag A''(X_i β + Z_i b̂_i)."""
        rows = self.rows
        fixed = beta @ rows.X.mT + rows.offset
        with torch.no_grad():
            mode, curvature = self._mode(fixed.detach(), beta.detach(), precision.detach())
        mean, _ = self.link(self._eta(fixed, mode))
        slope = (
            self.by_group((self.counts - mean)[..., None] * rows.Z)
            - (precision[..., None, :, :] @ mode[..., None])[..., 0]
        )
        mode = mode + _gaussian(curvature, slope).location
        H = self.link(self._eta(fixed, mode))[1]
        return _gaussian(self._curvature(H, precision), None)._replace(location=mode)

    def _eta(self, fixed: Tensor, b: Tensor) -> Tensor:
        return fixed + (b.index_select(-2, self.rows.groups) * self.rows.Z).sum(-1)

    def _curvature(self, H: Tensor, precision: Tensor) -> Tensor:
        ZHZ = self.by_group(H[..., None] * self.squares).unflatten(-1, (self.rows.r, self.rows.r))
        return precision[..., None, :, :] + ZHZ

    def _mode(self, fixed: Tensor, beta: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
        """b̂ of each group, and the curvature there, by Newton's steps that are halved where they do not ascend."""

        def at(b: Tensor) -> _Shape:
            eta = self._eta(fixed, b)
            mean, H = self.link(eta)
            pulled = (precision[..., None, :, :] @ b[..., None])[..., 0]
            fit = torch.nn.functional.softplus(eta) if not self.poisson else mean
            energy = self.by_group((fit - self.counts * eta)[..., None])[..., 0] + 0.5 * (b * pulled).sum(-1)
            slope = self.by_group((self.counts - mean)[..., None] * self.rows.Z) - pulled
            return _Shape(energy, slope, self._curvature(H, precision))

        b = DataCentred.locals(self, beta, precision).location  # type: ignore[arg-type]
        here = at(b)
        for _ in range(_NEWTON):
            step = _gaussian(here.curvature, here.slope).location
            there = at(b + step)
            for _ in range(_HALVINGS):
                worse = ~(there.energy <= here.energy + 1e-9 * (1 + here.energy.abs()))
                if not bool(worse.any()):
                    break
                step = torch.where(worse[..., None], 0.5 * step, step)
                there = at(b + step)
            b, here = b + step, there
            if float(step.abs().max()) < _SETTLED:
                break
        return b, here.curvature


def _gaussian(precision: Tensor, vector: Tensor | None) -> Locals:
    """N(P⁻¹x, P⁻¹) of each group, with the lower root of P⁻¹; the location is 0 where there is no x."""
    inverse = linalg.small_inverse(linalg.small_cholesky(precision)[0])  # P⁻¹ = R⁻ᵀR⁻¹
    log_det = inverse.diagonal(dim1=-2, dim2=-1).log().sum((-2, -1))
    root, _ = linalg.small_cholesky(linalg.small_product(inverse.mT, inverse))
    if vector is None:
        location = torch.zeros_like(inverse[..., 0])
    else:
        location = (inverse.mT @ (inverse @ vector[..., None]))[..., 0]
    return Locals(location, root, log_det)
