"""Normalised natural gradients with a constant step: the noise gap of Snngm beside that of SR-VN.

Steps of Snngm have the length α whatever the gradient.  Near the optimum the gradient is Ju + ε, and while the noise is
the larger part its direction is, to first order, ε̂ + (I - ε̂ε̂ᵀ)Ju/|ε| with ε̂ = ε/|ε|.  So, for small α, the covariance S
of u is that of

    MJS + SJM = αN        M = E[(I - ε̂ε̂ᵀ)/|ε|]        N = E[ε̂ε̂ᵀ]        E[gap] = ½ tr JS

which is about ¼ α√V∞, where SR-VN has ¼ γV∞.  Beside it there is a bias that no step size takes away: the iterates
stay about the point where the mean *direction* vanishes, E[ε̂] + MJu = 0, and of noise that is skew E[ε̂] is not 0 where
E[ε] is.  Without noise a step back and forth leaves a gap of the order of α², where SR-VN converges.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import torch
from scipy.linalg import solve_continuous_lyapunov
from torch import Tensor

from examples.compare_methods.plots import blank_figure, color, legend, save, style
from examples.compare_methods.stepping import unguarded
from examples.papers.open_questions.floor import TARGETS, stationary
from examples.papers.open_questions.local import flattened, hessian
from examples.papers.open_questions.problems import repeated, solved
from torchngvi.expectations import BonnetPrice, ClosedEntropyStein, Independent, Stein
from torchngvi.interfaces import Estimator
from torchngvi.methods import SRVN, Snngm
from torchngvi.models import GeneralizedLinear
from torchngvi.momentum import NormalizedMomentum
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.stepsizes import Constant

ESTIMATORS: dict[str, Callable[[Independent], Estimator]] = {
    "Price": BonnetPrice,
    "reparametrised": ClosedEntropyStein,
    "Stein": Stein,
}


def noise_vectors(star: CholeskyGaussian, model: GeneralizedLinear, estimator: Estimator, calls: int) -> Tensor:
    """Stochastic natural gradients at the optimum, one a row, in coordinates of unit metric."""
    return torch.cat([flattened(*star.local(estimator(star, model))) for _ in range(calls)])


def normalised_floor(J: Tensor, vectors: Tensor, step: float) -> tuple[float, float]:
    """The spread of normalised steps to first order in their length, and the bias that is left without it, as gaps.

    >>> vectors = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 2.0], [0.0, -2.0]], dtype=torch.float64)
    >>> spread, bias = normalised_floor(torch.eye(2, dtype=torch.float64), vectors, 0.1)
    >>> round(spread, 4), bias  # M = I/4 and N = I/2: S = 0.1 I
    (0.1, 0.0)
    """
    length = vectors.norm(dim=-1)
    unit = vectors / length[:, None]
    N = unit.mT @ unit / len(unit)
    M = (1 / length).mean() * torch.eye(len(J), dtype=J.dtype) - (unit / length[:, None]).mT @ unit / len(unit)
    S = torch.as_tensor(solve_continuous_lyapunov((M @ J).numpy(), (step * N).numpy()))
    away = torch.linalg.solve(M @ J, unit.mean(0))
    return float(0.5 * (J @ S).trace()), float(0.5 * away @ J @ away)


def run_normalised(
    targets: Sequence[str] = ("Gaussian", "logistic, 30 rows"),
    estimators: Sequence[str] = tuple(ESTIMATORS),
    steps: Sequence[float] = (0.003, 0.01, 0.03, 0.1),
    draws: int = 16,
    runs: int = 48,
    burn: float = 12.0,  # the steps of either half, times α
    full: bool = False,
) -> pd.DataFrame:
    """Run Snngm in the natural norm and SR-VN from the optimum with constant steps, and take means."""
    rows = []
    for target in targets:
        model = TARGETS[target]()
        star, least = solved(model)
        J = hessian(star, model)
        for name in estimators:
            make = ESTIMATORS[name]
            source = make(Independent(draws, torch.Generator().manual_seed(1)))
            vectors = noise_vectors(repeated(star, 500), model, source, 60)
            for method in ("Snngm", "SR-VN"):
                for step in steps:
                    q = repeated(star, 4 * runs if full else runs)
                    estimator = make(Independent(draws, torch.Generator().manual_seed(0)))
                    found = stationary(_optimizer(method, q, step, estimator), q, model, min(int(burn / step), 1500))
                    gap = found["loss"] - least
                    exists = method == "Snngm" and float(vectors.norm(dim=-1).min()) > 1e-9
                    spread, bias = normalised_floor(J, vectors, step) if exists else (float("nan"),) * 2
                    rows.append({
                        "target": target, "estimator": name, "method": method, "step": step,
                        "gap": float(gap.mean()), "error": float(gap.mean(0).std()) / gap.shape[1] ** 0.5,
                        "predicted": spread + bias, "bias": bias,
                    })  # fmt: skip
    return pd.DataFrame(rows)


def _optimizer(method: str, q: CholeskyGaussian, step: float, estimator: Estimator) -> NaturalGradientVI:
    if method == "SR-VN":
        return unguarded(SRVN(q, lr=step, step_size=Constant(), estimator=estimator))
    return Snngm(q, lr=step, estimator=estimator, momentum=NormalizedMomentum("riemannian", beta=0.5))


def draw_normalised(log: pd.DataFrame, path: Path) -> None:
    """Draw the floors over the step."""
    targets = list(dict.fromkeys(log["target"]))
    figure = blank_figure(
        4.6 * len(targets) + 1.8, 3.8, "Constant steps: Snngm beside SR-VN",
        "means and two standard errors. Solid: Snngm, step α; dashed: SR-VN, step γ; dotted: predicted for Snngm. "
        "Below 1e-12 nothing is drawn.",
    )  # fmt: skip
    for axes, target in zip(figure.subplots(1, len(targets), squeeze=False)[0], targets, strict=True):
        style(axes, target, "step", "gap in nats" if target == targets[0] else "")
        for index, name in enumerate(ESTIMATORS):
            for method, dashes in (("Snngm", "-"), ("SR-VN", (0, (4, 2)))):
                line = log[(log["target"] == target) & (log["estimator"] == name) & (log["method"] == method)]
                kept = line[line["gap"] > 1e-12]
                axes.errorbar(kept["step"], kept["gap"], 2 * kept["error"], color=color(index), linestyle=dashes,
                              marker="o", markersize=3, linewidth=1.4, label=f"{method}, {name}")  # fmt: skip
                axes.loglog(
                    line["step"], line["predicted"], color="#7a7f87", linestyle=":", label="predicted for Snngm"
                )
    legend(figure)
    save(figure, path)
    shown = log.assign(ratio=log["gap"] / log["predicted"]).set_index(["target", "estimator", "method", "step"])
    print(shown.map("{:.3g}".format).to_string())
