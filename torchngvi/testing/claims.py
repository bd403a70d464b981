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
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchngvi.interfaces import Cost, Expectation, Frame, Move, Posterior, Raw
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian, NaturalGaussian, PrecisionCholeskyGaussian
from torchngvi.structures import FullAlgebra, Pattern, arrow, block_diagonal

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


# ------------------------------------------------------------------------------------ the check of a structure


SIZE = 6
STORED = 0.0  # of entries that are only put in their places
MEMBERS: list[tuple[int, ...]] = [(), (2,), (3,), (2, SIZE)]  # in the last a wrong broadcast raises no error
SAMPLES: list[tuple[int, ...]] = [(), (3,), (2, 3)]


def check_structure(structure: Pattern | Callable[[int], Pattern]) -> None:
    """Check that a structure keeps the contract of `Pattern`, and of `FullAlgebra` if it is one.

    Its matrices must be closed under products, inverses and congruences.  Every verb must agree with that of the
    matrices written out, for batches and for samples on the left of the batch.  `flat` must be isometric for ½⟨A, A'⟩,
    the metric in which accelerations and momenta measure.  A failed factorisation must be told member by member.

    Args:
        structure: a pattern, or a function from D to one, which is called with D = 6.

    Raises:
        AssertionError: an identity fails; the text says which, by how much, and for which input.

    >>> from torchngvi.structures import Dense, block_diagonal
    >>> check_structure(Dense)
    >>> check_structure(block_diagonal([1, 2, 1]))
    """
    called = Claim(getattr(structure, "__name__", kind(structure)), f"D = {SIZE}")
    with called.works("a call with one number (has it several sizes? check a pattern, as X(3, 2))"):
        pattern = structure if isinstance(structure, Pattern) else structure(SIZE)
    claim = Claim(kind(pattern))
    claim.holds(isinstance(pattern, Pattern), "a structure must be a torchngvi.structures.Pattern")
    with claim.at("D = " + str(pattern.dim)).works("positions()"):
        _positions(claim, pattern)
    for batch in MEMBERS:
        here = claim.at(batch_text(batch))
        _group(here, pattern, batch)
        for verbs in (_entries, _matrices, _metric, *((_full,) if isinstance(pattern, FullAlgebra) else ())):
            with here.works("one of its verbs"):
                verbs(here, pattern, batch)
        for sample in SAMPLES:
            there = claim.at(f"{batch_text(batch)} and samples {sample}")
            with there.works("one of its verbs for vectors"):
                _vectors(there, pattern, batch, sample)
        for upper in (False, True):
            with here.works("what it makes of the data"):
                _data(here.at(f"{here.where} and C = {'Lᵀ' if upper else 'L'}"), pattern, batch, upper)
    for verbs in (_sparse, _failures, _gradients, _single):
        with claim.at("one posterior").works("one of its verbs"):
            verbs(claim.at("one posterior"), pattern)


def _positions(claim: Claim, pattern: Pattern) -> None:
    rows, columns = pattern.positions()
    claim.holds(
        rows.shape == columns.shape == torch.Size(pattern.shape),
        f"positions() must be two tensors of its shape {pattern.shape}; got {tuple(rows.shape)}",
    )
    pairs = list(zip(rows.flatten().tolist(), columns.flatten().tolist(), strict=True))
    claim.holds(len(set(pairs)) == len(pairs), "positions() must name every entry once")
    claim.holds(
        all((i, i) in pairs for i in range(pattern.dim)),
        f"positions() must have all D = {pattern.dim} diagonal entries",
    )
    claim.holds(
        all((j, i) in pairs for i, j in pairs if i < j),
        "an entry above the diagonal may be stored only beside its mirror image",
    )
    claim.holds(pattern.parameters == int(mask(pattern).tril().sum()), "`parameters` must count the entries of a root")
    # in a closed pattern what stands below one diagonal entry is a square without gaps
    widest = int(mask(pattern).tril().sum(0).max())
    claim.holds(pattern.widest == widest, f"`widest` must be the size of its largest square, {widest}")
    twin = copy.deepcopy(pattern)
    claim.holds(
        twin == pattern and hash(twin) == hash(pattern),
        "it must be compared and hashed by its sizes; make it a frozen dataclass",
    )


