"""Stochastic NGVI off conjugacy: T E[gap] beside its limit, and what the proofs would need, along the runs.

Three numbers say how far a model is from a conjugate one, for which each is 1 everywhere:

    relative smoothness     (L(q') - L(q) - <∇L(q), ω' - ω>) / KL(q' ‖ q)       for the steps q -> q' of a run
    Bregman PL              KL(q ‖ q⁺) / (L(q) - L*)                            q⁺: the full exact step from q
    natural PL              ½ |∇L|²_F⁻¹ / (L(q) - L*)                           1 to first order only

If L is 1-strongly convex relative to A*, the second is at least 1: the smallest value over ω' of the model
<∇L, ω' - ω> + KL(q' ‖ q) is -KL(q ‖ q⁺).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from examples.compare_methods import plots
from examples.compare_methods.plots import blank_figure, color, legend, save, style
from examples.compare_methods.stepping import steps
from examples.papers import two_errors
from examples.papers.open_questions.local import Ends, hessian, noise
from examples.papers.open_questions.problems import MODELS, exact_loss, repeated, solved
from torchngvi.expectations import BonnetPrice, Independent, Quadrature
from torchngvi.interfaces import Expectation
from torchngvi.methods import VN
from torchngvi.models import GeneralizedLinear
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.stepsizes import Constant

FACTOR = 2.0  # γ_t = 2/(t + 10)
SHIFT = 10.0


def inner(q: CholeskyGaussian, e: Expectation, after: CholeskyGaussian) -> Tensor:
    """The product <∇L(q), ω' - ω> of the gradient in the expectation parameters with their change, (*batch,).

    In moments it is gᵀΔm + tr(G(ΔV + ΔmΔmᵀ)) with G = ½(H - V⁻¹).

    Args:
        q: where the gradient is taken.
        e: exact, at q.
        after: q'.
    """
    a, P = q.local(e)
    away = q.whiten(after.mean - q.mean)
    K = torch.linalg.solve_triangular(q.scale_tril, after.scale_tril, upper=False)
    second = K @ K.mT + away[..., None] * away[..., None, :] - torch.eye(q.dim, dtype=a.dtype)
    return (a * away).sum(-1) + 0.5 * (P * second).sum((-2, -1))


def copied(q: CholeskyGaussian) -> CholeskyGaussian:
    """A posterior of its own with the same moments."""
    return CholeskyGaussian(q.dim, q.batch_shape, mean=q.mean, scale=q.scale_tril, dtype=q.dtype)


@torch.no_grad()
def ratios(q: CholeskyGaussian, model: GeneralizedLinear, least: Tensor) -> dict[str, Tensor]:
    """The gap and both PL ratios of each member."""
    e, full = Quadrature()(q, model), copied(q)
    gap = q.loss(e) - least
    VN(full, lr=1.0, step_size=Constant()).step(model)
    return {"gap": gap, "natural": 0.5 * q.norm2(q.local(e)) / gap, "bregman": q.kl(full) / gap}


@torch.no_grad()
def smoothness(q: CholeskyGaussian, after: CholeskyGaussian, model: GeneralizedLinear) -> Tensor:
    """The relative curvature of L along a step, (*batch,): 1 for a conjugate model."""
    e = Quadrature()(q, model)
    return (exact_loss(after, model) - q.loss(e) - inner(q, e, after)) / after.kl(q)


def run_rate(
    models: Sequence[str] = tuple(MODELS), runs: int = 64, length: int = 4000, points: int = 25, full: bool = False
) -> pd.DataFrame:
    """Run stochastic NGVI with Price's gradient of one draw from N(0, I), all runs of a model as one batch."""
    rows = []
    for name in models:
        model = MODELS[name]()
        star, least = solved(model)
        draws = BonnetPrice(Independent(1, torch.Generator().manual_seed(1)))
        ends = Ends.of(hessian(star, model), noise(repeated(star, 500), model, draws, 8))
        known = {
            "limit": float(ends.decreasing(FACTOR)), "conjugate": 2 / 3 * float(ends.noises.sum()),
            "lowest": float(ends.eigenvalues[0]), "highest": float(ends.eigenvalues[-1]),
        }  # fmt: skip
        log = _runs(model, least, 4 * runs if full else runs, 10 * length if full else length, points)
        rows.append(log.assign(model=name, **known))
    return pd.concat(rows, ignore_index=True)


