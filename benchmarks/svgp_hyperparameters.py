"""`train_svgp` beside joint training in batches: held-out score against processor time, on all settings in one command.

    TORCHNGVI_DATA=... python benchmarks/svgp_hyperparameters.py [--reduced] [--minutes 40] [--data bike power ...]
        [--splits 0 1 2] [--likelihood gaussian bernoulli student] [--dtype float64 float32] [--seconds 20]
        [--inducing 256] [--batch 1024] [--methods rounds joint NGD Adam] [--rates 0.03 0.1 0.3] [--out DIR]
        [--from-logs]

Four ways to train one model from one start: `train_svgp` (rounds of L-BFGS, then `refine_svgp`),
`train_svgp_in_batches` with Adam at 0.02 for hyper-parameters and inducing points, and GPyTorch's NGD for q, at the
best of its rates in hindsight, or Adam for q, at 0.02, both with the same Adam for the others.  Time is the
processor's, on one thread, without that of the scores; a score of the first two is taken on a copy after `refine_svgp`,
whose time is added.  The first begins from inducing points that it chooses itself, which is part of its time; the
others from random rows.

For each row (set, split, likelihood, dtype) the table has the last score of each, by how much the first is below the
better of NGD and Adam when their time is up, and how many times sooner it has that score for good than that one has it.
Both are as the curves tell, which have a point for each round or a tenth of the time.
Bernoulli: whether the target is above its median.  Student-t: the targets as they are.

Each run is a line of DIR/log.jsonl when it is complete; a command with the same DIR makes only those that are missing.
With --minutes no run begins after so many minutes of the processor.  All rows of the first split come first.
--reduced: 128 inducing points in place of 256, 5 seconds in place of 20, NGD at 0.1 alone in place of its best of three
rates, and no mini-batches of this library; all sets, splits, likelihoods and dtypes stay.

With --starts: `train_svgp` alone, on 4,000 rows of each set and split, from inducing points chosen by greedy variance
(the default), by k-means of the inputs, and at random; with length scales that begin at the root of the features, at
ln 2 as GPyTorch's do, and at ln 2 without being doubled ("kept").  A set of two classes is named as its file.  A cell
has the negative bound per datum after the first round and at the end (after at most --rounds), and the test score.
"""

import argparse
import contextlib
import copy
import itertools
import json
import math
import os
import time
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_svmlight_file
from svgp_joint import Clock, Model, TimeIsUpError, score, theirs, watched

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import gpytorch as gp

import torchngvi.adapters.gpytorch.engines as gp_engines
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
HYPER_RATE, POINTS, RATES = 0.02, 10, (0.03, 0.1, 0.3)
LENGTHS = ("root", "ln 2", "kept")
METHODS = ("rounds", "joint", "NGD", "Adam")
REDUCED = {"inducing": 128, "seconds": 5.0, "rates": [0.1], "methods": ["rounds", "NGD", "Adam"]}
GOALS = {"gaussian": 5.0, "bernoulli": 2.0, "student": 2.0}  # times sooner
ROW = ["data", "split", "likelihood", "dtype"]


def load(name, split, likelihood, dtype):
    """Standardised by the training rows; (x, y) of these and of the others."""
    folder = Path(os.environ["TORCHNGVI_DATA"])
    packed, classes = folder / "uci_regression" / f"{name}.npz", folder / "libsvm" / f"{name}.svm.gz"
    if classes.exists():
        X, y = load_svmlight_file(str(classes))
        rows = np.column_stack([X.toarray(), y == y.max()])
        test = np.random.default_rng(split).random(len(y)) < 0.1
    elif packed.exists():
        with np.load(packed) as file:
            rows = np.column_stack([file["X"], file["y"]])
            test = np.unpackbits(file["test_mask"][split])[: len(rows)].astype(bool)
    else:
        rows = np.loadtxt(folder / "gp_uci" / f"{name}_data.csv.gz", delimiter=",")
        test = np.loadtxt(folder / "gp_uci" / f"{name}_test_mask.csv.gz", delimiter=",")[:, split].astype(bool)
    scale = rows[~test].std(0)
    rows = (rows - rows[~test].mean(0)) / np.where(scale > 0, scale, 1.0)
    if likelihood == "bernoulli":
        rows[:, -1] = rows[:, -1] > (0.0 if classes.exists() else np.median(rows[~test, -1]))
    rows = torch.tensor(rows, dtype=getattr(torch, dtype))
    return rows[~test, :-1], rows[~test, -1], rows[test, :-1], rows[test, -1]


