"""The theory of Kumar et al. (2025) as properties of random problems.

Corrected statements hold on every problem; printed ones that are false are shown to fail.  L is convex
with ∇²ℓ between δ and M; norm² = |a|² + ½‖P‖²_F is the squared natural norm.  Batches of problems run
as batches of posteriors.
"""

import math

import pytest
import reference
import torch
from helpers import DTYPE, EXACT, IDENTITY, close, every, framed_packet, randn, random_root, vec

from examples.papers import kumar2025_steps as theory
from torchngvi import CholeskyGaussian, GeneralizedLinear, NaturalGaussian, fit, rules
from torchngvi.adapters.flows import natural_gradient_flow
from torchngvi.diagnostics import Extremes
from torchngvi.expectations import Quadrature
from torchngvi.interfaces import Raw
from torchngvi.numerics.gaussian_integrals import softplus
from torchngvi.optim import NaturalGradientVI
from torchngvi.stepsizes import Constant

SRVN, VN = rules.NaturalGradient, rules.VariationalNewton


class Problems:
    """A batch of B regressions in D dimensions with their bounds δ, M and their optimal values L*."""

    def __init__(self, family, dim, count=60, rows=8, seed=0, gamma=1.0, spread=1.0, precision=0.5):
        X = spread * randn(count, rows, dim, seed=seed)
        y = randn(count, rows, seed=seed + 1)
        y = (y > 0).to(DTYPE) if family == "bernoulli_logit" else y
        if family == "bernoulli_logit":
            y[:, 0], y[:, 1] = 0.0, 1.0
        self.model = GeneralizedLinear(X, y, family, prior_precision=precision, temperature=gamma)
        gram = torch.linalg.eigvalsh(X.mT @ X)
        curvature = (0.0, 0.25) if family == "bernoulli_logit" else (1.0, 1.0)
        self.delta = curvature[0] * gram[:, 0].clamp_min(0) + gamma * precision
        self.M = curvature[1] * gram[:, -1] + gamma * precision
        self.gamma, self.dim, self.count, self.seed = gamma, dim, count, seed

    def start(self, scale=1.0):
        """Random means and roots."""
        mean, root = (
            randn(self.count, self.dim, seed=self.seed + 3),
            random_root((self.count,), self.seed + 2, self.dim),
        )
        return CholeskyGaussian(self.dim, (self.count,), mean=mean, scale=scale * root)

    def optimum(self):
        q = CholeskyGaussian(self.dim, (self.count,), dtype=DTYPE)
        result = fit(q, self.model, tolerance=1e-8, progress=False)
        assert result.converged
        return q

    def packet(self, q):
        return Quadrature()(q, self.model)

    @torch.no_grad()
    def loss(self, q):
        return self.model.negative_elbo(q)

    def norm2(self, q):
        return q.norm2(q.local(self.packet(q)))


def eigenvalues(q):
    """λ_min and λ_max of V."""
    values = torch.linalg.svdvals(q.scale_tril).square()
    return values[..., -1], values[..., 0]


def stepped(q, rule, e, rho):
    """A new posterior one step on."""
    new, ok = q.moved(rule(q, e).at(rho))
    assert bool(ok.all())
    return CholeskyGaussian(q.dim, q.batch_shape, mean=new.vector, scale=new.matrix)


def apart_by(q, other):
    """The largest difference of means and covariances."""
    return float(max((q.mean - other.mean).abs().max(), (q.covariance - other.covariance).abs().max()))


def positive_diagonal(q, e, rho):
    """ρ (W_ii - γ) < 2 for all i: SR-VN's printed diagonal stays positive."""
    return (rho * q.local(e).P.diagonal(dim1=-2, dim2=-1).amax(-1)) < 2


FAMILIES = ["bernoulli_logit", "gaussian"]
families = pytest.mark.parametrize("family", FAMILIES)
dims = pytest.mark.parametrize("dim", [1, 2, 4])
gammas = pytest.mark.parametrize("gamma", [0.3, 1.0, 2.0])


