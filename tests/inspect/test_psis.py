"""Pareto-smoothed importance sampling against ArviZ and known tails."""

import importlib.util
import math

import numpy as np
import pytest
import torch

from torchngvi.diagnostics.importance import fit_generalized_pareto, k_hat, smoothed

if importlib.util.find_spec("arviz") is None:
    pytest.skip("ArviZ is not installed", allow_module_level=True)
from arviz_either import NEW, psislw  # noqa: E402

F64 = torch.float64


def weights_of(kind, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if kind == "pareto":
        return 0.8 * torch.empty(count, 3, dtype=F64).exponential_(generator=generator)
    if kind == "normal":
        return 2.5 * torch.randn(count, 3, dtype=F64, generator=generator) - 700.0
    if kind == "bounded":
        return torch.rand(count, 3, dtype=F64, generator=generator).log()
    if kind == "far":  # one weight beyond all others
        x = torch.randn(count, 3, dtype=F64, generator=generator)
        x[5] += 1000.0
        return x
    if kind == "ties":
        return torch.randn(count, 3, dtype=F64, generator=generator).round(decimals=1)
    x = torch.randn(count, 3, dtype=F64, generator=generator)  # outside of the support
    x[::3] = -math.inf
    return x


@pytest.mark.parametrize("count", [100, 333, 1024, 5000])
@pytest.mark.parametrize("kind", ["pareto", "normal", "bounded", "far", "ties", "outside"])
def test_against_arviz(kind, count):
    if NEW and (count in (333, 5000) or kind in ("far", "ties")):
        pytest.skip("ArviZ 1 rounds the length of a tail otherwise, and takes ties and a single weight otherwise")
    x = weights_of(kind, count, count)
    result = smoothed(x)
    expected, k = psislw(x.mT.contiguous().numpy())
    np.testing.assert_allclose(result.k_hat.numpy(), k, rtol=1e-8, atol=1e-8)
    found = result.log_weights.mT.numpy()
    if kind == "ties":  # which of two equal draws gets the larger weight is left to the sorting
        found, expected = np.sort(found), np.sort(expected)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-8)


def test_the_sign_of_the_weights():
    """Golden k-hats of quantiles of Pareto weights with shape 0.9, and of their reciprocals, which are bounded."""
    p = (torch.arange(1024, dtype=F64) + 0.5) / 1024
    heavy = -0.9 * torch.log1p(-p)
    for x, golden in ((heavy, 0.845288558930), (-heavy, -0.823011708315)):
        assert float(k_hat(x)) == pytest.approx(golden, abs=1e-8)
        assert float(psislw(x.numpy())[1]) == pytest.approx(golden, abs=1e-8)


def test_one_column_alone_is_that_of_a_batch():
    x = weights_of("pareto", 400)
    alone, together = smoothed(x[:, 1]), smoothed(x)
    torch.testing.assert_close(alone.log_weights, together.log_weights[:, 1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(alone.k_hat, together.k_hat[1], rtol=1e-12, atol=0)
    assert smoothed(x.reshape(400, 3, 1)).k_hat.shape == (3, 1)


def test_effective_number_of_draws():
    """Of lognormal weights with scale s, S exp(-s²)."""
    x = 0.5 * torch.randn(100_000, dtype=F64, generator=torch.Generator().manual_seed(1))
    assert smoothed(x).effective.item() == pytest.approx(1e5 * math.exp(-0.25), rel=0.01)


def test_the_fit_recovers_shape_and_scale():
    p = (torch.arange(4000, dtype=F64) + 0.5) / 4000
    k, sigma = 0.4, 3.0
    x = sigma * ((1 - p) ** -k - 1) / k
    found, scale = fit_generalized_pareto(x[:, None], torch.tensor([4000]))
    assert found.item() == pytest.approx(k, abs=0.02)
    assert scale.item() == pytest.approx(sigma, rel=0.02)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite(bad):
    result = smoothed(torch.tensor([0.0] * 100 + [bad]))
    assert math.isnan(result.k_hat.item())
    assert bool(result.log_weights.isnan().all())


def test_nowhere_in_the_support():
    assert math.isnan(k_hat(torch.full((100,), -math.inf)).item())
