"""Euclidean gradient descent in (m, V): m' = m - ρ g, V' = V - ½ρ G, G = H - γS.

Kumar et al. (2025), Eq 4 with Eqs 33 and 34.  Nothing keeps V' in the cone: a step that leaves it is
not taken.  Its stable step follows the square of the curvature: ρ < 4γ/λ_max(H)² near the optimum.
"""

from typing import final

import torch
from torch import Tensor

from torchngvi.interfaces import Expectation, Path, Posterior, Root, Rule
from torchngvi.structures import FullAlgebra


@final
class CovarianceGradient(Rule):
    """Root(m - ρg, cholesky(V - ½ρG)), NaN where V - ½ρG has no factor."""

    emits = Root
    natural = False
    full_algebra = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """The straight line from (m, V)."""
        local, frame, structure = q.local(e), q.frame(), q.structure
        assert isinstance(structure, FullAlgebra)
        g, G = q.unframe(local.a, local.P)
        V = structure.matmul(frame.root, structure.transpose(frame.root))

        def at(rho: Tensor) -> Root:
            root, ok = structure.cholesky(V - structure.scaled(0.5 * rho, G))
            factor = torch.where(ok, torch.ones_like(rho), torch.nan)
            return Root(frame.mean - rho[..., None] * g, structure.scaled(factor, root))

        def slope() -> Tensor:
            # dL/dρ = -|g|² + ½ tr(G V̇) = -|g|² - ¼‖G‖²_F
            return structure.dot(g, g) + 0.25 * structure.norm2(G)

        return Path(at, lambda: q.norm2(local), slope)
