"""Passes over a9a (32,561 rows) until the negative ELBO is within 1 and 0.1 nats: mini-batches of 512, no tuning.

    python benchmarks/minibatches.py [--seeds 3]

The generalised linear model by `fit(q, model, batch_size=512)`, and the same model as a black box, a
log likelihood of a batch, by `fit(q, DataLogJoint(...))`.  A pass is 32,561 rows seen, whatever the number
of draws; each q counts when the pass that led to it is over.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from sklearn.datasets import load_svmlight_file

from torchngvi import CholeskyGaussian, DataLogJoint, GeneralizedLinear, fit

COLUMNS, PRECISION, BATCH = 123, 1e-2, 512
GAPS = (1.0, 0.1, 0.01)


class Counted(GeneralizedLinear):
    """Counts the rows it is evaluated on."""

    rows_seen = 0

    def marginals(self, frame):
        Counted.rows_seen += self.X.shape[0]
        return super().marginals(frame)


def passes(run, seen, model, lowest):
    """Passes at which each gap was reached, and in all."""
    reached, start = {}, time.perf_counter()

    def look(record):
        done = seen() / len(model.y)
        rows, gap = Counted.rows_seen, None
        with torch.no_grad():
            gap = float(model.negative_elbo(run.q)) - lowest
        Counted.rows_seen = rows
        for wanted in GAPS:
            if gap < wanted:
                reached.setdefault(wanted, done)
        return gap < GAPS[-1]

    result = run(look)
    line = ", ".join(f"{gap:g} nats {reached.get(gap, float('nan')):.1f}" for gap in GAPS)
    print(f"  passes to {line}; {time.perf_counter() - start:.1f} s; {result}", flush=True)


class Run:
    """A fit from a new q."""

    def __init__(self, target, **options):
        self.q, self.target, self.options = CholeskyGaussian(COLUMNS, dtype=torch.float64), target, options

    def __call__(self, look):
        return fit(self.q, self.target, callbacks=[look], progress=False, **self.options)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    path = Path(os.environ["TORCHNGVI_DATA"]) / "libsvm" / "a9a.svm.gz"
    X, y = load_svmlight_file(str(path), n_features=COLUMNS)
    model = Counted(torch.tensor(X.toarray()), y, prior_precision=PRECISION)
    q = CholeskyGaussian(COLUMNS, dtype=torch.float64)
    lowest = fit(q, model, tolerance=1e-6, progress=False, batch_size=BATCH).loss
    print(f"a9a: {len(model.y)} rows, lowest negative ELBO {lowest:.6f}")

    X, y, black_box_rows = model.X, (model.y > 0).double(), [0]

    def log_likelihood(theta, batch):
        black_box_rows[0] += len(batch[1])
        eta = theta @ batch[0].mT
        return (batch[1] * eta - torch.nn.functional.softplus(eta)).sum(-1)

    for seed in range(seeds):
        torch.manual_seed(seed)
        Counted.rows_seen = 0
        print(f"seed {seed}, generalised linear model")
        passes(Run(model, batch_size=BATCH), lambda: Counted.rows_seen, model, lowest)

        torch.manual_seed(seed)
        black_box_rows[0] = 0
        order = torch.randperm(len(model.y))
        target = DataLogJoint(
            log_likelihood,
            lambda theta: -model.prior.energy(theta),
            torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X[order], y[order]), batch_size=BATCH),
            num_data=len(model.y),
        )
        print(f"seed {seed}, black box")
        passes(Run(target), lambda: black_box_rows[0], model, lowest)


if __name__ == "__main__":
    main()
