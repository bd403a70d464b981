"""Log joints that are sums over the nodes of a forest, or may fail, and hierarchical models as authors write them."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor

from torchngvi.arguments import is_size, read_list, shown
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Additive, Frame, Framed, Posterior, Target, TractableTarget, clique_frames
from torchngvi.models.log_joint import LogJoint, mapped, number
from torchngvi.numerics.arrays import writable
from torchngvi.posteriors import PrecisionCholeskyGaussian
from torchngvi.structures import Dense, Forest, arrow

# Log joints that are sums over the nodes of a forest: each term sees one node and its ancestors


class Factor(NamedTuple):
    """One kind of term: for each node of a kind one."""

    kind: int  # of ``structure.kinds``
    target: Target  # of θ_c (*sample, *batch, n, k), one value a node


Terms = Sequence[tuple[int, Target | Callable[[Tensor], Tensor]]]  # pairs of a kind of nodes and a term


class FactorTarget(Additive):
    """log p(θ) = Σ_kinds Σ_c log f_c(θ_c), θ_c the coordinates of a node and of its ancestors.

    A model with n groups has n terms that see the local parameters of one group and the global ones, and one term of
    the global ones alone.  ``fit(q, target)`` with a q over the same forest takes their expectations clique by clique,
    at a cost that grows with n: by draws of each clique, as few as for one group (`PerFactor`).  `TractableFactors`
    are terms that know them; as a function of the whole θ the log joint is there for every other estimator and q.

    Args:
        structure: the forest, of which q has the same.
        factors: pairs of a kind of nodes and a term: the number of the kind in ``structure.kinds`` (of an arrow with
            equal groups 0 are the groups and -1 is the root), and a function θ_c (*sample, *batch, n, k) ->
            (*sample, *batch, n) of the coordinates of all n nodes of the kind, each node's own before those of its
            ancestors; or a `Target` with batch members n, such as a `GeneralizedLinear` with rows X (n, N, k), whose
            expectation is then exact and whose prior counts once for every node.
        temperature: γ, the weight of the entropy.
        prior: further pairs of the same form, which every one of the `pieces` has whole: terms that are to be counted
            once where the factors are spread over several targets.

    Raises:
        InputError: no factor, or a factor or term of the prior of a kind that the structure does not have.

    >>> import torch
    >>> from torchngvi.structures import arrow
    >>> groups = arrow(groups=3, local=1, globals=1)
    >>> y = torch.tensor([0.5, -1.0, 2.0])
    >>> def group(theta):  # b_n, g
    ...     return -0.5 * (y - theta[..., 0]) ** 2 - 0.5 * (theta[..., 0] - theta[..., 1]) ** 2
    >>> target = FactorTarget(groups, [(0, group), (-1, lambda theta: -0.5 * theta[..., 0] ** 2)])
    >>> target.log_joint(torch.ones(2, 4)).tolist()
    [-3.125, -3.125]
    """

    def __init__(self, structure: Forest, factors: Terms, temperature: float = 1.0, *, prior: Terms = ()) -> None:
        if not isinstance(structure, Forest):  # a user passes it; only a forest has nodes
            raise InputError(f"a FactorTarget is over a Forest, as arrow(...) gives it; got {structure!r}.")
        kinds = len(structure.kinds)
        what = f"are pairs of a kind of nodes, from 0 to {kinds - 1} or -1 of the last, and a term, at least one"
        factors, prior = read_list("factors", factors, what), read_list("prior", prior, what)
        pairs = [*factors, *prior]
        if not factors or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
            raise InputError(f"factors {what}; got {shown(factors)}.")
        if not all(is_size(kind, at_least=-kinds) and kind < kinds for kind, _ in pairs):
            raise InputError(f"factors {what}; got the kinds {[kind for kind, _ in pairs]}. The kinds are {structure}.")
        self.structure = self.pattern = structure
        self._data, self._prior = (
            [
                Factor(kind % kinds, term if isinstance(term, Target) else LogJoint(term, temperature=0.0))
                for kind, term in terms
            ]
            for terms in (factors, prior)
        )
        self.prior = LogJoint(self.log_prior, temperature)
        self.temperature = self.prior.temperature
        self.comparable = all(factor.target.comparable for factor in self.factors)

    @property
    def factors(self) -> list[Factor]:
        """All factors: those of the data, followed by those of the prior."""
        return [*self._data, *self._prior]

    def by_kind(self) -> list[Factor]:
        """The factors that know their expectation, and of the others one for each kind of nodes: their sum."""
        known = [factor for factor in self.factors if isinstance(factor.target, TractableTarget)]
        drawn: dict[int, list[Target]] = {}
        for kind, target in self.factors:
            if not isinstance(target, TractableTarget):
                drawn.setdefault(kind, []).append(target)
        return [*known, *(Factor(kind, _joined(terms)) for kind, terms in drawn.items())]

    def data_log_likelihood(self, theta: Tensor) -> Tensor:
        """Sum the log of all factors but those of the prior, (*sample, *batch)."""
        return self._summed(theta, self._data)

    def log_prior(self, theta: Tensor) -> Tensor:
        """Sum the log of the factors of the prior, (*sample, *batch); zero where there are none."""
        return self._summed(theta, self._prior)

    def _summed(self, theta: Tensor, factors: Sequence[Factor]) -> Tensor:
        cliques = self.structure.gather(theta)
        terms = [factor.target.log_joint(cliques[factor.kind]).sum(-1) for factor in factors]
        return sum(terms[1:], terms[0]) if terms else theta.new_zeros(theta.shape[:-1])

    def pieces(self, number: int | None = None) -> Iterator[Self]:
        """Yield targets of consecutive factors, as equal in number as can be, each with the whole prior.

        Args:
            number: how many targets; by default one for each factor.

        Raises:
            InputError: fewer than one, or more than there are factors.

        >>> import torch
        >>> from torchngvi.structures import arrow
        >>> groups = arrow(groups=2, local=1, globals=1)
        >>> target = FactorTarget(groups, [(0, lambda theta: theta[..., 0]), (0, torch.prod), (1, torch.sum)])
        >>> [len(piece.factors) for piece in target.pieces(2)]
        [1, 2]
        """
        most = len(self._data)
        number = most if number is None else number
        if not 1 <= number <= most:
            raise InputError(f"pieces are of at least one factor each, and there are {most}; got number={number}.")
        for part in range(number):
            piece = copy.copy(self)
            piece._data = self._data[part * most // number : (part + 1) * most // number]
            yield piece

    def check(self, q: Posterior) -> None:
        """Raise for a q over another number of coordinates.

        Raises:
            InputError: another D.
        """
        if q.dim != self.structure.dim:
            raise InputError(f"the factors are over D = {self.structure.dim} coordinates; got a posterior of {q.dim}.")

    def assembled(
        self,
        packets: Sequence[tuple[int, Framed]],  # each with its kind of nodes, in the frames of their cliques
    ) -> Framed:
        """Sum the packets of factors and cliques, in the frame of q."""
        vectors: list[Tensor | None] = [None] * len(self.structure.kinds)
        matrices = vectors.copy()
        for kind, (a, W) in packets:
            old_a, old_W = vectors[kind], matrices[kind]
            vectors[kind] = a if old_a is None else old_a + a
            matrices[kind] = W if old_W is None else old_W + W
        return Framed(*self.structure.scatter(vectors, matrices))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of all factors, or none where those of a function are unknown."""
        known = [factor.target.tensors() for factor in self.factors]
        return tuple(tensor for some in known for tensor in some) if all(known) else ()

    def settings(self) -> tuple[object, ...]:
        """Return the kinds and the settings of all factors."""
        return tuple((factor.kind, factor.target.settings()) for factor in self.factors)


