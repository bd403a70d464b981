"""An ELBO and an evidence of a network's posterior, and the precision of the prior by it."""

import copy
import math

import pytest
import torch
from test_networks import adamw, train
from torch import nn

import torchngvi
from torchngvi.errors import InputError
from torchngvi.networks import Gaussian, SampledLabels

N, PRIOR, NOISE = 30, 1.7, 0.4


def data(seed=0, n=N, width=3):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=g, dtype=torch.float64)
    return x, x @ torch.tensor([[1.0], [0.3], [0.0]], dtype=torch.float64) + NOISE * torch.randn(
        n, 1, generator=g, dtype=torch.float64
    )


def linear(structure, prior_precision=PRIOR):
    """q of a linear model with Gaussian noise, at its mode; the data in two batches; the log evidence."""
    x, y = data()
    model = nn.Linear(3, 1).double()
    X = torch.cat([x, torch.ones(N, 1, dtype=torch.float64)], 1)
    precision = X.T @ X / NOISE**2 + PRIOR * torch.eye(4, dtype=torch.float64)
    mode = torch.linalg.solve(precision, X.T @ y / NOISE**2)[:, 0]
    with torch.no_grad():
        model.weight.copy_(mode[None, :3])
        model.bias.copy_(mode[3:])
    q = torchngvi.network(model, N, structure, prior_precision, temperature=0.3, likelihood=Gaussian(NOISE))
    covariance = NOISE**2 * torch.eye(N, dtype=torch.float64) + X @ X.T / PRIOR
    exact = torch.distributions.MultivariateNormal(torch.zeros(N, dtype=torch.float64), covariance).log_prob(y[:, 0])
    return q, list(zip(x.split(20), y.split(20), strict=True)), exact


def test_of_a_linear_model_the_evidence_is_exact_and_the_elbo_of_the_posterior_is_it():
    q, loader, exact = linear("dense")
    q.laplace(loader)
    assert q.log_evidence(loader) == pytest.approx(float(exact), abs=1e-9)
    q.temper_(1.0)
    found = q.elbo(loader, samples=400)
    assert abs(float(found.estimate - exact)) < 4 * float(found.standard_error) < 1.0
    q.temper_(0.3)  # a bound at any temperature
    assert float(q.elbo(loader, samples=400).estimate) < float(exact) - 0.5
    q.temper_(0.0)
    assert q.elbo(loader).estimate == -math.inf


def test_of_independent_weights_it_is_their_largest_elbo():
    """The mean-field ELBO of a Gaussian posterior is in closed form, since it is that of the quadratic itself."""
    q, loader, exact = linear("diagonal")
    q.laplace(loader)
    q.temper_(1.0)
    found = q.elbo(loader, samples=400)
    assert abs(float(found.estimate) - q.log_evidence(loader)) < 4 * float(found.standard_error)
    assert q.log_evidence(loader) < float(exact)


@pytest.mark.accuracy
def test_of_a_logistic_regression_it_agrees_with_quadrature():
    g = torch.Generator().manual_seed(3)
    n = 200
    x = torch.randn(n, 1, generator=g, dtype=torch.float64)
    y = (torch.rand(n, 1, generator=g, dtype=torch.float64) < (1.5 * x - 0.5).sigmoid()).double()
    model = nn.Linear(1, 1).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def log_joint(w, b):  # of grids of weights
        eta = w[..., None] * x[:, 0] + b[..., None]
        fit = nn.functional.logsigmoid((2 * y[:, 0] - 1) * eta).sum(-1)
        return fit - 0.5 * PRIOR * (w**2 + b**2) + math.log(PRIOR / (2 * math.pi))

    def closure():
        optimizer.zero_grad()
        loss = -log_joint(model.weight[0, 0], model.bias[0])
        loss.backward()
        return loss

    optimizer.step(closure)
    q = torchngvi.network(model, n, "dense", PRIOR, likelihood="bernoulli")
    q.laplace([(x, y)])
    w, b = torch.meshgrid(*2 * [torch.linspace(-4, 4, 401, dtype=torch.float64)], indexing="ij")
    exact = log_joint(w, b).flatten().logsumexp(0) + 2 * math.log(0.02)
    assert q.log_evidence([(x, y)]) == pytest.approx(float(exact), abs=0.02)


