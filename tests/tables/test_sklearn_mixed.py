"""Mixed models as estimators: what `MixedModel` says, by column, by argument and by routing."""

import pickle
import re
import warnings

import numpy as np
import pandas
import pytest
import scipy.sparse
import torch

pytest.importorskip("sklearn", reason="scikit-learn is in the extra sklearn", minversion="1.6")

import sklearn
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from torchngvi.adapters.sklearn import BayesianMixedClassifier, BayesianMixedRegressor
from torchngvi.adapters.sklearn.estimators import seed_of
from torchngvi.errors import InputError
from torchngvi.tables.families import Beta
from torchngvi.tables.model import MixedModel
from torchngvi.tables.priors import HalfT, Normal

GROUPS, VISITS = 20, 4
FEW = {"draws": 200}


def visits(seed=0):
    draw = np.random.default_rng(seed)
    number = np.repeat(np.arange(GROUPS), VISITS)
    frame = pandas.DataFrame(
        {
            "week": np.tile(np.arange(float(VISITS)), GROUPS),
            "sex": np.repeat(draw.choice(["f", "m"], GROUPS), VISITS),
            "patient": np.array([f"p{i:02d}" for i in range(GROUPS)])[number],
        }
    )
    eta = 0.5 + 0.3 * frame.week + 0.7 * draw.normal(size=GROUPS)[number]
    return frame, draw.poisson(np.exp(eta)), eta + 0.4 * draw.normal(size=len(frame)), eta > eta.mean()


@pytest.fixture(scope="module")
def fitted():
    frame, _, y, _ = visits()
    return BayesianMixedRegressor("patient").fit(frame[["patient", "week"]], y)


def direct(frame, y, family="gaussian", **options):
    X = torch.as_tensor(np.c_[frame.week, np.ones(len(frame))])
    number = torch.as_tensor(np.unique(frame.patient, return_inverse=True)[1])
    model = MixedModel(X, torch.as_tensor(y), (X[:, 1:], number), family, names=["week", "Intercept"], **options)
    return X, number, model.fit(progress=False, draws=4096)


OF_WEIGHTS = {
    "check_sample_weight_equivalence_on_dense_data": "A repeated row is two rows of one group. Of Gaussian outcomes "
    "the residual sd is then 0 and there is no mode; of two classes effects are drawn in the order of the sizes of "
    "groups, and predictions differ by Monte Carlo errors. Coefficients are equal: test_weights_are_repetitions."
}


@pytest.mark.accuracy
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "estimator", [BayesianMixedRegressor, pytest.param(BayesianMixedClassifier, marks=pytest.mark.slow)]
)
def test_check_estimator(estimator):
    """Its checks pass no groups: the last column of X has them, a label for each row."""
    done = check_estimator(estimator(-1, draws=100), on_skip=None, on_fail="raise", expected_failed_checks=OF_WEIGHTS)
    assert len(done) > 50
    not_passed = {check["check_name"] for check in done if check["status"] != "passed"}
    assert not_passed <= {"check_array_api_input", *OF_WEIGHTS}  # needs an environment variable of SciPy


