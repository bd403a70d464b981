"""What a script can hand to a posterior over a network by mistake, each with the sentence that it gets."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers import check_refusal
from test_networks import adamw, attached, data, mlp, train
from torch import nn

from torchngvi.errors import InputError, PairError
from torchngvi.networks import (
    IVON,
    VOGN,
    VON,
    Bernoulli,
    Categorical,
    ExampleGradients,
    Gaussian,
    GradientNoise,
    HeteroscedasticGaussian,
    Reparametrized,
    SampledLabels,
    StepLength,
    attach,
    calibrate,
    network,
)

untrained = pytest.mark.filterwarnings("ignore:The posterior has seen no data:UserWarning")
X, Y = data(20)
ONE, SIX = torch.zeros(3, 1), torch.randn(6, 2)


def seen(model=None, **keywords):
    """A posterior that has observed curvature."""
    q = network(mlp() if model is None else model, 20, **keywords)
    q.laplace([(X, Y)])
    return q


def made(**arguments):
    return network(mlp(), **{"num_data": 100, **arguments})


def attached_to(optimizer=adamw, structure="diagonal", **keywords):
    model = mlp()
    q = network(model, 100, structure)
    return attach(optimizer(model), q, **{"steps": 10, **keywords})


def attached_twice():
    model, q, _, _ = attached()
    attach(adamw(model), q, steps=10)


def von(**arguments):
    return VON(mlp(), **{"num_data": 100, "steps": 10, **arguments})


def calibrated(loader, **keywords):
    """A loader that fails leaves the temperature as it was."""
    q = network(mlp(), 100)
    try:
        calibrate(q, loader, **keywords)
    finally:
        assert q.temperature == 0.05


def laplace(loader, structure="diagonal", **keywords):
    """A loader that fails leaves the posterior as it was."""
    q = network(mlp(), 40, structure)
    before = copy.deepcopy(q.state_dict())
    try:
        q.laplace(loader, **keywords)
    finally:
        assert not q.observed
        assert all(torch.equal(value, q.state_dict()[name]) for name, value in before.items() if "extra" not in name)


def frozen_parts(labels):
    model = mlp()
    q = network(model, 40, {"2.*": "dense"})
    model[2].bias.requires_grad_(False)
    q.laplace([(X, Y)], labels=labels)


def log_prob(y, likelihood="categorical", outputs=3, **keywords):
    """Of labels for six rows of inputs."""
    return network(nn.Linear(2, outputs), 6, likelihood=likelihood).log_prob(SIX, y, **keywords)


def step_of(output):
    model, _, optimizer, _ = attached(curvature=SampledLabels(output=output))
    train(model, optimizer, 1)


def sparse_step():
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(optimizer, network(model, 100), steps=10, curvature=Reparametrized())
    nn.functional.cross_entropy(model(torch.tensor([1, 2])), torch.tensor([0, 1])).backward()
    optimizer.step()


def two_posteriors():
    model = mlp()
    network(model, 100), network(model, 100)


def with_dtype(dtype):
    model = nn.Linear(2, 3)
    model.weight = nn.Parameter(model.weight.detach().to(dtype))
    return network(model, 20)


def of_inference_mode():
    model = mlp()
    with torch.inference_mode():
        q = network(model, 20)
    attach(adamw(model), q, steps=5)


def assigned():
    attached()[0].load_state_dict(mlp().state_dict(), assign=True)


def copied_step():
    optimizer = von()
    model, copied = copy.deepcopy((optimizer.q.model, optimizer))
    train(model, copied, 1)


def other_state():
    optimizer = von()
    optimizer.attachment.load_state_dict(optimizer.state_dict())


def swapped():
    model = mlp()
    attach(network(model, 100), adamw(model), steps=10)


class Wrapped(nn.Module):
    """A network whose outputs come in a pair."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x), 1


def wrapped_step():
    model = Wrapped()
    attach(adamw(model), network(model, 100), steps=10)
    model(X)


