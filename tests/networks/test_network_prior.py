"""A posterior, or pretrained weights, as the prior of a network: what is exact, what is refused, what is kept."""

import copy
import math
import warnings

import pytest
import torch
from test_networks import attached, data, mlp, train
from torch import nn

import torchngvi
from torchngvi.errors import InputError
from torchngvi.networks import VON, Gaussian, SampledLabels

LAMBDA, SCALE = 0.7, 0.5


def parts(tasks, rows=8, seed=0):
    """Rows of a linear regression, the inputs of each task orthogonal, so that single weights are independent."""
    draws = torch.Generator().manual_seed(seed)
    for task in range(tasks):
        x = torch.linalg.qr(torch.randn(rows, 3, dtype=torch.float64, generator=draws))[0] * (2.0 + task)
        yield x, torch.randn(rows, 1, dtype=torch.float64, generator=draws)


def linear(mean=None):
    model = nn.Linear(3, 1, bias=False).double()
    if mean is not None:
        model.weight.data.copy_(mean)
    return model


def posterior(x, y, start=None, **options):
    """The posterior at its optimum, which the normal equations give for independent weights."""
    q = torchngvi.network(linear(), len(y), temperature=1.0, likelihood=Gaussian(SCALE), **options)
    q.laplace([(x, y)])
    precision = 1 / q.variance["weight"]
    center = q.families[0].centers[0]
    delta = torch.as_tensor(q.prior["weight"]) * len(y)
    found = (delta * (0.0 if center is None else center) + (y.T @ x) / SCALE**2) / precision
    q.model.weight.data.copy_(found)
    q.laplace([(x, y)])
    return q


def joint(given):
    """The precision and the mean of the posterior of all rows together."""
    x, y = (torch.cat(each) for each in zip(*given, strict=True))
    precision = x.square().sum(0) / SCALE**2 + LAMBDA
    return precision[None], (y.T @ x) / SCALE**2 / precision


def in_turn(given):
    q = None
    for x, y in given:
        q = posterior(x, y, prior_precision=LAMBDA, prior=q)
        yield q


def trained(steps=6):
    """A posterior after some steps."""
    model, q, optimizer, _ = attached(steps=steps, lr=1e-2, num_data=24, curvature=SampledLabels(every=1))
    train(model, optimizer, steps, batch=data(24))
    return q


def test_two_parts_in_turn_are_the_batch():
    """A then B has the precision and the mean of A and B together, as the design is orthogonal."""
    given = list(parts(2))
    *_, q = in_turn(given)
    precision, mean = joint(given)
    torch.testing.assert_close(1 / q.variance["weight"], precision, rtol=1e-12, atol=0)
    torch.testing.assert_close(q.mean["weight"], mean, rtol=1e-12, atol=1e-14)


def test_precisions_add_in_a_chain():
    """After k tasks N_k δ_k = λ + Σ N_i h_i, whatever the temperature of each, and whatever N is."""
    model, total, q = mlp(torch.float64), None, None
    for task, (rows, temperature) in enumerate(((20, 0.05), (35, 1.0), (10, 0.0))):
        x, y = data(rows, torch.float64, task)
        q = torchngvi.network(model, rows, prior_precision=LAMBDA, temperature=temperature, prior=q)
        if total is not None:
            held = torch.cat([(q.num_data * delta).flatten() for delta in q.prior.values()])
            torch.testing.assert_close(held, total, rtol=1e-12, atol=0)
        q.laplace([(x, y)])
        own = torch.cat([h.flatten() for h in q.families[0].curvature]) * rows
        total = own + (LAMBDA if total is None else total)
        q.release()


@pytest.mark.parametrize("structure", ["diagonal", "dense"])
def test_the_weight_counts_the_data_and_not_their_prior(structure):
    """N δ + w N h; twice the data are as good as their weight 2."""
    x, y = data(30, torch.float64)
    model = nn.Linear(4, 3, bias=False).double()
    found = []
    for copies, weight in ((1, 2.0), (2, 1.0)):
        old = torchngvi.network(model, 30 * copies, structure, prior_precision=LAMBDA)
        old.laplace([(x, y)] * copies)
        old.release()
        q = torchngvi.network(model, 20, prior=old, prior_weight=weight)
        found.append(q.prior["weight"])
        q.release()
    assert (found[0] > 2 * LAMBDA / 20).all()
    torch.testing.assert_close(*found, rtol=1e-10, atol=0)


def test_the_start_is_no_information():
    """Before any data q is narrower than its prior, and as a prior it is its prior."""
    first = torchngvi.network(mlp(), 50, prior_precision=LAMBDA, temperature=1.0)
    assert (first.variance["0.weight"] < 0.9 / LAMBDA).all()
    q = torchngvi.network(mlp(), 20, prior=first)
    for delta in q.prior.values():
        torch.testing.assert_close(20 * delta, torch.full_like(delta, LAMBDA))


