"""Public questions about uncertain networks, rebuilt on data of our own: AdamW, ivon-opt, laplace-torch and ours.

    python -m benchmarks.networks_public [--only 1 5 ...] [--log networks_public.jsonl]

Every situation is a function with the address of its question.  AdamW trains the plain network at 3e-3.  Where they are
installed, "ivon" is ivon-opt at the rate of its README, .1, and "laplace-torch" has its defaults, the last layer with
Kronecker factors and the prior by marginal likelihood.  Ours are "attach" within AdamW at 1e-3, "VON", and "laplace",
`q.laplace` on the weights of AdamW, each with its defaults and `calibrate` on 100 rows, on which the others choose a
factor of a learned noise.  "Nats above the truth" is the negative log likelihood of new labels less that of the density
that they were drawn from.  The verdicts are those of `benchmarks.public`; a bound is a number that the question asks
for, or the figure of AdamW with .02 more.
"""

import contextlib
import copy
import functools
import importlib
import importlib.util
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchngvi
from benchmarks.public import End, Questions
from torchngvi.networks import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian

ivon, laplace = (
    importlib.import_module(name) if importlib.util.find_spec(name) else None for name in ("ivon", "laplace")
)
OURS = ("attach", "VON", "laplace")
PEERS = ("AdamW", *(("ivon",) if ivon else ()), *(("laplace-torch",) if laplace else ()))
Rows = tuple[Tensor, Tensor]


class Fit(NamedTuple):
    """What a method ended with: draws of the outputs, (draws, rows, ...), their likelihood, and the sds of weights."""

    outputs: Callable[[Any], Tensor]
    likelihood: Any
    deviations: Callable[[], Tensor] | None  # of the weights
    method: str

    def predictive(self, x):
        each = [self.likelihood.moments(output) for output in self.outputs(x)]
        means, given = map(torch.stack, zip(*each, strict=True))
        return (means.mean(0), *self.likelihood.total(means, given))

    def epistemic(self, x):
        return self.predictive(x)[1].clamp_min(0).sqrt().mean()

    def nll(self, x, y):
        each = self.likelihood.log_prob(self.outputs(x), y)
        return math.log(len(each)) - each.logsumexp(0)


class Problem(NamedTuple):
    """A network with training and validation data, the score of what a method made of it, and its bound."""

    model: nn.Module
    train: Rows
    validation: Rows
    score: Callable[[Fit], float]
    right: float
    likelihood: Any = Categorical()
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    learned: tuple[nn.Parameter, ...] = ()  # of the noise
    steps: int = 600
    batch: int = 50
    options: dict[str, Any] = {}  # of torchngvi.network
    mixed: bool = False


def train(problem, optimizers, draw=contextlib.nullcontext):
    """The loop of the user; in mixed precision with gradients of five parts of a batch."""
    (x, y), generator, mixed = problem.train, torch.Generator().manual_seed(1), problem.mixed
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=mixed)
    problem.model.train()
    for _ in range(problem.steps):
        rows = torch.randperm(len(y), generator=generator)[: problem.batch]
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in rows.split(10 if mixed else len(rows)):
            with draw():
                with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                    loss = problem.loss(problem.model(x[part]), y[part]) * len(part) / len(rows)
                scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    problem.model.eval()


@torch.no_grad()
def of_network(model, x):
    return model(x)[None]


@torch.no_grad()
def of_ivon(model, optimizer, x):
    torch.manual_seed(0)
    found = []
    for _ in range(16):
        with optimizer.sampled_params():
            found.append(model(x))
    return torch.stack(found)


def of_laplace_torch(model, found, x):
    torch.manual_seed(0)
    return found.functional_samples(x, n_samples=16).detach()


