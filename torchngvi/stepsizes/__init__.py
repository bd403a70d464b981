"""The step sizes, which say how far along a path a step goes: by the step count, with a bound, or by trial."""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from torchngvi.arguments import is_number, read_count, read_instance, read_number
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Path, StepSize, Trial, TrialStepSize
from torchngvi.numerics import arrays  # an old path of this package is named constant

__all__ = [
    "Backtracking",
    "Clip",
    "Constant",
    "Convex",
    "KLRadius",
    "PowerSchedule",
    "Shortest",
    "SufficientDecrease",
    "harmonic_schedule",
    "theorem_schedule",
]


@final
class Constant(StepSize):
    """The step size is the learning rate, ρ = lr, with no bound on how far q moves: the update as papers print it.

    Use it to reproduce a paper, or for the one full step that is exact on a conjugate model, ``VN(q, lr=1.0,
    step_size=Constant())``.  The default of a given rate is `KLRadius`, whose steps are the same where they are
    short; without its bound a rate that is too long for the problem makes a run diverge within a few steps.

    Args:
        rate: the learning rate, positive, where the optimizer is given no ``lr``: ``SRVN(q, step_size=Constant(0.1))``
            is ``SRVN(q, lr=0.1, step_size=Constant())``.

    Raises:
        InputError: if the rate is not positive and finite; at construction of an optimizer, if it has an ``lr`` too.

    >>> Constant().propose(None, 0.5, torch.zeros(2), {}).tolist()
    [0.5, 0.5]
    """

    def __init__(self, rate: float | None = None) -> None:
        if rate is not None and not (isinstance(rate, int | float) and is_number(rate, above=0)):
            raise InputError(f"rate is a learning rate, positive and finite; got {rate!r}.")
        self.rate = rate

    def __repr__(self) -> str:
        """The call that makes it."""
        return "Constant()" if self.rate is None else f"Constant({self.rate:g})"

    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict[str, Any]) -> Tensor:
        """Return the learning rate as ρ for every member, (*batch,)."""
        if isinstance(lr, Tensor):
            return torch.ones_like(like) * lr
        return arrays.constant(lr, like.dtype, like.device).expand(like.shape)


@final
class Convex(StepSize):
    """The step size of a convex combination, ρ = lr with 0 ≤ lr ≤ 1.

    The new natural parameters η' = (1 - ρ)η + ρη̂ lie between those of q and the target η̂ of the step.  With a target
    in the cone, and so with every curvature estimate that is positive semi-definite, no step leaves it (Wu and Gardner
    2024, section 3.1).  For a model at temperature γ ≠ 1 the combination needs lr ≤ 1/γ.  Use it for stochastic
    natural-gradient VI as it is analysed; `Constant` takes longer steps too.

    Raises:
        InputError: on use, if lr is a number outside [0, 1]; a tensor outside it makes a step that is not taken.

    >>> Convex().propose(None, 0.5, torch.zeros(2), {}).tolist()
    [0.5, 0.5]
    """

    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict[str, Any]) -> Tensor:
        """Return the learning rate as ρ for every member, (*batch,)."""
        if isinstance(lr, Tensor):
            return torch.ones_like(like) * torch.where((lr >= 0) & (lr <= 1), lr, torch.nan)
        if not 0 <= lr <= 1:
            raise InputError(
                f"a step of natural-gradient VI is a convex combination, with lr in [0, 1]; got {lr:g}. "
                "Lower lr or the schedule's factor; VN takes longer steps."
            )
        return torch.ones_like(like) * lr


def theorem_schedule(t: int) -> float:
    """The step size 2/(2 + t) of stochastic natural-gradient VI with a weighted average of the iterates.

    Then E KL(average, q*) ≤ 4V/(T + 2) (Wu and Gardner 2024, Theorem 1, printed with V, which fails at T = 0 already).
    Like `harmonic_schedule` it begins with 1, which erases q_0: right for conjugate models, whose stochastic gradient
    does not depend on q; for others begin lower, ``LambdaLR(opt, theorem_schedule)`` with ``lr=0.5``.

    Args:
        t: the number of steps taken, from 0.

    Returns:
        The factor of the learning rate at step t.

    Raises:
        InputError: if the count is negative.

    >>> from torch.optim.lr_scheduler import LambdaLR
    >>> from torchngvi import VN, NaturalGaussian
    >>> opt = VN(NaturalGaussian(2), lr=1.0)
    >>> scheduler = LambdaLR(opt, theorem_schedule)
    >>> opt.param_groups[0]["lr"], theorem_schedule(2)
    (1.0, 0.5)
    """
    return 2 / (2 + _count(t))


