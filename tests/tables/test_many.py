"""Many outcomes of one design: each member is the model that it is alone."""

import math

import pytest
import torch

from torchngvi.errors import InputError
from torchngvi.tables.design import design_of_arrays
from torchngvi.tables.families import family_of
from torchngvi.tables.integrated import Integrated, Integration
from torchngvi.tables.many import ManySettings, fit_many
from torchngvi.tables.model import TableModel
from torchngvi.tables.parts import Coordinates
from torchngvi.tables.priors import HalfT, Normal, settle

ONE = torch.float64


def table(members=3, groups=8, rows=6, r=1, seed=0, slope=0.4, sd=0.6):
    """A design of an intercept and x, and linear predictors (members, N)."""
    generator = torch.Generator().manual_seed(seed)
    number = torch.arange(groups).repeat_interleave(rows)
    x = torch.rand(len(number), generator=generator, dtype=ONE) * 3 + 2
    X = torch.stack([torch.ones_like(x), x], -1)
    b = sd * torch.randn(members, groups, r, generator=generator, dtype=ONE)
    eta = 0.5 + slope * (x - 3.5) + (b[:, number] * torch.stack([torch.ones_like(x), x - 3.5], -1)[:, :r]).sum(-1)
    return X, (X[:, :r], number), eta, generator


def counts(eta, generator, size=3.0):
    rate = eta.exp() * torch._standard_gamma(torch.full_like(eta, size), generator) / size
    return torch.poisson(rate, generator)


def drawn(family, r):
    """A design and outcomes of a family."""
    X, random, eta, generator = table(r=max(r, 1))
    draws = {
        "negative_binomial": lambda: counts(eta, generator),
        "poisson": lambda: torch.poisson(eta.exp(), generator),
        "gaussian": lambda: 300 * (eta + torch.randn(eta.shape, generator=generator, dtype=ONE)) + 1e4,
        "bernoulli": lambda: torch.bernoulli(eta.sigmoid(), generator=generator),
        "binomial": lambda: torch.binomial(torch.full_like(eta, 7.0), eta.sigmoid(), generator),
        "ordinal": lambda: (
            (eta + 2 * torch.randn(eta.shape, generator=generator, dtype=ONE)).add(1).clamp(0, 2).round()
        ),
    }
    Y = draws[family]()
    offset, weights = 0.1 * X[:, 1], 1 + (torch.arange(len(X)) % 3 == 0).to(ONE)
    y = (Y[0], torch.full_like(Y[0], 7.0)) if family == "binomial" else Y[0]
    columns = X[:, 1:] if family == "ordinal" else X
    names = ("x",) if family == "ordinal" else ("Intercept", "x")
    given = random if r else None
    return design_of_arrays(columns, y, given, offset=offset, weights=weights, names=names), Y


def alone(result, design, Y, g, priors=None):
    """The log joint of the engine of one model."""
    own = design._replace(y=(Y[g].to(ONE), *design.y[1:]))
    family = family_of(result.family.name)
    family = family.settled(family.checked(own.y), own.weights, own.offset)
    coordinates = Coordinates(own, len(family.parameters), thresholds=not family.intercept)
    joint = Integrated(own, family, coordinates, settle(own, family, coordinates, priors), Integration())
    joint.nodes = int(result.nodes[g])
    return joint


CASES = [
    ("negative_binomial", 1),
    ("negative_binomial", 2),
    ("poisson", 0),
    ("gaussian", 1),
    ("bernoulli", 0),
    ("binomial", 1),
    ("ordinal", 1),
]


@pytest.mark.sparse(3)
@pytest.mark.parametrize(("family", "r"), CASES)
def test_the_log_joint_and_its_mode_are_those_of_one_model(family, r):
    """The value of another engine in the units of the user, and its gradient is 0 in its own metric."""
    design, Y = drawn(family, r)
    result = fit_many(design, Y, family, progress=False)
    assert result.converged.all()
    for g in range(len(Y)):
        joint = alone(result, design, Y, g)
        _, modes = joint.start()
        found = joint.with_gradient(result.mode[g : g + 1], modes)
        assert float(found.value) == pytest.approx(float(result.log_joint[g]), rel=1e-8)
        H = joint.curvature(result.mode[g], found.modes)
        assert float(found.gradient[0] @ torch.linalg.solve(H, found.gradient[0])) < 1e-5


