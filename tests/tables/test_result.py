"""What is read off a result: the table, draws, predictions, what was left out, comparisons, exports and pictures."""

import math
from dataclasses import replace

import pytest
import torch
from made import factor, result_of, table_result

from torchngvi import MixedModel
from torchngvi.errors import InputError
from torchngvi.tables import load
from torchngvi.tables.effects import PartsLeftOut, RowsLeftOut, compare
from torchngvi.tables.table import ByFactor

N = torch.distributions.Normal


def column(rows, seed=0):
    return torch.randn(rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def design(rows=30):
    return torch.stack([torch.ones(rows).double(), 5 + 2 * column(rows)], 1)


def test_a_summary_is_of_the_weighted_draws_in_the_units_of_the_columns():
    X, y = design(), column(30, 1)
    weights = torch.linspace(1, 3, 400).double()
    result = result_of(X, y, "gaussian", draw_weights=weights / weights.sum(), names=("Intercept", "x"))
    theta, w, *_ = result.fitted.weighted
    table = result.summary(0.9)
    slope = theta[:, 1] / (X[:, 1].std(correction=0))
    assert table.fixed.names == ("Intercept", "x")
    assert table.fixed.mean[1].item() == pytest.approx(float(w @ slope), rel=1e-12)
    intercept = theta[:, 0] - slope * X[:, 1].mean()
    assert table.fixed.mean[0].item() == pytest.approx(float(w @ intercept), rel=1e-10)
    sd = theta[:, 2].exp()
    assert table.likelihood.names == ("residual sd",)
    assert table.likelihood.sd.item() == pytest.approx(float((w @ (sd - w @ sd) ** 2).sqrt()), rel=1e-10)
    text = str(result)
    assert text.splitlines()[0] == "regression, gaussian: 30 rows"
    assert "priors: " in text
    assert "Drawn by hand." in text
    assert dict(table.random) == {}


def test_ratios_and_groups_are_printed_as_they_always_were():
    groups = torch.arange(30) % 6
    result = result_of(design(), column(30, 1).exp().round(), "poisson", [factor("ward", groups)])
    text = str(result)
    assert "mixed model, poisson: 30 rows; groups: 6 of ward" in text
    assert "rate ratios, e to the power of the fixed effects" in text
    assert "standard deviations of random effects\n" in text
    table = result.summary()
    assert table.sd.names == ("Intercept",)
    assert torch.equal(table.sd.mean, table.random["ward"].sd.mean)
    with pytest.raises(InputError, match="the grouping factors are ward; got 'school'"):
        table.random["school"]


def test_factors_with_correlations_are_in_the_units_of_their_columns():
    rows = 40
    X, groups = design(rows), torch.arange(rows) % 8
    of = [factor("a", groups, X, ("Intercept", "x")), factor("b", torch.arange(rows) % 3)]
    result = result_of(X, column(rows, 1), "gaussian", of)
    table, draws = result.summary(), result.draws()
    assert table.random["a"].sd.names == ("Intercept", "x")
    assert table.random["a"].correlation.names == ("Intercept, x",)
    assert table.random["b"].correlation.names == ()
    assert "standard deviations of random effects, b" in str(table)
    assert draws.sd["a"].shape == (1000, 2)
    assert draws.effects["b"].shape == (1000, 3, 1)
    # effects drawn from their distribution have these sds: b = A C z
    assert result.sample(50).shape == (50, 2 + 3 + 1 + 1)


@pytest.mark.parametrize("family", ["poisson", "gaussian"])
def test_intervals_of_new_counts_are_between_whole_numbers(family):
    result = result_of(design(), column(30, 1).exp().round(), family)
    for kind in ("response", "mean"):
        of = result.predict(design(), kind=kind, interval=0.9)
        assert torch.equal(of.high, of.high.round()) == ((family, kind) == ("poisson", "response"))
        assert ((of.draws >= of.low) & (of.draws <= of.high)).double().mean(0).min() > 0.89


@pytest.mark.parametrize(
    ("change", "said"), [({"k_hat": 0.9}, "k-hat 0.90 is above 0.7"), ({"k_hat": math.nan}, "k-hat nan is above 0.7")]
)
def test_what_is_not_to_be_trusted_is_said(change, said):
    result = result_of(design(), column(30, 1), "gaussian", **change)
    assert said in str(result)
    result.fitted.converged = False
    assert "NOT CONVERGED: it was made by hand" in str(result)


def test_remarks_of_a_spread_that_may_be_0_a_coefficient_that_is_not_bounded_and_separation():
    rows = 30
    x = torch.arange(rows).double()
    X = torch.stack([torch.ones(rows).double(), x], 1)
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(500, 3, generator=generator, dtype=torch.float64) * torch.tensor([0.3, 2.4, 2.0])
    result = result_of(
        X, x > 14, "bernoulli", [factor("g", torch.arange(rows) % 5)], theta=theta, names=("Intercept", "x")
    )
    text = str(result)
    assert "The standard deviation of Intercept may be 0" in text
    sd = float(theta[:, 1].std()) / float(x.std(correction=0))
    assert f"The data hardly bound x: sd {sd:.2g}"[:-1] in text  # beside a prior of 2.5 per sd of the column
    assert f"and {2.5 / float(x.std(correction=0)):.3g} under the prior" in text
    assert "x separates the classes (complete separation)" in text
    assert "hardly bound Intercept" not in text


def test_an_interval_is_a_probability():
    with pytest.raises(InputError, match="interval"):
        result_of(design(), column(30, 1), "gaussian").summary(95)


def test_draws_are_the_same_for_the_same_seed_and_an_index_is_one_into_the_one_factor():
    result = result_of(design(), column(30, 1), "gaussian", [factor("g", torch.arange(30) % 6)])
    one, two = result.draws(200, 5), result.draws(200, 5)
    assert one is two
    assert not torch.equal(result.draws(200, 6).fixed, one.fixed)
    assert torch.equal(one.effects[..., 0], one.effects["g"][..., 0])
    assert torch.equal(result.effects()[0].mean, result.effects()["g"][0].mean)
    assert result.random["g"][0].names == ("g0", "g1", "g2", "g3", "g4", "g5")
    assert one.parameter.shape == (200,)
    with pytest.raises(InputError, match="count"):
        result.draws(0)


def test_the_gaussian_has_the_moments_of_the_weighted_draws():
    weights = torch.linspace(1, 3, 400).double()
    result = result_of(design(), column(30, 1), "gaussian", draw_weights=weights / weights.sum())
    theta, w, *_ = result.fitted.weighted
    q = result.posterior
    torch.testing.assert_close(q.mean, w @ theta)
    apart = theta - w @ theta
    torch.testing.assert_close(q.covariance, apart.mT @ (w[:, None] * apart))


def test_an_index_into_several_factors_is_refused():
    with pytest.raises(InputError, match="the grouping factors are a, b; got 0"):
        ByFactor(a=[1], b=[2])[0]
    with pytest.raises(InputError, match="there is no grouping factor"):
        ByFactor()["a"]


def varying(family="poisson", rows=24):
    X, groups = design(rows), torch.arange(rows) % 4
    y = column(rows, 1).exp().round()
    return result_of(X, y if family == "poisson" else (y > 1), family, [factor("g", groups, X, ("Intercept", "x"))])


def test_the_linear_predictor_of_known_groups_is_that_of_the_draws():
    result = varying()
    X, draws = result.design.X[:5], result.draws()
    groups = torch.tensor([3, 0, 0, 2, 1])
    found = result.predict(X, X, groups, kind="linear", offset=torch.ones(5))
    by_hand = draws.fixed @ X.T + 1 + (draws.effects["g"][:, groups] * X).sum(-1)
    torch.testing.assert_close(found.draws, by_hand)
    torch.testing.assert_close(found.mean, by_hand.mean(0))
    ends = torch.quantile(by_hand, torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
    torch.testing.assert_close(torch.stack([found.low, found.high]), ends)
    torch.testing.assert_close(result.predict(X, X, groups, offset=torch.ones(5)).draws, by_hand.exp())


def test_a_new_label_has_one_draw_of_effects_and_another_label_another():
    result = varying()
    X = torch.tensor([[1.0, 5.0]]).double().expand(4, 2)
    eta = result.predict(X, X, torch.tensor([-1, -1, -2, 0]), kind="linear").draws
    assert torch.equal(eta[:, 0], eta[:, 1])
    assert not torch.allclose(eta[:, 0], eta[:, 2])
    all_new = result.predict(X, X, None, kind="linear").draws
    assert torch.equal(all_new[:, 0], all_new[:, 3])


def test_effects_of_new_groups_have_the_covariance_of_the_draws():
    result = varying()
    X = torch.tensor([[1.0, 3.0]]).double()
    Z = X.expand(1, 2)
    draws = result.draws()
    s2 = torch.stack(
        [
            z @ (d[:, None] * c * d) @ z
            for d, c, z in zip(draws.sd["g"], draws.correlation["g"], Z.expand(1000, 2), strict=True)
        ]
    )
    many = torch.stack([(result.predict(X, Z, None, kind="linear", seed=0).draws - draws.fixed @ X.T)[:, 0]])
    z = (many / s2.sqrt()).flatten()
    assert abs(float(z.mean())) < 4 / math.sqrt(1000)
    assert float(z.std()) == pytest.approx(1, abs=4 / math.sqrt(2000))


@pytest.mark.parametrize("family", ["probit", "poisson"])
def test_averages_over_new_groups_have_their_closed_forms(family):
    result = varying(family)
    X, draws = result.design.X[:6], result.draws()
    groups = result.design.factors[0].groups[:6]
    root = torch.linalg.cholesky(draws.correlation["g"] + 1e-14 * torch.eye(2))
    s = (X @ (draws.sd["g"][:, :, None] * root)).norm(dim=-1)  # (S, 6)
    eta = draws.fixed @ X.T
    exact = torch.special.ndtr(eta / (1 + s**2).sqrt()) if family == "probit" else (eta + s**2 / 2).exp()
    found = result.predict(X, X, groups, population="average").draws
    small = s < 1  # where 31 nodes are exact but for rounding
    torch.testing.assert_close(found[small], exact[small], rtol=1e-9, atol=1e-12)
    wide = s < 3
    torch.testing.assert_close(found[wide], exact[wide], rtol=3e-3, atol=1e-6)
    typical = result.predict(X, X, groups, population="typical", kind="linear").draws
    torch.testing.assert_close(typical, eta)
    torch.testing.assert_close(result.predict(X, X, groups, population=True).draws, found)


def test_responses_have_the_mean_and_spread_of_the_family():
    X, y = design(), column(30, 1)
    result = result_of(X, y, "gaussian", theta=torch.zeros(400, 3).double())
    drawn = result.predict(X, kind="response").draws
    assert float(drawn.mean()) == pytest.approx(0, abs=4 / math.sqrt(drawn.numel()))
    assert float(drawn.std()) == pytest.approx(1, abs=4 / math.sqrt(2 * drawn.numel()))


def test_several_factors_of_arrays_take_a_dict():
    rows = 24
    X = design(rows)
    of = [factor("a", torch.arange(rows) % 4), factor("b", torch.arange(rows) % 3)]
    result = result_of(X, column(rows, 1), "gaussian", of)
    one = torch.ones(2, 1).double()
    found = result.predict(X[:2], {"a": (one, [0, 1]), "b": (one, None)}, kind="linear").draws
    draws = result.draws()
    rest = found - draws.fixed @ X[:2].T - draws.effects["a"][:, [0, 1], 0]
    torch.testing.assert_close(rest[:, 0], rest[:, 1])  # the same new group of b
    with pytest.raises(InputError, match="a pair \\(Z, groups\\) of each grouping factor, a, b; got a"):
        result.predict(X[:2], {"a": (one, [0, 1])})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"kind": "means"},
            "kind must be one of mean, linear, response, probability; got 'means'. Did you mean 'mean'",
        ),
        ({"kind": "probability"}, "for outcomes that are categories"),
        ({"population": "everyone"}, "population is False for the rows' own groups"),
        ({"groups": [9, 0]}, "0 to 3"),
        ({"groups": [0.5, 0]}, "0 to 3"),
        ({"offset": [1.0]}, "offset must have one entry for each of the 2 rows"),
        ({"Z": [[1.0], [1.0]]}, "Z of g of shape \\(2, 2\\)"),
        ({"X": [[1.0]]}, "X of shape \\(M, 2\\)"),
        ({"X": torch.zeros(0, 2), "Z": torch.zeros(0, 2), "groups": []}, "at least one row"),
    ],
)
def test_new_rows_that_do_not_fit_are_refused(arguments, said):
    result = varying()
    given = {"X": result.design.X[:2], "Z": result.design.X[:2], "groups": [0, 1], **arguments}
    with pytest.raises(InputError, match=said):
        result.predict(given.pop("X"), given.pop("Z"), given.pop("groups"), **given)


