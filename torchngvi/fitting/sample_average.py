"""Fit a log joint by draws: the default where E_q[ℓ] has no closed form.

One Gaussian with a full covariance is fitted by a pool of draws, which uses every gradient again, see `pool`.
Where that does not serve, as for other structures, batches of posteriors and data in passes, sample averages grow.

With the draws z_1..z_S held fixed and whitened, the sample average of ℓ(m + C z_s) is a deterministic objective, exact
for quadratic ℓ, and is minimised as any other (Giordano, Ingram and Broderick 2024; Burroni, Domke and Sheldon 2023).
Its minimum misses that of L by about half of

    noise² = |standard error of ∇L|²_F⁻¹ = O(1/S)

in nats, which the draws themselves tell.  So: find a rough mode, minimise over few draws, and take as many more as the
noise asks for, until norm² + noise² ≤ tolerance².  Fresh draws and other starts then say whether to believe it.
"""

import math
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchngvi.diagnostics.importance import smoothed
from torchngvi.diagnostics.verdict import Allowance, ExaminationSettings, examine_fitted
from torchngvi.errors import InputError, TorchngviError
from torchngvi.expectations.draws import Fixed, drawn_seed
from torchngvi.fitting.checkpoints import Generators, describe_problem
from torchngvi.fitting.fit import Request, tolerance_by_draws
from torchngvi.fitting.loop import Ending, Engine, Examined
from torchngvi.fitting.pool import Descent, Place, Point, PoolLoop
from torchngvi.fitting.starts import EngineSettings, Starts
from torchngvi.fitting.stopping import Criterion, Standing, Stop
from torchngvi.interfaces import Target
from torchngvi.models.factors import FAILING, VALUE, BudgetError, Guarded
from torchngvi.models.log_joint import FullPrecision, WarpedTarget
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.warps import Warped

_UNLUCKY = (TorchngviError, RuntimeError, ArithmeticError, BudgetError)  # whatever fails elsewhere, q is where it was
_EXAMINATION = ExaminationSettings()
_PARTS = ("descent", "pooled", "starts")  # that have a state of their own

_T = TypeVar("_T")
_Path = Generator[Standing, None, _T]  # where it stands after each evaluation


# A fit judged on draws that it was not fitted to


class Fresh(NamedTuple):
    """What fresh draws say of q: the ELBO, its standard error and the worth of the importance weights."""

    elbo: Tensor  # (*batch,)
    error: Tensor  # (*batch,)
    share: float  # of the draws, what their Pareto-smoothed importance weights are worth, the smallest
    lost: str  # why there is no such number, or nothing
    dropped: int = 0  # draws at which the log joint failed or was NaN, left out where they are few
    k_hat: float = 0.0  # the largest
    draws: int = 1024

    @property
    def kept(self) -> str:
        """What importance sampling would keep, about where k-hat says that it is a rough number."""
        rough = "about " if self.k_hat >= 0.5 and self.share < 0.9 else ""  # unless nearly all weights are equal
        return f"importance sampling would keep {rough}{self.share:.0%} of them"

    def __str__(self) -> str:
        return f"on {self.draws} fresh draws the ELBO is {float(self.elbo.sum()):.6g} ± {float(self.error.norm()):.1g}"


def judge(q: Gaussian, target: Guarded, seed: int, draws: int = 1024) -> Fresh:
    """The log weights of draws that were not fitted to, by that seed."""
    failed = target.failures()
    z = Fixed(draws, seed=seed)(q.mean_probe.detach())
    theta = q.push_noise(z).detach()
    reason = ""
    try:
        with torch.enable_grad():  # as in the fit, for functions that differentiate
            value = target.log_joint(theta).detach()
    except InputError as error:  # of a batch of another size: the fit is not lost for it
        value = theta.new_full(theta.shape[:-1], torch.nan)
        reason = f"because the check on {draws} fresh draws could not be made: {error}"
    terms = value - target.temperature * q.log_prob(theta)
    left_out, bad = terms.isnan(), int((~torch.isfinite(terms)).sum())
    few = bool((left_out.sum(0) <= FAILING * draws).all())
    if not few or int(left_out.sum()) < bad or reason:
        left_out = torch.zeros_like(left_out)
        if bad and not reason and target.failures() != failed:
            reason = f"because the log joint fails at {bad} of {terms.numel()} draws from q.{target.failures()}"
        elif bad and not reason:
            reason = (
                f"because the log joint is not finite at {bad} of {terms.numel()} draws from q: no Gaussian fits "
                "inside its support. Transform the constrained coordinates."
            )
    count = (~left_out).sum(0)
    elbo = torch.where(left_out, 0.0, terms).sum(0) / count
    scatter = torch.where(left_out, 0.0, (terms - elbo).square()).sum(0) / (count - 1)
    weights = smoothed(torch.where(left_out, -torch.inf, terms) / (target.temperature or 1.0))
    share = float(weights.effective.nan_to_num(0.0).min()) / draws
    k_hat = float(weights.k_hat.nan_to_num(torch.inf).max())
    return Fresh(elbo, (scatter / count).sqrt(), share, reason, int(left_out.sum()), k_hat, draws)


