"""The design of a model, from a formula and a table or from arrays, and the same of new rows.

`Formula` makes a `torchngvi.tables.effects.Design` of a table and remembers how: codings, centres of ``center(x)`` and
knots of ``bs(x)`` are those of the fit when new rows come.  `design_of_arrays` checks arrays and puts them together.

The library formulae reads formulas, which may call what computes numbers and nothing else.  Terms with a bar are found
here: effects of one pair of parentheses are correlated, those of different pairs, or of a double bar, are not.
"""

import contextlib
import copy
import functools
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.messages import hint, install, listed
from torchngvi.models import checks
from torchngvi.numerics.linalg import column_rank
from torchngvi.tables.families import MOST_CATEGORIES, Family
from torchngvi.tables.parts import Design, Factor

try:
    import numpy as np
    import pandas as pd

    from torchngvi.tables import cells
    from torchngvi.tables.cells import FORMULA, is_number
except ImportError:  # arrays need none of them
    np = pd = cells = None  # type: ignore[assignment]

try:
    import formulae
    from formulae.environment import Environment
    from formulae.expr import Assign, Binary, Call, Grouping, Literal, QuotedName, Unary, Variable
    from formulae.matrices import DesignMatrices
    from formulae.parser import Parser
    from formulae.resolver import Resolver
    from formulae.scanner import Scanner
    from formulae.terms import Call as CalledTerm
    from formulae.terms import Intercept, Model, NegatedIntercept, Term
    from formulae.terms.call_resolver import CallResolver, LazyOperator
except ImportError:  # the extra "formula" is not installed
    formulae = Resolver = CallResolver = LazyOperator = None

# ------------------------------------------------------------------------------------ arrays


def design_of_arrays(
    X: Any, y: Any, random: Any = None, *, offset: Any = None, weights: Any = None, names: Sequence[str] | None = None
) -> Design:
    """Make the design of a model from arrays, in float64, after all checks.

    Args:
        X: the design of the fixed effects, (N, p), dense, with a column of ones for an intercept.
        y: the outcome, (N,), or a tuple of it and what is known beside it, as the trials, each (N,).
        random: of grouping factors a mapping from their names to pairs (Z, groups), or to `Factor`: the design of the
            effects that vary, (N, r), and the group of each row, (N,), integers 0, ..., n - 1; a pair alone is a factor
            of the name "group".
        offset: what is added to the linear predictor, (N,).
        weights: factors of the log likelihood of each row, (N,), not negative.
        names: of the columns of X; by default "Intercept" for a first column of ones, and "x1", "x2", ...

    Returns:
        The design.

    Raises:
        InputError: arrays of other shapes, entries that are not finite, groups that are no numbers 0, ..., n - 1 or
            have no rows, columns of Z that depend on one another, or a column that is the same in all rows beside the
            intercept.

    >>> design = design_of_arrays([[1.0, 0.5], [1.0, 2.0]], [3.0, 4.0], ([[1.0], [1.0]], [0, 1]))
    >>> design.names, design.factors[0].levels
    (('Intercept', 'x1'), ('0', '1'))
    """
    given = {f"y[{place}]": one for place, one in enumerate(y)} if isinstance(y, tuple) else {"y": y}
    given = {name: _in_rows(name, one, X) for name, one in given.items()}
    offset, weights = _in_rows("offset", offset, X), _in_rows("weights", weights, X)
    random = {name: _factor_in_rows(one, X) for name, one in _named(random).items()}
    X = checks.numbers("X", X, None).double()
    if X.ndim != 2 or not len(X):
        raise InputError(f"X must be (N, p), one row an observation; got shape {tuple(X.shape)}.")
    ones = bool(X.shape[1]) and bool((X[:, 0] == 1).all())
    default = ["Intercept"] * ones + [f"x{k + 1}" for k in range(X.shape[1] - ones)]
    found = tuple(map(str, default if names is None else names))
    if len(found) != X.shape[1] or len(set(found)) < len(found):
        raise InputError(f"names must be {X.shape[1]} different names of the columns of X; got {list(found)}.")
    outcome = tuple(_per_row(name, one, X) for name, one in given.items())
    shift = X.new_zeros(len(X)) if offset is None else _per_row("offset", offset, X)
    places = (X == 1).all(0).nonzero()[:1, 0].tolist()
    _check_varying(X, found, places[0] if places else None, _BESIDE if places else "", "Leave it out of X.")
    factors = tuple(_factor(name, one, X) for name, one in random.items())
    return Design(X, found, factors, shift, outcome, _weights(weights, X))


def _per_row(name: str, values: Any, X: Tensor) -> Tensor:
    """One number for each row of X."""
    read = checks.numbers(name, values, X)
    if read.shape != (len(X),):
        raise InputError(f"{name} must have one entry for each of the {len(X)} rows; got shape {tuple(read.shape)}.")
    return read


def _weights(weights: Any, X: Tensor) -> Tensor:
    """The weights of the rows, checked."""
    like = X.new_ones(len(X))
    if weights is None:
        return like
    read = checks.row_weights(_per_row("weights", weights, X), like, X)
    if not bool((read > 0).any()):
        raise InputError("no row has a positive weight, of which nothing can be learned. Give at least one.")
    return read


def _named(random: Any) -> dict[str, Any]:
    """Grouping factors by their names."""
    if random is None:
        return {}
    if isinstance(random, Mapping):
        return {str(name): one for name, one in random.items()}
    if isinstance(random, Factor):
        return {random.name: random}
    if isinstance(random, list | tuple) and random and all(isinstance(one, Factor) for one in random):
        return {one.name: one for one in random}
    return {"group": random}