class TestConvexity:
    """Section 3.6: E_q[ℓ] is convex in (m, C); in which other coordinates it is, and is not."""

    @staticmethod
    def energy(mean, variance):
        """E_q[log(1 + e^-θ)], one data point x = y = 1."""
        return float(softplus(vec(-mean), vec(variance)).value)

    @classmethod
    def excess(cls, moments, first, second):
        """At the midpoint minus the average of the ends; positive means not convex."""
        middle = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
        ends = cls.energy(*moments(*first)) + cls.energy(*moments(*second))
        return cls.energy(*moments(*middle)) - ends / 2

    @pytest.mark.parametrize(
        ("moments", "first", "second", "expected"),
        [
            (lambda m, v: (m, v), (0.0, 0.1), (0.0, 9.9), 0.06564),
            (lambda a, b: (-a / (2 * b), -1 / (2 * b)), (0.3, -0.03), (-5.7, -0.19), 4.62512),
            (lambda a, b: (a, b - a * a), (1.5, 19.5), (0.5, 0.5), 0.12255),
        ],
        ids=["mean_covariance", "natural", "expectation"],
    )
    def test_where_the_expected_loss_is_not_convex(self, moments, first, second, expected):
        assert self.excess(moments, first, second) == pytest.approx(expected, abs=5e-6)

    def test_where_the_objective_is_not_convex_in_the_precision(self):
        """Through + ½ log S of the negative entropy."""

        def loss(S):
            return self.energy(0.0, 1 / S) + 0.5 * math.log(S)

        assert loss(5.5) - (loss(1.0) + loss(10.0)) / 2 == pytest.approx(0.23634, abs=5e-6)

    @families
    @dims
    def test_midpoints(self, family, dim):
        """E_q[ℓ] and L in (m, C); E_q[ℓ] also in (m, S), which the paper denies."""
        problems = Problems(family, dim, count=300, seed=5)
        first, second = problems.start(), problems.start(2.0)
        second.initialize_(second.mean.roll(1, 0), second.scale_tril.roll(1, 0))

        def values(mean, root):
            q = CholeskyGaussian(dim, (300,), mean=mean, scale=root)
            return problems.packet(q).value, problems.loss(q)

        mean = (first.mean + second.mean) / 2
        ends = [values(q.mean, q.scale_tril) for q in (first, second)]
        middle = values(mean, (first.scale_tril + second.scale_tril) / 2)
        for part in (0, 1):
            assert bool((middle[part] <= (ends[0][part] + ends[1][part]) / 2 + 1e-12).all())
        precision = (first.precision + second.precision) / 2
        middle = values(mean, torch.linalg.cholesky(torch.linalg.inv(precision)))
        assert bool((middle[0] <= (ends[0][0] + ends[1][0]) / 2 + 1e-12).all())

    @families
    def test_strong_convexity_and_smoothness(self, family):
        """E_q[ℓ] - ½δ|(m, C)|² is convex and ½M|(m, C)|² - E_q[ℓ] too; L is not M-smooth (A3 holds for f alone)."""
        problems = Problems(family, 3, count=300, seed=9)
        first, second = problems.start(), problems.start(0.3)
        mean, root = (first.mean + second.mean) / 2, (first.scale_tril + second.scale_tril) / 2
        middle = CholeskyGaussian(3, (300,), mean=mean, scale=root)
        distance2 = (first.mean - second.mean).square().sum(-1)
        distance2 = distance2 + (first.scale_tril - second.scale_tril).square().sum((-2, -1))
        f, L = lambda q: problems.packet(q).value, problems.loss
        sag = (f(first) + f(second)) / 2 - f(middle)
        assert bool((sag >= problems.delta * distance2 / 8 - 1e-12).all())
        assert bool((sag <= problems.M * distance2 / 8 + 1e-12).all())
        second.initialize_(first.mean, 0.01 * first.scale_tril)
        middle.initialize_(first.mean, 0.505 * first.scale_tril)
        distance2 = (0.99 * first.scale_tril).square().sum((-2, -1))
        sag = (L(first) + L(second)) / 2 - L(middle)
        assert float((sag > problems.M * distance2 / 8).to(DTYPE).mean()) > 0.5


def lower_entries(dim):
    """Rows and columns of vech, column by column."""
    columns, rows = torch.triu_indices(dim, dim)
    return rows, columns


class TestLemma1:
    """λ_min/2 ≤ F⁻¹ ≤ ξ_u² in (m, C); printed with min(λ_min, λ_min²/2)."""

    @staticmethod
    def matrices(dim):
        """L that keeps the lower triangle, and N = ½(K + I), acting on matrices stacked by columns."""
        rows, columns = lower_entries(dim)
        eye = torch.eye(dim * dim, dtype=DTYPE)
        swap = eye.reshape(dim, dim, dim * dim).transpose(0, 1).reshape(dim * dim, -1).contiguous()
        return eye[columns * dim + rows], 0.5 * (swap + eye)

    @pytest.mark.parametrize("dim", [1, 2, 3])
    @pytest.mark.parametrize("seed", range(3))
    def test_the_fisher_matrix(self, dim, seed):
        """F_C = 2 L (I ⊗ C⁻ᵀ) N (I ⊗ C⁻¹) Lᵀ and its inverse (Eqs 40, 41), against autograd; L N Lᵀ has ½ and 1."""
        C, m = random_root((), seed, dim), randn(dim, seed=seed)
        L, N = self.matrices(dim)
        inverse, eye = torch.linalg.inv(C).contiguous(), torch.eye(dim, dtype=DTYPE)
        F = 2 * L @ torch.kron(eye, inverse.mT.contiguous()) @ N @ torch.kron(eye, inverse) @ L.mT
        coordinates = reference.COORDINATES["mean_root"]
        expected = reference.fisher(coordinates, coordinates.flat(m, C @ C.mT))
        close(expected[:dim, :dim], torch.linalg.inv(C @ C.mT), IDENTITY)
        close(F, expected[dim:, dim:], IDENTITY)
        half = L @ torch.kron(eye, C)
        close(
            half @ L.mT @ torch.linalg.inv(L @ N @ L.mT) @ L @ torch.kron(eye, C.mT.contiguous()) @ L.mT / 2,
            torch.linalg.inv(F),
            IDENTITY,
        )
        values = torch.linalg.eigvalsh(L @ N @ L.mT)
        assert bool(((values - 0.5).abs() < EXACT).logical_or((values - 1).abs() < EXACT).all())

    @staticmethod
    def spectrum(C):
        """Eigenvalues of F_C⁻¹, whose columns are vech(C tril½[CᵀE]) for the unit matrices E."""
        dim = C.shape[-1]
        rows, columns = lower_entries(dim)
        unit = torch.zeros(len(rows), dim, dim, dtype=DTYPE)
        unit[torch.arange(len(rows)), rows, columns] = 1
        action = C[:, None] @ CholeskyGaussian(dim).structure.tril_half(C.mT[:, None] @ unit)
        inverse = action[..., rows, columns]
        return torch.linalg.eigvalsh(0.5 * (inverse + inverse.mT)), float((inverse - inverse.mT).abs().max())

    @pytest.mark.parametrize("dim", [1, 2, 3])
    @pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
    def test_bounds(self, dim, scale):
        C = scale * random_root((300,), 7, dim)
        values, asymmetry = self.spectrum(C)
        V = torch.linalg.svdvals(C).square()
        assert asymmetry < EXACT * scale**2 * 10
        assert bool((values[:, -1] <= C.square().sum((-2, -1)) * (1 + EXACT)).all())
        assert bool((values[:, 0] >= V[:, -1] / 2 * (1 - EXACT)).all())
        if dim == 1:
            close(values, V / 2, IDENTITY)

    def test_the_printed_lower_bound_fails(self):
        """V near 1.3 I: nearly every root is a counter-example."""
        C = math.sqrt(1.3) * torch.eye(3, dtype=DTYPE) + 0.01 * randn(2000, 3, 3, seed=3).tril()
        values, _ = self.spectrum(C)
        smallest = torch.linalg.svdvals(C)[:, -1].square()
        printed = torch.minimum(smallest, smallest**2 / 2)
        assert float((values[:, 0] < printed).to(DTYPE).mean()) > 0.99

    @pytest.mark.parametrize("dim", [1, 3])
    def test_the_norm_in_closed_form(self, dim):
        """vech(G)ᵀ F_C⁻¹ vech(G) = tr(Gᵀ C tril½[CᵀG]) = ½‖CᵀG‖² for a symmetric CᵀG = P."""
        C, P = random_root((50,), 5, dim), randn(50, dim, dim, seed=6)
        P = P + P.mT
        G = torch.linalg.solve(C.mT, P)
        half = CholeskyGaussian(dim).structure.tril_half(P)
        close((G * (C @ half)).sum((-2, -1)), 0.5 * P.square().sum((-2, -1)), IDENTITY)


