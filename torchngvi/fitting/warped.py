"""Fit a warped Gaussian: the best Gaussian first, then mean, root and curves together, over fixed draws that grow.

From N(0, I) a warp may bend to nothing; from the best Gaussian, with curves that are the identity, the ELBO can but
rise.  So the engine of a Gaussian, `sample_average`, comes first, and `bending` goes on from where it ends.
What fresh draws do not bear out is taken back: where the curves gain less than 0.05 nats, or 0.01 nats a coordinate of
fewer than five, q is the Gaussian again.  A margin has no more than some hundredths of a nat to give: that of
Student's t of three degrees of freedom 0.05, that of the logarithm of a gamma variable of shape two 0.04.
"""

from dataclasses import replace
from typing import Any

import torch

from torchngvi.diagnostics.verdict import BENT
from torchngvi.errors import InputError
from torchngvi.fitting import fresh
from torchngvi.fitting.bending import Bending
from torchngvi.fitting.directions import skewed_directions
from torchngvi.fitting.examined import Examined, examined
from torchngvi.fitting.fit import Request, tolerance_by_draws
from torchngvi.fitting.loop import Ending
from torchngvi.fitting.records import Record
from torchngvi.fitting.sample_average import SampleAverages, within
from torchngvi.fitting.stopping import Criterion, Standing, Stop
from torchngvi.interfaces import Coordinates, Target
from torchngvi.models.log_joint import WarpedTarget
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.warped import Warped

WORTH, EACH = 0.05, 0.01  # nats on fresh draws below which the Gaussian is kept: in all, and a coordinate of few
_BENT = 20  # coordinates of which curves are as accurate as with so many: each is known from draws no better
_LONG = 16_000  # gradients, or as many as the Gaussian took, after which a small gain is believed in any case


def warped_averages_of(request: Request) -> tuple["WarpedAverages", Criterion]:
    """Make the engine of a `Request` for a warped posterior, and what ends its run."""
    q, target = request.q, request.target
    assert isinstance(q, Warped)
    if request.optimizer is not None or request.batch_size is not None:
        raise InputError("a warped posterior is fitted by steps of its own; leave optimizer= and batch_size= out.")
    if request.tolerance is not None:
        engine = WarpedAverages(q, target, request.tolerance, request.examine)
    else:
        usual = tolerance_by_draws(q.base)
        curves = max(usual, tolerance_by_draws(q, _BENT))
        engine = WarpedAverages(q, target, usual, request.examine, curves)
    return engine, request.until_small(engine.tolerance)


