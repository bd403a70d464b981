"""The prior of a batch beside the inducing values: what the kernels give, its rows a_n, and the way back to them.

K_ZZ = L Lᵀ is factored once a pass; a_n = L⁻¹ k(Z, x_n), as in `sparse_gp`.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from gpytorch.settings import _linalg_dtype_cholesky
from gpytorch.variational import VariationalStrategy
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Frame, Sites
from torchngvi.numerics.linalg import cholesky
from torchngvi.structures.pattern import is_whole

_LARGE = 256  # M from which a product by blocks is faster
_BLOCKS = 4


class Kernels(NamedTuple):
    """The prior of a batch beside the inducing values, differentiable in the hyper-parameters."""

    factor: Tensor  # L, (*batch, M, M), float64
    cross: Tensor  # k(Z, x_n), (*batch, M, B)
    mean: Tensor  # μ(x_n), (*batch, B)
    variance: Tensor  # k(x_n, x_n) + jitter, (*batch, B)

    @torch.no_grad()
    def projection(self, dtype: torch.dtype) -> "Projection":
        """The rows a_n = L⁻¹ k(Z, x_n) with the prior moments that they leave, without a graph.

        Args:
            dtype: the dtype of the result, which is computed in that of L.

        Returns:
            The projection of the batch.
        """
        # from the right, where the transposed view is in the order that LAPACK takes without a copy
        cross = self.cross.to(self.factor.dtype).mT
        rows = torch.linalg.solve_triangular(self.factor.mT, cross, upper=True, left=False).to(dtype)
        return Projection(rows, self.mean.to(dtype), self.variance.to(dtype) - rows.square().sum(-1))

    @torch.no_grad()
    def pulled(self, sites: Sites, H: Tensor, frame: Frame) -> "Kernels":
        """∂E_q[ℓ] of the data part, from H = Σ β_n a_n a_nᵀ, which the step of q has formed already.

        With P = L⁻ᵀ(S - I) and w = L⁻ᵀm: for k(Z, x_n) it is w α_n + P β_n a_n, for L the lower part of
        -w (Σ α_n a_n)ᵀ - P H.

        Args:
            sites: the rows a_n with α_n and β_n.
            H: the curvature of the data part, (*batch, M, M).
            frame: mean and root of q.

        Returns:
            The gradient in each entry of this tuple.
        """
        root, dtype = frame.dense(), self.factor.dtype
        S = root @ root.mT
        S.diagonal(dim1=-2, dim2=-1).sub_(1.0)
        both = torch.cat([frame.mean[..., None], S], -1).to(dtype)
        both = torch.linalg.solve_triangular(self.factor.mT, both, upper=True).to(S.dtype)
        w, P = both[..., :1], both[..., 1:]
        cross = P @ (sites.rows * sites.beta[..., None]).mT
        cross = torch.addcmul(cross, w, sites.alpha[..., None, :])
        factor = -(P @ H + w * (sites.alpha[..., None, :] @ sites.rows)).tril()
        return Kernels(factor, cross, sites.alpha, 0.5 * sites.beta)


class Projection(NamedTuple):
    """The linear map from whitened inducing values v to the values of a batch, and their variance given v."""

    rows: Tensor  # a_n, (*batch, B, M)
    mean: Tensor  # μ(x_n), (*batch, B)
    variance: Tensor  # k(x_n, x_n) + jitter - |a_n|², (*batch, B)

    def part(self, rows: slice) -> "Projection":
        """The projection of some of the rows.

        Args:
            rows: a slice of them.

        Returns:
            The same for these rows.
        """
        return Projection(self.rows[..., rows, :], self.mean[..., rows], self.variance[..., rows])

    def moments(self, frame: Frame) -> tuple[Tensor, Tensor, Tensor]:
        """The moments of the latent values under q.

        Args:
            frame: mean and root C of q.

        Returns:
            The means e_n and the variances v_n, (*batch, B) each, and the rows times C, (*batch, B, M).
        """
        projected = _through(self.rows, frame)
        mean = self.mean + (self.rows @ frame.mean[..., None])[..., 0]
        return mean, self.variance + projected.square().sum(-1), projected


def _through(rows: Tensor, frame: Frame) -> Tensor:
    """The rows times C, (*batch, B, M); of a large triangular C on a CPU 5/8 of the multiplications."""
    size = rows.shape[-1]
    if size < _LARGE or rows.device.type != "cpu" or not is_whole(frame.structure):
        return frame.rows(rows)
    root = frame.dense()
    ends = [size * k // _BLOCKS for k in range(_BLOCKS + 1)]
    product = rows.new_empty(*torch.broadcast_shapes(rows.shape[:-2], root.shape[:-2]), *rows.shape[-2:])
    for start, end in zip(ends, ends[1:], strict=False):
        part = slice(0, end) if frame.upper else slice(start, size)
        product[..., start:end] = rows[..., part] @ root[..., part, start:end]
    return product


def kernels(
    strategy: VariationalStrategy,
    x: Tensor,  # (*batch, B, features)
    factor: Tensor | None = None,  # (*batch, M, M)
) -> Kernels:
    """Evaluate mean and kernel of the model for a batch beside the inducing points.

    Args:
        strategy: the whitened strategy of the model.
        x: the inputs, (*batch, B, features).
        factor: L, (*batch, M, M), where the same hyper-parameters have given it already.

    Returns:
        The prior of the batch.

    Raises:
        InputError: a K_ZZ without a Cholesky factor.
    """
    Z = strategy.inducing_points
    if x.ndim == 1:
        x = x[:, None]
    if Z.shape[:-2] != x.shape[:-2]:
        x, Z = strategy._expand_inputs(x, Z)
    size, jitter = Z.shape[-2], strategy.jitter_val
    joint = strategy.model.forward(torch.cat([Z, x], -2))
    covariance = joint.lazy_covariance_matrix
    if factor is None:
        factor = _factor(covariance[..., :size, :size].add_jitter(jitter).to_dense())
    variance = covariance[..., size:, size:].diagonal(dim1=-1, dim2=-2) + jitter
    return Kernels(factor, covariance[..., :size, size:].to_dense(), joint.mean[..., size:], variance)


class Values:
    """Copies of the hyper-parameters, which tell whether they have changed.

    GPyTorch sets hyper-parameters behind torch's count of writes.

    Args:
        strategy: the strategy whose kernel, mean and inducing points are copied.
        others: further tensors, such as the parameters of the likelihood.
    """

    def __init__(self, strategy: VariationalStrategy, others: Iterable[Tensor] = ()) -> None:
        parameters = [*strategy.model.parameters(), strategy.inducing_points, *others]
        self.copies, self.jitter = [p.detach().clone() for p in parameters], strategy.jitter_val

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Values)
            and self.jitter == other.jitter
            and len(self.copies) == len(other.copies)
            and all(
                (a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b)
                for a, b in zip(self.copies, other.copies, strict=True)
            )
        )

    __hash__ = None  # type: ignore[assignment]


def _factor(covariance: Tensor) -> Tensor:
    """L with K_ZZ = L Lᵀ, in float64 whatever the model's dtype, as in GPyTorch."""
    L, ok = cholesky(covariance.to(_linalg_dtype_cholesky.value()))
    if L.device.type == "cpu" and not bool(ok.all()):
        raise InputError(
            "K_ZZ is not positive definite: inducing points coincide, or the jitter is too small for this dtype. "
            "Raise jitter_val of the strategy, or use float64."
        )
    return L