def _factor(name: str, given: Any, X: Tensor) -> Factor:
    """A grouping factor, checked."""
    levels, effects = None, None
    if isinstance(given, Factor):
        effects, levels, given = given.effects, given.levels, (given.Z, given.groups)
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise InputError(
            f"random holds a pair (Z, groups) for the factor {name}: the design (N, r) of its effects, and the group "
            f"of each row; got {type(given).__name__}."
        )
    Z, groups = checks.grouped(given[0], given[1], X)
    if effects is None:
        ones = bool((Z[:, 0] == 1).all())
        effects = ("Intercept",) * ones + tuple(f"z{k + 1}" for k in range(Z.shape[1] - ones))
    if levels is None:
        levels = tuple(map(str, range(int(groups.max()) + 1)))
    _check_effects(Z, effects, name)
    return Factor(name, effects, levels, Z, groups)


def _factor_in_rows(given: Any, rows: Any) -> Any:
    """A pair (Z, groups) with both in the order of the rows; anything else as it is."""
    if isinstance(given, Factor) or not isinstance(given, list | tuple) or len(given) != 2:
        return given
    return _in_rows("Z", given[0], rows), _in_rows("groups", given[1], rows)


def _in_rows(name: str, values: Any, rows: Any) -> Any:
    """The numbers of a pandas Series in the order of the rows of a table, by their index; others as they are."""
    if pd is None or not isinstance(values, pd.Series):
        return values
    wanted = rows.index if isinstance(rows, pd.DataFrame) else None
    if wanted is None or values.index.equals(wanted):
        return values.to_numpy()
    unique = values.index.is_unique and wanted.is_unique
    if not unique or len(values) != len(wanted) or not wanted.isin(values.index).all():
        raise InputError(
            f"{name} is a Series of {len(values)} entries whose index is not that of the {len(wanted)} rows of the "
            f"table. Give it the same labels, or hand in {name}.to_numpy(), one entry a row in their order."
        )
    return values.reindex(wanted).to_numpy()


def _check_effects(Z: Tensor, effects: Sequence[str], factor: str) -> None:
    """Check that the columns of the effects of a factor are linearly independent."""
    if (rank := column_rank(Z)) < Z.shape[1]:
        raise InputError(
            f"the {Z.shape[1]} columns of Z, the design of the random effects {listed(effects)} of {factor}, must be "
            f"linearly independent; their rank is {rank}. Leave a column out."
        )


def _check_varying(X: Tensor, names: Sequence[str], intercept: int | None, beside: str, remedy: str) -> None:
    """Check that no column is the same in all rows, beside an intercept; cells of a product may be empty."""
    same = (X[:1] == X).all(0).tolist() if len(X) > 1 else [False] * len(names)
    for place, (name, alike) in enumerate(zip(names, same, strict=True)):
        if place == intercept or ":" in name or not alike or not (beside or float(X[0, place]) == 0):
            continue
        raise InputError(_ALIKE.format(name, f"{float(X[0, place]):g}", len(X), beside, remedy))


_BESIDE = ", and the intercept is there already"
_ALIKE = "{} is {} in all {} rows{}: nothing can tell its effect. {}"


# ------------------------------------------------------------------------------------ what formulae reads

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
        """Take a formula apart, without a table."""
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
    """The text with quoted names and texts blotted out, so that its signs are those of the formula."""
    return re.sub(r"`[^`]*`|'[^']*'|\"[^\"]*\"", lambda found: "_" * len(found[0]), text)


def arguments(text: str) -> list[str]:
    """The arguments between the commas of a call."""
    bare, depth, parts, start = masked(text), 0, list[str](), 0
    for place, letter in enumerate(bare):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in (*parts, text[start:])]


def parenthesised(formula: str) -> list[tuple[str, str, bool]]:
    """Find the terms with a bar: what varies, over what, and whether the effects are independent, a double bar."""
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
        def visitBinaryExpr(self, expr: Any) -> Any:
            left, negated = _without_intercept(expr.left)
            if expr.operator.kind != "PIPE" or not negated:
                return super().visitBinaryExpr(expr)
            found = left.accept(self)
            if isinstance(found, Intercept):
                raise InputError("In (1 - 1 | group) nothing varies. Write (1 | group), or leave the term out.")
            has = NegatedIntercept() in getattr(found, "common_terms", ())  # 0 + in front
            return (found if has else NegatedIntercept() + found) | expr.right.accept(self)

        def visitCallExpr(self, expr: Any) -> Any:
            return Term(CalledTerm(Calls(expr).resolve()))

    return Terms(None)


def _without_intercept(node: Any) -> tuple[Any, bool]:
    """A sum of effects without - 1 and + 0, which formulae misreads in front of a bar, and whether it had one."""
    if not isinstance(node, Binary) or node.operator.kind not in ("PLUS", "MINUS"):
        return node, False
    left, negated = _without_intercept(node.left)
    if (node.operator.kind, getattr(node.right, "value", None)) in (("MINUS", 1), ("PLUS", 0)):
        return left, True
    return Binary(left, node.operator, node.right), negated


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
            "Compute anything else before, and write it into a column of the table; a column whose name has "
            "parentheses stands in backticks, `weight (kg)`."
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
    own = [term for term in terms if not isinstance(term, Intercept)]
    check_once(["Intercept", "1", *(term.name for term in own)], f"The formula {formula!r}")
    there = len(own) < len(terms)
    if there or intercept:
        _check_levels(own, frame, ", as the thresholds are" if intercept else _BESIDE)
    some = [*[Intercept()] * (there or intercept), *own]
    with computed(f"The formula {formula!r} cannot be computed from the table"):
        made = DesignMatrices(Model(*some, response=response), frame, Environment([_NAMESPACE]))
    check_once([label for term in made.common.terms.values() for label in term.labels], f"The formula {formula!r}")
    return made


