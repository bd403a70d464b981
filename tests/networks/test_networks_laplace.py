"""The Laplace approximation at the weights of a trained network, and the word about a posterior without data."""

import copy

import pytest
import torch
import torch.nn.functional as F
from test_networks import flat, train
from torch import nn

import torchngvi
from torchngvi.networks import Bernoulli, Categorical, Gaussian, SampledLabels

N, PRIOR = 40, 1.7


def net(outputs=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def inputs(seed=1, n=N):
    return torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def uneven(x, y=None):
    """Batches of different sizes."""
    y = torch.zeros(len(x)) if y is None else y
    return list(zip(x.split([7, 20, len(x) - 27]), y.split([7, 20, len(x) - 27]), strict=True))


def gauss_newton(model, x, likelihood, names):
    """Σᵢ JᵢᵀΛᵢJᵢ over some parameters, from derivatives of whole outputs and the Hessian of -log p in them."""
    parameters = {name: p.detach() for name, p in model.named_parameters() if name in names}
    J = torch.func.jacrev(lambda given: torch.func.functional_call(model, given, x))(parameters)
    J = torch.cat([J[name].flatten(2) for name in names], 2)  # (n, outputs, D)

    def energy(output):  # -log p at labels for which its Hessian is that of all labels
        y = torch.zeros(output.shape[:1], dtype=torch.long) if isinstance(likelihood, Categorical) else 0.0 * output
        return -likelihood.log_prob(output[None], y).sum()

    each = torch.stack([torch.func.hessian(energy)(row[None])[0, :, 0] for row in model(x).detach()])
    return torch.einsum("nod,nop,npe->de", J, each, J)


@pytest.mark.parametrize(
    ("likelihood", "outputs"), [(Categorical(), 3), (Bernoulli(), 1), (Bernoulli(), 2), (Gaussian(0.3), 2)]
)
def test_the_precision_is_that_of_the_gauss_newton_matrix_and_the_prior(likelihood, outputs):
    """With the expectation over labels, over batches of different sizes, to rounding."""
    model, x = net(outputs), inputs()
    labels = N if isinstance(likelihood, Categorical) else N * outputs  # what a mean loss averages over
    q = torchngvi.network(model, labels, prior_precision=PRIOR, temperature=1.0, likelihood=likelihood)
    q.laplace(uneven(x))
    exact = gauss_newton(model, x, likelihood, q.names).diagonal() + PRIOR
    torch.testing.assert_close(1 / flat(q.variance.values()), exact, rtol=1e-10, atol=0)


def test_of_a_softmax_regression_it_is_the_hessian():
    x, model = inputs(), nn.Linear(4, 3).double()
    q = torchngvi.network(model, N, "dense", prior_precision=PRIOR, temperature=1.0)
    q.laplace(uneven(x))
    labels = torch.arange(N) % 3  # any: the Hessian does not depend on them

    def joint(theta):
        energy = F.cross_entropy(x @ theta[:12].view(3, 4).T + theta[12:], labels, reduction="sum")
        return energy + 0.5 * PRIOR * theta.square().sum()

    hessian = torch.func.hessian(joint)(flat(q.mean.values()))
    root = q.families[0].root
    torch.testing.assert_close(root @ root.T, hessian, rtol=1e-10, atol=1e-12)
    singles = torchngvi.network(copy.deepcopy(model), N, prior_precision=PRIOR, temperature=1.0)
    singles.laplace(uneven(x))
    torch.testing.assert_close(1 / flat(singles.variance.values()), hessian.diagonal(), rtol=1e-10, atol=0)


def test_rows_and_singles_of_one_network():
    """The families of a network are each given their part of one matrix."""
    model, x = net(), inputs()
    structure = {"2.*": "rows", "*": "diagonal"}
    q = torchngvi.network(model, N, structure, prior_precision=PRIOR, temperature=1.0)
    q.laplace(uneven(x))
    body = gauss_newton(model, x, Categorical(), ["0.weight", "0.bias"]).diagonal() + PRIOR
    torch.testing.assert_close(1 / flat(q.variance[name] for name in ("0.weight", "0.bias")), body, rtol=1e-10, atol=0)
    rows = next(family for family in q.each() if type(family).__name__ == "Rows")
    whole = gauss_newton(model, x, Categorical(), ["2.weight", "2.bias"])
    for k in range(3):
        own = [*range(5 * k, 5 * k + 5), 15 + k]
        expected = whole[own][:, own] + PRIOR * torch.eye(6, dtype=torch.float64)
        torch.testing.assert_close(rows.root[k] @ rows.root[k].T, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.accuracy
def test_labels_that_are_drawn_have_the_same_mean():
    model, x = net(), inputs()
    exact = torchngvi.network(copy.deepcopy(model), N, temperature=1.0)
    exact.laplace(uneven(x))
    q = torchngvi.network(model, N, temperature=1.0)
    errors = []
    for labels in (5, 500):
        q.laplace(uneven(x), labels=labels)
        errors.append((flat(exact.variance.values()) / flat(q.variance.values())).log().square().mean().sqrt())
    assert errors[1] < 0.06  # √(2/1500), times a kurtosis
    assert 5 < errors[0] / errors[1] < 20  # ten, of a hundred times as many labels


def test_a_likelihood_of_ones_own_has_its_labels_drawn():
    class Own(Gaussian):
        def curvature_terms(self, output):
            return None

    model, x = net(2), inputs()
    q = torchngvi.network(model, 2 * N, temperature=1.0, likelihood=Own(0.3))
    with pytest.warns(UserWarning, match="24,000 labels, more than num_data=80"):
        q.laplace([(x, x)] * 300)
    exact = gauss_newton(model, x, Gaussian(0.3), q.names).diagonal() + 1
    torch.testing.assert_close(1 / flat(q.variance.values()), exact, rtol=0.35, atol=0)


def test_mean_mode_gradients_and_statistics_stay():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3)).double()
    q = torchngvi.network(model, N)
    with torch.no_grad():
        for p in model.parameters():  # trained by a loop that knows of no posterior
            p.add_(0.1 * torch.randn_like(p))
    model.train()
    before = copy.deepcopy(model.state_dict())
    q.laplace(uneven(inputs()))
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(q.mean[name], before[name]) for name in q.mean)
    first = flat(q.variance.values())
    q.laplace(uneven(inputs()))  # once more is the same
    assert torch.equal(flat(q.variance.values()), first)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_an_optimizer_goes_on_from_it(structure):
    model, x = net(), inputs()
    y = torch.arange(N) % 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-12, weight_decay=0.0)
    q = torchngvi.network(model, N, structure)
    torchngvi.attach(optimizer, q, radius=1e-12, curvature=SampledLabels(every=1))
    q.laplace(uneven(x, y))
    before = flat(q.variance.values())
    for p, m in zip(q.parameters_of_network, q.mean.values(), strict=True):
        assert not torch.equal(p, m)  # a draw again
    train(model, optimizer, 3, batch=(x, y))
    ratio = flat(q.variance.values()) / before
    assert not torch.equal(ratio, torch.ones_like(ratio))
    assert ratio.log().abs().max() < 0.5  # by some of the way, not to the start, 3 and more away
    start = flat(torchngvi.network(net(), N).variance.values())
    assert (start / before).log().abs().max() > 3


