"""Arguments of the wrong kind: one sentence each, and what a user may do."""

import re

import numpy as np
import pytest
import torch

import torchngvi
from torchngvi import VN, CholeskyGaussian, GeneralizedLinear, MixedModel
from torchngvi.adapters.sklearn import BayesianMixedRegressor
from torchngvi.adapters.sklearn.arguments import seed_of
from torchngvi.cli import main
from torchngvi.errors import InputError
from torchngvi.models import HalfNormal, MixedPrior, Wishart
from torchngvi.optim.captured import CapturedStep

X, GROUPS, Y = torch.ones(12, 1, dtype=torch.float64), torch.arange(12) // 4, torch.arange(12) % 5
ONE, TWO = (X, GROUPS), {"a": (X, GROUPS), "b": (X, torch.arange(12) % 3)}


@pytest.mark.parametrize("random", [ONE, TWO], ids=["one factor", "two"])
@pytest.mark.parametrize("seed", ["a", None, 1.5, True, 2**70])
def test_seed_of_a_mixed_model(random, seed):
    message = f"seed is that of all draws, a whole number such as 0, of less than 63 bits; got {seed!r}."
    with pytest.raises(InputError, match=re.escape(message)):
        MixedModel(X, Y, random, "poisson_log").fit(seed=seed, progress=False)


@pytest.mark.parametrize("random", [ONE, TWO], ids=["one factor", "two"])
@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (3, "prior is a torchngvi.models.MixedPrior, such as MixedPrior(fixed_scale=2.5), or None; got 3."),
        (
            MixedPrior("a"),
            "fixed_scale is the prior standard deviation of a fixed effect, positive and finite; got",
        ),
        (MixedPrior(-1), "fixed_scale is the prior standard deviation of a fixed effect, positive and finite; got -1"),
        (MixedPrior(sd=HalfNormal("a")), "sd must have positive and finite numbers; got HalfNormal(scale='a')."),
        (MixedPrior(sd=HalfNormal(), concentration="a"), "concentration is that of the LKJ density, positive and"),
        (
            MixedPrior(precision=3),
            "precision of a prior is a torchngvi.models.Wishart(dof, scale), 'kass-natarajan' or None; got 3.",
        ),
        (
            MixedPrior(precision=Wishart("a", 1.0)),
            "the degrees of freedom of the Wishart prior must exceed r - 1 = 0; ",
        ),
    ],
)
def test_prior_of_a_mixed_model(random, prior, message):
    with pytest.raises(InputError, match=re.escape(message)):
        MixedModel(X, Y, random, "poisson_log", prior=prior)


@pytest.mark.parametrize(
    ("family", "ending"),
    [
        ("negbin", "got 'negbin'. Did you mean torchngvi.models.NegativeBinomial(dispersion)?"),
        ("student_t", "got 'student_t'. Did you mean torchngvi.models.StudentT(scale, dof)?"),
        ("student", "got 'student'. Did you mean torchngvi.models.StudentT(scale, dof)?"),
        (
            "binomial",
            "got 'binomial'. For two classes say bernoulli; for counts of events poisson, or negative_binomial.",
        ),
        ("poison", "got 'poison'. Did you mean 'poisson'?"),
        ("gamma ray", "got 'gamma ray'."),
        (["gamma ray"], "got ['gamma ray']."),
    ],
)
def test_family_of_a_regression(family, ending):
    with pytest.raises(InputError, match=f"{re.escape(ending)}$"):
        GeneralizedLinear(X, Y, family)


@pytest.mark.parametrize(
    ("word", "name"), [("logistic", "BernoulliLogit"), ("Logit", "BernoulliLogit"), ("normal", "GaussianNoise")]
)
def test_short_words_for_families(word, name):
    """Those of the command line."""
    assert type(GeneralizedLinear(X, Y % 2, word).likelihood).__name__ == name


def test_family_of_a_mixed_model():
    assert MixedModel(X, Y, ONE, "negbin").learned.name == MixedModel(X, Y, ONE, "negative_binomial").learned.name
    with pytest.raises(InputError, match=r"got 'binomial'\. For two classes say bernoulli; for counts"):
        MixedModel(X, Y, ONE, "binomial")
    with pytest.raises(InputError, match=re.escape("got 'negative_binomal'. Did you mean 'negative_binomial'?")):
        MixedModel(X, Y, ONE, "negative_binomal")


