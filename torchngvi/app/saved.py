"""Folders of runs: how one is written whole or not at all, and how its fit is read again, to predict new rows.

No earlier file is replaced unasked, and no link is followed.  The files of a run are written into a folder beside its
place, with a manifest of their digests, and come into that place by one rename.  Where an earlier run is there, they
are written inside its folder, become ``.replacing`` by one rename too, and go from there one by one into their places:
whoever reads, reads what is in ``.replacing`` first.  So a process that is killed leaves the old run or the new one.
"""

import contextlib
import hashlib
import io
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from torchngvi.app.prepare import CLASSES, Columns
from torchngvi.app.settings import LEFT, WRITING, beside, check_folder, check_writable, is_taken
from torchngvi.errors import InputError
from torchngvi.fitting.checkpoints import locked, sync
from torchngvi.tables.model import result_of
from torchngvi.tables.result import TableResult

__all__ = ["Fitted", "load"]

_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")  # how a cell begins that a spreadsheet would evaluate
_QUOTE = "'"
MANIFEST, POSTERIOR = "manifest.json", "posterior.pt"
_REPLACING = ".replacing"
_OF_A_RUN = {  # what runs of fit write, and those of 0.2.0: of a run that is replaced, none of them stays
    *(POSTERIOR, "summary.json", "config.toml", "coefficients.csv", "effects.csv", "fit.png"),
    *("parameters.csv", "trace.csv", "effects.png"),
}


class OutputFolder:
    """A folder for the results of a run, checked before the run begins."""

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        self.path = check_folder(Path(path), overwrite=overwrite)
        self._ours = overwrite
        _clean(self.path.parent, beside(self.path))

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """A block with a place to write files; all of them come into the folder in one step, when they are complete."""
        try:
            if not self._ours and is_taken(self.path):
                self.path = self._free()
            check_writable(self.path)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _settle(self.path)
            _clean(self.path)
            _clean(self.path.parent, beside(self.path))
            with _place(self.path) as place:
                yield place
                digests = {file.name: _digest(file) for file in sorted(place.iterdir()) if file.is_file()}
                while not _taken_by(place, self.path, digests, replace=self._ours):
                    self.path = self._free()
            self._ours = True
        except OSError as error:
            raise InputError(
                f"the results cannot be written into {str(self.path)!r} ({error}), and nothing that was there has "
                "changed. Choose another folder (--out)."
            ) from error

    def _free(self) -> Path:
        """The next name at which nothing is."""
        path = self.path if self.path.name else self.path.absolute()  # of the current folder
        names = (path.with_name(f"{path.name}-{number}") for number in range(2, 1000))
        return next(path for path in names if not os.path.lexists(path))


# ------------------------------------------------------------------------------------ one step


@contextmanager
def _place(to: Path) -> Iterator[Path]:
    """A new folder beside another, or inside it where that holds files or cannot be renamed; locked while we live."""
    inside = is_taken(to) or _stays(to)
    to.mkdir(exist_ok=True) if inside else None
    lock = -1
    while True:
        name = f"{WRITING}{secrets.token_hex(8)}"
        place = to / name if inside else to.with_name(beside(to) + name)
        try:
            place.mkdir()
        except OSError:
            if inside or not to.is_dir():
                raise
            inside = True  # the folder above is not ours to write into
            continue
        if to.is_dir():
            shutil.copymode(to, place)  # a folder that is private stays so
        lock = locked(place, wait=True)
        if place.is_dir():
            break
        os.close(lock)  # another run has taken it for one that was left, before it was locked
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)  # of a run that has come into its place, nothing
        if lock >= 0:
            os.close(lock)


def _stays(folder: Path) -> bool:
    """Whether a folder cannot change its name without harm: a mounted one, or one that a shell stands in."""
    whole = folder.absolute()
    return os.path.ismount(whole) or (folder.is_dir() and whole.resolve() in (here := Path.cwd(), *here.parents))


