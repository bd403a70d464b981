"""The command line: ``torchngvi fit --data breast_cancer``, ``predict``, ``methods``, ``compare``, ``reproduce``.

Exit codes: 0 converged or done, 1 not converged (all results are written), 2 bad input, or a machine that has too
little memory or cannot read or write a file (nothing is written).
"""

import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torchngvi.app.config import Settings, settings_from
from torchngvi.app.flags import DEBUG, parser
from torchngvi.app.names import FLAT_METHODS, METHODS
from torchngvi.app.toml import read_toml
from torchngvi.errors import InputError, TorchngviError
from torchngvi.extras import install

# what is missing, by the extra that brings it
_EXTRAS = dict.fromkeys(("matplotlib", "numpy", "pandas", "rich", "sklearn"), "cli")
_EXTRAS |= {"formulae": "formula", "pyarrow": "parquet", "gpytorch": "gpytorch", "pyro": "pyro"}

# what a RuntimeError of torch, or of a thread that cannot start, says where memory is used up
_OUT_OF_MEMORY = ("allocate memory", "bad_alloc", "out of memory", "start new thread")
# modules that read input
_READERS = (
    "torchngvi.adapters.table_checks",
    *(
        f"torchngvi.app.{name}"
        for name in (
            "config",
            "toml",
            "datasets",
            "tables",
            "readers",
            "columns",
            "design",
            "encoding",
            "frames",
            "saved",
            "streams",
        )
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0 converged, 1 not converged, 2 bad input or a machine that cannot do it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of columns may be beyond the encoding of a terminal
            stream.reconfigure(errors="backslashreplace")
    try:
        top = parser()
        flags = vars(top.parse_args(argv))
        command = flags.pop("command")
        if command is None:
            top.print_help()
            return 0
        if command != "fit":
            return _COMMANDS[command](**flags)
        config, overwrite = flags.pop("config", None), flags.pop("overwrite", False)
        keys = {**(read_toml(config) if config else {}), **flags}
        return _of_formula(keys, overwrite) if "formula" in flags else _fit(settings_from(keys), overwrite)
    except TorchngviError as error:
        return _refuse(str(error))
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        what = "the command line" if _EXTRAS[missing] == "cli" else "this command"
        return _refuse(f"{missing} is not installed, and {what} needs it: {install(_EXTRAS[missing])}.")
    except Exception as error:  # the last resort: what a parser raises at a file of a stranger is not specified
        sentence = _last_sentence(error)
        if sentence is None or os.environ.get(DEBUG):
            raise
        return _refuse(sentence)


def _last_sentence(error: Exception) -> str | None:
    """For errors of the machine, and for any in reading input, which no check can foresee in full."""
    said = " ".join(str(error).split()) or type(error).__name__
    trace = f"Set {DEBUG}=1 to see where."
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


def _of_formula(flags: dict[str, Any], overwrite: bool) -> int:
    from torchngvi.app import mixed_runs, plain_formulas

    regression = plain_formulas.as_regression(flags)
    if regression is not None:
        return _fit(settings_from(regression), overwrite)
    return _code(mixed_runs.run(flags, overwrite))


def _predict(run: str, table: str, drop: list[str], out: str | None = None, overwrite: bool = False) -> int:
    from torchngvi.app import predictions

    predictions.run(run, table, drop, out, overwrite)
    return 0


def _demo(out: str, quick: bool, overwrite: bool) -> int:
    from torchngvi.app import demo

    demo.run(out, overwrite=overwrite, quick=quick)
    return 0


def _bench(device: str, dims: list[int], rows: int, dtype: str) -> int:
    from torchngvi.app import bench

    bench.run(device, dims, rows, dtype)
    return 0


def _methods() -> int:
    """Which method moves which posteriors, by asking them."""
    from torchngvi.registry import needs_lr, partners

    names = {name: f"{name}, with --lr" if needs_lr(name) else name for name in (*METHODS, *FLAT_METHODS)}
    width = max(map(len, names.values()))
    print("methods (--method), and the posteriors (--posterior) that each moves:")
    for name, shown in names.items():
        print(f"  {shown:{width}}  {', '.join(partners(name))}")
    return 0


def _compare(**flags: Any) -> int:
    from torchngvi.app.compare.comparison import compare

    print(f"written to {compare(**flags)}/")
    return 0


def _reproduce(**flags: Any) -> int:
    """List or run the experiments of the papers, which a clone has and an installation has not."""
    root = Path(__file__).parents[1]
    if not (root / "examples" / "papers" / "reproduce.py").is_file():
        raise InputError(
            "the experiments of the papers are in a clone of torchngvi, and not in what pip has installed. In the "
            f"root of a clone, run python -m examples.papers{' ' + flags['name'] if flags['name'] else ''}."
        )
    sys.path[:] = [str(root), *(path for path in sys.path if path != str(root))]  # before any other "examples"
    papers = import_module("examples.papers.reproduce")
    if flags.pop("list") or flags["name"] is None:
        print(papers.listing())
        return 0
    print(f"written to {papers.reproduce(**flags)}/")
    return 0


_COMMANDS: dict[str, Callable[..., int]] = {
    "predict": _predict,
    "demo": _demo,
    "bench": _bench,
    "methods": _methods,
    "compare": _compare,
    "reproduce": _reproduce,
}


if __name__ == "__main__":
    sys.exit(main())
