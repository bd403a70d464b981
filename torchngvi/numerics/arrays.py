"""Arrays and tables of other libraries, and numbers that stay on a device or are brought to the host."""

import functools
import math
import numbers
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from operator import is_not
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from torchngvi.errors import InputError
from torchngvi.numerics import sparse

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Limits of memory, in numbers: what a computation by pieces holds at once, and what it keeps between calls

ENTRIES_AT_ONCE = 2**24  # of a temporary tensor, 128 MB in double precision
ENTRIES_KEPT = 2**26  # of what is kept from one evaluation to the next, 512 MB

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


def remembered(make: Callable[_P, _T], most: int = 256) -> Callable[_P, _T]:
    """Keep the tensors that a function makes, to read only: those that were written to are made again."""
    # most: results that are kept
    made: dict[Any, tuple[Any, list[Tensor], list[int]]] = {}

    @functools.wraps(make)
    def found(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_compiling() or faked():  # a later call would take what is made for numbers
            return make(*args, **kwargs)
        key = *args, *kwargs.items()
        result, tensors, versions = made.get(key, (None, [], []))
        if result is not None and versions == [tensor._version for tensor in tensors]:
            return result
        with torch.inference_mode(False), outside_transforms():  # they may be differentiated later
            result = make(*args, **kwargs)
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            if len(made) >= most:
                made.clear()
            tensors = _tensors(result)
            made[key] = result, tensors, [tensor._version for tensor in tensors]
        return result

    return found


def outside_transforms(*given: Tensor) -> AbstractContextManager[Any]:
    """Open a block outside of the transforms of torch.func that run, unless they are what some tensors belong to."""
    belong = torch.compiler.is_compiling() or any(map(torch._C._functorch.is_functorch_wrapped_tensor, given))
    return nullcontext() if belong else temporarily_clear_interpreter_stack()


def faked() -> bool:
    """Say whether a mode fakes the tensors that are made now, so that none may be kept."""
    fake = torch._C._TorchDispatchModeKey.FAKE
    return not torch.compiler.is_dynamo_compiling() and torch._C._get_dispatch_mode(fake) is not None


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, tuple):
        return [tensor for part in result for tensor in _tensors(part)]
    return [result] if isinstance(result, Tensor) else []


@remembered
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


# ------------------------------------------------------------------------------------ versions and modes of tensors


def tracked(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a function run outside of ``torch.inference_mode``, where tensors have neither gradients nor versions."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return run


# Whether tensors are what they were, by torch's count of writes and by their contents

_BY_VALUE = (int, float, str, numbers.Number)  # the usual ones first
_Count = tuple[object, torch.dtype, torch.device]
_SMALL = 65_536  # entries up to which a copy of a tensor is kept, to know it by


class Versions:
    """A memory of which tensors there were, how often torch had counted a write to each, and what they held."""

    def __init__(self, tensors: Iterable[Tensor], before: "Versions | None" = None) -> None:
        if torch.compiler.is_compiling() or faked():  # a graph counts no writes: nothing is known
            self.tensors: tuple[Tensor, ...] = ()
            self.counts: list[_Count] = []
            self.contents: list[Tensor] = []
            return
        self.tensors = tuple(tensors)  # held, so that no other tensor takes their place in memory
        self.counts = _counts(self.tensors)
        # of a tensor that was not written to since, what it held is known
        known = {} if before is None else dict(zip(map(id, before.tensors), before.counted(), strict=True))
        self.contents = [
            kept[1] if (kept := known.get(id(tensor))) is not None and kept[0] == count else _contents(tensor)
            for tensor, count in zip(self.tensors, self.counts, strict=True)
        ]

    def counted(self) -> Iterable[tuple[_Count, Tensor]]:
        """Iterate over the count of writes and the contents of each tensor."""
        return zip(self.counts, self.contents, strict=True)

    def hold(
        self,
        tensors: Iterable[Tensor],
        wait: bool = False,  # for an accelerator
        contents: bool = True,  # compare them, or go by the counts alone
    ) -> bool:
        """Say whether these are the same tensors and nothing in them has changed."""
        tensors = tuple(tensors)
        if (
            torch.compiler.is_compiling()
            or faked()
            or len(tensors) != len(self.tensors)
            or any(map(is_not, tensors, self.tensors))
        ):
            return False
        if _counts(tensors) != self.counts:
            return False
        for tensor, content in zip(tensors, self.contents, strict=True) if contents else ():
            if (wait or tensor.is_cpu) and not _holds(tensor, content):
                torch.autograd.graph.increment_version(tensor)  # who else remembers it goes by the count
                return False
        return True


def _counts(tensors: Iterable[Tensor]) -> list[_Count]:
    # a conversion changes dtype or device and nothing else; what inference_mode made keeps no count, and is never
    # the same again
    return [(object() if x.is_inference() else x._version, x.dtype, x.device) for x in tensors]


def _contents(tensor: Tensor) -> Tensor:
    """A copy, or of a large tensor what would tell it from another."""
    small = tensor.ndim < 2 or not tensor.is_floating_point() or tensor.numel() <= _SMALL
    return tensor.detach().clone() if small and tensor.layout == torch.strided else _row_sums(tensor)


def _row_sums(tensor: Tensor) -> Tensor:
    """A weighted sum of each row in float64, numbers of their own in place of NaN and of ±∞."""
    weights = torch.arange(1, tensor.shape[-1] + 1, dtype=torch.float64, device=tensor.device).sin()
    if sparse.is_sparse(tensor):
        return sparse.with_values(tensor, _as_numbers(tensor.detach().values())) @ weights
    rows = tensor.detach().flatten(0, -2)
    parts = rows.split(max(1, _SMALL // rows.shape[-1]))
    if tensor.is_cpu:  # where every sum is a number, so is every entry
        sums = torch.cat([part.double() @ weights for part in parts])
        if bool(sums.isfinite().all()):
            return sums
    return torch.cat([_as_numbers(part) @ weights for part in parts])


def _as_numbers(entries: Tensor) -> Tensor:
    """In float64, without NaN and ±∞."""
    return entries.double().nan_to_num(math.pi, math.e, -math.e)


def _holds(tensor: Tensor, content: Tensor) -> bool:
    """Whether these are its contents, NaN equal to NaN."""
    now = tensor if tensor.shape == content.shape else _row_sums(tensor)
    if torch.equal(now, content):
        return True
    return now.is_floating_point() and torch.allclose(now, content, rtol=0.0, atol=0.0, equal_nan=True)


def settings_of(part: object) -> tuple[object, ...]:
    """Describe a part by its class and its attributes, but for tensors, so that two descriptions can be compared."""
    values = {
        name: value if isinstance(value, _BY_VALUE) else id(value)
        for name, value in vars(part).items()
        if not isinstance(value, Tensor)
    }
    return type(part), values


def tensors_of(part: object) -> tuple[Tensor, ...]:
    """Collect the tensors among the attributes of a part."""
    return tuple(value for value in vars(part).values() if isinstance(value, Tensor))
