"""Do variance constants predict iterations?  Estimators of gradients on the posteriors of posteriordb.

    python -m benchmarks.posteriordb.estimators [--only NAMES] [--log FILE] [--figure FILE]
    python -m benchmarks.posteriordb.estimators --from-log FILE [--figure FILE]

At the optimum q* of `torchngvi.fit`, `compare_estimators` measures v = E|g - Eg|² of one call of 16 draws in the
squared natural norm, and v_0 at the start.  On a conjugate model natural steps of a constant size γ have, near q*,

    E gap_{t+1}  =  (1 - γ)² E gap_t + ½ γ² v_t        v_t = v + (v_0 - v) E gap_t / gap_0

the second being an assumption, that the variance falls in a straight line with the gap.  The predicted number of
iterations is the first t with a gap of at most 0.1 nats, with the best γ of a grid; "from v" takes v_t = v.  The
measured one is that of runs with the same grid, from N(m* + C* u, (1.5)² V*), |u| = 2, by a rule that stays in the
cone.  The gap is KL(q || q*), which is that of the ELBO up to the distance of the posterior from a Gaussian.

    CFE         closed-form entropy, one triangle: the gradient of plain black-box VI
    CFE, sym.   the same, both triangles averaged
    STL         path derivative ("sticking the landing"), one triangle
    STL, sym.   the same, both triangles averaged: the library's default
    control v.  a quadratic control variate, by least squares from the same draws

Without --only the posteriors with a log joint that takes long (differential equations, recursions) are left out.
"""

import argparse
import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from examples.compare_methods.stepping import unguarded
from torchngvi import CholeskyGaussian, NaturalGradientVI, fit
from torchngvi.diagnostics import compare_estimators
from torchngvi.errors import RejectedStepWarning
from torchngvi.expectations import (
    ClosedEntropyStein,
    Independent,
    LeastSquaresStein,
    PathDerivative,
    Reparametrized,
    Stein,
)
from torchngvi.models import LogJoint
from torchngvi.rules import Retraction
from torchngvi.stepsizes import Constant

from .load import NAMES, Posterior, load

ESTIMATORS: dict[str, Any] = {
    "CFE": Reparametrized,
    "CFE, sym.": ClosedEntropyStein,
    "STL": PathDerivative,
    "STL, sym.": Stein,
    "control v.": LeastSquaresStein,
}
SLOW = (
    "arma-arma11",
    "bball_drive_event_0-hmm_drive_0",
    "hudson_lynx_hare-lotka_volterra",
    "low_dim_gauss_mix-low_dim_gauss_mix",
    "one_comp_mm_elim_abs-one_comp_mm_elim_abs",
)
DRAWS, REPEATS, RUNS, LIMIT = 16, 100, 8, 250
GAP, AWAY, WIDE = 0.1, 2.0, 1.5
STEPS = (1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125)


def predicted(v: float, v0: float, gap0: float, goal: float = GAP) -> int:
    """The first iteration at which the mean gap is small enough, with the best constant step; -1 beyond the limit."""
    best = LIMIT + 1
    for gamma in STEPS:
        gap = gap0
        for t in range(1, best):
            gap = (1 - gamma) ** 2 * gap + 0.5 * gamma**2 * (v + (v0 - v) * gap / gap0)
            if gap <= goal:
                best = t
                break
    return best if best <= LIMIT else -1


def started(star: CholeskyGaussian, batch: tuple[int, ...]) -> CholeskyGaussian:
    """Posteriors away from the optimum, all at the same place."""
    u = torch.ones(star.dim, dtype=star.dtype) * AWAY / math.sqrt(star.dim)
    mean, root = star.mean + star.scale_tril @ u, WIDE * star.scale_tril
    shape = (*batch, star.dim)
    return CholeskyGaussian(star.dim, batch, mean=mean.expand(shape), scale=root.expand(*shape, star.dim),
                            dtype=star.dtype)  # fmt: skip


def measured(star: CholeskyGaussian, target: LogJoint, name: str) -> int:
    """The first iteration at which the mean KL(q || q*) over the runs of some step is small enough."""
    q = started(star, (len(STEPS), RUNS))
    lr = torch.tensor(STEPS, dtype=star.dtype)[:, None].expand(len(STEPS), RUNS)
    estimator = ESTIMATORS[name](Independent(DRAWS, torch.Generator().manual_seed(1)))
    opt = unguarded(NaturalGradientVI(q, Retraction(), lr=lr, step_size=Constant(), estimator=estimator))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", RejectedStepWarning)
        for count in range(1, LIMIT + 1):
            with torch.enable_grad():
                opt.step(target)
            gap = q.kl(star).mean(-1).nan_to_num(math.inf, math.inf)
            if float(gap.min()) <= GAP:
                return count
    return -1


def studied(posterior: Posterior) -> list[dict[str, Any]]:
    """A row for each estimator."""
    torch.manual_seed(0)
    star = CholeskyGaussian(posterior.dim, dtype=torch.float64)
    fit(star, posterior.log_joint, progress=False, tolerance=0.02)
    target, away = LogJoint(posterior.log_joint), started(star, ())
    found = []
    for q in (star, away):
        noise = torch.Generator().manual_seed(0)
        made = {name: make(Independent(DRAWS, noise)) for name, make in ESTIMATORS.items()}
        found.append(compare_estimators(q, target, made, repeats=REPEATS))
    with torch.no_grad():
        gap, rows = float(away.kl(star)), []
    for name in ESTIMATORS:
        v, v0 = (compared[name].variance for compared in found)
        rows.append({
            "name": posterior.name, "dim": posterior.dim, "estimator": name, "optimum": v, "start": v0,
            "from_v": predicted(v, v, gap), "predicted": predicted(v, v0, gap),
            "measured": measured(star, target, name),
        })  # fmt: skip
    return rows


