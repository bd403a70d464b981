"""Sparse GPs with Gaussian noise by every program that is installed: held-out scores and processor seconds, in one run.

    TORCHNGVI_DATA=... python benchmarks/gp_programs.py [--data bike elevators wine_red] [--splits 0 1] [--rows 2000]

One model for all: a constant mean, a squared exponential with a length scale for each input, 128 inducing points,
float64 on one thread. Ours is `train_svgp` as it comes; GPyTorch has Adam at .03 for all, or its NGD at .1 for q
beside that Adam, 500 steps of all rows from random training rows; GPJax has its collapsed bound and L-BFGS, 300
iterations, in which the inducing points move too. The exact GP of GPyTorch, 100 steps of Adam at .1, says what a
sparse one can have.

Scores are the NLPD and the root mean square error of 1,000 test rows, standardised by the training rows.  Seconds are
the processor's; those of GPJax hold what JAX compiles, about half of them.
"""

import argparse
import time
import warnings

import gpytorch as gp
import torch
from svgp_hyperparameters import load

from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, train_svgp

POINTS = 128


class Sparse(gp.models.ApproximateGP):
    def __init__(self, q, Z):
        super().__init__(gp.variational.VariationalStrategy(self, Z, q))
        self.mean_module = gp.means.ConstantMean()
        self.covar_module = gp.kernels.ScaleKernel(gp.kernels.RBFKernel(ard_num_dims=Z.shape[-1]))

    def forward(self, x):
        return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Exact(gp.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gp.means.ConstantMean()
        self.covar_module = gp.kernels.ScaleKernel(gp.kernels.RBFKernel(ard_num_dims=x.shape[-1]))

    forward = Sparse.forward


def predicted(model, likelihood, x):
    """Means and variances of new targets."""
    model.eval()
    likelihood.eval()
    with torch.no_grad():
        p = likelihood(model(x))
    return p.mean, p.variance


def ours(x, y, x_test):
    q = NaturalGradientVariationalDistribution(POINTS)
    model, likelihood = Sparse(q, x[:POINTS].clone()).to(x), gp.likelihoods.GaussianLikelihood().to(x)
    train_svgp(model, likelihood, (x, y), progress=False)
    return predicted(model, likelihood, x_test)


def gpytorch(kind, optimizers):
    def fitted(x, y, x_test):
        Z = x[torch.randperm(len(x))[:POINTS]].clone()
        model, likelihood = Sparse(kind(POINTS), Z).to(x), gp.likelihoods.GaussianLikelihood().to(x)
        objective = gp.mlls.VariationalELBO(likelihood, model, len(x))
        steps = optimizers(model, likelihood, len(x))
        for _ in range(500):
            for step in steps:
                step.zero_grad()
            (-objective(model(x), y)).backward()
            for step in steps:
                step.step()
        return predicted(model, likelihood, x_test)

    return fitted


def adam(model, likelihood, _):
    return [torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.03)]


def ngd(model, likelihood, rows):
    natural = gp.optim.NGD(model.variational_parameters(), num_data=rows, lr=0.1)
    return [natural, torch.optim.Adam([*model.hyperparameters(), *likelihood.parameters()], lr=0.03)]


def exact(x, y, x_test):
    likelihood = gp.likelihoods.GaussianLikelihood().to(x)
    model = Exact(x, y, likelihood).to(x)
    objective, step = gp.mlls.ExactMarginalLogLikelihood(likelihood, model), adam(model, likelihood, 0)[0]
    step.param_groups[0]["lr"] = 0.1
    with gp.settings.max_cholesky_size(len(x) + 1):
        for _ in range(100):
            step.zero_grad()
            (-objective(model(x), y)).backward()
            step.step()
        return predicted(model, likelihood, x_test)


def gpjax(x, y, x_test):
    import jax

    jax.config.update("jax_enable_x64", True)
    import gpjax as gpx
    from jax import numpy as jnp

    x, y, x_test = (jnp.asarray(part.numpy()) for part in (x, y[:, None], x_test))
    data, Z = gpx.Dataset(X=x, y=y), x[torch.randperm(len(x))[:POINTS].numpy()]
    kernel = gpx.kernels.RBF(lengthscale=jnp.ones(x.shape[1]))
    prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Constant(), kernel=kernel)
    model = prior * gpx.likelihoods.Gaussian()
    q = gpx.variational_families.CollapsedVariationalGaussian(model=model, inducing_inputs=Z)

    def negative_bound(model, data):
        return -gpx.objectives.collapsed_elbo(model, data)

    q, _ = gpx.fit_lbfgs(model=q, objective=negative_bound, train_data=data, max_iters=300)
    p = q.model.likelihood(q.predict(x_test, train_data=data))
    return torch.tensor(p.mean.tolist()), torch.tensor(jnp.diagonal(p.covariance()).tolist())


PROGRAMS = {
    "torchngvi, train_svgp": ours,
    "GPyTorch, NGD and Adam": gpytorch(gp.variational.NaturalVariationalDistribution, ngd),
    "GPyTorch, Adam": gpytorch(gp.variational.CholeskyVariationalDistribution, adam),
    "GPJax, collapsed": gpjax,
    "GPyTorch, exact": exact,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["bike", "elevators", "wine_red"])
    parser.add_argument("--splits", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--rows", type=int, default=2000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| data, split | program | NLPD | rmse | seconds |\n|---|---|---|---|---|")
    for name in options.data:
        for split in options.splits:
            x, y, x_test, y_test = load(name, split, "gaussian", "float64")
            x, y, x_test, y_test = x[: options.rows], y[: options.rows], x_test[:1000], y_test[:1000]
            for program, fitted in PROGRAMS.items():
                torch.manual_seed(0)
                start = time.process_time()
                try:
                    mean, variance = fitted(x, y, x_test)
                except ImportError:
                    continue
                seconds = time.process_time() - start
                nlpd = -torch.distributions.Normal(mean, variance.sqrt()).log_prob(y_test).mean()
                rmse = (mean - y_test).square().mean().sqrt()
                print(f"| {name}, {split} | {program} | {nlpd:.3f} | {rmse:.3f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
