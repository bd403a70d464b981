"""Logistic regression on mini-batches in Pyro: a plate draws the rows, natural gradients do the rest.

    python examples/pyro_minibatches.py [--epochs 40] [--out pyro_minibatches.png]

The 569 tumours of scikit-learn's breast cancer data, 30 measurements each, 64 rows a step.  The fit on all rows at
once, which needs no step size, is the one to compare with.
"""

import argparse

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_breast_cancer

import torchngvi as ngvi
from torchngvi.adapters.pyro import AutoGaussian, NaturalSVI, fit_guide, log_joint

BATCH = 64


def model(X, y, batch=None):
    weights = pyro.sample("weights", dist.Normal(X.new_zeros(X.shape[1]), 1.0).to_event(1))
    with pyro.plate("rows", len(X), subsample_size=batch) as rows:
        logits = (X[rows] * weights).sum(-1)
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y[rows])


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--out", default="pyro_minibatches.png")
    options = parser.parse_args(arguments)

    pyro.set_rng_seed(0)
    data = load_breast_cancer()
    X, y = torch.tensor(data.data), torch.tensor(data.target, dtype=torch.float64)
    X = torch.cat([(X - X.mean(0)) / X.std(0), torch.ones(len(X), 1)], 1)

    whole = AutoGaussian(model)
    result = fit_guide(model, whole, X, y, options={"progress": False})
    print(f"all rows: {result}")

    guide = AutoGaussian(model)
    svi = NaturalSVI(model, guide, natural=lambda q: ngvi.IBLR(q, lr=0.2, step_size=ngvi.KLRadius(0.5)))
    steps = options.epochs * len(X) // BATCH
    svi.step(X, y, BATCH)
    decay = torch.optim.lr_scheduler.ExponentialLR(svi.natural, 0.02 ** (1 / steps))
    density, gaps = log_joint(model, X, y), []
    noise = torch.randn(1000, X.shape[1], dtype=X.dtype)
    for step in range(steps):
        if step % 10 == 0:
            theta = guide.posterior.push_noise(noise).detach()
            loss = (guide.posterior.log_prob(theta) - density(theta)).mean()
            gaps.append((step * BATCH / len(X), (loss - result.loss).item()))
        svi.step(X, y, BATCH)
        decay.step()
    kl = torch.distributions.kl_divergence(
        *(
            torch.distributions.MultivariateNormal(g.posterior.mean, scale_tril=g.posterior.scale_tril)
            for g in (guide, whole)
        )
    ).item()
    print(f"mini-batches of {BATCH}: {steps} steps, {gaps[-1][1]:.2f} nats above, KL to the fit on all rows {kl:.2f}")

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(*zip(*gaps, strict=True))
    left.set_yscale("symlog", linthresh=1.0)
    left.axhline(0, color="0.7")
    left.set_xlabel("passes over the data")
    left.set_ylabel("nats above the fit on all rows")
    for shift, (name, each) in zip((-0.15, 0.15), (("all rows", whole), ("mini-batches", guide)), strict=True):
        place = torch.arange(X.shape[1]) + shift
        right.errorbar(place, each.posterior.mean, yerr=each.posterior.stddev, fmt="o", markersize=3, label=name)
    right.set_xlabel("coefficient, mean ± sd")
    right.legend(loc="lower left", ncols=2)
    right.set_ylim(bottom=-2.8)
    figure.savefig(options.out, dpi=120)
    return result, gaps, kl


if __name__ == "__main__":
    main()
