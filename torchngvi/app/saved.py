"""A fit that was written to a folder, read again: predictions for new rows of a table."""

import io
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from torchngvi import registry
from torchngvi.adapters.arviz import Predicted, drawn, exported
from torchngvi.adapters.table_checks import is_number, of_unusable, refuse
from torchngvi.app.columns import numbers
from torchngvi.app.config import Settings
from torchngvi.app.contents import Content, settings_of
from torchngvi.app.encoding import Array, Column, Encoding, check_columns
from torchngvi.app.intervals import outcome_interval
from torchngvi.app.outputs import POSTERIOR, file_of, read_run
from torchngvi.app.report import Z95
from torchngvi.app.runs import as_gaussian
from torchngvi.diagnostics.predictive import coded, predictive_mean, predictor_moments
from torchngvi.errors import InputError
from torchngvi.messages import listed
from torchngvi.models import GeneralizedLinear
from torchngvi.models.likelihoods import BernoulliLogit, BernoulliProbit, GaussianNoise, Likelihood, StudentT
from torchngvi.models.standardize import Standardization
from torchngvi.posteriors.gaussian import Gaussian

if TYPE_CHECKING:
    from torchngvi.app.saved_formula import FittedFormula

__all__ = ["Fitted", "load"]

_TABLE = "the table"  # what a frame is called; one that was read from a file has its name


