"""Distributions of whole numbers as flat posteriors: categorical and Poisson."""

from typing import Self, final

import torch
from torch import Tensor

from torchngvi.arguments import read_generator
from torchngvi.errors import InputError, PairError
from torchngvi.posteriors.flat.exponential_family import ExponentialFamily
from torchngvi.posteriors.shapes import Shape, sizes

# A categorical law over η_k = log(p_k/p_K), k < K, for one of K classes: T = (1[x = k])_{k<K}, h = 1
#
# A = log(1 + Σ e^η)      ω_k = p_k      F = diag(ω) - ωωᵀ      F⁻¹g = g/ω + (Σ g) / p_K


@final
class Categorical(ExponentialFamily):
    """The law of a class x out of K, the number 0 to K - 1 as a floating-point number: p_k over log(p_k/p_K).

    Use it for discrete latent variables.  Their values are few, so that `points` returns all of them and
    the natural gradient has no noise: for L = Σ p_k f_k it is f_k - f_K.

    Args:
        vector: log(p_k/p_K) of all classes but the last, (*batch, K - 1).

    Raises:
        InputError: a start that is not finite.

    >>> q = Categorical(torch.tensor([0.0, 0.0], dtype=torch.float64))
    >>> [round(p, 6) for p in q.probabilities.tolist()]
    [0.333333, 0.333333, 0.333333]
    """

    def __init__(
        self,
        vector: Tensor,  # (*batch, K - 1)
    ) -> None:
        super().__init__(vector, 1)

    @classmethod
    def of(
        cls,
        probabilities: Tensor,  # (*batch, K)
    ) -> Self:
        """Make the law with these probabilities, up to a factor.

        Args:
            probabilities: positive, (*batch, K).

        Returns:
            The posterior.

        Raises:
            InputError: a probability that is not positive.

        >>> q = Categorical.of(torch.tensor([1.0, 3.0], dtype=torch.float64))
        >>> [round(p, 6) for p in q.probabilities.tolist()]
        [0.25, 0.75]
        """
        if not bool((probabilities > 0).all()):
            raise InputError(f"probabilities are positive; got {probabilities.tolist()}.")
        logits = probabilities.log()
        return cls(logits[..., :-1] - logits[..., -1:])

    @property
    def classes(self) -> int:
        """The number K of classes."""
        return self.size + 1

    def _log_probabilities(self, at: Tensor | None) -> Tensor:  # (*batch, K)
        return torch.log_softmax(torch.nn.functional.pad(self.point(at), (0, 1)), -1)

    @property
    def probabilities(self) -> Tensor:
        """The probabilities p of the K classes, (*batch, K)."""
        return self._log_probabilities(self.vector).exp()

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw classes, by the largest of log p + Gumbel noise."""
        logits = self._log_probabilities(at).detach()
        size = (*sizes(shape), *logits.shape)
        generator = read_generator("generator", generator, self.device)
        noise = torch.empty(size, dtype=self.dtype, device=self.device).exponential_(generator=generator)
        return (logits - noise.log()).argmax(-1, keepdim=True).to(self.dtype)

    def points(self, number: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return every class with its probability: (K, *batch, 1) and (K, *batch)."""
        every = torch.arange(self.classes, dtype=self.dtype, device=self.device)
        theta = every.reshape(-1, *(1 for _ in self.batch_shape), 1).expand(-1, *self.batch_shape, 1)
        return theta.contiguous(), self.probabilities.movedim(-1, 0)

    def statistics(self, theta: Tensor) -> Tensor:
        """Compute 1[x = k] for all classes but the last."""
        return (theta == torch.arange(self.size, dtype=self.dtype, device=self.device)).to(self.dtype)

    def base_coefficients(self) -> Tensor:
        """Return zeros."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def reference_vector(self) -> Tensor:
        """Return zeros: all classes are as probable."""
        return torch.zeros_like(self.vector.detach().reshape(-1, self.size)[0])

    def log_partition(self, at: Tensor | None = None) -> Tensor:
        """Compute log(1 + Σ e^η)."""
        return -self._log_probabilities(at)[..., -1]

    def expectation(self, at: Tensor | None = None) -> Tensor:
        """Return p_k for all classes but the last."""
        return self._log_probabilities(at)[..., :-1].exp()

    def natural(self, omega: Tensor) -> Tensor:
        """Compute log(ω_k/(1 - Σω))."""
        return omega.log() - torch.log1p(-omega.sum(-1, keepdim=True))

    def fisher_product(self, change: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute ω_k(x_k - Σ ω x)."""
        omega = self.expectation(at)
        return omega * (change - (omega * change).sum(-1, keepdim=True))

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute g_k/ω_k + Σg/p_K."""
        p = self._log_probabilities(at).exp()
        return gradient / p[..., :-1] + gradient.sum(-1, keepdim=True) / p[..., -1:]

    @property
    def mean(self) -> Tensor:
        """The mean Σ k p_k of the number of the class, (*batch, 1)."""
        return (self.probabilities * torch.arange(self.classes, device=self.device)).sum(-1, keepdim=True)

    @property
    def variance(self) -> Tensor:
        """The variance of the number of the class, (*batch, 1)."""
        away = torch.arange(self.classes, device=self.device) - self.mean
        return (self.probabilities * away.square()).sum(-1, keepdim=True)


# Poisson(λ) over η = log λ, for a count x: T = x, h = 1/x!, A = e^η


@final
class Poisson(ExponentialFamily):
    """Poisson(λ), for a count x that was not observed, over log λ.

    Use it for latent counts, such as those that a detector has missed.

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
