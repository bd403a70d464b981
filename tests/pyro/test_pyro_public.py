"""The public models: what is registered of them, and what the table says of a fit and its truth."""

import json

import pytest
import torch

pyro = pytest.importorskip("pyro", reason="needs Pyro: pip install 'torchngvi[pyro]'")
pytest.importorskip("benchmarks", reason="needs the benchmarks of a clone: run python -m pytest in its root")

from benchmarks import pyro_public  # noqa: E402
from benchmarks.pyro_public_models import MODELS  # noqa: E402
from benchmarks.pyro_truths import Truth, keep, kept  # noqa: E402
from torchngvi.adapters.pyro import log_joint  # noqa: E402

pytestmark = pytest.mark.usefixtures("pyro_in_float64")


def test_there_are_as_many_as_the_page_says():
    assert len(MODELS) >= 40
    assert sum(bool(public.scales) for public in MODELS.values()) >= 24
    assert all("/" in public.source or public.source.count(".") for public in MODELS.values())


@pytest.mark.parametrize("name", MODELS)
def test_the_sites_that_are_named_are_latents_of_the_model(name):
    public = MODELS[name]
    trace = pyro.poutine.trace(public.make()).get_trace()
    latents = {site for site in trace.stochastic_nodes if not trace.nodes[site]["infer"].get("enumerate")}
    assert {*public.scales, *public.non_centred} <= latents
    assert trace.observation_nodes or "factor" in str(trace.nodes)


def test_data_are_the_same_each_time_and_leave_the_generator_alone():
    torch.manual_seed(1)
    first = MODELS["meta"].make()
    after = torch.rand(())
    torch.manual_seed(1)
    torch.testing.assert_close(torch.rand(()), after)
    one, two = (log_joint(model)(torch.zeros(14)) for model in (first, MODELS["meta"].make()))
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize("name", ["schools", "cubic", "meta"])
def test_the_truths_that_are_kept_are_of_these_data(name):
    truth = kept(pyro_public.TRUTHS, name, log_joint(MODELS[name].make()))
    assert truth is not None
    assert truth.sure


def row(**changed):
    found = {"model": "schools", "guide": "dense", "seed": 0, "word": "fits", "converged": True, "gradients": 1234}
    found |= {"values": 0, "seconds": 1.0, "mean": [0.0] * 10, "sd": [1.0] * 10, "said": ""}
    return found | changed


TRUTH = Truth(torch.zeros(10), torch.ones(10), 1.0, 1e3, 1e3, 1000, 1, 1.0, 0.0)
SITES = {"mu": slice(0, 1), "tau": slice(1, 2), "eta": slice(2, 10)}


@pytest.mark.parametrize(
    ("changed", "off", "scaled", "worst"),
    [
        ({}, False, True, "mean of mu, sd of mu"),
        ({"mean": [0.0, 0.4] + [0.0] * 8}, True, True, "mean of tau, sd of mu"),
        ({"sd": [1.0, 0.8] + [1.0] * 8}, False, False, "mean of mu, sd of tau"),
        ({"sd": [1.0] * 9 + [1.5]}, True, True, "mean of mu, sd of eta[7]"),
        ({"sd": [1.0] * 9 + [float("nan")]}, True, True, "mean of mu, sd of eta[7]"),
    ],
)
def test_a_fit_is_held_to_its_truth(changed, off, scaled, worst):
    found = pyro_public.compared(row(**changed), TRUTH, SITES)
    assert (found.off, found.scaled, found.worst) == (off, scaled, worst)


def test_the_report_has_a_row_a_model_and_names_what_is_wrong(tmp_path, monkeypatch):
    density = log_joint(MODELS["schools"].make())
    monkeypatch.setattr(pyro_public, "TRUTHS", tmp_path / "truths.json")
    start = float(density(torch.full((10,), 0.1)))
    keep(pyro_public.TRUTHS, "schools", TRUTH._replace(start=start), density)
    rows = [
        row(mean=[0.0, 0.4] + [0.0] * 8),
        row(guide="auto", gradients=50_000),
        row(guide="marginal", seed=0) | {"failed": "InputError: no"},
        {**row(model="cubic"), "mean": [0.0] * 4, "sd": [1.0] * 4},
    ]
    lines = list(pyro_public.report(json.loads(json.dumps(rows))))
    assert lines[0] == "| model | D | R-hat, ESS | dense | auto | marginal |"
    assert "| 10 | 1.000, 1000 | fits; 0.40, 1.00, 1.00; 1,234; 1.0 s |" in lines[2]
    assert lines[2].endswith("| fails |")
    assert lines[3].endswith("| 4 |  | fits; 1,234; 1.0 s |  |  |")
    text = "\n".join(lines[4:])
    assert "dense: 1 fits of hierarchies, 1 fit or are about right, 1 with scales within 15 %" in text
    assert "wrong: schools, seed 0: fits; 0.40, 1.00, 1.00; 1,234; 1.0 s; mean of tau, sd of mu" in text
    assert "dear: schools, seed 0: 50,000 gradients, 1 s" in text
    assert "fails: schools, seed 0: InputError: no" in text
