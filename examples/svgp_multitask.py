"""Three sensors that see two hidden signals, each with a gap: a linear model of coregionalisation.

    python examples/svgp_multitask.py [--rows 400] [--epochs 60] [--out svgp_multitask.png]

The natural steps move one posterior over the inducing values of both signals; Adam moves the mixing matrix, the kernels
and the noise.  Missing readings are NaN, which GPyTorch leaves out where `observation_nan_policy` says so.
"""

import argparse

import gpytorch
import torch
from matplotlib.figure import Figure

from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, natural_optimizer

SIGNALS, SENSORS = 2, 3


class Sensors(gpytorch.models.ApproximateGP):
    def __init__(self, inducing_points):
        batch = torch.Size([SIGNALS])
        q = NaturalGradientVariationalDistribution(inducing_points.shape[-2], batch)
        base = gpytorch.variational.VariationalStrategy(self, inducing_points, q)
        super().__init__(gpytorch.variational.LMCVariationalStrategy(base, SENSORS, SIGNALS))
        self.mean_module = gpytorch.means.ZeroMean(batch_shape=batch)
        kernel = gpytorch.kernels.RBFKernel(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=batch)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def truth(x):
    signals = torch.stack([torch.sin(2 * x), torch.cos(5 * x) * torch.exp(-0.1 * x**2)], -1)
    return signals @ torch.tensor([[1.0, 0.3, -0.8], [0.2, 1.0, 0.6]], dtype=x.dtype)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--out", default="svgp_multitask.png")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    x = 6 * torch.rand(options.rows, dtype=torch.float64) - 3
    y = truth(x) + 0.1 * torch.randn(options.rows, SENSORS, dtype=torch.float64)
    gaps = torch.stack([(x > left) & (x < left + 1.5) for left in (-2.5, -0.5, 1.2)], -1)
    y[gaps] = torch.nan
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[:, None], y), batch_size=100, shuffle=True)

    model = Sensors(torch.linspace(-3, 3, 25, dtype=torch.float64)[:, None].repeat(SIGNALS, 1, 1)).double()
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=SENSORS).double()
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=options.rows)
    natural = natural_optimizer(mll, lr=0.3)
    adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.03)
    model.train()
    with gpytorch.settings.observation_nan_policy("fill"):
        for _ in range(options.epochs):
            total = 0.0
            for inputs, targets in loader:
                natural.zero_grad()
                adam.zero_grad()
                loss = -mll(model(inputs), targets)
                loss.backward()
                natural.step()
                adam.step()
                total += loss.item() * len(targets) / options.rows

    model.eval()
    grid = torch.linspace(-3, 3, 200, dtype=torch.float64)
    with torch.no_grad():
        latent = model(grid[:, None])
        mean, sd = latent.mean, latent.variance.sqrt()
    inside = torch.stack([(grid > left) & (grid < left + 1.5) for left in (-2.5, -0.5, 1.2)], -1)
    errors = (mean - truth(grid))[inside].square().mean().sqrt(), (mean - truth(grid))[~inside].square().mean().sqrt()
    in_gaps, outside = (error.item() for error in errors)
    print(f"loss {total:.4f}, error where a sensor was silent {in_gaps:.3f}, elsewhere {outside:.3f}", end=" ")
    print(f"(noise 0.1, signal {truth(grid).std().item():.2f}), steps not taken {natural.rejections}")

    figure = Figure(figsize=(8, 5), layout="constrained")
    for index, axes in enumerate(figure.subplots(SENSORS, 1, sharex=True)):
        axes.plot(x, y[:, index], ".", color="0.7", markersize=3, label="readings")
        axes.plot(grid, truth(grid)[:, index], "k--", linewidth=1, label="truth")
        axes.plot(grid, mean[:, index], label="posterior mean")
        axes.fill_between(grid, *(mean[:, index] + s * 1.96 * sd[:, index] for s in (-1, 1)), alpha=0.35, label="95 %")
        axes.set_ylabel(f"sensor {index + 1}")
    figure.legend(*axes.get_legend_handles_labels(), ncols=4, fontsize=8, loc="outside upper center")
    figure.savefig(options.out, dpi=120)
    return in_gaps, outside, natural.rejections


if __name__ == "__main__":
    main()