class TestWhatItSays:
    def test_it_is_the_mixed_model(self, fitted):
        frame, _, y, _ = visits()
        X, number, other = direct(frame, y)
        table = other.summary()
        np.testing.assert_array_equal([*fitted.coef_, fitted.intercept_], table.fixed.mean.numpy())
        np.testing.assert_array_equal([*fitted.coef_sd_, fitted.intercept_sd_], table.fixed.sd.numpy())
        np.testing.assert_array_equal(fitted.group_sd_, table.sd.mean.numpy())
        np.testing.assert_array_equal(fitted.effects_[:, 0], other.effects()[0].mean.numpy())
        mean, sd = fitted.predict(frame[["patient", "week"]][:6], return_std=True)
        np.testing.assert_array_equal(mean, other.predict(X[:6], X[:6, 1:], number[:6]).mean.numpy())
        np.testing.assert_array_equal(sd, other.predict(X[:6], X[:6, 1:], number[:6], kind="response").sd.numpy())
        assert fitted.converged_
        assert fitted.log_evidence_ == other.log_evidence
        assert fitted.result_.fixed_names == ("week", "Intercept")
        assert fitted.result_.group_names["patient"][:2] == ("p00", "p01")
        assert fitted.feature_names_in_.tolist() == ["patient", "week"]

    def test_groups_by_name_number_and_argument(self, fitted):
        frame, _, y, _ = visits()
        number = np.unique(frame.patient, return_inverse=True)[1]
        rows = np.c_[frame.week, number]
        others = [BayesianMixedRegressor(column).fit(rows, y) for column in (-1, 1, np.int64(1))]
        others += [BayesianMixedRegressor(0).fit(frame[["patient", "week"]], y)]
        given = BayesianMixedRegressor().fit(frame[["week"]], y, groups=frame.patient)
        for other in (*others, given):
            np.testing.assert_array_equal(other.coef_, fitted.coef_)
            np.testing.assert_array_equal(other.effects_, fitted.effects_)
        np.testing.assert_array_equal(given.predict(frame[["week"]], groups=frame.patient), others[0].predict(rows))

    def test_new_groups(self, fitted):
        """Less is known of them; rows of one new group share its effect, those of two do not."""
        rows = pandas.DataFrame({"patient": ["p00", "new", "new", "newer"], "week": [1.0] * 4})
        _, sd = fitted.predict(rows, return_std=True)
        assert sd[0] < 0.8 * sd[1]
        draws = fitted._predicted(rows, None, "linear").draws
        assert torch.equal(draws[:, 1], draws[:, 2])
        assert not torch.equal(draws[:, 1], draws[:, 3])

    def test_draws(self, fitted):
        draws = fitted.sample_posterior(4000, random_state=1)
        assert draws.shape == (4000, 2)
        np.testing.assert_allclose(draws.mean(0), [*fitted.coef_, fitted.intercept_], atol=0.1 * fitted.intercept_sd_)
        np.testing.assert_array_equal(draws, fitted.sample_posterior(4000, random_state=1))
        assert not np.array_equal(fitted.sample_posterior(5), fitted.sample_posterior(5))
        for wrong in (-1, 1.5, True):
            with pytest.raises(InputError, match=rf"^n_samples is a number of draws and must be .*; got {wrong}\.$"):
                fitted.sample_posterior(wrong)
        with pytest.raises(InputError, match=r"^random_state is a seed, a whole number, a .*, or None; got 'a'\.$"):
            fitted.sample_posterior(2, random_state="a")

    @pytest.mark.accuracy
    @pytest.mark.parametrize("family", ["poisson", "negbin", "hurdle_poisson", "student_t", "gamma", "beta", Beta()])
    def test_families_and_slopes(self, family):
        frame, counts, y, _ = visits()
        outcome = {"student_t": y, "gamma": np.exp(y)}.get(family, 1 / (1 + np.exp(-y)))
        outcome = counts if family in ("poisson", "negbin", "hurdle_poisson") else outcome
        model, X = BayesianMixedRegressor("patient", family=family, **FEW), frame[["week", "patient"]]
        model = clone(model.set_params(slopes=["week"] if family in ("poisson", "gamma") else [])).fit(X, outcome)
        mean, sd = model.predict(X, return_std=True)
        assert model.converged_
        assert np.corrcoef(mean, outcome)[0, 1] > 0.7
        assert (sd > 0).all()
        assert model.effects_.shape == (GROUPS, *model.group_sd_.shape) == (GROUPS, 1 + len(model.slopes))

    @pytest.mark.accuracy
    def test_two_classes(self):
        frame, *_, y = visits()
        X, label = frame[["week", "patient"]], np.where(y, "ill", "well")
        model = BayesianMixedClassifier("patient").fit(X, label)
        p = model.predict_proba(X)
        np.testing.assert_allclose(p.sum(1), 1)
        assert model.classes_.tolist() == ["ill", "well"]
        chosen, sd = model.predict(X, return_std=True)
        np.testing.assert_array_equal(chosen == "well", p[:, 1] > 0.5)
        assert ((sd > 0) & (sd < 0.5)).all()
        assert model.score(X, label) > 0.8
        _, _, other = direct(frame, (~y).to_numpy().astype(float), "bernoulli")
        np.testing.assert_array_equal([*model.coef_, model.intercept_], other.summary().fixed.mean.numpy())
        weights = np.where(y, 2.0, 1.0)
        by_class = BayesianMixedClassifier("patient", class_weight={"ill": 2.0, "well": 1.0}, **FEW).fit(X, label)
        by_row = BayesianMixedClassifier("patient", **FEW).fit(X, label, sample_weight=weights)
        np.testing.assert_array_equal(by_class.coef_, by_row.coef_)

    def test_priors_by_name(self):
        frame, _, y, _ = visits()
        X, priors = frame[["week", "patient"]], {"week": Normal(0, 0.01), "1|patient": HalfT(3, 1)}
        model = BayesianMixedRegressor("patient", priors=priors).fit(X, y)
        _, _, other = direct(frame, y, priors={"week": Normal(0, 0.01), "1|group": HalfT(3, 1)})
        np.testing.assert_array_equal(model.coef_, other.summary().fixed.mean[:1].numpy())
        assert abs(model.coef_[0]) < 0.05
        assert "week N(0, 0.01^2)" in model.result_.priors
        short = BayesianMixedRegressor("patient", prior_sd=0.3).fit(X, y)
        named = BayesianMixedRegressor("patient", priors={"b": "normal(0, 0.3)", "Intercept": "normal(0, 0.3)"})
        np.testing.assert_array_equal(short.coef_, named.fit(X, y).coef_)
        assert short.intercept_ < model.intercept_