def test_a_model_of_a_formula_predicts_tables():
    result = table_result()
    frame = result.formula.table.head(7)
    found = result.predict(frame.assign(g=["w0", "w1", "new", "new", "other", "w2", "w3"]), kind="linear").draws
    assert found.shape == (1000, 7)
    draws = result.draws()
    X = result.design.X[:7]
    left = found - draws.fixed @ X.T
    torch.testing.assert_close(left[:, 2], left[:, 3])
    assert not torch.allclose(left[:, 2], left[:, 4])
    torch.testing.assert_close(left[:, 0], draws.effects["g"][:, 0, 0])


def exact_mean(rows=40, draws=4000):
    """A mean with a known sd of 1 and a flat prior: its posterior is N(mean, 1/N)."""
    y = 2 + column(rows, 4)
    q = N(float(y.mean()), rows**-0.5)
    mu = q.icdf(((torch.arange(draws) + 0.5) / draws).double())
    theta = torch.stack([mu, torch.zeros_like(mu)], 1)
    return y, result_of(torch.ones(rows, 1), y, "gaussian", theta=theta)


def test_leave_one_out_is_that_of_a_normal_mean():
    y, result = exact_mean()
    found = result.leave_one_out()
    n = len(y)
    others = (y.sum() - y) / (n - 1)
    exact = N(others, math.sqrt(1 + 1 / (n - 1))).log_prob(y)
    torch.testing.assert_close(found.density, exact, atol=2e-3, rtol=0)
    inside = N(y.mean(), math.sqrt(1 + 1 / n)).log_prob(y)
    torch.testing.assert_close(found.in_sample, inside, atol=2e-3, rtol=0)
    assert float(found.k_hat.max()) < 0.5
    assert found.total == pytest.approx(float(exact.sum()), abs=0.02)


