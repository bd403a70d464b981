"""The default, without a learning rate, where it was once seen to fail."""

import math
import re

import numpy as np
import pytest
import torch
from helpers import make_model, make_posterior
from scipy.optimize import minimize

from torchngvi import SRVN, VN, CholeskyGaussian, GeneralizedLinear, NaturalGaussian, fit
from torchngvi.errors import InputError
from torchngvi.registry import POSTERIORS

DENSE = [(VN, CholeskyGaussian), (VN, NaturalGaussian), (SRVN, CholeskyGaussian)]
dense = pytest.mark.parametrize(("method", "family"), DENSE, ids=["vn-root", "vn-natural", "srvn"])


def quiet(q, model, method=VN, **options):
    return fit(q, model, method(q), progress=False, **options)


def by_scipy(model):
    """The minimum over (m, C) by L-BFGS on the differentiable objective, from the mode's side."""
    q = CholeskyGaussian(model.dim, dtype=torch.float64)
    rows, columns = np.tril_indices(model.dim)

    def objective(x):
        mean = torch.tensor(x[: model.dim])
        root = torch.zeros(model.dim, model.dim, dtype=torch.float64)
        root[rows, columns] = torch.tensor(x[model.dim :])
        diagonal = root.diagonal().exp()
        factor = root.tril(-1) + torch.diag(diagonal)
        q.initialize_(mean, factor)
        q.mean_probe.grad = q.root_probe.grad = None
        loss = model.negative_elbo(q)
        loss.backward()
        # C(I + R): ∂/∂C = C⁻ᵀ ∂/∂R
        g_mean = torch.linalg.solve_triangular(factor.mT, q.mean_probe.grad[:, None], upper=True)[:, 0]
        g_root = torch.linalg.solve_triangular(factor.mT, q.root_probe.grad, upper=True)
        g_root.diagonal().mul_(diagonal)
        return loss.item(), np.concatenate([g_mean.numpy(), g_root[rows, columns].numpy()])

    start = np.zeros(model.dim + len(rows))
    found = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": 5000, "ftol": 1e-15})
    return found.fun


def separable(scale, family, beta):
    X = torch.tensor(np.random.default_rng(0).standard_normal((200, 5)))
    return GeneralizedLinear(X * scale, (X[:, 0] > 0).double(), family, prior_precision=beta)


@pytest.mark.accuracy
@dense
@pytest.mark.parametrize("scale", [10.0, 100.0])
def test_far_from_the_optimum(method, family, scale):
    """Predictors of standard deviation 10 and 100, separable classes: 43283 and stuck, once; the optimum is near 18."""
    model = separable(scale, "bernoulli_probit", 1e-4)
    result = quiet(family(5, dtype=torch.float64), model, method)
    assert result.converged, result.reason
    # scaling X by s is scaling θ by 1/s and the prior precision by s²
    easy = separable(1.0, "bernoulli_probit", 1e-4 / scale**2)
    start = family(5, scale=1.0, dtype=torch.float64)
    assert result.loss == pytest.approx(quiet(start, easy, method).loss, abs=1e-6)


@dense
def test_counts_that_are_all_zero(method, family):
    X = torch.tensor(np.random.default_rng(1).standard_normal((100, 3)))
    model = GeneralizedLinear(X, torch.zeros(100), "poisson_log", prior_precision=1e-4)
    result = quiet(family(3, dtype=torch.float64), model, method)
    assert result.converged, result.reason


@dense
@pytest.mark.parametrize("gamma", [1e-3, 1e-1, 10.0, 1e3])
def test_any_temperature(method, family, gamma):
    """L at temperature γ is γ times L of the data weighted by 1/γ: the same q, and about as many evaluations."""
    plain = make_model()
    tempered = GeneralizedLinear(plain.X, plain.y, prior_precision=0.7, temperature=gamma)
    weighted = GeneralizedLinear(plain.X, plain.y, prior_precision=0.7, weights=torch.full_like(plain.y, 1 / gamma))
    q, p = (family(3, dtype=torch.float64) for _ in range(2))
    hot, cold = quiet(q, tempered, method), quiet(p, weighted, method)
    assert hot.converged, hot.reason
    assert hot.loss == pytest.approx(gamma * cold.loss, rel=1e-9)
    torch.testing.assert_close(q.covariance, p.covariance, rtol=1e-4, atol=0)
    assert hot.evaluations == cold.evaluations


@pytest.mark.accuracy
@pytest.mark.parametrize("family", ["bernoulli_logit", "bernoulli_probit", "poisson_log"])
def test_the_optimum_of_another_optimizer(family):
    generator = np.random.default_rng(3)
    X = torch.tensor(generator.standard_normal((60, 4)))
    eta = X @ torch.tensor([1.0, -0.5, 0.0, 0.3]).double()
    y = torch.tensor(generator.poisson(eta.exp().numpy())) if family == "poisson_log" else (eta > 0).double()
    model = GeneralizedLinear(X, y, family, prior_precision=0.5)
    result = quiet(CholeskyGaussian(4, dtype=torch.float64), model)
    assert result.converged
    assert result.loss == pytest.approx(by_scipy(model), abs=1e-6)


def test_large_counts():
    """Counts near e^15: the objective keeps its digits, so that trials can still be judged."""
    X = torch.tensor(np.random.default_rng(2).standard_normal((50, 2)))
    eta = 15 + 0.5 * X[:, 0]
    X = torch.cat([X, torch.ones(50, 1, dtype=torch.float64)], 1)
    model = GeneralizedLinear(X, eta.exp().round(), "poisson_log", prior_precision=1e-2)
    q = CholeskyGaussian(3, scale=0.1, dtype=torch.float64)
    result = quiet(q, model)
    assert result.converged, result.reason
    torch.testing.assert_close(q.mean, torch.tensor([0.5, 0.0, 15.0]).double(), rtol=0, atol=1e-3)


