"""Readers of arguments: one for each kind of value that a user hands in, each with its refusal in a sentence.

A reader takes the name of the argument, what was given, and what the argument is, which a refusal says; it returns the
value as the library works with it.  Readers run where an object is made or a function
begins, never within a step.
"""

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchngvi.errors import InputError, TorchngviError
from torchngvi.messages import hint, listed
from torchngvi.numerics import sparse
from torchngvi.numerics.arrays import writable

T = TypeVar("T")


LARGEST = 2**63 - 1  # whole number of a tensor of PyTorch
LARGEST_SIZE = 2**31 - 1  # of one dimension of a tensor, such as draws: 16 GiB of float64
_SHOWN = 100  # characters of a value in a message


def shown(value: Any) -> str:
    """What was got, as a message says it: its ``repr`` where that is short, otherwise its kind.

    >>> shown(-1), shown("gpu"), shown(torch.zeros(2, 3)), shown(int)
    ('-1', "'gpu'", 'a tensor of shape (2, 3), torch.float32', 'the class int')
    """
    if isinstance(value, Tensor) and not (value.ndim == 0 and not value.is_meta):
        where = "" if value.device.type == "cpu" else f", on {value.device}"
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}{where}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {value.__name__}"
    if value is None or isinstance(value, str | bytes | bool | int | float | complex | list | tuple | dict | Tensor):
        try:
            text = repr(value)
        except Exception:  # of a whole number of more than 4,300 digits, or of a user's class in a list
            text = ""
        if 0 < len(text) <= _SHOWN:
            return text
        return f"{text[:_SHOWN]}..., a {type(value).__name__}" if text else f"a {type(value).__name__}"
    if isinstance(getattr(value, "shape", None), tuple) and len(value.shape):  # of NumPy, or of a table
        return f"a {type(value).__name__} of shape {value.shape}"
    try:  # the representation of a class that has one, which may fail as any code of a user
        text = "" if callable(value) or type(value).__repr__ is object.__repr__ else repr(value)
    except Exception:
        text = ""
    return text if 0 < len(text) <= _SHOWN and "\n" not in text else f"a {type(value).__name__}"


def _plain(value: Any) -> Any:
    """The number of an array or a tensor of one entry, which no gradient is asked of; other values as they are."""
    if isinstance(value, Tensor):
        single = value.numel() == 1 and value.layout == torch.strided and not value.is_meta
        return value.item() if single and not value.requires_grad else value
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return value.item()
    return value


def _said(what: str | None) -> str:
    """What an argument is or does, before what it must be."""
    return "" if what is None else f"{what} and "


def _bounds(
    above: float | None, at_least: float | None, below: float | None, at_most: float | None, infinite: bool
) -> str:
    """The interval in words."""
    if (above, at_least, below, at_most) == (0, None, None, None):
        return "positive" + ("" if infinite else " and finite")
    if (above, at_least, below, at_most) == (None, 0, None, None):
        return "0 or larger" + ("" if infinite else ", and finite")
    if (above, at_least, below, at_most) == (None, None, None, None):
        return "a number" if infinite else "finite"
    said = [f"above {above:g}" if above is not None else "", f"at least {at_least:g}" if at_least is not None else ""]
    said += [f"below {below:g}" if below is not None else "", f"at most {at_most:g}" if at_most is not None else ""]
    return ", ".join([*filter(None, said), *([] if infinite else ["finite"])])


def is_number(
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    infinite: bool = False,
) -> bool:
    """Whether this is one real number, no truth value, within an interval, and finite unless it may be infinite.

    >>> is_number(1, above=0), is_number(True), is_number("1"), is_number(math.nan, infinite=True)
    (True, False, False, False)
    """
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        number = float(value)
    except (OverflowError, ValueError, TypeError):  # 10**400
        return False
    return (
        not math.isnan(number)
        and (infinite or math.isfinite(number))
        and (above is None or number > above)
        and (at_least is None or number >= at_least)
        and (below is None or number < below)
        and (at_most is None or number <= at_most)
    )


