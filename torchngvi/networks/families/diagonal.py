"""Independent weights: V = diag(1/(N'(h + δ)))."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from torchngvi.networks.families.base import Family, Scales, key
from torchngvi.networks.noise import normals_


class Diagonal(Family):
    """Independent normals, with a curvature h for each weight: V = diag(1/(N'(h + δ))).

    Two tensors beside the mean: the running curvature and the standard deviation, which changes only when a curvature
    was observed.

    Args:
        parameters, prior, start: as in :class:`Family`.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], prior: Mapping[str, float], start: Mapping[str, float]
    ) -> None:
        super().__init__(parameters, prior, start)
        for name, mean in zip(self.names, self.mean, strict=True):
            self.register_buffer(key("curvature", name), torch.zeros_like(mean))
            self.register_buffer(key("stddev", name), torch.empty_like(mean))

    @property
    def curvature(self) -> list[Tensor]:
        """The running means of the observed curvature a datum."""
        return self.stored("curvature")

    @property
    def stddev(self) -> list[Tensor]:
        """The standard deviations σ."""
        return self.stored("stddev")

    def color_(self, noise: list[Tensor]) -> None:
        """Multiply by σ."""
        torch._foreach_mul_(noise, self.stddev)

    def whitened(self, moves: list[Tensor]) -> list[Tensor]:
        """Divide by σ."""
        return torch._foreach_div(moves, self.stddev)

    def natural(self, gradients: list[Tensor], scales: Scales) -> list[Tensor]:
        """Divide by h + δ = 1/(N'σ²)."""
        variances = self.variances()
        torch._foreach_mul_(variances, scales.num_data)
        torch._foreach_mul_(variances, gradients)
        return variances

    def observe_(self, gradients: Sequence[Tensor | None], scale: float, rate: float) -> None:
        """Move the running curvature towards scale · g²."""
        for running, g in zip(self.curvature, gradients, strict=True):
            if g is not None:
                running.mul_(1 - rate).addcmul_(g.to(running), g.to(running), value=rate * scale)

    def observations(self) -> list[Tensor]:
        """Return the running curvatures."""
        return self.curvature

    def retract_(self, gradients: Sequence[Tensor | None], scales: Scales, rate: float) -> None:
        """Move the curvature by the retraction, which keeps h + δ positive where ĥ = g ε/σ may be negative.

        h' = (1 - ρ)h + ρĥ + ½ρ²(h - ĥ)²/(h + δ) (Lin, Schmidt and Khan 2020; Shen et al. 2024).

        Args:
            gradients: g at the present draw.
            scales: which draw it is.
            rate: ρ.
        """
        for h, delta, sd, name, g in zip(self.curvature, self.prior, self.stddev, self.names, gradients, strict=True):
            if g is None:
                continue
            observed = torch.empty_like(h)
            normals_([observed], [name], scales.seed, scales.draw)
            observed.mul_(g).div_(sd)
            correction = 0.5 * rate**2 * (h - observed).square() / (h + delta)
            h.lerp_(observed, rate).add_(correction)

    def begin_(self) -> None:
        """Let the running curvature begin at the start h₀."""
        for running, start in zip(self.curvature, self.start, strict=True):
            running.fill_(start)

    def refresh_(self, scales: Scales, weight: float) -> None:
        """Make σ from the geometric mean (ĥ + δ)^(1-w) (h₀ + δ)^w."""
        for sd, running, delta, start in zip(self.stddev, self.curvature, self.prior, self.start, strict=True):
            precision = (running + delta) * scales.num_data
            if weight > 0:
                precision.pow_(1 - weight).mul_(((start + delta) * scales.num_data) ** weight)
            torch.rsqrt(precision, out=sd)

    def variances(self) -> list[Tensor]:
        """Return σ², one tensor a parameter."""
        return torch._foreach_mul(self.stddev, self.stddev)

    def log_det(self) -> Tensor:
        """Return 2 Σ log σ."""
        return 2 * torch.stack([sd.log().sum() for sd in self.stddev]).sum()
