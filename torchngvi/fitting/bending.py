"""Minimising the average of a log joint over fixed draws in mean, root and curves together: a Gaussian becomes warped.

From where the Gaussian was fitted, with its root C₀,

    m = m₀ + C₀ a        C = C₀ T(P), T = tril½[P] with e^x for x on the diagonal        φ = R⁻ᵀ f

where R Rᵀ is the Fisher matrix of φ at the identity, where φ is uncorrelated with m and C.  So |a|² + ½‖P‖² + |f|² is
the squared Fisher length, plain gradients are natural ones, and L-BFGS begins with the identity.  No step bends a
coordinate by more than 0.7 in Fisher length.

θ is a function of the draws, and ∇ℓ(θ) is all that is asked of the log joint: φ costs no further gradient.
"""

import math
from typing import Any

import torch
from torch import Tensor

from torchngvi.derivatives import energy_and_gradient
from torchngvi.expectations.draws import Fixed
from torchngvi.interfaces import Congruence, Coordinates, Frame
from torchngvi.models.guarded import FAILING, Guarded
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.warped import Warped

TRUST = 0.7  # Fisher length by which one step may bend a coordinate
_FEWEST, _EACH = 128, 20  # draws of the first set, and a number of φ: the noise² of their scores is then 1/20
_FALL = 1e-4  # share of the promised decrease that a step must reach
_MEMORY = 20  # pairs of steps and changes of the gradient
_TRIES = 8  # shorter steps along one direction
_CUT = (0.1, 0.5)  # a shorter step has between these shares of the length
_SOLVED = 0.5  # share of noise² at which more accuracy on the same draws is of no use
_LEFT = 0.05  # share of tolerance² below which norm² is small
_GROUPS = 16  # of draws, whose gradients tell the noise
_MOST_EVALUATIONS = 60  # over one set of draws
_COUNTS = (
    *("draws", "evaluations", "first", "rejections", "tries"),
    *("value", "evaluated", "slope", "step", "noise2"),
)
_TENSORS = ("here", "trial", "gradient", "direction")


class Bending:
    """L-BFGS in the frame, over one set of draws after another.

    Attributes:
        draws: in the present average.
        evaluations: so far.
        rejections: steps that were too long.
        value: the negative ELBO over γ at the last point that was accepted.
        evaluated: the same at the last trial.
        norm2: the squared natural norm there.
        noise2: the squared standard error of that gradient.
    """

    most = 16_384  # draws of one average

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
        self.value, self.slope, self.step, self.noise2 = math.inf, 0.0, 0.0, math.inf
        self.evaluated = math.nan
        self.here = self.trial = self.gradient = self.direction = q.phi.new_zeros(sum(self.sizes))
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.weights: Tensor | None = None  # of the draws, once they were seen
        wanted = max(_FEWEST, _EACH * self.sizes[-1], 8 * self.per_coordinate)
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
        """The squared standard error of the gradient at the point that was evaluated last, by groups of pairs.

        C⁻ᵀz at x = m + Cz has the gradient of log|C| as its mean over whitened draws, exactly, and is no noise.
        """
        assert self.weights is not None
        pairs, gradients = torch.arange(len(self.z), device=self.z.device).reshape(2, -1), []
        for group in pairs.tensor_split(_GROUPS, dim=1):
            z, force, weights = self.z[group.flatten()], self.force[group.flatten()], self.weights[group.flatten()]
            with torch.enable_grad():
                at = u.detach().requires_grad_()
                theta, volume, _, frame = self._bent(at, z)
                structure, root = frame.structure, frame.root.detach()
                normal = (structure.solve if frame.upper else structure.tsolve)(root, z)
                terms = (force * theta).sum(-1) - volume - (normal * (frame.mean + frame.push(z))).sum(-1)
                (gradient,) = torch.autograd.grad((weights * terms).sum() / weights.sum(), at)
            gradients.append(gradient)
        spread = float(torch.stack(gradients).var(0).sum()) / _GROUPS
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

    def evaluate(self) -> None:
        """Evaluate the trial, where q is, and accept it where the average has fallen."""
        value, gradient = self._objective(self.trial)
        first = self.evaluations == self.first
        self.evaluations += 1
        self.evaluated = value
        enough = self.value + _FALL * self.step * self.slope + 1e-12 * abs(self.value)
        if not (first or (value <= enough and bool(gradient.isfinite().all()))):
            self.tries += 1
            self.rejections += 1
            return
        if not first:
            self._remember(self.trial - self.here, gradient - self.gradient)
        self.here, self.value, self.gradient, self.tries = self.trial, value, gradient, 0
        self.noise2 = self.noise(self.here)

    @property
    def norm2(self) -> float:
        """The squared natural norm of the gradient at the last point that was accepted."""
        return float(self.gradient.square().sum())

    @property
    def bound(self) -> float:
        """The same with a standard error of noise² on top, which so many groups of draws tell to that."""
        return math.sqrt(self.norm2 + (1 + math.sqrt(2 / (_GROUPS - 1))) * self.noise2)

    @property
    def total(self) -> float:
        """The root of norm² + noise²; about half its square, in nats, is lost."""
        return math.sqrt(self.norm2 + self.noise2)

    @property
    def finite(self) -> bool:
        """Whether value and gradient are numbers there."""
        return math.isfinite(self.value) and math.isfinite(self.norm2)

    def _remember(self, change: Tensor, bend: Tensor) -> None:
        if float(change @ bend) > 1e-10 * float(change.norm() * bend.norm()):
            self.pairs = [*self.pairs, (change, bend)][-_MEMORY:]

    def advance(self) -> bool:
        """Put q at the next trial; False, with q at the best, where the minimisation over these draws has ended."""
        enough = max(_SOLVED * self.noise2, _LEFT * self.tolerance**2)
        spent = self.evaluations - self.first >= _MOST_EVALUATIONS
        if not self.finite or self.norm2 <= enough or spent or self.tries >= _TRIES:
            self.trial = self.here
            self.place(self.here)
            return False
        if self.tries:
            fall = self.slope * self.step
            share = -fall / (2 * (self.evaluated - self.value - fall)) if math.isfinite(self.evaluated) else 0.0
            self.step *= min(max(share, _CUT[0]), _CUT[1])
        else:
            self.direction = -self._inverse_hessian(self.gradient)
            self.slope = float(self.direction @ self.gradient)
            if not self.slope < 0:
                self.pairs, self.direction, self.slope = [], -self.gradient, -self.norm2
            bends = self.direction[-self.sizes[-1] :].unflatten(0, (self.q.dim, -1))
            self.step = min(1.0, TRUST / max(float(bends.norm(dim=-1).max()), 1e-300))
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
        return {
            **{name: getattr(self, name) for name in (*_COUNTS, *_TENSORS)},
            "origin": tuple(self.origin),
            "pairs": list(self.pairs),
            "weights": self.weights,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        for name in (*_COUNTS, *_TENSORS):
            setattr(self, name, state[name])
        self.origin = Coordinates(*(part.clone() for part in state["origin"]))
        self.pairs = [tuple(pair) for pair in state["pairs"]]
        self._renew()
        self.weights = state["weights"]
