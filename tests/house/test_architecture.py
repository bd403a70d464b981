"""The shape of the package, read from its source: levels, third parties, docstrings, and how large it may be."""

import ast
import functools
import importlib
import pathlib
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "torchngvi"
FILES = sorted(PACKAGE.rglob("*.py"))

# How large the house may be, in the words of `python benchmarks/house.py`: a change that makes it smaller lowers these
# to what it reaches, and one that raises a ceiling says in its message what the reader gets for it.
CEILINGS = {
    "package lines": 75_609,
    "package files": 183,
    "numeric constants at module level": 168,
    "names of the front door": 44,
    "test lines": 75_892,
}
# How many files of the package run in each of the seven ways into it, by `python benchmarks/house.py --paths`.
FILES_OF_A_PATH = {
    "fit(q, GeneralizedLinear)": 34,
    "fit(q, log_joint)": 31,
    "mixed(formula, table)": 21,
    "train_svgp": 34,
    "fit_guide": 36,
    "attach": 13,
    "torchngvi fit --data": 26,
}

# a module may import from lower levels, and within its own folder; parts of one level are strangers
LEVELS = [
    {"errors"},
    {"extras", "messages", "numerics", "words"},
    {"arguments"},
    {"distributed"},
    {"structures", "renamed"},
    {"interfaces"},
    {"afar", "derivatives", "momentum"},
    {"posteriors", "stepsizes"},
    {"models"},
    {"averaging", "expectations", "metrics"},
    {"rules"},  # its front door names metrics and momentum too
    {"optim"},
    {"methods"},
    {"theory", "testing", "mode", "registry"},
    {"diagnostics"},
    {"fitting"},
    {"refinement", "latents", "networks", "evidence", "solved"},
    {"tables"},
    {"stopping", "ifvb", "bbvi", "ngvi"},  # short names of what is in the folders
    {"__init__"},  # the front door re-exports what is below; only what hosts the library goes through it
    {"adapters"},
    {"app"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
HOSTS = {"tables", "adapters", "app", "cli"}  # where third parties and imports inside functions are allowed
FOUNDATIONS = {"torch", "tqdm"}
PICTURES = {"diagnostics/verdict.py"}  # draw with matplotlib, which is imported when a picture is asked for


@functools.cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def part(path):
    """The top-level name a file belongs to: posteriors/precision.py -> posteriors."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def draws(path):
    """Whether it may import matplotlib inside a function."""
    return path.relative_to(PACKAGE).as_posix() in PICTURES


def module(path):
    """Its dotted name: posteriors/precision.py -> torchngvi.posteriors.precision."""
    parts = ("torchngvi", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports(path):
    return list(found_imports(path))


def found_imports(path):
    """Every imported module, absolute, with its node; `from a import b` gives a.b where that is a module."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: write imports in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                yield (name if name in MODULES else node.module), node


MODULES = {module(path): path for path in FILES}


def inner(path):
    """The modules of the package it imports."""
    return {name for name, _ in imports(path) if name.split(".")[0] == "torchngvi"}


def test_the_package_is_found():
    assert {"torchngvi", "torchngvi.interfaces", "torchngvi.posteriors.precision"} <= set(MODULES)


def test_every_file_has_a_level():
    assert {part(path) for path in FILES} <= set(LEVEL)


def test_imports_go_downwards():
    """And parts of one level never import one another, except within their own folder."""
    for path in FILES:
        for name in inner(path):
            target = name.split(".")[1] if "." in name else "__init__"
            below = LEVEL[target] < LEVEL[part(path)]
            assert below or target == part(path), f"{module(path)} imports {name}: not below it"


def test_no_cycles():
    """Repeatedly take away the modules that import nothing left; nothing may remain."""
    graph = {name: inner(path) - {name} for name, path in MODULES.items()}
    while leaves := {name for name, targets in graph.items() if not targets & set(graph)}:
        graph = {name: targets for name, targets in graph.items() if name not in leaves}
    assert not graph, f"these import one another: {sorted(graph)}"


def test_no_imports_inside_functions():
    for path in FILES:
        if part(path) in HOSTS or draws(path):
            continue
        for function in ast.walk(tree(path)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                hidden = [node for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom)]
                assert not hidden, f"{module(path)}:{hidden[0].lineno} imports inside a function"


def test_imports_by_name():
    """The front door, old names and the table of engines import modules by name; nothing else does."""
    late = {"__init__.py", "renamed.py", "fitting/fit.py"}
    found = {path.relative_to(PACKAGE).as_posix() for path in FILES if "import_module" in path.read_text("utf-8")}
    assert {name for name in found if name.split("/")[0].removesuffix(".py") not in HOSTS} == late


def test_third_parties():
    """Beside torch and tqdm only in the adapters, the application, and where pictures are drawn."""
    for path in FILES:
        for name, node in imports(path):
            root = name.split(".")[0]
            known = root == "torchngvi" or root in sys.stdlib_module_names or root in FOUNDATIONS
            known = known or (root == "matplotlib" and draws(path))
            assert known or part(path) in HOSTS, f"{module(path)}:{node.lineno} imports {root}"


SPEAKING = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public(path):
    """The module, and its public classes, functions and methods, also nested in classes."""
    yield path.name, tree(path)

    def descend(body, prefix):
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith(
                "_"
            ):
                yield f"{prefix}{node.name}", node
                if isinstance(node, ast.ClassDef):
                    yield from descend(node.body, f"{prefix}{node.name}.")

    yield from descend(tree(path).body, f"{path.name}: ")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstrings(path):
    """Every public module, class and function says what it does."""
    silent = [name for name, node in public(path) if not ast.get_docstring(node)]
    assert not silent


def test_eigenvalues_come_from_one_place():
    """`linalg.eigh` tells where a decomposition failed; torch's own raises, and loses what was done before."""
    raising = {"eigh", "eigvalsh", "eig", "eigvals", "pinv"}
    for path in FILES:
        if part(path) in HOSTS | {"numerics"}:
            continue
        for node in ast.walk(tree(path)):
            direct = isinstance(node, ast.Attribute) and node.attr in raising and isinstance(node.value, ast.Attribute)
            assert not direct, f"{module(path)}:{node.lineno} calls torch.linalg.{node.attr}"


# what can be read in one sitting; a function is counted without its docstring
LINES_OF_A_CLASS, LINES_OF_A_FUNCTION, ARGUMENTS = 300, 60, 7
ARGUMENTS_OF_A_FUNCTION = 11  # of a public one, which is called with a few of them by name

# what is larger all the same, and why; what has become smaller leaves the list
LARGER = {
    "fitting/fit.py: fit": (
        "keywords that stand alone, as those of the minimisers of SciPy: a user sets one or two of them by name, and "
        "objects that group them would have to be found and imported first; what can be combined is a Criterion, stop="
    ),
    "optim/optimizer.py: NaturalGradientVI.__init__": "one argument an axis, and the scale of a closure's loss",
    "models/generalized_linear.py: GeneralizedLinear.__init__": (
        "X, y and the keywords that every package for such models has: family, weights, offset, prior, classes"
    ),
    "models/softmax.py: SoftmaxRegression.__init__": "X, y and the same keywords, with the number of nodes",
    "networks/weights.py: NetworkWeights.__init__": "those of torchngvi.network, each of which has a default but two",
    "networks/von.py: VON.__init__": (
        "a posterior, its attachment and the part that is Bayesian in one line, which is what it is for"
    ),
    "methods/__init__.py: AIFVB.__init__": "those of IFVB, and the average",
    "adapters/sklearn/estimators.py: BayesianMixedRegressor.__init__": "searches over settings set each by its name",
    "adapters/sklearn/estimators.py: BayesianMixedClassifier.__init__": "the same",
    "tables/effects.py: Asked.__init__": "what three methods of a result take by keywords, each with a default there",
    "tables/integrated.py: Integrated": "one log joint: nodes, modes, gradients and draws share the blocks of its rows",
    "tables/model.py: MixedModel.__init__": "X, y, groups and the keywords that every package for such models has",
    "tables/result.py: TableResult": "what a person asks of a fit: short methods, most of their lines say what they do",
    "adapters/gpytorch/training.py: train_svgp_in_batches": (
        "keywords that stand alone, as those of fit, with the processes"
    ),
}


def length(node):
    """The lines of a class, or of a function without its docstring."""
    lines = node.end_lineno - node.lineno + 1
    if isinstance(node, ast.ClassDef) or ast.get_docstring(node) is None:
        return lines
    return lines - (node.body[0].end_lineno - node.body[0].lineno + 1)


def arguments(function):
    """Those that a caller may give to a method."""
    given = function.args
    return len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1


def definitions(body, prefix=""):
    """Every class and function with its dotted name, nested ones too."""
    for node in body:
        if isinstance(node, SPEAKING):
            yield f"{prefix}{node.name}", node
            yield from definitions(node.body, f"{prefix}{node.name}.")
        elif hasattr(node, "body"):
            yield from definitions(node.body, prefix)


def too_large(path):
    """What in a file is larger than it should be: its name, and by how much."""
    file = str(path.relative_to(PACKAGE))
    for name, node in definitions(tree(path).body):
        kind, most = (
            ("class", LINES_OF_A_CLASS) if isinstance(node, ast.ClassDef) else ("function", LINES_OF_A_FUNCTION)
        )
        if length(node) > most:
            yield f"{file}: {name}", f"a {kind} of {length(node)} lines, at most {most}"
        if node.name == "__init__" and arguments(node) > ARGUMENTS:
            yield f"{file}: {name}", f"{arguments(node)} arguments, at most {ARGUMENTS}"
        public = isinstance(node, ast.FunctionDef) and "." not in name and not name.startswith("_")
        if public and arguments(node) + 1 > ARGUMENTS_OF_A_FUNCTION:
            yield f"{file}: {name}", f"{arguments(node) + 1} arguments, at most {ARGUMENTS_OF_A_FUNCTION}"


def test_sizes():
    """Classes, functions and constructors that can be read in one sitting."""
    found = {name: size for path in FILES for name, size in too_large(path)}
    assert not {name: size for name, size in found.items() if name not in LARGER}, "split it, or group the arguments"
    small = set(LARGER) - set(found)
    assert not small, f"no longer too large, so take it off the list: {sorted(small)}"


def test_sizes_are_measured(tmp_path, monkeypatch):
    """A class of 301 lines, a function of 61 without its docstring, and calls of too many arguments are found."""
    long = "\n".join(["class Long:", *["    x = 1"] * 300])
    function = "\n".join(["def f():", '    """Two', '    lines."""', *["    x = 1"] * 60])
    many = "class Many:\n    def __init__(self, a, b, /, c, *, d, e, f, g, h): ..."
    nodes = dict(definitions(ast.parse("\n".join([long, function, many])).body))
    assert length(nodes["Long"]) == 301
    assert length(nodes["f"]) == 61
    assert arguments(nodes["Many.__init__"]) == 8
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    names = ", ".join(f"a{k}" for k in range(12))
    (tmp_path / "wide.py").write_text(f"def f({names}): ...\ndef _g({names}): ...\ndef h(a): ...\n")
    assert dict(too_large(tmp_path / "wide.py")) == {"wide.py: f": "12 arguments, at most 11"}


def import_house():
    """The functions that count, of a clone."""
    return pytest.importorskip("benchmarks.house", reason="needs the benchmarks of a clone: run python -m pytest there")


@functools.cache
def count_house():
    return import_house().count(PACKAGE.parent)


@pytest.mark.parametrize("what", CEILINGS)
def test_the_house_is_no_larger(what):
    import_house()
    assert count_house()[what] <= CEILINGS[what], (
        "take as much away as was added, python benchmarks/house.py shows where; or, for a new part, raise the ceiling "
        "and say in the commit what the reader gets"
    )


@pytest.mark.parametrize("name", FILES_OF_A_PATH)
def test_a_path_runs_no_more_files(name):
    house, golden = import_house(), importlib.import_module("benchmarks.golden")
    for package in golden.NEEDED.get(name, ()):
        pytest.importorskip(package)
    with golden.fix_settings():
        found = house.trace_call(golden.prepare_case(golden.SEVEN[name]), PACKAGE)
    assert 0 < found["files run"] <= FILES_OF_A_PATH[name]


def test_all_paths_have_a_ceiling():
    import_house()
    assert list(FILES_OF_A_PATH) == list(importlib.import_module("benchmarks.golden").SEVEN)


def test_the_house_is_counted(tmp_path):
    """A tree of which every count is known; names of others, defaults that are usual and bare docstrings count less."""
    house = import_house()
    package = tmp_path / "torchngvi"
    (package / "adapters" / "host").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (package / "__init__.py").write_text('from torchngvi.parts import Shown\n\n__all__ = ["Shown"]\n')
    (package / "adapters" / "host" / "one.py").write_text("A, B = 3, -4.0\nGRID = (1, 5)\nC: int = 10**6\nD = True\n")
    (package / "parts.py").write_text(
        '''"""Parts."""

import ast


class Shown:
    """A class."""

    size = 7

    def seen(self, a=3, b=1):
        """What is
        public."""
        return 2 * a + 9 - (lambda c=8: c + 0.25)()  # one

    def _hidden(self):
        """A line."""


def alone():
    """Two
    lines."""
'''
    )
    (tmp_path / "tests" / "test_it.py").write_text("class TestIt:\n    def test_a(self): ...\n\ndef test_b(): ...\n")
    (tmp_path / "docs" / "old").mkdir(parents=True)
    (tmp_path / "docs" / "conf.py").write_text('exclude_patterns = ["old"]\n')
    (tmp_path / "docs" / "one.md").write_text("# Two words\n")
    (tmp_path / "docs" / "old" / "two.md").write_text("Old\n")
    found = house.count(tmp_path)
    expected = {
        "package lines": 29,
        "package files": 3,
        "package lines of code": 11,
        "docstring lines of what is not exported": 3,
        "numeric constants at module level": 3,
        "numbers in tuples and tables at module level": 2,
        "numeric constants of classes": 1,
        "numbers as defaults": 2,
        "numbers in bodies": 3,
        "names of the front door": 1,
        "test lines": 4,
        "test functions": 2,
        "site pages": 1,
        "site words": 3,
    }
    assert {name: found[name] for name in expected} == expected
    assert {name: room["files"] for name, room in house.count_rooms(tmp_path).items()} == {"adapters/host": 1, "top": 2}
