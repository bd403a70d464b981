"""Files of settings: the keys of a TOML file."""

import tomllib
from pathlib import Path
from typing import Any

from torchngvi.app.config import file_name
from torchngvi.errors import InputError

_LONGEST_FILE = 60_000  # bytes


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read the keys of a TOML file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "run.toml").write_text('data = "iris"')
    ...     read_toml(Path(folder, "run.toml"))
    {'data': 'iris'}
    """
    file_name("CONFIG.toml", str(path))
    try:
        with Path(path).open("rb") as file:
            content = file.read(_LONGEST_FILE + 1)
        text = content.decode("utf-8")
    except FileNotFoundError as error:
        raise InputError(
            f"there is no settings file {str(path)!r}. To fit a data file say: torchngvi fit --data FILE."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{str(path)!r} is no readable TOML file ({error}).") from error
    if len(content) > _LONGEST_FILE:
        raise InputError(
            f"a file of settings has at most {_LONGEST_FILE} bytes, and {str(path)!r} has more. "
            "For a data file say --data FILE."
        )
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(
            f'{str(path)!r} is not TOML: {error}. Write lines such as data = "breast_cancer"; '
            "for a data file say --data FILE."
        ) from error
    except (RecursionError, ValueError) as error:  # lists in lists without end, a number of thousands of digits
        raise InputError(
            f"{str(path)!r} cannot be read as TOML: {error}. Write flat lines of short values, as in configs/."
        ) from error
