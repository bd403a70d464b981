"""Where a fit of a log joint starts: at a rough mode with the curvature there, and from where else it may look.

The mode is trusted where the search has found one and the negative ELBO of its Gaussian N(mode, γ H⁻¹) is about what
the quadratic model of ℓ there promises,

    ℓ(mode) + ½γD - γ entropy,      minus Laplace's evidence where q has a full covariance,

within max(1, 0.3 D) nats: on a few draws, which are taken anyway.  Otherwise several starts race, see `Race`.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchngvi.derivatives import energy_and_gradient
from torchngvi.errors import InputError
from torchngvi.fitting.race import MEAN_FIELD, Race, Start, sampled_loss
from torchngvi.fitting.streaming import start_in_passes
from torchngvi.interfaces import Coordinates
from torchngvi.mode import Mode, Seen, find_mode, find_modes
from torchngvi.models.guarded import Guarded, in_factors
from torchngvi.posteriors import DiagonalGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.precision import forest_of

_FEWEST = 32  # draws of one sample average
_FEWEST_DIAGONAL = 128  # of a mean field in as many dimensions and more, or its start is left for the noise of few
_STREAMED = 1024  # the fewest where each is a pass over data in batches
_STARTS = (2, 8)  # other starts of the check, fewest and most
_COLUMNS = 64  # of all their Hessians together, between these
_TRIES = 20  # points looked at for a finite density
_WIDER = (1.0, 10.0, 100.0, 1000.0)  # times as far
_LENGTHS = (-2, 5, 15)  # and the lengths of the ways from them: powers of ten, and their number
_WIDEST = 2000  # dimensions up to which D x D matrices are cheap beside the gradients of a start
_REMEMBERED = 200  # dimensions up to which modes are kept, each with its D x D matrix
_SHRINK = (1.0, 0.3, 0.1, 0.03, 0.01, 1e-3)  # of the scale, where the first draws fall off the support
_PATH = (1.0, 0.3)  # scales at which the points of a path are looked at
_GLANCE = 16  # draws of each look
_INDEPENDENT = (8, 40)  # blocks of independent coordinates, one a coordinate between these: in few they gain little
_INIT, _NARROWER = "q as it was", "a narrower q"
_SMALL_BUDGET = (60, 8)  # gradients of the search for a mode before a pool, and gradients a coordinate
_OTHER_UNITS = 3000.0  # nats a coordinate by which q may be worse than a mode, or the data are in units of their own
_TRUST = (1.0, 0.3)  # nats, and nats a coordinate, by which a mode may miss its promise


class Starts:
    """The first start of a fit and the others.

    Attributes:
        mean: of q before the fit, around which starts are drawn.
        seed: of all draws.
        evidence: Laplace's, of the start; minus infinity where no mode was trusted.
        modes: that were found, of the first start and of the others.
        reached: the negative ELBO where the start has led, infinite where it is not known.
        looked: whether other starts were looked at.
        raced: whether several starts have raced, because no mode was trusted.
        distrusted: whether a pool has begun in the place of a race.
        over: whether a budget is used up.  Set by the engine, as is
        show: which shows a phase, and
        keep: which takes the best coordinates so far.
    """

    def __init__(self, q: Gaussian, target: Guarded, seed: int) -> None:
        self.q, self.target, self.seed = q, target, seed
        self.mean = q.frame().mean.clone()
        self.evidence, self.reached, self.raced, self.distrusted = -math.inf, math.inf, False, False
        self.modes: list[Mode] = []
        self.hierarchical = in_factors(q, target.target) or forest_of(q) is not None
        self.looked = False
        self.over: Callable[[], bool] = lambda: False
        self.show: Callable[[str], None] = lambda phase: None
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
        return max(_STREAMED if self.streamed else _FEWEST, fewest)

    @property
    def _budget(self) -> int:
        """Gradients of the search for a mode."""
        return 200 + 20 * self.q.dim

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

    def before_a_pool(self, widest: int) -> bool:
        """Put q where a pool of draws can begin: at a mode that is trusted, or with the best of some scales.

        Without such a mode a pool is not to begin in more dimensions than ``widest``, nor where the log joint at q is
        so much lower than at a mode that its data must be in other units: q is as it was, and False is returned.
        """
        origin, (here, loss) = self.q.snapshot(), _best_scale(self)
        few, each = _SMALL_BUDGET
        mode, _ = self._searched(few + each * self.q.dim)
        self.reached, found, trusted = loss, -math.inf, False
        if mode is not None:
            found, trusted = self.place(mode)
        if trusted:
            assert mode is not None
            self.evidence, self.reached = mode.log_evidence, min(loss, found)
            if loss <= found:  # q is better as it was
                self.q.restore(here)
            return True
        self.distrusted = self.q.dim <= widest and loss <= found + self._unit * _OTHER_UNITS * self.q.dim
        self.q.restore(here if self.distrusted else origin)
        return self.distrusted

    def first(self) -> None:
        """Put q at a rough mode, with the curvature there; with data in batches, where one pass leads."""
        data = self.target.target
        if data.in_passes:
            start_in_passes(self.q, data, self.seed)
            return
        if self.hierarchical:
            init = Start(_INIT, self.q.snapshot(), self.sampled_loss(_FEWEST))
            best = [init, *self._narrower(init)][-1]
            self.q.restore(best.coordinates)
            self.reached = best.loss
        if not self.searched:
            return
        mode, path = self._searched(self._budget)
        here, loss = self.q.snapshot(), self.sampled_loss(_FEWEST)
        init = Start(_INIT, here, loss)
        if mode is None:
            self._race([init], path)
            return
        reached, trusted = self.place(mode)
        if not trusted:
            found = Start("a mode", self.q.snapshot(), reached)
            self._race([found, init, *self._narrower(init)], path)
            return
        self.evidence, self.reached = mode.log_evidence, min(loss, reached)
        if loss <= reached:  # q is better as it was
            self.q.restore(here)

    def _searched(self, budget: int) -> tuple[Mode | None, list[Seen]]:
        """The mode that is found from the mean, with the way there."""
        path: list[Seen] = []
        mode = find_mode(self.target, self.mean, budget, over=self.over, path=path)
        for look in (_near, _out):  # no finite density there: from a point that has one
            if mode is None and not self.over() and (start := look(self)) is not None:
                mode = find_mode(self.target, start, budget, over=self.over, path=path)
        self._remember([mode])
        return mode, path

    def _race(self, starts: list[Start], path: list[Seen]) -> None:
        """Put q where the best of the starts leads; at the first of them where none has a finite loss."""
        self.raced = True
        self.show("starts on the way to a mode")
        starts = [*starts, *self._glimpsed(path)]
        starts += self._mean_field(starts)
        race = Race(self.q, self.target, self.seed, self.over, self.show, self.keep)
        self.q.restore(starts[0].coordinates)
        race.run(starts)
        self.reached = race.reached

    def again(self, origin: Coordinates, started: Coordinates | None) -> None:
        """Race where averages have led astray, from there, from q as it was before the fit, and from a mode."""
        places = {"where averages led": self.q.snapshot(), "a mode": started}
        starts = []
        for name, place in places.items():
            if place is not None:
                self.q.restore(place)
                starts.append(Start(name, place, self.sampled_loss(_FEWEST)))
        self.q.restore(origin)
        init = Start(_INIT, origin, self.sampled_loss(_FEWEST))
        self._race([init, *starts, *self._narrower(init)], [])
        self.looked = True

    def _narrower(self, init: Start) -> list[Start]:
        """About the mean of q with the best of some smaller scales, where that is far better than q as it was."""
        self.q.restore(init.coordinates)
        best = init
        for factor in _SHRINK[1:]:
            if self.over() or not self.scaled(init.coordinates, factor):
                break
            loss = self.sampled_loss(_FEWEST)
            if not loss < best.loss - self._unit * self.allowance:  # as wide as may be: steps are in its units
                break
            best = Start(_NARROWER, self.q.snapshot(), loss)
        return [] if best is init else [best]

    def scaled(self, init: Coordinates, factor: float) -> bool:
        """Put q where it was, with a share of its scale, unless it has no numbers for it."""
        self.q.restore(init)
        if self.q.structure.closed:
            return self._initialized(self.q.mean.clone(), factor * self.q.scale_tril)
        root = self.q.whitener() / factor  # nothing that is D x D
        self.q.restore(self.q._coordinates_with(self.q.mean.clone(), root))
        return bool(root.isfinite().all())

    def _mean_field(self, starts: list[Start]) -> list[Start]:
        """Where steps of independent coordinates lead from q as it was, or narrower: they are hardly noisy.

        With D numbers for the spread in the place of D²/2 they come near to the best q in a tenth of the steps; what
        the correlations add is a matter of a few nats then.
        """
        if self.q.structure.widest == 1:
            return []
        begin = next((s for s in starts if s.name in (_INIT, _NARROWER) and math.isfinite(s.loss)), None)
        if begin is None:
            return []
        self.q.restore(begin.coordinates)
        work = DiagonalGaussian.from_posterior(self.q)
        start = Start(
            "independent coordinates", work.snapshot(), sampled_loss(work, self.target, _FEWEST, self.seed + 2)
        )

        def keep(coordinates: Coordinates) -> None:
            work.restore(coordinates)
            if self._initialized(work.mean, work.scale_tril):
                self.keep(self.q.snapshot())

        Race(work, self.target, self.seed, self.over, self.show, keep, MEAN_FIELD).run(
            [start], min(max(_INDEPENDENT[0], self.q.dim), _INDEPENDENT[1])
        )
        if not self._initialized(work.mean, work.scale_tril):
            return []
        return [Start("independent coordinates", self.q.snapshot(), self.sampled_loss(_FEWEST))]

    def _glimpsed(self, path: list[Seen]) -> list[Start]:
        """The best point on the way to the mode, its last left out; it takes values alone (Zhang et al. 2022)."""
        best: Start | None = None
        for seen in path[:-1]:
            scale = self.q.kept_precision(seen.root(self.target.temperature or 1.0))
            for factor in _PATH:
                if self.over() or not self._initialized(seen.theta, factor * scale):
                    continue
                loss = self.sampled_loss(_GLANCE)
                if loss < (math.inf if best is None else best.loss):
                    best = Start("a point on the way", self.q.snapshot(), loss)
        if best is None:
            return []
        self.q.restore(best.coordinates)
        best.loss = self.sampled_loss(_FEWEST)
        return [best]

    def better(self) -> Mode | None:
        """The mode with the most evidence from the other starts, where it has more than the first by a nat."""
        starts = self.mean + self.shifts(self.others)
        modes = [mode for mode in find_modes(self.target, starts, self._budget, over=self.over) if mode is not None]
        self._remember(modes)
        self.looked = True
        best = max(modes, key=lambda mode: mode.log_evidence, default=None)
        return None if best is None or best.log_evidence < 1 + self.evidence else best

    def _remember(self, modes: Sequence[Mode | None]) -> None:
        """For the question whether a Gaussian fits."""
        self.modes += [mode for mode in modes if mode is not None and mode.found and self.q.dim <= _REMEMBERED]

    def shifts(self, count: int) -> Tensor:
        """Uniform on (-2, 2), (count, D)."""
        generator = torch.Generator().manual_seed(self.seed)
        uniform = torch.rand(count, self.q.dim, generator=generator, dtype=torch.float64, device="cpu")
        return (4 * uniform - 2).to(self.mean)

    def place(self, mode: Mode) -> tuple[float, bool]:
        """Put q at the mode, narrower where draws say so; the loss there, and whether the mode is to be trusted."""
        gamma = self.target.temperature or 1.0
        scale = self.q.kept_precision(mode.root)  # of a mean field 1/√diag H
        best, here = math.inf, self.q.snapshot()
        for factor in _SHRINK:
            if self.over() or not self._initialized(mode.theta, factor * scale):  # no numbers of this dtype
                break
            loss = self.sampled_loss(_FEWEST, failing=0.0)
            if factor == 1.0 and mode.found and loss <= self._promised(mode) + gamma * self.allowance:
                return loss, True
            if loss > best:  # a rise: the one before was the best
                break
            best, here = loss, self.q.snapshot()
        self.q.restore(here)
        return best, False

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

    @property
    def _unit(self) -> float:
        """Of losses in nats."""
        return self.target.temperature or 1.0

    @property
    def allowance(self) -> float:
        """Nats by which a start may miss what it promised."""
        return max(_TRUST[0], _TRUST[1] * self.q.dim)

    def sampled_loss(self, draws: int, **options: float) -> float:
        """L at q from whitened draws, the same for every q; infinite where it is not finite.  The best is kept."""
        loss = sampled_loss(self.q, self.target, draws, self.seed + 2, **options)
        if draws >= _FEWEST and loss < self._kept:
            self._kept = loss
            self.keep(self.q.snapshot())
        return loss


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


def _best_scale(starts: Starts) -> tuple[Coordinates, float]:
    """Where q has the best loss of some scales, as it was and narrower, and the loss; q is as it was."""
    q, best = starts.q, math.inf
    first = here = q.snapshot()
    for factor in _SHRINK:
        if starts.over() or not starts.scaled(first, factor):
            break
        loss = sampled_loss(q, starts.target, _GLANCE, starts.seed + 2)
        if math.isfinite(best) and not loss < best:
            break
        if loss < best:
            here, best = q.snapshot(), loss
    q.restore(first)
    return here, best
