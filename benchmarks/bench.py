"""``python -m benchmarks.bench``: a step beside the products and the factorisation that it needs, on this machine.

The floor of a step is timed in the same run, on tensors of the same sizes: XC and (XC)ᵀ(XC) for E_q[H] in the frame of
q, and one Cholesky factor.  What is above it is expectations, vectors, launches of kernels, and Python.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.waits import far, reads
from torchngvi import __version__
from torchngvi.errors import InputError
from torchngvi.expectations import Quadrature
from torchngvi.fitting.fit import fit
from torchngvi.methods import VN
from torchngvi.models import GeneralizedLinear
from torchngvi.optim import CapturedStep
from torchngvi.posteriors import CholeskyGaussian

_REPEATS = 7  # of which the median is taken
_SMALL = 5, 300  # coefficients and rows of the fit whose waits are counted


class Line(NamedTuple):
    """What was measured in one number of dimensions, in seconds."""

    dim: int
    step: float  # found by trial: an evaluation, a move, a verdict
    captured: float | None  # the same as a CUDA graph
    compiled: float | None  # and after torch.compile
    floor: float
    evaluation: float
    fit: float  # from N(0, I) to convergence
    expectation: str  # where E_q[H] is, and its size


def run(
    device: str = "cpu",
    dims: Sequence[int] = (30, 128, 512),
    rows: int = 10_000,
    dtype: str = "float64",
    compiled: bool = False,
) -> None:
    """Measure, and print a table.

    Args:
        device: where, cpu, cuda, cuda:1.
        dims: numbers D of coefficients, a line each.
        rows: of a logistic regression.
        dtype: "float64" or "float32".
        compiled: time a step that torch.compile has made too, which takes a minute for each D.

    Raises:
        InputError: a device that is not there, a number that is not positive.

    >>> run(dims=[3], rows=50)  # doctest: +ELLIPSIS
    torchngvi ..., on cpu ...
    """
    for name, value in (("rows", rows), *(("dim", dim) for dim in dims)):
        if value < 1:
            raise InputError(f"{name} must be at least 1; got {value}.")
    at, type_ = torch.device(device), getattr(torch, dtype)
    if at.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {device} is not available. Leave it out to measure on the processor.")
    named = torch.cuda.get_device_name(at) if at.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"torchngvi {__version__}, PyTorch {torch.__version__}, on {device} ({named}), {dtype}")
    print(f"Logistic regression of {rows} rows, a full covariance; medians of {_REPEATS}, in milliseconds.\n")
    print("    D      step    floor  step/floor  captured  compiled  evaluation       fit  E_q[H]")
    for dim in dims:
        line = measured(dim, rows, at, type_, compiled)
        graphs = ["-" if x is None else f"{1e3 * x:.3f}" for x in (line.captured, line.compiled)]
        step, floor, ratio = 1e3 * line.step, 1e3 * line.floor, line.step / line.floor
        whole = f"{1e3 * line.evaluation:11.3f} {1e3 * line.fit:9.1f}"
        print(
            f"{dim:5} {step:9.3f} {floor:8.3f} {ratio:11.1f} {graphs[0]:>9} {graphs[1]:>9} {whole}  {line.expectation}"
        )
    step, evaluation = waits(at)
    how = "" if at.type == "cuda" else ", counted with tensors that pass for those of a GPU"
    print(f"\nThe host waits {step:g} times a step, and {evaluation:g} times an evaluation of a fit by VN{how}.")
    print(
        "floor: XC, (XC)'(XC) and one Cholesky factor; captured: the step as a CUDA graph "
        "(torchngvi.optim.CapturedStep)."
    )


def measured(dim: int, rows: int, device: torch.device, dtype: torch.dtype, compiled: bool = False) -> Line:
    """Time a step in one number of dimensions, and its floor."""
    model = _regression(dim, rows, device, dtype)
    q = CholeskyGaussian(dim, dtype=dtype, device=device)
    opt = VN(q)
    step = _median(lambda: opt.step(model), device)
    expectation = opt.expectation
    assert expectation is not None
    H = expectation.H

    def fresh() -> CholeskyGaussian:
        return CholeskyGaussian(dim, dtype=dtype, device=device)

    graph = made = None
    if device.type == "cuda":
        graph = _median(CapturedStep(VN(fresh()), model), device, first=5)
    if compiled:
        made = _median(CapturedStep(VN(fresh()), model, backend="inductor"), device, first=5)
    with torch.no_grad():
        evaluation = _median(lambda: Quadrature()(q, model), device)
    whole = _median(lambda: fit(fresh(), model, progress=False), device, first=1, repeats=3)
    X, C = model.X, q.frame().dense()
    eye = torch.eye(dim, dtype=dtype, device=device)

    def least() -> None:
        projected = X @ C
        torch.linalg.cholesky_ex(projected.mT @ projected + eye)

    size = H.numel() * H.element_size() / 2**20
    where = f"{H.device}, {size:.3g} MiB"
    return Line(dim, step, graph, made, _median(least, device), evaluation, whole, where)


def waits(device: torch.device) -> tuple[float, float]:
    """How often the host waits for the device, in a step of VN and in an evaluation of `torchngvi.fit` by it.

    >>> waits(torch.device("cpu"))
    (0.0, 1.0)
    """
    dtype = torch.float32 if device.type == "mps" else torch.float64
    model, q = _regression(*_SMALL, device, dtype), CholeskyGaussian(_SMALL[0], dtype=dtype, device=device)
    count: Callable[[Callable[[], object]], int] = _synchronised
    if device.type != "cuda":
        model, q, count = far(model), far(q), lambda do: sum(reads(do)[1].values())
    start, opt = q.snapshot(), VN(q)
    opt.step(model)
    step = count(lambda: opt.step(model))
    q.restore(start)
    results = []
    total = count(lambda: results.append(fit(q, model, VN(q), progress=False)))
    return float(step), total / results[0].evaluations


def _synchronised(do: Callable[[], object]) -> int:
    """The number of operations for which CUDA was waited, as torch's debug mode tells them."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            do()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def _regression(dim: int, rows: int, device: torch.device, dtype: torch.dtype) -> GeneralizedLinear:
    """Two classes, told apart by the sum of the columns and noise."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(rows, dim, generator=generator, dtype=dtype, device="cpu") / dim**0.5
    noise = torch.randn(rows, generator=generator, dtype=dtype, device="cpu")
    y: Tensor = (2 * X.sum(-1) + noise > 0).to(dtype)
    return GeneralizedLinear(X, y, classes=(0, 1)).to(device)


def _median(do: Callable[[], object], device: torch.device, first: int = 2, repeats: int = _REPEATS) -> float:
    """Seconds of a call, after some that are not timed."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()

    for _ in range(first):
        do()
    taken = []
    for _ in range(repeats):
        wait()
        began = time.perf_counter()
        do()
        wait()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 (cpu)")
    flags.add_argument("--dims", type=int, nargs="+", default=[30, 128, 512], help="coefficients (30 128 512)")
    flags.add_argument("--rows", type=int, default=10_000, help="(10000)")
    flags.add_argument("--compiled", action="store_true", help="a step that torch.compile has made too")
    flags.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="(float64)")
    run(**vars(flags.parse_args()))