def _runs(model: GeneralizedLinear, least: Tensor, runs: int, length: int, points: int) -> pd.DataFrame:
    q = CholeskyGaussian(model.dim, (runs,), dtype=torch.float64)
    opt = VN(q, lr=1.0, step_size=Constant(), estimator=BonnetPrice(Independent(1, torch.Generator().manual_seed(0))))
    due = {0, *np.geomspace(1, length, points).round().astype(int).tolist()}
    before: CholeskyGaussian | None = None

    def step(number: int) -> CholeskyGaussian | None:
        before = copied(q) if number in due else None
        opt.param_groups[0]["lr"] = FACTOR / (number - 1 + SHIFT)
        opt.step(model)
        return before

    rows = []
    for t, _, before in steps(step, length, due):
        found = ratios(q, model, least)
        curved = smoothness(before, q, model) if before is not None else torch.full((runs,), torch.nan)
        rows.append({
            "t": t, "gap": float(found["gap"].mean()), "error": float(found["gap"].std()) / runs**0.5,
            "natural_low": float(found["natural"].min()), "natural": float(found["natural"].median()),
            "bregman_low": float(found["bregman"].min()), "bregman": float(found["bregman"].median()),
            "bregman_high": float(found["bregman"].max()),
            "smooth_low": float(curved.min()), "smooth_high": float(curved.max()),
        })  # fmt: skip
    return pd.DataFrame(rows)


def draw_rate(log: pd.DataFrame, path: Path) -> None:
    """Draw the scaled gap with its limits, the PL ratios, and the relative curvature of the steps."""
    figure = blank_figure(
        12.6, 3.9, "Stochastic NGVI with one draw a step, γ = 2/(t + 10), Price's gradient",
        "left: means and two standard errors, dotted: the limits. Middle: solid Bregman, dashed natural. Right: "
        "bands of all runs, cut off at -1 and 4. Of a conjugate model each ratio is 1.",
    )  # fmt: skip
    panels = figure.subplots(1, 3)
    titles = ("(t + 10) E[gap] over V∞", "PL ratio, the least of the runs", "relative curvature of steps")
    for axes, title in zip(panels, titles, strict=True):
        style(axes, title, "t")
        axes.set_xscale("log")
    for index, (name, part) in enumerate(log[log["t"] > 0].groupby("model", sort=False)):
        scale, look = (part["t"] + SHIFT) / (1.5 * part["conjugate"]), {"color": color(index), "linewidth": 1.4}
        plots.filled(panels[0], part["t"], two_errors(part["gap"], part["error"], scale), str(name), index, 0)
        panels[0].axhline(float((part["limit"] / (1.5 * part["conjugate"])).iloc[0]), linestyle=":", **look)
        panels[1].plot(part["t"], part["bregman_low"], **look)
        panels[1].plot(part["t"], part["natural_low"], linestyle=(0, (4, 2)), **look)
        panels[2].fill_between(part["t"], part["smooth_low"], part["smooth_high"], color=color(index), alpha=0.35)
    panels[0].set_yscale("log")
    panels[2].set_ylim(-1, 4)
    legend(figure)
    save(figure, path)
    print(summary(log).round(4).to_string())


def summary(log: pd.DataFrame) -> pd.DataFrame:
    """One row a model: the last scaled gap, its limit and the conjugate one, and the extremes along the runs."""
    rows = {}
    for name, part in log[log["t"] > 0].groupby("model", sort=False):
        end = part.iloc[-1]
        rows[name] = {
            "measured": (end["t"] + SHIFT) * end["gap"], "s.e.": (end["t"] + SHIFT) * end["error"],
            "limit": end["limit"], "2/3 V∞": end["conjugate"], "λ low": end["lowest"], "λ high": end["highest"],
            "Bregman PL": part["bregman_low"].min(), "natural PL": part["natural_low"].min(),
            "curvature low": part["smooth_low"].min(), "curvature high": part["smooth_high"].max(),
        }  # fmt: skip
    return pd.DataFrame(rows).T
