"""Mixed models as estimators: what `MixedModel` says, by column, by argument and by routing."""

import pickle
import re

import numpy as np
import pytest
import torch

pytest.importorskip("pandas", reason="pandas is in the extra formula")
pytest.importorskip("sklearn", reason="scikit-learn is in the extra sklearn", minversion="1.6")

import pandas
import scipy.sparse
import sklearn
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.model_selection import GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from torchngvi import MixedModel
from torchngvi.adapters.sklearn import BayesianMixedClassifier, BayesianMixedRegressor
from torchngvi.errors import InputError

GROUPS, VISITS = 20, 4


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


def direct(frame, y, family="gaussian"):
    X = torch.as_tensor(np.c_[frame.week, np.ones(len(frame))])
    number = torch.as_tensor(np.unique(frame.patient, return_inverse=True)[1])
    return X, number, MixedModel(X, torch.as_tensor(y), (X[:, 1:], number), family).fit(progress=False)


class TestWhatItSays:
    def test_it_is_the_mixed_model(self, fitted):
        frame, _, y, _ = visits()
        X, number, other = direct(frame, y)
        table = other.summary()
        np.testing.assert_array_equal([*fitted.coef_, fitted.intercept_], table.fixed.mean.numpy())
        np.testing.assert_array_equal([*fitted.coef_sd_, fitted.intercept_sd_], table.fixed.sd.numpy())
        np.testing.assert_array_equal(fitted.group_sd_, table.sd.mean.numpy())
        np.testing.assert_array_equal(fitted.effects_[:, 0], other.effects()[0].mean.numpy())
        mean, sd = fitted.predict(frame[["week", "patient"]][:6], return_std=True)
        np.testing.assert_array_equal(mean, other.predict(X[:6], X[:6, 1:], number[:6]).mean.numpy())
        np.testing.assert_array_equal(sd, other.predict(X[:6], X[:6, 1:], number[:6], kind="response").sd.numpy())
        assert fitted.converged_
        assert fitted.result_.fixed_names == ("week", "intercept")
        assert fitted.result_.group_names[:2] == ("p00", "p01")

    def test_groups_by_name_number_and_argument(self, fitted):
        frame, _, y, _ = visits()
        number = np.unique(frame.patient, return_inverse=True)[1]
        array = BayesianMixedRegressor(-1).fit(np.c_[frame.week, number], y)
        given = BayesianMixedRegressor().fit(frame[["week"]], y, groups=frame.patient)
        for other in (array, given):
            np.testing.assert_array_equal(other.coef_, fitted.coef_)
            np.testing.assert_array_equal(other.effects_, fitted.effects_)
        np.testing.assert_array_equal(
            given.predict(frame[["week"]], groups=frame.patient), array.predict(np.c_[frame.week, number])
        )

    def test_new_groups(self, fitted):
        """Less is known of them; rows of one new group share its effect, those of two do not."""
        rows = pandas.DataFrame({"week": [1.0] * 4, "patient": ["p00", "new", "new", "newer"]})
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
        for wrong in (-1, 1.5, True):
            with pytest.raises(InputError, match=rf"^n_samples is a number of draws; got {wrong}\.$"):
                fitted.sample_posterior(wrong)
        with pytest.raises(InputError, match=r"^random_state is a seed, a whole number, a .*, or None; got 'a'\.$"):
            fitted.sample_posterior(2, random_state="a")

    def test_counts_and_slopes(self):
        frame, counts, *_ = visits()
        model = BayesianMixedRegressor("patient", family="poisson", slopes=["week"], draws=500)
        model.fit(frame[["week", "patient"]], counts)
        assert model.effects_.shape == (GROUPS, 2)
        assert model.group_sd_.shape == (2,)
        assert (model.predict(frame[["week", "patient"]]) > 0).all()

    def test_two_classes(self):
        frame, *_, y = visits()
        label = np.where(y, "ill", "well")
        model = BayesianMixedClassifier("patient", draws=500).fit(frame[["week", "patient"]], label)
        p = model.predict_proba(frame[["week", "patient"]])
        np.testing.assert_allclose(p.sum(1), 1)
        assert model.classes_.tolist() == ["ill", "well"]
        chosen, sd = model.predict(frame[["week", "patient"]], return_std=True)
        np.testing.assert_array_equal(chosen == "well", p[:, 1] > 0.5)
        assert ((sd > 0) & (sd < 0.5)).all()
        assert model.score(frame[["week", "patient"]], label) > 0.8


class TestConventions:
    def test_pipelines(self):
        frame, _, y, _ = visits()
        columns = make_column_transformer(
            (StandardScaler(), ["week"]),
            (OneHotEncoder(drop="first", sparse_output=False), ["sex"]),
            ("passthrough", ["patient"]),
            verbose_feature_names_out=False,
        ).set_output(transform="pandas")
        pipe = make_pipeline(columns, BayesianMixedRegressor("patient", draws=500)).fit(frame, y)
        assert pipe[-1].feature_names_in_.tolist() == ["week", "sex_m"]
        again = pickle.loads(pickle.dumps(pipe))
        np.testing.assert_array_equal(again.predict(frame), pipe.predict(frame))
        scores = cross_val_score(clone(pipe), frame, y, groups=frame.patient, cv=GroupKFold(2))
        assert np.isfinite(scores).all()

    def test_routing(self):
        frame, _, y, _ = visits()
        with sklearn.config_context(enable_metadata_routing=True):
            mixed = BayesianMixedRegressor(draws=500).set_fit_request(groups=True).set_predict_request(groups=True)
            pipe = make_pipeline(StandardScaler(), mixed).fit(frame[["week"]], y, groups=frame.patient)
            assert pipe.predict(frame[["week"]], groups=frame.patient).shape == y.shape
            assert pipe[-1].groups_.tolist() == sorted(set(frame.patient))

    def test_weights_are_repetitions(self):
        frame, _, y, _ = visits()
        w = np.random.default_rng(1).integers(1, 3, len(frame))
        frame = frame[["week", "patient"]]
        one = BayesianMixedRegressor("patient", draws=500).fit(frame, y, sample_weight=w)
        two = BayesianMixedRegressor("patient", draws=500).fit(frame.loc[np.repeat(frame.index, w)], np.repeat(y, w))
        np.testing.assert_allclose(one.coef_, two.coef_, rtol=1e-3)
        assert one.coef_[0] != BayesianMixedRegressor("patient", draws=500).fit(frame, y).coef_[0]


