"""Natural-gradient VI on exponential families: conjugate updates to rounding, the theorem, and targets that are not."""

import math

import pytest
import torch
from helpers import seeded, vec
from torch.optim.lr_scheduler import LambdaLR

from torchngvi import NGVI, CholeskyGaussian, LogJoint, NaturalGradientVI, fit
from torchngvi.averaging import ExpectationAverage
from torchngvi.errors import PairError
from torchngvi.expectations import Hessian, StatisticRegression
from torchngvi.posteriors.flat import Beta, Categorical, Dirichlet, Gamma, InverseGamma, Poisson, Wishart
from torchngvi.rules import NaturalGradient
from torchngvi.stepsizes import KLRadius, theorem_schedule
from torchngvi.theory.wu2024 import gradient_variance, rate_bound

DTYPE = torch.float64


COUNTS, EXPOSURE = vec(3, 0, 7, 2), vec(1.0, 0.5, 2.0, 1.5)
NORMAL = vec(0.3, -1.2, 2.0, 0.7, -0.1)
VECTORS = torch.randn(6, 2, dtype=DTYPE, generator=seeded(1))
PRIOR = torch.eye(2, dtype=DTYPE)


def wishart_joint(theta):
    """Rows N(0, X⁻¹) and the prior with a = 2, B = ½I on X, stored as (X_11, X_21, X_22)."""
    a, b, c = theta.unbind(-1)
    X = torch.stack([torch.stack([a, b], -1), torch.stack([b, c], -1)], -2)
    data = 0.5 * len(VECTORS) * X.logdet() - 0.5 * torch.einsum("...ij,ni,nj->...", X, VECTORS, VECTORS)
    return data + 0.5 * X.logdet() - 0.5 * (a + c)


def wishart_posterior():
    B = 0.5 * (PRIOR + VECTORS.mT @ VECTORS)
    return torch.cat([vec(2 + len(VECTORS) / 2), vec(B[0, 0], B[1, 0], B[1, 1])])


def thinned(missed):
    """Five were seen of a Poisson(8) number, each with probability 0.3: log p(m + 5) + log C(m + 5, 5) + m log 0.7."""
    x = missed[..., 0] + 5
    number = x * math.log(8.0) - torch.lgamma(x + 1)
    return number + torch.lgamma(x + 1) - torch.lgamma(missed[..., 0] + 1) + missed[..., 0] * math.log(0.7)


CONJUGATE = {
    "Poisson counts": (
        lambda: Gamma(vec(1.0, 1.0)),
        lambda rate: (COUNTS * rate.log() - EXPOSURE * rate).sum(-1) + (rate.log() - 2 * rate)[..., 0],
        lambda: vec(2 + COUNTS.sum(), 2 + EXPOSURE.sum()),
    ),
    "a precision": (
        lambda: Gamma(vec(1.0, 1.0)),
        lambda tau: (0.5 * tau.log() - 0.5 * tau * NORMAL.square()).sum(-1) + (0.5 * tau.log() - tau)[..., 0],
        lambda: vec(1.5 + 2.5, 1 + 0.5 * NORMAL.square().sum()),
    ),
    "a variance": (
        lambda: InverseGamma(vec(4.0, 1.0)),
        lambda v: (-0.5 * v.log() - 0.5 * NORMAL.square() / v).sum(-1) + (-3 * v.log() - 1 / v)[..., 0],
        lambda: vec(2 + 2.5, 1 + 0.5 * NORMAL.square().sum()),
    ),
    "successes, of which there are none": (
        lambda: Beta(vec(1.0, 1.0)),
        lambda p: (9 * torch.log1p(-p))[..., 0],
        lambda: vec(1.0, 10.0),
    ),
    "classes, of which one is empty": (
        lambda: Dirichlet(vec(1.0, 1.0, 1.0)),
        lambda x: (x.log() * (vec(4.0, 0.0, 7.0) - 0.5)).sum(-1),
        lambda: vec(4.5, 0.5, 7.5),
    ),
    "normal vectors": (
        lambda: Wishart.of(torch.tensor(3.0), torch.eye(2, dtype=DTYPE)),
        wishart_joint,
        wishart_posterior,
    ),
    "any function of a class": (
        lambda: Categorical(vec(0.0, 0.0)),
        lambda k: torch.cos(k[..., 0]),
        lambda: vec(1 - math.cos(2), math.cos(1) - math.cos(2)),
    ),
    "counts that were missed": (lambda: Poisson(vec(0.0)), thinned, lambda: vec(math.log(8 * 0.7))),
}


