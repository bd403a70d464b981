"""The table of a fitted mixed model: fixed effects, standard deviations and correlations, in their own units."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.errors import InputError
from torchngvi.messages import shown
from torchngvi.models import BernoulliLogit, Likelihood, NegativeBinomial, PoissonLog

Of = TypeVar("Of")


class Marginals(NamedTuple):
    """Marginal posteriors of some quantities: their names, means, standard deviations and equal-tailed intervals.

    Attributes:
        names: of the quantities, K of them.
        mean: posterior means, (K,).
        sd: posterior standard deviations, (K,).
        low: lower ends of the intervals, (K,).
        high: upper ends, (K,).

    >>> draws = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]])
    >>> Marginals.of(["x"], draws, torch.full((5,), 0.2), 0.5).high.item()
    3.25
    """

    names: tuple[str, ...]
    mean: Tensor  # (K,)
    sd: Tensor  # (K,)
    low: Tensor  # (K,)
    high: Tensor  # (K,)

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        draws: Tensor,  # (S, K)
        weights: Tensor,  # normalised, (S,)
        interval: float,
    ) -> Self:
        """Summarise weighted draws, with equal-tailed intervals of a probability."""
        mean = weights @ draws
        sd = (weights @ (draws - mean).square()).sqrt()
        ends = [weighted_quantile(draws, weights, share) for share in ends_of(interval)]
        return cls(tuple(names), mean, sd, *ends)


class ByFactor(dict[str, Of]):
    """A dict from the names of grouping factors, which says what they are where one is asked for that there is not.

    >>> ByFactor({"school": 1.0})["school"]
    1.0
    """

    def __missing__(self, name: object) -> Of:
        raise InputError(f"the grouping factors are {', '.join(self)}; got {name!r}.")


def ratio_of(likelihood: Likelihood) -> str:
    """What e to the power of a coefficient is called under a likelihood; an empty text where it is nothing.

    >>> ratio_of(PoissonLog()), ratio_of(BernoulliLogit())
    ('rate ratio', 'odds ratio')
    """
    if isinstance(likelihood, BernoulliLogit):
        return "odds ratio"
    return "rate ratio" if isinstance(likelihood, PoissonLog | NegativeBinomial) else ""


def names_of(what: str, given: Sequence[str] | None, size: int, old: tuple[str, ...]) -> tuple[str, ...]:
    """Names as texts, after a check that there is one for each; the old ones where none are given.

    >>> names_of("fixed", ["a", 2], 2, ("x[0]", "x[1]"))
    ('a', '2')
    """
    if given is None:
        return old
    if len(given) != size:
        raise InputError(f"{what} must be {size} names, one for each; got {len(given)}.")
    return tuple(str(name) for name in given)


def probability(interval: float) -> float:
    """The probability of an interval, after a check that it is one.

    >>> probability(0.95)
    0.95
    """
    return read_number("interval", interval, "is the probability of an interval", above=0, below=1)


def ends_of(interval: float) -> tuple[float, float]:
    """The shares below the two ends of an equal-tailed interval.

    >>> ends_of(0.5)
    (0.25, 0.75)
    """
    return 0.5 * (1 - interval), 0.5 * (1 + interval)


def weighted_quantile(
    draws: Tensor,  # (S, K)
    weights: Tensor,  # normalised, (S,)
    share: float,
) -> Tensor:
    """Quantiles of weighted draws, (K,), linear between the middles of the steps of their distribution function.

    >>> weighted_quantile(torch.tensor([[3.0], [1.0], [2.0]]), torch.tensor([0.2, 0.4, 0.4]), 0.4).item()
    1.5
    """
    ordered, order = draws.mT.contiguous().sort(-1)
    step = weights[order]
    middle = step.cumsum(-1) - 0.5 * step
    wanted = torch.full_like(middle[:, :1], share)
    right = torch.searchsorted(middle, wanted).clamp(1, len(draws) - 1)
    left = right - 1
    (low, x), (high, y) = ((middle.gather(-1, k), ordered.gather(-1, k)) for k in (left, right))
    part = ((wanted - low) / (high - low).clamp_min(torch.finfo(low.dtype).tiny)).clamp(0.0, 1.0)
    return (x + part * (y - x))[:, 0]


@dataclass(frozen=True)
class MixedTable:
    """What `MixedResult.summary` says; ``str`` is the table.

    Attributes:
        fixed: the fixed effects, in the units of the linear predictor over those of the columns of X.
        sd: the standard deviations of the random effects, in the same over those of Z.
        correlation: the correlations of the random effects, each pair once.
        likelihood: the parameter of the likelihood; None where it is not learned.
        interval: the probability of the intervals.
        head: what was fitted, the line above the table.
        foot: how, the lines below it.
        ratio: what e to the power of a fixed effect is called, "odds ratio" or "rate ratio"; empty where it is nothing.

    >>> one = Marginals(("x",), *torch.ones(4, 1))
    >>> print(MixedTable(one, one, one._replace(names=(), mean=one.mean[:0]), None, 0.9, "a model", "a way"))
    a model
                                      mean         sd        5 %       95 %
    fixed effects
      x                                  1          1          1          1
    standard deviations of random effects
      x                                  1          1          1          1
    a way
    """

    fixed: Marginals
    sd: Marginals
    correlation: Marginals
    likelihood: Marginals | None
    interval: float
    head: str
    foot: str
    ratio: str = ""

    def __str__(self) -> str:
        blocks = {
            "fixed effects": self.fixed,
            "standard deviations of random effects": self.sd,
            "correlations of random effects": self.correlation,
        }
        if self.likelihood is not None:
            blocks["likelihood"] = self.likelihood
        return printed(blocks, self.interval, self.head, self.foot, self.ratio)


def printed(blocks: Mapping[str, Marginals], interval: float, head: str, foot: str, ratio: str = "") -> str:
    """Print a table: a head, blocks with their titles, the first also as ratios where these have a name, and a foot."""
    width = max(28, *(2 + len(name) for block in blocks.values() for name in block.names))
    ends = (f"{100 * share:.4g} %" for share in ends_of(interval))
    lines = [head, " " * width + "".join(f"{word:>11}" for word in ("mean", "sd", *ends))]
    for title, block in blocks.items():
        if block.names:
            lines += [title, *rows_of(block, width)]
            if ratio:
                lines += [f"{ratio}s, e to the power of the {title}", *_ratios(block, width)]
        ratio = ""
    return "\n".join([*lines, foot])


def rows_of(block: Marginals, width: int) -> list[str]:
    """One line for each quantity."""
    columns = zip(*(column.tolist() for column in block[1:]), strict=True)
    return [
        f"  {name:<{width - 2}}" + "".join(_cell(x) for x in row)
        for name, row in zip(block.names, columns, strict=True)
    ]


def _cell(value: float) -> str:
    """A number in its column."""
    return f"{shown(value):>11}"


def _ratios(block: Marginals, width: int) -> list[str]:
    """One line for each ratio: e to the power of the mean, and of the ends of the interval."""
    columns = zip(*(column.exp().tolist() for column in (block.mean, block.low, block.high)), strict=True)
    return [
        f"  {name:<{width - 2}}{_cell(mean)}{'':>11}{_cell(low)}{_cell(high)}"
        for name, (mean, low, high) in zip(block.names, columns, strict=True)
    ]
