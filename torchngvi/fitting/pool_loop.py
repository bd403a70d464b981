"""The loop of a fit by a pool of draws: draw from q, add what it sees, minimise over all draws, until q is known.

Each lot is drawn from q as it is, and judges the step that led there; then L is minimised over the pool, which takes no
gradient, inside a trust region about q.  Where the loss has risen q goes back, and the draws stay of use.  Where two
moves in a row point the same way, values of the log joint say how far a third may go on along the last: down a long
valley, or from where the data are in other units.  A fit whose mode is not trusted begins with a mean field, which few
draws determine; structures of other kinds go on from there by averages.

Near an optimum the directions of the draws are orthogonal in blocks of D pairs, each with a length of its own, so that
each draw is exactly N(0, I) and the regression has less noise than by independent ones.
"""

import math
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from torchngvi.derivatives import energy_and_gradient
from torchngvi.diagnostics.linear_response import PAIRS
from torchngvi.fitting.checkpoints import copied
from torchngvi.fitting.descent import Descent, Point
from torchngvi.fitting.loop import Engine
from torchngvi.fitting.pool import Fit, Lot, Normal, Pool, View, displaced, displacement, lower_root, minimise
from torchngvi.fitting.stopping import Standing
from torchngvi.interfaces import Target

_STATE = (
    *("runs", "trusted", "patient", "done", "failed", "diagonal", "far", "leaping", "moved", "drawn"),
    *("evaluated", "narrow", "left_out", "retreats", "radius", "hoped", "number"),
)


