"""Priors by name, in the units of the user, as one log density of the coordinates of the globals.

The default priors are those of rstanarm, bambi and brms in the units of the data, s_y the standard deviation of y for
the identity link and 1 for any other, s_j that of column j:

    intercept at the means of the columns ~ N(g(ȳ), (2.5 s_y)²)        coefficient of column j ~ N(0, (2.5 s_y/s_j)²)
    sd of an effect over groups ~ half-t(3, 2.5 s_y/s_j)               correlations ~ LKJ(1)

and those of the parameters of a likelihood are the family's.  With θ = (a, ξ, φ) of `torchngvi.tables.effects`, b_j =
a_j/s_j, τ_k the standard deviations of effects of scaled columns and z their canonical partial correlations on Fisher's
scale (Lewandowski, Kurowicka and Joe 2009),

    log p(θ) = Σ_j log p(a_j) + Σ_k (log p(τ_k) + log τ_k) + Σ_z log p(z) + log p(x(φ)) + log |dx/dφ|,

each density in the coordinate that it is of, so that another unit or origin of a column changes nothing but its row of
the table of priors.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from torchngvi.arguments import is_number
from torchngvi.errors import InputError
from torchngvi.messages import hint, listed
from torchngvi.models.standardize import WIDTHS, Standardization, TargetSummary
from torchngvi.tables.parts import Coordinates, Design
from torchngvi.tables.table import products_far_from_0

Family = Any  # of torchngvi.tables.families, which imports this module


class Prior(ABC):
    """The density of one number, whose parameters are numbers, or tensors of as many numbers as it is asked for.

    Attributes:
        word: as it is printed.
        support: the numbers that it is of: "real", "positive", "share" (between 0 and 1), "correlation".
    """

    word: ClassVar[str]
    support: ClassVar[str]
    positive: ClassVar[tuple[str, ...]] = ()  # parameters that are positive; the others are finite

    def __post_init__(self) -> None:
        """Check the parameters, where they are numbers."""
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Tensor | Prior):
                continue
            if not is_number(value, above=0 if field.name in self.positive else None):
                kind = "positive and finite" if field.name in self.positive else "a finite number"
                raise InputError(f"{field.name} of {type(self).__name__} must be {kind}; got {value!r}.")

    @abstractmethod
    def log_prob(self, x: Tensor) -> Tensor:
        """Compute the log density at each entry of x."""

    def scaled(self, factor: Any) -> Self:
        """Return the density of factor · x, the factor positive where x is.

        >>> Normal(1.0, 0.5).scaled(-2.0)
        Normal(mean=-2.0, sd=1.0)
        """
        by = {"mean": factor, "sd": abs(factor), "scale": abs(factor), "rate": 1 / factor}
        names = [field.name for field in fields(self) if field.name in by]  # type: ignore[arg-type]
        if not names:
            raise InputError(f"{self} is no prior of a number that has a unit.")
        return replace(self, **{name: by[name] * getattr(self, name) for name in names})  # type: ignore[type-var]

    def __str__(self) -> str:
        numbers = (getattr(self, field.name) + 0.0 for field in fields(self))  # type: ignore[arg-type]
        return f"{self.word}({', '.join(f'{number:.3g}' for number in numbers)})"


def _log(value: Any) -> Any:
    return value.log() if isinstance(value, Tensor) else math.log(value)


def _lgamma(value: Any) -> Any:
    return value.lgamma() if isinstance(value, Tensor) else math.lgamma(value)


def _t(x: Tensor, dof: Any, scale: Any) -> Tensor:
    """The log density of Student's t distribution about 0."""
    half = 0.5 * (dof + 1)
    constant = _lgamma(half) - _lgamma(0.5 * dof) - 0.5 * _log(dof * math.pi) - _log(scale)
    return constant - half * torch.log1p((x / scale).square() / dof)


