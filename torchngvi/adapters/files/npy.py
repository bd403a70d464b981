"""Arrays in npy files, a batch of rows after another."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from torchngvi.adapters.files.reader import ROWS, Batch, Chunk, Reader, checked_rows
from torchngvi.arguments import read_path
from torchngvi.errors import InputError


class Stored(NamedTuple):
    """An array in an npy file, by its header: nothing of it is read, and little is sent to a worker that reads it.

    >>> Stored("X.npy", np.dtype(np.float64), (10, 2), 128).shape
    (10, 2)
    """

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int  # of the first entry, in bytes


class Npy(Reader):
    """Rows of arrays in npy files; a batch is read when it is asked for, and nothing stays mapped into memory.

    Args:
        X: the file of the design, (N, D).
        y: the file of the targets, (N,).
        rows: of a batch.
        weights, offset: the files of row weights and offsets, (N,), where there are some.

    Raises:
        InputError: a file that is none, an array of another shape or of no numbers, or stored by columns.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/X.npy", np.eye(3)), np.save(f"{folder}/y.npy", np.array([0, 1, 1]))
    ...     batches = Npy(f"{folder}/X.npy", f"{folder}/y.npy", rows=2)
    ...     len(batches), batches.num_data, batches[1]
    (None, None)
    (2, 3, (tensor([[0., 0., 1.]], dtype=torch.float64), tensor([1])))
    """

    def __init__(
        self,
        X: str | Path,
        y: str | Path,
        rows: int = ROWS,
        weights: str | Path | None = None,
        offset: str | Path | None = None,
    ) -> None:
        given: dict[str, Any] = {"X": X, "y": y, "weights": weights, "offset": offset}
        for name, path in given.items():
            if path is not None or name in ("X", "y"):
                read_path(name, path, "is the path of a .npy file")
        rows = checked_rows(rows)
        self.arrays = {name: None if path is None else _stored(name, Path(path)) for name, path in given.items()}
        design = self.arrays["X"]
        assert design is not None
        for name, array in self.arrays.items():
            want = design.shape[:1] if name != "X" else design.shape
            if array is not None and (array.shape != want or (name == "X" and len(array.shape) != 2)):
                shape = "a matrix, one row an observation" if name == "X" else f"one number for each of {want[0]} rows"
                raise InputError(f"{str(given[name])!r} must hold {shape}; got shape {array.shape}.")
        count = design.shape[0]
        self.chunks = [
            Chunk(str(X), 0, start, min(rows, count - start)) for start in range(0, count, checked_rows(rows))
        ]

    def read(self, chunk: Chunk) -> Batch:
        """Read one batch."""
        parts = [None if array is None else _some(array, chunk) for array in self.arrays.values()]
        while parts[-1] is None:
            parts.pop()
        return tuple(parts)


def _stored(name: str, path: Path) -> Stored:
    """The header of an npy file."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"{str(path)!r} cannot be read as an npy file ({error}). Write it by numpy.save.") from error
    if not isinstance(array, np.memmap) or array.dtype.kind not in "buif" or not array.flags.c_contiguous:
        raise InputError(
            f"{str(path)!r} must hold numbers, stored by rows; got {array.dtype} for {name}. Write it by "
            "numpy.save(path, numpy.ascontiguousarray(X))."
        )
    return Stored(str(path), array.dtype, array.shape, array.offset)


def _some(array: Stored, chunk: Chunk) -> torch.Tensor:
    """Some rows, read from the file: pages of a memory map would stay in memory."""
    width = math.prod(array.shape[1:])
    place = array.offset + chunk.start * width * array.dtype.itemsize
    numbers = np.fromfile(array.path, array.dtype, chunk.rows * width, offset=place)
    return torch.from_numpy(numbers.reshape(-1, *array.shape[1:]))
