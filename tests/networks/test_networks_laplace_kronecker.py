"""The Laplace approximation with Kronecker products: exact where the Gauss-Newton matrix is one, else the nearest."""

import copy

import pytest
import torch
from test_networks_laplace import PRIOR, N, flat, gauss_newton, inputs, net, uneven
from torch import nn

import torchngvi
from torchngvi.networks import Categorical, Gaussian
from torchngvi.networks.families import Kronecker


def made(model, n=N, **keywords):
    return torchngvi.network(model, n, "kronecker", prior_precision=PRIOR, temperature=1.0, **keywords)


def covariance(q, k=0):
    """AAᵀ ⊗ BBᵀ of the k-th matrix."""
    A, B = next(family for family in q.each() if isinstance(family, Kronecker)).roots()[k]
    return torch.kron(A @ A.mT, B @ B.mT)


def divergence(V, precision):
    """KL(N(m, V)‖N(m, precision⁻¹))."""
    return 0.5 * ((precision * V).sum() - len(V) - torch.logdet(V) - torch.logdet(precision))


def test_of_a_linear_regression_it_is_the_posterior():
    """There N H + λ = I ⊗ (XᵀX/s² + λ): a product, with the prior's part and all."""
    model, x = nn.Linear(4, 3, bias=False).double(), inputs()
    q = made(model, 3 * N, likelihood=Gaussian(0.3))
    q.laplace(uneven(x))
    of_columns = torch.linalg.inv(x.mT @ x / 0.3**2 + PRIOR * torch.eye(4, dtype=torch.float64))
    exact = torch.block_diag(of_columns, of_columns, of_columns)
    torch.testing.assert_close(covariance(q), exact, rtol=1e-10, atol=1e-14)


def test_of_a_layer_with_one_input_it_is_the_inverse():
    """There every matrix is a product; that of a softmax has its prior in the direction of equal logits alone."""
    model, x = nn.Linear(1, 3, bias=False).double(), inputs()[:, :1]
    q = made(model)
    q.laplace(uneven(x))
    exact = gauss_newton(model, x, Categorical(), ["weight"]) + PRIOR * torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(covariance(q), torch.linalg.inv(exact), rtol=1e-10, atol=0)


@pytest.mark.parametrize("k", [0, 1])
def test_of_a_network_it_is_the_nearest_product(monkeypatch, k):
    """Both partial traces of CᵀΛC are those of the identity, Λ the dense matrix; five passes are near the limit."""
    model, x = net(), inputs()
    name, (o, i) = (("0.weight", (5, 4)), ("2.weight", (3, 5)))[k]
    precision = gauss_newton(model, x, Categorical(), [name]) + PRIOR * torch.eye(o * i, dtype=torch.float64)
    q = made(model)
    q.laplace(uneven(x))
    five = divergence(covariance(q, k), precision)
    monkeypatch.setattr(Kronecker, "passes", 40)
    q.laplace(uneven(x))
    A, B = q.families[0].roots()[k]
    C = torch.kron(A, B)
    W = (C.mT @ precision @ C).view(o, i, o, i)
    for trace, size in ((W.diagonal(dim1=1, dim2=3).sum(-1) / i, o), (W.diagonal(dim1=0, dim2=2).sum(-1) / o, i)):
        torch.testing.assert_close(trace, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-9)
    nearest = divergence(covariance(q, k), precision)
    single = divergence(torch.diag(1 / precision.diagonal()), precision)
    assert nearest <= five < nearest + 1e-3 * o * i
    assert five < 0.6 * single


def test_it_begins_anew():
    """Once more, and after other data, it is the same; what is a vector has single weights."""
    model, x = net(), inputs()
    q = made(model)
    q.laplace(uneven(x))
    first = flat(q.variance.values())
    q.laplace(uneven(3 * x))
    assert not torch.equal(flat(q.variance.values()), first)
    q.laplace(uneven(x))
    assert torch.equal(flat(q.variance.values()), first)
    single = torchngvi.network(copy.deepcopy(model), N, prior_precision=PRIOR, temperature=1.0)
    single.laplace(uneven(x))
    torch.testing.assert_close(q.variance["2.bias"], single.variance["2.bias"], rtol=1e-12, atol=0)


@pytest.mark.accuracy
def test_labels_that_are_drawn():
    model, x = net(), inputs()
    q = made(model)
    q.laplace(uneven(x))
    exact = flat(q.variance.values())
    q.laplace(uneven(x), labels=200)
    assert (flat(q.variance.values()) / exact).log().abs().max() < 0.2


def test_kernels_of_a_convolution():
    """Their columns are all dimensions but the first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2, bias=False), nn.Flatten(), nn.Linear(12, 2, bias=False)).double()
    images = torch.randn(6, 2, 3, 3, dtype=torch.float64)
    q = made(model, 12, likelihood=Gaussian(0.5))
    q.laplace([(images, images)])
    precision = gauss_newton(model, images, Gaussian(0.5), ["0.weight"]) + PRIOR * torch.eye(24, dtype=torch.float64)
    single = divergence(torch.diag(1 / precision.diagonal()), precision)
    assert divergence(covariance(q), precision) < 0.8 * single
    torch.testing.assert_close(flat([q.variance["0.weight"]]), covariance(q).diagonal(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_frozen_parameters(structure):
    """Frozen before anything was observed: the prior; after that: as it was."""
    model, x = net(), inputs()
    q = torchngvi.network(model, N, structure, prior_precision=PRIOR, temperature=1.0)
    model[0].weight.requires_grad_(False)
    with pytest.warns(UserWarning, match="1 parameters, '0.weight' the first, were frozen") as told:
        q.laplace(uneven(x))
    assert len(told) == 1  # of five passes
    torch.testing.assert_close(q.variance["0.weight"], torch.full((5, 4), 1 / PRIOR).double(), rtol=1e-6, atol=0)
    model[0].weight.requires_grad_(True)
    q.laplace(uneven(x))
    known = q.variance["0.weight"]
    model[0].weight.requires_grad_(False)
    q.laplace(uneven(2 * x))
    assert torch.equal(q.variance["0.weight"], known)