@dataclass(frozen=True)
class Normal(Prior):
    """The normal distribution N(mean, sd²), for a coefficient, an intercept or a threshold.

    Args:
        mean: in the units of what it is the prior of.
        sd: the standard deviation, in the same units, positive.

    >>> print(Normal(0.0, 2.5), Normal(0.0, 1.0).log_prob(torch.tensor(0.0)).exp())  # 1/√(2π)
    N(0, 2.5^2) tensor(0.3989)
    """

    word = "normal"
    support = "real"
    positive = ("sd",)
    mean: Any = 0.0
    sd: Any = 1.0

    def log_prob(self, x: Tensor) -> Tensor:
        """Compute the log density at each entry of x."""
        return -0.5 * ((x - self.mean) / self.sd).square() - _log(self.sd) - 0.5 * math.log(2 * math.pi)

    def __str__(self) -> str:
        return f"N({self.mean + 0.0:.3g}, {self.sd:.3g}^2)"


@dataclass(frozen=True)
class StudentT(Prior):
    """Student's t distribution, for a coefficient that may be much larger than the scale says.

    Args:
        dof: the degrees of freedom, positive.
        mean: where its centre is.
        sd: its scale, which the normal distribution of infinite degrees of freedom has for its standard deviation.

    >>> print(StudentT(3.0, 0.0, 2.5), StudentT(1.0, 0.0, 1.0).log_prob(torch.tensor(0.0)).exp())  # 1/π
    t(3, 0, 2.5) tensor(0.3183)
    """

    word = "t"
    support = "real"
    positive = ("dof", "sd")
    dof: Any = 3.0
    mean: Any = 0.0
    sd: Any = 1.0

    def log_prob(self, x: Tensor) -> Tensor:
        """Compute the log density at each entry of x."""
        return _t(x - self.mean, self.dof, self.sd)


@dataclass(frozen=True)
class HalfT(Prior):
    """The distribution of |x| where x is Student's t about 0, for a standard deviation that may be large.

    Args:
        dof: the degrees of freedom, positive; 1 is the half-Cauchy distribution.
        scale: in the units of the standard deviation, positive.

    >>> print(HalfT(3.0, 2.5), HalfT(1.0, 1.0).log_prob(torch.tensor(0.0)).exp())  # 2/π
    half-t(3, 2.5) tensor(0.6366)
    """

    word = "half-t"
    support = "positive"
    positive = ("dof", "scale")
    dof: Any = 3.0
    scale: Any = 1.0

    def log_prob(self, x: Tensor) -> Tensor:
        """Compute the log density at each entry of x."""
        return math.log(2) + _t(x, self.dof, self.scale)


@dataclass(frozen=True)
class HalfNormal(Prior):
    """The distribution of |x| where x ~ N(0, scale²), for a standard deviation that is not much above the scale.

    Args:
        scale: in the units of the standard deviation, positive.

    >>> print(HalfNormal(2.0), HalfNormal(2.0).log_prob(torch.tensor(0.0)).exp())  # 2/(2 √(2π))
    half-normal(2) tensor(0.3989)
    """

    word = "half-normal"
    support = "positive"
    positive = ("scale",)
    scale: Any = 1.0

    def log_prob(self, x: Tensor) -> Tensor:
        """Compute the log density at each entry of x."""
        return math.log(2) + Normal(0.0, self.scale).log_prob(x)


@dataclass(frozen=True)
class Exponential(Prior):
    """The density p(x) = rate · exp(-rate · x) of a positive number.

    Args:
        rate: the inverse of the mean, positive.

    >>> print(Exponential(2.0), Exponential(2.0).log_prob(torch.tensor(0.0)).exp())
    exponential(2) tensor(2.)
    """

    word = "exponential"
    support = "positive"
    positive = ("rate",)
    rate: Any = 1.0

    def log_prob(self, x: Tensor) -> Tensor:
        """Compute the log density at each entry of x."""
        return _log(self.rate) - self.rate * x


