"""Gaussian SVGD with the kernel (x - m)ᵀ(y - m) + 1, which does not depend on the origin.

    θ' = θ + ε (B(θ - m) - g),   B = γI - HV = -GV,   G = H - γS

With V⁻¹ inside the product the same construction is BW-GD, B = -G.  Near the optimum the covariance
contracts by 1 - 2γε for every conditioning, the mean by 1 - εH.
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Affine, Expectation, Path, Posterior, Rule
from torchngvi.structures import FullAlgebra


@final
class CenteredSVGD(Rule):
    """Affine(I + εB, -εg)."""

    emits = Affine
    natural = False
    full_algebra = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """The path ε -> (I + εB) V (I + εB)ᵀ."""
        local, frame, structure = q.local(e), q.frame(), q.structure
        assert isinstance(structure, FullAlgebra)
        g, G = q.unframe(local.a, local.P)
        V = structure.matmul(frame.root, structure.transpose(frame.root))
        B = -structure.matmul(G, V)

        def at(rho: Tensor) -> Affine:
            return Affine(structure.eye(g) + structure.scaled(rho, B), -rho[..., None] * g)

        def slope() -> Tensor:
            # dL/dε = -|g|² + tr(GBV) = -|g|² - ‖B‖²_F
            return structure.dot(g, g) + structure.entries_norm2(B)

        return Path(at, lambda: q.norm2(local), slope)
