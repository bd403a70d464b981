"""Likelihoods of one linear predictor: -log p(y | η), and its expectation under η ~ N(e, v).

Each expectation comes with its exact derivatives, α = ∂F/∂e and β = 2 ∂F/∂v, so that tests of
decrease see one consistent objective.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, final

import torch
from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.errors import InputError
from torchngvi.messages import full_name
from torchngvi.numerics import special as normal_tail
from torchngvi.numerics.arrays import less_product
from torchngvi.numerics.gaussian_integrals import Moments, expectation, log1p_square, softplus, softplus_bends

ExpectedSoftplus = Callable[[Tensor, Tensor], Moments]  # e, v -> E[log(1 + eˣ)] under N(e, v)


class Likelihood(ABC):
    """The abstract base of the likelihoods -log p(y | η) of one linear predictor, elementwise.

    Attributes:
        discrete: whether the outcomes are classes, so that accuracy makes sense.
        two_classes: whether the outcomes are two; `checked` returns the smaller as -1, the larger as +1.
        of_softplus: whether it is made of log(1 + eˣ), so that `expected` takes another way to its expectation.
        convex: whether -log p(y | η) is convex in η, twice differentiable by torch, as is β of `expected` once.
        self_concordant: whether its third derivative is at most its second.
        continuous: whether y are real numbers, so that p(y | η) is a density.
        link: "identity", "log", "logit" or "probit", the link of the mean of y, for default priors in the units of the
            data and for `accuracy`; "" where it is none of them.

    >>> likelihood: Likelihood = PoissonLog()
    >>> eta, variance, y = torch.zeros(1), torch.ones(1), torch.ones(1)
    >>> expected = likelihood.expected(eta, variance, y)
    >>> bool(expected[0] > likelihood.energy(eta, y))  # Jensen's inequality
    True
    """

    discrete: bool
    two_classes = of_softplus = False
    convex = self_concordant = continuous = False
    link: ClassVar[str] = ""

    @abstractmethod
    def energy(self, eta: Tensor, y: Tensor) -> Tensor:
        """Return -log p(y | η), of the broadcast shape of η and y."""

    @abstractmethod
    def expected(self, mean: Tensor, variance: Tensor, y: Tensor) -> Moments:
        """Return F = E[-log p(y | η)] under N(mean, variance), with ∂F/∂e and 2 ∂F/∂v."""

    def derivatives(self, eta: Tensor, y: Tensor) -> Moments:
        """Return -log p(y | η) with its first and second derivative in η, each without a graph."""
        with torch.enable_grad():
            eta = eta.detach().requires_grad_()
            energy = self.energy(eta, y)
            (slope,) = torch.autograd.grad(energy.sum(), eta, create_graph=True)
            (curvature,) = torch.autograd.grad(slope.sum(), eta, materialize_grads=True)
        return Moments(energy.detach(), slope.detach(), curvature)

    @abstractmethod
    def checked(self, y: Tensor) -> Tensor:
        """Return the targets in this likelihood's coding.

        Raises:
            InputError: if there are values that it cannot produce.
        """


def _softplus_at(mean: Tensor, variance: Tensor) -> Moments:
    """Of log(1 + eˣ) with two derivatives, under no variance."""
    slope = mean.sigmoid()
    return Moments(torch.nn.functional.softplus(mean, threshold=40), slope, slope * (-mean).sigmoid())


def _signs(y: Tensor) -> Tensor:
    """Two classes coded {0, 1}, {-1, 1} or two other numbers, smaller first, as -1 and +1."""
    values = torch.unique(y)
    if len(values) == 1:
        raise InputError(
            f"a Bernoulli family needs two classes in y; every one of the {y.numel()} targets is {float(values[0]):g}. "
            "Check the target column, or that the split has both classes; of rows that come in batches name both, "
            "classes=(0, 1)."
        )
    if len(values) > 2:
        raise InputError(
            f"a Bernoulli family needs two classes in y; got {len(values)} different values. "
            "Choose two of them, or another family."
        )
    return torch.where(y == values[1], 1.0, -1.0).to(y.dtype)


@final
class BernoulliLogit(Likelihood):
    """Two classes with the logistic link, p(y = ±1 | η) = 1/(1 + exp(-yη)): logistic regression.

    The expectation is F = E[softplus(η)] - (1 + y)/2 e.

    >>> y = torch.ones(1)
    >>> round(BernoulliLogit().energy(torch.zeros(1), y).item(), 4)  # -log ½
    0.6931
    """

    link = "logit"
    discrete = True
    convex = self_concordant = True
    two_classes = True
    of_softplus = True

    def energy(self, eta: Tensor, y: Tensor) -> Tensor:
        """Return softplus(-yη)."""
        return torch.nn.functional.softplus(-y * eta, threshold=40)

    def expected(self, mean: Tensor, variance: Tensor, y: Tensor, softplus: ExpectedSoftplus = softplus) -> Moments:
        """Return the moments of a softplus (Kumar et al. 2025, Eq 18 with the sign of y corrected)."""
        # softplus(-yη), not softplus(η) - η: no cancellation for well classified rows
        value, slope, curvature = softplus(less_product(y, mean), variance)
        return Moments(value, less_product(y, slope), curvature)

    def _bends(self, mean: Tensor, variance: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The derivatives of the curvature of `expected` in mean and variance."""
        slope, bend = softplus_bends(-y * mean, variance)
        return -y * slope, bend

    def derivatives(self, eta: Tensor, y: Tensor) -> Moments:
        """Return those of `expected` without variance."""
        return self.expected(eta, eta.new_zeros(()), y, _softplus_at)

    def checked(self, y: Tensor) -> Tensor:
        """Return the two classes as -1 and +1.

        Raises:
            InputError: if there are not two of them.
        """
        return _signs(y)