@final
class TractableFactors(FactorTarget, TractableTarget):
    """A `FactorTarget` of terms that all know their expectation: nothing is drawn, and ``fit(q, target)`` is enough.

    A q over the same forest is needed.

    Args:
        structure: the forest, of which q has the same.
        factors: pairs of a kind of nodes and a target that knows its expectation, as a `GeneralizedLinear` does.
        temperature: γ, the weight of the entropy.

    Raises:
        InputError: as in `FactorTarget`, or a term that does not know its expectation.

    >>> import torch
    >>> from torchngvi import GeneralizedLinear, PrecisionCholeskyGaussian, fit
    >>> from torchngvi.structures import arrow
    >>> groups = arrow(groups=2, local=1, globals=1)
    >>> X = torch.tensor([[[1.0, 0.0], [1.0, 1.0]], [[1.0, 0.0], [1.0, -1.0]]], dtype=torch.float64)  # (n, N, k)
    >>> model = GeneralizedLinear(X, torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    >>> q = PrecisionCholeskyGaussian(3, structure=groups, dtype=torch.float64)
    >>> fit(q, TractableFactors(groups, [(0, model)]), progress=False).converged
    True
    """

    def __init__(
        self,
        structure: Forest,
        factors: Sequence[tuple[int, TractableTarget]],
        temperature: float = 1.0,
        *,
        prior: Sequence[tuple[int, TractableTarget]] = (),
    ) -> None:
        super().__init__(structure, factors, temperature, prior=prior)
        for _, target in self.factors:
            if not isinstance(target, TractableTarget):
                raise InputError(
                    "TractableFactors are targets that know their expectation, as a GeneralizedLinear; got a "
                    f"{type(target).__name__}. Use FactorTarget, which fit takes too."
                )

    def check(self, q: Posterior) -> None:
        """Raise for a q over another structure.

        Raises:
            PairError: another structure, or a root of the covariance.
        """
        super().check(q)
        if q.structure != self.structure or not q.upper:
            raise PairError(
                "the factors are over the cliques of a forest, and need a q whose precision has its pattern, "
                f"{self.structure}; got a {type(q).__name__} over {q.structure}."
            )

    @property
    def convex(self) -> bool:  # type: ignore[override]
        """Whether every factor is."""
        return all(target.convex for _, target in self.factors if isinstance(target, TractableTarget))

    def second_order(self, theta: Tensor) -> tuple[Tensor, Framed]:
        """Return ℓ(θ), (*batch,), with ∇ℓ and the entries of ∇²ℓ, all of which the forest stores."""
        cliques, values, packets = self.structure.gather(theta), [], []
        for kind, target in self.factors:
            assert isinstance(target, TractableTarget)
            clique = cliques[kind]
            value, derivative = target.second_order(clique)
            dense = Dense(clique.shape[-1])
            values.append(value.sum(-1))
            packets.append((kind, derivative.framed(Frame(clique, dense.eye(clique), dense, upper=True))))
        return sum(values[1:], values[0]), self.assembled(packets)

    def data_energy(self, frame: Frame) -> tuple[Tensor, Framed]:
        """Compute E_q[-Σ log f_c] (*batch,) and its derivative for all factors but those of the prior."""
        return self._expected(frame, self._data)

    def expected_energy(self, frame: Frame) -> tuple[Tensor, Framed]:  # type: ignore[override]
        """Compute E_q[ℓ] (*batch,), differentiable in the frame, and its derivative, summed over the cliques."""
        return self._expected(frame, self.factors)

    def _expected(self, frame: Frame, factors: Sequence[Factor]) -> tuple[Tensor, Framed]:
        frames = clique_frames(frame)
        values, packets = [], []
        for kind, target in factors:
            assert isinstance(target, TractableTarget)
            value, derivative = target.expected_energy(frames[kind])
            values.append(value.sum(-1))
            packets.append((kind, derivative.framed(frames[kind])))
        return sum(values[1:], values[0]), self.assembled(packets)


