"""Latents integrated out: what a lattice costs, and a disease map beside NUTS.

    python -m benchmarks.marginal lattice [--sides 32 71 100 158 224]      # time and memory of one value and gradient
    python -m benchmarks.marginal fit [--side 100]                         # a whole fit of a lattice
    python -m benchmarks.disease_map nuts --out nuts.pt
    python -m benchmarks.marginal map --nuts nuts.pt [--out marginal.png]  # an island of 311 regions

A row of `lattice` is a process of its own, whose largest memory is that of the row.
"""

import argparse
import math
import resource
import subprocess
import sys
import time
from dataclasses import replace

import torch

from benchmarks.disease_map import NAMES, TRUTH, island, square
from torchngvi import VN, CholeskyGaussian, Stein, fit, marginal, refine
from torchngvi.expectations import Fixed

START = torch.tensor([0.0, -0.5, 1.0], dtype=torch.float64)
INK, FAINT = "#222222", "#9aa0a6"


def clock(call):
    began = time.perf_counter()
    result = call()
    return result, time.perf_counter() - began


def lattice_row(side: int) -> None:
    """One line of the table."""
    data = square(side)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    target, made = clock(lambda: marginal(data.log_joint, data.dim, START, pattern=data.edges))
    theta = (START + torch.tensor([0.1, 0.1, 0.5])).requires_grad_()
    value, valued = clock(lambda: target.log_joint(theta.detach()))
    (gradient,), differentiated = clock(lambda: torch.autograd.grad(target.log_joint(theta), theta))
    steps = target._modes(theta.detach()[None]).steps
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    layout = target.layout
    print(
        f"| {data.dim} | {layout.length} x {layout.block} | {target.colours} | {steps} | {made:.1f} | {valued:.2f} "
        f"| {differentiated:.2f} | {(peak - before) / 1e6:.2f} | {8 * data.dim**2 / 1e9:.3g} | {value:.1f} |",
        flush=True,
    )
    assert gradient.isfinite().all()


