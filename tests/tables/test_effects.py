"""Marginal effects, contrasts and average predictions, beside what they are by hand."""

import math

import numpy as np
import pandas
import pytest
import torch
from made import result_of, table_result

from torchngvi.errors import InputError
from torchngvi.tables import regression


def by_hand(result, frame, population=""):
    """Linear predictors of the rows of a table, (S, N), computed without the code that is tested."""
    draws, design = result.draws(), result.formula.of(frame)
    eta = draws.fixed @ design.X.T
    if result.design.factors and not population:
        eta = eta + draws.effects["g"][:, design.factors[0].groups, 0]
    return eta


def coefficient(result, name):
    return result.draws().fixed[:, result.fixed_names.index(name), None]


def test_the_marginal_effect_of_a_number_is_the_average_derivative():
    result = table_result()
    table = result.formula.table
    p = by_hand(result, table).sigmoid()
    z = torch.tensor(table["z"].to_numpy())
    exact = (p * (1 - p) * (coefficient(result, "x") + coefficient(result, "x:z") * z)).mean(1)
    found = result.marginal_effects("x")
    torch.testing.assert_close(found.draws[:, 0], exact, rtol=1e-7, atol=1e-9)
    row = found.table.iloc[0]
    assert row["mean"] == pytest.approx(float(exact.mean()), rel=1e-7)
    assert row["sd"] == pytest.approx(float(exact.std(correction=0)), rel=1e-6)
    assert row["low"] < row["mean"] < row["high"]
    assert str(found).startswith("average effects of x on E[y], per unit")


def test_it_is_the_finite_difference_of_predictions_averaged_over_draws():
    result = table_result("poisson")
    table, h = result.formula.table, 1e-3
    up, down = (result.predict(table.assign(x=table["x"] + step)).draws for step in (h, -h))
    found = result.marginal_effects("x")
    torch.testing.assert_close(found.draws[:, 0], ((up - down) / (2 * h)).mean(1), rtol=1e-5, atol=1e-7)


def test_at_sets_a_column_in_all_rows_and_by_averages_over_its_own_rows():
    result = table_result()
    table = result.formula.table
    found = result.marginal_effects("x", at={"z": [0, 1]}, by="sex")
    assert list(found.table.columns) == ["z", "sex", "mean", "sd", "low", "high"]
    assert found.table[["z", "sex"]].to_numpy().tolist() == [[0, "f"], [0, "m"], [1, "f"], [1, "m"]]
    for k, (z, sex) in enumerate(zip(found.table["z"], found.table["sex"], strict=True)):
        p = by_hand(result, table.assign(z=float(z)))[:, (table["sex"] == sex).tolist()].sigmoid()
        exact = (p * (1 - p) * (coefficient(result, "x") + coefficient(result, "x:z") * z)).mean(1)
        torch.testing.assert_close(found.draws[:, k], exact, rtol=1e-7, atol=1e-9)
    assert "z=0, sex=f" in str(found)


def test_of_categories_it_is_the_difference_from_the_first_level():
    result = table_result()
    table = result.formula.table
    men, women = (by_hand(result, table.assign(sex=sex)).sigmoid().mean(1) for sex in "mf")
    found = result.marginal_effects("sex")
    torch.testing.assert_close(found.draws[:, 0], men - women)
    assert found.table["sex"].tolist() == ["m - f"]
    linear = result.marginal_effects("sex", kind="linear")
    torch.testing.assert_close(linear.draws, coefficient(result, "sex[m]"))


def test_effects_of_groups_are_the_rows_own_or_none_or_averaged_over():
    result = table_result("poisson")
    table = result.formula.table
    s2 = result.draws().sd["g"].square()
    z = torch.tensor(table["z"].to_numpy())
    slope = coefficient(result, "x") + coefficient(result, "x:z") * z
    typical = (by_hand(result, table, "typical").exp() * slope).mean(1)
    found = result.marginal_effects("x", population="typical")
    torch.testing.assert_close(found.draws[:, 0], typical, rtol=1e-6, atol=1e-8)
    average = result.marginal_effects("x", population="average")
    near = s2[:, 0] < 4
    torch.testing.assert_close(average.draws[near, 0], (typical * (s2[:, 0] / 2).exp())[near], rtol=1e-6, atol=1e-8)
    assert "over new groups" in str(average)
    assert not torch.allclose(result.marginal_effects("x").draws[:, 0], typical)


