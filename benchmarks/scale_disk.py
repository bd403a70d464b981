"""Rows from disk: an exact fit within a bound of memory, beside the same fit in memory and draws in batches.

    python benchmarks/scale_disk.py make --rows 6000000 --dim 30 --out FOLDER      write X.npy, y.npy and a Parquet file
    python benchmarks/scale_disk.py run npy FOLDER                                  one line: time, passes, peak memory

Ways of run: npy and parquet, by `Streamed`; memory, all rows in a `GeneralizedLinear`; draws, by `DataLogJoint`.  Each
is a process of its own, on one thread; on a busy machine its seconds on the CPU compare.  The peak is that of resident
memory, torch's 250 MB among it.
"""

import argparse
import resource
import time
from pathlib import Path

import numpy as np
import torch

from torchngvi import CholeskyGaussian, DataLogJoint, GeneralizedLinear, Streamed, fit
from torchngvi.adapters.files import Npy, Parquet

BATCH = 100_000


def make(folder, rows, dim, group):
    """Logistic regression with an intercept, correlated columns and coefficients of sd 0.3, written batch by batch."""
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    theta = 0.3 * generator.standard_normal(dim)
    mix = np.eye(dim) + 0.3 * generator.standard_normal((dim, dim)) / np.sqrt(dim)
    names = [f"x{k}" for k in range(dim)]
    schema = pa.schema([(name, pa.float64()) for name in names] + [("y", pa.int64())])
    X = np.lib.format.open_memmap(folder / "X.npy", "w+", np.float64, (rows, dim))
    y = np.lib.format.open_memmap(folder / "y.npy", "w+", np.int64, (rows,))
    with parquet.ParquetWriter(folder / "rows.parquet", schema) as writer:
        for start in range(0, rows, group):
            count = min(group, rows - start)
            part = generator.standard_normal((count, dim)) @ mix
            part[:, 0] = 1.0
            labels = (generator.random(count) < 1 / (1 + np.exp(-part @ theta))).astype(np.int64)
            X[start : start + count], y[start : start + count] = part, labels
            writer.write_table(pa.table([*part.T, labels], schema=schema))
    X.flush()
    y.flush()


def target(way, folder):
    batches = Npy(folder / "X.npy", folder / "y.npy", BATCH)
    if way == "npy":
        return Streamed.linear(batches, batches.num_data, classes=(0, 1))
    if way == "parquet":
        batches = Parquet(folder / "rows.parquet", "y", rows=BATCH)
        return Streamed.linear(batches, batches.num_data, classes=(0, 1))
    if way == "memory":
        X, y = (torch.from_numpy(np.load(folder / name)) for name in ("X.npy", "y.npy"))
        return GeneralizedLinear(X, y.double(), classes=(0, 1))

    def log_likelihood(theta, batch):
        X, y = batch
        eta = theta @ X.mT
        return (y * eta - torch.nn.functional.softplus(eta)).sum(-1)

    return DataLogJoint(log_likelihood, lambda theta: -0.5 * theta.square().sum(-1), batches, batches.num_data)


def run(way, folder):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    began = time.perf_counter()
    model = target(way, folder)
    q = CholeskyGaussian(model.dim if way != "draws" else np.load(folder / "X.npy", mmap_mode="r").shape[1], **F64)
    told = []

    def tell(record):
        told.append((record.seconds, record.loss))
        print(f"  {record.evaluations} evaluations, {record.seconds:.1f} s, norm {record.norm:.3g}", flush=True)

    result = fit(q, model, callbacks=[tell], progress=False, examine=False)
    seconds, peak = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{way}: {seconds:.1f} s, {time.process_time():.1f} s on the CPU, {result.evaluations} evaluations, "
        f"peak {peak:.0f} MB, converged {result.converged}, "
        f"loss {result.loss:.9f}, mean {q.mean[:3].tolist()}, sd {q.stddev[:3].tolist()}",
        flush=True,
    )


F64 = {"dtype": torch.float64}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make")
    maker.add_argument("--rows", type=int, default=6_000_000)
    maker.add_argument("--dim", type=int, default=30)
    maker.add_argument("--group", type=int, default=100_000, help="rows of a Parquet row group")
    maker.add_argument("--out", type=Path, required=True)
    runner = commands.add_parser("run")
    runner.add_argument("way", choices=["npy", "parquet", "memory", "draws"])
    runner.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "make":
        make(options.out, options.rows, options.dim, options.group)
    else:
        run(options.way, options.folder)


if __name__ == "__main__":
    main()
