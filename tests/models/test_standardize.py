"""Centring, scaling, and the maps between coefficients of standardised columns and of columns as they are."""

import math

import pytest
import torch

from torchngvi import CholeskyGaussian, DiagonalGaussian, PrecisionCholeskyGaussian
from torchngvi.distributed import Processes
from torchngvi.models.likelihoods import GaussianNoise, Likelihood
from torchngvi.models.mixed import standardized
from torchngvi.models.standardize import Standardization, default_scales, mean_and_sd


def design(seed=0, rows=50):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    X[:, 1] = 1.0
    return X


def test_the_map_keeps_the_linear_predictor_both_ways():
    X = design() * torch.tensor([1e-9, 1.0, 1e9, 3.0]) + torch.tensor([5e-9, 0.0, 1e9, -7.0])
    units = Standardization.of(X)
    a = torch.tensor([0.3, -1.0, 0.7, 2.0], dtype=torch.float64)
    assert units.intercept == 1
    torch.testing.assert_close(X @ units.to_user(a), units.standardize(X) @ a)
    torch.testing.assert_close(units.from_user(units.to_user(a)), a)


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1e9, 1e-200, 1e200])
@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_standardised_columns_do_not_know_their_units(scale, shift):
    whole = torch.round(design() * 2**10) / 2**10  # so that a shift of 2^20 loses nothing
    plain = Standardization.of(whole).standardize(whole)
    moved = whole.clone()
    moved[:, 0] = (whole[:, 0] + 2**20 * bool(shift)) * scale
    found = Standardization.of(moved).standardize(moved)
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-9 if shift else 1e-14)


def test_constant_columns_and_zeros_divide_by_no_zero():
    X = torch.tensor([[1.0, 0.1, 0.0, 4.0], [1.0, 0.1, 0.0, 6.0], [1.0, 0.1, 0.0, 5.0]], dtype=torch.float64)
    units = Standardization.of(X)
    assert units.intercept == 0
    assert units.scales.tolist()[:3] == [1.0, 0.1, 1.0]
    assert units.standardize(X)[:, 1:3].abs().max() == 0
    assert Standardization.of(X[:, 1:]).intercept == 0  # a constant serves where there is no column of ones
    assert Standardization.of(X[:, 2:]).intercept is None


def test_without_an_intercept_nothing_is_centred():
    units = Standardization.of(design()[:, [0, 2]] + 3)
    assert units.intercept is None
    assert units.centers.tolist() == [0.0, 0.0]


def test_weights_count_rows():
    X, weights = design(rows=6), torch.tensor([1.0, 2.0, 0.0, 3.0, 1.0, 1.0])
    torch.testing.assert_close(
        mean_and_sd(X, weights), mean_and_sd(X.repeat_interleave(weights.long(), 0)), rtol=1e-13, atol=1e-13
    )
    X[2] = 1e30  # a row that is not there
    assert float(Standardization.of(X, weights).scales.max()) < 10


