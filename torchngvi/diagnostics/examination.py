"""Does a Gaussian fit?  The examination of a q that is at its optimum: a verdict with the numbers behind it.

A fit that has converged has found the best Gaussian.  Five numbers speak of the rest:
    linear response       the standard deviations that q ought to have, `linear_response`
    importance weights    moments of the density from a proposal as wide as that, `importance`
    margins               of coordinates of which the weights may know too little, by Laplace's method, `marginal`
    tails                 fourth derivatives, which the third order cannot see
    other modes           where draws of q never come
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchngvi.arguments import read_count, read_instance, read_list, read_seed, read_tensor, shown
from torchngvi.derivatives import energy_and_gradient
from torchngvi.diagnostics.importance import Sampled, corrected_moments
from torchngvi.diagnostics.linear_response import (
    Margin,
    Residuals,
    ThirdOrder,
    confirm,
    finite_pairs,
    laplace_margin,
    tails,
    third_order,
    third_order_of_values,
)
from torchngvi.diagnostics.verdict import (
    LIMITS,
    NOT,
    Effort,
    Marginals,
    OtherMode,
    Shape,
    Verdict,
    agrees,
    doubted,
    family_of,
    in_doubt,
    judge,
    plain,
    trusted,
    undecided,
    useful,
)
from torchngvi.errors import InputError
from torchngvi.expectations.draws import Fixed
from torchngvi.interfaces import Target
from torchngvi.mode import Mode, distinct_modes, find_modes, number_of_starts, starting_points
from torchngvi.models.factors import FAILING, VALUE, Guarded
from torchngvi.models.log_joint import FullPrecision, WarpedTarget, as_target, read_gaussian, read_posterior, unwarped
from torchngvi.numerics.arrays import tracked, writable
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.warps import Warped
from torchngvi.structures import Dense

_RISES = "the log joint rises away from q, so that q is not its fit: does the function return -log p, an energy?"


@dataclass(frozen=True)
class ExaminationSettings:
    """How much an examination asks of a log joint: numbers of draws and calls, and never seconds.

    The numbers were chosen on the parts "tune" and "fresh 1" of ``benchmarks/truths`` and judged on "held" and "fresh
    2", by ``python -m benchmarks.verdicts --least 8000``, which prints the words and the cost with another budget.

    Attributes:
        least: cost, in gradients and values at 0.4 of one, that an examination at the end of a fit may take where the
            fit itself has taken less. Below 5,000 right fits are called wrong, 2 to 4 of 197 with 1,300 to 2,500;
            with 5,000 one of eight fits of eight schools, centred, is "about right" and none with 8,000; above that
            there is nothing to gain.
        share: of the cost of the fit that it may take where that is more.
        glance: values of the log joint that may suffice after a fit.
        draws: of the importance weights.
        more_draws: of these where the first do not decide.
        residuals: draws of the third order, at least.
        residuals_each: the same for each coordinate.
        mirrored: values in the place of residuals where there is no room for gradients, at least.
        confirmed: draws of a confirmation by conjugate gradients.
        products: of a coordinate for which the budget has to suffice.
        at_once: coordinates that are confirmed together.
        margins: coordinates whose margin is followed by Laplace's method where weights know too little of it.

    >>> ExaminationSettings().draws
    4096
    """

    least: float = 8_000.0
    share: float = 1.0
    glance: int = 1024
    draws: int = 4096
    more_draws: int = 16_384
    residuals: int = 512
    residuals_each: int = 16
    mirrored: int = 1024
    confirmed: int = 512
    products: int = 4
    at_once: int = 5
    margins: int = 2

    def cost_after(self, fitted: float) -> float:
        """What the examination at the end of a fit may cost.

        Args:
            fitted: what the fit has cost, in gradients and values at 0.4 of one.

        Returns:
            The cost, in the same unit.

        >>> ExaminationSettings(least=100.0, share=0.5).cost_after(1000.0)
        500.0
        """
        return max(self.least, self.share * fitted)


_USUAL = ExaminationSettings()


class Allowance:
    """A budget from now on."""

    def __init__(
        self, target: Guarded, gradients: int, cost: float = math.inf, over: Callable[[], bool] = lambda: False
    ) -> None:
        self.target, self.gradients, self.cost, self.over = target, gradients, cost, over
        self._before = target.gradients, target.values

    @property
    def spent(self) -> tuple[int, int]:
        """Gradients and values since the beginning."""
        return self.target.gradients - self._before[0], self.target.values - self._before[1]

    @property
    def left(self) -> int:
        """Gradients that may still be asked for; none where the time is over."""
        gradients, values = self.spent
        left = min(self.gradients - gradients, self.cost - gradients - VALUE * values)
        return 0 if self.over() else max(int(left), 0)

    @property
    def values_left(self) -> float:
        """Values without a gradient that may still be asked for; none where the time is over."""
        gradients, values = self.spent
        return 0.0 if self.over() else (self.cost - gradients) / VALUE - values

    def __str__(self) -> str:
        """The budget, as a clause."""
        return "no time left" if self.over() else f"a budget of {int(min(self.gradients, self.cost))} gradients"


@tracked
@torch.no_grad()
def examine(
    q: Gaussian | Warped,
    target: Target | Callable[[Tensor], Tensor],
    *,
    residuals: Residuals | None = None,
    modes: Sequence[Mode] | None = None,
    around: Tensor | float = 0.0,
    max_gradients: int = 50_000,
    seed: int = 0,
    settings: ExaminationSettings = _USUAL,
) -> Verdict:
    """Say whether the family of q fits the density that q was fitted to.

    What it cannot see: a region that neither draws of q nor the starts of the search for modes come to.

    Args:
        q: one posterior at the optimum of its ELBO, Gaussian or `Warped`; it is not changed.
        target: a model, or a function of theta returning the log joint, which gives the same value twice.
        residuals: Cᵀ∇ℓ/γ - z at antithetic draws, as the last sample average of a fit has them; too few are not used.
        modes: of the density, found elsewhere; by default they are searched for where D < 60. From draws with large
            weights they are in any case, where weights are not to be believed.
        around: where that search starts, (D,): the mean that q had before the fit, to which U(-2, 2) is added. Half of
            the points lie so about zero.
        max_gradients: a budget; what it does not reach is said in the verdict.
        seed: of all draws; the same q, log joint, seed and budget have the same verdict, whatever the machine does.
        settings: how many calls of the log joint each part takes.

    Returns:
        The verdict, which holds all numbers and prints as a table.

    Raises:
        InputError: a batch of posteriors, a temperature of 0, a budget or a shape that does not fit.
        PairError: a posterior that is not Gaussian.

    >>> from torchngvi import CholeskyGaussian
    >>> q = CholeskyGaussian(2, dtype=torch.float64)
    >>> verdict = examine(q, lambda theta: -0.5 * theta.square().sum(-1))
    >>> verdict.word, verdict.effort.gradients < 1000
    ('fits', True)
    """
    q, target = unwarped(read_posterior("examine", q, target), as_target(target))
    q = read_gaussian("examine", q)
    around = read_tensor("around", around, like=q.mean_probe)
    if around.shape not in ((), (q.dim,)):
        raise InputError(f"around must be a scalar or ({q.dim},); got shape {tuple(around.shape)}.")
    seed = read_seed("seed", seed)
    read_instance("settings", settings, ExaminationSettings, "are those of an examination, ExaminationSettings()")
    what = "are those of the density, a list of torchngvi.mode.Mode, or None"
    if modes is not None and not all(isinstance(mode, Mode) for mode in read_list("modes", modes, what)):
        raise InputError(f"modes {what}; got {shown(modes)}.")
    if q.batch_shape:
        raise InputError(f"examine takes one posterior at a time; got a batch of shape {tuple(q.batch_shape)}.")
    if target.temperature == 0:
        raise InputError(
            "examine compares q with the density exp(log joint / temperature); got temperature 0, where there is none."
        )
    budget = read_count("max_gradients", max_gradients, "is a budget of gradients")
    if residuals is not None:
        _check_residuals(q, residuals)
    with FullPrecision(q.device.type):
        return _Examination(q, Allowance(Guarded(target), budget), seed, settings).run(residuals, modes, around)


@tracked
@torch.no_grad()
def examine_fitted(
    q: Gaussian,
    allowed: Allowance,
    *,
    modes: Sequence[Mode] | None = None,
    starts: int = 0,  # from which these were searched
    around: Tensor | float = 0.0,  # (D,)
    seed: int = 0,
    settings: ExaminationSettings = _USUAL,
) -> Verdict:
    """As `examine`, at the end of a fit: within an allowance, and no dearer than it need be."""
    with FullPrecision(q.device.type):
        return _Examination(q, allowed, seed, settings, starts).run(None, modes, around, glance=True)


def _check_residuals(q: Gaussian, residuals: Residuals) -> None:
    what = "are antithetic draws and what remains there, torchngvi.diagnostics.Residuals(z, residual)"
    read_instance("residuals", residuals, Residuals, what)
    for part in residuals:
        read_instance("residuals", part, Tensor, what)
    shapes = [tuple(part.shape) for part in residuals]
    if shapes[0] != shapes[1] or len(shapes[0]) != 2 or shapes[0][1] != q.dim:
        raise InputError(f"residuals must be draws and residuals of shape (S, {q.dim}) each; got {shapes}.")


class _Examination:
    """One q, a budget, and what was left out."""

    def __init__(
        self, q: Gaussian, allowed: Allowance, seed: int, settings: ExaminationSettings, starts: int = 0
    ) -> None:
        self.q, self.target, self.allowed, self.seed, self.starts = q, allowed.target, allowed, seed, starts
        self.settings, self.margins, self.followed = settings, dict[int, Margin](), set[int]()
        self.frame = q.frame()
        self.marginals = Marginals(self.frame.mean.clone(), q.stddev)
        self.unexamined: list[str] = []
        self.product = 2 * max(settings.confirmed, 2 * q.structure.widest + 2)  # gradients of one of a confirmation
        self.rises = False  # the log joint, away from q
        self.climbed = 0  # draws of large weight from which modes were searched for

    def run(
        self, residuals: Residuals | None, modes: Sequence[Mode] | None, around: Tensor | float, *, glance: bool = False
    ) -> Verdict:
        """The cheap numbers first; then modes, whose search has an end; then what is left for confirmations."""
        self.target.log_joint(self.frame.mean[None])  # raises as it would alone; later failures are found draw by draw
        sampled = shape = None
        if glance and self.settings.glance <= self.allowed.values_left:
            sampled = self._sampled(None, self.settings.glance, self.seed + 7)
        if sampled is not None and plain(self.marginals, sampled):
            self.unexamined.append("linear response and tails (importance weights leave no doubt)")
        elif trusted(sampled) and not self._affords_more():
            self.follow(sampled)
            self.unexamined += [
                f"{what} ({self.allowed})" for what in ("linear response and tails", "more importance weights")
            ]
        elif glance and judge(self.marginals, None, None, self.others(modes or (), sampled))[0] == NOT:
            self.unexamined.append("linear response and tails (q does not fit without them)")
        else:
            residuals = self.residuals(residuals)
            self.rises = residuals is not None and residuals.rise
            third = self.third(residuals)
            shape = None if third is None else self.shape(third, residuals)
            sampled = self.sampled(third, shape) or sampled
            self.follow(sampled, shape)
        doubtful = None if trusted(sampled) else shape
        if glance and modes is None:  # the search is the dearest part of all
            if doubtful is not None and self.judged(None, sampled)[0] != NOT:  # without the third order
                self.confirm(doubtful)
            doubtful = None
            if self.judged(shape, sampled)[0] == NOT:
                modes = ()
                self.unexamined.append("other modes (q does not fit without them)")
        found = [*(self.search(around) if modes is None else modes)]
        others = self.others(found, sampled)
        if self.judged(shape, sampled, others)[0] != NOT:
            others = self.others(found + self.uphill(sampled), sampled)
        if doubtful is not None:
            self.confirm(doubtful)
        word, reasons = self.judged(shape, sampled, others)
        if self.rises:
            word, reasons = NOT, (_RISES, *(reasons if word == NOT else ()))
        effort = Effort(*self.allowed.spent, self.starts, tuple(self.unexamined), self.climbed)
        family = family_of(self.target.target)
        return Verdict(
            word, reasons, self.marginals, shape, sampled, others, effort, family=family, margins=self.margins
        )

    def judged(
        self, shape: Shape | None, sampled: Sampled | None, others: Sequence[OtherMode] = ()
    ) -> tuple[str, tuple[str, ...]]:
        """The word and its reasons by what was found so far."""
        return judge(self.marginals, shape, sampled, others, self.measured)

    @property
    def measured(self) -> dict[int, float]:
        """log(sd of a margin / sd of q), by coordinate."""
        return {k: math.log(margin.sd / float(self.marginals.sd[k])) for k, margin in self.margins.items()}

    def wanted(self, least: int) -> int:
        """Draws of the third order in so many dimensions."""
        return max(least, self.settings.residuals_each * self.q.dim)

    def _affords_more(self) -> bool:
        """Whether there is room for residuals, or the values in their place, and for weights by what these say."""
        residuals, values = self.wanted(self.settings.residuals), self.wanted(self.settings.mirrored)
        values = math.ceil(residuals / VALUE) if residuals <= self.allowed.left else values
        return values + self.settings.glance <= self.allowed.values_left

    # -------------------------------------------------------------------------------- importance sampling

    def sampled(self, third: ThirdOrder | None, shape: Shape | None) -> Sampled | None:
        """From a proposal as wide as linear response says; with more draws where neither they nor margins decide."""
        matrix = None if third is None else third.matrix
        draws = int(min(self.allowed.values_left, self.settings.draws)) // 4 * 4
        if draws < self.settings.glance:
            self.unexamined.append(f"more importance weights ({self.allowed})")
            return None
        found = self._sampled(matrix, draws, self.seed + 1)
        self.follow(found, shape)
        hopeful = found is not None and 4 * found.corrected.effective >= LIMITS.hopeful
        if found is not None and hopeful and undecided(self.marginals, found, self.measured):
            twice, every = 2 * self.settings.draws, self.allowed.values_left
            spare = every - self.product * self.settings.products / VALUE  # with one coordinate confirmed
            waits = not useful(found) and doubted(self.marginals, found, shape)  # for that, which may decide
            draws = int(min(spare if waits or spare >= twice else every, self.settings.more_draws)) // 4 * 4
            again = self._sampled(matrix, draws, self.seed + 6) if draws >= twice else None
            self.unexamined += [] if again else [f"more importance weights ({self.allowed})"]
            found = again or found
        if found is None:
            why = "no time left" if self.allowed.over() else "log joint NaN at draws of q, or finite at none"
            self.unexamined.append(f"importance weights ({why}){self.target.failures()}")
        elif not useful(found):
            effective = found.corrected.effective
            self.unexamined.append(f"importance weights ({effective:.0f} effective draws of {found.draws})")
        return found

    def _sampled(self, matrix: Tensor | None, draws: int, seed: int) -> Sampled | None:
        """Moments by so many draws."""
        return corrected_moments(self.q, self.target, matrix, num_samples=draws, seed=seed, over=self.allowed.over)

    def follow(self, sampled: Sampled | None, shape: Shape | None = None) -> None:
        """Margins of coordinates of which the weights may have found too little, until one is beyond the limit."""
        if sampled is None or not self.target.comparable or isinstance(self.target.target, WarpedTarget):
            return
        for k in doubted(self.marginals, sampled, shape)[: self.settings.margins]:
            if k in self.followed:
                continue
            self.followed.add(k)
            most = min(self.allowed.left, self.product * self.settings.products)  # no dearer than a confirmation
            margin = laplace_margin(self.q, self.target, k, max_gradients=most, over=self.allowed.over)
            if margin is not None and agrees(margin, sampled):
                self.margins[k] = margin
                if margin.sd >= math.exp(LIMITS.off[1]) * float(self.marginals.sd[k]):
                    return

    # -------------------------------------------------------------------------------- linear response and tails

    def residuals(self, given: Residuals | None) -> Residuals | None:
        """As many as the third order needs: those given, or new ones; without pairs at which the log joint fails."""
        wanted = self.wanted(self.settings.residuals)
        if given is None or len(given.z) < wanted:
            if wanted > self.allowed.left:
                return given
            z = Fixed(wanted, self.seed + 2)(self.frame.mean)
            energy, gradient = energy_and_gradient(self.target, self.frame.mean + self.frame.push(z))
            residual = self.frame.pull(gradient) / self.target.temperature - z
            given = Residuals(z, torch.where(energy.isfinite()[:, None], residual, torch.nan))
        kept = finite_pairs(given)
        if len(kept.z) < (1 - FAILING) * len(given.z):
            self.unexamined.append(f"linear response (log joint not finite at draws of q){self.target.failures()}")
            return None
        return kept

    def third(self, residuals: Residuals | None) -> ThirdOrder | None:
        """From residuals, or from values where the budget has none."""
        dim = self.q.dim
        # where no derivative is outside of the pattern of q, the response is that of a full q
        structure = Dense(dim) if self.target.target.pattern == self.q.structure else self.q.structure
        if dim > LIMITS.widest:
            self.unexamined.append(f"linear response (D = {dim} is above {LIMITS.widest})")
            return None
        if not structure.closed:
            self.unexamined.append(f"linear response (no third order for {structure})")
            return None
        if residuals is not None:
            return third_order(residuals.z, residuals.residual, structure)
        if self.unexamined and "linear response" in self.unexamined[-1]:
            return None
        mirrored = self.wanted(self.settings.mirrored)
        if structure.widest == dim and mirrored <= self.allowed.values_left:
            z = Fixed(mirrored, self.seed + 3)(self.frame.mean)
            theta = self.frame.mean + self.frame.push(z)
            log_weights = self.target.log_joint(theta) / self.target.temperature - self.q.log_prob(theta)
            if bool(log_weights.isfinite().all()):
                self.unexamined.append(f"tails ({self.allowed})")
                return third_order_of_values(z, log_weights)
        self.unexamined.append(f"linear response and tails ({self.allowed})")
        return None

    def shape(self, third: ThirdOrder, residuals: Residuals | None) -> Shape:
        """The response, not confirmed, and tails."""
        log_sd, error = third.log_sd(self.frame)
        none = torch.zeros_like(log_sd, dtype=torch.bool)
        kappa = torch.zeros_like(log_sd) if residuals is None else tails(*residuals)[0]
        draws = 0 if residuals is None else len(residuals.z)
        return Shape(log_sd, error, none, none.clone(), kappa, third.eigenvalue, draws)

    def confirm(self, shape: Shape, numbers: int = 20_000_000) -> None:
        """Coordinates that may be above the first limit, the worst alone first, until one is found above the second."""
        if not self.target.comparable:
            self.unexamined.append("a confirmation (the log joint gives other values at the same theta)")
            return
        waiting = torch.tensor(in_doubt(shape), dtype=torch.long, device=shape.log_sd.device)
        most, at_once = max(1, min(self.settings.at_once, numbers // (self.product * self.q.dim))), 1
        while len(waiting):
            some, waiting, at_once = waiting[:at_once], waiting[at_once:], most
            affordable = self.allowed.left // (self.product * self.settings.products)
            some, dropped = some[:affordable], len(some[affordable:]) + len(waiting)
            found = None
            if len(some):
                found = confirm(
                    self.q,
                    self.target,
                    some,
                    num_samples=self.product // 2,
                    seed=self.seed + 4,
                    max_gradients=self.allowed.left,
                    over=self.allowed.over,
                )
            if found is None:
                left = len(some) + dropped
                many = f"{left} coordinate{'s' * (left > 1)}"
                self.unexamined.append(f"{many} beyond the third order (the budget, or a log joint that is not finite)")
                break
            told = found.finished | (found.log_sd >= LIMITS.off[1])  # else a lower bound, which may be far below
            at = found.coordinates[told]
            shape.log_sd[at], shape.standard_error[at] = found.log_sd[told], found.standard_error[told]
            shape.singular[at], shape.confirmed[at] = found.singular[told], True
            if bool((found.log_sd.abs() >= LIMITS.off[1]).any()):
                return

    # -------------------------------------------------------------------------------- modes where q is not

    def search(self, around: Tensor | float) -> list[Mode]:
        """From a few starts in U(-2, 2) about a mean and about zero, each with its share of the budget."""
        dim, at = self.q.dim, self.q.mean
        starts = number_of_starts(dim, *LIMITS.starts) if dim < LIMITS.searched else 0
        middle = torch.as_tensor(writable(around), dtype=at.dtype, device=at.device).expand(dim)
        found = self._climb(starting_points(starts, middle, self.seed + 5))
        if found is None:
            why = str(self.allowed) if starts else f"D = {dim} is not below {LIMITS.searched}"
            self.unexamined.append(f"other modes ({why})")
            return []
        self.starts = starts
        return found

    def uphill(self, sampled: Sampled | None) -> list[Mode]:
        """From the draws with the largest weights, where weights are not believed, since these may be at an edge."""
        if sampled is None or sampled.heaviest is None or trusted(sampled) or self.q.dim >= LIMITS.searched:
            return []
        found = self._climb(sampled.heaviest)
        if found is not None:
            self.climbed = len(sampled.heaviest)
        return found or []

    def _climb(self, points: Tensor) -> list[Mode] | None:
        """The modes that searches from these points (K, D) arrive at; None without points, or a budget for them."""
        starts, dim = points.shape
        # a step in progress may take 23 points and two Hessians more than its budget
        each = min(200 + 20 * dim, self.allowed.left // starts - 2 * (dim + 1) - 23) if starts else 0
        if each < 2 * (dim + 2):
            return None
        modes = find_modes(self.target, points, each, over=self.allowed.over)
        return [mode for mode in modes if mode is not None and mode.found]

    def others(self, modes: Sequence[Mode], sampled: Sampled | None) -> tuple[OtherMode, ...]:
        """Those that are not q's own, each once, the one with the most evidence first."""
        q, elbo = self.q, -math.inf if sampled is None else sampled.from_q.elbo
        far = max(LIMITS.far, 2 * math.sqrt(q.dim))
        measured = [(mode, float(q.whiten(mode.theta - q.mean).norm())) for mode in modes]
        if not math.isfinite(elbo):
            elbo = max((mode.log_evidence for mode, apart in measured if apart <= far), default=-math.inf)
        kept = distinct_modes((mode for mode, apart in measured if apart > far), elbo - LIMITS.faint)
        evidence = torch.tensor([elbo, *(mode.log_evidence for mode in kept)], dtype=torch.float64, device="cpu")
        return tuple(
            OtherMode(mode.theta, mode.log_evidence, float(q.whiten(mode.theta - q.mean).norm()), share)
            for mode, share in zip(kept, evidence.softmax(0)[1:].tolist(), strict=True)
        )
