"""The same posteriors by every program that is installed: errors against long chains, and seconds, in one run.

    TORCHNGVI_DATA=... python -m benchmarks.programs --log FILE [--tasks logistic ...] [--programs ...] [--table]

Four tasks, each one model with one prior for all: `logistic`, breast cancer of scikit-learn, 30 coefficients and an
intercept of N(0, 1); `epilepsy` and `toenail` of `benchmarks.table_peers`, Poisson and binary rows in 59 and 294
groups, columns centred, coefficients of N(0, 2.5^2) and a standard deviation over groups of half-normal(5); `schools`,
the eight schools with a mean of N(0, 5^2) and a half-Cauchy(5) standard deviation.  Programs that take a log joint get
it with standardised effects, y = mean + sd z.

"truth" is NumPyro's NUTS with four chains of 5,000 draws after 2,000 at a target of 0.95.  For each other program stand
the largest error of a mean, in sds of the truth, and the least and the largest ratio of an sd to the truth's, over the
coefficients and the standard deviation over groups; and processor seconds of one fit, its children's included, without
imports and without what is compiled once, which stands in brackets.  Each fit runs in a process of its own on one
thread and is one line of the log, from which an interrupted run goes on; a program that is not installed is left out,
and one that needs more than ``--patience`` seconds by the clock is stopped.

Maximum likelihood (GPBoost) has estimates and standard errors.  DADVI (Giordano, Ingram and Broderick 2024) is rebuilt
from its paper, as its package is on no index: 30 fixed draws, trust-region Newton, linear response.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np

from benchmarks.public import read

THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC"), "1")
ONE_THREAD = THREADS | {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
TASKS = ("logistic", "epilepsy", "toenail", "schools")
WARM, DRAWS, CHAINS = 1000, 1000, 2  # of every sampler but the truth
SCHOOLS = ([28.0, 8, -3, 7, -1, 1, 18, 12], [15.0, 10, 16, 11, 9, 11, 10, 18])


class LeftError(Exception):
    """Why a program has no row."""


def task(name):
    """The task's arrays: X of centred columns with a one first, y, groups, the family, and scales of the priors."""
    if name == "schools":
        y, noise = (np.array(part) for part in SCHOOLS)
        X = np.ones((8, 1))
        return {"X": X, "y": y, "noise": noise, "g": np.arange(8), "family": "gaussian", "b": 5.0, "sd": 5.0}
    if name == "logistic":
        from sklearn.datasets import load_breast_cancer

        X, y = load_breast_cancer(return_X_y=True)
        X = np.column_stack([np.ones(len(X)), (X - X.mean(0)) / X.std(0)])
        return {"X": X, "y": y.astype(float), "g": None, "family": "bernoulli", "b": 1.0, "sd": 0.0}
    from benchmarks import table_peers

    table = getattr(table_peers, name)()
    if name == "epilepsy":
        table["interaction"] = table.lbase * table.treated
        columns, group, y = ["lbase", "treated", "interaction", "lage", "V4"], table.subject, table.y
    else:
        table["interaction"] = table.time * table.treated
        columns, group, y = ["treated", "time", "interaction"], table.patient, table.severe
    X = table[columns].to_numpy(float)
    X = np.column_stack([np.ones(len(X)), X - X.mean(0)])
    family = "poisson" if name == "epilepsy" else "bernoulli"
    return {
        "X": X, "y": y.to_numpy(float), "g": np.unique(group, return_inverse=True)[1], "family": family,
        "b": 2.5, "sd": 5.0, "columns": columns,
    }  # fmt: skip


def clock():
    """Processor seconds of this process, of its children, living and ended."""
    used = sum(getattr(resource.getrusage(who), part) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
               for part in ("ru_utime", "ru_stime"))  # fmt: skip
    children, tick = [os.getpid()], os.sysconf("SC_CLK_TCK")
    while children:
        parent = children.pop()
        for thread in Path(f"/proc/{parent}/task").glob("*"):
            for child in (thread / "children").read_text().split():
                children.append(int(child))
                fields = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()
                used += sum(map(int, fields[11:15])) / tick
    return used


