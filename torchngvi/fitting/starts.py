"""Where a fit starts: a log joint at a rough mode with the curvature there, and many rows where some of them lead.

The mode is trusted where the search has found one and the negative ELBO of its Gaussian N(mode, γ H⁻¹) is about what
the quadratic model of ℓ there promises,

    ℓ(mode) + ½γD - γ entropy,      minus Laplace's evidence where q has a full covariance,

within max(1, 0.3 D) nats: on a few draws, which are taken anyway.  Otherwise q keeps its mean and takes the best of
some scales, and a mean field comes first, see `pool`.  Where q is astronomically worse than the mode, as for data
in units of their own, the best scale is that of a q which explains nothing, and would hold all unknown scales near
nought: then q keeps its scale, or takes the widest at which the log joint is known to a nat.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from torchngvi.derivatives import energy_and_gradient
from torchngvi.distributed import Processes, synchronize
from torchngvi.errors import InputError
from torchngvi.expectations.draws import Fixed
from torchngvi.expectations.sampled import SampleAverage
from torchngvi.interfaces import Coordinates, FullPrior, Target
from torchngvi.methods import VN
from torchngvi.mode import Mode, find_mode, find_modes, number_of_starts, starting_points, uniform_points
from torchngvi.models import (
    DataLogJoint,
    GeneralizedLinear,
    LogJoint,
    ShardedDraws,
    ShardedLogJoint,
    ShardedTractable,
    Streamed,
)
from torchngvi.models.factors import FAILING, Guarded, in_factors
from torchngvi.numerics.linalg import cholesky
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.precision import forest_of
from torchngvi.structures import Dense

_STATE = ("mean", "evidence", "reached", "first_log_sd", "looked")


@dataclass(frozen=True)
class EngineSettings:
    """The numbers of a fit of a log joint by a pool of draws, for `torchngvi.fitting.sample_average.SampleAverages`.

    They were chosen on eight schools, forty groups, logistic regressions of 50 and Poisson regressions of 33
    coefficients, and judged on the other rows of ``python -m benchmarks.engine_table``, whose option
    ``--set FIELD=VALUE`` runs them with another number; the appendix of black_box.md has a row for each.
    """

    trust: tuple[float, float] = (1.0, 0.3)  # nats, and nats a coordinate, by which a trusted mode may miss its promise
    units: float = 3000.0  # nats a coordinate by which q is worse than a mode, where data are in units of their own
    # dimensions up to which a pool fits a full covariance, where a mode is trusted and where none is: its regressions
    # take D² numbers a draw; in as many as the first a mean field comes first where no mode is trusted
    widest: tuple[int, int] = (150, 300)
    fewest: int = 32  # draws of a lot, and of an average, at least
    radius: tuple[float, float] = (0.5, 0.05)  # nats, and nats a coordinate, that q may move from where it drew last
    bold: float = 0.1  # share of the nats just gained by which it may move where it is far from an optimum
    far: float = 4.0  # times noise² that norm² is there
    stretch: tuple[float, float] = (0.25, 16.0)  # bounds of the eigenvalues of a first step there
    steps: int = 12  # of Anderson's acceleration over one pool, which remembers half as many
    lengths: tuple[float, ...] = (1.0, 0.4, 0.16, 0.064)  # of each step that are tried
    solved: float = 0.05  # share of noise² that norm² may be at the end of the steps
    kept: float = 0.5  # share of the effective draws that steps must leave
    share: float = 0.1  # of the weights, times the mean of a draw, below which a lot is forgotten
    lots: int = 40  # that are kept, at most
    aim: float = 0.8  # share of tolerance² that noise² is to have at the end
    # share of the effective draws that a lot has, at most: in a valley, at the end, and where it creeps
    growth: tuple[float, float, float] = (0.25, 1.0, 0.3)
    least: int = 200  # effective draws at the end, unless they say that noise² is a hundredth of what is tolerated
    cosine: float = 0.6  # of two moves from which on a third one may go on along the last
    looks: int = 64  # values of the log joint at each of the places along it
    # norm at which a mean field before the full covariance ends, and from which on another start is tried before q
    # needs more than so many `dear` draws
    rough: float = 0.3
    draft: int = 1500  # draws after which it ends in any case
    early: int = 4096  # draws of the full covariance before another start may be tried in the place of more
    dear: int = 512  # draws of an average, or of a pool near its end, from which on another start is worth its cost
    most: int = 65_536  # draws in all
    numbers: int = 8_000_000  # draws times coordinates, for the memory: about fifty bytes each


def sampled_loss(q: Gaussian, target: Guarded, draws: int, seed: int, *, failing: float = FAILING) -> float:
    """L of q, of a batch the sum, from whitened draws, the same for every q; infinite where it is not finite."""
    with torch.no_grad():
        values = target.log_joint(q.push_noise(Fixed(draws, seed=seed)(q.mean_probe.detach())).detach())
        bad = values.isnan()
        # of one q the log joint may fail at a small share of them
        if not q.batch_shape and 0 < int(bad.sum()) <= max(2 * (failing > 0), failing * draws):
            values = values[~bad]
        loss = float((-values.mean(0) - target.temperature * q.entropy()).sum())
    return loss if math.isfinite(loss) else math.inf


def allowance(dim: int, trust: tuple[float, float]) -> float:
    """The nats by which a mode may miss its promise and be trusted, of a number and a number a coordinate."""
    return max(trust[0], trust[1] * dim)


class Starts:
    """The first start of a fit and the others, and where a fit can go back to."""

    bounded = 1e12  # nats to which the ELBO may rise
    scales = (1.0, 0.3, 0.1, 0.03, 0.01, 1e-3)  # of that of q, where the first draws fall off the support

    def __init__(self, q: Gaussian, target: Guarded, seed: int, settings: EngineSettings) -> None:
        self.settings = settings
        self.q, self.target, self.seed = q, target, seed
        self.mean = q.frame().mean.clone()  # before the fit; half of the starts are drawn about it
        self.evidence = -math.inf  # Laplace's, of the start; no mode was trusted
        self.reached = math.inf  # the negative ELBO where the start has led, if it is known
        self.origin: Coordinates | None = None  # there
        self.first_log_sd = q.stddev.log()  # of q before the fit, or there, whichever is wider
        self.modes: list[Mode] = []  # that were found, of the first start and of the others
        self.refused: tuple[Mode, float] | None = None  # not trusted, and the loss at the best of some scales there
        self.narrowed: Coordinates | None = None  # q before the fit, which has begun elsewhere
        self.hierarchical = in_factors(q, target.target) or forest_of(q) is not None
        self.looked = False  # at other starts
        # set by the engine: whether a budget is used up, and what takes the best coordinates so far
        self.over: Callable[[], bool] = lambda: False
        self.keep: Callable[[Coordinates], None] = lambda coordinates: None
        self._kept = math.inf  # the loss there

    @property
    def searched(self) -> bool:
        """Whether modes are looked for: not where a gradient is a pass over data, or a Hessian too dear."""
        return not (self.q.batch_shape or self.q.dim > 2000 or self.target.in_passes or self.hierarchical)

    @property
    def trusted(self) -> bool:
        """Whether a mode is trusted."""
        return self.evidence > -math.inf

    @property
    def others(self) -> int:
        """How many other starts."""
        return number_of_starts(self.q.dim)

    @property
    def first_draws(self) -> int:
        """The number of draws of the first sample average from a start."""
        # blocks are whitened by fewer draws than all coordinates together
        fewest = 2 * self.q.structure.widest + 2
        if not self.hierarchical:  # those that are exact on a quadratic, or less noise than that of a mean field
            fewest = max(fewest, min(2 * self.q.dim + 2, 128))
        # a pass over data costs its reading, whatever the number of draws
        return max(1024 if self.target.in_passes else self.settings.fewest, fewest)

    def _gradients(self, wide: bool) -> int:
        """Gradients of the search for a mode: more of them for structures, wide q, and where ℓ is very low at q."""
        return 200 + (20 if wide else 8) * self.q.dim

    @property
    def _budget(self) -> int:
        return self._gradients(self.q.structure.widest < self.q.dim or self.q.dim > self.settings.widest[0])

    @torch.no_grad()
    def check_repeats(self) -> None:
        """Draws inside the function would be taken for the shape of the posterior."""
        if self.target.in_passes:
            return
        theta = (self.mean + self.q.stddev)[None]  # at zero dropout, and rows that are drawn, change nothing
        first, second = self.target.log_joint(theta), self.target.log_joint(theta)
        rounding = 1e3 * torch.finfo(first.dtype).eps * first.abs().clamp_min(1.0)
        if bool(((first - second).abs() > rounding).any()):
            raise InputError(
                f"the log joint gives {float(first.sum()):.6g} and then {float(second.sum()):.6g} at the same theta: "
                "it draws. Draw once and keep the draws, give mini-batches to DataLogJoint, or pass an optimizer with "
                "a learning rate, VN(q, lr=0.1)."
            )

    # -------------------------------------------------------------------------------- the first

    def first(self) -> None:
        """Put q at a mode that is trusted, or about its mean; with data in batches, where one pass leads."""
        data = self.target.target
        if data.in_passes:
            self.narrowed = self.q.snapshot()
            start_in_passes(self.q, data, self.seed)
            return
        if not (self.searched or self.hierarchical):
            return
        origin, sd = self.q.snapshot(), self.q.stddev
        mode = None if self.hierarchical else self._searched()
        self.q.restore(origin)
        draws = self.settings.fewest if self.hierarchical else self.settings.fewest // 2
        self.reached = self._best_of(lambda factor: self._scaled(origin, factor), draws)
        if self.hierarchical:
            return
        self.narrowed = origin if bool((self.q.stddev < 0.99 * sd).any()) else None
        if mode is None:
            return
        here = self.q.snapshot()
        loss, trusted = self.place(mode)
        if not trusted and self._in_other_units(loss):
            self.reached, here, self.narrowed = self._widest(origin), self.q.snapshot(), None
            mode = self._searched(self._gradients(True)) or mode  # the first may have been cut far from one
            loss, trusted = self.place(mode)
        if trusted:
            self.evidence = mode.log_evidence
        else:
            self.refused = mode, loss
        if (trusted or not math.isfinite(self.reached)) and loss < self.reached:
            self.reached = loss
        else:
            self.q.restore(here)

    def _in_other_units(self, loss: float) -> bool:
        """Whether q is so much worse than a mode of that loss that the data are in units of their own."""
        return not self.reached <= loss + self._unit * self.settings.units * self.q.dim

    def _widest(self, origin: Coordinates) -> float:
        """Put q at the widest of some scales at which its loss is known to a nat; the loss there."""
        loss = math.inf
        for factor in self.scales:
            if self.over() or not self._scaled(origin, factor):
                break
            loss = sampled_loss(self.q, self.target, self.settings.fewest // 2, self.seed + 2)
            if abs(loss) * torch.finfo(torch.float64).eps < self._unit:
                break
        return loss

    def _searched(self, budget: int = 0, farther: int = 2400) -> Mode | None:
        """The mode that is found from the mean, with as many gradients as usual or more, and still more from afar."""
        mode = find_mode(self.target, self.mean, max(budget, self._budget), over=self.over)
        for look in (_near, _out):  # no finite density there: from a point that has one
            if mode is None and not self.over() and (start := look(self)) is not None:
                mode = find_mode(self.target, start, farther + self._budget, over=self.over)
        self._remember([mode])
        return mode

    def _scaled(self, origin: Coordinates, factor: float) -> bool:
        """Put q where it was, with a share of its scale, unless it has no numbers for it."""
        self.q.restore(origin)
        if self.q.structure.closed:
            return self._initialized(self.q.mean.clone(), factor * self.q.scale_tril)
        root = self.q.whitener() / factor  # nothing that is D x D
        self.q.restore(self.q._coordinates_with(self.q.mean.clone(), root))
        return bool(root.isfinite().all())

    def _best_of(self, put: Callable[[float], bool], draws: int, **options: float) -> float:
        """Put q at the best of some scales, each smaller than the one before, until the loss rises; the loss there."""
        best, here = math.inf, self.q.snapshot()
        for factor in self.scales:
            if self.over() or not put(factor):  # no numbers of this dtype
                break
            loss = self.sampled_loss(draws, **options)
            if math.isfinite(best) and not loss < best:
                break
            if loss < best:
                best, here = loss, self.q.snapshot()
        self.q.restore(here)
        return best

    def place(self, mode: Mode) -> tuple[float, bool]:
        """Put q at the mode, narrower where draws say so; the loss there, and whether the mode is to be trusted."""
        scale = self.q.kept_precision(mode.root)  # of a mean field 1/√diag H
        if mode.found and self._initialized(mode.theta, scale):
            loss = self.sampled_loss(self.settings.fewest, failing=0.0)
            if loss <= mode.promised_loss(self.q, self.target.temperature) + self._unit * self.allowance:
                return loss, True
        return self._best_of(
            lambda factor: self._initialized(mode.theta, factor * scale), self.settings.fewest, failing=0.0
        ), False

    def _initialized(self, mean: Tensor, scale: Tensor) -> bool:
        """Put q there, unless it has no numbers for it."""
        try:
            self.q.initialize_(mean, scale)
        except InputError:
            return False
        return True

    # -------------------------------------------------------------------------------- others

    def better(self) -> Mode | None:
        """The mode with the most evidence from the other starts, where it has more than the first by a nat."""
        starts = starting_points(self.others, self.mean, self.seed)
        modes = [mode for mode in find_modes(self.target, starts, self._budget, over=self.over) if mode is not None]
        self._remember(modes)
        self.looked = True
        best = max(modes, key=lambda mode: mode.log_evidence, default=None)
        return None if best is None or best.log_evidence < 1 + self.evidence else best

    def other(self, loss: float, worth: float = 0.3, inflated: float = 3.0) -> bool:
        """Put q at a mode that is worse by few nats, as it was before it was narrowed, or wider; whether at a mode."""
        if self.refused is not None and self.refused[1] <= loss + self._unit * worth * self.q.dim:
            self.place(self.refused[0])
            return True
        if self.narrowed is None:
            self._initialized(self.q.mean.clone(), torch.diag_embed(inflated * self.q.stddev))
        else:
            self._widest(self.narrowed)
        return False

    def _remember(self, modes: Sequence[Mode | None], widest: int = 200) -> None:
        """For the question whether a Gaussian fits; each mode has a D x D matrix."""
        self.modes += [mode for mode in modes if mode is not None and mode.found and self.q.dim <= widest]

    @property
    def _unit(self) -> float:
        """Of losses in nats."""
        return self.target.temperature or 1.0

    @property
    def allowance(self) -> float:
        """Nats by which a start may miss what it promised."""
        return allowance(self.q.dim, self.settings.trust)

    def sampled_loss(self, draws: int = 1024, **options: float) -> float:
        """L at q from whitened draws, the same for every q; infinite where it is not finite.  The best is kept."""
        loss = sampled_loss(self.q, self.target, draws, self.seed + 2, **options)
        if loss < self._kept:
            self._kept = loss
            self.keep(self.q.snapshot())
        return loss

    # -------------------------------------------------------------------------------- where it has begun

    def begun(self) -> None:
        """Remember q where the first start has led."""
        self.origin = self.q.snapshot()
        self.first_log_sd = torch.maximum(self.q.stddev.log(), self.first_log_sd)

    def wider(self) -> float:
        """Log of the factor by which a standard deviation has grown."""
        return float((self.q.stddev.log() - self.first_log_sd).max())

    def unconfined(self, loss: float, spread: float = 15.0) -> bool:
        """Whether nothing confines q: its ELBO rises without bound, or the log of its scale has grown by a spread."""
        return self.wider() > spread or loss < -self.bounded

    def better_than(self, loss: float) -> bool:
        """Whether a negative ELBO is far above where the fit has started, or not finite."""
        return self.origin is not None and not loss <= self.reached + self.allowance

    def go_back(self) -> float:
        """Put q where the start has led; the loss there."""
        assert self.origin is not None
        self.q.restore(self.origin)
        return self.reached

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of starts."""
        return {name: getattr(self, name) for name in (*_STATE, "refused", "narrowed", "origin", "modes")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        for name in _STATE:
            setattr(self, name, state[name])
        self.modes = [Mode(*values) for values in state["modes"]]
        refused = state["refused"]
        self.refused = None if refused is None else (Mode(*refused[0]), refused[1])
        self.narrowed, self.origin = (
            None if state[name] is None else Coordinates(*state[name]) for name in ("narrowed", "origin")
        )


def _near(starts: Starts, tries: int = 20) -> Tensor | None:
    """The first of some points near the mean with a finite density."""
    points = starts.mean + uniform_points(tries, starts.mean, starts.seed)
    finite = torch.isfinite(starts.target.log_joint(points)).nonzero()
    return points[finite[0, 0]] if len(finite) else None


def _out(starts: Starts, tries: int = 20) -> Tensor | None:
    """The point of largest density on the ways out of where the log joint overflows; None where none is finite."""
    mean, farther = starts.mean, torch.tensor([1.0, 10.0, 100.0, 1000.0], device="cpu").to(starts.mean)
    points = torch.cat(
        [mean[None], mean + uniform_points(tries, starts.mean, starts.seed) * farther.repeat(tries)[:tries, None]]
    )
    energies, gradients = energy_and_gradient(starts.target, points)
    ways = torch.where(gradients.isinf() & ~energies.isfinite()[:, None], -gradients.sign(), 0.0)
    some = (ways != 0).any(-1)
    lengths = torch.logspace(-2, 5, 15, device="cpu").to(mean)[:, None, None]
    points = torch.cat([points, (points[some] + lengths * ways[some]).flatten(0, 1)])
    values = starts.target.log_joint(points)
    values = torch.where(values.isfinite(), values, -math.inf)
    return points[values.argmax()] if bool(values.isfinite().any()) else None


# Data in batches, one batch at a time: where a fit to many rows starts
#
# The posterior is kept as a sum of sites in natural coordinates, one a batch; to visit a batch is to take
# its site out, to move q towards the posterior of the batch under what is left, and to put the change in:
#
#     λ = λ₀ + Σ_b λ_b        q' from q by VN on  E_q[-log p(batch_b | θ)] + γ KL(q ‖ λ - λ_b)
#
#     λ_b' = λ' - (λ - λ_b)
#
# The first pass is streaming variational Bayes (Broderick et al. 2013), a later one the incremental
# aggregated gradient (Blatt, Hero and Gauchman 2007) with the natural gradient.  Averages of natural
# gradients of mini-batches scaled up to all the data are still d/2 nats away after a pass; this ends within
# a nat after two, from where a few passes over all the data are exact.


@dataclass(frozen=True)
class StreamSettings:
    """The numbers of a start in passes."""

    passes: int = 2  # over the batches, where their sites can be kept
    kept: int = 10**8  # numbers in the sites of all batches beyond which none are kept, and one pass is made
    careful: int = 10  # batches of the first pass that are fitted; every other visit is a single full step
    norm: float = 0.5  # natural-gradient norm at which the fit to a batch ends, from where a full step can be trusted
    steps: int = 12  # of it, at most
    widest: int = 400  # dimensions up to which mean field is worth the draws of a full covariance
    gradients: int = 20  # a coordinate, that the search for the mode of a careful visit may take
    glance: int = 32  # draws that say whether q has the lower loss there
    rows: int = 50_000  # on which a fit in passes begins
    rows_norm: float = 0.1  # at which the steps on them end: what is left is little beside what the others will say
    rows_steps: int = 30  # of them, at most


_SETTINGS = StreamSettings()


class SiteSum(NamedTuple):
    """What some rows say of the coefficients, as natural parameters: exp(vᵀθ - ½θᵀPθ), the sum of their sites.

    It is what a part of the data has to send to be merged with others: D + D(D + 1)/2 numbers, and no row.  They are
    sums over rows, and not private in the sense of differential privacy.

    Attributes:
        vector: v = Hm - g, (D,).
        precision: P = H, (D, D), symmetric.

    >>> one = SiteSum(torch.ones(1), torch.ones(1, 1))
    >>> (one + one).vector, (one - one).precision
    (tensor([2.]), tensor([[0.]]))
    """

    vector: Tensor
    precision: Tensor

    def __add__(self, other: "SiteSum") -> "SiteSum":  # type: ignore[override]  # not that of tuples
        """What both say."""
        return SiteSum(self.vector + other.vector, self.precision + other.precision)

    def __sub__(self, other: "SiteSum") -> "SiteSum":
        """What is said without the other."""
        return SiteSum(self.vector - other.vector, self.precision - other.precision)


def natural_parameters(q: Gaussian) -> SiteSum:
    """S m and S of a dense Gaussian."""
    S = torch.cholesky_inverse(q.scale_tril)
    return SiteSum(S @ q.mean, S)


_Part = Callable[[SiteSum], Target | None]  # a batch: its posterior under a Gaussian factor, or nothing


@torch.no_grad()
def stream_rows(q: Gaussian, model: GeneralizedLinear, batch_size: int, seed: int = 0) -> None:
    """Visit the rows of a generalised linear model in a random order, its prior first; leaves q near the optimum."""
    rows = model.X.shape[-2]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed), device="cpu").split(batch_size)
    work = CholeskyGaussian.from_posterior(q, structure=Dense(q.dim))
    start = natural_parameters(CholeskyGaussian.from_prior(model.prior))

    def part(index: Tensor) -> _Part:
        def posterior(known: SiteSum) -> Target | None:
            root, ok = cholesky(known.precision)
            if not bool(ok):
                return None
            batch = model.minibatch(index)
            batch.weights = batch.weights * len(index) / rows  # as they are, not scaled up
            mean = torch.cholesky_solve(known.vector[:, None], root)[:, 0]
            batch.prior, batch.comparable = FullPrior(mean, known.precision, root.mT.contiguous()), True
            return batch

        return posterior

    _visit(work, start, lambda: map(part, order), VN, _passes(len(order), q.dim))
    _hand_over(work, q)


