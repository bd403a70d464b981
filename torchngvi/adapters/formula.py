"""Formulas with random effects, "y ~ x + (1 + time | patient)", read by the library formulae.

A formula is two designs: X of the fixed effects, and Z of the effects that vary over the groups, with a group for each
row.  Only these are made.  The block design that formulae would make of the second, a column for each effect of each
group, has as many columns as there are groups, and is never asked for.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torchngvi.adapters.words import family_of
from torchngvi.errors import InputError
from torchngvi.extras import needing
from torchngvi.messages import listed
from torchngvi.mixed_models import MixedModel, MixedResult, MultilevelModel
from torchngvi.models import Likelihood, MixedPrior, NegativeBinomial, PoissonLog, RandomEffects

with needing("torchngvi.mixed", "formula"):
    import numpy as np

    from torchngvi.adapters import table_checks
    from torchngvi.adapters.grouping import Grouping, blocks_of, term_name
    from torchngvi.adapters.table_checks import (
        FORMULA,
        as_numbers,
        check_finite,
        check_there,
        complete,
        is_number,
        stripped,
        used,
    )
    from torchngvi.adapters.terms import columns_of, described, designs_of, with_response

__all__ = ["mixed"]

FAMILIES = {
    "gaussian": "gaussian",
    "student_t": "student_t",
    "poisson": "poisson_log",
    "negative_binomial": "negative_binomial",
    "bernoulli": "bernoulli_logit",
    "probit": "bernoulli_probit",
}


class Rows(NamedTuple):
    """The designs of some rows, as `torchngvi.MixedModel` takes them."""

    X: np.ndarray  # of the fixed effects, (N, p)
    Z: np.ndarray  # of the effects that vary, (N, r)
    groups: np.ndarray  # (N,), integers; -1 where the group is none of those of the fit
    offset: np.ndarray  # (N,)


class SeveralRows(NamedTuple):
    """The designs of some rows with several grouping factors."""

    X: np.ndarray  # of the fixed effects, (N, p)
    random: dict[str, RandomEffects]  # for each factor the design of its effects, and the groups as in `Rows`
    offset: np.ndarray  # (N,)


class Formula:
    """A formula with effects that vary over groups, and the designs that it makes of tables.

    Attributes:
        y: the response, (N,).
        rows: the designs of the table, `Rows`, or `SeveralRows` of several grouping factors.
        response: the name of the response.
        fixed: names of the fixed effects, p strings.
        groupings: for each grouping factor its `torchngvi.adapters.grouping.Grouping`, with the names of its effects
            and the labels of its groups; the second term of one factor g has the name "g.1".
        random: names of the effects that vary over the groups of the first factor, r strings.
        factor: the name of the first grouping factor.
        levels: labels of its groups, in the order of their numbers.
        columns: the columns of the table that it names, by their part: `FormulaColumns`.
        notes: sentences about cells that were read in a way that one may not expect.
        table: these columns.

    >>> import pandas
    >>> table = pandas.DataFrame(
    ...     {"y": [1, 0, 2, 4], "time": [0.0, 1.0, 0.0, 1.0], "patient": ["ann", "ann", "bob", "bob"]}
    ... )
    >>> formula = Formula("y ~ time + (1 + time | patient)", table)
    >>> formula.fixed, formula.random, formula.factor, formula.levels
    (['Intercept', 'time'], ['Intercept', 'time'], 'patient', ['ann', 'bob'])
    >>> formula.of(table.head(1).assign(patient="eve")).groups  # a new patient
    array([-1])
    """

    def __init__(self, formula: str, frame: Any) -> None:
        model, self.formula = with_response(formula), formula
        blocks = blocks_of(formula, described)
        if not blocks:
            raise InputError(
                f"A formula of a mixed model has a grouping factor, as y ~ x + (1 + x | group); {formula!r} has none. "
                "For a regression take an estimator of torchngvi.adapters.sklearn, or torchngvi fit on a command line."
            )
        self.columns = columns = columns_of(model, blocks)
        both = sorted(set(columns.response) & set(columns.predictors))
        if both:
            raise InputError(
                f"{listed(both)} stands on both sides of the formula {formula!r}, and would explain itself. Leave it "
                "out on the right."
            )
        names = sorted({name for some in columns for name in some})
        check_there(frame, names)
        table, spaces = stripped(frame[names], columns.groups)
        found = table_checks.of_formula(formula, table, columns.response, columns.predictors, FORMULA)
        table_checks.refuse([*table_checks.of_missing(frame, names), *found.faults])
        self.notes = (*spaces, *found.notes)
        self.table = frame = used(found.frame)
        self.response, common = formula.split("~")[0].strip(), list(model.common_terms)
        if not common:
            raise InputError(f"A mixed model has at least one fixed effect; {formula!r} has none: leave out the 0.")
        designs = designs_of(formula, common, model.response, frame)
        self.y = _numbers(designs.response, self.response)
        check_finite(self.response, self.y)
        self._common, self.fixed = designs.common, _labels(designs.common)
        self.common_names = [term_name(term) for term in model.common_terms]
        self.groupings: dict[str, Grouping] = {}
        for block in blocks:
            within = designs_of(formula, block.terms, None, frame).common
            self.groupings[block.name] = Grouping(block, within, _labels(within), frame)
        first = next(iter(self.groupings.values()))
        self.random, self.factor, self.levels = first.random, first.block.factor, first.levels
        evaluated = [np.asarray(grouping.within) for grouping in self.groupings.values()]
        self.rows = self._rows(np.asarray(self._common), evaluated, frame)

    def __reduce__(self) -> tuple[Any, ...]:
        """What formulae has made holds modules, and is made again from the columns of the table."""
        return Formula, (self.formula, self.table)

    def of(self, frame: Any) -> Rows | SeveralRows:
        """Make the designs of new rows."""
        there, predictors = hasattr(frame, "columns"), self.columns.predictors
        check_there(frame, [*predictors, *(key for key in self.columns.groups if there and key in frame)])
        frame = as_numbers(frame, [name for name in predictors if is_number(self.table[name])])
        frame = stripped(frame, [name for name in (*predictors, *self.columns.groups) if name in frame])[0]
        complete(frame, [*predictors, *(key for key in self.columns.groups if key in frame)])
        parts = [self._common, *(grouping.within for grouping in self.groupings.values())]
        try:
            with np.errstate(all="ignore"):  # what is not finite is refused by name
                common, *within = (part.evaluate_new_data(used(frame)).design_matrix for part in parts)
        except ValueError as error:
            raise InputError(f"The new rows do not fit {self.formula!r}: {error}") from error
        return self._rows(common, within, frame)

    def _rows(self, common: np.ndarray, within: Sequence[np.ndarray], frame: Any) -> Rows | SeveralRows:
        offset, columns = np.zeros(len(common)), []
        try:
            for name, term in self._common.terms.items():
                part = common[:, self._common.slices[name]].astype(float)
                check_finite(name, part)
                if term.kind == "offset":
                    offset = offset + part.sum(1)
                else:
                    columns.append(part)
            random: dict[str, RandomEffects] = {}
            for (key, grouping), design in zip(self.groupings.items(), within, strict=True):
                for name, at in grouping.within.slices.items():
                    check_finite(name, design[:, at].astype(float))
                random[key] = RandomEffects(design.astype(float), grouping.numbered(frame))
        except InputError:
            raise
        except ValueError as error:
            raise InputError(
                f"A column of {self.formula!r} is not of the kind that it was in the fit: {error}."
            ) from error
        X = np.concatenate(columns, 1) if columns else np.zeros((len(common), 0))
        if len(random) > 1:
            return SeveralRows(X, random, offset)
        only = next(iter(random.values()))
        return Rows(X, only.Z, only.groups, offset)


class TableModel(NamedTuple):
    """A mixed model that a formula has made of a table, as `mixed` returns it.

    Attributes:
        formula: the `Formula`, with the designs and their names.
        model: the `torchngvi.MixedModel`, for what needs arrays, or that of several grouping factors.
    """

    formula: Formula
    model: MixedModel | MultilevelModel
    asked: str = ""  # whether an offset is meant to be a logarithm

    def __repr__(self) -> str:
        return f"TableModel({self.formula.formula!r}, {len(self.formula.y)} rows)"

    def fit(self, **settings: Any) -> Any:
        """Fit the model, and name what the result tells as the table does."""
        made = self.formula
        try:
            result = self.model.fit(**settings)
        except InputError as error:
            raise InputError(f"{error} {self.asked}") from error if self.asked else error
        if isinstance(result, MixedResult):
            labels = [str(level) for level in made.levels]
            return result.named(made.fixed, made.random, labels, made.of, made.factor)
        random = {name: grouping.random for name, grouping in made.groupings.items()}
        groups = {name: [str(level) for level in grouping.levels] for name, grouping in made.groupings.items()}
        return result.named(made.fixed, random, groups, made.of)


def mixed(
    formula: str,
    frame: Any,
    family: str | Likelihood = "gaussian",
    *,
    prior: MixedPrior | None = None,
    weights: str | Any = None,
) -> TableModel:
    """Make a generalised linear mixed model of a formula and a table, as lme4, brms and bambi do.

    One wants it for data in a pandas DataFrame: the result speaks of its columns and groups, and predicts new tables.

    Args:
        formula: the response, fixed effects and effects that vary over groups, "y ~ x + (1 + x | group)", also over
            several factors, nested or crossed, "y ~ x + (1 | subject) + (1 | item)"; see `Formula`.
        frame: a pandas DataFrame.
        family: "gaussian", whose residual standard deviation is learned, "poisson", "bernoulli", "probit",
            "negative_binomial", "student_t", one of the shorter words of the command line, or a `Likelihood`.
        prior: `torchngvi.models.MixedPrior`.
        weights: factors of the log likelihood of each row: the name of a column, or numbers (N,).

    Returns:
        The model; its ``fit()`` is the answer.

    Raises:
        ImportError: without formulae.
        InputError: a column that is the same in all rows, as the intercept is; and as `Formula` and
            `torchngvi.MixedModel`.

    >>> import pandas
    >>> visits = pandas.DataFrame(
    ...     {"seizures": [3, 4, 0, 1, 2, 6, 1, 0], "week": [0.0, 1.0] * 4, "patient": list("aabbccdd")}
    ... )
    >>> result = mixed("seizures ~ week + (1 | patient)", visits, "poisson").fit(progress=False)
    >>> result.summary().fixed.names, result.group_names
    (('Intercept', 'week'), ('a', 'b', 'c', 'd'))
    >>> new = result.predict(pandas.DataFrame({"week": [2.0, 2.0], "patient": ["a", "eve"]}))
    >>> bool(new.sd[0] < new.sd[1])  # less is known of a new patient
    True
    """
    if prior is not None and not isinstance(prior, MixedPrior):
        raise InputError(f"prior is a torchngvi.models.MixedPrior, or None; got {type(prior).__name__}.")
    made = Formula(formula, frame)
    _check_varying(made)
    for note in (*made.notes, *_of_groups(made)):
        warnings.warn(f"{note[0].upper()}{note[1:]}.", stacklevel=2)
    if isinstance(weights, str):
        complete(frame, [weights], "weights")
        weights = frame[weights].to_numpy()
    family = family if isinstance(family, Likelihood) else family_of(family, FAMILIES, ", or a Likelihood")
    rows = made.rows
    one = {} if isinstance(rows, SeveralRows) else {made.factor: RandomEffects(rows.Z, torch.as_tensor(rows.groups))}
    effects = rows.random if isinstance(rows, SeveralRows) else one
    X = torch.as_tensor(rows.X, dtype=torch.float64)
    model = MixedModel(X, made.y, effects, family, prior=prior, weights=weights, offset=rows.offset)
    model.column_names = tuple(made.fixed)
    asked = _of_exposure(made, model)
    if asked:
        warnings.warn(asked, stacklevel=2)
    return TableModel(made, model, asked)


def _of_exposure(made: Formula, model: MixedModel | MultilevelModel) -> str:
    """The question whether an offset is meant to be a logarithm, where counts have a logarithmic link."""
    name = table_checks.offset_alone(made.formula)
    if name is None or name not in made.table or not isinstance(model.rows.likelihood, PoissonLog | NegativeBinomial):
        return ""
    return table_checks.of_exposure(name, made.table[name].to_numpy(), made.y, f"offset(log({name}))") or ""


def _of_groups(made: Formula) -> list[str]:
    """Notes of grouping factors whose groups are categories of the fixed effects too."""
    fixed = {"".join(name.split()) for name in made.common_names}
    found = []
    for grouping in made.groupings.values():
        factor = grouping.block.factor
        categories = len(grouping.block.keys) == 1 and not is_number(made.table[grouping.block.keys[0]])
        if "Intercept" in grouping.random and (f"C({factor})" in fixed or (categories and factor in fixed)):
            found.append(
                f"{factor} is both a fixed effect and a grouping factor: its levels explain all that (1 | {factor}) "
                "could, and the priors alone part the two. Leave one of them out"
            )
    return found


def _check_varying(made: Formula) -> None:
    """Check that no column of the fixed effects is the same in all rows, beside the intercept; cells may be empty."""
    X, there = made.rows.X, "Intercept" in made.fixed
    for name, column in zip(made.fixed, X.T, strict=True):
        entry = float(column[0])
        if name == "Intercept" or ":" in name or not bool((column == entry).all()) or not (there or entry == 0):
            continue
        beside = ", and the intercept is there already" if there else ""
        raise InputError(
            f"{name} is {entry:g} in all {len(X)} rows{beside}: nothing can tell its effect. "
            "Leave it out of the formula."
        )


def _numbers(response: Any, name: str) -> np.ndarray:
    values = np.asarray(response.design_matrix, dtype=float)
    if values.ndim == 1:
        return values
    if response.levels:
        first = ", ".join([*map(str, response.levels[:5]), *([".."] if len(response.levels) > 5 else [])])
        raise InputError(
            f"The response is a number; {name} holds categories, {first}. "
            f"Name the one that counts as 1: {name}[{response.levels[-1]}]."
        )
    raise InputError(f"The response is one number a row; {name} is {values.shape[1]}.")


def _labels(designs: Any) -> list[str]:
    return [label for term in designs.terms.values() if term.kind != "offset" for label in term.labels]
