"""Black-box VI over location-scale families: what is known of its gradients' variance and of its rate.

Kim, Ma and Gardner, *Linear Convergence of Black-Box Variational Inference: Should We Stick the Landing?* (2024),
with the corrections of `docs/bbvi.md`.  The algorithm itself is `torchngvi.methods.BBVI`.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from torchngvi.arguments import read_flag, read_instance, read_number, read_tensor
from torchngvi.derivatives import energy_and_gradient
from torchngvi.errors import InputError
from torchngvi.expectations import Draws, Independent
from torchngvi.interfaces import Posterior, Target
from torchngvi.models.log_joint import as_target, read_posterior
from torchngvi.numerics.linalg import cholesky, eigh

__all__ = [
    "AdaptiveVariance",
    "Base",
    "EmpiricalVariance",
    "Gaussian",
    "GaussianTarget",
    "Laplace",
    "Logistic",
    "MeanField",
    "QuadraticVariance",
    "Scale",
    "SquareRoot",
    "StudentT",
    "Triangular",
    "Unrestricted",
    "closed_entropy_bound",
    "closed_entropy_variance",
    "empirical_variance",
    "fisher_hyvarinen",
    "landing_bound",
    "landing_variance",
    "wasserstein_to_point",
]


# ------------------------------------------------------------------------------------ location-scale families


# Symmetric one-dimensional densities φ with mean 0 and variance 1: the noise of a location-scale family
#
#     z = m + C u,  u_i ~ φ independent:    log q(z) = Σ log φ(u_i) - log|det C|,    ∇_z log q(z) = C⁻ᵀ (log φ)'(u)
#
# k = E u⁴ is 3 for the Gaussian, 4.2 for the logistic, 6 for Laplace, and 3 + 6/(ν - 4) for Student's t.


class Base(ABC):
    """The abstract base of the noise densities φ: see `Gaussian`, `Laplace`, `Logistic` and `StudentT`.

    >>> base: Base = Laplace()
    >>> base.kurtosis, base.sample(torch.zeros(3)).shape
    (6.0, torch.Size([3]))
    """

    @property
    @abstractmethod
    def kurtosis(self) -> float:
        """The fourth moment k = E u⁴."""

    @property
    @abstractmethod
    def entropy(self) -> float:
        """The entropy -E log φ(u), in nats."""

    @abstractmethod
    def sample(
        self,
        like: Tensor,  # the shape, dtype and device of the draws
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return draws u ~ φ of the shape of ``like``."""

    @abstractmethod
    def log_prob(self, u: Tensor) -> Tensor:
        """Return log φ(u), elementwise."""

    @abstractmethod
    def score(self, u: Tensor) -> Tensor:
        """Return the score (log φ)'(u), elementwise."""


