"""Fit a log joint by sample averages that grow: the default where E_q[ℓ] has no closed form.

With the draws z_1..z_S held fixed and whitened, the sample average of ℓ(m + C z_s) is a deterministic objective, exact
for quadratic ℓ, and is minimised as any other (Giordano, Ingram and Broderick 2024; Burroni, Domke and Sheldon 2023).
Its minimum misses that of L by about half of

    noise² = |standard error of ∇L|²_F⁻¹ = O(1/S)

in nats, which the draws themselves tell.  So: find a rough mode, minimise over few draws, and take as many more as the
noise asks for, until norm² + noise² ≤ tolerance².  Fresh draws and other starts then say whether to believe it.  If no
mode can be trusted several starts race; if averages have no minimum (heavy tails), stochastic steps of falling size do.

Before that, one Gaussian with a full covariance is fitted by a pool of draws, which uses every gradient again.

Parts: `starts`, `race` (by draws that are new each time), `descent` (averages over one set of draws after another),
`pool_loop` (over all draws so far), `fresh` (the check), and here the order of them, and the words.
"""

import math
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch

from torchngvi.errors import TorchngviError
from torchngvi.expectations.draws import drawn_seed
from torchngvi.fitting import fingerprints, fresh, reasons
from torchngvi.fitting.descent import Descent
from torchngvi.fitting.engine import Ending, Engine, Standing, Stop
from torchngvi.fitting.examined import Examined, examined
from torchngvi.fitting.points import Place
from torchngvi.fitting.pool_loop import PoolLoop
from torchngvi.fitting.request import Request, tolerance_by_draws
from torchngvi.fitting.rescue import Rescue
from torchngvi.fitting.starts import Starts
from torchngvi.fitting.stopping import Criterion
from torchngvi.interfaces import Target
from torchngvi.mode import Mode
from torchngvi.models.arguments import FullPrecision
from torchngvi.models.guarded import BudgetError, Guarded
from torchngvi.posteriors.gaussian import Gaussian

_COMPARED = 256  # draws by which the end of a pool and that of a race are compared
_DEAR = 512  # draws before which other starts are looked at
_TAME = 1.0  # noise² from which averages are not tried again after steps of falling size
_UNLUCKY = (TorchngviError, RuntimeError, ArithmeticError, BudgetError)  # whatever fails elsewhere, q is where it was

_T = TypeVar("_T")
_Path = Generator[Standing, None, _T]  # where it stands after each evaluation


def averages_of(request: Request) -> tuple[Engine, Criterion]:
    """Make the engine of a `Request` for a log joint, and what ends its run; an optimizer makes its own steps."""
    if request.optimizer is not None:
        return request.engine("steps")
    assert isinstance(request.q, Gaussian)
    criteria = request.until_small(request.tolerance_or(tolerance_by_draws))
    return PooledAverages(request.q, request.target, criteria.tolerance, request.examine), criteria


