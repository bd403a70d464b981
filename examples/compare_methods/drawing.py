"""What figures and tables of the examples have in common: fonts with the glyphs of a text, and tables in print."""

from collections.abc import Iterable

import matplotlib
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from rich.console import Console, Group, RenderableType

_FILE_WIDTH = 120  # columns

# families with the glyphs of Chinese, Japanese or Korean, as systems install them
_WIDE = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans CJK KR",
    "Noto Sans SC",
    "Noto Sans JP",
    "Noto Sans KR",
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "Droid Sans Fallback",
    "IPAexGothic",
    "NanumGothic",
    "PingFang SC",
    "Hiragino Sans",
    "Apple SD Gothic Neo",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Arial Unicode MS",
)


def families() -> list[str]:
    """The font families of a figure: matplotlib's own choice, then those installed for other scripts."""
    installed = set(fontManager.get_font_names())
    return [*matplotlib.rcParams["font.family"], *(name for name in _WIDE if name in installed)]


def drawable(text: str) -> str:
    r"""The text as matplotlib draws it literally; a character that no font of `families` has is spelled as its number.

    >>> print(drawable("age"), drawable("cost in $"), drawable("two\nlines"))
    age cost in \$ two\nlines
    """
    if not text.isascii() or not text.isprintable():
        fonts = [get_font(findfont(FontProperties(family=[name]))) for name in families()]
        text = "".join(letter if _has(fonts, letter) else ascii(letter)[1:-1] for letter in text)
    return text.replace("$", r"\$")


def _has(fonts: Iterable[object], letter: str) -> bool:
    return any(font.get_char_index(ord(letter)) for font in fonts)  # type: ignore[attr-defined]


def show(*parts: RenderableType) -> None:
    """Print to standard output; into a file or a pipe at a width that cuts no column."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_FILE_WIDTH)
    console.print(Group(*parts))
