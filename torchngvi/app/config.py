"""The settings of a run, from a TOML file and from flags: one frozen record, checked when it is made."""

import json
import math
import reprlib
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from torchngvi.app.names import (
    DEFAULT,
    DISCRETE,
    DTYPES,
    ELSEWHERE,
    FAMILIES,
    FLAT_METHODS,
    FLAT_POSTERIORS,
    METHODS,
    PARAMETERS,
    POSTERIORS,
    PRIORS,
)
from torchngvi.errors import InputError
from torchngvi.messages import SHORT, full_name, hint

_LARGEST = 2**63  # of a whole number
_POSITIVE = (
    "lr",
    "prior_precision",
    "intercept_sd",
    "noise",
    "dispersion",
    "dof",
    "temperature",
    "tolerance",
    "max_evaluations",
    "n_features",
    "batch_rows",
)


@dataclass(frozen=True)
class Settings:
    """The settings of ``torchngvi fit``; every key of the TOML file and every flag is a field.

    >>> Settings(data="breast_cancer").family
    'bernoulli_logit'
    """

    data: str  # bundled set, or file: csv, tsv, parquet, svm, libsvm, txt (also .gz), npz; patterns of files in batches
    target: str | None = None  # column of the targets; svmlight and npz files say it themselves
    family: str = "bernoulli_logit"
    method: str = "vn"
    posterior: str = "cholesky"
    lr: float | None = None  # without: steps are found by trial
    prior_precision: float | str | None = None  # without: "default", in the units of the data; "flat", or "auto"
    intercept_sd: float | None = None  # of the intercept's prior; beside a number above: 10, of reals 10 √mean(y²)
    noise: float | None = None  # sd, Gaussian family, without: residual of least squares; or scale of student_t
    dispersion: float | None = None  # r in the variance mean + mean²/r of negative binomial counts; without: found
    dof: float | None = None  # degrees of freedom of student_t; without: 4
    temperature: float = 1.0  # weight of KL(q‖prior)
    standardize: bool = True
    intercept: bool = True
    test_fraction: float = 0.2
    seed: int = 42
    tolerance: float | None = None  # on the natural-gradient norm; without: 1e-5, in float32 1e-2
    max_evaluations: int = 1000
    dtype: str = "float64"
    device: str = "cpu"  # or cuda, cuda:1, mps: on which the fit runs
    out: str | None = None  # without: runs/<name of the data>
    progress: bool = True
    weights: str | None = None  # column of row weights
    offset: str | None = None  # column added to the linear predictor
    success: str | None = None  # the class to predict, against all others
    drop: tuple[str, ...] = ()  # columns to leave out
    categorical: tuple[str, ...] = ()  # columns of numbers that are taken as categories
    impute: str | None = None  # "median": missing entries become the median, of a text column the commonest text
    n_features: int | None = None  # of a svmlight file, where trailing columns are empty
    structure: str | None = None  # of the covariance: full, diagonal, or sizes of blocks as 1,4,2
    batch_rows: int | None = None  # rows in memory at once, of files that are read in batches

    def __post_init__(self) -> None:
        if not self.data:
            raise InputError("data is empty; name a data file or a bundled set, such as breast_cancer.")
        file_name("data", self.data)
        family_of(self.family)
        for name, choices in (
            ("method", (*METHODS, *FLAT_METHODS)),
            ("posterior", (*POSTERIORS, *FLAT_POSTERIORS)),
            ("dtype", DTYPES),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise InputError(f"{name} must be one of {', '.join(choices)}; got {value!r}.{hint(value, choices)}")
        for name in _POSITIVE:
            value = None if name == "prior_precision" and self.prior_word else getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise InputError(f"{_key(name)} must be positive and finite; got {value:g}.")
        impute_of(self.impute)
        if not 0 <= self.test_fraction < 1:
            raise InputError(
                f"test_fraction is the share of rows held out, at least 0 and below 1; got {self.test_fraction:g}. "
                "Take 0.2, or 0 to fit all rows."
            )
        seed_of(self.seed)
        self._check_pairs()

    def _check_pairs(self) -> None:
        from torchngvi.registry import check  # PyTorch is needed from here on

        check(self.method, self.posterior, self.structure, self.lr)
        if self.tolerance is not None and self.method in FLAT_METHODS:
            raise InputError(
                f"tolerance bounds the natural-gradient norm, and that of the stochastic gradients of {self.method} "
                "does not vanish: the run ends when its smoothed bound stops rising. Leave tolerance out."
            )
        for name, of in PARAMETERS.items():
            value = getattr(self, name)
            if value is not None and self.family not in of:
                got = f"got {name} {value:g} with family {self.family}"
                raise InputError(f"{name} belongs to family {' and '.join(of)}; {got}.")
        if self.success is not None and not self.has_classes:
            raise InputError(f"success names a class, and family {self.family} has none; use bernoulli_logit.")

    @property
    def prior_word(self) -> str | None:
        """The word for the prior, one of `PRIORS`; None where a number is its precision."""
        value = DEFAULT if self.prior_precision is None else self.prior_precision
        return value if isinstance(value, str) else None

    @property
    def scales_columns(self) -> bool:
        """Whether columns are centred and scaled for the fit; with a prior in the units of the data they always are."""
        return self.standardize or self.prior_word is not None

    @property
    def has_classes(self) -> bool:
        """Whether the targets are two classes."""
        return self.family in DISCRETE

    @property
    def has_gaussian_posterior(self) -> bool:
        """Whether the posterior is one whose expectations of a regression are known."""
        return self.posterior in POSTERIORS and self.method in METHODS

    @property
    def by_usual_steps(self) -> bool:
        """Whether the steps are the usual ones of `torchngvi.fit`, which begin at the mode or on some of the rows."""
        return self.method == "vn" and self.lr is None

    @property
    def folder(self) -> Path:
        """The folder of the results: ``out``, or runs/<name of the data>."""
        name = Path(self.data).name.split(".")[0]
        if self.is_pattern:
            name = name.translate(dict.fromkeys(map(ord, "*?[]"), "")).strip("_-") or "rows"
        return Path(self.out) if self.out else Path("runs") / name

    @property
    def is_pattern(self) -> bool:
        """Whether the data are a pattern of names of files, and no file of that name."""
        return any(mark in self.data for mark in "*?[") and not Path(self.data).is_file()


def family_of(name: str) -> str:
    """The name of a family, from it or a shorter word.

    >>> family_of("Poisson")
    'poisson_log'
    """
    family = full_name(name)
    if family not in FAMILIES:
        advice = ELSEWHERE.get(name.lower())
        told = f" {advice}" if advice else hint(name, (*FAMILIES, *SHORT))
        raise InputError(f"family must be one of {', '.join(FAMILIES)}; got {name!r}.{told}")
    return family


def seed_of(seed: int) -> int:
    """The seed, after a check."""
    if not 0 <= seed < 2**32:
        raise InputError(f"seed must be from 0 to {2**32 - 1}; got {seed}.")
    return seed


def impute_of(word: str | None) -> str | None:
    """The way to fill in missing entries, after a check."""
    if word not in (None, "median"):
        raise InputError(f"impute must be median; got {word!r}. Leave it out where nothing is missing.")
    return word


def _key(name: str) -> str:
    return f"{name} (the learning rate)" if name == "lr" else name


def file_name(what: str, name: str) -> str:
    """The name, after a check that a file can have it and a report can print it.

    >>> file_name("out", "runs/iris")
    'runs/iris'
    """
    if "\0" in name or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise InputError(f"{what} must be a name in UTF-8 without a NUL character; got {name!r}. Rename it.")
    return name


def settings_from(keys: Mapping[str, Any]) -> Settings:
    """Settings from keys and values.

    >>> settings_from({"data": "iris", "lr": 1}).lr
    1.0
    """
    types_ = get_type_hints(Settings)
    for key in keys:
        if key not in types_:
            raise InputError(f"unknown key {key!r}.{hint(key, types_)} The keys are: {', '.join(types_)}.")
    if "data" not in keys:
        raise InputError(
            'data is missing: torchngvi fit --data breast_cancer, or a line data = "breast_cancer" in the TOML file.'
        )
    values = {key: _converted(key, value, types_[key]) for key, value in keys.items()}
    if "family" in values:
        values["family"] = family_of(values["family"])
    return Settings(**values)


def whole(key: str, value: int) -> int:
    """A whole number, after a check that it has a place in 64 bits."""
    if abs(value) >= _LARGEST:
        raise InputError(f"{key} must be less than 2^63 in size; got {reprlib.repr(value)}. Take a smaller number.")
    return value


_WORDS: dict[Any, str] = {
    str: "text in quotes",
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    tuple: "a list of texts",
}


def _converted(key: str, value: Any, hinted: Any) -> Any:
    """The value in the type of its field; integers pass for floats, words where they may stand, nothing else."""
    if isinstance(hinted, types.UnionType):
        if value in PRIORS and str in get_args(hinted):
            return value
        hinted = next(option for option in get_args(hinted) if option is not type(None))
    if get_origin(hinted) is tuple:
        if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            return tuple(value)
        hinted = tuple
    elif hinted is float and type(value) is int:
        return float(whole(key, value))
    elif type(value) is hinted:
        return whole(key, value) if hinted is int else value
    raise InputError(f"{key} must be {_WORDS[hinted]}; got {reprlib.repr(value)}.")


def to_toml(settings: Settings) -> str:
    """The settings as a TOML file that repeats the run; keys left to their default None are omitted.

    >>> to_toml(Settings(data="iris", lr=0.5)).splitlines()[:4]
    ['data = "iris"', 'family = "bernoulli_logit"', 'method = "vn"', 'posterior = "cholesky"']
    """
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    # strings, numbers, booleans and lists of strings are written in TOML as in JSON
    lines = (f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in values.items() if v is not None and v != ())
    return "\n".join(lines) + "\n"


def to_dict(settings: Settings) -> dict[str, Any]:
    """The settings as plain numbers, texts and lists.

    >>> to_dict(Settings(data="iris"))["data"]
    'iris'
    """
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(settings).items()}
