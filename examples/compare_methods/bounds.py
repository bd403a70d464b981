"""Piecewise bounds of log(1 + eˣ) from files: one of the user's own, and the published one.

The published table has 20 pieces and is the file llp.mat of github.com/emtiyaz/VariationalApproxExample, under the MIT
licence.  It is no part of this library: it is read from $TORCHNGVI_DATA or the cache, else downloaded, and is known by
its checksum.
"""

import hashlib
import io
from pathlib import Path

import pandas as pd
import scipy.io

from examples.compare_methods import datasets
from torchngvi.errors import InputError

PUBLISHED = "llp.mat"
SITE = "https://raw.githubusercontent.com/emtiyaz/VariationalApproxExample/c81e0c456d34397aeb00d43b574ac87b0b18bf60/"
SHA256 = "40bcdc0564654431df66b78f44dde2227010e8aa1cf4cc1822e0a6549daea0b2"  # of the file


def pieces(name: str) -> list[list[float]]:
    """The pieces of a bound, for `PiecewiseBound`."""
    return _published() if name == PUBLISHED else _provided(datasets.beside(name))


def _provided(path: Path) -> list[list[float]]:
    try:
        rows: list[list[float]] = pd.read_csv(path)[["low", "high", "a", "b", "c"]].to_numpy().tolist()
    except (OSError, KeyError, ValueError) as error:
        raise InputError(
            f"bound must be a csv file with columns low, high, a, b, c; {str(path)!r}: {error}."
        ) from error
    return rows


def _published() -> list[list[float]]:
    """The matrix of the file has rows c, b, a, low and high, and a column a piece."""
    path = next(
        (place for place in (datasets.beside(PUBLISHED), datasets.cache() / PUBLISHED) if place.is_file()), None
    )
    path = path or datasets.download(SITE + PUBLISHED, PUBLISHED, "the published bound of 20 pieces", PUBLISHED)
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise InputError(f"{str(path)!r} is not the published {PUBLISHED}: its checksum differs. Remove it.")
    c, b, a, low, high = scipy.io.loadmat(io.BytesIO(data))["bound"]
    return [list(map(float, piece)) for piece in zip(low, high, a, b, c, strict=True)]
