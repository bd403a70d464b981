"""The C compiler of the machine, and the shared libraries that it makes, which are kept in the user's cache.

A library is compiled once for a compiler, its flags, a processor and a source, and loaded from then on.  What is in the
cache is code that a process will run: folders and files that somebody else could have written are not taken.
"""

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_SECONDS = 60  # that a compiler may take
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


def _run(*command: str) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_SECONDS
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
