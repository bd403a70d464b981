"""Products fitted by messages: CAVI to rounding where they are exact, near the truth where they are not."""

import math

import pytest
import torch
from helpers import seeded, vec
from torch.distributions import HalfCauchy, Normal

from torchngvi import NGVI, CholeskyGaussian, fit
from torchngvi.errors import InputError
from torchngvi.fitting import Evaluations
from torchngvi.fitting.coordinate_sweeps import CoordinateSweeps
from torchngvi.models import FactorGraph, SiteFactor
from torchngvi.posteriors import Product
from torchngvi.posteriors.flat import Categorical, Dirichlet, Gamma

DTYPE = torch.float64


Y = vec(0.3, -1.2, 2.0, 0.7, -0.1)
KAPPA, A0, B0 = 0.5, 1.5, 0.7


def normal_gamma():
    """y ~ N(μ, 1/τ), μ ~ N(0, 1/(κτ)), τ ~ Gamma(a0, b0)."""
    q = Product(mu=CholeskyGaussian(1, dtype=DTYPE), tau=Gamma(vec(1.0, 1.0)))
    factors = [
        SiteFactor(lambda m, t: Normal(m, t.rsqrt()).log_prob(Y), "mu", "tau", plates=(5,)),
        SiteFactor(lambda m, t: Normal(0.0, (KAPPA * t).rsqrt()).log_prob(m), "mu", "tau"),
        SiteFactor(lambda t: torch.distributions.Gamma(vec(A0)[0], B0).log_prob(t), "tau"),
    ]
    return q, FactorGraph(factors)


def counts_of(rows, columns, seed=5):
    return torch.poisson(torch.full((rows, columns), 2.0, dtype=DTYPE), generator=seeded(seed))


def gamma_poisson(y):
    """y_ij ~ Poisson(θ_i β_j), all Gamma(2, 1)."""
    rows, columns = y.shape
    q = Product(
        theta=Gamma(vec(3.0, 1.0).expand(rows, 1, 2).contiguous()), beta=Gamma(vec(1.0, 2.0).expand(columns, 2))
    )
    prior = torch.distributions.Gamma(vec(2.0)[0], 1.0)
    factors = [
        SiteFactor(lambda t, b: torch.distributions.Poisson(t * b).log_prob(y), "theta", "beta"),
        SiteFactor(prior.log_prob, "theta"),
        SiteFactor(prior.log_prob, "beta"),
    ]
    return q, FactorGraph(factors)


class TestEachSweepIsCavi:
    def test_normal_with_mean_and_precision(self):
        """Bishop 10.1.3: m = Σy/(n + κ), s = (n + κ) E τ, a = a0 + (n + 1)/2, b = b0 + ½ E[Σ(y - μ)² + κμ²]."""
        (q, graph), n, expected, seen = normal_gamma(), 5, 1.0, []

        def compare(record):
            nonlocal expected
            m, s = float(Y.sum() / (n + KAPPA)), (n + KAPPA) * expected
            a = A0 + (n + 1) / 2
            b = B0 + 0.5 * float((Y - m).square().sum() + n / s + KAPPA * (m**2 + 1 / s))
            expected = a / b
            assert q["mu"].mean.item() == pytest.approx(m, rel=1e-10)
            assert q["mu"].precision.item() == pytest.approx(s, rel=1e-10)
            assert torch.allclose(q["tau"].vector, vec(a, b), rtol=1e-10)
            seen.append(record.loss)

        result = fit(q, graph, callbacks=[compare], progress=False)
        assert result.converged
        assert len(seen) > 4
        assert all(after <= before + 1e-12 for before, after in zip(seen, seen[1:], strict=False))
        assert result.loss <= seen[-1] + 1e-12

    def test_counts_of_a_product_of_rates(self):
        y = counts_of(6, 4)
        (q, graph), b = gamma_poisson(y), vec(1.0, 2.0).expand(4, 2)
        sweeps = 0

        def compare(record):
            nonlocal b, sweeps
            t = torch.stack([2 + y.sum(1), 1 + (b[:, 0] / b[:, 1]).sum().expand(6)], -1)
            b = torch.stack([2 + y.sum(0), 1 + (t[:, 0] / t[:, 1]).sum().expand(4)], -1)
            assert torch.allclose(q["theta"].vector[:, 0], t, rtol=1e-10)
            assert torch.allclose(q["beta"].vector, b, rtol=1e-10)
            sweeps += 1

        assert fit(q, graph, callbacks=[compare], stop=Evaluations(15), progress=False).evaluations == sweeps == 15

    def test_the_loss_is_minus_the_bound(self):
        """Against draws of log p - log q, and against the evidence where the posterior is a product."""
        q, graph = normal_gamma()
        result = fit(q, graph, progress=False)
        x = q.sample(100_000, seeded())
        h = graph.value_at(x, q) - q.log_prob(x)
        assert abs(-result.loss - h.mean().item()) < 5 * h.std().item() / math.sqrt(len(h))
        rate = Product(rate=Gamma(vec(1.0, 1.0)))
        prior = Gamma(vec(2.0, 2.0))
        factors = [
            SiteFactor(lambda r: torch.distributions.Poisson(r).log_prob(vec(3.0)[0]), "rate"),
            SiteFactor(lambda r: prior.log_prob(r[..., None]), "rate"),
        ]
        evidence = (rate["rate"].at(vec(5.0, 3.0)).log_partition() - prior.log_partition() - math.lgamma(4)).item()
        assert fit(rate, FactorGraph(factors), progress=False).loss == pytest.approx(-evidence, rel=1e-12)

    def test_a_mixture_with_classes(self):
        """Rows of two classes with known rates: responsibilities and Dirichlet counts (Bishop 10.2)."""
        y, rates = vec(0.0, 1.0, 9.0, 12.0, 8.0), vec(1.0, 10.0)
        q = Product(shares=Dirichlet(vec(1.0, 1.0)), z=Categorical(torch.zeros(5, 1, dtype=DTYPE)))

        def class_of(shares, z):
            return torch.where(z == 0, shares[..., 0].log(), shares[..., 1].log())

        def row(z):
            return torch.distributions.Poisson(rates[z.long()]).log_prob(y)

        result = fit(
            q,
            FactorGraph(
                [
                    SiteFactor(class_of, "shares", "z"),
                    SiteFactor(row, "z"),
                    SiteFactor(lambda x: torch.distributions.Dirichlet(vec(2.0, 2.0)).log_prob(x), "shares"),
                ]
            ),
            progress=False,
        )
        r = q["z"].probabilities
        alpha = 2 + r.sum(0)
        logs = torch.distributions.Poisson(rates).log_prob(y[:, None]) + torch.digamma(alpha)
        assert result.converged
        assert torch.allclose(q["shares"].vector, alpha, rtol=1e-4)
        assert torch.allclose(r, logs.softmax(-1), rtol=1e-4)


