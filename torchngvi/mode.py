"""A rough mode and the curvature there, and the descent from where a log joint is astronomically low."""

import math
from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from torchngvi.derivatives import energy_and_gradient
from torchngvi.interfaces import Posterior, Target
from torchngvi.numerics.linalg import eigh
from torchngvi.structures import Dense

# Down from where a log joint is astronomically low, by quasi-Newton steps on the logarithm of the energy
#
# Where ℓ is e^z of a coordinate z in the tens or hundreds, Newton's method moves by one unit of z a step, and the
# Hessian of a sum of such terms shows only the largest, to the number of digits that there are.  But log ℓ is about the
# maximum of their exponents, linear in θ where one of them prevails.  It is minimised here by BFGS with steps that
# satisfy the weak Wolfe conditions, found by expansion and bisection, a pair that minimises piecewise smooth functions
# too (Lewis and Overton 2013).  Below a level c, ℓ takes the place of its logarithm:
#
#     φ = ℓ  for ℓ ≤ c,        φ = c (1 + log(ℓ/c))  above.
#
# φ increases with ℓ, with a continuous derivative, so that it has the same minima.

T = TypeVar("T")
Asking = Generator[Tensor, tuple[Tensor, Tensor], T]  # yields points (S, D), takes ℓ (S,) and ∇ℓ (S, D) there


class Place(NamedTuple):
    """A point, and φ there."""

    theta: Tensor  # (D,)
    energy: Tensor
    gradient: Tensor  # of ℓ, (D,)
    value: float  # φ; infinite where ℓ or its gradient is not finite
    share: float  # dφ/dℓ

    @property
    def slope(self) -> Tensor:
        """∇φ, (D,)."""
        return self.share * self.gradient


def placed(theta: Tensor, energy: Tensor, gradient: Tensor, nats: float = 10.0) -> Place:
    """A place with its φ, where c is so many nats a coordinate.

    >>> placed(torch.zeros(1), torch.tensor(5.0), torch.ones(1)).value
    5.0
    >>> at = placed(torch.zeros(1), torch.tensor(10 * math.e), torch.ones(1))
    >>> round(at.value, 4), round(at.share, 4)
    (20.0, 0.3679)
    """
    level, number = nats * len(theta), float(energy)
    if not (math.isfinite(number) and bool(torch.isfinite(gradient).all())):
        return Place(theta, energy, gradient, math.inf, 0.0)
    if number <= level:
        return Place(theta, energy, gradient, number, 1.0)
    return Place(theta, energy, gradient, level * (1 + math.log(number / level)), level / number)


