"""How large the house is: lines, files, constants, names and tests by room, and what the seven ways into it run.

    python benchmarks/house.py [--before CHECKOUT] [--json FILE] [--cases] [--paths]

It reads the source alone and takes a few seconds.  A room is a folder of the package, one of `adapters` for each host;
what lies in no folder is the room "top".  ``--before`` is another checkout, or a file that ``--json`` has written, and
gives a column of its own.  ``--cases`` lets pytest collect the tests and counts them.  ``--paths`` runs the seven
problems of `benchmarks/golden.py`, each in a process of its own, and counts the files of the package whose functions
run, their lines, the largest depth of nested functions of the package, the calls from one room into another, and
the files that have been imported at the end.
"""

import argparse
import ast
import functools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TREE = Path(__file__).resolve().parents[1]
PACKAGE = "torchngvi"
USUAL = (0, 1, -1, 2, 0.5)  # literals that are no settings, which are not counted as defaults and in bodies
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTED = FUNCTION | ast.ClassDef | ast.Module
TEST = re.compile(r"^ *(?:async )?def test_", re.MULTILINE)
Counts = dict[str, int]


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file."""
    return list(ast.walk(parsed(path)))


def files(tree: Path, folder: str, pattern: str = "*.py") -> list[Path]:
    """The files of a folder of the checkout, without caches."""
    return sorted(path for path in (tree / folder).rglob(pattern) if "__pycache__" not in path.parts)


def lines(paths: list[Path]) -> int:
    """The lines of files."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def room(inside: Path) -> str:
    """The room of a file, by its path in the package."""
    folders = inside.parts[:-1]
    return "/".join(folders[: 2 if folders[:1] == ("adapters",) else 1]) or "top"


