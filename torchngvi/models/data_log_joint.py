"""A log joint whose data come in batches: more rows than one call should see."""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Additive
from torchngvi.models import checks
from torchngvi.models.log_joint import LogJoint

_SAME = 1e-4  # relative error at which two sums of the same rows differ


@final
class DataLogJoint(Additive):
    """log p(θ) + Σ_batches log p(batch | θ), summed over one pass, its gradient batch after batch.

    One rule of scale: ``log_likelihood`` returns the *sum* over the rows of a batch, and a pass sees each
    of the ``num_data`` rows once.  Both are checked at the first pass.

    Args:
        log_likelihood: θ (S, D) and a batch -> (S,), the sum over the rows of the batch.
        log_prior: θ (S, D) -> (S,).
        batches: what is iterated over for a pass, a ``DataLoader`` without ``drop_last`` or a list; a batch
            is a tensor with rows first, or a tuple or dict of such tensors.
        num_data: rows of a pass.
        temperature: γ, the weight of the entropy.

    Raises:
        InputError: something that cannot be called or iterated over again; at the first pass another number
            of rows, a likelihood that is not a sum over rows, or one that does not depend on θ; on use, a second
            derivative.

    >>> X = torch.arange(6.0)
    >>> target = DataLogJoint(
    ...     lambda theta, x: -0.5 * (x - theta).square().sum(-1),
    ...     lambda theta: -0.5 * theta.square().sum(-1),
    ...     torch.utils.data.DataLoader(X, batch_size=4),
    ...     num_data=6,
    ... )
    >>> target.log_joint(torch.zeros(1, 1)).item()
    -27.5
    """

    prior: LogJoint
    in_passes = True
    draws_at_once = 2**62  # a pass costs its reading: all draws see a batch while it is there

    def __init__(
        self,
        log_likelihood: Callable[[Tensor, Any], Tensor],
        log_prior: Callable[[Tensor], Tensor],
        batches: Iterable[Any],
        num_data: int,
        temperature: float = 1.0,
    ) -> None:
        for name, function in (("log_likelihood", log_likelihood), ("log_prior", log_prior)):
            if not callable(function):
                raise InputError(f"{name} must be a function; got {type(function).__name__}.")
        if not isinstance(batches, Iterable) or isinstance(batches, Iterator):
            raise InputError(
                "batches must be iterable for one pass after another, a DataLoader or a list; got "
                f"{type(batches).__name__}."
            )
        if num_data < 1:
            raise InputError(f"num_data counts the rows of a pass, at least 1; got {num_data}.")
        self.log_likelihood, self.batches, self.num_data = log_likelihood, batches, num_data
        self.prior = LogJoint(log_prior, temperature)
        self.temperature = checks.temperature(temperature)
        self._checked = False

    def data_log_likelihood(self, theta: Tensor) -> Tensor:
        """The sum over a pass; where a gradient is wanted it is taken batch after batch, once differentiable."""
        if torch.is_grad_enabled() and theta.requires_grad:
            total: Tensor = _Pass.apply(theta, self)
            return total
        return sum((self.batch_log_likelihood(theta, batch) for batch in self.one_pass()), theta.new_zeros(()))

    def pieces(self) -> Iterator["DataLogJoint"]:
        """One target a batch, with the whole prior."""
        for batch in self.one_pass():
            piece = copy.copy(self)
            piece.batches, piece.num_data = [batch], _rows(batch)
            yield piece

    def one_pass(self) -> Iterator[Any]:
        """The batches, their rows counted.

        Raises:
            InputError: another number of rows than ``num_data``.
        """
        rows = 0
        for batch in self.batches:
            rows += _rows(batch)
            yield batch
        if rows != self.num_data:
            raise InputError(
                f"a pass over the batches has {rows} rows where num_data is {self.num_data}: give the number of rows, "
                "and a DataLoader without drop_last."
            )

    def batch_log_likelihood(self, theta: Tensor, batch: Any) -> Tensor:
        """log p(batch | θ); at the first batch of two rows or more it has to be the sum of its halves.

        Raises:
            InputError: a result that is not one value a draw, or no sum over rows.
        """
        if not self._checked and _rows(batch) > 1:
            self._check_sum(theta.detach()[:1] if theta.ndim > 1 else theta.detach(), batch)
            self._checked = True
        return self._call(theta, batch)

    def _call(self, theta: Tensor, batch: Any) -> Tensor:
        return LogJoint(lambda theta: self.log_likelihood(theta, batch)).log_joint(theta)

    @torch.no_grad()
    def _check_sum(self, theta: Tensor, batch: Any) -> None:
        size = _rows(batch)
        halves = [_some(batch, slice(0, size // 2)), _some(batch, slice(size // 2, size))]
        whole, parts = self._call(theta, batch), sum(self._call(theta, half) for half in halves)
        if bool((whole - parts).abs().max() > _SAME * whole.abs().clamp_min(1.0).max()):
            raise InputError(
                f"log_likelihood must return the sum over the rows of a batch; a batch gives {float(whole.sum()):.6g}, "
                f"its two halves together {float(torch.as_tensor(parts).sum()):.6g}. Sum, do not average, and leave "
                "the prior to log_prior."
            )

    def minibatch(self, batch: Any) -> LogJoint:
        """log p(θ) + (num_data/rows) log p(batch | θ): its gradients are unbiased, its values are not compared.

        >>> target = DataLogJoint(lambda t, x: -(x - t).square().sum(-1), lambda t: 0 * t.sum(-1), [torch.ones(2)], 2)
        >>> target.minibatch(torch.ones(1)).log_joint(torch.zeros(1, 1)).item()
        -2.0
        """
        share = self.num_data / _rows(batch)
        part = LogJoint(
            lambda theta: self.prior.log_joint(theta) + share * self.batch_log_likelihood(theta, batch),
            self.temperature,
        )
        part.comparable = False
        return part

    def tensors(self) -> tuple[Tensor, ...]:
        """Unknown, as of any function."""
        return ()


class _Pass(torch.autograd.Function):
    """The sum over a pass with its gradient, so that no more than one batch is in memory."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, target: DataLogJoint) -> Tensor:
        value, gradient, reached = theta.new_zeros(theta.shape[:-1]), torch.zeros_like(theta), False
        for batch in target.one_pass():
            with torch.enable_grad():
                copy = theta.detach().requires_grad_()
                part = target.batch_log_likelihood(copy, batch)
                slope = torch.autograd.grad(part.sum(), copy, allow_unused=True)[0] if part.requires_grad else None
            value += part.detach()
            if slope is not None:
                gradient += slope
                reached = True
        if not reached:
            raise InputError(
                "log_likelihood does not depend on theta in any batch. Compute it from the theta it is given, by torch "
                "operations without detach(), item() or NumPy."
            )
        ctx.save_for_backward(gradient)
        return value

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():  # create_graph: the gradient would be taken for a constant, without an error
            raise InputError(
                "the gradient of a log joint in batches is not differentiated again. Use an estimator that takes "
                "gradients alone, such as Stein()."
            )
        (gradient,) = ctx.saved_tensors
        return weight[..., None] * gradient, None


def _rows(batch: Any) -> int:
    """The number of rows of a batch.

    Raises:
        InputError: no tensors, or not of the same number of rows, at least one.
    """
    parts = [batch]
    if isinstance(batch, dict | list | tuple):
        parts = list(batch.values() if isinstance(batch, dict) else batch)
    sizes = {len(part) if isinstance(part, Tensor) and part.ndim else 0 for part in parts}
    if len(sizes) != 1 or 0 in sizes:
        got = (str(tuple(part.shape)) if isinstance(part, Tensor) else type(part).__name__ for part in parts)
        raise InputError(
            "a batch must be a tensor with rows first, or a tuple, list or dict of tensors with the same rows, at "
            f"least one; got {', '.join(got) or 'nothing'}."
        )
    return sizes.pop()


def _some(batch: Any, rows: slice) -> Any:
    """Some rows of a batch."""
    if isinstance(batch, Tensor):
        return batch[rows]
    if isinstance(batch, dict):
        return {name: part[rows] for name, part in batch.items()}
    parts = [part[rows] for part in batch]
    return batch._make(parts) if isinstance(batch, tuple) and hasattr(batch, "_make") else type(batch)(parts)