@final
@dataclass(frozen=True)
class Gaussian(Base):
    """The standard normal density, for which z = m + C u is Gaussian.

    >>> Gaussian().score(torch.tensor(2.0)).item()
    -2.0
    """

    kurtosis = 3.0
    entropy = 0.5 * math.log(2 * math.pi * math.e)

    def sample(self, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return independent standard normal draws."""
        return torch.empty_like(like).normal_(generator=generator)

    def log_prob(self, u: Tensor) -> Tensor:
        """Return -½u² - ½ log 2π."""
        return -0.5 * u.square() - 0.5 * math.log(2 * math.pi)

    def score(self, u: Tensor) -> Tensor:
        """Return the score -u."""
        return -u


@final
@dataclass(frozen=True)
class Laplace(Base):
    """The Laplace density exp(-√2|u|)/√2, with a kink at 0 and heavier tails than the Gaussian.

    >>> round(Laplace().log_prob(torch.tensor(0.0)).item(), 4)
    -0.3466
    """

    kurtosis = 6.0
    entropy = 1 + 0.5 * math.log(2)

    def sample(self, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return exponential draws with a random sign."""
        size = torch.empty_like(like).exponential_(generator=generator) / math.sqrt(2)
        sign = torch.empty_like(like).bernoulli_(0.5, generator=generator)
        return (2 * sign - 1) * size

    def log_prob(self, u: Tensor) -> Tensor:
        """Return -√2|u| - ½ log 2."""
        return -math.sqrt(2) * u.abs() - 0.5 * math.log(2)

    def score(self, u: Tensor) -> Tensor:
        """Return the score -√2 sign(u)."""
        return -math.sqrt(2) * u.sign()


_LOGISTIC = math.pi / math.sqrt(3)  # standard deviation of the logistic distribution


@final
@dataclass(frozen=True)
class Logistic(Base):
    """The logistic density, scaled to variance 1.

    >>> round(Logistic().score(torch.tensor(100.0)).item(), 4)  # -π/√3
    -1.8138
    """

    kurtosis = 4.2
    entropy = 2 - math.log(_LOGISTIC)

    def sample(self, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the differences of two Gumbel variables, which are logits of uniform ones, scaled to variance 1."""
        first, second = (torch.empty_like(like).exponential_(generator=generator) for _ in range(2))
        return (first.log() - second.log()) / _LOGISTIC

    def log_prob(self, u: Tensor) -> Tensor:
        """Return log s - s|u| - 2 log(1 + exp(-s|u|)), s = π/√3."""
        size = _LOGISTIC * u.abs()
        return math.log(_LOGISTIC) - size - 2 * torch.log1p(torch.exp(-size))

    def score(self, u: Tensor) -> Tensor:
        """Return the score -s tanh(su/2)."""
        return -_LOGISTIC * torch.tanh(0.5 * _LOGISTIC * u)


@final
@dataclass(frozen=True)
class StudentT(Base):
    """Student's t density, scaled to variance 1: heavy tails with a finite fourth moment.

    Args:
        dof: the degrees of freedom ν, above 4, so that k is finite.

    Raises:
        InputError: if there are 4 degrees of freedom or fewer.

    >>> StudentT(10.0).kurtosis
    4.0
    """

    dof: float

    def __post_init__(self) -> None:
        read_number("dof", self.dof, "is the degrees of freedom, of which a fourth moment needs more than 4,", above=4)

    @property
    def kurtosis(self) -> float:
        """The fourth moment k = 3 + 6/(ν - 4)."""
        return 3 + 6 / (self.dof - 4)

    @property
    def entropy(self) -> float:
        """The entropy (ν + 1)/2 (ψ((ν + 1)/2) - ψ(ν/2)) + ½ log(ν - 2) + log B(ν/2, ½), in nats."""
        half = 0.5 * self.dof
        upper, lower = torch.digamma(torch.tensor([half + 0.5, half], dtype=torch.float64)).tolist()
        return (half + 0.5) * (upper - lower) - self._constant()

    def _constant(self) -> float:
        """log of the density at 0."""
        half = 0.5 * self.dof
        return math.lgamma(half + 0.5) - math.lgamma(half) - 0.5 * math.log(math.pi * (self.dof - 2))

    def sample(self, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return z/√(g/(ν - 2)), with z normal and g chi-squared."""
        z = torch.empty_like(like).normal_(generator=generator)
        concentration = torch.full_like(like, 0.5 * self.dof)
        chi2 = 2 * torch._standard_gamma(concentration, generator=generator)
        return z * ((self.dof - 2) / chi2).sqrt()

    def log_prob(self, u: Tensor) -> Tensor:
        """Return -(ν + 1)/2 log(1 + u²/(ν - 2)) with its constant."""
        return self._constant() - 0.5 * (self.dof + 1) * torch.log1p(u.square() / (self.dof - 2))

    def score(self, u: Tensor) -> Tensor:
        """Return the score -(ν + 1)u/(ν - 2 + u²)."""
        return -(self.dof + 1) * u / (self.dof - 2 + u.square())


# Patterns of the scale matrix C in z = m + C u, and the two gradient estimators in each
#
#     closed entropy          g_m = a    g_C = Π[a uᵀ] - ∇ log|det C|        a = ∇ℓ(m + C u)
#     sticking the landing    g_m = r    g_C = Π[r uᵀ]                       r = a + C⁻ᵀ(log φ)'(u)
#
# (Kim, Ma and Gardner 2024, Definitions 4 and 5, with the sign of descent: E g = ∇F for F = E ℓ - log|det C|.)  Π keeps
# the free entries of the pattern.  All parametrisations are linear in C: with c = exp(s), F'' vanishes as c does.


class Gradient(NamedTuple):
    """The gradient estimates in m and C, one for each draw."""

    mean: Tensor  # (*sample, D)
    scale: Tensor  # (*sample, D, D)

    def square(self) -> Tensor:
        """The squared length |g_m|² + ‖g_C‖²_F."""
        return self.mean.square().sum(-1) + self.scale.square().sum((-2, -1))


class Scale(ABC):
    """The abstract base of the patterns of C, which is written out as (D, D).

    See `Triangular`, `MeanField`, `SquareRoot` and `Unrestricted`.  In the methods ``u`` is the noise of the draws and
    ``gradient`` is a = ∇ℓ at them, (*sample, D) each, and ``base`` the density φ of the noise.

    >>> scale: Scale = MeanField()
    >>> scale.kept(torch.ones(2, 2)).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    @abstractmethod
    def kept(self, matrix: Tensor) -> Tensor:
        """Return Π[A], the gradient with respect to the free entries, (*sample, D, D)."""

    def entropy_gradient(self, C: Tensor) -> Tensor:
        """Return ∇ log|det C| = Π[C⁻ᵀ] with respect to the free entries, (D, D)."""
        return self.kept(_inverse_transpose(C))

    @abstractmethod
    def projected(self, C: Tensor, floor: float) -> Tensor:
        """Return the nearest C of the domain, (D, D).

        Raises:
            InputError: if the floor is not positive, or the pattern has no convex domain.
        """

    @abstractmethod
    def second_moment_weights(self, dim: int, kurtosis: float) -> tuple[Tensor, Tensor]:
        """Return v (D,) and W (D, D) in E[|r|² + ‖Π[r uᵀ]‖²] = Σ v_i h_i² + Σ W_ij G_ij² for r = Gu + h."""

    def closed_entropy(self, C: Tensor, gradient: Tensor, u: Tensor) -> Gradient:
        """Estimate the gradient for each draw with the entropy in closed form (CFE)."""
        return Gradient(gradient, self.kept(_outer(gradient, u)) - self.entropy_gradient(C))

    def landing(self, C: Tensor, gradient: Tensor, u: Tensor, base: Base) -> Gradient:
        """Estimate the gradient for each draw so that it sticks the landing (STL): it is zero where q is the target."""
        residual = gradient + self.pulled_score(C, u, base)
        return Gradient(residual, self.kept(_outer(residual, u)))

    def control_variate(self, C: Tensor, u: Tensor, base: Base) -> Gradient:
        """Return the closed entropy minus sticking the landing, of mean 0, which does not depend on the target."""
        score = self.pulled_score(C, u, base)
        return Gradient(-score, -self.kept(_outer(score, u)) - self.entropy_gradient(C))

    def pulled_score(self, C: Tensor, u: Tensor, base: Base) -> Tensor:
        """Return the score of q at the draws, ∇_z log q = C⁻ᵀ(log φ)'(u), (*sample, D)."""
        return torch.linalg.solve(C.mT, base.score(u)[..., None])[..., 0]


@final
class Triangular(Scale):
    """Lower triangular matrices with C_ii ≥ c: full rank, with a projection of D operations.

    >>> Triangular().projected(torch.tensor([[0.1, 0.0], [3.0, 2.0]]), 0.5).tolist()
    [[0.5, 0.0], [3.0, 2.0]]
    """

    def kept(self, matrix: Tensor) -> Tensor:
        """Return the lower triangle."""
        return matrix.tril()

    def projected(self, C: Tensor, floor: float) -> Tensor:
        """Return C with the diagonal max(C_ii, c)."""
        return C + torch.diag_embed(C.diagonal().clamp_min(_positive(floor)) - C.diagonal())

    def second_moment_weights(self, dim: int, kurtosis: float) -> tuple[Tensor, Tensor]:
        """Return v_i = i + 1 and W_ij = i + 1 + (k - 1)[j ≤ i]."""
        v = torch.arange(2.0, dim + 2, dtype=torch.float64)
        return v, v[:, None] + (kurtosis - 1) * torch.ones(dim, dim, dtype=torch.float64).tril()

    def pulled_score(self, C: Tensor, u: Tensor, base: Base) -> Tensor:
        """Return the score by one back-substitution, of D² operations a draw."""
        columns = base.score(u).reshape(-1, len(C)).mT
        return torch.linalg.solve_triangular(C.mT, columns, upper=True).mT.reshape(u.shape)


@final
class MeanField(Scale):
    """Diagonal matrices with C_ii ≥ c: independent coordinates.

    >>> MeanField().projected(torch.tensor([[2.0, 0.0], [0.0, 0.1]]), 0.5).tolist()
    [[2.0, 0.0], [0.0, 0.5]]
    """

    def kept(self, matrix: Tensor) -> Tensor:
        """Return the diagonal, as a matrix."""
        return torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))

    def projected(self, C: Tensor, floor: float) -> Tensor:
        """Return the diagonal matrix of max(C_ii, c)."""
        return torch.diag_embed(C.diagonal().clamp_min(_positive(floor)))

    def second_moment_weights(self, dim: int, kurtosis: float) -> tuple[Tensor, Tensor]:
        """Return v_i = 2 and W_ij = 2 + (k - 1)[j = i]."""
        v = torch.full((dim,), 2.0, dtype=torch.float64)
        return v, 2 + (kurtosis - 1) * torch.eye(dim, dtype=torch.float64)


