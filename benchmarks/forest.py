"""Groups without number: time and memory of an arrow grow with the number of groups, and with nothing else.

    python benchmarks/forest.py [groups ...]

A logistic regression with r parameters of each group, 5 rows a group and 3 common coefficients: as one term a group,
and as a sparse design with a column for each parameter.  VN on the root of the precision with L-BFGS in its frame.  For
each number of groups a process of its own prints the evaluations to a natural-gradient norm of 1e-4, milliseconds of an
evaluation with its step, and the largest memory beyond that of the data, in bytes a group.
"""

import itertools
import resource
import subprocess
import sys
import time

import torch

from torchngvi import GeneralizedLinear, PrecisionCholeskyGaussian, fit
from torchngvi.models import TractableFactors
from torchngvi.numerics import sparse
from torchngvi.structures import arrow

ROWS, GLOBALS = 5, 3


def problem(groups, local, form):
    """The structure, and the model over it: both forms are one model, but for constants."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(groups, ROWS, local + GLOBALS, dtype=torch.float64, generator=generator)
    rows[..., 0] = 1.0
    effects = torch.randn(groups, 1, local, dtype=torch.float64, generator=generator)
    eta = (rows[..., :local] * effects).sum(-1) + rows[..., local:] @ torch.tensor([0.5, -1.0, 0.3]).double()
    y = (torch.rand(groups, ROWS, dtype=torch.float64, generator=generator) < eta.sigmoid()).double()
    structure = arrow(groups=groups, local=local, globals=GLOBALS)
    if form == "factors":
        precision = torch.cat([torch.ones(local), torch.full((GLOBALS,), 0.01 / groups)]).double()  # once a group
        model = GeneralizedLinear(rows, y, prior_precision=precision)
        return structure, TractableFactors(structure, [(0, model)])
    columns = structure.gather(torch.arange(structure.dim))[0][:, None].expand_as(rows)
    pointers = torch.arange(0, rows.numel() + 1, rows.shape[-1])
    X = sparse.compressed(pointers, columns.flatten(), rows.flatten(), (groups * ROWS, structure.dim))
    precision = torch.cat([torch.ones(groups * local), torch.full((GLOBALS,), 0.01)]).double()
    return structure, GeneralizedLinear(X, y.flatten(), prior_precision=precision)


def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def one(groups, local, form):
    fit_of(*problem(10, local, form))  # what is made once, before anything is measured
    structure, target = problem(groups, local, form)
    before, start = memory(), time.perf_counter()
    result = fit_of(structure, target)
    seconds, evaluations = time.perf_counter() - start, result.evaluations
    each = (memory() - before) / groups
    print(
        f"{form:>7}, r = {local}, groups {groups:>7,}, D {structure.dim:>7,}: {result.reason} {evaluations:3d} "
        f"evaluations, {1000 * seconds / evaluations:8.2f} ms each, {each:8.0f} bytes a group",
        flush=True,
    )


def fit_of(structure, target):
    q = PrecisionCholeskyGaussian(structure.dim, structure=structure, dtype=torch.float64)
    return fit(q, target, tolerance=1e-4, progress=False)


def main():
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["one"]:
        one(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
        return
    for form, local in itertools.product(("factors", "sparse"), (1, 2)):
        for groups in sys.argv[1:] or ("100", "1000", "10000", "100000"):
            subprocess.run([sys.executable, __file__, "one", groups, str(local), form], check=True)


if __name__ == "__main__":
    main()