class Afar:
    """BFGS on φ, which remembers the curvature from one descent to the next."""

    place: Place  # where it has come to
    inverse: Tensor  # of the Hessian of φ, (D, D)

    def __init__(self, scale: Tensor) -> None:
        self.first = self.scale = scale  # standard deviations, by what is known of the curvature, (D,)
        self.new, self.gradients = True, 0

    def run(
        self,
        start: Place,
        budget: int,
        close: float = 1.0,  # nats a coordinate
        quiet: int = 10,  # steps that neither promise nor bring so much
        renewals: int = 5,  # times that the memory is given up where it points nowhere
    ) -> Asking[Place]:
        """Descend to where some steps in a row have neither promised nor brought a nat a coordinate."""
        self.place, forgotten = start, 0
        if self.new:
            self._forget()
        energies = [float(start.energy)]
        while self.gradients < budget:
            slope = self.place.slope
            direction = -(self.inverse @ slope)
            fall = float(slope @ direction)
            little = close * len(slope)
            still = len(energies) > quiet and energies[-quiet] - energies[-1] < little
            if still and -fall < little * self.place.share:
                break
            after = (yield from self._along(direction, fall)) if fall < 0 else None
            if after is not None:
                self._learn(after)
                energies.append(float(after.energy))
            elif self.new or forgotten == renewals:
                break
            else:
                self._forget()
                forgotten += 1
        if not self.new:
            self.scale = (self.place.share * self.inverse.diagonal()).sqrt()
        return self.place

    def _forget(self) -> None:
        """No curvature is known: the next step is of unit length in units of the scale."""
        length = float((self.first * self.place.slope).norm())
        self.inverse, self.new = torch.diag(self.first.square()) / (length or 1.0), True

    def _along(
        self,
        direction: Tensor,
        fall: float,
        enough: float = 1e-4,  # share of the slope that the decrease has
        less: float = 0.9,  # share that may be left of it
        farther: float = 4.0,  # factor of a step that is too short
        trials: int = 40,
    ) -> Asking[Place | None]:
        """A step which lessens φ enough, and its slope; None where there is no shorter one that lessens it."""
        short, far, length = 0.0, math.inf, 1.0
        best: Place | None = None
        for _ in range(trials):
            theta = self.place.theta + length * direction
            energies, gradients = yield theta[None]
            self.gradients += 1
            trial = placed(theta, energies[0], gradients[0])
            if not trial.value <= self.place.value + enough * length * fall:
                far = length
            else:
                best, short = trial, length
                if float(trial.slope @ direction) >= less * fall:
                    break
            if short and not math.isinf(far):
                length = 0.5 * (short + far)
            else:
                length = length * farther if short else length / farther
        return best

    def _learn(self, after: Place) -> None:
        """Go there, and update the inverse of the Hessian of φ (Nocedal and Wright 2006, equations 6.17 and 6.20)."""
        s, y = after.theta - self.place.theta, after.slope - self.place.slope
        self.place, sy = after, float(s @ y)
        if not sy > 0:
            return
        if self.new:
            self.inverse = torch.diag(self.first.square()) * (sy / float((self.first * y).square().sum()))
            self.new = False
        Ky = self.inverse @ y
        both = torch.outer(Ky, s)
        self.inverse = self.inverse + ((1 + float(y @ Ky) / sy) * torch.outer(s, s) - both - both.mT) / sy


# A rough mode and the curvature there from gradients alone: where a fit of a black box starts
#
# Newton's method with BFGS updates (Nocedal and Wright 2006, section 6.1).  The Hessian is a forward
# difference of gradients, D + 1 of them in one call, at steps that are a share of a standard deviation;
# it is taken again only where the quadratic model has failed.  Where the Hessian has negative or vanishing
# eigenvalues, absolute values above a floor take their place, as in `laplace`.
#
# From where ℓ is astronomically large, as e^z of a coordinate z in the tens or hundreds, such steps lead nowhere or
# take as many as z.  There the search goes by `Afar`, until Newton's method is of use.
#
# Searches from several starts go side by side: each yields the points at which it wants ℓ and ∇ℓ, and those of all are
# one call.

_TRUSTED = (0.5, 1.7)  # a decrease between these shares of the predicted one leaves the model as it is
_CUTS = (1.0, 0.5, 0.25, 0.125) + tuple(0.125 * 0.1**k for k in range(1, 20))
_FAR = 1e4  # square of the decrement from which Newton's method may be given up


class Mode(NamedTuple):
    """Where the search for a mode ended, with the covariance and the evidence that its curvature gives."""

    theta: Tensor  # (D,)
    root: Tensor  # of the covariance γ H⁻¹, H = ∇²ℓ with repaired eigenvalues, lower triangular (D, D)
    log_evidence: float  # Laplace's: log joint + ½ D log 2π - ½ log|H|, at γ = 1
    found: bool  # the Hessian is positive definite and the Newton decrement below ½
    gradients: int

    def promised_loss(self, q: Posterior, temperature: float = 1.0) -> float:
        """The loss of q, which is at the mode with any structure, if ℓ were the quadratic that it is there."""
        gamma, dim = temperature or 1.0, len(self.theta)
        entropy = float(self.root.diagonal().log().sum()) + 0.5 * dim * (1 + math.log(2 * math.pi))
        return gamma * (entropy - float(q.entropy()) - self.log_evidence)