def test_rows_of_weight_0_are_no_rows():
    weights = torch.ones(30).double()
    weights[::3] = 0
    found = result_of(design(), column(30, 1), "gaussian", weights=weights).leave_one_out()
    assert len(found.density) == 20
    assert found.names[:3] == ("1", "2", "4")


def grouped_mean(groups=12, each=4, tau=0.8, draws=4000):
    """A mean with known sds of groups and noise: everything about it is normal."""
    number = torch.arange(groups).repeat_interleave(each)
    y = 1 + tau * column(groups, 7)[number] + column(groups * each, 8)
    V = torch.eye(each).double() + tau**2
    group_mean = y.view(groups, each).mean(1)
    v = tau**2 + 1 / each  # of a group's mean
    q = N(float(group_mean.mean()), math.sqrt(v / groups))
    mu = q.icdf(((torch.arange(draws) + 0.5) / draws).double())
    theta = torch.stack([mu, torch.full_like(mu, math.log(tau)), torch.zeros_like(mu)], 1)

    def of_groups(theta):
        at = torch.distributions.MultivariateNormal(torch.zeros(each).double(), V)
        return at.log_prob(y.view(groups, each) - theta[:, :1, None])

    def effects(theta, generator):
        w = tau**2 / v
        mean = w * (group_mean - theta[:, :1])
        noise = torch.randn(len(theta), groups, generator=generator, dtype=torch.float64)
        return ((mean + math.sqrt(tau**2 * (1 - w)) * noise)[..., None],)

    result = result_of(
        torch.ones(groups * each, 1),
        y,
        "gaussian",
        [factor("g", number)],
        theta=theta,
        groups=of_groups,
        effects=effects,
    )
    others = (group_mean.sum() - group_mean) / (groups - 1)
    V_out = V + v / (groups - 1)
    exact = torch.distributions.MultivariateNormal(torch.zeros(each).double(), V_out).log_prob(
        y.view(groups, each) - others[:, None]
    )
    return result, exact


