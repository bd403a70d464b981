"""Families: one log density each, log p(y | η, φ), with a link, a check of outcomes, priors of φ, and how y is drawn.

η is the linear predictor of a row and φ the unconstrained coordinates of what else the density needs, as the logarithm
of a residual standard deviation.  Everything that a fit needs follows from the log density by autograd; closed forms of
the derivatives stand where they are short.

Shapes.  η is (N, *more), as (N,), (N, S) of S draws or (N, S, K) of K nodes; y is a tuple of tensors that broadcast to
η, (N,), (N, 1) or (N, 1, 1); φ has its coordinates on the last axis, and what is before it broadcasts with η from the
right: (nphi,), (S, nphi) or (S, 1, nphi).  The η of a nominal family has one more axis, the last, of K - 1 categories.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchngvi.errors import InputError
from torchngvi.messages import full_name, hint, listed
from torchngvi.models.standardize import WIDTH, TargetSummary, location_and_unit
from torchngvi.numerics import special
from torchngvi.tables import priors

_DOF = 4.0  # of Student's t noise: heavy tails that still have a variance
_START = (0.1, 100.0)  # where a size, a precision or a shape begins, from the moments of y: where its prior has mass
_LINEAR = 0.85  # of the largest logarithm: from there on exponentials go on linearly, e⁶⁰³ in float64, and stay finite
_STIRLING = 10.0  # from where on the series of log Γ to 1/x⁹ has rounding alone
_NARROW, _TILT = 3e-3, 0.3  # a category of the probit link is narrow if its width, and that times its place, are less
_PROPORTION = 1e-3  # of a success: how far a proportion times its trials may be from a whole number
MOST_CATEGORIES = 50  # each threshold is a parameter, and a column with more values is a number or a name as a rule


class Family(ABC):
    """The abstract base of families: what the outcome of a row is distributed as, given its linear predictor.

    A family of your own says `log_prob`, `mean` and `draw`, its name and link, and the parameters that it has besides
    the linear predictor; `torchngvi.tables.family_checks.check_family` then compares these with one another.  The rest
    has defaults.  One of the library is held to more: value and two derivatives are finite to |η| = 700, log Γ is taken
    once a row, and `start` is within 0.25 nats a row of the truth.

    Attributes:
        name: as users write it.
        link: of the mean, for default priors: "identity", "log", "logit" or "probit", "" for none of them.
        ratio: what e^coefficient is called, "" where it is nothing.
        discrete: whether y is from a countable set.
        concave: whether log p(y | η, φ) is concave in η for every φ.
        intercept: whether the design has an intercept; thresholds take its place where not.
        extra: the names of what stands beside the outcome: "trials", "event".
        parameters: the names of the natural-scale parameters, one for each coordinate φ.
        scales: the way from φ to the parameter for each of them, "log" (the default), "logit" or "identity".
        bounds: the smallest and the largest outcome; a continuous outcome lies strictly between.
        outcomes: labels of the categories, else None.
        nominal: whether the categories have no order, and each but the first has a linear predictor of its own; of
            `Multinomial` alone.

    >>> from torchngvi.tables.family_checks import check_family
    >>> class Laplace(Family):  # p(y) = exp(-|y - η|/b)/(2b)
    ...     name, link, discrete, concave = "laplace", "identity", False, True
    ...     parameters = ("spread",)  # b, of which φ is the logarithm
    ...
    ...     def log_prob(self, eta, y, phi):
    ...         log_b = phi[..., 0]
    ...         return -(y[0] - eta).abs() * torch.exp(-log_b) - log_b - math.log(2)
    ...
    ...     def mean(self, eta, phi):
    ...         return eta + 0 * phi[..., 0]
    ...
    ...     def draw(self, eta, phi, generator, extra=()):
    ...         shape = torch.broadcast_shapes(eta.shape, phi.shape[:-1])
    ...         u = torch.rand(shape, generator=generator, dtype=eta.dtype, device=eta.device) - 0.5
    ...         return eta - phi[..., 0].exp() * u.sign() * torch.log1p(-2 * u.abs())
    >>> check_family(Laplace())
    """

    name: str
    link: str
    ratio: str = ""
    discrete: bool
    concave: bool = False
    intercept: bool = True
    extra: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    bounds: tuple[float, float] = (-math.inf, math.inf)
    outcomes: tuple[str, ...] | None = None
    nominal: bool = False

    @abstractmethod
    def log_prob(
        self,
        eta: Tensor,  # (N, *more)
        y: tuple[Tensor, ...],  # broadcastable to eta
        phi: Tensor,  # (*broadcastable to eta, nphi)
    ) -> Tensor:
        """Compute log p(y | η, φ) with all constants, elementwise, twice differentiable in η and φ."""

    @abstractmethod
    def mean(self, eta: Tensor, phi: Tensor) -> Tensor:
        """Compute E[y | η, φ]: of trials the probability of one, of categories the probabilities on a last axis."""

    @abstractmethod
    def draw(self, eta: Tensor, phi: Tensor, generator: torch.Generator, extra: tuple[Tensor, ...] = ()) -> Tensor:
        """Draw y given η, φ and what stands beside it; of survival the time of the event."""

    def settled(self, y: tuple[Tensor, ...], weights: Tensor, offset: Tensor) -> Self:
        """Return the family that knows what it needs of the data, as the unit of y or its categories.

        y is the outcome as it is, or in the coding of `checked`; categories are labelled by the values that are here.
        """
        return self

    def checked(self, y: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the outcome in the coding of this family: counts or numbers within the bounds by default.

        Raises:
            InputError: if there are values that it cannot produce; the first of them is named.
        """
        self._columns(y)
        low, high = self.bounds
        values = y[0]
        if self.discrete:
            known = "0, 1, 2, .." if low == 0 else "whole numbers"
            _refuse(self.name, f"counts {known}", values, (values < low) | (values > high) | (values != values.round()))
        else:
            known = (
                {0.0: "positive numbers"}.get(low, "finite numbers") if high == math.inf else f"{low:g} < y < {high:g}"
            )
            _refuse(self.name, known, values, (values <= low) | (values >= high))
        return y

    def _columns(self, y: tuple[Tensor, ...]) -> None:
        if len(y) != 1 + len(self.extra):
            raise InputError(
                f"the {self.name} family takes {' and '.join(('an outcome', *self.extra))}; got {len(y)} "
                f"column{'s' * (len(y) != 1)}.{' For two classes say bernoulli.' * (self.name == 'binomial')}"
            )

    def jet(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute -log p(y | η, φ) and its first two derivatives in η; by autograd where there is no closed form."""
        kept = torch.is_grad_enabled() and (eta.requires_grad or phi.requires_grad)
        shape = torch.broadcast_shapes(eta.shape, phi.shape[:-1])
        with torch.enable_grad():
            at = (eta if kept else eta.detach()).expand(shape).clone()
            at = at if at.requires_grad else at.requires_grad_()
            value = -self.log_prob(at, y, phi if kept else phi.detach())
            (slope,) = torch.autograd.grad(value.sum(), at, create_graph=True, materialize_grads=True)
            curvature = torch.zeros_like(slope)
            if slope.requires_grad:
                (curvature,) = torch.autograd.grad(
                    slope.sum(), at, create_graph=kept, retain_graph=True, materialize_grads=True
                )
        return (value, slope, curvature) if kept else (value.detach(), slope.detach(), curvature.detach())

    def start(self, y: tuple[Tensor, ...], offset: Tensor, weights: Tensor) -> tuple[float, Tensor]:
        """Return where a search begins: the intercept on the link scale, and φ (nphi,)."""
        summary = TargetSummary.of(y[0], self.link, offset, weights)
        phi = y[0].new_tensor(self._start_phi(y, offset, weights), dtype=torch.float64)
        return summary.location_and_unit(self.link)[0], phi

    def _start_phi(self, y: tuple[Tensor, ...], offset: Tensor, weights: Tensor) -> list[float]:
        return [0.0] * len(self.parameters)

    def parameter_prior(self) -> tuple[priors.Prior, ...]:
        """Return the default priors of the natural-scale parameters, in the units of y that `settled` has seen.

        A positive one has half-t(3, 2.5), a share the uniform distribution, another number t(3, 0, 2.5).
        """
        usual = {
            "log": priors.HalfT(scale=WIDTH),
            "logit": priors.Beta(1.0, 1.0),
            "identity": priors.StudentT(sd=WIDTH),
        }
        return tuple(usual[scale] for scale in self.ways)

    @property
    def ways(self) -> tuple[str, ...]:
        """The scale of each parameter: ``scales``, or "log" of all."""
        return self.scales or ("log",) * len(self.parameters)

    def natural(self, phi: Tensor) -> Tensor:
        """Return the natural-scale parameters of φ, (S, nphi), in the order of their names."""
        maps: dict[str, Callable[[Tensor], Tensor]] = {"log": torch.exp, "logit": torch.sigmoid}
        columns = [maps.get(scale, torch.clone)(phi[..., j]) for j, scale in enumerate(self.ways)]
        return torch.stack(columns, -1) if columns else phi

    def log_jacobian(self, phi: Tensor) -> Tensor:
        """Return log |d natural/dφ| of each row of φ, (S,)."""
        total = phi.new_zeros(phi.shape[:-1])
        for j, scale in enumerate(self.ways):
            if scale != "identity":
                total = total + (phi[..., j] if scale == "log" else logsigmoid(phi[..., j]) + logsigmoid(-phi[..., j]))
        return total


_CORRECT = "Correct these cells or leave their rows out, or choose another family."


def _refuse(family: str, known: str, values: Tensor, bad: Tensor, remedy: str = _CORRECT) -> None:
    """Refuse the first of bad values, or of those that are not numbers."""
    bad = bad | ~values.isfinite()
    if bool(bad.any()):
        first = int(bad.reshape(-1).nonzero()[0, 0])
        raise InputError(
            f"the {family} family needs {known}; got {int(bad.sum())} other values, the first "
            f"{float(values.reshape(-1)[first]):g} in row {first + 1} of {values.numel()}. {remedy}"
        )


def _softplus(x: Tensor) -> Tensor:
    """Log(1 + eˣ), to rounding."""
    return torch.nn.functional.softplus(x, threshold=40)


def _expm1(x: Tensor) -> Tensor:
    """Return eˣ - 1, which goes on linearly where it nears the largest number: densities are 0 there."""
    limit = _LINEAR * math.log(torch.finfo(x.dtype).max)
    return x.clamp_max(limit).expm1() + torch.where(x > limit, math.exp(limit) * (x - limit), 0.0)


def _exp(x: Tensor) -> Tensor:
    """Return eˣ, which goes on linearly where it nears the largest number."""
    limit = _LINEAR * math.log(torch.finfo(x.dtype).max)
    return x.clamp_max(limit).exp() + torch.where(x > limit, math.exp(limit) * (x - limit), 0.0)


def _tail(x: Tensor) -> Tensor:
    """Stirling's series of log Γ(x) - (x - ½) log x + x - ½ log 2π, for x ≥ 10 (DLMF 5.11.1)."""
    inverse = x.reciprocal()
    square = inverse.square()
    return inverse * (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square * (1 / 1680 - square / 1188))))


