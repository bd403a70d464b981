"""What every check says of a part, and how it compares: whole sentences, and one tolerance for each kind of identity.

* `EXACT`: the same formula in another order of operations;
* `IDENTITY`: an identity that passes through a solve, a factorisation or quadrature;
* `DIFFERENCE`: a derivative against differences;
* `SINGLE`: float32 against float64.

All are relative to the largest entry of what is expected, or to 1 where that is smaller, on problems of order one.
"""

import copy
import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchngvi.interfaces import Cost, Expectation, Move, Posterior, Raw
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian, NaturalGaussian, PrecisionCholeskyGaussian
from torchngvi.structures import Pattern, arrow, block_diagonal

EXACT, IDENTITY, DIFFERENCE, SINGLE = 1e-12, 1e-10, 1e-6, 1e-3
FAILURE_RATE = 1e-6  # of all z-tests of one comparison together
DTYPE = torch.float64
BATCHES: tuple[tuple[int, ...], ...] = ((), (2, 3))  # of posteriors
_T = TypeVar("_T")

_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default}


@dataclass(frozen=True)
class Claim:
    """A part under test, and the input for which something is said of it."""

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

    def keeps_state(
        self,
        state: dict[str, Any],
        call: Callable[[], tuple[_T, dict[str, Any]]],
        reads: bool = True,
        grows: bool = False,
    ) -> tuple[_T, dict[str, Any]]:
        """Fail unless a call hands back new entries of its state, reading no value and keeping shapes where it must."""
        before = copy.deepcopy(state)
        with nullcontext() if reads else NoReads():
            result, new = call()
        self.holds(set(new) <= set(state), f"it must hand back state that init has made, {sorted(state)}")
        changed = unlike(state, before)
        sentence = f"it must hand back new state, not write to {changed!r}: the step may not be taken"
        self.holds(changed is None, sentence)
        for name, value in new.items():
            if not grows and isinstance(was := before[name], Tensor):
                self.holds(value.shape == was.shape, f"its state {name!r} must keep its shape {tuple(was.shape)}")
        return result, new

    def resumes(self, q: Posterior, optimizer: Callable[[Any], NaturalGradientVI], target: Any) -> NaturalGradientVI:
        """Fail unless a run goes on from the state dict of its optimizer, which a file held; the optimizer."""
        with torch.random.fork_rng(devices=[]):
            first = copy.deepcopy(q)
            opt = optimizer(first)
            for seed in (1, 2):
                torch.manual_seed(seed)
                opt.step(target)
            file = io.BytesIO()
            torch.save(opt.state_dict(), file)
            file.seek(0)
            second = copy.deepcopy(first)
            resumed = optimizer(second)
            resumed.load_state_dict(torch.load(file, weights_only=True))
            for each in (opt, resumed):
                torch.manual_seed(3)
                each.step(target)
        for one, two in zip(first.coordinates, second.coordinates, strict=True):
            self.same("a run must resume from the state dict of its optimizer, bit for bit", one, two)
        self.holds(not torch.equal(first.coordinates.vector, q.coordinates.vector), "a small step must move q")
        return opt

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
    """A mode in which each read of a tensor's value by the host is an error: the host would wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse item(), bool(), torch.equal and nonzero, and let everything else pass."""
        if func in _READS:
            raise RuntimeError(f"{func} reads a value back from the device")
        return func(*args, **(kwargs or {}))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Compute the largest difference of two tensors, relative to the largest expected entry or to 1."""
    if not expected.numel():
        return 0.0
    scale = max(1.0, float(expected.detach().abs().max()))
    return float((actual.detach() - expected.detach()).abs().max()) / scale


def normal(*shape: int, seed: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """Draw standard normal numbers that depend on the seed and the shape only."""
    return torch.randn(shape, dtype=DTYPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def derivative(function: Callable[[float], Tensor], step: float = 5e-5) -> Tensor:
    """Compute f'(0) from values at 0 and to the right of it, with an error of the order step⁴."""
    weights = (-25.0, 48.0, -36.0, 16.0, -3.0)
    terms = (weight * function(index * step) for index, weight in enumerate(weights))
    return torch.stack(list(terms)).sum(0) / (12 * step)


def matvec(matrix: Tensor, x: Tensor) -> Tensor:
    """Multiply vectors by matrices, A x, with samples on the left of the batch."""
    return torch.einsum("...ij,...j->...i", matrix, x)


def tensors_in(packet: Any) -> list[Tensor]:
    """Collect every tensor of nested lists and tuples, such as a move or a packet."""
    if isinstance(packet, Tensor):
        return [packet]
    return [tensor for part in packet for tensor in tensors_in(part)] if isinstance(packet, tuple | list) else []


