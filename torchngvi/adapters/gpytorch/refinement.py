"""The optimal q(u) for hyper-parameters that stand still, without a step size.

Then q is a sum of sites, one a datum, b_n aᵀv - ½ c_n (aᵀv)² with c_n = β_n and b_n = β_n a_nᵀm - α_n (the dual
form of Adam et al. 2021).  To visit a batch is to replace its sites by those at the present q,

    S' = S + Σ (c_n' - c_n) a_n a_nᵀ        S'm' = Sm + Σ (b_n' - b_n) a_n

from the prior, where all sites are zero: exact after one pass where the likelihood is Gaussian.  Where it is
log-concave a visit to an eighth of the data brings q so near that one more to all of them leaves little: 2e-7 to 4e-5
nats a datum for noisy labels, up to 8e-3 for labels nearly without noise.  Full steps by trial (`fit`) end it with a
verdict.
"""

import contextlib
import itertools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.models import ApproximateGP
from torch import Tensor

from torchngvi.adapters.gpytorch.batches import Batch, check_order, pairs, row_dimension
from torchngvi.adapters.gpytorch.distribution import as_in_predictions, kept_modes, lent_posterior
from torchngvi.adapters.gpytorch.energies import check_labels, conjugate, log_concave
from torchngvi.adapters.gpytorch.sparse_gp import SparseGP
from torchngvi.arguments import read_instance
from torchngvi.fitting.fit import fit
from torchngvi.fitting.records import FitResult
from torchngvi.interfaces import Coordinates, Tangent
from torchngvi.methods import IBLR, VN
from torchngvi.numerics.linalg import gram
from torchngvi.posteriors import NaturalGaussian
from torchngvi.posteriors.gaussian import Gaussian

_FIRST = 8  # the first visit is to a part of the data of one in so many
_AT_THE_PRIOR = 1.0  # nats from the prior within which q has seen no data
_ROWS = 1024  # of a visit, or M if that is more: a visit factors S once
_REMEMBERED = 16  # rows by which a later call sees whether the rows of an earlier one are given again
_PIECE = 4  # visits for which the kernel is evaluated at once


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

    A q that has not left the prior visits its sites first, and so does that of a Gaussian likelihood, for which this is
    exact; any other goes on from where it is.

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
            fresh = conjugate(likelihood) or (log_concave(likelihood) and _at_the_prior(q))
            if fresh and not target.coupled:
                visited = _visited(target)
                q.initialize_(visited.mean, q.kept_covariance(visited.scale_tril))
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
    size = _PIECE * max(_ROWS, target.posterior.dim)
    return [(x.index_select(-2, part), y.index_select(row, part)) for part in order.split(size)]


def _visit(target: SparseGP) -> int:
    """The number of rows of a visit; with a noise for each row all of them, in the order that its likelihood knows."""
    assert isinstance(target.batches, list)
    if isinstance(target.likelihood, FixedNoiseGaussianLikelihood):
        return max(y.shape[-1] for _, y in target.batches)
    return max(_ROWS, target.posterior.dim)


def _at_the_prior(q: Gaussian) -> bool:
    prior = NaturalGaussian(q.dim, q.batch_shape, dtype=q.dtype, device=q.device)
    return bool((q.kl(prior) < _AT_THE_PRIOR).all())


def _visited(target: SparseGP) -> NaturalGaussian:
    """q after a visit to the first part of the data, and one to all of them."""
    like = target.posterior
    work = NaturalGaussian(like.dim, like.batch_shape, dtype=like.dtype, device=like.device)
    sites: list[tuple[Tensor, Tensor]] = []
    assert isinstance(target.batches, list)
    count = sum(-(-y.shape[-1] // _visit(target)) for _, y in target.batches)
    for visits in (count,) if conjugate(target.likelihood) else (-(-count // _FIRST), count):
        for index, (rows, b, c) in enumerate(itertools.islice(target.sites(work, _visit(target)), visits)):
            old_b, old_c = sites[index] if index < len(sites) else (torch.zeros_like(b), torch.zeros_like(c))
            change = Coordinates(((b - old_b)[..., None, :] @ rows)[..., 0, :], gram(rows, c - old_c))
            new, ok = work.moved(Tangent(change))
            work.assign(new, ok)
            kept = torch.where(ok[..., None], b, old_b), torch.where(ok[..., None], c, old_c)
            sites[index : index + 1] = [kept]
    return work
