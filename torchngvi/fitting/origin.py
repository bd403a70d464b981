"""Where a fit has begun, to which it goes back where it ends far above, and what it may not leave.

A q whose ELBO rises without bound, or that spreads without end, is confined by nothing.
"""

import math
from typing import Any

import torch

from torchngvi.fitting.starts import Starts
from torchngvi.interfaces import Coordinates

CONFINED = 15.0  # log of the factor by which a standard deviation may grow
BOUNDED = 1e12  # nats to which the ELBO may rise


class Origin:
    """The place that a fit can go back to.

    Attributes:
        place: where the start has led.
        loss: the negative ELBO there, infinite where it is not known.
        first_log_sd: of q before the fit, or at the mode where it has started, whichever is wider.
    """

    def __init__(self, starts: Starts) -> None:
        self.starts = starts
        self.place: Coordinates | None = None
        self.loss = math.inf
        self.first_log_sd = starts.q.stddev.log()

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

    def state_dict(self) -> dict[str, Any]:
        """The places, as tensors."""
        return {
            "place": None if self.place is None else tuple(self.place),
            "loss": self.loss,
            "first_log_sd": self.first_log_sd,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        self.place = None if state["place"] is None else Coordinates(*state["place"])
        self.loss, self.first_log_sd = state["loss"], state["first_log_sd"]
