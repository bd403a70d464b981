"""A sparse design gives what its dense copy gives, without being written out."""

import warnings

import pytest
import torch
from helpers import DIM, DTYPE, EXACT, close, posteriors, randn, random_posterior

from torchngvi import VN, GeneralizedLinear, Stein
from torchngvi.expectations import Antithetic, Autograd, MonteCarlo, PiecewiseBound, Quadrature
from torchngvi.interfaces import Frame
from torchngvi.models import NegativeBinomial
from torchngvi.numerics import sparse
from torchngvi.structures import Diagonal

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")

ROWS = 30


def csr(X):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's notes on CSR
        return X.to_sparse_csr()


def designs(seed=1, rows=ROWS):
    """About half of the entries zero, a row and a column of zeros among them."""
    X = randn(rows, DIM, seed=seed) * (randn(rows, DIM, seed=seed + 1) > 0)
    X[3] = 0.0
    return X, csr(X)


def models(family="bernoulli_logit", full=False, **options):
    y = (randn(ROWS, seed=5) > 0).double() if family == "bernoulli_logit" else (2 * randn(ROWS, seed=5).abs()).round()
    x = randn(DIM, DIM, seed=9)
    precision = x @ x.mT + torch.eye(DIM, dtype=DTYPE) if full else torch.exp(randn(DIM, seed=8))
    options = {
        "prior_precision": precision,
        "prior_mean": 0.3,
        "weights": randn(ROWS, seed=6).abs(),
        "offset": randn(ROWS, seed=7),
        **options,
    }
    return tuple(GeneralizedLinear(X, y, family, **options) for X in designs())


@posteriors
@pytest.mark.parametrize("family", ["bernoulli_logit", "poisson_log", NegativeBinomial(2.0)])
@pytest.mark.parametrize("full", [False, True])
class TestEquality:
    """To 1e-12."""

    @pytest.mark.sparse(5)
    def test_packets(self, name, family, full):
        dense, thin = models(family, full)
        assert sparse.is_sparse(thin.X)
        q = random_posterior(name, (), seed=1)
        one, other = (Quadrature()(q, model) for model in (dense, thin))
        close(other.value, one.value, EXACT)
        for mine, theirs in zip(other.derivative.raw(), one.derivative.raw(), strict=True):
            close(mine, theirs, EXACT)
        for mine, theirs in zip(other.derivative.framed(q.frame()), one.derivative.framed(q.frame()), strict=True):
            close(mine, theirs, EXACT)

    @pytest.mark.sparse(5)
    def test_autograd(self, name, family, full):
        dense, thin = models(family, full)
        q = random_posterior(name, (), seed=1)
        one, other = (Autograd()(q, model) for model in (dense, thin))
        close(other.value, one.value, EXACT)
        close(other.derivative.a, one.derivative.a, EXACT)
        close(other.derivative.W, one.derivative.W, EXACT)

    @pytest.mark.sparse(5)
    def test_steps(self, name, family, full):
        dense, thin = models(family, full)
        q, p = (random_posterior(name, (), seed=1) for _ in range(2))
        first, second = VN(q), VN(p)
        for _ in range(4):
            first.step(dense)
            second.step(thin)
        close(p.mean, q.mean, 1e-10)
        close(p.covariance, q.covariance, 1e-10)


def test_log_joint():
    """Values and gradients at draws, any number of leading dimensions."""
    dense, thin = models()
    theta = randn(2, 4, DIM, seed=3)
    close(thin.log_joint(theta), dense.log_joint(theta), EXACT)
    gradients = []
    for model in (dense, thin):
        x = theta.clone().requires_grad_()
        gradients.append(torch.autograd.grad(model.log_joint(x).sum(), x)[0])
    close(gradients[1], gradients[0], EXACT)


@pytest.mark.parametrize("estimator", [Stein, MonteCarlo])
def test_draws(estimator):
    dense, thin = models()
    packets = []
    for model in (dense, thin):
        q = random_posterior("cholesky", (), seed=1)
        e = estimator(Antithetic(4, torch.Generator().manual_seed(1)))(q, model)
        packets.append(e.derivative.framed(q.frame()))
    close(packets[1].a, packets[0].a, EXACT)
    close(packets[1].W, packets[0].W, EXACT)