def _group(claim: Claim, pattern: Pattern, batch: tuple[int, ...]) -> None:
    """Of the matrices that `positions` describes, without a verb."""
    outside = 1 - mask(pattern)
    L, M, A = root_in(pattern, batch, 1), root_in(pattern, batch, 2), symmetric_in(pattern, batch, 3)
    products = {
        "products L M of two roots": L @ M,
        "inverses L⁻¹ of a root": torch.linalg.inv(L),
        "congruences L A Lᵀ": L @ A @ L.mT,
        "squares L Lᵀ of a root": L @ L.mT,
    }
    for name, product in products.items():
        claim.close(f"{name} must have no entry outside its positions", product * outside, torch.zeros_like(product))


def _entries(claim: Claim, pattern: Pattern, batch: tuple[int, ...]) -> None:
    dim = pattern.dim
    L, A, x = root_in(pattern, batch, 1), symmetric_in(pattern, batch, 2), normal(*batch, dim, seed=3)
    root, symmetric = pattern.from_dense(L), pattern.from_dense(A)
    shape = (*batch, *pattern.shape)
    claim.holds(root.shape == shape, f"from_dense must give the shape {shape}; got {tuple(root.shape)}")
    claim.close("to_dense(from_dense(L)) must be L", pattern.to_dense(root), L, STORED)
    claim.close("full(from_dense(A)) must be the symmetric A", pattern.full(symmetric), A, STORED)
    eye = torch.eye(dim, dtype=DTYPE).expand(*batch, dim, dim)
    claim.close("eye must be the identity", pattern.to_dense(pattern.eye(x)), eye, STORED)
    claim.close("diagonal(A) must be its diagonal", pattern.diagonal(symmetric), A.diagonal(dim1=-2, dim2=-1), STORED)
    replaced = L.clone()
    replaced.diagonal(dim1=-2, dim2=-1).copy_(x)
    claim.close(
        "with_diagonal(L, x) must change it", pattern.to_dense(pattern.with_diagonal(root, x)), replaced, STORED
    )
    half = A.tril()
    claim.close("tril(A) must be its lower triangle", pattern.to_dense(pattern.tril(symmetric)), half, STORED)
    claim.close(
        "one_sided must mirror a lower triangle", pattern.full(pattern.one_sided(pattern.from_dense(half))), A, STORED
    )
    half.diagonal(dim1=-2, dim2=-1).mul_(0.5)
    claim.close("tril_half(A) must be tril½[A]", pattern.to_dense(pattern.tril_half(symmetric)), half, STORED)
    factor = x[..., 0]
    scaled = pattern.from_dense(factor[..., None, None] * L)
    claim.close("scaled(s, L) must be s L, one s a member", pattern.scaled(factor, root), scaled, STORED)
    claim.holds(pattern.is_finite(root).all(), "is_finite must hold for finite entries")


def _vectors(claim: Claim, pattern: Pattern, batch: tuple[int, ...], sample: tuple[int, ...]) -> None:
    L, A = root_in(pattern, batch, 1), symmetric_in(pattern, batch, 2)
    root, symmetric, x = pattern.from_dense(L), pattern.from_dense(A), normal(*sample, *batch, pattern.dim, seed=3)
    claim.close("mv(L, x) must be L x", pattern.mv(root, x), matvec(L, x))
    claim.close("tmv(L, x) must be Lᵀ x", pattern.tmv(root, x), matvec(L.mT, x))
    inverse = torch.linalg.inv(L)
    claim.close("solve(L, x) must be L⁻¹ x", pattern.solve(root, x), matvec(inverse, x), IDENTITY)
    claim.close("tsolve(L, x) must be L⁻ᵀ x", pattern.tsolve(root, x), matvec(inverse.mT, x), IDENTITY)
    claim.close("smv(A, x) must be A x", pattern.smv(symmetric, x), matvec(A, x))
    claim.close("neighbours(x) must sum x over the entries of a row", pattern.neighbours(x), x @ mask(pattern))


