"""Many more coefficients than rows: leukemia (38 x 7129) and 200 sparse rows of a million columns.

    python benchmarks/wide.py

Evaluations from the prior to a natural-gradient norm of 1e-8, seconds with the reduction and all
marginal variances, and the largest memory of the process so far.
"""

import os
import resource
import time
import warnings
from pathlib import Path

import torch
from sklearn.datasets import load_svmlight_file

from torchngvi import GeneralizedLinear
from torchngvi.fitting import RowSpace
from torchngvi.numerics import sparse


def leukemia():
    path = Path(os.environ["TORCHNGVI_DATA"]) / "libsvm" / "leukemia.svm.gz"
    X, y = load_svmlight_file(str(path), n_features=7129)
    return torch.tensor(X.toarray()), y, 0.2


def synthetic(rows=200, columns=1_000_000, entries=500):
    generator = torch.Generator().manual_seed(0)
    where = torch.randint(0, columns, (rows, entries), generator=generator).sort(1).values
    values = torch.randn(rows * entries, generator=generator, dtype=torch.float64)
    starts = torch.arange(0, rows * entries + 1, entries)
    y = (torch.rand(rows, generator=generator) < 0.5).double()
    return sparse.compressed(starts, where.reshape(-1), values, (rows, columns)), y, 1.0


def main():
    warnings.filterwarnings("ignore", "Sparse CSR")
    problems = {"200 x 1,000,000, sparse": synthetic}
    if "TORCHNGVI_DATA" in os.environ:
        problems = {"leukemia, 38 x 7,129": leukemia, **problems}
    for name, load in problems.items():
        X, y, precision = load()
        start = time.perf_counter()
        posterior, result = RowSpace(GeneralizedLinear(X, y, prior_precision=precision)).fit(
            tolerance=1e-8, progress=False
        )
        smallest = float(posterior.variance.min())
        seconds, memory = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{name}: {result}\n    smallest variance {smallest:.4g}, {seconds:.2f} s, {memory:.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
