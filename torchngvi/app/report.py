"""A fit as text: the table of coefficients and a block of results, by rich."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor

from torchngvi.messages import shown

Z95 = 1.959963984540054  # half width of the central 95% of N(0, 1)
_MOST_ROWS = 60
_FILE_WIDTH = 120  # columns


class Coefficient(NamedTuple):
    """The marginal of one coefficient under q."""

    name: str
    mean: float
    sd: float
    low: float  # of the central 95% interval
    high: float


def coefficients(
    names: Sequence[str],
    mean: Tensor,  # (D,)
    sd: Tensor,  # (D,)
) -> list[Coefficient]:
    """The marginals of the coefficients with their 95% intervals.

    >>> import torch
    >>> row = coefficients(["slope"], torch.zeros(1), torch.ones(1))[0]
    >>> row.name, round(row.low, 2), round(row.high, 2)
    ('slope', -1.96, 1.96)
    """
    pairs = zip(names, mean.double().tolist(), sd.double().tolist(), strict=True)
    return [Coefficient(name, m, s, m - Z95 * s, m + Z95 * s) for name, m, s in pairs]


def most_certain(rows: Sequence[Coefficient], count: int) -> list[Coefficient]:
    """The coefficients whose sign is the clearest: those farthest from zero in standard deviations."""
    chosen = sorted(range(len(rows)), key=lambda i: -abs(rows[i].mean) / max(rows[i].sd, 1e-300))[:count]
    return [rows[i] for i in sorted(chosen)]


def coefficient_table(
    rows: Sequence[Coefficient],
    *,
    ratio: str | None = None,
    standardized: Sequence[Coefficient] = (),
) -> Group:
    """A table of the effect of each column with its 95% interval; intervals that exclude zero are in bold."""
    kept = most_certain(rows, _MOST_ROWS)
    title = "Coefficients" if len(kept) == len(rows) else f"{len(kept)} of {len(rows)} coefficients, clearest signs"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("column", overflow="fold", max_width=32)
    for heading in ("per unit", "sd", "2.5%", "97.5%", *((ratio, "2.5%", "97.5%") if ratio else ())):
        table.add_column(heading, justify="right")
    if standardized:
        table.add_column("per sd", justify="right")
    scaled = {row.name: row.mean for row in standardized}
    for row in kept:
        cells = [*row[1:], *(exponential(x) for x in (row.mean, row.low, row.high) if ratio)]
        texts = [shown(value) for value in cells]
        if standardized:
            texts.append(shown(scaled[row.name]))
        table.add_row(Text(row.name), *texts, style="bold" if row.low > 0 or row.high < 0 else "")
    return Group(Text(title, style="bold"), table)


def exponential(x: float) -> float:
    """e^x, infinite beyond the range of numbers.

    >>> exponential(0.0), exponential(1000.0)
    (1.0, inf)
    """
    return math.exp(x) if x < 709.0 else math.inf


def summary_block(title: str, lines: Sequence[tuple[str, str]], *, good: bool) -> Panel:
    """A box with the results of a run, a label and a text on each line."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for label, text in lines:
        grid.add_row(label, Text(text))
    color = "green" if good else "yellow"
    return Panel(
        grid, title=Text(title, style=f"bold {color}"), title_align="left", border_style=color, box=box.ROUNDED
    )


def show(*parts: RenderableType) -> None:
    """Print to standard output; into a file or a pipe at a width that cuts no column."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_FILE_WIDTH)
    console.print(Group(*parts))
