"""Mean-field natural gradients: what the rate and the full step lose when q is diagonal.

On a Gaussian target with the precision Λ the optimum has v_i = 1/Λ_ii, and the Hessian of the loss in coordinates of
unit Fisher metric is D^-½ Λ D^-½, D = diag Λ, for the means and the identity for the variances: they do not mix.  A
full step, γ = 1, is Jacobi's iteration for Λm = Λμ, which diverges where an eigenvalue is above 2.  So a model that is
conjugate with full covariances, J = I, is not "conjugate" here, and its condition is that of the correlations.
"""

import math
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
from examples.papers.open_questions.floor import gaussian
from examples.papers.open_questions.problems import MODELS
from examples.papers.open_questions.rate import FACTOR, SHIFT
from torchngvi.expectations import BonnetPrice, Independent, Quadrature
from torchngvi.methods import VN, NewtonCG
from torchngvi.models import GeneralizedLinear
from torchngvi.posteriors import DiagonalGaussian
from torchngvi.stepsizes import Constant

_NEWTON = 40  # steps, of which the last are idle
_STEP = 1e-4  # of central differences, in standard deviations
TARGETS = {"linear, 12 rows": gaussian, **MODELS}


def shifted(star: DiagonalGaussian, u: Tensor) -> DiagonalGaussian:
    """The posteriors with m = m* + C*x and V = V* exp(y√2) for the rows (x, y) of u, as a batch."""
    x, y = u.chunk(2, -1)
    sd = star.stddev.detach()
    root = sd * torch.exp(y / math.sqrt(2))
    return DiagonalGaussian(star.dim, u.shape[:1], mean=star.mean.detach() + sd * x, scale=root, dtype=u.dtype)


@torch.no_grad()
def hessian(star: DiagonalGaussian, target: GeneralizedLinear) -> Tensor:
    """The matrix J of a diagonal optimum, (2D, 2D), by central differences of the exact gradient."""
    axes = _STEP * torch.eye(2 * star.dim, dtype=star.dtype)
    q = shifted(star, torch.cat([axes, -axes]))
    a, P = q.local(Quadrature()(q, target))
    turn = star.stddev / q.stddev  # into the fixed frame of the optimum
    gradient = torch.cat([a * turn, P * turn.square() / math.sqrt(2)], -1)
    J = (gradient[: 2 * star.dim] - gradient[2 * star.dim :]) / (2 * _STEP)
    return 0.5 * (J + J.mT)


def solved(model: GeneralizedLinear) -> tuple[DiagonalGaussian, float]:
    """The optimum among diagonal Gaussians by Newton's method on the bound, and its loss."""
    q = DiagonalGaussian(model.dim, dtype=torch.float64)
    opt = NewtonCG(q)
    for _ in range(_NEWTON):
        opt.step(model)
    return q, loss(q, model).item()


@torch.no_grad()
def loss(q: DiagonalGaussian, model: GeneralizedLinear) -> Tensor:
    """L by quadrature, (*batch,), in nats."""
    return q.loss(Quadrature()(q, model))


def full_step_factor(star: DiagonalGaussian, model: GeneralizedLinear, count: int = 8) -> float:
    """The factor by which exact full steps change the distance from the optimum, near it, from a power iteration."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(1, 2 * star.dim, dtype=star.dtype, generator=generator)
    factor = 0.0
    for _ in range(20 * count):
        q = shifted(star, 1e-4 * u / u.norm())
        VN(q, lr=1.0, step_size=Constant()).step(model)
        sd = star.stddev.detach()
        u = torch.cat([(q.mean - star.mean) / sd, math.sqrt(2) * (q.stddev / sd).log()], -1).detach()
        factor = float(u.norm()) / 1e-4
    return factor


def run_mean_field(
    models: Sequence[str] = tuple(TARGETS), runs: int = 32, length: int = 3000, full: bool = False
) -> pd.DataFrame:
    """Run stochastic mean-field NGVI with γ = 2/(t + 10) and two draws a step, and find the eigenvalues of J."""
    rows = []
    due = {0, *np.geomspace(1, length, 25).round().astype(int).tolist()}
    for name in models:
        model = TARGETS[name]()
        star, least = solved(model)
        eigenvalues = torch.linalg.eigvalsh(hessian(star, model))
        known = {"lowest": float(eigenvalues[0]), "highest": float(eigenvalues[-1]),
                 "full_step": full_step_factor(star, model)}  # fmt: skip
        q = DiagonalGaussian(model.dim, (4 * runs if full else runs,), dtype=torch.float64)
        opt = VN(
            q, lr=1.0, step_size=Constant(), estimator=BonnetPrice(Independent(2, torch.Generator().manual_seed(0)))
        )

        def step(number: int, opt: VN = opt, model: GeneralizedLinear = model) -> None:
            opt.param_groups[0]["lr"] = FACTOR / (number - 1 + SHIFT)
            opt.step(model)

        for t, *_ in steps(step, length, due):
            gap = loss(q, model) - least
            rows.append({"model": name, "dim": model.dim, "t": t, "gap": float(gap.mean()),
                         "error": float(gap.std()) / len(gap) ** 0.5, **known})  # fmt: skip
    return pd.DataFrame(rows)


def summary(log: pd.DataFrame) -> pd.DataFrame:
    """One row a model: the eigenvalues, the factor of full steps, and the slope of log gap over the last decade."""
    found = {}
    for name, part in log[log["t"] > 0].groupby("model", sort=False):
        late = part[part["t"] >= part["t"].max() / 10]
        slope = np.polyfit(np.log(late["t"] + SHIFT), np.log(late["gap"].clip(lower=1e-300)), 1)[0]
        first = part.iloc[0]
        found[name] = {
            "λ low": first["lowest"], "λ high": first["highest"], "full step": first["full_step"],
            "max |1 - λ|": max(abs(1 - first["lowest"]), abs(1 - first["highest"])), "slope": slope,
            "slope by λ": max(-1.0, -2 * FACTOR * first["lowest"]), "last gap": part["gap"].iloc[-1],
        }  # fmt: skip
    return pd.DataFrame(found).T


def draw_mean_field(log: pd.DataFrame, path: Path) -> None:
    """Draw the gaps over t, with the slope -1."""
    figure = blank_figure(
        8.2,
        4.0,
        "Mean-field stochastic NGVI, γ = 2/(t + 10)",
        "means of the runs and two standard errors, two draws a step; dotted: slope -1",
    )
    axes = figure.subplots()
    style(axes, "", "t", "nats above the best diagonal q")
    for index, (name, part) in enumerate(log[log["t"] > 0].groupby("model", sort=False)):
        drawn = two_errors(part["gap"], part["error"]).clip(lower=1e-12)
        plots.filled(axes, part["t"], drawn, f"{name}, λ from {part['lowest'].iloc[0]:.2g}", index, 0)
        axes.loglog(part["t"], part["gap"].iloc[-1] * part["t"].iloc[-1] / part["t"], color=color(index),
                    linewidth=0.6, linestyle=":")  # fmt: skip
    axes.set_ylim(0.5 * log["gap"].min(), None)
    legend(figure)
    save(figure, path)
    print(summary(log).round(4).to_string())
