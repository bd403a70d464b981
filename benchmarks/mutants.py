"""Errors planted in the parts of the library, one at a time, and whether the check of the part finds each.

    python benchmarks/mutants.py [NAME ...] [--each 2] [--json FILE]
    python benchmarks/mutants.py --against benchmarks/mutants.json

A NAME is a kind (rule, estimator, metric, ...), a part (Retraction) or a file or folder (torchngvi/rules).  The parts
and the check of each are those of `tests/core/test_conformance.py`, with its rows in `test_printed_values.py`; a base
class is judged by the checks of the parts that derive from it.  Mutated are the methods of the class and the functions
of its file that it uses: a sign, an operator, a numeric literal, a comparison, or `and` for `or`.  A mutant is drawn by
the text of its function, so that the same function has the same mutants in whichever file it stands.  Nothing is
written into the tree: each runs in a process that is forked from this one, with the code of that function replaced.

``--against`` runs those of an earlier record that were killed, found again by the text of the function or else of the
statement, and ends with the status 1 where one of them lives now.  In the record of ``--json`` a survivor may be given
a "reason" by hand, which the next record takes over.
"""

import argparse
import ast
import copy
import functools
import gc
import hashlib
import json
import os
import resource
import signal
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

TREE = Path(__file__).resolve().parents[1]
PACKAGE = TREE / "torchngvi"
SECONDS = 60  # after which a mutant that runs on counts as killed
JUDGES = 3  # parts whose checks judge a base class
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
SWAPPED: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


class Part(NamedTuple):
    """A class of the library, and the calls that check it."""

    kind: str
    name: str
    path: Path
    checks: tuple[Callable[[], None], ...]


class Mutant(NamedTuple):
    """One change of a function: the place in its syntax tree, and what it is to a reader."""

    part: str
    key: str  # of the function's text and the change
    function: str
    before: str
    after: str
    path: Path
    line: int  # of the function
    place: int  # among the nodes of the function that can be changed


def find_parts() -> dict[str, Part]:
    """Every part and its bases, by name, with its checks in `test_conformance` and `test_printed_values`."""
    home = next((TREE / "tests").rglob("test_conformance.py"))
    sys.path[:0] = [str(TREE), *{str(path.parent) for path in (TREE / "tests").rglob("*.py")}]
    import test_conformance as conformance
    import test_printed_values as printed
    import torch

    torch.set_num_threads(1)
    assert Path(conformance.__file__) == home
    found: dict[str, Part] = {}
    judges: dict[type, list[tuple[str, Callable[[], None], tuple[Callable[[], None], ...]]]] = {}

    def list_rows(part: str) -> tuple[Callable[[], None], ...]:
        return (functools.partial(printed.check_values, part),) if part in printed.ROWS else ()

    for check, table, _ in conformance.PRODUCT:
        kind = check.__name__.removeprefix("check_").partition("_of")[0]
        for cls, factories in sorted(table.items(), key=lambda item: item[0].__name__):
            calls = tuple(functools.partial(check, factory) for factory in factories)
            name, rows = f"{kind}: {cls.__name__}", list_rows(f"{kind}: {cls.__name__}")
            if name in found:  # of two parts of one name
                name = f"{kind}: {cls.__module__.rpartition('.')[2]}.{cls.__name__}"
            found[name] = Part(kind, cls.__name__, find_source(cls), rows + calls)
            for base in cls.__mro__[1:]:
                if base.__module__.startswith("torchngvi") and find_source(base) != find_source(cls):
                    judges.setdefault(base, []).append((kind, calls[0], rows))
    known = {(part.name, part.path) for part in found.values()}
    for base, calls in judges.items():
        if (base.__name__, find_source(base)) not in known:
            kind = calls[0][0]
            name = f"{kind}: {base.__name__}"
            own = list_rows(name) + tuple(each for _, _, rows in calls for each in rows)
            checks = own + tuple(call for _, call, _ in calls[:JUDGES])
            found[name] = Part(kind, base.__name__, find_source(base), checks)
    return found


def find_source(cls: type) -> Path:
    """The file of a class."""
    return Path(sys.modules[cls.__module__].__file__ or "")


