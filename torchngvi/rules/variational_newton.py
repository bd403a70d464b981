"""VN: the precision moves to the expected Hessian, S' = (1 - γρ) S + ρH, m' = m - ρ S'⁻¹ g.

In the frame N = I + ρP and m' = m - ρ C N⁻¹ a: the same q' in all coordinates
(Kumar et al. 2025, Eq 7; Khan and Rue 2023, the Bayesian learning rule for full Gaussians).
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Congruence, Expectation, Path, Posterior, Rule, once


@final
class VariationalNewton(Rule):
    """Variational Newton (VN): the precision moves towards the expected Hessian, and the mean takes a Newton step.

    With N = I + ρP the step is S' = C⁻ᵀ N C⁻¹ = (1 - γρ)S + ρH and m' = m - ρS'⁻¹g.  One wants it as the default for
    convex ℓ, where it is positive definite for every ρ < 1/γ and a full step is exact for a Gaussian target; where the
    expected Hessian may be indefinite, `Retraction` and `Geodesic` stay in the cone.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # S = 1
    >>> opt = NaturalGradientVI(q, VariationalNewton(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4
    >>> round(1 / q.variance.item(), 4)  # 0.9 · 1 + 0.1 · 4
    1.3
    """

    emits = Congruence
    natural = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path ρ -> C (I + ρP)⁻¹ Cᵀ of the covariance."""
        local = q.local(e)
        eye = q.structure.eye(local.a)

        def at(rho: Tensor) -> Congruence:
            return Congruence(eye + q.structure.scaled(rho, local.P), -rho[..., None] * local.a)

        norm2 = once(lambda: q.norm2(local))  # a constant step does not ask for it
        return Path(at, norm2, norm2)  # dL/dρ = -|∇L|²_F⁻¹