def check_once(names: Sequence[str], what: str) -> None:
    """Check that no two columns of a design have one name, and none that of the intercept."""
    for name, count in Counter(names).items():
        if count > 1:
            some = "a column with the name of the intercept," if name in ("Intercept", "1") else "two columns named"
            raise InputError(f"{what} has {some} {name}: results could not tell the two apart. Rename the column.")


def _check_levels(terms: Sequence[Any], frame: Any, beside: str) -> None:
    """Check that no column that is a term has one entry in all rows, of which its coding would leave nothing."""
    for name in (name for term in terms if len(term.components) == 1 for name in _as_categories([term])):
        if name in frame and len(frame) > 1 and bool((frame[name] == frame[name].iloc[0]).all()):
            entry = cells.as_levels(frame[name].head(1)).iloc[0]
            raise InputError(_ALIKE.format(name, entry, len(frame), beside, "Leave it out of the formula."))


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


# ------------------------------------------------------------------------------------ formulas


class FormulaColumns(NamedTuple):
    """The columns of a table that a formula names, by their part."""

    response: tuple[str, ...]  # and those of trials and events
    predictors: tuple[str, ...]  # of the fixed effects, and of those that vary
    groups: tuple[str, ...]

    @classmethod
    def of(cls, formula: "str | Sides") -> "FormulaColumns":
        """Find them without a table."""
        sides = _sides(formula) if isinstance(formula, str) else formula
        pieces = [_Piece(text, sides.left) for text in _taken_apart(sides.left)[1]]
        terms = [*sides.terms, *(term for block in sides.blocks for term in block.terms)]
        return cls(
            tuple(sorted({name for piece in pieces for name in piece.columns})),
            tuple(sorted(variables(terms))),
            tuple(sorted({key for block in sides.blocks for key in block.keys})),
        )


def _sides(formula: Any) -> Sides:
    """The two sides of a formula, each term with components of its own, after checks that each is one of columns."""
    sides = Sides.of(formula)
    for term in (*sides.terms, *(term for block in sides.blocks for term in block.terms)):
        for part in getattr(term, "components", ()):
            if isinstance(getattr(part, "name", ""), int | float):
                raise InputError(
                    f"The formula {formula!r} has the number {part.name} as a term, or as a factor of one. Leave it "
                    f"out, or compute with it inside a call, as I({part.name} * x)."
                )
    # formulae gives the terms of a/b the same components, and the coding of one would name the columns of the other
    blocks = tuple(block._replace(terms=tuple(map(copy.deepcopy, block.terms))) for block in sides.blocks)
    return sides._replace(terms=tuple(map(copy.deepcopy, sides.terms)), blocks=blocks)