@final
class SquareRoot(Scale):
    """Symmetric positive definite matrices with eigenvalues of at least c: a projection of D³ operations (Domke 2020).

    >>> SquareRoot().kept(torch.tensor([[1.0, 2.0], [0.0, 1.0]])).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """

    def kept(self, matrix: Tensor) -> Tensor:
        """Return the symmetric part (A + Aᵀ)/2."""
        return 0.5 * (matrix + matrix.mT)

    def projected(self, C: Tensor, floor: float) -> Tensor:
        """Return C with its eigenvalues clipped at c."""
        values, vectors, ok = eigh(C)
        projected = (vectors * values.clamp_min(_positive(floor))) @ vectors.mT
        return torch.where(ok[..., None, None], projected, torch.nan)

    def second_moment_weights(self, dim: int, kurtosis: float) -> tuple[Tensor, Tensor]:
        """Refuse by an `InputError`, since the moment is not of this form: its cross terms mix G_ij and G_ji."""
        raise InputError(
            "the second moment of a symmetrised gradient is no weighted sum of squares. Use Unrestricted, above it."
        )


@final
class Unrestricted(Scale):
    """Matrices with every entry free, for which the bounds of full rank are derived; not an algorithm.

    >>> v, W = Unrestricted().second_moment_weights(2, 3.0)
    >>> v.tolist(), W.tolist()  # D + 1 and D + k
    ([3.0, 3.0], [[5.0, 5.0], [5.0, 5.0]])
    """

    def kept(self, matrix: Tensor) -> Tensor:
        """Return the matrix as it is."""
        return matrix

    def projected(self, C: Tensor, floor: float) -> Tensor:
        """Refuse by an `InputError`, since there is no convex domain to project on."""
        raise InputError("an unrestricted C has no convex domain to project on. Use Triangular or SquareRoot.")

    def second_moment_weights(self, dim: int, kurtosis: float) -> tuple[Tensor, Tensor]:
        """Return v_i = D + 1 and W_ij = D + k."""
        v = torch.full((dim,), dim + 1.0, dtype=torch.float64)
        return v, torch.full((dim, dim), dim + kurtosis, dtype=torch.float64)


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return left[..., :, None] * right[..., None, :]


