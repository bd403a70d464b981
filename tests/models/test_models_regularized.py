"""The non-convex regulariser of Kumar et al. (2025), appendix H, in both readings."""

import math

import pytest
import scipy.special
import torch
from helpers import (
    BATCHES,
    DIFFERENCE,
    DIM,
    DTYPE,
    EXACT,
    IDENTITY,
    close,
    difference,
    posteriors,
    randn,
    random_posterior,
)

from torchngvi import SRVN, VN, CholeskyGaussian, GeneralizedLinear, Stein, fit
from torchngvi.expectations import Antithetic, Autograd, Quadrature
from torchngvi.models import ExpectedPenalty, MeanPenalty, Regularized, SoftmaxRegression

PENALTIES = {"mean": MeanPenalty, "expected": ExpectedPenalty}
penalties = pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)


def logistic(rows=20, **options):
    X = randn(rows, DIM, seed=1)
    return GeneralizedLinear(X, (X.sum(-1) + randn(rows, seed=2) > 0).double(), **options)


def bump(x):
    return x**2 / (1 + x**2)


class TestPenalties:
    def test_of_the_mean(self):
        """r(m), 2m/(1 + m²)², and nothing for the variances."""
        m, v = 2 * randn(50, seed=1), randn(50, seed=2).square()
        value, slope, curvature = MeanPenalty(0.7).expected(m, v)
        close(value, 0.7 * bump(m), EXACT)
        close(slope, difference(lambda h: 0.7 * bump(m + h)), DIFFERENCE)
        close(curvature, torch.zeros_like(m), 0.0)

    def test_expected_is_faddeevas(self):
        """λ (1 - √(π/2)/s Re w((e + i)/(s√2)))."""
        e, s = 2 * randn(50, seed=1), 0.3 + randn(50, seed=2).abs()
        w = torch.as_tensor(scipy.special.wofz(((e + 1j) / (s * math.sqrt(2))).numpy()).real)
        close(ExpectedPenalty(0.7).expected(e, s.square()).value, 0.7 * (1 - math.sqrt(math.pi / 2) / s * w), 1e-12)

    def test_expected_derivatives(self):
        e, v = 2 * randn(50, seed=1), 0.1 + randn(50, seed=2).square()
        _, slope, curvature = ExpectedPenalty(0.7).expected(e, v)
        close(slope, difference(lambda h: ExpectedPenalty(0.7).expected(e + h, v).value), DIFFERENCE)
        numeric = difference(lambda h: ExpectedPenalty(0.7).expected(e, v * (1 + h)).value) / v
        close(curvature, 2 * numeric, DIFFERENCE)

    def test_without_variance_both_agree(self):
        m = 2 * randn(50, seed=1)
        mean, expected = (kind(0.7).expected(m, 0 * m) for kind in PENALTIES.values())
        close(expected.value, mean.value, IDENTITY)
        close(expected.slope, mean.slope, IDENTITY)
        assert float(expected.curvature.min()) < -0.1  # minimum -½ λ at |m| = 1


class TestPacket:
    @pytest.mark.sparse(5)
    @posteriors
    @penalties
    @pytest.mark.parametrize("batch", BATCHES, ids=str)
    def test_value_and_derivative(self, name, penalty, batch):
        """The model's packet plus the penalty's; the derivative is that of the value."""
        model, q = logistic(temperature=0.5), random_posterior(name, batch, seed=1)
        target = Regularized(model, penalty(0.7))
        e, bare = Quadrature()(q, target), Quadrature()(q, model)
        gain, slope, curvature = penalty(0.7).expected(q.mean, q.variance)
        close(e.value - bare.value, gain.sum(-1), EXACT)
        close(e.derivative.g - bare.derivative.raw().g, slope, EXACT)
        close(e.derivative.H - bare.derivative.raw().H, torch.diag_embed(curvature), EXACT)
        a, W = e.derivative.framed(q.frame())
        other = Autograd()(q, target)
        close(other.value, e.value, EXACT)
        close(other.derivative.a, a, IDENTITY)
        close(other.derivative.W, W, IDENTITY)
        assert (e.temperature, e.comparable) == (0.5, True)

    def test_the_log_joint_has_the_penalty(self):
        model, theta = logistic(), randn(4, DIM, seed=3)
        target = Regularized(model, ExpectedPenalty(0.7))
        close(target.log_joint(theta), model.log_joint(theta) - 0.7 * bump(theta).sum(-1), EXACT)

    def test_against_draws(self):
        """Stein's estimate knows only the log joint."""
        target, one = Regularized(logistic(), ExpectedPenalty(2.0)), random_posterior("cholesky", (), seed=1)
        q = CholeskyGaussian(DIM, (3000,), mean=one.mean, scale=one.scale_tril.expand(3000, -1, -1))
        noisy = Stein(Antithetic(4, torch.Generator().manual_seed(1)))(q, target).derivative
        exact = Quadrature()(one, target).derivative.framed(one.frame())
        for estimates, expected in ((noisy.a, exact.a), (noisy.W, exact.W)):
            z = (estimates.mean(0) - expected) / (estimates.std(0) / 3000**0.5)
            assert float(z.abs().max()) < 5

    def test_around_softmax_regression(self):
        model = SoftmaxRegression(randn(12, DIM, seed=1), torch.arange(12.0) % 3)
        target, q = Regularized(model, MeanPenalty()), CholeskyGaussian(2 * DIM, mean=0.3, dtype=DTYPE)
        e = Quadrature()(q, target)
        close(e.value - Quadrature()(q, model).value, bump(q.mean).sum(-1), EXACT)


class TestStationaryPoints:
    """Non-convex: g = 0 and γV⁻¹ = H at the end of every run, and the values reached are few."""

    @pytest.mark.accuracy
    @penalties
    @pytest.mark.parametrize("method", [VN, SRVN])
    def test_several_starts(self, penalty, method):
        target = Regularized(logistic(8, prior_precision=0.05), penalty(3.0))
        values = []
        for seed in range(6):
            q = CholeskyGaussian(DIM, mean=3 * randn(DIM, seed=seed), dtype=DTYPE)
            result = fit(q, target, method(q), progress=False)
            assert result.converged, result
            losses = [record.loss for record in result.trace]
            assert all(b <= a + 1e-10 for a, b in zip(losses, losses[1:], strict=False))
            g, H = Quadrature()(q, target).derivative
            close(g, torch.zeros_like(g), 1e-4)
            close(q.precision, H, 1e-4)
            values.append(round(result.loss, 5))
        assert len(set(values)) <= 3

    def test_two_minima(self):
        """One row far from 0 with a strong regulariser: from 0 and from afar two different ends."""
        model = GeneralizedLinear([[1.0]], torch.tensor([8.0], dtype=DTYPE), "gaussian", prior_precision=0.01)
        target = Regularized(model.to(DTYPE), ExpectedPenalty(30.0))
        ends = []
        for start in (0.0, 10.0):
            q = CholeskyGaussian(1, mean=start, scale=0.1, dtype=DTYPE)
            assert fit(q, target, progress=False).converged
            ends.append(float(q.mean[0]))
        assert abs(ends[0] - ends[1]) > 1.0
