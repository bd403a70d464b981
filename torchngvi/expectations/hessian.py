"""Monte Carlo from gradients and Hessians: the theorems of Bonnet and Price.

    g = E[∇ℓ(θ)]        H = E[∇²ℓ(θ)]

(Bonnet 1964; Price 1958; in this use Opper and Archambeau 2009, and VON of Khan and Rue 2023).
"""

from typing import final

from torchngvi.derivatives import mean_hessian
from torchngvi.errors import InputError
from torchngvi.expectations.drawing import Drawing
from torchngvi.expectations.draws import Draws
from torchngvi.interfaces import Cost, Expectation, Posterior, Raw, Target


@final
class Hessian(Drawing):
    """g and H as means over S draws: of the least noise, at D Hessian-vector products a draw.

    H has no variance where ℓ is quadratic.  Positive semi-definite where ℓ is convex, for any number of
    draws, so that a step in `NaturalGaussian` with ρ < 1/γ stays in the cone.  The packet is of θ and
    needs no frame: H has D² numbers for a diagonal covariance too, of which `HessianVector` keeps D.  Also
    with `Fixed` draws it is not the derivative of the mean of ℓ over them, and steps by trial are refused:
    `Stein` has that derivative.

    Args:
        draws: S for S antithetic draws, or `Independent`, `Antithetic`, `Quasi`, `Fixed`.
        chunk: copies of θ at which the log joint is evaluated in one call, of S times D: bounds the memory.

    Raises:
        InputError: no draws, or a number that is not positive and even; a chunk below 1; on use, a log
            joint that does not depend on theta.

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
        """Evaluate at q."""
        seen, count = self.see(q, target), self.draws.num_samples
        H = mean_hessian(target, seen.theta, self.chunk)
        return Expectation(
            seen.energy.mean(0), Raw(seen.gradient.mean(0), H), target.temperature, False, Cost(count, count)
        )


def checked_chunk(chunk: int) -> int:
    """At least 1.

    Raises:
        InputError: a smaller one.

    >>> checked_chunk(3)
    3
    """
    if chunk < 1:
        raise InputError(f"chunk is the number of copies of theta in one call, at least 1; got {chunk}.")
    return chunk
