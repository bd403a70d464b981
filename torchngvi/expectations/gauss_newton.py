"""Curvature from the gradients of single data: positive semi-definite, whatever the likelihood.

    g = E[∇ℓ(θ)]        H = E[Σ_n ∇log p(y_n|θ) ∇log p(y_n|θ)ᵀ] - E[∇²log p(θ)]

The sum is the empirical Fisher matrix: the expected Hessian where the model is right and q near the
truth, another matrix elsewhere (Kunstner, Hennig and Balles 2019), so that V is off where the model is;
the mean is not.  Used by VOGN (Khan et al. 2018; Osawa et al. 2019).
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

    Args:
        draws: S for S antithetic draws, or `Independent`, `Antithetic`, `Quasi`, `Fixed`.
        chunk: draws whose per-datum gradients (N, D) are held at once.

    Raises:
        InputError: no draws, or a number that is not positive and even; a chunk below 1.
        PairError: on use, several posteriors at once.

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
        """Evaluate at q."""
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
