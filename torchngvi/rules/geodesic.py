"""The precision along a geodesic of the positive definite cone: S' = C⁻ᵀ exp(ρP) C⁻¹, m' = m - ρ C a.

The exponential map in local coordinates (m + Cδ, C⁻ᵀ exp(·) C⁻¹) (Lin, Nielsen, Khan and Schmidt
2021); for the covariance alone it is the geodesic of the Fisher metric.  Positive definite for
every ρ and every H; of its series iBLR keeps three terms and VN two.
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Congruence, Expectation, Path, Posterior, Rule
from torchngvi.structures import FullAlgebra


@final
class Geodesic(Rule):
    """Congruence(exp(ρP), -ρNa)."""

    emits = Congruence
    natural = True
    full_algebra = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """The path ρ -> C exp(-ρP) Cᵀ."""
        local, structure = q.local(e), q.structure
        assert isinstance(structure, FullAlgebra)

        def at(rho: Tensor) -> Congruence:
            N = structure.exp(structure.scaled(rho, local.P))
            return Congruence(N, -rho[..., None] * structure.mv(N, local.a))

        norm2 = q.norm2(local)
        return Path(at, lambda: norm2, lambda: norm2)
