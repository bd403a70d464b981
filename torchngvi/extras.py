"""How to install an extra of this package, said so that it is true of an installed wheel and of a source tree."""

from pathlib import Path


def install(extra: str) -> str:
    """The command that installs an extra.

    Args:
        extra: its name, such as "cli".

    Returns:
        Of a package that runs from its source tree a command on that folder, else one on the installed package.

    >>> install("cli").startswith("pip install")
    True
    """
    root = Path(__file__).resolve().parent.parent
    if not _is_source(root):
        return f"pip install 'torchngvi[{extra}]'"
    place = "." if root == Path.cwd().resolve() else str(root)
    return f"pip install -e '{place}[{extra}]'"


def _is_source(root: Path) -> bool:
    """Whether a folder is a source tree of this package."""
    project = root / "setup.cfg"
    return project.is_file() and "name = torchngvi\n" in project.read_text(encoding="utf-8")
