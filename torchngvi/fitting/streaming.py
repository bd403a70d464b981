"""Data in batches, one batch at a time: where a fit to many rows starts.

The posterior is kept as a sum of sites in natural coordinates, one a batch; to visit a batch is to take
its site out, to move q towards the posterior of the batch under what is left, and to put the change in:

    λ = λ₀ + Σ_b λ_b        q' from q by VN on  E_q[-log p(batch_b | θ)] + γ KL(q ‖ λ - λ_b)

    λ_b' = λ' - (λ - λ_b)

The first pass is streaming variational Bayes (Broderick et al. 2013), a later one the incremental
aggregated gradient (Blatt, Hero and Gauchman 2007) with the natural gradient.  Averages of natural
gradients of mini-batches scaled up to all the data are still d/2 nats away after a pass; this ends within
a nat after two, from where a few passes over all the data are exact.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from torchngvi.distributed import Processes, synchronize
from torchngvi.expectations.draws import Fixed
from torchngvi.expectations.sampled import SampleAverage
from torchngvi.fitting.fresh import allowance, sampled_loss
from torchngvi.fitting.settings import EngineSettings
from torchngvi.interfaces import FullPrior, Target
from torchngvi.methods import VN
from torchngvi.mode import find_mode
from torchngvi.models import (
    DataLogJoint,
    GeneralizedLinear,
    LogJoint,
    ShardedDraws,
    ShardedLogJoint,
    ShardedTractable,
    Streamed,
)
from torchngvi.models.factors import Guarded
from torchngvi.numerics.linalg import cholesky
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.structures import Dense


@dataclass(frozen=True)
class StreamSettings:
    """The numbers of a start in passes."""

    passes: int = 2  # over the batches, where their sites can be kept
    kept: int = 10**8  # numbers in the sites of all batches beyond which none are kept, and one pass is made
    careful: int = 10  # batches of the first pass that are fitted; every other visit is a single full step
    norm: float = 0.5  # natural-gradient norm at which the fit to a batch ends, from where a full step can be trusted
    steps: int = 12  # of it, at most
    widest: int = 400  # dimensions up to which mean field is worth the draws of a full covariance
    gradients: int = 20  # a coordinate, that the search for the mode of a careful visit may take
    glance: int = 32  # draws that say whether q has the lower loss there
    rows: int = 50_000  # on which a fit in passes begins
    rows_norm: float = 0.1  # at which the steps on them end: what is left is little beside what the others will say
    rows_steps: int = 30  # of them, at most


_SETTINGS = StreamSettings()


class _Natural(NamedTuple):
    """A Gaussian factor exp(bᵀθ - ½θᵀSθ), not always a density."""

    b: Tensor  # (D,)
    S: Tensor  # (D, D)

    def plus(self, other: "_Natural", sign: float = 1.0) -> "_Natural":
        return _Natural(self.b + sign * other.b, self.S + sign * other.S)

    def log(self, theta: Tensor) -> Tensor:
        """The logarithm bᵀθ - ½θᵀSθ of the factor, (*sample,)."""
        return (theta * (self.b - 0.5 * theta @ self.S)).sum(-1)


_Part = Callable[[_Natural], Target | None]  # a batch: its posterior under a Gaussian factor, or nothing


@torch.no_grad()
def stream_rows(q: Gaussian, model: GeneralizedLinear, batch_size: int, seed: int = 0) -> None:
    """Visit the rows of a generalised linear model in a random order, its prior first; leaves q near the optimum."""
    rows = model.X.shape[-2]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed), device="cpu").split(batch_size)
    work = CholeskyGaussian.from_posterior(q, structure=Dense(q.dim))
    start = _natural(CholeskyGaussian.from_prior(model.prior))

    def part(index: Tensor) -> _Part:
        def posterior(known: _Natural) -> Target | None:
            root, ok = cholesky(known.S)
            if not bool(ok):
                return None
            batch = model.minibatch(index)
            batch.weights = batch.weights * len(index) / rows  # as they are, not scaled up
            mean = torch.cholesky_solve(known.b[:, None], root)[:, 0]
            batch.prior, batch.comparable = FullPrior(mean, known.S, root.mT.contiguous()), True
            return batch

        return posterior

    _visit(work, start, lambda: map(part, order), VN, _passes(len(order), q.dim))
    _hand_over(work, q)


@torch.no_grad()
def stream_batches(q: Gaussian, target: DataLogJoint, seed: int) -> None:
    """Visit the batches of a log joint, starting from q; twice where they come again in the same order."""
    if q.batch_shape or (q.structure.widest < q.dim and q.dim > _SETTINGS.widest):
        return
    work = CholeskyGaussian.from_posterior(q, structure=Dense(q.dim))
    nothing = _Natural(torch.zeros_like(work.mean), torch.zeros_like(work.covariance))
    estimator = SampleAverage(Fixed(max(32, 2 * q.dim + 2), seed=seed))
    guarded = Guarded(target)  # of one batch after another: an error ends the fit at the first call only

    def parts() -> Iterator[_Part]:
        for number, batch in enumerate(target.one_pass()):

            def posterior(known: _Natural, batch: Any = batch, first: bool = not number) -> Target:
                def log_joint(theta: Tensor) -> Tensor:
                    prior = target.prior.log_joint(theta) if first else 0.0  # the prior goes with the first batch
                    return prior + target.batch_log_likelihood(theta, batch) + target.temperature * known.log(theta)

                guarded.target = LogJoint(log_joint, target.temperature)
                return guarded

            yield posterior

    passes = _passes(len(target.batches), q.dim) if _repeats(target.batches) else 1  # type: ignore[arg-type]
    _visit(work, nothing, parts, lambda work: VN(work, estimator=estimator), passes)
    _hand_over(work, q)


@torch.no_grad()
def start_in_passes(q: Gaussian, target: Target, seed: int) -> None:
    """Put q where some of the rows lead, before evaluations that are passes over all of them.

    Of several processes the first has its part to begin with, and hands on where that leads.  What n of N rows say is
    as wide as √(N/n) times what all of them say, and q is made narrower by that.
    """
    local: Target = target
    processes, rows = Processes.alone(), getattr(target, "num_data", 0)
    if isinstance(target, ShardedLogJoint | ShardedTractable):
        local, processes = target.local, target.processes
    elif isinstance(target, ShardedDraws) and isinstance(target.target, DataLogJoint):
        local, processes, rows = target.target, target.processes, target.target.num_data
    with processes.together():
        if processes.leads and isinstance(local, Streamed) and not q.batch_shape:
            part = local.beginning(_SETTINGS.rows)
            _try_steps(VN(q), part, _SETTINGS.rows_norm, _SETTINGS.rows_steps)
            _narrow(q, math.sqrt(part.num_data / rows))
        elif processes.leads and isinstance(local, DataLogJoint):
            stream_batches(q, local, seed)
            if local is not target and not q.batch_shape:
                _narrow(q, math.sqrt(local.num_data / rows))
    if processes.world > 1:
        synchronize(q, group=processes)


def _put_at_mode(q: CholeskyGaussian, target: Guarded, seed: int) -> bool:
    """Put q at the mode of a batch of a log joint under what is known, where its loss is lower; whether it is.

    A mode whose loss misses its promise, as where scales have collapsed, is better only than a q that is far off.
    """
    here, loss = q.snapshot(), sampled_loss(q, target, _SETTINGS.glance, seed)
    mode = find_mode(target, q.mean, _SETTINGS.gradients * q.dim)
    if mode is None:
        return False
    q.initialize_(mode.theta, mode.root)
    gamma, settings = target.temperature or 1.0, EngineSettings()
    there = sampled_loss(q, target, _SETTINGS.glance, seed)
    trusted = there <= mode.promised_loss(q, gamma) + gamma * allowance(q.dim, settings.trust)
    lower = there < loss and (trusted or not loss <= there + gamma * settings.units * q.dim)
    if not lower:
        q.restore(here)
    return lower


def _try_steps(optimizer: VN, target: Target, norm: float, most: int) -> bool:
    """Take steps by trial, until the natural-gradient norm is as small; whether q has moved."""
    moved = False
    for _ in range(most):
        if bool(optimizer.evaluate(target).norm2.sqrt() <= norm * (target.temperature or 1.0)):
            break
        optimizer.step(target)
        assert optimizer.last is not None
        moved |= bool(optimizer.last.accepted.any())
    return moved


def _narrow(q: Gaussian, factor: float) -> None:
    """Multiply the root of the covariance."""
    if q.structure.closed:
        q.initialize_(q.mean.clone(), factor * q.scale_tril)
    else:
        q.restore(q._coordinates_with(q.mean.clone(), q.whitener() / factor))


def _visit(
    work: CholeskyGaussian,
    start: _Natural,
    parts: Callable[[], Iterator[_Part]],
    optimizer: Callable[[CholeskyGaussian], VN],
    passes: int,
) -> None:
    """Visit every part, as often as there are passes; keeps one site a part where there are several passes."""
    total = start
    sites: dict[int, _Natural] = {}
    for turn in range(passes):
        for number, part in enumerate(parts()):
            known = total.plus(sites[number], -1.0) if number in sites else total
            target = part(known)
            if target is None:
                continue
            placed = moved = False
            if not turn and number < _SETTINGS.careful:
                placed = isinstance(target, Guarded) and _put_at_mode(work, target, number)
                moved = _try_steps(optimizer(work), target, _SETTINGS.norm, _SETTINGS.steps)
            full = optimizer(work)  # whose step no rejection has cut short
            full.step_untried(target)
            assert full.last is not None
            if not (placed or moved or bool(full.last.accepted)):
                continue
            total = _natural(work)
            if passes > 1:
                sites[number] = total.plus(known, -1.0)


def _natural(q: CholeskyGaussian) -> _Natural:
    S = torch.cholesky_inverse(q.scale_tril)
    return _Natural(S @ q.mean, S)


def _passes(batches: int, dim: int) -> int:
    """One where the sites of so many batches are too many numbers to be kept."""
    return _SETTINGS.passes if batches * dim**2 <= _SETTINGS.kept else 1


def _repeats(batches: Any) -> bool:
    """Whether every pass sees the same batches in the same order."""
    if not isinstance(batches, DataLoader):
        return isinstance(batches, list | tuple)
    sampler = batches.sampler
    if batches.batch_sampler is not None:
        if type(batches.batch_sampler) is not BatchSampler:
            return False
        sampler = batches.batch_sampler.sampler
    return isinstance(sampler, SequentialSampler)


def _hand_over(work: CholeskyGaussian, q: Gaussian) -> None:
    """Mean field keeps the diagonal of the precision, as its optimum does."""
    q.initialize_(work.mean, q.kept_precision(work.scale_tril))
