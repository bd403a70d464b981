"""The contract of a posterior: a variational distribution q in one system of coordinates."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Self

import torch
from torch import Tensor

from torchngvi.interfaces.frame import Frame, known_everywhere, where_members
from torchngvi.interfaces.moves import Coordinates, Move
from torchngvi.interfaces.packets import Expectation, Local
from torchngvi.structures import Pattern
from torchngvi.structures.pattern import Structured


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
        engine: the word for its engine in `torchngvi.fitting.request`; empty where `torchngvi.fit` asks the target.
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
        frame = self.frame()
        a, W = e.derivative.framed(frame)
        return Local(a, W - e.temperature * self.structure.eye(a))

    def loss(self, e: Expectation) -> Tensor:
        """Compute L = E_q[ℓ] - γ entropy(q) from an expectation, (*batch,), in nats."""
        return e.value - e.temperature * self.entropy()

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
        return self.structure.dot(local.a, local.a) + 0.5 * self.structure.norm2(local.P)

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
            old.copy_(value if everyone else where_members(where, value, old))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert in place, as torch does for Parameters: optimizers keep the tensors they hold."""
        for name, buffer in self._buffers.items():
            if buffer is None:
                continue
            new = torch.no_grad()(fn)(buffer)
            if torch._has_compatible_shallow_copy_type(buffer, new):
                grad = buffer.grad
                buffer.data = new
                if grad is not None:
                    buffer.grad = fn(grad)
            else:  # to or from the meta device: a new tensor, as for Parameters
                self._buffers[name] = new.detach().requires_grad_(buffer.requires_grad)
        return self