class Formula:
    """A formula on a table: the design that it makes of it, and of new rows.

    Args:
        formula: the response, fixed effects, and effects that vary over groups, K ≥ 0 factors of them:
            "y ~ x", "y ~ x + (1 + x | g)", "y ~ x + (1 | a/b)", "y ~ x + (1 + x || g)". The response is a column of
            numbers or two classes, "y[level]" for one class against the others, a call of numbers as "log(y)",
            "prop(s, n)" for s successes of n trials, or "censored(time, event)", the event 0 where it was not seen.
            "offset(log(n))" adds to the linear predictor.
        frame: a `pandas.DataFrame`.
        family: what the outcome is distributed as, which decides what a response may be. None reads any outcome as
            categories.
        weights: factors of the log likelihood of each row: the name of a column, or numbers (N,); a pandas Series is
            read by its index.
        positive: of two classes the one that counts as success; the one that sorts last by default.

    Attributes:
        design: of the table.
        formula: its text.
        response: the text of the response.
        outcomes: of categories their labels, in the order of the codes 0, 1, ... of y; else None.
        success: of two classes that are texts the one that counts as 1; else "".
        failure: the other one.
        why: for what reason that one counts as 1, as a clause, such as "sorts last".
        columns: the columns of the table that it names, by their part.
        table: these columns, as they were read.
        notes: sentences about what was read in a way that one may not expect.
        asked: the question whether an offset is meant to be a logarithm; else "".

    Raises:
        ImportError: without formulae.
        InputError: a formula that cannot be read, or has a part that formulas here have not; columns that are not
            there, miss values, or hold what is neither a number nor a category, all of them in one sentence each; a
            response that the family does not take; a column that is the same in all rows beside the intercept.

    >>> import pandas
    >>> table = pandas.DataFrame(
    ...     {"y": [1, 0, 2, 4], "time": [0.0, 1.0, 0.0, 1.0], "patient": ["ann", "ann", "bob", "bob"]}
    ... )
    >>> from torchngvi.tables.families import family_of
    >>> made = Formula("y ~ time + (1 + time | patient)", table, family_of("poisson"))
    >>> made.design.names, made.design.factors[0].effects, made.design.factors[0].levels
    (('Intercept', 'time'), ('Intercept', 'time'), ('ann', 'bob'))
    >>> made.of(table.head(1).assign(patient="eve")).factors[0].groups  # a new patient
    tensor([-1])
    """

    def __init__(
        self, formula: str, frame: Any, family: Family | None = None, *, weights: str | Any = None, positive: Any = None
    ) -> None:
        sides, self.formula, self.family, self.positive = _sides(formula), formula, family, positive
        self._response = _Response(formula, sides.left, family, positive)
        self.response = sides.left
        self.columns = columns = FormulaColumns.of(sides)
        both = sorted(set(self._response.parts[0].columns) & set(columns.predictors))
        if both:
            raise InputError(
                f"{listed(both)} stands on both sides of the formula {formula!r}, and would explain itself. Leave it "
                "out on the right."
            )
        self.weights = weights if isinstance(weights, str) else _in_rows("weights", weights, frame)
        named = [weights] if isinstance(weights, str) else []
        names = sorted({name for some in columns for name in some} | set(named))
        if named:
            cells.check_there(frame, named, "weights")
        cells.check_there(frame, names)
        cells.refuse(_of_several(frame, names))
        of_level = columns.response if "[" in sides.left else ()
        table, spaces = cells.stripped(frame[names], [*columns.groups, *of_level])
        terms = [*sides.terms, *(term for block in sides.blocks for term in block.terms)]
        categories = _as_categories(terms)
        found = cells.of_formula(formula, table, columns.response, columns.predictors, categories, FORMULA)
        plain = [name for name in categories if not any(repr(name) in fault for fault in found.faults)]
        cells.refuse([*cells.of_missing(frame, names), *found.faults, *_of_kinds(found.frame, plain)])
        totals = cells.of_totals(found.frame) or cells.of_totals(frame)
        self.table = frame = _in_order(cells.used(found.frame))
        if not len(frame):
            raise InputError("The table has no rows.")
        for name in (name for name in (*columns.groups, *categories) if name in frame and is_number(frame[name])):
            cells.check_finite(name, frame[name].to_numpy(dtype=float))
        self._thresholds = family is not None and not family.intercept
        if not (self._thresholds or any(getattr(term, "kind", "") != "offset" for term in sides.terms)):
            raise InputError(f"A model has at least one fixed effect; {formula!r} has none: leave out the 0.")
        self._common = designs_of(formula, sides.terms, None, frame, self._thresholds).common
        self._groupings = [_Grouping(block, formula, frame) for block in sides.blocks]
        y = self._response.of(frame, True)
        self.outcomes, self.success = self._response.outcomes, self._response.success
        self.failure, self.why = self._response.failure, self._response.why
        within = [grouping.common for grouping in self._groupings]
        own = frame[weights].to_numpy() if isinstance(weights, str) else self.weights
        self.design = self._design(np.asarray(self._common), within, frame, y, own)
        if not self.design.names and not self._thresholds:
            raise InputError(f"A model has at least one fixed effect; {formula!r} has none: leave out the 0.")
        place = self.design.names.index("Intercept") if "Intercept" in self.design.names else None
        beside = _BESIDE if place is not None else ", as the thresholds are" if self._thresholds else ""
        _check_varying(self.design.X, self.design.names, place, beside, "Leave it out of the formula.")
        for factor in self.design.factors:
            _check_effects(factor.Z, factor.effects, factor.name)
        self.asked = self._of_exposure()
        self.notes = (*spaces, *found.notes, *totals, *self._response.notes, *self._of_groups())

    def __repr__(self) -> str:
        return f"Formula({self.formula!r}, {len(self.table)} rows)"

    def __reduce__(self) -> tuple[Any, ...]:
        """What formulae has made holds modules, and is made again from the columns of the table."""
        again = partial(Formula, weights=self.weights, positive=self.positive)
        return again, (self.formula, self.table, self.family)

    def of(self, frame: Any, *, require_response: bool = False) -> Design:
        """Make the design of new rows.

        Args:
            frame: a table with the columns of the predictors. Without the columns of groups, and for groups that the
                fit did not have, numbers of groups are negative, another one for each label.
            require_response: whether the outcome is needed, as for a score; weights by name are those of this table
                then. Otherwise y is empty where the table does not have it, and weights are 1.

        Returns:
            The design; its y is what the table says, before `Family.checked`.

        Raises:
            InputError: columns that are not there, or hold what they did not hold in the fit.

        >>> import pandas
        >>> table = pandas.DataFrame({"y": [1.0, 2.0, 4.0], "x": [0.0, 1.0, 2.0]})
        >>> new = Formula("y ~ center(x)", table).of(pandas.DataFrame({"x": [3.0]}))
        >>> new.X.tolist(), new.y
        ([[1.0, 2.0]], ())
        """
        there, (response, predictors, groups) = hasattr(frame, "columns"), self.columns
        named = [self.weights] if require_response and isinstance(self.weights, str) else []
        needed = [*predictors, *(response if require_response else ()), *named]
        cells.check_there(frame, [*needed, *(key for key in groups if there and key in frame)])
        known = [name for name in dict.fromkeys((*needed, *groups)) if name in frame]
        known += [name for name in response if name in frame and name not in known]
        cells.refuse(_of_several(frame, known))
        frame = cells.stripped(frame[known], known)[0]
        frame = cells.as_numbers(frame, [name for name in needed if is_number(self.table[name])])
        cells.refuse(cells.of_missing(frame, [name for name in known if name in needed or name in groups]))
        frame = _in_order(cells.used(frame))
        parts = [self._common, *(grouping.within for grouping in self._groupings)]
        with computed(f"The new rows do not fit {self.formula!r}"):
            common, *within = (part.evaluate_new_data(frame).design_matrix for part in parts)
        weights = frame[named[0]].to_numpy() if named else None
        return self._design(common, within, frame, self._outcome(frame, require_response), weights)

    def _outcome(self, frame: Any, required: bool) -> tuple[Tensor, ...]:
        """The outcome of new rows; nothing where it is not needed and cannot be read."""
        if required:
            return self._response.of(frame)
        lacking = {name for name in self.columns.response if name not in frame or bool(frame[name].isna().any())}
        if not lacking:
            with contextlib.suppress(InputError):
                return self._response.of(frame)
        with contextlib.suppress(InputError):
            return self._response.trials(frame, lacking)
        return ()

    def _design(self, common: Any, within: Sequence[Any], frame: Any, y: tuple[Tensor, ...], weights: Any) -> Design:
        """The design of some rows, of what formulae has computed."""
        offset, columns, names = np.zeros(len(frame)), [np.zeros((len(frame), 0))], list[str]()
        for name, term in self._common.terms.items():
            part = _numbers(name, common[:, self._common.slices[name]], self.formula)
            if term.kind == "offset":
                offset = offset + part.sum(1)
            elif not (self._thresholds and name == "Intercept"):
                columns.append(part)
                names += term.labels
        factors = []
        for grouping, design in zip(self._groupings, within, strict=True):
            for name, at in grouping.within.slices.items():
                _numbers(name, design[:, at], self.formula)
            Z = torch.as_tensor(design.astype(float), device="cpu")
            factors.append(Factor(grouping.name, grouping.effects, grouping.levels, Z, grouping.numbered(frame)))
        X = torch.as_tensor(np.concatenate(columns, 1), device="cpu")

        return Design(X, tuple(names), tuple(factors), torch.as_tensor(offset, device="cpu"), y, _weights(weights, X))

    def _of_exposure(self) -> str:
        """The question whether an offset is meant to be a logarithm, where counts have a logarithmic link."""
        name = cells.offset_alone(self.formula)
        counts = self.family is not None and self.family.link == "log" and self.family.discrete
        if name is None or name not in self.table or not counts:
            return ""
        y = self.design.y[0].numpy()
        return cells.of_exposure(name, self.table[name].to_numpy(), y, f"offset(log({name}))") or ""

    def _of_groups(self) -> list[str]:
        """Notes of grouping factors whose groups are categories of the fixed effects too."""
        fixed = {"".join(name.split()) for name in self._common.terms} - {"Intercept"}
        found = []
        for grouping in self._groupings:
            factor, keys = grouping.block.factor, grouping.block.keys
            categories = len(keys) == 1 and not is_number(self.table[keys[0]])
            if "Intercept" in grouping.effects and (f"C({factor})" in fixed or (categories and factor in fixed)):
                found.append(
                    f"{factor} is both a fixed effect and a grouping factor: its levels explain all that "
                    f"(1 | {factor}) could, and the priors alone part the two. Leave one of them out"
                )
        return found

    # -------------------------------------------------------------------------------- saved

    def state(self) -> dict[str, Any]:
        """Return what `Formula.of_state` makes the same formula of, in lists, texts and numbers, as JSON has them.

        Raises:
            InputError: if a column holds what is no text and no number, such as tuples.

        >>> import json, pandas
        >>> made = Formula("y ~ kind", pandas.DataFrame({"y": [1.0, 2.5, 3.0], "kind": ["a", "b", "a"]}))
        >>> again = Formula.of_state(json.loads(json.dumps(made.state())))
        >>> again.design.X.equal(made.design.X), again.design.names
        (True, ('Intercept', 'kind[b]'))
        """
        named = self.weights is None or isinstance(self.weights, str)
        return {
            "formula": self.formula,
            "columns": {str(name): _saved(name, self.table[name]) for name in self.table},
            "weights": self.weights if named else self.design.weights.tolist(),
            "positive": self.positive.item() if hasattr(self.positive, "item") else self.positive,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any], family: Family | None = None) -> "Formula":
        """Make a formula of what `state` has returned."""
        table = pd.DataFrame({name: _restored(column) for name, column in state["columns"].items()})
        return cls(state["formula"], table, family, weights=state["weights"], positive=state["positive"])


