"""The command line: ``torchngvi fit CONFIG.toml``, ``torchngvi fit --data breast_cancer``, ``compare``, ``reproduce``.

Exit codes: 0 converged or done, 1 not converged (all results are written), 2 bad input, or a machine that has too
little memory or cannot read or write a file (nothing is written).
"""

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

from torchngvi import __version__
from torchngvi.app.config import DTYPES, Settings, hint, read_toml, settings_from
from torchngvi.errors import InputError, TorchngviError
from torchngvi.models.likelihoods import FAMILIES
from torchngvi.registry import FLAT_METHODS, FLAT_POSTERIORS, METHODS, POSTERIORS, STRUCTURES, needs_lr, partners

_EXTRAS = ("formulae", "matplotlib", "numpy", "pandas", "pyarrow", "rich", "sklearn")

_FLAGS = ("--overwrite", "--formula", *("--" + field.name.replace("_", "-") for field in fields(Settings)))
_DEBUG = "TORCHNGVI_DEBUG"  # environment variable; set to anything, an unforeseen stop shows its traceback
_ENVIRONMENT = f"""environment:
  TORCHNGVI_DATA   a folder of data sets, for compare and reproduce
  {_DEBUG}  set to 1, the traceback of a stop that no check has foreseen is shown
"""
# what a RuntimeError of torch, or of a thread that cannot start, says where memory is used up
_OUT_OF_MEMORY = ("allocate memory", "bad_alloc", "out of memory", "start new thread")
# modules that read input
_READERS = tuple(
    f"torchngvi.app.{name}" for name in ("config", "datasets", "tables", "readers", "columns", "design", "streams")
)

_EXAMPLES = """examples:
  torchngvi fit --data breast_cancer
  torchngvi fit --data patients.csv --target died --success yes --drop id
  torchngvi fit --data claims.csv --target claims --family poisson_log --offset log_exposure
  torchngvi fit configs/breast_cancer.toml --posterior diagonal --out runs/diagonal
  torchngvi fit --data iris --success virginica --posterior precision --structure 1,4 --method iblr
  torchngvi fit --data 'day_*.parquet' --target click --batch-rows 100000
  torchngvi fit --data visits.csv --formula "seizures ~ week + (1 | patient)" --family poisson
"""


def _fit_epilog() -> str:
    """Which method moves which posteriors, by asking them, and examples."""
    names = {name: f"{name}, with --lr" if needs_lr(name) else name for name in (*METHODS, *FLAT_METHODS)}
    width = max(map(len, names.values()))
    lines = (f"  {shown:{width}}  {', '.join(partners(name))}" for name, shown in names.items())
    return "\n".join(("methods, and the posteriors that each moves:", *lines, "", _EXAMPLES))


