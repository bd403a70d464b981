"""`train_svgp` beside joint training in batches: held-out score against processor time.

    TORCHNGVI_DATA=... python benchmarks/svgp_hyperparameters.py [--data bike power ...] [--splits 0 1 2] [--seconds 20]
        [--likelihood gaussian|bernoulli|student] [--dtype float64|float32] [--inducing 256] [--out DIR] [--from-logs]

Four ways to train one model from one start: `train_svgp` (rounds of L-BFGS, then `refine_svgp`),
`train_svgp_in_batches` with Adam at 0.02 for hyper-parameters and inducing points, and GPyTorch's NGD for q, at the
best of its rates in hindsight, or Adam for q, at 0.02, both with the same Adam for the others.  Time is the
processor's, on one thread, without that of the scores; a score of the first two is taken on a copy after `refine_svgp`,
whose time is added.  The first begins from inducing points that it chooses itself, which is part of its time; the
others from random rows.

For each set and split the table has the last score of each, and the time at which the first has reached the last score
of each of the others for good.  Bernoulli: whether the target is above its median.  Student-t: the targets as they are.
"""

import argparse
import copy
import math
import os
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from svgp_joint import Clock, Model, TimeIsUpError, score, theirs, watched

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import gpytorch as gp

from torchngvi import NaturalGaussian
from torchngvi.adapters.gpytorch import (
    NaturalGradientVariationalDistribution,
    refine_svgp,
    train_svgp,
    train_svgp_in_batches,
)

LIKELIHOODS = {
    "gaussian": gp.likelihoods.GaussianLikelihood,
    "bernoulli": gp.likelihoods.BernoulliLikelihood,
    "student": gp.likelihoods.StudentTLikelihood,
}
BATCH, HYPER_RATE, POINTS, RATES = 1024, 0.02, 10, (0.03, 0.1, 0.3)
METHODS = ("rounds", "joint", "NGD", "Adam")


def load(name, split, options):
    """Standardised by the training rows; (x, y) of these and of the others."""
    folder = Path(os.environ["TORCHNGVI_DATA"])
    packed = folder / "uci_regression" / f"{name}.npz"
    if packed.exists():
        with np.load(packed) as file:
            rows = np.column_stack([file["X"], file["y"]])
            test = np.unpackbits(file["test_mask"][split])[: len(rows)].astype(bool)
    else:
        rows = np.loadtxt(folder / "gp_uci" / f"{name}_data.csv.gz", delimiter=",")
        test = np.loadtxt(folder / "gp_uci" / f"{name}_test_mask.csv.gz", delimiter=",")[:, split].astype(bool)
    scale = rows[~test].std(0)
    rows = (rows - rows[~test].mean(0)) / np.where(scale > 0, scale, 1.0)
    if options.likelihood == "bernoulli":
        rows[:, -1] = rows[:, -1] > np.median(rows[~test, -1])
    rows = torch.tensor(rows, dtype=getattr(torch, options.dtype))
    return rows[~test, :-1], rows[~test, -1], rows[test, :-1], rows[test, -1]


def start(q, Z, options):
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    return Model(q, Z).to(dtype).train(), LIKELIHOODS[options.likelihood]().to(dtype).train()


def refined(model, likelihood, data):
    """The score of a copy with the optimal q, and the time that took."""
    x, y, x_test, y_test = data
    other, noise = copy.deepcopy((model, likelihood))
    begin = time.process_time()
    refine_svgp(other, noise, [(x, y)], progress=False)
    spent = time.process_time() - begin
    return spent, score(other, noise, x_test, y_test)


def in_rounds(data, options, take):
    x, y, _, _ = data
    q = NaturalGradientVariationalDistribution(options.inducing)
    model, likelihood = start(q, torch.zeros(options.inducing, x.shape[-1]), options)
    clock = Clock(options.seconds, 1)

    def at_a_round(*_):
        at = clock.now()
        spent, value = clock.pause(lambda: refined(model, likelihood, data))
        take("rounds", 0.0, at + spent, value)
        return at > options.seconds

    train_svgp(model, likelihood, (x, y), rounds=100, callbacks=[at_a_round], progress=False)


def at_random(x, options):
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: options.inducing]].clone()


def jointly(data, options, take):
    x, y, _, _ = data
    q = NaturalGradientVariationalDistribution(options.inducing, posterior=NaturalGaussian)
    model, likelihood = start(q, at_random(x, options), options)
    adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=HYPER_RATE)
    clock = Clock(options.seconds, POINTS)

    def at_a_mark(at):
        model.variational_strategy._clear_cache()
        spent, value = refined(model, likelihood, data)
        take("joint", 0.0, at + spent, value)

    try:
        loader = watched(x, y, BATCH, clock, at_a_mark)
        train_svgp_in_batches(model, likelihood, loader, len(y), adam, epochs=10**9, progress=False)
    except TimeIsUpError:
        pass


