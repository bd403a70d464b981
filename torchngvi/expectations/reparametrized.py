"""The gradient of a reparametrised draw as backpropagation through a Cholesky factor gives it: one triangle.

    a = E[Cᵀ∇ℓ]        W = M + Mᵀ on the triangle of the root, M = tril½ E[Cᵀ∇ℓ zᵀ]

(Wu and Gardner 2024, Algorithm 1: θ = m + C z with C = chol(V), differentiated to (m, V); Kim, Ma and
Gardner 2024, Definition 4, whose ∂L/∂C = tril(∇ℓ zᵀ) - diag(1/C_ii) is what `RootGradient` makes of it.)
Unbiased and symmetric, but not positive semi-definite, not even where ℓ is convex: a step in natural
coordinates can leave the cone at any ρ, which `Hessian` and `BonnetPrice` never do on convex ℓ.
"""

from typing import final

from torchngvi.expectations.drawing import Drawing
from torchngvi.interfaces import Cost, Expectation, Posterior, Target


@final
class Reparametrized(Drawing):
    """a and W from gradients at S draws, of E[Cᵀ∇ℓ zᵀ] the triangle that belongs to the root.

    For comparison with the papers above; `ClosedEntropyStein` averages both triangles, with less noise.

    Args:
        draws: S for S antithetic draws, or `Independent`, `Antithetic`, `Quasi`, `Fixed`.

    Raises:
        InputError: as `Stein`.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q, target = CholeskyGaussian(2), LogJoint(lambda theta: -theta.sum(-1))
    >>> Reparametrized(4)(q, target).derivative.a.tolist()
    [1.0, 1.0]
    """

    derives_value = True

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Evaluate at q."""
        seen = self.see(q, target)
        packet = self.derivative_of_mean(q, seen) if self.comparable else self.one_triangle(q, seen.pulled, seen.z)
        comparable, cost = self.comparable and target.comparable, Cost(self.draws.num_samples, 0)
        return Expectation(seen.energy.mean(0), packet, target.temperature, comparable, cost)
