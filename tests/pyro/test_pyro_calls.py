"""How often and for how many draws a model of Pyro runs: structures tried once, calls that stay in the cache."""

import pickle
import re

import pytest
import torch

from torchngvi.derivatives import energy_and_gradient
from torchngvi.errors import InputError

pyro = pytest.importorskip("pyro", reason="needs Pyro: pip install 'torchngvi[pyro]'")

import pyro.distributions as dist  # noqa: E402

from torchngvi.adapters.pyro import AutoGaussian, fit_guide, log_joint, structure  # noqa: E402
from torchngvi.adapters.pyro.density import draws_at_once  # noqa: E402
from torchngvi.adapters.pyro.structure import KeptCall  # noqa: E402

pytestmark = pytest.mark.usefixtures("pyro_in_float64")
QUIET = {"progress": False, "examine": False}


def by_index(group, y):
    """Rows that read their group by index."""
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with pyro.plate("groups", 4):
        b = pyro.sample("b", dist.Normal(0.0, tau))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(b[group], 1.0), obs=y)


@pytest.fixture
def reads(monkeypatch):
    """The number of times that it was tried what terms read."""
    calls, before = [], structure.reads_of

    def counted(*args):
        calls.append(args)
        return before(*args)

    monkeypatch.setattr(structure, "reads_of", counted)
    return calls


@pytest.mark.accuracy
def test_a_structure_is_tried_once_for_the_same_data(reads):
    group, y = torch.arange(4).repeat(3), torch.randn(12)
    guide = AutoGaussian(by_index, structure="auto")
    fit_guide(by_index, guide, group, y, options=QUIET)
    fit_guide(by_index, guide, group, y, options=QUIET)
    assert len(reads) == 1


@pytest.mark.accuracy
def test_it_is_tried_again_for_other_data(reads):
    group, y = torch.arange(4).repeat(3), torch.randn(12)
    guide = AutoGaussian(by_index, structure="auto").setup(group, y)
    fit_guide(by_index, guide, group, y.clone(), options=QUIET)
    assert len(reads) == 2
    y += 1  # other data in the same tensor
    fit_guide(by_index, guide, group, y, options=QUIET)
    assert len(reads) == 3


@pytest.mark.accuracy
def test_rows_that_read_their_group_by_index_are_examined_as_those_of_a_dense_guide_are():
    group, y = torch.arange(4).repeat(6), torch.randn(24) + torch.arange(4.0).repeat(6)
    for kind in ("auto", "dense"):
        guide = AutoGaussian(by_index, structure=kind)
        result = fit_guide(by_index, guide, group, y, options=QUIET)
        assert not any("no third order" in left_out for left_out in result.verdict.effort.unexamined)
        assert "CholeskyGaussian" not in str(result)
    assert guide.density(by_index, (group, y)).pattern is None  # no forest was found for a dense q


def test_a_pickle_is_of_no_call():
    y = torch.zeros(2)
    call = KeptCall(by_index, (y, 1), {"text": "a"})
    assert call.same(by_index, (y, 1), {"text": "a"})
    others = [((y, 1), {"text": "b"}), ((y, True), {"text": "a"}), ((y,), {})]
    assert not any(call.same(by_index, *other) for other in others)
    assert not pickle.loads(pickle.dumps(call)).same(by_index, (y, 1), {"text": "a"})
    assert not KeptCall(by_index, (object(),), {}).same(by_index, (object(),), {})


def pairs(n):
    """A model whose largest tensor has n² numbers a draw."""

    def model():
        z = pyro.sample("z", dist.Normal(torch.zeros(n), 1.0).to_event(1))
        pyro.sample("y", dist.Normal((z[..., :, None] * z[..., None, :]).sum(-1), 1.0).to_event(1), obs=torch.ones(n))

    return model


def test_calls_are_as_large_as_the_largest_tensor_allows():
    density = log_joint(pairs(100))  # 10,000 numbers of 8 bytes
    assert density.batched_by == "plate"
    assert density.draws_at_once == 2**21 // 80_000 == 26
    assert log_joint(pairs(1)).draws_at_once == 2048
    assert log_joint(pairs(500)).draws_at_once == 16
    assert draws_at_once(10_000, torch.zeros((), device="meta"), 2048) == 2048


def test_values_and_gradients_in_parts_are_those_of_one_call():
    density, theta = log_joint(pairs(100)), torch.randn(60, 100)
    energies, gradients = energy_and_gradient(density, theta)
    values = density(theta)
    density.draws_at_once = 2048
    whole, slopes = energy_and_gradient(density, theta)
    torch.testing.assert_close(energies, whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients, slopes, rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(values, -whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("structure", ["dense", "auto"])
@pytest.mark.parametrize("support", [dist.Normal(0.0, 1.0), dist.HalfNormal(1.0)], ids=["real", "positive"])
def test_a_model_that_writes_into_a_latent_is_refused(structure, support):
    def model():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("groups", 6):
            b = pyro.sample("b", support)
        b[..., 0] = 1.0
        with pyro.plate("rows", 6):
            pyro.sample("y", dist.Normal(b + mu, 1.0), obs=torch.ones(6))

    told = "the model writes in place into the value of the latent site 'b', whose density is that of the value before."
    guide = AutoGaussian(model, structure=structure)
    with pytest.raises(InputError, match=re.escape(told)):
        fit_guide(model, guide, options=QUIET)
