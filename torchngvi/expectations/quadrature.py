"""Expectations of targets without draws: piecewise bounds of the softplus, exact ones, and by cliques of a forest."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self, final

import torch
from torch import Tensor

from torchngvi.arguments import is_number, is_size, read_flag, read_instance, read_list, shown
from torchngvi.errors import InputError, PairError
from torchngvi.expectations.draws import Fixed
from torchngvi.interfaces import (
    Cost,
    Estimator,
    Expectation,
    LinearTarget,
    Marginals,
    Posterior,
    Target,
    TractableTarget,
)
from torchngvi.models.factors import FactorTarget
from torchngvi.numerics.arrays import remembered
from torchngvi.numerics.gaussian_integrals import Moments, in_blocks
from torchngvi.posteriors.precision import clique_marginals

_ROWS = 2048  # of a block on the CPU


class Piece(NamedTuple):
    """One quadratic piece a x² + b x + c on [low, high] of a bound."""

    low: float
    high: float
    a: float
    b: float
    c: float


@final
class PiecewiseBound(Estimator):
    """E_q[ℓ] with log(1 + eˣ) replaced by R quadratic pieces above it.

        log(1 + eˣ) ≤ q_r(x) = a x² + b x + c on [l_r, u_r],   F = Σ_r E[q_r; piece r],   α = ∂F/∂e,   β = 2 ∂F/∂v

    under N(e, s²) (Marlin, Khan and Murphy 2011; Kumar et al. 2025, section 3.6).  Use it to compare with experiments
    that use this bound; `Quadrature` is exact at every s, for half as much time again.  It serves likelihoods made of
    log(1 + eˣ): `BernoulliLogit` and `NegativeBinomial`.  The value is an upper bound, within ε(R) = O(R⁻³) a row at
    every variance: 7.4e-3, 1.3e-3, 1.4e-4, 1.7e-5 for R = 6, 10, 20, 40 pieces.

    The curvature is not that close: β deviates by 3e-5 at s = 1 but by 1e-3 at s = 0.2, 5e-3 at 0.1
    and 0.35 at 0.01 (R = 20), and is *negative* for some rows with s ≤ 0.2, which large data sets
    have.  H can then be indefinite.  What is returned is by default the exact derivative of the value
    all the same, so that values may be compared and steps found by trial are safe; ``clip`` returns
    max(β, 0), with which a constant lr stays in the cone, and which is no derivative: steps by trial
    refuse it.

    Args:
        pieces: the number R of pieces, even, from 2 to 100; ignored with a table.
        clip: whether to return max(β, 0) in the place of β.
        table: pieces of one's own in ascending order, rows (low, high, a, b, c) from -inf to inf.

    Raises:
        InputError: if the number of pieces is odd, below 2 or above 100, or the table has gaps.
        PairError: on use, if the likelihood is not made of log(1 + eˣ).

    >>> bound = PiecewiseBound(4)
    >>> len(bound.pieces), round(bound.gap, 6)
    (4, 0.032954)
    """

    needs = LinearTarget
    unbiased = False

    def __init__(self, pieces: int = 20, *, clip: bool = False, table: Sequence[Sequence[float]] | None = None) -> None:
        if table is None:
            if not is_size(pieces, at_least=2) or pieces % 2 or pieces > 100:
                raise InputError(
                    f"pieces must be even, half of them on each side of 0, and from 2 to 100; got {shown(pieces)}."
                )
            self.pieces = best_pieces(pieces)
        else:
            self.pieces = _checked(table)
        self.clip = clip = read_flag("clip", clip)
        self.comparable = not clip

    @property
    def gap(self) -> float:
        """The largest distance of the bound from log(1 + eˣ)."""
        return max(_gap(piece) for piece in self.pieces)

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Evaluate the bound of E_q[ℓ] and its derivative at q."""
        assert isinstance(target, LinearTarget)
        frame = q.frame()
        rows = target.marginals(frame)
        value, sites = target.energy_from(frame, rows, self._bounded(rows))
        return Expectation(value, sites, target.temperature, self.comparable and target.comparable, Cost(1, 1))

    def _bounded(self, rows: Marginals) -> Moments:
        if not rows.likelihood.of_softplus:
            raise PairError(
                f"PiecewiseBound bounds log(1 + e^x), of which {type(rows.likelihood).__name__} is not made. "
                "Use Quadrature(), or the family bernoulli_logit."
            )
        moments: Moments = rows.likelihood.expected(rows.mean, rows.variance, rows.y, self.softplus)
        return moments._replace(curvature=moments.curvature.clamp_min(0.0)) if self.clip else moments

    def softplus(self, mean: Tensor, variance: Tensor) -> Moments:
        """The moments F, α and β of the bound under N(mean, variance).

        Args:
            mean: the means of the predictors, (*batch, N).
            variance: their variances, (*batch, N).

        Returns:
            F, α = ∂F/∂e and β = 2 ∂F/∂v, (*batch, N) each.
        """
        return in_blocks(functools.partial(_moments, self.pieces), _ROWS, mean, variance)


