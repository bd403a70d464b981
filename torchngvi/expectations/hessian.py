"""Monte Carlo from gradients and Hessians: the theorems of Bonnet and Price.

    g = E[∇ℓ(θ)]        H = E[∇²ℓ(θ)]

(Bonnet 1964; Price 1958; in this use Opper and Archambeau 2009, and VON of Khan and Rue 2023).
"""

from typing import final

from torchngvi.arguments import read_size
from torchngvi.derivatives import mean_hessian
from torchngvi.expectations.drawing import Drawing
from torchngvi.expectations.draws import Draws
from torchngvi.interfaces import Cost, Expectation, Posterior, Raw, Target


@final
class Hessian(Drawing):
    """g and H as means over S draws: of the least noise, at D Hessian-vector products a draw.

    H has no variance where ℓ is quadratic.  It is positive semi-definite where ℓ is convex, for any number of draws, so
    that a step in `NaturalGaussian` with ρ < 1/γ stays in the cone.  The packet is of θ and needs no frame: H has D²
    numbers for a diagonal covariance too, of which `HessianVector` keeps D.  With `Fixed` draws too, it is not the
    derivative of the mean of ℓ over them, and steps by trial are refused: `Stein` has that derivative.

    Args:
        draws: the number S of antithetic draws, or draws such as `Independent`, `Antithetic`, `Quasi` and `Fixed`.
        chunk: the number of copies of θ, of S times D, at which the log joint is evaluated in one call: it bounds the
            memory.

    Raises:
        InputError: if draws is neither, or the number is not positive and even; if the chunk is below 1; on use, if the
            log joint does not depend on theta.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q, target = CholeskyGaussian(2), LogJoint(lambda theta: -theta[..., 0] * theta[..., 1])
    >>> Hessian(2)(q, target).derivative.H.tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """

    def __init__(self, draws: Draws | int = 16, *, chunk: int = 256) -> None:
        super().__init__(draws)
        self.chunk = checked_chunk(chunk)

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ], g and H at q."""
        seen, count = self.see(q, target), self.draws.num_samples
        H = mean_hessian(target, seen.theta, self.chunk)
        return Expectation(
            seen.energy.mean(0), Raw(seen.gradient.mean(0), H), target.temperature, False, Cost(count, count)
        )


def checked_chunk(chunk: int) -> int:
    """Check the number of copies of θ in one call.

    >>> checked_chunk(3)
    3
    """
    return read_size("chunk", chunk, "is the number of copies of theta in one call")
