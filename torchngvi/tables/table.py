"""Tables of results: marginal posteriors, what is printed of them, and values by the name of a grouping factor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.errors import InputError
from torchngvi.messages import shown

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
        weights: Tensor | None,  # normalised, (S,); None where draws are equally likely
        interval: float,
    ) -> Self:
        """Summarise draws, with equal-tailed intervals of a probability."""
        if weights is None:
            weights = draws.new_full((len(draws),), 1 / len(draws))
        mean = weights @ draws
        sd = (weights @ (draws - mean).square()).sqrt()
        ends = [weighted_quantile(draws, weights, share) for share in ends_of(interval)]
        return cls(tuple(names), mean, sd, *ends)


class ByFactor(dict[str, Of]):
    """A dict from the names of grouping factors; where there is one factor, an index that is no name is one into it.

    >>> ByFactor({"school": [1.0, 2.0]})["school"], ByFactor({"school": [1.0, 2.0]})[1]
    ([1.0, 2.0], 2.0)
    """

    def __getitem__(self, name: Any) -> Any:
        """The value of a factor, or what the value of the one factor has at an index."""
        if isinstance(name, str) and name in self:
            return super().__getitem__(name)
        if len(self) == 1 and not isinstance(name, str):
            return next(iter(self.values()))[name]  # type: ignore[index]  # a list or a tensor
        known = f"the grouping factors are {', '.join(self)}" if self else "there is no grouping factor"
        raise InputError(f"{known}; got {name!r}.")

    @property
    def only(self) -> Any:
        """The value of the one factor; the dict itself where there are several, or none."""
        return next(iter(self.values())) if len(self) == 1 else self


def probability(interval: float) -> float:
    """The probability of an interval, after a check that it is one."""
    return read_number("interval", interval, "is the probability of an interval", above=0, below=1)


def ends_of(interval: float) -> tuple[float, float]:
    """The shares below the two ends of an equal-tailed interval."""
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


class FactorTable(NamedTuple):
    """The covariance of the random effects of one grouping factor."""

    sd: Marginals  # the standard deviations of its random effects
    correlation: Marginals  # each pair once


@dataclass(frozen=True)
class SummaryTable:
    """What `TableResult.summary` says; ``str`` is the table.

    Attributes:
        fixed: the fixed effects, in the units of the linear predictor over those of the columns of X.
        random: for each grouping factor the standard deviations and correlations of its effects.
        likelihood: the parameters of the likelihood, as a residual sd, or thresholds; None where there are none.
        interval: the probability of the intervals.
        head: what was fitted, the lines above the table.
        foot: how, the lines below it.
        ratio: what e to the power of a fixed effect is called, "odds ratio" or "rate ratio"; empty where it is nothing.
        title: what the parameters of the likelihood are called.

    >>> one = Marginals(("x",), *torch.ones(4, 1))
    >>> of = FactorTable(one, one._replace(names=(), mean=one.mean[:0]))
    >>> print(SummaryTable(one, ByFactor(school=of), None, 0.9, "a model", "a way"))
    a model
                                      mean         sd        5 %       95 %
    fixed effects
      x                                  1          1          1          1
    standard deviations of random effects
      x                                  1          1          1          1
    a way
    """

    fixed: Marginals
    random: ByFactor[FactorTable]
    likelihood: Marginals | None
    interval: float
    head: str
    foot: str
    ratio: str = ""
    title: str = "likelihood"

    @property
    def sd(self) -> Any:
        """The standard deviations of the random effects: `Marginals` of one factor, and of several by their names."""
        return ByFactor({name: of.sd for name, of in self.random.items()}).only

    @property
    def correlation(self) -> Any:
        """The correlations of the random effects, each pair once: of one factor, and of several by their names."""
        return ByFactor({name: of.correlation for name, of in self.random.items()}).only

    def __str__(self) -> str:
        blocks = {"fixed effects": self.fixed}
        for name, of in self.random.items():
            behind = f", {name}" if len(self.random) > 1 else ""
            blocks[f"standard deviations of random effects{behind}"] = of.sd
            blocks[f"correlations of random effects{behind}"] = of.correlation
        if self.likelihood is not None:
            blocks[self.title] = self.likelihood
        return printed(blocks, self.interval, self.head, self.foot, self.ratio)


def printed(blocks: Mapping[str, Marginals], interval: float, head: str, foot: str = "", ratio: str = "") -> str:
    """Print a table: a head, blocks with their titles, the first also as ratios where these have a name, and a foot."""
    width = max(28, *(2 + len(name) for block in blocks.values() for name in block.names))
    ends = (f"{100 * share:.4g} %" for share in ends_of(interval))
    lines = [head, " " * width + "".join(f"{word:>11}" for word in ("mean", "sd", *ends))]
    for title, block in blocks.items():
        if block.names:
            lines += [*([title] if title else []), *_lines(block, width)]
            if ratio:
                exp = (part.exp().tolist() for part in (block.mean, block.low, block.high))
                lines.append(f"{ratio.replace('ratio', 'ratios')}, e to the power of the {title}")
                for name, mean, low, high in zip(block.names, *exp, strict=True):
                    lines.append(_line(name, width, [shown(mean), "", shown(low), shown(high)]))
        ratio = ""
    return "\n".join([*lines, *([foot] if foot else [])])


def _lines(block: Marginals, width: int) -> list[str]:
    """One line for each quantity."""
    columns = (column.tolist() for column in block[1:])
    return [_line(name, width, map(shown, row)) for name, *row in zip(block.names, *columns, strict=True)]


def _line(name: str, width: int, cells: Any) -> str:
    """A name, and texts in their columns."""
    return f"  {name:<{width - 2}}" + "".join(f"{cell:>11}" for cell in cells)
