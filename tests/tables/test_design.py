"""Designs: those that one would write by hand, the same of new rows, and of a bad table or formula one sentence."""

import json
import pickle
import re

import numpy as np
import pandas
import pytest
import torch

from torchngvi.errors import InputError, ScaleWarning
from torchngvi.messages import install
from torchngvi.tables import design as formulas
from torchngvi.tables import regression
from torchngvi.tables.design import Formula, FormulaColumns, design_of_arrays
from torchngvi.tables.families import family_of
from torchngvi.tables.parts import Factor


@pytest.fixture
def table():
    return pandas.DataFrame(
        {
            "y": [0.0, 1, 0, 1, 2, 2],
            "x": [1.0, 2, 3, 4, 5, 6],
            "kind": list("abcabc"),
            "group": list("wwuuvv"),
            "half": [1, 2, 1, 2, 1, 2],
            "n": [3, 3, 3, 4, 4, 4],
            "ja": ["ja", "nein"] * 3,
            "size": ["small", "mid", "big", "mid", "big", "small"],
            "time": [1.0, 2, 3, 4, 5, 6.5],
            "a b": [1.5, 2, 2.5, 3, 1, 0],
        }
    )


def made(formula, table, word="gaussian", **rest):
    return Formula(formula, table, family_of(word), **rest)


def same(one, other):
    np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


class TestDesigns:
    def test_by_hand(self, table):
        design = made("y ~ x + kind + (1 + x | group)", table).design
        b, c = (table.kind == "b").to_numpy(), (table.kind == "c").to_numpy()
        same(design.X, np.stack([np.ones(6), table.x, b, c], 1))
        (factor,) = design.factors
        same(factor.Z, np.stack([np.ones(6), table.x], 1))
        same(factor.groups, [2, 2, 0, 0, 1, 1])
        same(design.y[0], table.y)
        same(design.weights, np.ones(6))
        same(design.offset, np.zeros(6))
        assert (factor.name, factor.effects, factor.levels) == ("group", ("Intercept", "x"), ("u", "v", "w"))
        assert design.names == ("Intercept", "x", "kind[b]", "kind[c]")
        numbers = (design.X, design.offset, *design.y, design.weights, factor.Z)
        assert all(number.dtype == torch.float64 for number in numbers)

    def test_without_groups_it_is_a_regression(self, table):
        design = made("y ~ x", table).design
        assert design.factors == ()
        same(design.X, np.stack([np.ones(6), table.x], 1))

    def test_without_intercepts(self, table):
        design = made("y ~ 0 + x + (0 + x | group)", table).design
        same(design.X, table.x.to_numpy()[:, None])
        same(design.factors[0].Z, table.x.to_numpy()[:, None])

    def test_an_offset_is_no_column(self, table):
        design = made("y ~ x + offset(log(x)) + (1 | group)", table).design
        assert design.names == ("Intercept", "x")
        np.testing.assert_allclose(design.offset, np.log(table.x), rtol=1e-15)

    def test_functions_of_columns(self, table):
        design = made("log(y + 1) ~ np.sin(x) * `a b` + I(x ** 2)", table).design
        np.testing.assert_allclose(design.y[0], np.log(table.y + 1), rtol=1e-15)
        np.testing.assert_allclose(design.X[:, 1], np.sin(table.x), rtol=1e-15)
        np.testing.assert_allclose(design.X[:, 3], np.sin(table.x) * table["a b"], rtol=1e-15)
        assert design.names == ("Intercept", "np.sin(x)", "a b", "np.sin(x):a b", "I(x ** 2)")

    @pytest.mark.parametrize("kind", ["uint8", "uint64", "UInt64"])
    def test_of_few_bits_or_without_a_sign(self, table, kind):
        narrow = table.astype({"x": kind, "time": "float32", "y": "Int64"})
        formula = made("y ~ I(x - 10) + log(time)", narrow)
        np.testing.assert_allclose(formula.design.X[:, 1], table.x - 10, rtol=0)
        np.testing.assert_allclose(formula.design.X[:, 2], np.log(table.time), rtol=1e-15)
        same(formula.of(narrow).X, formula.design.X)

    def test_a_sum_of_columns_as_the_response(self, table):
        same(made("y + n ~ x", table).design.y[0], table.y + table.n)

    def test_splines_and_polynomials(self, table):
        design = made("y ~ bs(x, df=4)", table).design
        assert design.X.shape == (6, 5)
        design = made("y ~ poly(x, 2)", table).design
        gram = design.X.mT @ design.X
        np.testing.assert_allclose(gram - gram.diag().diag(), np.zeros((3, 3)), atol=1e-12)

    def test_weights(self, table):
        named, given = (made("y ~ x", table, weights=w).design.weights for w in ("n", table.n.to_numpy()))
        same(named, table.n)
        same(given, table.n)

    @pytest.mark.accuracy
    def test_no_design_with_a_column_for_each_group(self):
        """100,000 groups would be a table of 10¹⁰ numbers."""
        n = 100_000
        big = pandas.DataFrame({"y": np.zeros(n), "x": np.arange(n) % 7.0, "group": np.arange(n)})
        assert made("y ~ x + (1 | group)", big).design.factors[0].Z.shape == (n, 1)