class TestUnits:
    def test_weights_are_repetitions_and_rows_of_weight_0_are_not_there(self):
        frame, _, y, _ = visits()
        w, frame = np.random.default_rng(1).integers(1, 3, len(frame)), frame[["week", "patient"]]
        w[:VISITS] = 0
        one = BayesianMixedRegressor("patient", draws=500).fit(frame, y, sample_weight=w)
        two = BayesianMixedRegressor("patient", draws=500).fit(frame.loc[np.repeat(frame.index, w)], np.repeat(y, w))
        np.testing.assert_allclose(one.coef_, two.coef_, rtol=1e-3)
        assert one.groups_.tolist() == two.groups_.tolist() == [f"p{i:02d}" for i in range(1, GROUPS)]
        assert one.coef_[0] != BayesianMixedRegressor("patient", draws=500).fit(frame, y).coef_[0]

    def test_a_column_that_is_the_same_in_all_rows_of_a_fold(self):
        """The prior alone speaks of it, and predictions are those without it."""
        frame, _, y, _ = visits()
        plain, more = frame[["week", "patient"]], frame[["week", "patient"]].assign(site=3.0)
        with pytest.warns(UserWarning, match=r"Column site is the same in all rows"):
            model = BayesianMixedRegressor("patient").fit(more, y)
        other = BayesianMixedRegressor("patient").fit(plain, y)
        np.testing.assert_allclose(model.predict(more), other.predict(plain), atol=0.1 * y.std())