# The engine


def averages_of(request: Request) -> tuple[Engine, Criterion]:
    """Make the engine of a `Request` for a log joint, and what ends its run; an optimizer makes its own steps."""
    if request.optimizer is not None:
        return request.engine("steps")
    assert isinstance(request.q, Gaussian)
    criteria = request.until_small(request.tolerance_or(tolerance_by_draws))
    return SampleAverages(request.q, request.target, criteria.tolerance, request.examine), criteria


class SampleAverages(Engine):
    """`torchngvi.fit` on a log joint without an optimizer; the tolerance is on √(norm² + noise²)."""

    name = "VN"

    def __init__(
        self,
        q: Gaussian,
        target: Target,
        tolerance: float,
        examine: bool = True,
        settings: EngineSettings | None = None,
    ) -> None:
        super().__init__(q)
        self.engine_settings = settings or EngineSettings()
        self.gaussian, self.target, self.tolerance = q, Guarded(target), tolerance
        self.batches = target.batches
        self.examines = examine and not target.in_passes and not q.batch_shape and target.temperature > 0
        self._seeded(drawn_seed())
        self.looked = self.switched = False  # at other starts; one was better
        self.elsewhere: Place | None = None  # where to come back to, while another start is tried
        self.unseen = ""  # why no other start was looked at
        self._ending: Ending | None = None
        self._path: _Path[None] | None = None
        self._spent: tuple[int, int] | None = None

    def _seeded(self, seed: int) -> None:
        """The draws come from a seed taken from torch's generator, or from the checkpoint."""
        self.seed = seed
        self.starts = Starts(self.gaussian, self.target, seed, self.engine_settings)
        self.descent = Descent(self.gaussian, self.target, seed, self.tolerance, self.engine_settings)
        self.pooled = PoolLoop(self.descent)
        self.starts.over, self.starts.keep = self._over, self.keep

    def _over(self) -> bool:
        """Whether a budget is used up."""
        return self.over(self.target.cost)

    def check(self) -> None:
        """Refuse a log joint that draws, since two calls at one θ must agree."""
        within(self.gaussian, self.starts.check_repeats)

    def begin(self) -> None:
        """Look for a rough mode, or go through the data in batches."""
        self.show("a pass over the data" if self.target.in_passes else "a rough mode")
        before = self.gaussian.snapshot()
        self.target.most = self.most
        try:
            within(self.gaussian, self.starts.first)
        except BudgetError:  # from the best that is known
            self.gaussian.restore(before if self.marked is None else self.marked.coordinates)
            self.starts.reached = math.inf  # which was of another place
        self._begun()
        self.pooled.begin(rough=self.starts.searched and not self.starts.trusted)

    def _begun(self) -> None:
        """From where the starts have led."""
        self.target.doubted = True
        self.descent.leave(self.starts.first_draws)
        self.starts.begun()

    def advance(self) -> Standing | None:
        """Go on to the next evaluation, and return its standing; None at the end."""
        self._path = path = self._run() if self._path is None else self._path
        self.target.most = max(self.most, 0 if self.descent.evaluations else self.target.cost + self.starts.first_draws)
        return within(self.gaussian, lambda: next(path, None))

    def ending(self, stop: Stop | None, last: Standing) -> Ending:
        """Return the outcome of the last check; of a run ended from outside, the better of the places that are open."""
        if stop is None and self._ending is not None:
            return self._ending
        assert stop is not None
        if self.elsewhere is not None:
            within(self.gaussian, self._settled)
        return self._or_origin(self.descent.ended(stop.reason))

    def cut_short(self, stop: Stop, last: Standing) -> Ending:
        """Return the outcome at the last record, or where the start had led if that is better."""
        return self._or_origin(self.interrupted(stop.reason, last))

    def _or_origin(self, ending: Ending) -> Ending:
        return ending._replace(loss=self.starts.go_back()) if self.starts.better_than(ending.loss) else ending

    def counted(self) -> tuple[int, int]:
        """What every call of the log joint has taken."""
        return self.target.gradients, self.target.values

    def examined(self) -> Examined:
        """Within what the fit has spent."""
        self.show("whether a Gaussian fits")
        return examined(self.gaussian, self.target, self.starts, self.most, self._over)

    # -------------------------------------------------------------------------------- the run

    def _run(self) -> _Path[None]:
        """By a pool or by averages, until there is an ending."""
        while self._ending is None:
            self._ending = yield from (self._by_pool() if self.pooled.runs else self._by_averages())

    def _by_pool(self) -> _Path[Ending | None]:
        """Lot after lot; an ending, or nothing where the run goes on."""
        pooled = self.pooled
        yield from pooled.run(self, self._lost)
        if not pooled.runs:  # a mean field from which averages begin
            self.starts.reached = self.starts.sampled_loss()
            self._begun()
            return None
        if not pooled.failed:
            return (yield from self._checked())
        if (yield from self._better_start()) or pooled.goes_on():
            return None
        return self._not_enough()

    def _lost(self) -> str:
        """Why no step can help where q stands, or nothing; where the loss falls it must be by more than its error."""
        point = self.descent.point
        sure = point._replace(loss=point.loss + self.pooled.error)
        return why_lost(sure, self.starts, self.target) if sure.finite and self.elsewhere is None else ""

    def _by_averages(self) -> _Path[Ending | None]:
        """Minimise; then check, or take more draws, and before they are dear look at other starts."""
        descent = self.descent
        yield from self._minimised()
        if descent.point.total <= self.tolerance:
            return (yield from self._checked())
        more, last = descent.more_draws(), descent.draws == descent.most
        if (more > self.engine_settings.dear or last) and (yield from self._better_start()):
            return None
        if last:
            return None if descent.averages_sets() else self._not_enough()
        descent.draws = more
        return None

    def _minimised(self) -> _Path[None]:
        """Minimise over the present draws, to their end."""
        descent, aside = self.descent, self.elsewhere is not None
        if not descent.open:  # or it is gone on with
            descent.begin()
        self.show(f"{'another start, ' if aside else ''}{descent.draws} draws")
        while True:
            if not aside:
                self.mark()
            descent.evaluate()
            if self._spent is not None:  # it was counted
                descent.evaluations, self.target.gradients = self._spent
                self._spent = None
            lost = why_lost(descent.point, self.starts, self.target)
            yield descent.standing(aside)._replace(lost="" if aside else lost)
            if lost or not descent.step():
                return

    def _not_enough(self) -> Ending:
        """The ending where the most draws are not enough."""
        descent = self.descent
        if not descent.point.finite:
            return descent.ended(not_finite(float(descent.point.loss.sum())) + self.target.failures())
        judged = judge(self.gaussian, self.target, self.seed + 1)
        if judged.lost:
            return descent.ended(judged.lost)
        reason = why_not_enough(descent.point, descent.objective.growth, descent.seen, self.tolerance, judged)
        return descent.ended(reason + self._cut(judged))

    def _checked(self) -> _Path[Ending | None]:
        """On fresh draws and from other starts: an ending, or nothing where the run goes on."""
        descent, pooled = self.descent, self.pooled
        self.show("fresh draws")
        judged = judge(self.gaussian, self.target, self.seed + 1)
        if judged.lost:
            return descent.ended(judged.lost)
        if self._doubts(judged):
            if pooled.runs:
                pooled.more()
            else:
                descent.draws = min(4 * descent.draws, descent.most)
            return None
        if (yield from self._better_start()):
            return None
        others = f", and {self.starts.others} other starts found nothing better" if self.starts.looked else ""
        elsewhere = self.unseen or ("; q is from the best of several starts" if self.switched else others)
        reason = why_converged(descent.point, descent.objective.growth, descent.seen, judged, elsewhere)
        everyone = torch.full(self.q.batch_shape, True, device="cpu")
        return Ending(True, reason + self._cut(judged), float(-judged.elbo.sum()), descent.point.total, everyone)

    def _doubts(self, judged: Fresh, overfit: float = 0.5) -> bool:
        """Whether fresh draws are far less favourable than those of the fit, or differ by nats among each other."""
        descent, pools, unit = self.descent, self.pooled.runs, self.target.temperature or 1.0
        error = float(judged.error.amax())
        optimism = float((-judged.elbo - descent.point.loss).amax()) - 5 * error
        if descent.draws >= descent.most:
            return False
        # all of few draws may have missed a wall
        few = pools and descent.draws < self.engine_settings.least and error > self.tolerance * unit
        return optimism > (0.0 if pools else overfit) + self.tolerance or error > unit or few

    def _cut(self, judged: Fresh) -> str:
        """How many draws were left out of the averages and of the check, and the errors of the log joint."""
        fitted = self.pooled.left_out if self.pooled.runs else 2 * len(self.descent.left_out)
        said = (
            f" Left out were {fitted} draws of the fit and {judged.dropped} of the check at which the log joint fails "
            "or is NaN: q is fitted to the posterior cut there."
        )
        return said * bool(fitted or judged.dropped) + self.target.failures()

    # -------------------------------------------------------------------------------- other starts

    def _better_start(self) -> _Path[bool]:
        """Try another start, once, a mode around a trusted one or `Starts.other`; True where q is at a better one."""
        trusted, point = self.starts.trusted, self.descent.point
        apart = self.starts.searched and (trusted or self.pooled.runs)
        apart |= self.target.in_passes and bool((point.norm2 > point.noise2).any()) and point.total > self.tolerance
        if self.looked or self._over() or not apart:
            return False
        self.looked = True
        self.show("other starts")
        held = self.pooled.state_dict()
        try:
            found = self.starts.better() if trusted else None
            if trusted and found is None:
                return False
            self.elsewhere, self._loss_here = self.descent.place(), self.starts.sampled_loss()
            if found is None:
                at_mode = self.starts.other(self._loss_here)
            else:
                at_mode, _ = True, self.starts.place(found)
            self.descent.leave(self.starts.first_draws)
            if self.pooled.runs:
                most = max(self.pooled.evaluated, self.engine_settings.draft)
                self.pooled.leave(rough=not at_mode)
                yield from self.pooled.run(self, self._lost, most)
            else:
                yield from self._minimised()
        except _UNLUCKY as error:
            self._return(error)
        else:
            if self._settled():
                return True
        self.pooled.load_state_dict(held)
        return False

    def _settled(self) -> bool:
        """Whether the other start is the better place; q is at the better of the two."""
        better, failed = False, None
        try:
            better = self.starts.sampled_loss() < self._loss_here
            if self.pooled.runs and self.elsewhere is not None:  # whose loss is not of few draws, under heavy tails
                better &= bool(self.descent.point.loss < self.elsewhere.point.loss)
        except _UNLUCKY as error:
            better, failed = False, error
        if not better:
            self._return(failed)
        self.elsewhere, self.switched = None, self.switched or better
        return better

    def _return(self, error: Exception | None = None) -> None:
        """Come back from another start."""
        if error is not None:
            self.unseen = f", and other starts could not be looked at ({str(error).rstrip('.')})"
        if self.elsewhere is not None:
            self.descent.come_back(self.elsewhere)
            self.elsewhere = None

    # -------------------------------------------------------------------------------- checkpoints

    def go_back(self, coordinates: Any) -> None:
        """Put q at these coordinates, and leave another start that was being tried."""
        super().go_back(coordinates)
        self.elsewhere = None

    def settings(self) -> dict[str, str]:
        """The problem; a function is known by its values."""
        return {"method": "VN by sample averages", **describe_problem(self.q, self.target.target)}

    def state_dict(self) -> dict[str, Any]:
        """Return what an evaluation begins from; the seed stands for the draws."""
        return {
            "posterior": self.q.state_dict(),
            **{name: getattr(self, name).state_dict() for name in _PARTS},
            **{name: getattr(self, name) for name in ("seed", "looked", "switched", "unseen")},
            **{name: getattr(self.target, name) for name in ("gradients", "values")},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave, with the same draws."""
        self.q.load_state_dict(state["posterior"])
        self._seeded(state["seed"])
        for name in _PARTS:
            getattr(self, name).load_state_dict(state[name])
        self.looked, self.switched, self.unseen = state["looked"], state["switched"], state["unseen"]
        self.target.gradients, self.target.values = state["gradients"], state["values"]
        self._spent = None if self.pooled.runs else state.get("spent")  # what is made again is counted again
        self._path = self.elsewhere = self._ending = None


def within(q: Gaussian, do: Callable[[], _T]) -> _T:
    """Without gradients of its own, and in full precision."""
    with torch.no_grad(), FullPrecision(q.device.type):
        return do()


def examined(
    q: Gaussian,
    target: Guarded,
    starts: Starts,
    most: float,  # budget of the whole run, in gradients
    over: Callable[[], bool],
    warped: Warped | None = None,
) -> Examined:
    """Examine a fitted q, or what is warped around it, within the budgets; torch's generators stay as they are."""
    modes, around = starts.modes, starts.mean
    with ExitStack() as stack:
        if warped is not None:  # in the space of the base
            modes, around = [mode._replace(theta=warped.unbent(mode.theta)) for mode in modes], warped.unbent(around)
            target = stack.enter_context(target.seen_as(lambda inner: WarpedTarget(inner, warped)))
        allowed = Allowance(target, 2**62, min(_EXAMINATION.cost_after(target.cost), most - target.cost), over)
        if over() or allowed.cost < 1025 * VALUE:  # fewer values say nothing
            return Examined(None, "the budget of the run is used up")
        known = starts.looked and bool(modes)
        stack.enter_context(Generators(q.device).kept())
        try:
            verdict = examine_fitted(
                q,
                allowed,
                modes=modes if known else None,
                starts=starts.others if known else 0,
                around=around,
                seed=starts.seed + 11,
                settings=_EXAMINATION,
            )
        except (TorchngviError, RuntimeError, ArithmeticError) as error:  # the fit is not lost for it
            return Examined(None, str(error).rstrip("."))
        return Examined(verdict)


# What a fit by sample averages says: sentences, and the parts of sentences that a verdict is made of


def _distance(point: Point, growth: float = 1.0, flat: tuple[float, float] = (1.5, 10.0)) -> str:
    """How far off q is in nats, ``growth`` times half of norm² where the ELBO is flat; nothing where not known."""
    small = point.norm2 <= point.noise2.clamp_min(0.01)
    if not bool((small & (point.noise2 < 1)).all()):
        return ""
    if growth > flat[1]:
        return " (how many nats from the best q is not known: the ELBO is nearly flat in a direction)"
    times = growth if growth > flat[0] else 1.0
    return f", typically about {0.5 * times * point.total**2:.1g} nats from the best q"


def why_not_enough(point: Point, growth: float, draws: int, tolerance: float, judged: Fresh) -> str:
    """Why the most draws are not enough."""
    left = f"because {draws} draws leave a natural-gradient norm of {point.total:.2g} against a tolerance of"
    near = _distance(point, growth)  # a larger tolerance is of use only near an optimum
    lost = near or ": q is not at an optimum, as where a function returns minus the log joint"
    first = "Raise the tolerance" if near else "Start from another mean or a smaller scale (initialize_)"
    return f"{left} {tolerance:.2g}{lost}; {judged}. {first}, or transform the model to be nearer to a Gaussian."


def why_converged(point: Point, growth: float, draws: int, judged: Fresh, elsewhere: str) -> str:
    """That q is at an optimum, on how many draws, and what was found elsewhere."""
    reached = f"natural-gradient norm {point.total:.2g} with {draws} draws{_distance(point, growth)}"
    return f"{reached}; {judged}, {judged.kept}{elsewhere}."


def not_finite(loss: float) -> str:
    """Say that the log joint is not finite at some of the draws with which an average begins."""
    return (
        f"because the negative ELBO is {loss} at this q: the log joint is not finite at some of its draws. Start from "
        "another mean or a smaller scale (initialize_), or transform constrained coordinates."
    )


def why_lost(point: Point, starts: Starts, target: Guarded) -> str:
    """Why no step can help at a point, or nothing."""
    loss = float(point.loss.sum())
    if not point.finite:
        return not_finite(loss) + target.failures()
    if not starts.unconfined(loss):
        return ""
    wider = starts.wider()
    spread = f", and q spreads e^{wider:.0f} times as wide as it started" if wider > 0.5 else ""
    energy = "" if loss >= -Starts.bounded else " If the function returns -log p, an energy, return its negative."
    return (
        f"because the negative ELBO falls without bound, to {loss:.3g}{spread}: the log joint does not confine q. Give "
        f"every parameter a proper prior.{energy}"
    )
