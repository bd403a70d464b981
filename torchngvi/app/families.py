"""The likelihoods of the command line: by name, with the parameters that some of them have, and those of the data."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from torchngvi.app.names import DOF
from torchngvi.diagnostics.predictive import predictor_moments
from torchngvi.errors import InputError
from torchngvi.fitting.fit import fit
from torchngvi.models import GeneralizedLinear
from torchngvi.models import likelihoods as library
from torchngvi.models.likelihoods import Likelihood, NegativeBinomial, StudentT
from torchngvi.models.scale_priors import HalfT
from torchngvi.models.standardize import WIDTH, Standardization, location_and_unit
from torchngvi.posteriors.gaussian import Gaussian

FAMILIES: dict[str, type[Likelihood]] = {
    **library.FAMILIES,
    "negative_binomial": NegativeBinomial,
    "student_t": StudentT,
}
PARAMETERS = {"gaussian": ("noise",), "student_t": ("scale", "dof"), "negative_binomial": ("dispersion",)}

_LEAST, _MOST = 1e-6, 1e3  # of a dispersion over the mean of counts, and of a scale over its start
_ROUNDS = 30
_CLOSE = 1e-4  # of the logarithm of a parameter
_AT_END = 0.01  # of the same, from an end of its range
_PRIOR_DOF = 3.0  # as brms


class Sought(NamedTuple):
    """A likelihood with the parameter that the data speak for, as `maximised` finds it.

    Attributes:
        likelihood: with that parameter.
        fits: how many it took.
        end: "lower" or "upper" where the ELBO alone is larger still beyond that end of the range in which it was
            sought; else "".
        settled: whether the last fits have agreed on it.
        there: whether the parameter is at that end under its prior too.
        prior: of the parameter, in words.
    """

    likelihood: Likelihood
    fits: int
    end: str
    settled: bool
    there: bool
    prior: str


def made(family: str, parameters: Mapping[str, float]) -> Likelihood:
    """A likelihood by its name and its parameters.

    >>> made("student_t", {"scale": 2.0, "dof": 4.0}).scale
    2.0
    """
    return FAMILIES[family](**{name: parameters[name] for name in PARAMETERS.get(family, ())})


def described(likelihood: Likelihood) -> tuple[str, dict[str, float]]:
    """The name and the parameters of a likelihood, from which `made` makes it again.

    >>> described(NegativeBinomial(3.0))
    ('negative_binomial', {'dispersion': 3.0})
    """
    family = next(name for name, kind in FAMILIES.items() if isinstance(likelihood, kind))
    return family, {name: getattr(likelihood, name) for name in PARAMETERS.get(family, ())}


def check_targets(
    family: str,
    y: Tensor,  # (N,)
) -> None:
    """Check that a family can produce targets."""
    made(family, dict.fromkeys(("noise", "scale", "dof", "dispersion"), 1.0)).checked(y)


def open_parameter(
    family: str,
    *,
    noise: float | None,
    dispersion: float | None,
    dof: float | None,
    start: Callable[[], float],
) -> tuple[Likelihood, Callable[[float], Likelihood] | None]:
    """The likelihood where a fit begins, and what makes it of the parameter that is to be found from the data."""
    if family == "negative_binomial":
        return NegativeBinomial(dispersion or 1.0), NegativeBinomial if dispersion is None else None
    if family == "student_t":
        nu = dof or DOF
        return StudentT(noise or start(), nu), (lambda scale: StudentT(scale, nu)) if noise is None else None
    return made(family, {"noise": noise} if noise else {}), None


def maximised(
    q: Gaussian, model: GeneralizedLinear, at: Callable[[float], Likelihood], *, max_evaluations: int
) -> Sought:
    """The parameter of a likelihood, positive, that the ELBO and its prior speak for, by variational EM.

    Each round fits q with the parameter as it is, and takes the one that maximises E_q[log p(y | η)] + log p(s) then:
    neither lowers the sum of the ELBO and log p(s). s is the scale of noise, half-t(3, 2.5 s_y), or of counts
    1/√dispersion, half-t(3, 1), the standard deviation of the gamma factor by which their rates vary.
    """
    y = model.y.double()
    weights = torch.ones_like(y) if model.weights is None else model.weights.double()
    log = math.log(_value(model.likelihood))
    unit = log if isinstance(model.likelihood, StudentT) else math.log(max(1.0, float(y.mean())))
    ends = (unit + math.log(_LEAST), unit + math.log(_MOST))
    prior, power, said = _prior(model)
    for rounds in range(1, _ROUNDS + 1):  # noqa: B007
        result = fit(q, model, max_evaluations=max_evaluations, progress=False, examine=False)
        e, v = (part.double() for part in predictor_moments(model, q, model.X, model.offset))
        if not bool((e.isfinite() & v.isfinite()).all()):
            raise InputError(
                "the parameter of the likelihood cannot be found, as a fit on the way to it broke down. Set it "
                "(--dispersion, or --noise for the scale of student_t)."
            )

        def loss(x: float, e: Tensor = e, v: Tensor = v) -> float:
            return float((weights * at(math.exp(x)).expected(e, v, y).value).sum())

        def penalized(x: float, loss: Callable[[float], float] = loss) -> float:
            return loss(x) - float(prior.log_prob(torch.tensor(power * x, dtype=torch.float64).exp()))

        new = _least(penalized, ends)
        model.likelihood = at(math.exp(new))
        settled = result.converged and abs(new - log) < _CLOSE
        if settled or not result.converged:
            break
        log = new
    alone = _least(loss, ends)
    near = [end for end, at_ in zip(("lower", "upper"), ends, strict=True) if abs(alone - at_) < _AT_END]
    there = min(abs(new - at_) for at_ in ends) < _AT_END
    return Sought(model.likelihood, rounds, "".join(near), settled, there, said)


def _least(loss: Callable[[float], float], ends: tuple[float, float]) -> float:
    return float(minimize_scalar(loss, bounds=ends, method="bounded", options={"xatol": 1e-7}).x)


def _prior(model: GeneralizedLinear) -> tuple[HalfT, float, str]:
    """The prior of s, the power of the parameter that s is, and both in words."""
    if not isinstance(model.likelihood, StudentT):
        return HalfT(_PRIOR_DOF, 1.0), -0.5, f"1/sqrt(dispersion) ~ half-t({_PRIOR_DOF:g}, 1)"
    size = model.X.abs().amax(0)  # by which a full set of indicators is one again
    through_0 = Standardization.of(model.X / torch.where(size > 0, size, 1.0), model.weights).constant is None
    unit = location_and_unit(model.y, model.likelihood.link, model.offset, model.weights, through_0=through_0)[1]
    scale = WIDTH * unit
    return HalfT(_PRIOR_DOF, scale), 1.0, f"scale ~ half-t({_PRIOR_DOF:g}, {scale:.4g})"


def _value(likelihood: Likelihood) -> float:
    return likelihood.scale if isinstance(likelihood, StudentT) else likelihood.dispersion  # type: ignore[attr-defined]


def overdispersion(
    mean: Tensor,  # (N,)
    y: Tensor,  # (N,)
    weights: Tensor | None,  # (N,)
    dim: float,
) -> str | None:
    """A warning where counts vary about their means clearly more than Poisson's, by Pearson's χ² over N - D.

    >>> overdispersion(torch.ones(50), torch.tensor([0.0, 2.0] * 25), None, 2) is None  # variance 1
    True
    >>> overdispersion(torch.ones(50), torch.tensor([0.0] * 40 + [5.0] * 10), None, 2)[:52]
    'the counts vary 4.17 times as much about their means'
    """
    w = torch.ones_like(y) if weights is None else weights
    freedom = float(w.sum()) - dim
    if freedom <= 0:
        return None
    ratio = float((w * (y - mean).square() / mean.clamp_min(1e-12)).sum()) / freedom
    if not ratio > 1 + max(0.5, 4 * np.sqrt(2 / freedom)):
        return None
    return (
        f"the counts vary {ratio:.3g} times as much about their means as those of a Poisson distribution: intervals "
        "are too narrow. Say --likelihood negative_binomial."
    )
