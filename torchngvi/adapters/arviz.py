"""Regressions with a Gaussian posterior for ArviZ: draws, the log likelihood of each row, and new data of each draw."""

from typing import Any

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.fitting.records import FitResult
from torchngvi.models import GeneralizedLinear
from torchngvi.models.likelihoods import GaussianNoise, Likelihood, NegativeBinomial, PoissonLog, StudentT
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.tables import TableResult
from torchngvi.tables.result import inference_data

__all__ = ["to_arviz"]

DRAWS = 4000  # by default


def to_arviz(result: Any, *, draws: int | None = None, seed: int = 0) -> Any:
    """Export a fit for ArviZ with what its checks of a model need, ``arviz.loo``, ``arviz.plot_ppc`` and their kin.

    Use it to ask whether the model fits the data. The groups are ``posterior``; ``log_likelihood``, of each row
    log p(y_n | θ) at each draw, from which ``arviz.loo`` estimates how well the row would be predicted had it been left
    out (Vehtari, Gelman and Gabry 2017, Statistics and Computing 27); ``posterior_predictive``, new targets of all rows
    for each draw; and ``observed_data``. The variable of the last three is ``y``, two classes as 0 and 1. A row of
    weight w counts w times in its log likelihood, and rows of weight 0 are left out.

    Draws are from the posterior that was fitted, and ``arviz.loo`` takes them for draws from the exact one: see first
    that it is near, by the k-hat of the report. Of a mixed model the log likelihood is given the effects of the row's
    group, so that what is left out is a row and not a group.

    Args:
        result: of `torchngvi.fit` for a `GeneralizedLinear`, with a Gaussian posterior; or a
            `torchngvi.tables.TableResult`, as of a mixed model.
        draws: of a regression, 4000 by default; a `TableResult` has its own, ``result.draws()``.
        seed: of the draws, and of the new data.

    Returns:
        An ``arviz.InferenceData``, from ArviZ 1.0 on an ``xarray.DataTree``. Its ``posterior`` has ``beta`` (column)
        of a regression, and of a `TableResult` what `torchngvi.tables.TableResult.to_arviz` says.

    Raises:
        ImportError: without ArviZ.
        InputError: another kind of result, one with a ``to_arviz`` of its own, a batch of fits, or a number of draws
            that is none.

    """
    if isinstance(result, TableResult):
        if draws is not None:
            raise InputError("draws of a mixed model are those of its result, result.draws(). Leave draws out.")
        return result.to_arviz(seed=seed)
    if hasattr(result, "to_arviz"):
        raise InputError(f"a {type(result).__name__} has a to_arviz of its own: call that.")
    q, model = (getattr(result, name, None) for name in ("posterior", "target"))
    if not isinstance(result, FitResult) or not isinstance(q, Gaussian) or not isinstance(model, GeneralizedLinear):
        kind = f" of a {type(model).__name__}" if isinstance(result, FitResult) and model is not None else ""
        raise InputError(
            "to_arviz takes the result of a fit of a GeneralizedLinear with a Gaussian posterior, or of a mixed model; "
            f"got a {type(result).__name__}{kind}. Of another log joint give arviz.from_dict "
            "its draws, q.sample((1000,))[None].numpy(), as the posterior."
        )
    if q.batch_shape:
        raise InputError(f"to_arviz takes one fit; got a batch of shape {tuple(q.batch_shape)}. Fit them one by one.")
    draws = DRAWS if draws is None else draws
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 2:
        raise InputError(f"draws is a number of draws, 2 or more; got {draws!r}.")
    generator = torch.Generator().manual_seed(seed)
    theta = q.sample((draws,), generator)
    eta, likelihood = model.predictor(theta), model.likelihood
    names = result.names or [f"x{i}" for i in range(model.dim)]
    log_p = -model.weights * likelihood.energy(eta, model.y)
    y = 0.5 * (1 + model.y) if likelihood.discrete else model.y  # two classes, which a likelihood has as -1 and +1
    new = responses(likelihood, eta, generator)
    return inference_data({"beta": theta}, {"column": names}, {"beta": ["column"]}, log_p, new, y, model.weights > 0)


def responses(likelihood: Likelihood, eta: Tensor, generator: torch.Generator) -> Tensor:  # eta (S, N)
    """Draw y given the linear predictor, (S, N), two classes as 0 and 1."""
    eta = eta.double().cpu()
    match likelihood:
        case PoissonLog():
            return torch.poisson(eta.exp().clamp_max(_HUGE), generator)
        case NegativeBinomial():
            size = torch.full_like(eta, likelihood.dispersion)
            rate = eta.exp() * torch._standard_gamma(size, generator=generator) / size
            return torch.poisson(rate.clamp_max(_HUGE), generator)
        case StudentT() | GaussianNoise():
            noise = torch.randn(eta.shape, generator=generator, dtype=eta.dtype)
            if isinstance(likelihood, GaussianNoise):
                return eta + likelihood.noise * noise
            half = torch.full_like(eta, 0.5 * likelihood.dof)
            return eta + likelihood.scale * noise * (half / torch._standard_gamma(half, generator=generator)).sqrt()
        case _ if likelihood.discrete:
            success = (-likelihood.energy(eta, torch.ones_like(eta))).exp()
            return (torch.rand(eta.shape, generator=generator, dtype=eta.dtype) < success).double()
    raise InputError(f"draws of y are known for the likelihoods of this library; got {type(likelihood).__name__}.")


_HUGE = 1e15  # a mean of counts whose integers float64 holds
