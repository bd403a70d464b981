"""A posterior by its name, with data and reference draws from $TORCHNGVI_DATA/posteriordb."""

import functools
import gzip
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import dynamics, latent, regressions, time_series
from .model import Model, Values

MODELS: dict[str, Callable[[Values], Model]] = {
    model.__name__: model
    for model in (
        dynamics.lotka_volterra,
        dynamics.one_comp_mm_elim_abs,
        latent.eight_schools_noncentered,
        latent.low_dim_gauss_mix,
        regressions.blr,
        regressions.earn_height,
        regressions.kidscore_interaction,
        regressions.kidscore_interaction_c,
        regressions.kidscore_interaction_c2,
        regressions.kidscore_mom_work,
        regressions.kidscore_momhs,
        regressions.kidscore_momiq,
        regressions.log10earn_height,
        regressions.logearn_height,
        regressions.logearn_height_male,
        regressions.logearn_interaction,
        regressions.logearn_logheight_male,
        regressions.logmesquite,
        regressions.logmesquite_logvas,
        regressions.logmesquite_logvolume,
        regressions.mesquite,
        regressions.nes,
        time_series.arK,
        time_series.arma11,
        time_series.hmm_drive_0,
    )
}

NAMES = (  # data and model, as posteriordb has them
    "arK-arK",
    "arma-arma11",
    "bball_drive_event_0-hmm_drive_0",
    "earnings-earn_height",
    "earnings-log10earn_height",
    "earnings-logearn_height",
    "earnings-logearn_height_male",
    "earnings-logearn_interaction",
    "earnings-logearn_logheight_male",
    "eight_schools-eight_schools_noncentered",
    "hudson_lynx_hare-lotka_volterra",
    "kidiq-kidscore_interaction",
    "kidiq-kidscore_momhs",
    "kidiq-kidscore_momiq",
    "kidiq_with_mom_work-kidscore_interaction_c",
    "kidiq_with_mom_work-kidscore_interaction_c2",
    "kidiq_with_mom_work-kidscore_mom_work",
    "low_dim_gauss_mix-low_dim_gauss_mix",
    "mesquite-logmesquite",
    "mesquite-logmesquite_logvas",
    "mesquite-logmesquite_logvolume",
    "mesquite-mesquite",
    "nes1972-nes",
    "nes1976-nes",
    "nes1980-nes",
    "nes1984-nes",
    "one_comp_mm_elim_abs-one_comp_mm_elim_abs",
    "sblri-blr",
)


@dataclass(frozen=True, eq=False)
class Posterior:
    """A model on its data, and what a long run of Hamiltonian Monte Carlo found."""

    name: str
    model: Model
    data: Values
    draws: Values  # every fifth of 10 chains, one chain after the other, each (2000, *shape)
    mean: Values  # of all 10,000
    sd: Values

    @property
    def dim(self) -> int:
        return self.model.dim

    @property
    def unconstrained_draws(self) -> Tensor:
        """(2000, D)."""
        return self.model.unconstrain(self.draws)

    def log_joint(self, theta: Tensor) -> Tensor:
        """Unconstrained θ (..., D) -> (...), the log Jacobian included."""
        return self.model.log_joint(theta)

    def constrain(self, theta: Tensor) -> Values:
        """θ (..., D) to the published quantities."""
        return self.model.constrain(theta)

    def unconstrain(self, values: Values) -> Tensor:
        """The inverse of `constrain`."""
        return self.model.unconstrain(values)


@functools.cache
def load(name: str) -> Posterior:
    """The posterior of that name, one of NAMES."""
    data_name, model_name = name.rsplit("-", 1)
    data = {key: torch.tensor(x, dtype=torch.float64) for key, x in _read("data")[data_name].items()}
    summary = _read("reference_summary")[name]
    with np.load(folder() / "reference_draws_thinned.npz") as archive:
        draws = by_name(summary["names"], archive[name])
    mean, sd = (by_name(summary["names"], np.array(summary[key])) for key in ("mean", "sd"))
    return Posterior(name, MODELS[model_name](data), data, draws, mean, sd)


def names_with_draws() -> set[str]:
    """The posteriors there are reference draws for."""
    return set(_read("reference_summary"))


def by_name(columns: list[str], values: np.ndarray) -> Values:
    """Values (..., 3) of the columns a, b[1], b[2] to a (...) and b (..., 2)."""
    scalars: dict[str, Tensor] = {}
    vectors: dict[str, list[Tensor]] = {}
    for column, value in zip(columns, torch.tensor(values, dtype=torch.float64).unbind(-1), strict=True):
        name, bracket, _ = column.partition("[")
        if bracket:
            vectors.setdefault(name, []).append(value)
        else:
            scalars[name] = value
    return scalars | {name: torch.stack(entries, -1) for name, entries in vectors.items()}


def folder() -> Path:
    """Where the files are."""
    path = Path(os.environ.get("TORCHNGVI_DATA") or ".") / "posteriordb"
    if not path.is_dir():
        raise FileNotFoundError("set TORCHNGVI_DATA to a folder with posteriordb/data.json.gz and the reference draws")
    return path


@functools.cache
def _read(name: str) -> Any:
    with gzip.open(folder() / f"{name}.json.gz", "rt") as file:
        return json.load(file)
