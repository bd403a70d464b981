"""`torchngvi.solved.solve`: the optimum as a differentiable function of what the target was made of."""

import copy
import pickle

import pytest
import torch
from helpers import randn

from torchngvi import (
    CholeskyGaussian,
    DiagonalGaussian,
    GeneralizedLinear,
    NaturalGaussian,
    PrecisionCholeskyGaussian,
    fit,
)
from torchngvi.models import NegativeBinomial, SoftmaxRegression
from torchngvi.solved import solve
from torchngvi.structures import block_diagonal

DTYPE, N, D = torch.float64, 30, 3


X = randn(N, D)
Y = (X @ torch.tensor([1.0, -0.5, 0.0], dtype=DTYPE) + randn(N, seed=1) > 0).to(DTYPE)
FAMILIES = {
    "logistic": "bernoulli_logit",
    "probit": "bernoulli_probit",
    "Poisson": "poisson_log",
    "normal": "gaussian",
    "negative binomial": NegativeBinomial(2.0),
}
POSTERIORS = {
    "Cholesky": lambda: CholeskyGaussian(D, dtype=DTYPE),
    "natural": lambda: NaturalGaussian(D, dtype=DTYPE),
    "precision": lambda: PrecisionCholeskyGaussian(D, dtype=DTYPE),
    "diagonal": lambda: DiagonalGaussian(D, dtype=DTYPE),
    "blocks": lambda: CholeskyGaussian(D, structure=block_diagonal([1, 2]), dtype=DTYPE),
}


def score(found):
    """A function of mean, covariance and standard deviations without a symmetry."""
    weights = randn(D, D, seed=7)
    return (found.mean * randn(D, seed=5)).sum() + (found.covariance * weights).sum() + found.stddev.prod()


def parts():
    """What a model is made of: log precisions, design, offset, weights, prior mean."""
    return {
        "log precision": randn(D, seed=2),
        "design": X.clone(),
        "offset": 0.3 * randn(N, seed=3),
        "weights": 1 + 0.1 * randn(N, seed=4).tanh(),
        "prior mean": 0.2 * randn(D, seed=6),
    }


def model(given, family="bernoulli_logit"):
    return GeneralizedLinear(
        given["design"],
        Y,
        family,
        prior_precision=given["log precision"].exp(),
        offset=given["offset"],
        weights=given["weights"],
        prior_mean=given["prior mean"],
    )


def check(make, q, value=score, steps=2e-4):
    """The derivative along a random direction of each part, against differences of fits of fourth order."""
    given = {name: part.requires_grad_() for name, part in parts().items()}
    gradients = torch.autograd.grad(value(solve(q(), make(given))), list(given.values()))
    for seed, (name, gradient) in enumerate(zip(given, gradients, strict=True)):
        way = randn(*gradient.shape, seed=20 + seed)

        def at(shift, name=name, way=way):
            moved = {key: part.detach() for key, part in given.items()}
            moved[name] = moved[name] + shift * steps * way
            return value(solve(q(), make(moved), tolerance=1e-10)).item()

        difference = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * steps)
        assert (gradient * way).sum().item() == pytest.approx(difference, rel=1e-6, abs=1e-7), name