class TestCategories:
    def test_the_order_of_a_categorical_is_kept(self, table):
        table["size"] = pandas.Categorical(table["size"], categories=["small", "mid", "big"])
        assert made("y ~ size", table).design.names == ("Intercept", "size[mid]", "size[big]")
        assert made("y ~ C(size)", table).design.names == ("Intercept", "C(size)[mid]", "C(size)[big]")
        design = made("y ~ C(size, Sum)", table).design
        small, mid, big = (table["size"] == level for level in ("small", "mid", "big"))
        same(design.X[:, 1], small.astype(int) - big.astype(int))
        same(design.X[:, 2], mid.astype(int) - big.astype(int))

    def test_texts_are_sorted(self, table):
        assert made("y ~ size", table).design.names == ("Intercept", "size[mid]", "size[small]")
        assert made("y ~ C(half)", table).design.names == ("Intercept", "C(half)[2]")

    def test_without_rows(self, table):
        table["kind"] = pandas.Categorical(table.kind, categories=["a", "b", "c", "zz"])
        formula = made("y ~ kind + (1 | group)", table)
        assert formula.design.names == ("Intercept", "kind[b]", "kind[c]")
        assert formula.of(table).X.shape == (6, 3)


class TestFactors:
    def test_nested(self, table):
        outer, inner = made("y ~ x + (1 | group/half)", table).design.factors
        assert (outer.name, outer.levels) == ("group", ("u", "v", "w"))
        assert (inner.name, inner.levels) == ("group:half", ("u:1", "u:2", "v:1", "v:2", "w:1", "w:2"))
        same(inner.groups, [4, 5, 0, 1, 2, 3])

    def test_a_double_bar_makes_blocks(self, table):
        factors = made("y ~ x + (1 + x || group)", table).design.factors
        assert [(factor.name, factor.effects) for factor in factors] == [("group", ("Intercept",)), ("group.x", ("x",))]
        same(factors[0].groups, factors[1].groups)

    @pytest.mark.parametrize(
        "effects", ["x - 1", "x + n - 1", "n - 1 + x", "x + 0", "n + x + 0", "1 + x - 1", "0 + x - 1"]
    )
    def test_without_an_intercept_as_in_lme4(self, table, effects):
        wanted = tuple(name for name in effects if name in "xn")
        for bar in ("|", "||"):
            factors = made(f"y ~ x + ({effects} {bar} group)", table).design.factors
            assert tuple(effect for factor in factors for effect in factor.effects) == wanted
        assert made(f"y ~ {effects}", table).design.names == wanted

    @pytest.mark.parametrize("bar", ["1 - 1 |", "1 + 0 |", "1 - 1 ||"])
    def test_nothing_that_varies(self, table, bar):
        with pytest.raises(InputError, match=r"In \(1 - 1 \| group\) nothing varies"):
            made(f"y ~ x + ({bar} group)", table)

    def test_crossed(self, table):
        factors = made("y ~ x + (1 | group) + (1 | half)", table).design.factors
        assert [factor.name for factor in factors] == ["group", "half"]
        same(factors[1].groups, table.half - 1)

    def test_of_two_columns_are_not_merged(self, table):
        table["left"], table["right"] = ["a:b", "a", "a"] * 2, ["c", "b:c", "b:c"] * 2
        (factor,) = made("y ~ x + (1 | left:right)", table).design.factors
        assert factor.groups.tolist() == [1, 0, 0, 1, 0, 0]

    def test_only_combinations_that_are_there(self, table):
        formula = made("y ~ x + (1 | group:kind)", table)
        assert formula.design.factors[0].levels == ("u:a", "u:c", "v:b", "v:c", "w:a", "w:b")
        assert formula.of(table.assign(kind="b")).factors[0].groups.tolist() == [5, 5, -1, -1, 2, 2]

    def test_numbers_are_in_their_order(self, table):
        (factor,) = made("y ~ x + (1 | g)", table.assign(g=[10, 9, 101, 9, 10, 101])).design.factors
        assert factor.levels == ("9", "10", "101")
        same(factor.groups, [1, 0, 2, 0, 1, 2])

    def test_labels_of_several_kinds(self, table):
        table["group"] = pandas.Series([1, 1, "s2", "s2", 3, 3], dtype=object)
        formula = made("y ~ x + (1 | group)", table)
        assert formula.of(table).factors[0].groups.tolist() == [0, 0, 2, 2, 1, 1]
        same(formula.design.factors[0].groups, [0, 0, 2, 2, 1, 1])

    def test_a_fixed_effect_too(self, table):
        for term in ("group", "C(group)"):
            (note,) = made(f"y ~ x + {term} + (1 | group)", table).notes
            assert note.startswith("group is both a fixed effect and a grouping factor: its levels explain all")
        assert made("y ~ x + half + (1 | half)", table).notes == ()  # numbers


