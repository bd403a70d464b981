"""The prior by evidence: the ELBO maximised jointly over q and the precision of the prior, by groups of coefficients.

At the best q of each precision τ the ELBO is a function of τ alone, with the derivative

    ∂ELBO/∂ log τ_g = ½ (D_g - τ_g E_q|θ_g - m₀|²)

since that with respect to q is zero there.  It vanishes at the fixed point of the closed-form M-step
τ_g = D_g/E_q|θ_g - m₀|² (MacKay 1992; Tipping 2001), which is slow where the data say little: it is accelerated in
log τ (Anderson 1965), and a step that would lower the ELBO is replaced by the M-step, which never does.  Of Gaussian
noise with variance σ² the M-step is the mean of E_q(y - η)².
"""

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import read_count, read_flag, read_instance, read_list, read_number, read_sizes
from torchngvi.errors import InputError
from torchngvi.fitting.fit import fit
from torchngvi.fitting.records import FitResult
from torchngvi.interfaces import Prior
from torchngvi.models import GeneralizedLinear
from torchngvi.models.likelihoods import GaussianNoise
from torchngvi.models.log_joint import read_gaussian
from torchngvi.numerics.linalg import anderson
from torchngvi.posteriors.gaussian import Gaussian

__all__ = ["Evidence", "Round", "prior_by_evidence"]

_REACH = math.log(1e8)  # of log τ to either side of the start


class Round(NamedTuple):
    """A value of the hyperparameters, and the ELBO of the best q there."""

    elbo: float  # nats
    precision: tuple[float, ...]  # of each group
    noise: float | None  # standard deviation, where it is found too


class Evidence(NamedTuple):
    """The prior precisions that the data speak for, and the fit with them.

    Attributes:
        precision: τ of each group.
        log_sd: the standard error of log τ of each group, from the curvature of the ELBO; infinite where it has none.
        noise: the standard deviation of Gaussian noise, where it was found too, else None.
        at_limit: the groups whose precision has no maximum in its range, a factor of 1e8 to either side of the start,
            or only a flat one: the data speak for no effect of these columns, or for no shrinkage.
        converged: whether the fixed point was reached, and the fit there.
        curve: a `Round` for each precision that was tried, in order.
        result: the fit of q with these precisions.
        model: the model with them.
    """

    precision: tuple[float, ...]
    log_sd: tuple[float, ...]
    noise: float | None
    at_limit: tuple[int, ...]
    converged: bool
    curve: tuple[Round, ...]
    result: FitResult
    model: GeneralizedLinear

    def __str__(self) -> str:
        groups = ", ".join(
            f"{value:.4g} (times or divided by {math.exp(min(error, 50.0)):.3g})"
            for value, error in zip(self.precision, self.log_sd, strict=True)
        )
        verdict = "found" if self.converged else "not found to the tolerance"
        noise = "" if self.noise is None else f", noise {self.noise:.4g}"
        said = f"prior precision by evidence: {groups or 'as given'}{noise}, {verdict} in {len(self.curve)} fits."
        return f"{said} {self.limits}".rstrip()

    @property
    def limits(self) -> str:
        """What the groups of `at_limit` say in a sentence, "" where there are none."""
        start = self.curve[0].precision
        larger = [group for group in self.at_limit if self.precision[group] > start[group]]
        smaller = [group for group in self.at_limit if group not in larger]
        sentences = []
        for groups, what in ((larger, "effect"), (smaller, "shrinkage")):
            columns = "of any column" if len(start) == 1 else f"of the columns of group {', '.join(map(str, groups))}"
            sentences += [f"The data speak for no {what} {columns}."] if groups else []
        return " ".join(sentences)


