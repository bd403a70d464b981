"""The seven ways into the library and every method give the numbers that are recorded, with the same counts.

    python benchmarks/golden.py > tests/house/golden_numbers.json

records them again.  Another kind of processor rounds differently, so that floats are compared up to 1e-9 here; with the
environment variable TORCHNGVI_GOLDEN=exact they are compared bit for bit, which holds where they were recorded.
"""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("benchmarks.golden", reason="needs the benchmarks of a clone: run python -m pytest in its root")

from benchmarks import golden  # noqa: E402

RECORDED = json.loads(Path(__file__).with_name("golden_numbers.json").read_text())
EXACT = os.environ.get("TORCHNGVI_GOLDEN") == "exact"
ROUNDING = 1e-9  # of a number, or of 1 where it is smaller
# what a case is known to make of rounding errors: the fit ends where the ELBO is flat to the last digits
LARGER = {"mixed(formula, table)": 1e-7}


def list_entries(value):
    """The entries of a list, or one value, with the kind of each."""
    return [(type(each), each) for each in (value if isinstance(value, list) else [value])]


def explain_difference(found, recorded, allowed):
    """Why two values differ, a text; nothing where they agree."""
    left, right = list_entries(found), list_entries(recorded)
    if [kind for kind, _ in left] != [kind for kind, _ in right]:
        return f"{len(left)} entries of other kinds than the {len(right)} recorded"
    for place, ((kind, now), (_, before)) in enumerate(zip(left, right, strict=True)):
        allowance = allowed * max(1.0, abs(before)) if kind is float else 0
        if now != before and not (kind is float and abs(now - before) <= allowance):
            return f"entry {place} is {now!r}, recorded as {before!r}"
    return ""


def find_differences(found, recorded, allowed):
    """What differs in a case, by entry."""
    assert list(found) == list(recorded), "record the numbers again: the case has other entries"
    each = {name: explain_difference(found[name], recorded[name], allowed) for name in recorded}
    return {name: why for name, why in each.items() if why}


def test_every_case_is_recorded():
    assert list(golden.find_cases()) == list(RECORDED)
    assert set(golden.SEVEN) | set(LARGER) <= set(RECORDED)


@pytest.mark.parametrize("name", RECORDED)
def test_numbers(name):
    for package in golden.NEEDED.get(name, ()):
        pytest.importorskip(package)
    with golden.fix_settings():
        found = json.loads(golden.format_numbers({name: golden.prepare_case(golden.find_cases()[name])()()}))[name]
    assert not find_differences(found, RECORDED[name], 0.0 if EXACT else LARGER.get(name, ROUNDING))


def test_differences_are_found():
    """A number beyond rounding, one more evaluation, another word, a missing entry of a list; not rounding itself."""
    recorded = {"loss": [3.0, 0.0], "evaluations": 4, "verdict": "fits", "converged": True}
    assert not find_differences({**recorded, "loss": [3.0 + 2e-9, 1e-10]}, recorded, ROUNDING)
    assert set(find_differences({**recorded, "loss": [3.0, 2e-9]}, recorded, ROUNDING)) == {"loss"}
    assert set(find_differences({**recorded, "loss": [3.0 + 5e-16, 0.0]}, recorded, 0.0)) == {"loss"}
    assert set(find_differences({**recorded, "evaluations": 5}, recorded, ROUNDING)) == {"evaluations"}
    assert set(find_differences({**recorded, "verdict": "does not fit"}, recorded, ROUNDING)) == {"verdict"}
    assert set(find_differences({**recorded, "loss": [3.0]}, recorded, ROUNDING)) == {"loss"}
    assert set(find_differences({**recorded, "converged": 1}, recorded, ROUNDING)) == {"converged"}
    assert set(find_differences({**recorded, "loss": [float("nan"), 0.0]}, recorded, ROUNDING)) == {"loss"}
