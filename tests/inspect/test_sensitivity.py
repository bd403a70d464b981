"""`torchngvi.solved.sensitivity`: by how much conclusions hang on the prior."""

import math

import pytest
import torch
from helpers import randn

from torchngvi import CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, PrecisionCholeskyGaussian, fit
from torchngvi.models import SoftmaxRegression
from torchngvi.solved import sensitivity, solve
from torchngvi.structures import block_diagonal

DTYPE, N, D = torch.float64, 40, 3


X = randn(N, D)
Y = (X @ torch.tensor([1.0, -0.5, 0.0], dtype=DTYPE) + randn(N, seed=1) > 0).to(DTYPE)
ROWS = randn(2, D, seed=2)
LAMBDA = torch.tensor([0.5, 1.0, 2.0], dtype=DTYPE)


def fitted(target, q=None):
    return fit(CholeskyGaussian(target.dim, dtype=DTYPE) if q is None else q, target, tolerance=1e-9, progress=False)


def logistic(precision=LAMBDA, **more):
    return GeneralizedLinear(X, Y, prior_precision=precision, prior_mean=0.3, **more)


@pytest.mark.parametrize("full", [False, True])
def test_of_normal_targets_in_closed_form(full):
    """V = (Λ + XᵀX)⁻¹ and m = V(Λm₀ + Xᵀy): dm = VΛ(m₀ - m) and dV = -VΛV, and both with 2Λ."""
    y, prior = randn(N, seed=3), LAMBDA.diag() + (0.2 if full else 0.0)
    m0 = torch.full((D,), 0.3, dtype=DTYPE)
    given = prior if full else LAMBDA
    result = fitted(GeneralizedLinear(X, y, "gaussian", prior_precision=given, prior_mean=0.3))
    found = sensitivity(result, ROWS)
    (V, m), (V2, m2) = (
        (inverse := torch.linalg.inv(factor * prior + X.mT @ X), inverse @ (factor * prior @ m0 + X.mT @ y))
        for factor in (1, 2)
    )

    def variance(matrix):
        return ((ROWS @ matrix) * ROWS).sum(-1)

    sd, log2 = variance(V).sqrt(), math.log(2)
    assert torch.allclose(found.shift, log2 * (ROWS @ V @ prior @ (m0 - m)) / sd, rtol=1e-9)
    assert torch.allclose(found.spread, -log2 * variance(V @ prior @ V) / (2 * sd.square()), rtol=1e-9)
    assert torch.allclose(found.true_shift, ROWS @ (m2 - m) / sd, rtol=1e-9)
    assert torch.allclose(found.true_spread, variance(V2).sqrt() / sd - 1, rtol=1e-9)


POSTERIORS = {
    "Cholesky": lambda: CholeskyGaussian(D, dtype=DTYPE),
    "precision": lambda: PrecisionCholeskyGaussian(D, dtype=DTYPE),
    "diagonal": lambda: DiagonalGaussian(D, dtype=DTYPE),
    "blocks": lambda: CholeskyGaussian(D, structure=block_diagonal([1, 2]), dtype=DTYPE),
}


@pytest.mark.sparse(3)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("kind", POSTERIORS)
def test_it_is_the_derivative_of_solve(kind, temperature):
    make = POSTERIORS[kind]
    found = sensitivity(fitted(logistic(temperature=temperature), make()))
    log_precision = torch.zeros((), dtype=DTYPE, requires_grad=True)
    other = solve(make(), logistic(log_precision.exp() * LAMBDA, temperature=temperature))
    for k in range(D):
        shift, spread = (
            torch.autograd.grad(part[k], log_precision, retain_graph=True)[0].item() * math.log(2) / other.stddev[k]
            for part in (other.mean, other.stddev)
        )
        assert found.shift[k].item() == pytest.approx(shift.item(), rel=1e-6)
        assert found.spread[k].item() == pytest.approx(spread.item(), rel=1e-6)
    doubled = solve(make(), logistic(2 * LAMBDA, temperature=temperature))
    assert torch.allclose(found.true_shift, (doubled.mean - other.mean) / other.stddev, atol=1e-7)


def test_softmax():
    classes = torch.arange(N) % 3
    result = fitted(SoftmaxRegression(X, classes))
    log_precision = torch.zeros((), dtype=DTYPE, requires_grad=True)
    other = solve(
        CholeskyGaussian(2 * D, dtype=DTYPE), SoftmaxRegression(X, classes, prior_precision=log_precision.exp())
    )
    (slope,) = torch.autograd.grad(other.mean[1], log_precision)
    expected = (math.log(2) * slope / other.stddev[1]).item()
    assert sensitivity(result).shift[1].item() == pytest.approx(expected, rel=1e-6)


def test_what_was_fitted_stays():
    result = fitted(logistic())
    mean, precision = result.posterior.mean.clone(), result.target.prior.precision.clone()
    sensitivity(result)
    assert torch.equal(result.posterior.mean, mean)
    assert torch.equal(result.target.prior.precision, precision)


def test_inference_mode():
    result = fitted(logistic())
    with torch.inference_mode():
        inside = sensitivity(result)
    assert torch.equal(inside.shift, sensitivity(result).shift)


def test_names():
    result = fitted(logistic())
    assert sensitivity(result).names == ("coefficient 0", "coefficient 1", "coefficient 2")
    assert sensitivity(result.named(["a", "b", "c"])).names == ("a", "b", "c")
    assert sensitivity(result, ROWS).names == ("conclusion 0", "conclusion 1")
    assert "the contrast moves most" in str(sensitivity(result, ROWS[:1], ["the contrast"]))