def docstring(node: Any) -> ast.Expr | None:
    """The docstring of a module, a class or a function, as a node; None where it has none."""
    first = node.body[0] if node.body else None
    value = first.value if isinstance(first, ast.Expr) else None
    return first if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def span(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


@functools.cache
def lines_of_code(path: Path) -> int:
    """The lines without docstrings, blank lines, comments and imports."""
    left_out: set[int] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(span(node))
        elif isinstance(node, DOCUMENTED) and (text := docstring(node)):
            left_out.update(span(text))
    text = path.read_text(encoding="utf-8").splitlines()
    return sum(n not in left_out and bool(x.strip()) and x.lstrip()[0] != "#" for n, x in enumerate(text, 1))


def listed(module: ast.Module) -> set[str]:
    """The names of `__all__`."""
    for node in module.body:
        if isinstance(node, ast.Assign) and any(getattr(each, "id", "") == "__all__" for each in node.targets):
            return {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
    return set()


def exported(tree: Path) -> set[tuple[Path, str]]:
    """The names that some `__all__` exports, each with the file that defines it."""
    modules = {}
    for path in files(tree, PACKAGE):
        parts = path.relative_to(tree).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    imported = {path: dict(imports(path)) for path in modules.values()}

    def defined(path: Path, name: str, seen: tuple[Path, ...] = ()) -> tuple[Path, str]:
        """Follow an import to where the name is defined."""
        source, original = imported[path].get(name, ("", name))
        if source not in modules or modules[source] in seen:
            return path, name
        return defined(modules[source], original, (*seen, path))

    return {defined(path, name) for path in modules.values() for name in listed(parsed(path))}


def imports(path: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    """The names that a module imports from others, each with the module and its name there."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((each.asname or each.name, (node.module, each.name)) for each in node.names)


def hidden_docstrings(tree: Path) -> int:
    """The lines of docstrings of functions and classes that no `__all__` exports, and of their members.

    A public member of an exported class counts as exported, and so do its special methods.
    """
    public = exported(tree)

    def hidden(node: ast.AST, shown: Callable[[str], bool]) -> int:
        total = 0
        for each in ast.iter_child_nodes(node):
            if not isinstance(each, FUNCTION | ast.ClassDef):
                total += hidden(each, shown) if isinstance(each, ast.stmt) else 0
                continue
            seen, text = shown(each.name), docstring(each)
            total += 0 if seen or text is None else len(span(text))
            within = seen and isinstance(each, ast.ClassDef)
            total += hidden(each, (lambda name: not re.match("_(?!_)", name)) if within else lambda name: False)
        return total

    return sum(hidden(parsed(path), lambda name, path=path: (path, name) in public) for path in files(tree, PACKAGE))


def number(node: ast.AST | None) -> float | complex | None:
    """The value of a numeric literal, with its sign; None of anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = number(node.operand)
        return value if value is None or isinstance(node.op, ast.UAdd) else -value
    plain = isinstance(node, ast.Constant) and isinstance(node.value, int | float | complex)
    return node.value if plain and not isinstance(node.value, bool) else None


def literals(node: ast.AST) -> list[float | complex]:
    """All numeric literals within a node, each with its sign."""
    if (value := number(node)) is not None:
        return [value]
    return [value for each in ast.iter_child_nodes(node) for value in literals(each)]


def assigned(body: list[ast.stmt]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The targets and values that a module or a class binds, also within its `if` and `try`."""
    for node in body:
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield node.target, node.value
        elif not isinstance(node, FUNCTION | ast.ClassDef):
            for part in ("body", "orelse", "handlers", "finalbody"):
                yield from assigned(getattr(node, part, []))


def arithmetic(node: ast.expr) -> bool:
    """Whether an expression is a number: a literal, or an operation with literals, as 10**6."""
    if isinstance(node, ast.BinOp):
        return arithmetic(node.left) and arithmetic(node.right)
    return number(node) is not None


def constants(target: ast.expr, value: ast.expr) -> int:
    """How many names are bound to a number; a tuple of names is unpacked."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return sum(map(constants, target.elts, value.elts))
    return int(arithmetic(value))


def count_numbers(paths: list[Path]) -> Counts:
    """The numeric literals of files, by where they stand."""
    found: Counter[str] = Counter()
    for path in paths:
        module = parsed(path)
        for target, value in assigned(module.body):
            found["numeric constants at module level"] += (bound := constants(target, value))
            found["numbers in tuples and tables at module level"] += 0 if bound else len(literals(value))
        classes = [node for node in nodes(path) if isinstance(node, ast.ClassDef)]
        found["numeric constants of classes"] += sum(constants(*each) for c in classes for each in assigned(c.body))
        functions = [node for node in nodes(path) if isinstance(node, FUNCTION)]
        within = {id(inner) for each in functions for inner in ast.walk(each) if inner is not each}
        for node in nodes(path):
            if isinstance(node, FUNCTION | ast.Lambda):
                defaults = [each for each in (*node.args.defaults, *node.args.kw_defaults) if each is not None]
                found["numbers as defaults"] += sum(x not in USUAL for each in defaults for x in literals(each))
            if isinstance(node, FUNCTION) and id(node) not in within:
                found["numbers in bodies"] += sum(x not in USUAL for each in node.body for x in literals(each))
    return dict(found)


def count_rooms(tree: Path) -> dict[str, Counts]:
    """Lines, lines of code and files of each room."""
    rooms: dict[str, list[Path]] = {}
    for path in files(tree, PACKAGE):
        rooms.setdefault(room(path.relative_to(tree / PACKAGE)), []).append(path)
    return {
        name: {"lines": lines(paths), "code": sum(map(lines_of_code, paths)), "files": len(paths)}
        for name, paths in sorted(rooms.items())
    }


def count(tree: Path = TREE) -> Counts:
    """All that is counted of a checkout, but for its rooms."""
    package, tests, benchmarks = (files(tree, folder) for folder in (PACKAGE, "tests", "benchmarks"))
    pages = files(tree, "docs", "*.md")
    return {
        "package lines": lines(package),
        "package files": len(package),
        "package lines of code": sum(map(lines_of_code, package)),
        "docstring lines of what is not exported": hidden_docstrings(tree),
        **count_numbers(package),
        "names of the front door": len(listed(parsed(tree / PACKAGE / "__init__.py"))),
        "test lines": lines(tests),
        "test files": len(tests),
        "test functions": sum(len(TEST.findall(path.read_text(encoding="utf-8"))) for path in tests),
        "benchmark lines": lines(benchmarks),
        "benchmark files": len(benchmarks),
        "example lines": lines(files(tree, "examples")),
        "docs pages": len(pages),
        "docs words": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
    }


def surroundings(tree: Path) -> dict[str, str]:
    """The environment in which a checkout imports itself, on one thread."""
    return {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}


def count_cases(tree: Path) -> int:
    """The cases that pytest collects in a checkout."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    done = subprocess.run(command, cwd=tree, env=surroundings(tree), capture_output=True, text=True, check=False)
    if (found := re.search(r"(\d+)(?:/\d+)? tests? (?:\([^)]*\) )?collected", done.stdout)) is None:
        raise SystemExit(f"pytest has collected nothing:\n{done.stdout[-500:]}{done.stderr[-500:]}")
    return int(found[1])


def traced(run: Callable[[], Any], package: Path) -> Counts:
    """What of a package runs in a call, apart from the imports meanwhile."""
    running: set[str] = set()
    stack: list[str] = []  # the rooms of the functions of the package that are running now
    importing = deepest = crossings = 0
    start = f"{package}{os.sep}"

    def watch(frame: Any, event: str, _: Any) -> None:
        nonlocal importing, deepest, crossings
        name = frame.f_code.co_filename
        if event not in ("call", "return"):
            return
        if name.startswith("<frozen importlib"):
            importing += 1 if event == "call" else -1
        elif importing or not name.startswith(start):
            return
        elif event == "call":
            running.add(name)
            now = room(Path(name[len(start) :]))
            crossings += bool(stack) and stack[-1] != now
            stack.append(now)
            deepest = max(deepest, len(stack))
        elif stack:
            stack.pop()

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    imported = [name for name in sys.modules if name.partition(".")[0] == PACKAGE]
    return {
        "files run": len(running),
        "their lines": lines([Path(name) for name in running]),
        "depth": deepest,
        "crossings": crossings,
        "files imported": len(imported),
    }


def trace(name: str) -> Counts:
    """One of the seven paths in this process, in the checkout that it imports."""
    from importlib.util import find_spec

    import golden

    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    with golden.alone():
        return traced(golden.ready(golden.SEVEN[name]), Path(spec.origin).parent)


def trace_all(tree: Path) -> dict[str, Counts]:
    """Each of the seven in a process of its own, with this tree's problems."""
    names = json.loads(
        subprocess.run([sys.executable, __file__, "--trace", ""], capture_output=True, check=True).stdout
    )
    found = {}
    for name in names:
        command = [sys.executable, __file__, "--trace", name]
        done = subprocess.run(command, cwd=tree, env=surroundings(tree), stdout=subprocess.PIPE, check=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(tree: Path, cases: bool, paths: bool) -> dict[str, Any]:
    """All that is asked of a checkout."""
    found: dict[str, Any] = {"counts": count(tree), "rooms": count_rooms(tree)}
    if cases:
        found["counts"]["test cases"] = count_cases(tree)
    if paths:
        found["paths"] = trace_all(tree)
    return found


def show(title: str, now: dict[str, Counts], before: dict[str, Counts] | None) -> None:
    """A table with a row for each name, and beside each number that of the other checkout."""
    columns = list(next(iter(now.values())))
    print(f"\n{title:<42}" + "".join(f"{column:>{18 if before else 16}}" for column in columns))
    for name in [*now, *(other for other in before or {} if other not in now)]:
        cells = []
        for column in columns:
            new = f"{now.get(name, {}).get(column, 0):,}"
            old = "" if before is None else f"{before.get(name, {}).get(column, 0):,}"
            cells.append(f"{new:>16}" if before is None else f"{f'{old} -> {new}':>18}")
        print(f"{name:<42}{''.join(cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout, which is only read, or what --json has written")
    parser.add_argument("--json", type=Path, help="a file for the numbers of this checkout")
    parser.add_argument("--cases", action="store_true", help="let pytest collect the tests, which is slow")
    parser.add_argument("--paths", action="store_true", help="trace the seven paths")
    parser.add_argument("--trace", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trace is not None:
        import golden

        print(json.dumps(trace(given.trace) if given.trace else list(golden.SEVEN)))
        return
    now, before = measured(TREE, given.cases, given.paths), {}
    if given.before is not None:
        stored = given.before.is_file()
        before = (
            json.loads(given.before.read_text())
            if stored
            else measured(given.before.resolve(), given.cases, given.paths)
        )
    counts = {name: {"": value} for name, value in now["counts"].items()}
    was = {name: {"": value} for name, value in before.get("counts", {}).items()}
    show("the house", counts, was or None)
    show("rooms", now["rooms"], before.get("rooms"))
    if given.paths:
        show("paths", now["paths"], before.get("paths"))
    if given.json is not None:
        given.json.write_text(json.dumps(now, indent=1) + "\n")


if __name__ == "__main__":
    main()
