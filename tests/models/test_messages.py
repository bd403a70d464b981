"""Factors and their messages: tables found to rounding where a factor is conjugate, and refused where it is not."""

import math

import pytest
import torch
from helpers import vec
from torch.distributions import Bernoulli, HalfNormal, InverseGamma, LogNormal, Normal

from torchngvi import CholeskyGaussian, DiagonalGaussian
from torchngvi.errors import InputError
from torchngvi.models import ExpectedFactor, SiteFactor
from torchngvi.posteriors import PrecisionCholeskyGaussian, Product
from torchngvi.posteriors.flat import Beta, Categorical, Dirichlet, Gamma, Wishart
from torchngvi.posteriors.flat import InverseGamma as InverseGammaFamily
from torchngvi.posteriors.product import natural_form

DTYPE = torch.float64


def omegas(q):
    return {name: natural_form(q[name]).expectation() for name in q}


def prepared(factor, q):
    factor.prepare(q)
    return factor


def close(one, other):
    return torch.allclose(one, other, rtol=1e-10, atol=1e-10)


class TestTables:
    """The message is what the textbook has, and the value the expectation in closed form."""

    def test_poisson_of_a_product(self):
        """Poisson(y | θβ): y log θ + y log β - θβ - log y!, over a table of plates."""
        y = torch.tensor([[3.0, 0.0, 2.0], [1.0, 5.0, 0.0]], dtype=DTYPE)
        q = Product(theta=Gamma(vec([[2.0, 1.0]], [[3.0, 4.0]])), beta=Gamma(vec([[1.0, 2.0], [4.0, 1.5], [2.0, 2.0]])))
        assert q["theta"].batch_shape == (2, 1)
        factor = prepared(SiteFactor(lambda t, b: y * (t * b).log() - t * b - torch.lgamma(y + 1), "theta", "beta"), q)
        omega, mean = omegas(q), q.mean
        assert factor.exact
        to_theta = torch.stack([y.sum(1, keepdim=True), mean["beta"].sum().expand(2, 1)], -1)
        assert close(factor.message("theta", omega), to_theta)
        to_beta = torch.stack([y.sum(0), mean["theta"].sum().expand(3)], -1)[None]
        assert close(factor.message("beta", omega), to_beta)
        logs = omega["theta"][..., 0] + omega["beta"][..., 0]
        product = mean["theta"][..., 0] * mean["beta"][..., 0]
        assert close(factor.value(omega), (y * logs - product - torch.lgamma(y + 1)).sum())

    def test_normal_with_a_precision(self):
        """Normal(y | μ, 1/τ), from which plates without a site are summed out."""
        y = vec(0.3, -1.2, 2.0)
        q = Product(mu=CholeskyGaussian(1, mean=0.7, scale=0.4, dtype=DTYPE), tau=Gamma(vec(3.0, 2.0)))
        factor = prepared(SiteFactor(lambda m, t: Normal(m, t.rsqrt()).log_prob(y), "mu", "tau", plates=(3,)), q)
        omega, t = omegas(q), 1.5
        assert factor.exact
        assert close(factor.message("mu", omega), vec(t * 1.1, 3 * t))  # (S m, S)
        assert close(factor.message("tau", omega), vec(1.5, 0.5 * ((y - 0.7).square() + 0.16).sum()))

    def test_two_means_of_a_vector(self):
        """The product of a row and a vector is bilinear in the mean and its square: all correlations are there."""
        x, y = vec(1.0, -2.0), 0.5
        q = Product(w=CholeskyGaussian(2, dtype=DTYPE), tau=Gamma(vec(3.0, 2.0)))
        factor = prepared(SiteFactor(lambda w, t: Normal(w @ x, t.rsqrt()).log_prob(vec(y)[0]), "w", "tau"), q)
        assert factor.exact
        expected = 1.5 * torch.cat([y * x, vec(1.0, -2.0, 4.0)])
        assert close(factor.message("w", omegas(q)), expected)

    def test_bernoulli(self):
        y = vec(1.0, 0.0, 1.0, 1.0)
        q = Product(p=Beta(vec(1.0, 2.0)))
        factor = prepared(SiteFactor(lambda p: Bernoulli(p).log_prob(y), "p", plates=(4,)), q)
        assert factor.exact
        assert close(factor.message("p", omegas(q)), vec(3.0, 1.0))

    def test_multinomial(self):
        counts = vec(4.0, 0.0, 7.0)
        q = Product(shares=Dirichlet(vec(1.0, 2.0, 3.0)))
        factor = prepared(SiteFactor(lambda x: (counts * x.log()).sum(-1), "shares"), q)
        assert factor.exact
        assert close(factor.message("shares", omegas(q)), counts)

    def test_classes_with_shares(self):
        """Categorical(z | x): the message to a class is the difference of E log x, that to x the expected counts."""
        q = Product(shares=Dirichlet(vec(1.0, 2.0, 3.0)), z=Categorical(vec([0.1, 0.7], [0.0, 0.0])))

        def log_share(x, z):
            chosen = x.log().expand(*z.shape, 3).gather(-1, z.long()[..., None])
            return chosen[..., 0]

        factor, omega = prepared(SiteFactor(log_share, "shares", "z"), q), omegas(q)
        assert factor.exact
        assert close(factor.message("shares", omega), q["z"].probabilities.sum(0))
        logs = omega["shares"]
        assert close(factor.message("z", omega), (logs[:2] - logs[2]).expand(2, 2))

    def test_a_wishart_precision(self):
        """Normal(y | 0, X⁻¹) with y = (1, 2), on the entries of X."""
        q = Product(X=Wishart.of(torch.tensor(4.0), torch.eye(2, dtype=DTYPE)))

        def log_density(x):
            a, b, c = x.unbind(-1)
            return 0.5 * (a * c - b * b).log() - 0.5 * (a + 4 * b + 4 * c)

        factor = prepared(SiteFactor(log_density, "X"), q)
        assert factor.exact
        assert close(factor.message("X", omegas(q)), vec(0.5, 0.5, 1.0, 2.0))

    def test_a_shape_that_is_fixed_and_three_sites(self):
        """Gamma(x | 3, bc): 3 log b + 3 log c + 2 log x - bcx - log 2."""
        q = Product(x=Gamma(vec(2.0, 1.0)), b=Gamma(vec(3.0, 1.0)), c=Gamma(vec(4.0, 2.0)))
        factor = prepared(
            SiteFactor(lambda x, b, c: torch.distributions.Gamma(3.0, b * c).log_prob(x), "x", "b", "c"), q
        )
        assert factor.exact
        assert close(factor.message("c", omegas(q)), vec(3.0, 2.0 * 3.0))

    def test_scale_and_batch_of_members(self):
        """A message is without the scale, which the sweeps apply once."""
        q = Product(p=Beta(torch.ones(2, 2, dtype=DTYPE)))
        factor = prepared(SiteFactor(lambda p: p.log(), "p", scale=5.0), q)
        assert factor.scale == 5.0
        assert close(factor.message("p", omegas(q)), vec([1.0, 0.0], [1.0, 0.0]))