class TestConventions:
    def test_pipelines(self):
        frame, _, y, _ = visits()
        columns = make_column_transformer(
            (StandardScaler(), ["week"]),
            (OneHotEncoder(drop="first", sparse_output=False), ["sex"]),
            ("passthrough", ["patient"]),
            verbose_feature_names_out=False,
        ).set_output(transform="pandas")
        pipe = make_pipeline(columns, BayesianMixedRegressor("patient", **FEW)).fit(frame, y)
        assert pipe[-1].feature_names_in_.tolist() == ["week", "sex_m", "patient"]
        assert pipe[-1].result_.fixed_names == ("week", "sex_m", "Intercept")
        again = pickle.loads(pickle.dumps(pipe))
        np.testing.assert_array_equal(again.predict(frame), pipe.predict(frame))
        scores = cross_val_score(clone(pipe), frame, y, groups=frame.patient, cv=GroupKFold(2))
        assert np.isfinite(scores).all()

    def test_routing(self):
        frame, _, y, _ = visits()
        with sklearn.config_context(enable_metadata_routing=True):
            mixed = BayesianMixedRegressor(**FEW).set_fit_request(groups=True).set_predict_request(groups=True)
            pipe = make_pipeline(StandardScaler(), mixed).fit(frame[["week"]], y, groups=frame.patient)
            assert pipe.predict(frame[["week"]], groups=frame.patient).shape == y.shape
            assert pipe[-1].groups_.tolist() == sorted(set(frame.patient))

    @pytest.mark.accuracy
    def test_random_states(self, monkeypatch):
        """A seed, or what gives one: a fit and its predictions are of one seed, and None is another at each fit."""
        frame, _, y, _ = visits()
        X, new = frame[["week", "patient"]], frame[["week"]].assign(patient="new").head(3)

        def fitted(random_state):
            return BayesianMixedRegressor("patient", random_state=random_state, **FEW).fit(X, y)

        once, again, next_ = (fitted(np.random.RandomState(seed)) for seed in (3, 3, 4))
        assert once.seed_ == again.seed_ != next_.seed_
        np.testing.assert_array_equal(once.predict(new), again.predict(new))
        np.testing.assert_array_equal(once.predict(new), fitted(once.seed_).predict(new))
        state = np.random.RandomState(3)
        assert fitted(state).seed_ != fitted(state).seed_
        assert seed_of(None) != seed_of(None)
        monkeypatch.setattr("torchngvi.adapters.sklearn.estimators.seed_of", {None: 1234}.__getitem__)
        drawn = fitted(None)
        monkeypatch.undo()
        assert drawn.seed_ == 1234
        np.testing.assert_array_equal(drawn.predict(new), fitted(1234).predict(new))
        assert clone(drawn).random_state is None

    def test_right_usage_is_silent_and_no_mode_is_said(self):
        frame, _, y, _ = visits()
        X = frame[["week", "patient"]]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            BayesianMixedRegressor("patient", **FEW).fit(X, y).predict(X.assign(patient="new"))
        with pytest.warns(ConvergenceWarning, match=r"^The fit has not converged: "):
            BayesianMixedRegressor("patient", **FEW).fit(
                X.assign(week=y), 0 * y + np.unique(X.patient, return_inverse=True)[1]
            )


