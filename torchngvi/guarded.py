"""A log joint that may fail: asked twice, then taken for a NaN, which a trial step survives."""

from typing import final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Posterior, Target


@final
class Guarded(Target):
    """A target whose errors, after a first success, become NaN; the first call raises as it would alone.

    >>> calls = iter([0, 1, 1])
    >>> class Fails(Target):
    ...     temperature = 1.0
    ...     def tensors(self): return ()
    ...     def log_joint(self, theta):
    ...         if next(calls): raise ValueError("no")
    ...         return -theta.square().sum(-1)
    >>> target = Guarded(Fails())
    >>> target.log_joint(torch.ones(1, 2)).item(), target.log_joint(torch.ones(1, 2)).item(), target.failures()
    (-2.0, nan, ' The log joint failed 1 time: ValueError: no.')
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.temperature = target.temperature
        self.comparable = target.comparable
        self.draws_at_once = target.draws_at_once
        self._same = torch.zeros(())
        self._answered = False
        self._count, self._last = 0, ""
        self.gradients = 0  # draws at which a gradient was wanted

    def log_joint(self, theta: Tensor) -> Tensor:
        """The target's, or NaN where it failed twice."""
        self.gradients += len(theta) * (torch.is_grad_enabled() and theta.requires_grad)
        for _ in range(2):
            try:
                value = self.target.log_joint(theta)
            except InputError:
                raise
            except Exception as error:  # whatever the user's function raises
                if not self._answered:
                    error.add_note(
                        f"(The log joint was called with theta of shape {tuple(theta.shape)}, draws first. A function "
                        "of one theta is wrapped as LogJoint.vmapped(f).)"
                    )
                    raise
                self._last = f"{type(error).__name__}: {error}"
            else:
                self._answered = True
                return value
        self._count += 1
        return theta.sum(-1) * torch.nan

    def failures(self) -> str:
        """What went wrong, as a sentence; nothing where nothing did."""
        if not self._count:
            return ""
        return f" The log joint failed {self._count} time{'s' * (self._count > 1)}: {self._last.rstrip('.')}."

    def check(self, q: Posterior) -> None:
        """As the target's."""
        self.target.check(q)

    def tensors(self) -> tuple[Tensor, ...]:
        """Something that stays as it is: during a fit the target does."""
        return (self._same,)
