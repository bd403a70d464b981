"""GaussNewton: the empirical Fisher matrix of the data and the exact curvature of the prior."""

import pytest
import torch

from torchngvi import VN, CholeskyGaussian, NaturalGaussian, fit
from torchngvi.expectations import GaussNewton
from torchngvi.expectations.draws import Antithetic, Independent
from torchngvi.models import LogJoint, PerDatum

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (torch.rand(40, generator=torch.Generator().manual_seed(1)) < torch.sigmoid(X.sum(-1))).double()


def logistic(temperature=1.0):
    def terms(theta):
        eta = theta @ X.T
        return Y * eta - torch.nn.functional.softplus(eta)

    return PerDatum(terms, lambda theta: -0.5 * (theta * torch.tensor([1.0, 2.0, 3.0])).square().sum(-1), temperature)


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_definition(chunk):
    q, target = CholeskyGaussian(3, scale=0.7, dtype=torch.float64), logistic()
    draws = Antithetic(6, generator=torch.Generator().manual_seed(3))
    packet = GaussNewton(draws, chunk=chunk)(q, target).derivative
    z = Antithetic(6, generator=torch.Generator().manual_seed(3))(q.mean)
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for theta in 0.7 * z:
        residual = (Y - torch.sigmoid(X @ theta))[:, None] * X
        expected += residual.T @ residual / 6
    expected += torch.diag(torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64))
    torch.testing.assert_close(packet.H, expected, rtol=0, atol=1e-12)
    gradients = torch.stack([-X.T @ (Y - torch.sigmoid(X @ theta)) for theta in 0.7 * z])
    prior = torch.tensor([1.0, 4.0, 9.0]) * 0.7 * z
    torch.testing.assert_close(packet.g, (gradients + prior).mean(0), rtol=0, atol=1e-12)


def test_the_fit_stays_in_the_cone():
    """Non-convex terms: the Hessian would be indefinite, this is not."""
    target = PerDatum(
        lambda theta: -torch.log1p((Y[:8] - theta @ X[:8].T).square()), lambda theta: -0.01 * theta.square().sum(-1)
    )
    q = NaturalGaussian(3, dtype=torch.float64, scale=3.0)
    opt = VN(q, lr=0.3, estimator=GaussNewton(Independent(4, generator=torch.Generator().manual_seed(0))))
    for _ in range(50):
        opt.step(target)
    assert opt.rejections == 0


@pytest.mark.accuracy
def test_the_mean_is_that_of_the_posterior():
    """The optimum of the mean is not moved by the curvature; V is near where the model is right."""
    exact, q = (CholeskyGaussian(3, dtype=torch.float64) for _ in range(2))
    target = logistic()
    fit(exact, LogJoint(target.log_joint), progress=False)
    opt = VN(q, lr=0.1, estimator=GaussNewton(Antithetic(64, generator=torch.Generator().manual_seed(1))))
    for _ in range(150):
        opt.step(target)
    assert float(((q.mean - exact.mean) / exact.stddev).abs().max()) < 0.15
    assert float((q.stddev / exact.stddev).log().abs().max()) < 0.3
