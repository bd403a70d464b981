"""The search for a mode from where the log joint is astronomically low: exponential walls, and narrow q far away."""

import math

import pytest
import torch

from torchngvi import CholeskyGaussian, DiagonalGaussian, LogJoint, fit
from torchngvi.mode import find_mode

F64 = torch.float64


def rotation(dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=F64))[0]


def log_gamma(z):
    """Log density of the logarithm of a Gamma(2) variable, whose mode is log 2 and whose curvature there is 2."""
    return (2 * z - z.exp()).sum(-1)


def budget(dim):
    return 200 + 20 * dim


@pytest.mark.sparse(2)
@pytest.mark.parametrize("seed", [0, 1])
def test_narrow_quadratic_far_away(seed):
    """Standard deviations from 1e-6 to 1e-2, 1e4 away: a difference step is no shorter than theta is rounded."""
    sd, turn = torch.logspace(-6, -2, 4, dtype=F64), rotation(4, seed)
    m = 1e4 * torch.ones(4, dtype=F64)
    found = find_mode(LogJoint(lambda theta: -0.5 * ((theta - m) @ turn / sd).square().sum(-1)), 0 * m, budget(4))
    assert found.found
    assert float(((found.theta - m) @ turn / sd).norm()) < 0.5
    within = turn.mT @ found.root / sd[:, None]  # root rootᵀ = turn diag(sd²) turnᵀ
    torch.testing.assert_close(within @ within.mT, torch.eye(4, dtype=F64), rtol=0, atol=0.05)


@pytest.mark.parametrize(("distance", "condition"), [(60, 1), (60, 1e4), (600, 1e2)])
def test_exponential_wall(distance, condition):
    """From z up to 600, where the log joint is -1e26 to -1e260, to the known mode z = log 2 and curvature 2."""
    dim = 5
    sd, turn = torch.logspace(-math.log10(condition) / 2, 0, dim, dtype=F64), rotation(dim)
    z = distance * torch.tensor([1.0, -1.0, 0.5, 0.9, -0.2], dtype=F64)
    start = turn @ (sd * z)
    found = find_mode(LogJoint(lambda theta: log_gamma(theta @ turn / sd)), start, budget(dim))
    assert found.found
    assert float((found.theta @ turn / sd - math.log(2)).norm()) < 1.0
    within = math.sqrt(2) * turn.mT @ found.root / sd[:, None]
    assert float(torch.linalg.matrix_norm(within @ within.mT - torch.eye(dim, dtype=F64))) < 1.0


@pytest.mark.parametrize("dim", [2, 10])
def test_funnel_from_afar(dim):
    """Where e^-v is e^80 and x has the sizes that only far larger v allow."""

    def funnel(theta):
        v, x = theta[..., 0], theta[..., 1:]
        return -2 * v.square() - 0.5 * ((-v).exp() * x.square().sum(-1) + x.shape[-1] * v)

    start = torch.full((dim,), 30.0, dtype=F64)
    start[0] = -80.0
    found = find_mode(LogJoint(funnel), start, budget(dim))
    assert found.found
    # the mode: x = 0, 4v + (D-1)/2 = 0
    v = -(dim - 1) / 8
    assert abs(float(found.theta[0]) - v) < 0.5
    assert float(found.theta[1:].norm()) < 0.6 * math.exp(v / 2)


@pytest.mark.parametrize("family", [CholeskyGaussian, DiagonalGaussian])
def test_a_start_where_the_log_joint_overflows(family):
    """Where log p is -∞ at q and near it, the signs of infinite gradients lead to where it is finite."""
    torch.manual_seed(0)
    sd = torch.tensor([5e-3, 5e-3, 1.0], dtype=F64)
    q = family(3, dtype=F64)
    result = fit(q, lambda theta: log_gamma((theta + torch.tensor([5.0, 8.0, 1.0])) / sd), progress=False)
    assert result.converged, result.reason
    z = (q.mean + torch.tensor([5.0, 8.0, 1.0])) / sd
    assert float((z - 0.44).abs().max()) < 0.1  # the best normal distribution has mean + variance/2 = log 2
