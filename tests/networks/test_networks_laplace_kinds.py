"""The Laplace approximation of networks of all kinds: what it computes, what it refuses, and with what words."""

import pytest
import torch
from torch import nn

import torchngvi
from torchngvi.errors import InputError
from torchngvi.networks import Gaussian, HeteroscedasticGaussian
from torchngvi.networks.laplace import each_tensor


def inputs(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def made(model, n, **keywords):
    return torchngvi.network(model, n, temperature=1.0, **keywords)


def first(returned):
    return returned[0] if isinstance(returned, tuple) else returned


def check_precision(q, *given, **named):
    """N H + 1 by name, from one backward pass for each term of each label."""
    terms = q.likelihood.curvature_terms(first(q.model.eval()(*given, **named))).flatten()
    totals = [torch.zeros_like(p) for p in q.parameters_of_network]
    for term in terms:
        each = torch.autograd.grad(term, q.parameters_of_network, retain_graph=True, materialize_grads=True)
        totals = [total + g.square() for total, g in zip(totals, each, strict=True)]
    for name, total in zip(q.names, totals, strict=True):
        rtol = 1e-10 if total.dtype == torch.float64 else 2e-5
        torch.testing.assert_close(1 / q.variance[name], total + 1, rtol=rtol, atol=0)


class Scaled(nn.Module):
    """A parameter without dimensions, before another one."""

    def __init__(self):
        super().__init__()
        self.gain, self.head = nn.Parameter(torch.tensor(1.3)), nn.Linear(4, 3)

    def forward(self, x, shift=None, sign=1):
        return sign * self.gain * self.head(x if shift is None else x + shift)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens).tanh())


class Sequence(nn.Module):
    """Logits of three classes for each of some tokens, returned beside something else."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 3)

    def forward(self, tokens, shift):
        return self.head(self.embedding(tokens).cumsum(1).tanh() + shift[:, None, None]), "state"


IMAGES = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 4)]
KINDS = {  # the network, its inputs, and the number of labels
    "scalar": (Scaled, inputs(6, 4), 6),
    "tied": (Tied, torch.arange(12).view(4, 3) % 6, 12),
    "weight norm": (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))), inputs(6, 4), 6),
    "encoder": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 1, 5, batch_first=True), nn.Linear(4, 2)),
        inputs(3, 2, 4),
        6,
    ),
    "tokens": (Sequence, (torch.arange(35).view(5, 7) % 6, inputs(5)), 35),
    "names": (Sequence, {"shift": inputs(5), "tokens": torch.arange(35).view(5, 7) % 6}, 35),
    "images": (lambda: nn.Sequential(*IMAGES), inputs(5, 1, 6, 6), 5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_precision_is_that_of_single_terms(kind):
    torch.manual_seed(0)
    make, given, labels = KINDS[kind]
    given = each_tensor(given, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    q = made(make().double(), labels)
    q.laplace([(given, torch.zeros(labels))], read=first)
    if isinstance(given, dict):
        check_precision(q, **given)
    else:
        check_precision(q, *(given if isinstance(given, tuple) else [given]))


@pytest.mark.accuracy
def test_a_head_with_means_and_standard_deviations():
    """laplace has the precision of single terms, and calibrate finds that the noise of data is √8 times as large."""
    generator, likelihood = torch.Generator().manual_seed(0), HeteroscedasticGaussian()
    x = torch.randn(400, 2, generator=generator)
    model, noise = nn.Linear(2, 2), torch.randn(400, 1, generator=generator)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1.0], [0.5, 0.0]]))
        model.bias.copy_(torch.tensor([0.0, -2.0]))
        y = x @ model.weight[:1].T + (0.5 * x[:, :1] - 2).exp() * noise * 8**0.5
    q = made(model, 400, likelihood=likelihood)
    q.laplace([(x[:150], y), (x[150:], y)])
    check_precision(q, x)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
    attachment = torchngvi.attach(optimizer, q, steps=10, radius=1e-8)
    model.train()
    for _ in range(10):
        optimizer.zero_grad()
        likelihood.loss(model(x), y).backward()
        optimizer.step()
    attachment.remove()
    found = torchngvi.calibrate(q, [(x, y)], samples=4)
    assert found.factor == pytest.approx(8**0.5)
    predicted = q.predictive(x, samples=4)
    assert predicted.mean.shape == q.predict(x).shape == (400, 1)
    torch.testing.assert_close(predicted.aleatoric, 8 * (x[:, :1] - 4).exp(), rtol=0.3, atol=0)
    assert found.nll == pytest.approx(-q.log_prob(x, y).mean().item(), abs=0.01)


def test_a_noise_that_is_learned_and_is_no_part_of_q():
    torch.manual_seed(0)
    model, log_scale, x = nn.Linear(4, 2), nn.Parameter(torch.tensor(-0.7)), inputs(6, 4)
    q = made(model, 12, likelihood=Gaussian(lambda: log_scale.exp()))
    q.laplace([(x[:4], x), (x[4:], x)])
    check_precision(q, x)
    assert log_scale.grad is None


def test_batches_of_other_kinds():
    """What is no tensor is the same for all examples; a list is one argument, an empty batch is none."""
    torch.manual_seed(0)
    model, x = Scaled(), inputs(6, 4)
    q = made(model, 6)
    q.laplace([((x, None), x)])
    expected = 1 / q.variance["head.weight"]
    for given in ({"x": x, "sign": 1}, (x, None, 1), (x, torch.zeros(6, 4))):
        q.laplace([(given, x)])
        torch.testing.assert_close(1 / q.variance["head.weight"], expected, rtol=1e-5, atol=0)
    q.laplace((part, part) for part in (x[:0], x[:4], x[4:], x[:0]))
    torch.testing.assert_close(1 / q.variance["head.weight"], expected, rtol=1e-5, atol=0)

    class Listed(nn.Linear):
        def forward(self, parts):
            return super().forward(parts[0] + parts[1])

    model, alone = Listed(4, 3), nn.Linear(4, 3)
    alone.load_state_dict(model.state_dict())
    q, other = made(model, 6), made(alone, 6)
    q.laplace([([x, x], x)])
    other.laplace([(2 * x, x)])
    torch.testing.assert_close(q.variance["weight"], other.variance["weight"], rtol=1e-5, atol=0)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.GRU(4, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


class OnTime(nn.Module):
    """Time first, examples second."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x.cumsum(0))


