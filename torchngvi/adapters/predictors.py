"""Draws of the linear predictors of a mixed model at the rows of its data."""

from torch import Tensor

from torchngvi.mixed_models import MixedResult, MultilevelResult
from torchngvi.models.mixed_rows import GroupedRows
from torchngvi.models.mixed_units import restored

_ALL = slice(None)


def predictors_of(result: MixedResult | MultilevelResult, at: slice = _ALL) -> Tensor:
    """Draw the linear predictors of some rows, the effects of their groups included."""
    rows, draws = result.model.rows, result.draws()
    effects: list[tuple[GroupedRows, Tensor]]
    if isinstance(result, MixedResult):
        effects = [(result.model.rows, result.draws().effects)]
    else:
        several = result.draws().effects
        effects = [(of, several[name]) for name, of in zip(result.model.names, result.model.rows.factors, strict=True)]
    eta = draws.fixed @ restored(rows.X[at], rows.columns).mT + rows.offset[at]
    for of, b in effects:
        eta = eta + (b.index_select(1, of.groups[at]) * restored(of.Z[at], of.within)).sum(-1)
    return eta
