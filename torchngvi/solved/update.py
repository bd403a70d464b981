"""Rows taken out of a posterior and put into it, and posteriors of parts that never meet, added.

At the optimum q is the prior plus what the rows say, their *sites*: with g and H the mean gradient and the mean Hessian
of -log p(y | θ) under q,

    S = Λ + Σ_n H_n        S m = Λm₀ + Σ_n (H_n m - g_n)

(Khan and Lin 2017, on conjugate-computation variational inference), so that rows are taken out by subtraction and put
in by addition.  Where g is linear and H constant in θ, as for normal targets, sites know nothing of q, and sums of them
are exact.  Elsewhere the other sites respond, and a fit from there lets them.
"""

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import read_list
from torchngvi.errors import InputError, PairError
from torchngvi.fitting.records import FitResult, read_result
from torchngvi.interfaces import AdditiveTractable
from torchngvi.models import GeneralizedLinear, checks
from torchngvi.models.arguments import read_posterior
from torchngvi.numerics import sparse
from torchngvi.numerics.arrays import writable
from torchngvi.numerics.linalg import cholesky
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.solved.response import check_temperature, fit_again, read_regression

_INTEGERS = (torch.int64, torch.int32, torch.int16)  # of row numbers; bytes may be meant as a mask


class SiteSum(NamedTuple):
    """What some rows say of the coefficients, as natural parameters: exp(vᵀθ - ½θᵀPθ), the sum of their sites.

    It is what a part of the data has to send to be merged with others: D + D(D + 1)/2 numbers, and no row.  They are
    sums over rows, and not private in the sense of differential privacy.

    Attributes:
        vector: v = Hm - g, (D,).
        precision: P = H, (D, D), symmetric.

    >>> one = SiteSum(torch.ones(1), torch.ones(1, 1))
    >>> (one + one).vector, (one - one).precision
    (tensor([2.]), tensor([[0.]]))
    """

    vector: Tensor
    precision: Tensor

    def __add__(self, other: "SiteSum") -> "SiteSum":  # type: ignore[override]  # not that of tuples
        """What both say."""
        return SiteSum(self.vector + other.vector, self.precision + other.precision)

    def __sub__(self, other: "SiteSum") -> "SiteSum":
        """What is said without the other."""
        return SiteSum(self.vector - other.vector, self.precision - other.precision)


@torch.no_grad()
def site_sum(q: Gaussian, model: AdditiveTractable) -> SiteSum:
    """Sum the sites of the rows of a model at q: of the optimum of this model the posterior less the prior.

    Args:
        q: where they are evaluated, without batch dimensions: the optimum of the model, or in a further round of
            `merge` that of its last round.
        model: a part of the data, with expectations that are known and the temperature 1.

    Returns:
        The sum, without the prior.

    Raises:
        PairError: a model whose expectations are not known.
        InputError: a batch of posteriors, or another temperature than 1.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> model = GeneralizedLinear(torch.ones(3, 1), [1.0, 2.0, 3.0], "gaussian")
    >>> site_sum(CholeskyGaussian(1), model)
    SiteSum(vector=tensor([6.]), precision=tensor([[3.]]))
    """
    if not isinstance(model, AdditiveTractable):
        raise PairError(
            "site_sum takes a model whose expectations are known, such as a GeneralizedLinear or a SoftmaxRegression; "
            f"got {type(model).__name__}."
        )
    if not isinstance(read_posterior("site_sum", q, model), Gaussian) or q.batch_shape:
        raise InputError(f"site_sum is of one Gaussian, without batch dimensions; got {q!r}.")
    check_temperature("site_sum", model)
    model.check(q)
    g, H = model.data_energy(q.frame())[1].raw()[:2]
    return SiteSum((H @ q.mean) - g, H)


