"""Fitting mixed models: the globals with the random effects integrated out, and answers in the units of the data.

`model` is the front door, `torchngvi.MixedModel`; `integrated` and `response` are the two ways to the posterior of
fixed effects and variance components, `locals` has the random effects given these, and `result` what is said of all.
"""

from torchngvi.mixed_models.left_out import GroupsLeftOut
from torchngvi.mixed_models.model import MixedModel
from torchngvi.mixed_models.multilevel import MultilevelModel
from torchngvi.mixed_models.multilevel_result import MultilevelResult
from torchngvi.mixed_models.multilevel_table import FactorTable, MultilevelDraws, MultilevelTable
from torchngvi.mixed_models.predictions import Prediction
from torchngvi.mixed_models.result import MixedDraws, MixedResult
from torchngvi.mixed_models.table import Marginals, MixedTable

__all__ = [
    "FactorTable",
    "GroupsLeftOut",
    "Marginals",
    "MixedDraws",
    "MixedModel",
    "MixedResult",
    "MixedTable",
    "MultilevelDraws",
    "MultilevelModel",
    "MultilevelResult",
    "MultilevelTable",
    "Prediction",
]