@pytest.mark.parametrize("case", CONJUGATE)
def test_one_step_is_the_posterior(case):
    """η' = η + the fit, which is exact for a conjugate log joint with dim T + 2 draws and any of more."""
    make, log_joint, posterior = CONJUGATE[case]
    for draws in (None, make().size + 2):
        q, seed = make(), seeded(2)
        NGVI(q, lr=1.0, estimator=StatisticRegression(draws, seed)).step(log_joint)
        assert torch.allclose(q.vector, posterior(), rtol=1e-10, atol=1e-10)


def test_the_value_of_a_conjugate_log_joint_has_no_noise():
    """At the posterior the ELBO is log p(y), from five draws."""
    prior = Gamma(vec(2.0, 2.0))
    q = Gamma(vec(2 + COUNTS.sum(), 2 + EXPOSURE.sum()))

    def log_joint(rate):
        likelihood = torch.distributions.Poisson(EXPOSURE * rate).log_prob(COUNTS).sum(-1)
        return likelihood + prior.log_prob(rate)

    constant = (COUNTS * EXPOSURE.log() - torch.lgamma(COUNTS + 1)).sum()
    evidence = constant + (q.log_partition() - prior.log_partition()).detach()
    e = StatisticRegression(5, seeded())(q, LogJoint(log_joint))
    assert float(-e.value) == pytest.approx(evidence.item(), rel=1e-12)


def test_a_batch_is_its_members():
    data = torch.tensor([[1.0], [4.0], [30.0]], dtype=DTYPE)
    q = Gamma(torch.ones(3, 2, dtype=DTYPE))
    NGVI(q, lr=1.0).step(lambda rate: (data * rate.log() - 2 * rate)[..., 0])
    assert torch.allclose(q.vector, torch.cat([data + 1, torch.full_like(data, 2.0)], -1), rtol=1e-10)


def test_a_conjugate_pair_of_sites_is_cavi():
    """Normal data with unknown mean and precision: each sweep of two steps of γ = 1 is a sweep of CAVI (Bishop 10.1.3).

    q(μ) = N(m, 1/s), q(τ) = Gamma(a, b), with μ ~ N(0, 1/(κτ)), τ ~ Gamma(a₀, b₀).
    """
    y, n, kappa, a0, b0 = NORMAL, len(NORMAL), 0.5, 1.5, 0.7
    mu = CholeskyGaussian(1, dtype=DTYPE)
    tau = Gamma(vec(1.0, 1.0))
    m, s, b = 0.0, 1.0, 1.0
    a = a0 + (n + 1) / 2
    expected = 1.0
    for _ in range(5):
        rate = tau.mean.detach()
        NGVI(mu, lr=1.0, estimator=Hessian(2)).step(
            lambda theta, rate=rate: -0.5 * rate * ((y - theta).square().sum(-1) + kappa * theta[..., 0].square())
        )
        m, s = float(y.sum() / (n + kappa)), (n + kappa) * expected
        assert (mu.mean.item(), mu.precision.item()) == pytest.approx((m, s), rel=1e-10)
        squares = (y - mu.mean).square().sum() + n * mu.variance + kappa * (mu.mean.square() + mu.variance)
        squares = squares.detach()
        NGVI(tau, lr=1.0).step(
            lambda t, squares=squares: (
                ((n + 1) / 2 * t.log() - 0.5 * t * squares)[..., 0] + ((a0 - 1) * t.log() - b0 * t)[..., 0]
            )
        )
        b = b0 + 0.5 * float((y - m).square().sum() + n / s + kappa * (m**2 + 1 / s))
        expected = a / b
        assert torch.allclose(tau.vector, vec(a, b), rtol=1e-10)