def _inverse_transpose(C: Tensor) -> Tensor:
    return torch.linalg.solve(C.mT, torch.eye(len(C), dtype=C.dtype, device=C.device))


def _positive(floor: float) -> float:
    if not floor > 0:
        raise InputError(f"floor is the smallest scale of the domain, positive; got {floor:g}. Use 1/√L.")
    return floor


# ------------------------------------------------------------------------------------ moments
# Second moments of the gradient estimators, exact for Gaussian targets, and the divergences that bound them.
#
# For q = N(m, CCᵀ), a target N(z̄, Λ⁻¹) and A = ΛC, G = ΛC - C⁻ᵀ, h = Λ(m - z̄), with the weights v, W of the pattern,
#
#     sticking the landing    E|g|² = Σ v_i h_i² + Σ W_ij G_ij²
#     closed entropy          E|g|² = Σ v_i h_i² + Σ W_ij A_ij² - 2⟨Π[A], E⟩ + ‖E‖²_F,    E = ∇ log|det C|
#     Fisher-Hyvärinen        D_F = |h|² + ‖G‖²_F,   D_F4 = D_F² + 2 tr K² + 4 hᵀKh,   K = GGᵀ
#
# (the setting of Kim, Ma and Gardner 2024, who bound these from above.)


class Residuals(NamedTuple):
    """The parts of r = ∇ℓ - ∇ℓ_q at z = m + Cu, which is h + Gu, and of ∇ℓ = h + Au."""

    h: Tensor  # (D,)
    A: Tensor  # (D, D)
    G: Tensor  # (D, D)


class GaussianTarget(NamedTuple):
    """A Gaussian target ℓ(z) = ½(z - z̄)ᵀΛ(z - z̄) - ½ log|Λ/2π|, for which all second moments are exact.

    In the methods q is N(m, CCᵀ), with ``mean`` = m, (D,), and ``C``, (D, D), of the pattern ``scale``.

    >>> target = GaussianTarget(torch.zeros(2), torch.tensor([[1.0, 0.5], [0.5, 1.0]]))
    >>> target.fisher_hyvarinen(*target.mean_field_optimum()).item()  # 2 · 0.5²
    0.5
    """

    mean: Tensor  # z̄, (D,)
    precision: Tensor  # Λ, (D, D)

    def log_joint(self, theta: Tensor) -> Tensor:
        """Return the log joint -ℓ with its constant, (*sample,), at points of shape (*sample, D)."""
        shift = theta - self.mean
        constant = cholesky(self.precision)[0].diagonal().log().sum() - 0.5 * len(self.mean) * math.log(2 * math.pi)
        return constant - 0.5 * (shift @ self.precision * shift).sum(-1)

    def residuals(self, mean: Tensor, C: Tensor) -> Residuals:
        """Return the linear parts h, A and G of the residual and of the gradient."""
        A = self.precision @ C
        return Residuals(self.precision @ (mean - self.mean), A, A - _inverse_transpose(C))

    def gradient(self, scale: Scale, mean: Tensor, C: Tensor) -> Gradient:
        """Return the gradient ∇F = (h, Π[A] - ∇ log|det C|), which both estimators have as their mean."""
        h, A, _ = self.residuals(mean, C)
        return Gradient(h, scale.kept(A) - scale.entropy_gradient(C))

    def landing_moment(self, scale: Scale, mean: Tensor, C: Tensor) -> Tensor:
        """Return the second moment E|g|² of one draw that sticks the landing, for a Gaussian base, linear in u."""
        h, _, G = self.residuals(mean, C)
        return _weighted(scale, h, G, Gaussian.kurtosis)

    def closed_entropy_moment(self, scale: Scale, mean: Tensor, C: Tensor, kurtosis: float = 3.0) -> Tensor:
        """Return the second moment E|g|² of one draw with the closed-form entropy, for any base of that kurtosis."""
        h, A, _ = self.residuals(mean, C)
        E = scale.entropy_gradient(C)
        return _weighted(scale, h, A, kurtosis) - 2 * (scale.kept(A) * E).sum() + E.square().sum()

    def fisher_hyvarinen(self, mean: Tensor, C: Tensor) -> Tensor:
        """Return the Fisher-Hyvärinen divergence D_F = E|∇log q - ∇log π|²."""
        h, _, G = self.residuals(mean, C)
        return h.square().sum() + G.square().sum()

    def fisher_hyvarinen_4(self, mean: Tensor, C: Tensor) -> Tensor:
        """Return the divergence of fourth order, D_F4 = E|∇log q - ∇log π|⁴."""
        h, _, G = self.residuals(mean, C)
        K = G @ G.mT
        return (K.trace() + h.square().sum()).square() + 2 * K.square().sum() + 4 * h @ K @ h

    def mean_field_optimum(self) -> tuple[Tensor, Tensor]:
        """Return the optimum of mean field, m* = z̄ and C* = diag(Λ)^-½.

        The paper prints diag(Λ⁻¹)^½, which its own first-order condition contradicts.  At the optimum
        D_F = Σ_{i ≠ j} Λ_ij²/Λ_jj, 2ρ²/(1 - ρ²) for two variables of variance 1 and correlation ρ.
        """
        return self.mean, torch.diag(self.precision.diagonal().rsqrt())


