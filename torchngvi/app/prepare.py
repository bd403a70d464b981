"""From a table and settings to the formula and the rows of a fit, and the same of new rows."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from shlex import join, quote
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn.model_selection import train_test_split

from torchngvi.app.readers import Read
from torchngvi.app.settings import Settings
from torchngvi.errors import InputError
from torchngvi.messages import SHOWN, hint, listed
from torchngvi.tables import cells as checks
from torchngvi.tables.cells import COMMAND, Door, as_levels, cleaned, is_number, refuse
from torchngvi.tables.design import FormulaColumns
from torchngvi.tables.formulas import Sides, variables

CLASSES = ("bernoulli", "probit")  # families of two classes


@dataclass(frozen=True)
class Columns:
    """What a run keeps of its table, so that new rows are prepared alike; it is in posterior.pt."""

    formula: str
    needed: list[str]  # columns that new rows must have
    groups: list[str] = field(default_factory=list)  # columns of groups, which they may have
    levels: dict[str, list[str]] = field(default_factory=dict)  # of columns of categories, the baseline first
    fill: dict[str, Any] = field(default_factory=dict)  # what stands for a missing entry
    known: list[str] = field(default_factory=list)  # other columns of the table, which new rows may have
    plain: bool = True  # whether the formula was made of all columns

    @classmethod
    def read(cls, found: Any) -> "Columns":
        """The columns from a dict of a file, after a check that each has its type."""
        usual = asdict(cls("", []))
        try:
            right = all(type(found[key]) is type(value) for key, value in usual.items()) and len(found) == len(usual)
            lists = [found["needed"], found["groups"], found["known"], found["levels"], found["fill"]]
            right &= all(type(text) is str for texts in (*lists, *found["levels"].values()) for text in texts)
            right &= all(type(value) in (str, int, float, bool) for value in found["fill"].values())
            right &= all(type(levels) is list for levels in found["levels"].values())
        except (TypeError, AttributeError, KeyError, IndexError, RuntimeError):
            right = False
        if not right:
            raise InputError("its columns are not as a run writes them.")
        return cls(**found)

    def of(self, frame: Any, name: str, drop: Iterable[str] | None = None) -> pd.DataFrame:
        """New rows as the fit has them; a table from a file has a name, from which columns are left out by flags."""
        if not isinstance(frame, pd.DataFrame):
            got = type(frame).__name__
            raise InputError(f"predict takes a pandas DataFrame with the columns of the fit; got {got}.")
        there = [str(column) for column in frame.columns]
        lacking = [column for column in self.needed if column not in there]
        if lacking:
            raise InputError(
                f"{name} lacks {listed(lacking)}, which the model predicts from.{hint(lacking[0], there)} "
                f"It has {listed(there) or 'no columns'}. Add the column, or correct its name."
            )
        trials = FormulaColumns.of(self.formula).response if self.formula.startswith("prop(") else ()
        used = list(dict.fromkeys([*self.needed, *(column for column in (*self.groups, *trials) if column in there)]))
        others = sorted(set(there) - {*used, *self.known})
        if others:
            some = others[:SHOWN]
            how = f"frame.drop(columns={some!r})" if drop is None else " ".join(f"--drop {quote(one)}" for one in some)
            raise InputError(
                f"{name} has {listed(others)}, which the fit has not seen. Leave it out ({how}), or "
                "check that this is the right table."
            )
        frame = frame.set_axis(there, axis=1)[used]
        for column, levels in self.levels.items():
            entries = as_levels(frame[column]).fillna(self.fill.get(column))
            unseen = entries[~entries.isin(levels) & entries.notna()]
            if len(unseen):
                raise InputError(
                    f"column {column!r} has the level {unseen.iloc[0]!r} in {len(unseen)} of {len(entries)} rows, "
                    f"which the fit has not seen; its levels are {listed(levels)}. "
                    "Correct those rows, leave them out, or fit again with rows of that level."
                )
            frame = frame.assign(**{column: pd.Categorical(entries, levels)})
        return _filled(frame, self.fill)[0]

    def shown(self, name: str) -> str:
        """The name of a coefficient in a report: ``sex=male`` where the formula was made of all columns."""
        column, _, level = name.partition("[")
        return f"{column}={level.removesuffix(']')}" if self.plain and column in self.levels else name


class Prepared(NamedTuple):
    """The rows of a fit."""

    train: pd.DataFrame  # with the response
    test: pd.DataFrame  # rows held out
    columns: Columns
    notes: tuple[str, ...]  # what was done with the table
    positive: str | None = None  # the class that is predicted, where one was chosen


def _filled(frame: pd.DataFrame, fill: dict[str, Any]) -> tuple[pd.DataFrame, dict[str, int]]:
    """The table without missing entries in these columns, and how many there were."""
    gaps = {name: int(frame[name].isna().sum()) for name in fill if name in frame}
    return frame.assign(**{name: frame[name].fillna(fill[name]) for name, n in gaps.items() if n}), gaps


def _filling(frame: pd.DataFrame, names: Iterable[str]) -> dict[str, Any]:
    """What stands for missing entries: medians of numbers, the commonest of all else."""
    found: dict[str, Any] = {}
    for name in names:
        there = frame[name].dropna()
        if not len(there):
            raise InputError(f"column {name!r} has no entry in the {len(frame)} training rows. Leave it out.")
        number = is_number(there) and not pd.api.types.is_bool_dtype(there)
        value = there.median() if number else there.mode().iloc[0]
        found[name] = value.item() if isinstance(value, np.generic) else value
    return found


def _split(frame: pd.DataFrame, s: Settings) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows of the fit and those held out, by scikit-learn's train_test_split."""
    if not s.held_out:
        return frame, frame.iloc[:0]
    try:
        train, test = train_test_split(frame, test_size=s.held_out, random_state=s.seed)
    except ValueError as error:
        raise InputError(
            f"{len(frame)} rows cannot be split with test_fraction {s.held_out:g}: both parts need at least one. "
            "Set test_fraction to 0."
        ) from error
    return train, test


