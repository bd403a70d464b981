"""Constant steps: the gap at which VN and SR-VN stay, from the same draws, and which way their variances are off.

To first order in γ both stay at ½ Σ γn/(2 - γλ), γV∞/4 where J = I.  The curves part at the next order, in the
variance.  E[log det V] does not change in a step, so that on a Gaussian target E log det(I + γP) = 0 for the one, and
E log det(I - γ tril½ P) = 0 for the other.  With v = E‖W - EW‖² at the optimum, and d the part of its diagonal,

    VN       E[V⁻¹] = Λ for every γ        E log det V - log det V* ≈ ¼γv
    SR-VN                                  E log det V - log det V* ≈ -¼γ(v + d)
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from examples.compare_methods.plots import blank_figure, color, legend, save, style
from examples.compare_methods.stepping import unguarded
from examples.papers.open_questions.local import Ends, hessian, noise
from examples.papers.open_questions.problems import MODELS, exact_loss, repeated, solved
from torchngvi.errors import RejectedStepWarning
from torchngvi.expectations import BonnetPrice, ClosedEntropyStein, Independent
from torchngvi.interfaces import Estimator
from torchngvi.methods import SRVN, VN
from torchngvi.models import GeneralizedLinear
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.stepsizes import Constant

METHODS: dict[str, Any] = {"VN": VN, "SR-VN": SRVN}


def gaussian(rows: int = 12, dim: int = 3) -> GeneralizedLinear:
    """A linear regression on drawn rows: its posterior is a Gaussian."""
    generator = torch.Generator().manual_seed(2)
    X = torch.randn(rows, dim, dtype=torch.float64, generator=generator)
    return GeneralizedLinear(X, torch.randn(rows, dtype=torch.float64, generator=generator), "gaussian")


TARGETS = {"Gaussian": gaussian, **{name: MODELS[name] for name in ("logistic, 30 rows", "diabetes")}}


def estimator(name: str, draws: int, seed: int = 0) -> Estimator:
    """Price's gradient, or the reparametrised one, of so many draws, with a generator of its own."""
    source = Independent(draws, torch.Generator().manual_seed(seed))
    return BonnetPrice(source) if name == "Price" else ClosedEntropyStein(source)


def biases(covariance: Tensor, dim: int, gamma: float) -> dict[str, float]:
    """The biases of log det V of either method to first order in γ, where J = I.

    >>> biases(torch.diag(torch.tensor([1.0, 4.0])), 1, 0.1)  # Var W = 8: +¼γ 8 and -¼γ (8 + 8)
    {'VN': 0.2, 'SR-VN': -0.4}
    """
    variances = 2 * covariance.diagonal()[dim:]  # the flattened P counts by halves
    rows, columns = torch.tril_indices(dim, dim)
    whole, diagonal = float(variances.sum()), float(variances[rows == columns].sum())
    return {"VN": gamma * whole / 4, "SR-VN": -gamma * (whole + diagonal) / 4}


def run_floor(
    targets: Sequence[str] = tuple(TARGETS),
    steps: Sequence[float] = (0.02, 0.05, 0.1, 0.2, 0.4),
    draws: int = 16,
    runs: int = 96,
    burn: float = 6.0,  # steps before the means, and steps of the means, times γ
    full: bool = False,
) -> pd.DataFrame:
    """Run both methods from the optimum on the same draws, and take means over runs and steps."""
    rows = []
    for target in targets:
        model = TARGETS[target]()
        star, least = solved(model)
        J, volume = hessian(star, model), 2 * star.log_det_root()
        for name in ("Price", "reparametrised"):
            covariance = noise(repeated(star, 500), model, estimator(name, draws), 40)
            ends = Ends.of(J, covariance)
            for gamma in steps:
                known = {"predicted": float(ends.constant(gamma))}
                for method, bias in biases(covariance, model.dim, gamma).items():
                    q = repeated(star, 4 * runs if full else runs)
                    opt = unguarded(
                        METHODS[method](q, lr=gamma, step_size=Constant(), estimator=estimator(name, draws))
                    )
                    found = stationary(opt, q, model, int(burn / gamma))
                    gap, away = found["loss"] - least, found["log_det"] - volume
                    rows.append({
                        "target": target, "estimator": name, "method": method, "gamma": gamma, **known,
                        "gap": float(gap.mean()), "error": float(gap.mean(0).std()) / gap.shape[1] ** 0.5,
                        "spread": float(gap.std()), "log_det": float(away.mean()),
                        "log_det_error": float(away.mean(0).std()) / away.shape[1] ** 0.5,
                        "log_det_predicted": bias, "rejected": float(found["rejected"]),
                    })  # fmt: skip
    return pd.DataFrame(rows)


def stationary(
    opt: NaturalGradientVI, q: CholeskyGaussian, model: GeneralizedLinear, count: int, looks: int = 30
) -> dict[str, Tensor]:
    """Step 2 count times, and look at the runs during the second half."""
    losses, volumes = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RejectedStepWarning)
        for number in range(2 * count):
            opt.step(model)
            if number >= count and number % max(count // looks, 1) == 0:
                losses.append(exact_loss(q, model))
                volumes.append(2 * q.log_det_root())
    share = torch.tensor(opt.rejections / (2 * count * len(volumes[0])))
    return {"loss": torch.stack(losses), "log_det": torch.stack(volumes), "rejected": share}


def draw_floor(log: pd.DataFrame, path: Path) -> None:
    """Draw the floors over γ beside what is predicted, and the bias of log det V."""
    targets = list(dict.fromkeys(log["target"]))
    figure = blank_figure(
        3.4 * len(targets) + 1.8, 6.2, "Constant steps, 16 draws: where VN and SR-VN stay, from the same draws",
        "means and two standard errors. Top: predicted is ½ Σ γn/(2 - γλ); bottom: log det V less that of the optimum, "
        "predicted to first order in γ.",
    )  # fmt: skip
    panels = figure.subplots(2, len(targets), squeeze=False)
    for column, target in enumerate(targets):
        style(panels[0, column], target, "", "gap in nats" if column == 0 else "")
        style(panels[1, column], "", "step γ", "bias of log det V" if column == 0 else "")
        part = log[log["target"] == target]
        for (name, method), line in part.groupby(["estimator", "method"], sort=False):
            look = {
                "color": color(0 if method == "VN" else 1),
                "linestyle": "-" if name == "Price" else (0, (4, 2)), "linewidth": 1.4,
            }  # fmt: skip
            panels[0, column].errorbar(line["gamma"], line["gap"], 2 * line["error"], marker="o", markersize=3,
                                       label=f"{method}, {name}", **look)  # fmt: skip
            panels[0, column].loglog(
                line["gamma"], line["predicted"], color="#7a7f87", linestyle=":", label="predicted"
            )
            panels[1, column].errorbar(line["gamma"], line["log_det"], 2 * line["log_det_error"], **look)
            if name != "Price":
                panels[1, column].plot(line["gamma"], line["log_det_predicted"], color="#7a7f87", linestyle=":")
        panels[1, column].set_xscale("log")
        ticks = sorted(part["gamma"].unique())
        for axes in panels[:, column]:
            axes.set_xticks(ticks, [f"{gamma:g}" for gamma in ticks])
            axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    legend(figure)
    save(figure, path)
    table = log.assign(ratio=log["gap"] / log["predicted"], ratio_error=log["error"] / log["predicted"])
    shown = table.pivot_table(index=["target", "estimator", "gamma"], columns="method",
                              values=["ratio", "ratio_error", "log_det", "log_det_predicted", "rejected"])  # fmt: skip
    print(shown.round(3).to_string())