def test_leave_one_group_out_is_that_of_normal_groups():
    result, exact = grouped_mean()
    found = result.leave_one_group_out()
    torch.testing.assert_close(found.density, exact, atol=5e-3, rtol=0)
    assert found.groups[:2] == ("g0", "g1")
    assert float(found.k_hat.max()) < 0.7
    assert "elpd" in str(found)
    assert "groups" in str(found)


def test_rows_of_a_mixed_model_are_left_out_given_the_others_of_their_group():
    result, _ = grouped_mean(groups=30, each=8)
    y, number = result.design.y[0], result.design.factors[0].groups
    found = result.leave_one_out(count=8000)
    # the exact one: all rows are normal with covariance I + tau² of groups + a flat mean
    n = len(y)
    V = torch.eye(n).double() + 0.64 * (number[:, None] == number) + 1e6
    P = torch.linalg.inv(V)
    sd = P.diagonal().rsqrt()
    exact = N(y - (P @ y) / P.diagonal(), sd).log_prob(y)
    assert float(found.k_hat.max()) < 0.7
    assert found.total == pytest.approx(float(exact.sum()), abs=0.4)  # 0.3 nats at 1000 draws, over 8 of them its root
    assert float((found.density - exact)[found.k_hat < 0.5].abs().max()) < 0.05


