"""The settings of ``torchngvi fit``, from a TOML file and from flags: one frozen record, checked when it is made.

PyTorch is not needed for them.
"""

import argparse
import json
import math
import os
import re
import reprlib
import secrets
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from torchngvi import __version__
from torchngvi.errors import InputError
from torchngvi.messages import hint

WRITING = ".writing-"
LEFT = re.compile(rf"{re.escape(WRITING)}([0-9a-f]{{16}}|[a-z0-9_]{{8}})")  # and as version 0.2.0 wrote
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
    remark = (
        f"{', '.join(gone)} {'does' if len(gone) == 1 else 'do'} nothing any more: "
        f"{'; '.join(dict.fromkeys(GONE[key] for key in gone))}. For a method and a posterior of your choice call "
        "torchngvi.fit(q, torchngvi.GeneralizedLinear(X, y, family)) in Python."
    )
    return settings, remark if gone else ""


def whole(key: str, value: int, largest: int = 2**63) -> int:
    """A whole number, after a check that it has a place in 64 bits."""
    if abs(value) >= largest:
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


def check_folder(folder: Path, *, overwrite: bool) -> Path:
    """Return a folder for the results of a run: new, empty or to be overwritten, where files can be written."""
    folder = Path(file_name("out", str(folder)))
    check_writable(folder)
    if not overwrite and is_taken(folder):
        raise InputError(
            f"out must be a new or an empty folder, so that no earlier results are lost; {str(folder)!r} holds "
            "files. Say --overwrite to replace them, or choose another folder (--out)."
        )
    return folder


def check_writable(folder: Path) -> None:
    """Check that a folder can be written into, and that no link leads to it which the caller has named."""
    here = Path.cwd()  # above an absolute path the links of the system are followed
    above = (path for path in folder.parents if not folder.is_absolute() or here in path.parents)
    link = next((path for path in (folder, *above) if path.is_symlink()), None)
    if link is not None:
        raise InputError(
            f"out must be a folder itself, as links are not followed; {str(link)!r} is a link to "
            f"{os.readlink(link)!r}. Name that folder (--out)."
        )
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise InputError(f"out must be a folder; {str(existing)!r} is a file. Choose another name (--out).")
    begins = "" if existing == folder else beside(folder)
    try:
        trial = existing / f"{begins}{WRITING}{secrets.token_hex(8)}"
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        raise InputError(
            f"out must be a folder where files can be written; in {str(existing)!r} none can ({error}). "
            "Choose another folder (--out)."
        ) from error


def check_file(path: Path, *, overwrite: bool) -> None:
    """Check that a file for predictions is a new one, or one to be overwritten."""
    file_name("out", str(path))
    if path.is_dir() or (path.exists() and not overwrite):
        what = "a folder. Name" if path.is_dir() else "there already. Say --overwrite to replace it, or name"
        raise InputError(f"{str(path)!r} is {what} another file (--out).")


def is_taken(folder: Path) -> bool:
    """Whether a folder holds files, those apart that a killed run has left."""
    return folder.exists() and any(not LEFT.fullmatch(path.name) for path in folder.iterdir())


def beside(folder: Path) -> str:
    """How the names of the places beside a folder begin; names may have 255 bytes."""
    return f".{folder.name.encode()[:200].decode(errors='ignore')}"


def read_toml(path: str | Path, longest: int = 60_000) -> dict[str, Any]:
    """Read the keys of a TOML file."""
    # longest: bytes of a file of settings
    file_name("CONFIG.toml", str(path))
    try:
        with Path(path).open("rb") as file:
            content = file.read(longest + 1)
        if len(content) <= longest:
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
        f"a file of settings has at most {longest} bytes, and {str(path)!r} has more. For a data file say --data FILE."
    )


# -------------------------------------------------------------------------------- the flags of the command line


DEBUG = "TORCHNGVI_DEBUG"  # environment variable; set to anything, an unforeseen stop shows its traceback
_EXAMPLES = """examples:
  torchngvi fit --data breast_cancer
  torchngvi fit --data patients.csv --target died --success yes --drop id --impute median
  torchngvi predict runs/patients new_patients.csv
  torchngvi fit --data claims.csv --target claims --likelihood poisson --offset log_exposure
  torchngvi fit --data visits.csv --formula "seizures ~ week + (1 | patient)" --likelihood poisson
  torchngvi fit configs/breast_cancer.toml --prior "mean radius=normal(0, 1)" --out runs/narrow
  torchngvi compare runs/poisson runs/negbin
"""
_OTHER_NAMES = {"family": ("--likelihood", "--family"), "success": ("--success", "--positive")}
_GONE = {  # commands of earlier versions, and what is in their place
    "bench": "torchngvi bench is python -m benchmarks.bench in a clone now.",
    "demo": "torchngvi demo has gone: run examples/training_script.py or another of the examples in a clone.",
    "methods": "torchngvi methods has gone: torchngvi.registry.partners(method) names the posteriors it moves.",
}


