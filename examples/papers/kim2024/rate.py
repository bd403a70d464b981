"""The reference run: distances to the optimum at the step of the theorem and its multiples, and the noise floors."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from examples.compare_methods import plots
from examples.compare_methods.plots import FAINT, INK, blank_figure, color, legend, save, spoken, style
from examples.papers.kim2024.runs import CLOSED, LANDING, Runs, noisy, reference_target, start
from torchngvi.theory.kim2024 import (
    landing_variance,
)

_SMALL = 1e-30  # below it a squared distance is rounding


def run_rate(
    runs: int = 20,
    factors: Sequence[float] = (1, 4, 16, 32),
    draws: Sequence[int] = (1, 4, 16),  # M, of the closed entropy at the third factor
    eps: float = 1e-6,
    points: int = 60,
    full: bool = False,
) -> pd.DataFrame:
    """Run the reference problem: mean squared distances of both estimators, at multiples of the step of the theorem."""
    target, L, mu = reference_target(), 4.0, 1.0
    smallest = landing_variance(L, 5, 0.0).at(0.0).fixed_step(mu, eps)
    first = Runs(target, start(target, 1), noisy(LANDING), smallest, L)
    delta2 = float(first.distances2())
    T = landing_variance(L, 5, 0.0).fixed_iterations(mu, eps, delta2)
    print(f"Δ² = {delta2:.4f}, step of the theorem {smallest:.4e}, T = {T} for ε = {eps:g}")
    cases = [(name, factor, 1) for factor in factors for name in (LANDING, CLOSED)]
    cases += [(CLOSED, factors[min(2, len(factors) - 1)], M) for M in draws if M > 1]
    rows = []
    for name, factor, M in cases:
        gamma, length = factor * smallest, math.ceil((2 if full else 1) * T / factor)
        q = start(target, 4 * runs if factor > 1 else runs)
        batch = Runs(target, q, noisy(name, M), gamma, L)
        due = np.unique(np.linspace(0, length, points).round().astype(int))
        for before, after in zip([0, *due[:-1]], due, strict=True):
            batch.advance(int(after - before))
            squares = batch.distances2()
            rows.append({"method": name, "factor": factor, "draws": M, "gamma": gamma, "iteration": after,
                         "distance2": float(squares.mean()), "low": float(squares.min()),
                         "high": float(squares.max()), "T": T, "delta2": delta2})  # fmt: skip
    return pd.DataFrame(rows)


def floors(log: pd.DataFrame) -> pd.DataFrame:
    """The mean squared distance over the last third of each run with the closed entropy."""
    length = log.groupby(["method", "factor", "draws"])["iteration"].transform("max")
    tail = log[(log["method"] == CLOSED) & (log["iteration"] > 2 / 3 * length)]
    return tail.groupby(["factor", "draws", "gamma"], as_index=False)["distance2"].mean()


def decay(log: pd.DataFrame) -> float:
    """The rate -d log E|λ - λ*|²/dt of one run, by least squares above rounding."""
    part = log[log["distance2"] > 1e-24]
    return -float(np.polyfit(part["iteration"], np.log(part["distance2"]), 1)[0])


def draw_rate(log: pd.DataFrame, path: Path) -> None:
    """Draw distances on a logarithmic axis against γμt, and the floors against the step."""
    figure = blank_figure(
        12.4, 3.9, "Reference run: d = 5, κ = 4, the family holds the target",
        "means over 20 runs at the step of the theorem γ₁, 80 at its multiples, bands from smallest to largest; "
        "one draw a step; the floor is the mean over the last third of a run",
    )  # fmt: skip
    left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
    style(left, "distance to the optimum", "γμ t", "mean |λ - λ*|²")
    for dash, method in enumerate((LANDING, CLOSED)):
        for index, factor in enumerate(dict.fromkeys(log["factor"])):
            part = log[(log["method"] == method) & (log["factor"] == factor) & (log["draws"] == 1)]
            drawn = part.rename(columns={"distance2": "middle"})[["middle", "low", "high"]].clip(lower=_SMALL)
            label = f"{spoken(method)}, {factor:g} γ₁"
            plots.filled(left, part["iteration"] * part["gamma"], drawn, label, index, dash)
    times = np.linspace(0, float((log["iteration"] * log["gamma"]).max()), 50)
    left.plot(times, log["delta2"].iloc[0] * np.exp(-times), color=INK, linewidth=0.9, label="bound Δ² exp(-γμt)")
    left.set_yscale("log")
    left.set_ylim(1e-17, 100)
    style(right, "floor of the closed-form entropy", "step γ / number of draws M", "mean |λ - λ*|² at the end")
    table = floors(log)
    for index, (marker, part) in enumerate((("o", table[table["draws"] == 1]), ("s", table[table["draws"] > 1]))):
        x = part["gamma"] / part["draws"]
        right.loglog(x, part["distance2"], marker, color=color(index), markersize=5,
                     label="floor, one draw" if index == 0 else "floor, 4 and 16 draws, 16 γ₁")  # fmt: skip
    x = np.array([table["gamma"].min(), table["gamma"].max()]) * np.array([0.7, 1.4])
    first = table[table["draws"] == 1].iloc[0]
    right.loglog(x, first["distance2"] / first["gamma"] * x, color=FAINT, linewidth=0.9, label="proportional to γ/M")
    legend(figure)
    save(figure, path)
    for (method, factor), part in log[log["draws"] == 1].groupby(["method", "factor"], sort=False):
        gamma, last = part["gamma"].iloc[0], part.iloc[-1]
        rate = f", rate {decay(part):.3g} a step (γμ = {gamma:.3g})" if method == LANDING else ""
        print(f"{method}, {factor:g} γ₁: {last['distance2']:.3g} after {last['iteration']:.0f}{rate}")
    for _, row in table.iterrows():
        print(f"floor of {CLOSED} at {row['factor']:g} γ₁, {row['draws']:.0f} draws: {row['distance2']:.3g}")