def read_number(
    name: str,
    value: Any,
    what: str | None = None,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    infinite: bool = False,
) -> float:
    """Read a real number: of Python or NumPy, or a tensor of one entry that no gradient is asked of.

    >>> read_number("tolerance", torch.tensor(0.5), above=0)
    0.5
    >>> read_number("tolerance", -1, above=0)
    Traceback (most recent call last):
    torchngvi.errors.InputError: tolerance must be positive and finite; got -1.
    """
    if not is_number(value, above=above, at_least=at_least, below=below, at_most=at_most, infinite=infinite):
        real = isinstance(_plain(value), Real) and not isinstance(_plain(value), bool)
        wanted = _bounds(above, at_least, below, at_most, infinite) if real else "a number"
        raise InputError(f"{name} {_said(what)}must be {wanted}; got {shown(value)}.")
    return float(_plain(value))


def is_count(value: Any, *, at_least: int = 1, at_most: int = LARGEST) -> bool:
    """Whether this is a whole number within an interval, no truth value; 1e3 is one.

    >>> is_count(3), is_count(1e3), is_count(0), is_count(1.5), is_count(2**63)
    (True, True, False, False, False)
    """
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    whole = isinstance(value, Integral) or (math.isfinite(value) and float(value).is_integer())
    return bool(whole and at_least <= value <= at_most)  # type: ignore[operator]  # any real number has an order


def is_size(value: Any, *, at_least: int = 1) -> bool:
    """Whether this is an integer below 2³¹, as the size of a tensor or a number of draws is; 2.0 is none.

    >>> is_size(3), is_size(2.0), is_size(2**31), is_size(True)
    (True, False, False, False)
    """
    return isinstance(_plain(value), Integral) and is_count(value, at_least=at_least, at_most=LARGEST_SIZE)


def read_count(name: str, value: Any, what: str | None = None, *, at_least: int = 1) -> int:
    """Read a whole number, such as a budget or a number of data.

    >>> read_count("max_evaluations", 1e3)
    1000
    >>> read_count("steps", 0)
    Traceback (most recent call last):
    torchngvi.errors.InputError: steps must be a whole number, at least 1; got 0.
    """
    if not is_count(value, at_least=at_least):
        raise InputError(f"{name} {_whole(what, value, at_least, LARGEST)}; got {shown(value)}.")
    return int(_plain(value))


def read_size(name: str, value: Any, what: str | None = None, *, at_least: int = 1) -> int:
    """Read a number of draws, of coordinates, or another size of a tensor: an integer, where 2.0 is a slip."""
    if not is_size(value, at_least=at_least):
        raise InputError(f"{name} {_whole(what, value, at_least, LARGEST_SIZE)}; got {shown(value)}.")
    return int(_plain(value))


def _whole(what: str | None, value: Any, at_least: int, at_most: int) -> str:
    """What a whole number must be; the largest one is named to who has exceeded it."""
    most = f" and at most {at_most}" if is_number(value, above=at_most) else ""
    return f"{_said(what)}must be a whole number, at least {at_least}{most}"


def read_sizes(name: str, value: Any, what: str, *, at_least: int = 1, none: bool = True) -> tuple[int, ...]:
    """Read a list of sizes."""
    sizes = read_list(name, value, what)
    if not all(is_size(size, at_least=at_least) for size in sizes) or not (sizes or none):
        raise InputError(f"{name} {what}; got {shown(value)}.")
    return tuple(int(_plain(size)) for size in sizes)


def read_flag(name: str, value: Any) -> bool:
    """Read a truth value of Python or NumPy."""
    plain = _plain(value)
    if not isinstance(plain, bool):
        raise InputError(f"{name} is True or False; got {shown(value)}.")
    return plain


