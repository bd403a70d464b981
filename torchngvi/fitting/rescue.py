"""What is done where averages do not lead to the best q: starts race, then steps of falling size, then averages again.

A mode that was trusted may turn out to be no place to begin: averages over few draws lead q away from it, to where
larger ones see that it is worse than it was, or they end far from an optimum.  Then the starts race which would have
raced at once had the mode been refused, and q where the averages have led is one of them.  Data in batches and batches
of posteriors, for which no mode is looked for, come to a race in this way alone.

Where averages after a race are slow, in a curved valley, or noisy, under gradients with heavy tails, stochastic steps
of falling size take over.  What they reach is where averages are tried once more.
"""

import math
from typing import Any

import torch

from torchngvi.fitting.descent import Descent
from torchngvi.fitting.race import BOUNDED, CONFINED, Compared, Race, kept_values, put_at_best
from torchngvi.fitting.starts import Starts
from torchngvi.interfaces import Coordinates

_COMPARED = 4096  # draws by which two places are compared
_GLANCE, _LOOKED = (32, 256), 1024  # by which what was lost since the start is looked for, and since a race
_CERTAIN = 3.0  # standard errors
_CLOSE = 0.2  # norm² + noise² of the last average at which steps of falling size lead no nearer
_POOLED = (32, 100)  # dimensions
_IN_SETS = 171  # dimensions from which on the minima of several largest averages are averaged
_STUCK = 3  # rejections of the first steps
_HEAVY = 20.0  # noise² that should have fallen and has not


