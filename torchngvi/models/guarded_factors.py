"""The factors of a log joint that may fail at some theta: found factor by factor, with a count of the calls."""

from typing import final

from torchngvi.interfaces import Posterior, Target, TractableTarget
from torchngvi.models.factors import FactorTarget
from torchngvi.models.guarded import Guarded


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
