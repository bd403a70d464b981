"""Folders of results: no earlier file is replaced unasked, no link is followed, and a run is there whole or not at all.

The files of a run are written into a folder beside its place, with a manifest of their digests, and come into that
place by one rename.  Where an earlier run is there, they are written inside its folder, become ``.replacing`` by one
rename too, and go from there one by one into their places: whoever reads, reads what is in ``.replacing`` first.  So a
process that is killed leaves the old run or the new one.
"""

import contextlib
import hashlib
import io
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from torchngvi.app.settings import LEFT, WRITING, beside, check_folder, check_writable, is_taken
from torchngvi.errors import InputError
from torchngvi.fitting.checkpoints import locked, sync

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
