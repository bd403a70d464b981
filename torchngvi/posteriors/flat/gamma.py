"""The gamma law and its relatives as flat posteriors: inverse gamma, normal-inverse-gamma, Wishart."""

import math
from abc import abstractmethod
from typing import Self, final

import torch
from torch import Tensor

from torchngvi.arguments import shown
from torchngvi.errors import InputError
from torchngvi.numerics.linalg import cholesky, eigh
from torchngvi.numerics.special import increasing_root, log_minus_digamma, trigamma, trigamma_excess
from torchngvi.posteriors.flat.exponential_family import ExponentialFamily, PositiveFamily, shrunk
from torchngvi.posteriors.flat.flat_posterior import (
    FlatPosterior,
    check_start,
    dual_entries,
    gammas,
    lower_entries,
    lower_triangle,
    solve_symmetric,
    symmetric,
    symmetric_matrix,
)
from torchngvi.posteriors.shapes import Shape, normal

# What the gamma law and the law of its reciprocal share, over η = (a, b): A, ω = ∇A and F = ∇²A
#
# A = lnΓ(a) - a log b      ω = (ψ(a) - log b, -a/b)
# F = [[ψ'(a), -1/b], [-1/b, a/b²]], whose determinant is (a ψ'(a) - 1)/b²


class ShapeRate(PositiveFamily):
    """The laws of which a positive number u ~ Gamma(a, b) is a part, over the shape a and the rate b: abstract."""

    domain = "a and b are positive"

    def __init__(
        self,
        vector: Tensor,  # (*batch, 2)
    ) -> None:
        super().__init__(vector, 1, size=2)

    @abstractmethod
    def as_gamma(
        self,
        theta: Tensor,  # (*sample, *batch, 1)
    ) -> Tensor:
        """Compute the variable u whose law is Gamma(a, b) from θ, or θ from it: a map that is its own inverse."""

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw u from Gamma(a, 1), scale it by 1/b, and keep it off 0 by the smallest normal number."""
        a, b = self.point(at).detach().unbind(-1)
        draws = gammas(shape, a, generator) / b
        return self.as_gamma(draws.clamp_min(torch.finfo(draws.dtype).tiny)[..., None])

    def statistics(self, theta: Tensor) -> Tensor:
        """Compute (log u, -u)."""
        u = self.as_gamma(theta)
        return torch.cat([u.log(), -u], -1)

    def log_partition(self, at: Tensor | None = None) -> Tensor:
        """Compute lnΓ(a) - a log b."""
        a, b = self.point(at).unbind(-1)
        return torch.lgamma(a) - a * b.log()

    def expectation(self, at: Tensor | None = None) -> Tensor:
        """Compute (ψ(a) - log b, -a/b)."""
        a, b = self.point(at).unbind(-1)
        return torch.stack([torch.digamma(a) - b.log(), -a / b], -1)

    def natural(self, omega: Tensor) -> Tensor:
        """Find a with log a - ψ(a) = log(-ω₂) - ω₁, and b = -a/ω₂."""
        gap = (-omega[..., 1]).log() - omega[..., 0]
        a = increasing_root(lambda log_a: gap - log_minus_digamma(log_a.exp()), gap).exp()
        return torch.stack([a, -a / omega[..., 1]], -1)

    def fisher_product(self, change: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute (ψ'(a)u - w/b, -u/b + aw/b²) of a change (u, w)."""
        (a, b), (u, w) = self.point(at).unbind(-1), change.unbind(-1)
        return torch.stack([trigamma(a) * u - w / b, (a * w / b - u) / b], -1)

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Solve the 2 x 2 system, with ψ'(a) - 1/a as one number."""
        (a, b), (first, second) = self.point(at).unbind(-1), gradient.unbind(-1)
        u = (first + b * second / a) / trigamma_excess(a)
        return torch.stack([u, b * (b * second + u) / a], -1)


# Gamma(a, b) over η = (a, b), for a positive number x: T = (log x, -x), h = 1/x


