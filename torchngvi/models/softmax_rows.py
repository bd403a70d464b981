"""The rows of softmax regression: expectations of log Σ_k exp η_k over several jointly normal predictors, by nodes."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.interfaces import where_members
from torchngvi.numerics.linalg import cholesky, tril_half

_STEPS = {1: 0.25, 2: 0.4}  # of the grids of nodes, by dimension
_REACH = {1: 8.5, 2: 7.0}  # standard deviations the grids span
_KEPT = 2**23  # probabilities at the nodes that are kept from one product to the next


def predictors(
    mean: Tensor,  # (N, J)
    covariance: Tensor,  # (N, J, J)
    z: Tensor,  # (S, J)
) -> tuple[Tensor, Tensor]:
    """Compute the predictors of all classes at the nodes, that of the first 0, with the root L of the covariance.

    >>> eta, L = predictors(torch.zeros(1, 1), torch.ones(1, 1, 1), torch.ones(3, 1))
    >>> eta.shape, round(L.item(), 2)
    (torch.Size([1, 2, 3]), 1.0)
    """
    # a row of zeros has no variance: what is added changes F by less than rounding does its derivative
    ridge = torch.finfo(mean.dtype).eps ** 0.625
    L, ok = cholesky(covariance + ridge * torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device))
    L = where_members(ok, L, torch.full_like(L, torch.nan))  # an error would make the host wait for the device
    return torch.nn.functional.pad(mean[..., None] + L @ z.mT, (0, 0, 1, 0)), L


def moments(
    mean: Tensor,  # (N, J)
    covariance: Tensor,  # (N, J, J)
    z: Tensor,  # (S, J)
    w: Tensor,  # (S,)
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute E[log(1 + Σ e^η_k)] of some rows, its derivative in e and twice that in Σ.

    >>> z, w = nodes(1, 512, torch.float64, torch.device("cpu"))
    >>> zero = torch.zeros(1, 1, dtype=torch.float64)
    >>> [round(x.item(), 4) for x in moments(zero, zero[None], z, w)]  # log 2, ½, ¼
    [0.6931, 0.5, 0.25]
    """
    eta, L = predictors(mean, covariance, z)
    top = eta.amax(-2)
    powers = (eta - top[:, None]).exp_()
    total = powers.sum(-2)
    value = (top + total.log()) @ w
    weighted = powers[:, 1:] * (w / total)[:, None]  # (N, K - 1, S)
    slope = weighted.sum(-1)
    half = tril_half(L.mT @ (weighted @ z))  # ∂F/∂L = Σ w p zᵀ
    inner = torch.linalg.solve_triangular(L.mT, half + half.mT, upper=True)
    return value, slope, torch.linalg.solve_triangular(L, inner, upper=False, left=False)


class Nodes(NamedTuple):
    """Nodes with their weights, and for how many rows they are evaluated at once.

    >>> Nodes(torch.zeros(1, 2), torch.ones(1), 100).rows
    100
    """

    z: Tensor  # (S, J)
    w: Tensor  # (S,)
    rows: int


def bent(
    mean: Tensor,  # (*batch, N, J)
    covariance: Tensor,  # (*batch, N, J, J)
    at: Nodes,
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Make the map from changes of e and Σ to those of the slope and the curvature that `moments` computes of them.

    >>> z, w = nodes(1, 512, torch.float64, torch.device("cpu"))
    >>> e = V = torch.ones(1, 1, dtype=torch.float64)
    >>> slope, _ = bent(e, V[None], Nodes(z, w, 10))(e, 0 * V[None])  # along e it is the curvature
    >>> torch.allclose(slope, moments(e, V[None], z, w)[2][0])
    True
    """
    shape = mean.shape[:-1]
    parts = list(zip(mean.flatten(0, -2).split(at.rows), covariance.flatten(0, -3).split(at.rows), strict=True))
    few = mean.numel() * len(at.w) <= _KEPT
    kept = [_Bent(e, V, at) for e, V in parts] if few else None

    def change(de: Tensor, dV: Tensor) -> tuple[Tensor, Tensor]:
        moves = zip(de.flatten(0, -2).split(at.rows), dV.flatten(0, -3).split(at.rows), strict=True)
        made = kept if kept is not None else (_Bent(e, V, at) for e, V in parts)
        slopes, curvatures = zip(*(part(*move) for part, move in zip(made, moves, strict=True)), strict=True)
        return torch.cat(slopes).reshape(*shape, -1), torch.cat(curvatures).reshape(*shape, *dV.shape[-2:])

    return change


class _Bent:
    """The first derivatives of slope and curvature of a block of rows in e and Σ, by those of p at the nodes."""

    def __init__(self, mean: Tensor, covariance: Tensor, at: Nodes) -> None:
        self.z = at.z
        eta, self.L = predictors(mean, covariance, at.z)
        self.p = eta.softmax(-2)[:, 1:]  # (N, J, S)
        self.weighted = self.p * at.w
        self.by_root = self.weighted @ self.z  # ∂F/∂L
        self.B = self._curvature(self.L.mT @ self.by_root)

    def _curvature(self, M: Tensor) -> Tensor:
        """L⁻ᵀ S L⁻¹."""
        half = tril_half(M)
        inner = torch.linalg.solve_triangular(self.L.mT, half + half.mT, upper=True)
        return torch.linalg.solve_triangular(self.L, inner, upper=False, left=False)

    def __call__(self, de: Tensor, dV: Tensor) -> tuple[Tensor, Tensor]:
        L = self.L
        inner = torch.linalg.solve_triangular(L, dV, upper=False)
        inner = torch.linalg.solve_triangular(L.mT, inner, upper=True, left=False)
        dL = L @ tril_half(inner)
        eta = de[..., None] + dL @ self.z.mT
        dp = (eta - (self.p * eta).sum(-2, keepdim=True)).mul_(self.weighted)
        dM = dL.mT @ self.by_root + L.mT @ (dp @ self.z)
        R = torch.linalg.solve_triangular(L, dL, upper=False, left=False)
        turned = self.B @ R
        return dp.sum(-1), self._curvature(dM) - turned - turned.mT


@functools.cache
def nodes(dim: int, count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights for the standard normal distribution in J = K - 1 dimensions.

    >>> z, w = nodes(1, 512, torch.float64, torch.device("cpu"))
    >>> round((w @ z.square()).item(), 6)  # the variance
    1.0
    """
    with torch.inference_mode(False):
        z, w = _grid(dim) if dim in _STEPS else _sobol(dim, count)
        return z.to(device, dtype), w.to(device, dtype)


def _grid(dim: int) -> tuple[Tensor, Tensor]:
    number = math.floor(_REACH[dim] / _STEPS[dim])
    axis = torch.arange(-number, number + 1, dtype=torch.float64, device="cpu") * _STEPS[dim]
    z = torch.cartesian_prod(*[axis] * dim).reshape(-1, dim)
    z = z[z.square().sum(-1) <= _REACH[dim] ** 2]
    w = torch.exp(-0.5 * z.square().sum(-1))
    return z, w / w.sum()


def _sobol(dim: int, count: int) -> tuple[Tensor, Tensor]:
    uniform = torch.quasirandom.SobolEngine(dim, scramble=True, seed=0).draw(count // 2, dtype=torch.float64)
    half = torch.special.ndtri(uniform.clamp(1e-12, 1 - 1e-12))
    factor = torch.linalg.cholesky(half.mT @ half / len(half))
    z = torch.linalg.solve_triangular(factor, half.mT, upper=False).mT
    return torch.cat([z, -z]), torch.full((count,), 1 / count, dtype=torch.float64, device="cpu")
