"""Expectations: one-dimensional integrals, likelihoods, estimators, and the models behind them."""

import itertools
import math
import re

import numpy as np
import pytest
import reference
import scipy.sparse
import scipy.special
import torch
from helpers import (
    DIM,
    DTYPE,
    ESTIMATORS,
    EXACT,
    EXCLUDED_STEP_SIZES,
    FAMILIES,
    IDENTITY,
    POSTERIORS,
    ROWS,
    STEP_SIZES,
    TEMPERATURES,
    batches_at,
    close,
    for_each,
    randn,
    random_model,
    random_posterior,
    vec,
)

from torchngvi import VN
from torchngvi.errors import InputError, PairError
from torchngvi.expectations import Antithetic, Autograd, Fixed, Independent, Quadrature, Quasi, Stein
from torchngvi.interfaces import Frame, Framed, Sites
from torchngvi.models import BernoulliLogit, BernoulliProbit, GaussianNoise, GeneralizedLinear, LogJoint, PoissonLog
from torchngvi.models.likelihoods import FAMILIES as NAMED_FAMILIES
from torchngvi.numerics.gaussian_integrals import expectation, softplus

families = pytest.mark.parametrize("family", FAMILIES)

MEANS = [-1000.0, -300.0, -40.0, -10.0, -3.0, -1.0, -0.1, 0.0, 0.1, 1.0, 3.0, 10.0, 40.0, 300.0, 1000.0]
DEVIATIONS = [1e-3, 1e-2, 0.1, 0.3, 1.0, 2.0, 3.0, 10.0, 30.0, 100.0, 1e3, 1e4]


def precisely(function, s):
    return torch.tensor([reference.precise_mean(function, e, s) for e in MEANS], dtype=DTYPE)


class TestSoftplus:
    """What `test_logistic_moments.py` does not ask of its expectations."""

    @pytest.mark.accuracy
    def test_the_reference_has_converged(self):
        """Another number of nodes changes nothing, so that the bound above is not the reference's own."""
        for s in DEVIATIONS:
            for e in MEANS:
                few, many = (reference.precise_mean(lambda x: np.logaddexp(0, x), e, s, n) for n in (20, 32))
                assert abs(few - many) <= 1e-14 * max(1.0, many)

    def test_derivatives_are_those_of_the_value(self):
        """To rounding, so that tests of decrease see one function."""
        e, v = randn(50, seed=1).mul(5).requires_grad_(), randn(50, seed=2).square().mul(9).requires_grad_()
        value, slope, curvature = softplus(e, v)
        by_mean, by_variance = torch.autograd.grad(value.sum(), (e, v))
        close(slope, by_mean, EXACT)
        close(curvature, 2 * by_variance, EXACT)

    def test_shapes_broadcast_over_batches(self):
        e, v = randn(2, 3, 4, seed=1), randn(2, 3, 4, seed=2).square()
        for part, flat in zip(softplus(e, v), softplus(e.flatten(), v.flatten()), strict=True):
            close(part.flatten(), flat, EXACT)


class TestExpectation:
    """Any function that bends near the origin, here -log Φ: relative error 1e-10.

    What lies further out than 8.2 standard deviations is left away by design, hence an absolute
    1e-13: E[-log Φ] is 1e-41 at mean 30 and standard deviation 2, and comes out as 0.
    """

    @staticmethod
    def parts(x):
        ratio = math.sqrt(2 / math.pi) / scipy.special.erfcx(-x / math.sqrt(2))
        return -scipy.special.log_ndtr(x), -ratio, ratio * (ratio + x)

    @staticmethod
    def compare(actual, expected, floor=1e-13):
        assert bool(((actual - expected).abs() <= 1e-10 * expected.abs() + floor).all())

    @pytest.mark.sparse(3)
    @pytest.mark.parametrize("s", DEVIATIONS)
    def test_probit(self, s):
        e, v = vec(*MEANS), torch.full((len(MEANS),), s * s, dtype=DTYPE)
        value, slope, curvature = BernoulliProbit().expected(e, v, torch.ones_like(e))
        self.compare(value, precisely(lambda x: self.parts(x)[0], s))
        self.compare(slope, precisely(lambda x: self.parts(x)[1], s))

        def second(x):  # r (r + x) cancels far to the left: 1 - x⁻² + 6 x⁻⁴ there
            y = np.minimum(x, -1.0)
            return np.where(x < -200, 1 - y**-2.0 + 6 * y**-4.0, self.parts(np.maximum(x, -200.0))[2])

        self.compare(curvature, precisely(second, s))

    def test_polynomials(self):
        """Moments of the normal distribution, also far from the origin."""
        e, v = vec(-50.0, -1.0, 0.0, 2.0, 300.0), vec(4.0, 0.01, 1.0, 100.0, 1e-4)
        value, slope, curvature = expectation(lambda x: (x**2, x**3, x**4), e, v)
        for actual, expected in (
            (value, e**2 + v),
            (slope, e**3 + 3 * e * v),
            (curvature, e**4 + 6 * e**2 * v + 3 * v**2),
        ):
            assert bool(((actual - expected).abs() <= 1e-11 * expected.abs() + 1e-12).all())

    @pytest.mark.parametrize("e", [0.0, 0.7, -3.0, 30.0, -30.0, 123.4])
    @pytest.mark.parametrize("s", [0.0, 1e-14, 1e-8, 1e-5])
    def test_small_variances(self, e, s):
        """A row of zeros with an offset has no variance at all: F is the function itself."""
        mean = vec(e)
        value, slope, curvature = BernoulliProbit().expected(mean, vec(s * s), torch.ones_like(mean))
        expected = self.parts(np.array([e]))
        for actual, x in zip((value, slope, curvature), expected, strict=True):
            assert bool(((actual - float(x[0])).abs() <= 1e-9 * abs(float(x[0])) + 1e-13).all())


