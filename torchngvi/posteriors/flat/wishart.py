"""Wishart over η = (a, vech B), for a positive definite matrix X: density ∝ |X|^(a - (d+1)/2) exp(-tr BX).

In the usual parameters a = ν/2 and B = ½V⁻¹.  With the entries of vech as `lower_entries` has them,

    T = (log|X|, -X_ii, -2X_ij)      h = |X|^-(d+1)/2      A = lnΓ_d(a) - a log|B|      ω = (ψ_d(a) - log|B|, -a B⁻¹)
    F (u, W) = (ψ'_d(a)u - tr B⁻¹W, -uB⁻¹ + aB⁻¹WB⁻¹)      ψ_d(a) = Σ_{j<d} ψ(a - j/2)
    F⁻¹(g, G) = (u, (BGB + uB)/a),   u = (g + tr(BG)/a)/(ψ'_d(a) - d/a)
"""

import math
from typing import Self, final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.numerics.gamma_functions import increasing_root, log_minus_digamma, trigamma, trigamma_excess
from torchngvi.numerics.linalg import cholesky, eigh
from torchngvi.posteriors.flat.drawing import gammas, normal
from torchngvi.posteriors.flat.exponential_family import ExponentialFamily, shrunk
from torchngvi.posteriors.flat.flat_posterior import check_start, lower_entries, lower_triangle, symmetric
from torchngvi.posteriors.shapes import Shape

_WIDE = 45.0  # the logarithm of a - (d - 1)/2 lies between minus this and this


@final
class Wishart(ExponentialFamily):
    """The Wishart law of a d x d positive definite matrix X, which is stored as its entries on and below the diagonal.

    One wants it for the precision matrix of normal vectors, to which it is conjugate.  θ is vech X, row after row.

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
        return eta[..., 0], self._matrix(eta[..., 1:])

    def _matrix(self, entries: Tensor) -> Tensor:
        lower = lower_triangle(entries, self.rows)
        return lower + lower.tril(-1).mT

    def _log_det(self, matrix: Tensor) -> Tensor:
        return 2 * cholesky(matrix)[0].diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def _dual(self, matrix: Tensor) -> Tensor:
        """The entries y with ⟨y, vech W⟩ = tr(MW)."""
        return lower_entries(2 * matrix - matrix.diagonal(dim1=-2, dim2=-1).diag_embed())

    def _primal(self, entries: Tensor) -> Tensor:
        """The symmetric M with these entries as its dual."""
        matrix = self._matrix(entries)
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
        X = self._matrix(theta)
        return torch.cat([self._log_det(X)[..., None], -self._dual(X)], -1)

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
        return torch.cat([first[..., None], -self._dual(a[..., None, None] * torch.linalg.inv(B))], -1)

    def natural(self, omega: Tensor) -> Tensor:
        """Find a with ψ_d(a) - d log a = ω₁ - log|M|, M = E X, and B = aM⁻¹."""
        M = -self._primal(omega[..., 1:])
        goal = omega[..., 0] - self._log_det(M)
        least, half = 0.5 * (self.rows - 1), 0.5 * torch.arange(self.rows, dtype=omega.dtype, device=omega.device)

        def function(log_excess: Tensor) -> Tensor:
            a = (log_excess.exp() + least)[..., None]
            return (torch.log1p(-half / a) - log_minus_digamma(a - half)).sum(-1) - goal

        wide = torch.full_like(goal, _WIDE)
        a = least + increasing_root(function, -wide, wide).exp()
        return torch.cat([a[..., None], lower_entries(a[..., None, None] * torch.linalg.inv(M))], -1)

    def fisher_product(self, change: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute (ψ'_d(a)u - tr B⁻¹W, -uB⁻¹ + aB⁻¹WB⁻¹) of a change (u, vech W)."""
        a, B = self.parts(at)
        inverse, u, W = torch.linalg.inv(B), change[..., 0], self._matrix(change[..., 1:])
        first = trigamma(self._halves(a)).sum(-1) * u - (inverse * W).sum((-2, -1))
        second = a[..., None, None] * inverse @ W @ inverse - u[..., None, None] * inverse
        return torch.cat([first[..., None], self._dual(second)], -1)

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
        half = torch.linalg.solve_triangular(root, self._matrix(change[..., 1:]), upper=False)
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