class TestTheorem:
    """E KL(q̄_{T+1}‖q*) ≤ 4V/(T + 2), where V/(T + 2) is printed (Wu and Gardner 2024, Theorem 1)."""

    RUNS, STEPS, ROWS, BATCH, SEEN = 400, 60, 60, 3, (0, 3, 10, 59)

    def problem(self, name):
        """Rows of statistics t_i, the prior η, a start, and the log joint of a batch of rows a run."""
        if name == "gamma":
            data = torch.poisson(torch.full((self.ROWS,), 3.0, dtype=DTYPE), generator=seeded(5))
            rows, prior, start = torch.stack([data, torch.ones_like(data)], -1), vec(1.0, 1.0), Gamma
        else:
            chosen = torch.multinomial(vec(0.1, 0.2, 0.3, 0.4), self.ROWS, True, generator=seeded(5))
            rows, prior, start = torch.nn.functional.one_hot(chosen, 4).to(DTYPE), torch.ones(4, dtype=DTYPE), Dirichlet
        return rows, prior, start

    @pytest.mark.accuracy
    @pytest.mark.parametrize("name", ["gamma", "dirichlet"])
    def test_the_rate(self, name):
        rows, prior, family = self.problem(name)
        generator, scale = seeded(7), self.ROWS / self.BATCH
        star, one = family(prior + rows.sum(0)), family(prior)
        q = family(prior.expand(self.RUNS, -1).contiguous())
        opt, average = NGVI(q, lr=1.0), ExpectationAverage(q)
        schedule = LambdaLR(opt, theorem_schedule)
        V, errors = 0.0, {}
        for T in range(self.STEPS):
            taken = rows[torch.randint(self.ROWS, (self.RUNS, self.BATCH), generator=generator)].sum(-2)
            coefficients = prior + one.base_coefficients() + scale * taken  # of T in the log joint, (runs, D)
            gamma, before = opt.param_groups[0]["lr"], q.vector.clone()
            opt.step(lambda theta, c=coefficients: (q.statistics(theta) * c).sum(-1))
            assert torch.allclose(q.vector, (1 - gamma) * before + gamma * (prior + scale * taken), rtol=1e-8)
            exact = q.at((1 - gamma) * before + gamma * star.vector)
            V = max(V, gradient_variance(q, exact, gamma).item())
            schedule.step()
            average.update(q)
            if T in self.SEEN:
                errors[T] = average.posterior().kl(star).mean().item()
        assert all(error <= rate_bound(V, T) for T, error in errors.items())
        if name == "dirichlet":
            assert errors[0] > V / 2  # the bound as it is printed

    def test_an_average_is_of_expectations(self):
        q = Gamma(vec(2.0, 1.0))
        average = ExpectationAverage(q)
        average.update(q)
        first = q.expectation().detach()
        other = q.at(vec(5.0, 3.0))
        average.update(other)  # weights 1 and 2
        assert torch.allclose(average.posterior().expectation(), (first + 2 * other.expectation()) / 3, rtol=1e-12)
        restored = ExpectationAverage(q)
        restored.load_state_dict(average.state_dict())
        assert torch.equal(restored.posterior().vector, average.posterior().vector)
        with pytest.raises(PairError, match="follows a Gamma of shape .2,.; got a InverseGamma"):
            average.update(InverseGamma(vec(5.0, 3.0)))