class TestLemma2:
    """norm² ≥ δ λ_min(V) (L - L*): μ = δλ_min/2 in norm² ≥ 2μ(L - L*)."""

    @pytest.mark.sparse(7)
    @families
    @dims
    @gammas
    @pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
    def test_pointwise(self, family, dim, gamma, scale):
        problems = Problems(family, dim, seed=11, gamma=gamma)
        q = problems.start(scale)
        gap = problems.loss(q) - problems.loss(problems.optimum())
        bound = problems.delta * eigenvalues(q)[0] * gap
        assert bool((gap > 0).all())
        assert bool((problems.norm2(q) >= bound * (1 - 1e-9)).all())

    def test_the_printed_constant_fails(self):
        """μ = δ min(λ_min, λ_min²/2) at d = 1, ℓ = ¼θ², V = 8: ½(r - 1)² against r(r - 1 - log r), r = 4."""
        a, V = 0.5, 8.0
        r = a * V
        norm2, gap = 0.5 * (r - 1) ** 2, 0.5 * (r - 1 - math.log(r))
        assert norm2 >= a * V * gap
        assert norm2 < 2 * a * min(V, V**2 / 2) * gap
        q = CholeskyGaussian(1, scale=math.sqrt(V), dtype=DTYPE)
        packet = framed_packet(torch.zeros(1, dtype=DTYPE), vec([r]))
        close(q.norm2(q.local(packet)), torch.tensor(norm2, dtype=DTYPE), EXACT)


class TestTheorem1:
    """Along the flow (15): dL/dt = -norm², gap ≤ e^{-2μt} gap_0, and e^{2μt} gap decreases (Eq 46)."""

    TIMES = [0.05 * i for i in range(81)]

    @pytest.mark.sparse(3)
    @families
    @pytest.mark.parametrize("scale", [0.3, 2.0])
    def test_the_rate(self, family, scale):
        problems = Problems(family, 3, count=8, seed=13)
        flow = natural_gradient_flow(problems.start(scale), problems.model, self.TIMES)
        gap = flow.loss - problems.loss(problems.optimum())
        mu = problems.delta * torch.linalg.eigvalsh(flow.covariance)[..., 0].amin(0) / 2
        lyapunov = torch.exp(2 * mu * flow.times[:, None]) * gap
        assert bool((gap > 0).all())
        assert bool((gap <= torch.exp(-2 * mu * flow.times[:, None]) * gap[0] * (1 + 1e-9)).all())
        assert bool((lyapunov.diff(dim=0) < 1e-9 * lyapunov[0]).all())

    @families
    def test_dissipation(self, family):
        problems = Problems(family, 3, count=8, seed=13)
        for t in (0.1, 1.0):
            h = 2e-3
            flow = natural_gradient_flow(problems.start(), problems.model, [t - 2 * h, t - h, t, t + h, t + 2 * h])
            slope = (flow.loss[0] - 8 * flow.loss[1] + 8 * flow.loss[3] - flow.loss[4]) / (12 * h)
            root = torch.linalg.cholesky(flow.covariance[2])
            q = CholeskyGaussian(3, (8,), mean=flow.mean[2], scale=root)
            close(slope, -problems.norm2(q), 1e-5)

    @pytest.mark.sparse(2)
    @gammas
    def test_a_priori_bounds_on_the_precision(self, gamma):
        """min(λ_min(S_0), δ/γ) ≤ S_t ≤ max(λ_max(S_0), M/γ)."""
        problems = Problems("bernoulli_logit", 3, count=8, seed=17, gamma=gamma, spread=2.0)
        q = problems.start(0.5)
        flow = natural_gradient_flow(q, problems.model, [0.5, 1.0, 3.0, 8.0], "precision")
        S = torch.linalg.eigvalsh(torch.linalg.inv(flow.covariance))
        smallest, largest = (1 / x for x in reversed(eigenvalues(q)))
        assert bool((S[..., 0] >= torch.minimum(smallest, problems.delta / gamma) * (1 - 1e-9)).all())
        assert bool((S[..., -1] <= torch.maximum(largest, problems.M / gamma) * (1 + 1e-9)).all())


