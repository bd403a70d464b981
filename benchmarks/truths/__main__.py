"""How well the best Gaussian fits each target: `python -m benchmarks.truths [--half held] [--only NAMES]`.

A fit is wrong where the sd of a coordinate is off by more than 30 %, or a mean by more than .3 sd of the truth.  The
columns: the worst log ratio of sds (sign: below 0, q is too narrow), the worst error of a mean in sds, the verdict on
the Gaussian, whether `fit` converged, its gradients and seconds.  A q that `fit` left short of its optimum says
nothing of the best Gaussian: look at the column "converged" first.
"""

import argparse
import math
import time
from collections import Counter

import torch
from torch import Tensor

from torchngvi import CholeskyGaussian, fit

from . import Target, targets

LIMITS = (math.log(1.3), 0.3)  # of a log sd, of a mean in sds


def errors(target: Target, mean: Tensor, sd: Tensor) -> tuple[float, float]:
    """The worst log ratio of sds, with its sign, and the worst error of a mean in true sds."""
    ratio = (sd.double() / target.sd).log()
    worst = ratio[ratio.abs().argmax()]
    return float(worst), float(((mean.double() - target.mean) / target.sd).abs().max())


def wrong(sd_error: float, mean_error: float) -> bool:
    """Whether a fit with these errors is called wrong."""
    return not (abs(sd_error) <= LIMITS[0] and mean_error <= LIMITS[1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=["tune", "held", "fresh", "fresh 1", "fresh 2"])
    parser.add_argument("--only", nargs="+", default=[], help="parts of names")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: Counter[tuple[str, str]] = Counter()
    print(f"{'target':50}   D half  log sd   mean  Gaussian  converged  gradients      s")
    for target in targets(options.half):
        if options.only and not any(part in target.name for part in options.only):
            continue
        torch.manual_seed(options.seed)
        q, start = CholeskyGaussian(target.dim, dtype=torch.float64), time.perf_counter()
        result = fit(q, target.log_joint, progress=False)
        seconds = time.perf_counter() - start
        sd_error, mean_error = errors(target, q.mean, q.stddev)
        word = "wrong" if wrong(sd_error, mean_error) else "right"
        found[target.half, word] += 1
        gradients = result.trace[-1].gradients if result.trace else 0
        row = f"{target.name:50}{target.dim:4} {target.half}{sd_error:8.3f}{mean_error:7.3f}  {word:8}"
        print(f"{row}  {'yes' if result.converged else 'no':9}{gradients:11}{seconds:7.1f}", flush=True)
    print(", ".join(f"{half}: {count} {word}" for (half, word), count in sorted(found.items())))


if __name__ == "__main__":
    main()