def by_gpytorch(method, data, options, rate, take):
    kind = "Natural" if method == "NGD" else "Cholesky"
    q = getattr(gp.variational, f"{kind}VariationalDistribution")(options.inducing)
    model, likelihood = start(q, at_random(data[0], options), options)
    of_q = list(model.variational_parameters())
    of_q = gp.optim.NGD(of_q, len(data[1]), rate) if method == "NGD" else torch.optim.Adam(of_q, rate)
    settings = {"batch": BATCH, "hyper_rate": HYPER_RATE, "seconds": options.seconds, "points": POINTS}
    theirs(model, likelihood, of_q, data, settings, lambda at, nll: take(method, rate, at, nll))


def run(options):
    log = []
    for name in options.data:
        for split in options.splits:
            data = load(name, split, options)

            def take(method, rate, at, value, name=name, split=split):
                log.append((name, split, method, rate, at, value))
                print(f"{name:<10}{split:>3} {method:<7}{rate or '':<5}{at:>8.2f} s {value:>9.4f}", flush=True)

            if "rounds" in options.methods:
                in_rounds(data, options, take)
            if "joint" in options.methods:
                jointly(data, options, take)
            for rate in options.rates if "NGD" in options.methods else ():
                by_gpytorch("NGD", data, options, rate, take)
            if "Adam" in options.methods:
                by_gpytorch("Adam", data, options, HYPER_RATE, take)
    return pd.DataFrame(log, columns=["data", "split", "method", "rate", "seconds", "nll"])


def curves(part):
    """Of each method the curve of its best rate by the last score."""
    found = {}
    for method, curve in part.groupby("method", sort=False):
        last = curve.sort_values("seconds").groupby("rate").tail(1).dropna()
        if len(last):
            rate = last.loc[last["nll"].idxmin(), "rate"]
            found[method] = curve[curve["rate"] == rate].sort_values("seconds")
    return found


def reached(curve, value):
    """The time from which the curve stays at or below a score."""
    above = np.flatnonzero(~(curve["nll"].to_numpy() <= value))
    first = above[-1] + 1 if len(above) else 0
    return curve["seconds"].iloc[first] if first < len(curve) else math.inf


def show(log):
    print(
        f"\n{'data':<10}{'split':>6} "
        + "".join(f"{m:>9}" for m in METHODS)
        + "   when rounds has the others' last score"
    )
    for (name, split), part in log.groupby(["data", "split"], sort=False):
        found = curves(part)
        line = f"{name:<10}{split:>6} "
        for method in METHODS:
            line += f"{found[method]['nll'].iloc[-1]:>9.4f}" if method in found else f"{'-':>9}"
        for method in METHODS[1:]:
            if method in found and "rounds" in found:
                end = found[method].iloc[-1]
                at = reached(found["rounds"], end["nll"])
                line += f"   {method} {at:.1f} of {end['seconds']:.1f} s, {end['seconds'] / at:.1f} times less"
        print(line)


def draw(log, path):
    places = list(log.groupby(["data", "split"], sort=False))
    figure = Figure(figsize=(4.2 * len(places), 3.6), layout="constrained")
    colors = {"rounds": "#1f5a94", "joint": "#7fb0dd", "NGD": "#d1672b", "Adam": "#8a4fa3"}
    for axes, ((name, split), part) in zip(figure.subplots(1, len(places), squeeze=False)[0], places, strict=True):
        for method, curve in curves(part).items():
            axes.plot(curve["seconds"], curve["nll"], color=colors[method], marker=".", label=method)
        axes.set(title=f"{name}, split {split}", xlabel="processor seconds", ylim=(None, part["nll"].quantile(0.9)))
        axes.grid(color="#e3e6ea", linewidth=0.6)
        axes.legend(fontsize=7, frameon=False)
    figure.axes[0].set_ylabel("held-out nats a row")
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["bike", "elevators", "protein", "naval", "power"])
    parser.add_argument("--splits", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--likelihood", choices=LIKELIHOODS, default="gaussian")
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    parser.add_argument("--inducing", type=int, default=256)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--out", default="runs/svgp-hyperparameters")
    parser.add_argument("--from-logs", action="store_true", help="draw again from the log of an earlier run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(options.out)
    if options.from_logs:
        log = pd.read_csv(folder / "log.csv")
    else:
        log = run(options)
        folder.mkdir(parents=True, exist_ok=True)
        log.to_csv(folder / "log.csv", index=False)
    show(log)
    draw(log, folder / "svgp-hyperparameters.png")


if __name__ == "__main__":
    main()
