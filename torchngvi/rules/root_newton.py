"""Newton's method in the mean and the root: m' = m + ρCδ, C' = C(I + ρT), by conjugate gradients.

For a convex ℓ the bound L is convex in (m, C), since m + Cz is linear in them and -log det C is convex; in (m, V) or
(m, S) it is not.  With T lower triangular (upper triangular where C is), W = Cᵀ H C and Cᵀ dg, Cᵀ dH C the changes of
the mean gradient and the mean Hessian along (δ, T), its Hessian at (m, C) is the map

    (δ, T) -> ( Cᵀ dg,  tril[Cᵀ dH C + W T] + γ diag T )

and is positive semi-definite there.  A packet that knows these changes, see `Sites.change`, is asked for them without
a new expectation; of any other packet H is taken to stand still, dg = H Cδ.  The system is solved by conjugate
gradients, preconditioned by its inverse as it would be if H stood still, to a relative residual that falls with the
gradient (Dembo, Eisenstat and Steihaug 1982), which makes the convergence faster than linear.
"""

from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import (
    Change,
    Congruence,
    Expectation,
    Frame,
    Framed,
    Local,
    Path,
    Posterior,
    Rule,
    may_be_asked,
    once,
    where_members,
)
from torchngvi.structures import Dense, FullAlgebra
from torchngvi.structures.pattern import Structured

_RESIDUAL = 0.3  # relative residual of the system, and its share of the natural norm where that is below 1
_SHIFT = 0.3  # of W in the preconditioner, in units of γ: where the likelihood is flat, W⁻¹ leads far out
_WIDE = 500  # coordinates up to which the mean is preconditioned by all of W, where q keeps a part of it
_INSIDE = 0.9  # share of the way to the border of the cone that a step may go
_WITHOUT_ASKING = 16  # products where the host is not to wait for a device


class _Move(NamedTuple):
    """A vector of the system: δ of the mean, and T as the structure stores the root."""

    delta: Tensor  # (*batch, D)
    T: Structured

    def plus(self, factor: Tensor, other: "_Move", structure: FullAlgebra) -> "_Move":
        """The sum with a multiple of another, a factor for each member."""
        return _Move(self.delta + factor[..., None] * other.delta, self.T + structure.scaled(factor, other.T))

    def dot(self, other: "_Move", structure: FullAlgebra) -> Tensor:
        """The inner product, (*batch,)."""
        return structure.dot(self.delta, other.delta) + structure.total(
            (self.T * other.T).flatten(-structure.rank).sum(-1)
        )

    def where(self, mask: Tensor, other: "_Move") -> "_Move":
        """Take this one for the members (*batch,) of the mask, and the other one elsewhere."""
        return _Move(where_members(mask, self.delta, other.delta), where_members(mask, self.T, other.T))


