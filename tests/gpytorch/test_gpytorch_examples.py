"""The GPyTorch examples run, at small size, and say what they promise."""

import runpy
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gpytorch", reason="needs the extra gpytorch: pip install torchngvi[gpytorch]")

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, folder, *arguments):
    """What main returns; its figure is drawn."""
    figure = folder / "figure.png"
    result = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]([*arguments, "--out", str(figure)])
    assert figure.stat().st_size > 10_000
    return result


@pytest.mark.parametrize("name", ["svgp_poisson", "svgp_multitask", "deep_gp", "deep_kernel"])
def test_help_and_length(name, capsys):
    path = EXAMPLES / f"{name}.py"
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path))["main"](["--help"])
    assert ended.value.code == 0
    assert f"python examples/{name}.py" in capsys.readouterr().out
    assert len(path.read_text().splitlines()) < 120


@pytest.mark.accuracy
def test_poisson(tmp_path, capsys):
    result, error, gain = run("svgp_poisson", tmp_path, "--weeks", "2", "--epochs", "10")
    assert result.refined.converged
    assert error < 0.4
    assert gain > 1.0
    assert "a constant rate" in capsys.readouterr().out


@pytest.mark.accuracy
def test_multitask(tmp_path, capsys):
    in_gaps, outside, rejections = run("svgp_multitask", tmp_path, "--rows", "200", "--epochs", "40")
    assert in_gaps < 0.3
    assert outside < 0.1
    assert rejections == 0
    assert "where a sensor was silent" in capsys.readouterr().out


@pytest.mark.accuracy
def test_deep_gp(tmp_path, capsys):
    results = run("deep_gp", tmp_path, "--rows", "120", "--steps", "100")
    assert results[2][0] < results[1][0]
    assert results[2][1] < results[1][1]
    assert capsys.readouterr().out.count("mean absolute error") == 2
    assert all(rejections == 0 for _, _, rejections in results.values())


@pytest.mark.accuracy
def test_deep_kernel(tmp_path, capsys):
    accuracy, rejections = run("deep_kernel", tmp_path, "--epochs", "6")
    assert accuracy > 0.85
    assert rejections == 0
    assert "held-out accuracy" in capsys.readouterr().out


@pytest.mark.accuracy
def test_the_figure_of_the_rate_goes_where_results_go(tmp_path, monkeypatch):
    """And not to the top of the repository, where it would be committed."""
    folder = tmp_path / "data" / "gp_uci"
    folder.mkdir(parents=True)
    np.savetxt(folder / "bike_data.csv.gz", np.random.default_rng(0).standard_normal((100, 18)), delimiter=",")
    monkeypatch.setenv("TORCHNGVI_DATA", str(folder.parent))
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(EXAMPLES.parent / "benchmarks" / "svgp_ngvi.py"))["main"]
    main(["--rows", "100", "--points", "5", "--steps", "20", "--seeds", "1"])
    assert [str(path) for path in Path().rglob("*.png")] == ["runs/svgp_ngvi.png"]