@final
class BernoulliProbit(Likelihood):
    """Two classes with the probit link, p(y = ±1 | η) = Φ(yη), by quadrature of -log Φ.

    >>> y = torch.ones(1)
    >>> round(BernoulliProbit().energy(torch.zeros(1), y).item(), 4)  # -log ½
    0.6931
    """

    link = "probit"
    discrete = True
    convex = True
    two_classes = True

    def energy(self, eta: Tensor, y: Tensor) -> Tensor:
        """Return -log Φ(yη)."""
        return normal_tail.energy(y * eta)

    def expected(self, mean: Tensor, variance: Tensor, y: Tensor) -> Moments:
        """Return the moments by quadrature, with r = φ/Φ: (-log Φ)' = -r, (-log Φ)'' = r (r + x)."""
        value, slope, curvature = expectation(normal_tail.negative_log_ndtr, y * mean, variance)
        return Moments(value, y * slope, curvature)

    def checked(self, y: Tensor) -> Tensor:
        """Return the two classes as -1 and +1.

        Raises:
            InputError: if there are not two of them.
        """
        return _signs(y)


@final
class PoissonLog(Likelihood):
    """Counts with the logarithmic link, y ~ Poisson(exp η): F = exp(e + v/2) - y e + log y!.

    >>> round(PoissonLog().energy(torch.zeros(1), torch.zeros(1)).item(), 4)  # no event at rate 1
    1.0
    """

    link = "log"
    discrete = False
    convex = self_concordant = True

    def energy(self, eta: Tensor, y: Tensor) -> Tensor:
        """Return exp η - yη + log y!."""
        return torch.exp(eta) - y * eta + torch.lgamma(y + 1)

    def expected(self, mean: Tensor, variance: Tensor, y: Tensor) -> Moments:
        """Return the moments by the log-normal mean, expanded about log y so that large counts do not cancel.

        With δ = e + v/2 - log y: F = y (exp δ - 1 - δ) + y v/2 + [y - y log y + log y!].
        """
        count = y.clamp_min(1.0)  # for y = 0 the first form is as good
        delta = mean + 0.5 * variance - count.log()
        excess = torch.expm1(delta)
        constant = torch.lgamma(y + 1) + count - torch.special.xlogy(count, count)
        rate = torch.exp(mean + 0.5 * variance)
        value = torch.where(y > 0, count * (excess - delta + 0.5 * variance) + constant, rate)
        return Moments(value, torch.where(y > 0, count * excess, rate), rate)

    def checked(self, y: Tensor) -> Tensor:
        """Return the counts as they are.

        Raises:
            InputError: if they are not 0, 1, 2, ..
        """
        return _counts("Poisson", y)


