"""Sweeps over a pool of draws: after the first sample average every gradient so far is used at each step.

A sweep draws from q as it is, adds what it sees to the pool, and minimises over the whole pool, which takes no
gradient.  With the draws of all sweeps together noise² falls as over one sample average of as many, and each is paid
for once, where an average over more draws pays for all of them at each evaluation.

A step is taken back where the draws that follow it, with all others, say that the objective has risen; q may not go
where the pool has too few effective draws to tell; and where this does not lead to the tolerance, averages over more
draws go on from the last q that was confirmed.  A pool with as many draws as the largest average is no end by itself:
unless q was near before its last step, draws of one sweep more have to confirm it.
"""

import math
import warnings
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from torchngvi.derivatives import energy_and_gradient
from torchngvi.errors import RejectedStepWarning
from torchngvi.expectations.draws import Seen
from torchngvi.fitting.checkpoints import copied
from torchngvi.fitting.descent import Descent, Point
from torchngvi.fitting.engine import Engine, Standing
from torchngvi.interfaces import Coordinates, Cost, Estimator, Expectation, Framed, Posterior, Target
from torchngvi.methods import VN
from torchngvi.numerics.linalg import eigh
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.stepsizes import Constant

# Every gradient used again: a regression over the draws of many Gaussians, weighted by how likely q is to make them
#
# Draws θ_s that were made from q_1 .. q_K, n_k of each, stand for draws of another q with the weights of a mixture
# (Veach and Guibas 1995; adaptive multiple importance sampling, Cornuet et al. 2012),
#
#     w_s ∝ q(θ_s) / Σ_k n_k q_k(θ_s),        z_s = C⁻¹(θ_s - m),        r_s = Cᵀ∇ℓ(θ_s) - γ z_s,
#
# and by Stein's identity a and P = W - γI are the coefficients of r on (1, z), here of the weighted regression with P
# symmetric.  It is exact for a quadratic ℓ, whatever the draws.  With G the weighted scatter of z,
#
#     G P + P G = Σ_s w_s (z_s r_sᵀ + r_s z_sᵀ)        about the weighted means,        a = mean r - P mean z.
#
# The standard error is that of the weighted residuals, by antithetic pairs, with the degrees of freedom taken off.


class Lot(NamedTuple):
    """The draws of one Gaussian, the second half of which mirrors the first, with what the log joint is there."""

    mean: Tensor  # m_k, (D,)
    whitener: Tensor  # C_k⁻ᵀ, (D, D)
    log_det: Tensor  # log|det C_k|, 0-d
    theta: Tensor  # (n, D)
    energy: Tensor  # ℓ, (n,)
    gradient: Tensor  # ∇ℓ, (n, D)

    @classmethod
    def of(cls, q: Gaussian, theta: Tensor, energy: Tensor, gradient: Tensor) -> "Lot":
        """The draws of q as it is, in antithetic pairs."""
        mean = q.frame().mean
        whitener = q.whiten(torch.eye(q.dim, dtype=mean.dtype, device=mean.device))
        return cls(mean.clone(), whitener, q.log_det_root().clone(), theta, energy, gradient)

    @property
    def finite(self) -> bool:
        """Whether the log joint and its gradient are finite at all draws."""
        return bool(self.energy.isfinite().all() & self.gradient.isfinite().all())

    def log_density(self, theta: Tensor) -> Tensor:
        """n q_k at (S, D), without the constant (2π)^(-D/2): (S,)."""
        z = (theta - self.mean) @ self.whitener
        return torch.log(torch.full_like(self.log_det, len(self.theta))) - 0.5 * z.square().sum(-1) - self.log_det


class Pool:
    """All draws so far.

    Attributes:
        lots: one a Gaussian.
    """

    def __init__(self, lots: list[Lot]) -> None:
        self.lots = lots
        self.theta, self.energy, self.gradient = (
            torch.cat([_by_pairs(getattr(lot, name)) for lot in lots]) for name in ("theta", "energy", "gradient")
        )
        self.log_mixture = torch.stack([lot.log_density(self.theta) for lot in lots]).logsumexp(0)

    def __len__(self) -> int:
        return len(self.theta)


def _by_pairs(x: Tensor) -> Tensor:
    """Mirror images beside each other."""
    return torch.stack(x.chunk(2), 1).flatten(0, 1)


class _Regression(NamedTuple):
    """What the draws of a pool tell at one q."""

    coordinates: Coordinates  # of q
    effective: Tensor  # number of draws, 0-d
    expectation: Expectation


