"""What is public: `__all__`, the pages of docs/api and the docstrings agree, and so do old names and their page."""

import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchngvi
from torchngvi.renamed import NAMES

HERE = Path(__file__).parents[1]
API = HERE.parent / "docs" / "api"
PACKAGE = Path(torchngvi.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

FRONT_DOOR = 48  # names at most, those of extras among them

# attributes of torchngvi that `from torchngvi import *` leaves alone, since each needs packages of an extra
OF_EXTRAS = {"mixed": "formulae", "regression": "formulae", "load": "matplotlib", "to_arviz": "arviz"}
NEEDED = {"gpytorch": "gpytorch", "pyro": "pyro", "sklearn": "sklearn", "flows": "scipy", "formula": "formulae"}
NEEDED |= {"arviz": "arviz", "app": "pandas"}


def exports(path):
    """Whether a file says by an `__all__` of its own, or of another, what is public in it."""
    text = path.read_text(encoding="utf-8")
    for node in ast.parse(text).body if "__all__" in text else ():
        if isinstance(node, ast.Assign) and any(getattr(each, "id", "") == "__all__" for each in node.targets):
            return True
        if isinstance(node, ast.ImportFrom) and any(each.name == "__all__" for each in node.names):
            return True
    return False


def module_name(path):
    """Its dotted name: posteriors/precision.py -> torchngvi.posteriors.precision."""
    parts = ("torchngvi", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PUBLIC = sorted(module_name(path) for path in FILES if exports(path))


def missing(name):
    """The package that a module needs and that is not installed, if there is one."""
    needed = [NEEDED[part] for part in name.split(".") if part in NEEDED]
    return next((package for package in needed if importlib.util.find_spec(package) is None), None)


def loaded(name):
    """The public module, or the test is skipped without its extra."""
    if package := missing(name):
        pytest.skip(f"{package} is not installed")
    return importlib.import_module(name)


def documentable(module):
    """The exported objects by name, without the version and without modules, which have sections of their own."""
    for name in module.__all__:
        found = getattr(module, name)
        if name != "__version__" and not inspect.ismodule(found):
            yield name, found


DIRECTIVE = re.compile(r"^\.\. auto(\w+):: (torchngvi[\w.]*)$", re.MULTILINE)
SECTIONS = DIRECTIVE.findall((API / "index.md").read_text("utf-8"))


def resolved(dotted):
    """What a dotted name is: of a function and a file of one name the function, as for who asks the package."""
    parts = dotted.split(".")
    found = torchngvi
    for depth, part in enumerate(parts[1:], 2):
        if inspect.ismodule(found) and not hasattr(found, part):
            importlib.import_module(".".join(parts[:depth]))
        found = getattr(found, part)
    return found


@functools.cache
def shown():
    """What docs/api has a page for: all that a module exports, and what has a directive of its own."""
    names = []
    for kind, dotted in SECTIONS:
        if kind == "module" and not missing(dotted):
            names += [f"{dotted}.{name}" for name, _ in documentable(importlib.import_module(dotted))]
        elif kind != "module":
            names.append(dotted)
    return names


@functools.cache
def entries():
    """The entries themselves, by identity."""
    return {id(resolved(dotted)) for dotted in shown()}


def test_there_are_public_modules():
    assert {"torchngvi", "torchngvi.rules", "torchngvi.ngvi", "torchngvi.errors", "torchngvi.adapters.pyro"} <= set(
        PUBLIC
    )
    assert len(SECTIONS) > len(PUBLIC)
    assert not [name for name in PUBLIC if "._" in name]


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_exported_has_a_docstring_and_an_entry(name):
    """Each name of an `__all__` is there once, says what it is in a sentence, and has its entry in docs/api."""
    module = loaded(name)
    twice = sorted({each for each in module.__all__ if module.__all__.count(each) > 1})
    assert not twice, f"{name}.__all__ names {twice} twice: edit {module.__file__}"
    absent = [each for each in module.__all__ if not hasattr(module, each)]
    assert not absent, f"{name}.__all__ names {absent}, which the module has not: edit {module.__file__}"
    silent = [each for each, found in documentable(module) if callable(found) and not said(found)]
    assert not [each for each in silent if f"{name}.{each}" not in ALIASES], (
        f"{name}: {silent} need a docstring of their own"
    )
    hidden = [each for each, found in documentable(module) if id(found) not in entries()]
    assert not hidden, (
        f"{name} exports {hidden}, which docs/api does not show: add '.. automodule:: {name}' to docs/api/index.md, or "
        f"take them out of __all__ in {module.__file__}"
    )


# aliases of types: their docstring is a string below the assignment, and their entry an `autodata`
ALIASES = {"torchngvi.interfaces.Change", "torchngvi.interfaces.Derivative", "torchngvi.interfaces.Move"}


def said(found):
    """The first paragraph of a docstring of its own, if it is a sentence."""
    text = inspect.cleandoc(vars(found).get("__doc__") or "" if inspect.isclass(found) else found.__doc__ or "")
    first = text.split("\n\n")[0]
    return first if first.endswith((".", ":")) else ""


def test_aliases_have_their_entry():
    data = {dotted for kind, dotted in SECTIONS if kind == "data"}
    assert {dotted.rsplit(".", 1)[1] for dotted in data} == {alias.rsplit(".", 1)[1] for alias in ALIASES}
    for dotted in data:
        module, name = dotted.rsplit(".", 1)
        body = ast.parse(Path(importlib.import_module(module).__file__).read_text("utf-8")).body
        at = next(k for k, node in enumerate(body) if isinstance(node, ast.Assign) and node.targets[0].id == name)
        assert isinstance(body[at + 1].value, ast.Constant), f"{dotted} needs a docstring below it: edit {module}"


def test_every_public_module_has_a_section():
    """With its docstring, from which the site makes the list of what it exports."""
    sections = {dotted for kind, dotted in SECTIONS if kind == "module"}
    assert not set(PUBLIC) - sections, f"docs/api/index.md needs '.. automodule::' of {sorted(set(PUBLIC) - sections)}"
    assert not sections - set(PUBLIC), f"docs/api shows {sorted(sections - set(PUBLIC))}, which have no __all__"


def test_every_entry_is_public():
    """What docs/api shows exists, and some `__all__` has it."""
    public = {
        id(found) for name in PUBLIC if not missing(name) for _, found in documentable(importlib.import_module(name))
    }
    wrong = []
    for dotted in shown():
        try:
            found = resolved(dotted)
        except (AttributeError, ImportError):
            wrong.append(f"{dotted} (which is not there)")
            continue
        if id(found) not in public:
            wrong.append(dotted)
    assert not wrong, f"docs/api shows {wrong}, which no __all__ has: export them, or take the entries away"


def test_no_entry_is_doubled():
    """Two entries of one thing under one name would give a link two ends."""
    written = shown()
    assert not sorted({each for each in written if written.count(each) > 1})


def test_the_front_door():
    """What it finds without naming it in `__all__` needs an extra, and is named on the page of what is public."""
    assert len({*torchngvi._HOME, *torchngvi.__all__}) <= FRONT_DOOR
    assert set(torchngvi._HOME) - set(torchngvi.__all__) == set(OF_EXTRAS)
    tree = ast.parse(Path(torchngvi.__file__).read_text("utf-8"))
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]  # TYPE_CHECKING
    assert {each.names[0].asname: each.module for each in typed.body} == {
        name: home for name, home in torchngvi._HOME.items() if name not in OF_EXTRAS
    }
    page = (API / "public.md").read_text("utf-8")
    for name, package in OF_EXTRAS.items():
        assert f"`torchngvi.{name}`" in page, f"docs/api/public.md does not name torchngvi.{name}"
        if importlib.util.find_spec(package) is not None and not missing(torchngvi._HOME[name]):
            assert name in importlib.import_module(torchngvi._HOME[name]).__all__
            assert id(getattr(torchngvi, name)) in entries()
    for name in torchngvi.__all__:
        if name in torchngvi._HOME and not inspect.ismodule(getattr(torchngvi, name)):
            home = importlib.import_module(torchngvi._HOME[name])
            assert getattr(torchngvi, name) is getattr(home, name)
    assert importlib.util.find_spec("torchngvi").origin == torchngvi.__file__


SHOWN = [
    *(HERE.parent / "docs").glob("*.md"),
    *(HERE.parent / "docs" / "how-to").glob("*.md"),
    *(HERE.parent / "docs" / "tutorials").glob("*.md"),
    *(HERE.parent / "examples").glob("*.py"),
    HERE.parent / "README.md",
]
IMPORT = re.compile(r"^(?:>>> |\.\.\. )? *from (torchngvi[\w.]*) import (\([^)]*\)|[^\n#;]*)", re.MULTILINE)
NOT_PUBLIC = {"torchngvi.numerics.sparse"}  # of the page on groups, which says where the sums of its rows are made


def test_what_pages_and_examples_import_is_public():
    """A user who copies a line relies on nothing that may change without notice."""
    found = {}
    for path in SHOWN:
        for module, names in IMPORT.findall(path.read_text("utf-8")):
            for name in re.findall(r"(\w+)(?: as \w+)?", names):
                found.setdefault((module, name), path.name)
    assert len(found) > 40
    wrong = []
    for (module, name), path in sorted(found.items()):
        if missing(module) or f"{module}.{name}" in NOT_PUBLIC or f"{module}.{name}" in PUBLIC:
            continue
        if name not in getattr(importlib.import_module(module), "__all__", ()) and name not in OF_EXTRAS:
            wrong.append(f"{path}: from {module} import {name}")
    assert not wrong, (
        f"these are not public: {wrong}; import them from the module whose __all__ has them, or export them"
    )


def test_the_reference_is_in_order():
    """The page of what is public comes first, then the front door, and last what authors of parts need."""
    assert re.findall(r"^(\w+)$", (API / "index.md").read_text("utf-8"), re.MULTILINE) == ["public"]
    assert (SECTIONS[0], SECTIONS[-1]) == (("module", "torchngvi"), ("module", "torchngvi.testing"))


def called(node, name):
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == name


def old_names():
    """(old, new) of every renaming in the source, an argument with its =."""
    new = set()
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        if "from torchngvi.renamed import" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if called(node, "warn_renamed"):
                new.add((node.args[1].value, node.args[2].value))
    return new


def on_the_page():
    """The pairs of the table of docs/api/public.md, in words as the warnings write them."""
    rows = re.findall(
        r"^\| (?!of |---)[^|]* \| ([^|]*) \| ([^|]*) \|$", (API / "public.md").read_text("utf-8"), re.MULTILINE
    )
    pairs = set()
    for old, new in rows:
        olds, news = (side.replace("`", "").split(", ") for side in (old, new))
        pairs |= {(a.removeprefix("."), b.removeprefix(".")) for a, b in zip(olds, news, strict=True)}
    return pairs


def test_the_page_has_every_old_name():
    new = old_names()
    assert new
    assert new == on_the_page(), "the table of old names of docs/api/public.md is not what the source renames"
    page = (API / "public.md").read_text("utf-8")
    left = {module: tuple(re.findall(r"`(\w+)`", names)) for module, names in re.findall(r"- `([\w.]+)`: (.*)", page)}
    assert left == NAMES, "docs/api/public.md: the names that have left the front door"


def test_every_old_name_is_tested():
    """Some test expects the warning, in its words."""
    tests = "\n".join(path.read_text("utf-8") for path in HERE.rglob("test_*.py") if path.name != Path(__file__).name)
    tests = tests.replace("\\", "")
    untold = [(old, new) for old, new in old_names() if f"{old} is now called {new}" not in tests]
    assert not untold, f"no test expects the warning of {untold}: add one to tests/core/test_renamed.py"


def test_the_wheel_has_types():
    assert (PACKAGE / "py.typed").exists()
    setup = HERE.parent / "setup.cfg"
    assert "torchngvi = py.typed" in setup.read_text("utf-8")
    assert "Typing :: Typed" in setup.read_text("utf-8")


@pytest.mark.accuracy
def test_a_script_of_a_user_is_typed(tmp_path):
    """`mypy --strict`, without an ignore."""
    for package in ("mypy", "gpytorch", "pyro"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    scripts = [HERE / "typing" / name for name in ("script.py", "hosts.py")]
    assert not any("type: ignore" in script.read_text("utf-8") for script in scripts)
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import torchngvi as ngvi\n\nngvi.CholeskyGaussian('three')\n")
    options = ["--config-file", str(HERE / "typing" / "mypy.ini"), "--cache-dir", str(tmp_path / "cache")]
    installed = PACKAGE.parent.name in ("site-packages", "dist-packages")
    beside = {} if installed else {"PYTHONPATH": str(PACKAGE.parent)}  # mypy takes it for installed, as a user has it
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *map(str, scripts), str(wrong)],
        cwd=HERE / "typing",
        env=os.environ | beside,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    told = [line for line in done.stdout.splitlines() if "error:" in line]
    assert [line for line in told if "wrong.py" not in line] == [], done.stdout
    assert [re.search(r"\[([\w-]+)\]$", line)[1] for line in told] == ["arg-type"], done.stdout  # the types are read