def _stirling(log_x: Tensor) -> Tensor:
    """Return x log x - x - log Γ(x), without cancellation where x is large."""
    far = log_x > math.log(_STIRLING)
    large, small = torch.where(far, log_x, math.log(_STIRLING)), torch.where(far, 0.0, log_x)
    near = small.exp()
    series = 0.5 * large - 0.5 * math.log(2 * math.pi) - _tail(large.exp())
    return torch.where(far, series, near * (small - 1) + small - torch.lgamma(near + 1))


def _rising(log_x: Tensor, count: Tensor) -> Tensor:
    """Return log Γ(x + n) - log Γ(x) for n = 0, 1, .., without cancellation where x is large or nearly 0."""
    n = count.clamp_min(1)
    far = log_x > math.log(_STIRLING)
    large, near = torch.where(far, log_x, math.log(_STIRLING)), torch.where(far, 0.0, log_x)
    x, small = large.exp(), near.exp()
    series = (x + n - 0.5) * torch.log1p(n * torch.exp(-large)) + n * (large - 1) + _tail(x + n) - _tail(x)
    other = near + torch.lgamma(small + n) - torch.lgamma(small + 1)
    return torch.where(count > 0, torch.where(far, series, other), 0.0)


def _log_some(log_t: Tensor, small: float = -2.3) -> Tensor:
    """Return log(1 - e⁻ᵗ), the probability of at least one event, without cancellation for any t > 0."""
    # small: log of the t below which log((1 - e⁻ᵗ)/t) is its series to t⁶, which has rounding alone there
    few = log_t < small
    square = torch.where(few, 2 * log_t, 2 * small).exp()
    series = -0.5 * (0.5 * torch.where(few, 2 * log_t, 2 * small)).exp()
    series = log_t + series + square * (1 / 24 - square * (1 / 2880 - square / 181440))
    t = _exp(torch.where(few, 0.0, log_t))
    return torch.where(few, series, torch.log(-torch.expm1(-t)))


def _log_softplus(x: Tensor) -> Tensor:
    """Log log(1 + eˣ)."""
    low = x < -20
    left = torch.where(low, x, -20.0)
    return torch.where(low, left - 0.5 * left.exp(), _softplus(torch.where(low, 0.0, x)).log())


def _log_choose(n: Tensor, y: Tensor) -> Tensor:
    """The logarithm of the binomial coefficient."""
    return torch.lgamma(n + 1) - torch.lgamma(y + 1) - torch.lgamma(n - y + 1)


def _pick(table: Tensor, index: Tensor) -> Tensor:
    """The entry of the last axis with the number that each index has, 0 where there is none."""
    total = torch.zeros((), dtype=table.dtype, device=table.device)
    for at in range(table.shape[-1]):
        total = total + torch.where(index == at, table[..., at], 0.0)
    return total


def _positive(x: Tensor) -> Tensor:
    """Positive numbers that underflow to 0, or are beyond all numbers, as the nearest number."""
    return x.clamp(torch.finfo(x.dtype).tiny, torch.finfo(x.dtype).max)


def _middle(share: float) -> float:
    """A share of rows, not near 0 or 1."""
    return min(max(share, 0.05), 0.95)


def _beta_draws(eta: Tensor, log_precision: Tensor, generator: torch.Generator) -> Tensor:
    """Draws of the beta distribution with logit mean and log precision, never 0 or 1."""
    shape = torch.broadcast_shapes(eta.shape, log_precision.shape)
    one = _gamma(torch.exp(log_precision + logsigmoid(eta)).expand(shape), generator)
    other = _gamma(torch.exp(log_precision + logsigmoid(-eta)).expand(shape), generator)
    return (one / (one + other)).clamp(torch.finfo(one.dtype).tiny, 1 - torch.finfo(one.dtype).eps)


def _full(shape_of: Tensor, phi: Tensor) -> torch.Size:
    """The shape of what is drawn."""
    return torch.broadcast_shapes(shape_of.shape, phi.shape[:-1])