def of(read: Read, s: Settings, family: str) -> Prepared:
    """The rows of a fit, and its formula."""
    if s.formula is None:
        return _of_target(read, s, family)
    sides = Sides.of(s.formula)
    groups = sorted({key for block in sides.blocks for key in block.keys})
    there = variables([*sides.terms, *(term for block in sides.blocks for term in block.terms)])
    needed = sorted(name for name in there if name in read.frame and name not in groups)
    dates = [n for n in groups if n in read.frame and getattr(read.frame[n].dtype, "kind", "O") in "mM"]
    train, test = _split(read.frame.assign(**{name: read.frame[name].astype(str) for name in dates}), s)
    fill = _filling(train, needed) if s.impute else {}
    (train, gaps), (test, _) = _filled(train.sort_index(), fill), _filled(test.sort_index(), fill)
    notes = [f"{n} missing entries of {name} became {fill[name]!r} (--impute)" for name, n in gaps.items() if n]
    known = [str(name) for name in read.frame.columns if name not in (*needed, *groups)]
    kept = Columns(s.formula, needed, groups, {}, fill, known, False)
    return Prepared(train, test, kept, (*read.notes, *notes), s.success)


# ------------------------------------------------------------------------------------ a target and all other columns


def _of_target(read: Read, s: Settings, family: str, many: int = 10) -> Prepared:
    """The rows of the formula ``target ~ every other column``, with texts as categories, all faults in one error."""
    frame, target = read.frame, s.target or ("target" if "target" in read.frame else None)
    if target is None:
        there = ", ".join(frame.columns[:30])
        raise InputError(f"target is missing: name the column to predict (--target). The columns are: {there}.")
    named = {"target": target, "weights": s.weights, "offset": s.offset}
    roles = {role: name for role, name in named.items() if name is not None}
    asked = [*roles.items(), *(("drop", name) for name in s.drop), *(("categorical", name) for name in s.categorical)]
    refuse([fault for role, name in asked if (fault := _of_lacking(name, role, list(frame.columns)))])
    names, chosen = [name for name in frame.columns if name not in {*roles.values(), *s.drop}], set(s.categorical)
    if not names:
        raise InputError(f"no column is left to predict {target!r} from. Check target and drop.")
    found = cleaned(frame, names, COMMAND, chosen=chosen, comma=read.comma)
    frame, notes, faults = found.frame, [*read.notes, *found.notes], [*found.faults]
    for role, name in roles.items():
        of_role = cleaned(frame, [name], Door(f"name another column (--{role})", ""), comma=read.comma)
        frame, notes, faults = of_role.frame, [*notes, *of_role.notes], [*faults, *of_role.faults]
        if role != "target" and not of_role.faults and not is_number(frame[name]):
            faults.append(f"{role} column {name!r} must hold numbers; got texts such as {str(frame[name].iloc[0])!r}.")
    used = {name: frame[name].to_numpy() for name in (*names, *roles.values())}
    faults += checks.of_unusable(used, roles, impute=s.impute is not None)
    texts = {name: as_levels(frame[name]) for name in names if not is_number(frame[name]) or name in chosen}
    for name, column in texts.items():
        if not any(repr(name) in fault for fault in faults):
            faults += checks.of_levels(name, column.nunique(), COMMAND, chosen=name in chosen)
    refuse(faults)
    measured = [name for name in names if name not in texts]
    notes += checks.of_identifiers(frame, measured, COMMAND, read.zeros)
    notes += [*checks.of_codes(frame, measured, COMMAND), *checks.of_copies(frame[[*names, target]])]
    levels = {name: sorted(column.dropna().unique(), key=_in_order) for name, column in texts.items()}
    frame = frame.assign(
        **{name: pd.Categorical(column, levels[name]) for name, column in texts.items()},
        **{name: frame[name].astype(np.float64) for name in measured},
    )
    positive = None
    if family in CLASSES:
        frame, positive = _coded(frame, target, s.success)
    elif s.success is not None:
        raise InputError(f"success names a class, and family {family} has none. Say --likelihood bernoulli.")
    elif not is_number(frame[target]) and family not in ("ordinal", "multinomial"):
        raise InputError(
            f"this family needs a target of numbers; {target!r} holds classes such as {str(frame[target].iloc[0])!r}. "
            "Say --likelihood bernoulli, or multinomial of several classes."
        )
    # many: categories from which on a column may be of groups
    response = target if positive is None or is_number(read.frame[target]) else f"{target}[{positive}]"
    notes += [
        f"column {name!r} has {len(of)} categories, each with a coefficient of its own. If they are groups that are "
        f'alike, as clinics or schools are: --formula "{response} ~ ... + (1 | {name})" --family {family}'
        for name, of in levels.items()
        if name not in chosen and len(of) >= many and family != "multinomial"
        if name.isidentifier() and re.fullmatch(r"\w+(\[[-+.\w]+\])?", response)  # a formula can be pasted
    ]
    return _of_columns(frame, names, levels, target, positive, notes, s)


