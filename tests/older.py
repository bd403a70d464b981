"""Tests that older versions of PyTorch skip: 2.6 is the oldest that installs; it and 2.11 were tried."""

import pytest
import torch

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

compiles = pytest.mark.skipif(VERSION < (2, 13), reason="torch.compile of PyTorch 2.6 and 2.11 does not take it")
exponentials = pytest.mark.skipif(
    VERSION < (2, 13), reason="holds draws of a seed by exponential_, which are others in PyTorch 2.6 and 2.11"
)
batches_checks = pytest.mark.skipif(
    VERSION < (2, 11), reason="torch.func.vmap of PyTorch 2.6 takes no conditions on tensors"
)