def lattice(sides: list[int]) -> None:
    print("| latents | blocks | colours | steps | made, s | value, s | with gradient, s | GB more | D² in GB | value |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for side in sides:
        subprocess.run([sys.executable, "-m", "benchmarks.marginal", "row", "--side", str(side)], check=True)


def large(side: int, draws: int = 8, steps: int = 9) -> None:
    """Steps of VN over a few fixed draws of θ: a value of 50,000 latents is too dear for the checks of `fit`."""
    data, began = square(side), time.perf_counter()
    target = marginal(data.log_joint, data.dim, START, pattern=data.edges)
    torch.manual_seed(0)
    q = CholeskyGaussian(3, mean=START, scale=0.05, dtype=torch.float64)
    optimizer = VN(q, estimator=Stein(Fixed(draws)))
    for _ in range(steps):
        loss = float(optimizer.step(target))
        where = [round(x, 4) for x in [*q.mean.tolist(), *q.stddev.tolist()]]
        print(f"  {time.perf_counter() - began:6.0f} s: loss {loss:.3f}, means and sds {where}", flush=True)
    found, seconds = clock(lambda: target.latents(q, draws=4))
    risk = replace(found, means=found.means + found.theta[:, :1])
    inside = ((TRUTH[0] + data.effects - risk.mean).abs() < 1.645 * risk.stddev).double().mean()
    print(f"latents: {seconds:.0f} s for 4 draws of theta; {inside:.3f} of the log risks within 90 % intervals")
    error, seconds = clock(lambda: target.laplace_error(q.mean, pairs=16))
    print(f"{error}  {seconds:.0f} s")
    print(f"largest memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


def effective(x: torch.Tensor) -> float:
    """The effective number of draws of chains (chains, draws), by ArviZ."""
    import arviz

    return float(arviz.ess(x.numpy()))


def disease_map(path: str, out: str | None) -> None:
    data, chains = island(), torch.load(path)
    theta, u = chains["theta"], chains["u"]
    print(f"{data.dim} regions, {int(data.counts.sum())} cases")
    target = marginal(data.log_joint, data.dim, START, pattern=data.edges)
    torch.manual_seed(0)
    q = CholeskyGaussian(3, mean=START, scale=0.3, dtype=torch.float64)
    result, seconds = clock(lambda: fit(q, target, progress=False))
    print(f"fit: {seconds:.0f} s, {result.gradients} gradients and {result.values} values\n{result}")
    generator = torch.Generator().manual_seed(0)
    refined, seconds = clock(lambda: refine(result, target, "importance"))
    print(f"refine: {seconds:.0f} s\n{refined}")
    columns = [q.mean, q.stddev, refined.posterior.mean, refined.posterior.stddev]
    for name, *numbers in zip(NAMES, *(column.tolist() for column in columns), strict=True):
        print(f"  {name:10s}" + "".join(f"{number:9.4f}" for number in numbers))
    found, seconds = clock(lambda: target.latents(refined, 64, generator))
    print(f"latents: {seconds:.1f} s")
    risk = replace(found, means=found.means + found.theta[:, :1])  # log relative risks, β + u
    print(target.laplace_error(q, 64, generator=generator))
    print(f"NUTS: {chains['seconds']:.0f} s, {theta.shape[0]} chains of {theta.shape[1]}")
    for k, name in enumerate(NAMES):
        one = theta[..., k]
        print(f"  {name:10s} {one.mean():8.4f} {one.std():8.4f}  effective draws {effective(one):.0f}")
    u = u + theta[..., :1]
    mean, sd = u.flatten(0, 1).mean(0), u.flatten(0, 1).std(0)
    ess = torch.tensor([effective(u[..., k]) for k in range(data.dim)])
    off = (risk.mean - mean) / sd
    ratio = (risk.stddev / sd).log()
    noise = float(ess.rsqrt().max())
    print(f"log relative risks, of {ess.min():.0f} effective draws or more: standard error of a mean {noise:.3f} sd")
    print(f"  means differ by {off.abs().max():.3f} sd at most, {off.square().mean().sqrt():.3f} in the mean square")
    print(f"  log sds by {ratio.abs().max():.3f} at most, {ratio.mean():+.3f} in the mean")
    if out:
        picture(data, risk.mean, risk.stddev, mean, sd, out)


def picture(data, mean, stddev, nuts_mean, nuts_sd, out):
    """Truth, means and standard deviations, beside those of NUTS."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = data.where.amax(0) + 1
    figure, axes = plt.subplots(2, 3, figsize=(9.6, 6.6), dpi=110, layout="constrained")
    truth = TRUTH[0] + data.effects
    limit = float(truth.abs().max())
    both = torch.cat([stddev, nuts_sd])
    panels = [
        (axes[0, 0], truth, "log relative risk, true", "RdBu_r", (-limit, limit)),
        (axes[0, 1], mean, "mean, marginal", "RdBu_r", (-limit, limit)),
        (axes[0, 2], stddev, "sd, marginal", "viridis", (float(both.min()), float(both.max()))),
        (axes[1, 1], nuts_mean, "mean, NUTS", "RdBu_r", (-limit, limit)),
        (axes[1, 2], nuts_sd, "sd, NUTS", "viridis", (float(both.min()), float(both.max()))),
    ]
    for axis, values, title, colours, (low, high) in panels:
        grid = torch.full(tuple(size.tolist()), math.nan, dtype=torch.float64)
        grid[data.where[:, 0], data.where[:, 1]] = values
        image = axis.imshow(grid.T, origin="lower", cmap=colours, vmin=low, vmax=high)
        axis.set_title(title, fontsize=10, color=INK)
        axis.set_xticks([])
        axis.set_yticks([])
        for side in axis.spines.values():
            side.set_visible(False)
        if axis in (axes[0, 1], axes[0, 2], axes[1, 1], axes[1, 2]):
            figure.colorbar(image, ax=axis, shrink=0.8)
    axis = axes[1, 0]
    axis.plot([-limit, limit], [-limit, limit], color=FAINT, linewidth=1)
    axis.errorbar(nuts_mean, mean, xerr=nuts_sd, yerr=stddev, fmt="none", ecolor=FAINT, elinewidth=0.4, alpha=0.5)
    axis.plot(nuts_mean, mean, ".", color="#1f5a94", markersize=4)
    axis.set_xlabel("mean ± sd, NUTS", fontsize=9)
    axis.set_ylabel("mean ± sd, marginal", fontsize=9)
    axis.set_title("region by region", fontsize=10, color=INK)
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["lattice", "row", "fit", "map"])
    parser.add_argument("--sides", type=int, nargs="+", default=[32, 71, 100, 158, 224])
    parser.add_argument("--side", type=int, default=100)
    parser.add_argument("--nuts", default="nuts.pt")
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "lattice":
        lattice(options.sides)
    elif options.what == "row":
        lattice_row(options.side)
    elif options.what == "fit":
        large(options.side)
    else:
        disease_map(options.nuts, options.out)


if __name__ == "__main__":
    main()
