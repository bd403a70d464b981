"""Draw docs/front.png, the picture of the front page: a table, a Gaussian process and a network, with uncertainty.

    python docs/draw_front.py

It takes some seconds. The letters are large, since a phone shows the picture at a third of its size.
"""

from pathlib import Path

import gpytorch
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from PIL import Image
from sklearn.datasets import load_diabetes, make_moons

import torchngvi as ngvi
from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, train_svgp_in_batches

OUT = Path(__file__).parent / "front.png"
BLUE, GREY = "#1f5fa8", "0.55"


def table(axes):
    """Intervals of the coefficients of a regression."""
    data = load_diabetes(scaled=True)
    X = torch.tensor(data.data) / torch.tensor(data.data).std(0)
    y = torch.tensor(data.target > 140).double()
    model = ngvi.GeneralizedLinear(X - X.mean(0), y, prior_precision=0.1)
    q = ngvi.CholeskyGaussian(model.dim, dtype=torch.float64)
    assert ngvi.fit(q, model, progress=False).converged
    mean, half = q.mean[: X.shape[1]], 1.96 * q.stddev[: X.shape[1]]
    for place, at in enumerate(mean.argsort()):
        low, high = (mean - half)[at], (mean + half)[at]
        clear = bool(low > 0) or bool(high < 0)
        axes.plot([low, high], [place, place], color=BLUE if clear else GREY, linewidth=4, solid_capstyle="round")
        axes.plot(mean[at], place, "o", color="white", markersize=3)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_title("a table")
    axes.set_xlabel("coefficients")


class Process(gpytorch.models.ApproximateGP):
    """A sparse Gaussian process on a line."""

    def __init__(self, points):
        q = NaturalGradientVariationalDistribution(len(points))
        super().__init__(gpytorch.variational.VariationalStrategy(self, points, q))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        """The prior at x."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def process(axes):
    """A curve through points with a gap, and the band in which it lies."""
    x = torch.cat([-2 + 1.5 * torch.rand(60), 0.6 + 1.4 * torch.rand(60)]).double()[:, None]
    y = torch.sin(3 * x[:, 0]) + 0.15 * torch.randn(120).double()
    model, likelihood = Process(x[::6].clone()).double(), gpytorch.likelihoods.GaussianLikelihood().double()
    adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
    train_svgp_in_batches(model, likelihood, [(x, y)], 120, adam, epochs=100, refine=True, progress=False)
    model.eval()
    along = torch.linspace(-2.2, 2.2, 200).double()[:, None]
    with torch.no_grad():
        found = model(along)
    mean, half = found.mean, 1.96 * found.stddev
    axes.fill_between(along[:, 0], mean - half, mean + half, color=BLUE, alpha=0.3, linewidth=0)
    axes.plot(along[:, 0], mean, color=BLUE, linewidth=2)
    axes.plot(x[:, 0], y, ".", color="black", markersize=3)
    axes.set_title("a Gaussian process")
    axes.set_xlabel("x")


def network(axes):
    """Two classes, and how sure a network is of the one it names."""
    inputs, labels = (torch.tensor(part) for part in make_moons(400, noise=0.2, random_state=0))
    inputs = inputs.float()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.0)
    q = ngvi.network(net, num_data=400)
    ngvi.attach(optimizer, q, steps=1500)
    for _ in range(1500):
        rows = torch.randint(400, (100,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(inputs[rows]), labels[rows]).backward()
        optimizer.step()
    net.eval()
    across, up = torch.linspace(-2, 3, 100), torch.linspace(-1.6, 2.1, 80)
    grid = torch.stack(torch.meshgrid(across, up, indexing="xy"), -1)
    with torch.no_grad():
        probability = q.predict(grid.reshape(-1, 2), samples=200)[:, 1].reshape(grid.shape[:2])
    axes.contourf(across, up, probability, levels=torch.linspace(0, 1, 11), cmap="RdBu_r")
    axes.scatter(inputs[:, 0], inputs[:, 1], c=labels, s=8, cmap="RdBu_r", edgecolors="black", linewidths=0.4)
    axes.set_title("a network")
    axes.set_xlabel("probability of a class")


def main():
    """Draw the three beside one another."""
    torch.manual_seed(0)
    with rc_context({"font.size": 14, "axes.titlesize": 17}):
        figure = Figure(figsize=(9.6, 3.3), layout="constrained")
        for axes, draw in zip(figure.subplots(1, 3), (table, process, network), strict=True):
            draw(axes)
            axes.set_xticks([])
            axes.set_yticks([])
        figure.savefig(OUT, dpi=125)
    with Image.open(OUT) as picture:
        picture.convert("RGB").quantize(64).save(OUT, optimize=True)


if __name__ == "__main__":
    main()
