"""The families of distributions that a host knows, by their words; PyTorch is not needed for them."""

from collections.abc import Mapping

from torchngvi.errors import InputError
from torchngvi.messages import BINOMIAL, SHORT, hint


def family_of(word: object, known: Mapping[str, str], otherwise: str = "") -> str:
    """The library's name of a family, from it or a shorter word.

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
