"""The flags of the command line, those of ``fit`` from its settings; PyTorch is not needed to list them."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn, get_type_hints

from torchngvi import __version__
from torchngvi.app.settings import GONE, WORDS, Settings
from torchngvi.errors import InputError
from torchngvi.messages import hint

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
        told = {name: text for name, text in key.metadata.items() if text}
        fit.add_argument(*flags, dest=key.name, **told, **kinds.get(hints[key.name], {}))
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
