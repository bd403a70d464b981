"""`train_svgp` beside gradient boosting on twenty functions of what inputs do together, among inputs that do nothing.

    python benchmarks/svgp_interactions.py [--log FILE] [--seeds 0 1] [--only choose|judge] [--names ...]
        [--inducing 100]

Ten functions chose the starts of `train_svgp`, ten judge them.  Inputs are standard normal (uniform for Friedman's) and
standardised; the noise has a third to a tenth of the function's standard deviation.  The sparse GP has a Matérn 5/2
kernel with a length scale for each input, and 100 inducing points: with 60 the error on sign(x1 x2) is 1.2 times that
of boosting from any start.  Boosting is scikit-learn's `HistGradientBoostingRegressor` as it comes.  A line has the
root mean squared error of both against the function without its noise on 2,000 new rows, over the function's standard
deviation; what the result says; processor seconds.  A run that is in the log is not run again.
"""

import argparse
import json
import math
import pathlib
import time
import warnings

import torch
from sklearn.ensemble import HistGradientBoostingRegressor

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import gpytorch as gp

from torchngvi.adapters.gpytorch import train_svgp
from torchngvi.errors import TorchngviError

NEW = 2000  # rows that judge


def friedman1(x):
    return 10 * torch.sin(math.pi * x[0] * x[1]) + 20 * (x[2] - 0.5) ** 2 + 10 * x[3] + 5 * x[4]


def parts_of_friedman(x):
    """The resistance and the reactance of his circuit, from uniform inputs."""
    omega = 40 * math.pi + 520 * math.pi * x[1]
    return 100 * x[0], omega * x[2] - 1 / (omega * (1 + 10 * x[3]))


def friedman2(x):
    return torch.hypot(*parts_of_friedman(x))


def friedman3(x):
    resistance, reactance = parts_of_friedman(x)
    return torch.atan(reactance / resistance)


# name: (function of the columns, inputs, rows, signal over noise)
CHOOSE = {
    "x1 x2": (lambda x: x[0] * x[1], 20, 1000, 5),
    "x1 x2 of 50": (lambda x: x[0] * x[1], 50, 600, 5),
    "x1 x2 x3 of 20": (lambda x: x[0] * x[1] * x[2], 20, 1000, 5),
    "cos(6 x1)": (lambda x: torch.cos(6 * x[0]), 10, 700, 5),
    "cos(6 x1) + x2 of 50": (lambda x: torch.cos(6 * x[0]) + x[1], 50, 1000, 5),
    "x1 x2 + x3 x4": (lambda x: x[0] * x[1] + x[2] * x[3], 20, 1000, 10),
    "x1 x2 + x3 x4 + x5 x6": (lambda x: x[0] * x[1] + x[2] * x[3] + x[4] * x[5], 15, 1000, 10),
    "sign(x1 x2)": (lambda x: torch.sign(x[0] * x[1]), 10, 1000, 5),
    "sin(2 x1) sin(2 x2)": (lambda x: torch.sin(2 * x[0]) * torch.sin(2 * x[1]), 20, 1000, 5),
    "x1 + cos(4 x2) x3": (lambda x: x[0] + torch.cos(4 * x[1]) * x[2], 10, 1000, 5),
}
JUDGE = {
    "sin(x1) x2": (lambda x: torch.sin(x[0]) * x[1], 10, 500, 3),
    "x1 + x2 x3": (lambda x: x[0] + x[1] * x[2], 30, 800, 5),
    "friedman1": (friedman1, 10, 500, 5),
    "friedman2": (friedman2, 10, 500, 3),
    "friedman3": (friedman3, 10, 700, 5),
    "|x1 - x2| of 50": (lambda x: (x[0] - x[1]).abs(), 50, 500, 5),
    "sin(3 x1) x2 of 30": (lambda x: torch.sin(3 * x[0]) * x[1], 30, 1000, 5),
    "x1 x2 + x3 x4 x5": (lambda x: x[0] * x[1] + x[2] * x[3] * x[4], 15, 1000, 10),
    "x1 x2 x3 + x4 of 25": (lambda x: x[0] * x[1] * x[2] + x[3], 25, 1000, 5),
    "sin(8 x1) + x2 x3": (lambda x: torch.sin(8 * x[0]) + x[1] * x[2], 20, 1000, 5),
}
FUNCTIONS = CHOOSE | JUDGE


