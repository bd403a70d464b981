"""The length of a step: a radius for the network, a limit for each unit of a layer, and no learning rate."""

import math

import pytest
import torch
import torch.nn.functional as F
from test_networks import adamw, adamw_of, data, fit_digits, flat, like, means, mlp, sgd, train
from torch import nn

from torchngvi import networks
from torchngvi.networks import Curvature, Gaussian, StepLength, attach, network
from torchngvi.networks.layout import find_units

S = 20


class Read(nn.Module):
    """Rows of numbers of what a layer returns."""

    def forward(self, output):
        return (output[0] if isinstance(output, tuple) else output).flatten(1)


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


class Tied(nn.Module):
    """An embedding whose matrix is that of the outputs too, which have a bias of their own."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(self.embedding(x))


class Adapter(nn.Module):
    """Matrices of low rank beside a frozen layer, one of them 0, and a scale."""

    def __init__(self):
        super().__init__()
        self.base, self.scale = nn.Linear(4, 5).requires_grad_(False), nn.Parameter(torch.tensor(0.3))
        self.A, self.B = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(5, 2))

    def forward(self, x):
        return self.base(x) + self.scale.exp() * (x @ self.A.mT @ self.B.mT)


def zeroed(layer):
    for p in layer.parameters():
        nn.init.zeros_(p)
    return layer


def rows(*names):
    return lambda t: torch.cat([t[name].reshape(len(t[name]), -1) for name in names], 1)


def own(name):
    return lambda t: t[name].reshape(-1, 1)


def outputs_of(groups):
    """The weights into each output channel of a transposed convolution, its second dimension, with its bias."""

    def found(t):
        each = zip(t["weight"].chunk(groups), t["bias"].chunk(groups), strict=True)
        return torch.cat([torch.cat([w.transpose(0, 1).flatten(1), b[:, None]], 1) for w, b in each])

    return found


PAIR, MATRIX = rows("weight", "bias"), [(rows("weight", "bias"), 4)]
GATES = [f"{what}_{of}" for what in ("weight", "bias") for of in ("ih", "hh")]
LAST = rows(*(f"{name}_l0" for name in GATES))
ROWS, IMAGES, STEPS, TOKENS = (7, 4), (7, 4, 3, 3), (7, 2, 4), torch.arange(14).view(7, 2) % 7
KINDS = {  # the layer, its inputs, the number of layers that count, and its units with the inputs that each sums over
    "linear": (lambda: nn.Linear(4, 5), ROWS, 1, MATRIX),
    "zero": (lambda: zeroed(nn.Linear(4, 5)), ROWS, 1, MATRIX),
    "convolution": (lambda: nn.Conv2d(4, 6, 3), IMAGES, 1, [(PAIR, 36)]),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), IMAGES, 1, [(PAIR, 18)]),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 2), IMAGES, 1, [(outputs_of(1), 16)]),
    "transposed groups": (lambda: nn.ConvTranspose2d(4, 6, 2, groups=2), IMAGES, 1, [(outputs_of(2), 8)]),
    "embedding": (lambda: nn.Embedding(7, 4, padding_idx=0), TOKENS, 1, [(rows("weight"), 4)]),
    "attention": (
        lambda: Attention(4, 2),
        STEPS,
        2,
        [(rows("in_proj_weight", "in_proj_bias"), 4), (rows("out_proj.weight", "out_proj.bias"), 4)],
    ),
    "lstm": (lambda: nn.LSTM(4, 3), STEPS, 1, [(LAST, 7)]),
    "gru": (lambda: nn.GRU(4, 3), STEPS, 1, [(LAST, 7)]),
    "cell": (lambda: nn.LSTMCell(4, 3), ROWS, 1, [(rows(*GATES), 7)]),
    "layer norm": (lambda: nn.LayerNorm(4), ROWS, 1, [(PAIR, 2)]),
    "batch norm": (lambda: nn.BatchNorm1d(4), ROWS, 1, [(PAIR, 2)]),
    "group norm": (lambda: nn.GroupNorm(2, 4), ROWS, 1, [(PAIR, 2)]),
    "tied": (Tied, TOKENS, 1, [(rows("embedding.weight"), 4), (own("out.bias"), 1)]),
    "adapter": (Adapter, ROWS, 1, [(rows("A"), 4), (rows("B"), 2), (own("scale"), 1)]),
    "alone": (lambda: nn.PReLU(4), ROWS, 0, [(own("weight"), 1)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_goes_as_far_as_its_share_of_its_first_size(kind):
    """Without a radius that is felt each unit that moves at all moves by pφν, at any learning rate."""
    torch.manual_seed(0)
    make, given, layers, parts = KINDS[kind]
    x = given if isinstance(given, torch.Tensor) else torch.randn(given, dtype=torch.float64)
    model = nn.Sequential(make().double(), Read(), nn.LazyLinear(3, dtype=torch.float64))
    y = torch.randn_like(model(x))
    q, optimizer = network(model, 50, likelihood=Gaussian(1.0)), adamw(model, 1e3)
    attach(optimizer, q, steps=S, length=StepLength(nats=1e30))
    assert q.layers == layers + 1
    parts = [*parts, (rows("2.weight", "2.bias"), model[2].in_features)]
    at = {name.removeprefix("0."): m.clone() for name, m in q.mean.items()}
    sizes = []
    for of, fan_in in parts:
        norms = of(at).norm(dim=1)
        sizes.append(max(norms.square().mean().sqrt().item(), math.sqrt(of(at).shape[1] / (3 * fan_in))))
    for t in range(S):
        train(model, optimizer, 1, loss=F.mse_loss, batch=(x, y))
        now = {name.removeprefix("0."): m.clone() for name, m in q.mean.items()}
        moves, at = {name: now[name] - at[name] for name in now}, now
        limit = StepLength().limit(layers + 1, S) * StepLength().share(t, S)
        for (of, _), size in zip(parts, sizes, strict=True):
            share = of(moves).norm(dim=1) / (limit * size)
            torch.testing.assert_close(share, (share > 0).double(), rtol=1e-6, atol=1e-12)
            assert (share > 0).sum() >= len(share) - (kind == "embedding")  # the padding stays where it is


class Fixed(torch.optim.Optimizer):
    """An optimizer of given moves."""

    def __init__(self, model, moves):
        super().__init__(model.parameters(), {"lr": 1.0})
        self.moves = moves

    @torch.no_grad()
    def step(self):
        for p, u in zip(self.param_groups[0]["params"], self.moves, strict=True):
            p.add_(u)


class OwnIterate(Fixed):
    """One that keeps its own iterate, and therefore has modes."""

    def train(self): ...

    def eval(self): ...


@pytest.mark.parametrize(
    ("kind", "long", "keywords"),
    [
        (Fixed, 100.0, {"steps": S}),
        (Fixed, 1e-6, {"steps": S}),
        (Fixed, 100.0, {"radius": 1e-3}),
        (Fixed, 100.0, {"radius": math.inf}),
        (OwnIterate, 100.0, {"steps": S}),
        (OwnIterate, 1e-6, {"steps": S}),
    ],
)
def test_the_length_of_the_network_comes_first_and_then_each_unit_has_its_limit(kind, long, keywords):
    """One row far and others by 1e-6; nothing is lengthened without steps, nor of an optimizer with its own iterate."""
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(4, 3).double(), data(20, torch.float64)
    moves = [torch.full_like(p, 1e-6) for p in model.parameters()]
    for u in moves:
        u[0] = long
    q, optimizer = network(model, 50), kind(model, moves)
    attachment = attach(optimizer, q, curvature=Curvature(), **keywords)  # δ is all of the curvature
    before = means(q).clone()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    s = math.sqrt(attachment.radius / (0.5 / 50 * flat(moves).square().sum()))
    if kind is OwnIterate or "radius" in keywords:
        s = min(s, 1.0)
    far = s * torch.cat([moves[0], moves[1][:, None]], 1).norm(dim=1) / (StepLength().limit(1, S) * q.scales[0])
    far = far.clamp_min(1.0) if "steps" in keywords else torch.ones_like(far)
    expected = flat([s * moves[0] / far[:, None], s * moves[1] / far])
    torch.testing.assert_close(means(q) - before, expected, rtol=1e-6, atol=1e-14)


def test_no_learning_rate_is_left():
    """The direction alone counts: the same mean at any rate, for each optimizer; and the last moves are short."""

    def run(make):
        model = mlp(torch.float64)
        q = network(model, 100)
        optimizer, ends = make(model.parameters()), [means(q).clone()]
        attach(optimizer, q, steps=S)
        train(model, optimizer, S, between=lambda: ends.append(means(q).clone()))
        return torch.stack(ends)

    kinds = {
        "AdamW": lambda lr: lambda p: torch.optim.AdamW(p, lr=lr, weight_decay=0.0),
        "SGD": lambda lr: lambda p: torch.optim.SGD(p, lr=lr),
        "momentum": lambda lr: lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9),
    }
    for make in kinds.values():
        first, *others = (run(make(lr)) for lr in (1e-2, 1e-4, 1.0, 100.0))
        moves = first.diff(dim=0).norm(dim=1)
        assert 0 < moves[-1] < 0.02 * moves.median()
        for other in others:
            torch.testing.assert_close(other[-1], first[-1], rtol=1e-6, atol=1e-9)


def test_two_optimizers_are_one():
    """One radius for the parameters of both."""

    def run(split):
        model = mlp(torch.float64)
        q = network(model, 100)
        both = [torch.optim.SGD(part.parameters(), lr=0.1) for part in ((model[0], model[2]) if split else (model,))]
        attach(both, q, steps=S)
        train(model, both, S)
        return means(q)

    torch.testing.assert_close(run(True), run(False), rtol=1e-10, atol=1e-12)


def test_other_constants():
    model, length = mlp(), StepLength(nats=0.01, units=1.0, deepest=0.1, warm_up=0.5)
    handle = attach(adamw(model), network(model, 100), steps=100, length=length)
    assert handle.radius == pytest.approx(0.001)
    assert handle.limit == pytest.approx(0.025)
    shares = [handle.length.share(t, 100) for t in (0, 24, 99)]
    assert shares == pytest.approx([0.02, 0.5, StepLength().share(99, 100)])
    assert length.limit(9, 100) == pytest.approx(0.01)


@pytest.mark.accuracy
def test_digits_at_any_rate():
    """README's three lines with five optimizers and no schedule: the test NLL is the same within .015."""
    kinds = [adamw_of(lr) for lr in (1e-3, 3e-3, 1e-2, 1.0)] + [lambda model: sgd(model, 0.03)]
    found = [fit_digits(make, 800, 1000) for make in kinds]
    assert max(found) < min(found) + 0.015, found


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "dense", "rows"])
def test_files_of_release_0_2_have_the_width_that_they_had(structure):
    """They have standard deviations, or a root, in the place of the curvature, and no norms of units."""
    layout = {"2.weight": structure, "*": "diagonal"}
    q = network(mlp(), 100, layout)
    state, expected = q.state_dict(), q.variance
    del state["_extra_state"]["scales"]
    for name in [name for name in state if "curvature" in name or name.endswith("._extra_state")]:
        old, place = state.pop(name), name.rpartition("curvature")[0]
        if "/" in name:
            parameter = name.partition("/")[2].replace("/", ".")
            sd = 0.2 + 0.3 * torch.rand_like(old)  # wider than at the start
            state[f"{place}stddev/{name.partition('/')[2]}"], expected[parameter] = sd, 0.05 * sd**2
        elif "curvature" in name:
            root = torch.randn_like(old).tril() + 3 * torch.eye(old.shape[-1])
            state |= {name: old + 1.0, f"{place}root": root}
            inverse = torch.linalg.inv(root @ root.mT).diagonal(dim1=-2, dim2=-1)
            expected["2.weight"] = 0.05 * like(inverse.flatten(), [expected["2.weight"]])[0]
        elif "0" in name:
            state[name] = 0.3
    other = network(mlp(seed=4), 100, layout)
    other.load_state_dict(state)
    for name, variance in other.variance.items():
        torch.testing.assert_close(variance, expected[name], rtol=1e-4, atol=0)
        assert torch.equal(other.mean[name], q.mean[name])


