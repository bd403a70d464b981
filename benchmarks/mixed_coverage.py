"""Do 95 % intervals of `MixedModel.fit` hold the truth 95 times of a hundred?

    python benchmarks/mixed_coverage.py [replicates] [model ...]    # of poisson, logit, "poisson slope"

Truths are drawn from the prior that the fit has, and data from them, so that the intervals of the exact posterior hold
them with probability 0.95 (Cook, Gelman and Rubin 2006): what is measured is the fit.  Three models: Poisson with an
intercept of each group, binary data with an intercept, Poisson with an intercept and a slope.  Counted are the fixed
effects, the standard deviations of random effects, and the linear predictors of a new row in each of five known groups
and in a new one.
"""

import math
import sys
import time

import torch

from torchngvi import MixedModel
from torchngvi.models import MixedPrior, Wishart

MODELS = {
    "poisson": ("poisson_log", 1, 30, 5),
    "logit": ("bernoulli_logit", 1, 40, 8),
    "poisson slope": ("poisson_log", 2, 30, 6),
}
DOF, SD, FIXED = 8.0, 0.8, 1.0  # of the prior: Ω has the mean I/SD², fixed effects the standard deviation FIXED
KNOWN, DRAWS, SHOWN = 5, 1000, 20
KINDS = ("fixed effects", "sds", "known groups", "a new group")


def truth(r, groups, generator):
    """Fixed effects, the root of the covariance of b, and b, from the prior."""
    beta = FIXED * torch.randn(2, dtype=torch.float64, generator=generator)
    A = torch.randn(int(DOF), r, dtype=torch.float64, generator=generator) / (SD * math.sqrt(DOF))
    root = torch.linalg.cholesky(torch.linalg.inv(A.mT @ A))
    b = torch.randn(groups + 1, r, dtype=torch.float64, generator=generator) @ root.mT
    return beta, (root @ root.mT).diagonal().sqrt(), b


def replicate(name, seed):
    """For each kind of quantity, whether each interval holds the truth."""
    family, r, groups, rows = MODELS[name]
    generator = torch.Generator().manual_seed(seed)
    beta, sd, b = truth(r, groups, generator)
    number = torch.arange(groups).repeat_interleave(rows)
    X = torch.stack([torch.ones(len(number), dtype=torch.float64), torch.randn(len(number), generator=generator)], -1)
    eta = X @ beta + (X[:, :r] * b[number]).sum(-1)
    if family == "poisson_log":
        y = torch.poisson(eta.exp(), generator)
    else:
        y = (torch.rand(len(eta), dtype=torch.float64, generator=generator) < eta.sigmoid()).double()
        if len(y.unique()) < 2:
            return None
    scale = torch.eye(r, dtype=torch.float64) / (SD**2 * DOF)
    model = MixedModel(X, y, (X[:, :r], number), family, prior=MixedPrior(FIXED, Wishart(DOF, scale)))
    result = model.fit(progress=False, seed=seed, draws=DRAWS)
    table = result.summary()
    new = torch.stack([torch.ones(KNOWN + 1), torch.randn(KNOWN + 1, generator=generator)], -1).double()
    places = torch.cat([torch.arange(KNOWN), torch.tensor([-1])])
    predicted = result.predict(new, new[:, :r], places, kind="linear")
    at = new @ beta + (new[:, :r] * b[places]).sum(-1)
    inside = (predicted.low <= at) & (at <= predicted.high)
    held = [(of.low <= x) & (x <= of.high) for of, x in ((table.fixed, beta), (table.sd, sd))]
    return [*held, inside[:KNOWN], inside[KNOWN:]], result


def report(name, held, doubtful, left_out, seconds):
    """One line: the share of the intervals that hold the truth, of each kind."""
    parts = []
    for k, kind in enumerate(KINDS):
        all_of = torch.cat([one[k] for one in held]).double()
        parts.append(f"{kind} {100 * all_of.mean():.1f} % of {len(all_of)}")
    print(
        f"{name}, {len(held)} replicates: {', '.join(parts)}; {doubtful} not converged or with k-hat above 0.7, "
        f"{left_out} of one class left out; {seconds:.0f} s of one core",
        flush=True,
    )


def main():
    torch.set_num_threads(1)
    replicates = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    for name in sys.argv[2:] or MODELS:
        clock, held, doubtful, left_out = time.process_time(), [], 0, 0
        for seed in range(replicates):
            found = replicate(name, seed)
            if found is None:
                left_out += 1
                continue
            held.append(found[0])
            doubtful += not (found[1].converged and found[1].k_hat < 0.7)
            if len(held) % SHOWN == 0:
                report(name, held, doubtful, left_out, time.process_time() - clock)
        report(name, held, doubtful, left_out, time.process_time() - clock)


if __name__ == "__main__":
    main()
