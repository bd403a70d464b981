"""Models of more rows than memory holds: log joints of batches, and exact expectations from one after another.

The data of a generalised linear model add up, E_q[ℓ] = Σ_b E_q[-log p(batch_b | θ)] - γ E_q[log prior], and so do the
gradients and curvatures.  A pass over the batches gives what one model of all rows would give, to rounding, with one
batch and a few D x D matrices in memory.

Expectations of parts of the data in a form that adds up: over the batches of a file, and over processes.

A list of tensors: the value (*batch,), the derivative, and where the frame is differentiated the gradient of the value
in it.  The derivative is (g, H) for a dense q; for any other pattern it is (a, W) in the frame of q, so that nothing is
larger than q.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch import Tensor

from torchngvi.arguments import read_callable, read_count, shown
from torchngvi.errors import InputError
from torchngvi.interfaces import Additive, AdditiveTractable, Frame, Framed, Posterior, Raw
from torchngvi.models import checks
from torchngvi.models.generalized_linear import GeneralizedLinear
from torchngvi.models.likelihoods import Likelihood
from torchngvi.models.log_joint import LogJoint
from torchngvi.numerics.arrays import writable
from torchngvi.numerics.linalg import lower_entries, symmetric_matrix
from torchngvi.structures import Dense

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
            one = theta.detach()[:1] if theta.ndim > 1 else theta.detach()
            if found := sums_that_differ(self._call, one, batch):
                raise InputError(
                    f"log_likelihood must return the sum over the rows of a batch; a batch gives {found[0]:.6g}, its "
                    f"two halves together {found[1]:.6g}. Sum, do not average, and leave the prior to log_prior."
                )
            self._checked = True
        return self._call(theta, batch)

    def _call(self, theta: Tensor, batch: Any) -> Tensor:
        return LogJoint(lambda theta: self.log_likelihood(theta, batch)).log_joint(theta)

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
    """Split draws so that draws times rows in one call are bounded, whatever the batches."""
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


# ------------------------------------------------------------------------------------ streamed models


def in_frame(model: AdditiveTractable, frame: Frame) -> bool:
    """Say whether the derivatives of a model's data are summed in the frame of q."""
    return model.prior_alone and not isinstance(frame.structure, Dense)


def differentiated(frame: Frame) -> bool:
    """Say whether a value at this frame is to be differentiable in it."""
    return torch.is_grad_enabled() and (frame.mean.requires_grad or frame.root.requires_grad)


def summands(model: AdditiveTractable, frame: Frame, framed: bool) -> list[Tensor]:
    """Evaluate the expectation of a model's data as tensors that add up."""
    if not differentiated(frame):
        value, derivative = model.data_energy(frame)
        return [value, *(derivative.framed(frame) if framed else derivative.raw())]
    mean, root = (part.detach().requires_grad_() for part in (frame.mean, frame.root))
    inner = Frame(mean, root, frame.structure, frame.upper)
    value, derivative = model.data_energy(inner)
    slopes = torch.autograd.grad(value.sum(), (mean, root), retain_graph=True, materialize_grads=True)
    packet = derivative.framed(inner) if framed else derivative.raw()
    return [part.detach() for part in (value, *packet, *slopes)]


def nothing(frame: Frame, framed: bool) -> list[Tensor]:
    """Make the summands of no rows: zeros."""
    mean, dim = frame.mean.detach(), frame.mean.shape[-1]
    matrix = torch.zeros_like(frame.root) if framed else mean.new_zeros(*mean.shape, dim)
    zeros = [mean.new_zeros(mean.shape[:-1]), torch.zeros_like(mean), matrix.detach()]
    return [*zeros, torch.zeros_like(mean), torch.zeros_like(frame.root)] if differentiated(frame) else zeros


def halved(parts: list[Tensor], framed: bool) -> list[Tensor]:
    """Leave out the upper half of the Hessian, which is symmetric."""
    return parts if framed else [*parts[:2], lower_entries(parts[2]), *parts[3:]]