@torch.no_grad()
def stream_batches(q: Gaussian, target: DataLogJoint, seed: int) -> None:
    """Visit the batches of a log joint, starting from q; twice where they come again in the same order."""
    if q.batch_shape or (q.structure.widest < q.dim and q.dim > _SETTINGS.widest):
        return
    work = CholeskyGaussian.from_posterior(q, structure=Dense(q.dim))
    nothing = SiteSum(torch.zeros_like(work.mean), torch.zeros_like(work.covariance))
    estimator = SampleAverage(Fixed(max(32, 2 * q.dim + 2), seed=seed))
    guarded = Guarded(target)  # of one batch after another: an error ends the fit at the first call only

    def parts() -> Iterator[_Part]:
        for number, batch in enumerate(target.one_pass()):

            def posterior(known: SiteSum, batch: Any = batch, first: bool = not number) -> Target:
                def log_joint(theta: Tensor) -> Tensor:
                    prior = target.prior.log_joint(theta) if first else 0.0  # the prior goes with the first batch
                    factor = (theta * (known.vector - 0.5 * theta @ known.precision)).sum(-1)
                    return prior + target.batch_log_likelihood(theta, batch) + target.temperature * factor

                guarded.target = LogJoint(log_joint, target.temperature)
                return guarded

            yield posterior

    passes = _passes(len(target.batches), q.dim) if _repeats(target.batches) else 1  # type: ignore[arg-type]
    _visit(work, nothing, parts, lambda work: VN(work, estimator=estimator), passes)
    _hand_over(work, q)


