"""Do 95 % intervals hold a fixed truth 95 times of a hundred, under the default priors?

    python -m benchmarks.coverage [row ...] [--replicates 400] [--out coverage.jsonl]

The truth is fixed and not drawn from the prior, so that what is measured is what a user meets: the prior and the
approximation together; new families of tables have `benchmarks/family_coverage.py`. Data are drawn again in each
replicate; inputs are standard normal. The rows:

    logistic        60 rows, an intercept and five coefficients (.5; 1, -1, .5, 0, 0), `BayesianLogisticRegression`
    poisson         15 groups of 6 rows, `mixed("y ~ x + (1 | g)")`, sd of the intercepts .7
    binary          10 groups of 4 rows, the same, sd 1
    negbin          15 groups of 6 rows, the same, sd .7, size 3
    slope0, slope.1, slope1
                    20 groups of 8 rows with Gaussian noise, `mixed("y ~ x + (1 + x | g)")`, sd of the slopes 0, .1, 1

A share of n intervals has the standard error √(.95 · .05/n): a row agrees with 95 % where it lies within three of them.
For the logistic row the exact posterior under the same prior is measured beside the fit, by importance weights of 4,000
draws. A truth at the boundary, an sd of 0, lies in no equal-tailed interval: for it the share of lower ends below .05
is printed. Replicates whose binary targets are all alike have no information on the slope and
are left out.
Each replicate is a line of the file ``--out``, from which an interrupted run goes on.
"""

import argparse
import json
import math
import time
import warnings
from pathlib import Path

import numpy as np
import pandas
import torch

ROWS = ("logistic", "poisson", "binary", "negbin", "slope0", "slope.1", "slope1")
LOGISTIC = np.array([0.5, 1.0, -1.0, 0.5, 0.0, 0.0])
DRAWS = 4000
NEAR_ZERO = 0.05  # a lower end below it says that an sd may be 0


def logistic(seed):
    """Whether each interval holds its coefficient: of the fit, and of the exact posterior under the same prior."""
    from torchngvi.adapters.sklearn import BayesianLogisticRegression

    generator = np.random.default_rng(seed)
    X = generator.standard_normal((60, 5))
    y = (generator.random(60) < 1 / (1 + np.exp(-(LOGISTIC[0] + X @ LOGISTIC[1:])))).astype(int)
    if y.min() == y.max():
        return None
    model = BayesianLogisticRegression().fit(X, y)
    draws = np.asarray(model.sample_posterior(DRAWS, random_state=seed))
    draws = draws.reshape(DRAWS, -1)
    if draws.shape[1] != 6:
        raise SystemExit(f"expected six coefficients; got draws of shape {draws.shape}")
    first = int(np.argmin(np.abs(draws.mean(0) - np.ravel(model.intercept_)[0])))
    order = [first, *(k for k in range(6) if k != first)]
    theta = draws[:, order]
    weights = exact_weights(theta, X, y)
    held = [inside(theta[:, j], np.ones(DRAWS), LOGISTIC[j]) for j in range(6)]
    exact = [inside(theta[:, j], weights, LOGISTIC[j]) for j in range(6)]
    return {"held": held, "exact": exact, "worth": float(weights.sum() ** 2 / np.square(weights).sum())}


def exact_weights(theta, X, y):
    """Importance weights of Gaussian draws for the posterior under the default prior, written from its definition."""
    mean, sd = X.mean(0), X.std(0)
    at_means = theta[:, 0] + theta[:, 1:] @ mean
    share = y.mean()
    prior = -0.5 * ((at_means - math.log(share / (1 - share))) / 2.5) ** 2
    prior = prior - 0.5 * np.square(theta[:, 1:] * sd / 2.5).sum(1)
    eta = theta[:, :1] + theta[:, 1:] @ X.T
    joint = (y * eta - np.logaddexp(0.0, eta)).sum(1) + prior
    center = theta - theta.mean(0)
    precision = np.linalg.inv(np.cov(theta.T))
    log_q = -0.5 * np.einsum("si,ij,sj->s", center, precision, center)
    log_w = joint - log_q
    return np.exp(log_w - log_w.max())


def inside(draws, weights, truth):
    """Whether the equal-tailed 95 % interval of weighted draws holds the truth."""
    below = weights[draws < truth].sum() / weights.sum()
    return bool(0.025 <= below <= 0.975)


