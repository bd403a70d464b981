"""Linear response: third order and conjugate gradients, against closed forms, autograd and tilts solved again."""

import itertools
import math

import pytest
import torch
from arrow import ScalarArrow
from helpers import seeded

from torchngvi import CholeskyGaussian, DiagonalGaussian, LogJoint, NaturalGaussian, PrecisionCholeskyGaussian
from torchngvi.diagnostics.linear_response import (
    Response,
    confirm,
    response_covariance,
    response_log_sd,
    tails,
    third_order,
    third_order_of_values,
)
from torchngvi.expectations.draws import Antithetic, Fixed
from torchngvi.structures import Dense, Diagonal, EqualBlocks, block_diagonal

F64 = torch.float64


def draws(count, dim, seed=0):
    return Antithetic(count, seeded(seed))(torch.zeros(dim, dtype=F64))


def cubic_tensor(dim, seed=0, size=0.15):
    """A symmetric tensor of third derivatives."""
    T = size * torch.randn(dim, dim, dim, dtype=F64, generator=seeded(seed))
    return sum(T.permute(*order) for order in itertools.permutations(range(3))) / 6


def energy_of(T):
    """½|θ|² + Tθθθ/6."""
    return lambda x: 0.5 * x.square().sum(-1) + torch.einsum("ijk,...i,...j,...k->...", T, x, x, x) / 6


def best_gaussian(T, tilt, start, steps=5):
    """Newton's method on E ℓ - tilt·m - log|C|, E ℓ = ℓ(m) + ½ tr(∇²ℓ(m) V), over the mean and the entries of C."""
    dim = len(T)
    rows, columns = torch.tril_indices(dim, dim)

    def loss(x):
        m = x[:dim]
        C = torch.zeros(dim, dim, dtype=F64).index_put((rows, columns), x[dim:])
        H = torch.eye(dim, dtype=F64) + torch.einsum("ijk,k->ij", T, m)
        return energy_of(T)(m) + 0.5 * (H * (C @ C.mT)).sum() - tilt @ m - C.diagonal().abs().log().sum()

    x = start
    for _ in range(steps):
        x = x - torch.linalg.solve(torch.func.hessian(loss)(x), torch.func.grad(loss)(x))
    C = torch.zeros(dim, dim, dtype=F64).index_put((rows, columns), x[dim:])
    return x, x[:dim], C


@pytest.fixture(scope="module")
def cubic():
    """T, the best Gaussian's mean and root, and dm/dt of tilts that are solved again."""
    dim, h = 4, 2e-3
    T = cubic_tensor(dim)
    start = torch.cat([torch.zeros(dim, dtype=F64), torch.eye(dim, dtype=F64)[tuple(torch.tril_indices(dim, dim))]])
    x, mean, C = best_gaussian(T, torch.zeros(dim, dtype=F64), start, 10)
    response = []
    for k in range(dim):
        e = torch.eye(dim, dtype=F64)[k]
        at = {t: best_gaussian(T, t * h * e, x)[1] for t in (-2, -1, 1, 2)}
        response.append((8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * h))
    return T, mean, C, torch.stack(response, 1)


@pytest.mark.accuracy
def test_response_of_a_cubic_is_that_of_tilts_solved_again(cubic):
    T, mean, C, expected = cubic
    B = torch.einsum("abc,ai,bj,ck->ijk", T, C, C, C)
    M = 0.5 * torch.einsum("ijk,ljk->il", B, B)
    assert torch.linalg.eigvalsh(M)[-1] > 0.05  # the cubic matters
    q = CholeskyGaussian(4, mean=mean, scale=C)
    torch.testing.assert_close(response_covariance(q.frame(), M), expected, rtol=0, atol=1e-8)
    sd = expected.diagonal().sqrt().log() - q.stddev.log()
    torch.testing.assert_close(response_log_sd(q.frame(), M), sd, rtol=0, atol=1e-8)
    upper = NaturalGaussian.from_posterior(q)
    rotated = torch.einsum("abc,ai,bj,ck->ijk", T, *(upper.frame().dense(),) * 3)
    M = 0.5 * torch.einsum("ijk,ljk->il", rotated, rotated)
    torch.testing.assert_close(response_covariance(upper.frame(), M), expected, rtol=0, atol=1e-8)