def moments(beta, sd=None):
    """Means and standard deviations of draws (S, p) and (S,)."""
    draws = np.asarray(beta) if sd is None else np.column_stack([beta, sd])
    return {"mean": draws.mean(0).tolist(), "sd": draws.std(0).tolist()}


# ------------------------------------------------------------------------------------------------- this library


def ours(t):
    """The door that the library has for the task: rows whose expectations are exact, a table, a Pyro model."""
    import torch

    import torchngvi as ngvi

    if t["family"] == "gaussian":
        return guide(t)
    start = clock()
    if t["g"] is None:
        q = ngvi.CholeskyGaussian(t["X"].shape[1], dtype=torch.float64)
        model = ngvi.GeneralizedLinear(torch.tensor(t["X"]), torch.tensor(t["y"]), prior_precision=t["b"] ** -2)
        result = ngvi.fit(q, model, progress=False)
        answer = {"mean": q.mean.tolist(), "sd": q.variance.sqrt().tolist()}
        return answer | {"seconds": clock() - start, "said": result.reason}
    import pandas

    from torchngvi.tables import HalfNormal, Normal

    table = pandas.DataFrame(t["X"][:, 1:], columns=t["columns"]).assign(y=t["y"], g=[f"g{k}" for k in t["g"]])
    normal = Normal(0, t["b"])
    priors = {"b": normal, "Intercept": normal, "sd": HalfNormal(t["sd"])}
    formula = f"y ~ {' + '.join(t['columns'])} + (1 | g)"
    summary = ngvi.mixed(formula, table, t["family"], priors=priors).fit(progress=False).summary()
    parts = summary.fixed, summary.sd
    answer = {key: [float(x) for part in parts for x in getattr(part, key).flatten()] for key in ("mean", "sd")}
    return answer | {"seconds": clock() - start}


def guide(t):
    """`AutoMarginal` over a Pyro model."""
    import pyro
    import pyro.distributions as dist
    import torch
    from pyro.infer import Predictive

    from torchngvi.adapters.pyro import AutoMarginal, fit_guide

    y, noise = torch.tensor(t["y"]), torch.tensor(t["noise"])
    zero, one = torch.zeros((), dtype=y.dtype), torch.ones((), dtype=y.dtype)

    def model():
        mu = pyro.sample("mu", dist.Normal(zero, t["b"] * one))
        tau = pyro.sample("tau", dist.HalfCauchy(t["sd"] * one))
        with pyro.plate("schools", len(y)):
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            pyro.sample("y", dist.Normal(theta, noise), obs=y)

    start = clock()
    pyro.set_rng_seed(0)
    q = AutoMarginal(model)
    result = fit_guide(model, q, options={"progress": False})
    draws = Predictive(model, guide=q, num_samples=4000, return_sites=("mu", "tau"), parallel=True)()
    answer = moments(draws["mu"].detach().reshape(4000, 1), draws["tau"].detach().reshape(4000))
    return answer | {"seconds": clock() - start, "said": result.reason}


def torch_log_joint(t):
    """The log joint over (coefficients, log sd, standardised effects) in PyTorch, and its dimension."""
    import torch

    X, y = torch.tensor(t["X"]), torch.tensor(t["y"])
    p, groups = X.shape[1], 0 if t["g"] is None else int(t["g"].max()) + 1
    index = None if t["g"] is None else torch.tensor(t["g"])
    softplus = torch.nn.functional.softplus

    def log_joint(theta):
        beta = theta[:p]
        eta, prior = X @ beta, -0.5 * (beta / t["b"]).square().sum()
        if groups:
            log_sd, z = theta[p], theta[p + 1 :]
            eta = eta + log_sd.exp() * z[index]
            ratio = (log_sd.exp() / t["sd"]).square()
            margin = -torch.log1p(ratio) if t["family"] == "gaussian" else -0.5 * ratio
            prior = prior + margin + log_sd - 0.5 * z.square().sum()
        if t["family"] == "poisson":
            return prior + (y * eta - eta.exp()).sum()
        if t["family"] == "bernoulli":
            return prior + (y * eta - softplus(eta)).sum()
        return prior - 0.5 * ((y - eta) / torch.tensor(t["noise"])).square().sum()

    return log_joint, p + (groups + 1 if groups else 0)


