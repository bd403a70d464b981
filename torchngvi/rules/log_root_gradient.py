"""Euclidean gradient descent in the unique coordinates of a root Λ: log Λ_ii on the diagonal, Λ_ij below it.

    change of log Λ_ii = -ρ Λ_ii ∂L/∂Λ_ii        change of Λ_ij = -ρ ∂L/∂Λ_ij

by the chain rule.  Tan (2025), section 3, R⊙∇L with Λ_ii on the diagonal of R; the printed line has the gradient
in the new coordinates on both sides, the right one is that in Λ.  The diagonal stays positive for every ρ.
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Coordinates, Expectation, LogTangent, Path, Posterior, Rule
from torchngvi.rules.lengths import root_speed2


@final
class LogRootGradient(Rule):
    """Euclidean gradient descent in the logarithms of the diagonal of q's root and its entries below the diagonal.

    This is what an ordinary optimizer does to the unconstrained parametrisation by log Λ_ii and Λ_ij.  One wants it as
    the Euclidean baseline of `LogNaturalGradient`.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> opt = NaturalGradientVI(CholeskyGaussian(3), LogRootGradient(), lr=0.1)
    """

    emits = LogTangent
    natural = False

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path that is straight in the logarithms of the diagonal, along the negative Euclidean gradient."""
        vector, matrix = q.euclidean(e)
        structure = q.structure
        diagonal = structure.diagonal(matrix) * structure.diagonal(q.coordinates.matrix)
        gradient = structure.with_diagonal(matrix, diagonal)

        def at(rho: Tensor) -> LogTangent:
            return LogTangent(Coordinates(-rho[..., None] * vector, structure.scaled(-rho, gradient)))

        def slope() -> Tensor:
            return structure.dot(vector, vector) + structure.entries_norm2(gradient)

        def speed2() -> Tensor:
            root = structure.diagonal(q.coordinates.matrix)
            return root_speed2(q, Coordinates(vector, structure.with_diagonal(matrix, diagonal * root)))

        return Path(at, lambda: q.norm2(q.local(e)), slope, speed2=speed2)
