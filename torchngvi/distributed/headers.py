"""The header of a meeting of processes: what each of them says of itself, and what is wrong where they differ."""

from collections.abc import Sequence
from typing import NamedTuple

from torchngvi.errors import InputError


class Row(NamedTuple):
    """What a rank says in the header of a meeting, in numbers that are exact in float64.

    Attributes:
        failed: whether an error was raised there.
        print: the fingerprint of q, or of the draws, which has to be that of all ranks.
        stop: whether the run is to end, by a callback or the keyboard.
        seconds: the clock of that process; the leader's is everyone's.
        kind: a sum of numbers, or an exchange of objects.
        size: how many numbers are to be summed.

    >>> different([Row(0, 1, 0, 0, 1, 3), Row(0, 1, 0, 0, 1, 3)]) is None
    True
    """

    failed: float
    print: float
    stop: float
    seconds: float
    kind: float
    size: float


class Ended(KeyboardInterrupt):
    """A run was ended from outside on some rank, and is now ended on all: raised where the processes meet.

    It is a `KeyboardInterrupt`, which no ``except Exception`` of a user's log joint takes for an error of its own.

    Attributes:
        reason: a sentence from "because" on.
        error: what a callback has raised, which is to be raised again; None where none did.

    >>> str(Ended("because a callback stopped it."))
    'because a callback stopped it.'
    """

    def __init__(self, reason: str, error: Exception | None = None) -> None:
        super().__init__(reason)
        self.reason, self.error = reason, error


def elsewhere(rows: Sequence[Row]) -> str | None:
    """Say that the ranks have met at different places of a program, where they have."""
    if len({row.kind for row in rows}) == 1:
        return None
    return (
        f"the ranks are at different places of the program: {_first_other(rows, 'kind')}. Let every rank call the same "
        "functions in the same order, with the same settings."
    )


def different(rows: Sequence[Row]) -> str | None:
    """Say in what the ranks differ, where they do: in q or the draws, or in how many numbers they sum."""
    if len({row.print for row in rows}) > 1:
        return (
            f"q, or a draw from it, is not the same on all ranks: {_first_other(rows, 'print')}. Start every rank from "
            "the same q, call synchronize(q) after a change on one rank, and give the generators of estimators the "
            "same seed."
        )
    if len({row.size for row in rows}) > 1:
        return (
            f"the ranks sum different numbers of entries, {rows[0].size:.0f} on rank 0: {_first_other(rows, 'size')}. "
            "Give every rank a q of the same shape and as many draws."
        )
    return None


def _first_other(rows: Sequence[Row], name: str) -> str:
    rank = next(rank for rank, row in enumerate(rows) if getattr(row, name) != getattr(rows[0], name))
    return f"rank {rank} differs from rank 0"


def words(error: Exception) -> str:
    """An error in the words that the other ranks are told.

    >>> words(OSError("no space left")), words(InputError("a sentence."))
    ('OSError: no space left', 'a sentence.')
    """
    text = " ".join(str(error).split())
    return text if isinstance(error, InputError) else f"{type(error).__name__}: {text}"
