"""Euclidean gradient descent in (m, V): m' = m - ρ g, V' = V - ½ρ G, G = H - γS.

Kumar et al. (2025), Eq 4 with Eqs 33 and 34.  Nothing keeps V' in the cone: a step that leaves it is
not taken.  Its stable step follows the square of the curvature: ρ < 4γ/λ_max(H)² near the optimum.
"""

from typing import final

import torch
from torch import Tensor

from torchngvi.interfaces import Expectation, Path, Posterior, Root, Rule
from torchngvi.rules.lengths import covariance_speed2
from torchngvi.structures import FullAlgebra


@final
class CovarianceGradient(Rule):
    """Euclidean gradient descent in the mean and the covariance themselves.

    The step is m' = m - ρg and V' = V - ½ρG with G = H - γS; where V' is not positive definite the move is NaN, and the
    step is not taken.  It is a baseline for comparisons: its stable step sizes shrink with the square of the curvature,
    which the natural gradient avoids.  The structure of q must admit products of symmetric matrices.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # V = 1
    >>> opt = NaturalGradientVI(q, CovarianceGradient(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that G = 3
    >>> round(q.variance.item(), 4)  # 1 - ½ · 0.1 · 3
    0.85
    """

    emits = Root
    natural = False
    full_algebra = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the straight line from (m, V) along the negative Euclidean gradient."""
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

        return Path(at, lambda: q.norm2(local), slope, speed2=lambda: covariance_speed2(q, g, 0.5 * G))
