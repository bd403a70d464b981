"""Covariances in Pyro: a correlation matrix and scales as latents, constrained by biject_to, Gaussian underneath.

    python examples/pyro_correlations.py [--draws 2000] [--out pyro_correlations.png]

Pyro's LKJ example on measurements instead of noise: lengths and widths of 150 irises (Fisher 1936).
"""

import argparse

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_iris

from torchngvi.adapters.pyro import AutoGaussian, fit_guide, log_joint


def model(y):
    d = y.shape[-1]
    scale = pyro.sample("scale", dist.HalfCauchy(torch.ones(d)).to_event(1))
    root = pyro.sample("root", dist.LKJCholesky(d, 1.0))  # of the correlations
    scale_tril = scale[..., None] * root
    with pyro.plate("flowers", len(y)):
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(d), scale_tril=scale_tril), obs=y)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--out", default="pyro_correlations.png")
    options = parser.parse_args(arguments)

    pyro.set_rng_seed(0)
    data = load_iris()
    names = [name.removesuffix(" (cm)") for name in data.feature_names]
    y = torch.tensor(data.data, dtype=torch.float32)
    y = y - y.mean(0)
    guide = AutoGaussian(model)
    result = fit_guide(model, guide, y, options={"progress": False})
    print(result)

    theta = guide.posterior.sample((options.draws,))
    root = log_joint(model, y).unpack(theta)["root"]
    correlation = root @ root.mT
    mean, sd, sample = correlation.mean(0), correlation.std(0), torch.corrcoef(y.mT)
    pairs = [(i, j) for i in range(4) for j in range(i)]
    for i, j in pairs:
        print(f"{names[i]:12} and {names[j]:12} {mean[i, j]:6.2f} ± {sd[i, j]:.2f}   sample {sample[i, j]:6.2f}")

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for row, (i, j) in enumerate(pairs):
        axes.hist(correlation[:, i, j], bins=40, density=True, alpha=0.6, label=f"{names[i]}, {names[j]}")
        axes.axvline(sample[i, j].item(), color=f"C{row}", linestyle=":")
    axes.set_xlabel("correlation; dotted: of the sample")
    axes.set_yticks([])
    axes.legend(fontsize="small")
    figure.savefig(options.out, dpi=120)
    return result, mean, sample


if __name__ == "__main__":
    main()
