"""How well rows, or whole groups, are predicted that a fit has not seen, and which of two models predicts them better.

Draws of the posterior p(θ | y), weighted by 1/p(y_i | θ), are draws of the posterior without part i, so that

    log p(y_i | the others) = -log E[1/p(y_i | θ)]

by Pareto-smoothed weights (Vehtari, Gelman and Gabry 2017, Statistics and Computing 27).  The parts are rows, given the
effects of their groups, or whole groups with their effects integrated out (Merkle, Furr and Rabe-Hesketh 2019,
Psychometrika 84).  Where the k-hat of these weights says that they are of no use, the model is fitted without the part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.diagnostics.importance import USELESS, smoothed
from torchngvi.diagnostics.predictive import LeftOut
from torchngvi.errors import InputError
from torchngvi.messages import listed
from torchngvi.solved.leave_one_out import CLOSE
from torchngvi.tables.effects import AT_ONCE, Predictor
from torchngvi.tables.parts import Factor

TableResult = Any  # of torchngvi.tables.result, which imports this module

ERRORS = 2.0  # standard errors of the difference within which they do
FEW = 100  # rows or groups below which standard errors are too small (the same)


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
        if rows < FEW:
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
                f"{tuple(mine.shape)}, and of {names[1]}, {tuple(theirs.shape)}, differ."
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
