"""The pictures of docs/theory.md: what a frame is, and how four methods move the same q to the same optimum.

    python examples/theory.py [--out docs]

writes theory-frame.png and theory-steps.png.
"""

import argparse
import math
import warnings
from pathlib import Path

import torch
from matplotlib.figure import Figure

import torchngvi as ngvi
from torchngvi.stepsizes import Constant

STEPS = 40
RATES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)  # of each method the largest with which L falls at every step
METHODS = {
    "gradient descent in (m, C)": ngvi.methods.RootGD,
    "Bures-Wasserstein": ngvi.BWGD,
    "square-root VN": ngvi.SRVN,
    "VN": ngvi.VN,
}
COLOURS = {
    "gradient descent in (m, C)": "#8a8a8a",
    "Bures-Wasserstein": "#d1672b",
    "square-root VN": "#2e8b57",
    "VN": "#1f5a94",
}


def frame(path):
    """Draw one step of the mean in θ and in the frame of q."""
    angle = torch.linspace(0, 2 * math.pi, 200).double()
    circle = torch.stack([angle.cos(), angle.sin()])
    C = torch.linalg.cholesky(torch.tensor([[1.0, 0.93], [0.93, 1.0]]).double())
    mean, best = torch.tensor([1.6, 0.2]).double(), torch.zeros(2).double()
    gradient = torch.cholesky_inverse(C) @ (mean - best)  # of ½ (θ - best)ᵀ S (θ - best)
    natural = C @ C.mT @ gradient
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots(1, 2)
    to_frame = torch.linalg.inv(C)
    panels = [(torch.eye(2).double(), "θ"), (to_frame, "the frame of q:  z = C⁻¹(θ - m)")]
    arrows = [("#8a8a8a", "gradient, its direction"), ("#1f5a94", "natural gradient")]
    for ax, (map_, title) in zip(axes, panels, strict=True):
        shift = mean if map_ is to_frame else torch.zeros(2).double()
        for radius in (0.5, 1.0, 1.5, 2.0, 2.5):
            ax.plot(*(map_ @ (best - shift)[:, None] + radius * map_ @ C @ circle), color="#c9c9c9", linewidth=0.8)
        around = map_ @ (mean - shift)[:, None] + map_ @ C @ circle
        ax.plot(*around, color="#1f5a94", label="q, one standard deviation")
        start = map_ @ (mean - shift)
        short = gradient * (1.3 / gradient.norm())
        for step, (colour, label) in zip((short, natural), arrows, strict=True):
            ax.annotate(
                "",
                (start - map_ @ step).tolist(),
                start.tolist(),
                arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 2, "shrinkA": 0, "shrinkB": 0},
            )
            ax.plot([], [], color=colour, linewidth=2, label=label)
        ax.plot(*(map_ @ (best - shift)), "k+", markersize=10, label="mean of the posterior")
        ax.set_aspect("equal")
        ax.set_title(title)
        ax.set_xticks([])
        ax.set_yticks([])
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)


def regression():
    """Logistic regression on two columns that are alike, so that the posterior is a narrow ridge."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    X[:, 1] = X[:, 0] + 0.3 * X[:, 1]
    y = torch.bernoulli(torch.sigmoid(X @ torch.tensor([2.0, -1.0]).double()), generator=generator)
    return ngvi.GeneralizedLinear(X, y, "bernoulli_logit", prior_precision=0.2)


def path_of(method, model, rate):
    """Means and losses of a run with a constant rate, from N(0, 1); None where a step left the cone."""
    q = ngvi.CholeskyGaussian(2, mean=torch.tensor([-1.0, -1.0]), dtype=torch.float64)
    opt = method(q, lr=rate, step_size=Constant())
    seen = []
    for _ in range(STEPS + 1):
        seen.append((*q.mean.tolist(), model.negative_elbo(q).item()))
        opt.step(model)
        if opt.rejections:
            return None
    return torch.tensor(seen, dtype=torch.float64)


def falling(method, model):
    """The path with the largest rate whose loss rises nowhere, and that rate."""
    for rate in RATES:
        path = path_of(method, model, rate)
        if path is not None and bool((path[1:, 2] <= path[:-1, 2] + 1e-9).all()):
            return path, rate
    raise RuntimeError(f"no rate makes {method.__name__} fall")


def steps(path):
    """Draw the ways of four methods along a ridge, and how fast they come to the optimum."""
    model = regression()
    best = ngvi.CholeskyGaussian(2, dtype=torch.float64)
    optimum = ngvi.fit(best, model, progress=False, tolerance=1e-8).loss
    grid = torch.meshgrid(torch.linspace(-2.5, 6.0, 120), torch.linspace(-4.0, 2.5, 120), indexing="ij")
    log_joint = model.log_joint(torch.stack(grid, -1).double())
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    drop = [-40, -25, -15, -8, -4, -2, -0.7, -0.1]
    left.contour(*grid, log_joint - log_joint.max(), levels=drop, colors="#c9c9c9", linewidths=0.8, linestyles="solid")
    gaps = {}
    for name, method in METHODS.items():
        run, rate = falling(method, model)
        left.plot(*run[:, :2].T, ".-", color=COLOURS[name], markersize=5, linewidth=1.2, label=f"{name}, rate {rate:g}")
        right.plot((run[:, 2] - optimum).clamp_min(1e-9), color=COLOURS[name])
        gaps[name] = float(run[-1, 2]) - optimum
    left.plot(*best.mean, "k+", markersize=10)
    left.set(xlabel="first coefficient", ylabel="second coefficient", title="the mean of q, step by step")
    right.set(xlabel="step", ylabel="nats above the best q", yscale="log", title="how far it is", ylim=(1e-7, None))
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)
    return gaps


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", ngvi.errors.RejectedStepWarning)  # of rates that are too large
    options.out.mkdir(parents=True, exist_ok=True)
    frame(options.out / "theory-frame.png")
    gaps = steps(options.out / "theory-steps.png")
    for name, gap in gaps.items():
        print(f"{name}: {gap:.1e} nats above the best q after {STEPS} steps")
    return gaps


if __name__ == "__main__":
    main()
