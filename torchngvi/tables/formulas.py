"""Formulas as the library formulae reads them: the terms, the columns that they name, and the designs of these.

A formula may call what computes numbers and nothing else.  The terms with a bar, "(1 + x | subject)", "(1 | a/b)" and
"(1 + x || subject)", are found here: effects of one pair of parentheses are correlated, and those of different pairs,
or of a double bar, are not.  The block design that formulae would make of them, a column for each effect of each group,
is never asked for.
"""

import contextlib
import functools
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from torchngvi.errors import InputError
from torchngvi.messages import install

try:
    import formulae
    import numpy as np
    from formulae.environment import Environment
    from formulae.expr import Assign, Binary, Call, Grouping, Literal, QuotedName, Unary, Variable
    from formulae.matrices import DesignMatrices
    from formulae.parser import Parser
    from formulae.resolver import Resolver
    from formulae.scanner import Scanner
    from formulae.terms import Call as CalledTerm
    from formulae.terms import Intercept, Model, Term
    from formulae.terms.call_resolver import CallResolver, LazyOperator
except ImportError:  # the extra "formula" is not installed
    formulae = Resolver = CallResolver = LazyOperator = None
    np = None  # type: ignore[assignment]

# what a formula may call: functions of formulae by name, and of NumPy those that map numbers to numbers entry by entry
_CODINGS = ("C", "S", "T", "Sum", "Treatment", "binary", "B")
_TRANSFORMS = ("I", "scale", "standardize", "center", "bs", "cr", "cc", "tp", "poly", "offset")
OF_TRIALS, OF_SURVIVAL = ("prop", "p", "proportion"), "censored"  # calls that stand for an outcome of two columns
_ELSEWHERE = {  # names of other libraries, and what does the same here
    "as.factor": "Write C(x) for categories.",
    "factor": "Write C(x) for categories.",
    "categorical": "Write C(x) for categories.",
    "cbind": "Write prop(successes, trials) for successes of trials.",
    "cens": "Write censored(time, event) for times that may be censored.",
    "fo": "Write bs(x, df=4) for a smooth function of x.",
    "gp": "Gaussian processes are not there; write bs(x, df=8) for a smooth function of x.",
    "gr": "Groups that are related by a matrix are not there; write (1 | g).",
    "hsgp": "Gaussian processes are not there; write bs(x, df=8) for a smooth function of x.",
    "mm": "Rows that belong to several groups are not there.",
    "mo": "Monotonic effects are not there; write C(x) for categories, or the numbers themselves.",
    "ns": "Write cr(x, df=4) for a natural cubic spline.",
    "s": "Write bs(x, df=4) for a smooth function of x.",
    "Surv": "Write censored(time, event) for times that may be censored.",
    "te": "Write bs(x, df=4) * bs(z, df=4) for a smooth function of two columns.",
    "trials": "Write prop(successes, trials) on the left for successes of trials.",
    "weights": "Hand in weights= by the name of their column.",
}
_ON_THE_LEFT = {  # calls of bambi and brms around an outcome, and what does the same here
    "weighted": "Write {} alone, and hand in weights= by the name of their column.",
    "truncated": "A truncated outcome is not there. Write {} alone, or censored(time, event) for times that may be "
    "censored; weights= counts rows more or less.",
}
_SIGNS = (  # that formulas of other libraries have
    (re.compile(r"\^"), "^", "Write I(x ** 2) for a square, and (a + b) ** 2 for all products of two."),
    (re.compile(r"%in%"), "%in%", "Write a:b for the groups of a within b."),
    (re.compile(r"(?<![\w)])\.(?![\w])"), "a point for all other columns", "Name the columns."),
    (re.compile(r"<-|:="), "an assignment", "Compute the column before."),
)
_UFUNCS: dict[str, Any] = {
    name: ufunc
    for name, ufunc in (vars(np).items() if np else ())
    if isinstance(ufunc, np.ufunc) and ufunc.nout == 1 and ufunc.signature is None
}
_NAMESPACE = {"np": SimpleNamespace(**_UFUNCS), **_UFUNCS}  # beside the functions of formulae, all that there is


class Block(NamedTuple):
    """Effects that vary together over the groups of one factor."""

    name: str  # of the factor, from its second block on with the effects behind it, as "school.x"
    factor: str
    keys: tuple[str, ...]  # columns that the groups are of
    terms: tuple[Any, ...]  # of formulae


class Sides(NamedTuple):
    """A formula, taken apart."""

    left: str  # the text of its response
    terms: tuple[Any, ...]  # those of the fixed effects, of formulae
    blocks: tuple[Block, ...]  # the effects that vary over groups

    @classmethod
    def of(cls, formula: Any) -> "Sides":
        """Take a formula apart, without a table.

        >>> sides = Sides.of("y[yes] ~ log(x) + (1 + t | school/room)")
        >>> sides.left, [term_name(term) for term in sides.terms], [block.name for block in sides.blocks]
        ('y[yes]', ['1', 'log(x)'], ['school', 'school:room'])
        """
        if not isinstance(formula, str) or not formula.strip():
            got = repr(formula) if isinstance(formula, str) else type(formula).__name__
            raise InputError(f"A formula is a text, as 'y ~ x + (1 | group)'; got {got}.")
        bare = masked(formula)
        place = bare.find("~")
        if place < 0 or not formula[:place].strip():
            raise InputError(f"A formula begins with its response, as y ~ x + (1 | group); got {formula!r}.")
        for sign, name, remedy in _SIGNS:
            if sign.search(bare):
                raise InputError(f"The formula {formula!r} has {name}, which formulas here have not. {remedy}")
        left, right = formula[:place].strip(), formula[place + 1 :]
        if call := re.match(rf"({'|'.join(_ON_THE_LEFT)})\s*\(([^,()]*)", left):
            raise InputError(
                f"The formula {formula!r} has {call[1]}(..) on the left, which formulas here have not. "
                f"{_ON_THE_LEFT[call[1]].format(call[2].strip() or 'y')}"
            )
        if "|" in bare[:place]:
            raise InputError(
                f"The formula {formula!r} has a bar in its response. Write prop(successes, trials) for successes of "
                "trials, and censored(time, event) for times that may be censored."
            )
        model = described(f"y ~ {right.replace('||', '|')}", formula)
        return cls(left, tuple(model.common_terms), tuple(_blocks(right, formula)))


