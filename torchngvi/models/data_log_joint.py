"""A log joint whose data come in batches: more rows than one call should see."""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch
from torch import Tensor

from torchngvi.arguments import read_callable, read_count
from torchngvi.errors import InputError
from torchngvi.interfaces import Additive
from torchngvi.models import checks
from torchngvi.models.log_joint import LogJoint

_CELLS = 2**21  # draws times rows in one call: 16 MB for each of its double tensors, however large the batches are


@final
class DataLogJoint(Additive):
    """A log joint whose data come in batches, log p(θ) + Σ_batches log p(batch | θ).

    Use it where the data do not fit into one call; the gradient is taken batch after batch.  There is one rule of
    scale: ``log_likelihood`` returns the *sum* over the rows of a batch, and a pass sees each of the ``num_data`` rows
    once.  Both are checked at the first pass.

    Args:
        log_likelihood: the sum of the log likelihood over the rows of a batch, θ (S, D) and a batch -> (S,).
        log_prior: the log prior, θ (S, D) -> (S,).
        batches: what is iterated over for a pass, a ``DataLoader`` without ``drop_last`` or a list; a batch
            is a tensor with rows first, or a tuple or dict of such tensors.
        num_data: the number of rows of a pass.
        temperature: the weight γ of the entropy, finite and not negative.

    Raises:
        InputError: if something cannot be called or iterated over again; at the first pass, if the number of rows is
            another, or the likelihood is not a sum over rows or does not depend on θ; on use, if a second derivative is
            asked for.

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
    draws_at_once = 2**62  # a pass costs its reading: all draws see a batch while it is there, some in a call

    def __init__(
        self,
        log_likelihood: Callable[[Tensor, Any], Tensor],
        log_prior: Callable[[Tensor], Tensor],
        batches: Iterable[Any],
        num_data: int,
        temperature: float = 1.0,
    ) -> None:
        for name, function in (("log_likelihood", log_likelihood), ("log_prior", log_prior)):
            read_callable(name, function, "must be a function")
        check_batches(batches, num_data)
        read_callable("log_likelihood", log_likelihood, arguments="theta, batch")
        self.log_likelihood, self.batches, self.num_data = log_likelihood, batches, num_data
        self.prior = LogJoint(log_prior, temperature)
        self.temperature = checks.temperature(temperature)
        self._checked = False

    def data_log_likelihood(self, theta: Tensor) -> Tensor:
        """Return the sum over a pass; where a gradient is wanted it is taken batch after batch, once differentiable."""
        return over_a_pass(self, theta)

    def slabs(self, theta: Tensor, batch: Any) -> tuple[Tensor, ...]:
        """Split the draws so that draws times rows in one call of ``log_likelihood`` are bounded.

        Args:
            theta: the points, (S, D) or (D,).
            batch: one batch of the data.

        Returns:
            Parts of theta, in its order; theta alone where it has no draws.
        """
        return slabs(theta, rows_of(batch))

    def pieces(self) -> Iterator["DataLogJoint"]:
        """Yield one target for each batch, with the whole prior."""
        for batch in self.one_pass():
            piece = copy.copy(self)
            piece.batches, piece.num_data = [batch], rows_of(batch)
            yield piece

    def one_pass(self) -> Iterator[Any]:
        """Iterate over the batches once, and count their rows.

        Yields:
            The batches as they are.

        Raises:
            InputError: if the number of rows is another than ``num_data``.
        """
        return counted(self.batches, self.num_data)

    def batch_log_likelihood(self, theta: Tensor, batch: Any) -> Tensor:
        """The log likelihood of one batch; at the first batch of two rows or more it has to be the sum of its halves.

        Args:
            theta: the points, (S, D).
            batch: one batch of the data.

        Returns:
            log p(batch | θ), (S,).

        Raises:
            InputError: if the result is not one value a draw, or no sum over rows.
        """
        if not self._checked and rows_of(batch) > 1:
            self._check_sum(theta.detach()[:1] if theta.ndim > 1 else theta.detach(), batch)
            self._checked = True
        return self._call(theta, batch)

    def _call(self, theta: Tensor, batch: Any) -> Tensor:
        return LogJoint(lambda theta: self.log_likelihood(theta, batch)).log_joint(theta)

    def _check_sum(self, theta: Tensor, batch: Any) -> None:
        if found := sums_that_differ(self._call, theta, batch):
            raise InputError(
                f"log_likelihood must return the sum over the rows of a batch; a batch gives {found[0]:.6g}, its two "
                f"halves together {found[1]:.6g}. Sum, do not average, and leave the prior to log_prior."
            )

    def minibatch(self, batch: Any) -> LogJoint:
        """The log joint with one batch in the place of all data, log p(θ) + (num_data/rows) log p(batch | θ).

        Its gradients are unbiased estimates; its values are not compared, so that steps found by trial are refused.

        Args:
            batch: one batch of the data, which stands for all.

        Returns:
            The log joint.

        >>> target = DataLogJoint(lambda t, x: -(x - t).square().sum(-1), lambda t: 0 * t.sum(-1), [torch.ones(2)], 2)
        >>> target.minibatch(torch.ones(1)).log_joint(torch.zeros(1, 1)).item()
        -2.0
        """
        share = self.num_data / rows_of(batch)
        part = LogJoint(
            lambda theta: self.prior.log_joint(theta) + share * self.batch_log_likelihood(theta, batch),
            self.temperature,
        )
        part.comparable = False
        return part

    def tensors(self) -> tuple[Tensor, ...]:
        """Return no tensors: those that the functions depend on are unknown."""
        return ()


class Pass(torch.autograd.Function):
    """The sum over a pass with its gradient, so that no more than one batch is in memory."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, target: Any) -> Tensor:
        """Sum values and gradients of the batches of a target that has one_pass and batch_log_likelihood."""
        value, gradient, reached = theta.new_zeros(theta.shape[:-1]), torch.zeros_like(theta), False
        for batch in target.one_pass():
            done = 0
            for some in target.slabs(theta.detach(), batch):
                rows = slice(done, done + len(some)) if some.ndim > 1 else ...
                done += len(some)
                with torch.enable_grad():
                    copy = some.detach().requires_grad_()
                    part = target.batch_log_likelihood(copy, batch)
                    slope = torch.autograd.grad(part.sum(), copy, allow_unused=True)[0] if part.requires_grad else None
                value[rows] += part.detach()
                if slope is not None:
                    gradient[rows] += slope
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
        """Weigh the gradients; they are not differentiated again."""
        if torch.is_grad_enabled():  # create_graph: the gradient would be taken for a constant, without an error
            raise InputError(
                "the gradient of a log joint in batches is not differentiated again. Use an estimator that takes "
                "gradients alone, such as Stein()."
            )
        (gradient,) = ctx.saved_tensors
        return weight[..., None] * gradient, None


