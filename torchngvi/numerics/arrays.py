"""Arrays and tables of other libraries, and numbers that stay on a device or are brought to the host."""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from torchngvi.errors import InputError

# Arrays and tables of other libraries

_NUMERIC = "biufc"  # kinds of the types of NumPy and pandas: truth values and numbers
_REMEDY = "code them by numbers, as pandas.get_dummies(table, drop_first=True) does, or leave them out"


def check_plain(value: Any) -> None:
    """Check that an array of NumPy says all by its numbers: that it has no mask, imaginary part or objects."""
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
    """A table or a column as an array, see `array_of`, and a copy of a NumPy array that is read-only."""
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


@functools.lru_cache(maxsize=256)
@torch.inference_mode(False)  # it may be differentiated later
def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number, 0-d, kept on its device for later calls, to read only."""
    return torch.full((), value, dtype=dtype, device=device)


def less_product(x: Tensor, y: Tensor) -> Tensor:
    """Multiply two tensors and -1, by one kernel."""
    return torch.addcmul(constant(0.0, y.dtype, y.device), x, y, value=-1)


# Numbers brought to the host: together, since each transfer waits for the device, or later, without a wait


def on_host(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Bring tensors to the CPU in one transfer; on the CPU they are what they were."""
    if all(tensor.is_cpu for tensor in tensors):
        return tensors
    flat = torch.cat([tensor.detach().flatten().to(tensors[0].dtype) for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return tuple(part.reshape(old.shape).to(old.dtype) for part, old in zip(parts, tensors, strict=True))


def anyone(mask: Tensor) -> bool:
    """Say whether a mask (*batch,) is true for some member; that of one member is not reduced."""
    return bool(mask.any() if mask.ndim else mask)


def everyone(mask: Tensor) -> bool:
    """Say whether a mask (*batch,) is true for every member."""
    return bool(mask.all() if mask.ndim else mask)


class Fetched:
    """Numbers on their way from a device, which are read when they have arrived, without a wait for it."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: Any = None
        if numbers.is_cuda:
            self._here = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._here.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(numbers.device))
        else:
            self._here = numbers.cpu()

    def read(self) -> Any:
        """Return the numbers, or None as long as they have not arrived."""
        return self._here.tolist() if self._event is None or self._event.query() else None
