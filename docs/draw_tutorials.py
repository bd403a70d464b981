"""Draw the pictures of the tutorials from what their own code computes: docs/tutorials/*.png.

    python docs/draw_tutorials.py [NAME ...]

It runs the Python of a page, as the tests do, and draws what is then there. All of them take a minute.
"""

import contextlib
import doctest
import io
import os
import runpy
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from PIL import Image

from torchngvi.cli import main as torchngvi

DOCS = Path(__file__).resolve().parent
WALKS = runpy.run_path(os.fspath(DOCS.parent / "benchmarks" / "walks.py"))
BLUE, RED, GREY = "#1f5fa8", "#b5483a", "0.55"


def scope_of(page):
    """What a page leaves behind that is run in an empty folder."""
    scope = {}
    for kind, text in WALKS["blocks"](page):
        if kind == "python":
            for example in doctest.DocTestParser().get_examples(text):
                exec(compile(example.source, page.name, "single"), scope)
        else:
            for (_, *arguments), _ in WALKS["commands"](text):
                torchngvi(arguments)
    return scope


def forest(axes, names, low, middle, high):
    """Intervals beneath one another, in blue where they do not hold 0."""
    for place, ends in enumerate(zip(low, middle, high, strict=True)):
        colour = BLUE if ends[0] > 0 or ends[2] < 0 else GREY
        axes.plot(ends[::2], [-place, -place], color=colour, linewidth=4, solid_capstyle="round")
        axes.plot(ends[1], -place, "o", color="white", markersize=4, zorder=3)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(-np.arange(len(names)), names)
    axes.set_ylim(0.5 - len(names), 0.5)


def table(figure, scope):
    """Coefficients, and predictions over the age."""
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
    fixed, scale = scope["mixed"].summary().fixed, np.array([1, 1, 1, 10])
    ends = [part[1:].numpy() * scale for part in (fixed.low, fixed.mean, fixed.high)]
    forest(left, ["male", "deck B", "deck C", "age"], *ends)
    left.set_xlabel("log odds ratio")
    ages = np.linspace(5, 65, 31)
    for sex, colour in (("female", BLUE), ("male", RED)):
        rows = pd.DataFrame({"age": ages, "sex": sex, "deck": "A", "party": 0})
        found = scope["mixed"].predict(rows, population="typical")
        right.fill_between(ages, found.low, found.high, color=colour, alpha=0.2, linewidth=0)
        right.plot(ages, found.mean, color=colour, linewidth=2)
        right.text(66, found.mean[-1], sex, color=colour, va="center")
    right.set(xlabel="age", ylabel="probability of survival", ylim=(0, 1), xlim=(5, 65))


def script(figure, scope):
    """The posterior of two coefficients on a grid, the third integrated out, and q."""
    axes = figure.subplots()
    q = scope["q"]
    mean, sd = q.mean, q.stddev
    grids = [mean[k] + sd[k] * torch.linspace(-3.5, 3.5, 71, dtype=torch.float64) for k in range(3)]
    theta = torch.cartesian_prod(*grids)
    log_density = torch.cat([scope["log_joint"](part) for part in theta.split(20_000)]).reshape(71, 71, 71)
    density = (log_density - log_density.max()).exp().sum(-1)
    shares = density.flatten().sort(descending=True).values
    levels = [float(shares[(shares.cumsum(0) > share * shares.sum()).nonzero()[0]]) for share in (0.95, 0.8, 0.5, 0.2)]
    axes.contourf(*grids[:2], density.T, levels=[*levels, float(density.max())], cmap="Greys", alpha=0.7)
    root = torch.linalg.cholesky(q.covariance[:2, :2])
    circle = torch.linspace(0, 2 * torch.pi, 200, dtype=torch.float64)
    for share in (0.5, 0.95):
        radius = (-2 * np.log(1 - share)) ** 0.5
        x, y = mean[:2, None] + radius * root @ torch.stack([circle.cos(), circle.sin()])
        axes.plot(x, y, color=BLUE, linewidth=2)
    axes.set(xlabel="theta[0]", ylabel="theta[1]")


def gaussian_process(figure, scope):
    """Data, the process, and its inducing points."""
    axes = figure.subplots()
    x, y, model = scope["x"], scope["y"], scope["model"].eval()
    along = torch.linspace(-2.8, 2.8, 300).double()[:, None]
    with torch.no_grad():
        found = model(along)
    axes.plot(x, y, ".", color="black", markersize=4)
    half = 1.96 * found.stddev
    axes.fill_between(along[:, 0], found.mean - half, found.mean + half, color=BLUE, alpha=0.25, linewidth=0)
    axes.plot(along[:, 0], found.mean, color=BLUE, linewidth=2)
    places = model.variational_strategy.inducing_points.detach()[:, 0]
    axes.plot(places, torch.full_like(places, -2.4), "|", color=RED, markersize=12, markeredgewidth=2)
    axes.set(xlabel="x", ylabel="y", ylim=(-2.7, 2.2))


