"""The flags of the command line, named as the keys of a file of settings; PyTorch is not needed to list them."""

import argparse
from collections.abc import Mapping
from typing import Any, NoReturn

from torchngvi import __version__
from torchngvi.app.names import (
    DTYPES,
    FAMILIES,
    FLAT_METHODS,
    FLAT_POSTERIORS,
    METHODS,
    POSTERIORS,
    PRIORS,
    STRUCTURES,
)
from torchngvi.errors import InputError
from torchngvi.messages import SHORT, hint

DEBUG = "TORCHNGVI_DEBUG"  # environment variable; set to anything, an unforeseen stop shows its traceback
_ENVIRONMENT = f"""environment:
  TORCHNGVI_DATA   a folder of data sets, for compare and reproduce
  {DEBUG}  set to 1, the traceback of a stop that no check has foreseen is shown
"""

_EXAMPLES = """examples:
  torchngvi fit --data breast_cancer
  torchngvi fit --data patients.csv --target died --success yes --drop id --impute median
  torchngvi predict runs/patients new_patients.csv
  torchngvi fit --data claims.csv --target claims --likelihood poisson --offset log_exposure
  torchngvi fit configs/breast_cancer.toml --posterior diagonal --out runs/diagonal
  torchngvi fit --data iris --success virginica --posterior precision --structure 1,4 --method iblr
  torchngvi fit --data 'day_*.parquet' --target click --batch-rows 100000
  torchngvi fit --data visits.csv --formula "seizures ~ week + (1 | patient)" --likelihood poisson
"""


class _Parser(argparse.ArgumentParser):
    """Reports a bad flag as every other bad input, in the words of the command that refuses it."""

    of_fit: frozenset[str] = frozenset()  # flags that this command does not have, and fit has
    answers: Mapping[str, str] = {}  # to flags that it does not have, and that one may expect

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As of the base class, but what is left over is refused here, where the command is known."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            flags = [word.partition("=")[0] for word in left if word.startswith("--")]
            others = [flag for flag in flags if flag in self.of_fit]
            told = f" Only torchngvi fit takes {', '.join(others)}." if others else ""
            if flags and not others:
                told = self.answers.get(flags[0]) or hint(flags[0], self._option_string_actions)
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
        description="Natural-gradient variational inference.",
        epilog=_ENVIRONMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"torchngvi {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    fit = commands.add_parser(
        "fit",
        help="fit a Bayesian generalised linear model to a data set",
        description="Fit a Bayesian generalised linear model: q(coefficients) = N(m, V), without tuning.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    fit.add_argument("config", nargs="?", metavar="CONFIG.toml", help="settings; flags override them")
    _add_data_flags(fit.add_argument_group("data"))
    _add_model_flags(fit.add_argument_group("model"))
    _add_method_flags(fit.add_argument_group("method and output"))
    _add_predict(commands)
    commands.add_parser("methods", help="list the methods, and the posteriors that each moves")
    _add_trials(commands)
    _add_experiments(commands)
    for name in ("fit", "predict", "demo", "compare", "reproduce"):
        commands.choices[name].add_argument(
            "--overwrite", action="store_true", help="replace files of an earlier run in the folder"
        )
    for command in commands.choices.values():
        command.of_fit = frozenset(fit._option_string_actions) - frozenset(command._option_string_actions)
    return top


def _add_predict(commands: Any) -> None:
    """The command that uses what a fit has written."""
    predict = commands.add_parser(
        "predict",
        help="predict the rows of a table with an earlier fit",
        description=(
            "Probabilities of two classes, or means of counts and real numbers, with 95% intervals. The table is "
            "prepared as that of the fit was: the same columns, categories, medians and scales."
        ),
    )
    predict.add_argument("run", metavar="RUN", help="the folder that fit has written, such as runs/patients")
    predict.add_argument("table", metavar="TABLE", help="a csv, tsv or parquet file with the columns of the fit")
    predict.add_argument("--drop", metavar="COLUMN", action="append", default=[], help="leave this column out")
    predict.add_argument("--out", metavar="FILE.csv", help="the file of predictions (RUN/predictions-TABLE.csv)")
    predict.answers = {
        "--draws": " A run of --formula predicts with the draws that it has kept, and others need none: leave it out."
    }


