"""Small models of at most one factor, of simulated rows and of the sets that are there."""

import csv
import gzip
import os
from pathlib import Path

import pytest
import torch

from torchngvi.tables.families import NegativeBinomial, family_of
from torchngvi.tables.parts import Coordinates, Design, Factor
from torchngvi.tables.priors import settle


def model(X, y, groups=None, Z=None, family="gaussian", *, n=None, weights=None, offset=None, priors=None):
    """The arguments of an engine: design, family, coordinates, priors."""
    X = X.double()
    one = torch.ones(len(X), dtype=torch.float64)
    names = ("Intercept", *(f"x{k}" for k in range(1, X.shape[1])))
    factors = ()
    if groups is not None:
        Z = one[:, None] if Z is None else Z.double()
        n = int(groups.max()) + 1 if n is None else n
        factors = (Factor("g", ("Intercept", "x1", "x2")[: Z.shape[1]], tuple(map(str, range(n))), Z, groups),)
    family = NegativeBinomial() if family == "negative_binomial" else family_of(family)
    design = Design(
        X, names, factors, 0 * one if offset is None else offset, (y.double(),), one if weights is None else weights
    )
    y = family.checked(design.y)
    family = family.settled(y, design.weights, design.offset)
    design = design._replace(y=y)
    coordinates = Coordinates(design, len(family.parameters), thresholds=not family.intercept)
    return design, family, coordinates, settle(design, family, coordinates, priors)


def simulated(family, n, m, sd=1.0, seed=0, r=1, slope=0.5):
    """n groups of m rows with the linear predictor .5 + slope x + z'b."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n * m, generator=g, dtype=torch.float64)
    groups = torch.arange(n).repeat_interleave(m)
    X = torch.stack([torch.ones_like(x), x], 1)
    b = sd * torch.randn(n, r, generator=g, dtype=torch.float64)
    eta = 0.5 + slope * x + (X[:, :r] * b[groups]).sum(1)
    phi = {"gaussian": [0.0], "negative_binomial": [0.7]}.get(family, [])
    kind = NegativeBinomial() if family == "negative_binomial" else family_of(family)
    y = kind.draw(eta, torch.tensor(phi, dtype=torch.float64), g)
    return model(X, y, groups, X[:, :r], family)


def stored(name):
    """The rows of a set of the folder with data, or a skip."""
    path = Path(os.environ.get("TORCHNGVI_DATA", "")) / "glmm" / f"{name}.csv.gz"
    if "TORCHNGVI_DATA" not in os.environ or not path.is_file():
        pytest.skip("needs the mixed data sets: set TORCHNGVI_DATA to a folder with glmm/*.csv.gz")
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))
    return rows, lambda column: torch.tensor([float(row[column]) for row in rows], dtype=torch.float64)


def epilepsy(r=1):
    """Seizures of 59 patients in four periods."""
    rows, column = stored("epil")
    base, treated = (column("base") / 4).log(), torch.tensor([row["trt"] == "progabide" for row in rows]).double()
    age = column("age").log()
    X = torch.stack([torch.ones_like(base), base, treated, base * treated, age - age.mean(), column("V4")], 1)
    Z = torch.stack([X[:, 0], (column("period") - 2.5) / 5], 1)[:, :r]
    return model(X, column("y"), _numbered(rows, "subject"), Z, "poisson")


def toenail():
    """Toenail infections of 294 patients at up to seven visits."""
    rows, column = stored("toenail")
    severe = torch.tensor([row["outcome"] == "moderate or severe" for row in rows])
    treated, time = torch.tensor([row["treatment"] == "terbinafine" for row in rows]).double(), column("time")
    X = torch.stack([torch.ones_like(time), treated, time, treated * time], 1)
    return model(X, severe, _numbered(rows, "patientID"), family="bernoulli")


def _numbered(rows, column):
    levels = {label: place for place, label in enumerate(sorted({row[column] for row in rows}))}
    return torch.tensor([levels[row[column]] for row in rows])