def test_groups_of_bad_weights_are_fitted_without_or_named():
    asked = []

    def refit(weights):
        asked.append(weights)
        return result.fitted

    result, _ = grouped_mean()
    object.__setattr__(result, "refit", refit)
    found = result.leave_one_group_out(worst=0)
    assert bool(found.resolved.all())
    assert found.evaluations == 12 * 7
    assert [int((weights == 0).sum()) for weights in asked] == [4] * 12
    torch.testing.assert_close(found.density, found.in_sample)  # the posterior that came back was that of all rows
    bad = PartsLeftOut(*torch.zeros(2, 2), torch.zeros(2).bool(), 0, torch.tensor([0.2, 0.9]), ("a", "b"))
    assert str(bad).endswith("Not to be trusted, k-hat above 0.7: rows b.")


def test_groups_of_no_weight_are_not_counted():
    whole, _ = grouped_mean()
    weights = torch.ones_like(whole.design.weights)
    weights[whole.design.factors[0].groups == 3] = 0.0
    result = replace(whole, design=whole.design._replace(weights=weights))
    found, all_of_them = result.leave_one_group_out(), whole.leave_one_group_out()
    kept = [k for k in range(len(all_of_them.groups)) if k != 3]
    assert found.groups == tuple(all_of_them.groups[k] for k in kept)
    torch.testing.assert_close(found.density, all_of_them.density[kept])


def test_groups_can_be_left_out_of_one_factor_only():
    with pytest.raises(InputError, match="one grouping factor; this one has none"):
        result_of(design(), column(30, 1), "gaussian").leave_one_group_out()


@pytest.mark.parametrize(
    ("difference", "error", "said"),
    [
        (3.92, 1.39, "a predicts left-out rows better than b: 3.9 ± 1.4 nats of elpd."),
        (3.0, 2.0, "a and b predict left-out rows alike, as far as these rows can tell: 3.0 ± 2.0 nats of elpd apart."),
        (
            -3.0,
            2.0,
            "b and a predict left-out rows alike, as far as these rows can tell: 3.0 ± 2.0 nats of elpd apart.",
        ),
        (8.0, 5.0, "a is ahead of b by 8.0 ± 5.0 nats of elpd, less than 2 standard errors: not decided."),
        (-9.0, 2.0, "b predicts left-out rows better than a: 9.0 ± 2.0 nats of elpd."),
    ],
)
def test_two_models_are_alike_within_two_standard_errors_and_four_nats(monkeypatch, difference, error, said):
    y, result = exact_mean(200)
    other = result_of(torch.ones(200, 1), y, "gaussian", theta=result.fitted.weighted.theta)
    apart = torch.linspace(-1, 1, 200).double()
    apart = apart / apart.std() * error / math.sqrt(200) + difference / 200
    zero = torch.zeros(200).double()
    one, two = (RowsLeftOut(d, d, zero.bool(), 0, zero, ("",) * 200) for d in (apart, zero))
    for of, found in ((result, one), (other, two)):
        monkeypatch.setattr(type(of), "leave_one_out", lambda self, seed=0: {id(result): one, id(other): two}[id(self)])
        assert found is not None
    found = compare(result, other, ("a", "b"))
    assert str(found) == said
    assert found.difference == pytest.approx(difference)
    assert found.standard_error == pytest.approx(error)