def find_mode(
    target: Target,
    start: Tensor,  # (D,)
    budget: int,  # of gradients, at least one Hessian is taken
    *,
    over: Callable[[], bool] = lambda: False,
) -> Mode | None:
    """Minimise ℓ from a start; None where ℓ or its derivative is not finite there."""
    return find_modes(target, start[None], budget, over=over)[0]


def find_modes(
    target: Target,
    starts: Tensor,  # (K, D)
    budget: int,  # of gradients for each
    *,
    over: Callable[[], bool] = lambda: False,
) -> list[Mode | None]:
    """Minimise ℓ from each of several starts, side by side, as `find_mode` does from one."""
    gamma = target.temperature or 1.0
    modes: list[Mode | None] = [None] * len(starts)
    parts = [_Search(start, budget, gamma) for start in starts]
    searches = {k: part.run() for k, part in enumerate(parts)}
    wanted = {k: next(search) for k, search in searches.items()}
    while wanted:
        if over():
            for k in wanted:
                modes[k] = parts[k].ended(False)
            break
        energies, gradients = energy_and_gradient(target, torch.cat(list(wanted.values())))
        sizes = [len(points) for points in wanted.values()]
        answers = zip(energies.split(sizes), gradients.split(sizes), strict=True)
        asked, wanted = list(wanted), {}
        for k, answer in zip(asked, answers, strict=True):
            try:
                wanted[k] = searches[k].send(answer)
            except StopIteration as done:
                modes[k] = done.value
    return modes


