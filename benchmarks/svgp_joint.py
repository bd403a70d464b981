"""Sparse GPs with their hyper-parameters on regression data: held-out score against time, beside GPyTorch's optimizers.

    TORCHNGVI_DATA=... python benchmarks/svgp_joint.py [--config FILE] [--out runs/svgp-joint] [--from-logs]

All methods share the model, the start, the order of the mini-batches and Adam at one rate for hyper-parameters and
inducing points; they differ in q.  NGD, its triangular form and Adam run at each of three rates of q, and the best by
its last held-out score, in hindsight, is shown with all of its curve; `train_svgp_in_batches` has none, and is called
"train_svgp" in logs and legends.  Time is the processor's, on one thread, without that of the scores; "refined" is
scored on a copy, with the time of `refine_svgp` added.
"""

import argparse
import copy
import math
import os
import time
import tomllib
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import gpytorch as gp

from torchngvi import NaturalGaussian
from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, refine_svgp, train_svgp_in_batches

v = gp.variational
QS = {
    "NGD": v.NaturalVariationalDistribution,
    "TrilNatural": v.TrilNaturalVariationalDistribution,
    "Adam": v.CholeskyVariationalDistribution,
}


class Model(gp.models.ApproximateGP):
    def __init__(self, q, Z):
        super().__init__(v.VariationalStrategy(self, Z, q))
        self.mean_module = gp.means.ConstantMean()
        self.covar_module = gp.kernels.ScaleKernel(gp.kernels.RBFKernel(ard_num_dims=Z.shape[-1]))
        self.covar_module.base_kernel.lengthscale = math.sqrt(Z.shape[-1])

    def forward(self, x):
        return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def load(name, split):
    folder = Path(os.environ["TORCHNGVI_DATA"]) / "gp_uci"
    rows = np.loadtxt(folder / f"{name}_data.csv.gz", delimiter=",")
    test = np.loadtxt(folder / f"{name}_test_mask.csv.gz", delimiter=",")[:, split].astype(bool)
    rows = (rows - rows[~test].mean(0)) / rows[~test].std(0)
    rows = torch.tensor(rows, dtype=torch.float64)
    return rows[~test, :-1], rows[~test, -1], rows[test, :-1], rows[test, -1]


def score(model, likelihood, x, y):
    """Negative log predictive density a row."""
    model.eval()
    likelihood.eval()
    with torch.no_grad():
        total = sum(
            -float(likelihood.log_marginal(b, model(a)).sum())
            for a, b in zip(x.split(2048), y.split(2048), strict=True)
        )
    model.train()
    likelihood.train()
    return total / len(y)


class Clock:
    """Processor time, stopped while scores are taken."""

    def __init__(self, seconds, points):
        self.marks = [seconds * (k + 1) / points for k in range(points)]
        self.start, self.paused = time.process_time(), 0.0

    def now(self):
        return time.process_time() - self.start - self.paused

    def due(self):
        return bool(self.marks) and self.now() >= self.marks[0]

    def pause(self, work):
        begin = time.process_time()
        result = work()
        self.paused += time.process_time() - begin
        return result


class TimeIsUpError(Exception):
    pass


def watched(x, y, batch, clock, take):
    """The mini-batches of one epoch after the other; `take` is called where a score is due."""

    class Loader:
        generator = torch.Generator().manual_seed(0)

        def __iter__(self):
            for rows in torch.randperm(len(y), generator=self.generator).split(batch):
                while clock.due():
                    at = clock.marks.pop(0)
                    clock.pause(lambda at=at: take(at))
                if not clock.marks:
                    raise TimeIsUpError
                yield x[rows], y[rows]

    return Loader()


def start(q, x, settings):
    torch.manual_seed(0)
    Z = x[torch.randperm(len(x))[: settings["inducing"]]].clone()
    return Model(q, Z).double().train(), gp.likelihoods.GaussianLikelihood().double().train()


def ours(name, x, y, x_test, y_test, settings, log):
    size = settings["inducing"]
    model, likelihood = start(NaturalGradientVariationalDistribution(size, posterior=NaturalGaussian), x, settings)
    adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=settings["hyper_rate"])
    clock = Clock(settings["seconds"], settings["points"])

    def take(at):
        model.variational_strategy._clear_cache()
        log.append((name, "train_svgp", 0.0, at, score(model, likelihood, x_test, y_test)))
        other, noise = copy.deepcopy((model, likelihood))
        begin = time.process_time()
        refine_svgp(other, noise, [(x, y)], progress=False)
        spent = time.process_time() - begin
        log.append((name, "train_svgp, refined", 0.0, at + spent, score(other, noise, x_test, y_test)))

    try:
        loader = watched(x, y, settings["batch"], clock, take)
        train_svgp_in_batches(model, likelihood, loader, len(y), adam, epochs=10**9, progress=False)
    except TimeIsUpError:
        pass


