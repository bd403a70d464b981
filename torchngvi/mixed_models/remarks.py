"""What should be said of data and answers of a mixed model that are not what a user may think they are."""

import warnings
from collections.abc import Mapping, Sequence

from torch import Tensor

from torchngvi.diagnostics.dependence import dependences, told_dependences
from torchngvi.mixed_models.table import Marginals

_FEW = 2  # groups
_HEAVY = 5.0  # standard deviations that are so many times those of a normal distribution with the same interval
_PRIOR = 0.5  # share of the standard deviation of the prior that a posterior has where the data say little
_NORMAL = 3.92  # standard deviations in the interval of 95 %


def warn_of(X: Tensor, groups: Mapping[str, int], names: Sequence[str]) -> None:
    """Warn of columns of X that depend on one another, and of factors with hardly any groups.

    Args:
        X: the design of the fixed effects, (N, p).
        groups: the number of groups of each factor, by what it is called.
        names: of the columns.
    """
    ones = next((place for place, name in enumerate(names) if name.lower() == "intercept"), None)
    for sentence in told_dependences(names, dependences(X), ones):
        warnings.warn(f"C{sentence[1:]}", stacklevel=3)
    for name, count in groups.items():
        if count <= _FEW:
            some = "1 group, which tells" if count == 1 else f"{count} groups, which tell"
            warnings.warn(
                f"{name[0].upper()}{name[1:]} has {some} next to nothing of a standard deviation over groups: its "
                "prior decides. Make it a fixed effect.",
                stacklevel=3,
            )


def of_answers(fixed: Marginals, prior_sd: float, parameter: Marginals | None) -> list[str]:
    """Sentences about fixed effects that only the prior bounds, and parameters whose mean is one of a heavy tail.

    Args:
        fixed: the fixed effects.
        prior_sd: the standard deviation of their prior.
        parameter: the learned parameter of the likelihood.

    >>> one = torch.ones(1)
    >>> of_answers(Marginals(("x",), 3 * one, 9 * one, -one, one), 10.0, None)
    ['The data hardly bound x: sd 9 beside 10 of the prior, as where classes are separated or columns depend.']
    """
    bounded = fixed.sd < _PRIOR * prior_sd
    said = [
        f"The data hardly bound {name}: sd {sd:.3g} beside {prior_sd:.3g} of the prior, as where classes are separated "
        "or columns depend."
        for name, sd, fine in zip(fixed.names, fixed.sd.tolist(), bounded.tolist(), strict=True)
        if not fine
    ]
    if parameter is not None and bool((parameter.sd > _HEAVY * (parameter.high - parameter.low) / _NORMAL).any()):
        name = parameter.names[0]
        said.append(
            f"The posterior of the {name} has a tail so heavy that its mean and sd say nothing; the data bound it from "
            "below only: read the interval."
        )
    return said
