"""The table of a fitted model with several grouping factors, and its joint draws."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from torchngvi.mixed_models.table import ByFactor, Marginals, printed


class FactorTable(NamedTuple):
    """The covariance of the random effects of one grouping factor.

    Attributes:
        sd: the standard deviations of its random effects.
        correlation: their correlations, each pair once.
    """

    sd: Marginals
    correlation: Marginals


@dataclass(frozen=True)
class MultilevelTable:
    """What `MultilevelResult.summary` says; ``str`` is the table.

    Attributes:
        fixed: the fixed effects, in the units of the linear predictor over those of the columns of X.
        random: for each grouping factor the standard deviations and correlations of its effects.
        likelihood: the parameter of the likelihood; None where it is not learned.
        interval: the probability of the intervals.
        head: what was fitted, the line above the table.
        foot: how, the lines below it.
        ratio: what e to the power of a fixed effect is called, "odds ratio" or "rate ratio"; empty where it is nothing.

    >>> import torch
    >>> one = Marginals(("x",), *torch.ones(4, 1))
    >>> of = FactorTable(one, one._replace(names=(), mean=one.mean[:0]))
    >>> print(MultilevelTable(one, {"school": of}, None, 0.9, "a model", "a way"))
    a model
                                      mean         sd        5 %       95 %
    fixed effects
      x                                  1          1          1          1
    standard deviations of random effects, school
      x                                  1          1          1          1
    a way
    """

    fixed: Marginals
    random: Mapping[str, FactorTable]
    likelihood: Marginals | None
    interval: float
    head: str
    foot: str
    ratio: str = ""

    @property
    def sd(self) -> dict[str, Marginals]:
        """For each grouping factor the standard deviations of its random effects."""
        return ByFactor({name: of.sd for name, of in self.random.items()})

    @property
    def correlation(self) -> dict[str, Marginals]:
        """For each grouping factor the correlations of its random effects, each pair once."""
        return ByFactor({name: of.correlation for name, of in self.random.items()})

    def __str__(self) -> str:
        blocks = {"fixed effects": self.fixed}
        for name, of in self.random.items():
            blocks[f"standard deviations of random effects, {name}"] = of.sd
            blocks[f"correlations of random effects, {name}"] = of.correlation
        if self.likelihood is not None:
            blocks["likelihood"] = self.likelihood
        return printed(blocks, self.interval, self.head, self.foot, self.ratio)


class MultilevelDraws(NamedTuple):
    """Equally likely draws from the posterior of all coordinates of a model with several grouping factors.

    Attributes:
        fixed: β, (S, p).
        sd: for each factor the standard deviations of its effects, (S, r).
        correlation: their correlations, (S, r, r).
        effects: the effects of its groups, (S, n, r).
        omega: the coordinates of their covariance, (S, r(r + 1)/2); see `torchngvi.models.mixed_prior`.
        parameter: the residual sd, scale or size of the likelihood, (S,); None where it is not learned.
    """

    fixed: Tensor
    sd: dict[str, Tensor]
    correlation: dict[str, Tensor]
    effects: dict[str, Tensor]
    omega: dict[str, Tensor]
    parameter: Tensor | None = None
