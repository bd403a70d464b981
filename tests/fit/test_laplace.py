"""Laplace's approximation: modes, curvatures, repairs, and the Newton limit of VN."""

import math

import pytest
import torch
from helpers import (
    DIM,
    DTYPE,
    EXACT,
    FAMILIES,
    IDENTITY,
    POSTERIORS,
    close,
    every,
    framed_packet,
    kept,
    posteriors,
    randn,
    random_model,
    random_posterior,
    step,
)

from torchngvi import (
    VN,
    CholeskyGaussian,
    DiagonalGaussian,
    GeneralizedLinear,
    LogJoint,
    NaturalGaussian,
    PrecisionCholeskyGaussian,
    laplace,
)
from torchngvi.expectations import Quadrature
from torchngvi.interfaces import Raw
from torchngvi.models import GaussianNoise, TractableFactors
from torchngvi.rules import NaturalGradient, VariationalNewton
from torchngvi.structures import arrow


def derivatives(target, theta):
    """∇ℓ and ∇²ℓ of one member by autograd of its own."""

    def energy(x):
        return -target.log_joint(x[None])[0]

    return torch.func.grad(energy)(theta), torch.autograd.functional.hessian(energy, theta)


@pytest.mark.sparse(5)
@posteriors
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_mode_and_curvature(name, family, gamma):
    """∇ℓ = 0 and γ V⁻¹ = ∇²ℓ, its diagonal for a diagonal q, from a start far away."""
    model = random_model(family, (), 51, gamma).target
    q = POSTERIORS[name](DIM, mean=3 * randn(DIM, seed=3), scale=7.0)
    result = laplace(q, model)
    g, H = derivatives(model, q.mean.detach())
    assert bool(result.converged)
    assert result.iterations < 30
    assert int(result.repaired) == 0
    close(q.mean.detach(), result.mode, IDENTITY)
    close(g, torch.zeros_like(g), 1e-8)
    H = kept(name, H)
    close(gamma * torch.linalg.inv(q.covariance), H, 1e-7)
    close(result.smallest, torch.linalg.eigvalsh(derivatives(model, result.mode)[1])[0], 1e-7)


@posteriors
def test_a_batch_is_its_members(name):
    model = random_model("bernoulli_logit", (5,), 53).target
    q = random_posterior(name, (5,), seed=2)
    alone = [POSTERIORS[name](DIM, mean=q.mean[i].clone(), scale=q.scale_tril[i].clone()) for i in range(5)]
    result = laplace(q, model)
    assert result.converged.tolist() == [True] * 5
    for i, p in enumerate(alone):
        member = GeneralizedLinear(
            model.X,
            model.y[i],
            model.likelihood,
            prior_precision=model.prior.precision,
            prior_mean=model.prior.mean,
            weights=model.weights[i],
            offset=model.offset[i],
        )
        laplace(p, member)
        close(p.mean.detach(), q.mean[i].detach(), IDENTITY)
        close(p.covariance, q.covariance[i], IDENTITY)


@posteriors
def test_quadratics_take_one_step(name):
    """And the approximation is exact for a full q."""
    X, y = randn(7, DIM, seed=2), randn(7, seed=3)
    model = GeneralizedLinear(X, y, GaussianNoise(0.4), prior_precision=0.3)
    q = random_posterior(name, seed=1)
    assert laplace(q, model).iterations == 1
    A = X.mT @ X / 0.16 + 0.3 * torch.eye(DIM, dtype=DTYPE)
    close(q.mean.detach(), torch.linalg.solve(A, X.mT @ y / 0.16), IDENTITY)
    close(torch.linalg.inv(q.covariance), kept(name, A), IDENTITY)


def test_it_is_a_start_for_vn():
    """Nearer than the default start, in the same basin."""
    model = random_model("bernoulli_logit", (), 55).target
    starts = []
    for initialise in (False, True):
        q = CholeskyGaussian(DIM, dtype=DTYPE)
        if initialise:
            laplace(q, model)
        starts.append(float(VN(q).evaluate(model).norm2))
    assert starts[1] < 0.1 * starts[0]


