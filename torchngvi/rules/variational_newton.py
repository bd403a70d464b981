"""VN: the precision moves to the expected Hessian, S' = (1 - γρ) S + ρH, m' = m - ρ S'⁻¹ g.

In the frame N = I + ρP and m' = m - ρ C N⁻¹ a: the same q' in all coordinates
(Kumar et al. 2025, Eq 7; Khan and Rue 2023, the Bayesian learning rule for full Gaussians).
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Congruence, Expectation, Path, Posterior, Rule


@final
class VariationalNewton(Rule):
    """Congruence(I + ρP, -ρa): positive definite for every ρ < 1/γ where ℓ is convex."""

    emits = Congruence
    natural = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """The path ρ -> C (I + ρP)⁻¹ Cᵀ."""
        local = q.local(e)
        eye = q.structure.eye(local.a)

        def at(rho: Tensor) -> Congruence:
            return Congruence(eye + q.structure.scaled(rho, local.P), -rho[..., None] * local.a)

        norm2 = q.norm2(local)
        return Path(at, lambda: norm2, lambda: norm2)  # dL/dρ = -|∇L|²_F⁻¹
