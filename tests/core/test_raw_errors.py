"""Arguments of the wrong kind: one sentence each, and what a user may do."""

import re

import numpy as np
import pytest
import torch

import torchngvi
from torchngvi import GeneralizedLinear, MixedModel
from torchngvi.adapters.sklearn import BayesianMixedRegressor
from torchngvi.adapters.sklearn.estimators import seed_of
from torchngvi.cli import main
from torchngvi.errors import InputError

X, GROUPS, Y = torch.ones(12, 1, dtype=torch.float64), torch.arange(12) // 4, torch.arange(12) % 5
ONE, TWO = (X, GROUPS), {"a": (X, GROUPS), "b": (X, torch.arange(12) % 3)}


@pytest.mark.parametrize(
    ("word", "name"), [("logistic", "BernoulliLogit"), ("Logit", "BernoulliLogit"), ("normal", "GaussianNoise")]
)
def test_short_words_for_families(word, name):
    """Those of the command line."""
    assert type(GeneralizedLinear(X, Y % 2, word).likelihood).__name__ == name


def test_family_of_a_mixed_model():
    assert MixedModel(X, Y, ONE, "negbin").family.name == MixedModel(X, Y, ONE, "negative_binomial").family.name
    with pytest.raises(InputError, match=re.escape("there is no family 'negative_binomal'. Did you mean")):
        MixedModel(X, Y, ONE, "negative_binomal")
    with pytest.raises(InputError, match="the binomial family takes an outcome and trials; got 1 column"):
        MixedModel(X, Y, ONE, "binomial")


def test_no_random_state_is_a_fresh_seed(monkeypatch):
    """Two calls draw two seeds, each of which is the seed of the fit that follows."""
    assert seed_of(None) != seed_of(None)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 2))
    y = X[:, 0] + X[:, 1] + 0.3 * rng.normal(size=40)
    monkeypatch.setattr("torchngvi.adapters.sklearn.estimators.seed_of", {None: 1234}.__getitem__)
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
    assert torchngvi.load("runs/rows").columns.needed == ["x"]


@pytest.mark.parametrize("random", [ONE, TWO], ids=["one factor", "two"])
def test_classes_are_exported_as_0_and_1(random):
    pytest.importorskip("arviz")
    y = 2 * (Y % 2) - 1
    data = MixedModel(X, y, random, "bernoulli").fit(progress=False).to_arviz()
    assert data.observed_data["y"].values.tolist() == (Y % 2).tolist()