def start(q, Z, likelihood):
    torch.manual_seed(0)
    return Model(q, Z).to(Z.dtype).train(), LIKELIHOODS[likelihood]().to(Z.dtype).train()


def refined(model, likelihood, data):
    """The score of a copy with the optimal q, and the time that took."""
    x, y, x_test, y_test = data
    other, noise = copy.deepcopy((model, likelihood))
    begin = time.process_time()
    refine_svgp(other, noise, [(x, y)], progress=False)
    spent = time.process_time() - begin
    return spent, score(other, noise, x_test, y_test)


def in_rounds(data, likelihood, options, take):
    x, y, _, _ = data
    q = NaturalGradientVariationalDistribution(options.inducing)
    model, noise = start(q, x.new_zeros(options.inducing, x.shape[-1]), likelihood)
    clock = Clock(options.seconds, 1)

    def at_a_round(*_):
        at = clock.now()
        spent, value = clock.pause(lambda: refined(model, noise, data))
        take(at + spent, value)
        return at > options.seconds

    train_svgp(model, noise, (x, y), rounds=100, callbacks=[at_a_round], progress=False)


def at_random(x, options):
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: options.inducing]].clone()


def jointly(data, likelihood, options, take):
    x, y, _, _ = data
    q = NaturalGradientVariationalDistribution(options.inducing, posterior=NaturalGaussian)
    model, noise = start(q, at_random(x, options), likelihood)
    adam = torch.optim.Adam([*model.parameters(), *noise.parameters()], lr=HYPER_RATE)
    clock = Clock(options.seconds, POINTS)

    def at_a_mark(at):
        model.variational_strategy._clear_cache()
        spent, value = refined(model, noise, data)
        take(at + spent, value)

    try:
        loader = watched(x, y, options.batch, clock, at_a_mark)
        train_svgp_in_batches(model, noise, loader, len(y), adam, epochs=10**9, progress=False)
    except TimeIsUpError:
        pass


def by_gpytorch(data, likelihood, options, take, method, rate):
    kind = "Natural" if method == "NGD" else "Cholesky"
    q = getattr(gp.variational, f"{kind}VariationalDistribution")(options.inducing)
    model, noise = start(q, at_random(data[0], options), likelihood)
    of_q = list(model.variational_parameters())
    of_q = gp.optim.NGD(of_q, len(data[1]), rate) if method == "NGD" else torch.optim.Adam(of_q, rate)
    settings = {"batch": options.batch, "hyper_rate": HYPER_RATE, "seconds": options.seconds, "points": POINTS}
    theirs(model, noise, of_q, data, settings, take)


def by_k_means(x, size):
    """Centres of Lloyd's algorithm, 20 iterations from random rows; one without rows stays where it is."""
    centres = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:size]].clone()
    for _ in range(20):
        nearest = torch.cdist(x, centres).argmin(1)
        counts = torch.bincount(nearest, minlength=size)[:, None]
        sums = torch.zeros_like(centres).index_add_(0, nearest, x)
        centres = torch.where(counts > 0, sums / counts.clamp_min(1), centres)
    return centres


def starts(options):
    """The table of --starts, a line for each set, split, likelihood and length scale."""
    print("| data, split | length scale | greedy variance | k-means | random rows |\n|---|---|---|---|---|")
    rows = itertools.product(options.data, options.splits, options.likelihood, options.dtype)
    for name, split, likelihood, dtype in rows:
        x, y, x_test, y_test = load(name, split, likelihood, dtype)
        some = torch.randperm(len(x), generator=torch.Generator().manual_seed(split))[:4000]
        x, y = x[some], y[some]
        points = [x.new_zeros(options.inducing, x.shape[-1]), by_k_means(x, options.inducing), at_random(x, options)]
        for length in options.lengths:
            cells = []
            for Z in points:
                model, noise = start(gp.variational.CholeskyVariationalDistribution(len(Z)), Z.clone(), likelihood)
                if length != "root":
                    model.covar_module.base_kernel.lengthscale = math.log(2.0)
                begin = time.process_time()
                with mock.patch.object(gp_engines, "lengthen") if length == "kept" else contextlib.nullcontext():
                    losses = train_svgp(model, noise, (x, y), rounds=options.rounds, progress=False).losses
                spent = time.process_time() - begin
                scores = losses[0], losses[-1], score(model, noise, x_test, y_test)
                cells.append(", ".join(f"{value:.3f}" for value in scores) + f" ({spent:.1f} s)")
            print(f"| {name}, {split}, {likelihood} | {length} | " + " | ".join(cells) + " |", flush=True)