class TestQuadratics:
    @pytest.mark.parametrize("kind", [CholeskyGaussian, NaturalGaussian])
    @gammas
    def test_vn(self, kind, gamma):
        """S_{t+1} = (1 - γρ)S_t + ρA and S_{t+1}(m_{t+1} - μ) = (1 - γρ)S_t(m_t - μ)."""
        problems = Problems("gaussian", 3, count=5, seed=19, gamma=gamma)
        X = problems.model.X
        A = X.mT @ X + gamma * 0.5 * torch.eye(3, dtype=DTYPE)
        mu = torch.linalg.solve(A, (X.mT @ problems.model.y[..., None]))
        start = problems.start()
        q, rho = kind(3, (5,), mean=start.mean, scale=start.scale_tril), 0.4 / gamma
        opt = NaturalGradientVI(q, SRVN() if kind is NaturalGaussian else VN(), lr=rho, step_size=Constant())
        for _ in range(4):
            S, m = q.precision.clone(), q.mean.clone()
            opt.step(problems.model)
            close(q.precision, (1 - gamma * rho) * S + rho * A, IDENTITY)
            close(q.precision @ (q.mean[..., None] - mu), (1 - gamma * rho) * S @ (m[..., None] - mu), IDENTITY)

    RATES = {  # of the mean and of V, a step of ρ from V = γ/a (section 2.1)
        VN: lambda a, rho, gamma: (1 - gamma * rho, 1 - gamma * rho),
        SRVN: lambda a, rho, gamma: (1 - gamma * rho, 1 - gamma * rho),
        rules.SymmetricRoot: lambda a, rho, gamma: (1 - gamma * rho, 1 - gamma * rho),
        rules.Retraction: lambda a, rho, gamma: (1 - gamma * rho, 1 - gamma * rho),
        rules.Geodesic: lambda a, rho, gamma: (1 - gamma * rho, 1 - gamma * rho),
        rules.BuresWasserstein: lambda a, rho, gamma: (1 - rho * a, 1 - 2 * rho * a),
        rules.CovarianceGradient: lambda a, rho, gamma: (1 - rho * a, 1 - rho * a**2 / (2 * gamma)),
        rules.RootGradient: lambda a, rho, gamma: (1 - rho * a, 1 - 2 * rho * a),
        rules.CenteredSVGD: lambda a, rho, gamma: (1 - rho * a, torch.ones_like(a) - 2 * gamma * rho),
        rules.SVGD: lambda a, rho, gamma: (1 - rho * a, torch.ones_like(a) - 2 * gamma * rho),  # where m* = 0
    }

    @pytest.mark.parametrize("rule", RATES, ids=lambda rule: rule.__name__)
    @gammas
    def test_local_rates(self, rule, gamma):
        """Diagonal A and perturbations; natural-gradient rates are free of A, the others are not."""
        a, rho, size = vec(0.3, 1.0, 4.0), 0.04, 1e-6
        variance = gamma / a
        q = CholeskyGaussian(3, mean=size * torch.ones_like(a), scale=(variance * (1 + size)).sqrt())
        e = framed_packet(a, torch.diag(a), gamma)._replace(derivative=Raw(a * q.mean, torch.diag(a)))
        after = stepped(q, rule(), e, every(rho, ()))
        mean_rate, rate = self.RATES[rule](a, rho, gamma)
        close(after.mean / size, torch.ones_like(a) * mean_rate, 1e-5)
        close((after.variance / variance - 1) / size, torch.ones_like(a) * rate, 1e-5)

    @pytest.mark.accuracy
    def test_figure_1b(self):
        """SR-VN and VN part by O(ρ) over a whole trajectory of length ρT = 3: 0.84 ρ, ℓ = ½(5θ₁² + ½θ₂²)."""
        A = torch.diag(vec(5.0, 0.5))

        def apart(rho):
            pair = [CholeskyGaussian(2, mean=1.0, dtype=DTYPE) for _ in range(2)]
            largest = 0.0
            for _ in range(round(3 / rho)):
                for q, rule in zip(pair, (SRVN(), VN()), strict=True):
                    e = framed_packet(q.mean, A)._replace(derivative=Raw(A @ q.mean, A))
                    new, ok = q.moved(rule(q, e).at(every(rho, ())))
                    q.assign(new, ok)
                largest = max(largest, apart_by(*pair))
            return largest / rho

        assert apart(1e-2) == pytest.approx(0.84, rel=0.05)
        assert apart(2e-3) == pytest.approx(0.84, rel=0.01)

    def test_bwgd_converges_exponentially_in_w2(self):
        """W2 to q* falls at every step, in the end by 1 - αδ (Lambert et al. 2022, without noise)."""
        A = torch.diag(vec(0.5, 2.0))
        q, alpha, distances = CholeskyGaussian(2, mean=2.0, scale=3.0, dtype=DTYPE), 0.2, []
        for _ in range(60):
            e = framed_packet(q.mean, A)._replace(derivative=Raw(A @ q.mean, A))
            new, ok = q.moved(rules.BuresWasserstein()(q, e).at(every(alpha, ())))
            q.assign(new, ok)
            # diagonal covariances: W2² = |m|² + Σ(√V - √V*)²
            distances.append(float((q.mean.square().sum() + (q.stddev - A.diagonal().rsqrt()).square().sum()).sqrt()))
        ratios = [b / a for a, b in zip(distances, distances[1:], strict=False)]
        assert max(ratios) < 1
        assert ratios[-1] == pytest.approx(1 - alpha * 0.5, abs=1e-3)


def sound_step(problems, q, rule=SRVN, share=0.2):
    """ρ = 1/(M_eff λ_max) with λ_min = share · λ_min(V), and where the next V respects that bound."""
    e = problems.packet(q)
    smallest, largest = eigenvalues(q)
    rho = torch.stack(
        [
            torch.tensor(theory.descent_step(float(M), share * float(lo), float(hi), problems.gamma), dtype=DTYPE)
            for M, lo, hi in zip(problems.M, smallest, largest, strict=True)
        ]
    )
    after = stepped(q, rule(), e, rho)
    return e, rho, after, positive_diagonal(q, e, rho) & (eigenvalues(after)[0] >= share * smallest)


