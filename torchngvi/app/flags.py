"""The flags of the command line, named as the keys of a file of settings; PyTorch is not needed to list them."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from torchngvi import __version__
from torchngvi.app.settings import GONE, WORDS
from torchngvi.errors import InputError
from torchngvi.messages import hint

DEBUG = "TORCHNGVI_DEBUG"  # environment variable; set to anything, an unforeseen stop shows its traceback
FAMILIES = (
    "bernoulli, probit, binomial, poisson, negative_binomial, gaussian, student_t, ordinal, beta, gamma and others of "
    "torchngvi.tables (bernoulli, with --formula gaussian)"
)
_EXAMPLES = """examples:
  torchngvi fit --data breast_cancer
  torchngvi fit --data patients.csv --target died --success yes --drop id --impute median
  torchngvi predict runs/patients new_patients.csv
  torchngvi fit --data claims.csv --target claims --likelihood poisson --offset log_exposure
  torchngvi fit --data visits.csv --formula "seizures ~ week + (1 | patient)" --likelihood poisson
  torchngvi fit configs/breast_cancer.toml --prior "mean radius=normal(0, 1)" --out runs/narrow
  torchngvi compare runs/poisson runs/negbin
"""
_DATA = {  # flag: what stands for its value, and what it is
    "target": ("COLUMN", "the column to predict, from all others"),
    "formula": ("FORMULA", "what is predicted from what: 'y ~ x*z + (1 + x | group)'"),
    "weights": ("COLUMN", "row weights"),
    "offset": ("COLUMN", "added to the linear predictor"),
    "impute": ("median", "fill missing numbers with medians, categories with the commonest"),
}
_SEVERAL = {
    "drop": "columns to leave out",
    "categorical": "columns of numbers that are categories",
    "marginal": "columns whose average marginal effects are reported",
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
            told = f" Only torchngvi fit takes {', '.join(others)}." if others else ""
            told = hint(flags[0], self._option_string_actions) if flags and not told else told
            raise InputError(f"unrecognized arguments: {' '.join(left)}.{told} See {self.prog} --help.")
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
    _add_fit(fit)
    predict = commands.add_parser(
        "predict",
        help="predict the rows of a table with an earlier fit",
        description="Probabilities or means with intervals; the table is prepared as that of the fit was.",
        argument_default=argparse.SUPPRESS,
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
    reproduce = commands.add_parser(
        "reproduce", help="draw a published figure or table, such as srvn-table3; without a name, list them"
    )
    reproduce.add_argument("name", metavar="NAME", nargs="?", help="a name such as srvn-table3, or a TOML file")
    reproduce.add_argument("--list", action="store_true", help="list the names, as without one")
    reproduce.add_argument("--out", metavar="DIR", help="folder of the results (runs/NAME)")
    reproduce.add_argument("--full", action="store_true", help="longer runs, up to an hour")
    reproduce.add_argument("--from-logs", action="store_true", help="draw again from the log of an earlier run")
    for name in ("fit", "predict", "reproduce"):
        commands.choices[name].add_argument(
            "--overwrite", action="store_true", default=False, help="replace files of an earlier run in the folder"
        )
    for command in commands.choices.values():
        command.of_fit = frozenset(fit._option_string_actions) - frozenset(command._option_string_actions)
    return top


def _add_fit(fit: argparse.ArgumentParser) -> None:
    """The flags of ``fit``, and those of earlier versions that do nothing any more."""
    fit.add_argument("config", nargs="?", metavar="CONFIG.toml", help="settings; flags override them")
    group = fit.add_argument_group("data")
    kinds = "breast_cancer, diabetes, digits, iris, wine; .csv .tsv .xlsx .parquet .svm, each compressed or not"
    group.add_argument("--data", metavar="NAME_OR_FILE", help=kinds)
    for name, (value, what) in _DATA.items():
        group.add_argument(f"--{name}", metavar=value, help=what)
    classes = "the class to predict, against all others (of two the one that sorts last)"
    group.add_argument("--success", "--positive", dest="success", metavar="CLASS", help=classes)
    for name, what in _SEVERAL.items():
        group.add_argument(f"--{name}", metavar="COLUMN", nargs="+", action=_Several, help=what)
    group.add_argument("--intercept", action=argparse.BooleanOptionalAction, help="add a column of ones (default)")
    group.add_argument("--test-fraction", type=float, metavar="F", help="rows held out (0.2; with --formula 0)")
    group.add_argument("--draws", type=int, metavar="N", help="weighted draws of the posterior (4096, of groups 400)")
    group.add_argument("--seed", type=int, metavar="N", help="of the split and of the draws (42)")
    group = fit.add_argument_group("model")
    group.add_argument("--likelihood", "--family", dest="family", metavar="FAMILY", help=FAMILIES)
    what = "of one coefficient or parameter, 'x=normal(0, 1)', 'sd=half_t(3, 1)'; may be given several times"
    group.add_argument("--prior", metavar="NAME=PRIOR", action="append", help=what)
    what = "N(0, 1/B) of each coefficient, per sd of its column; auto: the B that the data speak for; flat"
    group.add_argument("--prior-precision", type=_number_or_word, metavar="B", help=f"{what} (the default priors)")
    group.add_argument("--intercept-sd", type=float, metavar="S", help="of the intercept's N(0, S^2) beside a B (10)")
    what = "a number B is per sd of a column (default); no: per unit of it"
    group.add_argument("--standardize", action=argparse.BooleanOptionalAction, help=what)
    group = fit.add_argument_group("output")
    group.add_argument("--out", metavar="DIR", help="folder of the results (runs/NAME)")
    group.add_argument("--progress", action=argparse.BooleanOptionalAction, help="show a bar (default)")
    for name in GONE:
        fit.add_argument(f"--{name.replace('_', '-')}", help=argparse.SUPPRESS)


def _number_or_word(text: str) -> float | str:
    try:
        return text if text in WORDS else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"invalid value: {text!r}; give a number, {' or '.join(WORDS)}") from error


def gone_command(argv: Sequence[str]) -> str | None:
    """A sentence about a command of earlier versions, which is elsewhere now.

    >>> gone_command(["bench"])[:60]
    'torchngvi bench is python -m examples.bench in a clone now.'
    """
    rest = " ".join(argv[1:])
    found = {
        "bench": "torchngvi bench is python -m examples.bench in a clone now.",
        "demo": "torchngvi demo is python -m examples.demo in a clone now.",
        "methods": "torchngvi methods has gone: torchngvi.registry.partners(method) names the posteriors it moves.",
    }
    if argv and argv[0] == "compare" and (rest.endswith(".toml") or "--data" in argv or "--methods" in argv):
        return f"methods are compared in a clone now: python -m examples.compare_methods {rest}. Of runs name folders."
    return found.get(argv[0]) if argv else None
