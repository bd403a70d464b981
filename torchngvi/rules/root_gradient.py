"""Euclidean gradient descent in the mean and a root.

    in (m, C)   m' = m - ρ g,  C' = C - ρ tril[G C]
    in (m, T)   m' = m - ρ g,  T' = T + ρ tril[V G T⁻ᵀ]        G = H - γS

What an optimizer for the mean and a Cholesky factor follows, for instance that of Titsias and
Lázaro-Gredilla (2014), with exact expectations; ∂L/∂C = GC (Kumar et al. 2025, Eqs 16 and 37), of which
the lower part is kept.  From one draw it is Algorithm 1a of Tan (2025) on C, and 2a on T.
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Coordinates, Expectation, Path, Posterior, RootTangent, Rule


@final
class RootGradient(Rule):
    """RootTangent(-ρ∇L), ∇L as the posterior gives it for its own root."""

    emits = RootTangent
    natural = False

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """The straight line from q in its coordinates."""
        gradient, structure = q.euclidean(e), q.structure

        def at(rho: Tensor) -> RootTangent:
            return RootTangent(Coordinates(-rho[..., None] * gradient.vector, structure.scaled(-rho, gradient.matrix)))

        def slope() -> Tensor:
            # dL/dρ = -|∂L/∂m|² - ‖∂L/∂Λ‖²_F
            return structure.dot(gradient.vector, gradient.vector) + structure.entries_norm2(gradient.matrix)

        return Path(at, lambda: q.norm2(q.local(e)), slope)
