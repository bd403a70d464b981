"""Logistic expectations: relative errors by mean and deviation, and speed as a ratio to the mixture of 27 normals.

python benchmarks/logistic_kernel.py [--errors] [--speed]

The errors are those against the golden values of the tests; the times are CPU times of one thread, the forms one after
the other in one process, the median of nine rounds.
"""

import argparse
import json
import math
import os
import pathlib
import time

import torch

from torchngvi.numerics import show_config
from torchngvi.numerics.gaussian_integrals import softplus

GOLDEN = pathlib.Path(__file__).parents[1] / "tests" / "core" / "logistic_golden.json"
BANDS = ((0.01, 0.24), (0.24, 0.6), (0.6, 1.0), (1.0, 4.0), (4.0, 30.0), (30.0, 1e4), (0.1, 3.0))


def mixture_of_normals():
    """τ² and p/√(2π) of σ(x) = Σ p Φ(x/τ), by a trapezoid rule in log K of step 1/8.

    If K follows the Kolmogorov distribution and Z ~ N(0, 1), then 2 K Z is logistic (Andrews and Mallows 1974).
    """
    k, j = torch.exp(torch.arange(-15, 12, dtype=torch.float64)[:, None] / 8), torch.arange(1, 20, dtype=torch.float64)
    odd = ((2 * j - 1) * math.pi / k).square()
    near = math.sqrt(2 * math.pi) / k.square() * (odd / 4 - 1) * torch.exp(-odd / 8)
    far = -8 * k * (-1) ** j * j.square() * torch.exp(-2 * (j * k).square())
    weights = (k * torch.where(k > 0.9, far, near)).sum(-1)  # two forms of the Kolmogorov density
    return (2 * k[:, 0]).square(), weights / weights.sum() / math.sqrt(2 * math.pi)


SCALES, WEIGHTS = mixture_of_normals()


def mixture(mean, variance):
    """A usual approximation, 512 rows at a time, which stay in the cache: it cancels in the tails.

    F = Σ p [e Φ(u) + r φ(u)], α = Σ p Φ(u), β = Σ p φ(u)/r, with u = e/r and r² = v + τ².
    """
    scales, weights, parts = SCALES.to(mean.dtype), WEIGHTS.to(mean.dtype), []
    for e, v in zip(mean.split(512), variance.split(512), strict=True):
        inverse = (v[:, None] + scales).rsqrt()
        x = (math.sqrt(0.5) * e)[:, None] * inverse
        slope = 0.5 + torch.erf(x) @ (weights * math.sqrt(0.5 * math.pi))
        normal = torch.exp(-x * x) * inverse
        curvature = normal @ weights
        parts.append((e * slope + v * curvature + normal @ (weights * scales), slope, curvature))
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def with_kernel(wanted):
    def moments(mean, variance):
        os.environ["TORCHNGVI_KERNELS"] = wanted
        return softplus(mean, variance)

    return moments


FORMS = {"mixture": mixture, "eager": with_kernel("0"), "kernel": with_kernel("1")}


def errors():
    """The largest relative error of value, slope and curvature, by s, over e from 0 to -700."""
    m, s, *expected = torch.tensor(json.loads(GOLDEN.read_text(encoding="utf-8")), dtype=torch.float64).T
    print(f"{'s':>9} {'rows':>5}" + "".join(f"{name:>28}" for name in FORMS))
    for value in s.unique():
        here = s == value
        line = f"{float(value):9.4f} {int(here.sum()):5d}"
        for moments in FORMS.values():
            parts = zip(moments(m, s * s), expected, strict=True)
            worst = [((a - b) / b).abs()[here & (b > 1e-300)].max() for a, b in parts]
            line += "  " + "".join(f"{float(x):8.0e} " for x in worst).rjust(26)
        print(line)


def speed(count, dtype):
    """Nanoseconds of CPU a row of the mixture, and how many times faster the others are."""
    for low, high in BANDS:
        generator = torch.Generator().manual_seed(0)
        e = (3 * torch.randn(count, dtype=torch.float64, generator=generator)).to(dtype)
        s = torch.empty(count, dtype=torch.float64).uniform_(math.log(low), math.log(high), generator=generator).exp()
        v, repeats = s.square().to(dtype), max(1, 20_000 // count)
        times = {name: [] for name in FORMS}
        for _ in range(9):
            for name, moments in FORMS.items():
                begin = time.process_time()
                for _ in range(repeats):
                    moments(e, v)
                times[name].append((time.process_time() - begin) / repeats / count)
        median = {name: sorted(values)[4] for name, values in times.items()}
        ratios = "  ".join(f"{name} {median['mixture'] / median[name]:5.2f}" for name in ("eager", "kernel"))
        print(f"{count:6d} {str(dtype)[6:]:>8}  s {low:5g} - {high:<6g} {1e9 * median['mixture']:5.0f} ns  {ratios}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--speed", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.errors or not asked.speed:
        errors()
    if asked.speed or not asked.errors:
        for count in (100, 2_000, 20_000):
            for dtype in (torch.float64, torch.float32):
                speed(count, dtype)
    show_config()


if __name__ == "__main__":
    main()
