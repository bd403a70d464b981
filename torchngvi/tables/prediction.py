"""Predictions for rows from joint draws: of groups that the fit had, of others, and averaged over groups."""

import math
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchngvi.arguments import read_choice
from torchngvi.errors import InputError
from torchngvi.numerics.special import normal_rule
from torchngvi.tables.families import Family
from torchngvi.tables.parts import Coordinates, Design, covariance_root, draw_normal
from torchngvi.tables.table import ByFactor, ends_of

KINDS = ("mean", "linear", "response", "probability")
NODES = 31  # of the average over new groups; its relative error was 1e-12 at an sd of 1 of the effects, and 8e-4 at 4
AT_ONCE = 2**22  # numbers of a table of draws and rows, 32 MB


class TableDraws(NamedTuple):
    """Equally likely draws from the posterior of the globals and the random effects.

    Attributes:
        fixed: β, (S, p).
        sd: for each factor the standard deviations of its effects, (S, r).
        correlation: for each factor their correlations, (S, r, r).
        effects: for each factor the effects of its groups, (S, n, r).
        parameters: of the likelihood, as a residual sd or thresholds, in the order of the table, (S, nphi).
        phi: their unconstrained coordinates, (S, nphi).
        theta: the coordinates of all globals, (S, dim), see `torchngvi.tables.parts`.

    Where there is one factor, an index into `sd`, `correlation` or `effects` is one into its tensor.
    """

    fixed: Tensor
    sd: ByFactor[Tensor]
    correlation: ByFactor[Tensor]
    effects: ByFactor[Tensor]
    parameters: Tensor
    phi: Tensor
    theta: Tensor

    @property
    def parameter(self) -> Tensor | None:
        """The one parameter of the likelihood, (S,); None where there are none or several."""
        return self.parameters[:, 0] if self.parameters.shape[-1] == 1 else None


class Prediction(NamedTuple):
    """Predictions for M rows, as `TableResult.predict` makes them.

    Attributes:
        mean: posterior predictive means, (M,); of probabilities of C categories (M, C), as all below.
        sd: standard deviations, (M,).
        low: lower ends of equal-tailed intervals, (M,).
        high: upper ends, (M,).
        draws: what these are of, (S, M).

    >>> Prediction.of(torch.tensor([[0.0], [1.0], [2.0]]), 0.5)
    Prediction(mean=tensor([1.]), sd=tensor([1.]), low=tensor([0.5000]), high=tensor([1.5000]), draws=(3, 1))
    """

    mean: Tensor
    sd: Tensor
    low: Tensor
    high: Tensor
    draws: Tensor

    def __repr__(self) -> str:
        """The summaries; of the draws their shape."""
        parts = ", ".join(f"{name}={getattr(self, name)}" for name in ("mean", "sd", "low", "high"))
        return f"Prediction({parts}, draws={tuple(self.draws.shape)})"

    @classmethod
    def of(
        cls,
        draws: Tensor,  # (S, M, ...)
        interval: float,
        *,
        whole: bool = False,  # of counts: the ends are draws themselves, the wider ones
    ) -> Self:
        """Summarise equally likely draws, with equal-tailed intervals of a probability."""
        ordered, ends = draws.sort(0).values, []
        for share, outwards in zip(ends_of(interval), (math.floor, math.ceil), strict=True):
            place = share * (len(draws) - 1)
            place = outwards(place) if whole else place
            below = int(place)
            ends.append(ordered[below].lerp(ordered[min(below + 1, len(draws) - 1)], place - below))
        return cls(draws.mean(0), draws.std(0), ends[0], ends[1], draws)


def check_population(population: Any) -> str:
    """Read whose effects rows have: their groups', none, or those of new groups on the average."""
    if isinstance(population, bool):
        return "average" if population else ""
    return read_choice(
        "population",
        population,
        ("typical", "average"),
        "is False for the rows' own groups, 'typical' for effects of 0, or 'average' over new groups",
    )


