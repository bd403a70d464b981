"""Run the examples, keep the picture of each, and write docs/gallery.md.

    python docs/draw_gallery.py [NAME ...] [--seconds 600]

Without names all of them are run, which takes some minutes. An example that fails, or takes longer than it
may, keeps the picture that it has.
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"
WIDTH = 1000  # pixels
WITHOUT = {  # why an example has no picture of its own
    "hierarchical": "draws three pictures, one of which is above, of [hierarchical models](groups.md)",
    "theory": "draws the two pictures of [the theory](theory.md), one of which is above",
    "torchrun_logistic": "prints its result, which is the same for any number of processes",
}
NOTES = {  # what the reader of a picture has to know beside the first line of its example
    "pyro_radon": "The houses in this picture are simulated, as they are where `--data` is not given.",
}
KINDS = {  # the heading of an example, by the beginning of its name
    "logistic": "Regressions",
    "prior": "Regressions",
    "dose": "Regressions",
    "ifvb": "Posteriors that are not Gaussian",
    "mixture": "Posteriors that are not Gaussian",
    "topics": "Products of posteriors",
    "count": "Products of posteriors",
    "svgp": "Gaussian processes in GPyTorch",
    "deep": "Gaussian processes in GPyTorch",
    "pyro": "Models in Pyro",
    "network": "Networks",
    "training": "Networks",
}
MARK = "\n<!-- examples -->\n"  # what stands above it in the page is written by hand


def drawable():
    """The examples that draw a picture of their own."""
    return [
        path.stem
        for path in sorted(EXAMPLES.glob("*.py"))
        if '"--out"' in path.read_text(encoding="utf-8") and path.stem not in WITHOUT
    ]


def draw(name, seconds):
    """Run an example, and keep its picture; whether it has one."""
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder, f"{name}.png")
        command = [sys.executable, os.fspath(EXAMPLES / f"{name}.py"), "--out", os.fspath(drawn)]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            print(f"{name}: longer than {seconds:g} s")
            return False
        if done.returncode or not drawn.exists():
            print(f"{name}: {done.stderr.strip().splitlines()[-1:]}")
            return False
        with Image.open(drawn) as picture:
            small = picture.convert("RGB")
            small.thumbnail((WIDTH, 4 * WIDTH))
            small.quantize(64).save(DOCS / "gallery" / f"{name}.png", optimize=True)
    print(f"{name}: drawn", flush=True)
    return True


def written():
    """The page: a heading for each kind, and for each picture the first line of the docstring of its example."""
    above = (DOCS / "gallery.md").read_text(encoding="utf-8").partition(MARK)[0]
    parts, heading = [above, MARK], ""
    order = list(dict.fromkeys(KINDS.values()))
    there = [name for name in drawable() if (DOCS / "gallery" / f"{name}.png").exists()]
    for name in sorted(there, key=lambda name: order.index(KINDS[name.split("_")[0]])):
        kind = KINDS[name.split("_")[0]]
        if kind != heading:
            parts.append(f"\n## {kind}\n\n| | |\n|---|---|\n")
            heading = kind
        tree = ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))
        first = (ast.get_docstring(tree) or "").splitlines()[0]
        note = f"{NOTES[name]} " if name in NOTES else ""
        parts.append(f"| ![](gallery/{name}.png) | {first} {note}`python examples/{name}.py` |\n")
    parts.append("\n## Without a picture of their own\n\n")
    parts += [f"- `examples/{name}.py` {why}.\n" for name, why in WITHOUT.items()]
    return "".join(parts)


def main():
    """Draw what is asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=600.0, help="that an example may take")
    options = parser.parse_args()
    (DOCS / "gallery").mkdir(exist_ok=True)
    for name in options.names or drawable():
        draw(name, options.seconds)
    (DOCS / "gallery.md").write_text(written(), encoding="utf-8")


if __name__ == "__main__":
    main()