@pytest.mark.sparse(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_derivatives_are_those_of_fits(family):
    check(lambda given: model(given, FAMILIES[family]), POSTERIORS["Cholesky"])


@pytest.mark.accuracy
@pytest.mark.parametrize("kind", POSTERIORS)
def test_under_every_posterior(kind):
    check(model, POSTERIORS[kind])


def test_of_a_normal_likelihood_in_closed_form():
    """V = (Λ + XᵀX)⁻¹ and m = VXᵀy, whose derivatives autograd knows, and the log evidence with its own."""
    precision = torch.tensor([0.5, 1.0, 2.0], dtype=DTYPE, requires_grad=True)
    y = randn(N, seed=8).requires_grad_()
    design = X.clone().requires_grad_()
    found = solve(CholeskyGaussian(D, dtype=DTYPE), GeneralizedLinear(design, y, "gaussian", prior_precision=precision))
    V = torch.linalg.inv(precision.diag() + design.mT @ design)
    m = V @ design.mT @ y
    evidence = torch.distributions.MultivariateNormal(
        torch.zeros(N, dtype=DTYPE), torch.eye(N, dtype=DTYPE) + (design / precision) @ design.mT
    ).log_prob(y)
    assert torch.allclose(found.mean, m, rtol=1e-10)
    assert torch.allclose(found.covariance, V, rtol=1e-10)
    assert found.elbo.item() == pytest.approx(evidence.item(), rel=1e-12)
    weights = randn(D, D, seed=9)
    pairs = (
        (found.mean.square().sum(), m.square().sum()),
        ((found.covariance * weights).sum(), (V * weights).sum()),
        (found.elbo, evidence),
    )
    for ours, exact in pairs:
        for a, b in zip(
            torch.autograd.grad(ours, (precision, y, design), retain_graph=True),
            torch.autograd.grad(exact, (precision, y, design), retain_graph=True, materialize_grads=True),
            strict=True,
        ):
            assert torch.allclose(a, b, rtol=1e-8, atol=1e-9)


def test_kernel_parameters_through_the_design():
    """A Gaussian process is a regression on a root of its kernel: the predictor of a new point, by its length scale."""
    x, new = torch.linspace(-2, 2, N, dtype=DTYPE), torch.tensor([0.3], dtype=DTYPE)

    def value(log_length, tolerance=None):
        points = torch.cat([x, new])
        kernel = torch.exp(-0.5 * ((points[:, None] - points) / log_length.exp()).square())
        root = torch.linalg.cholesky(kernel[:N, :N] + 1e-2 * torch.eye(N, dtype=DTYPE))
        row = torch.linalg.solve_triangular(root, kernel[:N, N:], upper=False)[:, 0]
        found = solve(CholeskyGaussian(N, dtype=DTYPE), GeneralizedLinear(root, Y), tolerance)
        return row @ found.mean + (row @ found.covariance @ row).sqrt()

    log_length = torch.tensor(-0.5, dtype=DTYPE, requires_grad=True)
    (gradient,) = torch.autograd.grad(value(log_length), log_length)
    at, step = lambda shift: value(log_length.detach() + shift * step, 1e-10).item(), 1e-3
    difference = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step)
    assert gradient.item() == pytest.approx(difference, rel=1e-6)


def test_noise_through_weights():
    """Normal targets of noise σ are those of noise 1 with the weights 1/σ²: m and V in closed form."""
    log_noise = torch.tensor(-0.7, dtype=DTYPE, requires_grad=True)
    y = randn(N, seed=8)
    weights = (-2 * log_noise).exp().expand(N)
    found = solve(CholeskyGaussian(D, dtype=DTYPE), GeneralizedLinear(X, y, "gaussian", weights=weights))
    V = torch.linalg.inv(torch.eye(D, dtype=DTYPE) + X.mT @ X * (-2 * log_noise).exp())
    m = V @ X.mT @ y * (-2 * log_noise).exp()
    for ours, exact in ((found.mean.sum(), m.sum()), (found.covariance.sum(), V.sum())):
        a, b = (torch.autograd.grad(part, log_noise, retain_graph=True)[0] for part in (ours, exact))
        assert a.item() == pytest.approx(b.item(), rel=1e-9)


def test_large_designs():
    """Beyond 2¹⁶ numbers of XC, where a step of a fit has products in single precision: against the closed form."""
    rows, columns = 4500, 15
    design, y = randn(rows, columns, seed=11), randn(rows, seed=12)
    log_precision = randn(columns, seed=13).requires_grad_()
    target = GeneralizedLinear(design, y, "gaussian", prior_precision=log_precision.exp())
    found = solve(CholeskyGaussian(columns, dtype=DTYPE), target)
    V = torch.linalg.inv(log_precision.exp().diag() + design.mT @ design)
    m = V @ design.mT @ y
    weights = randn(columns, columns, seed=14)
    values = [(a.square().sum() + rows * (b * weights).sum()) for a, b in ((found.mean, found.covariance), (m, V))]
    ours, exact = (torch.autograd.grad(value, log_precision)[0] for value in values)
    assert float((ours - exact).abs().max() / exact.abs().max()) < 1e-10


