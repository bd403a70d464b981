"""Gaussian SVGD: every point of q moves with the Stein velocity of the kernel xᵀy + 1.

    θ' = θ + ε (Bθ - g),   B = γI - HV - g mᵀ = -(GV + g mᵀ),   G = H - γS

The mean-field limit of Gaussian-SVGD (Liu et al. 2024, Algorithm 1), "SVGD-density" in Kumar et al.
(2025), Appendix G; the form follows from E_q[∇ℓ yᵀ] = HV + g mᵀ.  The kernel is not free of the
origin: the mean's step is stable only below about 2/(λ_max(H) (1 + |m|²)).  A diagonal q takes one
kernel x_i y_i + 1 a coordinate, so that B stays diagonal.
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Affine, Expectation, Path, Posterior, Rule
from torchngvi.structures import FullAlgebra


@final
class SVGD(Rule):
    """Affine(I + εB, ε(Bm - g))."""

    emits = Affine
    natural = False
    full_algebra = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """The path ε -> (I + εB) V (I + εB)ᵀ."""
        local, frame, structure = q.local(e), q.frame(), q.structure
        assert isinstance(structure, FullAlgebra)
        g, G = q.unframe(local.a, local.P)
        V = structure.matmul(frame.root, structure.transpose(frame.root))
        B = -structure.matmul(G, V) - structure.lower(g[..., None, :], frame.mean[..., None, :])
        velocity = structure.mv(B, frame.mean) - g

        def at(rho: Tensor) -> Affine:
            return Affine(structure.eye(g) + structure.scaled(rho, B), rho[..., None] * velocity)

        def slope() -> Tensor:
            # dL/dε = gᵀ(Bm - g) + tr(GBV) = -|g|² - ‖B‖²_F
            return structure.dot(g, g) + structure.entries_norm2(B)

        return Path(at, lambda: q.norm2(local), slope)