@pytest.mark.filterwarnings("ignore:where Newton.s method ended the log joint has no maximum")
class TestRepair:
    """Where the Hessian is indefinite, singular, or not to be had."""

    @staticmethod
    def saddle(theta):
        """log joint of x²/2 - cos y: a saddle at (0, π), minima of ℓ at (0, 2πk)."""
        return -(0.5 * theta[..., 0] ** 2 - torch.cos(theta[..., 1]))

    def test_negative_curvature_on_the_way(self):
        """Newton without the repair would go to the maximum at y = π."""
        q = CholeskyGaussian(2, mean=torch.tensor([1.0, 2.5], dtype=DTYPE))
        result = laplace(q, self.saddle)
        assert bool(result.converged)
        assert int(result.repaired) == 0
        assert abs(math.cos(float(q.mean[1])) - 1) < EXACT
        close(q.covariance, torch.eye(2, dtype=DTYPE), 1e-7)

    def test_at_a_saddle_it_is_reported(self):
        """The gradient vanishes there: H = diag(1, -1) becomes I."""
        q = CholeskyGaussian(2, mean=torch.tensor([0.0, math.pi], dtype=DTYPE))
        result = laplace(q, self.saddle)
        assert int(result.repaired) == 1
        close(result.smallest, torch.tensor(-1.0, dtype=DTYPE), IDENTITY)
        close(q.covariance, torch.eye(2, dtype=DTYPE), IDENTITY)

    @posteriors
    def test_flat_directions(self, name):
        """No curvature at all in the last coordinate: a finite, very wide V."""
        q = POSTERIORS[name](2, dtype=DTYPE)
        result = laplace(q, lambda theta: -((theta[..., 0] - 1) ** 2))
        assert bool(result.converged)
        assert int(result.repaired) == 1
        assert float(result.smallest) == 0
        close(q.variance[0], torch.tensor(0.5, dtype=DTYPE), 1e-8)
        assert 1e8 < float(q.variance[1]) < math.inf

    def test_linear(self):
        """Unbounded and without curvature: no convergence, no exception."""
        q = CholeskyGaussian(2, dtype=DTYPE)
        result = laplace(q, lambda theta: theta.sum(-1), max_iterations=3)
        assert not bool(result.converged)
        assert int(result.repaired) == 2

    def test_overflow_on_the_way_is_backtracked(self):
        """A full step of Newton on cosh(5x) from 3 is short, on log cosh from 3 it overshoots."""
        q = CholeskyGaussian(1, mean=3.0, dtype=DTYPE)
        result = laplace(q, lambda theta: -(theta.cosh().log() + 0.01 * theta**2).sum(-1))
        assert bool(result.converged)
        close(q.mean.detach(), torch.zeros(1, dtype=DTYPE), 1e-8)
        assert result.iterations < 20

    def test_nowhere_to_go(self):
        """Not finite but at the start: no step is taken, and none is tried again."""
        q = CholeskyGaussian(1, mean=1.0, dtype=DTYPE)
        result = laplace(q, lambda theta: torch.where(theta == 1, -theta.square(), -torch.inf).sum(-1))
        assert result.iterations == 0
        assert not bool(result.converged)

    def test_a_budget(self):
        q = CholeskyGaussian(1, mean=30.0, dtype=DTYPE)
        result = laplace(q, lambda theta: -theta.cosh().sum(-1), max_iterations=2)
        assert result.iterations == 2
        assert not bool(result.converged)
        close(q.mean.detach(), torch.full((1,), 28.0, dtype=DTYPE), 1e-10)  # steps of tanh = 1