def test_softmax():
    classes = torch.arange(N) % 3

    def value(found):
        return found.mean.cos().sum() + (found.covariance * randn(2 * D, 2 * D, seed=7)).sum()

    def at(log_precision, design):
        target = SoftmaxRegression(design, classes, prior_precision=log_precision.exp())
        return value(solve(CholeskyGaussian(2 * D, dtype=DTYPE), target))

    given = torch.zeros((), dtype=DTYPE, requires_grad=True), X.clone().requires_grad_()
    gradients = torch.autograd.grad(at(*given), given)
    ways, step = (torch.ones((), dtype=DTYPE), randn(N, D, seed=9)), 1e-4
    for k in range(2):
        ends = [at(*(x.detach() + sign * step * (i == k) * w for i, (x, w) in enumerate(zip(given, ways, strict=True))))
                for sign in (1, -1)]  # fmt: skip
        difference = (ends[0] - ends[1]).item() / (2 * step)
        assert (gradients[k] * ways[k]).sum().item() == pytest.approx(difference, rel=1e-6)


@pytest.mark.parametrize("kind", ["Cholesky", "precision", "diagonal"])
def test_a_full_precision(kind):
    """Along a symmetric direction, beside the mean of the prior, against differences of fits."""
    A = randn(D, D, seed=3)
    given = (0.3 * torch.eye(D, dtype=DTYPE) + 0.2 * A @ A.mT).requires_grad_(), randn(D, seed=4).requires_grad_()

    def at(precision, mean, tolerance=None):
        target = GeneralizedLinear(X, Y, prior_precision=precision, prior_mean=mean)
        found = solve(POSTERIORS[kind](), target, tolerance)
        return score(found) + found.elbo

    gradients = torch.autograd.grad(at(*given), given)
    ways, step = (0.1 * (A + A.mT), randn(D, seed=5)), 2e-4
    for k in range(2):

        def moved(shift, k=k):
            shifted = [x.detach() for x in given]
            shifted[k] = shifted[k] + shift * step * ways[k]
            return at(*shifted, 1e-10).item()

        difference = (8 * (moved(1) - moved(-1)) - (moved(2) - moved(-2))) / (12 * step)
        assert (gradients[k] * ways[k]).sum().item() == pytest.approx(difference, rel=1e-6)


def test_parts_that_are_computed_from_one_another():
    """The precision of the prior and the weights from the design: each way counts once."""

    def value(design, tolerance=None):
        target = GeneralizedLinear(design, Y, prior_precision=design.mT @ design / N, weights=design[:, 0].sigmoid())
        return score(solve(CholeskyGaussian(D, dtype=DTYPE), target, tolerance))

    design, way, step = X.clone().requires_grad_(), randn(N, D, seed=5), 2e-4
    (gradient,) = torch.autograd.grad(value(design), design)
    at = lambda shift: value(design.detach() + shift * step * way, 1e-10).item()  # noqa: E731
    difference = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step)
    assert (gradient * way).sum().item() == pytest.approx(difference, rel=1e-6)


def test_weights_of_zero():
    """What a row would say that is not there yet: the derivative in its weight, from the right."""
    weights = torch.ones(N, dtype=DTYPE)
    weights[0] = 0.0

    def value(weights, tolerance=None):
        return score(solve(CholeskyGaussian(D, dtype=DTYPE), GeneralizedLinear(X, Y, weights=weights), tolerance))

    (gradient,) = torch.autograd.grad(value(weights.requires_grad_()), weights)
    at, step = lambda shift: value(weights.detach().index_fill(0, torch.tensor([0]), shift), 1e-11).item(), 1e-3
    right = (-25 * at(0.0) + 48 * at(step) - 36 * at(2 * step) + 16 * at(3 * step) - 3 * at(4 * step)) / (12 * step)
    assert gradient[0].item() == pytest.approx(right, rel=1e-6)


