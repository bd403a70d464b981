"""Arguments of the estimators, after a check: numbers, numbers of draws, and seeds by scikit-learn's convention."""

import math
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import _check_sample_weight, validate_data

from torchngvi.errors import InputError
from torchngvi.numerics.arrays import check_plain

RandomState = int | np.random.RandomState | None  # by scikit-learn's convention, see `seed_of`


def validated(estimator: Any, X: Any, *y: Any, **options: Any) -> Any:
    """What scikit-learn's ``validate_data`` makes of the rows, after a check that nothing of them is masked.

    Raises:
        InputError: masked entries, which scikit-learn takes as they are, and a complex y.
    """
    for name, value in (("X", X), *(("y", one) for one in y)):
        _check(name, value, masked=True)
    found = validate_data(estimator, X, *y, **options)
    for one in y:
        _check("y", one)
    return found


def weights_of(sample_weight: Any, X: Any) -> Any:
    """The weights of rows, after scikit-learn's check and that of `validated`; None where there are none."""
    if sample_weight is None:
        return None
    _check("sample_weight", sample_weight)
    return _check_sample_weight(sample_weight, X, ensure_non_negative=True)


def labels_of(groups: Any) -> Any:
    """The labels of groups as an array, none of them masked."""
    _check("groups", groups, masked=True)
    return np.asarray(groups)


def _check(name: str, value: Any, *, masked: bool = False) -> None:
    """Refuse an array that does not say all by its numbers; of labels and rows, one with masked entries."""
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    if (masked and not hasattr(value, "filled")) or kind in "OSU":  # scikit-learn looks at the rest itself
        return
    try:
        check_plain(value)
    except InputError as error:
        raise InputError(f"{name} must be numbers; got {type(value).__name__} ({error}).") from error


def is_positive(value: object) -> bool:
    """Whether this is a number, finite and larger than 0.

    >>> is_positive(0.5), is_positive(True), is_positive("a")
    (True, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < math.inf


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
    if isinstance(n_samples, bool) or not isinstance(n_samples, Integral) or n_samples < 0:
        raise InputError(f"n_samples is a number of draws; got {n_samples!r}.")
    return int(n_samples)


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