def black_box(t):
    """`fit` on the log joint as a function that it knows nothing about."""
    import torch

    import torchngvi as ngvi

    log_joint, dim = torch_log_joint(t)
    start = clock()
    torch.manual_seed(0)
    q = ngvi.CholeskyGaussian(dim, dtype=torch.float64)
    result = ngvi.fit(q, ngvi.LogJoint.vmapped(log_joint), progress=False)
    seconds = clock() - start
    draws, p = q.rsample(20_000).detach().numpy(), t["X"].shape[1]
    return moments(draws[:, :p], np.exp(draws[:, p]) if dim > p else None) | {"seconds": seconds, "said": result.reason}


# ------------------------------------------------------------------------------------------------- NumPyro, BlackJAX


def numpyro_model(t):
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    jax.config.update("jax_enable_x64", True)
    X, y = jnp.asarray(t["X"]), jnp.asarray(t["y"])

    def model():
        beta = numpyro.sample("beta", dist.Normal(0, t["b"]).expand([X.shape[1]]).to_event(1))
        eta = X @ beta
        if t["g"] is not None:
            margin = dist.HalfCauchy(t["sd"]) if t["family"] == "gaussian" else dist.HalfNormal(t["sd"])
            sd = numpyro.sample("sd", margin)
            z = numpyro.sample("z", dist.Normal(0, 1).expand([int(t["g"].max()) + 1]).to_event(1))
            eta = eta + sd * z[t["g"]]
        if t["family"] == "poisson":
            numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)
        elif t["family"] == "bernoulli":
            numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)
        else:
            numpyro.sample("y", dist.Normal(eta, jnp.asarray(t["noise"])), obs=y)

    return model


def numpyro_nuts(t, chains=CHAINS, warm=WARM, draws=DRAWS, target=0.8):
    import jax
    from numpyro.diagnostics import summary
    from numpyro.infer import MCMC, NUTS

    mcmc = MCMC(
        NUTS(numpyro_model(t), target_accept_prob=target), num_warmup=warm, num_samples=draws, num_chains=chains,
        chain_method="sequential", progress_bar=False,
    )  # fmt: skip
    start = clock()
    mcmc.run(jax.random.PRNGKey(1))
    first = clock() - start
    if target == 0.8:  # the second run finds the compiled chain
        start = clock()
        mcmc.run(jax.random.PRNGKey(0))
    seconds = clock() - start
    kept = mcmc.get_samples(group_by_chain=True)
    told = summary({key: np.asarray(kept[key]) for key in ("beta", "sd") if key in kept})
    worst = max(float(np.max(part["r_hat"])) for part in told.values())
    least = min(float(np.min(part["n_eff"])) for part in told.values())
    flat = {key: np.asarray(x).reshape(-1, *x.shape[2:]) for key, x in kept.items()}
    answer = moments(flat["beta"], flat.get("sd"))
    return answer | {"seconds": seconds, "once": max(first - seconds, 0.0), "r_hat": worst, "effective": least}


def truth(t):
    return numpyro_nuts(t, chains=4, warm=2000, draws=5000, target=0.95)


