"""What several files of tests share: the parts under test, small problems, seeds, batches and the tolerance policy.

Tolerances. Everything deterministic runs in float64 on well conditioned problems (covariances with
eigenvalues within a factor of about 100 of one another) and is compared with `close`:

* `EXACT` 1e-12: the same formula in another order of operations;
* `IDENTITY` 1e-10: an identity that passes through a linear solve, a factorisation or quadrature;
* `DIFFERENCE` 1e-8: a derivative against five-point differences of step 1e-3, whose own error is
  about h⁴ f⁽⁵⁾/30 + eps/h, near 1e-11 for functions of order one with benign higher derivatives.

Differences are measured relative to the largest entry of the expected tensor, or 1 if that is
smaller. Statistical tests use fixed seeds and `z_bound`, which holds a whole comparison, all of its
entries together, to the one failure rate `FAILURE_RATE`.
"""

import contextlib
import functools
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

import pytest
import reference
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torchngvi as ngvi
from torchngvi import expectations, models, rules
from torchngvi.errors import InputError
from torchngvi.interfaces import Coordinates, Cost, Expectation, Framed, Posterior, Raw, Target
from torchngvi.registry import POSTERIORS as REGISTERED
from torchngvi.registry import partners
from torchngvi.stepsizes import Constant, KLRadius, SufficientDecrease
from torchngvi.structures import Forest, FullAlgebra, arrow, block_diagonal, forest, nested
from torchngvi.testing.claims import root_in

torch.set_num_threads(1)  # matrices of 3 x 3: threads would only wait for one another

DTYPE = torch.float64
EXACT, IDENTITY, DIFFERENCE = 1e-12, 1e-10, 1e-8
FAILURE_RATE = 1e-6

DIM, ROWS = 3, 7
# (3,) and (2, 3) end in DIM, where x @ A.mT broadcasts to a wrong shape without an error
BATCHES = [(), (2,), (3,), (2, 3)]
TEMPERATURES = [0.5, 1.0, 2.0]
# each batch and each temperature, not every pair of them
BATCHES_AT = [((), 0.5), ((), 1.0), ((), 2.0), ((2,), 1.0), ((3,), 0.5), ((2, 3), 2.0)]
batches = pytest.mark.parametrize("batch", BATCHES, ids=str)
batches_at = pytest.mark.parametrize(("batch", "gamma"), BATCHES_AT, ids=str)


def two_blocks(dim: int) -> FullAlgebra:
    """The first coordinate, and all others."""
    return block_diagonal([1, dim - 1]) if dim > 1 else block_diagonal([1])


class TwoBlocks:
    """The family over two blocks, whatever way it is made."""

    def __init__(self, dim, batch_shape=(), *, structure=two_blocks, **start):
        super().__init__(dim, batch_shape, structure=structure, **start)

    @classmethod
    def _pattern(cls, dim, structure, kept=None):
        return two_blocks(dim)


class BlockCholesky(TwoBlocks, ngvi.CholeskyGaussian): ...


class BlockNatural(TwoBlocks, ngvi.NaturalGaussian): ...


class BlockPrecision(TwoBlocks, ngvi.PrecisionCholeskyGaussian): ...


POSTERIORS = {
    **ngvi.registry.POSTERIORS,
    "cholesky_blocks": BlockCholesky,
    "natural_blocks": BlockNatural,
    "precision_blocks": BlockPrecision,
}
posteriors = pytest.mark.parametrize("name", POSTERIORS)
BASE = {"cholesky_blocks": "cholesky", "natural_blocks": "natural", "precision_blocks": "precision"}
RULES = {
    "newton": rules.VariationalNewton,
    "natural_gradient": rules.NaturalGradient,
    "symmetric_root": rules.SymmetricRoot,
    "retraction": rules.Retraction,
    "geodesic": rules.Geodesic,
    "bures_wasserstein": rules.BuresWasserstein,
    "svgd": rules.SVGD,
    "centered_svgd": rules.CenteredSVGD,
    "covariance_gradient": rules.CovarianceGradient,
    "root_gradient": rules.RootGradient,
    "log_natural_gradient": rules.LogNaturalGradient,
    "log_root_gradient": rules.LogRootGradient,
    "local_exponential": rules.LocalExponential,
}
STEP_SIZES = {"constant": Constant, "kl_radius": KLRadius, "sufficient_decrease": SufficientDecrease}
DRAWS = {
    "independent": expectations.Independent,
    "antithetic": expectations.Antithetic,
    "quasi": expectations.Quasi,
    "fixed": expectations.Fixed,
}
BLACK_BOX = {  # of any log joint, from draws
    "stein": expectations.Stein,
    "closed_entropy": expectations.ClosedEntropyStein,
    "least_squares": expectations.LeastSquaresStein,
    "score_function": expectations.ScoreFunction,
    "path_derivative": expectations.PathDerivative,
    "hessian": expectations.Hessian,
    "hessian_vector": expectations.HessianVector,
}
ESTIMATORS = {
    "quadrature": expectations.Quadrature,
    "autograd": expectations.Autograd,
    "stein_fixed": lambda: expectations.Stein(expectations.Fixed(16)),
    "closed_entropy_fixed": lambda: expectations.ClosedEntropyStein(expectations.Fixed(16)),
    **BLACK_BOX,
}

