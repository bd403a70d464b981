"""What a run of ``torchngvi fit --formula`` says of counts: the family that they need, where it is not theirs."""

import pandas as pd
import torch

from torchngvi.adapters.predictors import predictors_of
from torchngvi.app.families import overdispersion
from torchngvi.mixed_models import MixedResult, MultilevelResult
from torchngvi.models.likelihoods import PoissonLog

_SMALL = 10  # the least of the counts from which on a Gaussian is usual for them
_ROWS = 2_000  # at once, each with all draws


def not_gaussian(table: pd.DataFrame, response: str) -> tuple[str, ...]:
    """A warning of a response that looks like counts, or like two classes, where no family was said.

    >>> not_gaussian(pd.DataFrame({"n": [3, 0, 1], "cm": [171, 183, 169]}), "cm")
    ()
    >>> not_gaussian(pd.DataFrame({"n": [3, 0, 1]}), "n")[0][:55]
    'n are whole numbers, fitted as gaussian. If they are co'
    """
    if response not in table or not pd.api.types.is_integer_dtype(table[response]):
        return ()
    values = table[response]
    if set(values.unique()) <= {0, 1}:
        return (f"{response} is 0 or 1, fitted as gaussian. If these are two classes, say --likelihood bernoulli.",)
    if not 0 <= values.min() < _SMALL:
        return ()
    return (
        f"{response} are whole numbers, fitted as gaussian. If they are counts, say --likelihood poisson, or "
        "negative_binomial where their variance exceeds their mean.",
    )


def overdispersed(result: MixedResult | MultilevelResult) -> tuple[str, ...]:
    """A warning of counts that vary more about their means, given the effects of their groups, than Poisson's.

    By Pearson's χ² over N - tr H, where the effective number of coefficients is tr H = Σ μ Var(η), with the posterior
    variance of each linear predictor: an effect that is shrunk to its mean counts as less than one.
    """
    rows = result.model.rows
    if not isinstance(rows.likelihood, PoissonLog):
        return ()
    parts = (slice(begin, begin + _ROWS) for begin in range(0, len(rows.y), _ROWS))
    moments = [(eta.exp().mean(0), eta.var(0)) for eta in (predictors_of(result, at) for at in parts)]
    mean, variance = (torch.cat(part) for part in zip(*moments, strict=True))
    found = overdispersion(mean, rows.y, rows.weights, float((rows.weights * mean * variance).sum()))
    return () if found is None else (found,)
