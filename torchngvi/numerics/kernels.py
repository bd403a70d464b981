"""The compiled kernel of the logistic expectations: built at its first use, kept in the user's cache, or done without.

``TORCHNGVI_KERNELS`` says when it is taken: 0, off, no or false never, 1, on, yes or true always, and without it for
calls of 64 rows or more.  The size of a call decides, and nothing that happened before, so that equal calls give equal
bits.  The first such call compiles for about a second, once on a machine; an import never does.  Whatever is in its
way, no compiler, a folder that cannot be trusted, or wrong numbers, the same formula runs in PyTorch, and one record of
the logger "torchngvi" says so.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 64  # of a call, from which the kernel is taken where TORCHNGVI_KERNELS does not say
_FLAGS = ("-O3", "-fno-fast-math", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi")
_LIBRARIES = ("-lm",)
_WORDS = {"0": False, "off": False, "no": False, "false": False, "1": True, "on": True, "yes": True, "true": True}
_SOURCE = Path(__file__).with_name("logistic.c")
# means and standard deviations of the self-test
_SELF_TEST = (
    (-0.5, 0.0), (2.0, 0.1), (-700.0, 0.2), (-30.0, 0.35), (3.0, 0.53), (-9.0, 0.89), (0.0, 1.0), (-50.0, 1.5),
    (6.0, 4.0), (-500.0, 20.0), (-700.0, 25.0), (-400.0, 1e4),
)  # fmt: skip

_Moments = tuple[Tensor, ...]
Reference = Callable[[Tensor, Tensor, int, int], _Moments]  # the formula in plain operators, with order and count
Kernel = Callable[[Tensor, Tensor, int], _Moments]
_log = logging.getLogger("torchngvi")
_lock = threading.Lock()


class _State(NamedTuple):
    kernel: Kernel | None
    text: str  # what is in use, for `show_config`


_state: _State | None = None  # of this process, once it was needed


def _forked() -> None:
    """A child may be forked while another thread holds the lock, which would then never be given back."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def logistic(rows: int, coefficients: Sequence[Sequence[float]], reference: Reference) -> Kernel | None:
    """Find the kernel for a call, and build it if this is the first that needs it."""
    global _state
    wanted = _wanted(os.environ.get("TORCHNGVI_KERNELS", ""))
    if wanted is False or (wanted is None and rows < ROWS):
        return None
    if _state is None:
        with _lock:
            if _state is None:
                _state = _prepared(coefficients, reference)
    return _state.kernel


@functools.cache  # so that a warning is given once
def _wanted(text: str) -> bool | None:
    """What ``TORCHNGVI_KERNELS`` says: always, never, or nothing."""
    word = text.strip().lower()
    if word and word not in _WORDS:
        warnings.warn(
            f"the environment variable TORCHNGVI_KERNELS is {text!r}, which is taken as unset; set it to one of "
            f"{', '.join(_WORDS)}.",
            stacklevel=2,
        )
    return _WORDS.get(word)


def _prepared(coefficients: Sequence[Sequence[float]], reference: Reference) -> _State:
    """Build, load and test; a record where that fails."""
    try:
        path = _library()
        kernel = _loaded(path, coefficients)
        _self_test(kernel, reference)
    except (CompilerError, OSError, subprocess.SubprocessError, AttributeError, RuntimeError, ValueError) as error:
        _log.info("the compiled logistic kernel is not used, PyTorch takes its place: %s", error)
        return _State(None, f"PyTorch ({error})")
    return _State(kernel, f"compiled, {path}")


def _library() -> Path:
    """The shared library in the cache, compiled if it is not there."""
    if not sys.platform.startswith("linux"):
        raise CompilerError(f"it is built on Linux only, and this is {sys.platform}")
    return shared_library("logistic", _SOURCE.read_text(encoding="utf-8"), _FLAGS, _LIBRARIES, cache())