def test_models_of_other_rows_are_not_compared():
    y, result = exact_mean()
    with pytest.raises(InputError, match="the same rows in the same order; the outcome"):
        compare(result, result_of(torch.ones(40, 1), y + 1, "gaussian"))
    counts = y.abs().round()
    with pytest.raises(InputError, match="cannot be compared"):
        compare(result_of(torch.ones(40, 1), counts, "gaussian"), result_of(torch.ones(40, 1), counts, "poisson"))
    by = [result_of(torch.ones(40, 1), counts, "poisson", [factor("g", torch.arange(40) % k)]) for k in (4, 5)]
    with pytest.raises(InputError, match="their grouping factors differ"):
        compare(*by, groups=True)
    nowhere = result_of(torch.ones(40, 1), counts, "poisson", theta=torch.full((400, 1), math.nan).double())
    with pytest.raises(InputError, match="of finite log densities; that of row 0 is not"):
        compare(nowhere, result_of(torch.ones(40, 1), counts, "poisson"))


def test_a_saved_result_of_arrays_comes_back(tmp_path):
    """With its design, effects and predictions; of other draws it has no effects, and the fit is not there."""
    result, path = varying(), tmp_path / "result.pt"
    result.save(path)
    again = load(path)
    X, groups = result.design.X[:5], torch.tensor([3, 0, 0, 2, 1])
    assert torch.equal(again.predict(X, X, groups).mean, result.predict(X, X, groups).mean)
    assert again.design.factors[0].levels == result.design.factors[0].levels
    some = again.fitted.theta[[7, 3]]
    assert torch.equal(again.fitted.effects(some, None)[0], again.fitted.drawn[0][[7, 3]])
    with pytest.raises(InputError, match="effects for its own draws of the globals alone"):
        again.fitted.effects(some + 1, None)
    with pytest.raises(InputError, match="leaving groups out needs the fit"):
        again.leave_one_group_out()


def changed(state, change):
    """What a saved result was made of, with other groups."""
    (of,) = state["made"]["factors"]
    return {**state["made"], "factors": [{**of, "groups": change(of["groups"])}]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: {"format": 0}, "no result of format"),
        (lambda s: {"family": "own"}, "its family is 'own', which is none of this library: hand it in"),
        (lambda s: {"converged": 1}, "converged must be of type bool"),
        (lambda s: {"log_evidence": 1}, "log_evidence must be a number"),
        (lambda s: {"weighted": [s["weighted"][0], 2 * s["weighted"][1]]}, "must be shares of 1"),
        (lambda s: {"weighted": [s["weighted"][0][:2], torch.tensor([2.0, -1.0]).double()]}, "must be shares of 1"),
        (lambda s: {"theta": s["theta"].float()}, "theta must be a tensor of float64 with 2 dimensions"),
        (lambda s: {"theta": s["theta"][0]}, "theta must be a tensor of float64 with 2 dimensions"),
        (lambda s: {"theta": s["theta"][:, 1:]}, "theta must have the shape"),
        (lambda s: {"theta": s["theta"] * math.nan}, "theta must be finite numbers"),
        (lambda s: {"made": changed(s, lambda groups: groups + 9)}, "groups must be the number of a level"),
        (lambda s: {"made": changed(s, lambda groups: groups.int())}, "groups must be the number of a level"),
        (lambda s: {"effects": None}, "'NoneType' object is not iterable"),
    ],
)
def test_a_file_that_no_fit_has_written_is_refused(change, said, tmp_path):
    result, path = varying(), tmp_path / "result.pt"
    result.save(path)
    state = torch.load(path, weights_only=True)
    torch.save({**state, **change(state)}, path)
    with pytest.raises(InputError, match=f"holds what no fit has written: .*{said}"):
        load(path)


