"""Gaussian SVGD: every point of q moves with the Stein velocity of the kernel xᵀy + 1.

    θ' = θ + ε (Bθ - g),   B = γI - HV - g mᵀ = -(GV + g mᵀ),   G = H - γS

The mean-field limit of Gaussian-SVGD (Liu et al. 2024, Algorithm 1), "SVGD-density" in Kumar et al.
(2025), Appendix G; the form follows from E_q[∇ℓ yᵀ] = HV + g mᵀ.  The kernel is not free of the
origin: the mean's step is stable only below about 2/(λ_max(H) (1 + |m|²)).  A diagonal q takes one
kernel x_i y_i + 1 a coordinate, so that B stays diagonal.
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Affine, Expectation, Path, Posterior, Rule
from torchngvi.rules.lengths import map_speed2
from torchngvi.structures import FullAlgebra


@final
class SVGD(Rule):
    """Stein variational gradient descent for a Gaussian, with the kernel xᵀy + 1.

    The step is the affine map θ ↦ θ + ε(Bθ - g) with B = γI - HV - g mᵀ.  One wants it to reproduce Gaussian SVGD as it
    is published; `CenteredSVGD` takes the same covariance steps without a dependence on the origin of θ.  The structure
    of q must admit products of symmetric matrices.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # m = 0 and V = 1
    >>> opt = NaturalGradientVI(q, SVGD(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that B = -3
    >>> round(q.variance.item(), 4)  # (1 - 0.1 · 3)²
    0.49
    """

    emits = Affine
    natural = False
    full_algebra = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path ε -> (I + εB) V (I + εB)ᵀ of the covariance, with m + ε(Bm - g) as its mean."""
        local, frame, structure = q.local(e), q.frame(), q.structure
        assert isinstance(structure, FullAlgebra)
        g, G = q.unframe(local.a, local.P)
        V = structure.matmul(frame.root, structure.transpose(frame.root))
        B = -structure.matmul(G, V) - structure.lower(g[..., None, :], frame.mean[..., None, :])
        velocity = structure.mv(B, frame.mean) - g

        def at(rho: Tensor) -> Affine:
            return Affine(structure.eye(g) + structure.scaled(rho, B), rho[..., None] * velocity)

        def slope() -> Tensor:
            # dL/dε = gᵀ(Bm - g) + tr(GBV) = -|g|² - ‖B‖²_F
            return structure.dot(g, g) + structure.entries_norm2(B)

        return Path(at, lambda: q.norm2(local), slope, speed2=lambda: map_speed2(q, velocity, B))
