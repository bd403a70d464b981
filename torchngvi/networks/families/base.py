"""What every family of posteriors over some parameters of a network shares: the mean, the prior, the moves."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchngvi.networks.noise import normals

Delta = float | Tensor  # the precision of the prior a datum, of all weights of a parameter or of each


class Family(nn.Module, ABC):
    """Gaussians N(m, T C Cᵀ) over some parameters of a network, independent from one parameter tensor to the next.

    It is no posterior of `torchngvi.posteriors` itself, which would keep a second, flattened copy of the mean and of
    each draw, and whose verbs take as many lines; `NetworkGaussian.as_gaussian` makes one of the blocks.
    The parameters themselves stay the network's: they hold the draw θ = m + √T C ε in training and m in evaluation.  C
    is the root at the temperature 1, with (C Cᵀ)⁻¹ = N (H + δ) where q has settled.  In training, but not after a
    Laplace approximation, no weight is wider than at the start, 1/(N(h₀ + δ)): a weight that the data say nothing of
    would be as wide as the prior, and the noise of many of them buries what the others have learned.  The mean is kept
    in float32 at least.

    Args:
        parameters: by name, the network's own.
        prior: δ = λ/N by name, the prior's precision a datum.
        start: h₀ by name, the curvature a datum that the posterior starts from, and its least one in training.
        num_data: the number N of labels.
        centers: the mean m₀ of the prior by name, 0 where there is none.

    Attributes:
        single: whether it wants the gradients of single labels, with the labels first, and not that of their mean.
        passes: over the data that `settle_` takes; more than 1 where the part of a curvature depends on C, and then
            `statistics` sums over gradients that have the labels first.
        bounded: whether h₀ is the least curvature; not of a Laplace approximation, nor of published methods.
    """

    single = False
    passes = 1

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        prior: Mapping[str, Delta],
        start: Mapping[str, float],
        num_data: int,
        centers: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.names = list(parameters)
        self.parameters_of_network = list(parameters.values())  # a list, so that they are not parameters of q
        self.start = [start[name] for name in self.names]
        self.num_data, self.bounded = num_data, True
        self.picked: frozenset[str] = frozenset()  # embeddings: a row without a gradient has no pull to the prior
        self._mangled = [key("", name)[1:] for name in self.names]
        self._numbers = [d if isinstance(d, float) else 0.0 for d in map(prior.__getitem__, self.names)]
        for name, p in parameters.items():
            dtype = torch.promote_types(p.dtype, torch.float32)
            self.register_buffer(key("mean", name), p.detach().to(dtype, copy=True))
            for what, given in (("delta", prior[name]), ("center", (centers or {}).get(name))):
                if isinstance(given, Tensor):
                    self.register_buffer(key(what, name), given.detach().to(p.device, dtype, copy=True))
        self.lay_out_()
        self.refresh_()

    @abstractmethod
    def lay_out_(self) -> None:
        """Register the buffers of the covariance, which begins at the start."""

    def stored(self, what: str) -> list[Tensor]:
        """Return the buffers of one kind, "mean" or what the family calls its other ones, one tensor a parameter."""
        return [self._buffers[f"{what}/{name}"] for name in self._mangled]  # type: ignore[misc]

    @property
    def mean(self) -> list[Tensor]:
        """The means, one tensor a parameter."""
        return self.stored("mean")

    @property
    def prior(self) -> list[Delta]:
        """The precision δ of the prior a datum, one number or tensor a parameter."""
        pairs = zip(self._mangled, self._numbers, strict=True)
        return [self._buffers.get(f"delta/{name}", number) for name, number in pairs]  # type: ignore[misc]

    @property
    def centers(self) -> list[Tensor | None]:
        """The means of the prior, None for 0."""
        return [self._buffers.get(f"center/{name}") for name in self._mangled]

    def follow_(self) -> None:
        """Move to the devices of the parameters, where the network has been moved."""
        if self.mean[0].device == self.parameters_of_network[0].device:
            return
        device = dict(zip(self._mangled, (p.device for p in self.parameters_of_network), strict=True))
        for stored, buffer in self.named_buffers():
            self._buffers[stored] = buffer.to(device[stored.partition("/")[2]])

    def adopt_(self) -> None:
        """Take the parameters for the mean where they are not what the mean is in their dtype."""
        for p, m in zip(self.held(), self.mean, strict=True):
            m.copy_(p if p.dtype == m.dtype else torch.where(p == m.to(p.dtype), m, p.to(m.dtype)))

    def mean_(self) -> None:
        """Write the mean into the parameters."""
        torch._foreach_copy_(self.held(), self.mean)

    def add_prior_(self, gradients: Mapping[str, Tensor], at: list[Tensor]) -> None:
        """Add the prior's part δ(θ - m₀), at weights θ, to gradients of the mean loss, by name, in place."""
        each = zip(self.names, at, self.prior, self.centers, strict=True)
        known = [(name, gradients[name], m, delta, center) for name, m, delta, center in each if name in gradients]
        plain = [
            (g, m, delta)
            for name, g, m, delta, center in known
            if center is None and isinstance(delta, float) and name not in self.picked
        ]
        for value in {delta for *_, delta in plain}:
            alike = [(g, m) for g, m, delta in plain if delta == value]
            torch._foreach_add_(*map(list, zip(*alike, strict=True)), alpha=value)
        for name, g, m, delta, center in known:
            if center is not None or isinstance(delta, Tensor) or name in self.picked:
                pull = (m if center is None else m - center) * delta
                g.add_(pull * (g != 0).any(1, keepdim=True) if name in self.picked else pull)

    def noise(self, seed: int, draw: int) -> list[Tensor]:
        """Return the noise ε of a draw, only to be read, one tensor a parameter, of the dtype of the mean."""
        return [normals(m, name, seed, draw) for m, name in zip(self.mean, self.names, strict=True)]

    def draw_(self, seed: int, draw: int, spread: float) -> None:
        """Write the draw θ = m + √T C ε into the parameters, √T the spread."""
        drawn = torch._foreach_add(self.mean, self.colored(self.noise(seed, draw)), alpha=spread)
        torch._foreach_copy_(self.held(), list(drawn))

    def disturb_(self, seed: int, draw: int, spread: float) -> None:
        """Add the noise √T C ε of a draw to what the parameters hold."""
        torch._foreach_add_(self.held(), self.colored(self.noise(seed, draw)), alpha=spread)

    def take_moves_(self) -> list[Tensor]:
        """Return how far the parameters are from the mean that they held, in their place where their dtype is its."""
        pairs = zip(self.held(), self.mean, strict=True)
        return [p.sub_(m) if p.dtype == m.dtype else p.sub_(m.to(p.dtype)).to(m.dtype) for p, m in pairs]

    def held(self) -> list[Tensor]:
        """Return what the parameters hold, without their graph."""
        return [p.detach() for p in self.parameters_of_network]

    def departure(self, moves: list[Tensor], note: Callable[[int, Tensor], None]) -> Tensor:
        """Return N dmᵀ(H + δ)dm, a number, for moves dm of the mean; their squares are noted, one at a time."""
        for k, move in enumerate(moves):
            note(k, move * move)
        return self._squared_length(moves)

    def _squared_length(self, moves: list[Tensor]) -> Tensor:
        """N dmᵀ(H + δ)dm, a number."""
        norms = torch._foreach_norm(self.whitened(moves))
        return torch.stack([norm.to(norms[0]) for norm in norms]).square().sum()

    @abstractmethod
    def colored(self, noise: list[Tensor]) -> list[Tensor]:
        """Return C ε for noise that is only to be read, one tensor a parameter."""

    @abstractmethod
    def whitened(self, moves: list[Tensor]) -> list[Tensor]:
        """Return C⁻¹ dm, whose squared norm is twice the divergence of a move of the mean at the temperature 1."""

    @abstractmethod
    def natural(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return N C Cᵀ g = (H + δ)⁻¹ g, the natural gradient of the mean for a gradient of the mean loss."""

    @abstractmethod
    def statistics(self, gradients: list[Tensor | None], scale: float) -> list[Tensor | None]:
        """Return the family's part of the curvature scale · g gᵀ, scale the number of independent labels in g.

        A gradient is None where nothing was observed.  Processes that train together average what is returned.
        """

    @abstractmethod
    def absorb_(self, statistics: list[Tensor | None], rate: float | Tensor) -> None:
        """Move what is known of the curvature by a rate towards a statistic, where there is one."""

    @abstractmethod
    def refresh_(self) -> None:
        """Make C from what is known of the curvature."""

    def restart_(self, observed: bool) -> None:
        """Prepare for the first call of `settle_`; where a curvature is known, a parameter that is frozen keeps it."""

    def settle_(self, statistics: list[Tensor | None]) -> None:
        """Make C from the curvature of all data alone, without the start and without what was observed before."""
        self.bounded = False
        self.absorb_(statistics, 1.0)
        self.refresh_()

    def take_prior_(self, prior: Mapping[str, float]) -> None:
        """Take other precisions of the prior a datum by name, of those that have one number for all weights."""
        self._numbers = [prior.get(name, delta) for name, delta in zip(self.names, self._numbers, strict=True)]
        self.refresh_()

    @abstractmethod
    def variances(self) -> list[Tensor]:
        """Return the diagonal of C Cᵀ, one tensor a parameter."""

    @abstractmethod
    def precisions(self) -> list[Tensor]:
        """Return the diagonal of N (H + δ), of each weight given the others, one tensor a parameter."""

    @abstractmethod
    def log_det(self) -> Tensor:
        """Return log|C Cᵀ|, a number."""

    def vector(self, tensors: list[Tensor]) -> Tensor:
        """Return one vector of the numbers of all parameters, in the order of `blocks`."""
        return torch.cat([tensor.flatten() for tensor in tensors])

    @abstractmethod
    def blocks(self) -> list[Tensor]:
        """Return the lower roots of the blocks of C Cᵀ, (blocks, size, size) for those of one size that follow."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Load a state with the prior that it has, and make C of it; files of 0.2 have no flag for some families."""
        state_dict.setdefault(f"{prefix}_extra_state", 1.0)
        for what, (name, mean) in itertools.product(("delta", "center"), zip(self._mangled, self.mean, strict=True)):
            if f"{prefix}{what}/{name}" in state_dict:
                self.register_buffer(f"{what}/{name}", torch.empty_like(mean))
        super()._load_from_state_dict(state_dict, prefix, *others)
        self.refresh_()

    def get_extra_state(self) -> dict[str, Any]:
        """Return whether h₀ is the least curvature, and δ by name where it is a number."""
        prior = {name: d for name, d in zip(self.names, self.prior, strict=True) if isinstance(d, float)}
        return {"bounded": self.bounded, "prior": prior}

    def set_extra_state(self, state: dict[str, Any] | float) -> None:
        """Take it up again; a number is of release 0.2, which had no bound."""
        self.bounded = isinstance(state, dict) and state["bounded"]
        self.take_prior_(state.get("prior", {}) if isinstance(state, dict) else {})


def key(what: str, name: str) -> str:
    """Name a buffer, as mean/0/weight: names of parameters have dots, names of buffers may not."""
    return f"{what}/{name.replace('.', '/')}"
