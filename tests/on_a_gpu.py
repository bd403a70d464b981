"""What the tests that need a CUDA device share: their mark, and a mode in which a wait for the device raises."""

import contextlib
import warnings

import pytest
import torch

MARKS = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = pytest.param("cuda", marks=MARKS)


def gpu(test):
    """Mark a test that needs a CUDA device."""
    for mark in MARKS:
        test = mark(test)
    return test


@contextlib.contextmanager
def waits_are_errors():
    """Inside, an operation for which the host waits for the device raises."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():  # that the mode is a prototype, which PyTorch says each time
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