def wanted(options):
    """The settings of every run of these options, in the order in which they are made."""
    runs = [("rounds", 0.0), ("joint", 0.0), *(("NGD", rate) for rate in options.rates), ("Adam", HYPER_RATE)]
    rows = itertools.product(options.splits, options.dtype, options.likelihood, options.data)
    for (split, dtype, likelihood, name), (method, rate) in itertools.product(rows, runs):
        if method in options.methods:
            row = dict(zip(ROW, (name, split, likelihood, dtype), strict=True))
            size = {"inducing": options.inducing, "batch": options.batch, "budget": options.seconds}
            yield row | size | {"method": method, "rate": rate}


def read(path):
    """The runs of a log, out of which a last line that was cut off is taken."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith("\n"):
        path.write_text("".join(lines[:-1]))
    return [json.loads(line) for line in lines if line.endswith("\n")]


def key(run):
    return tuple(value for name, value in sorted(run.items()) if name != "curve")


def ran(method, rate, data, likelihood, options):
    """The curve of a run: its seconds and scores, None for one that is not finite."""
    curve = []

    def take(at, value):
        curve.append((at, value if math.isfinite(value) else None))

    if method in ("rounds", "joint"):
        (in_rounds if method == "rounds" else jointly)(data, likelihood, options, take)
    else:
        by_gpytorch(data, likelihood, options, take, method, rate)
    return curve


def warm_up(options):
    """What the first of these methods would pay for all: what torch loads on first use."""
    rows = torch.rand(4 * options.inducing, 2, generator=torch.Generator().manual_seed(0))
    brief = argparse.Namespace(**{**vars(options), "seconds": 0.1})
    for method in options.methods:
        ran(method, 0.1, (rows, rows[:, 0], rows, rows[:, 0]), "gaussian", brief)


def complete(options, path):
    """Make the runs that the log does not have yet."""
    known = {key(run) for run in read(path)}
    missing = [run for run in wanted(options) if key(run) not in known]
    if missing:
        warm_up(options)
    begun = time.process_time()
    for run in missing:
        if time.process_time() - begun > 60 * options.minutes:
            print(f"{options.minutes:g} minutes are over: the same command goes on from {path}")
            return
        curve = ran(run["method"], run["rate"], load(*(run[name] for name in ROW)), run["likelihood"], options)
        with path.open("a") as file:
            file.write(json.dumps(run | {"curve": curve}) + "\n")
        at, value = curve[-1] if curve else (math.nan, None)
        print(*(str(part) for part in run.values()), f"{at:.2f} s", value, flush=True)


def table(options, path):
    """The log as a table with a line for each score, without rows of which a run is missing."""
    runs, asked = {key(run): run for run in read(path)}, list(wanted(options))
    missing = {tuple(run[name] for name in ROW) for run in asked if key(run) not in runs}
    points = [
        run | {"seconds": at, "nll": value}
        for run in asked
        if tuple(run[name] for name in ROW) not in missing
        for at, value in runs[key(run)]["curve"]
    ]
    columns = [*ROW, "inducing", "batch", "budget", "method", "rate", "seconds", "nll"]
    return pd.DataFrame(points, columns=columns).astype({"nll": float})


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


def compared(found, budget):
    """How many times sooner `train_svgp` has the better last score of NGD and Adam, and its lead when time is up."""
    others = [found[method] for method in ("NGD", "Adam") if method in found]
    if not others or "rounds" not in found:
        return math.nan, math.nan
    best = min(others, key=lambda curve: curve["nll"].iloc[-1])
    value, ours = best["nll"].iloc[-1], found["rounds"]
    in_time = ours[ours["seconds"] <= budget]["nll"]
    lead = value - in_time.iloc[-1] if len(in_time) else -math.inf
    return reached(best, value) / reached(ours, value), lead


def show(log):
    names = "".join(f"{method:>10}" for method in METHODS)
    print(f"\n{'data':<10}{'split':>6} {'likelihood':<11}{'dtype':<8}{names}{'lead':>9}{'sooner':>9}")
    rows = []
    for row, part in log.groupby(ROW, sort=False):
        found = curves(part)
        sooner, lead = compared(found, part["budget"].iloc[0])
        rows.append((*row, sooner, lead))
        scores = (f"{found[m]['nll'].iloc[-1]:>10.4f}" if m in found else f"{'-':>10}" for m in METHODS)
        print(f"{row[0]:<10}{row[1]:>6} {row[2]:<11}{row[3]:<8}{''.join(scores)}{lead:>9.4f}{sooner:>9.1f}")
    rows = pd.DataFrame(rows, columns=[*ROW, "sooner", "lead"]).dropna()
    for (likelihood, dtype), part in rows.groupby(["likelihood", "dtype"], sort=False):
        goal = GOALS[likelihood]
        print(
            f"{likelihood}, {dtype}: {len(part)} rows, sooner by {part['sooner'].min():.1f} to "
            f"{part['sooner'].max():.1f} times, median {part['sooner'].median():.1f}; {sum(part['sooner'] >= goal)} "
            f"at the goal of {goal:g}; {sum(part['lead'] >= 0)} at or ahead when time is up"
        )


def draw(log, path):
    names = list(dict.fromkeys(log["data"]))
    others = list(log.groupby(ROW[1:], sort=False))
    figure = Figure(figsize=(4.2 * len(names), 3.6 * len(others)), layout="constrained")
    colors = {"rounds": "#1f5a94", "joint": "#7fb0dd", "NGD": "#d1672b", "Adam": "#8a4fa3"}
    grid = figure.subplots(len(others), len(names), squeeze=False)
    for (row, (place, rows)), (column, name) in itertools.product(enumerate(others), enumerate(names)):
        part, axes = rows[rows["data"] == name], grid[row, column]
        for method, curve in curves(part).items():
            axes.plot(curve["seconds"], curve["nll"], color=colors[method], marker=".", label=method)
        axes.set_title(f"{name}, split {place[0]}, {place[1]}, {place[2]}", fontsize=9)
        axes.set(xlabel="processor seconds", ylabel="held-out nats a row")
        if part["nll"].notna().any():
            axes.set_ylim(None, part["nll"].quantile(0.9))
            axes.legend(fontsize=7, frameon=False)
        axes.grid(color="#e3e6ea", linewidth=0.6)
    figure.savefig(path, dpi=70)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["bike", "elevators", "protein", "naval", "power"])
    parser.add_argument("--splits", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--likelihood", nargs="+", choices=LIKELIHOODS, default=list(LIKELIHOODS))
    parser.add_argument("--dtype", nargs="+", choices=["float64", "float32"], default=["float64", "float32"])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--inducing", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1024, help="rows of a mini-batch; as many as there are: all")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--minutes", type=float, default=math.inf, help="of the processor, after which no run begins")
    parser.add_argument("--reduced", action="store_true", help="fewer points, seconds and rates, as said above")
    parser.add_argument("--starts", action="store_true", help="inducing points of train_svgp instead")
    parser.add_argument("--rounds", type=int, default=6, help="of --starts, at most")
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=LENGTHS, help="of --starts")
    parser.add_argument("--out", default="runs/svgp-hyperparameters")
    parser.add_argument("--from-logs", action="store_true", help="show what the log has, and run nothing")
    if parser.parse_known_args(arguments)[0].reduced:
        parser.set_defaults(**REDUCED)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.starts:
        starts(options)
        return
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    if not options.from_logs:
        complete(options, folder / "log.jsonl")
    log = table(options, folder / "log.jsonl")
    show(log)
    if len(log):
        draw(log, folder / "svgp-hyperparameters.png")


if __name__ == "__main__":
    main()
