"""Tables of results: marginal posteriors, what is printed of them, values by the name of a grouping factor, remarks."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from torchngvi.arguments import read_number
from torchngvi.errors import InputError
from torchngvi.messages import shown
from torchngvi.models.standardize import Standardization
from torchngvi.tables.columns import Dependence, dependences, describe_dependences
from torchngvi.tables.parts import Factor

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
            rows = zip(block.names, *(column.tolist() for column in block[1:]), strict=True)
            lines += [*([title] if title else []), *(_line(name, width, map(shown, row)) for name, *row in rows)]
            if ratio:
                exp = (part.exp().tolist() for part in (block.mean, block.low, block.high))
                lines.append(f"{ratio.replace('ratio', 'ratios')}, e to the power of the {title}")
                for name, mean, low, high in zip(block.names, *exp, strict=True):
                    lines.append(_line(name, width, [shown(mean), "", shown(low), shown(high)]))
        ratio = ""
    return "\n".join([*lines, *([foot] if foot else [])])


def _line(name: str, width: int, cells: Any) -> str:
    """A name, and texts in their columns."""
    return f"  {name:<{width - 2}}" + "".join(f"{cell:>11}" for cell in cells)


# ------------------------------------------------------------------------------------ remarks


def warn_of(
    X: Tensor,
    units: Standardization,
    parts: Sequence[float],
    factors: Sequence[Factor],
    names: Sequence[str],
    own_noise: bool = False,
    few: int = 2,
    none: float = 1e-12,
) -> None:
    """Warn of columns of X that depend on one another, and of factors with hardly any groups."""
    # none: of the longest column, a column that is 0 but for the rounding of a root of its Gram matrix
    ones, found = units.intercept, dependences(X)
    if ones is not None:
        # columns are about their means, where each is a multiple without a constant, and one that is constant is 0
        found = [Dependence(column, tuple(sorted({ones, *of}))) for column, of in found]
        size = torch.linalg.vector_norm(X, dim=0)
        found += [Dependence(place, (ones,)) for place in torch.nonzero(size <= none * size.max())[:, 0].tolist()]
    for sentence in describe_dependences(names, found, ones):
        warnings.warn(f"C{sentence[1:]}", stacklevel=3)
    for sentence in remark_on_products(names, parts):
        warnings.warn(sentence, stacklevel=3)
    for of in factors:
        count = len(of.levels)
        if own_noise and count == len(X):
            warnings.warn(
                f"The grouping factor {of.name} has one row in each group: what differs between groups and what "
                "differs between rows cannot be told apart, and the priors alone part the two. Is it the column that "
                "is meant?",
                stacklevel=3,
            )
        if count <= few:
            some = "1 group, which tells" if count == 1 else f"{count} groups, which tell"
            warnings.warn(
                f"The grouping factor {of.name} has {some} next to nothing of a standard deviation over groups: its "
                "prior decides. Make it a fixed effect.",
                stacklevel=3,
            )
    for of, other in combinations(factors, 2):
        pairs = torch.stack([of.groups, other.groups]).unique(dim=1).shape[1]
        if len(of.levels) == len(other.levels) == pairs and {*of.effects} & {*other.effects}:
            warnings.warn(
                f"The grouping factors {of.name} and {other.name} have the same groups: the priors alone part the two, "
                "and each has a share of one standard deviation. Leave one of them out.",
                stacklevel=3,
            )


def own_shares(X: Tensor) -> Tensor:  # (N, p)
    """Which share of the length of each column lies outside of the others, (p,), of columns that are independent."""
    root = torch.linalg.qr(X.double() / torch.linalg.vector_norm(X.double(), dim=0), mode="r").R
    eye = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
    inverse, info = torch.linalg.inv_ex(root) if root.shape[0] == root.shape[1] else (eye, root.new_zeros(()))
    inverse = inverse if not bool(info) else eye
    return 1 / torch.linalg.vector_norm(inverse, dim=1)


def _is_product(name: str) -> bool:
    """Whether a column is a product or a power of columns, by its name."""
    return ":" in name or "**" in name


def products_far_from_0(X: Tensor, names: Sequence[str], least: float = 0.1) -> list[float]:  # X (N, p)
    """The share of each column that the others leave, (p), of a product far from 0 and what it depends on; else 1.

    Where x lies far from 0, x:z is nearly a multiple of z. A prior per standard deviation of the whole column would
    draw its coefficient to 0, and that of z, which makes up for it.
    """
    # least: share of a column outside of the others, below which 2.5 s_y over the whole is 0.25 s_y over that part
    made = [_is_product(name) for name in names]
    if not any(made) or X.shape[0] < X.shape[1] or dependences(X):
        return [1.0] * len(names)
    own = own_shares(X).tolist()
    if not any(part < least for part, product in zip(own, made, strict=True) if product):
        return [1.0] * len(names)
    return [part if part < least else 1.0 for part in own]


def remark_on_products(names: Sequence[str], parts: Sequence[float]) -> list[str]:
    """Sentences about products and powers of columns that lie far from 0, whose default priors are wide."""
    return [
        f"Column {name} is a product of columns that lie far from 0: all but {share:.1g} of its standard deviation is "
        "in the other columns. Its default prior, and that of the columns it nearly depends on, is per standard "
        "deviation of the part that the others leave, and says little. Write center(x) for a column x that lies far "
        "from 0, in the product and by itself, for priors that say what they say of other columns."
        for name, share in zip(names, parts, strict=True)
        if share < 1 and _is_product(name)
    ]


def remark_on_bounds(names: Sequence[str], sd: Tensor, prior_sd: Tensor, share: float = 0.5) -> list[str]:
    """Sentences about fixed effects that hardly anything but the prior bounds."""
    # share: share of the standard deviation of the prior that a posterior has where the data say little
    return [
        f"The data hardly bound {name}: sd {of_data:.3g}, and {of_prior:.3g} under the prior."
        for name, of_data, of_prior in zip(names, sd.tolist(), prior_sd.tolist(), strict=True)
        if not of_data < share * of_prior
    ]


def remark_on_tails(
    names: Sequence[str],
    draws: Tensor,  # (S, K)
    weights: Tensor,  # normalised, (S,)
    times: float = 5.0,
    normal: float = 3.92,
) -> list[str]:
    """Sentences about parameters of the likelihood whose means are those of a heavy tail.

    >>> draws = torch.cat([torch.linspace(0.0, 1.0, 999), torch.tensor([1e4])])
    >>> remark_on_tails(["size"], draws[:, None], torch.full((1000,), 1e-3))
    ['The posterior of the size has a tail so heavy that its mean and sd say nothing: read the interval.']
    """
    # times: standard deviations that are so many times those of a normal distribution with the same interval
    # normal: standard deviations in the interval of 95 %
    of = Marginals.of(names, draws, weights, 0.95)
    heavy = of.sd > times * (of.high - of.low) / normal
    return [
        f"The posterior of the {name} has a tail so heavy that its mean and sd say nothing: read the interval."
        for name, so in zip(names, heavy.tolist(), strict=True)
        if so
    ]


def remark_on_spreads(
    names: Sequence[str],
    sd: Tensor,  # draws, (S, r)
    weights: Tensor,  # normalised, (S,)
    at_zero: float = 0.15,
    points: int = 64,
) -> list[str]:
    """A sentence about standard deviations between groups that may be 0, which no equal-tailed interval can hold."""
    # at_zero: share of its largest value that the density of a standard deviation has at 0 where it may be 0
    # points: at which that is looked for
    said = []
    effective = 1 / float(weights.square().sum())
    for name, draws in zip(names, sd.double().unbind(-1), strict=True):
        w = weights.double()
        spread = (w @ (draws - w @ draws).square()).sqrt()
        width = 1.06 * spread * effective**-0.2
        at = torch.linspace(0.0, 1.0, points, dtype=draws.dtype, device=draws.device) * (w @ draws + 2 * spread)
        kernel = sum((-0.5 * ((at[:, None] - sign * draws) / width).square()).exp() for sign in (-1, 1))
        density = kernel @ w
        share = float(density[0] / density.max())
        if share > at_zero:
            said.append(f"The standard deviation of {name} may be 0: its density there is {share:.2f} of its largest.")
    return said


def remark_on_dispersion(
    eta: Tensor,  # draws of the linear predictors, (S, N)
    y: Tensor,  # (N,)
    weights: Tensor,  # (N,)
    more: float = 0.5,
    sure: float = 4.0,
    least: float = 1e-12,
) -> list[str]:
    """A sentence about counts that vary more about their means than those of a Poisson distribution."""
    # more, sure: excess of a dispersion that is said, and in its standard errors
    # least: mean of a count
    mean, variance = eta.exp().mean(0), eta.var(0)
    # Pearson's χ² over N - tr H, tr H = Σ μ Var(η): an effect that is shrunk to its mean counts as less than one
    freedom = float(weights.sum() - (weights * mean * variance).sum())
    if freedom <= 0:
        return []
    ratio = float((weights * (y - mean).square() / mean.clamp_min(least)).sum()) / freedom
    if not ratio > 1 + max(more, sure * (2 / freedom) ** 0.5):
        return []
    return [
        f"The counts vary {ratio:.3g} times as much about their means as those of a Poisson distribution: intervals "
        "are too narrow. Take the family negative_binomial."
    ]