def _joined(terms: list[Target]) -> Target:
    """The sum of terms of the same nodes."""
    if len(terms) == 1:
        return terms[0]
    return LogJoint(lambda theta: sum(term.log_joint(theta) for term in terms), temperature=0.0)  # type: ignore[arg-type, return-value]


# A hierarchical model as its author writes it: the log density of one group, and that of the global parameters


@final
class GroupedLogJoint(FactorTarget):
    """log p(y, θ) = Σ_i log p(y_i, b_i | g) + log p(g), from a function of one group and one of the global parameters.

    Use it for hierarchical models of one's own: effects b_i of each of n groups, and parameters g that they
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

    def parts(self, theta: Tensor) -> tuple[Tensor, Tensor]:
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


# ------------------------------------------------------------------------------------ log joints that may fail


FAILING = 0.05  # share of the draws of an average that may be left out where a log joint fails
VALUE = 0.4  # what a value of a log joint costs beside its gradient
_CALLS = 256  # to find the thetas of one batch at which the log joint fails


class BudgetError(Exception):
    """A call of the log joint that would exceed a budget, and was not made."""


@final
class Guarded(Target):
    """A target whose errors, after a first success, become NaN at the theta that raise them; its calls are counted."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.temperature = target.temperature
        self.comparable = target.comparable
        self.draws_at_once, self.in_passes = target.draws_at_once, target.in_passes
        self.processes = target.processes
        self._same = torch.zeros((), device="cpu")
        self._answered = 0  # the most draws at once
        self._differentiable = False  # a gradient was had
        self.doubted = True  # whether the next gradients show that each value is of one draw, where draws differ
        self._count, self._last = 0, ""
        self._calls = 0  # left for the present batch
        self.gradients = self.values = 0  # draws at which a gradient was wanted, and at which none was
        self.most = math.inf  # the budget of both, in gradients

    @property
    def cost(self) -> float:
        """All that was asked for, in gradients."""
        return self.gradients + VALUE * self.values

    def log_joint(self, theta: Tensor) -> Tensor:
        """Return the target's values, with NaN where it fails."""
        differentiated = torch.is_grad_enabled() and theta.requires_grad
        if self.cost + (1.0 if differentiated else VALUE) * len(theta) > self.most:
            raise BudgetError("the budget of gradients is used up")
        if differentiated:
            self.gradients += len(theta)
        else:
            self.values += len(theta)
        value = self._asked(theta)
        if value is None:  # once more: it may have been chance
            value = self._asked(theta)
        if value is None:
            self._calls, before = _CALLS, self._count
            value = self._by_halves(theta)
            if len(theta) > self._answered == 1 and self._count == before:
                raise InputError(
                    f"the log joint takes one draw at a time ({self._last}). Write it for theta of shape (S, D), or "
                    "use LogJoint.looped(f)."
                )
        if differentiated and not self._differentiable:
            self._check_differentiable(theta[:1].detach())
        if differentiated and self.doubted and len(theta) > 1:
            self._check_separate(value, theta)
        return value

    def _check_separate(self, value: Tensor, theta: Tensor) -> None:
        """Refuse, without a call, a function whose last value has a derivative by other draws, beyond rounding."""
        self.doubted, across = False, None
        if not self.in_passes and self.processes is None:
            with suppress(RuntimeError):  # a graph for one backward pass, as of compiled functions
                (across,) = torch.autograd.grad(value[-1].sum(), theta, retain_graph=True, allow_unused=True)
        if across is not None and bool((across[:-1].abs().sum(0) > 1e-3 * across[-1].abs().amax()).any()):
            raise InputError(
                "the log joint mixes its draws: the value of one has a derivative by another. Each row of theta is a "
                "draw: sum over the last dimension, sum(-1), or wrap a function of one theta as LogJoint.vmapped(f)."
            )

    def _asked(self, theta: Tensor) -> Tensor | None:
        """The target's values, or None where it fails."""
        version = None if theta.is_inference() else theta._version
        try:
            value = self.target.log_joint(theta)
        except InputError:
            raise
        except Exception as error:  # whatever the user's function raises
            if not self._answered:
                error.add_note(
                    f"(The log joint was called with theta of shape {tuple(theta.shape)}, draws first, and dtype "
                    f"{theta.dtype}, that of q. A function of one theta is wrapped as LogJoint.vmapped(f).)"
                )
                raise
            self._last = f"{type(error).__name__}: {error}"
            return None
        if version is not None and version != theta._version:
            raise InputError("the log joint writes into its theta: write into a copy, such as theta.clone().")
        self._answered = max(self._answered, len(theta))
        self._differentiable |= torch.is_grad_enabled() and theta.requires_grad
        return value

    def _by_halves(self, theta: Tensor) -> Tensor:
        """The values at a batch that is known to fail."""
        if len(theta) == 1 or not self._calls:
            self._count += 1
            # no gradient either: it is NaN
            return (1 + 0 * theta.sum(-1)) * torch.nan
        parts = []
        for half in theta.chunk(2):
            value = None
            if self._calls:
                self._calls -= 1
                value = self._asked(half)
            parts.append(self._by_halves(half) if value is None else value)
        return torch.cat(parts)

    @torch.no_grad()
    def _check_differentiable(self, theta: Tensor) -> None:
        """Refuse a function that fails where a gradient was wanted, and has a value there."""
        self.values += 1
        if self._asked(theta) is not None:
            raise InputError(
                f"the log joint fails where its gradient is wanted ({self._last.rstrip('.')}). Compute all of it from "
                "theta by torch operations, without NumPy or detach()."
            )

    def failures(self) -> str:
        """Say what went wrong."""
        if not self._count:
            return ""
        return f" The log joint failed {self._count} time{'s' * (self._count > 1)}: {self._last.rstrip('.')}."

    @contextmanager
    def seen_as(self, change: Callable[[Target], Target]) -> Iterator["Guarded"]:
        """Open a block in which the target is seen in another way; what is asked there is counted here, and guarded."""
        other = Guarded(change(self.target))
        other.gradients, other.values, other.most = self.gradients, self.values, self.most
        other._answered, other._differentiable = self._answered, self._differentiable
        try:
            yield other
        finally:
            self.gradients, self.values = other.gradients, other.values
            other.tell(self)

    def outward(self, theta: Tensor) -> Tensor:
        """Return the parameters that points stand for, as the target does."""
        return self.target.outward(theta)

    def tell(self, other: "Guarded") -> None:
        """Tell another of the failures, and forget them."""
        other._count, other._last = other._count + self._count, self._last or other._last
        self._count = 0

    def check(self, q: Posterior) -> None:
        """Check q as the target does."""
        self.target.check(q)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return a tensor that stays as it is, since during a fit the target does."""
        return (self._same,)


# The factors of a log joint that may fail at some theta: found factor by factor, with a count of the calls


def in_factors(q: Posterior, target: Target) -> bool:
    """Say whether a log joint can be seen factor by factor: a sum over a forest, under a q over the same."""
    return isinstance(target, FactorTarget) and q.structure == target.structure and q.upper and not q.batch_shape


def guarded_factors(q: Posterior, target: Target) -> "GuardedFactors | None":
    """The guarded factors of a log joint that can be seen factor by factor under q; None of any other."""
    return GuardedFactors(target) if isinstance(target, FactorTarget) and in_factors(q, target) else None


@final
class GuardedFactors(FactorTarget):
    """The terms of a `FactorTarget` as `Guarded` targets, those of nodes of one kind as one."""

    def __init__(self, target: FactorTarget) -> None:
        terms = target.by_kind()
        self.drawn = {kind: Guarded(term) for kind, term in terms if not isinstance(term, TractableTarget)}
        known = [(kind, term) for kind, term in terms if isinstance(term, TractableTarget)]
        super().__init__(target.structure, [*known, *self.drawn.items()], target.temperature)

    def allow(self, whole: Guarded) -> None:
        """Let each term spend what the budget of the whole has left."""
        for term in self.drawn.values():
            term.most = whole.most - whole.cost

    def count_for(self, whole: Guarded) -> None:
        """Count the calls since the last time for the whole: a gradient of each factor is one of the log joint."""
        for name in ("gradients", "values"):
            most = max((getattr(term, name) for term in self.drawn.values()), default=0)
            setattr(whole, name, getattr(whole, name) + most)
        for term in self.drawn.values():
            term.tell(whole)
            term.gradients = term.values = 0
