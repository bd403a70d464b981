"""The device of a run: a name is checked against what this machine has, before anything is read."""

import re

import torch

from torchngvi.errors import InputError

_NAMES = re.compile(r"cpu|mps|cuda(:\d+)?")


def chosen(name: str, dtype: str = "float64") -> torch.device:
    """The device of that name, where this machine has it.

    >>> chosen("cpu")
    device(type='cpu')
    """
    if not _NAMES.fullmatch(name):
        raise InputError(f"device must be cpu, cuda, cuda:1 (the second GPU) or mps; got {name!r}.")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        built = "finds no GPU" if torch.version.cuda else "is built without CUDA"
        raise InputError(
            f"device {name} is not available: PyTorch {torch.__version__} {built}. Leave device out to fit on the CPU, "
            "or install a build with CUDA and its driver."
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device {name} is not available: there are {torch.cuda.device_count()} GPUs, from cuda:0 on.")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise InputError(
            f"device mps is not available: PyTorch {torch.__version__} finds no GPU of Apple. Leave device out to fit "
            "on the CPU."
        )
    if device.type == "mps" and dtype == "float64":
        raise InputError("device mps has no numbers of float64. Set dtype float32 (--dtype float32).")
    return device
