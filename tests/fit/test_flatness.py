"""How flat the ELBO is: planted third and second derivatives, and what a fit says of its distance from the best q."""

import math
import re

import pytest
import torch

from torchngvi import VN, CholeskyGaussian, DiagonalGaussian, LogJoint, fit
from torchngvi.diagnostics.linear_response import Residuals, _Part, flatness, third_order
from torchngvi.expectations.draws import Antithetic, Fixed
from torchngvi.expectations.sampled import SampleAverage
from torchngvi.fitting.pool import Descent, Point, SampledObjective
from torchngvi.fitting.sample_average import Fresh
from torchngvi.fitting.sample_average import why_converged as converged
from torchngvi.fitting.sample_average import why_not_enough as not_enough
from torchngvi.fitting.starts import EngineSettings
from torchngvi.models.factors import Guarded
from torchngvi.optim import Status
from torchngvi.structures import Dense, Diagonal, arrow, block_diagonal

F64 = torch.float64


def draws(count, dim, seed=0):
    return Antithetic(count, torch.Generator().manual_seed(seed))(torch.zeros(dim, dtype=F64))


def residuals(z, direction, size):
    """Of ℓ whose third derivatives are those of size/6 of the cube of a direction, with M = size²/2 along it."""
    u = direction / direction.norm()
    return 0.5 * size * ((z @ u).square() - 1)[:, None] * u


@pytest.mark.parametrize("size", [0.3, 1.0, 1.3])
def test_one_cubic_direction(size):
    """Of a dense q M has one eigenvalue, size²/2, in whatever direction it lies."""
    z = draws(4096, 6)
    found = flatness(Residuals(z, residuals(z, torch.arange(6, dtype=F64), size)), Dense(6))
    assert abs(found.eigenvalue - 0.5 * size**2) < 3 * found.error
    assert found.error < 0.1 * size**2


def test_of_a_mean_field_correlations_count():
    """ℓ quadratic with correlations ρ: A is its second derivatives, the smallest eigenvalue of which is 1 - ρ."""
    rho, z = 0.8, Fixed(256)(torch.zeros(2, dtype=F64))
    second = torch.tensor([[1.0, rho], [rho, 1.0]], dtype=F64)
    found = flatness(Residuals(z, z @ second - z), Diagonal(2))
    assert found.eigenvalue == pytest.approx(rho, abs=1e-12)
    assert found.growth == pytest.approx(1 / (1 - rho))
    dense = flatness(Residuals(z, z @ second - z), Dense(2))
    assert abs(dense.eigenvalue) < 1e-12  # a dense q holds them


def test_noise_is_no_flatness():
    """In many dimensions the largest eigenvalue of an estimate of M is that of its noise; this one is not."""
    z = draws(1024, 100)
    noise = torch.randn(512, 100, dtype=F64, generator=torch.Generator().manual_seed(1))
    found = flatness(Residuals(z, torch.cat([noise, noise])), Dense(100))
    assert abs(found.eigenvalue) < 3 * found.error
    few = flatness(Residuals(z, 0.05 * torch.cat([noise, noise])), Dense(100))
    assert few.growth < 1.1


def test_draws_that_are_whitened_vary_less():
    """|z|² of whitened draws varies less, which is corrected: the same eigenvalue from 3 D pairs."""
    dim, size = 60, 0.12

    def along(z):  # B_1jj = size for all j
        even = 0.5 * size * (z.square().sum(-1) - dim)
        return torch.cat([even[:, None], torch.zeros(len(z), dim - 1, dtype=F64)], -1)

    truth = 0.5 * size**2 * dim
    found = []
    for seed in range(6):
        z = Fixed(6 * dim, seed)(torch.zeros(dim, dtype=F64))
        found.append(flatness(Residuals(z, along(z)), Diagonal(dim)))
    mean = sum(one.eigenvalue for one in found) / len(found)
    assert mean == pytest.approx(truth, rel=0.3)


