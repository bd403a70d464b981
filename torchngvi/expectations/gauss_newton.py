"""Curvature from the gradients of single data: positive semi-definite, whatever the likelihood.

    g = E[∇ℓ(θ)]        H = E[Σ_n ∇log p(y_n|θ) ∇log p(y_n|θ)ᵀ] - E[∇²log p(θ)]

The sum is the empirical Fisher matrix: the expected Hessian where the model is right and q near the
truth, another matrix elsewhere (Kunstner, Hennig and Balles 2019), so that V is off where the model is;
the mean is not.  VOGN uses it (Khan et al. 2018; Osawa et al. 2019).
"""

from typing import final

import torch
from torch import Tensor

from torchngvi.derivatives import mean_hessian
from torchngvi.errors import PairError
from torchngvi.expectations.drawing import Drawing
from torchngvi.expectations.draws import Draws
from torchngvi.expectations.hessian import checked_chunk
from torchngvi.interfaces import Cost, Expectation, Posterior, Raw, SeparableTarget, Target


@final
class GaussNewton(Drawing):
    """g and the empirical Fisher matrix as means over S draws; the curvature of the prior is exact.

    One wants it where the log likelihood is given datum by datum and H must be positive semi-definite although ℓ is not
    convex, as for neural networks; `Hessian` has the right curvature where the model is wrong.  It evaluates one
    posterior, not a batch.

    Args:
        draws: the number S of antithetic draws, or draws such as `Independent`, `Antithetic`, `Quasi` and `Fixed`.
        chunk: the number of draws whose gradients per datum, (N, D) each, are held at once.

    Raises:
        InputError: if draws is neither, or the number is not positive and even; if the chunk is below 1.
        PairError: on use, if q is a batch of posteriors.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> from torchngvi.models import PerDatum
    >>> y = torch.tensor([1.0, -1.0])
    >>> target = PerDatum(lambda theta: y * theta, lambda theta: -0.5 * theta.square().sum(-1))
    >>> GaussNewton(2)(CholeskyGaussian(1), target).derivative.H.item()  # 1² + 1² + 1
    3.0
    """

    needs = SeparableTarget
    unbiased = False

    def __init__(self, draws: Draws | int = 16, *, chunk: int = 16) -> None:
        super().__init__(draws)
        self.chunk = checked_chunk(chunk)

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ], g and H at q."""
        assert isinstance(target, SeparableTarget)
        if q.batch_shape:
            raise PairError(
                f"GaussNewton evaluates one posterior; got a batch of {tuple(q.batch_shape)}. Use Hessian()."
            )
        seen, count = self.see(q, target), self.draws.num_samples
        fisher = sum(_fisher(target, theta) for theta in seen.theta.split(self.chunk)) / count
        H = fisher + mean_hessian(target.prior, seen.theta, 256)
        packet = Raw(seen.gradient.mean(0), H)
        return Expectation(seen.energy.mean(0), packet, target.temperature, False, Cost(count, 0))


def _fisher(target: SeparableTarget, theta: Tensor) -> Tensor:
    """Σ_s Σ_n ∇log p(y_n|θ_s) ∇log p(y_n|θ_s)ᵀ, (D, D)."""
    with torch.enable_grad():
        jacobian = torch.func.vmap(torch.func.jacrev(lambda one: target.terms(one[None])[0]))(theta)
    flat = jacobian.detach().flatten(0, 1)
    return flat.mT @ flat