@dataclass(frozen=True)
class Gamma(Prior):
    """The gamma distribution p(x) ∝ x^(shape - 1) exp(-rate · x) of a positive number.

    Args:
        shape: positive; from 2 on the density is 0 at 0, with a slope, and keeps a standard deviation from 0.
        rate: positive; the mean is shape/rate.

    >>> print(Gamma(2.0, 0.1), Gamma(1.0, 2.0).log_prob(torch.tensor(0.0)).exp())
    gamma(2, 0.1) tensor(2.)
    """

    word = "gamma"
    support = "positive"
    positive = ("shape", "rate")
    shape: Any = 2.0
    rate: Any = 1.0

    def log_prob(self, x: Tensor) -> Tensor:
        """Compute the log density at each entry of x."""
        return (
            torch.special.xlogy(self.shape - 1, x) - self.rate * x + self.shape * _log(self.rate) - _lgamma(self.shape)
        )


@dataclass(frozen=True)
class Beta(Prior):
    """The beta distribution p(x) ∝ x^(a - 1) (1 - x)^(b - 1) of a share between 0 and 1, as that of surplus zeros.

    Args:
        a: positive.
        b: positive; the mean is a/(a + b), and a = b = 1 is the uniform distribution.

    >>> print(Beta(1.0, 1.0), Beta(2.0, 2.0).log_prob(torch.tensor(0.5)).exp())
    beta(1, 1) tensor(1.5000)
    """

    word = "beta"
    support = "share"
    positive = ("a", "b")
    a: Any = 1.0
    b: Any = 1.0

    def log_prob(self, x: Tensor) -> Tensor:
        """Compute the log density at each entry of x."""
        constant = _lgamma(self.a + self.b) - _lgamma(self.a) - _lgamma(self.b)
        return constant + torch.special.xlogy(self.a - 1, x) + torch.special.xlog1py(self.b - 1, -x)


@dataclass(frozen=True)
class Power(Prior):
    """The density of a positive x of which a power has a prior, log p(x) = log p(xᵃ) + log |a| + (a - 1) log x.

    Use it for a size or a precision, which is infinite where there is no noise: its 1/√x is then 0.

    Args:
        prior: of xᵃ.
        power: a, not 0.

    >>> print(Power(HalfT(3.0, 1.0), -0.5), Power(Exponential(1.0), -0.5).log_prob(torch.tensor(1.0)))  # -1 - log 2
    half-t(3, 1) of 1/sqrt(x) tensor(-1.6931)
    """

    support = "positive"
    prior: Prior = HalfT()
    power: Any = -0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.power == 0 or not isinstance(self.prior, Prior):
            raise InputError(f"Power takes a prior and a power that is not 0; got {self.prior!r} and {self.power!r}.")

    def log_prob(self, x: Tensor) -> Tensor:
        """Compute the log density at each entry of x."""
        return self.prior.log_prob(x**self.power) + math.log(abs(self.power)) + (self.power - 1) * x.log()

    def scaled(self, factor: Any) -> "Power":
        """Return the density of factor · x."""
        return Power(self.prior.scaled(factor**self.power), self.power)

    def __str__(self) -> str:
        return f"{self.prior} of {self.of('x')}"

    def of(self, name: str) -> str:
        """What the inner prior is of, for a number of a name."""
        return {-0.5: f"1/sqrt({name})", -1.0: f"1/{name}"}.get(self.power, f"{name}^{self.power:g}")