@pytest.mark.parametrize("structure", ["diagonal", "dense", "rows", "kronecker"])
def test_of_every_family_the_diagonal_of_the_precision_is_left(structure):
    """Of a covariance between weights the precision of each weight given the others carries over."""
    model = nn.Linear(4, 3, bias=False).double()
    x, y = data(30, torch.float64)
    old = torchngvi.network(model, 30, structure, prior_precision=LAMBDA, temperature=1.0)
    old.laplace([(x, y)])
    family, eye = old.families[0], torch.eye(12, dtype=torch.float64)
    columns = torch.stack([family.colored([row.view(3, 4)])[0].flatten() for row in eye], 1)
    q = torchngvi.network(nn.Linear(4, 3, bias=False).double(), 20, prior=old)
    expected = torch.linalg.inv(columns @ columns.T).diagonal()
    torch.testing.assert_close(20 * q.prior["weight"].flatten(), expected, rtol=1e-8, atol=0)


@pytest.mark.parametrize("structure", ["diagonal", "dense"])
def test_the_optimizer_sees_the_pull_towards_the_prior(structure):
    """The gradient in a step is g + δ(m - m₀)."""
    first = trained()
    model = mlp()
    q = torchngvi.network(model, 40, {"2.*": structure, "*": "diagonal"}, prior=first)
    seen = {}

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            seen.update({name: p.grad.clone() for name, p in model.named_parameters()})

    optimizer = Optimizer(model.parameters(), lr=1.0)
    torchngvi.attach(optimizer, q, steps=3)
    x, y = data(24)
    nn.functional.cross_entropy(model(x), y).backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    mean = {name: m.clone() for name, m in q.mean.items()}
    optimizer.step()
    for name, precision in zip(first.names, first.families[0].precisions(), strict=True):
        assert not torch.equal(first.mean[name], mean[name])
        expected = plain[name] + precision / 40 * (mean[name] - first.mean[name])
        torch.testing.assert_close(seen[name], expected, rtol=1e-5, atol=1e-6)


def test_the_network_starts_at_its_own_weights():
    first, model = trained(), mlp()
    own = {name: p.clone() for name, p in model.named_parameters()}
    for prior in (first, first.model.state_dict()):
        q = torchngvi.network(model, 40, prior=prior)
        assert all(torch.equal(own[name], q.mean[name]) for name in own)
        assert all(torch.equal(c, first.mean[n]) for c, n in zip(q.families[0].centers, q.names, strict=True))
        q.release()


def test_kl_is_that_of_torch():
    first = trained()
    q = torchngvi.network(mlp(), 40, temperature=0.3, prior=first)
    expected = 0.0
    for name, precision in zip(first.names, first.families[0].precisions(), strict=True):
        prior = torch.distributions.Normal(first.mean[name].double(), precision.double().rsqrt())
        own = torch.distributions.Normal(q.mean[name].double(), q.variance[name].double().sqrt())
        expected = expected + torch.distributions.kl_divergence(own, prior).sum()
    torch.testing.assert_close(q.kl().double(), expected, rtol=1e-5, atol=0)


def test_kl_vanishes_where_nothing_was_learned():
    """Inputs of 0 say nothing of their weights, so that q is the prior."""
    first = posterior(*next(parts(1)), prior_precision=LAMBDA)
    q = torchngvi.network(linear(first.mean["weight"]), 5, temperature=1.0, likelihood=Gaussian(1.0), prior=first)
    assert q.kl() > 0.01  # of the start
    x = torch.zeros(5, 3, dtype=torch.float64)
    q.laplace([(x, x[:, :1])])
    torch.testing.assert_close(q.kl(), torch.zeros((), dtype=torch.float64), rtol=0, atol=1e-12)


def test_pretrained_weights_are_means_alone():
    first = trained()
    q = torchngvi.network(mlp(), 40, prior_precision={"0.*": 8.0, "*": 2.0}, prior=first.model.state_dict())
    assert q.prior == {"0.weight": 0.2, "0.bias": 0.2, "2.weight": 0.05, "2.bias": 0.05}
    gradients = {name: torch.zeros_like(m) for name, m in q.mean.items()}
    q.add_prior_(gradients, q.mean)
    for name, g in gradients.items():
        torch.testing.assert_close(g, q.prior[name] * (q.mean[name] - first.mean[name]))


