"""Where a fit has begun, to which it goes back from a worse place, and what it may not leave."""

import math

import pytest
import torch
from test_starts import quiet

from torchngvi import CholeskyGaussian, DataLogJoint, LogJoint
from torchngvi.fitting.sample_average import SampleAverages
from torchngvi.fitting.starts import EngineSettings, Starts, sampled_loss
from torchngvi.fitting.stopping import Stop
from torchngvi.models.factors import Guarded


def grouped(count=12, seed=5):
    """Counts in groups, centred: log joint, and its likelihood by rows with its prior."""
    generator = torch.Generator().manual_seed(seed)
    group = torch.arange(count).repeat_interleave(3)
    rate = (1 + 0.5 * torch.randn(count, generator=generator, dtype=torch.float64)[group]).exp()
    y = torch.poisson(rate, generator=generator)

    def log_prior(theta):  # the mean, log of the standard deviation, the groups
        mean, log_sd, local = theta[..., :1], theta[..., 1:2], theta[..., 2:]
        spread = -0.5 * ((local - mean) * torch.exp(-log_sd)).square() - log_sd
        return spread.sum(-1) - mean[..., 0].square() / 18 - log_sd[..., 0].square() / 8

    def log_likelihood(theta, batch):
        index, count = batch
        eta = theta[..., 2:][..., index]
        return (count * eta - eta.exp()).sum(-1)

    return lambda theta: log_prior(theta) + log_likelihood(theta, (group, y)), log_likelihood, log_prior, (group, y)


@pytest.mark.accuracy
def test_batches_end_as_one_posterior_does():
    """Of posteriors and of data, from a q twice as wide as it should be; one batch has a mode of collapsed scales."""
    log_joint, log_likelihood, log_prior, rows = grouped()
    ends, whole = [], Guarded(LogJoint(log_joint))
    for target, batch, scale in (
        (log_joint, (), 2.0),
        (log_joint, (2,), 2.0),
        (DataLogJoint(log_likelihood, log_prior, [rows], 36), (), 2.0),
    ):
        q = CholeskyGaussian(14, batch_shape=batch, dtype=torch.float64, scale=scale)
        result = quiet(q, target, examine=False)
        assert result.converged, result.reason
        ends.append(sampled_loss(q, whole, 4096, 9))
    assert ends[1:] == [pytest.approx(2 * ends[0], abs=0.1), pytest.approx(ends[0], abs=0.1)]


@pytest.mark.accuracy
def test_passes_that_have_gone_astray():
    """The first groups say little of their scale: batches lead to where it has collapsed, and q begins once more."""
    generator = torch.Generator().manual_seed(2)
    x, effects = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((200,), (20,)))
    noise = torch.randn(400, generator=generator, dtype=torch.float64)[200:]
    group = torch.arange(20).repeat_interleave(10)
    rows = group, x, 0.7 * effects[group] + x + 0.3 * noise

    def log_prior(theta):  # the mean, log of the standard deviation of groups, the slope and the noise, the groups
        spread = -0.5 * (theta[..., 4:] * torch.exp(-theta[..., 1:2])).square() - theta[..., 1:2]
        return spread.sum(-1) - (theta[..., :4].square() / theta.new_tensor([8, 2, 8, 2])).sum(-1)

    def log_likelihood(theta, batch):
        index, covariate, y = batch
        eta = theta[..., :1] + theta[..., 4:][..., index] + theta[..., 2:3] * covariate
        return (-0.5 * ((y - eta) * torch.exp(-theta[..., 3:4])).square() - theta[..., 3:4]).sum(-1)

    ends, log_joint = [], LogJoint(lambda theta: log_likelihood(theta, rows) + log_prior(theta))
    for number in (0, 10, 20):
        batches = list(zip(*(part.tensor_split(number) for part in rows), strict=True)) if number else ()
        target = DataLogJoint(log_likelihood, log_prior, batches, 200) if number else log_joint
        q = CholeskyGaussian(24, dtype=torch.float64)
        result = quiet(q, target, examine=False, max_gradients=100_000)
        assert result.converged, result.reason
        ends.append(sampled_loss(q, Guarded(log_joint), 4096, 9))
    assert ends[1:] == [pytest.approx(ends[0], abs=0.1)] * 2


def test_q_is_never_worse_than_where_it_started():
    """A budget that ends the run where an average is far above the start puts q back there."""
    q = CholeskyGaussian(14, dtype=torch.float64)
    engine = SampleAverages(q, LogJoint(grouped()[0]), 0.1)
    engine.begin()
    started, standing = engine.starts.origin, engine.advance()
    q.initialize_(50.0)
    engine.descent.point = engine.descent.point._replace(loss=torch.tensor(1e20, dtype=torch.float64))
    ending = engine.ending(Stop("because of the test."), standing)
    assert not ending.converged
    assert ending.loss == engine.starts.reached < 100
    assert all(torch.equal(a, b) for a, b in zip(q.snapshot(), started, strict=True))


def test_its_state():
    q = CholeskyGaussian(14, dtype=torch.float64)
    first, second = (Starts(q, Guarded(LogJoint(grouped()[0])), 1, EngineSettings()) for _ in range(2))
    q.initialize_(1.0, 2.0)
    first.begun()
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.origin.vector, first.origin.vector)
    assert (second.reached, second.wider()) == (first.reached, 0.0)


def test_what_is_wide_is_measured_by_the_wider_of_two_places():
    """q before the fit and where it has begun, whose standard deviations of e^-20 say nothing."""
    q = CholeskyGaussian(3, dtype=torch.float64, scale=0.5)
    starts = Starts(q, Guarded(LogJoint(lambda theta: -theta.square().sum(-1))), 1, EngineSettings())
    q.initialize_(0.0, math.exp(-20))
    starts.begun()
    q.initialize_(0.0, 0.5 * math.exp(14))
    assert starts.wider() == pytest.approx(14.0)
    assert not starts.unconfined(0.0)
    assert starts.unconfined(-1e13)
    q.initialize_(0.0, 0.5 * math.exp(16))
    assert starts.unconfined(0.0)


def test_a_collapsed_mode_is_no_measure_of_how_wide_q_has_become():
    """Five groups that agree: the density is unbounded where their scale vanishes, and a mode there is trusted."""
    generator = torch.Generator().manual_seed(40)
    y = 4 + 0.5 * torch.randn(5, 1, generator=generator, dtype=torch.float64)
    y = y + 1.5 * torch.randn(5, 6, generator=generator, dtype=torch.float64)

    def log_joint(theta):  # the mean, log scales of the groups and of the noise, the groups
        mu, log_s, log_e, local = theta[..., 0], theta[..., 1], theta[..., 2], theta[..., 3:]
        top = -0.005 * mu.square() + log_s + log_e - torch.log1p(0.25 * (2 * log_s).exp())
        top = top - torch.log1p(0.25 * (2 * log_e).exp())
        z2 = ((y - local[..., None]) * (-log_e).exp()[..., None, None]).square()
        likelihood = (-2.5 * torch.log1p(z2 / 4) - log_e[..., None, None]).sum((-2, -1))
        prior = -0.5 * ((local - mu[..., None]) * (-log_s).exp()[..., None]).square() - log_s[..., None]
        return top + prior.sum(-1) + likelihood

    q = CholeskyGaussian(8, dtype=torch.float64)
    result = quiet(q, log_joint, 1, examine=False)
    assert result.converged, result.reason
    assert float(q.stddev.log().min()) > -5
