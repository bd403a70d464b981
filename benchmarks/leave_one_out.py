"""Leave-one-out densities without refits beside true refits and importance sampling: error, flagged share, cost.

    python -m benchmarks.leave_one_out [--rows 1000] [--random 100] [--hard 20] [--groups 10]

Logistic regression on five LIBSVM sets under $TORCHNGVI_DATA, breast cancer, and two simulated Poisson regressions.
The truth is `leave_one_out(flag=0)`, a fit without each row.  For rows that were fitted anew that is the same
computation, so that single fits from scratch, with a sum over a fine grid for the density, are shown of the hardest.
Errors of log densities are those of the random rows and of the rows with the least density.  PSIS has 4,000 draws of q.
Costs are CPU times in units of one fit from scratch, of the whole set.

With --groups the rows are left out in groups of so many, drawn at random, and the groups of six mixed models one at a
time; there the truth is a fit without each group, both by 4,096 draws of the globals.
"""

import argparse
import math
import os
import time

import torch

from benchmarks.evaluations import breast_cancer, libsvm
from benchmarks.posterior_arithmetic import part
from torchngvi import CholeskyGaussian, GeneralizedLinear, MixedModel, fit, leave_one_out
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


def alone(model, row):
    """The log density of a row by a fit of the others from scratch, and 40,001 points of its predictor."""
    kept = torch.arange(len(model.y)) != row
    q = CholeskyGaussian(model.dim, dtype=torch.float64)
    fit(q, part(model, kept), tolerance=1e-9, progress=False)
    grid = torch.linspace(-40, 40, 40_001, dtype=torch.float64)
    weights = -0.5 * grid.square() + math.log(80 / 40_000) - 0.5 * math.log(2 * math.pi)
    mean, sd = model.X[row] @ q.mean + model.offset[row], (model.X[row] @ q.covariance @ model.X[row]).sqrt()
    return float((weights - model.likelihood.energy(mean + sd * grid, model.y[row])).logsumexp(0))


def in_groups(name, model, size):
    """Groups of rows drawn at random: their joint densities by all ways."""
    q = CholeskyGaussian(model.dim, dtype=torch.float64)
    _, once = cpu(lambda: fit(q, model, tolerance=1e-8, progress=False))
    count = len(model.y)
    member = torch.randperm(count, generator=torch.Generator().manual_seed(2)) // size
    ours, price = cpu(lambda: leave_one_out(q, model, groups=member))
    sites, cheap = cpu(lambda: leave_one_out(q, model, flag=math.inf, groups=member))
    truth, dear = cpu(lambda: leave_one_out(q, model, flag=0.0, groups=member))
    theta = q.sample((DRAWS,), torch.Generator().manual_seed(0))
    rows = model.likelihood.energy(model.predictor(theta), model.y)
    ratios = rows.new_zeros(DRAWS, len(truth.density)).index_add(1, member, rows)
    smooth = smoothed(ratios)
    psis = (smooth.log_weights - ratios).logsumexp(0)
    print(f"{name}, {len(truth.density)} groups: elpd {truth.total:.4f}, standard errors to {ours.error.max():.1e}")
    for words, density in (("leave_one_out", ours.density), ("  no fits", sites.density), ("PSIS", psis)):
        error = (density - truth.density).abs()
        print(f"  {words:<14} elpd {density.sum():.4f}  median {error.median():.1e}, largest {error.max():.1e}")
    high = float((smooth.k_hat > 0.7).double().mean())
    share = 100 * float(ours.resolved.double().mean())
    prices = f"ours {price / once:.1f}, without fits {cheap / once:.1f}, all by fits {dear / once:.1f}"
    print(f"  fitted anew {share:.0f} %, k > 0.7 {100 * high:.0f} %; in fits: {prices}", flush=True)


def mixed_models():
    """Simulated mixed models of thirty groups, with intercepts, and with slopes."""
    for seed, family in enumerate(("gaussian", "poisson", "bernoulli")):
        for effects in (1, 2):
            generator = torch.Generator().manual_seed(seed)
            groups = torch.arange(240) // 8
            X = torch.stack([torch.ones(240), torch.randn(240, generator=generator)], 1).double()
            b = torch.tensor([0.8, 0.4], dtype=torch.float64) * torch.randn(30, 2, generator=generator).double()
            eta = X @ torch.tensor([0.3, 0.5]).double() + (X * b[groups])[:, :effects].sum(-1)
            if family == "gaussian":
                y = eta + 0.5 * torch.randn(240, generator=generator).double()
            elif family == "poisson":
                y = torch.poisson(eta.exp(), generator=generator)
            else:
                y = (torch.rand(240, generator=generator) < eta.sigmoid()).double()
            words = "intercepts" if effects == 1 else "intercepts and slopes"
            yield f"{family}, {words}", MixedModel(X, y, (X[:, :effects], groups), family)


def of_mixed_models():
    """Leave one group out of each."""
    for name, model in mixed_models():
        result, once = cpu(lambda model=model: model.fit(progress=False, draws=4096))
        ours, price = cpu(result.leave_one_group_out)
        truth, dear = cpu(lambda result=result: result.leave_one_group_out(worst=0.0))
        error = (ours.density - truth.density).abs()
        prices = f"ours {price / once:.1f}, all by fits {dear / once:.1f}"
        print(f"{name}: elpd {truth.total:.3f}, ours {ours.total:.3f}  median {error.median():.1e}, largest "
              f"{error.max():.1e}; fitted anew {int(ours.resolved.sum())} of 30, largest k-hat {ours.k_hat.max():.2f}; "
              f"in fits: {prices}", flush=True)  # fmt: skip


def cpu(run):
    start = time.process_time()
    return run(), time.process_time() - start


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--random", type=int, default=100)
    parser.add_argument("--hard", type=int, default=20)
    parser.add_argument("--groups", type=int, help="leave out groups of so many rows")
    options = parser.parse_args(arguments)
    if options.groups:
        for name, model in problems(options.rows):
            in_groups(name, model, options.groups)
        of_mixed_models()
        return
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
        off = max(abs(alone(model, row) - float(ours.density[row])) for row in hard.tolist())
        print(f"  the hardest rows by single fits from scratch: largest difference {off:.1e}")
        flagged = float(ours.resolved.double().mean())
        prices = ", ".join(
            f"{words} {seconds / once:.1f}"
            for words, seconds in (("ours", price), ("without fits", cheap), ("all by fits", dear), ("PSIS", draws))
        )
        print(f"  fitted anew {100 * flagged:.1f} %, k > 0.7 {100 * high:.1f} %; in fits: {prices}", flush=True)


if __name__ == "__main__":
    main()
