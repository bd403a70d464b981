"""From a table and settings to the formula and the rows of a fit, and the same of new rows."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from shlex import join, quote
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn.model_selection import train_test_split

from torchngvi.adapters.table_checks import (
    COMMAND,
    Door,
    as_levels,
    cleaned,
    is_number,
    of_codes,
    of_copies,
    of_identifiers,
    of_levels,
    of_unusable,
    refuse,
)
from torchngvi.app.readers import Read
from torchngvi.app.settings import Settings
from torchngvi.errors import InputError
from torchngvi.messages import SHOWN, hint, listed
from torchngvi.tables.formulas import Sides, variables

_MOST_CLASSES = 10  # of a numeric target, before it is taken for counts or measurements
_AT_ONCE = 100  # terms of a sum without parentheses, which a parser reads by recursion
CLASSES = ("bernoulli", "probit")  # families of two classes


@dataclass(frozen=True)
class Columns:
    """What a run keeps of its table, so that new rows are prepared alike; it is in posterior.pt.

    Attributes:
        formula: of the model.
        needed: columns that new rows must have.
        groups: columns of groups, which they may have.
        levels: of each column of categories its levels, the baseline first.
        fill: what stands for a missing entry.
        known: other columns of the table, which new rows may have.
        plain: whether the formula was made of all columns.
    """

    formula: str
    needed: tuple[str, ...]
    groups: tuple[str, ...] = ()
    levels: dict[str, list[str]] = field(default_factory=dict)
    fill: dict[str, Any] = field(default_factory=dict)
    known: tuple[str, ...] = ()
    plain: bool = True

    def to_dict(self) -> dict[str, Any]:
        """The columns as plain values."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def read(cls, found: Any) -> "Columns":
        """The columns of `to_dict`, after a check that each has its type."""
        usual = cls("", ()).to_dict()
        try:
            right = set(found) == set(usual) and all(type(found[key]) is type(value) for key, value in usual.items())
            lists = [*(found[key] for key, value in usual.items() if type(value) is list), *found["levels"].values()]
            fill = found["fill"].values()
            right &= all(type(text) is str for texts in (*lists, found["levels"], found["fill"]) for text in texts)
            right &= all(type(value) in (str, int, float, bool) for value in fill)
        except (TypeError, AttributeError, KeyError):
            right = False
        if not right:
            raise InputError("its columns are not as a run writes them.")
        values: dict[str, Any] = {k: tuple(value) if type(value) is list else value for k, value in found.items()}
        return cls(**values)

    def of(self, frame: Any, name: str, drop: Iterable[str] | None = None) -> pd.DataFrame:
        """New rows as the fit has them; a table from a file has a name, from which columns are left out by flags."""
        if not isinstance(frame, pd.DataFrame):
            got = type(frame).__name__
            raise InputError(f"predict takes a pandas DataFrame with the columns of the fit; got {got}.")
        there = [str(column) for column in frame.columns]
        frame = frame.set_axis(there, axis=1)
        lacking = [column for column in self.needed if column not in there]
        if lacking:
            raise InputError(
                f"{name} lacks {listed(lacking)}, which the model predicts from.{hint(lacking[0], there)} "
                f"It has {listed(there) or 'no columns'}. Add the column, or correct its name."
            )
        used = [*self.needed, *(column for column in self.groups if column in there and column not in self.needed)]
        others = sorted(set(there) - {*used, *self.known})
        if others:
            some = others[:SHOWN]
            how = f"frame.drop(columns={some!r})" if drop is None else " ".join(f"--drop {quote(one)}" for one in some)
            raise InputError(
                f"{name} has {listed(others)}, which the fit has not seen. Leave it out ({how}), or "
                "check that this is the right table."
            )
        frame = frame[used]
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
        frame = filled(frame, self.fill)[0]
        gaps = {column: int(frame[column].isna().sum()) for column in used}
        bad = [column for column, count in gaps.items() if count]
        if bad:
            raise InputError(
                f"{name} misses entries of {listed(bad)}, of {bad[0]} in {gaps[bad[0]]} of {len(frame)} rows, and the "
                "fit has filled none. Fill them in, leave those rows out, or fit again with --impute median."
            )
        return frame


