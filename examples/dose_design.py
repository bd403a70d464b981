"""Doses of the next four patients, chosen by gradients so that they tell the most about the response.

    python examples/dose_design.py [--out dose_design.png]

Twelve patients have been treated, and a logistic response to the logarithm of the dose is fitted.  The gain of a design
is what four more patients will tell in the mean, in nats: the entropy of q less that of the posteriors after each of
the sixteen outcomes, weighed by how likely they are under q.  All sixteen are one batch, differentiable in the doses.
"""

import argparse

import torch
from matplotlib.figure import Figure
from numpy.polynomial.hermite_e import hermegauss

import torchngvi as ngvi

DOSES = torch.tensor([-2.0, -2.0, -1.5, -1.0, -1.0, -0.5, 0.0, 0.0, 0.5, 1.0, 1.5, 2.0], dtype=torch.float64)
DIED = torch.tensor([0, 0, 0, 0, 1, 0, 0, 1, 0, 1, 1, 1], dtype=torch.float64)
OUTCOMES = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 4)  # (16, 4)
PRIOR = torch.tensor([0.1, 0.3], dtype=torch.float64)


def design(doses):
    return torch.stack([torch.ones_like(doses), doses], -1)


def likelihoods(q, doses):
    """How likely each outcome is under q, (16,), by 24 x 24 nodes."""
    nodes, weights = (torch.as_tensor(part) for part in hermegauss(24))
    theta = q.mean + torch.cartesian_prod(nodes, nodes) @ q.scale_tril.mT
    mass = torch.cartesian_prod(weights, weights).prod(-1)
    eta = theta @ design(doses).mT  # (576, 4)
    logs = torch.nn.functional.logsigmoid((2 * OUTCOMES[:, None] - 1) * eta).sum(-1)  # (16, 576)
    return (logs.exp() * mass).sum(-1) / mass.sum()


def gain(q, after, doses):
    """The expected fall of the entropy, in nats; `after` holds the sixteen posteriors, where they were last."""
    X = torch.cat([design(DOSES), design(doses)])
    y = torch.cat([DIED.expand(16, -1), OUTCOMES], -1)
    found = ngvi.solved.solve(after, ngvi.GeneralizedLinear(X, y, prior_precision=PRIOR, classes=[0, 1]))
    falls = q.scale_tril.logdet() - found.scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return (likelihoods(q, doses) * falls).sum()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="dose_design.png")
    options = parser.parse_args(arguments)
    q = ngvi.CholeskyGaussian(2, dtype=torch.float64)
    ngvi.fit(q, ngvi.GeneralizedLinear(design(DOSES), DIED, prior_precision=PRIOR), tolerance=1e-8, progress=False)
    after, solves = ngvi.CholeskyGaussian(2, (16,), dtype=torch.float64), [0]
    doses = torch.tensor([-1.5, -0.5, 0.5, 1.5], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([doses], max_iter=20, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        solves[0] += 1
        loss = -gain(q, after, doses)
        loss.backward()
        return loss

    half = -(q.mean[0] / q.mean[1]).item()  # where half of the patients die
    designs = {"evenly": doses.detach().clone(), "all at the half": torch.full((4,), half, dtype=torch.float64)}
    optimizer.step(closure)
    designs["chosen"] = doses.detach()
    with torch.no_grad():
        gains = {name: gain(q, after, at).item() for name, at in designs.items()}
    for name, at in designs.items():
        print(f"{name:16} {' '.join(f'{dose:5.2f}' for dose in at.tolist())}  gain {gains[name]:.4f} nats")
    print(f"{solves[0]} solves of sixteen posteriors")

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    grid = torch.linspace(-4, 4, 200, dtype=torch.float64)
    mean, sd = design(grid) @ q.mean, (design(grid) @ q.scale_tril).norm(dim=-1)
    axes.fill_between(grid, (mean - 2 * sd).sigmoid(), (mean + 2 * sd).sigmoid(), alpha=0.25)
    axes.plot(grid, mean.sigmoid(), label="response, ± 2 sd")
    axes.plot(DOSES, DIED, "k.", label="twelve patients")
    for height, (name, at) in zip((0.3, 0.4, 0.5), designs.items(), strict=True):
        axes.plot(at, torch.full((4,), height), "o", alpha=0.6, label=f"{name}: {gains[name]:.3f} nats")
    axes.set(xlabel="logarithm of the dose", ylabel="probability", title="Where to look next")
    axes.legend(fontsize=8)
    figure.savefig(options.out, dpi=120)
    return designs, gains


if __name__ == "__main__":
    main()
