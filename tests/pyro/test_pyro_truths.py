"""Chains against closed forms and against each other, and their file."""

import pytest
import torch

pyro = pytest.importorskip("pyro", reason="needs Pyro: pip install 'torchngvi[pyro]'")
pytest.importorskip("benchmarks", reason="needs the benchmarks of a clone: run python -m pytest in its root")

import pyro.distributions as dist  # noqa: E402

from benchmarks.pyro_truths import Chains, Truth, keep, kept, nuts, run, summary, truth_of  # noqa: E402
from torchngvi.adapters.pyro import log_joint  # noqa: E402

pytestmark = pytest.mark.usefixtures("pyro_in_float64")


def model(shift=0.0):
    """x ~ N(1, 1) given y, by conjugacy, and z ~ N(0, 4)."""
    x = pyro.sample("x", dist.Normal(0.0, 2.0**0.5))
    pyro.sample("z", dist.Normal(0.0, 2.0))
    pyro.sample("y", dist.Normal(x, 2.0**0.5), obs=torch.tensor(2.0 + shift))


def groups():
    """Two members of N(mu, 1) that are seen with error 1: mu ~ N(0, 3/5), and each ~ N(0, 3/5) by symmetry."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("members", 2):
        x = pyro.sample("x", dist.Normal(mu, 1.0))
        pyro.sample("y", dist.Normal(x, 1.0), obs=torch.zeros(2))


def has_moments(truth, mean, sd):
    mean, sd = torch.tensor(mean), torch.tensor(sd)
    assert bool(((truth.mean - mean).abs() < 5 * sd / truth.ess**0.5).all())
    assert bool(((truth.sd / sd).log().abs() < 5 / (2 * truth.ess_of_squares) ** 0.5).all())


def test_chains_have_the_moments_and_come_back_from_their_file(tmp_path):
    density, path = log_joint(model), tmp_path / "truths.json"
    truth = summary(run(Chains(density, torch.zeros(2), torch.eye(2), 32), 100, 60.0, 40), density)
    assert truth.draws == 3200
    assert truth.sure
    has_moments(truth, [1.0, 0.0], [1.0, 2.0])
    assert kept(path, "model", density) is None
    keep(path, "model", truth, density)
    found = kept(path, "model", density)
    torch.testing.assert_close(found.mean, truth.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.sd, truth.sd, rtol=1e-4, atol=1e-4)
    assert str(found) == str(truth)
    with pytest.raises(SystemExit, match="has a truth of model for other data; give another file"):
        kept(path, "model", log_joint(model, 1.0))


@pytest.mark.accuracy
def test_a_chain_of_nuts_has_them_too():
    density = log_joint(model)
    has_moments(summary(nuts(density, torch.zeros(2), 150, 100), density), [1.0, 0.0], [1.0, 2.0])


@pytest.mark.accuracy
def test_chains_that_see_members_non_centred_give_the_model_as_it_is():
    truth = truth_of(groups, ("x",), 60.0, 50)
    has_moments(truth, [0.0, 0.0, 0.0], [0.5**0.5, 0.625**0.5, 0.625**0.5])


def test_chains_that_are_cut_off_are_no_truth():
    chains = Chains(log_joint(model), torch.zeros(2), torch.eye(2), 4)
    assert run(chains, 10, 0.0) == "0 draws a chain in part 0 within 0 s"


def test_chains_begin_where_the_density_is_finite():
    def narrow():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("inside", torch.where(x.abs() < 0.1, 0.0, -torch.inf))

    chains = Chains(log_joint(narrow), torch.zeros(1), torch.eye(1), 50)
    assert bool(chains.value.isfinite().all())
    assert bool((chains.theta.abs() < 0.1).all())


@pytest.mark.parametrize(("r_hat", "ess", "sure"), [(1.01, 500.0, True), (1.03, 500.0, False), (1.01, 300.0, False)])
def test_a_truth_is_sure_where_its_chains_have_mixed(r_hat, ess, sure):
    assert Truth(torch.zeros(1), torch.ones(1), r_hat, ess, 1e3, 1000, 1, 1.0, 0.0).sure == sure
