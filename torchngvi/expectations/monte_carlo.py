"""Monte Carlo for linear predictors: draws of η_n ~ N(e_n, v_n), one each a row.

    α_n = mean_s f'(η_ns)     β_n = mean_s f''(η_ns)     η_ns = e_n + √v_n z_ns

(Bonnet 1964; Price 1958).  The draws are of the one-dimensional predictors, independent from row to
row (local reparametrisation: Kingma, Salimans and Welling 2015), not of θ: the expectation of the
packet is the same and its variance smaller, because the noise of the rows averages out.  With
mini-batches and SRVN this is the stochastic SR-VN of Kumar et al. (2025), appendix E.
"""

from typing import final

import torch
from torch import Tensor

from torchngvi.expectations.drawing import Drawing
from torchngvi.interfaces import Cost, Expectation, LinearTarget, Posterior, ScalarLikelihood, Target
from torchngvi.numerics.gaussian_integrals import Moments


@final
class MonteCarlo(Drawing):
    """Value, α and β of `Sites` as averages over S draws of each predictor; the prior stays exact.

    All three are unbiased, and noisy, so that steps found by trial are refused.  So they are with `Fixed`
    draws, of whose mean of f the mean of f'' is not the derivative.  One wants it to follow
    the papers that draw the predictors; `Quadrature` has no noise.

    Args:
        draws: the number S of antithetic draws, which make α exact for quadratic likelihoods; or draws such as
            `Independent`, `Antithetic`, `Quasi` and `Fixed`, whose dimensions are the rows.

    Raises:
        InputError: if draws is neither, or the number is not positive and even.

    >>> from torchngvi import SRVN, CholeskyGaussian, GeneralizedLinear
    >>> X, y = torch.eye(4), torch.tensor([0.0, 1.0, 1.0, 0.0])
    >>> model, q = GeneralizedLinear(X, y), CholeskyGaussian(4)
    >>> opt = SRVN(q, lr=0.1, estimator=MonteCarlo(2))
    >>> loss = opt.step(model.minibatch([0, 3]))
    """

    needs = LinearTarget

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ] and its derivative at q, with new draws of the predictors."""
        assert isinstance(target, LinearTarget)
        frame, draws = q.frame(), self.draws.num_samples
        rows = target.marginals(frame)
        eta = rows.mean + rows.variance.sqrt() * self.draws(rows.mean)
        value, sites = target.energy_from(frame, rows, mean_derivatives(rows.likelihood, eta, rows.y))
        return Expectation(value, sites, target.temperature, False, Cost(draws, draws))


def mean_derivatives(
    likelihood: ScalarLikelihood,
    eta: Tensor,  # (S, *batch, N)
    y: Tensor,  # (*batch, N)
) -> Moments:
    """The means of f, f' and f'' over draws of the predictors, with f = -log p(y | η).

    >>> from torchngvi.models import GaussianNoise
    >>> draws, y = torch.tensor([[1.0], [3.0]]), torch.zeros(1)
    >>> mean_derivatives(GaussianNoise(1.0), draws, y)[1:]  # of ½η²
    (tensor([2.]), tensor([1.]))
    """
    eta = eta.requires_grad_()
    with torch.enable_grad():
        energy = likelihood.energy(eta, y)
        (slope,) = torch.autograd.grad(energy.sum(), eta, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), eta)
    return Moments(*(part.detach().mean(0) for part in (energy, slope, curvature)))
