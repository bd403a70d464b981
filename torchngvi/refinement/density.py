"""What a refined posterior offers: draws, a density, moments."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchngvi.errors import InputError
from torchngvi.numerics.arrays import writable

_DRAWS = 16_384  # of moments and quantiles that have no closed form
_SEED = 0


class Density(nn.Module, ABC):
    """A distribution over θ that can be drawn from and evaluated, without a graph.

    Moments and quantiles that have no closed form are those of 16,384 draws, the same at each call.

    >>> from torchngvi.refinement import LayeredGaussian
    >>> density = LayeredGaussian(torch.zeros(2), torch.eye(2))
    >>> isinstance(density, Density), density.sample(5).shape
    (True, torch.Size([5, 2]))
    """

    dim: int

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n times θ, (n, D)."""

    @abstractmethod
    def log_prob(
        self,
        theta: Tensor,  # (*sample, D)
    ) -> Tensor:
        """log q(θ), (*sample,).

        Raises:
            InputError: θ of another width than D.
        """

    def _flat(self, theta: Tensor) -> Tensor:
        """θ as (N, D)."""
        if theta.shape[-1] != self.dim:
            raise InputError(f"theta must end in D = {self.dim}; got shape {tuple(theta.shape)}.")
        return theta.reshape(-1, self.dim)

    def _draws(self) -> Tensor:
        device = next(self.buffers()).device
        return self.sample(_DRAWS, torch.Generator(device).manual_seed(_SEED))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (D,) and covariance (D, D)."""
        draws = self._draws()
        apart = draws - draws.mean(0)
        return draws.mean(0), apart.mT @ apart / (len(draws) - 1)

    @property
    def mean(self) -> Tensor:
        """The mean E[θ], (D,)."""
        return self.moments()[0]

    @property
    def covariance(self) -> Tensor:
        """The covariance matrix Cov[θ], (D, D)."""
        return self.moments()[1]

    @property
    def variance(self) -> Tensor:
        """The marginal variances Var[θ_k], (D,)."""
        return self.covariance.diagonal()

    @property
    def stddev(self) -> Tensor:
        """The marginal standard deviations √Var[θ_k], (D,)."""
        return self.variance.sqrt()

    def quantile(self, levels: Sequence[float] | Tensor) -> Tensor:
        """Quantiles of each coordinate, (len(levels), D).

        Raises:
            InputError: a level outside of (0, 1).
        """
        draws = self._draws()
        at = torch.as_tensor(writable(levels), dtype=draws.dtype, device=draws.device).reshape(-1)
        if not bool(((at > 0) & (at < 1)).all()):
            raise InputError(f"levels are probabilities between 0 and 1; got {at.tolist()}.")
        return draws.quantile(at, dim=0)