@dataclass(frozen=True)
class LKJ(Prior):
    """The density p(R) ∝ |R|^(concentration - 1) of a correlation matrix (Lewandowski, Kurowicka and Joe 2009).

    Args:
        concentration: positive; 1 is the uniform density, and a larger one keeps correlations near 0.

    >>> print(LKJ(2.0), LKJ(1.0).log_prob(torch.zeros(1)).exp())  # of two effects: uniform in ρ = tanh z
    LKJ(2) tensor(0.5000)
    """

    word = "LKJ"
    support = "correlation"
    positive = ("concentration",)
    concentration: Any = 1.0

    def log_prob(self, x: Tensor) -> Tensor:  # (..., r(r - 1)/2)
        """Compute the log density of the canonical partial correlations on Fisher's scale, row by row, (...).

        Those of column l = 0, 1, .. of a matrix of r effects are (1 + ρ)/2 ~ beta(α, α) with α = concentration +
        (r - 2 - l)/2, independent of one another.

        >>> LKJ(1.0).log_prob(torch.zeros(2, 3)).shape
        torch.Size([2])
        """
        r = (1 + math.isqrt(1 + 8 * x.shape[-1])) // 2
        column = torch.tensor([at for row in range(r) for at in range(row)], dtype=x.dtype, device=x.device)
        alpha = self.concentration + 0.5 * (r - 2 - column)
        log_beta = 2 * alpha.lgamma() - (2 * alpha).lgamma()
        log_left = math.log(4) + torch.nn.functional.logsigmoid(2 * x) + torch.nn.functional.logsigmoid(-2 * x)
        return (alpha * log_left - (2 * alpha - 1) * math.log(2) - log_beta).sum(-1)  # log_left: of 1 - tanh² x


_KINDS: tuple[type[Prior], ...] = (Normal, StudentT, HalfT, HalfNormal, Exponential, Gamma, Beta, LKJ)
_BY_WORD = {key: kind for kind in _KINDS for key in (kind.__name__.lower(), kind.word.replace("-", "").lower())}
_CALL = re.compile(r"\s*([A-Za-z][\w-]*)\s*\((.*)\)\s*")


def parse_prior(text: str) -> "Prior | str":
    """Read a prior from a text, as a command line or a file of settings has it.

    Args:
        text: such as "normal(0, 1)", "half_t(3, 2.5)", "LKJ(2)", "Normal(mean=0, sd=1)", or
            the word "flat" or "default".

    Returns:
        The prior, or the word.

    Raises:
        InputError: another word, or numbers that the prior does not take.

    >>> parse_prior("half-t(3, scale=2.5)"), parse_prior("flat")
    (HalfT(dof=3.0, scale=2.5), 'flat')
    """
    if not isinstance(text, str):
        raise InputError(f"a prior is a text such as normal(0, 1), or an object such as Normal(0, 1); got {text!r}.")
    if (word := text.strip().lower()) in ("flat", "default"):
        return word
    found = _CALL.fullmatch(text)
    key = found[1].replace("_", "").replace("-", "").lower() if found else ""
    words = "normal, student_t, half_t, half_normal, exponential, gamma, beta, lkj"
    if found is None or key not in _BY_WORD:
        advice = hint(found[1] if found else text, words.split(", "))
        raise InputError(f"a prior is flat, or a call such as normal(0, 1) of one of {words}; got {text!r}.{advice}")
    kind, numbers, named = _BY_WORD[key], list[float](), dict[str, float]()
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    try:
        for part in filter(None, (part.strip() for part in found[2].split(","))):
            name, equals, value = part.rpartition("=")
            if equals:
                named[name.strip()] = float(value)
            else:
                numbers.append(float(value))
        return kind(*numbers, **named)
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{found[1]} takes the numbers {', '.join(names)}; got {text!r}.") from error


# ------------------------------------------------------------------------------------ of a model


class _Stacked(NamedTuple):
    """Priors of several numbers, those of a kind together, with tensors for parameters."""

    kinds: tuple[tuple[Prior, Tensor], ...]  # and the places of the numbers

    @classmethod
    def of(cls, priors: Sequence[Prior], like: Tensor) -> Self:
        kinds: list[tuple[Prior, Tensor]] = []
        for kind in dict.fromkeys(map(type, priors)):
            places = [place for place, prior in enumerate(priors) if type(prior) is kind]
            if kind is Power:  # of which each may have another density
                kinds += [(priors[place], torch.tensor([place], device=like.device)) for place in places]
                continue
            names = [field.name for field in fields(kind)]
            values = ([float(getattr(priors[place], name)) for place in places] for name in names)
            tensors = (torch.tensor(some, dtype=like.dtype, device=like.device) for some in values)
            kinds.append((kind(*tensors), torch.tensor(places, device=like.device)))
        return cls(tuple(kinds))

    def log_prob(self, x: Tensor) -> Tensor:  # (..., D)
        """The sum of the log densities, (...)."""
        parts = [prior.log_prob(x.index_select(-1, at)).sum(-1) for prior, at in self.kinds]
        return sum(parts, x.new_zeros(x.shape[:-1]))


