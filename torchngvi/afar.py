"""Down from where a log joint is astronomically low, by quasi-Newton steps on the logarithm of the energy.

Where ℓ is e^z of a coordinate z in the tens or hundreds, Newton's method moves by one unit of z a step, and the Hessian
of a sum of such terms shows only the largest, to the number of digits that there are.  But log ℓ is about the maximum
of their exponents, linear in θ where one of them prevails.  It is minimised here by BFGS with steps that satisfy the
weak Wolfe conditions, found by expansion and bisection, a pair that minimises piecewise smooth functions too (Lewis and
Overton 2013).  Below a level c, ℓ takes the place of its logarithm:

    φ = ℓ  for ℓ ≤ c,        φ = c (1 + log(ℓ/c))  above.

φ increases with ℓ, with a continuous derivative, so that it has the same minima.
"""

import math
from collections.abc import Generator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Asking = Generator[Tensor, tuple[Tensor, Tensor], T]  # yields points (S, D), takes ℓ (S,) and ∇ℓ (S, D) there

_LEVEL = 10.0  # of c, nats a coordinate
_ENOUGH, _LESS = 1e-4, 0.9  # shares of the slope: of the decrease, and of what may be left of it
_FARTHER = 4.0  # factor of a step that is too short
_TRIALS = 40  # steps along one direction
_ANEW = 5  # times that the memory is given up where it points nowhere
_CLOSE, _QUIET = 1.0, 10  # nats a coordinate, in so many steps


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


def placed(theta: Tensor, energy: Tensor, gradient: Tensor) -> Place:
    """A place with its φ.

    >>> placed(torch.zeros(1), torch.tensor(5.0), torch.ones(1)).value
    5.0
    >>> at = placed(torch.zeros(1), torch.tensor(10 * math.e), torch.ones(1))
    >>> round(at.value, 4), round(at.share, 4)
    (20.0, 0.3679)
    """
    level, number = _LEVEL * len(theta), float(energy)
    if not (math.isfinite(number) and bool(torch.isfinite(gradient).all())):
        return Place(theta, energy, gradient, math.inf, 0.0)
    if number <= level:
        return Place(theta, energy, gradient, number, 1.0)
    return Place(theta, energy, gradient, level * (1 + math.log(number / level)), level / number)


class Afar:
    """BFGS on φ, which remembers the curvature from one descent to the next.

    Attributes:
        place: where it has come to.
        scale: standard deviations of the coordinates by what is known of the curvature, (D,).
        gradients: spent.
    """

    place: Place
    inverse: Tensor  # of the Hessian of φ, (D, D)

    def __init__(self, scale: Tensor) -> None:
        self.first, self.scale, self.new, self.gradients = scale, scale, True, 0

    def run(self, start: Place, budget: int) -> Asking[Place]:
        """Descend to where some steps in a row have neither promised nor brought a nat a coordinate."""
        self.place, forgotten = start, 0
        if self.new:
            self._forget()
        energies = [float(start.energy)]
        while self.gradients < budget:
            slope = self.place.slope
            direction = -(self.inverse @ slope)
            fall = float(slope @ direction)
            little = _CLOSE * len(slope)
            if (
                len(energies) > _QUIET
                and -fall < little * self.place.share
                and energies[-_QUIET] - energies[-1] < little
            ):
                break
            after = (yield from self._along(direction, fall)) if fall < 0 else None
            if after is not None:
                self._learn(after)
                energies.append(float(after.energy))
            elif self.new or forgotten == _ANEW:
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

    def _along(self, direction: Tensor, fall: float) -> Asking[Place | None]:
        """A step which lessens φ enough, and its slope; None where there is no shorter one that lessens it."""
        short, far, length = 0.0, math.inf, 1.0
        best: Place | None = None
        for _ in range(_TRIALS):
            theta = self.place.theta + length * direction
            energies, gradients = yield theta[None]
            self.gradients += 1
            trial = placed(theta, energies[0], gradients[0])
            if not trial.value <= self.place.value + _ENOUGH * length * fall:
                far = length
            else:
                best, short = trial, length
                if float(trial.slope @ direction) >= _LESS * fall:
                    break
            if short and not math.isinf(far):
                length = 0.5 * (short + far)
            else:
                length = length * _FARTHER if short else length / _FARTHER
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