@families
class TestLikelihoods:
    """Each family: energy, expected energy, slope and curvature."""

    @staticmethod
    def draw(family, count=40):
        e, v = 1.5 * randn(count, seed=1), 0.05 + randn(count, seed=2).square()
        part = FAMILIES[family]
        return part, part.likelihood(), e, v, part.targets(randn(count, seed=3))

    def test_energy_is_a_density(self, family):
        """Σ or ∫ over y of exp(-energy) is 1."""
        _, likelihood, e, _, _ = self.draw(family, 6)
        if family.startswith("bernoulli"):
            outcomes, weight = vec(-1.0, 1.0), 1.0
        elif family == "poisson_log":
            outcomes, weight = torch.arange(200, dtype=DTYPE), 1.0
        else:
            outcomes, weight = torch.arange(-2000, 2001, dtype=DTYPE) * 0.01, 0.01
        total = weight * torch.exp(-likelihood.energy(e[:, None], outcomes)).sum(-1)
        close(total, torch.ones_like(total), IDENTITY)

    def test_it_is_found_by_its_name(self, family):
        name = family.split("_0")[0]
        assert NAMED_FAMILIES[name] is type(FAMILIES[family].likelihood())


@pytest.mark.parametrize("likelihood", [BernoulliLogit(), BernoulliProbit()], ids=lambda x: type(x).__name__)
def test_exchanging_the_classes_mirrors_the_predictor(likelihood):
    e, v, y = 2 * randn(40, seed=1), randn(40, seed=2).square(), randn(40, seed=3).sign()
    here, there = likelihood.expected(e, v, y), likelihood.expected(-e, v, -y)
    close(here.value, there.value, EXACT)
    close(here.slope, -there.slope, EXACT)
    close(here.curvature, there.curvature, EXACT)


@pytest.mark.parametrize(
    ("name", "family"),
    [*zip(POSTERIORS, itertools.cycle(FAMILIES), strict=False), *(("cholesky", f) for f in FAMILIES)],
)
class TestEstimators:
    """Quadrature and autograd deliver one packet; both belong to the reference's objective."""

    @pytest.mark.sparse(5)
    @batches_at
    @pytest.mark.parametrize("own_design", [False, True])
    def test_value_and_derivative(self, name, family, batch, gamma, own_design):
        q = random_posterior(name, batch, seed=1)
        model = random_model(family, batch, 3, gamma, own_design)
        e = Quadrature()(q, model.target)
        moments = q.mean, q.covariance, model.problems
        close(e.value, for_each(lambda m, V, p: p.expected_energy(m, V), batch, *moments), IDENTITY)
        root = q.frame().dense()
        g, H = (for_each(lambda m, V, p, i=i: p.derivative(m, V)[i], batch, *moments) for i in (0, 1))
        a, W = e.derivative.framed(q.frame())
        close(a, (root.mT @ g[..., None])[..., 0], IDENTITY)
        close(W, q.structure.from_dense(root.mT @ H @ root), IDENTITY)
        assert (e.temperature, e.comparable) == (gamma, True)

    @pytest.mark.sparse(5)
    @batches_at
    @pytest.mark.parametrize("own_design", [False, True])
    def test_autograd_equals_quadrature(self, name, family, batch, gamma, own_design):
        q = random_posterior(name, batch, seed=1)
        model = random_model(family, batch, 3, gamma, own_design)
        exact, other = Quadrature()(q, model.target), Autograd()(q, model.target)
        close(other.value, exact.value, EXACT)
        framed = exact.derivative.framed(q.frame())
        # the trapezoid rule of the probit: its own derivative differs by the rule's error
        tolerance = 1e-11 if family == "bernoulli_probit" else EXACT
        close(other.derivative.a, framed.a, tolerance)
        close(other.derivative.W, framed.W, tolerance)
        assert (other.temperature, other.comparable) == (gamma, True)
        assert not other.value.requires_grad
        assert q.mean_probe.grad is None

    @pytest.mark.sparse(5)
    @batches_at
    def test_negative_elbo(self, name, family, batch, gamma):
        """L with all constants, and its gradient in the probes: a and P."""
        q, model = random_posterior(name, batch, seed=1), random_model(family, batch, 3, gamma)
        loss = model.target.negative_elbo(q)
        close(loss, for_each(lambda m, V, p: p.loss(m, V), batch, q.mean, q.covariance, model.problems), IDENTITY)
        loss.sum().backward()
        local = q.local(Quadrature()(q, model.target))
        close(q.mean_probe.grad, local.a, IDENTITY)
        close(q.root_probe.grad, local.P, IDENTITY)