class Priors:
    """The priors of a model, see `_Chosen`: the log density of its coordinates θ, and what to say of them.

    >>> from torchngvi.tables.effects import Factor
    >>> one = torch.ones(4, 1, dtype=torch.float64)
    >>> factor = Factor("ward", ("Intercept",), ("a", "b"), one, torch.tensor([0, 0, 1, 1]))
    >>> y = (torch.tensor([1.0, 2.0, 3.0, 2.0], dtype=torch.float64),)
    >>> design = Design(one, ("Intercept",), (factor,), 0 * one[:, 0], y, one[:, 0])
    >>> from torchngvi.tables.families import family_of
    >>> poisson = family_of("poisson")
    >>> print(settle(design, poisson, Coordinates(design, 0)))
    intercept N(0.693, 2.5^2), sd over ward half-t(3, 2.5)
    """

    def __init__(
        self, design: Design, family: Family, coordinates: Coordinates, chosen: "_Chosen", unit: float
    ) -> None:
        self.names, self.family, self.lengths = coordinates.names, family, coordinates.lengths
        self.coefficients, self.sds, self.correlations, self.parameters, self.named, self.parts = chosen
        self.factors = tuple((factor.name, factor.effects) for factor in design.factors)
        # the unit is s_y
        self.unit, self.columns, self.within = unit, coordinates.columns, coordinates.within
        self.scales = coordinates.scales
        pairs = zip(self.coefficients, self.scales.tolist(), strict=True)
        within = [prior.scaled(s) for prior, s in pairs]
        self._a = _Stacked.of(within, design.X)
        means = [float(getattr(prior, "mean", 0.0)) for prior in within]
        self.location = torch.tensor(means, dtype=design.X.dtype, device=design.X.device)  # a at the prior mean, (p,)
        ordered = family.outcomes is not None and len(set(self.parameters)) == 1
        # thresholds are in one of all the orders, of which their priors know nothing
        self._orders = math.lgamma(len(self.parameters) + 1) if ordered else 0.0
        self._taus = tuple(
            _Stacked.of([prior.scaled(s) for prior, s in zip(some, units.scales.abs().tolist(), strict=True)], design.X)
            for some, units in zip(self.sds, self.within, strict=True)
        )

    def log_prob(self, theta: Tensor) -> Tensor:  # (..., dim)
        """Compute log p(θ), (...), with all constants and Jacobians, twice differentiable in θ."""
        a, *xis, phi = theta.split(self.lengths, -1)
        total = self._a.log_prob(a)
        for xi, taus, cor, (_, effects) in zip(xis, self._taus, self.correlations, self.factors, strict=True):
            log_tau, z = xi[..., : len(effects)], xi[..., len(effects) :]
            total = total + taus.log_prob(log_tau.exp()) + log_tau.sum(-1)
            if len(effects) > 1:
                total = total + cor.log_prob(z)
        if not self.parameters:
            return total
        flat = phi.reshape(-1, phi.shape[-1])
        natural = self.family.natural(flat)
        own = [prior.log_prob(natural[..., k]) for k, prior in enumerate(self.parameters)]
        return total + (torch.stack(own).sum(0) + self.family.log_jacobian(flat)).reshape(phi.shape[:-1]) + self._orders

    def rows(self) -> list[tuple[str, Prior]]:
        """The name and the prior of every global in the units of the user, by the names that ``priors=`` takes."""
        rows: list[tuple[str, Prior]] = list(zip(self.names, self.coefficients, strict=True))
        for (factor, effects), sds, cor in zip(self.factors, self.sds, self.correlations, strict=True):
            rows += [(_of_sd(effect, factor), prior) for effect, prior in zip(effects, sds, strict=True)]
            rows += [(f"cor|{factor}", cor)] * (len(effects) > 1)
        return [*rows, *zip(self.family.parameters, self.parameters, strict=True)]

    def table(self) -> tuple[tuple[str, str], ...]:
        """The same with the priors as they are printed."""
        return tuple((name, str(prior)) for name, prior in self.rows())

    def describe(self) -> str:
        """Say the priors in one line: defaults per standard deviation of a column, then those that were named."""
        columns, parts = self.columns, list[str]()
        named = {_bare(name) for name in self.named}
        rest = [place for place, name in enumerate(self.names) if _bare(name) not in named]
        apart = [self.names[place] for place in rest if self.parts[place] < 1]
        width = len(columns.scales)  # of the columns, which each category has
        slopes = [place for place in rest if place % width != columns.intercept and self.parts[place] == 1]
        if slopes:
            place = slopes[0]
            default: Any = self.coefficients[place].scaled(float(self.scales[place]))
            said_levels = dict.fromkeys(columns.said_level(own, 3) for own in self.location.split(width))
            about = "".join(said_levels) if place % width in columns.indicators else ""
            parts.append(f"fixed effects N(0, {default.sd:.3g}^2) per sd of a column{about}")
        if apart:
            size = WIDTHS["default"] * self.unit
            parts.append(f"those of {listed(apart)} N(0, {size:.3g}^2) per sd of the part that the others leave")
        where = " at the means" * (width > 1)
        levels = [place for place in rest if place % width == columns.intercept]
        if levels:
            of_levels = listed(list(dict.fromkeys(str(self.coefficients[place]) for place in levels)))
            parts.append(f"intercept{'s' * (len(levels) > 1)}{where} {of_levels}")
        of_names = zip(self.names, self.coefficients, strict=True)
        parts += [f"{name} {prior}" for name, prior in of_names if _bare(name) in named]
        for (factor, effects), sds, cor, units in zip(
            self.factors, self.sds, self.correlations, self.within, strict=True
        ):
            scales = units.scales.abs().tolist()
            usual = [at for at, effect in enumerate(effects) if _bare(_of_sd(effect, factor)) not in named]
            per = " per sd of a column" * any(at != units.intercept for at in usual)
            said = dict.fromkeys(str(sds[at].scaled(scales[at])) for at in usual)
            parts += [f"sd over {factor} {' and '.join(said)}{per}"] * bool(said)
            own = [at for at in range(len(effects)) if at not in usual]
            parts += [f"sd of {_of_sd(effects[at], factor)} {sds[at]}" for at in own]
            parts += [f"correlations {cor}"] * (len(effects) > 1)
        where = "" if self.family.intercept or not self.names else " at the means"
        for name, prior in _merged(self.family.parameters, self.parameters):
            parts.append(f"{prior.of(name)} {prior.prior}" if isinstance(prior, Power) else f"{name}{where} {prior}")
        return ", ".join(parts)

    __str__ = describe


