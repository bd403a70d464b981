"""What a posterior makes of each move that it takes: its definition, and what leaves the cone."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from torchngvi.interfaces import (
    Affine,
    Congruence,
    Coordinates,
    LogTangent,
    Move,
    Posterior,
    Root,
    RootTangent,
    Tangent,
)
from torchngvi.testing.claims import DTYPE, EXACT, IDENTITY, Claim, matvec, normal
from torchngvi.testing.matrices import definite_in, mask, root_in, symmetric_in
from torchngvi.testing.problems import Normal, after, moments


def check_moves(claim: Claim, q: Posterior) -> None:
    """Check every move of `takes` against its definition, and each with an entry that is not finite.

    >>> from torchngvi import CholeskyGaussian
    >>> check_moves(Claim("CholeskyGaussian"), CholeskyGaussian(3, dtype=torch.float64))
    """
    known: dict[type, Callable[[Claim, Posterior], Move]] = {
        Congruence: _congruence,
        Tangent: _tangent,
        RootTangent: _tangent,
        LogTangent: _log_tangent,
        Affine: _affine,
        Root: _root,
    }
    for taken in q.takes:
        if taken not in known:
            claim.fail(f"`takes` names {taken.__name__}, which is none of the moves of torchngvi.interfaces")
    for taken, check in known.items():
        if taken in q.takes:
            _not_finite(claim, q, check(claim, q))


def _taken(claim: Claim, q: Posterior, move: Move) -> Normal:
    """The moments after a move that must stay in the cone."""
    before = [x.clone() for x in q.coordinates]
    there, ok = after(q, move)
    sentence = f"moved() must tell that a small {type(move).__name__} stays in the cone, (*batch,)"
    claim.holds(ok.shape == q.batch_shape and bool(ok.all()), sentence)
    for now, was in zip(q.coordinates, before, strict=True):
        claim.same("moved() must leave q as it is", now, was)
    return there


def _compare(claim: Claim, move: Move, there: Normal, mean: Tensor, covariance: Tensor) -> None:
    name = type(move).__name__
    claim.close(f"the mean after a {name} must be what it says", there.mean, mean, IDENTITY)
    claim.close(f"the covariance after a {name} must be what it says", there.covariance, covariance, IDENTITY)


def _congruence(claim: Claim, q: Posterior) -> Move:
    batch, C, mean = tuple(q.batch_shape), q.frame().dense(), q.frame().mean
    N, f = definite_in(q.structure, batch, 51), normal(*batch, q.dim, seed=52)
    stored = q.structure.from_dense(N)
    move, inverse = Congruence(stored, f), torch.linalg.inv(N)
    there = _taken(claim, q, move)
    _compare(claim, move, there, mean + matvec(C, matvec(inverse, f)), C @ inverse @ C.mT)
    ok = q.moved(Congruence(_with_first(q, stored, -stored), f))[1]
    claim.holds(ok.tolist() == _all_but_first(q), "moved() must refuse a Congruence by a negative matrix")
    return move


def _tangent(claim: Claim, q: Posterior) -> Move:
    change = _change(q)
    move = RootTangent(change) if RootTangent in q.takes else Tangent(change)
    new, ok = q.moved(move)
    claim.holds(ok.all(), "moved() must tell that a small Tangent stays in the cone")
    for name, now, was, by in zip(("vector", "matrix"), new, q.coordinates, change, strict=True):
        claim.close(f"a Tangent must add its change to the {name}", now, was + by, EXACT)
    _taken(claim, q, move)
    gone = Coordinates(change.vector, _with_first(q, change.matrix, -q.coordinates.matrix))
    ok = q.moved(type(move)(gone))[1]
    claim.holds(ok.tolist() == _all_but_first(q), "moved() must refuse a Tangent to a singular matrix")
    return move


def _log_tangent(claim: Claim, q: Posterior) -> Move:
    move, structure = LogTangent(_change(q)), q.structure
    new, _ = q.moved(move)
    dense, by = (structure.to_dense(x) for x in (q.coordinates.matrix, move.change.matrix))
    diagonal = dense.diagonal(dim1=-2, dim2=-1) * by.diagonal(dim1=-2, dim2=-1).exp()
    expected = (dense + by).tril(-1) + torch.diag_embed(diagonal)
    claim.close("a LogTangent must move log Λ_ii and Λ_ij", structure.to_dense(new.matrix), expected, EXACT)
    _taken(claim, q, move)
    return move


def _change(q: Posterior) -> Coordinates:
    """A small one, in the kind of matrix that q holds."""
    batch, structure = tuple(q.batch_shape), q.structure
    dense = root_in(structure, batch, 53) if RootTangent in q.takes else symmetric_in(structure, batch, 53)
    return Coordinates(normal(*batch, q.dim, seed=54), 0.02 * structure.from_dense(dense))


def _affine(claim: Claim, q: Posterior) -> Move:
    batch, (mean, V) = tuple(q.batch_shape), moments(q)
    M = torch.eye(q.dim, dtype=DTYPE) + 0.2 * normal(*batch, q.dim, q.dim, seed=55) * mask(q.structure)
    move = Affine(q.structure.from_dense(M), normal(*batch, q.dim, seed=56))
    _compare(claim, move, _taken(claim, q, move), mean + move.s, M @ V @ M.mT)
    return move


def _root(claim: Claim, q: Posterior) -> Move:
    batch = tuple(q.batch_shape)
    L = root_in(q.structure, batch, 57)
    move = Root(normal(*batch, q.dim, seed=58), q.structure.from_dense(L))
    _compare(claim, move, _taken(claim, q, move), move.mean, L @ L.mT)
    return move


def _with_first(q: Posterior, tensor: Tensor, other: Tensor) -> Tensor:
    """The tensor with the first member of another."""
    new = tensor.clone(memory_format=torch.contiguous_format)
    members = (q.batch_shape.numel(), -1)
    new.reshape(members)[0] = other.reshape(members)[0]
    return new


def _all_but_first(q: Posterior) -> list[bool]:
    ok = torch.ones(q.batch_shape, dtype=torch.bool)
    ok.reshape(-1)[0] = False
    return ok.tolist()


def _not_finite(claim: Claim, q: Posterior, move: Move) -> None:
    """One entry of one member in each tensor of the move."""
    tensors = move.change if isinstance(move, Tangent) else move
    whole, _ = after(q, move)
    for index, value in itertools.product(range(len(tensors)), (torch.nan, torch.inf)):
        broken = tensors[index].clone(memory_format=torch.contiguous_format)
        broken.reshape(-1)[broken.numel() // q.batch_shape.numel() - 1] = value
        given = [broken if index == other else tensor for other, tensor in enumerate(tensors)]
        bad = type(move)(Coordinates(*given)) if isinstance(move, Tangent) else type(move)(*given)
        there, ok = after(q, bad)
        name = type(move).__name__
        claim.holds(
            ok.tolist() == _all_but_first(q),
            f"moved() must refuse a {name} with an entry {value} in its tensor {index}, for that member alone",
        )
        for now, was in zip(there, whole, strict=True):
            members = (q.batch_shape.numel(), -1)
            others = now.reshape(members)[1:], was.reshape(members)[1:]
            claim.close(f"a {name} that is refused for one member must be taken for the others", *others, IDENTITY)