def _moments(pieces: tuple[Piece, ...], mean: Tensor, variance: Tensor) -> Moments:
    """A block of rows (N,)."""
    # The pieces do not join: with z = (l - e)/s and the jumps J = q_r+1 - q_r and J' = q_r+1' - q_r' at the breakpoints
    # α = Σ_r E[q_r'; r] + Σ J φ(z)/s and β = Σ_r E[q_r''; r] + Σ (J z/s + J') φ(z)/s.
    (a, b, c), edges, jumps, bends = _tensors(pieces, mean.dtype, mean.device)
    s = variance.sqrt().clamp_min(torch.finfo(mean.dtype).tiny ** 0.5)[:, None]
    e = mean[:, None]
    z = (edges - e) / s  # (N, R - 1)
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    # E[1; r], E[(x - e)/s; r], E[(x - e)²/s²; r]
    mass = torch.nn.functional.pad(torch.special.ndtr(z), (0, 1), value=1.0)
    mass = mass - torch.nn.functional.pad(mass[:, :-1], (1, 0))
    first = -_differences(density)
    second = mass - _differences(z.nan_to_num(posinf=0.0, neginf=0.0) * density)
    at, slope = (a * e + b) * e + c, 2 * a * e + b
    value = at * mass + slope * s * first + a * s * s * second
    value_slope = (slope * mass + 2 * a * s * first).sum(-1) + (jumps * density / s).sum(-1)
    curvature = (2 * a * mass).sum(-1) + ((jumps * z / s + bends) * density / s).sum(-1)
    return Moments(value.sum(-1), value_slope, curvature)


def _differences(x: Tensor) -> Tensor:
    """x_r+1 - x_r with zeros at both ends."""
    return torch.nn.functional.pad(x, (0, 1)) - torch.nn.functional.pad(x, (1, 0))


