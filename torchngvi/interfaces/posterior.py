"""The contract of a posterior, and of the moves that it can be asked for."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from torchngvi.interfaces.packets import Expectation, Frame, Local, known_everywhere
from torchngvi.structures import Pattern
from torchngvi.structures.pattern import Structured

# How a posterior may be asked to move, and the path of such moves that a rule returns
#
# A rule names the kind of move that it makes as ``emits``, a posterior the kinds that it can make as ``takes``; a pair
# that does not fit is refused when the optimizer is made.  `Congruence`, `Affine` and `Root` lead to the same q' in
# whatever coordinates q is stored; `Tangent` and its kinds are straight lines in those coordinates, and so differ.


class Coordinates(NamedTuple):
    """What a posterior stores, or a change of it: a vector and a matrix, such as (m, C), (m, T) or (S m, S).

    >>> from torchngvi import NaturalGaussian
    >>> NaturalGaussian(1, mean=3.0, scale=0.5).coordinates.vector.tolist()
    [12.0]
    """

    vector: Tensor  # (*batch, D)
    matrix: Structured


class Congruence(NamedTuple):
    """Move to V' = C N⁻¹ Cᵀ and m' = m + C N⁻¹ f, which is the same q' in all coordinates.

    N is symmetric and must be positive definite; a member for which it is not leaves the cone.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> move = Congruence(torch.tensor([[4.0]]), torch.tensor([-2.0]))
    >>> new, inside = CholeskyGaussian(1).moved(move)
    >>> new.vector.tolist(), new.matrix.tolist(), bool(inside)
    ([-0.5], [[0.5]], True)
    """

    N: Structured
    force: Tensor  # f, (*batch, D)


class Tangent(NamedTuple):
    """Move along a straight line in the posterior's own coordinates, λ' = λ + change.

    In other coordinates the same natural gradient gives another curve, which agrees with this one to first order only.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> move = Tangent(Coordinates(torch.tensor([1.0]), torch.tensor([[2.0]])))
    >>> CholeskyGaussian(1).moved(move)[0].matrix.tolist()
    [[3.0]]
    """

    change: Coordinates


class RootTangent(Tangent):
    """A tangent in coordinates that have a Euclidean gradient: mean and root of V or of S, or a flat vector.

    Rules that follow ∇L itself, such as `RootGradient`, emit it, because they read `Posterior.euclidean`.

    >>> from torchngvi import CholeskyGaussian, NaturalGaussian
    >>> RootTangent in CholeskyGaussian.takes, RootTangent in NaturalGaussian.takes
    (True, False)
    """


class LogTangent(RootTangent):
    """A root tangent along which the diagonal of the root Λ moves by its logarithm: Λ_ii' = Λ_ii exp(change_ii).

    The diagonal stays positive for every step size, so that no member leaves the cone except by overflow.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> move = LogTangent(Coordinates(torch.zeros(1), torch.tensor([[-1.0]])))
    >>> round(CholeskyGaussian(1).moved(move)[0].matrix.item(), 4)  # exp(-1)
    0.3679
    """


class Affine(NamedTuple):
    """Map the random variable: θ' = m + s + M (θ - m), so that m' = m + s and V' = M V Mᵀ.

    M must be regular; transport rules such as `BuresWasserstein` emit this move.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> new, _ = CholeskyGaussian(1, mean=1.0).moved(Affine(torch.tensor([[2.0]]), torch.tensor([0.5])))
    >>> new.vector.tolist(), new.matrix.tolist()
    ([1.5], [[2.0]])
    """

    M: Structured
    s: Tensor  # (*batch, D)


class Root(NamedTuple):
    """Replace mean and root by m' and C' as they stand, V' = C'C'ᵀ, in posteriors that hold a root of the covariance.

    A member whose entries are not all finite counts as outside of the cone.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> CholeskyGaussian(1).moved(Root(torch.zeros(1), torch.tensor([[torch.inf]])))[1].item()
    False
    """

    mean: Tensor  # (*batch, D)
    root: Structured  # lower triangular


Move = Congruence | Tangent | Affine | Root
"""What a rule may ask of a posterior."""


@dataclass(frozen=True)
class Path:
    """The curve of moves from q that a rule returns, with what a step size may want to know of it.

    The norm and the slope are functions, since they may be dear and a constant step size never reads them.

    Attributes:
        at: the move at step size ρ (*batch,), one a member; ρ = 0 is q itself.
        norm2: the squared natural norm |a|² + ½‖P‖²_F of the gradient that the path follows, (*batch,).
        slope: -dL/dρ at ρ = 0, (*batch,), positive where the path goes down.
        change2: the squared length of the change of q's own coordinates at ρ = 1, (*batch,), each stored entry counted
            once; the optimizer says it to a step size that asks for it by ``needs_tangent``.
        leaves: the number of blocks of coordinates that are independent under q given the others, over which L is about
            a sum; the optimizer says it to a step size that finds its steps by trial.
        speed2: the squared length of dq/dρ at ρ = 0 in the Fisher metric, (*batch,), of a path that does not follow the
            natural gradient; None where it is ``norm2``.

    >>> import torch
    >>> path = Path(lambda rho: rho, lambda: torch.tensor(4.0), lambda: torch.tensor(4.0))
    >>> path.in_units_of(0.5).slope().item()
    2.0
    """

    at: Callable[[Tensor], Move]  # ρ (*batch,) -> move
    norm2: Callable[[], Tensor]  # squared natural norm of the gradient that it follows, (*batch,)
    slope: Callable[[], Tensor]  # -dL/dρ at 0, (*batch,)
    change2: Callable[[], Tensor] | None = None  # squared length of the change of q's coordinates at ρ = 1, (*batch,)
    leaves: int = 1
    speed2: Callable[[], Tensor] | None = None  # squared length of dq/dρ at 0 in the Fisher metric; None for norm2

    def length2(self) -> Tensor:
        """Compute the squared length of dq/dρ at ρ = 0 in the Fisher metric, (*batch,): KL(q'‖q) ≈ ½ρ² of it."""
        return self.norm2() if self.speed2 is None else self.speed2()

    def in_units_of(self, unit: float) -> "Path":
        """Return the same curve with ρ measured in another unit: at 1 it is where this path is at ``unit``."""
        if unit == 1.0:
            return self
        return Path(
            lambda rho: self.at(unit * rho),
            lambda: unit**2 * self.norm2(),
            lambda: unit * self.slope(),
            speed2=lambda: unit**2 * self.length2(),
        )


def once(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Make a function that computes its value at the first call and returns the same one afterwards.

    It is for the norm and the slope of a `Path`, which some step sizes ask for several times and others never.

    Args:
        compute: computes the value, whenever it is called, from what does not change.

    Returns:
        The function.

    >>> import torch
    >>> draw = once(lambda: torch.randn(()))
    >>> bool(draw() == draw())
    True
    """
    found: list[Tensor] = []

    def value() -> Tensor:
        if not found:
            found.append(compute())
        return found[0]

    return value


# The contract of a posterior: a variational distribution q in one system of coordinates


class Posterior(torch.nn.Module, ABC):
    """A variational distribution q in one system of coordinates, kept in buffers: abstract.

    A user makes one of `torchngvi.posteriors` and hands it to `NaturalGradientVI`.  A class of one's own says its
    coordinates, how it moves, and its natural gradient F⁻¹∇L, and has the check `torchngvi.testing.check_posterior`.

    The coordinates never require grad, so that ``parameters()`` is empty and no other optimizer moves them.  What
    requires grad is a pair of zero buffers, the *probes* p and R in θ = m + C(p + (I + R)z), R lower triangular, or
    (I + R)ᵀ in its place where C is upper triangular: the gradient of any loss with respect to p is a, and that with
    respect to R has the lower triangle of W (or of P, if the entropy is in the loss).

    Attributes:
        structure: the pattern of its matrices.
        batch_shape: the batch dimensions; each member is a posterior of its own.
        dim: D, the number of latent variables.
        takes: the kinds of moves that it can make.
        framed: whether it has a mean and a root, which `frame` and `probed` return.
        upper: whether the root C of its frame is upper triangular.
        domain: in words, what a step must not leave.
        engine: the word for its engine in `torchngvi.fitting.fit`; empty where `torchngvi.fit` asks the target.
        mean_probe: p, (*batch, D), zero.
        root_probe: R, (*batch, *structure.shape), zero.
        coding: the classes of the first target that has some; a copy of q has them, a ``state_dict`` has not.

    >>> from torchngvi import CholeskyGaussian
    >>> q = CholeskyGaussian(2)
    >>> list(q.parameters()), sorted(q.state_dict())
    ([], ['mean', 'scale_tril'])
    """

    structure: Pattern
    batch_shape: torch.Size
    dim: int
    takes: frozenset[type]  # the moves it can make
    framed: bool = True  # it has a mean and a root: `frame` and `probed` return them
    upper: bool  # the root C of its frame is upper triangular
    domain: str = "the positive definite cone"  # what a step must not leave, in words
    engine: ClassVar[str] = "steps"  # of `torchngvi.fit`; empty where the target names it
    mean_probe: Tensor  # (*batch, D), zero
    root_probe: Structured  # zero
    coding: tuple[float, ...] = ()  # the classes of the first target that has some; a copy has it, a state_dict not

    @property
    @abstractmethod
    def coordinates(self) -> Coordinates:
        """The buffers themselves, as a vector and a matrix; a write to them moves q."""

    @abstractmethod
    def frame(self) -> Frame:
        """Return mean and root without gradients."""

    @abstractmethod
    def probed(self) -> Frame:
        """Return mean and root as differentiable functions of the probes."""

    @abstractmethod
    def unframe(self, a: Tensor, W: Structured) -> tuple[Tensor, Structured]:
        """Take a and W out of the frame: C⁻ᵀ a and C⁻ᵀ W C⁻¹, the latter in the pattern."""

    @abstractmethod
    def tangent(self, e: Expectation) -> Coordinates:
        """Compute the natural gradient F⁻¹∇L in the posterior's own coordinates."""

    def euclidean(self, e: Expectation) -> Coordinates:
        """Compute the plain gradient ∇L in the posterior's own coordinates, where it takes a `RootTangent`."""
        raise NotImplementedError  # `takes` refuses it before

    @abstractmethod
    def moved(self, move: Move) -> tuple[Coordinates, Tensor]:
        """Compute the coordinates after a move, without making it.

        Returns:
            The new coordinates, and for which members (*batch,) they stay in the domain; the others are of no use.
        """

    @abstractmethod
    def entropy(self) -> Tensor:
        """Compute the entropy of q in nats, (*batch,), differentiable in the probes."""

    def local(self, e: Expectation) -> Local:
        """Bring an expectation into the frame, a and P = W - γI: the entropy enters here and nowhere else."""
        if isinstance(e.derivative, Local):
            return e.derivative
        a, W = e.derivative.framed(self.frame())
        return Local(a, torch.sub(W, self.structure.eye(a), alpha=e.temperature))

    def loss(self, e: Expectation) -> Tensor:
        """Compute L = E_q[ℓ] - γ entropy(q) from an expectation, (*batch,), in nats."""
        return torch.sub(e.value, self.entropy(), alpha=e.temperature)

    def carried(
        self,
        vector: Tensor,  # (*batch, D), of a change made at an earlier q
    ) -> Tensor:
        """Carry a change of the vector that was made at an earlier q to this one: on a manifold, its part along it.

        Returns:
            The change (*batch, D) itself wherever the coordinates lie in a flat space.
        """
        return vector

    def sym_outer(
        self,
        left: Tensor,  # (*sample, *batch, D)
        right: Tensor,  # (*sample, *batch, D)
    ) -> Structured:
        """Sum symmetrised outer products over all samples: Π(Σ_s ½(left_s right_sᵀ + right_s left_sᵀ))."""
        return self.structure.sym_lower(self._by_member(left), self._by_member(right))

    def one_triangle(
        self,
        force: Tensor,  # (*sample, *batch, D)
        z: Tensor,  # (*sample, *batch, D)
    ) -> Structured:
        """Mirror that triangle of M = Σ_s f_s z_sᵀ which is right: the lower one of M, or that of Mᵀ.

        Only that triangle reaches a triangular root: the lower one for a lower triangular C, else the upper one.
        """
        left, right = (z, force) if self.upper else (force, z)
        return self.structure.one_sided(self.structure.lower(self._by_member(left), self._by_member(right)))

    def _by_member(self, x: Tensor) -> Tensor:
        """Samples (*sample, *batch, D) as (*batch, S, D)."""
        return x.reshape(-1, *self.batch_shape, self.dim).movedim(0, -2)

    def norm2(self, local: Local) -> Tensor:
        """Compute the squared natural norm of ∇L, |a|² + ½‖P‖²_F, (*batch,)."""
        return torch.add(self.structure.dot(local.a, local.a), self.structure.norm2(local.P), alpha=0.5)

    def settled(self) -> AbstractContextManager[None]:
        """Open a block in which only :meth:`assign` changes the coordinates, so that they need not be compared."""
        return nullcontext()

    def snapshot(self) -> Coordinates:
        """Copy the coordinates, for :meth:`restore`."""
        return Coordinates(*(buffer.clone() for buffer in self.coordinates))

    def restore(self, coordinates: Coordinates) -> None:
        """Write coordinates in place for every batch member."""
        self.assign(coordinates, torch.ones(self.batch_shape, dtype=torch.bool, device=self.mean_probe.device))

    def drop_gradients(self) -> None:
        """Empty the gradients of the probes: a step uses up those it read, and no later one adds to them."""
        self.mean_probe.grad = self.root_probe.grad = None

    def assign(self, new: Coordinates, where: Tensor) -> None:
        """Write coordinates in place for the members (*batch,) of the mask, and leave the others as they are."""
        everyone = known_everywhere(where)
        for old, value in zip(self.coordinates, new, strict=True):
            if everyone:
                old.copy_(value)
            else:
                torch.where(where.reshape(where.shape + (1,) * (old.ndim - where.ndim)), value, old, out=old)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert in place, as torch does for Parameters: optimizers keep the tensors they hold."""
        for name, buffer in self._buffers.items():
            if buffer is None:
                continue
            new = torch.no_grad()(fn)(buffer)
            if torch._has_compatible_shallow_copy_type(buffer, new):
                grad = buffer.grad if buffer.is_leaf else None
                buffer.data = new
                if grad is not None:
                    buffer.grad = fn(grad)
            else:  # to or from the meta device: a new tensor, as for Parameters
                self._buffers[name] = new.detach().requires_grad_(buffer.requires_grad)
        return self