class PoolLoop:
    """The pool of a descent, and where q goes by it."""

    place: Normal  # of q, once it has drawn

    def __init__(self, descent: Descent) -> None:
        self.descent, self.q, self.target = descent, descent.q, descent.target
        self.runs = self.trusted = False  # it is by the pool that q goes; q has begun at a mode that was trusted
        self.patient = True  # it is not given up before its draws are used up: there is no other start to try
        self.drawn = 0  # lots, each of a seed of its own
        self.leave()

    @property
    def _whole(self) -> bool:
        """Whether q is one Gaussian with a full covariance that is not too wide."""
        return self.q.structure.widest == self.q.dim <= self.descent.settings.widest[not self.trusted]

    def begin(self, *, rough: bool) -> None:
        """Begin where q is, if the data of one q are at hand: with a mean field first, or at once with all of q."""
        target, widest = self.target, self.descent.settings.widest[0]
        self.trusted, self.patient = not rough, False
        at_hand = not (target.in_passes or self.q.batch_shape) and self.descent.objective.factors is None
        self.runs = at_hand and target.temperature > 0 and (self._whole or (rough and self.q.dim <= widest))
        self.leave(rough=rough)

    @property
    def _usual_radius(self) -> float:
        """Nats by which q may move near an optimum."""
        nats, each = self.descent.settings.radius
        return nats + each * self.q.dim

    @property
    def _most(self) -> int:
        """Draws in all."""
        return min(self.descent.settings.most, self.descent.settings.numbers // self.q.dim)

    @property
    def fewest(self) -> int:
        """Draws of the smallest lot: those that a regression needs."""
        fewest = self.descent.settings.fewest
        return fewest if self.diagonal else max(fewest, 2 * math.ceil(0.5 * self.q.dim + 2))

    def leave(self, *, rough: bool = False) -> None:
        """Begin with an empty pool where q is, with a mean field or at once with the full covariance."""
        self.pool, self.diagonal = Pool(), rough and (self.q.dim > 1 or not self._whole)
        self.before: Normal | None = None  # where the last step began
        self.trail: list[Normal] = []  # where q has drawn, the last ones
        self.done = self.failed = False  # q is within the tolerance, or nothing more is to be had; the latter
        self.far = self.leaping = self.moved = False
        self.evaluated = self.narrow = self.retreats = self.number = 0  # the last: draws of the next lot
        self.left_out = 0  # draws at which the log joint had no numbers
        self.radius = self.hoped = 0.0
        self._seen: tuple[View, Fit] | None = None

    @property
    def error(self) -> float:
        """Five standard errors of the loss where q stands, 0 where it is not known."""
        return 0.0 if self._seen is None else 5 * self.target.temperature * float(self._seen[1].error)

    def run(self, engine: Engine, lost: Callable[[], str], most: int = 0) -> Generator[Standing, None, None]:
        """Lot after lot, until q is within the tolerance or the pool is given up; from another start so many draws."""
        self.done = self.failed = False
        aside = most > 0
        if not self.number:
            frame = self.q.frame()
            root = lower_root(frame.dense()) if self._whole else self.q.stddev
            self.place = Normal(frame.mean.clone(), root.clone())
            self.number, self.radius = self.fewest, self._usual_radius
        while not self.done:
            if self.pool.lots and not self.moved:
                self._move()
            self.moved = True
            engine.show(f"{'another start, ' if aside else ''}{self.evaluated + self.number} draws in a pool")
            if not aside:
                engine.mark()
            place = self.place
            self._draw()
            self.moved = False
            # q went back, and an interrupt goes there too
            if self.place is not place and engine.marked is not None and not aside:
                engine.marked = engine.marked._replace(coordinates=engine.here())
            # a norm within the tolerance is to be confirmed by more lots, which count for the budgets
            settled = self.done and not self.failed
            self.done |= aside and self.evaluated >= most
            yield self.descent.standing(aside)._replace(lost=lost(), settled=settled and not aside)

    def goes_on(self) -> bool:
        """Whether it goes on after it was given up early, until its draws are used up."""
        early, self.patient = not self.patient, True
        return early and self.evaluated < self._most

    def more(self) -> None:
        """Go on with as many draws again."""
        self.number = max(self.fewest, 2 * math.ceil(0.5 * self.evaluated))
        self.moved = True

    def _go(self, place: Normal) -> None:
        """Put q there."""
        self.place, self._seen = place, None
        self.q.initialize_(place.mean, place.full)

    def _draw(self) -> None:
        """A lot of q, in antithetic pairs, which judges the step that has led there."""
        near = not (self.far or self.diagonal)
        z, blocks = antithetic(self.place, self.number, self.descent.seed + 1_000_003 * (1 + self.drawn), near)
        theta = self.place.push(z)
        energy, gradient = (part / self.target.temperature for part in energy_and_gradient(self.target, theta))
        self.drawn, self.evaluated = self.drawn + 1, self.evaluated + len(z)
        self.descent.evaluations += 1
        known = energy.isfinite() & (energy * torch.finfo(torch.float64).eps < 1)  # to a nat, if it is low
        finite = (known & gradient.isfinite().all(-1)).unflatten(0, (-1, 2)).all(-1)
        if 4 * int(finite.sum()) <= 3 * len(finite):
            self._retreat(energy)
            return
        if not bool(finite.all()):
            kept, blocks = finite.repeat_interleave(2), 1
            self.left_out += int((~kept).sum())
            theta, energy, gradient = theta[kept], energy[kept], gradient[kept]
        self.pool.add(Lot(self.place, theta.contiguous(), energy.contiguous(), gradient.contiguous(), blocks))
        self.trail = [*self.trail[-3:], self.place]
        self._judge()

    def _retreat(self, energy: Tensor) -> None:
        """Where the log joint has no numbers: back to where the step began, or narrower."""
        lost = energy.new_tensor(math.nan if bool(energy.isnan().any()) else math.inf)
        self.descent.point, self.retreats = Point(lost, lost, lost), self.retreats + 1
        self.leaping, self.number, self._seen = False, self.fewest, None
        if self.retreats > self.descent.settings.lots:
            self.done = self.failed = True
            if self.pool.lots:  # q has drawn there
                self._go(self.pool.lots[-1].place)
                self._report(self._looked()[1])
        elif self.before is None:
            self._go(Normal(self.place.mean, 0.5 * self.place.root))
        else:
            self.radius /= 4
            self._go(self.before)

    def _report(self, here: Fit) -> None:
        """Say what the pool tells of q."""
        self.descent.point = Point(here.norm2, here.noise2, self.target.temperature * here.loss)

    def _judge(self) -> None:
        """Whether the last step has led down, and whether q is within the tolerance."""
        self._seen, back = None, False
        view, here = self._looked()
        if self.before is not None and (self.leaping or self.far or float(here.norm2) > 1):
            back = self._rose(here, view.fit(self.place.seen(self.before)))
            if back:
                self._go(self.before)
                self.trail = [*self.trail[:-1], self.place]
                view, here = self._looked()
        self.leaping, limit = False, self.descent.tolerance**2
        self._report(here)
        self.descent.draws = self.evaluated - self.left_out
        if self.diagonal:
            if self._rough(here):
                self._widen()
            return
        known = float(here.effective) >= self.descent.settings.least or float(here.noise2) <= 0.01 * limit
        sure = float(here.bound) <= limit and known and not back
        if sure or (self.evaluated >= self._most and float(here.total) <= limit and not back):  # as sure as it can be
            self.done = True
        elif self._hopeless(here):
            self.done = self.failed = True
        if self.done:  # the last draws, for what is said of flat directions
            parts = (x[-2 * PAIRS :] for x in (view.z, self.target.temperature * view.pulled))
            self.descent.objective.keep(*(torch.cat([x[::2], x[1::2]]) for x in parts))

    def _rose(self, here: Fit, was: Fit) -> bool:
        """Whether the loss has risen since the last step, by all draws; sets how far the next may lead."""
        gain, margin = float(was.loss - here.loss), 0.1 * float(was.noise2)
        wild = not float(here.norm2) <= 4 * float(was.norm2) and not gain >= 2 * float(here.error)
        rose = wild or not gain >= (margin if self.leaping else -margin)
        if not self.leaping:
            if rose or gain < 0.1 * self.hoped:
                self.radius = max(self.radius / (4 if rose else 2), self._usual_radius / 256)
            elif gain >= 0.5 * self.hoped:
                self.radius = min(2 * self.radius, max(self._usual_radius, self.descent.settings.bold * gain))
        return rose

    def _rough(self, here: Fit) -> bool:
        """Whether a mean field is near enough to its optimum, or has drawn enough."""
        settings = self.descent.settings
        return float(here.total) <= settings.rough**2 or self.evaluated >= settings.draft

    def _widen(self) -> None:
        """Go on with the full covariance, or leave the rest to averages."""
        self.runs = self._whole
        self.done = not self.runs
        self.diagonal, self.far, self.narrow = False, False, self.evaluated
        self.before, self.trail, self._seen = None, self.trail[-1:], None

    def _hopeless(self, here: Fit) -> bool:
        """Whether all draws are used up; or, where another start may be tried, q is far, or what it needs is dear."""
        settings = self.descent.settings
        if self.evaluated >= self._most or self.patient:
            return self.evaluated >= self._most
        needed = float(here.effective * here.noise2) / (settings.aim * self.descent.tolerance**2)
        if float(here.total) <= settings.rough**2 and needed > settings.dear:
            return True
        return self.evaluated - self.narrow >= settings.early and (self.far or not needed <= self._most)

    def _move(self) -> None:
        """Minimise over the pool, and go there, or farther; with how many draws to take there."""
        settings, (view, here) = self.descent.settings, self._looked()
        self.far = float(here.norm2) > max(settings.far * float(here.noise2), 1.0)
        narrow = self.far or float(here.effective) <= 2 * (1 if self.diagonal else self.q.dim)
        if not self.far:
            self.radius = min(2 * self.radius, self._usual_radius)  # shorter for a while after a step to no numbers
        new = minimise(view, here, self.radius, settings)
        self.hoped, self.descent.step_taken = float(here.loss - new.loss), 1.0
        self.before, there = self.place, self.place.inside(new.at)
        self.pool.drop(new, settings.share, settings.lots)
        self.number = self.fewest if narrow else self._draws_needed(here, new)
        on = None if float(here.norm2) <= float(here.noise2) else self._onward(there)
        if on is not None:
            self.before, self.leaping, self.trail = there, True, [*self.trail[-3:], there]
        self._go(there if on is None else on)

    def _draws_needed(self, here: Fit, new: Fit) -> int:
        """How many draws the noise asks for, from before a move to after it, within limits; many are of whole blocks.

        While q still moves along a valley lots are small: many draws in one place hold q there.
        """
        settings, most, block = self.descent.settings, self._most - self.evaluated, 2 * self.q.dim
        valley, end, creep = settings.growth
        effective, noise2 = float(new.effective), float(new.noise2)
        need = ((noise2 + float(new.doubt)) / (settings.aim * self.descent.tolerance**2) - 1) * effective
        if float(new.norm2) > 2 * noise2:
            need = min(need, valley * effective)
        elif float(here.norm2) > 2 * float(here.noise2):
            need = min(need, 2.0 * self.fewest)
        elif need <= 0:
            need = creep * effective
        need = max(min(need, end * effective, most), self.fewest)
        need = max(need, min(effective, settings.least - effective))
        if not math.isfinite(need):
            return self.fewest
        if need >= 0.75 * block and not self.diagonal:
            return min(block * round(need / block), max(2 * (most // 2), self.fewest))
        return 2 * math.ceil(0.5 * need)

    def _looked(self) -> tuple[View, Fit]:
        """The pool seen from q, and what it says of q."""
        if self._seen is None:
            view = View(self.pool, self.place, self.diagonal)
            self._seen = view, view.fit(Normal.origin(self.place))
        return self._seen

    def _onward(self, there: Normal) -> Normal | None:
        """On along the last move, where the one before it pointed the same way, as far as values say."""
        if len(self.trail) < 2:
            return None
        last, older = (displacement(there, place) for place in (self.trail[-1], self.trail[-2]))
        one, two = -last, last - older
        if not float(one @ two) > self.descent.settings.cosine * float(one.norm() * two.norm()):
            return None
        return best_along(self.target, there, one, self.descent.settings.looks, self.descent.seed + self.drawn)

    # -------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what a lot begins from."""
        state = {name: getattr(self, name) for name in (*_STATE, "before", "trail")}
        place = self.place if self.number else None
        return {**state, "place": place, "lots": list(self.pool.lots), "terms": self.pool.terms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        state = copied(state)
        for name in _STATE:
            setattr(self, name, state[name])
        if state["place"] is not None:
            self.place = Normal(*state["place"])
        self.before = None if state["before"] is None else Normal(*state["before"])
        self.trail = [Normal(*place) for place in state["trail"]]
        self.pool = Pool([Lot(Normal(*lot[0]), *lot[1:]) for lot in state["lots"]], state["terms"])
        self._seen = None


def antithetic(place: Normal, number: int, seed: int, near: bool) -> tuple[Tensor, int]:
    """Draw standard normal numbers (n, D) in pairs, and say of how many blocks with orthogonal directions they are.

    Near an optimum two blocks or more are orthogonal within; 1 is said of pairs that are all independent.
    """
    dim, generator = len(place.mean), torch.Generator().manual_seed(seed)
    half = torch.randn(number // 2, dim, dtype=torch.float64, generator=generator, device="cpu")
    blocks, rest = divmod(number, 2 * dim)
    if rest or blocks < 2 or dim == 1 or not near:
        blocks = 1
    else:
        parts = half.unflatten(0, (blocks, dim))
        basis, triangle = torch.linalg.qr(parts.mT)
        directions = (basis * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]).mT  # uniformly distributed
        half = (directions * parts.norm(dim=-1, keepdim=True)).flatten(0, 1)
    return torch.stack([half, -half], 1).flatten(0, 1).to(place.mean), blocks


def best_along(target: Target, there: Normal, way: Tensor, looks: int, seed: int) -> Normal | None:
    """Find the best of some Gaussians along a way by so many values each at common draws; None where none is better.

    Each is three times as far as the one before, and the first that is worse than that is the last.
    """
    z, _ = antithetic(there, looks, seed, near=False)

    def pairs(place: Normal) -> Tensor:
        """ℓ at mirrored draws, on average, with the entropy."""
        values = target.log_joint(place.push(z)).unflatten(0, (-1, 2)).mean(1)
        return values / target.temperature + place.log_det

    first, best, found, times = pairs(there), 0.0, None, 3.0
    while (place := displaced(there, times * way)).finite:
        gain = pairs(place) - first
        mean, error = float(gain.mean()), float(gain.std()) / math.sqrt(len(gain))
        if not mean > best:
            break
        found, best, times = (place if mean > 2 * error else found), mean, 3 * times
    return found
