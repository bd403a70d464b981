"""How a posterior may be asked to move, and the path of such moves that a rule returns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from torchngvi.structures.pattern import Structured


class Coordinates(NamedTuple):
    """What a posterior stores: (m, C), (m, T), (Sm, S)."""

    vector: Tensor  # (*batch, D)
    matrix: Structured


class Congruence(NamedTuple):
    """V' = C N⁻¹ Cᵀ,  m' = m + C N⁻¹ f: the same q' in all coordinates."""

    N: Structured
    force: Tensor  # f, (*batch, D)


class Tangent(NamedTuple):
    """λ' = λ + change, in the posterior's own coordinates: another curve in each."""

    change: Coordinates


class RootTangent(Tangent):
    """A tangent for posteriors with a Euclidean gradient: in mean and root of V or of S, or in a flat vector."""


class LogTangent(RootTangent):
    """The same with the diagonal of the root moving by its logarithm: Λ_ii' = Λ_ii exp(change_ii)."""


class Affine(NamedTuple):
    """θ' = m + s + M (θ - m)."""

    M: Structured
    s: Tensor  # (*batch, D)


class Root(NamedTuple):
    """m' and C' themselves, V' = C'C'ᵀ, for posteriors that hold a root; entries that are not finite leave the cone."""

    mean: Tensor  # (*batch, D)
    root: Structured  # lower triangular


Move = Congruence | Tangent | Affine | Root


@dataclass(frozen=True)
class Path:
    """A curve of moves from q.  The norms are functions: a constant step never reads them."""

    at: Callable[[Tensor], Move]  # ρ (*batch,) -> move
    norm2: Callable[[], Tensor]  # squared natural norm of the gradient that it follows, (*batch,)
    slope: Callable[[], Tensor]  # -dL/dρ at 0, (*batch,)

    def in_units_of(self, unit: float) -> "Path":
        """The same curve with ρ measured in another unit."""
        if unit == 1.0:
            return self
        return Path(lambda rho: self.at(unit * rho), lambda: unit**2 * self.norm2(), lambda: unit * self.slope())
