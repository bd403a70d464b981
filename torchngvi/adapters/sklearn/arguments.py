"""Arguments of the estimators, after a check: numbers, numbers of draws, and seeds by scikit-learn's convention."""

from numbers import Integral

import numpy as np
import torch

from torchngvi.arguments import is_number, is_size, shown
from torchngvi.errors import InputError

RandomState = int | np.random.RandomState | None  # by scikit-learn's convention, see `seed_of`


def is_positive(value: object) -> bool:
    """Whether this is a number, finite and larger than 0.

    >>> is_positive(0.5), is_positive(True), is_positive("a")
    (True, False, False)
    """
    return is_number(value, above=0)


def check_sd(name: str, value: object) -> None:
    """Check the standard deviation of a prior.

    Raises:
        InputError: neither a positive number nor None.

    >>> check_sd("prior_sd", None)
    """
    if value is not None and not is_positive(value):
        raise InputError(f"{name} is a standard deviation, positive, or None; got {value!r}.")


def checked_count(n_samples: object) -> int:
    """The number of draws, after a check.

    Raises:
        InputError: anything but a whole number that is not negative.

    >>> checked_count(3)
    3
    """
    if not is_size(n_samples, at_least=0):
        raise InputError(f"n_samples is a number of draws; got {shown(n_samples)}.")
    return int(n_samples)  # type: ignore[call-overload]


def seed_of(random_state: RandomState) -> int:
    """A seed, by scikit-learn's convention for ``random_state``.

    Args:
        random_state: a whole number, which is the seed; a ``RandomState`` of NumPy, from which it is drawn; or None,
            for a fresh one from the entropy of the system.

    Returns:
        The seed.

    Raises:
        InputError: anything else.

    >>> seed_of(3), seed_of(np.random.RandomState(0)) == seed_of(np.random.RandomState(0))
    (3, True)
    """
    if random_state is None:
        return int(np.random.SeedSequence().generate_state(1)[0])
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31 - 1))
    if isinstance(random_state, bool) or not isinstance(random_state, Integral):
        raise InputError(
            f"random_state is a seed, a whole number, a numpy.random.RandomState, or None; got {random_state!r}."
        )
    return int(random_state)


def generator_of(random_state: RandomState) -> torch.Generator:
    """A generator with the seed of `seed_of`.

    >>> generator_of(3).initial_seed()
    3
    """
    return torch.Generator().manual_seed(seed_of(random_state))