def test_rows_count_by_their_weights_and_new_rows_alike():
    weights = torch.arange(60).double()
    result = table_result(weights=weights)
    p = by_hand(result, result.formula.table).sigmoid()
    found = result.predictions(by="sex")
    women = torch.tensor((result.formula.table["sex"] == "f").to_numpy()).double() * weights
    torch.testing.assert_close(found.draws[:, 0], (p * women).sum(1) / women.sum())
    new = result.formula.table.head(4)
    alike = result.predictions(new, by="sex").draws[:, 1]
    torch.testing.assert_close(alike, by_hand(result, new)[:, [1, 2]].sigmoid().mean(1))


@pytest.mark.parametrize("scale", ["mean", "linear", "ratio"])
def test_contrasts_are_differences_or_ratios_of_averages(scale):
    result = table_result("poisson")
    table = result.formula.table
    how = (lambda eta: eta) if scale == "linear" else torch.exp
    men, women = (how(by_hand(result, table.assign(sex=sex))).mean(1) for sex in "mf")
    found = result.contrasts("sex", scale=scale)
    torch.testing.assert_close(found.draws[:, 0], men / women if scale == "ratio" else men - women)
    assert found.table["sex"].tolist() == ["m / f" if scale == "ratio" else "m - f"]
    if scale == "ratio":  # of a main effect with the log link it is the rate ratio
        torch.testing.assert_close(found.draws, coefficient(result, "sex[m]").exp())


def test_contrasts_of_numbers_are_between_the_values_that_are_given():
    result = table_result()
    table = result.formula.table
    found = result.contrasts("x", by="sex", at={"z": 2.0}, values=[0, 1, 3])
    assert found.table["x"].tolist() == ["1 - 0"] * 2 + ["3 - 0"] * 2 + ["3 - 1"] * 2
    one, three = (by_hand(result, table.assign(z=2.0, x=float(x))).sigmoid() for x in (1, 3))
    women = (table["sex"] == "f").tolist()
    torch.testing.assert_close(found.draws[:, 4], (three - one)[:, women].mean(1))


def test_levels_keep_the_order_of_their_categories():
    result = table_result()
    table = result.formula.table
    result.formula.table = table.assign(sex=pandas.Categorical(table["sex"], categories=["m", "other", "f"]))
    assert result.contrasts("sex").table["sex"].tolist() == ["f - m"]


def test_predictions_of_rows_have_the_columns_of_the_rows():
    result = table_result()
    found = result.predictions()
    assert len(found.table) == 60
    assert list(found.table.columns) == ["y", "x", "z", "sex", "g", "mean", "sd", "low", "high"]
    torch.testing.assert_close(found.draws, by_hand(result, result.formula.table).sigmoid())
    assert ".. 60 lines in all: see .table" in str(found)


def test_a_grid_has_other_columns_at_their_means_and_no_groups():
    result = table_result()
    table = result.formula.table
    found = result.predictions({"x": [0, 1], "sex": ["f", "m"]})
    assert found.table[["x", "sex"]].to_numpy().tolist() == [[0, "f"], [0, "m"], [1, "f"], [1, "m"]]
    frame = pandas.DataFrame({"x": [0, 0, 1, 1], "sex": list("fmfm"), "z": table["z"].mean()})
    torch.testing.assert_close(found.draws, by_hand(result, frame, "typical").sigmoid())
    own = result.predictions({"g": ["w2"]})
    frame = pandas.DataFrame({"g": ["w2"], "x": table["x"].mean(), "sex": "m", "z": table["z"].mean()})
    torch.testing.assert_close(own.draws, by_hand(result, frame).sigmoid())


