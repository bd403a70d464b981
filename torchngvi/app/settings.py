"""The settings of ``torchngvi fit``, from a TOML file and from flags: one frozen record, checked when it is made.

PyTorch is not needed for them.
"""

import json
import math
import re
import reprlib
import tomllib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from torchngvi.errors import InputError
from torchngvi.messages import hint

_LARGEST = 2**63  # of a whole number
_LONGEST_FILE = 60_000  # bytes of a file of settings
_TEST_FRACTION = 0.2  # of rows, where no formula says what is meant
WORDS = ("auto", "flat")  # for a prior precision
_OWN = "the posterior is integrated, and by no other way"
GONE = {  # keys that do nothing any more, and why
    **dict.fromkeys(("method", "posterior", "structure", "lr", "tolerance", "max_evaluations", "temperature"), _OWN),
    **dict.fromkeys(("dtype", "device"), "it is computed on the processor, in double precision"),
    **dict.fromkeys(("noise", "dispersion", "dof"), "the parameters of a family are learned with the rest"),
    **dict.fromkeys(("batch_rows", "n_features"), "all rows are in memory"),
}
_KINDS: dict[Any, str] = {str: "text in quotes", float: "a number", int: "a whole number", bool: "true or false"}


def _key(default: Any, value: str, help: str) -> Any:
    """A key with what a flag calls its value, and its help."""
    return field(default=default, metadata={"metavar": value, "help": help})


@dataclass(frozen=True)
class Settings:
    """The settings of ``torchngvi fit``; every key of the TOML file and every flag is a field."""

    data: str = _key("", "NAME_OR_FILE", "breast_cancer, diabetes, digits, iris, wine; .csv .tsv .xlsx .parquet .svm")
    target: str | None = _key(None, "COLUMN", "the column to predict, from all others")
    formula: str | None = _key(None, "FORMULA", "what is predicted from what: 'y ~ x*z + (1 + x | group)'")
    family: str | None = _key(
        None,
        "FAMILY",
        "bernoulli, probit, binomial, poisson, negative_binomial, gaussian, student_t, ordinal, multinomial, beta, "
        "gamma and others of torchngvi.tables (bernoulli; with --formula gaussian)",
    )
    success: str | None = _key(None, "CLASS", "the class to predict, against all others (of two, the last in order)")
    weights: str | None = _key(None, "COLUMN", "row weights")
    offset: str | None = _key(None, "COLUMN", "added to the linear predictor")
    drop: tuple[str, ...] = _key((), "COLUMN", "columns to leave out")
    categorical: tuple[str, ...] = _key((), "COLUMN", "columns of numbers that are categories")
    impute: str | None = _key(None, "median", "fill missing numbers with medians, categories with the commonest")
    intercept: bool = _key(True, "", "add a column of ones (default)")
    test_fraction: float | None = _key(None, "F", "share of rows held out (0.2; with --formula 0)")
    prior: tuple[str, ...] = _key((), "NAME=PRIOR", "of one parameter, 'x=normal(0, 1)', 'sd=half_t(3, 1)'")
    prior_precision: float | str | None = _key(
        None, "B", "N(0, 1/B) of each coefficient, per sd of its column; auto: what the data speak for; flat"
    )
    intercept_sd: float | None = _key(None, "S", "of the intercept's N(0, S^2) beside a number B (10)")
    standardize: bool = _key(True, "", "a number B is per sd of a column (default); no: per unit of it")
    marginal: tuple[str, ...] = _key((), "COLUMN", "columns whose average marginal effects are reported")
    draws: int | None = _key(None, "N", "weighted draws of the posterior (400, and up to 4096 of small tables)")
    seed: int = _key(42, "N", "of the split and of the draws (42)")
    out: str | None = _key(None, "DIR", "folder of the results (runs/NAME)")
    progress: bool = _key(True, "", "show a bar (default)")

    def __post_init__(self) -> None:
        file_name("data", self.data)
        for name in ("prior_precision", "intercept_sd", "draws"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str) and not 0 < value < math.inf:
                raise InputError(f"{name} must be positive and finite; got {value:g}.")
        if isinstance(self.prior_precision, str) and self.prior_precision not in WORDS:
            raise InputError(f"prior_precision is a number, {' or '.join(WORDS)}; got {self.prior_precision!r}.")
        if self.prior and self.prior_precision is not None:
            raise InputError("prior and prior_precision both say the priors. Leave one of them out.")
        if self.impute not in (None, "median"):
            raise InputError(f"impute must be median; got {self.impute!r}. Leave it out where nothing is missing.")
        if not 0 <= self.held_out < 1:
            raise InputError(
                f"test_fraction is the share of rows held out, at least 0 and below 1; got {self.held_out:g}. "
                "Take 0.2, or 0 to fit all rows."
            )
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed must be from 0 to {2**32 - 1}; got {self.seed}.")
        said = [name for name in ("target", "offset", "drop", "categorical") if getattr(self, name)]
        said += [] if self.intercept else ["no-intercept"]
        if self.formula is not None and said:
            raise InputError(f"--{said[0]} cannot be combined with --formula, which says the same. Leave it out.")

    @property
    def held_out(self) -> float:
        """The share of rows held out."""
        default = _TEST_FRACTION if self.formula is None else 0.0
        return default if self.test_fraction is None else self.test_fraction

    @property
    def folder(self) -> Path:
        """The folder of the results: ``out``, or runs/<name of the data>."""
        return Path(self.out) if self.out else Path("runs") / (Path(self.data).name.split(".")[0] or "table")

    def to_toml(self) -> str:
        """The settings as a TOML file that repeats the run; keys that were left to their default are omitted."""
        kept = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in kept.items())


