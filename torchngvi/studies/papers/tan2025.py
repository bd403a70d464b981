"""Studies of Tan (2025): analytic natural gradients of a Cholesky factor, on logistic regression.

Table 5, nine fits of each of three data sets under the paper's stopping rule beside the printed ones; Figure 3, the
average bound per 1000 iterations of the same runs; Figure 2, how likely each iterate is to be the one of Theorem 3.
"""

import gzip
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes

from torchngvi.app.datasets import provided
from torchngvi.diagnostics import elbo
from torchngvi.expectations import Independent, PathDerivative
from torchngvi.fitting.fit import fit
from torchngvi.methods import SRVN, RootGD, Snngm
from torchngvi.models import GeneralizedLinear
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian, PrecisionCholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.rules import Adam
from torchngvi.stopping import SlopeStop
from torchngvi.studies.figures import blank_figure, color, style
from torchngvi.studies.papers import Study
from torchngvi.studies.stepping import steps

DATA = ("German", "Heart", "ICU")
FAMILIES: dict[str, type[CholeskyGaussian] | type[DiagonalGaussian] | type[PrecisionCholeskyGaussian]] = {
    "full Σ": CholeskyGaussian,
    "diagonal Σ": DiagonalGaussian,
    "full Ω": PrecisionCholeskyGaussian,
}
OPTIMISERS = ("Euclid Adam", "Natural Adam", "Natural Snngm")
DEFAULT = "fit(q, model)"
PRINTED = {  # thousands of iterations and final bound, Table 5
    ("full Σ", "Euclid Adam"): ((13, -628.7), (13, -144.0), (17, -115.3)),
    ("full Σ", "Natural Adam"): ((9, -626.1), (10, -144.0), (10, -115.3)),
    ("full Σ", "Natural Snngm"): ((5, -625.7), (7, -144.0), (6, -115.3)),
    ("diagonal Σ", "Euclid Adam"): ((15, -641.4), (19, -148.9), (21, -122.9)),
    ("diagonal Σ", "Natural Adam"): ((9, -642.5), (19, -148.8), (21, -122.8)),
    ("diagonal Σ", "Natural Snngm"): ((9, -640.8), (15, -148.8), (18, -122.9)),
    ("full Ω", "Euclid Adam"): ((48, -625.8), (21, -144.0), (24, -115.3)),
    ("full Ω", "Natural Adam"): ((28, -625.6), (23, -144.0), (23, -115.2)),
    ("full Ω", "Natural Snngm"): ((9, -625.6), (10, -144.0), (11, -115.2)),
}
_PRIOR_PRECISION = 0.01  # θ ~ N(0, 10² I)
_FINAL_DRAWS = 1000


# ------------------------------------------------------------------------------------ data


def german() -> tuple[np.ndarray, np.ndarray]:
    """X (1000, 49): the intercept, 7 standardised numbers, 13 categories; y = 1 for bad credit."""
    table = _read("german.data.gz", " ", header=None)
    numeric = [1, 4, 7, 10, 12, 15, 17]
    nominal = [column for column in range(20) if column not in numeric]
    return _design(table, numeric, nominal), (table[20] == 2).to_numpy(float)


def heart() -> tuple[np.ndarray, np.ndarray]:
    """X (270, 19): the intercept, 6 standardised numbers, 3 binary columns, 4 categories; y = 1 for disease."""
    table = _read("heart_statlog.csv.gz", ",")
    numeric = ["age", "trestbps", "chol", "thalach", "oldpeak", "ca"]
    nominal = ["sex", "fbs", "exang", "cp", "restecg", "slope", "thal"]
    return _design(table, numeric, nominal), table["class"].to_numpy(float)


def icu() -> tuple[np.ndarray, np.ndarray]:
    """X (200, 20): the intercept, 3 standardised numbers, 16 binary columns; y = 1 for a death.

    Race is white or not and consciousness none or lost, each coded 1 for the first: which of the two is
    coded 1 moves the diagonal bound by more than a nat, and the paper does not say.
    """
    table = _read("icu.tsv.gz", "\t")
    table["RACE"] = table["RACE"] == 1
    table["LOC"] = table["LOC"] == 0
    numeric = ["AGE", "SYS", "HRA"]
    nominal = [column for column in table.columns if column not in ("ID", "STA", *numeric)]
    return _design(table, numeric, nominal), table["STA"].to_numpy(float)


def _read(name: str, separator: str, header: int | None = 0) -> pd.DataFrame:
    path = provided(f"uci/{name}", f"the data file {name} of Tan's Table 5")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return pd.read_csv(file, sep=separator, header=header)


