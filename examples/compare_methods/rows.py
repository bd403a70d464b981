"""The rows of a case: a bundled set or a file with numbers and texts, split, and standardised by the training rows."""

from typing import Any

import numpy as np
import pandas as pd
from sklearn.model_selection import train_test_split

from torchngvi.app.prepare import read_table
from torchngvi.errors import InputError
from torchngvi.messages import hint

Array = np.ndarray[Any, Any]
Part = tuple[Array, Array]  # X (n, D), y (n,)


def read(data: str, target: str | None, success: str | None, *, classes: bool) -> Part:
    """The design, texts as indicators of all levels but the first, and the targets, two classes as 0 and 1."""
    found = read_table(data)
    target = target or ("target" if "target" in found.frame else None)
    if target is None or target not in found.frame:
        raise InputError(
            f"target is missing: name the column to predict; got {target!r}.{hint(str(target), found.frame)}"
        )
    y, rest = found.frame[target], found.frame.drop(columns=target)
    X = pd.get_dummies(rest, drop_first=True, dtype=float).to_numpy(dtype=float)
    if not classes:
        return X, y.to_numpy(dtype=float)
    labels = [str(label) for label in sorted(y.unique())]
    chosen = success or (labels[-1] if len(labels) == 2 else None)
    if chosen not in labels:
        raise InputError(f"target {target!r} has the classes {', '.join(labels)}; name the one to predict, success.")
    return X, (y.astype(str) == chosen).to_numpy(dtype=float)


def prepared(
    X: Array, y: Array, *, standardize: bool, intercept: bool, test_fraction: float, seed: int
) -> tuple[Part, Part]:
    """Split with scikit-learn's train_test_split, standardise by the training rows, put an intercept in front."""
    rows = np.arange(len(y))
    train, test = (
        train_test_split(rows, test_size=test_fraction, random_state=seed) if test_fraction else (rows, rows[:0])
    )
    if standardize:
        sd = X[train].std(0)
        X = (X - X[train].mean(0)) / np.where(sd > 0, sd, 1.0)
    if intercept:
        X = np.column_stack([np.ones(len(X)), X])
    return (X[train], y[train]), (X[test], y[test])
