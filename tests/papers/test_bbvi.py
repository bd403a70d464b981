"""Black-box VI with projected stochastic gradients (Kim, Ma and Gardner 2024): identities, bounds, counter-examples."""

import math
import pathlib
import re

import pytest
import torch
from helpers import EXACT, IDENTITY, close, randn, random_root, unbiased, z_bound

from examples.papers.kim2024.runs import optimum
from torchngvi import (
    BBVI,
    CholeskyGaussian,
    DiagonalGaussian,
    GeneralizedLinear,
    LogJoint,
    NaturalGradientVI,
    Quadrature,
)
from torchngvi.errors import InputError
from torchngvi.expectations import Independent, PathDerivative, Reparametrized
from torchngvi.interfaces import Cost, Expectation, Framed
from torchngvi.methods import ProximalBBVI
from torchngvi.rules import ProjectedRootGradient, ProjectedSquareRoot, ProximalRootGradient
from torchngvi.stepsizes import Constant
from torchngvi.theory.kim2024 import (
    AdaptiveVariance,
    Gaussian,
    GaussianTarget,
    Laplace,
    Logistic,
    MeanField,
    QuadraticVariance,
    SquareRoot,
    StudentT,
    Triangular,
    Unrestricted,
    closed_entropy_bound,
    closed_entropy_variance,
    empirical_variance,
    fisher_hyvarinen,
    landing_bound,
    landing_variance,
    wasserstein_to_point,
)

F64 = torch.float64
BASES = [Gaussian(), Laplace(), Logistic(), StudentT(9.0)]
SCALES = {"triangular": Triangular(), "mean_field": MeanField(), "root": SquareRoot(), "dense": Unrestricted()}
DELTAS = (0.01, 0.1, 1.0, 10.0)


def eye(dim):
    return torch.eye(dim, dtype=F64)


def random_target(dim, seed, mu=1.0, L=4.0):
    Q = torch.linalg.qr(randn(dim, dim, seed=seed)).Q
    values = mu + (L - mu) * torch.rand(dim, dtype=F64, generator=torch.Generator().manual_seed(seed))
    return GaussianTarget(randn(dim, seed=seed + 1), Q @ torch.diag(values) @ Q.mT)


def random_scale(name, dim, seed):
    C = random_root((), seed, dim)
    if name == "mean_field":
        return torch.diag(C.diagonal())
    return C @ C.mT if name == "root" else C if name == "triangular" else C + 0.2 * randn(dim, dim, seed=seed + 1)


def spectral(matrix):
    return float(torch.linalg.matrix_norm(torch.linalg.inv(matrix), 2))


def fixed(seed, count=1):
    return Independent(count, torch.Generator().manual_seed(seed))


class TestBases:
    @pytest.mark.parametrize("base", BASES, ids=lambda base: type(base).__name__)
    def test_moments_and_entropy(self, base):
        u = base.sample(torch.zeros(400_000, dtype=F64), torch.Generator().manual_seed(0))
        unbiased(torch.stack([u, u**2, u**3, -base.log_prob(u)], -1), torch.tensor([0.0, 1.0, 0.0, base.entropy]))
        # by quadrature, for the fourth moment and the normalisation
        x = torch.linspace(-400, 400, 4_000_001, dtype=F64)
        density = base.log_prob(x).exp() * 2e-4
        assert float(density.sum()) == pytest.approx(1, abs=1e-5)
        assert float((density * x**4).sum()) == pytest.approx(base.kurtosis, rel=1e-4)
        assert float(-(density * base.log_prob(x)).sum()) == pytest.approx(base.entropy, abs=1e-5)

    @pytest.mark.parametrize("base", BASES, ids=lambda base: type(base).__name__)
    def test_the_score(self, base):
        u = randn(50, seed=0).requires_grad_()
        (slope,) = torch.autograd.grad(base.log_prob(u).sum(), u)
        close(base.score(u.detach()), slope, IDENTITY)

    def test_kurtosis(self):
        assert [base.kurtosis for base in BASES] == [3.0, 6.0, 4.2, 4.2]
        with pytest.raises(InputError, match="a fourth moment needs more than 4, and must be above 4, finite; got 4"):
            StudentT(4.0)

    @pytest.mark.parametrize("base", BASES[:3], ids=lambda base: type(base).__name__)
    def test_auxiliary_moments(self, base):
        d, k = 3, base.kurtosis
        u = base.sample(torch.zeros(300_000, d, dtype=F64), torch.Generator().manual_seed(1))
        square = u.square().sum(-1)
        unbiased((1 + square)[:, None] * u, torch.zeros(d, dtype=F64))
        unbiased(square, torch.tensor(float(d), dtype=F64))
        unbiased(square**2, torch.tensor(d * k + d * (d - 1.0), dtype=F64))
        quartic = u[:, :, None] * u[:, None, :] * square[:, None, None]
        unbiased(quartic, (d - 1 + k) * eye(d))
        # E J|T u - z|² = (d + 1)|m - z|² + (d + k)‖C‖², in print once with the constants exchanged
        m, C = randn(d, seed=3), random_root((), 4, d)
        moved = (m + u @ C.mT).square().sum(-1)
        expected = (d + 1) * m.square().sum() + (d + k) * C.square().sum()
        unbiased((1 + square) * moved, expected)
        # mean field: an inequality
        jacobian, c = 1 + u.pow(4).sum(-1).sqrt(), C.diagonal()
        moved = (m + u * c).square().sum(-1)
        size = 2 * k * math.sqrt(d) + 1
        bound = (math.sqrt(d * k) + k * math.sqrt(d) + 1) * m.square().sum() + size * c.square().sum()
        assert (jacobian * moved).mean() < bound
        assert math.sqrt(d**2 + (1 + k) * d + 1) <= d + k  # √E(1 + |u|²)²


