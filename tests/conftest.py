"""Small problems are fastest on one thread, and steadiest."""

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def libsvm_folder():
    """The folder with the LIBSVM sets, or a skip."""
    folder = Path(os.environ.get("TORCHNGVI_DATA", "")) / "libsvm"
    if "TORCHNGVI_DATA" not in os.environ or not folder.is_dir():
        pytest.skip("needs the LIBSVM sets: set TORCHNGVI_DATA to a folder with libsvm/*.svm.gz")
    return folder