class TestStein:
    """Gradients at draws: unbiased, and free of noise where theory says so."""

    @pytest.mark.parametrize(
        ("draws", "count", "rule"),
        [
            (lambda count: count, 3, "must be even, since the draws come in antithetic pairs"),
            (lambda count: count, 0, "must be even, since the draws come in antithetic pairs"),
            (Antithetic, -2, "must be even, since the draws come in antithetic pairs"),
            (Fixed, 3, "must be even, since the draws come in antithetic pairs"),
            (Independent, 0, "counts draws and must be a whole number, at least 1"),
            (Quasi, 0, "counts draws and must be a whole number, at least 1"),
        ],
    )
    def test_number_of_samples(self, draws, count, rule):
        with pytest.raises(InputError, match=f"^{re.escape(f'num_samples {rule}; got {count}.')}$"):
            Stein(draws(count))
        assert Stein(Independent(1)).draws.num_samples == 1


class TestPairs:
    @pytest.mark.parametrize("estimator", ESTIMATORS)
    @pytest.mark.parametrize("control", STEP_SIZES)
    def test_exactly_the_listed_pairs(self, estimator, control):
        q = POSTERIORS["cholesky"](DIM)
        if (estimator, control) in EXCLUDED_STEP_SIZES:
            kind = ESTIMATORS[estimator].__name__
            text = (
                f"SufficientDecrease compares the objective before and after a step, and {kind} gives noisy values. "
                "Pass a learning rate, for example lr=0.1, or step_size=KLRadius(0.1)."
            )
            with pytest.raises(PairError, match=f"^{re.escape(text)}$"):
                VN(q, step_size=STEP_SIZES[control](), estimator=ESTIMATORS[estimator]())
        else:
            VN(q, step_size=STEP_SIZES[control](), estimator=ESTIMATORS[estimator]())