class TestNewRows:
    def test_codings_and_centres_are_those_of_the_fit(self, table):
        formula = made("y ~ scale(x) + kind + bs(time, df=4) + (1 + scale(x) | group)", table)
        new = formula.of(table.iloc[[4, 1]].drop(columns="y"))
        np.testing.assert_allclose(new.X, formula.design.X[[4, 1]], rtol=1e-13, atol=1e-13)
        np.testing.assert_allclose(new.factors[0].Z, formula.design.factors[0].Z[[4, 1]], rtol=1e-14)
        same(new.factors[0].groups, formula.design.factors[0].groups[[4, 1]])
        assert new.y == ()
        assert new.names == formula.design.names

    def test_new_groups(self, table):
        formula = made("y ~ x + (1 | group) + (1 | group:half)", table)
        new = formula.of(table.assign(group=["z", "u"] * 3))
        assert new.factors[0].groups.tolist() == [-1, 0] * 3
        assert new.factors[1].groups.tolist() == [-1, 1] * 3
        assert formula.of(table[["x"]]).factors[0].groups.tolist() == [-1] * 6

    def test_with_the_response(self, table):
        formula = made("scale(y) ~ x + (1 | group)", table, weights="n")
        new = formula.of(table.iloc[[5, 0]], require_response=True)
        np.testing.assert_allclose(new.y[0], formula.design.y[0][[5, 0]], rtol=1e-15)
        same(new.weights, [4, 3])
        with pytest.raises(InputError, match="The formula names y; the table has"):
            formula.of(table.drop(columns="y"), require_response=True)
        with pytest.raises(InputError, match="misses values: 1 of y"):
            formula.of(table.assign(y=[np.nan, *table.y[1:]]), require_response=True)
        assert formula.of(table.assign(y=np.nan)).y == ()
        assert formula.of(table.assign(y="?")).y == ()
        same(formula.of(table.assign(n=np.nan)).weights, np.ones(6))

    def test_no_rows(self, table):
        new = made("y ~ x + kind + (1 + x | group)", table).of(table.iloc[:0])
        assert new.X.shape == (0, 4)
        assert new.factors[0].groups.dtype == torch.long

    def test_new_categories(self, table):
        with pytest.raises(InputError, match=r"new rows do not fit .* levels \(d\) in 'kind'"):
            made("y ~ kind + (1 | group)", table).of(table.assign(kind="d"))

    def test_groups_that_have_become_text(self, table):
        formula = made("y ~ x + (1 | half)", table)
        with pytest.raises(
            InputError, match=r"groups half of the fit are as 1 \(int\), those of the table as '1' \(str\)"
        ):
            formula.of(table.assign(half=table.half.astype(str)))
        same(formula.of(table.assign(half=table.half * 1.0)).factors[0].groups, formula.design.factors[0].groups)


