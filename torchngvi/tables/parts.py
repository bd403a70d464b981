"""What the parts of this room share: the design of some rows, the coordinates of the globals, and draws of them.

A model has the linear predictor η = Xβ + Σ_k Z_k b_k + offset with K ≥ 0 grouping factors, b_k ~ N(0, C_k C_kᵀ) for
each of the groups of factor k, and a likelihood log p(y | η, φ).  Its globals are

    θ = (a, ξ_1, ..., ξ_K, φ),

the coefficients a of centred and scaled columns of X (`torchngvi.models.standardize`); for each factor the logarithms
of the r standard deviations τ of its effects and the r(r - 1)/2 canonical partial correlations on Fisher's scale, so
that C = diag(τ) L with L the Cholesky factor of the correlations, of centred and scaled columns of Z; and the
unconstrained coordinates φ of the likelihood.  Of a nominal outcome each category but the reference has coefficients of
its own, a = (a_1, .., a_{C-1}).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.models.standardize import Standardization


class Factor(NamedTuple):
    """A grouping factor on some rows: which effects vary, and over which groups.

    Attributes:
        name: of the factor.
        effects: names of its r effects.
        levels: labels of its n groups, in the order of their numbers.
        Z: the design of the effects in the units of the user, (N, r), float64.
        groups: the group of each row, (N,); negative numbers are groups that the fit did not have.
    """

    name: str
    effects: tuple[str, ...]
    levels: tuple[str, ...]
    Z: Tensor
    groups: Tensor


class Design(NamedTuple):
    """The rows of a fit, or new rows.

    Attributes:
        X: the design of the fixed effects in the units of the user, (N, p), float64.
        names: of its columns.
        factors: the grouping factors, K ≥ 0 of them.
        offset: what is added to the linear predictor, (N,).
        y: the outcome, (N,), and what is known beside it, as the trials of a binomial outcome or whether an event was
            seen; of new rows what is known of it, perhaps nothing.
        weights: factors of the log likelihood of each row, (N,).
    """

    X: Tensor
    names: tuple[str, ...]
    factors: tuple[Factor, ...]
    offset: Tensor
    y: tuple[Tensor, ...]
    weights: Tensor


def take_rows(design: Design, here: Tensor) -> Design:
    """Take some of the rows of a design, by a mask (N,)."""
    factors = tuple(of._replace(Z=of.Z[here], groups=of.groups[here]) for of in design.factors)
    y = tuple(part[here] for part in design.y)
    return Design(design.X[here], design.names, factors, design.offset[here], y, design.weights[here])


class Globals(NamedTuple):
    """Draws of the globals in the units of the user."""

    coefficients: Tensor  # of the columns of X, (S, p), the intercept at X = 0; of categories one after the other
    sd: tuple[Tensor, ...]  # standard deviations of the effects of each factor, (S, r)
    correlation: tuple[Tensor, ...]  # of each factor, (S, r, r)
    phi: Tensor  # unconstrained coordinates of the likelihood, (S, nphi)


class Coordinates:
    """The coordinates θ of the globals of a design, and the way back to the units of the user.

    With thresholds, of ordered categories, the first coordinate of the likelihood takes the place of the intercept.

    Attributes:
        names: of the coefficients, p of them: those of the columns, of categories as "label: column".
        scales: what the column of each coefficient is divided by, (p,).
        columns: how the columns of X are centred and scaled.
        within: the same of the columns of Z of each factor.
        X: the centred and scaled columns, (N, p).
        Z: the same of each factor, (N, r).
        sizes: r of each factor.
        dim: the number of coordinates.
    """

    def __init__(
        self, design: Design, parameters: int, *, thresholds: bool = False, categories: Sequence[str] = ()
    ) -> None:
        self.thresholds, self.categories = thresholds, tuple(categories)
        self.columns = centred(design.X, design.weights) if thresholds else Standardization.of(design.X, design.weights)
        self.within = tuple(Standardization.of(factor.Z, design.weights) for factor in design.factors)
        self.X = self.columns.standardize(design.X)
        pairs = zip(design.factors, self.within, strict=True)
        self.Z = tuple(units.standardize(factor.Z) for factor, units in pairs)
        self.names = tuple(f"{label}: {name}" for label in categories for name in design.names) or design.names
        self.scales = self.columns.scales.repeat(max(1, len(categories)))
        self.p, self.parameters = len(self.scales), parameters
        self.sizes = tuple(factor.Z.shape[1] for factor in design.factors)
        self.lengths = (self.p, *(r * (r + 1) // 2 for r in self.sizes), parameters)
        self.dim = sum(self.lengths)

    def split(self, theta: Tensor) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:  # (..., dim)
        """Return a (..., p), ξ of each factor (..., r(r + 1)/2), and φ (..., nphi)."""
        a, *xis, phi = theta.split(self.lengths, -1)
        return a, tuple(xis), phi

    def level(self, *locations: float) -> Tensor:
        """Return a, (p,), whose predictor is a number in all rows, of categories one number each."""
        return torch.cat([self.columns.level(location) for location in locations])

    def linear(self, X: Tensor, a: Tensor, offset: Tensor) -> Tensor:  # X (..., N, D), a (S, p), offset (..., N)
        """Compute the linear predictors of rows, (..., N, S), of categories (..., N, S, C) without the offset."""
        if not self.categories:
            return X @ a.mT + offset[..., None]
        return (X @ a.reshape(-1, X.shape[-1]).mT).unflatten(-1, (len(a), len(self.categories)))

    def to_user(self, theta: Tensor) -> Globals:  # (..., dim)
        """Map draws of θ to the units of the user."""
        a, xis, phi = self.split(theta)
        scales = []
        for xi, r, units in zip(xis, self.sizes, self.within, strict=True):
            eye = torch.eye(r, dtype=theta.dtype, device=theta.device)
            A = units.to_user(eye, 0)  # b = A b_s
            root = A @ covariance_root(xi, r)
            sd = torch.linalg.vector_norm(root, dim=-1)
            unit = root / sd.clamp_min(torch.finfo(sd.dtype).tiny)[..., None]
            scales.append((sd, unit @ unit.mT))
        sds, correlations = (tuple(some) for some in zip(*scales, strict=True)) if scales else ((), ())
        own = a.unflatten(-1, (len(self.categories), -1)) if self.categories else a
        coefficients = self.columns.to_user(own).reshape(a.shape)
        if self.thresholds:
            shift = coefficients @ self.columns.centers.to(coefficients)
            phi = torch.cat([phi[..., :1] + shift[..., None], phi[..., 1:]], -1)
        return Globals(coefficients, sds, correlations, phi)


def centred(
    X: Tensor,  # (N, p), without a column of ones
    weights: Tensor,  # (N,)
) -> Standardization:
    """How columns are centred and scaled where something outside of them takes the shift."""
    with_ones = Standardization.of(torch.cat([torch.ones_like(X[:, :1]), X], -1), weights, intercept=0)
    return Standardization(with_ones.centers[1:], with_ones.scales[1:])


def covariance_root(
    xi: Tensor,  # (..., r(r + 1)/2): log τ, and Fisher's z of the canonical partial correlations row by row
    r: int,
) -> Tensor:
    """Return C = diag(τ) L, (..., r, r), lower triangular, L the Cholesky factor of the correlations."""
    tau, z = xi[..., :r].exp(), xi[..., r:]
    if r == 1:
        return tau[..., None]
    rows, place = [], 0
    for k in range(r):
        partial = z[..., place : place + k]
        place += k
        left = torch.cat([torch.ones_like(tau[..., :1]), (1 / partial.cosh()).cumprod(-1)], -1)  # √(1 - tanh²) = sech
        zeros = tau.new_zeros(*tau.shape[:-1], r - k - 1)
        rows.append(torch.cat([partial.tanh() * left[..., :-1], left[..., -1:], zeros], -1))
    return tau[..., None] * torch.stack(rows, -2)


def draw_normal(*shape: int, generator: torch.Generator | None, like: Tensor) -> Tensor:
    """Draw standard normal numbers, on the CPU in float64 so that they are the same on every device."""
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(like)


def draw_uniform(*shape: int, generator: torch.Generator | None, like: Tensor) -> Tensor:
    """Draw uniform numbers, on the CPU in float64 so that they are the same on every device."""
    return torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu").to(like)


def replace_where(mask: Tensor, new: Iterable[Tensor], old: Iterable[Tensor]) -> Iterator[Tensor]:
    """Take the new one of two tensors where a mask of their first dimensions is true, for each pair."""
    for one, other in zip(new, old, strict=True):
        yield torch.where(mask.reshape(*mask.shape, *[1] * (other.ndim - mask.ndim)), one, other)


class Weighted(NamedTuple):
    """Draws of the globals with normalised importance weights."""

    theta: Tensor  # (S, dim)
    weights: Tensor  # (S,)
    k_hat: float  # of the weights
    effective: float  # the effective number of draws

    def resampled(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Take equally likely draws, (count, dim), by systematic resampling in random order."""
        offset = torch.rand((), generator=generator, dtype=torch.float64, device="cpu")
        places = (torch.arange(count, dtype=torch.float64, device="cpu") + offset) / count
        index = torch.searchsorted(self.weights.double().cpu().cumsum(0), places).clamp_max(len(self.theta) - 1)
        order = torch.randperm(count, generator=generator, device="cpu")
        return self.theta[index[order].to(self.theta.device)]


class Posterior(ABC):
    """The posterior of the globals of one model, and the random effects given them."""

    coordinates: Coordinates
    weighted: Weighted  # draws of the globals
    log_evidence: float | None  # log p(y); None where it is not known
    converged: bool  # whether the search for the mode of the globals has ended well
    reason: str  # why it ended, one sentence
    method: str  # what was computed, one sentence
    gradients: int  # of the log joint of the globals that the search took

    @abstractmethod
    def effects(self, theta: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:  # theta (S, dim)
        """Draw the effects of all groups given the globals, (S, n, r) of each factor, of centred and scaled columns."""

    @abstractmethod
    def of_groups(self, theta: Tensor) -> Tensor:  # (S, dim)
        """Compute log p(y_i | θ) of the rows of each group of the one factor, (S, n); without factors of each row."""
