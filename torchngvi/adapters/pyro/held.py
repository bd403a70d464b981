"""The parameters of a model, which a fit to its log joint holds fixed."""

from dataclasses import replace
from typing import Any

from pyro.poutine.messenger import Messenger
from torch import Tensor

from torchngvi.adapters.pyro.starting import listed
from torchngvi.fitting.records import FitResult


class Held(Messenger):
    """Takes down the parameters that a model reads and that an optimizer could move.

    >>> import pyro
    >>> with Held() as held:
    ...     _ = pyro.param("s", Tensor([1.0]))
    >>> list(held.found)
    ['s']
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, None] = {}  # in the order of the model

    def _pyro_post_param(self, message: Any) -> None:
        """The unconstrained parameter tells, as what is made of it without gradients requires none."""
        name, value = message["name"], message["value"]
        unconstrained = value.unconstrained() if hasattr(value, "unconstrained") else value
        if isinstance(unconstrained, Tensor) and unconstrained.requires_grad:
            self.found[name] = None

    def told(self, result: FitResult) -> FitResult:
        """The result of a fit, whose reason names the parameters that were held fixed, if there are any."""
        if not self.found:
            return result
        several = len(self.found) > 1
        clause = (
            f"the parameter{'s' if several else ''} {listed(self.found)} of the model {'were' if several else 'was'} "
            f"held fixed, and torchngvi.adapters.pyro.NaturalSVI learns {'them' if several else 'it'}"
        )
        return replace(result, reason=f"{result.reason.rstrip('.')}; {clause}.")