class TestResponses:
    def test_two_classes(self, table):
        formula = made("ja ~ x", table, "bernoulli")
        same(formula.design.y[0], table.ja == "nein")
        assert (formula.success, formula.failure, formula.why) == ("nein", "ja", "sorts last")
        formula = made("ja ~ x", table, "bernoulli", positive="ja")
        same(formula.design.y[0], table.ja == "ja")
        assert (formula.success, formula.notes) == ("ja", ())
        same(formula.of(table, require_response=True).y[0], table.ja == "ja")

    def test_of_a_categorical_the_last(self, table):
        table["ja"] = pandas.Categorical(table.ja, categories=["nein", "ja"])
        formula = made("ja ~ x", table, "bernoulli")
        same(formula.design.y[0], table.ja == "ja")
        assert formula.why == "is the last category"

    def test_truth_values(self, table):
        formula = made("yes ~ x", table.assign(yes=table.ja == "ja"), "bernoulli")
        same(formula.design.y[0], table.ja == "ja")
        assert formula.notes == ()

    def test_one_level_against_the_others(self, table):
        same(made("kind[b] ~ x + (1 | group)", table, "bernoulli").design.y[0], table.kind == "b")
        same(made("half[1] ~ x", table, "bernoulli").design.y[0], table.half == 1)
        same(made("kind[b] ~ x", table).design.y[0], table.kind == "b")

    def test_numbers_are_left_to_the_family(self, table):
        formula = made("half ~ x", table, "bernoulli")
        same(formula.design.y[0], table.half)
        assert (formula.success, formula.why[:13]) == ("2", "is the larger")

    def test_trials(self, table):
        for call in ("prop(y, n)", "p(y, n)", "proportion( y , n )", "prop(y, n + 0)"):
            formula = made(f"{call} ~ x + (1 | group)", table, "binomial")
            same(formula.design.y[0], table.y)
            same(formula.design.y[1], table.n)
        same(made("prop(y, 5) ~ x", table, "beta_binomial").design.y[1], [5] * 6)
        same(made("ja ~ x", table, "binomial").design.y[1], [1] * 6)
        new = formula.of(table.iloc[[3]], require_response=True)
        assert [float(part) for part in new.y] == [1.0, 4.0]

    @pytest.mark.parametrize("words", [("yes", "no"), (1, 0), ("none", "right"), (True, False)])
    def test_survival(self, table, words):
        seen = np.array([1, 0, 0, 1, 1, 0])
        formula = made("censored(time, event) ~ x", table.assign(event=[words[1 - s] for s in seen]), "weibull")
        same(formula.design.y[0], table.time)
        same(formula.design.y[1], seen)
        assert len(formula.notes) == isinstance(words[0], str)

    def test_survival_of_a_level_and_of_all(self, table):
        same(made("censored(time, ja[ja]) ~ x", table, "lognormal").design.y[1], table.ja == "ja")
        same(made("time ~ x", table, "weibull").design.y[1], np.ones(6))

    def test_ordered_categories(self, table):
        with pytest.raises(InputError, match="order of the categories"):
            made("size ~ x + kind + (1 | group)", table, "ordinal")
        numbered = table.assign(size=table["size"].map({"small": "3 small", "mid": "2 mid", "big": "1 big"}))
        formula = made("size ~ x + kind + (1 | group)", numbered, "ordinal")
        same(formula.design.y[0], [2, 1, 0, 1, 0, 2])
        assert formula.outcomes == ("1 big", "2 mid", "3 small")
        assert formula.design.names == ("x", "kind[b]", "kind[c]")
        table["size"] = pandas.Categorical(table["size"], categories=["small", "mid", "big"], ordered=True)
        formula = made("size ~ 0 + kind", table, "ordinal")
        same(formula.design.y[0], [0, 1, 2, 1, 2, 0])
        assert formula.outcomes == ("small", "mid", "big")
        assert formula.notes == ()
        assert formula.design.names == ("kind[b]", "kind[c]")  # thresholds are the intercept, 0 or not
        new = formula.of(table.iloc[[2]].astype({"size": str}), require_response=True)
        assert new.y[0].tolist() == [2.0]
        assert formula.of(table.astype({"size": str}).assign(size="huge")).y == ()
        with pytest.raises(InputError, match="size holds 'huge', and the fit had small, mid, big"):
            formula.of(table.astype({"size": str}).assign(size="huge"), require_response=True)

    def test_ordered_numbers(self, table):
        formula = made("half ~ 1", table, "ordinal")
        same(formula.design.y[0], table.half - 1)
        assert formula.outcomes == ("1", "2")
        assert formula.design.X.shape == (6, 0)

    def test_any_categories_without_a_family(self, table):
        formula = Formula("kind ~ x", table)
        same(formula.design.y[0], [0, 1, 2, 0, 1, 2])
        assert formula.outcomes == ("a", "b", "c")
        assert formula.design.names == ("Intercept", "x")

    def test_numbers_with_separators(self, table):
        formula = made("pay ~ x", table.assign(pay=["1,200", "980", "2,150", "700", "3,000", "1,001"]))
        same(formula.design.y[0], [1200, 980, 2150, 700, 3000, 1001])
        assert "read as numbers" in formula.notes[0]

    @pytest.mark.parametrize(
        ("formula", "word", "sentence"),
        [
            ("kind ~ x", "gaussian", r"a number; kind holds categories, a, b, c\. .* as 1: kind\[c\]\. .* 'ordinal'"),
            ("ja ~ x", "poisson", r"a number; ja holds categories, ja, nein\. For two .* family 'bernoulli'\."),
            ("kind ~ x", "bernoulli", r"The response is two classes; kind holds categories, a, b, c"),
            ("kind[z] ~ x", "bernoulli", r"kind has no level 'z'; it has a, b, c\."),
            ("kind[a] ~ x", "ordinal", r"'a' is to be the success, and the outcome is of categories"),
            ("prop(y, n) ~ x", "poisson", r"has trials, and the poisson family takes an outcome alone\. .* binomial"),
            ("prop(y) ~ x", "binomial", r"'prop\(y\)' is to have two parts, as prop\(successes, trials\); it has 1"),
            ("censored(time, y) ~ x", "gamma", r"has events, and the gamma family takes an outcome alone\. .* weibull"),
            ("censored(time, kind) ~ x", "weibull", r"An event was seen or not; kind holds a, b, c\. .* kind\[c\]"),
            ("censored(time, ja[x]) ~ x", "weibull", r"ja has no level 'x'; it has ja, nein"),
            ("C(y) ~ x", "gaussian", r"The response is one number a row; C\(y\) is none"),
            ("log(y - 2) ~ x", "gaussian", r"The term log\(y - 2\) of the formula is not finite in 6 of 6 rows"),
            ("group:kind ~ x", "gaussian", r"cannot be read|one column"),
        ],
    )
    def test_refusals(self, table, formula, word, sentence):
        with pytest.raises(InputError, match=sentence):
            made(formula, table, word)

    def test_positive_of_numbers(self, table):
        with pytest.raises(InputError, match="3 is to be the success, and the outcome is of numbers"):
            made("y ~ x", table, "poisson", positive=3)

    def test_a_level_twice(self, table):
        with pytest.raises(InputError, match=r"ja\[ja\] names the level that counts as success, and positive='nein'"):
            made("ja[ja] ~ x", table, "bernoulli", positive="nein")

    def test_other_censoring(self, table):
        with pytest.raises(InputError, match="only times that are censored on the right"):
            made("censored(time, c) ~ x", table.assign(c=["none", "left", "right"] * 2), "weibull")

    def test_measurements_are_no_categories(self, table):
        with pytest.raises(InputError, match="x has 60 different values, more than 50"):
            made("x ~ 1", pandas.DataFrame({"x": np.arange(60) / 7}), "ordinal")


