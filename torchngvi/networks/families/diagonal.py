"""Independent weights: C Cᵀ = diag(1/(N (max(h, h₀) + δ)))."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchngvi.networks.families.base import Family, key
from torchngvi.networks.noise import WINDOW, windows


class Diagonal(Family):
    """Independent normals, with a curvature h for each weight: C Cᵀ = diag(1/(N (max(h, h₀) + δ))).

    Its tensors are the mean, the running curvature h, and the standard deviations that are made from it whenever it
    moves.  The length of a move is dmᵀ(h + δ)dm: what was observed, without the start.
    """

    def lay_out_(self) -> None:
        """Register the curvature 0, and σ."""
        for name, mean in zip(self.names, self.mean, strict=True):
            self.register_buffer(key("curvature", name), torch.zeros_like(mean))
            self.register_buffer(key("stddev", name), torch.empty_like(mean), persistent=False)

    @property
    def curvature(self) -> list[Tensor]:
        """The running means h of the observed curvature a datum, 0 before anything was observed."""
        return self.stored("curvature")

    @property
    def stddev(self) -> list[Tensor]:
        """The standard deviations σ at the temperature 1."""
        return self.stored("stddev")

    def refresh_(self) -> None:
        """Make σ from max(h, h₀) + δ."""
        each = zip(self.stddev, self.curvature, self.prior, self.start, strict=True)
        for sd, h, delta, start in each:
            torch.clamp(h, min=start if self.bounded else 0.0, out=sd)
            sd.add_(delta).mul_(self.num_data).rsqrt_()

    def colored(self, noise: list[Tensor]) -> list[Tensor]:
        """Multiply by σ."""
        return list(torch._foreach_mul(noise, self.stddev))

    def draw_(self, seed: int, draw: int, spread: float) -> None:
        """Write the draw θ = m + √T σ ε into the parameters; on the CPU in one pass."""
        for name, p, m, sd in zip(self.names, self.held(), self.mean, self.stddev, strict=True):
            noise = windows(m, name, seed, draw)
            if p.device.type != "cpu" or p.dtype != m.dtype or not p.is_contiguous():
                super().draw_(seed, draw, spread)
                return
            if len(noise) == 1:
                torch.addcmul(m, sd, noise[0], value=spread, out=p)
                continue
            means, sds, parts = (tensor.reshape(-1).split(WINDOW) for tensor in (m, sd, p))
            for mean, scale, e, part in zip(means, sds, noise, parts, strict=True):
                torch.addcmul(mean, scale, e, value=spread, out=part)

    def departure(self, moves: list[Tensor], note: Callable[[int, Tensor], None]) -> Tensor:
        """Return N Σ (h + δ) dm²; see the base class."""
        total = []
        for k, (move, h, delta) in enumerate(zip(moves, self.curvature, self.prior, strict=True)):
            square = (move * move).reshape(-1)
            note(k, square.view(move.shape))
            prior = delta * square.sum() if isinstance(delta, float) else square.dot(delta.reshape(-1))
            total.append((square.dot(h.reshape(-1)) + prior).to(moves[0].device))
        return self.num_data * torch.stack(total).sum()

    def whitened(self, moves: list[Tensor]) -> list[Tensor]:
        """Divide by σ."""
        return list(torch._foreach_div(moves, self.stddev))

    def natural(self, gradients: list[Tensor]) -> list[Tensor]:
        """Multiply by N σ²."""
        steps = self.variances()
        torch._foreach_mul_(steps, self.num_data)
        torch._foreach_mul_(steps, gradients)
        return steps

    def statistics(self, gradients: list[Tensor | None], scale: float) -> list[Tensor | None]:
        """Return scale · g²."""
        return [None if g is None else (g * g).mul_(scale) for g in gradients]

    def absorb_(self, statistics: list[Tensor | None], rate: float | Tensor) -> None:
        """Move the running means."""
        for h, seen in zip(self.curvature, statistics, strict=True):
            if seen is not None:
                h.lerp_(seen, rate if isinstance(rate, float) else rate.to(h))

    def begin_(self) -> None:
        """Let the running curvature begin at the start h₀, which it may leave."""
        self.bounded = False
        for h, start in zip(self.curvature, self.start, strict=True):
            h.fill_(start)
        self.refresh_()

    def retract_(self, observed: Sequence[Tensor | None], rate: float) -> None:
        """Move the curvature by the retraction, which keeps h + δ positive where what is observed may be negative.

        h' = (1 - ρ)h + ρĥ + ½ρ²(h - ĥ)²/(h + δ) (Lin, Schmidt and Khan 2020; Shen et al. 2024), ρ the rate.
        """
        for h, delta, seen in zip(self.curvature, self.prior, observed, strict=True):
            if seen is not None:
                correction = 0.5 * rate**2 * (h - seen).square() / (h + delta)
                h.lerp_(seen, rate).add_(correction)
        self.refresh_()

    def variances(self) -> list[Tensor]:
        """Return σ², one tensor a parameter."""
        return list(torch._foreach_mul(self.stddev, self.stddev))

    def precisions(self) -> list[Tensor]:
        """Return N (h + δ), without the start, one tensor a parameter."""
        return [self.num_data * (h + delta) for h, delta in zip(self.curvature, self.prior, strict=True)]

    def log_det(self) -> Tensor:
        """Return 2 Σ log σ."""
        return 2 * torch.stack([sd.log().sum() for sd in self.stddev]).sum()

    def blocks(self) -> list[Tensor]:
        """Return σ, a block for each weight."""
        return [sd.view(-1, 1, 1) for sd in self.stddev]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Load the curvature, which release 0.2 stored as the standard deviations that it gave, and make σ of it."""
        for name, delta in zip(self._mangled, self.prior, strict=True):
            stddev = state_dict.pop(f"{prefix}stddev/{name}", None)
            if isinstance(stddev, Tensor):
                found = stddev.cpu().double().square().mul_(self.num_data).reciprocal_() - torch.as_tensor(delta).cpu()
                state_dict[f"{prefix}curvature/{name}"] = found.clamp_min_(0.0)
        super()._load_from_state_dict(state_dict, prefix, *others)
