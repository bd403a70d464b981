"""What the `*_public.py` share: public questions rebuilt as situations, their cells, a log that goes on, the table.

    python -m benchmarks.public [--only tables_public ...] [--threads]

runs all of them, each with its log in the working directory, and prints the addresses of their questions; ``--threads``
prints these alone.

A cell has a score and the verdict: "right" where the score is within the bound of the situation, "refused" where a
sentence was raised, "told" where a wrong end was said in the result or in a warning, "wrong" elsewhere.  The log has a
line for each cell; a run that was stopped goes on.
"""

import argparse
import importlib
import json
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchngvi.errors import InputError, PairError

PAGES = ("gpytorch_public", "tables_public", "networks_public", "pyro_public")


class Situation(NamedTuple):
    """A question, what is scored, and the function that makes it."""

    address: str
    what: str
    function: Callable[..., Any]


class End(NamedTuple):
    """Where a method ends: its score, the bound up to which that is right, what was said, and whether that warns."""

    score: float
    bound: float
    note: str = ""
    told: bool = False


class Questions:
    """Situations by name, and ``play(function, method, **numbers)``, which gives the `End` of a method in one."""

    def __init__(self, methods: Iterable[str], play: Callable[..., End]):
        self.methods, self.play, self.situations = tuple(methods), play, dict[str, Situation]()

    def situation(self, name, address):
        """Registers a function, whose docstring says what is asked and scored."""

        def kept(function):
            self.situations[name] = Situation(address, function.__doc__.strip().rstrip("."), function)
            return function

        return kept

    def cell(self, name, method, **numbers):
        """The score of a method, its verdict, what was said, and the processor seconds."""
        torch.manual_seed(0)
        start, warns = time.process_time(), "torchngvi.errors" if method == "ours" else "sklearn.exceptions"
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                score, bound, note, told = self.play(self.situations[name].function, method, **numbers)
                told = told or any(warning.category.__module__ == warns for warning in said)
                verdict = "right" if score <= bound else "told" if told else "wrong"
            except (InputError, PairError) as error:
                score, verdict, note = math.nan, "refused", str(error)
            except Exception as error:  # noqa: BLE001  a finding
                score, verdict, note = math.nan, "wrong", type(error).__name__
        return {"score": score, "verdict": verdict, "note": note, "seconds": time.process_time() - start}

    def main(self, doc, log, arguments=None, **numbers):
        """Fill the log, and print the table and how often each verdict was given."""
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--only", nargs="*", default=list(self.situations), choices=self.situations, metavar="NAME")
        parser.add_argument("--log", type=Path, default=Path(log))
        for option, number in numbers.items():
            parser.add_argument(f"--{option}", type=int, default=number)
        options = vars(parser.parse_args(arguments))
        only, log = options.pop("only"), options.pop("log")
        torch.set_num_threads(1)
        lines = [f"| # | question | {' | '.join(self.methods)} |", "|---|---|" + "---|" * len(self.methods)]
        counts = {method: Counter() for method in self.methods}
        for name in only:
            shown = []
            for method in self.methods:
                key = {"situation": name, "method": method, **options}
                found = next((each for each in read(log) if key.items() <= each.items()), None)
                if found is None:
                    found = key | self.cell(name, method, **options)
                    with log.open("a") as file:
                        file.write(json.dumps(found) + "\n")
                counts[method][found["verdict"]] += 1
                shown.append(printed(found))
            address, what, _ = self.situations[name]
            lines.append(f"| {name} | {what} ({address}) | {' | '.join(shown)} |")
            print(lines[-1], flush=True)
        for method, verdicts in counts.items():
            print(
                f"{method}: " + ", ".join(f"{number} {word}" for word, number in sorted(verdicts.items())), flush=True
            )
        return lines


def printed(found):
    """A cell of the table."""
    score = "" if math.isnan(found["score"]) else f"{found['score']:.3g}, "
    note = f" ({found['note']})" if found["note"] and found["verdict"] != "refused" else ""
    return f"{score}{found['verdict']}{note}, {found['seconds']:.1f} s"


def read(log):
    """The cells of a log; a line that was cut off is none."""
    for line in log.read_text().splitlines() if log.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def threads(page):
    """The addresses of the questions of a page, each once, in order."""
    if page.__name__.endswith("pyro_public"):
        return list(dict.fromkeys(model.source for model in page.MODELS.values()))
    return list(dict.fromkeys(address for address, _, _ in page.QUESTIONS.situations.values()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PAGES, default=PAGES)
    parser.add_argument("--threads", action="store_true", help="only print the addresses")
    options = parser.parse_args()
    pages = [importlib.import_module(f"benchmarks.{name}") for name in options.only]
    for name, page in () if options.threads else zip(options.only, pages, strict=True):
        print(f"\n{name}", flush=True)
        page.main(["--log", f"{name}.jsonl"])
    for page in pages:
        print("\n".join(threads(page)))


if __name__ == "__main__":
    main()
