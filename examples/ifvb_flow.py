"""A posterior that is no Gaussian: a curved density by a normalising flow, its natural gradients by IFVB.

    python examples/ifvb_flow.py [--steps 600] [--out ifvb.png]

First a probability with a Beta posterior, where the answer is known; then a crescent, where no Fisher
matrix is: an affine coupling flow beside the best full-covariance Gaussian.
"""

import argparse
import math

import torch
from matplotlib.figure import Figure
from torch.optim.lr_scheduler import LambdaLR

import torchngvi as ngvi
from torchngvi import ifvb
from torchngvi.stepsizes import Clip, KLRadius, PowerSchedule, Shortest


def probability(steps):
    """57 of 200 trials succeed: the posterior is Beta(58, 144)."""
    q = ifvb.Beta(torch.tensor([40.0, 100.0], dtype=torch.float64))
    draws = torch.Generator().manual_seed(0)
    # no Z terms: the start is near, and the Fisher matrix has eigenvalues a thousandfold apart
    metric = ifvb.Recursive(c_beta=0.0, generator=draws)
    opt = ifvb.IFVB(q, lr=2.0, metric=metric, estimator=ifvb.ControlVariate(200, draws))
    schedule = LambdaLR(opt, PowerSchedule(0.75, 100.0))
    for _ in range(steps):
        opt.step(lambda theta: (57 * theta.log() + 143 * torch.log1p(-theta))[..., 0])
        schedule.step()
    print(f"Beta({q.vector[0]:.1f}, {q.vector[1]:.1f}), exact Beta(58, 144)")
    return q


def crescent(theta):
    """A log density that sums to √(π/2)·√(2π)."""
    return -0.5 * theta[..., 0].square() - 2 * (theta[..., 1] - theta[..., 0].square()).square()


def flow(steps):
    torch.manual_seed(0)
    q = ifvb.ModuleFlow(ifvb.AffineCoupling(2, layers=4, hidden=8).double(), 2)
    draws = torch.Generator().manual_seed(0)
    opt = ifvb.IFVB(
        q,
        lr=1.0,
        metric=ifvb.Recursive(50, beta=0.125, generator=draws),
        estimator=ifvb.Pathwise(20, draws),
        step_size=Shortest(KLRadius(0.1), Clip(5.0)),
    )
    schedule = LambdaLR(opt, PowerSchedule(0.75, 100.0))
    result = ifvb.run(opt, crescent, steps, schedule=schedule, window=50, patience=200)
    print(result)
    return q


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", default="ifvb.png")
    options = parser.parse_args(arguments)

    beta = probability(options.steps)
    coupling = flow(options.steps)
    gaussian = ngvi.CholeskyGaussian(2, dtype=torch.float64)
    result = ngvi.fit(gaussian, crescent, progress=False)

    evidence = math.log(2 * math.pi) - math.log(2)
    bound, error = ifvb.lower_bound(coupling, crescent, 5000, torch.Generator().manual_seed(1))
    print(f"nats below the evidence: flow {evidence - bound:.2f} ± {error:.2f}, Gaussian {evidence + result.loss:.2f}")

    figure = Figure(figsize=(8, 4), layout="constrained")
    grid = torch.linspace(-3, 3, 200), torch.linspace(-2, 7, 200)
    x, y = torch.meshgrid(*grid, indexing="xy")
    density = crescent(torch.stack([x, y], -1)).exp()
    draws = {"flow": coupling.sample(1500), "Gaussian": gaussian.sample((1500,))}
    for axes, (name, theta) in zip(figure.subplots(1, 2, sharey=True), draws.items(), strict=True):
        axes.contour(x, y, density, levels=6, colors="0.6", linewidths=0.8)
        axes.plot(*theta.T, ".", markersize=2, alpha=0.5)
        axes.set(title=name, xlim=(-3, 3), ylim=(-2, 7))
    figure.savefig(options.out, dpi=110)
    return beta, float(bound), -result.loss


if __name__ == "__main__":
    main()