# pairs that are refused, and why
EXCLUDED_RULES = {
    ("natural", "bures_wasserstein"): "an affine map of theta needs a root of V to act on; (S m, S) holds none",
    ("natural", "svgd"): "as above",
    ("natural", "centered_svgd"): "as above",
    ("natural", "symmetric_root"): "it moves a root of V",
    ("natural", "covariance_gradient"): "it gives a root of V",
    ("natural", "root_gradient"): "it moves a root",
    ("natural", "log_natural_gradient"): "it moves the logarithms of a root's diagonal",
    ("natural", "log_root_gradient"): "as above",
    ("natural", "local_exponential"): "it moves a root",
    ("precision", "bures_wasserstein"): "an affine map of theta acts on a root of V; it holds one of S",
    ("precision", "svgd"): "as above",
    ("precision", "centered_svgd"): "as above",
    ("precision", "symmetric_root"): "it moves a root of V",
    ("precision", "covariance_gradient"): "it gives a root of V",
}
EXCLUDED_RULES |= {
    (blocks, rule): why for blocks, base in BASE.items() for (name, rule), why in EXCLUDED_RULES.items() if name == base
}
EXCLUDED_STEP_SIZES = {
    (name, "sufficient_decrease"): "a trial compares two values, and Monte Carlo values are noisy" for name in BLACK_BOX
}
EXCLUDED_DRAWS = {
    ("score_function", "quasi"): "the mean of the other values must not depend on a draw",
    ("score_function", "fixed"): "as above",
}
DRAWN = [pair for pair in itertools.product(BLACK_BOX, DRAWS) if pair not in EXCLUDED_DRAWS]
PAIRS = [pair for pair in itertools.product(POSTERIORS, RULES) if pair not in EXCLUDED_RULES]

# the reference coordinates in which each posterior's own straight line runs
OWN_COORDINATES = {
    "cholesky": "mean_root",
    "diagonal": "mean_scale",
    "natural": "natural",
    "precision": "mean_precision_root",
}
OWN_COORDINATES |= {name: OWN_COORDINATES[base] for name, base in BASE.items()}


@dataclass(frozen=True)
class Family:
    """A likelihood, its energy as the reference has it, and how to draw targets."""

    likelihood: Callable[[], models.Likelihood]
    energy: Callable[[Tensor, Tensor], Tensor]
    targets: Callable[[Tensor], Tensor]  # standard normal (..., N) -> y


def _classes(x: Tensor) -> Tensor:
    signs = torch.where(x > 0, 1.0, -1.0).to(x.dtype)
    signs[..., 0], signs[..., 1] = 1.0, -1.0
    return signs


FAMILIES = {
    "bernoulli_logit": Family(models.BernoulliLogit, reference.logit_energy, _classes),
    "bernoulli_probit": Family(models.BernoulliProbit, reference.probit_energy, _classes),
    "poisson_log": Family(models.PoissonLog, reference.poisson_energy, lambda x: (2 * x.abs()).round()),
    "gaussian": Family(models.GaussianNoise, reference.gaussian_energy(1.0), lambda x: 2 * x),
    "gaussian_0.3": Family(lambda: models.GaussianNoise(0.3), reference.gaussian_energy(0.3), lambda x: 2 * x),
}


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Equal shapes, and differences below tolerance · max(1, largest expected entry)."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype
    scale = max(1.0, float(expected.detach().abs().max()))
    error = float((actual.detach() - expected.detach()).abs().max()) / scale
    assert error <= tolerance, f"off by {error:.2e} where {tolerance:.0e} is allowed"