def _of_several(frame: Any, names: Sequence[str]) -> list[str]:
    """What is wrong with columns whose cells are lists or the like: sentences."""
    faults = []
    for name in names:
        column = frame[name]
        cells_of = column if str(column.dtype) == "object" else ()
        odd = next((cell for cell in cells_of if isinstance(cell, list | set | dict | np.ndarray | Tensor)), None)
        if odd is not None:
            faults.append(
                f"column {name!r} holds cells of several values, as a {type(odd).__name__}. Write one number or text "
                "into each cell, as table.explode does."
            )
    return faults


def _as_categories(terms: Sequence[Any]) -> list[str]:
    """The columns that terms take as they are, or by C(..), and not within a call that computes numbers."""
    parts = [part for term in terms for part in getattr(term, "components", ())]
    calls = [getattr(getattr(part, "call", None), "callee", "C") for part in parts]
    codings = [part for part, call in zip(parts, calls, strict=True) if call in ("C", "S", "T")]
    return sorted({name for part in codings for name in part.var_names if name})


def _of_kinds(frame: Any, names: Sequence[str]) -> list[str]:
    """What is wrong with columns of both numbers and texts, which formulae cannot put in an order: sentences."""
    faults = []
    for name in names:
        column = frame[name] if name in frame else pd.Series(dtype=float)
        kinds = {isinstance(cell, str) for cell in column.dropna()} if str(column.dtype) == "object" else set()
        if len(kinds) == 2:
            first = [next(cell for cell in column.dropna() if isinstance(cell, str) is kind) for kind in (False, True)]
            faults.append(
                f"column {name!r} holds both numbers and texts, such as {first[0]!r} and {first[1]!r}. Make them one "
                f"kind: table[{name!r}].astype(str) for categories, or pandas.to_numeric(..) for numbers."
            )
    return faults


