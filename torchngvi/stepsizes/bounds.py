"""Step sizes with a bound: on the norm of a gradient, in nats, and the shortest of several."""

from typing import Any, final

import torch
from torch import Tensor

from torchngvi.arguments import read_instance, read_number
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Path, StepSize

# A step size for a direction whose Euclidean norm in q's own coordinates is clipped


@final
class Clip(StepSize):
    """Gradient clipping: the step size is lr min(1, norm/|d|), with d the direction in q's own coordinates.

    Use it against single gradients of enormous length.  The norm depends on the units of the coordinates; that of
    `KLRadius` does not, and both go together by `Shortest`.

    Args:
        norm: the largest length |d| of a direction, positive, in the units of q's coordinates.

    Raises:
        InputError: if the norm is not positive.
        PairError: at construction of an optimizer, if the rule does not move q along a straight line.

    >>> from torchngvi import CholeskyGaussian
    >>> from torchngvi.methods import RootGD
    >>> opt = RootGD(CholeskyGaussian(2), lr=0.1, step_size=Clip(5.0))
    """

    needs_tangent = True

    def __init__(self, norm: float) -> None:
        self.norm = read_number("norm", norm, "is the largest norm of a direction", above=0, infinite=True)

    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict[str, Any]) -> Tensor:
        """Return ρ (*batch,) from the length of the direction, which is the step of ρ = 1."""
        assert path.change2 is not None
        length = path.change2().sqrt()
        return torch.ones_like(like) * lr * torch.where(length > self.norm, self.norm / length, 1.0)


# A step no longer than a KL divergence, to second order: KL(q'‖q) = ½ρ²|λ̇|²_F + O(ρ³)


@final
class KLRadius(StepSize):
    """The step size min(lr, √(2 radius)/|λ̇|), for a step of about ``radius`` nats: the default where a rate is given.

    The length |λ̇| of the velocity of q is that of the Fisher metric, the second-order form of the divergence; along a
    natural gradient it is the natural norm |∇L|, which costs no factorisation.  A step that widens q much is longer
    than it says, one that narrows it is shorter; with a radius of 0.1 or less the two agree within about a third.

    Below a radius of ¼ no step of `VN` leaves the cone, whatever the curvature, for then I + ρP ≥ (1 - 2√radius) I;
    below 1 no step of `SRVN` turns the sign of a diagonal entry of the root.  A radius does not replace a learning
    rate: near the optimum steps are shorter than it, and the noise that is left there follows the rate.

    Args:
        radius: the largest KL divergence of one step, in nats, positive.  The default is the largest of 0.05, 0.1, 0.2,
            0.5, 1, 2, 4 and 16 with which no run of VN, SRVN or IBLR diverged, at rates from 0.03 to 1, on logistic
            regressions of 3, 30 and 100 coefficients, with exact expectations, 8 draws and 1 draw a step; from 0.5 on
            runs on single draws end thousands of nats too high.  A Poisson and a linear regression, on which it was not
            chosen, say the same.  `Constant` has no bound.

    Raises:
        InputError: if the radius is not positive.

    >>> from torchngvi import VN, CholeskyGaussian
    >>> opt = VN(CholeskyGaussian(2), lr=0.5, step_size=KLRadius(0.1))
    """

    needs_natural = True

    def __init__(self, radius: float = 0.2) -> None:
        self.radius = read_number("radius", radius, "is a KL divergence in nats", above=0, infinite=True)

    def __repr__(self) -> str:
        """The call that makes it."""
        return f"KLRadius({self.radius:g})"

    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict[str, Any]) -> Tensor:
        """Return ρ = min(lr, √(2 radius)/|λ̇|), (*batch,)."""
        longest = (2 * self.radius / path.length2()).sqrt()
        return torch.minimum(longest, torch.ones_like(longest) * lr)


# Several limits at once: the shortest of their steps


@final
class Shortest(StepSize):
    """The smallest of several step sizes, none of which needs a trial.

    Use it to hold a step to several limits at once, such as a KL divergence and a norm.

    Args:
        parts: the step sizes to compare, such as `KLRadius(0.1)` and `Clip(5.0)`.

    Raises:
        InputError: if there are no parts.
        PairError: if one of the parts finds its step by trial.

    >>> from torchngvi.stepsizes import Clip, KLRadius
    >>> Shortest(KLRadius(0.1), Clip(5.0)).needs_natural
    True
    """

    def __init__(self, *parts: StepSize) -> None:
        if not parts:
            raise InputError("Shortest compares the steps of one step size or more; got none.")
        for part in parts:
            read_instance("Shortest", part, StepSize, "compares step sizes, such as KLRadius(0.1)", error=PairError)
            if part.needs_trial:
                raise PairError(
                    f"Shortest compares steps before they are taken, and {type(part).__name__} finds its own by "
                    "trial. Use KLRadius, Clip or Constant."
                )
        self.parts = parts
        self.needs_natural = any(part.needs_natural for part in parts)
        self.needs_tangent = any(part.needs_tangent for part in parts)

    def init(self, like: Tensor) -> dict[str, Any]:
        """Return the state of every part, under its place in the list."""
        return {str(place): part.init(like) for place, part in enumerate(self.parts)}

    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict[str, Any]) -> Tensor:
        """Return the smallest ρ (*batch,); where one part gives NaN it is NaN, and no step is taken."""
        proposals = [part.propose(path, lr, like, state[str(place)]) for place, part in enumerate(self.parts)]
        return torch.stack(proposals).amin(0)