def _design(table: pd.DataFrame, numeric: Iterable[int | str], nominal: Iterable[int | str]) -> np.ndarray:
    """Intercept, standardised numbers (n - 1 in the variance), one column a level but the first."""
    numbers = [table[column].to_numpy(float) for column in numeric]
    columns = [np.ones(len(table)), *((x - x.mean()) / x.std(ddof=1) for x in numbers)]
    for column in nominal:
        levels = sorted(table[column].unique())
        columns += [(table[column] == level).to_numpy(float) for level in levels[1:]]
    return np.stack(columns, 1)


LOADERS: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {"German": german, "Heart": heart, "ICU": icu}


def regression(name: str) -> GeneralizedLinear:
    """The logistic regression of one data set, all constants of the log joint included."""
    X, y = (torch.from_numpy(array) for array in LOADERS[name]())
    return GeneralizedLinear(X, y, prior_precision=_PRIOR_PRECISION)


# ------------------------------------------------------------------------------------ runs


def optimizer(name: str, q: Gaussian, generator: torch.Generator) -> NaturalGradientVI:
    """One of the three that the paper compares, with one draw a step."""
    one = PathDerivative(Independent(1, generator))
    if name == "Natural Snngm":
        return Snngm(q, estimator=one)
    method = RootGD if name == "Euclid Adam" else SRVN
    return method(q, lr=0.001, momentum=Adam(), estimator=one)


class Ended(NamedTuple):
    """How a fit ended."""

    means: list[float]  # of the bound, one a block
    steps: int
    gradients: int  # passes over the data
    seconds: float  # of the processor


def stochastic(q: Gaussian, model: GeneralizedLinear, name: str, seed: int, max_steps: int) -> Ended:
    """Steps until the average bound no longer rises."""
    opt = optimizer(name, q, torch.Generator().manual_seed(seed))
    stop, seconds = SlopeStop(min(1000, max_steps), max_steps=max_steps), 0.0
    for look in steps(lambda _: opt.step(model), max_steps):
        seconds = look.seconds
        if stop.add(-look.value):
            break
    return Ended(stop.means, stop.steps, opt.gradients, seconds)


def by_default(q: Gaussian, model: GeneralizedLinear) -> Ended:
    """The library's own fit, without a setting: exact expectations, steps by trial."""
    start = time.process_time()
    last = fit(q, model, progress=False).trace[-1]
    return Ended([-last.loss], last.evaluations, last.gradients, time.process_time() - start)


def run_logistic(
    data: Iterable[str] = DATA, seeds: int = 1, max_steps: int = 100_000, *, full: bool = False
) -> pd.DataFrame:
    """All fits; a row for each block of 1000 iterations, with how the fit ended."""
    torch.set_num_threads(1)
    rows = []
    for name in data:
        model = regression(name)
        for family, kind in FAMILIES.items():
            for seed in range(3 if full else seeds):
                for optimiser in (*OPTIMISERS, *([DEFAULT] if seed == 0 else [])):
                    q = kind(model.dim, scale=0.1, dtype=torch.float64)
                    if optimiser == DEFAULT:
                        ended = by_default(q, model)
                    else:
                        ended = stochastic(q, model, optimiser, seed, max_steps)
                    estimate = elbo(q, model, _FINAL_DRAWS, torch.Generator().manual_seed(1000 + seed))
                    common = {
                        "data": name, "family": family, "optimiser": optimiser, "seed": seed,
                        "steps": ended.steps, "gradients": ended.gradients, "seconds": ended.seconds,
                        "estimate": float(estimate.estimate), "standard_error": float(estimate.standard_error),
                    }  # fmt: skip
                    rows += [common | {"block": i + 1, "bound": bound} for i, bound in enumerate(ended.means)]
                    print(f"{name}, {family}, {optimiser}: {ended.steps} steps, {ended.seconds:.1f} s, "
                          f"bound {common['estimate']:.1f}", flush=True)  # fmt: skip
    return pd.DataFrame(rows)


# ------------------------------------------------------------------------------------ table 5


def tolerance(data: str, family: str, optimiser: str) -> float:
    """Nats by which a bound may differ from the printed one: dummy baselines move the diagonal bounds."""
    if family == "diagonal Σ" or (data, family, optimiser) == ("German", "full Σ", "Euclid Adam"):
        return 2.0
    return 0.4