class Model(gp.models.ApproximateGP):
    """A Matérn kernel with a length scale for each input, and inducing points left open."""

    def __init__(self, size, features):
        q = gp.variational.CholeskyVariationalDistribution(size)
        super().__init__(gp.variational.VariationalStrategy(self, torch.zeros(size, features), q))
        self.mean_module = gp.means.ConstantMean()
        self.covar_module = gp.kernels.ScaleKernel(gp.kernels.MaternKernel(2.5, ard_num_dims=features))

    def forward(self, x):
        return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def data(name, seed):
    """Standardised inputs and targets to learn from, then new inputs with the function in the same units."""
    function, features, rows, ratio = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(1000 * seed + list(FUNCTIONS).index(name))
    draw = torch.rand if name.startswith("friedman") else torch.randn
    x = draw(rows + NEW, features, generator=generator, dtype=torch.float64)
    f = function(x.mT)
    y = f[:rows] + f.std() / ratio * torch.randn(rows, generator=generator, dtype=torch.float64)
    x = (x - x[:rows].mean(0)) / x[:rows].std(0)
    return x[:rows], (y - y.mean()) / y.std(), x[rows:], (f[rows:] - y.mean()) / y.std()


def run(name, seed, inducing):
    """A run of both on one function."""
    x, y, new, f = data(name, seed)
    boosting = HistGradientBoostingRegressor(random_state=0).fit(x.numpy(), y.numpy())
    error = torch.as_tensor(boosting.predict(new.numpy())) - f
    told = {"name": name, "seed": seed, "boosting": float(error.square().mean().sqrt() / f.std())}
    torch.manual_seed(0)
    model, likelihood = Model(inducing, x.shape[-1]).double(), gp.likelihoods.GaussianLikelihood().double()
    begin = time.process_time()
    try:
        result = train_svgp(model, likelihood, (x, y), progress=False)
    except TorchngviError as error:
        return told | {"rmse": math.inf, "found": type(error).__name__, "seconds": time.process_time() - begin}
    seconds = time.process_time() - begin
    with torch.no_grad():
        error = model.eval()(new).mean - f
    rmse, found = float(error.square().mean().sqrt() / f.std()), getattr(result, "found", "")
    ended = {"loss": result.losses[-1], "rounds": len(result.losses), "noise": float(likelihood.noise) ** 0.5}
    return told | {"rmse": rmse, "found": found, "seconds": seconds} | ended


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log", type=pathlib.Path, help="a file of lines of JSON, which is read first")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", choices=["choose", "judge"])
    parser.add_argument("--names", nargs="+", choices=list(FUNCTIONS))
    parser.add_argument("--inducing", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = options.names or {"choose": CHOOSE, "judge": JUDGE, None: FUNCTIONS}[options.only]
    kept = {}
    if options.log is not None and options.log.exists():
        rows = map(json.loads, options.log.read_text().splitlines())
        kept = {(row["name"], row["seed"], row["inducing"]): row for row in rows}
    print("| function | seed | rmse | boosting | ratio | found | seconds |\n|---|---|---|---|---|---|---|")
    ratios, constant = [], 0
    for name in names:
        for seed in options.seeds:
            row = kept.get((name, seed, options.inducing))
            if row is None:
                row = run(name, seed, options.inducing) | {"inducing": options.inducing}
                if options.log is not None:
                    with options.log.open("a") as file:
                        file.write(json.dumps(row) + "\n")
            ratios.append(row["rmse"] / row["boosting"])
            constant += row["found"] != "function"
            cells = (
                f"{row['rmse']:.3f} | {row['boosting']:.3f} | {ratios[-1]:.2f} | {row['found']} | {row['seconds']:.1f}"
            )
            print(f"| {name.replace('|', chr(92) + '|')} | {seed} | {cells} |", flush=True)
    met = sum(ratio <= 1.1 for ratio in ratios)
    print(f"\n{met} of {len(ratios)} within 10 % of boosting or better, {constant} without a function.")


if __name__ == "__main__":
    main()
