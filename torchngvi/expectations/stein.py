"""Monte Carlo from gradients alone: Stein's identity with the sticking-the-landing residual.

With θ = m + C z and r = Cᵀ∇ℓ(θ) - γz, both a = E[r] and W = γI + E[r zᵀ] (Lin et al. 2019; Roeder
et al. 2017).  γz is a control variate: where q is the exact Gaussian posterior, r = 0 for each draw.
"""

from typing import final

import torch

from torchngvi.expectations.drawing import Drawing
from torchngvi.interfaces import Cost, Expectation, Framed, Posterior, Target


@final
class Stein(Drawing):
    """a and the symmetric part of W from gradients at S draws, in antithetic pairs by default.

    Args:
        num_samples: S, even when antithetic.
        antithetic: draw z and -z, which makes a exact for quadratic ℓ.
        generator: of the draws; its state is saved with the optimizer.

    Raises:
        InputError: a number of samples that is not positive, or odd when antithetic.
    """

    needs = Target

    def __call__(self, q: Posterior, target: Target, state: dict) -> Expectation:
        """Evaluate at q, with new draws."""
        frame = q.frame()
        z = self.draw(q.mean_probe.detach())
        theta = (frame.mean + frame.push(z)).requires_grad_()
        with torch.enable_grad():
            energy = -target.log_joint(theta)
            (gradient,) = torch.autograd.grad(energy.sum(), theta)
        residual = (frame.pull(gradient) - target.temperature * z) / self.num_samples
        W = q.structure.symmetric_part(q.outer(residual, z))
        a = residual.sum(0)
        W = W + target.temperature * q.structure.eye(a)
        value = energy.detach().mean(0)
        return Expectation(value, Framed(a, W), target.temperature, False, Cost(self.num_samples, 0))
