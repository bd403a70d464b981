"""The natural gradient in closed form (Godichon-Baggioni, Nguyen and Tran 2023, Eq 3.4)."""

from typing import final

import torch
from torch import Tensor

from torchngvi.metrics.preconditioner import Preconditioner, State
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior


@final
class Exact(Preconditioner):
    """direction = I_F⁻¹∇L from `FlatPosterior.exact_fisher_solve`: free of noise, and where it exists the first choice.

    Raises:
        PairError: at construction of an optimizer, a family that does not know its Fisher matrix.

    >>> from torchngvi.ifvb import MeanFieldGaussian
    >>> Exact().direction({}, torch.tensor([1.0, 1.0]), MeanFieldGaussian(torch.zeros(2))).tolist()
    [1.0, 0.5]
    """

    samples, remembers = 0, False

    def fresh(self, q: FlatPosterior) -> State:
        """Nothing; asks the family once, so that one without a closed form is refused here."""
        q.exact_fisher_solve(torch.zeros_like(q.vector))
        return {}

    def absorb(self, state: State, scores: Tensor, generator: torch.Generator | None = None) -> None:
        """Never asked."""

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """I_F⁻¹∇L."""
        return q.exact_fisher_solve(gradient)
