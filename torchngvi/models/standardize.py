"""The units of the data: columns centred and scaled inside a fit, and the default priors in those units.

With z_j = (x_j - c_j)/s_j, c_j the mean and s_j the standard deviation of column j over the rows, the same linear
predictor has two sets of coefficients:

    η = a_0 + Σ_j z_j a_j = b_0 + Σ_j x_j b_j,   b_j = a_j/s_j,   b_0 = a_0 - Σ_j c_j b_j

a_0 is the intercept at the means and b_0 the intercept at x = 0.  The default priors are independent in a, those of
rstanarm (Goodrich et al. 2024) and bambi (Capretto et al. 2022):

    a_0 ~ N(g(ȳ), (2.5 s_y)²),   a_j ~ N(0, (2.5 s_y)²),   which is   b_j ~ N(0, (2.5 s_y/s_j)²)

with the link g, and s_y the standard deviation of y under the identity link and 1 under any other.  So another unit of
a column, or another origin, changes the coefficients of that column alone, and no prediction.

A full set of indicators, one of which is 1 in each row, is an intercept in other coordinates: a_0 is the shift of all
of them.  The other columns are centred then too, and the prior mean of the coefficient of each indicator is g(ȳ).
Where no coefficients make a constant, the predictor goes through 0 whatever the columns, and s_y is √(mean y²).
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchngvi.arguments import read_tensor
from torchngvi.errors import InputError
from torchngvi.models.likelihoods import Likelihood, link_of
from torchngvi.posteriors.gaussian import Gaussian

__all__ = ["NormalPrior", "PriorScales", "Standardization", "default_scales", "named_prior"]

WIDTH = 2.5  # prior sds of a coefficient, per sd of its column and of y: as rstanarm and bambi
WIDTHS = {  # of the priors that have a name; under "flat" a coefficient of ten sds moves by 10⁻⁶ of its standard error
    "default": WIDTH,
    "flat": 1e4,
}


def mean_and_sd(
    values: Tensor,  # (N, *D)
    weights: Tensor | None = None,  # (N,)
) -> tuple[Tensor, Tensor]:
    """Compute means and standard deviations over the rows of positive weight, by two passes in float64.

    The standard deviation √(Σ w (x - m)²/Σ w) is right to rounding where the mean is 10⁶ of them, and at any size of
    the numbers; where all rows are equal the mean is their value and the standard deviation is exactly 0.
    """
    x = values.detach().double()
    w = torch.ones(len(x), dtype=x.dtype, device=x.device) if weights is None else weights.detach().to(x)
    here = w > 0
    if not bool(here.all()):
        x, w = x[here], w[here]
    share = w / w.max()
    share = (share / share.sum()).reshape(-1, *[1] * (x.ndim - 1))
    first = x[0]
    center = first + (share * (x - first)).sum(0)
    center = center + (share * (x - center)).sum(0)
    deviation = x - center
    size = deviation.abs().amax(0)
    unit = torch.where(size > 0, size, 1.0)
    relative = deviation / unit
    variance = (share * relative.square()).sum(0) - (share * relative).sum(0).square()
    same = (x == first).all(0)
    return torch.where(same, first, center), torch.where(same, 0.0, unit * variance.clamp_min(0).sqrt())


@dataclass(frozen=True)
class Standardization:
    """How the columns of a design are centred and scaled, and how coefficients go from one set of units to the other.

    Use it where a model is fitted to standardised columns and its posterior is read in the units of the user. The map
    between the two sets of coefficients is linear, see `torchngvi.models.standardize`, so that it serves means, draws,
    and each column of a root alike.

    Attributes:
        centers: what is subtracted from each column, (D,), float64; 0 for the intercept and for a full set of
            indicators, and for every column of a design with neither, since nothing could take the shift.
        scales: what each column is divided by, (D,), float64: its standard deviation; of a column that is the same in
            all rows its absolute value, and 1 where that is 0; of the intercept its value, so that it becomes 1.
        intercept: the place of the column of ones, or of another column that is the same in all rows and not 0 where
            there is none of ones; None where there is neither.
        indicators: the places of the first full set of indicators, columns of which in each row one is 1 and the
            others are 0, where there is no intercept; else none. They are scaled, and not centred.

    >>> X = torch.tensor([[1.0, 10.0], [1.0, 30.0]], dtype=torch.float64)
    >>> units = Standardization.of(X)
    >>> units.intercept, units.standardize(X)[:, 1].tolist()
    (0, [-1.0, 1.0])
    >>> units.to_user(torch.tensor([5.0, 10.0])).tolist()  # 5 + 10 (x - 20)/10
    [-15.0, 1.0]
    """

    centers: Tensor  # (D,)
    scales: Tensor  # (D,)
    intercept: int | None = None
    indicators: tuple[int, ...] = ()

    @classmethod
    def of(cls, X: Any, weights: Any = None, *, intercept: int | None = None) -> Self:
        """Find centres, scales and the intercept of a design.

        Args:
            X: the design, (N, D), finite and dense; a tensor or an array.
            weights: of the rows, (N,), as in `mean_and_sd`.
            intercept: which of several columns of ones is the intercept; the first by default.

        Returns:
            The standardisation.

        Raises:
            InputError: a design that is no matrix, or without rows of positive weight.

        >>> Standardization.of([[2.0, 0.0], [4.0, 0.0]]).scales.tolist()
        [1.0, 1.0]
        """
        X = read_tensor("X", X, finite=False)
        w = None if weights is None else read_tensor("weights", weights, like=X)
        if X.ndim != 2:
            raise InputError(f"X must be (N, D) to be standardised; got shape {tuple(X.shape)}.")
        if not len(X) or (w is not None and not bool((w > 0).any())):
            raise InputError("no row has a positive weight, so that columns have no mean. Give at least one.")
        means, sds = mean_and_sd(X, w)
        same = sds == 0
        ones, constant = (torch.nonzero(found)[:, 0].tolist() for found in (same & (means == 1), same & (means != 0)))
        places = ones or (constant if len(X) > 1 else [])
        size = torch.where(means == 0, 1.0, means.abs())
        scales = torch.where(same, size, sds)
        if not places:
            return cls.without_intercept(means, scales, full_set(X if w is None else X[w > 0]))
        place = places[0] if intercept is None else intercept
        scales[place] = means[place]
        means[place] = 0.0
        return cls(means, scales, place)

    @classmethod
    def without_intercept(
        cls,
        means: Tensor,  # (D,)
        scales: Tensor,  # (D,)
        indicators: tuple[int, ...],
    ) -> Self:
        """Centre columns where a full set of indicators takes the shift, and none where there is no such set.

        >>> Standardization.without_intercept(torch.ones(2), torch.ones(2), ()).centers.tolist()
        [0.0, 0.0]
        """
        centers = means.clone()
        centers[list(indicators) if indicators else slice(None)] = 0.0
        return cls(centers, scales, None, indicators)

    @property
    def constant(self) -> Tensor | None:
        """The user's coefficients of the predictor that is 1 in all rows, (D,); None where the columns have none."""
        if self.intercept is None and not self.indicators:
            return None
        found = torch.zeros_like(self.scales)
        if self.intercept is None:
            found[list(self.indicators)] = 1.0
        else:
            found[self.intercept] = 1 / self.scales[self.intercept]
        return found

    def level(self, location: float) -> Tensor:
        """Coefficients of standardised columns whose predictor is a number in all rows, (D,); 0 where none has it.

        >>> Standardization.of([[1.0, 0.0], [0.0, 1.0]]).level(3.0).tolist()  # each column has the sd ½
        [1.5, 1.5]
        """
        constant = self.constant
        return torch.zeros_like(self.scales) if constant is None else location * constant * self.scales

    def said_level(self, mean: Tensor, digits: int) -> str:
        """Where the prior of a full set of indicators lies, in words that follow those of the other columns.

        Args:
            mean: the prior means of the standardised columns, (D,).
            digits: of the number.

        >>> units = Standardization.of([[1.0, 0.0], [0.0, 1.0]])
        >>> units.said_level(units.level(3.0), 4)
        ', about 3 for each of the 2 levels'
        """
        if not self.indicators or not (at := float(mean[self.indicators[0]] / self.scales[self.indicators[0]])):
            return ""
        return f", about {at:.{digits}g} for each of the {len(self.indicators)} levels"

    def standardize(self, X: Tensor) -> Tensor:
        """Subtract the centres and divide by the scales, in float64, to the dtype of X.

        What X holds in float64 is kept where a column lies 10⁶ of its standard deviations from 0, to a relative error
        of about 10⁻¹⁰; a column of float32 that lies so far has lost its variation before.

        Args:
            X: columns as those of the design, (*batch, N, D).

        Returns:
            The standardised columns, (*batch, N, D).
        """
        return ((X.double() - self.centers.to(X.device)) / self.scales.to(X.device)).to(X.dtype)

    def to_user(
        self,
        values: Tensor,  # (..., D, ...)
        dim: int = -1,
    ) -> Tensor:
        """Map coefficients of standardised columns to those of the columns as they are, the intercept at x = 0.

        Args:
            values: means, draws, or deviations such as the columns of a root, with D entries along ``dim``.
            dim: the dimension of the coefficients.

        Returns:
            The same in the units of the user. A covariance takes it along both dimensions.
        """
        a = values.movedim(dim, -1).double()
        b = a / self.scales.to(a.device)
        if (constant := self.constant) is not None:
            b = b - (b @ self.centers.to(a.device))[..., None] * constant.to(a.device)
        return b.movedim(-1, dim).to(values.dtype)

    def from_user(
        self,
        values: Tensor,  # (..., D, ...)
        dim: int = -1,
    ) -> Tensor:
        """Map coefficients of the columns as they are to those of standardised columns, the inverse of `to_user`.

        Args:
            values: as in `to_user`.
            dim: the dimension of the coefficients.

        Returns:
            The same for standardised columns.
        """
        b = values.movedim(dim, -1).double()
        if (constant := self.constant) is not None:
            b = b + (b @ self.centers.to(b.device))[..., None] * constant.to(b.device)
        return (b * self.scales.to(b.device)).movedim(-1, dim).to(values.dtype)

    def gaussian_to_user(self, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        """Map N(mean, root rootᵀ) over standardised coefficients to the units of the user.

        Args:
            mean: (D,).
            root: (D, K), such as ``q.frame().dense()``.

        Returns:
            The mean (D,) and a root (D, D), lower triangular with a diagonal that is not negative.
        """
        return self.to_user(mean), _triangular(self.to_user(root, -2))

    def gaussian_from_user(self, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        """Map N(mean, root rootᵀ) over coefficients of the user to those of standardised columns.

        Args:
            mean: (D,).
            root: (D, K).

        Returns:
            The mean (D,) and a root (D, D), lower triangular with a diagonal that is not negative.
        """
        return self.from_user(mean), _triangular(self.from_user(root, -2))

    def marginals(self, q: Gaussian) -> tuple[Tensor, Tensor]:
        """Compute means and standard deviations of the user's coefficients, of a q over standardised ones.

        Args:
            q: over the D coefficients of the standardised columns, in any structure.

        Returns:
            Both, (D,).
        """
        mean, sd = self.to_user(q.mean.detach()), q.stddev.detach() / self.scales.to(q.mean)
        if (constant := self.constant) is not None:
            places, here = torch.nonzero(constant)[:, 0].tolist(), self.scales.to(q.mean)
            rows = -(self.centers.to(q.mean) / here) * constant.to(q.mean)[places, None]
            rows[range(len(places)), places] = 1 / here[places]
            sd[places] = q.frame().rows(rows).norm(dim=-1)
        return mean, sd


def full_set(X: Tensor) -> tuple[int, ...]:
    """Find the first neighbouring columns that are a full set of indicators: a 1 in each row, the others 0."""
    covered, window = torch.zeros(len(X), dtype=torch.bool, device=X.device), list[int]()
    for place in range(X.shape[1]):
        column = X[:, place]
        own = column == 1
        if not bool((own | (column == 0)).all()) or not bool(own.any()):
            covered, window = torch.zeros_like(covered), []
            continue
        while window and bool((covered & own).any()):  # drop what overlaps, from the left
            covered = covered & (X[:, window.pop(0)] == 0)
        covered, window = covered | own, [*window, place]
        if bool(covered.all()):
            return tuple(window)
    return ()


def _triangular(root: Tensor) -> Tensor:
    """Return L, lower triangular with L Lᵀ = root rootᵀ."""
    if not bool(root.triu(1).any()) and root.shape[-1] == root.shape[-2]:
        return root
    lower = torch.linalg.qr(root.mT, mode="r").R.mT
    sign = torch.where(lower.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(lower)
    return lower * sign[..., None, :]


class PriorScales(NamedTuple):
    """The scales of the default priors of one data set, see `default_scales`.

    Attributes:
        location: g(ȳ), the prior mean of the intercept at the means.
        unit: s_y, the standard deviation of y for the identity link, about 0 where no coefficients make a constant; 1
            for any other link.
        width: how many of them a prior standard deviation is.
        sd: prior standard deviations in the units of the columns, (D,): width s_y/s_j, and width s_y for the intercept
            at the means.
    """

    location: float
    unit: float
    width: float
    sd: Tensor  # (D,)

    @property
    def standardized_sd(self) -> float:
        """The prior standard deviation of each coefficient of standardised columns, and of the intercept there."""
        return self.width * self.unit


def default_scales(
    X: Any,
    y: Any,
    family: str | Likelihood = "bernoulli_logit",
    *,
    offset: Any = None,
    weights: Any = None,
    width: float = WIDTH,
    standardization: Standardization | None = None,
) -> PriorScales:
    """Find the scales of the default priors of a regression in the units of its data.

    Args:
        X: the design, (N, D), with the column of ones if there is one.
        y: the targets, (N,), in the coding of the family; two classes in any coding, the larger the success.
        family: a name of a family or a likelihood, which says the link.
        offset: what is added to the linear predictor, (N,), such as the logarithm of an exposure: then the location
            is that of the rate.
        weights: of the rows, (N,).
        width: prior standard deviations in units of s_y/s_j.
        standardization: of X, where it is known.

    Returns:
        The location of the intercept, s_y, and the prior standard deviation for each column.

    >>> X = torch.tensor([[1.0, 10.0], [1.0, 30.0]], dtype=torch.float64)
    >>> scales = default_scales(X, [0.0, 4.0], "gaussian")
    >>> scales.location, scales.unit, scales.sd.tolist()
    (2.0, 2.0, [5.0, 0.5])
    """
    units = Standardization.of(X, weights) if standardization is None else standardization
    y = torch.as_tensor(y).detach().double()
    w = torch.ones_like(y) if weights is None else torch.as_tensor(weights).detach().to(y)
    shift = torch.zeros_like(y) if offset is None else torch.as_tensor(offset).detach().to(y)
    location, unit = location_and_unit(y, link_of(family), shift, w, through_0=units.constant is None)
    sd = width * unit / units.scales.abs()
    if units.intercept is not None:
        sd[units.intercept] = width * unit
    return PriorScales(location, unit, width, sd)


def location_and_unit(
    y: Tensor, link: str, offset: Tensor, weights: Tensor, *, through_0: bool = False
) -> tuple[float, float]:
    """Find g(ȳ) and s_y of targets; at an end of their range half an event is added, so that g(ȳ) is finite."""
    if link in ("logit", "probit"):
        low, high = y.aminmax()
        y = (y - low) / (high - low) if bool(low < high) else (y > 0).to(y)
    return TargetSummary.of(y, link, offset, weights).location_and_unit(link, through_0=through_0)


class TargetSummary(NamedTuple):
    """What the default priors read of the targets, over the rows of positive weight."""

    rows: int
    mean: float  # of y, of two classes the share of successes; for the identity link of y less its offset
    sd: float  # of the same
    offset: float = 0.0  # the mean of the offset
    exposure: float = 0.0  # the logarithm of the mean of exp(offset)

    @classmethod
    def of(cls, y: Tensor, link: str, offset: Tensor, weights: Tensor) -> Self:
        """Summarise targets in the coding of the family."""
        here = weights > 0
        y, offset, weights = y[here], offset[here], weights[here]
        mean, sd = (float(part) for part in mean_and_sd(y - offset if link == "identity" else y, weights))
        share = weights / weights.sum()
        exposure = torch.logsumexp(offset + share.log(), 0)
        return cls(len(y), mean, sd, float((share * offset).sum()), float(exposure))

    def location_and_unit(self, link: str, *, through_0: bool = False) -> tuple[float, float]:
        """Return g(ȳ) and s_y; at an end of the range of y half an event is added, so that g(ȳ) is finite.

        Where the predictor goes ``through_0``, since no coefficients make a constant, s_y is √(mean y²).

        >>> TargetSummary(rows=4, mean=0.0, sd=0.0).location_and_unit("identity")
        (0.0, 1.0)
        """
        if link == "identity":
            about = math.hypot(self.mean, self.sd) if through_0 else self.sd
            return self.mean, about or abs(self.mean) or 1.0
        least = 0.5 / (self.rows + 1)
        if link == "log":
            return math.log(max(self.mean, least)) - self.exposure, 1.0
        if link not in ("logit", "probit"):
            return 0.0, 1.0
        p = torch.tensor(min(max(self.mean, least), 1 - least), dtype=torch.float64, device="cpu")
        return float(torch.logit(p) if link == "logit" else torch.special.ndtri(p)) - self.offset, 1.0


class NormalPrior(NamedTuple):
    """Independent normal priors of the coefficients of standardised columns.

    Attributes:
        mean: (D,).
        precision: (D,).
    """

    mean: Tensor
    precision: Tensor

    def describe(self, units: Standardization | None, place: int | None) -> str:
        """Say the prior in a line.

        Args:
            units: of the columns that the coefficients belong to; None for columns as they are.
            place: of the intercept, or None.

        >>> NormalPrior(torch.tensor([0.5, 0.0]), torch.tensor([0.16, 0.16])).describe(None, 0)
        'coefficients N(0, 2.5^2) per unit of a column (precision 0.16), intercept N(0.5, 2.5^2)'
        """
        others = [float(value) for k, value in enumerate(self.precision) if k != place]
        parts = []
        if others:
            per = "unit" if units is None else "sd"
            about = "" if units is None else units.said_level(self.mean, 4)
            parts.append(
                f"coefficients N(0, {others[0] ** -0.5:.4g}^2) per {per} of a column{about} (precision {others[0]:.4g})"
            )
        if place is not None:
            mean = float(self.mean[place])
            where = " at the means of the columns" if mean and units is not None and bool(units.centers.any()) else ""
            parts.append(f"intercept N({mean:.4g}, {float(self.precision[place]) ** -0.5:.4g}^2){where}")
        return ", ".join(parts)


def named_prior(
    word: str, location: float, unit: float, units: Standardization, intercept_sd: float | None = None
) -> NormalPrior:
    """Return the prior of a word over the coefficients of standardised columns.

    Args:
        word: a key of `WIDTHS`: "default", or "flat" for a prior that says nothing.
        location: g(ȳ), see `default_scales`.
        unit: s_y.
        units: the standardisation.
        intercept_sd: of the prior N(0, intercept_sd²) of the intercept at the means, in the place of that of the word.

    Returns:
        The prior.

    >>> units = Standardization.of([[1.0, 5.0], [1.0, 7.0]])
    >>> named_prior("default", 0.3, 1.0, units).mean.tolist()
    [0.3, 0.0]
    """
    mean = units.level(location)
    precision = torch.full_like(mean, (WIDTHS[word] * unit) ** -2)
    if units.intercept is not None and intercept_sd is not None:
        mean[units.intercept], precision[units.intercept] = 0.0, intercept_sd**-2
    return NormalPrior(mean, precision)
