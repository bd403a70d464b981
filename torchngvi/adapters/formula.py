"""Formulas with random effects, "y ~ x + (1 + time | patient)", read by the library formulae.

A formula is two designs: X of the fixed effects, and Z of the effects that vary over the groups, with a group for each
row.  Only these are made.  The block design that formulae would make of the second, a column for each effect of each
group, has as many columns as there are groups, and is never asked for.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchngvi.errors import InputError
from torchngvi.mixed_models import MixedModel, MixedResult
from torchngvi.models import Likelihood, MixedPrior, RandomEffects

try:
    import formulae
except ImportError:  # the extra "formula" is not installed
    formulae = None


FAMILIES = {
    "gaussian": "gaussian",
    "student_t": "student_t",
    "poisson": "poisson_log",
    "negative_binomial": "negative_binomial",
    "bernoulli": "bernoulli_logit",
    "probit": "bernoulli_probit",
}
_FUNCTIONS = {name: getattr(np, name) for name in ("log", "log1p", "log2", "log10", "exp", "expm1", "sqrt", "abs")}


class Rows(NamedTuple):
    """The designs of some rows, as `torchngvi.MixedModel` takes them."""

    X: np.ndarray  # of the fixed effects, (N, p)
    Z: np.ndarray  # of the effects that vary, (N, r)
    groups: np.ndarray  # (N,), integers; -1 where the group is none of those of the fit
    offset: np.ndarray  # (N,)


class Formula:
    """A formula with one random-effects term, and the designs that it makes of tables.

    One wants it to use the arrays of a formula elsewhere; `torchngvi.mixed` is the short way to a fit.  The codings of
    categories and the centres of ``scale(x)`` are those of the table it was made with, in new tables too.

    Args:
        formula: the response, fixed effects and one term of effects that vary over groups, "y ~ x + (1 + x | group)".
            NumPy is ``np`` in it, and ``log``, ``exp``, ``sqrt`` and their kin have their own names.
            Groups of two columns together are "(1 | school:room)"; "offset(log(exposure))" is added to the linear
            predictor with coefficient 1; "y[yes]" is 1 where the column y says yes.
        frame: the table, a pandas DataFrame with the columns that the formula names, without missing values in them.

    Attributes:
        y: the response, (N,).
        rows: the designs of the table, `Rows`.
        response: the name of the response.
        fixed: names of the fixed effects, p strings.
        random: names of the effects that vary over groups, r strings.
        factor: the name of the grouping factor.
        levels: labels of the groups, in the order of their numbers.

    Raises:
        ImportError: without formulae.
        InputError: a formula that cannot be read, without a response, without fixed effects or without exactly one
            grouping factor; columns that the table lacks or that miss values; a response that is no number.

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
        if formulae is None:
            raise ImportError(
                "A formula needs the library formulae: pip install 'torchngvi[formula]'.", name="formulae"
            )
        self.formula = formula
        model = _described(formula)
        self.factor = _factor(formula, model)
        self._predictors = sorted(_variables([*model.common_terms, *model.group_terms]))
        names = sorted({*self._predictors, *_variables([model.response.term])})
        self._keys = sorted(_variables(term.factor for term in model.group_terms), key=self.factor.find)
        _complete(frame, names)
        self._table = frame = _used(frame[names])
        self.response, common = formula.split("~")[0].strip(), _sum(model.common_terms)
        if common == "0":
            raise InputError(f"A mixed model has at least one fixed effect; {formula!r} has none: leave out the 0.")
        designs = _read(formula, f"{self.response} ~ {common}", frame)
        self.y = _numbers(designs.response, self.response)
        self._common = designs.common
        self._within = _read(formula, _sum(term.expr for term in model.group_terms), frame).common
        self.fixed, self.random = _labels(self._common), _labels(self._within)
        labels = self._label(frame)
        keyed = sorted(set(labels), key=lambda label: [(type(part).__name__, part) for part in label])
        self._number = {label: i for i, label in enumerate(keyed)}
        self.levels: list[Any] = [label[0] if len(label) == 1 else ":".join(map(str, label)) for label in keyed]
        self.rows = self._rows(np.asarray(self._common), np.asarray(self._within), self._numbered(labels))

    def __reduce__(self) -> tuple[Any, ...]:
        """What formulae has made holds modules, and is made again from the columns of the table."""
        return Formula, (self.formula, self._table)

    def of(self, frame: Any) -> Rows:
        """Make the designs of new rows.

        Args:
            frame: a pandas DataFrame with the columns of the formula but the response.

        Returns:
            The designs; groups that the fit had not are -1, as are all if the grouping column is missing.

        Raises:
            InputError: columns that the table lacks or that miss values, or a category that the fit had not.
        """
        grouped = all(key in frame for key in self._keys)
        _complete(frame, [name for name in self._predictors if grouped or name not in self._keys])
        try:
            table = _used(frame)
            common, within = (part.evaluate_new_data(table).design_matrix for part in (self._common, self._within))
        except ValueError as error:
            raise InputError(f"The new rows do not fit {self.formula!r}: {error}") from error
        labels = self._label(frame) if grouped else []
        kinds = [{tuple(map(type, label)) for label in some} for some in (self._number, labels)]
        if labels and not kinds[0] & kinds[1]:  # as numbers that have become text in a file
            known, new = (next(iter(some))[0] for some in (self._number, labels))
            raise InputError(
                f"The groups {self.factor} of the fit are as {known!r} ({type(known).__name__}), those of the table as "
                f"{new!r} ({type(new).__name__}). Convert the column; leave it out for groups that the fit had not."
            )
        groups = self._numbered(labels) if grouped else np.full(len(frame), -1)
        return self._rows(common, within, groups)

    def _numbered(self, labels: Sequence[tuple[Any, ...]]) -> np.ndarray:
        return np.asarray([self._number.get(label, -1) for label in labels], dtype=int)

    def _label(self, frame: Any) -> list[tuple[Any, ...]]:
        """The label of the group of each row, with an entry for each column that the groups are of."""
        return list(zip(*(frame[key].tolist() for key in self._keys), strict=True))

    def _rows(self, common: np.ndarray, within: np.ndarray, groups: np.ndarray) -> Rows:
        offset, columns = np.zeros(len(common)), []
        for name, term in self._common.terms.items():
            part = common[:, self._common.slices[name]]
            if term.kind == "offset":
                offset = offset + part.sum(1)
            else:
                columns.append(part)
        X = np.concatenate(columns, 1) if columns else np.zeros((len(common), 0))
        try:
            return Rows(X.astype(float), within.astype(float), groups, offset)
        except ValueError as error:
            raise InputError(
                f"A column of {self.formula!r} is not of the kind that it was in the fit: {error}."
            ) from error