class _Parser(argparse.ArgumentParser):
    """Reports a bad flag as every other bad input."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: --"):
            close = hint(message.split()[2].partition("=")[0], _FLAGS)
            raise InputError(f"{message}.{close} See {self.prog} fit --help.")
        raise InputError(f"{message}. See {self.prog} --help.")

    def format_help(self) -> str:
        """The help; an epilog that takes time to be written is a function, called here alone."""
        if callable(self.epilog):
            self.epilog = self.epilog()
        return super().format_help()


def parser() -> argparse.ArgumentParser:
    """Flags named as the keys of the TOML file; what is not given is not set."""
    top = _Parser(
        prog="torchngvi",
        description="Natural-gradient variational inference.",
        epilog=_ENVIRONMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"torchngvi {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    fit = commands.add_parser(
        "fit",
        help="fit a Bayesian generalised linear model to a data set",
        description="Fit a Bayesian generalised linear model: q(coefficients) = N(m, V), without tuning.",
        epilog=_fit_epilog,  # type: ignore[arg-type]  # see format_help
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    fit.add_argument("config", nargs="?", metavar="CONFIG.toml", help="settings; flags override them")
    _add_data_flags(fit.add_argument_group("data"))
    _add_model_flags(fit.add_argument_group("model"))
    _add_method_flags(fit.add_argument_group("method and output"))
    _add_experiments(commands)
    for command in commands.choices.values():
        command.add_argument("--overwrite", action="store_true", help="replace files of an earlier run in the folder")
    return top


def _add_experiments(commands: Any) -> None:
    """The commands that run several methods."""
    compare = commands.add_parser(
        "compare",
        help="run several methods side by side",
        description="Several methods from the same starts: a log, a table and curves with bands over the starts.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    compare.add_argument("config", nargs="?", metavar="CONFIG.toml", help="as configs/compare.toml")
    compare.add_argument("--data", metavar="NAME_OR_FILE", help="as for fit, instead of a file of settings")
    compare.add_argument(
        "--methods", nargs="+", metavar="METHOD[=LR]", help="vn srvn bwgd=1e-3; without =LR steps are found by trial"
    )
    compare.add_argument("--target", metavar="COLUMN", help="the column to predict")
    compare.add_argument("--success", metavar="CLASS", help="the class to predict, against all others")
    compare.add_argument("--family", metavar="FAMILY", help="bernoulli_logit")
    compare.add_argument(
        "--prior-precision", type=float, metavar="B", help="of the coefficients' prior N(0, 1/B) (0.1)"
    )
    compare.add_argument("--iterations", type=int, metavar="N", help="steps of each run (50)")
    compare.add_argument("--starts", type=int, metavar="N", help="means drawn from N(0, 1) (5)")
    compare.add_argument("--out", metavar="DIR", help="folder of the results (runs/compare)")
    reproduce = commands.add_parser(
        "reproduce",
        help="draw a published figure or table: srvn-table3, srvn-fig1 .. srvn-fig11",
        description="Run an experiment of configs/, and write its log and its figure or table.",
        allow_abbrev=False,
    )
    reproduce.add_argument("name", metavar="NAME", help="a name in configs/, such as srvn-table3, or a TOML file")
    reproduce.add_argument("--out", metavar="DIR", help="folder of the results (runs/NAME)")
    reproduce.add_argument("--full", action="store_true", help="longer runs, up to an hour")
    reproduce.add_argument("--from-logs", action="store_true", help="draw again from the log of an earlier run")


def _add_data_flags(group: Any) -> None:
    group.add_argument(
        "--data",
        metavar="NAME_OR_FILE",
        help="breast_cancer, diabetes, digits, iris, wine; .csv .tsv .svm .txt .npz .parquet, or a pattern of files",
    )
    group.add_argument(
        "--batch-rows", type=int, metavar="N", help="rows of csv, tsv or Parquet files in memory at once (100000)"
    )
    group.add_argument("--target", metavar="COLUMN", help="the column to predict")
    group.add_argument("--success", metavar="CLASS", help="the class to predict, against all others")
    group.add_argument("--weights", metavar="COLUMN", help="row weights")
    group.add_argument("--offset", metavar="COLUMN", help="added to the linear predictor")
    group.add_argument("--drop", metavar="COLUMN", action="append", help="leave this column out (may be repeated)")
    group.add_argument("--n-features", type=int, metavar="D", help="of a svmlight file with empty last columns")
    boolean = argparse.BooleanOptionalAction
    group.add_argument("--standardize", action=boolean, help="columns to mean 0 and sd 1 (default)")
    group.add_argument("--intercept", action=boolean, help="add a column of ones (default)")
    group.add_argument("--test-fraction", type=float, metavar="F", help="share of rows held out (0.2)")
    group.add_argument("--seed", type=int, metavar="N", help="of the split and of the checks by sampling (42)")


def _add_model_flags(group: Any) -> None:
    group.add_argument(
        "--formula", metavar="FORMULA", help="a mixed model, 'y ~ x + (1 + x | group)'; family gaussian, poisson, ..."
    )
    group.add_argument("--family", metavar="FAMILY", help=f"{', '.join(FAMILIES)} (bernoulli_logit)")
    group.add_argument("--prior-precision", type=float, metavar="B", help="of the coefficients' prior N(0, 1/B)")
    group.add_argument("--noise", type=float, metavar="S", help="standard deviation of the gaussian family")
    group.add_argument("--temperature", type=float, metavar="G", help="weight of KL(q, prior) (1)")


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
    group.add_argument("--out", metavar="DIR", help="folder of the results (runs/NAME)")
    group.add_argument("--progress", action=argparse.BooleanOptionalAction, help="show a bar (default)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0 converged, 1 not converged, 2 bad input or a machine that cannot do it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of columns may be beyond the encoding of a terminal
            stream.reconfigure(errors="backslashreplace")
    try:
        flags = vars(parser().parse_args(argv))
        command = flags.pop("command")
        if command != "fit":
            return _experiment(command, flags)
        config, overwrite = flags.pop("config", None), flags.pop("overwrite", False)
        if "formula" in flags:
            return _mixed({**(read_toml(config) if config else {}), **flags}, overwrite)
        return _fit(settings_from({**(read_toml(config) if config else {}), **flags}), overwrite)
    except TorchngviError as error:
        return _refuse(str(error))
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        extra = {"formulae": "formula", "pyarrow": "parquet"}.get(missing, "cli")
        return _refuse(f"{missing} is not installed, and the command line needs it: pip install 'torchngvi[{extra}]'.")
    except Exception as error:  # the last resort: what a parser raises at a file of a stranger is not specified
        sentence = _last_sentence(error)
        if sentence is None or os.environ.get(_DEBUG):
            raise
        return _refuse(sentence)


def _last_sentence(error: Exception) -> str | None:
    """For errors of the machine, and for any in reading input, which no check can foresee in full.

    None for all others, which are faults of the library.
    """
    said = " ".join(str(error).split()) or type(error).__name__
    trace = f"Set {_DEBUG}=1 to see where."
    if isinstance(error, MemoryError) or any(sign in said for sign in _OUT_OF_MEMORY):
        return f"there is too little memory ({said}). Use fewer rows or columns, or posterior diagonal. {trace}"
    if isinstance(error, RecursionError):
        return f"the input is nested too deeply ({said}). Write it flat. {trace}"
    if isinstance(error, OSError):
        return f"a file cannot be read or written ({said}). Check its name, its permissions and the disk. {trace}"
    if any(frame.f_globals.get("__name__") in _READERS for frame, _ in traceback.walk_tb(error.__traceback__)):
        return f"the input cannot be read ({type(error).__name__}: {said}). Check the data and the settings. {trace}"
    return None


def _refuse(message: str) -> int:
    print(f"torchngvi: error: {message}", file=sys.stderr)
    return 2


def _fit(settings: Settings, overwrite: bool) -> int:
    from torchngvi.app import problems, results, runs, streamed_runs  # the extras are needed from here on

    if streamed_runs.in_batches(settings):
        return _code(streamed_runs.run(settings, overwrite))
    outcome = runs.run(problems.build(settings, overwrite=overwrite))
    folder = None
    try:
        folder = results.write(outcome)
    finally:
        results.show(outcome, folder)  # also where nothing could be written, so that the fit is not lost
    return _code(outcome.result)


def _code(result: Any) -> int:
    """The exit code of a fit, which says so where it has not converged."""
    if not result.converged:
        print(f"torchngvi: not converged, {result.reason}", file=sys.stderr)
    return 0 if result.converged else 1


def _mixed(flags: dict[str, Any], overwrite: bool) -> int:
    from torchngvi.app import mixed_runs

    return _code(mixed_runs.run(flags, overwrite))


def _experiment(command: str, flags: dict[str, Any]) -> int:
    from torchngvi.studies import reproduce

    folder = reproduce.reproduce(**flags) if command == "reproduce" else reproduce.compare(**flags)
    print(f"written to {folder}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
