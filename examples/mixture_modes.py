"""Two labels that can be exchanged: one Gaussian finds one of two modes, a mixture of Gaussians both.

    python examples/mixture_modes.py [--out mixture.png]

The means of two groups given 60 rows, when nobody knows who belongs to which.  On the left the steps of the mixture
from a start between the modes, in the middle draws from it, on the right draws of the best Gaussian; a gap is what the
ELBO lacks of the log evidence.
"""

import argparse
import math

import torch
from matplotlib.figure import Figure

import torchngvi as ngvi
from torchngvi.posteriors import Mixture


def rows():
    """30 of each group."""
    noise = torch.randn(60, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return noise + torch.tensor([-1.5, 1.5], dtype=torch.float64).repeat(30)


def log_joint_of(y):
    def log_joint(theta):  # (..., 2) -> (...)
        each = [torch.distributions.Normal(theta[..., k, None], 1.0).log_prob(y) for k in (0, 1)]
        prior = torch.distributions.Normal(0.0, 5.0).log_prob(theta).sum(-1)
        return torch.logaddexp(*each).sum(-1) - len(y) * math.log(2) + prior

    return log_joint


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="mixture.png")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    log_joint = log_joint_of(rows())
    start = torch.tensor([[-1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    q = Mixture(ngvi.PrecisionCholeskyGaussian(2, (2,), mean=start))
    path = [q.components.mean.clone()]
    result = ngvi.fit(q, log_joint, progress=False, callbacks=[lambda record: path.append(q.components.mean.clone())])
    print(f"mixture: {result}")
    gaussian = ngvi.CholeskyGaussian(2, mean=start[0], dtype=torch.float64)
    alone = ngvi.fit(gaussian, log_joint, progress=False, examine=False)
    x = torch.linspace(-2.5, 3.0, 200, dtype=torch.float64)
    theta = torch.stack(torch.meshgrid(x, x, indexing="xy"), -1)
    values = log_joint(theta)
    evidence = float(values.logsumexp((0, 1))) + 2 * math.log(5.5 / 199)
    gaps = evidence + result.loss, evidence + alone.loss
    print(f"nats below the evidence: mixture {gaps[0]:.3f}, Gaussian {gaps[1]:.3f}; log 2 is {math.log(2):.3f}")

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True)
    for axes in (left, middle, right):
        axes.contour(*(part.numpy() for part in (x, x, (values - values.max()).exp())), levels=6, colors="0.6")
        axes.set(xlabel="mean of group 1", xlim=(-2.5, 3), ylim=(-2.5, 3), aspect="equal")
    left.set(ylabel="mean of group 2", title=f"{len(result.trace) - 1} steps of two components")
    for k, color in enumerate(("tab:blue", "tab:orange")):
        steps = torch.stack(path)[:, k]
        left.plot(*steps.T, ".-", color=color)
        left.plot(*steps[0], "o", color=color, markersize=8)
    draws = torch.Generator().manual_seed(1)
    middle.plot(*q.sample(800, draws).T, ".", markersize=2)
    middle.set(title=f"mixture, gap {gaps[0]:.3f} nats")
    right.plot(*gaussian.sample((800,), draws).T, ".", markersize=2, color="tab:red")
    right.set(title=f"one Gaussian, gap {gaps[1]:.3f} nats")
    figure.savefig(options.out, dpi=150)
    return gaps


if __name__ == "__main__":
    main()
