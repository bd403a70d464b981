"""``torchngvi fit --formula`` without a grouping factor: a regression, in the flags that say the same."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

import pandas as pd

from torchngvi.adapters.terms import FormulaTerms
from torchngvi.app import counts
from torchngvi.app.mixed_runs import table_of
from torchngvi.app.readers import read_columns
from torchngvi.errors import InputError
from torchngvi.messages import hint, listed

_SAID = ("target", "drop", "categorical", "offset", "success", "intercept")  # by the formula
_CALL = re.compile(r"(C|offset)\((.*)\)")


def as_regression(flags: Mapping[str, Any]) -> dict[str, Any] | None:
    """The flags of ``torchngvi fit`` without ``--formula`` for the regression that a formula names, told in print."""
    formula = flags["formula"]
    terms = FormulaTerms.of(formula)
    if terms.grouped:
        return None
    others = [f"--{name}" for name in _SAID if name in flags]
    if others:
        raise InputError(
            f"{', '.join(others)} cannot be combined with --formula, which says the same. Leave out what it says."
        )
    frame = read_columns(table_of(flags)).frame
    said = _said(formula, terms, frame)
    used = {said["target"], flags.get("weights"), *said.pop("predictors"), said.get("offset")}
    drop = [name for name in frame.columns if name not in used]
    rest = {name: value for name, value in flags.items() if name != "formula"}
    found = {"data": flags["data"], **said, "family": "gaussian", "test_fraction": 0.0, **rest}
    found |= {"drop": drop} if drop else {}
    print(f"The formula has no grouping factor, and is fitted as: {_command(found)}")
    for warning in () if "family" in flags else counts.not_gaussian(frame, said["target"]):
        print(f"warning: {warning}")
    return found


def _said(formula: str, terms: FormulaTerms, frame: pd.DataFrame) -> dict[str, Any]:
    """What a formula says of the columns, by the names of the flags, and its predictors."""
    target, _, level = terms.response.rstrip("]").partition("[")
    said: dict[str, Any] = {"target": _column(target, formula, frame), "predictors": []}
    if level:
        said["success"] = level
    for term in terms.common:
        call = _CALL.fullmatch(term)
        kind, name = call.groups() if call else ("", term)
        name = _column(name, formula, frame, term)
        if kind == "offset":
            said["offset"] = name
        else:
            said["predictors"].append(name)
        if kind == "C":
            said["categorical"] = [*said.get("categorical", ()), name]
    if not terms.intercept:
        said["intercept"] = False
    return said


def _column(name: str, formula: str, frame: pd.DataFrame, term: str | None = None) -> str:
    """The name, after a check that it is a column."""
    if name in frame:
        return name
    if not re.search(r"[^\w. ]", name):
        raise InputError(
            f"The formula names {name}, which is not in the data.{hint(name, frame)} The columns are: "
            f"{listed(list(frame.columns))}."
        )
    raise InputError(
        f"The formula {formula!r} has no grouping factor: it is a regression on columns as they are, and "
        f"{term or name} is none. Write a column of it into the table and name that, or add a factor, (1 | group)."
    )


def _command(flags: Mapping[str, Any]) -> str:
    """What one would type."""
    words = ["torchngvi", "fit"]
    for name, value in flags.items():
        flag = "--" + {"family": "likelihood"}.get(name, name).replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            several = value if isinstance(value, list) else [value]
            words += [flag, *(str(one).removesuffix(".0") if isinstance(one, float) else str(one) for one in several)]
    return shlex.join(words)
