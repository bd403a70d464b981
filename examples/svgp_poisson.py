"""Counts through a sparse Gaussian process: visitors an hour over four weeks, a Poisson likelihood.

    python examples/svgp_poisson.py [--weeks 4] [--epochs 30] [--out svgp_poisson.png]

The rate is softplus(f), as GPyTorch has it; f is a trend and a daily pattern, two kernels.  q takes natural steps
without a learning rate, the hyper-parameters steps of Adam; at the end q is exact for them.
"""

import argparse

import gpytorch
import torch
from matplotlib.figure import Figure
from torch.nn.functional import softplus

from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, train_svgp_in_batches

HOURS = 24


class Counts(gpytorch.models.ApproximateGP):
    def __init__(self, inducing_points, mean, variance):
        q = NaturalGradientVariationalDistribution(len(inducing_points))
        super().__init__(gpytorch.variational.VariationalStrategy(self, inducing_points, q))
        self.mean_module = gpytorch.means.ConstantMean()
        self.mean_module.constant = mean
        trend = gpytorch.kernels.RBFKernel()
        trend.lengthscale = 3.0
        daily = gpytorch.kernels.PeriodicKernel()
        daily.period_length = 1.0
        daily.raw_period_length.requires_grad_(False)  # a day is a day
        self.covar_module = gpytorch.kernels.ScaleKernel(trend) + gpytorch.kernels.ScaleKernel(trend * daily)
        for part in self.covar_module.kernels:
            part.outputscale = variance

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def rate(day):
    return torch.exp(1.5 + 0.03 * day + 1.2 * torch.sin(2 * torch.pi * (day - 0.3)) + 0.4 * torch.sin(0.5 * day))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weeks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--out", default="svgp_poisson.png")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    days = torch.arange(7 * options.weeks * HOURS, dtype=torch.float64) / HOURS
    counts = torch.poisson(rate(days))
    later = days >= days[-1] - 2.0  # the last two days are kept back
    x, y = days[~later, None], counts[~later]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=128, shuffle=True)

    model = Counts(x[:: max(1, len(x) // 60)], y.mean(), y.var()).double()
    likelihood = gpytorch.likelihoods.PoissonLikelihood().double()
    adam = torch.optim.Adam(model.parameters(), lr=0.03)
    result = train_svgp_in_batches(
        model, likelihood, loader, len(y), adam, epochs=options.epochs, refine=True, progress=False
    )
    print(result)

    model.eval()
    likelihood.eval()
    with torch.no_grad():
        f = model(days[:, None])
        middle, low, high = (softplus(f.mean + sign * 1.96 * f.stddev) for sign in (0, -1, 1))
        held_out = likelihood.log_marginal(counts[later], model(days[later, None])).mean().item()
    constant = torch.distributions.Poisson(y.mean()).log_prob(counts[later]).mean().item()
    error = ((middle - rate(days)) / rate(days))[~later].square().mean().sqrt().item()
    print(f"relative error of the rate {error:.3f}, log likelihood of a held-out hour {held_out:.3f}", end=" ")
    print(f"(a constant rate: {constant:.3f})")

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.add_subplot()
    shown = days >= days[-1] - 10.0
    axes.plot(days[shown], counts[shown], ".", color="0.6", markersize=4, label="counts")
    axes.plot(days[shown], rate(days)[shown], "k--", linewidth=1, label="true rate")
    axes.plot(days[shown], middle[shown], label="posterior median")
    axes.fill_between(days[shown], low[shown], high[shown], alpha=0.35, label="95 % interval of the rate")
    axes.axvline(float(days[later][0]), color="0.3", linewidth=0.8)
    axes.text(float(days[later][0]), axes.get_ylim()[1], " held out", va="top", fontsize=9)
    axes.set(xlabel="day", ylabel="visitors an hour")
    axes.legend(fontsize=8, loc="upper left")
    figure.savefig(options.out, dpi=120)
    return result, error, held_out - constant


if __name__ == "__main__":
    main()
