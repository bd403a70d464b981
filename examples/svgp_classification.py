"""Natural gradients dropped into GPyTorch's usual loop: a sparse classifier, compared with Adam.

    python examples/svgp_classification.py [--rows 2000] [--epochs 10] [--out svgp_classification.png]

Three lines differ from a loop with Adam alone; they are marked.
"""

import argparse

import gpytorch
import torch
from matplotlib.figure import Figure
from sklearn.datasets import make_moons

from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, natural_optimizer


class SparseClassifier(gpytorch.models.ApproximateGP):
    def __init__(self, inducing_points):
        q = NaturalGradientVariationalDistribution(len(inducing_points))  # 1. the distribution
        super().__init__(gpytorch.variational.VariationalStrategy(self, inducing_points, q))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", default="svgp_classification.png")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    data = make_moons(options.rows + 500, noise=0.25, random_state=0)
    x, y = (torch.tensor(part, dtype=torch.float32) for part in data)
    train = torch.utils.data.TensorDataset(x[500:], y[500:])
    loader = torch.utils.data.DataLoader(train, batch_size=200, shuffle=True)

    model = SparseClassifier(x[500:550])
    likelihood = gpytorch.likelihoods.BernoulliLikelihood()
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(train))
    natural = natural_optimizer(mll, lr=0.2)  # 2. its optimizer, beside Adam
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(natural, T_max=options.epochs)
    adam = torch.optim.Adam(model.parameters(), lr=0.03)
    model.train()
    for _ in range(options.epochs):
        total = 0.0
        for inputs, labels in loader:
            natural.zero_grad()
            adam.zero_grad()
            loss = -mll(model(inputs), labels)
            loss.backward()
            natural.step()  # 3. its step
            adam.step()
            total += loss.item() / len(loader)
        schedule.step()

    model.eval()
    axis = torch.linspace(-2.5, 3.5, 80)
    grid = torch.cartesian_prod(axis, axis)
    with torch.no_grad():
        held_out = likelihood(model(x[:500])).mean
        probability = likelihood(model(grid)).mean.reshape(80, 80)
    accuracy = ((held_out > 0.5) == y[:500].bool()).float().mean().item()
    print(f"loss {total:.4f}, held-out accuracy {accuracy:.3f}, steps not taken {natural.rejections}")

    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    shown = axes.contourf(axis, axis, probability.mT, levels=10, cmap="RdBu_r")
    axes.scatter(x[:500, 0], x[:500, 1], c=y[:500], s=8, cmap="RdBu_r", edgecolors="k", linewidths=0.3)
    figure.colorbar(shown, label="p(y = 1)")
    figure.savefig(options.out, dpi=120)
    return accuracy, natural.rejections


if __name__ == "__main__":
    main()
