"""Leaves of a linear crossed model that weigh alike: their part of a factorisation is made once for all of them.

With one effect b_i of each group of the largest factor, the others u, A_i = Σ wz² and B_i = Σ wz(z', x) over the rows
of the group, and c_i = Σ wzr, what is left of the precision and of the linear term of u once all b_i are integrated
out is

    M - Σ_i B_i B_iᵀ/(σ⁴ m_i),        c - Σ_i B_i c_i/(σ⁴ m_i),        m_i = A_i/σ² + Ω,

and groups with the same A_i, as those with the same number of rows where an intercept varies, enter by sums.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.models.multilevel_rows import MultilevelRows

_FEWER = 4  # times fewer patterns than groups that make them worth their while
_MOST = 2**24  # numbers of all tables


class Leaves(NamedTuple):
    """Sums over the groups of each of U patterns."""

    A: Tensor  # (U,)
    groups: Tensor  # how many have each pattern, (U,)
    BB: Tensor  # Σ B Bᵀ, (U, R²)
    Bc: Tensor  # Σ B c, (U, R)
    cc: Tensor  # Σ c², (U,)

    @classmethod
    def of(cls, rows: MultilevelRows, gram: Tensor, summed: Tensor) -> "Leaves | None":
        """Find the patterns of the leaves, or None where these have more effects, more levels, or too many patterns."""
        leaf = rows.factors[rows.arrangement.chain[0]]
        if len(rows.arrangement.chain) > 1 or leaf.r > 1:
            return None
        square, border = rows.bare.parts(gram)[0]
        A, place, count = torch.unique(square.flatten(), return_inverse=True, return_counts=True)
        B, c = border[..., 0], summed[: leaf.n, None]
        width = B.shape[-1]
        if _FEWER * len(A) > leaf.n or len(A) * width * width > _MOST:
            return None
        order = place.argsort()
        BB = torch.stack([some.mT @ some for some in B[order].split(count.tolist())])
        Bc = B.new_zeros(len(A), width).index_add(0, place, B * c)
        cc = B.new_zeros(len(A)).index_add(0, place, c[:, 0].square())
        return cls(A, count.to(A), BB.flatten(1), Bc, cc)

    def eliminated(
        self,
        precision: Tensor,  # σ⁻², (S,)
        omega: Tensor,  # Ω, (S,)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the leaves take from the precision of the others (S, R, R) and their linear term (S, R), and add.

        The last, (S,), is Σ_i (½c_i²/(σ⁴m_i) - ½log m_i).
        """
        m = precision[:, None] * self.A + omega[:, None]  # (S, U)
        d = precision[:, None].square() / m
        width = self.Bc.shape[-1]
        added = 0.5 * (d @ self.cc) - 0.5 * (m.log() @ self.groups)
        return (d @ self.BB).unflatten(-1, (width, width)), d @ self.Bc, added
