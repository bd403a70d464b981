"""Monte Carlo from values of the log joint alone: no gradient is taken.

    h = ℓ(m + C z) - ½γ|z|²        a = E[(h - b) z]        W = γI + E[(h - b) zzᵀ]

the score function estimator (Williams 1992; Ranganath, Gerrish and Blei 2014) in the frame, where the
scores are z and zzᵀ - I and the natural gradient needs no solve (from Tan 2025, section 3.1).  b is the
mean of h over the other draws (leave-one-out baseline: Kool, van Hoof and Welling 2019); h - b then has
mean 0 over the draws, which is why I is not subtracted.  With γ log q in it, h is constant where q is
the exact Gaussian posterior, and neither a nor W has any variance there.
"""

from typing import final

import torch

from torchngvi.errors import InputError, PairError
from torchngvi.expectations.drawing import Drawing
from torchngvi.expectations.draws import Draws
from torchngvi.interfaces import Cost, Expectation, Framed, Posterior, Target


@final
class ScoreFunction(Drawing):
    """a and W from values at S draws, for a log joint that has no gradient: discrete, or a simulator.

    The variance grows with D as that of gradients does not: of use in few dimensions, or with many draws.

    Args:
        draws: S for S antithetic draws, or `Independent`, `Antithetic`; at least two draws or pairs.

    Raises:
        InputError: no draws, or a number that is not positive and even, or fewer than two draws or pairs.
        PairError: draws that depend on one another.

    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q, target = CholeskyGaussian(1), LogJoint(lambda theta: -theta.detach().square().sum(-1) / 2)
    >>> ScoreFunction(4)(q, target).derivative.W.item()
    1.0
    """

    def __init__(self, draws: Draws | int = 64) -> None:
        super().__init__(draws)
        if not self.draws.independent:
            raise PairError(
                "ScoreFunction subtracts from each value the mean of the others, which must not depend on its draw; "
                f"those of {type(self.draws).__name__} depend on one another. Use Independent or Antithetic."
            )
        self._block = 2 if self.draws.mirrored else 1
        if self.draws.num_samples < 2 * self._block:
            raise InputError(
                "ScoreFunction compares a draw with others, and needs at least 2 independent draws or 4 antithetic "
                f"ones; got {self.draws.num_samples}."
            )

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Evaluate at q, with new draws."""
        frame, gamma, count = q.frame(), target.temperature, self.draws.num_samples
        z = self.draws(q.mean_probe.detach())
        with torch.no_grad():
            energy = -target.log_joint(frame.mean + frame.push(z))
        h = energy - 0.5 * gamma * q.structure.dot(z, z)
        blocks = h.unflatten(0, (self._block, -1))  # a draw beside its mirror image
        others = (h.sum(0) - blocks.sum(0)) / (count - self._block)
        weighted = (blocks - others).flatten(0, 1)[..., None] * z / count
        a = weighted.sum(0)
        W = q.sym_outer(weighted, z) + gamma * q.structure.eye(a)
        return Expectation(energy.mean(0), Framed(a, W), gamma, False, Cost(0, 0, count))
