"""Where a fit of a log joint starts: at a rough mode with the curvature there, and from where else it may look.

The mode is trusted where the search has found one and the negative ELBO of its Gaussian N(mode, γ H⁻¹) is about what
the quadratic model of ℓ there promises,

    ℓ(mode) + ½γD - γ entropy,      minus Laplace's evidence where q has a full covariance,

within max(1, 0.3 D) nats: on a few draws, which are taken anyway.  Otherwise q keeps its mean and takes the best of
some scales, and a mean field comes first, see `pool_loop`.  Where q is astronomically worse than the mode, as for data
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
from torchngvi.fitting.fresh import sampled_loss
from torchngvi.fitting.settings import EngineSettings
from torchngvi.fitting.streaming import start_in_passes
from torchngvi.interfaces import Coordinates
from torchngvi.mode import Mode, find_mode, find_modes
from torchngvi.models.guarded import Guarded, in_factors
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.precision import forest_of

_USUAL = EngineSettings()
_FEWEST_DIAGONAL = 128  # of a mean field in as many dimensions and more, or its start is left for the noise of few
_STREAMED = 1024  # the fewest where each is a pass over data in batches
_STARTS = (2, 8)  # other starts of the check, fewest and most
_COLUMNS = 64  # of all their Hessians together, between these
_TRIES = 20  # points looked at for a finite density
_WIDER = (1.0, 10.0, 100.0, 1000.0)  # times as far
_LENGTHS = (-2, 5, 15)  # and the lengths of the ways from them: powers of ten, and their number
_WIDEST = 2000  # dimensions up to which D x D matrices are cheap beside the gradients of a start
_REMEMBERED = 200  # dimensions up to which modes are kept, each with its D x D matrix
_SCALES = (1.0, 0.3, 0.1, 0.03, 0.01, 1e-3)  # of the scale, where the first draws fall off the support
_GLANCE = 16  # draws of each look
_BUDGET = 200  # gradients of the search for a mode, and beside it
_EACH = (8, 20)  # a coordinate: the second for structures, wide q, and where ℓ is astronomically low at q
_OUT = 2_400  # more of them from a point that has a density, where ℓ is not finite at the mean of q
_OTHER_UNITS = 3000.0  # nats a coordinate by which q may be worse than a mode, or the data are in units of their own
_WORTH = 0.3  # nats a coordinate by which a mode that is not trusted may be worse than q, and be another start
_INFLATED = 3.0  # times as wide q is at another start that has no such mode


class Starts:
    """The first start of a fit and the others.

    Attributes:
        mean: of q before the fit, around which starts are drawn.
        seed: of all draws.
        evidence: Laplace's, of the start; minus infinity where no mode was trusted.
        modes: that were found, of the first start and of the others.
        refused: the mode that was not trusted, and the negative ELBO at the best of some scales about it.
        narrowed: q before the fit, which has begun with a smaller scale.
        reached: the negative ELBO where the start has led, infinite where it is not known.
        looked: whether other starts were looked at.
        over: whether a budget is used up.  Set by the engine, as is
        keep: which takes the best coordinates so far.
    """

    def __init__(self, q: Gaussian, target: Guarded, seed: int, settings: EngineSettings = _USUAL) -> None:
        self.settings = settings
        self.q, self.target, self.seed = q, target, seed
        self.mean = q.frame().mean.clone()
        self.evidence, self.reached = -math.inf, math.inf
        self.modes: list[Mode] = []
        self.refused: tuple[Mode, float] | None = None
        self.narrowed: Coordinates | None = None
        self.hierarchical = in_factors(q, target.target) or forest_of(q) is not None
        self.looked = False
        self.over: Callable[[], bool] = lambda: False
        self.keep: Callable[[Coordinates], None] = lambda coordinates: None
        self._kept = math.inf  # the loss there

    @property
    def streamed(self) -> bool:
        """Whether each evaluation is a pass over data in batches."""
        return self.target.in_passes

    @property
    def searched(self) -> bool:
        """Whether modes are looked for: not where a gradient is a pass over data, or a Hessian too dear."""
        return not (self.q.batch_shape or self.q.dim > _WIDEST or self.streamed or self.hierarchical)

    @property
    def trusted(self) -> bool:
        """Whether a mode is trusted."""
        return self.evidence > -math.inf

    @property
    def others(self) -> int:
        """How many other starts: more where they are cheap."""
        return min(max(_COLUMNS // self.q.dim, _STARTS[0]), _STARTS[1])

    @property
    def first_draws(self) -> int:
        """The number of draws of the first sample average from a start."""
        whitened = 2 * self.q.dim + 2  # exact on a quadratic
        # blocks are whitened by fewer draws than all coordinates together
        fewest = 2 * self.q.structure.widest + 2
        if not self.hierarchical:
            fewest = max(fewest, min(whitened, _FEWEST_DIAGONAL))
        # a pass over data costs its reading, whatever the number of draws
        return max(_STREAMED if self.streamed else self.settings.fewest, fewest)

    @property
    def _budget(self) -> int:
        """Gradients of the search for a mode."""
        return (
            _BUDGET + _EACH[self.q.structure.widest < self.q.dim or self.q.dim > self.settings.widest[0]] * self.q.dim
        )

    @torch.no_grad()
    def check_repeats(self) -> None:
        """Draws inside the function would be taken for the shape of the posterior."""
        if self.streamed:
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
            start_in_passes(self.q, data, self.seed)
            return
        if not (self.searched or self.hierarchical):
            return
        origin, sd = self.q.snapshot(), self.q.stddev
        if self.hierarchical:
            self.reached = self._best_of(lambda factor: self._scaled(origin, factor), self.settings.fewest)
            return
        mode = self._searched()
        self.q.restore(origin)
        self.reached = self._best_of(lambda factor: self._scaled(origin, factor), _GLANCE)
        self.narrowed = origin if bool((self.q.stddev < 0.99 * sd).any()) else None
        if mode is None:
            return
        here = self.q.snapshot()
        loss, trusted = self.place(mode)
        if not (trusted or self.reached <= loss + self._unit * _OTHER_UNITS * self.q.dim):  # data in units of their own
            self.reached, here, self.narrowed = self._widest(origin), self.q.snapshot(), None
            mode = self._searched(_BUDGET + _EACH[1] * self.q.dim) or mode  # the first may have been cut far from one
            loss, trusted = self.place(mode)
        if trusted:
            self.evidence = mode.log_evidence
        else:
            self.refused = mode, loss
        if (trusted or not math.isfinite(self.reached)) and loss < self.reached:
            self.reached = loss
        else:
            self.q.restore(here)

    def _widest(self, origin: Coordinates) -> float:
        """Put q at the widest of some scales at which its loss is known to a nat; the loss there."""
        loss = math.inf
        for factor in _SCALES:
            if self.over() or not self._scaled(origin, factor):
                break
            loss = sampled_loss(self.q, self.target, _GLANCE, self.seed + 2)
            if abs(loss) * torch.finfo(torch.float64).eps < self._unit:
                break
        return loss

    def _searched(self, budget: int = 0) -> Mode | None:
        """The mode that is found from the mean, with as many gradients as usual or more."""
        mode = find_mode(self.target, self.mean, max(budget, self._budget), over=self.over)
        for look in (_near, _out):  # no finite density there: from a point that has one
            if mode is None and not self.over() and (start := look(self)) is not None:
                mode = find_mode(self.target, start, _OUT + self._budget, over=self.over)
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
        for factor in _SCALES:
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
            if loss <= self._promised(mode) + self._unit * self.allowance:
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

    def _promised(self, mode: Mode) -> float:
        """The loss of q at the mode if ℓ were the quadratic that it is there, of any structure."""
        gamma, dim = self.target.temperature or 1.0, self.q.dim
        entropy = float(mode.root.diagonal().log().sum()) + 0.5 * dim * (1 + math.log(2 * math.pi))
        return gamma * (entropy - float(self.q.entropy()) - mode.log_evidence)

    # -------------------------------------------------------------------------------- others

    def better(self) -> Mode | None:
        """The mode with the most evidence from the other starts, where it has more than the first by a nat."""
        starts = self.mean + self.shifts(self.others)
        modes = [mode for mode in find_modes(self.target, starts, self._budget, over=self.over) if mode is not None]
        self._remember(modes)
        self.looked = True
        best = max(modes, key=lambda mode: mode.log_evidence, default=None)
        return None if best is None or best.log_evidence < 1 + self.evidence else best

    def other(self, loss: float) -> bool:
        """Put q at another start, from where it has ended with that loss and no trusted mode; whether it is a mode.

        It is the mode, where that is not hopeless; q as it was before the fit, if that began with a narrower one; and
        else q where it has ended, wider and without its correlations: where scales have collapsed in the neck of a
        funnel a wider q draws them out of it.
        """
        if self.refused is not None and self.refused[1] <= loss + self._unit * _WORTH * self.q.dim:
            self.place(self.refused[0])
            return True
        if self.narrowed is None:
            self._initialized(self.q.mean.clone(), torch.diag_embed(_INFLATED * self.q.stddev))
        else:
            self._widest(self.narrowed)
        return False

    def _remember(self, modes: Sequence[Mode | None]) -> None:
        """For the question whether a Gaussian fits."""
        self.modes += [mode for mode in modes if mode is not None and mode.found and self.q.dim <= _REMEMBERED]

    def shifts(self, count: int) -> Tensor:
        """Uniform on (-2, 2), (count, D)."""
        generator = torch.Generator().manual_seed(self.seed)
        uniform = torch.rand(count, self.q.dim, generator=generator, dtype=torch.float64, device="cpu")
        return (4 * uniform - 2).to(self.mean)

    @property
    def _unit(self) -> float:
        """Of losses in nats."""
        return self.target.temperature or 1.0

    @property
    def allowance(self) -> float:
        """Nats by which a start may miss what it promised."""
        return max(self.settings.trust[0], self.settings.trust[1] * self.q.dim)

    def sampled_loss(self, draws: int, **options: float) -> float:
        """L at q from whitened draws, the same for every q; infinite where it is not finite.  The best is kept."""
        loss = sampled_loss(self.q, self.target, draws, self.seed + 2, **options)
        if loss < self._kept:
            self._kept = loss
            self.keep(self.q.snapshot())
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of starts."""
        refused = None if self.refused is None else (tuple(self.refused[0]), self.refused[1])
        return {
            "mean": self.mean,
            "evidence": self.evidence,
            "refused": refused,
            "narrowed": None if self.narrowed is None else tuple(self.narrowed),
            "modes": [tuple(mode) for mode in self.modes],
            "looked": self.looked,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        self.mean, self.evidence, self.looked = state["mean"], state["evidence"], state["looked"]
        self.modes = [Mode(*values) for values in state["modes"]]
        refused, narrowed = state["refused"], state["narrowed"]
        self.narrowed = None if narrowed is None else Coordinates(*narrowed)
        self.refused = None if refused is None else (Mode(*refused[0]), refused[1])


def _near(starts: Starts) -> Tensor | None:
    """The first of some points near the mean with a finite density."""
    points = starts.mean + starts.shifts(_TRIES)
    finite = torch.isfinite(starts.target.log_joint(points)).nonzero()
    return points[finite[0, 0]] if len(finite) else None


def _out(starts: Starts) -> Tensor | None:
    """The point of largest density on the ways out of where the log joint overflows; None where none is finite."""
    mean, factors = starts.mean, torch.tensor(_WIDER, device="cpu").to(starts.mean).repeat(_TRIES)[:_TRIES, None]
    points = torch.cat([mean[None], mean + starts.shifts(_TRIES) * factors])
    energies, gradients = energy_and_gradient(starts.target, points)
    ways = torch.where(gradients.isinf() & ~energies.isfinite()[:, None], -gradients.sign(), 0.0)
    some = (ways != 0).any(-1)
    lengths = torch.logspace(*_LENGTHS, device="cpu").to(mean)[:, None, None]
    points = torch.cat([points, (points[some] + lengths * ways[some]).flatten(0, 1)])
    values = starts.target.log_joint(points)
    values = torch.where(values.isfinite(), values, -math.inf)
    return points[values.argmax()] if bool(values.isfinite().any()) else None