def _counts(family: str, y: Tensor) -> Tensor:
    bad = (y < 0) | (y != y.round())
    if bool(bad.any()):
        raise InputError(
            f"the {family} family needs counts 0, 1, 2, ..; got {int(bad.sum())} other values, "
            f"the first {float(y[bad][0]):g}. "
            "Use family='gaussian' for real-valued targets."
        )
    return y


@final
class NegativeBinomial(Likelihood):
    """Counts that vary more than Poisson's: y ~ NB with mean exp η and variance exp η + exp(2η)/r.

    With δ = η - log r, -log p = y softplus(-δ) + r softplus(δ) + log Γ(r) y!/Γ(y + r), the same as
    (y + r) softplus(δ) - yδ + .. without its cancellation; its expectation is in closed form.
    It is log-concave in η.

    Args:
        dispersion: r, positive and finite; Poisson in the limit r → ∞ (Hilbe 2011, NB2).

    Raises:
        InputError: if the dispersion is not positive and finite.

    >>> likelihood, zero = NegativeBinomial(1.0), torch.zeros(1, dtype=torch.float64)
    >>> [round(float(m), 12) + 0 for m in likelihood.expected(zero, zero, zero + 1)]  # p(1) = ½ ½ at mean 1
    [1.38629436112, 0.0, 0.5]
    """

    link = "log"
    discrete = False
    convex = self_concordant = True
    of_softplus = True

    def __init__(self, dispersion: float) -> None:
        what = "is r in the variance mean + mean²/r (family='poisson_log' is r without limit)"
        self.dispersion = read_number("dispersion", dispersion, what, above=0)

    def _constant(self, y: Tensor) -> Tensor:
        return math.lgamma(self.dispersion) + torch.lgamma(y + 1) - torch.lgamma(y + self.dispersion)

    def energy(self, eta: Tensor, y: Tensor) -> Tensor:
        """Return y softplus(-δ) + r softplus(δ) + log Γ(r) y!/Γ(y + r)."""
        delta = eta - math.log(self.dispersion)
        zeros, ones = (torch.nn.functional.softplus(x, threshold=40) for x in (-delta, delta))
        return y * zeros + self.dispersion * ones + self._constant(y)

    def expected(self, mean: Tensor, variance: Tensor, y: Tensor, softplus: ExpectedSoftplus = softplus) -> Moments:
        """Return the moments from the expectation of softplus(-|e|), the smaller one: the other is that + |e|."""
        delta, r = mean - math.log(self.dispersion), self.dispersion
        up = delta > 0
        size, larger, smaller = torch.where(up, delta, -delta), torch.where(up, r, y), torch.where(up, y, r)
        value, slope, curvature = softplus(-size, variance)
        turned = smaller * slope - larger * (1 - slope)  # in -size
        value = (y + r) * value + larger * size + self._constant(y)
        return Moments(value, torch.where(up, -turned, turned), (y + r) * curvature)

    def derivatives(self, eta: Tensor, y: Tensor) -> Moments:
        """Return those of `expected` without variance."""
        return self.expected(eta, eta.new_zeros(()), y, _softplus_at)

    def checked(self, y: Tensor) -> Tensor:
        """Return the counts as they are.

        Raises:
            InputError: if they are not 0, 1, 2, ..
        """
        return _counts("negative binomial", y)


