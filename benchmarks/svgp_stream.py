"""A sparse GP with 1,024 inducing points on a million rows, a batch of them in memory: time, memory, resuming.

    python benchmarks/svgp_stream.py [--rows 1000000] [--inducing 1024] [--batch 4096] [--interrupt --epochs 2]
    python benchmarks/svgp_stream.py --first [--rows 1000000] [--inducing 1024] [--seconds 60]
    python benchmarks/svgp_stream.py --in-memory [--rows 1000000] [--inducing 1024] [--seconds 60]

The rows come from a `DataLoader` over an `IterableDataset` that makes them as they are asked for.  With ``--interrupt``
a first run breaks off in the middle of its second epoch, and a new model goes on from the checkpoint of the first.
With ``--first`` there is no optimizer either: `train_svgp` learns from the first rows of the stream, as many as its
rounds would take of all, 2²⁴/M, in rounds of which none begins after so many seconds; then one natural step of length 1
over the whole stream, a batch of it in memory, brings q to its optimum, which is exact for Gaussian noise.
With ``--in-memory`` all rows are collected first, and `train_svgp` learns from them without an optimizer, in rounds, of
which none begins after so many seconds; q is then refined on all rows.
float32, with K_ZZ factored in float64.
"""

import argparse
import resource
import tempfile
import time
import warnings
from pathlib import Path

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import gpytorch as gp

from torchngvi import VN
from torchngvi.adapters.gpytorch import (
    NaturalGradientVariationalDistribution,
    SparseGP,
    train_svgp,
    train_svgp_in_batches,
)
from torchngvi.fitting import Seconds
from torchngvi.stepsizes import Constant

MOST = 2**24  # entries of the rows that `train_svgp` takes at once


def truth(x):
    return torch.sin(3 * x[:, 0]) * torch.cos(2 * x[:, 1]) + 0.5 * torch.sin(4 * x[:, 2])


class Rows(torch.utils.data.IterableDataset):
    """Batches of x (B, 4) and y (B,), the same in each epoch."""

    def __init__(self, rows, batch, stop_after=None):
        self.rows, self.batch, self.stop_after = rows, batch, stop_after

    def __iter__(self):
        generator, epoch = torch.Generator().manual_seed(1), 0
        for first in range(0, self.rows, self.batch):
            size = min(self.batch, self.rows - first)
            x = 2 * torch.rand(size, 4, generator=generator) - 1
            yield x, truth(x) + 0.3 * torch.randn(size, generator=generator)
            epoch += size
            if self.stop_after is not None and epoch >= self.stop_after:
                raise KeyboardInterrupt


class Model(gp.models.ApproximateGP):
    def __init__(self, Z):
        q = NaturalGradientVariationalDistribution(len(Z))
        super().__init__(gp.variational.VariationalStrategy(self, Z, q))
        self.mean_module = gp.means.ConstantMean()
        self.covar_module = gp.kernels.ScaleKernel(gp.kernels.RBFKernel(ard_num_dims=4))

    def forward(self, x):
        return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def made(inducing):
    torch.manual_seed(0)
    model = Model(2 * torch.rand(inducing, 4) - 1)
    likelihood = gp.likelihoods.GaussianLikelihood()
    adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.02)
    return model, likelihood, adam


def in_rounds(options, x, y):
    """`train_svgp` of these rows; the model, the likelihood and what was done."""
    model, likelihood, _ = made(options.inducing)
    model.variational_strategy.inducing_points.data.zero_()  # left open: they are chosen among the rows
    start, passed = time.perf_counter(), []
    callbacks = [lambda number, loss: print(f"round {number}: {loss:.4f}", flush=True)]
    callbacks.append(lambda *_: passed.append(time.perf_counter() - start))
    stop = Seconds(options.seconds)
    result = train_svgp(model, likelihood, (x, y), callbacks=callbacks, progress=False, stop=stop)
    print("the rounds ended after " + ", ".join(f"{t:.0f}" for t in passed) + " s; then q was refined", flush=True)
    return model, likelihood, result


def collected(options, most):
    """The first rows of the stream."""
    parts, left = [], most
    for x, y in Rows(options.rows, options.batch):
        parts.append((x[:left], y[:left]))
        left -= len(parts[-1][1])
        if not left:
            break
    return (torch.cat(part) for part in zip(*parts, strict=True))


def in_memory(options):
    """`train_svgp` of all rows; the model, the likelihood, the time and what was done."""
    x, y = collected(options, options.rows)
    start = time.perf_counter()
    model, likelihood, result = in_rounds(options, x, y)
    return model, likelihood, time.perf_counter() - start, result


def first(options):
    """`train_svgp` of the first rows, then q of the whole stream in one step."""
    start = time.perf_counter()
    x, y = collected(options, min(options.rows, max(MOST // options.inducing, 4 * options.inducing)))
    model, likelihood, result = in_rounds(options, x, y)
    print(f"hyper-parameters of {len(y)} rows after {time.perf_counter() - start:.0f} s", flush=True)
    model.train()
    likelihood.train()
    loader = torch.utils.data.DataLoader(Rows(options.rows, options.batch), batch_size=None)
    target = SparseGP(model, likelihood, loader)
    target.posterior.double()  # for the sums over all rows
    natural = VN(target.posterior, lr=1.0, step_size=Constant())
    natural.step(target)
    target.posterior.float()
    print(f"q has taken a step on all rows, {natural.rejections} rejected", flush=True)
    return model, likelihood, time.perf_counter() - start, result


def streamed(options):
    """`train_svgp` in mini-batches; the model, the likelihood, the time and what was done."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pt"
        if options.interrupt:
            model, likelihood, adam = made(options.inducing)
            once = torch.utils.data.DataLoader(Rows(options.rows, options.batch), batch_size=None)
            train_svgp_in_batches(model, likelihood, once, options.rows, adam, epochs=1, checkpoint=path)
            broken = Rows(options.rows, options.batch, stop_after=options.rows // 2)
            loader = torch.utils.data.DataLoader(broken, batch_size=None)
            print(
                train_svgp_in_batches(model, likelihood, loader, options.rows, adam, epochs=2, checkpoint=path),
                flush=True,
            )
        model, likelihood, adam = made(options.inducing)
        loader = torch.utils.data.DataLoader(Rows(options.rows, options.batch), batch_size=None)
        start = time.perf_counter()
        result = train_svgp_in_batches(
            model, likelihood, loader, options.rows, adam, epochs=options.epochs, checkpoint=path
        )
        return model, likelihood, time.perf_counter() - start, result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--inducing", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--interrupt", action="store_true", help="first break off in the second epoch, then resume")
    parser.add_argument("--first", action="store_true", help="no optimizer: hyper-parameters of the first rows")
    parser.add_argument("--in-memory", action="store_true", help="no mini-batches and no optimizer")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no further round begins")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    begun = time.process_time()
    model, likelihood, seconds, result = (in_memory if options.in_memory else first if options.first else streamed)(
        options
    )
    spent = time.process_time() - begun
    print(result)
    model.eval()
    x = 2 * torch.rand(4000, 4, generator=torch.Generator().manual_seed(2)) - 1
    with torch.no_grad():
        error = float((model(x).mean - truth(x)).square().mean().sqrt())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{options.rows} rows, M = {options.inducing}: {seconds:.0f} s, {spent:.0f} s of the processor, peak memory "
        f"{peak:.2f} GiB, error of the function {error:.3f}, noise {float(likelihood.noise.sqrt()):.3f} (true 0.3)"
    )


if __name__ == "__main__":
    main()
