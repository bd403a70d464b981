"""The examples run, at small size, and say what they promise."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *arguments):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](list(arguments))


def test_every_example_is_tested():
    elsewhere = {"pyro_eight_schools", "pyro_regression", "pyro_radon", "pyro_minibatches"}  # in test_pyro_examples.py
    elsewhere |= {"pyro_dippers", "pyro_mixture", "pyro_decoder"}
    elsewhere |= {"pyro_baseball", "pyro_correlations", "pyro_neutra"}
    elsewhere |= {"svgp_classification", "svgp_regression"}  # in test_gpytorch.py
    elsewhere |= {"svgp_poisson", "svgp_multitask", "deep_gp", "deep_kernel"}  # in test_gpytorch_examples.py
    elsewhere |= {"ifvb_flow"}  # in test_ifvb_network.py
    elsewhere |= {path.stem for path in EXAMPLES.glob("network_*.py")}  # in test_networks_examples.py
    assert {path.stem for path in EXAMPLES.glob("[!_]*.py")} == {
        "logistic_regression",
        "prior_scales",
        "dose_design",
        "training_script",
        "hierarchical",
        "mixture_modes",
        "torchrun_logistic",
        "theory",
        "topics",
        "count_factors",
    } | elsewhere


def test_logistic_regression(tmp_path, capsys):
    full, mean_field = run("logistic_regression", "--out", str(tmp_path / "figure.png"))
    assert capsys.readouterr().out.count("converged, natural-gradient norm") == 2
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    # mean field is never wider than 1/precision allows, hence narrower here
    assert (mean_field.stddev < full.stddev).double().mean() > 0.9


@pytest.mark.accuracy
def test_prior_scales(tmp_path, capsys):
    """Ten scales have the best score where they were chosen, and say what it is elsewhere."""
    found, solves = run("prior_scales", "--out", str(tmp_path / "figure.png"))
    validation = {name: scores[0] for name, scores in found.items()}
    assert max(validation, key=validation.get) == "ten, chosen"
    assert validation["one, chosen"] > validation["precision 1"]
    assert solves < 80
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert capsys.readouterr().out.count("test -0.") == 4


@pytest.mark.accuracy
def test_dose_design(tmp_path, capsys):
    """Two doses, as the D-optimal designs of a logistic response have, and more to learn than elsewhere."""
    designs, gains = run("dose_design", "--out", str(tmp_path / "figure.png"))
    assert max(gains, key=gains.get) == "chosen"
    low, other, high, last = designs["chosen"].sort().values.tolist()
    assert abs(low - other) < 0.05
    assert abs(high - last) < 0.05
    assert high - low > 1.0
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert "solves of sixteen posteriors" in capsys.readouterr().out


@pytest.mark.accuracy
def test_the_pictures_of_the_theory(tmp_path, capsys):
    gaps = run("theory", "--out", str(tmp_path))
    assert gaps["VN"] < 1e-6
    assert min(gap for name, gap in gaps.items() if name != "VN") > 1e-5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theory-frame.png", "theory-steps.png"]
    assert capsys.readouterr().out.count("nats above the best q after 40 steps") == 4


@pytest.mark.accuracy
def test_hierarchical_models(tmp_path):
    """The three models of examples/hierarchical.py converge, and their pictures are drawn."""
    results = run("hierarchical", "--out", str(tmp_path))
    assert [result.converged for result in results] == [True] * 3
    pictures = sorted(path.name for path in tmp_path.iterdir())
    assert pictures == ["hierarchical-rats.png", "hierarchical-schools.png", "hierarchical-sites.png"]
    assert min(path.stat().st_size for path in tmp_path.iterdir()) > 5000
    assert "CholeskyGaussian" not in str(results[0])  # the arrow has lost nothing


@pytest.mark.accuracy
def test_mixture_of_two_modes(tmp_path, capsys):
    mixture, gaussian = run("mixture_modes", "--out", str(tmp_path / "figure.png"))
    assert abs(mixture) < 0.005
    assert 0.68 < gaussian < 0.71  # log 2: one of two modes
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert "nats below the evidence" in capsys.readouterr().out


@pytest.mark.accuracy
def test_topics(tmp_path, capsys):
    """A few passes find the topics of the corpus, but for two that are one or none."""
    arguments = ["--documents", "1000", "--passes", "4", "--starts", "1", "--out", str(tmp_path / "figure.png")]
    score, overlap = run("topics", *arguments)
    assert score > -4.6  # of the truth -4.3, of words at their frequencies -5.6
    assert (overlap > 0.75).sum() >= 6
    assert (tmp_path / "figure.png").stat().st_size > 5000
    assert "held-out log score a word" in capsys.readouterr().out


@pytest.mark.accuracy
def test_count_factors(tmp_path, capsys):
    arguments = ["--rows", "60", "--columns", "30", "--sweeps", "100", "--out", str(tmp_path / "figure.png")]
    results = run("count_factors", *arguments)
    assert results["accelerated"].loss < results["CAVI"].loss
    assert (tmp_path / "figure.png").stat().st_size > 5000
    assert capsys.readouterr().out.count("Negative ELBO") == 2


@pytest.mark.accuracy
def test_training_script(tmp_path, capsys):
    assert run("training_script", "--epochs", "20", "--out", str(tmp_path / "figure.png")) > 0.85
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert "held-out accuracy" in capsys.readouterr().out


def test_rows_of_files_in_one_process_and_gone_on_with(tmp_path, capsys):
    arguments = ("--rows", "3000", "--dim", "5", "--batch", "500", "--folder", str(tmp_path))
    _, first = run("torchrun_logistic", *arguments)
    assert first.converged
    assert capsys.readouterr().out.startswith("1 ranks, ")
    _, again = run("torchrun_logistic", *arguments)
    assert (again.evaluations, again.loss) == (first.evaluations, first.loss)


@pytest.mark.slow
def test_shares_of_documents_are_solved_afresh():
    """Kept from sweep to sweep they lock: two topics are lost, more than 5,000 nats (CAVI on all documents)."""
    pytest.importorskip("sklearn")
    path = EXAMPLES.parent / "benchmarks" / "topics.py"
    if not path.exists():
        pytest.skip("a wheel has no benchmarks")
    benchmark = runpy.run_path(str(path))
    counts, _ = benchmark["TOPICS"]["corpus"](2200)
    train = counts[:-200]
    bounds = [benchmark["bound"](benchmark["by_sweeps"](train, 1, afresh, 20), train) for afresh in (True, False)]
    assert bounds[0] > bounds[1] + 5000
