"""The priors of a mixed model, in words."""

from typing import Any

from torchngvi.models.learned import Learned, LearnedSize
from torchngvi.models.mixed import MixedLogJoint
from torchngvi.models.mixed_prior import Precision
from torchngvi.models.multilevel import MultilevelLogJoint
from torchngvi.models.scale_priors import HalfNormal, HalfT, ScalePrior, ScalesPrior


def described(model: MixedLogJoint | MultilevelLogJoint, factor: str = "group") -> str:
    """The priors of a mixed model in one line: of fixed effects, of each grouping factor, of a learned parameter.

    Args:
        model: what was fitted.
        factor: the name of the only grouping factor, where there is one.

    Returns:
        The line.

    >>> import torch
    >>> from torchngvi import MixedModel
    >>> X = torch.ones(6, 1, dtype=torch.float64)
    >>> y = torch.tensor([1.0, 2, 0, 1, 2, 3])
    >>> described(MixedModel(X, y, (X, [0, 0, 1, 1, 2, 2]), "poisson_log"), "ward")
    'fixed effects N(0, 10^2), 1/variance over ward Wishart(1, scale 3)'
    """
    parts = [f"fixed effects N(0, {float(model.fixed.prior.precision.flatten()[0]) ** -0.5:.4g}^2)"]
    if isinstance(model, MultilevelLogJoint):
        parts += [_of_factor(prior, name) for name, prior in zip(model.names, model.priors, strict=True)]
    else:
        scales = getattr(model, "scales", None)
        parts.append(_of_factor(model.precision if scales is None else scales, factor))
    learned = getattr(model, "learned", None)
    if isinstance(learned, Learned):
        rows: Any = getattr(model, "leaves", model.rows)
        name = "1/sqrt(size)" if isinstance(learned, LearnedSize) else learned.name
        parts.append(f"{name} {_of_scale(learned.settled(rows))}")
    return ", ".join(parts)


def _of_factor(prior: Precision | ScalesPrior, name: str) -> str:
    """The prior of the covariance of the effects of one grouping factor."""
    if isinstance(prior, ScalesPrior):
        sds = list(dict.fromkeys(_of_scale(one) for one in prior.sd))
        between = f", correlations LKJ({prior.concentration:g})" if prior.size > 1 else ""
        return f"sd over {name} {' and '.join(sds)}{between}"
    scale = ", ".join(f"{float(entry):.3g}" for entry in prior.scale.diagonal(dim1=-2, dim2=-1).flatten())
    what = "1/variance" if prior.size == 1 else "inverse covariance"
    return f"{what} over {name} Wishart({prior.dof:g}, scale {'' if prior.size == 1 else 'diagonal '}{scale})"


def _of_scale(prior: ScalePrior) -> str:
    """The prior of a standard deviation."""
    if isinstance(prior, HalfT):
        return f"half-t({prior.dof:g}, {prior.scale:.3g})"
    if isinstance(prior, HalfNormal):
        return f"half-normal({prior.scale:.3g})"
    return f"exponential(rate {prior.rate:.3g})"
