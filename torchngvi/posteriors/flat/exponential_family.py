"""Minimal exponential families over their natural parameters, q(x) = h(x) exp(⟨η, T(x)⟩ - A(η)).

The flat vector λ is η itself, with the signs of T and the base measure h chosen so that η are the usual parameters: the
concentrations of a Dirichlet distribution, shape and rate of a gamma one.  Then (Wainwright and Jordan 2008, section 3)

    ω = E T = ∇A(η)      F = ∇²A(η)      KL(q‖q') = A(η') - A(η) - ⟨η' - η, ω⟩      ∇_ω L = F⁻¹ ∇_η L

and the natural gradient of E_q f is the least-squares fit of f on the statistics under q, F⁻¹ Cov(T, f).  For a
conjugate log joint f is linear in T, and the step η' = (1 - γ)η + γη̂ of stochastic natural-gradient VI
(Wu and Gardner 2024) leads to the posterior at γ = 1.
"""

import math
from abc import abstractmethod
from typing import Self, final

import torch
from torch import Tensor

from torchngvi.arguments import read_generator, shown
from torchngvi.errors import InputError, PairError
from torchngvi.numerics.linalg import (
    cholesky,
    dual_entries,
    eigh,
    lower_entries,
    lower_triangle,
    solve_symmetric,
    symmetric,
    symmetric_matrix,
)
from torchngvi.numerics.special import increasing_root, inverse_digamma, log_minus_digamma, trigamma, trigamma_excess
from torchngvi.posteriors.flat.flat_posterior import (
    FlatPosterior,
    check_start,
    gammas,
)
from torchngvi.posteriors.shapes import Shape, check_points, normal, sizes


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
        check_points(theta, self.dim, self.point(at))
        return self.log_base(theta) + (self.statistics(theta) * self.point(at)).sum(-1) - self.log_partition(at)

    def score(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute T(x) - ω."""
        return self.statistics(theta) - self.expectation(at)

    def entropy(self) -> Tensor:
        """Compute the entropy A(η) - ⟨η + b, ω⟩ in nats, (*batch,), differentiable in the probe."""
        return self.log_partition() - ((self.point(None) + self.base_coefficients()) * self.expectation()).sum(-1)

    def kl(self, other: "ExponentialFamily") -> Tensor:  # (*batch,)
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

    def points(self, number: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
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


class PositiveFamily(ExponentialFamily):
    """A family whose natural parameters are positive numbers: abstract."""

    def reference_vector(self) -> Tensor:
        """Return 2 for each parameter."""
        return torch.full_like(self.vector.detach().reshape(-1, self.size)[0], 2.0)

    def in_domain(self, at: Tensor | None = None) -> Tensor:
        """Say where all parameters are positive and finite."""
        eta = self.point(at)
        return (eta.isfinite() & (eta > 0)).all(-1)

    def retracted(self, at: Tensor, change: Tensor) -> Tensor:
        """Add the change; where a member would leave the domain, each of its entries moves by `shrunk`."""
        straight = at + change
        inside = (straight > 0).all(-1, keepdim=True)
        return torch.where(inside, straight, at * shrunk(change / at))


def shrunk(
    relative: Tensor,  # x, change over value
) -> Tensor:
    """Compute the factor of a positive coordinate that would change by x times itself, positive for each x.

    It is 1 + x down to x = -½ and -1/(4x) below, which joins it with its slope.

    >>> shrunk(torch.tensor([1.0, -0.5, -10.0])).tolist()
    [2.0, 0.5, 0.02500000037252903]
    """
    return torch.where(relative >= -0.5, 1 + relative, -0.25 / relative.clamp_max(-0.5))


class Concentrations(PositiveFamily):
    """The laws of shares that sum to 1, over their concentrations α: abstract."""

    domain = "the concentrations are positive"

    def base_coefficients(self) -> Tensor:
        """Return -1 for each class."""
        return -torch.ones(self.size, dtype=self.dtype, device=self.device)

    def log_partition(self, at: Tensor | None = None) -> Tensor:
        """Compute Σ lnΓ(α_k) - lnΓ(α_0)."""
        alpha = self.point(at)
        return torch.lgamma(alpha).sum(-1) - torch.lgamma(alpha.sum(-1))

    def expectation(self, at: Tensor | None = None) -> Tensor:
        """Compute ψ(α_k) - ψ(α_0)."""
        alpha = self.point(at)
        return torch.digamma(alpha) - torch.digamma(alpha.sum(-1, keepdim=True))

    def natural(self, omega: Tensor) -> Tensor:
        """Find α_0: the sum of ψ⁻¹(ω_k + ψ(s)) is above s below it, and below s above it."""

        def below(log_s: Tensor) -> Tensor:
            s = log_s.exp()
            return s - inverse_digamma(omega + torch.digamma(s)[..., None]).sum(-1)

        s = increasing_root(below, omega[..., 0]).exp()
        return inverse_digamma(omega + torch.digamma(s)[..., None])

    def fisher_product(self, change: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute ψ'(α_k) x_k - ψ'(α_0) Σ x."""
        alpha = self.point(at)
        return trigamma(alpha) * change - (trigamma(alpha.sum(-1)) * change.sum(-1))[..., None]

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Solve by Sherman and Morrison, whose denominator is a sum of what 1/ψ'(α) lacks of α: nothing cancels."""
        alpha = self.point(at)
        scaled = gradient / trigamma(alpha)
        apart = _lack(alpha).sum(-1) - _lack(alpha.sum(-1))  # 1/ψ'(α_0) - Σ 1/ψ'(α_k)
        return scaled + (scaled.sum(-1) / apart)[..., None] / trigamma(alpha)

    @property
    def variance(self) -> Tensor:
        """The variances m(1 - m)/(α_0 + 1) of θ, m its mean, (*batch, d)."""
        return self.mean * (1 - self.mean) / (self.vector.sum(-1, keepdim=True) + 1)


def _lack(alpha: Tensor) -> Tensor:
    """α - 1/ψ'(α), which tends to ½."""
    over = alpha * trigamma_excess(alpha)
    return alpha * over / (1 + over)


@final
class Beta(Concentrations):
    """Beta(a, b) over λ = (a, b), for one probability θ in (0, 1).

    Its Fisher matrix is known, so that `NaturalGradient` follows the exact natural gradient (Godichon-Baggioni, Nguyen
    and Tran 2023, Example 1).  A step is clamped at a, b ≥ 0.01.

    Args:
        vector: (a, b), positive, (*batch, 2).

    Raises:
        InputError: a start that is not positive and finite.

    >>> q = Beta(torch.tensor([58.0, 144.0], dtype=torch.float64))
    >>> q.fisher()[0, 0].round(decimals=7).item()
    0.0124281
    """

    domain = "a and b are positive"

    def __init__(
        self,
        vector: Tensor,  # (*batch, 2)
    ) -> None:
        super().__init__(vector, 1, size=2)

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw X/(X + Y) of two gamma variables, kept off 0 and 1 by a rounding error."""
        both = gammas(shape, self.point(at), generator)
        theta = both[..., :1] / both.sum(-1, keepdim=True)
        info = torch.finfo(theta.dtype)
        return theta.clamp(info.tiny, 1 - info.eps)

    @property
    def mean(self) -> Tensor:
        """The mean a/(a + b) of θ, (*batch, 1)."""
        return self.vector[..., :1] / self.vector.sum(-1, keepdim=True)

    def statistics(self, theta: Tensor) -> Tensor:
        """Compute (log θ, log(1 - θ))."""
        return torch.cat([theta.log(), torch.log1p(-theta)], -1)

    def fisher(self, at: Tensor | None = None) -> Tensor:  # (*batch, 2, 2)
        """Compute I_F, which is the covariance of (log θ, log(1 - θ)), (*batch, 2, 2)."""
        lam = self.point(at)
        together = torch.polygamma(1, lam.sum(-1))  # as autograd has it: gradients of a bound have the same errors
        return torch.polygamma(1, lam).diag_embed() - together[..., None, None]

    def fisher_product(self, change: Tensor, at: Tensor | None = None) -> Tensor:
        """Multiply by the 2 x 2 Fisher matrix."""
        return (self.fisher(at) @ change[..., None])[..., 0]

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Solve with the 2 x 2 Fisher matrix by Cholesky."""
        return solve_symmetric(self.fisher(at), gradient)

    def retracted(self, at: Tensor, change: Tensor) -> Tensor:
        """Add the change to λ, and clamp the result at 0.01."""
        return (at + change).clamp_min(0.01)


@final
class Dirichlet(Concentrations):
    """Dirichlet(α), for the shares x of K classes, which are positive and sum to 1.

    Use it for the shares of topics in a document, of components in a mixture or of answers in a group; it is
    conjugate to counts.

    Args:
        vector: α, positive, (*batch, K) with K ≥ 2.

    Raises:
        InputError: a start that is not positive and finite, or of one class.

    >>> q = Dirichlet(torch.tensor([2.0, 3.0, 5.0]))
    >>> [round(share, 4) for share in q.mean.tolist()]
    [0.2, 0.3, 0.5]
    """

    def __init__(
        self,
        vector: Tensor,  # (*batch, K)
    ) -> None:
        classes = vector.shape[-1] if isinstance(vector, Tensor) and vector.ndim else 0
        super().__init__(vector, classes)
        if classes < 2:
            raise InputError(f"Dirichlet has a concentration for each of two classes at least; got {classes}.")

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw X_k/ΣX of gamma variables, kept off 0 by the smallest normal number."""
        draws = gammas(shape, self.point(at), generator)
        return (draws / draws.sum(-1, keepdim=True)).clamp_min(torch.finfo(draws.dtype).tiny)

    def statistics(self, theta: Tensor) -> Tensor:
        """Compute log x."""
        return theta.log()

    @property
    def mean(self) -> Tensor:
        """The means α_k/α_0 of x, (*batch, K)."""
        return self.vector / self.vector.sum(-1, keepdim=True)


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
    def of(cls, probabilities: Tensor) -> Self:
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


# ------------------------------------------------------------------------------------ the gamma law and its relatives


class ShapeRate(PositiveFamily):
    """The laws of which a positive number u ~ Gamma(a, b) is a part, over the shape a and the rate b: abstract."""

    domain = "a and b are positive"

    def __init__(
        self,
        vector: Tensor,  # (*batch, 2)
    ) -> None:
        super().__init__(vector, 1, size=2)

    @abstractmethod
    def as_gamma(
        self,
        theta: Tensor,  # (*sample, *batch, 1)
    ) -> Tensor:
        """Compute the variable u whose law is Gamma(a, b) from θ, or θ from it: a map that is its own inverse."""

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw u from Gamma(a, 1), scale it by 1/b, and keep it off 0 by the smallest normal number."""
        a, b = self.point(at).detach().unbind(-1)
        draws = gammas(shape, a, generator) / b
        return self.as_gamma(draws.clamp_min(torch.finfo(draws.dtype).tiny)[..., None])

    def statistics(self, theta: Tensor) -> Tensor:
        """Compute (log u, -u)."""
        u = self.as_gamma(theta)
        return torch.cat([u.log(), -u], -1)

    def log_partition(self, at: Tensor | None = None) -> Tensor:
        """Compute lnΓ(a) - a log b."""
        a, b = self.point(at).unbind(-1)
        return torch.lgamma(a) - a * b.log()

    def expectation(self, at: Tensor | None = None) -> Tensor:
        """Compute (ψ(a) - log b, -a/b)."""
        a, b = self.point(at).unbind(-1)
        return torch.stack([torch.digamma(a) - b.log(), -a / b], -1)

    def natural(self, omega: Tensor) -> Tensor:
        """Find a with log a - ψ(a) = log(-ω₂) - ω₁, and b = -a/ω₂."""
        gap = (-omega[..., 1]).log() - omega[..., 0]
        a = increasing_root(lambda log_a: gap - log_minus_digamma(log_a.exp()), gap).exp()
        return torch.stack([a, -a / omega[..., 1]], -1)

    def fisher_product(self, change: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute (ψ'(a)u - w/b, -u/b + aw/b²) of a change (u, w)."""
        (a, b), (u, w) = self.point(at).unbind(-1), change.unbind(-1)
        return torch.stack([trigamma(a) * u - w / b, (a * w / b - u) / b], -1)

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Solve the 2 x 2 system, with ψ'(a) - 1/a as one number."""
        (a, b), (first, second) = self.point(at).unbind(-1), gradient.unbind(-1)
        u = (first + b * second / a) / trigamma_excess(a)
        return torch.stack([u, b * (b * second + u) / a], -1)


@final
class Gamma(ShapeRate):
    """Gamma(a, b), with shape a and rate b, for a positive number x.

    Use it for a precision, a rate of events or a scale; it is conjugate to Poisson counts and to the precision of
    normal data.

    Args:
        vector: (a, b), positive, (*batch, 2).

    Raises:
        InputError: a start that is not positive and finite, or of another length.

    >>> import torch
    >>> q = Gamma(torch.tensor([3.0, 2.0]))
    >>> q.mean.item(), q.variance.item()
    (1.5, 0.75)
    """

    def as_gamma(self, theta: Tensor) -> Tensor:
        """Return θ itself."""
        return theta

    def base_coefficients(self) -> Tensor:
        """Return (-1, 0)."""
        return self.vector.new_tensor([-1.0, 0.0])

    @property
    def mean(self) -> Tensor:
        """The mean a/b of x, (*batch, 1)."""
        return self.vector[..., :1] / self.vector[..., 1:]

    @property
    def variance(self) -> Tensor:
        """The variance a/b² of x, (*batch, 1)."""
        return self.mean / self.vector[..., 1:]


@final
class InverseGamma(ShapeRate):
    """Inverse gamma(a, b), the law of 1/u for u ~ Gamma(a, b), for a positive number x.

    Use it for the variance of normal data, to which it is conjugate.

    Args:
        vector: (a, b), positive, (*batch, 2).

    Raises:
        InputError: a start that is not positive and finite, or of another length.

    >>> InverseGamma(torch.tensor([3.0, 2.0])).mean.item()
    1.0
    """

    def as_gamma(self, theta: Tensor) -> Tensor:
        """Return 1/θ."""
        return 1 / theta

    def base_coefficients(self) -> Tensor:
        """Return (1, 0)."""
        return self.vector.new_tensor([1.0, 0.0])

    @property
    def mean(self) -> Tensor:
        """The mean b/(a - 1) of x, (*batch, 1); infinite for a ≤ 1."""
        a, b = self.vector[..., :1], self.vector[..., 1:]
        return torch.where(a > 1, b / (a - 1), torch.inf)

    @property
    def variance(self) -> Tensor:
        """The variance b²/((a - 1)²(a - 2)) of x, (*batch, 1); infinite for a ≤ 2."""
        a, b = self.vector[..., :1], self.vector[..., 1:]
        return torch.where(a > 2, (b / (a - 1)).square() / (a - 2), torch.inf)


@final
class NormalInverseGamma(FlatPosterior):
    """q(μ, σ²) = N(μ; m, v) IG(σ²; a, b), for the mean and the variance of normal data, independent of one another.

    (Godichon-Baggioni, Nguyen and Tran 2023, Example 2, where log q lacks the 2 of e²/(2v); its gradient is right.)

    Args:
        vector: (m, v, a, b) at the start, (*batch, 4), the last three positive.

    Raises:
        InputError: a start that is not finite, or not positive where it has to be.

    >>> q = NormalInverseGamma(torch.tensor([0.0, 1.0, 3.0, 4.0]))
    >>> q.sample(5, torch.Generator().manual_seed(0)).shape
    torch.Size([5, 2])
    """

    domain = "v, a and b are positive"

    def __init__(
        self,
        vector: Tensor,  # (*batch, 4)
    ) -> None:
        check_start(type(self).__name__, vector=vector)
        if vector.shape[-1] != 4:
            raise InputError(f"NormalInverseGamma starts at (m, v, a, b), (*batch, 4); got {shown(vector)}.")
        super().__init__(vector, 2)

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw μ = m + √v z and σ² = b/G with G ~ Gamma(a, 1)."""
        m, v, a, b = self.point(at).detach().unbind(-1)
        z = normal(shape, m[..., None], 1, generator)[..., 0]
        return torch.stack([m + v.sqrt() * z, b / gammas(shape, a, generator)], -1)

    @property
    def mean(self) -> Tensor:
        """The means m of μ and b/(a - 1) of σ², (*batch, 2); the latter is infinite for a ≤ 1."""
        m, _, a, b = self.vector.unbind(-1)
        return torch.stack([m, torch.where(a > 1, b / (a - 1), torch.inf)], -1)

    @property
    def variance(self) -> Tensor:
        """The variances v of μ and b²/((a - 1)²(a - 2)) of σ², (*batch, 2); the latter is infinite for a ≤ 2."""
        _, v, a, b = self.vector.unbind(-1)
        return torch.stack([v, torch.where(a > 2, (b / (a - 1)).square() / (a - 2), torch.inf)], -1)

    def log_prob(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute log N(μ; m, v) + a log b - log Γ(a) - (a + 1) log σ² - b/σ²."""
        m, v, a, b = self.point(at).unbind(-1)
        mu, variance = theta.unbind(-1)
        gaussian = -0.5 * (2 * math.pi * v).log() - (mu - m).square() / (2 * v)
        return gaussian + a * b.log() - torch.lgamma(a) - (a + 1) * variance.log() - b / variance

    def score(self, theta: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute (e/v, -1/(2v) + e²/(2v²), log b - ψ(a) - log σ², a/b - 1/σ²) with e = μ - m."""
        m, v, a, b = self.point(at).unbind(-1)
        mu, variance = theta.unbind(-1)
        u = (mu - m) / v
        parts = (u, 0.5 * (u.square() - 1 / v), b.log() - torch.digamma(a) - variance.log(), a / b - 1 / variance)
        return torch.stack(parts, -1)

    def fisher(self, at: Tensor | None = None) -> Tensor:  # (*batch, 4, 4)
        """Compute I_F, (*batch, 4, 4), which is that of the normal beside that of the inverse gamma."""
        _, v, a, b = self.point(at).unbind(-1)
        matrix = torch.stack([1 / v, 0.5 / v.square(), torch.polygamma(1, a), a / b.square()], -1).diag_embed()
        matrix[..., 2, 3] = matrix[..., 3, 2] = -1 / b
        return matrix

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Solve with the 4 x 4 Fisher matrix by Cholesky."""
        return solve_symmetric(self.fisher(at), gradient)

    def in_domain(self, at: Tensor | None = None) -> Tensor:
        """Say where v, a and b are positive and λ is finite."""
        lam = self.point(at)
        return lam.isfinite().all(-1) & (lam[..., 1:] > 0).all(-1)


@final
class Wishart(ExponentialFamily):
    """The Wishart law of a d x d positive definite matrix X, which is stored as its entries on and below the diagonal.

    Use it for the precision matrix of normal vectors, to which it is conjugate.  θ is vech X, row after row.

        p(X) ∝ |X|^(a - (d + 1)/2) exp(-tr BX)        a = ν/2        B = ½V⁻¹

    Args:
        vector: (a, vech B) with a > (d - 1)/2 and B positive definite, (*batch, 1 + d(d + 1)/2).

    Raises:
        InputError: a start outside of the domain, or of a length that belongs to no d.

    >>> q = Wishart.of(torch.tensor(5.0), torch.eye(2))  # ν = 5, mean νV
    >>> q.mean.tolist()
    [5.0, 0.0, 5.0]
    """

    domain = "a is above (d - 1)/2 and B is positive definite"

    def __init__(
        self,
        vector: Tensor,  # (*batch, 1 + d(d + 1)/2)
    ) -> None:
        check_start("Wishart", vector=vector)
        entries = vector.shape[-1] - 1
        self.rows = (math.isqrt(8 * entries + 1) - 1) // 2 if entries > 0 else 0
        if self.rows == 0 or self.rows * (self.rows + 1) // 2 != entries:
            raise InputError(
                f"Wishart starts at (a, vech B), a vector of 2, 4, 7, 11, ... numbers; got {vector.shape[-1]}."
            )
        super().__init__(vector, entries)

    @classmethod
    def of(cls, degrees: Tensor, scale: Tensor) -> Self:
        """Make the law of the usual parameters, whose mean is νV.

        Args:
            degrees: the degrees of freedom ν, above d - 1, (*batch,).
            scale: V, positive definite, (*batch, d, d).

        Returns:
            The posterior.

        Raises:
            InputError: a scale that is not positive definite, too few degrees of freedom.
        """
        check_start("Wishart", scale=scale)
        root, ok = cholesky(scale)
        if not bool(ok.all()):
            raise InputError(f"scale must be symmetric and positive definite; got {scale.tolist()}.")
        degrees = torch.as_tensor(degrees, dtype=scale.dtype, device=scale.device).expand(scale.shape[:-2])
        return cls(torch.cat([0.5 * degrees[..., None], lower_entries(0.5 * torch.cholesky_inverse(root))], -1))

    def parts(self, at: Tensor | None = None) -> tuple[Tensor, Tensor]:  # (*batch,), (*batch, d, d)
        """Take η apart into a and the symmetric matrix B."""
        eta = self.point(at)
        return eta[..., 0], symmetric_matrix(eta[..., 1:], self.rows)

    def _log_det(self, matrix: Tensor) -> Tensor:
        return 2 * cholesky(matrix)[0].diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def _primal(self, entries: Tensor) -> Tensor:
        """The symmetric M with these entries as its dual."""
        matrix = symmetric_matrix(entries, self.rows)
        return 0.5 * (matrix + matrix.diagonal(dim1=-2, dim2=-1).diag_embed())

    def _halves(self, a: Tensor) -> Tensor:  # (*batch, d)
        return a[..., None] - 0.5 * torch.arange(self.rows, dtype=a.dtype, device=a.device)

    def reference_vector(self) -> Tensor:
        """Return the parameters of d + 2 degrees of freedom and the scale I."""
        rows = torch.eye(self.rows, dtype=self.dtype, device=self.device)
        return Wishart.of(torch.tensor(self.rows + 2.0, dtype=self.dtype, device=self.device), rows).vector

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw X = RAAᵀRᵀ with RRᵀ = V by Bartlett's lower triangle A."""
        a, B = self.parts(self.point(at).detach())
        diagonal = (2 * gammas(shape, self._halves(a), generator)).clamp_min(torch.finfo(B.dtype).tiny).sqrt()
        below = lower_triangle(normal(shape, a[..., None], self.dim, generator), self.rows).tril(-1)
        inverse = torch.linalg.inv(cholesky(2 * B)[0]).mT  # RRᵀ = (2B)⁻¹
        root = inverse @ (below + diagonal.diag_embed())
        return lower_entries(root @ root.mT)

    def statistics(self, theta: Tensor) -> Tensor:
        """Compute (log|X|, -X_ii, -2X_ij)."""
        X = symmetric_matrix(theta, self.rows)
        return torch.cat([self._log_det(X)[..., None], -dual_entries(X)], -1)

    def base_coefficients(self) -> Tensor:
        """Return (-(d + 1)/2, 0)."""
        result = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        result[0] = -0.5 * (self.rows + 1)
        return result

    def log_partition(self, at: Tensor | None = None) -> Tensor:
        """Compute lnΓ_d(a) - a log|B|."""
        a, B = self.parts(at)
        constant = 0.25 * self.rows * (self.rows - 1) * math.log(math.pi)
        return constant + torch.lgamma(self._halves(a)).sum(-1) - a * self._log_det(B)

    def expectation(self, at: Tensor | None = None) -> Tensor:
        """Compute (ψ_d(a) - log|B|, -aB⁻¹), ψ_d(a) = Σ_{j<d} ψ(a - j/2)."""
        a, B = self.parts(at)
        first = torch.digamma(self._halves(a)).sum(-1) - self._log_det(B)
        return torch.cat([first[..., None], -dual_entries(a[..., None, None] * torch.linalg.inv(B))], -1)

    def natural(self, omega: Tensor) -> Tensor:
        """Find a with ψ_d(a) - d log a = ω₁ - log|M|, M = E X, and B = aM⁻¹."""
        M = -self._primal(omega[..., 1:])
        goal = omega[..., 0] - self._log_det(M)
        least, half = 0.5 * (self.rows - 1), 0.5 * torch.arange(self.rows, dtype=omega.dtype, device=omega.device)

        def function(log_excess: Tensor) -> Tensor:
            a = (log_excess.exp() + least)[..., None]
            return (torch.log1p(-half / a) - log_minus_digamma(a - half)).sum(-1) - goal

        a = least + increasing_root(function, goal).exp()
        return torch.cat([a[..., None], lower_entries(a[..., None, None] * torch.linalg.inv(M))], -1)

    def fisher_product(self, change: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute (ψ'_d(a)u - tr B⁻¹W, -uB⁻¹ + aB⁻¹WB⁻¹) of a change (u, vech W)."""
        a, B = self.parts(at)
        inverse, u, W = torch.linalg.inv(B), change[..., 0], symmetric_matrix(change[..., 1:], self.rows)
        first = trigamma(self._halves(a)).sum(-1) * u - (inverse * W).sum((-2, -1))
        second = a[..., None, None] * inverse @ W @ inverse - u[..., None, None] * inverse
        return torch.cat([first[..., None], dual_entries(second)], -1)

    def exact_fisher_solve(self, gradient: Tensor, at: Tensor | None = None) -> Tensor:
        """Compute (u, (BGB + uB)/a), with ψ'_d(a) - d/a as one sum."""
        a, B = self.parts(at)
        G = self._primal(gradient[..., 1:])
        halves = self._halves(a)
        apart = (trigamma_excess(halves) + (a[..., None] - halves) / (a[..., None] * halves)).sum(-1)
        u = (gradient[..., 0] + (B * G).sum((-2, -1)) / a) / apart
        W = (B @ G @ B + u[..., None, None] * B) / a[..., None, None]
        return torch.cat([u[..., None], lower_entries(W)], -1)

    def in_domain(self, at: Tensor | None = None) -> Tensor:
        """Say where a is above (d - 1)/2 and B is finite and positive definite."""
        a, B = self.parts(at)
        return (a > 0.5 * (self.rows - 1)) & a.isfinite() & cholesky(B)[1]

    def retracted(self, at: Tensor, change: Tensor) -> Tensor:
        """Add the change; outside of the domain, a and the eigenvalues of B in its own frame shrink by factors."""
        straight = at + change
        least = 0.5 * (self.rows - 1)
        a, B = self.parts(at)
        root = cholesky(B)[0]
        half = torch.linalg.solve_triangular(root, symmetric_matrix(change[..., 1:], self.rows), upper=False)
        relative, axes, _ = eigh(symmetric(torch.linalg.solve_triangular(root, half.mT, upper=False)))
        bent_root = root @ axes * shrunk(relative).sqrt()[..., None, :]
        bent_a = least + (a - least) * shrunk(change[..., 0] / (a - least))
        bent = torch.cat([bent_a[..., None], lower_entries(bent_root @ bent_root.mT)], -1)
        return torch.where(self.in_domain(straight)[..., None], straight, bent)

    @property
    def mean(self) -> Tensor:
        """The mean aB⁻¹ of X, as vech, (*batch, d(d + 1)/2)."""
        a, B = self.parts(self.vector)
        return lower_entries(a[..., None, None] * torch.linalg.inv(B))

    @property
    def variance(self) -> Tensor:
        """The variances ν(V_ij² + V_ii V_jj) of the entries of X, as vech, (*batch, d(d + 1)/2)."""
        a, B = self.parts(self.vector)
        V = 0.5 * torch.linalg.inv(B)
        diagonal = V.diagonal(dim1=-2, dim2=-1)
        return lower_entries(2 * a[..., None, None] * (V.square() + diagonal[..., :, None] * diagonal[..., None, :]))
