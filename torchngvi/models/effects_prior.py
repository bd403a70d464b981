"""What the prior of the random effects adds to the log joint under q.

Of n groups it is E[½ Σ_i b_iᵀΩb_i - n Σ_k ω_kk - log p(ω)] + (nr/2) log 2π.  The prior of ω is that of a
Wishart matrix Ω, in closed form, or one of standard deviations and correlations, by Gauss-Hermite quadrature over ω.
"""

import math

import torch
from torch import Tensor

from torchngvi.models.mixed_prior import Effects, Precision, half_squares
from torchngvi.models.mixed_prior import starts as diagonal_of
from torchngvi.models.scale_priors import ScalesPrior
from torchngvi.numerics.versions import tracked

CovariancePrior = Precision | ScalesPrior


def expected_energy(of: Effects, prior: CovariancePrior) -> Tensor:
    """Compute what the effects add to E_q[-log p(y, θ)] but the likelihood, (*batch,)."""
    n, r = of.b.shape[-2:]
    constant = 0.5 * n * r * math.log(2 * math.pi)
    half_log_det = of.omega[..., diagonal_of(r)]
    value = half_squares(of).sum(-1) - n * half_log_det.sum(-1) + constant
    if isinstance(prior, Precision):
        return value + prior.expected(of) - half_log_det @ prior.powers + prior.log_normaliser
    return value + prior.expected_energy(of.omega, of.omega_omega)


@tracked
@torch.enable_grad()
def derivative(of: Effects, prior: CovariancePrior) -> Effects:
    """Differentiate `expected_energy` by Bonnet's and Price's theorems, dF = gᵀdm + ½⟨H, dV⟩."""
    leaves = Effects(*(x.detach().clone().requires_grad_() for x in of))
    g_b, g_omega, bb, border, omegas = torch.autograd.grad(expected_energy(leaves, prior).sum(), list(leaves))
    return Effects(g_b, g_omega, bb + bb.mT, border, omegas + omegas.mT)
