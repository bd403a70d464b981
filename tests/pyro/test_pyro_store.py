"""The guide in Pyro's parameter store: saved with it, restored from it, moved by nobody."""

import copy
import pickle
import re
import warnings

import pytest
import torch
from helpers import DTYPE, POSTERIORS

import torchngvi as ngvi
from torchngvi.errors import InputError

pyro = pytest.importorskip("pyro", reason="needs Pyro: pip install 'torchngvi[pyro]'")

import pyro.distributions as dist  # noqa: E402
from pyro.distributions import constraints  # noqa: E402
from pyro.infer import SVI, Predictive, Trace_ELBO  # noqa: E402
from pyro.infer.autoguide import AutoGuideList  # noqa: E402
from pyro.nn import PyroModule  # noqa: E402

from torchngvi.adapters.pyro import AutoGaussian, NaturalSVI, fit_guide  # noqa: E402

QUIET = {"progress": False}
Y = torch.tensor([1.0, 2.5, 0.5], dtype=DTYPE)


pytestmark = pytest.mark.usefixtures("pyro_in_float64")


def model(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mu, scale), obs=y)


def larger(y):
    pyro.sample("other", dist.Normal(0.0, 1.0))
    model(y)


def with_noise(y):
    scale = pyro.param("noise", torch.tensor(1.0), constraint=constraints.positive)
    with pyro.plate("rows", len(y)):
        x = pyro.sample("x", dist.Normal(0, 1))
        pyro.sample("y", dist.Normal(x, scale), obs=y)


def fitted(family=ngvi.CholeskyGaussian, **settings):
    guide = AutoGaussian(model, family, **settings)
    assert fit_guide(model, guide, Y, options=QUIET).converged
    return guide


def same(guide, other):
    return all(torch.equal(*pair) for pair in zip(guide.q.coordinates, other.q.coordinates, strict=True))


families = pytest.mark.parametrize("family", POSTERIORS.values(), ids=POSTERIORS)


@pytest.mark.sparse(2)
@families
@pytest.mark.parametrize("set_up", ["before", "after"])
def test_a_file_restores_the_guide(family, set_up, tmp_path):
    """A guide that is set up before the store is loaded, or after, as in another process."""
    guide = fitted(family)
    pyro.get_param_store().save(tmp_path / "store")
    pyro.clear_param_store()
    fresh = AutoGaussian(model, family)
    if set_up == "before":
        fresh.setup(Y)
        assert not same(fresh, guide)
    pyro.get_param_store().load(tmp_path / "store")
    assert fresh.setup(Y).median() == guide.median()
    assert same(fresh, guide)


@pytest.mark.parametrize(
    "use",
    [
        lambda guide: guide(Y),
        lambda guide: guide.median(),
        lambda guide: guide.get_posterior(),
        lambda guide: Predictive(model, guide=guide, num_samples=2)(Y),
        lambda guide: Trace_ELBO().loss(model, guide, Y),
        lambda guide: NaturalSVI(model, guide).evaluate_loss(Y),
        lambda guide: guide.state_dict(),
        copy.deepcopy,
        pickle.dumps,
    ],
)
def test_whatever_uses_the_guide_first_finds_what_was_loaded(use, tmp_path):
    guide = fitted()
    pyro.get_param_store().save(tmp_path / "store")
    pyro.clear_param_store()
    fresh = AutoGaussian(model).setup(Y)
    pyro.get_param_store().load(tmp_path / "store")
    result = use(fresh)
    assert same(fresh, guide)
    if isinstance(result, AutoGaussian):
        assert same(result, guide)


@pytest.mark.parametrize("taken", [copy.deepcopy, lambda state: state], ids=["copied", "as_it_is"])
def test_states_restore_the_guide(taken):
    store, guide = pyro.get_param_store(), fitted()
    state = taken(store.get_state())
    pyro.clear_param_store()
    fresh = AutoGaussian(model).setup(Y)
    store.set_state(state)
    assert fresh(Y).keys() == {"mu", "scale"}
    assert same(fresh, guide)


