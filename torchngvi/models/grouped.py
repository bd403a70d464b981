"""A hierarchical model as its author writes it: the log density of one group, and that of the global parameters."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from torchngvi.arguments import shown
from torchngvi.errors import InputError
from torchngvi.interfaces import Target
from torchngvi.models.factors import FactorTarget
from torchngvi.models.log_joint import LogJoint, mapped, number
from torchngvi.numerics.arrays import writable
from torchngvi.posteriors import PrecisionCholeskyGaussian
from torchngvi.structures import arrow


@final
class GroupedLogJoint(FactorTarget):
    """log p(y, θ) = Σ_i log p(y_i, b_i | g) + log p(g), from a function of one group and one of the global parameters.

    One wants it for hierarchical models of one's own: effects b_i of each of n groups, and parameters g that they
    share.  The functions are written for one group and one θ; `torch.func.vmap` evaluates all groups and all draws at
    once.  θ = (b_1, ..., b_n, g).  ``fit(q, target)`` with ``q = target.posterior()`` sees values and gradients alone,
    group by group: time and memory grow with n, the number of draws does not.

    Args:
        group: log p(y_i, b_i | g) of one group, called as ``group(b, g, *data_i)`` with b (r,), g (p,) and the part of
            that group of each of the data; returns one number.
        shared: log p(g) of the global parameters, g (p,) -> one number.
        data: tensors, arrays or lists with the n groups along their first dimension: y, covariates, weights.  Groups of
            several sizes are filled up to the largest, with a mask of weights 0 and 1 beside.
        local: the number r of parameters of each group.
        globals: the number p of parameters that groups share.
        temperature: γ, the weight of the entropy.

    Raises:
        InputError: functions that cannot be called, data without groups or of several numbers of them, numbers of
            parameters that are no positive integers; on use, a result that is not one number, an index beyond the
            parameters, or a function that vmap cannot take.

    >>> from torchngvi import fit
    >>> y = [28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]  # eight schools (Rubin 1981)
    >>> error = [15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]
    >>> def school(b, g, y, error):
    ...     effect = g[0] + g[1].exp() * b[0]
    ...     return -0.5 * ((y - effect) / error) ** 2 - 0.5 * b[0] ** 2
    >>> def shared(g):
    ...     return -0.5 * (g[0] / 5) ** 2 + g[1] - torch.log1p((g[1].exp() / 5) ** 2)
    >>> target = GroupedLogJoint(school, shared, [y, error], local=1, globals=2)
    >>> q = target.posterior()
    >>> fit(q, target, progress=False, examine=False).converged
    True
    >>> effects, common = target.parts(q.mean)
    >>> effects.shape, common.shape
    (torch.Size([8, 1]), torch.Size([2]))
    """

    def __init__(
        self,
        group: Callable[..., Tensor],
        shared: Callable[[Tensor], Tensor],
        data: Sequence[Any],
        *,
        local: int,
        globals: int,  # noqa: A002  the word for it
        temperature: float = 1.0,
    ) -> None:
        if not callable(group):
            raise InputError(f"group is the log density of one group, a function; got {type(group).__name__}.")
        if not isinstance(data, list | tuple):
            raise InputError(f"data is a list of tensors or arrays, such as [y, x]; got {type(data).__name__}.")
        self.data = tuple(_tensor(part) for part in data)
        sizes = sorted({len(part) if part.ndim else 0 for part in self.data})
        if len(sizes) != 1 or not sizes[0]:
            raise InputError(
                f"data have the groups along their first dimension, as many in each of them; got {sizes or 'none'}."
            )
        for name, number_of in (("local", local), ("globals", globals)):
            if isinstance(number_of, bool) or not isinstance(number_of, int) or number_of < 1:
                raise InputError(f"{name} is a number of parameters, a positive integer; got {number_of!r}.")
        self.local, self.globals = local, globals
        structure = arrow(groups=sizes[0], local=local, globals=globals)
        own = f"b, of local={local} numbers, g, of globals={globals}, and its part of the data"
        group, shared = _indexed(group, "group", own), _indexed(shared, "shared", f"g, of globals={globals} numbers")
        terms = [(0, _Groups(group, local, self.data)), (-1, LogJoint.vmapped(shared, 0.0))]
        super().__init__(structure, terms, temperature)

    def posterior(self, *, mean: float = 0.0, scale: float = 1.0) -> PrecisionCholeskyGaussian:
        """Make a q over the arrow of the model.

        Args:
            mean: of every coordinate.
            scale: the standard deviation of every coordinate.

        Returns:
            A new posterior of the dtype and on the device of the data, float64 where those are plain numbers.
        """
        floats = [part for part in self.data if part.is_floating_point()]
        return PrecisionCholeskyGaussian(
            self.structure.dim,
            mean=mean,
            scale=scale,
            structure=self.structure,
            dtype=floats[0].dtype if floats else torch.float64,
            device=self.data[0].device,
        )

    def parts(
        self,
        theta: Tensor,  # (*sample, D)
    ) -> tuple[Tensor, Tensor]:
        """Take θ apart, or whatever has one number a coordinate, such as the means and standard deviations of q.

        Args:
            theta: (*sample, D).

        Returns:
            Of the groups (*sample, n, r), and of what they share (*sample, p).

        Raises:
            InputError: another number of coordinates.
        """
        if theta.shape[-1] != self.structure.dim:
            raise InputError(
                f"theta has {self.structure.dim} coordinates, local= of each group and globals=; got shape "
                f"{tuple(theta.shape)}."
            )
        groups = theta.shape[-1] - self.globals
        return theta[..., :groups].unflatten(-1, (-1, self.local)), theta[..., groups:]


@final
class _Groups(Target):
    """The log density of all groups, each a function of its own parameters, the global ones and its data."""

    temperature = 0.0

    def __init__(self, group: Callable[..., Tensor], local: int, data: tuple[Tensor, ...]) -> None:
        self.group, self.local, self.data = group, local, data

    def log_joint(self, theta: Tensor) -> Tensor:
        """Compute log p(y_i, b_i | g) at θ (*sample, n, r + p), (*sample, n)."""
        draws = theta.reshape(-1, *theta.shape[-2:])
        values = mapped(lambda one: torch.func.vmap(self._one)(one, *self.data), draws, _REMEDY)
        return values.to(theta.dtype).reshape(theta.shape[:-1])

    def _one(self, clique: Tensor, *data: Tensor) -> Tensor:
        return number(self.group(clique[: self.local], clique[self.local :], *data))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return no tensors: those that the function depends on are unknown."""
        return ()


def _indexed(function: Callable[..., Tensor], name: str, takes: str) -> Callable[..., Tensor]:
    """The same function, which says what it was given where it reads beyond that."""
    if not callable(function):
        return function  # which is refused elsewhere

    def called(*arguments: Tensor) -> Tensor:
        try:
            return function(*arguments)
        except IndexError as error:
            raise InputError(
                f"{name} takes {takes}, counted from 0, and an index goes beyond one of its tensors ({error})."
            ) from error

    return called


def _tensor(data: Any) -> Tensor:
    """Tensors and arrays as they are, other numbers in float64."""
    if isinstance(data, Tensor):
        return data
    if hasattr(data, "__array__"):
        return torch.as_tensor(writable(data.__array__()))
    try:
        whole = torch.as_tensor(data)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(
            f"data is a list of tensors or arrays, such as [y, x]; got {shown(data)} ({error})."
        ) from error
    return torch.as_tensor(data, dtype=torch.float64) if whole.is_floating_point() else whole


_REMEDY = "Write the terms of all groups at once, and give them to a FactorTarget."
