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
def parse(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def list_nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file."""
    return list(ast.walk(parse(path)))


def find_files(tree: Path, folder: str, pattern: str = "*.py") -> list[Path]:
    """The files of a folder of the checkout, without caches."""
    return sorted(path for path in (tree / folder).rglob(pattern) if "__pycache__" not in path.parts)


def find_pages(tree: Path) -> list[Path]:
    """The written pages of the site: those of docs/ that its configuration does not exclude."""
    docs = tree / "docs"
    bound = find_bindings(parse(docs / "conf.py").body) if docs.exists() else ()
    excluded = [ast.literal_eval(value) for target, value in bound if getattr(target, "id", "") == "exclude_patterns"]
    folders = {name for names in excluded for name in names}
    return [path for path in find_files(tree, "docs", "*.md") if path.relative_to(docs).parts[0] not in folders]


def count_lines(paths: list[Path]) -> int:
    """The lines of files."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def find_room(inside: Path) -> str:
    """The room of a file, by its path in the package."""
    folders = inside.parts[:-1]
    return "/".join(folders[: 2 if folders[:1] == ("adapters",) else 1]) or "top"


def find_docstring(node: Any) -> ast.Expr | None:
    """The docstring of a module, a class or a function, as a node; None where it has none."""
    first = node.body[0] if node.body else None
    value = first.value if isinstance(first, ast.Expr) else None
    return first if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def find_span(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


@functools.cache
def count_code_lines(path: Path) -> int:
    """The lines without docstrings, blank lines, comments and imports."""
    left_out: set[int] = set()
    for node in list_nodes(path):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(find_span(node))
        elif isinstance(node, DOCUMENTED) and (text := find_docstring(node)):
            left_out.update(find_span(text))
    text = path.read_text(encoding="utf-8").splitlines()
    return sum(n not in left_out and bool(x.strip()) and x.lstrip()[0] != "#" for n, x in enumerate(text, 1))


def read_exports(module: ast.Module) -> set[str]:
    """The names of `__all__`, also where it takes them from another constant of the module."""
    bound = {getattr(target, "id", ""): value for target, value in find_bindings(module.body)}
    found = list(ast.walk(bound.get("__all__", ast.Tuple())))
    used = [bound[node.id] for node in found if isinstance(node, ast.Name) and node.id in bound]
    texts = [node.value for value in (*found, *used) for node in ast.walk(value) if isinstance(node, ast.Constant)]
    return {text for text in texts if isinstance(text, str) and text.isidentifier()}


def find_exports(tree: Path) -> set[tuple[Path, str]]:
    """The names that some `__all__` exports, each with the file that defines it."""
    modules = {}
    for path in find_files(tree, PACKAGE):
        parts = path.relative_to(tree).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    imported = {path: dict(find_imports(path)) for path in modules.values()}

    def find_definition(path: Path, name: str, seen: tuple[Path, ...] = ()) -> tuple[Path, str]:
        """Follow an import to where the name is defined."""
        source, original = imported[path].get(name, ("", name))
        if source not in modules or modules[source] in seen:
            return path, name
        return find_definition(modules[source], original, (*seen, path))

    return {find_definition(path, name) for path in modules.values() for name in read_exports(parse(path))}


def find_imports(path: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    """The names that a module imports from others, each with the module and its name there."""
    for node in list_nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((each.asname or each.name, (node.module, each.name)) for each in node.names)


def count_hidden_docstrings(tree: Path) -> int:
    """The lines of docstrings of functions and classes that no `__all__` exports, and of their members.

    A public member of an exported class counts as exported, and so do its special methods.
    """
    public = find_exports(tree)

    def count_hidden(node: ast.AST, shown: Callable[[str], bool]) -> int:
        total = 0
        for each in ast.iter_child_nodes(node):
            if not isinstance(each, FUNCTION | ast.ClassDef):
                total += count_hidden(each, shown) if isinstance(each, ast.stmt) else 0
                continue
            seen, text = shown(each.name), find_docstring(each)
            total += 0 if seen or text is None else len(find_span(text))
            within = seen and isinstance(each, ast.ClassDef)
            total += count_hidden(each, (lambda name: not re.match("_(?!_)", name)) if within else lambda name: False)
        return total

    return sum(
        count_hidden(parse(path), lambda name, path=path: (path, name) in public) for path in find_files(tree, PACKAGE)
    )


def read_number(node: ast.AST | None) -> float | complex | None:
    """The value of a numeric literal, with its sign; None of anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = read_number(node.operand)
        return value if value is None or isinstance(node.op, ast.UAdd) else -value
    plain = isinstance(node, ast.Constant) and isinstance(node.value, int | float | complex)
    return node.value if plain and not isinstance(node.value, bool) else None


def find_literals(node: ast.AST) -> list[float | complex]:
    """All numeric literals within a node, each with its sign."""
    if (value := read_number(node)) is not None:
        return [value]
    return [value for each in ast.iter_child_nodes(node) for value in find_literals(each)]


def find_bindings(body: list[ast.stmt]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The targets and values that a module or a class binds, also within its `if` and `try`."""
    for node in body:
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield node.target, node.value
        elif not isinstance(node, FUNCTION | ast.ClassDef):
            for part in ("body", "orelse", "handlers", "finalbody"):
                yield from find_bindings(getattr(node, part, []))


def is_number(node: ast.expr) -> bool:
    """Whether an expression is a number: a literal, or an operation with literals, as 10**6."""
    if isinstance(node, ast.BinOp):
        return is_number(node.left) and is_number(node.right)
    return read_number(node) is not None


def count_constants(target: ast.expr, value: ast.expr) -> int:
    """How many names are bound to a number; a tuple of names is unpacked."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return sum(map(count_constants, target.elts, value.elts))
    return int(is_number(value))


def count_numbers(paths: list[Path]) -> Counts:
    """The numeric literals of files, by where they stand."""
    found: Counter[str] = Counter()
    for path in paths:
        module = parse(path)
        for target, value in find_bindings(module.body):
            found["numeric constants at module level"] += (bound := count_constants(target, value))
            found["numbers in tuples and tables at module level"] += 0 if bound else len(find_literals(value))
        classes = [node for node in list_nodes(path) if isinstance(node, ast.ClassDef)]
        found["numeric constants of classes"] += sum(
            count_constants(*each) for c in classes for each in find_bindings(c.body)
        )
        functions = [node for node in list_nodes(path) if isinstance(node, FUNCTION)]
        within = {id(inner) for each in functions for inner in ast.walk(each) if inner is not each}
        for node in list_nodes(path):
            if isinstance(node, FUNCTION | ast.Lambda):
                defaults = [each for each in (*node.args.defaults, *node.args.kw_defaults) if each is not None]
                found["numbers as defaults"] += sum(x not in USUAL for each in defaults for x in find_literals(each))
            if isinstance(node, FUNCTION) and id(node) not in within:
                found["numbers in bodies"] += sum(x not in USUAL for each in node.body for x in find_literals(each))
    return dict(found)


def count_rooms(tree: Path) -> dict[str, Counts]:
    """Lines, lines of code and files of each room."""
    rooms: dict[str, list[Path]] = {}
    for path in find_files(tree, PACKAGE):
        rooms.setdefault(find_room(path.relative_to(tree / PACKAGE)), []).append(path)
    return {
        name: {"lines": count_lines(paths), "code": sum(map(count_code_lines, paths)), "files": len(paths)}
        for name, paths in sorted(rooms.items())
    }


def count(tree: Path = TREE) -> Counts:
    """All that is counted of a checkout, but for its rooms."""
    package, tests, benchmarks = (find_files(tree, folder) for folder in (PACKAGE, "tests", "benchmarks"))
    pages = find_pages(tree)
    return {
        "package lines": count_lines(package),
        "package files": len(package),
        "package lines of code": sum(map(count_code_lines, package)),
        "docstring lines of what is not exported": count_hidden_docstrings(tree),
        **count_numbers(package),
        "names of the front door": len(read_exports(parse(tree / PACKAGE / "__init__.py"))),
        "test lines": count_lines(tests),
        "test files": len(tests),
        "test functions": sum(len(TEST.findall(path.read_text(encoding="utf-8"))) for path in tests),
        "benchmark lines": count_lines(benchmarks),
        "benchmark files": len(benchmarks),
        "example lines": count_lines(find_files(tree, "examples")),
        "site pages": len(pages),
        "site words": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
    }


def make_environment(tree: Path) -> dict[str, str]:
    """The environment in which a checkout imports itself, on one thread."""
    return {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}


def count_cases(tree: Path) -> int:
    """The cases that pytest collects in a checkout."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    done = subprocess.run(command, cwd=tree, env=make_environment(tree), capture_output=True, text=True, check=False)
    if (found := re.search(r"(\d+)(?:/\d+)? tests? (?:\([^)]*\) )?collected", done.stdout)) is None:
        raise SystemExit(f"pytest has collected nothing:\n{done.stdout[-500:]}{done.stderr[-500:]}")
    return int(found[1])


def trace_call(run: Callable[[], Any], package: Path) -> Counts:
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
            now = find_room(Path(name[len(start) :]))
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
        "their lines": count_lines([Path(name) for name in running]),
        "depth": deepest,
        "crossings": crossings,
        "files imported": len(imported),
    }


def trace_path(name: str) -> Counts:
    """One of the seven paths in this process, in the checkout that it imports."""
    from importlib.util import find_spec

    import golden

    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    with golden.fix_settings():
        return trace_call(golden.prepare_case(golden.SEVEN[name]), Path(spec.origin).parent)


def trace_paths(tree: Path) -> dict[str, Counts]:
    """Each of the seven in a process of its own, with this tree's problems."""
    names = json.loads(
        subprocess.run([sys.executable, __file__, "--trace", ""], capture_output=True, check=True).stdout
    )
    found = {}
    for name in names:
        command = [sys.executable, __file__, "--trace", name]
        done = subprocess.run(command, cwd=tree, env=make_environment(tree), stdout=subprocess.PIPE, check=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(tree: Path, cases: bool, paths: bool) -> dict[str, Any]:
    """All that is asked of a checkout."""
    found: dict[str, Any] = {"counts": count(tree), "rooms": count_rooms(tree)}
    if cases:
        found["counts"]["test cases"] = count_cases(tree)
    if paths:
        found["paths"] = trace_paths(tree)
    return found


def print_table(title: str, now: dict[str, Counts], before: dict[str, Counts] | None) -> None:
    """Print a row for each name, with the numbers of the other checkout before those of this one."""
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

        print(json.dumps(trace_path(given.trace) if given.trace else list(golden.SEVEN)))
        return
    now, before = measure(TREE, given.cases, given.paths), {}
    if given.before is not None:
        stored = given.before.is_file()
        before = (
            json.loads(given.before.read_text())
            if stored
            else measure(given.before.resolve(), given.cases, given.paths)
        )
    counts = {name: {"": value} for name, value in now["counts"].items()}
    was = {name: {"": value} for name, value in before.get("counts", {}).items()}
    print_table("the house", counts, was or None)
    print_table("rooms", now["rooms"], before.get("rooms"))
    if given.paths:
        print_table("paths", now["paths"], before.get("paths"))
    if given.json is not None:
        given.json.write_text(json.dumps(now, indent=1) + "\n")


if __name__ == "__main__":
    main()
