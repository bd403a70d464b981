"""Natural-gradient flows: one path in three coordinates, closed forms, refusals."""

import pytest
import reference
import torch
from helpers import DIM, DTYPE, POSTERIORS, close, randn, random_model, random_posterior, random_root, random_symmetric

from torchngvi import CholeskyGaussian, GeneralizedLinear, Quadrature
from torchngvi.adapters.flows import natural_gradient_flow
from torchngvi.models import GaussianNoise

COORDINATES = ["covariance", "root", "precision"]
coordinates = pytest.mark.parametrize("coordinates", COORDINATES)
FULL = {"cholesky", "natural", "precision"}
TIMES = [0.0, 0.3, 1.0, 2.5]


def quadratic(seed, dim=DIM):
    """A model with ℓ = ½(θ - μ)ᵀA(θ - μ) + const, and A, μ."""
    A, mu = random_symmetric((), seed) if dim == DIM else torch.eye(dim, dtype=DTYPE), randn(dim, seed=seed + 1)
    X = torch.linalg.cholesky(A - 0.1 * torch.eye(dim, dtype=DTYPE)).mT
    b = torch.linalg.solve(X.mT, A @ mu)
    return GeneralizedLinear(X, b, GaussianNoise(1.0), prior_precision=0.1), A, mu


@coordinates
def test_quadratics_have_a_closed_form(coordinates):
    """S_t = A + e⁻ᵗ(S_0 - A), S_t(m_t - μ) = e⁻ᵗ S_0(m_0 - μ)."""
    model, A, mu = quadratic(3)
    q = random_posterior("cholesky", seed=1)
    S, m = torch.linalg.inv(q.covariance), q.mean.clone()
    flow = natural_gradient_flow(q, model, TIMES, coordinates, rtol=1e-12, atol=1e-13)
    for i, t in enumerate(TIMES):
        decay = torch.exp(torch.tensor(-t, dtype=DTYPE))
        St = A + decay * (S - A)
        close(torch.linalg.inv(flow.covariance[i]), St, 1e-10)
        close(flow.mean[i], mu + torch.linalg.solve(St, decay * S @ (m - mu)), 1e-10)
    assert flow.evaluations > 10


@pytest.mark.accuracy
@pytest.mark.parametrize("family", ["bernoulli_logit", "poisson_log"])
@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_one_path_in_three_coordinates(family, gamma):
    """Natural-gradient flows do not depend on coordinates (Kumar et al., Eqs 9 and 15)."""
    model = random_model(family, (), 61, gamma)
    q = random_posterior("cholesky", seed=1)
    paths = [natural_gradient_flow(q, model.target, TIMES, c, rtol=1e-11, atol=1e-13) for c in COORDINATES]
    for flow in paths[1:]:
        close(flow.mean, paths[0].mean, 1e-9)
        close(flow.covariance, paths[0].covariance, 1e-9)
        close(flow.loss, paths[0].loss, 1e-9)
    for i in range(len(TIMES)):
        loss = model.problems[0].loss(paths[0].mean[i], paths[0].covariance[i])
        close(paths[0].loss[i], loss, 1e-10)


@pytest.mark.accuracy
@coordinates
def test_it_ends_at_the_stationary_point(coordinates):
    model = random_model("bernoulli_logit", (), 61, 0.5)
    m, V = reference.stationary_point(model.problems[0])
    flow = natural_gradient_flow(random_posterior("cholesky", seed=1), model.target, [60.0], coordinates)
    close(flow.mean[0], m, 1e-8)
    close(flow.covariance[0], V, 1e-8)


@pytest.mark.accuracy
@coordinates
def test_a_batch_is_its_members(coordinates):
    q = random_posterior("cholesky", (2, 2), seed=1)
    model = random_model("bernoulli_logit", (2, 2), 61)
    flow = natural_gradient_flow(q, model.target, TIMES, coordinates)
    assert flow.mean.shape == (4, 2, 2, DIM)
    assert flow.loss.shape == (4, 2, 2)
    one = CholeskyGaussian(DIM, mean=q.mean[1, 0].clone(), scale=q.scale_tril[1, 0].clone())
    part = model.target
    single = GeneralizedLinear(
        part.X,
        part.y[1, 0],
        part.likelihood,
        prior_precision=part.prior.precision,
        prior_mean=part.prior.mean,
        weights=part.weights[1, 0],
        offset=part.offset[1, 0],
    )
    alone = natural_gradient_flow(one, single, TIMES, coordinates)
    close(flow.mean[:, 1, 0], alone.mean, 1e-8)
    close(flow.covariance[:, 1, 0], alone.covariance, 1e-8)


@pytest.mark.parametrize("name", sorted(FULL))
def test_the_start_is_left_alone(name):
    q = random_posterior(name, seed=1)
    before = [x.clone() for x in q.coordinates]
    flow = natural_gradient_flow(q, random_model("poisson_log", (), 5).target, [0.0, 0.5], estimator=Quadrature())
    assert all(torch.equal(a, b) for a, b in zip(before, q.coordinates, strict=True))
    close(flow.mean[0], q.mean.detach(), 1e-12)
    close(flow.covariance[0], q.covariance, 1e-12)


@pytest.mark.accuracy
@pytest.mark.parametrize("condition", [1.0, 1e3])
def test_the_rate_is_free_of_conditioning(condition):
    """The gap of a quadratic falls as e⁻²ᵗ near the optimum."""
    A = torch.tensor([condition, 1.0], dtype=DTYPE)
    model = GeneralizedLinear(torch.diag((A - 0.1).sqrt()), [0.3, -0.2], GaussianNoise(1.0), prior_precision=0.1)
    q = CholeskyGaussian(
        2, mean=1.0, scale=torch.linalg.cholesky(0.5 * random_root((), 3, 2) @ random_root((), 3, 2).mT)
    )
    loss = natural_gradient_flow(q, model, [6.0, 7.0, 40.0], rtol=1e-12, atol=1e-14).loss
    gaps = loss[:2] - loss[2]
    rate = torch.log(gaps[0] / gaps[1])
    assert abs(float(rate) - 2) < 0.02


def test_full_covariances_are_those_of_two_by_two_blocks():
    assert {name for name, kind in POSTERIORS.items() if kind(2).structure.widest == 2} == FULL
