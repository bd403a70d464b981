"""The numbered tables of what the papers contain: no row is missing, and the tests and experiments they name exist."""

import ast
import functools
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.model_selection import train_test_split

from examples.compare_methods import comparison, experiments, settings
from examples.compare_methods import rows as data
from examples.papers import kumar2025, reproduce

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
ROWS = {"capabilities": 52, "ifvb": 35, "tan": 36, "bbvi": 34, "ngvi": 37}  # page: the rows of its list
AUTHOR = {"capabilities": "Kumar", "ifvb": "Godichon", "tan": "Tan", "bbvi": "Kim", "ngvi": "Wu"}
PREFIXES = "srvn|ifvb|tan|bbvi|ngvi|price"
ID = re.compile(r"`(test_\w+\.py)((?:::\w+)*)(?:\[[^`]*\])?`")
EXPERIMENT = re.compile(rf"`(?:python -m examples.papers )?((?:{PREFIXES})-\w+)`")


@functools.cache
def names(file):
    """What a file of tests defines, in whatever folder it stands, by the ids of pytest."""
    found = set()
    (path,) = TESTS.rglob(file)
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found |= {node.name, *(f"{node.name}::{each.name}" for each in node.body if hasattr(each, "name"))}
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found


def there(file, name):
    """Whether an id names a test."""
    return any(TESTS.rglob(file)) and (not name or name.removeprefix("::") in names(file))


def listed(page):
    """The list of a paper, a section of docs/appendix/evidence.md."""
    sections = (DOCS / "appendix" / "evidence.md").read_text(encoding="utf-8").split("\n## ")
    return next(text for text in sections if text.startswith(AUTHOR[page]))


def rows(page):
    """The numbers and the last cell of each row whose first cell has numbers, "9-12" or "15, 16" among them."""
    for line in listed(page).splitlines():
        if found := re.match(r"\| (\d+(?:(?:-|, )\d+)*) \|", line):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            if len(cells) == 4 and not re.fullmatch(r" [\d. ]+ ", cells[1]):
                parts = [list(map(int, part.split("-"))) for part in found[1].split(", ")]
                yield [n for part in parts for n in range(part[0], part[-1] + 1)], cells[-1].strip()


@pytest.mark.parametrize("page", ROWS)
class TestTables:
    def test_no_row_is_missing_and_none_is_there_twice(self, page):
        assert sorted(n for numbers, _ in rows(page) for n in numbers) == list(range(1, ROWS[page] + 1))

    def test_every_row_has_its_evidence_or_says_why_not(self, page):
        bare = [n for n, said in rows(page) if not (ID.search(said) or EXPERIMENT.search(said) or "not here" in said)]
        assert not bare

    def test_what_is_named_exists(self, page):
        text = listed(page) + (DOCS / f"{page}.md").read_text(encoding="utf-8")
        assert [found[0] for found in ID.finditer(text) if not there(found[1], found[2])] == []
        assert [found[1] for found in EXPERIMENT.finditer(text) if found[1] not in reproduce.known()] == []


def test_the_rows_of_the_five_papers_are_194():
    """191 name a test that is there; of the other three each says why there is none."""
    found = [(page, n, said) for page in ROWS for numbers, said in rows(page) for n in numbers]
    tested = [said for _, _, said in found if ID.search(said)]
    assert (len(found), len(tested)) == (194, 191)
    assert all(there(each[1], each[2]) for said in tested for each in ID.finditer(said))
    assert [(page, n) for page, n, said in found if not ID.search(said)] == [("bbvi", 33), ("ngvi", 23), ("ngvi", 34)]


def test_what_does_not_exist_is_seen():
    assert there("test_theory.py", "::TestLemma1::test_bounds")
    assert not there("test_theory.py", "::TestLemma1::test_bound")
    assert not there("test_theory.py", "::test_bounds")
    assert not there("test_theories.py", "")