@final
class Gamma(ShapeRate):
    """Gamma(a, b), with shape a and rate b, for a positive number x.

    Use it for a precision, a rate of events or a scale; it is conjugate to Poisson counts and to the precision of
    normal data.

    Args:
        vector: (a, b), positive, (*batch, 2).

    Raises:
        InputError: a start that is not positive and finite, or of another length.

    >>> import torch
    >>> q = Gamma(torch.tensor([3.0, 2.0]))
    >>> q.mean.item(), q.variance.item()
    (1.5, 0.75)
    """

    def as_gamma(self, theta: Tensor) -> Tensor:
        """Return θ itself."""
        return theta

    def base_coefficients(self) -> Tensor:
        """Return (-1, 0)."""
        return self.vector.new_tensor([-1.0, 0.0])

    @property
    def mean(self) -> Tensor:
        """The mean a/b of x, (*batch, 1)."""
        return self.vector[..., :1] / self.vector[..., 1:]

    @property
    def variance(self) -> Tensor:
        """The variance a/b² of x, (*batch, 1)."""
        return self.mean / self.vector[..., 1:]


# Inverse gamma(a, b) over η = (a, b), for a positive number x: T = (-log x, -1/x), h = 1/x


@final
class InverseGamma(ShapeRate):
    """Inverse gamma(a, b), the law of 1/u for u ~ Gamma(a, b), for a positive number x.

    Use it for the variance of normal data, to which it is conjugate.

    Args:
        vector: (a, b), positive, (*batch, 2).

    Raises:
        InputError: a start that is not positive and finite, or of another length.

    >>> InverseGamma(torch.tensor([3.0, 2.0])).mean.item()
    1.0
    """

    def as_gamma(self, theta: Tensor) -> Tensor:
        """Return 1/θ."""
        return 1 / theta

    def base_coefficients(self) -> Tensor:
        """Return (1, 0)."""
        return self.vector.new_tensor([1.0, 0.0])

    @property
    def mean(self) -> Tensor:
        """The mean b/(a - 1) of x, (*batch, 1); infinite for a ≤ 1."""
        a, b = self.vector[..., :1], self.vector[..., 1:]
        return torch.where(a > 1, b / (a - 1), torch.inf)

    @property
    def variance(self) -> Tensor:
        """The variance b²/((a - 1)²(a - 2)) of x, (*batch, 1); infinite for a ≤ 2."""
        a, b = self.vector[..., :1], self.vector[..., 1:]
        return torch.where(a > 2, (b / (a - 1)).square() / (a - 2), torch.inf)


# N(m, v) x inverse-gamma(a, b) for a mean and a variance (Godichon-Baggioni, Nguyen and Tran 2023, Example 2)
#
# θ = (μ, σ²), λ = (m, v, a, b), the two independent, with e = μ - m:
#
#     score = (e/v, -1/(2v) + e²/(2v²), log b - ψ(a) - log σ², a/b - 1/σ²)
#     I_F = blockdiag(diag(1/v, 1/(2v²)), [[t(a), -1/b], [-1/b, a/b²]])
#
# The normal density of the paper's log q lacks the 2 of e²/(2v); its gradient is printed right.


