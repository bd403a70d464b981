"""Moments by importance sampling: the proposal's density and draws, known answers, what is not finite."""

import math

import pytest
import torch

from torchngvi import CholeskyGaussian, DiagonalGaussian, LogJoint, NaturalGaussian
from torchngvi.diagnostics.importance import Proposal, corrected_moments

F64 = torch.float64


def dense(dim=6):
    root = 0.4 * torch.randn(dim, dim, dtype=F64, generator=torch.Generator().manual_seed(1)).tril(-1)
    return CholeskyGaussian(dim, mean=0.7, scale=root + torch.diag(torch.linspace(0.5, 2, dim, dtype=F64)))


def response(dim=6):
    A = torch.randn(dim, dim, dtype=F64, generator=torch.Generator().manual_seed(2))
    values = torch.tensor([-0.1, 0.0, 0.1, 0.3, 0.6, 1.2][:dim], dtype=F64)
    U = torch.linalg.qr(A)[0]
    return (U * values) @ U.mT, U, (1 - values).clamp(0.1, 1.0).rsqrt()


def student(x, dof=3.0):
    """Of independent marginals given one scale, by its definition as a mixture: quadrature over the precision."""
    tau = torch.distributions.Gamma(0.5 * dof, 0.5 * dof)
    grid = torch.linspace(-14, 5, 801, dtype=F64).exp()
    log_mass = tau.log_prob(grid) + grid.log() + math.log(19 / 800)
    normal = 0.5 * x.shape[1] * (grid / (2 * math.pi)).log() - 0.5 * grid * x.square().sum(1)[:, None]
    return (normal + log_mass).logsumexp(1)


@pytest.mark.parametrize("family", [CholeskyGaussian, NaturalGaussian])
def test_the_density_of_the_proposal(family):
    q = family.from_posterior(dense())
    M, U, scale = response()
    proposal = Proposal(q, M)
    x = proposal.sample(40, torch.Generator().manual_seed(0))
    u = (x @ U) / scale
    near = q.log_prob(q.mean + q.frame().push(x))
    volume = scale.log().sum() + q.log_det_root()
    wide = student(u) - volume
    rest = -0.5 * u[:, :2].square().sum(1) - math.log(2 * math.pi)
    some = student(u[:, 2:]) + rest - volume
    expected = torch.stack([near + math.log(0.5), wide + math.log(0.25), some + math.log(0.25)]).logsumexp(0)
    mixture, own = proposal.log_density(x)
    torch.testing.assert_close(own, near, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mixture, expected, rtol=1e-6, atol=1e-6)


def test_draws_have_that_density():
    """The weights of a known density average to one, and the moments are its own."""
    q = dense(3)
    M = response(3)[0]
    target = CholeskyGaussian(3, mean=0.9, scale=torch.tensor([0.9, 1.5, 2.2], dtype=F64), dtype=F64)
    proposal = Proposal(q, M)
    x = proposal.sample(200_000, torch.Generator().manual_seed(3))
    weights = (target.log_prob(q.mean + q.frame().push(x)) - proposal.log_density(x)[0]).exp()
    assert abs(weights.mean().item() - 1) < 4 * weights.std().item() / math.sqrt(len(x))


def test_moments_of_a_student_t():
    """Wider than q, heavier tails: sd √(5/3) where q has 1.1."""
    q = CholeskyGaussian(4, scale=1.1, dtype=F64)
    target = LogJoint(lambda theta: -4.5 * torch.log1p(theta.square().sum(-1) / 5))
    each = [corrected_moments(q, target, num_samples=8192, seed=seed).corrected for seed in range(10)]
    sd = torch.stack([one.sd for one in each])
    assert bool(((sd.mean(0).log() - 0.5 * math.log(5 / 3)).abs() < 0.05).all())
    error = torch.stack([one.log_sd_error for one in each]).square().mean().sqrt()
    assert 0.5 < error / sd.log().std(0).square().mean().sqrt() < 2
    assert all(one.k_hat < 0.7 and one.effective > 3000 for one in each)


def test_a_standard_deviation_has_a_k_hat_of_its_own():
    """A t with ν = 2.5 under one with ν = 3: weights grow as √x, k = 1/6, weighted squares as x^2.5, k = 5/6."""
    q = CholeskyGaussian(1, dtype=F64)
    heavy = corrected_moments(q, LogJoint(lambda theta: -1.75 * torch.log1p(theta.square().sum(-1) / 2.5))).corrected
    light = corrected_moments(q, LogJoint(lambda theta: -0.6 * theta.square().sum(-1))).corrected
    assert heavy.k_hat < 0.5 < 0.6 < float(heavy.sd_k_hat) < 1.0
    assert light.k_hat < 0.3
    assert float(light.sd_k_hat) < 0.5


def test_only_the_most_doubtful_have_one():
    q = CholeskyGaussian(20, dtype=F64)
    scale = torch.linspace(1.0, 1.5, 20, dtype=F64)
    found = corrected_moments(q, LogJoint(lambda theta: -0.5 * (theta / scale).square().sum(-1))).corrected
    known = ~found.sd_k_hat.isnan()
    assert int(known.sum()) == 16
    size = found.sd.log().abs()
    assert float(size[known].min()) >= float(size[~known].max())


def test_an_exact_q():
    q = dense()
    found = corrected_moments(q, LogJoint(lambda theta: q.log_prob(theta) + 3.0))
    assert found.from_q.k_hat == 0.0
    assert found.from_q.nats < 1e-20
    assert found.from_q.elbo == pytest.approx(3.0)
    assert found.corrected.effective > 2000
    assert bool(((found.corrected.mean - q.mean).abs() < 4 * found.corrected.mean_error).all())


def test_a_temperature_scales_the_problem():
    q = dense()
    cold = LogJoint(lambda theta: -theta.square().sum(-1))
    hot = LogJoint(lambda theta: -2.5 * theta.square().sum(-1), temperature=2.5)
    first, second = (corrected_moments(q, one).corrected for one in (cold, hot))
    torch.testing.assert_close(first.sd, second.sd)


def test_a_mean_field_and_float32():
    q = DiagonalGaussian(2, scale=torch.tensor([1.0, 2.0]))
    found = corrected_moments(q, LogJoint(lambda theta: -0.5 * (theta / torch.tensor([1.0, 2.5])).square().sum(-1)))
    assert found.corrected.sd.dtype == torch.float32
    assert found.corrected.sd.tolist() == pytest.approx([1.0, 2.5], rel=0.06)


def test_outside_of_the_support_weights_vanish():
    """A half normal has the mean √(2/π)."""
    q = CholeskyGaussian(1, mean=0.8, scale=0.7, dtype=F64)
    target = LogJoint(lambda theta: torch.where(theta[..., 0] > 0, -0.5 * theta.square().sum(-1), -torch.inf))
    found = corrected_moments(q, target)
    assert found.corrected.mean.item() == pytest.approx(math.sqrt(2 / math.pi), abs=0.03)
    assert found.from_q.nats == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite(bad):
    q = CholeskyGaussian(1, dtype=F64)
    assert corrected_moments(q, LogJoint(lambda theta: torch.where(theta > 1, bad, -theta.square())[..., 0])) is None
    assert corrected_moments(q, LogJoint(lambda theta: -math.inf + 0 * theta[..., 0])) is None
