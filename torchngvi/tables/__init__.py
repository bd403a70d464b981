"""Regressions and mixed models of tables, from a formula to marginal effects.

`torchngvi.tables.model` is the door, `regression` and `mixed` by a formula and `MixedModel` by arrays.  `design` makes
the rows of a formula, `families` and `priors` say what is assumed, `globals` finds the posterior of the parameters that
all rows share, with the random effects of one grouping factor (`integrated`) or of several integrated out, and `many`
those of thousands of outcomes at once.  `result` is what a person reads, with `effects` of columns.
"""

from torchngvi.tables.design import Formula, design_of_arrays
from torchngvi.tables.effects import EffectTable, GroupsLeftOut, Prediction, RowsLeftOut, TableDraws, compare
from torchngvi.tables.families import FAMILIES, Family, Held, family_of
from torchngvi.tables.family_checks import check_family
from torchngvi.tables.globals import FitSettings
from torchngvi.tables.many import ManyResult, ManySettings, fit_many
from torchngvi.tables.model import MixedModel, TableModel, load, mixed, regression
from torchngvi.tables.parts import Design, Factor
from torchngvi.tables.priors import (
    LKJ,
    Beta,
    Exponential,
    Gamma,
    HalfNormal,
    HalfT,
    Normal,
    Prior,
    StudentT,
    parse_prior,
)
from torchngvi.tables.result import TableResult
from torchngvi.tables.table import Marginals, SummaryTable

__all__ = [
    "FAMILIES",
    "LKJ",
    "Beta",
    "Design",
    "EffectTable",
    "Exponential",
    "Factor",
    "Family",
    "FitSettings",
    "Formula",
    "Gamma",
    "GroupsLeftOut",
    "HalfNormal",
    "HalfT",
    "Held",
    "ManyResult",
    "ManySettings",
    "Marginals",
    "MixedModel",
    "Normal",
    "Prediction",
    "Prior",
    "RowsLeftOut",
    "StudentT",
    "SummaryTable",
    "TableDraws",
    "TableModel",
    "TableResult",
    "check_family",
    "compare",
    "design_of_arrays",
    "family_of",
    "fit_many",
    "load",
    "mixed",
    "parse_prior",
    "regression",
]
