"""`fit`, its verdict and `refine` on published models that were not used in making the rule.

    python -m benchmarks.published [--only NAMES] [--seeds 0 1 2]      # the table
    python -m benchmarks.published --truths                            # where each truth is from, and its error
    python -m benchmarks.published --nuts [--only NAMES]               # makes moments.json again; an hour, needs Pyro

One line a model and seed: D; gradients and seconds of the fit (of the processor, one thread); the words of the verdict;
the worst ratio of a true sd to that of q (above 1: q is too narrow) and the worst error of a mean, in true sds; where
the word is not "fits", what `refine` makes of it, its gradients and values together, its word and these two numbers.
Below it the counts; wrong is as in `benchmarks.verdicts`, an sd off by more than 30 % or a mean by more than 0.3 of it.
"""

import argparse
import time
import warnings
from collections import Counter

import torch
from torch import Tensor

from benchmarks.truths.__main__ import wrong
from benchmarks.truths.target import Truth
from torchngvi import CholeskyGaussian, fit, refine
from torchngvi.refinement import RefinementWarning

from . import MODELS, Model, nuts

HEAD = """\
| model, seed | D | gradients | s | the verdict | true sd / q's | mean off | refined | true sd / its | mean off |
|---|---|---|---|---|---|---|---|---|---|"""


def true(model: Model) -> Truth:
    """The moments of a model, by quadrature or as they are kept."""
    return nuts.truth(model) if model.truth is None else model.truth()


def worst(
    model: Model,
    known: Truth,
    mean: Tensor,  # (D,)
    sd: Tensor,  # (D,)
) -> tuple[list[str], bool]:
    """The ratio of sds farthest from 1 and the largest error of a mean in true sds, with coordinates; is q wrong?"""
    ratio, shift = known.sd / sd, (mean - known.mean) / known.sd
    k, j = int(ratio.log().abs().argmax()), int(shift.abs().argmax())
    cells = [f"{float(ratio[k]):.2f}, {model.names[k]}", f"{float(shift[j]):+.2f}, {model.names[j]}"]
    return cells, wrong(float(ratio[k].log()), float(shift[j].abs()))


def row(model: Model, known: Truth, seed: int) -> tuple[str, dict[str, tuple[bool, str]]]:
    """A line of the table, and for q and what `refine` made of it whether it is wrong and the word that is said."""
    torch.manual_seed(seed)
    q = CholeskyGaussian(model.dim, dtype=torch.float64)
    start = time.process_time()
    result = fit(q, model.log_joint, progress=False).named(list(model.names))
    seconds = time.process_time() - start
    word = result.verdict.word
    reasons = result.verdict.reasons
    said = "; ".join(["**" + word + "**", *reasons]) + ("" if result.converged else " (not converged)")
    cells = [f"{model.name}, {seed}", model.dim, result.gradients, f"{seconds:.1f}", said]
    numbers, bad = worst(model, known, q.mean, q.stddev)
    cells += numbers
    counts = {"fit": (bad, word)}
    if word == "fits":
        cells += [""] * 3
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RefinementWarning)  # its words are in the table
            found = refine(result, model.log_joint, seed=seed)
        told = f"{found.kind}, {found.gradients + found.values}: {found.second.word}"
        numbers, bad = worst(model, known, found.posterior.mean, found.posterior.stddev)
        cells += [told, *numbers]
        counts["refine"] = (bad, found.second.word)
    return "| " + " | ".join(str(cell) for cell in cells) + " |", counts


def counted(found: list[dict[str, tuple[bool, str]]]) -> None:
    """Print how many are wrong and right, by who says what of them."""
    for who in ("fit", "refine"):
        count = Counter(each[who] for each in found if who in each)
        for bad, name in ((True, "wrong"), (False, "right")):
            words = ", ".join(f"{number} {word}" for (off, word), number in sorted(count.items()) if off == bad)
            print(f"{who}, {name}: {words or 'none'}")


def main() -> None:
    """Print the table, or where the truths are from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="parts of names")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--truths", action="store_true")
    parser.add_argument("--nuts", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = [model for name, model in MODELS.items() if not options.only or any(x in name for x in options.only)]
    if options.nuts:
        nuts.remake(models)
        return
    if not options.truths:
        print(HEAD)
    found = []
    for model in models:
        known = true(model)
        if options.truths:
            how = nuts.told(model.name) if model.truth is None else f"quadrature, error {known.error:.1g} sds"
            print(f"{model.name}: {model.source}; {how}", flush=True)
            continue
        for seed in options.seeds:
            line, counts = row(model, known, seed)
            found.append(counts)
            print(line, flush=True)
    if found:
        print()
        counted(found)


if __name__ == "__main__":
    main()
