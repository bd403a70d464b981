"""The natural gradient in closed form (Godichon-Baggioni, Nguyen and Tran 2023, Eq 3.4)."""

from typing import final

import torch
from torch import Tensor

from torchngvi.metrics.preconditioner import Preconditioner, State
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior


@final
class Exact(Preconditioner):
    """The natural gradient I_F⁻¹∇L in closed form, from `FlatPosterior.exact_fisher_solve`.

    It is free of noise, and the first choice where the posterior knows its Fisher matrix.

    Raises:
        PairError: at construction of an optimizer, if the posterior does not know its Fisher matrix.

    >>> from torchngvi.ifvb import MeanFieldGaussian
    >>> Exact().direction({}, torch.tensor([1.0, 1.0]), MeanFieldGaussian(torch.zeros(2))).tolist()
    [1.0, 0.5]
    """

    exact = True

    def fresh(self, q: FlatPosterior) -> State:
        """Return an empty state, after one call that has a posterior without a closed form refused here.

        Raises:
            PairError: if the posterior does not know its Fisher matrix.
        """
        q.exact_fisher_solve(torch.zeros_like(q.vector))
        return {}

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """Return the natural gradient I_F⁻¹∇L."""
        return q.exact_fisher_solve(gradient)
