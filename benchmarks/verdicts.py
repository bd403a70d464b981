"""The verdict on fits whose true errors are known: how often it is right, and what it costs.

    python -m benchmarks.verdicts [--half fresh] [--seeds 3] [--first 0] [--only NAMES] [--fits FOLDER] [--least 5000]

One line a target and seed: the word; the worst error of a log sd (below 0 q is too narrow) and of a mean in true sds;
what importance sampling ("s") and linear response say of the worst coordinate; k-hat and effective draws; the number of
other modes; gradients of the fit and of the check.
A fit is wrong where an sd is off by more than 30 % or a mean by more than 0.3 of it, and far off where an sd is by more
than 1.5 times or a mean by more than 0.5 of it.  A wrong one that "fits" is missed, and so is one that is far off and
"about right"; the two are also counted apart.  A right one that "does not fit" is a false alarm; other "about right"
are neither, and are counted beside them.  So are
other words for the same fits: what `fit` itself says within its budget, k-hat of q above 0.7, and the words of an ELBO
that has settled, whose relative change in the last step is below 1 %.
"""

import argparse
import math
import time
from collections import Counter
from pathlib import Path

import torch

from benchmarks.truths import targets
from torchngvi import CholeskyGaussian, fit
from torchngvi.diagnostics import ExaminationSettings, examine
from torchngvi.fitting import sample_average

LIMITS = (math.log(1.3), 0.3)  # of a log sd, of a mean in sds
FAR = (math.log(1.5), 0.5)  # the same where "about right" is a miss too
Z = 1.96  # of an interval
VALUE = 0.4  # of a gradient
K_HAT = 0.7  # above which a fit is called bad by it alone
SETTLED = 0.01  # relative change of the ELBO below which it is called converged


def fitted(target, seed, folder):
    """q, and what is known of its fit; kept in the folder if there is one."""
    path = folder / f"{target.name.replace('/', '-')}, {seed}.pt" if folder else None
    q = CholeskyGaussian(target.dim, dtype=torch.float64)
    if path is not None and path.exists():
        kept = torch.load(path)
        q.load_state_dict(kept["q"])
        return q, kept
    torch.manual_seed(seed)
    result = fit(q, target.log_joint, progress=False)
    losses = [record.loss for record in result.trace[-2:]]
    known = {
        "converged": result.converged,
        "gradients": result.gradients,
        "cost": result.gradients + VALUE * result.values,
        "change": abs(losses[-1] - losses[0]) / max(abs(losses[-1]), 1e-300) if len(losses) > 1 else math.inf,
        "word": result.verdict.word,
    }
    if path is not None:
        torch.save({"q": q.state_dict(), **known}, path)
    return q, known


def errors(target, q):
    """The worst log ratio of sds, with its sign, and the worst error of a mean in true sds."""
    ratio = (q.stddev / target.sd).log()
    return float(ratio[ratio.abs().argmax()]), float(((q.mean - target.mean) / target.sd).abs().max())


def quality(sd, mean):
    """Whether a fit with these worst errors is right, wrong or far off.

    >>> [quality(*errors) for errors in ((-0.26, 0.1), (0.27, 0.0), (0.1, 0.51), (-0.41, 0.0))]
    ['right', 'wrong', 'far off', 'far off']
    """
    sizes = abs(sd), mean
    return ("right", "wrong", "far off")[
        any(size > limit for size, limit in zip(sizes, LIMITS, strict=True))
        + any(size > limit for size, limit in zip(sizes, FAR, strict=True))
    ]


def interval(count, of):
    """Wilson's, for a share."""
    if not of:
        return "none"
    share, square = count / of, Z * Z / of
    middle = (share + square / 2) / (1 + square)
    half = Z * math.sqrt(share * (1 - share) / of + square / (4 * of)) / (1 + square)
    return f"{count} of {of} ({max(middle - half, 0.0):.0%} to {middle + half:.0%})"