def z_bound(count: int) -> float:
    """The |z| that `count` standard normal statistics together exceed with probability FAILURE_RATE."""
    return NormalDist().inv_cdf(1 - FAILURE_RATE / (2 * count))


def unbiased(estimates: Tensor, expected: Tensor) -> None:
    """The mean of independent estimates (R, ...) is the expected one, by z-tests."""
    spread = estimates.std(0) / math.sqrt(len(estimates))
    z = (estimates.mean(0) - expected) / spread
    assert float(z.abs().max()) <= z_bound(z.numel()), f"z = {float(z.abs().max()):.1f}"


def difference(function: Callable[[float], Tensor], step: float = 1e-3) -> Tensor:
    """f'(0) by the five-point rule."""
    near, far = function(step) - function(-step), function(2 * step) - function(-2 * step)
    return (8 * near - far) / (12 * step)


def check_refusal(
    call: Callable[[], object],
    words: tuple[str, ...],
    error: type[Exception] | tuple[type[Exception], ...] = InputError,
) -> None:
    """The call raises that exception, and its message has all of the words."""
    with pytest.raises(error) as refusal:
        call()
    missing = [word for word in words if word not in str(refusal.value)]
    assert not missing, f"{missing} not in: {refusal.value}"


def refuses(error: type[Exception], text: str) -> contextlib.AbstractContextManager[pytest.ExceptionInfo[Exception]]:
    """What raises that exception, with this message and no more."""
    return pytest.raises(error, match="^" + re.escape(text) + "$")


def raises(text: str) -> contextlib.AbstractContextManager[pytest.ExceptionInfo[InputError]]:
    """What raises an `InputError` with this text in its message."""
    return pytest.raises(InputError, match=re.escape(text))


def seeded(seed: int = 0) -> torch.Generator:
    """A generator of that seed."""
    return torch.Generator().manual_seed(seed)


def vec(*numbers: float) -> Tensor:
    """Numbers as a vector."""
    return torch.tensor(numbers, dtype=DTYPE)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal draws that depend on the seed and the shape only."""
    return torch.randn(shape, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))


def random_root(batch: tuple[int, ...], seed: int, dim: int = DIM) -> Tensor:
    """Lower triangular, (*batch, D, D), with a diagonal between about 0.4 and 1.2."""
    x = 0.4 * randn(*batch, dim, dim, seed=seed)
    return x.tril(-1) + torch.diag_embed(0.7 * torch.exp(0.6 * x.diagonal(dim1=-2, dim2=-1)))


def random_symmetric(batch: tuple[int, ...], seed: int, definite: bool = True) -> Tensor:
    """A curvature (*batch, D, D): positive definite, or indefinite."""
    x = randn(*batch, DIM, DIM, seed=seed)
    return x @ x.mT / DIM + 0.3 * torch.eye(DIM, dtype=DTYPE) if definite else 0.5 * (x + x.mT)


def random_posterior(name: str, batch: tuple[int, ...] = (), seed: int = 0):
    """A posterior away from zero and the identity; of the root a diagonal one keeps the diagonal."""
    root = random_root(batch, seed + 1)
    return POSTERIORS[name](DIM, batch, mean=randn(*batch, DIM, seed=seed), scale=kept(name, root))


def kept(name: str, matrix: Tensor) -> Tensor:
    """The dense matrix with the entries of that posterior's pattern."""
    if name == "diagonal":
        return torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))
    if name not in BASE:
        return matrix
    first = torch.arange(matrix.shape[-1]) == 0
    return torch.where(first[:, None] == first, matrix, 0.0)


def same_as(name: str, q, mean: Tensor | None = None, covariance: Tensor | None = None):
    """A posterior of that kind with q's moments, or with those given."""
    mean = q.mean.detach() if mean is None else mean
    covariance = q.covariance.detach() if covariance is None else covariance
    return POSTERIORS[name](DIM, mean.shape[:-1], mean=mean, scale=torch.linalg.cholesky(covariance))


def random_packet(batch: tuple[int, ...], seed: int, temperature: float = 1.0, definite: bool = True) -> Expectation:
    """A raw packet that belongs to no model."""
    derivative = Raw(randn(*batch, DIM, seed=seed), random_symmetric(batch, seed + 1, definite))
    return Expectation(torch.zeros(batch, dtype=DTYPE), derivative, temperature, True, Cost(1, 1))