def _weighted(scale: Scale, h: Tensor, G: Tensor, kurtosis: float) -> Tensor:
    v, W = (part.to(h) for part in scale.second_moment_weights(len(h), kurtosis))
    return (v * h.square()).sum() + (W * G.square()).sum()


def fisher_hyvarinen(q: Posterior, target: Target, order: int = 2, draws: Draws | None = None) -> Tensor:
    """The divergence E_q|∇log q - ∇log π|ᵖ by Monte Carlo.

    √D_F4 is the misspecification that keeps the variance of sticking the landing above zero; D_F is at most the second
    moment of that estimator, and at least 2μ KL(q‖π) for a μ-strongly log-concave π.

    Args:
        q: the posterior, without a batch.
        target: the target π.
        order: the power p, 2 or 4 in the theorems, at least 1.
        draws: the draws from q; 1024 independent ones by default.

    Returns:
        The mean over the draws, ().

    Raises:
        InputError: if the order is below 1.

    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> target = LogJoint(lambda theta: -0.5 * theta.square().sum(-1))
    >>> fisher_hyvarinen(CholeskyGaussian(2), target).item()
    0.0
    """
    read_number("order", order, "is the power of the norm", at_least=1)
    q, target = read_posterior("fisher_hyvarinen", q, target), as_target(target)
    if draws is not None:
        read_instance("draws", draws, Draws, "are draws, such as Independent(1024)")
    frame = q.frame()
    z = (draws or Independent(1024))(q.mean_probe.detach())
    theta = frame.mean + frame.push(z)
    _, gradient = energy_and_gradient(target, theta)
    with torch.enable_grad():
        copy = theta.detach().requires_grad_()
        (score,) = torch.autograd.grad(q.log_prob(copy).sum(), copy)  # type: ignore[operator]
    return (gradient + score).norm(dim=-1).pow(order).mean()


def wasserstein_to_point(mean: Tensor, C: Tensor, point: Tensor) -> Tensor:
    """The Wasserstein distance W₂(N(m, CCᵀ), δ_point) = √(|m - point|² + ‖C‖²_F).

    It sets the noise floor of the closed entropy, where the point is the mode of the target.

    Args:
        mean: m, (D,).
        C: the scale matrix, (D, D).
        point: the point, (D,).

    Returns:
        The distance, (), in the units of θ.

    >>> wasserstein_to_point(torch.zeros(1), 2 * torch.eye(1), torch.zeros(1)).item()
    2.0
    """
    mean = read_tensor("mean", mean, shape=(None,))
    point = read_tensor("point", point, like=mean, shape=mean.shape)
    C = read_tensor("C", C, like=mean, shape=(len(mean), len(mean)))
    return ((mean - point).square().sum() + C.square().sum()).sqrt()


class EmpiricalVariance(NamedTuple):
    """The constants of E|g(λ)|² ≤ α̂|λ - λ*|² + β̂ on the points that were looked at, from `empirical_variance`.

    Attributes:
        alpha: the least α̂ that holds at all of the points.
        slope: the slope of the line through β̂ by least squares.
        beta: β̂ = E|g(λ*)|².

    >>> EmpiricalVariance(alpha=3.0, slope=2.5, beta=1.0).alpha
    3.0
    """

    alpha: float
    slope: float
    beta: float


