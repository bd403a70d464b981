"""Euclidean gradient descent in (m, C): m' = m - ρ g, C' = C - ρ tril[G C], G = H - γS.

What an optimizer for the mean and a Cholesky factor follows, for instance that of Titsias and
Lázaro-Gredilla (2014), with exact expectations; ∂L/∂C = GC (Kumar et al. 2025, Eqs 16 and 37), of which
the lower part is kept.
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Expectation, Path, Posterior, Root, Rule


@final
class RootGradient(Rule):
    """Root(m - ρg, C - ρ tril[GC])."""

    emits = Root
    natural = False

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """The straight line from (m, C)."""
        local, frame, structure = q.local(e), q.frame(), q.structure
        g, G = q.unframe(local.a, local.P)
        gradient = structure.tril(structure.matmul(G, frame.root))

        def at(rho: Tensor) -> Root:
            return Root(frame.mean - rho[..., None] * g, frame.root - structure.scaled(rho, gradient))

        def slope() -> Tensor:
            # dL/dρ = -|∂L/∂m|² - ‖∂L/∂C‖²_F
            return g.square().sum(-1) + structure.norm2(gradient)

        return Path(at, lambda: q.norm2(local), slope)