class TestGeneralizedLinear:
    """The log joint, and bounds on its curvature."""

    @pytest.mark.sparse(7)
    @families
    @batches_at
    @pytest.mark.parametrize("own_design", [False, True])
    def test_log_joint(self, family, batch, gamma, own_design):
        """Σ w log p(y|θ) + γ log p(θ) at draws, samples on the left of the batch."""
        model = random_model(family, batch, 3, gamma, own_design)
        theta = randn(DIM, *batch, DIM, seed=4)

        def one(theta, p):
            data = (p.weights * p.energy(p.X @ theta + p.offset, p.y)).sum()
            prior = torch.distributions.Normal(p.prior_mean, p.prior_precision**-0.5).log_prob(theta).sum()
            return -data + p.temperature * prior

        expected = torch.stack([for_each(one, batch, sample, model.problems) for sample in theta])
        close(model.target.log_joint(theta), expected, EXACT)

    @batches_at
    def test_bounds_on_the_curvature(self, batch, gamma):
        """γβI ≤ H ≤ (λ_max(XᵀX)/4 + γβ) I for logistic regression, near and far."""
        X, beta = randn(20, DIM, seed=1), 0.3
        y = FAMILIES["bernoulli_logit"].targets(randn(20, seed=2))
        model = GeneralizedLinear(X, y, prior_precision=beta, temperature=gamma)
        beta = float(model.prior.precision[0])
        top = float(torch.linalg.eigvalsh(X.mT @ X)[-1]) / 4 + gamma * beta
        for scale in (1e-3, 1.0, 100.0):
            q = random_posterior("cholesky", batch, seed=3)
            q.initialize_(3 * q.mean, scale * q.scale_tril)
            eigenvalues = torch.linalg.eigvalsh(Quadrature()(q, model).derivative.raw().H)
            assert float(eigenvalues.min()) >= gamma * beta * (1 - EXACT)
            assert float(eigenvalues.max()) <= top * (1 + EXACT)

    def test_the_upper_bound_is_sharp(self):
        """At zero mean and small variance every β_n is ¼."""
        X = randn(20, DIM, seed=1)
        model = GeneralizedLinear(X, FAMILIES["bernoulli_logit"].targets(randn(20, seed=2)), prior_precision=0.25)
        q = POSTERIORS["cholesky"](DIM, scale=1e-6, dtype=DTYPE)
        H = Quadrature()(q, model).derivative.raw().H
        close(H, X.mT @ X / 4 + 0.25 * torch.eye(DIM, dtype=DTYPE), IDENTITY)

    def test_attributes(self):
        model = random_model("gaussian").target
        assert (model.dim, model.num_data, model.temperature) == (DIM, ROWS, 1.0)
        assert {id(x) for x in model.tensors()} == {
            id(x) for x in (model.X, model.y, model.weights, model.offset, *model.prior)
        }

    def test_to(self):
        """Another dtype, a new model, the prior and the temperature with it."""
        model = random_model("bernoulli_logit", (), 3, 0.5).target
        other = model.to(torch.float32)
        assert model.X.dtype is DTYPE
        assert all(x.dtype is torch.float32 for x in other.tensors())
        q, p = random_posterior("cholesky"), random_posterior("cholesky").float()
        close(other.negative_elbo(p).double(), model.negative_elbo(q), 1e-5)
        g, H = Quadrature()(p, other).derivative.raw()
        exact = Quadrature()(q, model).derivative.raw()
        close(g.double(), exact.g, 1e-5)
        close(H.double(), exact.H, 1e-5)

    def test_numbers_keep_their_precision(self):
        """0.1 with a float64 design is 0.1, not float32's neighbour of it."""
        X = torch.eye(2, dtype=DTYPE)
        model = GeneralizedLinear(X, [0.1, 0.3], "gaussian", prior_precision=0.1, prior_mean=0.7, weights=[0.1, 0.2])
        assert model.prior.precision.tolist() == [0.1, 0.1]
        assert model.prior.mean.tolist() == [0.7, 0.7]
        assert model.y.tolist() == [0.1, 0.3]
        assert model.weights.tolist() == [0.1, 0.2]

    def test_one_prior_precision_each(self):
        X, y = randn(ROWS, DIM, seed=1), randn(ROWS, seed=2)
        one, each = (GeneralizedLinear(X, y, "gaussian", prior_precision=p) for p in (2.0, torch.full((DIM,), 2.0)))
        row = GeneralizedLinear(X, y, "gaussian", prior_precision=torch.tensor([2.0]), prior_mean=torch.tensor([0.0]))
        q = random_posterior("natural", (2, 3))
        for other in (each, row):
            close(other.negative_elbo(q), one.negative_elbo(q), EXACT)
            close(Quadrature()(q, other).derivative.raw().H, Quadrature()(q, one).derivative.raw().H, EXACT)

    X, y = torch.ones(5, 2), torch.arange(5.0)

    def test_integers_become_floats(self):
        model = GeneralizedLinear([[1, 2], [3, 4]], [0, 1], "poisson_log")
        assert model.X.dtype is model.y.dtype is torch.get_default_dtype()

    def test_families_by_name_or_instance(self):
        assert isinstance(GeneralizedLinear(self.X, self.y, "poisson_log").likelihood, PoissonLog)
        noise = GaussianNoise(0.5)
        assert GeneralizedLinear(self.X, self.y, noise).likelihood is noise


class TestLogJoint:
    @pytest.mark.parametrize("gamma", TEMPERATURES)
    def test_it_carries_the_temperature(self, gamma):
        target = LogJoint(lambda theta: -theta.square().sum(-1), temperature=gamma)
        e = Stein(2)(POSTERIORS["diagonal"](2), target)
        assert e.temperature == target.temperature == gamma
        assert target.tensors() == ()


def test_packets_are_what_they_say():
    """Quadrature sends sites, the others framed gradients; a frame reads only mean and root."""
    q, model = random_posterior("natural"), random_model("gaussian").target
    assert isinstance(Quadrature()(q, model).derivative, Sites)
    assert isinstance(Autograd()(q, model).derivative, Framed)
    assert isinstance(Stein(2)(q, model).derivative, Framed)
    C = q.scale_tril
    value, sites = model.expected_energy(Frame(q.mean, C, q.structure))
    close(value, Quadrature()(q, model).value, IDENTITY)
    close(sites.raw().H, Quadrature()(q, model).derivative.raw().H, IDENTITY)
