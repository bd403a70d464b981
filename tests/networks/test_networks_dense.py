"""The dense family of a last layer: identities with matrices and with the dense world."""

import pytest
import torch
import torch.nn.functional as F
from test_networks import Told, adamw, data, flat, like, means, mlp, train
from torch import nn

from torchngvi import NaturalGaussian, NaturalGradientVI
from torchngvi.expectations import Hessian
from torchngvi.networks import VON, SampledLabels, attach, network
from torchngvi.rules import NaturalGradient
from torchngvi.stepsizes import Constant

CLOSE = {"rtol": 1e-12, "atol": 1e-13}

untrained = pytest.mark.filterwarnings("ignore:The posterior has seen no data:UserWarning")


def dense(n=30, delta=0.02):
    """A q over a small layer with a random curvature, its family, and its dense covariance."""
    torch.manual_seed(2)
    q = network(nn.Linear(2, 3, dtype=torch.float64), n, "dense", prior_precision=n * delta)
    family = q.families[0]
    half = torch.randn(9, 9, dtype=torch.float64)
    family.curvature.copy_(half @ half.mT)
    family.bounded = False
    family.refresh_()
    return q, family, torch.linalg.inv(n * (half @ half.mT + delta * torch.eye(9, dtype=torch.float64)))


def test_verbs_are_those_of_the_matrix():
    _, family, V = dense()
    g = [torch.randn_like(m) for m in family.mean]
    torch.testing.assert_close(flat(family.natural(g)), 30 * V @ flat(g), **CLOSE)
    torch.testing.assert_close(flat(family.variances()), V.diagonal(), **CLOSE)
    torch.testing.assert_close(family.log_det(), torch.logdet(V), **CLOSE)
    torch.testing.assert_close(
        flat(family.whitened(g)).square().sum(), flat(g) @ torch.linalg.solve(V, flat(g)), **CLOSE
    )
    torch.testing.assert_close(flat(family.whitened(family.colored(g))), flat(g), **CLOSE)


def test_draws_have_the_covariance():
    q, family, V = dense()
    draws = torch.stack([flat(family.colored(family.noise(0, k))) for k in range(4_000)])
    error = (draws.mT @ draws / len(draws) - V) / (V.diagonal().outer(V.diagonal()) + V.square()).sqrt()
    assert error.abs().max() < 5 / len(draws) ** 0.5


