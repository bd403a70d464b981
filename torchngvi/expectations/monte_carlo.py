"""Monte Carlo for linear predictors: draws of η_n ~ N(e_n, v_n), one each a row.

    α_n = mean_s f'(η_ns)     β_n = mean_s f''(η_ns)     η_ns = e_n + √v_n z_ns

(Bonnet 1964; Price 1958).  The draws are of the one-dimensional predictors, independent from row to
row (local reparametrisation: Kingma, Salimans and Welling 2015), not of θ: the expectation of the
packet is the same and its variance smaller, because the noise of the rows averages out.  With
mini-batches and SRVN this is the stochastic SR-VN of Kumar et al. (2025), appendix E.
"""

from typing import Any, final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.gaussian_integrals import Moments
from torchngvi.interfaces import Cost, Estimator, Expectation, LinearTarget, Posterior, Target


@final
class MonteCarlo(Estimator):
    """Value, α and β of `Sites` as averages over S draws of each predictor; the prior stays exact.

    All three are unbiased, and of noise: steps found by trial are refused.

    Args:
        num_samples: S, even when antithetic.
        antithetic: draw z and -z, which makes α exact for quadratic likelihoods.
        generator: of the draws; its state is saved with the optimizer.

    Raises:
        InputError: a number of samples that is not positive, or odd when antithetic.

    >>> from torchngvi import SRVN, CholeskyGaussian, GeneralizedLinear
    >>> X, y = torch.eye(4), torch.tensor([0.0, 1.0, 1.0, 0.0])
    >>> model, q = GeneralizedLinear(X, y), CholeskyGaussian(4)
    >>> opt = SRVN(q, lr=0.1, estimator=MonteCarlo(2))
    >>> loss = opt.step(model.minibatch([0, 3]))
    """

    comparable = False
    needs = LinearTarget

    def __init__(
        self, num_samples: int = 16, *, antithetic: bool = True, generator: torch.Generator | None = None
    ) -> None:
        if num_samples < 1 or (antithetic and num_samples % 2):
            rule = "even, since the draws come in antithetic pairs" if antithetic else "at least 1"
            raise InputError(f"num_samples must be {rule}; got {num_samples}.")
        self.num_samples, self.antithetic, self.generator = num_samples, antithetic, generator

    def __call__(self, q: Posterior, target: Target, state: dict) -> Expectation:
        """Evaluate at q, with new draws."""
        assert isinstance(target, LinearTarget)
        value, sites = target.expected_energy(q.frame(), self._expected)
        return Expectation(value, sites, target.temperature, False, Cost(self.num_samples, self.num_samples))

    def _expected(self, likelihood: Any, mean: Tensor, variance: Tensor, y: Tensor) -> Moments:
        count = self.num_samples // 2 if self.antithetic else self.num_samples
        z = torch.randn((count, *mean.shape), dtype=mean.dtype, device=mean.device, generator=self.generator)
        z = torch.cat([z, -z]) if self.antithetic else z
        eta = (mean + variance.sqrt() * z).requires_grad_()
        with torch.enable_grad():
            energy = likelihood.energy(eta, y)
            (slope,) = torch.autograd.grad(energy.sum(), eta, create_graph=True)
            (curvature,) = torch.autograd.grad(slope.sum(), eta)
        return Moments(*(part.detach().mean(0) for part in (energy, slope, curvature)))
