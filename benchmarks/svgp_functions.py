"""Several latent functions: `train_svgp` beside GPyTorch's NGD with Adam at equal processor time, held-out scores.

    TORCHNGVI_DATA=... python benchmarks/svgp_functions.py [--kinds tasks mixed softmax noise] [--splits 0]
        [--rows 2000] [--inducing 50] [--seconds 8] [--batch 512] [--rates 0.03 0.1] [--out runs/svgp-functions]

tasks: the target and the last three inputs as four tasks of the other inputs, each with a function of its own; mixed:
the same tasks as mixtures of three functions (LMC); softmax: ten classes, the tenths of the target, and digits by their
first ten principal components; noise: a function of the mean and one of the logarithm of the noise.

`train_svgp` begins from inducing points that it chooses, NGD (for q, at each of the rates, the best in hindsight) and
Adam (for the others, at 0.02) from random rows, with the same kernels.  The first ends by itself, or after the round in
which the seconds are over; the others have as many as it took, `refine_svgp` included.  Scores are negative log
predictive densities a row.  Each run is a line of OUT/log.jsonl, and a command makes only those that are missing.
"""

import argparse
import gzip
import json
import math
import os
import time
import warnings
from pathlib import Path

import torch
from svgp_hyperparameters import load

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import gpytorch as gp

from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, train_svgp

v = gp.variational
SETS = {
    "tasks": ("airfoil", "bike", "elevators"),
    "mixed": ("airfoil", "bike", "elevators"),
    "softmax": ("bike", "elevators", "digits"),
    "noise": ("airfoil", "bike", "elevators"),
}
FUNCTIONS = {"tasks": 4, "mixed": 3, "softmax": 10, "noise": 2}
TASKS, CLASSES, HYPER_RATE, DRAWS = 4, 10, 0.02, 400


class Model(gp.models.ApproximateGP):
    def __init__(self, q, Z, kind):
        functions = FUNCTIONS[kind]
        base, shape = v.VariationalStrategy(self, Z, q), torch.Size([functions])
        if kind == "mixed":
            super().__init__(v.LMCVariationalStrategy(base, TASKS, functions))
        else:
            super().__init__(v.IndependentMultitaskVariationalStrategy(base, functions))
        self.mean_module = gp.means.ConstantMean(batch_shape=shape)
        kernel = gp.kernels.RBFKernel(ard_num_dims=Z.shape[-1], batch_shape=shape)
        kernel.lengthscale = math.sqrt(Z.shape[-1])
        self.covar_module = gp.kernels.ScaleKernel(kernel, batch_shape=shape)

    def forward(self, x):
        return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Heteroskedastic(gp.likelihoods.Likelihood):
    def forward(self, f, *_, **__):
        return torch.distributions.Normal(f[..., 0], f[..., 1].exp())


def likelihood_of(kind):
    if kind == "softmax":
        return gp.likelihoods.SoftmaxLikelihood(num_classes=CLASSES, mixing_weights=False).double()
    return Heteroskedastic() if kind == "noise" else gp.likelihoods.MultitaskGaussianLikelihood(TASKS).double()


def digits(split, rows):
    """The first ten principal components of images, standardised."""
    folder = Path(os.environ["TORCHNGVI_DATA"]) / "mnist"
    with (
        gzip.open(folder / "t10k-images-idx3-ubyte.gz") as images,
        gzip.open(folder / "t10k-labels-idx1-ubyte.gz") as labels,
    ):
        X = torch.frombuffer(bytearray(images.read()[16:]), dtype=torch.uint8).reshape(-1, 784).double()
        y = torch.frombuffer(bytearray(labels.read()[8:]), dtype=torch.uint8).long()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(split))
    X, y = X[order] - X[order[:rows]].mean(0), y[order]
    parts = X @ torch.linalg.svd(X[:rows], full_matrices=False).Vh[:10].mT
    parts = parts / parts[:rows].std(0)
    return parts[:rows], y[:rows], parts[rows : rows + 2000], y[rows : rows + 2000]


def problem(kind, name, split, rows):
    """Training and test rows."""
    if name == "digits":
        return digits(split, rows)
    x, y, x_test, y_test = load(name, split, "gaussian", "float64")
    some = torch.randperm(len(y), generator=torch.Generator().manual_seed(split))[:rows]
    x, y = x[some], y[some]
    if kind in ("tasks", "mixed"):
        cut = x.shape[-1] + 1 - TASKS
        y, y_test = torch.column_stack([x[:, cut:], y]), torch.column_stack([x_test[:, cut:], y_test])
        x, x_test = x[:, :cut], x_test[:, :cut]
    if kind == "softmax":
        edges = torch.quantile(y, torch.linspace(0, 1, CLASSES + 1).double()[1:-1])
        y, y_test = torch.bucketize(y, edges), torch.bucketize(y_test, edges)
    return x, y, x_test, y_test


