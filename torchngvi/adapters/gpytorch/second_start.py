"""A second start, where the first has ended with an input taken for noise.

The bound has an optimum at which the length scale of an input is endless, and what depends on that input is noise.
From the usual start L-BFGS goes there where the function has several periods within the data, or depends on what inputs
do together: length scales that are equal in all inputs relate few rows, so that the first steps lengthen all of them.
Where that has happened, the derivatives of the expected log likelihoods in the latent values (for Gaussian noise, the
residuals) still depend on these inputs, which means over cells of rows show.  The second start is short in them, longer
in those of which the targets depend as well, and long in the others.
"""

import math
from typing import NamedTuple

import torch
from gpytorch.kernels import Kernel, PeriodicKernel
from gpytorch.models import ApproximateGP
from torch import Tensor

from torchngvi.adapters.gpytorch.kernels import evaluated
from torchngvi.adapters.gpytorch.scales import lengthen


class StartSettings(NamedTuple):
    """Where a second start is looked for, and where it begins; `benchmarks/svgp_interactions.py` chose the numbers."""

    groups: tuple[int, ...] = (32, 8, 4)  # that the values of an input make, alone, in a pair and in a triple
    inputs: tuple[int, ...] = (10_000, 200, 30)  # at most, of which all, all pairs and all triples are looked at
    size: int = 20  # rows a group of a single input, at least; with fewer than five groups nothing is found
    entries: int = 2**22  # rows times combinations of inputs at most, but no fewer than a thousand rows
    share: float = 0.1  # of the variance that the means over cells explain, beyond chance
    deviations: float = 2.0  # of that share, above the largest that is expected by chance
    short: float = 0.5  # standard deviations of an input that shows in the residuals
    middle: float = 5.0  # of one that shows in the targets only
    long: float = 20.0  # of the others


_SETTINGS = StartSettings()


@torch.no_grad()
def telling(
    scores: Tensor,  # (N,)
    x: Tensor,  # (N, features)
    settings: StartSettings = _SETTINGS,
) -> Tensor:
    """Which inputs still tell something about the scores, each for itself, in pairs or in triples.

    >>> x = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    >>> telling(torch.sin(4 * x[:, 0]), x).tolist(), telling(x[:, 1] * x[:, 2], x).tolist()
    ([True, False, False], [False, True, True])
    """
    found = x.new_zeros(x.shape[-1], dtype=torch.bool)
    if len(x) // settings.size < 5:
        return found
    left, largest = scores.double() - scores.double().mean(), x.new_zeros(x.shape[-1], dtype=torch.float64)
    total, columns = left.square().mean(), x.mT.contiguous()
    ranks = torch.searchsorted(columns.sort().values, columns).mT  # equal values have one
    for order, (groups, most) in enumerate(zip(settings.groups, settings.inputs, strict=True), 1):
        groups = min(groups, len(x) // settings.size)
        sets = torch.combinations(largest.argsort(descending=True, stable=True)[:most].sort().values, order)
        if not len(sets):
            break
        codes, largest = ranks * groups // len(x), torch.full_like(largest, -math.inf)
        part = slice(None, None, math.ceil(len(x) / max(1000, settings.entries // len(sets))))
        chance = math.sqrt(2 * math.log(len(sets))) + settings.deviations
        for _ in range(len(found)):  # what is found is taken out, and the rest is looked at again
            shares, deviations = _shares(left[part], codes[part], sets, groups, total)
            for column in sets.mT:
                largest.scatter_reduce_(0, column, shares, "amax")
            excess = shares - (chance * deviations).clamp_min(settings.share)
            best = sets[excess.argmax()]
            if not excess.max() > 0:
                break
            found[best] = True
            cells = _cells(codes, best[None], groups)[:, 0]
            left = left - (torch.bincount(cells, left) / torch.bincount(cells).clamp_min(1))[cells]
    return found


def _cells(codes: Tensor, sets: Tensor, groups: int) -> Tensor:
    """The cell of each row in the grid of each set of inputs, (N, sets)."""
    return (codes[:, sets] * groups ** torch.arange(sets.shape[-1], device=sets.device)).sum(-1)


def _shares(left: Tensor, codes: Tensor, sets: Tensor, groups: int, total: Tensor) -> tuple[Tensor, Tensor]:
    """The shares of a variance that means over the cells of each set explain beyond chance, with their deviations."""
    number, explained, free = groups ** sets.shape[-1], [], []
    for some in sets.split(512):
        cells = (_cells(codes, some, groups) + number * torch.arange(len(some), device=sets.device)).flatten()
        counts = torch.bincount(cells, minlength=number * len(some))
        sums = torch.bincount(cells, left.repeat_interleave(len(some)), minlength=len(counts))
        explained.append((sums.square() / counts.clamp_min(1)).reshape(-1, number).sum(-1))
        free.append((counts > 0).reshape(-1, number).sum(-1) - 1)
    rows, ratio, freedom = len(left), left.square().mean() / total, torch.cat(free)
    chance = ratio * freedom / (rows - 1)
    return torch.cat(explained) / (rows * total) - chance, ratio * (2 * freedom).sqrt() / rows


@torch.no_grad()
@evaluated()
def shorten(
    model: ApproximateGP,
    x: Tensor,  # (N, features)
    told: Tensor,  # (features,)
    seen: Tensor,  # (features,)
    settings: StartSettings = _SETTINGS,
) -> bool:
    """Make learnt length scales short in inputs that are told, longer in those that are seen, long in the others."""
    lengths = torch.where(told, settings.short, torch.where(seen, settings.middle, settings.long)) * x.std(0)
    changed = False
    for kernel in model.modules():
        # the length scale of a periodic kernel is no distance between inputs
        if not isinstance(kernel, Kernel) or isinstance(kernel, PeriodicKernel) or not kernel.has_lengthscale:
            continue
        own = torch.arange(len(told), device=x.device) if kernel.active_dims is None else kernel.active_dims
        here = told[own] if bool((own < len(told)).all()) else told[:0]
        if not kernel.raw_lengthscale.requires_grad or not bool(here.any()):
            continue
        count = kernel.lengthscale.shape[-1]
        if count not in (1, len(own)):  # of inputs that forward makes
            continue
        value = lengths[own] if count > 1 else lengths[own][here].min()
        value = value.to(kernel.lengthscale.dtype).expand_as(kernel.lengthscale)
        if kernel.raw_lengthscale_constraint.check(value):
            kernel.lengthscale, changed = value, True
    if changed:
        lengthen(model, x)
    return changed
