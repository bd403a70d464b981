"""The priors of a mixed model, in words."""

from typing import Any

from torchngvi.models.learned import Learned, LearnedSize
from torchngvi.models.mixed import MixedLogJoint
from torchngvi.models.mixed_rows import GroupedRows
from torchngvi.models.multilevel import MultilevelLogJoint
from torchngvi.models.multilevel_prior import CovariancePrior
from torchngvi.models.scale_priors import HalfNormal, HalfT, ScalePrior, ScalesPrior
from torchngvi.models.standardize import Standardization


def described(model: MixedLogJoint | MultilevelLogJoint, factor: str = "group") -> str:
    """The priors of a mixed model in one line: of fixed effects, of each grouping factor, of a learned parameter.

    >>> import torch
    >>> from torchngvi import MixedModel
    >>> X = torch.ones(6, 1, dtype=torch.float64)
    >>> y = torch.tensor([1.0, 2, 0, 1, 2, 3])
    >>> described(MixedModel(X, y, (X, [0, 0, 1, 1, 2, 2]), "poisson_log"), "ward")
    'intercept N(0.405, 2.5^2), sd over ward half-t(3, 2.5)'
    """
    parts = _of_fixed(model)
    if isinstance(model, MultilevelLogJoint):
        factors = zip(model.priors, model.names, model.rows.factors, strict=True)
        parts += [_of_factor(prior, name, of) for prior, name, of in factors]
    else:
        parts.append(_of_factor(model.covariance_prior, factor, model.rows))
    learned = getattr(model, "learned", None)
    if isinstance(learned, Learned):
        rows: Any = getattr(model, "leaves", model.rows)
        name = "1/sqrt(size)" if isinstance(learned, LearnedSize) else learned.name
        parts.append(f"{name} {_of_scale(learned.settled(rows))}")
    return ", ".join(parts)


def _of_fixed(model: MixedLogJoint | MultilevelLogJoint) -> list[str]:
    """The priors of the fixed effects."""
    prior, columns = model.fixed.prior, model.rows.columns
    sd = float(prior.precision.flatten()[0]) ** -0.5
    if columns is None:
        return [f"fixed effects N(0, {sd:.4g}^2)"]
    about = columns.said_level(prior.mean.reshape(-1, len(columns.scales))[0], 3)
    said = [f"fixed effects N(0, {sd:.3g}^2) per sd of a column{about}"] if _slopes(columns) else []
    if columns.intercept is not None:
        at = float(prior.mean.flatten()[columns.intercept])
        where = " at the means" if said else ""
        said.append(f"intercept{where} N({at:.3g}, {sd:.3g}^2)")
    return said


def _slopes(columns: Standardization) -> bool:
    """Whether there are columns that vary."""
    return len(columns.scales) > (columns.intercept is not None)


def _of_factor(prior: CovariancePrior, name: str, rows: GroupedRows) -> str:
    """The prior of the covariance of the effects of one grouping factor."""
    if isinstance(prior, ScalesPrior):
        sds = list(dict.fromkeys(_of_scale(one, float(prior.unit.flatten()[0])) for one in prior.sd))
        per = " per sd of a column" if rows.within is not None and _slopes(rows.within) else ""
        between = f", correlations LKJ({prior.concentration:g})" if prior.size > 1 else ""
        return f"sd over {name} {' and '.join(sds)}{per}{between}"
    scale = ", ".join(f"{float(entry):.3g}" for entry in prior.scale.diagonal(dim1=-2, dim2=-1).flatten())
    what = "1/variance" if prior.size == 1 else "inverse covariance"
    return f"{what} over {name} Wishart({prior.dof:g}, scale {'' if prior.size == 1 else 'diagonal '}{scale})"


def _of_scale(prior: ScalePrior, unit: float = 1.0) -> str:
    """The prior of a standard deviation that is measured in a unit."""
    if isinstance(prior, HalfT):
        return f"half-t({prior.dof:g}, {unit * prior.scale:.3g})"
    if isinstance(prior, HalfNormal):
        return f"half-normal({unit * prior.scale:.3g})"
    return f"exponential(rate {prior.rate / unit:.3g})"
