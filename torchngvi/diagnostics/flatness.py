"""How flat the ELBO is where it is flattest: what a small natural gradient does not say.

Near the best q the ELBO falls by about ½ gᵀA⁻¹g where the natural gradient is g, with A the Hessian of L in the frame
of q.  That is ½|g|² where A is the identity, as it is for a quadratic ℓ and a full covariance.  To third order the
smallest eigenvalue of A, with the covariance at its best for each mean, is 1 - λ with λ the largest of M, the matrix of
linear response (`torchngvi.diagnostics.linear_response`), less N outside the pattern of q: near nought for a funnel,
where mean and standard deviations have to move together, and for a mean field of variables that are highly correlated.

The largest eigenvalue of an estimate of M is that of its noise where D is large.  So one half of the draws says in
which direction it is, and the other how large it is there, which is unbiased for that direction but for one thing: of
n whitened pairs the squares |z|² vary less, by 1 - D/n, than those of independent ones, and B with them.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.diagnostics.linear_response import Residuals, kernel
from torchngvi.numerics.linalg import eigh
from torchngvi.structures import Pattern
from torchngvi.structures.pattern import Structured

PAIRS = 2048  # that are used at most
_STEPS = 24  # of Lanczos' method
_FEWEST = 16  # pairs of a half
_LEAST = 0.25  # of 1 - D/n
_ENTRIES = 8_000_000  # of a product of pairs of draws, coordinate by coordinate, at once
_CERTAIN = 3.0  # standard errors


class Flatness(NamedTuple):
    """The largest eigenvalue λ of M - N.

    Attributes:
        eigenvalue: λ in the direction that was found; 0 for a Gaussian, and the ELBO is flat at 1.
        error: its standard error.

    >>> Flatness(0.5, 0.0).growth, Flatness(0.9, 0.1).growth, Flatness(-0.3, 0.1).growth
    (2.0, inf, 1.0)
    """

    eigenvalue: float
    error: float

    @property
    def growth(self) -> float:
        """At most how many times ½|g|² the distance from the best q is, in nats, by three standard errors."""
        left = 1 - max(self.eigenvalue + _CERTAIN * self.error, 0.0)
        return 1 / left if left > 0 else math.inf


def flatness(residuals: Residuals, structure: Pattern) -> Flatness | None:
    """Estimate how flat the ELBO is from residuals at hand, without a call of the log joint.

    >>> z = torch.randn(1024, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> z, residual = torch.cat([z, -z]), torch.zeros(2048, 3, dtype=torch.float64)
    >>> residual[:, 1] = 0.5 * (z[:, 1].square() - 1)  # B = 1, M = 1/2 in this direction
    >>> from torchngvi.structures import Dense
    >>> found = flatness(Residuals(z, residual), Dense(3))
    >>> abs(found.eigenvalue - 0.5) < 3 * found.error, found.error < 0.1
    (True, True)
    """
    half, even, odd = (part[:PAIRS] for part in residuals.halves)
    if not structure.closed or len(half) < 2 * _FEWEST or not bool(even.isfinite().all() & odd.isfinite().all()):
        return None
    parts = [_Part(*parts, structure) for parts in zip(half.chunk(2), even.chunk(2), odd.chunk(2), strict=True)]
    whitened = len(residuals.z) // 2
    shrunk = max(1 - structure.dim / whitened, _LEAST) ** 2 if structure.dim <= whitened else 1.0
    found = [one.quadratic(other.direction(), shrunk) for one, other in (parts, parts[::-1])]
    eigenvalue = 0.5 * (found[0][0] + found[1][0])
    return Flatness(eigenvalue, 0.5 * math.hypot(found[0][1], found[1][1]))


class _Part:
    """M - N by some pairs of draws, as a product with vectors: no matrix of D² numbers, unless q has one."""

    def __init__(self, z: Tensor, even: Tensor, odd: Tensor, structure: Pattern) -> None:
        self.z, self.even, self.odd, self.structure, self.count = z, even, odd, structure, len(z)
        rows = len(z) if structure.widest in (1, structure.dim) else max(1, _ENTRIES // z.numel())
        self.table = torch.cat([kernel(part, z, structure) for part in z.split(rows)]).fill_diagonal_(0.0)  # (n, n)
        self.inside: Structured | None = None  # of the mean of ½(r zᵀ + z rᵀ), the entries of the pattern
        if structure.widest < structure.dim:
            self.inside = structure.sym_lower(odd, z) / len(z)

    def times(self, v: Tensor) -> Tensor:
        """(M - N) v."""
        product = 0.5 * (self.even.mT @ (self.table @ (self.even @ v))) / (self.count * (self.count - 1))
        return product if self.inside is None else product - self._outside(v, self.inside)

    def _outside(self, v: Tensor, inside: Structured) -> Tensor:
        """N v: the mean of ½(r zᵀ + z rᵀ) without the entries of the pattern."""
        both = self.odd.mT @ (self.z @ v) + self.z.mT @ (self.odd @ v)
        return 0.5 * both / self.count - self.structure.smv(inside, v)

    def direction(self) -> Tensor:
        """The eigenvector of the largest eigenvalue, by Lanczos' method."""
        dim = self.even.shape[1]
        start = torch.randn(dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0), device="cpu").to(
            self.even
        )
        basis = [start / start.norm()]
        images = []
        for _ in range(min(_STEPS, dim)):
            images.append(self.times(basis[-1]))
            Q = torch.stack(basis)
            rest = images[-1] - Q.mT @ (Q @ images[-1])
            rest = rest - Q.mT @ (Q @ rest)
            if not bool(rest.norm() > 1e-10 * images[0].norm()):
                break
            basis.append(rest / rest.norm())
        Q = torch.stack(basis[: len(images)])
        small = Q @ torch.stack(images).mT
        return eigh(0.5 * (small + small.mT))[1][:, -1] @ Q

    def quadratic(self, v: Tensor, shrunk: float) -> tuple[float, float]:
        """vᵀ(M - N)v, of which M is as many times too small, and the standard error of M; N has hardly any."""
        along = self.even @ v
        each = along * (self.table @ along) / (self.count - 1)  # h_s of the U-statistic, whose mean it is
        outside = 0.0 if self.inside is None else float(v @ self._outside(v, self.inside))
        return 0.5 * float(each.mean()) / shrunk - outside, float(each.std()) / math.sqrt(self.count) / shrunk
