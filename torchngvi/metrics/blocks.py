"""One preconditioner for each block of λ: exact where q is a product over the blocks, an approximation elsewhere.

It needs ΣD_b² numbers in the place of D².
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import read_instance, read_list
from torchngvi.errors import InputError
from torchngvi.metrics.preconditioner import Preconditioner, State, check_count
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior


class _Slice:
    """What the preconditioner of a block sees of the posterior: the length and place of its part of λ."""

    def __init__(self, vector: Tensor) -> None:
        self.vector, self.size = vector, vector.shape[-1]


@final
class Blocks(Preconditioner):
    """A block-diagonal metric: a copy of one preconditioner for each consecutive block of λ.

    One wants it where λ is too long for a D x D matrix, or where q is a product over the blocks, so that its Fisher
    matrix is block-diagonal.

    Args:
        rule: the preconditioner, `Recursive`, `MatrixFree`, `Window` or `BatchFisher`; its warm-up and generator are
            those
            of all blocks.
        sizes: the lengths of the blocks, which sum to D.

    Raises:
        InputError: if the rule takes no scores, or there are no sizes; at construction of an optimizer, if the sizes do
            not
            sum to D.

    >>> from torchngvi.ifvb import MeanFieldGaussian, Recursive
    >>> len(Blocks(Recursive(), [2, 2]).fresh(MeanFieldGaussian(torch.zeros(4))))
    2
    """

    def __init__(self, rule: Preconditioner, sizes: Sequence[int]) -> None:
        read_instance("rule", rule, Preconditioner, "is one that learns from scores, such as Recursive()")
        sizes = read_list("sizes", sizes, "lists the length of each block")
        if rule.samples == 0 or isinstance(rule, Blocks):
            raise InputError(f"Blocks splits a rule that learns from scores; got {type(rule).__name__}.")
        if not sizes:
            raise InputError("sizes lists the length of each block; got none.")
        self.rule, self.sizes = rule, [check_count("a block size", size) for size in sizes]
        self.samples, self.remembers = rule.samples, rule.remembers
        self.warmup, self.generator = rule.warmup, rule.generator

    def fresh(self, q: FlatPosterior) -> State:
        """Return one state for each block.

        Raises:
            InputError: if the sizes do not sum to D, or the rule refuses a block.
        """
        if sum(self.sizes) != q.size:
            raise InputError(f"the blocks have {sum(self.sizes)} entries and lambda has {q.size}.")
        pieces = q.vector.detach().split(self.sizes, -1)
        return {str(i): self.rule.fresh(_Slice(piece)) for i, piece in enumerate(pieces)}  # type: ignore[arg-type]

    def absorb(self, state: State, scores: Tensor, generator: torch.Generator | None = None) -> State:
        """Hand its part of the scores to the preconditioner of each block."""
        pieces = enumerate(scores.split(self.sizes, -1))
        return {str(i): state[str(i)] | self.rule.absorb(state[str(i)], piece, generator) for i, piece in pieces}

    def direction(self, state: State, gradient: Tensor, q: FlatPosterior) -> Tensor:
        """Return the directions of the blocks, side by side."""
        pieces = gradient.split(self.sizes, -1)
        return torch.cat([self.rule.direction(state[str(i)], piece, q) for i, piece in enumerate(pieces)], -1)