def test_files_that_are_not_read(tmp_path):
    with pytest.raises(InputError, match="cannot be read: No such file"):
        load(tmp_path / "none.pt")
    (tmp_path / "text.pt").write_text("text")
    with pytest.raises(InputError, match="is no result that was saved"):
        load(tmp_path / "text.pt")


@pytest.mark.parametrize("factors", [0, 1, 2])
def test_arviz_has_draws_log_likelihoods_and_new_data(factors):
    arviz = pytest.importorskip("arviz")
    of = [factor("a", torch.arange(30) % 5), factor("b", torch.arange(30) % 3)][:factors]
    result = result_of(design(), column(30, 1), "gaussian", of, names=("Intercept", "x"))
    data = result.to_arviz()
    assert data.posterior["beta"].dims == ("chain", "draw", "fixed")
    assert data.posterior["residual_sd"].shape == (1, 1000)
    assert data.posterior_predictive["y"].shape == (1, 1000, 30)
    known = {0: (), 1: ("sd", "correlation", "b"), 2: ("sd_a", "correlation_b", "b_b")}[factors]
    assert set(known) <= set(data.posterior)
    if factors == 1:
        assert data.posterior["b"].dims == ("chain", "draw", "group", "random")
    if not factors:
        y, exact = exact_mean()
        loo = arviz.loo(exact.to_arviz(), pointwise=True)
        assert float(getattr(loo, "elpd", getattr(loo, "elpd_loo", None))) == pytest.approx(
            exact.leave_one_out().total, abs=0.02
        )
        assert bool(loo.pareto_k.max() < 0.7)


def test_pictures_are_drawn_on_axes_that_are_given():
    figure = pytest.importorskip("matplotlib.figure")
    ax = figure.Figure().add_subplot()
    result = result_of(design(), column(30, 1).exp().round(), "poisson", [factor("ward", torch.arange(30) % 6)])
    assert result.plot_effects("ward", "Intercept", ax=ax) is ax
    assert [text.get_text() for text in ax.get_yticklabels()][0].startswith("ward")
    assert len(result.plot().get_yticks()) == 2
    assert result.plot_effects(effect=0).get_xlabel() == "Intercept"
    assert result.plot_predictive().get_xlabel() == "y"
    with pytest.raises(InputError, match="effect is the number of a random effect, 0 to 0"):
        result.plot_effects("ward", "slope")


@pytest.mark.parametrize("family", ["gaussian", "bernoulli", "poisson"])
def test_the_predictive_check_draws_frequencies(family):
    pytest.importorskip("matplotlib")
    y = {"gaussian": column(30, 1), "bernoulli": column(30, 1) > 0, "poisson": column(30, 1).exp().round()}[family]
    ax = result_of(design(), y, family).plot_predictive()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["drawn, 90 %", "seen"]
    heights = ax.patches[1].get_data().values
    assert heights.sum() == pytest.approx(1)


@pytest.mark.accuracy
def test_a_regression_is_left_out_by_the_groups_of_a_mixed_model():
    """Log densities of groups are sums of those of their rows given the globals, and refits agree."""
    generator = torch.Generator().manual_seed(0)
    groups = torch.arange(60) // 4
    X = torch.stack([torch.ones(60), torch.randn(60, generator=generator)], 1).double()
    y = torch.poisson((0.3 + 0.4 * X[:, 1] + 0.8 * torch.randn(15, generator=generator)[groups]).exp(), generator)
    mixed = MixedModel(X, y, (X[:, :1], groups), "poisson").fit(progress=False)
    plain = MixedModel(X, y, None, "poisson").fit(progress=False)
    found, refits = (plain.leave_one_group_out(worst, mixed.design.factors[0]) for worst in (math.inf, 0.0))
    assert found.density.shape == (15,)
    assert bool(refits.resolved.all())
    assert float((found.density - refits.density).abs().max()) < 0.1
    difference = compare(mixed, plain, groups=True).difference
    assert difference == pytest.approx(float(mixed.leave_one_group_out().total - found.total), abs=1.0)