def comparison(log: pd.DataFrame) -> pd.DataFrame:
    """One row a fit: iterations, bound and seconds, means over the seeds, beside what is printed."""
    ends = log.groupby(["data", "family", "optimiser", "seed"], sort=False).last().reset_index()
    mean = ends.groupby(["data", "family", "optimiser"], sort=False).mean(numeric_only=True).reset_index()
    rows = []
    for row in mean[mean["optimiser"] != DEFAULT].itertuples():
        printed, bound = PRINTED[row.family, row.optimiser][DATA.index(row.data)]
        thousands = row.steps / 1000
        rows.append(
            {
                "data": row.data, "family": row.family, "optimiser": row.optimiser,
                "T": thousands, "printed T": printed, "bound": row.estimate, "printed bound": bound,
                "s.e.": row.standard_error, "seconds": row.seconds,
                "bound within": abs(row.estimate - bound) <= tolerance(row.data, row.family, row.optimiser),
                "T within": abs(thousands - printed) <= 0.4 * printed,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def draw_table(log: pd.DataFrame, path: Path) -> None:
    """Print the comparison, the misses and the default fits, and write them as a Markdown file."""
    table, lines = comparison(log), []
    lines += [
        "| data | family | optimiser | T | printed | bound | printed | s.e. | CPU s | outside tolerance |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for _, row in table.iterrows():
        misses = [what for what in ("bound", "T") if not row[f"{what} within"]]
        lines.append(
            f"| {row['data']} | {row['family']} | {row['optimiser']} | {row['T']:.3g} | {row['printed T']} "
            f"| {row['bound']:.1f} | {row['printed bound']:.1f} | {row['s.e.']:.2f} | {row['seconds']:.1f} "
            f"| {', '.join(misses)} |"
        )
    lines += [
        "",
        "| data | family | fit | passes over the data | CPU s | bound | s.e. |",
        "|---|---|---|---|---|---|---|",
    ]
    ends = log.groupby(["data", "family", "optimiser"], sort=False).last().reset_index()
    for _, row in ends[ends["optimiser"].isin([DEFAULT, "Natural Snngm"])].iterrows():
        lines.append(
            f"| {row['data']} | {row['family']} | {row['optimiser']} | {row['gradients']} | {row['seconds']:.2g} "
            f"| {row['estimate']:.2f} | {row['standard_error']:.2f} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    path.with_suffix(".md").write_text(text, encoding="utf-8")


# ------------------------------------------------------------------------------------ figures


def draw_bounds(log: pd.DataFrame, path: Path) -> None:
    """Figure 3: one panel a data set, the average bound of each 1000 iterations."""
    names = list(dict.fromkeys(log["data"]))
    figure = blank_figure(
        11.5,
        4.4,
        "Figure 3: average bound per 1000 iterations",
        "one draw a step; the steep rise of the first blocks is cut off",
    )
    panels: list[Axes] = list(figure.subplots(1, len(names), squeeze=False)[0])
    for axes, name in zip(panels, names, strict=True):
        part = log[(log["data"] == name) & (log["seed"] == 0) & (log["optimiser"] != DEFAULT)]
        style(axes, name, "thousands of iterations", "average bound" if axes is panels[0] else "")
        for place, family in enumerate(FAMILIES):
            for index, optimiser in enumerate(OPTIMISERS):
                run = part[(part["family"] == family) & (part["optimiser"] == optimiser)]
                axes.plot(run["block"], run["bound"], color=color(index), linewidth=1.4,
                          linestyle=("-", (0, (1.5, 1.2)), (0, (5, 2)))[place],
                          label=f"{optimiser}, {family}")  # fmt: skip
        last = part.groupby(["family", "optimiser"])["bound"].max()
        axes.set_ylim(last.min() - 0.6 * (last.max() - last.min()), last.max() + 0.05 * (last.max() - last.min()))
        axes.set_xlim(0, None)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=7.5, frameon=False)
    figure.savefig(path.with_suffix(".png"))


def tau_weights(steps: int, beta: float) -> np.ndarray:
    """P(τ = j) times its normaliser, 1 - β^(T - j + 1), j = 1..T: the iterate of which Theorem 3 speaks."""
    return 1 - beta ** np.arange(steps, 0, -1.0)


def run_weights(steps: int = 10_000, beta: float = 0.9, *, full: bool = False) -> pd.DataFrame:
    """The weights of all iterates."""
    return pd.DataFrame({"j": np.arange(1, steps + 1), "weight": tau_weights(steps, beta)})


def draw_weights(log: pd.DataFrame, path: Path) -> None:
    """Figure 2: all iterates, and the last hundred."""
    figure = blank_figure(8.0, 3.2, "Figure 2: weight of iterate j in Theorem 3")
    all_of_them, last = figure.subplots(1, 2)
    below = int((log["weight"] <= 0.99).sum())
    for axes, part, title in (
        (all_of_them, log, f"all {len(log)}"),
        (last, log.tail(100), f"the last 100: the last {below} are at 0.99 or below"),
    ):
        style(axes, title, "j", "1 - β^(T - j + 1)")
        axes.plot(part["j"], part["weight"], color=color(0), linewidth=1.6)
        axes.set_ylim(0, 1.05)
    figure.savefig(path.with_suffix(".png"))


STUDIES = {
    "table5": Study(run_logistic, draw_table),
    "fig2": Study(run_weights, draw_weights),
    "fig3": Study(run_logistic, draw_bounds),
}