def _matrices(claim: Claim, pattern: Pattern, batch: tuple[int, ...]) -> None:
    L, M, A = root_in(pattern, batch, 1), root_in(pattern, batch, 2), symmetric_in(pattern, batch, 3)
    root, other, symmetric = (pattern.from_dense(x) for x in (L, M, A))
    kept, w, dense = mask(pattern), normal(*batch, pattern.dim, seed=4), pattern.to_dense
    claim.close("matmul(L, M) must be L M", dense(pattern.matmul(root, other)), L @ M)
    claim.close("inverse(L) must be L⁻¹", dense(pattern.inverse(root)), torch.linalg.inv(L), IDENTITY)
    claim.close(
        "tmatmul(L, A) must be the lower entries of Lᵀ A, zeros above",
        dense(pattern.tmatmul(root, symmetric)),
        (L.mT @ A).tril() * kept,
    )
    claim.close("congruence(L, A) must be L A Lᵀ", pattern.full(pattern.congruence(root, symmetric)), L @ A @ L.mT)
    claim.close("scale_columns(L, s) must be L diag(s)", dense(pattern.scale_columns(root, w)), L * w[..., None, :])
    factor, ok = pattern.cholesky(pattern.from_dense(L @ L.mT))
    claim.holds(ok.shape == batch and bool(ok.all()), "cholesky must tell that L exists, (*batch,)")
    claim.close("cholesky(L Lᵀ) must be L", dense(factor), L, IDENTITY)
    signs = torch.where(w > 0, 1.0, -1.0).to(DTYPE)
    turned, ok = pattern.positive_root(pattern.from_dense(L * signs[..., None, :]))
    claim.close("positive_root must turn columns", dense(turned), L)
    claim.holds(ok.all(), "positive_root must hold for a regular root")


def _data(claim: Claim, pattern: Pattern, batch: tuple[int, ...], upper: bool) -> None:
    """What rows, draws and weights bring, in the frame."""
    dim = pattern.dim
    L, X, H = root_in(pattern, batch, 1), normal(*batch, 5, dim, seed=2), normal(*batch, dim, dim, seed=3)
    H, w, root = H + H.mT, normal(*batch, dim, seed=4), pattern.from_dense(L)
    C, kept, full = (L.mT if upper else L), mask(pattern), pattern.full
    frame, one = Frame(w, root, pattern, upper), X.reshape(-1, 5, dim)[0]
    claim.close("rows(X, L) must be X C", frame.rows(X), X @ C)
    claim.close("rows(X, L) of one X for all members must be X C", frame.rows(one), one @ C)
    claim.close("conjugate must be the entries of Cᵀ H C", full(frame.conjugate(H)), (C.mT @ H @ C) * kept)
    claim.close(
        "gram must be the entries of Cᵀ diag(w) C", full(frame.gram(w)), (C.mT @ torch.diag_embed(w) @ C) * kept
    )
    claim.close("the marginals must be the entries of C Cᵀ", full(frame.marginals()), (C @ C.mT) * kept)
    claim.close("row_norms must be diag(C Cᵀ)", frame.variance, (C @ C.mT).diagonal(dim1=-2, dim2=-1))
    outer = X.mT @ (2 * X + 1)
    lower = pattern.to_dense(pattern.tril(pattern.lower(X, 2 * X + 1)))
    claim.close("lower(l, r) must be the entries of Σ l rᵀ on and below the diagonal", lower, outer.tril() * kept)
    symmetric = full(pattern.sym_lower(X, 2 * X + 1))
    claim.close("sym_lower(l, r) must be those of Σ ½(l rᵀ + r lᵀ)", symmetric, 0.5 * (outer + outer.mT) * kept)


def _metric(claim: Claim, pattern: Pattern, batch: tuple[int, ...]) -> None:
    A, B, L = symmetric_in(pattern, batch, 1), symmetric_in(pattern, batch, 2), root_in(pattern, batch, 3)
    stored = [pattern.from_dense(x) for x in (A, B)]
    flat = [pattern.flat(x) for x in stored]
    shape = (*batch, pattern.parameters)
    claim.holds(flat[0].shape == shape, f"flat(A) must have the shape {shape}; got {tuple(flat[0].shape)}")
    claim.close(
        "the dot product of flat(A) and flat(B) must be ½⟨A, B⟩",
        (flat[0] * flat[1]).sum(-1),
        0.5 * (A * B).sum((-2, -1)),
    )
    claim.close("unflat(flat(A)) must be A", pattern.unflat(flat[0]), stored[0])
    claim.close("norm2(A) must be ‖A‖² of a symmetric matrix", pattern.norm2(stored[0]), A.square().sum((-2, -1)))
    root = pattern.from_dense(L)
    claim.close("entries_norm2(L) must be ‖L‖² of a root", pattern.entries_norm2(root), L.square().sum((-2, -1)))
    claim.close("log_det(L) must be log|L|", pattern.log_det(root), torch.linalg.slogdet(L)[1])


