"""Where the stored entries of a pattern stand, as flat indices, which are made once for each pattern and device."""

import functools
import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Positioned(Protocol):
    """Anything that knows the place of each of its entries, and is compared and hashed by its sizes."""

    @property
    def dim(self) -> int:
        """The number D of its coordinates."""

    def positions(self) -> tuple[Tensor, Tensor]:
        """Return row and column of every stored entry."""


class Index(NamedTuple):
    """Where the stored entries of a pattern stand, as flat tensors with one number an entry, (E,), unless noted.

    >>> from torchngvi.structures import Dense
    >>> index_of(Dense(2), torch.device("cpu")).lower.tolist()  # of (0, 0), (0, 1), (1, 0), (1, 1)
    [0, 2, 3]
    """

    rows: Tensor
    columns: Tensor
    diagonal: Tensor  # positions of the D diagonal entries, in the order of θ
    halves: Tensor  # 1 below the diagonal, ½ on it, 0 above: of tril½
    mirror: Tensor  # position of the entry of the transpose where both are stored, else its own
    lower: Tensor  # positions on and below the diagonal
    weights: Tensor  # √½ on the diagonal, 1 below, of those
    spread: Tensor  # for each entry the position in ``lower`` of itself or of its mirror image
    unweights: Tensor  # √2 on the diagonal, 1 elsewhere


@functools.lru_cache(maxsize=256)
@torch.inference_mode(False)  # kept for later calls, which may be differentiated
def index_of(pattern: Positioned, device: torch.device) -> Index:
    """Make the indices of a pattern on a device, or return those that were made for it before.

    >>> from torchngvi.structures import Dense
    >>> index_of(Dense(2), torch.device("cpu")).diagonal.tolist()
    [0, 3]
    """
    rows, columns = (x.flatten() for x in pattern.positions())
    place = rows * pattern.dim + columns
    order = torch.argsort(place)
    found = torch.searchsorted(place[order], columns * pattern.dim + rows).clamp_max(len(place) - 1)
    mirrored = order[found]
    own = torch.arange(len(place), device="cpu")
    mirror = torch.where(rows < columns, mirrored, own)
    lower = own[rows >= columns]
    number = torch.empty_like(own)
    number[lower] = torch.arange(len(lower), device="cpu")
    on = rows == columns
    diagonal = own[on][torch.argsort(rows[on])]
    one = torch.ones(len(place), dtype=torch.float64, device="cpu")
    halves = torch.where(on, 0.5 * one, one * (rows > columns))
    unweights = torch.where(on, math.sqrt(2) * one, one)
    weights = torch.where(on, math.sqrt(0.5) * one, one)[lower]
    parts = (rows, columns, diagonal, halves, mirror, lower, weights, number[mirror], unweights)
    return Index(*(part.to(device) for part in parts))
