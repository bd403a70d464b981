"""Formulas as the library formulae reads them: their response, their terms, and the columns that they name."""

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from torchngvi.adapters.grouping import Block, blocks_of, parenthesised, term_name
from torchngvi.errors import InputError
from torchngvi.extras import install

try:
    import formulae
    from formulae.environment import Environment
    from formulae.expr import Assign, Binary, Call, Grouping, Literal, QuotedName, Unary, Variable
    from formulae.matrices import DesignMatrices
    from formulae.parser import Parser
    from formulae.resolver import Resolver
    from formulae.scanner import Scanner
    from formulae.terms import Call as CalledTerm
    from formulae.terms import Model, Term
    from formulae.terms.call_resolver import CallResolver, LazyOperator
except ImportError:  # the extra "formula" is not installed
    formulae = Resolver = CallResolver = LazyOperator = None

# what a formula may call: functions of formulae by name, and of NumPy those that map numbers to numbers entry by entry
_CODINGS = ("C", "S", "T", "Sum", "Treatment", "binary", "B")
_TRANSFORMS = (
    "I",
    "scale",
    "standardize",
    "center",
    "bs",
    "cr",
    "cc",
    "tp",
    "poly",
    "offset",
    "prop",
    "p",
    "proportion",
)
_UFUNCS: dict[str, np.ufunc] = {
    name: ufunc
    for name, ufunc in vars(np).items()
    if isinstance(ufunc, np.ufunc) and ufunc.nout == 1 and ufunc.signature is None
}
_LARGEST = 2**63  # of a whole number in a formula, beyond which NumPy computes with objects of Python


_NAMESPACE = {"np": SimpleNamespace(**_UFUNCS), **_UFUNCS}  # beside the functions of formulae, all that there is


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
    """What a formula says, after a check that it has a response."""
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
    """The formula, after a check that it is a text."""
    if not isinstance(formula, str) or not formula.strip():
        got = repr(formula) if isinstance(formula, str) else type(formula).__name__
        raise InputError(f"A formula is a text, as 'y ~ x + (1 | group)'; got {got}.")
    return formula


def described(formula: str) -> Any:
    """What a formula says, as formulae tells it."""
    if formulae is None:
        raise ImportError(f"A formula needs the library formulae: {install('formula')}.", name="formulae")
    try:
        tokens = Scanner(formula).scan()
        parser = Parser(tokens)
        tree = parser.parse()
        if not parser.at_end():
            raise InputError(
                f"The formula {formula!r} cannot be read beyond {parser.peek().lexeme!r}: there is no sign before it. "
                "Write one, as + or :, or leave out what follows."
            )
        _check_calls(tree, formula, len(tokens), False)
        found = tree.accept(_resolver())
        return found if isinstance(found, Model) else Model(found)
    except InputError:
        raise
    except Exception as error:  # formulae raises its own errors, and Python's, at what it cannot read
        raise InputError(f"The formula {formula!r} cannot be read: {error}") from error


@functools.cache
def _resolver() -> Any:
    """What turns a formula that was read into terms; unlike that of formulae it keeps parentheses inside calls."""

    class Parenthesised(LazyOperator):  # evaluated as the operation within
        def __init__(self, inner: Any) -> None:
            super().__init__(inner.op, *inner.args)

        def __str__(self) -> str:
            return f"({super().__str__()})"

        __hash__ = LazyOperator.__hash__

    class Calls(CallResolver):
        def visitGroupingExpr(self, expr: Any) -> Any:
            inner = super().visitGroupingExpr(expr)
            return Parenthesised(inner) if type(inner) is LazyOperator else inner

    class Terms(Resolver):
        def visitCallExpr(self, expr: Any) -> Any:
            return Term(CalledTerm(Calls(expr).resolve()))

    return Terms(None)