class Passes(torch.optim.Optimizer):
    """An optimizer as Accelerate makes it: one of torch by its class alone, which passes steps on."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        self.optimizer.step(closure)


class Holds:
    def __init__(self, optimizer):
        self.optimizer = optimizer


def emptied(model):
    wrapped = Passes(adamw(model))
    del wrapped.optimizer
    return wrapped


def sgd(**keywords):
    return lambda model: torch.optim.SGD(model.parameters(), lr=0.1, **keywords)


def decayed(model):
    return torch.optim.AdamW(model.parameters())


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters())


def without_noise():
    model = mlp()
    attach(adamw(model), network(model, 9, temperature=0), steps=9, curvature=Reparametrized())


def outside(loader):
    """Of a layer whose weights the network does not use any more."""
    model = mlp()
    q, optimizer = network(model, 20), adamw(model)
    q.laplace([(X, Y)])
    model[2] = nn.Linear(6, 3)
    return loader(q, optimizer)


NO_PART = ("The parameter 2.weight that q is over is no part of the network any more",)
READ, RETURNED = "read is a function of what the network returns", "read returns the tensor of outputs; got a NoneType"
PRECISION, NUMBER = "prior_precision is larger than 0 and finite", "temperature must be a number"
LOADER, PAIRS = "a loader of data is a DataLoader or a list of pairs", "gives pairs"
LABELS, SHAPE = "labels must have the shape of the outputs", "got labels (6,)"
STEPS, RADIUS = "steps is the number of optimizer steps", "radius is a length in nats a datum and must be"
PROBABILITY, RATE = "must be at least 0, below 1, ", "rate must be above 0, at most 1, "
SINGLE, WRAPS = " observes the curvature of single weights; q has a Kron", "given wraps an optimizer of torch, "
SD, DRAWS = "scale is the standard deviation of the noise, larger than 0; got ", "samples is the number of draws"
REFUSED = {
    # what a posterior is made of
    "num_data, 0": (lambda: made(num_data=0), "num_data is the number of labels"),
    "num_data, tensor": (lambda: made(num_data=torch.ones(200)), "num_data is the number", "a tensor of shape (200,)"),
    "temperature, negative": (lambda: made(temperature=-0.1), "temperature must be 0 or larger, and finite; got -0.1"),
    "temperature, text": (lambda: made(temperature="1"), f"{NUMBER}; got '1'"),
    "temperature, tensor": (lambda: made(temperature=torch.ones(2)), NUMBER, "a tensor of shape (2,), torch.float32"),
    "temperature, infinite": (lambda: made().temper_(math.inf), "temperature must be 0 or larger"),
    "temperature, later": (lambda: made().temper_("1"), f"{NUMBER}; got '1'"),
    "structure, name": (lambda: made(structure="block"), "structure is one of"),
    "structure, pattern": (lambda: made(structure={"body.*": "diagonal"}), "fits none of the parameters"),
    "structure, None": (lambda: made(structure=None), "structure is the name of a family, or names", "got None"),
    "structure, number": (lambda: made(structure={3: "dense"}), "patterns of names", "such as 'head.*'; got 3"),
    "structure, empty": (lambda: made(structure={}), "structure names no parameter; give a family"),
    "structure, list": (lambda: made(structure={"*": ["dense"]}), "structure is one of 'diagonal', ", "got ['dense']"),
    "prior, negative": (lambda: made(prior_precision=-1.0), PRECISION),
    "prior, missing": (lambda: made(prior_precision={"0.*": 1.0}), "prior_precision says nothing of 2.weight"),
    "prior, None": (lambda: made(prior_precision=None), f"{PRECISION}; got None for 0.weight"),
    "prior, text": (lambda: made(prior_precision="1"), f"{PRECISION}; got '1' for 0.weight"),
    "prior, tensor": (lambda: made(prior_precision=torch.ones(2, 9)), PRECISION, "shape (2, 9), ", "0.weight. It is"),
    "prior, array": (lambda: made(prior_precision={"*": np.ones(32)}), "got a ndarray of shape (32,) for 0.weight"),
    "likelihood, scale": (lambda: made(likelihood="gaussian"), "needs the scale of the noise"),
    "likelihood, name": (lambda: made(likelihood="poisson"), "likelihood is"),
    "likelihood, list": (lambda: made(likelihood=["categorical"]), "likelihood is ", " got ['categorical']"),
    "seed, None": (lambda: made(seed=None), "seed is an integer of less than 63 bits, ", " got None"),
    "seed, fraction": (lambda: made(seed=0.5), "seed is an integer of less than 63 bits, ", " got 0.5"),
    "prior_weight, 0": (lambda: made(prior=seen(), prior_weight=0.0), "prior_weight"),
    "prior_weight, negative": (lambda: made(prior=seen(), prior_weight=-1.0), "prior_weight"),
    "prior_weight, nan": (lambda: made(prior=seen(), prior_weight=math.nan), "prior_weight"),
    "prior_weight, text": (lambda: made(prior=seen(), prior_weight="2"), "prior_weight"),
    "prior_weight, means": (lambda: made(prior=mlp().state_dict(), prior_weight=2.0), "prior_precision"),
    "prior, products": (lambda: made(prior=seen(), structure="kronecker"), "kronecker"),
    "no network": (lambda: network("net", 100), "made of a torch.nn.Module; got a str"),
    "all frozen": (lambda: network(mlp().requires_grad_(False), 100), "nothing to infer"),
    "two posteriors": (two_posteriors, "has a posterior already"),
    "complex": (lambda: with_dtype(torch.complex64), "dtype torch.complex64"),
    "eight bits": (lambda: with_dtype(torch.float8_e4m3fn), "16 bits at least; weight has the", "e4m3fn. Freeze it"),
    "meta": (lambda: network(nn.Linear(2, 3, device="meta"), 20), "weight is on the device meta, without values; load"),
    "lazy": (lambda: network(nn.LazyLinear(3), 9), "The parameter weight is not initialised yet; call the network"),
    "dense": (lambda: network(nn.Linear(50, 50), 9, "dense"), "for 2,000 weights at most; weight, bias have 2,550"),
    "rows, widths": (lambda: made(structure="rows"), "is for one layer, ", "0.weight has 6, ", "2.weight has 3"),
    "rows, size": (lambda: network(nn.Linear(2500, 2), 9, "rows"), "2,000 weights a row", "have 2,501 and 12,510,002"),
    "no Gaussian": (lambda: made(temperature=0).as_gaussian(), "At the temperature 0 q is a point and no Gaussian"),
    "assign": (assigned, "assign=True has replaced the parameter 0.weight"),
    # likelihoods
    "scale, text": (lambda: Gaussian("a"), f"{SD}'a'"),
    "scale, 0": (lambda: Gaussian(0.0), SD),
    "scale, tensor": (lambda: Gaussian(torch.ones(2)), f"{SD}a tensor of shape (2,)"),
    "one class": (lambda: Categorical().moments(ONE), "two classes or more"),
    "numbers, shape": (lambda: Gaussian(1.0).loss(ONE, torch.zeros(3)), LABELS),
    "numbers, tuple": (lambda: Gaussian(0.5).loss((ONE,), ONE), "loss takes the outputs", "as one tensor; got a"),
    "two columns, labels": (lambda: HeteroscedasticGaussian().loss(SIX, SIX[:, 0]), "labels (6,)", "y[:, None]"),
    "two columns, odd": (lambda: HeteroscedasticGaussian().loss(ONE, ONE), "the logarithms", "(rows, 2) ", "(3, 1)"),
    "class_dim, text": (lambda: Categorical("a"), "class_dim is the dimension of the output ", "; got 'a'"),
    "class_dim, float": (lambda: Categorical(1.0), "class_dim is the dimension of the output ", "; got 1.0"),
    "class_dim, bool": (lambda: Categorical(True), "class_dim is the dimension of the output ", "; got True"),
    "class_dim, place": (lambda: seen(likelihood=Categorical(5)), "got (20, 3), with the classes in dimension 5."),
    "classes, complex": (lambda: log_prob(torch.zeros(6) * 1j), "classes, integers from 0 to 2; got torch.complex64"),
    "classes, float": (lambda: log_prob(torch.zeros(6)), "integers from 0 to 2; got torch.float32. Say y.long()"),
    "classes, list": (lambda: log_prob([0, 1]), "labels are a tensor, with one label for each output; got a list"),
    "classes, columns": (lambda: log_prob(Y[:6, None], samples=6), "got labels (6, 1) for outputs (6, 6)"),
    "numbers, rows": (lambda: log_prob(SIX[:, 0], Gaussian(1.0), 1), LABELS, SHAPE),
    "0 and 1, rows": (lambda: log_prob(SIX[:, 0] > 0, "bernoulli", 1), LABELS, SHAPE),
    "0 and 1, -1": (lambda: Bernoulli().log_prob(SIX[0], torch.tensor([-1.0, 1])), "are 0 and 1; got -1", "(y > 0)"),
    "0 and 1, 2": (lambda: Bernoulli().log_prob(SIX[0], torch.tensor([0.0, 2])), "are 0 and 1; got 2", "(y > 0)"),
    "weights, number": (lambda: Categorical(weights=0.5), "weights"),
    "weights, 0": (lambda: Categorical(weights=[1.0, 0.0]), "weights"),
    "weights, negative": (lambda: Categorical(weights=[1.0, -1.0]), "weights"),
    "weights, matrix": (lambda: Categorical(weights=[[1.0, 2.0]]), "weights"),
    "weights, nan": (lambda: Categorical(weights=[1.0, math.nan]), "weights"),
    "weights, text": (lambda: Categorical(weights="balanced"), "weights"),
    "weights, two": (lambda: seen(likelihood=Categorical(weights=[1.0, 2.0])), "have 3 classes; got 2 weights"),
    # predictions, calibrate and laplace
    "samples, 0": (lambda: made().predict(X, samples=0), DRAWS),
    "samples, text": (lambda: made().predict(X, samples="3"), DRAWS, " got '3'"),
    "elbo, samples": (lambda: seen().elbo([(X, Y)], samples=1), "samples"),
    "elbo, empty": (lambda: seen().elbo([]), "loader is empty"),
    "prior of a matrix": (lambda: seen(structure="kronecker").fit_prior_precision_(), "structure='diagonal'"),
    "read, predict": (lambda: seen().predict(X, read=3), f"{READ}, ", "; got 3"),
    "read, laplace": (lambda: laplace([(X, Y)], read=3), f"{READ}, ", "; got 3"),
    "read, predict None": (lambda: seen().predict(X, read=lambda returned: None), f"{RETURNED} from it"),
    "read, laplace None": (lambda: laplace([(X, Y)], read=lambda returned: None), f"{RETURNED} from it"),
    "laplace, None": (lambda: laplace(None), LOADER, "; got a NoneType"),
    "laplace, empty": (lambda: laplace([]), "The loader of laplace is empty; give the training data"),
    "laplace, inputs": (lambda: laplace([X]), f"a loader of data {PAIRS}"),
    "laplace, infinite": (lambda: laplace([(X * math.inf, Y)]), "at the weights of the network is not finite"),
    "laplace, products": (lambda: laplace([(X * math.inf, Y)], "kronecker"), "of the network is not finite"),
    "laplace, once": (lambda: laplace((b for b in [(X, Y)]), "kronecker"), "only once, and a Kronecker family takes"),
    "labels, 0": (lambda: laplace([(X, Y)], labels=0), "labels is the number of labels drawn for each output"),
    "labels, bool": (lambda: laplace([(X, Y)], labels=True), "labels is the number of labels drawn for each output"),
    "labels, float": (lambda: laplace([(X, Y)], labels=1.5), "labels is the number of labels drawn", "or None"),
    "dense, frozen": (lambda: frozen_parts(None), "parts of all its dense layers, are frozen, so that laplace has no"),
    "dense, frozen, drawn": (lambda: frozen_parts(2), "parts of all its dense layers, are frozen, so that"),
    "calibrate, swapped": (lambda: calibrate([(X, Y)], made()), "takes the posterior ", "then a loader; got a list"),
    "calibrate, None": (lambda: calibrated(None), LOADER, "; got a NoneType"),
    "calibrate, empty": (lambda: calibrated([]), "loader of validation data is empty"),
    "calibrate, once": (lambda: calibrated(p for p in [(X, Y)]), "empty; it is gone through once a temperature"),
    "calibrate, largest": (lambda: calibrated([(X, Y)], largest=-1.0), "largest is the temperature", " got -1.0"),
    "calibrate, text": (lambda: calibrated([(X, Y)], largest="4"), "largest is the temperature to begin", " got '4'"),
    "calibrate, inputs": (lambda: calibrated([X]), PAIRS),
    "calibrate, a batch": (lambda: calibrated((X, Y)), PAIRS, "One batch is a loader in a list: [(x, y)]"),
    "calibrate, dicts": (lambda: calibrated([{"x": X, "labels": Y}]), PAIRS, "[(batch, batch.pop('labels')) for batch"),
    "calibrate, nan": (lambda: calibrated([(X * math.nan, Y)]), "not finite at any"),
    "calibrate, classes": (lambda: calibrated([(X, Y + 9)]), "labels are classes from 0 to 2; got "),
    # a network that was changed afterwards, or never seen
    "changed, predict": (lambda: outside(lambda q, optimizer: q.predict(X)), *NO_PART),
    "changed, laplace": (lambda: outside(lambda q, optimizer: q.laplace([(X, Y)])), *NO_PART),
    "changed, calibrate": (lambda: outside(lambda q, optimizer: calibrate(q, [(X, Y)])), *NO_PART),
    "changed, attach": (lambda: outside(lambda q, optimizer: attach(optimizer, q, steps=5)), *NO_PART),
    "changed, VON": (lambda: outside(lambda q, optimizer: VON(q, steps=5)), *NO_PART),
    "inference mode": (of_inference_mode, "made within torch.inference_mode(), ", "; call torchngvi.network outside"),
    "outputs, a pair": (wrapped_step, "outputs of the network are needed as one tensor"),
    # attach
    "weight decay": (lambda: attached_to(decayed), "weight_decay=0.01 for parameters of q, and the prior takes its"),
    "ASGD": (lambda: attached_to(lambda m: torch.optim.ASGD(m.parameters())), "lambd=0.0001 for parameters of q"),
    "not all": (lambda: attached_to(lambda m: adamw(m[2])), "No optimizer given has the parameters 0.weight"),
    "neither": (lambda: attached_to(steps=None), "Say steps=, ", " or both; got neither"),
    "steps, 0": (lambda: attached_to(steps=0), STEPS),
    "steps, text": (lambda: attached_to(steps="100"), STEPS, "; got '100'."),
    "steps, infinite": (lambda: attached_to(steps=math.inf), STEPS, "; got inf"),  # of which the radius would be 0
    "steps, half": (lambda: attached_to(steps=1.5), STEPS, " at least 1; got 1.5."),
    "steps, bool": (lambda: attached_to(steps=True), STEPS, " at least 1; got True."),
    "radius, 0": (lambda: attached_to(radius=0.0), RADIUS, "; got 0.0"),
    "radius, text": (lambda: attached_to(radius="long"), RADIUS, "; got 'long'"),
    "radius, bool": (lambda: attached_to(radius=True), RADIUS, "; got True"),
    "length": (lambda: attached_to(length=torch.zeros(2)), "length is a torchngvi.networks.StepLength, or None"),
    "length, nats": (lambda: StepLength(nats=-1.0), "nats ", "must be"),
    "length, units": (lambda: StepLength(units=0.0), "units ", "must be"),
    "length, deepest": (lambda: StepLength(deepest="1"), "deepest ", "must be"),
    "length, warm-up": (lambda: StepLength(warm_up=1.0), "warm_up ", "must be"),
    "swapped": (swapped, "attach takes an optimizer ", " got a NetworkGaussian and a AdamW"),
    "no optimizer": (lambda: attached_to(lambda model: []), "attach takes an optimizer ", "list and a NetworkGauss"),
    "maximize": (lambda: attached_to(sgd(maximize=True)), "SGD has maximize=True; a posterior needs the loss, -log p"),
    "LBFGS": (lambda: attached_to(lbfgs), "LBFGS evaluates its closure several times a step", " such as AdamW"),
    "wrapped": (lambda: attached_to(lambda m: Passes(adamw(m))), f"The Passes {WRAPS}", " its .optim"),
    "wrapped, list": (lambda: attached_to(lambda m: [Passes(adamw(m))]), f"The Passes {WRAPS}", " its .optim"),
    "held": (lambda: attached_to(lambda m: Holds(adamw(m))), f"The Holds {WRAPS}", " its .optim"),
    "held, list": (lambda: attached_to(lambda m: [Holds(adamw(m))]), f"The Holds {WRAPS}", " its .optim"),
    "not made": (lambda: attached_to(emptied), "Passes given has not called __init__ of torch.optim.Optimizer"),
    "twice": (attached_twice, "attached already"),
    "sparse": (sparse_step, "needs dense gradients"),
    "no noise": (without_noise, "by the noise of draws; the temperature 0 has none"),
    "state of another": (other_state, "not the state of an attachment, ", "; it has ['attachment', 'param_groups'"),
    # curvatures and optimizers
    "every, 0": (lambda: SampledLabels(every=0), "every is the number of steps"),
    "every, half": (lambda: SampledLabels(every=2.5), "every is the number of steps ", " got 2.5"),
    "output": (lambda: SampledLabels(output=3), "output is a function of what the network returns, ", "; got 3"),
    "output, None": (
        lambda: step_of(output=lambda logits: None),
        "output returns the tensor",
        "got a NoneType from it",
    ),
    "output, detached": (lambda: step_of(output=lambda o: o.detach()), "must keep the graph, which detach()"),
    "batch_size, 0": (lambda: GradientNoise(0), "batch_size is the number of labels ", " must be ", "; got 0"),
    "batch_size, text": (lambda: GradientNoise("a"), "batch_size is the number of labels ", " must be ", "; got 'a'"),
    "noise, beta": (lambda: GradientNoise(1, beta=1.0), f"beta {PROBABILITY}", " got 1.0"),
    "noise, rate": (lambda: Reparametrized(0.0), RATE, " got 0.0"),
    "examples, rate": (lambda: ExampleGradients(2.0), RATE, " got 2.0"),
    "single weights, draws": (lambda: attached_to(adamw, "kronecker", curvature=Reparametrized()), SINGLE, "Reparam"),
    "single weights, examples": (lambda: attached_to(adamw, "kronecker", curvature=ExampleGradients()), SINGLE, "Ex"),
    "dense, noise": (
        lambda: attached_to(adamw, {"2.*": "dense"}, curvature=GradientNoise(20)),
        "the gradient of the mean",
    ),
    "IVON, hess_init": (lambda: IVON(mlp(), 9, 0.1, hess_init=-1.0), "hess_init is the curvature", " got -1.0"),
    "IVON, betas": (lambda: IVON(mlp(), 9, 0.1, betas=(0.9, 1.0)), "betas are two numbers, ", " got (0.9, 1.0)"),
    "IVON, num_data": (lambda: IVON(mlp(), "a", 0.1), "num_data is the number of labels in the training", " got 'a'"),
    "VOGN, weight_decay": (lambda: VOGN(mlp(), 9, 0.1, weight_decay=0.0), "δ, the precision ", " got 0.0"),
    "VOGN, a mean": (lambda: VOGN(mlp(), 9, 0.1).backward(torch.zeros(())), "losses are those of the single examples"),
    "VOGN, a number": (lambda: VOGN(mlp(), 9, 0.1).backward(3), "got a int without a graph. Compute them with red"),
    "VOGN, no graph": (lambda: VOGN(mlp(), 9, 0.1).backward(ONE[:, 0]), "got a Tensor without a graph. Compute them"),
    "VOGN, no losses": (lambda: VOGN(mlp(), 9, 0.1).step(), "needs the losses of single examples"),
    "VON, num_data": (lambda: VON(made(), 100, steps=10), "num_data is a part of the posterior already"),
    "VON, no num_data": (lambda: VON(mlp(), steps=10), "num_data, the number of labels", ", is missing"),
    "VON, lr": (lambda: von(lr=-1.0), "lr is the length of a step and must be"),
    "VON, lr text": (lambda: von(lr="a"), "lr is the length of a step ", "; got 'a'"),
    "VON, beta": (lambda: von(beta=1.0), f"beta {PROBABILITY}", " got 1.0"),
    "VON, beta None": (lambda: von(beta=None), "beta must be"),
    "VON, pattern": (lambda: von(bayesian="heed.*"), "bayesian names 'heed.*', which fits none of the parameters"),
    "VON, patterns": (lambda: von(bayesian=["2.*"]), "a pattern of names of parameters, such as 'head.*'; got ['2.*']"),
    "VON, both": (lambda: VON(made(), steps=9, bayesian="2.*"), "bayesian is a part of the posterior already"),
    "VON, copied": (copied_step, "A copy of VON has no posterior; copy q (copy.deepcopy(optimizer.q))"),
}


@untrained
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, *words = REFUSED[name]
    check_refusal(call, words, (InputError, PairError))


@pytest.mark.parametrize("given", [X.numpy(), X.tolist(), None, [(X, Y)]], ids=type)
def test_inputs_that_are_no_tensor(given):
    q = seen()
    calls = (
        q.predict,
        q.predictive,
        lambda x: q.log_prob(x, Y),
        lambda x: calibrate(q, [(x, Y)]),
        lambda x: q.laplace([(x, Y)]),
    )
    for call in calls:
        words = f"cannot be called on a {type(given).__name__}: linear", "torch.as_tensor(x) of an array"
        check_refusal(lambda call=call: call(given), words)
    assert torch.equal(q.model(X), q.model.eval()(X))  # at the mean, as before


def test_what_a_network_says_of_tensors_is_its_own_word():
    """And a network that takes arrays gets them."""
    q = seen()
    for wrong in ((X, X), {"other": X}):
        with pytest.raises(TypeError, match="forward"):
            q.predict(wrong)

    class OfArrays(nn.Sequential):
        def forward(self, x):
            return super().forward(torch.as_tensor(x))

    model = OfArrays(nn.Linear(4, 3))
    q = seen(model, temperature=0.0)
    torch.testing.assert_close(q.predict(X.numpy()), model.eval()(X).softmax(-1))


@pytest.mark.parametrize("wrong", [-1.0, 0, math.nan, "a", None])
def test_scales_of_the_noise(wrong):
    noise = Gaussian(lambda: wrong)
    for call in (lambda: noise.loss(ONE, ONE), lambda: noise.log_prob(ONE, ONE), lambda: noise.moments(ONE)):
        check_refusal(call, ("function scale returns a standard deviation, ", f" got {wrong!r}"))


def test_arguments_scales_and_labels_of_other_kinds():
    assert made(num_data=np.int64(50)).num_data == 50
    made(prior=mlp().state_dict(), structure="kronecker")
    attached_to(lambda m: torch.optim.ASGD(m.parameters(), lambd=0.0))
    for right in (0.5, np.array(0.5), np.float32(0.5), torch.tensor(0.5)):
        assert Gaussian(lambda right=right: right).loss(ONE, ONE + 1) == Gaussian(0.5).loss(ONE, ONE + 1)
    q = seen()
    for dtype in (torch.int32, torch.uint8):
        assert torch.equal(q.log_prob(X, Y.to(dtype)), q.log_prob(X, Y))
    for dtype in (torch.bool, torch.int64, torch.float64):
        found = Bernoulli().log_prob(torch.tensor([0.5, -0.5]), torch.tensor([0, 1]).to(dtype))
        torch.testing.assert_close(found, nn.functional.logsigmoid(torch.tensor([-0.5, -0.5])))


def test_a_wrapped_optimizer_trains_as_the_one_within():
    """Attached before it is wrapped, or to what is within: the same bits as without a wrapper."""
    ends = []
    for how in ("alone", "before", "within"):
        model = mlp()
        q, optimizer = network(model, 20), adamw(model)
        steps = optimizer if how == "alone" else Passes(optimizer)
        attach(steps.optimizer if how == "within" else optimizer, q, steps=5)
        train(model, steps, 5)
        assert q.draw == 5
        ends.append(q.mean["0.weight"])
    assert all(torch.equal(end, ends[0]) for end in ends)


def test_a_copied_posterior_has_an_optimizer_of_its_own():
    optimizer = von()
    another = VON(copy.deepcopy(optimizer.q), steps=5)
    train(another.q.model, another, 1)
    assert (another.q.draw, optimizer.q.draw) == (1, 0)


class Empty(nn.Module):
    """A layer beside parameters of no numbers."""

    def __init__(self, empty=True):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 3)
        if empty:
            self.none, self.rows, self.columns = (nn.Parameter(torch.zeros(*shape)) for shape in ((0,), (0, 4), (3, 0)))

    def forward(self, x):
        return self.layer(x) + sum(p.sum() for name, p in self.named_parameters() if "layer" not in name)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "dense"])
def test_parameters_of_no_numbers_change_nothing(structure):
    ends = []
    for empty in (True, False):
        model = Empty(empty)
        # the noise is drawn for all parameters in one piece, so that it is the same without them only at 0
        q = network(model, 20, structure, temperature=0.0)
        optimizer = adamw(model)
        attach(optimizer, q, steps=5, curvature=SampledLabels(every=1))
        train(model, optimizer, 5)
        q.laplace([(X, Y)])
        q.temper_(1.0)
        ends.append((q.mean["layer.weight"], q.variance["layer.weight"], q.kl()))
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
