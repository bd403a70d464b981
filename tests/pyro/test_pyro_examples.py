"""The examples of the adapter for Pyro run at small size, and say what they promise."""

import os
import runpy
from pathlib import Path

import pytest
import torch

pyro = pytest.importorskip("pyro", reason="needs Pyro: pip install 'torchngvi[pyro]'")
pytest.importorskip("matplotlib", reason="the examples draw")
pytest.importorskip("sklearn", reason="some examples read its data")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(tmp_path):
    """Runs one by its name; a figure must come of it."""

    def run(name, *arguments):
        path, out = EXAMPLES / f"{name}.py", tmp_path / "figure.png"
        assert len(path.read_text(encoding="utf-8").splitlines()) < 120
        result = runpy.run_path(str(path))["main"]([*arguments, "--out", str(out)])
        assert out.stat().st_size > 10_000
        return result

    pyro.clear_param_store()
    return run


@pytest.mark.accuracy
def test_eight_schools(example, capsys):
    result, corrected = example("pyro_eight_schools", "--draws", "500")
    assert result.converged
    assert "importance sampling keeps" in capsys.readouterr().out
    # the reference draws of posteriordb: 6.2 and 3.9 are the means of the first and third school
    assert abs(corrected[0] - 6.2) < 1
    assert abs(corrected[2] - 3.9) < 1


@pytest.mark.accuracy
def test_regression(example, capsys):
    result, noise = example("pyro_regression", "--steps", "100")
    assert result.converged
    assert abs(noise - 0.8) < 0.02
    assert "spread of intercepts" in capsys.readouterr().out


@pytest.mark.accuracy
def test_radon(example, capsys):
    result, draws = example("pyro_radon")
    assert result.converged
    assert "the houses are simulated from the model" in capsys.readouterr().out
    for name, true in {"floor": -0.65, "between": 0.15, "within": 0.75}.items():
        assert abs(draws[name].mean() - true) < 3 * draws[name].std()


@pytest.mark.accuracy
def test_radon_on_the_data_of_posteriordb(example, capsys):
    path = Path(os.environ.get("TORCHNGVI_DATA", "")) / "posteriordb/data.json.gz"
    if not path.is_file():
        pytest.skip("needs $TORCHNGVI_DATA/posteriordb")
    result, draws = example("pyro_radon", "--data", str(path))
    assert result.converged
    assert "simulated" not in capsys.readouterr().out
    # Gelman and Hill 2006, section 12.6: an effect of the floor of -0.67, a slope in uranium of 0.72
    assert abs(draws["floor"].mean() + 0.67) < 0.07
    assert abs(draws["line"][:, 1].mean() - 0.72) < 0.1


@pytest.mark.accuracy
def test_minibatches(example):
    result, gaps, kl = example("pyro_minibatches")
    assert result.converged
    assert gaps[-1][1] < 0.5 < gaps[0][1]
    assert kl < 0.5


@pytest.mark.accuracy
def test_dippers(example, capsys):
    results, one = example("pyro_dippers")
    assert all(result.converged for result in results.values())
    # Lebreton et al. 1992
    assert abs(one["survival"] - 0.56) < 0.01
    assert abs(one["recapture"] - 0.90) < 0.01
    assert results[False].loss < results[True].loss
    assert "survival 0.56, recapture 0.90" in capsys.readouterr().out


@pytest.mark.accuracy
def test_mixture(example):
    result, labels, loss = example("pyro_mixture")
    assert result.converged
    assert labels.tolist() == [0, 0, 1, 1, 1]
    assert abs(loss - result.loss) < 0.3


@pytest.mark.accuracy
def test_decoder(example):
    result, same = example("pyro_decoder", "--steps", "150")
    losses = [record.loss for record in result.trace]
    assert losses[-1] < 0.5 * losses[0]
    assert same > 0.8


@pytest.mark.accuracy
def test_baseball(example):
    errors = example("pyro_baseball", "--draws", "500")
    assert errors["partially_pooled"] < errors["fully_pooled"] < errors["not_pooled"]


@pytest.mark.accuracy
def test_correlations(example):
    result, mean, sample = example("pyro_correlations", "--draws", "500")
    assert result.converged
    assert float((mean - sample).abs().max()) < 0.05


@pytest.mark.accuracy
def test_neutra(example):
    torch.set_num_threads(1)
    of_guide, corrected, exact = example("pyro_neutra")
    # the spread is a Gaussian's no longer
    assert of_guide.std(0)[0] < 0.6 * exact.std(0)[0]
    assert corrected.std(0)[0] > 0.7 * exact.std(0)[0]
