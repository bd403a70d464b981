"""Everything that fits a q fits one with blocks, or with a pattern that a third party wrote."""

import functools

import pytest
import torch
from arrow import ScalarArrow
from helpers import DTYPE, close, randn
from torch.utils.data import DataLoader, TensorDataset

from torchngvi import (
    CholeskyGaussian,
    GeneralizedLinear,
    LogJoint,
    NaturalGaussian,
    PrecisionCholeskyGaussian,
    fit,
    laplace,
)
from torchngvi.models import DataLogJoint, SoftmaxRegression
from torchngvi.structures import Forest, block_diagonal

DIM, ROWS = 6, 60
PATTERNS = {
    "unequal": block_diagonal([1, 2, 3]),
    "arrow": ScalarArrow(DIM),
    "forest": Forest((2, 2, 3, -1), (1, 2, 1, 2)),
}
FAMILIES = [(CholeskyGaussian, "unequal")] + [
    (kind, name) for kind in (PrecisionCholeskyGaussian, NaturalGaussian) for name in PATTERNS
]
X = randn(ROWS, DIM, seed=1)
Y = (torch.sigmoid(2 * X[:, 0] - X[:, 3]) > torch.rand(ROWS, generator=torch.Generator().manual_seed(2))).to(DTYPE)


def log_likelihood(theta, batch):
    rows, labels = batch
    eta = theta @ rows.mT
    return (labels * eta - torch.nn.functional.softplus(eta)).sum(-1)


def log_prior(theta):
    return -0.5 * theta.square().sum(-1)


def log_joint(theta):
    return log_likelihood(theta, (X, Y)) + log_prior(theta)


def loader():
    return DataLoader(TensorDataset(X, Y), 20)


TARGETS = {
    "linear": lambda: GeneralizedLinear(X, Y),
    "batch": lambda: GeneralizedLinear(X, torch.stack([Y, 1 - Y])),
    "softmax": lambda: SoftmaxRegression(X[:, :3], torch.arange(ROWS) % 3),
    "black box": lambda: log_joint,
    "data in batches": lambda: DataLogJoint(log_likelihood, log_prior, loader(), ROWS),
}


@pytest.mark.parametrize(("kind", "name"), FAMILIES)
class TestFits:
    @pytest.mark.sparse(4)
    @pytest.mark.parametrize("target", TARGETS)
    def test_without_a_learning_rate(self, kind, name, target):
        q = kind(DIM, (2,) if target == "batch" else (), structure=PATTERNS[name], dtype=DTYPE)
        result = fit(q, TARGETS[target](), progress=False)
        assert result.converged, result.reason

    @pytest.mark.sparse(2)
    def test_from_a_pass_over_batches(self, kind, name):
        q = kind(DIM, structure=PATTERNS[name], dtype=DTYPE)
        assert fit(q, TARGETS["linear"](), batch_size=20, progress=False).converged

    def test_from_the_mode(self, kind, name):
        """The precision at the mode has the entries of the Hessian in the pattern."""
        q = kind(DIM, structure=PATTERNS[name], dtype=DTYPE)
        mode = laplace(q, LogJoint(log_joint)).mode
        H = torch.func.hessian(lambda theta: -log_joint(theta))(mode)
        kept = PATTERNS[name].full(PATTERNS[name].from_dense(H))
        close(torch.linalg.inv(q.covariance), kept, 1e-8)


@functools.cache
def grouped():
    """Every row has one coordinate of a group and the common one: S* = E_q[∇²ℓ] is an arrow."""
    rows = torch.zeros(ROWS, DIM, dtype=DTYPE)
    rows[torch.arange(ROWS), torch.arange(ROWS) % (DIM - 1)] = randn(ROWS, seed=3)
    rows[:, -1] = 1.0
    return GeneralizedLinear(rows, Y, prior_precision=0.5)


@pytest.mark.parametrize("kind", [PrecisionCholeskyGaussian, NaturalGaussian])
def test_an_arrow_loses_nothing_where_the_model_factors(kind):
    """Its optimum is the dense one: the bound, the means and the covariances."""
    q, dense = kind(DIM, structure=ScalarArrow(DIM), dtype=DTYPE), CholeskyGaussian(DIM, dtype=DTYPE)
    results = [fit(x, grouped(), tolerance=1e-9, progress=False) for x in (q, dense)]
    assert all(result.converged for result in results)
    assert results[0].loss == pytest.approx(results[1].loss, abs=1e-10)
    close(q.mean.detach(), dense.mean, 1e-8)
    close(q.covariance, dense.covariance, 1e-8)