def test_many_rows_are_taken_in_parts(monkeypatch):
    from torchngvi.tables import effects

    result = table_result()
    whole = result.marginal_effects("x", population="average").draws
    monkeypatch.setattr(effects, "AT_ONCE", 7000)
    torch.testing.assert_close(result.marginal_effects("x", population="average").draws, whole, rtol=1e-9, atol=1e-10)
    new = result.formula.table.assign(g="new")
    eta = result.predict(new, kind="linear").draws - by_hand(result, new, "typical")
    torch.testing.assert_close(eta[:, 0], eta[:, -1])


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda r: r.marginal_effects("w"), "the columns are y, x, z, sex, g; got 'w'"),
        (lambda r: r.marginal_effects("x", at={"zz": [0]}), "Did you mean 'z'"),
        (lambda r: r.marginal_effects("x", by="ses"), "Did you mean 'sex'"),
        (lambda r: r.marginal_effects("x", kind="response"), "for new outcomes use predict"),
        (lambda r: r.contrasts("x"), "say which are compared, such as values=\\[0, 1\\]"),
        (lambda r: r.contrasts("sex", scale="odds"), "scale is one of mean, linear, ratio"),
        (lambda r: r.contrasts("sex", values=["f", "w"]), "sex has the levels f, m; got 'w'"),
        (lambda r: r.contrasts("sex", values=["f"]), "at least two values of sex; got 1"),
        (lambda r: r.predictions({"q": [1]}), "got 'q'"),
        (lambda r: r.marginal_effects("x", new=r.formula.table.head(0)), "at least one row"),
        (lambda r: r.contrasts("sex", at={"sex": ["f"]}), "sex is given its values .* got it in at too"),
        (lambda r: r.contrasts("sex", by="sex"), "sex is given its values .* got it in by too"),
        (lambda r: r.contrasts("x", by="x", values=[0, 1]), "x is given its values .* got it in by too"),
        (lambda r: r.marginal_effects("sex", at={"sex": ["f", "m"]}), "sex is given its values .* got it in at too"),
        (lambda r: r.contrasts("sex", values=["f", "f"]), "different values of sex; got 'f' twice"),
        (lambda r: r.marginal_effects("y"), "y is the outcome; .* that predict it: x, z, sex, g"),
        (
            lambda r: r.marginal_effects("x", new=r.formula.table.drop(columns="x")),
            "the columns are y, z, sex, g; got .x.",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused(ask, said):
    with pytest.raises(InputError, match=said):
        ask(table_result())


def test_parts_whose_rows_have_no_weight_have_no_average():
    women = torch.tensor([k % 3 == 0 for k in range(60)])
    found = table_result(weights=(~women).double()).predictions(by="sex")
    assert found.table["sex"].tolist() == ["m"]
    assert bool(found.draws.isfinite().all())


def table_of_numbers(rows=60):
    rng = np.random.default_rng(0)
    q = np.concatenate([[0.0, 0.0], rng.exponential(size=rows - 2)])
    table = pandas.DataFrame({"q": q, "b": np.arange(rows) % 2, "g": 3 * (np.arange(rows) % 6)})
    return table.assign(y=q + table["b"] + table["g"] / 5 + rng.normal(size=rows))


def fit_of(formula, table):
    return regression(formula, table, family="gaussian").fit(progress=False)


def test_groups_that_are_numbers_are_levels():
    result = fit_of("y ~ 1 + (1 | g)", table_of_numbers())
    found = result.marginal_effects("g")
    assert found.table["g"].tolist() == ["3 - 0", "6 - 0", "9 - 0", "12 - 0", "15 - 0"]
    effects = result.draws().effects["g"][:, :, 0]
    torch.testing.assert_close(found.draws, effects[:, 1:] - effects[:, :1])
    both = fit_of("y ~ g + (1 | g)", table_of_numbers())
    with pytest.raises(InputError, match="of numbers and of groups: .* Take population='typical'"):
        both.marginal_effects("g")
    found = both.marginal_effects("g", population="typical")
    torch.testing.assert_close(found.draws, coefficient(both, "g"), rtol=1e-6, atol=1e-8)


def test_derivatives_are_by_the_step_that_the_numbers_of_a_column_have():
    table = table_of_numbers()
    far = fit_of("y ~ I(q - 1000000000)", table.assign(q=1e9 + table["q"]))
    slope = far.draws().fixed[:, 1:]
    torch.testing.assert_close(far.marginal_effects("q").draws, slope, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        far.marginal_effects("q", new=table.assign(q=1e12)).draws, slope, rtol=1e-3, atol=1e-6
    )  # where the step of the fit is nothing


def test_derivatives_are_one_sided_where_a_side_is_not_finite():
    result = fit_of("y ~ I(q ** 1.5)", table_of_numbers())
    q = torch.tensor(result.formula.table["q"].to_numpy())
    exact = 1.5 * q.sqrt().mean() * result.draws().fixed[:, 1:]
    torch.testing.assert_close(result.marginal_effects("q").draws, exact, rtol=1e-3, atol=1e-6)
    with pytest.raises(InputError, match="not finite"):  # the row itself
        result.marginal_effects("q", new=result.formula.table.assign(q=-1.0))


@pytest.mark.parametrize(
    ("term", "said"),
    [
        ("I((q * (1 - q)) ** 0.5)", "the derivative by q cannot be computed, though its rows can be predicted"),
        ("I(q > 0)", r"the column I\(q > 0\) of the design jumps at q = 0, and has no derivative there"),
    ],
)
def test_where_there_is_no_derivative_it_is_refused(term, said):
    table = table_of_numbers()
    table = table.assign(q=table["q"].clip(upper=1.0))
    with pytest.raises(InputError, match=said):
        fit_of(f"y ~ {term}", table).marginal_effects("q")


def test_levels_are_known_by_how_they_are_written():
    result = fit_of("y ~ C(b)", table_of_numbers())
    torch.testing.assert_close(result.contrasts("b", values=["0", "1"]).draws, coefficient(result, "C(b)[1]"))
    assert result.predictions(at={"b": ["1"]}).labels == ({"b": 1},)
    with pytest.raises(InputError, match="b has the levels 0, 1; got '2'"):
        result.contrasts("b", values=["0", "2"])


def test_a_model_of_arrays_has_no_columns():
    result = result_of(torch.ones(10, 1), torch.arange(10), "gaussian")
    with pytest.raises(InputError, match="made of arrays: compare predictions"):
        result.marginal_effects("x")


def test_pictures_along_a_column():
    pytest.importorskip("matplotlib")
    result = table_result()
    ax = result.plot_marginal("x", points=9)
    assert ax.get_xlabel() == "x"
    assert ax.get_ylabel() == "y"
    at, mean = ax.lines[0].get_data()
    assert len(at) == 9
    exact = by_hand(result, result.formula.table.assign(x=at[3])).sigmoid().mean()
    assert mean[3] == pytest.approx(float(exact), rel=1e-6)
    assert math.isclose(at[0], result.formula.table["x"].min(), rel_tol=1e-6)
    assert len(result.plot_marginal("sex").containers) == 1


def golden_table(rows=400):
    """A table of sequences, so that no generator of random numbers is needed to have it again."""
    i = np.arange(rows)
    x, z = 4 * (i * 0.754877666 % 1) - 2 + 0.5 * np.sin(i), 2 * (i * 0.569840291 % 1) - 1
    male, u = i * 0.41421356 % 1 >= 0.45, i * 0.618033988 % 1
    eta = -0.3 + 0.8 * x - 0.5 * z + 0.7 * male + 0.6 * x * z
    y, c = (u < 1 / (1 + np.exp(-eta))).astype(float), np.floor(-np.log(1 - u) * np.exp(0.3 * eta))
    return pandas.DataFrame({"x": x, "z": z, "sex": np.where(male, "m", "f"), "y": y, "c": c})


@pytest.mark.parametrize(
    ("formula", "family", "effects"),
    [
        (
            "y ~ x + z + sex",
            "bernoulli",
            {"x": (0.16924111, 0.01305239), "z": (-0.11023235, 0.03719067), "sex": (0.11675214, 0.04429065)},
        ),
        (
            "c ~ x + z + sex",
            "poisson",
            {"x": (0.22497673, 0.03791418), "z": (-0.06895089, 0.07095315), "sex": (0.20245824, 0.08135618)},
        ),
    ],
)
def test_average_marginal_effects_are_those_of_statsmodels(formula, family, effects):
    # statsmodels 0.15.0, get_margeff(at="overall", dummy=True) with its delta-method errors; flat priors here
    pytest.importorskip("formulae")
    from torchngvi.tables.model import regression

    result = regression(formula, golden_table(), family, priors="flat").fit(draws=4096, progress=False)
    for name, (effect, error) in effects.items():
        row = result.marginal_effects(name).table.iloc[0]
        assert row["mean"] == pytest.approx(effect, abs=0.15 * error)
        assert row["sd"] == pytest.approx(error, rel=0.08)


@pytest.mark.accuracy
def test_effects_on_the_probabilities_of_categories_sum_to_0():
    pytest.importorskip("formulae")
    from torchngvi.tables.model import regression

    table = golden_table()
    low, high = table["x"] < -0.6, table["x"] + table["z"] > 0.9
    words = np.where(high, "high", np.where(low, "low", "mid"))
    table["o"] = pandas.Categorical(words, categories=["low", "mid", "high"], ordered=True)
    result = regression("o ~ z + sex", table, "ordinal").fit(progress=False)
    found = result.marginal_effects("z")
    assert found.table["outcome"].tolist() == ["low", "mid", "high"]
    torch.testing.assert_close(found.draws.sum(1), torch.zeros(1000).double(), atol=1e-9, rtol=0)
    h = 1e-4
    up, down = (result.predict(table.assign(z=table["z"] + step), kind="probability").draws for step in (h, -h))
    torch.testing.assert_close(found.draws, ((up - down) / (2 * h)).mean(1), rtol=1e-5, atol=1e-8)
    text = str(result)
    assert "thresholds" in text
    assert "regression, ordinal: 400 rows" in text


def test_contrasts_are_those_of_emmeans():
    """R 4.2.2, emmeans of glm(y ~ arm * sex + x, binomial) at x = 0: pairs(regrid(emmeans(m, ~ arm | sex)))."""
    pytest.importorskip("formulae")
    rng, n = np.random.default_rng(0), 3000
    frame = pandas.DataFrame(
        {"arm": rng.choice(["a", "b", "c"], n), "sex": rng.choice(["f", "m"], n), "x": rng.normal(size=n)}
    )
    eta = -0.3 + 0.5 * (frame.arm == "b") + 0.9 * (frame.arm == "c") + 0.4 * (frame.sex == "m") * (frame.arm == "c")
    frame["y"] = (rng.random(n) < 1 / (1 + np.exp(-eta - 0.6 * frame.x))).astype(int)
    result = regression("y ~ arm * sex + x", frame, "bernoulli", priors="flat").fit(progress=False)
    new = pandas.DataFrame({"arm": ["a", "a"], "sex": ["f", "m"], "x": [0.0, 0.0]})
    found = result.contrasts("arm", by="sex", new=new).table
    estimates = [0.16643447, 0.11339379, 0.27522566, 0.30307514, 0.10879119, 0.18968134]
    errors = [0.031853217, 0.033233445, 0.030506440, 0.031103418, 0.030423083, 0.030881612]
    assert (np.abs(found["mean"] - estimates) < 0.15 * np.array(errors)).all()
    assert (np.abs(found["sd"] / errors - 1) < 0.1).all()
