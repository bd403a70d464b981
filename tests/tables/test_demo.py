"""The demonstration: three uses, a sentence on each and one picture."""

import sys
from pathlib import Path

import pytest

from torchngvi.cli import main
from torchngvi.extras import install


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_three_uses_and_one_picture(capsys):
    assert main(["demo", "--quick"]) == 0
    said = capsys.readouterr().out
    for number, title in enumerate(("A training script", "A sparse GP", "A Pyro model"), 1):
        assert f"{number}. {title}: " in said
    assert Path("runs/demo/demo.png").read_bytes().startswith(b"\x89PNG")
    assert main(["demo", "--quick"]) == 2  # nothing is replaced unasked


def test_what_is_not_installed_is_left_out(capsys, monkeypatch):
    for package in ("gpytorch", "pyro"):
        monkeypatch.setitem(sys.modules, package, None)
    assert main(["demo", "--quick", "--out", "here"]) == 0
    said = capsys.readouterr().out
    assert f"2. left out: gpytorch is not installed; {install('gpytorch')}." in said
    assert f"3. left out: pyro is not installed; {install('pyro')}." in said
    assert Path("here/demo.png").is_file()
