"""Arguments of the estimators, after a check: rows, targets, weights, prior standard deviations, and seeds."""

import math
import warnings
from numbers import Integral, Number
from typing import Any

import numpy as np
from sklearn.utils.validation import _check_sample_weight, validate_data

from torchngvi.arguments import is_number, read_number, shown
from torchngvi.errors import InputError
from torchngvi.numerics.arrays import check_plain
from torchngvi.tables.cells import numeric

Array = np.ndarray[Any, Any]
RandomState = int | np.random.RandomState | None  # by scikit-learn's convention, see `seed_of`


def validated(estimator: Any, X: Any, *y: Any, **options: Any) -> Any:
    """What scikit-learn's ``validate_data`` makes of rows and targets, after a check that nothing of them is masked."""
    for name, value in (("X", X), *(("y", one) for one in y)):
        check_numbers(name, value, masked=True)
    for one in y:
        _warn_of_order(X, one)
    try:
        found = validate_data(estimator, X, *y, **options)
    except OverflowError as error:
        raise InputError(f"X and y must be numbers that float64 holds ({error}).") from error
    for one in y:
        check_numbers("y", one)
    return found


def covariates(X: Any, *, fitting: bool = False) -> Any:
    """The rows of a frame with numbers where cells stand for numbers, and a warning of what one may not expect."""
    X, notes = numeric(X)
    for note in notes if fitting else ():
        warnings.warn(f"{note[0].upper()}{note[1:]}.", stacklevel=3)
    return X


def _warn_of_order(X: Any, y: Any) -> None:
    """Warn of a y whose index is that of X in another order, since rows are taken as they stand."""
    rows, labels = (getattr(value, "index", None) for value in (X, y))
    if rows is None or labels is None or callable(rows) or callable(labels) or len(rows) != len(labels):
        return
    if rows.equals(labels) or not rows.is_unique or not rows.sort_values().equals(labels.sort_values()):
        return
    warnings.warn(
        "The index of y is that of X in another order, and rows are taken as they stand, as in all of scikit-learn. "
        "Put y in the order of X: y.loc[X.index].",
        stacklevel=4,
    )


def numbers_of(y: Any) -> Any:
    """The targets of a regression as float64."""
    try:
        return y.astype(np.float64)
    except ValueError as error:
        raise InputError(
            f"y must be numbers ({error}). For classes take BayesianLogisticRegression or BayesianMixedClassifier."
        ) from error


def weights_of(sample_weight: Any, X: Any) -> Any:
    """The weights of rows, after scikit-learn's check and that of `validated`; None where there are none."""
    if sample_weight is None:
        return None
    if isinstance(sample_weight, Number):
        sample_weight = read_number("sample_weight", sample_weight, "is the weight of each row", at_least=0)
    check_numbers("sample_weight", sample_weight)
    weights = _check_sample_weight(sample_weight, X, ensure_non_negative=True)
    return weights if weights.dtype.kind == "f" else weights.astype(np.float64)


def check_classes_weigh(classes: Any, codes: Any, weights: Any) -> None:
    """Check that each class has a row whose weight is not 0."""
    for place, total in enumerate(np.bincount(codes, weights, len(classes))):
        if not total > 0:
            raise InputError(f"all rows of the class {classes[place]} have the weight 0, as if there were none of it.")


def check_numbers(name: str, value: Any, *, masked: bool = False) -> None:
    """Refuse an array that does not say all by its numbers; of labels and rows, one with masked entries."""
    if getattr(value, "requires_grad", False) or getattr(value, "is_meta", False):
        raise InputError(f"{name} must be an array of numbers; got {shown(value)}. Pass tensor.detach().numpy().")
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    if (masked and not hasattr(value, "filled")) or kind in "OSU":  # scikit-learn looks at the rest itself
        return
    try:
        check_plain(value)
    except InputError as error:
        raise InputError(f"{name} must be numbers; got {type(value).__name__} ({error}).") from error


def check_sd(name: str, value: Any) -> None:
    """Check the standard deviation of a prior."""
    if value is not None and not is_number(value, above=0):
        raise InputError(f"{name} is a standard deviation, positive, or None; got {value!r}.")
    if value is not None and not 0 < float(value) * float(value) < math.inf:
        raise InputError(f"{name} is a standard deviation; got {value!r}, whose square is 0 or infinite.")


def seed_of(random_state: RandomState) -> int:
    """A seed, by scikit-learn's convention for ``random_state``."""
    if random_state is None:
        return int(np.random.SeedSequence().generate_state(1)[0])
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31 - 1))
    if isinstance(random_state, bool) or not isinstance(random_state, Integral):
        raise InputError(
            f"random_state is a seed, a whole number, a numpy.random.RandomState, or None; got {random_state!r}."
        )
    return int(random_state)
