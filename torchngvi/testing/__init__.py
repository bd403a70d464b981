"""Checks of the contracts in `torchngvi.interfaces`, for parts of this library and of others: one function a kind.

    from torchngvi.testing import check_rule
    check_rule(MyRule)

A check raises an AssertionError whose text is a whole sentence: it says which identity failed, by how much, and for
which input.  Where all hold it returns nothing.  It needs no test runner, takes a second or two at most, and gives
the same result at each call, since what it draws comes from seeds of its own.
"""

from torchngvi.testing.claims import check_structure
from torchngvi.testing.engines import check_engine
from torchngvi.testing.estimators import check_estimator, check_likelihood
from torchngvi.testing.parts import check_acceleration, check_metric, check_momentum, check_rule, check_step_size
from torchngvi.testing.posteriors import check_exponential_family, check_flat_posterior, check_posterior

__all__ = [
    "check_acceleration",
    "check_engine",
    "check_estimator",
    "check_exponential_family",
    "check_flat_posterior",
    "check_likelihood",
    "check_metric",
    "check_momentum",
    "check_posterior",
    "check_rule",
    "check_step_size",
    "check_structure",
]