def test_curvature_of_an_attachment():
    net = torch.nn.Linear(2, 2)
    posterior = torchngvi.network(net, num_data=10)
    message = "curvature is a way to observe it, such as torchngvi.networks.SampledLabels(), or None; got 3."
    with pytest.raises(InputError, match=re.escape(message)):
        torchngvi.attach(torch.optim.SGD(net.parameters(), lr=0.1), posterior, steps=10, curvature=3)


class TestCapturedStep:
    model = GeneralizedLinear(torch.eye(2), [0.0, 1.0])

    @pytest.mark.parametrize("tolerance", [float("nan"), -1.0, float("inf")])
    def test_tolerance(self, tolerance):
        message = "tolerance bounds the natural-gradient norm, 0 for no such stop, and must be 0 or larger, and finite"
        with pytest.raises(InputError, match=re.escape(f"{message}; got {tolerance}.")):
            CapturedStep(VN(CholeskyGaussian(2)), self.model, tolerance=tolerance)

    def test_tolerance_that_is_no_number(self):
        message = "tolerance bounds the natural-gradient norm, 0 for no such stop, and must be a number; got 'a'."
        with pytest.raises(InputError, match=message):
            CapturedStep(VN(CholeskyGaussian(2)), self.model, tolerance="a")

    @pytest.mark.parametrize(
        ("steps", "message"),
        [
            (
                {"most": 3, "every": 0},
                "every counts the steps from one look to the next and must be a whole number, at",
            ),
            ({"most": 3, "every": 1.5}, "every counts the steps from one look to the next and must be a whole number"),
            ({"most": "a"}, "most counts steps and must be a whole number, at least 1; got 'a'."),
        ],
    )
    def test_run(self, steps, message):
        with pytest.raises(InputError, match=message):
            CapturedStep(VN(CholeskyGaussian(2)), self.model, tolerance=1e-3).run(**steps)


def test_no_random_state_is_a_fresh_seed(monkeypatch):
    """Two calls draw two seeds, each of which is the seed of the fit that follows."""
    assert seed_of(None) != seed_of(None)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 2))
    y = X[:, 0] + X[:, 1] + 0.3 * rng.normal(size=40)
    monkeypatch.setattr("torchngvi.adapters.sklearn.mixed.seed_of", {None: 1234}.__getitem__)
    drawn = BayesianMixedRegressor(random_state=None).fit(X, y, groups=np.arange(40) % 5)
    monkeypatch.undo()
    given = BayesianMixedRegressor(random_state=1234).fit(X, y, groups=np.arange(40) % 5)
    assert drawn.seed_ == given.seed_ == 1234
    assert np.array_equal(drawn.sample_posterior(9, 0), given.sample_posterior(9, 0))


@pytest.mark.accuracy
@pytest.mark.parametrize("name", ["settings.toml", "SETTINGS.TOML"])
def test_a_file_of_settings_behind_columns_to_drop(tmp_path, monkeypatch, capsys, name):
    """It is no column, whatever the case of its ending."""
    monkeypatch.chdir(tmp_path)
    rows = "\n".join(f"{k},{k % 7},{k % 2}" for k in range(40))
    (tmp_path / "rows.csv").write_text(f"id,x,y\n{rows}\n", encoding="utf-8")
    (tmp_path / name).write_text('data = "rows.csv"\ntarget = "y"\nprogress = false\n', encoding="utf-8")
    assert main(["fit", "--drop", "id", name]) == 0
    assert torchngvi.load("runs/rows").columns == ("x",)


@pytest.mark.parametrize("random", [ONE, TWO], ids=["one factor", "two"])
def test_classes_are_exported_as_0_and_1(random):
    pytest.importorskip("arviz")
    y = 2 * (Y % 2) - 1
    data = MixedModel(X, y, random, "bernoulli").fit(progress=False).to_arviz()
    assert data.observed_data["y"].values.tolist() == (Y % 2).tolist()


def test_what_predict_advises():
    """In Python a method of the table, on a command line a flag."""
    import pandas as pd

    from torchngvi.app.encoding import check_columns

    frame = pd.DataFrame({"x": [1.0], "b": [1.0], "a": [2.0]})
    message = "the table has a, b, which the fit has not seen. Leave it out (frame.drop(columns=['a', 'b'])), or check"
    with pytest.raises(InputError, match=re.escape(message)):
        check_columns(frame, ["x"], [], "the table")
    with pytest.raises(
        InputError, match=re.escape("Leave it out (--drop a --drop b), or check that this is the right")
    ):
        check_columns(frame, ["x"], [], "new.csv", flag=True)
