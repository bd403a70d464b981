"""Groups without number: time and memory of an arrow grow with the number of groups, and with nothing else.

    python benchmarks/forest.py [groups ...]

A logistic regression with r parameters of each group, 5 rows a group and 3 coefficients that all share; exact
expectations of each group's rows, VN on the root of the precision with the memory of L-BFGS.  For each number of groups
a process of its own prints the evaluations to a natural-gradient norm of 1e-4, milliseconds of an evaluation with its
step, and the largest memory beyond that of the data, in bytes a group.
"""

import resource
import subprocess
import sys
import time

import torch

from torchngvi import GeneralizedLinear, PrecisionCholeskyGaussian, fit
from torchngvi.models import TractableFactors
from torchngvi.structures import arrow

ROWS, GLOBALS = 5, 3


def problem(groups, local):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(groups, ROWS, local + GLOBALS, dtype=torch.float64, generator=generator)
    rows[..., 0] = 1.0
    effects = torch.randn(groups, 1, local, dtype=torch.float64, generator=generator)
    eta = (rows[..., :local] * effects).sum(-1) + rows[..., local:] @ torch.tensor([0.5, -1.0, 0.3]).double()
    y = (torch.rand(groups, ROWS, dtype=torch.float64, generator=generator) < eta.sigmoid()).double()
    precision = torch.cat([torch.ones(local), torch.full((GLOBALS,), 0.01 / groups)]).double()  # once a group
    return TractableFactors(
        arrow(groups=groups, local=local, globals=GLOBALS),
        [(0, GeneralizedLinear(rows, y, prior_precision=precision))],
    )


def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def one(groups, local):
    fit_of(problem(10, local))  # what is made once, before anything is measured
    target = problem(groups, local)
    before, start = memory(), time.perf_counter()
    q, result = fit_of(target)
    seconds, evaluations = time.perf_counter() - start, result.evaluations
    each = (memory() - before) / groups
    print(
        f"groups {groups:>7,}, r = {local}, D {q.dim:>7,}: {result.reason}; {evaluations:3d} evaluations, "
        f"{1000 * seconds / evaluations:8.2f} ms each, {each:8.0f} bytes a group",
        flush=True,
    )


def fit_of(target):
    structure = target.structure
    q = PrecisionCholeskyGaussian(structure.dim, structure=structure, dtype=torch.float64)
    return q, fit(q, target, tolerance=1e-4, progress=False)


def main():
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["one"]:
        one(int(sys.argv[2]), int(sys.argv[3]))
        return
    for local in (1, 2):
        for groups in map(int, sys.argv[1:] or (100, 1_000, 10_000, 100_000)):
            subprocess.run([sys.executable, __file__, "one", str(groups), str(local)], check=True)


if __name__ == "__main__":
    main()