class TableModel(NamedTuple):
    """A mixed model that a formula has made of a table, as `mixed` returns it.

    Attributes:
        formula: the `Formula`, with the designs and their names.
        model: the `torchngvi.MixedModel`, for what needs arrays.
    """

    formula: Formula
    model: MixedModel

    def fit(self, **settings: Any) -> MixedResult:
        """Fit the model, and name what the result tells as the table does.

        Args:
            settings: of `torchngvi.MixedModel.fit`.

        Returns:
            The result; ``result.predict(table)`` takes a table.

        Raises:
            InputError: as `torchngvi.MixedModel.fit`.
        """
        made = self.formula
        labels = [str(level) for level in made.levels]
        return self.model.fit(**settings).named(made.fixed, made.random, labels, made.of)


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
        formula: the response, fixed effects and one term of effects that vary over groups, "y ~ x + (1 + x | group)",
            see `Formula`.
        frame: a pandas DataFrame.
        family: "gaussian", whose residual standard deviation is learned, "poisson", "bernoulli", "probit",
            "negative_binomial", "student_t", or what else `torchngvi.MixedModel` takes.
        prior: `torchngvi.models.MixedPrior`.
        weights: factors of the log likelihood of each row: the name of a column, or numbers (N,).

    Returns:
        The model; its ``fit()`` is the answer.

    Raises:
        ImportError: without formulae.
        InputError: as `Formula` and `torchngvi.MixedModel`.

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
    made = Formula(formula, frame)
    if isinstance(weights, str):
        _complete(frame, [weights], "weights")
        weights = frame[weights].to_numpy()
    if isinstance(family, str) and family not in FAMILIES.values():
        if family not in FAMILIES:
            raise InputError(f"family must be one of {', '.join(FAMILIES)}, or a Likelihood; got {family!r}.")
        family = FAMILIES[family]
    rows = made.rows
    X, Z = (torch.as_tensor(x, dtype=torch.float64) for x in (rows.X, rows.Z))
    effects = RandomEffects(Z, torch.as_tensor(rows.groups))
    model = MixedModel(X, made.y, effects, family, prior=prior, weights=weights, offset=rows.offset)
    return TableModel(made, model)


