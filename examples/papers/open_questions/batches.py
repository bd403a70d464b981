"""Steps that fall beside batches that grow, at the same number of draws: the same rate, and what each pays for it.

Near the optimum, along an eigenvector of J with the eigenvalue λ and the noise n of one draw,

    s_{t+1} = (1 - γ_t λ)² s_t + γ_t² n/B_t        E[gap_t] = ½ Σ λ s_t

With J = I, constant γ and B_t = rᵗ, r < (1 - γ)⁻², the gap after N draws is ½ γ² V∞/((1/r - (1 - γ)²)(r - 1) N).  Its
least value is ½ V∞/N, for every γ at r = 1/(1 - γ), where all draws have one weight in the end; it is that of
γ_t = 1/(1 + t) with B = 1.  With B_t = (1 + t)ᵖ the gap falls as N^(-p/(p + 1)), always slower.  (Guilmeau, Hendrikx
and Forbes 2026 prove rates for such schedules.)
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import torch

from examples.compare_methods import plots
from examples.compare_methods.plots import blank_figure, color, legend, save, style
from examples.papers import two_errors
from examples.papers.open_questions.local import Ends, hessian, noise
from examples.papers.open_questions.problems import MODELS, exact_loss, repeated, solved
from torchngvi.expectations import BonnetPrice, Independent
from torchngvi.methods import VN
from torchngvi.stepsizes import Constant

Schedule = Callable[[int], tuple[float, int]]  # of the step from 0: γ and B

SCHEDULES: dict[str, Schedule] = {
    "γ = 2/(t + 10), B = 8": lambda t: (2 / (t + 10), 8),
    "γ = 0.2, B = 8": lambda t: (0.2, 8),
    "γ = 0.2, B = 8 + t": lambda t: (0.2, 8 + t),
    "γ = 0.2, B = 8 · 1.1ᵗ": lambda t: (0.2, round(8 * 1.1**t)),
    "γ = 0.2, B = 8 · 1.25ᵗ": lambda t: (0.2, round(8 * 1.25**t)),
    "γ = 0.5, B = 8 · 1.5ᵗ": lambda t: (0.5, round(8 * 1.5**t)),
}


def geometric_constant(gamma: float, ratio: float) -> float:
    """The limit of N E[gap]/V∞ for constant steps and batches that grow by a ratio each step, where J = I.

    >>> geometric_constant(1.0, 2.0)
    1.0
    """
    left = 1 / ratio - (1 - gamma) ** 2
    return 0.5 * gamma**2 / (left * (ratio - 1)) if left > 0 else float("inf")


def expected(ends: Ends, schedule: Schedule, start: float, draws: int) -> list[tuple[int, float]]:
    """The draws and the mean gap after each step by the recursion."""
    s = 2 * start / (len(ends.eigenvalues) * ends.eigenvalues)
    found, spent, t = [], 0, 0
    while spent < draws:
        gamma, batch = schedule(t)
        s = (1 - gamma * ends.eigenvalues).square() * s + gamma**2 * ends.noises / batch
        spent, t = spent + batch, t + 1
        found.append((spent, float(0.5 * (ends.eigenvalues * s).sum())))
    return found


def run_batches(
    models: Sequence[str] = ("logistic, 30 rows", "Poisson, 60 rows"),
    draws: int = 16000,
    runs: int = 128,
    full: bool = False,
) -> pd.DataFrame:
    """Run VN with Price's gradient under each schedule to the same number of draws, from twice the deviations."""
    rows = []
    for name in models:
        model = MODELS[name]()
        star, least = solved(model)
        one = BonnetPrice(Independent(1, torch.Generator().manual_seed(1)))
        ends = Ends.of(hessian(star, model), noise(repeated(star, 500), model, one, 8))
        for label, schedule in SCHEDULES.items():
            q = repeated(star, 4 * runs if full else runs)
            q.initialize_(q.mean, 2 * q.scale_tril)
            generator, t, spent, last = torch.Generator().manual_seed(0), 0, 0, 0.0
            predicted = expected(ends, schedule, float((exact_loss(q, model) - least).mean()), draws)
            for spent, mean in predicted:
                gamma, batch = schedule(t)
                VN(q, lr=gamma, step_size=Constant(), estimator=BonnetPrice(Independent(batch, generator))).step(model)
                t += 1
                if spent < 1.15 * last and spent < draws:
                    continue
                gap, last = exact_loss(q, model) - least, spent
                rows.append({"model": name, "schedule": label, "step": t, "draws": spent, "gap": float(gap.mean()),
                             "error": float(gap.std()) / len(gap) ** 0.5, "predicted": mean,
                             "variance": float(ends.noises.sum())})  # fmt: skip
    return pd.DataFrame(rows)


def draw_batches(log: pd.DataFrame, path: Path) -> None:
    """Draw N E[gap] over V∞ against N, measured and by the recursion."""
    models = list(dict.fromkeys(log["model"]))
    figure = blank_figure(
        4.2 * len(models) + 2.4, 3.9, "Falling steps and growing batches, Price's gradient",
        "means and two standard errors; dotted: the recursion from J and the noise at the optimum",
    )  # fmt: skip
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        style(axes, model, "draws N", "N E[gap] over V∞" if model == models[0] else "")
        for index, (label, part) in enumerate(log[log["model"] == model].groupby("schedule", sort=False)):
            scale = part["draws"] / part["variance"]
            drawn = two_errors(part["gap"], part["error"], scale).clip(lower=1e-9)
            plots.filled(axes, part["draws"], drawn, str(label), index, 0)
            axes.loglog(part["draws"], scale * part["predicted"], color=color(index), linewidth=1.0, linestyle=":")
    legend(figure)
    save(figure, path)
    last = log.groupby(["model", "schedule"], sort=False).last()
    scale = last["draws"] / last["variance"]
    shown = {"steps": last["step"], "draws": last["draws"], "N gap/V": scale * last["gap"],
             "s.e.": scale * last["error"], "predicted": scale * last["predicted"]}  # fmt: skip
    print(pd.DataFrame(shown).round(3).to_string())
