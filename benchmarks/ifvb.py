"""Cost of the recursion for the inverse Fisher matrix, in units of the BLAS calls it stands for, of the same run.

    python benchmarks/ifvb.py [--dims 200 1000 2000] [--repeat 20] [--device cpu]

A unit is one symmetric matrix-vector product and one symmetric rank-one update of a D x D matrix a vector, by
SciPy's dsymv and dsyr in place on one triangle (on a GPU torch.mv and addr_); for a block of S scores one D x D x S
product and one rank-S update.  With c_beta > 0 a score brings two vectors.  Timed is all of ``absorb``: finite
check, draws of Z, the waiting vectors and their share of the block updates; and a whole step of IFVB.
"""

import argparse
import time

import torch
from scipy.linalg import blas

from torchngvi.ifvb import ClosedForm, MeanFieldGaussian, PreconditionedVI, Recursive

CALLS = 32  # timed together: the waiting vectors are subtracted once in them


def seconds(runs, repeat, device):
    """Fastest of some repeats of CALLS calls, a call of each run; on a CPU the time of this thread.

    The runs take turns, so that what else the machine does meets all of them.
    """
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    best = [float("inf")] * len(runs)
    for _ in range(repeat):
        for index, run in enumerate(runs):
            run()  # its matrix back into the cache
            synchronize(device)
            start = clock()
            for _ in range(CALLS):
                run()
            synchronize(device)
            best[index] = min(best[index], (clock() - start) / CALLS)
    return best


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def unit_of_one(dim, device):
    """One symmetric product and one symmetric rank-one update."""
    P, x = (
        1e3 * torch.eye(dim, dtype=torch.float64, device=device),
        torch.randn(dim, dtype=torch.float64, device=device),
    )
    if device.type == "cuda":

        def run():
            u = torch.mv(P, x)
            P.addr_(u, u, alpha=-1e-12)

        return run
    matrix, vector = P.numpy().copy(order="F"), x.numpy()

    def run():
        u = blas.dsymv(1.0, matrix, vector, lower=1)
        blas.dsyr(-1e-12, u, lower=1, a=matrix, overwrite_a=1)

    return run


def unit_of_block(dim, count, device):
    """One D x D x S product and one rank-S update."""
    P = 1e3 * torch.eye(dim, dtype=torch.float64, device=device)
    X = torch.randn(count, dim, dtype=torch.float64, device=device)

    def run():
        U = X @ P  # the fastest way round
        P.addmm_(U.mT, U, alpha=-1e-12)

    return run


def absorb(dim, samples, c_beta, device):
    q = MeanFieldGaussian(torch.zeros(dim, dtype=torch.float64, device=device))
    rule, generator = Recursive(samples, eps=1.0, c_beta=c_beta), torch.Generator(device).manual_seed(0)
    scores = torch.randn(samples, dim, dtype=torch.float64, device=device, generator=generator)
    held = [rule.fresh(q)]

    def run():
        held[0] = rule.absorb(held[0], scores, generator)

    return run


def step(dim, samples, device):
    """A whole step with c_beta = 0, the gradient free: also t P g and a draw."""
    q = MeanFieldGaussian(torch.zeros(dim, dtype=torch.float64, device=device))
    rule = Recursive(samples, eps=1.0, c_beta=0.0, warmup=1, generator=torch.Generator(device))
    opt = PreconditionedVI(q, rule, 1e-9, estimator=ClosedForm())
    return lambda: opt.step(lambda lam: -lam.square().sum())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[200, 1000, 2000])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_num_threads(1)
    print(f"{torch.get_num_threads()} thread(s), {device}; times in units of the BLAS calls they stand for")
    print(f"{'D':>6}{'unit of 1':>12}{'S=1':>8}{'S=1, Z':>8}{'step':>8}{'unit of 16':>12}{'S=16':>8}{'S=16, Z':>9}")
    for dim in arguments.dims:
        one, block, both, *times = seconds(
            [
                unit_of_one(dim, device),
                unit_of_block(dim, 16, device),
                unit_of_block(dim, 32, device),
                absorb(dim, 1, 0.0, device),
                absorb(dim, 1, 1.0, device),
                step(dim, 1, device),
                absorb(dim, 16, 0.0, device),
                absorb(dim, 16, 1.0, device),
            ],
            arguments.repeat,
            device,
        )
        ratios = [time / unit for time, unit in zip(times, (one, 2 * one, one, block, both), strict=True)]
        print(
            f"{dim:>6}{1e3 * one:>10.3f}ms{ratios[0]:>8.2f}{ratios[1]:>8.2f}{ratios[2]:>8.2f}"
            f"{1e3 * block:>10.3f}ms{ratios[3]:>8.2f}{ratios[4]:>9.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
