"""The precision along a geodesic of the positive definite cone: S' = C⁻ᵀ exp(ρP) C⁻¹, m' = m - ρ C a.

The exponential map in local coordinates (m + Cδ, C⁻ᵀ exp(·) C⁻¹) (Lin, Nielsen, Khan and Schmidt
2021); for the covariance alone it is the geodesic of the Fisher metric.  It is positive definite for
every ρ and every H; of its series iBLR keeps three terms and VN two.
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Congruence, Expectation, Path, Posterior, Rule
from torchngvi.structures import FullAlgebra


@final
class Geodesic(Rule):
    """Natural-gradient steps along a geodesic of the positive definite cone, which no step size can leave.

    With N = exp(ρP) the step is S' = C⁻ᵀ N C⁻¹ and m' = m - ρCa.  One wants it where the expected Hessian may be
    indefinite, as with log joints that are not concave or with noisy estimates; `Retraction` is the same to second
    order without the matrix exponential, and `LocalExponential` does the same for sparse structures.  The structure of
    q must admit products of symmetric matrices.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # V = 1
    >>> opt = NaturalGradientVI(q, Geodesic(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that P = 3
    >>> round(q.variance.item(), 4)  # exp(-0.1 · 3)
    0.7408
    """

    emits = Congruence
    natural = True
    full_algebra = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path ρ -> C exp(-ρP) Cᵀ of the covariance."""
        local, structure = q.local(e), q.structure
        assert isinstance(structure, FullAlgebra)

        def at(rho: Tensor) -> Congruence:
            N = structure.exp(structure.scaled(rho, local.P))
            return Congruence(N, -rho[..., None] * structure.mv(N, local.a))

        norm2 = q.norm2(local)
        return Path(at, lambda: norm2, lambda: norm2)
