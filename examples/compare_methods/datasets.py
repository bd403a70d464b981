"""Published data sets by name: from $TORCHNGVI_DATA, else from the cache, else from LIBSVM's public site.

Files of one data set differ in compression, in the coding of the two classes and in trailing digits.
The checksum is therefore of the content: shape, classes and the entries to three decimals.
"""

import gzip
import hashlib
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_svmlight_file
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.fitting.checkpoints import write_whole
from torchngvi.messages import hint
from torchngvi.numerics.kernels import user_cache

Array = np.ndarray[Any, Any]

SITE = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
_TIMEOUT = 60  # seconds without an answer


class Source(NamedTuple):
    """The name, size and checksum of a published data set, known before it is read."""

    remote: str  # name on the site
    rows: int
    dim: int
    sha256: str  # of `content`


SOURCES = {
    "australian_scale": Source(
        "australian_scale", 690, 14, "a3a82d7678da0e8fcd733c8d440541587aa572e9c2c91820db28268143daf6f8"
    ),
    "diabetes_scale": Source(
        "diabetes_scale", 768, 8, "6e6b439bd30539b727c868effdfe6b96402ffcd66cdce76f92e0b3e202901f32"
    ),
    "breast-cancer_scale": Source(
        "breast-cancer_scale", 683, 10, "a0c4cecfed8f5fbd6f40317a61cac132fdf11a0d01cd2d83bc7aba6e1931af71"
    ),
    "mushrooms": Source("mushrooms", 8124, 112, "875a76ee4863047f158a8d01f0e5a8cc701f79cf1a14ffa9d8f6ef88aefddfb3"),
    "phishing": Source("phishing", 11055, 68, "bf6033f23345160c9d16b96e8453de3ab0fd3fb2b9e1281dde3bf02f7210638e"),
}


class MissingDataError(InputError):
    """The data set is on this machine in no known place, and could not be downloaded."""


def load(name: str) -> tuple[Array, Array]:
    """Load a published data set, from $TORCHNGVI_DATA, the cache or LIBSVM's public site.

    Args:
        name: a key of `SOURCES`.

    Returns:
        X (N, D), and y (N,) in two classes 0 and 1, rows in the order of the file.

    Raises:
        InputError: an unknown name, content that differs from the published.
        MissingDataError: no file, and no download.
    """
    if name not in SOURCES:
        raise InputError(f"data set {name!r} is not known.{hint(name, SOURCES)} There are: {', '.join(SOURCES)}.")
    path = _found(name) or _download(name)
    source = SOURCES[name]
    try:
        X, labels = load_svmlight_file(str(path), n_features=source.dim, dtype=np.float64)
    except (ValueError, OSError, EOFError) as error:
        raise InputError(f"{str(path)!r} cannot be read as a svmlight file ({error}). Remove it.") from error
    X, y = X.toarray(), (labels == labels.max()).astype(np.float64)
    if content(X, y) != source.sha256:
        raise InputError(
            f"{str(path)!r} is not the published {name}: shape {X.shape}, expected {(source.rows, source.dim)}, or "
            "other entries (its checksum differs). Remove it."
        )
    return X, y


def content(
    X: Array,  # (N, D)
    y: Array,  # (N,), two classes
) -> str:
    """A checksum of a data set: of its shape, classes and entries to three decimals.

    >>> content(np.eye(2), np.array([0.0, 1.0])) == content(np.eye(2) + 1e-6, np.array([2.0, 1.0]))
    True
    """
    digest = hashlib.sha256(repr(X.shape).encode())
    digest.update((y != y[0]).astype(np.uint8).tobytes())
    digest.update(np.rint(X * 1000).astype("<i4").tobytes())
    return digest.hexdigest()


def cache() -> Path:
    """The folder where downloads are kept."""
    return user_cache() / "torchngvi"


def _found(name: str) -> Path | None:
    folder = os.environ.get("TORCHNGVI_DATA")
    places = [*([Path(folder) / "libsvm", Path(folder)] if folder else []), cache()]
    files = (place / f"{name}{ending}" for place in places for ending in (".svm.gz", ".svm", ""))
    return next((file for file in files if file.is_file()), None)


def _download(name: str) -> Path:
    remote = SITE + SOURCES[name].remote
    return download(remote, f"{name}.svm", f"data set {name}", f"libsvm/{name}.svm.gz")


def download(url: str, name: str, what: str, place: str) -> Path:
    """Download a file into the cache, where it has its name only when it is whole."""
    path = cache() / name
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer:
            data = answer.read()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except (urllib.error.URLError, OSError) as error:
        raise MissingDataError(
            f"{what} is not here, and {url} cannot be had ({error}). Set TORCHNGVI_DATA to a folder that "
            f"holds {place}, or put the file into {str(path.parent)!r}."
        ) from error
    return path


def beside(name: str) -> Path:
    """A file that the user provides: as named, or else in $TORCHNGVI_DATA."""
    folder = os.environ.get("TORCHNGVI_DATA")
    here = Path(name)
    return here if here.exists() or not folder else Path(folder) / name


def provided(name: str, what: str) -> Path:
    """A file that the user has to provide, where `beside` finds it."""
    path = beside(name)
    if not path.is_file():
        raise MissingDataError(f"{what} is not here. Set TORCHNGVI_DATA to a folder that holds {name}.")
    return path


def mnist_images(what: str, part: str = "train") -> tuple[Tensor, Tensor]:
    """Read the images of a part of MNIST."""
    arrays = []
    for name, header in (("labels-idx1", 8), ("images-idx3", 16)):
        with gzip.open(provided(f"mnist/{part}-{name}-ubyte.gz", what)) as file:
            arrays.append(np.frombuffer(file.read(), np.uint8, offset=header))
    labels, pixels = arrays[0], arrays[1].reshape(len(arrays[0]), -1)
    return torch.as_tensor(pixels.astype(np.float32) / 255), torch.as_tensor(labels.astype(np.int64))


def mnist_pair(digits: tuple[int, int], rows: int = 0) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Two digits as two classes."""
    parts = []
    for part in ("train", "t10k"):
        X, labels = mnist_images(f"MNIST of digits {digits[0]} and {digits[1]}", part)
        kept = (labels == digits[0]) | (labels == digits[1])
        parts.append((X[kept].double(), (labels[kept] == digits[1]).double()))
    (X, y), test = parts
    return (X[: rows or len(X)], y[: rows or len(y)]), test
