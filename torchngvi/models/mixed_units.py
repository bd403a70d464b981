"""Mixed models in the units of their data: columns of X and Z centred and scaled inside, and the default priors.

With the columns of X and Z of one grouping factor centred and scaled (`torchngvi.models.standardize`),

    η = a_0 + Σ_j z_j a_j + Z_s b,   b ~ N(0, Ω⁻¹),   a_0 ~ N(g(ȳ), (2.5 s_y)²),   a_j ~ N(0, (2.5 s_y)²),

and each standard deviation of b is half-t with three degrees of freedom and the scale 2.5 s_y, its correlations LKJ(1).
In the units of the columns a slope over the column j has the scale 2.5 s_y/s_j.  Since the columns of Z are centred
too, where they come with an intercept, neither the unit nor the origin of a column changes any prediction, whether its
slope varies over groups or not.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.distributed import Processes
from torchngvi.errors import InputError
from torchngvi.interfaces import Prior
from torchngvi.models.effects_prior import CovariancePrior
from torchngvi.models.generalized_linear import GeneralizedLinear
from torchngvi.models.likelihoods import link_of
from torchngvi.models.mixed_prior import MixedPrior, Precision, omega_of, root_of
from torchngvi.models.mixed_rows import GroupedRows
from torchngvi.models.mixed_start import information
from torchngvi.models.scale_priors import HalfT, ScalesPrior
from torchngvi.models.standardize import WIDTH, Standardization, full_set, location_and_unit, mean_and_sd
from torchngvi.numerics.linalg import positive_columns

_ROUNDING = 1e-6  # of an indicator that was scaled and is restored, in float32
SD_PRIOR = HalfT(3.0, WIDTH)  # of a standard deviation between groups, in units of s_y: as brms


class Levels(NamedTuple):
    """Where the targets of a model lie, one number for each member of a batch of targets.

    Attributes:
        location: g(ȳ), (*batch,), float64.
        unit: s_y, the standard deviation of y for the identity link, about 0 where the fixed effects make no constant;
            1 for any other link, (*batch,), float64.
    """

    location: Tensor
    unit: Tensor

    @classmethod
    def of(cls, rows: GroupedRows) -> "Levels":
        """Find them from the targets of all processes."""
        there = (rows.weights > 0).any(-1)
        if rows.processes is None and not bool(there.all()):
            raise InputError("no row has a positive weight, of which nothing can be learned. Give at least one.")
        y, link = rows.y.double(), link_of(rows.likelihood)
        through_0 = standardized(rows.X, rows.columns, rows.weights, rows.processes)[1].constant is None
        offset, weights = (x.double().expand(y.shape) for x in (rows.offset, rows.weights))
        if rows.processes is not None:
            gathered = _gathered(y, link, offset, weights, rows.processes)
            return cls(*map(torch.tensor, location_and_unit(*gathered, through_0=through_0)))
        if not rows.batch:
            found = [location_and_unit(y, link, offset, weights, through_0=through_0)]
        else:
            members = zip(*(x.flatten(0, -2) for x in (y, offset, weights)), strict=True)
            found = [location_and_unit(one, link, shift, w, through_0=through_0) for one, shift, w in members]
        location, unit = torch.tensor(found, dtype=torch.float64).unbind(-1)
        return cls(location.reshape(rows.batch), unit.reshape(rows.batch))


def _gathered(
    y: Tensor, link: str, offset: Tensor, weights: Tensor, processes: Processes
) -> tuple[Tensor, str, Tensor, Tensor]:
    """Two rows of each process that have the sums of all of its rows, as far as location and unit depend on them."""
    here = weights > 0
    y, offset, weights = y[here], offset[here], weights[here]
    total, share = weights.sum(), weights / weights.sum()
    if link == "identity":
        mean, sd = mean_and_sd((y - offset)[:, None], weights)
        pair = [(float(mean + sign * sd), 0.0, float(total / 2)) for sign in (-1, 1)]
    elif link == "log":
        exposure = float(torch.logsumexp(share.log() + offset, 0))
        pair = [(float((share * y).sum()), exposure, float(total / 2))] * 2
    else:
        success, shift = float((share * (y > 0)).sum()), float((share * offset).sum())
        pair = [(1.0, shift, success * float(total)), (0.0, shift, (1 - success) * float(total))]
    rows = torch.tensor([row for some in processes.gather(pair) for row in some], dtype=torch.float64)
    return rows[:, 0], link, rows[:, 1], rows[:, 2]


def standardized(
    columns: Tensor,  # (N, D)
    before: Standardization | None,
    weights: Tensor,
    processes: Processes | None,
) -> tuple[Tensor, Standardization]:
    """Centre and scale columns by the rows of all processes; ``before`` says how those of this one have been
    already.
    """
    if weights.ndim > 1:
        weights = weights.flatten(0, -2).sum(0)
    if processes is None:
        units = Standardization.of(columns, weights)
        return units.standardize(columns), units
    like = columns.new_zeros(columns.shape[-1], dtype=torch.float64)
    center, scale = (like, like + 1) if before is None else (before.centers.to(like), before.scales.to(like))
    # two rows with the moments of all: one standard deviation below and above their mean
    mean, sd = (x.to(like) for x in mean_and_sd(columns, weights))
    half = 0.5 * float(weights.sum())
    here = [(half, (center + scale * (mean + sign * sd)).cpu()) for sign in (-1, 1)]
    rows = [row for some in processes.gather(here) for row in some]
    halves = torch.tensor([half for half, _ in rows], dtype=torch.float64)
    moments = torch.stack([row for _, row in rows])
    units = Standardization.of(moments, halves)
    if units.intercept is None:
        found = processes.gather(list(_patterns(restored(columns, before)[weights > 0])))
        patterns = torch.stack([row for some in found for row in some])
        units = Standardization.without_intercept(mean_and_sd(moments, halves)[0], units.scales, full_set(patterns))
    slope, shift = scale / units.scales.to(like), (center - units.centers.to(like)) / units.scales.to(like)
    return (slope * columns.double() + shift).to(columns), units


def _patterns(columns: Tensor) -> Tensor:
    """The rows that differ, as far as `full_set` looks at them: columns of other numbers than 0 and 1 are all ½."""
    near = columns.double().round()
    binary = ((near == 0) | (near == 1)) & ((columns - near).abs() < _ROUNDING)
    return torch.unique(torch.where(binary.all(0), near, 0.5), dim=0).cpu()


def set_columns(rows: GroupedRows, fixed: GeneralizedLinear, levels: Levels) -> None:
    """Centre and scale the columns of the fixed effects in place, and give these their default prior."""
    X, columns = standardized(rows.X, rows.columns, rows.weights, rows.processes)
    mean = levels.location.to(X)[..., None] * columns.level(1.0).to(X)
    precision = (WIDTH * levels.unit).pow(-2).to(X)[..., None].expand(mean.shape).contiguous()
    fixed.X, fixed.prior = X, Prior(mean, precision)
    rows.X, rows.columns = X, columns


def set_effects(rows: GroupedRows) -> None:
    """Centre and scale the columns of the random effects of one factor in place, as their default prior needs it."""
    rows.Z, rows.within = standardized(rows.Z, rows.within, rows.weights, rows.processes)


def covariance_prior_of(prior: MixedPrior, rows: GroupedRows) -> CovariancePrior:
    """Make the prior of ω of one factor."""
    if prior.usual:
        return ScalesPrior(SD_PRIOR, prior.concentration, rows.r, rows.unit)
    if prior.precision is None:
        return ScalesPrior(prior.sd, prior.concentration, rows.r)
    wishart = information(rows) if isinstance(prior.precision, str) else prior.precision
    return Precision(wishart, rows.X, rows.r, rows.batch)


def restored(columns: Tensor, units: Standardization | None) -> Tensor:
    """The columns as they were given."""
    return columns if units is None else columns * units.scales.to(columns) + units.centers.to(columns)


def omega_to_user(
    omega: Tensor,  # (*any, q)
    units: Standardization | None,
    size: int,  # r
) -> Tensor:
    """Map the coordinates ω of Ω to those of the same effects in the units of the user, (*any, q).

    With b = A b_s the precision is A⁻ᵀ W (A⁻ᵀ W)ᵀ.
    """
    if units is None:
        return omega
    inverse = units.from_user(torch.eye(size, dtype=torch.float64, device=omega.device), 0)
    root = inverse.mT @ root_of(omega.double(), size)
    if bool(root.triu(1).any()):
        root = positive_columns(torch.linalg.qr(root.mT, mode="r").R.mT)[0]
    return omega_of(root).to(omega)


def to_user(
    coefficients: Tensor,  # (*any, D)
    units: Standardization | None,
) -> Tensor:
    """Map fixed effects, or random effects of a factor, to the units of the user."""
    return coefficients if units is None else units.to_user(coefficients)


def rows_of_user(X: Tensor, units: Standardization | None) -> Tensor:
    """Centre and scale new rows as the columns of a model are."""
    return X if units is None else units.standardize(X)
