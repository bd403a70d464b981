"""Exponential families over natural parameters: special functions, identities, and posteriors known in closed form."""

import math

import pytest
import scipy.special
import scipy.stats
import torch
from helpers import vec

from torchngvi.numerics.special import increasing_root, inverse_digamma, log_minus_digamma, trigamma, trigamma_excess
from torchngvi.posteriors.flat import Beta, Categorical, Dirichlet, Gamma, InverseGamma, Poisson, Wishart
from torchngvi.testing import check_exponential_family

DTYPE = torch.float64


FAMILIES = {
    "Beta": lambda: Beta(vec(2.5, 12.0)),
    "Dirichlet": lambda: Dirichlet(vec(0.7, 3.0, 5.0, 1.2)),
    "Gamma": lambda: Gamma(vec(3.0, 2.0)),
    "InverseGamma": lambda: InverseGamma(vec(7.0, 2.0)),
    "Wishart": lambda: Wishart.of(torch.tensor(7.0), torch.tensor([[2.0, 0.3], [0.3, 0.5]], dtype=DTYPE)),
    "Categorical": lambda: Categorical.of(vec(0.2, 0.5, 0.3)),
    "Poisson": lambda: Poisson(vec(1.3)),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_contract(name):
    check_exponential_family(FAMILIES[name])


class TestGammaFunctions:
    X = torch.logspace(-2, 9, 90, dtype=DTYPE)

    def test_trigamma(self):
        exact = scipy.special.zeta(2.0, self.X.numpy())
        assert float((trigamma(self.X) / torch.tensor(exact) - 1).abs().max()) < 4e-15

    def test_the_excess_where_it_cancels(self):
        """Against mpmath with 60 digits."""
        mpmath = pytest.importorskip("mpmath")
        with mpmath.workdps(60):
            for x in (0.01, 1.13, 11.99, 12.0, 1e4, 1e8):
                excess = float(mpmath.psi(1, x) - 1 / mpmath.mpf(x))
                lack = float(mpmath.log(x) - mpmath.psi(0, x))
                assert trigamma_excess(vec(x)).item() == pytest.approx(excess, rel=3e-15)
                assert log_minus_digamma(vec(x)).item() == pytest.approx(lack, rel=3e-15)

    def test_the_inverse_of_digamma(self):
        y = torch.linspace(-1000, 25, 300, dtype=DTYPE)
        assert torch.allclose(torch.digamma(inverse_digamma(y)), y, rtol=1e-12, atol=1e-13)

    def test_a_root(self):
        assert increasing_root(lambda x: x - math.pi, vec(0.0), 10.0).item() == math.pi


class TestAgainstScipy:
    """Densities and entropies by another library."""

    def test_inverse_gamma(self):
        q, x = InverseGamma(vec(3.0, 2.0)), vec(0.3, 4.0)
        law = scipy.stats.invgamma(3.0, scale=2.0)
        assert torch.allclose(q.log_prob(x[:, None]), torch.tensor(law.logpdf(x)), rtol=1e-12)
        assert q.entropy().item() == pytest.approx(law.entropy(), rel=1e-9)
        assert (q.mean.item(), q.variance.item()) == pytest.approx((law.mean(), law.var()))
        assert InverseGamma(vec(0.5, 1.0)).mean.item() == math.inf
        assert InverseGamma(vec(1.5, 1.0)).variance.item() == math.inf


class TestWideRanges:
    @pytest.mark.parametrize("classes", [2, 10, 1000])
    def test_dirichlet(self, classes):
        alpha = torch.logspace(-2, 4, classes, dtype=DTYPE)
        q = Dirichlet(alpha)
        assert torch.allclose(q.natural(q.expectation()), alpha, rtol=1e-8)
        x = torch.linspace(-1, 1, classes, dtype=DTYPE) * alpha
        assert torch.allclose(q.exact_fisher_solve(q.fisher_product(x)), x, rtol=1e-6, atol=1e-9 * float(alpha.max()))

    @pytest.mark.parametrize("a", [1e-2, 1.0, 1e4, 1e8])
    @pytest.mark.parametrize("b", [1e-6, 1e6])
    def test_gamma(self, a, b):
        """The way back has the condition of A*: a relative error of eps times a."""
        q = Gamma(vec(a, b))
        assert torch.allclose(q.natural(q.expectation()), vec(a, b), rtol=max(1e-12, 1e-15 * a * math.log(b / a) ** 2))

    def test_the_solve_of_a_large_shape(self):
        """F⁻¹(0, 1/b) = (1/(ψ'(a) - 1/a)/a, ..): with ψ'(a) - 1/a from a difference it would be off by 1e-8 here."""
        a = 1e8
        u = Gamma(vec(a, 1.0)).exact_fisher_solve(vec(0.0, 1.0))[0].item()
        assert u == pytest.approx(2 * a / (1 + 1 / (3 * a)), rel=1e-14)

    @pytest.mark.parametrize("rows", [1, 3, 6])
    def test_wishart(self, rows):
        generator = torch.Generator().manual_seed(1)
        root = torch.randn(rows, rows, dtype=DTYPE, generator=generator)
        q = Wishart.of(torch.tensor(rows - 0.9), root @ root.mT + torch.eye(rows, dtype=DTYPE))
        assert torch.allclose(q.natural(q.expectation()), q.vector, rtol=1e-9)

    def test_a_wishart_law_of_one_row_is_a_gamma_law(self):
        one, other = Wishart(vec(3.0, 2.0)), Gamma(vec(3.0, 2.0))
        x, g = vec(0.3, 1.7)[:, None], vec(0.4, -1.0)
        for method in ("log_prob", "score", "exact_fisher_solve", "fisher_product"):
            argument = x if method in {"log_prob", "score"} else g
            assert torch.allclose(getattr(one, method)(argument), getattr(other, method)(argument), rtol=1e-13)
        assert torch.allclose(one.expectation(), other.expectation())

    def test_a_dirichlet_law_of_two_classes_is_a_beta_law(self):
        one, other = Dirichlet(vec(3.0, 2.0)), Beta(vec(3.0, 2.0))
        x = vec(0.3)
        assert one.log_prob(torch.cat([x, 1 - x])).item() == pytest.approx(other.log_prob(x).item(), rel=1e-13)
        assert other.kl(Beta(vec(1.0, 1.0))).item() == pytest.approx(one.kl(Dirichlet(vec(1.0, 1.0))).item(), rel=1e-13)
