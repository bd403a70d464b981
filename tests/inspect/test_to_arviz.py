"""Fits for ArviZ: log likelihoods by other formulas, leave-one-out against refits, and what there is no export of."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("pandas", reason="pandas is in the extra formula")
pytest.importorskip("arviz_either", reason="arviz is in the extra test")

import arviz
import pandas

import torchngvi
from torchngvi import CholeskyGaussian, GeneralizedLinear, MixedModel, fit, to_arviz
from torchngvi.adapters.arviz import responses
from torchngvi.cli import main
from torchngvi.diagnostics import log_predictive_density, predictive_mean
from torchngvi.errors import InputError
from torchngvi.models.likelihoods import (
    BernoulliLogit,
    GaussianNoise,
    Likelihood,
    NegativeBinomial,
    PoissonLog,
    StudentT,
)


def logistic(rows=24, weights=None):
    X = np.column_stack([np.ones(rows), np.random.default_rng(1).normal(size=(rows, 2))])
    y = (np.random.default_rng(2).random(rows) < 1 / (1 + np.exp(-X @ [0.0, 1.0, -1.0]))).astype(float)
    return fitted(X, y, weights), X, y


def fitted(X, y, weights=None):
    model = GeneralizedLinear(torch.as_tensor(X), y, prior_precision=0.25, classes=(0, 1), weights=weights)
    return fit(CholeskyGaussian(3, dtype=torch.float64), model, progress=False, examine=False)


def of(data, group):
    """The variable y of a group, without the chain."""
    values = data[group]["y"].values
    return values if group == "observed_data" else values[0]


def groups_of(data):
    """The names of the groups."""
    return set(data.groups() if callable(data.groups) else data.children)


def elpd(loo):
    """The estimate and its standard error, by the name that the version of ArviZ has for it."""
    return loo.elpd_loo if hasattr(loo, "elpd_loo") else loo.elpd, loo.se


class TestRegressions:
    @pytest.mark.accuracy
    def test_leave_one_out_is_that_of_refits(self):
        """PSIS-LOO of one fit against a fit without each row: within its own standard error, and far within."""
        result, X, y = logistic()
        exact = []
        for n in range(len(y)):
            rest = fitted(np.delete(X, n, 0), np.delete(y, n))
            exact.append(log_predictive_density(rest.target, rest.posterior, torch.as_tensor(X[[n]]), y[[n]]).item())
        loo = arviz.loo(to_arviz(result), pointwise=True)
        pointwise = loo.loo_i if hasattr(loo, "loo_i") else loo.elpd_i
        estimate, error = elpd(loo)
        assert abs(estimate - sum(exact)) < min(error, 0.3)
        assert np.abs(np.asarray(pointwise) - exact).max() < 0.08
        assert float(np.max(loo.pareto_k)) < 0.7

    def test_what_is_in_it(self):
        result, X, y = logistic()
        data = to_arviz(result.named(["one", "a", "b"]), draws=500, seed=3)
        beta = data["posterior"]["beta"]
        assert dict(beta.sizes) == {"chain": 1, "draw": 500, "column": 3}
        assert list(beta["column"].values) == ["one", "a", "b"]
        theta = result.posterior.sample((500,), torch.Generator().manual_seed(3)).numpy()
        np.testing.assert_array_equal(beta.values[0], theta)
        np.testing.assert_allclose(
            of(data, "log_likelihood"), stats.logistic.logcdf((2 * y - 1) * (theta @ X.T)), rtol=1e-10
        )
        np.testing.assert_array_equal(of(data, "observed_data"), y)
        new = of(data, "posterior_predictive")
        assert set(np.unique(new)) == {0, 1}
        mean = predictive_mean(result.target, result.posterior, torch.as_tensor(X)).numpy()
        assert np.abs(new.mean(0) - mean).max() < 4 * 0.5 / np.sqrt(500)
        again = to_arviz(result, draws=500, seed=3)
        np.testing.assert_array_equal(of(again, "posterior_predictive"), new)
        assert list(again["posterior"]["beta"]["column"].values) == ["x0", "x1", "x2"]

    @pytest.mark.parametrize(
        ("likelihood", "law"),
        [
            (PoissonLog(), stats.poisson(2.0)),
            (NegativeBinomial(1.5), stats.nbinom(1.5, 1.5 / 3.5)),
            (GaussianNoise(0.5), stats.norm(np.log(2.0), 0.5)),
            (StudentT(0.5, 3.0), stats.t(3.0, np.log(2.0), 0.5)),
        ],
    )
    def test_new_data_have_the_distribution_of_the_likelihood(self, likelihood, law):
        """P(sup |F_n - F| > e) < 2 exp(-2 n e²), here 1e-9, by the inequality of Massart (1990)."""
        eta = torch.full((2000, 4), 2.0).log()
        new = np.sort(responses(likelihood, eta, torch.Generator().manual_seed(0)).numpy().ravel())
        seen = np.searchsorted(new, new, side="right") / len(new)
        assert np.abs(seen - law.cdf(new)).max() < np.sqrt(np.log(2e9) / (2 * len(new)))

    def test_a_likelihood_of_the_user_has_no_draws(self):
        with pytest.raises(InputError, match="draws of y are known for the likelihoods of this library"):
            responses(Mock(Likelihood, discrete=False), torch.zeros(1, 1), torch.Generator())

    def test_weights(self):
        weights = np.tile([1.0, 2.0, 0.0], 8)
        result, *_ = logistic(weights=weights)
        data, here = to_arviz(result, draws=100), weights > 0
        theta = torch.as_tensor(data["posterior"]["beta"].values[0])
        energy = BernoulliLogit().energy(result.target.predictor(theta), result.target.y).numpy()
        np.testing.assert_allclose(of(data, "log_likelihood"), -(weights * energy)[:, here])
        assert list(data["log_likelihood"]["row"].values) == list(np.flatnonzero(here))
        assert of(data, "observed_data").shape == (16,)


def visits():
    draw = np.random.default_rng(4)
    frame = pandas.DataFrame({"week": np.tile(np.arange(4.0), 12), "patient": np.repeat(np.arange(12), 4)})
    frame["ward"] = np.tile([0, 1, 2], 16)
    eta = 0.5 + 0.2 * frame.week + 0.5 * draw.normal(size=12)[frame.patient]
    return frame.assign(n=draw.poisson(np.exp(eta)), pain=eta + 0.4 * draw.normal(size=48))


class TestMixedModels:
    @pytest.mark.parametrize("family", ["bernoulli", "gaussian"])
    def test_the_effects_of_the_groups_are_in_it(self, family):
        frame = visits()
        X = torch.as_tensor(np.column_stack([np.ones(48), frame.week]))
        y = frame.pain if family == "gaussian" else (frame.pain > 0.7).astype(float)
        result = MixedModel(X, y.to_numpy(), (X[:, :1], frame.patient.to_numpy()), family).fit(progress=False)
        data, draws = to_arviz(result), result.draws()
        for name in ("beta", "b", "sd"):
            np.testing.assert_array_equal(data["posterior"][name], result.to_arviz()["posterior"][name])
        eta = (draws.fixed @ X.mT).numpy() + draws.effects["group"].numpy()[:, frame.patient.to_numpy(), 0]
        if family == "gaussian":
            expected = stats.norm.logpdf(y.to_numpy(), eta, draws.parameters.numpy())
        else:
            expected = stats.logistic.logcdf((2 * y.to_numpy() - 1) * eta)
        np.testing.assert_allclose(of(data, "log_likelihood"), expected, rtol=1e-8)
        np.testing.assert_array_equal(of(data, "observed_data"), y)
        assert {"posterior", "log_likelihood", "posterior_predictive", "observed_data"} <= groups_of(data)
        with pytest.raises(InputError, match=r"^draws of a mixed model are those of its result, .*Leave draws out\.$"):
            to_arviz(result, draws=10)

    @pytest.mark.accuracy
    def test_several_factors(self):
        frame = visits()
        X = torch.as_tensor(np.column_stack([np.ones(48), frame.week]))
        groups = {name: frame[name].to_numpy(copy=True) for name in ("patient", "ward")}
        effects = {name: (X[:, :1], torch.as_tensor(of_rows)) for name, of_rows in groups.items()}
        result = MixedModel(X, frame.n.to_numpy(float), effects, "poisson").fit(progress=False)
        data, draws = to_arviz(result), result.draws()
        eta = (draws.fixed @ X.mT).numpy()
        for name in ("patient", "ward"):
            eta = eta + draws.effects[name].numpy()[:, groups[name], 0]
        np.testing.assert_allclose(of(data, "log_likelihood"), stats.poisson.logpmf(frame.n, np.exp(eta)), rtol=1e-8)
        new = of(data, "posterior_predictive")
        assert np.abs(new.mean() - frame.n.mean()) < 0.5


class TestRuns:
    @pytest.fixture(autouse=True)
    def _tables(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        frame = visits().assign(sure=np.tile([1.0, 2.0], 24), told=0.1)
        frame["ill"] = np.where(frame.pain > 0.7, "yes", "no")
        frame.to_csv("visits.csv", index=False)
        self.frame = pandas.read_csv("visits.csv")

    def run(self, *flags):
        assert main(["fit", "--data", "visits.csv", *flags, "--seed", "0", "--no-progress", "--overwrite"]) == 0
        return torchngvi.load("runs/visits")

    def test_a_formula(self):
        """With the same draws as the result: it is the same as without the file."""
        formula = "pain ~ week + (1 | patient)"
        data = self.run("--formula", formula, "--likelihood", "gaussian").to_arviz()
        same = to_arviz(torchngvi.mixed(formula, self.frame).fit(seed=0, progress=False))
        for group in ("log_likelihood", "posterior_predictive", "observed_data"):
            np.testing.assert_allclose(of(data, group), of(same, group), rtol=1e-8)
        for name in ("beta", "sd", "residual_sd"):
            np.testing.assert_allclose(data["posterior"][name].values, same["posterior"][name].values, rtol=1e-8)

    @pytest.mark.accuracy
    def test_a_formula_of_several_factors(self):
        formula = "n ~ week + (1 | patient) + (1 | ward)"
        data = self.run("--formula", formula, "--likelihood", "poisson").to_arviz()
        same = to_arviz(torchngvi.mixed(formula, self.frame, "poisson").fit(seed=0, progress=False))
        np.testing.assert_allclose(of(data, "log_likelihood"), of(same, "log_likelihood"), rtol=1e-8)
        for name in ("sd_patient", "sd_ward"):
            np.testing.assert_allclose(data["posterior"][name].values, same["posterior"][name].values, rtol=1e-8)

    @pytest.mark.accuracy
    def test_two_classes_of_a_formula(self):
        one = self.run("--formula", "ill[yes] ~ week + (1 | patient)", "--likelihood", "logit").to_arviz()
        np.testing.assert_array_equal(of(one, "observed_data"), self.frame.ill == "yes")
        assert dict(one["posterior"]["sd"].sizes) == {"chain": 1, "draw": 1000, "random": 1}

    def test_refused(self):
        run = self.run("--target", "ill", "--drop", "n", "pain")
        with pytest.raises(InputError, match=r"^a Fitted has a to_arviz of its own: call that\.$"):
            to_arviz(run)