@torch.no_grad()
def start_in_passes(q: Gaussian, target: Target, seed: int) -> None:
    """Put q where some of the rows lead: of several processes those of the first, which hands on where they lead."""
    local: Target = target
    processes, rows = Processes.alone(), getattr(target, "num_data", 0)
    if isinstance(target, ShardedLogJoint | ShardedTractable):
        local, processes = target.local, target.processes
    elif isinstance(target, ShardedDraws) and isinstance(target.target, DataLogJoint):
        local, processes, rows = target.target, target.processes, target.target.num_data
    with processes.together():
        if processes.leads and isinstance(local, Streamed) and not q.batch_shape:
            part = local.beginning(_SETTINGS.rows)
            _try_steps(VN(q), part, _SETTINGS.rows_norm, _SETTINGS.rows_steps)
            _narrow(q, math.sqrt(part.num_data / rows))  # what n of N rows say is as wide as √(N/n) times what all say
        elif processes.leads and isinstance(local, DataLogJoint):
            stream_batches(q, local, seed)
            if local is not target and not q.batch_shape:
                _narrow(q, math.sqrt(local.num_data / rows))
    if processes.world > 1:
        synchronize(q, group=processes)


def _put_at_mode(q: CholeskyGaussian, target: Guarded, seed: int) -> bool:
    """Put q at the mode of a batch under what is known, where its loss is lower; whether it is."""
    here, loss = q.snapshot(), sampled_loss(q, target, _SETTINGS.glance, seed)
    mode = find_mode(target, q.mean, _SETTINGS.gradients * q.dim)
    if mode is None:
        return False
    q.initialize_(mode.theta, mode.root)
    gamma, settings = target.temperature or 1.0, EngineSettings()
    there = sampled_loss(q, target, _SETTINGS.glance, seed)
    trusted = there <= mode.promised_loss(q, gamma) + gamma * allowance(q.dim, settings.trust)
    # where scales have collapsed a mode misses its promise, and is better only than a q that is far off
    lower = there < loss and (trusted or not loss <= there + gamma * settings.units * q.dim)
    if not lower:
        q.restore(here)
    return lower


