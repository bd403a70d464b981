"""The parts on the axes: estimators, rules, step sizes, metrics, momentum.

What a part remembers from step to step is a dict of its own for each posterior, made by its ``init``, handed to its
calls, saved with the optimizer, and read by no other part.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from torchngvi.errors import PairError
from torchngvi.interfaces.moves import Coordinates, Path
from torchngvi.interfaces.packets import Expectation, Local
from torchngvi.interfaces.posterior import Posterior
from torchngvi.interfaces.targets import Target


class Estimator(ABC):
    """Value and derivative of E_q[ℓ]."""

    comparable: bool  # see Expectation.comparable
    needs: type[Target]  # the targets it can evaluate
    unbiased: bool = True  # the means over its draws are those of E_q[ℓ]; else of a quadratic ℓ in the right model only

    def prepared(self, source: Any) -> Any:
        """What a user handed to ``step``, as this estimator takes it: by default as it is."""
        return source

    def check(self, q: "Posterior") -> None:
        """Raise where it cannot evaluate this q: by default, one without a frame.

        Raises:
            PairError: a flat posterior.
        """
        if not q.framed:
            raise PairError(
                f"{type(self).__name__} reads the mean and the root of q, and {type(q).__name__} is a vector of "
                "parameters without them. Use an estimator of torchngvi.ifvb, such as ControlVariate(100)."
            )

    @abstractmethod
    def __call__(self, q: "Posterior", target: Target) -> Expectation:
        """Evaluate at q: value and derivative of E_q[ℓ].

        The estimator itself does not change, but for the state of its generator: what a call has learnt for the next
        one it returns as ``Expectation.learned``, and is told by :meth:`recalling`.
        """

    def recalling(self, learned: Mapping[str, Tensor]) -> "Estimator":
        """The same estimator, told what an earlier call has learnt; itself where calls learn nothing from one another.

        Args:
            learned: the ``learned`` of an earlier `Expectation`; entries of other names are ignored.
        """
        return self

    @property
    def fixed(self) -> bool:
        """Whether every call sees the same draws: exact for their average, which is not E_q[ℓ]."""
        return False

    def fresh(self, number: int) -> "Estimator":
        """The same on draws that have not been fitted to, the number-th such set; itself unless `fixed`."""
        return self


class Rule(ABC):
    """Which curve a step follows."""

    emits: type  # the kind of move
    natural: bool  # the path starts along the natural gradient, in the frame -(a, P)
    full_algebra: bool = False  # it needs products that leave a pattern: the structure of q must be a FullAlgebra

    @abstractmethod
    def __call__(self, q: "Posterior", e: Expectation) -> Path:
        """The path from q."""


class Trial(NamedTuple):
    """A step that was tried, each (*batch,)."""

    before: Tensor  # L
    after: Tensor  # L
    slope: Tensor  # -dL/dρ at 0
    length: Tensor  # ρ times the natural norm of the direction
    rho: Tensor
    slack: Tensor | float = 0.0  # nats a kept step may lose, where the derivative is one up to noise


class StepSize(ABC):
    """How far along the path, decided before the step: by the learning rate, or a limit on the length of the step."""

    needs_trial: ClassVar[bool] = False  # said by the kind: whether steps are tried, and may be taken back
    needs_natural: bool = False  # it reads the natural norm as the length of a step
    needs_tangent: bool = False  # it reads the change of q's own coordinates as the length of a step

    def init(self, like: Tensor) -> dict[str, Any]:
        """Its state: none, for what decides before the step has nothing to learn from it."""
        return {}

    @abstractmethod
    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict) -> Tensor:
        """ρ (*batch,)."""


class TrialStepSize(StepSize):
    """How far along the path, found by trial: q moves, is evaluated there, and goes back where that is rejected."""

    needs_trial = True

    @abstractmethod
    def init(self, like: Tensor) -> dict[str, Tensor]:
        """State tensors, one entry a batch member, of the dtype and device of ``like`` (*batch,)."""

    @abstractmethod
    def judge(self, trial: Trial, state: dict) -> tuple[Tensor, dict]:
        """Accept the trial?  (*batch,), with the state for the next step."""


class Bent(NamedTuple):
    """A gradient after a metric has acted on it."""

    local: Local  # B∇L: the rules take it for the gradient
    slope: Tensor  # ⟨∇L, B∇L⟩, (*batch,)


class Metric(ABC):
    """A gradient of L in, a bent one out, which the rule then follows: B∇L with a B that may be learnt.

    Of two kinds.  An `Acceleration` improves on a natural gradient, which q gives it in its frame, and is judged by
    trial.  Other metrics are given the plain gradient of a q that has no frame and take the part of the inverse
    Fisher matrix, or of another B; they need no trial.
    """

    natural: bool  # B∇L is, or estimates, the natural gradient: its slope is a squared natural norm

    @abstractmethod
    def init(self, q: "Posterior") -> dict[str, Any]:
        """The state: tensors, counts and dicts of them, which are saved with the optimizer and nobody else reads."""

    @abstractmethod
    def __call__(
        self,
        q: "Posterior",
        gradient: Local,
        went: Tensor,  # ρ of the step before along the bent gradient, 0 where there was none, (*batch,)
        state: dict[str, Any],
    ) -> tuple[Bent, dict[str, Any]]:
        """The bent gradient at q, and what of the state is to change when the step is taken."""

    def forget(self, keep: Tensor, state: dict[str, Any]) -> None:  # noqa: B027  what depends on q alone stays true
        """q or the target was changed: drop what is known, but for the members (*batch,) of the mask."""


class Acceleration(Metric):
    """A natural gradient of L/γ in, a better one out; judged by trial."""

    natural = True

    @abstractmethod
    def forget(self, keep: Tensor, state: dict[str, Any]) -> None:
        """q or the target was changed: drop what is known, but for the members (*batch,) of the mask."""


class Momentum(ABC):
    """Averages the changes of q's own coordinates over the steps; state, in raw coordinates.

    Where a step takes a diagonal entry of q's root through zero, q turns that column of the root, so that the diagonal
    stays positive; the optimizer then turns the same columns of the state tensors that are named in ``signed``.
    """

    needs_natural: bool  # it normalises natural gradients
    signed: tuple[str, ...]  # names of the state tensors that average changes of the matrix, in its shape
    carried: tuple[str, ...] = ()  # names of those that average changes of the vector, to be carried on a manifold
    of_steps: bool = False  # it averages steps as long as the step size lets them be, and is not limited afterwards

    @abstractmethod
    def init(self, q: "Posterior") -> dict[str, Tensor]:
        """State tensors, (*batch, ...)."""

    @abstractmethod
    def __call__(
        self,
        q: "Posterior",
        change: Coordinates,  # -λ̇, of a step of ρ = 1
        norm2: Callable[[], Tensor],  # squared natural norm of λ̇, (*batch,)
        state: dict[str, Tensor],
    ) -> tuple[Coordinates, dict[str, Tensor]]:
        """The change to make instead, and what of the state is new once the step is taken."""
