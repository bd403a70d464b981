"""The natural gradient of a Gaussian with one factor, its Fisher matrix taken as block-diagonal in (μ, b, c).

NAGVAC (Tran, Nguyen, Nott and Kohn 2020).  Two forms that differ in the block of b: its exact inverse
(Σ - bbᵀ/(2a))/a, and the Σ/(2a) that is usually run.  `Exact` costs the same O(d) and drops no block.
"""

from typing import final

import torch
from torch import Tensor

from torchngvi.errors import PairError
from torchngvi.metrics.preconditioner import Preconditioner, State
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior
from torchngvi.posteriors.flat.rank_one import RankOneGaussian


def _rank_one(q: FlatPosterior) -> RankOneGaussian:
    if not isinstance(q, RankOneGaussian):
        raise PairError(f"NAGVAC is for a RankOneGaussian; got {type(q).__name__}. Use Exact, or IFVB.")
    return q


class _BlockSolve(Preconditioner):
    """A closed form, which learns nothing from scores."""

    samples, remembers = 0, False

    def fresh(self, q: FlatPosterior) -> State:
        """Nothing."""
        _rank_one(q)
        return {}

    def absorb(self, state: State, scores: Tensor, generator: torch.Generator | None = None) -> None:
        """Never asked."""


@final
class NAGVAC(_BlockSolve):
    """Each block inverted exactly (`RankOneGaussian.block_fisher_solve`).

    Raises:
        PairError: at construction of an optimizer, another family than `RankOneGaussian`.
    """

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """Block by block."""
        return _rank_one(q).block_fisher_solve(gradient)


@final
class PublishedNAGVAC(_BlockSolve):
    """Σ/(2a) in the block of b (`RankOneGaussian.published_block_solve`).

    Raises:
        PairError: at construction of an optimizer, another family than `RankOneGaussian`.
    """

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """Block by block."""
        return _rank_one(q).published_block_solve(gradient)
