"""A variational family in one system of coordinates."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Self

import torch
from torch import Tensor

from torchngvi.interfaces.frame import Frame, where_members
from torchngvi.interfaces.moves import Coordinates, Move
from torchngvi.interfaces.packets import Expectation, Local
from torchngvi.structures import Pattern
from torchngvi.structures.pattern import Structured


class Posterior(torch.nn.Module, ABC):
    """A variational family in one system of coordinates, kept in buffers.

    The coordinates never require grad, so ``parameters()`` hands nothing to another optimizer.
    What requires grad is a pair of zero buffers, the *probes* p and R in θ = m + C(p + (I + R)z), R lower triangular,
    or (I + R)ᵀ in its place where C is upper triangular: the gradient of any loss with respect to p is a, and that
    with respect to R has the lower triangle of W (or of P, if the entropy is in the loss).
    """

    structure: Pattern
    batch_shape: torch.Size
    dim: int
    takes: frozenset[type]  # the moves it can make
    framed: bool = True  # it has a mean and a root: `frame` and `probed` return them
    upper: bool  # the root C of its frame is upper triangular
    domain: str = "the positive definite cone"  # what a step must not leave, in words
    mean_probe: Tensor  # (*batch, D), zero
    root_probe: Structured  # zero
    coding: tuple[float, ...] = ()  # the classes of the first target that has some; a copy has it, a state_dict not

    @property
    @abstractmethod
    def coordinates(self) -> Coordinates:
        """The buffers."""

    @abstractmethod
    def frame(self) -> Frame:
        """Mean and root."""

    @abstractmethod
    def probed(self) -> Frame:
        """Mean and root as differentiable functions of the probes."""

    @abstractmethod
    def unframe(self, a: Tensor, W: Structured) -> tuple[Tensor, Structured]:
        """C⁻ᵀ a and C⁻ᵀ W C⁻¹, in the pattern."""

    @abstractmethod
    def tangent(self, e: Expectation) -> Coordinates:
        """The natural gradient λ̇ = F⁻¹∇L in q's own coordinates."""

    def euclidean(self, e: Expectation) -> Coordinates:
        """∇L in q's own coordinates, lower triangular, where q takes a `RootTangent`."""
        raise NotImplementedError  # `takes` refuses it before

    @abstractmethod
    def moved(self, move: Move) -> tuple[Coordinates, Tensor]:
        """The coordinates after a move, and for which members (*batch,) it stays in the cone."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """(*batch,), differentiable in the probes."""

    def local(self, e: Expectation) -> Local:
        """a and P = W - γI: the entropy enters here and nowhere else."""
        frame = self.frame()
        a, W = e.derivative.framed(frame)
        return Local(a, W - e.temperature * self.structure.eye(a))

    def loss(self, e: Expectation) -> Tensor:
        """L = E_q[ℓ] - γ entropy, (*batch,)."""
        return e.value - e.temperature * self.entropy()

    def carried(
        self,
        vector: Tensor,  # (*batch, D), of a change made at an earlier q
    ) -> Tensor:
        """That change at this q: itself, or on a manifold its part along it."""
        return vector

    def sym_outer(
        self,
        left: Tensor,  # (*sample, *batch, D)
        right: Tensor,  # (*sample, *batch, D)
    ) -> Structured:
        """Π(Σ_s ½(left_s right_sᵀ + right_s left_sᵀ))."""
        return self.structure.sym_lower(self._by_member(left), self._by_member(right))

    def one_triangle(
        self,
        force: Tensor,  # (*sample, *batch, D)
        z: Tensor,  # (*sample, *batch, D)
    ) -> Structured:
        """The symmetric matrix whose triangle is right in M = Σ_s f_s z_sᵀ: the lower one of M, or that of Mᵀ.

        Only that triangle reaches a triangular root: the lower one for a lower triangular C, else the upper one.
        """
        left, right = (z, force) if self.upper else (force, z)
        return self.structure.one_sided(self.structure.lower(self._by_member(left), self._by_member(right)))

    def _by_member(self, x: Tensor) -> Tensor:
        """Samples (*sample, *batch, D) as (*batch, S, D)."""
        return x.reshape(-1, *self.batch_shape, self.dim).movedim(0, -2)

    def norm2(self, local: Local) -> Tensor:
        """Squared natural norm |a|² + ½‖P‖²_F of ∇L, (*batch,)."""
        return self.structure.dot(local.a, local.a) + 0.5 * self.structure.norm2(local.P)

    def settled(self) -> AbstractContextManager[None]:
        """A block in which nothing but :meth:`assign` changes the coordinates, so that they need not be compared."""
        return nullcontext()

    def snapshot(self) -> Coordinates:
        """A copy of the coordinates, to restore by :meth:`assign`."""
        return Coordinates(*(buffer.clone() for buffer in self.coordinates))

    def assign(self, new: Coordinates, where: Tensor) -> None:
        """Write the coordinates in place for the members (*batch,) of the mask."""
        for old, value in zip(self.coordinates, new, strict=True):
            old.copy_(where_members(where, value, old))

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
