"""Terms of a formula whose effects vary over groups: "(1 + x | subject)", "(1 | school/class)", "(1 + x || subject)".

The library formulae reads what stands in each pair of parentheses; that effects of one pair are correlated, and those
of different pairs are not, is found here.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from torchngvi.errors import InputError

Label = tuple[Any, ...]  # of a group, with an entry for each column that the groups are of


class Block(NamedTuple):
    """Effects that vary together over the groups of one factor."""

    name: str  # of the factor, from its second block on with the effects behind it, as "school.x"
    factor: str
    keys: tuple[str, ...]  # columns that the groups are of
    terms: tuple[Any, ...]  # of formulae


def parenthesised(formula: str) -> list[tuple[str, str, bool]]:
    """Find the terms with a bar: what varies, over what, and whether the effects are independent, a double bar.

    >>> parenthesised("y ~ log(x) + (1 + x || g) + (1 | a:b)")
    [('1 + x', 'g', True), ('1', 'a:b', False)]
    """
    found: list[tuple[str, str, bool]] = []
    opened: list[int] = []
    bars: dict[int, int] = {}  # of the parenthesis that begins there, its first bar
    for place, letter in enumerate(formula):
        if letter == "(":
            opened.append(place)
        elif letter == "|" and opened:
            bars.setdefault(opened[-1], place)
        elif letter == ")" and opened:
            begin = opened.pop()
            if begin in bars:
                bar = bars[begin]
                double = formula[bar : bar + 2] == "||"
                left, right = formula[begin + 1 : bar], formula[bar + 1 + double : place]
                found.append((left.strip(), right.strip(), double))
    return found


def blocks_of(formula: str, described: Callable[[str], Any]) -> list[Block]:
    """Find the blocks of effects that vary over groups."""
    blocks: list[Block] = []
    for left, right, independent in parenthesised(formula):
        by_factor: dict[str, list[Any]] = {}
        for term in described(f"y ~ ({left} | {right})").group_terms:
            by_factor.setdefault(term_name(term.factor), []).append(term)
        for factor, terms in by_factor.items():
            keys = tuple(sorted({name for name in terms[0].factor.var_names if name}, key=factor.find))
            for some in [[term] for term in terms] if independent else [terms]:
                same = [block for block in blocks if block.factor == factor]
                names = {term_name(old) for block in same for old in block.terms}
                twice = [term_name(term.expr) for term in some if term_name(term.expr) in names]
                if twice:
                    what = "the intercept" if twice[0] == "1" else twice[0]
                    raise InputError(f"The formula {formula!r} lets {what} vary over {factor} twice. Leave one out.")
                own = "+".join(term_name(term.expr) for term in some)
                name = f"{factor}.{own}" if same else factor
                blocks.append(Block(name, factor, keys, tuple(term.expr for term in some)))
    return blocks


def term_name(term: Any) -> str:
    """The name of a term of formulae; that of an intercept is 1."""
    return "1" if type(term).__name__ == "Intercept" else term.name


class Grouping:
    """One block on a table: the design of its effects, and the number of the group of each row.

    Attributes:
        random: names of the effects, r strings.
        levels: labels of the groups, in the order of their numbers.
    """

    def __init__(self, block: Block, within: Any, random: Sequence[str], frame: Any) -> None:
        self.block, self.within, self.random = block, within, list(random)
        labels = self._labels(frame)
        keyed = sorted(set(labels), key=lambda label: [(type(part).__name__, part) for part in label])
        self._number = {label: i for i, label in enumerate(keyed)}
        self.levels: list[Any] = [label[0] if len(label) == 1 else ":".join(map(str, label)) for label in keyed]

    def numbered(self, frame: Any) -> np.ndarray:
        """The number of the group of each row; -1 of groups that the fit had not, and without the columns of groups."""
        if any(key not in frame for key in self.block.keys):
            return np.full(len(frame), -1)
        labels = self._labels(frame)
        kinds = [{tuple(map(type, label)) for label in some} for some in (self._number, labels)]
        if labels and not kinds[0] & kinds[1]:  # as numbers that have become text in a file
            known, new = (next(iter(some))[0] for some in (self._number, labels))
            raise InputError(
                f"The groups {self.block.factor} of the fit are as {known!r} ({type(known).__name__}), those of the "
                f"table as {new!r} ({type(new).__name__}). Convert the column; leave it out for groups that the fit "
                "had not."
            )
        return np.asarray([self._number.get(label, -1) for label in labels], dtype=int)

    def _labels(self, frame: Any) -> list[Label]:
        return list(zip(*(frame[key].tolist() for key in self.block.keys), strict=True))
