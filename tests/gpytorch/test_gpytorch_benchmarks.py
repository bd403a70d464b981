"""The benchmarks of joint training and of a stream: what is read off curves, a log that goes on, a step over all."""

import json
import math
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("gpytorch")
pytest.importorskip("pandas")
pytest.importorskip("matplotlib")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="a wheel has no benchmarks")


@pytest.fixture
def module(monkeypatch):
    import torch

    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield runpy.run_path(str(BENCHMARKS / "svgp_hyperparameters.py"))
    torch.set_num_threads(threads)
    sys.modules.pop("svgp_joint", None)


def curve(*points):
    import pandas as pd

    return pd.DataFrame(points, columns=["seconds", "nll"])


def test_how_many_times_sooner(module):
    """Of the better of the two, from the time at which it has its last score for good."""
    found = {
        "NGD": curve((1, 0.9), (2, 0.7), (3, 0.75), (4, 0.7)),  # at .7 for good from 4 on
        "Adam": curve((1, 0.5), (2, 0.6), (3, 0.6), (4, 0.6)),  # the better; at .6 from the start
        "rounds": curve((0.5, 0.55), (1.5, 0.65), (2.0, 0.6), (5.0, 0.1)),
    }
    sooner, lead = module["compared"](found, budget=4.0)
    assert sooner == 1.0 / 2.0
    assert math.isclose(lead, 0.0, abs_tol=1e-15)  # .6 when time is up, not the .1 after that
    del found["Adam"]
    sooner, lead = module["compared"](found, budget=4.0)
    assert sooner == 4.0 / 0.5
    assert math.isclose(lead, 0.1)
    found["rounds"] = curve((0.5, 0.8))
    sooner, lead = module["compared"](found, budget=0.4)
    assert (sooner, lead) == (0.0, -math.inf)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A set of 300 rows, of which 60 test."""
    generator = np.random.default_rng(0)
    X = generator.uniform(-2, 2, (300, 1))
    y = np.sin(3 * X[:, 0]) + 0.1 * generator.standard_normal(300)
    test = np.arange(300) % 5 == 0
    folder = tmp_path / "uci_regression"
    folder.mkdir()
    np.savez(folder / "toy.npz", X=X, y=y, test_mask=np.packbits(test)[None])
    monkeypatch.setenv("TORCHNGVI_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.accuracy
def test_a_run_that_goes_on(module, toy, capsys):
    """Every run is made once; a line that was cut off is made again, and the table is of all."""
    log = toy / "out" / "log.jsonl"
    common = ["--data", "toy", "--splits", "0", "--seconds", "0.3", "--inducing", "10", "--out", str(log.parent)]
    few = [*common, "--reduced", "--dtype", "float32"]
    module["main"]([*few, "--likelihood", "gaussian"])
    lines = log.read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    assert [run["method"] for run in runs] == ["rounds", "NGD", "Adam"]
    assert {(run["dtype"], run["inducing"], run["budget"]) for run in runs} == {("float32", 10, 0.3)}
    assert runs[0]["curve"][-1][1] < 0.0  # sin is learnt: a constant has about 1
    log.write_text("\n".join(lines)[:-20])
    module["main"]([*few, "--likelihood", "gaussian", "bernoulli", "--minutes", "0"])
    assert len(log.read_text().splitlines()) == 2  # no time for any
    capsys.readouterr()
    module["main"]([*few, "--likelihood", "gaussian", "bernoulli"])
    again = [json.loads(line) for line in log.read_text().splitlines()[:2]]
    assert again == runs[:2]
    assert len(module["read"](log)) == 6
    told = capsys.readouterr().out
    assert "gaussian, float32: 1 rows, sooner by " in told
    assert "bernoulli, float32: 1 rows, sooner by " in told
    assert (log.parent / "svgp-hyperparameters.png").exists()
    before = log.read_text()
    module["main"]([*few, "--likelihood", "bernoulli"])
    assert log.read_text() == before


def test_a_stream_in_one_step(module, monkeypatch):
    """q after a step over the stream is that of `refine_svgp` with all of its rows in memory."""
    import torch

    from torchngvi.adapters.gpytorch import refine_svgp

    stream = runpy.run_path(str(BENCHMARKS / "svgp_stream.py"))
    options = SimpleNamespace(rows=700, inducing=12, batch=100, seconds=1e-6)
    monkeypatch.setitem(stream["first"].__globals__, "MOST", 300 * 12)
    model, likelihood, _, result = stream["first"](options)
    assert result.refined.members_converged.all()
    q = model.variational_strategy._variational_distribution.posterior
    mean, covariance = q.mean.clone(), q.covariance.clone()
    rows = list(stream["Rows"](700, 100))
    assert sum(len(y) for _, y in rows) == 700
    refine_svgp(model, likelihood, rows[:3], progress=False)
    assert float((q.mean - mean).abs().max()) > 0.05  # of the first rows alone
    refine_svgp(model, likelihood, rows, progress=False)
    torch.testing.assert_close(mean, q.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(covariance, q.covariance, rtol=1e-5, atol=1e-6)


@pytest.mark.accuracy
def test_where_the_one_call_begins(module, toy, capsys):
    """A line for each length scale, with points of three kinds; the centres of k-means are means of their rows."""
    import torch

    few = ["--data", "toy", "--splits", "0", "--dtype", "float64", "--likelihood", "gaussian", "--inducing", "8"]
    module["main"]([*few, "--starts", "--rounds", "1"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| toy")]
    assert [line.split(" | ")[1] for line in lines] == ["root", "ln 2", "kept"]
    assert all(line.count(" s)") == 3 for line in lines)
    assert lines[1].split(" s)")[0].split("(")[0].split("| ")[-1] == lines[2].split("(")[0].split("| ")[-1]
    x = torch.cat([torch.zeros(40, 1), torch.ones(20, 1)]) + 0.01 * torch.arange(60)[:, None] / 60
    centres = module["by_k_means"](x, 2).sort(0).values
    assert torch.allclose(centres[:, 0], torch.stack([x[:40].mean(), x[40:].mean()]), atol=1e-6)


def test_public_situations(tmp_path, capsys, monkeypatch):
    """A line for each situation, and a log that goes on; every verdict is given."""
    public = runpy.run_path(str(BENCHMARKS / "gpytorch_public.py"))
    assert {"1", "6b", "22", "30"} <= set(public["QUESTIONS"].situations)
    log = tmp_path / "log.jsonl"
    few = ["--only", "15", "21b", "--steps", "3", "--log", str(log)]
    lines = public["main"](few)
    assert [line.split(" | ")[-1].split(", ")[-2] for line in lines[2:]] == ["right", "refused"]
    assert "wrong (_LinAlgError)" in lines[-1]
    kept = log.read_text()
    log.write_text(kept[:-20])  # a line that was cut off
    assert public["main"](few)[-2] == lines[-2]
    assert "ours: 1 refused, 1 right" in capsys.readouterr().out
