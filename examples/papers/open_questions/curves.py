"""Curves that cannot leave the cone beside the natural-gradient flow: how near they are to it, and long steps.

All start along the flow, and differ from it to second order in the step, so that a run of constant steps is off by a
first-order term.  An eigenvalue u = w/γ of CᵀHC on a Gaussian target follows a map of its own, for a step t γ = ρ:

    the flow, VN at 1 - e^{-ρ}     u' = u/(1 + (1 - e^{-ρ})(u - 1))     tends to 1 for every ρ
    VN                             u' = u/(1 + ρ(u - 1))                leaves the cone where ρ > 1 and u < 1 - 1/ρ
    exponential                    u' = u exp(-ρ(u - 1))                Ricker's map: cycles from ρ = 2, chaos from 2.69
    iBLR                           u' = u/(1 + ρ(u - 1) + ½ρ²(u - 1)²)
    SR-VN                          u' = u (1 - ½ρ(u - 1))²              rises without limit where ρ(u - 1) > 4
"""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from examples.compare_methods.plots import blank_figure, color, save, style
from examples.compare_methods.stepping import Turned, unguarded
from examples.papers.open_questions.floor import gaussian
from examples.papers.open_questions.held_flow import HeldFlow
from examples.papers.open_questions.problems import exact_loss, few, repeated
from torchngvi import fit
from torchngvi.adapters.flows import natural_gradient_flow
from torchngvi.errors import RejectedStepWarning
from torchngvi.expectations import ClosedEntropyStein, Independent
from torchngvi.interfaces import Rule
from torchngvi.models import GeneralizedLinear, StudentT
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.rules import Geodesic, LocalExponential, NaturalGradient, Retraction, VariationalNewton
from torchngvi.stepsizes import Constant

CURVES: dict[str, Callable[[], Rule]] = {
    "VN": VariationalNewton,
    "flow, H held": HeldFlow,
    "exponential": Geodesic,
    "iBLR": Retraction,
    "triangular exponential": LocalExponential,
    "SR-VN": lambda: Turned(NaturalGradient()),  # as its map is printed
}
_POLISH, _DONE = 300, 1e-6  # steps of iBLR after a fit; nats
_RISEN = 1e12  # nats at which a run is ended


def robust(rows: int = 15, dim: int = 3) -> GeneralizedLinear:
    """A regression with Cauchy noise, and every third row an outlier: not log-concave."""
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(rows, dim, dtype=torch.float64, generator=generator)
    y = X.sum(-1) + 0.3 * torch.randn(rows, dtype=torch.float64, generator=generator)
    y[::3] += 6
    return GeneralizedLinear(X, y, StudentT(0.1, 1.0))


TARGETS: dict[str, Callable[[], GeneralizedLinear]] = {
    "Gaussian": gaussian,
    "logistic, 30 rows": few,
    "Cauchy, outliers": robust,
}
STARTS = {"narrow": 0.2, "wide": 5.0}  # standard deviations over those of the optimum


def optimum(model: GeneralizedLinear) -> CholeskyGaussian:
    """The optimum, from N(0, I), by steps that cannot leave the cone."""
    q = CholeskyGaussian(model.dim, dtype=torch.float64)
    fit(q, model, progress=False)
    opt = NaturalGradientVI(q, Retraction(), lr=0.5, step_size=Constant())
    for _ in range(_POLISH):
        opt.step(model)
    return q


def begun(star: CholeskyGaussian, factor: float) -> CholeskyGaussian:
    """A start four standard deviations from the optimum along each axis of C*, with so many times its deviations."""
    mean = star.mean + 4 * star.scale_tril.sum(-1)
    return CholeskyGaussian(star.dim, mean=mean, scale=factor * star.scale_tril, dtype=star.dtype)


def away(name: str, model: GeneralizedLinear, start: CholeskyGaussian, steps: int) -> float:
    """The distance √(2 KL) from the flow at time 1, after so many steps of a curve."""
    end = natural_gradient_flow(start, model, [1.0])
    exact = CholeskyGaussian(start.dim, mean=end.mean[-1], scale=torch.linalg.cholesky(end.covariance[-1]),
                             dtype=start.dtype)  # fmt: skip
    q = CholeskyGaussian(start.dim, mean=start.mean, scale=start.scale_tril, dtype=start.dtype)
    opt = unguarded(NaturalGradientVI(q, CURVES[name](), lr=1 / steps, step_size=Constant()))
    for _ in range(steps):
        opt.step(model)
    return float((2 * q.kl(exact).detach()).clamp_min(0).sqrt()) if not opt.rejections else float("nan")


