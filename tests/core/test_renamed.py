"""Old names: each is understood, warns at the line that uses it, and gives what the new name gives."""

import importlib
import re
import sys

import pytest
import torch

import torchngvi
from torchngvi import renamed as tables_of_release
from torchngvi.models import MixedLogJoint


def test_the_prior_of_the_covariance_of_a_mixed_model():
    X = torch.ones(6, 1, dtype=torch.float64)
    model = MixedLogJoint(X, [3, 4, 0, 1, 2, 6], (X, [0, 0, 1, 1, 2, 2]), "poisson_log")
    with pytest.warns(FutureWarning, match="MixedLogJoint: precision is now called covariance_prior"):
        assert model.precision is model.covariance_prior


@pytest.fixture
def tables(monkeypatch):
    """Tables with a row each, whatever the release has moved."""
    monkeypatch.setitem(tables_of_release.MODULES, "torchngvi.words_of_old", "torchngvi.messages")
    monkeypatch.setitem(tables_of_release.GONE, "torchngvi.studies_of_old", "run python -m examples.papers in a clone")
    yield
    sys.modules.pop("torchngvi.words_of_old", None)
    vars(torchngvi).pop("words_of_old", None)


def test_an_old_path_is_the_module_that_holds_its_content(tables):
    with pytest.warns(FutureWarning, match="torchngvi.words_of_old is now torchngvi.messages"):
        found = importlib.import_module("torchngvi.words_of_old")
    assert found is importlib.import_module("torchngvi.messages")
    assert found.__name__ == "torchngvi.messages"  # the module keeps its own name and spec
    assert found.__spec__.name == "torchngvi.messages"
    assert torchngvi.words_of_old is found


def test_a_path_that_is_gone_says_what_to_use(tables):
    with pytest.raises(ModuleNotFoundError, match="is gone: run python -m examples.papers in a clone"):
        importlib.import_module("torchngvi.studies_of_old")


@pytest.mark.parametrize("path", sorted(tables_of_release.GONE))
def test_each_row_of_gone(path):
    with pytest.raises(ModuleNotFoundError, match=f"^{re.escape(path)} is gone: "):
        importlib.import_module(path)


def test_a_name_that_is_gone_says_what_to_use(tables):
    with pytest.raises(ModuleNotFoundError, match="is gone: run python -m examples.papers in a clone"):
        exec("from torchngvi import studies_of_old")


def test_a_path_that_is_gone_is_no_attribute(tables):
    assert not hasattr(torchngvi, "studies_of_old")
    with pytest.raises(AttributeError, match="is gone: run python -m examples.papers in a clone"):
        torchngvi.studies_of_old  # noqa: B018


def test_any_other_path_is_not_found():
    with pytest.raises(ModuleNotFoundError, match="No module named 'torchngvi.no_such_module'"):
        importlib.import_module("torchngvi.no_such_module")


@pytest.mark.parametrize(("old", "new"), sorted(tables_of_release.MODULES.items()))
def test_each_row_of_modules(old, new):
    assert not callable(vars(importlib.import_module(old.rpartition(".")[0])).get(old.rpartition(".")[2])), "hidden"
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match="is understood in this release only"):
        assert importlib.import_module(old) is importlib.import_module(new)


def test_functions_that_are_methods_now():
    for home, methods in tables_of_release.METHODS.items():
        module, kind = home.rsplit(".", 1)
        for name in methods:
            with pytest.warns(FutureWarning, match=rf"{module}.{name}\(q, ...\) is now q.{name}\(...\)") as told:
                found = getattr(importlib.import_module(module), name)
            assert found is getattr(getattr(importlib.import_module(module), kind), name)
            assert told[0].filename == __file__
    with pytest.raises(AttributeError, match=r"module 'torchngvi.networks' has no attribute 'nothing'"):
        _ = torchngvi.networks.nothing


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in tables_of_release.NAMES.items() for name in names]
)
def test_each_name_that_left_the_front_door(module, name):
    with pytest.warns(FutureWarning, match=f"torchngvi.{name} is now {module}.{name}"):
        found = getattr(torchngvi, name)
    assert found is getattr(importlib.import_module(module), name)
    assert name not in torchngvi.__all__
