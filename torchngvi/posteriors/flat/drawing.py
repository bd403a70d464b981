"""What flat posteriors draw, and the scores of what is drawn: noise for a batch of vectors λ, in shapes of any kind."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchngvi.arguments import read_generator
from torchngvi.posteriors import shapes
from torchngvi.posteriors.shapes import Shape, sizes


def scores_by_autograd(
    log_prob: Callable[[Tensor, Tensor], Tensor],  # θ (1, d), λ (D,) -> (1,)
    theta: Tensor,  # (n, d)
    vector: Tensor,  # (D,)
) -> Tensor:  # (n, D)
    """Compute scores (n, D) by one gradient a draw, vectorised by `torch.func.vmap`."""

    def one(vector: Tensor, theta: Tensor) -> Tensor:
        return log_prob(theta[None], vector)[0]

    return torch.func.vmap(torch.func.grad(one), (None, 0))(vector.detach(), theta)


def normal(shape: Shape, like: Tensor, dim: int, generator: torch.Generator | None) -> Tensor:  # (*shape, *batch, dim)
    """Draw standard normal noise (*shape, *batch, dim) for a batch of λ, in its dtype and on its device."""
    return shapes.normal(shape, (*like.shape[:-1], dim), like, generator)


def gammas(
    shape: Shape,
    a: Tensor,  # (*batch,), positive
    generator: torch.Generator | None,
) -> Tensor:  # (*shape, *batch)
    """Draw from Gamma(a, 1), for each entry of the shape parameters a, without a gradient."""
    draw: Any = torch._standard_gamma  # torch.distributions takes no generator
    generator = read_generator("generator", generator, a.device)
    return draw(a.detach().expand((*sizes(shape), *a.shape)).contiguous(), generator=generator)