def test_bounds():
    dense, thin = models()
    q = random_posterior("natural", (), seed=1)
    close(PiecewiseBound(8)(q, thin).value, PiecewiseBound(8)(q, dense).value, EXACT)


def test_minibatches():
    """Rows in any order, repeated or not."""
    dense, thin = models()
    q = random_posterior("cholesky", (), seed=1)
    for index in ([3], [5, 3, 5, 29, 0], list(range(ROWS))):
        one, other = (Quadrature()(q, model.minibatch(index)) for model in (dense, thin))
        close(thin.minibatch(index).X.to_dense(), dense.minibatch(index).X, 0.0)
        close(other.value, one.value, EXACT)
        close(other.derivative.raw().H, one.derivative.raw().H, EXACT)


def test_another_dtype():
    _, thin = models()
    q = random_posterior("cholesky", (), seed=1)
    expected = thin.negative_elbo(q)
    close(thin.to(torch.float32).negative_elbo(q.float()).double(), expected, 1e-5)


def test_writing_into_the_design_is_noticed():
    """The packet of the last step is not used again."""
    _, thin = models()
    q = random_posterior("cholesky", (), seed=1)
    optimizer = VN(q)
    before = float(optimizer.evaluate(thin).loss)
    thin.X.values().mul_(2.0)
    after = float(optimizer.evaluate(thin).loss)
    assert after == thin.negative_elbo(q).item()
    assert after != before


def test_the_design_is_never_written_out(monkeypatch):
    """1e6 columns, 200 rows, a mean-field packet: the dense X would be 1.6 GB, a D x D matrix 8 TB."""
    dim, rows = 1_000_000, 200
    generator = torch.Generator().manual_seed(1)
    columns = torch.randint(dim // 20, (rows, 20), generator=generator) + torch.arange(20) * (dim // 20)
    values = torch.randn(rows * 20, generator=generator, dtype=DTYPE)
    X = sparse.compressed(torch.arange(rows + 1) * 20, columns.flatten(), values, (rows, dim))
    y = (torch.rand(rows, generator=generator) > 0.5).double()
    model = GeneralizedLinear(X, y)
    monkeypatch.setattr(torch.Tensor, "to_dense", None)
    frame = Frame(torch.zeros(dim, dtype=DTYPE), torch.full((dim,), 0.1, dtype=DTYPE), Diagonal(dim))
    value, sites = model.expected_energy(frame)
    a, W = sites.framed(frame)
    e = torch.zeros(rows, dtype=DTYPE)
    alpha, beta = model.likelihood.expected(e, 0.01 * values.reshape(rows, 20).square().sum(-1), model.y)[1:]
    column = int(columns[7, 3])
    entries = torch.where(columns == column, values.reshape(rows, 20), 0.0).sum(-1)
    close(a[column], 0.1 * (alpha * entries).sum(), EXACT)
    close(W[column], 0.01 * ((beta * entries.square()).sum() + 1), EXACT)
    assert bool(torch.isfinite(value))


class TestSparseAlgebra:
    def test_gram(self):
        X, S = designs()
        weights = randn(ROWS, seed=4)
        close(sparse.gram(S, weights), X.mT @ (weights[:, None] * X), EXACT)

    def test_square_and_rows(self):
        X, S = designs()
        close(sparse.square(S).to_dense(), X.square(), 0.0)
        index = torch.tensor([4, 3, 3, 0, ROWS - 1])
        close(sparse.rows(S, index).to_dense(), X[index], 0.0)

    def test_no_entries_at_all(self):
        S = csr(torch.zeros(4, 3, dtype=DTYPE))
        close(sparse.gram(S, torch.ones(4, dtype=DTYPE)), torch.zeros(3, 3, dtype=DTYPE), 0.0)
        close(sparse.rows(S, torch.tensor([2])).to_dense(), torch.zeros(1, 3, dtype=DTYPE), 0.0)
