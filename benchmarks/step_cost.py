"""Cost of one update, expectation excluded, in units of one D x D matrix product of the same run.

    python benchmarks/step_cost.py [--dims 256 512 1024 2048] [--repeat 5]

The packet (g, H) is given; timed is everything from the packet to the new coordinates: the rule's
path, the move, its test of the cone, the assignment.
"""

import argparse
import time

import torch

from torchngvi import CholeskyGaussian, NaturalGaussian
from torchngvi.interfaces import Cost, Expectation, Framed, Raw
from torchngvi.rules import NaturalGradient, VariationalNewton


def best_of(repeat, run):
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def packet(dim):
    X = torch.randn(2 * dim, dim, dtype=torch.float64) / dim**0.5
    H = X.mT @ X + torch.eye(dim, dtype=torch.float64)
    return Raw(torch.randn(dim, dtype=torch.float64) * 1e-3, H)


def step(q, rule, e):
    rho = torch.tensor(0.1, dtype=torch.float64)

    def run():
        new, ok = q.moved(rule(q, e).at(rho))
        q.assign(new, ok)

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(
        f"{'':>6}{'product':>10}"
        + "".join(f"{name:>10}" for name in ("Cholesky", "VN nat.", "VN C", "SR-VN C", "VN C, W", "SR-VN C,W"))
    )
    for dim in arguments.dims:
        raw = packet(dim)
        A = raw.H
        unit = best_of(arguments.repeat, lambda A=A: A @ A)
        columns = [best_of(arguments.repeat, lambda A=A: torch.linalg.cholesky_ex(A))]
        for family, rule, framed in (
            (NaturalGaussian, NaturalGradient(), False),
            (CholeskyGaussian, VariationalNewton(), False),
            (CholeskyGaussian, NaturalGradient(), False),
            (CholeskyGaussian, VariationalNewton(), True),
            (CholeskyGaussian, NaturalGradient(), True),
        ):
            q = family(dim, scale=0.5, dtype=torch.float64)
            derivative = Framed(*raw.framed(q.frame())) if framed else raw
            e = Expectation(torch.tensor(0.0), derivative, 1.0, True, Cost(1, 1))
            columns.append(best_of(arguments.repeat, step(q, rule, e)))
        print(f"{dim:>6}{unit * 1e3:>8.1f}ms" + "".join(f"{c / unit:>10.2f}" for c in columns), flush=True)


if __name__ == "__main__":
    main()