def _described(formula: str) -> Any:
    """What the formula says, without a table."""
    try:
        return formulae.model_description(formula)
    except Exception as error:  # formulae raises its own errors, and Python's, at what it cannot read
        raise InputError(f"The formula {formula!r} cannot be read: {error}") from error


def _factor(formula: str, model: Any) -> str:
    factors = sorted({_name(term.factor) for term in model.group_terms})
    if model.response is None:
        raise InputError(f"A formula begins with its response, as y ~ x + (1 | group); got {formula!r}.")
    if len(factors) != 1:
        raise InputError(
            f"A formula of a mixed model has one grouping factor, as y ~ x + (1 + x | group); {formula!r} has "
            + (
                f"{len(factors)}: {', '.join(factors)}. Keep the one with the most levels, and "
                "write the others as fixed effects."
                if factors
                else "none."
            )
        )
    return factors[0]


def _name(term: Any) -> str:
    return "1" if type(term).__name__ == "Intercept" else term.name


def _sum(terms: Any) -> str:
    names = [_name(term) for term in terms]
    return " + ".join(names if "1" in names else ["0", *names])


def _variables(terms: Any) -> set[str]:
    return {name for term in terms if _name(term) != "1" for name in term.var_names if name}


def _complete(frame: Any, names: Sequence[str], asking: str = "The formula") -> None:
    if not (hasattr(frame, "columns") and hasattr(frame, "iloc")):
        raise InputError(f"A formula needs a pandas DataFrame with its columns; got {type(frame).__name__}.")
    lacking = [name for name in names if name not in frame]
    if lacking:
        raise InputError(f"{asking} names {', '.join(lacking)}; the table has {', '.join(map(str, frame.columns))}.")
    missing = frame[list(names)].isna()
    if missing.any(axis=None):
        counts = ", ".join(f"{count} of {name}" for name, count in missing.sum().items() if count)
        raise InputError(f"The table misses values: {counts}. Leave those rows out, table.dropna(), or impute them.")


def _used(frame: Any) -> Any:
    """The table without categories that no row has."""
    kept = {
        name: column.cat.remove_unused_categories() for name, column in frame.items() if str(column.dtype) == "category"
    }
    return frame.assign(**kept) if kept else frame


def _read(formula: str, part: str, frame: Any) -> Any:
    try:
        return formulae.design_matrices(part, frame, na_action="error", extra_namespace={"np": np, **_FUNCTIONS})
    except Exception as error:  # of formulae, of NumPy, or of a function that the formula calls
        raise InputError(f"The formula {formula!r} cannot be computed from the table: {error}") from error


def _numbers(response: Any, name: str) -> np.ndarray:
    values = np.asarray(response.design_matrix, dtype=float)
    if values.ndim == 1:
        return values
    categories = f" Name the category that counts as 1: {name}[{response.levels[-1]}]." if response.levels else ""
    raise InputError(f"The response is one number a row; {name} is {values.shape[1]}.{categories}")


def _labels(designs: Any) -> list[str]:
    return [label for term in designs.terms.values() if term.kind != "offset" for label in term.labels]