class Predictor:
    """Draws of the linear predictors of some rows, and of what is predicted by them.

    The effects of a group that the fit did not have, a negative number in `Factor.groups`, are drawn from N(0, Σ) once
    for each draw, the same for all rows of that number.  Averaged over new groups, what the effects add to the
    predictor of a row is N(0, s²) with s² = Σ_k z_kᵀΣ_k z_k, so that one rule in one dimension averages over them all.
    """

    def __init__(
        self,
        family: Family,
        coordinates: Coordinates,
        rows: Design,
        draws: TableDraws,
        population: str,  # "" for the groups of the rows, "typical" or "average"
        generator: torch.Generator,  # of new effects, and of responses
    ) -> None:
        self.family, self.rows, self.draws, self.generator = family, rows, draws, generator
        self.coordinates = coordinates
        self.population = population if rows.factors else "typical"
        roots = [
            units.to_user(covariance_root(xi, r), -2)  # of the effects in the units of the user, (S, r, r)
            for xi, r, units in zip(
                coordinates.split(draws.theta)[1], coordinates.sizes, coordinates.within, strict=True
            )
        ]
        self.roots, self.effects, self.index = roots, list[Tensor](), list[Tensor]()
        for factor, root, b in zip(rows.factors, roots, draws.effects.values(), strict=True):
            new = factor.groups < 0
            labels, place = factor.groups[new].unique(return_inverse=True)
            index = factor.groups.clone()
            index[new] = b.shape[1] + place
            z = draw_normal(len(b), len(labels), b.shape[-1], generator=generator, like=b)
            self.effects.append(torch.cat([b, z @ root.mT], 1) if len(labels) else b)
            self.index.append(index)

    def linear(self, at: slice) -> tuple[Tensor, Tensor | None]:
        """The linear predictors of rows, (S, m) or (S, m, C - 1), and the sd s of what new groups add if averaged."""
        rows = self.rows
        eta = self.coordinates.linear(rows.X[at], self.draws.fixed, rows.offset[at]).transpose(0, 1)
        if self.population == "typical":
            return eta, None
        variance = torch.zeros_like(eta)
        for factor, root, b, index in zip(rows.factors, self.roots, self.effects, self.index, strict=True):
            Z = factor.Z[at]
            if self.population:
                variance += (Z @ root).square().sum(-1)
            else:
                for k in range(Z.shape[1]):
                    eta = eta + b[:, :, k][:, index[at]] * Z[:, k]
        return eta, variance.sqrt() if self.population else None

    def of_kind(self, kind: str, at: slice) -> Tensor:
        """Draws of what is predicted for some rows, (S, m), or (S, m, C) of probabilities of categories."""
        eta, s = self.linear(at)
        if kind == "linear":
            return eta
        phi = self.draws.phi[:, None]
        if kind == "response":
            if s is not None:
                eta = eta + s * draw_normal(*eta.shape, generator=self.generator, like=eta)
            generator, many = self.generator, len(self.family.extra)
            if eta.device.type != "cpu":
                seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
                generator = torch.Generator(eta.device).manual_seed(seed)
            known = self.rows.y[-many:] if many and len(self.rows.y) >= many else ()  # as the trials of these rows
            return self.family.draw(eta, phi, generator, tuple(part[at] for part in known)).to(eta)
        if s is None:
            return self.family.mean(eta, phi)
        z, log_weights = normal_rule(NODES, 1, eta)
        total = torch.zeros((), device="cpu")
        for node, weight in zip(z[:, 0], log_weights.exp(), strict=True):
            total = total + weight * self.family.mean(eta + s * node, phi)
        return total

    def all(self, kind: str) -> Tensor:
        """The same of all rows."""
        return torch.cat([self.of_kind(kind, at) for at in self.parts()], 1)

    def parts(self) -> list[slice]:
        """Slices of the rows whose tables of draws are small enough to hold."""
        size = max(1, AT_ONCE // (len(self.draws.theta) * max(1, len(self.coordinates.categories))))
        return [slice(start, start + size) for start in range(0, len(self.rows.X), size)]


def check_kind(kind: str, family: Family) -> str:
    """Read the word for what is predicted."""
    kind = read_choice("kind", kind, KINDS, f"must be one of {', '.join(KINDS)}")
    if kind == "probability" and family.outcomes is None:
        raise InputError(f"kind='probability' is for outcomes that are categories; of {family.name} use kind='mean'.")
    return kind
