"""Fit a warped Gaussian: the best Gaussian first, then mean, root and curves together, over fixed draws that grow.

From N(0, I) a warp may bend to nothing; from the best Gaussian, with curves that are the identity, the ELBO can but
rise.  So the engine of a Gaussian, `sample_average`, comes first, and `Bending` goes on from where it ends.
What fresh draws do not bear out is taken back: where the curves gain less than 0.05 nats, or 0.01 nats a coordinate of
fewer than five, q is the Gaussian again.
"""

import math
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchngvi.derivatives import energy_and_gradient
from torchngvi.diagnostics.verdict import BENT
from torchngvi.errors import InputError
from torchngvi.expectations.draws import Fixed
from torchngvi.fitting.fit import Request, tolerance_by_draws
from torchngvi.fitting.loop import Ending, Examined
from torchngvi.fitting.records import Record
from torchngvi.fitting.sample_average import Fresh, SampleAverages, examined, judge, within
from torchngvi.fitting.stopping import Criterion, Standing, Stop
from torchngvi.interfaces import Congruence, Coordinates, Frame, Target
from torchngvi.models.factors import FAILING, Guarded
from torchngvi.models.log_joint import WarpedTarget
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.warps import Warped

_STATE = (
    *("draws", "evaluations", "first", "rejections", "tries", "value", "evaluated", "slope", "step", "noise2"),
    *("here", "trial", "gradient", "direction"),
)


