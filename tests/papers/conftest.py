"""The studies of the papers stand in a clone, beside the package; without them these tests are skipped."""

import sys
from pathlib import Path

import pytest

import torchngvi

ROOT = Path(torchngvi.__file__).parents[1]
THERE = (ROOT / "examples" / "papers").is_dir()

if THERE and str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


class Skipped(pytest.Module):
    """A file of tests that is skipped before it is imported."""

    def collect(self):
        pytest.skip("needs examples/papers of a clone beside the package that is tested", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return None if THERE else Skipped.from_parent(parent, path=module_path)
