"""What the models demand of their data, each rule once."""

import contextlib
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from torchngvi.arguments import read_number, read_tensor
from torchngvi.errors import InputError, ScaleWarning
from torchngvi.interfaces import FullPrior, Posterior, Prior
from torchngvi.numerics import sparse
from torchngvi.numerics.arrays import writable
from torchngvi.numerics.linalg import cholesky, eigh

# Whether a model keeps the graph of what it is made of, which no fit follows and `torchngvi.solved.solve` needs

_attached: ContextVar[bool] = ContextVar("attached", default=False)


def given(**arguments: Any) -> dict[str, Any] | None:
    """The arguments of a model, where gradients may be asked in one of them."""
    return arguments if any(isinstance(x, Tensor) and x.requires_grad for x in arguments.values()) else None


def apart(arguments: dict[str, Any]) -> dict[str, Any]:
    """Views of the arguments, none of which another was computed from: a partial derivative ends at each."""
    return {name: x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for name, x in arguments.items()}


@contextlib.contextmanager
def attached() -> Iterator[None]:
    """Models made within it keep the graph of what they are given."""
    token = _attached.set(True)
    try:
        yield
    finally:
        _attached.reset(token)


def kept(tensor: Tensor) -> Tensor:
    """A tensor without its graph, or with it within `attached`."""
    return tensor if _attached.get() else tensor.detach()


def numbers(name: str, value: Any, like: Tensor | None) -> Tensor:
    """Read a finite floating-point tensor; the design decides dtype and device."""
    if hasattr(value, "tocsr"):  # of SciPy
        raise InputError(
            f"{name} must be a tensor or an array; got {type(value).__name__}. Pass torch.sparse_csr_tensor(A.indptr, "
            "A.indices, A.data, A.shape) of A.tocsr(), or A.toarray()."
        )
    tensor = read_tensor(name, value, like=like, remedy="Drop or impute those rows.")
    # the data of a model are read in backward passes, which what inference_mode made cannot be
    return tensor.clone() if tensor.is_inference() else kept(tensor)


def design(value: Any) -> Tensor:
    """Read a design matrix X."""
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
    """Read one number for each row of X."""
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
    """Read the classes that labels may be."""
    classes = numbers("classes", value, y)
    if classes.ndim != 1 or len(classes) < 2 or len(torch.unique(classes)) < len(classes):
        raise InputError(f"classes must be two different labels or more, in their order; got {classes.tolist()}.")
    return classes


def class_codes(
    y: Tensor,
    classes: Tensor,  # (K,)
) -> Tensor:
    """The place of each label among the classes."""
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
    """Read the weights of the rows."""
    if value is None:
        return torch.ones_like(y)
    weights = per_row("weights", value, X)
    if bool((weights < 0).any()):
        raise InputError(f"weights must not be negative; got {float(weights.min()):g}.")
    if not weights.requires_grad and weights.shape[-1] > 2 and weights.device.type == "cpu":
        total, largest = weights.sum(-1), weights.amax(-1)
        if bool(((total - 1).abs() < 1e-4).all()) and bool((largest < 1 - 1e-4).all()):
            warnings.warn(
                f"the weights of the {weights.shape[-1]} rows sum to 1, so that all of them together tell as much as "
                "one row: a weight says how many rows a row counts for. Multiply them by the number of rows.",
                ScaleWarning,
                stacklevel=4,
            )
    return weights


def temperature(gamma: Any) -> float:
    """Read the temperature γ, the weight of KL(q‖prior)."""
    return read_number("temperature", gamma, "is the weight of KL(q‖prior)", at_least=0)


def prior(mean: Any, precision: Any, dim: int, like: Tensor, batch: int = 0) -> Prior | FullPrior:
    """Read a Gaussian prior N(mean, precision⁻¹)."""
    precision = numbers("prior_precision", precision, like)
    mean = numbers("prior_mean", mean, like)
    if mean.ndim and mean.shape[-1] not in (1, dim):
        raise InputError(f"prior_mean must be a scalar or ({dim},); got shape {tuple(mean.shape)}.")
    if precision.ndim and precision.shape[-1] not in (1, dim):
        raise InputError(
            f"prior_precision must be a scalar, ({dim},) or ({dim}, {dim}); got shape {tuple(precision.shape)}."
        )
    mean = mean if mean.ndim else mean.expand(dim)
    if batch and precision.ndim == batch + 2 and precision.shape[-2] == 1:
        precision = precision.squeeze(-2)  # one diagonal a member, where (D, D) would be a matrix
    elif precision.shape == (dim, dim):
        return _full_prior(mean, precision)
    if bool((precision <= 0).any()):
        raise InputError(f"prior_precision must be positive; got {float(precision.min()):g}.")
    return Prior(mean, precision if precision.ndim else precision.expand(dim))


