"""What every check says of a part, and how it compares: whole sentences, one tolerance a kind of identity.

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

EXACT, IDENTITY, DIFFERENCE, SINGLE = 1e-12, 1e-10, 1e-6, 1e-3
FAILURE_RATE = 1e-6  # of all z-tests of one comparison together
DTYPE = torch.float64

_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default}


@dataclass(frozen=True)
class Claim:
    """A part under test, and the input for which something is said of it."""

    part: str
    where: str = ""

    def at(self, where: str) -> "Claim":
        """The same part, for another input."""
        return replace(self, where=where)

    def fail(self, sentence: str) -> None:
        """Raise an AssertionError that says so."""
        raise AssertionError(f"{self.part}: {sentence}{f', for {self.where}' if self.where else ''}.")

    def holds(self, truth: bool | Tensor, sentence: str) -> None:
        """The truth of a statement; the sentence says what must be."""
        if not bool(truth):
            self.fail(sentence)

    def close(self, sentence: str, actual: Tensor, expected: Tensor, tolerance: float = EXACT) -> None:
        """Two tensors of one shape and dtype whose entries agree; the sentence says which identity that is."""
        if not isinstance(actual, Tensor) or actual.shape != expected.shape:
            got = tuple(actual.shape) if isinstance(actual, Tensor) else type(actual).__name__
            self.fail(f"{sentence}; its shape must be {tuple(expected.shape)}, got {got}")
        if actual.dtype != expected.dtype:
            self.fail(f"{sentence}; its dtype must be {expected.dtype}, got {actual.dtype}")
        error = relative_error(actual, expected)
        if not error <= tolerance:  # NaN fails
            self.fail(f"{sentence}; it is off by {error:.1e} where {tolerance:.0e} is allowed")

    def same(self, sentence: str, actual: Tensor, expected: Tensor) -> None:
        """Equal to the last bit."""
        self.holds(actual.shape == expected.shape and torch.equal(actual, expected), sentence)

    def unbiased(self, sentence: str, estimates: Tensor, expected: Tensor) -> None:
        """The mean of independent estimates (R, ...) is the expected one, by z-tests over all entries."""
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
        """Whatever is raised inside becomes a sentence, with the error as its cause."""
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
    """Makes each read of a tensor's value by the host an error, as it would make the host wait for an accelerator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse item(), bool(), torch.equal and nonzero."""
        if func in _READS:
            raise RuntimeError(f"{func} reads a value back from the device")
        return func(*args, **(kwargs or {}))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected entry or 1; NaN where either is."""
    if not expected.numel():
        return 0.0
    scale = max(1.0, float(expected.detach().abs().max()))
    return float((actual.detach() - expected.detach()).abs().max()) / scale


def normal(*shape: int, seed: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """Standard normal draws that depend on the seed and the shape only."""
    return torch.randn(shape, dtype=DTYPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def derivative(function: Callable[[float], Tensor], step: float = 5e-5) -> Tensor:
    """f'(0) from values at 0 and to the right of it, with an error of the order step⁴."""
    weights = (-25.0, 48.0, -36.0, 16.0, -3.0)
    terms = (weight * function(index * step) for index, weight in enumerate(weights))
    return torch.stack(list(terms)).sum(0) / (12 * step)


def matvec(matrix: Tensor, x: Tensor) -> Tensor:
    """A x, for samples on the left of the batch."""
    return torch.einsum("...ij,...j->...i", matrix, x)


def tensors_in(packet: Any) -> list[Tensor]:
    """Every tensor of nested tuples, of a move or of a packet."""
    if isinstance(packet, Tensor):
        return [packet]
    return [tensor for part in packet for tensor in tensors_in(part)] if isinstance(packet, tuple) else []


def kind(part: object) -> str:
    """The name of its class."""
    return type(part).__name__


def batch_text(batch: tuple[int, ...]) -> str:
    """In words."""
    return f"a batch of {batch}" if batch else "one posterior"
