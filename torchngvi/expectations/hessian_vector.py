"""Monte Carlo from gradients and Hessian-vector products with the columns of the root.

    a = E[Cᵀ∇ℓ(θ)]        W = E[Cᵀ(∇²ℓ(θ) C)]

Bonnet and Price as in `Hessian`, straight in the frame: no curvature in θ is whitened afterwards, whose
entries may differ by many orders of magnitude where those of W are near γ.
"""

from typing import final

import torch
from torch import Tensor

from torchngvi.derivatives import mean_hessian_diagonal, mean_hessian_products
from torchngvi.expectations.drawing import Drawing
from torchngvi.expectations.draws import Draws
from torchngvi.expectations.hessian import checked_chunk
from torchngvi.interfaces import Cost, Expectation, Framed, Posterior, Target
from torchngvi.structures.pattern import Structured


@final
class HessianVector(Drawing):
    """a and W as means over S draws, from D Hessian-vector products a draw.

    The same numbers as `Hessian` in exact arithmetic.  For a diagonal covariance no D x D matrix is formed: the memory
    is that of ``chunk`` copies of θ.

    Args:
        draws: S for S antithetic draws, or `Independent`, `Antithetic`, `Quasi`, `Fixed`.
        chunk: copies of θ at which the log joint is evaluated in one call, of S times D: bounds the memory.

    Raises:
        InputError: as `Hessian`.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q, target = CholeskyGaussian(2, scale=3.0), LogJoint(lambda theta: -theta[..., 0] * theta[..., 1])
    >>> HessianVector(2)(q, target).derivative.W.tolist()
    [[0.0, 9.0], [9.0, 0.0]]
    """

    def __init__(self, draws: Draws | int = 16, *, chunk: int = 256) -> None:
        super().__init__(draws)
        self.chunk = checked_chunk(chunk)

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Evaluate at q."""
        seen, count = self.see(q, target), self.draws.num_samples
        packet = Framed(seen.pulled.mean(0), self._curvature(q, target, seen.theta))
        return Expectation(seen.energy.mean(0), packet, target.temperature, False, Cost(count, count))

    def _curvature(
        self,
        q: Posterior,
        target: Target,
        theta: Tensor,  # (S, *batch, D)
    ) -> Structured:
        """W; of a diagonal structure column by column, of which one entry each is kept."""
        frame, structure = q.frame(), q.structure
        if structure.widest == 1:
            diagonal = mean_hessian_diagonal(target, theta, structure.diagonal(frame.root), self.chunk)
            return structure.with_diagonal(torch.zeros_like(frame.root), diagonal)
        columns = frame.dense().movedim(-1, 0)
        W = frame.pull(mean_hessian_products(target, theta, columns, self.chunk)).movedim(0, -1)
        return structure.from_dense(0.5 * (W + W.mT))
