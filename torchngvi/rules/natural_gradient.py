"""The natural gradient in q's own coordinates, λ' = λ - ρ F⁻¹∇L.

On (m, C) it is SR-VN, C' = C - ρ C tril½[P], m' = m - ρ C a (Kumar et al. 2025, Eq 17, equal to
Tan 2025, Theorem 2); on (S m, S) it is VN.  The coordinates decide: tril½ depends on the root.
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Coordinates, Expectation, Path, Posterior, Rule, Tangent


@final
class NaturalGradient(Rule):
    """Natural-gradient descent along a straight line in the coordinates that the posterior stores, λ' = λ - ρλ̇.

    The natural gradient λ̇ = F⁻¹∇L is the one that the posterior gives for its own coordinates, so that the choice of
    the posterior decides the curve: with a `CholeskyGaussian` this is SR-VN, with a `NaturalGaussian` it is VN.  One
    wants it as the plain natural-gradient method of a posterior; a step that is too long may leave the positive
    definite cone, and is then not taken.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # V = 1
    >>> opt = NaturalGradientVI(q, NaturalGradient(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that P = 3
    >>> round(q.variance.item(), 4)  # (1 - 0.1 · ½ · 3)²
    0.7225
    """

    emits = Tangent
    natural = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the straight line from q, in its own coordinates, along the negative natural gradient."""
        velocity = q.tangent(e)

        def at(rho: Tensor) -> Tangent:
            change = Coordinates(-rho[..., None] * velocity.vector, q.structure.scaled(-rho, velocity.matrix))
            return Tangent(change)

        def norm2() -> Tensor:
            return q.norm2(q.local(e))

        return Path(at, norm2, norm2)
