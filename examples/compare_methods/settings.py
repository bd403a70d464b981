"""The settings of an experiment of several methods: frozen records, checked when they are made, from TOML."""

import math
import reprlib
import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from torchngvi import registry
from torchngvi.app.settings import file_name, read_toml, whole
from torchngvi.errors import InputError
from torchngvi.messages import full_name, hint
from torchngvi.models import ExpectedPenalty, MeanPenalty
from torchngvi.models import likelihoods as library
from torchngvi.models.likelihoods import Likelihood, NegativeBinomial, StudentT

KINDS = ("curves", "table", "quadratic", "run_time")
PENALTIES: dict[str, type[MeanPenalty] | type[ExpectedPenalty]] = {"mean": MeanPenalty, "expected": ExpectedPenalty}
METRICS = {
    "train": "training objective (Table 3)",
    "objective": "negative ELBO",
    "test_nll": "sum of the test losses",
    "test_accuracy": "test accuracy",
}
FAMILIES: dict[str, type[Likelihood]] = {
    **library.FAMILIES,
    "negative_binomial": NegativeBinomial,
    "student_t": StudentT,
}
_PARAMETERS = {  # key in the settings: the families, the name there, and what stands where none is given
    "noise": {"gaussian": ("noise", 1.0), "student_t": ("scale", 1.0)},
    "dispersion": {"negative_binomial": ("dispersion", 1.0)},
    "dof": {"student_t": ("dof", 4.0)},
}
AXES = {"iteration": "iterations", "evaluations": "evaluations", "seconds": "CPU seconds (steps × median step)"}


@dataclass(frozen=True)
class Contender:
    """The settings of one method in an experiment.

    >>> Contender("bwgd", lr=1e-3).label
    'bwgd'
    """

    method: str
    lr: float | None = None  # without: steps found by trial
    posterior: str = "cholesky"
    label: str = ""  # in figures and logs; without: the method
    batch: int = 0  # rows of a mini-batch, 0 for all
    draws: int = 0  # Monte Carlo draws of each row, 0 for the estimator of the case
    printed: tuple[float, ...] = ()  # published train, test NLL and accuracy

    def __post_init__(self) -> None:
        _check_choice("method", self.method, registry.METHODS)
        _check_choice("posterior", self.posterior, registry.POSTERIORS)
        _check_positive(self, "lr")
        registry.check(self.method, self.posterior, lr=self.lr or 1.0)  # what is missing is found by the experiment
        if self.by_trial and (self.batch or self.draws):
            raise InputError("steps found by trial need exact values; mini-batches and draws give noisy ones: set lr.")
        object.__setattr__(self, "label", self.label or self.method)

    @property
    def by_trial(self) -> bool:
        """Whether the steps are found by trial."""
        return self.lr is None and registry.by_trial(self.method)


