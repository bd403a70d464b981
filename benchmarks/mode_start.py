"""Fits over forests from the mode, beside fits that begin where q stands, in CPU time.

    python -m benchmarks.mode_start [--repeats 3] [--groups 20,200]

Regressions with an effect for each group, written as sparse rows and as `TractableFactors`, of counts and of two
classes, with 5 rows a group, fitted from N(0, I) to the default tolerance by a q whose precision has the pattern of the
arrow.  The two fits take turns in one process on one thread; a line for each gives their evaluations, the passes of the
search for the mode, the ratio of the least CPU time of each, and the difference of the losses over the loss.
"""

import argparse
import statistics
import time

import torch

import torchngvi.fitting.steps as steps
from torchngvi import GeneralizedLinear, PrecisionCholeskyGaussian, fit
from torchngvi.models import TractableFactors
from torchngvi.numerics.sparse import compressed
from torchngvi.structures import arrow

ROWS, GLOBALS = 5, 3  # rows of a group, common coefficients


def problem(groups, family, in_factors, seed):
    """The forest and the model: intercepts of groups from N(0, 1) beside three common coefficients."""
    generator = torch.Generator().manual_seed(seed)
    common = 0.5 * torch.randn(groups, ROWS, GLOBALS, generator=generator, dtype=torch.float64)
    effects = 0.7 * torch.randn(groups, 1, generator=generator, dtype=torch.float64)
    eta = common.sum(-1) + effects
    counts = family == "poisson_log"
    y = torch.poisson(eta.exp(), generator) if counts else torch.bernoulli(eta.sigmoid(), generator=generator)
    forest = arrow(groups=groups, local=1, globals=GLOBALS)
    if in_factors:
        X = torch.cat([torch.ones_like(common[..., :1]), common], -1)
        shares = torch.tensor([1.0] + [1.0 / groups] * GLOBALS, dtype=torch.float64)
        return forest, TractableFactors(forest, [(0, GeneralizedLinear(X, y, family, prior_precision=shares))])
    columns = torch.arange(groups)[:, None, None].expand(-1, ROWS, 1)
    columns = torch.cat([columns, (groups + torch.arange(GLOBALS)).expand(groups, ROWS, -1)], -1)
    values = torch.cat([torch.ones_like(common[..., :1]), common], -1)
    ends = (1 + GLOBALS) * torch.arange(groups * ROWS + 1)
    X = compressed(ends, columns.flatten(), values.flatten(), (groups * ROWS, groups + GLOBALS))
    return forest, GeneralizedLinear(X, y.flatten(), family)


def timed(forest, model):
    """A fit and its CPU time."""
    q = PrecisionCholeskyGaussian(forest.dim, structure=forest, dtype=torch.float64)
    start = time.process_time()
    result = fit(q, model, progress=False)
    return result, time.process_time() - start


def compared(forest, model, repeats):
    """Results and least CPU times, from the mode and from where q stands."""
    ways = {"mode": steps.has_start, "stands": lambda q, target: False}
    results, least = {}, dict.fromkeys(ways, float("inf"))
    try:
        for repeat in range(repeats + 1):
            for name, way in ways.items():
                steps.has_start = way
                results[name], seconds = timed(forest, model)
                least[name] = min(least[name], seconds) if repeat else least[name]  # the first warms up
    finally:
        steps.has_start = ways["mode"]
    return results, least["stands"] / least["mode"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--groups", default="20,200,2000")
    given = parser.parse_args()
    torch.set_num_threads(1)
    ratios, gaps = [], []
    for groups in (int(groups) for groups in given.groups.split(",")):
        for family in ("bernoulli_logit", "poisson_log"):
            for in_factors in (False, True):
                forest, model = problem(groups, family, in_factors, groups)
                results, ratio = compared(forest, model, given.repeats)
                mode, stands = results["mode"], results["stands"]
                ratios.append(ratio)
                gaps.append(abs(mode.loss - stands.loss) / abs(stands.loss))
                print(
                    f"{groups:>5} groups, {family:<15} {'factors' if in_factors else 'rows':<7} | evaluations "
                    f"{stands.evaluations} -> {mode.evaluations} and {mode.gradients - mode.evaluations} passes | "
                    f"converged {stands.converged}, {mode.converged} | CPU ratio {ratio:.2f} | losses {gaps[-1]:.0e}",
                    flush=True,
                )
    print(f"{len(ratios)} fits: CPU ratio median {statistics.median(ratios):.2f}, least {min(ratios):.2f}, ", end="")
    print(f"largest {max(ratios):.2f}; losses differ by {max(gaps):.0e} at most")


if __name__ == "__main__":
    main()