@pytest.mark.parametrize(
    "structure", [Dense(6), Diagonal(6), block_diagonal([2, 2, 2]), block_diagonal([1, 2, 3])], ids=str
)
@pytest.mark.parametrize("entries", [8_000_000, 1000])
def test_products_are_those_of_the_matrix(structure, entries):
    """M - N of `third_order`, times vectors; however many pairs are multiplied at once."""
    z = draws(128, 6)
    second = torch.randn(6, 6, dtype=F64, generator=torch.Generator().manual_seed(1))
    residual = z @ (second + second.mT) + 0.3 * z.roll(1, 1).square() - 0.2 * z * z.roll(2, 1)
    part = _Part(*Residuals(z, residual).halves, structure, entries)
    product = torch.stack([part.times(v) for v in torch.eye(6, dtype=F64)])
    torch.testing.assert_close(product, third_order(z, residual, structure).matrix, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", ["few", "pattern", "nan"])
def test_what_cannot_be_told(case):
    z = draws(60 if case == "few" else 256, 4)
    residual = torch.full_like(z, torch.nan) if case == "nan" else 0 * z
    structure = arrow(groups=2, local=1, globals=2) if case == "pattern" else Dense(4)
    assert flatness(Residuals(z, residual), structure) is None


@pytest.mark.parametrize(
    ("growth", "said"),
    [
        (1.4, ", typically about 0.005 nats from the best q; "),
        (4.0, ", typically about 0.02 nats from the best q; "),
        (11.0, " (how many nats from the best q is not known: the ELBO is nearly flat in a direction); "),
    ],
)
def test_what_is_said_of_it(growth, said):
    """Half of norm² + noise², as many times more as that may be, or that it is not known."""
    point = Point(torch.tensor(0.004), torch.tensor(0.006), torch.tensor(0.0))
    judged = Fresh(torch.tensor(-1.0), torch.tensor(0.1), 0.9, "")
    assert said in converged(point, growth, 100, judged, "")
    assert said in not_enough(point, growth, 100, 0.05, judged)
    far = point._replace(norm2=torch.tensor(0.5))  # at no minimum
    assert "nats" not in converged(far, growth, 100, judged, "")
    assert "q is not at an optimum" in not_enough(far, growth, 100, 0.05, judged)


def funnel(theta):
    v, x = theta[..., 0], theta[..., 1:]
    return -0.5 * v.square() - 0.5 * ((-v).exp() * x.square().sum(-1) + x.shape[-1] * v)


def gap(q):
    """Nats of q above the best Gaussian of the funnel, the same for a mean field and a full covariance."""
    with torch.no_grad():
        m, V = q.mean, q.covariance
        n, v = q.dim - 1, V[0, 0]
        second = V.diagonal()[1:] + (m[1:] - V[0, 1:]).square()
        loss = 0.5 * (m[0].square() + v + (v / 2 - m[0]).exp() * second.sum() + n * m[0]) - q.entropy()
        best = 1 / (1 + 0.5 * n)
        entropy = 0.5 * (n + 1) * (1 + math.log(2 * math.pi)) + 0.5 * math.log(best) - 0.25 * n * best
        return float(loss) - (0.5 * best + 0.5 * n - entropy)


def not_nearer(text, q):
    nats = re.search("about (\\S+) nats from the best q", text)
    assert nats is None or float(nats[1]) > 0.7 * gap(q)
    assert nats or "is not known: the ELBO is nearly flat" in text


@pytest.mark.parametrize("family", [CholeskyGaussian, DiagonalGaussian])
def test_along_the_valley_of_a_funnel(family):
    """Mean and standard deviations move together in a direction where the ELBO is flat; the best q given E[v] = a."""
    a, n = 0.4, 49
    v = 1 / (1 + 0.5 * n)
    scale = torch.full((n + 1,), math.exp(0.5 * (a - 0.5 * v)), dtype=F64)
    scale[0] = math.sqrt(v)
    q = family(n + 1, mean=torch.tensor([a] + n * [0.0], dtype=F64), scale=scale, dtype=F64)
    assert gap(q) == pytest.approx(0.5 * a**2)
    objective = SampledObjective(q, Guarded(LogJoint(funnel)))
    e = objective.estimator(Fixed(2048))(q, objective.target)
    point = Point(q.norm2(q.local(e)), e.noise2, e.value)
    assert abs(point.norm2 - a**2 * v) < point.noise2
    assert gap(q) > 4 * 0.5 * point.total**2  # what the norm alone would say
    judged = Fresh(torch.tensor(-1.0), torch.tensor(0.1), 0.9, "")
    not_nearer(converged(point, objective.growth, 2048, judged, ""), q)


@pytest.mark.parametrize("family", [CholeskyGaussian, DiagonalGaussian])
def test_a_funnel_is_not_said_to_be_nearer_than_it_is(family):
    """Wherever along its valley the fit ends."""
    torch.manual_seed(0)
    q = family(50, dtype=F64)
    result = fit(q, funnel, progress=False, examine=False)
    assert result.converged
    not_nearer(str(result), q)


def correlated(theta, rho=0.7):
    """A Gaussian with one correlation and a little of a quartic."""
    dim = theta.shape[-1]
    P = (1 - rho) * torch.eye(dim, dtype=F64) + rho
    return -0.5 * (theta @ P * theta).sum(-1) - 0.01 * theta.pow(4).sum(-1)


@pytest.mark.parametrize(("pairs", "most"), [(32, 1.3), (12, math.inf)])
def test_the_noise_of_a_mean_field_is_that_over_seeds(pairs, most):
    """What is linear in z is no noise of whitened draws; with fewer than 2 D pairs it is left in, which is too much."""
    q, target = DiagonalGaussian(8, scale=0.6, dtype=F64), LogJoint(correlated)
    packets = [SampleAverage(Fixed(2 * pairs, seed=seed))(q, target) for seed in range(300)]
    a, W = (torch.stack([getattr(e.derivative, name) for e in packets]) for name in ("a", "W"))
    spread = (a - a.mean(0)).square().sum(-1) + 0.5 * (W - W.mean(0)).square().sum(-1)
    ratio = float(torch.stack([e.noise2 for e in packets]).mean() / (spread.mean() * 300 / 299))
    assert 0.8 < ratio < most
    assert ratio > 10 or most < math.inf


@pytest.mark.parametrize(
    ("norms", "left"), [([2.0, 0.5], 1 / 3), ([2.0, 1.6, 1.0], 0.3129630), ([2.0, 1.6, 1.7], 0.7), ([4.0, 0.9], 0.5)]
)
def test_a_mean_of_minima_is_no_better_than_its_share_of_the_noise(norms, left):
    """Of k sets noise²/k is left at least, though norm² - noise² of the last be negative."""
    q = CholeskyGaussian(50, dtype=F64)
    descent = Descent(q, Guarded(LogJoint(funnel)), 0, 0.1, EngineSettings())
    descent.draws, descent.optimizer = 102, VN(q)
    for descent.sets, norm2 in enumerate(norms, 1):
        descent._count = lambda do, norm2=norm2: Status(torch.tensor(0.0), torch.tensor(norm2), torch.tensor(1.0))
        point = descent._evaluated()
    assert float(point.norm2) == 0
    assert float(point.noise2) == pytest.approx(left + math.sqrt(2 / 50), rel=1e-6)


def test_what_was_seen_comes_back_with_the_place():
    """The verdict on q is not by the draws of another start that was tried and left."""
    q = CholeskyGaussian(4, dtype=torch.float64)
    descent = Descent(q, Guarded(LogJoint(lambda theta: -0.5 * theta.square().sum(-1))), 0, 0.1, EngineSettings())
    descent.draws = 64
    descent.begin()
    descent.evaluate()
    seen, place = descent.objective.residuals, descent.place()
    assert seen is not None
    q.initialize_(1.0)
    descent.leave(64)
    descent.begin()
    descent.evaluate()
    assert descent.objective.residuals is not seen
    descent.come_back(place)
    assert descent.objective.residuals is seen
