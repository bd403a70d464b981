"""Predictions and marginal effects from joint draws: of groups that the fit had, of others, averaged over groups."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchngvi.arguments import read_choice, read_list, read_size
from torchngvi.diagnostics.importance import USELESS, smoothed
from torchngvi.diagnostics.predictive import LeftOut
from torchngvi.errors import InputError
from torchngvi.messages import hint, listed
from torchngvi.numerics.special import normal_rule
from torchngvi.solved.leave_one_out import CLOSE
from torchngvi.tables.families import Family
from torchngvi.tables.parts import Coordinates, Design, Factor, covariance_root, draw_normal
from torchngvi.tables.table import ByFactor, Marginals, ends_of, printed, probability

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
    """Draws of the linear predictors of some rows, and of what is predicted by them."""

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


# ------------------------------------------------------------------------------------ marginal effects and contrasts


TableResult = Any  # of torchngvi.tables.result, which imports this module

STEP = 1e-5  # sds of a column to both sides: about the cube root of the rounding, best for central differences
ROUNDED = 2.0**-40  # the part of a number, thousands of times its rounding, that no step is smaller than
FEW = 2  # values that a contrast is between, and different numbers of a column whose values are all compared
PRINTED = 50  # lines of a table that are printed

Cell = tuple[tuple[str, Any], ...]  # columns with their values, of one line of an answer


@dataclass(frozen=True, repr=False)
class EffectTable:
    """Answers with intervals, a line for each; ``str`` prints it.

    Attributes:
        head: what they are, one line.
        labels: for each answer what it is of, column by column.
        draws: equally likely draws of the answers, (S, K).
        interval: the probability of the intervals.

    >>> print(EffectTable("averages", ({"sex": "f"},), torch.tensor([[1.0], [3.0]]), 0.5))
    averages
                                      mean         sd       25 %       75 %
      sex=f                              2          1          1          3
    """

    head: str
    labels: tuple[dict[str, Any], ...]
    draws: Tensor  # (S, K)
    interval: float

    @property
    def marginals(self) -> Marginals:
        """The means, sds and equal-tailed intervals of the answers, with their names."""
        names = [", ".join(f"{key}={_text(value)}" for key, value in cell.items()) or "average" for cell in self.labels]
        return Marginals.of(names, self.draws, None, self.interval)

    @property
    def mean(self) -> Tensor:
        """Posterior means, (K,)."""
        return self.draws.mean(0)

    @property
    def table(self) -> Any:
        """A `pandas.DataFrame` with the columns of the labels, and ``mean``, ``sd``, ``low`` and ``high``."""
        import pandas

        of = self.marginals
        numbers = zip(("mean", "sd", "low", "high"), of[1:], strict=True)
        return pandas.DataFrame(list(self.labels)).assign(**{name: x.cpu().numpy() for name, x in numbers})

    def __str__(self) -> str:
        of, count = self.marginals, len(self.labels)
        some = Marginals(of.names[:PRINTED], *(part[:PRINTED] for part in of[1:]))
        foot = f".. {count} lines in all: see .table" if count > PRINTED else ""
        return printed({"": some}, self.interval, self.head, foot)

    __repr__ = __str__


class Asked:
    """What is asked of a fit: over which rows, of which groups, and what of the outcome, see `TableResult`."""

    def __init__(
        self,
        result: TableResult,
        at: Mapping[str, Any] | None,
        by: str | Sequence[str],
        new: Any,
        kind: str,
        population: bool | str,
        interval: float,
        seed: int,
    ) -> None:
        if check_kind(kind, result.family) == "response":
            raise InputError("averages and effects are of kind='mean' or 'linear'; for new outcomes use predict.")
        self.result, self.kind, self.population = result, kind, check_population(population)
        self.interval, self.seed, self.fit = probability(interval), seed, table_of(result)
        self.frame, like = self.fit if new is None else new, result.design.X
        if not len(self.frame):
            raise InputError("an average is of at least one row; the table has none.")
        self.at, self.by = lists_of(at or {}), [by] if isinstance(by, str) else list(by)
        for name in (*self.at, *self.by):
            check_column(name, self.frame if name in self.by else self.fit)
        predictors = result.formula.columns.predictors
        self.at |= check_levels(result, {name: some for name, some in self.at.items() if name in predictors})
        weights = like.new_ones(len(self.frame)) if new is not None else result.design.weights
        self.parts: list[Cell] = [()]
        share = weights[:, None]
        if self.by:
            groups = self.frame.groupby(self.by, observed=True, dropna=False)
            self.parts = [tuple(zip(self.by, key, strict=True)) for key, _ in groups]
            number = torch.as_tensor(groups.ngroup().to_numpy().copy(), device=like.device)
            share = torch.nn.functional.one_hot(number).to(like) * share
        there = share.sum(0) > 0  # of a part all of whose rows have weight 0 there is no average
        self.parts = [part for part, kept in zip(self.parts, there.tolist(), strict=True) if kept]
        self.share = share[:, there] / share.sum(0)[there]  # of each row in each part, (N, G)

    # ------------------------------------------------------------------------ what is asked

    def marginal_effects(self, x: str) -> EffectTable:
        """Derivatives of averages, or differences from the first level."""
        levels = self._levels(x)
        if levels is not None:
            return self._pairs(x, [(levels[0], level) for level in levels[1:]], "average effects")
        columns = self.result.formula.columns
        if x in columns.groups and not self.population:
            raise InputError(
                f"{x} is a column of numbers and of groups: moved by a step, all rows would be of new groups. Take "
                f"population='typical', or contrasts({x!r}, values=[..])."
            )
        h = STEP * float(self.fit[x].astype(float).std(ddof=0)) or STEP
        found = self._averages(partial(self._slopes, x=x, h=h))
        return self._table(f"average effects of {x} on {self._what()}, per unit", *found)

    def contrasts(self, x: str, values: Sequence[Any] | None, scale: str) -> EffectTable:
        """Differences, or ratios, of the averages at all pairs of levels."""
        read_choice("scale", scale, ("mean", "linear", "ratio"))
        known = self._levels(x)
        if values is not None:
            levels: list[Any] = read_list("values", values, "is a list of levels or numbers")
        elif (found := levels_of(self.result, x, FEW)) is not None:
            levels = found
        else:
            raise InputError(f"{x} is a column of numbers: say which are compared, such as values=[0, 1].")
        if len(levels) < FEW:
            raise InputError(f"contrasts are between at least two values of {x}; got {len(levels)}.")
        if known is not None:
            levels = [matched(x, level, known) for level in levels]
        twice = [level for k, level in enumerate(levels) if level in levels[:k]]
        if twice:
            raise InputError(f"contrasts are between different values of {x}; got {twice[0]!r} twice. Give it once.")
        return self._pairs(x, list(itertools.combinations(levels, 2)), "contrasts", scale == "ratio")

    def predictions(self) -> EffectTable:
        """Predictions of rows, or averages."""
        if self.at or self.by:
            return self._table(f"average of {self._what()} over rows", *self._each(lambda frame: frame))
        columns = [name for name in self.fit.columns if name in self.frame.columns]
        rows = self.frame[columns].itertuples(index=False, name=None)
        cells = [tuple(zip(columns, row, strict=True)) for row in rows]
        return self._table(f"{self._what()} of each row", cells, self._predictor(self.frame).all(self.kind))

    # ------------------------------------------------------------------------ averages

    def _pairs(self, x: str, pairs: list[tuple[Any, Any]], what: str, ratio: bool = False) -> EffectTable:
        """Compare averages at pairs of levels of a column, the second less, or over, the first."""
        for name, columns in (("at", self.at), ("by", self.by)):
            if x in columns:
                raise InputError(
                    f"{x} is given its values in all rows, to compare them; got it in {name} too. Leave it out there, "
                    "and name the values in contrasts(.., values=[..])."
                )
        cells, draws, how = list[Cell](), list[Tensor](), "ratios" if ratio else "differences"
        levels = dict.fromkeys(itertools.chain.from_iterable(pairs))
        found = {level: self._each(partial(_set, name=x, value=level)) for level in levels}
        for first, second in pairs:
            (labels, one), (_, two) = found[first], found[second]
            cells += [((x, f"{_text(second)} {'/' if ratio else '-'} {_text(first)}"), *cell) for cell in labels]
            draws.append(two / one if ratio else two - one)
        return self._table(f"{what} of {x}: {how} of the average of {self._what()}", cells, torch.cat(draws, 1))

    def _each(self, changed: Callable[[Any], Any]) -> tuple[list[Cell], Tensor]:
        """For each combination of values of `at` the averages over the parts of the table, then changed."""
        return self._averages(lambda frame: self._drawn(self._predictor(changed(frame))))

    def _averages(self, of: Callable[[Any], Iterator[tuple[slice, Tensor]]]) -> tuple[list[Cell], Tensor]:
        """For each combination of values of `at` the averages of draws of rows, which come part by part."""
        cells, draws = list[Cell](), list[Tensor]()
        for values in itertools.product(*self.at.values()):
            frame, here = self.frame, tuple(zip(self.at, values, strict=True))
            for name, value in here:
                frame = _set(frame, name, value)
            terms = (torch.einsum("sn...,ng->sg...", part, self.share[rows]) for rows, part in of(frame))
            draws.append(sum(terms, torch.zeros((), device="cpu")))
            cells += [(*here, *cell) for cell in self.parts]
        return cells, torch.cat(draws, 1)

    def _drawn(self, predictor: Predictor) -> Iterator[tuple[slice, Tensor]]:
        """Slices of rows, and draws of what is predicted for them."""
        return ((rows, predictor.of_kind(self.kind, rows)) for rows in predictor.parts())

    def _slopes(self, frame: Any, x: str, h: float) -> Iterator[tuple[slice, Tensor]]:
        """Slices of rows, and draws of the derivatives by a column of what is predicted for them."""
        (upper, up), (lower, down) = self._sides(frame, x, h)
        width = upper - lower
        for (rows, high), (_, low) in zip(self._drawn(up), self._drawn(down), strict=True):
            change = high - low
            yield rows, change / width[rows].view(-1, *[1] * (change.ndim - 2))

    def _sides(self, frame: Any, x: str, h: float, jump: float = 0.1) -> list[tuple[Tensor, Predictor]]:
        """The numbers of a column a step up and down with what they predict; where one cannot be, those of no step."""
        # jump: of the range of a column of the design: one that changes by more over a step has no derivative there
        here = frame[x].to_numpy(dtype=float, copy=True)
        step, sides, failed = (abs(here) * ROUNDED).clip(min=h), list[tuple[Tensor, Predictor]](), list[InputError]()
        for to in (here + step, here - step):
            there = torch.as_tensor(to, device="cpu").to(self.share)
            try:
                sides.append((there, self._predictor(frame.assign(**{x: to}))))
            except InputError as error:
                failed.append(error)
                sides.append((torch.as_tensor(here, device="cpu").to(self.share), self._predictor(frame)))
        if len(failed) == len(sides):
            raise InputError(
                f"the derivative by {x} cannot be computed, though its rows can be predicted: with a step of {h:.2g} "
                f"up or down they cannot ({failed[0]}). Take contrasts({x!r}, values=[..])."
            )
        fit, (up, down) = self.result.design, (side.rows.X for _, side in sides)
        steps = ((sides[0][0] - sides[1][0]) / h).clamp(min=1.0).to(up)  # many where the step of the fit is no step
        most = jump * (fit.X.amax(0) - fit.X.amin(0)).to(up) * steps[:, None]
        jumps = ((up - down).abs() > most).nonzero()
        if len(jumps):
            row, column = jumps[0].tolist()
            raise InputError(
                f"the column {fit.names[column]} of the design jumps at {x} = {here[row]:.6g}, and has no derivative "
                f"there. Take contrasts({x!r}, values=[..])."
            )
        return sides

    @torch.no_grad()
    def _predictor(self, frame: Any) -> Predictor:
        return self.result.predictor(self.result.formula.of(frame), self.population, self.seed)

    # ------------------------------------------------------------------------ columns and words

    def _levels(self, x: str) -> list[Any] | None:
        """The levels of a column of categories; None of numbers."""
        check_column(x, self.fit)
        check_column(x, self.frame)
        columns = self.result.formula.columns
        known = list(dict.fromkeys((*columns.predictors, *columns.groups)))
        if x not in known:
            what = "the outcome" if x in columns.response else "no part of the formula"
            raise InputError(f"{x} is {what}; effects are of columns that predict it: {', '.join(known) or 'none'}.")
        return levels_of(self.result, x)

    def _what(self) -> str:
        """What of the outcome is averaged."""
        letter = "E" if self.result.family.outcomes is None else "P"
        what = "the linear predictor" if self.kind == "linear" else f"{letter}[{self.result.response}]"
        whose = {"": "", "typical": ", effects of groups 0", "average": ", over new groups"}
        return what + (whose[self.population] if self.result.design.factors else "")

    def _table(self, head: str, cells: Sequence[Cell], draws: Tensor) -> EffectTable:
        """The answers as a table; of categories of the outcome a line each."""
        labels = [dict(cell) for cell in cells]
        if draws.ndim > 2:
            names = self.result.outcomes[-draws.shape[-1] :]  # of linear predictors without the reference
            labels = [{**label, "outcome": name} for label in labels for name in names]
        return EffectTable(head, tuple(labels), draws.flatten(1), self.interval)


def table_of(result: TableResult) -> Any:
    """The table of a fit; of a model of arrays there is none."""
    if result.formula is None:
        raise InputError(
            "effects of columns need a model made by a formula of a table, as regression('y ~ x', table); this one was "
            "made of arrays: compare predictions, predict(X).draws."
        )
    return result.formula.table


def check_column(name: str, table: Any) -> None:
    """Check that a table has a column."""
    if name not in table.columns:
        known = list(map(str, table.columns))
        raise InputError(f"the columns are {listed(known)}; got {name!r}.{hint(name, known)}")


def check_levels(result: TableResult, values: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Values of columns, those of categories as the levels of the fit, after a check that it has them."""
    found = {name: list(some) for name, some in values.items()}
    for name, some in found.items():
        known = None if name not in table_of(result).columns else levels_of(result, name)
        if known is not None:
            found[name] = [matched(name, value, known) for value in some]
    return found