def _try_steps(optimizer: VN, target: Target, norm: float, most: int) -> bool:
    """Take steps by trial, until the natural-gradient norm is as small; whether q has moved."""
    moved = False
    for _ in range(most):
        if bool(optimizer.evaluate(target).norm2.sqrt() <= norm * (target.temperature or 1.0)):
            break
        optimizer.step(target)
        assert optimizer.last is not None
        moved |= bool(optimizer.last.accepted.any())
    return moved


def _narrow(q: Gaussian, factor: float) -> None:
    """Multiply the root of the covariance."""
    if q.structure.closed:
        q.initialize_(q.mean.clone(), factor * q.scale_tril)
    else:
        q.restore(q._coordinates_with(q.mean.clone(), q.whitener() / factor))


def _visit(
    work: CholeskyGaussian,
    start: SiteSum,
    parts: Callable[[], Iterator[_Part]],
    optimizer: Callable[[CholeskyGaussian], VN],
    passes: int,
) -> None:
    """Visit every part, as often as there are passes; keeps one site a part where there are several passes."""
    total = start
    sites: dict[int, SiteSum] = {}
    for turn in range(passes):
        for number, part in enumerate(parts()):
            known = total - sites[number] if number in sites else total
            target = part(known)
            if target is None:
                continue
            placed = moved = False
            if not turn and number < _SETTINGS.careful:
                placed = isinstance(target, Guarded) and _put_at_mode(work, target, number)
                moved = _try_steps(optimizer(work), target, _SETTINGS.norm, _SETTINGS.steps)
            full = optimizer(work)  # whose step no rejection has cut short
            full.step_untried(target)
            assert full.last is not None
            if not (placed or moved or bool(full.last.accepted)):
                continue
            total = natural_parameters(work)
            if passes > 1:
                sites[number] = total - known


def _passes(batches: int, dim: int) -> int:
    """One where the sites of so many batches are too many numbers to be kept."""
    return _SETTINGS.passes if batches * dim**2 <= _SETTINGS.kept else 1


def _repeats(batches: Any) -> bool:
    """Whether every pass sees the same batches in the same order."""
    if not isinstance(batches, DataLoader):
        return isinstance(batches, list | tuple)
    sampler = batches.sampler
    if batches.batch_sampler is not None:
        if type(batches.batch_sampler) is not BatchSampler:
            return False
        sampler = batches.batch_sampler.sampler
    return isinstance(sampler, SequentialSampler)


def _hand_over(work: CholeskyGaussian, q: Gaussian) -> None:
    """Mean field keeps the diagonal of the precision, as its optimum does."""
    q.initialize_(work.mean, q.kept_precision(work.scale_tril))