def test_every_experiment_of_the_pages_is_known():
    said = {
        (page.name, name)
        for page in DOCS.rglob("*.md")
        for name in re.findall(r"python -m examples\.papers ([\w-]+)", page.read_text(encoding="utf-8"))
    }
    assert said
    assert {(page, name) for page, name in said if name not in reproduce.known()} == set()


def test_the_split_of_the_paper():
    """Row 39: the labels become 0 and 1, and the test rows are those of scikit-learn's split with seed 42."""
    X, y = np.arange(46.0).reshape(23, 2), np.where(np.arange(23) % 3, 4.0, 2.0)
    coded = (y == 4).astype(float)
    (ours_X, ours_y), (test_X, test_y) = data.prepared(
        X, coded, standardize=False, intercept=False, test_fraction=0.2, seed=42
    )
    expected = train_test_split(X, (y == 4).astype(float), test_size=0.2, random_state=42)
    actual = (ours_X, test_X, ours_y, test_y)
    for ours, theirs in zip(actual, expected, strict=True):
        assert np.array_equal(ours, theirs)


def test_both_readings_of_table_3_are_in_one_log():
    """Row 41: Σ F + β/2 |m|² - ½ log det V as printed, and with ½β tr V - D/2 (log β + 1) the negative ELBO."""
    case = {"name": "c", "data": "synthetic", "rows": 60, "features": 3, "iterations": 3, "prior_precision": 0.5}
    experiment = settings.parsed({"title": "t", "cases": [case | {"methods": [{"method": "vn", "lr": 0.5}]}]})
    log = experiments.run_all(experiment, say=lambda _: None)
    problem = experiments.build(experiment.cases[0])
    q = experiments.start(experiment.cases[0], experiment.cases[0].methods[0], problem, experiment)
    trace = float(q.variance[0].sum())
    first = log[(log["iteration"] == 0) & (log["start"] == 0)].iloc[0]
    assert first["objective"] == pytest.approx(first["train"] + 0.25 * trace - 1.5 * (np.log(0.5) + 1), rel=1e-12)


def test_the_flop_models_of_figure_5():
    """Row 47: d³ + 4d², 3d³ + 9d²/2 + d/2 and 3d³ + 5d² at d = 10, and on the figure the last points of VN agree."""
    assert {name: flops(10) for name, flops in kumar2025._FLOPS.items()} == {"vn": 1400, "srvn": 3455, "bwgd": 3500}
    cases = [(method, dim) for method in ("vn", "srvn", "bwgd") for dim in (10, 100)]
    times = [("c", method, dim, 1, *3 * (1e-6 * dim**3,), 0.0) for method, dim in cases]
    columns = ["case", "method", "dim", "steps", "seconds", "low", "high", "data_seconds"]
    experiment = settings.parsed({"title": "t", "kind": "run_time", "dims": [10, 100], "cases": [ONE_CASE]})
    left, right = kumar2025.draw_time(pd.DataFrame(times, columns=columns), experiment).axes
    measured, model = left.lines[:2]
    assert measured.get_ydata()[-1] == pytest.approx(model.get_ydata()[-1], rel=1e-12)
    assert right.lines[3].get_ydata() == pytest.approx([3455 / 1400, 3045050 / 1040000], rel=1e-12)


ONE_CASE = {"name": "c", "data": "synthetic", "rows": 60, "features": 3, "methods": [{"method": "vn", "lr": 0.5}]}


@pytest.mark.accuracy
def test_a_grid_of_steps_is_one_comparison(tmp_path, capsys):
    """Row 50: methods may be named several times, each with its step."""
    flags = {"data": "breast_cancer", "iterations": 3, "starts": 2}
    comparison.compare(None, str(tmp_path / "out"), ["srvn=1e-3", "srvn=1e-2", "srvn=1e-1"], **flags)
    log = pd.read_csv(tmp_path / "out" / "log.csv")
    last = log[log["iteration"] == 3].groupby("method")["objective"].mean()
    assert set(last.index) == {"srvn=1e-3", "srvn=1e-2", "srvn=1e-1"}
    assert last.idxmin() == "srvn=1e-2"
    assert "srvn=1e-3" in capsys.readouterr().out
