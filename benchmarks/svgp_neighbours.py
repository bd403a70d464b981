"""Predictions of a sparse GP corrected by the training rows near each test row, beside the usual and the exact ones.

    TORCHNGVI_DATA=... python benchmarks/svgp_neighbours.py [--sets airfoil bike elevators power protein] [--seeds 0 1]
        [--inducing 32 64 128 256 512] [--rows 1000] [--auto] [--looser]

`train_svgp` with a Matérn 5/2 kernel, one length scale an input, on standardised data; then the negative log predictive
density, the root mean squared error and the coverage of 95 % intervals on up to 1,000 other rows, of ``model(x)``, of
`predict_with_neighbours` with 4, 8 and 16 rows, and of the exact GP at the same hyper-parameters.  With --auto the
number of inducing points doubles from the first that is given; with --looser the hyper-parameters are learnt by the
bound of Titsias (2009) in the place of that of 2025.
"""

import argparse
import itertools
import math
import os
import time
from pathlib import Path

import gpytorch
import numpy as np
import torch

from torchngvi.adapters.gpytorch import predict_with_neighbours, sparse_gp, train_svgp


class Model(gpytorch.models.ApproximateGP):
    """The sparse GP of the table."""

    def __init__(self, size: int, features: int) -> None:
        q = gpytorch.variational.CholeskyVariationalDistribution(size)
        super().__init__(gpytorch.variational.VariationalStrategy(self, torch.zeros(size, features), q))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(2.5, ard_num_dims=features))

    def forward(self, x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        """The prior at some rows."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def load_rows(name: str, rows: int, seed: int) -> list[torch.Tensor]:
    """Training and test rows, standardised by the training rows, without constant columns."""
    folder = Path(os.environ["TORCHNGVI_DATA"])
    if (packed := folder / "uci_regression" / f"{name}.npz").exists():
        with np.load(packed) as file:
            table = np.column_stack([file["X"], file["y"]])
    else:
        table = np.loadtxt(folder / "gp_uci" / f"{name}_data.csv.gz", delimiter=",")
    table = table[np.random.default_rng(seed).permutation(len(table))[: rows + 1000]]
    table = (table - table[:rows].mean(0)) / table[:rows].std(0).clip(1e-12)
    both = torch.tensor(table[:, table[:rows].std(0) > 0.5])
    return [both[:rows, :-1], both[:rows, -1], both[rows:, :-1], both[rows:, -1]]


@torch.no_grad()
def predict_exactly(model: Model, noise: torch.Tensor, x: torch.Tensor, y: torch.Tensor, new: torch.Tensor) -> tuple:
    """Mean and variance of the exact GP."""
    joint, n = model.forward(torch.cat([x, new])), len(x)
    K = joint.covariance_matrix
    root = torch.linalg.cholesky(K[:n, :n] + noise * torch.eye(n).double())
    half = torch.linalg.solve_triangular(root, torch.cat([K[:n, n:], (y - joint.mean[:n])[:, None]], 1), upper=False)
    return joint.mean[n:] + half[:, :-1].mT @ half[:, -1], K.diagonal()[n:] - half[:, :-1].square().sum(0)


def score(mean: torch.Tensor, variance: torch.Tensor, y: torch.Tensor) -> str:
    """Negative log predictive density, root mean squared error, coverage."""
    error, sd = y - mean, variance.sqrt()
    nlpd = 0.5 * (error / sd).square() + sd.log() + 0.5 * math.log(2 * math.pi)
    inside = (error.abs() < 1.96 * sd).double().mean()
    return f"{nlpd.mean():7.3f} {error.square().mean().sqrt():6.4f} {inside:5.3f}"


def learn_by_the_looser_bound() -> None:
    """Leave out what the bound of 2025 adds to that of 2009."""
    sparse_gp.tightened = lambda beta, d, share: (torch.zeros_like(d), torch.zeros_like(d))


def report(name: str, size: int, seed: int, chosen: argparse.Namespace) -> None:
    """Print the rows of one set, number of inducing points and seed."""
    x, y, new, wanted = load_rows(name, chosen.rows, seed)
    model = Model(size, x.shape[1]).double()
    model.covar_module.base_kernel.lengthscale = math.sqrt(x.shape[1])
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    start, inducing = time.process_time(), "auto" if chosen.auto else "given"
    result = train_svgp(model, likelihood, (x, y), inducing=inducing, progress=False)
    spent, points = time.process_time() - start, result.inducing or size
    told = f", gap {result.gap:.4f}, doubling {result.doubling:.4f}" if chosen.auto else ""
    noise = likelihood.noise.detach()
    where = f"{name}, M = {points}, seed {seed}: {result.losses[-1]:.4f}, {spent:.1f} s"
    print(f"{where}, noise sd {float(noise.sqrt()):.4f}{told}")
    for number in (0, 4, 8, 16):
        start = time.process_time()
        found = predict_with_neighbours(model, likelihood, new, x, y, number)
        spent = time.process_time() - start
        print(f"  {number:3d} rows {score(found.mean, found.variance + noise, wanted)} {spent:5.2f}", flush=True)
    mean, variance = predict_exactly(model, noise, x, y, new)
    print(f"  exact    {score(mean, variance + noise, wanted)}", flush=True)


def main() -> None:
    """Print the rows of each set, number of inducing points and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["airfoil", "bike", "elevators", "power", "protein"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--inducing", nargs="+", type=int, default=[32, 64, 128, 256, 512])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--auto", action="store_true")
    parser.add_argument("--looser", action="store_true")
    chosen = parser.parse_args()
    if chosen.looser:
        learn_by_the_looser_bound()
    print("prediction             NLPD   rmse  within     s")
    for name, size in itertools.product(chosen.sets, chosen.inducing[:1] if chosen.auto else chosen.inducing):
        for seed in chosen.seeds:
            report(name, size, seed, chosen)


if __name__ == "__main__":
    main()
