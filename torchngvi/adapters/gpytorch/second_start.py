"""A second start, where the first has ended with an input taken for noise.

The bound has an optimum at which the length scale of an input is endless, and what depends on that input is noise.
From the usual start L-BFGS goes there where the function has several periods within the data: a short length scale in
all inputs relates few rows, so that the first steps lengthen all of them.  Where that has happened, the derivatives of
the expected log likelihoods in the latent values (for Gaussian noise, the residuals) still depend on that input, which
means over its neighbouring rows tell at the cost of sorting.  The second start is short in these inputs and long in
the others.
"""

import torch
from gpytorch.kernels import Kernel, PeriodicKernel
from gpytorch.models import ApproximateGP
from torch import Tensor

from torchngvi.adapters.gpytorch.kernels import evaluated
from torchngvi.adapters.gpytorch.scales import lengthen

_GROUPS, _FEWEST = 32, 5  # of neighbouring rows; with fewer nothing is told
_SIZE = 20  # rows of a group, at least
_TELLS = 0.1  # share of the variance that the means over groups explain, beyond chance
_SHORT, _LONG = 0.5, 5.0  # standard deviations of an input


@torch.no_grad()
def telling(
    scores: Tensor,  # (N,)
    x: Tensor,  # (N, features)
) -> Tensor:
    """Which inputs still tell something about the scores, each for itself.

    >>> x = torch.linspace(-3, 3, 400)
    >>> telling(torch.sin(4 * x), torch.stack([x, x.sin() * 1e4 % 1], -1)).tolist()
    [True, False]
    """
    groups = min(_GROUPS, len(scores) // _SIZE)
    if groups < _FEWEST:
        return x.new_zeros(x.shape[-1], dtype=torch.bool)
    size = len(scores) // groups
    order = x.argsort(dim=0, stable=True)[: groups * size]
    grouped = scores.double()[order].reshape(groups, size, -1)
    within, total = grouped.var(1).mean(0), grouped.flatten(0, 1).var(0)
    explained = grouped.mean(1).var(0) - within / size
    return (explained > _TELLS * total) & (x != x[:1]).any(0)


@torch.no_grad()
@evaluated()
def shorten(
    model: ApproximateGP,
    x: Tensor,  # (N, features)
    told: Tensor,  # (features,)
) -> bool:
    """Make the length scales that are learnt short in some inputs, and those beside them long."""
    lengths = torch.where(told, _SHORT, _LONG) * x.std(0)
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
