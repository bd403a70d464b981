"""The ends of a short training: where a posterior over weights and a learned noise arrive, and what calibrate finds."""

import io
import math

import pytest
import torch
from torch import nn

from torchngvi.networks import VON, Gaussian, SampledLabels, attach, calibrate, network

N, D, STEPS = 200, 20, 300


def linear_data():
    """Orthogonal columns of length √N, for which independent weights are exact, and noise of standard deviation 0.3."""
    g = torch.Generator().manual_seed(0)
    x = torch.linalg.qr(torch.randn(N, D, generator=g, dtype=torch.float64))[0] * N**0.5
    w = 0.2 * torch.randn(D, 1, generator=g, dtype=torch.float64)
    return x, x @ w + 0.3 * torch.randn(N, 1, generator=g, dtype=torch.float64)


def exact_ends(x, y):
    """The mean, the variance and the noise's variance that maximise the evidence bound together, by fixed point."""
    noise = torch.tensor(1.0, dtype=torch.float64)
    for _ in range(200):
        variance = 1 / (N / noise + 1)
        mean = variance * (x.T @ y) / noise
        noise = (y - x @ mean).square().mean() + D * variance
    return mean, variance, noise


def trained(x, y, memory=None):
    torch.manual_seed(0)
    model = nn.Linear(D, 1, bias=False, dtype=torch.float64)
    log_scale = nn.Parameter(torch.zeros((), dtype=torch.float64))
    q = network(model, N, likelihood=Gaussian(log_scale.exp), temperature=1.0)
    groups = [{"params": list(model.parameters()), "lr": 1.0}, {"params": [log_scale], "lr": 0.1}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    attach(optimizer, q, steps=STEPS, curvature=SampledLabels(every=1))
    if memory is not None:
        q.memory = memory
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (0.5 * ((y - model(x)) / log_scale.exp()).square() + log_scale).mean().backward()
        optimizer.step()
        scheduler.step()
    return q, log_scale.exp().item()


def test_a_short_run_ends_at_the_posterior_and_the_noise_of_a_linear_model():
    """Linear and Gaussian, 300 steps: the noise within 4 %, all standard deviations in the mean within 12 %."""
    x, y = linear_data()
    mean, variance, noise = exact_ends(x, y)
    q, scale = trained(x, y)
    assert abs(scale / noise.sqrt().item() - 1) < 0.04
    ratio = (q.variance["weight"].sqrt().mean() / variance.sqrt()).item()
    assert abs(ratio - 1) < 0.12
    assert ((q.mean["weight"].T - mean).abs().max() < 0.8 * variance.sqrt()).item()
    late, _ = trained(x, y, memory=1000)
    assert (late.variance["weight"].sqrt().mean() / variance.sqrt()).item() > 1.5  # a start that is not forgotten


@pytest.mark.parametrize(
    ("steps", "every", "memory"), [(100, 10, 10), (1000, 10, 30), (1000, 1, 300), (10**5, 10, 100), (None, 3, 100)]
)
def test_the_start_is_forgotten_over_a_share_of_the_training(steps, every, memory):
    keywords = {"radius": 0.01} if steps is None else {"steps": steps}
    curvature = SampledLabels(every=every)
    model = nn.Linear(3, 2)
    q = network(model, 50)
    attach(torch.optim.AdamW(model.parameters(), weight_decay=0.0), q, curvature=curvature, **keywords)
    assert q.memory == pytest.approx(memory)
    assert VON(nn.Linear(3, 2), 50, curvature=curvature, **keywords).q.memory == pytest.approx(memory)


def test_the_running_curvature_weighs_the_kth_observation_by_its_cube():
    model = nn.Linear(1, 2, bias=False, dtype=torch.float64)
    q = network(model, 50)
    seen = torch.rand(30, 2, 1, dtype=torch.float64)
    for one in seen:
        q.observe_([one.sqrt()], 1.0, 0.0)
        q.refresh_()
    k = torch.arange(1, 31, dtype=torch.float64)
    weights = k * (k + 1) * (k + 2)  # k³ up to lower powers
    expected = (weights[:, None, None] * seen).sum(0) / weights.sum()
    torch.testing.assert_close(q.families[0].curvature[0], expected, rtol=1e-9, atol=0)


def numbers(scale):
    """Labels about the mean of a network, with a noise twice as large as the likelihood says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    q = network(model, 10**6, likelihood=Gaussian(scale))
    x = torch.randn(2000, 4)
    y = model.eval()(x).detach() + 2 * scale * torch.randn(2000, 1)
    return q, x, y


def test_calibrate_finds_the_noise():
    """A noise of twice the scale: the factor is 2 to a step of the grid, and predictions are those of the new scale."""
    q, x, y = numbers(0.1)
    before = -q.log_prob(x, y).mean().item()
    found = calibrate(q, [(x[:700], y[:700]), (x[700:], y[700:])])
    assert found.factor == q.likelihood.factor == 2.0
    assert -q.log_prob(x, y).mean().item() == pytest.approx(found.nll, abs=1e-5)
    assert found.nll == pytest.approx(0.5 * math.log(2 * math.pi * math.e * 0.04), abs=0.03)
    assert found.nll < before - 0.5
    torch.testing.assert_close(q.predictive(x).aleatoric, torch.full((2000, 1), 0.04))
    output = torch.zeros(4000, 1, requires_grad=True)
    drawn = q.likelihood.sampled_losses(output, torch.Generator().manual_seed(0))
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.05)  # the training's scale stays
    again = calibrate(q, [(x, y)])
    assert again.factor == found.factor  # of the scale itself, not of what was found before
    stored = io.BytesIO()
    torch.save(q.state_dict(), stored)
    stored.seek(0)
    fresh = numbers(0.1)[0]
    fresh.load_state_dict(torch.load(stored, weights_only=True))
    assert fresh.likelihood.factor == 2.0


def test_classes_have_no_noise_to_find():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    q = network(model, 50)
    x = torch.randn(100, 3)
    assert calibrate(q, [(x, (x[:, 0] > 0).long())]).factor == 1.0
    assert q.likelihood.factor == 1.0


def test_the_factor_of_the_noise_is_that_of_one_posterior():
    """Of an ensemble whose members were made with the same likelihood."""
    likelihood, x = Gaussian(0.1), torch.randn(50, 2)
    first, second = (network(nn.Linear(2, 1), 10**6, likelihood=likelihood) for _ in range(2))
    y = first.predict(x) + 0.4 * torch.randn(50, 1)
    assert calibrate(first, [(x, y)]).factor > 2.0
    assert second.likelihood.factor == likelihood.factor == 1.0