class TestExposure:
    def test_without_a_logarithm(self):
        hours = np.array([1.0, 40, 300, 7, 80, 15])
        table = pandas.DataFrame({"y": 2 * hours, "hours": hours, "x": np.arange(6.0)})
        formula = made("y ~ x + offset(hours)", table, "poisson")
        assert formula.asked.startswith("Did you mean offset(log(hours))?")

        assert made("y ~ x + offset(log(hours))", table, "poisson").asked == ""
        assert made("y ~ x + offset(hours)", table).asked == ""


class TestRefusals:
    @pytest.mark.parametrize(
        ("formula", "sentence"),
        [
            ("y ~ (1 | group) + (1 + x | group)", r"lets the intercept vary over group twice\. Leave one out"),
            (" ", r"A formula is a text, as 'y ~ x \+ \(1 \| group\)'; got ' '"),
            ("y ~ log(x - 2) + (1 | group)", r"term log\(x - 2\) .* in 2 of 6 rows, the first of them row 0"),
            ("y ~ x + (log(x - 2) | group)", r"term log\(x - 2\) of the formula is not finite"),
            ("x + (1 | group)", r"begins with its response"),
            ("~ x", r"begins with its response"),
            ("y ~ 0 + (1 | group)", r"at least one fixed effect.*leave out the 0"),
            ("y ~ 0 + offset(x)", r"at least one fixed effect.*leave out the 0"),
            ("y ~ x ++* (1 | group)", r"cannot be read"),
            ("y ~ x ~ n", r"cannot be read"),
            ("y ~ age + (1 | group)", r"names age; the table has y, x, kind, group, half"),
            ("y ~ X + (1 | group)", r"names X; the table has .*\. Did you mean 'x'\?"),
            ("y ~ unknown(x) + (1 | group)", r"calls unknown, which no formula may, as it could run any code"),
            ("y ~ Score (0-100)", r"calls Score, .*a column whose name has parentheses stands in backticks"),
            ("y ~ __import__('os')", r"cannot be read|no formula may"),
            ("y ~ y", r"y stands on both sides of the formula"),
            ("y ~ I(0 * x + 1)", r"is 1 in all 6 rows, and the intercept is there already: nothing can tell its"),
            ("y ~ 0 + I(0 * x)", r"is 0 in all 6 rows: nothing can tell its effect"),
            ("y ~ (1 + x + I(2 * x) | group)", r"Intercept, x, I\(2 \* x\) of group, must be linearly independent"),
            ("y ~ (offset(x) | group)", r"an offset that varies over groups"),
            ("y ~ x[2]", r"cannot be read"),
            ("y ~ kind[a]", r"a level in brackets, kind\[a\], that is not the response"),
            ("y ~ x ** 2", r"a power of one term.*Write the square of x as I\(x \*\* 2\)"),
            # constructs of other libraries, by their names
            ("y ~ x^2", r"has \^, which formulas here have not\. Write I\(x \*\* 2\) for a square"),
            ("y ~ .", r"has a point for all other columns, .*\. Name the columns"),
            ("y ~ x %in% group", r"has %in%, which formulas here have not"),
            ("y ~ s(x)", r"has s\(\.\.\), which formulas here have not\. Write bs\(x, df=4\)"),
            ("y ~ factor(half)", r"has factor\(\.\.\), .* Write C\(x\)"),
            ("y ~ mo(half)", r"has mo\(\.\.\).* Monotonic effects are not there"),
            ("y ~ x + (1 | gr(group))", r"has gr\(\.\.\)"),
            ("cbind(y, n) ~ x", r"has cbind\(\.\.\).* Write prop\(successes, trials\)"),
            ("Surv(time, y) ~ x", r"has Surv\(\.\.\).* Write censored\(time, event\)"),
            ("y | trials(n) ~ x", r"has a bar in its response\. Write prop\(successes, trials\)"),
            ("y ~ x + prop(y, n)", r"has prop within another term; it stands alone, as the response"),
            ("y ~ 2*x", r"has the number 2 as a term, or as a factor of one. .* I\(2 \* x\)"),
            ("y ~ x + (2:x | group)", "has the number 2"),
            ("y ~ x + one", r"one is a in all 6 rows, and the intercept is there already: nothing can tell its effect"),
            ("y ~ x * one", r"one is a in all 6 rows, and the intercept"),
            ("y ~ x + (1 + one | group)", r"one is a in all 6 rows, and the intercept"),
            ("weighted(y, n) ~ x", r"has weighted\(..\) on the left.* Write y alone, and hand in weights="),
            ("truncated(y, 0, 1) ~ x", r"has truncated\(..\) on the left.* A truncated outcome is not there"),
        ],
    )
    def test_formulas(self, table, formula, sentence):
        with pytest.raises(InputError, match=sentence):
            made(formula, table.assign(one="a"))

    @pytest.mark.parametrize(
        ("formula", "name"),
        [
            ("y ~ Intercept", "the intercept, Intercept"),
            ("y ~ 0 + Intercept", "the intercept, Intercept"),
            ("y ~ x + (1 + Intercept | group)", "the intercept, Intercept"),
            ("y ~ x + (1 + `1` | group)", "the intercept, 1"),
            ("y ~ `x:n` + x:n", "two columns named x:n"),
            ("y ~ x + (`x:n` + x:n | group)", "two columns named x:n"),
            ("y ~ kind + `kind[b]`", r"two columns named kind\[b\]"),
            ("y ~ log(n) + `log(n)`", r"two columns named log\(n\)"),
        ],
    )
    def test_one_name_of_two_columns(self, table, formula, name):
        """Such terms were merged into one without a word, and a column named Intercept took the intercept's place."""
        table[["Intercept", "1", "x:n", "kind[b]", "log(n)"]] = np.random.default_rng(0).normal(size=(6, 5))
        with pytest.raises(InputError, match=rf"{name}: results could not tell the two apart\. Rename the column"):
            made(formula, table)

    def test_one_level_beside_thresholds(self, table):
        with pytest.raises(InputError, match="one is a in all 6 rows, as the thresholds are"):
            made("y ~ x + one", table.assign(one="a"), "ordinal")

    def test_nothing_is_printed(self, table, capsys):
        with pytest.raises(InputError, match="cannot be computed from the table"):
            made("y ~ bs(x)", table)
        assert capsys.readouterr().out == ""

    def test_all_faults_at_once(self, table):
        table.loc[[0, 3], "x"] = np.nan
        table["weight"], table["day"] = "12 kg", pandas.Timestamp("2024-01-31")
        table.loc[[1, 2], "weight"] = "9 kg", "10.5 kg"
        with pytest.raises(InputError) as caught:
            made("y ~ x + weight + day", table)
        text = str(caught.value)
        assert text.startswith("the table has 3 faults:")
        for part in ("misses values: 2 of x", "column 'weight' holds numbers with a unit", "column 'day' holds dates"):
            assert part in text

    def test_no_table(self):
        with pytest.raises(InputError, match="needs a pandas DataFrame with its columns; got ndarray"):
            made("y ~ x + (1 | group)", np.ones((3, 3)))
        with pytest.raises(InputError, match="The table has no rows"):
            made("y ~ x", pandas.DataFrame({"y": [], "x": []}, dtype=float))

    def test_weights(self, table):
        with pytest.raises(InputError, match="^weights names size2; the table has"):
            made("y ~ x", table, weights="size2")
        with pytest.raises(InputError, match="weights must not be negative; got -1"):
            made("y ~ x", table, weights=-np.ones(6))
        with pytest.raises(InputError, match=r"weights must have one entry for each of the 6 rows; got shape \(5,\)"):
            made("y ~ x", table, weights=np.ones(5))
        with pytest.raises(InputError, match="no row has a positive weight"):
            made("y ~ x", table, weights=np.zeros(6))
        with pytest.warns(ScaleWarning, match="the weights of the 6 rows sum to 1"):
            made("y ~ x", table, weights=np.full(6, 1 / 6))

    def test_without_the_library(self, table, monkeypatch):
        monkeypatch.setattr(formulas, "formulae", None)
        with pytest.raises(ImportError, match=re.escape(install("formula"))):
            made("y ~ x", table)