class _Chosen(NamedTuple):
    """The prior of each global, in the units of the user, and the names of those that the user chose."""

    coefficients: tuple[Prior, ...]  # that of the intercept, or of a full set of indicators, at the means
    sds: tuple[tuple[Prior, ...], ...]  # of each factor those of its effects, that of an intercept at the means
    correlations: tuple[LKJ, ...]  # of each factor
    parameters: tuple[Any, ...]  # of the natural-scale parameters of the family
    named: tuple[str, ...]  # as `Priors.table` names them
    parts: tuple[float, ...]  # of each column that its default prior is per sd of, see `products_far_from_0`


def _merged(names: Iterable[str], priors: Iterable[Any]) -> list[tuple[str, Any]]:
    """Names and priors, those of thresholds that have the same one together."""
    found: dict[tuple[str, Any], list[str]] = {}
    for name, prior in zip(names, priors, strict=True):
        found.setdefault((re.sub(r"[\s\[]*\d+\]?$", "", name), prior), []).append(name)
    return [(f"{stem}s" if len(some) > 1 else some[0], prior) for (stem, prior), some in found.items()]


def _bare(name: str) -> str:
    """A name without spaces."""
    return "".join(name.split())


def _of_sd(effect: str, factor: str) -> str:
    """The name of the standard deviation of an effect over the groups of a factor."""
    return f"{'1' if effect == 'Intercept' else effect}|{factor}"


