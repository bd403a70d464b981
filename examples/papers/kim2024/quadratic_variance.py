"""Second moments of one draw of the gradient against the bounds of the theorems."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from examples.compare_methods.plots import FAINT, blank_figure, color, legend, save, spoken, style
from examples.papers.kim2024.runs import CLOSED, LANDING, optimum, reference_target
from torchngvi.theory.kim2024 import (
    AdaptiveVariance,
    MeanField,
    Scale,
    Triangular,
    closed_entropy_variance,
    landing_variance,
)


def run_qv(points: int = 300, seed: int = 0, full: bool = False) -> pd.DataFrame:
    """Compute exact E|g|² at random λ about λ* of the domain, with the bounds of the theorems at their best δ."""
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
    """Draw second moments against distances, one panel for each kind of root."""
    families = list(dict.fromkeys(log["family"]))
    figure = blank_figure(
        11.8, 3.9, "Second moments of one draw against the distance to the optimum",
        "points: exact at random λ of the domain, so that there is no band; lines: the bounds at their best δ (S = L)",
    )  # fmt: skip
    for axes, family in zip(np.atleast_1d(figure.subplots(1, len(families), sharey=True)), families, strict=True):
        style(axes, family, "|λ - λ*|²", "E|g|²" if family == families[0] else "")
        part = log[log["family"] == family]
        for index, method in enumerate((LANDING, CLOSED)):
            own = part[part["method"] == method].sort_values("distance2")
            axes.loglog(own["distance2"], own["moment"], ".", color=color(index), markersize=3, label=spoken(method),
                        rasterized=True)  # fmt: skip
            label = f"bound, {spoken(method)}"
            axes.loglog(own["distance2"], own["bound"], color=color(index), linewidth=1.2, label=label)
        own = part[part["method"] == LANDING].sort_values("distance2")
        label = "Fisher-Hyvärinen divergence D_F(q, π)"
        axes.loglog(own["distance2"], own["fisher"], ".", color=FAINT, markersize=2, label=label, rasterized=True)
    legend(figure)
    save(figure, path)
    for (family, method), part in log.groupby(["family", "method"], sort=False):
        ratio = part["moment"] / part["bound"]
        print(f"{family}, {method}: E|g|²/bound at most {ratio.max():.3f}, in the median {ratio.median():.3f}; "
              f"D_F/E|g|² at most {(part['fisher'] / part['moment']).max():.3f}; "
              f"‖C⁻¹‖ up to {part['inverse'].max():.3g} (√S = 2)")  # fmt: skip