class TestNotConjugate:
    @pytest.mark.accuracy
    def test_a_half_cauchy_scale(self):
        """θ_i ~ N(0, s²) with s half-Cauchy: q(s) is near the best gamma law, found by fixed-point steps on a grid."""
        torch.manual_seed(0)
        theta = torch.linspace(-2.0, 2.0, 12, dtype=DTYPE)
        q = Product(s=Gamma(vec(2.0, 2.0)))
        graph = FactorGraph(
            [
                SiteFactor(lambda s: Normal(0.0, s).log_prob(theta), "s", plates=(12,)),
                SiteFactor(HalfCauchy(torch.tensor(1.0, dtype=DTYPE)).log_prob, "s"),
            ]
        )
        result = fit(q, graph, max_evaluations=150, progress=False)
        assert not result.converged
        assert "stochastic steps" in result.reason or "budget" in result.reason
        other = Gamma(vec(2.0, 2.0))

        def log_joint(x):
            return Normal(0.0, x).log_prob(theta).sum(-1) + HalfCauchy(torch.tensor(1.0, dtype=DTYPE)).log_prob(
                x[..., 0]
            )

        for k in range(60):
            NGVI(other, lr=(1 + k) ** -0.6).step(log_joint)
        assert torch.allclose(q["s"].mean, other.mean, rtol=0.02)
        assert torch.allclose(q["s"].stddev, other.stddev, rtol=0.1)
        assert result.values > 0

    def test_only_the_site_that_is_not_conjugate_has_noise(self):
        """The precision under a half-normal factor is estimated, and the mean moves by a whole step."""
        torch.manual_seed(0)
        q = Product(mu=CholeskyGaussian(1, dtype=DTYPE), tau=Gamma(vec(1.0, 1.0)))
        factors = [
            SiteFactor(lambda m, t: Normal(m, t.rsqrt()).log_prob(Y), "mu", "tau", plates=(5,)),
            SiteFactor(lambda m: Normal(0.0, 1.0).log_prob(m), "mu"),
            SiteFactor(lambda t: -t.square(), "tau"),
        ]
        before = q["tau"].mean.item()
        fit(q, FactorGraph(factors), max_evaluations=1, progress=False)
        assert q["mu"].precision.item() == pytest.approx(1 + 5 * before, rel=1e-10)

    @pytest.mark.accuracy
    def test_a_long_step_stays_inside(self):
        torch.manual_seed(0)
        q = Product(x=Gamma(vec(0.2, 2.0)))
        steep = SiteFactor(lambda x: -20 * x.log() - 17 / x.square() - torch.log1p(x.square()), "x")
        fit(q, FactorGraph([steep]), max_evaluations=400, progress=False)
        assert torch.allclose(q["x"].mean, vec(1.338), atol=0.03)