@pytest.mark.accuracy
def test_eight_at_once_equal_each_alone():
    X, random, eta, generator = table(members=8)
    Y = counts(eta, generator)
    design = design_of_arrays(X, Y[0], random)
    together = fit_many(design, Y, progress=False)
    for g in range(8):
        by_itself = fit_many(design, Y[g : g + 1], progress=False)
        assert float(by_itself.log_joint) == pytest.approx(float(together.log_joint[g]), abs=1e-8)
        assert torch.allclose(by_itself.mode[0], together.mode[g], atol=1e-8)
        assert by_itself.nodes[0] == together.nodes[g]


def test_chunks_change_nothing():
    X, random, eta, generator = table(members=5)
    design = design_of_arrays(X, (Y := counts(eta, generator))[0], random)
    whole, parts = (fit_many(design, Y, progress=False, settings=ManySettings(at_once=k)) for k in (10**6, 10**4))
    assert torch.allclose(whole.theta, parts.theta, atol=1e-8)
    assert torch.allclose(whole.weights, parts.weights, atol=1e-8)


def test_units_of_a_gaussian_outcome():
    """Each member has the units of its own outcome."""
    design, Y = drawn("gaussian", 1)
    design = design._replace(offset=torch.zeros_like(design.offset))
    factor, shift = torch.tensor([1e-6, 1.0, 1e6], dtype=ONE)[:, None], torch.tensor([0.0, -50.0, 1e7], dtype=ONE)
    first = fit_many(design, Y, "gaussian", progress=False)
    other = fit_many(design, factor * Y + shift[:, None], "gaussian", progress=False)
    expected = factor * first.coefficients.mean
    expected[:, 0] += shift
    assert torch.allclose(other.coefficients.mean, expected, rtol=1e-6)
    assert torch.allclose(other.sd.high, factor * first.sd.high, rtol=1e-6)
    assert torch.allclose(other.parameters.mean, factor * first.parameters.mean, rtol=1e-6)


@pytest.mark.parametrize("family", ["gaussian", "negative_binomial"])
def test_named_priors_are_in_the_units_of_the_user(family):
    design, Y = drawn(family, 1)
    priors = {"x": Normal(0.0, 0.01), "1|group": HalfT(3.0, 2.0), "Intercept": Normal(1.0, 2.0)}
    result = fit_many(design, Y, family, priors=priors, progress=False)
    assert result.coefficients.mean[:, 1].abs().max() < 0.03
    for g in range(len(Y)):
        joint = alone(result, design, Y, g, priors)
        value = joint.with_gradient(result.mode[g : g + 1], joint.start()[1]).value
        assert float(value) == pytest.approx(float(result.log_joint[g]), rel=1e-8)


@pytest.mark.accuracy
def test_the_answer_is_that_of_one_model():
    """Means within Monte Carlo error of 100 draws, sds within 20 %, ends within half an sd."""
    X, random, eta, generator = table(members=4, groups=15)
    Y = counts(eta, generator)
    result = fit_many(design_of_arrays(X, Y[0], random), Y, progress=False)
    for g in (0, 3):
        summary = result.member(g).fit(draws=1000, progress=False).summary().fixed
        sd = summary.sd
        assert ((result.coefficients.mean[g] - summary.mean) / sd).abs().max() < 0.2
        assert (result.coefficients.sd[g] / sd - 1).abs().max() < 0.2
        assert ((result.coefficients.low[g] - summary.low) / sd).abs().max() < 0.6


def test_odd_members_have_an_answer():
    """No count at all, one single count, and counts of e^14 beside ordinary ones."""
    X, random, eta, generator = table(members=4)
    Y = counts(eta, generator)
    Y[0], Y[1] = 0.0, torch.nn.functional.one_hot(torch.tensor(5), Y.shape[1]).to(ONE)
    Y[2] = counts(eta[2:3] + 14, generator)[0]
    result = fit_many(design_of_arrays(X, Y[0], random), Y, progress=False)
    assert result.converged.all()
    assert not result.doubtful
    assert result.coefficients.mean.isfinite().all()
    ordinary = fit_many(design_of_arrays(X, Y[3], random), Y[3:], progress=False)
    assert torch.allclose(result.mode[3], ordinary.mode[0], atol=1e-8)


def test_a_member_that_needs_more_nodes_takes_them():
    X, random, eta, generator = table(members=3, groups=30, rows=4, sd=0.1)
    eta[1] += 5 * torch.randn(30, generator=generator, dtype=ONE)[random[1]]
    Y = torch.bernoulli(eta.sigmoid(), generator=generator)
    result = fit_many(design_of_arrays(X, Y[0], random), Y, "bernoulli", progress=False)
    assert result.converged.all()
    assert result.nodes[1] > result.nodes[0]
    more = fit_many(
        design_of_arrays(X, Y[0], random), Y, "bernoulli", progress=False, settings=ManySettings(orders=(61,))
    )
    assert ((result.mode - more.mode).abs() < 0.05).all()