def grouped(groups, rows, family, sd, slope_sd=None, size=3.0):
    """A replicate of a mixed model: fixed effects (.5, .5), as a function of the seed."""
    from torchngvi import mixed

    def replicate(seed):
        generator = np.random.default_rng(seed)
        g = np.repeat(np.arange(groups), rows)
        x = generator.standard_normal(len(g))
        eta = 0.5 + 0.5 * x + sd * generator.standard_normal(groups)[g]
        if slope_sd is not None:
            eta = eta + slope_sd * generator.standard_normal(groups)[g] * x
        if family == "gaussian":
            y = eta + generator.standard_normal(len(g))
        elif family == "bernoulli":
            y = (generator.random(len(g)) < 1 / (1 + np.exp(-eta))).astype(int)
            if y.min() == y.max():
                return None
        elif family == "poisson":
            y = generator.poisson(np.exp(eta))
        else:
            y = generator.poisson(np.exp(eta) * generator.gamma(size, 1 / size, len(g)))
        formula = "y ~ x + (1 | g)" if slope_sd is None else "y ~ x + (1 + x | g)"
        fitted = mixed(formula, pandas.DataFrame({"y": y, "x": x, "g": g}), family).fit(progress=False, seed=seed)
        table = fitted.summary()
        low, high = table.fixed.low.tolist(), table.fixed.high.tolist()
        truth = [0.5, 0.5]
        held = [a <= t <= b for a, b, t in zip(low, high, truth, strict=True)]
        ends = [[a, b] for a, b in zip(table.sd.low.tolist(), table.sd.high.tolist(), strict=True)]
        sds = [sd] if slope_sd is None else [sd, slope_sd]
        held += [a <= t <= b for (a, b), t in zip(ends, sds, strict=True) if t > 0]
        return {"held": held, "sd": ends, "k_hat": float(fitted.k_hat), "converged": bool(fitted.converged)}

    return replicate


def replicates(row):
    """The function of a seed for each row, with the names of what it holds."""
    if row == "logistic":
        return logistic, ["intercept", "b1 = 1", "b2 = -1", "b3 = .5", "b4 = 0", "b5 = 0"]
    if row == "poisson":
        return grouped(15, 6, "poisson", 0.7), ["intercept", "x", "sd = .7"]
    if row == "binary":
        return grouped(10, 4, "bernoulli", 1.0), ["intercept", "x", "sd = 1"]
    if row == "negbin":
        return grouped(15, 6, "negbin", 0.7), ["intercept", "x", "sd = .7"]
    slope = {"slope0": 0.0, "slope.1": 0.1, "slope1": 1.0}[row]
    names = ["intercept", "x", "sd = .7", *([f"sd of slopes = {slope:g}"] if slope else [])]
    return grouped(20, 8, "gaussian", 0.7, slope), names


def report(row, names, lines):
    """The table of a row."""
    done = [line for line in lines if line["row"] == row and line.get("held") is not None]
    left_out = sum(line["row"] == row and line.get("held") is None for line in lines)
    n = len(done)
    error = 3 * math.sqrt(0.95 * 0.05 / max(n, 1))
    print(f"\n{row}: {n} replicates, {left_out} left out; three standard errors are {error:.3f}")
    for k, name in enumerate(names):
        share = np.mean([line["held"][k] for line in done])
        exact = np.mean([line["exact"][k] for line in done]) if "exact" in done[0] else 0.95
        beside = f", exact posterior {exact:.4f}" if "exact" in done[0] else ""
        against = abs(share - 0.95) <= error or abs(share - exact) <= error
        print(f"  {name:20} {share:.4f}{beside}{'' if against else '   outside'}")
    if row == "slope0":
        ends = np.array([line["sd"][1] for line in done])
        print(f"  lower ends below {NEAR_ZERO}: {np.mean(ends[:, 0] < NEAR_ZERO):.3f} (largest {ends[:, 0].max():.3f})")
    if "k_hat" in done[0]:
        doubtful = np.mean([not (line["converged"] and line["k_hat"] < 0.7) for line in done])
        print(f"  not converged or k-hat above .7: {doubtful:.3f}")
    print(f"  {np.mean([line['seconds'] for line in done]):.2f} processor seconds a replicate", flush=True)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", default=ROWS, help=", ".join(ROWS))
    parser.add_argument("--replicates", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("runs/coverage.jsonl"))
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    for row in asked.rows or ROWS:
        function, names = replicates(row)
        known = {line["seed"] for line in lines if line["row"] == row}
        for seed in sorted(set(range(asked.replicates)) - known):
            clock = time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = function(seed)
            line = {"row": row, "seed": seed, "seconds": time.process_time() - clock, **(found or {"held": None})}
            lines.append(line)
            with asked.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
        report(row, names, lines)


if __name__ == "__main__":
    main()
