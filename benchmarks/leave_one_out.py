"""Leave-one-out densities without refits beside true refits and importance sampling: error, flagged share, cost.

    python -m benchmarks.leave_one_out [--rows 1000] [--random 100] [--hard 20]

Logistic regression on five LIBSVM sets under $TORCHNGVI_DATA, breast cancer, and two simulated Poisson regressions.
The truth is `leave_one_out(flag=0)`, a fit without each row, which the tests hold against single refits to 1e-8.
Errors of log densities are those of the random rows and of the rows with the least density.  PSIS has 4,000 draws of q.
Costs are CPU times in units of one fit from scratch, of the whole set.
"""

import argparse
import math
import os
import time

import torch

from benchmarks.evaluations import breast_cancer, libsvm
from torchngvi import CholeskyGaussian, GeneralizedLinear, fit, leave_one_out
from torchngvi.diagnostics import smoothed

SETS = ("heart_scale", "german.numer_scale", "australian_scale", "diabetes_scale", "ionosphere_scale")
DRAWS = 4000


def problems(rows):
    """Name and model."""
    yield "breast cancer", breast_cancer()
    for name in SETS if os.environ.get("TORCHNGVI_DATA") else ():
        yield name, libsvm(name, rows)
    for seed, dim in ((0, 5), (1, 20)):
        generator = torch.Generator().manual_seed(seed)
        X = torch.randn(300, dim, dtype=torch.float64, generator=generator)
        rate = (X @ torch.randn(dim, dtype=torch.float64, generator=generator) / dim**0.5).exp()
        yield f"Poisson, 300 x {dim}", GeneralizedLinear(X, torch.poisson(rate, generator=generator), "poisson")


def importance(q, model):
    """Log densities by Pareto-smoothed weights of draws of q, and the share of rows with k above 0.7."""
    theta = q.sample((DRAWS,), torch.Generator().manual_seed(0))
    ratios = model.likelihood.energy(model.predictor(theta), model.y)  # -log p(y_i | θ), (S, N)
    found = [smoothed(row) for row in ratios.mT]
    values = [(part.log_weights - row).logsumexp(0) - part.log_weights.logsumexp(0)
              for part, row in zip(found, ratios.mT, strict=True)]  # fmt: skip
    return torch.stack(values), sum(float(part.k_hat) > 0.7 for part in found) / len(found)


def cpu(run):
    start = time.process_time()
    return run(), time.process_time() - start


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--random", type=int, default=100)
    parser.add_argument("--hard", type=int, default=20)
    options = parser.parse_args(arguments)
    for name, model in problems(options.rows):
        q = CholeskyGaussian(model.dim, dtype=torch.float64)
        fit(q, model, max_evaluations=5, progress=False)  # nothing is loaded later
        q = CholeskyGaussian(model.dim, dtype=torch.float64)
        _, once = cpu(lambda q=q, model=model: fit(q, model, tolerance=1e-8, progress=False))
        ours, price = cpu(lambda q=q, model=model: leave_one_out(q, model))
        sites, cheap = cpu(lambda q=q, model=model: leave_one_out(q, model, flag=math.inf))
        truth, dear = cpu(lambda q=q, model=model: leave_one_out(q, model, flag=0.0))
        (psis, high), draws = cpu(lambda q=q, model=model: importance(q, model))
        count = len(truth.density)
        some = torch.randperm(count, generator=torch.Generator().manual_seed(1))[: options.random]
        hard = truth.density.argsort()[: options.hard]
        print(f"{name}, {count} x {model.dim}: elpd {truth.total:.4f}, hardest {float(truth.density[hard].sum()):.4f}")
        for words, density in (
            ("leave_one_out", ours.density),
            ("  sites and response alone", sites.density),
            ("PSIS", psis),
        ):
            error = (density - truth.density).abs()
            parts = [
                f"{float(error[rows].median()):.1e}, largest {float(error[rows].max()):.1e}" for rows in (some, hard)
            ]
            total = float(density.sum())
            print(f"  {words:<28} elpd {total:.4f}  random: median {parts[0]}  hardest: median {parts[1]}")
        flagged = float(ours.resolved.double().mean())
        prices = ", ".join(
            f"{words} {seconds / once:.1f}"
            for words, seconds in (("ours", price), ("without fits", cheap), ("all by fits", dear), ("PSIS", draws))
        )
        print(f"  fitted anew {100 * flagged:.1f} %, k > 0.7 {100 * high:.1f} %; in fits: {prices}", flush=True)


if __name__ == "__main__":
    main()
