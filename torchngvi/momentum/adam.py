"""Adam on q's own coordinates (Kingma and Ba 2015, Algorithm 1), fed Euclidean or natural gradients.

    m = β₁ m + (1 - β₁) g,   v = β₂ v + (1 - β₂) g²,   λ' = λ - ρ m̂ / (√v̂ + ε)

entry by entry, m̂ = m / (1 - β₁ᵗ) and v̂ = v / (1 - β₂ᵗ).  Tan (2025), section 4, compares it on both
gradients with normalised natural gradients: its scaling by coordinates repeats what F⁻¹ has done.
"""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import is_number, read_list, read_number, shown
from torchngvi.errors import InputError
from torchngvi.interfaces import Coordinates, Momentum, Posterior


@final
class Adam(Momentum):
    """Adam on the change of the coordinates that a rule asks for, entry by entry.

    The change is averaged with weight β₁ and divided by the root of the average of its squares, both corrected for
    their start at zero.  One wants it with Euclidean gradients, as the method that most people know; on natural
    gradients it scales a second time what F⁻¹ has scaled already.  The rule must move q along a straight line in its
    own coordinates.

    Args:
        betas: the weights β₁ and β₂ of the past in the averages of g and of g², each in [0, 1).
        eps: the positive number ε that is added to √v̂, in the units of the coordinates.

    Raises:
        InputError: if a beta lies outside [0, 1), or eps is not positive.

    >>> from torchngvi import SRVN, CholeskyGaussian
    >>> from torchngvi.methods import RootGD
    >>> q = CholeskyGaussian(2)
    >>> euclidean, natural = RootGD(q, lr=1e-3, momentum=Adam()), SRVN(q, lr=1e-3, momentum=Adam())
    """

    needs_natural = False
    carried = ("mean_vector",)

    def __init__(self, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        what = "are two weights of the past, at least 0 and below 1"
        pair = read_list("betas", betas, what)
        if len(pair) != 2 or not all(is_number(beta, at_least=0, below=1) for beta in pair):
            raise InputError(f"betas {what}; got {shown(betas)}.")
        self.betas, self.eps = (float(pair[0]), float(pair[1])), read_number("eps", eps, above=0)

    def init(self, q: Posterior) -> dict[str, Tensor]:
        """Return averages of zero, and a count of no steps."""
        vector, matrix = q.mean_probe.detach(), q.root_probe.detach()
        return {
            "mean_vector": torch.zeros_like(vector),
            "mean_matrix": torch.zeros_like(matrix),
            "square_vector": torch.zeros_like(vector),
            "square_matrix": torch.zeros_like(matrix),
            "averaged": torch.zeros_like(vector[..., 0]),
        }

    def __call__(
        self,
        q: Posterior,
        change: Coordinates,
        norm2: Callable[[], Tensor],
        state: dict[str, Tensor],
    ) -> tuple[Coordinates, dict[str, Tensor]]:
        """Return Adam's change of the vector and of the matrix, which share one count of the steps."""
        memory = self.moments(change, state)
        return self.change(q, memory), memory

    def moments(self, change: Coordinates, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the running moments with one more change in them, and the count of the steps."""
        first, second = self.betas
        memory = {"averaged": state["averaged"] + 1}
        for name, part in (("vector", change.vector), ("matrix", change.matrix)):
            memory[f"mean_{name}"] = torch.lerp(part, state[f"mean_{name}"], first)
            memory[f"square_{name}"] = torch.lerp(part.square(), state[f"square_{name}"], second)
        return memory

    def change(self, q: Posterior, memory: dict[str, Tensor]) -> Coordinates:
        """Return m̂/(√v̂ + ε) of these moments, for the vector and for the matrix."""
        (first, second), structure, steps = self.betas, q.structure, memory["averaged"]
        scale, scale2 = 1 / (1 - first**steps), 1 / (1 - second**steps)
        vector = scale[..., None] * memory["mean_vector"]
        matrix = structure.scaled(scale, memory["mean_matrix"])
        size = (scale2[..., None] * memory["square_vector"]).sqrt() + self.eps
        sizes = structure.scaled(scale2, memory["square_matrix"]).sqrt() + self.eps
        return Coordinates(vector / size, matrix / sizes)