class _Parser(argparse.ArgumentParser):
    """Reports a bad flag as every other bad input, in the words of the command that refuses it."""

    of_fit: frozenset[str] = frozenset()  # flags that this command does not have, and fit has

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As of the base class, but what is left over is refused here, where the command is known."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            flags = [word.partition("=")[0] for word in left if word.startswith("--")]
            others = [flag for flag in flags if flag in self.of_fit]
            advice = f" Only torchngvi fit takes {', '.join(others)}." if others else ""
            advice = hint(flags[0], self._option_string_actions) if flags and not advice else advice
            raise InputError(f"unrecognized arguments: {' '.join(left)}.{advice} See {self.prog} --help.")
        return found, left

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}. See {self.prog} --help.")


class _Several(argparse.Action):
    """Gathers the values of all uses of an option; a file of settings behind them is not one of them."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if values[-1].lower().endswith(".toml") and getattr(namespace, "config", None) is None:
            namespace.config = values.pop()
            if not values:
                parser.error(f"argument {option}: expected at least one argument before {namespace.config}")
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), *values])


def _number_or_word(text: str) -> float | str:
    try:
        return text if text in WORDS else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"invalid value: {text!r}; give a number, {' or '.join(WORDS)}") from error


def parser() -> argparse.ArgumentParser:
    """Flags named as the keys of the TOML file; what is not given is not set."""
    top = _Parser(
        prog="torchngvi",
        description="Bayesian regressions and mixed models of tables.",
        epilog=f"With {DEBUG}=1 in the environment a stop that no check has foreseen shows its traceback.",
    )
    top.add_argument("--version", action="version", version=f"torchngvi {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    fit = commands.add_parser(
        "fit",
        help="fit a regression or a mixed model to a table",
        description="Fit a Bayesian regression or mixed model to a table: coefficients with intervals, without tuning.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    fit.add_argument("config", nargs="?", metavar="CONFIG.toml", help="settings; flags override them")
    hints = get_type_hints(Settings)
    for key in fields(Settings):
        flags = _OTHER_NAMES.get(key.name, (f"--{key.name.replace('_', '-')}",))
        kinds: dict[Any, dict[str, Any]] = {
            bool: {"action": argparse.BooleanOptionalAction},
            int: {"type": int},
            int | None: {"type": int},
            float | None: {"type": float},
            float | str | None: {"type": _number_or_word},
            tuple[str, ...]: {"action": "append"} if key.name == "prior" else {"nargs": "+", "action": _Several},
        }
        advice = {name: text for name, text in key.metadata.items() if text}
        fit.add_argument(*flags, dest=key.name, **advice, **kinds.get(hints[key.name], {}))
    for name in GONE:
        fit.add_argument(f"--{name.replace('_', '-')}", help=argparse.SUPPRESS)
    predict = commands.add_parser(
        "predict", help="predict the rows of a table with an earlier fit", argument_default=argparse.SUPPRESS
    )
    predict.add_argument("run", metavar="RUN", help="the folder that fit has written, such as runs/patients")
    predict.add_argument("table", metavar="TABLE", help="a file with the columns of the fit")
    predict.add_argument("--drop", metavar="COLUMN", nargs="+", action="extend", help="leave this column out")
    predict.add_argument("--out", metavar="FILE.csv", help="the file of predictions (RUN/predictions-TABLE.csv)")
    predict.add_argument("--kind", choices=("mean", "linear", "response"), help="what is predicted (mean)")
    predict.add_argument("--interval", type=float, metavar="P", help="probability of the intervals (0.95)")
    predict.add_argument("--population", action="store_true", help="of a new group, whatever the groups of the rows")
    compare = commands.add_parser("compare", help="compare the models of earlier fits of one table by leave-one-out")
    compare.add_argument("runs", metavar="RUN", nargs="+", help="folders that fit has written")
    reproduce = commands.add_parser("reproduce", help="draw a published figure or table; without a name, list them")
    reproduce.add_argument("name", metavar="NAME", nargs="?", help="a name such as srvn-table3, or a TOML file")
    reproduce.add_argument("--list", action="store_true", help="list the names, as without one")
    reproduce.add_argument("--out", metavar="DIR", help="folder of the results (runs/NAME)")
    reproduce.add_argument("--full", action="store_true", help="longer runs, up to an hour")
    reproduce.add_argument("--from-logs", action="store_true", help="draw again from the log of an earlier run")
    replace = "replace files of an earlier run"
    for name in ("fit", "predict", "reproduce"):
        commands.choices[name].add_argument("--overwrite", action="store_true", default=False, help=replace)
    for command in commands.choices.values():
        command.of_fit = frozenset(fit._option_string_actions) - frozenset(command._option_string_actions)
    return top


def gone_command(argv: Sequence[str]) -> str | None:
    """A sentence about a command of earlier versions, which is elsewhere now."""
    rest = " ".join(argv[1:])
    if argv and argv[0] == "compare" and (rest.endswith(".toml") or {"--data", "--methods"} & {*argv}):
        return f"methods are compared in a clone now: python -m examples.compare_methods {rest}. Of runs name folders."
    return _GONE.get(argv[0]) if argv else None
