"""Independent weights: C Cᵀ = diag(1/(N (h + δ)))."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from torchngvi.networks.blocks import blocks
from torchngvi.networks.families.base import Family, key
from torchngvi.networks.noise import windows


class Diagonal(Family):
    """Independent normals, with a curvature h for each weight: C Cᵀ = diag(1/(N (h + δ))).

    Two tensors beside the mean: the running curvature, and the standard deviation at the temperature 1, which changes
    only when a curvature was observed.

    Args:
        parameters, prior, start, num_data: as in :class:`Family`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        prior: Mapping[str, float],
        start: Mapping[str, float],
        num_data: int,
    ) -> None:
        super().__init__(parameters, prior, start, num_data)
        for name, mean in zip(self.names, self.mean, strict=True):
            self.register_buffer(key("curvature", name), torch.zeros_like(mean))
            self.register_buffer(key("stddev", name), torch.empty_like(mean))

    @property
    def curvature(self) -> list[Tensor]:
        """The running means of the observed curvature a datum."""
        return self.stored("curvature")

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
        alike = self._alike()
        for parameters, mean, stddev, e in blocks(self._held(), self.mean, self.stddev, noise):
            if share > 0:
                torch._foreach_lerp_(mean, parameters, share)
            if alike:
                torch._foreach_copy_(parameters, mean)
                torch._foreach_addcmul_(parameters, stddev, e, spread)
            else:
                torch._foreach_copy_(parameters, torch._foreach_addcmul(mean, stddev, e, spread))

    def departure(self) -> Tensor:
        """Return |dm/σ|²; see the base class."""
        if not self._alike():
            return super().departure()
        norms: list[Tensor] = []
        for parameters, mean, stddev in blocks(self._held(), self.mean, self.stddev):
            moves = torch._foreach_sub(parameters, mean)
            torch._foreach_div_(moves, stddev)
            norms += torch._foreach_norm(moves)
        return torch.stack(norms).square().sum()

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
        """Move the running means."""
        for running, seen in zip(self.curvature, statistics, strict=True):
            if seen is not None:
                running.lerp_(seen, rate if isinstance(rate, float) else rate.to(running))

    def begin_(self) -> None:
        """Let the running curvature begin at the start h₀."""
        for running, start in zip(self.curvature, self.start, strict=True):
            running.fill_(start)

    def retract_(self, observed: Sequence[Tensor | None], rate: float) -> None:
        """Move the curvature by the retraction, which keeps h + δ positive where what is observed may be negative.

        h' = (1 - ρ)h + ρĥ + ½ρ²(h - ĥ)²/(h + δ) (Lin, Schmidt and Khan 2020; Shen et al. 2024).

        Args:
            observed: ĥ, one tensor a parameter, None where nothing was observed.
            rate: ρ.
        """
        for h, delta, seen in zip(self.curvature, self.prior, observed, strict=True):
            if seen is None:
                continue
            correction = 0.5 * rate**2 * (h - seen).square() / (h + delta)
            h.lerp_(seen, rate).add_(correction)

    def refresh_(self, weight: float) -> None:
        """Make σ from the geometric mean (ĥ + δ)^(1-w) (h₀ + δ)^w."""
        for sd, running, delta, start in zip(self.stddev, self.curvature, self.prior, self.start, strict=True):
            precision = (running + delta).mul_(self.num_data)
            if weight > 0:
                precision.pow_(1 - weight).mul_(((start + delta) * self.num_data) ** weight)
            torch.rsqrt(precision, out=sd)

    def variances(self) -> list[Tensor]:
        """Return σ², one tensor a parameter."""
        return list(torch._foreach_mul(self.stddev, self.stddev))

    def log_det(self) -> Tensor:
        """Return 2 Σ log σ."""
        return 2 * torch.stack([sd.log().sum() for sd in self.stddev]).sum()