class TestEstimators:
    @pytest.mark.sparse(5)
    @pytest.mark.parametrize("base", BASES, ids=lambda base: type(base).__name__)
    @pytest.mark.parametrize("name", SCALES)
    def test_both_are_unbiased_and_differ_by_the_control_variate(self, name, base):
        scale, C, target = SCALES[name], random_scale(name, 3, 5), random_target(3, 7)
        u = base.sample(torch.zeros(200_000, 3, dtype=F64), torch.Generator().manual_seed(2))
        m = randn(3, seed=9)
        a = (m + u @ C.mT - target.mean) @ target.precision
        closed, landing = scale.closed_entropy(C, a, u), scale.landing(C, a, u, base)
        variate, exact = scale.control_variate(C, u, base), target.gradient(scale, m, C)
        free = scale.kept(torch.ones(3, 3, dtype=F64)) != 0
        for estimate in (closed, landing):
            unbiased(estimate.mean, exact.mean)
            unbiased(estimate.scale[:, free], exact.scale[free])
            assert not estimate.scale[:, ~free].any()
        unbiased(variate.scale[:, free], torch.zeros(int(free.sum()), dtype=F64))
        close(closed.mean - variate.mean, landing.mean, IDENTITY)
        close(closed.scale - variate.scale, landing.scale, IDENTITY)

    def test_the_stop_gradient(self):
        # ∇_λ [f(T_λ u) + log q_ν(T_λ u)] at ν = λ, m and C of log q both held fixed
        base, target = StudentT(9.0), random_target(3, 7)
        m, C, u = randn(3, seed=0), random_root((), 1, 3), randn(3, seed=2)
        live_m, live_C = m.clone().requires_grad_(), C.clone().requires_grad_()
        z = live_m + live_C @ u
        noise = torch.linalg.solve(C, z - m)
        loss = -target.log_joint(z) + base.log_prob(noise).sum() - C.diagonal().log().sum()
        g_m, g_C = torch.autograd.grad(loss, (live_m, live_C))
        a = target.precision @ (m + C @ u - target.mean)
        own = Triangular().landing(C, a, u, base)
        close(own.mean, g_m, IDENTITY)
        close(own.scale, g_C.tril(), IDENTITY)

    @pytest.mark.parametrize(("kind", "scale"), [(CholeskyGaussian, Triangular()), (DiagonalGaussian, MeanField())])
    def test_the_estimators_of_the_library_are_these(self, kind, scale):
        target = random_target(3, 7)
        q = kind(3, mean=randn(3, seed=1), scale=scale.kept(random_root((), 2)))
        for estimator, closed in ((PathDerivative, False), (Reparametrized, True)):
            gradient = q.euclidean(estimator(fixed(3, 4))(q, LogJoint(target.log_joint)))
            u, C = fixed(3, 4)(q.mean), q.scale_tril
            a = (q.mean + u @ C.mT - target.mean) @ target.precision
            own = scale.closed_entropy(C, a, u) if closed else scale.landing(C, a, u, Gaussian())
            close(gradient.vector, own.mean.mean(0), IDENTITY)
            close(q.structure.to_dense(gradient.matrix), own.scale.mean(0), IDENTITY)

    @pytest.mark.parametrize("base", [Gaussian(), Laplace()], ids=lambda base: type(base).__name__)
    @pytest.mark.parametrize("name", ["triangular", "mean_field", "dense"])
    def test_exact_second_moments(self, name, base):
        scale, C, target, m = SCALES[name], random_scale(name, 4, 5), random_target(4, 7), randn(4, seed=9)
        u = base.sample(torch.zeros(300_000, 4, dtype=F64), torch.Generator().manual_seed(2))
        a = (m + u @ C.mT - target.mean) @ target.precision
        expected = target.closed_entropy_moment(scale, m, C, base.kurtosis)
        unbiased(scale.closed_entropy(C, a, u).square(), expected)
        if base == Gaussian():
            unbiased(scale.landing(C, a, u, base).square(), target.landing_moment(scale, m, C))

    def test_several_draws(self):
        # E|ḡ|² = |∇F|² + (E|g|² - |∇F|²)/M
        target, root = random_target(3, 7), random_root((), 2)
        q = CholeskyGaussian(3, (40_000,), mean=0.5, scale=root.expand(40_000, 3, 3), dtype=F64)
        mean = torch.full((3,), 0.5, dtype=F64)
        one, exact = target.landing_moment(Triangular(), mean, root), target.gradient(Triangular(), mean, root).square()
        gradient = q.euclidean(PathDerivative(fixed(0, 5))(q, LogJoint(target.log_joint)))
        squares = gradient.vector.square().sum(-1) + gradient.matrix.square().sum((-2, -1))
        unbiased(squares, exact + (one - exact) / 5)

    @pytest.mark.parametrize("name", ["triangular", "mean_field"])
    def test_interpolation(self, name):
        # P7: zero for every draw where the family holds the target; the closed entropy is not
        scale, C, m = SCALES[name], random_scale(name, 3, 5), randn(3, seed=0)
        target, u = GaussianTarget(m, torch.linalg.inv(C @ C.mT)), randn(100, 3, seed=2)
        a = (u @ C.mT) @ target.precision
        assert float(scale.landing(C, a, u, Gaussian()).square().max()) < 1e-24
        assert float(target.landing_moment(scale, m, C)) < 1e-24
        assert float(target.closed_entropy_moment(scale, m, C)) > 1

    def test_data_in_batches_bring_the_noise_back(self):
        # sub-sampling under sticking the landing: zero for all rows, not for some
        X = randn(20, 2, seed=0)
        model = GeneralizedLinear(X, X.sum(-1) + randn(20, seed=1), "gaussian")
        precision = eye(2) + X.mT @ X
        covariance = torch.linalg.inv(precision)
        q = CholeskyGaussian.from_moments(covariance @ X.mT @ model.y, 0.5 * (covariance + covariance.mT))
        whole, part = (q.euclidean(PathDerivative(fixed(0))(q, x)) for x in (model, model.minibatch([0, 1])))
        assert float(whole.vector.norm()) < 1e-12
        assert float(part.vector.norm()) > 1


