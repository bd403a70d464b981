"""The model of a table, by a formula or by arrays, and its result read from a file.

A file holds the columns that the formula names, the family and priors by name, and joint draws: tensors, numbers and
texts alone, and reading it runs no code.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchngvi.arguments import read_instance, read_seed
from torchngvi.diagnostics.importance import USELESS
from torchngvi.errors import InputError
from torchngvi.messages import listed, needing
from torchngvi.models.likelihoods import GaussianNoise, Likelihood, NegativeBinomial, StudentT
from torchngvi.models.mixed_prior import MixedPrior, ScalePrior
from torchngvi.tables.design import Formula, design_of_arrays, usual_family
from torchngvi.tables.families import FAMILIES, LINKS, Family, Held, Multinomial, Ordinal, family_of
from torchngvi.tables.globals import FitSettings, integrate
from torchngvi.tables.parts import Coordinates, Design, Factor, Posterior, Weighted
from torchngvi.tables.priors import LKJ, Exponential, HalfNormal, HalfT, Normal, Priors, settle
from torchngvi.tables.result import FORMAT, SAID, TableResult
from torchngvi.tables.table import warn_of

_GONE = {
    "marginalise": "random effects are always integrated out",
    "max_evaluations": "the search for the mode ends by itself",
    "max_seconds": "the search for the mode ends by itself",
}


class TableModel:
    """A regression or a mixed model of some rows, as `regression` makes it of a formula and a table.

    The linear predictor is η = Xβ + Σ_k Z_k b_k + offset with K ≥ 0 grouping factors, the effects of the groups of
    factor k are b_k ~ N(0, Σ_k), and rows have the density p(y | η, φ) of the family.

    Args:
        design: the rows, from a formula or from arrays (`torchngvi.tables.design_of_arrays`).
        family: a word, such as "poisson", or a `torchngvi.tables.Family`.
        priors: by name, see `regression`.
        formula: what has made the design, with which the result predicts tables.

    Attributes:
        design: the rows.
        family: the family, with what it needs of the data.
        coordinates: of the globals.
        priors: of the globals, in the units of the data where none was given.

    Raises:
        InputError: outcomes that the family cannot produce, or a prior of a name that the model does not have.
    """

    def __init__(
        self,
        design: Design,
        family: str | Family = "gaussian",
        *,
        priors: Mapping[str, Any] | str | None = None,
        formula: Formula | None = None,
    ) -> None:
        self.family = family_of(family).settled(design.y, design.weights, design.offset)
        self.design, self.formula = design._replace(y=self.family.checked(design.y)), formula
        if self.family.nominal and design.factors:
            raise InputError(
                f"the {self.family.name} family takes no grouping factors; the model has "
                f"{listed([of.name for of in design.factors])}. For each category but the reference, fit the rows of "
                "the two with the family 'bernoulli'; where categories have an order, take 'ordinal'; or make a factor "
                "of few levels a column."
            )
        own = (self.family.outcomes or ())[1:] if self.family.nominal else ()
        self.coordinates = Coordinates(
            self.design, len(self.family.parameters), thresholds=not self.family.intercept, categories=own
        )
        self.priors: Priors = settle(self.design, self.family, self.coordinates, priors)

    def __repr__(self) -> str:
        what = "arrays" if self.formula is None else repr(self.formula.formula)
        return f"TableModel({what}, {self.family.name}, {len(self.design.X)} rows)"

    def fit(
        self,
        *,
        draws: int | None = None,
        nodes: int | None = None,
        seed: int = 0,
        progress: bool = True,
        settings: FitSettings | None = None,
        **gone: Any,
    ) -> TableResult:
        """Fit the model: the globals with the random effects integrated out, and the effects given the globals.

        The mode of log p(y, θ) over the globals θ is found first, with the effects integrated out by adaptive
        Gauss-Hermite quadrature, in closed form where noise is Gaussian, and by a corrected Laplace approximation for
        several factors. Draws of a Gaussian and of a wider t distribution about the mode are then weighted to the
        posterior. Their k-hat says how far to believe them.

        Args:
            draws: the number of weighted draws of the globals; by default 400, up to 4,096 where the table is small,
                and more where fewer than 200 are effective.
            nodes: the quadrature nodes in each dimension; by default as many as make no difference of 0.02 nats.
            seed: of all draws.
            progress: show a bar.
            settings: all numbers of the fit, see `torchngvi.tables.FitSettings`.

        Returns:
            The result, which prints as a table.

        Raises:
            InputError: settings out of range.
        """
        for name in gone:
            if name not in _GONE:
                raise TypeError(f"fit() got an unexpected keyword argument {name!r}")
            warnings.warn(f"{name}= does nothing any more: {_GONE[name]}.", FutureWarning, stacklevel=2)
        settings = (FitSettings() if settings is None else settings).asked(draws=draws, nodes=nodes)
        seed, design, columns = read_seed("seed", seed), self.design, self.coordinates
        own_noise = "residual sd" in self.family.parameters
        parts = self.priors.parts[: len(design.names)]
        warn_of(columns.X, columns.columns, parts, design.factors, design.names, own_noise)

        refit = partial(self._with_weights, settings=settings, seed=seed)
        fitted = self._integrated(self.design, settings, seed, progress)
        if settings.exact is not None:
            self._check_noise(fitted, settings.exact)
        return TableResult(self.design, self.family, fitted, self.priors, formula=self.formula, refit=refit)

    def _check_noise(self, fitted: Posterior, rounding: float, few: float = 0.1, most: float = 2.0**32) -> None:
        """Refuse an outcome that the columns give exactly, whose likelihood rises for ever as the noise goes to 0."""
        # few: effective share of draws below which a fit is looked at; most: operations
        rows, family, units, draws = self.design, self.family, self.coordinates, fitted.weighted
        if fitted.converged and draws.k_hat < USELESS and draws.effective > few * len(draws.weights):
            return
        width = units.X.shape[1] + sum(len(of.levels) * len(of.effects) for of in rows.factors)
        known = family.discrete or not family.parameters or family.link not in LINKS
        if known or any(bool((seen != 1).any()) for seen in rows.y[1:]) or len(units.X) * width**2 > most:
            return
        here, columns = rows.weights > 0, [units.X]
        for of, Z in zip(rows.factors, units.Z, strict=True):
            members = torch.nn.functional.one_hot(of.groups, len(of.levels))
            columns.append((members[:, :, None] * Z[:, None]).flatten(1))
        left = (LINKS[family.link](rows.y[0]) - rows.offset)[here]
        root, size, _ = torch.linalg.svd(torch.cat(columns, 1)[here], full_matrices=False)
        root = root[:, size > rounding * size.max()]
        off = (left - root @ (root.mT @ left)).abs().max()
        if len(left) > root.shape[1] and bool(off <= rounding * left.abs().max()):
            raise InputError(
                f"the columns{' and groups' * bool(rows.factors)} give the outcome of all {len(left)} rows, to eight "
                f"digits or more, so that there is no {family.parameters[0]} to be learned: no size of the noise is "
                "the likeliest. Look whether a column says what is to be predicted."
            )

    def _with_weights(self, weights: Tensor, settings: FitSettings, seed: int) -> Posterior:
        """The posterior under other weights of the rows, and the same priors."""
        return self._integrated(self.design._replace(weights=weights), settings, seed, False)

    def _integrated(self, design: Design, settings: FitSettings, seed: int, progress: bool) -> Posterior:
        return integrate(design, self.family, self.coordinates, self.priors, settings, seed, progress)


class MixedModel(TableModel):
    """A regression or a mixed model of arrays: y ~ family(Xβ + Σ_k Z_k b_k + offset), b_k ~ N(0, Σ_k).

    Use it where the designs are there as arrays; of a table `mixed` makes the same model by a formula.

    Args:
        X: the design of the fixed effects β, (N, p), dense, with a column of ones for an intercept.
        y: the outcome, (N,), or a tuple of it and what is known of it, such as the trials.
        random: a pair (Z, groups), the design of the effects that vary, (N, r), and the group of each row, (N,), whole
            numbers 0, ..., n - 1; a dict from the names of several grouping factors to such pairs; None for a
            regression.
        family: a word, such as "poisson", or a `torchngvi.tables.Family`.
        priors: by name, see `regression`; coefficients are "Intercept" and "x1", "x2", ... unless they have names.
        weights: factors of the log likelihood of each row, (N,), not negative.
        offset: what is added to the linear predictor, (N,), as the logarithm of an exposure.
        names: of the columns of X.
        prior: `torchngvi.models.MixedPrior` of earlier releases, with a warning.

    Raises:
        InputError: arrays of other shapes, groups that are no numbers 0, ..., n - 1 or have no rows, columns of Z that
            depend on one another, outcomes that the family cannot produce, or a prior that the model does not have.

    >>> import torch
    >>> X = torch.ones(6, 1, dtype=torch.float64)
    >>> result = MixedModel(X, [3, 4, 0, 1, 2, 6], (X, [0, 0, 1, 1, 2, 2]), "poisson").fit(progress=False)
    >>> result.summary().random["group"].sd.names
    ('Intercept',)
    """

    def __init__(
        self,
        X: Any,
        y: Any,
        random: Any = None,
        family: str | Family | GaussianNoise | NegativeBinomial | StudentT = "bernoulli",
        *,
        priors: Mapping[str, Any] | str | None = None,
        weights: Any = None,
        offset: Any = None,
        names: Sequence[str] | None = None,
        prior: MixedPrior | None = None,
    ) -> None:
        design = design_of_arrays(X, y, random, offset=offset, weights=weights, names=names)
        found = _family(family)
        super().__init__(design, found, priors=_priors(priors, prior, found))


def regression(
    formula: str,
    frame: Any,
    family: str | Family | GaussianNoise | NegativeBinomial | StudentT | None = None,
    *,
    priors: Mapping[str, Any] | str | None = None,
    weights: str | Any = None,
    positive: Any = None,
    prior: MixedPrior | None = None,
) -> TableModel:
    """Make a regression or a mixed model of a formula and a table, as R, lme4, brms and bambi do.

    Use it for data in a pandas DataFrame: the result speaks of its columns and groups, predicts new tables, and says
    what a column does on the scale of the outcome. `mixed` is the same function under the name that people look for
    where rows come in groups.

    Args:
        formula: the outcome, fixed effects, and effects that vary over groups, K ≥ 0 factors of them: "y ~ x * z",
            "y ~ log(x) + bs(w, df=4)", "y ~ x + (1 + x | g)", "y ~ x + (1 | a/b)", "prop(s, n) ~ x" for s successes of
            n trials, "censored(time, event) ~ x", "n ~ x + offset(log(days))".
        frame: a `pandas.DataFrame`.
        family: what the outcome is distributed as: "gaussian", "student_t", "bernoulli", "probit", "binomial",
            "beta_binomial", "poisson", "negative_binomial", "zero_inflated_poisson", "hurdle_poisson" and the same of
            negative binomial counts, "ordinal", "ordinal_probit", "multinomial", "beta", "gamma", "weibull",
            "lognormal"; or a `torchngvi.tables.Family` of your own. By default "bernoulli" where the formula or
            ``positive`` says what counts as success, as "died[yes] ~ x", and else "gaussian".
        priors: a mapping from names to priors or their texts, in the units of the table: {"x": Normal(0, 1),
            "1|g": "half_t(3, 1)", "Intercept": ...}. "Intercept" is that at the means of the columns, "b" all other
            coefficients, "sd" and "cor" all standard deviations and correlations over groups, and parameters of the
            family have their own names. The word "flat" makes all of them say nothing. By default those of rstanarm and
            brms: N(0, (2.5 s_y/s_j)²) of the coefficient of column j, half-t(3, 2.5 s_y/s_j) of standard deviations
            over groups, LKJ(1) of correlations, s_y the standard deviation of y under the identity link and else 1.
        weights: factors of the log likelihood of each row: the name of a column, or numbers (N,).
        positive: of two classes the one that counts as success; by default the one that sorts last.
        prior: `torchngvi.models.MixedPrior` of earlier releases, with a warning.

    Returns:
        The model; its ``fit()`` is the answer.

    Raises:
        ImportError: without formulae and pandas.
        InputError: a formula that cannot be read, a table without its columns or with cells that are no numbers, all
            faults in one error; outcomes that the family cannot produce; a prior that the model does not have.

    >>> import pandas
    >>> visits = pandas.DataFrame(
    ...     {"seizures": [3, 4, 0, 1, 2, 6, 1, 0], "week": [0.0, 1.0] * 4, "patient": list("aabbccdd")}
    ... )
    >>> result = regression("seizures ~ week + (1 | patient)", visits, "poisson").fit(progress=False)
    >>> result.summary().fixed.names, result.group_names["patient"]
    (('Intercept', 'week'), ('a', 'b', 'c', 'd'))
    >>> new = result.predict(pandas.DataFrame({"week": [2.0, 2.0], "patient": ["a", "eve"]}))
    >>> bool(new.sd[0] < new.sd[1])  # less is known of a new patient
    True
    """
    with needing("torchngvi.regression", "formula"):
        import formulae  # noqa: F401
        import pandas  # noqa: F401
    found = _family(usual_family(formula, positive) if family is None else family)
    made = Formula(formula, frame, found, weights=weights, positive=positive)
    for note in (*made.notes, *([made.asked] if made.asked else [])):
        begin = note[0] if note.split()[0] in made.table else note[0].upper()  # the name of a column as it is
        warnings.warn(f"{begin}{note[1:].rstrip('.')}.", stacklevel=2)
    if made.outcomes is not None and isinstance(found, Ordinal | Multinomial):
        found = type(found)(made.outcomes)
    return TableModel(made.design, found, priors=_priors(priors, prior, found), formula=made)


mixed = regression


def _family(family: Any) -> Family:
    """The family of a word or an object; the likelihoods of `torchngvi.models` hold their parameters."""
    match family:
        case GaussianNoise():
            return Held(family_of("gaussian"), {"residual sd": family.noise})
        case NegativeBinomial():
            return Held(family_of("negative_binomial"), {"size": family.dispersion})
        case StudentT() if family.dof == 4:
            return Held(family_of("student_t"), {"scale": family.scale})
        case Likelihood():
            raise InputError(
                f"a table takes a family by its name, or a torchngvi.tables.Family; got {type(family).__name__}. Of "
                "torchngvi.models it takes GaussianNoise, NegativeBinomial and StudentT with dof=4; others are written "
                "as docs/how-to/tables.md#a-family-of-your-own says."
            )
    return family_of(family)


def _priors(priors: Any, prior: MixedPrior | None, family: Family) -> Any:
    """The priors by name, those of an earlier release put into these names."""
    if prior is None:
        return priors
    there = isinstance(prior, MixedPrior) and prior.precision is None and isinstance(prior.sd, ScalePrior | None)
    if not there or priors is not None:
        raise InputError(
            "priors are given by name, priors={'x': Normal(0, 1), '1|g': HalfT(3, 1)}. A MixedPrior cannot stand "
            "beside them, and one of a precision matrix has no place here: fit torchngvi.models.MixedLogJoint with it."
        )
    warnings.warn(
        "prior=MixedPrior(...) goes with the next release: name the priors, priors={'b': Normal(0, 1), 'sd': HalfT(3, "
        "1)}. That of the intercept is the one at the means of the columns.",
        FutureWarning,
        stacklevel=3,
    )
    given: dict[str, Any] = {}
    if prior.fixed_scale is not None:
        given["b"] = given["Intercept"] = Normal(0.0, prior.fixed_scale)
    spreads = {"HalfT": HalfT, "HalfNormal": HalfNormal, "Exponential": Exponential}
    some: dict[str, Any] = {"sd": prior.sd, **dict.fromkeys(family.parameters, prior.likelihood)}
    given |= {name: spreads[type(one).__name__](*one) for name, one in some.items() if one is not None}
    return given if prior.concentration == 1.0 else {**given, "cor": LKJ(prior.concentration)}


# ------------------------------------------------------------------------------------ a result in a file, and back


class _OfJoint(Weighted):
    """Weighted draws of the globals, of which those with effects were taken: others are not to be had."""

    joint: Tensor  # (S, dim), equally likely

    def resampled(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Take equally likely draws of those that have effects, each once before any comes twice."""
        size = len(self.joint)
        rounds = [torch.randperm(size, generator=generator, device="cpu") for _ in range(-(-count // size))]
        return self.joint[torch.cat(rounds)[:count]]


class Stored(Posterior):
    """The posterior of a saved result: weighted draws of the globals, and equally likely ones with their effects."""

    def __init__(
        self, coordinates: Coordinates, weighted: Weighted, theta: Tensor, drawn: tuple[Tensor, ...], said: Any
    ) -> None:
        self.coordinates, self.theta, self.drawn = coordinates, theta, drawn
        self.weighted = _OfJoint(*weighted)
        self.weighted.joint = theta
        self.log_evidence, self.converged, self.gradients = said["log_evidence"], said["converged"], said["gradients"]
        self.reason, self.method = said["reason"], said["method"]

    def effects(self, theta: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return those that were drawn for these values of the globals."""
        if theta.shape == self.theta.shape and bool((theta == self.theta).all()):
            return self.drawn
        same = (theta[:, None, :] == self.theta).all(-1)
        if not bool(same.any(-1).all()):
            raise InputError("a result that was read from a file has effects for its own draws of the globals alone.")
        at = same.int().argmax(-1)
        return tuple(b[at] for b in self.drawn)

    def of_groups(self, theta: Tensor) -> Tensor:
        """Refuse: the likelihood of a group needs its effects integrated out."""
        raise InputError("leaving groups out needs the fit; a result that was read from a file has its draws alone.")


def load(path: str | os.PathLike[str], family: Family | None = None) -> TableResult:
    """Read a result that `TableResult.save` has written; what it says and predicts is the same.

    Args:
        path: of the file.
        family: the family, where it is one of your own.

    Returns:
        The result, with equally likely draws; groups cannot be left out of it.

    Raises:
        InputError: a file that is no such result.
    """
    try:
        state = torch.load(Path(path), weights_only=True)
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # of torch and of pickle, at what they cannot read
        raise InputError(f"{str(path)!r} is no result that was saved: it cannot be read. Save it again.") from error
    return result_of(state, family, str(path))


def result_of(state: Any, family: Family | None = None, name: str = "the file") -> TableResult:
    """Make the result of what `state_of` has returned; each part is checked."""
    try:
        return _result(state, family)
    except InputError as error:
        raise InputError(f"{name!r} holds what no fit has written: {error}") from error
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError) as error:
        raise InputError(f"{name!r} holds what no fit has written: {' '.join(str(error).split())}.") from error


def _result(state: Any, family: Family | None, rounding: float = 1e-9) -> TableResult:
    # rounding: of a sum of weights
    if type(state) is not dict or state.get("format") != FORMAT:
        raise InputError(f"it is no result of format {FORMAT}.")
    found = _stored_family(state, family)
    made, priors = read_instance("made", state["made"], dict, "is a dict"), state["priors"]
    formula = Formula.of_state(made, found) if "formula" in made else None
    design = _design(made) if formula is None else formula.design
    model = TableModel(design, found, priors=priors, formula=formula)
    theta = _numbers("theta", state["theta"], (None, model.coordinates.dim))
    shapes = [(len(theta), len(of.levels), len(of.effects)) for of in design.factors]
    drawn = tuple(_numbers("effects", b, shape) for b, shape in zip(state["effects"], shapes, strict=True))
    for part, kind in SAID.items():
        if type(state[part]) is not kind:
            raise InputError(f"{part} must be of type {kind.__name__}.")
    if type(state["log_evidence"]) not in (float, type(None)):
        raise InputError("log_evidence must be a number.")
    points = _numbers("weighted", state["weighted"][0], (None, model.coordinates.dim))
    weights = _numbers("weighted", state["weighted"][1], (len(points),))
    if bool((weights < 0).any()) or abs(float(weights.sum()) - 1) > rounding:
        raise InputError("the weights of its draws must be shares of 1.")
    weighted = Weighted(points, weights, state["k_hat"], state["effective"])
    posterior = Stored(model.coordinates, weighted, theta, drawn, state)
    result = TableResult(model.design, model.family, posterior, model.priors, formula=formula)
    result._kept[len(theta), 0] = result.drawn(theta, torch.Generator())  # so that it predicts what it did
    return result


def _stored_family(state: Mapping[str, Any], family: Family | None) -> Family:
    word = state["family"]
    if family is not None:
        return family_of(family)
    if word not in FAMILIES:
        raise InputError(f"its family is {word!r}, which is none of this library: hand it in, load(path, family=...).")
    found = FAMILIES[word]()
    if isinstance(found, Ordinal | Multinomial):
        found = type(found)(state["outcomes"])
    return Held(found, state["held"]) if state["held"] else found


def _design(made: Mapping[str, Any]) -> Design:
    """The design of a model of arrays."""
    X = _numbers("X", made["X"], (None, len(made["names"])))
    rows = (len(X),)
    factors = []
    for of in made["factors"]:
        Z, groups = _numbers("Z", of["Z"], (len(X), len(of["effects"]))), of["groups"]
        there = isinstance(groups, Tensor) and groups.dtype == torch.long and groups.shape == rows
        if not there or bool(((groups < 0) | (groups >= len(of["levels"]))).any()):
            raise InputError("groups must be the number of a level for each row.")
        factors.append(
            Factor(str(of["name"]), tuple(map(str, of["effects"])), tuple(map(str, of["levels"])), Z, groups)
        )
    y = tuple(_numbers("y", one, rows) for one in made["y"])
    offset, weights = (_numbers(name, made[name], rows) for name in ("offset", "weights"))
    return Design(X, tuple(map(str, made["names"])), tuple(factors), offset, y, weights)


def _numbers(name: str, value: Any, shape: tuple[int | None, ...]) -> Tensor:
    """A finite tensor of float64 and a shape."""
    plain = isinstance(value, Tensor) and value.layout is torch.strided and value.device.type == "cpu"
    if not plain or value.dtype != torch.float64 or value.ndim != len(shape):
        raise InputError(f"{name} must be a tensor of float64 with {len(shape)} dimensions.")
    if not all(wanted is None or size == wanted for size, wanted in zip(value.shape, shape, strict=True)):
        raise InputError(f"{name} must have the shape {shape}; got {tuple(value.shape)}.")
    if not len(value) or not bool(value.isfinite().all()):
        raise InputError(f"{name} must be finite numbers.")
    return value.detach()
