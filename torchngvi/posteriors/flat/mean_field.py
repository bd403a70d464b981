"""A mean-field Gaussian over λ = (μ, log σ).

With e = (θ - μ)/σ the score is (e/σ, e² - 1) and I_F = blockdiag(σ⁻², 2I): known, nothing to estimate.
"""

import math
from typing import final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.posteriors.flat.drawing import normal
from torchngvi.posteriors.flat.flat_gaussian import FlatGaussian
from torchngvi.posteriors.flat.flat_posterior import check_start
from torchngvi.posteriors.shapes import Shape


@final
class MeanFieldGaussian(FlatGaussian):
    """q = N(μ, diag σ²) over λ = (μ, log σ): independent latent variables, with no constraint on λ.

    Args:
        vector: (μ, log σ) at the start, (*batch, 2 d).

    Raises:
        InputError: a start that is not finite, or of odd length.

    >>> q = MeanFieldGaussian(torch.zeros(2))
    >>> q.exact_fisher_solve(torch.tensor([3.0, 4.0])).tolist()
    [3.0, 2.0]
    """

    reparametrised = True

    def __init__(
        self,
        vector: Tensor,  # (*batch, 2 d)
    ) -> None:
        check_start(type(self).__name__, vector=vector)
        if vector.shape[-1] % 2:
            raise InputError(f"MeanFieldGaussian takes (mu, log sigma), an even length; got {vector.shape[-1]}.")
        super().__init__(vector, vector.shape[-1] // 2)

    @classmethod
    def _vector_of(cls, mean: Tensor, root: Tensor) -> Tensor:
        return torch.cat([mean, 0.5 * root.square().sum(-1).log()], -1)  # with the marginal variances

    def moments(self, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return μ and diag σ, differentiable in λ."""
        mean, log_sd = self.point(at).chunk(2, -1)
        return mean, log_sd.exp().diag_embed()

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = μ + σz without a gradient."""
        return self.rsample(shape, generator, self.point(at).detach())

    def rsample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw θ = μ + σz, differentiable in λ."""
        mean, log_sd = self.point(at).chunk(2, -1)
        return mean + log_sd.exp() * normal(shape, mean, self.dim, generator)

    def log_prob(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute -½|e|² - Σ log σ - (d/2) log 2π with e = (θ - μ)/σ."""
        mean, log_sd = self.point(at).chunk(2, -1)
        e = (theta - mean) / log_sd.exp()
        return (-0.5 * e.square() - log_sd - 0.5 * math.log(2 * math.pi)).sum(-1)

    def score(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute (e/σ, e² - 1) with e = (θ - μ)/σ."""
        mean, log_sd = self.point(at).chunk(2, -1)
        e = (theta - mean) / log_sd.exp()
        return torch.cat([e / log_sd.exp(), e.square() - 1], -1)

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute the natural gradient (σ² g_μ, ½ g_logσ)."""
        log_sd = self.point(at).chunk(2, -1)[1]
        g_mean, g_log_sd = gradient.chunk(2, -1)
        return torch.cat([(2 * log_sd).exp() * g_mean, 0.5 * g_log_sd], -1)
