"""BW-GD: gradient descent in the Bures-Wasserstein metric (Lambert et al. 2022, Algorithm 1).

    m' = m - α g,   V' = M V M,   M = I - α (H - γS)

Its rate depends on the conditioning of the posterior: it is stable for α < 1/λ_max(H) or so.
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Affine, Expectation, Path, Posterior, Rule
from torchngvi.rules.lengths import map_speed2


@final
class BuresWasserstein(Rule):
    """Gradient descent on L in the Bures-Wasserstein metric, the geometry of optimal transport between Gaussians.

    The step is the affine map θ ↦ (m - αg) + (I - αG)(θ - m), with G = C⁻ᵀPC⁻¹ = H - γS.  One wants it to compare with
    the Wasserstein methods of the literature; its stable step sizes are bounded by the largest curvature, which those
    of the natural rules are not.  A step so long that I - αG is not positive definite reflects q, which is a Gaussian
    still; Table 3 of Kumar et al. (2025) begins with such steps, and under the default `KLRadius` there are none.  The
    structure of q must admit products of symmetric matrices (dense, block diagonal or diagonal).

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # V = 1
    >>> opt = NaturalGradientVI(q, BuresWasserstein(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that G = 3
    >>> round(q.variance.item(), 4)  # (1 - 0.1 · 3)²
    0.49
    """

    emits = Affine
    natural = False
    full_algebra = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path α -> (I - αG) V (I - αG) of the covariance, with m - αg as its mean."""
        local = q.local(e)
        g, G = q.unframe(local.a, local.P)
        eye = q.structure.eye(g)

        def at(rho: Tensor) -> Affine:
            return Affine(eye - q.structure.scaled(rho, G), -rho[..., None] * g)

        def slope() -> Tensor:
            # dL/dα = -|g|² - ‖G C‖²_F
            return q.structure.dot(g, g) + q.structure.entries_norm2(q.structure.matmul(G, q.frame().root))

        return Path(at, lambda: q.norm2(local), slope, speed2=lambda: map_speed2(q, g, G))
