"""The rate of stochastic natural gradients on a sparse GP: KL(q‖q*) against iterations, bike data.

    python benchmarks/svgp_ngvi.py [--rows 3000] [--points 50] [--steps 1000] [--seeds 2] [--out runs/svgp_ngvi.png]

Wu and Gardner (2024), section 4: with fixed hyper-parameters a sparse GP with a Gaussian likelihood is Bayesian linear
regression, for which natural steps of 2/(2 + t) converge as 1/t whatever the conditioning.  Beside them, on the same
mini-batches (with replacement) and in the same whitened coordinates, SGD in the mean and the factor, with steps of
1/(L + t) where L is the largest eigenvalue of the posterior precision (the paper has 1/(1e5 + t)), and Adam.
Needs $TORCHNGVI_DATA.
"""

import argparse
import os
import warnings
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import gpytorch as gp

from torchngvi import CholeskyGaussian
from torchngvi.adapters.gpytorch import (
    NaturalGradientVariationalDistribution,
    natural_optimizer,
    refine_svgp,
    variational_posteriors,
)

BATCH, NOISE = 100, 0.3
v = gp.variational


class Model(gp.models.ApproximateGP):
    def __init__(self, q, Z):
        super().__init__(v.VariationalStrategy(self, Z, q))
        self.mean_module = gp.means.ZeroMean()
        self.covar_module = gp.kernels.ScaleKernel(gp.kernels.RBFKernel())
        self.double().requires_grad_(False)
        self.covar_module.base_kernel.lengthscale = Z.shape[-1] ** 0.5
        self.train()

    def forward(self, x):
        return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def bike(rows):
    """Standardised inputs without the columns that repeat others or determine the target."""
    table = np.loadtxt(Path(os.environ["TORCHNGVI_DATA"]) / "gp_uci" / "bike_data.csv.gz", delimiter=",")
    table = table[np.random.default_rng(0).permutation(len(table))[:rows]]
    table = (table - table.mean(0)) / table.std(0)
    return torch.tensor(np.delete(table[:, :-1], [4, 5, 15, 16], axis=1)), torch.tensor(table[:, -1])


def moments(model):
    q = model.variational_strategy._variational_distribution()
    root = q.lazy_covariance_matrix.root.to_dense().detach()
    return q.mean.detach(), root * root.diagonal().sign()


def run(name, x, y, Z, best, largest, steps, seed, asked):
    """KL(q_t‖q*) at the iterations asked for."""
    rows, natural = len(y), name == "natural 2/(2+t)"
    q = NaturalGradientVariationalDistribution(len(Z)) if natural else v.CholeskyVariationalDistribution(len(Z))
    model, likelihood = Model(q, Z), gp.likelihoods.GaussianLikelihood().double()
    likelihood.noise = NOISE
    mll = gp.mlls.VariationalELBO(likelihood, model, num_data=rows)
    if natural:
        optimizer = natural_optimizer(mll, lr=1.0)
    else:
        q.requires_grad_(True)
        optimizer = torch.optim.SGD(q.parameters(), 1.0) if name.startswith("SGD") else torch.optim.Adam(q.parameters())
    order, found, like = torch.Generator().manual_seed(seed), [], CholeskyGaussian(len(Z)).double()
    for t in range(steps):
        if natural:
            optimizer.param_groups[0]["lr"] = 2 / (2 + t)
        else:
            optimizer.param_groups[0]["lr"] = rows / (largest + t) if name.startswith("SGD") else 0.01
        some = torch.randint(rows, (BATCH,), generator=order)
        optimizer.zero_grad()
        (-mll(model(x[some]), y[some])).backward()
        optimizer.step()
        if not natural:
            q.chol_variational_covar.data.diagonal().clamp_(min=1e-10)
        if t + 1 in asked:
            model.variational_strategy._clear_cache()
            with torch.no_grad():
                found.append(float(like.initialize_(*moments(model)).kl(best)))
    return found


def slope(times, values):
    """Of the logarithms, over the second half of the decades."""
    half = len(times) // 2
    return float(np.polyfit(np.log(times[half:]), np.log(values[half:]), 1)[0])


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", default="runs/svgp_ngvi.png")
    options = parser.parse_args(arguments)
    if "TORCHNGVI_DATA" not in os.environ:
        parser.error("set TORCHNGVI_DATA to the folder with gp_uci/bike_data.csv.gz")
    torch.set_num_threads(1)
    x, y = bike(options.rows)
    Z = x[: options.points].clone()
    exact, likelihood = Model(NaturalGradientVariationalDistribution(len(Z)), Z), gp.likelihoods.GaussianLikelihood()
    likelihood = likelihood.double()
    likelihood.noise = NOISE
    refine_svgp(exact, likelihood, [(x, y)], progress=False)
    best = variational_posteriors(exact)[0]
    largest = float(torch.linalg.eigvalsh(best.precision)[-1])
    start = float(CholeskyGaussian(len(Z)).double().kl(best).detach())
    print(f"{len(y)} rows, M = {len(Z)}, batches of {BATCH}; precision up to {largest:.3g}; KL(q_0, q*) = {start:.4g}")
    asked = sorted({round(float(t)) for t in np.geomspace(1, options.steps, 13)})
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes, slopes = figure.add_subplot(), {}
    for name in ("natural 2/(2+t)", "SGD 1/(L+t)", "Adam 0.01"):
        runs = [run(name, x, y, Z, best, largest, options.steps, seed, asked) for seed in range(options.seeds)]
        mean = np.mean(runs, axis=0)
        slopes[name] = slope(asked, mean)
        shown = "  ".join(f"{t}: {value:.3g}" for t, value in zip(asked[::3], mean[::3], strict=True))
        print(f"{name:<16} KL after {shown}   slope {slopes[name]:.2f}", flush=True)
        axes.loglog(asked, mean, ".-", label=f"{name}, slope {slopes[name]:.2f}")
    middle = len(asked) // 2
    axes.set(xlabel="iterations", ylabel="KL(q, q*)  [nats]", title=f"bike, {len(y)} rows, M = {len(Z)}")
    first = axes.lines[0].get_ydata()[middle]
    axes.loglog(asked, [1.6 * first * asked[middle] / t for t in asked], "k:", linewidth=1, label="slope -1")
    axes.legend(fontsize=8)
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=120)
    return slopes


if __name__ == "__main__":
    main()