def whole(parts: list[Tensor], framed: bool) -> list[Tensor]:
    """Undo `halved`: symmetric to the last bit."""
    return parts if framed else [*parts[:2], symmetric_matrix(parts[2], parts[1].shape[-1]), *parts[3:]]


def assembled(frame: Frame, parts: list[Tensor], framed: bool) -> tuple[Tensor, Raw | Framed]:
    """Make the value and its derivative of what was summed."""
    value, first, second, *slopes = parts
    if slopes:
        value = _Known.apply(value, slopes[0], slopes[1], frame.mean, frame.root)
    return value, Framed(first, second) if framed else Raw(first, second)


def with_prior(model: AdditiveTractable, frame: Frame, value: Tensor, derivative: Framed) -> tuple[Tensor, Framed]:
    """Add a Gaussian prior to an expectation of data that is summed in the frame of q."""
    prior = model.prior.scaled(model.temperature)
    a, W = derivative.a + frame.pull(prior.force(frame.mean)), derivative.W + prior.framed(frame)
    return value + model.temperature * model.prior.expected_energy(frame), Framed(a, W)


class _Known(torch.autograd.Function):
    """A value whose gradient in mean and root is known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, slope: Tensor, turn: Tensor, mean: Tensor, root: Tensor) -> Tensor:
        ctx.save_for_backward(slope, turn)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[None, None, None, Tensor, Tensor]:
        if torch.is_grad_enabled():  # the sum would be taken for a constant
            raise InputError(
                "the gradient of an expectation that is summed over batches or processes is not differentiated again. "
                "Use Quadrature(), whose curvature is summed too."
            )
        slope, turn = ctx.saved_tensors
        return None, None, None, *(weight[(...,) + (None,) * (x.ndim - weight.ndim)] * x for x in (slope, turn))


_PARTS = 8  # batches from which the rows of a start are taken, where any of them can be read


@dataclass(frozen=True)
class _Linear:
    """What makes a generalised linear model of a batch; a class of the module, so that models can be pickled."""

    family: str | Likelihood
    dtype: torch.dtype
    device: torch.device | str | None
    options: dict[str, Any]

    def __call__(self, X: Any, y: Any, weights: Any = None, offset: Any = None) -> Any:
        X = torch.as_tensor(writable(X)).to(device=self.device, dtype=self.dtype)
        return GeneralizedLinear(X, y, self.family, weights=weights, offset=offset, **self.options)


@final
class Streamed(AdditiveTractable):
    """A model whose rows are read in batches at every evaluation, with exact expectations: rows in files, out of core.

    Use it for more rows than memory holds; `DataLogJoint` is its counterpart for a log joint without closed
    forms, and takes a thousand draws a pass in the place of exact expectations.  ``fit`` begins on a part of the rows
    and then makes exact passes, of which a regression takes about ten.  Each batch is converted as it comes, and what
    the data in the files are is taken not to change during a fit.

    Args:
        batches: what is iterated over for a pass: a list, a ``DataLoader`` without ``drop_last``, or a reader such as
            `torchngvi.adapters.files.Npy`; a batch is a tuple or a dict of tensors with rows first.
        num_data: the number of rows of a pass, which every pass checks.
        model: makes a model of a batch, with the whole prior: it is called with the parts of a tuple, or with those of
            a dict by name.  Name the classes of labels, ``classes=(0, 1)``: a batch need not hold all of them.

    A model is pickled with its batches: a reader of `torchngvi.adapters.files` by the names of its files, a list with
    its rows.  Of ``model`` pickle takes functions of a module; `Streamed.linear` has one.

    Raises:
        InputError: batches that cannot be iterated over again; on use, another number of rows, a batch that is no
            tuple or dict of tensors, batches of other classes.

    >>> X, y = torch.eye(2).double(), torch.tensor([1.0, 0.0]).double()
    >>> rows = [(X[:1], y[:1]), (X[1:], y[1:])]
    >>> model = Streamed(rows, 2, lambda X, y: GeneralizedLinear(X, y, classes=(0, 1)))
    >>> from torchngvi import CholeskyGaussian
    >>> q = CholeskyGaussian(2, dtype=torch.float64)
    >>> bool((model.negative_elbo(q) - GeneralizedLinear(X, y).negative_elbo(q)).abs() < 1e-12)
    True
    """

    in_passes = True
    draws_at_once = 2**62  # a pass costs its reading: all draws see a batch while it is there

    def __init__(self, batches: Iterable[Any], num_data: int, model: Callable[..., AdditiveTractable]) -> None:
        check_batches(batches, num_data)
        if not callable(model) or (isinstance(model, type) and not issubclass(model, AdditiveTractable)):
            raise InputError(f"model is a function of a batch that makes a GeneralizedLinear; got {shown(model)}.")
        self.batches, self.num_data, self.model = batches, num_data, model
        first = next(iter(batches), None)
        if first is None:
            raise InputError("there are no batches. Check the files, and the number of rows of a batch.")
        self.first = self._made(first)
        self.prior_alone = self.first.prior_alone
        self.prior, self.temperature, self.coding = self.first.prior, self.first.temperature, self.first.coding

    @classmethod
    def linear(
        cls,
        batches: Iterable[Any],
        num_data: int,
        family: str | Likelihood = "bernoulli_logit",
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> Self:
        """Make a generalised linear model of batches (X, y), (X, y, weights) or (X, y, weights, offset).

        Args:
            batches: as for the class; a weight or offset that there is none of is left out, or None.
            num_data: the number of rows of a pass.
            family: the likelihood, as for `GeneralizedLinear`.
            dtype: to which each batch is converted, that of q.
            device: to which each batch is moved, that of q; by default where it is.
            options: the other arguments of `GeneralizedLinear`, such as ``classes=(0, 1)`` and ``prior_precision``.

        Returns:
            The model.

        Raises:
            InputError: as the class, and as `GeneralizedLinear`.

        >>> batch = (torch.eye(2), torch.tensor([1.0, 0.0]))
        >>> Streamed.linear([batch], 2, classes=(0, 1), prior_precision=2.0).dim
        2
        """
        return cls(batches, num_data, _Linear(family, dtype, device, options))

    @property
    def dim(self) -> int | None:
        """The number D of coefficients, where the model of a batch says it."""
        return getattr(self.first, "dim", None)

    @property
    def likelihood(self) -> Any:
        """The likelihood, where the model of a batch has one."""
        return getattr(self.first, "likelihood", None)

    def _made(self, batch: Any) -> AdditiveTractable:
        """The model of a batch."""
        named = batch if isinstance(batch, dict) else {}
        parts = tuple(batch) if isinstance(batch, list | tuple) else () if isinstance(batch, dict) else (batch,)
        try:
            inspect.signature(self.model).bind(*parts, **named)
        except TypeError as error:
            raise InputError(
                f"a batch is what model= is called with, such as (X, y) or {{'X': X, 'y': y}}; got {shown(batch)}, for "
                f"which {error}."
            ) from error
        except ValueError:  # of some built-in functions the signature is not known
            pass
        model = self.model(*parts, **named)
        if not isinstance(model, AdditiveTractable):
            raise InputError(
                "Streamed takes models that know the expectations of their data, such as GeneralizedLinear; got "
                f"{type(model).__name__}. For a log joint use DataLogJoint."
            )
        return model

    def one_pass(self) -> Iterator[AdditiveTractable]:
        """Iterate over the batches once, and count their rows.

        Yields:
            A model of each batch, with the whole prior.

        Raises:
            InputError: if the number of rows is another than ``num_data``, or the classes of a batch are others.
        """
        for batch in counted(self.batches, self.num_data):
            model = self._made(batch)
            if model.coding != self.coding:
                raise InputError(
                    f"a batch has the classes {model.coding}, and the first one {self.coding}: each was coded by the "
                    "labels that it happens to hold. Name all classes in the model of a batch: classes=(0, 1)."
                )
            if model.prior is not self.prior and not _alike(model.prior, self.prior):
                raise InputError(
                    "the model of a batch has another prior than that of the first one: each has the whole prior, "
                    "which counts once and does not depend on the rows of a batch."
                )
            yield model

    def pieces(self) -> Iterator[AdditiveTractable]:
        """Yield a model of each batch, with the whole prior."""
        return self.one_pass()

    def beginning(self, rows: int) -> "Streamed":
        """Take a part of the rows into memory, from all over a pass where batches can be read in any order.

        Args:
            rows: about how many.

        Returns:
            The model of these rows, with the whole prior.
        """
        kept: list[Any] = []
        if isinstance(self.batches, Sequence) and len(self.batches) > _PARTS:
            places = [number * (len(self.batches) - 1) // (_PARTS - 1) for number in range(_PARTS)]
            kept = [some_of(self.batches[place], slice(0, -(-rows // _PARTS))) for place in places]
        else:
            for batch in self.batches:
                kept.append(some_of(batch, slice(0, rows - sum(map(rows_of, kept)))))
                if sum(map(rows_of, kept)) >= rows:
                    break
        return Streamed(kept, sum(map(rows_of, kept)), self.model)

    def check(self, q: Posterior) -> None:
        """Check q as the model of the first batch does."""
        self.first.check(q)

    def data_energy(self, frame: Frame) -> tuple[Tensor, Any]:
        """Sum the expectation of the data over a pass, with its derivative; values add up in float64."""
        framed = in_frame(self, frame)
        total: list[Tensor] = []
        for model in self.one_pass():
            parts = summands(model, frame, framed)
            if total:
                total[0] += parts[0]
                for sum_, part in zip(total[1:], parts[1:], strict=True):
                    sum_ += part
            else:
                total = [parts[0].double(), *(part.clone() for part in parts[1:])]
        total[0] = total[0].to(frame.mean.dtype)
        return assembled(frame, total, framed)

    def with_prior(self, frame: Frame, value: Tensor, derivative: Any) -> tuple[Tensor, Any]:
        """Add the prior of the model once."""
        if in_frame(self, frame):
            return with_prior(self.first, frame, value, derivative)
        return self.first.with_prior(frame, value, derivative)

    def log_prior(self, theta: Tensor) -> Tensor:
        """Compute what the prior adds to the log joint, (*sample, *batch)."""
        return self.first.log_prior(theta)

    def data_log_likelihood(self, theta: Tensor) -> Tensor:
        """Sum the log likelihood over a pass, (*sample, *batch); a gradient is taken batch after batch."""
        return over_a_pass(self, theta)

    def slabs(self, theta: Tensor, model: AdditiveTractable) -> tuple[Tensor, ...]:
        """Split the draws, so that draws times rows in one call are bounded; whole where their number is not known."""
        return slabs(theta, getattr(model, "num_data", 1))

    def batch_log_likelihood(self, theta: Tensor, model: AdditiveTractable) -> Tensor:
        """Compute the log likelihood of the rows of one batch, (*sample, *batch)."""
        return model.data_log_likelihood(theta)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of the prior: the rows in the files are taken not to change."""
        return tuple(self.prior)

    def known_data(self) -> tuple[Tensor, ...]:
        """Return the tensors of the prior; of the rows the value of the loss tells, in whatever order they come."""
        return tuple(self.prior)


def _alike(one: Any, other: Any) -> bool:
    """Whether two priors are the same, where asking costs nothing."""
    parts = list(zip(one, other, strict=False)) if isinstance(one, tuple) and type(one) is type(other) else []
    tensors = [(a, b) for a, b in parts if isinstance(a, Tensor) and isinstance(b, Tensor)]
    return all(a.device.type != "cpu" or (a.shape == b.shape and bool(torch.allclose(a, b))) for a, b in tensors)
