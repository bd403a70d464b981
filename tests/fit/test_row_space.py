"""The row space of a model: the same posterior as in all coordinates, where both can be had."""

import math

import pytest
import torch
from sklearn.datasets import load_svmlight_file

from torchngvi import SRVN, VN, CholeskyGaussian, GeneralizedLinear, NaturalGaussian, fit
from torchngvi.fitting.row_space import RowSpace
from torchngvi.rules import SiteNewton

FAMILIES = ["bernoulli_logit", "bernoulli_probit", "poisson_log", "gaussian"]


def make(family="bernoulli_logit", rows=12, dim=30, **options):
    generator = torch.Generator().manual_seed(2)
    X = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    y = (X[:, 0] > 0).double()
    precision = torch.rand(dim, generator=generator, dtype=torch.float64) + 0.5
    mean = 0.3 * torch.randn(dim, generator=generator, dtype=torch.float64)
    return GeneralizedLinear(
        X, y, family, prior_precision=precision, prior_mean=mean, offset=0.1 * torch.arange(rows), **options
    )


def solved(model):
    space = RowSpace(model)
    q = NaturalGaussian(space.model.dim, dtype=torch.float64)
    result = fit(q, space.model, tolerance=1e-9, progress=False)
    assert result.converged, result.reason
    return space.lift(q), result


@pytest.mark.sparse(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gamma", [0.5, 1.0])
@pytest.mark.parametrize("rows", [12, 40])  # fewer and more than the 30 columns
def test_same_posterior(family, gamma, rows):
    model = make(family, rows, temperature=gamma)
    full = CholeskyGaussian(30, dtype=torch.float64)
    expected = fit(full, model, tolerance=1e-9, progress=False)
    lifted, result = solved(model)

    assert result.loss == pytest.approx(expected.loss, abs=1e-8)
    torch.testing.assert_close(lifted.mean, full.mean, rtol=0, atol=1e-7)
    torch.testing.assert_close(lifted.variance, full.variance, rtol=0, atol=1e-7)
    with torch.no_grad():
        theta = full.sample((5,), torch.Generator().manual_seed(0))
        torch.testing.assert_close(lifted.log_prob(theta), full.log_prob(theta), rtol=0, atol=1e-6)
        torch.testing.assert_close(lifted.entropy(), full.entropy(), rtol=0, atol=1e-7)
        rows_new = torch.randn(7, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        mean, variance = lifted.predictor(rows_new)
        torch.testing.assert_close(mean, rows_new @ full.mean, rtol=0, atol=1e-7)
        torch.testing.assert_close(variance, full.marginal_variance(rows_new), rtol=0, atol=1e-7)


def test_draws_have_the_moments():
    lifted, _ = solved(make())
    count = 40_000
    theta = lifted.sample((count,), torch.Generator().manual_seed(3))
    assert torch.equal(lifted.sample(count, torch.Generator().manual_seed(3)), theta)
    z = (theta.mean(0) - lifted.mean) / (lifted.stddev / math.sqrt(count))
    assert float(z.abs().max()) < 4.5  # 30 coordinates, failure rate 2e-4
    # E[-log q] over draws is the entropy
    with torch.no_grad():
        values = -lifted.log_prob(theta)
        error = values.std() / math.sqrt(count)
        assert abs(float((values.mean() - lifted.entropy()) / error)) < 4


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_equals_dense():
    model = make(rows=20)
    X = model.X * (model.X.abs() > 1)
    options = {"prior_precision": 2.0, "offset": model.offset}
    dense = GeneralizedLinear(X, model.y, **options)
    sparse = GeneralizedLinear(X.to_sparse_csr(), model.y, **options)
    (one, first), (two, second) = solved(dense), solved(sparse)
    assert first.loss == pytest.approx(second.loss, abs=1e-10)
    torch.testing.assert_close(one.mean, two.mean, rtol=0, atol=1e-9)
    torch.testing.assert_close(one.variance, two.variance, rtol=0, atol=1e-9)


def test_rows_that_repeat():
    """K is singular: r is the rank."""
    model = make()
    twice = GeneralizedLinear(model.X.repeat(2, 1), model.y.repeat(2), prior_precision=1.0)
    weighted = GeneralizedLinear(model.X, model.y, prior_precision=1.0, weights=torch.full((12,), 2.0))
    (one, first), (two, second) = solved(twice), solved(weighted)
    assert one.q.dim == two.q.dim == 12
    assert first.loss == pytest.approx(second.loss, abs=1e-8)
    torch.testing.assert_close(one.variance, two.variance, rtol=0, atol=1e-8)


def test_more_columns_than_a_block(monkeypatch):
    model = make(rows=12)
    expected, _ = solved(model)
    monkeypatch.setattr("torchngvi.fitting.row_space.RowSpace._width", 7)
    blocks, _ = solved(model)
    torch.testing.assert_close(blocks.variance, expected.variance, rtol=0, atol=1e-10)
    torch.testing.assert_close(blocks.mean, expected.mean, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", [VN, SRVN])
def test_leukemia(method, libsvm_folder):
    X, y = load_svmlight_file(str(libsvm_folder / "leukemia.svm.gz"), n_features=7129)
    model = GeneralizedLinear(torch.tensor(X.toarray()), y, prior_precision=0.2)
    space = RowSpace(model)
    q = CholeskyGaussian(space.model.dim, dtype=torch.float64)  # the prior
    result = fit(q, space.model, method(q), tolerance=1e-8, progress=False, max_evaluations=200)
    assert result.converged, result.reason
    assert space.model.dim == 38
    lifted = space.lift(q)
    assert tuple(lifted.variance.shape) == (7129,)
    assert bool((lifted.variance > 0).all())
    assert bool((lifted.variance <= 1 / 0.2 + 1e-9).all())


def test_leukemia_without_a_choice(libsvm_folder):
    """12 evaluations to a norm of 1e-8, where the natural gradient has a linear tail of 60."""
    X, y = load_svmlight_file(str(libsvm_folder / "leukemia.svm.gz"), n_features=7129)
    space = RowSpace(GeneralizedLinear(torch.tensor(X.toarray()), y, prior_precision=0.2))
    _, result = space.fit(tolerance=1e-8, progress=False)
    assert result.converged
    assert result.evaluations <= 20


@pytest.mark.sparse(3)
@pytest.mark.parametrize("seed", range(3))
def test_leukemia_from_afar(seed, libsvm_folder):
    """A narrow q far off, where steps of Newton fail one after another: they alternate with the natural gradient."""
    X, y = load_svmlight_file(str(libsvm_folder / "leukemia.svm.gz"), n_features=7129)
    model = RowSpace(GeneralizedLinear(torch.tensor(X.toarray()), y, prior_precision=0.2)).model
    far = torch.randn(38, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 10**0.5
    q = CholeskyGaussian(38, mean=far, scale=0.01, dtype=torch.float64)
    result = fit(q, model, VN(q, metric=SiteNewton(model)), progress=False)
    assert result.converged
    assert result.evaluations <= 100
