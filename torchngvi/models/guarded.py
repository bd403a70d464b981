"""A log joint that may fail at some theta: those are found by halves, and the others count."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Posterior, Target, TractableTarget
from torchngvi.models.factors import FactorTarget

FAILING = 0.05  # share of the draws of an average that may be left out where a log joint fails
VALUE = 0.4  # what a value of a log joint costs beside its gradient
_CALLS = 256  # to find the thetas of one batch at which the log joint fails


class BudgetError(Exception):
    """A call of the log joint that would exceed a budget, and was not made."""


@final
class Guarded(Target):
    """A target whose errors, after a first success, become NaN at the theta that raise them.

    Attributes:
        gradients: draws at which a gradient was wanted.
        values: draws at which none was.
        most: the budget of both, in gradients; a call that would exceed it is not made, and raises `BudgetError`.

    >>> class Fails(Target):
    ...     temperature = 1.0
    ...     def tensors(self): return ()
    ...     def log_joint(self, theta):
    ...         if bool((theta > 3).any()): raise ValueError("no")
    ...         return -theta.square().sum(-1)
    >>> target = Guarded(Fails())
    >>> target.log_joint(torch.ones(1, 2)).item()
    -2.0
    >>> target.log_joint(torch.tensor([[1.0], [2.0], [4.0]])).tolist(), target.failures()
    ([-1.0, -4.0, nan], ' The log joint failed 1 time: ValueError: no.')
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.temperature = target.temperature
        self.comparable = target.comparable
        self.draws_at_once, self.in_passes = target.draws_at_once, target.in_passes
        self.processes = target.processes
        self._same = torch.zeros((), device="cpu")
        self._answered = False
        self._count, self._last = 0, ""
        self._calls = 0  # left for the present batch
        self.gradients = self.values = 0
        self.most = math.inf

    @property
    def cost(self) -> float:
        """All that was asked for, in gradients."""
        return self.gradients + VALUE * self.values

    def log_joint(self, theta: Tensor) -> Tensor:
        """Return the target's values, with NaN where it fails."""
        differentiated = torch.is_grad_enabled() and theta.requires_grad
        if self.cost + (1.0 if differentiated else VALUE) * len(theta) > self.most:
            raise BudgetError("the budget of gradients is used up")
        if differentiated:
            self.gradients += len(theta)
        else:
            self.values += len(theta)
        value = self._asked(theta)
        if value is None:  # once more: it may have been chance
            value = self._asked(theta)
        if value is None:
            self._calls = _CALLS
            value = self._by_halves(theta)
        return value

    def _asked(self, theta: Tensor) -> Tensor | None:
        """The target's values, or None where it fails."""
        try:
            value = self.target.log_joint(theta)
        except InputError:
            raise
        except Exception as error:  # whatever the user's function raises
            if not self._answered:
                error.add_note(
                    f"(The log joint was called with theta of shape {tuple(theta.shape)}, draws first, and dtype "
                    f"{theta.dtype}, that of q. A function of one theta is wrapped as LogJoint.vmapped(f).)"
                )
                raise
            self._last = f"{type(error).__name__}: {error}"
            return None
        self._answered = True
        return value

    def _by_halves(self, theta: Tensor) -> Tensor:
        """The values at a batch that is known to fail."""
        if len(theta) == 1 or not self._calls:
            self._count += 1
            # no gradient either: it is NaN
            return (1 + 0 * theta.sum(-1)) * torch.nan
        parts = []
        for half in theta.chunk(2):
            value = None
            if self._calls:
                self._calls -= 1
                value = self._asked(half)
            parts.append(self._by_halves(half) if value is None else value)
        return torch.cat(parts)

    def failures(self) -> str:
        """Say what went wrong."""
        if not self._count:
            return ""
        return f" The log joint failed {self._count} time{'s' * (self._count > 1)}: {self._last.rstrip('.')}."

    @contextmanager
    def seen_as(self, change: Callable[[Target], Target]) -> Iterator["Guarded"]:
        """Open a block in which the target is seen in another way; what is asked there is counted here, and guarded."""
        other = Guarded(change(self.target))
        other.gradients, other.values, other.most = self.gradients, self.values, self.most
        other._answered = self._answered
        try:
            yield other
        finally:
            self.gradients, self.values = other.gradients, other.values
            other.tell(self)

    def outward(self, theta: Tensor) -> Tensor:
        """Return the parameters that points stand for, as the target does."""
        return self.target.outward(theta)

    def tell(self, other: "Guarded") -> None:
        """Tell another of the failures, and forget them."""
        other._count, other._last = other._count + self._count, self._last or other._last
        self._count = 0

    def check(self, q: Posterior) -> None:
        """Check q as the target does."""
        self.target.check(q)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return a tensor that stays as it is, since during a fit the target does."""
        return (self._same,)


# The factors of a log joint that may fail at some theta: found factor by factor, with a count of the calls


def in_factors(q: Posterior, target: Target) -> bool:
    """Say whether a log joint can be seen factor by factor: a sum over a forest, under a q over the same."""
    return isinstance(target, FactorTarget) and q.structure == target.structure and q.upper and not q.batch_shape


def guarded_factors(q: Posterior, target: Target) -> "GuardedFactors | None":
    """The guarded factors of a log joint that can be seen factor by factor under q; None of any other."""
    return GuardedFactors(target) if isinstance(target, FactorTarget) and in_factors(q, target) else None


@final
class GuardedFactors(FactorTarget):
    """The terms of a `FactorTarget` as `Guarded` targets, those of nodes of one kind as one.

    Attributes:
        drawn: the guarded terms, by the kind of their nodes; those that know their expectation are not among them.

    >>> import torch
    >>> from torchngvi.structures import arrow
    >>> groups = arrow(groups=2, local=1, globals=1)
    >>> target = FactorTarget(groups, [(0, lambda theta: -theta[..., 0] ** 2), (0, lambda theta: theta[..., 1])])
    >>> guarded = GuardedFactors(target)
    >>> guarded.log_joint(torch.ones(5, 3)).tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0]
    >>> whole = Guarded(target)
    >>> guarded.count_for(whole)
    >>> whole.values
    5
    """

    def __init__(self, target: FactorTarget) -> None:
        terms = target.by_kind()
        self.drawn = {kind: Guarded(term) for kind, term in terms if not isinstance(term, TractableTarget)}
        known = [(kind, term) for kind, term in terms if isinstance(term, TractableTarget)]
        super().__init__(target.structure, [*known, *self.drawn.items()], target.temperature)

    def allow(self, whole: Guarded) -> None:
        """Let each term spend what the budget of the whole has left."""
        for term in self.drawn.values():
            term.most = whole.most - whole.cost

    def count_for(self, whole: Guarded) -> None:
        """Count the calls since the last time for the whole: a gradient of each factor is one of the log joint."""
        for name in ("gradients", "values"):
            most = max((getattr(term, name) for term in self.drawn.values()), default=0)
            setattr(whole, name, getattr(whole, name) + most)
        for term in self.drawn.values():
            term.tell(whole)
            term.gradients = term.values = 0
