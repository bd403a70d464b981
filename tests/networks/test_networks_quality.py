"""The ends of a short training: where a posterior over weights and a learned noise arrive, and what calibrate finds."""

import io
import math
import warnings

import pytest
import torch
from helpers import exponentials
from test_networks import train
from torch import nn

from torchngvi.errors import CalibrationWarning
from torchngvi.networks import Gaussian, SampledLabels, attach, calibrate, network

N, D, STEPS = 200, 20, 300

untrained = pytest.mark.filterwarnings("ignore:The posterior has seen no data:UserWarning")


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


def both(model, log_scale, lr):
    """An optimizer of the network and of the noise, at a rate of its own."""
    groups = [{"params": list(model.parameters()), "lr": 1.0}, {"params": [log_scale], "lr": lr}]
    return torch.optim.AdamW(groups, weight_decay=0.0)


def trained(x, y):
    torch.manual_seed(0)
    model = nn.Linear(D, 1, bias=False, dtype=torch.float64)
    log_scale = nn.Parameter(torch.zeros((), dtype=torch.float64))
    q = network(model, N, likelihood=Gaussian(log_scale.exp), temperature=1.0)
    optimizer = both(model, log_scale, 0.1)
    attach(optimizer, q, steps=STEPS, curvature=SampledLabels(every=1))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    train(model, optimizer, STEPS, scheduler, loss=q.likelihood.loss, batch=(x, y))
    return q, log_scale.exp().item()


@pytest.mark.accuracy
def test_a_short_run_ends_at_the_posterior_and_the_noise_of_a_linear_model():
    """Linear and Gaussian, 300 steps: the noise within 4 %, all standard deviations in the mean within 12 %."""
    x, y = linear_data()
    mean, variance, noise = exact_ends(x, y)
    q, scale = trained(x, y)
    assert abs(scale / noise.sqrt().item() - 1) < 0.04
    ratio = (q.variance["weight"].sqrt().mean() / variance.sqrt()).item()
    assert abs(ratio - 1) < 0.12
    assert ((q.mean["weight"].T - mean).abs().max() < 0.8 * variance.sqrt()).item()


def learned_noise(share, steps=400):
    """The noise that a network learns from inputs that move together, with the radius share/√steps; it is 0.1."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(1000, 1, generator=g) + 0.1 * torch.randn(1000, 16, generator=g)
    y = x.mean(1, keepdim=True).sin() + 0.1 * torch.randn(1000, 1, generator=g)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 30), nn.ReLU(), nn.Linear(30, 1))
    log_scale = nn.Parameter(torch.zeros(()))
    noise = Gaussian(log_scale.exp)
    q = network(model, 1000, likelihood=noise)
    optimizer = both(model, log_scale, 0.03)
    length = {"steps": steps} if share is None else {"radius": share / math.sqrt(steps)}
    attach(optimizer, q, **length)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(1000, (32,), generator=g)
        train(model, optimizer, 1, scheduler, loss=noise.loss, batch=(x[rows], y[rows]))
    return log_scale.exp().item()


@pytest.mark.accuracy
@exponentials
def test_the_default_radius_lets_a_noise_be_learned():
    """From inputs that move together, where the diagonal of the curvature says too little of a long move."""
    default = learned_noise(None)
    assert 0.1 < default < 0.168  # in 400 steps; 0.181 with 0.1/√steps
    assert learned_noise(0.3) > 1.4 * default


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


at_the_mean = pytest.mark.filterwarnings("ignore:The temperature chosen:torchngvi.errors.CalibrationWarning")


def numbers(scale):
    """Labels about the mean of a network, with a noise twice as large as the likelihood says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    q = network(model, 10**6, likelihood=Gaussian(scale))
    x = torch.randn(2000, 4)
    y = model.eval()(x).detach() + 2 * scale * torch.randn(2000, 1)
    return q, x, y


@pytest.mark.accuracy
@untrained
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


@untrained
def test_classes_have_no_noise_to_find():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    q = network(model, 50)
    x = torch.randn(100, 3)
    assert calibrate(q, [(x, torch.distributions.Categorical(logits=model(x)).sample())]).factor == 1.0
    assert q.likelihood.factor == 1.0


@untrained
@at_the_mean  # where the labels were drawn
def test_the_factor_of_the_noise_is_that_of_one_posterior():
    """Of an ensemble whose members were made with the same likelihood."""
    likelihood, x = Gaussian(0.1), torch.randn(50, 2)
    first, second = (network(nn.Linear(2, 1), 10**6, likelihood=likelihood) for _ in range(2))
    y = first.predict(x) + 0.4 * torch.randn(50, 1)
    assert calibrate(first, [(x, y)]).factor > 2.0
    assert second.likelihood.factor == likelihood.factor == 1.0


