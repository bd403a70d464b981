"""`diagnostics.compare_estimators`: variances against closed forms, biases within their errors, sentences."""

import pytest
import torch
from helpers import seeded

from torchngvi import CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, NaturalGaussian
from torchngvi.diagnostics import compare_estimators
from torchngvi.expectations import (
    BonnetPrice,
    ClosedEntropyStein,
    Fixed,
    Hessian,
    Independent,
    Quadrature,
    Reparametrized,
    Stein,
)
from torchngvi.theory.kim2024 import GaussianTarget

DTYPE = torch.float64


def logistic(rows=40, dim=3):
    X = torch.randn(rows, dim, dtype=DTYPE, generator=seeded(1))
    y = (torch.rand(rows, dtype=DTYPE, generator=seeded(2)) < torch.sigmoid(2 * X[:, 0])).double()
    return GeneralizedLinear(X, y)


def quadratic(dim=4):
    root = torch.randn(dim, dim, dtype=DTYPE, generator=seeded(3))
    precision = root @ root.mT + torch.eye(dim, dtype=DTYPE)
    return GaussianTarget(torch.linspace(-1, 1, dim, dtype=DTYPE), precision)


class TestGaussianTarget:
    """N(m, C Cᵀ) on a Gaussian target with precision Λ, S independent draws: A = CᵀΛC, b = CᵀΛ(m - μ).

    Then Cᵀ∇ℓ(m + Cz) = b + Az, so that every variance is a polynomial in A and b over S.
    """

    def setup_method(self):
        self.target = quadratic()
        self.q = CholeskyGaussian(4, scale=0.7, dtype=DTYPE)
        self.A = 0.49 * self.target.precision
        self.b = -0.7 * self.target.precision @ self.target.mean

    def compared(self, estimators, repeats=2000):
        return compare_estimators(self.q, self.target.log_joint, estimators, repeats=repeats)

    @pytest.mark.accuracy
    def test_price_has_the_noise_of_the_mean_alone(self):
        """H is exact, and E|â - a|² = ‖A‖²/S."""
        found = self.compared([Hessian(Independent(5, seeded()))])
        assert found["Hessian"].variance == pytest.approx(float(self.A.square().sum()) / 5, rel=0.05)

    @pytest.mark.accuracy
    @pytest.mark.parametrize(("kind", "shift"), [(ClosedEntropyStein, 0.0), (Stein, 1.0)])
    def test_reparametrised_gradients_have_that_of_the_curvature_too(self, kind, shift):
        """With A - shift I for A: r = b + Az, and the variance of (r, sym r zᵀ) by Isserlis' theorem.

        E‖sym(b zᵀ)‖² = ½(D + 1)|b|²; sym(Azzᵀ) has E‖.‖² = ½E(|Az|²|z|² + (zᵀAz)²), less ‖A‖².
        """
        dim, A = 4, self.A - shift * torch.eye(4, dtype=DTYPE)
        size, trace = float(A.square().sum()), float(A.trace())
        of_square = 0.5 * ((dim + 2) * size + trace**2 + 2 * size) - size
        expected = (size + 0.5 * (0.5 * (dim + 1) * float(self.b.square().sum()) + of_square)) / 5
        found = self.compared({"it": kind(Independent(5, seeded())), "exact": Hessian(2)})
        assert found["it"].variance == pytest.approx(expected, rel=0.08)
        assert found["it"].bias < 3 * found["it"].standard_error

    def test_one_triangle_has_more_noise_than_both(self):
        found = self.compared([Reparametrized(Independent(5, seeded())), ClosedEntropyStein(Independent(5))], 400)
        assert found["Reparametrized"].variance > found["ClosedEntropyStein"].variance

    def test_nothing_is_left_where_q_is_the_target(self):
        mean, covariance = self.target.mean, torch.linalg.inv(self.target.precision)
        found = compare_estimators(NaturalGaussian.from_moments(mean, covariance), self.target.log_joint, repeats=20)
        assert found["Stein"].variance < 1e-20
        assert found["PathDerivative"].variance < 1e-20
        assert found["ClosedEntropyStein"].variance > 0.1
        assert found.norm < 1e-9


class TestLogistic:
    @pytest.mark.accuracy
    def test_those_that_say_unbiased_are_within_their_errors(self):
        q = CholeskyGaussian(3, mean=0.5, dtype=DTYPE)
        found = compare_estimators(q, logistic(), repeats=200, generator=seeded())
        assert found.exact == "Quadrature"
        assert found["Quadrature"].variance == found["Quadrature"].bias == 0
        assert {row.name for row in found.rows} == {
            "Quadrature", "MonteCarlo", "BonnetPrice", "Hessian", "Stein", "PathDerivative", "ClosedEntropyStein",
            "Reparametrized", "LeastSquaresStein", "ScoreFunction",
        }  # fmt: skip
        for row in found.rows:
            assert row.unbiased == (row.bias <= 3 * row.standard_error) == (row.name != "LeastSquaresStein"), row
        assert found.norm == pytest.approx(float(q.norm2(q.local(Quadrature()(q, logistic())))) ** 0.5)

    @pytest.mark.accuracy
    def test_noise_falls_with_the_draws(self):
        q, model = CholeskyGaussian(3, dtype=DTYPE), logistic()
        kinds = (Stein, BonnetPrice, Reparametrized)
        few, many = (
            compare_estimators(q, model, [kind(Independent(s, seeded())) for kind in kinds], repeats=300)
            for s in (4, 16)
        )
        for name in (kind.__name__ for kind in kinds):
            assert few[name].variance / many[name].variance == pytest.approx(4, rel=0.35)

    def test_a_bias_is_seen(self):
        """Fixed draws always say the same, which is not the truth, and nothing is measured against them."""
        q, model = CholeskyGaussian(3, dtype=DTYPE), logistic()
        found = compare_estimators(q, model, {"fixed": Stein(Fixed(8)), "exact": Quadrature()})
        assert found.exact == "exact"
        assert found["fixed"].variance == found["fixed"].standard_error == 0
        assert found["fixed"].bias > 0.01

    def test_mean_field_and_too_few_draws(self):
        q = DiagonalGaussian(3, dtype=DTYPE)
        names = {row.name for row in compare_estimators(q, logistic(), draws=2, repeats=2).rows}
        assert "Quadrature" in names
        assert "LeastSquaresStein" not in names

    def test_q_is_left_as_it_is_and_seeds_repeat(self):
        q, model = CholeskyGaussian(3, dtype=DTYPE), logistic()
        before = [tensor.clone() for tensor in q.state_dict().values()]
        one, two = (compare_estimators(q, model, repeats=5, generator=seeded(7)) for _ in range(2))
        assert one == two
        assert all(torch.equal(x, y) for x, y in zip(before, q.state_dict().values(), strict=True))
        assert q.mean_probe.grad is None

    def test_the_table(self):
        said = str(compare_estimators(CholeskyGaussian(3, dtype=DTYPE), logistic(), repeats=3, generator=seeded()))
        assert said.startswith("natural norm of the gradient ")
        assert len(said.splitlines()) == 12
        assert said.splitlines()[1].split() == ["estimator", "noise", "bias", "s.e.", "gradients", "Hessians", "values"]
        assert said.splitlines()[-1].split()[-3:] == ["0", "0", "8"]
