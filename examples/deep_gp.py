"""A deep Gaussian process of two layers on a signal with jumps, and a single layer on the same signal.

    python examples/deep_gp.py [--rows 300] [--steps 400] [--out deep_gp.png]

Every layer holds a posterior of its own; one natural optimizer steps them all, Adam the rest.  The hidden layer is
sampled, so that gradients are noisy and the natural steps short.
"""

import argparse

import gpytorch
import torch
from gpytorch.models.deep_gps import DeepGP, DeepGPLayer
from matplotlib.figure import Figure

from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, natural_optimizer

POINTS, DRAWS = 24, 8


class Layer(DeepGPLayer):
    def __init__(self, outputs, mean):
        batch = torch.Size([] if outputs is None else [outputs])
        Z = torch.linspace(-2, 2, POINTS)[:, None].repeat(*batch, 1, 1)
        q = NaturalGradientVariationalDistribution(POINTS, batch)
        super().__init__(gpytorch.variational.VariationalStrategy(self, Z, q), 1, outputs)
        self.mean_module = mean
        kernel = gpytorch.kernels.RBFKernel(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=batch)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Deep(DeepGP):
    def __init__(self, layers):
        super().__init__()
        hidden = [Layer(1, gpytorch.means.LinearMean(1, batch_shape=torch.Size([1]))) for _ in range(layers - 1)]
        self.layers = torch.nn.ModuleList([*hidden, Layer(None, gpytorch.means.ConstantMean())])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def signal(x):
    return torch.where(x < -0.7, -1.0, torch.where(x < 0.4, 1.0, -0.3)) + 0.1 * x


def train(layers, x, y, steps):
    torch.manual_seed(0)
    model, likelihood = Deep(layers), gpytorch.likelihoods.GaussianLikelihood()
    mll = gpytorch.mlls.DeepApproximateMLL(gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y)))
    natural = natural_optimizer(mll, lr=0.1)
    adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.02)
    model.train()
    losses = []
    with gpytorch.settings.num_likelihood_samples(DRAWS):
        for _ in range(steps):
            natural.zero_grad()
            adam.zero_grad()
            loss = -mll(model(x), y)
            loss.backward()
            natural.step()
            adam.step()
            losses.append(loss.item())
    return model, likelihood, sum(losses[-20:]) / len(losses[-20:]), natural.rejections


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", default="deep_gp.png")
    options = parser.parse_args(arguments)

    torch.manual_seed(1)
    x = 4 * torch.rand(options.rows, 1) - 2
    y = signal(x[:, 0]) + 0.05 * torch.randn(options.rows)
    grid = torch.linspace(-2, 2, 400)[:, None]
    figure, results = Figure(figsize=(8, 5), layout="constrained"), {}
    for axes, layers in zip(figure.subplots(2, 1, sharex=True), (1, 2), strict=True):
        model, likelihood, loss, rejections = train(layers, x, y, options.steps)
        model.eval()
        with torch.no_grad(), gpytorch.settings.num_likelihood_samples(100):
            f = model(grid)
            mean, variance = f.mean.mean(0), f.variance.mean(0) + f.mean.var(0)
        error = (mean - signal(grid[:, 0])).abs().mean().item()
        print(f"{layers} layer{'s'[: layers - 1]}: loss {loss:.3f}, mean absolute error {error:.3f}", end=" ")
        print(f"(noise {likelihood.noise.sqrt().item():.3f}, true 0.05), steps not taken {rejections}")
        results[layers] = (loss, error, rejections)
        axes.plot(x[:, 0], y, ".", color="0.7", markersize=3)
        axes.plot(grid[:, 0], signal(grid[:, 0]), "k--", linewidth=1, label="truth")
        axes.plot(grid[:, 0], mean, label="posterior mean")
        low, high = (mean + sign * 1.96 * variance.sqrt() for sign in (-1, 1))
        axes.fill_between(grid[:, 0], low, high, alpha=0.35, label="95 %")
        axes.set_title(f"{layers} layer{'s'[: layers - 1]}: negative ELBO per datum {loss:.2f}", fontsize=10)
        axes.legend(fontsize=8, loc="lower right")
    figure.savefig(options.out, dpi=120)
    return results


if __name__ == "__main__":
    main()