class Bending:
    """L-BFGS in mean, root and curves together, over one set of fixed draws after another.

    From where the Gaussian was fitted, with its root C₀,

        m = m₀ + C₀ a        C = C₀ T(P), T = tril½[P] with e^x for x on the diagonal        φ = R⁻ᵀ f

    where R Rᵀ is the Fisher matrix of φ at the identity, where φ is uncorrelated with m and C.  So |a|² + ½‖P‖² + |f|²
    is the squared Fisher length, plain gradients are natural ones, and L-BFGS begins with the identity.  θ is a
    function of the draws, and ∇ℓ(θ) is all that is asked of the log joint: φ costs no further gradient.
    """

    most = 16_384  # draws of one average
    groups = 16  # of draws, whose gradients tell the noise

    def __init__(self, q: Warped, target: Guarded, seed: int, tolerance: float) -> None:
        assert isinstance(q.base, Gaussian)
        self.q, self.base, self.target, self.seed, self.tolerance = q, q.base, target, seed, tolerance
        self.origin = self.base.snapshot()
        fisher = q.warp.fisher(torch.zeros(q.warp.parameters, dtype=torch.float64, device=q.device))
        self.unwhiten = torch.linalg.inv(torch.linalg.cholesky(fisher)).mT.to(q.dtype)  # R⁻ᵀ
        structure = self.base.structure
        self.sizes = [q.dim, structure.parameters, q.dim * q.warp.parameters]
        self.per_coordinate = 1 + structure.parameters / q.dim + q.warp.parameters
        self.evaluations = self.rejections = self.first = self.tries = 0
        self.value, self.evaluated = math.inf, math.nan  # L/γ at the last accepted point, and at the last trial
        self.slope, self.step, self.noise2 = 0.0, 0.0, math.inf
        self.here = self.trial = self.gradient = self.direction = q.phi.new_zeros(sum(self.sizes))
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.weights: Tensor | None = None  # of the draws, once they were seen
        wanted = max(128, 20 * self.sizes[-1], 8 * self.per_coordinate)  # noise² of the scores of φ is then 1/20
        self.draws = 2 * math.ceil(min(wanted, self.most) / 2)

    # -------------------------------------------------------------------------------- the average

    def _point(self, u: Tensor) -> tuple[Frame, Tensor, Tensor, Tensor]:
        """The frame, φ, log|T| and T at these numbers, differentiable in them."""
        structure, frame = self.base.structure, self.frame
        a, p, f = u.split(self.sizes)
        half = structure.tril_half(structure.unflat(p))
        diagonal = structure.diagonal(half)
        turn = structure.with_diagonal(half, diagonal.exp())
        root = structure.matmul(turn, frame.root) if frame.upper else structure.matmul(frame.root, turn)
        phi = f.unflatten(0, (self.q.dim, -1)) @ self.unwhiten.mT
        return Frame(frame.mean + frame.push(a), root, structure, frame.upper), phi, diagonal.sum(), turn

    def _bent(self, u: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Frame]:
        """θ of draws z (S, D), their log volumes (S,), log|C|, and the frame."""
        frame, phi, log_turn, _ = self._point(u)
        if self.q.inside:
            w, log_slope = self.q.warp.with_log_slope(z @ self.q.turn, phi)
            apart = frame.push(w @ self.q.turn.mT)
            return frame.mean + apart, log_slope.sum(-1), self.log_det + log_turn, frame
        apart, sd = frame.push(z), frame.variance.sqrt()
        w, log_slope = self.q.warp.with_log_slope(apart / sd, phi)
        return frame.mean + sd * w, log_slope.sum(-1), self.log_det + log_turn, frame

    def _objective(self, u: Tensor) -> tuple[float, Tensor]:
        """The negative ELBO over γ and its gradient; the gradient of ℓ stays for `noise`."""
        gamma = self.target.temperature
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            theta, volume, log_det, _ = self._bent(u, self.z)
            energy, force = energy_and_gradient(self.target, theta.detach())
            if self.weights is None:  # the first of these draws
                self.weights = self._weights(energy)
            self.force = torch.where(self.weights[:, None] > 0, force / gamma, 0.0)
            energy = torch.where(self.weights > 0, energy / gamma, 0.0)
            terms = (self.force * theta).sum(-1) - volume
            (gradient,) = torch.autograd.grad((self.weights * terms).sum() - log_det, u)
        entropy = log_det.detach() + 0.5 * self.q.dim * math.log(2 * math.pi * math.e)
        return float((self.weights * (energy - volume.detach())).sum() - entropy), gradient

    def _weights(self, energy: Tensor) -> Tensor:
        """Of the draws, equal; none for pairs at which the log joint fails, if they are few."""
        failing = energy.isnan().reshape(2, -1).any(0).repeat(2)
        kept = ~failing if float(failing.to(energy.dtype).mean()) <= FAILING else torch.ones_like(failing)
        return kept.to(energy) / kept.sum()

    def noise(self, u: Tensor) -> float:
        """The squared standard error of the gradient at the point that was evaluated last, by groups of pairs."""
        assert self.weights is not None
        pairs, gradients = torch.arange(len(self.z), device=self.z.device).reshape(2, -1), []
        for group in pairs.tensor_split(self.groups, dim=1):
            z, force, weights = self.z[group.flatten()], self.force[group.flatten()], self.weights[group.flatten()]
            with torch.enable_grad():
                at = u.detach().requires_grad_()
                theta, volume, _, frame = self._bent(at, z)
                structure, root = frame.structure, frame.root.detach()
                normal = (structure.solve if frame.upper else structure.tsolve)(root, z)
                # C⁻ᵀz has the gradient of log|C| as its mean over whitened draws, exactly, and is no noise
                terms = (force * theta).sum(-1) - volume - (normal * (frame.mean + frame.push(z))).sum(-1)
                (gradient,) = torch.autograd.grad((weights * terms).sum() / weights.sum(), at)
            gradients.append(gradient)
        spread = float(torch.stack(gradients).var(0).sum()) / self.groups
        return spread * self.draws / max(self.draws - self.per_coordinate, 0.25 * self.draws)

    # -------------------------------------------------------------------------------- steps

    def begin(self, draws: int | None = None) -> None:
        """Begin with so many draws, where q is; the memory of the curvature is kept."""
        self.draws = self.draws if draws is None else draws
        self.trial, self.value, self.tries, self.first = self.here, math.inf, 0, self.evaluations
        self._renew()

    def _renew(self) -> None:
        """Draws, and the frame from which all is measured."""
        there = self.base.snapshot()
        self.base.restore(self.origin)
        frame = self.base.frame()
        self.frame = Frame(frame.mean.clone(), frame.root.clone(), frame.structure, frame.upper)
        self.log_det = self.base.structure.log_det(self.frame.root)
        self.base.restore(there)
        self.z = Fixed(self.draws, self.seed + self.draws)(self.base.mean_probe.detach())
        self.weights = None
        self.force = self.z

    def evaluate(self, fall: float = 1e-4, memory: int = 20) -> None:
        """Evaluate the trial, where q is, and accept it where the average has fallen by a share of what it promised."""
        value, gradient = self._objective(self.trial)
        first = self.evaluations == self.first
        self.evaluations += 1
        self.evaluated = value
        enough = self.value + fall * self.step * self.slope + 1e-12 * abs(self.value)
        if not (first or (value <= enough and bool(gradient.isfinite().all()))):
            self.tries += 1
            self.rejections += 1
            return
        if not first:
            change, bend = self.trial - self.here, gradient - self.gradient
            if float(change @ bend) > 1e-10 * float(change.norm() * bend.norm()):
                self.pairs = [*self.pairs, (change, bend)][-memory:]
        self.here, self.value, self.gradient, self.tries = self.trial, value, gradient, 0
        self.noise2 = self.noise(self.here)

    @property
    def norm2(self) -> float:
        """The squared natural norm of the gradient at the last point that was accepted."""
        return float(self.gradient.square().sum())

    @property
    def bound(self) -> float:
        """The same with a standard error of noise² on top, which so many groups of draws tell to that."""
        return math.sqrt(self.norm2 + (1 + math.sqrt(2 / (self.groups - 1))) * self.noise2)

    @property
    def total(self) -> float:
        """The root of norm² + noise²; about half its square, in nats, is lost."""
        return math.sqrt(self.norm2 + self.noise2)

    @property
    def finite(self) -> bool:
        """Whether value and gradient are numbers there."""
        return math.isfinite(self.value) and math.isfinite(self.norm2)

    def advance(self, trust: float = 0.7, tries: int = 8, most: int = 60) -> bool:
        """Put q at the next trial, within ``trust`` in Fisher length of each curve; False, at the best, at the end."""
        enough = max(0.5 * self.noise2, 0.05 * self.tolerance**2)
        spent = self.evaluations - self.first >= most
        if not self.finite or self.norm2 <= enough or spent or self.tries >= tries:
            self.trial = self.here
            self.place(self.here)
            return False
        if self.tries:
            fall = self.slope * self.step
            share = -fall / (2 * (self.evaluated - self.value - fall)) if math.isfinite(self.evaluated) else 0.0
            self.step *= min(max(share, 0.1), 0.5)
        else:
            self.direction = -self._inverse_hessian(self.gradient)
            self.slope = float(self.direction @ self.gradient)
            if not self.slope < 0:
                self.pairs, self.direction, self.slope = [], -self.gradient, -self.norm2
            bends = self.direction[-self.sizes[-1] :].unflatten(0, (self.q.dim, -1))
            self.step = min(1.0, trust / max(float(bends.norm(dim=-1).max()), 1e-300))
        self.trial = self.here + self.step * self.direction
        self.place(self.trial)
        return True

    def _inverse_hessian(self, vector: Tensor) -> Tensor:
        """H⁻¹ g by two loops over the memory (Nocedal and Wright 2006, algorithm 7.4), the identity without one."""
        kept = []
        for change, bend in reversed(self.pairs):
            share = (change @ vector) / (change @ bend)
            vector = vector - share * bend
            kept.append(share)
        for (change, bend), share in zip(self.pairs, reversed(kept), strict=True):
            vector = vector + (share - (bend @ vector) / (change @ bend)) * change
        return vector

    def more_draws(self) -> int:
        """The number of draws that brings noise² to half of tolerance²; as many as now where there are no more."""
        factor = min(max(self.noise2 / (0.5 * self.tolerance**2), 2.0), 6.0)
        return min(2 * math.ceil(0.5 * factor * self.draws), self.most)

    def place(self, u: Tensor) -> None:
        """Put q at these numbers: V = C₀ T Tᵀ C₀ᵀ in the coordinates that the base has."""
        structure, a = self.base.structure, u[: self.q.dim]
        frame, phi, _, turn = self._point(u)
        N = structure.gram(structure.inverse(turn), torch.ones_like(a), frame.upper)
        self.base.restore(self.origin)
        new, ok = self.base.moved(Congruence(N, structure.smv(N, a)))
        self.base.assign(new, ok)
        self.q.phi.copy_(phi)

    # -------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what it remembers between two evaluations."""
        return {name: getattr(self, name) for name in (*_STATE, "origin", "pairs", "weights")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        for name in _STATE:
            setattr(self, name, state[name])
        self.origin = Coordinates(*(part.clone() for part in state["origin"]))
        self.pairs = [tuple(pair) for pair in state["pairs"]]
        self._renew()
        self.weights = state["weights"]


@torch.no_grad()
def skewed_directions(q: Gaussian, target: Target, seed: int, variances: float = 8.0) -> Tensor:
    """Find the rotation whose columns are the directions of the largest skewness, in the frame of the best Gaussian.

    There the first skewness is that of the tensor of third derivatives,

        T_ijk = E[∂_ijk ℓ(m + Cz)]/γ = E[(Cᵀ∇ℓ)_i (z_jz_k - δ_jk)]/γ        (Stein)

    and a curve z + ε(z² - 1) along a unit vector u gains about T(u, u, u)²/12 nats.
    """
    frame = q.frame()
    z = Fixed(min(max(4096, 128 * q.dim), 16_384), seed)(frame.mean)
    with torch.enable_grad():
        _, force = energy_and_gradient(target, frame.mean + frame.push(z))
    pulled = (force / (target.temperature or 1.0)) @ frame.dense()  # (Cᵀ∇ℓ)ᵀ, (S, D)
    there = pulled.isfinite().all(-1)
    z, pulled = z[there].double(), pulled[there].double()
    eye = torch.eye(q.dim, dtype=z.dtype, device=z.device)
    T = torch.einsum("si,sj,sk->ijk", pulled, z, z) / len(z) - pulled.mean(0)[:, None, None] * eye
    T = (T + T.permute(1, 2, 0) + T.permute(2, 0, 1)) / 3
    own = pulled * (z.square() - 1)  # of which T_iii is the mean, half of it over z and half over -z
    noise = float(own.unflatten(0, (2, -1)).mean(0).var(0).mean()) / (len(z) / 2) if bool(there.all()) else 0.0
    return rotated_apart(T, max(variances * noise, 1e-4)).to(q.dtype)


def rotated_apart(T: Tensor, least: float = 0.0, sweeps: int = 30, still: float = 1e-6) -> Tensor:
    """Find the rotation Q with the largest Σ_i T(q_i, q_i, q_i)² for a symmetric T, by plane rotations (Comon 1994)."""
    dim, T = len(T), T.clone()
    turned = torch.zeros(dim, dim, dtype=torch.bool, device="cpu")  # planes in which there was something to gain
    Q = torch.eye(dim, dtype=T.dtype, device=T.device)
    for _ in range(sweeps):
        largest = 0.0
        for i in range(dim):
            for j in range(i + 1, dim):
                angle, gain = _best(*(float(x) for x in (T[i, i, i], T[i, i, j], T[i, j, j], T[j, j, j])))
                if abs(angle) < still or (not turned[i, j] and gain < least):
                    continue
                turned[i, j] = True
                largest = max(largest, abs(angle))
                c, s = math.cos(angle), math.sin(angle)
                turn = T.new_tensor([[c, s], [-s, c]])
                for part in (T, T.movedim(1, 0), T.movedim(2, 0), Q.mT):
                    part[[i, j]] = torch.tensordot(turn, part[[i, j]], 1)
        if largest < still:
            break
    return Q


def _best(a: float, b: float, c: float, d: float) -> tuple[float, float]:
    """The angle in (-π/4, π/4] at which T_iii² + T_jjj² = p + q cos 4θ + r sin 4θ is largest, and by how much."""

    def value(angle: float) -> float:
        x, y = math.cos(angle), math.sin(angle)
        first = a * x**3 + 3 * b * x * x * y + 3 * c * x * y * y + d * y**3
        second = -a * y**3 + 3 * b * y * y * x - 3 * c * y * x * x + d * x**3
        return first * first + second * second

    here, middle, other = value(0.0), value(math.pi / 8), value(math.pi / 4)
    mean = 0.5 * (here + other)
    if max(abs(here - mean), abs(middle - mean)) <= 1e-12 * max(mean, 1e-300):
        return 0.0, 0.0
    return 0.25 * math.atan2(middle - mean, here - mean), math.hypot(middle - mean, here - mean) - (here - mean)


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
        curves = max(usual, tolerance_by_draws(q, 20))  # each curve is known from draws no better than one of so many
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
        self.before: Fresh | None = None  # the Gaussian on fresh draws
        self.first: Ending | None = None  # how its fit has ended
        self.spent = 0  # gradients, on the Gaussian
        self.kept = False  # the curves gain something

    def straight(self) -> None:
        """Set the curves to the identity."""
        with torch.no_grad():
            self.warped.phi.zero_()

    # -------------------------------------------------------------------------------- the run

    def _run(self) -> Generator[Standing, None, None]:
        """The Gaussian, and then its curves over one set of draws after another, until there is an ending."""
        if self.bending is None:
            yield from super()._run()
            self.first, self._ending = self._ending, None
            self.before, self.spent = self._judged_fresh(), self.target.gradients
            if self.warped.inside:
                self.show("directions")
                self.warped.turn.copy_(skewed_directions(self.gaussian, self.target, self.seed + 4))
            self.bending = Bending(self.warped, self.target, self.seed + 3, self.curves)
            self.bending.begin()
        bending = self.bending
        again = self._spent is not None  # the evaluation of a run that is gone on from
        while again or bending.evaluations == bending.first or bending.advance() or self._more(bending):
            self.show(f"a warp, {bending.draws} draws")
            self.mark()
            bending.evaluate()
            if self._spent is not None:
                _, self.target.gradients = self._spent
            self._spent, again = None, False
            yield self._standing(bending)
        self._ending = self._concluded(bending)

    def _judged_fresh(self) -> Fresh:
        self.show("fresh draws")
        with self.target.seen_as(lambda inner: WarpedTarget(inner, self.warped)) as inside:
            return judge(self.gaussian, inside, self.seed + 2)

    def _more(self, bending: Bending) -> bool:
        """Whether another set of draws is begun."""
        last = bending.bound <= self.curves or bending.draws == bending.most or not bending.finite or self._over()
        more = not last and self._hopeful(bending)
        if more:
            bending.begin(bending.more_draws())
        return more

    def _hopeful(self, bending: Bending, long: int = 16_000) -> bool:
        """Whether the curves gain something, or would without noise², before as many gradients as the Gaussian took."""
        gain = self._gain(self._judged_fresh())
        early = self.target.gradients - self.spent < max(long, self.spent)
        return gain >= self.worth or (early and max(gain, 0.0) + bending.noise2 >= self.worth)

    @property
    def worth(self) -> float:
        """Nats that the curves have to gain on fresh draws, or the Gaussian is kept."""
        return min(0.05, 0.01 * self.gaussian.dim)

    def _gain(self, after: Fresh) -> float:
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
            change = f"by {gain:.2g} nats" if gain > -torch.inf else "to nothing finite"
            no_gain = f"A warp changes the ELBO on {after.draws} fresh draws {change}, which is no gain"
            return self.first._replace(reason=f"{self.first.reason} {no_gain}: q is the Gaussian.")
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
        return super().ending(stop, last) if self.bending is None or stop is None else self.cut_short(stop, last)

    def interrupted(self, reason: str, last: Standing) -> Ending:
        """Return the outcome at the last record, with the curves as they are there."""
        self.kept = self.bending is not None and bool(self.warped.phi.any())
        return super().interrupted(reason, last)

    def cut_short(self, stop: Stop, last: Standing) -> Ending:
        """Return the outcome at the last record of the curves, else that of the Gaussian."""
        return super().cut_short(stop, last) if self.bending is None else self.interrupted(stop.reason, last)

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
            "gaussian_gradients": self.spent,
            "before": self.before,
            "first": self.first,
            "phi": self.warped.phi,
            "turn": self.warped.turn if self.warped.inside else None,
            "bending": None if self.bending is None else self.bending.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave, with the same draws."""
        super().load_state_dict(state)
        with torch.no_grad():
            self.warped.phi.copy_(state["phi"])
            if self.warped.inside:
                self.warped.turn.copy_(state["turn"])
        self.spent = state["gaussian_gradients"]
        self.before = None if state["before"] is None else Fresh(*state["before"])
        self.first = None if state["first"] is None else Ending(*state["first"])
        self.bending = None
        if state["bending"] is not None:
            self._spent = state.get("spent")
            bending = self.bending = Bending(self.warped, self.target, self.seed + 3, self.curves)
            within(self.gaussian, lambda: bending.load_state_dict(state["bending"]))
