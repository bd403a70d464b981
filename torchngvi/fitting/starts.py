"""Where a fit of a log joint starts: at a rough mode with the curvature there, and from where else it may look.

The mode is trusted where the search has found one and the negative ELBO of its Gaussian N(mode, γ H⁻¹) is about what
the quadratic model of ℓ there promises,

    ℓ(mode) + ½γD - γ entropy,      minus Laplace's evidence where q has a full covariance,

within max(1, 0.3 D) nats: on a few draws, which are taken anyway.  Otherwise q keeps its mean and takes the best of
some scales, and a mean field comes first, see `pool`.  Where q is astronomically worse than the mode, as for data
in units of their own, the best scale is that of a q which explains nothing, and would hold all unknown scales near
nought: then q keeps its scale, or takes the widest at which the log joint is known to a nat.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchngvi.derivatives import energy_and_gradient
from torchngvi.errors import InputError
from torchngvi.fitting.fresh import allowance, sampled_loss
from torchngvi.fitting.settings import EngineSettings
from torchngvi.fitting.streaming import start_in_passes
from torchngvi.interfaces import Coordinates
from torchngvi.mode import Mode, find_mode, find_modes, number_of_starts, starting_points, uniform_points
from torchngvi.models.factors import Guarded, in_factors
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.precision import forest_of

_STATE = ("mean", "evidence", "reached", "first_log_sd", "looked")


class Starts:
    """The first start of a fit and the others, and where a fit can go back to.

    The engine sets ``over``, whether a budget is used up, and ``keep``, which takes the best coordinates so far.
    """

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
        draws = self.settings.fewest if self.hierarchical else self._glance
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

    @property
    def _glance(self) -> int:
        """Draws of each look at a scale."""
        return self.settings.fewest // 2

    def _in_other_units(self, loss: float) -> bool:
        """Whether q is so much worse than a mode of that loss that the data are in units of their own."""
        return not self.reached <= loss + self._unit * self.settings.units * self.q.dim

    def _widest(self, origin: Coordinates) -> float:
        """Put q at the widest of some scales at which its loss is known to a nat; the loss there."""
        loss = math.inf
        for factor in self.scales:
            if self.over() or not self._scaled(origin, factor):
                break
            loss = sampled_loss(self.q, self.target, self._glance, self.seed + 2)
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
        """Put q at another start, from where it has ended with that loss and no trusted mode; whether it is a mode.

        It is the mode, where that is worse by few nats a coordinate; q as it was before the fit, if that began with a
        narrower one or with a pass over data; and else q where it has ended, wider and without its correlations: where
        scales have collapsed in the neck of a funnel a wider q draws them out of it.
        """
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
