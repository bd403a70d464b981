"""Mean and covariance of q from a checkpoint of a model with one of GPyTorch's own distributions."""

from collections.abc import Sequence
from typing import Any

import torch
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
)
from torch import Tensor

from torchngvi.numerics.linalg import positive_columns

_GAUSSIANS = (
    CholeskyVariationalDistribution,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
)


@torch.no_grad()
def taken(
    state_dict: dict[str, Any], prefix: str, num_inducing_points: int, batch_shape: Sequence[int]
) -> tuple[Tensor, Tensor] | None:
    """Take the entries of a distribution of GPyTorch's out of a state dict.

    >>> q = CholeskyVariationalDistribution(2)
    >>> q.chol_variational_covar.data.copy_(torch.tensor([[-2.0, 9.0], [1.0, 3.0]]))  # 9 is not read
    tensor([[-2.,  9.],
            [ 1.,  3.]])
    >>> mean, root = taken(dict(q.state_dict()), "", 2, ())
    >>> root.tolist()
    [[2.0, 0.0], [-1.0, 3.0]]
    """
    for kind in _GAUSSIANS:
        q = kind(num_inducing_points, torch.Size(batch_shape))
        names = [name for name, _ in q.named_parameters()]
        if not all(prefix + name in state_dict for name in names):
            continue
        found = {name: state_dict.pop(prefix + name) for name in names}
        like = found[names[0]]
        q = q.to(dtype=like.dtype, device=like.device)
        q.load_state_dict(found)
        return moments_of(q)
    return None


@torch.no_grad()
def moments_of(own: Any) -> tuple[Tensor, Tensor]:
    """The moments of a Gaussian of GPyTorch's, or of this library."""
    q = own()
    # Adam may leave columns of either sign
    return q.mean, positive_columns(q.lazy_covariance_matrix.cholesky().to_dense().tril())[0]