def _uniform(shape: torch.Size, like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform draws, never 0 or 1."""
    u = torch.rand(shape, generator=generator, dtype=like.dtype, device=like.device)
    return u.clamp(torch.finfo(u.dtype).tiny, 1 - torch.finfo(u.dtype).eps)


def _normal(shape: torch.Size, like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal draws."""
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


def _gamma(shape_parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Draws of the gamma distribution with rate 1."""
    return torch._standard_gamma(shape_parameter, generator)


def _poisson(rate: Tensor, generator: torch.Generator, largest: float = 2.0**52) -> Tensor:
    """Draws of counts; no count is above 2⁵²."""
    # largest: the largest count that is drawn, up to which each whole number is one of float64
    return torch.poisson(rate.clamp_max(largest), generator)


def _between(x: float) -> float:
    """The logarithm of a size where a search begins."""
    low, high = _START
    return math.log(min(max(x, low), high)) if x == x else 0.0


def _moments(y: Tensor, weights: Tensor) -> tuple[float, float]:
    """The weighted mean and variance."""
    share = weights / weights.sum()
    mean = (share * y).sum()
    return float(mean), float((share * (y - mean).square()).sum())


class _OfLink(Family):
    """A family whose mean is the inverse of its link at η."""

    own_priors: tuple[priors.Prior, ...] = ()  # of its parameters, where they are not the usual ones

    def settled(self, y: tuple[Tensor, ...], weights: Tensor, offset: Tensor) -> Self:
        """Return the family itself, after a check that an outcome with noise is not the same in all rows."""
        left = y[0][:0] if self.discrete else (LINKS[self.link](self.checked(y)[0]) - offset)[weights > 0]
        rounding = 2.0**-51 * float((offset.abs().max() + left.abs().max()) * offset.any()) if len(left) else 0.0
        if len(left) > 1 and bool(((left - left[0]).abs() <= rounding).all()):
            what = "its offset plus one number" if offset.any() else f"{float(y[0][weights > 0][0]):g}"
            raise InputError(
                f"the outcome is {what} in all {len(left)} rows, so that there is no "
                f"{self.parameters[0]} to be learned. Check which column is the outcome, and which rows are left."
            )
        return self

    def mean(self, eta: Tensor, phi: Tensor) -> Tensor:
        """Return the inverse of the link at η."""
        return _INVERSES[self.link](eta).expand(_full(eta, phi))

    def parameter_prior(self) -> tuple[priors.Prior, ...]:
        """Return the priors of the family, or the usual ones."""
        return self.own_priors or super().parameter_prior()


LINKS: dict[str, Callable[[Tensor], Tensor]] = {"identity": torch.positive, "log": torch.log, "logit": torch.logit}
_INVERSES: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": torch.positive,
    "log": torch.exp,
    "logit": torch.sigmoid,
    "probit": torch.special.ndtr,
}
_OF_ROOT = (priors.Power(priors.HalfT(), -0.5),)  # half-t(3, 1) of 1/√φ, which is 0 where there is no such noise


class Gaussian(_OfLink):
    """Real outcomes with normal noise, y ~ N(η, sd²); φ = log sd.

    For outcomes that vary about their mean symmetrically and without outliers.
    """

    name, link, discrete, concave = "gaussian", "identity", False, True
    parameters = ("residual sd",)
    unit = 1.0

    def settled(self, y: tuple[Tensor, ...], weights: Tensor, offset: Tensor) -> Self:
        """Return the family that knows the sd of y, the unit of its default prior."""
        family = copy.copy(super().settled(y, weights, offset))
        family.unit = location_and_unit(y[0], "identity", offset, weights)[1]
        return family

    def log_prob(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> Tensor:
        """Return log N(y; η, e^{2φ})."""
        log_sd = phi[..., 0]
        return -0.5 * ((y[0] - eta) * torch.exp(-log_sd)).square() - log_sd - 0.5 * math.log(2 * math.pi)

    def jet(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return those of a parabola."""
        value, precision = -self.log_prob(eta, y, phi), torch.exp(-2 * phi[..., 0])
        return value, (eta - y[0]) * precision, precision.expand(value.shape)

    def draw(self, eta: Tensor, phi: Tensor, generator: torch.Generator, extra: tuple[Tensor, ...] = ()) -> Tensor:
        """Draw η and noise."""
        return eta + phi[..., 0].exp() * _normal(_full(eta, phi), eta, generator)

    def _start_phi(self, y: tuple[Tensor, ...], offset: Tensor, weights: Tensor) -> list[float]:
        return [math.log(location_and_unit(y[0], "identity", offset, weights)[1])]

    def parameter_prior(self) -> tuple[priors.Prior, ...]:
        """Return half-t of three degrees of freedom, 2.5 sds of y wide."""
        return (priors.HalfT(scale=WIDTH * self.unit),)


class StudentT(Gaussian):
    """Real outcomes with outliers, y = η + scale · t_4; φ = log scale.

    log p(y) = log Γ(5/2)/(Γ(2) √(4π)) - φ - (5/2) log(1 + (y - η)²/(4 e^{2φ}))
    """

    name, concave = "student_t", False
    parameters = ("scale",)

    def log_prob(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> Tensor:
        """Return the log density of t_4."""
        half, log_scale = 0.5 * (_DOF + 1), phi[..., 0]
        constant = math.lgamma(half) - math.lgamma(0.5 * _DOF) - 0.5 * math.log(_DOF * math.pi)
        return constant - log_scale - half * torch.log1p(((eta - y[0]) * torch.exp(-log_scale)).square() / _DOF)

    def jet(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return those of ½(ν + 1) log(1 + x²/ν), the curvature negative where |x| > √ν."""
        precision = torch.exp(-2 * phi[..., 0])
        square = (eta - y[0]).square() * precision / _DOF
        weight = (_DOF + 1) / _DOF * precision / (1 + square)
        return -self.log_prob(eta, y, phi), weight * (eta - y[0]), weight * (1 - square) / (1 + square)

    def draw(self, eta: Tensor, phi: Tensor, generator: torch.Generator, extra: tuple[Tensor, ...] = ()) -> Tensor:
        """Draw η and noise."""
        z = _normal(_full(eta, phi), eta, generator)
        square = _gamma(torch.full_like(z, 0.5 * _DOF), generator) / (0.5 * _DOF)
        return eta + phi[..., 0].exp() * z * square.rsqrt()

    def _start_phi(self, y: tuple[Tensor, ...], offset: Tensor, weights: Tensor) -> list[float]:
        return [super()._start_phi(y, offset, weights)[0] + 0.5 * math.log((_DOF - 2) / _DOF)]


class Bernoulli(_OfLink):
    """Two classes with the logistic link, p(y = 1 | η) = 1/(1 + e^{-η}); the class that sorts last is the success.

    For yes and no; e^coefficient is an odds ratio.
    """

    name, link, ratio, discrete, concave = "bernoulli", "logit", "odds ratio", True, True
    bounds = (0.0, 1.0)
    classes: tuple[float, float] | None = None

    def settled(self, y: tuple[Tensor, ...], weights: Tensor, offset: Tensor) -> Self:
        """Return the family that knows which two numbers the classes are."""
        family = copy.copy(self)
        family.classes = self._classes(y[0])
        return family

    def _classes(self, y: Tensor) -> tuple[float, float]:
        _refuse(self.name, "two classes", y, torch.zeros_like(y, dtype=torch.bool))
        values = torch.unique(y).tolist()
        if len(values) != 2:
            raise InputError(
                f"the {self.name} family needs two classes in the outcome; got "
                + (
                    f"{len(values)} different values. Choose two of them, or a family such as multinomial or ordinal."
                    if len(values) > 2
                    else f"{values[0]:g} in every row. Check the column, or choose other rows."
                )
            )
        return values[0], values[1]

    def checked(self, y: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the two classes as 0 and 1."""
        low, high = self.classes or self._classes(y[0])
        _refuse(self.name, f"the classes {low:g} and {high:g}", y[0], (y[0] != low) & (y[0] != high))
        return ((y[0] == high).to(y[0].dtype),)

    def log_prob(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> Tensor:
        """Return -log(1 + e^{∓η})."""
        return logsigmoid((2 * y[0] - 1) * eta)

    def jet(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return those of the logistic function."""
        sign = 2 * y[0] - 1
        other = torch.sigmoid(-sign * eta)
        return -self.log_prob(eta, y, phi), -sign * other, other * torch.sigmoid(sign * eta)

    def draw(self, eta: Tensor, phi: Tensor, generator: torch.Generator, extra: tuple[Tensor, ...] = ()) -> Tensor:
        """Draw 0 or 1."""
        return (_uniform(_full(eta, phi), eta, generator) < self.mean(eta, phi)).to(eta.dtype)


class Probit(Bernoulli):
    """Two classes with the probit link, p(y = 1 | η) = Φ(η)."""

    name, link, ratio = "probit", "probit", ""

    def log_prob(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> Tensor:
        """Return log Φ(±η)."""
        return -special.energy((2 * y[0] - 1) * eta)

    def jet(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return those of -log Φ, without cancellation in its tail."""
        sign = 2 * y[0] - 1
        value, slope, curvature = special.negative_log_ndtr(sign * eta)
        return value, sign * slope, curvature


class Poisson(_OfLink):
    """Counts with the logarithmic link, y ~ Poisson(e^η); e^coefficient is a rate ratio.

    For counts of events that come independently of one another; with exposure add ``offset(log(exposure))``.
    """

    name, link, ratio, discrete, concave = "poisson", "log", "rate ratio", True, True
    bounds = (0.0, math.inf)

    def log_prob(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> Tensor:
        """Return yη - e^η - log y!."""
        return y[0] * eta - eta.exp() - torch.lgamma(y[0] + 1)

    def jet(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return those of the exponential function."""
        rate = eta.exp()
        return rate - y[0] * eta + torch.lgamma(y[0] + 1), rate - y[0], rate

    def draw(self, eta: Tensor, phi: Tensor, generator: torch.Generator, extra: tuple[Tensor, ...] = ()) -> Tensor:
        """Draw counts."""
        return _poisson(eta.exp().expand(_full(eta, phi)), generator)


def _trials(extra: tuple[Tensor, ...], name: str) -> Tensor:
    """The trials of rows whose successes are drawn."""
    if not extra:
        raise InputError(
            f"a response of the {name} family needs the trials of each row, and these rows have none. Let the new "
            "table have the column of trials that the formula names, as prop(s, n) needs the column n; of arrays hand "
            "in extra=(trials,)."
        )
    return extra[0]


class Binomial(_OfLink):
    """Successes of trials with the logistic link, y ~ Binomial(n, 1/(1 + e^{-η})); y = (successes, n).

    For counts out of a known number; proportions are taken where the trials are there as well.  e^coefficient is an
    odds ratio.
    """

    name, link, ratio, discrete, concave = "binomial", "logit", "odds ratio", True, True
    extra = ("trials",)
    bounds = (0.0, math.inf)

    def checked(self, y: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return successes and trials; numbers between 0 and 1, not all of them whole, are proportions of these."""
        self._columns(y)
        successes, trials = y
        _refuse(self.name, "trials 0, 1, 2, ..", trials, (trials < 0) | (trials != trials.round()))
        said = "Write prop(s, n) for s successes of n trials in a formula; weights are no trials."
        shares, said = (successes >= 0) & (successes <= 1), said if bool((trials == 1).all()) else _CORRECT
        if bool(shares.all()) and bool((successes != successes.round()).any()):
            counts = (successes * trials).round()
            off = (successes * trials - counts).abs() > _PROPORTION
            _refuse(self.name, "proportions that are a whole number of the trials", successes, off, said)
            successes = counts
        bad = (successes < 0) | (successes != successes.round()) | (successes > trials)
        _refuse(self.name, "successes 0, 1, .. up to the trials, prop(successes, trials) in a formula", successes, bad)
        return successes, trials

    def log_prob(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> Tensor:
        """Return that of successes and failures, and the number of their orders."""
        k, n = y
        return k * logsigmoid(eta) + (n - k) * logsigmoid(-eta) + _log_choose(n, k)

    def jet(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return those of the logistic function."""
        k, n = y
        p, q = torch.sigmoid(eta), torch.sigmoid(-eta)
        return -self.log_prob(eta, y, phi), (n - k) * p - k * q, n * p * q

    def draw(self, eta: Tensor, phi: Tensor, generator: torch.Generator, extra: tuple[Tensor, ...] = ()) -> Tensor:
        """Draw the number of successes."""
        p = torch.sigmoid(eta).expand(_full(eta, phi))
        return torch.binomial(_trials(extra, self.name).to(p).expand(p.shape).contiguous(), p, generator)

    def start(self, y: tuple[Tensor, ...], offset: Tensor, weights: Tensor) -> tuple[float, Tensor]:
        """Return the link of the share of successes of all trials, and φ."""
        k, n = y
        return super().start((k / n.clamp_min(1),), offset, weights * n)


class BetaBinomial(Binomial):
    """Successes of trials that vary more than binomial ones: y ~ Binomial(n, p), p ~ Beta(μψ, (1 - μ)ψ).

    μ = 1/(1 + e^{-η}) and φ = log ψ, the precision; y = (successes, n).  The variance is nμ(1 - μ)(n + ψ)/(1 + ψ), as
    brms' ``beta_binomial`` has it.
    """

    name, concave = "beta_binomial", False
    parameters, own_priors = ("precision",), _OF_ROOT

    def log_prob(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> Tensor:
        """Return log C(n, y) B(y + μψ, n - y + (1 - μ)ψ)/B(μψ, (1 - μ)ψ)."""
        (k, n), log_precision = y, phi[..., 0]
        ones, zeros = log_precision + logsigmoid(eta), log_precision + logsigmoid(-eta)
        return _rising(ones, k) + _rising(zeros, n - k) - _rising(log_precision, n) + _log_choose(n, k)

    jet = Family.jet  # by autograd

    def draw(self, eta: Tensor, phi: Tensor, generator: torch.Generator, extra: tuple[Tensor, ...] = ()) -> Tensor:
        """Draw the number of successes."""
        p = _beta_draws(eta, phi[..., 0], generator)
        return torch.binomial(_trials(extra, self.name).to(p).expand(p.shape).contiguous(), p, generator)


class NegativeBinomial(Poisson):
    """Counts that vary more than Poisson's, with mean e^η and variance e^η + e^{2η}/r; φ = log r, the size.

    With δ = η - φ, -log p = y log(1 + e^{-δ}) + r log(1 + e^δ) + log Γ(r) y!/Γ(y + r) (Hilbe 2011, NB2), in
    brms ``negbinomial`` and in glmmTMB ``nbinom2``.
    """

    name, parameters, own_priors = "negative_binomial", ("size",), _OF_ROOT  # 1/√r: the sd of a factor of the rates

    def log_prob(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> Tensor:
        """Return the log density."""
        log_size = phi[..., 0]
        delta, constant = eta - log_size, _rising(log_size, y[0]) - torch.lgamma(y[0] + 1)
        return constant - y[0] * _softplus(-delta) - log_size.exp() * _softplus(delta)

    def jet(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return those of the logistic function."""
        delta, size = eta - phi[..., 0], phi[..., 0].exp()
        p, q = torch.sigmoid(delta), torch.sigmoid(-delta)
        return -self.log_prob(eta, y, phi), size * p - y[0] * q, (y[0] + size) * p * q

    def draw(self, eta: Tensor, phi: Tensor, generator: torch.Generator, extra: tuple[Tensor, ...] = ()) -> Tensor:
        """Draw counts whose rates have gamma distributions."""
        size = phi[..., 0].exp().expand(_full(eta, phi))
        return _poisson(eta.exp() * (_gamma(size, generator) / size), generator)

    def _start_phi(self, y: tuple[Tensor, ...], offset: Tensor, weights: Tensor) -> list[float]:
        mean, variance = _moments(y[0], weights)
        return [_between(mean * mean / max(variance - mean, mean * mean / _START[1]))] if mean > 0 else [0.0]


class _Zeros(Family):
    """Counts of a family of one parameter or none, whose zeros have a share of their own with coordinate φ_0."""

    link, ratio, discrete = "log", "rate ratio", True
    bounds = (0.0, math.inf)
    counts: Family

    def _none(self, eta: Tensor, phi: Tensor) -> Tensor:
        """Return log t, where the counts are 0 with probability e⁻ᵗ."""
        if not self.counts.parameters:
            return eta
        return phi[..., 1] + _log_softplus(eta - phi[..., 1])

    def parameter_prior(self) -> tuple[priors.Prior, ...]:
        """Return the uniform prior of the share, and that of the counts."""
        return (priors.Beta(1.0, 1.0), *self.counts.parameter_prior())


class ZeroInflatedPoisson(_Zeros):
    """Counts with zeros beyond Poisson's: p(0) = π + (1 - π) e^{-μ}, p(y) = (1 - π) Poisson(y; μ), φ = logit π.

    For counts where some rows could not have an event, in a share π of all that is learned; μ = e^η is the mean of
    the others, and e^coefficient the ratio of their rates.
    """

    name = "zero_inflated_poisson"
    parameters: tuple[str, ...] = ("surplus zeros",)
    scales: tuple[str, ...] = ("logit",)
    counts: Family = Poisson()

    def log_prob(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> Tensor:
        """Return that of a mixture of 0 and of counts."""
        there = logsigmoid(-phi[..., 0]) + self.counts.log_prob(eta, y, phi[..., 1:])
        zero = logsigmoid(phi[..., 0]) + _softplus(-phi[..., 0] - _exp(self._none(eta, phi)))
        return torch.where(y[0] == 0, zero, there)

    def mean(self, eta: Tensor, phi: Tensor) -> Tensor:
        """Return (1 - π) e^η."""
        return torch.sigmoid(-phi[..., 0]) * eta.exp()

    def draw(self, eta: Tensor, phi: Tensor, generator: torch.Generator, extra: tuple[Tensor, ...] = ()) -> Tensor:
        """Draw which rows are surplus zeros, and the counts of the others."""
        counts = self.counts.draw(eta.expand(_full(eta, phi)), phi[..., 1:], generator)
        return torch.where(_uniform(counts.shape, counts, generator) < torch.sigmoid(phi[..., 0]), 0.0, counts)

    def start(self, y: tuple[Tensor, ...], offset: Tensor, weights: Tensor) -> tuple[float, Tensor]:
        """Return half of the zeros as surplus, and the counts with the mean that is left."""
        rows = (y[0] == 0).to(weights)
        surplus = 0.5 * _middle(float((rows * weights).sum() / weights.sum()))
        location, phi = self.counts.start(y, offset, weights)
        share = math.log(surplus / (1 - surplus))
        return location - math.log1p(-surplus), torch.cat([phi.new_tensor([share]), phi])


class ZeroInflatedNegativeBinomial(ZeroInflatedPoisson):
    """Counts with zeros beyond those of the negative binomial distribution; φ = (logit π, log size)."""

    name = "zero_inflated_negative_binomial"
    parameters, scales, counts = ("surplus zeros", "size"), ("logit", "log"), NegativeBinomial()


class HurdlePoisson(_Zeros):
    """Counts whose zeros are all of one kind: p(0) = π, p(y) = (1 - π) Poisson(y; μ)/(1 - e^{-μ}), φ = logit π.

    For counts that begin with a decision, as visits to a doctor; μ = e^η, and e^coefficient is the ratio
    of rates before zeros are taken out.
    """

    name, concave = "hurdle_poisson", True
    parameters: tuple[str, ...] = ("zeros",)
    scales: tuple[str, ...] = ("logit",)
    counts: Family = Poisson()

    def log_prob(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> Tensor:
        """Return that of a zero, or of a count above 0."""
        some = self.counts.log_prob(eta, y, phi[..., 1:]) - _log_some(self._none(eta, phi))
        return torch.where(y[0] == 0, logsigmoid(phi[..., 0]), logsigmoid(-phi[..., 0]) + some)

    def mean(self, eta: Tensor, phi: Tensor) -> Tensor:
        """Return (1 - π) e^η/P(count > 0)."""
        return torch.exp(logsigmoid(-phi[..., 0]) + eta - _log_some(self._none(eta, phi)))

    def draw(self, eta: Tensor, phi: Tensor, generator: torch.Generator, extra: tuple[Tensor, ...] = ()) -> Tensor:
        """Draw the time of the first event, given that there is one in a unit of time, and count those after it."""
        u = _uniform(_full(eta, phi), eta, generator)
        none = _exp(self._none(eta, phi))
        passed = -torch.log1p(u * torch.expm1(-none))  # the integral of the hazard up to the first event
        if self.counts.parameters:  # rates have gamma distributions, which the time of the first event tells of
            log_size = phi[..., 1].expand(u.shape)
            after = torch.exp(log_size - eta)  # events have rates gamma(size)/after
            first = after * torch.expm1(passed * torch.exp(-log_size))
            rest = (1 - first).clamp_min(0) * _gamma(log_size.exp() + 1, generator) / (after + first)
        else:
            rest = (eta.exp() - passed).clamp_min(0)
        some = 1 + _poisson(rest, generator)
        return torch.where(_uniform(u.shape, u, generator) < torch.sigmoid(phi[..., 0]), 0.0, some)

    def start(self, y: tuple[Tensor, ...], offset: Tensor, weights: Tensor) -> tuple[float, Tensor]:
        """Return the share of zeros, and the counts above 0 as they are."""
        some = weights * (y[0] > 0)
        zeros = _middle(float(1 - some.sum() / weights.sum()))
        location, phi = self.counts.start(y, offset, some if bool((some > 0).any()) else weights)
        return location, torch.cat([phi.new_tensor([math.log(zeros / (1 - zeros))]), phi])


class HurdleNegativeBinomial(HurdlePoisson):
    """Counts whose zeros are all of one kind, the others negative binomial given that they are above 0.

    φ = (logit π, log size).
    """

    name, concave = "hurdle_negative_binomial", False
    parameters, scales, counts = ("zeros", "size"), ("logit", "log"), NegativeBinomial()


class _Categories(Family):
    """Outcomes that are categories, coded 0, 1, .., by labels that are given or read off the data."""

    discrete, concave = True, True

    def __init__(self, labels: Sequence[object] | None = None) -> None:
        self.values: tuple[float, ...] | None = None
        self._named(labels)

    def _named(self, labels: Sequence[object] | None) -> None:
        self.outcomes = None if labels is None else tuple(map(str, labels))
        count = 2 if self.outcomes is None else len(self.outcomes)
        if not 2 <= count <= MOST_CATEGORIES:
            raise InputError(
                f"the {self.name} family needs 2 to {MOST_CATEGORIES} categories; got {listed(self.outcomes or ())}. "
                "Check the column, put categories together, or choose a family of numbers, such as gaussian."
            )
        self.bounds = (0.0, math.inf if labels is None else count - 1.0)

    def settled(self, y: tuple[Tensor, ...], weights: Tensor, offset: Tensor) -> Self:
        """Return the family that knows its categories: the values of y in their order, where none are named."""
        if self.outcomes is not None:
            return self
        family = copy.copy(self)
        family.values = tuple(torch.unique(y[0]).tolist())
        family._named([f"{value:g}" for value in family.values])
        return family

    def checked(self, y: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the number of the category of each row, from 0 on."""
        self._columns(y)
        _refuse(self.name, "categories", y[0], torch.zeros_like(y[0], dtype=torch.bool))
        known = self.values or (torch.unique(y[0]).tolist() if self.outcomes is None else range(len(self.outcomes)))
        values = y[0].new_tensor(list(known))
        place = torch.searchsorted(values, y[0].contiguous()).clamp_max(len(values) - 1)
        what = f"the categories {listed(self.outcomes)}" if self.outcomes and self.values else "codes of its categories"
        _refuse(self.name, what, y[0], values[place] != y[0])
        return (place.to(y[0].dtype),)


class Ordinal(_Categories):
    """Ordered categories with the logistic link, P(y ≤ k | η) = 1/(1 + e^{η - c_k}), thresholds c_1 < c_2 < ..

    For grades and answers such as never, sometimes, often: the proportional odds model (McCullagh 1980), brms'
    ``cumulative``.  A positive coefficient moves rows to higher categories; e^coefficient is an odds ratio.  The
    thresholds take the place of the intercept: φ = (c_1, log(c_2 - c_1), ..), and each has the prior t(3, 0, 2.5), as
    in brms.

    Args:
        labels: of the categories in their order, whose outcomes are coded 0, 1, ..; None to read them off the data.
    """

    name, link, ratio, intercept = "ordinal", "logit", "odds ratio", False

    def _named(self, labels: Sequence[object] | None) -> None:
        super()._named(labels)
        self.parameters = tuple(f"threshold[{k}]" for k in range(1, len(self.outcomes or ())))
        self.scales = ("identity",) * len(self.parameters)

    def log_prob(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> Tensor:
        """Return log(σ(a) - σ(b)) = log(1 - e^{b-a}) - log(1 + e^{-a}) - log(1 + e^b), a = c_y - η, b = c_{y-1} - η."""
        upper, lower, (first, last) = self._ends(eta, y[0], phi)
        inner = ~(first | last)
        inside = torch.where(inner, _pick(torch.cat([phi[..., :1], _log_some(phi[..., 1:])], -1), y[0] * inner), 0.0)
        return inside + torch.where(last, 0.0, logsigmoid(upper)) + torch.where(first, 0.0, logsigmoid(-lower))

    def jet(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return those of the logistic function."""
        upper, lower, (first, last) = self._ends(eta, y[0], phi)
        above, below = torch.where(last, 0.0, torch.sigmoid(-upper)), torch.where(first, 0.0, torch.sigmoid(lower))
        curvature = above * torch.sigmoid(upper) + below * torch.sigmoid(-lower)
        return -self.log_prob(eta, y, phi), above - below, curvature

    def _ends(self, eta: Tensor, k: Tensor, phi: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """The thresholds above and below a category less η, and whether it is the first or the last."""
        c = self.natural(phi)
        return _pick(c, k) - eta, _pick(c, k - 1) - eta, (k == 0, k == phi.shape[-1])

    def mean(self, eta: Tensor, phi: Tensor) -> Tensor:
        """Return the probabilities of the categories on a last axis."""
        codes = range(phi.shape[-1] + 1)
        return torch.stack([self.log_prob(eta, (torch.full_like(eta, k),), phi) for k in codes], -1).exp()

    def draw(self, eta: Tensor, phi: Tensor, generator: torch.Generator, extra: tuple[Tensor, ...] = ()) -> Tensor:
        """Draw the number of the category, by a latent variable and how many thresholds it is above."""
        latent = eta + self._noise(_full(eta, phi), eta, generator)
        return (latent[..., None] > self.natural(phi)).sum(-1).to(eta.dtype)

    def _noise(self, shape: torch.Size, like: Tensor, generator: torch.Generator) -> Tensor:
        return torch.logit(_uniform(shape, like, generator))

    def start(self, y: tuple[Tensor, ...], offset: Tensor, weights: Tensor) -> tuple[float, Tensor]:
        """Return 0, and the thresholds at the link of the shares of rows up to each category."""
        last = int(self.bounds[1])
        counts = weights.double().new_zeros(last + 1).index_add(0, y[0].long(), weights.double())
        counts = counts + 0.5 * weights.mean()  # half a row, so that each share is inside
        share = (counts.cumsum(0) / counts.sum())[:-1]
        mean = (weights * offset).sum() / weights.sum()
        c = (torch.logit(share) if self.link == "logit" else torch.special.ndtri(share)) + mean
        return 0.0, torch.cat([c[:1], c.diff().log()])

    def natural(self, phi: Tensor) -> Tensor:
        """Return the thresholds."""
        return torch.cat([phi[..., :1], phi[..., 1:].exp()], -1).cumsum(-1)

    def log_jacobian(self, phi: Tensor) -> Tensor:
        """Return the sum of the log differences."""
        return phi[..., 1:].sum(-1)


class OrdinalProbit(Ordinal):
    """Ordered categories with the probit link, P(y ≤ k | η) = Φ(c_k - η), thresholds c_1 < c_2 < .."""

    name, link, ratio = "ordinal_probit", "probit", ""

    def log_prob(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> Tensor:
        """Return log(Φ(a) - Φ(b)), both in the tail on the left: log Φ(a) + log(1 - Φ(b)/Φ(a))."""
        c, k, last = self.natural(phi), y[0], phi.shape[-1]
        inner = (k > 0) & (k < last)
        log_gap = torch.where(inner, _pick(phi, k), 0.0)
        upper, lower = _pick(c, k) - eta, _pick(c, k - 1) - eta
        gap, middle = log_gap.clamp_max(math.log(_NARROW)).exp(), 0.5 * (upper + lower)
        narrow = (log_gap < math.log(_NARROW)) & ((middle * gap).abs() < _TILT)
        wide, left = inner & ~narrow, torch.where(inner, upper + lower < 0, k == 0)
        nearer = special.energy(torch.where(left, upper, -lower))  # of an end all there is
        further = special.energy(torch.where(wide, torch.where(left, lower, -upper), 0.0))
        between = torch.log(-torch.expm1(torch.where(wide, nearer - further, -1.0)))
        square, gap2 = torch.where(narrow, middle, 0.0).square(), gap.square()
        # log of the mean of exp(-mu - u²/2), u uniform within the width h about 0, to the sixth power of h and mh
        bent = gap2 * ((square - 1) / 24 - gap2 * ((square * (square + 2) - 2) / 2880 - gap2 * square**3 / 181440))
        flat = log_gap - 0.5 * math.log(2 * math.pi) - 0.5 * square + bent
        return torch.where(narrow, flat, torch.where(wide, between, 0.0) - nearer)

    jet = Family.jet  # by autograd

    def _noise(self, shape: torch.Size, like: Tensor, generator: torch.Generator) -> Tensor:
        return _normal(shape, like, generator)


class Multinomial(_Categories):
    """Categories without an order, log P(y = k | η) = η_k - log Σ_j e^{η_j}, with η_0 = 0 of the first, the reference.

    For species, brands or ways to travel: brms' ``categorical``, and multinom of R's nnet.  Each other category has a
    linear predictor of its own, η (.., K - 1), so that a column has K - 1 coefficients; e^coefficient is the ratio of
    the odds of that category against the reference.

    Args:
        labels: of the categories, the reference first, whose outcomes are coded 0, 1, ..; None to read them off the
            data.
    """

    name, link, ratio, nominal = "multinomial", "logit", "odds ratio", True

    def settled(self, y: tuple[Tensor, ...], weights: Tensor, offset: Tensor) -> Self:
        """Return the family that knows its categories."""
        if bool(offset.any()):
            raise InputError(
                f"the {self.name} family takes no offset, since each category but the reference has a linear predictor "
                "of its own. Leave the offset out, or make it a column of the formula."
            )
        return super().settled(y, weights, offset)

    def log_prob(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> Tensor:
        """Return the logarithm of the share that the category has of Σ e^η."""
        every = torch.cat([torch.zeros_like(eta[..., :1]), eta], -1).log_softmax(-1)
        return every.gather(-1, y[0].long().expand(eta.shape[:-1])[..., None])[..., 0]

    def jet(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return -log P, its gradient (.., K - 1), p less the category, and its Hessian, diag(p) - p pᵀ."""
        p, slope = self._slope(eta, y, phi)
        return -self.log_prob(eta, y, phi), slope, torch.diag_embed(p) - p[..., None] * p[..., None, :]

    def _slope(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities but that of the reference, and the gradient of -log P."""
        p = self.mean(eta, phi)[..., 1:]
        there = y[0][..., None] == torch.arange(1, p.shape[-1] + 1, dtype=y[0].dtype, device=p.device)
        return p, p - there.to(p)

    def averaged(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient and the Hessian of `jet` averaged over draws, of η (N, S, K - 1)."""
        p, slope = self._slope(eta, y, phi)
        return slope.mean(1), torch.diag_embed(p.mean(1)) - p.mT @ p / p.shape[1]

    def mean(self, eta: Tensor, phi: Tensor) -> Tensor:
        """Return the probabilities of all categories on a last axis, the reference first."""
        return torch.cat([torch.zeros_like(eta[..., :1]), eta], -1).softmax(-1)

    def draw(self, eta: Tensor, phi: Tensor, generator: torch.Generator, extra: tuple[Tensor, ...] = ()) -> Tensor:
        """Draw the number of the category."""
        above = _uniform(eta.shape[:-1], eta, generator)[..., None] > self.mean(eta, phi).cumsum(-1)
        return above[..., :-1].sum(-1).to(eta.dtype)

    def start(self, y: tuple[Tensor, ...], offset: Tensor, weights: Tensor) -> tuple[float, Tensor]:
        """Return 0, and no parameter; a search begins at `levels`."""
        return 0.0, y[0].new_zeros(0, dtype=torch.float64)

    def levels(self, y: tuple[Tensor, ...], weights: Tensor) -> list[float]:
        """Return log odds of each category against the reference, those of `Bernoulli` on the rows of the two."""
        found = []
        for k in range(1, len(self.outcomes or ())):
            pair = torch.where((y[0] == 0) | (y[0] == k), weights, 0.0)
            of = TargetSummary.of((y[0] == k).double(), self.link, 0 * weights, pair) if bool(pair.any()) else None
            found.append(of.location_and_unit(self.link)[0] if of else 0.0)
        return found


class Beta(_OfLink):
    """Shares strictly between 0 and 1, y ~ Beta(μψ, (1 - μ)ψ), μ = 1/(1 + e^{-η}); φ = log ψ, the precision.

    For proportions without a number of trials (Ferrari and Cribari-Neto 2004); the variance is μ(1 - μ)/(1 + ψ).
    e^coefficient is the ratio of odds of the mean.
    """

    name, link, ratio, discrete = "beta", "logit", "odds ratio", False
    parameters, own_priors = ("precision",), _OF_ROOT  # 1/√ψ: nearly the sd of y in units of √(μ(1 - μ))
    bounds = (0.0, 1.0)

    def log_prob(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> Tensor:
        """Return log y^{a - 1} (1 - y)^{b - 1}/B(a, b), with 1/Γ(a) = a/Γ(a + 1)."""
        log_precision = phi[..., 0]
        ones, zeros = log_precision + logsigmoid(eta), log_precision + logsigmoid(-eta)
        a, b = ones.exp(), zeros.exp()
        constant = torch.lgamma(log_precision.exp()) + ones - torch.lgamma(a + 1) + zeros - torch.lgamma(b + 1)
        return constant + (a - 1) * y[0].log() + (b - 1) * torch.log1p(-y[0])

    def draw(self, eta: Tensor, phi: Tensor, generator: torch.Generator, extra: tuple[Tensor, ...] = ()) -> Tensor:
        """Draw shares."""
        return _beta_draws(eta, phi[..., 0], generator)

    def _start_phi(self, y: tuple[Tensor, ...], offset: Tensor, weights: Tensor) -> list[float]:
        mean, variance = _moments(y[0], weights)
        return [_between(mean * (1 - mean) / max(variance, torch.finfo(torch.float64).tiny) - 1)]


class Gamma(_OfLink):
    """Positive outcomes whose sd is a share of their mean, y ~ Gamma(k, k/μ), μ = e^η; φ = log k, the shape.

    For costs, durations and amounts; 1/√k is the coefficient of variation, and e^coefficient a ratio of means.
    """

    name, link, ratio, discrete, concave = "gamma", "log", "ratio of means", False, True
    parameters, own_priors = ("shape",), _OF_ROOT  # 1/√k: the coefficient of variation
    bounds = (0.0, math.inf)

    def log_prob(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> Tensor:
        """Return k(x - (eˣ - 1)) + (k log k - k - log Γ(k)) - log y, x = log y - η."""
        log_y, log_shape = y[0].log(), phi[..., 0]
        x = log_y - eta
        return log_shape.exp() * (x - _expm1(x)) + (_stirling(log_shape) - log_y)

    def jet(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return those of the exponential function."""
        shape, x = phi[..., 0].exp(), y[0].log() - eta
        return -self.log_prob(eta, y, phi), -shape * _expm1(x), shape * _exp(x)

    def draw(self, eta: Tensor, phi: Tensor, generator: torch.Generator, extra: tuple[Tensor, ...] = ()) -> Tensor:
        """Draw positive numbers."""
        shape = phi[..., 0].exp().expand(_full(eta, phi))
        return _positive(eta.exp() * (_gamma(shape, generator) / shape))

    def _start_phi(self, y: tuple[Tensor, ...], offset: Tensor, weights: Tensor) -> list[float]:
        mean, variance = _moments(y[0] * torch.exp(-offset), weights)
        return [_between(mean * mean / max(variance, mean * mean / _START[1]))]


class _Survival(_OfLink):
    """Times to an event, y = (time, whether the event was seen), censored on the right where it was not."""

    link, ratio, discrete, concave = "log", "time ratio", False, True
    extra = ("event",)
    bounds = (0.0, math.inf)

    def checked(self, y: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return times and 0 or 1."""
        y = super().checked(y)
        _refuse(self.name, "events that are 1 (seen) or 0 (censored)", y[1], (y[1] != 0) & (y[1] != 1))
        return y


class Weibull(_Survival):
    """Times to an event with the Weibull distribution, censored or not: S(t) = exp(-(t/λ)^k), mean λ Γ(1 + 1/k) = e^η.

    y = (time, 1 where the event was seen and 0 where it was not until then); φ = log k, the shape.  e^coefficient is a
    ratio of times, and e^{-k coefficient} the hazard ratio.  The coefficients are those of brms' ``weibull`` and of
    R's survreg, whose intercept is log λ.
    """

    name, parameters = "weibull", ("shape",)
    own_priors = (priors.Power(priors.HalfT(scale=WIDTH), -1.0),)  # half-t(3, 2.5) of 1/k, the scale of log times

    def log_prob(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> Tensor:
        """Return event · (log k - log t + z) - e^z, z = k (log t - log λ)."""
        (time, event), log_shape = y, phi[..., 0]
        z = self._hazard(eta, time, log_shape)
        return event * (log_shape - time.log() + z) - _exp(z)

    def jet(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return those of the exponential function."""
        shape, hazard = phi[..., 0].exp(), _exp(self._hazard(eta, y[0], phi[..., 0]))
        return -self.log_prob(eta, y, phi), shape * (y[1] - hazard), shape.square() * hazard

    def _hazard(self, eta: Tensor, time: Tensor, log_shape: Tensor) -> Tensor:
        """The logarithm of the cumulative hazard, z."""
        return log_shape.exp() * (time.log() + torch.lgamma(1 + torch.exp(-log_shape)) - eta)

    def draw(self, eta: Tensor, phi: Tensor, generator: torch.Generator, extra: tuple[Tensor, ...] = ()) -> Tensor:
        """Draw times of the event."""
        log_scale, noise = eta - torch.lgamma(1 + torch.exp(-phi[..., 0])), _uniform(_full(eta, phi), eta, generator)
        return _positive(torch.exp(log_scale + torch.exp(-phi[..., 0]) * (-noise.log()).log()))

    def start(self, y: tuple[Tensor, ...], offset: Tensor, weights: Tensor) -> tuple[float, Tensor]:
        """Return the logarithm of all time over the number of events, and φ of a constant hazard."""
        time, event = y
        events = (weights * event).sum().clamp_min(0.5 * float(weights.mean()))
        total = (weights * time * torch.exp(-offset)).sum()
        return float((total / events).log()), total.new_zeros(1, dtype=torch.float64)


class Lognormal(_Survival):
    """Times to an event whose logarithms are normal, log y ~ N(η, sd²), censored or not; φ = log sd.

    y = (time, 1 where the event was seen and 0 where it was not until then).  The median is e^η, and e^coefficient a
    ratio of times; as brms' ``lognormal`` and R's survreg.
    """

    name, parameters = "lognormal", ("sd of log time",)

    def log_prob(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> Tensor:
        """Return log N(log t; η, sd²)/t of an event, log Φ(-z) of none."""
        (time, event), log_sd = y, phi[..., 0]
        log_t = time.log()
        z = (log_t - eta) * torch.exp(-log_sd)
        seen = -0.5 * z.square() - (log_sd + log_t + 0.5 * math.log(2 * math.pi))
        return torch.where(event > 0, seen, -special.energy(-z))

    def mean(self, eta: Tensor, phi: Tensor) -> Tensor:
        """Return the mean time, exp(η + ½ sd²)."""
        return torch.exp(eta + 0.5 * torch.exp(2 * phi[..., 0]))

    def draw(self, eta: Tensor, phi: Tensor, generator: torch.Generator, extra: tuple[Tensor, ...] = ()) -> Tensor:
        """Draw times of the event."""
        return _positive(torch.exp(eta + phi[..., 0].exp() * _normal(_full(eta, phi), eta, generator)))

    def start(self, y: tuple[Tensor, ...], offset: Tensor, weights: Tensor) -> tuple[float, Tensor]:
        """Return the mean and the logarithm of the sd of log times, as if all were events."""
        mean, variance = _moments(y[0].log() - offset, weights)
        return mean, y[0].new_tensor([_between(math.sqrt(variance))], dtype=torch.float64)


class Held(Family):
    """A family some parameters of which are held at values, as negative binomial counts of size 2.

    For a noise that is known, or to see how much hangs on a parameter.

    Args:
        family: the family.
        values: by names of parameters, on their natural scale.

    Raises:
        InputError: if the family has no parameter of a name, or it has no such value.

    >>> Held(NegativeBinomial(), {"size": 2.0}).parameters
    ()
    """

    def __init__(self, family: Family, values: Mapping[str, float]) -> None:
        names = family.parameters
        if family.nominal:
            raise InputError(f"the {family.name} family has no parameter that could be held. Take it as it is.")
        for name, value in values.items():
            if name not in names:
                raise InputError(
                    f"the {family.name} family has no parameter {name!r}; it has {listed(names) or 'none'}."
                )
            scale = family.ways[names.index(name)]
            if type(family).natural is not Family.natural:
                raise InputError(f"the parameters of the {family.name} family cannot be held one by one.")
            if not math.isfinite(value) or (scale != "identity" and value <= 0) or (scale == "logit" and value >= 1):
                allowed = {"log": "positive", "logit": "between 0 and 1"}.get(scale, "a finite number")
                raise InputError(f"{name} of the {family.name} family is {allowed}; got {value!r}.")
        maps = {"log": math.log, "logit": lambda share: math.log(share / (1 - share))}
        self.family, self.values = family, dict(values)
        self.places = {
            at: float(maps.get(family.ways[at], float)(values[name])) for at, name in enumerate(names) if name in values
        }
        self.free = [at for at in range(len(names)) if at not in self.places]
        for name in ("name", "link", "ratio", "discrete", "concave", "intercept", "extra", "bounds", "outcomes"):
            setattr(self, name, getattr(family, name))
        self.parameters = tuple(names[at] for at in self.free)
        self.scales = tuple(family.ways[at] for at in self.free)

    def _all(self, phi: Tensor) -> Tensor:
        """Return φ with the coordinates that are held."""
        free = iter(phi.unbind(-1))
        columns = [
            phi.new_full(phi.shape[:-1], self.places[at]) if at in self.places else next(free)
            for at in range(len(self.family.parameters))
        ]
        return torch.stack(columns, -1) if columns else phi

    def settled(self, y: tuple[Tensor, ...], weights: Tensor, offset: Tensor) -> Self:
        """Return the same of the family that knows the data."""
        return type(self)(self.family.settled(y, weights, offset), self.values)

    def checked(self, y: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the outcome in the coding of the family."""
        return self.family.checked(y)

    def log_prob(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> Tensor:
        """Return that of the family."""
        return self.family.log_prob(eta, y, self._all(phi))

    def jet(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return that of the family."""
        return self.family.jet(eta, y, self._all(phi))

    def mean(self, eta: Tensor, phi: Tensor) -> Tensor:
        """Return that of the family."""
        return self.family.mean(eta, self._all(phi))

    def draw(self, eta: Tensor, phi: Tensor, generator: torch.Generator, extra: tuple[Tensor, ...] = ()) -> Tensor:
        """Draw from the family."""
        return self.family.draw(eta, self._all(phi), generator, extra)

    def start(self, y: tuple[Tensor, ...], offset: Tensor, weights: Tensor) -> tuple[float, Tensor]:
        """Return that of the family, the free coordinates."""
        location, phi = self.family.start(y, offset, weights)
        return location, phi[self.free]

    def parameter_prior(self) -> tuple[priors.Prior, ...]:
        """Return those of the free parameters."""
        own = self.family.parameter_prior()
        return tuple(own[at] for at in self.free)


FAMILIES: dict[str, type[Family]] = {
    kind.name: kind
    for kind in (
        Gaussian,
        StudentT,
        Bernoulli,
        Probit,
        Binomial,
        BetaBinomial,
        Poisson,
        NegativeBinomial,
        ZeroInflatedPoisson,
        ZeroInflatedNegativeBinomial,
        HurdlePoisson,
        HurdleNegativeBinomial,
        Ordinal,
        OrdinalProbit,
        Multinomial,
        Beta,
        Gamma,
        Weibull,
        Lognormal,
    )
}


def family_of(family: object) -> Family:
    """Return the family that a word names, or a family as it is.

    Args:
        family: a key of `FAMILIES` or another word for one, as "logistic" or "negbin"; or an object of your own class.

    Returns:
        The family.

    Raises:
        InputError: if there is no family of this name; the names are listed.

    >>> family_of("logistic").name, family_of(Poisson()).name
    ('bernoulli', 'poisson')
    """
    if isinstance(family, type) and issubclass(family, Family):
        return family()
    if isinstance(family, Family):
        return family
    known = {full_name(name): kind for name, kind in FAMILIES.items()} | FAMILIES
    word = str(family).lower().replace("-", "_").replace(" ", "_")
    word = _OTHER.get(word, word)
    found = known.get(full_name(word))
    if not isinstance(family, str) or found is None:
        raise InputError(
            f"there is no family {family!r}.{hint(word, [*known, *_OTHER])} The families are "
            f"{', '.join(FAMILIES)}; "
            "or hand in an object of a class of your own (torchngvi.tables.families.Family)."
        )
    return found()


_OTHER = {
    "nbinom": "negative_binomial",
    "negbinomial": "negative_binomial",
    "cumulative": "ordinal",
    "categorical": "multinomial",
    "softmax": "multinomial",
    "zip": "zero_inflated_poisson",
    "zinb": "zero_inflated_negative_binomial",
    "betabinomial": "beta_binomial",
    "log_normal": "lognormal",
}
