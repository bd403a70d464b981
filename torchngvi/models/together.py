"""Values of a log joint to which several processes contribute, with their gradients in one all-reduce."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchngvi.distributed import Processes
from torchngvi.errors import InputError
from torchngvi.interfaces import Target


class Together(Target):
    """The abstract base of a log joint, or of that of the data, to which every rank contributes a part."""

    processes: Processes
    _refused: Exception | None = None  # by a check on this rank, told to the others at the next sum

    @abstractmethod
    def mine(self, theta: Tensor) -> Tensor:
        """Compute what this rank contributes at θ, (*sample, *batch), differentiable in θ."""

    def value(self, theta: Tensor) -> Tensor:
        """Sum what the ranks contribute, differentiable where gradients are recorded."""
        if torch.is_grad_enabled() and theta.requires_grad:
            total: Tensor = _Summed.apply(theta, self)
            return total
        return self.summed(lambda: [self.mine(theta)], theta)[0]

    def summed(self, parts: Callable[[], list[Tensor]], *key: Tensor) -> list[Tensor]:
        """Sum over the ranks what a call gives on each; an error of it is raised on all of them.

        Args:
            parts: gives the tensors of this rank.
            key: what has to be the same on all ranks.

        Returns:
            The sums.
        """
        error, self._refused = self._refused, None
        return self.processes.summed(parts, key, error)

    def checked(self, check: Callable[[], None]) -> None:
        """Check on this rank: what is refused is told to the others at the next sum, so that no one waits."""
        try:
            check()
        except Exception as error:
            if self.processes.world == 1:
                raise
            self._refused = error


class _Summed(torch.autograd.Function):
    """The sum over ranks, with its gradient in the same all-reduce."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, target: Together) -> Tensor:
        def parts() -> list[Tensor]:
            with torch.enable_grad():
                copy = theta.detach().requires_grad_()
                value = target.mine(copy)
                slope = None
                if value.requires_grad:
                    (slope,) = torch.autograd.grad(value.sum(), copy, allow_unused=True)
            reached = value.new_full((1,), float(slope is not None))
            return [value.detach(), torch.zeros_like(copy) if slope is None else slope, reached]

        value, gradient, reached = target.summed(parts, theta)
        if not bool(reached > 0):
            raise InputError(
                "the log joint does not depend on theta on any rank. Compute it from the theta it is given, by torch "
                "operations without detach(), item() or NumPy."
            )
        ctx.target = target
        ctx.save_for_backward(theta, gradient)
        return value

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor, None]:
        theta, gradient = ctx.saved_tensors
        if torch.is_grad_enabled():  # it is differentiated again: by a graph, with a sum in every pass
            value = _Total.apply(ctx.target.mine(_Spread.apply(theta, ctx.target)), ctx.target)
            return torch.autograd.grad(value, theta, weight, create_graph=True)[0], None
        return weight[..., None] * gradient, None


class _Total(torch.autograd.Function):
    """Summed over ranks forwards, handed through backwards; an error on one rank in a backward pass is not told."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, target: Together) -> Tensor:
        ctx.target = target
        return target.processes.total([part])[0].clone()

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor, None]:
        return _Spread.apply(weight, ctx.target), None


class _Spread(torch.autograd.Function):
    """Handed through forwards, summed over ranks backwards."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, target: Together) -> Tensor:
        ctx.target = target
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor, None]:
        return _Total.apply(weight, ctx.target), None