@dataclass(frozen=True)
class Case:
    """The settings of one data set, with the methods that are run on it.

    >>> Case("wine", data="wine", methods=(Contender("vn"),)).iterations
    100
    """

    name: str
    data: str = ""  # of `datasets`, "synthetic", or a file or bundled set as for fit
    methods: tuple[Contender, ...] = ()
    prior_precision: float | None = None  # without: 1
    intercept_sd: float | None = None  # of the intercept's prior; without: as of all coefficients
    iterations: int = 100
    full_iterations: int = 0  # of --full; 0: the same
    family: str = "bernoulli_logit"
    noise: float | None = None  # of gaussian, or the scale of student_t; without: 1
    dispersion: float | None = None  # of negative_binomial; without: 1
    dof: float | None = None  # of student_t; without: 4
    target: str | None = None
    success: str | None = None
    standardize: bool = False
    intercept: bool = False
    seed: int = 42  # of the split
    test_fraction: float = 0.2
    estimator: str = "quadrature"  # or "piecewise"
    pieces: int = 20
    bound: str = ""  # of `bounds`: llp.mat, the published one, or a csv file with columns low, high, a, b, c
    penalty: str = ""  # "mean" or "expected": the regulariser of appendix H
    penalty_strength: float = 1.0
    rows: int = 0  # of synthetic data, or of the training images of mnist
    digits: tuple[int, ...] = ()  # the two classes of mnist, the second is 1
    features: int = 0
    eigenvalues: tuple[float, ...] = ()  # of the posterior precision, for data = "quadratic"
    points: int = 120  # records of a run
    skip: str = ""  # why this case is not run

    def __post_init__(self) -> None:
        _check_choice("estimator", self.estimator, ("quadrature", "piecewise"))
        object.__setattr__(self, "family", full_name(self.family))
        _check_choice("family", self.family, FAMILIES)
        _check_choice("penalty", self.penalty, ("", *PENALTIES))
        file_name("data", self.data)
        file_name("bound", self.bound)
        for key in ("prior_precision", "intercept_sd", "iterations", "penalty_strength", "points", *_PARAMETERS):
            _check_positive(self, key)
        for key, of in _PARAMETERS.items():
            value = getattr(self, key)
            if value is not None and self.family not in of:
                got = f"got {key} {value:g} with family {self.family}"
                raise InputError(f"{key} belongs to family {' and '.join(of)}; {got}.")
        if not self.skip and not self.methods:
            raise InputError(f"case {self.name!r} names no methods.")
        if self.data == "mnist" and len(set(self.digits)) != 2:
            raise InputError(f"digits must be two for data mnist; got {list(self.digits)}.")
        labels = [contender.label for contender in self.methods]
        for label in labels:
            if labels.count(label) > 1:
                raise InputError(f"two methods of case {self.name!r} are called {label!r}: give one a label.")

    @property
    def precision(self) -> float:
        """The precision of the coefficients' prior."""
        return 1.0 if self.prior_precision is None else self.prior_precision

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood with its parameters."""
        named = {
            of[self.family][0]: of[self.family][1] if getattr(self, key) is None else getattr(self, key)
            for key, of in _PARAMETERS.items()
            if self.family in of
        }
        return FAMILIES[self.family](**named)


@dataclass(frozen=True)
class Experiment:
    """The settings of a published figure or table, or of a comparison.

    >>> Experiment("Wine", (Case("wine", data="wine", methods=(Contender("vn"),)),)).starts
    1
    """

    title: str
    cases: tuple[Case, ...]
    kind: str = "curves"
    columns: tuple[str, ...] = ("objective over iteration", "objective over seconds")
    starts: int = 1
    start_sd: float = 0.0  # m0 ~ N(0, start_sd²)
    start_scale: float = 1.0  # C0 = start_scale I
    note: str = ""  # printed below the figure's title
    # kind = "quadratic"
    steps: tuple[float, ...] = ()
    # kind = "run_time"
    dims: tuple[int, ...] = ()
    full_dims: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_choice("kind", self.kind, KINDS)
        _check_positive(self, "starts")
        _check_positive(self, "start_scale")
        for column in self.columns:
            metric, _, axis = column.partition(" over ")
            _check_choice("the metric of a column", metric, METRICS)
            _check_choice("the axis of a column", axis, AXES)
        for contender in (contender for case in self.cases for contender in case.methods):
            if contender.lr is None and not self.steps and registry.needs_lr(contender.method):
                raise InputError(f"method {contender.method} needs a step in the scale of the problem: set lr.")


def _check_choice(what: str, value: str, known: Any) -> None:
    if value not in known:
        choices = ", ".join(name or "(nothing)" for name in known)
        raise InputError(f"{what} must be one of {choices}; got {value!r}.{hint(value, known)}")


def _check_positive(record: Any, key: str) -> None:
    value = getattr(record, key)
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise InputError(f"{key} must be positive and finite; got {value:g}.")


def read(path: str | Path, full: bool = False) -> Experiment:
    """Read an experiment from a TOML file."""
    experiment = parsed(read_toml(path))
    if not full:
        return experiment
    cases = tuple(replaced(case, iterations=case.full_iterations or case.iterations) for case in experiment.cases)
    return replaced(experiment, cases=cases, dims=experiment.full_dims or experiment.dims)


def replaced(record: Any, **changes: Any) -> Any:
    """A copy of a record with other values, checked as the first.

    >>> replaced(Contender("vn"), label="Newton").label
    'Newton'
    """
    return type(record)(**{field.name: getattr(record, field.name) for field in fields(record)} | changes)


def parsed(keys: Mapping[str, Any]) -> Experiment:
    """An experiment from plain tables, such as those of a TOML file.

    >>> parsed({"title": "x", "cases": [{"name": "c", "methods": [{"method": "vn"}]}]}).cases[0].methods[0].label
    'vn'
    """
    return _record(Experiment, keys, "the experiment")


_WORDS: dict[Any, str] = {str: "a text", float: "a number", int: "a whole number", bool: "true or false"}


def _record(kind: Any, keys: Any, where: str) -> Any:
    """A dataclass from a table, nested ones included."""
    if not isinstance(keys, Mapping):
        raise InputError(f"{where} must be a table; got {reprlib.repr(keys)}.")
    hinted = get_type_hints(kind)
    for key in keys:
        if key not in hinted:
            raise InputError(f"unknown key {key!r} in {where}.{hint(key, hinted)} The keys are: {', '.join(hinted)}.")
    for field in fields(kind):
        if field.default is MISSING and field.name not in keys:
            raise InputError(f"{where} has no {field.name}.")
    return kind(**{key: _value(key, value, hinted[key], where) for key, value in keys.items()})


def _value(key: str, value: Any, hinted: Any, where: str) -> Any:
    if isinstance(hinted, types.UnionType):
        hinted = next(option for option in get_args(hinted) if option is not type(None))
    if get_origin(hinted) is tuple:
        if not isinstance(value, list | tuple):
            raise InputError(f"{key} of {where} must be a list; got {reprlib.repr(value)}.")
        inner = get_args(hinted)[0]
        return tuple(_value(f"{key}[{index}]", item, inner, where) for index, item in enumerate(value))
    if hinted in (Case, Contender):
        return _record(hinted, value, f"{key} of {where}")
    if hinted is float and type(value) is int:
        return float(whole(key, value))
    if type(value) is not hinted:
        raise InputError(f"{key} of {where} must be {_WORDS[hinted]}; got {reprlib.repr(value)}.")
    return whole(key, value) if hinted is int else value


def to_dict(experiment: Experiment) -> dict[str, Any]:
    """The settings as plain values, for settings.json."""
    return asdict(experiment)