def test_a_member_that_cannot_be_evaluated_does_not_end_the_others():
    X = torch.tensor(np.random.default_rng(4).standard_normal((4, 30, 2)))
    y = torch.ones(4, 30)
    model = GeneralizedLinear(X, y, "poisson_log", prior_precision=1.0)
    scale = torch.full((4, 2), 0.5, dtype=torch.float64)
    scale[2] = 1e3  # exp(v/2) overflows
    q = CholeskyGaussian(2, (4,), scale=scale, dtype=torch.float64)
    result = quiet(q, model)
    assert result.members_converged.tolist() == [True, True, False, True]
    assert not result.converged
    assert result.reason == "because the negative ELBO of 1 of 4 members is not finite; the others converged."
    assert math.isfinite(result.loss)


def test_a_row_of_weight_zero_is_not_there():
    plain = make_model()
    X = torch.cat([plain.X, 1e4 * torch.ones(1, 3, dtype=torch.float64)])
    for family in ("bernoulli_logit", "poisson_log"):
        some = GeneralizedLinear(plain.X, (plain.y > 0).double(), family)
        weights = torch.cat([torch.ones(len(plain.X)), torch.zeros(1)])
        more = GeneralizedLinear(X, torch.cat([some.y.clamp_min(0), torch.zeros(1)]), family, weights=weights)
        q = make_posterior("cholesky")
        torch.testing.assert_close(more.negative_elbo(q), some.negative_elbo(q), rtol=1e-12, atol=0)
        more.negative_elbo(q).backward()
        assert bool(q.root_probe.grad.isfinite().all())


@pytest.mark.parametrize("name", POSTERIORS)
def test_a_model_of_another_kind_is_refused_in_words(name):
    model = make_model()
    family = type(make_posterior(name))
    batch = make_model((2,))
    for q, target, text in [
        (family(4, dtype=torch.float64), model, "the model has 3 coefficients and q has 4; build q with dim=3."),
        (
            family(3),
            model,
            "the model is in torch.float64 and q in torch.float32; build q with dtype=torch.float64, "
            "or convert one of them.",
        ),
        (
            family(3, (4,), dtype=torch.float64),
            batch,
            "the model holds a batch (2,) of data sets and q a batch (4,) of posteriors; "
            "build q with batch_shape=(2,).",
        ),
        (
            family(3, dtype=torch.float64).to("meta"),
            model,
            "the model is on cpu and q on meta; move one of them with .to().",
        ),
    ]:
        for use in (lambda q=q, target=target: VN(q).step(target), lambda q=q, target=target: target.negative_elbo(q)):
            with pytest.raises(InputError) as error:
                use()
            assert str(error.value) == text


def test_a_batch_must_hold_somebody():
    for batch in ((0,), (2.5,), 2):
        text = f"batch_shape must be a tuple of integers of at least 1, () for one posterior; got {batch!r}."
        with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
            CholeskyGaussian(2, batch)
    assert CholeskyGaussian(2, (np.int64(3),)).mean.shape == (3, 2)


def test_a_changed_prior_is_noticed():
    X = torch.randn(30, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = GeneralizedLinear(X, (X[:, 0] > 0).double(), prior_precision=torch.ones(3))
    q = CholeskyGaussian(3, dtype=torch.float64)
    quiet(q, model)
    model.prior.precision.mul_(50)
    again = quiet(q, model)
    fresh = quiet(
        CholeskyGaussian(3, dtype=torch.float64), GeneralizedLinear(X, (X[:, 0] > 0).double(), prior_precision=50.0)
    )
    assert again.converged
    assert again.evaluations > 1
    assert again.loss == pytest.approx(fresh.loss, abs=1e-8)


def test_another_target_empties_the_memory_also_after_a_resume():
    """The next model's gradients say nothing of the last one's curvature."""
    first, second = make_model(), separable(1.0, "bernoulli_logit", 1.0)
    q, p = (CholeskyGaussian(3, dtype=torch.float64) for _ in range(2))
    second = GeneralizedLinear(second.X[:, :3], second.y, prior_precision=1.0)
    opt = VN(q)
    for _ in range(4):
        opt.step(first)
    resumed = VN(p)
    p.load_state_dict(q.state_dict())
    resumed.load_state_dict(opt.state_dict())
    for _ in range(6):
        opt.step(second)
        resumed.step(second)
    assert torch.equal(q.mean, p.mean)
    assert torch.equal(q.scale_tril, p.scale_tril)


def test_the_triangle_that_is_right():
    """A loss that reaches the root through a triangular operator fills one triangle of CᵀG: which, q knows."""
    for name in ("cholesky", "natural"):
        q = make_posterior(name)
        frame = q.frame()
        H = torch.diag(torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))
        C = frame.dense()
        W = C.mT @ H @ C
        mask = torch.triu if frame.upper else torch.tril
        seen = C.mT @ mask(H @ C)  # the gradient as somebody's triangular operator passes it
        probe = seen.mT if frame.upper else seen  # of R in C(I + R)ᵀ, or in C(I + R)
        torch.testing.assert_close(q.structure.one_sided(probe), W, rtol=1e-12, atol=1e-12)


def test_a_conversion_is_noticed():
    """A packet of float64 serves no posterior in float32."""
    model, q = make_model(), make_posterior("cholesky")
    opt = VN(q)
    opt.step(model)
    q.float()
    with pytest.raises(InputError, match=r"^the model is in torch\.float64 and q in torch\.float32;"):
        opt.step(model)
