"""Theorem 1 beyond the Gaussian: E KL(q̄_{T+1}‖q*) on a gamma and a Dirichlet law, batches of a conjugate target.

The theorem is of every minimal exponential family with a conjugate target.  Rows of statistics t_i are drawn in batches
with replacement, so that the step is η' = (1 - γ)η + γ(η_prior + (N/B) Σ_batch t_i), γ_t = 2/(2 + t), which the
regression of `torchngvi.expectations.StatisticRegression` takes to rounding.  The noise of the target does not depend
on η, and so Cov η_{T+1} is known: the last iterate has, to first order in its distance from q*, T KL/V → 2/3, and the
average 16/27.
"""

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from examples.compare_methods import plots
from examples.compare_methods.stepping import steps
from examples.papers import two_errors
from examples.papers.wu2024.runs import due
from torchngvi.averaging import ExpectationAverage
from torchngvi.methods import NGVI
from torchngvi.posteriors.flat import Dirichlet, ExponentialFamily, Gamma
from torchngvi.stepsizes import theorem_schedule
from torchngvi.theory.wu2024 import gradient_variance, rate_bound

_ROWS = 60
_NAMES = {"last": "last iterate", "average": "average of the expectations"}


def run_families(runs: int = 1000, iterations: int = 1000, batch: int = 3, full: bool = False) -> pd.DataFrame:
    """Run the stochastic steps with the runs as members of a batch: mean KL with its standard error, and V so far."""
    seeded = torch.Generator().manual_seed(5)
    counts = torch.poisson(torch.full((_ROWS,), 3.0, dtype=torch.float64), generator=seeded)
    shares = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    classes = torch.multinomial(shares, _ROWS, True, generator=seeded)
    problems: dict[str, tuple[type[Gamma | Dirichlet], Tensor]] = {
        "gamma, counts": (Gamma, torch.stack([counts, torch.ones_like(counts)], -1)),
        "Dirichlet, four classes": (Dirichlet, torch.nn.functional.one_hot(classes, 4).double()),
    }
    length = 10 * iterations if full else iterations
    logs = [_run(family, rows, runs, length, batch).assign(family=name) for name, (family, rows) in problems.items()]
    return pd.concat(logs, ignore_index=True)


def _run(
    family: Callable[[Tensor], ExponentialFamily], rows: Tensor, runs: int, length: int, batch: int
) -> pd.DataFrame:
    generator, scale = torch.Generator().manual_seed(7), len(rows) / batch
    prior = torch.ones_like(rows[0])
    star, one, q = family(prior + rows.sum(0)), family(prior), family(prior.expand(runs, -1).contiguous())
    opt, average = NGVI(q, lr=1.0), ExpectationAverage(q)
    schedule = LambdaLR(opt, theorem_schedule)
    largest = [0.0, 0.0]  # V_t, and its largest value so far

    def step(_: int) -> None:
        taken = rows[torch.randint(len(rows), (runs, batch), generator=generator)].sum(-2)
        coefficients = prior + one.base_coefficients() + scale * taken  # of T in the log joint
        gamma, before = opt.param_groups[0]["lr"], q.vector.clone()
        opt.step(lambda theta: (q.statistics(theta) * coefficients).sum(-1))
        exact = q.at((1 - gamma) * before + gamma * star.vector)
        largest[0] = gradient_variance(q, exact, gamma).item()
        largest[1] = max(largest)
        schedule.step()
        average.update(q)

    records = []
    for t, *_ in steps(step, length, due(length, 40)):
        if t > 0:
            for method, found in (("last", q), ("average", average.posterior())):
                kl = found.kl(star).detach()
                records.append({
                    "method": method, "iteration": t, "kl": kl.mean().item(), "error": kl.std().item() / runs**0.5,
                    "V": largest[1], "V now": largest[0],
                })  # fmt: skip
    return pd.DataFrame(records)


def draw_families(log: pd.DataFrame, path: Path) -> None:
    """Draw a panel for each family beside the theorem as it is printed and corrected, and print the constants."""
    families = list(dict.fromkeys(log["family"]))
    figure = plots.blank_figure(
        5.2 * len(families) + 0.8, 3.8, "Theorem 1 on a gamma and on a Dirichlet law",
        "means over 1,000 runs, with two standard errors; V is the largest variance of a step so far.",
    )  # fmt: skip
    for axes, family in zip(figure.subplots(1, len(families), squeeze=False)[0], families, strict=True):
        plots.style(axes, family, "iterations", "KL to the posterior, nats" if family == families[0] else "")
        part = log[log["family"] == family]
        for index, method in enumerate(_NAMES):
            line = part[part["method"] == method]
            drawn = two_errors(line["kl"], line["error"])
            plots.filled(
                axes, line["iteration"], drawn.assign(low=drawn["low"].clip(lower=1e-9)), _NAMES[method], index
            )
        once = part[part["method"] == "last"]
        bound = [rate_bound(V, T - 1) for V, T in zip(once["V"], once["iteration"], strict=True)]
        for factor, label, dash in ((1.0, "4V/(T + 2), corrected", "--"), (0.25, "V/(T + 2), as printed", ":")):
            axes.plot(once["iteration"], factor * pd.Series(bound).to_numpy(), dash, color=plots.INK, label=label)
        axes.set(xscale="log", yscale="log")
    plots.legend(figure)
    plots.save(figure, path)
    bounds = 4 * log["V"] / (log["iteration"] + 1)
    shown = log.assign(**{
        "over corrected": log["kl"] / bounds, "over printed": 4 * log["kl"] / bounds,
        "(T + 2) KL/V now": (log["iteration"] + 1) * log["kl"] / log["V now"],
    })  # fmt: skip
    first, last = shown[shown["iteration"] <= 2], shown[shown["iteration"] == shown["iteration"].max()]
    table = pd.concat([first, last]).set_index(["family", "method", "iteration"])
    print(table.drop(columns=["V now"]).map("{:.3g}".format).to_string())
