"""Rows taken out and put in, and parts merged, beside fits of the same rows: evaluations, cost, distance.

    python -m benchmarks.posterior_arithmetic [--rows 1000] [--repeats 3]

Logistic regression on LIBSVM sets under $TORCHNGVI_DATA and breast cancer, and a simulated Poisson regression.  Costs
are CPU times in units of a fit from scratch to the same rows, medians of interleaved repeats; distances are the largest
difference of mean and covariance in standard deviations from a fit to 1e-10.  The gap of merged parts is that of the
negative ELBO of all rows, in nats, after merging and after each of four further rounds; the part of rows is random.
"""

import argparse
import os
import time

import torch

from benchmarks.evaluations import breast_cancer, libsvm
from torchngvi import CholeskyGaussian, GeneralizedLinear, add, fit, forget
from torchngvi.solved import merge, site_sum

SETS = ("heart_scale", "german.numer_scale", "australian_scale", "diabetes_scale", "ionosphere_scale")
ROUNDS = 4


def problems(rows):
    """Name and model."""
    yield "breast cancer", breast_cancer()
    for name in SETS if os.environ.get("TORCHNGVI_DATA") else ():
        yield name, libsvm(name, rows)
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(300, 10, dtype=torch.float64, generator=generator)
    rate = (X @ torch.randn(10, dtype=torch.float64, generator=generator) / 10**0.5).exp()
    yield "Poisson, 300 x 10", GeneralizedLinear(X, torch.poisson(rate, generator=generator), "poisson")


def part(model, rows):
    """The model on some rows."""
    classes = model.coding or None
    y = model.y[rows]
    if classes:  # from ±1 to the labels
        y = torch.where(y > 0, classes[1], classes[0]).to(model.X)
    return GeneralizedLinear(model.X[rows], y, model.likelihood, prior_precision=model.prior.precision, classes=classes)


def cold(model, tolerance=1e-8):
    q = CholeskyGaussian(model.dim, dtype=torch.float64)
    return fit(q, model, tolerance=tolerance, progress=False)


def apart(q, best):
    scale = best.stddev
    mean = ((q.mean - best.mean) / scale).abs().max()
    return float(torch.maximum(mean, ((q.covariance - best.covariance) / (scale[:, None] * scale)).abs().max()))


def cpu(run):
    start = time.process_time()
    return run(), time.process_time() - start


def compared(ours, theirs, repeats):
    """Both results, and the median ratio of their CPU times."""
    pairs = [(cpu(ours), cpu(theirs)) for _ in range(repeats)]
    ratios = sorted(mine[1] / other[1] for mine, other in pairs)
    return pairs[0][0][0], pairs[0][1][0], ratios[len(ratios) // 2]


@torch.no_grad()
def gaps(model, count, order):
    """After merging so many parts, and after each round."""
    best = cold(model, 1e-10).posterior
    models = [part(model, rows) for rows in order.tensor_split(count)]
    prior = {"prior_precision": model.prior.precision}
    q = merge([site_sum(cold(each).posterior, each) for each in models], **prior)
    found = []
    for _ in range(ROUNDS + 1):
        found.append(float(model.negative_elbo(q) - model.negative_elbo(best)))
        q = merge([site_sum(q, each) for each in models], **prior)
    return found


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    for name, model in problems(options.rows):
        count = len(model.y)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
        print(f"{name}, {count} x {model.dim}: a fit takes {cold(model).evaluations} evaluations")
        whole = cold(model)
        for size in (1, 20, count // 5):
            gone, rest = order[:size], order[size:]
            less = part(model, rest)
            less_result, y = cold(less), part(model, gone).y
            if model.coding:
                y = torch.where(y > 0, model.coding[1], model.coding[0])
            for words, run, other in (
                ("out", lambda whole=whole, gone=gone: forget(whole, gone), less),
                ("in", lambda old=less_result, X=model.X[gone], y=y: add(old, X, y), model),
            ):
                ours, theirs, ratio = compared(run, lambda other=other: cold(other), options.repeats)
                distance = apart(ours.posterior, cold(other, 1e-10).posterior)
                print(
                    f"  {size:3} rows {words:<3} {ours.evaluations} evaluations for {theirs.evaluations}, "
                    f"cost {ratio:.2f}, distance {distance:.0e}{'' if ours.converged else ', NOT CONVERGED'}"
                )
        for parts in (2, 4, 10):
            print(f"  {parts:3} parts: gap " + ", ".join(f"{gap:.1e}" for gap in gaps(model, parts, order)), flush=True)


if __name__ == "__main__":
    main()
