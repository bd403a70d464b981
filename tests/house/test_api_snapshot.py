"""The public names with their signatures are those of `api_snapshot.txt`; a difference is printed line by line.

    python -m tests.house.test_api_snapshot --write

records them again, after a change that is meant and stands in the changelog.  A line says under which public path a
name is exported, never in which file it is defined: files may merge, move and split.  The members of a class stand
under its name alone, without those that it has in the same words from an exported base.
"""

import ast
import dataclasses
import difflib
import enum
import functools
import importlib
import importlib.util
import inspect
import sys
import types
import typing
import warnings
from pathlib import Path

import pytest

import torchngvi

SNAPSHOT = Path(__file__).with_name("api_snapshot.txt")
PACKAGE = Path(torchngvi.__file__).parent
OF_EXTRAS = ("load", "mixed", "to_arviz")  # of torchngvi, though not in its __all__: each needs an extra
NEEDED = ("arviz", "formulae", "gpytorch", "matplotlib", "pandas", "pyro", "scipy", "sklearn")
CALLED = ("__call__", "__enter__", "__getitem__", "__iter__", "__len__")


def find_public_modules():
    """The modules that say by an `__all__` what is public in them."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            own = isinstance(node, ast.Assign) and any(getattr(name, "id", "") == "__all__" for name in node.targets)
            if own or (isinstance(node, ast.ImportFrom) and any(name.name == "__all__" for name in node.names)):
                parts = ("torchngvi", *path.relative_to(PACKAGE).with_suffix("").parts)
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                break


def describe_type(annotation):
    """A type in words that do not say where it is defined, and that are the same in each version of Python."""
    if annotation is None or annotation is type(None):
        return "None"
    if isinstance(annotation, str):
        return annotation.rpartition(".")[2] if annotation.replace(".", "").isidentifier() else annotation
    if isinstance(annotation, list):
        return f"[{', '.join(map(describe_type, annotation))}]"
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(describe_type, inner))
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, inner))}]"
    if origin is typing.Annotated:
        return describe_type(inner[0])
    if annotation is Ellipsis:
        return "..."
    if isinstance(annotation, typing.ForwardRef):
        return describe_type(annotation.__forward_arg__)
    if getattr(origin, "__name__", "") == "ndarray":
        return "ndarray"  # versions of numpy fill in other arguments
    name = getattr(origin or annotation, "__name__", None) or str(annotation).rpartition(".")[2]
    return f"{name}[{', '.join(map(describe_type, inner))}]" if inner else name


def describe_default(value):
    """A default value without an address in memory."""
    if (
        value is None
        or isinstance(value, bool | int | float | complex | str | bytes)
        and not isinstance(value, enum.Enum)
    ):
        return repr(value)
    if isinstance(value, tuple | list | set | frozenset) and type(value) in (tuple, list, set, frozenset):
        return f"{type(value).__name__}({', '.join(map(describe_default, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ", ".join(describe_default(getattr(value, field.name)) for field in dataclasses.fields(value))
        return f"{type(value).__name__}({fields})"
    name = getattr(value, "__name__", None)
    return name or (str(value) if type(value).__module__ == "torch" else f"{type(value).__name__}()")


def describe_signature(function):
    """The parameters with their kinds and defaults, and what is returned."""
    if isinstance(function, type) and not any(
        {"__init__", "__new__"} & set(vars(each)) for each in function.__mro__ if is_ours(each)
    ):
        return "(...)"  # made as another package, or Python, makes it
    found = inspect.signature(function)
    parts, last = [], None
    for name, each in found.parameters.items():
        if last is each.POSITIONAL_ONLY and each.kind is not last:
            parts.append("/")
        if each.kind is each.KEYWORD_ONLY and last not in (each.KEYWORD_ONLY, each.VAR_POSITIONAL):
            parts.append("*")
        last = each.kind
        text = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "") + name
        text += "" if each.annotation is each.empty else f": {describe_type(each.annotation)}"
        parts.append(text + ("" if each.default is each.empty else f" = {describe_default(each.default)}"))
    parts += ["/"] if last is inspect.Parameter.POSITIONAL_ONLY else []
    end = "" if found.return_annotation is found.empty else f" -> {describe_type(found.return_annotation)}"
    return f"({', '.join(parts)}){end}"


def is_ours(cls):
    return cls.__module__.partition(".")[0] == "torchngvi"


def find_members(cls):
    """The public members that come from the package, by name, each as a text."""
    found = {}
    for name in dir(cls):
        holder = next((base for base in cls.__mro__ if name in vars(base)), None)
        if holder is None or not is_ours(holder) or (name.startswith("_") and name not in CALLED):
            continue
        value = inspect.getattr_static(cls, name)
        if type(value).__module__.startswith("sklearn"):
            continue  # scikit-learn adds what its version has
        if isinstance(value, property | functools.cached_property):
            found[name] = ": property"
        elif isinstance(value, staticmethod | classmethod):
            found[name] = f"{describe_signature(getattr(cls, name))} [{type(value).__name__}]"
        elif inspect.isfunction(value):
            found[name] = describe_signature(value)
        elif isinstance(value, type):
            found[name] = ": class"
        else:
            found[name] = ": attribute"
    return found


def describe_members(cls, exported):
    """A line for each member of an exported class that no exported base has in the same words."""
    bases = [base for base in cls.__mro__[1:] if base in exported]
    known = [find_members(base) for base in bases]
    for name, text in find_members(cls).items():
        if not any(each.get(name) == text for each in known):
            yield f"{cls.__name__}.{name}{text}"


def find_bases(cls, exported):
    """The exported bases of a class, and those of other packages from which the package derives it."""
    outside = {base for each in cls.__mro__ if is_ours(each) for base in each.__bases__ if not is_ours(base)}
    silent = {"object", "ABC", "Generic", "Protocol"}
    names = [base.__name__ for base in cls.__mro__[1:] if base in exported or base in outside]
    return [name for name in names if name not in silent]


def list_lines():
    """Every line of the snapshot, sorted."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in find_public_modules():
            module = importlib.import_module(name)
            extra = OF_EXTRAS if module is torchngvi else ()
            found |= {f"{name}.{each}": getattr(module, each) for each in (*module.__all__, *extra)}
    exported = {value for value in found.values() if inspect.isclass(value)}
    rows = set()
    for path, value in found.items():
        if inspect.isclass(value):
            above = find_bases(value, exported)
            rows.add(f"{path}{describe_signature(value)}{' < ' if above else ''}{', '.join(above)}")
            rows.update(describe_members(value, exported))
        elif inspect.ismodule(value):
            rows.add(f"{path}: module")
        elif typing.get_origin(value) is not None:
            rows.add(f"{path} = {describe_type(value)}")
        elif callable(value):
            rows.add(f"{path}{describe_signature(value)}")
        else:
            rows.add(f"{path}: {type(value).__name__}")
    return sorted(rows)


