"""Every measurement that the documentation names, run again by one command, with the version and day of its figures.

    python -m benchmarks.measure [--only PATTERN] [--limit 300] [--jobs 1] [--new] [--list]

README and docs are the registry: a command there that starts with ``python -m benchmarks``, ``python benchmarks/``,
``python examples/``, ``python docs/draw_`` or ``python -m examples.papers`` is a measurement, and is run as it is
printed there (experiments without their options).  What it prints goes into runs/measure, what became of it into
benchmarks/measure.json, and docs/appendix/measured.md is written from that.  Of the numbers in the tables of its
section, those of three digits or more, it is counted how many are printed again; times and ratios of times never quite
are, and a table between markers, which a command writes into its page, is no witness.  A command that names a CLONE, a
FOLDER or the like is not run, and one that takes longer than the limit is stopped; both are said.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torchngvi

TREE = Path(__file__).resolve().parents[1]
LOG, PAGE, OUT = (
    TREE / "benchmarks" / "measure.json",
    TREE / "docs" / "appendix" / "measured.md",
    TREE / "runs" / "measure",
)
BEGIN, END = "<!-- table: python -m benchmarks.measure -->", "<!-- end of table -->"
STARTS = (
    r"python -m benchmarks\.\w|python benchmarks/\w|python examples/\w|python docs/draw_|python -m examples\.papers \w"
)
COMMAND = re.compile(rf"`((?:{STARTS})[^`]*)`|^((?:{STARTS})[^`#\n]*)", re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d+)?")
OPEN = re.compile(r"\b[A-Z]{4,}\b|[.][.]|\bNAME\b")  # what the reader fills in
THREE = 3  # digits that a number has which is looked for
Entry = dict[str, Any]


class Place(NamedTuple):
    """Where a command is named: a page and a section of it, by its first and last line, counted from 1."""

    page: str
    first: int
    last: int


def pages() -> list[Path]:
    """The pages of the documentation that name measurements."""
    own = {PAGE, TREE / "docs" / "appendix" / "newcomers.md"}
    return [TREE / "README.md", *sorted(set((TREE / "docs").rglob("*.md")) - own)]


def sections(text: str) -> list[tuple[int, int]]:
    """First and last lines of the sections of a page, those of code that look like headings aside."""
    lines, fenced, starts = text.splitlines(), False, [1]
    for number, line in enumerate(lines, 1):
        fenced ^= line.startswith("```")
        if not fenced and line.startswith("#") and number > 1:
            starts.append(number)
    return list(zip(starts, [*(start - 1 for start in starts[1:]), len(lines)], strict=True))


def named() -> dict[str, list[Place]]:
    """Every command that the documentation names, and where."""
    found: dict[str, list[Place]] = {}
    for path in pages():
        text = path.read_text()
        page, lines = str(path.relative_to(TREE)), text.splitlines(keepends=True)
        for first, last in sections(text):
            for match in COMMAND.finditer("".join(lines[first - 1 : last])):
                words = (match[1] or match[2]).split()
                command = " ".join(words[:4] if words[2:3] == ["examples.papers"] else words)
                places = found.setdefault(command, [])
                if Place(page, first, last) not in places:
                    places.append(Place(page, first, last))
    return dict(sorted(found.items()))


def rows_of(place: Place) -> list[int]:
    """Numbers of the lines of the tables in a section, their heads aside; of the whole section where it has none."""
    lines = (TREE / place.page).read_text().splitlines()
    span = range(place.first, place.last + 1)
    return [n for n in span if lines[n - 1].startswith("|") and (n < 2 or lines[n - 2].startswith("|"))] or list(span)


def written_on(place: Place) -> tuple[str, str]:
    """The version and the day of the last change of the tables of a section, on whichever page they stood then."""
    command = ["git", "blame", "-C", "--ignore-revs-file", "benchmarks/unmeasured_commits.txt", "--line-porcelain"]
    command += ["-L", f"{place.first},{place.last}", "--", place.page]
    told = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=True).stdout  # noqa: S603
    heads = re.findall(r"^([0-9a-f]{40}) \d+ (\d+)|^author-time (\d+)", told, re.MULTILINE)
    rows, lines = set(rows_of(place)), [(head[0], int(head[1])) for head in heads if head[0]]
    times = [int(head[2]) for head in heads if head[2]]
    when, commit = max((t, c) for t, (c, line) in zip(times, lines, strict=True) if line in rows)
    if not int(commit, 16):
        return torchngvi.__version__, datetime.now(UTC).date().isoformat()
    show = ["git", "show", f"{commit}:torchngvi/__init__.py"]
    source = subprocess.run(show, cwd=TREE, capture_output=True, text=True, check=True).stdout  # noqa: S603
    version = re.search(r'__version__ = "([^"]+)"', source)
    return version[1] if version else "", datetime.fromtimestamp(when, UTC).date().isoformat()


def digits(number: str) -> int:
    """How many digits of a number are told: not the zeros before it, nor those at the end of a whole one."""
    mantissa = number.partition("e")[0]
    return len(re.sub(r"\D", "", mantissa if "." in mantissa else mantissa.rstrip("0,")).lstrip("0"))


def numbers(text: str) -> list[str]:
    """The numbers of a text that have three digits or more."""
    return [found for found in NUMBER.findall(text) if digits(found) >= THREE]


def again(table: str, output: str) -> tuple[int, int]:
    """How many of the numbers of a table an output has, to the digits of the table, and how many there are."""
    printed = [float(found.replace(",", "")) for found in NUMBER.findall(output)]
    wanted = numbers(table)
    return sum(any(same(number, other) for other in printed) for number in wanted), len(wanted)


def same(number: str, other: float) -> bool:
    """Whether a printed number rounds to another one."""
    mantissa, _, power = number.replace(",", "").partition("e")
    places = len(mantissa.partition(".")[2]) if "." in mantissa else len(mantissa.rstrip("0")) - len(mantissa)
    unit = 10.0 ** (int(power or 0) - places)
    return abs(float(number.replace(",", "")) - other) <= 0.5001 * unit


def folder_of(command: str) -> Path:
    """Where the output of a command is."""
    return OUT / re.sub(r"\W+", "-", command)


def run(command: str, limit: float) -> tuple[str, float]:
    """Run a command of the documentation; what became of it, and its seconds."""
    folder = folder_of(command)
    shutil.rmtree(folder, ignore_errors=True)  # what an earlier run has left is not of this one
    folder.mkdir(parents=True)
    arguments = shlex.split(command)[1:]
    words = [sys.executable, *arguments]
    if arguments[:2] == ["-m", "examples.papers"]:
        words += ["--out", str(folder), "--overwrite"]
    example = arguments[0].startswith("examples/")  # which leave a picture where they run
    if example:
        words[1] = str(TREE / arguments[0])
    start, paths = time.monotonic(), os.pathsep.join([str(TREE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths, "MPLBACKEND": "agg"}
    with (folder / "output.txt").open("w") as out:
        started = subprocess.Popen(  # noqa: S603
            words,
            cwd=folder if example else TREE,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = started.wait(limit)
            ended = "ran" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)  # with those that it has started
            started.wait()
            ended = f"stopped after {limit:g} s"
    return ended, time.monotonic() - start


def measured(command: str, limit: float) -> Entry:
    """Run a command, and tell what became of it."""
    ended, seconds = run(command, limit)
    day = datetime.now(UTC).date().isoformat()
    return {"version": torchngvi.__version__, "day": day, "ended": ended, "seconds": round(seconds)}


def compared(command: str, places: list[Place]) -> tuple[int, int]:
    """How many of the numbers of the tables beside a command its output has, and how many there are."""
    folder = folder_of(command)
    output = "\n".join(path.read_text(errors="replace") for path in [folder / "output.txt", *folder.glob("*.csv")])
    return again("\n".join(line for place in places for line in tables(place)), output)


def tables(place: Place) -> list[str]:
    """The lines of the tables of a section, but not of those that a command writes into its page."""
    lines, own = (TREE / place.page).read_text().splitlines(), set()
    for number, line in enumerate(lines, 1):
        if line.startswith("<!-- table: "):
            own.update(range(number, lines.index(END, number) + 1))
    return [lines[n - 1] for n in rows_of(place) if lines[n - 1].startswith("|") and n not in own]


def link(page: str) -> str:
    """A link to a page from the page that is written."""
    path = os.path.relpath(TREE / page, PAGE.parent)
    name = Path(page).stem.removesuffix("_measurements").replace("_", " ")
    return "README" if page == "README.md" else f"[{name}]({path})"


def table(log: dict[str, Entry]) -> str:
    """The table of the page, in Markdown."""
    lines = ["| command | pages | figures of | run again | s | printed again |", "|---|---|---|---|---|---|"]
    for command, entry in log.items():
        where = ", ".join(link(page) for page in dict.fromkeys(entry["pages"]))
        last = f"{entry['ended']}, {entry['version']}, {entry['day']}" if "day" in entry else entry["ended"]
        shown = f"{entry['again']} of {entry['numbers']}" if entry.get("numbers") and entry["ended"] == "ran" else ""
        cells = [f"`{command}`", where, ", ".join(entry["written"]), last, str(entry.get("seconds", "")), shown]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def written(page: str, log: dict[str, Entry]) -> str:
    """The page with the table of the log between its markers."""
    pattern = f"{re.escape(BEGIN)}.*?{re.escape(END)}"
    return re.sub(pattern, lambda _: f"{BEGIN}\n\n{counted(log)}\n\n{table(log)}\n\n{END}", page, flags=re.DOTALL)


def counted(log: dict[str, Entry]) -> str:
    """How many commands there are, how they ended, and how many of the numbers were printed again."""
    ends = Counter(re.sub(r" after.*| \(.*", "", entry["ended"]) for entry in log.values())
    told = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    ran = [entry for entry in log.values() if entry["ended"] == "ran"]
    found, count = (sum(entry.get(key, 0) for entry in ran) for key in ("again", "numbers"))
    return f"{len(log)} commands: {told}. Of those that ran: {found} of {count} numbers printed again."


def listed(old: dict[str, Entry]) -> dict[str, Entry]:
    """The log of the commands that the documentation names now, with what is known of earlier runs."""
    log = {}
    for command, places in named().items():
        never = {"ended": "names a path to fill in" if OPEN.search(command) else "not run again"}
        entry = dict(old.get(command, never))
        entry["pages"] = [place.page for place in places]
        entry["written"] = max((written_on(place) for place in places), key=lambda told: told[1])
        if entry["ended"] == "ran" and folder_of(command).exists():
            entry["again"], entry["numbers"] = compared(command, places)
        log[command] = entry
    return log


def write(log: dict[str, Entry]) -> None:
    """Write the record and its page, which are one at any time."""
    LOG.write_text(json.dumps(log, indent=1) + "\n")
    PAGE.write_text(written(PAGE.read_text(), log))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="commands in which this regular expression is found")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one command")
    parser.add_argument("--jobs", type=int, default=1, help="commands at once")
    parser.add_argument("--new", action="store_true", help="only what did not run on this version")
    parser.add_argument("--list", action="store_true", help="run nothing, and write the page")
    given = parser.parse_args()
    log = listed(json.loads(LOG.read_text()) if LOG.exists() else {})
    chosen = {
        command: places
        for command, places in named().items()
        if not (given.new and log[command].get("version") == torchngvi.__version__ and log[command]["ended"] == "ran")
        and not (given.list or OPEN.search(command))
        and re.search(given.only, command)
    }
    with ThreadPoolExecutor(given.jobs) as pool:
        running = {pool.submit(measured, command, given.limit): command for command in chosen}
        for future in as_completed(running):
            entry = log[running[future]]
            entry.update(future.result())
            if entry["ended"] == "ran":
                entry["again"], entry["numbers"] = compared(running[future], chosen[running[future]])
            print(f"{entry['ended']:20} {entry['seconds']:5} s  {running[future]}", flush=True)
            write(log)
    write(log)


if __name__ == "__main__":
    main()