class _Search:
    """θ, ℓ, ∇ℓ and the model H of ∇²ℓ."""

    def __init__(self, start: Tensor, budget: int, gamma: float) -> None:
        self.theta, self.budget, self.gamma, self.gradients = start.detach().clone(), budget, gamma, 0
        self.seen: tuple[Tensor, Tensor] | None = None  # θ where H was decomposed last, and half with H⁻¹ = half halfᵀ
        self.scale = 0.1 * self.theta.abs().clamp_min(1.0)  # about a standard deviation of each coordinate
        self.hard, self.afar = 0, Afar(self.scale)

    @staticmethod
    def finite(*tensors: Tensor) -> bool:
        return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)

    def _at(self, theta: Tensor) -> Asking[tuple[Tensor, Tensor]]:
        """ℓ and ∇ℓ at points (S, D)."""
        self.gradients += len(theta)
        return (yield theta)

    def _here(self, theta: Tensor) -> Asking[tuple[Tensor, Tensor]]:
        """ℓ and ∇ℓ at one point (D,)."""
        energy, gradient = yield from self._at(theta[None])
        return energy[0], gradient[0]

    def _steps(self) -> Tensor:
        """Difference steps (D,): of θ that is rounded, gradients have errors of eps |θ| H."""
        eps = torch.finfo(self.theta.dtype).eps
        least = torch.maximum(self.theta.abs(), self.afar.first)
        return torch.maximum(eps ** (1 / 3) * self.scale, eps ** (2 / 3) * least)

    def _coarse(self, wide: float = 0.1) -> bool:
        """Whether H was taken by steps of so many standard deviations, by what it says itself."""
        return self.age == 0 and bool(((self.step > wide * self.scale) & (self.step > self._steps() / wide)).any())

    def _hessian(self) -> Asking[bool]:
        """Take H again; False where it is not finite."""
        while True:
            step = self.step = (self.theta + self._steps()) - self.theta  # as it is rounded
            _, gradients = yield from self._at(self.theta + torch.diag(step))
            H = (gradients - self.gradient) / step[:, None]
            self.H, self.age = 0.5 * (H + H.mT), 0
            if (finite := self.finite(self.H)) or not bool((self.scale > self.afar.first).any()):
                return finite
            self.scale = torch.minimum(self.scale, self.afar.first)  # a step as wide as ℓ is flat leads too far

    def _decompose(self, floor: float = 1e-10) -> None:
        """Half with H⁻¹ = half halfᵀ, eigenvalues in units of the curvatures, raised to a floor below the largest."""
        diagonal = self.H.diagonal().abs()
        tiny = torch.finfo(diagonal.dtype).tiny ** 0.5
        unit = torch.where(diagonal > tiny, diagonal, diagonal.max()).rsqrt()
        unit = torch.where(unit.isfinite(), unit, 1.0)
        values, vectors, ok = eigh(unit[:, None] * self.H * unit)
        largest = values.abs().max()
        repaired = torch.where(largest > 0, torch.maximum(values.abs(), floor * largest), 1.0)
        self.definite = bool(ok & (values >= -floor * largest).all())  # or flat
        self.half = unit[:, None] * vectors * repaired.rsqrt()
        self._repaired = (vectors * repaired) @ vectors.mT / (unit[:, None] * unit)
        self.downhill = self.half[:, 0]  # of the smallest eigenvalue
        self.scale = self.half.square().sum(-1).sqrt()
        self.log_det = float(repaired.log().sum() - 2 * unit.log().sum())
        self.seen, self.known = (self.theta, self.half), float(self.energy)

    def ended(self, found: bool) -> Mode | None:
        """The mode, where H was decomposed last; None where it never was."""
        if self.seen is None:
            return None
        (theta, half), gamma, dense = self.seen, self.gamma, Dense(len(self.theta))
        evidence = -self.known / gamma - 0.5 * (self.log_det - len(theta) * math.log(2 * math.pi * gamma))
        root = dense.positive_root(dense.lower_root(math.sqrt(gamma) * half))[0]
        return Mode(theta, root, evidence, found, self.gradients)

    def run(self, near_enough: float = 0.5, saddle: float = 1e-2) -> Asking[Mode | None]:
        """Search until the Newton decrement is near enough; an indefinite H below that of a saddle is left."""
        self.energy, self.gradient = yield from self._here(self.theta)
        if not self.finite(self.energy, self.gradient):
            return None
        if not (yield from self._hessian()) and not (yield from self._from_afar()):
            return None
        while True:
            self._decompose()
            along = self.half.mT @ self.gradient
            direction, square = -(self.half @ along), float(along.square().sum())
            near = square < near_enough**2 and self.definite
            spent = self.gradients - self.afar.gradients >= self.budget
            if square < _FAR and not spent and self._coarse() and (yield from self._hessian()):
                continue
            if not self.definite and square < saddle**2 and not spent and (yield from self._left_saddle()):
                continue
            if not near and not spent and self._hard(square):
                if (yield from self._from_afar()):
                    continue
                break
            if near or spent or not (yield from self._step(direction, square)):
                if self.age == 0 or not (yield from self._hessian()):
                    break
                if spent:
                    self._decompose()
                    break
        return self.ended(near)

    def _hard(self, square: float, slow: int = 3, flat: float = 1e3) -> bool:
        """Whether steps leave, so often in a row, a decrement as large as ℓ, as e^z does, and no direction is flat."""
        self.hard = self.hard + 1 if _FAR < square < flat * float(self.energy) else 0
        return self.hard >= slow

    def _from_afar(self, budgets: int = 3) -> Asking[bool]:
        """Go down by the logarithm of ℓ, with budgets for D² numbers to learn, and take H again, if it is finite."""
        start = placed(self.theta, self.energy, self.gradient)
        before = self.afar.gradients
        self.theta, self.energy, self.gradient, *_ = yield from self.afar.run(start, budgets * self.budget)
        self.gradients += self.afar.gradients - before
        self.scale, self.hard = self.afar.scale, 0
        return (yield from self._hessian())

    def _left_saddle(self) -> Asking[bool]:
        """Go down along the most negative curvature, either way; False where ℓ does not fall."""
        for length in (1.0, -1.0, 0.25, -0.25):
            theta = self.theta + length * self.downhill
            energy, gradient = yield from self._here(theta)
            if self.finite(energy, gradient) and float(energy) < float(self.energy):
                self.theta, self.energy, self.gradient = theta, energy, gradient
                return (yield from self._hessian())
        return False

    def _step(self, direction: Tensor, square: float, enough: float = 1e-4) -> Asking[bool]:
        """Go along the direction as far as ℓ falls by a share of its promise, and update H; False where it does not."""
        for length in _CUTS:
            theta = self.theta + length * direction
            energy, gradient = yield from self._here(theta)
            fallen = float(self.energy - energy)
            if self.finite(energy, gradient) and fallen >= enough * length * square:
                break
        else:
            return square > _FAR and (yield from self._from_afar())
        s, y = theta - self.theta, gradient - self.gradient
        self.theta, self.energy, self.gradient = theta, energy, gradient
        predicted = length * square * (1 - length / 2)  # may underflow to 0
        if length < 1 or not _TRUSTED[0] * predicted < fallen < _TRUSTED[1] * predicted:
            return (yield from self._hessian())
        if not self.definite:
            self.H = self._repaired
        Hs, sy = self.H @ s, s @ y
        sHs = s @ Hs
        # both are positive in exact arithmetic, up to the curvature that is seen; rounding may leave neither
        if float(sy) > 1e-10 * float(s.norm() * y.norm()) and float(sHs) > 0:
            self.H = self.H - torch.outer(Hs, Hs) / sHs + torch.outer(y, y) / sy
        self.age += 1
        return self.finite(self.H) or (yield from self._hessian())


