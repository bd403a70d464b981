"""The prior of a batch beside the inducing values: what the kernels give, its rows a_n, and the way back to them.

K_ZZ = L Lᵀ is factored once for as long as its entries do not change; a_n = L⁻¹ k(Z, x_n), as in `sparse_gp`.
"""

import contextlib
import traceback
from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from gpytorch.settings import _linalg_dtype_cholesky
from gpytorch.variational import VariationalStrategy
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Frame, Sites
from torchngvi.numerics.arrays import Versions
from torchngvi.numerics.linalg import gram, triangular_gram, triangular_rows


class Kernels(NamedTuple):
    """The prior of a batch beside the inducing values, differentiable in the hyper-parameters."""

    factor: Tensor  # L, (*batch, M, M), float64
    cross: Tensor  # k(Z, x_n), (*batch, M, B)
    mean: Tensor  # μ(x_n), (*batch, B)
    variance: Tensor  # k(x_n, x_n) + jitter, (*batch, B)

    @torch.no_grad()
    def projection(self, dtype: torch.dtype) -> "Projection":
        """The rows a_n = L⁻¹ k(Z, x_n) with the prior moments that they leave, without a graph."""
        # from the right, where the transposed view is in the order that LAPACK takes without a copy
        cross = self.cross.to(dtype).mT
        rows = torch.linalg.solve_triangular(self.factor.to(dtype).mT, cross, upper=True, left=False)
        return Projection(rows, self.mean.to(dtype), self.variance.to(dtype) - rows.square().sum(-1))

    @torch.no_grad()
    def pulled(self, sites: Sites, H: Tensor, frame: Frame, slack: Tensor | None = None) -> "Kernels":
        """∂E_q[ℓ] of the data part, from H = Σ β_n a_n a_nᵀ, which the step of q has formed already.

        With P = L⁻ᵀ(S - I) and w = L⁻ᵀm: for k(Z, x_n) it is w α_n + P β_n a_n, for L the lower part of
        -w (Σ α_n a_n)ᵀ - P H.  A bound whose slope in d_n is ½(β_n - κ_n) adds L⁻ᵀκ_n a_n and -L⁻ᵀ Σ κ_n a_n a_nᵀ.
        """
        S, dtype = covariance(frame), self.factor.dtype
        S.diagonal(dim1=-2, dim2=-1).sub_(1.0)
        mean, weighted = frame.mean[..., None, :], sites.rows * sites.beta[..., None]
        first = sites.alpha[..., None, :] @ sites.rows
        if slack is not None:  # all of it before one substitution, from the right as in `projection`
            inner = (weighted @ S).addcmul_(sites.rows, slack[..., None]).addcmul_(sites.alpha[..., None], mean)
            total = (H @ S + gram(sites.rows, slack)).addcmul_(first.mT, mean)
            cross, factor = (
                torch.linalg.solve_triangular(self.factor, part.to(dtype), upper=False, left=False).to(S.dtype).mT
                for part in (inner, total)
            )
            return Kernels(-factor.tril(), cross, sites.alpha, 0.5 * (sites.beta - slack))
        both = torch.linalg.solve_triangular(self.factor.mT, torch.cat([mean.mT, S], -1).to(dtype), upper=True)
        w, P = both[..., :1].to(S.dtype), both[..., 1:].to(S.dtype)
        cross = torch.addcmul(P @ weighted.mT, w, sites.alpha[..., None, :])
        return Kernels(-(P @ H + w * first).tril(), cross, sites.alpha, 0.5 * sites.beta)


class Projection(NamedTuple):
    """The linear map from whitened inducing values v to the values of a batch, and their variance given v."""

    rows: Tensor  # a_n, (*batch, B, M)
    mean: Tensor  # μ(x_n), (*batch, B)
    variance: Tensor  # k(x_n, x_n) + jitter - |a_n|², (*batch, B)

    def part(self, rows: slice) -> "Projection":
        """The projection of some of the rows."""
        return Projection(self.rows[..., rows, :], self.mean[..., rows], self.variance[..., rows])

    def moments(self, frame: Frame) -> tuple[Tensor, Tensor, Tensor]:
        """The moments of the latent values under q."""
        projected = triangular_rows(self.rows, frame.root, frame.upper) if _full(frame) else frame.rows(self.rows)
        mean = self.mean + (self.rows @ frame.mean[..., None])[..., 0]
        return mean, self.variance + projected.square().sum(-1), projected


