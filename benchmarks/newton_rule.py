"""The choice between `NewtonCG` and `VN` for a regression that `fit` makes: each alone, and the rule, in CPU time.

    python -m benchmarks.newton_rule [--repeats 2] [--only WORD ...]

Simulated regressions with a full covariance and a prior precision of 1, of which none was looked at when the rule was
made: dense designs, weak, nearly separable, correlated or with heavy tails, and wide designs of indicators, of which
few are 1 in a row and most are rare; ``--libsvm`` adds real sets.  All fits begin at the mode, on one thread, and take
turns.  A column is
the least CPU time, in milliseconds, to 0.01 nats above the lowest loss of the three, and in brackets to convergence;
"evaluations" are those to convergence.
"""

import argparse
import functools
import time

import torch

from benchmarks.evaluations import libsvm
from torchngvi import VN, CholeskyGaussian, GeneralizedLinear, NewtonCG, fit
from torchngvi.fitting import steps

NEAR = 0.01  # nats


def dense(rows, columns, seed, *, signal=1.0, shared=0.0, degrees=None, family="bernoulli_logit"):
    """Normal or heavy-tailed columns with a part in common, and a linear predictor of standard deviation ``signal``."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    common = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    X = (1 - shared) ** 0.5 * X + shared**0.5 * common
    if degrees is not None:
        X = X / torch.randn(degrees, rows, columns, generator=generator, dtype=torch.float64).square().mean(0).sqrt()
    return targets(X, generator, signal, family)


def indicators(rows, columns, seed, *, ones=15, signal=2.0, family="bernoulli_logit"):
    """Rows with so many ones, in columns whose frequencies fall as 1/k, stored dense."""
    generator = torch.Generator().manual_seed(seed)
    frequency = 1 / torch.arange(1, columns + 1, dtype=torch.float64)
    where = torch.multinomial(frequency.expand(rows, -1), ones, generator=generator)
    X = torch.zeros(rows, columns, dtype=torch.float64).scatter_(1, where, 1.0)
    return targets(X, generator, signal, family)


def targets(X, generator, signal, family):
    theta = torch.randn(X.shape[1], generator=generator, dtype=torch.float64)
    eta = X @ theta
    eta = signal * (eta - eta.mean()) / eta.std()
    if family == "poisson_log":
        return GeneralizedLinear(X, torch.poisson(eta.exp(), generator=generator), family)
    return GeneralizedLinear(X, (torch.rand(len(X), generator=generator, dtype=torch.float64) < eta.sigmoid()).double())


SETS = {
    "dense, weak, 600 x 60": lambda: dense(600, 60, 11, signal=0.5),
    "dense, nearly separable, 1,500 x 120": lambda: dense(1500, 120, 12, signal=6.0),
    "dense, correlated, 1,200 x 180": lambda: dense(1200, 180, 13, shared=0.8),
    "dense, 1,500 x 100": lambda: dense(1500, 100, 1600, signal=3.0),
    "dense, heavy tails, 800 x 140": lambda: dense(800, 140, 940, degrees=3),
    "dense, 3,000 x 140": lambda: dense(3000, 140, 3140),
    "dense, correlated, 1,000 x 160": lambda: dense(1000, 160, 1160, shared=0.5, signal=3.0),
    "dense, 2,000 x 180": lambda: dense(2000, 180, 2180),
    "dense, few rows, 400 x 190": lambda: dense(400, 190, 590, signal=4.0),
    "dense, heavy tails, 3,000 x 240": lambda: dense(3000, 240, 14, degrees=3),
    "dense, 4,000 x 300": lambda: dense(4000, 300, 15),
    "dense, few rows, 300 x 280": lambda: dense(300, 280, 16, signal=3.0),
    "dense, counts, 1,000 x 220": lambda: dense(1000, 220, 17, family="poisson_log"),
    "indicators, 800 x 150": lambda: indicators(800, 150, 21, ones=10),
    "indicators, 2,000 x 100": lambda: indicators(2000, 100, 2100),
    "indicators, 1,500 x 130": lambda: indicators(1500, 130, 1630, signal=6.0),
    "indicators, 4,000 x 160": lambda: indicators(4000, 160, 4160),
    "indicators, 1,000 x 190": lambda: indicators(1000, 190, 1190, signal=4.0),
    "indicators, 2,500 x 260": lambda: indicators(2500, 260, 22, ones=20),
    "indicators, 1,200 x 400": lambda: indicators(1200, 400, 23),
    "indicators, nearly separable, 5,000 x 320": lambda: indicators(5000, 320, 24, signal=8.0),
    "indicators, counts, 1,500 x 210": lambda: indicators(1500, 210, 25, signal=1.0, family="poisson_log"),
}
RULE = steps.usual_optimizer
WAYS = {"rule": RULE, "NewtonCG": lambda q, target: NewtonCG(q), "VN": lambda q, target: VN(q)}


def timed(model, way):
    """The seconds and losses of the records of a fit, its own seconds and evaluations, and the optimizer's name."""
    q, seen, names = CholeskyGaussian(model.dim, dtype=torch.float64), [], []

    def chosen(q, target):
        optimizer = WAYS[way](q, target)
        names.append(type(optimizer).__name__)
        return optimizer

    steps.usual_optimizer = chosen
    try:
        start = time.process_time()
        result = fit(q, model, callbacks=[lambda r: seen.append((time.process_time() - start, r.loss))], progress=False)
        return seen, time.process_time() - start, result.evaluations, names[0]
    finally:
        steps.usual_optimizer = RULE


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[""], help="words of names")
    parser.add_argument("--libsvm", nargs="+", default=[], metavar="NAME", help="sets under $TORCHNGVI_DATA")
    options = parser.parse_args()
    torch.set_num_threads(1)
    timed(dense(100, 5, 0), "NewtonCG"), timed(dense(100, 5, 0), "VN")  # nothing is loaded later
    print("| set | evaluations, NewtonCG and VN | rule | NewtonCG | VN | NewtonCG over VN | the rule takes |")
    print("|---|---|---|---|---|---|---|")
    real = {name: functools.partial(libsvm, name, 4000) for name in options.libsvm}
    for name, make in {**SETS, **real}.items():
        if not any(word in name for word in options.only):
            continue
        model = make()
        runs = {way: [] for way in WAYS}
        for repeat in range(options.repeats):
            for way in list(WAYS) if repeat % 2 else reversed(list(WAYS)):
                runs[way].append(timed(model, way))
        lowest = min(loss for every in runs.values() for seen, *_ in every for _, loss in seen)
        near = {
            way: min(next(at for at, loss in seen if loss - lowest < NEAR) for seen, *_ in every)
            for way, every in runs.items()
        }
        cells = [f"{1e3 * near[way]:.0f} ({1e3 * min(run[1] for run in every):.0f})" for way, every in runs.items()]
        counts = ", ".join(str(runs[way][0][2]) for way in ("NewtonCG", "VN"))
        ratio = near["NewtonCG"] / near["VN"]
        print(f"| {name} | {counts} | {' | '.join(cells)} | {ratio:.2f} | {runs['rule'][0][3]} |", flush=True)


if __name__ == "__main__":
    main()
