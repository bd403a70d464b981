"""How much of the curvature of a row stays along a line, for energies with |f'''| ≤ f'' in the predictor.

A row's predictor η = e + sz moves by a linear form h in v = (1, z, w), z and w independent N(0, 1).  With the moments
μ_k = E f''(e + sz) z^k, k = 0..4, and ℓ = E h² / n² for the length n of the direction,

    E f''h² ≥ κ E h²      E f''h⁴ ≤ q (E h²)²      E f''h⁴ ≤ q̄ (E f''h²)²

where κ is the least eigenvalue of E f'' vvᵀ, q the largest of E f'' uuᵀ with u the six entries of vvᵀ (√2 for each
mixed one), and q̄ the same after v is whitened by E f'' vvᵀ.  So √(E f''h⁴/E f''h²) ≤ n K with K² the smaller of qℓ/κ
and q̄ min(1, κ̄ℓ), κ̄ the largest eigenvalue.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_BANDS = (2.0, 4.0, 8.0, 16.0, 30.0)  # of the standard deviation of a predictor; a row above has no constants
_PAIRS = ((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2))


class RowConstants(NamedTuple):
    """The constants of the rows, each (N,)."""

    known: Tensor  # whether the row has any
    least: Tensor  # κ
    most: Tensor  # κ̄
    quartic: Tensor  # q
    white: Tensor  # q̄
    scale: Tensor  # of what a rule for E f' or E f'' may be wrong by, relative to its error

    def local(self, leverage: Tensor) -> Tensor:
        """K of each row from its leverage ℓ."""
        by_least = self.quartic * leverage / self.least
        by_white = self.white * (self.most * leverage).clamp_max(1.0)
        return torch.minimum(by_least, by_white).sqrt()


def row_constants(likelihood: Any, mean: Tensor, sd: Tensor, y: Tensor, weights: Tensor) -> RowConstants:
    """Compute the constants of rows with these predictors."""
    moments = torch.zeros(5, *mean.shape, dtype=mean.dtype, device=mean.device)
    slope = torch.zeros_like(mean)
    lower = -1.0
    for upper in _BANDS:
        z = _nodes(upper, mean)
        normal = torch.exp(-0.5 * z.square()) * ((z[1] - z[0]) / math.sqrt(2 * math.pi))
        band = ((sd > lower) & (sd <= upper) & (weights > 0)).nonzero()[:, 0]
        for here in band.split(max(1, 1_000_000 // len(z))):
            curvature, slope[here] = _derivatives(likelihood, mean[here] + sd[here] * z[:, None], y[here])
            for k in range(5):
                moments[k, here] = (normal * z**k) @ curvature
        lower = upper
    moments = weights * moments
    known = (weights > 0) & (sd <= _BANDS[-1]) & moments.isfinite().all(0) & (moments[0] > 0)
    known = known & (moments[2] * moments[0] > moments[1].square())
    safe = torch.where(known, moments, moments.new_tensor([1.0, 0.0, 1.0, 0.0, 3.0])[:, None])
    return _constants(safe, known, torch.maximum(slope.abs(), moments[0] * sd))


def _nodes(sd: float, like: Tensor, tail: float = 10.0) -> Tensor:
    """Nodes of the trapezoidal rule in z: half a unit of the predictor apart, and a quarter of z."""
    reach = tail + min(sd, tail)  # in standard deviations
    count = math.ceil(2 * reach / min(0.25, 0.5 / max(sd, 1e-9)))
    return torch.linspace(-reach, reach, count + 1, dtype=like.dtype, device=like.device)


def _derivatives(likelihood: Any, eta: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """f'' at the nodes, (nodes, N), and the largest |f'| within a standard deviation, (N,)."""
    with torch.enable_grad():
        eta = eta.detach().requires_grad_()
        (first,) = torch.autograd.grad(likelihood.energy(eta, y).sum(), eta, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), eta, materialize_grads=True)
    middle = slice(len(eta) // 2 - 4, len(eta) // 2 + 5)
    return second.detach(), first.detach()[middle].abs().amax(0)


def _constants(moments: Tensor, known: Tensor, scale: Tensor) -> RowConstants:
    m = moments
    normal = (1.0, 0.0, 1.0, 0.0, 3.0)  # E w^l

    def expected(*powers: tuple[int, int]) -> Tensor:
        """E f'' z^k w^l for the sum of powers (k, l)."""
        k, el = (sum(part) for part in zip(*powers, strict=True))
        return m[k] * normal[el]

    def table(entry: Callable[[int, int], Tensor], size: int) -> Tensor:
        return torch.stack([torch.stack([entry(i, j) for j in range(size)], -1) for i in range(size)], -2)

    of = ((0, 0), (1, 0), (0, 1))  # powers of 1, z, w
    zero = torch.zeros_like(m[0])
    root2 = [1.0, 1.0, 1.0, *[math.sqrt(2.0)] * 3]
    B = table(lambda i, j: expected(of[i], of[j]) if (i < 2) == (j < 2) else zero, 3)
    Q = table(lambda a, b: root2[a] * root2[b] * expected(*(of[k] for k in (*_PAIRS[a], *_PAIRS[b]))), 6)
    eigenvalues = torch.linalg.eigvalsh(B)
    A = torch.linalg.inv(torch.linalg.cholesky(B))  # whitens v
    S = table(lambda a, b: root2[a] / root2[b] * _coefficient(A, _PAIRS[a], _PAIRS[b]), 6)
    white = torch.linalg.eigvalsh(S @ Q @ S.mT)[..., -1]
    return RowConstants(
        known, eigenvalues[..., 0], eigenvalues[..., -1], torch.linalg.eigvalsh(Q)[..., -1], white, scale
    )


def _coefficient(A: Tensor, p: tuple[int, int], r: tuple[int, int]) -> Tensor:
    """The coefficient of v_r0 v_r1 in (Av)_p0 (Av)_p1."""
    both = A[..., p[0], r[0]] * A[..., p[1], r[1]]
    return both if r[0] == r[1] else both + A[..., p[0], r[1]] * A[..., p[1], r[0]]