def _in_order(frame: Any) -> Any:
    """The table with ordered categories, of which formulae keeps the order, and numbers of 64 bits as in NumPy."""
    found = {}
    for name, column in frame.items():
        kind = getattr(column.dtype, "kind", "O")
        if str(column.dtype) == "category":
            found[name] = column.cat.as_ordered()
        # an 8-bit x of 5 would make I(x - 10) 251, and a 32-bit one log(x) of seven digits
        elif kind in "iuf" and not column.isna().any():
            wide = kind == "u" and len(column) > 0 and column.max() >= 2**63
            # nor does formulae take logarithms of columns of pandas' own dtypes
            found[name] = column.astype("float64" if kind == "f" else "uint64" if wide else "int64")
    return frame.assign(**found) if found else frame


def _numbers(name: str, values: Any, formula: str) -> Any:
    """The columns of a term as finite numbers."""
    try:
        part = np.asarray(values).astype(float)
    except ValueError as error:
        raise InputError(f"A column of {formula!r} is not of the kind that it was in the fit: {error}.") from error
    cells.check_finite(name, part)
    return part


def _saved(name: Any, column: Any) -> dict[str, Any]:
    """A column in lists, texts and numbers."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        categories = _saved(name, column.cat.categories.to_series())
        return {"codes": column.cat.codes.tolist(), "categories": categories, "ordered": bool(column.cat.ordered)}
    values, dtype = column.tolist(), str(column.dtype)
    if column.dtype.kind in "mM":
        values = column.astype(str).tolist()
    elif not all(isinstance(value, str | int | float | bool) for value in values):
        raise InputError(
            f"Column {name!r} cannot be saved: it holds what is no text and no number. Write texts into it."
        )
    return {"values": values, "dtype": dtype}


def _restored(saved: Mapping[str, Any]) -> Any:
    """The column that `_saved` has written."""
    if "codes" in saved:
        categories = pd.Index(_restored(saved["categories"]))
        return pd.Series(pd.Categorical.from_codes(saved["codes"], categories, ordered=saved["ordered"]))
    return pd.Series(saved["values"], dtype=saved["dtype"])


class _Grouping:
    """One block on a table: the design of its effects, and the number of the group of each row."""

    def __init__(self, block: Block, formula: str, frame: Any) -> None:
        self.block, self.name = block, block.name
        self.within = designs_of(formula, block.terms, None, frame).common
        if any(term.kind == "offset" for term in self.within.terms.values()):
            raise InputError(f"The formula {formula!r} has an offset that varies over groups. Write it outside.")
        self.common = np.asarray(self.within)
        self.effects = tuple(label for term in self.within.terms.values() for label in term.labels)
        self._known: list[Any] = []  # of each column the labels, in order
        codes = []
        for key in block.keys:
            code, labels = pd.factorize(frame[key].astype(object))
            known = pd.Index(sorted(labels, key=_by_kind), dtype=object)
            self._known.append(known)
            codes.append(known.get_indexer(pd.Index(labels, dtype=object))[code])
        self._sizes = [len(labels) for labels in self._known]
        self._there = np.unique(np.ravel_multi_index(codes, self._sizes))  # of all combinations
        places = zip(*np.unravel_index(self._there, self._sizes), strict=True)
        columns = [[labels[at] for labels, at in zip(self._known, row, strict=True)] for row in places]
        self.levels = tuple(":".join(map(str, row)) for row in columns)

    def numbered(self, frame: Any) -> Tensor:
        """The number of the group of each row; of groups that the fit had not -1, -2, ..., and -1 without columns."""
        if any(key not in frame for key in self.block.keys):
            return torch.full((len(frame),), -1, device="cpu")
        codes = []
        for key, known in zip(self.block.keys, self._known, strict=True):
            labels = frame[key].astype(object)
            kinds = {_kind(label) for label in known}
            new = pd.unique(labels)
            if len(new) and not kinds & {_kind(label) for label in new}:  # as numbers that have become text in a file
                raise InputError(
                    f"The groups {self.block.factor} of the fit are as {known[0]!r} ({type(known[0]).__name__}), those "
                    f"of the table as {new[0]!r} ({type(new[0]).__name__}). Convert the column; leave it out for "
                    "groups that the fit had not."
                )
            codes.append(known.get_indexer(pd.Index(labels, dtype=object)))
        code = np.ravel_multi_index([np.maximum(some, 0) for some in codes], self._sizes)
        place = np.minimum(np.searchsorted(self._there, code), len(self._there) - 1)
        seen = (self._there[place] == code) & np.all([some >= 0 for some in codes], axis=0)
        labels = frame[list(self.block.keys)].astype(object)
        new = pd.factorize(pd.MultiIndex.from_frame(labels[~seen]))[0]
        place[~seen] = -1 - new
        return torch.as_tensor(place, device="cpu")


def _kind(label: Any) -> str:
    """The kind of a label of a group; numbers are of one kind."""
    return "" if isinstance(label, int | float | np.number) and not isinstance(label, bool) else type(label).__name__


def _by_kind(label: Any) -> tuple[str, Any]:
    """What labels are sorted by: numbers before texts."""
    return _kind(label), label


# ------------------------------------------------------------------------------------ responses


class _Piece:
    """One column of a response: a column, a level of one, a call, or a number."""

    def __init__(self, text: str, formula: str) -> None:
        self.text, self.formula, self.number, self.level, self.name = text, formula, None, None, ""
        self.columns: tuple[str, ...] = ()
        self._component: Any = None
        try:
            self.number = float(text)
            return
        except ValueError:
            pass
        text = re.sub(r"\[\s*([-+.\w]+)\s*\]$", r"['\1']", text)  # of numbers too, y[1]
        bare, inner = "", masked(text)
        while bare != inner:  # without what stands in parentheses
            bare, inner = inner, re.sub(r"\([^()]*\)|\[[^][]*\]", "", inner)
        model = described(f"I({text}) ~ 1" if re.search(r"[-+*/<>=]", bare) else f"{text} ~ 1", formula)
        if model.response is None or len(model.response.term.components) != 1:
            raise InputError(f"The response {text!r} of {formula!r} is one column, or a call of numbers.")
        self._response = model.response
        component = model.response.term.components[0]
        self.columns = tuple(sorted(name for name in component.var_names if name))
        if hasattr(component, "reference"):
            self.name, self.level = component.name, component.reference
        else:
            self._component = component

    def of(self, frame: Any, first: bool = False) -> Any:
        """The entries on a table: a column as it is, or the numbers of a call."""
        if self.number is not None:
            return pd.Series(np.full(len(frame), self.number))
        if self._component is None:
            return frame[self.name]
        if first:
            designs_of(self.formula, [], self._response, frame, True)
            values = self._component.value
            kind = self._component.kind
            if kind != "numeric" or np.ndim(values) > 1 and np.shape(values)[1] > 1:
                raise InputError(f"The response is one number a row; {self.text} is none.")
        else:
            with computed(f"The new rows do not fit {self.formula!r}"):
                values = self._component.eval_new_data(frame)
        values = np.asarray(values, dtype=float).reshape(len(frame))
        cells.check_finite(self.text, values)
        return pd.Series(values)


def usual_family(formula: Any, positive: Any = None) -> str:
    """The family of a formula where none is named: of two classes where it says which of them counts as success."""
    beside, texts = _taken_apart(_sides(formula).left)
    names_one = not beside and _Piece(texts[0], formula).level is not None
    return "bernoulli" if names_one or positive is not None else "gaussian"


def _taken_apart(left: str) -> tuple[str, list[str]]:
    """What stands beside the outcome of a response, "trials", "event" or "", and its parts."""
    name, _, rest = left.partition("(")
    beside = "trials" if name.strip() in OF_TRIALS else "event" if name.strip() == OF_SURVIVAL else ""
    if not beside or not rest.rstrip().endswith(")"):
        return "", [left]
    return beside, arguments(rest.rstrip()[:-1])


class _Response:
    """The left-hand side of a formula, which makes y of tables."""

    def __init__(self, formula: str, left: str, family: Family | None, positive: Any) -> None:
        self.formula, self.left, self.family, self.positive = formula, left, family, positive
        self.beside, texts = _taken_apart(left)
        if self.beside:
            if len(texts) != 2:
                takes = "prop(successes, trials)" if self.beside == "trials" else "censored(time, event)"
                raise InputError(f"The response {left!r} is to have two parts, as {takes}; it has {len(texts)}.")
            if family is None or self.beside not in family.extra:
                takes = "binomial or beta_binomial" if self.beside == "trials" else "weibull or lognormal"
                said = "a model of categories" if family is None else f"the {family.name} family"
                raise InputError(
                    f"The response {left!r} has {self.beside if self.beside == 'trials' else 'events'}, and {said} "
                    f"takes an outcome alone. Choose a family such as {takes}."
                )
        self.parts = [_Piece(text, formula) for text in texts]
        self.outcomes: tuple[str, ...] | None = None
        self.success, self.failure, self.why, self.notes = "", "", "", list[str]()
        self._levels: list[Any] = []
        self._seen: str | None = None
        binary = family is not None and family.discrete and tuple(family.bounds) == (0.0, 1.0)
        self._categorical = family is None or not family.intercept or family.nominal
        self._two = binary or (family is not None and "trials" in family.extra and not self.beside)

    def trials(self, frame: Any, lacking: set[str]) -> tuple[Tensor, ...]:
        """The trials alone of new rows whose successes cannot be read; nothing of other outcomes, or without them."""
        if self.family is None or "trials" not in self.family.extra:
            return ()
        if not self.beside:
            return (torch.ones(len(frame), dtype=torch.float64, device="cpu"),)
        if lacking & set(self.parts[1].columns):
            return ()
        return (
            torch.tensor(self._plain(self.parts[1].text, self.parts[1].of(frame)), dtype=torch.float64, device="cpu"),
        )

    def of(self, frame: Any, first: bool = False) -> tuple[Tensor, ...]:
        """The outcome of new rows, or of those of the fit, the first, whose levels are those from then on."""
        values, *others = (part.of(frame, first) for part in self.parts)
        y = [self._outcome(values, first)]
        if self.family is not None and "trials" in self.family.extra:
            y.append(self._plain(self.parts[1].text, others[0]) if others else np.ones(len(frame)))
        elif self.family is not None and "event" in self.family.extra:
            y.append(self._event(others[0], first) if others else np.ones(len(frame)))
        return tuple(
            torch.tensor(one, dtype=torch.float64, device="cpu") for one in y
        )  # copies, which pandas may not share

    def _outcome(self, column: Any, first: bool) -> Any:
        """The codes of the outcome."""
        piece, name = self.parts[0], self.parts[0].text
        numbers = is_number(column) and not isinstance(column.dtype, pd.CategoricalDtype)
        values = self._plain(name, column) if numbers else None
        if piece.level is not None or self.positive is not None:
            return self._against(column, piece.level, first)
        if self._categorical:
            return self._categories(column, first)
        if values is not None:
            if first and self._two and len(found := np.unique(values)) == 2 and tuple(found) != (0.0, 1.0):
                self.failure, self.success, self.why = f"{found[0]:g}", f"{found[1]:g}", "is the larger"
            return values
        if first:
            self._levels = _levels_of(column)
        elif not self._levels:  # texts in the place of the numbers of the fit
            return self._plain(name, column)
        if not self._two or len(self._levels) != 2:
            shown = [*map(str, self._levels[:5]), *[".."] * (len(self._levels) > 5)]
            number = "two classes" if self._two else "a number"
            also = f"Name the one that counts as 1: {name}[{self._levels[-1]}]."
            if len(self._levels) > 2:
                also += " For ordered categories take the family 'ordinal', for others 'multinomial'."
            elif not self._two:
                also = "For two categories take the family 'bernoulli'."
            raise InputError(f"The response is {number}; {name} holds categories, {', '.join(shown)}. {also}")
        if first:
            last = "is the last category" if isinstance(column.dtype, pd.CategoricalDtype) else "sorts last"
            self.failure, self.success, self.why = *map(str, self._levels), last
        return self._codes(column)

    def _against(self, column: Any, level: Any, first: bool) -> Any:
        """1 where the outcome is of a level, and 0 elsewhere."""
        name = self.parts[0].name or self.parts[0].text
        if level is not None and self.positive is not None:
            raise InputError(
                f"{self.left} names the level that counts as success, and positive={self.positive!r} another time. "
                "Leave one of them out."
            )
        if self._categorical or not (level is not None or self._two):
            said = "categories" if self._categorical else "numbers"
            raise InputError(
                f"{self.positive if level is None else level!r} is to be the success, and the outcome is of {said}. "
                "Leave that out, or take the family 'bernoulli'."
            )
        texts = cells.as_levels(column)
        self.success = str(cells.as_levels(pd.Series([self.positive if level is None else level])).iloc[0])
        found = (texts == self.success).to_numpy()
        if first and not found.any():
            levels = sorted(map(str, pd.unique(texts)))
            raise InputError(
                f"{name} has no level {self.success!r}; it has {listed(levels)}.{hint(self.success, levels)}"
            )
        if first and not self._two:
            assert self.family is not None
            self.notes.append(
                f"{self.success!r} is 1 and any other outcome 0, fitted as numbers by the family {self.family.name!r}; "
                "for probabilities and odds ratios take the family 'bernoulli'."
            )
        return found.astype(float)

    def _categories(self, column: Any, first: bool) -> Any:
        """The codes 0, 1, ... of categories; of a family of ordered ones their order has to be known."""
        name = self.parts[0].text
        if first:
            self._levels = _levels_of(column)
            if len(self._levels) < 2:
                raise InputError(f"The response has two categories or more; {name} is {self._levels[0]} in all rows.")
            if len(self._levels) > MOST_CATEGORIES:
                raise InputError(
                    f"The response has categories; {name} has {len(self._levels)} different values, more than "
                    f"{MOST_CATEGORIES}. Put rare ones together, or take a family of numbers, such as gaussian."
                )
            self.outcomes = tuple(cells.as_levels(pd.Series(self._levels)))
            texts = not isinstance(column.dtype, pd.CategoricalDtype) and not is_number(column)
            if texts and self.family is not None and not self.family.nominal:
                order = " < ".join(self.outcomes)
                if not all(label[:1].isdigit() for label in self.outcomes):
                    raise InputError(
                        f"The order of the categories of {name} is not known: as texts they sort {order}. Begin each "
                        f"with its number, as '1 {self.outcomes[0]}', or make a pandas.Categorical with their order."
                    )
                self.notes.append(f"the categories of {name} are in the order {order}, as they sort")
        return self._codes(column)

    def _codes(self, column: Any) -> Any:
        """The places among the levels of the fit."""
        entries = column.astype(object)
        codes = pd.Index(self._levels, dtype=object).get_indexer(pd.Index(entries))
        if (codes < 0).any():
            raise InputError(
                f"{self.parts[0].text} holds {entries.iloc[int((codes < 0).argmax())]!r}, and the fit had "
                f"{listed([str(level) for level in self._levels])}. Leave those rows out."
            )
        return codes.astype(float)

    def _event(self, column: Any, first: bool) -> Any:
        """1 where an event was seen, and 0 where the time is censored."""
        part = self.parts[1]
        if is_number(column) and part.level is None and not isinstance(column.dtype, pd.CategoricalDtype):
            return self._plain(part.text, column)
        levels = list(cells.as_levels(pd.Series(_levels_of(column))))
        texts = cells.as_levels(column)
        if first and part.level is not None:
            self._seen = str(part.level)
            if self._seen not in levels:
                raise InputError(f"{part.name} has no level {self._seen!r}; it has {listed(levels)}.")
        elif first:
            if {"left", "interval"} & set(levels):
                raise InputError(
                    f"{part.text} holds {listed(levels)}; only times that are censored on the right are read here. "
                    "Leave the others out."
                )
            if len(levels) > 2:
                raise InputError(
                    f"An event was seen or not; {part.text} holds {listed(levels)}. Name the one that was seen: "
                    f"{part.text}[{levels[-1]}]."
                )
            self._seen = "none" if set(levels) <= {"none", "right"} else levels[-1]
            self.notes.append(f"{part.text} {self._seen!r} counts as an event that was seen, the rest as censored")
        return (texts == self._seen).to_numpy().astype(float)

    def _plain(self, name: str, column: Any) -> Any:
        """A column of finite numbers."""
        try:
            values = column.to_numpy(dtype=float)
        except (TypeError, ValueError) as error:
            raise InputError(f"{name} must be numbers; it holds {column.iloc[0]!r} in the first row.") from error
        bad = ~np.isfinite(values)
        if bad.any():
            raise InputError(
                f"{name} is not finite in {bad.sum()} of {len(bad)} rows, the first of them row {int(bad.argmax())}, "
                "counted from 0. Correct or leave out those rows."
            )
        return values


def _levels_of(column: Any) -> list[Any]:
    """The levels of a column: of categories in their order, otherwise sorted."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        return list(column.cat.remove_unused_categories().cat.categories)
    return sorted(pd.unique(column), key=_by_kind)