@final
class PooledAverage(Estimator):
    """a, W and noise² at q by the weighted regression over a pool, without a new gradient."""

    comparable = True
    unbiased = False
    needs = Target

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._seen: list[_Regression] = []

    def effective(self, q: Gaussian, target: Target) -> Tensor:
        """The effective number of draws at q, 0-d."""
        return self._at(q, target).effective

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ], a, W and noise² at q."""
        assert isinstance(q, Gaussian)
        return self._at(q, target).expectation

    def _at(self, q: Gaussian, target: Target) -> "_Regression":
        """The regression at q, which was made already where q is one of the last two."""
        here = q.snapshot()
        for seen in self._seen:
            if all(map(torch.equal, seen.coordinates, here)):
                return seen
        self._seen = [*self._seen[-1:], _Regression(here, *self._regression(q, target))]
        return self._seen[-1]

    def _regression(self, q: Gaussian, target: Target) -> tuple[Tensor, Expectation]:
        """The effective number of draws, and the estimate."""
        pool, gamma = self.pool, target.temperature
        z = q.whiten(pool.theta - q.frame().mean)
        w = (-0.5 * z.square().sum(-1) - pool.log_mixture).softmax(0)
        r = q.frame().pull(pool.gradient) - gamma * z
        mean_z, mean_r = w @ z, w @ r
        near, share = z - mean_z, w[:, None] * (z - mean_z)
        moment = share.mT @ (r - mean_r)
        P = _symmetric_solution(share.mT @ near, moment + moment.mT)
        a = mean_r - P @ mean_z
        eye = torch.eye(q.dim, dtype=P.dtype, device=P.device)
        # ℓ less its quadratic part, whose mean is ½ tr W
        W = P + gamma * eye
        value = w @ (pool.energy - z @ a - 0.5 * (z @ W * z).sum(-1)) + 0.5 * W.diagonal().sum()
        effective = 1 / w.square().sum()
        parameters = 1 + 0.5 * (q.dim + 1)  # a coordinate
        lost = effective / torch.maximum(effective - parameters, 0.25 * effective)
        noise2 = lost * _noise2(z, w[:, None] * (r - a - z @ P))
        packet = Framed(a, q.structure.from_dense(W))
        return effective, Expectation(value, packet, gamma, target.comparable, Cost(0, 0), noise2)


def _symmetric_solution(G: Tensor, B: Tensor) -> Tensor:
    """The symmetric X with G X + X G = B; along what no draw has seen it is nought, and NaN where G is not finite."""
    values, basis, ok = eigh(G)
    basis = torch.where(ok, basis, torch.nan)
    sums = values + values[:, None]
    seen = sums > 1e3 * torch.finfo(G.dtype).eps * values[-1]
    return basis @ torch.where(seen, (basis.mT @ B @ basis) / torch.where(seen, sums, 1.0), 0.0) @ basis.mT


def _noise2(
    z: Tensor,  # (S, D), mirror images beside each other
    e: Tensor,  # weighted residuals, (S, D)
) -> Tensor:
    """Σ over pairs of |Σ e|² + ½‖Σ ½(e zᵀ + z eᵀ)‖²_F, 0-d."""
    e, z = e.unflatten(0, (-1, 2)), z.unflatten(0, (-1, 2))
    ee, zz, ez = e @ e.mT, z @ z.mT, e @ z.mT  # (pairs, 2, 2)
    return e.sum(1).square().sum() + 0.25 * ((ee * zz).sum() + (ez * ez.mT).sum())


_ENTRY = 2.0  # norm² + noise² below which there are sweeps; at twice as much they are given up
_NEAR = 0.3  # norm² + noise² below which the last step needs no draws of its own
_WIDEST = 150  # dimensions: a sweep takes some D² numbers a draw
_KEPT = 0.5  # share of the effective draws that has to be left where a step leads
_STEPS, _SHORTEST = 30, 0.03  # trials over one pool, and the step size at which they end
_LONGER, _SHORTER, _FALL = 1.6, 0.4, 0.3  # factors of the step size, and share by which norm² has to fall at one of 1
_SOLVED = 0.05  # share of noise² that they leave
_RISE = 0.1  # share of noise² that the objective may rise from one sweep to the next
_FAILURES = 2  # steps taken back, after which the pool is given up
_CREEPING = 8  # sweeps in a row of the fewest draws, after which one adds _SHARE of the pool, or it is given up
_LEAPS = 2  # such sweeps near the optimum, after which it is given up there too
_SHARE = 0.5  # of the pool that a sweep adds, unless one more as large as the pool is the last
_AIM = 0.8  # share of tolerance² that noise² is to have at the end
_FEW = 1024  # draws of the averages whose last evaluations are kept for a pool
_DEAR = 1024  # draws before which other starts are looked at
_GROWTH = 6  # to the average that follows where a pool is given up
_STRIDE = 1_000_003  # between the seeds of two sweeps


class Sweeps:
    """The pool of a descent, and its sweeps.

    Attributes:
        lots: the draws; before the first sweep those of the last evaluations of the sample average.
        open: sweeps have begun and have not ended.
        lost: they were given up.
    """

    def __init__(self, descent: Descent) -> None:
        self.descent, self.q, self.target = descent, descent.q, descent.target
        descent.watch = self._saw
        self.leave()

    def leave(self, closed: bool = False) -> None:
        """Forget the draws: q is elsewhere, and there are to be no sweeps where that is closed."""
        self.lots: list[Lot] = []
        self.open, self.closed, self.lost = False, closed, False
        self.failures = self.number = self.creeping = self.leaps = 0
        self.before: Coordinates | None = None  # where the last step began

    @property
    def _served(self) -> bool:
        """Whether q is one Gaussian with a full covariance that is not too wide, on data that are all at hand."""
        structure, dim = self.q.structure, self.q.dim
        return not self.q.batch_shape and structure.widest == dim <= _WIDEST and not self.target.in_passes

    def _saw(self, seen: Seen) -> None:
        """Keep what the last two evaluations of an average have seen."""
        if not (self.open or self.closed) and self._served and len(seen.z) <= _FEW:
            self.lots = [*self.lots[-1:], Lot.of(self.q, seen.theta, seen.energy, seen.gradient)]

    def wanted(self) -> bool:
        """Whether q is near its optimum, and not at it, so that a pool can serve; or sweeps have begun."""
        if self.open or self.closed or not self._served:
            return self.open
        return self.descent.tolerance < self.descent.point.total <= _ENTRY**0.5

    def run(
        self,
        engine: Engine,
        better_start: Callable[[], Generator[Standing, None, bool]],
    ) -> Generator[Standing, None, bool]:
        """Sweep after sweep; before they are dear a look at other starts."""
        if not self.open:
            self._begin()
        while self.open:
            draws = sum(len(lot.theta) for lot in self.lots) + self.number
            if draws > _DEAR and (yield from better_start()):
                self.leave()
                return True
            engine.show(f"{draws} draws in a pool")
            engine.mark()
            self.sweep()
            assert engine.marked is not None
            engine.marked = engine.marked._replace(coordinates=engine.here())  # an interrupt keeps what was won
            if self.lost:
                return True
            yield self.descent.standing(aside=False)
        return False

    def _begin(self) -> None:
        """Begin with sweeps from where q is."""
        self.descent.forget_average()
        self.lots = [lot for lot in self.lots if lot.finite]
        self.open, self.number = True, self._next()

    def _next(self) -> int:
        """How many draws to take next: what noise² asks for, within limits."""
        point, fewest = self.descent.point, 2 * self.q.dim + 2
        pooled = sum(len(lot.theta) for lot in self.lots)
        wanted = (float(point.noise2) / (_AIM * self.descent.tolerance**2) - 1) * pooled
        if wanted > pooled:  # more than one sweep, each at a better q
            wanted = max(_SHARE * pooled, 2 * fewest)
        return 2 * math.ceil(0.5 * max(wanted, fewest))

    def sweep(self) -> bool:
        """Draw from q, judge the step that led there, and minimise over the pool; False at the end of all sweeps."""
        descent, q = self.descent, self.q
        self._draw()
        descent.evaluations += 1
        pool = Pool(self.lots)
        average = PooledAverage(pool)
        point = self._point(average)
        if self.before is not None and point.finite and self._rose(average, point):
            self.failures += 1
            q.restore(self.before)
            point = self._point(average)
        if not point.finite or self.failures >= _FAILURES or not point.total**2 <= 2 * _ENTRY:
            self._give_up()
            return False
        confirmed = point.total <= descent.tolerance or point.total**2 < _NEAR
        self.creeping = self.creeping + 1 if self.number <= 2 * q.dim + 2 else 0
        leap = self.creeping >= _CREEPING and point.total > descent.tolerance
        if leap and (not confirmed or self.leaps >= _LEAPS):
            self._give_up()
            return False
        if not confirmed and len(pool) - self.number >= descent.most:  # not even by draws beyond the most
            self._give_up()
            return False
        if point.total > descent.tolerance:
            self.before = q.snapshot()
            point = self._solved(average, point)
        descent.point, descent.draws = point, min(len(pool), descent.most)
        if confirmed and (point.total <= descent.tolerance or len(pool) >= descent.most):
            self._keep_some(pool)
            self.open, self.closed, self.lots, self.before = False, True, [], None
            return False
        self.number, self.leaps = self._next(), self.leaps + leap
        if leap:
            self.number = max(self.number, 2 * math.ceil(0.5 * _SHARE * len(pool)))
        return True

    def _draw(self) -> None:
        """Antithetic draws from q, not whitened: many small sets of whitened draws would keep a bias of their own."""
        q, frame = self.q, self.q.frame()
        generator = torch.Generator().manual_seed(self.descent.seed + _STRIDE * (1 + len(self.lots)))
        half = torch.randn(self.number // 2, q.dim, dtype=torch.float64, generator=generator, device="cpu").to(
            frame.mean
        )
        theta = frame.mean + frame.push(torch.cat([half, -half]))
        self.lots.append(Lot.of(q, theta, *energy_and_gradient(self.target, theta)))

    def _keep_some(self, pool: Pool) -> None:
        """Of the pool, in the frame of q as it is; the pairs mirror each other in the means of those before."""
        theta, gradient = (torch.cat([x[::2], x[1::2]]) for x in (pool.theta, pool.gradient))
        self.descent.sight.keep(self.q.whiten(theta - self.q.frame().mean), self.q.frame().pull(gradient))

    def _point(self, average: PooledAverage) -> Point:
        """Where q stands on the pool."""
        gamma = self.target.temperature or 1.0
        e = average(self.q, self.target)
        norm2, loss = self.q.norm2(self.q.local(e)), e.value - self.target.temperature * self.q.entropy()
        assert e.noise2 is not None
        return Point(norm2 / gamma**2, e.noise2 / gamma**2, loss)

    def _rose(self, average: PooledAverage, point: Point) -> bool:
        """Whether q, by all draws with those that it was not chosen by, is worse than where the last step began."""
        q, here = self.q, self.q.snapshot()
        assert self.before is not None
        q.restore(self.before)
        loss = average(q, self.target).value - self.target.temperature * q.entropy()
        q.restore(here)
        return not bool(point.loss <= loss + _RISE * point.noise2)

    def _solved(self, average: PooledAverage, point: Point) -> Point:
        """Newton's steps on the pool, of such lengths that the norm of the gradient falls, and the point
        they lead to.
        """
        q, gamma = self.q, self.target.temperature or 1.0
        least, rho = _KEPT * average.effective(q, self.target), 1.0
        optimizer = VN(q, lr=1 / gamma, step_size=Constant(), estimator=average)
        for _ in range(_STEPS):
            if rho < _SHORTEST or bool(point.norm2 <= _SOLVED * point.noise2):
                break
            here = q.snapshot()
            optimizer.param_groups[0]["lr"] = rho / gamma
            with warnings.catch_warnings():  # a step that leaves the cone is a trial like others: q stays, ρ is shorter
                warnings.simplefilter("ignore", RejectedStepWarning)
                optimizer.step(self.target)
            there = self._point(average)
            if bool(there.norm2 < (1 - _FALL * rho) * point.norm2) and average.effective(q, self.target) >= least:
                point, self.descent.step_taken, rho = there, rho, min(1.0, _LONGER * rho)
            else:
                q.restore(here)
                rho *= _SHORTER
        return point

    def _give_up(self) -> None:
        """Back to where the last step began, for an average over more draws."""
        if self.before is not None:
            self.q.restore(self.before)
        self.open, self.closed, self.lost, self.lots, self.before = False, True, True, [], None
        self.descent.near = False
        self.descent.draws = min(_GROWTH * self.descent.draws, self.descent.most)

    # -------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what a sweep begins from."""
        return {
            "lots": [tuple(lot) for lot in self.lots],
            "flags": (self.open, self.closed, self.lost),
            "numbers": (self.failures, self.number, self.creeping, self.leaps),
            "before": None if self.before is None else tuple(self.before),
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from a state that `state_dict` gave; None of a file from before there were sweeps."""
        if state is None:
            return
        state = copied(state)
        self.lots = [Lot(*lot) for lot in state["lots"]]
        self.open, self.closed, self.lost = state["flags"]
        numbers = (*state["numbers"], 0, 0)  # of a file from before creeping was counted there are two
        self.failures, self.number, self.creeping, self.leaps = numbers[:4]
        self.before = None if state["before"] is None else Coordinates(*state["before"])