def test_a_step_is_that_of_vn():
    """Of a quadratic log joint, against `NaturalGaussian` with a full covariance."""
    rho, delta = 0.3, 0.02
    q, family, V = dense(delta=delta)
    half, b = torch.randn(9, 9, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    H, m = 30 * (half @ half.mT + delta * torch.eye(9, dtype=torch.float64)), means(q).clone()
    other = NaturalGaussian(9, mean=m, scale=torch.linalg.cholesky(V), dtype=torch.float64)

    def log_joint(t):
        return -0.5 * torch.einsum("...i,ij,...j->...", t - b, H, t - b)

    NaturalGradientVI(other, NaturalGradient(), lr=rho, step_size=Constant(), estimator=Hessian(2)).step(log_joint)
    rows = [part.mT.unflatten(-1, p.shape) for part, p in zip(half.split(family.sizes), family.mean, strict=True)]
    family.absorb_(family.statistics(rows, 9.0), rho)
    family.refresh_()
    torch.testing.assert_close(torch.linalg.inv(family.root @ family.root.mT), other.covariance, rtol=1e-10, atol=1e-12)
    step = flat(family.natural(like(H @ (m - b) / 30, family.mean)))
    torch.testing.assert_close(m - rho * step, other.mean, rtol=1e-10, atol=1e-12)


def test_many_labels_are_observed_in_part():
    """A quarter of 1,024 labels, with the same mean: where all are alike it is the same to rounding."""
    model = mlp(torch.float64)
    seen = []
    for count in (1, 1024):
        other = mlp(torch.float64)
        other.load_state_dict(model.state_dict())
        q = network(other, 2000, {"2.*": "dense"}, likelihood=Told(torch.zeros(count, dtype=torch.long)))
        SampledLabels().after_forward(q, other(data(1, torch.float64)[0].expand(count, 4)))
        q.refresh_()
        seen.append(q.families[0].curvature)
    torch.testing.assert_close(seen[0], seen[1])


@pytest.mark.parametrize("bounded", [False, True])
def test_the_start_bounds_as_that_of_single_weights(bounded):
    q, family, _ = dense()
    single = network(nn.Linear(2, 3, dtype=torch.float64), 30, prior_precision=0.6).families[0]
    h = torch.rand(9, dtype=torch.float64)
    family.curvature.copy_(h.diag())
    single.absorb_(like(h, single.mean), 1.0)
    for one in (family, single):
        one.bounded = bounded
        one.refresh_()
    torch.testing.assert_close(flat(family.variances()), flat(single.variances()), **CLOSE)


def test_rows_are_the_blocks_of_the_dense_family():
    """After the same labels: curvature, root, and every verb those of the dense one without blocks between classes."""
    places = [[2 * row, 2 * row + 1, 6 + row] for row in range(3)]  # two weights and the bias of each of three rows
    found = []
    for structure in ("dense", "rows"):
        torch.manual_seed(2)
        layer = nn.Linear(2, 3, dtype=torch.float64)
        q = network(layer, 30, structure, prior_precision=0.6)
        for k in range(5):
            q.draw = k
            SampledLabels(every=1).after_forward(q, layer(data(20, torch.float64)[0][:, :2]))
        q.refresh_()
        found.append(q.families[0])
    dense, rows = found
    whole = torch.zeros_like(dense.curvature)
    for row, place in enumerate(places):
        torch.testing.assert_close(rows.curvature[row], dense.curvature[place][:, place], **CLOSE)
        whole[torch.tensor(place)[:, None], place] = dense.curvature[place][:, place]
    assert (whole - dense.curvature).abs().max() > 1e-3
    dense.curvature.copy_(whole)
    for bounded in (True, False):
        for family in found:
            family.bounded = bounded
            family.refresh_()
        g = [torch.randn_like(m) for m in dense.mean]
        torch.testing.assert_close(flat(rows.natural(g)), flat(dense.natural(g)), **CLOSE)
        lengths = [flat(family.whitened(g)).norm() for family in found]  # the roots are of another order of the weights
        torch.testing.assert_close(*lengths, **CLOSE)
        torch.testing.assert_close(flat(rows.variances()), flat(dense.variances()), **CLOSE)
        torch.testing.assert_close(rows.log_det(), dense.log_det(), **CLOSE)
    torch.testing.assert_close(flat(rows.whitened(rows.colored(g))), flat(g), **CLOSE)


@pytest.mark.accuracy
@untrained
def test_the_bound_of_rows_is_between_those_of_single_weights_and_all():
    """Of a softmax regression on coarse digits with the exact Hessian of 170 weights, about the same mean."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x, y = torch.tensor(digits.images).float() / 16, torch.tensor(digits.target)
    x = x.view(-1, 4, 2, 4, 2).mean((2, 4)).view(-1, 16)
    layer = nn.Linear(16, 10)
    nn.init.zeros_(layer.weight), nn.init.zeros_(layer.bias)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1, weight_decay=1 / len(x))
    for _ in range(200):
        optimizer.zero_grad()
        F.cross_entropy(layer(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        p, inputs = layer(x).softmax(1).double(), F.pad(x, (0, 1), value=1.0).double()
    of_classes = p.diag_embed() - p[:, :, None] * p[:, None, :]
    H = torch.einsum("nab,ni,nj->aibj", of_classes, inputs, inputs) / len(x)  # exactly, with the bias last
    order = torch.tensor([17 * k + i for k in range(10) for i in range(16)] + [17 * k + 16 for k in range(10)])
    whole = H.reshape(170, 170)[order][:, order].float()
    rows = torch.stack([H[k, :, k] for k in range(10)]).float()
    bounds = []
    for structure, seen in [
        ("diagonal", like(whole.diagonal(), list(layer.parameters()))),
        ("rows", [rows]),
        ("dense", [whole]),
    ]:
        q = network(layer, len(x), structure)
        q.families[0].settle_(seen)
        log_likelihood = torch.stack([q.likelihood.log_prob(one, y).sum() for one in q.outputs(x, 64)])
        bounds.append(float(log_likelihood.mean() - q.kl()))
        q.release()
    assert bounds[0] + 20 < bounds[1] < bounds[2] - 2, bounds


@untrained
@pytest.mark.parametrize("structure", ["dense", "rows"])
@pytest.mark.parametrize("make", ["attach", "von"])
def test_a_network_with_a_dense_head_is_trained(make, structure):
    model = mlp()
    q = network(model, 100, {"2.*": structure, "*": "diagonal"})
    optimizer = VON(q, steps=60) if make == "von" else adamw(model)
    if make == "attach":
        attach(optimizer, q, steps=60)
    x, y = data(100)
    before = -q.log_prob(x, y).mean()
    train(model, optimizer, 60, batch=(x, y))
    assert -q.log_prob(x, y).mean() < 0.8 * before
    assert q.kl().isfinite()
    model[2].requires_grad_(False)
    optimizer.zero_grad()
    frozen = q.variance["2.weight"].clone()
    train(model, optimizer, 12)
    torch.testing.assert_close(q.variance["2.weight"], frozen)


@pytest.mark.parametrize(("structure", "shape"), [("dense", (303, 303)), ("rows", (3, 101, 101))])
def test_a_curvature_that_rounding_leaves_indefinite(structure, shape):
    """Many data and large features: the root is that of the matrix, up to rounding, and variances stay the prior's."""
    torch.manual_seed(0)
    q = network(nn.Linear(100, 3), 10**6, structure)
    family = q.families[0]
    v = 30 * torch.randn(5, *shape[:-1])
    family.curvature.copy_(torch.einsum("s...i,s...j->...ij", v, v))
    H = family.curvature.double() + 1e-6 * torch.eye(shape[-1], dtype=torch.float64)
    assert torch.linalg.cholesky_ex(H)[1].any()  # what this test is about
    family.bounded = False
    family.refresh_()
    root = family.root.double()
    sizes = H.diagonal(dim1=-2, dim2=-1).sqrt()
    error = (root @ root.mT / 1e6 - H).abs() / (sizes[..., :, None] * sizes[..., None, :])
    assert error.max() < 1e-4
    variance = torch.cat([part.flatten() for part in family.variances()])
    assert variance.min() > 0
    assert variance.max() < 1.0  # 1/λ


@pytest.mark.parametrize("structure", ["dense", "rows"])
def test_the_length_of_a_move_is_of_what_was_observed(structure):
    """N dmᵀ(H + δ)dm, without the bound that the width has in training."""
    torch.manual_seed(0)
    q = network(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), 50, {"2.*": structure})
    family = next(iter(q.each()))
    root = torch.randn_like(family.curvature)
    family.curvature.copy_(root @ root.mT / 1e4)
    family.refresh_()
    moves = [torch.randn_like(m) for m in family.mean]
    flat = family._flat(moves)
    expected = 50 * ((flat * (family.curvature @ flat[..., None])[..., 0]).sum() + flat.square().sum() / 50)
    torch.testing.assert_close(family.departure(moves, lambda place, square: None), expected)
    assert sum(w.square().sum() for w in family.whitened(moves)) > 2 * expected