class TestScales:
    @pytest.mark.parametrize("name", ["triangular", "mean_field", "root"])
    def test_projections(self, name):
        # P1: idempotent, and the nearest point by the variational inequality of convex sets
        scale, floor = SCALES[name], 0.6
        points = [scale.kept((randn(4, 4, seed=s) + eye(4)).tril() if name == "triangular" else randn(4, 4, seed=s)) for s in range(20)]  # fmt: skip  # noqa: E501
        images = [scale.projected(C, floor) for C in points]
        for C, image in zip(points, images, strict=True):
            close(scale.projected(image, floor), image, EXACT)
            least = torch.linalg.eigvalsh(image)[0] if name == "root" else image.diagonal().min()
            assert float(least) >= floor - 1e-12
            for other, inside in zip(points, images, strict=True):
                assert float(((C - image) * (inside - image)).sum()) <= 1e-10
                assert float((image - inside).norm()) <= float((C - other).norm()) + 1e-12

    def test_entropy_gradients(self):
        for name, scale in SCALES.items():
            C = random_scale(name, 3, 5).requires_grad_()
            (slope,) = torch.autograd.grad(torch.linalg.slogdet(C).logabsdet, C)
            close(scale.entropy_gradient(C.detach()), scale.kept(slope), IDENTITY)

    def test_the_entropy_is_smooth_on_the_domain(self):
        # P2: with constant S, which is approached where C_ii = S^-½
        S, scale = 4.0, Triangular()
        for seed in range(30):
            one, other = (scale.projected(randn(3, 3, seed=s).tril(), S**-0.5) for s in (seed, seed + 100))
            change = (scale.entropy_gradient(one) - scale.entropy_gradient(other)).norm()
            assert float(change) <= S * float((one - other).norm()) + 1e-12
        near = [scale.entropy_gradient((0.5 + h) * eye(1)) for h in (0.0, 1e-6)]
        assert float((near[0] - near[1]).norm()) / 1e-6 == pytest.approx(S, rel=1e-5)

    @pytest.mark.parametrize("name", ["triangular", "mean_field"])
    def test_the_objective_is_convex_and_smooth(self, name):
        # P3: Hessian Λ_ik [j = l] + [i = j = k = l]/C_ii², spectrum in [μ, L + S]
        target, S, dim = random_target(3, 7), 4.0, 3
        index = torch.arange(3)
        rows, columns = torch.tril_indices(3, 3) if name == "triangular" else (index, index)

        def energy(x):
            C = x.new_zeros(3, 3).index_put((rows, columns), x[dim:])
            quadratic = 0.5 * (x[:dim] - target.mean) @ target.precision @ (x[:dim] - target.mean)
            return quadratic + 0.5 * (C.mT @ target.precision @ C).trace() - C.diagonal().log().sum()

        for seed in range(10):
            C = SCALES[name].projected(random_root((), seed), S**-0.5)
            x = torch.cat([randn(3, seed=seed), C[rows, columns]])
            hessian = torch.autograd.functional.hessian(energy, x)
            same = (columns[:, None] == columns) * target.precision[rows[:, None], rows]
            corner = (rows == columns).double() / C[rows, columns].square()
            close(hessian[dim:, dim:], same + torch.diag(corner), IDENTITY)
            values = torch.linalg.eigvalsh(hessian)
            assert float(values[0]) >= 1 - 1e-9
            assert float(values[-1]) <= 4 + S + 1e-9

    def test_a_logarithmic_scale_loses_strong_convexity(self):
        precision = 2.0
        for c in (1.0, 1e-2, 1e-4):
            s = torch.tensor(math.log(c), dtype=F64)
            curvature = torch.autograd.functional.hessian(lambda s: 0.5 * precision * torch.exp(2 * s) - s, s)
            linear = torch.autograd.functional.hessian(
                lambda c: 0.5 * precision * c**2 - c.log(), torch.tensor(c).double()
            )
            assert float(curvature) == pytest.approx(2 * precision * c**2)
            assert float(linear) == pytest.approx(precision + c**-2)
            assert float(linear) >= precision