def numpyro_guide(t, name, steps=10_000):
    """An automatic guide with Adam at 0.01, 10,000 steps of one draw."""
    import jax
    import numpyro
    from numpyro.infer import SVI, Trace_ELBO, autoguide

    model = numpyro_model(t)
    q = getattr(autoguide, name)(model)
    svi = SVI(model, q, numpyro.optim.Adam(0.01), Trace_ELBO())
    spent = []
    for seed in (1, 0):
        start = clock()
        result = svi.run(jax.random.PRNGKey(seed), steps, progress_bar=False)
        jax.block_until_ready(result.params)
        spent.append(clock() - start)
    draws = q.sample_posterior(jax.random.PRNGKey(2), result.params, sample_shape=(20_000,))
    answer = moments(np.asarray(draws["beta"]), np.asarray(draws["sd"]) if "sd" in draws else None)
    return answer | {"seconds": spent[1], "once": max(spent[0] - spent[1], 0.0)}


def flat_density(t):
    """NumPyro's log joint as a function of one vector, and what turns draws into parameters."""
    import jax
    from jax.flatten_util import ravel_pytree
    from numpyro.infer.util import initialize_model

    model = numpyro_model(t)
    start = initialize_model(jax.random.PRNGKey(0), model, dynamic_args=False)
    zero, unravel = ravel_pytree(start.param_info.z)

    def log_density(theta):
        return -start.potential_fn(unravel(theta))

    def constrained(draws):
        return jax.vmap(lambda theta: start.postprocess_fn(unravel(theta)))(draws)

    return log_density, constrained, 0 * zero


def blackjax_pathfinder(t):
    import jax
    from blackjax.vi import pathfinder

    log_density, constrained, zero = flat_density(t)

    def run(key):
        state, _ = pathfinder.approximate(key, log_density, zero, num_samples=200)
        return pathfinder.sample(key, state, 4000)[0]

    run = jax.jit(run)
    spent = []
    for seed in (1, 0):
        start = clock()
        draws = jax.block_until_ready(run(jax.random.PRNGKey(seed)))
        spent.append(clock() - start)
    draws = constrained(draws)
    answer = moments(np.asarray(draws["beta"]), np.asarray(draws["sd"]) if "sd" in draws else None)
    return answer | {"seconds": spent[1], "once": max(spent[0] - spent[1], 0.0)}


def dadvi(t, count=30):
    """Mean-field Gaussian by a sample average over fixed draws, with the covariance of linear response."""
    import jax
    import jax.numpy as jnp
    from scipy.optimize import minimize

    log_density, constrained, zero = flat_density(t)
    dim = len(zero)
    z = jax.random.normal(jax.random.PRNGKey(0), (count, dim))

    def objective(eta):
        mean, log_sd = eta[:dim], eta[dim:]
        return -jax.vmap(log_density)(mean + jnp.exp(log_sd) * z).mean() - log_sd.sum()

    value = jax.jit(jax.value_and_grad(objective))
    product = jax.jit(lambda eta, v: jax.jvp(jax.grad(objective), (eta,), (v,))[1])
    start = clock()
    eta = jnp.concatenate([zero, jnp.full(dim, -3.0)])
    value(eta), product(eta, eta)
    once, start = clock() - start, clock()
    result = minimize(
        lambda x: [np.asarray(part) for part in value(x)], eta, jac=True, hessp=product, method="trust-ncg"
    )
    H = jax.hessian(objective)(jnp.asarray(result.x))
    covariance = np.linalg.inv(H)[:dim, :dim]
    draws = np.random.default_rng(0).multivariate_normal(result.x[:dim], covariance, 20_000)
    seconds = clock() - start
    draws = constrained(jnp.asarray(draws))
    answer = moments(np.asarray(draws["beta"]), np.asarray(draws["sd"]) if "sd" in draws else None)
    return answer | {"seconds": seconds, "once": once}


# ------------------------------------------------------------------------------------------------- PyMC, Stan, GPBoost


def pymc_model(t):
    import pymc

    with pymc.Model() as model:
        beta = pymc.Normal("beta", 0, t["b"], shape=t["X"].shape[1])
        eta = pymc.math.dot(t["X"], beta)
        if t["g"] is not None:
            margin = pymc.HalfCauchy if t["family"] == "gaussian" else pymc.HalfNormal
            sd = margin("sd", t["sd"])
            eta = eta + sd * pymc.Normal("z", 0, 1, shape=int(t["g"].max()) + 1)[t["g"]]
        if t["family"] == "poisson":
            pymc.Poisson("y", pymc.math.exp(eta), observed=t["y"])
        elif t["family"] == "bernoulli":
            pymc.Bernoulli("y", logit_p=eta, observed=t["y"])
        else:
            pymc.Normal("y", eta, t["noise"], observed=t["y"])
    return model


