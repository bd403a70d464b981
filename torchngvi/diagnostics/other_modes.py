"""Modes of the density where q is not: where they are looked for, and which of them count."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchngvi.diagnostics.allowance import Allowance
from torchngvi.diagnostics.importance import Sampled
from torchngvi.diagnostics.rule import OtherMode
from torchngvi.mode import Mode, distinct, find_modes
from torchngvi.numerics.arrays import writable
from torchngvi.posteriors.gaussian import Gaussian

MODES = 60  # dimensions below which modes are looked for
_STARTS = (2, 8)  # for them
_FAR = 4.0  # of q from another mode, or 2 √D
_LEAST = 5.0  # nats below the ELBO down to which another mode counts


def starting_points(
    q: Gaussian,
    around: Tensor | float,  # (D,)
    seed: int,
) -> Tensor:
    """From two to eight points of U(-2, 2) around a mean, (K, D); none in 60 dimensions or more."""
    dim, at = q.dim, q.mean
    starts = min(max(64 // dim, _STARTS[0]), _STARTS[1]) if dim < MODES else 0
    generator = torch.Generator().manual_seed(seed)
    points = 4 * torch.rand(starts, dim, generator=generator, dtype=torch.float64, device="cpu") - 2
    return torch.as_tensor(writable(around), dtype=at.dtype, device=at.device) + points.to(at)


def most_of_each(
    allowed: Allowance,
    points: Tensor,  # (K, D)
) -> int:
    """Gradients that a search from each of the points may take; 0 where they would not do."""
    starts, dim = points.shape
    if not starts:
        return 0
    # a step in progress may take 23 points and two Hessians more than its budget
    each = min(200 + 20 * dim, allowed.left // starts - 2 * (dim + 1) - 23)
    return each if each >= 2 * (dim + 2) else 0


def found_from(
    allowed: Allowance,
    points: Tensor,  # (K, D)
    each: int,
) -> list[Mode]:
    """The modes that searches from these points arrive at."""
    modes = find_modes(allowed.target, points, each, over=allowed.over)
    return [mode for mode in modes if mode is not None and mode.found]


def others_than(q: Gaussian, modes: Sequence[Mode], sampled: Sampled | None) -> tuple[OtherMode, ...]:
    """Those that are not q's own, each once, the one with the most evidence first."""
    elbo = -math.inf if sampled is None else sampled.from_q.elbo
    far = max(_FAR, 2 * math.sqrt(q.dim))
    measured = [(mode, float(q.whiten(mode.theta - q.mean).norm())) for mode in modes]
    if not math.isfinite(elbo):
        elbo = max((mode.log_evidence for mode, apart in measured if apart <= far), default=-math.inf)
    kept: list[tuple[Mode, float]] = []
    for mode, apart in sorted(measured, key=lambda each: -each[0].log_evidence):
        if apart > far and mode.log_evidence > elbo - _LEAST and all(distinct(mode, one) for one, _ in kept):
            kept.append((mode, apart))
    evidence = torch.tensor([elbo, *(mode.log_evidence for mode, _ in kept)], dtype=torch.float64, device="cpu")
    shares = evidence.softmax(0)[1:].tolist()
    return tuple(
        OtherMode(mode.theta, mode.log_evidence, apart, share)
        for (mode, apart), share in zip(kept, shares, strict=True)
    )
