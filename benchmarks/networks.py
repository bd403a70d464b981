"""Posteriors over networks beside what people use: NLL, accuracy or RMSE, calibration, dead units, seconds.

    python benchmarks/networks.py [--tasks digits boston ...] [--methods AdamW ...] [--seeds 0 1 2] [--log FILE]
    python benchmarks/networks.py --generated     # ten sets that are generated, on which nothing was chosen
    python benchmarks/networks.py --rates         # the three lines of the README by the user's optimizer and rate
    python benchmarks/networks.py --table         # what the log has, without a training

Every training is one line in the log: a task, a method, one of its settings, a seed.  A second run skips what is there,
and the tables are computed from the log.  Each method chooses among its settings (four, where it has any) by the NLL of
validation data, for each seed; `attach` has one setting and what `calibrate` finds on the same validation data, and its
loop has no schedule.  Where labels are numbers, the noise that a method learned is multiplied by the factor from 1/4 to
64 that is best on validation data, for all methods alike.  Test data choose nothing.

nll, rmse        of the predictions, the mean over draws; labels that are numbers are standardised
ece, coverage    calibration error of classes (15 bins, %), share of numbers between the quantiles .025 and .975 of the
                 predictive mixture of Gaussians (%)
dead             share of ReLU units (channels) with output 0 on all training data, at the mean weights (%)
mean             nll of the mean weights alone, with their own best factor of the noise
seconds          of the processor, for all settings together

`digits` and `diabetes` come with scikit-learn; the other sets are read from $TORCHNGVI_DATA.  ivon-opt and
laplace-torch have their rows where they are installed.
"""

import argparse
import contextlib
import copy
import functools
import gzip
import importlib.util
import itertools
import json
import math
import os
import pathlib
import time

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes, load_digits, make_friedman1
from torch import nn

import torchngvi
from torchngvi.networks import Gaussian

ivon, laplace = (
    importlib.import_module(name) if importlib.util.find_spec(name) else None for name in ("ivon", "laplace")
)
DATA = pathlib.Path(os.environ.get("TORCHNGVI_DATA", "."))
SAMPLES = 32


class Task:
    """Arrays in three parts, a network, and the length of the training."""

    def __init__(self, parts, make, steps, batch, numbers=False):
        (self.train, self.val, self.test), self.make, self.steps, self.batch = parts, make, steps, batch
        self.numbers = numbers  # whether labels are numbers, with Gaussian noise
        self.trained, self.reused = {}, 0.0  # networks of AdamW, and the seconds of those that were used again


def parts_of(X, y, seed, sizes):
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    return [(X[i], y[i]) for i in order[: sum(sizes)].split(sizes)]


def mlp(inputs, hidden, outputs, dropout=0.0, norm=False):
    layers = []
    for before, after in itertools.pairwise([inputs, *hidden]):
        layers += [nn.Linear(before, after), *([nn.LayerNorm(after)] if norm else []), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(hidden[-1], outputs))


