"""What speaks for and against a fit: scores on rows that were held out, and cautions."""

import math
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.app.prepare import CLASSES, Prepared
from torchngvi.app.readers import Read
from torchngvi.app.settings import Settings
from torchngvi.tables.model import regression
from torchngvi.tables.result import TableResult

_FEWEST_ROWS = 10  # of training, to say something about a posterior
_SMALL = 10  # the least of the counts from which on a Gaussian is usual for them
_OFFSET = re.compile(r"offset\((?:[^()]|\([^()]*\))*\)")


class HeldOut(NamedTuple):
    """Scores on rows that were held out, weighted where the data have weights."""

    rows: int | None = None
    nll: float | None = None  # -log p(y | x) a row
    error: float | None = None  # its standard error
    accuracy: float | None = None  # of classes, the share of rows whose likeliest class is theirs
    rmse: float | None = None  # of the mean, for counts and real numbers

    def __str__(self) -> str:
        first = f"RMSE {self.rmse:.4g}" if self.accuracy is None else f"accuracy {self.accuracy:.3f}"
        return f"{first}, negative log likelihood {self.nll:.4f} +- {self.error:.4f} a row"


def held_out(result: TableResult, s: Settings, made: Prepared) -> tuple[HeldOut, HeldOut] | None:
    """The scores on the rows held out, and those of the base rate: the same family with an intercept alone."""
    if not len(made.test):
        return None
    formula = made.columns.formula
    base = f"{formula.partition('~')[0]}~ {' + '.join(['1', *_OFFSET.findall(formula)])}"
    own = _scores(result, made.test)
    alone = regression(base, made.train, result.family.name, weights=s.weights, positive=made.positive)
    return own, _scores(alone.fit(seed=s.seed, progress=False), made.test)


@torch.no_grad()
def _scores(result: TableResult, test: Any) -> HeldOut:
    """Score the predictions for rows that were held out; p(y) of a row is its mean over the draws."""
    rows, family, parts = result.formula.of(test, require_response=True), result.family, []
    y, w = family.checked(rows.y), rows.weights
    predictor = result.predictor(rows, "", 0)
    for at in predictor.parts():
        eta = predictor.linear(at)[0]
        log_p = family.log_prob(eta, tuple(part[at] for part in y), predictor.draws.phi[:, None])
        parts.append(math.log(len(eta)) - log_p.logsumexp(0))
    nll, mean = torch.cat(parts), predictor.all("mean").mean(0)
    loss, error = _weighted_mean(nll, w)
    if family.outcomes is not None or family.name in CLASSES:
        right = (mean.argmax(-1) if mean.ndim > 1 else mean > 0.5) == y[0]
        return HeldOut(len(test), loss, error, accuracy=_weighted_mean(right.double(), w)[0])
    seen = y[0] / y[1] if "trials" in family.extra else y[0]
    return HeldOut(len(test), loss, error, rmse=math.sqrt(_weighted_mean((mean - seen).square(), w)[0]))


def _weighted_mean(values: Tensor, weights: Tensor) -> tuple[float, float]:
    """The mean and its standard error, which is NaN of a single value."""
    share = weights / weights.sum()
    mean = (share * values).sum()
    error = (share.square() * (values - mean).square()).sum().sqrt()
    return float(mean), float(error) if len(values) > 1 else math.nan


def cautions(result: TableResult, s: Settings, read: Read) -> list[str]:
    """What speaks against a result that has converged."""
    found, response, rows = [], result.formula.response, int((result.design.weights > 0).sum())
    if rows < _FEWEST_ROWS:
        found.append(
            f"{rows} training rows are too few to believe the result: the posterior is little more than the prior, "
            f"converged or not. Take at least {_FEWEST_ROWS}."
        )
    values = read.frame.get(response, read.frame.index.astype(str).to_series())
    if s.formula is not None and s.family is None and getattr(values.dtype, "kind", "O") in "iu":
        if set(values.unique()) <= {0, 1}:
            found.append(f"{response} is 0 or 1, fitted as gaussian. Of two classes, say --likelihood bernoulli.")
        elif 0 <= values.min() < _SMALL:
            found.append(
                f"{response} are whole numbers, fitted as gaussian. If they are counts, say --likelihood poisson, or "
                "negative_binomial where their variance exceeds their mean."
            )
    return found
