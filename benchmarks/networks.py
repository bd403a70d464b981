"""Posteriors over networks beside what people use: test NLL, accuracy, calibration error, seconds.

    python benchmarks/networks.py [--tasks digits mnist6k boston ...] [--seeds 0 1 2] [--log FILE]
    python benchmarks/networks.py --rates [--tasks digits] [--seeds 0 1]    # NLL by the learning rate, 1e-4 to 1e2

Every method but ours chooses among as many settings as it lists (`SETTINGS`) by the NLL of validation data, for each
seed anew; ours has one setting and what `calibrate` finds on the same validation data.  Where labels are numbers, the
noise that each method learned is multiplied by the factor from 1/4 to 8 that is best on validation data, for all
methods alike.  Nothing looks at test data before the end.  digits comes with scikit-learn; the other sets are read
from $TORCHNGVI_DATA.  ivon-opt, laplace-torch and vbll have their rows where they are installed.
"""

import argparse
import functools
import gzip
import json
import math
import os
import pathlib
import time

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import torchngvi
from torchngvi.networks import Gaussian

try:
    import ivon
except ImportError:
    ivon = None
try:
    import laplace
except ImportError:
    laplace = None

try:
    import vbll
except ImportError:
    vbll = None

DATA = pathlib.Path(os.environ.get("TORCHNGVI_DATA", "."))
SAMPLES = 32


class Task:
    """Arrays in three parts, a network, and a schedule."""

    def __init__(self, parts, make, steps, batch, numbers=False):
        (self.train, self.val, self.test), self.make, self.steps, self.batch = parts, make, steps, batch
        self.numbers = numbers  # whether labels are numbers with Gaussian noise


def parts_of(X, y, seed, sizes):
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    return [(X[i], y[i]) for i in order[: sum(sizes)].split(sizes)]


def mlp(inputs, hidden, outputs, dropout=0.0):
    layers = [nn.Linear(inputs, hidden), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.Dropout(dropout)] if dropout else []), nn.Linear(hidden, outputs))


def convnet(dropout=0.0):
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), *([nn.Dropout(dropout)] if dropout else []), nn.Linear(512, 10),
    )  # fmt: skip


def digits(seed, conv=False):
    X, y = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    X = X.float() / 16
    parts = parts_of(X.view(-1, 8, 8) if conv else X, y, seed, [1000, 300, 497])
    return Task(parts, (lambda d=0.0: convnet(d)) if conv else (lambda d=0.0: mlp(64, 100, 10, d)), 1000, 50)


def wide(dropout=0.0):
    """932,362 weights in three hidden layers."""
    drop = [nn.Dropout(dropout)] if dropout else []
    hidden = [layer for _ in range(2) for layer in (nn.Linear(512, 512), nn.ReLU(), *drop)]
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), *drop, *hidden, nn.Linear(512, 10))


