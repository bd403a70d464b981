"""Parts of messages, words for families, and how to install an extra; PyTorch is not needed for them."""

import difflib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

# Parts of messages: numbers, lists of names, questions such as 'Did you mean ..?'; they do not need PyTorch

SHOWN = 20  # names in a message at most


def shown(value: float) -> str:
    """A number as all tables print it: four significant digits whatever its size, and no exponent in usual units.

    >>> [shown(value) for value in (0.000966, 24.6667, 31234.5, 2.5e9, math.inf)]
    ['0.000966', '24.67', '31234', '2.5e+09', 'beyond 1e308']
    """
    size = abs(value)
    if math.isinf(size):
        return "beyond 1e308" if value > 0 else "below -1e308"
    return f"{value:.0f}" if 9999.5 <= size < 999999.5 else f"{value:.4g}"


def listed(names: Sequence[str]) -> str:
    """Names for a message, not more than can be read.

    >>> listed(["a", "b"])
    'a, b'
    >>> listed([f"x{n}" for n in range(30)])[-19:]
    'x19, .. (30 in all)'
    """
    return ", ".join(map(str, names[:SHOWN])) + (f", .. ({len(names)} in all)" if len(names) > SHOWN else "")


def hint(name: str, known: Iterable[str], meant: Mapping[str, str] = MappingProxyType({})) -> str:
    """A question such as 'Did you mean ..?' for a name that is not known.

    >>> hint("famly", ["family", "data"])
    " Did you mean 'family'?"
    >>> hint("studentt", ["gaussian", "student_t"], {"student_t": "StudentT(scale, dof)"})
    ' Did you mean StudentT(scale, dof)?'
    """
    names = {k.lower(): k for k in known}
    close = difflib.get_close_matches(str(name).lower(), names, n=1)
    return f" Did you mean {meant.get(names[close[0]], repr(names[close[0]]))}?" if close else ""


# Shorter words for the families of distributions, and those of other libraries; PyTorch is not needed for them

SHORT = {
    "bernoulli": "bernoulli_logit",
    "logistic": "bernoulli_logit",
    "logit": "bernoulli_logit",
    "probit": "bernoulli_probit",
    "poisson": "poisson_log",
    "normal": "gaussian",
    "negbin": "negative_binomial",
    "nb": "negative_binomial",
    "student": "student_t",
    "t": "student_t",
}
BINOMIAL = "For two classes say bernoulli; for counts of events poisson, or negative_binomial."


def full_name(word: str) -> str:
    """The name of the family that a short word stands for; another word as it is.

    >>> full_name("Logistic"), full_name("gaussian"), full_name("poison")
    ('bernoulli_logit', 'gaussian', 'poison')
    """
    return SHORT.get(word.lower(), word)


# ------------------------------------------------------------------------------------ extras


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
    project = root / "setup.cfg"
    if not (project.is_file() and "name = torchngvi\n" in project.read_text(encoding="utf-8")):
        return f"pip install 'torchngvi[{extra}]'"
    place = "." if root == Path.cwd().resolve() else str(root)
    return f"pip install -e '{place}[{extra}]'"
