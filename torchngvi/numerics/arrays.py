"""Arrays of other libraries."""

from typing import Any


def writable(value: Any) -> Any:
    """Copy a NumPy array that is read-only, as the columns of pandas are, since PyTorch warns of these.

    >>> import numpy
    >>> array = numpy.ones(2)
    >>> writable(array) is array
    True
    >>> array.flags.writeable = False
    >>> writable(array).flags.writeable
    True
    """
    return value if getattr(getattr(value, "flags", None), "writeable", True) else value.copy()
