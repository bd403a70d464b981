"""Euclidean gradient descent in the mean and a root.

    in (m, C)   m' = m - ρ g,  C' = C - ρ tril[G C]
    in (m, T)   m' = m - ρ g,  T' = T + ρ tril[V G T⁻ᵀ]        G = H - γS

It is what an optimizer for the mean and a Cholesky factor follows, for instance that of Titsias and
Lázaro-Gredilla (2014), with exact expectations; ∂L/∂C = GC (Kumar et al. 2025, Eqs 16 and 37), of which
the lower part is kept.  From one draw it is Algorithm 1a of Tan (2025) on C, and 2a on T.
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Coordinates, Expectation, Path, Posterior, RootTangent, Rule
from torchngvi.rules.lengths import root_speed2


@final
class RootGradient(Rule):
    """Euclidean gradient descent in the mean and the triangular root that the posterior stores, or in a flat vector.

    The gradient is the one that the posterior gives for its own root: ∂L/∂C = tril[GC], or that in T where it holds
    S = T Tᵀ.  One wants it as the Euclidean baseline of the natural rules; for a flat posterior it follows whatever the
    metric has made of the gradient, which is how IFVB moves.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # C = 1
    >>> opt = NaturalGradientVI(q, RootGradient(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that ∂L/∂C = 3
    >>> round(q.variance.item(), 4)  # (1 - 0.1 · 3)²
    0.49
    """

    emits = RootTangent
    natural = False

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the straight line from q, in its own coordinates, along the negative Euclidean gradient."""
        gradient, structure = q.euclidean(e), q.structure

        def at(rho: Tensor) -> RootTangent:
            return RootTangent(Coordinates(-rho[..., None] * gradient.vector, structure.scaled(-rho, gradient.matrix)))

        def slope() -> Tensor:
            # dL/dρ = -|∂L/∂m|² - ‖∂L/∂Λ‖²_F
            return structure.dot(gradient.vector, gradient.vector) + structure.entries_norm2(gradient.matrix)

        return Path(at, lambda: q.norm2(q.local(e)), slope, speed2=lambda: root_speed2(q, gradient))
