"""Gaussian SVGD with the kernel (x - m)ᵀ(y - m) + 1, which does not depend on the origin.

    θ' = θ + ε (B(θ - m) - g),   B = γI - HV = -GV,   G = H - γS

With V⁻¹ inside the product the same construction is BW-GD, B = -G.  Near the optimum the covariance
contracts by 1 - 2γε for every conditioning, the mean by 1 - εH.
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Affine, Expectation, Path, Posterior, Rule
from torchngvi.rules.lengths import map_speed2
from torchngvi.structures import FullAlgebra


@final
class CenteredSVGD(Rule):
    """Stein variational gradient descent for a Gaussian, with a kernel that is centred at the mean of q.

    The step is the affine map θ ↦ (m - εg) + (I + εB)(θ - m), with B = γI - HV.  One wants it where the steps of SVGD
    are to depend neither on the origin of θ nor, for the covariance, on the conditioning of the target.  The structure
    of q must admit products of symmetric matrices.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # V = 1
    >>> opt = NaturalGradientVI(q, CenteredSVGD(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that B = -3
    >>> round(q.variance.item(), 4)  # (1 - 0.1 · 3)²
    0.49
    """

    emits = Affine
    natural = False
    full_algebra = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path ε -> (I + εB) V (I + εB)ᵀ of the covariance, with m - εg as its mean."""
        local, frame, structure = q.local(e), q.frame(), q.structure
        assert isinstance(structure, FullAlgebra)
        g, G = q.unframe(local.a, local.P)
        V = structure.matmul(frame.root, structure.transpose(frame.root))
        B = -structure.matmul(G, V)

        def at(rho: Tensor) -> Affine:
            return Affine(structure.eye(g) + structure.scaled(rho, B), -rho[..., None] * g)

        def slope() -> Tensor:
            # dL/dε = -|g|² + tr(GBV) = -|g|² - ‖B‖²_F
            return structure.dot(g, g) + structure.entries_norm2(B)

        return Path(at, lambda: q.norm2(local), slope, speed2=lambda: map_speed2(q, g, B))