class TestDivergences:
    def test_the_objective_is_the_divergence(self):
        # KL = F + log Z of an unnormalised target, F = E ℓ - entropy
        target = random_target(3, 7)
        q = CholeskyGaussian(3, mean=randn(3, seed=1), scale=random_root((), 2))
        star = CholeskyGaussian.from_moments(target.mean, torch.linalg.inv(target.precision))
        energy = 0.5 * ((q.covariance * target.precision).sum() + (q.mean - target.mean) @ target.precision @ (q.mean - target.mean))  # fmt: skip  # noqa: E501
        log_z = 0.5 * (3 * math.log(2 * math.pi) - torch.logdet(target.precision))
        close((energy - q.entropy() + log_z).detach(), q.kl(star).detach(), IDENTITY)
        close(target.log_joint(q.mean + 1), star.log_prob(q.mean + 1).detach(), IDENTITY)

    @pytest.mark.parametrize("order", [2, 4])
    def test_closed_forms_against_draws(self, order):
        target = random_target(3, 7)
        q = CholeskyGaussian(3, mean=randn(3, seed=1), scale=random_root((), 2))
        exact = (target.fisher_hyvarinen if order == 2 else target.fisher_hyvarinen_4)(q.mean, q.scale_tril)
        estimates = [fisher_hyvarinen(q, LogJoint(target.log_joint), order, fixed(seed, 2000)) for seed in range(200)]
        unbiased(torch.stack(estimates), exact)

    @pytest.mark.parametrize("name", ["triangular", "mean_field"])
    def test_the_lower_bound(self, name):
        # P8: E|g|² ≥ D_F ≥ 2μ KL, the second by the log-Sobolev inequality
        for seed in range(40):
            target, C, m = random_target(3, seed), random_scale(name, 3, seed + 1), randn(3, seed=seed + 2)
            moment, fisher = target.landing_moment(SCALES[name], m, C), target.fisher_hyvarinen(m, C)
            q, star = (CholeskyGaussian(3, mean=m, scale=torch.linalg.cholesky(C @ C.mT)), None)
            star = CholeskyGaussian.from_moments(target.mean, torch.linalg.inv(target.precision))
            mu = torch.linalg.eigvalsh(target.precision)[0]
            assert float(moment) >= float(fisher) >= float(2 * mu * q.kl(star).detach())

    def test_the_distance_to_a_point(self):
        # P13: |λ̄ - λ*| = W₂(q*, δ_z̄), tr(V)^½ where m* = z̄
        target = random_target(3, 7)
        C = optimum(target)
        expected = torch.linalg.inv(target.precision).trace().sqrt()
        close(wasserstein_to_point(target.mean, C, target.mean), expected, IDENTITY)
        shift = randn(3, seed=1)
        squared = wasserstein_to_point(target.mean + shift, C, target.mean) ** 2
        close(squared, expected**2 + shift.square().sum(), IDENTITY)

    def test_empirical_constants(self):
        # P18: the least α̂ and the slope, from exact second moments
        distances2 = torch.tensor([0.5, 1.0, 4.0], dtype=F64)
        found = empirical_variance(7 + 3 * distances2, distances2, 7.0)
        assert found == pytest.approx((3.0, 3.0, 7.0))
        # no line fits: the slope that leaves residuals orthogonal to the distances
        distances2, above = torch.tensor([1.0, 2.0, 4.0], dtype=F64), torch.tensor([2.0, 10.0, 6.0], dtype=F64)
        found = empirical_variance(7 + above, distances2, 7.0)
        assert found == pytest.approx((5.0, (2 + 20 + 24) / 21, 7.0))
        assert float(((above - found.slope * distances2) * distances2).sum()) == pytest.approx(0.0, abs=1e-12)
        found = empirical_variance(torch.tensor([9.0, 8.0]), torch.tensor([1.0, 1.0]), 7.0)
        assert found == pytest.approx((2.0, 1.5, 7.0))
        with pytest.raises(InputError, match=r"one number a point, \(N,\) each; got \(2,\) and \(1,\)"):
            empirical_variance(torch.ones(2), torch.ones(1), 0.0)
        with pytest.raises(InputError, match=r"one number a point, \(N,\) each; got \(2, 2\) and \(2, 2\)"):
            empirical_variance(torch.ones(2, 2), torch.ones(2, 2), 0.0)
        with pytest.raises(InputError, match="distances2 must be positive: the value at the optimum is passed"):
            empirical_variance(torch.ones(2), torch.zeros(2), 0.0)