def _full(claim: Claim, pattern: Pattern, batch: tuple[int, ...]) -> None:
    assert isinstance(pattern, FullAlgebra)
    kept, dim = mask(pattern), pattern.dim
    L, A, B = root_in(pattern, batch, 1), symmetric_in(pattern, batch, 2), normal(*batch, dim, dim, seed=3) * kept
    S, x = definite_in(pattern, batch, 4), normal(*batch, dim, seed=5)
    root, symmetric, other = (pattern.from_dense(x) for x in (L, A, B))
    dense, inverse = pattern.to_dense, torch.linalg.inv(L)
    claim.close("matmul(A, B) must be A B of any squares", dense(pattern.matmul(symmetric, other)), A @ B)
    claim.close("mv(B, x) must be B x of any squares", pattern.mv(other, x), matvec(B, x))
    claim.close("transpose(B) must be Bᵀ", dense(pattern.transpose(other)), B.mT, STORED)
    claim.close("exp(A) must be the matrix exponential", dense(pattern.exp(symmetric)), torch.linalg.matrix_exp(A))
    claim.close("right_solve(B, L) must be B L⁻¹", dense(pattern.right_solve(other, root)), B @ inverse, IDENTITY)
    norm2 = B.square().sum((-2, -1))
    claim.close("entries_norm2(B) must be ‖B‖² of any squares", pattern.entries_norm2(other), norm2)
    lower = dense(pattern.lower_root(other))
    claim.close("lower_root must be lower triangular", lower.tril(), lower, STORED)
    claim.close("lower_root(B) must be L with L Lᵀ = B Bᵀ", lower @ lower.mT, B @ B.mT)
    factor, ok = pattern.reverse_cholesky(pattern.from_dense(S))
    claim.holds(ok.shape == batch and bool(ok.all()), "reverse_cholesky must tell that L exists, (*batch,)")
    factor = dense(factor)
    claim.close("reverse_cholesky(S) must be L with Lᵀ L = S", factor.tril().mT @ factor, S)
    a, W = pattern.unconjugate(root, x, symmetric)
    claim.close("unconjugate must give L⁻ᵀ a", a, matvec(inverse.mT, x), IDENTITY)
    claim.close("unconjugate must give L⁻ᵀ W L⁻¹", dense(W), inverse.mT @ A @ inverse, IDENTITY)


