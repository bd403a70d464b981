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

    Args:
        draws: S for S antithetic draws, or `Independent`, `Antithetic`, `Quasi`, `Fixed`; with fixed
            draws it is the same as `Stein`.

    Raises:
        InputError: as `Stein`.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q, target = CholeskyGaussian(2), LogJoint(lambda theta: -theta.sum(-1))
    >>> ClosedEntropyStein(4)(q, target).derivative.a.tolist()
    [1.0, 1.0]
    """

    derives_value = True

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Evaluate at q."""
        seen = self.see(q, target)
        if self.comparable:
            packet = self.derivative_of_mean(q, seen)
        else:
            pulled = seen.pulled / len(seen.z)
            packet = Framed(pulled.sum(0), q.sym_outer(pulled, seen.z))
        comparable = self.comparable and target.comparable
        return Expectation(seen.energy.mean(0), packet, target.temperature, comparable, Cost(self.draws.num_samples, 0))
