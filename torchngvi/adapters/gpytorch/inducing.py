"""Inducing points from the data, where the model leaves them open.

Rows are taken one after another, each the one whose latent value is least certain given those before it: the pivots of
a Cholesky factorisation of the kernel matrix (Fine and Scheinberg 2001; Burt, Rasmussen and van der Wilk 2020, who call
it greedy variance).  The kernel of the model says what is near, so that inputs need no scaling, and columns of labels
stay labels.
"""

import torch
from gpytorch.variational import VariationalStrategy
from torch import Tensor

from torchngvi.adapters.gpytorch.kernels import evaluated
from torchngvi.errors import InputError

_CANDIDATES = 2048  # rows that are looked at, or 4M if that is more


def left_open(strategy: VariationalStrategy) -> bool:
    """Whether the inducing points coincide, as those of ``torch.zeros(M, features)``, so that they have to
    be chosen.
    """
    Z = strategy.inducing_points
    return Z.shape[-2] > 1 and bool((Z[..., :1, :] == Z).all())


@torch.no_grad()
@evaluated()
def choose_inducing_points(strategy: VariationalStrategy, x: Tensor) -> None:
    """Put the inducing points on rows of the data, by greedy variance with the kernel as it is."""
    Z = strategy.inducing_points
    size = Z.shape[-2]
    if len(x) < size:
        raise InputError(
            f"{size} inducing points cannot be chosen among {len(x)} rows of data: build the model with fewer."
        )
    if Z.ndim > 2:
        raise InputError(
            f"inducing points of shape {tuple(Z.shape)} coincide and are left open, and points of several latent "
            "functions cannot be chosen here: build the model with rows of the data."
        )
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(x.device)
    candidates = x[order[: max(_CANDIDATES, 4 * size)]]
    covariance = strategy.model.forward(candidates).covariance_matrix.double()
    Z.copy_(candidates[pivots(covariance, size)].expand_as(Z))


def pivots(
    covariance: Tensor,  # (rows, rows)
    size: int,
) -> Tensor:
    """The pivots of a Cholesky factorisation: each row has the largest variance given those before it.

    >>> pivots(torch.tensor([[4.0, 3.9, 0.0], [3.9, 4.1, 0.0], [0.0, 0.0, 1.0]]), 2).tolist()
    [1, 2]
    """
    variance = covariance.diagonal().clone()
    least = len(variance) * torch.finfo(variance.dtype).eps * variance.max()
    factor = covariance.new_zeros(size, len(variance))
    chosen: list[Tensor] = []
    for step in range(size):
        row = variance.argmax()
        chosen.append(row)
        column = covariance[row] - factor[:step, row] @ factor[:step]
        # a row that those before it explain to rounding adds nothing; none is taken twice
        factor[step] = torch.where(variance[row] > least, column / variance[row].clamp_min(least).sqrt(), 0.0)
        variance = (variance - factor[step].square()).clamp_min(0.0)
        variance[torch.stack(chosen)] = -1.0
    return torch.stack(chosen)