@pytest.mark.parametrize("kind", [CholeskyGaussian, PrecisionCholeskyGaussian, DiagonalGaussian])
@pytest.mark.parametrize("intercept", [True, False])
def test_a_gaussian_goes_to_the_units_of_the_user_and_back(kind, intercept):
    X = design() * torch.tensor([1e-3, 1.0, 50.0, 3.0]) + torch.tensor([1.0, 0.0, 1e3, 0.0])
    X = X if intercept else X[:, [0, 2, 3]]
    units, dim = Standardization.of(X), X.shape[1]
    q = kind(dim, mean=torch.arange(dim).double(), scale=0.3, dtype=torch.float64)
    mean, root = units.gaussian_to_user(q.mean, q.frame().dense())
    assert root.triu(1).abs().max() == 0
    to_user = units.to_user(torch.eye(dim, dtype=torch.float64)).mT
    torch.testing.assert_close(root @ root.mT, to_user @ q.covariance @ to_user.mT)
    found, sd = units.marginals(q)
    torch.testing.assert_close(found, mean)
    torch.testing.assert_close(sd, root.norm(dim=1))
    back = units.gaussian_from_user(mean, root)
    torch.testing.assert_close(back[0], q.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(back[1] @ back[1].mT, q.covariance, rtol=1e-9, atol=1e-9)


def test_the_scales_of_the_default_priors():
    X = design()
    y = 3 + 5 * X[:, 0]
    scales, s = default_scales(X, y, GaussianNoise(1.0)), X.std(0, correction=0)
    assert scales.unit == pytest.approx(float(y.std(correction=0)))
    assert scales.location == pytest.approx(float(y.mean()))
    torch.testing.assert_close(scales.sd[[0, 2, 3]], 2.5 * scales.unit / s[[0, 2, 3]])
    assert float(scales.sd[1]) == pytest.approx(2.5 * scales.unit)
    counts, exposure = torch.poisson(torch.full((50,), 3.0)).double(), torch.linspace(1, 9, 50).double()
    torch.testing.assert_close(
        default_scales(X[:, 2:], y, "gaussian").sd, 2.5 * y.square().mean().sqrt() / X[:, 2:].std(0, correction=0)
    )
    rate = default_scales(X, counts, "poisson", offset=exposure.log())
    assert rate.location == pytest.approx(math.log(float(counts.sum() / exposure.sum())))
    assert rate.unit == 1
    assert default_scales(X, (X[:, 0] > 0).double(), "probit").location == pytest.approx(
        float(torch.special.ndtri((X[:, 0] > 0).double().mean()))
    )


@pytest.mark.parametrize("family", ["logistic", "probit", "poisson", "gaussian", "negative_binomial", "student_t"])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_targets_that_are_all_equal_leave_finite_scales(family, value):
    scales = default_scales(design(), torch.full((50,), value), family)
    assert math.isfinite(scales.location)
    assert 0 < scales.unit < 10


def test_a_link_that_is_not_known_has_the_location_0():
    class Own(Likelihood):
        def energy(self, eta, y):
            raise NotImplementedError

        expected = checked = energy

    assert default_scales(design(), torch.ones(50), Own())[:2] == (0.0, 1.0)


def with_levels(rows=60):
    x = design(rows=rows)[:, :1] + 2010.0
    return torch.cat([x, torch.eye(3, dtype=torch.float64)[torch.arange(rows) % 3], x > 2010], 1).double()


def test_a_full_set_of_indicators_takes_the_shift():
    X = with_levels()
    units, a = Standardization.of(X), torch.tensor([0.3, -1.0, 0.7, 2.0, 0.1], dtype=torch.float64)
    assert (units.intercept, units.indicators) == (None, (1, 2, 3))
    assert units.centers[1:4].tolist() == [0.0] * 3
    assert float(units.centers[0]) > 2000
    torch.testing.assert_close(X @ units.to_user(a), units.standardize(X) @ a)
    torch.testing.assert_close(units.from_user(units.to_user(a)), a)
    torch.testing.assert_close(units.standardize(X) @ units.level(7.0), torch.full((60,), 7.0, dtype=torch.float64))
    q = CholeskyGaussian(5, mean=a, scale=0.5, dtype=torch.float64)
    mean, root = units.gaussian_to_user(a, q.frame().dense())
    for one, other in zip(units.marginals(q), (mean, root.norm(dim=-1)), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("places", "found"), [([0, 1, 2], ()), ([1, 2], ()), ([4, 1, 2, 3], (1, 2, 3)), ([1, 2, 3, 1, 2], (0, 1, 2))]
)
def test_what_is_no_full_set(places, found):
    assert Standardization.of(with_levels()[:, places]).indicators == found


def test_a_full_set_is_found_by_several_processes_and_again():
    X, weights = with_levels(), torch.ones(60, dtype=torch.float64)
    plain = Standardization.of(X)
    once, units = standardized(X, None, weights, Processes.alone())
    again, same = standardized(once, units, weights, Processes.alone())
    for columns, found in ((once, units), (again, same)):
        assert found.indicators == (1, 2, 3)
        torch.testing.assert_close(columns, plain.standardize(X), rtol=0, atol=1e-9)