@final
class RootNewton(Rule):
    """Newton's step in (m, C), along the line on which the bound of a log-concave model is convex.

    One wants it for generalised linear models and others whose expectations are exact and cheap beside their products:
    from Laplace's approximation it needs about four evaluations.  `torchngvi.NewtonCG` is the method with this rule.
    The structure of q must admit products of symmetric matrices.

    Args:
        most: the largest number of products with the Hessian in one step, at least 1; each costs two products of the
            size of the design.

    Raises:
        InputError: if ``most`` is below 1.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear, NaturalGradientVI
    >>> from torchngvi.stepsizes import Backtracking
    >>> q, model = CholeskyGaussian(2), GeneralizedLinear(torch.eye(2), [0.0, 1.0])
    >>> opt = NaturalGradientVI(q, RootNewton(), step_size=Backtracking())
    >>> first, second = opt.step(model), opt.step(model)
    >>> bool(second < first)
    True
    """

    emits = Congruence
    natural = False
    full_algebra = True

    def __init__(self, most: int = 40) -> None:
        if most < 1:
            raise InputError(f"most is the number of products in one step, at least 1; got {most}.")
        self.most = most
        self._products = 0

    @property
    def products(self) -> int:
        """The number of products with the Hessian so far, of all members of a batch at once."""
        return self._products

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path ρ -> (m + γρCδ, C(I + γρT)), whose step of Newton is that of ρ = 1/γ."""
        local, frame, structure = q.local(e), q.frame(), q.structure
        assert isinstance(structure, FullAlgebra)
        unit = e.temperature or 1.0
        eye = structure.eye(local.a)
        found: list[_Move] = []

        def move() -> _Move:
            if not found:
                found.append(self._solved(q, e, local, frame))
            return found[0]

        def at(rho: Tensor) -> Congruence:
            delta, T = move()
            share = unit * rho
            inverse = structure.inverse(eye + structure.scaled(share, T))
            N = structure.gram(inverse, torch.ones_like(delta), frame.upper)
            return Congruence(N, structure.smv(N, share[..., None] * delta))

        gradient = _Move(local.a, structure.tril(local.P))
        slope = once(lambda: -unit * gradient.dot(move(), structure))
        return Path(at, once(lambda: q.norm2(local)), slope)

    def _solved(self, q: Posterior, e: Expectation, local: Local, frame: Frame) -> _Move:
        """The direction of Newton, cut short before it leaves the cone."""
        structure, gamma = q.structure, e.temperature
        assert isinstance(structure, FullAlgebra)
        W = local.P + gamma * structure.eye(local.a)
        change = e.derivative.change(frame) or _still(W, structure)

        def hessian(x: _Move) -> _Move:
            a, change_W = change(x.delta, x.T)
            product = structure.matmul(x.T, W) if frame.upper else structure.matmul(W, x.T)
            T = structure.tril(change_W + product)
            return _Move(a, structure.with_diagonal(T, structure.diagonal(T) + gamma * structure.diagonal(x.T)))

        gradient = _Move(-local.a, -structure.tril(local.P))
        norm = q.norm2(local).sqrt() / (gamma or 1.0)
        accuracy = _RESIDUAL * norm.clamp_max(1.0)
        x = self._conjugate_gradients(hessian, _still_solved(e, frame, W), gradient, accuracy, structure)
        shrinks = (-structure.diagonal(x.T)).amax(-1)
        share = torch.where(shrinks >= 1, _INSIDE / shrinks, 1.0)
        return _Move(share[..., None] * x.delta, structure.scaled(share, x.T))

    def _conjugate_gradients(
        self,
        hessian: Callable[[_Move], _Move],
        precondition: Callable[[_Move], _Move],
        r: _Move,
        accuracy: Tensor,
        structure: FullAlgebra,
    ) -> _Move:
        """Solve H x = r, each member to its own accuracy; where curvature is not positive, end at what there is."""
        x = _Move(torch.zeros_like(r.delta), torch.zeros_like(r.T))
        p = z = precondition(r)
        rz = first = r.dot(z, structure)
        running = first > 0
        asked = may_be_asked(running)
        for count in range(self.most if asked else min(self.most, _WITHOUT_ASKING)):
            if asked and not bool(running.any()):
                break
            self._products += 1
            Hp = hessian(p)
            curvature = p.dot(Hp, structure)
            curved = curvature > 0
            if not count:
                x = x.where(curved | ~running, z)
            running = running & curved
            step = torch.where(running, rz / curvature, 0.0)
            x, r = x.plus(step, p, structure), r.plus(-step, Hp, structure)
            z = precondition(r)
            before, rz = rz, torch.where(running, r.dot(z, structure), rz)
            running = running & (rz > accuracy.square() * first)
            p = z.plus(torch.where(running, rz / before, 0.0), p, structure)
        return x


def _still_solved(e: Expectation, frame: Frame, W: Structured) -> Callable[[_Move], _Move]:
    """The inverse of the Hessian as it would be if H stood still, (Wδ, tril[WT] + γ diag T), as a preconditioner.

    Column j of tril[WT] is the trailing square of W times that of T.  With W = LᵀL the trailing squares of L are their
    factors, so that all columns are solved at once by T₀ = L⁻¹ tril[L⁻ᵀ R], and each of the D terms γ T_jj takes a
    correction of rank one.  Where C is upper triangular, rows and leading squares of W = LLᵀ take their place.
    """
    structure, gamma = frame.structure, e.temperature
    assert isinstance(structure, FullAlgebra)
    shifted = W + _SHIFT * gamma * structure.eye(frame.mean)
    root, ok = structure.cholesky(shifted) if frame.upper else structure.reverse_cholesky(shifted)
    root = where_members(ok, root, structure.eye(frame.mean).expand_as(root))
    inverse, diagonal = structure.inverse(root), structure.diagonal(root)
    transposed, share = structure.transpose(inverse), gamma / ((1 + gamma / diagonal.square()) * diagonal)
    solve = _mean_solved(e, frame) or _solution(structure, inverse, frame.upper)

    def solved(x: _Move) -> _Move:
        if frame.upper:
            first = structure.matmul(structure.tril(structure.matmul(x.T, transposed)), inverse)
            correction = structure.scale_columns(transposed, share * structure.diagonal(first))
            T = structure.tril(first) - structure.transpose(correction)
        else:
            T = structure.matmul(inverse, structure.tril(structure.matmul(transposed, x.T)))
            T = T - structure.scale_columns(inverse, share * structure.diagonal(T))
        return _Move(solve(x.delta), T)

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


def _still(W: Structured, structure: FullAlgebra) -> Change:
    """The changes of a and W where H stands still, as for a quadratic ℓ: Cᵀ dg = Wδ and dH = 0."""
    return lambda delta, T: (structure.smv(W, delta), torch.zeros_like(T))