class TestTheorem2:
    @pytest.mark.sparse(5)
    @families
    @dims
    @gammas
    def test_the_sound_form(self, family, dim, gamma):
        """ρ ≤ 1/(M_eff λ_max): L' ≤ L - ½ρ|a|² - ¼ρ‖P‖²_F, and the gap shrinks by 1 - ½ρδλ_min."""
        problems = Problems(family, dim, seed=23, gamma=gamma, spread=1.5)
        best = problems.loss(problems.optimum())
        held = 0
        for scale in (0.3, 1.0, 3.0):
            q = problems.start(scale)
            for _ in range(4):
                e, rho, after, applies = sound_step(problems, q)
                a, P = q.local(e)
                before, now = problems.loss(q), problems.loss(after)
                promised = 0.5 * rho * a.square().sum(-1) + 0.25 * rho * P.square().sum((-2, -1))
                fine = now <= before - promised + 1e-12 * before.abs()
                assert bool((fine | ~applies).all())
                ratio = (now - best) / (before - best)
                assert bool((ratio <= 1 - 0.5 * rho * problems.delta * eigenvalues(q)[0] + 1e-9)[applies].all())
                held += int(applies.sum())
                q = after
        assert held > 0.9 * 12 * problems.count

    def test_longer_steps_break_it(self):
        """The same inequality at 8 times that ρ fails somewhere: the bound is about the right size."""
        problems = Problems("gaussian", 2, seed=23)
        q = problems.start(3.0)
        e, rho, _, _ = sound_step(problems, q)
        a, P = q.local(e)
        new, ok = q.moved(SRVN()(q, e).at(8 * rho))
        after = CholeskyGaussian(q.dim, q.batch_shape, mean=new.vector, scale=new.matrix)
        promised = 4 * rho * a.square().sum(-1) + 2 * rho * P.square().sum((-2, -1))
        assert bool((problems.loss(after) > problems.loss(q) - promised)[ok].any())

    @staticmethod
    def constants(problems, q):
        """Per problem, of one posterior."""
        size = q.scale_tril.square().sum((-2, -1)).sqrt()
        return (problems.M, *eigenvalues(q), size)

    @families
    @dims
    def test_the_printed_form(self, family, dim):
        """Per-step ratio ≤ 1 - 2ηδ with constants of the path and ρ from Eq 55 with min (its proof is not sound)."""
        problems = Problems(family, dim, count=20, seed=29)
        best = problems.loss(problems.optimum())
        scale = (2 / (problems.M + problems.delta)).sqrt()  # A1: C_0 a multiple of I
        q = CholeskyGaussian(dim, (20,), mean=randn(20, dim, seed=4), scale=scale[:, None].expand(20, dim))
        smallest, largest = 1 / problems.M, 1 / problems.delta  # V stays between them, see below
        xi_l, xi_u = (dim * smallest).sqrt(), (dim * largest).sqrt()
        arguments = zip(problems.M, smallest, xi_u**2, xi_l, xi_u, strict=True)
        rho = vec(*(theory.theorem_2_step(*map(float, x)) for x in arguments))
        losses, seen = [problems.loss(q)], [self.constants(problems, q)]
        for _ in range(30):
            q = stepped(q, SRVN(), problems.packet(q), rho)
            losses.append(problems.loss(q))
            seen.append(self.constants(problems, q))
        M, low, high, size = (torch.stack(x) for x in zip(*seen, strict=True))
        assert bool((low >= smallest * (1 - 1e-9)).all())
        assert bool((high <= largest * (1 + 1e-9)).all())
        eta = vec(
            *(
                theory.theorem_2_descent(*map(float, x))
                for x in zip(rho, problems.M, low.amin(0), size.amin(0), size.amax(0), strict=True)
            )
        )
        gap = torch.stack(losses) - best
        assert bool((eta > 0).all())
        assert bool((2 * eta * problems.delta < 1).all())
        assert bool((gap[1:] <= (1 - 2 * eta * problems.delta) * gap[:-1] + 1e-12).all())

    @pytest.mark.parametrize("rho", [0.1, 0.5, 0.77])
    def test_equality(self, rho):
        """d = 1, quadratic, C_0 = C*: both sides are (1 - ρ)²."""
        a = 1.7
        q = CholeskyGaussian(1, mean=2.0, scale=a**-0.5, dtype=DTYPE)
        after = stepped(
            q, SRVN(), framed_packet(q.mean, vec([a]))._replace(derivative=Raw(a * q.mean, vec([a]))), every(rho, ())
        )
        ratio = float(after.mean / q.mean) ** 2
        eta = theory.theorem_2_descent(rho, a, 1 / a, a**-0.5, a**-0.5)
        assert ratio == pytest.approx((1 - rho) ** 2, abs=1e-14)
        assert 1 - 2 * eta * a == pytest.approx(ratio, abs=1e-14)

    def test_the_two_terms_of_eta(self):
        """By hand: 0.3 · 0.1 - 2 · 0.01 · 4/2 = -0.01 and √2.5 · 0.1 · 0.04 - 5/4 · 2 · 0.01 · 4."""
        assert theory.theorem_2_descent(0.1, 2.0, 0.3, 1.0, 2**0.5) == pytest.approx(-0.01)
        assert theory.theorem_2_descent(0.1, 2.0, 9.0, 0.2, 2**0.5) == pytest.approx(2.5**0.5 * 0.004 - 0.1)