def read_choice(name: str, value: Any, choices: Iterable[str], what: str | None = None) -> str:
    """Read one word among several.

    >>> read_choice("kind", "mixtur", ["mixture", "warp"])
    Traceback (most recent call last):
    torchngvi.errors.InputError: kind is one of mixture, warp; got 'mixtur'. Did you mean 'mixture'?
    """
    words = list(choices)
    if not (isinstance(value, str) and value in words):
        close = hint(value, words) if isinstance(value, str) else ""
        raise InputError(f"{name} {what or f'is one of {listed(words)}'}; got {shown(value)}.{close}")
    return value


def read_seed(name: str, value: Any, what: str = "is a seed, a whole number such as 0 of less than 63 bits") -> int:
    """Read a seed of draws."""
    plain = _plain(value)
    if isinstance(plain, bool) or not isinstance(plain, Integral) or abs(int(plain)) >= 2**62:
        raise InputError(f"{name} {what}; got {shown(value)}.")
    return int(plain)


def read_generator(name: str, value: Any, device: torch.device | None = None) -> torch.Generator | None:
    """Read a source of draws, or None for PyTorch's own."""
    if value is None:
        return None
    if not isinstance(value, torch.Generator):
        raise InputError(
            f"{name} is a torch.Generator, such as torch.Generator().manual_seed(0), or None; got {shown(value)}."
        )
    if device is not None and value.device.type != device.type:
        raise InputError(
            f"{name} draws on {value.device} and the draws are needed on {device}; pass "
            f'torch.Generator("{device}").manual_seed(0).'
        )
    return value


def read_device(name: str, value: Any) -> torch.device | None:
    """Read a device that holds numbers and that this machine has, or None."""
    if value is None:
        try:
            default = torch.get_default_device().type
        except AttributeError:  # of torch 2.6 after torch.set_default_device(None)
            default = "cpu"
        if default == "meta":
            raise InputError(
                f'{name} must hold numbers, and torch.set_default_device("meta") is in force; pass {name}="cpu".'
            )
        return None
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | torch.device):
            raise TypeError(f"it is a {type(value).__name__}")
        device = torch.device(value)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError, OverflowError) as error:
        remedy = ' Did you mean "cuda"?' if isinstance(value, str) and value.lower().startswith("gpu") else ""
        reason = (str(error).splitlines() or [""])[0][:_SHOWN]
        raise InputError(
            f'{name} is a device of PyTorch that is there, such as "cpu" or "cuda", or None; got {shown(value)} '
            f"({reason}).{remedy}"
        ) from error
    if device.type == "meta":
        raise InputError(f'{name} must hold numbers, and "meta" holds none; build on "cpu" and move by .to().')
    return device


def read_dtype(name: str, value: Any) -> torch.dtype | None:
    """Read a floating-point dtype, or None."""
    if value is None or (isinstance(value, torch.dtype) and value.is_floating_point):
        return value
    raise InputError(f"{name} must be a floating-point dtype, such as torch.float64, or None; got {shown(value)}.")


def read_tensor(
    name: str,
    value: Any,
    what: str | None = None,
    *,
    like: Tensor | None = None,
    shape: Sequence[int | None] | None = None,
    finite: bool = True,
    remedy: str = "",
) -> Tensor:
    """Read real numbers as a floating-point tensor, from a tensor, an array, a table or nested lists."""
    try:
        value = writable(value)
        # straight to the dtype that is wanted: 0.1 must not pass through float32
        dtype, device = (None, None) if like is None else (like.dtype, like.device)
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=dtype, device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"{name} must be numbers; got {type(value).__name__} ({error}).") from error
    if tensor.is_complex():
        raise InputError(f"{name} must be real; got {tensor.dtype}.")
    if tensor.is_meta:
        raise InputError(f"{name} must hold numbers; got {shown(tensor)}.")
    if like is not None:
        tensor = tensor.to(dtype=like.dtype, device=like.device)
    elif not tensor.is_floating_point():
        tensor = tensor.to(torch.get_default_dtype())
    if shape is not None and not (
        tensor.ndim == len(shape) and all(n is None or n == m for n, m in zip(shape, tensor.shape, strict=True))
    ):
        wanted = f"({', '.join('any' if n is None else str(n) for n in shape)}{',' * (len(shape) == 1)})"
        raise InputError(f"{name} {what or f'must be of shape {wanted}'}; got shape {tuple(tensor.shape)}.")
    entries = tensor.values() if sparse.is_sparse(tensor) else tensor
    # where the sum is a number, so is every entry
    if finite and not math.isfinite(entries.sum().item()) and not bool((there := torch.isfinite(entries)).all()):
        raise InputError(
            f"{name} must be finite; got {int((~there).sum())} NaN or infinite of {entries.numel()} entries."
            + (f" {remedy}" if remedy else "")
        )
    return tensor


