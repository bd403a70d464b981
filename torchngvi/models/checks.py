"""What the models demand of their data, each rule once."""

import math
from typing import Any

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import FullPrior, Posterior, Prior
from torchngvi.numerics import sparse
from torchngvi.numerics.linalg import cholesky, eigh


def numbers(name: str, value: Any, like: Tensor | None) -> Tensor:
    """A finite floating-point tensor; the design decides dtype and device.

    Raises:
        InputError: no numbers, complex ones, NaN or infinite ones.
    """
    try:
        # straight to the dtype of the design: 0.1 must not pass through float32
        tensor = value if isinstance(value, Tensor) or like is None else torch.as_tensor(value, dtype=like.dtype)
        tensor = torch.as_tensor(tensor)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} must be numbers; got {type(value).__name__} ({error}).") from error
    if tensor.is_complex():
        raise InputError(f"{name} must be real; got {tensor.dtype}.")
    if like is not None:
        tensor = tensor.to(dtype=like.dtype, device=like.device)
    elif not tensor.is_floating_point():
        tensor = tensor.to(torch.get_default_dtype())
    entries = tensor.values() if sparse.is_sparse(tensor) else tensor
    finite = torch.isfinite(entries)
    if not bool(finite.all()):
        raise InputError(
            f"{name} must be finite; got {int((~finite).sum())} NaN or infinite of {entries.numel()} entries. "
            "Drop or impute those rows."
        )
    # the data of a model are read in backward passes, which what inference_mode made cannot be
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def design(value: Any) -> Tensor:
    """X, (N, D) or (*batch, N, D), or (N, D) in sparse CSR storage.

    Raises:
        InputError: as `numbers`; not a matrix, no rows or columns, another sparse storage.
    """
    if isinstance(value, Tensor) and value.layout not in (torch.strided, torch.sparse_csr):
        raise InputError(f"a sparse X must be stored by rows; got {value.layout}. Pass X.to_sparse_csr().")
    X = numbers("X", value, None)
    if X.ndim < 2:
        raise InputError(f"X must be a matrix, one row an observation; got shape {tuple(X.shape)}.")
    if sparse.is_sparse(X) and X.ndim > 2:
        raise InputError(
            f"a sparse X serves one posterior and must be a matrix; got shape {tuple(X.shape)}. "
            "Pass X.to_dense(), or fit the members one by one."
        )
    if X.shape[-2] == 0 or X.shape[-1] == 0:
        raise InputError(f"X must have at least one row and one column; got shape {tuple(X.shape)}.")
    return X


def per_row(name: str, value: Any, X: Tensor) -> Tensor:
    """One number a row of X, (N,) or (*batch, N).

    Raises:
        InputError: as `numbers`; another number of rows, a batch beside a sparse X.
    """
    tensor = numbers(name, value, X)
    if tensor.ndim == 0 or tensor.shape[-1] != X.shape[-2]:
        raise InputError(
            f"{name} must have one entry for each of the {X.shape[-2]} rows of X; got shape {tuple(tensor.shape)}."
        )
    if sparse.is_sparse(X) and tensor.ndim > 1:
        raise InputError(
            f"a sparse X serves one posterior, and {name} must be ({X.shape[-2]},); got shape {tuple(tensor.shape)}. "
            "Pass X.to_dense(), or fit the members one by one."
        )
    return tensor


def class_values(
    value: Any,  # the classes, in their order
    y: Tensor,  # labels
) -> Tensor:
    """The classes that labels may be, (K,).

    Raises:
        InputError: as `numbers`; fewer than two, one of them twice.
    """
    classes = numbers("classes", value, y)
    if classes.ndim != 1 or len(classes) < 2 or len(torch.unique(classes)) < len(classes):
        raise InputError(f"classes must be two different labels or more, in their order; got {classes.tolist()}.")
    return classes


def class_codes(
    y: Tensor,
    classes: Tensor,  # (K,)
) -> Tensor:
    """The place of each label among the classes, 0, .., K - 1.

    Raises:
        InputError: a label that is none of them.
    """
    order = classes.argsort()
    place = torch.searchsorted(classes[order], y.contiguous()).clamp_max(len(classes) - 1)
    other = y[classes[order][place] != y]
    if len(other):
        shown = ", ".join(f"{value:g}" for value in torch.unique(other)[:4].tolist())
        raise InputError(
            f"the labels in y must be among the classes {classes.tolist()}; got {shown} in {len(other)} rows. "
            "Name every class of all the data in classes=."
        )
    return order[place]


