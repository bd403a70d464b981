"""Proximal gradient descent in (m, C): a step on E_q[ℓ], then the proximal map of the entropy.

    m' = m - ρg        C⁺ = C - ρ tril[HC]        C'_ii = ½(C⁺_ii + √(C⁺_ii² + 4γρ))

C'_ii minimises -γρ log c + ½(c - C⁺_ii)² (Domke 2020, section 4; analysed with projected steps in Kim, Ma and
Gardner 2024).  The diagonal stays positive at every ρ, and no smoothness constant is needed.  For estimators that
leave the entropy out, such as `Reparametrized`: sticking the landing draws it.
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Expectation, Path, Posterior, Root, Rule


@final
class ProximalRootGradient(Rule):
    """Root(m - ρg, prox of -γρ Σ log C_ii at C - ρ tril[HC])."""

    emits = Root
    natural = False

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """The curve from (m, C), which starts along -∇L."""
        gradient, frame, structure = q.euclidean(e), q.frame(), q.structure
        inverse = e.temperature / structure.diagonal(frame.root)  # of the entropy: γ tril[C⁻ᵀ]

        def at(rho: Tensor) -> Root:
            step = rho[..., None]
            root = frame.root - structure.scaled(rho, gradient.matrix)
            diagonal = structure.diagonal(root)
            forward = diagonal - step * inverse
            backward = 0.5 * (forward + (forward.square() + 4 * e.temperature * step).sqrt())
            return Root(frame.mean - step * gradient.vector, structure.with_diagonal(root, backward))

        def slope() -> Tensor:
            return structure.dot(gradient.vector, gradient.vector) + structure.entries_norm2(gradient.matrix)

        return Path(at, lambda: q.norm2(q.local(e)), slope)
