"""Tests that older versions of PyTorch skip: 2.6 is the oldest that installs, and was tried."""

import pytest
import torch

OLDER = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)

compiles = pytest.mark.skipif(OLDER, reason="torch.compile of PyTorch 2.6 does not take it, and says so")
exponentials = pytest.mark.skipif(
    OLDER, reason="holds draws of a seed by exponential_, which are others in PyTorch 2.6"
)
batches_checks = pytest.mark.skipif(OLDER, reason="torch.func.vmap of PyTorch 2.6 takes no conditions on tensors")
