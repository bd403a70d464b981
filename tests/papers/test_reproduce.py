"""`python -m examples.papers` and `torchngvi reproduce`: settings, runs, published values, files, sentences."""

import ast
import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from examples import papers
from examples.compare_methods import settings
from examples.papers import digits, kumar2025, reproduce
from torchngvi import CholeskyGaussian, GeneralizedLinear, cli, fit
from torchngvi.cli import main
from torchngvi.errors import InputError

CONFIGS = reproduce.CONFIGS
ROOT = Path(__file__).parents[2]
PUBLISHED = sorted(CONFIGS.glob("srvn-*.toml"))
CURVES = [path for path in PUBLISHED if path.stem != "srvn-digits"]  # which is a study of `papers`


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class TestSettings:
    def test_every_published_experiment_has_a_file(self):
        wanted = {"srvn-table3", "srvn-digits", *(f"srvn-fig{number}" for number in range(1, 12))}
        assert {path.stem for path in PUBLISHED} == wanted

    @pytest.mark.parametrize("path", CURVES, ids=lambda path: path.stem)
    def test_files_parse(self, path):
        experiment = settings.read(path)
        full = settings.read(path, full=True)
        assert experiment.cases
        assert all(new.iterations >= old.iterations for new, old in zip(full.cases, experiment.cases, strict=True))

    def test_table_2_is_what_is_run(self):
        """Steps of VN, SR-VN and BW-GD, and the prior precision."""
        cases = {case.name: case for case in settings.read(CONFIGS / "srvn-table3.toml").cases}
        steps = {name: (case.prior_precision, *(c.lr for c in case.methods)) for name, case in cases.items()}
        twice = {name: steps.pop(name) for name in [*steps] if name.endswith(", published pieces")}
        assert twice == {
            f"{name}, published pieces": steps[name] for name in ("Australian", "Diabetes", "Breast-cancer")
        }
        assert steps == {
            "Australian": (1e-5, 5e-3, 5e-3, 4.4e-3),
            "Diabetes": (1e-2, 5e-3, 5e-3, 9e-4),
            "Breast-cancer": (1e-1, 9e-3, 6e-3, 6.3e-3),
            "Mushrooms": (1e-2, 2.5e-4, 2.5e-4, 8.5e-5),
            "Phishing": (1e-2, 4e-4, 4e-4, 8e-5),
            "Leukemia": (2e-1, 5e-6, 5e-6, 1.5e-6),
            "MNIST": (1e-1, 5e-6, 5e-6, 1e-6),
            "Covtype": (2e-2, 1e-5, 1e-5, 1e-6),
        }


