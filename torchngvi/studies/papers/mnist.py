"""The digits of MNIST, which two of the papers use."""

import gzip

import numpy as np
import torch
from torch import Tensor

from torchngvi.app import datasets


def images(what: str, part: str = "train") -> tuple[Tensor, Tensor]:
    """Read the images of a part of MNIST.

    Args:
        what: the experiment that wants them, for the message.
        part: "train", 60,000 images, or "t10k", the 10,000 of the test.

    Returns:
        Pixels in [0, 1], (N, 784), float32, and labels from 0 to 9, (N,), int64.

    Raises:
        MissingDataError: a file is not there.
    """
    arrays = []
    for name, header in (("labels-idx1", 8), ("images-idx3", 16)):
        with gzip.open(datasets.provided(f"mnist/{part}-{name}-ubyte.gz", what)) as file:
            arrays.append(np.frombuffer(file.read(), np.uint8, offset=header))
    labels, pixels = arrays[0], arrays[1].reshape(len(arrays[0]), -1)
    return torch.as_tensor(pixels.astype(np.float32) / 255), torch.as_tensor(labels.astype(np.int64))
