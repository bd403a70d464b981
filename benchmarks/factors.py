"""From gradients only: a log joint in factors, fitted through what a user writes, against its exact optimum.

    python benchmarks/factors.py [seeds ...]

Groups of five rows with an intercept each, or an intercept and a slope: D = 1,004 as 1,000 x 1 + 4 and 500 x 2 + 4.
The group's term of the log joint is a function of its own effects and of the global parameters (fixed effects, and
the entries ω of the root of the precision of the effects), written in torch; ``fit(q, FactorTarget(...))`` sees
values and gradients alone, from q = N(0, I).  The exact optimum is that of `MixedLogJoint`, whose expectations are in
closed form or by quadrature, of the same log joint.  For each problem a line: gradients of each factor until the
bound is within 0.1 nats of the optimum and stays there, gradients and values that the whole fit has taken, nats lost
in the end, and the nats that the fit itself tells.  The records are read by a callback that costs the fit nothing.
"""

import math
import sys
import time

import torch
from torch.nn.functional import softplus

from torchngvi import PrecisionCholeskyGaussian, fit
from torchngvi.models import FactorTarget, MixedLogJoint, MixedPrior

ROWS, NEAR = 5, 0.1
PROBLEMS = [(1000, 1, 3), (500, 2, 1)]  # groups, effects of each, fixed effects


def problem(groups, local, fixed, family, seed):
    """A mixed model drawn from itself, and the same log joint in factors."""
    generator = torch.Generator().manual_seed(seed)
    number = torch.arange(groups).repeat_interleave(ROWS)
    X = torch.randn(len(number), max(local, fixed), dtype=torch.float64, generator=generator)
    X[:, 0] = 1.0
    effects = 0.7 * torch.randn(groups, local, dtype=torch.float64, generator=generator)
    eta = 0.35 * X[:, :fixed].sum(-1) + (effects[number] * X[:, :local]).sum(-1)
    if family == "poisson_log":
        y = torch.poisson(eta.exp(), generator)
    else:
        y = (torch.rand(len(number), dtype=torch.float64, generator=generator) < eta.sigmoid()).double()
    model = MixedLogJoint(X[:, :fixed], y, (X[:, :local], number), family, prior=MixedPrior(10.0, "kass-natarajan"))
    return model, in_factors(model, X.reshape(groups, ROWS, -1), y.reshape(groups, ROWS), local, fixed, family)


def in_factors(model, X, y, local, fixed, family):
    """What a user writes: a function of (b_i, β, ω) for each group, and the prior of (β, ω)."""
    constant = torch.lgamma(y + 1).sum(-1) if family == "poisson_log" else 0.0
    rows, columns = torch.tril_indices(local, local).tolist()
    entries = sorted(zip(columns, rows, strict=True))  # of W, column by column
    prior = model.fixed.prior

    def of_groups(theta):  # (draws, n, k) -> (draws, n)
        b, beta, omega = theta.split([local, fixed, len(entries)], -1)
        eta = torch.einsum("nip,snp->sni", X[..., :fixed], beta) + torch.einsum("nir,snr->sni", X[..., :local], b)
        data = y * eta - (eta.exp() if family == "poisson_log" else softplus(eta))
        turned, log_det = [0.0] * local, 0.0
        for (column, row), w in zip(entries, omega.unbind(-1), strict=True):  # Wᵀ b
            turned[column] = turned[column] + (w.exp() if row == column else w) * b[..., row]
            log_det = log_det + (w if row == column else 0.0)
        effects = log_det - 0.5 * sum(t.square() for t in turned) - 0.5 * local * math.log(2 * math.pi)
        return data.sum(-1) - constant + effects

    def of_globals(theta):  # (draws, 1, p) -> (draws, 1)
        return -prior.energy(theta[..., :fixed]) - model.covariance_prior.energy(theta[..., fixed:])

    return FactorTarget(model.structure, [(0, of_groups), (-1, of_globals)])


@torch.no_grad()
def one(groups, local, fixed, family, seed):
    model, target = problem(groups, local, fixed, family, seed)
    best = model.posterior()
    optimum = fit(best, model, tolerance=1e-6, progress=False).loss
    theta = best.mean + 0.1 * torch.randn(3, model.dim, dtype=torch.float64)
    assert (target.log_joint(theta) - model.log_joint(theta)).abs().max() < 1e-8  # the same log joint
    q = PrecisionCholeskyGaussian(model.dim, structure=model.structure, dtype=torch.float64)
    torch.manual_seed(seed)
    lost, clock = [], time.perf_counter()

    def above(record):
        lost.append((record.gradients, float(model.negative_elbo(q)) - optimum))

    result = fit(q, target, progress=False, callbacks=[above], examine=False)
    end = float(model.negative_elbo(q)) - optimum
    far = [k for k, (_, nats) in enumerate(lost) if not nats < NEAR]
    near = lost[far[-1] + 1][0] if far and far[-1] + 1 < len(lost) else math.inf
    print(
        f"{family:>15}, {groups:>5,} x {local} + {model.dim - groups * local}, seed {seed}: within {NEAR} nats from "
        f"{near:5} gradients of each factor; {result.gradients:5} and {result.values:5} values in all, "
        f"{result.evaluations:3} evaluations, converged {result.converged}, {end:.4f} nats lost "
        f"({0.5 * result.norm**2:.3f} told), {time.perf_counter() - clock:.0f} s",
        flush=True,
    )


def main():
    torch.set_num_threads(1)
    for seed in [int(seed) for seed in sys.argv[1:]] or range(3):
        for groups, local, fixed in PROBLEMS:
            for family in ("poisson_log", "bernoulli_logit"):
                one(groups, local, fixed, family, seed)


if __name__ == "__main__":
    main()