@pytest.mark.accuracy
def test_conjugate_gradients_on_a_cubic(cubic):
    T, mean, C, expected = cubic
    q = CholeskyGaussian(4, mean=mean, scale=C)
    target = LogJoint(lambda theta: -energy_of(T)(theta))
    found = confirm(q, target, torch.arange(4), num_samples=20_000)
    sd = expected.diagonal().sqrt().log() - q.stddev.log()
    assert bool(found.finished.all() & ~found.singular.any())
    # within the error of the draws, and of a few products
    assert bool(((found.log_sd - sd).abs() < 4 * found.standard_error + 0.005).all())
    assert bool((found.standard_error < 0.01).all())


def residuals_of_cubic(T, C, mean, z):
    theta = mean + z @ C.mT
    gradient = theta + 0.5 * torch.einsum("ijk,sj,sk->si", T, theta, theta)
    return gradient @ C - z


@pytest.mark.accuracy
def test_third_order_is_unbiased(cubic):
    T, mean, C, _ = cubic
    B = torch.einsum("abc,ai,bj,ck->ijk", T, C, C, C)
    M = 0.5 * torch.einsum("ijk,ljk->il", B, B)
    each, values = [], []
    for seed in range(300):
        z = draws(64, 4, seed)
        each.append(third_order(z, residuals_of_cubic(T, C, mean, z)).matrix)
        theta = mean + z @ C.mT
        values.append(third_order_of_values(z, -energy_of(T)(theta) + 0.5 * z.square().sum(-1)).matrix)
    for found in (torch.stack(each), torch.stack(values)):
        error = found.std(0) / math.sqrt(len(found))
        assert bool(((found.mean(0) - M).abs() < 4 * error).all())
    assert torch.stack(each).std(0).mean() < torch.stack(values).std(0).mean()


def test_the_jackknife_tells_the_noise(cubic):
    T, mean, C, _ = cubic
    q = CholeskyGaussian(4, mean=mean, scale=C)
    each = []
    for seed in range(100):
        z = draws(1024, 4, seed)
        each.append(torch.stack(third_order(z, residuals_of_cubic(T, C, mean, z)).log_sd(q.frame())))
    each = torch.stack(each)
    ratio = each[:, 1].square().mean(0).sqrt() / each[:, 0].std(0)
    assert bool(((ratio > 0.7) & (ratio < 1.5)).all())


@pytest.mark.parametrize(
    "structure",
    [Dense(5), Diagonal(5), EqualBlocks(5, 1), block_diagonal([2, 3])],
    ids=["dense", "diagonal", "equal", "unequal"],
)
def test_third_order_by_brute_force(structure):
    z, r = draws(40, 5), torch.randn(40, 5, dtype=F64, generator=seeded(1))
    half, even, odd = z[:20], 0.5 * (r[:20] + r[20:]), 0.5 * (r[:20] - r[20:])
    pattern = structure.to_dense(torch.ones(structure.shape, dtype=F64)) != 0
    He2 = (half[:, :, None] * half[:, None] - torch.eye(5, dtype=F64)) * pattern
    product = torch.einsum("si,sjk->sijk", even, He2)
    total = torch.einsum("sijk,tljk->il", product, product) - torch.einsum("sijk,sljk->il", product, product)
    M = 0.5 * total / (20 * 19)
    outer = odd.mT @ half / 20
    expected = M - torch.where(pattern, 0.0, 0.5 * (outer + outer.mT))
    found = third_order(z, r, structure)
    torch.testing.assert_close(found.matrix, expected, rtol=0, atol=1e-12)
    kept = torch.cat([torch.arange(3, 20), torch.arange(23, 40)])  # the first group has three pairs
    without = third_order(z[kept], r[kept], structure)
    torch.testing.assert_close(found.without[0], without.matrix, rtol=0, atol=1e-12)


def test_values_by_brute_force():
    D, h = 3, 20
    z, logs = draws(2 * h, D), torch.randn(2 * h, dtype=F64, generator=seeded(1))
    half, odd = z[:h], 0.5 * (logs[:h] - logs[h:])
    odd = odd - half @ torch.linalg.lstsq(half, odd[:, None]).solution[:, 0]
    eye = torch.eye(D, dtype=F64)
    He3 = torch.einsum("si,sj,sk->sijk", half, half, half)
    for shape in ("ij,sk->sijk", "ik,sj->sijk", "jk,si->sijk"):
        He3 = He3 - torch.einsum(shape, eye, half)
    product = odd[:, None, None, None] * He3
    total = torch.einsum("sijk,tljk->il", product, product) - torch.einsum("sijk,sljk->il", product, product)
    found = third_order_of_values(z, logs)
    torch.testing.assert_close(found.matrix, 0.5 * total / (h * (h - 1)), rtol=0, atol=1e-12)


