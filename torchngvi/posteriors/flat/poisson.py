"""Poisson(λ) over η = log λ, for a count x: T = x, h = 1/x!, A = e^η."""

from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import read_generator
from torchngvi.errors import PairError
from torchngvi.posteriors.flat.exponential_family import ExponentialFamily
from torchngvi.posteriors.shapes import Shape, sizes


@final
class Poisson(ExponentialFamily):
    """Poisson(λ), for a count x that was not observed, over log λ.

    One wants it for latent counts, such as those that a detector has missed.

    Args:
        vector: log λ, (*batch, 1).

    Raises:
        InputError: a start that is not finite, or of another length.

    >>> round(Poisson(torch.zeros(1)).log_prob(torch.tensor([2.0])).exp().item(), 4)  # e⁻¹/2
    0.1839
    """

    def __init__(
        self,
        vector: Tensor,  # (*batch, 1)
    ) -> None:
        super().__init__(vector, 1, size=1)

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw counts, as floating-point numbers."""
        rate = self.point(at).detach().exp()
        generator = read_generator("generator", generator, rate.device)
        return torch.poisson(rate.expand((*sizes(shape), *rate.shape)).contiguous(), generator=generator)

    def statistics(self, theta: Tensor) -> Tensor:
        """Return x."""
        return theta

    def base_coefficients(self) -> Tensor:
        """Refuse, since log x! is no combination of the statistics.

        Raises:
            PairError: always.
        """
        raise PairError(
            "the base measure 1/x! of Poisson is no combination of its statistics, and its entropy has no closed form. "
            "Take it from draws: -q.log_prob(q.sample(10000)).mean(0)."
        )

    def log_base(self, theta: Tensor) -> Tensor:
        """Compute -log x!."""
        return -torch.lgamma(theta[..., 0] + 1)

    def log_partition(self, at: Tensor | None = None) -> Tensor:
        """Compute e^η."""
        return self.point(at)[..., 0].exp()

    def expectation(self, at: Tensor | None = None) -> Tensor:
        """Compute e^η."""
        return self.point(at).exp()

    def natural(self, omega: Tensor) -> Tensor:
        """Compute log ω."""
        return omega.log()

    def fisher_product(self, change: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute e^η x."""
        return self.point(at).exp() * change

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute e^-η g."""
        return gradient * (-self.point(at)).exp()

    @property
    def mean(self) -> Tensor:
        """The mean λ, (*batch, 1)."""
        return self.vector.exp()

    @property
    def variance(self) -> Tensor:
        """The variance λ, (*batch, 1)."""
        return self.vector.exp()
