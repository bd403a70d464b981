"""Where a Gaussian goes by draws of a log joint: over one fixed set after another, or over a pool of all of them.

Where the largest average is still too noisy, in many dimensions, its minimum is averaged with those of other sets of as
many draws.  A step over a set that is new leads near its minimum, and q goes a share 1/(k + 1) of the way at the k-th.
It is then about the mean of k + 1 minima, with a noise² as many times smaller, for one evaluation a set (Polyak and
Juditsky 1992).  The norm before a step tells how good q is, since a set that q has not seen has

    E norm² = |∇L|² + noise²

where at the mean of k minima |∇L|² is noise²/k, and so norm² / (1 + 1/k) is noise² as the sets themselves tell it.

Draws at which the log joint fails or is NaN where the minimisation begins give way to others, with their mirror images:
one in twenty at most.  The set is then the same to the end, and a step to where others fail is a rejected one.
"""

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.derivatives import energy_and_gradient
from torchngvi.diagnostics.linear_response import PAIRS, Residuals, flatness
from torchngvi.expectations import PerFactor
from torchngvi.expectations.draws import Fixed, Seen
from torchngvi.expectations.sampled import SampleAverage
from torchngvi.fitting.checkpoints import copied
from torchngvi.fitting.loop import Ending, Engine
from torchngvi.fitting.records import Record
from torchngvi.fitting.starts import EngineSettings
from torchngvi.fitting.stopping import Standing
from torchngvi.interfaces import Coordinates, Estimator, Target
from torchngvi.methods import VN
from torchngvi.models.factors import FAILING, Guarded, guarded_factors
from torchngvi.numerics.linalg import anderson, eigh, positive_columns, reverse_cholesky, triangular_inverse
from torchngvi.posteriors import clique_marginals
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.precision import forest_of

_DESCENT = (
    *("draws", "left_out", "sets", "set_noises", "open"),
    *("evaluations", "rejections", "step_taken", "stalled", "first"),
)
_POOL = (
    *("runs", "trusted", "patient", "done", "failed", "diagonal", "far", "leaping", "moved", "drawn"),
    *("evaluated", "narrow", "left_out", "retreats", "radius", "hoped", "number"),
)


class Point(NamedTuple):
    """The norm of the gradient, its noise and the loss of q on a set of draws."""

    norm2: Tensor  # (*batch,)
    noise2: Tensor  # (*batch,)
    loss: Tensor  # (*batch,)

    @property
    def total(self) -> float:
        """The root of norm² + noise²; about half its square, in nats, is lost."""
        return float((self.norm2 + self.noise2).max()) ** 0.5

    @property
    def finite(self) -> bool:
        """Whether loss and norm are finite for every batch member."""
        return bool((self.loss.isfinite() & self.norm2.isfinite()).all())