@pytest.mark.sparse(4)
@pytest.mark.parametrize("structure", ["diagonal", "dense", "rows"])
@pytest.mark.parametrize("groups", [None, ["*"], ["weight", "bias"]])
def test_the_chosen_precision_is_the_maximum_of_the_evidence_at_its_mean(structure, groups):
    q, loader, _ = linear(structure)
    q.laplace(loader)
    found = q.fit_prior_precision_(groups)
    again = torchngvi.network(copy.deepcopy(q.model), N, structure, found, likelihood=Gaussian(NOISE))
    again.laplace(loader)
    for name, variance in again.variance.items():  # at T = 0.05, for the 0.3 of q
        torch.testing.assert_close(variance / 0.05, q.variance[name] / 0.3)
    best = again.log_evidence(loader)
    assert best == pytest.approx(q.log_evidence(loader), abs=1e-9)
    for factor in (0.98, 1.02):
        for own in [["weight"], ["bias"]] if groups and len(groups) > 1 else [["weight", "bias"]]:
            other = {name: value * (factor if name in own else 1.0) for name, value in found.items()}
            near = torchngvi.network(copy.deepcopy(q.model), N, structure, other, likelihood=Gaussian(NOISE))
            near.laplace(loader)
            assert near.log_evidence(loader) < best - 1e-6


def trained():
    x, y = data()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    q = torchngvi.network(model, N, likelihood=Gaussian(NOISE))
    optimizer = adamw(model)
    torchngvi.attach(optimizer, q, steps=60, curvature=SampledLabels(every=2))
    train(model, optimizer, 60, loss=q.likelihood.loss, batch=(x, y))
    return q, optimizer, [(x, y)]


def test_after_a_training_the_stored_curvature_is_enough():
    """No pass over the data, the mean as it was, and q no wider than in training; a checkpoint has the new prior."""
    q, optimizer, loader = trained()
    before = {name: m.clone() for name, m in q.mean.items()}
    width = {name: v.clone() for name, v in q.variance.items()}
    evidence = q.log_evidence(loader)
    assert torch.equal(width["0.weight"], q.variance["0.weight"])  # a look changes nothing
    found = q.fit_prior_precision_()
    assert q.log_evidence(loader) > evidence
    assert found["0.weight"] == found["0.bias"] != found["2.weight"]
    for name, m in q.mean.items():
        assert torch.equal(m, before[name])
        h = q.families[0].curvature[q.names.index(name)]
        start = q.families[0].start[q.names.index(name)]
        expected = q.temperature / (N * h.clamp(min=start) + found[name])
        torch.testing.assert_close(q.variance[name], expected)
    other = torchngvi.network(copy.deepcopy(q.model), N, likelihood=Gaussian(NOISE))
    other.load_state_dict(q.state_dict())
    torch.testing.assert_close(other.variance["0.weight"], q.variance["0.weight"], rtol=0, atol=0)
    drawn = q.model.train()[0].weight.clone()
    assert not torch.equal(drawn, q.mean["0.weight"])  # and the training goes on from a draw
    optimizer.step()


def test_what_the_data_say_nothing_of_keeps_its_prior():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()
    nn.init.zeros_(model[1].bias)
    q = torchngvi.network(model, 10, likelihood=Gaussian(1.0), prior_precision=3.0)
    zeros = torch.zeros(10, 2, dtype=torch.float64)
    q.laplace([(zeros, torch.zeros(10, 1))])
    found = q.fit_prior_precision_(["0.weight", "0.bias", "1.*"])
    assert found["0.weight"] == pytest.approx(3.0)  # inputs of zero
    assert found["0.bias"] != pytest.approx(3.0)
    older = copy.deepcopy(q)
    newer = torchngvi.network(copy.deepcopy(q.model), 10, likelihood=Gaussian(1.0), prior=older)
    newer.laplace([(zeros, torch.zeros(10, 1))])
    assert newer.fit_prior_precision_() == {}


def test_class_weights_count_as_in_the_loss():
    """The evidence changes by as much as the weighted mean of the loss does, with the same q."""
    x, y = data()[0], torch.arange(N) % 2
    weights = torch.tensor([1.0, 4.0], dtype=torch.float64)
    model = nn.Linear(3, 2).double()
    q = torchngvi.network(model, N, likelihood=torchngvi.networks.Categorical(weights=weights))
    q.laplace([(x, y)])
    before = q.log_evidence([(x, y)])
    loss = nn.functional.cross_entropy(model(x), y, weight=weights)
    changed = nn.functional.cross_entropy(model(x), 1 - y, weight=weights)
    assert q.log_evidence([(x, 1 - y)]) - before == pytest.approx(N * (loss - changed).item(), abs=1e-9)


def test_a_kronecker_family_has_an_evidence():
    x, y = data()
    model = nn.Linear(3, 1).double()
    q = torchngvi.network(model, N, {"weight": "kronecker", "*": "diagonal"}, likelihood=Gaussian(NOISE))
    with pytest.raises(InputError, match=r"needs q.laplace\(loader\) first"):
        q.log_evidence([(x, y)])
    q.laplace([(x, y)])
    assert math.isfinite(q.log_evidence([(x, y)]))