class TestWeights:
    def test_a_series_by_its_index(self, table):
        weights = pandas.Series([1.0, 2, 3, 4, 5, 6], index=[5, 4, 3, 2, 1, 0])
        same(made("y ~ x", table, weights=weights).design.weights, [6, 5, 4, 3, 2, 1])
        same(made("y ~ x", table, weights=weights.to_numpy()).design.weights, [1, 2, 3, 4, 5, 6])
        with pytest.raises(InputError, match="weights is a Series of 6 entries whose index is not that of the 5 rows"):
            made("y ~ x", table.tail(5), weights=weights)

    def test_of_arrays(self, table):
        one, other = table.x.sample(frac=1, random_state=0), table.time.sample(frac=1, random_state=1)
        X = table[["x", "half"]].set_axis(list("abcdef"))
        one.index, other.index = (part.index.map(dict(enumerate("abcdef"))) for part in (one, other))
        groups = pandas.Series([0, 0, 1, 1, 2, 2], index=list("abcdef"))[::-1]
        design = design_of_arrays(X, one, (np.ones((6, 1)), groups), offset=other, weights=one)
        for found, wanted in ((design.y[0], table.x), (design.offset, table.time), (design.weights, table.x)):
            same(found, wanted)
        same(design.factors[0].groups, [0, 0, 1, 1, 2, 2])
        with pytest.raises(InputError, match="offset is a Series"):
            design_of_arrays(X, one, offset=table.time)


