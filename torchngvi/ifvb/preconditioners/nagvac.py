"""The natural gradient of a Gaussian with one factor, its Fisher matrix taken as block-diagonal in (μ, b, c).

NAGVAC (Tran, Nguyen, Nott and Kohn 2020).  Two forms that differ in the block of b: its exact inverse
(Σ - bbᵀ/(2a))/a, and the Σ/(2a) that is usually run.  `Exact` costs the same O(d) and drops no block.
"""

from typing import final

import torch
from torch import Tensor

from torchngvi.errors import PairError
from torchngvi.ifvb.families.rank_one import RankOneGaussian
from torchngvi.posteriors.flat import FlatPosterior
from torchngvi.ifvb.preconditioners.base import Preconditioner, State


def _rank_one(family: FlatPosterior) -> RankOneGaussian:
    if not isinstance(family, RankOneGaussian):
        raise PairError(f"NAGVAC is for a RankOneGaussian; got {type(family).__name__}. Use Exact, or IFVB.")
    return family


class _BlockSolve(Preconditioner):
    """A closed form, which learns nothing from scores."""

    samples, remembers = 0, False

    def init(self, family: FlatPosterior) -> State:
        """Nothing."""
        _rank_one(family)
        return {}

    def absorb(self, state: State, scores: Tensor, generator: torch.Generator) -> None:
        """Never asked."""


@final
class NAGVAC(_BlockSolve):
    """Each block inverted exactly (`RankOneGaussian.block_fisher_solve`).

    Raises:
        PairError: at construction of an optimizer, another family than `RankOneGaussian`.
    """

    def direction(self, state: State, gradient: Tensor, family: FlatPosterior) -> Tensor:
        """Block by block."""
        return _rank_one(family).block_fisher_solve(gradient)


@final
class PublishedNAGVAC(_BlockSolve):
    """Σ/(2a) in the block of b (`RankOneGaussian.published_block_solve`).

    Raises:
        PairError: at construction of an optimizer, another family than `RankOneGaussian`.
    """

    def direction(self, state: State, gradient: Tensor, family: FlatPosterior) -> Tensor:
        """Block by block."""
        return _rank_one(family).published_block_solve(gradient)
