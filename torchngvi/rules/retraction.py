"""The improved Bayesian learning rule, iBLR: VN with a second-order term that keeps every step in the cone.

    S' = (1 - γρ) S + ρH + ½ρ² G S⁻¹ G,  G = H - γS;   m' = m - ρ S⁻¹ g, with the old S

(Lin, Schmidt and Khan 2020).  In the frame N = I + ρP + ½ρ²P² = ½(I + (I + ρP)²), whose
eigenvalues are at least ½: positive definite for every ρ and every H, convex or not.
"""

from typing import final

from torch import Tensor

from torchngvi.interfaces import Congruence, Expectation, Path, Posterior, Rule


@final
class Retraction(Rule):
    """The improved Bayesian learning rule (iBLR): natural-gradient steps that keep S positive definite.

    With N = I + ρP + ½ρ²P² the step is S' = C⁻ᵀ N C⁻¹ and m' = m - ρCa.  One wants it where the expected Hessian may be
    indefinite; `VariationalNewton` is cheaper where it is not.  The structure of q must admit products of symmetric
    matrices; `LocalExponential` serves the others.

    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Hessian
    >>> q = CholeskyGaussian(1)  # V = 1
    >>> opt = NaturalGradientVI(q, Retraction(), lr=0.1, estimator=Hessian(2))
    >>> loss = opt.step(lambda theta: -2 * theta.square().sum(-1))  # H = 4, so that P = 3
    >>> round(1 / q.variance.item(), 4)  # 1 + 0.3 + ½ · 0.09
    1.345
    """

    emits = Congruence
    natural = True
    full_algebra = True

    def __call__(self, q: Posterior, e: Expectation) -> Path:
        """Return the path ρ -> C (I + ρP + ½ρ²P²)⁻¹ Cᵀ of the covariance."""
        local, structure = q.local(e), q.structure
        eye = structure.eye(local.a)

        def at(rho: Tensor) -> Congruence:
            step = structure.scaled(rho, local.P)
            N = eye + step + 0.5 * structure.matmul(step, step)
            return Congruence(N, -rho[..., None] * structure.mv(N, local.a))

        norm2 = q.norm2(local)
        return Path(at, lambda: norm2, lambda: norm2)
