"""`--device`: a device that is not there is refused in a sentence; what was fitted on one comes back."""

from dataclasses import replace

import pytest
import torch

from torchngvi.app import devices, runs
from torchngvi.app.config import Settings
from torchngvi.app.problems import build
from torchngvi.cli import main
from torchngvi.errors import InputError


def refused(name, dtype="float64"):
    with pytest.raises(InputError) as error:
        devices.chosen(name, dtype)
    return str(error.value)


def test_devices_that_are_not_there(monkeypatch):
    assert devices.chosen("cpu").type == "cpu"
    assert refused("gpu") == "device must be cpu, cuda, cuda:1 (the second GPU) or mps; got 'gpu'."
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert refused("cuda") == (
        f"device cuda is not available: PyTorch {torch.__version__} is built without CUDA. Leave device out to fit on "
        "the CPU, or install a build with CUDA and its driver."
    )
    assert refused("mps", "float32") == (
        f"device mps is not available: PyTorch {torch.__version__} finds no GPU of Apple. Leave device out to fit on "
        "the CPU."
    )
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "finds no GPU." in refused("cuda:1")


def test_devices_that_are_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert devices.chosen("cuda") == torch.device("cuda")
    assert refused("cuda:1") == "device cuda:1 is not available: there are 1 GPUs, from cuda:0 on."
    assert refused("mps") == "device mps has no numbers of float64. Set dtype float32 (--dtype float32)."
    assert devices.chosen("mps", "float32").type == "mps"


def test_the_command_line_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["fit", "--data", "iris", "--device", "cuda", "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.startswith("torchngvi: error: device cuda is not available: PyTorch ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["vn", "ifvb"])
def test_what_is_fitted_on_a_device_comes_back(tmp_path, method):
    flat = {"posterior": "mean_field"} if method == "ifvb" else {}
    settings = Settings(
        data="iris", success="virginica", method=method, out=str(tmp_path), progress=False, max_evaluations=60, **flat
    )
    here, there = build(settings), build(settings)
    torch.manual_seed(0)
    expected = runs._fitted(here)
    torch.manual_seed(0)
    result = runs._fitted_on(torch.device("cpu"), there)
    assert torch.equal(result.posterior.mean, expected.posterior.mean)
    assert there.q.mean_probe.device.type == result.posterior.mean.device.type == "cpu"
    assert (result.target is there.model) == (expected.target is here.model)
    assert replace(expected, trace=[]).converged == result.converged
