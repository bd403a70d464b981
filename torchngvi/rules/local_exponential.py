"""The natural gradient along a curve that stays positive definite for every step, in every pattern.

    in (m, T)   T' = T Λ,  Λ = I + ρK + ½ρ²K²,   m' = m - ρ T⁻ᵀ a        K = tril½[P], P = K + Kᵀ
    in (m, C)   C' = C Λ,  Λ = I - ρK + ½ρ²K²,   m' = m - ρ C a

the first terms of the exponential of the triangular group (Lin, Nielsen, Khan and Schmidt 2021, local coordinates;
the triangular root is their B).  The diagonal of Λ is 1 ± x + ½x² ≥ ½, whatever ρ and H, and products of triangular
matrices keep the pattern: it is for arrows and forests what `Retraction` is for dense matrices.  Its tangent is that of
`NaturalGradient`.
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Coordinates, Expectation, Path, Posterior, RootTangent, Rule


@final
class LocalExponential(Rule):
    """Natural-gradient steps in a triangular root that stay positive definite for every step size, in every structure.

    The root of q is multiplied by Λ = I ± ρK + ½ρ²K² with K = tril½[P], and the mean moves by -ρCa.  One wants it for
    sparse structures, such as arrows and forests, where the expected Hessian may be indefinite; for dense structures
    `Retraction` does not depend on the order of the coordinates.  The posterior must hold a mean and a triangular root.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> opt = NaturalGradientVI(CholeskyGaussian(3), LocalExponential(), lr=1.0)
    """

    emits = RootTangent
    natural = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path ρ -> q's root times I ± ρK + ½ρ²K²."""
        local, structure = q.local(e), q.structure
        half, root, push = structure.tril_half(local.P), q.coordinates.matrix, q.frame().push(local.a)
        sign = 1.0 if q.upper else -1.0  # a root of the precision grows where one of the covariance shrinks

        def at(rho: Tensor) -> RootTangent:
            step = structure.scaled(sign * rho, half)
            change = structure.matmul(root, step + 0.5 * structure.matmul(step, step))
            return RootTangent(Coordinates(-rho[..., None] * push, change))

        norm2 = q.norm2(local)
        return Path(at, lambda: norm2, lambda: norm2)
