"""Training without a learning rate for q: mini-batches with hyper-parameters, site after site without.

With hyper-parameters that move, q takes natural steps of length

    ρ = min(½, max(B/N, B/(5M)))

A stationary run of steps ρ on batches of B rows is about ρ/(2 - ρ) M/(2B) nats per datum above the optimum, at most
0.05 with the second bound; within that the longest step is best, since q has to follow the hyper-parameters.  B/N is
the length at which q forgets in a pass about as much as it sees.

With hyper-parameters that stand still q is a sum of sites, one a datum, b_n aᵀv - ½ c_n (aᵀv)² with
c_n = β_n and b_n = β_n a_nᵀm - α_n (the dual form of Adam et al. 2021).  To visit a batch is to replace its
sites by those at the present q,

    S' = S + Σ (c_n' - c_n) a_n a_nᵀ        S'm' = Sm + Σ (b_n' - b_n) a_n

from the prior, where all sites are zero: exact after one pass where the likelihood is Gaussian, and where it is
log-concave in practice linear, a digit or two a pass, without noise and without a step size.  Full steps by
trial (`fit`) end it with a verdict.

In a float32 model the sums over all data are in float64, and so is q from the first mini-batch whose step
float32 cannot take; at the end q has the model's dtype again.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.models import ApproximateGP
from torch import Tensor
from tqdm.auto import tqdm

from torchngvi.adapters.gpytorch.sparse_gp import Batch, SparseGP, log_concave
from torchngvi.errors import InputError, RejectedStepWarning
from torchngvi.fit import fit
from torchngvi.interfaces import Coordinates
from torchngvi.linalg import cholesky
from torchngvi.methods import IBLR, VN, Method
from torchngvi.posteriors import NaturalGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.records import FitResult
from torchngvi.stepsizes import KLRadius

_NOISE = 0.05  # nats per datum that the noise of a mini-batch may cost
_CAP = 0.5  # longest natural step on a part of the data
_RADIUS = 4.0  # nats a step may move q, where the likelihood is not log-concave


class TrainingResult(NamedTuple):
    """What a training run did."""

    losses: list[float]  # negative ELBO per datum, the mean over the batches of each epoch
    rejections: int  # natural steps that were not taken
    refined: FitResult | None  # the verdict on q, where asked

    def __str__(self) -> str:
        """One line."""
        last = f"negative ELBO per datum {self.losses[-1]:.4f}" if self.losses else "no epochs"
        verdict = "" if self.refined is None else f"; q {self.refined}"
        return f"{len(self.losses)} epochs, {last}, {self.rejections} natural steps not taken{verdict}"


def train_svgp(
    model: ApproximateGP,
    likelihood: Likelihood,
    batches: Iterable[Batch],
    num_data: int,
    hyper_optimizer: torch.optim.Optimizer | None = None,
    *,
    epochs: int = 10,
    refine: bool = False,
    callbacks: Iterable[Callable[[int, float], Any]] = (),
    progress: bool = True,
) -> TrainingResult:
    """Train q by natural gradients and the hyper-parameters by any torch optimizer, from one evaluation a batch.

    Args:
        model: with a `VariationalStrategy` over a `NaturalGradientVariationalDistribution`.
        likelihood: of one latent value a datum.
        batches: a ``DataLoader`` of (x, y), or a list of such pairs; gone through once an epoch.
        num_data: rows of an epoch.
        hyper_optimizer: over parameters of the model and the likelihood, as you like it; without it the
            hyper-parameters stay and the epochs are not run: `refine_svgp` alone is faster and exact.
        epochs: passes over the data.
        refine: end with `refine_svgp`, at the final hyper-parameters.
        callbacks: called with the epoch and its loss; a true result ends the epochs.
        progress: show a bar.

    Raises:
        InputError: no data, another number of rows than ``num_data``, an hyper-optimizer that holds q.
        PairError: a model or a likelihood it cannot serve; the message says what to use.
    """
    losses: list[float] = []
    rejections, callbacks = 0, tuple(callbacks)
    if num_data < 1:
        raise InputError(f"num_data counts the rows of an epoch and must be at least 1; got {num_data}.")
    if hyper_optimizer is not None:
        model.train()
        likelihood.train()
        q = SparseGP(model, likelihood, []).posterior
        held = {id(p) for group in hyper_optimizer.param_groups for p in group["params"]}
        if held & {id(part) for part in (*q.buffers(),)}:
            raise InputError(
                "hyper_optimizer holds the posterior, which moves by natural gradients; give it model.parameters() and "
                "likelihood.parameters(), which leave q out."
            )
        natural = _natural_steps(q, likelihood)
        with _restored_dtype(q), tqdm(total=epochs, disable=not progress, desc="SVGP", unit="epoch") as bar:
            for epoch in range(epochs):
                losses.append(_epoch(model, likelihood, batches, num_data, natural, hyper_optimizer))
                bar.set_postfix(loss=f"{losses[-1]:.4f}", rejected=natural.rejections)
                bar.update()
                answers = [callback(epoch, losses[-1]) for callback in callbacks]
                if any(answers):
                    break
        rejections = natural.rejections
    refined = None
    if refine or hyper_optimizer is None:
        refined = refine_svgp(model, likelihood, batches, progress=progress)
    return TrainingResult(losses, rejections, refined)


def _natural_steps(q: Gaussian, likelihood: Likelihood) -> Method:
    """VN; where curvature may be negative the form that stays positive definite, in short steps."""
    if log_concave(likelihood):
        return VN(q, lr=1.0)
    return IBLR(q, lr=1.0, step_size=KLRadius(_RADIUS))


def _epoch(
    model: ApproximateGP,
    likelihood: Likelihood,
    batches: Iterable[Batch],
    num_data: int,
    natural: Method,
    hyper_optimizer: torch.optim.Optimizer,
) -> float:
    """One pass; the mean loss per datum."""
    total, rows, size = 0.0, 0, natural.posteriors[0].dim
    for x, y in batches:
        count = y.shape[-1]
        natural.param_groups[0]["lr"] = _step_length(size, count, num_data, likelihood)
        hyper_optimizer.zero_grad()
        target = SparseGP(model, likelihood, [(x, y)], num_data, learn=True)
        loss = _stepped(natural, target)
        target.backward()
        _backward_priors(model, likelihood, num_data)
        hyper_optimizer.step()
        total, rows = total + float(loss) * count / num_data, rows + count
    if rows != num_data:
        raise InputError(
            f"an epoch has {rows} rows where num_data is {num_data}: the expected log likelihood would have the wrong "
            "weight beside the KL divergence. Give the number of rows, and a DataLoader without drop_last."
        )
    model.variational_strategy._clear_cache()
    return total / num_data


def _step_length(size: int, count: int, num_data: int, likelihood: Likelihood) -> float:
    """ρ = min(½, max(B/N, 4 · 0.05 B/M)); 1 on all of the data of a Gaussian likelihood, where it is exact."""
    share = count / num_data
    cap = max(_CAP, share) if isinstance(likelihood, _GaussianLikelihoodBase) else _CAP
    return min(cap, max(share, 4 * _NOISE * count / size))


def _stepped(natural: Method, target: SparseGP) -> Tensor:
    """The loss before the step; where float32 is not enough for it, q is in float64 from here on."""
    q = target.posterior
    if q.dtype == torch.float64:
        loss = natural.step(target)
    else:
        refused = natural.rejections
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RejectedStepWarning)
            loss = natural.step(target)
        if natural.rejections > refused:
            warnings.warn(
                f"a natural step could not be taken in {str(q.dtype).removeprefix('torch.')}: q is kept in float64 for "
                "the rest of the training.",
                RejectedStepWarning,
                stacklevel=4,
            )
            q.double()
    assert loss is not None
    return loss


def _backward_priors(model: ApproximateGP, likelihood: Likelihood, num_data: int) -> None:
    """Priors on hyper-parameters and added losses, as GPyTorch's objectives have them."""
    terms = [
        -prior.log_prob(closure(module)).sum() / num_data
        for owner in (model, likelihood)
        for _, module, prior, closure, _ in owner.named_priors()
    ]
    terms += [term.loss().sum() for term in model.added_loss_terms()]
    needed = [term for term in terms if term.requires_grad]
    if needed:
        torch.stack(needed).sum().backward()


