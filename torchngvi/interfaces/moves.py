"""How a posterior may be asked to move, and the path of such moves that a rule returns.

A rule names the kind of move that it makes as ``emits``, a posterior the kinds that it can make as ``takes``; a pair
that does not fit is refused when the optimizer is made.  `Congruence`, `Affine` and `Root` lead to the same q' in
whatever coordinates q is stored; `Tangent` and its kinds are straight lines in those coordinates, and so differ.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from torchngvi.structures.pattern import Structured


class Coordinates(NamedTuple):
    """What a posterior stores, or a change of it: a vector and a matrix, such as (m, C), (m, T) or (S m, S).

    >>> from torchngvi import NaturalGaussian
    >>> NaturalGaussian(1, mean=3.0, scale=0.5).coordinates.vector.tolist()
    [12.0]
    """

    vector: Tensor  # (*batch, D)
    matrix: Structured


class Congruence(NamedTuple):
    """Move to V' = C N⁻¹ Cᵀ and m' = m + C N⁻¹ f, which is the same q' in all coordinates.

    N is symmetric and must be positive definite; a member for which it is not leaves the cone.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> move = Congruence(torch.tensor([[4.0]]), torch.tensor([-2.0]))
    >>> new, inside = CholeskyGaussian(1).moved(move)
    >>> new.vector.tolist(), new.matrix.tolist(), bool(inside)
    ([-0.5], [[0.5]], True)
    """

    N: Structured
    force: Tensor  # f, (*batch, D)


class Tangent(NamedTuple):
    """Move along a straight line in the posterior's own coordinates, λ' = λ + change.

    In other coordinates the same natural gradient gives another curve, which agrees with this one to first order only.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> move = Tangent(Coordinates(torch.tensor([1.0]), torch.tensor([[2.0]])))
    >>> CholeskyGaussian(1).moved(move)[0].matrix.tolist()
    [[3.0]]
    """

    change: Coordinates


class RootTangent(Tangent):
    """A tangent in coordinates that have a Euclidean gradient: mean and root of V or of S, or a flat vector.

    Rules that follow ∇L itself, such as `RootGradient`, emit it, because they read `Posterior.euclidean`.

    >>> from torchngvi import CholeskyGaussian, NaturalGaussian
    >>> RootTangent in CholeskyGaussian.takes, RootTangent in NaturalGaussian.takes
    (True, False)
    """


class LogTangent(RootTangent):
    """A root tangent along which the diagonal of the root Λ moves by its logarithm: Λ_ii' = Λ_ii exp(change_ii).

    The diagonal stays positive for every step size, so that no member leaves the cone except by overflow.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> move = LogTangent(Coordinates(torch.zeros(1), torch.tensor([[-1.0]])))
    >>> round(CholeskyGaussian(1).moved(move)[0].matrix.item(), 4)  # exp(-1)
    0.3679
    """


class Affine(NamedTuple):
    """Map the random variable: θ' = m + s + M (θ - m), so that m' = m + s and V' = M V Mᵀ.

    M must be regular; transport rules such as `BuresWasserstein` emit this move.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> new, _ = CholeskyGaussian(1, mean=1.0).moved(Affine(torch.tensor([[2.0]]), torch.tensor([0.5])))
    >>> new.vector.tolist(), new.matrix.tolist()
    ([1.5], [[2.0]])
    """

    M: Structured
    s: Tensor  # (*batch, D)


class Root(NamedTuple):
    """Replace mean and root by m' and C' as they stand, V' = C'C'ᵀ, in posteriors that hold a root of the covariance.

    A member whose entries are not all finite counts as outside of the cone.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> CholeskyGaussian(1).moved(Root(torch.zeros(1), torch.tensor([[torch.inf]])))[1].item()
    False
    """

    mean: Tensor  # (*batch, D)
    root: Structured  # lower triangular


Move = Congruence | Tangent | Affine | Root
"""What a rule may ask of a posterior."""


@dataclass(frozen=True)
class Path:
    """The curve of moves from q that a rule returns, with what a step size may want to know of it.

    The norm and the slope are functions, since they may be dear and a constant step size never reads them.

    Attributes:
        at: the move at step size ρ (*batch,), one a member; ρ = 0 is q itself.
        norm2: the squared natural norm |a|² + ½‖P‖²_F of the gradient that the path follows, (*batch,).
        slope: -dL/dρ at ρ = 0, (*batch,), positive where the path goes down.
        change2: the squared length of the change of q's own coordinates at ρ = 1, (*batch,), each stored entry counted
            once; the optimizer says it to a step size that asks for it by ``needs_tangent``.
        leaves: the number of blocks of coordinates that are independent under q given the others, over which L is about
            a sum; the optimizer says it to a step size that finds its steps by trial.
        speed2: the squared length of dq/dρ at ρ = 0 in the Fisher metric, (*batch,), of a path that does not follow the
            natural gradient; None where it is ``norm2``.

    >>> import torch
    >>> path = Path(lambda rho: rho, lambda: torch.tensor(4.0), lambda: torch.tensor(4.0))
    >>> path.in_units_of(0.5).slope().item()
    2.0
    """

    at: Callable[[Tensor], Move]  # ρ (*batch,) -> move
    norm2: Callable[[], Tensor]  # squared natural norm of the gradient that it follows, (*batch,)
    slope: Callable[[], Tensor]  # -dL/dρ at 0, (*batch,)
    change2: Callable[[], Tensor] | None = None  # squared length of the change of q's coordinates at ρ = 1, (*batch,)
    leaves: int = 1
    speed2: Callable[[], Tensor] | None = None  # squared length of dq/dρ at 0 in the Fisher metric; None for norm2

    def length2(self) -> Tensor:
        """Compute the squared length of dq/dρ at ρ = 0 in the Fisher metric, (*batch,): KL(q'‖q) ≈ ½ρ² of it."""
        return self.norm2() if self.speed2 is None else self.speed2()

    def in_units_of(self, unit: float) -> "Path":
        """Return the same curve with ρ measured in another unit: at 1 it is where this path is at ``unit``."""
        if unit == 1.0:
            return self
        return Path(
            lambda rho: self.at(unit * rho),
            lambda: unit**2 * self.norm2(),
            lambda: unit * self.slope(),
            speed2=lambda: unit**2 * self.length2(),
        )


def once(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Make a function that computes its value at the first call and returns the same one afterwards.

    It is for the norm and the slope of a `Path`, which some step sizes ask for several times and others never.

    Args:
        compute: computes the value, whenever it is called, from what does not change.

    Returns:
        The function.

    >>> import torch
    >>> draw = once(lambda: torch.randn(()))
    >>> bool(draw() == draw())
    True
    """
    found: list[Tensor] = []

    def value() -> Tensor:
        if not found:
            found.append(compute())
        return found[0]

    return value