def harmonic_schedule(t: int) -> float:
    """The step size 1/(1 + t), with which the last iterate is the plain mean of the targets of all steps.

    Args:
        t: the number of steps taken, from 0.

    Returns:
        The factor of the learning rate at step t.

    Raises:
        InputError: if the count is negative.

    >>> harmonic_schedule(3)
    0.25
    """
    return 1 / (1 + _count(t))


def _count(t: int) -> int:
    return read_count("t", t, "counts the steps taken", at_least=0)


@dataclass(frozen=True)
class PowerSchedule:
    """The factor (c' + t + 1)^{-α} of the learning rate after t steps.

    With lr = c the steps are α_k = c/(c' + k)^α, of Robbins and Monro's kind.  Use it for IFVB and AIFVB: the
    averages of AIFVB have their rates for α in (½, 1) (Godichon-Baggioni, Nguyen and Tran 2023).

    Args:
        alpha: the power α of the decay, in [0, 1].
        offset: the shift c' of the step count, not negative.

    Raises:
        InputError: if alpha or offset is out of range; on use, if the count of steps is negative.

    >>> from torch.optim.lr_scheduler import LambdaLR
    >>> from torchngvi import VN, NaturalGaussian
    >>> opt = VN(NaturalGaussian(2), lr=8.0)
    >>> scheduler = LambdaLR(opt, PowerSchedule(0.5, 15.0))
    >>> opt.param_groups[0]["lr"]  # 8/√16
    2.0
    """

    alpha: float = 0.75
    offset: float = 100.0

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "alpha", read_number("alpha", self.alpha, "is the power of the decay", at_least=0, at_most=1)
        )
        object.__setattr__(self, "offset", read_number("offset", self.offset, "is c' of c/(c' + k)^alpha", at_least=0))

    def __call__(self, t: int) -> float:
        """Return the factor of lr after t steps."""
        return (self.offset + _count(t) + 1) ** -self.alpha


# ------------------------------------------------------------------------------------ step sizes with a bound


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


# ------------------------------------------------------------------------------------ step sizes by trial


def raised(least: float, norm2: Tensor, leaves: int, share: float = 0.1) -> Tensor:
    """A limit of the squared length of a step, raised in proportion to the number of groups near the optimum."""
    # share: nats of each group.  Where L is a sum over n groups, a step in which each moves by so little is of n/10
    # nats: with limits that do not know n the number of steps would grow with n.  Far from the optimum, where the
    # squared natural norm of the gradient is above n, the promise of a step holds no better than for a dense q.
    near = torch.full_like(norm2, max(least, share * leaves))
    return torch.where(norm2 <= leaves, near, least)


_SHORTEST, _LONGEST = 0.1, 0.5  # limits of one cut


