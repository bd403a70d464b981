"""One view of exponential families and of Gaussians: natural parameters, statistics, and the lengths of changes.

A site of a product is moved by adding up natural parameters, whatever its posterior stores.  Of a Gaussian

    T = (x, -½x_i², -x_i x_j for j < i)      η = (S m, vech S)      δᵀFδ = ∇mᵀS∇m + ½ tr(DVDV),  ∇m = V(u - Dm)

for a change δ = (u, vech D), so that η are what a `NaturalGaussian` stores; of a `DiagonalGaussian` without the mixed
products.  The base measure is constant.  The families are their own form.
"""

from typing import Any

import torch
from torch import Tensor

from torchngvi.errors import PairError
from torchngvi.interfaces import Posterior
from torchngvi.numerics.linalg import cholesky
from torchngvi.posteriors.flat.exponential_family import ExponentialFamily
from torchngvi.posteriors.flat.flat_posterior import dual_entries, lower_entries, symmetric_matrix
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.structures import Dense


class NaturalForm:
    """A posterior by its natural parameters η, (*batch, p), here a family, which is its own form."""

    def __init__(self, q: Any) -> None:
        self.q, self.size = q, q.size

    def statistics(self, x: Tensor) -> Tensor:
        """Compute the sufficient statistics T(x), (*sample, *batch, p), of x, (*sample, *batch, d)."""
        return self.q.statistics(x)

    def base(self) -> Tensor:
        """Return b, (p,), with log h(x) = ⟨b, T(x)⟩ up to a constant."""
        return self.q.base_coefficients()

    def natural(self) -> Tensor:
        """Return η, (*batch, p)."""
        return self.q.vector

    def expectation(self) -> Tensor:
        """Compute ω = E T, (*batch, p)."""
        return self.q.expectation()

    def norm2(self, change: Tensor) -> Tensor:
        """Compute the squared Fisher length δᵀFδ of a change of η, (*batch,)."""
        return (change * self.q.fisher_product(change)).sum(-1).clamp_min(0.0)

    def put(self, eta: Tensor) -> Tensor:
        """Move the posterior to η, in place; False, and nothing done, where that is outside of the domain."""
        ok = self.q.in_domain(eta).all()
        if bool(ok):
            self.q.vector.copy_(eta)
        return ok

    def retracted(self, change: Tensor) -> Tensor:
        """Add a change to η, kept inside where the family knows how."""
        return self.q.retracted(self.q.vector, change)

    def reference(self, number: int, generator: torch.Generator) -> Tensor:
        """Draw points (n, d) in float64 on the CPU from a member around 0 or 1, wherever the posterior itself is."""
        return self.q.at(self.q.reference_vector().double().cpu()).sample(number, generator)


def natural_form(q: Posterior) -> NaturalForm:
    """View a posterior by its natural parameters."""
    if isinstance(q, ExponentialFamily):
        return NaturalForm(q)
    if isinstance(q, Gaussian) and (isinstance(q.structure, Dense) or q.structure.widest == 1):
        return _GaussianForm(q)
    raise PairError(
        "a site of a product is an exponential family of torchngvi.posteriors.flat, or a Gaussian with all "
        f"correlations or none; got {q!r}."
    )


class _GaussianForm(NaturalForm):
    """Mean and precision."""

    def __init__(self, q: Gaussian) -> None:
        self.q, self.alone = q, q.structure.widest == 1
        self.dim = q.dim
        self.size = 2 * q.dim if self.alone else q.dim + q.dim * (q.dim + 1) // 2

    def statistics(self, x: Tensor) -> Tensor:
        if self.alone:
            return torch.cat([x, -0.5 * x.square()], -1)
        return torch.cat([x, -0.5 * dual_entries(x[..., :, None] * x[..., None, :])], -1)

    def _parts(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """The vector, and the symmetric matrix or its diagonal."""
        vector, entries = eta[..., : self.dim], eta[..., self.dim :]
        if self.alone:
            return vector, entries
        return vector, symmetric_matrix(entries, self.dim)

    def base(self) -> Tensor:
        return torch.zeros(self.size, dtype=self.q.dtype, device=self.q.device)

    def natural(self) -> Tensor:
        mean = self.q.mean
        if self.alone:
            precision = self.q.variance.reciprocal()
            return torch.cat([precision * mean, precision], -1)
        precision = torch.cholesky_inverse(cholesky(self.q.covariance)[0])
        return torch.cat([(precision @ mean[..., None])[..., 0], lower_entries(precision)], -1)

    def expectation(self) -> Tensor:
        mean = self.q.mean
        if self.alone:
            return torch.cat([mean, -0.5 * (self.q.variance + mean.square())], -1)
        second = self.q.covariance + mean[..., :, None] * mean[..., None, :]
        return torch.cat([mean, -0.5 * dual_entries(second)], -1)

    def norm2(self, change: Tensor) -> Tensor:
        (vector, D), mean = self._parts(change), self.q.mean
        if self.alone:
            V = self.q.variance
            return ((vector - D * mean).square() * V + 0.5 * (D * V).square()).sum(-1)
        V = self.q.covariance
        force = vector - (D @ mean[..., None])[..., 0]
        product = D @ V
        turned = (product * product.mT).sum((-2, -1))  # tr(DVDV)
        return (force * (V @ force[..., None])[..., 0]).sum(-1) + 0.5 * turned

    def put(self, eta: Tensor) -> Tensor:
        vector, precision = self._parts(eta)
        if self.alone:
            ok = (precision > 0).all() & eta.isfinite().all()
            if bool(ok):
                self.q.initialize_(vector / precision, precision.rsqrt())
            return ok
        factor, positive = cholesky(precision)
        ok = positive.all() & vector.isfinite().all()
        if bool(ok):
            covariance = torch.cholesky_inverse(factor)
            mean = torch.cholesky_solve(vector[..., None], factor)[..., 0]
            self.q.initialize_(mean, cholesky(covariance)[0])
        return ok

    def retracted(self, change: Tensor) -> Tensor:
        return self.natural() + change

    def reference(self, number: int, generator: torch.Generator) -> Tensor:
        return torch.randn(number, self.dim, dtype=torch.float64, device=generator.device, generator=generator)
