"""What every check says of a part, and how it compares: whole sentences, and one tolerance for each kind of identity.

* `EXACT`: the same formula in another order of operations;
* `IDENTITY`: an identity that passes through a solve, a factorisation or quadrature;
* `DIFFERENCE`: a derivative against differences;
* `SINGLE`: float32 against float64.

All are relative to the largest entry of what is expected, or to 1 where that is smaller, on problems of order one.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchngvi.structures import Pattern
from torchngvi.structures.pattern import Structured

EXACT, IDENTITY, DIFFERENCE, SINGLE = 1e-12, 1e-10, 1e-6, 1e-3
FAILURE_RATE = 1e-6  # of all z-tests of one comparison together
DTYPE = torch.float64

_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default}


@dataclass(frozen=True)
class Claim:
    """A part under test, and the input for which something is said of it.

    >>> claim = Claim("MyRule").at("a batch of (2, 3)")
    >>> claim.holds(False, "its path must begin at q")
    Traceback (most recent call last):
    AssertionError: MyRule: its path must begin at q, for a batch of (2, 3).
    """

    part: str
    where: str = ""

    def at(self, where: str) -> "Claim":
        """Return a claim about the same part, for another input."""
        return replace(self, where=where)

    def fail(self, sentence: str) -> None:
        """Raise an AssertionError that names the part, says the sentence and names the input."""
        raise AssertionError(f"{self.part}: {sentence}{f', for {self.where}' if self.where else ''}.")

    def holds(self, truth: bool | Tensor, sentence: str) -> None:
        """Fail unless a statement is true; the sentence says what must be."""
        if not bool(truth):
            self.fail(sentence)

    def close(self, sentence: str, actual: Tensor, expected: Tensor, tolerance: float = EXACT) -> None:
        """Fail unless two tensors agree in shape, dtype and entries; the sentence says which identity that is."""
        if not isinstance(actual, Tensor) or actual.shape != expected.shape:
            got = tuple(actual.shape) if isinstance(actual, Tensor) else type(actual).__name__
            self.fail(f"{sentence}; its shape must be {tuple(expected.shape)}, got {got}")
        if actual.dtype != expected.dtype:
            self.fail(f"{sentence}; its dtype must be {expected.dtype}, got {actual.dtype}")
        error = relative_error(actual, expected)
        if not error <= tolerance:  # NaN fails
            self.fail(f"{sentence}; it is off by {error:.1e} where {tolerance:.0e} is allowed")

    def same(self, sentence: str, actual: Tensor, expected: Tensor) -> None:
        """Fail unless two tensors are equal to the last bit."""
        self.holds(actual.shape == expected.shape and torch.equal(actual, expected), sentence)

    def unbiased(self, sentence: str, estimates: Tensor, expected: Tensor) -> None:
        """Fail unless the mean of independent estimates (R, ...) is the expected one, by z-tests over all entries."""
        if estimates.shape[1:] != expected.shape:
            self.fail(f"{sentence}; its shape must be {tuple(expected.shape)}, got {tuple(estimates.shape[1:])}")
        rounding = IDENTITY * expected.abs().max().clamp_min(1.0)
        spread = estimates.std(0) / math.sqrt(len(estimates)) + rounding
        error = (estimates.mean(0) - expected).abs()
        z = float((error / spread).max())
        bound = NormalDist().inv_cdf(1 - FAILURE_RATE / (2 * expected.numel()))
        if not z <= bound:
            self.fail(
                f"{sentence}; the mean of {len(estimates)} estimates is off by {float(error.max()):.1e}, and by "
                f"{z:.1f} standard errors where {bound:.1f} are allowed"
            )

    @contextmanager
    def works(self, what: str) -> Iterator[None]:
        """Open a block in which whatever is raised becomes a sentence of this claim, with the error as its cause."""
        try:
            yield
        except AssertionError as error:
            if str(error).startswith(self.part):
                raise
            self.fail(f"{what} raised {type(error).__name__}")
        except Exception as error:  # any error of somebody else's part: it is told, not hidden
            raise AssertionError(
                f"{self.part}: {what} raised {type(error).__name__} ({error}), for {self.where}."
            ) from error


class NoReads(TorchDispatchMode):
    """A mode in which each read of a tensor's value by the host is an error: the host would wait for a device.

    >>> with NoReads():
    ...     torch.ones(1).item()
    Traceback (most recent call last):
    RuntimeError: aten._local_scalar_dense.default reads a value back from the device
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse item(), bool(), torch.equal and nonzero, and let everything else pass."""
        if func in _READS:
            raise RuntimeError(f"{func} reads a value back from the device")
        return func(*args, **(kwargs or {}))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Compute the largest difference of two tensors, relative to the largest expected entry or to 1.

    >>> relative_error(torch.tensor([15.0]), torch.tensor([10.0]))
    0.5
    """
    if not expected.numel():
        return 0.0
    scale = max(1.0, float(expected.detach().abs().max()))
    return float((actual.detach() - expected.detach()).abs().max()) / scale