def read_shares(name: str, value: Any) -> list[float]:
    """Read levels of quantiles."""
    given = value.tolist() if isinstance(value, Tensor) and value.ndim else value
    levels = read_list(name, given, "are shares, such as [0.025, 0.975]")
    what = "are shares, such as 0.025 for 2.5 per cent,"
    return [read_number(name, level, what, above=0, below=1) for level in levels]


def read_instance(
    name: str,
    value: Any,
    kind: type[T] | tuple[type[T], ...],
    what: str,
    *,
    other: Any = None,
    error: type[TorchngviError] = InputError,
) -> T:
    """Check that an object is of the kind that is needed.

    >>> read_instance("count", "x", int, "is an int", other=3)
    Traceback (most recent call last):
    torchngvi.errors.InputError: count is an int; got 'x'. The arguments are swapped.
    """
    if isinstance(value, kind):
        return value
    kinds = kind if isinstance(kind, tuple) else (kind,)
    remedy = ""
    if isinstance(value, type):
        remedy = " Call it, and pass what it makes." if issubclass(value, kinds) else ""
    elif other is not None and isinstance(other, kind):
        remedy = " The arguments are swapped."
    raise error(f"{name} {what}; got {shown(value)}.{remedy}")


def read_callable(
    name: str, value: Any, what: str = "is a function", *, arguments: str | None = None
) -> Callable[..., Any]:
    """Check that something is a function, and neither a class nor a module without a forward pass."""
    silent = isinstance(value, torch.nn.Module) and type(value).forward is torch.nn.Module.forward
    if not callable(value) or isinstance(value, type) or silent:
        raise InputError(f"{name} {what}; got {shown(value)}.")
    if arguments is not None:
        try:
            signature = inspect.signature(value)
        except (TypeError, ValueError):  # of some built-in functions it is not known
            return value
        try:
            signature.bind(*(arguments.split(", ") if arguments else []))
        except TypeError as error:
            raise InputError(f"{name} is called with ({arguments}); got a function of {signature}.") from error
    return value


def read_list(name: str, value: Any, what: str) -> list[Any]:
    """Read a list, a tuple or another iterable, no text and no mapping."""
    if isinstance(value, str | bytes | Mapping | type) or not isinstance(value, Iterable):
        raise InputError(f"{name} {what}; got {shown(value)}.")
    try:
        return list(value)
    except TypeError as error:  # a tensor without dimensions
        raise InputError(f"{name} {what}; got {shown(value)}.") from error


def read_names(name: str, value: Any, what: str) -> tuple[str, ...]:
    """Read a list of names, no text."""
    names = read_list(name, value, what)
    if not all(isinstance(each, str) for each in names):
        raise InputError(f"{name} {what}; got {shown(value)}.")
    return tuple(names)


def read_path(name: str, value: Any, what: str = "is the path of a file") -> Path:
    """Read the path of a file."""
    text = str(value) if isinstance(value, str | os.PathLike) else ""
    if not text or "\0" in text:
        null = " A path holds no null character; take it out." if text else ""
        raise InputError(f"{name} {what}; got {shown(value)}.{null}")
    return Path(value)