def empirical_variance(moments: Tensor, distances2: Tensor, at_optimum: float | Tensor) -> EmpiricalVariance:
    """Estimate α̂ and β̂ from second moments that were measured along a path or on a grid.

    Args:
        moments: E|g(λ)|² at N points, (N,).
        distances2: |λ - λ*|² at these points, (N,), positive.
        at_optimum: E|g(λ*)|².

    Returns:
        The constants, with the slope of a least-squares line.

    Raises:
        InputError: if the lengths differ, or a distance is not positive.

    >>> empirical_variance(torch.tensor([3.0, 5.0]), torch.tensor([1.0, 2.0]), 1.0)
    EmpiricalVariance(alpha=2.0, slope=2.0, beta=1.0)
    """
    moments = read_tensor("moments", moments)
    distances2 = read_tensor("distances2", distances2, like=moments)
    at_optimum = read_number("at_optimum", at_optimum, "is E|g(λ*)|²", at_least=0)
    if not len(moments.shape) or not moments.numel() or moments.shape != distances2.shape or moments.ndim != 1:
        raise InputError(
            "moments and distances2 are one number a point, (N,) each; got "
            f"{tuple(moments.shape)} and {tuple(distances2.shape)}."
        )
    if not bool((distances2 > 0).all()):
        raise InputError("distances2 must be positive: the value at the optimum is passed as at_optimum.")
    above = moments - at_optimum
    slope = (above * distances2).sum() / distances2.square().sum()
    return EmpiricalVariance(float((above / distances2).max()), float(slope), float(at_optimum))


# ------------------------------------------------------------------------------------ rates
# Steps and iteration counts for stochastic gradients of quadratic variance, and the constants of black-box VI.
#
#     E|g(λ)|² ≤ α|λ - λ*|² + β,  F μ-strongly convex:      E|λ_{t+1} - λ*|² ≤ (1 - 2γμ + γ²α) E|λ_t - λ*|² + γ²β
#
# (Kim, Ma and Gardner 2024, sections 2.5 and 3; Domke et al. 2023.)  Δ = |λ_0 - λ*|, ε the wanted E|λ_T - λ*|².
# Three of their constants are corrected here: of the adaptive decreasing step, whose δ and 1/δ are exchanged in
# print; of the ε^-¾ term of sticking the landing, 2 for 1/√2; and of the fixed step's δ for it, without the factor 4.
#
# The bounds of the triangular full-rank scale hold where ‖C⁻¹‖ is at most √S.  A floor on the diagonal of C does not
# give that: from three dimensions on no α holds on the whole domain.  Start from a diagonal C, or watch ‖C⁻¹‖.  For
# mean field and the symmetric root the floor is enough.


class QuadraticVariance(NamedTuple):
    """The constants α and β of E|g(λ)|² ≤ α|λ - λ*|² + β; β = 0 is interpolation, with a linear rate.

    The methods give the step sizes and the iteration counts that follow from it, all from the same numbers: the
    constant μ of strong convexity as ``mu``, the wanted ε = E|λ_T - λ*|² as ``eps`` and Δ² = |λ_0 - λ*|² as ``delta2``.
    Each raises an `InputError` where one of them is not positive and finite.

    >>> QuadraticVariance(4.0, 0.0).fixed_iterations(1.0, 1e-6, 1.0)  # 8 log(2 · 10⁶)
    117
    """

    alpha: float
    beta: float

    def fixed_step(self, mu: float, eps: float) -> float:
        """Return the fixed step size min(εμ/(4β), μ/(2α), 2/μ) for the error ε.

        >>> QuadraticVariance(4.0, 0.0).fixed_step(1.0, 1e-6)
        0.125
        """
        _check_positive(mu=mu, eps=eps)
        noise = eps * mu / (4 * self.beta) if self.beta > 0 else math.inf
        return min(noise, mu / (2 * self.alpha), 2 / mu)

    def fixed_iterations(self, mu: float, eps: float, delta2: float) -> int:
        """Return the number of fixed steps that suffices, T ≥ max(4β/(μ²ε), 2α/μ², ½) log(2Δ²/ε)."""
        _check_positive(mu=mu, eps=eps, delta2=delta2)
        return _count(math.log(2 * delta2 / eps) / (self.fixed_step(mu, eps) * mu))

    def fixed_bound(self, mu: float, gamma: float, T: int, delta2: float) -> float:
        """Return the bound (1 - γμ)ᵀΔ² + 2γβ/μ ≥ E|λ_T - λ*|² after T fixed steps γ.

        Raises:
            InputError: if the step is above μ/(2α), for which the bound is not proved, or a constant is not positive.
        """
        _check_positive(mu=mu, gamma=gamma, delta2=delta2)
        if gamma > mu / (2 * self.alpha):
            raise InputError(f"gamma must be at most μ/(2α) = {mu / (2 * self.alpha):.3g}; got {gamma:.3g}.")
        return (1 - gamma * mu) ** T * delta2 + 2 * gamma * self.beta / mu

    def two_stage_step(self, mu: float, t: int) -> float:
        """Return the step size after t steps, min(μ/(2α), (4t + 2)/(μ(t + 1)²)), for ``LambdaLR`` with lr=1."""
        _check_positive(mu=mu)
        return min(mu / (2 * self.alpha), (4 * t + 2) / (mu * (t + 1) ** 2))

    def two_stage_iterations(self, mu: float, eps: float, delta2: float) -> int:
        """Return the number of two-stage steps that suffices, T ≥ 16β/(μ²ε) + 8αΔ/(μ²√ε)."""
        _check_positive(mu=mu, eps=eps, delta2=delta2)
        return _count(16 * self.beta / (mu**2 * eps) + 8 * self.alpha * math.sqrt(delta2 / eps) / mu**2)

    def two_stage_bound(self, mu: float, T: int, delta2: float) -> float:
        """Return the bound 64α²Δ²/(μ⁴T²) + 16β/(μ²T) ≥ E|λ_T - λ*|² after T two-stage steps.

        With 64α/μ², as printed in one place, it fails.
        """
        _check_positive(mu=mu, T=T, delta2=delta2)
        return 64 * self.alpha**2 * delta2 / (mu**4 * T**2) + 16 * self.beta / (mu**2 * T)


