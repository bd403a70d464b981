"""Old names: each is understood, warns at the line that uses it, and gives what the new name gives."""

import importlib
import inspect
import pathlib
import re
import sys
import warnings

import pytest
import torch

import torchngvi
from torchngvi import CholeskyGaussian, NaturalGaussian, ifvb, stepsizes
from torchngvi import renamed as tables_of_release
from torchngvi.errors import InputError
from torchngvi.fitting import Evaluations, engine
from torchngvi.fitting.loop import Loop
from torchngvi.fitting.smoothed import SmoothedSteps
from torchngvi.models import MixedLogJoint
from torchngvi.renamed import renamed


class TestHelper:
    @staticmethod
    @renamed(size="dim", old="new")
    def total(dim, new=0):
        return dim + new

    def test_old_and_new_names_give_the_same(self):
        with pytest.warns(
            FutureWarning, match=r"TestHelper.total: size= is now called dim=. The old name is under"
        ) as w:
            assert self.total(size=2, new=3) == self.total(2, new=3) == 5
        assert len(w) == 1
        assert pathlib.Path(w[0].filename).samefile(__file__)  # the line to be changed

    def test_each_old_name_warns(self):
        with warnings.catch_warnings(record=True, action="always") as w:
            assert self.total(size=2, old=3) == 5
        assert [str(each.message).rsplit(maxsplit=1)[-1] for each in w] == ["dim=.", "new=."]

    def test_new_names_are_silent(self):
        assert self.total(dim=1) == 1  # warnings are errors here

    def test_both_spellings(self):
        with pytest.raises(InputError, match=r"total got both dim= and its old name size=. Leave size= out."):
            self.total(dim=1, size=1)

    def test_the_signature_is_that_of_the_function(self):
        assert list(inspect.signature(self.total).parameters) == ["dim", "new"]


def beta():
    return ifvb.Beta(torch.tensor([2.0, 3.0], dtype=torch.float64))


def ones(theta):
    return 0 * theta[..., 0]


def test_the_family_of_ifvb():
    with pytest.warns(FutureWarning, match="torchngvi.ifvb: Family is now called FlatPosterior"):
        assert ifvb.Family is ifvb.FlatPosterior
    with pytest.raises(AttributeError, match="module 'torchngvi.ifvb' has no attribute 'Famly'"):
        ifvb.Famly  # noqa: B018


def test_the_family_of_an_optimizer():
    opt = ifvb.IFVB(beta())
    with pytest.warns(FutureWarning, match="IFVB: family is now called posterior"):
        assert opt.family is opt.posterior


@pytest.mark.parametrize("method", [ifvb.IFVB, ifvb.AIFVB])
def test_the_family_of_a_method(method):
    with pytest.warns(FutureWarning, match=f"{method.__name__}: family= is now called posterior="):
        assert torch.equal(method(family=beta()).posterior.vector, beta().vector)


def test_the_arguments_of_preconditioned_vi():
    with pytest.warns(FutureWarning) as warned:
        opt = ifvb.PreconditionedVI(family=beta(), preconditioner=ifvb.Identity())
    assert isinstance(opt.metric, ifvb.Identity)
    assert [str(warning.message).split(" The old")[0] for warning in warned] == [
        "PreconditionedVI: family= is now called posterior=.",
        "PreconditionedVI: preconditioner= is now called metric=.",
    ]


def test_the_family_of_functions():
    draws = {"draws": 5, "generator": torch.Generator().manual_seed(0)}
    new = ifvb.lower_bound(q=beta(), log_joint=ones, **draws)
    draws["generator"].manual_seed(0)
    with pytest.warns(FutureWarning, match="lower_bound: family= is now called q="):
        assert ifvb.lower_bound(family=beta(), log_joint=ones, **draws) == new
    covariance = 1e-4 * torch.eye(2, dtype=torch.float64)
    with pytest.warns(FutureWarning, match="marginal_sample: family= is now called q="):
        assert ifvb.marginal_sample(family=beta(), covariance=covariance, n=4).shape == (4, 1)


def test_hosts():
    pytest.importorskip("gpytorch")
    pytest.importorskip("pyro")
    from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution
    from torchngvi.adapters.pyro import AutoGaussian

    with pytest.warns(FutureWarning, match="NaturalGradientVariationalDistribution: family= is now called posterior="):
        q = NaturalGradientVariationalDistribution(2, family=NaturalGaussian)
    assert isinstance(q.posterior, NaturalGaussian)
    with pytest.warns(FutureWarning, match="AutoGaussian: family= is now called posterior="):
        AutoGaussian(lambda: None, family=CholeskyGaussian)


def test_the_ending_of_an_engine():
    """The class by its old name, and an engine that was written with the old name of the method."""
    with pytest.warns(FutureWarning, match=r"torchngvi.fitting.engine: Verdict is now called Ending\."):
        assert engine.Verdict is engine.Ending
    with pytest.raises(AttributeError, match="module 'torchngvi.fitting.engine' has no attribute 'Verdct'"):
        engine.Verdct  # noqa: B018
    with pytest.warns(FutureWarning, match=r"Old: verdict\(\) is now called ending\(\)\."):

        class Old(SmoothedSteps):
            def verdict(self, stop, last):
                return engine.Engine.verdict(self, engine.Stop("old words."), last)

    old = Old(ifvb.IFVB(beta(), 0.01), ones)
    assert Loop(old, Evaluations(2), progress=False).run().reason == "old words."


@pytest.mark.parametrize(
    ("keyword", "place"),
    [
        ("samples", "metric=Recursive(samples=...)"),
        ("eps", "metric=Recursive(eps=...)"),
        ("c_beta", "metric=Recursive(c_beta=...)"),
        ("beta", "metric=Recursive(beta=...)"),
        ("warmup", "metric=Recursive(warmup=...)"),
        ("alpha", "a schedule, LambdaLR(opt, PowerSchedule(alpha=...))"),
        ("offset", "a schedule, LambdaLR(opt, PowerSchedule(offset=...))"),
        ("radius", "step_size=KLRadius(...)"),
        ("clip", "step_size=Clip(...), or Shortest(KLRadius(...), Clip(...))"),
        (
            "generator",
            "the parts that draw, metric=Recursive(generator=...) and estimator=Pathwise(10, generator)",
        ),
        ("w", "averaging=Averaging(w=...) of AIFVB"),
        ("burn_in", "averaging=Averaging(burn_in=...) of AIFVB"),
        ("fisher_at_average", "averaging=Averaging(metric_at_average=...) of AIFVB"),
    ],
)
@pytest.mark.parametrize("method", [ifvb.IFVB, ifvb.AIFVB])
def test_keywords_of_ifvb_that_are_parts_now(method, keyword, place):
    """A sentence says what to write, and what it says is there."""
    message = f"^{method.__name__}: {keyword}= has moved. Write {re.escape(place)} in its place.$"
    with pytest.raises(InputError, match=message):
        method(beta(), **{keyword: 1})
    for name, argument in re.findall(r"(\w+)\((\w+)=\.\.\.\)", place):
        part = getattr(ifvb, name, None) or getattr(stepsizes, name)
        assert argument in inspect.signature(part).parameters


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
