"""What every family of posteriors over some parameters of a network shares: the mean, the prior, the moves."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchngvi.networks import kernels
from torchngvi.networks.blocks import blocks
from torchngvi.networks.finite import add_share_, squared_norm, zero_where_
from torchngvi.networks.noise import normals


class Family(nn.Module, ABC):
    """Gaussians N(m, T C Cᵀ) over some parameters of a network, independent from one parameter tensor to the next.

    The parameters themselves stay the network's: they hold the draw θ = m + √T C ε in training and m in evaluation.  C
    is the root at the temperature 1, with (C Cᵀ)⁻¹ = N (H + δ) where q has settled.  The mean is kept in float32 at
    least, whatever the dtype of the parameters.

    Args:
        parameters: by name, the network's own.
        prior: δ = λ/N by name, the prior's precision a datum.
        start: h₀ by name, the curvature a datum that the posterior starts from.
        num_data: the number N of labels.

    Attributes:
        single: whether it wants the gradients of single labels, with the labels first, and not that of their mean.
        fused: whether a step takes compiled loops where they fit; `attach` sets it.
        passes: over the data that `settle_` takes; more than 1 where the part of a curvature depends on C, and then
            `statistics` sums over gradients that have the labels first.
    """

    single = False
    passes = 1
    fused = False

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        prior: Mapping[str, float],
        start: Mapping[str, float],
        num_data: int,
    ) -> None:
        super().__init__()
        self.names = list(parameters)
        self.parameters_of_network = list(parameters.values())  # a list, so that they are not parameters of q
        self.prior = [prior[name] for name in self.names]
        self.start = [start[name] for name in self.names]
        self.num_data = num_data
        self._mangled = [key("", name)[1:] for name in self.names]
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
        return [self._buffers[f"{what}/{name}"] for name in self._mangled]  # type: ignore[misc]

    @property
    def mean(self) -> list[Tensor]:
        """The means, one tensor a parameter."""
        return self.stored("mean")

    def follow_(self) -> None:
        """Move to the devices of the parameters, where the network has been moved."""
        if self.mean[0].device == self.parameters_of_network[0].device:
            return
        device = dict(zip(self._mangled, (p.device for p in self.parameters_of_network), strict=True))
        for stored, buffer in self.named_buffers():
            self._buffers[stored] = buffer.to(device[stored.partition("/")[2]])

    def adopt_(self) -> None:
        """Take the parameters for the mean where they are not what the mean is in their dtype."""
        for p, m in zip(self._held(), self.mean, strict=True):
            m.copy_(p if p.dtype == m.dtype else torch.where(p == m.to(p.dtype), m, p.to(m.dtype)))

    def mean_(self) -> None:
        """Write the mean into the parameters."""
        torch._foreach_copy_(self._held(), self.mean)

    def add_prior_(self, gradients: Mapping[str, Tensor], write: bool) -> None:
        """Add the prior's part δm to gradients of the mean loss.

        Args:
            gradients: by name, changed in place.
            write: whether the mean is written into the parameters too; each weight is read once for both.
        """
        if self.fused:
            own = [gradients.get(name) for name in self.names]
            if kernels.fits(self._held(), self.mean, own):
                kernels.add_prior_(self._held(), self.mean, own, self.prior, write)
                return
        places = zip(self.names, self._held(), self.mean, self.prior, strict=True)
        each = [(p, m, gradients.get(name), delta) for name, p, m, delta in places]
        for delta in dict.fromkeys(self.prior):
            alike = [(p, m, g) for p, m, g, of_p in each if g is not None and of_p == delta]
            for parameters, mean, forces in blocks(*map(list, zip(*alike, strict=True))) if alike else ():
                if write:
                    torch._foreach_copy_(parameters, mean)
                torch._foreach_add_(forces, mean, alpha=delta)
        for p, m, g, _ in each:
            if write and g is None:
                p.copy_(m)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle has: it is attached to nothing, and may be read where there is no compiler."""
        return {**self.__dict__, "fused": False}

    def noise(self, seed: int, draw: int) -> list[Tensor]:
        """Return the noise ε of a draw, only to be read.

        Args:
            seed, draw: of the noise.

        Returns:
            One tensor a parameter, of the dtype of the mean.
        """
        return [normals(m, name, seed, draw) for m, name in zip(self.mean, self.names, strict=True)]

    def draw_(self, seed: int, draw: int, spread: float) -> None:
        """Write the draw θ = m + √T C ε into the parameters.

        Args:
            seed, draw: of the noise.
            spread: √T.
        """
        drawn = torch._foreach_add(self.mean, self.colored(self.noise(seed, draw)), alpha=spread)
        torch._foreach_copy_(self._held(), list(drawn))

    def disturb_(self, seed: int, draw: int, spread: float) -> None:
        """Add the noise √T C ε of a draw to what the parameters hold.

        Args:
            seed, draw: of the noise.
            spread: √T.
        """
        torch._foreach_add_(self._held(), self.colored(self.noise(seed, draw)), alpha=spread)

    def departure(self) -> Tensor:
        """Return |C⁻¹ dm|², a number, of how far the parameters are from the mean that they held."""
        return squared_norm(list(torch._foreach_norm(self.whitened(self._moves()))))

    def take_(self, share: float | Tensor) -> None:
        """Move the mean by a share of how far the parameters are from it: what an optimizer did.

        Args:
            share: 0 takes nothing, whatever the parameters hold; a 0-d tensor on a device with a queue.
        """
        if isinstance(share, float) and share == 0:
            return
        if isinstance(share, float) and self._alike():
            torch._foreach_lerp_(self.mean, self._held(), share)
            return
        moves = self._moves()
        if isinstance(share, Tensor):
            zero_where_(moves, share == 0)
        add_share_(self.mean, moves, share)

    def advance_(self, share: float | Tensor, seed: int, draw: int, spread: float) -> None:
        """Move the mean as `take_` does, and write the next draw into the parameters.

        Args:
            share: of the move.
            seed, draw, spread: of the draw.
        """
        self.take_(share)
        self.draw_(seed, draw, spread)

    def _alike(self) -> bool:
        """Whether the parameters have the dtypes of their means."""
        return all(p.dtype == m.dtype for p, m in zip(self.parameters_of_network, self.mean, strict=True))

    def _moves(self) -> list[Tensor]:
        """How far the parameters are from the mean that they held, rounded as they are."""
        pairs = zip(self._held(), self.mean, strict=True)
        return [p - m if p.dtype == m.dtype else (p - m.to(p.dtype)).to(m.dtype) for p, m in pairs]

    def _held(self) -> list[Tensor]:
        """What the parameters hold, without their graph."""
        return [p.detach() for p in self.parameters_of_network]

    @abstractmethod
    def colored(self, noise: list[Tensor]) -> list[Tensor]:
        """Return C ε.

        Args:
            noise: ε, one tensor a parameter, only to be read.
        """

    @abstractmethod
    def whitened(self, moves: list[Tensor]) -> list[Tensor]:
        """Return C⁻¹ dm, whose squared norm is twice the divergence of a move of the mean at the temperature 1.

        Args:
            moves: dm, one tensor a parameter.
        """

    @abstractmethod
    def natural(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return N C Cᵀ g = (H + δ)⁻¹ g, the natural gradient of the mean for a gradient of the mean loss.

        Args:
            gradients: g, one tensor a parameter.
        """

    @abstractmethod
    def statistics(self, gradients: list[Tensor | None], scale: float) -> list[Tensor | None]:
        """Return the family's part of the curvature scale · g gᵀ; processes that train together average it.

        Args:
            gradients: g, one tensor a parameter, None where nothing was observed.
            scale: the number of independent labels in g.
        """

    @abstractmethod
    def absorb_(self, statistics: list[Tensor | None], rate: float | Tensor) -> None:
        """Move what is known of the curvature towards a statistic, where there is one.

        Args:
            statistics: what `statistics` returned.
            rate: the share of the new one.
        """

    @abstractmethod
    def refresh_(self, weight: float) -> None:
        """Make C from what is known of the curvature.

        Args:
            weight: of the start in the geometric mean of start and curvature, 1 before anything was observed.
        """

    def restart_(self, observed: bool) -> None:
        """Prepare for the first call of `settle_`.

        Args:
            observed: whether a curvature is known, which a parameter that is frozen keeps.
        """

    def settle_(self, statistics: list[Tensor | None]) -> None:
        """Make C from the curvature of all data alone, without the start and without what was observed before.

        Args:
            statistics: what `statistics` returned, averaged over the data.
        """
        self.absorb_(statistics, 1.0)
        self.refresh_(0.0)

    @abstractmethod
    def variances(self) -> list[Tensor]:
        """Return the diagonal of C Cᵀ, one tensor a parameter."""

    @abstractmethod
    def log_det(self) -> Tensor:
        """Return log|C Cᵀ|, a number."""


def key(what: str, name: str) -> str:
    """Name a buffer: names of parameters have dots, names of buffers may not.

    >>> key("mean", "0.weight")
    'mean/0/weight'
    """
    return f"{what}/{name.replace('.', '/')}"
