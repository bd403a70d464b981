"""Arguments of the estimators, after a check: numbers, numbers of draws, and seeds by scikit-learn's convention."""

import math
import warnings
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from torchngvi.errors import InputError

_SHOWN = 10  # columns in a warning
RandomState = int | np.random.RandomState | None  # by scikit-learn's convention, see `seed_of`


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


def warn_of_constants(X: "np.ndarray[Any, Any]", estimator: Any) -> None:
    """Warn of columns that are the same in all rows beside an intercept, of which nothing is learned.

    Args:
        X: the rows, (n_samples, n_features).
        estimator: with the names of the columns, where they have some.
    """
    same = (X[:1] == X).all(0)
    if not estimator.fit_intercept or len(X) < 2 or not same.any():
        return
    names = [str(name) for name in getattr(estimator, "feature_names_in_", range(X.shape[1]))]
    found = [f"{names[k]} = {X[0, k]:g}" for k in np.flatnonzero(same)]
    more = f", .. ({len(found)} in all)" if len(found) > _SHOWN else ""
    warnings.warn(
        f"The same in all {len(X)} rows, so that the prior alone says what the coefficient is: column "
        f"{', '.join(found[:_SHOWN])}{more}. Leave it out, as sklearn.feature_selection.VarianceThreshold does.",
        stacklevel=4,
    )


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
