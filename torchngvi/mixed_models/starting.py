"""Where fits of the globals start: a Gaussian near their posterior, with the coordinate of a learned parameter."""

import math

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.mixed_models.locals import Conditional
from torchngvi.models import GaussianMixed, MarginalMixed
from torchngvi.models.learned import within
from torchngvi.models.mixed_prior import omega_of, units_of
from torchngvi.models.mixed_start import prior_counts
from torchngvi.numerics.linalg import cholesky
from torchngvi.posteriors import CholeskyGaussian

_ROUNDS = 6  # of EM
_REACH, _STEPS = 4.0, (17, 9, 9)  # of a search for a parameter, in its logarithm; values in each round
_WIDEST = 1.0  # standard deviation of the logarithm of a parameter


@torch.no_grad()
def of_gaussian(target: GaussianMixed) -> CholeskyGaussian:
    """Start a linear mixed model at the least-squares estimate of β, the spread within groups, and Ω by some
    EM steps.
    """
    rows, sums, (known, count) = target.rows, target.sums, prior_counts(target.scales)
    learned = target.learned is not None
    log_sd = math.log(within(rows)) if learned else float(target.log_sd(sums.centre[None])[0])
    noise = sums.weight.new_tensor([log_sd])
    # what the rows of a group say of its effects
    mean_A = rows.total(sums.A.sum(0))[0] / rows.all_groups if rows.processes else sums.A.mean(0)
    Omega = mean_A * math.exp(-2 * log_sd) + known / rows.all_groups
    for _ in range(_ROUNDS):
        root, ok = cholesky(0.5 * (Omega + Omega.mT))
        if not bool(ok):
            break
        theta = torch.cat([sums.centre, omega_of(root), noise[: int(learned)]])[None]
        mean, covariance = (x[0] for x in target.moments(theta))
        (inside,) = rows.total((known if rows.leads else 0.0) + mean.mT @ mean + covariance.sum(0))
        Omega = (rows.all_groups + count) * torch.linalg.inv_ex(inside).inverse
    inverse, info = torch.linalg.inv_ex(Omega)
    if bool(info) or not bool(inverse.isfinite().all()):
        raise InputError(
            "the rows say nothing of some random effect: in double precision their weights are 0. Give larger weights."
        )
    variance = math.exp(2 * log_sd) + float(inverse.diagonal().sum())
    gram = target.model.fixed.prior.add_to(rows.total(sums.square[1:, 1:])[0] / variance)
    sds = [gram.diagonal().rsqrt(), units_of(theta[0, rows.p : target.joint_dim], rows.r) * rows.all_groups**-0.5]
    if learned:
        sds.append(noise.new_full((1,), (2 * rows.all_rows) ** -0.5))
    return CholeskyGaussian.from_moments(theta[0], torch.cat(sds).square().diag())


@torch.no_grad()
def parameter(target: MarginalMixed, near: Conditional, value: float) -> tuple[float, float]:
    """Search for a learned parameter with the other globals held at the mean of a Gaussian."""
    best, spacing, curvature = math.log(value), 0.0, 0.0
    mean, reach = near.global_mean, _REACH
    for count in _STEPS:
        phi = best + torch.linspace(-reach, reach, count, dtype=torch.float64).to(mean)
        values = target.log_joint(torch.cat([mean.expand(count, -1), phi[:, None]], -1)).nan_to_num(nan=-math.inf)
        place = int(values.argmax())
        best, spacing = float(phi[place]), 2 * reach / (count - 1)
        if 0 < place < count - 1:
            curvature = float(2 * values[place] - values[place - 1] - values[place + 1]) / spacing**2
        reach = spacing
    sd = curvature**-0.5 if curvature > 0 else _WIDEST
    return best, min(sd, _WIDEST)


def beside(near: Conditional, phi: float, sd: float) -> CholeskyGaussian:
    """Put the coordinate of a learned parameter, independent, behind the globals of a Gaussian."""
    q = near.marginal()
    mean: Tensor = torch.cat([q.mean, q.mean.new_tensor([phi])])
    covariance = torch.block_diag(q.covariance, q.mean.new_tensor([[sd**2]]))
    return CholeskyGaussian.from_moments(mean.detach(), covariance.detach())