class TestNewtonLimit:
    """VN with values at m in the place of expectations, ρ = 1/γ, is Newton's method."""

    @pytest.mark.parametrize("kind", [CholeskyGaussian, NaturalGaussian])
    @pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
    def test_one_step(self, kind, gamma):
        """m' = m - H⁻¹∇ℓ(m), S' = H/γ, whatever V was."""
        model = random_model("bernoulli_logit", (), 57, gamma).target
        m = randn(DIM, seed=3)
        g, H = derivatives(model, m)
        q = kind(DIM, mean=m, scale=0.7)
        e = framed_packet(torch.zeros(DIM, dtype=DTYPE), torch.eye(DIM), gamma)._replace(derivative=Raw(g, H))
        rule = NaturalGradient() if kind is NaturalGaussian else VariationalNewton()
        mean, covariance = step(q, rule(q, e).at(every(1 / gamma, ())))
        close(mean, m - torch.linalg.solve(H, g), IDENTITY)
        close(covariance, gamma * torch.linalg.inv(H), IDENTITY)

    def test_narrow_posteriors(self):
        """VN's step from N(m, s²I) tends to Newton's as s → 0, at the rate s²."""
        model = random_model("bernoulli_logit", (), 57).target
        m = randn(DIM, seed=3)
        g, H = derivatives(model, m)
        errors = []
        for s in (1e-1, 1e-2, 1e-3):
            q = CholeskyGaussian(DIM, mean=m, scale=s)
            mean = step(q, VariationalNewton()(q, Quadrature()(q, model)).at(every(1.0, ())))[0]
            errors.append(float((mean - (m - torch.linalg.solve(H, g))).norm()))
        assert errors[0] < 0.05
        for wide, narrow in zip(errors, errors[1:], strict=False):
            assert 0.005 < narrow / wide < 0.02, errors

    def test_laplace_takes_the_same_steps(self):
        """As long as a full step is accepted and H is definite."""
        model = random_model("bernoulli_logit", (), 57).target
        m = torch.zeros(DIM, dtype=DTYPE)
        for count in (1, 2, 3):
            q = CholeskyGaussian(DIM, dtype=DTYPE)
            laplace(q, LogJoint(model.log_joint), max_iterations=count)
            g, H = derivatives(model, m)
            m = m - torch.linalg.solve(H, g)
            close(q.mean.detach(), m, IDENTITY)


class TestConvexModelsOfOtherShapes:
    """ℓ to second order comes in the storage of the model; q may have another."""

    @pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
    def test_sparse_rows_of_a_batch(self):
        generator = torch.Generator().manual_seed(0)
        X = torch.randn(30, 4, generator=generator, dtype=torch.float64)
        y = torch.randn(30, generator=generator, dtype=torch.float64).gt(0).double()
        precision = torch.rand(3, 4, generator=generator, dtype=torch.float64) + 0.1
        found = []
        for rows in (X, X.to_sparse_csr()):
            q = CholeskyGaussian(4, (3,), dtype=torch.float64)
            found.append((laplace(q, GeneralizedLinear(rows, y, prior_precision=precision)).mode, q.covariance))
        torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)

    @pytest.mark.parametrize("kind", [CholeskyGaussian, PrecisionCholeskyGaussian, DiagonalGaussian])
    def test_factors_under_a_q_without_their_forest(self, kind):
        forest, generator = arrow(groups=6, local=2, globals=1), torch.Generator().manual_seed(0)
        X = torch.randn(6, 8, 3, generator=generator, dtype=torch.float64)
        y = torch.randn(6, 8, generator=generator, dtype=torch.float64).exp().round()
        target = TractableFactors(forest, [(0, GeneralizedLinear(X, y, "poisson_log"))])
        own, q = PrecisionCholeskyGaussian(13, structure=forest, dtype=torch.float64), kind(13, dtype=torch.float64)
        torch.testing.assert_close(laplace(q, target).mode, laplace(own, target).mode, rtol=1e-9, atol=1e-11)
        wanted = own.covariance
        if kind is DiagonalGaussian:
            wanted = own.covariance.inverse().diagonal().reciprocal().diag()
        torch.testing.assert_close(q.covariance, wanted, rtol=1e-9, atol=1e-11)
