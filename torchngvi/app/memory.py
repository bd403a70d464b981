"""The one memory budget of the command line: what a run takes, from its sizes alone, before anything is allocated."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from torchngvi.errors import InputError
from torchngvi.registry import structure_of, widths

try:
    import resource
except ImportError:  # there are no such limits on Windows
    resource = None  # type: ignore[assignment]

_NUMBER = 8  # bytes
_DRAWN_AT_ONCE = 2048  # of a call of the log joint
_DRAWS = (1000, 20_000)  # fewest and most, for k-hat and the check of the ELBO by sampling
# peaks of whole runs, measured; in numbers where it does not say bytes
_FIXED = 100_000_000  # bytes, of what is loaded late
_ENTRY = 4  # for each entry of the design: as read, standardised, split
_COLUMN = 500  # bytes of a column's name and series
_TRIAL, _CONSTANT = (
    40,
    6,
)  # matrices of a pattern, unless diagonal: with steps by trial, with constant ones
_DRAWN, _AT_ONCE = 4, 600  # for each entry of the draws; of each row, for those at which the log joint is taken at once
_CELL, _HEADER = 32, 6000  # bytes of a cell, and of a column, of a text file while it is read


def available() -> float:
    """The memory that this process can still take, by the limits of process, container and machine."""
    return max(min(_of_process(), _of_container(), _of_machine()), 0.0)


def _of_process() -> float:
    """The limit that ``ulimit -v`` sets, without what is taken."""
    if resource is None:
        return math.inf
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return math.inf
    pages = _words(Path("/proc/self/statm"))
    return limit - (int(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages else 0)


def _of_container() -> float:
    group = Path("/sys/fs/cgroup")
    pairs = (
        (group / "memory.max", group / "memory.current"),
        (group / "memory/memory.limit_in_bytes", group / "memory/memory.usage_in_bytes"),
    )
    found = [(_words(limit), _words(used)) for limit, used in pairs]
    return min((int(a[0]) - int(b[0]) for a, b in found if a and b and a[0].isdigit()), default=math.inf)


def _of_machine() -> float:
    words = _words(Path("/proc/meminfo"))
    return int(words[words.index("MemAvailable:") + 1]) * 1024 if "MemAvailable:" in words else math.inf


def _words(path: Path) -> list[str]:
    """Those of a file of the kernel; none where there is no such file."""
    try:
        return path.read_text().split()
    except OSError:
        return []


def require(size: float, what: str, remedy: str) -> None:
    """Check that there is memory enough."""
    free = available()
    if size > free:
        raise InputError(f"{what} takes about {_shown(size)} of memory, and {_shown(free)} are free. {remedy}")


def _shown(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


def of_text(size: int, cells: int, columns: int) -> int:
    """The memory that it takes to read a file of text."""
    return size + _CELL * cells + _HEADER * columns


def draws(rows: int, columns: int) -> int:
    """The number of draws for k-hat and the sampled ELBO: as many as a few seconds and 200 MB allow.

    >>> draws(100, 10), draws(10**6, 10)
    (20000, 1000)
    """
    fewest, most = _DRAWS
    return max(fewest, min(most, 200_000_000 // max(rows, 1), 25_000_000 // max(columns, 1)))


def examination(rows: int, columns: int) -> int:
    """Gradients that an examination of q may take: a few seconds, and 400 MB; 0 where that tells nothing.

    >>> examination(569, 31), examination(1_000_000, 31)
    (20000, 0)
    """
    most = min(20_000, 10**10 // max(rows * columns, 1))
    fits = _DRAWN_AT_ONCE * rows <= 50_000_000 and 16 * columns**2 <= 50_000_000
    return most if fits and most >= 1000 else 0


@dataclass(frozen=True)
class Budget:
    """The memory of a run, from its sizes alone: what is to be done with a table.

    >>> Budget("diagonal").size(1000, 10) < Budget("cholesky").size(1000, 10_000)
    True
    """

    posterior: str = "diagonal"
    structure: str | None = None  # without: the posterior's own
    trial: bool = True  # steps are found by trial
    starts: int = 1  # posteriors side by side

    def size(self, rows: int, columns: int) -> int:
        """The memory of a run on a dense design, at its peak."""
        widest, entries = widths(self.structure or structure_of(self.posterior), columns)
        matrices = 0 if widest == 1 else _TRIAL if self.trial else _CONSTANT
        numbers = (
            _ENTRY * rows * columns
            + self.starts * matrices * entries
            + _DRAWN * draws(rows, columns) * columns
            + _AT_ONCE * self.starts * rows
        )
        return _FIXED + _COLUMN * columns + _NUMBER * numbers

    def require(self, what: str, rows: int, columns: int) -> None:
        """Check that there is memory enough for a run on a dense design."""
        leaner = Budget("diagonal", None, self.trial, self.starts)
        fits = leaner != self and leaner.size(rows, columns) <= available()
        structure = f" with structure {self.structure}" if self.structure else ""
        starts = f" from {self.starts} starts side by side" if self.starts > 1 else ""
        require(
            self.size(rows, columns),
            f"a fit of posterior {self.posterior}{structure} to {what}, {rows} rows of {columns} columns{starts},",
            "Use posterior diagonal, or fewer columns." if fits else "Use fewer rows, columns or starts.",
        )