@final
class NormalInverseGamma(FlatPosterior):
    """q(μ, σ²) = N(μ; m, v) IG(σ²; a, b), for the mean and the variance of normal data, independent of one another.

    Args:
        vector: (m, v, a, b) at the start, (*batch, 4), the last three positive.

    Raises:
        InputError: a start that is not finite, or not positive where it has to be.

    >>> q = NormalInverseGamma(torch.tensor([0.0, 1.0, 3.0, 4.0]))
    >>> q.sample(5, torch.Generator().manual_seed(0)).shape
    torch.Size([5, 2])
    """

    domain = "v, a and b are positive"

    def __init__(
        self,
        vector: Tensor,  # (*batch, 4)
    ) -> None:
        check_start(type(self).__name__, vector=vector)
        if vector.shape[-1] != 4:
            raise InputError(f"NormalInverseGamma starts at (m, v, a, b), (*batch, 4); got {shown(vector)}.")
        super().__init__(vector, 2)

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw μ = m + √v z and σ² = b/G with G ~ Gamma(a, 1)."""
        m, v, a, b = self.point(at).detach().unbind(-1)
        z = normal(shape, m[..., None], 1, generator)[..., 0]
        return torch.stack([m + v.sqrt() * z, b / gammas(shape, a, generator)], -1)

    @property
    def mean(self) -> Tensor:
        """The means m of μ and b/(a - 1) of σ², (*batch, 2); the latter is infinite for a ≤ 1."""
        m, _, a, b = self.vector.unbind(-1)
        return torch.stack([m, torch.where(a > 1, b / (a - 1), torch.inf)], -1)

    @property
    def variance(self) -> Tensor:
        """The variances v of μ and b²/((a - 1)²(a - 2)) of σ², (*batch, 2); the latter is infinite for a ≤ 2."""
        _, v, a, b = self.vector.unbind(-1)
        return torch.stack([v, torch.where(a > 2, (b / (a - 1)).square() / (a - 2), torch.inf)], -1)

    def log_prob(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute log N(μ; m, v) + a log b - log Γ(a) - (a + 1) log σ² - b/σ²."""
        m, v, a, b = self.point(at).unbind(-1)
        mu, variance = theta.unbind(-1)
        gaussian = -0.5 * (2 * math.pi * v).log() - (mu - m).square() / (2 * v)
        return gaussian + a * b.log() - torch.lgamma(a) - (a + 1) * variance.log() - b / variance

    def score(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute (e/v, -1/(2v) + e²/(2v²), log b - ψ(a) - log σ², a/b - 1/σ²) with e = μ - m."""
        m, v, a, b = self.point(at).unbind(-1)
        mu, variance = theta.unbind(-1)
        u = (mu - m) / v
        parts = (u, 0.5 * (u.square() - 1 / v), b.log() - torch.digamma(a) - variance.log(), a / b - 1 / variance)
        return torch.stack(parts, -1)

    def fisher(self, at: Tensor | None = None) -> Tensor:  # (*batch, 4, 4)
        """Compute I_F, (*batch, 4, 4), which is that of the normal beside that of the inverse gamma."""
        _, v, a, b = self.point(at).unbind(-1)
        matrix = torch.stack([1 / v, 0.5 / v.square(), torch.polygamma(1, a), a / b.square()], -1).diag_embed()
        matrix[..., 2, 3] = matrix[..., 3, 2] = -1 / b
        return matrix

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Solve with the 4 x 4 Fisher matrix by Cholesky."""
        return solve_symmetric(self.fisher(at), gradient)

    def in_domain(self, at: Tensor | None = None) -> Tensor:
        """Say where v, a and b are positive and λ is finite."""
        lam = self.point(at)
        return lam.isfinite().all(-1) & (lam[..., 1:] > 0).all(-1)


# Wishart over η = (a, vech B), for a positive definite matrix X: density ∝ |X|^(a - (d+1)/2) exp(-tr BX)
#
# In the usual parameters a = ν/2 and B = ½V⁻¹.  With the entries of vech as `lower_entries` has them,
#
#     T = (log|X|, -X_ii, -2X_ij)      h = |X|^-(d+1)/2      A = lnΓ_d(a) - a log|B|      ω = (ψ_d(a) - log|B|, -a B⁻¹)
#     F (u, W) = (ψ'_d(a)u - tr B⁻¹W, -uB⁻¹ + aB⁻¹WB⁻¹)      ψ_d(a) = Σ_{j<d} ψ(a - j/2)
#     F⁻¹(g, G) = (u, (BGB + uB)/a),   u = (g + tr(BG)/a)/(ψ'_d(a) - d/a)


@final
class Wishart(ExponentialFamily):
    """The Wishart law of a d x d positive definite matrix X, which is stored as its entries on and below the diagonal.

    Use it for the precision matrix of normal vectors, to which it is conjugate.  θ is vech X, row after row.

    Args:
        vector: (a, vech B) with a > (d - 1)/2 and B positive definite, (*batch, 1 + d(d + 1)/2).

    Raises:
        InputError: a start outside of the domain, or of a length that belongs to no d.

    >>> q = Wishart.of(torch.tensor(5.0), torch.eye(2))  # ν = 5, mean νV
    >>> q.mean.tolist()
    [5.0, 0.0, 5.0]
    """

    domain = "a is above (d - 1)/2 and B is positive definite"

    def __init__(
        self,
        vector: Tensor,  # (*batch, 1 + d(d + 1)/2)
    ) -> None:
        check_start("Wishart", vector=vector)
        entries = vector.shape[-1] - 1
        self.rows = (math.isqrt(8 * entries + 1) - 1) // 2 if entries > 0 else 0
        if self.rows == 0 or self.rows * (self.rows + 1) // 2 != entries:
            raise InputError(
                f"Wishart starts at (a, vech B), a vector of 2, 4, 7, 11, ... numbers; got {vector.shape[-1]}."
            )
        super().__init__(vector, entries)

    @classmethod
    def of(
        cls,
        degrees: Tensor,  # (*batch,)
        scale: Tensor,  # (*batch, d, d)
    ) -> Self:
        """Make the law of the usual parameters, whose mean is νV.

        Args:
            degrees: the degrees of freedom ν, above d - 1, (*batch,).
            scale: V, positive definite, (*batch, d, d).

        Returns:
            The posterior.

        Raises:
            InputError: a scale that is not positive definite, too few degrees of freedom.
        """
        check_start("Wishart", scale=scale)
        root, ok = cholesky(scale)
        if not bool(ok.all()):
            raise InputError(f"scale must be symmetric and positive definite; got {scale.tolist()}.")
        degrees = torch.as_tensor(degrees, dtype=scale.dtype, device=scale.device).expand(scale.shape[:-2])
        return cls(torch.cat([0.5 * degrees[..., None], lower_entries(0.5 * torch.cholesky_inverse(root))], -1))

    def parts(self, at: Tensor | None = None) -> tuple[Tensor, Tensor]:  # (*batch,), (*batch, d, d)
        """Take η apart into a and the symmetric matrix B."""
        eta = self.point(at)
        return eta[..., 0], symmetric_matrix(eta[..., 1:], self.rows)

    def _log_det(self, matrix: Tensor) -> Tensor:
        return 2 * cholesky(matrix)[0].diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def _primal(self, entries: Tensor) -> Tensor:
        """The symmetric M with these entries as its dual."""
        matrix = symmetric_matrix(entries, self.rows)
        return 0.5 * (matrix + matrix.diagonal(dim1=-2, dim2=-1).diag_embed())

    def _halves(self, a: Tensor) -> Tensor:  # (*batch, d)
        return a[..., None] - 0.5 * torch.arange(self.rows, dtype=a.dtype, device=a.device)

    def reference_vector(self) -> Tensor:
        """Return the parameters of d + 2 degrees of freedom and the scale I."""
        rows = torch.eye(self.rows, dtype=self.dtype, device=self.device)
        return Wishart.of(torch.tensor(self.rows + 2.0, dtype=self.dtype, device=self.device), rows).vector

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw X = RAAᵀRᵀ with RRᵀ = V by Bartlett's lower triangle A."""
        a, B = self.parts(self.point(at).detach())
        diagonal = (2 * gammas(shape, self._halves(a), generator)).clamp_min(torch.finfo(B.dtype).tiny).sqrt()
        below = lower_triangle(normal(shape, a[..., None], self.dim, generator), self.rows).tril(-1)
        inverse = torch.linalg.inv(cholesky(2 * B)[0]).mT  # RRᵀ = (2B)⁻¹
        root = inverse @ (below + diagonal.diag_embed())
        return lower_entries(root @ root.mT)

    def statistics(self, theta: Tensor) -> Tensor:
        """Compute (log|X|, -X_ii, -2X_ij)."""
        X = symmetric_matrix(theta, self.rows)
        return torch.cat([self._log_det(X)[..., None], -dual_entries(X)], -1)

    def base_coefficients(self) -> Tensor:
        """Return (-(d + 1)/2, 0)."""
        result = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        result[0] = -0.5 * (self.rows + 1)
        return result

    def log_partition(self, at: Tensor | None = None) -> Tensor:
        """Compute lnΓ_d(a) - a log|B|."""
        a, B = self.parts(at)
        constant = 0.25 * self.rows * (self.rows - 1) * math.log(math.pi)
        return constant + torch.lgamma(self._halves(a)).sum(-1) - a * self._log_det(B)

    def expectation(self, at: Tensor | None = None) -> Tensor:
        """Compute (ψ_d(a) - log|B|, -aB⁻¹)."""
        a, B = self.parts(at)
        first = torch.digamma(self._halves(a)).sum(-1) - self._log_det(B)
        return torch.cat([first[..., None], -dual_entries(a[..., None, None] * torch.linalg.inv(B))], -1)

    def natural(self, omega: Tensor) -> Tensor:
        """Find a with ψ_d(a) - d log a = ω₁ - log|M|, M = E X, and B = aM⁻¹."""
        M = -self._primal(omega[..., 1:])
        goal = omega[..., 0] - self._log_det(M)
        least, half = 0.5 * (self.rows - 1), 0.5 * torch.arange(self.rows, dtype=omega.dtype, device=omega.device)

        def function(log_excess: Tensor) -> Tensor:
            a = (log_excess.exp() + least)[..., None]
            return (torch.log1p(-half / a) - log_minus_digamma(a - half)).sum(-1) - goal

        a = least + increasing_root(function, goal).exp()
        return torch.cat([a[..., None], lower_entries(a[..., None, None] * torch.linalg.inv(M))], -1)

    def fisher_product(self, change: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute (ψ'_d(a)u - tr B⁻¹W, -uB⁻¹ + aB⁻¹WB⁻¹) of a change (u, vech W)."""
        a, B = self.parts(at)
        inverse, u, W = torch.linalg.inv(B), change[..., 0], symmetric_matrix(change[..., 1:], self.rows)
        first = trigamma(self._halves(a)).sum(-1) * u - (inverse * W).sum((-2, -1))
        second = a[..., None, None] * inverse @ W @ inverse - u[..., None, None] * inverse
        return torch.cat([first[..., None], dual_entries(second)], -1)

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute (u, (BGB + uB)/a), with ψ'_d(a) - d/a as one sum."""
        a, B = self.parts(at)
        G = self._primal(gradient[..., 1:])
        halves = self._halves(a)
        apart = (trigamma_excess(halves) + (a[..., None] - halves) / (a[..., None] * halves)).sum(-1)
        u = (gradient[..., 0] + (B * G).sum((-2, -1)) / a) / apart
        W = (B @ G @ B + u[..., None, None] * B) / a[..., None, None]
        return torch.cat([u[..., None], lower_entries(W)], -1)

    def in_domain(self, at: Tensor | None = None) -> Tensor:
        """Say where a is above (d - 1)/2 and B is finite and positive definite."""
        a, B = self.parts(at)
        return (a > 0.5 * (self.rows - 1)) & a.isfinite() & cholesky(B)[1]

    def retracted(self, at: Tensor, change: Tensor) -> Tensor:
        """Add the change; outside of the domain, a and the eigenvalues of B in its own frame shrink by factors."""
        straight = at + change
        least = 0.5 * (self.rows - 1)
        a, B = self.parts(at)
        root = cholesky(B)[0]
        half = torch.linalg.solve_triangular(root, symmetric_matrix(change[..., 1:], self.rows), upper=False)
        relative, axes, _ = eigh(symmetric(torch.linalg.solve_triangular(root, half.mT, upper=False)))
        bent_root = root @ axes * shrunk(relative).sqrt()[..., None, :]
        bent_a = least + (a - least) * shrunk(change[..., 0] / (a - least))
        bent = torch.cat([bent_a[..., None], lower_entries(bent_root @ bent_root.mT)], -1)
        return torch.where(self.in_domain(straight)[..., None], straight, bent)

    @property
    def mean(self) -> Tensor:
        """The mean aB⁻¹ of X, as vech, (*batch, d(d + 1)/2)."""
        a, B = self.parts(self.vector)
        return lower_entries(a[..., None, None] * torch.linalg.inv(B))

    @property
    def variance(self) -> Tensor:
        """The variances ν(V_ij² + V_ii V_jj) of the entries of X, as vech, (*batch, d(d + 1)/2)."""
        a, B = self.parts(self.vector)
        V = 0.5 * torch.linalg.inv(B)
        diagonal = V.diagonal(dim1=-2, dim2=-1)
        return lower_entries(2 * a[..., None, None] * (V.square() + diagonal[..., :, None] * diagonal[..., None, :]))
