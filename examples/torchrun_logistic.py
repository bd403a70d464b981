"""Logistic regression with the rows spread over processes, one posterior, and a checkpoint to go on from.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/torchrun_logistic.py [--rows 200000] [--dim 20]
    python examples/torchrun_logistic.py                                     the same in one process

Every rank reads its part of the rows, here of files written at the first run; the result is that of one process with
all of them.  A rank that is killed takes the others with it, torchrun starts them again, and the fit goes on from the
checkpoint to the same bits.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch

from torchngvi import CholeskyGaussian, Processes, Sharded, Streamed, fit
from torchngvi.adapters.files import Npy


def write_rows(folder, rows, dim):
    """Rows of a logistic regression, X.npy and y.npy."""
    generator = np.random.default_rng(0)
    X = generator.standard_normal((rows, dim))
    theta = generator.standard_normal(dim) / np.sqrt(dim)
    np.save(folder / "X.npy", X)
    np.save(folder / "y.npy", (generator.random(rows) < 1 / (1 + np.exp(-X @ theta))).astype(np.int64))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=20)
    parser.add_argument("--batch", type=int, default=20_000, help="rows in memory at once")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "torchrun_logistic"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the same on all ranks, so that they find the same bits
    if "RANK" in os.environ:  # set by torchrun
        torch.distributed.init_process_group("gloo")
    everyone = Processes()
    with everyone.together():  # where this fails on one rank, all of them say so
        options.folder.mkdir(parents=True, exist_ok=True)
        if everyone.leads and not (options.folder / "X.npy").exists():
            write_rows(options.folder, options.rows, options.dim)
    with everyone.together():
        batches = Npy(options.folder / "X.npy", options.folder / "y.npy", options.batch)
        mine = batches.share(everyone.rank, everyone.world)
        model = Streamed.linear(mine, mine.num_data, classes=(0, 1))
    target = Sharded(model, num_data=batches.num_data)
    q = CholeskyGaussian(model.dim, dtype=torch.float64)
    result = fit(q, target, checkpoint=options.folder / "run.pt", checkpoint_every=1)
    if everyone.leads:
        print(f"{everyone.world} ranks, {result.evaluations} evaluations: {result.reason}")
        print(f"negative ELBO {result.loss:.6f}, mean {[round(x, 4) for x in q.mean[:3].tolist()]}")
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()
    return q, result


if __name__ == "__main__":
    main()