def settled(name: str, model: GeneralizedLinear, start: CholeskyGaussian, least: float, rho: float, most: int) -> str:
    """The number of constant steps to a gap of 1e-6 nats, or what the run does instead."""
    q = CholeskyGaussian(start.dim, mean=start.mean, scale=start.scale_tril, dtype=start.dtype)
    opt = unguarded(NaturalGradientVI(q, CURVES[name](), lr=rho, step_size=Constant()))
    for count in range(1, most + 1):
        opt.step(model)
        gap = float(exact_loss(q, model)) - least
        if opt.rejections:
            return "leaves"
        if not gap < _RISEN:
            return "rises"
        if gap < _DONE:
            return str(count)
    return "stays"


def under_noise(
    name: str, model: GeneralizedLinear, star: CholeskyGaussian, rho: float, draws: int, runs: int, length: int
) -> dict[str, float]:
    """Constant steps of reparametrised gradients, whose H is not definite, from twice the standard deviations."""
    q = repeated(begun(star, 2.0), runs)
    estimator = ClosedEntropyStein(Independent(draws, torch.Generator().manual_seed(0)))
    opt = unguarded(NaturalGradientVI(q, CURVES[name](), lr=rho, step_size=Constant(), estimator=estimator))
    total = torch.zeros(runs, dtype=q.dtype)
    for count in range(length):
        opt.step(model)
        if 2 * count >= length:
            total += exact_loss(q, model)
    mean = (total / (length - (length + 1) // 2) - exact_loss(star, model)).nan_to_num(torch.inf, torch.inf)
    return {"gap": float(mean.median()), "worst": float(mean.max()), "left": opt.rejections / (runs * length)}


def run_curves(
    targets: Sequence[str] = tuple(TARGETS),
    steps: Sequence[float] = (0.1, 0.3, 1.0, 1.9, 3.0, 10.0),
    divisions: Sequence[int] = (10, 20, 40),
    noisy_steps: Sequence[float] = (0.1, 0.3, 0.6),
    draws: int = 4,
    runs: int = 32,
    most: int = 200,
    full: bool = False,
) -> pd.DataFrame:
    """Run every curve on each target: distances from the flow, steps to the optimum, and gaps under noise."""
    rows: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RejectedStepWarning)
        for target in targets:
            model = TARGETS[target]()
            star = optimum(model)
            least = float(exact_loss(star, model))
            for name in CURVES:
                key = {"target": target, "curve": name}
                for place, factor in STARTS.items():
                    start = begun(star, factor)
                    here = key | {"start": place}
                    rows += [here | {"rho": 1 / n, "away": away(name, model, start, n)} for n in divisions]
                    limit = 10 * most if full else most
                    rows += [
                        here | {"rho": rho, "end": settled(name, model, start, least, rho, limit)} for rho in steps
                    ]
                rows += [
                    key | {"start": "noise", "rho": rho, **under_noise(name, model, star, rho, draws, runs, most)}
                    for rho in noisy_steps
                ]
    return pd.DataFrame(rows)


def draw_curves(log: pd.DataFrame, path: Path) -> None:
    """Draw the distance from the flow over the step, and print the steps to the optimum."""
    near, ends, noisy = (log[log[column].notna()] for column in ("away", "end", "gap"))
    targets = list(dict.fromkeys(log["target"]))
    figure = blank_figure(
        3.6 * len(targets), 3.7, "Distance √(2 KL) from the natural-gradient flow at time 1",
        "constant steps; solid: from 5 times the standard deviations of the optimum, dashed: from 0.2 times. "
        "Distances below 1e-6 are not drawn.",
    )  # fmt: skip
    for axes, target in zip(figure.subplots(1, len(targets), squeeze=False)[0], targets, strict=True):
        style(axes, target, "step ρ", "distance" if target == targets[0] else "")
        for index, name in enumerate(CURVES):
            for dash, place in (("-", "wide"), ((0, (4, 2)), "narrow")):
                part = near[(near["target"] == target) & (near["curve"] == name) & (near["start"] == place)]
                axes.loglog(part["rho"], part["away"].where(part["away"] > 1e-6), color=color(index), linestyle=dash,
                            linewidth=1.3, label=name if place == "wide" else None)  # fmt: skip
        steps = sorted(near["rho"].unique())
        axes.set_xticks(steps, [f"{step:g}" for step in steps])
        axes.set_xticks([], minor=True)
    axes.legend(fontsize=7, frameon=False)
    save(figure, path)
    for part, column in ((near, "away"), (ends, "end"), (noisy, "gap"), (noisy, "worst"), (noisy, "left")):
        key = part.assign(rho=part["rho"].map("{:g}".format)).set_index(["target", "start", "curve", "rho"])[column]
        print(f"{column}\n{key.unstack(sort=False).to_string(float_format='{:.3g}'.format)}")
