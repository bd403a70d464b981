"""The natural gradient of a Gaussian with one factor, its Fisher matrix taken as block-diagonal in (μ, b, c).

This is NAGVAC (Tran, Nguyen, Nott and Kohn 2020), in two forms that differ in the block of b: its exact inverse
(Σ - bbᵀ/(2a))/a, and the Σ/(2a) that is usually run.  `Exact` costs the same O(d) and drops no block.
"""

from typing import final

from torch import Tensor

from torchngvi.errors import PairError
from torchngvi.metrics.preconditioner import Preconditioner, State
from torchngvi.posteriors.flat.flat_gaussian import RankOneGaussian
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior


def _rank_one(q: FlatPosterior) -> RankOneGaussian:
    if not isinstance(q, RankOneGaussian):
        raise PairError(f"NAGVAC is for a RankOneGaussian; got {type(q).__name__}. Use Exact, or IFVB.")
    return q


class _BlockSolve(Preconditioner):
    """The base of both forms, a closed form that learns nothing from scores."""

    def fresh(self, q: FlatPosterior) -> State:
        """Return an empty state, after a check of the posterior."""
        _rank_one(q)
        return {}


@final
class NAGVAC(_BlockSolve):
    """The natural gradient of a `RankOneGaussian` with a block-diagonal Fisher matrix, each block inverted exactly.

    Use it to compare with the published method: `Exact` costs as much and drops no block.

    Raises:
        PairError: at construction of an optimizer, if the posterior is another than `RankOneGaussian`.

    >>> import torch
    >>> from torchngvi.ifvb import RankOneGaussian
    >>> q = RankOneGaussian(torch.zeros(3), torch.ones(3), torch.ones(3))
    >>> NAGVAC().direction({}, torch.ones(9), q)[:3].tolist()  # of the mean: Σ g = (I + bbᵀ) g
    [4.0, 4.0, 4.0]
    """

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """Return the natural gradient of each block, side by side."""
        return _rank_one(q).block_fisher_solve(gradient)


@final
class PublishedNAGVAC(_BlockSolve):
    """The form of NAGVAC that is usually run, with Σ/(2a) in the place of the inverse of the block of b.

    Use it to reproduce published results; `NAGVAC` inverts that block exactly, and `Exact` drops none.

    Raises:
        PairError: at construction of an optimizer, if the posterior is another than `RankOneGaussian`.

    >>> import torch
    >>> from torchngvi.ifvb import RankOneGaussian
    >>> q = RankOneGaussian(torch.zeros(3), torch.ones(3), torch.ones(3))
    >>> PublishedNAGVAC().direction({}, torch.ones(9), q)[:3].tolist()  # of the mean: Σ g = (I + bbᵀ) g
    [4.0, 4.0, 4.0]
    """

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """Return the approximate natural gradient of each block, side by side."""
        return _rank_one(q).published_block_solve(gradient)
