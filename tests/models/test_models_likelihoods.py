"""Student-t and negative binomial likelihoods, and how accurate every quadrature is."""

import math

import numpy as np
import pytest
import reference
import scipy.special
import scipy.stats
import torch
from helpers import DTYPE, EXACT, close, randn

from torchngvi import VN, CholeskyGaussian, GeneralizedLinear, fit
from torchngvi.diagnostics import predictive_mean
from torchngvi.errors import InputError
from torchngvi.expectations import Autograd, Quadrature
from torchngvi.models import BernoulliLogit, BernoulliProbit, GaussianNoise, NegativeBinomial, PoissonLog, StudentT
from torchngvi.numerics.gaussian_integrals import log1p_square, saturating_square, softplus

MEANS = [-1000.0, -40.0, -3.0, -1.0, -0.1, 0.0, 0.3, 2.0, 10.0, 300.0]
DEVIATIONS = [1e-3, 1e-2, 0.1, 0.5, 1.0, 3.0, 10.0, 100.0, 1e3, 1e4]

LIKELIHOODS = {
    "student_t": StudentT(1.0, dof=4.0),
    "cauchy": StudentT(0.5, dof=1.0),
    "nearly_gaussian": StudentT(2.0, dof=200.0),
    "negative_binomial": NegativeBinomial(3.0),
    "overdispersed": NegativeBinomial(0.4),
}
likelihoods = pytest.mark.parametrize("likelihood", LIKELIHOODS.values(), ids=LIKELIHOODS)


def targets(likelihood, count, seed=3):
    x = randn(count, seed=seed)
    return (3 * x.abs()).round() if isinstance(likelihood, NegativeBinomial) else 2 * x


def logistic_curvature(x):
    return scipy.special.expit(x) * scipy.special.expit(-x)


def probit_parts():
    def ratio(x):
        return math.sqrt(2 / math.pi) / scipy.special.erfcx(-x / math.sqrt(2))

    def second(x):  # r (r + x) cancels far to the left
        y = np.minimum(x, -1.0)
        near = np.maximum(x, -200.0)
        return np.where(x < -200, 1 - y**-2.0 + 6 * y**-4.0, ratio(near) * (ratio(near) + near))

    return (lambda x: -scipy.special.log_ndtr(x), lambda x: -ratio(x), second)


def t_parts(dof):
    """½(ν + 1) log(1 + x²) and derivatives, x the residual over σ√ν."""
    k = 0.5 * (dof + 1)
    return (
        lambda x: k * np.log1p(x * x),
        lambda x: 2 * k * x / (1 + x * x),
        lambda x: 2 * k * (1 - x * x) / (1 + x * x) ** 2,
    )


def count_parts(y, r):
    """y softplus(-δ) + r softplus(δ) and derivatives."""
    return (
        lambda x: y * np.logaddexp(0, -x) + r * np.logaddexp(0, x),
        lambda x: r * scipy.special.expit(x) - y * scipy.special.expit(-x),
        lambda x: (y + r) * logistic_curvature(x),
    )


SOFTPLUS = (lambda x: np.logaddexp(0, x), scipy.special.expit, logistic_curvature)
SQUARE = t_parts(1.0)
SATURATING = (
    lambda x: x * x / (1 + x * x),
    lambda x: 2 * x / (1 + x * x) ** 2,
    lambda x: (2 - 6 * x * x) / (1 + x * x) ** 3,
)


def probit(mean, variance):
    return BernoulliProbit().expected(mean, variance, torch.ones_like(mean))


def student_t(scale, dof):
    """Its moments in units of x = (η - y)/(σ√ν), without the constant."""

    def moments(mean, variance):
        likelihood, width, y = StudentT(scale, dof), scale * math.sqrt(dof), 0.7
        value, slope, curvature = likelihood.expected(y + width * mean, width**2 * variance, torch.full_like(mean, y))
        constant = likelihood.energy(torch.zeros(1, dtype=DTYPE), torch.zeros(1, dtype=DTYPE))
        return value - constant, width * slope, width**2 * curvature

    return moments


def negative_binomial(y, r):
    """Its moments in δ = η - log r, without the constant."""

    def moments(mean, variance):
        likelihood, count = NegativeBinomial(r), torch.full_like(mean, y)
        value, slope, curvature = likelihood.expected(mean + math.log(r), variance, count)
        zero = torch.zeros(1, dtype=DTYPE)
        constant = likelihood.energy(zero + math.log(r), zero + y) - (y + r) * math.log(2)
        return value - constant, slope, curvature

    return moments


