"""The command line: ``torchngvi fit --data breast_cancer``, ``predict``, ``compare``, ``reproduce``.

Exit codes: 0 converged or done, 1 not converged (all results are written), 2 bad input, or a machine that has too
little memory or cannot read or write a file (nothing is written).
"""

import io
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torchngvi.app.settings import DEBUG, check_file, check_folder, gone_command, parser, read_toml, settings_from
from torchngvi.errors import InputError, TorchngviError
from torchngvi.messages import install

# what is missing, by the extra that brings it
_EXTRAS = dict.fromkeys(("formulae", "matplotlib", "numpy", "pandas", "rich", "scipy", "sklearn"), "cli")
_EXTRAS |= {"pyarrow": "parquet", "gpytorch": "gpytorch", "pyro": "pyro"}
# what a RuntimeError of torch, or of a thread that cannot start, says where memory is used up
_OUT_OF_MEMORY = ("allocate memory", "bad_alloc", "out of memory", "start new thread")
# modules that read input
_READERS = {f"torchngvi.{name}" for name in ("tables.cells", "app.settings", "app.prepare")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0 converged, 1 not converged, 2 bad input or a machine that cannot do it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of columns may be beyond the encoding of a terminal
            stream.reconfigure(errors="backslashreplace")
    try:
        return _run(sys.argv[1:] if argv is None else argv)
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


def _run(argv: Sequence[str]) -> int:
    """Run a command; the extras are needed behind its flags."""
    gone = gone_command(argv)
    if gone is not None:
        raise InputError(gone)
    top = parser()
    flags = vars(top.parse_args(argv))
    command = flags.pop("command")
    if command is None:
        top.print_help()
        return 0
    if command == "reproduce":
        return _reproduce(**flags)
    if command == "fit":
        config, overwrite = flags.pop("config", None), flags.pop("overwrite")
        settings, remark = settings_from({**(read_toml(config) if config else {}), **flags})
        if remark:
            print(f"torchngvi: warning: {remark}", file=sys.stderr)
        if settings.out:  # before PyTorch is imported, which takes seconds
            check_folder(settings.folder, overwrite=overwrite)
        from torchngvi.app import fits

        result = fits.run(settings, overwrite)
        if not result.converged:
            print(f"torchngvi: not converged, {result.reason}", file=sys.stderr)
        return 0 if result.converged else 1
    if flags.get("out"):
        check_file(Path(flags["out"]), overwrite=flags["overwrite"])
    from torchngvi.app import fits

    (fits.predict if command == "predict" else fits.compare)(**flags)
    return 0


def _last_sentence(error: Exception) -> str | None:
    """For errors of the machine, and for any in reading input, which no check can foresee in full."""
    said = " ".join(str(error).split()) or type(error).__name__
    trace = f"Set {DEBUG}=1 to see where."
    if isinstance(error, MemoryError) or any(sign in said for sign in _OUT_OF_MEMORY):
        return f"there is too little memory ({said}). Use fewer rows or columns. {trace}"
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
    listed = flags.pop("list") or flags["name"] is None
    print(papers.listing() if listed else f"written to {papers.reproduce(**flags)}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