def test_new_layers_have_the_usual_prior():
    first = trained()
    first.release()
    model = nn.Sequential(first.model[0], first.model[1])
    model.append(nn.Linear(6, 5))
    model.add_module("new", nn.Linear(5, 2))
    with pytest.raises(InputError, match="name of its own"):
        torchngvi.network(model, 40, prior=first)
    model = nn.Sequential(first.model[0], nn.Tanh(), nn.Identity(), nn.Linear(6, 2))
    q = torchngvi.network(model, 40, prior_precision=LAMBDA, prior=first)
    assert q.prior["3.weight"] == LAMBDA / 40
    assert q.families[0].centers[2:] == [None, None]
    assert isinstance(q.prior["0.weight"], torch.Tensor)


def test_the_named_optimizer_reaches_the_mean_of_the_batch():
    given = list(parts(2))
    first = next(in_turn(given))
    model, (x, y) = linear(), given[1]
    q = torchngvi.network(model, len(y), temperature=0.0, prior=first, likelihood=Gaussian(SCALE))
    optimizer = VON(q, steps=300, beta=0.0)
    train(model, optimizer, 300, loss=q.likelihood.loss, batch=(x, y))
    torch.testing.assert_close(q.mean["weight"], joint(given)[1], rtol=0, atol=2e-3)


def test_a_checkpoint_has_the_prior():
    """A state is loaded into a posterior of the same prior, or of none, which it then has."""
    q = torchngvi.network(mlp(), 40, prior=trained())
    for prior in (trained(2), None):
        other = torchngvi.network(mlp(), 40, prior=prior)
        other.load_state_dict(q.state_dict())
        assert all(torch.equal(other.prior[name], delta) for name, delta in q.prior.items())
        assert torch.equal(other.kl(), q.kl())


def test_copies_and_dtypes_keep_the_prior():
    first = trained()
    q = torchngvi.network(mlp(), 40, prior=first)
    kl, held = q.kl(), {name: delta.clone() for name, delta in q.prior.items()}
    copied = copy.deepcopy(q)
    first.families[0].mean[0].zero_()  # of which q has a copy
    q.families[0].prior[0].zero_()
    assert torch.equal(copied.kl(), kl)
    assert all(torch.equal(copied.prior[name], delta) for name, delta in held.items())
    copied.to(torch.float64)
    assert {t.dtype for t in copied.families[0].buffers()} == {torch.float64}
    torch.testing.assert_close(copied.kl(), kl.double(), rtol=1e-5, atol=0)
    double = torchngvi.network(mlp(torch.float64), 40, prior=trained())
    assert {t.dtype for t in double.families[0].buffers()} == {torch.float64}
    assert double.kl().dtype == torch.float64


def test_one_optimizer_serves_a_chain():
    """`release` lets the optimizers go, so that the next posterior is the only one that they move."""
    model, first, optimizer, _ = attached(steps=4, num_data=24)
    train(model, optimizer, 4)
    first.release()
    mean = {name: m.clone() for name, m in first.mean.items()}
    second = torchngvi.network(model, 24, prior=first)
    torchngvi.attach(optimizer, second, steps=4)
    train(model, optimizer, 4)
    second.release()
    assert (first.draw, second.draw) == (4, 4)
    assert all(torch.equal(first.mean[name], m) for name, m in mean.items())
    assert all(torch.equal(second.mean[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda q, state: {}, "an empty mapping"),
        (lambda q, state: [state], "a list"),
        (lambda q, state: {"0.weight": 1.0}, "a float"),
        (lambda q, state: state["0.weight"], "a Tensor"),
        (lambda q, state: q.model, "a Sequential"),
        (lambda q, state: {f"module.{name}": t for name, t in state.items()}, "module"),
        (lambda q, state: {"0.weight": torch.zeros(2, 2)}, r"\(2, 2\)"),
        (lambda q, state: {**state, "0.bias": state["0.bias"] * math.nan}, "not finite for 0.bias"),
    ],
)
def test_what_is_no_prior_is_refused(change, says):
    q = trained(2)
    with pytest.raises(InputError, match=says):
        torchngvi.network(mlp(), 40, prior=change(q, q.model.state_dict()))


def test_a_posterior_that_is_not_finite_is_refused():
    first = trained(2)
    first.families[0].curvature[0].fill_(math.inf)
    with pytest.raises(InputError, match="posterior that is the prior is not finite for 0.weight"):
        torchngvi.network(mlp(), 40, prior=first)


@pytest.mark.parametrize("at_prior", [True, False])
def test_only_the_pull_of_the_prior_counts_against_clipped_gradients(at_prior):
    """The warning of clipping is of δ(m - m₀), which is 0 where the network is at the mean of the prior."""
    model, (x, y) = mlp(), data(24)
    state = {name: p.detach() + (0.0 if at_prior else 1.0) for name, p in model.named_parameters()}
    q = torchngvi.network(model, 24, prior_precision=240.0, temperature=0.0, prior=state)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    torchngvi.attach(optimizer, q, radius=1e-9)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
    assert any("prior counts too much" in str(one.message) for one in said) != at_prior
