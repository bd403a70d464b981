"""Monte Carlo from gradients alone: Stein's identity with the sticking-the-landing residual.

    r = Cᵀ∇ℓ(m + C z) - γz        a = E[r]        W = γI + E[r zᵀ]

(Lin, Khan and Schmidt 2019; Roeder, Wu and Duvenaud 2017).  γz is a control variate: where q is the
exact Gaussian posterior, r = 0 for each draw, and neither a nor W has any variance.
"""

from typing import final

from torchngvi.expectations.drawing import Drawing
from torchngvi.interfaces import Cost, Expectation, Framed, Posterior, Target


@final
class Stein(Drawing):
    """a and W from gradients at S draws; the default for a log joint that is only a function.

    Of E[r zᵀ] the symmetric part is taken, which has about half the variance of a triangle of it.  With
    `Fixed` draws a and W are the exact derivative of the mean of ℓ over them, steps can be found by
    trial, and the residual makes no difference: such draws have mean 0 and covariance I.  In natural
    coordinates that mean is a function of (S m, S) through the root T⁻ᵀ, S = T Tᵀ.

    Args:
        draws: S for S antithetic draws, which make a exact for quadratic ℓ; or `Independent`,
            `Antithetic`, `Quasi`, `Fixed`.

    Raises:
        InputError: no draws, or a number that is not positive and even; on use, a log joint that does
            not depend on theta, fixed draws fewer than 2D for a full covariance.

    >>> import torch
    >>> from torchngvi import VN, CholeskyGaussian, Stein
    >>> from torchngvi.expectations import Fixed
    >>> q = CholeskyGaussian(1, dtype=torch.float64)
    >>> opt = VN(q, estimator=Stein(Fixed(64)))  # no learning rate
    >>> for _ in range(10):
    ...     loss = opt.step(lambda theta: -2 * (theta - 3).square().sum(-1))
    >>> round(q.mean.item(), 9), round(q.variance.item(), 9)
    (3.0, 0.25)
    """

    derives_value = True

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Evaluate at q."""
        seen, gamma = self.see(q, target), target.temperature
        if self.comparable:
            packet = self.derivative_of_mean(q, seen)
        else:
            residual = (seen.pulled - gamma * seen.z) / len(seen.z)
            a = residual.sum(0)
            packet = Framed(a, q.sym_outer(residual, seen.z) + gamma * q.structure.eye(a))
        comparable, cost = self.comparable and target.comparable, Cost(self.draws.num_samples, 0)
        return Expectation(seen.energy.mean(0), packet, gamma, comparable, cost)
