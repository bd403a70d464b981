"""The noise floor of mean field on two correlated Gaussian variables."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from examples.compare_methods.plots import blank_figure, color, legend, save, spoken, style
from examples.papers.kim2024.runs import CLOSED, LANDING, Runs, noisy, start
from torchngvi.theory.kim2024 import (
    GaussianTarget,
)


def correlated(rho: float) -> GaussianTarget:
    """A Gaussian target over two variables of variance 1 and correlation ρ."""
    covariance = torch.tensor([[1.0, rho], [rho, 1.0]], dtype=torch.float64)
    return GaussianTarget(
        torch.zeros(2, dtype=torch.float64), torch.cholesky_inverse(torch.linalg.cholesky(covariance))
    )


def predicted_floor(target: GaussianTarget, method: str) -> float:
    """The limit of E|λ - λ*|²/γ for small steps: ½ tr(H⁻¹ Cov g), H the Hessian of F at the mean-field optimum."""
    mean, C = target.mean_field_optimum()
    _, A, G = target.residuals(mean, C)
    M, diagonal = (G if method == LANDING else A), target.precision.diagonal()
    in_mean = torch.linalg.solve(target.precision, M @ M.mT).trace()
    # Var(a_i u_i) = 2 M_ii² + Σ_{j ≠ i} M_ij²; ∂²F/∂C_ii² = Λ_ii + 1/C_ii² = 2Λ_ii
    in_scale = ((M.square().sum(-1) + M.diagonal().square()) / (2 * diagonal)).sum()
    return float(0.5 * (in_mean + in_scale))


def run_floor(
    correlations: Sequence[float] = (0.1, 0.3, 0.6, 0.8, 0.9, 0.95, 0.99),
    runs: int = 200,
    share: float = 0.02,  # γ = share/L
    relaxations: float = 2.0,
    full: bool = False,
) -> pd.DataFrame:
    """Run mean field at a fixed step from its optimum: E|λ - λ*|² while the correlation goes to 1."""
    rows = []
    for rho in correlations:
        target, L, mu = correlated(rho), 1 / (1 - rho), 1 / (1 + rho)
        gamma = share / L
        mean, C = target.mean_field_optimum()
        burn = math.ceil((3 if full else 1) * relaxations / (2 * gamma * mu))
        for method in (LANDING, CLOSED):
            q = start(target, runs, mean_field=True, at_optimum=True)
            batch = Runs(target, q, noisy(method), gamma, L)
            batch.advance(burn)
            squares = [batch.distances2()]
            for _ in range(10):
                batch.advance(max(1, burn // 20))
                squares.append(batch.distances2())
            of_runs = torch.stack(squares).mean(0)
            rows.append({"rho": rho, "method": method, "gamma": gamma, "floor": float(of_runs.mean()),
                         "error": float(of_runs.std()) / runs**0.5,
                         "fisher": float(target.fisher_hyvarinen(mean, C)),
                         "predicted": predicted_floor(target, method)})  # fmt: skip
    return pd.DataFrame(rows)


def draw_floor(log: pd.DataFrame, path: Path) -> None:
    """Draw the floor over γ against D_F, and against the correlation."""
    figure = blank_figure(
        10.8, 3.7, "Mean field on two correlated Gaussian variables: the noise floor",
        "points: means of 200 runs at γ = 0.02/L, with two standard errors; lines: their limit ½ tr(H⁻¹ Cov g)",
    )  # fmt: skip
    left, right = figure.subplots(1, 2, sharey=True)
    style(left, "against the misspecification", "D_F(q*, π) = 2ρ²/(1 - ρ²)", "E|λ - λ*|² / γ")
    style(right, "against the correlation", "1 - ρ")
    for index, method in enumerate((LANDING, CLOSED)):
        part = log[log["method"] == method].sort_values("fisher")
        for axes, x in ((left, part["fisher"]), (right, 1 - part["rho"])):
            height, error = (part[key] / part["gamma"] for key in ("floor", "error"))
            axes.errorbar(x, height, 2 * error, fmt="o", color=color(index), markersize=4, label=spoken(method))
            label = f"limit, {spoken(method)}"
            axes.loglog(x, part["predicted"], color=color(index), linewidth=1, label=label)
    right.invert_xaxis()
    legend(figure)
    save(figure, path)
    for _, row in log.iterrows():
        print(f"ρ = {row['rho']:g}, {row['method']}: floor/γ = {row['floor'] / row['gamma']:.3g}, predicted "
              f"{row['predicted']:.3g}, D_F = {row['fisher']:.3g}")  # fmt: skip
    part = log[log["method"] == LANDING]
    slope = np.polyfit(np.log(part["fisher"]), np.log(part["floor"] / part["gamma"]), 1)[0]
    print(f"slope of log(floor/γ) of {LANDING} on log D_F: {slope:.2f}")
