"""Results of hand-made draws, so that what is read off a result is tested without a fit."""

import itertools
from types import SimpleNamespace

import pandas
import torch

from torchngvi.tables.families import family_of
from torchngvi.tables.parts import Coordinates, Design, Factor, Posterior, Weighted
from torchngvi.tables.priors import settle
from torchngvi.tables.result import TableResult


class HandMade(Posterior):
    """Draws of the globals that are given, and effects that are functions of them and of noise."""

    log_evidence, converged, reason, method, gradients = -12.5, True, "it was made by hand", "Drawn by hand.", 7

    def __init__(self, coordinates, theta, weights=None, effects=None, groups=None, k_hat=0.1):
        weights = theta.new_full((len(theta),), 1 / len(theta)) if weights is None else weights
        self.coordinates, self.drawn, self.groups = coordinates, effects, groups
        self.weighted = Weighted(theta, weights, k_hat, 1 / float(weights.square().sum()))

    def effects(self, theta, generator):
        return self.drawn(theta, generator)

    def of_groups(self, theta):
        return self.groups(theta)


def normal_effects(sizes):
    """Effects of each factor as standard normal noise, (S, n, r) of each (n, r)."""

    def draw(theta, generator):
        return tuple(torch.randn(len(theta), *size, generator=generator, dtype=torch.float64) for size in sizes)

    return draw


def result_of(X, y, family, factors=(), draws=400, seed=0, names=None, weights=None, theta=None, extra=(), **more):
    """A result of some rows, of draws about 0 with sds of 0.3 where none are given."""
    X = torch.as_tensor(X).double()
    ones = torch.ones(len(X)).double()
    names = tuple(names or (f"x{k}" for k in range(X.shape[1])))
    y = (torch.as_tensor(y).double(), *(torch.as_tensor(part).double() for part in extra))
    design = Design(X, names, tuple(factors), 0 * ones, y, ones if weights is None else weights)
    family = family_of(family)
    family = family.settled(family.checked(design.y), design.weights, design.offset)
    coordinates = Coordinates(design, len(family.parameters), thresholds=not family.intercept)
    if theta is None:
        generator = torch.Generator().manual_seed(seed)
        theta = 0.3 * torch.randn(draws, coordinates.dim, generator=generator, dtype=torch.float64)
    sizes = [(len(of.levels), of.Z.shape[1]) for of in factors]
    made = {key: more.pop(key) for key in ("groups", "k_hat", "effects") if key in more}
    posterior = HandMade(
        coordinates, theta, more.pop("draw_weights", None), **{"effects": normal_effects(sizes), **made}
    )
    priors = settle(design, family, coordinates)
    return TableResult(design._replace(y=family.checked(design.y)), family, posterior, priors, **more)


def factor(name, groups, Z=None, effects=("Intercept",)):
    """A grouping factor with its numbers as labels."""
    groups = torch.as_tensor(groups)
    Z = torch.ones(len(groups), 1).double() if Z is None else Z
    return Factor(name, tuple(effects), tuple(f"{name}{k}" for k in range(int(groups.max()) + 1)), Z, groups)


class HandMadeFormula:
    """A formula y ~ x * z + sex + (1 | g): what makes a design of a table, as the fit's own does."""

    formula = "y ~ x * z + sex + (1 | g)"
    success = ""
    response, outcomes = "y", None
    columns = SimpleNamespace(response=("y",), predictors=("x", "z", "sex"), groups=("g",))
    names = ("Intercept", "x", "z", "x:z", "sex[m]")

    def __init__(self, table, grouped=True):
        self.table, self.grouped = table, grouped
        self.levels = sorted(table["g"].unique()) if grouped else []

    def of(self, frame):
        x, z = (torch.tensor(frame[name].to_numpy(dtype=float)) for name in ("x", "z"))
        male = torch.tensor((frame["sex"] == "m").to_numpy(dtype=float))
        ones = torch.ones_like(x)
        X = torch.stack([ones, x, z, x * z, male], 1)
        labels = frame["g"].tolist() if "g" in frame else ["?"] * len(frame)
        new = {label: -1 - k for k, label in enumerate(dict.fromkeys(labels)) if label not in self.levels}
        groups = (
            torch.tensor([new.get(label, 0) or self.levels.index(label) for label in labels]) if self.grouped else None
        )
        factors = (Factor("g", ("Intercept",), tuple(self.levels), ones[:, None], groups),) if self.grouped else ()
        return Design(X, self.names, factors, 0 * ones, (), ones)


def table_result(family="bernoulli", grouped=True, rows=60, **more):
    """A result of a table with two columns of numbers, one of categories, and groups."""
    generator = torch.Generator().manual_seed(3)
    x, z = torch.randn(2, rows, generator=generator, dtype=torch.float64)
    sex = list(itertools.islice(itertools.cycle(["f", "m", "m"]), rows))
    g = [f"w{k % 5}" for k in range(rows)]
    y = (torch.rand(rows, generator=generator) < 0.5).double()
    table = pandas.DataFrame({"y": y.numpy(), "x": x.numpy(), "z": z.numpy(), "sex": sex, "g": g})
    formula = HandMadeFormula(table, grouped)
    design = formula.of(table)
    return result_of(design.X, y, family, design.factors, names=formula.names, formula=formula, **more)
