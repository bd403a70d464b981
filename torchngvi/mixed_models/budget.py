"""What a fit of a mixed model may take, shared by all the fits that it is made of."""

import time
from typing import Any

from torchngvi.arguments import read_count, read_number

_LEAST = 1e-3  # seconds that a fit still has when the time is over: one evaluation


class Budget:
    """Evaluations of each fit, and seconds of all fits together.

    >>> sorted(Budget(100, 60.0).left())
    ['max_evaluations', 'max_seconds']
    """

    def __init__(self, max_evaluations: int = 1000, max_seconds: float | None = None) -> None:
        self.evaluations = read_count("max_evaluations", max_evaluations, "counts evaluations")
        seconds = None if max_seconds is None else read_number("max_seconds", max_seconds, "bounds the time", above=0)
        self.end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> dict[str, Any]:
        """What `torchngvi.fit` may still take."""
        seconds = None if self.end is None else max(_LEAST, self.end - time.monotonic())
        return {"max_evaluations": self.evaluations, "max_seconds": seconds}