ACCURACY = {
    "softplus": (softplus, SOFTPLUS),
    "probit": (probit, probit_parts()),
    "log1p_square": (log1p_square, SQUARE),
    "saturating_square": (saturating_square, SATURATING),
    "student_t": (student_t(1.3, 4.0), t_parts(4.0)),
    "student_t_narrow": (student_t(0.1, 1.0), t_parts(1.0)),
    "student_t_many": (student_t(2.0, 500.0), t_parts(500.0)),
    "negative_binomial": (negative_binomial(7.0, 3.0), count_parts(7.0, 3.0)),
    "negative_binomial_rare": (negative_binomial(0.0, 0.2), count_parts(0.0, 0.2)),
    "negative_binomial_large": (negative_binomial(1e4, 30.0), count_parts(1e4, 30.0)),
}


@pytest.mark.sparse(7)
@pytest.mark.parametrize("name", ACCURACY)
@pytest.mark.parametrize("s", DEVIATIONS)
def test_accuracy(name, s):
    """Value, slope and curvature to 1e-10, absolute below 1 and relative above, s from 1e-3 to 1e4."""
    moments, parts = ACCURACY[name]
    e = torch.tensor(MEANS, dtype=DTYPE)
    for actual, function in zip(moments(e, torch.full_like(e, s * s)), parts, strict=True):
        expected = torch.tensor([reference.precise_mean(function, x, s) for x in MEANS], dtype=DTYPE)
        error = (actual - expected).abs() / expected.abs().clamp_min(1.0)
        assert float(error.max()) <= 1e-10


@pytest.mark.parametrize("power", [log1p_square, saturating_square])
@pytest.mark.parametrize("e", [0.0, 1e-6, 0.3, 5.0, 1e5])
def test_no_variance_is_the_function_itself(power, e):
    """And small arguments are not lost in 1 - 1."""
    value, slope, curvature = power(torch.tensor([e], dtype=DTYPE), torch.zeros(1, dtype=DTYPE))
    parts = SQUARE if power is log1p_square else SATURATING
    for actual, part in zip((value, slope), parts, strict=False):
        assert float(actual) == pytest.approx(part(e), rel=1e-11, abs=1e-300)
    assert float(curvature) == pytest.approx(parts[2](e), rel=1e-10, abs=1e-13)


def test_faddeeva():
    """E[x²/(1 + x²)] = 1 - √(π/2)/s Re w((e + i)/(s√2)), where that does not cancel."""
    e, s = 2 * randn(50, seed=1), 0.3 + randn(50, seed=2).abs()
    w = scipy.special.wofz(((e + 1j) / (s * math.sqrt(2))).numpy()).real
    expected = 1 - math.sqrt(math.pi / 2) / s * torch.as_tensor(w)
    close(saturating_square(e, s.square()).value, expected, 1e-12)


@pytest.mark.parametrize("function", [softplus, log1p_square, saturating_square])
@pytest.mark.parametrize("count", [1, 511, 512, 513, 5000])
def test_blocks_of_rows_leave_no_seam(function, count):
    """The value of a row does not depend on its neighbours, whatever the blocks on the CPU."""
    e, v = randn(count, seed=1), randn(count, seed=2).square()
    whole = function(e, v)
    for part, last in zip(whole, function(e[-1:], v[-1:]), strict=True):
        assert part.shape == (count,)
        close(part[-1:], last, EXACT)
    for part, batched in zip(whole, function(e.expand(2, 1, count), v.expand(2, 1, count)), strict=True):
        close(batched, part.expand(2, 1, count).contiguous(), EXACT)


@likelihoods
class TestLikelihood:
    @staticmethod
    def draw(likelihood, count=60):
        return 1.5 * randn(count, seed=1), 0.05 + randn(count, seed=2).square(), targets(likelihood, count)

    def test_energy_is_scipys(self, likelihood):
        eta, _, y = self.draw(likelihood)
        if isinstance(likelihood, StudentT):
            expected = -scipy.stats.t.logpdf(y.numpy(), likelihood.dof, eta.numpy(), likelihood.scale)
        else:
            r = likelihood.dispersion
            expected = -scipy.stats.nbinom.logpmf(y.numpy(), r, r / (r + eta.exp().numpy()))
        close(likelihood.energy(eta, y), torch.as_tensor(expected), 1e-11)

    @pytest.mark.sparse(3)
    @pytest.mark.parametrize("batch", [(), (2,), (3,)])
    def test_in_a_model(self, likelihood, batch):
        """Quadrature and autograd give one packet, and a fit without a learning rate converges."""
        X, y = randn(20, 3, seed=5), targets(likelihood, 20 * max(1, math.prod(batch))).reshape(*batch, 20)
        model = GeneralizedLinear(X, y, likelihood)
        q = CholeskyGaussian(3, batch, dtype=DTYPE)
        exact, other = Quadrature()(q, model), Autograd()(q, model)
        a, W = exact.derivative.framed(q.frame())
        close(other.derivative.a, a, EXACT)
        close(other.derivative.W, W, EXACT)
        assert exact.comparable
        result = fit(q, model, progress=False)
        assert result.converged, result
        # γ V⁻¹ = H at the optimum
        close(q.precision, Quadrature()(q, model).derivative.raw().H, 1e-4)


