"""The worked examples of CONTRIBUTING.md, followed in their order; the commands are those that decide."""

import ast
import importlib
import inspect
import pathlib
import re
import sys
import types

import pytest
from test_architecture import SPEAKING

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (Add [^\n]*)\n(.*?)(?=^## )", TEXT, re.M | re.S))
FILE = re.compile(r"^`(torchngvi/[\w/]+\.py)`:\n\n```python\n(.*?)^```$", re.M | re.S)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def as_module(path):
    return path.removesuffix(".py").replace("/", ".")


def follow(path, source, monkeypatch):
    """The module that the text has written."""
    module = types.ModuleType(as_module(path))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, path, "exec"), vars(module))
    return module


def test_what_is_explained():
    assert list(SECTIONS) == ["Add a rule", "Add an estimator", "Add a structure", "Add a likelihood"]


@pytest.mark.parametrize("title", SECTIONS)
def test_a_worked_example(title, monkeypatch):
    """One new file, which is written as the library asks, and the check that it must pass."""
    [(path, source)] = FILE.findall(SECTIONS[title])
    written = ROOT / path  # in a tree where the text was followed
    assert not written.exists() or written.read_text(encoding="utf-8") == source
    public = [node for node in ast.walk(ast.parse(source)) if isinstance(node, SPEAKING)]
    silent = [node.name for node in public if not node.name.startswith("_") and not ast.get_docstring(node)]
    assert silent == ["at"] * silent.count("at")  # the curve inside a rule
    assert max(map(len, source.splitlines())) <= 120
    imported = [line for line in source.splitlines() if line.startswith("from torchngvi")]
    assert imported == sorted(imported)
    folder = importlib.import_module(as_module(path).rpartition(".")[0])
    taken = {as_module(path).rpartition(".")[2], *(node.name for node in public if isinstance(node, ast.ClassDef))}
    assert written.exists() or not taken & set(vars(folder))  # the export would hide something
    follow(path, source, monkeypatch)
    [check] = [block for block in BLOCK.findall(SECTIONS[title]) if block != source]
    assert "check_" in check
    exec(compile(check, "CONTRIBUTING.md", "exec"), {})


@pytest.mark.parametrize("title", [title for title in SECTIONS if title != "Add a structure"])
def test_a_printed_row(title, monkeypatch):
    """The lines that go to the end of a generator of `test_printed_values` hold the part."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "core")
    table, [(path, source)] = importlib.import_module("test_printed_values"), FILE.findall(SECTIONS[title])
    module, rest = follow(path, source, monkeypatch), BLOCK.sub("", SECTIONS[title])
    [part] = [node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    folder = importlib.import_module(module.__name__.rpartition(".")[0])
    monkeypatch.setattr(folder, part, getattr(module, part), raising=False)
    [name], lines = re.findall(r"`(printed_\w+)`", rest), "".join(re.findall(r"^ {4}.*\n", rest, re.M))
    [hold] = re.findall(rf'^enter\("\w+", {name}, (\w+)\)', inspect.getsource(table), re.M)
    space = dict(vars(table))
    exec(inspect.getsource(space[name]) + lines, space)
    *_, last = space[name]()
    assert type(last[0]) is getattr(module, part)
    monkeypatch.setitem(table.ROWS, part, lambda: space[hold](*last))
    table.check_values(part)


def test_the_arrow_is_that_of_the_tests():
    [(_, source)] = FILE.findall(SECTIONS["Add a structure"])
    assert source == (ROOT / "tests" / "arrow.py").read_text(encoding="utf-8")


def test_every_block_is_run_or_compared():
    python = BLOCK.findall(TEXT)
    assert len(python) == 2 * len(SECTIONS)
    shell = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.M | re.S)
    assert len(python) + len(shell) == TEXT.count("```") // 2
    decides = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    tests, some, wheel, tools = (block.splitlines() for block in shell)
    assert set(tests) | set(tools) <= set(decides)
    ends = [line.partition("python")[2].split(" tests")[0] for line in wheel if "pytest" in line]
    assert ends[0].endswith(" -P -m pytest -q")  # as .ci/run does with some of the files
    assert any('/bin/python" -P -m pytest -q tests/' in line for line in decides)
    assert tests[0] in (ROOT / "README.md").read_text(encoding="utf-8")
    for name in some[0].split()[4:]:
        assert (ROOT / name).exists()
