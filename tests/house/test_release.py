"""What a release is made of: one version, the files that belong to it, and licences."""

import configparser
import importlib.util
import re
from importlib import metadata
from pathlib import Path

import pytest

import torchngvi

ROOT = Path(__file__).parents[2]


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_is_in_one_place():
    setup = configparser.ConfigParser()
    setup.read_string(text("setup.cfg"))
    assert setup["metadata"]["version"] == "attr: torchngvi.__version__"
    assert re.search(r"^version: (\S+)$", text("CITATION.cff"), re.MULTILINE)[1] == torchngvi.__version__


def test_the_source_of_the_kernel_is_data_of_the_package():
    setup = configparser.ConfigParser()
    setup.read_string(text("setup.cfg"))
    assert setup["options.package_data"]["torchngvi.numerics"] == "logistic.c"
    assert (ROOT / "torchngvi" / "numerics" / "logistic.c").is_file()


@pytest.fixture
def licences():
    spec = importlib.util.spec_from_file_location("licences", ROOT / ".ci" / "licences.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("said", "good"),
    [
        ({"License-Expression": "BSD-3-Clause"}, True),
        ({"Classifier": "License :: OSI Approved :: Apache Software License"}, True),
        ({"License": "MIT License, long text"}, True),
        ({"License-Expression": "AGPL-3.0-only"}, False),
        ({"License": "Proprietary"}, False),
        ({"License-Expression": "MIT AND GPL-3.0-or-later"}, False),
        ({"License-Expression": "GPL-2.0-only OR Apache-2.0"}, True),
        ({}, False),
    ],
)
def test_licences(licences, monkeypatch, capsys, tmp_path, said, good):
    """A library of a licence that is not permissive, or not told, is marked, and the check fails."""
    folder = tmp_path / "strange-1.0.dist-info"
    folder.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        "Name: strange",
        "Version: 1.0",
        *(f"{key}: {value}" for key, value in said.items()),
    ]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    found = metadata.Distribution.at(folder)
    monkeypatch.setattr(licences, "needed", lambda _: {"strange": found})
    assert licences.main() == (0 if good else 1)
    assert capsys.readouterr().out.startswith("  strange" if good else "! strange")


def test_libraries_of_libraries_are_found(licences):
    assert {"pytest", "pluggy", "iniconfig"} <= set(licences.needed("pytest"))
    assert licences.needed("no-such-library") == {}


def test_licences_of_cuda_are_listed_and_of_nothing_fail(licences, monkeypatch, capsys):
    known = metadata.distribution("pytest")
    monkeypatch.setattr(licences, "licence", lambda of: "LicenseRef-NVIDIA-Proprietary")
    monkeypatch.setattr(licences, "needed", lambda _: {"nvidia-cublas": known})
    assert licences.main() == 0
    assert capsys.readouterr().out.startswith("- nvidia-cublas")
    monkeypatch.setattr(licences, "needed", lambda _: {})
    assert licences.main() == 1
    assert "not installed" in capsys.readouterr().out
