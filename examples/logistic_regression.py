"""The posterior of a logistic regression, exact expectations, no learning rate.

    python examples/logistic_regression.py [--out logistic_regression.png]

Draws the marginal posteriors of the strongest coefficients, full covariance beside mean field: the
mean-field standard deviations are too small wherever measurements are correlated.
"""

import argparse

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler

import torchngvi as ngvi


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="logistic_regression.png")
    out = parser.parse_args(arguments).out

    data = load_breast_cancer()
    X = torch.tensor(StandardScaler().fit_transform(data.data))
    model = ngvi.GeneralizedLinear(X, data.target, family="bernoulli_logit", prior_precision=0.1)

    full = ngvi.CholeskyGaussian(model.dim, dtype=torch.float64)
    print(ngvi.fit(full, model, progress=False))
    mean_field = ngvi.DiagonalGaussian(model.dim, dtype=torch.float64)
    print(ngvi.fit(mean_field, model, progress=False))

    strongest = full.mean.abs().argsort(descending=True)[:10]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for q, shift, label in ((full, 0.12, "full covariance"), (mean_field, -0.12, "mean field")):
        mean, sd = q.mean[strongest], q.stddev[strongest]
        rows = torch.arange(len(strongest)) + shift
        axes.errorbar(mean, rows, xerr=1.96 * sd, fmt="o", capsize=3, label=label)
    axes.set_yticks(range(len(strongest)), [data.feature_names[i] for i in strongest])
    axes.invert_yaxis()
    axes.axvline(0, color="0.7", zorder=0)
    axes.set_xlabel("coefficient of the standardised measurement, 95 % interval")
    axes.legend()
    figure.savefig(out, dpi=120)
    return full, mean_field


if __name__ == "__main__":
    main()
