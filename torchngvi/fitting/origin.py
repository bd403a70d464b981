"""Where a fit has begun, to which it goes back where draws have led to a worse place, and what it may not leave.

Averages over few draws may lead q away from a good start, to where larger ones see that it is worse than it was.  A q
whose ELBO rises without bound, or that spreads without end, is confined by nothing.
"""

import math
from typing import Any

import torch

from torchngvi.fitting.fresh import Compared, kept_values, put_at_best
from torchngvi.fitting.starts import Starts
from torchngvi.interfaces import Coordinates

CONFINED = 15.0  # log of the factor by which a standard deviation may grow
BOUNDED = 1e12  # nats to which the ELBO may rise
_COMPARED = 4096  # draws by which two places are compared
_GLANCE, _LOOKED = 32, 1024  # by which what was lost since the start is looked for
_CERTAIN = 3.0  # standard errors


class Origin:
    """The place that a fit can go back to.

    Attributes:
        place: where the start has led.
        loss: the negative ELBO there, infinite where it is not known.
        first_log_sd: of q before the fit, or at the mode where it has started, whichever is wider.
        turned: draws had led to a worse place than the start, and were begun again there.
    """

    def __init__(self, starts: Starts) -> None:
        self.starts = starts
        self.place: Coordinates | None = None
        self.loss = math.inf
        self.first_log_sd = starts.q.stddev.log()
        self.turned = False

    def begun(self) -> None:
        """Remember q where the first start has led."""
        self.place, self.loss = self.starts.q.snapshot(), self.starts.reached
        self.first_log_sd = torch.maximum(self.starts.q.stddev.log(), self.first_log_sd)

    def wider(self) -> float:
        """Log of the factor by which a standard deviation has grown."""
        return float((self.starts.q.stddev.log() - self.first_log_sd).max())

    def unconfined(self, loss: float) -> bool:
        """Whether nothing confines q, so that no other start is of use."""
        return self.wider() > CONFINED or loss < -BOUNDED

    def better_than(self, loss: float) -> bool:
        """Whether a negative ELBO is far above where the fit has started, or not finite."""
        return self.place is not None and not loss <= self.loss + self.starts.allowance

    def go_back(self) -> float:
        """Put q where the start has led; the loss there."""
        assert self.place is not None
        self.starts.q.restore(self.place)
        return self.loss

    def regret(self) -> Compared | None:
        """What q has lost since the start, nats of ELBO of the member that has lost most; None where it is noise."""
        if self.place is None or self.starts.streamed or not self._lost(_GLANCE, 2).elbo > 0:
            return None
        lost = self._lost(_LOOKED, 6)
        return lost if lost.elbo > _CERTAIN * lost.error else None

    @torch.no_grad()
    def _lost(self, draws: int, seed: int) -> Compared:
        """By so many draws: of the member for which it is most certain."""
        starts, values = self.starts, []
        here = starts.q.snapshot()
        for place in (self.place, here):
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
        starts = self.starts
        places = [starts.q.snapshot()] + ([] if self.place is None else [self.place])
        return put_at_best(starts.q, starts.target, places, _COMPARED, starts.seed + 5).elbo, again

    def state_dict(self) -> dict[str, Any]:
        """The places, as tensors."""
        return {
            "place": None if self.place is None else tuple(self.place),
            "loss": self.loss,
            "turned": self.turned,
            "first_log_sd": self.first_log_sd,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        self.place = None if state["place"] is None else Coordinates(*state["place"])
        self.loss, self.turned, self.first_log_sd = state["loss"], state["turned"], state["first_log_sd"]