class TestCells:
    def test_several_values(self, table):
        table["x"] = [[1, 2]] * 6
        for formula in ("y ~ x", "x ~ time", "y ~ time + (1 | x)"):
            with pytest.raises(InputError, match="column 'x' holds cells of several values, as a list"):
                made(formula, table)

    def test_numbers_and_texts(self, table):
        table["kind"] = pandas.Series([1, "a"] * 3, dtype=object)
        with pytest.raises(InputError, match=r"column 'kind' holds both numbers and texts, such as 1 and 'a'\."):
            made("y ~ kind", table)
        assert made("y ~ I(kind == 'a')", table).design.X[:, 1].tolist() == [0, 1] * 3


class TestNested:
    @pytest.mark.parametrize(
        ("short", "long"),
        [
            ("kind/x", "kind + kind:x"),
            ("kind/ja", "kind + kind:ja"),
            ("C(kind)/x", "C(kind) + C(kind):x"),
            ("(kind/x | group)", "(kind + kind:x | group)"),
        ],
    )
    def test_a_category_before_a_slash(self, table, short, long):
        table = pandas.concat([table] * 3, ignore_index=True)
        table["x"], table["ja"] = np.arange(18.0) ** 2, ["ja"] * 8 + ["nein"] * 10
        one, other = (made(f"y ~ {text}", table).design for text in (short, long))
        same(one.X, other.X)
        assert one.names == other.names
        assert [(part.effects, part.Z.tolist()) for part in one.factors] == [
            (part.effects, part.Z.tolist()) for part in other.factors
        ]
        again = made(f"y ~ {short}", table).of(table)
        same(again.X, one.X)


class TestTrials:
    @pytest.mark.parametrize(("formula", "trials"), [("prop(half, n) ~ x", [3, 3]), ("prop(half, 10) ~ x", [10, 10])])
    def test_without_successes(self, table, formula, trials):
        (y,) = made(formula, table, "binomial").of(table[["x", "n"]].head(2)).y
        same(y, trials)
        (y,) = made(formula, table, "binomial").of(table[["x", "n"]].head(2).assign(half=["?", "?"])).y
        same(y, trials)

    def test_a_response_of_new_rows(self, table):
        result = regression("prop(half, n) ~ x", table, "binomial").fit(progress=False)
        drawn = result.predict(table[["x"]].assign(n=50), kind="response")
        assert drawn.draws.max() > 4
        assert drawn.mean.shape == (6,)
        with pytest.raises(InputError, match="needs the trials of each row"):
            result.predict(table[["x"]], kind="response")


class TestSaved:
    @pytest.mark.parametrize(
        ("formula", "word"),
        [
            ("y ~ scale(x) + kind + (1 + x | group)", "gaussian"),
            ("ja ~ C(half) + (1 | group/half)", "bernoulli"),
            ("size ~ x", "ordinal"),
            ("prop(y, n) ~ day + (1 | flag) + (1 | when)", "binomial"),
        ],
    )
    def test_again(self, table, formula, word):
        table["size"] = pandas.Categorical(table["size"], categories=["small", "mid", "big"])
        table["day"], table["flag"] = np.arange(6) + 0.1, [True, False] * 3
        table["when"] = pandas.to_datetime(["2024-01-01", "2024-02-01"] * 3)
        first = made(formula, table, word, weights="n", positive="ja" if word == "bernoulli" else None)
        state = json.loads(json.dumps(first.state()))
        for again in (pickle.loads(pickle.dumps(first)), Formula.of_state(state, family_of(word))):
            for one, other in zip(again.design[:1], first.design[:1], strict=True):
                assert torch.equal(one, other)
            assert torch.equal(again.design.weights, first.design.weights)
            assert all(map(torch.equal, again.design.y, first.design.y))
            assert [factor.levels for factor in again.design.factors] == [f.levels for f in first.design.factors]
            assert (again.outcomes, again.success, again.notes) == (first.outcomes, first.success, first.notes)
            new, old = (some.of(table.iloc[[5, 2]], require_response=True) for some in (again, first))
            assert torch.equal(new.X, old.X)
            assert all(torch.equal(a.groups, b.groups) for a, b in zip(new.factors, old.factors, strict=True))

    def test_only_the_columns_that_are_used(self, table):
        assert set(made("y ~ x + (1 | group)", table).state()["columns"]) == {"y", "x", "group"}

    def test_weights_by_numbers(self, table):
        first = made("y ~ x", table, weights=table.n.to_numpy())
        same(Formula.of_state(first.state(), family_of("gaussian")).design.weights, table.n)

    def test_what_json_has_not(self, table):
        table["group"] = pandas.Series([1 + 2j, 1j] * 3, dtype=object).map(lambda z: (z.real, z.imag))
        with pytest.raises(InputError, match="Column 'group' cannot be saved"):
            made("y ~ x + (1 | group)", table).state()