def settle(
    design: Design, family: Family, coordinates: Coordinates, priors: "Mapping[str, Prior | str] | str | None" = None
) -> Priors:
    """Settle the priors of a model: the defaults in the units of its data, and those that a user names."""
    given = _read(priors)
    locations, unit = locations_and_unit(design, family, coordinates.columns)
    width = WIDTHS["flat" if isinstance(priors, str) and priors == "flat" else "default"] * unit
    asked = _Asked(given, WIDTHS["flat"] * unit)
    levels = coordinates.level(*locations) / coordinates.scales  # in the units of the user
    parts = products_far_from_0(coordinates.X[design.weights > 0], design.names) * len(locations)
    columns, ones = design.names * len(locations), coordinates.columns.intercept
    coefficients = tuple(
        asked.real(
            (name, column), place % len(design.names) == ones, mean, width / (abs(scale) * part), abs(scale) * part
        )
        for place, (name, column, mean, scale, part) in enumerate(
            zip(coordinates.names, columns, levels.tolist(), coordinates.scales.tolist(), parts, strict=True)
        )
    )
    sds = tuple(
        tuple(
            asked.spread(_of_sd(effect, factor.name), width / abs(scale), abs(scale))
            for effect, scale in zip(factor.effects, units.scales.tolist(), strict=True)
        )
        for factor, units in zip(design.factors, coordinates.within, strict=True)
    )
    correlations = tuple(asked.correlation(factor.name, len(factor.effects)) for factor in design.factors)
    own = zip(family.parameters, family.parameter_prior(), strict=True)
    parameters = tuple(asked.parameter(name, one) for name, one in own)
    asked.check(design, coordinates.names, family)
    chosen = _Chosen(coefficients, sds, correlations, parameters, tuple(asked.found), tuple(parts))
    return Priors(design, family, coordinates, chosen, unit)


def _read(priors: object) -> dict[str, "Prior | str"]:
    """The priors that a user names, by their names."""
    if priors is None or (isinstance(priors, str) and priors in ("default", "flat")):
        return {}
    if not isinstance(priors, Mapping):
        raise InputError(
            "priors is a mapping such as {'x': Normal(0, 1), '1|g': HalfT(3, 1)}, or the word default or flat; got "
            f"{priors!r}."
        )
    return {str(name): one if isinstance(one, Prior) else parse_prior(one) for name, one in priors.items()}


def locations_and_unit(design: Design, family: Family, columns: Standardization) -> tuple[list[float], float]:
    """g(ȳ), of each category against the reference, and s_y, of trials by the share of successes of all."""
    if family.nominal:
        return family.levels(design.y, design.weights.double()), 1.0
    y, weights, offset = design.y[0].detach().double(), design.weights.double(), design.offset.double()
    rows = 0.0
    if "trials" in family.extra:
        trials = design.y[1].to(y)
        y, weights, rows = y / trials.clamp_min(1), weights * trials, float((weights * trials).sum())
        if not rows > 0:
            raise InputError("no row has a trial, so that nothing can be learned of them. Check the column of trials.")
    summary = TargetSummary.of(y, family.link, offset, weights)
    if rows:
        summary = summary._replace(rows=max(round(rows), 1))
    location, unit = summary.location_and_unit(family.link, through_0=family.intercept and columns.constant is None)
    return [location], unit


