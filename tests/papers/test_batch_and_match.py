"""Batch and match: its equations, its fixed points, and short runs of the study."""

import pandas as pd
import pytest
import torch

from examples.papers import cai2024
from examples.papers.cai2024.matching import BatchAndMatch, matched
from examples.papers.kim2024.runs import optimum, reference_target
from torchngvi import CholeskyGaussian
from torchngvi.models import LogJoint

DTYPE = torch.float64


def batch(dim=3, draws=8, members=(2,)):
    """Draws of some q_t with scores of no particular density."""
    generator = torch.Generator().manual_seed(3)
    mean = torch.randn(*members, dim, dtype=DTYPE, generator=generator)
    root = 0.3 * torch.randn(*members, dim, dim, dtype=DTYPE, generator=generator).tril(-1)
    root = root + torch.eye(dim, dtype=DTYPE)
    z = torch.randn(draws, *members, dim, dtype=DTYPE, generator=generator)
    theta = mean + (root @ z[..., None])[..., 0]
    return theta, -1.5 * theta + 0.3 * theta.square(), mean, root @ root.mT


def objective(mean, sigma, theta, scores, mean0, sigma0, lam):
    """The batch estimate of the divergence and (2/λ) KL(q_t ‖ q), from their definitions."""
    q, before = (torch.distributions.MultivariateNormal(*pair) for pair in ((mean, sigma), (mean0, sigma0)))
    away = -torch.linalg.solve(sigma, (theta - mean)[..., None])[..., 0] - scores
    divergence = (away * (sigma @ away[..., None])[..., 0]).sum(-1).mean(0)
    return divergence + 2 / lam * torch.distributions.kl_divergence(before, q)


@pytest.mark.parametrize("lam", [0.01, 1.0, 300.0])
def test_the_step_is_the_minimum_of_the_objective(lam):
    theta, scores, mean0, sigma0 = batch(members=())
    mean, sigma = matched(theta, scores, mean0, sigma0, lam)
    root = torch.linalg.cholesky(sigma)
    mean, root = mean.requires_grad_(), root.requires_grad_()
    value = objective(mean, root @ root.mT, theta, scores, mean0, sigma0, lam)
    slopes = torch.autograd.grad(value, (mean, root))
    assert max(float(slope.abs().max()) for slope in slopes) < 1e-9 * float(value.detach().abs() + 1)
    assert value < objective(mean0, sigma0, theta, scores, mean0, sigma0, lam)


def test_the_covariance_solves_its_quadratic_equation():
    theta, scores, mean, sigma = batch()
    lam = torch.tensor([0.5, 40.0], dtype=DTYPE)
    _, found = matched(theta, scores, mean, sigma, lam)
    for k in range(2):
        x, g = theta[:, k] - theta[:, k].mean(0), scores[:, k] - scores[:, k].mean(0)
        d, slope, share = theta[:, k].mean(0) - mean[k], scores[:, k].mean(0), lam[k] / (1 + lam[k])
        U = lam[k] * g.mT @ g / 8 + share * torch.outer(slope, slope)
        V = sigma[k] + lam[k] * x.mT @ x / 8 + share * torch.outer(d, d)
        left = found[k] @ U @ found[k] + found[k]
        assert left.numpy() == pytest.approx(V.numpy(), rel=1e-9)


class TestGaussianTarget:
    def test_one_step_of_infinite_length_is_exact_from_any_batch(self):
        """C = ΣΓΣ with Γ = ΛCΛ has the one positive definite solution Λ⁻¹, as soon as B > D."""
        target = reference_target(3, 4.0)
        q = CholeskyGaussian(3, (5,), dtype=DTYPE)
        BatchAndMatch(q, 5, torch.Generator().manual_seed(0)).step(LogJoint(target.log_joint), 1e13)
        for k in range(5):
            assert (q.covariance[k] @ target.precision).numpy() == pytest.approx(torch.eye(3).numpy(), abs=1e-5)
            assert q.mean[k].numpy() == pytest.approx(target.mean.numpy(), abs=1e-5)

    def test_the_target_is_a_fixed_point_for_every_batch_and_length(self):
        """Also for one draw: there is no noise to average out."""
        target = reference_target(3, 4.0)
        q = CholeskyGaussian(3, mean=target.mean, scale=optimum(target), dtype=DTYPE)
        for draws, lam in ((1, 0.1), (2, 50.0), (9, 1.0)):
            BatchAndMatch(q, draws, torch.Generator().manual_seed(draws)).step(LogJoint(target.log_joint), lam)
        assert (q.covariance @ target.precision).numpy() == pytest.approx(torch.eye(3).numpy(), abs=1e-10)
        assert q.mean.numpy() == pytest.approx(target.mean.numpy(), abs=1e-10)


def test_off_gaussian_it_ends_where_the_scores_have_the_covariance_of_q():
    """E[g] = 0 and E[ggᵀ] = Σ⁻¹, not E[-∇²log p] = Σ⁻¹: in one dimension narrower than the optimum of the ELBO."""
    nodes = torch.distributions.Normal(0, 1).icdf(torch.linspace(0, 1, 2002, dtype=DTYPE)[1:-1])
    mean, variance = torch.zeros(1, dtype=DTYPE), torch.ones(1, 1, dtype=DTYPE)
    for _ in range(200):
        theta = mean + nodes[:, None] * variance.sqrt()
        mean, variance = matched(theta, -0.2 * theta - theta**3, mean, variance, 2.0)
    theta = mean + nodes[:, None] * variance.sqrt()
    scores = -0.2 * theta - theta**3
    assert float(scores.mean()) == pytest.approx(0, abs=1e-8)
    assert float(scores.square().mean() * variance) == pytest.approx(1, rel=1e-2)
    assert float(variance * (0.2 + 3 * theta.square()).mean()) < 0.95  # W < 1


def test_a_member_without_a_finite_step_stays():
    q = CholeskyGaussian(1, (2,), mean=torch.tensor([[0.0], [5.0]], dtype=DTYPE), dtype=DTYPE)

    def log_joint(theta):
        return ((3.5 - theta).sqrt() - theta.square())[..., 0]  # no number beyond 3.5

    BatchAndMatch(q, 4, torch.Generator().manual_seed(0)).step(LogJoint(log_joint), 1.0)
    assert float(q.mean[1]) == 5.0
    assert float(q.variance[0]) < 1.0


@pytest.mark.accuracy
def test_the_study_runs_and_draws_from_its_log(tmp_path, capsys):
    study = cai2024.STUDIES["targets"]
    log = study.run(targets=("Gaussian", "Poisson, 60 rows"), runs=2, length=4, steps=(0.5,), factors=(1.0,))
    log.to_csv(tmp_path / "log.csv", index=False)
    study.draw(pd.read_csv(tmp_path / "log.csv"), tmp_path / "targets")
    assert (tmp_path / "targets.png").exists()
    assert (tmp_path / "targets.svg").exists()
    assert "batch and match" in capsys.readouterr().out