@pytest.mark.parametrize("labels", [None, 3])
@pytest.mark.parametrize("structure", ["diagonal", {"2.*": "dense", "*": "diagonal"}])
def test_under_no_grad_it_is_the_same(labels, structure):
    found = []
    for recorded in (True, False):
        q = torchngvi.network(net(), N, structure)
        with torch.set_grad_enabled(recorded):
            q.laplace(uneven(inputs()), labels=labels)
        found.append(flat(q.variance.values()))
    assert torch.equal(*found)


def test_a_state_that_is_loaded_has_seen_data():
    model, x = net(), inputs()
    q = torchngvi.network(model, N)
    q.laplace(uneven(x))
    other = torchngvi.network(copy.deepcopy(model), N)
    other.load_state_dict(q.state_dict())
    assert torch.equal(other.predict(x), q.predict(x))


def test_a_trained_network_is_calibrated():
    """The whole way: AdamW, laplace, calibrate; ahead of the network alone, which has overfitted."""
    torch.manual_seed(0)
    x = torch.randn(800, 4)
    y = ((x @ torch.randn(4, 3)) + torch.randn(800, 3)).argmax(1)
    model = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 300, batch=(x[:100], y[:100]))
    q = torchngvi.network(model.eval(), 100)
    q.laplace([(x[:100], y[:100])])
    torchngvi.calibrate(q, [(x[100:300], y[100:300])])
    alone = F.cross_entropy(model(x[300:]), y[300:]).item()
    assert -q.log_prob(x[300:], y[300:]).mean() < alone - 0.1
    assert q.predictive(x[300:]).epistemic.mean() > 0.01


def test_parts_of_a_batch(monkeypatch):
    """Examples that do not fit into memory together are taken some at a time."""
    found = []
    for numbers in (1, 400, 2**24):
        monkeypatch.setattr("torchngvi.networks.laplace.ENTRIES_AT_ONCE", numbers)
        q = torchngvi.network(net(), N)
        q.laplace(uneven(inputs()))
        found.append(flat(q.variance.values()))
    torch.testing.assert_close(found[0], found[2], rtol=1e-13, atol=0)
    torch.testing.assert_close(found[1], found[2], rtol=1e-13, atol=0)


def test_a_posterior_that_has_seen_no_data_says_so():
    model, x = net().float(), inputs().float()
    q = torchngvi.network(model, N)
    asked = [
        lambda: q.predict(x),
        lambda: q.predictive(x),
        lambda: q.log_prob(x, torch.arange(N) % 3),
        lambda: q.outputs(x, 2),
        lambda: q.predictive(x, 2),
        lambda: torchngvi.calibrate(q, [(x, torch.arange(N) % 3)], samples=2, largest=q.temperature),
    ]
    text = r"The posterior has seen no data: .* Train it with .*torchngvi.attach, .* call q.laplace\(loader\)"
    for ask in asked:
        with pytest.warns(UserWarning, match=text) as told:
            ask()
        assert len(told) == 1
        assert told[0].filename == __file__  # where it was asked
    q.laplace([(x, x)])
    for ask in asked[:-1]:
        ask()  # warnings are errors


def test_it_does_not_say_so_after_a_step():
    model, x = net().float(), inputs().float()
    q = torchngvi.network(model, N)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    torchngvi.attach(optimizer, q, steps=10)
    train(model, optimizer, 1)
    q.predict(x)