class Prepared(NamedTuple):
    """The rows of a fit.

    Attributes:
        train: the rows that are fitted, with the response.
        test: those held out.
        columns: what the run keeps.
        notes: what was done with the table.
        positive: the class that is predicted, of a plain formula with two classes.
    """

    train: pd.DataFrame
    test: pd.DataFrame
    columns: Columns
    notes: tuple[str, ...]
    positive: str | None = None


def quoted(name: str) -> str:
    """The name of a column in a formula."""
    if "`" in name:
        raise InputError(f"column {name!r} has a backtick in its name, which formulas cannot have. Rename it.")
    return f"`{name}`"


def total(terms: Sequence[str]) -> str:
    """The sum of terms, in parentheses within parentheses where there are many.

    >>> total(["a", "b"])
    'a + b'
    """
    if len(terms) <= _AT_ONCE:
        return " + ".join(terms)
    half = len(terms) // 2
    return f"({total(terms[:half])}) + ({total(terms[half:])})"


def filled(frame: pd.DataFrame, fill: dict[str, Any]) -> tuple[pd.DataFrame, dict[str, int]]:
    """The table without missing entries in these columns, and how many there were."""
    gaps = {name: int(frame[name].isna().sum()) for name in fill if name in frame}
    gaps = {name: count for name, count in gaps.items() if count}
    return frame.assign(**{name: frame[name].fillna(fill[name]) for name in gaps}), gaps


def filling(frame: pd.DataFrame, names: Iterable[str]) -> dict[str, Any]:
    """What stands for missing entries: medians of numbers, the commonest of all else.

    >>> filling(pd.DataFrame({"age": [20.0, None, 40.0], "sex": ["f", "f", None]}), ["age", "sex"])
    {'age': 30.0, 'sex': 'f'}
    """
    found: dict[str, Any] = {}
    for name in names:
        there = frame[name].dropna()
        if not len(there):
            raise InputError(f"column {name!r} has no entry in the {len(frame)} training rows. Leave it out.")
        number = is_number(there) and not pd.api.types.is_bool_dtype(there)
        value = there.median() if number else there.mode().iloc[0]
        found[name] = value.item() if isinstance(value, np.generic) else value
    return found


