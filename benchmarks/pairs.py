"""Two checkouts side by side: the ratio of processor seconds of the same work, in interleaved pairs.

    python benchmarks/pairs.py --before CHECKOUT [--pairs 15] [--only NAME ...]

Each checkout runs in a process of its own on one thread, and the two take turns within a pair, the first of them by
turns.  A row is the median of the ratios after / before with its interval of 95 % from order statistics, so that a
machine that slows down for a while moves both sides of a pair and not the ratio.
"""

import argparse
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

    def fitted(target, posterior=CholeskyGaussian, batch=(), log_joint=False):
        def run():
            torch.manual_seed(0)
            q = posterior(X.shape[-1] if not batch else 5, batch, dtype=torch.float64)
            fit(q, target.log_joint if log_joint else target, progress=False)

        return run

    return {
        "VN, D = 31, lr, 300 steps": steps(VN, CholeskyGaussian, model, 300, lr=0.1),
        "VN, D = 256, lr, 10 steps": steps(VN, CholeskyGaussian, large, 10, lr=0.1),
        "VN by trial, D = 256, 10 steps": steps(VN, CholeskyGaussian, large, 10),
        "SRVN, mean field, lr, 300 steps": steps(SRVN, DiagonalGaussian, model, 300, lr=0.1),
        "VN, Stein, D = 31, 300 steps": steps(VN, CholeskyGaussian, model, 300, lr=0.01, estimator=Stein(10)),
        "fit, exact, D = 31": fitted(model),
        "fit, black box, D = 31": fitted(model, log_joint=True),
        "fit, 1,000 posteriors at once": fitted(many, batch=(1000,)),
        **gp(),
    }


def gp():
    """Steps of a sparse GP on batches."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import gpytorch
    import torch

    from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, train_svgp

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self, Z):
            q = NaturalGradientVariationalDistribution(len(Z))
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
        train_svgp(model, likelihood, batches, 4096, adam, epochs=2, progress=False)

    return {"train_svgp, 103 points, 32 batches": run}


def worker():
    """Reads names of work, writes seconds; the first run of each is not counted."""
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
        pieces[name]()
        print(json.dumps(time.process_time() - begin), flush=True)


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
        seconds = {side: [] for side in sides}
        for pair in range(options.pairs):
            for side in list(sides) if pair % 2 else reversed(list(sides)):
                seconds[side].append(asked(sides[side], name))
        ratios = [after / before for before, after in zip(seconds["before"], seconds["after"], strict=True)]
        low, high = interval(ratios)
        medians = "".join(f"{statistics.median(each):10.3f}" for each in seconds.values())
        print(f"{name:36s}{medians}{statistics.median(ratios):8.3f} [{low:.3f}, {high:.3f}]", flush=True)
    for process in sides.values():
        process.stdin.close()
        process.wait()
    return None


if __name__ == "__main__":
    main()
