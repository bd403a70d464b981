"""The table of the engine for log joints: what stands for a part that is left out is called as the part is."""

import inspect
from pkgutil import resolve_name

import pytest

PARTS = pytest.importorskip("benchmarks.engine_table", reason="needs the benchmarks of a clone").PARTS


@pytest.mark.parametrize(("path", "new"), PARTS.values(), ids=PARTS)
def test_a_part_is_replaced_by_what_is_called_alike(path, new):
    found = (inspect.signature(f).parameters.values() for f in (resolve_name(f"torchngvi.fitting.{path}"), new))
    old, other = ([(each.name, each.kind, each.default is each.empty) for each in one] for one in found)
    assert old == other