def of_dataset(posterior):
    draws = {key: np.asarray(posterior[key]) for key in ("beta", "sd") if key in posterior}
    flat = {key: x.reshape(-1, *x.shape[2:]) for key, x in draws.items()}
    return moments(flat["beta"], flat.get("sd"))


def nutpie_nuts(t):
    import nutpie

    start = clock()
    compiled = nutpie.compile_pymc_model(pymc_model(t))
    once, start = clock() - start, clock()
    trace = nutpie.sample(compiled, draws=DRAWS, tune=WARM, chains=CHAINS, cores=1, seed=0, progress_bar=False)
    seconds = clock() - start
    return of_dataset(trace.posterior) | {"seconds": seconds, "once": once}


def pymc_advi(t):
    import pymc

    with pymc_model(t):
        start = clock()
        approximation = pymc.fit(method="fullrank_advi", random_seed=0, progressbar=False)
        seconds = clock() - start
        trace = approximation.sample(4000, random_seed=0)
    return of_dataset(trace.posterior) | {"seconds": seconds}


def stan_nuts(t):
    import stan

    grouped = t["g"] is not None
    outcome = {
        "poisson": "y ~ poisson_log(eta)",
        "bernoulli": "y ~ bernoulli_logit(eta)",
        "gaussian": "y ~ normal(eta, noise)",
    }
    declared = "vector[N] y; vector<lower=0>[N] noise;" if t["family"] == "gaussian" else "array[N] int y;"
    margin = "cauchy" if t["family"] == "gaussian" else "normal"
    code = f"""
data {{ int N; int p; matrix[N, p] X; {declared}
        {"int G; array[N] int<lower=1, upper=G> g;" if grouped else ""} }}
parameters {{ vector[p] beta; {"real<lower=0> sd; vector[G] z;" if grouped else ""} }}
model {{ vector[N] eta = X * beta{" + sd * z[g]" if grouped else ""};
         beta ~ normal(0, {t["b"]}); {f"sd ~ {margin}(0, {t['sd']}); z ~ std_normal();" if grouped else ""}
         {outcome[t["family"]]}; }}
"""
    whole = t["y"] if t["family"] == "gaussian" else t["y"].astype(int)
    data = {"N": len(t["y"]), "p": t["X"].shape[1], "X": t["X"], "y": whole}
    if grouped:
        data |= {"G": int(t["g"].max()) + 1, "g": t["g"] + 1}
    if t["family"] == "gaussian":
        data["noise"] = t["noise"]
    start = clock()
    model = stan.build(code, data=data, random_seed=1)
    once, start = clock() - start, clock()
    kept = model.sample(num_chains=CHAINS, num_warmup=WARM, num_samples=DRAWS)
    seconds = clock() - start
    return moments(kept["beta"].T, kept["sd"][0] if grouped else None) | {"seconds": seconds, "once": once}


def gpboost(t):
    import gpboost

    if t["g"] is None or t["family"] == "gaussian":
        raise LeftError("a fit of grouped rows")
    likelihood = {"poisson": "poisson", "bernoulli": "bernoulli_logit"}[t["family"]]
    start = clock()
    model = gpboost.GPModel(group_data=t["g"], likelihood=likelihood, num_parallel_threads=1)
    model.fit(y=t["y"], X=t["X"])
    seconds = clock() - start
    coefficients = np.asarray(model.get_coef(std_err=True))
    variance = float(np.asarray(model.get_cov_pars()).flatten()[0])
    return {
        "mean": [*coefficients[0].tolist(), math.sqrt(variance)], "sd": [*coefficients[1].tolist(), math.nan],
        "seconds": seconds,
    }  # fmt: skip