def prior_by_evidence(
    q: Gaussian,
    model: GeneralizedLinear,
    groups: Sequence[Sequence[int]] | None = None,
    *,
    noise: bool = False,
    tolerance: float = 1e-7,
    max_rounds: int = 60,
    max_evaluations: int = 1000,
    fit_tolerance: float | None = None,
) -> Evidence:
    """Fit q and the precisions of the prior together, q in place.

    Use it where nothing is known of the size of the effects: the precision is then the one under which the data
    are the most probable, up to the KL divergence of q from the posterior, which the ELBO bounds.

    Args:
        q: the posterior, updated in place.
        model: the model, whose prior has a diagonal precision; it is where the search starts, and stays as it is.
        groups: lists of coordinates that share a precision; coordinates in none keep theirs, as an intercept should.
            By default all are one group.
        noise: whether the standard deviation of `GaussianNoise` is found too.
        tolerance: on the change of log τ at the end.
        max_rounds: the largest number of fits.
        max_evaluations: the budget of each fit.
        fit_tolerance: the tolerance of each fit on its natural-gradient norm; that of `torchngvi.fit` by default.

    Returns:
        The precisions, their errors, the ELBO at each that was tried, and the fit.

    Raises:
        InputError: groups that are empty, overlap or go beyond D; a full prior; noise to be found without Gaussian
            noise; several posteriors at once.

    >>> X = torch.tensor([[1.0], [2.0], [-1.0], [0.5]], dtype=torch.float64)
    >>> model = GeneralizedLinear(X, [1.2, 1.8, -0.9, 0.7], GaussianNoise(0.5))
    >>> from torchngvi import CholeskyGaussian
    >>> found = prior_by_evidence(CholeskyGaussian(1, dtype=torch.float64), model)
    >>> found.converged, round(found.precision[0], 3)  # 1/(θ̂² - sd²) of least squares
    (True, 1.115)
    """
    tolerance = read_number("tolerance", tolerance, "bounds the change of log τ at the end", above=0)
    max_rounds = read_count("max_rounds", max_rounds, "counts fits")
    noise = read_flag("noise", noise)
    options = {"max_evaluations": max_evaluations, "tolerance": fit_tolerance}
    search = _Search(q, model, _checked(q, model, groups, noise), noise, options)
    start = x = search.start()
    best: tuple[float, Tensor, Tensor] | None = None  # the ELBO, log τ, and the residual there
    past: list[tuple[Tensor, Tensor]] = []
    converged, plain = False, False
    for _ in range(max_rounds):
        elbo, residual = search.at(x)
        if best is not None and not elbo >= best[0] - 1e-9 * (1 + abs(best[0])):
            if plain:  # the M-step lowers it too: by rounding
                x = best[1]
                break
            past, plain = [], True
            x = (best[1] + best[2]).clamp(start - _REACH, start + _REACH)
            continue
        gain = math.inf if best is None else elbo - best[0]
        best, plain = (elbo, x, residual), False
        past = [*past, (x, residual)][-4:]  # rounds that the acceleration looks back on
        step = anderson(*zip(*past, strict=True)) - x
        ahead = (x + step.clamp(-3.0, 3.0)).clamp(start - _REACH, start + _REACH)
        change = float((ahead - x).abs().max())
        flat = change > 0.1 and gain < 1e-8 * (1 + abs(elbo))
        if change <= tolerance or flat:
            converged = True
            break
        x = ahead
    return search.finished(x, start, converged)


def _checked(
    q: Gaussian, model: GeneralizedLinear, groups: Sequence[Sequence[int]] | None, noise: bool
) -> list[Tensor]:
    """The coordinates of each group."""
    q = read_gaussian("prior_by_evidence", q, model)
    model = read_instance("model", model, GeneralizedLinear, "is a GeneralizedLinear", other=q)
    if q.batch_shape or model.y.ndim > 1:
        raise InputError("a prior by evidence is found for one posterior at a time. Fit the members one by one.")
    if not isinstance(model.prior, Prior):
        raise InputError("a prior by evidence has a diagonal precision; the model's is a matrix. Pass (D,).")
    if noise and not isinstance(model.likelihood, GaussianNoise):
        raise InputError(f"noise=True is for Gaussian noise; the likelihood is {type(model.likelihood).__name__}.")
    what = f"must be lists of different coordinates from 0 to {model.dim - 1}, none empty"
    given = [range(model.dim)] if groups is None else read_list("groups", groups, what)
    listed = [read_sizes("groups", group, what, at_least=0) for group in given]
    members = [member for group in listed for member in group]
    within = all(member < model.dim for member in members)
    if not (listed or noise) or not all(listed) or len(set(members)) < len(members) or not within:
        raise InputError(f"groups {what}; got {[list(group) for group in listed]}.")
    return [torch.as_tensor(group) for group in listed]