@pytest.mark.parametrize(
    ("settings", "given", "message"),
    [
        ({}, {}, "a mixed model needs the group of each row: name the column, groups='patient', or pass"),
        ({"groups": "ward"}, {}, "groups names the column 'ward'; X has week, patient."),
        ({"groups": 4}, {}, "groups names the column 4; X has week, patient."),
        ({}, {"groups": [1, 2]}, f"groups must be one label for each of the {GROUPS * VISITS} rows; got shape (2,)."),
        ({"groups": "patient", "family": "negbinom"}, {}, "there is no family 'negbinom'. Did you mean"),
        ({"groups": "patient", "family": "gamma"}, {}, "the gamma family needs positive numbers; got"),
        ({"groups": "patient", "family": "logit"}, {}, "poisson, negative_binomial, zero_inflated_poisson, "),
        ({"groups": "patient", "family": "binomial"}, {}, "a regressor has a family of one outcome that is a number"),
        ({"groups": "patient", "family": "ordinal"}, {}, "of others torchngvi.mixed."),
        ({"groups": "patient", "prior_sd": "a"}, {}, "prior_sd is a standard deviation, positive, or None; got 'a'."),
        ({"groups": "patient", "prior_sd": 0}, {}, "prior_sd is a standard deviation, positive, or None; got 0."),
        ({"groups": "patient", "prior_sd": 1, "priors": "flat"}, {}, "prior_sd is short for priors={'b': Normal(0, "),
        ({"groups": "patient", "priors": {"weak": Normal()}}, {}, "priors names weak, of which this model has none"),
        ({"groups": "patient", "slopes": ["age"]}, {}, "slopes names 'age'; the columns are week."),
        ({"groups": "patient", "slopes": ["week", "week"]}, {}, "slopes is a list of columns, such as ['week'], or an"),
        ({"groups": "patient", "slopes": "week"}, {}, "slopes is a list of columns, such as ['week'], or an empty one"),
        ({"groups": "patient", "slopes": None}, {}, "slopes is a list of columns, such as ['week'], or an empty one"),
        ({"groups": ["patient"]}, {}, "groups is the name or the number of one column; got ['patient']."),
        ({"groups": True}, {}, "groups is the name or the number of one column; got True."),
        ({"groups": "patient", "random_state": True}, {}, "random_state is a seed, a whole number, a numpy.random.Ra"),
        ({}, {"groups": np.array([1, "a"] * (GROUPS * VISITS // 2), object)}, "labels of groups must all be texts or"),
    ],
)
def test_refused(settings, given, message):
    frame, _, y, _ = visits()
    with pytest.raises(InputError, match=re.escape(message)):
        BayesianMixedRegressor(**settings).fit(frame[["week", "patient"]], y, **given)


def test_refused_labels_rows_and_classes(fitted):
    frame, *_ = visits()
    with pytest.raises(InputError, match=r"^the groups of the fit are as 'p00', those of these rows as 3, so that all"):
        fitted.predict(frame[["patient", "week"]].assign(patient=3))
    with pytest.raises(ValueError, match="Feature names must be in the same order"):
        fitted.predict(frame[["week", "patient"]])
    named = frame[["week", "patient"]].rename(columns={"week": "Intercept"})
    with pytest.raises(InputError, match=r"^X has a column with the name of the intercept, Intercept: results"):
        BayesianMixedRegressor("patient").fit(named, frame.week)
    with pytest.raises(InputError, match=r"^X has no column beside that of the groups; a mixed regression has one"):
        BayesianMixedRegressor("patient").fit(frame[["patient"]], frame.week)
    masked = np.ma.masked_equal(np.c_[frame.week, frame.week], 0.0)
    with pytest.raises(InputError, match="an array has 40 masked entries"):
        BayesianMixedRegressor(1).fit(masked, frame.week)
    with pytest.raises(ValueError, match="non-zero|positive weight"):  # scikit-learn says it from 1.8 on
        BayesianMixedRegressor("patient").fit(frame[["week", "patient"]], frame.week, sample_weight=0)
    frame.loc[3, "patient"] = None
    with pytest.raises(InputError, match=r"^the group of a row is missing. Leave the row out, or give it a group"):
        BayesianMixedRegressor("patient").fit(frame[["week", "patient"]], frame.week)
    with pytest.raises(InputError, match=r"a mixed classifier has two classes; y has 3 classes\.$"):
        BayesianMixedClassifier().fit(np.zeros((3, 1)), [0, 1, 2], groups=[0, 0, 1])
    with pytest.raises(InputError, match=r"^groups names the column 4; X has 2 columns, no names\.$"):
        BayesianMixedClassifier(4).fit(np.zeros((3, 2)), [0, 1, 0])
    with pytest.raises(TypeError, match="[Ss]parse data was passed"):  # of scikit-learn, in its words
        BayesianMixedRegressor().fit(scipy.sparse.eye_array(3).tocsr(), [0.0, 1.0, 2.0], groups=[0, 0, 1])
