"""Sparse symmetric matrices as chains of dense blocks: factor, solutions, log determinant, selected inverse.

An order of the latents in which neighbours stand at most b places apart, cut into pieces of b, leaves a
block-tridiagonal matrix: a Cholesky factor has its blocks, and nothing else is filled in.  A lattice of √D x √D latents
has b = √D, so that the D² entries of a matrix become 2 D^1.5, and the D³ operations D².  Several unconnected parts
stand one behind the other, or side by side in a batch of chains of one length; groups of latents are a batch of chains
of one block.

The entries of the inverse at the places of the pattern are had from the factor, from the last block back to the first,
without any other (Takahashi, Fagan and Chin 1973; Rue and Martino 2007).
"""

import heapq
from typing import NamedTuple

import torch
from torch import Tensor

from torchngvi.numerics import small_blocks
from torchngvi.numerics.small_blocks import product

_WORTH_A_CALL = 32  # size up to which a block costs no more than the call that factors it


class Layout:
    """Where the entries of a sparse symmetric matrix stand in chains of blocks: K chains of T blocks of b latents.

    >>> layout = Layout([[0, 1, 2]], torch.tensor([[1, 0], [2, 1]]), torch.device("cpu"))
    >>> layout.chains, layout.length, layout.block
    (1, 1, 3)
    """

    def __init__(self, parts: list[list[int]], pairs: Tensor, device: torch.device) -> None:
        self.dim, largest = sum(map(len, parts)), len(parts[0])
        order = torch.tensor([latent for part in parts for latent in part], device="cpu")
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(self.dim, device="cpu")
        widest = int((inverse[pairs[:, 0]] - inverse[pairs[:, 1]]).abs().max()) if len(pairs) else 1
        self.block = max(widest, min(_WORTH_A_CALL, largest))
        abreast = max(1, self.dim // largest)
        room = self.dim if abreast == 1 else largest
        self.length = -(-room // self.block)
        starts, self.chains = _packed([len(part) for part in parts], self.length * self.block)
        slots = torch.empty(self.dim, dtype=torch.long, device="cpu")
        begun = 0
        for part, start in zip(parts, starts, strict=True):
            slots[order[begun : begun + len(part)]] = torch.arange(start, start + len(part), device="cpu")
            begun += len(part)
        # slots are numbered by chain, block and place, and stored by block, chain and place
        chain, rest = slots // (self.length * self.block), slots % (self.length * self.block)
        number, place = rest // self.block, rest % self.block
        self.slots = ((number * self.chains + chain) * self.block + place).to(device)
        self.empty = torch.ones(self.length * self.chains * self.block, dtype=torch.bool, device=device)
        self.empty[self.slots] = False
        self._place(
            torch.cat([torch.arange(self.dim, device="cpu")[:, None].expand(-1, 2), pairs]),
            chain,
            number,
            place,
            device,
        )

    def _place(self, entries: Tensor, chain: Tensor, number: Tensor, place: Tensor, device: torch.device) -> None:
        """Find the place of every entry, in its block row, and tell those within a block from those between two."""
        first, second = entries.unbind(-1)
        swap = (number[first] < number[second]) | ((number[first] == number[second]) & (place[first] < place[second]))
        below, above = torch.where(swap, second, first), torch.where(swap, first, second)
        flat = (chain[below] * self.block + place[below]) * self.block + place[above]
        rows = number[above]  # of a pair between two blocks, the first one
        between = number[below] != number[above]
        self.within, self.between = (
            Places.sorted(mask.nonzero()[:, 0], rows[mask], flat[mask], length, device)
            for mask, length in ((~between, self.length), (between, self.length - 1))
        )

    @property
    def numbers(self) -> int:
        """How many numbers the blocks of one matrix are."""
        return (2 * self.length - 1) * self.chains * self.block**2


class Places(NamedTuple):
    """Entries and where they stand, by blocks: the entries' numbers, and their places in the flat block of a row."""

    entries: tuple[Tensor, ...]  # of each block
    flat: tuple[Tensor, ...]

    @classmethod
    def sorted(cls, entries: Tensor, rows: Tensor, flat: Tensor, length: int, device: torch.device) -> "Places":
        """Sort them by their blocks."""
        order = rows.argsort(stable=True)
        counts = torch.bincount(rows, minlength=length).tolist()
        return cls(entries[order].to(device).split(counts), flat[order].to(device).split(counts))

    def blocks(
        self,
        layout: Layout,
        values: Tensor,  # (S, D + E)
        k: int,
    ) -> Tensor:
        """The blocks of number k of all chains, (S, K, b, b), with zeros where there is no entry."""
        shape = (len(values), layout.chains, layout.block, layout.block)
        out = values.new_zeros(len(values), shape[1] * shape[2] * shape[3])
        return out.index_copy_(1, self.flat[k], values[:, self.entries[k]]).view(shape)


def _packed(sizes: list[int], room: int) -> tuple[list[int], int]:
    """Where each part begins if chains hold so many latents, each in the emptiest chain; and the number of chains."""
    starts: list[int] = []
    chains = [(0, 0)]  # latents and number of each, a heap
    for size in sizes:
        used, chain = chains[0]
        if used + size <= room:
            heapq.heapreplace(chains, (used + size, chain))
        else:
            used, chain = 0, len(chains)
            heapq.heappush(chains, (size, chain))
        starts.append(chain * room + used)
    return starts, len(chains)


class Factor:
    """The Cholesky factor of a batch of sparse symmetric positive definite matrices, A = L Lᵀ.

    Args:
        layout: where entries stand.
        values: the entries, (S, D + E).

    Attributes:
        ok: which of the matrices are positive definite, (S,); the others have no factor that is of use.

    >>> layout = Layout([[0, 1]], torch.tensor([[1, 0]]), torch.device("cpu"))
    >>> factor = Factor(layout, torch.tensor([[2.0, 3.0, 1.0]]))
    >>> round(factor.log_det().exp().item(), 4), factor.solve(torch.tensor([[5.0, 5.0]])).tolist()
    (5.0, [[2.0, 1.0]])
    """

    def __init__(self, layout: Layout, values: Tensor) -> None:
        self.layout = layout
        pads = layout.empty.to(values.dtype).view(layout.length, layout.chains, layout.block)
        self.diagonal: list[Tensor] = []  # L_t, (S, K, b, b)
        self.below: list[Tensor] = []  # L_{t+1, t}
        fine = []
        for t in range(layout.length):
            block = layout.within.blocks(layout, values, t)
            block.diagonal(dim1=-2, dim2=-1).add_(pads[t])
            if t:
                block -= product(self.below[-1], self.below[-1].mT)
            lower, ok = small_blocks.cholesky(block)
            self.diagonal.append(lower)
            fine.append(ok.all(-1))
            if t + 1 < layout.length:
                coupling = layout.between.blocks(layout, values, t)
                self.below.append(small_blocks.solve(lower, coupling.mT).mT)
        self.ok = torch.stack(fine).all(0)

    def log_det(self) -> Tensor:
        """Compute log|A|, (S,)."""
        return 2 * sum(lower.diagonal(dim1=-2, dim2=-1).log().sum((-2, -1)) for lower in self.diagonal)  # type: ignore[return-value]

    def solve(
        self,
        x: Tensor,  # (S, D) or (S, D, R)
    ) -> Tensor:
        """Solve A y = x, for one vector or for R columns."""
        columns = self._forward(self._apart(x if x.ndim == 3 else x[..., None]))
        return self._together(self._backward(columns), x)

    def spread(
        self,
        z: Tensor,  # (S, D, R)
    ) -> Tensor:
        """Turn noise z ~ N(0, I) into draws L⁻ᵀ z ~ N(0, A⁻¹), (S, D, R)."""
        return self._together(self._backward(self._apart(z)), z)

    def selected_inverse(self) -> Tensor:
        """Compute the entries of A⁻¹ on the diagonal and at the pairs of the pattern, (S, D + E)."""
        layout = self.layout
        shape = (len(self.ok), sum(map(len, layout.within.entries)) + sum(map(len, layout.between.entries)))
        out = self.diagonal[0].new_empty(shape)
        following: Tensor | None = None
        for t in reversed(range(layout.length)):
            root = small_blocks.inverse(self.diagonal[t])
            inverse = product(root.mT, root)
            if following is not None:
                gain = product(self.below[t], root)
                down = product(following, gain)  # minus the block below
                inverse = inverse + product(gain.mT, down)
                out[:, layout.between.entries[t]] = -down.flatten(1)[:, layout.between.flat[t]]
            out[:, layout.within.entries[t]] = inverse.flatten(1)[:, layout.within.flat[t]]
            following = inverse
        return out

    def _apart(self, x: Tensor) -> list[Tensor]:
        """Columns (S, D, R) as blocks (S, K, b, R)."""
        layout = self.layout
        slots = x.new_zeros(len(x), len(layout.empty), x.shape[-1]).index_copy_(1, layout.slots, x)
        shape = (len(x), layout.length, layout.chains, layout.block, x.shape[-1])
        return list(slots.view(shape).unbind(1))

    def _together(self, blocks: list[Tensor], like: Tensor) -> Tensor:
        slots = torch.stack(blocks, 1).flatten(1, 3)
        return slots[:, self.layout.slots].reshape(like.shape)

    def _forward(self, x: list[Tensor]) -> list[Tensor]:
        out: list[Tensor] = []
        for t, part in enumerate(x):
            left = part - product(self.below[t - 1], out[-1]) if t else part
            out.append(small_blocks.solve(self.diagonal[t], left))
        return out

    def _backward(self, y: list[Tensor]) -> list[Tensor]:
        out: list[Tensor] = []
        for t in reversed(range(len(y))):
            left = y[t] - product(self.below[t].mT, out[-1]) if out else y[t]
            out.append(small_blocks.tsolve(self.diagonal[t], left))
        return out[::-1]