class TestNotConjugate:
    FACTORS = {
        "logistic": lambda x: -torch.nn.functional.softplus(-3 * (x - 1)),
        "half-normal": lambda x: HalfNormal(1.3).log_prob(x),
        "log-normal": lambda x: LogNormal(0.2, 1.0).log_prob(x),
        "inverse gamma": lambda x: InverseGamma(torch.tensor(2.0, dtype=DTYPE), 1.0).log_prob(x),
    }

    @pytest.mark.parametrize("start", [vec(2.0, 2.0), vec(1e6, 1e6)], ids=["wide", "narrow"])
    @pytest.mark.parametrize("name", FACTORS)
    def test_refused_on_a_gamma_site(self, name, start):
        """Narrow draws would leave a residual of 0.01 of the largest value: the points are not those of q."""
        assert not prepared(SiteFactor(self.FACTORS[name], "x"), Product(x=Gamma(start))).exact

    def test_taken_by_the_family_that_is_conjugate(self):
        assert prepared(
            SiteFactor(self.FACTORS["inverse gamma"], "x"), Product(x=InverseGammaFamily(vec(2.0, 2.0)))
        ).exact

    @pytest.mark.parametrize("name", FACTORS)
    def test_single_precision(self, name):
        """A distribution of float32 tensors computes in float32: told apart at 1e-5, and exact to that."""
        q = Product(x=Gamma(vec(2.0, 2.0)))
        single = prepared(SiteFactor(torch.distributions.Gamma(3.0, 2.0).log_prob, "x"), q)
        assert single.exact
        assert torch.allclose(single.message("x", omegas(q)), vec(2.0, 2.0), atol=1e-5)
        assert not prepared(SiteFactor(lambda x: self.FACTORS[name](x).float(), "x"), q).exact

    def test_the_estimate_is_the_natural_gradient(self):
        """-½(log x - 1)² at Gamma(3, 2), 32 draws: root mean square error .076 in the Fisher norm, a bias of .028."""
        torch.manual_seed(0)
        q, one = Product(x=Gamma(vec(3.0, 2.0).expand(1000, 2).contiguous())), Gamma(vec(3.0, 2.0))
        factor = prepared(SiteFactor(lambda x: -0.5 * (x.log() - 1).square(), "x"), q)
        u = torch.linspace(-14.0, 5.0, 40_001, dtype=DTYPE).exp()[:, None]  # a grid in log x
        f = -0.5 * (u[:, 0].log() - 1).square()
        weight = (one.log_prob(u) + u[:, 0].log()).exp() * (19.0 / 40_000)
        exact = one.exact_fisher_solve((weight[:, None] * one.score(u) * f[:, None]).sum(0)).detach()
        away = factor.message("x", omegas(q)) - exact
        assert natural_form(one).norm2(away).mean().sqrt().item() == pytest.approx(0.076, rel=0.1)
        assert natural_form(one).norm2(away.mean(0)).sqrt().item() < 0.04

    def test_a_multilinear_part_has_no_noise(self):
        """Drawn or looked for, the table of a conjugate factor is the same: centring and scaling are undone."""
        torch.manual_seed(0)
        q = Product(mu=CholeskyGaussian(1, mean=0.7, scale=0.4, dtype=DTYPE), tau=Gamma(vec(3.0, 2.0)))
        factor = SiteFactor(lambda m, t: Normal(m, t.rsqrt()).log_prob(vec(0.3)[0]), "mu", "tau")
        omega = omegas(q)
        exact = [prepared(factor, q).message(name, omega) for name in q]
        factor.exact = False
        drawn = [prepared(factor, q).message(name, omega) for name in q]
        assert all(close(one, other) for one, other in zip(exact, drawn, strict=True))