class _Asked:
    """What the user asks for, found by name; the names that were used are kept."""

    def __init__(self, given: Mapping[str, "Prior | str"], flat: float) -> None:
        self.given = {_bare(name): (name, prior) for name, prior in given.items()}
        self.flat, self.used, self.found = flat, set[str](), dict[str, None]()
        self.meant: dict[str, tuple[str, bool]] = {}

    def prior(self, what: str, *names: str) -> "Prior | str":
        """The prior of the first of the names that is there; "default" of none."""
        there = [name for name in map(_bare, names) if name in self.given]
        self.used.update(there)
        for name in there[:1]:
            meant = (what, len(names) > 1 and name == _bare(names[-1]))  # all of a kind, or one
            if self.meant.setdefault(name, meant) != meant:
                also = {"b": "all coefficients", "sd": "all sds over groups", "cor": "all correlations"}.get(name)
                raise InputError(
                    f"priors names {self.given[name][0]!r}, which is a column and also "
                    f"{also or 'a parameter of the family'}. Rename the column, so that the two can be told apart."
                )
        prior = self.given[there[0]][1] if there else "default"
        if prior != "default":
            self.found[names[0]] = None
        return prior

    def real(self, names: tuple[str, str], intercept: bool, mean: float, sd: float, scale: float) -> Prior:
        """The prior of a coefficient, by its name or by that of its column."""
        name, prior = names[0], self.prior("b", *dict.fromkeys((*names, "Intercept" if intercept else "b")))
        if isinstance(prior, str):
            return Normal(mean, self.flat / scale if prior == "flat" else sd)
        return _of_support(name, "a coefficient", prior, "real", "Normal(0, 1)")

    def spread(self, name: str, width: float, scale: float) -> Prior:
        """The prior of a standard deviation over groups."""
        own = (f"Intercept{name[1:]}",) if name.startswith("1|") else ()
        prior = self.prior("sd", name, *own, "sd")
        if isinstance(prior, str):
            return HalfT(scale=self.flat / scale if prior == "flat" else width)
        return _of_support(name, "a standard deviation", prior, "positive", "HalfT(3, 1)")

    def correlation(self, factor: str, effects: int) -> LKJ:
        """The prior of the correlations of the effects of a factor."""
        prior = self.prior("cor", f"cor|{factor}", "cor") if effects > 1 else "default"
        if isinstance(prior, str):
            return LKJ(1.0)
        found = _of_support(f"cor|{factor}", "a matrix of correlations", prior, "correlation", "LKJ(2)")
        assert isinstance(found, LKJ)
        return found

    def parameter(self, name: str, default: Any) -> Any:
        """The prior of a parameter of the likelihood."""
        stem = re.sub(r"[\s\[]*\d+\]?$", "", name)
        prior = self.prior("", name, *((stem, f"{stem}s") if stem != name else ()))
        if prior == "default":
            return default
        examples = {"real": "Normal(0, 1)", "positive": "HalfT(3, 1)", "share": "Beta(1, 1)"}
        if isinstance(prior, str):
            raise InputError(
                f"the prior of {name}, a parameter of the likelihood, is one that has a density, as "
                f"{examples[default.support]}; got {prior!r}."
            )
        return _of_support(name, f"a {default.support} number", prior, default.support, examples[default.support])

    def check(self, design: Design, names: Sequence[str], family: Family) -> None:
        """Check that each name was one of the model."""
        unknown = [name for bare, (name, _) in self.given.items() if bare not in self.used]
        if not unknown:
            return
        slopes = ["b"] * (len(design.names) > ("Intercept" in design.names))
        sds = [_of_sd(effect, factor.name) for factor in design.factors for effect in factor.effects]
        cors = [f"cor|{factor.name}" for factor in design.factors if len(factor.effects) > 1]
        own = list(dict.fromkeys((*names, *design.names)))
        known = [*own, *slopes, *sds, *["sd"] * bool(sds), *cors, *["cor"] * bool(cors), *family.parameters]
        raise InputError(
            f"priors names {listed(unknown)}, of which this model has none; it has {listed(known)}."
            f"{hint(unknown[0], known)}"
        )


def _of_support(name: str, what: str, prior: Prior, support: str, example: str) -> Prior:
    if prior.support != support:
        raise InputError(f"the prior of {name}, {what}, is one such as {example}; got {prior!r}.")
    return prior