@final
class GaussianNoise(Likelihood):
    """Real targets with Gaussian noise, y ~ N(η, noise²): F = ((y - e)² + v)/(2 noise²) + log(noise √(2π)).

    Args:
        noise: the standard deviation, in the units of y, positive and finite.

    Raises:
        InputError: if the noise is not positive and finite.

    >>> zero = torch.zeros(1)
    >>> [float(m) for m in GaussianNoise(0.5).expected(zero, zero, zero + 1)[1:]]  # (e - y)/noise² and 1/noise²
    [-4.0, 4.0]
    """

    link = "identity"
    discrete, continuous = False, True
    convex = self_concordant = True

    def __init__(self, noise: float = 1.0) -> None:
        self.noise = read_number("noise", noise, "is a standard deviation", above=0)
        if not 0 < self.noise * self.noise < math.inf:
            raise InputError(f"noise is a standard deviation; got {noise!r}, whose square is 0 or infinite.")

    def energy(self, eta: Tensor, y: Tensor) -> Tensor:
        """Return (y - η)²/(2 noise²) + log(noise √(2π))."""
        return 0.5 * ((y - eta) / self.noise).square() + math.log(self.noise * math.sqrt(2 * math.pi))

    def expected(self, mean: Tensor, variance: Tensor, y: Tensor) -> Moments:
        """Return the moments of a quadratic, in closed form."""
        precision = self.noise**-2
        value = self.energy(mean, y) + 0.5 * precision * variance
        return Moments(value, precision * (mean - y), torch.full_like(value, precision))

    def checked(self, y: Tensor) -> Tensor:
        """Return the targets as they are, since any finite number is one."""
        return y


@final
class StudentT(Likelihood):
    """Real targets with heavy-tailed noise, y = η + scale · t_ν: robust regression.

        -log p = ½(ν + 1) log(1 + x²) + log σ√ν B(½, ν/2),        x = (η - y)/(σ√ν)

    Its expectation and derivatives are uniformly accurate in the standard deviation of η
    (`gaussian_integrals.log1p_square`).  It is not log-concave: rows whose residual exceeds σ√ν have a
    negative curvature, H need not be positive definite, and the objective may have several minima.
    Steps found by trial cope; a constant lr may leave the cone.

    Args:
        scale: σ, in the units of y, positive and finite.
        dof: the degrees of freedom ν, positive and finite; Gaussian noise in the limit ν → ∞.

    Raises:
        InputError: if the scale or the degrees of freedom are not positive and finite.

    >>> likelihood, zero = StudentT(1.0, dof=1.0), torch.zeros(1, dtype=torch.float64)
    >>> [round(float(m), 12) for m in likelihood.expected(zero, zero, zero)]  # log π, 0, 2
    [1.144729885849, 0.0, 2.0]
    """

    link = "identity"
    discrete, continuous = False, True

    def __init__(self, scale: float, dof: float) -> None:
        self.scale = read_number("scale", scale, "is that of the noise", above=0)
        what = "is the degrees of freedom (GaussianNoise(scale) is the limit of many)"
        self.dof = read_number("dof", dof, what, above=0)
        self._width = self.scale * math.sqrt(self.dof)  # σ√ν
        self._constant = (
            math.lgamma(self.dof / 2) - math.lgamma((self.dof + 1) / 2) + math.log(self._width * math.sqrt(math.pi))
        )

    def energy(self, eta: Tensor, y: Tensor) -> Tensor:
        """Return ½(ν + 1) log(1 + x²) with its constant."""
        return 0.5 * (self.dof + 1) * torch.log1p(((eta - y) / self._width).square()) + self._constant

    def expected(self, mean: Tensor, variance: Tensor, y: Tensor) -> Moments:
        """Return the moments of log(1 + x²), x ~ N((e - y)/(σ√ν), v/(σ²ν))."""
        value, slope, curvature = log1p_square((mean - y) / self._width, variance / self._width**2)
        factor = 0.5 * (self.dof + 1)
        return Moments(
            factor * value + self._constant, factor / self._width * slope, factor / self._width**2 * curvature
        )

    def checked(self, y: Tensor) -> Tensor:
        """Return the targets as they are, since any finite number is one."""
        return y


FAMILIES: dict[str, type[Likelihood]] = {
    "bernoulli_logit": BernoulliLogit,
    "bernoulli_probit": BernoulliProbit,
    "poisson_log": PoissonLog,
    "gaussian": GaussianNoise,
}
_LINKS = {name: kind.link for name, kind in FAMILIES.items()} | {"negative_binomial": "log", "student_t": "identity"}


def link_of(family: str | Likelihood) -> str:
    """Return the link of a family by its name, or of a likelihood, "" where none is known."""
    return _LINKS.get(full_name(family), "") if isinstance(family, str) else family.link