def _add_trials(commands: Any) -> None:
    """The commands that try the library on this machine."""
    demo = commands.add_parser(
        "demo",
        help="three uses of the library in two minutes, with one picture",
        description="A training script, a sparse GP and a Pyro model, each beside what one would do without it.",
    )
    demo.add_argument("--out", metavar="DIR", default="runs/demo", help="folder of the picture (runs/demo)")
    demo.add_argument("--quick", action="store_true", help="runs that are 20 times shorter, to try the installation")
    bench = commands.add_parser(
        "bench",
        help="time a step on this machine, beside the products and the factorisation that it needs",
        description="A table: a step, its floor, how often the host waits for the device, and where E_q[H] is.",
    )
    bench.add_argument("--device", metavar="DEVICE", default="cpu", help="cpu, cuda, cuda:1, mps (cpu)")
    bench.add_argument(
        "--dim", dest="dims", type=int, nargs="+", metavar="D", default=[30, 128, 512], help="coefficients (30 128 512)"
    )
    bench.add_argument("--rows", type=int, metavar="N", default=10_000, help="rows (10000)")
    bench.add_argument("--dtype", choices=DTYPES, default="float64", help="(float64)")


def _add_experiments(commands: Any) -> None:
    """The commands that run several methods."""
    compare = commands.add_parser(
        "compare",
        help="run several methods side by side",
        description="Several methods from the same starts: a log, a table and curves with bands over the starts.",
        argument_default=argparse.SUPPRESS,
    )
    compare.add_argument("config", nargs="?", metavar="CONFIG.toml", help="as configs/compare.toml")
    compare.add_argument("--data", metavar="NAME_OR_FILE", help="as for fit, instead of a file of settings")
    compare.add_argument(
        "--methods",
        nargs="+",
        action=_Several,
        metavar="METHOD[=LR]",
        help="vn srvn bwgd=1e-3; without =LR steps are found by trial",
    )
    compare.add_argument("--target", metavar="COLUMN", help="the column to predict")
    compare.add_argument(
        "--success", "--positive", dest="success", metavar="CLASS", help="the class to predict, against all others"
    )
    compare.add_argument(
        "--likelihood", "--family", dest="family", metavar="FAMILY", help="as for fit (bernoulli_logit)"
    )
    _add_parameters(compare)
    compare.add_argument(
        "--prior-precision",
        type=float,
        metavar="B",
        help="of the coefficients' prior N(0, 1/B) (as for fit, which has that of the intercept too)",
    )
    compare.add_argument("--iterations", type=int, metavar="N", help="steps of each run (50)")
    compare.add_argument("--starts", type=int, metavar="N", help="means drawn from N(0, 1) (5)")
    compare.add_argument("--out", metavar="DIR", help="folder of the results (runs/compare)")
    reproduce = commands.add_parser(
        "reproduce",
        help="draw a published figure or table, such as srvn-table3; without a name, list them",
        description="Run an experiment, and write its log and its figure or table. Without a name: list them all.",
    )
    reproduce.add_argument("name", metavar="NAME", nargs="?", help="a name such as srvn-table3, or a TOML file")
    reproduce.add_argument("--list", action="store_true", help="list the names, as without one")
    reproduce.add_argument("--out", metavar="DIR", help="folder of the results (runs/NAME)")
    reproduce.add_argument("--full", action="store_true", help="longer runs, up to an hour")
    reproduce.add_argument("--from-logs", action="store_true", help="draw again from the log of an earlier run")


