"""`benchmarks/measure.py`: what the documentation names is what the record of measurements has."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

pytest.importorskip("benchmarks", reason="needs the benchmarks of a clone: run python -m pytest in its root")

from benchmarks import measure  # noqa: E402
from examples.papers.reproduce import known  # noqa: E402

LOG = json.loads(measure.LOG.read_text())
DONE = {"ended": "ran", "version": "9", "day": "today", "seconds": 1}


def test_every_measurement_of_the_documentation_is_recorded():
    """After a page has changed: python -m benchmarks.measure --list."""
    assert list(LOG) == list(measure.named())
    for command, places in measure.named().items():
        assert LOG[command]["pages"] == [place.page for place in places]


def test_the_page_is_that_of_the_record():
    page = measure.PAGE.read_text()
    assert measure.written(page, LOG) == page
    assert page.count("\n| `") == len(LOG)


@pytest.mark.parametrize("command", LOG)
def test_what_is_named_exists(command):
    words = shlex.split(command)[1:]
    if words[:2] == ["-m", "examples.papers"]:
        assert words[2] in known()
    elif words[0] == "-m":
        path = measure.TREE / words[1].replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()
    else:
        assert (measure.TREE / words[0]).exists()


def test_commands_are_found_in_prose_and_in_code(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# One\n\nBy `python benchmarks/mixed.py\n--fast`.\n")
    text = "# Two\n```sh\npython -m examples.papers srvn-fig1 --full   # long\n# no heading\n```\n"
    text += "## Three\n`python -m benchmarks.newton`\n"
    (tmp_path / "docs" / "page.md").write_text(text)
    monkeypatch.setattr(measure, "TREE", tmp_path)
    assert measure.named() == {
        "python -m benchmarks.newton": [measure.Place("docs/page.md", 6, 7)],
        "python benchmarks/mixed.py --fast": [measure.Place("README.md", 1, 4)],
        "python -m examples.papers srvn-fig1": [measure.Place("docs/page.md", 1, 5)],
    }


@pytest.mark.parametrize(
    ("table", "output", "found"),
    [
        ("| 1.24 | 0.0125 | 12,345 | 7 |", "1.2444 0.01253 12345.4", (3, 3)),
        ("| 1.24 | -0.0125 |", "1.2454 0.0125", (0, 2)),
        ("| 1.24e-05 | 1.24e+3 |", "1.24e-5 1240", (2, 2)),
        ("| 100 | 0.05 | 17 of 22 |", "101", (0, 0)),
        ("| 85,100 p | 101, 102 |", "8.513e+04p 101s", (2, 3)),
    ],
)
def test_numbers_are_the_same_where_they_round_alike(table, output, found):
    assert measure.again(table, output) == found


def test_a_command_ends_by_itself_or_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "OUT", tmp_path)
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\nprint(3.25, flush=True)\ntime.sleep(float(sys.argv[1]))\nsys.exit(int(sys.argv[2]))\n"
    )
    for arguments, limit, told in (("0 0", 60, "ran"), ("0 3", 60, "failed (3)"), ("60 0", 1.5, "stopped after 1.5 s")):
        ended, seconds = measure.run(f"python {script} {arguments}", limit)
        assert ended == told
        assert seconds < 50
        assert (measure.folder_of(f"python {script} {arguments}") / "output.txt").read_text() == "3.25\n"


def test_what_an_earlier_run_has_left_is_not_of_this_one(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "OUT", tmp_path / "out")
    script = tmp_path / "script.py"
    script.write_text("print(1)\n")
    folder = measure.folder_of(f"python {script}")
    folder.mkdir(parents=True)
    (folder / "log.csv").write_text("3.25\n")
    assert measure.run(f"python {script}", 60)[0] == "ran"
    assert [path.name for path in folder.iterdir()] == ["output.txt"]


def test_a_table_that_its_command_writes_is_no_witness(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "TREE", tmp_path)
    own = f"<!-- table: python -m benchmarks.newton -->\n\n| b |\n|---|\n| 2.25 |\n\n{measure.END}\n"
    text = f"# One\n`python -m benchmarks.newton`\n\n| a |\n|---|\n| 1.25 |\n\n{own}\n| c |\n|---|\n| 3.25 |\n"
    (tmp_path / "page.md").write_text(text)
    found = measure.tables(measure.Place("page.md", 1, len(text.splitlines())))
    assert measure.numbers("\n".join(found)) == ["1.25", "3.25"]


def test_record_and_page_are_one_after_each_run(monkeypatch, tmp_path):
    """However a longer run ends."""
    for name in ("LOG", "PAGE"):
        copy = tmp_path / getattr(measure, name).name
        copy.write_text(getattr(measure, name).read_text())
        monkeypatch.setattr(measure, name, copy)

    def measured(command, limit):
        if command.endswith("warps"):
            raise KeyboardInterrupt
        return dict(DONE)

    names = ["python -m benchmarks.mixtures", "python -m benchmarks.warps"]
    monkeypatch.setattr(measure, "named", lambda: {name: [measure.Place("README.md", 1, 2)] for name in names})
    monkeypatch.setattr(measure, "measured", measured)
    monkeypatch.setattr(measure, "OUT", tmp_path)
    monkeypatch.setattr(measure, "compared", lambda command, places: (3, 4))
    monkeypatch.setattr(measure, "written_on", lambda place: ("0", place.page))
    monkeypatch.setattr(sys, "argv", ["measure"])
    with pytest.raises(KeyboardInterrupt):
        measure.main()
    log, page = json.loads(measure.LOG.read_text()), measure.PAGE.read_text()
    assert log[names[0]]["day"] == "today"
    assert measure.written(page, log) == page


def test_what_the_reader_fills_in_is_not_run(monkeypatch, tmp_path, capsys):
    for name in ("LOG", "PAGE"):
        copy = tmp_path / getattr(measure, name).name
        copy.write_text(getattr(measure, name).read_text())
        monkeypatch.setattr(measure, name, copy)
    monkeypatch.setattr(measure, "measured", lambda *_: dict(DONE))
    monkeypatch.setattr(measure, "OUT", tmp_path)
    monkeypatch.setattr(measure, "compared", lambda command, places: (3, 4))
    monkeypatch.setattr(measure, "written_on", lambda place: ("0", place.page))
    monkeypatch.setattr(sys, "argv", ["measure", "--only", "CLONE|mixtures$"])
    measure.main()
    assert re.findall(r"ran +1 s  (.*)", capsys.readouterr().out) == ["python -m benchmarks.mixtures"]
    log = json.loads(Path(measure.LOG).read_text())
    assert log["python -m benchmarks.mixtures"]["day"] == "today"
    assert {entry["ended"] for command, entry in log.items() if "CLONE" in command} == {"names a path to fill in"}
    assert "| ran, 9, today | 1 | 3 of 4 |" in Path(measure.PAGE).read_text()


def test_the_page_begins_with_how_many_ran():
    log = {
        "a": {"ended": "ran", "again": 2, "numbers": 3},
        "b": {"ended": "stopped after 9 s", "again": 0, "numbers": 8},
        "c": {"ended": "stopped after 1.5 s", "again": 0, "numbers": 8},
        "d": {"ended": "failed (1)", "again": 0, "numbers": 8},
    }
    assert measure.counted(log) == (
        "4 commands: 2 stopped, 1 ran, 1 failed. Of those that ran: 2 of 3 numbers printed again."
    )