def number_of_starts(dim: int, least: int = 2, most: int = 8) -> int:
    """How many points a search begins from: so many that all their Hessians have 64 columns, within limits."""
    return min(max(64 // dim, least), most)


def uniform_points(count: int, like: Tensor, seed: int) -> Tensor:
    """Points (count, D) uniform on (-2, 2), in the dtype and on the device of a vector (D,)."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(count, len(like), generator=generator, dtype=torch.float64, device="cpu")
    return (4 * uniform - 2).to(like)


def starting_points(count: int, around: Tensor, seed: int) -> Tensor:
    """Points (count, D) from which modes are searched for: of U(-2, 2) about a point (D,), and half of them about zero.

    A point that is one draw of a prior is nearer to some modes than to those that mirror them, and all points about it
    may lead to one.  Those about zero come in pairs that mirror each other.

    >>> starting_points(5, torch.full((1,), 100.0), seed=0).round(decimals=-2).flatten().tolist()
    [100.0, 0.0, 100.0, -0.0, 100.0]
    """
    points = uniform_points(count, around, seed)
    if bool(around.any()):
        points[3::4] = -points[1::4][: len(points[3::4])]
        points[::2] += around
    return points


def search_points(
    mean: Tensor,  # (D,)
    stddev: Tensor,  # (D,)
    seed: int,
    around: float = 6.0,
) -> Tensor:
    """Points from which modes are searched for: half uniform on (-2, 2), half within so many sds of a Gaussian."""
    number = number_of_starts(len(mean), 4, 16)
    points = uniform_points(number, mean, seed)
    return torch.cat([points[: number // 2], mean + 0.5 * around * stddev * points[number // 2 :]])


def distinct(first: Mode, second: Mode, sds: float = 3.0) -> bool:
    """Say whether two modes are more than three standard deviations apart by both curvatures.

    >>> one = Mode(torch.zeros(1), torch.eye(1), 0.0, True, 1)
    >>> distinct(one, one._replace(theta=torch.tensor([4.0]))), distinct(one, one)
    (True, False)
    """
    apart = (first.theta - second.theta)[:, None]
    return all(
        float(torch.linalg.solve_triangular(mode.root, apart, upper=False).norm()) > sds for mode in (first, second)
    )


def distinct_modes(modes: Iterable[Mode], least: float) -> list[Mode]:
    """Those with more than a least log evidence, each once, the one with the most evidence first."""
    kept: list[Mode] = []
    for mode in sorted((mode for mode in modes if mode.log_evidence > least), key=lambda one: -one.log_evidence):
        if all(distinct(mode, one) for one in kept):
            kept.append(mode)
    return kept