class TestNotConjugate:
    """A log joint that is no member: f = -20 log x - 17/x² - log(1 + x²) on a gamma law."""

    @staticmethod
    def log_joint(x):
        return (-20 * x.log() - 17 / x.square() - torch.log1p(x.square()))[..., 0]

    def test_long_steps_stay_inside(self):
        """From (0.2, 2) the plain step of γ = 1 leaves the domain; a limit in Fisher length and the factor do not."""
        q = Gamma(vec(0.2, 2.0))
        opt = NaturalGradientVI(
            q, NaturalGradient(), 1.0, step_size=KLRadius(0.245), estimator=StatisticRegression(200, seeded())
        )
        for _ in range(100):
            opt.step(self.log_joint)
        assert opt.rejections == 0
        assert torch.allclose(q.mean, vec(1.338), atol=0.02)

    def test_regression_has_less_noise_than_the_score(self):
        """Root mean square error in the Fisher norm, 32 draws, -½(log x - 1)² at Gamma(3, 2): .076, and .54."""
        q = Gamma(torch.tensor([[3.0, 2.0]], dtype=DTYPE).expand(2000, 2))
        target = LogJoint(lambda x: (-0.5 * (x.log() - 1).square())[..., 0], 0.0)
        fine = Gamma(vec(3.0, 2.0))
        exact = -fine.exact_fisher_solve(StatisticRegression(400_000, seeded(3))(fine, target).derivative.a)
        fitted = -q.exact_fisher_solve(StatisticRegression(32, seeded(4))(q, target).derivative.a)
        theta = q.sample(32, seeded(5))
        score = q.exact_fisher_solve((q.score(theta) * target.log_joint(theta)[..., None]).mean(0))

        def error(estimate):
            away = estimate - exact
            return (away * fine.fisher_product(away)).sum(-1).mean().sqrt().item()

        assert error(fitted) == pytest.approx(0.076, rel=0.1)
        assert error(score) > 5 * error(fitted)


def test_a_class_that_does_not_vary_is_left_alone():
    """All counts drawn are 0 for a tiny rate: there is nothing to fit, and nothing is changed."""
    q = Poisson(vec(-60.0))
    NGVI(q, lr=1.0, estimator=StatisticRegression(8, seeded())).step(lambda x: x[..., 0])
    assert q.vector.item() == -60.0


def test_fit_needs_no_learning_rate():
    torch.manual_seed(0)
    q = Gamma(vec(1.0, 1.0))
    result = fit(q, CONJUGATE["Poisson counts"][1], progress=False)
    assert torch.allclose(q.vector, vec(14.0, 7.0), rtol=1e-6)
    assert result.converged


class TestFit:
    """`fit` of a family without an optimizer."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("classes", [5, 100])
    def test_a_conjugate_log_joint_takes_no_steps(self, dtype, classes):
        counts = torch.arange(classes, dtype=dtype)
        q = Dirichlet(torch.ones(classes, dtype=dtype))
        torch.manual_seed(0)
        result = fit(q, lambda x: (x.log() * counts).sum(-1), progress=False)
        assert result.converged
        assert result.evaluations == 3  # in a row, with a small norm
        assert torch.allclose(q.vector, counts + 1, rtol=1e-4 if dtype == torch.float32 else 1e-9)

    def test_one_that_is_nearly_so_is_not_taken_for_one(self):
        target = LogJoint(lambda x: (3 * x.log() - x - 1e-3 * x.square())[..., 0])
        q = Gamma(vec(4.0, 1.0))
        vector, found, draws = StatisticRegression(generator=seeded()).conjugate(q, target)
        assert (bool(found), draws) == (False, 32)
        assert torch.allclose(vector, vec(4.0, 1.0), rtol=0.03)

    def test_values_that_are_not_finite(self):
        result = fit(Gamma(vec(1.0, 1.0)), lambda x: (x * math.nan)[..., 0], progress=False)
        assert (result.converged, result.evaluations) == (False, 1)
        assert "not finite at some of its draws. It has to be on the whole support of q" in result.reason

    @pytest.mark.accuracy
    def test_a_log_joint_without_an_optimum(self):
        result = fit(Gamma(vec(1.0, 1.0)), lambda x: x[..., 0], progress=False)
        assert not result.converged
        assert "20 steps in a row led out of the domain (a and b are positive)" in result.reason
        assert "Give the unknown a proper prior" in result.reason

    def test_a_run_goes_on_from_its_checkpoint(self, tmp_path):
        def run(steps, file=None):
            q = Gamma(vec(1.0, 1.0))
            torch.manual_seed(3)
            return q, fit(q, TestNotConjugate.log_joint, max_evaluations=steps, checkpoint=file, progress=False)

        whole, _ = run(40)
        run(25, tmp_path / "run.pt")
        again, result = run(40, tmp_path / "run.pt")
        assert result.evaluations == 40
        assert torch.equal(again.vector, whole.vector)