def slabs(theta: Tensor, rows: int) -> tuple[Tensor, ...]:
    """Split draws so that draws times rows in one call are bounded, whatever the batches.

    >>> [len(part) for part in slabs(torch.zeros(50, 3), 100_000)], len(slabs(torch.zeros(50, 3), 1_000))
    ([20, 20, 10], 1)
    """
    return theta.split(max(1, _CELLS // max(1, rows))) if theta.ndim > 1 else (theta,)


def over_a_pass(target: Any, theta: Tensor) -> Tensor:
    """Sum the log likelihood over a pass; where a gradient is wanted it is taken slab by slab, once differentiable."""
    if torch.is_grad_enabled() and theta.requires_grad:
        total: Tensor = Pass.apply(theta, target)
        return total
    value = theta.new_zeros(())
    for batch in target.one_pass():
        parts = [target.batch_log_likelihood(some, batch) for some in target.slabs(theta, batch)]
        value = value + (parts[0] if len(parts) == 1 else torch.cat(parts))
    return value


def check_batches(batches: Any, num_data: int) -> None:
    """Check that there are batches for one pass after another, and rows in them."""
    if not isinstance(batches, Iterable) or isinstance(batches, Iterator | str | bytes | Tensor | type):
        raise InputError(
            "batches must be iterable for one pass after another, a DataLoader or a list; got "
            f"{type(batches).__name__}."
        )
    read_count("num_data", num_data, "counts the rows of a pass")


def counted(batches: Iterable[Any], num_data: int) -> Iterator[Any]:
    """Iterate over the batches once, and count their rows."""
    rows = 0
    for batch in batches:
        rows += rows_of(batch)
        yield batch
    if rows != num_data:
        raise InputError(
            f"a pass over the batches has {rows} rows where num_data is {num_data}: give the number of rows, "
            "and a DataLoader without drop_last."
        )


def rows_of(batch: Any) -> int:
    """The number of rows of a batch."""
    parts = [batch]
    if isinstance(batch, dict | list | tuple):
        parts = [part for part in (batch.values() if isinstance(batch, dict) else batch) if part is not None]
    sizes = {len(part) if isinstance(part, Tensor) and part.ndim else 0 for part in parts}
    if len(sizes) != 1 or 0 in sizes:
        got = (str(tuple(part.shape)) if isinstance(part, Tensor) else type(part).__name__ for part in parts)
        raise InputError(
            "a batch must be a tensor with rows first, or a tuple, list or dict of tensors with the same rows, at "
            f"least one; got {', '.join(got) or 'nothing'}."
        )
    return sizes.pop()


def some_of(batch: Any, rows: slice) -> Any:
    """Some rows of a batch."""
    if isinstance(batch, Tensor):
        return batch[rows]
    if isinstance(batch, dict):
        return {name: None if part is None else part[rows] for name, part in batch.items()}
    parts = [None if part is None else part[rows] for part in batch]
    return batch._make(parts) if isinstance(batch, tuple) and hasattr(batch, "_make") else type(batch)(parts)


@torch.no_grad()
def sums_that_differ(
    log_likelihood: Callable[[Tensor, Any], Tensor], theta: Tensor, batch: Any, share: float = 1e-4
) -> tuple[float, float] | None:
    """The log likelihoods of a batch and of its halves together, where they differ by a share; else None."""
    size = rows_of(batch)
    halves = [some_of(batch, slice(0, size // 2)), some_of(batch, slice(size // 2, size))]
    whole = log_likelihood(theta, batch)
    parts: Any = sum(log_likelihood(theta, half) for half in halves)
    differ = bool((whole - parts).abs().max() > share * whole.abs().clamp_min(1.0).max())
    return (float(whole.sum()), float(parts.sum())) if differ else None
