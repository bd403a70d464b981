"""What stands in the place of I_F⁻¹ in λ ← λ - ρ I_F⁻¹∇L: the metrics of flat posteriors.

I_F depends on q alone, so that a metric learns from scores φ at draws of its own, which need no data: after
``loss.backward()`` as well as on a target.  Draws for the gradient and for the metric are independent.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Bent, Local, Metric, Posterior
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior

State = dict[str, Any]  # tensors and counts, saved with the optimizer
_AT_ONCE = 256  # scores of a warm-up


class Preconditioner(Metric):
    """Turns a gradient in λ into the direction of a step.

    A subclass says what it remembers (`fresh`), how scores enter (`absorb`) and what it makes of a gradient
    (`direction`); when scores are drawn, and where, is said here.
    """

    samples: int  # S: scores it wants a step
    remembers: bool  # past scores count, so that a warm-up helps
    natural = True  # the direction estimates I_F⁻¹∇L, so that (direction)ᵀ∇L is a squared length in nats
    warmup: int | None = None  # scores before the first step, where it remembers; None for max(2D, 1000)
    generator: torch.Generator | None = None  # of the draws

    @abstractmethod
    def fresh(self, q: FlatPosterior) -> State:
        """The state before the first score.

        Raises:
            InputError: a family it cannot serve, memory it does not get.
        """

    @abstractmethod
    def absorb(
        self,
        state: State,
        scores: Tensor,  # (S, *batch, D)
        generator: torch.Generator | None = None,
    ) -> None:
        """Take in S scores, in place."""

    @abstractmethod
    def direction(
        self,
        state: State,
        gradient: Tensor,  # (*batch, D)
        q: FlatPosterior,
    ) -> Tensor:
        """What the step goes along, downhill after a change of sign; NaN for members without one."""

    def init(self, q: Posterior) -> State:
        """Its own state, and the number of scores drawn.

        Raises:
            PairError: a q that is no flat vector.
        """
        return self.fresh(_flat(self, q)) | {"fisher_draws": 0}

    def __call__(self, q: Posterior, gradient: Local, went: Tensor, state: State) -> tuple[Bent, State]:
        """With fresh scores at λ."""
        q = _flat(self, q)
        return self.bent(q, gradient, state, q.vector), {}

    def bent(
        self,
        q: FlatPosterior,
        gradient: Local,
        state: State,
        at: Tensor,  # (*batch, D), where scores are drawn
    ) -> Bent:
        """The direction along the manifold of q, after the scores of this step were taken in."""
        if self.remembers and not state["fisher_draws"]:
            count = max(2 * q.size, 1000) if self.warmup is None else self.warmup
            for start in range(0, count, _AT_ONCE):
                self._draw(q, state, at, min(_AT_ONCE, count - start))
        if self.samples:
            self._draw(q, state, at, self.samples)
        direction = q.projected(q.vector, self.direction(state, gradient.a, q))
        return Bent(Local(direction, gradient.P), (direction * gradient.a).sum(-1))

    def _draw(self, q: FlatPosterior, state: State, at: Tensor, count: int) -> None:
        with torch.no_grad():
            scores = q.score(q.sample(count, self.generator, at), at)
        self.absorb(state, scores, self.generator)
        state["fisher_draws"] += count


def check_warmup(warmup: int | None) -> int | None:
    """A number of scores, or None."""
    if warmup is not None and not warmup >= 0:
        raise InputError(f"warmup counts scores before the first step, not negative; got {warmup}.")
    return warmup


def _flat(metric: Preconditioner, q: Posterior) -> FlatPosterior:
    if not isinstance(q, FlatPosterior):
        raise PairError(
            f"{type(metric).__name__} learns from the scores of a flat posterior; got {type(q).__name__}. "
            "Use FlatCholesky, or leave the metric out."
        )
    return q


def finite_rows(
    scores: Tensor,  # (S, *batch, D)
) -> tuple[Tensor, Tensor]:
    """Scores with rows that are not finite set to zero, and which rows are finite (S, *batch)."""
    fine = scores.sum(-1).isfinite()  # of a sum: one pass, and no NaN or infinity cancels in it
    return torch.where(fine[..., None], scores, 0.0), fine


def check_count(name: str, value: int) -> int:
    """A number of draws or vectors, at least 1."""
    if not (isinstance(value, int) and value >= 1):
        raise InputError(f"{name} is a number of draws, at least 1; got {value}.")
    return value