def row_weights(value: Any, y: Tensor, X: Tensor) -> Tensor:
    """Weights of the rows, ones if there are none.

    Raises:
        InputError: as `per_row`; a negative one.
    """
    if value is None:
        return torch.ones_like(y)
    weights = per_row("weights", value, X)
    if bool((weights < 0).any()):
        raise InputError(f"weights must not be negative; got {float(weights.min()):g}.")
    return weights


def temperature(gamma: float) -> float:
    """γ.

    Raises:
        InputError: negative or not finite.
    """
    if not (gamma >= 0 and math.isfinite(gamma)):
        raise InputError(f"temperature is the weight of KL(q‖prior), finite and not negative; got {gamma}.")
    return float(gamma)


def prior(mean: Any, precision: Any, dim: int, like: Tensor) -> Prior | FullPrior:
    """N(mean, precision⁻¹) from a scalar, a diagonal (*batch, D) or a matrix (D, D).

    Raises:
        InputError: as `numbers`; shapes that do not fit, a precision that is not positive or, of a
            matrix, not symmetric or not positive definite.
    """
    precision = numbers("prior_precision", precision, like)
    mean = numbers("prior_mean", mean, like)
    if mean.ndim and mean.shape[-1] not in (1, dim):
        raise InputError(f"prior_mean must be a scalar or ({dim},); got shape {tuple(mean.shape)}.")
    if precision.ndim and precision.shape[-1] not in (1, dim):
        raise InputError(
            f"prior_precision must be a scalar, ({dim},) or ({dim}, {dim}); got shape {tuple(precision.shape)}."
        )
    mean = mean if mean.ndim else mean.expand(dim)
    if precision.shape == (dim, dim):
        return _full_prior(mean, precision)
    if bool((precision <= 0).any()):
        raise InputError(f"prior_precision must be positive; got {float(precision.min()):g}.")
    return Prior(mean, precision if precision.ndim else precision.expand(dim))


def _full_prior(mean: Tensor, precision: Tensor) -> FullPrior:
    asymmetry = float((precision - precision.mT).abs().max())
    if asymmetry > 64 * torch.finfo(precision.dtype).eps * float(precision.abs().max()):
        raise InputError(
            "a prior_precision of shape (D, D) is a matrix and must be symmetric; entries across the diagonal differ "
            f"by up to {asymmetry:.3g}. Pass (A + A.mT) / 2; of one diagonal a member, pass (*batch, 1, D)."
        )
    precision = 0.5 * precision + 0.5 * precision.mT  # no sum that may overflow
    factor, ok = cholesky(precision)
    if not bool(ok):
        smallest = float(eigh(precision)[0][0])
        raise InputError(
            f"prior_precision must be positive definite; got a smallest eigenvalue of {smallest:.3g}. "
            "Add a multiple of the identity."
        )
    return FullPrior(mean, precision, factor.mT.contiguous())


def batch_index(index: Any, X: Tensor) -> Tensor:
    """Row numbers of a mini-batch, (B,), on the device of X.

    Raises:
        InputError: not a list of integers, empty, or beyond the rows of X.
    """
    try:
        tensor = torch.as_tensor(index)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"a mini-batch is a list of row numbers; got {type(index).__name__} ({error}).") from error
    if tensor.ndim != 1 or tensor.numel() == 0 or tensor.dtype == torch.bool or tensor.is_floating_point():
        raise InputError(
            f"a mini-batch is a list of at least one row number; got {tensor.dtype} of shape {tuple(tensor.shape)}. "
            "Of a mask, pass mask.nonzero()[:, 0]."
        )
    if tensor.device.type == "cpu":  # where asking costs nothing
        low, high = int(tensor.min()), int(tensor.max())
        if low < 0 or high >= X.shape[-2]:
            raise InputError(f"row numbers run from 0 to {X.shape[-2] - 1}; got {low if low < 0 else high}.")
    return tensor.to(X.device)


def posterior(q: Posterior, dim: int, batch: torch.Size, like: Tensor) -> None:
    """A posterior over (*batch, dim), of the dtype and device of the data.

    Raises:
        InputError: another number of coefficients, dtype, device or batch.
    """
    mine = q.mean_probe
    if q.dim != dim:
        raise InputError(f"the model has {dim} coefficients and q has {q.dim}; build q with dim={dim}.")
    if mine.dtype != like.dtype:
        raise InputError(
            f"the model is in {like.dtype} and q in {mine.dtype}; build q with dtype={like.dtype}, "
            "or convert one of them."
        )
    if mine.device != like.device:
        raise InputError(f"the model is on {like.device} and q on {mine.device}; move one of them with .to().")
    if batch not in ((), q.batch_shape):
        raise InputError(
            f"the model holds a batch {tuple(batch)} of data sets and q a batch {tuple(q.batch_shape)} of posteriors; "
            f"build q with batch_shape={tuple(batch)}."
        )
