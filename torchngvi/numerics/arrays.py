"""Arrays and tables of other libraries."""

import math
from typing import Any

_NUMERIC = "biufc"  # kinds of the types of NumPy and pandas: truth values and numbers
_REMEDY = "code them by numbers, as pandas.get_dummies(table, drop_first=True) does, or leave them out"


def writable(value: Any) -> Any:
    """A table or a column as an array, see `array_of`, and a copy of a NumPy array that is read-only.

    Columns of pandas are read-only, and PyTorch warns of these.

    Args:
        value: what a user gave as numbers.

    Returns:
        What `torch.as_tensor` reads.

    Raises:
        TypeError: as `array_of`.

    >>> import numpy
    >>> array = numpy.ones(2)
    >>> writable(array) is array
    True
    >>> array.flags.writeable = False
    >>> writable(array).flags.writeable
    True
    """
    value = array_of(value) if hasattr(value, "to_numpy") else value
    return value if getattr(getattr(value, "flags", None), "writeable", True) else value.copy()


def array_of(table: Any) -> Any:
    """The numbers of a DataFrame or a Series of any library that has them, without its names and its index.

    Args:
        table: an object with a method ``to_numpy``.

    Returns:
        An array of NumPy.

    Raises:
        TypeError: columns that are not numeric, by their names.
    """
    columns = getattr(table, "columns", None)
    kinds = {} if columns is None else dict(zip(map(str, columns), table.dtypes, strict=False))
    other = [name for name, kind in kinds.items() if getattr(kind, "kind", "f") not in _NUMERIC]
    array = table.to_numpy()
    if other:
        what = f"the column {other[0]!r} is" if len(other) == 1 else f"the columns {', '.join(map(repr, other))} are"
        raise TypeError(f"{what} of text or other things that are no numbers; {_REMEDY}")
    if array.dtype.kind != "O":
        return array
    if columns is None and getattr(getattr(table, "dtype", None), "kind", "O") not in _NUMERIC:
        raise TypeError(f"it is of text or other things that are no numbers; {_REMEDY}")
    return table.to_numpy(dtype="float64", na_value=math.nan)  # pandas.NA, or truth values beside numbers