def split(frame: pd.DataFrame, fraction: float, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows of the fit and those held out, by scikit-learn's train_test_split.

    >>> [len(part) for part in split(pd.DataFrame({"x": range(10)}), 0.2, 0)]
    [8, 2]
    """
    if not fraction:
        return frame, frame.iloc[:0]
    try:
        train, test = train_test_split(frame, test_size=fraction, random_state=seed)
    except ValueError as error:
        raise InputError(
            f"{len(frame)} rows cannot be split with test_fraction {fraction:g}: both parts need at least one. "
            "Set test_fraction to 0."
        ) from error
    return train, test


# ------------------------------------------------------------------------------------ a formula of the user


def of_formula(read: Read, s: Settings) -> Prepared:
    """The rows of a formula, missing predictors filled in where that is asked for."""
    assert s.formula is not None
    sides = Sides.of(s.formula)
    groups = {key for block in sides.blocks for key in block.keys}
    there = variables([*sides.terms, *(term for block in sides.blocks for term in block.terms)])
    predictors = sorted(name for name in there if name in read.frame)
    dates = [n for n in groups if n in read.frame and getattr(read.frame[n].dtype, "kind", "O") in "mM"]
    whole = read.frame.assign(**{name: read.frame[name].astype(str) for name in dates})
    train, test = split(whole, s.held_out, s.seed)
    if s.held_out:  # in the order of the table
        train, test = train.sort_index(), test.sort_index()
    gaps = [name for name in predictors if train[name].isna().any() and name not in groups]
    if gaps and not s.impute:
        told = listed([f"{int(train[name].isna().sum())} of {name}" for name in gaps])
        raise InputError(
            f"the table misses entries in its {len(train)} rows: {told}. Fill them in (--impute median), or leave "
            "those rows out."
        )
    fill = filling(train, [name for name in predictors if name not in groups]) if s.impute else {}
    (train, count), (test, _) = filled(train, fill), filled(test, fill)
    notes = tuple(f"{n} missing entries of {name} became {fill[name]!r} (--impute)" for name, n in count.items())
    needed = tuple(name for name in predictors if name not in groups)
    known = tuple(name for name in map(str, read.frame.columns) if name not in (*needed, *groups))
    kept = Columns(s.formula, needed, tuple(sorted(groups)), {}, fill, known, False)
    return Prepared(train, test, kept, (*read.notes, *notes))


# ------------------------------------------------------------------------------------ a target and all other columns


def of_target(read: Read, s: Settings, family: str) -> Prepared:
    """The rows of the formula ``target ~ every other column``, with texts as categories, all faults in one error."""
    frame, target = read.frame, s.target or ("target" if "target" in read.frame else None)
    if target is None:
        raise InputError(
            "target is missing: name the column to predict (--target). "
            f"The columns are: {', '.join(frame.columns[:30])}."
        )
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
            shown = str(frame[name].iloc[0])
            faults.append(f"{role} column {name!r} must hold numbers; got texts such as {shown!r}.")
    used = {name: frame[name].to_numpy() for name in (*names, *roles.values())}
    faults += of_unusable(used, roles, impute=s.impute is not None)
    categories = [name for name in names if not is_number(frame[name]) or name in chosen]
    texts = {name: as_levels(frame[name]) for name in categories}
    for name, column in texts.items():
        if not any(repr(name) in fault for fault in faults):
            faults += of_levels(name, column.nunique(), COMMAND, chosen=name in chosen)
    refuse(faults)
    measured = [name for name in names if name not in texts]
    notes += [
        *of_identifiers(frame, measured, COMMAND, read.zeros),
        *of_codes(frame, measured, COMMAND),
        *of_copies(frame[[*names, target]]),
    ]
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
        shown = str(frame[target].iloc[0])
        raise InputError(
            f"this family needs a target of numbers; {target!r} holds classes such as {shown!r}. "
            "Say --likelihood bernoulli."
        )
    train, test = _split(frame, categories, s, notes)
    if positive is not None and train[target].nunique() < 2:
        raise InputError(
            f"the {len(train)} training rows are all {train[target].iloc[0]!r}, and this family needs both classes. "
            "Choose another seed or a smaller test_fraction."
        )
    fill = filling(train, names) if s.impute else {}
    (train, gaps), (test, others) = filled(train, fill), filled(test, fill)
    count = sum({name: gaps.get(name, 0) + others.get(name, 0) for name in measured}.values())
    if count:
        notes.append(f"{count} missing entries were filled in with medians of the training rows (--impute)")
    for name in categories:
        if n := gaps.get(name, 0) + others.get(name, 0):
            notes.append(f"{n} missing entries of {name} became {fill[name]!r}, its commonest level")
    alone = [name for name in names if train[name].nunique() < 2 and (s.intercept or name in texts)]
    if alone:
        said = listed([f"{name} = {train[name].iloc[0]}" for name in alone])
        notes.append(f"the same in all training rows, so that nothing can tell an effect of it, and left out: {said}")
    if len(alone) == len(names):
        raise InputError(f"no column differs between the training rows, to predict {target!r} from. Check the table.")
    terms = ["1" if s.intercept else "0", *(quoted(name) for name in names if name not in alone)]
    terms += [f"offset({quoted(s.offset)})"] if s.offset else []
    kept = Columns(
        f"{quoted(target)} ~ {total(terms)}",
        (*(name for name in names if name not in alone), *([s.offset] if s.offset else [])),
        levels={name: of for name, of in levels.items() if name not in alone},
        fill=fill,
        known=tuple(dict.fromkeys(name for name in (target, s.weights, *s.drop, *alone, "target") if name)),
    )
    return Prepared(train, test, kept, tuple(notes), positive)


def _of_lacking(column: str, role: str, columns: list[str]) -> str | None:
    """What is wrong with a column that is named and not there."""
    if column in columns:
        return None
    shown = ", ".join(columns[:30]) + (f", .. ({len(columns)} in all)" if len(columns) > 30 else "")
    parts = column.split(",")
    several = role in ("drop", "categorical") and len(parts) > 1 and set(parts) <= set(columns)
    told = f" Separate them by spaces, --{role} {join(parts)}." if several else hint(column, columns)
    return f"{role} column {column!r} is not in the data.{told} The columns are: {shown}."


def _in_order(level: str) -> tuple[float, str]:
    """Numbers by their size, before texts."""
    number = pd.to_numeric(level, errors="coerce")
    return (np.inf if pd.isna(number) else float(number), level)


def _coded(frame: pd.DataFrame, target: str, success: str | None) -> tuple[pd.DataFrame, str]:
    """The table with two classes in the target, failure and success, and the second."""
    column = frame[target]
    if isinstance(column.dtype, pd.CategoricalDtype):
        names = [str(name) for name in column.cat.categories if (column == name).any()]
        texts = column.astype(str)
    else:
        texts = as_levels(column)
        names = sorted(texts.unique(), key=_in_order)
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
        raise InputError(
            f"success {success!r} is no class of {target!r}.{hint(success, names)} "
            f"The classes are: {', '.join(names[:20])}."
        )
    rest = [name for name in names if name != success]
    failure = rest[0] if len(rest) == 1 else f"not {success}"
    coded = pd.Categorical(np.where(texts == success, success, failure), [failure, success])
    return frame.assign(**{target: coded}), success


def _remedy(column: pd.Series, names: Sequence[str]) -> str:
    """What to do with a target of more than two values under a likelihood of two classes."""
    remedy = f"Name the one to predict against the others (--success {names[-1]!r})"
    if not is_number(column):
        return f"{remedy}."
    y = column.to_numpy(dtype=np.float64)
    counts = "--likelihood poisson for counts"
    if y.var() > 2 * y.mean():
        counts += (
            f" (negative_binomial where the columns do not explain their variance, {y.var() / y.mean():.2g} times "
            "their mean)"
        )
    whole = y.min() >= 0 and bool((y == np.rint(y)).all())
    if len(names) > _MOST_CLASSES:
        if whole:
            return f"They are whole numbers: say {counts}, or gaussian for measurements."
        return "They are measurements: say --likelihood gaussian."
    return f"{remedy}, or, if they are counts, say {counts}." if whole else f"{remedy}."


def _split(
    frame: pd.DataFrame, categories: Sequence[str], s: Settings, notes: list[str]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows of the fit and those held out, of which none has a level that the others have not."""
    train, test = split(frame, s.held_out, s.seed)
    moved = np.zeros(len(test), dtype=bool)
    for name in categories:
        moved |= (test[name].notna() & ~test[name].isin(train[name].dropna().unique())).to_numpy()
    if moved.any():
        notes.append(f"{int(moved.sum())} rows with levels that no other rows have were fitted and not held out")
        train, test = pd.concat([train, test[moved]]), test[~moved]
    return train, test


def of(read: Read, s: Settings, family: str) -> Prepared:
    """The rows of a fit."""
    made = of_formula(read, s) if s.formula is not None else of_target(read, s, family)
    return made if s.formula is None or s.success is None else made._replace(positive=s.success)


def renamed(columns: Columns, name: str) -> str:
    """The name of a coefficient in a report: ``sex=male`` where the formula was made of all columns.

    >>> renamed(Columns("", (), levels={"sex": ["female", "male"]}), "sex[male]")
    'sex=male'
    """
    column, _, level = name.partition("[")
    return f"{column}={level.removesuffix(']')}" if columns.plain and column in columns.levels else name
