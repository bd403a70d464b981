"""Proximal gradient descent in (m, C): a step on E_q[ℓ], then the proximal map of the entropy.

    m' = m - ρg        C⁺ = C - ρ tril[HC]        C'_ii = ½(C⁺_ii + √(C⁺_ii² + 4γρ))

C'_ii minimises -γρ log c + ½(c - C⁺_ii)² (Domke 2020, section 4; analysed with projected steps in Kim, Ma and
Gardner 2024).  The diagonal stays positive at every ρ, and no smoothness constant is needed.  It is for
estimators that leave the entropy out, such as `Reparametrized`; those that stick the landing draw it.
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Expectation, Path, Posterior, Root, Rule
from torchngvi.rules.lengths import root_speed2


@final
class ProximalRootGradient(Rule):
    """Proximal gradient descent in the mean and the root: a step on E_q[ℓ], then the proximal map of the entropy.

    The proximal map has a closed form and keeps the diagonal of the root positive for every step size.  One wants it
    for black-box VI with guarantees where no smoothness constant of ℓ is known, with an estimator that leaves the
    entropy out, such as `Reparametrized`.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # C = 1
    >>> opt = NaturalGradientVI(q, ProximalRootGradient(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that C⁺ = 0.6
    >>> round(q.variance.sqrt().item(), 4)  # ½(0.6 + √(0.36 + 0.4))
    0.7359
    """

    emits = Root
    natural = False

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the curve from (m, C) of the proximal steps, which starts along -∇L."""
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

        return Path(at, lambda: q.norm2(q.local(e)), slope, speed2=lambda: root_speed2(q, gradient))