@pytest.mark.accuracy
def test_scopes_keep_guides_apart():
    store = pyro.get_param_store()
    with store.scope() as first:
        mine = fitted()
    with store.scope() as second:
        other = AutoGaussian(larger)
        fit_guide(larger, other, Y, options=QUIET)
    before = copy.deepcopy(mine), copy.deepcopy(other)
    for scope, guide, expected in ((first, mine, before[0]), (second, other, before[1])):
        with store.scope(scope):
            guide(Y)
            assert same(guide, expected)
            assert store["AutoGaussian.q.mean"].shape == guide.posterior.mean.shape


def test_a_file_holds_plain_parameters(tmp_path):
    """Nothing of this library is needed to read it."""
    guide = fitted()
    pyro.get_param_store().save(tmp_path / "store")
    state = torch.load(tmp_path / "store", weights_only=False)
    assert set(state["params"]) == {"AutoGaussian.q.mean", "AutoGaussian.q.scale_tril"}
    assert torch.equal(state["params"]["AutoGaussian.q.mean"], guide.posterior.mean)
    assert {type(constraint) for constraint in state["constraints"].values()} == {type(constraints.real)}


def test_the_store_holds_what_q_is():
    """After steps of an optimizer, after a conversion, after it was emptied."""
    store, guide = pyro.get_param_store(), AutoGaussian(model).setup(Y)
    NaturalSVI(model, guide).step(Y)
    assert torch.equal(store["AutoGaussian.q.mean"], guide.posterior.mean)
    guide.float()
    assert store["AutoGaussian.q.scale_tril"].dtype == torch.float32
    guide.double()
    before = guide.median()
    pyro.clear_param_store()
    assert guide.median() == before
    assert torch.equal(store["AutoGaussian.q.mean"], guide.posterior.mean)
    pickle.dumps(guide)


def test_no_optimizer_moves_what_the_store_holds():
    guide = AutoGaussian(with_noise).setup(Y)
    svi = SVI(with_noise, guide, pyro.optim.SGD({"lr": 0.1, "weight_decay": 1.0}), Trace_ELBO())
    svi.step(Y)
    before = guide.posterior.snapshot()  # after the step of its own
    assert pyro.param("noise").item() != 1.0
    values = list(dict(pyro.get_param_store().named_parameters()).values())
    assert len(values) == 3
    adam = torch.optim.AdamW(values, lr=0.1, weight_decay=1.0)
    (sum(value.square().sum() for value in pyro.get_param_store().values())).backward()
    adam.step()
    assert all(torch.equal(*pair) for pair in zip(before, guide.posterior.coordinates, strict=True))
    assert [name for name, _ in guide.named_parameters()] == ["step.length"]


def test_what_is_read_from_the_store_is_a_copy():
    guide = AutoGaussian(model).setup(Y)
    before = guide.posterior.mean.clone()
    pyro.get_param_store()["AutoGaussian.q.mean"].add_(1.0)
    assert torch.equal(guide.posterior.mean, before)


def test_an_assignment_sets_q_and_its_optimizer_sees_it():
    guide = fitted()
    opt = ngvi.VN(guide.posterior, lr=0.1, estimator=ngvi.Stein(ngvi.Fixed(8)))
    density = guide.density(model, (Y,))
    opt.step(density)
    pyro.get_param_store()["AutoGaussian.q.mean"] = torch.tensor([3.0, 1.0])
    guide(Y)
    assert guide.posterior.mean.tolist() == [3.0, 1.0]
    assert not guide.posterior.mean.requires_grad
    fresh = ngvi.VN(copy.deepcopy(guide.posterior), lr=0.1, estimator=ngvi.Stein(ngvi.Fixed(8)))
    fresh.load_state_dict(opt.state_dict())
    assert float(opt.step(density)) == float(fresh.step(density))


def test_a_state_dict_has_the_last_word():
    """What was in the store before it was loaded does not come back."""
    guide, store = fitted(), pyro.get_param_store()
    store["AutoGaussian.q.mean"] = torch.zeros(2)
    state = {"q.mean": torch.ones(2), "q.scale_tril": torch.eye(2)}
    guide.load_state_dict(state)
    guide(Y)
    assert guide.posterior.mean.tolist() == [1.0, 1.0]