def test_tails_of_a_quartic():
    """κ_i of ℓ = c_i He_4(z_i)/24 + |z|²/2 is c_i, whatever the draws."""
    c = torch.tensor([0.0, 1.0, -2.0], dtype=F64)
    z = draws(64, 3)
    kappa, error = tails(z, c * (z.pow(3) - 3 * z) / 6)
    torch.testing.assert_close(kappa, c, rtol=0, atol=1e-12)
    assert bool((error < 1e-12).all())


def test_tails_and_their_error():
    """ℓ = e^z has E[∂⁴ℓ] = e^½."""
    each = torch.stack([torch.stack(tails(z, z.exp())) for z in (draws(2048, 1, seed) for seed in range(200))])
    value, error = each[:, 0, 0], each[:, 1, 0]
    assert value.mean().item() == pytest.approx(math.exp(0.5), abs=0.05)
    assert 0.6 < error.square().mean().sqrt() / value.std() < 1.6


def log_gamma(a, dim=1):
    """ℓ = Σ exp θ - a θ with its best Gaussian: m = log a - 1/(2a), s² = 1/a."""
    q = CholeskyGaussian(dim, mean=math.log(a) - 0.5 / a, scale=a**-0.5, dtype=F64)
    return q, LogJoint(lambda theta: (a * theta - theta.exp()).sum(-1))


@pytest.mark.parametrize(("a", "third", "full"), [(10.0, 0.3244, 0.3240), (3.0, 0.632, 0.624), (1.0, 1.414, 1.225)])
def test_log_gamma(a, third, full):
    """B² = 1/a, so that the third order has the sd 1/√(a - ½), and all orders √(1/a + 1/(2a²))."""
    q, target = log_gamma(a)
    assert 1 / math.sqrt(a - 0.5) == pytest.approx(third, abs=5e-4)
    exact = math.sqrt(1 / a + 0.5 / a**2)
    assert exact == pytest.approx(full, abs=5e-4)
    found = confirm(q, target, torch.tensor([0]), num_samples=100_000)
    assert found.log_sd.item() == pytest.approx(math.log(exact * math.sqrt(a)), abs=0.015)
    assert abs(found.log_sd.item() - math.log(exact * math.sqrt(a))) < 4 * found.standard_error.item() + 0.01
    z = draws(4096, 1)
    seen = third_order(z, -z + a**-0.5 * ((q.mean + a**-0.5 * z).exp() - a))
    value, error = seen.log_sd(q.frame())
    assert abs(value.item() - math.log(math.sqrt(a) / math.sqrt(a - 0.5))) < 4 * error.item()
    kappa, error = tails(z, -z + a**-0.5 * ((q.mean + a**-0.5 * z).exp() - a))
    assert abs(kappa.item() - 1 / a) < 4 * error.item() + 0.05


def test_singular_is_said():
    """A double well, q at the saddle between: no optimum, and the response has no sign."""
    q = CholeskyGaussian(1, scale=0.3, dtype=F64)
    found = confirm(q, LogJoint(lambda theta: (2 * theta.square() - theta.pow(4)).sum(-1)), torch.tensor([0]))
    assert found.singular.tolist() == [True]
    assert found.finished.tolist() == [True]
    assert found.log_sd.item() == pytest.approx(math.log(3.0))


def sample_average(q, energy, gamma, z):
    """L/γ of q moved by (p, R), R symmetric in the pattern, as a function of the vector x, and its value at 0."""
    structure, frame = q.structure, q.frame()

    def loss(x):
        p, flat = x[: q.dim], x[q.dim :] / math.sqrt(2)
        R = structure.unflat(flat)
        C = frame.dense()
        if structure == ScalarArrow(q.dim):  # the triangular root with the same change of V
            full = 2 * structure.to_dense(structure.tril_half(R))
            full = full.mT if frame.upper else full
        else:
            full = structure.full(R)
        change = torch.eye(q.dim, dtype=F64) + full
        theta = frame.mean + (p + z @ change.mT) @ C.mT
        return energy(theta).mean() / gamma - torch.linalg.slogdet(change)[1]

    return loss


POSTERIORS = {
    "dense": lambda: CholeskyGaussian(
        4,
        mean=0.3,
        scale=torch.randn(4, 4, dtype=F64, generator=seeded(2)).tril(-1) * 0.3 + torch.eye(4, dtype=F64),
        dtype=F64,
    ),
    "natural": lambda: NaturalGaussian.from_posterior(POSTERIORS["dense"]()),
    "diagonal": lambda: DiagonalGaussian(4, mean=0.3, scale=torch.tensor([0.5, 1.0, 2.0, 0.7], dtype=F64), dtype=F64),
    "blocks": lambda: CholeskyGaussian(4, mean=0.3, scale=0.7, structure=block_diagonal([2, 2]), dtype=F64),
    "unequal": lambda: CholeskyGaussian(4, mean=0.3, scale=0.7, structure=block_diagonal([1, 3]), dtype=F64),
    "arrow": lambda: PrecisionCholeskyGaussian(4, mean=0.3, scale=0.7, structure=ScalarArrow, dtype=F64),
}


