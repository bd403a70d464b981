"""Classes that weigh more or less in the loss: the curvature, predictions, calibration, and what a script shows."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchngvi.errors import CalibrationWarning
from torchngvi.networks import Categorical, attach, calibrate, network

pytestmark = pytest.mark.filterwarnings("error")
WEIGHTS = torch.tensor([1.0, 2.0, 5.0])


def linear():
    torch.manual_seed(0)
    return nn.Linear(2, 3)


def data(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 2, generator=generator), torch.arange(rows) % 3


def expected(model, x):
    """The Hessian and the gradient of Σ w(y) l(y)/Σ w(y), numerator and denominator under π ∝ p/w, by each label."""
    names, held = zip(*model.named_parameters(), strict=True)
    sizes, shapes = [p.numel() for p in held], [p.shape for p in held]
    theta = torch.cat([p.detach().flatten() for p in held])

    def loss(theta, row, k):
        parts = [part.view(shape) for part, shape in zip(theta.split(sizes), shapes, strict=True)]
        output = torch.func.functional_call(model, dict(zip(names, parts, strict=True)), row)
        return F.cross_entropy(output[None], torch.tensor([k]), weight=WEIGHTS, reduction="sum")

    hessian, gradient, total = 0.0, 0.0, 0.0
    for row in x:
        of_labels = model(row).detach().softmax(-1) / WEIGHTS
        for k, share in enumerate(of_labels / of_labels.sum()):
            hessian = hessian + share * torch.autograd.functional.hessian(lambda t, r=row, k=k: loss(t, r, k), theta)
            gradient = gradient + share * torch.func.grad(loss)(theta, row, k)
            total = total + share * WEIGHTS[k]
    return hessian / total, gradient / total


def force(monkeypatch, wanted):
    """Let labels be drawn as they are wanted, batch after batch."""
    each = iter(wanted)

    def fill(noise, generator=None):
        return noise.fill_(1e30).scatter_(-1, torch.tensor(next(each))[:, None], 1e-30)

    monkeypatch.setattr(torch.Tensor, "exponential_", fill)


def test_sampled_labels_over_all_combinations_are_the_weighted_gauss_newton_matrix(monkeypatch):
    """Σ over labels y of p(y) B ĝĝᵀ, exactly; under the same frequencies the weighted loss has no gradient."""
    model, (x, _) = linear(), data(3)
    p, likelihood = model(x).detach().softmax(-1), Categorical(weights=WEIGHTS)
    found, mean = 0.0, 0.0
    for labels in itertools.product(range(3), repeat=3):
        force(monkeypatch, [labels])
        losses = likelihood.sampled_losses(model(x), torch.Generator())
        each = torch.autograd.grad(losses.mean(), list(model.parameters()))
        g, share = torch.cat([part.flatten() for part in each]), p[range(3), labels].prod()
        found, mean = found + share * 3 * g[:, None] * g, mean + share * g
    hessian, gradient = expected(model, x)
    torch.testing.assert_close(found, hessian, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(mean, torch.zeros(9), rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, torch.zeros(9), rtol=0, atol=1e-6)
    loss = F.cross_entropy(model(x), torch.tensor([0, 1, 2]), weight=WEIGHTS)  # of the units of this loss
    same = (WEIGHTS * F.cross_entropy(model(x), torch.tensor([0, 1, 2]), reduction="none")).sum() / WEIGHTS.sum()
    torch.testing.assert_close(loss, same)


@pytest.mark.parametrize("kind", ["diagonal", "dense", "rows"])
def test_the_laplace_approximation_is_that_of_the_weighted_loss(kind, monkeypatch):
    """By the expectation, and by one drawn label each over all their combinations, with batches of two sizes."""
    x, batches = data(3)[0], [(data(3)[0][:2], 0), (data(3)[0][2:], 0)]

    def precision(labels):
        q = network(linear(), 3, kind, temperature=1.0, likelihood=Categorical(weights=WEIGHTS))
        q.laplace(batches, labels=labels)
        return torch.cat([1 / v.flatten() for v in q.variance.values()])

    whole = 3 * expected(linear(), x)[0] + torch.eye(9)
    if kind == "diagonal":
        whole = whole.diag().diag()
    if kind == "rows":  # a block for each class: its two weights and its bias
        same = torch.tensor([0, 0, 1, 1, 2, 2, 0, 1, 2])
        whole = whole * (same[:, None] == same)
    torch.testing.assert_close(precision(None), 1 / whole.inverse().diag(), rtol=1e-4, atol=0)
    if kind == "diagonal":
        p, mean = linear()(x).detach().softmax(-1), 0.0
        for a, b, c in itertools.product(range(3), repeat=3):
            force(monkeypatch, [(a, b), (c,)])
            mean = mean + p[range(3), (a, b, c)].prod() * precision(1)
        torch.testing.assert_close(mean, whole.diag(), rtol=1e-4, atol=0)


def test_equal_weights_are_none():
    """To rounding, whatever they are: in the curvature of a training, of laplace, and in calibrate."""

    def run(weights):
        model = linear()
        q = network(model, 30, likelihood=Categorical(weights=weights))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
        attachment = attach(optimizer, q, steps=20)
        x, y = data(30)
        for _ in range(20):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y, weight=weights).backward()
            optimizer.step()
        attachment.remove()
        trained = torch.cat([v.flatten() for v in q.variance.values()])
        q.laplace([(x, y)])
        with pytest.warns(CalibrationWarning, match="as good as the smallest one"):  # of 30 labels
            tried = list(calibrate(q, [(x, y)], samples=4).tried.values())
        return trained, torch.cat([v.flatten() for v in q.variance.values()]), torch.tensor(tried), q.predict(x)

    for one, other in zip(run(torch.full((3,), 7.0)), run(None), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_predictions_are_without_weights_and_calibrate_minimises_the_weighted_loss():
    model, (x, y) = linear(), data(30)
    q = network(model, 30, temperature=0.0, likelihood=Categorical(weights=WEIGHTS.tolist()))
    q.laplace([(x, y)])
    torch.testing.assert_close(q.predict(x, samples=1), model(x).detach().softmax(-1))
    each = q.log_prob(x, y, samples=1)
    torch.testing.assert_close(each, -F.cross_entropy(model(x), y, reduction="none").detach())
    q.temper_(0.5)
    weights = WEIGHTS[y]
    with pytest.warns(CalibrationWarning, match="as good as the smallest one"):  # of a network without a training
        found = calibrate(q, [(x[:7], y[:7]), (x[7:], y[7:])], samples=4)
    each = q.log_prob(x, y, samples=4)
    assert found.nll == pytest.approx(-((weights * each).sum() / weights.sum()).item(), rel=1e-5)


@pytest.mark.parametrize("rows", [20, 1000])  # more than a part of them is looked at
@pytest.mark.parametrize("weights", [None, WEIGHTS, torch.tensor([1.0, 1.0, 3.0])])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weights_of_the_loss_are_those_of_the_likelihood(rows, weights, reduction):
    """Or a warning says so, as it does of a sum."""
    torch.manual_seed(1)
    model, x = nn.Linear(2, 3), data(rows)[0]
    y = torch.randint(3, (rows,))
    q = network(model, 5000, likelihood=Categorical(weights=WEIGHTS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
    attach(optimizer, q, steps=10)
    F.cross_entropy(model(x), y, weight=weights, reduction=reduction).backward()
    if weights is WEIGHTS and reduction == "mean":
        optimizer.step()
        return
    text = "weighs its labels .* in all" if weights is WEIGHTS else r"other weights than those of Categorical\(weights"
    with pytest.warns(UserWarning, match=text) as caught:
        optimizer.step()
    assert len(caught) == 1


def test_images_of_labels_have_their_classes_second():
    """The numbers of one label a row, at every place."""
    output, rows = torch.randn(2, 3, 4, 5), Categorical(weights=WEIGHTS)
    images, flat = Categorical(1, WEIGHTS), output.movedim(1, -1).reshape(-1, 3)
    labels = torch.randint(3, (2, 4, 5))
    torch.testing.assert_close(images.weigh(output).flatten(), rows.weigh(flat))
    torch.testing.assert_close(images.weigh(output, labels).flatten(), rows.weigh(flat, labels.flatten()))
    torch.testing.assert_close(images.curvature_terms(output).reshape(-1, 3), rows.curvature_terms(flat))
    losses = [
        kind.sampled_losses(at, torch.Generator().manual_seed(0)) for kind, at in ((images, output), (rows, flat))
    ]
    assert losses[0].shape == (2, 4, 5)
    assert losses[1].shape == (40,)