class AdaptiveVariance(NamedTuple):
    """The constants of a bound with a free δ, E|g(λ)|² ≤ (1 + Cδ)α̃|λ - λ*|² + (1 + 1/(Cδ))β̃ for every δ > 0.

    The methods are those of `QuadraticVariance` at the best δ, from the same numbers ``mu``, ``eps`` and ``delta2``,
    and raise as they do.

    >>> AdaptiveVariance(4.0, 1.0, 1.0).at(1.0)
    QuadraticVariance(alpha=8.0, beta=2.0)
    """

    alpha: float  # α̃
    beta: float  # β̃
    constant: float  # C

    def at(self, slack: float) -> QuadraticVariance:
        """Return the bound at the δ that is given as ``slack``, or at its limit δ = 0 where β̃ = 0."""
        if self.beta == 0 and slack == 0:  # the limit
            return QuadraticVariance(self.alpha, 0.0)
        _check_positive(slack=slack)
        share = self.constant * slack
        return QuadraticVariance((1 + share) * self.alpha, (1 + 1 / share) * self.beta)

    def fixed_slack(self, eps: float) -> float:
        """Return the slack δ* = 2β̃/(Cα̃ε), where both branches of the fixed step agree."""
        _check_positive(eps=eps)
        return 2 * self.beta / (self.constant * self.alpha * eps)

    def fixed_step(self, mu: float, eps: float) -> float:
        """Return the fixed step size min(μ/(2(α̃ + 2β̃/ε)), 2/μ) for the error ε."""
        _check_positive(mu=mu, eps=eps)
        return min(mu / (2 * (self.alpha + 2 * self.beta / eps)), 2 / mu)

    def fixed_iterations(self, mu: float, eps: float, delta2: float) -> int:
        """Return the number of fixed steps that suffices, T ≥ (2/μ²) max(α̃ + 2β̃/ε, μ²/4) log(2Δ²/ε)."""
        _check_positive(mu=mu, eps=eps, delta2=delta2)
        return _count(math.log(2 * delta2 / eps) / (self.fixed_step(mu, eps) * mu))

    def two_stage_slack(self, eps: float, delta2: float) -> float:
        """Return the slack δ* = √(2β̃/(α̃Δ)) ε^-¼/C, which minimises the two-stage count."""
        _check_positive(eps=eps, delta2=delta2)
        return math.sqrt(2 * self.beta / (self.alpha * math.sqrt(delta2))) * eps**-0.25 / self.constant

    def two_stage_step(self, mu: float, eps: float, delta2: float, t: int) -> float:
        """Return the step size after t steps, min(μ/(2α̃ + 2√2 √(α̃β̃/Δ) ε^-¼), (4t + 2)/(μ(t + 1)²))."""
        return self.at(self.two_stage_slack(eps, delta2)).two_stage_step(mu, t)

    def two_stage_iterations(self, mu: float, eps: float, delta2: float) -> int:
        """Return the number of two-stage steps that suffices, T ≥ 16β̃/(μ²ε) + (16√2/μ²)√(α̃β̃Δ) ε^-¾ + 8α̃Δ/(μ²√ε)."""
        return self.at(self.two_stage_slack(eps, delta2)).two_stage_iterations(mu, eps, delta2)


def landing_variance(
    L: float, dim: int, fisher4: float, kurtosis: float = 3.0, mean_field: bool = False
) -> AdaptiveVariance:
    """The adaptive constants of sticking the landing: α̃ = 4L²(d + k), β̃ = (2d + k)√D_F4, C = ½.

    For mean field they are 4L²(2k√d + 1) and (1 + √(dk))√D_F4.  With D_F4 = 0 a fixed step μ/(8L²(d + k)) converges
    linearly.

    Args:
        L: the largest curvature, ∇²ℓ ⪯ L, which is taken for S too.
        dim: d.
        fisher4: D_F4(q*, π), 0 where q* is π.
        kurtosis: the fourth moment k of the base, 3 for the Gaussian.
        mean_field: whether C is diagonal.

    Returns:
        The constants.

    Raises:
        InputError: if a constant is out of range.

    >>> landing_variance(1.0, 2, 0.0).at(0.0)
    QuadraticVariance(alpha=20.0, beta=0.0)
    """
    _check(L, dim, kurtosis, mean_field, fisher4=fisher4)
    factor = 1 + math.sqrt(dim * kurtosis) if mean_field else 2 * dim + kurtosis
    return AdaptiveVariance(4 * L**2 * _jacobian(dim, kurtosis, mean_field), factor * math.sqrt(fisher4), 0.5)