@torch.no_grad()
def score(model, likelihood, kind, x, y):
    model.eval()
    likelihood.eval()
    values = model(x)
    if kind in ("tasks", "mixed"):
        found = likelihood(values)
        log_density = torch.distributions.Normal(found.mean, found.variance.sqrt()).log_prob(y).sum(-1)
    else:
        z = torch.randn(DRAWS, *values.mean.shape, generator=torch.Generator().manual_seed(0)).double()
        draws = likelihood.forward(values.mean + values.variance.sqrt() * z).log_prob(y)
        log_density = draws.logsumexp(0) - math.log(DRAWS)
    model.train()
    likelihood.train()
    return -float(log_density.mean())


def ours(kind, data, options):
    x, y, x_test, y_test = data
    q = NaturalGradientVariationalDistribution(options.inducing, (FUNCTIONS[kind],))
    model, likelihood = Model(q, x.new_zeros(options.inducing, x.shape[-1]), kind).double(), likelihood_of(kind)
    begin = time.process_time()
    result = train_svgp(
        model,
        likelihood,
        (x, y),
        rounds=100,
        callbacks=[lambda *_: time.process_time() - begin > options.seconds],
        progress=False,
    )
    seconds = time.process_time() - begin
    found = {"rounds": len(result.losses), "loss": result.losses[-1], "converged": result.refined.converged}
    return {"seconds": seconds, "score": score(model, likelihood, kind, x_test, y_test), **found}


def theirs(kind, data, options, rate, seconds):
    x, y, x_test, y_test = data
    order = torch.Generator().manual_seed(0)
    Z = x[torch.randperm(len(x), generator=order)[: options.inducing]].clone()
    q = v.NaturalVariationalDistribution(options.inducing, batch_shape=torch.Size([FUNCTIONS[kind]]))
    model, likelihood = Model(q, Z, kind).double().train(), likelihood_of(kind).train()
    natural = gp.optim.NGD(model.variational_parameters(), len(x), rate)
    adam = torch.optim.Adam([*model.hyperparameters(), *likelihood.parameters()], lr=HYPER_RATE)
    mll, steps, begin = gp.mlls.VariationalELBO(likelihood, model, num_data=len(x)), 0, time.process_time()
    try:
        while True:
            for rows in torch.randperm(len(x), generator=order).split(options.batch):
                if time.process_time() - begin > seconds:
                    return {"steps": steps, "score": score(model, likelihood, kind, x_test, y_test)}
                adam.zero_grad()
                natural.zero_grad()
                (-mll(model(x[rows]), y[rows])).backward()
                natural.step()
                adam.step()
                steps += 1
    except Exception as error:  # a crash is its result
        return {"steps": steps, "score": math.inf, "error": type(error).__name__}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--splits", nargs="+", type=int, default=[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--inducing", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rates", nargs="+", type=float, default=[0.03, 0.1])
    parser.add_argument("--out", type=Path, default=Path("runs/svgp-functions"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "log.jsonl"
    same = [options.rows, options.inducing, options.seconds, options.batch]
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {tuple(line["cell"]): line for line in lines if line["options"] == same}
    print("| kind | set | split | rounds | seconds | train_svgp | NGD + Adam | steps |")
    for kind, split in ((kind, split) for split in options.splits for kind in options.kinds):
        for name in SETS[kind]:
            data = problem(kind, name, split, options.rows)
            own = None
            for method in ("train_svgp", *options.rates):
                cell = (kind, name, split, method)
                if cell not in done:
                    torch.manual_seed(0)
                    found = (
                        ours(kind, data, options)
                        if own is None
                        else theirs(kind, data, options, method, own["seconds"])
                    )
                    done[cell] = {"cell": cell, "options": same, **found}
                    with path.open("a") as file:
                        file.write(json.dumps(done[cell]) + "\n")
                own = own or done[cell]
            best = min((done[kind, name, split, rate] for rate in options.rates), key=lambda line: line["score"])
            print(
                f"| {kind} | {name} | {split} | {own['rounds']} | {own['seconds']:.1f} | {own['score']:.4f} | "
                f"{best['score']:.4f} | {best['steps']} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
