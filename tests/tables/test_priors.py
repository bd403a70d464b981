"""Priors by name: densities that integrate to one, in the units of the user, which no unit of a column changes."""

import math
import pickle
import re

import pytest
import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.tables.families import family_of
from torchngvi.tables.parts import Coordinates, Design, Factor, covariance_root
from torchngvi.tables.priors import (
    LKJ,
    Beta,
    Exponential,
    Gamma,
    HalfNormal,
    HalfT,
    Normal,
    Power,
    Priors,
    StudentT,
    parse_prior,
    settle,
)

GOLDEN = -3.3044225190595737  # by ScalesPrior(HalfT(3, 2.5), 2, 2) of 0.2.0, see below
HALF_LINE = torch.linspace(-60, 60, 48001, dtype=torch.float64)  # of log x


def known(name: str, *numbers: float | Tensor) -> torch.distributions.Distribution:
    """One of PyTorch's distributions, in float64."""
    return getattr(torch.distributions, name)(*(torch.as_tensor(x, dtype=torch.float64) for x in numbers))


def design(x: Tensor, y: Tensor, effects: int = 2, offset: Tensor | None = None) -> Design:
    ones = torch.ones_like(x)
    X = torch.stack([ones, x], 1)
    groups = torch.arange(len(x)) % 5
    factors = (Factor("g", ("Intercept", "x")[:effects], tuple("abcde"), X[:, :effects], groups),) if effects else ()
    return Design(X, ("Intercept", "x"), factors, 0 * x if offset is None else offset, (y,), ones)


def settled(of: Design, word: str = "gaussian", priors: object = None) -> tuple[Priors, Coordinates]:
    family = family_of(word)
    y = family.checked(of.y)
    family = family.settled(y, of.weights, of.offset)
    of = of._replace(y=y)
    coordinates = Coordinates(of, len(family.parameters), thresholds=not family.intercept)
    return settle(of, family, coordinates, priors), coordinates


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, 40, generator=generator, dtype=torch.float64)
    return 3 + 2 * x, 10 + 4 * noise


@pytest.fixture(scope="module")
def theta() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(7, 6, generator=generator, dtype=torch.float64)  # a, a, log sd, log sd, z, log residual sd


class TestDensities:
    @pytest.mark.parametrize(
        "prior",
        [
            HalfT(3.0, 2.5),
            HalfNormal(0.3),
            Exponential(4.0),
            Gamma(2.0, 0.1),
            Gamma(0.5, 3.0),
            Power(HalfT(3.0, 1.0), -0.5),
            Power(HalfT(3.0, 2.5), -1.0),
            HalfT(3.0, 2.5).scaled(7.0),
            Gamma(2.0, 0.1).scaled(7.0),
            Power(HalfT(3.0, 1.0), -0.5).scaled(7.0),
        ],
    )
    def test_of_positive_numbers_integrate_to_one(self, prior):
        density = (prior.log_prob(HALF_LINE.exp()) + HALF_LINE).exp()
        assert torch.trapezoid(density, HALF_LINE).item() == pytest.approx(1, abs=1e-8)

    @pytest.mark.parametrize("prior", [Normal(3.0, 0.2), StudentT(3.0, 1.0, 2.5), Normal(3.0, 0.2).scaled(-2.0)])
    def test_of_all_numbers_integrate_to_one(self, prior):
        x = 3 + HALF_LINE.sinh() * 1e-3
        dx = HALF_LINE.cosh() * 1e-3
        assert torch.trapezoid(prior.log_prob(x).exp() * dx, HALF_LINE).item() == pytest.approx(1, abs=1e-8)

    def test_of_shares_integrate_to_one(self):
        z = torch.linspace(-40, 40, 4001, dtype=torch.float64)
        for prior in (Beta(1.0, 1.0), Beta(0.5, 2.0)):
            x = torch.sigmoid(z)
            density = prior.log_prob(x).exp() * x * torch.sigmoid(-z)
            assert torch.trapezoid(density, z).item() == pytest.approx(1, abs=1e-8)

    @pytest.mark.parametrize("prior", [Normal(3.0, 0.2), StudentT(4.0, 1.0, 2.0), HalfT(), Exponential(2.0), Gamma()])
    def test_of_a_multiple_of_x(self, prior):
        x = torch.linspace(0.1, 5, 9, dtype=torch.float64)
        multiple = prior.scaled(2.5).log_prob(2.5 * x) + math.log(2.5)
        torch.testing.assert_close(multiple, prior.log_prob(x), rtol=1e-13, atol=1e-13)

    def test_values(self):
        x = torch.tensor([0.3, 1.7], dtype=torch.float64)
        torch.testing.assert_close(Normal(0.5, 2.0).log_prob(x), known("Normal", 0.5, 2.0).log_prob(x))
        torch.testing.assert_close(StudentT(4.0, 0.5, 2.0).log_prob(x), known("StudentT", 4.0, 0.5, 2.0).log_prob(x))
        torch.testing.assert_close(Gamma(2.0, 3.0).log_prob(x), known("Gamma", 2.0, 3.0).log_prob(x))
        torch.testing.assert_close(HalfNormal(2.0).log_prob(x), known("HalfNormal", 2.0).log_prob(x))