def test_old_calls_work_and_warn():
    model = mlp()
    with pytest.warns(FutureWarning, match=r"choose_radius is gone: attach\(steps=...\) chooses the length of the"):
        found = networks.choose_radius(lambda steps, radius: 0.0, 100, (1.0, 0.3), share=0.5)
    with pytest.warns(DeprecationWarning, match="fused=True has no effect any more"):
        handle = attach(adamw(model), network(model, 100), steps=100, radius=found.radius, fused=True)
    assert handle.radius == found.radius == 0.012


def test_a_longer_warm_up_leaves_the_end_of_the_schedule_as_it_is():
    for warm_up in (0.02, 0.3, 0.9):
        length = StepLength(warm_up=warm_up)
        assert length.share(980, 1000) == length.share(5000, 1000) == StepLength().share(980, 1000) < 1e-3


def test_weights_that_are_loaded_before_the_training_say_how_large_units_are():
    model = mlp()
    q = network(model, num_data=100)
    model.load_state_dict({name: 10 * w for name, w in model.state_dict().items()})
    attachment = attach(adamw(model), q, steps=S)
    layers, first = (model[0], model[2]), list(q.scales)
    with q.at_mean():
        norms = [torch.cat([layer.weight, layer.bias[:, None]], 1).detach() for layer in layers]
    assert first == pytest.approx([math.sqrt(float(w.square().sum()) / len(w)) for w in norms])
    x, y = torch.randn(20, model[0].in_features), torch.zeros(20, dtype=torch.long)
    F.cross_entropy(model(x), y).backward()
    attachment.optimizers[0].step()
    attachment.remove()
    model.load_state_dict({name: 10 * w for name, w in model.state_dict().items()})
    attach(adamw(model), q, steps=S)
    assert q.scales == first  # those of the start


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_rows_of_an_embedding_that_no_token_picks_stay(kind):
    model = nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(3, 2))
    before, tokens = model[0].weight.detach().clone(), torch.tensor([[0], [1], [2]])
    optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.0)
    q = network(model, 30)
    attach(optimizer, q, steps=20)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), torch.tensor([0, 1, 1])).backward()
        optimizer.step()
    moved = (q.mean["0.weight"] != before).any(1)
    assert moved.tolist() == [True] * 3 + [False] * 3


def test_a_step_without_a_gradient_of_the_data_is_not_lengthened():
    """The prior alone moves the mean by the optimizer's own step, and not by that of the radius."""
    model, (x, y) = nn.Linear(4, 3), data(20)
    q, optimizer = network(model, 50), torch.optim.SGD(model.parameters(), lr=1e-3)
    attach(optimizer, q, steps=10, curvature=networks.GradientNoise(20))
    before = means(q).clone()
    (0 * F.cross_entropy(model(x), y)).backward()
    with pytest.warns(UserWarning, match="leaves 100% of the labels out"):
        optimizer.step()
    torch.testing.assert_close(means(q), before * (1 - 1e-3 / 50))


def test_a_bias_shares_a_unit_and_another_scalar_does_not():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.scale = nn.Parameter(torch.randn(1, 5, 2)), nn.Parameter(torch.ones(1))

    model = Table()
    units, layers = find_units(model, {p: k for k, p in enumerate(model.parameters())})
    assert ([unit.places for unit in units], layers) == ([(0,), (1,)], 1)
    lstm = nn.LSTM(2, 3, num_layers=4)
    assert find_units(lstm, {p: k for k, p in enumerate(lstm.parameters())})[1] == 4
