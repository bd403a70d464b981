"""Minimal exponential families over their natural parameters, q(x) = h(x) exp(⟨η, T(x)⟩ - A(η)).

The flat vector λ is η itself, with the signs of T and the base measure h chosen so that η are the usual parameters: the
concentrations of a Dirichlet distribution, shape and rate of a gamma one.  Then (Wainwright and Jordan 2008, section 3)

    ω = E T = ∇A(η)      F = ∇²A(η)      KL(q‖q') = A(η') - A(η) - ⟨η' - η, ω⟩      ∇_ω L = F⁻¹ ∇_η L

and the natural gradient of E_q f is the least-squares fit of f on the statistics under q, F⁻¹ Cov(T, f).  For a
conjugate log joint f is linear in T, and the step η' = (1 - γ)η + γη̂ of stochastic natural-gradient VI
(Wu and Gardner 2024) leads to the posterior at γ = 1.
"""

from abc import abstractmethod
from typing import Self

import torch
from torch import Tensor

from torchngvi.errors import InputError, PairError
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior, check_start


class ExponentialFamily(FlatPosterior):
    """A minimal exponential family over its natural parameters η: abstract.

    Use a member of it where the log joint is conjugate, or nearly so: steps of `NGVI` with
    `torchngvi.expectations.StatisticRegression` are then exact.  A family of one's own says A, ∇A and its inverse,
    products with ∇²A and its inverse, T, h and its draws, and has the check
    `torchngvi.testing.check_exponential_family`.

    Args:
        vector: η at the start, (*batch, D).
        dim: d, the number of entries of x.
        size: D, where the family has one.

    Raises:
        InputError: a start outside of the domain, or of another length.

    >>> from torchngvi.posteriors.flat import Gamma
    >>> q = Gamma(torch.tensor([3.0, 2.0]))
    >>> isinstance(q, ExponentialFamily), q.kl(q).item()
    (True, 0.0)
    """

    def __init__(
        self,
        vector: Tensor,  # (*batch, D)
        dim: int,
        size: int | None = None,
    ) -> None:
        check_start(type(self).__name__, vector=vector)
        if size is not None and vector.shape[-1] != size:
            raise InputError(
                f"{type(self).__name__} starts at a vector of {size} in its last dimension; got the shape "
                f"{tuple(vector.shape)}."
            )
        super().__init__(vector, dim)

    # ------------------------------------------------------------------------ what a family must say

    @abstractmethod
    def statistics(
        self,
        theta: Tensor,  # (*sample, *batch, d)
    ) -> Tensor:  # (*sample, *batch, D)
        """Compute the sufficient statistics T(x), (*sample, *batch, D)."""

    @abstractmethod
    def base_coefficients(self) -> Tensor:  # (D,)
        """Return the vector b with log h(x) = ⟨b, T(x)⟩, (D,)."""

    @abstractmethod
    def log_partition(self, at: Tensor | None = None) -> Tensor:  # (*batch,)
        """Compute A(η), (*batch,)."""

    @abstractmethod
    def expectation(self, at: Tensor | None = None) -> Tensor:  # (*batch, D)
        """Compute the expectation parameters ω = E T = ∇A(η), (*batch, D)."""

    @abstractmethod
    def natural(
        self,
        omega: Tensor,  # (*batch, D)
    ) -> Tensor:  # (*batch, D)
        """Compute the natural parameters η with ∇A(η) = ω, (*batch, D)."""

    @abstractmethod
    def fisher_product(
        self,
        change: Tensor,  # (*sample, *batch, D)
        at: Tensor | None = None,
    ) -> Tensor:  # (*sample, *batch, D)
        """Compute F times a change of η, (*sample, *batch, D)."""

    # ------------------------------------------------------------------------ what follows from it

    def log_base(
        self,
        theta: Tensor,  # (*sample, *batch, d)
    ) -> Tensor:  # (*sample, *batch)
        """Compute log h(x), (*sample, *batch)."""
        return (self.statistics(theta) * self.base_coefficients()).sum(-1)

    def reference_vector(self) -> Tensor:  # (D,)
        """Return the natural parameters of a member around 1, (D,), at whose draws factors are told apart."""
        return self.vector.detach().reshape(-1, self.size)[0]

    def log_prob(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute log h(x) + ⟨η, T(x)⟩ - A(η)."""
        return self.log_base(theta) + (self.statistics(theta) * self.point(at)).sum(-1) - self.log_partition(at)

    def score(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute T(x) - ω."""
        return self.statistics(theta) - self.expectation(at)

    def entropy(self) -> Tensor:
        """Compute the entropy A(η) - ⟨η + b, ω⟩ in nats, (*batch,), differentiable in the probe."""
        return self.log_partition() - ((self.point(None) + self.base_coefficients()) * self.expectation()).sum(-1)

    def kl(
        self,
        other: "ExponentialFamily",
    ) -> Tensor:  # (*batch,)
        """Compute KL(q‖q') = A(η') - A(η) - ⟨η' - η, ω⟩ in nats, (*batch,).

        Where the two are near it is the Bregman divergence of two large numbers, and has their rounding.

        Args:
            other: q', of the same family and size.

        Returns:
            The divergence.

        Raises:
            PairError: another family, or one of another size.
        """
        if type(other) is not type(self) or other.size != self.size:
            raise PairError(
                f"the divergence in closed form is between two of one family; got {type(self).__name__} of "
                f"{self.size} and {type(other).__name__} of {getattr(other, 'size', '?')} parameters. "
                "Take it from draws: theta = q.sample(10000); (q.log_prob(theta) - other.log_prob(theta)).mean()."
            )
        change = other.point(None) - self.point(None)
        return other.log_partition() - self.log_partition() - (change * self.expectation()).sum(-1)

    def points(
        self,
        number: int,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:  # (n, *batch, d), (n, *batch)
        """Return points and weights whose weighted means estimate those of q, without a gradient.

        Args:
            number: how many draws; a family of finitely many values returns each of them, whatever is asked for.
            generator: of the draws.

        Returns:
            The points, (n, *batch, d), and their weights, (n, *batch), which sum to 1: here draws, and 1/n.
        """
        theta = self.sample(number, generator)
        return theta, torch.full_like(theta[..., 0], 1 / len(theta))

    def with_expectation(
        self,
        omega: Tensor,  # (*batch, D)
    ) -> Self:
        """Make the member of the family whose expectation parameters are ω."""
        return self.at(self.natural(omega))


def shrunk(
    relative: Tensor,  # x, change over value
) -> Tensor:
    """Compute the factor of a positive coordinate that would change by x times itself, positive for each x.

    It is 1 + x down to x = -½ and -1/(4x) below, which joins it with its slope.

    >>> shrunk(torch.tensor([1.0, -0.5, -10.0])).tolist()
    [2.0, 0.5, 0.02500000037252903]
    """
    return torch.where(relative >= -0.5, 1 + relative, -0.25 / relative.clamp_max(-0.5))


def retracted_positive(
    at: Tensor,  # (*batch, D), positive
    change: Tensor,  # (*batch, D)
) -> Tensor:
    """Add a change to positive numbers; where a member would leave them, each of its entries moves by `shrunk`.

    >>> retracted_positive(torch.tensor([2.0, 1.0]), torch.tensor([1.0, -0.9])).tolist()
    [3.0, 0.10000002384185791]
    """
    straight = at + change
    inside = (straight > 0).all(-1, keepdim=True)
    return torch.where(inside, straight, at * shrunk(change / at))
