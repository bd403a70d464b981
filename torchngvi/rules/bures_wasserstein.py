"""BW-GD: gradient descent in the Bures-Wasserstein metric (Lambert et al. 2022, Algorithm 1).

    m' = m - α g,   V' = M V M,   M = I - α (H - γS)

Its rate depends on the conditioning of the posterior: stable for α < 1/λ_max(H) or so.
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Affine, Expectation, Path, Posterior, Rule


@final
class BuresWasserstein(Rule):
    """Affine(I - αG, -αg) with G = C⁻ᵀPC⁻¹ = H - γS."""

    emits = Affine
    natural = False
    full_algebra = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """The path α -> (I - αG) V (I - αG)."""
        local = q.local(e)
        g, G = q.unframe(local.a, local.P)
        eye = q.structure.eye(g)

        def at(rho: Tensor) -> Affine:
            return Affine(eye - q.structure.scaled(rho, G), -rho[..., None] * g)

        def slope() -> Tensor:
            # dL/dα = -|g|² - ‖G C‖²_F
            return q.structure.dot(g, g) + q.structure.entries_norm2(q.structure.matmul(G, q.frame().root))

        return Path(at, lambda: q.norm2(local), slope)
