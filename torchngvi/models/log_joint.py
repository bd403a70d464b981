"""Any differentiable log joint, given as a function."""

import math
from collections.abc import Callable
from typing import final

from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Target


@final
class LogJoint(Target):
    """log p(data, θ) as a function of θ.

    Args:
        function: θ (S, *batch, D) -> (S, *batch), the log joint of each of S draws; normalising
            constants may be left out, then the loss lacks them too.
        temperature: γ, the weight of the entropy.

    Raises:
        InputError: something that cannot be called; on use, a result of another shape than
            (S, *batch).

    >>> import torch
    >>> LogJoint(lambda theta: -0.5 * theta.square().sum(-1)).log_joint(torch.ones(1, 2)).tolist()
    [-1.0]
    """

    def __init__(self, function: Callable[[Tensor], Tensor], temperature: float = 1.0) -> None:
        if not callable(function):
            raise InputError(f"LogJoint takes a function of theta; got {type(function).__name__}.")
        if not (temperature >= 0 and math.isfinite(temperature)):
            raise InputError(f"temperature is the weight of the entropy, finite and not negative; got {temperature}.")
        self.function = function
        self.temperature = float(temperature)

    def log_joint(self, theta: Tensor) -> Tensor:
        """The user's function, its result checked."""
        value = self.function(theta)
        if not isinstance(value, Tensor):
            raise InputError(f"the log joint must return a tensor; got {type(value).__name__}.")
        if value.is_complex() or value.shape != theta.shape[:-1]:
            raise InputError(
                f"the log joint must map theta of shape {tuple(theta.shape)} to one real value a draw, "
                f"shape {tuple(theta.shape[:-1])}; got {value.dtype} of shape {tuple(value.shape)}. "
                "Sum over data and coordinates, keep the leading dimensions."
            )
        return value

    def tensors(self) -> tuple[Tensor, ...]:
        """Unknown: what a function closes over may change, so that only the step after `evaluate` reuses its work."""
        return ()