class TestCommands:
    def test_all_experiments_are_listed(self, capsys):
        """By the files of configs/papers, and each with a line."""
        assert main(["reproduce"]) == 0
        said = capsys.readouterr().out
        assert main(["reproduce", "--list"]) == 0
        assert capsys.readouterr().out == said
        assert len(reproduce.known()) >= 51
        for path in CONFIGS.glob("*.toml"):
            of_none = path.stem.startswith("open-") or path.stem in ("ifvb-coupling", "ifvb-memory", "ifvb-ode")
            year = "" if of_none else r"\d"
            assert re.search(rf"^  {path.stem} +\S.+{year}", said, re.MULTILINE)
        assert "srvn-table3      Kumar et al. (2025), Table 3: converged rows, and rows stopped early" in said
        assert "others are looked for in the folder $TORCHNGVI_DATA" in said

    @pytest.mark.accuracy
    def test_quadratic(self, capsys):
        """Figure 1: one step of VN is exact; with small steps SR-VN is VN up to the step."""
        text = (CONFIGS / "srvn-fig1.toml").read_text()
        for old in ("iterations = 3000", "iterations = 1000"):
            text = text.replace(old, "iterations = 100")
        Path("fig1.toml").write_text(text)
        assert main(["reproduce", "fig1.toml", "--out", "out"]) == 0
        log = pd.read_csv("out/log.csv")
        vn = log[(log["case"] == "a: condition 10") & (log["method"] == "vn")]
        assert vn["iteration"].max() == 1
        assert vn["gap"].iloc[-1] < 1e-12
        away = kumar2025.differences(log)
        assert away["b: small steps, srvn"] < 1e-3
        assert away["c: large steps, srvn"] > 0.1
        assert Path("out/fig1.png").exists()
        assert "largest difference" in capsys.readouterr().out

    @pytest.mark.accuracy
    def test_run_time(self):
        text = (CONFIGS / "srvn-fig5.toml").read_text().replace("dims = [25, 50, 100, 200, 400, 800]", "dims = [3, 5]")
        Path("fig5.toml").write_text(text.replace("iterations = 300", "iterations = 3"))
        assert main(["reproduce", "fig5.toml", "--out", "out"]) == 0
        assert Path("out/fig5.png").exists()
        assert (pd.read_csv("out/log.csv")["seconds"] > 0).all()

    def test_table_and_figures_are_drawn_from_logs(self, capsys):
        methods = '[{ method = "vn", lr = 0.3, printed = [1.0, 2.0, 0.5] }]'
        case = (
            f'[[cases]]\nname = "c"\ndata = "synthetic"\nrows = 40\nfeatures = 2\niterations = 3\nmethods = {methods}\n'
        )
        skipped = '[[cases]]\nname = "d"\nskip = "it is too large."\n'
        Path("t.toml").write_text(f'title = "t"\nkind = "table"\n{case}{skipped}')
        assert main(["reproduce", "t.toml", "--out", "out"]) == 0
        out = capsys.readouterr().out
        assert "d is skipped: it is too large." in out
        assert "(1.00)" in out
        first = Path("out/table.csv").read_text()
        assert main(["reproduce", "t.toml", "--out", "out", "--from-logs"]) == 0
        assert Path("out/table.csv").read_text() == first

    @pytest.mark.parametrize(
        ("flags", "sentence"),
        [
            (["reproduce", "srvn-fig33"], "there is no experiment 'srvn-fig33'. Did you mean 'srvn-fig3'?"),
            (["reproduce", "srvn-fig1", "--from-logs"], "Run it without --from-logs."),
            (["reproduce", "srvn-fig1", "--from-logs", "--out", "other"], "is not one of srvn-fig1: it has no 'case'."),
            (["reproduce", "tan-fig3", "--from-logs", "--out", "other"], "is not one of tan-fig3: it has no 'data'."),
            (["reproduce", "no.toml"], "there is no settings file 'no.toml'"),
            (["compare", str(CONFIGS / "srvn-fig1.toml")], "python -m examples.compare_methods"),
        ],
        ids=lambda value: "-".join(value[:2]) if isinstance(value, list) else "",
    )
    def test_sentences(self, flags, sentence, capsys):
        Path("other").mkdir()
        Path("other/log.csv").write_text("a,b\n1,2\n")
        assert main(flags) == 2
        assert sentence in capsys.readouterr().err
        assert not Path("runs").exists()


class TestDigits:
    """Each digit against the rest: the MNIST row of Table 3."""

    def test_a_task_is_at_its_optimum_and_measured_as_table_3(self, monkeypatch, capsys):
        """Σ F + β/2 |m|² - ½ log det V by hand at the optimum that VN finds in float64."""
        rng = torch.Generator().manual_seed(0)
        X, labels = torch.rand(80, 4, generator=rng), torch.randint(3, (80,), generator=rng)
        monkeypatch.setattr(
            digits, "mnist_images", lambda what, part="train": (X, labels) if part == "train" else (X, labels)
        )
        log = digits.run_digits(digits=(2,), prior_precision=0.5, rows=60)
        model = GeneralizedLinear(X[:60].double(), (labels[:60] == 2).double(), prior_precision=0.5)
        q = CholeskyGaussian(4, dtype=torch.float64)
        loss = fit(q, model, progress=False).loss
        constants = 0.25 * float(q.variance.sum()) - 0.5 * 4 * (np.log(0.5) + 1)
        assert log["train"][0] == pytest.approx(loss - constants, abs=0.02)
        accuracy = ((X.double() @ q.mean > 0) == (labels == 2)).double().mean()
        assert log["test_accuracy"][0] == pytest.approx(float(accuracy), abs=1e-6)
        digits.show_digits(log, Path("digits"))
        said = Path("digits.txt").read_text(encoding="utf-8")
        assert said.startswith("2 against the rest: train ")
        assert "; possible\nprinted: train 6301.87, test NLL 1012.37, accuracy 0.989\n" in said
        assert "printed: train 6301.87" in capsys.readouterr().out

    def test_what_is_above_the_printed_objective_is_not_it(self):
        row = {"digit": 8, "train": 6302.0, "test_nll": 1.0, "test_accuracy": 0.5}
        assert digits.line(row).endswith("; not it: its optimum is above the printed objective")