def _of_columns(
    frame: pd.DataFrame,
    names: list[str],
    texts: dict[str, list[str]],  # of each column of categories its levels
    target: str,
    positive: str | None,
    notes: list[str],
    s: Settings,
) -> Prepared:
    """The rows to fit and those held out, with what is filled in and left out, and their formula."""
    train, test = _split(frame, s)
    new = pd.DataFrame({name: test[name].notna() & ~test[name].isin(train[name].dropna()) for name in texts})
    if texts and new.any(axis=None):
        notes.append(f"{int(new.any(axis=1).sum())} rows with levels that no other rows have were fitted, not held out")
        train, test = pd.concat([train, test[new.any(axis=1)]]), test[~new.any(axis=1)]
    if positive is not None and train[target].nunique() < 2:
        raise InputError(
            f"the {len(train)} training rows are all {train[target].iloc[0]!r}, and this family needs both classes. "
            "Choose another seed or a smaller test_fraction."
        )
    fill = _filling(train, names) if s.impute else {}
    (train, gaps), (test, others) = _filled(train, fill), _filled(test, fill)
    count = {name: gaps[name] + others[name] for name in fill}
    if total := sum(count[name] for name in fill if name not in texts):
        notes.append(f"{total} missing entries were filled in with medians of the training rows (--impute)")
    for name in texts:
        if count.get(name):
            notes.append(f"{count[name]} missing entries of {name} became {fill[name]!r}, its commonest level")
    alone = [name for name in names if train[name].nunique() < 2 and (s.intercept or name in texts)]
    if alone:
        said = listed([f"{name} = {train[name].iloc[0]}" for name in alone])
        notes.append(f"the same in all training rows, so that nothing can tell an effect of it, and left out: {said}")
    if len(alone) == len(names):
        raise InputError(f"no column differs between the training rows, to predict {target!r} from. Check the table.")
    kept = [name for name in names if name not in alone]
    shift = [s.offset] if s.offset else []
    right = ["1" if s.intercept else "0", *map(_quoted, kept), *(f"offset({_quoted(name)})" for name in shift)]
    columns = Columns(
        f"{_quoted(target)} ~ {_sum(right)}",
        [*kept, *shift],
        levels={name: of for name, of in texts.items() if name not in alone},
        fill={name: value for name, value in fill.items() if name not in alone},
        known=list(dict.fromkeys(name for name in (target, s.weights, *s.drop, *alone, "target") if name)),
    )
    return Prepared(train, test, columns, tuple(notes), positive)