def merge(sums: Iterable[SiteSum], prior_precision: Any = 1.0, prior_mean: Any = 0.0) -> CholeskyGaussian:
    """Merge what parts of the data say, which never meet, with one prior: S = Λ + ΣP, S m = Λm₀ + Σv.

    Use it for data that may not leave where they are: each part fits q to its own rows under *the whole prior*,
    and sends `site_sum`.  For normal targets the result is the posterior of all rows.  For others it is near, and each
    further round, in which the parts send `site_sum` at the merged q, is a step of VN with step size 1 on all rows.
    Such steps mostly approach the optimum, but nothing holds them to it: few rows a part, or classes that are well
    separated, can make them rise or stall.  Where the parts can answer while a fit runs, `torchngvi.Sharded` finds the
    optimum itself.

    Args:
        sums: of each part, one.
        prior_precision: Λ, as of a `torchngvi.GeneralizedLinear`; counted once.
        prior_mean: m₀.

    Returns:
        The merged posterior, dense.

    Raises:
        InputError: no sums, something else, sums over different coefficients, or a precision that is not positive
            definite.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> q, parts = CholeskyGaussian(1), ([1.0, 2.0], [3.0])
    >>> models = [GeneralizedLinear(torch.ones(len(y), 1), y, "gaussian") for y in parts]
    >>> merged = merge([site_sum(q, model) for model in models])
    >>> merged.mean.item(), merged.variance.item()  # 6/(1 + 3) and 1/(1 + 3)
    (1.5, 0.25)
    """
    what = "are what site_sum returns, one of each part, in a list"
    sums = [sums] if isinstance(sums, SiteSum) else read_list("sums", sums, what)
    strangers = [type(part).__name__ for part in sums if not isinstance(part, SiteSum)]
    if strangers:
        raise InputError(f"merge takes what site_sum returns, one of each part; got {', '.join(strangers)}.")
    if not sums:
        raise InputError("merge takes the site sum of at least one part; got none.")
    dims = sorted({len(part.vector) for part in sums})
    if len(dims) > 1:
        raise InputError(f"parts that are merged have the same coefficients; got sums over {dims} of them.")
    total = sums[0]
    for part in sums[1:]:
        total = total + part
    prior = checks.prior(prior_mean, prior_precision, dims[0], total.vector)
    mean, covariance = _moments(
        SiteSum(total.vector + prior.product(prior.mean.expand(dims[0])), prior.add_to(total.precision.clone()))
    )
    if mean is None or covariance is None:
        raise InputError(
            "the merged precision is not positive definite: the sites of a part are not those of a log-concave "
            "likelihood, or it was sent in a precision that rounding has spoilt. Send them in float64."
        )
    return CholeskyGaussian.from_moments(mean, covariance)


def forget(result: FitResult, rows: Any) -> FitResult:
    """Take rows out of a fitted regression, as if they had never been there.

    Use it where people withdraw their data, or to see what a conclusion is without some rows.  Their sites are
    subtracted, and a fit from there lets the others respond: the result is that of a fit to the remaining rows, up to
    its tolerance.  What is returned holds nothing else of the rows; the old result, q and model do, and are yours to
    delete.

    Args:
        result: of `torchngvi.fit`, of a dense Gaussian and a `torchngvi.GeneralizedLinear`; it stays as it is.
        rows: their numbers, or a mask of all rows.

    Returns:
        The result of the new fit, with its ``posterior``, of the same class, and its ``target``, of the other rows.

    Raises:
        PairError: another model, or a posterior that is not one dense Gaussian.
        InputError: rows that are not there, or all of them; a temperature other than 1.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear, fit
    >>> model = GeneralizedLinear(torch.ones(3, 1).double(), [1.0, 2.0, 9.0], "gaussian")
    >>> result = fit(CholeskyGaussian(1, dtype=torch.float64), model, progress=False)
    >>> found = forget(result, [2])
    >>> round(result.posterior.mean.item(), 6), round(found.posterior.mean.item(), 6)  # 12/4 and 3/3
    (3.0, 1.0)
    """
    q, model = _of(result, "forget")
    gone = _numbered(rows, len(model.y), model.X.device)
    kept = torch.ones(len(model.y), dtype=torch.bool, device=gone.device).index_fill(0, gone, False)
    if not bool(kept.any()):
        raise InputError(f"all {len(kept)} rows are to be forgotten, which leaves the prior: leave at least one.")
    start = _natural(q) - site_sum(q, _with_rows(model, lambda x: x[~kept]))
    return _fitted(q, start, _with_rows(model, lambda x: x[kept]))


