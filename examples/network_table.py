"""A network on a table, with intervals: what the weights leave open, and what the noise of the measurement does.

    python examples/network_table.py [--steps 1500] [--out network_table.png]

Progress of diabetes from ten measurements of 442 patients.  The scale of the noise is a parameter beside the network,
which the same optimizer learns.  Independent weights, more than there are patients, are too wide at the temperature 1.
"""

import argparse

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes
from torch import nn

import torchngvi as ngvi
from torchngvi.networks import Gaussian


def table():
    """Standardised inputs and targets, 300 patients to learn from and 142 to predict."""
    X, y = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True, scaled=False))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    X, y = X[order], y[order, None]
    return (X - X[:300].mean(0)) / X[:300].std(0), (y - y[:300].mean()) / y[:300].std()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", default="network_table.png")
    options = parser.parse_args(arguments)

    X, y = table()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 1))
    log_scale = nn.Parameter(torch.zeros(()))
    noise = Gaussian(log_scale.exp)
    q = ngvi.network(model, 300, prior_precision=10.0, temperature=0.1, likelihood=noise)
    groups = [{"params": model.parameters(), "lr": 1e-3}, {"params": [log_scale], "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    ngvi.attach(optimizer, q, steps=options.steps, curvature=ngvi.networks.SampledLabels(every=2))
    for _ in range(options.steps):
        rows = torch.randint(300, (50,))
        optimizer.zero_grad()
        noise.loss(model(X[rows]), y[rows]).backward()
        optimizer.step()

    model.eval()
    found = q.predictive(X[300:], samples=64)
    sd, error = found.total.sqrt()[:, 0], (y[300:] - found.mean)[:, 0]
    inside = (error.abs() < 1.96 * sd).float().mean().item()
    nll = -q.log_prob(X[300:], y[300:], samples=64).mean().item()
    print(f"test NLL {nll:.3f}, root mean squared error {error.square().mean().sqrt():.3f} (1 is the mean alone),")
    print(f"{100 * inside:.0f} % of the patients inside their 95 % interval")

    order = found.mean[:, 0].argsort()
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    rows, mean = torch.arange(len(order)), found.mean[order, 0]
    for spread, label in ((sd, "95 %, noise included"), (found.epistemic.sqrt()[:, 0], "95 % of the network's mean")):
        axes.fill_between(rows, mean - 1.96 * spread[order], mean + 1.96 * spread[order], alpha=0.3, label=label)
    axes.plot(rows, y[300:][order, 0], ".", color="k", label="observed")
    axes.set_xlabel("patient, in the order of the prediction")
    axes.set_ylabel("progress, standardised")
    axes.legend()
    figure.savefig(options.out, dpi=120)
    return nll, inside


if __name__ == "__main__":
    main()
