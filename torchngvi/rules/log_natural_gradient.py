"""The natural gradient in the unique coordinates of a root Λ: log Λ_ii on the diagonal, Λ_ij below it.

    change of log Λ_ii = -ρ Λ̇_ii / Λ_ii        change of Λ_ij = -ρ Λ̇_ij

with Λ̇ the natural gradient in Λ: natural gradients change coordinates as velocities do (Tan 2025, Eq 4, and
section 3, R*⊙∇̃L with 1/Λ_ii on the diagonal of R*).  The diagonal stays positive for every ρ.
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Coordinates, Expectation, LogTangent, Path, Posterior, Rule


@final
class LogNaturalGradient(Rule):
    """Natural-gradient descent in the logarithms of the diagonal of q's root and its entries below the diagonal.

    The step is straight in log Λ_ii and Λ_ij, so that the diagonal of the root stays positive for every step size.  One
    wants it to follow Tan (2025), or where `NaturalGradient` in the same root takes steps that are rejected because a
    diagonal entry would change its sign.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> opt = NaturalGradientVI(CholeskyGaussian(3), LogNaturalGradient(), lr=0.1)
    """

    emits = LogTangent
    natural = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path that is straight in the logarithms of the diagonal, along the negative natural gradient."""
        vector, matrix = q.tangent(e)
        structure = q.structure
        diagonal = structure.diagonal(matrix) / structure.diagonal(q.coordinates.matrix)
        velocity = structure.with_diagonal(matrix, diagonal)

        def at(rho: Tensor) -> LogTangent:
            return LogTangent(Coordinates(-rho[..., None] * vector, structure.scaled(-rho, velocity)))

        def norm2() -> Tensor:
            return q.norm2(q.local(e))

        return Path(at, norm2, norm2)
