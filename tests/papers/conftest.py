"""A clone has the studies of the papers next to the package; a test that asks for them elsewhere is skipped."""

import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest

import torchngvi

ROOT = Path(torchngvi.__file__).parents[1]


class NoStudies(MetaPathFinder):
    """Skips the file or the test that imports the studies."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "examples":
            pytest.skip("needs the package of a clone, with examples/papers next to it", allow_module_level=True)


if not (ROOT / "examples" / "papers").is_dir():
    sys.meta_path.insert(0, NoStudies())
elif str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
