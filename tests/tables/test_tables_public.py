"""The public questions of tables: cells with verdicts, and the threads of all pages."""

from types import SimpleNamespace

import pytest

pytest.importorskip("formulae")
pytest.importorskip("sklearn")
pytest.importorskip("benchmarks", reason="needs the benchmarks of a clone: run python -m pytest in its root")

from benchmarks import public, tables_public  # noqa: E402


def test_verdicts(tmp_path, capsys):
    """A refusal that names its cause, a wrong end that is told, a file read by the command line."""
    lines = tables_public.main(["--only", "14", "22", "28", "--log", str(tmp_path / "log.jsonl")])
    words = [[cell.split(",")[-2].split()[0] for cell in line.split(" | ")[2:]] for line in lines[2:]]
    assert words == [["wrong", "told"], ["wrong", "refused"], ["wrong", "right"]]
    assert "ours: 1 refused, 1 right, 1 told" in capsys.readouterr().out


def test_scores():
    """The error counts in the smaller of the two standard deviations, and too wide a one counts by itself."""
    truth = {"x": (1.0, 0.1), "sd of x": (0.1, 0.1)}
    assert tables_public.score_of({"x": (1.2, None)}, truth) == pytest.approx(2)
    assert tables_public.score_of({"x": (1.2, 0.05)}, truth) == pytest.approx(4)
    assert tables_public.score_of({"x": (1.2, 0.5)}, truth) == pytest.approx(4)


def test_threads():
    questions = public.threads(tables_public)
    assert len(questions) > 25
    assert len(set(questions)) == len(questions)
    page = SimpleNamespace(__name__="benchmarks.pyro_public", MODELS={"a": SimpleNamespace(source="here")})
    assert public.threads(page) == ["here"]
