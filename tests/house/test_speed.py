"""The page of speed is what its log says, and two checkouts are compared by the fits that both can make."""

import json
import math
import sys

import pytest

pytest.importorskip("benchmarks", reason="needs the benchmarks of a clone: run python -m pytest in its root")

from benchmarks import same_results, speed_page  # noqa: E402
from benchmarks.speed_page import BEGIN, END, LOG, PAGE, ROWS, of_peers, table, written  # noqa: E402


def test_the_page_has_the_table_of_its_log():
    page, log = PAGE.read_text(), json.loads(LOG.read_text())
    assert page.count(BEGIN) == page.count(END) == 1
    assert written(page, log) == page
    assert set(log) <= {*ROWS, "peers"}
    figures = [row for rows in log.values() for row in rows]
    assert len(figures) >= 5
    assert all(row["ratio"] > 0 for row in figures)
    log["newton"][0]["ratio"] *= 2  # another figure is another page
    assert written(page, log) != page


def test_a_peer_that_did_not_get_there_gives_a_bound(tmp_path):
    """The ratio is then above that of its patience."""
    line = {"data": "a9a", "gap": 0.01, "ours": 2.0, "peer": "Pyro", "seconds": None, "patience": 300.0}
    path = tmp_path / "peers.log"
    path.write_text(json.dumps(line) + "\n" + json.dumps({**line, "gap": 1.0, "seconds": 8.0}) + "\n")
    lines = table({"peers": of_peers(path)}).splitlines()[2:]
    assert [line.split(" | ")[2] for line in lines] == ["above 150", "4"]


@pytest.mark.accuracy
@pytest.mark.parametrize("name", ["svgp", "network"])
def test_rows_of_other_benchmarks_can_be_measured(name, monkeypatch, capsys):
    """They import what stands beside them, and no row is left out for another reason than a missing peer."""
    if name == "svgp":
        likelihoods = pytest.importorskip("gpytorch").likelihoods.bernoulli_likelihood
        monkeypatch.setattr(likelihoods, "log_normal_cdf", likelihoods.log_normal_cdf)  # which the benchmark replaces
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.endswith("benchmarks")])
    called = []

    def once(calls, repeats):
        called.extend(call() for call in calls.values())
        return dict.fromkeys(calls, 1.0)

    monkeypatch.setattr(speed_page, "least", once)
    (row,) = ROWS[name](1)
    assert row["ratio"] == 1.0
    assert len(called) >= 2
    assert "not installed" not in capsys.readouterr().out


def test_differences_of_losses():
    """Relative above 1, absolute below; what is no number, or is missing, differs infinitely."""
    assert same_results.difference([100.0, 0.5], [101.0, 0.25]) == 0.25
    assert same_results.difference([99.0], [100.0]) == 0.01
    assert same_results.difference([math.nan], [1.0]) == math.inf
    assert same_results.difference([1.0], [1.0, 2.0]) == math.inf


def test_names_of_cases_are_their_own():
    names = [name for name, _ in same_results.problems()]
    assert len(names) == len(set(names)) >= 36


def test_the_other_checkout_is_the_one_that_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^torchngvi is that of .*, not that of "):
        same_results.losses("")
