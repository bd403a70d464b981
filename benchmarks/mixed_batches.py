"""Mixed models in batches of groups: passes to the optimum of the whole, and memory.

    python benchmarks/mixed_batches.py [seeds ...]        passes, 1,000 groups
    python benchmarks/mixed_batches.py memory [groups]    memory of a fit of the whole and of one in batches

The problems are those of `benchmarks/mixed.py`: five rows a group, two fixed effects, an intercept of each group, or
an intercept and a slope.  ``fit(q, model, batch_groups=50)`` begins at ``model.posterior()``; a pass counts where the
bound is within 1e-3 or 1e-6 nats of the optimum and stays there.  Work is what the groups are evaluated, on average.
"""

import itertools
import resource
import subprocess
import sys
import time

import torch
from mixed import problem

from torchngvi import PrecisionCholeskyGaussian, fit
from torchngvi.models import MixedLogJoint
from torchngvi.models.mixed_batches import MixedInBatches

GROUPS, BATCH = 1000, 50


def passes(family, local, seed):
    model = MixedLogJoint(*problem(GROUPS, local, family, seed))
    q = model.posterior()
    whole = fit(q, model, tolerance=1e-7, progress=False)
    seen, losses, see = [0], [], MixedInBatches._see

    def counted(self, here, *others):
        seen[0] += len(here.mean)
        return see(self, here, *others)

    MixedInBatches._see = counted
    started = time.perf_counter()
    result = fit(
        model.posterior(),
        model,
        batch_groups=BATCH,
        tolerance=1e-6,
        progress=False,
        callbacks=[lambda record: losses.append((record.loss - whole.loss, seen[0] / GROUPS))],
    )
    MixedInBatches._see = see
    first = []
    for nats in (1e-3, 1e-6):
        far = [k for k, (lost, _) in enumerate(losses) if not lost < nats]
        first.append(far[-1] + 1 if far else 0)
    (three, six), work = (k + 1 for k in first), [losses[k][1] for k in first]
    print(
        f"{family:>15}, r = {local}, data {seed}: within 1e-3 nats after {three:2d} passes ({work[0]:.0f} evaluations "
        f"of a group), 1e-6 after {six:2d} ({work[1]:.0f}); whole {whole.evaluations}; {result.converged}, "
        f"{result.loss - whole.loss:.0e} nats in the end, {time.perf_counter() - started:.1f} s",
        flush=True,
    )


def memory(groups, batch):
    small = MixedLogJoint(*problem(10, 1, "poisson_log"))
    fit(small.posterior(), small, progress=False, batch_groups=batch or None)
    model = MixedLogJoint(*problem(groups, 1, "poisson_log"))
    q = PrecisionCholeskyGaussian(model.dim, structure=model.structure, dtype=torch.float64, scale=0.3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = fit(q, model, tolerance=1e-3, progress=False, batch_groups=batch or None, max_evaluations=6)
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    how = f"groups {groups:,}, in batches of {batch or groups:,}"
    print(f"{how}: {result.evaluations} evaluations, {more / 1024:.0f} MB more")


def main():
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["memory"]:
        groups = sys.argv[2] if len(sys.argv) > 2 else "100000"
        for batch in (0, 1000):
            subprocess.run([sys.executable, __file__, "one", groups, str(batch)], check=True)
        return
    if sys.argv[1:2] == ["one"]:
        memory(int(sys.argv[2]), int(sys.argv[3]))
        return
    for seed in [int(seed) for seed in sys.argv[1:]] or range(3):
        for family, local in itertools.product(("poisson_log", "bernoulli_logit"), (1, 2)):
            passes(family, local, seed)


if __name__ == "__main__":
    main()
