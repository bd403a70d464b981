"""Derivatives of a log joint that is batched over draws: gradients, and curvature in batched calls.

The Hessian is never taken row after row: H v for many directions v at once is one call at copies of
θ, one direction a copy, and one double backward pass (Pearlmutter 1994), as θ has a sample dimension
anyway.
"""

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.interfaces import Target


def energy_and_gradient(
    target: Target,
    theta: Tensor,  # (S, *batch, D)
) -> tuple[Tensor, Tensor]:
    """Evaluate ℓ = -log joint and its gradient at many θ, in calls of at most ``target.draws_at_once`` of them."""
    energies, gradients = [], []
    for part in theta.split(target.draws_at_once):
        with torch.enable_grad():
            some = part.detach().requires_grad_()
            energy = -target.log_joint(some)
            gradients.append(_gradient(energy, some))
        energies.append(energy.detach())
    return torch.cat(energies), torch.cat(gradients)


def mean_hessian_products(
    target: Target,
    theta: Tensor,  # (S, *batch, D)
    directions: Tensor,  # v, (K, *batch, D)
    chunk: int,
) -> Tensor:
    """The products of the mean Hessian of ℓ with given directions, mean_s ∇²ℓ(θ_s) v_k, without forming a Hessian."""
    parts: list[Tensor] = []
    for some in directions.split(max(1, chunk // len(theta))):
        sums = [_products(target, draws, some) for draws in theta.split(chunk)]
        parts.append(torch.stack(sums).sum(0))
    return torch.cat(parts) / len(theta)


def mean_hessian(
    target: Target,
    theta: Tensor,  # (S, *batch, D)
    chunk: int,
) -> Tensor:
    """The mean Hessian of ℓ, mean_s ∇²ℓ(θ_s), from `mean_hessian_products` with the unit vectors."""
    dim = theta.shape[-1]
    eye = torch.eye(dim, dtype=theta.dtype, device=theta.device)
    eye = eye.reshape(dim, *(1,) * (theta.ndim - 2), dim).expand(dim, *theta.shape[1:])
    H = mean_hessian_products(target, theta, eye, chunk).movedim(0, -2)
    return 0.5 * (H + H.mT)


def mean_hessian_diagonal(
    target: Target,
    theta: Tensor,  # (S, *batch, D)
    scale: Tensor,  # s, (*batch, D)
    chunk: int,
) -> Tensor:
    """The diagonal of a scaled mean Hessian, mean_s diag(diag(s) ∇²ℓ(θ_s) diag(s)), without a D x D matrix.

    >>> from torchngvi import LogJoint
    >>> target = LogJoint(lambda theta: -theta.pow(3).sum(-1))
    >>> mean_hessian_diagonal(target, torch.ones(1, 2), torch.tensor([1.0, 2.0]), chunk=64).tolist()
    [6.0, 24.0]
    """
    at_once, parts = max(1, chunk // len(theta)), []
    for index in torch.arange(scale.shape[-1], device=scale.device).split(at_once):
        where = index.reshape(-1, *(1,) * scale.ndim).expand(-1, *scale.shape[:-1], 1)
        some = scale[..., index].movedim(-1, 0)[..., None]
        directions = torch.zeros((len(index), *scale.shape), dtype=scale.dtype, device=scale.device)
        products = mean_hessian_products(target, theta, directions.scatter(-1, where, some), chunk)
        parts.append((some * products.gather(-1, where))[..., 0])
    return torch.cat(parts).movedim(0, -1)


def _products(
    target: Target,
    theta: Tensor,  # (S, *batch, D)
    directions: Tensor,  # (K, *batch, D)
) -> Tensor:
    """Σ_s ∇²ℓ(θ_s) v_k, (K, *batch, D), from one call."""
    shape = (len(directions), *theta.shape)
    with torch.enable_grad():
        copies = theta.detach().expand(shape).flatten(0, 1).requires_grad_()
        v = directions[:, None].expand(shape).flatten(0, 1)
        along = (_gradient(-target.log_joint(copies), copies, create_graph=True) * v).sum()
        if not along.requires_grad:  # the gradient is constant
            return torch.zeros_like(directions)
        (products,) = torch.autograd.grad(along, copies, allow_unused=True)
    if products is None:
        return torch.zeros_like(directions)
    return products.unflatten(0, shape[:2]).sum(1)


def _gradient(energy: Tensor, theta: Tensor, create_graph: bool = False) -> Tensor:
    """The gradient of the sum of energies that depend on theta."""
    gradient = None
    if energy.requires_grad:
        (gradient,) = torch.autograd.grad(energy.sum(), theta, create_graph=create_graph, allow_unused=True)
    if gradient is None:
        raise InputError(
            "the log joint does not depend on theta: its result has no gradient with respect to it. "
            "Compute it from the theta it is given, by torch operations without detach(), item() or NumPy."
        )
    return gradient
