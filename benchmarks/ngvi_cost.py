"""Seconds of a step of stochastic natural-gradient VI on a linear regression, against the rows m of a mini-batch.

    python benchmarks/ngvi_cost.py [--dims 64 128 256] [--repeat 9]

The update is O(D²m) (Wu and Gardner 2024, section 3.1); what a step costs at m = 1 is the factor of S, O(D³), by which
this library checks the cone, and the calls themselves.  Printed are the best of some runs, and seconds a row and D².
"""

import argparse
import time

import torch

from torchngvi import NGVI, GeneralizedLinear, NaturalGaussian

ROWS = (1, 1_000, 4_000, 16_000)


def seconds(model: GeneralizedLinear, rows: int, repeat: int) -> float:
    """Of one step with so many rows, the best of some."""
    q, best = NaturalGaussian(model.dim, dtype=torch.float64), float("inf")
    opt = NGVI(q, lr=0.1)
    for _ in range(repeat):
        batch = model.minibatch(torch.randint(len(model.X), (rows,)))
        start = time.perf_counter()
        opt.step(batch)
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--repeat", type=int, default=9)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(f"{'D':>5}" + "".join(f"{f'm = {rows}':>12}" for rows in ROWS) + "   a row and D², last two")
    for dim in arguments.dims:
        X = torch.randn(20_000, dim, dtype=torch.float64)
        model = GeneralizedLinear(X, X.sum(-1) + torch.randn(20_000, dtype=torch.float64), "gaussian")
        times = [seconds(model, rows, arguments.repeat) for rows in ROWS]
        each = (times[-1] - times[-2]) / (ROWS[-1] - ROWS[-2]) / dim**2
        print(f"{dim:5d}" + "".join(f"{t:12.2e}" for t in times) + f"{each:12.2e}", flush=True)


if __name__ == "__main__":
    main()