def _quoted(name: str) -> str:
    """The name of a column in a formula."""
    if "`" in name:
        raise InputError(f"column {name!r} has a backtick in its name, which formulas cannot have. Rename it.")
    return f"`{name}`"


def _sum(terms: Sequence[str], at_once: int = 100) -> str:
    """The sum of terms, in parentheses within parentheses where there are many."""
    # at_once: terms of a sum without parentheses, which a parser reads by recursion
    half = len(terms) // 2
    return " + ".join(terms) if len(terms) <= at_once else f"({_sum(terms[:half])}) + ({_sum(terms[half:])})"


def _of_lacking(column: str, role: str, columns: list[str]) -> str | None:
    """What is wrong with a column that is named and not there."""
    if column in columns:
        return None
    shown = ", ".join(columns[:30]) + (f", .. ({len(columns)} in all)" if len(columns) > 30 else "")
    parts = column.split(",")
    several = role in ("drop", "categorical") and len(parts) > 1 and set(parts) <= set(columns)
    advice = f" Separate them by spaces, --{role} {join(parts)}." if several else hint(column, columns)
    return f"{role} column {column!r} is not in the data.{advice} The columns are: {shown}."


def _in_order(level: str) -> tuple[float, str]:
    """Numbers by their size, before texts."""
    number = pd.to_numeric(level, errors="coerce")
    return (np.inf if pd.isna(number) else float(number), level)


def _coded(frame: pd.DataFrame, target: str, success: str | None) -> tuple[pd.DataFrame, str]:
    """The table with two classes in the target, failure and success, and the second."""
    column = frame[target]
    ordered = isinstance(column.dtype, pd.CategoricalDtype)
    texts = column.astype(str) if ordered else as_levels(column)
    names = list(map(str, column.cat.categories)) if ordered else sorted(texts.unique(), key=_in_order)
    if len(names) == 1:
        raise InputError(
            f"target {target!r} has one class, {names[0]!r} in all {len(frame)} rows; a Bernoulli family needs "
            "two. Check the column, or that the file has all rows."
        )
    if success is None and len(names) > 2:
        some = ", ".join(names[:5]) + (", .." if len(names) > 5 else "")
        raise InputError(
            f"target {target!r} has {len(names)} classes ({some}); a Bernoulli family needs two. "
            f"{_remedy(column, names)}"
        )
    success = names[-1] if success is None else success
    if success not in names:
        known = ", ".join(names[:20])
        raise InputError(
            f"success {success!r} is no class of {target!r}.{hint(success, names)} The classes are: {known}."
        )
    rest = [name for name in names if name != success]
    failure = rest[0] if len(rest) == 1 else f"not {success}"
    coded = pd.Categorical(np.where(texts == success, success, failure), [failure, success])
    return frame.assign(**{target: coded}), success


def _remedy(column: pd.Series, names: Sequence[str], most_classes: int = 10) -> str:
    """What to do with a target of more than two values under a likelihood of two classes."""
    # most_classes: of a numeric target, before it is taken for counts or measurements
    remedy = f"Name the one to predict against the others (--success {names[-1]!r})"
    if not is_number(column):
        return f"{remedy}, or take them all (--likelihood multinomial)."
    counts = "--likelihood poisson, or negative_binomial, for counts"
    whole = column.min() >= 0 and bool((column == np.rint(column)).all())
    if len(names) <= most_classes:
        return f"{remedy}, or, if they are counts, say {counts}." if whole else f"{remedy}."
    if whole:
        return f"They are whole numbers: say {counts}, or gaussian for measurements."
    return "They are measurements: say --likelihood gaussian."
