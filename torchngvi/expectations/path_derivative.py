"""Monte Carlo from gradients alone, as an optimizer over the root itself would see it: a triangle of E[r zᵀ].

    r = Cᵀ∇ℓ(m + C z) - γz        a = E[r]        M = E[r zᵀ]        W = γI + tril½[M] + tril½[M]ᵀ

the path derivative of Roeder, Wu and Duvenaud (2017), as in Tan (2025), section 3.2: the gradient of L in
C is C⁻ᵀM, of which a triangular root has the lower part, and that part depends on the lower part of M only.
In coordinates whose frame is upper triangular it is Mᵀ that counts.
"""

from typing import final

from torchngvi.expectations.drawing import Drawing
from torchngvi.expectations.draws import Draws, Independent
from torchngvi.interfaces import Cost, Expectation, Framed, Posterior, Target


@final
class PathDerivative(Drawing):
    """a and W from one draw, as published; `Stein` averages both triangles and has less variance.

    The value has the same control variate, ℓ - ½γ(|z|² - D), so that the loss of a step is
    -log joint + γ log q at the draw.  Where q is the exact Gaussian posterior, a, W and the loss have no
    variance.  With `Fixed` draws it is the same as `Stein`.

    Args:
        draws: one independent draw by default; S for S antithetic draws, or `Independent`, `Antithetic`,
            `Quasi`, `Fixed`.

    Raises:
        InputError: as `Stein`.

    >>> import torch
    >>> from torchngvi import SRVN, CholeskyGaussian
    >>> q = CholeskyGaussian(2, dtype=torch.float64)
    >>> opt = SRVN(q, lr=0.1, estimator=PathDerivative())
    >>> round(opt.step(lambda theta: -0.5 * theta.square().sum(-1)).item(), 9)  # -log 2π, at any draw
    -1.837877066
    """

    derives_value = True

    def __init__(self, draws: Draws | int | None = None) -> None:
        super().__init__(Independent(1) if draws is None else draws)

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Evaluate at q."""
        seen, gamma = self.see(q, target), target.temperature
        energy = seen.energy
        if self.comparable:
            packet = self.derivative_of_mean(q, seen)
        else:
            a, W = self.one_triangle(q, seen.pulled - gamma * seen.z, seen.z)
            packet = Framed(a, W + gamma * q.structure.eye(a))
            energy = energy - 0.5 * gamma * (q.structure.dot(seen.z, seen.z) - q.structure.total_dim)
        comparable, cost = self.comparable and target.comparable, Cost(self.draws.num_samples, 0)
        return Expectation(energy.mean(0), packet, gamma, comparable, cost)