class TestColumns:
    def test_without_a_table(self):
        found = FormulaColumns.of("censored(time, dead[yes]) ~ log(`a b`) + C(kind, Sum) + (1 + x || g/h)")
        assert found == FormulaColumns(("dead", "time"), ("a b", "kind", "x"), ("g", "h"))

    def test_signs_within_quotes(self, table):
        odd = table.rename(columns={"x": "a~(b|c)", "y": "out^put"})
        design = made("`out^put` ~ `a~(b|c)` + (1 | group)", odd).design
        assert design.names == ("Intercept", "a~(b|c)")
        same(design.X[:, 1], table.x)
        same(design.y[0], table.y)


class TestArrays:
    X = np.array([[1.0, 0.5], [1.0, 2.0], [1.0, 3.5], [1.0, 4.0]])
    y = np.array([1.0, 2.0, 0.0, 4.0])
    groups = np.array([0, 1, 0, 1])

    def test_the_same_as_by_a_formula(self, table):
        X = np.stack([np.ones(6), table.x], 1)
        groups = pandas.factorize(table.group, sort=True)[0]
        arrays = design_of_arrays(X, table.y.to_numpy(), {"group": (X, groups)}, names=("Intercept", "x"))
        design = made("y ~ x + (1 + x | group)", table).design
        assert torch.equal(arrays.X, design.X)
        assert torch.equal(arrays.factors[0].Z, design.factors[0].Z)
        assert torch.equal(arrays.factors[0].groups, design.factors[0].groups)

    def test_names(self):
        design = design_of_arrays(self.X, self.y, (self.X, self.groups))
        assert design.names == ("Intercept", "x1")
        (factor,) = design.factors
        assert (factor.name, factor.effects, factor.levels) == ("group", ("Intercept", "z1"), ("0", "1"))
        assert design_of_arrays(self.X[:, 1:], self.y).names == ("x1",)
        own = Factor("g", ("level",), ("a", "b"), torch.ones(4, 1), torch.tensor([0, 1, 0, 1]))
        assert design_of_arrays(self.X, self.y, own).factors[0].levels == ("a", "b")
        assert [f.name for f in design_of_arrays(self.X, self.y, {"a": own, "b": own}).factors] == ["a", "b"]

    def test_what_stands_beside_the_outcome(self):
        design = design_of_arrays(self.X, (self.y, [4, 4, 4, 4]), offset=self.y, weights=[1, 2, 3, 4])
        assert design.y[1].tolist() == [4.0] * 4
        assert design.offset.tolist() == self.y.tolist()
        assert design.weights.tolist() == [1.0, 2.0, 3.0, 4.0]

    def test_float32_and_lists(self):
        design = design_of_arrays(torch.tensor(self.X, dtype=torch.float32), [1, 2, 0, 4])
        assert design.X.dtype == design.y[0].dtype == torch.float64

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"X": np.ones(4)}, r"X must be \(N, p\), one row an observation; got shape \(4,\)"),
            ({"X": np.array([[1.0, np.nan]] * 4)}, r"X"),
            ({"y": np.ones(3)}, r"y must have one entry for each of the 4 rows; got shape \(3,\)"),
            ({"y": np.array([1, np.inf, 2, 3])}, r"y"),
            ({"X": np.array([[1.0, 3.0]] * 4)}, r"x1 is 3 in all 4 rows, and the intercept is there already"),
            ({"names": ("a", "a")}, r"names must be 2 different names of the columns of X; got \['a', 'a'\]"),
            ({"offset": np.ones(3)}, r"offset must have one entry for each of the 4 rows"),
            ({"random": (np.ones((4, 1)), [0.0, 1, 0, 1])}, r"groups must be integers; got torch\.float32"),
            ({"random": (np.ones((4, 1)), ["a", "b", "a", "b"])}, r"groups must be integers.* return_inverse"),
            ({"random": (np.ones((4, 1)), [0, 1, 0])}, r"groups must have one integer for each of the 4 rows"),
            ({"random": (np.ones((4, 1)), [0, 2, 0, 2])}, r"numbered 0, \.\.\., n - 1, .* got no row of group 1"),
            ({"random": (np.ones((4, 1)), [-1, 0, 0, 1])}, r"numbered 0, \.\.\., n - 1, .* got a group -1"),
            ({"random": (np.ones((3, 1)), [0, 1, 0])}, r"groups must have one integer|Z must have one row"),
            ({"random": (np.ones((4, 2)), [0, 1, 0, 1])}, r"Intercept, z1 of group, must be linearly independent"),
            ({"random": (np.eye(4), [0, 0, 0, 0])}, r"as a matrix of the groups has, .* groups are Z\.argmax"),
            ({"random": np.ones((4, 1))}, r"random holds a pair \(Z, groups\) for the factor group"),
        ],
    )
    def test_refusals(self, change, sentence):
        given = {"X": self.X, "y": self.y, **change}
        with pytest.raises(InputError, match=sentence):
            design_of_arrays(given.pop("X"), given.pop("y"), given.pop("random", None), **given)


def test_many_numbers_kept_as_texts_are_named_as_numbers():
    table = pandas.DataFrame({"y": range(60), "x": [f"{i / 7:.2f}" for i in range(60)]})
    with pytest.raises(InputError, match=r"holds numbers as texts, such as '0.00'.*table\['x'\].astype\(float\) makes"):
        regression("y ~ x", table)
