"""Gauss-Hermite quadrature under the standard normal distribution, in one dimension and on a grid of several."""

import functools
import math

import torch
from torch import Tensor

from torchngvi.numerics.linalg import eigh


def normal_rule(
    nodes: int,
    dim: int,
    like: Tensor,
) -> tuple[Tensor, Tensor]:
    """Nodes z_k and log weights of E[f(z)] ≈ Σ_k w_k f(z_k) for z ~ N(0, I) in r dimensions: K = nodesʳ of them.

    >>> z, log_w = normal_rule(3, 1, torch.zeros((), dtype=torch.float64))
    >>> z[:, 0].square().round(decimals=9).tolist(), (6 * log_w.exp()).round(decimals=9).tolist()
    ([3.0, 0.0, 3.0], [1.0, 4.0, 1.0])
    """
    with torch.inference_mode(False):
        z, log_w = _line(nodes)
        grid = torch.cartesian_prod(*[z] * dim).reshape(-1, dim)
        total = torch.cartesian_prod(*[log_w] * dim).reshape(-1, dim).sum(-1)
        return grid.to(like), total.to(like)


@functools.cache
def _line(nodes: int) -> tuple[Tensor, Tensor]:
    """Nodes and log weights in one dimension, in float64."""
    beside = torch.arange(1, nodes, dtype=torch.float64, device="cpu").sqrt()
    z = eigh(torch.diag(beside, 1) + torch.diag(beside, -1))[0]
    z = 0.5 * (z - z.flip(0))  # symmetric to the last bit
    before, here = torch.zeros_like(z), torch.ones_like(z)
    total = here.square()
    for j in range(1, nodes):
        before, here = here, (z * here - math.sqrt(j - 1) * before) / math.sqrt(j)
        total = total + here.square()
    return z, -total.log()