def fitted(problem, method):
    """What a method makes of a problem."""
    model, (x, y), noise = problem.model, problem.train, problem.likelihood
    weights, n, draw = [p for p in model.parameters() if p.requires_grad], y.numel(), contextlib.nullcontext
    others = [torch.optim.AdamW(problem.learned, lr=1e-2, weight_decay=0.0)] if problem.learned else []
    if method in OURS:
        q = torchngvi.network(model, n, likelihood=noise, **problem.options)
    if method == "attach":
        optimizer = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.0)
        torchngvi.attach(optimizer, q, steps=problem.steps)
    elif method == "VON":
        optimizer = torchngvi.VON(q, steps=problem.steps)
    elif method == "ivon":
        optimizer = ivon.IVON(weights, lr=0.1, ess=n, weight_decay=1 / n)
        draw = functools.partial(optimizer.sampled_params, train=True)
    else:
        optimizer = torch.optim.AdamW(weights, lr=3e-3)
    train(problem, [optimizer, *others], draw)
    if method in OURS:
        if method == "laplace":
            q.laplace(list(zip(x.split(100), y.split(100), strict=True)))
        if "temperature" not in problem.options:
            torchngvi.calibrate(q, [problem.validation])

        def deviations():
            return torch.cat([v.flatten() for f in q.each() for v in f.variances()]).mul(q.temperature).sqrt()

        return Fit(q.outputs, q.likelihood, deviations, method)
    outputs, parts, noise, deviations = of_network, (model,), copy.copy(noise), None
    if method == "ivon":
        outputs, parts, group = of_ivon, (model, optimizer), optimizer.param_groups[0]
        deviations = lambda: (n * (group["hess"] + group["weight_decay"])).rsqrt()  # noqa: E731
    if method == "laplace-torch":
        kind = "classification" if isinstance(noise, (Categorical, Bernoulli)) else "regression"
        found = laplace.Laplace(model, kind)
        outputs, parts = of_laplace_torch, (model, found)
        deviations = lambda: found.posterior_covariance.diagonal().sqrt()  # noqa: E731
        found.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 100))
        if isinstance(noise, Gaussian):
            found.sigma_noise = noise.scale().detach() if callable(noise.scale) else noise.scale
        found.optimize_prior_precision()
    fit = Fit(functools.partial(outputs, *parts), noise, deviations, method)
    if problem.learned:
        tried = {}
        for factor in noise.factors:
            noise.factor = factor
            tried[factor] = float(fit.nll(*problem.validation).mean())
        noise.factor = min(tried, key=tried.get)
    return fit


def play(function, method):
    """How a method ends; our warnings are those at the lines of this file and those of `torchngvi.errors`."""
    problem = function()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit = fitted(problem, method)
        score = problem.score(fit)
    told = any(w.filename == __file__ or w.category.__module__ == "torchngvi.errors" for w in said)
    return End(score, problem.right, told=told and method in OURS)


QUESTIONS = Questions((*PEERS, *OURS), play)
situation = QUESTIONS.situation


def mlp(inputs, outputs, *others, activation=nn.ReLU):
    return nn.Sequential(nn.Linear(inputs, 40), *others, activation(), nn.Linear(40, outputs))


def split(x, y, n):
    """Training rows, 100 of validation, and test rows."""
    return (x[:n], y[:n]), (x[n : n + 100], y[n : n + 100]), (x[n + 100 :], y[n + 100 :])


def above(test, truth):
    """Nats above the truth, log p of the test labels being `truth`."""
    return lambda fit: float((fit.nll(*test).double() + truth.double()).mean())


def numbers(f, sd, x, n, right, score=None, model=None, **more):
    """Numbers f(x) with noise, whose scale is learned; the score is nats above the truth without another one."""
    train, validation, test = split(x, f(x) + sd * torch.randn_like(f(x)), n)
    log_scale = nn.Parameter(torch.tensor(0.0))
    noise = Gaussian(lambda: log_scale.exp())
    score = (score or above)(test, torch.distributions.Normal(f(test[0]), sd).log_prob(test[1]))
    options = {"likelihood": noise, "loss": noise.loss, "learned": (log_scale,), **more}
    return Problem(model or mlp(x.shape[1], 1), train, validation, score, right, **options)


def sine(n, right, score=None, **more):
    """A sine on -1 to 1 with noise .1."""
    return numbers(lambda x: torch.sin(3 * x), 0.1, 2 * torch.rand(2300, 1) - 1, n, right, score, **more)


def classes(right, model=None, n=500, score=above, **more):
    """Four classes with known probabilities, of six inputs."""
    x = torch.randn(2600, 6)
    log_p = (2 * torch.tanh(x @ torch.randn(6, 8)) @ torch.randn(8, 4)).log_softmax(-1)
    train, validation, test = split(x, torch.multinomial(log_p.exp(), 1)[:, 0], n)
    truth = log_p[n + 100 :].gather(-1, test[1][:, None])[:, 0]
    return Problem(model or mlp(6, 4), train, validation, score(test, truth), right, **more)


@situation("1", "piEsposito/blitz-bayesian-deep-learning/issues/108")
def weight_of_the_kl():
    """The weight of the KL with batches of 10, a linear model; worst log ratio of an sd to that of the best q."""
    x = torch.randn(100, 5) * torch.tensor([0.3, 0.5, 1.0, 2.0, 3.0])
    rows, noise = (x, x @ torch.randn(5, 1) + 0.5 * torch.randn(100, 1)), Gaussian(0.5)
    exact, options = (x.square().sum(0) / 0.25 + 1).rsqrt(), {"temperature": 1.0}
    worst = lambda fit: float((fit.deviations() / exact).log().abs().max())  # noqa: E731
    model = nn.Linear(5, 1, bias=False)
    return Problem(model, rows, rows, worst, 0.15, noise, noise.loss, steps=1000, batch=10, options=options)


