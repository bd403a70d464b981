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

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

from torchngvi.expectations.draws import Fixed
from torchngvi.expectations.sample_average import SampleAverage
from torchngvi.interfaces import FullPrior, Target
from torchngvi.linalg import cholesky
from torchngvi.methods import VN
from torchngvi.models import DataLogJoint, GeneralizedLinear, LogJoint
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian

_NORM = 0.5  # natural-gradient norm at which the fit to a batch ends
_STEPS = 12  # most steps of one
_CAREFUL = 10  # batches of the first pass that are fitted; a later one is a single step
_PASSES = 2


class _Natural(NamedTuple):
    """A Gaussian factor exp(bᵀθ - ½θᵀSθ), not always a density."""

    b: Tensor  # (D,)
    S: Tensor  # (D, D)

    def plus(self, other: "_Natural", sign: float = 1.0) -> "_Natural":
        return _Natural(self.b + sign * other.b, self.S + sign * other.S)

    def log(self, theta: Tensor) -> Tensor:
        """bᵀθ - ½θᵀSθ, (*sample,)."""
        return (theta * (self.b - 0.5 * theta @ self.S)).sum(-1)


class _Part(Protocol):
    """A batch: its posterior under a Gaussian factor, or nothing where there is none."""

    def __call__(self, known: _Natural) -> Target | None: ...


@torch.no_grad()
def stream_rows(q: Gaussian, model: GeneralizedLinear, batch_size: int, seed: int = 0) -> None:
    """Visit the rows of a generalised linear model in a random order, from its prior; leaves q near the optimum.

    >>> model = GeneralizedLinear(torch.eye(4).double(), [0.0, 1.0, 1.0, 0.0])
    >>> q = CholeskyGaussian(4, dtype=torch.float64)
    >>> stream_rows(q, model, batch_size=2)
    >>> [round(x, 2) for x in q.mean.sign().tolist()]
    [-1.0, 1.0, 1.0, -1.0]
    """
    rows = model.X.shape[-2]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).split(batch_size)
    work = CholeskyGaussian.from_prior(model.prior)
    start = _natural(work)

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

    _visit(work, start, lambda: map(part, order), VN, model.temperature, _PASSES)
    _hand_over(work, q)


@torch.no_grad()
def stream_batches(q: Gaussian, target: DataLogJoint, seed: int) -> None:
    """Visit the batches of a log joint, from q; twice where they come again in the same order."""
    work = CholeskyGaussian.from_posterior(q)
    nothing = _Natural(torch.zeros_like(work.mean), torch.zeros_like(work.covariance))
    estimator = SampleAverage(Fixed(max(32, 2 * q.dim + 2), seed=seed))

    def parts() -> Iterator[_Part]:
        for number, batch in enumerate(target.batches):

            def posterior(known: _Natural, batch: Any = batch, first: bool = not number) -> Target:
                def log_joint(theta: Tensor) -> Tensor:
                    prior = target.prior.log_joint(theta) if first else 0.0  # the prior goes with the first batch
                    return prior + target.batch_log_likelihood(theta, batch) + target.temperature * known.log(theta)

                return LogJoint(log_joint, target.temperature)

            yield posterior

    _visit(
        work,
        nothing,
        parts,
        lambda work: VN(work, estimator=estimator),
        target.temperature,
        _PASSES if _repeats(target.batches) else 1,
    )
    _hand_over(work, q)


def _visit(
    work: CholeskyGaussian,
    start: _Natural,
    parts: Callable[[], Iterator[_Part]],
    optimizer: Callable[[CholeskyGaussian], VN],
    temperature: float,
    passes: int,
) -> None:
    """Visit every part, as often as there are passes; keeps one site a part where there are several."""
    total = start
    sites: dict[int, _Natural] = {}
    for turn in range(passes):
        for number, part in enumerate(parts()):
            known = total.plus(sites[number], -1.0) if number in sites else total
            target = part(known)
            if target is None:
                continue
            careful = not turn and number < _CAREFUL
            _settle(work, target, optimizer(work), temperature, careful)
            total = _natural(work)
            if passes > 1:
                sites[number] = total.plus(known, -1.0)


def _settle(work: CholeskyGaussian, target: Target, optimizer: VN, temperature: float, careful: bool) -> None:
    if not careful:
        optimizer.step_untried(target)
        return
    for _ in range(_STEPS):
        if bool(optimizer.evaluate(target).norm2.sqrt() <= _NORM * (temperature or 1.0)):
            return
        optimizer.step(target)


def _natural(q: CholeskyGaussian) -> _Natural:
    S = torch.cholesky_inverse(q.scale_tril)
    return _Natural(S @ q.mean, S)


def _repeats(batches: Any) -> bool:
    """Whether every pass sees the same batches in the same order."""
    return isinstance(batches, list | tuple) or (
        isinstance(batches, DataLoader) and isinstance(batches.sampler, SequentialSampler)
    )


def _hand_over(work: CholeskyGaussian, q: Gaussian) -> None:
    q.initialize_(work.mean, work.stddev if q.mean_field else work.scale_tril)