def test_what_has_not_converged_is_named():
    X, random, eta, generator = table(members=2)
    Y = counts(eta, generator)
    settings = ManySettings(steps=1, orders=(5,))
    result = fit_many(design_of_arrays(X, Y[0], random), Y, names=["a", "b"], settings=settings, progress=False)
    assert not result.converged.any()
    assert list(result.doubtful) == ["a", "b"]
    assert "still promises" in result.doubtful["a"]
    assert "2 doubtful" in repr(result)


@pytest.mark.sparse(2)
@pytest.mark.parametrize("r", [0, 1])
def test_a_member_without_a_posterior_is_named_and_moves_no_other(r):
    """A constant outcome with noise that is learned: the density grows without end as the noise falls."""
    design, Y = drawn("gaussian", r)
    Y[1] = 3.0
    result = fit_many(design._replace(offset=0 * design.offset), Y, "gaussian", progress=False)
    assert result.converged.tolist() == [True, False, True]
    assert "has no maximum" in result.doubtful["1"]
    assert result.nodes[1] == (5 if r else 1)  # it takes no longer than the others
    rest = fit_many(design._replace(offset=0 * design.offset), Y[[0, 2]], "gaussian", progress=False)
    assert torch.allclose(rest.mode, result.mode[[0, 2]], rtol=1e-8)


def test_a_table_has_one_row_for_each_member_and_global():
    pytest.importorskip("pandas")
    design, Y = drawn("negative_binomial", 2)
    result = fit_many(design, Y, names=["a", "b", "c"], progress=False)
    frame = result.table()
    effects = design.factors[0].effects
    sds = [f"sd({effect}|group)" for effect in effects]
    expected = ["Intercept", "x", *sds, f"cor({effects[0]}, {effects[1]}|group)", "size"]
    assert list(frame["parameter"][:6]) == expected
    assert len(frame) == 18
    assert list(frame["member"].unique()) == ["a", "b", "c"]
    b = frame[frame["member"] == "b"].set_index("parameter")
    assert b.loc["x", "mean"] == pytest.approx(float(result.coefficients.mean[1, 1]))
    assert b.loc["size", "high"] == pytest.approx(float(result.parameters.high[1, 0]))
    assert result.draws(1).weights.sum() == pytest.approx(1.0)


def test_what_cannot_be_used_is_refused():
    design, Y = drawn("negative_binomial", 1)
    with pytest.raises(InputError, match=r"Y must be \(G, 48\)"):
        fit_many(design, Y[0], progress=False)
    with pytest.raises(InputError, match=r"needs counts .* Rows of members follow one another, 48 of each"):
        fit_many(design, Y - 0.5, progress=False)
    with pytest.raises(InputError, match="names must be those of the 3 members"):
        fit_many(design, Y, names=["a"], progress=False)
    with pytest.raises(InputError, match="draws is the number of weighted draws"):
        fit_many(design, Y, settings=ManySettings(draws=50), progress=False)
    with pytest.raises(InputError, match="at most one grouping factor"):
        fit_many(design._replace(factors=design.factors * 2), Y, progress=False)
    with pytest.raises(InputError, match=r"design is a design of rows, as TableModel.design .*; got"):
        fit_many(TableModel(design._replace(y=(Y[0],)), "negative_binomial"), Y, progress=False)


@pytest.mark.accuracy
def test_intervals_hold_the_truth():
    """Of 1,000 members in 200 rows of 20 groups, between .93 and .97 for each global."""
    X, random, eta, generator = table(members=1000, groups=20, rows=10)
    result = fit_many(design_of_arrays(X, (Y := counts(eta, generator))[0], random), Y, progress=False)
    truth = {"coefficients": [0.5 - 0.4 * 3.5, 0.4], "sd": [0.6], "parameters": [3.0]}
    for name, values in truth.items():
        part, true = getattr(result, name), torch.tensor(values, dtype=ONE)
        held = ((part.low <= true) & (true <= part.high)).double().mean(0)
        assert ((held > 0.93) & (held < 0.97)).all(), (name, held)
    assert result.converged.all()
    assert len(result.doubtful) < 10
    assert math.isfinite(float(result.effective.min()))