class TestBounds:
    def parts(self, target, star, m, C, u, base=None):
        """J and the three differences of the decomposition, a draw."""
        z, best = m + u @ C.mT, target.mean + u @ star.mT
        first = -(z - best) @ target.precision
        inverse, inverse_star = torch.linalg.inv(C), torch.linalg.inv(star)
        second = -u @ inverse_star + u @ inverse
        third = -(best - target.mean) @ target.precision + u @ inverse_star
        return 1 + u.square().sum(-1), first, second, third

    def test_the_decomposition(self):
        # P4, draw by draw
        for seed in range(5):
            target, m, C = random_target(3, seed), randn(3, seed=seed + 1), random_root((), seed + 2)
            star, u = target.mean_field_optimum()[1], randn(2000, 3, seed=seed + 3)
            J, *differences = self.parts(target, star, m, C, u)
            V = [(J * part.square().sum(-1)).mean() for part in differences]
            a = (m + u @ C.mT - target.mean) @ target.precision
            moment = Triangular().landing(C, a, u, Gaussian()).square().mean()
            for delta in DELTAS:
                assert float(moment) <= float((2 + delta) * (V[0] + V[1]) + (1 + 2 / delta) * V[2])

    @pytest.mark.parametrize("mean_field", [False, True])
    def test_upper_bounds(self, mean_field):
        # P5, P6, P11, P12 on random targets and λ, exact moments; S in its effective form
        scale, worst = (MeanField() if mean_field else Triangular()), 0.0
        for seed in range(150):
            dim = 1 + seed % 5
            target = random_target(dim, seed, 0.5, 3.0)
            star = target.mean_field_optimum()[1] if mean_field else optimum(target)
            size = 10 ** (-2 + 3 * (seed % 7) / 7)
            m = target.mean + size * randn(dim, seed=seed + 1)
            C = scale.kept(star + size * randn(dim, dim, seed=seed + 2))
            C = scale.projected(C, 3.0**-0.5)
            distance2 = float((m - target.mean).square().sum() + (C - star).square().sum())
            L, S = float(torch.linalg.eigvalsh(target.precision)[-1]), spectral(C) * spectral(star)
            fisher4 = float(target.fisher_hyvarinen_4(target.mean, star)) if mean_field else 0.0
            mode2 = float(star.square().sum())
            for delta in DELTAS:
                alpha, beta = landing_bound(L, S, dim, fisher4, delta, mean_field=mean_field)
                ratio = float(target.landing_moment(scale, m, C)) / (alpha * distance2 + beta)
                assert ratio <= 1
                worst = max(worst, ratio)
                alpha, beta = closed_entropy_bound(L, 3.0, dim, mode2, delta, mean_field=mean_field)
                assert float(target.closed_entropy_moment(scale, m, C)) <= alpha * distance2 + beta
        assert worst > (0.05 if mean_field else 0.3)

    @pytest.mark.parametrize(("dim", "limit"), [(1, 15.98), (2, 19.98), (5, 31.97), (10, 51.95)])
    @pytest.mark.parametrize("name", ["triangular", "dense"])
    def test_the_constant_is_attained(self, name, dim, limit):
        # P10: N(0, I/L), C = I with ε added to the last entry: E|g|²/ε² -> 4L²(d + k)
        C = eye(dim)
        C[-1, -1] += 1e-3
        target = GaussianTarget(torch.zeros(dim, dtype=F64), eye(dim))
        ratio = float(target.landing_moment(SCALES[name], target.mean, C)) / 1e-6
        assert ratio == pytest.approx(limit, abs=0.01)
        assert ratio <= landing_variance(1.0, dim, 0.0).alpha == 4 * (dim + 3)

    def test_the_printed_constant_fails(self):
        # Theorem 1 with S²(d + 1): 12 at d = L = S = 1 as δ -> 0, where 16 is attained
        target = GaussianTarget(torch.zeros(1, dtype=F64), eye(1))
        C = eye(1) + 1e-6
        ratio = float(target.landing_moment(Triangular(), target.mean, C)) / 1e-12
        assert ratio == pytest.approx(16, rel=1e-4)
        printed = 2 * (1 * (1 + 3) + 1 * (1 + 1))
        assert printed == 12 < ratio <= landing_bound(1.0, 1.0, 1, 0.0, 1e-3).alpha

    @pytest.mark.parametrize("n", [1, 10, 100])
    def test_no_constant_holds_on_the_triangular_domain(self, n):
        # d = 3, N(0, I), C_21 = C_32 = n: n² + 8, in print a constant; with the effective S it holds
        target = GaussianTarget(torch.zeros(3, dtype=F64), eye(3))
        C = eye(3)
        C[1, 0] = C[2, 1] = n
        ratio = float(target.landing_moment(Triangular(), target.mean, C)) / (2 * n**2)
        assert ratio == pytest.approx(n**2 + 8)
        bound = landing_bound(1.0, spectral(C), 3, 0.0, 1e-6)
        assert ratio <= bound.alpha
        flat = eye(2)
        flat[1, 0] = n
        target = GaussianTarget(torch.zeros(2, dtype=F64), eye(2))
        assert float(target.landing_moment(Triangular(), target.mean, flat)) / n**2 == pytest.approx(7)

    def test_one_step_from_there_leads_away(self):
        # γ = 1/48: E|λ - λ*|² grows by 434.99 before the projection and about 326.5 after it, against 0.979
        n, gamma = 1000.0, 1 / 48
        assert 1 / (2 * landing_variance(1.0, 3, 0.0).alpha) == gamma
        target, C = GaussianTarget(torch.zeros(3, dtype=F64), eye(3)), eye(3)
        C[1, 0] = C[2, 1] = n
        gradient, distance2 = target.gradient(Triangular(), target.mean, C), 2 * n**2
        product = ((C - eye(3)) * gradient.scale).sum()
        moment = target.landing_moment(Triangular(), target.mean, C)
        assert float(1 - 2 * gamma * product / distance2 + gamma**2 * moment / distance2) == pytest.approx(
            434.99, abs=5e-3
        )
        q = CholeskyGaussian(3, (200_000,), scale=C.expand(200_000, 3, 3))
        BBVI(q, gamma, 1.0, estimator=PathDerivative(fixed(0)), step_size=Constant()).step(LogJoint(target.log_joint))
        after = (q.mean.square().sum(-1) + (q.scale_tril - eye(3)).square().sum((-2, -1))) / distance2
        assert abs(float(after.mean()) - 326.5) < z_bound(1) * float(after.std()) / math.sqrt(200_000)
        assert float(after.mean()) > 100 * (1 - gamma)

    def test_the_printed_lower_bound_fails(self):
        # the construction of the unimprovability theorem at d = 5, L = 10: 313.6 < 394; at d = 1 it is 0
        def exact(d, L):
            precision = torch.diag(torch.tensor([L] + [1 / L] * (d - 1), dtype=F64))
            target = GaussianTarget(torch.zeros(d, dtype=F64), precision)
            return float(target.landing_moment(Unrestricted(), target.mean, L**-0.5 * eye(d)))

        printed = (10**2 * (5 + 3) - 2 * (5 + 1)) * 5 / 10
        assert exact(5, 10.0) == pytest.approx(4 * 8 * 10 * (1 - 1e-2) ** 2) == pytest.approx(313.6, abs=0.05)
        assert printed == 394 > exact(5, 10.0)
        assert exact(1, 10.0) == pytest.approx(0, abs=1e-12)

    def test_constants_of_the_complexities(self):
        landing, closed = landing_variance(2.0, 5, 9.0), closed_entropy_variance(2.0, 5, 3.0)
        assert landing == (4 * 4 * 8, 13 * 3, 0.5)
        assert closed == (4 * 12, 4 * 8 * 3, 1.0)
        wide = 6 * math.sqrt(5) + 1
        assert landing_variance(2.0, 5, 9.0, mean_field=True) == pytest.approx((16 * wide, (1 + 15**0.5) * 3, 0.5))
        assert closed_entropy_variance(2.0, 5, 3.0, mean_field=True) == pytest.approx((4 * (wide + 4), 4 * wide * 3, 1))
        # they are the bounds at S = L, with β of print
        for delta in DELTAS:
            own, bound = landing.at(delta), landing_bound(2.0, 2.0, 5, 9.0, delta)
            assert own.alpha == pytest.approx(bound.alpha)
            assert own.beta == pytest.approx(bound.beta * 13 / 8)
            own, bound = closed.at(delta), closed_entropy_bound(2.0, 2.0, 5, 3.0, delta)
            assert own.alpha >= bound.alpha
            assert own.beta == pytest.approx(bound.beta)
        with pytest.raises(InputError, match="L must be positive and finite; got -1"):
            landing_variance(-1.0, 2, 0.0)
        with pytest.raises(InputError, match=r"kurtosis is E u⁴ for E u² = 1 and must be at least 1, finite; got 0\.5"):
            closed_entropy_variance(1.0, 2, 0.0, kurtosis=0.5)
        with pytest.raises(InputError, match=r"fisher4 must be 0 or larger, and finite; got -1\.0"):
            landing_bound(1.0, 1.0, 2, -1.0, 0.1)


