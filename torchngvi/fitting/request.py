"""What `torchngvi.fit` is asked for, and the table by which it finds the engine that does it.

A posterior names its engine by a word, its attribute ``engine``; where that is empty, as for a Gaussian, the target
names it.  The engine's own module reads the rest of the request, and refuses what it cannot do.

    steps       an optimizer is given, or E_q[ℓ] has a closed form     its steps, `torchngvi.fitting.steps`
    chunks      a regression                                           the same; of a large batch some members at a time
    averages    a log joint without an optimizer                       averages that grow
    mixture     a mixture of Gaussians                                 natural gradients of components and weights
    flat        a flat posterior without an optimizer                  IFVB, or NGVI of an exponential family, until a
                                                                       smoothed bound stops rising
    warped      a warped posterior                                     the Gaussian, then its curves
    product     a product of posteriors and a `FactorGraph`            coordinate ascent
    groups      a mixed model in batches of groups                     a pass over the groups for each step
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch

from torchngvi.errors import InputError
from torchngvi.fitting.engine import Engine
from torchngvi.fitting.stopping import Criterion, Evaluations, NormBelow, Stalled, Unimproved, joined
from torchngvi.interfaces import Posterior, Target
from torchngvi.optim import NaturalGradientVI, Watch

# the module of each engine, and in it the function that makes of a `Request` the engine and what ends its run
ENGINES = {
    "averages": "torchngvi.fitting.sample_average:averages_of",
    "chunks": "torchngvi.fitting.chunks:chunks_of",
    "flat": "torchngvi.fitting.usual_steps:flat_steps_of",
    "groups": "torchngvi.fitting.groups:passes_of",
    "mixture": "torchngvi.fitting.mixtures:mixture_steps_of",
    "product": "torchngvi.fitting.coordinate_sweeps:sweeps_of",
    "steps": "torchngvi.fitting.steps:steps_of",
    "warped": "torchngvi.fitting.warped:warped_averages_of",
}

BY_DRAWS = 0.1  # tolerance where E_q[ℓ] is an average over draws: about 0.005 nats
_MANY = 100  # coordinates from which on each is as accurate as with so many
_PATIENCE = 200  # steps without a new best of the smoothed bound
_STALL = int(Watch.rejections)  # rejected steps in a row after which nothing more is to be had


@dataclass(frozen=True)
class Request:
    """The arguments of `torchngvi.fit` that engines read, checked."""

    q: Posterior
    target: Target
    optimizer: NaturalGradientVI | None
    tolerance: float | None
    max_evaluations: int
    stop: Criterion | None
    batch_size: int | None
    batch_groups: int | None
    examine: bool

    def engine(self, word: str = "") -> tuple[Engine, Criterion]:
        """Make the engine that a word names, by default that of q, or else of the target, and what ends its run."""
        own = "groups" if self.batch_groups is not None else self.q.engine or self.target.engine
        if (asked := word or own) not in ENGINES:
            raise InputError(
                f"{type(self.q).__name__} and {type(self.target).__name__} name the engine {asked!r}, which the table "
                f"torchngvi.fitting.request.ENGINES does not have; it has {', '.join(ENGINES)}. Add a row, or call an "
                "attribute of your own something else than engine."
            )
        module, function = ENGINES[asked].split(":")
        found: tuple[Engine, Criterion] = getattr(import_module(module), function)(self)
        return found

    def tolerance_or(self, usual: Callable[[Posterior], float]) -> float:
        """Return the tolerance that the user gave, or the usual one for q."""
        return usual(self.q) if self.tolerance is None else self.tolerance

    def until_small(self, tolerance: float) -> Criterion:
        """Return what ends a run to a small norm, in the order in which the reasons count."""
        return joined(NormBelow(tolerance) | Stalled(_STALL) | Evaluations(self.max_evaluations), self.stop)

    def until_unimproved(self, tolerance: float | None) -> Criterion:
        """Return what ends a run whose bound is watched, with a tolerance on the norm or without."""
        ends = Unimproved(_PATIENCE) | Evaluations(self.max_evaluations)
        return joined(NormBelow(tolerance) | ends if tolerance else ends, self.stop)


def tolerance_of(q: Posterior) -> float:
    """Return the usual tolerance on the norm where E_q[ℓ] is known to rounding."""
    return 1e-5 if torch.finfo(q.mean_probe.dtype).eps < 1e-12 else 1e-2


def tolerance_by_draws(q: Posterior) -> float:
    """Return the usual tolerance on the norm where E_q[ℓ] is an average over draws: about 0.005 nats a hundred."""
    return BY_DRAWS * max(q.dim / _MANY, 1.0) ** 0.5