def _sparse(claim: Claim, pattern: Pattern) -> None:
    L, X, b = root_in(pattern, (), 1), normal(5, pattern.dim, seed=2).clamp_min(0), normal(5, seed=3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        rows = X.to_sparse_csr()
    for upper in (False, True):
        C, root = (L.mT if upper else L), pattern.from_dense(L)
        gram = pattern.full(pattern.sparse_gram(root, rows, b, upper))
        expected = C.mT @ X.mT @ torch.diag(b) @ X @ C * mask(pattern)
        claim.close("sparse_gram must be the entries of Cᵀ Xᵀ diag(b) X C", gram, expected)
        norms = pattern.sparse_row_norms(root, rows, upper)
        claim.close("sparse_row_norms must be ‖Cᵀ x_n‖²", norms, (X @ C).square().sum(-1))


def _failures(claim: Claim, pattern: Pattern) -> None:
    good = definite_in(pattern, (), 1)
    turned = good - 2 * torch.diag_embed(good.diagonal().diag())  # one entry of the diagonal in each member
    S = pattern.from_dense(torch.stack([good, -good, torch.full_like(good, torch.nan), *turned]))
    told = [True] + [False] * (2 + pattern.dim)
    sentence = "must be told member by member, of a definite, a negative, a NaN and D indefinite matrices"
    factor, ok = pattern.cholesky(S)
    claim.holds(ok.tolist() == told, f"a failed cholesky {sentence}")
    expected = torch.linalg.cholesky(good)
    claim.close("cholesky beside failed members must be L", pattern.to_dense(factor[0]), expected, IDENTITY)
    if isinstance(pattern, FullAlgebra):
        claim.holds(pattern.reverse_cholesky(S)[1].tolist() == told, f"a failed reverse_cholesky {sentence}")
    root = root_in(pattern, (), 2)
    roots = torch.stack([root] * 3 + [*(root - torch.diag_embed(root.diagonal().diag()))])  # regular, then singular
    roots[1, 0, 0], roots[2, -1, -1] = 0.0, torch.inf
    ok = pattern.positive_root(pattern.from_dense(roots))[1]
    claim.holds(ok.tolist() == told, "positive_root must tell which members are regular and finite")


def _gradients(claim: Claim, pattern: Pattern) -> None:
    """Of what losses pass through, also where an index was first made without gradients."""
    L, M, x = (root_in(pattern, (), seed) for seed in (1, 2, 3))
    x, kept = x[0], mask(pattern).tril()
    with torch.inference_mode():
        pattern.flat(pattern.from_dense(symmetric_in(pattern)))

    def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
        leaf = at.clone().requires_grad_()
        return torch.autograd.grad(function(leaf).sin().sum(), leaf)[0]

    verbs: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "mv": (lambda root: pattern.mv(root, x), lambda dense: dense @ x),
        "tmv": (lambda root: pattern.tmv(root, x), lambda dense: dense.mT @ x),
        "matmul": (lambda root: pattern.to_dense(pattern.matmul(root, pattern.from_dense(M))), lambda dense: dense @ M),
        "row_norms": (pattern.row_norms, lambda dense: dense.square().sum(-1)),
        "log_det": (pattern.log_det, lambda dense: dense.diagonal().log().sum()),
    }
    for name, (verb, written) in verbs.items():
        actual = pattern.to_dense(gradient(verb, pattern.from_dense(L))) * kept
        claim.close(f"{name} must be differentiable in the root", actual, gradient(written, L) * kept)
    flat = gradient(pattern.flat, pattern.from_dense(symmetric_in(pattern)))
    claim.holds(flat.isfinite().all(), "flat must be differentiable after a first call in inference mode")


def _single(claim: Claim, pattern: Pattern) -> None:
    L, A, x = root_in(pattern, (), 1), symmetric_in(pattern, (), 2), normal(3, pattern.dim, seed=3)
    given = pattern.from_dense(L), pattern.from_dense(A), x
    root, symmetric, y = (tensor.float() for tensor in given)
    verbs: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "mv": lambda L, A, x: pattern.mv(L, x),
        "tmv": lambda L, A, x: pattern.tmv(L, x),
        "solve": lambda L, A, x: pattern.solve(L, x),
        "tsolve": lambda L, A, x: pattern.tsolve(L, x),
        "cholesky": lambda L, A, x: pattern.cholesky(pattern.congruence(L, pattern.eye(x[0])))[0],
        "matmul": lambda L, A, x: pattern.matmul(L, L),
        "congruence": lambda L, A, x: pattern.congruence(L, A),
        "lower": lambda L, A, x: pattern.lower(x, x),
        "inverse": lambda L, A, x: pattern.inverse(L),
        "tmatmul": lambda L, A, x: pattern.tmatmul(L, A),
        "flat": lambda L, A, x: pattern.flat(A),
        "eye": lambda L, A, x: pattern.eye(x),
    }
    if isinstance(pattern, FullAlgebra):
        full = pattern
        verbs |= {
            "reverse_cholesky": lambda L, A, x: full.reverse_cholesky(full.congruence(L, full.eye(x[0])))[0],
            "exp": lambda L, A, x: full.exp(A),
            "a of unconjugate": lambda L, A, x: full.unconjugate(L, x[0], A)[0],
            "W of unconjugate": lambda L, A, x: full.unconjugate(L, x[0], A)[1],
        }
    for name, verb in verbs.items():
        expected = verb(*given).float()
        claim.close(f"{name} of float32 must be that of float64", verb(root, symmetric, y), expected, SINGLE)