def convnet(side, pool, dropout=0.0):
    """Two convolutions of 3 x 3 with 16 and 32 channels, and 512 features after the pooling."""
    return nn.Sequential(
        nn.Unflatten(1, (1, side)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        *([nn.MaxPool2d(2)] if side > 8 else []), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(pool), nn.Flatten(), *([nn.Dropout(dropout)] if dropout else []), nn.Linear(512, 10),
    )  # fmt: skip


def digits(seed, conv=False):
    X, y = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    X = X.float() / 16
    parts = parts_of(X.view(-1, 8, 8) if conv else X, y, seed, [1000, 300, 497])
    make = functools.partial(convnet, 8, 2) if conv else functools.partial(mlp, 64, [100], 10)
    return Task(parts, make, 1000, 50)


def mnist(seed, n=6000, hidden=(100,)):
    def read(name, header):
        with gzip.open(DATA / "mnist" / name) as file:
            return torch.as_tensor(np.frombuffer(file.read(), np.uint8)[header:].copy())

    shape = (-1, 784) if hidden else (-1, 28, 28)
    make = functools.partial(mlp, 784, hidden, 10) if hidden else functools.partial(convnet, 28, 3)
    X = read("train-images-idx3-ubyte.gz", 16).view(shape).float() / 255
    Xt = read("t10k-images-idx3-ubyte.gz", 16).view(shape).float() / 255
    parts = parts_of(X, read("train-labels-idx1-ubyte.gz", 8).long(), seed, [n - n // 6, n // 6])
    steps = 1000 if n <= 6000 else 2000
    return Task([*parts, (Xt, read("t10k-labels-idx1-ubyte.gz", 8).long())], make, steps, 100)


def read_numbers(name, seed):
    """Inputs, labels that are numbers, and the mask of the test data."""
    if name == "diabetes":
        X, y = load_diabetes(return_X_y=True)
        return X, y, np.random.default_rng(seed).permutation(len(y)) < len(y) // 5
    if (DATA / "gp_uci" / f"{name}_data.csv.gz").is_file():
        table = np.loadtxt(DATA / "gp_uci" / f"{name}_data.csv.gz", delimiter=",")
        mask = np.loadtxt(DATA / "gp_uci" / f"{name}_test_mask.csv.gz", delimiter=",")[:, seed]
        return table[:, :-1], table[:, -1], mask.astype(bool)
    z = np.load(DATA / "uci_regression" / f"{name}.npz")
    return z["X"], z["y"], np.unpackbits(z["test_mask"], axis=1)[seed, : len(z["y"])].astype(bool)


def regression(name, seed, hidden=(50,), norm=False):
    """Inputs and labels in units of the standard deviations of what is not test data, a fifth of it for validation."""
    X, y, mask = read_numbers(name, seed)
    X, y = torch.as_tensor(X).double(), torch.as_tensor(y).double()[:, None]
    mean, sd = X[~mask].mean(0), X[~mask].std(0)
    X = ((X - mean) / torch.where(sd > 0, sd, 1.0)).float()
    y = ((y - y[~mask].mean()) / y[~mask].std()).float()
    n = int((~mask).sum())
    train, val = parts_of(X[~mask], y[~mask], seed, [n - n // 5, n // 5])
    make = functools.partial(mlp, X.shape[1], hidden, 1, norm=norm)
    return Task([train, val, (X[mask], y[mask])], make, 2000, 32, numbers=True)


def generate(kind, g, n):
    """Rows of inputs and labels of a kind; no choice of the library or of this file was made by them."""
    match kind:
        case "sines":
            X = g.uniform(-2, 2, (n, 4))
            return X, np.sin(X @ g.normal(0, 1.5, (4, 6)) + g.uniform(0, 6, 6)).sum(1) + g.normal(0, 0.2, n)
        case "friedman":
            return make_friedman1(n, noise=1.0, random_state=int(g.integers(1 << 30)))
        case "uneven noise":
            X = g.normal(0, 1, (n, 5))
            return X, np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + (0.1 + 0.5 * np.abs(X[:, 3])) * g.normal(0, 1, n)
        case "jumps":
            X = g.uniform(-1, 1, (n, 3))
            return X, np.sign(X @ g.normal(0, 1, (3, 5)) + g.uniform(-0.5, 0.5, 5)).sum(1) + g.normal(0, 0.2, n)
        case "sparse":
            X = g.normal(0, 1, (n, 100))
            return X, X[:, :5] @ g.normal(0, 1, 5) + g.normal(0, 1, n)
        case "heavy tails":
            X = g.normal(0, 1, (n, 6))
            return X, np.tanh(X[:, 0] + X[:, 1]) + 0.5 * X[:, 2] ** 2 + 0.3 * g.standard_t(2.5, n)
        case "parity":
            X = g.normal(0, 1, (n, 8))
            return X, ((X[:, :3] > 0).sum(1) % 2) ^ (g.uniform(size=n) < 0.05).astype(int)
        case "spirals":
            turn, y = 3 * np.pi * g.uniform(0.04, 1, n) ** 0.5, g.integers(0, 2, n)
            X = turn[:, None] * np.stack([np.cos(turn + np.pi * y), np.sin(turn + np.pi * y)], 1)
            return X + g.normal(0, 0.5, (n, 2)), y
        case "mixture":
            y, means = g.integers(0, 20, n), g.normal(0, 1.5, (20, 8))
            return means[y] + g.normal(0, 1, (n, 8)), y
        case "imbalanced":
            y, means = g.choice(3, n, p=[0.9, 0.08, 0.02]), g.normal(0, 0.4, (3, 10))
            return means[y] + g.normal(0, 1, (n, 10)) * np.array([1.0, 0.7, 0.5])[y, None], y


def generated(kind, seed):
    """1,000 rows for the training, 200 for validation and 1,000 to test."""
    X, y = generate(kind, np.random.default_rng(seed), 2200)
    X, classes = torch.as_tensor((X - X[:1000].mean(0)) / X[:1000].std(0)).float(), y.dtype.kind == "i"
    y = torch.as_tensor(y if classes else ((y - y[:1000].mean()) / y[:1000].std())[:, None])
    y = y.long() if classes else y.float()
    make = functools.partial(mlp, X.shape[1], [50], int(y.max()) + 1 if classes else 1)
    parts = zip(X.split([1000, 200, 1000]), y.split([1000, 200, 1000]), strict=True)
    return Task(parts, make, 1000, 32, numbers=not classes)


UCI = ("boston", "energy", "wine_red", "power", "naval", "bike", "elevators")
KINDS = ("sines", "friedman", "uneven noise", "jumps", "sparse", "heavy tails")  # of numbers
KINDS = (*KINDS, "parity", "spirals", "mixture", "imbalanced")  # and of classes
DEPTHS = {"two layers": {"hidden": (50, 50)}, "three layers": {"hidden": (50, 50, 50)}}
DEPTHS["LayerNorm"] = {"hidden": (50, 50), "norm": True}
TEN = {
    "digits": digits,
    **{name: functools.partial(regression, name) for name in UCI},
    "mnist6k": mnist,
    "digits, convnet": functools.partial(digits, conv=True),
}
GENERATED = {f"generated, {kind}": functools.partial(generated, kind) for kind in KINDS}
TASKS = {
    **TEN,
    "diabetes": functools.partial(regression, "diabetes"),
    **{f"{n}, {depth}": functools.partial(regression, n, **DEPTHS[depth]) for depth in DEPTHS for n in UCI[3:5]},
    "mnist6k, wide": functools.partial(mnist, hidden=(512, 512, 512)),
    "mnist": functools.partial(mnist, n=60_000, hidden=()),
    **GENERATED,
}
SHORT = {"mnist": slice(1, 3)}  # one split, and of four settings the two in the middle
load = functools.lru_cache(1)(lambda name, seed: TASKS[name](seed))


class Learned(nn.Module):
    """A network, with the scale of its noise where labels are numbers.

    A method returns one that holds its mean weights, and a function from inputs to draws of the outputs.
    """

    def __init__(self, task, dropout=0.0):
        super().__init__()
        self.net = task.make(dropout=dropout)
        self.log_scale = nn.Parameter(torch.zeros(())) if task.numbers else None
        self.factor = 1.0  # of the noise, from validation data
        self.notes = {}  # what else goes into the log

    def loss(self, x, y):
        out = self.net(x)
        if self.log_scale is None:
            return F.cross_entropy(out, y)
        return (0.5 * ((y - out) / self.log_scale.exp()) ** 2 + self.log_scale).mean()

    def noise(self, outputs):
        """The labels given each draw of the outputs, numbers."""
        return torch.distributions.Normal(outputs, self.factor * self.log_scale.exp(), validate_args=False)

    def log_prob(self, outputs, y):
        """log of the mean likelihood over draws, outputs (S, n, ...)."""
        if self.log_scale is None:
            each = outputs.log_softmax(-1).gather(-1, y.expand(len(outputs), -1)[..., None])[..., 0]
        else:
            each = self.noise(outputs).log_prob(y)[..., 0]
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

    @torch.no_grad()
    def outputs(self, x, samples=1, dropout=False):
        self.net.train(dropout)
        return torch.stack([self.net(x) for _ in range(samples)])


def run(task, optimizer, loss, seed, warm=0.02, draws=contextlib.nullcontext):
    """The same loop for all methods: a cosine to zero after a warm-up, or constant rates where that is None."""
    X, y = task.train
    batches = torch.randint(len(y), (task.steps, task.batch), generator=torch.Generator().manual_seed(seed))
    rates = [group["lr"] for group in optimizer.param_groups]
    for t, i in enumerate(batches):
        if warm is not None:
            share = min((t + 1) / max(1, warm * task.steps), 0.5 * (1 + math.cos(math.pi * t / task.steps)))
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = share * rate
        optimizer.zero_grad()
        with draws():
            loss(X[i], y[i]).backward()
        optimizer.step()
        yield t


def point(task, seed, lr, dropout=0.0):
    """A network by AdamW, of which one with the same settings is not trained twice."""
    if (seed, lr, dropout) in task.trained:
        model, seconds = task.trained[seed, lr, dropout]
        task.reused += seconds
        return copy.deepcopy(model)
    start = time.process_time()
    torch.manual_seed(seed)
    model = Learned(task, dropout)
    for _ in run(task, torch.optim.AdamW(model.parameters(), lr=lr, fused=True), model.loss, seed):
        pass
    task.trained[seed, lr, dropout] = copy.deepcopy(model), time.process_time() - start
    return model


def by_draws(model, draw):
    """Predictions by draws of the weights, each held by a context."""

    def predict(x):
        found = []
        for _ in range(SAMPLES):
            with draw():
                found.append(model.outputs(x))
        return torch.cat(found)

    return predict


def adamw(task, seed, lr, rate=0.0):
    """AdamW, with draws of the dropout in predictions where there is a rate of it."""
    model = point(task, seed, lr, rate)
    return model, functools.partial(model.outputs, samples=SAMPLES, dropout=True) if rate else model.outputs


def ensemble(task, seed, lr):
    models = [point(task, 100 * seed + k, lr) for k in range(5)]
    if task.numbers:  # one noise for all members, the mean
        models[0].log_scale.data = torch.stack([model.log_scale.data for model in models]).mean()
    return models[0], lambda x: torch.cat([model.outputs(x) for model in models])


def swag(task, seed, lr):
    """Diagonal SWAG: moments of the iterates over the last quarter at a constant rate (Maddox et al. 2019)."""
    torch.manual_seed(seed)
    model, first, second, n = Learned(task), 0.0, 0.0, 0
    optimizer, weights = torch.optim.AdamW(model.parameters(), lr=lr, fused=True), list(model.net.parameters())
    for t in run(task, optimizer, model.loss, seed, warm=None):
        if t >= 0.75 * task.steps and t % 5 == 0:
            w = nn.utils.parameters_to_vector(weights).detach()
            first, second, n = first + w, second + w * w, n + 1
    mean = first / n
    sd = (second / n - mean**2).clamp_min(1e-12).sqrt()
    nn.utils.vector_to_parameters(mean, weights)

    @contextlib.contextmanager
    def draw():
        nn.utils.vector_to_parameters(mean + sd / 2**0.5 * torch.randn_like(sd), weights)
        yield
        nn.utils.vector_to_parameters(mean, weights)

    return model, by_draws(model, draw)


def published_ivon(task, seed, lr, h0):
    torch.manual_seed(seed)
    model = Learned(task)
    optimizer = ivon.IVON(model.parameters(), lr=lr, ess=len(task.train[1]), hess_init=h0)
    for _ in run(task, optimizer, model.loss, seed, draws=lambda: optimizer.sampled_params(train=True)):
        pass
    return model, by_draws(model, optimizer.sampled_params)


def reference_laplace(task, seed, lr):
    """laplace-torch at AdamW's network, its last layer linearised, the precision of the prior by validation data."""
    model = point(task, seed, lr)
    found = laplace.Laplace(model.net.eval(), "regression" if task.numbers else "classification")
    found.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*task.train), 500))
    if task.numbers:
        found.sigma_noise = model.log_scale.exp().detach()

    def predict(x):
        torch.manual_seed(seed)
        return torch.cat([found.functional_samples(part, n_samples=SAMPLES) for part in x.split(500)], 1)

    def nll(k):
        found.prior_precision = 10.0 ** (k / 2)
        return model.validated(predict(task.val[0]), task.val[1])

    nll(min(range(-4, 11), key=nll))
    return model, predict


def calibrated(task, model, q):
    """The network in evaluation, and the predictions of a posterior of this library after `calibrate`."""
    model.eval()
    model.notes = {"temperature": torchngvi.calibrate(q, [task.val], samples=SAMPLES).temperature}
    return model, lambda x: q.outputs(x, SAMPLES)


def post_hoc(task, seed, lr, structure):
    """The Laplace approximation of this library at AdamW's network."""
    model = point(task, seed, lr)
    if structure == "last layer":
        structure = {f"{len(model.net) - 1}.*": "dense" if model.net[-1].weight.numel() < 2000 else "rows"}
    likelihood = Gaussian(model.log_scale.exp().item()) if task.numbers else "categorical"
    q = torchngvi.network(model.net.eval(), len(task.train[1]), structure, likelihood=likelihood, seed=seed)
    X, y = task.train
    labels = None if task.numbers or len(y) * sum(p.numel() for p in model.net.parameters()) < 2e8 else 10
    q.laplace(list(zip(X.split(100), y.split(100), strict=True)), labels=labels)
    return calibrated(task, model, q)


def ours(task, seed, structure="diagonal", lr=1.0, inner="AdamW", cosine=False, **keywords):
    """The three lines of the README, on a loop without a schedule or with the user's cosine."""
    torch.manual_seed(seed)
    model = Learned(task)
    likelihood = Gaussian(lambda: model.log_scale.exp()) if task.numbers else "categorical"
    q = torchngvi.network(model.net, len(task.train[1]), structure, likelihood=likelihood, seed=seed, **keywords)
    weights = [{"params": list(model.net.parameters()), "lr": lr}]
    if task.numbers:
        weights.append({"params": [model.log_scale], "lr": 1e-2})
    kinds = {"AdamW": torch.optim.AdamW, "SGD": functools.partial(torch.optim.SGD, momentum=0.9)}
    optimizer = kinds[inner](weights, weight_decay=0.0)
    torchngvi.attach(optimizer, q, steps=task.steps)
    for _ in run(task, optimizer, model.loss, seed, warm=0.0 if cosine else None):
        pass
    return calibrated(task, model, q)


RATES = [{"lr": lr} for lr in (1e-3, 3e-3, 1e-2, 3e-2)]
LINES = [("AdamW", 1e-3), ("AdamW", 3e-3), ("AdamW", 1e-2), ("AdamW", 1.0), ("SGD", 1e-3), ("SGD", 3e-2)]
IVON = [(0.1, 1.0), (0.3, 1.0), (0.3, 0.1), (1.0, 0.1)]  # of twelve the best on validation data of nine of the ten
METHODS = {
    "AdamW": (adamw, RATES),
    "laplace, last layer": (post_hoc, [{**rate, "structure": "last layer"} for rate in RATES]),
    "laplace, Kronecker": (post_hoc, [{**rate, "structure": "kronecker"} for rate in RATES]),
    **({"laplace-torch": (reference_laplace, RATES)} if laplace else {}),
    "MC dropout": (adamw, [{"lr": lr, "rate": p} for lr in (3e-3, 1e-2) for p in (0.1, 0.3)]),
    "SWAG": (swag, RATES),
    **({"ivon-opt": (published_ivon, [{"lr": lr, "h0": h} for lr, h in IVON])} if ivon else {}),
    "ensemble of 5": (ensemble, [{"lr": lr} for lr in (3e-3, 1e-2)]),
    "attach": (ours, [{}]),
    "attach, Kronecker": (ours, [{"structure": "kronecker"}]),
    "attach, SGD": (ours, [{"inner": "SGD"}]),
    "attach, without noise": (ours, [{"temperature": 0.0}]),
}
SINGLE = ("MC dropout", "SWAG", "ivon-opt", "laplace, last layer", "laplace, Kronecker")  # one network each
THREE_LINES = (ours, [{"inner": i, "lr": lr, "cosine": c} for i, lr in LINES for c in (False, True)])


@torch.no_grad()
def figures(task, model, outputs, y):
    """NLL, and accuracy with expected calibration error (15 bins) or root mean squared error with coverage."""
    nll = -model.log_prob(outputs, y).mean().item()
    if task.numbers:
        below = model.noise(outputs).cdf(y).mean(0)
        inside = (below > 0.025) & (below < 0.975)
        rmse = (outputs.mean(0) - y).square().mean().sqrt().item()
        return {"nll": nll, "rmse": rmse, "coverage": 100 * inside.float().mean().item()}
    p, label = outputs.softmax(-1).mean(0).max(-1)
    right = (label == y).float()
    bins = (p * 15).long().clamp_max(14)
    gaps = [(right[bins == b].mean() - p[bins == b].mean()).abs() * (bins == b).float().mean() for b in bins.unique()]
    return {"nll": nll, "accuracy": 100 * right.mean().item(), "ece": 100 * sum(gaps).item()}


@torch.no_grad()
def share_of_dead(net, X):
    """The share of ReLU units, channels of a convolution, whose output is 0 on all rows of X, in per cent."""
    largest = {}

    def note(module, _, out):
        now = out.movedim(1, -1).flatten(0, -2).amax(0)
        largest[module] = torch.maximum(now, largest.get(module, now))

    for module in net.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(note)
    for x in X.split(500):
        net(x)
    return 100 * (torch.cat(list(largest.values())) <= 0).float().mean().item()


def measure(name, seed, fit, setting):
    """Train once; what goes into the log."""
    task = load(name, seed)
    task.reused, start = 0.0, time.process_time()
    model, predict = fit(task, seed, **setting)
    seconds = time.process_time() - start + task.reused
    (x_val, y_val), (x, y) = task.val, task.test
    row = {"val": model.validated(predict(x_val), y_val), **figures(task, model, predict(x), y), **model.notes}
    row["factor"] = model.factor
    model.validated(model.outputs(x_val), y_val)
    row["mean"] = figures(task, model, model.outputs(x), y)["nll"]
    return {**row, "dead": share_of_dead(model.net, task.train[0]), "seconds": seconds}


def key(row):
    return row["task"], row["method"], row["seed"], json.dumps(row["setting"], sort_keys=True)


def read_log(path):
    """The lines of the log, the last one of each training."""
    if not path.is_file():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return {key(row): row for row in rows}


def fill(options, methods):
    """Train what the log does not have."""
    done = read_log(options.log)
    for name, seed, method in itertools.product(options.tasks, options.seeds, methods):
        for setting in settings_of(name, method):
            row = {"task": name, "method": method + options.suffix, "seed": seed, "setting": setting}
            if key(row) in done or (name in SHORT and seed != options.seeds[0]):
                continue
            try:
                row |= measure(name, seed, METHODS.get(method, THREE_LINES)[0], setting)
            except (RuntimeError, ValueError) as error:  # of a training that diverged
                row |= {"val": math.inf, "nll": math.inf, "seconds": 0.0, "error": repr(error)[:200]}
            with options.log.open("a") as file:
                file.write(json.dumps(row) + "\n")


def settings_of(task, method):
    """The settings among which a method chooses."""
    settings = METHODS.get(method, THREE_LINES)[1]
    return settings[SHORT[task]] if task in SHORT and len(settings) > 1 else settings


def chosen(log):
    """By task and method the line of each seed whose setting is best on validation data, where none is missing."""
    tried, found = {}, {}
    for row in log.values():
        tried.setdefault((row["task"], row["method"], row["seed"]), []).append(row)
    for (task, method, seed), rows in sorted(tried.items(), key=lambda item: item[0][2]):
        settings = settings_of(task, method) if method in METHODS else [row["setting"] for row in rows]
        rows = [row for row in rows if row["setting"] in settings]
        if len(rows) >= len(settings):
            best = min(rows, key=lambda row: row["val"])
            seconds = sum(row["seconds"] for row in rows)
            found.setdefault((task, method), {})[seed] = {**best, "seconds": seconds}
    return found


def table(names, log):
    """Print a row a task and method, the mean over seeds."""
    rows = chosen(log)
    for name, method in (pair for name in names for pair in rows if pair[0] == name):
        words, seeds = [f"{name:20s} {method:22s}"], rows[name, method].values()
        for column in ("nll", "accuracy", "rmse", "ece", "coverage", "dead", "mean", "seconds"):
            if all(column in row for row in seeds):
                mean = sum(row[column] for row in seeds) / len(seeds)
                words.append(f"{column} {mean:.{4 if column in ('nll', 'rmse', 'mean') else 1}f}")
        print("  ".join(words), f" splits {len(seeds)}")


def verdict(own, other, bar, errors):
    """The mean of paired differences of NLL with its standard error, and whether it is at most the bar or so many."""
    pairs = np.array([own[seed]["nll"] - other[seed]["nll"] for seed in own])
    mean, error = pairs.mean(), pairs.std(ddof=1) / len(pairs) ** 0.5 if len(pairs) > 1 else 0.0
    over = mean - max(bar, errors * error)
    return over <= 0, f"{mean:+.4f} ± {error:.4f} " + ("ok" if over <= 0 else f"misses by {over:.4f}")


def verdicts(names, log, method):
    """Print by task the NLL of a method less those of its mean, of AdamW and of the best method of one network."""
    rows, counts = chosen(log), {"AdamW": [], "the best of one network": []}
    print(f"\n{method}: NLL less that of its own mean, of AdamW, and of the best of {', '.join(SINGLE)}")
    for name in (name for name in names if (name, method) in rows):
        own = rows[name, method]
        words = [f"its own mean {np.mean([row['nll'] - row.get('mean', math.nan) for row in own.values()]):+.4f}"]
        found = {other: rows.get((name, other), {}) for other in ("AdamW", *SINGLE)}
        found = {other: by for other, by in found.items() if own.keys() <= by.keys()}
        singles = [other for other in SINGLE if other in found]
        best = min(singles, key=lambda other: sum(found[other][seed]["nll"] for seed in own), default=None)
        for (which, ok), other, bar, errors in zip(counts.items(), ("AdamW", best), (0.01, 0.03), (1, 0), strict=True):
            if other in found:
                right, word = verdict(own, found[other], bar, errors)
                ok.append(right)
                words.append(f"{other} {word}" + f" (of {len(singles)})" * (which != "AdamW"))
        print(f"{name:20s} {len(own)} splits ", "   ".join(words))
    print("   ".join(f"{which}: {sum(ok)} of {len(ok)} ok" for which, ok in counts.items()))


def spreads(names, log, method):
    """Print the NLL of each optimizer, rate and schedule of the user, a column a seed, and how far they are apart."""
    for name in names:
        seeds = sorted({seed for task, own, seed, _ in log if (task, own) == (name, method)})
        columns = np.full((len(THREE_LINES[1]), len(seeds)), math.nan)
        for setting, line in zip(THREE_LINES[1], columns, strict=True):
            rows = [{"task": name, "method": method, "seed": seed, "setting": setting} for seed in seeds]
            line[:] = [log.get(key(row), {}).get("nll", math.nan) for row in rows]
            what = f"{setting['inner']} {setting['lr']:g}" + ", cosine" * setting["cosine"]
            print(f"{name:12s} {what:22s}", " ".join(f"{nll:.4f}" for nll in line))
        apart = columns.max(0) - columns.min(0)
        word = "ok" if (apart <= 0.015).all() and apart.mean() <= 0.01 else "too far apart"
        print(f"{name:12s} {'largest less smallest':22s}", " ".join(f"{a:.4f}" for a in apart), word)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), help="the ten by default")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--log", type=pathlib.Path, default=pathlib.Path("runs/networks.jsonl"))
    parser.add_argument("--generated", action="store_true", help="ten generated sets in place of the ten")
    parser.add_argument("--rates", action="store_true", help="NLL by the user's optimizer, rate and schedule instead")
    parser.add_argument("--table", action="store_true", help="print what the log has and train nothing")
    parser.add_argument("--suffix", default="", help="of the names in the log, for another version or choice")
    options = parser.parse_args()
    options.tasks = options.tasks or (["digits"] if options.rates else list(GENERATED if options.generated else TEN))
    options.seeds = options.seeds or list(range(5 if options.rates else 3))
    options.log.parent.mkdir(parents=True, exist_ok=True)
    if not options.table:
        fill(options, ["three lines"] if options.rates else options.methods)
    log = read_log(options.log)
    if options.rates:
        spreads(options.tasks, log, "three lines" + options.suffix)
    else:
        table(options.tasks, log)
        verdicts(options.tasks, log, "attach" + options.suffix)


if __name__ == "__main__":
    main()