def test_an_outlier_has_a_negative_curvature():
    """Not log-concave: |residual| > σ√ν, and H is indefinite without much prior."""
    y = torch.tensor([50.0], dtype=DTYPE)
    _, _, curvature = StudentT(1.0, dof=2.0).expected(torch.zeros_like(y), torch.ones_like(y), y)
    assert float(curvature) < 0
    model = GeneralizedLinear([[1.0], [1.0], [1.0]], [30.0, 40.0, 50.0], StudentT(1.0, dof=2.0), prior_precision=1e-4)
    q = CholeskyGaussian(1)
    assert float(Quadrature()(q, model).derivative.raw().H) < 0
    assert fit(q, model, VN(q), progress=False).converged  # steps found by trial cope


def test_limits():
    """Many degrees of freedom are Gaussian noise; a large dispersion is Poisson."""
    e, v = randn(20, seed=1), randn(20, seed=2).square()
    y = targets(LIKELIHOODS["student_t"], 20)
    close(StudentT(0.7, 1e8).expected(e, v, y).slope, GaussianNoise(0.7).expected(e, v, y).slope, 1e-5)
    close(StudentT(0.7, 1e8).expected(e, v, y).curvature, GaussianNoise(0.7).expected(e, v, y).curvature, 1e-5)
    counts = targets(LIKELIHOODS["negative_binomial"], 20)
    for actual, expected in zip(
        NegativeBinomial(1e8).expected(e, v, counts), PoissonLog().expected(e, v, counts), strict=True
    ):
        close(actual, expected, 1e-5)


def test_one_trial_is_logistic_regression():
    """r = 1 and counts 0 and 1: y softplus(-η) + softplus(η) beside the logistic likelihood's one of the two."""
    e, v = randn(20, seed=1), randn(20, seed=2).square()
    zero = torch.zeros_like(e)
    close(NegativeBinomial(1.0).expected(e, v, zero).value, BernoulliLogit().expected(e, v, zero - 1).value, EXACT)


def test_means_of_new_targets():
    X = torch.ones(2, 1, dtype=DTYPE)
    q = CholeskyGaussian(1, mean=0.3, scale=0.5, dtype=DTYPE)
    counts = GeneralizedLinear(X, [0.0, 2.0], NegativeBinomial(2.0))
    close(predictive_mean(counts, q, X), torch.full((2,), math.exp(0.3 + 0.125), dtype=DTYPE), EXACT)
    close(predictive_mean(GeneralizedLinear(X, [0.0, 2.0], StudentT(1.0, 3.0)), q, X), 0.3 * X[:, 0], EXACT)
    with pytest.raises(InputError, match=r"^the mean of y is known for the families of this library; got StudentT\."):
        predictive_mean(GeneralizedLinear(X, [0.0, 2.0], StudentT(1.0, 1.0)), q, X)


@pytest.mark.parametrize("x", [-1e4, -1e3, -60.0, -50.5, -49.5, -10.0, 0.0, 40.0])
def test_the_curvature_of_a_probit_at_a_point(x):
    """By torch's derivatives of the energy, as Newton's method for the mode takes it: r (r + x)."""
    X, y = torch.tensor([[1.0], [0.0]], dtype=DTYPE), torch.tensor([1.0, 0.0], dtype=DTYPE)
    model = GeneralizedLinear(X, y, "bernoulli_probit", prior_precision=1e-12)
    _, (slope, curvature) = model.second_order(torch.tensor([x], dtype=DTYPE))
    parts = probit_parts()
    energy = BernoulliProbit().energy(torch.tensor([x], dtype=DTYPE), torch.ones(1, dtype=DTYPE))
    assert float(energy) == pytest.approx(parts[0](x), rel=1e-12)
    assert float(slope) == pytest.approx(float(parts[1](np.array([x]))[0]), rel=1e-6, abs=1e-7)
    assert float(curvature) == pytest.approx(float(parts[2](np.array([x]))[0]), rel=1e-6, abs=1e-10)
