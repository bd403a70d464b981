"""Formulas as the library formulae reads them: their response, their terms, and the columns that they name."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from torchngvi.adapters.grouping import Block, blocks_of, parenthesised, term_name
from torchngvi.errors import InputError
from torchngvi.extras import install

try:
    import formulae
except ImportError:  # the extra "formula" is not installed
    formulae = None

_FUNCTIONS = {name: getattr(np, name) for name in ("log", "log1p", "log2", "log10", "exp", "expm1", "sqrt", "abs")}


class FormulaColumns(NamedTuple):
    """The columns of a table that a formula names, by their part."""

    response: tuple[str, ...]
    predictors: tuple[str, ...]  # of the fixed effects, and of those that vary
    groups: tuple[str, ...]

    @classmethod
    def of(cls, formula: str) -> "FormulaColumns":
        """Find them without a table.

        >>> FormulaColumns.of("y ~ log(x) + (1 + t | school)")
        FormulaColumns(response=('y',), predictors=('t', 'x'), groups=('school',))
        """
        return columns_of(described(text_of(formula).replace("||", "|")), blocks_of(formula, described))


class FormulaTerms(NamedTuple):
    """The terms of a formula, by their names.

    Attributes:
        response: its left-hand side.
        common: the terms that are no intercept, and do not vary over groups.
        intercept: whether there is one.
        grouped: whether there are effects that vary over groups.
    """

    response: str
    common: tuple[str, ...]
    intercept: bool
    grouped: bool

    @classmethod
    def of(cls, formula: str) -> "FormulaTerms":
        """Find them without a table.

        Raises:
            InputError: a formula that cannot be read, or without a response.

        >>> FormulaTerms.of("died[yes] ~ age + C(ward)")
        FormulaTerms(response='died[yes]', common=('age', 'C(ward)'), intercept=True, grouped=False)
        """
        model = with_response(formula)
        names = [term_name(term) for term in model.common_terms]
        level = getattr(model.response.term.components[0], "reference", None)
        response = model.response.term.name + (f"[{level}]" if level is not None else "")
        common = tuple(name for name in names if name != "1")
        return cls(response, common, "1" in names, bool(parenthesised(formula)))


def with_response(formula: str) -> Any:
    """What a formula says, after a check that it has a response.

    Raises:
        InputError: a formula that cannot be read, or without a response.
    """
    model = described(text_of(formula).replace("||", "|"))
    if model.response is None:
        raise InputError(f"A formula begins with its response, as y ~ x + (1 | group); got {formula!r}.")
    return model


def columns_of(model: Any, blocks: Sequence[Block]) -> FormulaColumns:
    """The columns that a formula names, of what `described` gives and the blocks of its effects."""
    response = () if model.response is None else _variables([model.response.term])
    predictors = _variables([*model.common_terms, *(term for block in blocks for term in block.terms)])
    keys = {key for block in blocks for key in block.keys}
    return FormulaColumns(*(tuple(sorted(some)) for some in (response, predictors, keys)))


def text_of(formula: Any) -> str:
    """The formula, after a check that it is a text.

    Raises:
        InputError: anything else.
    """
    if not isinstance(formula, str) or not formula.strip():
        got = repr(formula) if isinstance(formula, str) else type(formula).__name__
        raise InputError(f"A formula is a text, as 'y ~ x + (1 | group)'; got {got}.")
    return formula


def described(formula: str) -> Any:
    """What a formula says, as formulae tells it.

    Raises:
        ImportError: without formulae.
        InputError: a formula that cannot be read.
    """
    if formulae is None:
        raise ImportError(f"A formula needs the library formulae: {install('formula')}.", name="formulae")
    try:
        return formulae.model_description(formula)
    except Exception as error:  # formulae raises its own errors, and Python's, at what it cannot read
        raise InputError(f"The formula {formula!r} cannot be read: {error}") from error


def designs_of(formula: str, part: str, frame: Any) -> Any:
    """The designs of a part of a formula on a table, as formulae makes them.

    Raises:
        InputError: a formula that cannot be computed from the table.
    """
    try:
        with np.errstate(all="ignore"):  # what is not finite is refused by name
            return formulae.design_matrices(part, frame, na_action="error", extra_namespace={"np": np, **_FUNCTIONS})
    except Exception as error:  # of formulae, of NumPy, or of a function that the formula calls
        raise InputError(f"The formula {formula!r} cannot be computed from the table: {error}") from error


def _variables(terms: Any) -> set[str]:
    return {name for term in terms if term_name(term) != "1" for name in term.var_names if name}
