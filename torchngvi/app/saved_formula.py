"""A fit of a formula that was written to a folder, read again: predictions for new rows of a table."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from torchngvi.adapters.arviz import Predicted, with_checks
from torchngvi.adapters.formula import Formula, Rows, SeveralRows
from torchngvi.app import formula_tables
from torchngvi.app.config import family_of
from torchngvi.app.contents import Content
from torchngvi.app.encoding import check_columns
from torchngvi.app.families import FAMILIES, PARAMETERS, described
from torchngvi.app.formula_tables import Filling
from torchngvi.errors import InputError
from torchngvi.messages import listed
from torchngvi.mixed_models import MixedResult, MultilevelResult
from torchngvi.mixed_models.exports import inference_data
from torchngvi.mixed_models.predictions import NewRows, Prediction, of_kind, varying
from torchngvi.models.likelihoods import Likelihood
from torchngvi.models.mixed_prior import scales_of

__all__ = ["FittedFormula"]

_SEED = 0  # of the draws of new groups and new observations, as in `MixedResult.predict`
_ROWS = 2_000  # predicted at once


@dataclass(frozen=True, repr=False)
class FittedFormula:
    """The draws of a run of ``torchngvi fit --formula``, with the formula that turns new rows into predictions.

    `torchngvi.load` makes it from the folder of a run.
    """

    formula: Formula
    likelihood: Likelihood
    fixed: Tensor  # β, (S, p)
    effects: dict[str, Tensor]  # of each grouping factor the effects of its groups, (S, n, r)
    omega: dict[str, Tensor]  # and the coordinates of their covariance, (S, r(r + 1)/2)
    parameter: Tensor | None  # of the likelihood, (S,), where it was learned
    fill: Filling  # for missing entries of the predictors, where they are imputed
    classes: tuple[str, str] | None  # failure and success
    weighted: bool = False

    def __repr__(self) -> str:
        return f"FittedFormula({self.formula.formula!r}, {described(self.likelihood)[0]}, {len(self.formula.y)} rows)"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a table of new rows should have; without those of the groups all groups are new."""
        return (*self.formula.columns.predictors, *self.formula.columns.groups)

    @property
    def told(self) -> str:
        """What is predicted, in words."""
        return f"probability of {self.classes[1]!r}" if self.classes else f"mean of {self.formula.response}"

    def predict(self, frame: pd.DataFrame, *, name: str = "the table") -> pd.DataFrame:
        """Predict new rows, of groups that the fit had and of others, with central 95% intervals.

        For two classes the table has the likelier ``class`` and the ``probability`` of success, with its interval
        ``low`` and ``high``. For counts and real numbers it has the ``mean`` with its interval ``mean_low`` and
        ``mean_high``, and the interval of a new observation, ``low`` and ``high``. The column ``new_groups`` names the
        grouping factors of which the fit did not have the group; their effects are drawn from their distribution,
        which makes the intervals wider.

        Args:
            frame: the new rows, with the columns of the formula but the response; others are not looked at.
            name: the table, for messages.

        Returns:
            One row for each of the frame, with its index.

        Raises:
            InputError: columns that are missing or of another kind, entries that are missing or unseen.
        """
        if not isinstance(frame, pd.DataFrame):
            raise InputError(
                f"predict takes a pandas DataFrame with the columns of the fit; got {type(frame).__name__}."
            )
        if not len(frame):
            raise InputError(f"{name} has no rows to predict. Check the file.")
        frame = frame.rename(columns=str)
        check_columns(frame, self.formula.columns.predictors, frame.columns, name)
        table = formula_tables.filled(formula_tables.dated(frame, self.formula.columns.groups), self.fill)[0]
        self._refuse_missing(table, name)
        random = self._random(self.formula.of(table))
        mean = self._predicted(random, "mean")
        new = [[key for key, rows in random.items() if rows.groups[i] < 0] for i in range(len(frame))]
        found: dict[str, Any]
        if self.classes is not None:
            likelier = np.where(mean[0] > 0.5, self.classes[1], self.classes[0])
            found = {"class": likelier, **dict(zip(("probability", "low", "high"), mean, strict=True))}
        else:
            response = self._predicted(random, "response")
            named = zip(("mean", "mean_low", "mean_high", "low", "high"), (*mean, *response[1:]), strict=True)
            found = dict(named)
        return pd.DataFrame({**found, "new_groups": [", ".join(some) for some in new]}, index=frame.index)

    def _predicted(self, random: dict[str, NewRows], kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Means and ends of intervals of some kind; rows in parts, for the memory that draws take."""
        first = next(iter(random.values()))
        parts = []
        for begin in range(0, len(first.X), _ROWS):
            generator = torch.Generator().manual_seed(_SEED + 2)
            some = {key: NewRows(*(x[begin : begin + _ROWS] for x in rows)) for key, rows in random.items()}
            eta = self._predictors(some, generator)
            parts.append(of_kind(self.likelihood, eta, kind, 0.95, generator, self.parameter))
        return tuple(torch.cat([part[k] for part in parts]).numpy() for k in _PLACES)  # type: ignore[return-value]

    def _random(self, designs: Rows | SeveralRows) -> dict[str, NewRows]:
        """Of each grouping factor the rows, with those of the fixed effects."""
        of = {next(iter(self.formula.groupings)): designs[1:3]} if isinstance(designs, Rows) else designs.random
        return {key: NewRows(*map(_tensor, (designs.X, *rows, designs.offset))) for key, rows in of.items()}

    def _predictors(self, random: dict[str, NewRows], generator: torch.Generator) -> Tensor:
        """Draws of the linear predictors, (S, M)."""
        one = next(iter(random.values()))
        eta = self.fixed @ one.X.mT + one.offset
        for key, rows in random.items():
            eta = eta + varying(rows, self.omega[key], self.effects[key], generator)
        return eta

    def to_arviz(self, *, seed: int = 0) -> Any:
        """Export the draws for ArviZ, with what its checks of a model need: see `torchngvi.to_arviz`.

        The rows are those of the fit, which the run has kept.

        Args:
            seed: of the new data.

        Returns:
            What ArviZ takes; its ``posterior`` has ``beta`` (column), ``sd`` of the effects of the grouping factor, of
            several ``sd_<factor>``, and ``parameter`` of the likelihood where it is learned.

        Raises:
            ImportError: without ArviZ.
            InputError: a fit with weights, which the run has not kept.
        """
        if self.weighted:
            raise InputError(
                "the fit has weights, which the run has not kept: make it in Python, torchngvi.mixed(...).fit(), and "
                "take torchngvi.to_arviz of its result."
            )
        made = self.formula
        y = self.likelihood.checked(torch.tensor(made.y, dtype=torch.float64))
        values, dims = {"beta": self.fixed}, {"beta": ["column"], "y": ["row"]}
        coords: dict[str, list[str]] = {"column": made.fixed}
        for key, grouping in made.groupings.items():
            name = f"sd_{key}" if len(made.groupings) > 1 else "sd"
            values[name] = scales_of(self.omega[key], len(grouping.random))[0]
            dims[name], coords[f"effect_{key}"] = [f"effect_{key}"], grouping.random
        if self.parameter is not None:
            values["parameter"] = self.parameter
        eta = self._predictors(self._random(made.rows), torch.Generator())  # of which nothing is drawn: no group is new
        rows = Predicted(self.likelihood, eta, y, torch.ones_like(y), self.parameter)
        return with_checks(inference_data(values, y, coords, dims), rows, torch.Generator().manual_seed(seed))

    def _refuse_missing(self, frame: pd.DataFrame, name: str) -> None:
        there = [key for key in self.columns if key in frame]
        bad = [key for key in there if frame[key].isna().any()]
        if bad:
            groups = [key for key in bad if key in self.formula.columns.groups]
            advice = "" if self.fill or groups else ", or fit again with --impute median"
            raise InputError(
                f"{name} misses entries of {listed(bad)}, of {bad[0]} in {int(frame[bad[0]].isna().sum())} of "
                f"{len(frame)} rows. Fill them in, leave those rows out{advice}."
            )


_PLACES = tuple(Prediction._fields.index(name) for name in ("mean", "low", "high"))


def _tensor(values: Any) -> Tensor:
    found = torch.as_tensor(np.asarray(values))
    return found.double() if found.is_floating_point() else found


def content(
    formula: Formula, result: MixedResult | MultilevelResult, fill: Filling, settings: dict[str, Any]
) -> dict[str, Any]:
    """The content of posterior.pt: draws, the formula, and the columns of the table that it names."""
    draws, names = result.draws(), list(formula.groupings)
    several = isinstance(draws.effects, dict)
    family, parameters = described(result.model.rows.likelihood)
    return {
        "formula": formula.formula,
        "table": formula_tables.packed(formula.table),
        "family": family,
        "likelihood": parameters,
        "fixed": draws.fixed,
        "effects": dict(draws.effects) if several else {names[0]: draws.effects},
        "omega": dict(draws.omega) if several else {names[0]: draws.omega},
        "parameter": draws.parameter,
        "fill": fill,
        "settings": settings,
    }


def read(values: Content) -> FittedFormula:
    """A fit from the content of its file."""
    table = formula_tables.unpacked(values)
    formula, family = Formula(values.take("formula", str), table), values.take("family", str)
    values.require(family in FAMILIES, "family", f"one of {', '.join(FAMILIES)}")
    names = sorted({name for some in formula.columns for name in some})
    values.require(sorted(table.columns) == names, "table", f"the columns that the formula names, {listed(names)}")
    likelihood = values.likelihood(family)
    likelihood.checked(torch.tensor(formula.y, dtype=torch.float64))
    fixed = values.tensor("fixed", (None, len(formula.fixed)))
    S, groupings = len(fixed), formula.groupings
    sizes = {name: len(grouping.random) for name, grouping in groupings.items()}
    effects = values.tensors("effects", {name: (S, len(groupings[name].levels), r) for name, r in sizes.items()})
    omega = values.tensors("omega", {name: (S, r * (r + 1) // 2) for name, r in sizes.items()})
    parameter = None
    if PARAMETERS.get(family):  # which is learned
        parameter = values.tensor("parameter", (S,))
        values.require(bool((parameter > 0).all()), "parameter", "positive")
    else:
        values.take("parameter", type(None))
    settings = values.take("settings", dict)
    _check_settings(values, settings, formula.formula, family)
    fill = values.take("fill", dict)
    right = all(type(value) in (int, float, str, bool) and value == value for value in fill.values())  # noqa: PLR0124
    values.require(right and set(fill) <= set(formula.columns.predictors), "fill", "an entry for each predictor")
    classes = formula_tables.classes_of(formula.formula, formula.y, table) if likelihood.discrete else None
    return FittedFormula(
        formula, likelihood, fixed, effects, omega, parameter, fill, classes, bool(settings.get("weights"))
    )


def _check_settings(values: Content, settings: dict[str, Any], formula: str, family: str) -> None:
    """Check that the flags of a run are those that it can have."""
    kinds = {"seed": (int,), "progress": (bool,), "test_fraction": (int, float)}
    for name, value in settings.items():
        values.require(type(value) in kinds.get(name, (str,)), "settings", f"with another value of {name}")
    values.require(settings.get("formula") == formula, "settings", "with the formula of the run")
    values.require(family_of(settings.get("family", "gaussian")) == family, "settings", "with the family of the run")
