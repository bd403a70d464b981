"""Scores of a mixed model on rows that were held out, averaged over the posterior."""

import math
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from torchngvi.adapters.arviz import log_likelihood
from torchngvi.adapters.formula import Formula
from torchngvi.app.design import split
from torchngvi.app.findings import HeldOut
from torchngvi.app.runs import weighted_mean
from torchngvi.errors import InputError
from torchngvi.mixed_models import MixedResult, MultilevelResult
from torchngvi.mixed_models.predictions import NewRows, inverse_link, varying
from torchngvi.models.mixed_rows import GroupedRows

_ROWS = 2_000  # predicted at once
_SEED = 2  # of the effects of groups that the training rows have not


def parted(frame: pd.DataFrame, test_fraction: float, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows of the fit and those that are held out.

    >>> [len(part) for part in parted(pd.DataFrame({"x": range(10)}), 0.2, 0)]
    [8, 2]
    """
    if not 0 <= test_fraction < 1:
        raise InputError(
            f"test_fraction is the share of rows held out, at least 0 and below 1; got {test_fraction:g}. "
            "Take 0.2, or 0 to fit all rows."
        )
    train, test = split(len(frame), test_fraction, seed)
    return frame.iloc[np.sort(train)], frame.iloc[np.sort(test)]


def targets(formula: Formula, whole: pd.DataFrame, train: pd.DataFrame, test: pd.DataFrame) -> np.ndarray[Any, Any]:
    """The response of rows that were held out, as the formula makes it."""
    y = pd.Series(Formula(formula.formula, whole).y, index=whole.index)
    if not np.allclose(y[train.index], formula.y, rtol=1e-12, atol=0.0):
        raise InputError(
            f"the response {formula.response} depends on all rows of the table, and those held out have another. Write "
            "it into the table as a column, or fit all rows (--test-fraction 0)."
        )
    return y[test.index].to_numpy()


def scores(
    result: MixedResult | MultilevelResult,
    test: pd.DataFrame,
    y: np.ndarray[Any, Any],  # (M,)
    weights: np.ndarray[Any, Any] | None,  # (M,)
) -> HeldOut:
    """Score the predictions for rows that were held out, those of groups that the fit has not among them.

    The density of a row is the mean over draws of the posterior, p(y) = 1/S Σ_s p(y | η_s).
    """
    likelihood, draws, parts = result.model.rows.likelihood, result.draws(), []
    coded = likelihood.checked(torch.tensor(y, dtype=torch.float64))
    for begin in range(0, len(test), _ROWS):
        at = slice(begin, begin + _ROWS)
        eta = _predictors(result, test.iloc[at])
        log_p = log_likelihood(likelihood, eta, coded[at], draws.parameter)
        mean = inverse_link(likelihood, eta).mean(0)
        parts.append(torch.stack([math.log(len(eta)) - log_p.logsumexp(0), mean]))
    nll, mean = torch.cat(parts, 1).double()
    w = torch.ones_like(mean) if weights is None else torch.tensor(weights, dtype=torch.float64)
    loss, error = weighted_mean(nll, w)
    if likelihood.discrete:
        right = ((mean > 0.5) == (coded > 0)).double()
        return HeldOut(len(test), loss, error, weighted_mean(right, w)[0], None)
    square = weighted_mean((mean - coded).square(), w)[0]
    return HeldOut(len(test), loss, error, None, math.sqrt(square))


def _predictors(result: MixedResult | MultilevelResult, frame: pd.DataFrame) -> Tensor:
    """Draws of the linear predictors of new rows, (S, M)."""
    assert result.designs is not None
    rows, generator = result.designs(frame), torch.Generator().manual_seed(_SEED)
    parts: list[tuple[GroupedRows, Any, Tensor, Tensor]]
    if isinstance(result, MixedResult):
        one = result.draws()
        parts, fixed = [(result.model.rows, (rows.Z, rows.groups), one.omega, one.effects)], one.fixed
    else:
        several, factors = result.draws(), zip(result.model.names, result.model.rows.factors, strict=True)
        parts = [(of, rows.random[key], several.omega[key], several.effects[key]) for key, of in factors]
        fixed = several.fixed
    eta = torch.zeros(())
    for of, (Z, groups), omega, effects in parts:
        new = NewRows.of(of, rows.X, Z, groups, rows.offset)
        eta = eta + varying(new, omega, effects, generator)
    return eta + fixed @ new.X.mT + new.offset