@pytest.mark.parametrize("model", [OnTime, lambda: nn.BatchNorm1d(4, track_running_stats=False)])
def test_examples_that_meet_are_refused(model):
    torch.manual_seed(0)
    q, x = made(model(), 6), inputs(3, 2, 4) if model is OnTime else inputs(6, 4)
    before = q.variance["weight" if "weight" in q.names else "head.weight"].clone()
    with pytest.raises(InputError, match="others alone than in its batch: examples meet .* Say labels=1, which draws"):
        q.laplace([(x, x)])
    assert torch.equal(q.variance["weight" if "weight" in q.names else "head.weight"], before)
    q.laplace([(x, x)], labels=1)


def test_what_torch_func_cannot_do_says_what_can():
    torch.manual_seed(0)
    q, x = made(Recurrent(), 6), inputs(6, 5, 4)
    with pytest.raises(InputError, match="torch.func cannot take the derivatives .* Say labels=1, which draws labels"):
        q.laplace([(x, x)])
    q.laplace([(x, x)], labels=1)


def test_more_derivatives_than_memory(monkeypatch):
    monkeypatch.setattr("torchngvi.networks.laplace._MOST", 40)
    q, x = made(nn.Linear(4, 3), 6), inputs(6, 4)
    with pytest.raises(InputError, match="takes 45 derivatives of an example; say labels=1, which draws"):
        q.laplace([(x, x)])


@pytest.mark.parametrize("labels", [None, 3])
def test_more_labels_than_num_data_are_told(labels):
    """Two numbers a row are two labels each."""
    q, x = made(nn.Linear(4, 2), 6, likelihood=Gaussian(0.5)), inputs(6, 4)
    with pytest.warns(UserWarning, match="has 12 labels, more than num_data=6, by which .* every number") as told:
        q.laplace([(x[:2], x), (x[2:], x)], labels=labels)
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match="12 labels, more than num_data=6, by which their mean log likelihood"):
        q.log_evidence([(x, inputs(6, 2))])
    made(nn.Linear(4, 2), 12, likelihood=Gaussian(0.5)).laplace([(x, x)], labels=labels)


@pytest.mark.accuracy
def test_half_precision_does_not_vanish():
    """Gradients of the mean loss of 4,096 labels are below the smallest number of half precision."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), (1e-6 * inputs(4096, 4)).half()
    exact = made(model, 4096, prior_precision=1e-13)
    exact.laplace([(x.float(), x)])
    other = nn.Linear(4, 3)
    other.load_state_dict(model.state_dict())
    q = made(other.half(), 4096, prior_precision=1e-13)
    q.laplace([(x, x)], labels=400)
    ratio = exact.variance["weight"] / q.variance["weight"]
    torch.testing.assert_close(ratio, torch.ones(3, 4), rtol=0, atol=0.3)


def test_the_warning_is_given_to_code_without_a_name():
    q = made(nn.Linear(4, 3), 6)
    with pytest.warns(UserWarning, match="The posterior has seen no data"):
        exec("q.predict(x)", {"q": q, "x": inputs(2, 4)})
