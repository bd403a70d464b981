"""Two checkouts side by side: the ratio of processor seconds of the same work, in interleaved pairs.

    python benchmarks/pairs.py --before CHECKOUT [--pairs 15] [--only NAME ...]

Each checkout runs in a process of its own on one thread, and the two take turns within a pair, the first of them by
turns.  A row is the median of the ratios after / before with its interval of 95 % from order statistics, so that a
machine that slows down for a while moves both sides of a pair and not the ratio.

Beside steps and fits of its own it runs a small case of each of `step_cost`, `evaluations`, `black_box`, `batched` and
`svgp` as the checkout has them.  A fit of a log joint, which ends with a verdict where the checkout has verdicts, runs
with it and without it.  What such a case has counted, evaluations or gradients, stands at the end of its row,
for both checkouts where they differ.
"""

import argparse
import functools
import inspect
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]


def work():
    """The pieces of work by name, each a function without arguments; imported in the worker only."""
    import torch
    from sklearn.datasets import load_breast_cancer

    from torchngvi import SRVN, VN, CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, Stein, fit

    torch.set_num_threads(1)
    X, y = (torch.as_tensor(part, dtype=torch.float64) for part in load_breast_cancer(return_X_y=True))
    X = torch.cat([(X - X.mean(0)) / X.std(0), torch.ones(len(X), 1)], 1)
    model = GeneralizedLinear(X, y, prior_precision=0.1)
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(2000, 256, generator=generator, dtype=torch.float64) / 16
    large = GeneralizedLinear(wide, (wide.sum(1) > 0).double())
    rows = torch.randn(1000, 50, 5, generator=generator, dtype=torch.float64)
    many = GeneralizedLinear(rows, (rows.sum(-1) > 0).double())

    def steps(method, posterior, target, number, **options):
        def run():
            torch.manual_seed(0)
            q = posterior(target.X.shape[-1], dtype=torch.float64)
            opt = method(q, **options)
            for _ in range(number):
                opt.step(target)

        return run

    def fitted(target, posterior=CholeskyGaussian, batch=(), log_joint=False, fit=fit):
        def run():
            torch.manual_seed(0)
            q = posterior(X.shape[-1] if not batch else 5, batch, dtype=torch.float64)
            fit(q, target.log_joint if log_joint else target, progress=False)

        return run

    return {
        "VN, D = 31, lr, 300 steps": steps(VN, CholeskyGaussian, model, 300, lr=0.1),
        "VN by trial, D = 31, 100 steps": steps(VN, CholeskyGaussian, model, 100),
        "VN, D = 256, lr, 10 steps": steps(VN, CholeskyGaussian, large, 10, lr=0.1),
        "VN by trial, D = 256, 10 steps": steps(VN, CholeskyGaussian, large, 10),
        "SRVN, mean field, lr, 300 steps": steps(SRVN, DiagonalGaussian, model, 300, lr=0.1),
        "VN, Stein, D = 31, 300 steps": steps(VN, CholeskyGaussian, model, 300, lr=0.01, estimator=Stein(10)),
        "fit, exact, D = 31": fitted(model),
        "fit, black box, D = 31": fitted(model, log_joint=True),
        "fit, black box, unexamined": fitted(model, log_joint=True, fit=unexamined(fit)),
        "fit, 1,000 posteriors at once": fitted(many, batch=(1000,)),
        **gp(),
        **benchmarks(),
    }


def unexamined(fit):
    """The same fit without the verdict on q at its end, where the checkout has one."""
    return functools.partial(fit, examine=False) if "examine" in inspect.signature(fit).parameters else fit


