"""`train_svgp` with and without its second start, on a function that has several periods in one of four inputs.

    python benchmarks/svgp_second_start.py [--seeds 3] [--rows 1200] [--inducing 60]

The function is sin(4 x₁) + 0.7 x₂ + ½(x₃² - 1) of standard normal inputs, with noise of standard deviation 0.3, or its
sign after noise of 0.7.  For each kernel, likelihood and dtype a line has the negative ELBO a row at the end without
and with it, as the worst of the seeds, and all processor seconds; "not" is a run that ended in an error.
"""

import argparse
import math
import time
import warnings
from unittest import mock

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import gpytorch as gp

from torchngvi.adapters.gpytorch import train_svgp
from torchngvi.adapters.gpytorch.engines import Rounds
from torchngvi.errors import TorchngviError

PERIODIC, LINEAR = gp.kernels.PeriodicKernel, gp.kernels.LinearKernel
KERNELS = {
    "RBF": [],
    "RBF + periodic": [(PERIODIC, 0)],
    "RBF + linear": [(LINEAR, 1)],
    "RBF + periodic + linear": [(PERIODIC, 0), (LINEAR, 1)],
}


class Model(gp.models.ApproximateGP):
    """Inducing points left open, and an RBF kernel with a length scale for each input besides those of one input."""

    def __init__(self, size, others):
        q = gp.variational.CholeskyVariationalDistribution(size)
        super().__init__(gp.variational.VariationalStrategy(self, torch.zeros(size, 4), q))
        self.mean_module = gp.means.ConstantMean()
        self.covar_module = gp.kernels.ScaleKernel(gp.kernels.RBFKernel(ard_num_dims=4))
        for kernel, feature in others:
            self.covar_module = self.covar_module + gp.kernels.ScaleKernel(kernel(active_dims=[feature]))

    def forward(self, x):
        return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def data(rows, seed, two_classes):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator)
    f = torch.sin(4 * x[:, 0]) + 0.7 * x[:, 1] + 0.5 * (x[:, 2].square() - 1)
    y = f + 0.3 * torch.randn(rows, generator=generator)
    return x, (f + 0.7 * torch.randn(rows, generator=generator) > 0).float() if two_classes else y


def ended(options, kernel, two_classes, dtype, seed):
    torch.manual_seed(0)
    model = Model(options.inducing, KERNELS[kernel]).to(dtype)
    likelihood = gp.likelihoods.BernoulliLikelihood() if two_classes else gp.likelihoods.GaussianLikelihood()
    x, y = data(options.rows, seed, two_classes)
    try:
        return train_svgp(model, likelihood.to(dtype), (x.to(dtype), y.to(dtype)), progress=False).losses[-1]
    except TorchngviError:
        return math.inf


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1200)
    parser.add_argument("--inducing", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| kernel | likelihood | dtype | without | with | seconds |\n|---|---|---|---|---|---|")
    for kernel in KERNELS:
        for likelihood in ("Gaussian", "two classes"):
            for dtype in (torch.float64, torch.float32):
                cells, seconds = [], []
                for without in (True, False):
                    begin = time.process_time()
                    with mock.patch.object(Rounds, "_again", return_value=False) if without else mock.MagicMock():
                        runs = (kernel, likelihood == "two classes", dtype)
                        losses = [ended(options, *runs, seed) for seed in range(options.seeds)]
                    seconds.append(f"{time.process_time() - begin:.1f}")
                    cells.append(f"{max(losses):.3f}" if max(losses) < math.inf else "not")
                name = str(dtype).removeprefix("torch.")
                print(f"| {kernel} | {likelihood} | {name} | {' | '.join(cells)} | {', '.join(seconds)} |", flush=True)


if __name__ == "__main__":
    main()
