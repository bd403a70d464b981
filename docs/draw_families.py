"""Draw docs/which_family.png: a density beside the q of each family that is meant for it.

    python docs/draw_families.py

It takes some seconds. Exact densities are by grids.
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure

import torchngvi as ngvi
from torchngvi.fitting import mixture_at_modes
from torchngvi.models import FactorGraph, SiteFactor
from torchngvi.posteriors import Product
from torchngvi.posteriors.flat import Gamma

OUT = Path(__file__).parent / "which_family.png"
BLUE, ORANGE, GREY = "#1f5fa8", "#d1672b", "0.8"


def gaussian(dim):
    """A dense Gaussian in float64."""
    return ngvi.CholeskyGaussian(dim, dtype=torch.float64)


def line(axes, title, low, high, log_joint, **posteriors):
    """The exact density on a grid, filled, and the density of each posterior."""
    x = torch.linspace(low, high, 600, dtype=torch.float64)[:, None]
    values = log_joint(x)
    exact = (values - values.max()).exp()
    axes.fill_between(x[:, 0], exact / torch.trapezoid(exact, x[:, 0]), color=GREY, linewidth=0, label="exact")
    for (name, q), color in zip(posteriors.items(), (BLUE, ORANGE), strict=False):
        axes.plot(x[:, 0], q.log_prob(x).detach().exp(), color=color, label=name.replace("_", " "))
    axes.set_title(title, fontsize=10)
    axes.set_yticks([])
    axes.legend(fontsize=7, frameon=False)


def plane(axes, title, xs, ys, log_joint):
    """The exact density on a grid, filled; returns the points of the grid."""
    grid = torch.stack(torch.meshgrid(xs, ys, indexing="xy"), -1)
    values = log_joint(grid.reshape(-1, 2)).reshape(grid.shape[:2])
    axes.contourf(xs, ys, (values - values.max()).exp(), levels=6, cmap="Greys", alpha=0.6)
    axes.set_title(title, fontsize=10)
    axes.set_yticks([])
    return grid


def regression(axes):
    """A coefficient of a logistic regression of sixty rows."""
    X = torch.linspace(-2, 2, 60, dtype=torch.float64)[:, None]
    model = ngvi.GeneralizedLinear(X, (X[:, 0] + 0.8 * torch.sin(9 * X[:, 0]) > 0).double(), prior_precision=0.1)
    q = gaussian(1)
    ngvi.fit(q, model, progress=False)
    line(axes, "Gaussian: a coefficient", 0, 5, model.log_joint, Gaussian=q)


def rate(axes):
    """A rate of events, which is conjugate."""

    def log_joint(x):  # two events in three hours, rate ~ Gamma(1, 0.5)
        return (2 * x.log() - 3.5 * x)[..., 0]

    q = Gamma(torch.ones(2, dtype=torch.float64))
    ngvi.fit(q, log_joint, progress=False)
    line(axes, "exponential family: a rate", 0.01, 3, log_joint, gamma=q)


def skewed(axes):
    """The logarithm of a rate of which no event was seen."""

    def log_joint(x):  # the logarithm of a rate, no event in two hours
        return (0.5 * x - 2 * x.exp())[..., 0]

    q, warped = gaussian(1), gaussian(1).warped()
    ngvi.fit(q, log_joint, progress=False)
    ngvi.fit(warped, log_joint, progress=False)
    line(axes, "warp: a skewed coordinate", -9, 2, log_joint, Gaussian=q, warped=warped)


def modes(axes):
    """A number whose square was seen."""

    def log_joint(x):  # a number whose square was seen
        return (-0.5 * ((x.square() - 4) / 1.2).square() - 0.02 * (x - 1).square())[..., 0]

    q = gaussian(1)
    ngvi.fit(q, log_joint, progress=False)
    mixture = mixture_at_modes(gaussian(1), log_joint, starts=torch.tensor([[-3.0], [3.0]], dtype=torch.float64))
    ngvi.fit(mixture, log_joint, progress=False)
    line(axes, "mixture: two modes", -4, 4, log_joint, Gaussian=q, mixture=mixture)


def kinds(axes):
    """The mean and the precision of six numbers."""
    y = torch.tensor([0.3, -1.2, 2.0, 0.7, -0.1, 1.1], dtype=torch.float64)

    def of_both(mu, tau):
        return torch.distributions.Normal(mu, tau.rsqrt()).log_prob(y)

    q = Product(mu=gaussian(1), tau=Gamma(torch.ones(2, dtype=torch.float64)))
    prior = SiteFactor(lambda tau: -0.3 * tau, "tau")
    ngvi.fit(q, FactorGraph([SiteFactor(of_both, "mu", "tau", plates=(6,)), prior]), progress=False)
    mu, tau = torch.linspace(-1, 2, 150, dtype=torch.float64), torch.linspace(0.05, 3, 150, dtype=torch.float64)
    grid = plane(axes, "product: a mean and a precision", mu, tau,
                 lambda x: of_both(x[:, :1], x[:, 1:]).sum(-1) - 0.3 * x[:, 1])  # fmt: skip
    density = q["mu"].log_prob(grid[..., :1]) + q["tau"].log_prob(grid[..., 1:])
    axes.contour(mu, tau, (density - density.max()).exp().detach(), levels=4, colors=BLUE, linewidths=1)


def curved(axes):
    """A banana, with draws of what refine returns."""

    def log_joint(theta):
        return -0.5 * theta[:, 0] ** 2 - 2 * (theta[:, 1] - theta[:, 0] ** 2) ** 2

    q = gaussian(2)
    refined = ngvi.refine(ngvi.fit(q, log_joint, progress=False), log_joint)
    x, y = torch.linspace(-3, 3, 150, dtype=torch.float64), torch.linspace(-2, 8, 150, dtype=torch.float64)
    plane(axes, "refine: a curved density", x, y, log_joint)
    draws = refined.sample(300, torch.Generator().manual_seed(0))
    axes.plot(draws[:, 0], draws[:, 1], ".", markersize=2, color=BLUE)
    axes.set(xlim=(-3, 3), ylim=(-2, 8))


def main():
    """Draw the six panels."""
    torch.manual_seed(0)
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    for axes, draw in zip(figure.subplots(2, 3).flat, (regression, rate, kinds, skewed, modes, curved), strict=True):
        draw(axes)
    figure.savefig(OUT, dpi=110)


if __name__ == "__main__":
    main()