def matched(name: str, value: Any, known: Sequence[Any]) -> Any:
    """The level that a value is, or that is written as it is."""
    if value in known:
        return value
    texts = list(map(str, known))
    if str(value) not in texts:
        raise InputError(f"{name} has the levels {listed(texts)}; got {value!r}.{hint(str(value), texts)}")
    return known[texts.index(str(value))]


def lists_of(values: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Values of columns, each as a list, a tensor, an array or one value."""
    plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in values.items()}
    return {
        name: list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        for name, value in plain.items()
    }


def levels_of(result: TableResult, x: str, few: int = 0) -> list[Any] | None:
    """The levels of a column of categories, of groups, or of numbers with few values, in order; None of others."""
    import pandas

    column = table_of(result)[x]
    if isinstance(column.dtype, pandas.CategoricalDtype):
        there = set(column)
        return [level for level in column.cat.categories if level in there]
    coded = bool(re.search(rf"\b(C|S|T|binary|B)\(\s*`?{re.escape(x)}`?\s*[,)]", str(result.formula.formula)))
    columns = result.formula.columns
    coded = coded or (x in columns.groups and x not in columns.predictors)
    numeric = pandas.api.types.is_numeric_dtype(column) and not pandas.api.types.is_bool_dtype(column)
    found = sorted(column.unique().tolist())
    return found if coded or not numeric or len(found) <= few else None


def along(result: TableResult, x: str, points: int) -> list[Any]:
    """Values along a column: its levels, or numbers over its range."""
    check_column(x, table_of(result))
    levels = levels_of(result, x)
    if levels is not None:
        return levels
    column = table_of(result)[x].astype(float)
    count = read_size("points", points, at_least=2)
    return torch.linspace(column.min(), column.max(), count, dtype=torch.float64, device="cpu").tolist()


def grid(result: TableResult, values: Mapping[str, Any]) -> tuple[Any, bool]:
    """A table of all combinations of values, others at their means or commonest levels; whether groups are named."""
    import pandas

    table = table_of(result)
    for name in values:
        check_column(name, table)
    given, columns = lists_of(values), result.formula.columns
    given |= check_levels(result, {name: some for name, some in given.items() if name in columns.predictors})
    frame = pandas.DataFrame(itertools.product(*given.values()), columns=list(given))
    for name in given:
        if isinstance(table[name].dtype, pandas.CategoricalDtype):
            frame[name] = frame[name].astype(table[name].dtype)
    for name in set(columns.predictors) - set(given):
        of = table[name]
        typical = of.mode().iloc[0] if levels_of(result, name) is not None else of.astype(float).mean()
        frame = _set(frame, name, typical, of.dtype)
    return frame, any(name in given for name in columns.groups)


def _set(frame: Any, name: str, value: Any, dtype: Any = None) -> Any:
    """The table with one value in all rows of a column; the categories of the column are kept."""
    import pandas

    dtype = frame[name].dtype if dtype is None else dtype
    kept = isinstance(dtype, pandas.CategoricalDtype)
    column = pandas.Series([value] * len(frame), index=frame.index, dtype=dtype if kept else None)
    return frame.assign(**{name: column})


def _text(value: Any) -> str:
    """A value in the name of an answer."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# ------------------------------------------------------------------------------------ rows and groups left out


ERRORS = 2.0  # standard errors of the difference within which they do
FEW_ROWS = 100  # rows or groups below which standard errors are too small (the same)


@dataclass(frozen=True, repr=False)
class PartsLeftOut(LeftOut):
    """What the posterior says of each part of the data, a row or a group, that it has not seen.

    Attributes:
        density: log p(y_i | the others), (N,), in nats; of rows as they are, without their weights.
        in_sample: the same given all.
        resolved: for which parts the model was fitted without them.
        evaluations: of those fits.
        k_hat: of the importance weights that take each part out, (N,).
        names: of the parts.
    """

    k_hat: Tensor  # (N,)
    names: tuple[str, ...]

    @property
    def untrusted(self) -> tuple[str, ...]:
        """The parts whose densities are not to be trusted: their k-hat is above 0.7, and no fit was without them."""
        bad = ~(self.k_hat <= USELESS) & ~self.resolved
        return tuple(self.names[k] for k in bad.nonzero()[:, 0].tolist())

    def __str__(self) -> str:
        if not self.untrusted:
            return super().__str__()
        return f"{super().__str__()} Not to be trusted, k-hat above {USELESS}: {self.parts} {listed(self.untrusted)}."


class RowsLeftOut(PartsLeftOut):
    """What the posterior says of each row that it has not seen."""

    parts = "rows"


class GroupsLeftOut(PartsLeftOut):
    """What the posterior says of each group that it has not seen, its random effects integrated out."""

    parts = "groups"

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups."""
        return self.names


@torch.no_grad()
def leave_one_out(result: TableResult, worst: float, count: int | None, seed: int) -> RowsLeftOut:
    """Compute log p(y_i | the others) of every row, see `TableResult.leave_one_out`."""
    rows, (theta, weights, *_) = result.design, result.fitted.weighted
    if rows.factors:  # equally likely draws, each with effects of its own
        draws, log_weights = result.draws(count, seed), torch.zeros((), device="cpu")
    else:
        theta, log_weights = theta[weights > 0], weights[weights > 0].log()[:, None]
        draws = result.drawn(theta, torch.Generator())
    predictor, found = result.predictor(rows, "", seed, draws), []
    for at in predictor.parts():
        log_p = _log_p(predictor, at)
        found.append(_divided(log_weights - rows.weights[at] * log_p, log_weights + 0 * log_p, log_p))
    density, inside, k_hat = (torch.cat(parts) for parts in zip(*found, strict=True))

    def again(row: int, without: TableResult) -> Tensor:
        log_p = _log_p(without.predictor(rows, "", seed), slice(row, row + 1))
        return log_p.logsumexp(0)[0] - math.log(len(log_p))

    names = tuple(map(str, range(len(rows.X))))
    member = torch.arange(len(rows.X), device=rows.weights.device)
    return RowsLeftOut(*_resolved(result, density, inside, k_hat, worst, member, names, again))


@torch.no_grad()
def leave_one_group_out(result: TableResult, worst: float, groups: Factor | None = None) -> GroupsLeftOut:
    """Compute log p(y_i | the others) of every group, see `TableResult.leave_one_group_out`."""
    own = result.design.factors
    factors = (groups,) if groups is not None and not own else own
    if len(factors) != 1:
        said = f"has {len(factors)}, {', '.join(of.name for of in factors)}" if factors else "has none"
        raise InputError(f"leave_one_group_out is for models of one grouping factor; this one {said}.")
    theta, weights, *_ = result.fitted.weighted
    member, count = factors[0].groups, len(factors[0].levels)

    def of_groups(theta: Tensor) -> Tensor:
        found = result.fitted.of_groups(theta)  # without a factor of its own of each row
        return found if own else found.new_zeros(len(theta), count).index_add(1, member, found)

    log_weights, log_p = weights[weights > 0].log()[:, None], of_groups(theta[weights > 0])
    size = max(1, AT_ONCE // len(log_p))
    found = (_divided(log_weights - part, log_weights + 0 * part, part) for part in log_p.split(size, 1))
    density, inside, k_hat = (torch.cat(parts) for parts in zip(*found, strict=True))

    def again(group: int, without: TableResult) -> Tensor:
        theta, weights, *_ = without.fitted.weighted
        there = weights > 0  # where a draw has no weight, its density may be no number
        return (weights[there].log() + of_groups(theta[there])[:, group]).logsumexp(0)

    return GroupsLeftOut(*_resolved(result, density, inside, k_hat, worst, member, factors[0].levels, again))


def _log_p(predictor: Predictor, at: slice) -> Tensor:
    """Draws of log p(y_n | η_n, φ) of some rows, (S, m)."""
    y, phi = tuple(part[at] for part in predictor.rows.y), predictor.draws.phi[:, None]
    return predictor.family.log_prob(predictor.linear(at)[0], y, phi)


def _resolved(
    result: TableResult,
    density: Tensor,  # (n,)
    inside: Tensor,  # (n,)
    k_hat: Tensor,  # (n,)
    worst: float,
    member: Tensor,  # which part each row is in, (N,)
    names: Sequence[str],
    again: Callable[[int, TableResult], Tensor],
) -> tuple[Tensor, Tensor, Tensor, int, Tensor, tuple[str, ...]]:
    """The fields of `PartsLeftOut` for parts of positive weight, bad ones by fits without them if there are such."""
    weights = result.design.weights
    here = weights.new_zeros(len(names)).index_add(0, member, weights) > 0
    bad = here & (~(k_hat <= worst) | (worst == 0))
    resolved, gradients = torch.zeros_like(bad), 0
    for part in bad.nonzero()[:, 0].tolist() if result.refit is not None else ():
        fitted = result.refit(torch.where(member == part, 0.0, weights))
        density[part] = again(part, replace(result, fitted=fitted, _kept={}))
        resolved[part] = fitted.converged
        gradients += fitted.gradients
    named = tuple(names[k] for k in here.nonzero()[:, 0].tolist())
    return density[here], inside[here], resolved[here], gradients, k_hat[here], named


def _divided(
    log_ratios: Tensor,  # of draws of the posterior without a part, (S, n)
    log_weights: Tensor,  # of the posterior, (S, n)
    log_p: Tensor,  # (S, n)
) -> tuple[Tensor, Tensor, Tensor]:
    """The log densities of parts by weights that take each of them out, those in sample, and k-hat, (n,)."""
    new = smoothed(log_ratios)
    inside = (log_weights + log_p).logsumexp(0) - log_weights.logsumexp(0)
    return (new.log_weights + log_p).logsumexp(0), inside, new.k_hat


class Compared(NamedTuple):
    """Two models of the same rows, compared by how they predict parts that were left out; ``str`` says it.

    Attributes:
        names: of the two.
        difference: of the elpd, the first less the second, in nats.
        standard_error: of that difference over parts like these, √(N var of the differences).
        alike: whether they predict alike as far as is seen, a difference within two standard errors and four nats.
        left_out: what was found for each.

    >>> zero = torch.zeros(2)
    >>> one = RowsLeftOut(zero, zero, zero.bool(), 0, zero, ("0", "1"))
    >>> print(Compared(("a", "b"), -9.0, 2.0, False, (one, one)))
    b predicts left-out rows better than a: 9.0 ± 2.0 nats of elpd; with 2 rows this standard error is too small.
    """

    names: tuple[str, str]
    difference: float
    standard_error: float
    alike: bool
    left_out: tuple[LeftOut, LeftOut]

    @property
    def table(self) -> dict[str, tuple[float, float, float]]:
        """For each model its elpd, its standard error and the effective number of parameters p_loo."""
        pairs = zip(self.names, self.left_out, strict=True)
        return {name: (of.total, of.standard_error, of.complexity) for name, of in pairs}

    def __str__(self) -> str:
        first, second = self.names if self.difference >= 0 else self.names[::-1]
        what, rows = self.left_out[0].parts, len(self.left_out[0].density)
        apart = f"{abs(self.difference):.1f} ± {self.standard_error:.1f} nats of elpd"
        if self.alike:
            said = f"{first} and {second} predict left-out {what} alike, as far as these {what} can tell: {apart} apart"
        elif abs(self.difference) > ERRORS * self.standard_error:
            said = f"{first} predicts left-out {what} better than {second}: {apart}"
        else:
            said = f"{first} is ahead of {second} by {apart}, less than {ERRORS:g} standard errors: not decided"
        if rows < FEW_ROWS:
            said += f"; with {rows} {what} this standard error is too small"
        bad = sum(len(getattr(of, "untrusted", ())) for of in self.left_out)
        return f"{said}; {bad} of the densities cannot be trusted (k-hat above {USELESS})." if bad else f"{said}."

    def __repr__(self) -> str:
        return str(self)


def compare(
    first: TableResult, second: TableResult, names: tuple[str, str] = ("the first", "the second"), groups: bool = False
) -> Compared:
    """Compare two models of the same rows by how they predict rows, or whole groups, that were left out.

    Use it to choose columns, priors, a family or random effects.  The difference of elpd = Σ_i log p(y_i | the others)
    is of the same rows under both, so that its standard error is much smaller than those of either.

    Args:
        first: a fit.
        second: another of the same outcomes with the same weights.
        names: what they are called in the sentence that is printed.
        groups: whether whole groups are left out, `TableResult.leave_one_group_out`, and not rows; of a regression
            those of the mixed model that it is compared with.

    Returns:
        The difference with its standard error, and whether the two predict alike; ``str`` is one sentence.

    Raises:
        InputError: other outcomes or weights, other groups, densities and probabilities, or one that is not finite.

    >>> from torchngvi.tables.model import MixedModel
    >>> line = torch.arange(8.0, dtype=torch.float64)
    >>> X, y = torch.stack([torch.ones_like(line), line], 1), line + torch.tensor([0.1, -0.2, 0.3, 0.0] * 2)
    >>> fits = [MixedModel(X[:, :k], y, family="gaussian").fit(progress=False) for k in (1, 2)]
    >>> compare(*fits, ("a constant", "a line")).alike
    False
    """
    one, two = first.design, second.design
    for what, mine, theirs in (("outcome", one.y[0], two.y[0]), ("weights", one.weights, two.weights)):
        if mine.shape != theirs.shape or not torch.equal(mine, theirs):
            raise InputError(
                f"compare is of two models of the same rows in the same order; the {what} of {names[0]}, "
                f"{tuple(mine.shape)}, and of {names[1]}, {tuple(theirs.shape)}, differ. Rows that a command-line "
                "run held out are not among its own: --test-fraction 0 holds out none."
            )
    if first.family.discrete != second.family.discrete:
        raise InputError(
            f"a density of real numbers ({(second if first.family.discrete else first).family.name}) and a probability "
            "of counts or classes have logarithms that cannot be compared. Fit both with families of one kind."
        )
    numbers = [[of.groups.tolist() for of in rows.factors] for rows in (one, two)]
    if groups and all(numbers) and numbers[0] != numbers[1]:
        raise InputError("compare leaves out the same groups of both models; their grouping factors differ.")
    by = next(iter((*one.factors, *two.factors)), None)
    found = tuple(of.leave_one_group_out(groups=by) if groups else of.leave_one_out() for of in (first, second))
    apart = found[0].density - found[1].density
    if not bool(apart.isfinite().all()):
        bad = found[0].names[int((~apart.isfinite()).nonzero()[0, 0])]
        raise InputError(
            f"compare is of finite log densities; that of {found[0].parts.removesuffix('s')} {bad} is not."
        )
    difference, error = float(apart.sum()), math.sqrt(len(apart) * float(apart.var())) if len(apart) > 1 else math.nan
    alike = abs(difference) <= ERRORS * error and abs(difference) <= CLOSE
    return Compared(names, difference, error, alike, (found[0], found[1]))