def masked(text: str) -> str:
    """The text with quoted names and texts blotted out, so that its signs are those of the formula.

    >>> masked("`a~b` ~ C(x)")
    '_____ ~ C(x)'
    """
    return re.sub(r"`[^`]*`|'[^']*'|\"[^\"]*\"", lambda found: "_" * len(found[0]), text)


def arguments(text: str) -> list[str]:
    """The arguments between the commas of a call.

    >>> arguments("log(s, 2), `a,b`")
    ['log(s, 2)', '`a,b`']
    """
    bare, depth, parts, start = masked(text), 0, list[str](), 0
    for place, letter in enumerate(bare):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in (*parts, text[start:])]


def parenthesised(formula: str) -> list[tuple[str, str, bool]]:
    """Find the terms with a bar: what varies, over what, and whether the effects are independent, a double bar.

    >>> parenthesised("y ~ log(x) + (1 + x || g) + (1 | a:b)")
    [('1 + x', 'g', True), ('1', 'a:b', False)]
    """
    found: list[tuple[str, str, bool]] = []
    opened: list[int] = []
    bars: dict[int, int] = {}  # of the parenthesis that begins there, its first bar
    bare = masked(formula)
    for place, letter in enumerate(bare):
        if letter == "(":
            opened.append(place)
        elif letter == "|" and opened:
            bars.setdefault(opened[-1], place)
        elif letter == ")" and opened:
            begin = opened.pop()
            if begin in bars:
                bar = bars[begin]
                double = bare[bar : bar + 2] == "||"
                left, right = formula[begin + 1 : bar], formula[bar + 1 + double : place]
                found.append((left.strip(), right.strip(), double))
    return found


def _blocks(right: str, formula: str) -> list[Block]:
    """The blocks of effects that vary over groups, on the right of a formula."""
    blocks: list[Block] = []
    for left, over, independent in parenthesised(right):
        by_factor: dict[str, list[Any]] = {}
        for term in described(f"y ~ ({left} | {over})", formula).group_terms:
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


def variables(terms: Iterable[Any]) -> set[str]:
    """The columns that terms name."""
    found: set[str] = set()
    for component in (part for term in terms for part in getattr(term, "components", ())):
        coding = getattr(getattr(component, "call", None), "callee", "") == "C"  # C(x, Sum) names no column Sum
        found |= set(component.var_names) - (set(_CODINGS) if coding else set())
    return found - {""}


# ------------------------------------------------------------------------------------ what formulae reads


def described(text: str, formula: str) -> Any:
    """What a text says, as formulae tells it; messages show the formula that it is a part of."""
    if formulae is None:
        raise ImportError(f"A formula needs the library formulae: {install('formula')}.", name="formulae")
    try:
        tokens = Scanner(text).scan()
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


def _check_calls(node: Any, formula: str, longest: int, inside: bool, largest: int = 2**63) -> None:
    """Check that a part of a formula calls what it may alone, so that it computes numbers and does nothing else."""
    # largest: of a whole number in a formula, beyond which NumPy computes with objects of Python
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
            if isinstance(node.value, int) and abs(node.value) >= largest:
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
    if name in (*OF_TRIALS, OF_SURVIVAL):
        raise InputError(f"The formula {formula!r} has {name} within another term; it stands alone, as the response.")
    if name in _ELSEWHERE:
        raise InputError(f"The formula {formula!r} has {name}(..), which formulas here have not. {_ELSEWHERE[name]}")
    ufunc = None if name is None else _UFUNCS.get(name.removeprefix("np."))
    if ufunc is None:
        called = "what another call or a quoted name gives" if name is None else name
        raise InputError(
            f"The formula {formula!r} calls {called}, which no formula may, as it could run any code. What it may call "
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


# ------------------------------------------------------------------------------------ designs of a table


def designs_of(formula: str, terms: Sequence[Any], response: Any, frame: Any, intercept: bool = False) -> Any:
    """The designs of some terms of a formula on a table, as formulae makes them, perhaps with an intercept added."""
    some = [*terms, *[Intercept()] * (intercept and not any(term_name(term) == "1" for term in terms))]

    model = Model(*sorted(some, key=lambda term: term_name(term) != "1"), response=response)  # the intercept first
    with computed(f"The formula {formula!r} cannot be computed from the table"):
        return DesignMatrices(model, frame, Environment([_NAMESPACE]))


@contextlib.contextmanager
def computed(what: str) -> Iterator[None]:
    """A block in which errors of formulae, of NumPy or of a function that a formula calls become one sentence."""
    try:
        # what is not finite is refused by name; formulae prints its errors too
        with np.errstate(all="ignore"), contextlib.redirect_stdout(io.StringIO()):
            yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{what}: {str(error).rstrip('.') or type(error).__name__}.") from error
