"""Words for the families of distributions, and questions such as 'Did you mean ..?'; PyTorch is not needed for them."""

import difflib
from collections.abc import Iterable, Mapping

from torchngvi.errors import InputError

# shorter words for a family, and those of other libraries
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


def hint(name: str, known: Iterable[str]) -> str:
    """A question such as 'Did you mean ..?' for a name that is not known.

    Args:
        name: what the user wrote.
        known: the names that there are.

    Returns:
        The question after a space, or an empty text where no name is close.

    >>> hint("famly", ["family", "data"])
    " Did you mean 'family'?"
    """
    names = {k.lower(): k for k in known}
    close = difflib.get_close_matches(str(name).lower(), names, n=1)
    return f" Did you mean {names[close[0]]!r}?" if close else ""


def family_of(word: object, known: Mapping[str, str], otherwise: str = "") -> str:
    """The library's name of a family, from it or a shorter word.

    Args:
        word: what the user wrote.
        known: the words of the families that there are, with their names.
        otherwise: what else may stand in the place of a word, for the message.

    Returns:
        One of the names.

    Raises:
        InputError: another word.

    >>> family_of("negbin", {"poisson": "poisson_log", "negative_binomial": "negative_binomial"})
    'negative_binomial'
    """
    name = SHORT.get(word.lower(), word.lower()) if isinstance(word, str) else ""
    if name not in known.values():
        told = hint(str(word), (*known, *(short for short, of in SHORT.items() if of in known.values())))
        if str(word).lower() == "binomial":
            told = f" {BINOMIAL}" if "bernoulli_logit" in known.values() else ""
        raise InputError(f"family must be one of {', '.join(known)}{otherwise}; got {word!r}.{told}")
    return name
