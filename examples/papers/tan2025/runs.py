"""What Tables 5 and 6 have in common: the three optimisers, the stopping rule, the comparison, the bounds drawn."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from matplotlib.axes import Axes

from examples.compare_methods import plots
from examples.compare_methods.plots import FAINT, blank_figure, legend, save, style
from examples.compare_methods.stepping import steps
from torchngvi import fit
from torchngvi.diagnostics import elbo
from torchngvi.expectations import Independent, PathDerivative
from torchngvi.fitting import SlopeStop
from torchngvi.interfaces import Target, TractableTarget
from torchngvi.methods import SRVN, RootGD, Snngm
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.rules import Adam

OPTIMISERS = ("Euclid Adam", "Natural Adam", "Natural Snngm")
DEFAULT = "fit(q, model)"
_FINAL_DRAWS = 1000


class Ended(NamedTuple):
    """The outcome of a fit: its bounds, its cost and its time."""

    means: list[float]  # of the bound, one a block
    steps: int
    gradients: int  # passes over the data
    seconds: float  # of the processor


def optimizer(name: str, q: Gaussian, generator: torch.Generator) -> NaturalGradientVI:
    """One of the three optimizers that the paper compares, with one draw a step."""
    one = PathDerivative(Independent(1, generator))
    if name == "Natural Snngm":
        return Snngm(q, estimator=one)
    method = RootGD if name == "Euclid Adam" else SRVN
    return method(q, lr=0.001, momentum=Adam(), estimator=one)


def stochastic(q: Gaussian, model: Target, name: str, seed: int, max_steps: int) -> Ended:
    """Fit by stochastic steps until the average bound no longer rises."""
    opt = optimizer(name, q, torch.Generator().manual_seed(seed))
    stop, seconds = SlopeStop(min(1000, max_steps), max_steps=max_steps), 0.0
    for look in steps(lambda _: opt.step(model), max_steps):
        seconds = look.seconds
        if stop.add(-look.value):
            break
    return Ended(stop.means, stop.steps, opt.gradients, seconds)


def by_default(q: Gaussian, model: TractableTarget) -> Ended:
    """Fit by `torchngvi.fit` without a setting: exact expectations, steps by trial."""
    start = time.process_time()
    last = fit(q, model, progress=False).trace[-1]
    return Ended([-last.loss], last.evaluations, last.gradients, time.process_time() - start)


class Left(NamedTuple):
    """What a table leaves out of its bounds, and how many of the final draws are evaluated together."""

    constant: float = 0.0
    at_once: int = _FINAL_DRAWS


_NOTHING = Left()


def rows(common: Mapping[str, object], q: Gaussian, model: Target, ended: Ended, left: Left = _NOTHING) -> list[dict]:
    """The rows of one fit in the log, one a block of iterations, with the bound from fresh draws of the final q."""
    generator = torch.Generator().manual_seed(1000 + int(str(common["seed"])))
    parts = [elbo(q, model, left.at_once, generator) for _ in range(_FINAL_DRAWS // left.at_once)]
    bound = float(torch.stack([part.estimate for part in parts]).mean()) - left.constant
    error = float(torch.stack([part.standard_error for part in parts]).square().sum().sqrt()) / len(parts)
    outcome = {
        "steps": ended.steps, "gradients": ended.gradients, "seconds": ended.seconds,
        "estimate": bound, "standard_error": error,
    }  # fmt: skip
    print(f"{common['data']}, {common['family']}, {common['optimiser']}: {ended.steps} steps, {ended.seconds:.1f} s, "
          f"bound {bound:.1f}", flush=True)  # fmt: skip
    return [{**common, **outcome, "block": i + 1, "bound": mean - left.constant} for i, mean in enumerate(ended.means)]


class Published(NamedTuple):
    """A table of the paper: for each family and optimiser, thousands of iterations and final bound of each data set."""

    data: Sequence[str]
    printed: Mapping[tuple[str, str], Sequence[tuple[int, float]]]

    def comparison(self, log: pd.DataFrame) -> pd.DataFrame:
        """A row for each fit by steps: means over the seeds of iterations, bound and seconds beside what is printed."""
        ends = log.groupby(["data", "family", "optimiser", "seed"], sort=False).last().reset_index()
        fits = ends.groupby(["data", "family", "optimiser"], sort=False)
        mean = fits.mean(numeric_only=True).assign(fewest=fits["steps"].min(), most=fits["steps"].max()).reset_index()
        found = []
        for row in mean[mean["optimiser"] != DEFAULT].itertuples():
            printed, bound = self.printed[row.family, row.optimiser][self.data.index(row.data)]
            found.append(
                {
                    "data": row.data, "family": row.family, "optimiser": row.optimiser,
                    "T": row.steps / 1000, "T range": _range(row.fewest, row.most),
                    "printed T": printed, "bound": row.estimate, "printed bound": bound,
                    "s.e.": row.standard_error, "seconds": row.seconds,
                    "bound within": abs(row.estimate - bound) <= tolerance(row.data, row.family, row.optimiser),
                    "T within": abs(row.steps / 1000 - printed) <= 0.4 * printed,
                }
            )  # fmt: skip
        return pd.DataFrame(found)

    def lines(self, log: pd.DataFrame) -> list[str]:
        """The comparison as lines of a Markdown table."""
        lines = [
            "| data | family | optimiser | T | printed | bound | printed | s.e. | CPU s | outside tolerance |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for _, row in self.comparison(log).iterrows():
            misses = [what for what in ("bound", "T") if not row[f"{what} within"]]
            lines.append(
                f"| {row['data']} | {row['family']} | {row['optimiser']} | {row['T']:.3g}{row['T range']} "
                f"| {row['printed T']} | {row['bound']:.1f} | {row['printed bound']:.1f} | {row['s.e.']:.2f} "
                f"| {row['seconds']:.1f} | {', '.join(misses)} |"
            )
        return lines


def _range(fewest: int, most: int) -> str:
    """What seeds that differ add to the mean of their T, in thousands."""
    return "" if fewest == most else f" ({fewest / 1000:.3g}-{most / 1000:.3g})"


def tolerance(data: str, family: str, optimiser: str) -> float:
    """The nats by which a bound may differ from the printed one: dummy baselines move the diagonal bounds."""
    if family == "diagonal Σ" or (data, family, optimiser) == ("German", "full Σ", "Euclid Adam"):
        return 2.0
    return 0.4


def written(lines: Sequence[str], path: Path) -> None:
    """Print a table, and write it as a Markdown file."""
    text = "\n".join(lines) + "\n"
    print(text)
    path.with_suffix(".md").write_text(text, encoding="utf-8")


def bounds_drawn(log: pd.DataFrame, path: Path, title: str, level: str = "") -> None:
    """Draw the average bound of each 1000 iterations, one panel a data set: a colour an optimiser, a dash a family."""
    names, families = list(dict.fromkeys(log["data"])), list(dict.fromkeys(log["family"]))
    seeds = log["seed"].nunique()
    figure = blank_figure(
        11.5, 4.4, title, f"one draw a step; the steep rise of the first blocks is cut off; {_of_seeds(seeds)}"
    )  # fmt: skip
    panels: list[Axes] = list(figure.subplots(1, len(names), squeeze=False)[0])
    for axes, name in zip(panels, names, strict=True):
        of_data = log[log["data"] == name]
        part = of_data[of_data["optimiser"] != DEFAULT]
        style(axes, name, "thousands of iterations", "average bound in nats" if axes is panels[0] else "")
        if level:
            known = of_data[of_data["optimiser"] == DEFAULT]["bound"].iloc[-1]
            axes.axhline(known, color=FAINT, linewidth=0.9, label=level)
        for place, family in enumerate(families):
            for index, optimiser in enumerate(OPTIMISERS):
                run = part[(part["family"] == family) & (part["optimiser"] == optimiser)]
                drawn = plots.over_seeds(run, "bound", "block")[run.groupby("block").size() == run["seed"].nunique()]
                if len(drawn):
                    plots.filled(axes, drawn.index.to_series(), drawn, f"{optimiser}, {family}", index, place)
        last = part.groupby(["family", "optimiser"])["bound"].max()
        height = last.max() - last.min()
        axes.set_ylim(last.min() - 0.6 * height, last.max() + 0.05 * height)
        axes.set_xlim(0, None)
    legend(figure)
    save(figure, path)


def _of_seeds(seeds: int) -> str:
    """What the lines are."""
    return "one seed" if seeds == 1 else f"means of {seeds} seeds while all run, bands from the smallest to the largest"
