"""Table 5 and Figure 3 of Tan (2025): logistic regression, three data sets, three families, three optimisers."""

import gzip
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from examples.compare_methods.datasets import provided
from examples.papers.tan2025.runs import (
    DEFAULT,
    OPTIMISERS,
    Published,
    bounds_drawn,
    by_default,
    rows,
    stochastic,
    written,
)
from torchngvi.models import GeneralizedLinear
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian, PrecisionCholeskyGaussian

DATA = ("German", "Heart", "ICU")
FAMILIES: dict[str, type[CholeskyGaussian] | type[DiagonalGaussian] | type[PrecisionCholeskyGaussian]] = {
    "full Σ": CholeskyGaussian,
    "diagonal Σ": DiagonalGaussian,
    "full Ω": PrecisionCholeskyGaussian,
}
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
TABLE_5 = Published(DATA, PRINTED)
_PRIOR_PRECISION = 0.01  # θ ~ N(0, 10² I)


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
    """X (200, 20): the intercept, 3 standardised numbers, 16 binary columns; y = 1 for a death."""
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
    """The logistic regression of one data set, with all constants of the log joint."""
    X, y = (torch.from_numpy(array) for array in LOADERS[name]())
    return GeneralizedLinear(X, y, prior_precision=_PRIOR_PRECISION)


# ------------------------------------------------------------------------------------ runs


def run_logistic(
    data: Iterable[str] = DATA,
    seeds: int = 1,
    max_steps: int = 100_000,
    families: Sequence[str] = tuple(FAMILIES),
    optimisers: Sequence[str] = (*OPTIMISERS, DEFAULT),
    *,
    full: bool = False,
) -> pd.DataFrame:
    """Run all fits: a row for each block of 1000 iterations, with the outcome of the fit."""
    torch.set_num_threads(1)
    log = []
    for name in data:
        model = regression(name)
        for family in families:
            for seed in range(max(3, seeds) if full else seeds):
                for optimiser in optimisers:
                    if optimiser == DEFAULT and seed > 0:
                        continue  # no draw is taken
                    q = FAMILIES[family](model.dim, scale=0.1, dtype=torch.float64)
                    if optimiser == DEFAULT:
                        ended = by_default(q, model)
                    else:
                        ended = stochastic(q, model, optimiser, seed, max_steps)
                    log += rows({"data": name, "family": family, "optimiser": optimiser, "seed": seed}, q, model, ended)
    return pd.DataFrame(log)


# ------------------------------------------------------------------------------------ table and figure


def draw_table(log: pd.DataFrame, path: Path) -> None:
    """Print the comparison, the misses and the default fits, and write them as a Markdown file."""
    lines = TABLE_5.lines(log)
    if DEFAULT not in set(log["optimiser"]):
        written(lines, path)
        return
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
    written(lines, path)


def draw_bounds(log: pd.DataFrame, path: Path) -> None:
    """Draw Figure 3, one panel for each data set: the average bound of each 1000 iterations."""
    bounds_drawn(log, path, "Figure 3: average bound per 1000 iterations")
