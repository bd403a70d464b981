"""Independent weights: C Cᵀ = diag(1/(N (h + δ)))."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from torchngvi.networks import kernels
from torchngvi.networks.blocks import SIZE, blocks, pieces
from torchngvi.networks.families.base import Family, key
from torchngvi.networks.finite import squared_norm
from torchngvi.networks.noise import windows


class Diagonal(Family):
    """Independent normals, with a curvature h for each weight: C Cᵀ = diag(1/(N (h + δ))).

    One tensor beside the mean, the standard deviation at the temperature 1,

        σ = σ₀ ((h + δ)/(h₀ + δ))^(-(1 - w)/2),   σ₀² = 1/(N (h₀ + δ)),

    w the weight of the start h₀ in the geometric mean of start and running curvature h, which is made from it where it
    is needed.

    Args:
        parameters, prior, start, num_data: as in :class:`Family`.

    Attributes:
        weight: w, 1 before anything was observed.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        prior: Mapping[str, float],
        start: Mapping[str, float],
        num_data: int,
    ) -> None:
        super().__init__(parameters, prior, start, num_data)
        self.weight = 1.0
        for name, mean, first in zip(self.names, self.mean, self.firsts(), strict=True):
            self.register_buffer(key("stddev", name), torch.full_like(mean, first))

    def firsts(self) -> list[float]:
        """Return σ₀, one number a parameter."""
        pairs = zip(self.prior, self.start, strict=True)
        return [(self.num_data * (start + delta)) ** -0.5 for delta, start in pairs]

    @property
    def curvature(self) -> list[Tensor]:
        """The running means of the observed curvature a datum, 0 before anything was observed; copies."""
        found = [sd.clone() for sd in self.stddev]
        self._to_curvature_(found, range(len(found)))
        return found

    @property
    def stddev(self) -> list[Tensor]:
        """The standard deviations σ at the temperature 1."""
        return self.stored("stddev")

    def colored(self, noise: list[Tensor]) -> list[Tensor]:
        """Multiply by σ."""
        return list(torch._foreach_mul(noise, self.stddev))

    def draw_(self, seed: int, draw: int, spread: float) -> None:
        """Write the draw θ = m + √T σ ε into the parameters."""
        self._draw_(seed, draw, spread, 0.0)

    def advance_(self, share: float | Tensor, seed: int, draw: int, spread: float) -> None:
        """Move the mean and write the next draw: on the CPU each weight is read once for both."""
        if isinstance(share, float) and self._alike():
            self._draw_(seed, draw, spread, share)
        else:
            super().advance_(share, seed, draw, spread)

    def _draw_(self, seed: int, draw: int, spread: float, share: float) -> None:
        """Move the mean by a share of the way to the parameters, then write a draw into them."""
        noise = [windows(m, name, seed, draw) for m, name in zip(self.mean, self.names, strict=True)]
        if self._fused():
            parts: tuple[list[Tensor], ...] = ([], [], [], [])
            for four in zip(self._held(), self.mean, self.stddev, noise, strict=True):
                for part, one in zip(parts, four, strict=True):
                    part += pieces(one) if isinstance(one, list) or isinstance(four[-1], list) else [one]
            kernels.advance_(share, spread, *parts)
            return
        alike = self._alike()
        for parameters, mean, stddev, e in blocks(self._held(), self.mean, self.stddev, noise):
            if share > 0:
                torch._foreach_lerp_(mean, parameters, share)
            if alike and mean[0].device.type == "cpu":
                for p, m, sd, each in zip(parameters, mean, stddev, e, strict=True):
                    torch.addcmul(m, sd, each, value=spread, out=p)
            else:
                torch._foreach_copy_(parameters, torch._foreach_addcmul(mean, stddev, e, spread))

    def _fused(self) -> bool:
        """Whether the compiled loops are wanted, and fit."""
        return self.fused and kernels.fits(self._held(), self.mean, self.stddev)

    def departure(self) -> Tensor:
        """Return |dm/σ|²; see the base class."""
        if self._fused():
            square = kernels.departure(self._held(), self.mean, self.stddev)
            return torch.tensor(square, dtype=torch.float64, device="cpu")
        if not self._alike():
            return super().departure()
        norms: list[Tensor] = []
        for parameters, mean, stddev in blocks(self._held(), self.mean, self.stddev):
            moves = torch._foreach_sub(parameters, mean)
            torch._foreach_div_(moves, stddev)
            norms += torch._foreach_norm(moves)
        return squared_norm(norms)

    def whitened(self, moves: list[Tensor]) -> list[Tensor]:
        """Divide by σ."""
        return list(torch._foreach_div(moves, self.stddev))

    def natural(self, gradients: list[Tensor]) -> list[Tensor]:
        """Divide by h + δ = 1/(N σ²)."""
        steps = self.variances()
        torch._foreach_mul_(steps, self.num_data)
        torch._foreach_mul_(steps, gradients)
        return steps

    def statistics(self, gradients: list[Tensor | None], scale: float) -> list[Tensor | None]:
        """Return scale · g²."""
        return [None if g is None else (g * g).mul_(scale) for g in gradients]

    def absorb_(self, statistics: list[Tensor | None], rate: float | Tensor) -> None:
        """Move the running means; σ = 1/√(N (h + δ)) from then on."""
        known = {k: seen for k, seen in enumerate(statistics) if seen is not None}
        for places in self._together(list(known)):
            delta = [self.prior[k] for k in places]
            for stddev, seen in blocks([self.stddev[k] for k in places], [known[k] for k in places]):
                self._to_curvature_(stddev, places)
                if isinstance(rate, float):
                    torch._foreach_lerp_(stddev, seen, rate)
                else:
                    torch._foreach_lerp_(stddev, seen, [rate.to(sd).expand_as(sd) for sd in stddev])
                torch._foreach_add_(stddev, delta)
                torch._foreach_mul_(stddev, self.num_data)
                torch._foreach_sqrt_(stddev)
                torch._foreach_reciprocal_(stddev)
        self._reweigh_(0.0, [k for k in range(len(statistics)) if k not in known])

    def _together(self, places: Sequence[int]) -> Iterator[list[int]]:
        """Small parameters together, each large one alone, so that numbers of theirs go with the blocks of each."""
        group: list[int] = []
        for k in places:
            if group and sum(self.mean[i].numel() for i in (*group, k)) > SIZE:
                yield group
                group = []
            group.append(k)
        if group:
            yield group

    def _to_curvature_(self, stddev: list[Tensor], places: Sequence[int]) -> None:
        """Make h from σ in place, h + δ = (h₀ + δ)(σ/σ₀)^(-2/(1 - w)), for parameters at some places."""
        if self.weight == 1:
            torch._foreach_zero_(stddev)
            return
        firsts = self.firsts()
        torch._foreach_mul_(stddev, [1 / firsts[k] for k in places])
        _power_(stddev, -2 / (1 - self.weight))
        torch._foreach_mul_(stddev, [self.start[k] + self.prior[k] for k in places])
        torch._foreach_sub_(stddev, [self.prior[k] for k in places])

    def begin_(self) -> None:
        """Let the running curvature begin at the start h₀."""
        for sd, first in zip(self.stddev, self.firsts(), strict=True):
            sd.fill_(first)
        self.weight = 0.0

    def retract_(self, observed: Sequence[Tensor | None], rate: float) -> None:
        """Move the curvature by the retraction, which keeps h + δ positive where what is observed may be negative.

        h' = (1 - ρ)h + ρĥ + ½ρ²(h - ĥ)²/(h + δ) (Lin, Schmidt and Khan 2020; Shen et al. 2024).

        Args:
            observed: ĥ, one tensor a parameter, None where nothing was observed.
            rate: ρ.
        """
        for sd, h, delta, seen in zip(self.stddev, self.curvature, self.prior, observed, strict=True):
            if seen is not None:
                correction = 0.5 * rate**2 * (h - seen).square() / (h + delta)
                sd.copy_(h.lerp_(seen, rate).add_(correction).add_(delta).mul_(self.num_data).rsqrt_())
        self._reweigh_(0.0, [k for k, seen in enumerate(observed) if seen is None])

    def refresh_(self, weight: float) -> None:
        """Make σ from the geometric mean (h + δ)^(1-w) (h₀ + δ)^w."""
        self._reweigh_(weight, range(len(self.names)))

    def _reweigh_(self, weight: float, places: Sequence[int]) -> None:
        """Take another weight of the start, in the parameters at some places."""
        firsts = self.firsts()
        for group in self._together(places if weight != self.weight else []):
            for (stddev,) in blocks([self.stddev[k] for k in group]):
                if self.weight < 1:
                    torch._foreach_mul_(stddev, [1 / firsts[k] for k in group])
                    _power_(stddev, (1 - weight) / (1 - self.weight))
                    torch._foreach_mul_(stddev, [firsts[k] for k in group])
                    continue
                for k, sd in zip(group, stddev, strict=True):  # nothing was observed: h = 0
                    sd.fill_(firsts[k] * (self.prior[k] / (self.start[k] + self.prior[k])) ** (-0.5 * (1 - weight)))
        self.weight = weight

    def get_extra_state(self) -> float:
        """Return the weight of the start."""
        return self.weight

    def set_extra_state(self, state: float) -> None:
        """Take it up again.

        Args:
            state: what `get_extra_state` returned.
        """
        self.weight = float(state)

    def variances(self) -> list[Tensor]:
        """Return σ², one tensor a parameter."""
        return list(torch._foreach_mul(self.stddev, self.stddev))

    def log_det(self) -> Tensor:
        """Return 2 Σ log σ."""
        return 2 * torch.stack([sd.log().sum() for sd in self.stddev]).sum()


def _power_(tensors: list[Tensor], exponent: float) -> None:
    """xᵃ in place; by logarithms, at half the cost of `pow_` on a CPU."""
    if exponent == -2:
        torch._foreach_mul_(tensors, tensors)
        torch._foreach_reciprocal_(tensors)
    elif exponent != 1:
        torch._foreach_log_(tensors)
        torch._foreach_mul_(tensors, exponent)
        torch._foreach_exp_(tensors)