class WarpedAverages(SampleAverages):
    """`torchngvi.fit` on a warped posterior: `SampleAverages` on its base, then `Bending`."""

    def __init__(
        self, q: Warped, target: Target, tolerance: float, examine: bool = True, curves: float | None = None
    ) -> None:
        if q.batch_shape:
            raise InputError(f"fit takes one warped posterior at a time; got a batch of shape {tuple(q.batch_shape)}.")
        if not target.temperature > 0:
            raise InputError("fit bends a posterior by its entropy too; got temperature 0, where there is none.")
        assert isinstance(q.base, Gaussian)
        super().__init__(q.base, target, tolerance, examine)
        self.warped, self.curves = q, tolerance if curves is None else curves
        self.straight()
        self.bending: Bending | None = None
        self.before: fresh.Fresh | None = None  # the Gaussian on fresh draws
        self.first: Ending | None = None  # how its fit has ended
        self.spent = 0  # gradients, on the Gaussian
        self.kept = False  # the curves gain something
        self._bent_ending: Ending | None = None

    def straight(self) -> None:
        """Set the curves to the identity."""
        with torch.no_grad():
            self.warped.phi.zero_()

    # -------------------------------------------------------------------------------- the run

    def advance(self) -> Standing | None:
        """Go on with the Gaussian, or with the curves once that has ended."""
        if self.bending is None:
            standing = super().advance()
            if standing is not None:
                return standing
            assert self._ending is not None
            self.first = self._ending
            within(self.gaussian, self._start_bending)
        return within(self.gaussian, self._bent)

    def _start_bending(self) -> None:
        self.before, self.spent = self._judged_fresh(), self.target.gradients
        if self.warped.inside:
            self.show("directions")
            with torch.no_grad():
                self.warped.turn.copy_(skewed_directions(self.gaussian, self.target, self.seed + 4))
        self.bending = Bending(self.warped, self.target, self.seed + 3, self.curves)
        self.bending.begin()

    def _judged_fresh(self) -> fresh.Fresh:
        self.show("fresh draws")
        with self.target.seen_as(lambda inner: WarpedTarget(inner, self.warped)) as inside:
            return fresh.judge(self.gaussian, inside, self.seed + 2)

    def _bent(self) -> Standing | None:
        """The next evaluation with curves; None where there is no more to be had."""
        bending = self.bending
        assert bending is not None
        if self._spent is None and bending.evaluations > bending.first and not bending.advance() and not self._more():
            return None
        self.show(f"a warp, {bending.draws} draws")
        self.target.most = self.most
        self.mark()
        bending.evaluate()
        if self._spent is not None:  # of a run that is gone on from
            _, self.target.gradients = self._spent
            self._spent = None
        return self._standing(bending)

    def _more(self) -> bool:
        """Whether another set of draws is begun; else the ending is known."""
        bending = self.bending
        assert bending is not None
        last = bending.bound <= self.curves or bending.draws == bending.most or not bending.finite or self._over()
        if not last and self._hopeful(bending):
            bending.begin(bending.more_draws())
            return True
        self._bent_ending = self._concluded(bending)
        return False

    def _hopeful(self, bending: Bending) -> bool:
        """Whether the curves gain something, or would without the noise of the draws: half of noise² is lost by it."""
        gain = self._gain(self._judged_fresh())
        early = self.target.gradients - self.spent < max(_LONG, self.spent)
        return gain >= self.worth or (early and max(gain, 0.0) + bending.noise2 >= self.worth)

    @property
    def worth(self) -> float:
        """Nats that the curves have to gain."""
        return min(WORTH, EACH * self.gaussian.dim)

    def _gain(self, after: fresh.Fresh) -> float:
        assert self.before is not None
        gain = float(after.elbo - self.before.elbo)
        return gain if not after.lost and gain == gain else -torch.inf

    def _standing(self, bending: Bending) -> Standing:
        evaluations, gradients = self.descent.evaluations + bending.evaluations, self.target.gradients
        gamma, loss = self.target.temperature, bending.value if bending.finite else torch.nan
        rejections = self.descent.rejections + bending.rejections
        record = Record(evaluations, gamma * loss, bending.total, bending.step, rejections, gradients, 0.0)
        return Standing(
            record,
            torch.tensor(False, device="cpu"),
            torch.tensor(bending.evaluated, dtype=torch.float64, device="cpu"),
            (evaluations, gradients),
            tolerance=self.curves,
            settled=record.norm <= self.curves,
            values=self.target.values,
        )

    # -------------------------------------------------------------------------------- the end

    def _concluded(self, bending: Bending) -> Ending:
        """What fresh draws say of it; q is the Gaussian again where that is no worse."""
        assert self.first is not None
        after = self._judged_fresh()
        gain = self._gain(after)
        self.kept = gain >= self.worth
        if not self.kept:
            self.gaussian.restore(bending.origin)
            self.straight()
            told = f"by {gain:.2g} nats" if gain > -torch.inf else "to nothing finite"
            told = f"A warp changes the ELBO on {fresh.DRAWS} fresh draws {told}, which is no gain: q is the Gaussian."
            return self.first._replace(reason=f"{self.first.reason} {told}")
        here = f"natural-gradient norm {bending.total:.2g} with {bending.draws} draws"
        gained = f"the warp gains {gain:.3g} nats: {after}, {after.kept}"
        loss, members = float(-after.elbo), torch.tensor(bending.total <= self.curves, device="cpu")
        reason = f"{here}; {gained}.{self.target.failures()}"
        if not bool(members):
            reason = f"because more draws or steps would be needed: {here} against {self.curves:.2g}; {gained}."
            reason += f" Raise the tolerance.{self.target.failures()}"
        return Ending(bool(members), reason, loss, bending.total, members)

    def ending(self, stop: Stop | None, last: Standing) -> Ending:
        """Return the outcome of the curves where they were begun, else that of the Gaussian."""
        if self.bending is None:
            return super().ending(stop, last)
        if stop is None:
            assert self._bent_ending is not None
            return self._bent_ending
        return self.interrupted(stop.reason, last)

    def interrupted(self, reason: str, last: Standing) -> Ending:
        """Return the outcome at the last record, with the curves as they are there."""
        if self.bending is None:
            return super().interrupted(reason, last)
        self.kept = bool(self.warped.phi.any())
        return Ending(False, reason, last.record.loss, last.record.norm, last.members)

    def cut_short(self, stop: Stop, last: Standing) -> Ending:
        """Return the outcome at the last record of the curves, else that of the Gaussian."""
        return self.interrupted(stop.reason, last) if self.bending is not None else super().cut_short(stop, last)

    def examined(self) -> Examined:
        """Within what the fit has spent: of the warped Gaussian where the curves gain something."""
        if not self.kept:
            found = super().examined()  # of the Gaussian, which is the best of the warped ones
            return found._replace(verdict=found.verdict and replace(found.verdict, family=BENT))
        self.show("whether a warped Gaussian fits")
        return examined(self.gaussian, self.target, self.starts, self.most, self._over, self.warped)

    # -------------------------------------------------------------------------------- checkpoints

    def here(self) -> Any:
        """The base, with the curves once there are some."""
        return self.gaussian.snapshot() if self.bending is None else (self.gaussian.snapshot(), self.warped.phi.clone())

    def go_back(self, coordinates: Any) -> None:
        """Put base and curves where `here` was called; before there were curves, to the identity."""
        if isinstance(coordinates, Coordinates):
            super().go_back(coordinates)
            self.straight()
            self.bending = None
            return
        base, phi = coordinates
        self.gaussian.restore(base)
        with torch.no_grad():
            self.warped.phi.copy_(phi)

    def settings(self) -> dict[str, str]:
        """Those of the Gaussian, and the family of the curves."""
        return {**super().settings(), "method": "VN by sample averages, then a warp", "warp": self.warped.extra_repr()}

    def state_dict(self) -> dict[str, Any]:
        """Return what an evaluation begins from."""
        return {
            **super().state_dict(),
            "phi": self.warped.phi,
            "turn": self.warped.turn if self.warped.inside else None,
            "bending": None if self.bending is None else self.bending.state_dict(),
            "gaussian_gradients": self.spent,
            "before": None if self.before is None else tuple(self.before),
            "first": None if self.first is None else tuple(self.first),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave, with the same draws."""
        super().load_state_dict(state)
        with torch.no_grad():
            self.warped.phi.copy_(state["phi"])
            if self.warped.inside:
                self.warped.turn.copy_(state["turn"])
        self.spent = state["gaussian_gradients"]
        self.before = None if state["before"] is None else fresh.Fresh(*state["before"])
        self.first = None if state["first"] is None else Ending(*state["first"])
        self.bending = None
        if state["bending"] is not None:
            self._spent = state.get("spent")
            self.bending = Bending(self.warped, self.target, self.seed + 3, self.curves)
            within(self.gaussian, lambda: self._loaded(state["bending"]))

    def _loaded(self, state: dict[str, Any]) -> None:
        assert self.bending is not None
        self.bending.load_state_dict(state)