def pyro_model(figure, scope):
    """The curve by the draws, and the animals."""
    axes = figure.subplots()
    dose, died, guide = scope["dose"], scope["died"], scope["guide"]
    options = {"num_samples": 2000, "parallel": True, "return_sites": ("a", "b")}
    drawn = scope["pyro"].infer.Predictive(scope["bioassay"], guide=guide, **options)(dose)
    curves = torch.sigmoid(drawn["a"].reshape(-1, 1) + drawn["b"].reshape(-1, 1) * dose)
    low, high = curves.quantile(torch.tensor([0.025, 0.975]).double(), 0)
    axes.fill_between(dose, low, high, color=BLUE, alpha=0.25, linewidth=0)
    axes.plot(dose, curves.mean(0), color=BLUE, linewidth=2)
    axes.plot(dose, torch.sigmoid(0.5 + 3 * dose), "--", color=GREY, linewidth=1.5)
    axes.plot(dose, died, "|", color="black", markersize=10)
    axes.set(xlabel="dose", ylabel="probability of death")


def mixed_model(figure, scope):
    """Effects of the patients, and rates over the weeks."""
    left, right = figure.subplots(1, 2)
    fitted, visits = scope["fitted"], scope["visits"]
    effects = fitted.effects()["patient"][0]
    mean, low, high = (getattr(effects, name).numpy() for name in ("mean", "low", "high"))
    order = mean.argsort()
    left.vlines(np.arange(len(order)), low[order], high[order], color=BLUE, alpha=0.6)
    left.plot(np.arange(len(order)), mean[order], "o", color=BLUE, markersize=3)
    left.axhline(0, color="black", linewidth=0.8)
    left.set(xlabel="patients, in order", ylabel="effect, log rate", xticks=[])
    weeks = np.linspace(0, 5, 26)
    shown = (order[-3], RED, "a high one"), (order[3], BLUE, "a low one"), (1000, GREY, "a new one")
    for patient, colour, name in shown:
        found = fitted.predict(pd.DataFrame({"week": weeks, "patient": int(patient)}))
        right.fill_between(weeks, found.low, found.high, color=colour, alpha=0.2, linewidth=0)
        right.plot(weeks, found.mean, color=colour, linewidth=2, label=name)
        own = visits[visits.patient == patient]
        right.plot(own.week, own.seizures, "o", color=colour, markersize=5)
    right.legend(title="patient", frameon=False)
    right.set(xlabel="week", ylabel="seizures", ylim=(-0.4, 11.5))


def network(figure, scope):
    """The probability of a class, and the part of the uncertainty that is the network's."""
    x, y = scope["x"], scope["y"]
    across, up = torch.linspace(-1.8, 2.8, 90), torch.linspace(-1.2, 1.7, 70)
    grid = torch.stack(torch.meshgrid(across, up, indexing="xy"), -1)
    with torch.no_grad():
        mean, epistemic, _ = scope["q"].predictive(grid.reshape(-1, 2))
    parts = (mean[:, 1], "RdBu_r", "probability of the second moon"), (epistemic, "viridis", "epistemic part, nats")
    for axes, (values, colours, title) in zip(figure.subplots(1, 2), parts, strict=True):
        drawn = axes.contourf(across, up, values.reshape(grid.shape[:2]), levels=20, cmap=colours)
        ticks = [0.1, 0.5, 0.9] if colours == "RdBu_r" else [0, 0.01, 0.02, 0.03]
        figure.colorbar(drawn, ax=axes, ticks=ticks, orientation="horizontal", label=title)
        for label, colour in ((0, "#89b6dd"), (1, "#e69a84")):
            axes.plot(*x[y == label].T, "o", color=colour, markersize=4, markeredgecolor="black", markeredgewidth=0.4)
        axes.set(xticks=[], yticks=[])


PICTURES = {
    "table": (table, 3.6),
    "script": (script, 4.0),
    "gaussian_process": (gaussian_process, 3.6),
    "pyro_model": (pyro_model, 3.4),
    "mixed_model": (mixed_model, 3.8),
    "network": (network, 4.2),
}


def main():
    """Draw the pictures that are named, or all of them."""
    for name in sys.argv[1:] or PICTURES:
        draw, height = PICTURES[name]
        out = DOCS / "tutorials" / f"{name}.png"
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            with contextlib.redirect_stdout(io.StringIO()):
                scope = scope_of(DOCS / "tutorials" / f"{name}.md")
            with rc_context({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}):
                figure = Figure(figsize=(8.3, height), layout="constrained")
                draw(figure, scope)
                figure.savefig(out, dpi=125)
        with Image.open(out) as picture:
            picture.convert("RGB").quantize(96).save(out, optimize=True)
        print(out)


if __name__ == "__main__":
    main()