def test_guides_of_one_name_do_not_take_from_one_another():
    """The store holds that which was set up or called last, and says so when it is saved."""
    first = fitted()
    second = AutoGaussian(model).setup(Y)
    start = second.posterior.snapshot()
    assert not same(first, second)
    first.median()
    second(Y)
    assert torch.equal(second.posterior.mean, start.vector)
    store = pyro.get_param_store()
    assert torch.equal(store["AutoGaussian.q.mean"], start.vector)
    said = "2 guides in use are named 'AutoGaussian', and the parameter store saves one of them, the one set up or call"
    with pytest.warns(UserWarning, match=re.escape(said)):
        pickle.dumps(store.get_state())
    first(Y)
    assert torch.equal(store["AutoGaussian.q.mean"], first.posterior.mean)
    del second
    pickle.dumps(store.get_state())


def test_another_family_leaves_nothing_of_the_one_before():
    first = AutoGaussian(model).setup(Y)
    second = AutoGaussian(larger, ngvi.DiagonalGaussian).setup(Y)
    assert {key: value.shape for key, value in pyro.get_param_store().items()} == {
        f"AutoGaussian.q.{name}": value.shape for name, value in second.posterior.state_dict().items()
    }
    assert first.posterior.dim == 2


def test_names_tell_guides_apart(tmp_path):
    first, second = fitted(name="first"), AutoGaussian(larger, name="second").setup(Y)
    assert set(pyro.get_param_store()) == {
        f"{name}.q.{key}" for name in ("first", "second") for key in ("mean", "scale_tril")
    }
    pyro.get_param_store().save(tmp_path / "store")
    pyro.clear_param_store()
    pyro.get_param_store().load(tmp_path / "store")
    for name, source, old in (("first", model, first), ("second", larger, second)):
        assert same(AutoGaussian(source, name=name).setup(Y), old)


def test_containers_name_their_guides(tmp_path):
    def made():
        parts = AutoGuideList(larger)
        parts.append(AutoGaussian(pyro.poutine.block(larger, hide=["other"])))
        parts.append(AutoGaussian(pyro.poutine.block(larger, expose=["other"])))

        class Holder(PyroModule):
            def __init__(self):
                super().__init__("holder")
                self.guide = AutoGaussian(model)

            def forward(self, y):
                return self.guide(y)

        return parts, Holder()

    old = made()
    for each in old:
        each(Y)
    old[0][1].posterior.initialize_(5.0)
    old[1].guide.posterior.initialize_(7.0)
    names = {key.rpartition(".q.")[0] for key in pyro.get_param_store()}
    assert names == {"AutoGuideList.0", "AutoGuideList.1", "holder.guide"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pyro.get_param_store().save(tmp_path / "store")
    pyro.clear_param_store()
    pyro.get_param_store().load(tmp_path / "store")
    new = made()
    for each in new:
        each(Y)
    assert new[0][1].posterior.mean.tolist() == [5.0]
    assert new[1].guide.posterior.mean.tolist() == [7.0, 7.0]


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        (lambda: AutoGaussian(larger), "AutoGaussian.q.mean (2,), AutoGaussian.q.scale_tril (2, 2) where it has"),
        (lambda: AutoGaussian(model, ngvi.DiagonalGaussian), "AutoGaussian.q.scale_tril (2, 2) where it has"),
    ],
    ids=["size", "family"],
)
def test_a_store_of_another_posterior_is_refused(other, shown, tmp_path):
    fitted()
    pyro.get_param_store().save(tmp_path / "store")
    pyro.clear_param_store()
    pyro.get_param_store().load(tmp_path / "store")
    text = "the parameter store holds another posterior than that of the guide: "
    with pytest.raises(InputError, match=re.escape(text) + ".*" + re.escape(shown)):
        other().setup(Y)


def test_modules_that_keep_their_parameters_leave_the_store_alone():
    with pyro.settings.context(module_local_params=True):
        guide = fitted()
        guide(Y)
        assert len(pyro.get_param_store()) == 0
