"""What the pages of the documentation show is run: Python line by line, and the commands of transcripts."""

import doctest
import functools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchngvi
from torchngvi.cli import main

DOCS = Path(__file__).parents[2] / "docs"
ALONE = ("black_box", "families", "sharp_bits", "solved")  # doctests of the top folder
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
SHOWN = sorted([*TUTORIALS, *(DOCS / "how-to").glob("*.md"), *(DOCS / f"{name}.md" for name in ALONE)])
NEEDED = {
    "gaussian_process": ["gpytorch"],
    "pyro_model": ["pyro"],
    **dict.fromkeys(("mixed_model", "tables", "table", "predict", "prior", "check"), ["formulae"]),
}
# from the folder, wherever torchngvi is from
WALKS = runpy.run_path(os.fspath(DOCS.parent / "benchmarks" / "walks.py"))
blocks, commands = WALKS["blocks"], WALKS["commands"]


def of_torchrun(arguments):
    """What a script prints that several processes run."""
    runner = [sys.executable, "-m", "torch.distributed.run", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.fspath(DOCS.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(runner, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


# torchrun: one run of ten ends with "terminate called without an active exception" on a machine that is busy
LONG = {"many_machines": pytest.mark.slow} | dict.fromkeys(("check", "families", "sharp_bits"), pytest.mark.accuracy)


@pytest.mark.parametrize("page", [pytest.param(page, marks=LONG.get(page.stem, ()), id=page.stem) for page in SHOWN])
def test_pages_are_run(page, tmp_path, monkeypatch, capsys):
    for package in NEEDED.get(page.stem, ()):
        pytest.importorskip(package, reason=f"{package} is in an extra")
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    for number, (kind, text) in enumerate(blocks(page)):
        if kind == "python" and (script := re.match(r"# (\w+\.py)\n", text)):
            Path(script[1]).write_text(text, encoding="utf-8")
            continue
        if kind == "python":
            test = doctest.DocTestParser().get_doctest(text, scope, f"{page.stem}, block {number}", str(page), 0)
            runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
            told: list[str] = []
            runner.run(test, out=told.append, clear_globs=False)
            assert not runner.summarize(verbose=False).failed, "".join(told)
            scope.update(test.globs)
            continue
        for (program, *arguments), lines in commands(text):
            assert program in ("torchngvi", "torchrun")
            capsys.readouterr()
            if program == "torchngvi":
                assert main(arguments) == 0
                said = capsys.readouterr().out
            else:
                said = of_torchrun(arguments)
            said = [line.strip() for line in said.splitlines()]
            for line in lines:
                assert any(other.startswith(line) for other in said), f"{line!r} is not in:\n" + "\n".join(said)


# of the other pages: what is replaced so that a test has time for it
SHORTENED = {
    "groups": {"n = 100 ": "n = 12 ", "480": "240"},
    "scaling": {'torch.distributed.init_process_group("gloo")\n': "", '"cuda"': '"cpu"'},  # one process, no GPU
}
# and those whose code is run by the tests of what they are about
ELSEWHERE = {name: f"test_{name}.py" for name in ("bbvi", "gpytorch", "ifvb", "ngvi", "pyro", "refine", "tan")}
ELSEWHERE |= {"groups": "test_factors.py", "networks": "test_networks_scripts.py"}


def python_of(page):
    """The Python of a page in order; the last two sections of the page on groups have tests of their own."""
    found = [text for kind, text in blocks(page) if kind == "python"]
    return found[:-2] if page.stem == "groups" else found


@pytest.mark.parametrize("name", SHORTENED)
def test_snippets_are_run(name, tmp_path, monkeypatch):
    if name == "groups":
        pytest.importorskip("formulae", reason="formulae is in the extra formula")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torchngvi, "fit", functools.partial(torchngvi.fit, progress=False))
    page = DOCS / f"{name}.md"
    torch.manual_seed(0)
    scope: dict = {}
    for text in python_of(page):
        for old, new in SHORTENED[name].items():
            text = text.replace(old, new)
        exec(compile(text, str(page), "exec"), scope)
    whole = "".join(python_of(page))
    assert all(old in whole for old in SHORTENED[name])


def test_every_page_with_code_is_run():
    shown = {os.fspath(page) for page in SHOWN}
    of_others = {page.stem for page in DOCS.rglob("*.md") if blocks(page) and os.fspath(page) not in shown}
    assert of_others == {*SHORTENED, *ELSEWHERE}
    for name, test in ELSEWHERE.items():
        text = next(Path(__file__).parents[1].rglob(test)).read_text(encoding="utf-8")
        assert f"docs/{name}.md" in text or f'"{name}.md"' in text


def test_transcripts_are_short():
    """Each way of the first tutorial, from a table to predictions, takes fewer than ten lines."""
    sections = (DOCS / "tutorials" / "table.md").read_text(encoding="utf-8").split("\n## ")[1:]
    assert len(sections) == 3
    for section in sections:
        lines = [line for _, text in WALKS["BLOCK"].findall(section) for line in text.splitlines()]
        written = [line for line in lines if line.startswith(("$ ", ">>> ", "... "))]
        assert len(written) < 10


def test_every_page_is_in_the_site():
    """A page that no table of contents names would not be found; the appendix is files that the pages link."""
    contents = [(DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("index", "capabilities")]
    named = {name for text in contents for name in re.findall(r"^([\w/-]+)$", text, re.MULTILINE)}
    pages = {os.fspath(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")}
    assert {page for page in pages if not page.startswith(("api/", "appendix/"))} - {"index"} <= named
    of_the_api = set((DOCS / "api" / "index.md").read_text(encoding="utf-8").split())
    assert {page.removeprefix("api/") for page in pages if page.startswith("api/")} - {"index"} <= of_the_api


def test_every_row_of_the_guide_links_to_its_page():
    """Who has found the call wants to read how it is used."""
    guide = (DOCS / "choosing.md").read_text(encoding="utf-8").split("## Guide\n")[1].split("\n## ")[0]
    rows = [line for line in guide.splitlines() if line.startswith("| ")]
    calls = [row for row in rows if not row.startswith(("| problem", "| question"))]
    assert len(calls) > 30
    assert [row for row in calls if not re.search(r"\]\([\w/.#-]+\)|\{class\}`", row.split("|")[-2])] == []


def test_sharp_bits_have_a_symptom_a_reason_and_a_remedy():
    """In this order, each once; a page of warnings without a remedy would be of little use."""
    sections = (DOCS / "sharp_bits.md").read_text(encoding="utf-8").split("\n## ")[1:]
    for section in sections:
        found = [section.find(word) for word in ("*Symptom.*", "*Reason", "*What to do.*")]
        assert -1 < found[0] < found[1] < found[2], section.splitlines()[0]


def test_every_example_is_in_the_gallery():
    """By a picture of its own that is small, or by a sentence that says why it has none."""
    text = (DOCS / "gallery.md").read_text(encoding="utf-8")
    pictures = {path.stem: path.stat().st_size for path in (DOCS / "gallery").glob("*.png")}
    examples = {path.stem for path in (DOCS.parent / "examples").glob("[!_]*.py")}
    assert set(pictures) == set(re.findall(r"\(gallery/(\w+)\.png\)", text))
    assert set(pictures) | set(re.findall(r"^- `examples/(\w+)\.py` ", text, re.MULTILINE)) == examples
    assert max(pictures.values()) < 60_000


def test_transcripts_are_of_every_way_and_end_without_an_error():
    """What `python -m benchmarks.walks` has written is of the pages as they are, and nobody stumbles there."""
    written = WALKS["PAGE"].read_text(encoding="utf-8")
    assert not WALKS["STUMBLE"].search(written)
    assert set(WALKS["WAYS"].values()) == {"README.md", *(f"docs/tutorials/{page.name}" for page in TUTORIALS)}
    assert all(f"\n## {name}\n" in written for name in WALKS["WAYS"])
    for page in TUTORIALS:
        for kind, text in blocks(page):
            for example in doctest.DocTestParser().get_examples(text) if kind == "python" else []:
                assert f">>> {example.source.splitlines()[0]}\n" in written, f"{page.name} has changed: run the walks"
