"""What `refine` makes of fits whose true moments are known.

    python -m benchmarks.refine [--half tune] [--only NAMES] [--kind fan] [--seed 0]

One line a target: the kind that was returned and the layers; gradients of the fit, and gradients and values of the
refinement; ELBO, effective draws of 1,024, the worst error of a log sd and of a mean in true sds, before and after.
"""

import argparse
import math

import torch

from benchmarks.truths import targets
from torchngvi import CholeskyGaussian, fit, refine
from torchngvi.refinement import FanLayer, LayeredGaussian

WRONG = (math.log(1.3), 0.3)  # of a log sd, of a mean in sds


def errors(target, mean, sd):
    """The worst |log ratio| of sds, and the worst error of a mean in true sds."""
    return float((sd / target.sd).log().abs().max()), float(((mean - target.mean) / target.sd).abs().max())


def layers(posterior):
    """In words: what was laid on the Gaussian."""
    if not isinstance(posterior, LayeredGaussian):
        return ""
    fans = sum(isinstance(layer, FanLayer) for layer in posterior.layers)
    return f" ({fans} fans, {len(posterior.layers) - fans} warps)" if len(posterior.layers) else ""


def row(target, kind, seed):
    """A line of the table, and errors before and after."""
    torch.manual_seed(seed)
    q = CholeskyGaussian(target.dim, dtype=torch.float64)
    spent = fit(q, target.log_joint, progress=False).trace[-1].gradients
    before = errors(target, q.mean, q.stddev)
    found = refine(q, target.log_joint, kind, seed=seed)
    after = errors(target, found.posterior.mean, found.posterior.stddev)
    evidence = target.log_evidence
    gain = f"{found.before.elbo:.2f} -> {found.after.elbo:.3f}"
    if found.kind == "importance":
        gain = f"{found.before.elbo:.2f} -> ({found.after.log_evidence:.3f})"
    cells = [
        f"{target.name} ({target.dim})",
        found.kind + layers(found.posterior),
        f"{spent}",
        f"{found.gradients} + {found.values}",
        gain + ("" if evidence is None else f" ({evidence:.3f})"),
        f"{found.before.effective:.0f} -> {found.after.effective:.0f}",
        f"{found.after.k_hat:.2f}",
        f"{before[0]:.2f} -> {after[0]:.2f}",
        f"{before[1]:.2f} -> {after[1]:.2f}",
    ]
    return " | ".join(cells), before, after


def main():
    """Print the table, and how many are wrong before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=["tune", "held"])
    parser.add_argument("--only", nargs="+", default=None)
    parser.add_argument("--kind", choices=["fan", "mixture", "importance"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--widest", type=int, default=100, help="dimensions up to which a target is run")
    arguments = parser.parse_args()
    print("| target (D) | kind | fit | refinement | ELBO (log evidence) | draws | k-hat | sd error | mean error |")
    wrong = [0, 0]
    count = 0
    for target in targets(arguments.half):
        if (arguments.only and target.name not in arguments.only) or target.dim > arguments.widest:
            continue
        text, *both = row(target, arguments.kind, arguments.seed)
        print(f"| {text} |", flush=True)
        count += 1
        for k, (sd, mean) in enumerate(both):
            wrong[k] += not (sd < WRONG[0] and mean < WRONG[1])
    print(f"wrong by more than 30 % in an sd or 0.3 sds in a mean: {wrong[0]} of {count} before, {wrong[1]} after")


if __name__ == "__main__":
    main()