@remembered
def _tensors(
    pieces: tuple[Piece, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(a, b, c), the breakpoints, and the jumps of q and q' there."""
    edges = [piece.high for piece in pieces[:-1]]
    pairs = list(zip(pieces, pieces[1:], edges, strict=False))
    jumps = [((v.a - u.a) * x + v.b - u.b) * x + v.c - u.c for u, v, x in pairs]
    bends = [2 * (v.a - u.a) * x + v.b - u.b for u, v, x in pairs]
    coefficients = torch.tensor([(p.a, p.b, p.c) for p in pieces], dtype=torch.float64, device="cpu").mT
    parts = [coefficients, *(torch.tensor(x, dtype=torch.float64, device="cpu") for x in (edges, jumps, bends))]
    return tuple(part.to(device, dtype) for part in parts)  # type: ignore[return-value]


# ------------------------------------------------------------------------------------ the table


@functools.cache
def best_pieces(count: int) -> tuple[Piece, ...]:
    """The pieces with the smallest gap ε: each the best quadratic on its interval, shifted up by its error.

    The left tail is the constant ε up to log(e^ε - 1); each next interval is as long as 2 · error ≤ ε allows; ε is
    such that 0 is a breakpoint.  The right half is the mirror image, from log(1 + eˣ) = x + log(1 + e⁻ˣ).
    """
    number = count // 2 - 1  # of quadratic pieces on the left
    if number == 0:
        left = [Piece(-math.inf, 0.0, 0.0, 0.0, math.log(2.0))]
    else:
        # the last piece reaches exactly 0, and its error falls as ε grows; ε is about 1.1 R⁻³
        log_gap = _root(lambda x: _left(math.exp(x), number)[1], *(math.log(f / count**3) for f in (0.8, 3.0)))
        left = _left(math.exp(log_gap), number)[0]
    right = [Piece(-p.high, -p.low, p.a, 1 - p.b, p.c) for p in reversed(left)]
    return tuple(Piece(p.low + 0.0, p.high + 0.0, p.a, p.b, p.c) for p in (*left, *right))


def _left(gap: float, number: int) -> tuple[list[Piece], float]:
    """Pieces from -inf to 0, and log of the gap of the last over ε."""
    low = math.log(math.expm1(gap))
    pieces = [Piece(-math.inf, low, 0.0, 0.0, gap)]
    for index in range(number - 1):
        high = _longest(low, gap)
        if high >= 0:
            return pieces, float(index - number)  # ε is so large that fewer pieces would do
        pieces.append(_quadratic(low, high)[0])
        low = high
    pieces.append(_quadratic(low, 0.0)[0])
    return pieces, _excess(low, 0.0, gap)


def _longest(low: float, gap: float) -> float:
    """The end of the longest piece from low whose gap is ε, or 0."""
    # error ≈ third derivative · length³/192, too short where that derivative falls again
    length = (96 * gap * math.exp(-low)) ** (1 / 3)
    while low + length < 0 and _excess(low, low + length, gap) < 0:
        length *= 1.5
    length = min(length, -low)
    if _excess(low, low + length, gap) <= 0:
        return 0.0
    # log of the error is nearly 3 log of the length
    return low + math.exp(
        _root(lambda x: _excess(low, low + math.exp(x), gap), *(math.log(f * length) for f in (0.2, 1)))
    )


def _excess(low: float, high: float, gap: float) -> float:
    return math.log(2 * _quadratic(low, high)[1] / gap)


def _quadratic(low: float, high: float) -> tuple[Piece, float]:
    """The best uniform approximation of log(1 + eˣ) on [low, high], low < high ≤ 0, raised by its error."""
    middle, half = 0.5 * (low + high), 0.5 * (high - low)
    points = [-1.0, -0.5, 0.5, 1.0]
    for _ in range(50):
        values = [_softplus(middle + half * x) for x in points]
        error = _divided(points, values)[3] / _divided(points, [1.0, -1.0, 1.0, -1.0])[3]
        d = _divided(points, [v - error * s for v, s in zip(values, (1.0, -1.0, 1.0, -1.0), strict=True)])
        # Newton's form to powers of x
        x0, x1 = points[:2]
        square, linear, constant = d[2], d[1] - d[2] * (x0 + x1), d[0] - d[1] * x0 + d[2] * x0 * x1
        moved = [-1.0, *(_extremum(end, middle, half, square, linear) for end in (-1.0, 1.0)), 1.0]
        done = max(abs(x - y) for x, y in zip(points, moved, strict=True)) < 1e-12
        points = moved
        if done:
            break
    a = square / half**2
    b = linear / half - 2 * a * middle
    c = constant - linear * middle / half + a * middle**2 + abs(error)
    return Piece(low, high, a, b, c), abs(error)


def _extremum(x: float, middle: float, half: float, square: float, linear: float) -> float:
    """The zero of the error's derivative nearest to that end: convex there, so that Newton is monotone."""
    for _ in range(60):
        p = 1 / (1 + math.exp(-(middle + half * x)))
        step = (half * p - linear - 2 * square * x) / (half * half * p * (1 - p) - 2 * square)
        x = min(max(x - step, -1.0), 1.0)
        if abs(step) < 1e-14:
            break
    return x


def _divided(x: Sequence[float], y: Sequence[float]) -> list[float]:
    """Divided differences y[x0], y[x0, x1], .."""
    table, out = list(y), [y[0]]
    for order in range(1, len(x)):
        table = [(v - u) / (x[i + order] - x[i]) for i, (u, v) in enumerate(zip(table, table[1:], strict=False))]
        out.append(table[0])
    return out


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """A zero between two signs, of a function about 1 steep: regula falsi with halved weights (Illinois)."""
    at_low, at_high = function(low), function(high)
    for _ in range(60):
        x = high - at_high * (high - low) / (at_high - at_low)
        if not min(low, high) < x < max(low, high):
            x = 0.5 * (low + high)
        at = function(x)
        if abs(at) < 1e-10:
            return x
        if (at > 0) != (at_high > 0):
            low, at_low = high, at_high
        else:
            at_low *= 0.5
        high, at_high = x, at
    return high


def _softplus(x: float) -> float:
    return math.log1p(math.exp(x)) if x < 0 else x + math.log1p(math.exp(-x))


def _gap(piece: Piece) -> float:
    """The largest distance of one piece from log(1 + eˣ), on a grid."""
    low, high = max(piece.low, -40.0), min(piece.high, 40.0)
    grid = (low + (high - low) * k / 1000 for k in range(1001))
    return max((piece.a * x + piece.b) * x + piece.c - _softplus(x) for x in grid)


def _checked(table: Sequence[Sequence[float]]) -> tuple[Piece, ...]:
    what = "has rows (low, high, a, b, c) of numbers"
    rows = [read_list("table", row, what) for row in read_list("table", table, what)]
    if not all(len(row) == len(Piece._fields) and all(is_number(x, infinite=True) for x in row) for row in rows):
        raise InputError(f"table {what}; got {shown(table)}.")
    pieces = tuple(Piece(*map(float, row)) for row in rows)
    joined = all(left.high == right.low for left, right in zip(pieces, pieces[1:], strict=False))
    ends = len(pieces) >= 2 and pieces[0].low == -math.inf and pieces[-1].high == math.inf
    if not (ends and joined and pieces[0].a == 0 and pieces[-1].a == 0):
        raise InputError(
            "a table has rows (low, high, a, b, c) from -inf to inf, each starting where the last ended, the first "
            f"and last with a = 0; got {len(pieces)} rows that do not. Sort them by low."
        )
    return pieces


# ------------------------------------------------------------------------------------ exact expectations


@final
class Quadrature(Estimator):
    """E_q[ℓ] and its derivative as the target computes them, without draws: the default where the target knows them.

    For generalised linear models E_q[ℓ] is a sum of scalar expectations, and the packet is `Sites`: for each row α =
    ∂F/∂e and β = 2 ∂F/∂v, from which each posterior builds what it needs, a D x D curvature or less.  The derivative is
    that of the computed value, so that steps can be found by trial.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> q = CholeskyGaussian(1)
    >>> model = GeneralizedLinear(torch.ones(1, 1), [2.0], "gaussian")  # y = 2 with noise 1, prior N(0, 1)
    >>> e = Quadrature()(q, model)
    >>> e.derivative.raw().g.item(), e.derivative.raw().H.item()  # -2, and 1 of the data with 1 of the prior
    (-2.0, 2.0)
    """

    comparable = True
    needs = TractableTarget

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Evaluate E_q[ℓ] and its derivative at q, as the target gives them."""
        assert isinstance(target, TractableTarget)
        value, derivative = target.expected_energy(q.frame())
        return Expectation(value, derivative, target.temperature, target.comparable, Cost(1, 1))


@final
class PerFactor(Estimator):
    """The expectation of a `FactorTarget`, each factor on its own cliques.

        a = Σ_c a_c      W = Σ_c W_c,      a_c = C_cᵀ g_c,  W_c = C_cᵀ H_c C_c, each in the places of its clique

    For a factor f_c of the coordinates θ_c of a node and its ancestors, E_q[log f_c] is that under the marginal N(m_c,
    C_c C_cᵀ) of q, where C_c is the part of an upper triangular C in the clique; the marginals are the members of one
    batch.  Use it for models with many groups: k coordinates of a clique take the place of D.  `Fixed` draws determine
    the fit with 2k of them, not 2D, and second derivatives are k x k.  Give each group draws of its own by
    ``apart=True``: where all see the same ones, their errors in the global coordinates add up.  `torchngvi.fit` does so
    by itself.

    Args:
        estimator: of the factors, ``Stein(Fixed(64, apart=True))`` for example; those that know their expectation are
            exact.

    Raises:
        PairError: on use, a q that is not over the forest of the target, or an estimator whose derivative is that of
            its value up to noise only, as `SampleAverage`, with draws that the cliques share: the noise of their sum is
            then not the sum of theirs.

    >>> import torch
    >>> from torchngvi import VN, PrecisionCholeskyGaussian
    >>> from torchngvi.expectations import Hessian
    >>> from torchngvi.stepsizes import Constant
    >>> from torchngvi.structures import arrow
    >>> groups, y = arrow(groups=3, local=1, globals=1), torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    >>> def group(theta):  # b_n, g
    ...     return -0.5 * (y - theta[..., 0]) ** 2 - 0.5 * (theta[..., 0] - theta[..., 1]) ** 2
    >>> target = FactorTarget(groups, [(0, group), (-1, lambda theta: -0.5 * theta[..., 0] ** 2)])
    >>> q = PrecisionCholeskyGaussian(4, structure=groups, dtype=torch.float64)
    >>> opt = VN(q, lr=1.0, step_size=Constant(), estimator=PerFactor(Hessian(draws=2)))
    >>> loss = [opt.step(target) for _ in range(2)]
    >>> [round(x, 9) for x in q.mean.tolist()]
    [0.4, -0.35, 1.15, 0.3]
    """

    needs = FactorTarget

    def __init__(self, estimator: Estimator) -> None:
        what = "is that of the factors, such as Stein(16)"
        self.estimator = read_instance("estimator", estimator, Estimator, what, error=PairError)
        self.comparable, self.unbiased = estimator.comparable, estimator.unbiased
        self.generator = getattr(estimator, "generator", None)  # the optimizer saves its state

    @property
    def fixed(self) -> bool:
        """Whether the estimator of the factors sees the same draws at every call."""
        return self.estimator.fixed

    def fresh(self, number: int) -> Self:
        """Return the estimator on other draws, where those of the factors are fixed."""
        return type(self)(self.estimator.fresh(number))

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Evaluate at q."""
        assert isinstance(target, FactorTarget)
        structure, exact = target.structure, Quadrature()
        if q.structure != structure or not q.upper:
            raise PairError(
                f"PerFactor needs a q whose precision has the pattern of its target, {structure}; got a "
                f"{type(q).__name__} over {q.structure}. Use PrecisionCholeskyGaussian({q.dim}, structure=...)."
            )
        cliques, seen, packets = clique_marginals(q), [], []
        for kind, factor in target.by_kind():
            clique, estimator = cliques[kind], exact if isinstance(factor, TractableTarget) else self.estimator
            seen.append(estimator(clique, factor))
            packets.append((kind, seen[-1].derivative.framed(clique.frame())))
        values = [e.value.sum(-1) for e in seen]
        return Expectation(
            sum(values[1:], values[0]),
            target.assembled(packets),
            target.temperature,
            self.comparable and target.comparable,
            Cost(*(max(parts) for parts in zip(*(e.cost for e in seen), strict=True))),  # a pass sees each clique once
            self._noise2(seen),
        )

    def _noise2(self, seen: list[Expectation]) -> Tensor | None:
        """The noise of independent terms adds up, in the coordinates of a group and in those that groups share."""
        noises = [e.noise2.sum(-1) for e in seen if e.noise2 is not None]
        if not noises:
            return None
        draws = getattr(self.estimator, "draws", None)
        if not isinstance(draws, Fixed) or not draws.apart:
            raise PairError(
                f"{type(self.estimator).__name__} has its steps judged by its noise, which does not add up over "
                "cliques that share their draws. Give each its own: Fixed(64, apart=True)."
            )
        return sum(noises[1:], noises[0])
