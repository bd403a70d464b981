"""How to install an extra of this package, said so that it is true of an installed wheel and of a source tree."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """A block of imports, in which a package that is not installed is named with the extra that brings it.

    >>> with needing("a test", "cli"):  # doctest: +ELLIPSIS
    ...     import no_such_package
    Traceback (most recent call last):
    ImportError: a test needs no_such_package: pip install ...
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing == "torchngvi" or missing in sys.stdlib_module_names:
            raise
        raise ImportError(f"{what} needs {missing}: {install(extra)}.", name=missing) from error


def install(extra: str) -> str:
    """The command that installs an extra."""
    root = Path(__file__).resolve().parent.parent
    if not _is_source(root):
        return f"pip install 'torchngvi[{extra}]'"
    place = "." if root == Path.cwd().resolve() else str(root)
    return f"pip install -e '{place}[{extra}]'"


def _is_source(root: Path) -> bool:
    """Whether a folder is a source tree of this package."""
    project = root / "setup.cfg"
    return project.is_file() and "name = torchngvi\n" in project.read_text(encoding="utf-8")
