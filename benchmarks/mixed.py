"""Mixed models with many groups: time and memory grow with their number, and with nothing else.

    python benchmarks/mixed.py [groups ...]

Five rows a group, two fixed effects, an intercept of each group (r = 1) or an intercept and a slope (r = 2).  The fit
is `fit(model.posterior(), model)` with its defaults, to a natural-gradient norm of 1e-3.  For each number of groups a
process of its own, for each of three simulated data sets where there are at most 10,000 groups, prints the evaluations,
those after which the loss is within 1e-3 nats of the last, CPU seconds of the start and of the fit, milliseconds of an
evaluation with its step, the largest memory beyond that of the data, and that of the process.
"""

import itertools
import resource
import subprocess
import sys
import time

import torch

from torchngvi import fit
from torchngvi.models import MixedLogJoint

ROWS, SEEDS, MANY = 5, 3, 10_000


def problem(groups, local, family, seed=0):
    """The arguments of a model, drawn from it."""
    generator = torch.Generator().manual_seed(seed)
    number = torch.arange(groups).repeat_interleave(ROWS)
    x = torch.randn(len(number), dtype=torch.float64, generator=generator)
    X = torch.stack([torch.ones_like(x), x], -1)
    effects = 0.7 * torch.randn(groups, local, dtype=torch.float64, generator=generator)
    eta = 0.5 * X.sum(-1) + (effects[number] * X[:, :local]).sum(-1)
    if family == "poisson_log":
        y = torch.poisson(eta.exp(), generator)
    else:
        y = (torch.rand(len(number), dtype=torch.float64, generator=generator) < eta.sigmoid()).double()
    return X, y, (X[:, :local], number), family


def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def one(groups, local, family, seed):
    small = MixedLogJoint(*problem(10, local, family))
    fit(small.posterior(), small, progress=False)  # what is made once, before anything is measured
    arguments = problem(groups, local, family, seed)
    before, clock = memory(), time.process_time()
    model = MixedLogJoint(*arguments)
    q = model.posterior()
    started = time.process_time()
    losses = []
    result = fit(q, model, tolerance=1e-3, progress=False, callbacks=[lambda record: losses.append(record.loss)])
    seconds, evaluations = time.process_time() - started, result.evaluations
    near = 1 + next(k for k, loss in enumerate(losses) if loss <= result.loss + 1e-3)
    print(
        f"{family:>15}, r = {local}, groups {groups:>7,}, data {seed}, D {model.dim:>7,}: {result.reason} "
        f"{evaluations:3d} evaluations ({near} to 1e-3 nats), start {started - clock:6.2f} s, fit {seconds:6.2f} s, "
        f"{1000 * seconds / evaluations:8.2f} ms each, {(memory() - before) / groups / 1000:5.1f} kB a group, "
        f"{memory() / 1e9:.2f} GB in all",
        flush=True,
    )


def main():
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["one"]:
        one(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
        return
    for family, local in itertools.product(("poisson_log", "bernoulli_logit"), (1, 2)):
        for groups in sys.argv[1:] or ("100", "1000", "10000", "100000"):
            for seed in range(SEEDS if int(groups) <= MANY else 1):
                subprocess.run([sys.executable, __file__, "one", groups, str(local), family, str(seed)], check=True)


if __name__ == "__main__":
    main()