def normal(*shape: int, seed: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """Draw standard normal numbers that depend on the seed and the shape only.

    >>> torch.equal(normal(2, seed=1), normal(2, seed=1))
    True
    """
    return torch.randn(shape, dtype=DTYPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def derivative(function: Callable[[float], Tensor], step: float = 5e-5) -> Tensor:
    """Compute f'(0) from values at 0 and to the right of it, with an error of the order step⁴.

    >>> round(derivative(lambda h: torch.tensor(2.0 + h, dtype=torch.float64).square()).item(), 8)
    4.0
    """
    weights = (-25.0, 48.0, -36.0, 16.0, -3.0)
    terms = (weight * function(index * step) for index, weight in enumerate(weights))
    return torch.stack(list(terms)).sum(0) / (12 * step)


def matvec(matrix: Tensor, x: Tensor) -> Tensor:
    """Multiply vectors by matrices, A x, with samples on the left of the batch.

    >>> matvec(2 * torch.eye(2), torch.ones(3, 2)).shape
    torch.Size([3, 2])
    """
    return torch.einsum("...ij,...j->...i", matrix, x)


def tensors_in(packet: Any) -> list[Tensor]:
    """Collect every tensor of nested tuples, such as a move or a packet.

    >>> len(tensors_in((torch.ones(1), (torch.ones(1), 2.0))))
    2
    """
    if isinstance(packet, Tensor):
        return [packet]
    return [tensor for part in packet for tensor in tensors_in(part)] if isinstance(packet, tuple) else []


def kind(part: object) -> str:
    """Return the name of the class of a part, by which the sentences call it.

    >>> kind(torch.nn.Linear(1, 1))
    'Linear'
    """
    return type(part).__name__


def batch_text(batch: tuple[int, ...]) -> str:
    """Say in words for how many posteriors something is claimed.

    >>> batch_text((2, 3)), batch_text(())
    ('a batch of (2, 3)', 'one posterior')
    """
    return f"a batch of {batch}" if batch else "one posterior"


# Random dense matrices in a pattern, and a pattern whose verbs are those of dense matrices


def mask(pattern: Pattern) -> Tensor:
    """Mark the entries that a symmetric matrix of the pattern has.

    >>> from torchngvi.structures import block_diagonal
    >>> mask(block_diagonal([1, 2])).tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
    """
    rows, columns = (x.flatten() for x in pattern.positions())
    kept = torch.zeros(pattern.dim, pattern.dim, dtype=DTYPE)
    kept[rows, columns] = kept[columns, rows] = 1.0
    return kept


def root_in(pattern: Pattern, batch: tuple[int, ...] = (), seed: int = 0) -> Tensor:
    """Draw a lower triangular matrix of the pattern, with a diagonal between about 0.4 and 1.2.

    >>> from torchngvi.structures import Dense
    >>> torch.equal(root_in(Dense(3)), root_in(Dense(3)).tril())
    True
    """
    x = 0.4 * normal(*batch, pattern.dim, pattern.dim, seed=seed)
    lower = x.tril(-1) + torch.diag_embed(0.7 * torch.exp(0.6 * x.diagonal(dim1=-2, dim2=-1)))
    return lower * mask(pattern)


def symmetric_in(pattern: Pattern, batch: tuple[int, ...] = (), seed: int = 0) -> Tensor:
    """Draw a symmetric, indefinite matrix of the pattern.

    >>> from torchngvi.structures import Dense
    >>> torch.equal(symmetric_in(Dense(3)), symmetric_in(Dense(3)).mT)
    True
    """
    x = normal(*batch, pattern.dim, pattern.dim, seed=seed)
    return 0.5 * (x + x.mT) * mask(pattern)


def definite_in(pattern: Pattern, batch: tuple[int, ...] = (), seed: int = 0) -> Tensor:
    """Draw a positive definite matrix of the pattern, the square L Lᵀ of a root of it.

    >>> from torchngvi.structures import Dense
    >>> bool(torch.linalg.eigvalsh(definite_in(Dense(3))).min() > 0)
    True
    """
    root = root_in(pattern, batch, seed)
    return root @ root.mT


def definite(dim: int, batch: tuple[int, ...] = (), seed: int = 0) -> Tensor:
    """Draw a positive definite curvature with every entry.

    >>> definite(3, (2,)).shape
    torch.Size([2, 3, 3])
    """
    x = normal(*batch, dim, dim, seed=seed)
    return x @ x.mT / dim + 0.3 * torch.eye(dim, dtype=DTYPE)


@dataclass(frozen=True)
class WrittenOut(Pattern):
    """An arrow, every coordinate beside the last one, whose verbs write their matrices out: slow, and plain to see.

    >>> WrittenOut(3).to_dense(torch.arange(1.0, 6.0)).tolist()
    [[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [4.0, 5.0, 3.0]]
    """

    dim: int

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The trailing shape of a stored matrix, (2D - 1,): the D diagonal entries before the D - 1 others."""
        return (2 * self.dim - 1,)

    @property
    def widest(self) -> int:  # type: ignore[override]
        """The largest square is that of a coordinate and the last one."""
        return min(self.dim, 2)

    def positions(self) -> tuple[Tensor, Tensor]:
        """Return row and column of the diagonal entries, then of the last row."""
        place, last = torch.arange(self.dim), torch.full((self.dim - 1,), self.dim - 1)
        return torch.cat([place, last]), torch.cat([place, place[:-1]])

    def mv(self, root: Structured, x: Tensor) -> Tensor:
        """Multiply vectors by the root, written out."""
        return matvec(self.to_dense(root), x)

    def tmv(self, root: Structured, x: Tensor) -> Tensor:
        """Multiply vectors by the transposed root, written out."""
        return matvec(self.to_dense(root).mT, x)

    def solve(self, root: Structured, x: Tensor) -> Tensor:
        """Solve L y = x by forward substitution with the root written out."""
        return torch.linalg.solve_triangular(self.to_dense(root), x[..., None], upper=False)[..., 0]

    def tsolve(self, root: Structured, x: Tensor) -> Tensor:
        """Solve Lᵀ y = x by backward substitution with the root written out."""
        return torch.linalg.solve_triangular(self.to_dense(root).mT, x[..., None], upper=True)[..., 0]

    def matmul(self, left: Structured, right: Structured) -> Structured:
        """Multiply two roots that are written out."""
        return self.from_dense(self.to_dense(left) @ self.to_dense(right))

    def tmatmul(self, root: Structured, symmetric: Structured) -> Structured:
        """Keep the stored entries of Lᵀ A, which are on and below the diagonal."""
        return self.from_dense(self.to_dense(root).mT @ self.full(symmetric))

    def inverse(self, root: Structured) -> Structured:
        """Invert the root by forward substitution with it written out."""
        dense = self.to_dense(root)
        eye = torch.eye(self.dim, dtype=dense.dtype, device=dense.device)
        return self.from_dense(torch.linalg.solve_triangular(dense, eye.expand_as(dense), upper=False))

    def cholesky(self, symmetric: Structured) -> tuple[Structured, Tensor]:
        """Factor A = L Lᵀ, with the identity for L and False beside it where there is none."""
        factor, info = torch.linalg.cholesky_ex(self.full(symmetric))
        factor = self.from_dense(factor)
        ok = (info == 0) & self.is_finite(factor)
        return torch.where(ok[..., None], factor, self.eye(self.diagonal(factor))), ok

    def congruence(self, root: Structured, symmetric: Structured) -> Structured:
        """Keep the stored entries of L A Lᵀ, written out."""
        dense = self.to_dense(root)
        return self.from_dense(dense @ self.full(symmetric) @ dense.mT)

    def lower(self, left: Tensor, right: Tensor) -> Structured:
        """Keep the stored entries of Σ_n left_n right_nᵀ, written out."""
        return self.from_dense(left.mT @ right)
