"""The system of Newton's method in the mean and the root of q: its directions, its Hessian, conjugate gradients.

For a convex ℓ the bound L is convex in (m, C), since m + Cz is linear in them and -log det C is convex; in (m, V) or
(m, S) it is not.  With T lower triangular (upper triangular where C is), W = Cᵀ H C and Cᵀ dg, Cᵀ dH C the changes of
the mean gradient and the mean Hessian along (δ, T), its Hessian at (m, C) is the map

    (δ, T) -> ( Cᵀ dg,  tril[Cᵀ dH C + W T] + γ diag T )

and is positive semi-definite there.  A packet that knows these changes, see `Sites.change`, is asked for them without
a new expectation; of any other packet H is taken to stand still, dg = H Cδ.  The preconditioner is its inverse as it
would be if H stood still.  `torchngvi.rules.RootNewton` takes steps by it, `torchngvi.solved.solve` derivatives.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.interfaces import Expectation, Frame, Framed, Local, may_be_asked, where_members
from torchngvi.numerics.arrays import anyone
from torchngvi.structures import Dense, FullAlgebra
from torchngvi.structures.pattern import Structured, plus

_SHIFT = 0.3  # of W in the preconditioner, in units of γ: where the likelihood is flat, W⁻¹ leads far out
_WIDE = 500  # coordinates up to which the mean is preconditioned by all of W, where q keeps a part of it
_WITHOUT_ASKING = 16  # products where the host is not to wait for a device


class Direction(NamedTuple):
    """A vector of the system: δ of the mean, and T as the structure stores the root."""

    delta: Tensor  # (*batch, D)
    T: Structured

    def plus(self, factor: Tensor, other: "Direction", structure: FullAlgebra) -> "Direction":
        """The sum with a multiple of another, a factor for each member."""
        delta = torch.addcmul(self.delta, factor[..., None], other.delta)
        return Direction(delta, plus(structure, self.T, factor, other.T))

    def dot(self, other: "Direction", structure: FullAlgebra) -> Tensor:
        """The inner product, (*batch,)."""
        return structure.dot(self.flat(structure), other.flat(structure))

    def flat(self, structure: FullAlgebra) -> Tensor:
        """All entries as one vector for each member."""
        return torch.cat([self.delta, self.T.flatten(-structure.rank)], -1)

    @classmethod
    def of(cls, flat: Tensor, structure: FullAlgebra) -> "Direction":
        """The direction of such a vector, as views of it."""
        T = flat[..., structure.dim :]  # Tensor.unflatten is written in Python
        return cls(flat[..., : structure.dim], T.view(T.shape[:-1] + structure.shape))


def hessian(e: Expectation, local: Local, frame: Frame, exact: bool = False) -> Callable[[Direction], Direction]:
    """The Hessian of L in (m, C) at q, as a map of directions."""
    structure, gamma = frame.structure, e.temperature
    assert isinstance(structure, FullAlgebra)
    eye = structure.eye(local.a)
    W = torch.add(local.P, eye, alpha=gamma)
    change = e.derivative.change(frame, exact)

    def product(x: Direction) -> Direction:
        # where H stands still, as for a quadratic ℓ, Cᵀ dg = Wδ and dH = 0
        a, change_W = change(x.delta, x.T) if change else (structure.smv(W, x.delta), torch.zeros_like(x.T))
        of_root = structure.matmul(x.T, W) if frame.upper else structure.matmul(W, x.T)
        return Direction(a, torch.addcmul(structure.tril(change_W + of_root), eye, x.T, value=gamma))

    return product


def conjugate_gradients(
    hessian: Callable[[Direction], Direction],
    precondition: Callable[[Direction], Direction],
    right: Direction,
    accuracy: Tensor,  # (*batch,)
    structure: FullAlgebra,
    most: int,
) -> tuple[Direction, int]:
    """Solve H x = r, each member to its own accuracy; where curvature is not positive, end at what there is."""
    products, r = 0, right.flat(structure)
    x, zero = torch.zeros_like(r), torch.zeros_like(accuracy)
    p = z = precondition(right).flat(structure)
    rz = structure.dot(r, z)
    running, least = rz > 0, accuracy.square() * rz
    asked = may_be_asked(running)
    for count in range(most if asked else min(most, _WITHOUT_ASKING)):
        if asked and not anyone(running):
            break
        products += 1
        Hp = hessian(Direction.of(p, structure)).flat(structure)
        curvature = structure.dot(p, Hp)
        curved = curvature > 0
        if not count:
            x = where_members(curved | ~running, x, z)
        running = running & curved
        step = torch.where(running, rz / curvature, zero)[..., None]
        x, r = torch.addcmul(x, step, p), torch.addcmul(r, step, Hp, value=-1)
        z = precondition(Direction.of(r, structure)).flat(structure)
        before, rz = rz, structure.dot(r, z)
        running = running & (rz > least)
        p = torch.addcmul(z, torch.where(running, rz / before, zero)[..., None], p)
    return Direction.of(x, structure), products


def still_solved(e: Expectation, local: Local, frame: Frame) -> Callable[[Direction], Direction]:
    """The inverse of the Hessian as it would be if H stood still, (Wδ, tril[WT] + γ diag T), as a preconditioner.

    Column j of tril[WT] is the trailing square of W times that of T.  With W = LᵀL the trailing squares of L are their
    factors, so that all columns are solved at once by T₀ = L⁻¹ tril[L⁻ᵀ R], and each of the D terms γ T_jj takes a
    correction of rank one.  Where C is upper triangular, rows and leading squares of W = LLᵀ take their place.
    """
    structure, gamma = frame.structure, e.temperature
    assert isinstance(structure, FullAlgebra)
    eye = structure.eye(local.a)
    shifted = torch.add(local.P, eye, alpha=(1 + _SHIFT) * gamma)
    root, ok = structure.cholesky(shifted) if frame.upper else structure.reverse_cholesky(shifted)
    root = where_members(ok, root, eye)
    inverse, diagonal = structure.inverse(root), structure.diagonal(root)
    transposed, share = structure.transpose(inverse), gamma * diagonal / (diagonal.square() + gamma)
    solve = _mean_solved(e, frame) or _solution(structure, inverse, frame.upper)

    def solved(x: Direction) -> Direction:
        if frame.upper:
            first = structure.matmul(structure.tril(structure.matmul(x.T, transposed)), inverse)
            correction = structure.scale_columns(transposed, share * structure.diagonal(first))
            T = structure.tril(first) - structure.transpose(correction)
        else:
            T = structure.matmul(inverse, structure.tril(structure.matmul(transposed, x.T)))
            T = T - structure.scale_columns(inverse, share * structure.diagonal(T))
        return Direction(solve(x.delta), T)

    return solved


def _mean_solved(e: Expectation, frame: Frame) -> Callable[[Tensor], Tensor] | None:
    """The solution of W δ = x with all of W, of which a narrow structure keeps a part, where D is moderate."""
    structure = frame.structure
    if not structure.widest < structure.dim <= _WIDE or isinstance(e.derivative, Framed):
        return None
    dense, C = Dense(structure.dim), frame.dense()
    root, ok = dense.reverse_cholesky(dense.conjugate(C, e.derivative.raw().H))
    return _solution(dense, dense.inverse(where_members(ok, root, dense.eye(frame.mean).expand_as(root))), False)


def _solution(structure: FullAlgebra, inverse: Structured, upper: bool) -> Callable[[Tensor], Tensor]:
    """The solution of LᵀL δ = x, or of LLᵀ δ = x where ``upper``, from L⁻¹."""
    if upper:
        return lambda x: structure.tmv(inverse, structure.mv(inverse, x))
    return lambda x: structure.mv(inverse, structure.tmv(inverse, x))
