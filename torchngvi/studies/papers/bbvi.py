"""Kim, Ma and Gardner (2024), Linear convergence of black-box variational inference: its theorems, drawn.

The paper has no experiment.  All targets here are Gaussian, so that the optimum and every second moment are known.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from torchngvi.expectations import Independent, PathDerivative, Reparametrized
from torchngvi.interfaces import Estimator
from torchngvi.methods import BBVI
from torchngvi.models import LogJoint
from torchngvi.numerics.linalg import cholesky
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian
from torchngvi.studies import experiments
from torchngvi.studies.papers import Study
from torchngvi.theory.kim2024 import (
    AdaptiveVariance,
    GaussianTarget,
    MeanField,
    Scale,
    Triangular,
    closed_entropy_variance,
    landing_variance,
)

LANDING, CLOSED = "STL", "CFE"
_SMALL = 1e-30  # below it a squared distance is rounding


def reference_target(dim: int = 5, kappa: float = 4.0, seed: int = 3) -> GaussianTarget:
    """Precision Q diag(1 .. κ) Qᵀ, mean ~ N(0, I): the target of the reference run for dim = 5, κ = 4."""
    rng = np.random.default_rng(seed)
    Q = torch.as_tensor(np.linalg.qr(rng.normal(size=(dim, dim))).Q)
    precision = Q @ torch.diag(torch.linspace(1, kappa, dim, dtype=torch.float64)) @ Q.mT
    return GaussianTarget(torch.as_tensor(rng.normal(size=dim)), 0.5 * (precision + precision.mT))


def optimum(target: GaussianTarget) -> Tensor:
    """C* = chol Λ⁻¹ of the triangular family."""
    return cholesky(torch.cholesky_inverse(cholesky(target.precision)[0]))[0]


class Runs:
    """R independent runs of projected SGD as one batch, with their distances to λ*."""

    def __init__(
        self,
        target: GaussianTarget,
        estimator: str,
        gamma: float,
        *,
        runs: int,
        smoothness: float,
        mean_field: bool = False,
        draws: int = 1,
        at_optimum: bool = False,
        seed: int = 0,
    ) -> None:
        dim = len(target.mean)
        self.star = target.mean_field_optimum()[1].diagonal() if mean_field else optimum(target)
        self.target, self.log_joint = target, LogJoint(target.log_joint)
        kind = DiagonalGaussian if mean_field else CholeskyGaussian
        start = {"mean": target.mean, "scale": self.star} if at_optimum else {}
        self.q = kind(dim, (runs,), dtype=torch.float64)
        if start:
            self.q.initialize_(start["mean"], start["scale"].expand(runs, *self.star.shape))
        noise = Independent(draws, torch.Generator().manual_seed(seed))
        part: Estimator = PathDerivative(noise) if estimator == LANDING else Reparametrized(noise)
        self.opt = BBVI(self.q, gamma, smoothness, estimator=part)

    def advance(self, steps: int) -> None:
        """That many steps."""
        for _ in range(steps):
            self.opt.step(self.log_joint)

    def distances2(self) -> Tensor:
        """|λ - λ*|² of each run, (R,)."""
        mean, root = self.q.coordinates
        return (mean - self.target.mean).square().sum(-1) + (root - self.star).square().flatten(1).sum(-1)


# ------------------------------------------------------------------------------------ rate


def run_rate(
    runs: int = 20,
    factors: Sequence[float] = (1, 4, 16, 32),
    draws: Sequence[int] = (1, 4, 16),  # M, of the closed entropy at the third factor
    eps: float = 1e-6,
    points: int = 60,
    full: bool = False,
) -> pd.DataFrame:
    """Mean squared distances of the reference run, both estimators, at multiples of the step of the theorem."""
    target, L, mu = reference_target(), 4.0, 1.0
    smallest = landing_variance(L, 5, 0.0).at(0.0).fixed_step(mu, eps)
    first = Runs(target, LANDING, smallest, runs=1, smoothness=L)
    delta2 = float(first.distances2())
    T = landing_variance(L, 5, 0.0).fixed_iterations(mu, eps, delta2)
    print(f"Δ² = {delta2:.4f}, step of the theorem {smallest:.4e}, T = {T} for ε = {eps:g}")
    cases = [(name, factor, 1) for factor in factors for name in (LANDING, CLOSED)]
    cases += [(CLOSED, factors[min(2, len(factors) - 1)], M) for M in draws if M > 1]
    rows = []
    for name, factor, M in cases:
        gamma, length = factor * smallest, math.ceil((2 if full else 1) * T / factor)
        batch = Runs(target, name, gamma, runs=4 * runs if factor > 1 else runs, smoothness=L, draws=M)
        due = np.unique(np.linspace(0, length, points).round().astype(int))
        for before, after in zip([0, *due[:-1]], due, strict=True):
            batch.advance(int(after - before))
            squares = batch.distances2()
            rows.append({"method": name, "factor": factor, "draws": M, "gamma": gamma, "iteration": after,
                         "distance2": float(squares.mean()), "low": float(squares.min()),
                         "high": float(squares.max()), "T": T, "delta2": delta2})  # fmt: skip
    return pd.DataFrame(rows)


def floors(log: pd.DataFrame) -> pd.DataFrame:
    """Mean squared distance over the last third of each run with the closed entropy."""
    length = log.groupby(["method", "factor", "draws"])["iteration"].transform("max")
    tail = log[(log["method"] == CLOSED) & (log["iteration"] > 2 / 3 * length)]
    return tail.groupby(["factor", "draws", "gamma"], as_index=False)["distance2"].mean()


def decay(log: pd.DataFrame) -> float:
    """-d log E|λ - λ*|²/dt of one run, by least squares above rounding."""
    part = log[log["distance2"] > 1e-24]
    return -float(np.polyfit(part["iteration"], np.log(part["distance2"]), 1)[0])


def draw_rate(log: pd.DataFrame, path: Path) -> None:
    """Distances on a logarithmic axis against γμt, and the floors against the step."""
    figure = experiments.blank_figure(
        10.2, 3.9, "Reference run: d = 5, κ = 4, the family holds the target",
        "mean |λ - λ*|² over 20 runs at the step of the theorem γ₁, 80 at its multiples; one draw a step; black: "
        "the bound Δ² exp(-γμt)",
    )  # fmt: skip
    left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
    experiments.style(left, "distance to the optimum", "γμ t", "mean |λ - λ*|²")
    for method, line in ((LANDING, "-"), (CLOSED, (0, (4, 1.5)))):
        for index, factor in enumerate(dict.fromkeys(log["factor"])):
            part = log[(log["method"] == method) & (log["factor"] == factor) & (log["draws"] == 1)]
            left.plot(part["iteration"] * part["gamma"], part["distance2"].clip(lower=_SMALL),
                      color=experiments.color(index), linestyle=line, linewidth=1.3,
                      label=f"{method}, {factor:g} γ₁")  # fmt: skip
    times = np.linspace(0, float((log["iteration"] * log["gamma"]).max()), 50)
    left.plot(times, log["delta2"].iloc[0] * np.exp(-times), color="#222222", linewidth=0.9)
    left.set_yscale("log")
    left.set_ylim(1e-17, 100)
    left.legend(fontsize=7, frameon=False, ncols=2, loc="lower left")
    experiments.style(right, "floor of the closed entropy", "step γ / number of draws M", "mean |λ - λ*|² at the end")
    table = floors(log)
    for index, (marker, part) in enumerate((("o", table[table["draws"] == 1]), ("s", table[table["draws"] > 1]))):
        x = part["gamma"] / part["draws"]
        right.loglog(x, part["distance2"], marker, color=experiments.color(index), markersize=5,
                     label="one draw" if index == 0 else "16 γ₁ with 4 and 16 draws")  # fmt: skip
    x = np.array([table["gamma"].min(), table["gamma"].max()]) * np.array([0.7, 1.4])
    first = table[table["draws"] == 1].iloc[0]
    right.loglog(x, first["distance2"] / first["gamma"] * x, color="#9aa0a6", linewidth=0.9, label="proportional")
    right.legend(fontsize=7, frameon=False)
    figure.savefig(path.with_suffix(".png"))
    for (method, factor), part in log[log["draws"] == 1].groupby(["method", "factor"], sort=False):
        gamma, last = part["gamma"].iloc[0], part.iloc[-1]
        rate = f", rate {decay(part):.3g} a step (γμ = {gamma:.3g})" if method == LANDING else ""
        print(f"{method}, {factor:g} γ₁: {last['distance2']:.3g} after {last['iteration']:.0f}{rate}")
    for _, row in table.iterrows():
        print(f"floor of {CLOSED} at {row['factor']:g} γ₁, {row['draws']:.0f} draws: {row['distance2']:.3g}")


# ------------------------------------------------------------------------------------ quadratic variance


def run_qv(points: int = 300, seed: int = 0, full: bool = False) -> pd.DataFrame:
    """Exact E|g|² at random λ about λ* of the domain, with the bounds of the theorems at their best δ."""
    target, L, rows = reference_target(), 4.0, []
    generator = torch.Generator().manual_seed(seed)
    families: list[tuple[str, Scale, Tensor, bool]] = [
        ("triangular, holds the target", Triangular(), optimum(target), False),
        ("mean field, does not", MeanField(), target.mean_field_optimum()[1], True),
    ]
    for family, scale, star, mean_field in families:
        fisher4 = float(target.fisher_hyvarinen_4(target.mean, star)) if mean_field else 0.0
        bounds = {
            LANDING: landing_variance(L, 5, fisher4, mean_field=mean_field),
            CLOSED: closed_entropy_variance(L, 5, float(star.square().sum()), mean_field=mean_field),
        }
        for size in np.geomspace(1e-3, 10, 10 * points if full else points):
            shift, turn = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in (5, (5, 5)))
            turn = scale.kept(turn)
            unit = (shift.square().sum() + turn.square().sum()).sqrt()
            mean, C = target.mean + size / unit * shift, scale.projected(star + size / unit * turn, L**-0.5)
            distance2 = float((mean - target.mean).square().sum() + (C - star).square().sum())
            lower = float(target.fisher_hyvarinen(mean, C))
            inverse = float(torch.linalg.matrix_norm(torch.linalg.solve(C, torch.eye(5, dtype=torch.float64)), 2))
            for name, moment in ((LANDING, target.landing_moment), (CLOSED, target.closed_entropy_moment)):
                rows.append({"family": family, "method": name, "distance2": distance2,
                             "moment": float(moment(scale, mean, C)), "bound": _best(bounds[name], distance2),
                             "fisher": lower, "inverse": inverse})  # fmt: skip
    return pd.DataFrame(rows)


def _best(variance: AdaptiveVariance, distance2: float) -> float:
    """The smallest over δ: (√(α̃ r) + √β̃)²."""
    return (math.sqrt(variance.alpha * distance2) + math.sqrt(variance.beta)) ** 2


def draw_qv(log: pd.DataFrame, path: Path) -> None:
    """Second moments against distances, one panel a family."""
    families = list(dict.fromkeys(log["family"]))
    figure = experiments.blank_figure(
        10.2, 3.9, "Second moments of one draw against the distance to the optimum",
        "points: exact E|g|² at random λ in the domain; lines: the bounds at their best δ (S = L); grey: D_F(q, π)",
    )  # fmt: skip
    for axes, family in zip(np.atleast_1d(figure.subplots(1, len(families), sharey=True)), families, strict=True):
        experiments.style(axes, family, "|λ - λ*|²", "E|g|²")
        part = log[log["family"] == family]
        for index, method in enumerate((LANDING, CLOSED)):
            own = part[part["method"] == method].sort_values("distance2")
            axes.loglog(
                own["distance2"], own["moment"], ".", color=experiments.color(index), markersize=3, label=method
            )
            axes.loglog(own["distance2"], own["bound"], color=experiments.color(index), linewidth=1.2)
        own = part[part["method"] == LANDING].sort_values("distance2")
        axes.loglog(own["distance2"], own["fisher"], ".", color="#9aa0a6", markersize=2)
        axes.legend(fontsize=7.5, frameon=False)
    figure.savefig(path.with_suffix(".png"))
    for (family, method), part in log.groupby(["family", "method"], sort=False):
        ratio = part["moment"] / part["bound"]
        print(f"{family}, {method}: E|g|²/bound at most {ratio.max():.3f}, in the median {ratio.median():.3f}; "
              f"D_F/E|g|² at most {(part['fisher'] / part['moment']).max():.3f}; "
              f"‖C⁻¹‖ up to {part['inverse'].max():.3g} (√S = 2)")  # fmt: skip


# ------------------------------------------------------------------------------------ floor


def correlated(rho: float) -> GaussianTarget:
    """Two variables of variance 1 and correlation ρ."""
    covariance = torch.tensor([[1.0, rho], [rho, 1.0]], dtype=torch.float64)
    return GaussianTarget(torch.zeros(2, dtype=torch.float64), torch.cholesky_inverse(cholesky(covariance)[0]))


def predicted_floor(target: GaussianTarget, method: str) -> float:
    """lim E|λ - λ*|²/γ for small steps: ½ tr(H⁻¹ Cov g) with the Hessian H of F at the mean-field optimum."""
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
    """E|λ - λ*|² of mean field at a fixed step, started at the optimum, while the correlation goes to 1."""
    rows = []
    for rho in correlations:
        target, L, mu = correlated(rho), 1 / (1 - rho), 1 / (1 + rho)
        gamma = share / L
        mean, C = target.mean_field_optimum()
        burn = math.ceil((3 if full else 1) * relaxations / (2 * gamma * mu))
        for method in (LANDING, CLOSED):
            batch = Runs(target, method, gamma, runs=runs, smoothness=L, mean_field=True, at_optimum=True)
            batch.advance(burn)
            squares = [batch.distances2().mean()]
            for _ in range(10):
                batch.advance(max(1, burn // 20))
                squares.append(batch.distances2().mean())
            rows.append({"rho": rho, "method": method, "gamma": gamma, "floor": float(torch.stack(squares).mean()),
                         "fisher": float(target.fisher_hyvarinen(mean, C)),
                         "predicted": predicted_floor(target, method)})  # fmt: skip
    return pd.DataFrame(rows)


def draw_floor(log: pd.DataFrame, path: Path) -> None:
    """The floor over γ against D_F, and against the correlation."""
    figure = experiments.blank_figure(
        9.2, 3.7, "Mean field on two correlated Gaussian variables: the noise floor",
        "points: E|λ - λ*|²/γ of 200 runs at γ = 0.02/L; lines: ½ tr(H⁻¹ Cov g), its limit for small steps",
    )  # fmt: skip
    left, right = figure.subplots(1, 2, sharey=True)
    experiments.style(left, "against the misspecification", "D_F(q*, π) = 2ρ²/(1 - ρ²)", "E|λ - λ*|² / γ")
    experiments.style(right, "against the correlation", "1 - ρ")
    for index, method in enumerate((LANDING, CLOSED)):
        part = log[log["method"] == method].sort_values("fisher")
        for axes, x in ((left, part["fisher"]), (right, 1 - part["rho"])):
            axes.loglog(
                x, part["floor"] / part["gamma"], "o", color=experiments.color(index), markersize=5, label=method
            )
            axes.loglog(x, part["predicted"], color=experiments.color(index), linewidth=1)
    right.invert_xaxis()
    left.legend(fontsize=7.5, frameon=False)
    figure.savefig(path.with_suffix(".png"))
    for _, row in log.iterrows():
        print(f"ρ = {row['rho']:g}, {row['method']}: floor/γ = {row['floor'] / row['gamma']:.3g}, predicted "
              f"{row['predicted']:.3g}, D_F = {row['fisher']:.3g}")  # fmt: skip
    part = log[log["method"] == LANDING]
    slope = np.polyfit(np.log(part["fisher"]), np.log(part["floor"] / part["gamma"]), 1)[0]
    print(f"slope of log(floor/γ) of {LANDING} on log D_F: {slope:.2f}")


# ------------------------------------------------------------------------------------ complexity


def run_complexity(
    dims: Sequence[int] = (2, 4, 8, 16, 32),
    kappas: Sequence[float] = (1, 2, 4, 8),
    inverse_eps: Sequence[float] = (1e2, 1e4, 1e6, 1e8, 1e10),
    inverse_eps_closed: Sequence[float] = (4, 8, 16, 32, 64),
    eps: float = 1e-4,  # where it is not varied
    runs: int = 20,
    full: bool = False,
) -> pd.DataFrame:
    """Steps until the mean of |λ - λ*|² is ε, at the fixed step of the theorem, with the count it proves."""
    rows = []
    for dim in dims:
        rows.append({"varied": "d", "x": dim} | _reached(LANDING, dim, 2.0, eps, runs))
    for kappa in (*kappas, 16.0) if full else kappas:
        rows.append({"varied": "κ", "x": kappa} | _reached(LANDING, 4, kappa, eps, runs))
    for inverse in inverse_eps:
        rows.append({"varied": "1/ε", "x": inverse} | _reached(LANDING, 4, 2.0, 1 / inverse, runs))
    for inverse in inverse_eps_closed:
        rows.append({"varied": "1/ε", "x": inverse} | _reached(CLOSED, 2, 2.0, 1 / inverse, 5 * runs))
    return pd.DataFrame(rows)


def _reached(method: str, dim: int, kappa: float, eps: float, runs: int) -> dict[str, float | str]:
    target = reference_target(dim, kappa)
    C = optimum(target)
    if method == LANDING:
        variance = landing_variance(kappa, dim, 0.0)
    else:
        variance = closed_entropy_variance(kappa, dim, float(C.square().sum()))
    gamma = variance.fixed_step(1.0, eps)
    batch = Runs(target, method, gamma, runs=runs, smoothness=kappa)
    delta2 = float(batch.distances2()[0])
    proved, stride, steps = variance.fixed_iterations(1.0, eps, delta2), max(1, int(0.02 / gamma)), 0
    while float(batch.distances2().mean()) > eps and steps < proved:
        batch.advance(stride)
        steps += stride
    end = float(batch.distances2().mean())
    return {"method": method, "dim": dim, "kappa": kappa, "eps": eps, "steps": steps, "proved": proved, "end": end}


def draw_complexity(log: pd.DataFrame, path: Path) -> None:
    """Steps against each of d, κ and 1/ε."""
    figure = experiments.blank_figure(
        11.6, 3.7, "Steps to E|λ - λ*|² = ε at the fixed step of the theorem, the family holds the target",
        "points: measured, stride 2% of 1/(γμ); lines: proved; where not varied κ = 2, d = 4 (CFE: 2), ε = 1e-4",
    )  # fmt: skip
    panels = (("d", LANDING), ("κ", LANDING), ("1/ε", LANDING), ("1/ε", CLOSED))
    for axes, (varied, method) in zip(figure.subplots(1, 4), panels, strict=True):
        part = log[(log["varied"] == varied) & (log["method"] == method)]
        experiments.style(axes, method, varied, "steps" if varied == "d" else "")
        axes.plot(part["x"], part["steps"], "o", color=experiments.color(0), markersize=5, label="measured")
        axes.plot(part["x"], part["proved"], color=experiments.color(1), linewidth=1.2, label="proved")
        axes.set_xscale("log")
        if len(part) and part["x"].max() < 1000:
            axes.set_xticks(part["x"], [f"{x:g}" for x in part["x"]])
            axes.minorticks_off()
        if (varied, method) != ("1/ε", LANDING):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        if varied == "d":
            axes.legend(fontsize=7.5, frameon=False)
        if (varied, method) == ("1/ε", LANDING):
            slopes = [np.polyfit(np.log(part["x"]), part[key], 1)[0] for key in ("steps", "proved")]
            print(f"{method} against log 1/ε: {slopes[0]:.0f} steps a unit measured, {slopes[1]:.0f} proved")
        else:
            slopes = [np.polyfit(np.log(part["x"]), np.log(part[key]), 1)[0] for key in ("steps", "proved")]
            print(f"{method} against {varied}: log-log slope {slopes[0]:.2f} measured, {slopes[1]:.2f} proved")
    figure.savefig(path.with_suffix(".png"))


STUDIES: dict[str, Study] = {
    "rate": Study(run_rate, draw_rate),
    "qv": Study(run_qv, draw_qv),
    "floor": Study(run_floor, draw_floor),
    "complexity": Study(run_complexity, draw_complexity),
}
