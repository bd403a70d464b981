"""Where `train_svgp` begins: length scales, inducing points, a second start; and what is said of scales.

Targets with Gaussian noise are on another scale than the model where their squared distances from the mean of the
prior are far from its variances. The end of a fit is compared with a constant function: N(y; ȳ, s²), or the share of
each class. Length scales so short that rows are hardly correlated are lengthened: the gradient of the bound vanishes
there.

Inducing points that are left open are rows of the data, each the one whose latent value is least certain given those
before it (greedy variance: Fine and Scheinberg 2001; Burt, Rasmussen and van der Wilk 2020).

The bound has an optimum at which the length scale of an input is endless, and what depends on that input is noise.
From equal length scales L-BFGS goes there where the function has several periods within the data, or depends on what
inputs do together. The residuals (derivatives of the expected log likelihoods) still depend on these inputs, which
means over cells of rows show. The second start is short in them, longer in those of which the targets depend as well,
and long elsewhere.

From a wrong period a periodic kernel finds no other; the first is that of the sine that explains most of the targets.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, PeriodicKernel
from gpytorch.likelihoods import Likelihood, SoftmaxLikelihood
from gpytorch.models import ApproximateGP
from gpytorch.settings import min_variance
from gpytorch.variational import VariationalStrategy
from linear_operator.operators import DiagLinearOperator
from scipy.optimize import minimize_scalar
from torch import Tensor

from torchngvi.adapters.gpytorch.distribution import NaturalGradientVariationalDistribution, base_strategy
from torchngvi.adapters.gpytorch.energies import Latents, conjugate, energy
from torchngvi.adapters.gpytorch.model import evaluated, kernels, row_dimension
from torchngvi.errors import InputError, PairError, ScaleWarning


class StartSettings(NamedTuple):
    """Where training begins, by `benchmarks/svgp_interactions.py`; and when points are few, by `svgp_neighbours.py`."""

    rows: int = 2048  # that are looked at; among 4M, if that is more, points are chosen
    far: float = 10.0  # times as far from the mean as the prior says, or as near, of which a warning is given
    no_better: float = 1e-3  # nats a row by which a fit has to be better than a constant function
    alone: float = 0.5  # correlation of a row with the nearest of M others; where smaller, the start tells little
    doublings: int = 30  # of length scales at most
    groups: tuple[int, ...] = (32, 8, 4)  # that the values of an input make, alone, in a pair and in a triple
    inputs: tuple[int, ...] = (10_000, 200, 30)  # at most, of which all, all pairs and all triples are looked at
    size: int = 20  # rows a group of a single input, at least; with fewer than five groups nothing is found
    entries: int = 2**22  # rows times combinations of inputs at most, but no fewer than a thousand rows
    share: float = 0.1  # of the variance that the means over cells explain, beyond chance
    deviations: float = 2.0  # of that share, above the largest that is expected by chance
    short: float = 0.5  # standard deviations of an input that shows in the residuals
    middle: float = 5.0  # of one that shows in the targets only
    long: float = 20.0  # of the others
    sines: tuple[int, float, float] = (1000, 1.5, 8.0)  # rows at most, least periods in the data, frequencies a period
    degree: int = 10  # of a polynomial, than which a sine has to explain more, where another kernel is for the smooth
    chance: tuple[float, float] = (4.0, 5.0)  # nats beyond chance of a sine, and of one beside its multiple
    beside: tuple[float, ...] = (0.02, 2, 3, 4)  # share of the variance of such a sine, and which multiples there are
    unexplained: float = 10.0  # times the noise that a row varies, given the inducing values, which do not explain it
    noticed: float = 0.01  # share of such rows that is told
    doubling: float = 0.01  # nats a row that twice as many inducing points have to bring, for inducing="auto"
    inside: float = 0.1  # of an interval or a bound, from its end to where a search begins, which else stays there
    exact: int = 1500  # rows at most on which the bound is compared with the exact log evidence


STARTS = StartSettings()


@torch.no_grad()
def check_points(strategy: VariationalStrategy, x: Tensor) -> None:
    """Warn where the inducing points are far from the rows in an input, as those in other units are."""
    Z, rows = (part.reshape(-1, part.shape[-1]) for part in (strategy.inducing_points, x))
    if left_open(strategy) or Z.shape[-1] != rows.shape[-1]:
        return
    ends = torch.stack([rows.amin(0), rows.amax(0), Z.amin(0), Z.amax(0)])
    low, high, first, last = ends
    away = torch.maximum(first - high, low - last) > STARTS.far * (high - low)
    for column in (away & (high > low)).nonzero()[:1, 0].tolist():
        low, high, first, last = ends[:, column].tolist()
        warnings.warn(
            f"the inducing points are in {first:.4g} to {last:.4g} in input {column}, and the rows in {low:.4g} "
            f"to {high:.4g}: so far away they say nothing of the function. Take them from the same inputs as the rows, "
            "or give torch.zeros(M, features), which are put on rows of the data.",
            ScaleWarning,
            stacklevel=4,
        )


@torch.no_grad()
def check_start(model: ApproximateGP, likelihood: Likelihood, latents: Latents, x: Tensor, y: Tensor) -> None:
    """Warn where targets with Gaussian noise are on another scale than the model begins with."""
    row = row_dimension(y, latents)
    if not conjugate(likelihood) or (not latents.coupled and likelihood.noise.shape[-1] not in (1, y.shape[row])):
        return  # the latter is refused elsewhere
    y = y.narrow(row, 0, min(STARTS.rows, y.shape[row])).double()
    with evaluated():
        values = model.forward(x[..., : STARTS.rows, :])
        if latents.coupled:
            shape = (*latents.strategy._variational_distribution.batch_shape, len(y))
            values = latents.values(values.mean.expand(shape), values.variance.expand(shape))
            variance = likelihood(values).variance.double()
        else:
            variance = values.variance.double() + likelihood.noise[..., : STARTS.rows].double()
    ratios = ((y - values.mean.double()).square() / variance).mean(row).sqrt().reshape(-1)
    worst, several = int(ratios.log().abs().argmax()), "task" if latents.coupled else "model"
    ratio, targets = float(ratios[worst]), y.movedim(row, 0).flatten(1)[:, worst] if y.ndim > 1 else y
    task = f" of {several} {worst}" * (y.ndim > 1)
    if math.isfinite(ratio) and not 1 / STARTS.far <= ratio <= STARTS.far:
        warnings.warn(
            f"the targets{task}, of mean {float(targets.mean()):.3g} and standard deviation "
            f"{float(targets.std(correction=0)):.3g}, are {ratio:.2g} times as far from the mean of the model as its "
            "prior and its noise say: from there the hyper-parameters may end at a poor optimum. Standardise the "
            "targets, or set the mean, the output scale and the noise to their scale first.",
            ScaleWarning,
            stacklevel=4,
        )


def constant_function(likelihood: Likelihood, y: Tensor, loss: float) -> str:
    """Say that a fit is no better than a constant function, with a warning, and what to do; "" where it is better."""
    constant = _of_a_constant(likelihood, y.double())
    if not loss > constant - STARTS.no_better:
        return ""
    noise = " with noise" if conjugate(likelihood) else ""
    advice = (
        "If the inputs tell something about the targets, standardise both, leave out inputs that do not matter "
        "(active_dims of the kernel), begin with a short length scale in those that do, or use more rows."
    )
    warnings.warn(
        f"the negative ELBO per datum, {loss:.4f}, is no better than that of a constant function{noise}, "
        f"{constant:.4f}. {advice}",
        ScaleWarning,
        stacklevel=3,
    )
    return (
        f"what was found is no better than a constant function{noise}, so every prediction is near the mean of the "
        f"targets. {advice}"
    )


@torch.no_grad()
def _of_a_constant(likelihood: Likelihood, y: Tensor) -> float:
    """The negative log likelihood per datum of the best constants, one a task; infinite where targets are equal."""
    if bool((y == y[0]).all()):
        return math.inf
    if isinstance(likelihood, SoftmaxLikelihood):
        shares = torch.unique(y, return_counts=True)[1] / len(y)
        return -float(torch.special.xlogy(shares, shares).sum())
    if y.ndim > 1 and not conjugate(likelihood):
        return sum(_of_a_constant(likelihood, of_task) for of_task in y.mT)
    learnt = [p.requires_grad for p in likelihood.parameters()]
    if y.ndim > 1 and not all(learnt):
        return math.inf
    if conjugate(likelihood) and any(learnt):
        own: Any = getattr(likelihood, "noise_covar", likelihood)
        noise = variance = y.var(0, correction=0)
        if not getattr(likelihood, "has_task_noise", True):
            noise = variance.mean().expand_as(variance)
        bounds = [getattr(own, f"raw_{name}_constraint", None) for name in ("noise", "task_noises")]
        least = sum(float(bound.lower_bound.max()) for bound in bounds if bound is not None)
        most = sum(float(bound.upper_bound.min()) for bound in bounds if bound is not None) or math.inf
        noise = noise.clamp(least, most)
        return float(0.5 * ((2 * math.pi * noise).log() + variance / noise).sum())
    nothing = torch.full_like(y, 2 * min_variance.value(y.dtype))  # the function itself is certain

    def at(value: float) -> float:
        return float(energy(likelihood, y, MultivariateNormal(value + 0.0 * y, DiagLinearOperator(nothing))).mean())

    reach = 10.0 + float(y.abs().max())
    found = minimize_scalar(at, bounds=(-reach, reach), method="bounded")
    return found.fun if math.isfinite(found.fun) else math.inf


@torch.no_grad()
@evaluated()
def check_repeats(model: ApproximateGP, x: Tensor) -> None:
    """Check that ``forward`` gives the same when it is called again, as a line search has to assume."""
    Z = base_strategy(model).inducing_points
    rows = torch.cat([Z, x[:8].expand(*Z.shape[:-2], -1, -1)], -2)
    first, second = (model.forward(rows) for _ in range(2))
    pairs = zip((first.mean, first.covariance_matrix), (second.mean, second.covariance_matrix), strict=True)
    if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-6, equal_nan=True) for a, b in pairs):
        raise PairError(
            f"{type(model).__name__}.forward gives other values when it is called again with the same inputs, as with "
            "dropout in training mode, and no line search could follow that. Use train_svgp_in_batches, whose steps "
            "may be noisy."
        )


@torch.no_grad()
@evaluated()
def lengthen(model: ApproximateGP, x: Tensor) -> bool:
    """Double the length scales that are learnt, until the prior relates the median row to the nearest of M others."""
    scaled = [m for m in model.modules() if isinstance(m, Kernel) and m.has_lengthscale]
    scaled = [kernel for kernel in scaled if kernel.raw_lengthscale.requires_grad]
    if not scaled or len(x) < 2:
        return False
    before = [kernel.raw_lengthscale.clone() for kernel in scaled]
    size = min(base_strategy(model).inducing_points.shape[-2], len(x) // 2)
    rows = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: size + STARTS.rows // 4].to(x.device)]
    for doublings in range(STARTS.doublings):
        if not _nearest(model, rows, size) < STARTS.alone:
            return doublings > 0
        longer = [2 * kernel.lengthscale for kernel in scaled]
        free = [kernel.raw_lengthscale_constraint.check(value) for kernel, value in zip(scaled, longer, strict=True)]
        if not any(free):
            break
        for kernel, value, may in zip(scaled, longer, free, strict=True):
            if may:
                kernel.lengthscale = value
    for kernel, value in zip(scaled, before, strict=True):
        kernel.raw_lengthscale.copy_(value)
    return False


def _nearest(model: ApproximateGP, rows: Tensor, size: int) -> float:
    """The median, over the rows after the first ``size``, of the largest prior correlation with one of these."""
    covariance = model.forward(rows).covariance_matrix
    scale = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    correlation = covariance / (scale[..., :, None] * scale[..., None, :])
    return float(correlation[..., size:, :size].abs().amax(-1).median())


def left_open(strategy: VariationalStrategy) -> bool:
    """Whether the inducing points coincide, as those of ``torch.zeros(M, features)``."""
    Z = strategy.inducing_points
    return Z.shape[-2] > 1 and bool((Z[..., :1, :] == Z).all())


@torch.no_grad()
@evaluated()
def choose_inducing_points(strategy: VariationalStrategy, x: Tensor) -> None:
    """Put the inducing points on rows of the data, by greedy variance with the kernel as it is."""
    Z = strategy.inducing_points
    size = Z.shape[-2]
    if len(x) < size:
        raise InputError(
            f"{size} inducing points cannot be chosen among {len(x)} rows of data: build the model with fewer."
        )
    Z.copy_(_greedy(strategy, x, beside=False).expand_as(Z))


def _greedy(strategy: VariationalStrategy, x: Tensor, beside: bool) -> Tensor:
    """Choose a row for each inducing point, the least certain one after another, beside these or in their place."""
    size = strategy.inducing_points.shape[-2]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(x.device)
    candidates = x[order[: max(STARTS.rows, 4 * size)]]
    covariance = strategy.model.forward(candidates).covariance_matrix.double()
    if beside:
        rows = kernels(strategy, candidates).projection(torch.float64).rows
        covariance = covariance - rows @ rows.mT
    mean = covariance.reshape(-1, *covariance.shape[-2:]).mean(0)  # over functions
    return candidates[pivots(mean, size)]


@torch.no_grad()
@evaluated()
def double_inducing_points(strategy: VariationalStrategy, x: Tensor) -> None:
    """Put as many inducing points again beside those that there are, by greedy variance; q begins at the prior."""
    Z, own = strategy.inducing_points, strategy._variational_distribution
    both = torch.cat([Z, _greedy(strategy, x, beside=True).to(Z).expand_as(Z)], -2)
    learnt = isinstance(Z, torch.nn.Parameter)
    strategy.inducing_points = torch.nn.Parameter(both, requires_grad=Z.requires_grad) if learnt else both
    options = {"posterior": type(own.posterior)} if isinstance(own, NaturalGradientVariationalDistribution) else {}
    q = type(own)(both.shape[-2], batch_shape=own.batch_shape, mean_init_std=own.mean_init_std, **options)
    strategy._variational_distribution = q.to(dtype=own.dtype, device=own.device)
    strategy.variational_params_initialized.fill_(0)


def pivots(covariance: Tensor, size: int) -> Tensor:
    """The pivots of a Cholesky factorisation: each row has the largest variance given those before it."""
    variance = covariance.diagonal().clone()
    least = len(variance) * torch.finfo(variance.dtype).eps * variance.max()
    factor = covariance.new_zeros(size, len(variance))
    chosen: list[Tensor] = []
    for step in range(size):
        row = variance.argmax()
        chosen.append(row)
        column = covariance[row] - factor[:step, row] @ factor[:step]
        # a row that those before it explain to rounding adds nothing; none is taken twice
        factor[step] = torch.where(variance[row] > least, column / variance[row].clamp_min(least).sqrt(), 0.0)
        variance = (variance - factor[step].square()).clamp_min(0.0)
        variance[torch.stack(chosen)] = -1.0
    return torch.stack(chosen)


@torch.no_grad()
def telling(scores: Tensor, x: Tensor) -> Tensor:
    """Which inputs (N, features) still tell something about scores (N,), each for itself, in pairs or in triples."""
    found = x.new_zeros(x.shape[-1], dtype=torch.bool)
    if len(x) // STARTS.size < 5:
        return found
    left, largest = scores.double() - scores.double().mean(), x.new_zeros(x.shape[-1], dtype=torch.float64)
    total, columns = left.square().mean(), x.mT.contiguous()
    ranks = torch.searchsorted(columns.sort().values, columns).mT  # equal values have one
    for order, (groups, most) in enumerate(zip(STARTS.groups, STARTS.inputs, strict=True), 1):
        groups = min(groups, len(x) // STARTS.size)
        sets = torch.combinations(largest.argsort(descending=True, stable=True)[:most].sort().values, order)
        if not len(sets):
            break
        codes, largest = ranks * groups // len(x), torch.full_like(largest, -math.inf)
        part = slice(None, None, math.ceil(len(x) / max(1000, STARTS.entries // len(sets))))
        chance = math.sqrt(2 * math.log(len(sets))) + STARTS.deviations
        for _ in range(len(found)):  # what is found is taken out, and the rest is looked at again
            shares, deviations = _shares(left[part], codes[part], sets, groups, total)
            for column in sets.mT:
                largest.scatter_reduce_(0, column, shares, "amax")
            excess = shares - (chance * deviations).clamp_min(STARTS.share)
            best = sets[excess.argmax()]
            if not excess.max() > 0:
                break
            found[best] = True
            cells = _cells(codes, best[None], groups)[:, 0]
            left = left - (torch.bincount(cells, left) / torch.bincount(cells).clamp_min(1))[cells]
    return found


def _cells(codes: Tensor, sets: Tensor, groups: int) -> Tensor:
    """The cell of each row in the grid of each set of inputs, (N, sets)."""
    return (codes[:, sets] * groups ** torch.arange(sets.shape[-1], device=sets.device)).sum(-1)


def _shares(left: Tensor, codes: Tensor, sets: Tensor, groups: int, total: Tensor) -> tuple[Tensor, Tensor]:
    """The shares of a variance that means over the cells of each set explain beyond chance, with their deviations."""
    number, explained, free = groups ** sets.shape[-1], [], []
    for some in sets.split(512):
        cells = (_cells(codes, some, groups) + number * torch.arange(len(some), device=sets.device)).flatten()
        counts = torch.bincount(cells, minlength=number * len(some))
        sums = torch.bincount(cells, left.repeat_interleave(len(some)), minlength=len(counts))
        explained.append((sums.square() / counts.clamp_min(1)).reshape(-1, number).sum(-1))
        free.append((counts > 0).reshape(-1, number).sum(-1) - 1)
    rows, ratio, freedom = len(left), left.square().mean() / total, torch.cat(free)
    chance = ratio * freedom / (rows - 1)
    return torch.cat(explained) / (rows * total) - chance, ratio * (2 * freedom).sqrt() / rows


@torch.no_grad()
@evaluated()
def shorten(model: ApproximateGP, x: Tensor, told: Tensor, seen: Tensor) -> bool:
    """Make learnt length scales short in inputs that are told, longer in those that are seen, long in the others."""
    lengths = torch.where(told, STARTS.short, torch.where(seen, STARTS.middle, STARTS.long)) * x.std(0)
    changed = False
    for kernel in model.modules():
        # the length scale of a periodic kernel is no distance between inputs
        if not isinstance(kernel, Kernel) or isinstance(kernel, PeriodicKernel) or not kernel.has_lengthscale:
            continue
        own = torch.arange(len(told), device=x.device) if kernel.active_dims is None else kernel.active_dims
        here = told[own] if bool((own < len(told)).all()) else told[:0]
        if not kernel.raw_lengthscale.requires_grad or not bool(here.any()):
            continue
        count = kernel.lengthscale.shape[-1]
        if count not in (1, len(own)):  # of inputs that forward makes
            continue
        value = lengths[own] if count > 1 else lengths[own][here].min()
        value = value.to(kernel.lengthscale.dtype).expand_as(kernel.lengthscale)
        if kernel.raw_lengthscale_constraint.check(value):
            kernel.lengthscale, changed = value, True
    if changed:
        lengthen(model, x)
    return changed


@torch.no_grad()
def begin_periods(model: ApproximateGP, x: Tensor, y: Tensor, value: Callable[[], float]) -> None:
    """Begin learnt periods of periodic kernels at those of the targets, unless a value is higher there."""
    own = [m for m in model.modules() if isinstance(m, PeriodicKernel) and m.raw_period_length.requires_grad]
    before, start = [kernel.raw_period_length.clone() for kernel in own], math.inf
    leaves = [m for m in model.modules() if isinstance(m, Kernel) and not any(True for _ in m.sub_kernels())]
    others = [m.active_dims for m in leaves if not isinstance(m, PeriodicKernel)]
    smooth = {d for d in range(x.shape[-1]) if any(dims is None or d in dims for dims in others)}
    if own and not left_open(model.variational_strategy):
        start = value()
    for kernel in own:
        dims = torch.arange(x.shape[-1]) if kernel.active_dims is None else kernel.active_dims
        if bool((dims >= x.shape[-1]).any()):  # of inputs that forward makes
            continue
        periods, shares = (
            torch.tensor([period_of(x, y, int(d), int(d) in smooth) for d in dims]).to(kernel.period_length).unbind(-1)
        )
        periods = periods if kernel.period_length.shape[-1] == len(dims) else periods[shares.argmax()]
        value_there = torch.where(periods.isfinite(), periods, kernel.period_length)
        if kernel.raw_period_length_constraint.check(value_there):
            kernel.period_length = value_there
    if start < math.inf and not value() <= start:
        for kernel, raw in zip(own, before, strict=True):
            kernel.raw_period_length.copy_(raw)


def period_of(x: Tensor, y: Tensor, feature: int, smooth: bool = True) -> tuple[float, float]:
    """The period of the sine that explains most, more than a polynomial if ``smooth``, and its share; else infinite."""
    most, least, density = STARTS.sines
    some = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:most].to(x.device)
    x, left = x[some].double(), y[some].double().reshape(len(some), -1).mean(-1)
    rows, t = len(x), x[:, feature] - x[:, feature].mean()
    reach, groups = t.max() - t.min(), min(STARTS.groups[0], rows // STARTS.size)
    if groups < 5 or not reach > 0:
        return math.inf, 0.0
    for other in range(x.shape[-1]):
        if other != feature:
            cells = torch.searchsorted(x[:, other].sort().values, x[:, other].contiguous()) * groups // rows
            left = left - (torch.bincount(cells, left) / torch.bincount(cells).clamp_min(1))[cells]
    trend = torch.linalg.qr((t / reach)[:, None] ** torch.arange(4, device=x.device)).Q
    left = left - trend @ (left @ trend)
    total = left.square().sum()

    def waves(frequencies: Tensor) -> Tensor:
        angle = 2 * math.pi * t[:, None] * frequencies
        both = torch.stack([angle.cos(), angle.sin()])
        return both - trend @ (trend.mT @ both)

    def shares(frequencies: Tensor, scores: Tensor) -> Tensor:
        c, s = waves(frequencies)
        cc, ss, cs, yc, ys = c.square().sum(0), s.square().sum(0), (c * s).sum(0), scores @ c, scores @ s
        return (yc.square() * ss - 2 * yc * ys * cs + ys.square() * cc) / (cc * ss - cs.square()) / total

    grid = torch.arange(least, rows / 4, 1 / density, device=x.device) / reach
    share = shares(grid, left)
    if not share.max() > (math.log(len(grid)) + math.log(x.shape[-1]) + STARTS.chance[0]) * 2 / rows:
        return math.inf, 0.0
    fine = grid[share.argmax()] + torch.linspace(-1, 1, 129).to(t) / (density * reach)
    best = fine[shares(fine, left).argmax()]
    wave = waves(best[None])[..., 0].mT
    rest = left - wave @ torch.linalg.lstsq(wave, left).solution
    if smooth:
        basis = torch.linalg.qr((t / reach)[:, None] ** torch.arange(STARTS.degree + 1, device=x.device)).Q
        gain = ((left - basis @ (left @ basis)).square().sum() / rest.square().sum()).log() * rows / 2
        if not gain > STARTS.chance[0]:
            return math.inf, 0.0
    left = rest
    smallest, *multiples = STARTS.beside
    below = shares(best / torch.tensor(multiples).to(t), left).tolist()
    least_share = max(smallest, (math.log(len(multiples)) + STARTS.chance[1]) / rows)
    told = (k for k, part in zip(multiples, below, strict=True) if part > least_share and k <= best * reach)
    return float(next(told, 1) / best), float(share.max())