def framed_packet(a: Tensor, W: Tensor, temperature: float = 1.0) -> Expectation:
    """A packet given in q's frame."""
    return Expectation(torch.zeros(a.shape[:-1], dtype=DTYPE), Framed(a, W), temperature, True, Cost(1, 1))


@dataclass(frozen=True)
class Model:
    """A target of the library and the same problems for the reference, one a member."""

    target: ngvi.GeneralizedLinear
    problems: list[reference.Problem]


def random_model(
    family: str,
    batch: tuple[int, ...] = (),
    seed: int = 0,
    temperature: float = 1.0,
    own_design: bool = False,  # one design matrix a member
) -> Model:
    """Weights, offset and a prior away from their defaults; targets of each member its own."""
    part = FAMILIES[family]
    X = 0.7 * randn(*(batch if own_design else ()), ROWS, DIM, seed=seed)
    y = part.targets(randn(*batch, ROWS, seed=seed + 1))
    weights = 0.2 + randn(*batch, ROWS, seed=seed + 2).abs()
    offset = 0.3 * randn(*batch, ROWS, seed=seed + 3)
    mean, precision = 0.5 * randn(DIM, seed=seed + 4), torch.exp(0.5 * randn(DIM, seed=seed + 5))
    target = ngvi.GeneralizedLinear(
        X,
        y,
        part.likelihood(),
        prior_precision=precision,
        prior_mean=mean,
        weights=weights,
        offset=offset,
        temperature=temperature,
    )
    designs = X.expand(*batch, ROWS, DIM)
    problems = [
        reference.Problem(designs[i], y[i], part.energy, weights[i], offset[i], mean, precision, temperature)
        for i in members(batch)
    ]
    return Model(target, problems)


@functools.cache
def _stationary_point(family: str, temperature: float, pattern: str) -> tuple[Tensor, Tensor]:
    model = random_model(family, (), 41, temperature)
    return reference.stationary_point(model.problems[0], lambda H: kept(pattern, H))


