"""Many small posteriors as one: 10,000 logistic regressions of 100 rows and 10 coefficients.

    python benchmarks/batched.py [--members 10000] [--loop 100]

The batched fit against a Python loop over the members, default settings, on the same threads; of the
loop only the first members are run and the time is scaled up.
"""

import argparse
import time

import torch

from torchngvi import CholeskyGaussian, GeneralizedLinear, fit


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=10_000)
    parser.add_argument("--loop", type=int, default=100)
    arguments = parser.parse_args()
    members, rows, dim = arguments.members, 100, 10
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(members, rows, dim, generator=generator, dtype=torch.float64)
    theta = torch.randn(members, dim, 1, generator=generator, dtype=torch.float64)
    uniform = torch.rand(members, rows, generator=generator, dtype=torch.float64)
    y = (uniform < torch.sigmoid((X @ theta)[..., 0])).double()

    q = CholeskyGaussian(dim, (members,), dtype=torch.float64)
    start = time.perf_counter()
    result = fit(q, GeneralizedLinear(X, y, prior_precision=1.0), progress=False)
    batched = time.perf_counter() - start
    print(f"batch of {members}: {result.evaluations} evaluations, {batched:.2f} s, ", end="")
    print(f"{int(result.members_converged.sum())} members converged")

    start = time.perf_counter()
    for i in range(arguments.loop):
        alone = CholeskyGaussian(dim, dtype=torch.float64)
        fit(alone, GeneralizedLinear(X[i], y[i], prior_precision=1.0), progress=False)
        torch.testing.assert_close(alone.mean, q.mean[i], rtol=0, atol=1e-4)
    loop = (time.perf_counter() - start) / arguments.loop * members
    print(f"loop: {loop:.1f} s ({arguments.loop} members run), ratio {loop / batched:.1f}")


if __name__ == "__main__":
    main()
