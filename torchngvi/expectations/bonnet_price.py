"""Bonnet's and Price's theorems for linear predictors, from joint draws of θ; the prior stays exact.

    θ_s = m + C z_s,  η_s = Xθ_s:    g = Xᵀ mean_s f'(η_s) + Λ(m - m₀)     H = Xᵀ diag(mean_s f''(η_s)) X + Λ

(Wu and Gardner 2024, Eq 11, with g and H from the same draws.)  They are what `Hessian` gives on the log joint, up
to the prior's share of g, at the cost of one XᵀDX in the place of S D Hessian-vector products.  H ⪰ Λ where f
is convex, and H is exact where f is quadratic.
"""

from typing import final

import torch
from torch import Tensor

from torchngvi.expectations.drawing import Drawing
from torchngvi.expectations.monte_carlo import mean_derivatives
from torchngvi.interfaces import Cost, Expectation, Frame, LinearTarget, Posterior, Raw, Sites, Target
from torchngvi.numerics import sparse
from torchngvi.structures import Diagonal


@final
class BonnetPrice(Drawing):
    """g and H of a generalised linear model as means over S draws of θ.

    One wants it to follow the stochastic natural-gradient VI of the paper, in which the draws are of θ; `MonteCarlo`
    draws each predictor for itself, with less noise, and `Quadrature` does without draws.  The likelihood must be twice
    differentiable: where it has a kink, its mean curvature cannot be had from draws.

    Args:
        draws: the number S of antithetic draws, or draws such as `Independent`, `Antithetic`, `Quasi` and `Fixed`.

    Raises:
        InputError: if draws is neither, or the number is not positive and even.

    >>> from torchngvi import VN, GeneralizedLinear, NaturalGaussian
    >>> from torchngvi.expectations import Independent
    >>> X, y = torch.eye(4), torch.tensor([0.0, 1.0, 1.0, 0.0])
    >>> model, q = GeneralizedLinear(X, y), NaturalGaussian(4)
    >>> opt = VN(q, lr=0.1, estimator=BonnetPrice(Independent(10)))
    >>> loss = opt.step(model.minibatch([0, 3]))
    """

    needs = LinearTarget

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ] and its derivative at q with new draws of θ."""
        assert isinstance(target, LinearTarget)
        frame, count = q.frame(), self.draws.num_samples
        noise = frame.push(self.draws(q.mean_probe.detach()))
        # of the marginals only the means are needed, and at the point m they are for nothing
        rows = target.marginals(Frame(frame.mean, torch.zeros_like(frame.mean), Diagonal(q.dim)))
        moments = mean_derivatives(rows.likelihood, rows.mean + _predictor(rows.rows, noise), rows.y)
        total, sites = target.energy_from(frame, rows, moments)
        packet: Sites | Raw
        if q.structure.widest == q.dim:
            packet = sites.raw()
        else:  # a pattern with fewer entries needs no D x D matrix
            packet = sites if sparse.is_sparse(sites.rows) else sites._replace(projected=frame.rows(sites.rows))
        return Expectation(total, packet, target.temperature, False, Cost(count, count))


def _predictor(rows: Tensor, theta: Tensor) -> Tensor:
    """Xθ, (S, *batch, N)."""
    if sparse.is_sparse(rows):
        return (rows @ theta.mT).mT
    return theta @ rows.mT if rows.ndim == 2 else (rows @ theta[..., None])[..., 0]
