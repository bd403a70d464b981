"""Exact fits of regressions: `fit(q, model)`, from the mode by Newton's method, beside `VN(q)`, in CPU time.

    python -m benchmarks.newton [--rows 2000] [--sets heart_scale,a1a] [--repeats 3] [--diagonal] [--classes]

Logistic regression on the LIBSVM sets under $TORCHNGVI_DATA, from the six starts of `benchmarks.evaluations`, with a
full covariance or a diagonal one.  Both fits run to the default tolerance, a natural-gradient norm of 1e-5, and take
turns in one process on one thread; the ratio is of the least CPU time of each, VN's over that of `fit`.  Evaluations
are told to the tolerance and, in brackets, to 1e-6 nats.  A pass of the search for the mode and a product with the
Hessian of the bound are priced in evaluations.  ``--classes`` is softmax regression on scikit-learn's data.
"""

import argparse
import os
import time
import warnings

import torch
from sklearn.datasets import load_digits, load_iris, load_wine

from benchmarks.evaluations import SETS, STARTS, breast_cancer, libsvm
from torchngvi import VN, CholeskyGaussian, DiagonalGaussian, Quadrature, fit
from torchngvi.models import SoftmaxRegression
from torchngvi.rules import RootNewton

CHOSEN = ("diabetes_scale", "heart_scale", "german.numer_scale", "ionosphere_scale", "a1a", "mushrooms")
NEAR = 1e-6  # nats
CAP = 1000  # evaluations


def cpu(run):
    """The result of a run and its CPU time in seconds."""
    start = time.process_time()
    result = run()
    return result, time.process_time() - start


def price(q, model):
    """CPU time of a pass and of a product, in evaluations with their gradient, at q."""
    estimator, theta = Quadrature(), q.mean.clone()

    def evaluation():
        return q.local(estimator(q, model))

    change, K = estimator(q, model).derivative.change(q.frame()), q.structure.tril(q.structure.eye(theta))

    def least(call):
        call()
        return min(cpu(lambda: [call() for _ in range(3)])[1] for _ in range(5))

    unit = least(evaluation)
    return least(lambda: model.second_order(theta)) / unit, least(lambda: change(theta, K)) / unit


def compared(model, family, starts, repeats):
    """One line for each start: evaluations of both, passes, products, ratio, and the difference of the losses."""
    rules, made = [], RootNewton.__init__

    def noted(rule, *args, **options):
        made(rule, *args, **options)
        rules.append(rule)

    RootNewton.__init__ = noted
    rows = []
    fit(family(model.dim, dtype=torch.float64), model, max_evaluations=5, progress=False)  # nothing is loaded later
    for scale, mean in starts:

        def new(scale=scale, mean=mean):
            return family(model.dim, scale=scale, mean=mean, dtype=torch.float64)

        times = {"before": [], "now": []}
        for _ in range(repeats):
            q = new()
            before, seconds = cpu(lambda q=q: fit(q, model, VN(q), max_evaluations=CAP, progress=False))
            times["before"].append(seconds)
            q = new()
            rules.clear()
            now, seconds = cpu(lambda q=q: fit(q, model, max_evaluations=CAP, progress=False))
            times["now"].append(seconds)
        lowest = min(before.loss, now.loss)
        near = [next((r.evaluations for r in x.trace if r.loss - lowest < NEAR), CAP) for x in (before, now)]
        rows.append(
            {
                "before": (before.evaluations, near[0], before.converged),
                "now": (now.evaluations, near[1], now.converged),
                "passes": now.gradients - now.evaluations,
                "products": sum(rule.products for rule in rules),
                "rejected": now.trace[-1].rejections,
                "ratio": min(times["before"]) / min(times["now"]),
                "gap": now.loss - before.loss if before.converged else 0.0,
            }
        )
    RootNewton.__init__ = made
    return rows, price(q, model)


def middle(values):
    return torch.tensor([float(value) for value in values]).quantile(0.5).item()


def told(name, model, family, rows, prices):
    """One line for a set."""
    before, now = ([row[which] for row in rows] for which in ("before", "now"))
    counts = [
        f"{middle(x[0] for x in runs):g} ({middle(x[1] for x in runs):g}), worst {max(x[0] for x in runs)}"
        for runs in (before, now)
    ]
    passes, products, ratio = (middle(row[key] for row in rows) for key in ("passes", "products", "ratio"))
    ratios, gaps = [row["ratio"] for row in rows], [abs(row["gap"]) for row in rows]
    parts = (
        f"{name:<20}{model.num_data:>6} x {model.dim:<4}{family.__name__[:8]} {counts[0]} -> {counts[1]}",
        f"{passes:g} passes of {prices[0]:.2f}, {products:g} products of {prices[1]:.2f}",
        f"{sum(row['rejected'] for row in rows)} rejected",
        f"CPU ratio {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"losses differ by {max(gaps):.0e}",
        f"{sum(not x[2] for x in before)} and {sum(not x[2] for x in now)} not converged",
    )
    print(" | ".join(parts), flush=True)


def classes():
    """Softmax regressions by name."""
    for name, load in (("iris", load_iris), ("wine", load_wine), ("digits 0-3", load_digits)):
        X, y = load(return_X_y=True)
        if name.startswith("digits"):
            X, y = X[y < 4][:300, 20:32], y[y < 4][:300]
        X = torch.tensor((X - X.mean(0)) / (X.std(0) + 1e-9))
        yield name, SoftmaxRegression(torch.cat([X, torch.ones(len(y), 1, dtype=X.dtype)], 1), torch.tensor(y))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=None, help="use only the first rows of each set")
    parser.add_argument("--sets", default=",".join(SETS), help="names of sets")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--diagonal", action="store_true", help="a diagonal covariance")
    parser.add_argument("--classes", action="store_true", help="softmax regression in the place of the sets")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    generator, everything = torch.Generator().manual_seed(0), []
    problems = [("breast cancer", breast_cancer())] if not given.classes else list(classes())
    if not given.classes and "TORCHNGVI_DATA" not in os.environ:
        print("TORCHNGVI_DATA is not set: the LIBSVM sets are left out")
        given.sets = ""
    problems += [(name, None) for name in given.sets.split(",") if name and not given.classes]
    for family in (DiagonalGaussian,) if given.diagonal else (CholeskyGaussian,):
        for name, model in problems:
            model = libsvm(name, given.rows) if model is None else model
            far = [torch.randn(model.dim, generator=generator, dtype=torch.float64) * 10**0.5 for _ in STARTS]
            starts = [(c, f if m == "N" else 0.0) for (c, m), f in zip(STARTS, far, strict=True)]
            rows, prices = compared(model, family, starts, given.repeats)
            told(name, model, family, rows, prices)
            everything += [(name, row) for row in rows]
    for which, kept in (("sets the constants were chosen on", True), ("other sets", False), ("all", None)):
        rows = [row for name, row in everything if kept is None or (name in CHOSEN) == kept]
        if rows:
            counts = [row["now"][0] for row in rows]
            ratios = [row["ratio"] for row in rows]
            print(f"{which}: {len(rows)} fits, evaluations median {middle(counts):g}, worst {max(counts)};", end=" ")
            print(f"CPU ratio median {middle(ratios):.2f}, least {min(ratios):.2f}")


if __name__ == "__main__":
    main()