def closed_entropy_variance(
    L: float, dim: int, distance2: float, kurtosis: float = 3.0, mean_field: bool = False
) -> AdaptiveVariance:
    """The adaptive constants of the closed entropy: α̃ = L²(d + k + 4), β̃ = L²(d + k)|λ̄ - λ*|², C = 1.

    For mean field 2k√d + 1 takes the place of d + k.

    Args:
        L, dim, kurtosis, mean_field: as in `landing_variance`.
        distance2: |λ̄ - λ*|² = W₂(q*, δ_z̄)², with z̄ the mode of the target.

    Returns:
        The constants.

    Raises:
        InputError: if a constant is out of range.

    >>> closed_entropy_variance(1.0, 2, 3.0)
    AdaptiveVariance(alpha=9.0, beta=15.0, constant=1.0)
    """
    _check(L, dim, kurtosis, mean_field, distance2=distance2)
    size = _jacobian(dim, kurtosis, mean_field)
    return AdaptiveVariance(L**2 * (size + 4), L**2 * size * distance2, 1.0)


def landing_bound(
    L: float, S: float, dim: int, fisher4: float, delta: float, kurtosis: float = 3.0, mean_field: bool = False
) -> QuadraticVariance:
    """The variance of sticking the landing at one δ: α = (2 + δ)(d + k)(L² + S²), β = (1 + 2/δ)(d + k)√D_F4.

    For mean field 2k√d + 1 and 1 + √(dk) take the places of d + k.  Theorem 1 prints L²(d + k) + S²(d + 1), which fails
    (α = 12 where 16 is attained), and 2d + k in β, which holds.  S² is attained by ‖C⁻¹‖²‖C*⁻¹‖², the spectral norms.

    Args:
        L, dim, kurtosis, mean_field: as in `landing_variance`.
        S: a bound of ‖C⁻¹‖² at λ and at λ*.
        fisher4: D_F4(q*, π), 0 where q* is π.
        delta: δ, positive.

    Returns:
        α and β.

    Raises:
        InputError: if a constant is out of range.

    >>> landing_bound(1.0, 1.0, 1, 0.0, 1e-9).alpha > 15.9
    True
    """
    _check(L, dim, kurtosis, mean_field, fisher4=fisher4)
    _check_positive(S=S, delta=delta)
    size = _jacobian(dim, kurtosis, mean_field)
    factor = 1 + math.sqrt(dim * kurtosis) if mean_field else dim + kurtosis
    return QuadraticVariance((2 + delta) * size * (L**2 + S**2), (1 + 2 / delta) * factor * math.sqrt(fisher4))


def closed_entropy_bound(
    L: float, S: float, dim: int, distance2: float, delta: float, kurtosis: float = 3.0, mean_field: bool = False
) -> QuadraticVariance:
    """The variance of the closed entropy at one δ: α = L²(d + k)(1 + δ) + (L + S)², β = L²(d + k)(1 + 1/δ)|λ̄ - λ*|².

    For mean field 2k√d + 1 takes the place of d + k; that theorem is printed without L² in β.

    Args:
        L, dim, kurtosis, mean_field: as in `landing_variance`.
        S: a bound of 1/C_ii².
        distance2: |λ̄ - λ*|², with λ̄ the point mass at the mode of the target.
        delta: δ, positive.

    Returns:
        α and β.

    Raises:
        InputError: if a constant is out of range.

    >>> closed_entropy_bound(1.0, 1.0, 1, 0.0, 1.0)  # 4 · 2 + 2²
    QuadraticVariance(alpha=12.0, beta=0.0)
    """
    _check(L, dim, kurtosis, mean_field, distance2=distance2)
    _check_positive(S=S, delta=delta)
    size = L**2 * _jacobian(dim, kurtosis, mean_field)
    return QuadraticVariance(size * (1 + delta) + (L + S) ** 2, size * (1 + 1 / delta) * distance2)


def _jacobian(dim: int, kurtosis: float, mean_field: bool) -> float:
    """E J|T_λ u - T_λ' u|² ≤ this times |λ - λ'|²."""
    return 2 * kurtosis * math.sqrt(dim) + 1 if mean_field else dim + kurtosis


def _check(L: float, dim: int, kurtosis: float, mean_field: bool, **squares: float) -> None:
    _check_positive(L=L, dim=dim)
    read_flag("mean_field", mean_field)
    read_number("kurtosis", kurtosis, "is E u⁴ for E u² = 1", at_least=1)
    for name, value in squares.items():
        read_number(name, value, at_least=0)


def _check_positive(**constants: float) -> None:
    for name, value in constants.items():
        read_number(name, value, above=0)


def _count(steps: float) -> int:
    return max(1, math.ceil(steps))