PROGRAMS = {
    "torchngvi": ours,
    "torchngvi, log joint": black_box,
    "Stan, NUTS": stan_nuts,
    "NumPyro, NUTS": numpyro_nuts,
    "nutpie, NUTS": nutpie_nuts,
    "BlackJAX, Pathfinder": blackjax_pathfinder,
    "DADVI with linear response": dadvi,
    "PyMC, full-rank ADVI": pymc_advi,
    "NumPyro, Gaussian guide": lambda t: numpyro_guide(t, "AutoMultivariateNormal"),
    "NumPyro, Laplace": lambda t: numpyro_guide(t, "AutoLaplaceApproximation"),
    "GPBoost, likelihood": gpboost,
    "truth": truth,
}


# ------------------------------------------------------------------------------------------------- runs and the table


def run_one(name, program):
    """What a program makes of a task, as one line."""
    warnings.simplefilter("ignore")
    try:
        found = PROGRAMS[program](task(name))
        if program.startswith("torchngvi"):  # what is imported and remembered at the first fit stands in brackets
            first, found = found["seconds"], PROGRAMS[program](task(name))
            found["once"] = max(first - found["seconds"], 0.0)
    except (ImportError, LeftError) as reason:
        found = {"left": str(reason)}
    print("\n" + json.dumps({"task": name, "program": program} | found))


def run_all(path, tasks, programs, patience):
    done = {(row["task"], row["program"]) for row in read(Path(path))}
    for name in tasks:
        for program in programs:
            if (name, program) in done:
                continue
            command = [sys.executable, "-m", "benchmarks.programs", "--one", name, program]
            start = time.monotonic()
            try:
                ended = subprocess.run(
                    command, capture_output=True, text=True, timeout=patience, check=False, env=os.environ | ONE_THREAD
                )
                lines = [line for line in ended.stdout.splitlines() if line.startswith('{"task"')]
                row = (
                    json.loads(lines[-1]) if lines else {"left": (ended.stderr.strip().splitlines() or ["no word"])[-1]}
                )
            except subprocess.TimeoutExpired:
                row = {"left": f"not ended in {patience} s"}
            row |= {"task": name, "program": program, "wall": round(time.monotonic() - start, 1)}
            with Path(path).open("a") as log:
                log.write(json.dumps(row) + "\n")
            print(name, program, row.get("left") or f"{row['seconds']:.2f} s", flush=True)


def print_table(rows):
    found = {(row["task"], row["program"]): row for row in rows}
    for name in TASKS:
        true = found.get((name, "truth"), {})
        if "mean" not in true:
            continue
        print(f"\n{name}: r-hat {true['r_hat']:.3f}, {true['effective']:.0f} effective, {true['seconds']:.1f} s\n")
        print("| program | largest error of a mean | ratios of sds | seconds |\n|---|---|---|---|")
        for program in PROGRAMS:
            row = found.get((name, program))
            if row is None or program == "truth":
                continue
            if "left" in row:
                print(f"| {program} | {row['left'][:60]} | | |")
                continue
            mean, sd = np.array(row["mean"]), np.array(row["sd"]) / np.array(true["sd"])
            error = np.abs(mean - true["mean"]) / np.array(true["sd"])
            once = f" ({row['once']:.1f})" if row.get("once") else ""
            print(
                f"| {program} | {error.max():.2f} | {np.nanmin(sd):.2f} to {np.nanmax(sd):.2f} "
                f"| {row['seconds']:.2f}{once} |"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--log", help="the file of one line a fit")
    parser.add_argument("--patience", type=float, default=600)
    parser.add_argument("--table", action="store_true", help="print what the log has, without a fit")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return run_one(*options.one)
    if options.log is None:
        parser.error("--log names the file that keeps the fits")
    if not options.table:
        run_all(options.log, options.tasks, options.programs, options.patience)
    print_table(read(Path(options.log)))
    return None


if __name__ == "__main__":
    main()