@pytest.mark.parametrize("gamma", [1.0, 0.4])
@pytest.mark.parametrize("name", POSTERIORS)
def test_the_product_is_the_hessian_of_the_sample_average(name, gamma):
    q, energy = POSTERIORS[name](), energy_of(cubic_tensor(4, 3))
    A = Response(q, LogJoint(lambda theta: -energy(theta), temperature=gamma), Fixed(24))
    n = 4 + q.structure.parameters
    average = sample_average(q, energy, gamma, A.z)
    average(torch.zeros(n, dtype=F64))  # what a pattern keeps must not be made within a transform
    x = torch.randn(3, n, dtype=F64, generator=seeded(5))
    found, y = A(x)
    H = torch.func.hessian(average)(torch.zeros(n, dtype=F64))
    torch.testing.assert_close(found, x @ H, rtol=0, atol=1e-10 * float(H.abs().max()))
    form = A.along(x, y).mean(0)
    torch.testing.assert_close(form, (x * found).sum(-1), rtol=1e-12, atol=1e-12)


def test_a_mean_field_of_a_gaussian_gets_the_exact_covariance():
    """q has the variances 1/S_ii of a density N(0, S⁻¹); its response is S⁻¹ (Giordano, Broderick and Jordan 2018)."""
    S = torch.tensor([[1.0, 0.8, 0.0], [0.8, 1.0, 0.3], [0.0, 0.3, 2.0]], dtype=F64)
    exact = torch.linalg.inv(S)
    q = DiagonalGaussian(3, scale=S.diagonal().rsqrt(), dtype=F64)
    target = LogJoint(lambda theta: -0.5 * ((theta @ S) * theta).sum(-1))
    z = Fixed(256)(torch.zeros(3, dtype=F64))
    seen = third_order(z, q.stddev * ((q.stddev * z) @ S) - z, q.structure)
    torch.testing.assert_close(response_covariance(q.frame(), seen.matrix), exact, rtol=0, atol=1e-10)
    found = confirm(q, target, torch.arange(3))
    expected = exact.diagonal().sqrt().log() - q.stddev.log()
    torch.testing.assert_close(found.log_sd, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_both_dtypes(dtype):
    q, target = log_gamma(3.0, 2)
    q = q.to(dtype)
    found = confirm(q, target, torch.arange(2), num_samples=8192)
    assert found.log_sd.dtype == dtype
    assert found.log_sd.tolist() == pytest.approx([0.5 * math.log(1 + 1 / 6)] * 2, abs=0.02)


def test_a_temperature_scales_the_problem():
    """ℓ and γ times the same number have the same q and the same response."""
    q, target = log_gamma(3.0)
    hot = LogJoint(lambda theta: 2.5 * target.log_joint(theta), temperature=2.5)
    first, second = (confirm(q, one, torch.tensor([0])) for one in (target, hot))
    torch.testing.assert_close(first.log_sd, second.log_sd, rtol=1e-9, atol=1e-9)


class TestLimits:
    def test_a_budget_is_kept(self):
        q, target = log_gamma(1.0, 2)
        count = Counting(target)
        assert confirm(q, count, torch.arange(2), max_gradients=2047) is None
        assert count.gradients == 0
        found = confirm(q, count, torch.arange(2), max_gradients=2048)
        assert count.gradients == 2048
        assert not bool(found.finished.any())
        more = confirm(q, count, torch.arange(2))
        assert bool((more.log_sd >= found.log_sd).all())  # a lower bound

    def test_not_finite_near_the_draws(self):
        q = CholeskyGaussian(1, dtype=F64)
        target = LogJoint(lambda theta: torch.where(theta[..., 0] > -2, -0.5 * theta.square().sum(-1), torch.nan))
        assert confirm(q, target, torch.tensor([0])) is None


class Counting(LogJoint.__mro__[1]):
    """A target that counts gradients."""

    def __init__(self, target):
        self.target, self.gradients, self.temperature = target, 0, target.temperature

    def log_joint(self, theta):
        self.gradients += theta[..., 0].numel() * theta.requires_grad
        return self.target.log_joint(theta)

    def tensors(self):
        return ()
