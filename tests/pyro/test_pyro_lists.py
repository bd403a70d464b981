"""Lists of guides in NaturalSVI: a Gaussian for one block, guides of Pyro for the rest."""

import re

import pytest
import torch
from helpers import DTYPE, IDENTITY, close

from torchngvi.errors import InputError

pyro = pytest.importorskip("pyro", reason="needs Pyro: pip install 'torchngvi[pyro]'")

import pyro.distributions as dist  # noqa: E402
from pyro import poutine  # noqa: E402
from pyro.infer import Trace_ELBO, TraceEnum_ELBO, config_enumerate  # noqa: E402
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal  # noqa: E402

from torchngvi.adapters.pyro import AutoGaussian, NaturalSVI  # noqa: E402
from torchngvi.adapters.pyro.svi import ListedGuides  # noqa: E402

X = torch.linspace(-1, 1, 12, dtype=DTYPE)[:, None] ** torch.arange(3)
Y = torch.sin(3 * X[:, 1])


pytestmark = pytest.mark.usefixtures("pyro_in_float64")


def model(X, y):
    """A regression on w, by a product for one w, beside latents that are independent of it."""
    w = pyro.sample("w", dist.Normal(0, 2).expand([3]).to_event(1))
    with pyro.plate("others", 2):
        pyro.sample("share", dist.Dirichlet(torch.ones(3)))
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    pyro.sample("count", dist.Poisson(rate).expand([4]).to_event(1), obs=torch.tensor([1.0, 4.0, 2.0, 3.0]))
    with pyro.plate("rows", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


@config_enumerate
def mixture(y):
    left = pyro.sample("left", dist.Normal(-1.0, 1.0))
    right = pyro.sample("right", dist.Normal(1.0, 1.0))
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Normal(torch.where(z > 0, right, left), 0.7), obs=y)


def listed(model, expose, rest=AutoNormal):
    guide = AutoGuideList(model)
    guide.append(AutoGaussian(poutine.block(model, expose=expose)))
    guide.append(rest(poutine.block(model, hide=[*expose, "z"])))
    return guide


def test_the_loss_is_that_of_trace_elbo():
    """With the same draws; also where sites are summed out."""
    for each, args, expose in ((model_by_rows, (X, Y), ["w"]), (mixture, (Y,), ["left"])):
        pyro.clear_param_store()
        guide = listed(each, expose)
        ours = ListedGuides(each, guide, args, {})
        elbo = Trace_ELBO if each is model_by_rows else TraceEnum_ELBO
        theirs = elbo(num_particles=6, vectorize_particles=True, max_plate_nesting=1)
        torch.manual_seed(4)
        expected = torch.tensor(theirs.loss(each, guide, *args))
        torch.manual_seed(4)
        close(ours.loss(6).detach(), expected, IDENTITY)


def model_by_rows(X, y):
    """The same as `model`, in one run for many w."""
    w = pyro.sample("w", dist.Normal(0, 2).expand([3]).to_event(1))
    with pyro.plate("others", 2):
        pyro.sample("share", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("rows", len(X)):
        pyro.sample("y", dist.Normal((X * w).sum(-1), 0.5), obs=y)


@pytest.mark.accuracy
@pytest.mark.parametrize("rest", [AutoNormal, AutoDelta])
def test_each_block_ends_where_it_would_alone(rest):
    guide = listed(model, ["w"], rest)
    svi = NaturalSVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.1, "lrd": 0.97}), num_particles=8)
    for _ in range(100):
        loss = svi.step(X, Y)
    covariance = torch.linalg.inv(4 * X.mT @ X + torch.eye(3) / 4)
    close(guide[0].posterior.mean, covariance @ (4 * X.mT @ Y), 1e-3)
    close(guide[0].posterior.covariance, covariance, 1e-3)
    rate = guide.median(X, Y)["rate"].item()
    if rest is AutoDelta:
        assert rate == pytest.approx(11 / 5, rel=0.01)  # the mode of Gamma(12, 5)
    else:
        assert rate == pytest.approx(12 / 5, rel=0.1)
    assert abs(svi.evaluate_loss(X, Y) - loss) < 5


def test_a_run_leaves_the_rate_since_parameters_move(tmp_path):
    guide = listed(model, ["w"])
    svi = NaturalSVI(model, guide, pyro.optim.Adam({"lr": 0.05}), num_particles=4)
    result = svi.run(20, X, Y, progress=False, checkpoint=tmp_path / "run")
    assert len(result.trace) == 20
    assert not result.converged
    assert svi.natural.param_groups[0]["lr"] == 0.1


def test_a_checkpoint_holds_all_guides_of_the_list(tmp_path):
    """To the last bit."""
    ends = []
    for stops in ([12], [5, 12]):
        for steps in stops:
            pyro.clear_param_store()
            torch.manual_seed(2)
            guide = listed(model_by_rows, ["w"])
            svi = NaturalSVI(model_by_rows, guide, pyro.optim.Adam({"lr": 0.05}), num_particles=2)
            end = [lambda record, steps=steps: record.evaluations >= steps]
            svi.run(12, X, Y, progress=False, callbacks=end, checkpoint=tmp_path / str(len(stops)))
        ends.append([guide[0].posterior.mean, guide[1].locs.share, guide[1].scales.share])
    for one, two in zip(*ends, strict=True):
        assert torch.equal(one, two)


def test_lists_that_cannot_be_moved_are_refused():
    two = listed(model, ["w"])
    two.append(AutoGaussian(poutine.block(model, expose=["rate"])))
    for guide, count in ((two, 2), (AutoGuideList(model), 0)):
        text = f"NaturalSVI moves one AutoGaussian of a list of guides, and this list has {count}."
        with pytest.raises(InputError, match=text):
            NaturalSVI(model, guide, pyro.optim.Adam({"lr": 0.1}))
    with pytest.raises(InputError, match="the other guides of the list have parameters of their own: pass an opt"):
        NaturalSVI(model, listed(model, ["w"]))
    part = AutoGuideList(model)
    part.append(AutoGaussian(poutine.block(model, expose=["w"])))
    svi = NaturalSVI(model, part, pyro.optim.Adam({"lr": 0.1}))
    with pytest.raises(InputError, match=re.escape("the guides of the list leave out the latent sites share, rate.")):
        svi.step(X, Y)