def _full_prior(mean: Tensor, precision: Tensor) -> FullPrior:
    known = precision.detach()
    asymmetry = float((known - known.mT).abs().max())
    if asymmetry > 64 * torch.finfo(known.dtype).eps * float(known.abs().max()):
        raise InputError(
            "a prior_precision of shape (D, D) is a matrix and must be symmetric; entries across the diagonal differ "
            f"by up to {asymmetry:.3g}. Pass (A + A.mT) / 2; of one diagonal a member, beside a batch of y, pass "
            "(*batch, 1, D)."
        )
    precision = 0.5 * precision + 0.5 * precision.mT  # no sum that may overflow
    factor, ok = cholesky(precision)
    if not bool(ok):
        smallest = float(eigh(precision)[0][0])
        raise InputError(
            f"prior_precision must be positive definite; got a smallest eigenvalue of {smallest:.3g}. "
            "Add a multiple of the identity."
        )
    return FullPrior(mean, precision.view_as(precision), factor.mT.contiguous())  # neither in the graph of the other


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is of whole numbers, or truth values."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def labels(y: Tensor, classes: Any) -> Tensor:
    """Refuse measurements in the place of labels."""
    broken = y != y.round()
    if classes is None and bool(broken.any()):
        raise InputError(
            f"y must be labels, whole numbers; got {float(y[broken][0]):g} among them. For measurements take "
            "GeneralizedLinear with family='gaussian'; labels of another kind are named by classes=."
        )
    return y


def check_no_mask(index: Tensor, rows: int) -> None:
    """Refuse a mask that is written in the numbers 0 and 1, which would name the first two rows."""
    if 2 < len(index) == rows and index.device.type == "cpu" and bool(((index == 0) | (index == 1)).all()):
        raise InputError(
            f"row numbers were expected; got {rows} numbers that are all 0 or 1, as of a mask of the rows. Pass "
            "mask.nonzero()[:, 0]."
        )


def batch_index(index: Any, X: Tensor) -> Tensor:
    """Read the row numbers of a mini-batch."""
    try:
        tensor = torch.as_tensor(writable(index))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"a mini-batch is a list of row numbers; got {type(index).__name__} ({error}).") from error
    if tensor.ndim != 1 or tensor.numel() == 0 or tensor.dtype == torch.bool or not is_whole(tensor):
        raise InputError(
            f"a mini-batch is a list of at least one row number; got {tensor.dtype} of shape {tuple(tensor.shape)}. "
            "Of a mask, pass mask.nonzero()[:, 0]."
        )
    check_no_mask(tensor, X.shape[-2])
    if tensor.device.type == "cpu":  # where asking costs nothing
        low, high = int(tensor.min()), int(tensor.max())
        if low < 0 or high >= X.shape[-2]:
            raise InputError(f"row numbers run from 0 to {X.shape[-2] - 1}; got {low if low < 0 else high}.")
    return tensor.to(X.device)


def posterior(q: Posterior, dim: int, batch: torch.Size, like: Tensor) -> None:
    """Check that a posterior is over (*batch, dim), in the dtype and on the device of the data."""
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


_LABELS = "Of labels, pass numpy.unique(labels, return_inverse=True)[1]."


def group_index(groups: Any, rows: int, like: Tensor) -> Tensor:
    """Read one integer a row."""
    try:
        index = torch.as_tensor(writable(groups), device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(
            f"groups must be integers, one a row; got {type(groups).__name__} ({error}). {_LABELS}"
        ) from error
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise InputError(f"groups must be integers; got {index.dtype}. {_LABELS}")
    if index.shape != (rows,):
        raise InputError(
            f"groups must have one integer for each of the {rows} rows of X; got shape {tuple(index.shape)}."
        )
    return index.to(device=like.device, dtype=torch.long)


def grouped(Z: Any, groups: Any, X: Tensor) -> tuple[Tensor, Tensor]:
    """The design of the random effects and the groups, checked."""
    Z = numbers("Z", Z, X)
    if Z.ndim != 2 or len(Z) != len(X) or Z.shape[1] == 0:
        raise InputError(
            f"Z must have one row for each of the {len(X)} rows of X, and a column a random effect; got shape "
            f"{tuple(Z.shape)}."
        )
    index = group_index(groups, len(X), X)
    one_group = int(index.max()) == int(index.min())
    if one_group and Z.shape[1] > 2 and bool(((Z == 0) | (Z == 1)).all()) and bool((Z.sum(-1) == 1).all()):
        raise InputError(
            f"Z has a 1 in one of {Z.shape[1]} columns of each row, as a matrix of the groups has, and all rows are of "
            "one group. Z is the design within a group, (N, r), a column of ones for an intercept that varies; the "
            "groups are Z.argmax(-1)."
        )
    lowest = int(index.min())
    counts = torch.bincount(index) if lowest >= 0 else None
    if counts is None or bool((counts == 0).any()):
        which = f"a group {lowest}" if counts is None else f"no row of group {int((counts == 0).nonzero()[0, 0])}"
        raise InputError(
            f"groups must be numbered 0, ..., n - 1, each with a row; got {which}. Pass torch.unique(groups, "
            "return_inverse=True)[1]."
        )
    return Z, index