def _add_data_flags(group: Any) -> None:
    group.add_argument(
        "--data",
        metavar="NAME_OR_FILE",
        help="breast_cancer, diabetes, digits, iris, wine; .csv .tsv .parquet .svm .txt .npz, or a pattern of files",
    )
    group.add_argument(
        "--batch-rows", type=int, metavar="N", help="rows of csv, tsv or Parquet files in memory at once (100000)"
    )
    group.add_argument("--target", metavar="COLUMN", help="the column to predict")
    group.add_argument(
        "--success",
        "--positive",
        dest="success",
        metavar="CLASS",
        help="the class to predict, against all others (of two the one that sorts last)",
    )
    group.add_argument("--weights", metavar="COLUMN", help="row weights")
    group.add_argument("--offset", metavar="COLUMN", help="added to the linear predictor")
    group.add_argument("--drop", metavar="COLUMN", nargs="+", action=_Several, help="columns to leave out")
    group.add_argument(
        "--categorical", metavar="COLUMN", nargs="+", action=_Several, help="columns of numbers that are categories"
    )
    group.add_argument(
        "--impute", metavar="median", help="fill missing numbers with medians, categories with the commonest"
    )
    group.add_argument("--n-features", type=int, metavar="D", help="of a svmlight file with empty last columns")
    boolean = argparse.BooleanOptionalAction
    group.add_argument(
        "--standardize",
        action=boolean,
        help="columns to mean 0 and sd 1 (default); no: a number B is per unit of a column",
    )
    group.add_argument("--intercept", action=boolean, help="add a column of ones (default)")
    group.add_argument(
        "--test-fraction", type=float, metavar="F", help="rows held out, a share (0.2; with --formula 0)"
    )
    group.add_argument("--seed", type=int, metavar="N", help="of the split and of the checks by sampling (42)")


def _add_model_flags(group: Any) -> None:
    group.add_argument(
        "--formula",
        metavar="FORMULA",
        help="a mixed model, 'y ~ x + (1 + x | group)', or without groups a regression, whose columns are taken as "
        "they are: no interactions, no log(x); family gaussian, poisson, ...",
    )
    group.add_argument(
        "--likelihood",
        "--family",
        dest="family",
        metavar="FAMILY",
        help=f"{', '.join(FAMILIES)} (bernoulli_logit, with --formula gaussian); for short {', '.join(SHORT)}",
    )
    group.add_argument(
        "--prior-precision",
        type=_number_or_word,
        metavar="B",
        help="of the coefficients' prior N(0, 1/B); auto: the one that the data speak for; flat (default: N(0, 2.5^2) "
        "per sd of a column, times the sd of y where y is a real number)",
    )
    group.add_argument(
        "--intercept-sd", type=float, metavar="S", help="of the intercept's prior N(0, S^2) (beside a number B: 10)"
    )
    _add_parameters(group)
    group.add_argument("--temperature", type=float, metavar="G", help="weight of KL(q, prior) (1)")


def _add_parameters(group: Any) -> None:
    """Those of the likelihoods."""
    group.add_argument("--noise", type=float, metavar="S", help="sd of the gaussian family, or scale of student_t")
    group.add_argument("--dispersion", type=float, metavar="R", help="of negative_binomial: variance mean + mean^2/R")
    group.add_argument("--dof", type=float, metavar="NU", help="degrees of freedom of student_t (4)")


def _number_or_word(text: str) -> float | str:
    try:
        return text if text in PRIORS else float(text)
    except ValueError as error:
        words = f"{', '.join(PRIORS[:-1])} or {PRIORS[-1]}"
        raise argparse.ArgumentTypeError(f"invalid value: {text!r}; give a number, {words}") from error


def _add_method_flags(group: Any) -> None:
    group.add_argument("--method", metavar="METHOD", help=f"{', '.join((*METHODS, *FLAT_METHODS))} (vn)")
    kinds = ", ".join((*POSTERIORS, *FLAT_POSTERIORS))
    group.add_argument("--posterior", metavar="KIND", help=f"{kinds} (cholesky)")
    shapes = f"of the covariance: {', '.join(STRUCTURES)}, or the sizes of blocks such as 1,4,2; for groups, --formula"
    group.add_argument("--structure", metavar="PATTERN", help=f"{shapes} (that of the posterior)")
    group.add_argument(
        "--lr",
        type=float,
        metavar="X",
        help="constant step size; without it found by trial, or the method's own",
    )
    group.add_argument("--tolerance", type=float, metavar="T", help="on the natural-gradient norm (1e-5)")
    group.add_argument("--max-evaluations", type=int, metavar="N", help="budget (1000)")
    group.add_argument("--dtype", metavar="DTYPE", help=f"{', '.join(DTYPES)} (float64)")
    group.add_argument("--device", metavar="DEVICE", help="on which to fit: cpu, cuda, cuda:1, mps (cpu)")
    group.add_argument("--out", metavar="DIR", help="folder of the results (runs/NAME)")
    group.add_argument("--progress", action=argparse.BooleanOptionalAction, help="show a bar (default)")
