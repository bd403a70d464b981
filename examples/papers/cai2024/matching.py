"""Batch and match: the Gaussian whose scores match those of the log joint at the draws of the last one.

    minimise over q = N(μ, Σ)   mean_b |∇log q(θ_b) - g_b|²_Σ + (2/λ) KL(q_t ‖ q),     θ_b ~ q_t, g_b = ∇log p(θ_b)

With θ̄, ḡ, C and Γ the means and (1/B) covariances of the draws and of their scores, the derivative in μ vanishes at

    μ = λ/(1 + λ) (θ̄ + Σḡ) + 1/(1 + λ) μ_t

and, with that μ, the one in Σ where

    ΣUΣ + Σ = V        U = λΓ + λ/(1 + λ) ḡḡᵀ        V = Σ_t + λC + λ/(1 + λ)(θ̄ - μ_t)(θ̄ - μ_t)ᵀ

(Cai et al. 2024, Equations 5 to 8, derived again: the terms of μ in Σ cancel but for these.)  With V = LLᵀ and
A = LᵀUL the solution is Σ = L X Lᵀ, X = 2(I + (I + 4A)^½)⁻¹: AX² + X = I in the eigenbasis of A.
"""

import torch
from torch import Tensor

from torchngvi.derivatives import energy_and_gradient
from torchngvi.interfaces import Target
from torchngvi.posteriors import CholeskyGaussian


def matched(
    theta: Tensor, scores: Tensor, mean: Tensor, covariance: Tensor, lam: Tensor | float
) -> tuple[Tensor, Tensor]:
    """One step of batch and match.

    >>> theta = torch.tensor([[0.0], [2.0]], dtype=torch.float64)
    >>> mean, covariance = matched(theta, -0.5 * theta, torch.ones(1), torch.eye(1, dtype=torch.float64), 1e12)
    >>> round(mean.item(), 6), round(covariance.item(), 6)  # of the target N(0, 2), from any two draws
    (0.0, 2.0)
    """
    lam = torch.as_tensor(lam, dtype=theta.dtype, device=theta.device)[..., None, None]
    count, share = len(theta), lam / (1 + lam)
    centre, slope = theta.mean(0), scores.mean(0)
    x, g = (theta - centre).movedim(0, -1), (scores - slope).movedim(0, -1)  # (*batch, D, B)
    away = (centre - mean)[..., None]
    U = lam * (g @ g.mT) / count + share * slope[..., None] * slope[..., None, :]
    V = covariance + lam * (x @ x.mT) / count + share * away @ away.mT
    L = torch.linalg.cholesky(V)
    values, axes = torch.linalg.eigh(L.mT @ U @ L)
    B = L @ axes
    sigma = (B * (2 / (1 + (1 + 4 * values.clamp_min(0)).sqrt()))[..., None, :]) @ B.mT
    moved = share[..., 0] * (centre + (sigma @ slope[..., None])[..., 0]) + (1 - share[..., 0]) * mean
    return moved, sigma


class BatchAndMatch:
    """Batch and match on a `CholeskyGaussian`: steps from new draws and their gradients, no step size but λ.

    >>> from torchngvi.models import LogJoint
    >>> q = CholeskyGaussian(1, dtype=torch.float64)
    >>> method = BatchAndMatch(q, 8, torch.Generator().manual_seed(0))
    >>> method.step(LogJoint(lambda theta: -0.25 * theta.square().sum(-1)), 1e12)  # N(0, 2)
    >>> round(q.variance.item(), 6)
    2.0
    """

    def __init__(self, q: CholeskyGaussian, draws: int, generator: torch.Generator) -> None:
        self.q, self.draws, self.generator = q, draws, generator

    def step(self, target: Target, lam: Tensor | float) -> None:
        """Take one step; a member whose step is not finite stays where it is."""
        q = self.q
        theta = q.sample((self.draws,), self.generator)
        scores = -energy_and_gradient(target, theta)[1]
        ok = scores.isfinite().all(-1).all(0)
        scores = torch.where(ok[..., None], scores, 0.0)
        mean, sigma = matched(theta, scores, q.mean, q.covariance, lam)
        root, info = torch.linalg.cholesky_ex(sigma)
        ok = ok & (info == 0) & root.isfinite().all(-1).all(-1) & mean.isfinite().all(-1)
        q.initialize_(torch.where(ok[..., None], mean, q.mean), torch.where(ok[..., None, None], root, q.scale_tril))