def _check_calls(node: Any, formula: str, longest: int, inside: bool) -> None:
    """Check that a part of a formula calls what it may alone, so that it computes numbers and does nothing else."""
    match node:
        case Call():
            _check_call(node, formula)
            parts, inside = node.args, True
        case Assign():
            if not inside:
                raise InputError(f"The formula {formula!r} has an = outside a call. Write ~ before what predicts.")
            parts = [node.value]
        case Grouping():
            parts = [node.expression]
        case Unary():
            parts = [node.right]
        case Binary():
            if node.operator.kind == "STAR_STAR":
                _check_power(node, formula, longest, inside)
            response = node.operator.kind == "TILDE" and isinstance(node.left, Variable)
            parts = [node.right] if response else [node.left, node.right]
        case Literal():
            if isinstance(node.value, int) and abs(node.value) >= _LARGEST:
                raise InputError(f"The formula {formula!r} has a whole number above 2^63. Write a smaller one.")
            parts = []
        case Variable() | QuotedName():
            if getattr(node, "level", None) is not None:
                raise InputError(
                    f"The formula {formula!r} has a level in brackets, {node.name.lexeme}[{node.level.value}], that is "
                    "not the response, where it would not be looked at. Name the column alone, and a level of it by a "
                    f"call, I({node.name.lexeme} == '{node.level.value}')."
                )
            parts = []
        case _:  # of a version of formulae that reads more
            raise InputError(f"The formula {formula!r} has a part that formulas here have not: {node}. Leave it out.")
    for part in parts:
        _check_calls(part, formula, longest, inside)


def _check_call(node: Any, formula: str) -> None:
    """Check that a call is of a function that formulas may call, with as many arguments as it takes."""
    name = node.callee.name.lexeme if isinstance(node.callee, Variable) and node.callee.level is None else None
    if name in _CODINGS or name in _TRANSFORMS:
        return
    ufunc = None if name is None else _UFUNCS.get(name.removeprefix("np."))
    if ufunc is None:
        told = "what another call or a quoted name gives" if name is None else name
        raise InputError(
            f"The formula {formula!r} calls {told}, which no formula may, as it could run any code. What it may call "
            f"is: {', '.join((*_TRANSFORMS, *_CODINGS))}, and NumPy's functions of numbers, as log(x) or np.log(x). "
            "Compute anything else before, and write it into a column of the table."
        )
    named = [arg.name.name.lexeme for arg in node.args if isinstance(arg, Assign)]
    if named or len(node.args) != ufunc.nin:  # further ones are arrays to write into
        got = f"the argument {named[0]}" if named else f"{len(node.args)} arguments"
        raise InputError(
            f"The formula {formula!r} calls {name} with {got}; it takes {ufunc.nin} number{'s' * (ufunc.nin > 1)} "
            "without a name. Leave out the rest."
        )


def _check_power(node: Any, formula: str, longest: int, inside: bool) -> None:
    """Check that a power can be computed: of numbers alone, or of terms, it may have no end."""
    if inside and not _names(node):
        raise InputError(f"The formula {formula!r} has a power of a number without a column. Write its value.")
    if not inside and isinstance(node.left, Variable | QuotedName | Call):
        raise InputError(
            f"The formula {formula!r} has a power of one term, and outside a call ** makes interactions, of one term "
            "none. Write the square of x as I(x ** 2)."
        )
    value = node.right.value if isinstance(node.right, Literal) else None
    if not inside and isinstance(value, int | float) and value > longest:
        raise InputError(
            f"The formula {formula!r} has the power {value} of terms, which are fewer. Write their number at most."
        )


def _names(node: Any) -> bool:
    """Whether a part of a formula has a column in it."""
    if isinstance(node, Variable | QuotedName):
        return True
    parts = (getattr(node, name, None) for name in ("left", "right", "expression", "value"))
    return any(map(_names, (*(part for part in parts if part is not None), *getattr(node, "args", ()))))


def designs_of(formula: str, terms: Sequence[Any], response: Any, frame: Any) -> Any:
    """The designs of some terms of a formula on a table, as formulae makes them."""
    model = Model(*sorted(terms, key=lambda term: term_name(term) != "1"), response=response)  # the intercept first
    try:
        with np.errstate(all="ignore"):  # what is not finite is refused by name
            return DesignMatrices(model, frame, Environment([_NAMESPACE]))
    except Exception as error:  # of formulae, of NumPy, or of a function that the formula calls
        raise InputError(f"The formula {formula!r} cannot be computed from the table: {error}") from error


def _variables(terms: Any) -> set[str]:
    return {name for term in terms if term_name(term) != "1" for name in term.var_names if name}