def covariance(frame: Frame) -> Tensor:
    """The covariance S of q, written out."""
    if _full(frame):
        return triangular_gram(frame.root, frame.upper)
    return frame.structure.full(frame.marginals())


def _full(frame: Frame) -> bool:
    """Whether the root has all entries of a triangle."""
    return frame.structure.widest == frame.mean.shape[-1]


@contextlib.contextmanager
def evaluated() -> Iterator[None]:
    """A block in which kernels are evaluated, of which GPyTorch factors some on the way; also a decorator."""
    try:
        yield
    except (NanError, NotPSDError, torch.linalg.LinAlgError) as error:
        if _is_dense(error):
            raise InputError(
                "forward gives MultivariateNormal its kernel matrix as a dense tensor, which torch factors without "
                "jitter, and it is not positive definite to rounding. Give the lazy matrix, self.covar_module(x) "
                "without to_dense() or evaluate(), or linear_operator.to_linear_operator(K) of a dense K."
            ) from error
        raise InputError(
            "GPyTorch cannot factor the kernel matrix, as it does to evaluate a sum with a linear kernel: it is not "
            "finite, or not positive definite to rounding. Check the inputs, the inducing points and the "
            "hyper-parameters for NaN, infinities and length scales of zero, or use float64."
        ) from error


def _is_dense(error: BaseException) -> bool:
    """Whether an error was raised where torch's own MultivariateNormal factors a covariance that is a tensor."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == "torch.distributions.multivariate_normal" for frame, _ in frames)


@evaluated()
def kernels(
    strategy: VariationalStrategy,
    x: Tensor,  # (*batch, B, features)
    factor: Tensor | None = None,  # (*batch, M, M)
) -> Kernels:
    """Evaluate mean and kernel of the model for a batch beside the inducing points."""
    Z = strategy.inducing_points
    if x.ndim == 1:
        x = x[:, None]
    if Z.shape[:-2] != x.shape[:-2]:
        x, Z = strategy._expand_inputs(x, Z)
    size, jitter = Z.shape[-2], strategy.jitter_val
    joint = strategy.model.forward(torch.cat([Z, x], -2))
    covariance = joint.lazy_covariance_matrix
    if factor is None:
        factor = _factor_of(strategy, covariance[..., :size, :size].add_jitter(jitter).to_dense())
    variance = covariance[..., size:, size:].diagonal(dim1=-1, dim2=-2) + jitter
    return Kernels(factor, covariance[..., :size, size:].to_dense(), joint.mean[..., size:], variance)


# of each strategy K_ZZ and its factor, with the count of writes to that
_kept: WeakKeyDictionary[VariationalStrategy, tuple[Tensor, Tensor, Versions]] = WeakKeyDictionary()


def _factor_of(strategy: VariationalStrategy, covariance: Tensor) -> Tensor:
    """L of K_ZZ, which is kept while K_ZZ has the same entries."""
    if covariance.requires_grad or covariance.device.type != "cpu":  # where to compare would wait for the device
        return _factor(covariance)
    if strategy in _kept:
        before, factor, writes = _kept[strategy]
        alike = (before.dtype, factor.dtype) == (covariance.dtype, _linalg_dtype_cholesky.value())
        if alike and writes.hold([factor], contents=False) and torch.equal(before, covariance):
            return factor
    with torch.inference_mode(False):
        covariance = covariance.clone()  # a kernel may return a tensor that it writes to later
        factor = _factor(covariance)
    _kept[strategy] = covariance, factor, Versions([factor])
    return factor


def _factor(covariance: Tensor) -> Tensor:
    """L with K_ZZ = L Lᵀ, in float64 whatever the model's dtype, without the further jitter that GPyTorch would try."""
    L, info = torch.linalg.cholesky_ex(covariance.to(_linalg_dtype_cholesky.value()))
    # a NaN or an infinity anywhere reaches the diagonal
    if L.device.type == "cpu" and not bool((info == 0).all() & L.diagonal(dim1=-2, dim2=-1).isfinite().all()):
        if not bool(covariance.isfinite().all()):
            raise InputError(
                "K_ZZ is not finite: check the inputs, the inducing points and the hyper-parameters for NaN and "
                "infinities."
            )
        raise InputError(
            "K_ZZ is not positive definite: inducing points coincide, or the jitter is too small for this dtype, as if "
            "inputs hold many periods. Raise jitter_val of the strategy, or use float64."
        )
    return L
