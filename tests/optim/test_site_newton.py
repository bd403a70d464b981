"""SiteNewton: along its move the stationary conditions change, to first order, by minus their value."""

import pytest
import torch

from torchngvi import VN, CholeskyGaussian, GeneralizedLinear, NaturalGaussian, NaturalGradientVI, fit
from torchngvi.interfaces import Congruence
from torchngvi.rules import SiteNewton, VariationalNewton

FAMILIES = ["bernoulli_logit", "poisson_log", "gaussian"]


def model(family="bernoulli_logit", rows=12, dim=5, **options):
    generator = torch.Generator().manual_seed(4)
    X = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    y = (X[:, 0] + 0.3 * X[:, 1] > 0).double()
    weights = 0.5 + torch.rand(rows, generator=generator, dtype=torch.float64)
    return GeneralizedLinear(X, y, family, prior_precision=0.7, weights=weights, **options)


def near_the_optimum(q, target):
    fit(q, target, tolerance=1e-8, progress=False)
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(q.dim, q.dim, generator=generator, dtype=torch.float64)
    N = torch.eye(q.dim, dtype=torch.float64) + 0.1 * (noise + noise.mT)
    q.assign(*q.moved(Congruence(N, 0.1 * noise[0])))


def conditions(q, target):
    """g and H - γS, in θ."""
    frame = q.frame()
    with torch.no_grad():
        g, H = target.expected_energy(frame)[1].raw()
    return g, H - target.temperature * torch.linalg.inv(frame.dense() @ frame.dense().mT)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gamma", [0.4, 1.0])
@pytest.mark.parametrize("posterior", [CholeskyGaussian, NaturalGaussian])
def test_the_move_solves_the_linearised_conditions(family, gamma, posterior):
    target = model(family, temperature=gamma)
    q = posterior(5, dtype=torch.float64)
    near_the_optimum(q, target)
    start = q.snapshot()
    opt = NaturalGradientVI(q, VariationalNewton(), metric=SiteNewton(target))
    opt.evaluate(target)
    N, force = opt._cache.heading.path.at(torch.ones((), dtype=torch.float64))  # to the Newton point
    eye = torch.eye(5, dtype=torch.float64)
    D, delta = N - eye, torch.linalg.solve(N, force)
    g, residual = conditions(q, target)
    ahead = {}
    for h in (-1e-4, 1e-4):
        q.assign(*q.moved(Congruence(eye + h * D, (eye + h * D) @ (h * delta))))  # m + hCδ
        ahead[h] = conditions(q, target)
        q.assign(start, torch.tensor(True))
    for at_start, forward, backward in zip((g, residual), ahead[1e-4], ahead[-1e-4], strict=True):
        change = (forward - backward) / 2e-4
        torch.testing.assert_close(change, -at_start, rtol=0, atol=1e-6 * float(at_start.abs().max()))
        assert float(at_start.abs().max()) > 1e-2, "q must not be stationary"


def test_the_tail_is_quadratic():
    """Three more evaluations take the norm from 1e-1 to 1e-10; the natural gradient alone needs more."""
    target = model(rows=8, dim=5)
    counts = {}
    for newton in (True, False):
        q = CholeskyGaussian(5, dtype=torch.float64)
        opt = VN(q, metric=SiteNewton(target) if newton else None)
        result = fit(q, target, opt, tolerance=1e-10, progress=False)
        assert result.converged
        counts[newton] = sum(record.norm < 0.1 for record in result.trace)
    assert counts[True] <= 4 < counts[False]


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_far_starts(scale):
    target = model()
    q = CholeskyGaussian(5, mean=torch.full((5,), 3.0), scale=scale, dtype=torch.float64)
    result = fit(q, target, VN(q, metric=SiteNewton(target)), progress=False)
    assert result.converged
    assert result.evaluations <= 40
    losses = [record.loss for record in result.trace]
    assert all(later <= earlier + 1e-9 for earlier, later in zip(losses, losses[1:], strict=False))


def test_a_batch_is_its_members():
    generator = torch.Generator().manual_seed(6)
    X = torch.randn(3, 8, 2, generator=generator, dtype=torch.float64)
    y = (X[..., 0] > 0).double()
    batch, q = GeneralizedLinear(X, y), CholeskyGaussian(2, (3,), dtype=torch.float64)
    assert fit(q, batch, VN(q, metric=SiteNewton(batch)), tolerance=1e-10, progress=False).converged
    for i in range(3):
        alone, target = CholeskyGaussian(2, dtype=torch.float64), GeneralizedLinear(X[i], y[i])
        fit(alone, target, tolerance=1e-10, progress=False)
        torch.testing.assert_close(q.mean[i], alone.mean, rtol=0, atol=1e-8)
        torch.testing.assert_close(q.covariance[i], alone.covariance, rtol=0, atol=1e-8)
