"""The frame of q: mean and root, all that an expectation may read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchngvi.structures import Pattern
from torchngvi.structures.pattern import Structured


@dataclass(frozen=True)
class Frame:
    """q as mean and root, θ = m + C z: what an expectation may read, in any coordinates.

    The root is lower triangular in q's pattern: C itself, or, where q holds the precision S = T Tᵀ, L = T⁻¹ with
    C = Lᵀ upper triangular.  Differentiable where it came from :meth:`Posterior.probed`.
    """

    mean: Tensor  # (*batch, D)
    root: Structured  # L
    structure: Pattern
    upper: bool = False  # C = Lᵀ

    def push(self, z: Tensor) -> Tensor:
        """C z, (*sample, *batch, D)."""
        return (self.structure.tmv if self.upper else self.structure.mv)(self.root, z)

    def pull(self, gradient: Tensor) -> Tensor:
        """Cᵀ g, (*sample, *batch, D)."""
        return (self.structure.mv if self.upper else self.structure.tmv)(self.root, gradient)

    def rows(self, rows: Tensor) -> Tensor:
        """X C, (*batch, N, D); the marginal variances of X θ are its squared row norms."""
        return self.structure.rows(rows, self.root, self.upper)

    @property
    def variance(self) -> Tensor:
        """diag(V), (*batch, D)."""
        return self.structure.row_norms(self.root, self.upper)

    def dense(self) -> Tensor:
        """C written out, (*batch, D, D)."""
        root = self.structure.to_dense(self.root)
        return root.mT if self.upper else root

    def marginals(self) -> Structured:
        """The stored entries of V = C Cᵀ."""
        return self.structure.marginals(self.root, self.upper)

    def gram(
        self,
        weights: Tensor,  # broadcasts to (*batch, D)
    ) -> Structured:
        """Π(Cᵀ diag(w) C)."""
        return self.structure.gram(self.root, weights, self.upper)

    def conjugate(
        self,
        H: Tensor,  # (*batch, D, D), symmetric
    ) -> Structured:
        """Π(Cᵀ H C)."""
        return self.structure.conjugate(self.root, H, self.upper)


def where_members(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """New for the members (*batch,) of the mask, old for the others; of tensors (*batch, ...)."""
    if mask.device.type == "cpu":  # where asking costs nothing, most masks need no copy
        if bool(mask.all()):
            return new
        if not bool(mask.any()):
            return old
    return torch.where(mask.reshape(mask.shape + (1,) * (old.ndim - mask.ndim)), new, old)