def add(result: FitResult, X: Any, y: Any, *, weights: Any = None, offset: Any = None) -> FitResult:
    """Add rows to a fitted regression.

    The sites of the new rows, evaluated at the old q, are added to it, and a fit from there lets all of them respond:
    the result is that of a fit to all rows, up to its tolerance.

    Args:
        result: of `torchngvi.fit`, of a dense Gaussian and a `torchngvi.GeneralizedLinear`; it stays as it is.
        X: the new rows, (n, D).
        y: their targets, (n,), with the same classes, written as they were.
        weights, offset: of the new rows, (n,), as the model has them; 1 and 0 by default.

    Returns:
        The result of the new fit, with its ``posterior``, of the same class, and its ``target``, of all rows, the new
        ones last.

    Raises:
        PairError: another model, or a posterior that is not one dense Gaussian.
        InputError: rows that do not fit the model, a temperature other than 1.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear, fit
    >>> model = GeneralizedLinear(torch.ones(2, 1).double(), [1.0, 2.0], "gaussian")
    >>> result = fit(CholeskyGaussian(1, dtype=torch.float64), model, progress=False)
    >>> round(add(result, [[1.0]], [9.0]).posterior.mean.item(), 6)
    3.0
    """
    q, model = _of(result, "add")
    rows = checks.numbers("X", X, model.X)
    if sparse.is_sparse(rows):
        raise InputError("the rows of this model are dense; pass X.to_dense().")
    y = checks.numbers("y", y, model.X)
    classes = model.coding or None
    if model.coding == (0.0, 1.0) and bool((y == -1).any()):
        classes = (-1.0, 1.0)  # the other way to write failure and success, of which a model keeps one
    more = GeneralizedLinear(rows, y, model.likelihood, weights=weights, offset=offset, classes=classes)
    if more.y.ndim > 1 or more.dim != model.dim:
        raise InputError(f"the rows of this model are (n, {model.dim}); got X of shape {tuple(more.X.shape)}.")
    together = copy.copy(model)
    for name in ("X", "y", "weights", "offset"):
        setattr(together, name, torch.cat([getattr(model, name), getattr(more, name)]))
    together.num_data = len(together.y)
    return _fitted(q, _natural(q) + site_sum(q, more), together)


def _of(result: FitResult, name: str) -> tuple[Gaussian, GeneralizedLinear]:
    """The posterior and the model of a result."""
    result = read_result(name, result)
    q, model = result.posterior, result.target
    if model is None:
        raise PairError(f"{name} needs the model of the result, and this one is a copy or was read from a file: fit q.")
    return read_regression(name, q, model)


def _numbered(rows: Any, count: int, device: torch.device) -> Tensor:
    """Row numbers of a list or of a mask, (n,)."""
    try:
        tensor = torch.as_tensor(writable(rows), device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"rows are a list of row numbers, or a mask; got {type(rows).__name__} ({error}).") from error
    if tensor.dtype == torch.bool and tensor.shape == (count,):
        tensor = tensor.nonzero()[:, 0]
    if tensor.ndim != 1 or not len(tensor) or tensor.dtype not in _INTEGERS:
        raise InputError(
            f"rows are a list of at least one row number, or a mask of all {count} rows; got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}."
        )
    checks.check_no_mask(tensor, count)
    low, high = int(tensor.min()), int(tensor.max())
    if low < 0 or high >= count:
        raise InputError(f"row numbers run from 0 to {count - 1}; got {low if low < 0 else high}.")
    return tensor.long()


def _with_rows(model: GeneralizedLinear, pick: Any) -> GeneralizedLinear:
    """The model on some of its rows, each as it is."""
    new = copy.copy(model)
    for name in ("X", "y", "weights", "offset"):
        setattr(new, name, pick(getattr(model, name)))
    new.num_data = len(new.y)
    return new


@torch.no_grad()
def _natural(q: Gaussian) -> SiteSum:
    """S m and S."""
    S = torch.cholesky_inverse(torch.linalg.cholesky(q.covariance))
    return SiteSum(S @ q.mean, S)


def _moments(natural: SiteSum) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Mean and covariance; None where the precision is not positive definite."""
    factor, ok = cholesky(natural.precision)
    if not bool(ok):
        return None, None
    mean = torch.cholesky_solve(natural.vector[:, None], factor)[:, 0]
    return mean, torch.cholesky_inverse(factor)


def _fitted(q: Gaussian, start: SiteSum, model: GeneralizedLinear) -> FitResult:
    """Fit a posterior of the class of q, from a sum of prior and sites; from q, where that is none."""
    mean, covariance = _moments(start)
    if mean is None or covariance is None:
        mean, covariance = q.mean, q.covariance
    new = type(q).from_moments(mean.clone(), 0.5 * (covariance + covariance.mT))
    return fit_again(new, model)
