"""What every family of posteriors over some parameters of a network shares: the mean, the prior, the moves."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchngvi.networks.noise import normals_


class Scales(NamedTuple):
    """The numbers of q that its families share.

    Attributes:
        num_data: N' = N/T, the number of labels over the temperature.
        seed: of the noise.
        draw: the number of the present draw.
    """

    num_data: float
    seed: int
    draw: int


class Family(nn.Module, ABC):
    """Gaussians N(m, V) over some parameters of a network, independent from one parameter tensor to the next.

    The parameters themselves stay the network's: they hold the draw θ = m + Cε in training and m in evaluation.  The
    mean is kept in float32 at least, whatever the dtype of the parameters.

    Args:
        parameters: by name, the network's own.
        prior: δ = λ/N by name, the prior's precision a datum.
        start: h₀ by name, the curvature a datum that the posterior starts from.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], prior: Mapping[str, float], start: Mapping[str, float]
    ) -> None:
        super().__init__()
        self.names = list(parameters)
        self.parameters_of_network = list(parameters.values())  # a list, so that they are not parameters of q
        self.prior = [prior[name] for name in self.names]
        self.start = [start[name] for name in self.names]
        for name, p in parameters.items():
            dtype = torch.promote_types(p.dtype, torch.float32)
            self.register_buffer(key("mean", name), p.detach().to(dtype, copy=True))

    def stored(self, what: str) -> list[Tensor]:
        """Return the buffers of one kind, in the order of the names.

        Args:
            what: "mean", or what the family calls its other buffers.

        Returns:
            One tensor a parameter.
        """
        return [self.get_buffer(key(what, name)) for name in self.names]

    @property
    def mean(self) -> list[Tensor]:
        """The means, one tensor a parameter."""
        return self.stored("mean")

    def mean_(self) -> None:
        """Write the mean into the parameters."""
        torch._foreach_copy_(self.parameters_of_network, self.mean)

    def adopt_(self) -> None:
        """Take what the parameters hold for the mean."""
        torch._foreach_copy_(self.mean, self.parameters_of_network)

    def draw_(self, scales: Scales) -> None:
        """Write the draw θ = m + Cε into the parameters.

        Args:
            scales: which noise.
        """
        if all(p.dtype == m.dtype for p, m in zip(self.parameters_of_network, self.mean, strict=True)):
            noise = self.parameters_of_network
        else:
            noise = [torch.empty_like(m) for m in self.mean]
        normals_(noise, self.names, scales.seed, scales.draw)
        self.color_(noise)
        torch._foreach_add_(noise, self.mean)
        if noise is not self.parameters_of_network:
            torch._foreach_copy_(self.parameters_of_network, noise)

    def moves(self) -> list[Tensor]:
        """Return how far the parameters are from the mean that they held: what an optimizer did."""
        parameters, mean = self.parameters_of_network, self.mean
        if all(p.dtype == m.dtype for p, m in zip(parameters, mean, strict=True)):
            return list(torch._foreach_sub([p.detach() for p in parameters], mean))
        return [(p.detach() - m.to(p.dtype)).to(m.dtype) for p, m in zip(parameters, mean, strict=True)]

    @abstractmethod
    def color_(self, noise: list[Tensor]) -> None:
        """Turn standard normal noise ε into Cε, in place.

        Args:
            noise: one tensor a parameter, of its shape.
        """

    @abstractmethod
    def whitened(self, moves: list[Tensor]) -> list[Tensor]:
        """Return C⁻¹ dm, whose squared norm is twice the divergence of a move of the mean.

        Args:
            moves: dm, one tensor a parameter.
        """

    @abstractmethod
    def natural(self, gradients: list[Tensor], scales: Scales) -> list[Tensor]:
        """Return N' V g, the natural gradient of the mean for a gradient of the mean loss.

        Args:
            gradients: g, one tensor a parameter.
            scales: N'.
        """

    @abstractmethod
    def observe_(self, gradients: Sequence[Tensor | None], scale: float, rate: float) -> None:
        """Move the running curvature towards the family's part of scale · g gᵀ.

        Args:
            gradients: g, one tensor a parameter, or None where it was not used.
            scale: the number of independent labels in g.
            rate: of the running mean.
        """

    @abstractmethod
    def observations(self) -> list[Tensor]:
        """Return the tensors that hold what was observed, linear in it, so that processes can average them."""

    @abstractmethod
    def refresh_(self, scales: Scales, weight: float) -> None:
        """Make V from the running curvature.

        Args:
            scales: N'.
            weight: the weight w of the start in the geometric mean of start and curvature.
        """

    @abstractmethod
    def variances(self) -> list[Tensor]:
        """Return the diagonal of V, one tensor a parameter."""

    @abstractmethod
    def log_det(self) -> Tensor:
        """Return log|V|, a number."""


def key(what: str, name: str) -> str:
    """Name a buffer: names of parameters have dots, names of buffers may not.

    Args:
        what: the kind of buffer.
        name: of the parameter.

    Returns:
        The name of the buffer.

    >>> key("mean", "0.weight")
    'mean/0/weight'
    """
    return f"{what}/{name.replace('.', '/')}"
