"""The damped Fisher matrix of a batch of scores, solved by Woodbury or Cholesky.

    (F̂ + ρ tr(F̂)/D I) x = g,  F̂ = ΦᵀΦ/n,  Φ the scores as rows

With n < D the n x n matrix suffices: x = (g - Φᵀ(nδI + ΦΦᵀ)⁻¹Φg)/δ, δ = ρ tr(F̂)/D.
"""

import torch
from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.posteriors.flat.flat_posterior import solve_symmetric


def check_damping(rho: float) -> float:
    """Check a damping ρ.

    >>> check_damping(1)
    1.0
    """
    return read_number("rho", rho, "is the damping in units of the mean eigenvalue", at_least=0)


def damped_solve(
    rows: Tensor,  # (n, *batch, D)
    count: Tensor,  # (*batch,), rows that are not empty
    rho: float,
    gradient: Tensor,  # (*batch, D)
) -> Tensor:
    """Solve (F̂ + ρ tr(F̂)/D I) x = g, with F̂ = ΦᵀΦ/n the mean of the outer products of the scores.

    >>> damped_solve(torch.eye(2), torch.tensor(2), 1.0, torch.ones(2)).tolist()  # (½ + ½) x = 1
    [1.0, 1.0]
    """
    Phi = rows.movedim(0, -2)
    n, D = Phi.shape[-2:]
    square = Phi.square().sum((-2, -1))
    n_delta = (rho / D * square)[..., None, None]  # nδ
    g = count.clamp_min(1)[..., None] * gradient
    if n < D:
        inner = Phi @ Phi.mT + n_delta * torch.eye(n, dtype=Phi.dtype, device=Phi.device)
        small = solve_symmetric(inner, (Phi @ g[..., None])[..., 0])
        return (g - (Phi.mT @ small[..., None])[..., 0]) / n_delta[..., 0]
    return solve_symmetric(Phi.mT @ Phi + n_delta * torch.eye(D, dtype=Phi.dtype, device=Phi.device), g)