class TestCorrelations:
    def test_two_effects_are_uniform(self):
        z = torch.linspace(-15, 15, 11, dtype=torch.float64)
        rho = LKJ(1.0).log_prob(z[:, None]) + 2 * z.cosh().log()  # drho = dz/cosh²
        torch.testing.assert_close(rho, torch.full_like(rho, math.log(0.5)), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("r", [2, 3, 4])
    @pytest.mark.parametrize("concentration", [1.0, 2.5])
    def test_the_density_of_lewandowski_kurowicka_and_joe(self, r, concentration):
        """|R|^(c - 1)/Z with Z of their equation 16, times |dR/dz| by autograd through the roots of the coordinates."""
        count = r * (r - 1) // 2
        z = torch.randn(count, generator=torch.Generator().manual_seed(r), dtype=torch.float64)
        below = torch.tril_indices(r, r, -1)

        def entries(z: Tensor) -> Tensor:
            root = covariance_root(torch.cat([z.new_zeros(r), z]), r)
            return (root @ root.mT)[below[0], below[1]]

        root = covariance_root(torch.cat([z.new_zeros(r), z]), r)
        log_z = 0.0
        for k in range(1, r):
            shape = concentration + 0.5 * (r - k - 1)
            log_beta = 2 * math.lgamma(shape) - math.lgamma(2 * shape)
            log_z += (r - k) * ((2 * (concentration - 1) + r - k) * math.log(2) + log_beta)
        jacobian = torch.linalg.slogdet(torch.autograd.functional.jacobian(entries, z))[1]
        expected = (concentration - 1) * torch.logdet(root @ root.mT) - log_z + jacobian
        torch.testing.assert_close(LKJ(concentration).log_prob(z), expected, rtol=1e-12, atol=1e-12)

    def test_of_a_matrix_it_is_finite_at_the_ends(self):
        z = torch.tensor([[-400.0, 0.0, 400.0]], dtype=torch.float64, requires_grad=True)
        value = LKJ(2.0).log_prob(z)
        (slope,) = torch.autograd.grad(value.sum(), z)
        assert value.isfinite().all()
        assert slope.isfinite().all()


class TestOfAModel:
    def test_it_integrates_to_one(self, data):
        """Over sds and correlations of two effects, by the trapezoid rule."""
        priors, _ = settled(design(*data), priors={"1|g": HalfNormal(2.0), "x|g": Exponential(1.0), "cor": LKJ(2.0)})
        log_tau, z = torch.linspace(-22, 7, 117, dtype=torch.float64), torch.linspace(-9, 9, 61, dtype=torch.float64)
        grid = torch.stack(torch.meshgrid(log_tau, log_tau, z, indexing="ij"), -1)
        fixed = torch.zeros(3, dtype=torch.float64)
        rest = torch.zeros(*grid.shape[:-1], 3, dtype=torch.float64)
        both = torch.cat([rest[..., :2], grid, rest[..., :1]], -1)
        alone, _ = settled(design(*data, effects=0))
        log_density = priors.log_prob(both) - alone.log_prob(fixed)
        total = torch.trapezoid(torch.trapezoid(torch.trapezoid(log_density.exp(), z), log_tau), log_tau)
        assert total.item() == pytest.approx(1, abs=1e-6)

    def test_the_coefficients_and_the_noise_integrate_to_one(self, data):
        priors, _ = settled(design(*data, effects=0))
        a = torch.linspace(-150, 150, 151, dtype=torch.float64)
        phi = torch.linspace(-14, 12, 131, dtype=torch.float64)
        density = priors.log_prob(torch.stack(torch.meshgrid(a, a, phi, indexing="ij"), -1)).exp()
        total = torch.trapezoid(torch.trapezoid(torch.trapezoid(density, phi), a), a)
        assert total.item() == pytest.approx(1, abs=1e-6)

    def test_thresholds_integrate_to_one_in_their_order(self):
        x = torch.tensor([1.0, 2, 4, 3, 5, 2], dtype=torch.float64)
        of = design(x, torch.tensor([0.0, 1, 2, 1, 0, 2], dtype=torch.float64), effects=0)
        of = of._replace(X=of.X[:, 1:], names=of.names[1:])
        priors, _ = settled(of, "ordinal", {"threshold": Normal(0.0, 1.0)})
        first, gap = torch.linspace(-9, 7, 321, dtype=torch.float64), torch.linspace(-25, 4, 581, dtype=torch.float64)
        grid = torch.stack(torch.meshgrid(first, gap, indexing="ij"), -1)
        theta = torch.cat([torch.zeros_like(grid[..., :1]), grid], -1)
        assert str(priors).endswith("thresholds at the means N(0, 1^2)")
        slope = Normal(0.0, 2.5).log_prob(torch.zeros((), dtype=torch.float64))
        density = (priors.log_prob(theta) - slope).exp()
        assert torch.trapezoid(torch.trapezoid(density, gap), first).item() == pytest.approx(1, abs=1e-6)

    def test_default_by_hand(self, data, theta):
        """Each part by PyTorch's densities, in the units of the user, with the Jacobians of the coordinates."""
        x, y = data
        priors, coordinates = settled(design(x, y))
        sd_x, sd_y = x.std(correction=0), y.std(correction=0)
        user = coordinates.to_user(theta)
        intercept = user.coefficients[:, 0] + user.coefficients[:, 1] * x.mean()
        expected = known("Normal", y.mean(), 2.5 * sd_y).log_prob(intercept)
        expected += known("Normal", 0.0, 2.5 * sd_y / sd_x).log_prob(user.coefficients[:, 1]) - sd_x.log()  # a = b s
        half_t = known("StudentT", 3.0, 0.0, 2.5 * sd_y)
        for place in (2, 3, 5):
            expected += math.log(2) + half_t.log_prob(theta[:, place].exp()) + theta[:, place]
        expected += math.log(0.5) - 2 * theta[:, 4].cosh().log()
        torch.testing.assert_close(priors.log_prob(theta), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(priors.location, torch.stack([y.mean(), 0 * sd_y]), rtol=1e-12, atol=1e-12)

    def test_named_by_hand(self, data, theta):
        x, y = data
        named = {
            "Intercept": StudentT(3.0, 8.0, 2.0),
            "x": "normal(0.5, 0.2)",
            "1 | g": Exponential(0.5),
            "x|g": Gamma(2.0, 4.0),
            "cor|g": LKJ(3.0),
            "residual sd": HalfNormal(6.0),
        }
        priors, coordinates = settled(design(x, y), priors=named)
        sd_x = x.std(correction=0)
        user, tau = coordinates.to_user(theta), theta[:, 2:4].exp()
        intercept = user.coefficients[:, 0] + user.coefficients[:, 1] * x.mean()
        slope_sd = tau[:, 1] / sd_x
        torch.testing.assert_close(user.sd[0][:, 1], slope_sd, rtol=1e-12, atol=0)
        expected = known("StudentT", 3.0, 8.0, 2.0).log_prob(intercept)
        expected += known("Normal", 0.5, 0.2).log_prob(user.coefficients[:, 1]) - sd_x.log()
        expected += known("Exponential", 0.5).log_prob(tau[:, 0]) + theta[:, 2]
        expected += known("Gamma", 2.0, 4.0).log_prob(slope_sd) + slope_sd.log()
        rho = theta[:, 4].tanh()
        beta = known("Beta", 3.0, 3.0).log_prob(0.5 + 0.5 * rho)  # of (1 + ρ)/2
        expected += beta - math.log(2) + (1 - rho.square()).log()
        expected += known("HalfNormal", 6.0).log_prob(theta[:, 5].exp()) + theta[:, 5]
        torch.testing.assert_close(priors.log_prob(theta), expected, rtol=1e-11, atol=1e-11)

    def test_the_density_of_sds_and_correlations_of_the_wishart_coordinates(self, data):
        """Equal to that of ScalesPrior of 0.2.0: -energy(ω) - log |d(τ, R)/dω| at τ = (1.4, .3), ρ = -.55."""
        priors, _ = settled(design(*data), priors={"sd": HalfT(3.0, 2.5), "cor": LKJ(2.0)})
        sd_x = data[0].std(correction=0)
        xi = torch.tensor([math.log(1.4), math.log(0.3), math.atanh(-0.55)], dtype=torch.float64)
        zero = torch.zeros(2, dtype=torch.float64)
        at = torch.cat([zero, xi + torch.stack([0 * sd_x, sd_x.log(), 0 * sd_x]), zero[:1]])
        alone = settled(design(*data, effects=0))[0].log_prob(zero.new_zeros(3))
        jacobian = xi[:2].sum() + math.log(1 - 0.55**2)
        found = priors.log_prob(at) - alone - jacobian
        assert found.item() == pytest.approx(GOLDEN, rel=1e-12)

    def test_twice_differentiable(self, data, theta):
        priors, _ = settled(design(*data))
        point = theta[:2].clone().requires_grad_()
        assert torch.autograd.gradcheck(priors.log_prob, point)
        assert torch.autograd.gradgradcheck(priors.log_prob, point)
        origin = torch.zeros(1, 6, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradgradcheck(priors.log_prob, origin)

    def test_finite_far_out(self, data):
        priors, _ = settled(design(*data))
        theta = torch.zeros(4, 6, dtype=torch.float64)
        theta[0, 2], theta[1, 2], theta[2, 4], theta[3, 5] = -300, 300, 300, -300
        theta.requires_grad_()
        value = priors.log_prob(theta)
        (slope,) = torch.autograd.grad(value.sum(), theta)
        assert value.isfinite().all()
        assert slope.isfinite().all()
        assert slope[0, 2].item() == pytest.approx(1, rel=1e-12)  # the density of log τ falls as τ itself
        assert slope[1, 2].item() == pytest.approx(-3, rel=1e-12)


class TestUnits:
    @pytest.mark.parametrize("word", ["gaussian", "poisson", "bernoulli", "ordinal"])
    @pytest.mark.parametrize(("scale", "shift"), [(1e-9, 0.0), (1e9, 0.0), (1.0, 1e6), (1e-9, -1e6), (1e9, 1e6)])
    def test_of_a_column_change_nothing(self, data, theta, word, scale, shift):
        x, y = data
        y = {"gaussian": y, "poisson": y.clamp_min(0).round(), "bernoulli": (y > 10.0).double()}.get(
            word, (y > 8).double() + (y > 12)
        )
        other = scale * (x + shift * x.std(correction=0))
        found = []
        for column in (x, other):
            of = design(column, y)
            if word == "ordinal":
                of = of._replace(X=of.X[:, 1:], names=of.names[1:])
            priors, coordinates = settled(of, word)
            at = theta[:, :1].expand(-1, coordinates.dim) + 0.1 * torch.arange(coordinates.dim)
            eta = at[:, : coordinates.p] @ coordinates.X.mT
            found.append((priors.log_prob(at), eta, coordinates.Z[0]))
        torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-8, atol=1e-8)  # the same points of the posterior
        torch.testing.assert_close(found[0][2], found[1][2], rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-9, atol=1e-9)

    def test_of_the_outcome(self, data, theta):
        x, y = data
        one, other = (settled(design(x, scale * y))[0] for scale in (1.0, 1e6))
        powers = torch.tensor([[1.0, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 1]], dtype=torch.float64)
        moved = theta * 1e6 ** powers[0] + math.log(1e6) * powers[1]
        change = other.log_prob(moved) - one.log_prob(theta)
        torch.testing.assert_close(change, torch.full_like(change, -2 * math.log(1e6)), rtol=1e-9, atol=1e-9)

    def test_named_in_other_units(self, data, theta):
        x, y = data
        here, _ = settled(design(x, y), priors={"x": Normal(0.0, 0.2), "x|g": HalfT(3.0, 0.1)})
        there, _ = settled(design(1e-6 * x, y), priors={"x": Normal(0.0, 0.2e6), "x|g": HalfT(3.0, 0.1e6)})
        torch.testing.assert_close(here.log_prob(theta), there.log_prob(theta), rtol=1e-10, atol=1e-10)


class TestLocation:
    def test_of_trials(self):
        x = torch.arange(4.0, dtype=torch.float64)
        of = design(x, torch.tensor([1.0, 2, 0, 1], dtype=torch.float64), effects=0)
        of = of._replace(y=(of.y[0], torch.tensor([2.0, 8, 4, 2], dtype=torch.float64)))
        assert settled(of, "binomial")[0].location[0].item() == pytest.approx(math.log(4 / 12))

    def test_no_trials(self):
        x = torch.arange(4.0, dtype=torch.float64)
        of = design(x, 0 * x, effects=0)
        with pytest.raises(InputError, match="no row has a trial"):
            settled(of._replace(y=(0 * x, 0 * x)), "binomial")

    def test_of_an_exposure(self):
        x = torch.arange(4.0, dtype=torch.float64)
        hours = torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)
        of = design(x, torch.tensor([1.0, 2, 0, 7], dtype=torch.float64), effects=0, offset=hours.log())
        assert settled(of, "poisson")[0].location[0].item() == pytest.approx(0.0)  # ten events in ten hours

    def test_no_events(self):
        x = torch.arange(4.0, dtype=torch.float64)
        assert settled(design(x, 0 * x, effects=0), "poisson")[0].location[0].item() == pytest.approx(math.log(0.1))

    def test_levels_without_an_intercept(self):
        """The prior mean of each of a full set of indicators is that of an intercept."""
        one = torch.tensor([1.0, 1, 0, 0], dtype=torch.float64)
        of = design(one, torch.tensor([5.0, 7, 5, 7], dtype=torch.float64), effects=0)
        of = of._replace(X=torch.stack([one, 1 - one], 1), names=("g[a]", "g[b]"))
        priors, _ = settled(of)
        assert priors.table()[:2] == (("g[a]", "N(6, 5^2)"), ("g[b]", "N(6, 5^2)"))
        assert "about 6 for each of the 2 levels" in str(priors)

    def test_through_zero(self, data):
        x, y = data
        of = design(x, y, effects=0)
        priors, _ = settled(of._replace(X=of.X[:, 1:], names=of.names[1:]))
        about = y.square().mean().sqrt()
        assert priors.coefficients[0].sd == pytest.approx(2.5 * about.item() / x.std(correction=0).item())
        assert priors.coefficients[0].mean == 0


class TestNames:
    def test_the_particular_one_counts(self, data):
        named = {"b": Normal(0.0, 9.0), "sd": HalfNormal(3.0), "x|g": HalfT(3.0, 7.0), "cor": LKJ(4.0)}
        rows = dict(settled(design(*data), priors=named)[0].table())
        assert rows["x"] == "N(0, 9^2)"
        assert rows["Intercept"].startswith("N(10.6, 11")
        assert (rows["1|g"], rows["x|g"], rows["cor|g"]) == ("half-normal(3)", "half-t(3, 7)", "LKJ(4)")
        rows = dict(settled(design(*data), priors={"b": "flat", "x": Normal(0.0, 2.0)})[0].table())
        assert rows["x"] == "N(0, 2^2)"

    def test_flat(self, data):
        x, y = data
        width = 1e4 * y.std(correction=0).item()
        flat, _ = settled(design(x, y), priors="flat")
        alone, _ = settled(design(x, y), priors={"Intercept": "flat", "x": "flat", "sd": "flat"})
        assert flat.coefficients[0].sd == pytest.approx(width)
        assert flat.sds[0][0].scale == pytest.approx(width)
        assert flat.table() == alone.table()

    def test_default_by_name(self, data):
        table = settled(design(*data))[0].table()
        assert settled(design(*data), priors={"x": "default", "residual sd": "default"})[0].table() == table
        assert settled(design(*data), priors="default")[0].table() == table

    def test_in_words(self):
        x = torch.arange(8.0, dtype=torch.float64) / 7 * 12**0.5
        y = torch.tensor([0.0, 1, 2, 3, 0, 1, 2, 3], dtype=torch.float64)
        assert str(settled(design(x, y), "poisson")[0]) == (
            "fixed effects N(0, 2.5^2) per sd of a column, intercept at the means N(0.405, 2.5^2), "
            "sd over g half-t(3, 2.5) per sd of a column, correlations LKJ(1)"
        )
        named = {"x": Normal(0.0, 1.0), "1|g": Exponential(2.0), "size": Gamma(2.0, 0.1)}
        assert str(settled(design(x, y), "negative_binomial", named)[0]) == (
            "intercept at the means N(0.405, 2.5^2), x N(0, 1^2), sd over g half-t(3, 2.5) per sd of a column, "
            "sd of 1|g exponential(2), correlations LKJ(1), size gamma(2, 0.1)"
        )
        some, _ = settled(design(x, y), "negative_binomial", {**named, "cor": "default"})
        assert some.named == ("x", "1|g", "size")
        assert str(settled(design(x, y, effects=1), "poisson")[0]).endswith("sd over g half-t(3, 2.5)")

    @pytest.mark.parametrize(
        ("priors", "sentence"),
        [
            ({"z": Normal()}, r"priors names z, of which this model has none; it has Intercept, x, b, 1\|g, x\|g, sd,"),
            ({"X": Normal()}, r"Did you mean 'x'\?"),
            ({"x": HalfT()}, r"the prior of x, a coefficient, is one such as Normal\(0, 1\); got HalfT"),
            ({"1|g": Normal()}, r"the prior of 1\|g, a standard deviation, is one such as HalfT\(3, 1\); got Normal"),
            ({"cor": Normal()}, r"the prior of cor\|g, a matrix of correlations, is one such as LKJ\(2\)"),
            ({"residual sd": Normal()}, r"the prior of residual sd, a positive number, is one such as HalfT"),
            ({"residual sd": "flat"}, r"the prior of residual sd, a parameter of the likelihood, is one that has a"),
            ({"x": 3}, r"a prior is a text such as normal\(0, 1\), or an object"),
            ("wide", r"priors is a mapping such as .* or the word default or flat; got 'wide'"),
            ([Normal()], r"priors is a mapping such as"),
        ],
    )
    def test_refusals(self, data, priors, sentence):
        with pytest.raises(InputError, match=sentence):
            settled(design(*data), priors=priors)

    @pytest.mark.parametrize("name", ["sd", "cor", "size"])
    def test_a_column_of_the_name_of_others(self, data, name):
        of = design(data[0], torch.arange(len(data[0])).double())._replace(names=("Intercept", name))
        with pytest.raises(InputError, match=f"priors names '{name}', which is a column and also a"):
            settled(of, "negative_binomial", {name: Normal()})

    def test_correlations_of_one_effect(self, data):
        with pytest.raises(
            InputError, match=r"priors names cor\|g, of which this model has none; it has .*1\|g, sd, r"
        ):
            settled(design(*data, effects=1), priors={"cor|g": LKJ(2.0)})

    def test_a_pickle(self, data, theta):
        priors, _ = settled(design(*data), priors={"x": Normal(0.0, 1.0)})
        again = pickle.loads(pickle.dumps(priors))
        assert torch.equal(again.log_prob(theta), priors.log_prob(theta))
        assert str(again) == str(priors)


class TestTexts:
    @pytest.mark.parametrize(
        ("text", "prior"),
        [
            ("normal(0, 1)", Normal(0.0, 1.0)),
            (" Normal ( mean=2, sd = .5 ) ", Normal(2.0, 0.5)),
            ("student_t(3, 0, 2.5)", StudentT(3.0, 0.0, 2.5)),
            ("half-t(3, scale=2.5)", HalfT(3.0, 2.5)),
            ("HalfNormal(1e-3)", HalfNormal(1e-3)),
            ("exponential(2)", Exponential(2.0)),
            ("gamma(2, .1)", Gamma(2.0, 0.1)),
            ("beta(1, 1)", Beta(1.0, 1.0)),
            ("LKJ(2)", LKJ(2.0)),
            ("Flat", "flat"),
            ("default", "default"),
        ],
    )
    def test_read(self, text, prior):
        assert parse_prior(text) == prior

    @pytest.mark.parametrize(
        "prior", [Normal(0.1, 1 / 3), StudentT(), HalfT(), HalfNormal(), Exponential(), Gamma(), Beta(), LKJ()]
    )
    def test_of_the_repr(self, prior):
        assert parse_prior(repr(prior)) == prior

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("norml(0, 1)", r"got 'norml\(0, 1\)'\. Did you mean 'normal'\?"),
            ("0", r"a prior is flat, or a call such as normal\(0, 1\)"),
            ("normal(0, 1, 2)", r"normal takes the numbers mean, sd; got 'normal\(0, 1, 2\)'"),
            ("normal(0, sigma=1)", r"normal takes the numbers mean, sd"),
            ("normal(0, x)", r"normal takes the numbers mean, sd"),
            ("normal(0, -1)", r"sd of Normal must be positive and finite; got -1\.0"),
            ("half_t(inf, 1)", r"dof of HalfT must be positive and finite; got inf"),
            ("normal(nan, 1)", r"mean of Normal must be a finite number; got nan"),
        ],
    )
    def test_refusals(self, text, sentence):
        with pytest.raises(InputError, match=sentence):
            parse_prior(text)

    def test_refusals_of_objects(self):
        with pytest.raises(InputError, match=re.escape("concentration of LKJ must be positive and finite; got 0.")):
            LKJ(0)
        with pytest.raises(InputError, match="scale of HalfT must be positive and finite; got 'wide'"):
            HalfT(3, "wide")
        with pytest.raises(InputError, match="Power takes a prior and a power that is not 0"):
            Power(HalfT(), 0)
        with pytest.raises(InputError, match=re.escape("beta(1, 1) is no prior of a number that has a unit")):
            Beta().scaled(2.0)