class TestStepSizeOfTheory:
    """Eq 55 needs min; (56), (57) and (58) follow from it."""

    @staticmethod
    def random_constants(count=400):
        """Of random quadratics: M, λ_min, λ_max = ξ_u², ξ_l, ξ_u, δ, with 1/M ≤ V ≤ 1/δ and ‖C‖² = tr V."""
        constants = []
        for seed in range(count):
            d = 1 + seed % 5
            A = torch.exp(1.5 * randn(d, seed=seed))
            V0 = torch.full_like(A, float(1 / A.mean()))
            traces = torch.stack([V0.sum(), (1 / A).sum()])
            xi_l, xi_u = float(traces.min().sqrt()), float(traces.max().sqrt())
            lowest = float(torch.minimum(V0, 1 / A).min())
            constants.append((float(A.max()), lowest, xi_u**2, xi_l, xi_u, float(A.min())))
        return constants

    def test_min_always_descends_and_max_does_not(self):
        useless = 0
        for M, low, high, xi_l, xi_u, _ in self.random_constants():
            rho = theory.theorem_2_step(M, low, high, xi_l, xi_u)
            eta = theory.theorem_2_descent(rho, M, low, xi_l, xi_u)
            assert eta >= rho / 2 * min(low, math.sqrt(5 / 2) * xi_l**2) * (1 - 1e-12) > 0
            longest = max(low / (high**2 * M), math.sqrt(2 / 5) * xi_l**2 / (M * xi_u**4))
            useless += theory.theorem_2_descent(longest, M, low, xi_l, xi_u) <= 0
        assert useless > 0.3 * 400

    def test_56_and_57(self):
        """η ≤ min{λ_min²/(2λ_max²M), ξ_l⁴/(2Mξ_u⁴)}, the maxima of two parabolas; 2ηδ < 1 for every ρ."""
        for M, low, high, xi_l, xi_u, delta in self.random_constants():
            bounds = low**2 / (2 * high**2 * M), xi_l**4 / (2 * M * xi_u**4)
            step = theory.theorem_2_step(M, low, high, xi_l, xi_u)
            etas = [theory.theorem_2_descent(step * s, M, low, xi_l, xi_u) for s in (0.1, 0.5, 1.0, 2.0, 5.0)]
            assert max(etas) <= min(bounds) * (1 + 1e-12)
            assert all(2 * eta * delta < 1 + 1e-12 for eta in etas)
            assert (low / high) ** 2 * delta / M <= 1 + 1e-12
            assert (xi_l / xi_u) ** 4 * delta / M <= 1 + 1e-12

    def test_the_smoother_the_longer(self):
        steps = [theory.theorem_2_step(M, 0.5, 2.0, 1.0, 1.4) for M in (1.0, 2.0, 4.0)]
        assert steps[0] == pytest.approx(2 * steps[1]) == pytest.approx(4 * steps[2])
        assert [theory.descent_step(M, 0.5, 2.0) for M in (1.0, 2.0, 4.0)] == pytest.approx([1 / 6, 1 / 8, 1 / 12])
        assert theory.descent_step(4.0, 0.5, 2.0, temperature=0.0) == pytest.approx(1 / 8)

    def test_complexity(self):
        """Measured steps ≤ the bound (58) with the larger of the two cases; a step fewer is not enough for equality."""
        a, rho, gap = 1.7, 0.3, 1e-6
        eta = theory.theorem_2_descent(rho, a, 1 / a, a**-0.5, a**-0.5)
        bound = theory.iterations_to(gap, 1.0, 2 * eta * a)
        assert (1 - rho) ** (2 * bound) <= gap < (1 - rho) ** (2 * (bound - 1))
        # two terms of η: with each alone, and with the smaller
        M, low, xi_l, xi_u, delta = 4.0, 0.2, 0.9, 1.3, 0.5
        rates = [(delta / M) * low**2 / xi_u**4, (delta / M) * xi_l**4 / xi_u**4]
        counts = [theory.iterations_to(gap, 1.0, rate) for rate in rates]
        assert theory.iterations_to(gap, 1.0, min(rates)) == max(counts) > min(counts)

    @families
    def test_measured_iterations(self, family):
        problems = Problems(family, 2, count=10, seed=31)
        best = problems.loss(problems.optimum())
        q = problems.start()
        first = problems.loss(q) - best
        rates = []
        for _ in range(60):
            _, rho, q_next, applies = sound_step(problems, q)
            assert bool(applies.all())
            rates.append(0.5 * rho * problems.delta * eigenvalues(q)[0])
            q = q_next
        rate, gap = torch.stack(rates).amin(0), problems.loss(q) - best
        for g, start, r in zip(gap, first, rate, strict=True):
            assert theory.iterations_to(float(g), float(start), float(r)) >= 60


