"""A long chain for lme4's sleepstudy under the default priors, beside the fit of the library: prints both.

The chain is a random walk over (log τ_0, log τ_1, atanh ρ, log σ) in NumPy, fixed and random effects integrated out by
the covariance of the ten days of a subject: nothing of the library is in it.  Its numbers are those of
tests/tables/test_doors_mixed.py.  ``python benchmarks/sleepstudy.py 400000``: some minutes.
"""

import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from torchngvi.tables import mixed

SUBJECTS = (
    Path(__file__).parents[1] / "tests" / "tables" / "sleepstudy.csv"
)  # a line for each subject: its number, and ten days


def table() -> pd.DataFrame:
    """The table, a row for each subject and day."""
    wide = np.loadtxt(SUBJECTS, delimiter=",")
    return pd.DataFrame(
        {"Reaction": wide[:, 1:].ravel(), "Days": np.tile(np.arange(10.0), 18), "Subject": np.repeat(wide[:, 0], 10)}
    )


def chain(steps: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Draws of all parameters in the units of the table, each tenth step after a tenth of them."""
    rng, y = np.random.default_rng(seed), np.loadtxt(SUBJECTS, delimiter=",")[:, 1:]
    days = np.arange(10.0)
    x = (days - days.mean()) / days.std()
    X, sd = np.column_stack([np.ones(10), x]), y.std()
    scale, apart = 2.5 * sd, y - y.mean()
    n, total = len(y), apart.sum(0)

    def half_t(s: float) -> float:
        return -2 * math.log1p((s / scale) ** 2 / 3)

    def covariance(theta: np.ndarray) -> np.ndarray:
        t0, t1, rho = math.exp(theta[0]), math.exp(theta[1]), math.tanh(theta[2])
        return np.array([[t0 * t0, rho * t0 * t1], [rho * t0 * t1, t1 * t1]])

    def given(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """Precision and linear term of the fixed effects, and the log density of θ."""
        L = np.linalg.cholesky(X @ covariance(theta) @ X.T + math.exp(2 * theta[3]) * np.eye(10))
        white, design = np.linalg.solve(L, apart.T), np.linalg.solve(L, X)
        precision = n * design.T @ design + np.eye(2) / scale**2
        linear = design.T @ np.linalg.solve(L, total)
        value = -n * np.log(np.diag(L)).sum() - 0.5 * (white**2).sum()
        value += 0.5 * linear @ np.linalg.solve(precision, linear) - 0.5 * np.linalg.slogdet(precision)[1]
        for k in (0, 1, 3):
            value += half_t(math.exp(theta[k])) + theta[k]
        return precision, linear, value + math.log1p(-(math.tanh(theta[2]) ** 2))

    theta = np.log([30.0, 20.0, 1.0, 25.0])
    theta[2] = 0.0
    root, seen, kept = 0.2 * np.eye(4), [], []
    here = given(theta)
    for step in range(steps):
        there_at = theta + root @ rng.normal(size=4)
        there = given(there_at)
        if math.log(rng.random()) < there[2] - here[2]:
            theta, here = there_at, there
        if step < steps // 10:
            seen.append(theta)
            if step in (steps // 40, steps // 20, steps // 10 - 1):
                root = 1.2 * np.linalg.cholesky(np.cov(np.array(seen)[len(seen) // 2 :].T))
        elif step % 10 == 0:
            V = np.linalg.inv(here[0])
            beta = V @ here[1] + np.linalg.cholesky(V) @ rng.normal(size=2)
            A = np.array([[1.0, -days.mean() / days.std()], [0.0, 1 / days.std()]])
            S, b = A @ covariance(theta) @ A.T, A @ beta
            s = np.sqrt(np.diag(S))
            kept.append([b[0] + y.mean(), b[1], s[0], s[1], S[0, 1] / s[0] / s[1], math.exp(theta[3])])
    names = ("Intercept", "Days", "sd of Intercept", "sd of Days", "correlation", "residual sd")
    return dict(zip(names, np.array(kept).T, strict=True))


def main(steps: int = 400_000) -> None:
    """Print means, sds and 95 % intervals of both, and the error of the chain by twenty batches."""
    result = mixed("Reaction ~ Days + (1 + Days | Subject)", table()).fit(progress=False)
    print(result)
    for name, draws in chain(steps).items():
        error = draws[: len(draws) // 20 * 20].reshape(20, -1).mean(1).std() / math.sqrt(20)
        low, high = np.quantile(draws, [0.025, 0.975])
        print(f"{name:<16}{draws.mean():>10.4f}{draws.std():>10.4f}{low:>10.4f}{high:>10.4f}   error {error:.4f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