class Rescue:
    """The places that a fit by averages can go back to, and the two ways on from there.

    Attributes:
        origin: q before the fit.
        winner: where the start has led: a mode that was trusted, the end of a race, or that of stochastic steps.
        loss: the negative ELBO there, infinite where it is not known.
        first_log_sd: of q before the fit, or at the mode where it has started, whichever is wider.
        finished: stochastic steps of falling size were made: the ELBO before and after.
        turned: averages had led to a worse place than the start, and were begun anew there.
        heavy: the gradients have heavy tails, so that the minima of averages are those of a few draws.
    """

    def __init__(self, starts: Starts) -> None:
        self.starts = starts
        self.origin: Coordinates | None = None
        self.winner: Coordinates | None = None
        self.loss = math.inf
        self.finished: tuple[Compared, Compared] | None = None
        self.first_log_sd = starts.q.stddev.log()
        self.turned = self.heavy = False
        self.noise2 = math.inf  # at the last evaluation of an average

    def begun(self) -> None:
        """Remember q where the first start has led."""
        self.winner, self.loss = self.starts.q.snapshot(), self.starts.reached
        self.noise2, self.heavy = math.inf, False
        if not self.starts.raced:  # whose steps may have widened it for ever; a collapsed mode says nothing
            self.first_log_sd = torch.maximum(self.starts.q.stddev.log(), self.first_log_sd)

    def wider(self) -> float:
        """Log of the factor by which a standard deviation has grown."""
        return float((self.starts.q.stddev.log() - self.first_log_sd).max())

    def unconfined(self, loss: float) -> bool:
        """Whether nothing confines q, so that no other start is of use."""
        return self.wider() > CONFINED or loss < -BOUNDED

    @property
    def races(self) -> bool:
        """Whether starts may race yet."""
        return not self.starts.raced and self.origin is not None and not self.starts.over()

    @property
    def pools(self) -> bool:
        """Whether draws may be pooled once starts have raced: fewer dimensions need none, in more they crept."""
        return _POOLED[0] <= self.starts.q.dim <= _POOLED[1]

    def saves(self, loss: float) -> bool:
        """Whether starts may race where an average has no minimum: not where nothing confines q."""
        return self.races and not self.unconfined(loss)

    def worse(self, loss: float) -> bool:
        """Whether a negative ELBO is not that of a fit: far above where the fit has started, or not finite."""
        return not loss <= self.loss + self.starts.allowance

    def tails(self, descent: Descent) -> bool:
        """Whether gradients have heavy tails, by the evaluations of averages one after another.

        From one average to the next noise² falls as the number of draws grows.  Under heavy tails it is underestimated
        at the minimum of few draws, and rises; or it is so large over the first that no step can be taken at all.
        """
        noise2, before = float(descent.point.noise2.max()), self.noise2
        seen = descent.evaluations - descent.first
        risen = seen == 1 and noise2 > before
        stuck = descent.stalled >= _STUCK and seen == descent.stalled + 1
        self.noise2 = noise2
        self.heavy |= noise2 > _HEAVY and (risen or stuck)
        return self.heavy

    def gives_up(self, descent: Descent) -> bool:
        """Whether the minimisation of an average after a race is given up, to be asked after each evaluation."""
        return self.starts.raced and (self.tails(descent) or descent.hopeless())

    def in_vain(self, descent: Descent, tolerance: float) -> bool:
        """Whether q is near an optimum after a race, and the largest average would be noisier than is tolerated."""
        if not self.starts.raced or descent.point.total**2 > _CLOSE or self.starts.q.dim >= _IN_SETS:
            return False
        return float(descent.point.noise2.max()) * descent.draws > tolerance**2 * descent.most

    def useless(self, descent: Descent) -> bool:
        """Whether averages after a race are given up for steps of falling size, which have more to gain."""
        last = descent.draws == descent.most
        if not self.starts.raced or (last and descent.point.total**2 <= _CLOSE):
            return False
        return (last and not descent.tame) or descent.hopeless() or self.heavy

    def race(self) -> None:
        """Put q at the best of the starts, of which where it is now is one."""
        assert self.origin is not None
        self.starts.again(self.origin, self.winner)
        self.begun()

    def finish(self) -> tuple[Compared, Compared]:
        """Stochastic steps of falling size, from q or from where the start had led, whichever is better."""
        starts = self.starts
        race = Race(starts.q, starts.target, starts.seed, starts.over, starts.show)
        self.finished = race.finish(self.winner)
        self.winner, self.loss = starts.q.snapshot(), -max(part.elbo for part in self.finished)
        return self.finished

    def best(self) -> float:
        """Put q where the start has led if fresh draws say that it is better there; the ELBO of the better."""
        starts = self.starts
        places = [starts.q.snapshot()] + ([] if self.winner is None else [self.winner])
        return put_at_best(starts.q, starts.target, places, _COMPARED, starts.seed + 5).elbo

    def regret(self) -> Compared | None:
        """What q has lost since the start, nats of ELBO of the member that has lost most; None where it is noise."""
        if self.winner is None or (self.starts.streamed and not self.starts.raced):
            return None
        if not self._lost(_GLANCE[self.starts.raced], 2).elbo > 0:
            return None
        lost = self._lost(_LOOKED, 6)
        return lost if lost.elbo > _CERTAIN * lost.error else None

    @torch.no_grad()
    def _lost(self, draws: int, seed: int) -> Compared:
        """By so many draws: of the member for which it is most certain."""
        starts, values = self.starts, []
        here = starts.q.snapshot()
        for place in (self.winner, here):
            assert place is not None
            starts.q.restore(place)
            known = kept_values(starts.q, starts.target, draws, starts.seed + seed, 0.0)
            values.append(known + starts.target.temperature * starts.q.entropy())
        lost = (values[0] - values[1]).reshape(draws, -1)
        mean, error = lost.mean(0), lost.std(0) / math.sqrt(draws)
        worst = (mean / error.clamp_min(torch.finfo(error.dtype).tiny)).nan_to_num(-math.inf).argmax()
        return Compared(float(mean[worst].nan_to_num(-math.inf)), float(error[worst]))

    def turn_back(self) -> tuple[float, bool]:
        """Put q where the start had led, members that are better as they are apart; the ELBO, and whether it is new."""
        again, self.turned = not self.turned and not self.starts.over(), True
        return self.best(), again

    def state_dict(self) -> dict[str, Any]:
        """The places, as tensors."""
        return {
            "origin": None if self.origin is None else tuple(self.origin),
            "winner": None if self.winner is None else tuple(self.winner),
            "loss": self.loss,
            "turned": self.turned,
            "tails": (self.heavy, self.noise2),
            "first_log_sd": self.first_log_sd,
            "finished": None if self.finished is None else [[part.elbo, part.error] for part in self.finished],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        self.origin = None if state["origin"] is None else Coordinates(*state["origin"])
        self.winner = None if state["winner"] is None else Coordinates(*state["winner"])
        self.loss, self.first_log_sd = state["loss"], state["first_log_sd"]
        self.turned = state.get("turned", False)
        self.heavy, self.noise2 = state.get("tails", (False, math.inf))
        done = state["finished"]
        self.finished = None if done is None else (Compared(*done[0]), Compared(*done[1]))