class TestRates:
    def worst(self, variance, mu, steps, delta2):
        r, path = delta2, []
        for gamma in steps:
            r = (1 - 2 * gamma * mu + gamma**2 * variance.alpha) * r + gamma**2 * variance.beta
            path.append(r)
        return path

    @pytest.mark.parametrize("alpha", [1.0, 20.0, 300.0])
    @pytest.mark.parametrize("beta", [0.0, 0.5, 50.0])
    def test_the_fixed_step(self, alpha, beta):
        # P14: the bound along the worst recursion, its floor, and ε after T steps
        variance, mu, eps, delta2 = QuadraticVariance(alpha, beta), 0.7, 0.05, 3.0
        for gamma in (mu / (2 * alpha), 0.1 * mu / alpha):
            path = self.worst(variance, mu, [gamma] * 400, delta2)
            assert all(r <= variance.fixed_bound(mu, gamma, t + 1, delta2) * (1 + 1e-12) for t, r in enumerate(path))
            floor = gamma * beta / (2 * mu - gamma * alpha)
            assert floor <= 2 / 3 * gamma * beta / mu + 1e-15
        gamma, T = variance.fixed_step(mu, eps), variance.fixed_iterations(mu, eps, delta2)
        assert self.worst(variance, mu, [gamma] * T, delta2)[-1] <= eps
        largest = max(4 * beta / (mu**2 * eps), 2 * alpha / mu**2, 0.5)
        assert math.ceil(largest * math.log(2 * delta2 / eps)) == T
        gentle = QuadraticVariance(0.01, 0.0)  # α < μ²/4, of no stochastic gradient: the third branch
        assert gentle.fixed_step(mu, eps) == AdaptiveVariance(0.01, 0.0, 1.0).fixed_step(mu, eps) == 2 / mu
        assert gentle.fixed_iterations(mu, eps, delta2) == math.ceil(0.5 * math.log(2 * delta2 / eps))
        with pytest.raises(InputError, match=r"gamma must be at most μ/\(2α\)"):
            variance.fixed_bound(mu, mu / alpha, 3, delta2)

    @pytest.mark.sparse(4)
    @pytest.mark.parametrize("alpha", [1.0, 20.0, 100.0])
    @pytest.mark.parametrize("beta", [0.0, 0.5, 50.0])
    def test_the_two_stage_step(self, alpha, beta):
        # P15; 64α/μ² in the place of 64α²/μ⁴ fails
        variance, mu, eps, delta2 = QuadraticVariance(alpha, beta), 0.7, 0.05, 3.0
        T = variance.two_stage_iterations(mu, eps, delta2)
        path = self.worst(variance, mu, [variance.two_stage_step(mu, t) for t in range(T)], delta2)
        assert path[-1] <= eps
        ratios = [r / variance.two_stage_bound(mu, t + 1, delta2) for t, r in enumerate(path)]
        assert max(ratios) < 0.19
        if (alpha, beta) == (100.0, 0.0):
            assert max(r / (64 * alpha / mu**2 * delta2 / (t + 1) ** 2) for t, r in enumerate(path)) > 3

    def test_the_constants_of_the_bounds(self):
        variance = QuadraticVariance(2.0, 3.0)
        assert variance.two_stage_bound(2.0, 10, 5.0) == pytest.approx(64 * 4 * 5 / (16 * 100) + 16 * 3 / (4 * 10))
        assert variance.fixed_bound(2.0, 0.25, 3, 5.0) == pytest.approx(0.5**3 * 5 + 2 * 0.25 * 3 / 2)
        assert closed_entropy_bound(2.0, 3.0, 5, 1.5, 0.5) == pytest.approx((4 * 8 * 1.5 + 25, 4 * 8 * 3 * 1.5))
        assert landing_bound(2.0, 3.0, 5, 9.0, 0.5) == pytest.approx((2.5 * 8 * 13, 5 * 8 * 3))
        wide = 6 * math.sqrt(5) + 1
        own = closed_entropy_bound(2.0, 3.0, 5, 1.5, 0.5, mean_field=True)
        assert own == pytest.approx((4 * wide * 1.5 + 25, 4 * wide * 3 * 1.5))
        own = landing_bound(2.0, 3.0, 5, 9.0, 0.5, mean_field=True)
        assert own == pytest.approx((2.5 * wide * 13, 5 * (1 + math.sqrt(15)) * 3))

    def test_the_switch(self):
        variance = QuadraticVariance(20.0, 1.0)
        steps = [variance.two_stage_step(0.7, t) for t in range(1000)]
        first = next(t for t, step in enumerate(steps) if step < steps[0])
        assert first == pytest.approx(8 * 20 / 0.7**2, rel=0.01)

    def test_both_branches_of_the_two_stage_step(self):
        # μ/(2α) up to the switch; then (4t + 2)/(μ(t + 1)²) = (2/μ)(1 - (t/(t + 1))²), which falls as 4/(μt)
        variance = QuadraticVariance(4.0, 1.0)
        assert [variance.two_stage_step(2.0, t) for t in (0, 1, 6)] == [0.25, 0.25, 0.25]
        assert [variance.two_stage_step(2.0, t) for t in (7, 9)] == pytest.approx([30 / 128, 38 / 200], rel=1e-14)
        for t in (10, 100):
            assert variance.two_stage_step(0.7, 100 * t) == pytest.approx(
                2 / 0.7 * (1 - (100 * t / (100 * t + 1)) ** 2)
            )
        assert 1e6 * variance.two_stage_step(0.7, 10**6) == pytest.approx(4 / 0.7, rel=1e-5)

    def test_the_adaptive_fixed_step(self):
        variance, mu, eps, delta2 = AdaptiveVariance(20.0, 0.3, 0.5), 0.7, 0.01, 3.0
        best = variance.fixed_slack(eps)
        alpha, beta = variance.at(best)
        assert 4 * beta / (mu**2 * eps) == pytest.approx(2 * alpha / mu**2)  # both arguments of the maximum
        assert variance.fixed_step(mu, eps) == pytest.approx(variance.at(best).fixed_step(mu, eps))
        counts = [variance.at(best * factor).fixed_iterations(mu, eps, delta2) for factor in (0.3, 0.9, 1.1, 3.0)]
        assert variance.fixed_iterations(mu, eps, delta2) == variance.at(best).fixed_iterations(mu, eps, delta2)
        assert min(counts) > variance.fixed_iterations(mu, eps, delta2)
        # sticking the landing: δ* = √D_F4 (2d + k)/(ε L² (d + k)), without the factor 4 of print
        assert landing_variance(2.0, 5, 9.0).fixed_slack(eps) == pytest.approx(3 / (4 * eps) * 13 / 8)
        assert closed_entropy_variance(2.0, 5, 3.0).fixed_slack(eps) == pytest.approx(2 / eps * 8 / 12 * 3)

    def test_the_adaptive_two_stage_step(self):
        variance, mu, eps, delta2 = AdaptiveVariance(20.0, 0.3, 0.5), 0.7, 0.01, 3.0
        best, Delta = variance.two_stage_slack(eps, delta2), math.sqrt(delta2)

        def count(slack):
            alpha, beta = variance.at(slack)
            return 16 * beta / (mu**2 * eps) + 8 * alpha * Delta / (mu**2 * math.sqrt(eps))

        assert min(count(best * 1.01**k) for k in range(-200, 201)) == pytest.approx(count(best), rel=1e-12)
        expected = (
            16 * 0.3 / (mu**2 * eps)
            + 16 * math.sqrt(2) / mu**2 * math.sqrt(20 * 0.3 * Delta) * eps**-0.75
            + 8 * 20 * Delta / (mu**2 * math.sqrt(eps))
        )
        assert count(best) == pytest.approx(expected)
        assert variance.two_stage_iterations(mu, eps, delta2) == math.ceil(expected)
        branch = mu / (2 * 20 + 2 * math.sqrt(2) * math.sqrt(20 * 0.3 / Delta) * eps**-0.25)
        assert variance.two_stage_step(mu, eps, delta2, 0) == pytest.approx(branch)
        # the printed branch vanishes with β̃, this one does not
        printed = mu / (2 * 20 + math.sqrt(2 * Delta) * eps**0.25 * 20**1.5 * 1e-12**-0.5)
        assert printed < 1e-4
        assert AdaptiveVariance(20.0, 1e-12, 0.5).two_stage_step(mu, eps, delta2, 0) == pytest.approx(mu / 40, rel=1e-4)

    def test_without_misspecification(self):
        variance = landing_variance(4.0, 5, 0.0)
        step, T = variance.fixed_step(1.0, 1e-6), variance.fixed_iterations(1.0, 1e-6, 5.8659)
        assert step == pytest.approx(1 / (8 * 16 * 8)) == pytest.approx(9.7656e-4, abs=5e-9)
        assert T == 16_669
        assert variance.at(variance.fixed_slack(0.1)) == (512.0, 0.0)
        assert variance.two_stage_iterations(1.0, 0.01, 4.0) == math.ceil(32 * 16 * 8 * 2 / 0.1)
        # counts grow with κ, d, 1/ε and D_F4
        base = landing_variance(2.0, 3, 1.0).fixed_iterations(1.0, 0.1, 3.0)
        for L, dim, fisher4, eps in ((3.0, 3, 1.0, 0.1), (2.0, 4, 1.0, 0.1), (2.0, 3, 2.0, 0.1), (2.0, 3, 1.0, 0.05)):
            assert landing_variance(L, dim, fisher4).fixed_iterations(1.0, eps, 3.0) > base


