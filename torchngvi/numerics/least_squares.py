"""Least squares for batches of problems, of which some may have columns that do not vary."""

import torch
from torch import Tensor


def shortest_fit(
    design: Tensor,  # (*batch, n, D)
    right: Tensor,  # (*batch, n, R)
) -> Tensor:  # (*batch, D, R)
    """Find the shortest solution c of min |A c - y|, by singular values of the columns brought to length 1.

    >>> A = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    >>> shortest_fit(A, torch.tensor([[1.0], [3.0]])).round(decimals=4).tolist()
    [[2.0], [0.0]]
    """
    size = design.square().sum(-2, keepdim=True).sqrt()
    good = size.isfinite() & (size > 0)
    scaled = torch.where(good, design / size, 0.0)
    U, s, Vh = torch.linalg.svd(scaled, full_matrices=False)
    least = torch.finfo(s.dtype).eps * design.shape[-2] * s[..., :1]
    inverse = torch.where(s > least, 1 / s, 0.0)
    solution = Vh.mT @ (inverse[..., None] * (U.mT @ right))
    return torch.where(good.mT, solution / size.mT, torch.where(size.mT == 0, 0.0, torch.nan))
