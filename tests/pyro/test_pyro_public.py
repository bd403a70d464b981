"""The public models, their chains against closed forms, and what the table says of a fit."""

import pytest
import torch

pyro = pytest.importorskip("pyro", reason="needs Pyro: pip install 'torchngvi[pyro]'")
pytest.importorskip("benchmarks", reason="needs the benchmarks of a clone: run python -m pytest in its root")

import pyro.distributions as dist  # noqa: E402

from benchmarks import pyro_public  # noqa: E402
from benchmarks.pyro_public_models import MODELS  # noqa: E402
from benchmarks.pyro_truths import Chains, Truth, keep, kept, mapped, non_centred, nuts, run, summary  # noqa: E402
from torchngvi.adapters.pyro import log_joint  # noqa: E402

pytestmark = pytest.mark.usefixtures("pyro_in_float64")


@pytest.mark.parametrize("name", MODELS)
def test_the_sites_that_are_named_are_latents_of_the_model(name):
    trace = pyro.poutine.trace(MODELS[name].make()).get_trace()
    assert {*MODELS[name].scales, *MODELS[name].non_centred} <= set(trace.stochastic_nodes)


def groups(shift=0.0):
    """Two members of N(mu, 1) that are seen at 0 with error 1: mu has the variance 1/2, and each member 5/8."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("members", 2):
        x = pyro.sample("x", dist.Normal(mu, 1.0))
        pyro.sample("y", dist.Normal(x, 1.0), obs=torch.full((2,), shift))


def has_moments(truth):
    sd = torch.tensor([0.5, 0.625, 0.625]).sqrt()
    assert bool((truth.mean.abs() < 5 * sd / truth.ess**0.5).all())
    assert bool(((truth.sd / sd).log().abs() < 5 / (2 * truth.ess_of_squares) ** 0.5).all())


@pytest.mark.accuracy
def test_chains_that_see_members_non_centred_give_the_model_as_it_is(tmp_path):
    density, path = log_joint(groups), tmp_path / "truths.json"
    chains = Chains(log_joint(non_centred(groups, ("x",))), torch.zeros(3), torch.eye(3), 32)
    assert run(chains, 10, 0.0) == "0 draws a chain in part 0 within 0 s"
    truth = summary(mapped(run(chains, 100, 60.0, 40), chains.density.target, density), density)
    assert truth.sure
    has_moments(truth)
    assert kept(path, "model", density) is None
    keep(path, "model", truth, density)
    assert str(kept(path, "model", density)) == str(truth)
    torch.testing.assert_close(kept(path, "model", density).sd, truth.sd, rtol=1e-4, atol=1e-4)
    with pytest.raises(SystemExit, match="has a truth of model for other data; give another file"):
        kept(path, "model", log_joint(groups, 1.0))


@pytest.mark.accuracy
def test_a_chain_of_nuts_has_the_moments_too():
    density = log_joint(groups)
    has_moments(summary(nuts(density, torch.zeros(3), 300, 200), density))


def test_the_report_holds_a_fit_to_its_truth(tmp_path, monkeypatch):
    density = log_joint(MODELS["schools"].make())
    truth = Truth(torch.zeros(10), torch.ones(10), 1.0, 1e3, 1e3, 1000, 1, 1.0, 0.0)
    monkeypatch.setattr(pyro_public, "TRUTHS", tmp_path / "truths.json")
    keep(pyro_public.TRUTHS, "schools", truth._replace(start=float(density(torch.full((10,), 0.1)))), density)
    fit = {"model": "schools", "guide": "dense", "seed": 0, "word": "fits", "gradients": 1234, "seconds": 1.0}
    rows = [
        fit | {"mean": [0.0, 0.4] + [0.0] * 8, "sd": [1.0] * 9 + [0.9]},
        fit | {"guide": "auto", "gradients": 50_000, "mean": [0.0] * 10, "sd": [1.0, 0.8] + [1.0] * 8},
        fit | {"guide": "marginal", "failed": "InputError: no"},
    ]
    _, _, line, *summaries = pyro_public.report(rows)
    assert "| 10 | 1.000, 1000 | fits; 0.40, 0.90, 1.00; 1,234; 1.0 s | fits; 0.00, 0.80, 0.80; 50,000; 1.0 s |" in line
    text = "\n".join(summaries)
    assert "dense: 1 fits of hierarchies, 1 fit or are about right, 1 with scales within 15 %" in text
    assert "auto: 1 fits of hierarchies, 1 fit or are about right, 0 with scales within 15 %" in text
    assert "wrong: schools, seed 0: fits; 0.40, 0.90, 1.00; 1,234; 1.0 s; mean of tau, sd of eta[7]" in text
    assert "dear: schools, seed 0: 50,000 gradients, 1 s\n\nmarginal" in text
    assert "fails: schools, seed 0: InputError: no" in text
