"""Models of bambi, by stand-ins that have what bambi 0.17 has: `from_bambi` makes the same model as a formula."""

import numpy as np
import pandas as pd
import pytest
from helpers import close

from torchngvi.adapters.bambi import from_bambi
from torchngvi.errors import InputError
from torchngvi.tables import Exponential, Gamma, HalfNormal, HalfT, Normal, StudentT, regression


class Named:
    __module__ = "bambi.models"

    def __init__(self, **fields):
        vars(self).update(fields)


def prior(name, auto_scale=False, **args):
    return Named(name=name, auto_scale=auto_scale, args=args)


def model(formula, family="gaussian", link="identity", terms=(), others=(), additionals=(), **own):
    rng, groups = np.random.default_rng(0), np.repeat(np.arange(12), 5)
    x = rng.normal(size=60)
    table = pd.DataFrame({"x": x, "kind": rng.choice(["a", "b", "c"], 60), "g": groups, "c": rng.poisson(2.0, 60)})
    table["said"] = np.where(x + rng.normal(size=60) > 0, "yes", "no")
    table["y"] = 0.5 * x + rng.normal(size=12)[groups] + rng.normal(size=60)
    first = Named(terms={name: Named(prior=of) for name, of in dict(terms).items()})
    components = {"mu": first, **{name: Named(prior=of) for name, of in dict(others).items()}}
    links = {"mu": Named(name=link), "sigma": Named(name="log")}
    made = Named(main=formula, additionals=additionals)
    return Named(formula=made, data=table, family=Named(name=family, link=links), components=components, **own)


def test_defaults_of_bambi_are_those_here():
    given = model("c ~ x + (1 | g)", "poisson", "log", {"x": prior("Normal", True, mu=0.0, sigma=3.0)})
    ours, theirs = regression("c ~ x + (1 | g)", given.data, "poisson"), from_bambi(given)
    assert theirs.priors.describe() == ours.priors.describe()
    close(theirs.fit(progress=False).summary().fixed.mean, ours.fit(progress=False).summary().fixed.mean, 1e-12)


def test_priors_of_a_user_are_kept_and_effects_of_a_group_are_independent():
    terms = {
        "x": prior("Normal", mu=np.array(0.0), sigma=np.array(1.0)),
        "kind": prior("Normal", mu=np.array([0.0, 1.0]), sigma=np.array([2.0, 3.0])),
        "1|g": prior("Normal", mu=0.0, sigma=prior("HalfNormal", sigma=2.0)),
        "x|g": prior("Normal", mu=0.0, sigma=prior("HalfStudentT", nu=3.0, sigma=0.5)),
    }
    made = from_bambi(
        model("y ~ x + kind + (1 + x | g)", terms=terms, others={"sigma": prior("HalfNormal", sigma=4.0)})
    )
    assert [factor.effects for factor in made.design.factors] == [("Intercept",), ("x",)]
    found = dict(made.priors.table())
    names = ("x", "kind[b]", "kind[c]", "1|g", "x|g.x", "residual sd")
    said = ("N(0, 1^2)", "N(0, 2^2)", "N(1, 3^2)", "half-normal(2)", "half-t(3, 0.5)", "half-normal(4)")
    assert [found[name] for name in names] == list(said)
    assert made.priors.coefficients[1] == Normal(0.0, 1.0)
    assert made.priors.parameters == (HalfNormal(4.0),)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (prior("StudentT", nu=4.0, mu=0.5, sigma=2.0), StudentT(4.0, 0.5, 2.0)),
        (prior("HalfCauchy", beta=2.0), HalfT(1.0, 2.0)),
        (prior("Exponential", lam=2.0), Exponential(2.0)),
        (prior("Gamma", alpha=2.0, beta=0.5), Gamma(2.0, 0.5)),
    ],
)
def test_priors_of_other_kinds(theirs, ours):
    if isinstance(ours, StudentT):
        assert from_bambi(model("y ~ x", terms={"x": theirs})).priors.coefficients[1] == ours
        return
    spread = {"1|c": prior("Normal", mu=0.0, sigma=theirs)}
    made = from_bambi(model("y ~ x + (1 | g) + (1 | c)", terms=spread, others={"sigma": theirs}))
    assert made.priors.parameters == (ours,)
    found = dict(made.priors.table())
    assert found["1|c"] == found["residual sd"] != found["1|g"]


def test_probit_links():
    assert from_bambi(model("said[yes] ~ x", "bernoulli", "probit")).family.name == "probit"
    given = model("kind ~ x", "cumulative", "probit")
    given.data["kind"] = pd.Categorical(given.data.kind)
    assert from_bambi(given).family.name == "ordinal_probit"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (lambda: 3, "from_bambi takes a bambi.Model; got int."),
        (lambda: model("y ~ x", "gamma", "inverse"), "no family here is 'gamma' with the link 'inverse'"),
        (lambda: model("y ~ x", "vonmises"), "no family here is 'vonmises'"),
        (lambda: model("y ~ x", additionals=("sigma ~ x",)), "formulas for other parameters, sigma ~ x"),
        (lambda: model("y ~ x", terms={"x": prior("Laplace", mu=0.0, b=1.0)}), "of x is none of those here"),
        (lambda: model("y ~ x", "t", others={"nu": prior("Gamma", alpha=2.0, beta=0.1)}), "'nu' has no prior of its"),
    ],
)
def test_refusals(given, sentence):
    with pytest.raises(InputError, match=sentence):
        from_bambi(given())


def test_the_class_that_counts_as_one_is_that_of_bambi():
    no = Named(term=Named(success="no"))
    ours, theirs = (
        from_bambi(model("said ~ x", "bernoulli", "logit", **own)) for own in ({}, {"response_component": no})
    )
    assert (theirs.formula.success, ours.formula.success) == ("no", "yes")
    assert theirs.design.y[0].equal(1 - ours.design.y[0])
    yes = from_bambi(model("said[yes] ~ x", "bernoulli", "logit", response_component=no))
    assert yes.formula.success == "yes"


def test_rows_that_miss_values_are_left_out_where_bambi_does():
    given = model("y ~ x + (1 | g)", dropna=True)
    given.data.loc[3, "x"] = given.data.loc[5, "c"] = np.nan
    assert len(from_bambi(given).design.X) == 59
    given.dropna = False
    with pytest.raises(InputError, match="misses values: 1 of x"):
        from_bambi(given)


def test_degrees_of_freedom_that_bambi_learns():
    with pytest.warns(UserWarning, match="degrees of freedom nu of the family t are learned by bambi and are 4 here"):
        from_bambi(model("y ~ x", "t", others={"nu": prior("Gamma", True, alpha=2.0, beta=0.1)}))
    from_bambi(model("y ~ x", "t", others={"nu": 4}))
    with pytest.raises(InputError, match="'nu' is held at 3 in bambi, and is not here. Fix it at 4"):
        from_bambi(model("y ~ x", "t", others={"nu": 3}))


def test_priors_of_another_intercept():
    own = {"Intercept": prior("Normal", mu=0.0, sigma=2.0)}
    assert dict(from_bambi(model("y ~ x", terms=own)).priors.table())["Intercept"] == "N(0, 2^2)"
    with pytest.raises(InputError, match="center_predictors=False and a prior of its Intercept"):
        from_bambi(model("y ~ x", terms=own, center_predictors=False))
    given = model("e ~ x", "weibull", "log", terms=own)
    given.data["e"] = np.exp(given.data.y)
    with pytest.raises(InputError, match="that of the log of the mean in bambi"):
        from_bambi(given)