def _compared(trial: Trial) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The promised decrease, what is lacking of it, and the decrease with the rounding, and with the slack too."""
    promised, decrease = trial.rho * trial.slope, trial.before - trial.after
    size = trial.before.abs().clamp_min(1.0)
    fallen = torch.add(decrease, size, alpha=64 * torch.finfo(size.dtype).eps)
    lenient = fallen + trial.slack if isinstance(trial.slack, Tensor) else fallen
    return promised, promised - decrease, fallen, lenient


@final
class Backtracking(TrialStepSize):
    """Steps found by trial that begin with the whole one: ρ = lr, and shorter after each that is refused.

    A trial at ρ is kept where L(q') ≤ L(q) - c ρ s, with s = -dL/dρ at 0 (Armijo 1966).  After one that is not, the
    next ρ is the minimiser of the parabola through L(q), the slope and L(q'), between a tenth and half of ρ; after one
    that is kept, the next is whole again.  Use it for steps of Newton, whose length is right near the optimum; for
    natural gradients `SufficientDecrease` remembers how far they may go.

    Args:
        decrease: the share c of the promised decrease that a kept step must reach, in (0, 0.5).

    Raises:
        InputError: if the share is out of range.

    >>> control = Backtracking()
    >>> one, state = torch.tensor(1.0), control.init(torch.tensor(0.0))
    >>> kept, state = control.judge(Trial(one, 2 * one, one, one, one), state)  # L rose where it was to fall
    >>> kept.item(), round(state["share"].item(), 3)
    (False, 0.25)
    """

    def __init__(self, decrease: float = 0.1) -> None:
        self.decrease = read_number("decrease", decrease, "is a share of the promised decrease", above=0, below=0.5)

    def init(self, like: Tensor) -> dict[str, Tensor]:
        """Return that the next step of every member is whole."""
        return {"share": torch.ones_like(like)}

    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict[str, Any]) -> Tensor:
        """Return the share of the learning rate, (*batch,)."""
        return state["share"] * lr

    def judge(self, trial: Trial, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Keep the trial where L fell by c ρ s up to rounding, and cut the next where it did not; a NaN is refused."""
        promised, bend, _, fallen = _compared(trial)
        cut = (0.5 * promised / bend).masked_fill(bend <= 0, _SHORTEST).nan_to_num(_SHORTEST)
        share = cut.clamp(_SHORTEST, _LONGEST) * state["share"]
        accept = fallen >= self.decrease * promised
        return accept, {"share": share.masked_fill(accept, 1.0)}


_GOOD = 0.3  # share of the promised decrease after which the reach may grow
_CAP_UP, _CAP_DOWN, _CAP_FLOOR = 2.0, 0.7, 0.1  # limits of one change of the cap


@final
class SufficientDecrease(TrialStepSize):
    """Steps found by trial: ρ = min(lr, reach/|direction|, cap), kept where the objective decreases enough.

    A trial at ρ is kept if L(q') ≤ L(q) - c ρ s with s = -dL/dρ at 0 (Armijo 1966).  Far from the optimum a *reach* in
    the natural norm bounds the next ρ, so that one step changes q by about ½ reach² nats; it grows after good steps, as
    the radius of a trust region does (Conn, Gould and Toint 2000, section 6.1).  After a first rejection a *cap* on ρ
    itself does: the minimiser of the parabola through L(q), the slope and L(q'), since near the optimum the best ρ is a
    property of the problem, not of the distance left.  Both are numbers of each batch member, and nothing is read back
    from the device.

    Use it wherever two values of the objective can be compared, as the default that needs no learning rate; for
    mini-batches and fresh draws, whose values cannot be compared, `Constant` or `KLRadius` take its place.

    Args:
        radius: ½ reach² of the first step, in nats, positive; n/10 where q is over a forest of n leaves, that is more
            than the radius, and the squared natural norm of the gradient is at most n.
        decrease: the share c of the promised decrease that a kept step must reach, in (0, 0.5).
        grow, shrink: the factors of the reach after a good step, above 1, and after a rejected one, in (0, 1).

    Raises:
        InputError: if a setting is out of range.

    >>> from torchngvi import VN, CholeskyGaussian, GeneralizedLinear
    >>> opt = VN(CholeskyGaussian(2), step_size=SufficientDecrease(radius=1.0))
    >>> loss = opt.step(GeneralizedLinear(torch.eye(2), [0.0, 1.0]))
    """

    def __init__(self, radius: float = 4.0, decrease: float = 0.1, *, grow: float = 4.0, shrink: float = 0.25) -> None:
        self.radius = read_number("radius", radius, "is a KL divergence in nats", above=0, infinite=True)
        self.decrease = read_number("decrease", decrease, "is a share of the promised decrease", above=0, below=0.5)
        self.grow = read_number("grow", grow, "is a factor", above=1)
        self.shrink = read_number("shrink", shrink, "is a factor", above=0, below=1)

    def init(self, like: Tensor) -> dict[str, Tensor]:
        """Return a reach of √(2 radius) and no cap for every member."""
        return {"reach": torch.full_like(like, (2 * self.radius) ** 0.5), "cap": torch.full_like(like, torch.inf)}

    def propose(self, path: Path, lr: float | Tensor, like: Tensor, state: dict[str, Any]) -> Tensor:
        """Return ρ = min(lr, reach/|∇L|, cap), (*batch,); the reach of many groups is raised until a trial fails."""
        norm2, reach, cap = path.norm2(), state["reach"], state["cap"]
        if path.leaves > 1:
            wide = (2 * raised(self.radius, norm2, path.leaves)).sqrt()
            reach = torch.where(cap.isinf(), torch.maximum(reach, wide), reach)
        return torch.minimum(reach / norm2.sqrt(), cap).clamp_max(lr)

    def judge(self, trial: Trial, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Keep the trial where L fell by c ρ s up to rounding, and adapt reach and cap; a NaN is a rejection."""
        rho, length, cap = trial.rho, trial.length, state["cap"]
        promised, bend, fallen, lenient = _compared(trial)
        accept = lenient >= self.decrease * promised
        good = fallen >= _GOOD * promised

        grown = torch.where(good, torch.maximum(state["reach"], self.grow * length), state["reach"])
        reach = torch.where(accept, grown, self.shrink * length)

        # argmin of L - ρs + ½κρ², as a multiple of ρ: ½ s ρ / (sρ - (L - L')); straight lines have none
        best = (0.5 * promised / bend).masked_fill(bend <= 0, torch.inf)
        kept_cap = torch.where(cap == torch.inf, cap, rho * best.clamp(_CAP_DOWN, _CAP_UP))
        cut = best.nan_to_num(_CAP_FLOOR).clamp(_CAP_FLOOR, 0.5)  # a NaN, of a trial that is none, as an infinite bend
        return accept, {"reach": reach, "cap": torch.where(accept, kept_cap, rho * cut)}