def test_what_becomes_of_q_afterwards():
    """A backward pass is of the optimum that was returned, also where q was fitted to something else since."""
    log_precision = torch.zeros((), dtype=DTYPE, requires_grad=True)
    q = CholeskyGaussian(D, dtype=DTYPE)
    target = lambda k: GeneralizedLinear(X, Y, prior_precision=(log_precision + k).exp())  # noqa: E731
    found = [solve(q, target(k)) for k in range(2)]
    q.initialize_(torch.zeros(D, dtype=DTYPE), 5 * torch.eye(D, dtype=DTYPE))
    for k in range(2):
        (late,) = torch.autograd.grad(score(found[k]), log_precision)
        (fresh,) = torch.autograd.grad(score(solve(CholeskyGaussian(D, dtype=DTYPE), target(k))), log_precision)
        assert late.item() == pytest.approx(fresh.item(), rel=1e-7)


def test_a_batch_is_its_members():
    log_precision = torch.tensor([[-1.0], [2.0]], dtype=DTYPE, requires_grad=True)

    def target(of):
        return GeneralizedLinear(X, Y, prior_precision=of.exp().expand(*of.shape[:-1], D))

    found = solve(CholeskyGaussian(D, (2,), dtype=DTYPE), target(log_precision))
    (together,) = torch.autograd.grad(found.mean[..., 0].square().sum() + found.elbo.sum(), log_precision)
    for member in range(2):
        own = log_precision.detach()[member].requires_grad_()
        alone = solve(CholeskyGaussian(D, dtype=DTYPE), target(own))
        (gradient,) = torch.autograd.grad(alone.mean[0].square() + alone.elbo, own)
        assert torch.allclose(together[member], gradient, rtol=1e-6)


def test_the_bound_by_the_envelope():
    """Its derivative by differences of the bounds of fits."""
    check(model, POSTERIORS["Cholesky"], value=lambda found: found.elbo)


def test_a_chosen_precision_is_that_of_the_largest_bound():
    """A user's loop: any optimizer of torch over what the model was made of."""
    log_precision = torch.zeros((), dtype=DTYPE, requires_grad=True)
    opt = torch.optim.LBFGS([log_precision], line_search_fn="strong_wolfe", tolerance_grad=1e-9)
    q = CholeskyGaussian(D, dtype=DTYPE)

    def closure():
        opt.zero_grad()
        loss = -solve(q, GeneralizedLinear(X, Y, prior_precision=log_precision.exp())).elbo
        loss.backward()
        return loss

    opt.step(closure)
    best = -closure().item()
    for shift in (0.9, 1.1):
        other = GeneralizedLinear(X, Y, prior_precision=log_precision.detach().exp() * shift)
        assert solve(q, other).elbo.item() < best


def test_a_fit_follows_no_graph():
    """Fits, copies and files of a model are as without a gradient; `attached` alone has the graph."""
    given = {name: part.requires_grad_() for name, part in parts().items()}
    target = model(given)
    assert not any(tensor.requires_grad for tensor in target.tensors())
    assert sum(tensor.requires_grad for tensor in target.attached().tensors()) == 5
    loaded = pickle.loads(pickle.dumps(target))
    for other in (copy.deepcopy(target), loaded, target.minibatch([0, 1]), copy.copy(target)):
        assert other.attached() is other
    result = fit(CholeskyGaussian(D, dtype=DTYPE), target, progress=False)
    assert result.converged
    assert all(part.grad is None for part in given.values())


def test_without_gradients_asked():
    found = solve(CholeskyGaussian(D, dtype=DTYPE), GeneralizedLinear(X, Y))
    assert not found.mean.requires_grad
    with torch.no_grad():
        given = {name: part.requires_grad_() for name, part in parts().items()}
        assert not solve(CholeskyGaussian(D, dtype=DTYPE), model(given)).elbo.requires_grad


def test_single_precision():
    log_precision = torch.zeros((), requires_grad=True)
    found = solve(CholeskyGaussian(D), GeneralizedLinear(X.float(), Y.float(), prior_precision=log_precision.exp()))
    (single,) = torch.autograd.grad(found.mean[0], log_precision)
    log_precision = torch.zeros((), dtype=DTYPE, requires_grad=True)
    found = solve(CholeskyGaussian(D, dtype=DTYPE), GeneralizedLinear(X, Y, prior_precision=log_precision.exp()))
    (double,) = torch.autograd.grad(found.mean[0], log_precision)
    assert single.item() == pytest.approx(double.item(), rel=1e-3)