def test_random_states():
    """A seed, or what gives one: a fit and its predictions are of one seed, and None is another at each fit."""
    frame, _, y, _ = visits()
    X, new = frame[["week", "patient"]], frame[["week"]].assign(patient="new").head(3)

    def fitted(random_state):
        return BayesianMixedRegressor("patient", draws=100, random_state=random_state).fit(X, y)

    once, again, next_ = (fitted(np.random.RandomState(seed)) for seed in (3, 3, 4))
    assert once.seed_ == again.seed_ != next_.seed_
    np.testing.assert_array_equal(once.predict(new), again.predict(new))
    np.testing.assert_array_equal(once.predict(new), fitted(once.seed_).predict(new))
    state = np.random.RandomState(3)
    assert fitted(state).seed_ != fitted(state).seed_
    one, other = fitted(None), fitted(None)
    assert one.seed_ != other.seed_
    np.testing.assert_array_equal(one.predict(new), one.predict(new))
    assert clone(one).random_state is None
    draws = [one.sample_posterior(5, random_state=np.random.RandomState(1)) for _ in range(2)]
    np.testing.assert_array_equal(*draws)
    assert not np.array_equal(one.sample_posterior(5), one.sample_posterior(5))


@pytest.mark.parametrize(
    ("settings", "given", "message"),
    [
        ({}, {}, "a mixed model needs the group of each row: name the column, groups='patient', or pass"),
        ({"groups": "ward"}, {}, "groups names the column 'ward'; X has week, patient."),
        ({}, {"groups": [1, 2]}, f"groups must be one label for each of the {GROUPS * VISITS} rows; got shape (2,)."),
        ({"groups": "patient", "family": "gamma"}, {}, "family must be one of gaussian, poisson, negative_binomial, "),
        (
            {"groups": "patient", "family": "negbinom"},
            {},
            "one of gaussian, poisson, negative_binomial, student_t; got 'negbinom'. Did you mean 'negbin'?",
        ),
        ({"groups": "patient", "family": "logit"}, {}, "negative_binomial, student_t; got 'logit'."),
        ({"groups": "patient", "prior_sd": "a"}, {}, "prior_sd is a standard deviation, positive, or None; got 'a'."),
        ({"groups": "patient", "prior_sd": 0}, {}, "prior_sd is a standard deviation, positive, or None; got 0."),
        ({"groups": "patient", "slopes": ["age"]}, {}, "slopes names 'age'; the columns are week."),
        ({"groups": "patient", "slopes": "week"}, {}, "slopes is a list of columns, such as ['week'], or an empty one"),
        ({"groups": "patient", "slopes": None}, {}, "slopes is a list of columns, such as ['week'], or an empty one"),
        ({"groups": ["patient"]}, {}, "groups is the name or the number of one column; got ['patient']."),
        ({"groups": True}, {}, "groups is the name or the number of one column; got True."),
        (
            {"groups": "patient", "random_state": True},
            {},
            "random_state is a seed, a whole number, a numpy.random.RandomState, or None; got True.",
        ),
        ({}, {"groups": np.array([1, "a"] * (GROUPS * VISITS // 2), object)}, "labels of groups must all be texts or"),
    ],
)
def test_refused(settings, given, message):
    frame, _, y, _ = visits()
    with pytest.raises(InputError, match=re.escape(message)):
        BayesianMixedRegressor(**settings).fit(frame[["week", "patient"]], y, **given)


def test_refused_labels_and_classes():
    frame, *_ = visits()
    frame.loc[3, "patient"] = None
    with pytest.raises(InputError, match=r"^the group of a row is missing. Leave the row out, or give it a group"):
        BayesianMixedRegressor("patient").fit(frame[["week", "patient"]], frame.week)
    with pytest.raises(InputError, match=r"^a mixed classifier has two classes; y has 3.$"):
        BayesianMixedClassifier().fit(np.zeros((3, 1)), [0, 1, 2], groups=[0, 0, 1])
    with pytest.raises(InputError, match=r"^groups=4 is no column of an array of shape \(3, 1\): give its number, or"):
        BayesianMixedClassifier(4).fit(np.zeros((3, 1)), [0, 1, 0])
    with pytest.raises(InputError, match=r"^X has no column beside that of the groups; a mixed regression has one"):
        BayesianMixedRegressor("patient").fit(visits()[0][["patient"]], frame.week)
    with pytest.raises(TypeError, match="[Ss]parse data was passed"):  # of scikit-learn, in its words
        BayesianMixedRegressor().fit(scipy.sparse.eye_array(3).tocsr(), [0.0, 1.0, 2.0], groups=[0, 0, 1])


def test_the_column_of_the_groups_by_a_number_of_numpy():
    frame, _, y, _ = visits()
    rows = np.c_[frame.week, np.unique(frame.patient, return_inverse=True)[1]]
    one, other = (BayesianMixedRegressor(column, draws=100).fit(rows, y) for column in (1, np.int64(1)))
    np.testing.assert_array_equal(one.coef_, other.coef_)
