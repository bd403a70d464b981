"""Linear and logistic mixed models beside statsmodels and GPBoost: the same data, estimates, errors and times.

    TORCHNGVI_DATA=... python benchmarks/mixed_peers.py [groups ...] [toenail]

Five rows a group.  A linear mixed model with an intercept of each group, with the same five times for all groups or
with a covariate of its own in each row, and with an intercept and a slope: `MixedModel.fit` learns the residual sd,
`statsmodels.MixedLM` is REML.  Then a logistic one with an intercept, 294 groups of about seven rows, whose sd is 4 as
in the trial of toenail infections (De Backer et al. 1998): `BinomialBayesMixedGLM`, its variational Bayes,
beside ours; its log sd has the prior N(0, 10²), and ours half-t(3, 2.5) of the sd.

With the word toenail the data of that trial follow, and a truth: sixteen chains of `benchmarks/mixed_truths.py`, 4,000
sweeps each.  For each parameter the error of the mean, in posterior standard deviations, and the ratio of the standard
deviation to the true one: of ours with the random effects integrated out, and by a Gaussian over all coordinates; of
`fit` on the log joint as a function, by a dense Gaussian over all 299 coordinates, ended after five minutes; of
`BinomialBayesMixedGLM`; and of GPBoost (Sigrist 2022), maximum likelihood by Laplace's approximation.

Seconds are of the clock and, in brackets, of the processor: on a shared machine the second are to be compared.  MixedLM
is left out above 12,500 groups.  A peer that is not installed is left out.
"""

import sys
import time
import warnings

import numpy as np
import torch
from mixed_truths import Chains, effective, quantities, toenail

from torchngvi import CholeskyGaussian, MixedModel, fit

try:
    import gpboost
except ImportError:
    gpboost = None
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


def likelihood_fit(arguments, family):
    """GPBoost's estimates, standard errors of the fixed effects where it has them, and sds."""
    X, y, Z, group = arguments
    slopes = {"group_rand_coef_data": Z[:, 1:], "ind_effect_group_rand_coef": [1] * (Z.shape[1] - 1)}
    model = gpboost.GPModel(
        group_data=group[:, None], likelihood=family, num_parallel_threads=1, **(slopes if Z.shape[1] > 1 else {})
    )
    _, wall, cpu = timed(lambda: model.fit(y=y, X=X))
    try:
        fixed, errors = model.get_coef(std_err=True).to_numpy()[:2]
    except gpboost.basic.GPBoostError:  # of a Hessian that is not positive definite
        fixed = model.get_coef().to_numpy()[0]
        errors = np.full_like(fixed, np.nan)
    scales = np.sqrt(model.get_cov_pars().to_numpy()[0])
    noise, sds = (scales[0], scales[1:]) if family == "gaussian" else (None, scales)
    shown("GPBoost", wall, cpu, fixed, errors, sds, noise)
    return cpu, torch.as_tensor([*fixed, *sds[: Z.shape[1]]]), torch.as_tensor([*errors, np.nan])


# ------------------------------------------------------------------------------- against a truth

SWEEPS, LONGEST = 4_000, 300.0


def against(truth, name, cpu, mean, sd):
    """A line of errors of means, in true standard deviations, and of ratios of standard deviations."""
    errors, ratios = (mean - truth[0]) / truth[1], sd / truth[1]
    cells = "".join(f"{float(e):>9.2f} {float(r):>5.2f}" for e, r in zip(errors, ratios, strict=True))
    print(f"  {name:<26}{cpu:>9.1f}{cells}", flush=True)


def tabled(model, **settings):
    table, _, cpu = timed(lambda: model.fit(progress=False, **settings).summary())
    return cpu, torch.cat([table.fixed.mean, table.sd.mean]), torch.cat([table.fixed.sd, table.sd.sd])


def dense(model):
    """A Gaussian without structure over all coordinates, of the log joint as a function."""
    q = CholeskyGaussian(model.dim, dtype=torch.float64)
    result, _, cpu = timed(lambda: fit(q, model.log_joint, progress=False, examine=False, max_seconds=LONGEST))
    print(f"  the dense fit: {result.reason}")
    rows, theta = model.rows, q.sample(4_000, torch.Generator().manual_seed(0))
    of = quantities(theta[:, rows.n * rows.r :], rows)
    return cpu, of.mean(0), of.std(0)


def mean_field(model):
    rows = model.rows
    of = BinomialBayesMixedGLM(
        (rows.y.numpy() + 1) / 2, rows.X.numpy(), np.eye(rows.n)[rows.groups], np.zeros(rows.n, int), vcp_p=10, fe_p=10
    )
    fitted, _, cpu = timed(of.fit_vb)
    level, spread = float(fitted.vcp_mean[0]), float(fitted.vcp_sd[0])  # of the logarithm of the sd
    scale = np.exp(level + 0.5 * spread**2)
    mean, sd = [*fitted.fe_mean, scale], [*fitted.fe_sd, scale * np.sqrt(np.expm1(spread**2))]
    return cpu, torch.as_tensor(mean), torch.as_tensor(sd)


def trial():
    model, fixed, random = toenail()
    rows = model.rows
    chains = Chains(model.fit(progress=False), 3)
    run, _, cpu = timed(lambda: chains.run(SWEEPS))
    truth, least = (run.mean((0, 1)), run.reshape(-1, run.shape[-1]).std(0)), float(effective(run).min())
    print(f"toenail, {rows.n} groups, {len(rows.y)} rows; {len(run)} chains, at least {least:.0f} effective draws")
    names = [*fixed, *(f"sd {name}" for name in random)]
    print(f"  {'':26}{'CPU s':>9}" + "".join(f"{name:>15}" for name in names))
    print(
        f"  {'truth, mean and sd':26}{cpu:>9.1f}" + "".join(f"{m:>9.3f} {s:>5.3f}" for m, s in zip(*truth, strict=True))
    )
    against(truth, "integrated out", *tabled(model))
    against(truth, "Gaussian, by response", *tabled(model, marginalise="response"))
    against(truth, "Gaussian, as it is", *tabled(model, marginalise="none"))
    if sm is not None:
        against(truth, "BinomialBayesMixedGLM", *mean_field(model))
    if gpboost is not None:
        arguments = rows.X.numpy(), (rows.y.numpy() + 1) / 2, rows.Z.numpy(), rows.groups.numpy()
        against(truth, "GPBoost", *likelihood_fit(arguments, "bernoulli_logit"))
    against(truth, "dense Gaussian, by draws", *dense(model))


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for module, name in ((sm, "statsmodels"), (gpboost, "GPBoost")):
        if module is None:
            print(f"{name} is not installed: without it.")
    ours(linear(20, 1, False), "gaussian")  # what is made once, before anything is measured
    sizes = [int(word) for word in sys.argv[1:] if word != "toenail"]
    for groups in sizes or (2_500, 12_500, 125_000):
        for name, (effects, times) in KINDS.items():
            print(f"linear, {name}, {groups:,} groups")
            arguments = linear(groups, effects, times)
            mine = ours(arguments, "gaussian")
            if sm is not None and groups <= MOST:
                theirs = reml(arguments)
                print(f"  processor time {theirs / mine:.0f} times ours")
            if gpboost is not None:
                likelihood_fit(arguments, "gaussian")
    print("logistic, 294 groups, sd 4")
    ours(logistic(), "bernoulli_logit")
    if sm is not None:
        bayesian_glm(logistic())
    if "toenail" in sys.argv[1:]:
        trial()


if __name__ == "__main__":
    main()