def benchmarks():
    """A case of each of the five benchmarks, by the functions and in the interface of the checkout."""
    import torch

    import torchngvi
    from torchngvi import SRVN, VN, CholeskyGaussian, GeneralizedLinear, NaturalGaussian, fit
    from torchngvi.rules import NaturalGradient, VariationalNewton

    sys.path.insert(0, str(Path(torchngvi.__file__).parents[1] / "benchmarks"))
    import black_box
    import evaluations
    import gpytorch
    import step_cost
    import svgp

    torch.manual_seed(0)
    given = torchngvi.interfaces.Expectation(
        torch.zeros((), dtype=torch.float64), step_cost.packet(256), 1.0, True, torchngvi.interfaces.Cost(1, 1)
    )
    model = evaluations.breast_cancer()
    lowest = evaluations.minimum(model, CholeskyGaussian)
    X = torch.randn(300, 100, 10, dtype=torch.float64)
    several = GeneralizedLinear(X, (X.sum(-1) > 0).double(), prior_precision=1.0)
    x, Z = torch.rand(svgp.BATCH, 8).double(), torch.rand(128, 8).double()
    likelihood = gpytorch.likelihoods.BernoulliLikelihood().double()
    y = (torch.sin(3 * x.sum(-1)) > 0).double()

    def costs():
        for family, rule in (
            (NaturalGaussian, NaturalGradient()),
            (CholeskyGaussian, VariationalNewton()),
            (CholeskyGaussian, NaturalGradient()),
        ):
            run = step_cost.step(family(256, dtype=torch.float64), rule, given)
            for _ in range(5):
                run()

    def counts():
        pairs = ((VN, NaturalGaussian), (VN, CholeskyGaussian), (SRVN, CholeskyGaussian))
        return [evaluations.evaluations(model, *pair, 0.1**-0.5, 0.0, lowest)[0] for pair in pairs]

    def black(by):
        black_box.fit = by
        return [black_box.gap(model, lowest, 0, 600)[1]]

    def batched():
        q = CholeskyGaussian(10, (300,), dtype=torch.float64)
        return [fit(q, several, progress=False).evaluations]

    def sparse():
        for family in (CholeskyGaussian, NaturalGaussian):
            run = svgp.direct(family, Z, likelihood, x, y, 20000, True)
            for _ in range(5):
                run()

    return {
        "step_cost, D = 256": costs,
        "evaluations, breast cancer": counts,
        "black_box, 600 gradients": lambda: black(fit),
        "black_box, unexamined": lambda: black(unexamined(fit)),
        "batched, 300 members": batched,
        "svgp, M = 128": sparse,
    }


def gp():
    """Steps of a sparse GP on batches."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import gpytorch
    import torch

    from torchngvi.adapters import gpytorch as adapter

    train = getattr(adapter, "train_svgp_in_batches", adapter.train_svgp)  # of an earlier checkout

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self, Z):
            q = adapter.NaturalGradientVariationalDistribution(len(Z))
            super().__init__(gpytorch.variational.VariationalStrategy(self, Z, q))
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def run():
        torch.manual_seed(0)
        x = torch.linspace(-2, 2, 4096)[:, None]
        model, likelihood = Model(x[::40]), gpytorch.likelihoods.BernoulliLikelihood()
        adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.01)
        batches = list(zip(x.split(256), (torch.sin(3 * x[:, 0]) > 0).float().split(256), strict=True))
        train(model, likelihood, batches, 4096, adam, epochs=2, progress=False)

    return {"train_svgp, 103 points, 32 batches": run}


def worker():
    """Reads names of work, writes seconds and what the work has counted; the first run of each is not timed."""
    import time
    import warnings

    warnings.simplefilter("ignore")
    pieces, seen = work(), set()
    print(json.dumps(list(pieces)), flush=True)
    for line in sys.stdin:
        name = json.loads(line)
        if name not in seen:
            pieces[name]()
            seen.add(name)
        begin = time.process_time()
        counted = pieces[name]()
        print(json.dumps([time.process_time() - begin, counted]), flush=True)


def started(checkout):
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def asked(process, name):
    process.stdin.write(json.dumps(name) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def interval(ratios):
    """Of the median, 95 %: the order statistics n/2 -+ 0.98 sqrt(n)."""
    away = round(0.98 * len(ratios) ** 0.5)
    middle, ordered = len(ratios) // 2, sorted(ratios)
    return ordered[max(middle - away, 0)], ordered[min(middle + away, len(ratios) - 1)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout of the repository")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", nargs="+", default=(), help="beginnings of names")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker()
    if options.before is None:
        parser.error("--before names the checkout to compare with")
    sides = {"before": started(options.before.resolve()), "after": started(HERE)}
    names = [json.loads(process.stdout.readline()) for process in sides.values()][1]
    names = [name for name in names if name.startswith(tuple(options.only) or "")]
    print(f"{'':36s}{'before, s':>10s}{'after, s':>10s}{'after / before':>16s}")
    for name in names:
        seconds, counted = {side: [] for side in sides}, {}
        for pair in range(options.pairs):
            for side in list(sides) if pair % 2 else reversed(list(sides)):
                spent, counted[side] = asked(sides[side], name)
                seconds[side].append(spent)
        ratios = [after / before for before, after in zip(seconds["before"], seconds["after"], strict=True)]
        low, high = interval(ratios)
        medians = "".join(f"{statistics.median(each):10.3f}" for each in seconds.values())
        told = counted["before"] == counted["after"]
        words = (counted["after"] or "") if told else f"{counted['before']} before, {counted['after']} after"
        print(f"{name:36s}{medians}{statistics.median(ratios):8.3f} [{low:.3f}, {high:.3f}]  {words}", flush=True)
    for process in sides.values():
        process.stdin.close()
        process.wait()
    return None


if __name__ == "__main__":
    main()