def theirs(model, likelihood, natural, data, settings, take):
    """GPyTorch's loop, Adam beside the optimizer `natural` of q, with take(seconds, score) where one is due."""
    x, y, x_test, y_test = data
    adam = torch.optim.Adam([*model.hyperparameters(), *likelihood.parameters()], lr=settings["hyper_rate"])
    mll = gp.mlls.VariationalELBO(likelihood, model, num_data=len(y))
    clock = Clock(settings["seconds"], settings["points"])
    loader = watched(x, y, settings["batch"], clock, lambda at: take(at, score(model, likelihood, x_test, y_test)))
    try:
        while True:
            for a, b in loader:
                adam.zero_grad()
                natural.zero_grad()
                (-mll(model(a), b)).backward()
                natural.step()
                adam.step()
    except TimeIsUpError:
        pass
    except Exception as error:  # a crash ends its curve
        print(f"  {type(natural).__name__} of q: {type(error).__name__} after {clock.now():.1f} s", flush=True)


def at_rate(name, method, rate, data, settings, log):
    model, likelihood = start(QS[method](settings["inducing"]), data[0], settings)
    of_q = list(model.variational_parameters())
    natural = torch.optim.Adam(of_q, rate) if method == "Adam" else gp.optim.NGD(of_q, len(data[1]), rate)
    theirs(model, likelihood, natural, data, settings, lambda at, nll: log.append((name, method, rate, at, nll)))


def run(settings):
    log = []
    for name in settings["data"]:
        data = load(name, settings["split"])
        ours(name, *data, settings, log)
        for method in QS:
            for rate in settings["rates"][method]:
                at_rate(name, method, rate, data, settings, log)
        print(f"{name} done", flush=True)
    return pd.DataFrame(log, columns=["data", "method", "rate", "seconds", "nll"])


def best(part):
    """The rate whose last score is lowest, by method."""
    last = part.sort_values("seconds").groupby(["method", "rate"]).tail(1)
    finite = last[np.isfinite(last["nll"])]
    return finite.loc[finite.groupby("method")["nll"].idxmin()].set_index("method")["rate"]


def show(log):
    print(f"{'data':<11}{'seconds':>8}  held-out nats a row, each at the best of its rates")
    for name, part in log.groupby("data", sort=False):
        rates = best(part)
        methods = list(rates.index)
        print(f"{'':<21}" + "".join(f"{m + (f' {rates[m]:g}' if rates[m] else ''):>22}" for m in methods))
        times = sorted(part[part["method"] == "NGD"]["seconds"].unique())
        for at in times[1::3]:
            cells = []
            for m in methods:
                curve = part[(part["method"] == m) & (part["rate"] == rates[m]) & (part["seconds"] <= at + 1e-6)]
                cells.append(f"{curve['nll'].iloc[-1]:>22.4f}" if len(curve) else f"{'-':>22}")
            print(f"{name:<11}{at:>8.1f}  " + "".join(cells))


def draw(log, path):
    names = list(dict.fromkeys(log["data"]))
    figure = Figure(figsize=(4.2 * len(names), 3.6), layout="constrained")
    colors = {"train_svgp": "#7fb0dd", "train_svgp, refined": "#1f5a94", "NGD": "#d1672b", "TrilNatural": "#3b8f5a",
              "Adam": "#8a4fa3"}  # fmt: skip
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        part = log[log["data"] == name]
        rates = best(part)
        for method, color in colors.items():
            if method in rates.index:
                curve = part[(part["method"] == method) & (part["rate"] == rates[method])]
                label = method + (f", rate {rates[method]:g}" if rates[method] else "")
                axes.plot(curve["seconds"], curve["nll"], color=color, linewidth=1.5, label=label)
        late = part[part["seconds"] > 0.12 * part["seconds"].max()]["nll"]
        axes.set(title=name, xlabel="processor seconds", ylim=(late.min() - 0.02, late.quantile(0.95)))
        axes.grid(color="#e3e6ea", linewidth=0.6)
        axes.legend(fontsize=7, frameon=False)
    figure.axes[0].set_ylabel("held-out nats a row")
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/svgp-joint.toml")
    parser.add_argument("--out", default="runs/svgp-joint")
    parser.add_argument("--from-logs", action="store_true", help="draw again from the log of an earlier run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(options.out)
    if options.from_logs:
        log = pd.read_csv(folder / "log.csv")
    else:
        log = run(tomllib.loads(Path(options.config).read_text()))
        folder.mkdir(parents=True, exist_ok=True)
        log.to_csv(folder / "log.csv", index=False)
    show(log)
    draw(log, folder / "svgp-joint.png")


if __name__ == "__main__":
    main()
