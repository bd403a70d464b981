"""The gradient of a reparametrised draw as backpropagation through a Cholesky factor gives it: one triangle.

    a = E[Cᵀ∇ℓ]        W = M + Mᵀ on the triangle of the root, M = tril½ E[Cᵀ∇ℓ zᵀ]

(Wu and Gardner 2024, Algorithm 1: θ = m + C z with C = chol(V), differentiated to (m, V); Kim, Ma and
Gardner 2024, Definition 4, whose ∂L/∂C = tril(∇ℓ zᵀ) - diag(1/C_ii) is what `RootGradient` makes of it.)
W is unbiased and symmetric, but not positive semi-definite, not even where ℓ is convex: a step in natural
coordinates can leave the cone at any ρ, which `Hessian` and `BonnetPrice` never do on convex ℓ.
"""

from typing import final

from torchngvi.expectations.drawing import Drawing
from torchngvi.interfaces import Cost, Expectation, Posterior, Target


@final
class Reparametrized(Drawing):
    """a and W from gradients at S draws, taking of E[Cᵀ∇ℓ zᵀ] the triangle that belongs to the root.

    One wants it to compare with the papers above; `ClosedEntropyStein` averages both triangles, with less noise.

    Args:
        draws: the number S of antithetic draws, or draws such as `Independent`, `Antithetic`, `Quasi` and `Fixed`.

    Raises:
        InputError: if draws is neither, or the number is not positive and even; on use, if the log joint does not
            depend
            on theta, or fixed draws are fewer than 2D for a full covariance.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q, target = CholeskyGaussian(2), LogJoint(lambda theta: -theta.sum(-1))
    >>> Reparametrized(4)(q, target).derivative.a.tolist()
    [1.0, 1.0]
    """

    derives_value = True

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ], a and W at q, from the gradients at the draws."""
        seen = self.see(q, target)
        packet = self.derivative_of_mean(q, seen) if self.comparable else self.one_triangle(q, seen.pulled, seen.z)
        comparable, cost = self.comparable and target.comparable, Cost(self.draws.num_samples, 0)
        return Expectation(seen.energy.mean(0), packet, target.temperature, comparable, cost)