@torch.no_grad()
def refine_svgp(
    model: ApproximateGP,
    likelihood: Likelihood,
    batches: Iterable[Batch],
    *,
    passes: int = 4,
    tolerance: float | None = None,
    max_evaluations: int = 100,
    progress: bool = True,
) -> FitResult:
    """The optimal q(u) for hyper-parameters as they are: sites first, then full steps until the gradient vanishes.

    Args:
        model, likelihood: see `train_svgp`.
        batches: all of the data, kept in memory.
        passes: over the sites; where the likelihood is Gaussian one is exact, and where it is not log-concave
            there are none.
        tolerance, max_evaluations: see `torchngvi.fit`.
        progress: show a bar.

    Raises:
        InputError: a number of passes below 0, no data, a K_ZZ that is not positive definite.
        PairError: a model or a likelihood it cannot serve.
    """
    if passes < 0:
        raise InputError(f"passes counts rounds over the sites and must not be negative; got {passes}.")
    training = model.training
    model.train()
    likelihood.train()
    target = SparseGP(model, likelihood, list(batches))
    with _restored_dtype(target.posterior) as q:
        # beside a small noise float32 loses the prior, which is 1 in S
        optimizer = VN(q.double())
        if passes and log_concave(likelihood):
            before, old = optimizer.evaluate(target).loss, q.snapshot()
            work = _visited(target, 1 if isinstance(likelihood, _GaussianLikelihoodBase) else passes)
            q.initialize_(work.mean, work.stddev if q.mean_field else work.scale_tril)
            q.assign(old, ~(optimizer.evaluate(target).loss < before))  # where it did not help
        result = fit(q, target, optimizer, tolerance=tolerance, max_evaluations=max_evaluations, progress=progress)
    model.variational_strategy._clear_cache()
    model.train(training)
    likelihood.train(training)
    return result


@contextlib.contextmanager
def _restored_dtype(q: Gaussian) -> Iterator[Gaussian]:
    """q may be converted for a while, and has the model's dtype again at the end."""
    dtype = q.dtype
    try:
        yield q
    finally:
        q.to(dtype)


def _visited(target: SparseGP, passes: int) -> NaturalGaussian:
    """q after so many passes over the sites, from the prior."""
    like = target.posterior
    work = NaturalGaussian(like.dim, like.batch_shape, dtype=like.dtype, device=like.device)
    sites: list[tuple[Tensor, Tensor]] = []
    for _ in range(passes):
        seen = sites or None
        sites = []
        for index, (rows, b, c) in enumerate(target.sites(work)):
            old_b, old_c = seen[index] if seen else (torch.zeros_like(b), torch.zeros_like(c))
            S = work.precision + rows.mT @ (rows * (c - old_c)[..., None])
            vector = work.precision_mean + ((b - old_b)[..., None, :] @ rows)[..., 0, :]
            ok = cholesky(S)[1] & torch.isfinite(vector).all(-1)
            work.assign(Coordinates(vector, S), ok)
            sites.append((torch.where(ok[..., None], b, old_b), torch.where(ok[..., None], c, old_c)))
    return work