@dataclass(frozen=True, repr=False)
class Fitted:
    """The posterior of a run of ``torchngvi fit``, with all that turns a table of new rows into predictions.

    `load` makes it from the folder of a run.

    >>> import tempfile
    >>> from torchngvi.app import problems, results, runs
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     settings = Settings(data="iris", success="virginica", progress=False, out=f"{folder}/iris")
    ...     _ = results.write(runs.run(problems.build(settings)))
    ...     fitted = load(f"{folder}/iris")
    >>> flower = {name: [3.0] for name in fitted.columns}
    >>> fitted.predict(pd.DataFrame(flower)).columns.tolist()
    ['class', 'probability', 'low', 'high']
    """

    settings: Settings
    posterior: Gaussian  # over the coefficients as fitted, the intercept first
    encoding: Encoding
    units: Standardization  # of the columns, with the place of the intercept
    fill: Array  # (D,), NaN where nothing is filled in
    classes: tuple[str, str] | None  # failure and success
    likelihood: Likelihood

    def __repr__(self) -> str:
        made, columns = self.settings, ", ".join(self.columns)
        return f"Fitted({made.data!r}, target {made.target!r}, {made.family}, from {columns})"

    @property
    def told(self) -> str:
        """What is predicted, in words."""
        mean = f"mean of {self.settings.target or 'the target'}"
        return f"probability of {self.classes[1]!r}" if self.classes else mean

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a table of new rows must have."""
        offset = () if self.settings.offset is None else (self.settings.offset,)
        return (*(column.name for column in self.encoding.columns), *offset)

    def predict(self, frame: pd.DataFrame, *, name: str = _TABLE) -> pd.DataFrame:
        """Predict new rows, with central 95% intervals.

        For two classes the table has the likelier ``class`` and the ``probability`` of success, averaged over q, with
        the interval of that probability, ``low`` and ``high``. For counts and real numbers it has the ``mean`` with its
        interval ``mean_low`` and ``mean_high``, and the interval of a new observation, ``low`` and ``high``.

        Args:
            frame: the new rows, with the columns of the fit as they were there; the target may be among them.
            name: the table, for messages.

        Returns:
            One row for each of the frame, with its index.

        Raises:
            InputError: columns that are missing or unknown, entries that are missing or unseen.
        """
        X, offset = self._design(frame, name)
        model, q = self._model(), self.posterior
        X_ = torch.as_tensor(X, dtype=q.dtype)
        o = None if offset is None else torch.as_tensor(offset, dtype=q.dtype)
        mean, variance = (part.double() for part in predictor_moments(model, q, X_, o))
        half = Z95 * variance.sqrt()
        expected = predictive_mean(model, q, X_, o).numpy()
        low, high = (_inverse_link(self.likelihood, edge).numpy() for edge in (mean - half, mean + half))
        if self.classes is not None:
            likelier = np.where(expected > 0.5, self.classes[1], self.classes[0])
            found: dict[str, Any] = {"class": likelier, "probability": expected, "low": low, "high": high}
        else:
            new = (part.numpy() for part in outcome_interval(self.likelihood, mean, variance, 0.95))
            found = {
                "mean": expected,
                "mean_low": low,
                "mean_high": high,
                **dict(zip(("low", "high"), new, strict=True)),
            }
        return pd.DataFrame(found, index=frame.index)

    def to_arviz(self, frame: pd.DataFrame, *, draws: int | None = None, seed: int = 0, name: str = _TABLE) -> Any:
        """Export draws of the coefficients for ArviZ, with what its checks of a model need: see `torchngvi.to_arviz`.

        Args:
            frame: the table of the fit, with the target, and the weights where it has some.
            draws: how many, 4000 by default.
            seed: of the draws, and of the new data.
            name: the table, for messages.

        Returns:
            What ArviZ takes; its ``posterior`` has ``beta`` (column), per unit of a column of the table.

        Raises:
            ImportError: without ArviZ.
            InputError: a fit that has held out rows, of which nothing is left out; a table without the target, targets
                that the fit has not seen, and what `predict` refuses.
        """
        s = self.settings
        if s.test_fraction:
            raise InputError(
                f"what is checked are the rows of the fit, and it has held out {s.test_fraction:.3g} of those of the "
                "table. Fit all of them, --test-fraction 0."
            )
        X, offset = (None if part is None else torch.as_tensor(part) for part in self._design(frame, name))
        assert X is not None
        frame = frame.rename(columns=str)
        y = torch.tensor(self._targets(frame, name))
        weights = torch.ones_like(y)
        if s.weights is not None:
            weights = torch.tensor(numbers(_of_fit(frame, s.weights, "weights", name), "weights"))
        generator = torch.Generator().manual_seed(seed)
        theta = drawn(self.posterior, draws, generator).double()
        beta = self.units.to_user(theta)
        names = [*(("intercept",) if s.intercept else ()), *self.encoding.names]
        eta = theta @ X.mT + (0.0 if offset is None else offset)
        rows = Predicted(self.likelihood, eta, coded(self.likelihood, y), weights)
        return exported(beta, names, rows, generator)

    def _targets(self, frame: pd.DataFrame, name: str) -> Array:
        """The targets of the table of the fit, two classes as 0 and 1."""
        target = self.settings.target or "target"
        column = _of_fit(frame, target, "target", name)
        if self.classes is None:
            return numbers(column, "target")
        failure, success = self.classes
        texts = column.map(lambda value: f"{value:g}" if isinstance(value, float) else str(value))
        if failure != f"not {success}" and not set(texts) <= {failure, success}:
            other = next(text for text in texts if text not in (failure, success))
            raise InputError(f"target {target!r} has the class {other!r}; the fit has {failure!r} and {success!r}.")
        return np.array(texts == success, dtype=np.float64)

    def _design(self, frame: pd.DataFrame, name: str) -> tuple[Array, Array | None]:
        """The columns of the fit, in its scale, and the offset."""
        if not isinstance(frame, pd.DataFrame):
            raise InputError(
                f"predict takes a pandas DataFrame with the columns of the fit; got {type(frame).__name__}."
            )
        s = self.settings
        known = [c for c in (s.target, s.weights, *s.drop, "target") if c]
        check_columns(frame, self.columns, known, name, flag=name != _TABLE)
        frame = frame.rename(columns=str)
        _refuse_missing(frame, self.columns if s.impute is None else self.columns[len(self.encoding.columns) :], name)
        raw = self.encoding.design(frame)
        refuse(of_unusable(dict(zip(self.encoding.names, raw.T, strict=True)), {}, impute=s.impute is not None))
        if s.intercept:
            raw = np.column_stack([np.ones(len(raw)), raw])
        X = self.units.standardize(torch.from_numpy(np.where(np.isnan(raw), self.fill, raw))).numpy()
        if s.offset is None:
            return X, None
        if not is_number(frame[s.offset]):
            raise InputError(f"offset column {s.offset!r} must hold numbers; {name} has texts there. Correct them.")
        return X, np.array(frame[s.offset], dtype=np.float64)

    def _model(self) -> GeneralizedLinear:
        """A model with the likelihood of the fit; its two rows are not looked at."""
        rows = torch.zeros((2, self.posterior.dim), dtype=self.posterior.dtype)
        return GeneralizedLinear(rows, [0.0, 1.0], self.likelihood)


def _of_fit(frame: pd.DataFrame, column: str, role: str, name: str) -> pd.Series:
    """A whole column of the table of the fit, which does not predict."""
    if column not in frame:
        raise InputError(f"{name} has no column {column!r}, the {role} of the fit. Give the table that was fitted.")
    _refuse_missing(frame, (column,), name)
    return frame[column]


def _refuse_missing(frame: pd.DataFrame, names: tuple[str, ...], what: str) -> None:
    missing = {name: int(frame[name].isna().sum()) for name in names}
    bad = [name for name, count in missing.items() if count]
    if bad:
        raise InputError(
            f"{what} misses entries of {listed(bad)}, of {bad[0]} in {missing[bad[0]]} of {len(frame)} rows, and the "
            "fit has filled none. Fill them in, leave those rows out, or fit again with --impute median."
        )


def _inverse_link(likelihood: Likelihood, eta: Tensor) -> Tensor:
    """The mean of y at a linear predictor."""
    if isinstance(likelihood, BernoulliLogit):
        return torch.sigmoid(eta)
    if isinstance(likelihood, BernoulliProbit):
        return torch.special.ndtr(eta)
    return eta if isinstance(likelihood, GaussianNoise | StudentT) else eta.exp()


def load(run: str | Path) -> "Fitted | FittedFormula":
    """Read what ``torchngvi fit`` has written, with ``--formula`` or without, to predict with it.

    The file posterior.pt is checked against its digest in manifest.json, and each of its values against what a run can
    hold, so that a run of a stranger runs no code. A folder without digests, as of version 0.2.0, and other files of it
    that have changed are a warning.

    Args:
        run: the folder of the run, or the file posterior.pt in it.

    Returns:
        The fit; its `Fitted.predict`, or that of a `FittedFormula`, takes a table of new rows.

    Raises:
        ImportError: a run of a formula, without formulae.
        InputError: no such folder, a folder or a file of something else, a run of an earlier version, one that is not
            as it was written, or that holds what no run holds.
    """
    if not isinstance(run, str | os.PathLike):
        raise InputError(f"load takes the folder of a run, such as 'runs/patients'; got {type(run).__name__}.")
    path = Path(run)
    path = file_of(path, POSTERIOR) if path.is_dir() else path
    if not path.is_file():
        formula = path.with_name("effects.csv").is_file()
        raise InputError(
            f"{str(run)!r} is no folder of a run: "
            + (f"there is no {path.name} in it. " if path.parent == Path(run) else "it is not there. ")
            + (
                "It is of --formula by an earlier version, which kept no draws. Fit again."
                if formula
                else "Name the folder that torchngvi fit has written, such as runs/breast_cancer."
            )
        )
    content, notes = read_run(Path(run) if Path(run).is_dir() else path)
    for note in notes:
        warnings.warn(f"{note}.", stacklevel=2)
    try:
        saved = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception as error:  # of a broken file torch, zipfile and pickle raise anything
        said = (str(error).splitlines() or [""])[0].partition(". ")[0]
        raise InputError(f"{str(path)!r} cannot be read as the posterior of a run ({said}). Fit again.") from error
    if not isinstance(saved, dict) or not {"formula", "settings"} & set(saved):
        raise InputError(
            f"{str(path)!r} is no run of torchngvi fit, which is what load reads. A state dict is read by "
            "q.load_state_dict(torch.load(path)), into a q that is made as the saved one was."
        )
    if "formula" not in saved and "columns" not in saved:
        raise InputError(f"{str(path)!r} is of an earlier version, which kept no 'columns'. Fit again.")
    with Content.of(path, saved) as values:
        if "formula" not in saved:
            return _read(values)
        from torchngvi.app import saved_formula  # which needs the extra "formula"

        return saved_formula.read(values)


def _read(values: Content) -> Fitted:
    """A fit from the content of its file."""
    settings = settings_of(values)
    columns = values.take("columns", list)
    encoding = Encoding(tuple(_column(values, f"columns[{k}]", column) for k, column in enumerate(columns)))
    names = (*(["intercept"] if settings.intercept else []), *encoding.names)
    values.require(values.texts("feature_names") == names, "feature_names", f"those of the columns, {listed(names)}")
    values.require(len(set(names)) == len(names), "columns", "columns of different names")
    D, dtype = len(names), getattr(torch, settings.dtype)
    center = values.tensor("center", (D,))
    scale = values.tensor("scale", (D,))
    usual = 0 if settings.intercept else None  # of 0.2.0, which kept no place of it
    place = values.saved.get("intercept", usual)
    values.taken.add("intercept")
    right = place == 0 if settings.intercept else place is None or place in range(D)
    values.require(type(place) in (int, type(None)) and right, "intercept", "the place of the intercept")
    others = [k for k in range(D) if k != place]
    values.require(bool((scale[others] > 0).all() and (scale != 0).all()), "scale", "positive")
    values.require(place is None or float(center[place]) == 0, "center", "0 of the intercept")
    values.require(not settings.intercept or float(scale[0]) == 1, "scale", "1 of the intercept")
    fill = values.tensor("fill", (D,), finite=settings.impute is not None)
    classes = values.texts("classes") if values.saved["classes"] is not None else values.take("classes", type(None))
    values.require(
        (classes is not None) == settings.has_classes and (classes is None or len(set(classes)) == len(classes) == 2),
        "classes",
        "two different names" if settings.has_classes else "none, as the family has none",
    )
    likelihood = values.likelihood(settings.family)
    q = registry.posterior(settings.posterior, D, structure=settings.structure, dtype=dtype)
    values.load("posterior", q)
    posterior = as_gaussian(q, settings.posterior)
    moments = torch.stack([posterior.mean, posterior.stddev]).detach()
    values.require(
        bool(moments.isfinite().all() and (moments[1] > 0).all()), "posterior", "means and positive standard deviations"
    )
    return Fitted(
        settings,
        posterior,
        encoding,
        Standardization(center, scale, place),
        fill.numpy(),
        classes,  # type: ignore[arg-type]
        likelihood,
    )


def _column(values: Content, name: str, column: Any) -> Column:
    """A column of the table, with the levels of a category."""
    right = isinstance(column, list | tuple) and len(column) == 3 and isinstance(column[0], str)
    values.require(right and isinstance(column[1], list | tuple), name, "a name, levels and the commonest of them")
    levels, usual = tuple(column[1]), column[2]
    values.require(
        all(isinstance(level, str) for level in levels)
        and len(set(levels)) == len(levels)
        and isinstance(usual, str)
        and usual in (levels or ("",)),
        name,
        "different levels, the commonest among them",
    )
    return Column(column[0], levels, usual)
