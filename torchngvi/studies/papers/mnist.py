"""The digits of MNIST, which two of the papers use."""

import gzip

import numpy as np
import torch
from torch import Tensor

from torchngvi.app import datasets


def images(what: str, part: str = "train") -> tuple[Tensor, Tensor]:
    """Read the images of a part of MNIST."""
    arrays = []
    for name, header in (("labels-idx1", 8), ("images-idx3", 16)):
        with gzip.open(datasets.provided(f"mnist/{part}-{name}-ubyte.gz", what)) as file:
            arrays.append(np.frombuffer(file.read(), np.uint8, offset=header))
    labels, pixels = arrays[0], arrays[1].reshape(len(arrays[0]), -1)
    return torch.as_tensor(pixels.astype(np.float32) / 255), torch.as_tensor(labels.astype(np.int64))


def pair(digits: tuple[int, int], rows: int = 0) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Two digits as two classes."""
    parts = []
    for part in ("train", "t10k"):
        X, labels = images(f"MNIST of digits {digits[0]} and {digits[1]}", part)
        kept = (labels == digits[0]) | (labels == digits[1])
        parts.append((X[kept].double(), (labels[kept] == digits[1]).double()))
    (X, y), test = parts
    return (X[: rows or len(X)], y[: rows or len(y)]), test
