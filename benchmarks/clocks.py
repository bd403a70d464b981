"""The clock of a device: seconds of the processor on the CPU, and of the wall, with all kernels done, on a GPU.

On a machine with other work a clock on the wall tells of that work too; what a GPU does no processor's clock sees.
"""

import time

import torch


def seconds(device: str) -> float:
    """The time on the clock of a device, of which differences count."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def named(device: str) -> str:
    """What the device is, for the head of a table."""
    return "one CPU" if device == "cpu" else torch.cuda.get_device_name(device)