def _clean(folder: Path, begins: str = "") -> None:
    """Remove what killed runs have left in a folder, which nobody holds locked."""
    with contextlib.suppress(OSError):  # nothing there, or nothing that can be seen
        for path in folder.iterdir():
            left = path.name.startswith(begins) and LEFT.fullmatch(path.name.removeprefix(begins)) is not None
            if left and path.is_dir() and (lock := locked(path, wait=False)) >= 0:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _taken_by(place: Path, to: Path, digests: dict[str, str], *, replace: bool) -> bool:
    """Bring the files of a place into a folder, all in one step."""
    gone = {*digests, *(_OF_A_RUN if POSTERIOR in digests else ())}
    earlier = {name: digest for name, digest in _manifest(to).items() if replace and name not in gone}
    text = json.dumps({"format": 1, "sha256": {**earlier, **digests}}, indent=2)
    (place / MANIFEST).write_text(text + "\n", encoding="utf-8")
    for file in (*place.iterdir(), place):
        sync(file)
    if place.parent == to:
        if not replace and is_taken(to):
            return False
        os.rename(place, to / _REPLACING)
        sync(to)
        with contextlib.suppress(OSError):  # the new run is there; the next one goes on from here
            _settle(to)
        return True
    if os.name == "nt" and to.is_dir():  # where no rename takes the place of an empty folder
        with contextlib.suppress(OSError):
            os.rmdir(to)
    try:
        os.rename(place, to)
    except OSError as error:
        if not (to.is_dir() and any(to.iterdir())):
            raise
        if not replace:
            return False
        raise OSError(error.errno, f"another run has written into {to}") from error
    sync(to.parent)
    return True


def _settle(folder: Path) -> None:
    """Bring the files of a run that has replaced another one inside its folder into their places."""
    new = folder / _REPLACING
    if not new.is_dir():
        return
    names = [path.name for path in new.iterdir() if path.name != MANIFEST]
    if (new / MANIFEST).is_file():
        if POSTERIOR in _manifest(folder):
            for path in (folder / name for name in _OF_A_RUN - set(_manifest(folder))):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        for name in (*names, MANIFEST):
            os.replace(new / name, folder / name)
        sync(folder)
    new.rmdir()


# ------------------------------------------------------------------------------------ digests


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def file_of(folder: Path, name: str) -> Path:
    """A file of a run, where it is: in ``.replacing`` if it is there."""
    new = folder / _REPLACING / name
    return new if new.is_file() and (new.parent / MANIFEST).is_file() else folder / name


