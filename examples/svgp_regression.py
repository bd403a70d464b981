"""A sparse Gaussian process in GPyTorch: q by natural gradients, hyper-parameters by Adam, one evaluation a batch.

    python examples/svgp_regression.py [--rows 5000] [--epochs 15] [--out svgp_regression.png]

No learning rate for q, and at the end the exact optimum of q for the hyper-parameters that were found.
"""

import argparse

import gpytorch
import torch
from matplotlib.figure import Figure

from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, train_svgp_in_batches


class SparseRegression(gpytorch.models.ApproximateGP):
    def __init__(self, inducing_points):
        q = NaturalGradientVariationalDistribution(len(inducing_points))  # was: CholeskyVariationalDistribution
        super().__init__(gpytorch.variational.VariationalStrategy(self, inducing_points, q))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def curve(x):
    return torch.sin(3 * x) + 0.5 * torch.sin(11 * x) * (x > 0)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--out", default="svgp_regression.png")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    x = 4 * torch.rand(options.rows, 1) - 2
    y = curve(x[:, 0]) + 0.2 * torch.randn(options.rows)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=256, shuffle=True)
    model = SparseRegression(torch.linspace(-2, 2, 40)[:, None])
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.02)
    result = train_svgp_in_batches(
        model, likelihood, loader, options.rows, adam, epochs=options.epochs, refine=True, progress=False
    )
    print(result)

    model.eval()
    likelihood.eval()
    grid = torch.linspace(-2, 2, 300)
    with torch.no_grad():
        latent = model(grid[:, None])
        mean, sd = latent.mean, latent.stddev
        error = (mean - curve(grid)).square().mean().sqrt().item()
    noise = likelihood.noise.sqrt().item()
    print(f"root mean squared error of the curve {error:.3f}, noise {noise:.3f} (true 0.2)")

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(x[:500], y[:500], ".", color="0.75", markersize=3, label="data (500 rows of it)")
    axes.plot(grid, curve(grid), "k--", linewidth=1, label="truth")
    axes.plot(grid, mean, label="posterior mean")
    axes.fill_between(grid, mean - 1.96 * sd, mean + 1.96 * sd, alpha=0.4, label="95 % interval of the curve")
    axes.legend()
    figure.savefig(options.out, dpi=120)
    return result, error, noise


if __name__ == "__main__":
    main()