def row(target, seed, folder):
    """A line of the table, and (part of the suite, how good the fit is, the words by who says them)."""
    q, known = fitted(target, seed, folder)
    start = time.perf_counter()
    verdict = examine(q, target.log_joint, seed=seed)
    seconds = time.perf_counter() - start
    sd, mean = errors(target, q)
    level = quality(sd, mean)
    response = "-" if verdict.shape is None else f"{float(verdict.shape.log_sd.abs().max()):.2f}"
    sampled, shift, k_hat, effective = "-", "-", "-", "-"
    if verdict.sampled is not None:
        found = verdict.sampled.corrected
        sampled = f"{float((found.sd / q.stddev).log().abs().max()):.2f}"
        shift = f"{float(((found.mean - q.mean) / found.sd).abs().max()):.2f}"
        k_hat, effective = f"{found.k_hat:.2f}", f"{found.effective:.0f}"
    heavy = "-" if verdict.shape is None else f"{float(-verdict.shape.tails.min()):.2f}"
    line = (
        f"{target.name[:44]:44}{target.dim:4}{seed:3}  {verdict.word:13}{level:8}{sd:7.2f}"
        f"{mean:6.2f}{sampled:>7}{shift:>7}{k_hat:>7}{effective:>6}{response:>7}{heavy:>7}{len(verdict.modes):3}"
        f"{known['gradients']:9}{'' if known['converged'] else '*':1}{verdict.effort.gradients:8}{seconds:6.1f}"
    )
    alone = verdict.sampled is not None and verdict.sampled.from_q.k_hat <= K_HAT
    words = {
        "examine": verdict.word,
        "fit": known["word"],
        "k-hat > 0.7": "fits" if alone else "does not fit",
        "an ELBO that has settled": "fits" if known["change"] < SETTLED else "does not fit",
    }
    return line, (target.half, level, words, known["cost"])


def counted(found):
    """The counts of each part of the suite, by who says the word, and what all fits with their examinations cost."""
    for half in sorted({each[0] for each in found}):
        for who in found[0][2]:
            count = Counter((level, words[who]) for part, level, words, _ in found if part == half)
            right = sum(number for (level, _), number in count.items() if level == "right")
            wrong = sum(count.values()) - right
            fits = count["wrong", "fits"] + count["far off", "fits"]
            about, alarms = count["far off", "about right"], count["right", "does not fit"]
            print(
                f'{half}, {who}: missed {interval(fits + about, wrong)}, {fits} of them as "fits" and {about} far off '
                f'as "about right"; false alarms {interval(alarms, right)}'
            )
            for level in ("far off", "wrong", "right"):
                words = (f"{number} {key[1]}" for key, number in sorted(count.items()) if key[0] == level)
                print(f"    {level}: {', '.join(words)}")
        cost = sum(cost for part, _, _, cost in found if part == half)
        print(f"{half}, cost of all fits with their examinations: {cost:.0f} gradients")


def main():
    """Print the table and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=["tune", "held", "fresh", "fresh 1", "fresh 2"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--only", nargs="+", default=[], help="parts of names")
    parser.add_argument("--fits", type=Path, help="a folder that keeps the fits for the next run")
    parser.add_argument("--least", type=float, help="what an examination may cost after a fit that took less")
    options = parser.parse_args()
    if options.least is not None:
        sample_average._EXAMINATION = ExaminationSettings(least=options.least)
    torch.set_num_threads(1)
    if options.fits:
        options.fits.mkdir(parents=True, exist_ok=True)
    print(
        f"{'target':44}{'D':>4}{'':3}  {'word':13}{'':8}{'log sd':>7}{'mean':>6}{'s sd':>7}{'s mean':>7}{'k-hat':>7}"
        f"{'ess':>6}{'resp.':>7}{'-kappa':>7}{'':3}{'fit':>9} {'check':>8}{'s':>6}    (*: the fit did not converge)"
    )
    found = []
    for target in targets(options.half):
        if options.only and not any(part in target.name for part in options.only):
            continue
        for seed in range(options.first, options.first + options.seeds):
            line, key = row(target, seed, options.fits)
            found.append(key)
            print(line, flush=True)
    counted(found)


if __name__ == "__main__":
    main()