EXPERIMENT = """title = "t"
[[cases]]
name = "c"
data = "synthetic"
rows = 40
features = 2
iterations = 3
methods = [{ method = "vn", lr = 0.3 }]
"""


class TestCells:
    def test_drawn_from_logs_as_from_the_run(self):
        """The table finds the case again under its own name."""
        named = EXPERIMENT.replace('name = "c"', 'name = "-c"').replace('title = "t"', 'title = "t"\nkind = "table"')
        Path("t.toml").write_text(named)
        assert main(["reproduce", "t.toml"]) == 0
        first = Path("runs/t/table.csv").read_text()
        assert "\n'-c,vn,3," in first
        assert main(["reproduce", "t.toml", "--from-logs"]) == 0
        assert Path("runs/t/table.csv").read_text() == first


def test_papers_by_word_and_by_name(tmp_path):
    for word, name in papers.PAPERS.items():
        keys = [{"paper": paper, "study": "x"} for paper in (word, name)]
        for each in keys:
            with pytest.raises(InputError, match="study is one of"):
                papers.study(each, tmp_path)
    with pytest.raises(InputError, match="paper is one of srvn, tan, bbvi, ngvi, ifvb, price, open, bam; got 'x'"):
        papers.study({"paper": "x"}, tmp_path)


@pytest.mark.accuracy
def test_the_module_lists_what_the_command_lists(capfd):
    """``python -m examples.papers`` in the root of a clone."""
    assert main(["reproduce"]) == 0
    listed = capfd.readouterr().out
    words = [sys.executable, "-m", "examples.papers"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == listed
    refused = subprocess.run([*words, "srvn-fig33"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith("torchngvi: error: there is no experiment 'srvn-fig33'. Did you mean")


@pytest.mark.accuracy
def test_another_package_of_examples_comes_first(tmp_path):
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "__init__.py").write_text("")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    words = [sys.executable, "-m", "torchngvi", "reproduce"]
    found = subprocess.run(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert "srvn-table3" in found.stdout, found.stderr


@pytest.mark.parametrize("words", [[], ["srvn-table3"]])
def test_an_installation_names_the_clone(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "torchngvi" / "cli.py"))
    assert main(["reproduce", *words]) == 2
    assert capsys.readouterr().err == (
        "torchngvi: error: the experiments of the papers are in a clone of torchngvi, and not in what pip has "
        f"installed. In the root of a clone, run {' '.join(['python -m examples.papers', *words])}.\n"
    )


def test_nothing_in_the_package_imports_the_studies():
    """But for the command line, which looks for them when they are asked for."""
    files = sorted((ROOT / "torchngvi").rglob("*.py"))
    assert files
    texts = [text for path in files if "examples" in (text := path.read_text(encoding="utf-8"))]
    found = [node for text in texts for node in ast.walk(ast.parse(text))]
    imported = {name.name for node in found if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in found if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name.partition(".")[0] == "examples"]
    named = [node.value for node in found if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert [name for name in named if name.startswith("examples.")] == ["examples.papers.reproduce"]


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "papers").rglob("*.py")), ids=lambda path: path.name)
def test_docstrings_are_right(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.failed == 0