def spearman(x: list[float], y: list[float]) -> float:
    """The correlation of ranks, ties at their mean."""
    ranks = []
    for values in (torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)):
        below = (values[:, None] > values).sum(1) + 0.5 * ((values[:, None] == values).sum(1) - 1)
        ranks.append(below.double())
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def table(rows: list[dict[str, Any]]) -> str:
    """The variances, and the iterations measured and predicted, one line a posterior."""
    lines = ["| posterior | D | " + " | ".join(ESTIMATORS) + " |", "|---" * (2 + len(ESTIMATORS)) + "|"]
    for name in dict.fromkeys(row["name"] for row in rows):
        part = {row["estimator"]: row for row in rows if row["name"] == name}
        cells = [f"{row['optimum']:.2g}: {shown(row['measured'])} ({shown(row['predicted'])})" for row in part.values()]
        lines.append(f"| {name} | {next(iter(part.values()))['dim']} | " + " | ".join(cells) + " |")
    ratios = sorted(
        next(row["start"] for row in rows if (row["name"], row["estimator"]) == (name, "STL"))
        / next(row["start"] for row in rows if (row["name"], row["estimator"]) == (name, "control v."))
        for name in dict.fromkeys(row["name"] for row in rows)
    )
    lines.append(f"\nv_0, STL over the control variate: median {ratios[len(ratios) // 2]:.1f}, from {ratios[0]:.2f} "
                 f"to {ratios[-1]:.0f}")  # fmt: skip
    lines.append("\nv at the optimum: iterations measured (predicted); rank correlations over all cells:")
    for key, label in (("optimum", "v at the optimum"), ("start", "v at the start"), ("from_v", "from v"),
                       ("predicted", "from v and v_0")):  # fmt: skip
        pairs = [(beyond(row[key]), beyond(row["measured"])) for row in rows]
        line = f"  {label:20}{spearman(*map(list, zip(*pairs, strict=True))):.2f}"
        if key in ("from_v", "predicted"):
            found = sorted(row["measured"] / row[key] for row in rows if min(row["measured"], row[key]) > 0)
            line += (f"    measured over predicted: median {found[len(found) // 2]:.2f}, from {found[0]:.2f} to "
                     f"{found[-1]:.2f}, {len(found)} of {len(rows)} cells")  # fmt: skip
        lines.append(line)
    return "\n".join(lines)


def shown(count: int) -> str:
    return "beyond" if count < 0 else str(count)


def beyond(value: float) -> float:
    """A number of iterations, or one above the limit in the place of -1."""
    return LIMIT + 1 if value == -1 else value


def drawn(rows: list[dict[str, Any]], path: Path) -> None:
    """Measured over predicted iterations, and over v at the optimum, one mark a posterior and estimator."""
    figure = Figure(figsize=(9.6, 4.0), dpi=100, layout="constrained")
    colors = ("#1f5a94", "#7a7f87", "#d1672b", "#b03a48", "#3b8f5a")
    for axes, key, label in zip(
        figure.subplots(1, 2), ("optimum", "predicted"),
        ("variance of one call at the optimum, squared natural norm", "iterations predicted from both constants"),
        strict=True,
    ):  # fmt: skip
        for color, name in zip(colors, ESTIMATORS, strict=True):
            part = [row for row in rows if row["estimator"] == name]
            x = [beyond(row[key]) if key == "predicted" else max(row[key], 1e-6) for row in part]
            axes.loglog(x, [beyond(row["measured"]) for row in part], "o", color=color, markersize=4.5, alpha=0.8,
                        label=name)  # fmt: skip
        axes.set_xlabel(label, fontsize=9)
        axes.set_ylabel("iterations measured", fontsize=9)
        axes.grid(True, color="#e8eaed", linewidth=0.7)
        axes.set_axisbelow(True)
        if key == "predicted":
            axes.plot([1, LIMIT], [1, LIMIT], color="#9aa0a6", linewidth=0.8)
        else:
            axes.legend(fontsize=8, frameon=False)
    figure.suptitle(
        "Natural steps to a gap of 0.1 nats on posteriordb, 16 draws a step", fontsize=11, x=0.01, ha="left"
    )
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), **({"metadata": {"Date": None}} if suffix == ".svg" else {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME")
    parser.add_argument("--log", type=Path, help="a file to which each row is added, one JSON object a line")
    parser.add_argument("--from-log", type=Path, help="print the table of such a file, and run nothing")
    parser.add_argument("--figure", type=Path, help="where to draw, .png and .svg")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in arguments.from_log.read_text().splitlines()] if arguments.from_log else []
    for name in [] if arguments.from_log else arguments.only or [name for name in NAMES if name not in SLOW]:
        rows += (new := studied(load(name)))
        print(name, {row["estimator"]: (round(row["optimum"], 3), row["measured"]) for row in new}, flush=True)
        if arguments.log:
            with arguments.log.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in new)
    print(table(rows))
    if arguments.figure:
        drawn(rows, arguments.figure)


if __name__ == "__main__":
    main()
