"""Fits of regressions and mixed models for ArviZ: draws, the log likelihood of each row, and new data of each draw."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.adapters.predictors import predictors_of
from torchngvi.errors import InputError
from torchngvi.fitting.records import FitResult
from torchngvi.mixed_models import MixedResult, MultilevelResult
from torchngvi.mixed_models.exports import inference_data, observed
from torchngvi.mixed_models.predictions import responses
from torchngvi.models import GeneralizedLinear
from torchngvi.models.learned import Learned, LearnedNoise, LearnedScale, LearnedSize
from torchngvi.models.likelihoods import GaussianNoise, Likelihood, NegativeBinomial, StudentT
from torchngvi.posteriors.gaussian import Gaussian

__all__ = ["to_arviz"]

DRAWS = 4000  # by default
_LEARNED: dict[type[Likelihood], Learned] = {
    GaussianNoise: LearnedNoise(),
    StudentT: LearnedScale(),
    NegativeBinomial: LearnedSize(),
}


class Predicted(NamedTuple):
    """Rows of data, and draws of what is said of them.

    Attributes:
        likelihood: p(y | η), which gives two classes as -1 and +1.
        eta: draws of the linear predictors, (S, N).
        y: the targets in the coding of the likelihood, (N,).
        weights: factors of the log likelihood of each row, (N,).
        parameter: draws of the parameter of the likelihood where it is learned, (S,).
    """

    likelihood: Likelihood
    eta: Tensor
    y: Tensor
    weights: Tensor
    parameter: Tensor | None = None


def to_arviz(result: Any, *, draws: int | None = None, seed: int = 0) -> Any:
    """Export a fit for ArviZ with what its checks of a model need, ``arviz.loo``, ``arviz.plot_ppc`` and their kin.

    One wants it to ask whether the model fits the data. The groups are ``posterior``; ``log_likelihood``, of each row
    log p(y_n | θ) at each draw, from which ``arviz.loo`` estimates how well the row would be predicted had it been left
    out (Vehtari, Gelman and Gabry 2017, Statistics and Computing 27); ``posterior_predictive``, new targets of all rows
    for each draw; and ``observed_data``. The variable of the last three is ``y``, two classes as 0 and 1. A row of
    weight w counts w times in its log likelihood, and rows of weight 0 are left out.

    Draws are from the posterior that was fitted, and ``arviz.loo`` takes them for draws from the exact one: see first
    that it is near, by the k-hat of the report. Of a mixed model the log likelihood is given the effects of the row's
    group, so that what is left out is a row and not a group.

    Args:
        result: of `torchngvi.fit` for a `GeneralizedLinear`, with a Gaussian posterior; or of a mixed model,
            `torchngvi.mixed_models.MixedResult` or `torchngvi.mixed_models.MultilevelResult`. Of a run of
            ``torchngvi fit`` see `torchngvi.app.saved.Fitted.to_arviz`.
        draws: of a regression, 4000 by default; a mixed model has its own, ``result.draws()``.
        seed: of the draws, and of the new data.

    Returns:
        An ``arviz.InferenceData``, from ArviZ 1.0 on an ``xarray.DataTree``. Its ``posterior`` has ``beta`` (column)
        of a regression, and of a mixed model what ``result.to_arviz()`` has.

    Raises:
        ImportError: without ArviZ.
        InputError: another kind of result, one with a ``to_arviz`` of its own, a batch of fits, or a number of draws
            that is none.

    """
    generator = torch.Generator().manual_seed(seed)
    if isinstance(result, MixedResult | MultilevelResult):
        if draws is not None:
            raise InputError("draws of a mixed model are those of its result, result.draws(). Leave draws out.")
        return with_checks(result.to_arviz(), _of_mixed(result), generator)
    if hasattr(result, "to_arviz"):
        raise InputError(f"a {type(result).__name__} has a to_arviz of its own: call that, with the table of the fit.")
    q, model = (getattr(result, name, None) for name in ("posterior", "target"))
    if not isinstance(result, FitResult) or not isinstance(q, Gaussian) or not isinstance(model, GeneralizedLinear):
        kind = f" of a {type(model).__name__}" if isinstance(result, FitResult) and model is not None else ""
        raise InputError(
            "to_arviz takes the result of a fit of a GeneralizedLinear with a Gaussian posterior, or of a mixed model; "
            f"got a {type(result).__name__}{kind}."
        )
    if q.batch_shape:
        raise InputError(f"to_arviz takes one fit; got a batch of shape {tuple(q.batch_shape)}. Fit them one by one.")
    theta = drawn(q, draws, generator)
    rows = Predicted(model.likelihood, model.predictor(theta), model.y, model.weights)
    return exported(theta, result.names or [f"x{i}" for i in range(model.dim)], rows, generator)


def drawn(q: Gaussian, draws: int | None, generator: torch.Generator) -> Tensor:
    """Draw coefficients, (draws, D)."""
    draws = DRAWS if draws is None else draws
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 2:
        raise InputError(f"draws is a number of draws, 2 or more; got {draws!r}.")
    return q.sample((draws,), generator)


def exported(
    beta: Tensor,  # (S, D)
    names: Sequence[str],
    rows: Predicted,
    generator: torch.Generator,
) -> Any:
    """Export draws of named coefficients with the checks of their rows."""
    data = inference_data({"beta": beta}, rows.y, {"column": names}, {"beta": ["column"], "y": ["row"]})
    return with_checks(data, rows, generator)


def with_checks(data: Any, rows: Predicted, generator: torch.Generator) -> Any:
    """Add the groups ``log_likelihood``, ``posterior_predictive`` and ``observed_data`` to draws."""
    import arviz

    here = rows.weights > 0
    eta, y, weights = rows.eta[:, here], rows.y[here], rows.weights[here]
    of_draws = {
        "log_likelihood": weights * log_likelihood(rows.likelihood, eta, y, rows.parameter),
        "posterior_predictive": responses(rows.likelihood, eta, generator, rows.parameter),
    }
    groups: dict[str, Any] = {
        **{name: {"y": values[None].double().cpu().numpy()} for name, values in of_draws.items()},
        "observed_data": {"y": observed(rows.likelihood, y).double().cpu().numpy()},
    }
    named: dict[str, Any] = {"dims": {"y": ["row"]}, "coords": {"row": here.nonzero()[:, 0].tolist()}}
    if int(arviz.__version__.partition(".")[0]) < 1:
        data.extend(arviz.from_dict(**groups, **named), join="right")
        return data
    for name, group in arviz.from_dict(groups, **named).children.items():
        data[name] = group.copy()
    return data


def log_likelihood(
    likelihood: Likelihood,
    eta: Tensor,  # (S, N)
    y: Tensor,  # (N,)
    parameter: Tensor | None = None,  # (S,)
) -> Tensor:
    """Compute log p(y_n | η_n) at draws of the predictors, and of the parameter where it is learned, (S, N).

    >>> eta, y = torch.zeros(2, 1), torch.ones(1)
    >>> log_likelihood(GaussianNoise(1.0), eta, y, torch.tensor([1.0, 2.0])).exp()
    tensor([[0.2420],
            [0.1760]])
    """
    if parameter is None:
        return -likelihood.energy(eta, y)
    return -_LEARNED[type(likelihood)].energy(eta, y, parameter[:, None].log())


def _of_mixed(result: MixedResult | MultilevelResult) -> Predicted:
    rows = result.model.rows
    return Predicted(rows.likelihood, predictors_of(result), rows.y, rows.weights, result.draws().parameter)