def settings_from(keys: Mapping[str, Any]) -> tuple[Settings, str]:
    """Settings from keys and values, and a sentence about keys that do nothing any more."""
    hints, gone = get_type_hints(Settings), [key for key in keys if key in GONE]
    for key in keys:
        if key not in hints and key not in GONE:
            raise InputError(f"unknown key {key!r}.{hint(key, hints)} The keys are: {', '.join(hints)}.")
    if not keys.get("data"):
        raise InputError(
            'data is missing: torchngvi fit --data breast_cancer, or a line data = "breast_cancer" in the TOML file.'
        )
    settings = Settings(**{key: _converted(key, value, hints[key]) for key, value in keys.items() if key in hints})
    told = (
        f"{', '.join(gone)} {'does' if len(gone) == 1 else 'do'} nothing any more: "
        f"{'; '.join(dict.fromkeys(GONE[key] for key in gone))}. For a method and a posterior of your choice call "
        "torchngvi.fit(q, torchngvi.GeneralizedLinear(X, y, family)) in Python."
    )
    return settings, told if gone else ""


def whole(key: str, value: int) -> int:
    """A whole number, after a check that it has a place in 64 bits."""
    if abs(value) >= _LARGEST:
        raise InputError(f"{key} must be less than 2^63 in size; got {reprlib.repr(value)}. Take a smaller number.")
    return value


def _converted(key: str, value: Any, hinted: Any) -> Any:
    """The value in the type of its field; integers pass for floats, words where they may stand, nothing else."""
    if isinstance(hinted, types.UnionType):
        if isinstance(value, str) and str in get_args(hinted):
            return value
        hinted = next(option for option in get_args(hinted) if option is not type(None))
    if get_origin(hinted) is tuple:
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise InputError(f"{key} must be a list of texts; got {reprlib.repr(value)}.")
    if hinted is float and type(value) is int:
        return float(whole(key, value))
    if type(value) is not hinted:
        raise InputError(f"{key} must be {_KINDS[hinted]}; got {reprlib.repr(value)}.")
    return whole(key, value) if hinted is int else value


def file_name(what: str, name: str) -> str:
    """The name, after a check that a file can have it and a report can print it."""
    if re.search("[\0\ud800-\udfff]", name):
        raise InputError(f"{what} must be a name in UTF-8 without a NUL character; got {name!r}. Rename it.")
    return name


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read the keys of a TOML file."""
    file_name("CONFIG.toml", str(path))
    try:
        with Path(path).open("rb") as file:
            content = file.read(_LONGEST_FILE + 1)
        if len(content) <= _LONGEST_FILE:
            return tomllib.loads(content.decode("utf-8"))
    except FileNotFoundError as error:
        raise InputError(
            f"there is no settings file {str(path)!r}. To fit a data file say: torchngvi fit --data FILE."
        ) from error
    except (OSError, ValueError, RecursionError) as error:  # recursion of lists in lists
        raise InputError(
            f'{str(path)!r} cannot be read as TOML: {error}. Write flat lines such as data = "breast_cancer"; '
            "for a data file say --data FILE."
        ) from error
    raise InputError(
        f"a file of settings has at most {_LONGEST_FILE} bytes, and {str(path)!r} has more. For a data file say "
        "--data FILE."
    )