class TestTheorem3:
    """Biased oracles ĝ = g + b_g, Ĥ = H + b_H: descent up to ½ρ b_gᵀV b_g + ¼ρ ‖Cᵀb_H C‖²_F."""

    @pytest.mark.sparse(7)
    @families
    @dims
    @gammas
    @pytest.mark.parametrize("size", [0.01, 0.3, 3.0])
    def test_the_sound_form(self, family, dim, gamma, size):
        problems = Problems(family, dim, seed=37, gamma=gamma)
        q = problems.start(0.8)
        bias_g = size * randn(problems.count, dim, seed=38)
        bias_H = size * randn(problems.count, dim, dim, seed=39)
        bias_H = 0.5 * (bias_H + bias_H.mT)
        raw = problems.packet(q).derivative.raw()
        e = problems.packet(q)._replace(derivative=Raw(raw.g + bias_g, raw.H + bias_H))
        smallest, largest = eigenvalues(q)
        rho = 1 / ((problems.M + gamma / (0.2 * smallest)) * largest)
        new, ok = q.moved(SRVN()(q, e).at(rho))
        after = CholeskyGaussian(dim, q.batch_shape, mean=new.vector, scale=new.matrix)
        applies = ok & positive_diagonal(q, e, rho) & (eigenvalues(after)[0] >= 0.2 * smallest)
        a, P = q.local(problems.packet(q))
        C = q.scale_tril
        promised = 0.5 * rho * a.square().sum(-1) + 0.25 * rho * P.square().sum((-2, -1))
        pulled = (C.mT @ bias_g[..., None])[..., 0]
        bias = 0.5 * rho * pulled.square().sum(-1) + 0.25 * rho * (C.mT @ bias_H @ C).square().sum((-2, -1))
        before, now = problems.loss(q), problems.loss(after)
        assert bool((now <= before - promised + bias + 1e-12 * before.abs())[applies].all())
        assert float(applies.to(DTYPE).mean()) > (0.9 if size < 1 else 0.2)

    @pytest.mark.accuracy
    def test_a_run_ends_at_a_floor(self):
        """gap_t ≤ (1 - q)ᵗ gap_0 + e/q with a constant bias, and the floor shrinks with it."""
        problems = Problems("bernoulli_logit", 2, count=10, seed=41)
        best = problems.loss(problems.optimum())
        floors = []
        for size in (0.1, 0.01):
            q, bias = problems.start(), size * randn(10, 2, seed=42)
            for _ in range(400):
                raw = problems.packet(q).derivative.raw()
                smallest, largest = eigenvalues(q)
                rho = 1 / ((problems.M + 2 / smallest) * largest)
                q = stepped(q, SRVN(), problems.packet(q)._replace(derivative=Raw(raw.g + bias, raw.H)), rho)
            gap = problems.loss(q) - best
            smallest, largest = eigenvalues(q)
            rho = 1 / ((problems.M + 2 / smallest) * largest)
            pulled = (q.scale_tril.mT @ bias[..., None])[..., 0]
            floor = 0.5 * rho * pulled.square().sum(-1) / (0.5 * rho * problems.delta * smallest)
            assert bool((gap <= floor).all())
            floors.append(gap)
        assert bool((floors[1] < 0.02 * floors[0]).all())

    def test_the_printed_form_fails(self):
        """ω = ½Mρ²ξ_u⁴ - λ_min ρ < 0 wherever η > 0, so that bias would take q below the optimum."""
        a, rho, bias = 1.7, 0.3, 0.5
        low, xi = 1 / a, a**-0.5
        omega_m = 0.5 * a * rho**2 * xi**4 - low * rho
        omega_C = 1.25 * rho**2 * xi**4 * a - math.sqrt(5 / 2) * rho * xi**2
        assert theory.theorem_2_descent(rho, a, low, xi, xi) == pytest.approx(min(-omega_m, -omega_C))
        assert omega_m < 0
        # from the optimum itself: gap_0 = 0, and the biased step leaves it
        q = CholeskyGaussian(1, scale=xi, dtype=DTYPE)
        e = framed_packet(q.mean, vec([a]))._replace(derivative=Raw(vec(bias), vec([a])))
        gap = 0.5 * a * float(stepped(q, SRVN(), e, every(rho, ())).mean) ** 2
        assert gap > 0 > omega_m * bias**2
        assert gap <= 0.5 * rho * bias**2 / a + 1e-15  # the sound form


class TestRegions:
    @dims
    @gammas
    def test_diagonal_positivity_of_srvn(self, dim, gamma):
        """The printed C' has a positive diagonal iff ρ(W_ii - γ) < 2 for all i, and the step is taken where it has."""
        problems = Problems("bernoulli_logit", dim, count=200, seed=43, gamma=gamma, spread=3.0)
        q = problems.start(2.0)
        e, rho = problems.packet(q), every(0.25, (200,))
        change = SRVN()(q, e).at(rho).change.matrix
        printed = ((q.scale_tril + change).diagonal(dim1=-2, dim2=-1) > 0).all(-1)
        assert torch.equal(printed, positive_diagonal(q, e, rho))
        assert 0 < int(printed.sum()) < 200
        new, ok = q.moved(SRVN()(q, e).at(rho))
        assert torch.equal(ok, printed)  # a step that turns a sign is not taken
        assert bool((new.matrix.diagonal(dim1=-2, dim2=-1) > 0)[ok].all())

    @pytest.mark.sparse(5)
    @families
    @gammas
    @pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
    def test_vn_bounds_the_precision(self, family, gamma, share):
        """min(λ_min(S_0), δ/γ) ≤ S_t ≤ max(λ_max(S_0), M/γ) for 0 < γρ ≤ 1."""
        problems = Problems(family, 3, seed=47, gamma=gamma, spread=2.0)
        q = problems.start(0.5)
        smallest, largest = (1 / x for x in reversed(eigenvalues(q)))
        low = torch.minimum(smallest, problems.delta / gamma) * (1 - 1e-9)
        high = torch.maximum(largest, problems.M / gamma) * (1 + 1e-9)
        for _ in range(8):
            q = stepped(q, VN(), problems.packet(q), every(share / gamma, (problems.count,)))
            precision = [1 / x for x in reversed(eigenvalues(q))]
            assert bool((precision[0] >= low).all())
            assert bool((precision[1] <= high).all())

    @pytest.mark.accuracy
    @pytest.mark.parametrize("share", [0.2, 0.02])
    @families
    def test_srvn_stays_between_the_curvatures(self, family, share):
        """From V_0 = cI with c in [1/M, 1/δ]: 1/M ≤ V_t ≤ 1/δ up to O(ρ), γ = 1 (observed, not proved)."""
        problems = Problems(family, 3, seed=53, spread=1.5)
        eye, excess = torch.eye(3, dtype=DTYPE), 0.0
        rho = share * problems.delta / problems.M
        for c in (1 / problems.M, 1 / problems.delta):
            q = CholeskyGaussian(3, (60,), mean=randn(60, 3, seed=5), scale=c.sqrt()[:, None, None] * eye)
            for _ in range(round(8 / share)):
                q = stepped(q, SRVN(), problems.packet(q), rho)
                low, high = eigenvalues(q)
                assert bool((low >= (1 - 1e-9) / problems.M).all())
                excess = max(excess, float((high * problems.delta - 1).max()))
        # a quadratic, whose Hessian is δ at its softest, is left by tril½'s second-order term
        assert (0.1 * share > excess > 0.01 * share) if family == "gaussian" else excess < 1e-9

    def test_the_monitor(self):
        """ξ_l, ξ_u, λ_min, λ_max over a run, as a callback."""
        problems = Problems("bernoulli_logit", 3, count=4, seed=59)
        q = problems.start()
        seen, sizes, values = Extremes(q), [], []

        def record(_):
            sizes.append(q.scale_tril.square().sum((-2, -1)).sqrt())
            values.append(torch.stack(eigenvalues(q)))

        fit(q, problems.model, NaturalGradientVI(q, VN()), callbacks=[record, seen], progress=False)
        sizes, values = torch.stack(sizes), torch.stack(values)
        assert len(sizes) > 3
        expected = [sizes.min(), sizes.max(), values.min(), values.max()]
        close(vec(seen.xi_l, seen.xi_u, seen.lambda_min, seen.lambda_max), torch.stack(expected), EXACT)
        assert seen.lambda_max <= seen.xi_u**2


