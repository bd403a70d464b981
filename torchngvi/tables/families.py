"""Families: one log density each, log p(y | η, φ), with a link, a check of outcomes, priors of φ, and how y is drawn.

η is the linear predictor of a row and φ the unconstrained coordinates of what else the density needs, as the logarithm
of a residual standard deviation.  Everything that a fit needs follows from the log density by autograd; closed forms of
the derivatives stand where they are short.

Shapes.  η is (N, *more), as (N,), (N, S) of S draws or (N, S, K) of K nodes; y is a tuple of tensors that broadcast to
η, (N,), (N, 1) or (N, 1, 1); φ has its coordinates on the last axis, and what is before it broadcasts with η from the
right: (nphi,), (S, nphi) or (S, 1, nphi).
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchngvi.errors import InputError
from torchngvi.messages import full_name, hint, listed
from torchngvi.models.scale_priors import HalfT
from torchngvi.models.standardize import WIDTH, TargetSummary, location_and_unit
from torchngvi.numerics import special

_DOF = 4.0  # of Student's t noise, and
_PRIOR_DOF = 3.0  # of default priors, as in brms
_START = (0.1, 100.0)  # where a size, a precision or a shape begins, from the moments of y: where its prior has mass
_LINEAR = 600.0  # log of where exponentials of z go on linearly: densities are below exp(-1e260) there, and stay finite
_STIRLING = 10.0  # from where on the series of log Γ to 1/x⁹ has rounding alone
_SMALL = -2.3  # log of the t below which log((1 - e⁻ᵗ)/t) is its series to t⁶, which has rounding alone there
_NARROW = 1e-5  # the width of a category of the probit link from which on it is a rectangle, to its square / 8
_COUNT = 2.0**52  # the largest count that is drawn, up to which each whole number is one of float64


class Power(NamedTuple):
    """The prior of x > 0 by that of x to a power: log p(x) = log p(xᵃ) + log|a| + (a - 1) log x.

    Attributes:
        prior: of xᵃ, with its own log_prob.
        power: a, not 0.

    >>> round(Power(HalfT(3.0, 1.0), -0.5).log_prob(torch.tensor(1.0)).item(), 4)
    -1.5763
    """

    prior: HalfT
    power: float

    def log_prob(self, x: Tensor) -> Tensor:
        """The log density of each x."""
        return self.prior.log_prob(x**self.power) + math.log(abs(self.power)) + (self.power - 1) * x.log()


class Uniform(NamedTuple):
    """The uniform prior of a share, between 0 and 1.

    >>> Uniform().log_prob(torch.tensor(0.3)).item()
    0.0
    """

    def log_prob(self, share: Tensor) -> Tensor:
        """The log density of each share."""
        return torch.zeros_like(share)


class Family(ABC):
    """The abstract base of families: what the outcome of a row is distributed as, given its linear predictor.

    A family of your own says `log_prob`, `mean` and `draw`, its name and link, and the parameters that it has beside
    the linear predictor; `check_family` then compares these with one another.  The rest has defaults, given here
    with the attributes.

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
        outcomes: labels of the categories of ordered ones, else None.

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
        """Return the family that knows what it needs of the data, as the unit of y or its categories."""
        return self

    def checked(self, y: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the outcome in the coding of this family: counts or numbers within the bounds by default.

        Raises:
            InputError: if there are values that it cannot produce; the first of them is named.
        """
        if len(y) != 1 + len(self.extra):
            raise InputError(
                f"the {self.name} family takes {listed(('an outcome', *self.extra))}; got {len(y)} columns for them."
            )
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

    def parameter_prior(self) -> tuple[object, ...]:
        """Return the default priors of the natural-scale parameters, in the units of y that `settled` has seen."""
        return tuple(Uniform() if scale == "logit" else HalfT(_PRIOR_DOF, WIDTH) for scale in self._scales)

    @property
    def _scales(self) -> tuple[str, ...]:
        return self.scales or ("log",) * len(self.parameters)

    def natural(self, phi: Tensor) -> Tensor:
        """Return the natural-scale parameters of φ, (S, nphi), in the order of their names."""
        ways: dict[str, Callable[[Tensor], Tensor]] = {"log": torch.exp, "logit": torch.sigmoid}
        columns = [ways.get(scale, torch.clone)(phi[..., j]) for j, scale in enumerate(self._scales)]
        return torch.stack(columns, -1) if columns else phi

    def log_jacobian(self, phi: Tensor) -> Tensor:
        """Return log |d natural/dφ| of each row of φ, (S,)."""
        total = phi.new_zeros(phi.shape[:-1])
        for j, scale in enumerate(self._scales):
            if scale != "identity":
                total = total + (phi[..., j] if scale == "log" else logsigmoid(phi[..., j]) + logsigmoid(-phi[..., j]))
        return total


def _refuse(family: str, known: str, values: Tensor, bad: Tensor) -> None:
    """Refuse the first of bad values, or of those that are not numbers."""
    bad = bad | ~values.isfinite()
    if bool(bad.any()):
        first = int(bad.reshape(-1).nonzero()[0, 0])
        raise InputError(
            f"the {family} family needs {known}; got {int(bad.sum())} other values, the first "
            f"{float(values.reshape(-1)[first]):g} in row {first + 1} of {values.numel()}. "
            "Correct these cells or leave their rows out, or choose another family."
        )


def _softplus(x: Tensor) -> Tensor:
    """Log(1 + eˣ), to rounding."""
    return torch.nn.functional.softplus(x, threshold=40)


def _exp(z: Tensor) -> Tensor:
    """Return eᶻ, which goes on linearly from e⁶⁰⁰."""
    near = z.clamp_max(_LINEAR).exp()
    return near + torch.where(z > _LINEAR, math.exp(_LINEAR) * (z - _LINEAR), 0.0)


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


def _poisson(rate: Tensor, generator: torch.Generator) -> Tensor:
    """Draws of counts; no count is above 2⁵²."""
    return torch.poisson(rate.clamp_max(_COUNT), generator)


def _between(x: float) -> float:
    """The logarithm of a size where a search begins."""
    low, high = _START
    return math.log(min(max(x, low), high)) if x == x else 0.0


def _moments(y: Tensor, weights: Tensor) -> tuple[float, float]:
    """The weighted mean and variance."""
    share = weights / weights.sum()
    mean = (share * y).sum()
    return float(mean), float((share * (y - mean).square()).sum())


class Gaussian(Family):
    """Real outcomes with normal noise, y ~ N(η, sd²); φ = log sd.

    For outcomes that vary about their mean symmetrically and without outliers.

    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> round(Gaussian().log_prob(zero, (zero,), zero).item(), 6)  # -½ log 2π
    -0.918939
    """

    name, link, discrete, concave = "gaussian", "identity", False, True
    parameters = ("residual sd",)
    unit = 1.0

    def settled(self, y: tuple[Tensor, ...], weights: Tensor, offset: Tensor) -> Self:
        """Return the family that knows the sd of y, the unit of its default prior."""
        family = copy.copy(self)
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

    def mean(self, eta: Tensor, phi: Tensor) -> Tensor:
        """Return η."""
        return eta.expand(_full(eta, phi))

    def draw(self, eta: Tensor, phi: Tensor, generator: torch.Generator, extra: tuple[Tensor, ...] = ()) -> Tensor:
        """Draw η and noise."""
        return eta + phi[..., 0].exp() * _normal(_full(eta, phi), eta, generator)

    def _start_phi(self, y: tuple[Tensor, ...], offset: Tensor, weights: Tensor) -> list[float]:
        return [math.log(location_and_unit(y[0], "identity", offset, weights)[1])]

    def parameter_prior(self) -> tuple[object, ...]:
        """Return half-t of three degrees of freedom, 2.5 sds of y wide."""
        return (HalfT(_PRIOR_DOF, WIDTH * self.unit),)


class StudentT(Gaussian):
    """Real outcomes with outliers, y = η + scale · t_4; φ = log scale.

        log p(y) = log Γ(5/2)/(Γ(2) √(4π)) - φ - (5/2) log(1 + (y - η)²/(4 e^{2φ}))

    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> round(StudentT().log_prob(zero, (zero,), zero).exp().item(), 6)
    0.375
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


class Bernoulli(Family):
    """Two classes with the logistic link, p(y = 1 | η) = 1/(1 + e^{-η}); the class that sorts last is the success.

    For yes and no; e^coefficient is an odds ratio.

    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> round(Bernoulli().log_prob(zero, (zero,), zero[:0]).item(), 4)  # log ½
    -0.6931
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
                    f"{len(values)} different values. Choose two of them, or another family, as ordinal or poisson."
                    if len(values) > 2
                    else f"{values[0]:g} in every row. Check the column, or choose other rows."
                )
            )
        return values[0], values[1]

    def checked(self, y: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the two classes as 0 and 1.

        Raises:
            InputError: if there are other values.
        """
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

    def mean(self, eta: Tensor, phi: Tensor) -> Tensor:
        """Return the probability of the success."""
        return torch.sigmoid(eta)

    def draw(self, eta: Tensor, phi: Tensor, generator: torch.Generator, extra: tuple[Tensor, ...] = ()) -> Tensor:
        """Draw 0 or 1."""
        return (_uniform(_full(eta, phi), eta, generator) < self.mean(eta, phi)).to(eta.dtype)


class Probit(Bernoulli):
    """Two classes with the probit link, p(y = 1 | η) = Φ(η).

    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> round(Probit().log_prob(zero, (zero,), zero[:0]).item(), 4)  # log ½
    -0.6931
    """

    name, link, ratio = "probit", "probit", ""

    def log_prob(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> Tensor:
        """Return log Φ(±η)."""
        return -special.energy((2 * y[0] - 1) * eta)

    def jet(self, eta: Tensor, y: tuple[Tensor, ...], phi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return those of -log Φ, without cancellation in its tail."""
        sign = 2 * y[0] - 1
        value, slope, curvature = special.negative_log_ndtr(sign * eta)
        return value, sign * slope, curvature

    def mean(self, eta: Tensor, phi: Tensor) -> Tensor:
        """Return the probability of the success."""
        return torch.special.ndtr(eta)


class Poisson(Family):
    """Counts with the logarithmic link, y ~ Poisson(e^η); e^coefficient is a rate ratio.

    For counts of events that come independently of one another; with exposure add ``offset(log(exposure))``.

    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> Poisson().log_prob(zero, (zero,), zero[:0]).item()  # no event at rate 1
    -1.0
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

    def mean(self, eta: Tensor, phi: Tensor) -> Tensor:
        """Return the rate."""
        return eta.exp()

    def draw(self, eta: Tensor, phi: Tensor, generator: torch.Generator, extra: tuple[Tensor, ...] = ()) -> Tensor:
        """Draw counts."""
        return _poisson(eta.exp().expand(_full(eta, phi)), generator)


FAMILIES: dict[str, type[Family]] = {kind.name: kind for kind in (Gaussian, StudentT, Bernoulli, Probit, Poisson)}


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
            f"there is no family {family!r}.{hint(word, [*known, *_OTHER])} The families are {', '.join(FAMILIES)}; "
            "or hand in an object of a class of your own (torchngvi.tables.families.Family)."
        )
    return found()


_OTHER = {
    "cumulative": "ordinal",
    "zip": "zero_inflated_poisson",
    "zinb": "zero_inflated_negative_binomial",
    "betabinomial": "beta_binomial",
    "log_normal": "lognormal",
}


def check_family(family: Family) -> None:
    """Check (to be written)."""
