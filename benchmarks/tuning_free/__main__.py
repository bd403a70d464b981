"""A default that needs no tuning, against optimizers at their best of many settings, on 204 synthetic targets.

    python -m benchmarks.tuning_free [--methods fit peers] [--dims 1 2 ...] [--log FILE] [--seed 0]
                                     [--shapes log-gamma ...] [--conditions 1e2 ...]        some targets of fit alone
    python -m benchmarks.tuning_free --report        the figure and the tables of the documentation, from the log

Seven shapes in 1 to 1,000 dimensions, condition numbers 1 to 1e8, means 1 to 30 in each coordinate away from the start
N(0, I); see `benchmarks.tuning_free.targets`.  Every method looks for the same thing, the q of its family with the
largest ELBO, which is known; the gap to it is measured on common draws, and 0.1 nats is asked for.

    fit      torchngvi.fit(q, log_joint) as it is: no argument, its check whether a Gaussian fits included
    peers    settings of five optimizers, 10,000 steps of 5 gradients each, see `benchmarks.tuning_free.peers`

About 25 minutes of a free core, of which the peers take most.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchngvi import CholeskyGaussian, DiagonalGaussian, fit

from . import peers, report
from .targets import DIMS, SHAPES, WIDEST, Stack, gap, stacks

LOG = Path(__file__).with_name("results.jsonl")


def entry(stack: Stack, member: int) -> dict[str, Any]:
    """What identifies a target."""
    setting = stack.settings[member]
    return {"shape": stack.shape, "dim": stack.mean.shape[-1], "condition": setting.condition}


def fitted(stack: Stack, member: int, seed: int) -> dict[str, Any]:
    """The default on one target."""
    dim = stack.mean.shape[-1]
    torch.manual_seed(seed)
    q = (CholeskyGaussian if dim <= WIDEST else DiagonalGaussian)(dim, dtype=torch.float64)
    log_joint, start = stack.one(member), time.process_time()
    result = fit(q, log_joint, progress=False)
    seconds = time.process_time() - start
    root = q.scale_tril if dim <= WIDEST else q.stddev
    with torch.no_grad():
        found, error = gap(log_joint, q.mean, root, (stack.mean[member], stack.root[member]))
    return {
        "method": "fit",
        "gap": found.item(),
        "error": error.item(),
        "gradients": result.trace[-1].gradients if result.trace else 0,
        "with check": result.gradients,
        "values": result.values,
        "converged": result.converged,
        "reason": result.reason,
        "word": result.verdict.word if result.examination else "",
        "seconds": round(seconds, 2),
    }


def fits(dim: int, seed: int, shapes: Sequence[str], conditions: Sequence[float]) -> Iterator[dict[str, Any]]:
    """The default on the targets of a dimension, one after the other."""
    for stack in stacks(dim):
        for member, setting in enumerate(stack.settings):
            if stack.shape not in shapes or (conditions and setting.condition not in conditions):
                continue
            row = entry(stack, member) | fitted(stack, member, seed)
            print(
                f"{row['shape']:20}{dim:5}{row['condition']:9.0e}{row['gap']:12.4f}{row['gradients']:9}"
                f"{row['with check']:9}{row['seconds']:8.1f}  {'' if row['converged'] else row['reason']}",
                flush=True,
            )
            yield row


def compared(dim: int, seed: int) -> Iterator[dict[str, Any]]:
    """The peers on all targets of a dimension, together."""
    of, start = stacks(dim), time.process_time()
    where = [entry(stack, member) for stack in of for member in range(len(stack.settings))]
    for name, gaps in peers.run(of, seed):
        spent = peers.STEPS * peers.DRAWS
        for each, one in zip(where, gaps.tolist(), strict=True):
            yield each | {"method": name, "gap": one if math.isfinite(one) else None, "gradients": spent}
        print(f"{dim:5}  {name:16}within 0.1 nats: {int((gaps <= 0.1).sum())} of {len(gaps)}", flush=True)
    print(f"{dim:5}  {time.process_time() - start:.0f} s", flush=True)


def main() -> None:
    """Run what was asked for, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=("fit", "peers"), choices=("fit", "peers"))
    parser.add_argument("--dims", nargs="+", type=int, default=tuple(DIMS), choices=tuple(DIMS))
    parser.add_argument(
        "--log", type=Path, default=LOG, help="a row for each target and method, one JSON object a line"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, choices=SHAPES)
    parser.add_argument("--conditions", nargs="+", type=float, default=())
    parser.add_argument("--report", action="store_true", help="print the table and draw the figure; run nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.report:
        report.main(arguments.log)
        return
    runs = {"fit": partial(fits, shapes=arguments.shapes, conditions=arguments.conditions), "peers": compared}
    for dim, (method, run) in itertools.product(arguments.dims, runs.items()):
        if method in arguments.methods:
            for row in run(dim, arguments.seed):
                with arguments.log.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