class TestRules:
    @pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
    @pytest.mark.parametrize(("kind", "scale"), [(CholeskyGaussian, Triangular()), (DiagonalGaussian, MeanField())])
    def test_projected_steps(self, kind, scale, batch):
        target, rho, floor = random_target(3, 7), 0.3, 0.5
        q = kind(3, batch, mean=randn(*batch, 3, seed=1), scale=torch.ones(3, dtype=F64))
        e = Reparametrized(fixed(0))(q, LogJoint(target.log_joint))
        gradient, (mean, C) = q.euclidean(e), (q.mean.clone(), q.scale_tril.clone())
        NaturalGradientVI(
            q, ProjectedRootGradient(floor), rho, estimator=Reparametrized(fixed(0)), step_size=Constant()
        ).step(LogJoint(target.log_joint))
        close(q.mean, mean - rho * gradient.vector, EXACT)
        free = C - rho * q.structure.to_dense(gradient.matrix)
        for one, image in zip(free.reshape(-1, 3, 3), q.scale_tril.reshape(-1, 3, 3), strict=True):
            close(image, scale.projected(one, floor), EXACT)
        if batch == (2, 3):
            assert bool((free.diagonal(dim1=-2, dim2=-1) < floor).any())  # the floor was felt

    @pytest.mark.parametrize("kind", [CholeskyGaussian, DiagonalGaussian])
    @pytest.mark.parametrize("gamma", [1.0, 0.5])
    def test_proximal_steps(self, kind, gamma):
        # C'_ii minimises -ργ log c + ½(c - x)²: c - x = ργ/c
        target, rho = random_target(3, 7), 2.0
        q = kind(3, (2,), mean=randn(2, 3, seed=1), scale=torch.ones(3, dtype=F64))
        log_joint = LogJoint(target.log_joint, gamma)
        e = Reparametrized(fixed(0))(q, log_joint)
        gradient, C = q.structure.to_dense(q.euclidean(e).matrix), q.scale_tril.clone()
        x = C - rho * (gradient + torch.diag_embed(gamma / C.diagonal(dim1=-2, dim2=-1)))  # without the entropy
        NaturalGradientVI(
            q, ProximalRootGradient(), rho, estimator=Reparametrized(fixed(0)), step_size=Constant()
        ).step(log_joint)
        new, old = (part.diagonal(dim1=-2, dim2=-1) for part in (q.scale_tril, x))
        close(new - old, rho * gamma / new, 1e-11)
        close(q.scale_tril.tril(-1), x.tril(-1), EXACT)

    def test_projected_steps_of_the_symmetric_root(self):
        target, rho = random_target(3, 7), 0.05
        q = CholeskyGaussian(3, mean=randn(3, seed=1), scale=random_root((), 2))
        values, vectors = torch.linalg.eigh(q.covariance)
        R = vectors @ torch.diag(values.sqrt()) @ vectors.mT
        model = GeneralizedLinear(torch.linalg.cholesky(target.precision).mT, torch.zeros(3), "gaussian")
        G = model.X.mT @ model.X + eye(3) - torch.linalg.inv(q.covariance)
        free = R - 0.5 * rho * (G @ R + R @ G)
        sizes = torch.linalg.eigvalsh(free)
        floor = float(0.5 * (sizes[0] + sizes[1]))  # clips one of three
        expected = SquareRoot().projected(free, floor)
        NaturalGradientVI(q, ProjectedSquareRoot(floor), rho, estimator=Quadrature(), step_size=Constant()).step(model)
        close(q.covariance, expected @ expected, IDENTITY)
        # the same gradient as that of the draws
        exact = GaussianTarget(torch.zeros(3, dtype=F64), model.X.mT @ model.X + eye(3)).gradient(SquareRoot(), R[0], R)
        close(exact.scale, 0.5 * (G @ R + R @ G), IDENTITY)

    @pytest.mark.parametrize("kind", [CholeskyGaussian, DiagonalGaussian])
    def test_the_methods_are_these_rules(self, kind):
        # the floor is 1/√L; one draw that sticks the landing, or one without the entropy
        torch.manual_seed(0)  # one draw in some hundreds is so near the mean that the step ends above the floor
        target = LogJoint(lambda theta: -50 * theta.square().sum(-1))
        q = kind(2, dtype=F64)
        opt = BBVI(q, 1.0, smoothness=16.0, step_size=Constant())
        opt.step(target)
        assert float(q.scale_tril.diagonal().min()) == 0.25
        proximal = ProximalBBVI(kind(2), 0.1, step_size=Constant())
        assert (type(opt.estimator), opt.estimator.draws.num_samples) == (PathDerivative, 1)
        assert (type(proximal.estimator), proximal.estimator.draws.num_samples) == (Reparametrized, 1)
        assert isinstance(proximal.rule, ProximalRootGradient)

    def test_a_curvature_that_is_not_finite_leaves_the_cone(self):
        q = CholeskyGaussian(2, dtype=F64)
        packet = Framed(torch.zeros(2, dtype=F64), torch.full((2, 2), math.nan, dtype=F64))
        e = Expectation(torch.zeros((), dtype=F64), packet, 1.0, True, Cost(1, 1))
        move = ProjectedSquareRoot(0.1)(q, e).at(torch.tensor(0.1, dtype=F64))
        assert not bool(q.moved(move)[1])

    def test_a_step_that_is_not_finite_is_not_taken(self):
        q = CholeskyGaussian(2, (2,), dtype=F64)
        target = LogJoint(lambda theta: -theta.square().sum(-1) * torch.tensor([1.0, math.nan]).double())
        for rule in (ProjectedSquareRoot(0.1), ProjectedRootGradient(0.1), ProximalRootGradient()):
            opt = NaturalGradientVI(q, rule, 0.1, estimator=PathDerivative(fixed(0)), step_size=Constant())
            with pytest.warns(UserWarning, match="was not taken|not finite"):
                opt.step(target)
            assert opt.state[q.mean_probe]["rejections"].tolist() == [0, 1]


def test_documentation():
    """The snippet of docs/bbvi.md runs as it stands, but for the number of its steps."""
    text = (pathlib.Path(__file__).parents[2] / "docs/bbvi.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "range(1000)" in snippet
    scope: dict = {}
    exec(compile(snippet.replace("range(1000)", "range(300)"), "docs/bbvi.md", "exec"), scope)
    close(scope["q"].mean, torch.ones(5, dtype=F64), 1e-3)
