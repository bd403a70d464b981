"""Monte Carlo from gradients alone, nothing subtracted: the entropy enters in closed form only.

    a = E[Cᵀ∇ℓ]        W = E[Cᵀ∇ℓ zᵀ]

(the reparametrisation gradient of Kingma and Welling 2014; CFE in Kim, Ma and Gardner 2024, Definition
4).  Its noise does not vanish at the optimum.  `Stein` is the better choice for q that fits well; far
from the optimum, or where q cannot fit, neither is always ahead (Kim et al. 2024, section 3).
"""

from typing import final

from torchngvi.expectations.drawing import Drawing
from torchngvi.interfaces import Cost, Expectation, Framed, Posterior, Target


@final
class ClosedEntropyStein(Drawing):
    """a and W from gradients at S draws, without the control variate of `Stein`.

    One wants it to compare with the gradient estimator of most black-box VI, or where q cannot fit the target well.

    Args:
        draws: the number S of antithetic draws, or draws such as `Independent`, `Antithetic`, `Quasi` and `Fixed`; with
            fixed draws it is the same as `Stein`.

    Raises:
        InputError: if draws is neither, or the number is not positive and even; on use, if the log joint does not
            depend
            on theta, or fixed draws are fewer than 2D for a full covariance.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q, target = CholeskyGaussian(2), LogJoint(lambda theta: -theta.sum(-1))
    >>> ClosedEntropyStein(4)(q, target).derivative.a.tolist()
    [1.0, 1.0]
    """

    derives_value = True

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ], a and W at q, from the gradients at the draws."""
        seen = self.see(q, target)
        if self.comparable:
            packet = self.derivative_of_mean(q, seen)
        else:
            pulled = seen.pulled / len(seen.z)
            packet = Framed(pulled.sum(0), q.sym_outer(pulled, seen.z))
        comparable = self.comparable and target.comparable
        return Expectation(seen.energy.mean(0), packet, target.temperature, comparable, Cost(self.draws.num_samples, 0))
