"""The optimal q(u) for hyper-parameters that stand still, without a step size.

q is found as `profile` finds it, on all rows or on as many as fit, which weigh as much; full steps by trial on all of
them (`fit`) end it with a verdict.
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.models import ApproximateGP
from torch import Tensor

from torchngvi.adapters.gpytorch.batches import Batch, all_rows, check_order, count, pairs, row_dimension
from torchngvi.adapters.gpytorch.distribution import as_in_predictions, kept_modes, lent_posterior
from torchngvi.adapters.gpytorch.energies import check_labels, conjugate, log_concave
from torchngvi.adapters.gpytorch.profile import ProfiledELBO
from torchngvi.adapters.gpytorch.sparse_gp import SparseGP
from torchngvi.arguments import read_instance
from torchngvi.fitting.fit import fit
from torchngvi.fitting.records import FitResult
from torchngvi.methods import IBLR, VN
from torchngvi.posteriors import NaturalGaussian
from torchngvi.posteriors.gaussian import Gaussian

_AT_THE_PRIOR = 1.0  # nats from the prior within which q has seen no data
_FIRST = 8  # the first search is on a part of the rows of one in so many
_ROWS = 4096  # for which the kernel is evaluated at once, or 4M if that is more
_REMEMBERED = 16  # rows by which a later call sees whether the rows of an earlier one are given again
_ENTRIES = 2**26  # of the rows a_n of all functions at most, from which q is searched


@torch.no_grad()
def refine_svgp(
    model: ApproximateGP,
    likelihood: Likelihood,
    batches: Iterable[Batch],
    *,
    tolerance: float | None = None,
    max_evaluations: int = 1000,
    progress: bool = True,
) -> FitResult:
    """Find the optimal q(u) for hyper-parameters as they are, without a step size.

    The q of several functions is searched by steps of all means at once, see `train_svgp`.

    Args:
        model, likelihood: see `train_svgp`; q may be a full Gaussian of GPyTorch, which is left at the optimum.
        batches: all of the data, kept in memory.
        tolerance, max_evaluations: see `torchngvi.fit`.
        progress: show a bar.

    Returns:
        The verdict; its loss is the negative ELBO, summed over data.

    Raises:
        InputError: no data, a K_ZZ that is not positive definite.
        PairError: a model or a likelihood it cannot serve.

    >>> import gpytorch
    >>> from torchngvi.adapters.gpytorch.conditioning import example
    >>> model, _, x, y = example()
    >>> likelihood = gpytorch.likelihoods.BernoulliLikelihood()
    >>> refine_svgp(model, likelihood, [(x, (y > 0).double())], progress=False).converged
    True
    """
    read_instance("model", model, torch.nn.Module, "is a model of GPyTorch, such as an ApproximateGP", other=likelihood)
    check_order(likelihood, batches)
    forgotten = ""
    with lent_posterior(model), kept_modes(model, likelihood):
        model.train()
        likelihood.train()
        as_in_predictions(model)  # where hyper-parameters stay, q is for the function that predicts
        target = SparseGP(model, likelihood, [])
        target.batches = _pieces(batches, target)
        forgotten = _forgotten(target)
        with restored_dtype(target.posterior) as q:
            # beside a small noise float32 loses the prior, which is 1 in S
            q.double()
            if conjugate(likelihood) or target.coupled or (log_concave(likelihood) and _at_the_prior(q)):
                _search(target)
            steps = VN(q) if log_concave(likelihood) else IBLR(q)
            result = fit(q, target, steps, tolerance=tolerance, max_evaluations=max_evaluations, progress=progress)
        if forgotten:
            warnings.warn(f"{forgotten}.", stacklevel=3)
            return replace(result, reason=f"{result.reason.rstrip('.')}; {forgotten}.")
    return result


# of each model some of the rows for which q was found last
_fitted: WeakKeyDictionary[ApproximateGP, Tensor] = WeakKeyDictionary()


def forget_rows(model: ApproximateGP) -> None:
    """Forget for which rows q was found before: a training begins, with rows of its own."""
    _fitted.pop(model, None)


def remember_rows(model: ApproximateGP, parts: list[Tensor]) -> None:
    """Keep some of the rows for which q was found, beside those that are kept already."""
    total = sum(len(x) for x in parts)
    some = torch.cat([x[:: -(-total // _REMEMBERED)] for x in parts]).clone()
    _fitted[model] = torch.cat([_fitted[model].to(some), some]) if model in _fitted else some


def _forgotten(target: SparseGP) -> str:
    """Say where rows for which q was found before are not among those that are given now; keep some of these."""
    assert isinstance(target.batches, list)
    if not target.batches or target.batches[0][0].ndim != 2:
        return ""
    before, parts = _fitted.pop(target.model, None), [x for x, _ in target.batches]
    remember_rows(target.model, parts)
    total = sum(len(x) for x in parts)
    if before is None or before.shape[-1] != parts[0].shape[-1]:
        return ""
    short = min(before.dtype, parts[0].dtype, key=lambda dtype: torch.finfo(dtype).bits)  # rows may be converted
    before, parts = before.to(parts[0].device, short), [x.to(short) for x in parts]
    lost = sum(not any(bool((x == row).all(-1).any()) for x in parts) for row in before)
    if not lost:
        return ""
    return (
        f"q was found for other rows before, of which {lost / len(before):.0%} are not among the {total} rows given "
        "now: q is for the rows of this call alone, and what the others said is forgotten. Give the old rows and the "
        "new ones together, or add the new ones by condition(model, likelihood, x, y)"
    )


@contextlib.contextmanager
def restored_dtype(q: Gaussian) -> Iterator[Gaussian]:
    """A block in which q may be converted; at its end q has the dtype again that it had."""
    dtype = q.dtype
    try:
        yield q
    finally:
        q.to(dtype)


def _pieces(batches: Iterable[Batch], target: SparseGP) -> list[Batch]:
    """The data in an order of no meaning, in pieces of a good size; untouched where each row has its own noise."""
    given = list(pairs(batches, target.latents))
    for _, y in given:
        check_labels(target.likelihood, y)
    if not given or given[0][0].ndim == 1 or isinstance(target.likelihood, FixedNoiseGaussianLikelihood):
        return given
    row = row_dimension(given[0][1], target.latents)
    x, y = torch.cat([x for x, _ in given], -2), torch.cat([y for _, y in given], row)
    order = torch.randperm(x.shape[-2], generator=torch.Generator().manual_seed(0)).to(x.device)
    size = max(_ROWS, 4 * target.posterior.dim)
    return [(x.index_select(-2, part), y.index_select(row, part)) for part in order.split(size)]


def _search(target: SparseGP) -> None:
    """Bring q to its optimum for all rows, or for a part that fits; not where targets are missing."""
    x, y = all_rows(target.batches, target.latents)
    rows, row = count(x), row_dimension(y, target.latents)
    most = min(rows, _ENTRIES // target.posterior.mean.numel())
    if isinstance(target.likelihood, FixedNoiseGaussianLikelihood):
        most = rows
    if bool(y.isnan().any()):
        return
    searches = [(most, 1e-15 if target.coupled else 1e-10)]
    if not (target.coupled or conjugate(target.likelihood)):  # from a part of the rows q is near
        searches = [(-(-most // _FIRST), 1e-3), *searches]
    for size, tolerance in searches:
        part = x.narrow(-2, 0, size), y.narrow(row, 0, size)
        bound = ProfiledELBO(target.model, target.likelihood, part, rows, tolerance)
        as_in_predictions(target.model)
        bound.search()
        bound.assign()


def _at_the_prior(q: Gaussian) -> bool:
    prior = NaturalGaussian(q.dim, q.batch_shape, dtype=q.dtype, device=q.device)
    return bool((q.kl(prior) < _AT_THE_PRIOR).all())