@functools.cache
def parse_module(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def find_functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions and methods that are nested in no other, by qualified name."""
    for node in body:
        if isinstance(node, FUNCTION):
            yield f"{prefix}{node.name}", node  # type: ignore[misc]
        elif isinstance(node, ast.ClassDef):
            yield from find_functions(node.body, f"{prefix}{node.name}.")


def find_scope(part: Part) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The methods of a class, and the functions of its file that it uses, directly or not."""
    everything = dict(find_functions(parse_module(part.path).body))
    mine = {name for name in everything if name.startswith(f"{part.name}.")}
    left = list(mine)
    while left:
        for node in ast.walk(everything[left.pop()]):
            if isinstance(node, ast.Name) and node.id in everything and node.id not in mine:
                mine.add(node.id)
                left.append(node.id)
    yield from ((name, node) for name, node in everything.items() if name in mine)


def strip_docstrings(function: ast.FunctionDef) -> ast.FunctionDef:
    """A copy without docstrings."""
    stripped = copy.deepcopy(function)
    for node in ast.walk(stripped):
        if isinstance(node, FUNCTION) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return stripped


def find_places(function: ast.FunctionDef) -> list[tuple[ast.AST, ast.stmt]]:
    """The nodes that can be changed, in the order of the text, each with its statement."""
    found: list[tuple[ast.AST, ast.stmt]] = []

    def visit(node: ast.AST, within: ast.stmt) -> None:
        within = node if isinstance(node, ast.stmt) else within
        number = isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value is not True
        number = number and node.value is not False  # type: ignore[attr-defined]
        minus = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
        operator = getattr(node, "op", None) or (node.ops[0] if isinstance(node, ast.Compare) else None)
        if number or minus or type(operator) in SWAPPED:
            found.append((node, within))
        for each in ast.iter_child_nodes(node):
            visit(each, within)

    for statement in function.body:
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):  # a docstring
            visit(statement, statement)
    return found


def plant_error(node: Any) -> None:
    """Plant the error."""
    if isinstance(node, ast.Constant):
        node.value = node.value + 1 if isinstance(node.value, int) else 1.25 * node.value + (node.value == 0)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node.op = ast.UAdd()
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPPED[type(node.ops[0])]()
    else:
        node.op = SWAPPED[type(node.op)]()


def format_statement(statement: ast.stmt) -> str:
    """The first line of a statement."""
    return ast.unparse(statement).splitlines()[0]


def find_mutants(part: str, path: Path, name: str, function: ast.FunctionDef) -> Iterator[Mutant]:
    """All mutants of a function."""
    text = ast.unparse(strip_docstrings(function))
    for place in range(len(find_places(function))):
        mutated = copy.deepcopy(function)
        node, statement = find_places(mutated)[place]
        before = format_statement(statement)
        plant_error(node)
        after = format_statement(statement)
        key = hashlib.sha256(f"{text}\n{place}\n{ast.unparse(node)}".encode()).hexdigest()[:16]
        yield Mutant(part, key, name, before, after, path, function.lineno, place)


def draw_mutants(name: str, part: Part, each: int) -> list[Mutant]:
    """As many mutants of a part as are asked for, by their keys, and not two of one statement."""
    found: dict[str, Mutant] = {}
    everything = [m for own, function in find_scope(part) for m in find_mutants(name, part.path, own, function)]
    for mutant in sorted(everything, key=lambda mutant: mutant.key):
        if len(found) < each and "Error(" not in mutant.before:  # the words of a refusal
            found.setdefault(mutant.before, mutant)
    return list(found.values())


def replace_code(mutant: Mutant) -> int:
    """Put the code of a mutant in the place of its function, in this process; how many functions had that code."""
    tree = copy.deepcopy(parse_module(mutant.path))
    function = next(f for name, f in find_functions(tree.body) if name == mutant.function and f.lineno == mutant.line)
    plant_error(find_places(function)[mutant.place][0])
    codes = [compile(tree, str(mutant.path), "exec")]
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]

    def is_that_code(code: types.CodeType) -> bool:
        where = (code.co_filename, code.co_qualname, code.co_firstlineno)
        return where == (str(mutant.path), mutant.function, first)

    new = next(code for code in codes if is_that_code(code))
    old = [each for each in gc.get_objects() if isinstance(each, types.FunctionType) and is_that_code(each.__code__)]
    for each in old:
        each.__code__ = new
    return len(old)