def mapped(function: Callable[[Tensor], Tensor], packet: Any) -> Any:
    """Apply a function to every tensor of nested lists and named tuples."""
    if isinstance(packet, Tensor):
        return function(packet)
    if isinstance(packet, list):
        return [mapped(function, part) for part in packet]
    return type(packet)(*(mapped(function, part) for part in packet)) if isinstance(packet, tuple) else packet


def member(packet: _T, index: tuple[int, ...]) -> _T:
    """Take one member of the batch out of every tensor of nested lists and named tuples."""
    return mapped(lambda x: x[index], packet)


def single(packet: _T) -> _T:
    """Write every tensor of nested lists and named tuples in single precision."""
    return mapped(Tensor.float, packet)


def entries(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the entries of nested dicts, by their path."""
    for name, value in state.items():
        yield from entries(value, f"{prefix}{name}/") if isinstance(value, dict) else [(prefix + name, value)]


def unlike(one: dict[str, Any], two: dict[str, Any]) -> str | None:
    """Find the first entry in which two states differ, to the last bit."""
    first, second = dict(entries(one)), dict(entries(two))
    for name in first | second:
        x, y = first.get(name), second.get(name)
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            if x.shape != y.shape or not bool(((x == y) | (x.isnan() & y.isnan())).all()):
                return name
        elif type(x) is not type(y) or x != y:
            return name
    return None


def kind(part: object) -> str:
    """Return the name of the class of a part, by which the sentences call it."""
    return type(part).__name__


def batch_text(batch: tuple[int, ...]) -> str:
    """Say in words for how many posteriors something is claimed."""
    return f"a batch of {batch}" if batch else "one posterior"


# Random dense matrices in a pattern


def mask(pattern: Pattern) -> Tensor:
    """Mark the entries that a symmetric matrix of the pattern has."""
    rows, columns = (x.flatten() for x in pattern.positions())
    kept = torch.zeros(pattern.dim, pattern.dim, dtype=DTYPE)
    kept[rows, columns] = kept[columns, rows] = 1.0
    return kept


def root_in(pattern: Pattern, batch: tuple[int, ...] = (), seed: int = 0) -> Tensor:
    """Draw a lower triangular matrix of the pattern, with a diagonal between about 0.4 and 1.2."""
    x = 0.4 * normal(*batch, pattern.dim, pattern.dim, seed=seed)
    lower = x.tril(-1) + torch.diag_embed(0.7 * torch.exp(0.6 * x.diagonal(dim1=-2, dim2=-1)))
    return lower * mask(pattern)


def symmetric_in(pattern: Pattern, batch: tuple[int, ...] = (), seed: int = 0) -> Tensor:
    """Draw a symmetric, indefinite matrix of the pattern."""
    x = normal(*batch, pattern.dim, pattern.dim, seed=seed)
    return 0.5 * (x + x.mT) * mask(pattern)


def definite_in(pattern: Pattern, batch: tuple[int, ...] = (), seed: int = 0) -> Tensor:
    """Draw a positive definite matrix of the pattern, the square L Lᵀ of a root of it."""
    root = root_in(pattern, batch, seed)
    return root @ root.mT


def definite(dim: int, batch: tuple[int, ...] = (), seed: int = 0) -> Tensor:
    """Draw a positive definite curvature with every entry."""
    x = normal(*batch, dim, dim, seed=seed)
    return x @ x.mT / dim + 0.3 * torch.eye(dim, dtype=DTYPE)


# The posteriors that parts are tried on, and exact quadratic problems for them

DIM = 3
# of (dim, batch_shape), with the keywords mean and scale
PosteriorFactory = Callable[..., Posterior]


def over(kind: PosteriorFactory, structure: Callable[[int], Pattern]) -> PosteriorFactory:
    """Make a factory of posteriors over a structure of as many coordinates as are asked for."""
    return lambda dim, batch_shape=(), **given: kind(dim, batch_shape, structure=structure(dim), **given)


def _blocks(dim: int) -> Pattern:
    return block_diagonal([1, dim - 1])


def _arrow(dim: int) -> Pattern:
    return arrow(groups=dim - 1, local=1, globals=1)


POSTERIORS: dict[str, PosteriorFactory] = {
    "CholeskyGaussian": CholeskyGaussian,
    "DiagonalGaussian": DiagonalGaussian,
    "NaturalGaussian": NaturalGaussian,
    "PrecisionCholeskyGaussian": PrecisionCholeskyGaussian,
    "CholeskyGaussian over two blocks": over(CholeskyGaussian, _blocks),
    "NaturalGaussian over two blocks": over(NaturalGaussian, _blocks),
    "PrecisionCholeskyGaussian over two blocks": over(PrecisionCholeskyGaussian, _blocks),
    "NaturalGaussian over an arrow": over(NaturalGaussian, _arrow),
    "PrecisionCholeskyGaussian over an arrow": over(PrecisionCholeskyGaussian, _arrow),
}


class Normal(NamedTuple):
    """A mean and a covariance that are written out."""

    mean: Tensor  # (*batch, D)
    covariance: Tensor  # (*batch, D, D)


class Quadratic(NamedTuple):
    """A log joint that is quadratic, ℓ(θ) = ½(θ - μ)ᵀA(θ - μ), one a member, so that everything is known of it."""

    mu: Tensor  # μ, (*batch, D)
    A: Tensor  # (*batch, D, D), symmetric
    temperature: float  # γ

    def packet(self, q: Posterior) -> Expectation:
        """Compute E_q[ℓ] and its derivative exactly, as an estimator would return them."""
        mean, V = moments(q)
        g = matvec(self.A, mean - self.mu)
        value = 0.5 * (g * (mean - self.mu)).sum(-1) + 0.5 * (self.A * V).sum((-2, -1))
        return Expectation(value, Raw(g, self.A.clone()), self.temperature, True, Cost(1, 1))

    def loss(self, at: Normal) -> Tensor:
        """Compute L = E_q[ℓ] - γ entropy without its constant, (*batch,)."""
        shift = at.mean - self.mu
        energy = 0.5 * (shift * matvec(self.A, shift)).sum(-1) + 0.5 * (self.A * at.covariance).sum((-2, -1))
        return energy - 0.5 * self.temperature * torch.logdet(at.covariance)

    def local(self, q: Posterior) -> tuple[Tensor, Tensor]:
        """Compute a and P of ∇L from their definition, with all matrices written out."""
        C = q.frame().dense()
        eye = torch.eye(q.dim, dtype=C.dtype)
        a = matvec(C.mT, matvec(self.A, q.frame().mean - self.mu))
        return a, (C.mT @ self.A @ C) * mask(q.structure).to(C.dtype) - self.temperature * eye


def quadratic(batch: tuple[int, ...], temperature: float, seed: int, dim: int = DIM) -> Quadratic:
    """Make a convex problem whose optimum is not where the posteriors of `start` are."""
    return Quadratic(normal(*batch, dim, seed=seed), definite(dim, batch, seed + 1), temperature)


def start(factory: PosteriorFactory, batch: tuple[int, ...], seed: int, dim: int = DIM) -> Normal:
    """Draw moments away from zero and the identity that the posteriors of a factory have."""
    T = root_in(factory(dim, batch).structure, batch, seed)  # a root of the precision, which every structure has
    return Normal(normal(*batch, dim, seed=seed + 1), torch.linalg.inv(T @ T.mT))


def made(factory: PosteriorFactory, at: Normal) -> Posterior:
    """Make the posterior with these moments."""
    scale = torch.linalg.cholesky(at.covariance.to(DTYPE)).to(at.mean.dtype)
    return factory(at.mean.shape[-1], at.mean.shape[:-1], mean=at.mean, scale=scale)


def moments(q: Posterior) -> Normal:
    """Read mean and covariance from the frame of a posterior."""
    frame = q.frame()
    C = frame.dense()
    return Normal(frame.mean.detach().clone(), C @ C.mT)


def after(q: Posterior, move: Move) -> tuple[Normal, Tensor]:
    """Compute the moments after a move, in a copy of the posterior."""
    new, ok = q.moved(move)
    twin = copy.deepcopy(q)
    twin.assign(new, torch.ones(q.batch_shape, dtype=torch.bool))
    return moments(twin), ok


def check_members(
    claim: Claim,
    posterior: PosteriorFactory,
    at: Normal,
    given: Any,
    run: Callable[[Posterior, Any], tuple[Tensor, ...]],
    together: tuple[Tensor, ...],
    name: str,
) -> None:
    """Check that members have alone, and in float32, what a run has for all of them together in float64."""
    batch = at.mean.shape[:-1]
    for index in {(0,) * len(batch), tuple(size - 1 for size in batch)} if batch else ():
        alone = run(made(posterior, member(at, index)), member(given, index))
        for part, whole in zip(alone, together, strict=True):
            claim.close("batch members must not depend on one another", whole[index], part, IDENTITY)
    with claim.works("a call in float32"):
        floats = run(made(posterior, single(at)), single(given))
        for part, whole in zip(floats, together, strict=True):
            claim.close(f"its {name} in float32 must be that of float64", part, whole.float(), SINGLE)
