"""Batches of independent posteriors: what becomes of a member does not depend on the others."""

import pytest
import torch

from torchngvi import VN, CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, NewtonCG, fit

MEMBERS, ROWS, DIM = 9, 20, 3


def problem(family="bernoulli_logit", shared=False):
    """Members of very different difficulty: some are near the prior, some nearly separable."""
    generator = torch.Generator().manual_seed(3)
    scale = torch.logspace(-1.5, 1.0 if family == "bernoulli_logit" else -0.3, MEMBERS, dtype=torch.float64)
    X = torch.randn(MEMBERS, ROWS, DIM, generator=generator, dtype=torch.float64)
    X = X[0] if shared else scale[:, None, None] * X
    theta = torch.randn(MEMBERS, DIM, 1, generator=generator, dtype=torch.float64)
    eta = (X @ theta)[..., 0]
    if family == "poisson_log":
        return X, torch.poisson(eta.exp(), generator)
    uniform = torch.rand(MEMBERS, ROWS, generator=generator, dtype=torch.float64)
    return X, (uniform < torch.sigmoid(eta)).double()


def fitted(q, X, y, family, optimizer=None):
    model = GeneralizedLinear(X, y, family, classes=(0, 1) if family == "bernoulli_logit" else None)
    result = fit(q, model, None if optimizer is None else optimizer(q), progress=False)
    assert result.converged
    return result


@pytest.mark.parametrize("family", ["bernoulli_logit", "poisson_log"])
@pytest.mark.parametrize("optimizer", [None, NewtonCG, lambda q: VN(q, lr=0.5)], ids=["default", "newton", "lr"])
@pytest.mark.parametrize("kind", [CholeskyGaussian, DiagonalGaussian])
def test_members_in_parts(family, optimizer, kind):
    """The answer of a member is the same in batches of 1, of 5, and of all."""
    X, y = problem(family)
    whole = kind(DIM, (MEMBERS,), dtype=torch.float64)
    most = fitted(whole, X, y, family, optimizer)
    mean, covariance = whole.mean, whole.covariance
    for size in (1, 5):
        counts = []
        for first in range(0, MEMBERS, size):
            here = slice(first, first + size)
            q = kind(DIM, (len(y[here]),), dtype=torch.float64)
            counts.append(fitted(q, X[here], y[here], family, optimizer).evaluations)
            torch.testing.assert_close(q.mean, mean[here], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(q.covariance, covariance[here], rtol=1e-10, atol=1e-10)
        # where some are not better at the mode, all are evaluated once more, also those that are
        assert most.evaluations - max(counts) in ((0,) if family == "bernoulli_logit" else (0, 1))
