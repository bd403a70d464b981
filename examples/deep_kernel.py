"""Odd or even? A neural network finds two features of handwritten digits, a sparse GP classifies them.

    python examples/deep_kernel.py [--epochs 30] [--out deep_kernel.png]

Adam trains the network, the kernel and the inducing points, which live among the features; the GP's q takes natural
steps.  The data come with scikit-learn.
"""

import argparse

import gpytorch
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, natural_optimizer

POINTS = 40


class DeepKernel(gpytorch.models.ApproximateGP):
    def __init__(self, network, inducing_points):
        q = NaturalGradientVariationalDistribution(len(inducing_points))
        super().__init__(gpytorch.variational.VariationalStrategy(self, inducing_points, q))
        self.network = network
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, features):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(features), self.covar_module(features))

    def __call__(self, images, **options):
        return super().__call__(self.network(images), **options)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--out", default="deep_kernel.png")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    images, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(digits % 2, dtype=torch.float32)
    order = torch.randperm(len(y))
    held_out, train = order[:400], order[400:]
    data = torch.utils.data.TensorDataset(x[train], y[train])
    loader = torch.utils.data.DataLoader(data, batch_size=200, shuffle=True)

    network = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2), torch.nn.BatchNorm1d(2, affine=False)
    )
    with torch.no_grad():
        inducing_points = network(x[train])[:POINTS]
    model, likelihood = DeepKernel(network, inducing_points), gpytorch.likelihoods.BernoulliLikelihood()
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(train))
    natural = natural_optimizer(mll, lr=0.2)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    model.train()
    for _ in range(options.epochs):
        total = 0.0
        for inputs, labels in loader:
            natural.zero_grad()
            adam.zero_grad()
            loss = -mll(model(inputs), labels)
            loss.backward()
            natural.step()
            adam.step()
            total += loss.item() * len(labels) / len(train)

    model.eval()
    with torch.no_grad():
        features = network(x[held_out])
        axis = torch.linspace(-2.5, 2.5, 100)
        shape = gpytorch.models.ApproximateGP.__call__(model, torch.cartesian_prod(axis, axis))
        probability = likelihood(shape).mean.reshape(100, 100)
        predicted = likelihood(model(x[held_out])).mean
    accuracy = ((predicted > 0.5) == y[held_out].bool()).float().mean().item()
    logged = torch.where(y[held_out] > 0.5, predicted, 1 - predicted).log().mean().item()
    print(f"loss {total:.4f}, held-out accuracy {accuracy:.3f}, log likelihood {logged:.3f}", end=", ")
    print(f"steps not taken {natural.rejections}")

    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.add_subplot()
    drawn = axes.contourf(axis, axis, probability.mT, levels=10, cmap="RdBu_r", alpha=0.8)
    for place, digit in zip(features[:200], digits[held_out[:200]], strict=True):
        axes.text(*place.clamp(-2.4, 2.4).tolist(), str(digit), ha="center", va="center", fontsize=8)
    axes.plot(*model.variational_strategy.inducing_points.detach().T, "k+", markersize=6, label="inducing points")
    axes.set(xlim=(-2.5, 2.5), ylim=(-2.5, 2.5), xlabel="feature 1", ylabel="feature 2")
    axes.legend(fontsize=8)
    figure.colorbar(drawn, label="p(odd)")
    figure.savefig(options.out, dpi=120)
    return accuracy, natural.rejections


if __name__ == "__main__":
    main()
