"""The empty figure of a picture and its colours; it needs matplotlib, which nothing else of the diagnostics does."""

from typing import TYPE_CHECKING

from torchngvi.errors import InputError
from torchngvi.messages import install

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, RED, INK, FAINT = "#1f5a94", "#d1672b", "#c23b22", "#222222", "#9aa0a6"


def new_figure(what: str, width: float, height: float) -> "Figure":
    """Make an empty figure of a size in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            f"the picture of {what} needs matplotlib, which is not installed: {install('cli')}."
        ) from error
    return Figure(figsize=(width, height), dpi=120, layout="constrained")
