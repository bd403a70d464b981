"""The look of all figures: their fonts, colours, dashes, words and legends, and the two files of each."""

import io
import re
import textwrap
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from torchngvi.app.fonts import drawable, families

INK, FAINT = "#222222", "#9aa0a6"
_COLORS = ("#1f5a94", "#d1672b", "#3b8f5a", "#8a4fa3", "#b03a48", "#7a7f87", "#c2a030", "#2a9d9d")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1, 1, 1)))
_WORDS = {  # of the methods of the registry that the papers compare
    "vn": "variational Newton (VN)",
    "srvn": "square-root VN (SR-VN)",
    "bwgd": "Bures-Wasserstein (BW-GD)",
    "svgd": "Stein (SVGD-density)",
    "covariance_gd": "gradient descent in (m, V)",
    "root_gd": "gradient descent in (m, C)",
    "ngvi": "natural parameters (NGVI)",
    "IFVB": "inversion-free (IFVB)",
    "AIFVB": "averaged (AIFVB)",
    "window": "window of scores",
    "STL": "sticking the landing (STL)",
    "CFE": "closed-form entropy (CFE)",
}
_STEP = re.compile(r"^(\w+)=(\S+)$")  # METHOD=LR, as on the command line


def save(figure: Figure, path: Path) -> None:
    """Write a figure twice, as .png and as .svg, the latter without a date, so that equal figures are equal files."""
    figure.savefig(path.with_suffix(".png"))
    text = io.StringIO()
    with rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(text, format="svg", dpi=200, metadata={"Date": None})  # the dots of what is rasterized
    path.with_suffix(".svg").write_text(_PATH.sub(_shortened, text.getvalue()), encoding="utf-8")


_PATH, _DIGITS = re.compile(r' d="[^"]*"'), re.compile(r"(\.\d\d)\d+")


def _shortened(path: re.Match[str]) -> str:
    """A path of an .svg with its places to a hundredth of a point, which is half of the file."""
    return _DIGITS.sub(r"\1", path[0])


def blank_figure(width: float, height: float, title: str, note: str = "") -> Figure:
    """A figure without panels, with a title and an Agg canvas."""
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    look: dict[str, Any] = {"x": 0.01, "ha": "left", "fontfamily": families()}
    figure.suptitle(drawable(title), fontsize=11, fontweight="bold", color=INK, **look)
    if note:
        figure.supxlabel(textwrap.fill(drawable(note), int(16 * width)), fontsize=8, color="#5f6368", **look)
    return figure


def style(axes: Axes, title: str, x: str = "", y: str = "") -> None:
    """Give a panel the look of all panels."""
    axes.set_title(drawable(title), loc="left", fontsize=9, color=INK, fontfamily=families())
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(which="both", labelsize=7.5, color=FAINT, labelcolor=INK)
    axes.tick_params(which="minor", length=0)
    axes.grid(True, color="#e8eaed", linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(FAINT)


def color(index: int) -> str:
    """The colour of the method with this number."""
    return _COLORS[index % len(_COLORS)]


def dashes(index: int) -> Any:
    """The dashes of the line with this number."""
    return _DASHES[index % len(_DASHES)]


def spoken(label: str) -> str:
    """The name of a method in words, with what its label says beside it.

    >>> spoken("srvn"), spoken("bwgd=1e-3"), spoken("Adam")
    ('square-root VN (SR-VN)', 'Bures-Wasserstein (BW-GD), step 1e-3', 'Adam')
    """
    name, comma, rest = _STEP.sub(r"\1, step \2", label.strip()).partition(",")
    return _WORDS.get(name, name) + comma + rest


def legend(figure: Figure) -> None:
    """Name the lines of all panels once, at the right of them."""
    named: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    if named:
        figure.legend(
            named.values(), named.keys(), loc="outside right upper", frameon=False, handlelength=3.0,
            prop={"size": 7.5, "family": families()},
        )  # fmt: skip
