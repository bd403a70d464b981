"""The momenta, which average the changes of q's coordinates over the steps."""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import is_number, read_choice, read_flag, read_list, read_number, shown
from torchngvi.errors import InputError
from torchngvi.interfaces import Coordinates, Momentum, Posterior

__all__ = ["Adam", "ExponentialAverage", "NormalizedMomentum"]


def _zeros(q: Posterior, *names: str) -> dict[str, Tensor]:
    """Averages of zero of each name, in the coordinates of q."""
    parts = {"vector": q.mean_probe.detach(), "matrix": q.root_probe.detach()}
    return {f"{name}_{part}": torch.zeros_like(like) for name in names for part, like in parts.items()}


@final
class ExponentialAverage(Momentum):
    """The exponential moving average of the directions, without a correction of its bias towards 0.

    The step goes along M ← ωM + (1 - ω)d, where d is the direction of the present step as far as the step size lets it
    go, so that one gradient of enormous length does not stay in M; on a manifold M is carried to the tangent space at
    each new λ.  Use it for stochastic gradients in the methods that are published with it, such as manifold VB; where
    the first steps should have full length, `NormalizedMomentum` corrects the bias.

    Args:
        weight: the weight ω of the past, in [0, 1).

    Raises:
        InputError: if the weight lies outside [0, 1).

    >>> from torchngvi import SRVN, CholeskyGaussian
    >>> opt = SRVN(CholeskyGaussian(2), lr=0.01, momentum=ExponentialAverage(0.6))
    """

    needs_natural = False
    of_steps = True
    carried = ("mean_vector",)

    def __init__(self, weight: float = 0.9) -> None:
        self.weight = read_number("weight", weight, "is that of the past", at_least=0, below=1)

    def init(self, q: Posterior) -> dict[str, Tensor]:
        """Return an average of zero in the coordinates of q."""
        return _zeros(q, "mean")

    def __call__(
        self, q: Posterior, change: Coordinates, norm2: Callable[[], Tensor], state: dict[str, Tensor]
    ) -> tuple[Coordinates, dict[str, Tensor]]:
        """Return the average with this direction in it, as the change to make and as the new state."""
        past, new = self.weight, 1 - self.weight
        vector = past * state["mean_vector"] + new * change.vector
        matrix = past * state["mean_matrix"] + new * change.matrix
        return Coordinates(vector, matrix), {"mean_vector": vector, "mean_matrix": matrix}


@final
class NormalizedMomentum(Momentum):
    """The average of normalised natural gradients; where a gradient vanishes, nothing is added.

        m_t = β m_{t-1} + (1 - β) g̃_t / ‖g̃_t‖        λ' = λ - ρ m_t / (1 - βᵗ)

    (Snngm of Tan 2025, section 4).  Every natural gradient is divided by its norm before it enters the average, so that
    the length of a step is set by the learning rate alone.  Use it for noisy natural gradients of very different
    lengths; with a constant learning rate the iterates do not settle, so that the rate has to decrease.  The rule must
    be a natural-gradient one.

    Args:
        norm: "euclidean" for √(g̃ᵀg̃) over the coordinates that q has, or "riemannian" for the natural norm
            √(g̃ᵀFg̃) = √(|a|² + ½‖P‖²_F).  The paper prints both without the root.
        beta: the weight β of the past, in [0, 1).
        bias_correction: whether to divide by 1 - βᵗ, so that the first step is a unit vector; without it, this is the
            form that is analysed in the paper.

    Raises:
        InputError: if the norm is another one, or beta lies outside [0, 1).

    >>> from torchngvi import SRVN, CholeskyGaussian
    >>> opt = SRVN(CholeskyGaussian(2), lr=0.01, momentum=NormalizedMomentum())
    """

    needs_natural = True
    carried = ("mean_vector",)

    def __init__(self, norm: str = "euclidean", *, beta: float = 0.9, bias_correction: bool = True) -> None:
        self.norm = read_choice("norm", norm, ("euclidean", "riemannian"))
        self.beta = read_number("beta", beta, "is the weight of the past", at_least=0, below=1)
        self.bias_correction = read_flag("bias_correction", bias_correction)

    def init(self, q: Posterior) -> dict[str, Tensor]:
        """Return an average of zero, and a count of no steps."""
        return {**_zeros(q, "mean"), "averaged": torch.zeros_like(q.mean_probe.detach()[..., 0])}

    def __call__(
        self, q: Posterior, change: Coordinates, norm2: Callable[[], Tensor], state: dict[str, Tensor]
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


@final
class Adam(Momentum):
    """Adam on the change of the coordinates that a rule asks for, entry by entry.

        m = β₁ m + (1 - β₁) g,   v = β₂ v + (1 - β₂) g²,   λ' = λ - ρ m̂ / (√v̂ + ε)

    with m̂ = m / (1 - β₁ᵗ) and v̂ = v / (1 - β₂ᵗ) (Kingma and Ba 2015, Algorithm 1).  Use it with Euclidean gradients,
    as the method that most people know; on natural gradients it scales a second time what F⁻¹ has scaled already
    (compared in Tan 2025, section 4).  The rule must move q along a straight line in its own coordinates.

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
        return {**_zeros(q, "mean", "square"), "averaged": torch.zeros_like(q.mean_probe.detach()[..., 0])}

    def __call__(
        self, q: Posterior, change: Coordinates, norm2: Callable[[], Tensor], state: dict[str, Tensor]
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