class TestTemperature:
    def test_hot(self):
        """γ → ∞: q tends to the prior, at the rate 1/γ."""
        X, y = randn(9, 3, seed=1), (randn(9, seed=2) > 0).to(DTYPE)
        y[:2] = vec(0.0, 1.0)
        prior = CholeskyGaussian(3, mean=vec(1.0, 0.0, -1.0), scale=0.5**0.5)
        distances = []
        for gamma in (1e2, 1e3, 1e4):
            model = GeneralizedLinear(X, y, prior_precision=2.0, prior_mean=prior.mean, temperature=gamma)
            q = CholeskyGaussian(3, dtype=DTYPE)
            fit(q, model, tolerance=1e-9 * gamma, progress=False)
            distances.append(apart_by(q, prior))
        assert distances[0] < 0.1
        for before, after in zip(distances, distances[1:], strict=False):
            assert 0.05 < after / before < 0.2

    def test_cold(self):
        """γ → 0: V/γ tends to H⁻¹ at the mode."""
        X, y = randn(9, 2, seed=1), (randn(9, seed=3) > 0).to(DTYPE)
        errors = []
        for gamma in (1e-1, 1e-2, 1e-3):
            # the prior keeps its weight: γ times precision is constant
            model = GeneralizedLinear(X, y, prior_precision=1 / gamma, temperature=gamma)
            q = CholeskyGaussian(2, dtype=DTYPE)
            assert fit(q, model, tolerance=1e-10, progress=False).converged
            theta = q.mean.detach()
            H = -torch.autograd.functional.hessian(lambda t, model=model: model.log_joint(t[None])[0], theta)
            errors.append(float((torch.linalg.inv(q.covariance) * gamma - H).norm() / H.norm()))
        assert errors[0] < 0.1
        for before, after in zip(errors, errors[1:], strict=False):
            assert 0.05 < after / before < 0.2

    @pytest.mark.accuracy
    @dims
    def test_variational_optimisation(self, dim):
        """γ = 0: min ℓ ≤ E_q[ℓ] for every q, and SR-VN contracts C to a point at the minimum."""
        problems = Problems("bernoulli_logit", dim, count=20, seed=61)
        mode = CholeskyGaussian(dim, (20,), scale=1e-9, dtype=DTYPE)
        q, sizes = problems.start(), [math.inf]
        for _ in range(60):  # Newton from a point
            raw = problems.packet(mode).derivative.raw()
            step = torch.linalg.solve(raw.H, raw.g[..., None])[..., 0]
            mode.initialize_(mode.mean - 0.5 * step, 1e-9)
        lowest = -problems.model.log_joint(mode.mean[None])[0]
        for _ in range(300):
            e = problems.packet(q)._replace(temperature=0.0)
            assert bool((e.value >= lowest - 1e-9).all())
            W = q.local(e).P
            rho = 1 / (1 + torch.linalg.eigvalsh(W)[..., -1])
            q = stepped(q, SRVN(), e, rho)
            sizes.append(float(q.scale_tril.square().sum((-2, -1)).max()))
        assert all(b < a for a, b in zip(sizes, sizes[1:], strict=False))
        assert sizes[-1] < 0.05 * sizes[1]
        gap = problems.packet(q).value - lowest
        assert bool((gap < problems.M * sizes[-1]).all())

    def test_least_squares_without_a_temperature(self):
        """A model of γ = 0 has no prior and no entropy: SR-VN ends at the least-squares point with C = 0."""
        X, y = randn(9, 3, seed=1), randn(9, seed=2)
        model = GeneralizedLinear(X, y, "gaussian", temperature=0.0)
        solution = torch.linalg.lstsq(X, y).solution
        lowest = float(-model.log_joint(solution[None])[0])
        q = CholeskyGaussian(3, scale=0.3, dtype=DTYPE)
        result = fit(q, model, NaturalGradientVI(q, SRVN()), tolerance=1e-6, progress=False)
        assert result.converged
        assert all(record.loss >= lowest - 1e-12 for record in result.trace)
        assert result.loss - lowest < 1e-5
        assert float(q.covariance.diagonal().max()) < 1e-5
        assert float((q.mean - solution).abs().max()) < 1e-5
