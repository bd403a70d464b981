"""Linear and logistic mixed models beside statsmodels: the same data, estimates and times.

    python benchmarks/mixed_peers.py [groups ...]

Five rows a group.  A linear mixed model with an intercept of each group, with the same five times for all groups or
with a covariate of its own in each row, and with an intercept and a slope: `MixedModel.fit` learns the residual sd,
`statsmodels.MixedLM` is REML.  Then a logistic one with an intercept, 294 groups of about seven rows, whose sd is 4 as
in the trial of toenail infections (De Backer et al. 1998): `BinomialBayesMixedGLM`, its variational Bayes,
beside ours; its log sd has the prior N(0, 10²), and ours that of Kass and Natarajan (2006).

Seconds are of the clock and, in brackets, of the processor: on a shared machine the second are to be compared.  MixedLM
is left out above 12,500 groups.  Without statsmodels the script says so, and times ours alone.
"""

import sys
import time
import warnings

import numpy as np
import torch

from torchngvi import MixedModel

try:
    import statsmodels.api as sm
    from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM
except ImportError:
    sm = None

ROWS, MOST = 5, 12_500
SDS, CORRELATION, NOISE, BETA = (0.8, 0.5), 0.3, 0.6, (0.5, -0.3)
KINDS = {
    "intercept, fixed times": (1, True),
    "intercept": (1, False),
    "slope, fixed times": (2, True),
    "slope": (2, False),
}


def linear(groups, effects, times, seed=0):
    """X, y, Z and the group of each row."""
    rng = np.random.default_rng(seed)
    group = np.arange(groups).repeat(ROWS)
    x = np.tile(np.linspace(-1, 1, ROWS), groups) if times else rng.standard_normal(len(group))
    X = np.stack([np.ones_like(x), x], 1)
    root = np.linalg.cholesky([[1, CORRELATION], [CORRELATION, 1]])[:effects, :effects]
    b = (rng.standard_normal((groups, effects)) @ root.T) * SDS[:effects]
    y = X @ BETA + (b[group] * X[:, :effects]).sum(1) + NOISE * rng.standard_normal(len(group))
    return X, y, X[:, :effects], group


def logistic(seed=0):
    """The same of a trial with few infections, an intercept of each of 294 patients with the sd 4."""
    rng = np.random.default_rng(seed)
    group = np.arange(294).repeat(rng.integers(5, 8, 294))
    treated, month = (rng.random(294) < 0.5)[group].astype(float), rng.uniform(0, 3, len(group))
    X = np.stack([np.ones_like(month), treated, month, treated * month], 1)
    eta = X @ [-1.5, -0.2, -1.5, -0.4] + 4.0 * rng.standard_normal(294)[group]
    return X, (rng.random(len(group)) < 1 / (1 + np.exp(-eta))).astype(float), X[:, :1], group


def timed(call):
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def shown(name, wall, cpu, fixed, fixed_sd, sds, noise=None):
    pairs = "  ".join(f"{b:8.4f} ± {s:.4f}" for b, s in zip(fixed, fixed_sd, strict=True))
    rest = "" if noise is None else f"  residual sd {noise:.4f}"
    print(
        f"  {name:<12} {wall:8.2f} s ({cpu:7.2f} s)  {pairs}  sds {' '.join(f'{s:.4f}' for s in sds)}{rest}", flush=True
    )


def ours(arguments, family):
    X, y, Z, group = arguments
    table, wall, cpu = timed(lambda: MixedModel(X, y, (Z, group), family).fit(progress=False).summary())
    noise = None if table.likelihood is None else float(table.likelihood.mean)
    shown("torchngvi", wall, cpu, table.fixed.mean.tolist(), table.fixed.sd.tolist(), table.sd.mean.tolist(), noise)
    return cpu


def reml(arguments):
    X, y, Z, group = arguments
    fitted, wall, cpu = timed(lambda: sm.MixedLM(y, X, groups=group, exog_re=Z).fit())
    sds = np.sqrt(np.diag(fitted.cov_re))
    shown("MixedLM", wall, cpu, fitted.fe_params, fitted.bse_fe, sds, np.sqrt(fitted.scale))
    return cpu


def bayesian_glm(arguments):
    X, y, _, group = arguments
    model = BinomialBayesMixedGLM(y, X, np.eye(294)[group], np.zeros(294, int), vcp_p=10, fe_p=10)
    fitted, wall, cpu = timed(model.fit_vb)
    shown("fit_vb", wall, cpu, fitted.fe_mean, fitted.fe_sd, np.exp(fitted.vcp_mean))


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if sm is None:
        print("statsmodels is not installed: ours alone.")
    ours(linear(20, 1, False), "gaussian")  # what is made once, before anything is measured
    for groups in [int(word) for word in sys.argv[1:]] or (2_500, 12_500, 125_000):
        for name, (effects, times) in KINDS.items():
            print(f"linear, {name}, {groups:,} groups")
            arguments = linear(groups, effects, times)
            mine = ours(arguments, "gaussian")
            if sm is not None and groups <= MOST:
                theirs = reml(arguments)
                print(f"  processor time {theirs / mine:.0f} times ours")
    print("logistic, 294 groups, sd 4")
    ours(logistic(), "bernoulli_logit")
    if sm is not None:
        bayesian_glm(logistic())


if __name__ == "__main__":
    main()
