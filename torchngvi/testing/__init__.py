"""Checks of the contracts in torchngvi.interfaces, for parts of this library and of others: one call a part.

    from torchngvi.testing import check_rule
    check_rule(MyRule)

A check raises an AssertionError with a whole sentence, which says which identity failed, by how much, and for
which input; it says nothing where all hold.  It needs no test runner, takes well under a second or two, and is
the same at each call: what it draws comes from seeds of its own.
"""

from torchngvi.testing.accelerations import check_acceleration
from torchngvi.testing.estimators import check_estimator
from torchngvi.testing.likelihoods import check_likelihood
from torchngvi.testing.momenta import check_momentum
from torchngvi.testing.posteriors import check_posterior
from torchngvi.testing.rules import check_rule
from torchngvi.testing.step_sizes import check_step_size
from torchngvi.testing.structures import check_structure

__all__ = [
    "check_acceleration",
    "check_estimator",
    "check_likelihood",
    "check_momentum",
    "check_posterior",
    "check_rule",
    "check_step_size",
    "check_structure",
]