def regression(loss_of, log_scale, lr=0.05):
    """A linear network with a noise that is to be learned, trained for 40 steps with some loss, and its data."""
    torch.manual_seed(0)
    x = torch.randn(200, 3)
    y = x[:, :1] + 0.3 * torch.randn(200, 1)
    model = nn.Linear(3, 1)
    noise = Gaussian(lambda: log_scale.exp())
    q = network(model, 200, likelihood=noise)
    optimizer = both(model, log_scale, lr)
    attach(optimizer, q, steps=40)
    train(model, optimizer, 40, loss=lambda output, y: loss_of(noise, output, y), batch=(x, y))
    model.eval()
    return q, x, y


def test_the_loss_of_numbers_is_their_density():
    """Less the constant; its gradient is that of the scale too."""
    output, y = torch.randn(2, 5, 1, dtype=torch.float64)
    log_scale = torch.tensor(-0.3, dtype=torch.float64, requires_grad=True)
    noise = Gaussian(lambda: log_scale.exp())
    loss = noise.loss(output, y)
    expected = -noise.log_prob(output[None], y).mean() - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-12, atol=0)
    [slope] = torch.autograd.grad(loss, log_scale)
    torch.testing.assert_close(slope, 1 - ((y - output) / log_scale.exp().detach()).square().mean(), rtol=1e-12, atol=0)


def test_a_noise_that_the_loss_leaves_out_is_told():
    """Under `mse_loss` a scale that is to be learned stays where it began; under the likelihood's loss it moves."""
    begin = nn.Parameter(torch.tensor(-1.2))
    q, x, y = regression(lambda noise, output, y: nn.functional.mse_loss(output, y), begin)
    with pytest.warns(CalibrationWarning, match="to be learned and is what it was .* mse_loss .*loss.output, y."):
        calibrate(q, [(x, y)])
    q, x, y = regression(lambda noise, output, y: noise.loss(output, y), nn.Parameter(torch.tensor(-1.2)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        calibrate(q, [(x, y)])
    assert not any("to be learned" in str(one.message) for one in told)
    assert q.likelihood.doubt() is None


@pytest.mark.accuracy
@untrained
def test_calibrate_says_that_it_ended_at_an_end():
    """Of the temperatures, both ends; of the factors of the noise."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    q = network(model, 50)
    x = torch.randn(400, 3)
    with torch.no_grad():
        model.weight *= 50
    wrong = torch.randint(2, (400,))
    with pytest.warns(CalibrationWarning, match="16, is the largest one tried: .* largest=64, or train at a higher"):
        calibrate(q, [(x, wrong)])
    q, x, y = numbers(0.1)
    q.temper_(1.0)
    with pytest.warns(CalibrationWarning, match="is as good as the smallest one tried, .* calibrate on more data"):
        assert 2.0**-10 < calibrate(q, [(x, y)]).temperature < 0.05  # of those that predict as well the largest
    with pytest.warns(CalibrationWarning) as told:
        calibrate(q, [(x, 100 * y)])
    assert any("factor of the noise, 64, is far from 1, of 0.25 to 64 tried: " in str(one.message) for one in told)
    with pytest.warns(CalibrationWarning, match="fits its training labels much more closely than new ones"):
        assert 8 <= calibrate(q, [(x, y + 2 * torch.randn(len(y), 1))]).factor < 64


def test_calibrate_finds_the_lower_of_two_minima():
    """A network with three classes and few data: from the temperature 16 to 2 its draws guess."""
    torch.manual_seed(3)
    y = torch.randint(3, (1250,))
    x = torch.tensor([[5.0, 3.4, 1.5, 0.2], [5.9, 2.8, 4.3, 1.3], [6.6, 3.0, 5.6, 2.0]])[y] + 0.35 * torch.randn(
        1250, 4
    )
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:150]), y[:150]).backward()
        optimizer.step()
    q = network(model.eval(), num_data=150)
    q.laplace([(x[:150], y[:150])])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        found = calibrate(q, [(x[150:250], y[150:250])])
    assert found.tried[8.0] < min(found.tried[4.0], found.tried[2.0])  # where a search downwards would stop
    assert found.temperature < 0.5
    assert found.nll < 0.3


def test_calibrate_in_the_middle_says_nothing():
    """Of labels of one draw of the weights; nor where the width of q does not matter, as with a flat head."""
    q, x, _ = numbers(0.1)
    with q.drawn(0):
        y = q.model.eval()(x).detach() + 0.1 * torch.randn(2000, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The posterior has seen no data")
        found = calibrate(q, [(x, y)])
        flat = network(nn.Linear(1, 2), 50)
        calibrate(flat, [(torch.zeros(50, 1), torch.arange(50) % 2)], largest=2.0**-6)
    assert 2.0**-10 < found.temperature < 4.0
    assert repr(found).startswith(f"Calibrated(temperature={found.temperature:.4g}, nll=")