def test_conjugate_given_draws_of_the_others():
    """Gamma(x | 3, 1/s) of log f = 2 log x - x/s - 3 log s: x is sent (2, E 1/s), and 2 has no noise."""
    torch.manual_seed(0)
    q = Product(x=Gamma(vec([2.0, 1.0], [5.0, 1.0])), s=Gamma(vec(30.0, 10.0)))
    law = SiteFactor(lambda x, s: torch.distributions.Gamma(vec(3.0)[0], 1 / s).log_prob(x), "x", "s")
    factor = prepared(law, q)
    assert not factor.exact
    message = factor.message("x", omegas(q))
    assert close(message[:, 0], vec(2.0, 2.0))
    assert torch.allclose(message[:, 1], vec(10 / 29, 10 / 29), rtol=0.1)  # E 1/s = b/(a - 1)
    inverse = Product(x=q["x"], s=InverseGammaFamily(vec(30.0, 10.0)))
    assert SiteFactor(law.function, "x", "s").conjugate(inverse)


def test_an_expected_factor_is_differentiated():
    """Σ x log Σ_k exp(ω_k): the gradient is the expected counts, x softmax(ω)."""
    omega = vec(0.1, -1.0, 0.3)
    factor = ExpectedFactor(lambda w: 7 * w.logsumexp(-1), "shares")
    q = Product(shares=Dirichlet(vec(1.0, 1.0, 1.0)))
    assert factor.prepare(q) == 0
    assert factor.exact
    assert close(factor.message("shares", {"shares": omega}), 7 * omega.softmax(-1))
    assert factor.value({"shares": omega}).item() == pytest.approx(7 * omega.logsumexp(-1).item())


@pytest.mark.parametrize(
    "law",
    [Gamma(vec(2.0, 3.0)), Dirichlet(vec(0.3, 1.0, 2.0)), CholeskyGaussian(2, mean=1.0, scale=0.5, dtype=DTYPE)],
    ids=["gamma", "dirichlet", "gaussian"],
)
def test_a_prior_is_a_factor_that_is_known(law):
    """The same messages and the same value as by a table, for every member."""
    q = (
        Product(x=law.at(vec([4.0, 1.0, 2.0], [1.0, 1.0, 5.0])[:, : law.size]))
        if not hasattr(law, "covariance")
        else (Product(x=CholeskyGaussian(2, (2,), mean=0.3, scale=2.0, dtype=DTYPE)))
    )
    known = ExpectedFactor.prior(law, "x")
    found = prepared(SiteFactor(lambda x: law.log_prob(x[..., None] if law.dim == 1 else x), "x"), q)
    omega = omegas(q)
    assert close(known.message("x", omega), found.message("x", omega))
    assert close(known.value(omega), found.value(omega))
    with pytest.raises(InputError, match="one law for all members of its site; got a batch .2,."):
        ExpectedFactor.prior(q["x"], "x")