class SampleAverages(Engine):
    """`torchngvi.fit` on a log joint ``target`` that gives the same value twice, without an optimizer.

    The tolerance is on √(norm² + noise²); ``examine`` says afterwards whether a Gaussian fits.
    """

    name = "VN"
    overfit = 0.5  # nats by which the loss may be better on the draws of averages than on others

    def __init__(self, q: Gaussian, target: Target, tolerance: float, examine: bool = True) -> None:
        super().__init__(q)
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
        self.starts = Starts(self.gaussian, self.target, seed)
        self.descent = Descent(self.gaussian, self.target, seed, self.tolerance)
        self.rescue = Rescue(self.starts)
        self.starts.over, self.starts.show, self.starts.keep = self._over, lambda phase: self.show(phase), self.keep

    def _over(self) -> bool:
        """Whether a budget is used up."""
        return self.over(self.target.cost)

    def check(self) -> None:
        """Refuse a log joint that draws, since two calls at one θ must agree."""
        within(self.gaussian, self.starts.check_repeats)

    def begin(self) -> None:
        """Look for a rough mode, or go through the data in batches."""
        self.show("a pass over the data" if self.starts.streamed else "a rough mode")
        self.rescue.origin = self.gaussian.snapshot()
        self.target.most = self.most
        try:
            within(self.gaussian, self._started)
        except BudgetError:  # from the best that is known
            self.gaussian.restore(self.rescue.origin if self.marked is None else self.marked.coordinates)
        self._begun()

    def _started(self) -> None:
        """Put q where averages begin."""
        self.starts.first()

    def _begun(self) -> None:
        """From where the starts have led."""
        self.descent.leave(self.starts.first_draws)
        self.rescue.begun()
        self.looked |= self.starts.raced  # from several starts

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
        elif self.descent.went_wrong():
            within(self.gaussian, self.descent.undo)
        if self.rescue.winner is not None and self.rescue.worse(float(self.descent.point.loss.sum())):
            self.gaussian.restore(self.rescue.winner)
            return self.descent.ended(stop.reason)._replace(loss=self.rescue.loss)
        return self.descent.ended(stop.reason)

    def cut_short(self, stop: Stop, last: Standing) -> Ending:
        """Return the outcome at the last record, or where the start had led if that is better."""
        ending = self.interrupted(stop.reason, last)
        if self.rescue.winner is None or not self.rescue.worse(ending.loss):
            return ending
        self.gaussian.restore(self.rescue.winner)
        return ending._replace(loss=self.rescue.loss)

    def counted(self) -> tuple[int, int]:
        """What every call of the log joint has taken."""
        return self.target.gradients, self.target.values

    def examined(self) -> Examined:
        """Within what the fit has spent."""
        self.show("whether a Gaussian fits")
        return examined(self.gaussian, self.target, self.starts, self.most, self._over)

    # -------------------------------------------------------------------------------- the run

    def _run(self) -> _Path[None]:
        """Minimise, grow, check."""
        descent = self.descent
        while True:
            sound = yield from self._minimised()
            if self.rescue.races and (not sound or descent.failed()):
                self._race()
                continue
            if self._hands_over():
                return
            descent.judge_nearness()
            if descent.point.total <= self.tolerance:
                self._ending = yield from self._checked()
            else:
                self._ending = yield from self._grown()
            if self._ending is None:
                continue
            if self._ending.converged or not self.rescue.races or reasons.distance(descent.point):
                return
            self._race()  # far from an optimum

    def _hands_over(self) -> bool:
        """Whether something else goes on from here."""
        return False

    def _race(self) -> None:
        """Of starts, one of which is where q is."""
        self.elsewhere, self._ending = None, None
        self.rescue.race()
        self._begun()

    def _minimised(self) -> _Path[bool]:
        """Over the present draws, to their end; False where the log joint has none."""
        descent = self.descent
        if not descent.open:  # or it is gone on with
            descent.begin()
        self.show(f"{'another start, ' if self.elsewhere else ''}{descent.draws} draws")
        while True:
            if self.elsewhere is None:
                self.mark()
            descent.evaluate()
            if self._spent is not None:  # it was counted
                descent.evaluations, self.target.gradients = self._spent
                self._spent = None
            standing = descent.standing(self.elsewhere is not None)
            lost = "" if descent.went_wrong() else reasons.lost(descent.point, self.rescue, self.target)
            sound = not lost and not self._astray()
            yield standing._replace(lost="" if self.elsewhere or self.rescue.saves(standing.record.loss) else lost)
            if not sound:
                return False
            if self.rescue.gives_up(descent) or not descent.step():
                return True

    def _astray(self) -> bool:
        """Whether starts may race, and larger averages see that q is far worse than it was."""
        first = self.descent.evaluations == self.descent.first + 1
        return first and self.rescue.races and self.rescue.worse(float(self.descent.point.loss.sum()))

    def _grown(self) -> _Path[Ending | None]:
        """More draws; before they are dear a look at other starts.  An ending where there are no more."""
        descent, more = self.descent, self.descent.more_draws()
        last = descent.draws == descent.most
        if self.rescue.useless(descent):
            return _finished(self)
        if ((more > _DEAR or last) and (yield from self._better_start())) or (last and descent.averages_sets()):
            return None
        if last or self.rescue.in_vain(descent, self.tolerance):
            judged = fresh.judge(self.gaussian, self.target, self.seed + 1)
            reason = reasons.not_enough(descent.point, descent.sight.growth, descent.seen, self.tolerance, judged)
            return self.descent.ended(reason + self._cut(judged))
        descent.draws = more
        return None

    def _checked(self) -> _Path[Ending | None]:
        """On fresh draws and from other starts: an ending, or nothing where the run goes on."""
        descent, total = self.descent, self.descent.point.total
        self.show("fresh draws")
        judged = fresh.judge(self.gaussian, self.target, self.seed + 1)
        if judged.lost:
            return self.descent.ended(judged.lost)
        if self._doubts(judged) and descent.draws < descent.most:
            self._draw_more()
            return None
        if (yield from self._better_start()):
            self._leave()
            return None
        if (lost := self.rescue.regret()) is not None:  # back to where the start had led, and on from there once
            elbo, again = self.rescue.turn_back()
            if again:
                descent.leave(descent.draws)
                self._leave()
                return None
            return self.descent.ended(reasons.worsened(lost, total, descent.seen))._replace(loss=-elbo)
        elsewhere = self.unseen or reasons.others(self.starts, self.switched)
        reason = reasons.converged(descent.point, descent.sight.growth, descent.seen, judged, elsewhere)
        reason, everyone = reason + self._cut(judged), torch.full(self.q.batch_shape, True, device="cpu")
        return Ending(True, reason, float(-judged.elbo.sum()), total, everyone)

    def _doubts(self, judged: fresh.Fresh, overfit: float = overfit) -> bool:
        """Whether fresh draws are far less favourable than those of the fit, or differ by nats among each other."""
        error = judged.error.amax()
        optimism = (-judged.elbo - self.descent.point.loss).amax() - 5 * error
        return float(optimism) > overfit + self.tolerance or float(error) > (self.target.temperature or 1.0)

    def _draw_more(self) -> None:
        """Go on over more draws, where fresh ones are far less favourable."""
        self.descent.draws = min(4 * self.descent.draws, self.descent.most)

    def _leave(self) -> None:  # noqa: B027
        """Forget what is known of where q was."""

    def _cut(self, judged: fresh.Fresh) -> str:
        return reasons.cut(2 * len(self.descent.left_out), judged.dropped) + self.target.failures()

    # -------------------------------------------------------------------------------- other starts

    def _better_start(self) -> _Path[bool]:
        """Search from points around the first start, once; True where q now is at a better one."""
        if not self.starts.searched or self.looked or self._over():
            return False
        self.looked = True
        self.show("other starts")
        try:
            found = self.starts.better()
            if found is None:
                return False
            self.elsewhere = self.descent.place()
            self._loss_here = self.starts.sampled_loss(fresh.DRAWS)
            self.starts.place(found)
            self.descent.leave(self.starts.first_draws)
            yield from self._minimised()
        except _UNLUCKY as error:
            self._return(error)
            return False
        return self._settled()

    def _settled(self) -> bool:
        """Whether the other start is the better place; q is at the better of the two."""
        try:
            better = self.starts.sampled_loss(fresh.DRAWS) < self._loss_here
        except _UNLUCKY as error:
            self._return(error)
            return False
        if not better:
            self._return()
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
        return {"method": "VN by sample averages", **fingerprints.of_problem(self.q, self.target.target)}

    def state_dict(self) -> dict[str, Any]:
        """Return what an evaluation begins from; the seed stands for the draws."""
        return {
            "posterior": self.q.state_dict(),
            "descent": self.descent.state_dict(),
            "seed": self.seed,
            "first_mean": self.starts.mean,
            "evidence": self.starts.evidence,
            "looked": self.looked,
            "switched": self.switched,
            "unseen": self.unseen,
            "raced": self.starts.raced,
            "distrusted": self.starts.distrusted,
            "modes": ([tuple(mode) for mode in self.starts.modes], self.starts.looked),
            "rescue": self.rescue.state_dict(),
            "gradients": self.target.gradients,
            "values": self.target.values,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave, with the same draws."""
        self.q.load_state_dict(state["posterior"])
        self._seeded(state["seed"])
        self.starts.mean, self.starts.evidence = state["first_mean"], state["evidence"]
        self.descent.load_state_dict(state["descent"])
        self.looked, self.switched, self.unseen = state["looked"], state["switched"], state["unseen"]
        self.starts.raced, self.starts.distrusted = state["raced"], state["distrusted"]
        modes, self.starts.looked = state.get("modes", ((), False))
        self.starts.modes = [Mode(*values) for values in modes]
        self.rescue.load_state_dict(state["rescue"])
        self.target.gradients, self.target.values = state["gradients"], state["values"]
        self._spent = state.get("spent")  # a sweep is counted again
        self._path = self.elsewhere = self._ending = None


def _finished(engine: SampleAverages) -> Ending | None:
    """By stochastic steps of falling size, where averages cannot be minimised; and once more by averages."""
    descent, rescue = engine.descent, engine.rescue
    point, again = descent.point, rescue.finished is not None
    before, after = rescue.finished or rescue.finish()
    if not again and after.elbo > before.elbo and float(point.noise2.max()) < _TAME and not rescue.starts.over():
        descent.leave(descent.draws)
        return None
    reason = reasons.too_few(descent.draws, point.total, engine.tolerance) + reasons.finished(before, after)
    return descent.ended(reason + engine.target.failures())._replace(loss=-rescue.best())


class PooledAverages(SampleAverages):
    """Averages with a pool of draws before them, and where they have come near after a race.

    It is the engine of ``fit``: a pool takes a third to a tenth of the gradients of averages on hierarchies, as many on
    regressions.  A pool that is given up leaves q to averages.
    """

    def _seeded(self, seed: int) -> None:
        super()._seeded(seed)
        self.pooled = PoolLoop(self.descent)

    def _started(self) -> None:
        """Put q where a pool begins, or where starts lead."""
        pooled = self.pooled
        pooled.first = pooled.served and self.starts.searched and self.starts.before_a_pool(pooled.settings.widest[0])
        if not pooled.first:
            super()._started()
            pooled.first = pooled.served and self.starts.evidence > -math.inf  # by a longer search

    def _begun(self) -> None:
        super()._begun()
        self.pooled.leave(diagonal=self.pooled.first and self.starts.distrusted)
        self.looked |= self.starts.distrusted  # no mode to compare others with

    def _run(self) -> _Path[None]:
        """Pool, or average, or both by turns."""
        while True:
            if self.pooled.runs:
                yield from self.pooled.run(self, self._lost)
                if self.pooled.failed:
                    self._give_up()
                else:
                    self._ending = yield from self._checked()
            else:
                yield from super()._run()
            if self._ending is not None:
                return

    def _lost(self) -> str:
        """Why no step can help where q stands, or nothing; where the loss falls it must be by more than its error."""
        point = self.descent.point
        sure = point._replace(loss=point.loss + self.pooled.error)
        return reasons.lost(sure, self.rescue, self.target) if sure.finite else ""

    def _hands_over(self) -> bool:
        """Whether averages after a race are near, so that a pool is the cheaper way to the end."""
        near = self.tolerance < self.descent.point.total <= self.pooled.settings.entry
        self.pooled.opened |= near and self.pooled.served and self.starts.raced and self.rescue.pools
        return self.pooled.runs

    def _give_up(self) -> None:
        """Leave q to averages where it is; where a pool had begun in the place of a race, from a race."""
        pooled = self.pooled
        if not pooled.first or not self.starts.distrusted or self._over():
            pooled.closed = True
            self.descent.leave(self.starts.first_draws)
            return
        there, loss = self.gaussian.snapshot(), self.starts.sampled_loss(_COMPARED)
        assert self.rescue.origin is not None
        self.gaussian.restore(self.rescue.origin)
        self.starts.first()
        if loss < self.starts.sampled_loss(_COMPARED):
            self.gaussian.restore(there)
            self.starts.reached = loss
        pooled.first = self.starts.distrusted = False
        self._begun()

    def _doubts(self, judged: fresh.Fresh, overfit: float = SampleAverages.overfit) -> bool:
        if not self.pooled.runs:
            return super()._doubts(judged, overfit)
        few = self.descent.draws < self.pooled.settings.least
        unsure = float(judged.error.amax()) > self.tolerance * self.target.temperature
        return super()._doubts(judged, 0.0) or (few and unsure)  # as where all draws so far have missed a wall

    def _draw_more(self) -> None:
        if self.pooled.runs:
            self.pooled.more()
        else:
            super()._draw_more()

    def _leave(self) -> None:
        self.pooled.leave()

    def _cut(self, judged: fresh.Fresh) -> str:
        if not self.pooled.runs:
            return super()._cut(judged)
        return reasons.cut(self.pooled.left_out, judged.dropped) + self.target.failures()

    def state_dict(self) -> dict[str, Any]:
        """Return what an evaluation begins from; the seed stands for the draws."""
        return {**super().state_dict(), "pooled": self.pooled.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave, with the same draws."""
        super().load_state_dict(state)
        self.pooled.load_state_dict(state["pooled"])
        self._spent = None if self.pooled.runs else self._spent  # a lot is counted again


def within(q: Gaussian, do: Callable[[], _T]) -> _T:
    """Without gradients of its own, and in full precision."""
    with torch.no_grad(), FullPrecision(q.device.type):
        return do()
