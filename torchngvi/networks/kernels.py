"""What the hooks of a step do on a CPU, compiled: each weight is read once for several operations.

The functions are those of `families/diagonal.py` in C, which the compiler of the machine makes when they are first
asked for, once on a machine.  They are for contiguous parameters of single precision.  Sums are of sixteen interleaved
parts of each block of 4,096 numbers in single precision, and of those in double precision, and no product is fused with
a sum, so that the same numbers give the same bits.
"""

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.numerics.compiling import CompilerError, cache, private, shared_library

_FLAGS = ("-O3", "-ffp-contract=off", "-fno-fast-math")  # whatever flags the compiler is named with
_SOURCE = """
#define LANES 16
#define BLOCK 4096

static double squares(const float *p, const float *m, const float *s, long n) {
    float lane[LANES] = {0};
    long i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) {
            float x = (p[i + l] - m[i + l]) / s[i + l];
            lane[l] += x * x;
        }
    double total = 0;
    for (int l = 0; l < LANES; l++) total += lane[l];
    for (; i < n; i++) {
        float x = (p[i] - m[i]) / s[i];
        total += x * x;
    }
    return total;
}

double departure(long count, float **p, float **m, float **s, const long *n) {
    double total = 0;
    for (long k = 0; k < count; k++)
        for (long i = 0; i < n[k]; i += BLOCK)
            total += squares(p[k] + i, m[k] + i, s[k] + i, n[k] - i < BLOCK ? n[k] - i : BLOCK);
    return total;
}

int finite(long count, float **g, const long *n) {
    for (long k = 0; k < count; k++) {
        float lane[LANES] = {0}, total = 0;
        long i = 0;
        for (; i + LANES <= n[k]; i += LANES)
            for (int l = 0; l < LANES; l++) lane[l] += g[k][i + l] * 0.0f;
        for (; i < n[k]; i++) total += g[k][i] * 0.0f;
        for (int l = 0; l < LANES; l++) total += lane[l];
        if (total != total) return 0;
    }
    return 1;
}

void add_prior(long count, float **p, float **m, float **g, const long *n, const float *delta, int write) {
    for (long k = 0; k < count; k++) {
        float *restrict to = p[k], *restrict mean = m[k], *restrict force = g[k];
        if (force)
            for (long i = 0; i < n[k]; i++) force[i] += delta[k] * mean[i];
        if (write)
            for (long i = 0; i < n[k]; i++) to[i] = mean[i];
    }
}

void advance(long count, float **p, float **m, float **s, float **e, const long *n, float share, float spread) {
    for (long k = 0; k < count; k++) {
        float *restrict at = p[k], *restrict mean = m[k], *restrict scale = s[k], *restrict noise = e[k];
        if (share > 0)
            for (long i = 0; i < n[k]; i++) {
                float to = mean[i] + share * (at[i] - mean[i]);
                mean[i] = to;
                at[i] = to + spread * scale[i] * noise[i];
            }
        else
            for (long i = 0; i < n[k]; i++) at[i] = mean[i] + spread * scale[i] * noise[i];
    }
}
"""


def _built() -> ctypes.CDLL:
    """The compiled source, from the cache or, where that cannot be used, from a folder for this process alone."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            folder = cache()
        except (CompilerError, OSError, RuntimeError):  # of others, read-only, no home
            folder = private(Path(scratch))
        return ctypes.CDLL(str(shared_library("step", _SOURCE, _FLAGS, (), folder)))


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    """Compile the source and load it; once a process."""
    try:
        library = _built()
    except (CompilerError, OSError, subprocess.SubprocessError) as error:
        raise InputError(
            f"fused=True compiles a few loops, and {error}. Leave fused=True out, or name another C compiler in the "
            "environment variable CC."
        ) from error
    pointer, number = ctypes.c_void_p, ctypes.c_float
    library.departure.restype = ctypes.c_double
    library.departure.argtypes = [ctypes.c_long, *[pointer] * 4]
    library.finite.argtypes = [ctypes.c_long, *[pointer] * 2]
    library.add_prior.argtypes = [ctypes.c_long, *[pointer] * 5, ctypes.c_int]
    library.advance.argtypes = [ctypes.c_long, *[pointer] * 5, number, number]
    return library


def prepare() -> None:
    """Compile, so that a machine without a compiler says so before the training."""
    _library()


def fits(first: Sequence[Tensor], *others: Sequence[Tensor | None]) -> bool:
    """Whether the loops take these tensors: plain and contiguous, in single precision, on the CPU, of the same shapes.

    >>> fits([torch.zeros(2)]), fits([torch.zeros(2, dtype=torch.float64)]), fits([torch.zeros(2)], [torch.zeros(3)])
    (True, False, False)
    """
    return all(map(_plain, first)) and all(
        t is None or (t.shape == own.shape and _plain(t)) for of in others for own, t in zip(first, of, strict=True)
    )


def _plain(tensor: Tensor) -> bool:
    """Whether what is at its address are its numbers, one after the other."""
    return (
        type(tensor) is Tensor
        and tensor.dtype is torch.float32
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def _addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*[None if t is None else t.data_ptr() for t in tensors])


def _sizes(tensors: Sequence[Tensor]) -> ctypes.Array:
    return (ctypes.c_long * len(tensors))(*[t.numel() for t in tensors])


def departure(parameters: Sequence[Tensor], mean: Sequence[Tensor], stddev: Sequence[Tensor]) -> float:
    """Return Σ ((p - m)/σ)²."""
    each = [_addresses(of) for of in (parameters, mean, stddev)]
    return float(_library().departure(len(mean), *each, _sizes(mean)))


def finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all entries are finite."""
    return bool(_library().finite(len(tensors), _addresses(tensors), _sizes(tensors)))


def add_prior_(
    parameters: Sequence[Tensor],
    mean: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    prior: Sequence[float],
    write: bool,
) -> None:
    """Add δm to gradients, and write m into the parameters."""
    each = [_addresses(of) for of in (parameters, mean, gradients)]
    _library().add_prior(len(mean), *each, _sizes(mean), (ctypes.c_float * len(prior))(*prior), write)


def advance_(
    share: float,
    spread: float,
    parameters: Sequence[Tensor],
    mean: Sequence[Tensor],
    stddev: Sequence[Tensor],
    noise: Sequence[Tensor],
) -> None:
    """Move the mean by a share of the way to the parameters, then write m + √T σ ε into them."""
    each = [_addresses(of) for of in (parameters, mean, stddev, noise)]
    _library().advance(len(mean), *each, _sizes(mean), share, spread)