class SampledObjective:
    """How a log joint is evaluated; one in factors, under a q over their forest, is seen factor by factor."""

    def __init__(self, q: Gaussian, target: Guarded) -> None:
        self.q, self.target, self.factors = q, target, guarded_factors(q, target.target)
        self.pattern = forest_of(q) if self.factors is None else None
        self.residuals: Residuals | None = None  # some of those that were seen last, of the whole

    def most(self, most: int, numbers: int = 20_000_000, fewest: int = 32) -> int:
        """Return the most draws of one average: those of all cliques have so many numbers at most, for the memory."""
        if self.factors is None:
            return most
        each = sum(kind.nodes * (kind.size + kind.above) for kind in self.factors.structure.kinds)
        return max(min(most, 2 * (numbers // (2 * each))), 2 * self.q.structure.widest + 2, fewest)

    @property
    def members(self) -> int:
        """Draws that belong together: a pair has a draw of each clique, and is left out where one of them fails."""
        return 1 if self.factors is None else max(kind.nodes for kind in self.factors.structure.kinds)

    def fixed(self, draws: int, seed: int, left_out: tuple[int, ...]) -> Fixed:
        """Return fixed draws; each clique has its own, or of those of the whole they are whitened in each clique."""
        return Fixed(draws, seed, left_out, apart=self.factors is not None, pattern=self.pattern)

    def estimator(self, fixed: Fixed) -> Estimator:
        """Return the average over draws."""

        def saw(seen: Seen) -> None:
            if self.factors is None and not self.q.batch_shape:
                self.keep(seen.z, seen.pulled)

        average = SampleAverage(fixed, saw)
        return average if self.factors is None else PerFactor(average)

    def keep(self, z: Tensor, pulled: Tensor) -> None:
        """Keep what was seen at some pairs of draws, both (S, D), for `growth`."""
        if self.target.temperature:
            z, pulled = (torch.cat([half[:PAIRS] for half in part.chunk(2)]) for part in (z, pulled))
            self.residuals = Residuals(z, pulled / self.target.temperature - z)

    @property
    def growth(self) -> float:
        """At most how many times half of norm² the distance from the best q is, as far as what was seen last tells."""
        flat = None if self.residuals is None else flatness(self.residuals, self.q.structure)
        return 1.0 if flat is None else flat.growth

    def evaluate(self, do: Callable[[Target], Any]) -> Any:
        """Do it on what is seen, and count it."""
        with self._counted():
            return do(self.target if self.factors is None else self.factors)

    def failing(self, fixed: Fixed) -> Tensor:
        """Find the pairs of mirrored draws at which the log joint, or a factor of it, is NaN or has such a gradient."""
        seen: list[tuple[Gaussian, Target]] = [(self.q, self.target)]
        if self.factors is not None:
            cliques = clique_marginals(self.q)
            seen = [(cliques[kind], term) for kind, term in self.factors.drawn.items()]
        fails = torch.zeros(fixed.num_samples // 2, dtype=torch.bool, device=self.q.device)
        with self._counted():
            for q, target in seen:
                theta = q.push_noise(fixed(q.mean_probe.detach())).detach()
                energy, gradient = energy_and_gradient(target, theta)
                bad = energy.isnan() | (gradient.isnan().any(-1) & energy.isfinite())
                fails |= bad.reshape(2, len(fails), -1).any(-1).any(0)
        return fails

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Calls of the factors, within the budget of the whole, count for it."""
        if self.factors is not None:
            self.factors.allow(self.target)
        try:
            yield
        finally:
            if self.factors is not None:
                self.factors.count_for(self.target)


class Place(NamedTuple):
    """What a descent goes back to from another place."""

    coordinates: Coordinates
    optimizer: VN | None
    draws: int
    point: Point
    residuals: Residuals | None  # seen last there


class Descent:
    """VN with a memory of the curvature that outlives the draws."""

    most = 16_384  # draws of one sample average
    spread = 96  # draws a coordinate of all sets whose minima are averaged, after the first

    def __init__(self, q: Gaussian, target: Guarded, seed: int, tolerance: float, settings: EngineSettings) -> None:
        self.settings = settings
        self.q, self.target, self.seed, self.tolerance = q, target, seed, tolerance
        self.draws = self.evaluations = self.rejections = 0
        self.open = False  # the minimisation over the present draws has begun and has not ended
        self.sets = 0  # of so many draws that q has seen one step over, where the minima of several are averaged
        self.set_noises: list[Tensor] = []  # noise² of an average, by each of the sets
        self.left_out: tuple[int, ...] = ()  # pairs of the present average
        self.optimizer: VN | None = None
        self.objective = SampledObjective(q, target)
        self.most = self.objective.most(self.most)
        self.forget_average()

    def forget_average(self) -> None:
        """Begin to count for another average."""
        self.step_taken, self.stalled, self.first = 0.0, 0, self.evaluations

    def begin(self) -> None:
        """Begin with the present draws, where q is."""
        self.forget_average()
        self.left_out = ()
        self._renew()
        self.open = True

    def _fixed(self, left_out: tuple[int, ...]) -> Fixed:
        return self.objective.fixed(self.draws, self.seed + self.draws + 10_007 * self.sets, left_out)

    def _renew(self) -> VN:
        """Give the optimizer the present draws; a new start has a new one."""
        estimator = self.objective.estimator(self._fixed(self.left_out))
        if self.optimizer is None:
            self.optimizer = VN(self.q, estimator=estimator)
        else:
            self.optimizer.resample(estimator)
        return self.optimizer

    def evaluate(self) -> Point:
        """Evaluate q on the present draws."""
        first = self.evaluations == self.first
        point = self._evaluated()
        if first and not point.finite and self._replace_failing():
            self._renew()
            point = self._evaluated()
        return point

    def _replace_failing(self, rounds: int = 6) -> bool:
        """Leave out the pairs of draws at which the log joint fails, in rounds, as whitening moves the others."""
        most, left_out = max(1, int(FAILING * self.draws / 2 * self.objective.members)), self.left_out
        for _ in range(rounds):
            fixed = self._fixed(left_out)
            pairs = self.objective.failing(fixed).nonzero()[:, 0].tolist()
            if not pairs:
                self.left_out = left_out
                return bool(left_out)
            numbers = fixed.pairs()
            left_out = (*left_out, *(numbers[pair] for pair in pairs))
            if len(left_out) > most:
                break
        return False

    def _evaluated(self) -> Point:
        assert self.optimizer is not None
        gamma = self.target.temperature or 1.0
        status = self._count(self.optimizer.evaluate)
        noise2 = torch.zeros_like(status.norm2) if status.noise2 is None else status.noise2  # of exact factors alone
        norm2, noise2 = status.norm2 / gamma**2, noise2 / gamma**2
        if self.sets:  # all that is left is noise; its error as if of D numbers
            self.set_noises = [*self.set_noises[: self.sets - 1], norm2 / (1 + 1 / self.sets)]
            share = torch.minimum(noise2, torch.stack(self.set_noises).mean(0)) / self.sets
            left = torch.maximum(norm2 - noise2, share) + noise2 * math.sqrt(2 / self.q.dim)
            self.point = Point(torch.zeros_like(left), left, status.loss)
        else:
            # S numbers a coordinate have to pay for 1 + (D + 1)/2 parameters a coordinate
            parameters = 1 + self.q.structure.parameters / self.q.dim
            overfit = self.draws / max(self.draws - parameters, 0.25 * self.draws)
            self.point = Point(norm2, noise2 * overfit, status.loss)
        return self.point

    def _count(self, do: Callable[[Target], Any]) -> Any:
        """Do it on the target, and count what it takes."""
        assert self.optimizer is not None
        before = self.optimizer.evaluations
        result = self.objective.evaluate(do)
        self.evaluations += self.optimizer.evaluations - before
        return result

    @property
    def seen(self) -> int:
        """Draws, in all sets."""
        return max(self.sets, 1) * self.draws

    @property
    def _solved(self) -> Tensor:
        """norm² at which q is nearer to the minimum of the average than the draws tell."""
        return 0.5 * self.point.noise2

    def averages_sets(self, tame: float = 0.02) -> bool:
        """Begin to average the minima of several sets, where q is at one, and noise² a coordinate small."""
        solved = bool((self.point.norm2 <= self._solved).all())
        small = float(self.point.noise2.max()) <= max(1.0, tame * self.q.dim)
        if self.sets or not (solved and small) or self.draws > self.spread * self.q.dim:
            return False
        self.sets = 1
        return True

    def _next_set(self) -> bool:
        """A share of a step over a set that q had not seen; False after the last."""
        if self.point.total <= self.tolerance:
            return False
        assert self.optimizer is not None
        here, share = self.q.snapshot(), 1 / (self.sets + 1)
        self._count(self.optimizer.step_untried)
        there = self.q.snapshot()
        self.q.restore(Coordinates(*(torch.lerp(old, new, share) for old, new in zip(here, there, strict=True))))
        if (self.sets + 1) * self.draws > self.spread * self.q.dim:
            self.point = self.point._replace(noise2=(1 - share) * self.point.noise2)
            return False
        self.sets += 1
        self.left_out, self.first = (), self.evaluations
        self._renew()
        return True

    def step(self) -> bool:
        """A step from where q was evaluated; False where the minimisation over these draws has ended instead."""
        self.open = self._stepped()
        return self.open

    def _stepped(self, few: int = 30, long: int = 4000, least: float = 0.05, rejected: int = 3) -> bool:
        """A step, unless norm² is small enough, or nothing more is to be had on these draws in so many evaluations."""
        assert self.optimizer is not None
        if self.sets:
            return self._next_set()
        point = self.point
        solved = torch.clamp_min(self._solved, 0.05 * self.tolerance**2)
        spare = self.tolerance**2 - point.noise2  # these draws may do, once norm² is no more
        enough = spare if self.draws > self.settings.dear else torch.minimum(solved, spare)
        done = point.norm2 <= torch.where(spare > least * self.tolerance**2, enough, solved)
        spent = self.evaluations - self.first >= max(few, long // self.draws)
        if bool(done.all()) or self.stalled >= rejected or spent:
            return False
        self._count(self.optimizer.step)
        assert self.optimizer.last is not None
        self.step_taken = float(self.optimizer.last.rho.min())
        back = ~self.optimizer.last.accepted
        self.rejections += int(back.sum())
        self.stalled = self.stalled + 1 if bool((back | done).all()) else 0
        return True

    def more_draws(self, most: int = 6) -> int:
        """The number of draws that brings noise² to half of tolerance², at most so many times as many."""
        wanted = float(self.point.noise2.max()) / (0.5 * self.tolerance**2)
        factor = min(max(wanted, 2), most) if math.isfinite(wanted) else 2
        return min(2 * math.ceil(0.5 * factor * self.draws), self.most)

    def standing(self, aside: bool) -> Standing:
        """What a run says of the last evaluation; ``aside`` where it is a trial at another place."""
        point, gradients = self.point, self.target.gradients
        loss = float(point.loss.sum())
        record = Record(self.evaluations, loss, point.total, self.step_taken, self.rejections, gradients, 0.0)
        return Standing(
            record,
            torch.full(self.q.batch_shape, False, device="cpu"),
            point.loss,
            (self.evaluations, gradients),
            tolerance=self.tolerance,
            settled=record.norm <= self.tolerance,
            aside=aside,
            values=self.target.values,
        )

    def ended(self, reason: str) -> Ending:
        """Return the outcome at the last point of a run that has not converged, with who is within the tolerance."""
        point = self.point
        within = (point.norm2 + point.noise2).sqrt() <= self.tolerance
        return Ending(False, reason, float(point.loss.sum()), point.total, within)

    # -------------------------------------------------------------------------------- places

    def place(self) -> Place:
        """What is needed to come back here, between two sets of draws."""
        return Place(self.q.snapshot(), self.optimizer, self.draws, self.point, self.objective.residuals)

    def leave(self, draws: int) -> None:
        """Begin from another start with so many draws; nothing is known of the curvature there."""
        self.optimizer, self.draws, self.open, self.sets = None, draws, False, 0

    def come_back(self, place: Place) -> None:
        """Go back to a place, with the optimizer and the draws that it had."""
        self.q.restore(place.coordinates)
        self.optimizer, self.draws, self.point, self.objective.residuals = place[1:]
        self.open = False

    # -------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what the descent remembers between two evaluations."""
        optimizer = None if self.optimizer is None else self.optimizer.state_dict()
        return {**{name: getattr(self, name) for name in _DESCENT}, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave, after q has been loaded."""
        for name in _DESCENT:
            setattr(self, name, state[name])
        self.optimizer = None
        if state["optimizer"] is not None:
            self._renew().load_state_dict(copied(state["optimizer"]))


# ------------------------------------------------------------------------------------ a pool of all draws
# A fit by a pool of draws: the regression over draws of many Gaussians, its minimisation, and the loop that draws.
#
# Draws θ_s that were made from q_1 .. q_K, n_k of each, stand for draws of another q with the weights of a mixture
# (Veach and Guibas 1995; adaptive multiple importance sampling, Cornuet et al. 2012),
#
#     w_s ∝ q(θ_s) / Σ_k n_k q_k(θ_s),        z_s = C⁻¹(θ_s - m),        r_s = Cᵀ∇ℓ(θ_s)/γ - z_s,
#
# and by Stein's identity the mean part a and the precision part P = W - I of the natural gradient are the
# coefficients of r on (1, z), here of the weighted regression with P symmetric.  It is exact for a quadratic ℓ,
# whatever the draws.  With G the weighted scatter of z,
#
#     G P + P G = Σ_s w_s (z_s r_sᵀ + r_s z_sᵀ)        about the weighted means,        a = mean r - P mean z.
#
# The standard error of (a, P) is that of the weighted residuals by antithetic pairs, with the degrees of freedom
# taken off.  All is seen in the frame of one Gaussian, the base, with q = N(μ, K Kᵀ) there.
#
# In the loop each lot is drawn from q as it is, and judges the step that led there; then L is minimised over the
# pool, which takes no gradient, inside a trust region about q.  Where the loss has risen q goes back, and the draws
# stay of use.  Where two moves in a row point the same way, values of the log joint say how far a third may go on
# along the last: down a long valley, or from where the data are in other units.  A fit whose mode is not trusted
# begins with a mean field, which few draws determine; structures of other kinds go on from there by averages.
#
# Near an optimum the directions of the draws are orthogonal in blocks of D pairs, each with a length of its own, so
# that each draw is exactly N(0, I) and the regression has less noise than by independent ones.


class Normal(NamedTuple):
    """A Gaussian N(m, C Cᵀ)."""

    mean: Tensor  # m, (D,)
    root: Tensor  # C, lower triangular, (D, D), or where it is diagonal its diagonal, (D,)

    @classmethod
    def origin(cls, like: "Normal") -> "Normal":
        """The standard normal distribution, which a Gaussian is in its own frame."""
        return cls(torch.zeros_like(like.mean), torch.ones_like(like.mean))

    @property
    def full(self) -> Tensor:
        """C as a matrix, (D, D)."""
        return torch.diag(self.root) if self.root.dim() == 1 else self.root

    @property
    def diagonal(self) -> Tensor:
        """The diagonal of C, (D,)."""
        return self.root if self.root.dim() == 1 else self.root.diagonal()

    @property
    def log_det(self) -> Tensor:
        """log|det C|, 0-d."""
        return self.diagonal.log().sum()

    def whiten(self, theta: Tensor) -> Tensor:
        """C⁻¹(θ - m), (S, D)."""
        if self.root.dim() == 1:
            return (theta - self.mean) / self.root
        return torch.linalg.solve_triangular(self.root, (theta - self.mean).mT, upper=False).mT

    def push(self, z: Tensor) -> Tensor:
        """m + C z, (S, D)."""
        return self.mean + (z * self.root if self.root.dim() == 1 else z @ self.root.mT)

    def pull(self, gradient: Tensor) -> Tensor:
        """Cᵀ∇ℓ, (S, D)."""
        return gradient * self.root if self.root.dim() == 1 else gradient @ self.root

    def inside(self, other: "Normal") -> "Normal":
        """A Gaussian of the frame of this one, in that of the space."""
        root = self.root * other.root if other.root.dim() == 1 else self.full @ other.root
        return Normal(self.push(other.mean[None])[0], root)

    def seen(self, other: "Normal") -> "Normal":
        """Another Gaussian in the frame of this one."""
        if self.root.dim() == other.root.dim() == 1:
            root = other.root / self.root
        else:
            root = torch.linalg.solve_triangular(self.full, other.full, upper=False)
        return Normal(self.whiten(other.mean[None])[0], root)

    def kl_from_standard(self) -> Tensor:
        """KL(N(m, C Cᵀ) ‖ N(0, I)) in nats, 0-d."""
        return 0.5 * (self.root.square().sum() + self.mean.square().sum() - len(self.mean)) - self.log_det

    @property
    def finite(self) -> bool:
        """Whether it has numbers, and a positive determinant."""
        return bool(self.mean.isfinite().all() & self.root.isfinite().all() & (self.diagonal > 0).all())


class Lot(NamedTuple):
    """The draws of one Gaussian, mirror images next to each other, with what the log joint is there."""

    place: Normal
    theta: Tensor  # (n, D)
    energy: Tensor  # ℓ/γ, (n,)
    gradient: Tensor  # ∇ℓ/γ, (n, D)
    blocks: int = 1  # of as many draws each, within which they are orthogonal

    def log_density(self, theta: Tensor) -> Tensor:
        """log of n q_k at (S, D), without the constant (2π)^(-D/2): (S,)."""
        z = self.place.whiten(theta)
        return math.log(len(self.theta)) - 0.5 * z.square().sum(-1) - self.place.log_det


class Pool:
    """All draws that are of use, with the matrix of log n_k q_k(θ_s), which a new lot adds a row and columns to."""

    def __init__(self, lots: list[Lot] | None = None, terms: Tensor | None = None) -> None:
        self.lots = lots or []
        self.terms = torch.empty(0, 0, device="cpu") if terms is None else terms

    def __len__(self) -> int:
        return sum(len(lot.theta) for lot in self.lots)

    @property
    def number(self) -> Tensor:
        """The lot of each draw, (N,)."""
        sizes = torch.tensor([len(lot.theta) for lot in self.lots], device=self.terms.device)
        return torch.arange(len(self.lots), device=self.terms.device).repeat_interleave(sizes)

    def add(self, lot: Lot) -> None:
        """Add a lot."""
        row = torch.cat([lot.log_density(other.theta) for other in [*self.lots, lot]])
        if not self.lots:
            self.terms = row[None]
        else:
            columns = torch.stack([other.log_density(lot.theta) for other in self.lots])
            self.terms = torch.cat([torch.cat([self.terms, columns], 1), row[None]])
        self.lots.append(lot)

    def keep(self, chosen: list[bool]) -> None:
        """Forget the other lots."""
        if all(chosen):
            return
        rows = torch.tensor(chosen, device=self.terms.device)
        self.terms = self.terms[rows][:, rows[self.number]]
        self.lots = [lot for lot, one in zip(self.lots, chosen, strict=True) if one]

    def drop(self, fit: "Fit", least: float, most: int) -> None:
        """Forget lots whose share of the weights, a draw, is below so much of the mean, and those beyond the most."""
        shares = fit.weights.new_zeros(len(self.lots)).index_add_(0, self.number, fit.weights)
        sizes = fit.weights.new_tensor([len(lot.theta) for lot in self.lots])
        each = shares / sizes * len(self)
        each[-1] = math.inf  # of q as it was when it drew last
        if len(self.lots) > most:
            least = max(least, float(each.sort(descending=True).values[most - 1]))
        self.keep((each >= least).tolist())


class View:
    """A pool in the frame of a base; with a diagonal P, as of a mean field, or a full one."""

    def __init__(self, pool: Pool, base: Normal, diagonal: bool = False) -> None:
        self.base, self.diagonal = base, diagonal
        theta, self.energy, gradient = (
            torch.cat(parts) for parts in zip(*(lot[1:4] for lot in pool.lots), strict=True)
        )
        self.z, self.pulled = base.whiten(theta), base.pull(gradient)  # in the frame, (N, D), and Cᵀ∇ℓ/γ there
        self.log_mixture = pool.terms.logsumexp(0)  # log Σ_k n_k q_k, (N,)
        self.blocks = [(len(lot.theta) // lot.blocks, lot.blocks) for lot in pool.lots]  # of each lot: size, number

    def __len__(self) -> int:
        return len(self.z)

    def fit(self, at: Normal) -> "Fit":
        """Estimate the natural gradient and L at N(μ, K Kᵀ), given in the frame of the base."""
        return Fit(self, at)


class Fit:
    """What a pool tells at one Gaussian of its frame, by weighted regression; what is dear when it is asked for."""

    def __init__(self, view: View, at: Normal) -> None:
        self.view, self.at, self.z = view, at, at.whiten(view.z)
        log_q = -0.5 * self.z.square().sum(-1) - at.log_det - view.base.log_det
        self.weights = (log_q - view.log_mixture).softmax(0)
        self.effective = 1 / self.weights.square().sum()  # number of draws by these weights

    @cached_property
    def natural(self) -> tuple[Tensor, Tensor]:
        """Both parts of the natural gradient: a, (D,), and P = W - I, (D, D) or its diagonal (D,)."""
        w, mean = self.weights, self.weights @ self.z
        near = self.z - mean
        share = w[:, None] * near
        pull = self.at.pull((w @ self.view.pulled)[None])[0] - mean
        if self.view.diagonal:
            scatter = (share * near).sum(0)
            P = ((share * self.at.pull(self.view.pulled)).sum(0) - scatter) / scatter
            return pull - P * mean, P
        scatter = share.mT @ near
        moment = self.at.pull(share.mT @ self.view.pulled) - scatter
        P = _symmetric_solution(scatter, moment + moment.mT)
        return pull - P @ mean, P

    @cached_property
    def norm2(self) -> Tensor:
        """|a|² + ½‖P‖²_F, 0-d."""
        a, P = self.natural
        return a.square().sum() + 0.5 * P.square().sum()

    @cached_property
    def _turned(self) -> Tensor:
        """P z, (N, D)."""
        P = self.natural[1]
        return self.z * P if self.view.diagonal else self.z @ P

    @cached_property
    def _rest(self) -> Tensor:
        """ℓ less its quadratic part, (N,)."""
        return self.view.energy - self.z @ self.natural[0] - 0.5 * (self.z * (self._turned + self.z)).sum(-1)

    @cached_property
    def loss(self) -> Tensor:
        """L/γ: the mean of the quadratic part is ½ tr W."""
        P, dim = self.natural[1], len(self.at.mean)
        entropy = self.at.log_det + self.view.base.log_det + 0.5 * dim * (1 + math.log(2 * math.pi))
        return self.weights @ self._rest + 0.5 * ((P if P.dim() == 1 else P.diagonal()).sum() + dim) - entropy

    @property
    def error(self) -> Tensor:
        """The standard error of the loss, 0-d."""
        return (self.weights * (self._rest - self.weights @ self._rest)).norm()

    @cached_property
    def _noise(self) -> tuple[Tensor, Tensor]:
        """The square of the standard error of (a, P), and its own standard error."""
        parameters = 2.0 if self.view.diagonal else 1 + 0.5 * (len(self.at.mean) + 1)  # a coordinate
        lost = self.effective / torch.maximum(self.effective - parameters, 0.25 * self.effective)
        e = self.weights[:, None] * (self.at.pull(self.view.pulled) - self.z - self.natural[0] - self._turned)
        parts, each = self._parts(e)
        return lost * each * parts.sum(), lost * each * parts.norm()

    @property
    def noise2(self) -> Tensor:
        """The square of the standard error of (a, P), 0-d."""
        return self._noise[0]

    @property
    def doubt(self) -> Tensor:
        """The standard error of noise², 0-d."""
        return self._noise[1]

    @property
    def total(self) -> Tensor:
        """norm² + noise², 0-d."""
        return self.norm2 + self.noise2

    @property
    def bound(self) -> Tensor:
        """The same with a standard error of noise² on top, which few draws and heavy tails underestimate, 0-d."""
        return self.total + self.doubt

    def _parts(self, e: Tensor) -> tuple[Tensor, float]:
        """What pairs of the weighted residuals (N, D), or four blocks or more, add to noise², and a common factor."""
        diagonal, blocks = self.view.diagonal, self.view.blocks
        if diagonal or all(count == 1 for _, count in blocks):
            return _of_pairs(self.z, e, diagonal), 1.0
        parts, shares, at = [], [], 0
        for size, count in blocks:
            eb, zb, wb = (x[at : at + size * count].unflatten(0, (count, size)) for x in (e, self.z, self.weights))
            outer = eb.mT @ zb
            parts.append(eb.sum(1).square().sum(-1) + 0.125 * (outer + outer.mT).square().sum((-2, -1)))
            shares.append(wb.sum(1))
            at += size * count
        number = float(1 / torch.cat(shares).square().sum())
        return (torch.cat(parts), number / (number - 1)) if number >= 4 else (_of_pairs(self.z, e), 1.0)


def _eye(like: Tensor) -> Tensor:
    """The identity of the size of a matrix."""
    return torch.eye(len(like), dtype=like.dtype, device=like.device)


def _symmetric_solution(G: Tensor, B: Tensor) -> Tensor:
    """The symmetric X with G X + X G = B; along what no draw has seen it is nought, and NaN where G is not finite."""
    values, basis, ok = eigh(G)
    basis = torch.where(ok, basis, torch.nan)
    sums = values + values[:, None]
    seen = sums > 1e3 * torch.finfo(G.dtype).eps * values[-1]
    return basis @ torch.where(seen, (basis.mT @ B @ basis) / torch.where(seen, sums, 1.0), 0.0) @ basis.mT


def _of_pairs(
    z: Tensor,  # (N, D), mirror images next to each other
    e: Tensor,  # weighted residuals, (N, D)
    diagonal: bool = False,
) -> Tensor:
    """|Σ e|² + ½‖Σ ½(e zᵀ + z eᵀ)‖²_F of each pair, or of the diagonals of these matrices, (N/2,)."""
    e, z = e.unflatten(0, (-1, 2)), z.unflatten(0, (-1, 2))
    first = e.sum(1).square().sum(-1)
    if diagonal:
        return first + 0.5 * (e * z).sum(1).square().sum(-1)
    ee, zz, ez = e @ e.mT, z @ z.mT, e @ z.mT  # (pairs, 2, 2)
    return first + 0.25 * (ee * zz + ez * ez.mT).sum((-2, -1))


def natural_step(fit: Fit) -> tuple[Tensor, Tensor]:
    """Natural coordinates (Λ, Λμ) of the Gaussian of a fit, in a row, and the natural-gradient step from there."""
    (mean, root), (a, P) = fit.at, fit.natural
    if fit.view.diagonal:
        precision, change = root.pow(-2), P / root.square()
        shift, shift_change = precision * mean, change * mean - a / root
    else:
        inverse = triangular_inverse(fit.at.full)
        precision, change = inverse.mT @ inverse, inverse.mT @ P @ inverse
        shift, shift_change = precision @ mean, change @ mean - inverse.mT @ a
    return torch.cat([precision.flatten(), shift]), torch.cat([change.flatten(), shift_change])


def from_natural(x: Tensor, dim: int, diagonal: bool) -> Normal | None:
    """The Gaussian of such a row, with a lower triangular root; None outside of the cone."""
    precision, shift = x[:-dim], x[-dim:]
    if diagonal:
        found = Normal(shift / precision, precision.rsqrt())
    else:
        precision = precision.reshape(dim, dim)
        upper, ok = reverse_cholesky(0.5 * (precision + precision.mT))  # K⁻ᵀ
        if not bool(ok):
            return None
        root = torch.linalg.solve_triangular(upper, _eye(upper), upper=True).mT.contiguous()
        found = Normal(root @ (root.mT @ shift), root)
    return found if found.finite else None


def minimise(view: View, start: Fit, radius: float, settings: EngineSettings) -> Fit:
    """Minimise L over a pool inside KL(q ‖ base) ≤ radius, by Anderson's acceleration of natural-gradient steps."""
    best, memory = start, settings.steps // 2
    if float(best.norm2) > max(settings.far * float(best.noise2), 1.0):
        best = _plain(view, best, radius, settings)
    least = settings.kept * float(best.effective)
    xs, fs = list[Tensor](), list[Tensor]()
    for _ in range(settings.steps):
        if float(best.norm2) <= settings.solved * float(best.noise2):
            break
        x, f = natural_step(best)
        xs, fs = [*xs[-memory:], x], [*fs[-memory:], f]
        better = _along(view, best, x, anderson(xs, fs) - x, radius, least, settings) if len(xs) > 1 else None
        if better is None:
            xs, fs = [x], [f]
            better = _along(view, best, x, f, radius, least, settings)
        if better is None:
            break
        best = better
    return best


def _along(
    view: View, here: Fit, x: Tensor, step: Tensor, radius: float, least: float, settings: EngineSettings
) -> Fit | None:
    """The first of some lengths of a step in natural coordinates that leads down; None where none does."""
    steep = float(here.norm2) > 2 * float(here.noise2)
    for length in settings.lengths:
        at = from_natural(x + length * step, len(here.at.mean), view.diagonal)
        if at is not None and float(at.kl_from_standard()) <= radius:
            there = view.fit(at)
            nearer = float(there.norm2) < float(here.norm2) or (steep and float(there.loss) < float(here.loss))
            if nearer and float(there.effective) >= least:
                return there
    return None


def _plain(view: View, here: Fit, radius: float, settings: EngineSettings) -> Fit:
    """A Newton step with the eigenvalues of W held within bounds, as long as the trust region allows."""
    a, P = here.natural
    if view.diagonal:
        values, root, ok = P + 1, here.at.root, P.isfinite().all()
    else:
        values, basis, ok = eigh(P + _eye(P))
        root, a = here.at.full @ basis, basis.mT @ a
    if not bool(ok):
        return here
    values = values.clamp(*settings.stretch)
    way = -(root * (a / values) if view.diagonal else root @ (a / values))
    scales, logs, length = root.square() if view.diagonal else root.square().sum(0), values.log(), 1.0
    while length > torch.finfo(values.dtype).eps:
        mean = here.at.mean + length * way
        # the covariance is stretched along the way
        kl = 0.5 * ((scales * (-length * logs).exp()).sum() + mean.square().sum() - len(mean) + length * logs.sum())
        if float(kl - here.at.log_det) <= radius:
            stretched = root * values.pow(-0.5 * length)
            at = Normal(mean, stretched if view.diagonal else lower_root(stretched))
            if at.finite:
                return view.fit(at)
        length *= 0.7
    return here


def lower_root(root: Tensor) -> Tensor:
    """The lower triangular C with a positive diagonal and C Cᵀ = R Rᵀ, without the product."""
    return positive_columns(torch.linalg.qr(root.mT, mode="r")[1].mT)[0].contiguous()


def displacement(base: Normal, place: Normal) -> Tensor:
    """C⁻¹ times the way of the mean, and √2 log of the root, (D + D²,) or (2D,): half its square is about the KL."""
    seen = base.seen(place)
    if seen.root.dim() == 1:
        return torch.cat([seen.mean, math.sqrt(2) * seen.root.log()])
    basis, scale, _ = torch.linalg.svd(seen.root)
    return torch.cat([seen.mean, math.sqrt(2) * ((basis * scale.log()) @ basis.mT).flatten()])


def displaced(base: Normal, way: Tensor) -> Normal:
    """The Gaussian to which a `displacement` leads."""
    dim = len(base.mean)
    mean, root = way[:dim], way[dim:] / math.sqrt(2)
    if len(root) == dim:
        return base.inside(Normal(mean, root.exp()))
    root = root.reshape(dim, dim)
    return base.inside(Normal(mean, lower_root(torch.linalg.matrix_exp(0.5 * (root + root.mT)))))


# The loop


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
            if rose or self.hoped <= 0 or gain < 0.1 * self.hoped:
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
        """How many draws the noise asks for after a move; few along a valley, where many in one place would hold q."""
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
        state = {name: getattr(self, name) for name in (*_POOL, "before", "trail")}
        place = self.place if self.number else None
        return {**state, "place": place, "lots": list(self.pool.lots), "terms": self.pool.terms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        state = copied(state)
        for name in _POOL:
            setattr(self, name, state[name])
        if state["place"] is not None:
            self.place = Normal(*state["place"])
        self.before = None if state["before"] is None else Normal(*state["before"])
        self.trail = [Normal(*place) for place in state["trail"]]
        self.pool = Pool([Lot(Normal(*lot[0]), *lot[1:]) for lot in state["lots"]], state["terms"])
        self._seen = None


def antithetic(place: Normal, number: int, seed: int, near: bool) -> tuple[Tensor, int]:
    """Draw standard normal pairs, (n, D), and say of how many blocks with orthogonal directions; 1 if independent."""
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
    """Find the best of Gaussians ever farther along a way by so many values each; None where none is better."""
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