def stationary_point(name: str, family: str = "bernoulli_logit", temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The reference's optimum of `random_model` 41, (m, V): found once for all posteriors of one pattern."""
    pattern = name if name == "diagonal" else "cholesky_blocks" if name in BASE else "cholesky"
    return _stationary_point(family, temperature, pattern)


def members(batch: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The index of every member."""
    return itertools.product(*(range(size) for size in batch))


def for_each(function: Callable[..., Tensor], batch: tuple[int, ...], *stacked: object) -> Tensor:
    """function of each member's entries, stacked to (*batch, ...); lists are one entry a member."""
    results = []
    for position, index in enumerate(members(batch)):
        arguments = [x[position] if isinstance(x, list) else x[index] for x in stacked]
        results.append(function(*arguments))
    return torch.stack(results).reshape((*batch, *results[0].shape))


def step(q, move) -> tuple[Tensor, Tensor]:
    """Mean and covariance after a move that must stay in the cone; q is not changed."""
    new, ok = q.moved(move)
    assert ok.shape == q.batch_shape
    assert bool(ok.all()), "the move left the cone"
    return moments_of(q, new)


def moments_of(q, new: Coordinates) -> tuple[Tensor, Tensor]:
    """Mean and covariance of coordinates, from their definition."""
    matrix = q.structure.to_dense(new.matrix)
    if isinstance(q, ngvi.NaturalGaussian):
        return torch.linalg.solve(matrix, new.vector), torch.linalg.inv(matrix)
    if isinstance(q, ngvi.PrecisionCholeskyGaussian):
        return new.vector, torch.linalg.inv(matrix @ matrix.mT)
    return new.vector, matrix @ matrix.mT


def every(rho: float, batch: tuple[int, ...]) -> Tensor:
    """One step size for each member."""
    return torch.full(batch, rho, dtype=DTYPE)


# Small posteriors and regressions on which the optimizer and the loop are run

SMALL_DIM, SMALL_ROWS = 3, 20
METHODS = {"VN": ngvi.VN, "SRVN": ngvi.SRVN}
METHOD_PAIRS = [(m, p) for m in METHODS for p in partners(m.lower())]
SMALL_BATCHES = [(), (3,)]  # (3,) is DIM, where a wrong broadcast goes unnoticed by shape


def make_posterior(
    name: str, batch: tuple[int, ...] = (), *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Posterior:
    """A posterior whose mean and root have no zeros where they need none."""
    generator = torch.Generator().manual_seed(seed)
    mean = 0.3 * torch.randn(*batch, SMALL_DIM, generator=generator, dtype=torch.float64)
    factor = 0.2 * torch.randn(*batch, SMALL_DIM, SMALL_DIM, generator=generator, dtype=torch.float64).tril(-1)
    factor = factor + torch.diag_embed(
        0.5 + 0.5 * torch.rand(*batch, SMALL_DIM, generator=generator, dtype=torch.float64)
    )
    return REGISTERED[name](SMALL_DIM, batch, mean=mean.to(dtype), scale=factor.to(dtype))


def quiet(q: Posterior, target: Target, *optimizer: object, **options: object):
    """A fit without a bar."""
    return ngvi.fit(q, target, *optimizer, progress=False, **options)


def make_model(
    batch: tuple[int, ...] = (),
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    kind: type[ngvi.GeneralizedLinear] = ngvi.GeneralizedLinear,
    temperature: float = 1.0,
) -> ngvi.GeneralizedLinear:
    """Logistic regression, one data set a batch member."""
    generator = torch.Generator().manual_seed(100 + seed)
    X = torch.randn(*batch, SMALL_ROWS, SMALL_DIM, generator=generator, dtype=torch.float64)
    y = (X.sum(-1) + torch.randn(*batch, SMALL_ROWS, generator=generator, dtype=torch.float64) > 0).double()
    return kind(X.to(dtype), y.to(dtype), prior_precision=0.5, temperature=temperature)


class CountedModel(ngvi.GeneralizedLinear):
    """Counts its evaluations."""

    calls = 0

    def expected_energy(self, frame):
        self.calls += 1
        return super().expected_energy(frame)


def coordinates(q: Posterior) -> list[Tensor]:
    """A copy of what q stores."""
    return [tensor.detach().clone() for tensor in q.coordinates]


def distance(left: Posterior | list[Tensor], right: Posterior | list[Tensor]) -> float:
    """The largest difference of coordinates, relative to their largest entry or 1; NaN where either is."""
    left, right = (coordinates(q) if isinstance(q, Posterior) else q for q in (left, right))
    differences = [(a - b).abs().max() / b.abs().max().clamp_min(1.0) for a, b in zip(left, right, strict=True)]
    return float(torch.stack([d.cpu() for d in differences]).max())


def same_bits(left: Posterior | list[Tensor], right: Posterior | list[Tensor]) -> bool:
    """Whether coordinates are equal to the last bit."""
    left, right = (coordinates(q) if isinstance(q, Posterior) else q for q in (left, right))
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# Tests that older versions of PyTorch skip: 2.6 is the oldest that installs; it and 2.11 were tried

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

needs_compile = pytest.mark.skipif(VERSION < (2, 13), reason="torch.compile of PyTorch 2.6 and 2.11 does not take it")
exponentials = pytest.mark.skipif(
    VERSION < (2, 13), reason="holds draws of a seed by exponential_, which are others in PyTorch 2.6 and 2.11"
)
batches_checks = pytest.mark.skipif(
    VERSION < (2, 11), reason="torch.func.vmap of PyTorch 2.6 takes no conditions on tensors"
)


# What the tests that need a CUDA device share: their mark, and a mode in which a wait for the device raises

MARKS = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = pytest.param("cuda", marks=MARKS)


def gpu(test):
    """Mark a test that needs a CUDA device."""
    for mark in MARKS:
        test = mark(test)
    return test


@contextlib.contextmanager
def waits_are_errors():
    """Inside, an operation for which the host waits for the device raises."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():  # that the mode is a prototype, which PyTorch says each time
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Forests, what holds a precision over one, and what watches how large its tensors become

FORESTS = {
    "arrow": arrow(groups=3, local=2, globals=2),
    "unequal arrow": arrow(local=[1, 2, 1], globals=3),
    "large blocks": arrow(groups=2, local=5, globals=6),
    "three levels": nested([0, 0, 1, 2], [0, 0, 1], local=[1, 2, 1], globals=2),
    "ragged": forest(parents=[4, 5, 4, 6, 6, 7, 7, -1], sizes=[2, 1, 1, 1, 2, 1, 1, 2]),
    "two trees": nested([0, 1, 1, 0], local=[2, 1]),
    "chain": forest(parents=[1, 2, 3, -1], sizes=[1, 2, 1, 1]),
    "roots": Forest((-1, -1, -1), (2, 1, 2)),
}


PRECISION = [ngvi.PrecisionCholeskyGaussian, ngvi.NaturalGaussian]


def posterior_in(kind, pattern, batch=(), seed=0):
    """Away from zero and the identity: mean random, S = T Tᵀ of a random root."""
    q = kind(pattern.dim, batch, structure=pattern, dtype=DTYPE)
    T, mean = pattern.from_dense(root_in(pattern, batch, seed)), randn(*batch, pattern.dim, seed=seed + 1)
    S = pattern.congruence(T, pattern.eye(mean))
    new = (mean, T) if kind is ngvi.PrecisionCholeskyGaussian else (pattern.smv(S, mean), S)
    q.assign(type(q.coordinates)(*new), torch.ones(batch, dtype=torch.bool))
    return q


class Watch(TorchDispatchMode):
    """Fails where a tensor of D² numbers is made; remembers how many numbers all of them had."""

    def __init__(self, dim):
        super().__init__()
        self.dim, self.made = dim, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                numbers = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.made += numbers
                assert numbers < self.dim**2, f"{func} makes {numbers} numbers, D = {self.dim}"
        return result


# Mixed models of few groups, of every family

MIXED_FAMILIES = {
    "logit": "bernoulli_logit",
    "probit": "bernoulli_probit",
    "poisson": "poisson_log",
    "negative binomial": models.NegativeBinomial(3.0),
    "gaussian": models.GaussianNoise(0.7),
}
MIXED_PRIORS = {
    1: models.Wishart(2.5, [[0.8]]),
    2: models.Wishart(3.0, [[0.8, 0.2], [0.2, 0.5]]),
    3: models.Wishart(4.5, [[0.8, 0.2, 0.0], [0.2, 0.5, -0.1], [0.0, -0.1, 0.4]]),
}


@functools.cache
def mixed_problem(family="poisson", r=1, n=3, seed=0, prior=True):
    """Groups of unequal size whose rows are mixed, with weights and offsets: the arguments of the model."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, 7, (n,), generator=generator)
    groups = torch.repeat_interleave(torch.arange(n), sizes)
    groups = groups[torch.randperm(len(groups), generator=generator)]
    rows = len(groups)
    X = torch.cat([torch.ones(rows, 1, dtype=DTYPE), 0.5 * randn(rows, 1, seed=seed + 1)], -1)
    Z = torch.cat([torch.ones(rows, 1, dtype=DTYPE), 0.5 * randn(rows, r - 1, seed=seed + 2)], -1)
    eta = X @ torch.tensor([0.3, 0.5], dtype=DTYPE) + (0.7 * randn(n, r, seed=seed + 3)[groups] * Z).sum(-1)
    if family in ("logit", "probit"):
        y = (torch.rand(rows, generator=generator) < eta.sigmoid()).to(DTYPE)
        y[:2] = torch.tensor([0.0, 1.0])
    else:
        y = eta if family == "gaussian" else torch.poisson(eta.exp(), generator)
    weights = 0.5 + torch.rand(rows, generator=generator, dtype=DTYPE)
    settings = {"weights": weights, "offset": 0.3 * randn(rows, seed=seed + 4)}
    if prior:
        settings["prior"] = models.MixedPrior(2.0, MIXED_PRIORS[r])
    return (X, y, models.RandomEffects(Z, groups), MIXED_FAMILIES[family]), settings


def mixed_model(*given, **settings):
    arguments, keywords = mixed_problem(*given, **settings)
    return models.MixedLogJoint(*arguments, **keywords)


def eight_schools(centred: bool) -> Callable[[Tensor], Tensor]:
    """The log joint of the eight schools, θ = (mu, log tau, the effects, or what is left of them non-centred)."""
    y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], dtype=DTYPE)
    sd = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], dtype=DTYPE)

    def log_joint(theta: Tensor) -> Tensor:
        mu, tau, local = theta[..., :1], theta[..., 1:2], theta[..., 2:]
        effect = local if centred else mu + tau.exp() * local
        prior = -0.5 * ((local - mu) / tau.exp()).square() - tau if centred else -0.5 * local.square()
        top = (-0.5 * (mu / 5).square() - torch.log1p((tau.exp() / 5).square()) + tau)[..., 0]
        return top + (prior - 0.5 * ((y - effect) / sd).square()).sum(-1)

    return log_joint
