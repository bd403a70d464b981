"""Averages of normalised natural gradients, as in Snngm of Tan (2025), section 4.

    m_t = β m_{t-1} + (1 - β) g̃_t / ‖g̃_t‖        λ' = λ - ρ m_t / (1 - βᵗ)

What is normalised is the natural gradient at hand, not its average (as in Cutkosky and Mehta 2020).  The
norm is one of

    euclidean     ‖g̃‖₂ = √(g̃ᵀg̃) over the coordinates that q has: a triangle, or a diagonal
    riemannian    ‖g̃‖_F = √(g̃ᵀFg̃) = √(|a|² + ½‖P‖²_F)

The paper prints both without the root; steps have unit length with it only.
"""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import read_choice, read_flag, read_number
from torchngvi.interfaces import Coordinates, Momentum, Posterior

NORMS = ("euclidean", "riemannian")


@final
class NormalizedMomentum(Momentum):
    """The average of normalised natural gradients; where a gradient vanishes, nothing is added.

    Every natural gradient is divided by its norm before it enters the average, so that the length of a step is set by
    the learning rate alone.  One wants it for noisy natural gradients of very different lengths; with a constant
    learning rate the iterates do not settle, so that the rate has to decrease.  The rule must be a natural-gradient
    one.

    Args:
        norm: "euclidean" for the norm over the coordinates that q has, or "riemannian" for the natural norm.
        beta: the weight β of the past, in [0, 1).
        bias_correction: whether to divide by 1 - βᵗ, so that the first step is a unit vector; without it, this is the
            form
            that is analysed in the paper.

    Raises:
        InputError: if the norm is another one, or beta lies outside [0, 1).

    >>> from torchngvi import SRVN, CholeskyGaussian
    >>> opt = SRVN(CholeskyGaussian(2), lr=0.01, momentum=NormalizedMomentum())
    """

    needs_natural = True
    carried = ("mean_vector",)

    def __init__(self, norm: str = "euclidean", *, beta: float = 0.9, bias_correction: bool = True) -> None:
        self.norm = read_choice("norm", norm, NORMS)
        self.beta = read_number("beta", beta, "is the weight of the past", at_least=0, below=1)
        self.bias_correction = read_flag("bias_correction", bias_correction)

    def init(self, q: Posterior) -> dict[str, Tensor]:
        """Return an average of zero, and a count of no steps."""
        vector = torch.zeros_like(q.mean_probe.detach())
        return {
            "mean_vector": vector,
            "mean_matrix": torch.zeros_like(q.root_probe.detach()),
            "averaged": vector[..., 0].clone(),
        }

    def __call__(
        self,
        q: Posterior,
        change: Coordinates,
        norm2: Callable[[], Tensor],
        state: dict[str, Tensor],
    ) -> tuple[Coordinates, dict[str, Tensor]]:
        """Return the average with this unit vector in it, as the change to make and as the new state."""
        structure, beta = q.structure, self.beta
        if self.norm == "riemannian":
            size2 = norm2()
        else:
            size2 = structure.dot(change.vector, change.vector)
            size2 = size2 + structure.entries_norm2(structure.tril(change.matrix))
        # g̃ = 0 at the optimum of an exact fit: nothing is added
        weight = (1 - beta) * torch.where(size2 == 0, 0.0, size2.rsqrt())
        vector = beta * state["mean_vector"] + weight[..., None] * change.vector
        matrix = beta * state["mean_matrix"] + structure.scaled(weight, change.matrix)
        steps = state["averaged"] + 1
        memory = {"mean_vector": vector, "mean_matrix": matrix, "averaged": steps}
        if not self.bias_correction:
            return Coordinates(vector, matrix), memory
        scale = 1 / (1 - beta**steps)
        return Coordinates(scale[..., None] * vector, structure.scaled(scale, matrix)), memory
