"""The front page and seven ways in from it: their Python and their transcripts, with all that is said in reply.

    python -m benchmarks.walks [--only groups]

The front page and each tutorial in turn, in an empty folder and a process of its own, with the torchngvi that is
installed: commands as they are printed, Python as if it were typed.  Of the front page's commands the first is run,
without its progress bar.  Seconds are of a command, or of a block of
Python, the first of which imports PyTorch.  What is written is docs/appendix/transcripts.md.
"""

import argparse
import contextlib
import doctest
import io
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
PAGE = TREE / "docs" / "appendix" / "transcripts.md"
FIRST = "torchngvi fit --data breast_cancer --prior-precision 0.1"  # of the two commands of the front page
WAYS = {
    "The front page": "README.md",
    "A table": "docs/tutorials/table.md",
    "A script": "docs/tutorials/script.md",
    "A sparse Gaussian process": "docs/tutorials/gaussian_process.md",
    "A Pyro model": "docs/tutorials/pyro_model.md",
    "Groups": "docs/tutorials/mixed_model.md",
    "A network": "docs/tutorials/network.md",
    "Many machines": "docs/tutorials/many_machines.md",
}
HEAD = """# Transcripts of the ways in

This page is for those who want to see what is said before they install anything. `python -m benchmarks.walks` walked
the front page and the seven tutorials, word for word, each in an empty folder and a process of its own, and wrote down
every reply. Behind each block are its seconds, the import of PyTorch included where it comes first.
[Newcomers](newcomers.md) tells where people who brought their own data stumbled.

{what}
"""
STUMBLE = re.compile(r"^Traceback |^\(exit status ", re.MULTILINE)  # on the page, the end of a way
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page):
    """The Python and the transcripts of a page, in order."""
    return [(found[1], found[2]) for found in BLOCK.finditer(page.read_text(encoding="utf-8"))]


def commands(transcript):
    """Each command of a transcript, with the lines that are shown of what it prints."""
    for part in transcript.split("$ ")[1:]:
        command, *lines = part.strip().splitlines()
        yield shlex.split(command), [line.strip() for line in lines]


def typed(text, scope):
    """Python as if it were typed: each statement behind its prompt, and what comes of it."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        for example in doctest.DocTestParser().get_examples(text):
            lines = example.source.splitlines()
            print("\n".join([f">>> {lines[0]}", *(f"... {line}" for line in lines[1:])]))
            try:
                exec(compile(example.source, "<stdin>", "single"), scope)
            except Exception:
                print(traceback.format_exc().strip())
    return said.getvalue()


def answered(arguments):
    """A command of the shell, and all that it prints."""
    command = shlex.join(arguments)
    module = {"torchngvi": "torchngvi", "torchrun": "torch.distributed.run"}[arguments[0]]
    environment = {**os.environ, "COLUMNS": "96", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=environment,
    )
    ended = f"(exit status {done.returncode})\n" if done.returncode else ""
    return f"$ {command}\n{done.stdout}{ended}"


def fenced(text, seconds):
    """A block of the page that is written, without colours, and its seconds."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text).strip("\n")
    plain = "\n".join(line.rpartition("\r")[2].rstrip() for line in plain.splitlines())
    return f"```text\n{plain}\n```\n\n{seconds:.1f} s\n"


def walk(page):
    """One way in the folder where one is."""
    scope = {"__name__": "__main__"}
    parts = [("console", f"$ {FIRST} --no-progress")] if page.name == "README.md" else []
    for kind, text in [*parts, *blocks(page)]:
        if script := re.match(r"# (\w+\.py)\n", text):
            Path(script[1]).write_text(text, encoding="utf-8")
            continue
        doings = [lambda t=text: typed(t, scope)]
        if kind == "console":
            doings = [lambda a=arguments: answered(a) for arguments, _ in commands(text)]
        for do in doings:
            start = time.perf_counter()
            said = do()
            print(fenced(said, time.perf_counter() - start), flush=True)


def what():
    """The versions that were walked, for the head of the page."""
    import torch

    import torchngvi

    return f"torchngvi {torchngvi.__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the name of a way; the page is then printed, not written")
    parser.add_argument("--page", type=Path, help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args()
    if options.page:
        walk(options.page)
        return
    text = HEAD.format(what=what())
    for name, page in WAYS.items():
        if options.only.lower() not in name.lower():
            continue
        with tempfile.TemporaryDirectory() as folder:
            started = [sys.executable, __file__, "--page", str(TREE / page)]
            start = time.perf_counter()
            done = subprocess.run(started, cwd=folder, capture_output=True, text=True, check=False)
            seconds = time.perf_counter() - start
        assert done.returncode == 0, done.stderr
        link = os.path.relpath(TREE / page, PAGE.parent)
        where = "`README.md`" if page == "README.md" else f"[The page]({link})"
        text += f"\n## {name}\n\n{where}, {seconds:.0f} s in all.\n\n{done.stdout}"
    if options.only:
        print(text)
    else:
        PAGE.write_text(re.sub(r"\n{3,}", "\n\n", text), encoding="utf-8")
    sys.exit("a way ended in an error: look for it in what was written" if STUMBLE.search(text) else 0)


if __name__ == "__main__":
    main()