class TestLocalsAndBatches:
    COUNTS = torch.poisson(torch.full((12, 4), 3.0, dtype=DTYPE), generator=seeded(3))

    def factors(self, y, scale=1.0):
        prior = torch.distributions.Gamma(vec(2.0)[0], 1.0)
        return [
            SiteFactor(lambda t, b: torch.distributions.Poisson(t * b).log_prob(y), "theta", "beta", scale=scale),
            SiteFactor(prior.log_prob, "theta", scale=scale),
            SiteFactor(prior.log_prob, "beta"),
        ]

    def product(self, rows):
        return Product(
            theta=Gamma(torch.ones(rows, 1, 2, dtype=DTYPE)), beta=Gamma(vec(3.0, 1.0).expand(4, 2).contiguous())
        )

    def test_locals_that_are_solved_lead_to_the_same_end(self):
        q, other = self.product(12), self.product(12)
        graph = FactorGraph(self.factors(self.COUNTS), local=["theta"])
        one = fit(q, graph, progress=False, max_evaluations=3000, tolerance=1e-4)
        two = fit(other, FactorGraph(self.factors(self.COUNTS)), progress=False, max_evaluations=3000, tolerance=1e-4)
        assert one.converged
        assert two.converged
        assert one.loss == pytest.approx(two.loss, abs=1e-4)

    def test_a_step_on_a_batch(self):
        """β' = (1 - γ)β + γ(prior + N/B Σ_batch), θ of the batch solved first; with one local site in one sweep."""
        batches = self.COUNTS.split(3)
        q = self.product(3)
        graph = FactorGraph(lambda y: self.factors(y, scale=4.0), local=["theta"], batches=batches)
        beta, mean = q["beta"].vector.clone(), 3.0
        result = fit(q, graph, progress=False, max_evaluations=1)
        y = batches[0]
        theta = torch.stack([2 + y.sum(1), torch.full((3,), 1 + 4 * mean, dtype=DTYPE)], -1)
        assert torch.allclose(q["theta"].vector[:, 0], theta, rtol=1e-10)
        target = torch.stack([2 + 4 * y.sum(0), 1 + 4 * (theta[:, 0] / theta[:, 1]).sum().expand(4)], -1)
        gamma = 10**-0.7
        assert torch.allclose(q["beta"].vector, (1 - gamma) * beta + gamma * target, rtol=1e-10)
        assert not result.converged

    @pytest.mark.accuracy
    def test_batches_come_near_to_all_rows(self):
        q, whole = self.product(3), self.product(12)
        graph = FactorGraph(lambda y: self.factors(y, scale=4.0), local=["theta"], batches=self.COUNTS.split(3))
        result = fit(q, graph, progress=False, max_evaluations=150)
        assert not result.converged
        fit(whole, FactorGraph(self.factors(self.COUNTS)), progress=False)
        shares = [p["beta"].mean / p["beta"].mean.sum() for p in (q, whole)]
        assert torch.allclose(*shares, rtol=0.03)

    @pytest.mark.accuracy
    def test_a_checkpoint_goes_on(self, tmp_path):
        """Two runs of ten steps are one of twenty, bit for bit, with draws and batches."""

        def make():
            def factors(y):
                return [*self.factors(y, scale=4.0), SiteFactor(lambda b: -b.square(), "beta")]

            return self.product(3), FactorGraph(factors, local=["theta"], batches=self.COUNTS.split(3))

        torch.manual_seed(1)
        q, graph = make()
        whole = fit(q, graph, progress=False, max_evaluations=20)
        torch.manual_seed(1)
        for steps in (10, 20):
            other, graph = make()
            parts = fit(other, graph, progress=False, max_evaluations=steps, checkpoint=tmp_path / "run")
        assert torch.equal(q["beta"].vector, other["beta"].vector)
        assert [record.loss for record in parts.trace] == [record.loss for record in whole.trace]


class TestAcceleration:
    """Anderson in log η: the same end in fewer sweeps, and never a worse one."""

    def test_the_same_end_sooner(self):
        results = []
        for memory in (0, 2):
            q, graph = gamma_poisson(counts_of(8, 6))
            graph.memory = memory
            results.append(fit(q, graph, progress=False, tolerance=1e-6, max_evaluations=5000))
        plain, quick = results
        assert plain.converged
        assert quick.converged
        assert quick.loss == pytest.approx(plain.loss, abs=1e-9)
        assert quick.evaluations < 0.5 * plain.evaluations

    def test_a_rise_goes_back_to_the_best(self):
        """A memory that points to the wrong place: the next loss is that of a plain sweep from the best point."""
        q, graph = gamma_poisson(counts_of(8, 6))
        graph.memory = 2
        engine = CoordinateSweeps(q, graph, 1e-6)
        for _ in range(3):
            engine.advance()
        best = engine.anderson.best
        q["theta"].vector[..., 1].mul_(50.0)
        standing = engine.advance()
        assert standing.record.rejections == 1
        assert standing.record.loss <= best


class TestRefusals:
    def test_no_prior(self):
        q = Product(x=Gamma(vec(1.0, 1.0)))
        with pytest.raises(InputError, match="messages to the site 'x' add up to no Gamma: a and b are positive is"):
            fit(q, FactorGraph([SiteFactor(lambda x: 2 * x.log() + x, "x")]), progress=False)
        assert q["x"].vector.tolist() == [1.0, 1.0]