class _Search:
    """The ELBO and the residual of the M-step, log τ_new - log τ, as functions of log τ (and of log σ²)."""

    def __init__(
        self, q: Gaussian, model: GeneralizedLinear, groups: list[Tensor], noise: bool, options: dict[str, Any]
    ) -> None:
        self.q, self.model, self.groups, self.noise = q, model, groups, noise
        self.options = options
        self.curve: list[Round] = []
        self.result: FitResult | None = None
        self.fitted = model

    def start(self) -> Tensor:
        """The logarithms of the model's own precisions, geometric means of each group, and of its σ²."""
        logs = [self.model.prior.precision.expand(self.model.dim)[group].log().mean() for group in self.groups]
        if isinstance(self.model.likelihood, GaussianNoise) and self.noise:
            logs.append(self.model.y.new_tensor(2 * math.log(self.model.likelihood.noise)))
        return torch.stack(logs).double().cpu()

    def with_logs(self, x: Tensor) -> GeneralizedLinear:
        """The model with these precisions, and this noise."""
        new = copy.copy(self.model)
        precision = self.model.prior.precision.expand(self.model.dim).clone()
        for group, value in zip(self.groups, x, strict=False):
            precision[group] = value.exp().to(precision)
        new.prior = Prior(self.model.prior.mean, precision)
        if self.noise:
            new.likelihood = GaussianNoise(math.exp(0.5 * float(x[-1])))
        return new

    def at(self, x: Tensor) -> tuple[float, Tensor]:
        """The ELBO of the best q at x, from the q of before, and the residual there."""
        self.fitted = self.with_logs(x)
        self.result = fit(self.q, self.fitted, progress=False, examine=False, **self.options)
        square = (self.q.mean - self.model.prior.mean).square() + self.q.stddev.square()
        precision = self.fitted.prior.precision
        residual = [-torch.log((precision[group] * square[group]).mean()) for group in self.groups]
        noise = None
        if isinstance(self.fitted.likelihood, GaussianNoise) and self.noise:
            noise = self.fitted.likelihood.noise
            eta, w = self.fitted.marginals(self.q.frame()), self.fitted.weights
            left = (w * ((self.fitted.y - eta.mean).square() + eta.variance)).sum() / w.sum()
            residual.append(torch.log(left / noise**2))
        precisions = tuple(float(precision[group[0]]) for group in self.groups)
        self.curve.append(Round(-self.result.loss, precisions, noise))
        return -self.result.loss, torch.stack(residual).double().detach().cpu()

    def slope(self, x: Tensor) -> Tensor:
        """The derivative of the ELBO of the best q: ½ D_g (1 - exp(-r)), and of log σ² ½ Σw (exp(r) - 1)."""
        _, residual = self.at(x)
        count = len(self.groups)
        sizes = residual.new_tensor([float(len(group)) for group in self.groups])
        slope = -0.5 * sizes * torch.expm1(-residual[:count])
        return torch.cat([slope, 0.5 * float(self.model.weights.sum()) * torch.expm1(residual[count:])])

    def finished(self, x: Tensor, start: Tensor, converged: bool, step: float = 1e-3) -> Evidence:
        """The standard errors of log τ from differences of slopes, and the fit at x."""
        elbos = list(self.curve)
        middle = self.slope(x)
        columns = []
        for k in range(len(x)):
            there = x.clone()
            there[k] += step
            columns.append((middle - self.slope(there)) / step)
        information = torch.stack(columns, 1)
        inverse, failed = torch.linalg.inv_ex(0.5 * (information + information.mT))
        variance = inverse.diagonal()
        self.at(x)
        assert self.result is not None
        self.curve = elbos
        count = len(self.groups)
        sds = [math.sqrt(float(v)) if float(v) > 0 and not bool(failed) else math.inf for v in variance[:count]]
        ends = ((x - start).abs() >= _REACH * (1 - 1e-9))[:count] | (torch.tensor(sds, device="cpu") > 100.0)
        last = self.with_logs(x)
        return Evidence(
            tuple(float(value.exp()) for value in x[:count]),
            tuple(sds),
            last.likelihood.noise if isinstance(last.likelihood, GaussianNoise) and self.noise else None,
            tuple(ends.nonzero()[:, 0].tolist()),
            converged and self.result.converged,
            tuple(elbos),
            self.result,
            self.fitted,
        )
