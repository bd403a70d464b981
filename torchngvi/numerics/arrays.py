"""Arrays and tables of other libraries."""

import math
from typing import Any

from torchngvi.errors import InputError

_NUMERIC = "biufc"  # kinds of the types of NumPy and pandas: truth values and numbers
_REMEDY = "code them by numbers, as pandas.get_dummies(table, drop_first=True) does, or leave them out"


def check_plain(value: Any) -> None:
    """Check that an array of NumPy says all by its numbers: that it has no mask, imaginary part or objects.

    >>> import numpy
    >>> check_plain(numpy.ma.masked_array([1.0, 2.0]))  # nothing of it is masked
    """
    masked = getattr(value, "mask", None)
    if hasattr(value, "filled") and masked is not None and (count := int(masked.sum())):
        raise InputError(
            f"an array has {count} masked entries, which have no value; leave those rows out, or impute them"
        )
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    if kind == "c":
        raise InputError("an array is complex, and its imaginary part would be lost; pass its real part")
    if kind in "OSUVmM" and hasattr(value, "__array__"):
        what = {"O": "objects of Python", "m": "times", "M": "dates", "V": "records"}.get(kind, "texts")
        raise InputError(f"an array is of {what}; make it one of numbers, as array.astype(float) does where it can")


def writable(value: Any) -> Any:
    """A table or a column as an array, see `array_of`, and a copy of a NumPy array that is read-only.

    >>> import numpy
    >>> array = numpy.ones(2)
    >>> writable(array) is array
    True
    >>> array.flags.writeable = False
    >>> writable(array).flags.writeable
    True
    """
    value = array_of(value) if hasattr(value, "to_numpy") else value
    check_plain(value)
    return value if getattr(getattr(value, "flags", None), "writeable", True) else value.copy()


def array_of(table: Any) -> Any:
    """The numbers of a DataFrame or a Series of any library that has them, without its names and its index."""
    columns = getattr(table, "columns", None)
    kinds = {} if columns is None else dict(zip(map(str, columns), table.dtypes, strict=False))
    other = [name for name, kind in kinds.items() if getattr(kind, "kind", "f") not in _NUMERIC]
    array = table.to_numpy()
    if other:
        what = f"the column {other[0]!r} is" if len(other) == 1 else f"the columns {', '.join(map(repr, other))} are"
        raise InputError(f"{what} of text or other things that are no numbers; {_REMEDY}")
    if array.dtype.kind != "O":
        return array
    if columns is None and getattr(getattr(table, "dtype", None), "kind", "O") not in _NUMERIC:
        raise InputError(f"it is of text or other things that are no numbers; {_REMEDY}")
    return table.to_numpy(dtype="float64", na_value=math.nan)  # pandas.NA, or truth values beside numbers