@situation("2", "aleximmer/Laplace/issues/142")
def one_variance_for_all():
    """The uncertainty hardly depends on the input; epistemic sd at the data over that further out."""
    near, far = torch.linspace(-1, 1, 100)[:, None], torch.linspace(2, 3, 50)[:, None]
    ratio = lambda *_: lambda fit: float(fit.epistemic(near) / fit.epistemic(torch.cat([-far, far])))  # noqa: E731
    return sine(200, 0.33, ratio)


@situation("3", "krasserm/bayesian-machine-learning/issues/8")
def a_gap():
    """A gap in the data of a parabola; epistemic sd at the data over that in the gap."""
    x = torch.where(torch.rand(2300, 1) < 0.5, -1.0, 1.0) * (1 + 3 * torch.rand(2300, 1))
    gap, data = torch.linspace(-0.5, 0.5, 50)[:, None], torch.linspace(1.5, 3.5, 50)[:, None]
    ratio = lambda *_: lambda fit: float(fit.epistemic(torch.cat([data, -data])) / fit.epistemic(gap))  # noqa: E731
    return numbers(lambda x: (2 * x.square() - 14) / 9, 0.1, x, 200, 0.67, ratio, mlp(1, 1, activation=nn.Tanh))


@situation("4", "aleximmer/Laplace/issues/141")
def underconfident():
    """Averaged probabilities are far too flat; nats above the truth."""
    return classes(0.25)


@situation("5", "aleximmer/Laplace/issues/137")
def draws_and_dropout():
    """Draws lose the accuracy of a network with dropout on data like Iris; errors above the share of the best rule."""
    centers = torch.tensor([[5.0, 3.4, 1.5, 0.2], [5.9, 2.8, 4.3, 1.3], [6.6, 3.0, 5.6, 2.0]])
    y = torch.randint(3, (2250,))
    train, validation, (x, y) = split(centers[y] + 0.35 * torch.randn(2250, 4), y, 150)
    best, drop = float((torch.cdist(x, centers).argmin(1) != y).float().mean()), nn.Dropout(0.2)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), drop, nn.Linear(16, 8), nn.ReLU(), drop, nn.Linear(8, 3))
    wrong = lambda fit: float((fit.predictive(x)[0].argmax(-1) != y).float().mean()) - best  # noqa: E731
    return Problem(net, train, validation, wrong, 0.075)


@situation("6", "pyro-ppl/numpyro/issues/484")
def a_noise_that_varies():
    """y = x sin x + .3 e + .3 x e' by 1,000 rows; error of the log standard deviation."""
    x, noise = 10 * torch.rand(3100, 1), HeteroscedasticGaussian()
    sd = 0.3 * (1 + x.square()).sqrt()
    train, validation, test = split((x - 5) / 3, (x * x.sin() + sd * torch.randn(3100, 1)) / 4, 1000)
    true = (sd[1100:] / 4).log()
    error = lambda fit: float((fit.predictive(test[0])[2].log() / 2 - true).square().mean().sqrt())  # noqa: E731
    return Problem(mlp(1, 2), train, validation, error, 0.2, noise, noise.loss, steps=2000)


@situation("7", "aleximmer/Laplace/issues/18")
def batch_normalisation():
    """Batch normalisation in the network; nats above the truth."""
    return classes(0.235, mlp(6, 4, nn.BatchNorm1d(40)))


@situation("8", "kohya-ss/sd-scripts/pull/2129")
def accumulation_and_mixed_precision():
    """Accumulated gradients, bfloat16 and a GradScaler; nats above the truth."""
    return classes(0.25, mixed=True)


class LastOfSequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(1, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1]).squeeze(1)


@situation("9", "aleximmer/Laplace/issues/143")
def a_recurrent_network():
    """An LSTM with squeezed outputs, on a running mean of a sequence; nats above the truth."""
    f = lambda x: torch.tanh(x[:, -3:, 0].sum(1))  # noqa: E731
    return numbers(f, 0.2, torch.randn(2400, 12, 1), 300, 0.17, model=LastOfSequence(), steps=400)


class Links(nn.Module):
    """Scores of all tails for a head and a relation, by the same embedding."""

    def __init__(self):
        super().__init__()
        self.entities, self.relations = nn.Embedding(30, 8), nn.Embedding(3, 8)
        self.normed, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(self.normed(self.entities(x[:, 0]) * self.relations(x[:, 1]))) @ self.entities.weight.T