def _loaded(path: Path, coefficients: Sequence[Sequence[float]]) -> Kernel:
    function = ctypes.CDLL(str(path)).torchngvi_softplus
    function.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p] * 8]
    function.restype = None
    return functools.partial(_call, function, torch.tensor(coefficients, dtype=torch.float64, device="cpu"))


def _call(
    function: Callable[..., None], coefficients: Tensor, e: Tensor, v: Tensor, count: int, rows_of_a_thread: int = 8192
) -> _Moments:
    """Run the kernel on contiguous rows, some of them on each of torch's threads."""
    rows = len(e)
    e, v = (torch.zeros_like(x) if x._is_zerotensor() else x.resolve_neg().contiguous() for x in (e, v))
    # tensors of their own, not the rows of one: a caller may change one of them in place
    out = tuple(torch.empty(rows, dtype=torch.float64, device="cpu") for _ in range(count))
    held = e, v, *out
    places = [x.data_ptr() for x in held]

    def run(low: int, high: int, _held: tuple[Tensor, ...] = held) -> None:  # which outlive an interrupt of the caller
        here = [place + 8 * low for place in places]
        function(high - low, count, coefficients.shape[1], coefficients.data_ptr(), *here, *[None] * (5 - count))

    threads = max(1, min(torch.get_num_threads(), rows // rows_of_a_thread))
    ends = [rows * k // threads for k in range(threads + 1)]
    others = [threading.Thread(target=run, args=ends[k : k + 2]) for k in range(1, threads)]
    for thread in others:
        thread.start()
    run(ends[0], ends[1])
    for thread in others:
        thread.join()
    return out


def _self_test(kernel: Kernel, reference: Reference, tolerance: float = 1e-11) -> None:
    """A few rows, which the kernel has to compute as PyTorch does."""
    e, s = torch.tensor(_SELF_TEST, dtype=torch.float64, device="cpu").T.contiguous()
    parts, expected = kernel(e, s * s, 5), reference(e, s * s, 0, 5)
    sizes = *expected[:3], expected[2], expected[2]  # the last two change sign
    for found, right, size in zip(parts, expected, sizes, strict=True):
        error = ((found - right) / size).abs()
        if not bool((error <= tolerance).all()):
            raise CompilerError(f"its self-test failed: a relative difference of {float(error.max()):.1e} to PyTorch")


def show_config() -> None:
    """Print which kernel computes logistic expectations, and the versions, threads and devices.

    The kernel is compiled at the first call that needs it; until then the text says when that will be.  The
    environment variable ``TORCHNGVI_KERNELS`` turns it off (0, off, no or false) or takes it for calls of any size
    (1, on, yes or true).

    >>> show_config()  # doctest: +ELLIPSIS
    torchngvi ...
    """
    text = os.environ.get("TORCHNGVI_KERNELS", "")
    wanted = _wanted(text)
    if wanted is False:
        kernel = f"PyTorch (TORCHNGVI_KERNELS={text})"
    elif _state is None:
        kernel = f"not needed yet; compiled at the first call{'' if wanted else f' of {ROWS:,} rows or more'}"
    else:
        kernel = _state.text
    cuda = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    print(f"torchngvi on Python {platform.python_version()}, torch {torch.__version__}")
    print(f"logistic kernel: {kernel}")
    print(f"threads: {torch.get_num_threads()}")
    print(f"devices: {', '.join(['cpu', *cuda])}")


# -------------------------------------------------------------------------------- the C compiler and its libraries

# A library is compiled once for a compiler, its flags, a processor and a source, and loaded from then on.  What is in
# the cache is code that a process will run: folders and files that somebody else could have written are not taken.


_NATIVE = "-march=native"
_FAST = {"-Ofast", "-ffast-math", "-funsafe-math-optimizations"}  # set flush-to-zero of a whole process where they link
_LINK = ("-shared",)


class CompilerError(Exception):
    """There is no library, and why; never seen by a user as it is."""


def compiler() -> list[str]:
    """Find the C compiler: the one that the environment variable CC names, and without it gcc or cc."""
    named = os.environ.get("CC", "").strip()
    if not named:
        found = shutil.which("gcc") or shutil.which("cc")
        if found is None:
            raise CompilerError("no C compiler was found in PATH; install gcc, or set CC")
        return [found]
    try:
        command = [named] if shutil.which(named) else shlex.split(named)  # its path, or its name and flags
    except ValueError as error:
        raise CompilerError(f"CC is {named!r}, which cannot be read: {error}") from error
    path = shutil.which(command[0])
    if path is None:
        raise CompilerError(f"the C compiler {named!r}, which CC names, was not found; unset CC, or correct it")
    return [path, *command[1:]]


def shared_library(name: str, source: str, flags: Sequence[str], libraries: Sequence[str], folder: Path) -> Path:
    """Compile a source to a shared library, unless that has been done before."""
    command = compiler()
    stem = f"{name}-{key(command, flags, libraries, source)}"
    for path in folder.glob(f"{stem}-*.so"):
        if path.stem == f"{stem}-{digest(trusted(path))}":
            return path
        path.unlink(missing_ok=True)  # cut off or changed since it was written, which loading would not survive
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        text, compiled, linked = (Path(scratch, f"library.{ending}") for ending in ("c", "o", "so"))
        text.write_text(source, encoding="utf-8")
        call = [*command, *flags, "-fPIC", "-c", str(text), "-o", str(compiled)]
        try:
            _run(*call, _NATIVE)
        except CompilerError:  # not every compiler knows every processor
            _run(*call)
        _run(*(part for part in command if part not in _FAST), *_LINK, str(compiled), *libraries, "-o", str(linked))
        if not linked.exists():
            raise CompilerError(f"{command[0]} made no library")
        linked.chmod(0o700)
        path = folder / f"{stem}-{digest(linked)}.so"
        linked.replace(path)  # at once: another process sees all of it or nothing
    return path


def key(command: Sequence[str], flags: Sequence[str], libraries: Sequence[str], source: str) -> str:
    """What a library depends on: the compiler, its flags, the processor and the source, as 24 letters."""
    parts = (*command, _run(*command, "--version"), *flags, _NATIVE, *_LINK, *libraries, _processor(), source)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    """What the code of this processor may use."""
    text = platform.machine() + platform.processor()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith(("model name", "flags", "Features", "CPU part")):
                text += line
            elif not line.strip():
                break  # the first processor stands for all
    return text


def digest(path: Path) -> str:
    """The beginning of the hash of a file, 16 letters."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _run(*command: str, seconds: int = 60) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise CompilerError(f"{command[0]} failed with the status {done.returncode}: {lines[0][:200]}")
    return done.stdout


def user_cache() -> Path:
    """The folder of the user for files that can be made again."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base) if os.path.isabs(base) else Path.home() / ".cache"


def cache() -> Path:
    """The folder of the libraries, in which and above which nobody but the user and root can change anything."""
    if sys.platform == "win32":
        raise CompilerError("who can write to a folder is not known on Windows")
    folder = user_cache()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("torchngvi", "kernels"):
        folder = folder / name
        folder.mkdir(mode=0o700, exist_ok=True)
        trusted(folder)
    return private(folder)


def private(folder: Path) -> Path:
    """A folder to load code from: what is loaded is what was checked, as nobody else can change a name on the way."""
    folder = trusted(folder.resolve(strict=True))
    for path in folder.parents:
        status = path.lstat()
        others = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        if others or status.st_uid not in (0, os.getuid()):
            raise CompilerError(
                f"{path} can be written to by others, and so what is in it can be replaced; set XDG_CACHE_HOME to a "
                "folder that is private up to the root"
            )
    return folder


def trusted(path: Path) -> Path:
    """A file or a folder that is the user's own, and that nobody else can write to."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CompilerError(f"{path} can be written to by others; remove it, or set XDG_CACHE_HOME to a private folder")
    return path
