"""The licences of what the extras bring, and of what these need: each must be a permissive one, or the check fails.
Of several that are joined by OR one is enough, and of several that are joined by AND none may be copyleft.  The CUDA
libraries of a PyTorch for GPUs come under NVIDIA's own terms; they are listed, with a "-", and do not fail it.

Run it where the package is installed with its extras: ``python .ci/licences.py``.
"""

import re
import sys
from importlib import metadata

PERMISSIVE = re.compile(r"\b(MIT|0?BSD|Apache|PSF|Python Software Foundation|ISC|MPL|Mozilla|HPND|Unlicense|CC0)", re.I)
COPYLEFT = re.compile(r"GPL|General Public", re.I)
CUDA = re.compile(r"(nvidia|cuda)-")
NAME = re.compile(r"^([A-Za-z0-9._-]+)")


def licence(found: metadata.Distribution) -> str:
    """What the metadata of a library say, in one line; of a whole text its beginning."""
    said = found.metadata
    classifiers = [x.split("::")[-1].strip() for x in said.get_all("Classifier") or [] if x.startswith("License ::")]
    text = said.get("License-Expression") or "; ".join(classifiers) or (said.get("License") or "")[:80]
    return " ".join(text.split())


def permissive(said: str) -> bool:
    """Whether one of the licences that may be chosen is permissive in all its parts."""
    choices = re.split(r"\bOR\b|;", said)
    return any(PERMISSIVE.search(one) and not COPYLEFT.search(one) for one in choices)


def needed(name: str) -> dict[str, metadata.Distribution]:
    """Everything that a package needs, with all of its own extras; of what these need the extras are left out."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [(name, True)]
    while waiting:
        at, extras = waiting.pop()
        key = re.sub(r"[-_.]+", "-", at).lower()
        try:
            of = metadata.distribution(at)
        except metadata.PackageNotFoundError:
            continue  # it is for another system, another Python, or an extra that is not installed
        if key in found:
            continue
        found[key] = of
        for line in of.requires or []:
            match = NAME.match(line)
            if match and (extras or "extra ==" not in line):
                waiting.append((match[1], False))
    return found


def main() -> int:
    """Print one line for each library; 1 where a licence is not permissive or not told, or nothing is there."""
    bad, found = 0, needed("torchngvi")
    if not found:
        print("! torchngvi is not installed here, and so nothing was looked at")
        return 1
    for name, of in sorted(found.items()):
        said = licence(of)
        mark = "  " if permissive(said) else "- " if CUDA.match(name) else "! "
        bad += mark == "! "
        print(f"{mark}{name:28} {of.version:14} {said[:80] or 'not told'}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
