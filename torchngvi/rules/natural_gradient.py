"""The natural gradient in q's own coordinates, λ' = λ - ρ F⁻¹∇L.

On (m, C) it is SR-VN, C' = C - ρ C tril½[P], m' = m - ρ C a (Kumar et al. 2025, Eq 17, equal to
Tan 2025, Theorem 2); on (S m, S) it is VN.  The coordinates decide: tril½ depends on the root.
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Coordinates, Expectation, Path, Posterior, Rule, Tangent


@final
class NaturalGradient(Rule):
    """Tangent(-ρλ̇), λ̇ the natural gradient as the posterior gives it."""

    emits = Tangent
    natural = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """The straight line from q in its coordinates."""
        velocity = q.tangent(e)

        def at(rho: Tensor) -> Tangent:
            change = Coordinates(-rho[..., None] * velocity.vector, q.structure.scaled(-rho, velocity.matrix))
            return Tangent(change)

        def norm2() -> Tensor:
            return q.norm2(q.local(e))

        return Path(at, norm2, norm2)