def run_forked(work: Callable[[], str]) -> str:
    """What work returns in a process of its own, or "killed" where it raises, ends or does not end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        signal.alarm(SECONDS)
        warnings.simplefilter("ignore")
        try:
            os.write(writing, work().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as result:
        found = result.read()
    os.waitpid(child, 0)
    return found or "killed"


def judge(mutant: Mutant | None, part: Part) -> str:
    """What the checks of a part say: "survived" or "killed"; without a mutant they ought to say the first."""

    def work() -> str:
        import torch

        torch.manual_seed(0)
        if mutant is not None and not replace_code(mutant):
            return "not found"
        for check in part.checks:
            check()
        return "survived"

    return run_forked(work)


def choose_parts(everything: dict[str, Part], names: list[str]) -> dict[str, Part]:
    """The parts of the kinds, names, files and folders that are asked for; all without any."""
    folders = [Path(name).resolve() for name in names if Path(name).exists()]

    def is_asked(part: Part) -> bool:
        return part.kind in names or part.name in names or any(part.path.is_relative_to(each) for each in folders)

    return {name: part for name, part in everything.items() if not names or is_asked(part)}


def make_stand_in(name: str, mutant: Mutant | None, everything: dict[str, Part]) -> Part:
    """For a base class that has merged with another: the first parts of its file judge its mutants, or of its kind."""
    kind = name.partition(":")[0]
    alike = [part for part in everything.values() if part.kind == kind]
    near = [part for part in alike if mutant is not None and part.path == mutant.path] or alike
    return Part(kind, name, PACKAGE, tuple(check for part in near[:JUDGES] for check in part.checks))


def find_again(killed: list[dict[str, str]]) -> Iterator[tuple[Mutant | None, dict[str, str]]]:
    """The mutants of a record as they are now; None where the statement is gone."""
    wanted = {entry["function"].rpartition(".")[2] for entry in killed}
    known: dict[tuple[str, ...], Mutant] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name, function in find_functions(parse_module(path).body):
            for mutant in find_mutants("", path, name, function) if function.name in wanted else ():
                for way in list_ways(name, mutant.key, mutant.before, mutant.after):
                    known.setdefault(way, mutant)
    for entry in killed:
        entered = list_ways(*(entry[name] for name in ("function", "key", "before", "after")))
        found = next((known[way] for way in entered if way in known), None)
        yield found, entry


def list_ways(function: str, key: str, before: str, after: str) -> list[tuple[str, ...]]:
    """How to find a mutant again, the best first: by text and class, by text, by its statement and class, by that."""
    return [(function, key), (key,), (function, before, after), (function.rpartition(".")[2], before, after)]


def format_mutant(mutant: Mutant | dict[str, Any]) -> str:
    part, function, before, after = (
        (mutant[name] if isinstance(mutant, dict) else getattr(mutant, name))
        for name in ("part", "function", "before", "after")
    )
    return f"  {part}, {function}\n    - {before}\n    + {after}"


def read_reasons(record: Path | None) -> dict[str, str]:
    """Why mutants survive, by their keys, as an earlier record says."""
    if record is None or not record.exists():
        return {}
    entries = json.loads(record.read_text(encoding="utf-8"))["mutants"]
    return {entry["key"]: entry["reason"] for entry in entries if "reason" in entry}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="kinds, parts, files or folders; all without any")
    parser.add_argument("--each", type=int, default=2, help="mutants of each part (2)")
    parser.add_argument("--json", type=Path, help="a file for the record")
    parser.add_argument("--against", type=Path, help="an earlier record, of which those killed are run again")
    given = parser.parse_args()
    everything = find_parts()
    wanted = choose_parts(everything, given.names)
    if given.against is not None:
        record = json.loads(given.against.read_text())["mutants"]
        killed = [entry for entry in record if entry["result"] == "killed" and entry["part"] in wanted]
        killed += [entry for entry in record if entry["result"] == "killed" and entry["part"] not in everything]
        pairs = [
            (mutant, entry, wanted.get(entry["part"]) or make_stand_in(entry["part"], mutant, everything))
            for mutant, entry in find_again(killed)
        ]
        gone = [entry for mutant, entry, _ in pairs if mutant is None]
        alive = [entry for mutant, entry, part in pairs if mutant and judge(mutant, part) != "killed"]
        print(f"{len(pairs)} were killed before; {len(pairs) - len(gone) - len(alive)} still are, {len(gone)} are gone")
        print("\n".join(["gone, as their statement is:", *map(format_mutant, gone)]) if gone else "")
        print("\n".join(["ALIVE NOW:", *map(format_mutant, alive)]) if alive else "none that died before lives")
        return int(bool(alive))
    results: list[tuple[Mutant, str]] = []
    for name, part in wanted.items():
        planted = draw_mutants(name, part, given.each)
        if planted and judge(None, part) != "survived":
            raise SystemExit(f"{name} does not pass its check without a mutant")
        results += [(mutant, judge(mutant, part)) for mutant in planted]
        print(f"{name:<42}" + ", ".join(result for mutant, result in results if mutant.part == name), flush=True)
    total, killed = (Counter(m.part.partition(":")[0] for m, r in results if r != kept) for kept in ("", "survived"))
    print("\nkilled, by kind: " + ", ".join(f"{kind} {killed[kind]}/{n}" for kind, n in total.items()))
    survivors = [mutant for mutant, result in results if result == "survived"]
    reasons = read_reasons(given.json)
    said = [f"{format_mutant(each)}\n    {reasons.get(each.key, 'no reason known')}" for each in survivors]
    print("\n".join([f"{len(survivors)} of {len(results)} survive:", *said]))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{used.ru_utime + used.ru_stime:.0f} processor seconds of checks")
    if given.json is not None:
        names = ("part", "key", "function", "before", "after")
        rows = [{**{name: getattr(m, name) for name in names}, "result": result} for m, result in results]
        for each in (each for each in rows if each["key"] in reasons and each["result"] == "survived"):
            each["reason"] = reasons[each["key"]]
        lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows)
        given.json.write_text(f'{{"mutants": [\n{lines}\n]}}\n', encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