class TestNaturalForms:
    CASES = {
        "one coordinate": lambda: CholeskyGaussian(1, (3,), mean=0.5, scale=2.0, dtype=DTYPE),
        "correlated": lambda: CholeskyGaussian.from_moments(vec(1.0, -2.0), vec([2.0, 0.6], [0.6, 1.0])),
        "by precision": lambda: PrecisionCholeskyGaussian.from_moments(vec(1.0, -2.0), vec([2.0, 0.6], [0.6, 1.0])),
        "independent": lambda: DiagonalGaussian(2, mean=vec(1.0, 3.0), scale=vec(0.5, 2.0), dtype=DTYPE),
        "gamma": lambda: Gamma(vec([3.0, 2.0], [1.0, 4.0])),
    }

    @pytest.mark.parametrize("case", CASES)
    def test_against_the_density(self, case):
        """log q(x) = ⟨η + b, T(x)⟩ + const, the mean of T is ω, and the length is that of the score."""
        q = self.CASES[case]()
        form = natural_form(q)
        generator = torch.Generator().manual_seed(0)
        x = q.sample(4, generator)
        rest = q.log_prob(x) - ((form.natural() + form.base()) * form.statistics(x)).sum(-1)
        assert torch.allclose(rest, rest[:1].expand_as(rest), rtol=1e-9)
        T = form.statistics(q.sample(50_000, generator))
        centred = T - form.expectation()
        assert (centred.mean(0).abs() < 5 * T.std(0) / math.sqrt(len(T))).all()
        change = torch.linspace(-0.3, 0.5, form.size, dtype=DTYPE).expand(*q.batch_shape, form.size)
        length = (centred * change).sum(-1).square().mean(0)
        assert torch.allclose(form.norm2(change), length, rtol=0.05)

    @pytest.mark.parametrize("case", CASES)
    def test_there_and_back(self, case):
        q = self.CASES[case]()
        form = natural_form(q)
        eta, omega = form.natural().clone(), form.expectation().clone()
        assert bool(form.put(2 * eta))
        assert close(form.natural(), 2 * eta)
        assert not bool(form.put(-eta))
        assert close(form.natural(), 2 * eta)
        form.put(form.retracted(-eta))
        assert close(form.expectation(), omega)


class TestProduct:
    def make(self):
        return Product(
            {"mu": CholeskyGaussian(2, (3,), mean=0.5, dtype=DTYPE)}, tau=Gamma(vec(3.0, 2.0)), p=Beta(vec([1.0, 2.0]))
        )

    def test_what_adds_up(self):
        q, other = self.make(), self.make()
        other["tau"].vector.copy_(vec(1.0, 1.0))
        x = q.sample((4, 5), torch.Generator().manual_seed(0))
        assert {name: tuple(value.shape) for name, value in x.items()} == {
            "mu": (4, 5, 3, 2),
            "tau": (4, 5, 1),
            "p": (4, 5, 1, 1),
        }
        parts = q["mu"].log_prob(x["mu"]).sum(-1) + q["tau"].log_prob(x["tau"]) + q["p"].log_prob(x["p"])[..., 0]
        assert close(q.log_prob(x), parts)
        assert close(q.entropy(), q["mu"].entropy().sum() + q["tau"].entropy() + q["p"].entropy().sum())
        assert close(q.kl(other), q["tau"].kl(other["tau"]))
        assert q.mean["tau"].item() == 1.5
        assert q.stddev["tau"].item() == pytest.approx(math.sqrt(q.variance["tau"].item()))

    def test_as_a_module(self):
        q = self.make()
        assert list(q) == list(q.names) == ["mu", "tau", "p"]
        assert len(q) == 3
        assert list(q.parameters()) == []
        assert repr(q) == (
            "Product(mu=CholeskyGaussian(2, batch_shape=(3,), dtype=torch.float64), tau=Gamma(2), "
            "p=Beta(2, batch_shape=(1,)))"
        )
        other = self.make()
        other["tau"].vector.copy_(vec(9.0, 9.0))
        kept = q.snapshot()
        q.load_state_dict(other.state_dict())
        assert q["tau"].vector.tolist() == [9.0, 9.0]
        q.restore(kept)
        assert q["tau"].vector.tolist() == [3.0, 2.0]
        assert q.float().dtype == q["mu"].dtype == torch.float32
        q.drop_gradients()
