"""The improved Bayesian learning rule, iBLR: VN with a second-order term that keeps every step in the cone.

    S' = (1 - γρ) S + ρH + ½ρ² G S⁻¹ G,  G = H - γS;   m' = m - ρ S⁻¹ g, with the old S

(Lin, Schmidt and Khan 2020).  In the frame N = I + ρP + ½ρ²P² = ½(I + (I + ρP)²), whose
eigenvalues are at least ½: positive definite for every ρ and every H, convex or not.
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Congruence, Expectation, Path, Posterior, Rule


@final
class Retraction(Rule):
    """Congruence(I + ρP + ½ρ²P², -ρNa)."""

    emits = Congruence
    natural = True
    full_algebra = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """The path ρ -> C (I + ρP + ½ρ²P²)⁻¹ Cᵀ."""
        local, structure = q.local(e), q.structure
        eye = structure.eye(local.a)

        def at(rho: Tensor) -> Congruence:
            step = structure.scaled(rho, local.P)
            N = eye + step + 0.5 * structure.matmul(step, step)
            return Congruence(N, -rho[..., None] * structure.mv(N, local.a))

        norm2 = q.norm2(local)
        return Path(at, lambda: norm2, lambda: norm2)