def test_the_public_names_and_signatures_are_those_recorded():
    """A name that goes or changes has its line in the changelog, and works for a release (`torchngvi/renamed.py`)."""
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    recorded = SNAPSHOT.read_text(encoding="utf-8").splitlines()
    changes = [
        line
        for line in difflib.unified_diff(recorded, list_lines(), "recorded", "now", n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@"))
    ]
    assert not changes, "\n".join(["python -m tests.house.test_api_snapshot --write records these:", *changes])


def test_a_signature_says_all_that_a_caller_sees():
    def f(a, /, b: "torchngvi.fitting.Step", *c, d: int | None = None, e=(1, torchngvi.fit), **f) -> list[str]: ...

    assert describe_signature(f) == ("(a, /, b: Step, *c, d: int | None = None, e = tuple(1, fit), **f) -> list[str]")

    class Base:
        here = 1

        def kept(self, a): ...
        def changed(self, a): ...

    class Derived(Base):
        def changed(self, b): ...
        @property
        def new(self): ...
        @staticmethod
        def alone(c=1.5): ...

    Base.__module__ = Derived.__module__ = "torchngvi.somewhere"
    assert sorted(describe_members(Derived, {Base, Derived})) == [
        "Derived.alone(c = 1.5) [staticmethod]",
        "Derived.changed(self, b)",
        "Derived.new: property",
    ]
    assert sorted(describe_members(Base, {Base})) == [
        "Base.changed(self, a)",
        "Base.here: attribute",
        "Base.kept(self, a)",
    ]
    assert find_bases(Derived, {Base}) == ["Base"]


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    SNAPSHOT.write_text("\n".join(list_lines()) + "\n", encoding="utf-8")