def _manifest(folder: Path) -> dict[str, str]:
    """The digests of the files in a folder; none where they are not there or cannot be read."""
    try:
        found = json.loads(file_of(folder, MANIFEST).read_text(encoding="utf-8"))["sha256"]
        return {name: str(digest) for name, digest in found.items() if Path(name).name == name}  # in the folder
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write_content(folder: Path, content: dict[str, Any]) -> None:
    """Write posterior.pt; what cannot be written is an OSError, which torch says in words of its own."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    (folder / POSTERIOR).write_bytes(buffer.getvalue())


def read_content(folder: Path) -> tuple[bytes, tuple[str, ...]]:
    """The content of posterior.pt, after a check of all files of the run against their digests, and notes of others."""
    path, digests = file_of(folder, POSTERIOR), _manifest(folder)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read ({error.strerror}). Check its permissions.") from error
    if not file_of(folder, MANIFEST).is_file():
        return content, ()
    if digests.get(POSTERIOR) != hashlib.sha256(content).hexdigest():
        raise InputError(
            f"{str(path)!r} is damaged: it is not as its run has written it, by the digest in {MANIFEST}. Take a copy "
            "of the folder, or fit again."
        )
    rest = [other for other in digests if other != POSTERIOR and file_of(folder, other).is_file()]
    changed = [other for other in rest if _digest(file_of(folder, other)) != digests[other]]
    said = f"{', '.join(changed)} in {str(folder)!r} changed after the run; predictions are those of {POSTERIOR}"
    return content, (said,) if changed else ()


# ------------------------------------------------------------------------------------ csv


def _cell(value: Any) -> Any:
    """A value for a csv file; a text that a spreadsheet would take for a formula gets a quote in front."""
    return _QUOTE + value if isinstance(value, str) and value.startswith((*_FORMULAS, _QUOTE)) else value


def write_frame(path: Path | io.StringIO, frame: pd.DataFrame) -> None:
    """Write a frame as a csv file, in which a spreadsheet evaluates no text."""
    texts = frame.select_dtypes(exclude="number")
    # with these ends of lines texts that hold either sign are quoted
    frame.assign(**{name: texts[name].map(_cell) for name in texts}).to_csv(path, index=False, lineterminator="\r\n")


def read_frame(path: Path) -> pd.DataFrame:
    """Read a csv file that `write_frame` has written."""
    frame = pd.read_csv(path)
    texts = frame.select_dtypes(exclude="number")
    bare = {name: texts[name].map(lambda v: v.removeprefix(_QUOTE) if isinstance(v, str) else v) for name in texts}
    return frame.assign(**bare)


# ------------------------------------------------------------------------------------ a fit


def classes(result: TableResult) -> tuple[str, str] | None:
    """Failure and success of a result with two classes."""
    success = str(result.formula.success or "")
    if not success and result.family.name in CLASSES:  # two numbers
        failure, success = (f"{value:g}" for value in result.formula.design.y[0].unique().tolist())
        return failure, success
    if not success:
        return None
    levels = result.formula.table[result.formula.columns.response[0]].astype(str).unique()
    others = [str(level) for level in levels if level != success]
    return (others[0] if len(others) == 1 else f"not {success}"), success


@dataclass(frozen=True, repr=False)
class Fitted:
    """A run of ``torchngvi fit``: the fit, with all that turns a table of new rows into predictions.

    `load` makes it from the folder of a run.

    Attributes:
        result: the fit, with `torchngvi.tables.TableResult.summary`, `to_arviz` and the rest.
        columns: how new rows are prepared, see `torchngvi.app.prepare.Columns`.
        name: of the folder.
    """

    result: TableResult
    columns: Columns
    name: str

    def __repr__(self) -> str:
        made = self.columns.formula
        return f"Fitted({self.name!r}, {made!r}, {self.result.family.name}, {len(self.result.design.X)} rows)"

    @property
    def told(self) -> str:
        """What is predicted, in words."""
        pair = classes(self.result)
        return f"probability of {pair[1]!r}" if pair else f"mean of {str(self.result.formula.response).strip('`')}"

    def predict(
        self,
        frame: pd.DataFrame,
        *,
        kind: str = "mean",
        interval: float = 0.95,
        population: bool = False,
        name: str = "the table",
        drop: Sequence[str] | None = None,
    ) -> pd.DataFrame:
        """Predict new rows, with central intervals.

        For two classes the table has the likelier ``class`` and the ``probability`` of success, averaged over the
        posterior, with the interval of that probability, ``low`` and ``high``. For counts and real numbers it has the
        ``mean`` with its interval ``mean_low`` and ``mean_high``, and the interval of a new observation, ``low`` and
        ``high``; of ordered categories the probability of each, of trials the ``probability`` of a success. Of a model
        with groups ``new_groups`` names the factors whose group the fit has not seen.

        Args:
            frame: the new rows, with the columns of the fit as they were there; the target may be among them.
            kind: "mean", or "linear" for the linear predictor, or "response" for a new observation.
            interval: the probability of the intervals.
            population: whether rows are those of new groups, averaged over these.
            name: the table, for messages.
            drop: of a table from a file, the columns that were left out.

        Returns:
            One row for each of the frame, with its index.

        Raises:
            InputError: columns that are missing or unknown, entries that are missing or unseen.
        """
        made, result = self.columns.of(frame, name, drop), self.result
        asked: dict[str, Any] = {"interval": interval, "population": population}
        first = result.predict(made, kind=kind, **asked)
        mean, low, high = (part.numpy() for part in (first.mean, first.low, first.high))
        labels, pair = result.family.outcomes or result.formula.outcomes, classes(result)
        if mean.ndim > 1:
            names = list(map(str, labels or range(mean.shape[1])))[-mean.shape[1] :]  # of predictors all but the first
            most = {} if kind == "linear" else {"class": np.array(names)[mean.argmax(1)]}
            found: dict[str, Any] = {**most, **dict(zip(names, mean.T, strict=True))}
        elif kind == "mean" and ("trials" in result.family.extra or (result.family.discrete and pair)):
            label = {"class": np.where(mean > 0.5, pair[1], pair[0])} if pair else {}
            found = {**label, "probability": mean, "low": low, "high": high}
        elif kind == "mean":
            new = result.predict(made, kind="response", **asked)
            found = {"mean": mean, "mean_low": low, "mean_high": high, "low": new.low.numpy(), "high": new.high.numpy()}
        else:
            found = {kind: mean, "low": low, "high": high}
        factors = result.formula.of(made).factors
        if factors:
            new_of = (np.where(of.groups.numpy() < 0, of.name, "") for of in factors)
            found["new_groups"] = [", ".join(filter(None, names)) for names in zip(*new_of, strict=True)]
        return pd.DataFrame(found, index=frame.index)

    def to_arviz(self, frame: Any = None, *, seed: int = 0) -> Any:
        """Export draws for ArviZ, see `TableResult.to_arviz`; the run keeps its table, and a frame is not looked at."""
        return self.result.to_arviz(seed=seed)


def load(run: str | Path) -> Any:
    """Read what ``torchngvi fit`` or `TableResult.save` has written, to predict with it.

    The files from which a run predicts are checked against their digests in manifest.json, and each of their values
    against what a run can hold, so that a run of a stranger runs no code. A folder without digests, and other files of
    it that have changed, are a warning.

    Args:
        run: the folder of the run, or the file posterior.pt in it.

    Returns:
        `Fitted`, whose `Fitted.predict` takes a table of new rows; of a folder that `TableResult.save` has written the
        `torchngvi.tables.TableResult`.

    Raises:
        ImportError: without formulae.
        InputError: no such folder, a folder or a file of something else, a run of an earlier version, one that is not
            as it was written, or that holds what no run holds.
    """
    if not isinstance(run, str | os.PathLike):
        raise InputError(f"load takes the folder of a run, such as 'runs/patients'; got {type(run).__name__}.")
    folder = Path(run) if Path(run).is_dir() or Path(run).name != POSTERIOR else Path(run).parent
    if not folder.is_dir() or not file_of(folder, POSTERIOR).is_file():
        there = f"there is no {POSTERIOR} in it" if folder.is_dir() else "it is not there"
        raise InputError(
            f"{str(run)!r} is no folder of a run: {there}. Name the folder that torchngvi fit has written, such as "
            "runs/breast_cancer. Of a state dict call q.load_state_dict(torch.load(path))."
        )
    content, notes = read_content(folder)
    for note in notes:
        warnings.warn(f"{note}.", stacklevel=2)
    path = str(file_of(folder, POSTERIOR))
    try:
        state = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception as error:  # of a broken file torch, zipfile and pickle raise anything
        said = (str(error).splitlines() or [""])[0].partition(". ")[0]
        raise InputError(f"{path!r} cannot be read as the posterior of a run ({said}). Fit again.") from error
    if not isinstance(state, dict) or "made" not in state:
        raise InputError(
            f"{path!r} is of an earlier version, or no run of torchngvi fit. Fit again. A state dict is read by "
            "q.load_state_dict(torch.load(path)), into a q that is made as the saved one was."
        )
    columns = state.pop("run", None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = result_of(state, name=path)
            return result if columns is None else Fitted(result, Columns.read(columns), folder.resolve().name)
    except (InputError, Warning) as error:
        raise InputError(f"{path!r} holds what no run has written: {error} Fit again.") from error
