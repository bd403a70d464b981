"""The products of a step of q: what is left out changes neither value nor derivative."""

import pytest
import torch

gp = pytest.importorskip("gpytorch")

from sparse_models import SparseModel  # noqa: E402

from torchngvi import CholeskyGaussian, NaturalGaussian  # noqa: E402
from torchngvi.adapters.gpytorch import (  # noqa: E402
    NaturalGradientVariationalDistribution,
    SparseGP,
    sparse_gp,
)
from torchngvi.adapters.gpytorch import model as gp_model  # noqa: E402
from torchngvi.interfaces import Frame, Raw  # noqa: E402
from torchngvi.numerics import linalg  # noqa: E402
from torchngvi.structures import Dense, Diagonal  # noqa: E402

M, N = 10, 50


class Model(SparseModel):
    def __init__(self, posterior, tasks=()):
        q = NaturalGradientVariationalDistribution(M, tasks, posterior=posterior)
        Z = torch.linspace(-1.9, 1.9, M)[:, None].expand(*tasks, M, 1)
        several = gp.variational.IndependentMultitaskVariationalStrategy
        super().__init__(q, Z, wrap=(lambda base: several(base, num_tasks=tasks[0])) if tasks else None, batch=tasks)


def evaluated(posterior, likelihood, y, tasks=()):
    """Value, g and H of one batch at a q that is not the prior."""
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, N).double()[:, None]
    target = SparseGP(Model(posterior, tasks).double(), likelihood.double(), [(x, y)], 3 * N)
    root = torch.randn(*tasks, M, M).double().tril()
    root.diagonal(dim1=-2, dim2=-1).abs_().add_(0.5)
    target.posterior.initialize_(torch.randn(*tasks, M).double(), root)
    with torch.no_grad():
        value, derivative = target.expected_energy(target.posterior.frame())
    raw = derivative if isinstance(derivative, Raw) else derivative.raw()
    return value, raw.g, raw.H


def y_of(tasks=()):
    x = torch.linspace(-2, 2, N).double()
    return torch.stack([torch.sin(3 * x + k) for k in range(tasks[0])], -1) if tasks else torch.sin(3 * x)


@pytest.mark.parametrize("kind", ["one noise", "a noise for each row", "missing", "tasks"])
def test_a_quadratic_energy_needs_no_variances(kind, monkeypatch):
    """½ tr(S H) is what the variances add, whatever the noises; it is the value that the variances themselves give."""
    tasks = (2,) if kind == "tasks" else ()
    y, likelihood = y_of(tasks), gp.likelihoods.GaussianLikelihood()
    if kind == "a noise for each row":
        likelihood = gp.likelihoods.FixedNoiseGaussianLikelihood(torch.linspace(0.1, 2.0, N).double())
    if kind == "missing":
        y = y.clone()
        y[::7] = torch.nan
    if kind == "tasks":
        likelihood = gp.likelihoods.MultitaskGaussianLikelihood(2)
    with gp.settings.observation_nan_policy("fill"):
        wanted = evaluated(CholeskyGaussian, likelihood, y, tasks)
        if kind != "tasks":  # whose functions share one energy
            monkeypatch.setattr(gp_model.Projection, "moments", None)  # nor are they formed
        found = evaluated(NaturalGaussian, likelihood, y, tasks)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-11)


def test_other_energies_need_them(monkeypatch):
    """A Bernoulli likelihood asks for the variances."""
    monkeypatch.setattr(gp_model.Projection, "moments", None)
    with pytest.raises(TypeError):
        evaluated(NaturalGaussian, gp.likelihoods.BernoulliLikelihood(), (y_of() > 0).double())


@pytest.mark.parametrize("upper", [False, True])
def test_a_product_by_blocks(upper):
    """Rows times a triangular root, part by part, is the whole product."""
    torch.manual_seed(0)
    size = linalg._LARGE + 3
    root = torch.randn(2, size, size).double().tril()
    frame = Frame(torch.zeros(2, size).double(), root, Dense(size), upper=upper)
    for rows in (torch.randn(5, size).double(), torch.randn(2, 5, size).double(), torch.randn(size, 5).double().mT):
        nothing = torch.zeros(rows.shape[:-1]).double()
        _, variance, projected = gp_model.Projection(rows, nothing, nothing).moments(frame)
        wanted = rows @ frame.dense()
        torch.testing.assert_close(projected, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(variance, wanted.square().sum(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("extra", [-1, 3])
def test_a_covariance_by_blocks(upper, extra):
    """C Cᵀ of a triangular root, part by part, is the whole product; and is symmetric."""
    torch.manual_seed(0)
    size = linalg._LARGE + extra
    root = torch.randn(2, size, size).double().tril()
    frame = Frame(torch.zeros(2, size).double(), root, Dense(size), upper=upper)
    C, found = frame.dense(), gp_model.covariance(frame)
    torch.testing.assert_close(found, C @ C.mT, rtol=1e-12, atol=1e-11)
    if extra > 0:
        torch.testing.assert_close(found, found.mT, rtol=1e-12, atol=1e-11)


def test_a_diagonal_root_has_no_blocks(monkeypatch):
    """It multiplies columns, and its squares are the diagonal of the covariance."""
    monkeypatch.setattr(gp_model, "triangular_rows", None)
    monkeypatch.setattr(gp_model, "triangular_gram", None)
    size = linalg._LARGE
    frame = Frame(torch.zeros(size), torch.full((size,), 2.0), Diagonal(size))
    projection = gp_model.Projection(torch.ones(3, size), torch.zeros(3), torch.zeros(3))
    assert torch.equal(projection.moments(frame)[2], torch.full((3, size), 2.0))
    assert torch.equal(gp_model.covariance(frame), 4.0 * torch.eye(size))


@pytest.mark.parametrize("posterior", [CholeskyGaussian, NaturalGaussian])
def test_no_batch_is_held(posterior, monkeypatch):
    """Each batch is added before the next but one is asked for, so that the rows of all are never there together."""
    events, added = [], sparse_gp._added

    class Batches:
        def __iter__(self):
            for part in range(4):
                events.append(f"batch {part}")
                x = torch.linspace(-2, 2, N).double()[part::4, None]
                yield x, torch.sin(3 * x[:, 0])

    monkeypatch.setattr(sparse_gp, "_added", lambda *parts: events.append("added") or added(*parts))
    target = SparseGP(Model(posterior).double(), gp.likelihoods.GaussianLikelihood().double(), Batches())
    with torch.no_grad():
        target.expected_energy(target.posterior.frame())
    assert events == ["batch 0", "batch 1", "added", "batch 2", "added", "batch 3", "added"]
