"""Dirichlet(α) over η = α, for the shares x of K classes: T = (log x_k), h = Π 1/x_k."""

from typing import final

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.posteriors.flat.concentrations import Concentrations
from torchngvi.posteriors.flat.drawing import gammas
from torchngvi.posteriors.shapes import Shape


@final
class Dirichlet(Concentrations):
    """Dirichlet(α), for the shares x of K classes, which are positive and sum to 1.

    One wants it for the shares of topics in a document, of components in a mixture or of answers in a group; it is
    conjugate to counts.

    Args:
        vector: α, positive, (*batch, K) with K ≥ 2.

    Raises:
        InputError: a start that is not positive and finite, or of one class.

    >>> q = Dirichlet(torch.tensor([2.0, 3.0, 5.0]))
    >>> [round(share, 4) for share in q.mean.tolist()]
    [0.2, 0.3, 0.5]
    """

    def __init__(
        self,
        vector: Tensor,  # (*batch, K)
    ) -> None:
        classes = vector.shape[-1] if isinstance(vector, Tensor) and vector.ndim else 0
        super().__init__(vector, classes)
        if classes < 2:
            raise InputError(f"Dirichlet has a concentration for each of two classes at least; got {classes}.")

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Draw X_k/ΣX of gamma variables, kept off 0 by the smallest normal number."""
        draws = gammas(shape, self.point(at), generator)
        return (draws / draws.sum(-1, keepdim=True)).clamp_min(torch.finfo(draws.dtype).tiny)

    def statistics(self, theta: Tensor) -> Tensor:
        """Compute log x."""
        return theta.log()

    @property
    def mean(self) -> Tensor:
        """The means α_k/α_0 of x, (*batch, K)."""
        return self.vector / self.vector.sum(-1, keepdim=True)

    @property
    def variance(self) -> Tensor:
        """The variances m_k(1 - m_k)/(α_0 + 1) of x, m its mean, (*batch, K)."""
        return self.mean * (1 - self.mean) / (self.vector.sum(-1, keepdim=True) + 1)