def mnist(seed, n=6000, make=lambda d=0.0: mlp(784, 100, 10, d)):
    def read(name, header):
        with gzip.open(DATA / "mnist" / name) as file:
            return torch.as_tensor(np.frombuffer(file.read(), np.uint8)[header:].copy())

    X = read("train-images-idx3-ubyte.gz", 16).view(-1, 784).float() / 255
    y = read("train-labels-idx1-ubyte.gz", 8).long()
    Xt = read("t10k-images-idx3-ubyte.gz", 16).view(-1, 784).float() / 255
    parts = parts_of(X, y, seed, [n - n // 6, n // 6])
    steps = 1000 if n <= 6000 else 8000
    return Task([*parts, (Xt, read("t10k-labels-idx1-ubyte.gz", 8).long())], make, steps, 100)


def uci(name):
    def task(seed):
        z = np.load(DATA / "uci_regression" / f"{name}.npz")
        mask = np.unpackbits(z["test_mask"], axis=1)[seed, : len(z["y"])].astype(bool)
        X, y = torch.as_tensor(z["X"]).double(), torch.as_tensor(z["y"]).double()[:, None]
        mean, sd = X[~mask].mean(0), X[~mask].std(0)
        X = ((X - mean) / torch.where(sd > 0, sd, 1.0)).float()
        y = ((y - y[~mask].mean()) / y[~mask].std()).float()
        inner, n = (X[~mask], y[~mask]), int((~mask).sum())
        train, val = parts_of(*inner, seed, [n - n // 5, n // 5])
        return Task([train, val, (X[mask], y[mask])], lambda d=0.0: mlp(X.shape[1], 50, 1, d), 2000, 32, numbers=True)

    return task


TASKS = {
    "digits": digits,
    "digits, convnet": lambda seed: digits(seed, conv=True),
    "mnist6k": mnist,
    "mnist6k, wide": lambda seed: mnist(seed, make=wide),
    "mnist": lambda seed: mnist(seed, 60_000),
    **{name: uci(name) for name in ("boston", "energy", "wine_red", "power", "naval")},
}


class Learned(nn.Module):
    """A network, with the scale of its noise beside it for numbers."""

    def __init__(self, task, dropout=0.0):
        super().__init__()
        self.net = task.make(dropout)
        self.log_scale = nn.Parameter(torch.zeros(())) if task.numbers else None
        self.factor = 1.0  # of the noise, from validation data

    def loss(self, x, y):
        out = self.net(x)
        if self.log_scale is None:
            return F.cross_entropy(out, y)
        return (0.5 * ((y - out) / self.log_scale.exp()) ** 2 + self.log_scale).mean()

    def log_prob(self, outputs, y):
        """log of the mean likelihood over draws, outputs (S, n, ...)."""
        if self.log_scale is None:
            each = outputs.log_softmax(-1).gather(-1, y.expand(len(outputs), -1)[..., None])[..., 0]
        else:
            each = torch.distributions.Normal(outputs, self.factor * self.log_scale.exp()).log_prob(y)[..., 0]
        return each.logsumexp(0) - math.log(len(outputs))

    @torch.no_grad()
    def validated(self, outputs, y):
        """The NLL with the best factor of the noise, which is kept."""
        found = {}
        for factor in (1.0,) if self.log_scale is None else Gaussian.factors:
            self.factor = factor
            nll = -self.log_prob(outputs, y).mean().item()
            found[factor] = nll if math.isfinite(nll) else math.inf
        self.factor = min(found, key=found.get)
        return found[self.factor]


def run(task, optimizer, loss, seed, draws=None, warm=0.02):
    """The same loop for all methods: cosine to zero after a short warm-up."""
    X, y = task.train
    rise = max(1, int(warm * task.steps))
    scale = lambda t: min((t + 1) / rise, 0.5 * (1 + math.cos(math.pi * t / task.steps)))  # noqa: E731
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
    g = torch.Generator().manual_seed(seed)
    for t in range(task.steps):
        i = torch.randint(len(y), (task.batch,), generator=g)
        optimizer.zero_grad()
        if draws is None:
            loss(X[i], y[i]).backward()
        else:
            with draws():
                loss(X[i], y[i]).backward()
        optimizer.step()
        scheduler.step()
        yield t


def point(task, seed, lr, dropout=0.0):
    torch.manual_seed(seed)
    model = Learned(task, dropout)
    for _ in run(task, torch.optim.AdamW(model.parameters(), lr=lr), model.loss, seed):
        pass
    return model


@torch.no_grad()
def outputs_of(model, x, samples=1, dropout=False):
    model.train(dropout)
    return torch.stack([model.net(x) for _ in range(samples)])


def adamw(task, seed, lr):
    model = point(task, seed, lr)
    return model, lambda x: outputs_of(model, x)


def mc_dropout(task, seed, lr, rate):
    model = point(task, seed, lr, rate)
    return model, lambda x: outputs_of(model, x, SAMPLES, dropout=True)


def ensemble(task, seed, lr):
    models = [point(task, 100 * seed + k, lr) for k in range(5)]
    for model in models[1:]:
        if task.numbers:  # one noise for all members, the mean
            models[0].log_scale.data += (model.log_scale.data - models[0].log_scale.data) / len(models)
    return models[0], lambda x: torch.cat([outputs_of(model, x) for model in models])


def swag(task, seed, lr):
    """Diagonal SWAG: moments of the iterates over the last quarter at a constant rate (Maddox et al. 2019)."""
    torch.manual_seed(seed)
    model = Learned(task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    X, y = task.train
    g, first, second, n = torch.Generator().manual_seed(seed), 0.0, 0.0, 0
    for t in range(task.steps):
        i = torch.randint(len(y), (task.batch,), generator=g)
        optimizer.zero_grad()
        model.loss(X[i], y[i]).backward()
        optimizer.step()
        if t >= 0.75 * task.steps and t % 5 == 0:
            w = nn.utils.parameters_to_vector(model.net.parameters()).detach()
            first, second, n = first + w, second + w * w, n + 1
    mean = first / n
    sd = (second / n - mean**2).clamp_min(1e-12).sqrt()

    def predict(x):
        found = []
        with torch.no_grad():
            for _ in range(SAMPLES):
                nn.utils.vector_to_parameters(mean + sd / 2**0.5 * torch.randn_like(sd), model.net.parameters())
                found.append(model.net(x))
        return torch.stack(found)

    return model, predict


def published_ivon(task, seed, lr, h0):
    torch.manual_seed(seed)
    model = Learned(task)
    optimizer = ivon.IVON(model.parameters(), lr=lr, ess=len(task.train[1]), hess_init=h0)
    for _ in run(task, optimizer, model.loss, seed, draws=lambda: optimizer.sampled_params(train=True)):
        pass

    def predict(x):
        found = []
        with torch.no_grad():
            for _ in range(SAMPLES):
                with optimizer.sampled_params():
                    found.append(model.net(x))
        return torch.stack(found)

    return model, predict


def reference_laplace(task, seed, lr, prior="validation", structure="kron", part="last_layer"):
    """laplace-torch on AdamW's network, linearised; the prior by marginal likelihood or by validation data."""
    model = point(task, seed, lr)
    data = torch.utils.data.TensorDataset(*task.train)
    kind = "regression" if task.numbers else "classification"
    found = laplace.Laplace(model.net.eval(), kind, subset_of_weights=part, hessian_structure=structure)
    found.fit(torch.utils.data.DataLoader(data, 500))
    if task.numbers:
        found.sigma_noise = model.log_scale.exp().detach()

    def predict(x):
        torch.manual_seed(seed)
        return torch.cat([found.functional_samples(part, n_samples=SAMPLES) for part in x.split(500)], 1)

    if prior == "marglik":
        found.optimize_prior_precision(method="marglik")
    else:
        tried = {}
        for k in range(-4, 11):
            found.prior_precision = 10.0 ** (k / 2)
            tried[k] = model.validated(predict(task.val[0]), task.val[1])
        found.prior_precision = 10.0 ** (min(tried, key=tried.get) / 2)
    return model, predict


def post_hoc(task, seed, lr, last=False, structure="diagonal"):
    """The Laplace approximation of this library at AdamW's network, its temperature on validation data."""
    model = point(task, seed, lr)
    model.eval()
    if last:
        structure = {f"{len(model.net) - 1}.*": "dense" if model.net[-1].weight.numel() < 2000 else "rows"}
    likelihood = Gaussian(model.log_scale.exp().item()) if task.numbers else "categorical"
    q = torchngvi.network(model.net, len(task.train[1]), structure, likelihood=likelihood, seed=seed)
    X, y = task.train
    q.laplace(list(zip(X.split(100), y.split(100), strict=True)), labels=None if len(y) < 10_000 else 10)
    torchngvi.calibrate(q, [task.val], samples=SAMPLES)
    return model, lambda x: torchngvi.networks.outputs(q, x, SAMPLES)


def last_layer_vbll(task, seed, lr):
    """VBLL (Harrison et al. 2024): the last layer by a deterministic bound, the rest by AdamW; diagonal for classes."""
    torch.manual_seed(seed)
    model = Learned(task)
    body, last = model.net[:-1], model.net[-1]
    if task.numbers:
        head = vbll.Regression(last.in_features, 1, 1 / len(task.train[1]), wishart_scale=0.1)
    else:
        head = vbll.DiscClassification(last.in_features, last.out_features, 1 / len(task.train[1]), "diagonal")
    groups = [{"params": body.parameters()}, {"params": head.parameters(), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    for _ in run(task, optimizer, lambda x, y: head(body(x)).train_loss_fn(y), seed):
        pass
    if task.numbers:
        model.log_scale.data = head.noise().scale.detach().log()

    @torch.no_grad()
    def predict(x):
        logits = head.predictive(body(x)) if task.numbers else head.logit_predictive(body(x))
        variance = logits.scale.square() - (head.noise().scale.square() if task.numbers else 0.0)
        return logits.mean + variance.clamp_min(0).sqrt() * torch.randn(SAMPLES, *logits.mean.shape)

    return model, predict


INNER = {  # what moves the mean; the rate is 1 for all
    "AdamW": torch.optim.AdamW,
    "SGD": functools.partial(torch.optim.SGD, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
    "NAdam": torch.optim.NAdam,
}


def ours(task, seed, structure="diagonal", lr=1.0, length=1.0, steps=None, radius=None, inner="AdamW", **keywords):
    torch.manual_seed(seed)
    model = Learned(task)
    likelihood = Gaussian(lambda: model.log_scale.exp()) if task.numbers else "categorical"
    q = torchngvi.network(model.net, len(task.train[1]), structure, likelihood=likelihood, seed=seed, **keywords)
    weights = [{"params": list(model.net.parameters()), "lr": lr}]
    if task.numbers:
        weights.append({"params": [model.log_scale], "lr": 1e-2})
    optimizer = INNER[inner](weights, weight_decay=0.0)
    task = (
        task if steps is None else Task((task.train, task.val, task.test), task.make, steps, task.batch, task.numbers)
    )
    torchngvi.attach(optimizer, q, steps=task.steps, radius=radius).radius *= length
    for _ in run(task, optimizer, model.loss, seed):
        pass
    model.eval()
    torchngvi.calibrate(q, [task.val], samples=SAMPLES)
    return model, lambda x: torchngvi.networks.outputs(q, x, SAMPLES)


def by_trials(task, seed):
    """The radius by three trials of a quarter of the steps each, on the same validation data."""

    def train(steps, radius):
        model, predict = ours(task, seed, steps=steps, radius=radius)
        return model.validated(predict(task.val[0]), task.val[1])

    return ours(task, seed, radius=torchngvi.networks.choose_radius(train, task.steps).radius)


RATES = (1e-3, 3e-3, 1e-2, 3e-2)
PEERS = {
    "laplace-torch": (reference_laplace, [{"lr": lr} for lr in RATES]),
    "laplace-torch, marglik": (reference_laplace, [{"lr": lr, "prior": "marglik"} for lr in RATES]),
    "laplace-torch, diagonal": (reference_laplace, [{"lr": lr, "structure": "diag", "part": "all"} for lr in RATES]),
}
SETTINGS = {
    "AdamW": (adamw, [{"lr": lr} for lr in RATES]),
    "MC dropout": (mc_dropout, [{"lr": lr, "rate": p} for lr in (3e-3, 1e-2) for p in (0.1, 0.3)]),
    "SWAG (diagonal)": (swag, [{"lr": lr} for lr in RATES]),
    **({"ivon-opt": (published_ivon, [{"lr": lr, "h0": h} for lr in (0.1, 0.5) for h in (0.1, 1.0)])} if ivon else {}),
    **(PEERS if laplace else {}),
    **({"vbll": (last_layer_vbll, [{"lr": lr} for lr in RATES])} if vbll else {}),
    "ensemble of 5": (ensemble, [{"lr": lr} for lr in (3e-3, 1e-2)]),
    "laplace, diagonal": (post_hoc, [{"lr": lr} for lr in RATES]),
    "laplace, Kronecker": (post_hoc, [{"lr": lr, "structure": "kronecker"} for lr in RATES]),
    "laplace, last layer": (post_hoc, [{"lr": lr, "last": True} for lr in RATES]),
    "attach": (ours, [{}]),
    **{f"attach, {inner}": (ours, [{"inner": inner}]) for inner in INNER if inner != "AdamW"},
    "attach, without noise": (ours, [{"temperature": 0.0}]),
    "attach, radius by trials": (by_trials, [{}]),
    "attach, Kronecker": (ours, [{"structure": "kronecker"}]),
    "attach, best of four radii": (ours, [{"length": f} for f in (3.0, 1.0, 0.3, 0.1)]),
    "attach, best of four": (
        ours,
        [{"structure": s, "temperature": t} for s in ("diagonal", "kronecker") for t in (0.05, 0.5)],
    ),
}


def figures(task, model, outputs, y):
    """NLL, and accuracy with expected calibration error (15 bins) or root mean squared error."""
    with torch.no_grad():
        nll = -model.log_prob(outputs, y).mean().item()
        if task.numbers:
            return {"nll": nll, "rmse": (outputs.mean(0) - y).square().mean().sqrt().item()}
        p, label = outputs.softmax(-1).mean(0).max(-1)
        right = (label == y).float()
        bins = (p * 15).long().clamp_max(14)
        gaps = [
            (right[bins == b].mean() - p[bins == b].mean()).abs() * (bins == b).float().mean() for b in bins.unique()
        ]
        return {"nll": nll, "accuracy": 100 * right.mean().item(), "ece": 100 * sum(gaps).item()}


def by_rate(names, seeds):
    """Print the test NLL by the learning rate, no setting chosen but ours calibrated, and the decades within 1.5."""
    rates = [10.0 ** (k / 2) for k in range(-8, 5)]
    methods = {"attach": (ours, {}), "AdamW": (adamw, {})}
    if ivon:
        methods["ivon-opt"] = (published_ivon, {"h0": 0.1})
    for name in names:
        tasks, rows = [TASKS[name](seed) for seed in seeds], {}
        for method, (fit, keywords) in methods.items():
            rows[method] = []
            for lr in rates:
                found = []
                for task, seed in zip(tasks, seeds, strict=True):
                    model, predict = fit(task, seed, lr=lr, **keywords)
                    model.validated(predict(task.val[0]), task.val[1])
                    found.append(figures(task, model, predict(task.test[0]), task.test[1])["nll"])
                nll = sum(found) / len(found)
                rows[method].append(nll if math.isfinite(nll) else math.inf)
        for method, row in rows.items():
            within = [nll < 1.5 * min(row) for nll in row]
            longest = max(len(run) for run in "".join(".x"[w] for w in within).split("."))
            print(f"{name:16s} {method:10s}", " ".join(f"{nll:.3f}" for nll in row), f"  {(longest - 1) / 2:g} decades")


def table(options):
    """Print a row a task and method, the mean over seeds; each seed has its line in the log."""
    for name in options.tasks:
        for method in options.methods:
            fit, settings = SETTINGS[method]
            found = []
            for seed in options.seeds:
                task, start = TASKS[name](seed), time.process_time()
                tried = []
                for setting in settings:
                    model, predict = fit(task, seed, **setting)
                    nll = model.validated(predict(task.val[0]), task.val[1])
                    tried.append((nll, len(tried), model, predict))
                best = min(tried)
                row = figures(task, *best[2:3], best[3](task.test[0]), task.test[1])
                row |= {"task": name, "method": method, "seed": seed, "setting": settings[best[1]]}
                found.append(row | {"seconds": time.process_time() - start})
                if options.log:
                    with options.log.open("a") as file:
                        file.write(json.dumps(found[-1]) + "\n")
            mean = {k: sum(r[k] for r in found) / len(found) for k in found[0] if isinstance(found[0][k], float)}
            print(f"{name:16s} {method:18s}", "  ".join(f"{k} {v:.4g}" for k, v in mean.items()), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["digits"], choices=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--log", type=pathlib.Path)
    parser.add_argument("--rates", action="store_true", help="NLL by the learning rate instead")
    options = parser.parse_args()
    by_rate(options.tasks, options.seeds) if options.rates else table(options)


if __name__ == "__main__":
    main()