@situation("10", "aleximmer/Laplace/issues/90")
def tied_embeddings():
    """A model of links, one embedding at both ends, dropout, binary labels of all tails; nats above the truth."""
    a, b = torch.randn(30, 4), torch.randn(3, 4)
    x = torch.stack([torch.randint(30, (2500,)), torch.randint(3, (2500,))], -1)
    logits, loss = 1.5 * (a[x[:, 0]] * b[x[:, 1]]) @ a.T - 1, F.binary_cross_entropy_with_logits
    train, validation, test = split(x, (torch.rand(2500, 30) < logits.sigmoid()).float(), 400)
    score = above(test, -loss(logits[500:], test[1], reduction="none"))
    return Problem(Links(), train, validation, score, 0.1, Bernoulli(), loss, steps=1000)


@situation("11", "TuringLang/AdvancedVI.jl/issues/44")
def weights_of_classes():
    """One label in twenty is of the rare class, the loss has weights; nats above the truth of balanced data."""
    y = torch.cat([(torch.rand(1100) < 0.05).long(), (torch.rand(2000) < 0.5).long()])
    x = torch.randn(3100, 4) + 1.5 * y[:, None] * torch.tensor([1.0, 1.0, 0.0, 0.0])
    train, validation, test = split(x, y, 1000)
    truth = F.logsigmoid((2.0 * test[1] - 1) * (1.5 * test[0][:, :2].sum(1) - 2.25))
    w = torch.tensor([1.0, 19.0])
    loss = functools.partial(F.cross_entropy, weight=w)
    return Problem(mlp(4, 2), train, validation, above(test, truth), 0.1, Categorical(weights=w), loss)


@situation("12", "TyXe-BDL/TyXe/issues/11")
def a_last_layer():
    """A network is frozen but for a new last layer, which learns from 100 rows; nats above the truth."""
    net = mlp(6, 4)
    problem = classes(0.38, net, 1000, options={"structure": {"2.*": "dense"}})
    train(problem, [torch.optim.AdamW(net.parameters(), lr=3e-3)])
    net[0].requires_grad_(False)
    net[2].reset_parameters()
    return problem._replace(train=tuple(part[:100] for part in problem.train))


@situation("13", "TyXe-BDL/TyXe/issues/11")
def labels_without_a_column():
    """Labels (rows,) for outputs (rows, 1), which mse_loss broadcasts; error of the mean."""
    true = lambda x: torch.sin(3 * x)  # noqa: E731
    error = lambda test, _: lambda fit: float((fit.predictive(test[0])[0] - true(test[0])).square().mean().sqrt())  # noqa: E731
    problem = sine(200, 0.15, error, likelihood=Gaussian(0.1), learned=())
    (x, y), (a, b) = problem.train, problem.validation
    loss = lambda output, y: F.mse_loss(output, y) / 0.02  # noqa: E731
    return problem._replace(train=(x, y[:, 0]), validation=(a, b[:, 0]), loss=loss)


@situation("14", "piEsposito/blitz-bayesian-deep-learning/issues/57")
def twenty_rows():
    """Twenty rows of a sine, six of them for validation; nats above the truth."""
    problem = sine(200, 0.5, batch=14)
    (x, y), (a, b) = problem.train, problem.validation
    return problem._replace(train=(x[:14], y[:14]), validation=(a[:6], b[:6]))


@situation("15", "wiseodd/last_layer_laplace/issues/8")
def unlike_the_training_data():
    """Inputs three times as far out; 1 - AUC of the epistemic part, of AdamW that of the entropy."""
    far = 3 * torch.randn(1000, 6)

    def missed(test, truth):
        def score(fit):
            near, out = (fit.predictive(x)[2 if fit.method == "AdamW" else 1] for x in (test[0][:1000], far))
            return float((near[:, None] > out).float().mean() + 0.5 * (near[:, None] == out).float().mean())

        return score

    return classes(0.2, score=missed)


@situation("16", "piEsposito/blitz-bayesian-deep-learning/issues/84")
def copies_and_data_parallel():
    """A network in DataParallel, and a deep copy of what was fitted; largest difference of the outputs."""
    apart = lambda test, _: lambda fit: float((copy.deepcopy(fit.outputs)(test[0]) - fit.outputs(test[0])).abs().max())  # noqa: E731
    return classes(1e-5, nn.DataParallel(mlp(6, 4)), score=apart)


def main(arguments=None):
    return QUESTIONS.main(__doc__, "networks_public.jsonl", arguments)


if __name__ == "__main__":
    main()
