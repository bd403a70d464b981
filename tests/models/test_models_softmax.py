"""Softmax regression: several correlated predictors a row, a deterministic rule with exact derivatives."""

import copy
import math
import re

import numpy as np
import pytest
import torch
from helpers import DIFFERENCE, DIM, DTYPE, EXACT, POSTERIORS, close, difference, posteriors, randn
from sklearn.linear_model import LogisticRegression

from torchngvi import SRVN, VN, CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, NaturalGaussian, Stein, fit
from torchngvi.errors import InputError
from torchngvi.expectations import Antithetic, Autograd, Quadrature
from torchngvi.interfaces import Curved
from torchngvi.models import ExpectedPenalty, Regularized, SoftmaxRegression
from torchngvi.models.softmax import moments, nodes
from torchngvi.numerics.gaussian_integrals import softplus

CPU = torch.device("cpu")
classes = pytest.mark.parametrize("K", [2, 3, 4])


def labels(rows, K, seed=2):
    y = torch.randint(K, (rows,), generator=torch.Generator().manual_seed(seed)).double()
    y[:K] = torch.arange(K)
    return y


def model(K, rows=12, **options):
    options = {"weights": 0.3 + randn(rows, seed=3).abs(), "prior_mean": 0.2, **options}
    return SoftmaxRegression(randn(rows, DIM, seed=1), labels(rows, K), **options)


def posterior(name, dim, batch=(), seed=5):
    root = 0.3 * randn(*batch, dim, dim, seed=seed).tril(-1)
    root = root + torch.diag_embed(0.3 + 0.3 * randn(*batch, dim, seed=seed + 1).abs())
    if name == "diagonal":
        root = torch.diag_embed(root.diagonal(dim1=-2, dim2=-1))
    return POSTERIORS[name](dim, batch, mean=0.5 * randn(*batch, dim, seed=seed + 2), scale=root)


def covariances(count, dim, s, seed=1):
    """Correlated, the largest variance s²."""
    x = randn(count, dim, dim, seed=seed)
    V = x @ x.mT
    return V * (s**2 / V.diagonal(dim1=-2, dim2=-1).amax(-1))[:, None, None]


def fine(dim, number, reach):
    axis = torch.linspace(-reach, reach, number, dtype=DTYPE)
    z = torch.cartesian_prod(*[axis] * dim).reshape(-1, dim)
    w = torch.exp(-0.5 * z.square().sum(-1))
    return z, w / w.sum()


class TestExpectations:
    @pytest.mark.parametrize(("s", "tolerance"), [(1e-3, 1e-9), (0.1, 1e-9), (1.0, 1e-9), (2.0, 1e-8), (5.0, 2e-4)])
    def test_two_classes_are_a_softplus(self, s, tolerance):
        e = torch.linspace(-6, 6, 41, dtype=DTYPE)
        V = torch.full((41, 1, 1), s * s, dtype=DTYPE)
        for actual, expected in zip(
            moments(e[:, None], V, *nodes(1, 0, DTYPE, CPU)), softplus(e, V[:, 0, 0]), strict=True
        ):
            close(actual.reshape(-1), expected, tolerance)

    @pytest.mark.parametrize(("s", "tolerance"), [(0.1, 1e-9), (1.0, 1e-9), (2.0, 5e-9), (5.0, 2e-4), (10.0, 1e-2)])
    def test_three_classes(self, s, tolerance):
        """Against a grid of 241 x 241; the curvature divides by the variances, small ones among them."""
        e, V = 2 * randn(8, 2, seed=2), covariances(8, 2, s)
        found = moments(e, V, *nodes(2, 0, DTYPE, CPU))
        for actual, expected, loss in zip(found, moments(e, V, *fine(2, 241, 8.5)), (1, 1, 50), strict=True):
            close(actual, expected, loss * tolerance)

    @pytest.mark.parametrize(("s", "tolerance"), [(0.1, 1e-6), (1.0, 2e-3), (3.0, 2e-2)])
    def test_four_classes(self, s, tolerance):
        """Sobol points; value and slope."""
        e, V = 2 * randn(6, 3, seed=2), covariances(6, 3, s)
        actual, expected = moments(e, V, *nodes(3, 512, DTYPE, CPU)), moments(e, V, *fine(3, 41, 7.0))
        close(actual[0], expected[0], tolerance)
        close(actual[1], expected[1], tolerance)

    @pytest.mark.parametrize("dim", [1, 2, 3, 5])
    def test_nodes(self, dim):
        """Symmetric, with mean 0 and covariance I; the weights sum to 1."""
        z, w = nodes(dim, 256, DTYPE, CPU)
        close(w.sum(), torch.ones((), dtype=DTYPE), EXACT)
        close(w @ z, torch.zeros(dim, dtype=DTYPE), EXACT)
        close((z * w[:, None]).mT @ z, torch.eye(dim, dtype=DTYPE), 1e-8 if dim < 3 else EXACT)

    @pytest.mark.parametrize("dim", [1, 2, 3])
    @pytest.mark.parametrize("s", [0.01, 1.0, 5.0])
    def test_derivatives_are_those_of_the_value(self, dim, s):
        """In e and in every direction of Σ, by finite differences of the sum itself."""
        z, w = nodes(dim, 64, DTYPE, CPU)
        e, V = 2 * randn(5, dim, seed=2), covariances(5, dim, s) + 0.1 * s**2 * torch.eye(dim, dtype=DTYPE)
        _, slope, curvature = moments(e, V, z, w)
        for seed in range(3):
            d = randn(5, dim, seed=10 + seed)
            close((slope * d).sum(-1), difference(lambda h, d=d: moments(e + h * d, V, z, w)[0]), DIFFERENCE)
            x = randn(5, dim, dim, seed=20 + seed)
            D = s**2 * 0.1 * (x + x.mT)
            numeric = difference(lambda h, D=D: moments(e, V + h * D, z, w)[0])
            close((0.5 * curvature * D).sum((-2, -1)), numeric, DIFFERENCE)
        close(curvature, curvature.mT.contiguous(), 1e-10)

    def test_rows_without_variance(self):
        z, w = nodes(2, 0, DTYPE, CPU)
        e = randn(4, 2, seed=1)
        value, slope, curvature = moments(e, torch.zeros(4, 2, 2, dtype=DTYPE), z, w)
        p = torch.nn.functional.pad(e, (1, 0)).softmax(-1)[:, 1:]
        close(value, torch.nn.functional.pad(e, (1, 0)).logsumexp(-1), 1e-9)
        close(slope, p, 1e-9)
        close(curvature, torch.diag_embed(p) - p[:, :, None] * p[:, None, :], 1e-8)


class TestModel:
    @posteriors
    @pytest.mark.parametrize("batch", [(), (2,), (3,)])
    def test_two_classes_are_logistic_regression(self, name, batch):
        """Value, gradient and curvature; the first class is the failure."""
        X, y, weights = randn(12, DIM, seed=1), labels(12, 2), randn(12, seed=3).abs()
        options = {"prior_precision": torch.exp(randn(DIM, seed=4)), "prior_mean": 0.3, "temperature": 0.7}
        one = GeneralizedLinear(X, y, weights=weights, **options)
        other = SoftmaxRegression(X, y, weights=weights, **options)
        q = posterior(name, DIM, batch)
        exact, e = Quadrature()(q, one), Quadrature()(q, other)
        assert isinstance(e.derivative, Curved)
        close(e.value, exact.value, 1e-8)
        for mine, theirs in zip(e.derivative.raw(), exact.derivative.raw(), strict=True):
            close(mine, theirs, 1e-8)
        theta = randn(5, *batch, DIM, seed=6)
        close(other.log_joint(theta), one.log_joint(theta), EXACT)

    @pytest.mark.sparse(5)
    @posteriors
    @classes
    @pytest.mark.parametrize("batch", [(), (2,)])
    @pytest.mark.parametrize("full", [False, True])
    def test_the_packet_is_the_derivative_of_the_value(self, name, K, batch, full):
        """By autograd through the frame: comparable."""
        dim = (K - 1) * DIM
        x = randn(dim, dim, seed=9)
        precision = x @ x.mT + torch.eye(dim, dtype=DTYPE) if full else 0.7
        target = model(K, prior_precision=precision, temperature=0.5, num_nodes=64)
        q = posterior(name, dim, batch)
        e, other = Quadrature()(q, target), Autograd()(q, target)
        a, W = e.derivative.framed(q.frame())
        close(other.value, e.value, EXACT)
        close(other.derivative.a, a, 1e-10)
        close(other.derivative.W, q.structure.one_sided(W), 1e-8)
        assert e.comparable
        assert e.temperature == 0.5

    def test_against_draws(self):
        """Block by block: Stein's estimate of a and W knows only the log joint."""
        target = model(3)
        one = posterior("cholesky", target.dim)
        q = CholeskyGaussian(target.dim, (3000,), mean=one.mean, scale=one.scale_tril.expand(3000, -1, -1))
        noisy = Stein(Antithetic(4, torch.Generator().manual_seed(1)))(q, target)
        exact = Quadrature()(one, target)
        framed = exact.derivative.framed(one.frame())
        for estimates, expected in (
            (noisy.value, exact.value),
            (noisy.derivative.a, framed.a),
            (noisy.derivative.W, framed.W),
        ):
            z = (estimates.mean(0) - expected) / (estimates.std(0) / 3000**0.5)
            assert float(z.abs().max()) < 5

    @classes
    def test_log_joint(self, K):
        target, theta = model(K, temperature=2.0), randn(4, (K - 1) * DIM, seed=6)
        eta = torch.cat([torch.zeros(4, 12, 1, dtype=DTYPE), target.X @ theta.reshape(4, K - 1, DIM).mT], -1)
        data = target.weights * torch.distributions.Categorical(logits=eta).log_prob(target.y)
        one = torch.ones((), dtype=DTYPE)
        prior = torch.distributions.Normal(0.2 * one, one).log_prob(theta).sum(-1)
        close(target.log_joint(theta), data.sum(-1) + 2.0 * prior, EXACT)

    @pytest.mark.parametrize("method", [VN, SRVN])
    @pytest.mark.parametrize("family", [CholeskyGaussian, NaturalGaussian, DiagonalGaussian])
    def test_fits_without_a_learning_rate(self, method, family):
        if method is SRVN and family is NaturalGaussian:
            pytest.skip("SRVN moves a root of the covariance")
        for K in (3, 4):
            target = model(K, rows=60)
            q = family(target.dim, dtype=DTYPE)
            result = fit(q, target, method(q), progress=False)
            assert result.converged, result
            losses = [record.loss for record in result.trace]
            assert all(b <= a + 1e-10 for a, b in zip(losses, losses[1:], strict=False))

    def test_the_mode_is_scikit_learns(self):
        """Small γ: q narrows on the penalised maximum, here of two classes' contrasts with the first."""
        X, y = randn(60, DIM, seed=1), labels(60, 3)
        target = SoftmaxRegression(X, y, prior_precision=100.0, temperature=1e-3)
        q = CholeskyGaussian(target.dim, scale=0.1, dtype=DTYPE)
        assert fit(q, target, progress=False).converged
        theta = q.mean.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(target.log_joint(theta), theta)
        assert float(gradient.abs().max()) < 0.1
        free = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10).fit(X.numpy(), y.numpy())
        weak = SoftmaxRegression(X, y, prior_precision=1e-6, temperature=1e-3)
        assert fit(q, weak, progress=False).converged
        contrast = torch.as_tensor(free.coef_[1:] - free.coef_[:1])
        close(q.mean.reshape(2, DIM), contrast, 2e-3)

    def test_probabilities(self):
        """Averages of the softmax over q, in the order of the labels."""
        target = SoftmaxRegression(randn(12, DIM, seed=1), 10 * labels(12, 3) - 5)
        assert target.classes.tolist() == [-5.0, 5.0, 15.0]
        q, X = posterior("cholesky", target.dim), randn(4, DIM, seed=8)
        draws = q.sample((200_000,), torch.Generator().manual_seed(1))
        eta = torch.nn.functional.pad(target.predictors(draws, X), (1, 0))
        close(target.probabilities(q, X), eta.softmax(-1).mean(0), 5e-3)
        assert target.probabilities(q).shape == (12, 3)

    def test_relabelling_permutes_the_blocks(self):
        """The reference class stays, two others change places."""
        X, y = randn(12, DIM, seed=1), labels(12, 3)
        swapped = torch.tensor([0.0, 2.0, 1.0])[y.long()].double()
        q = posterior("cholesky", 2 * DIM)
        order = torch.tensor([3, 4, 5, 0, 1, 2])
        p = CholeskyGaussian.from_moments(q.mean[order], q.covariance[order][:, order])
        one, other = (Quadrature()(a, SoftmaxRegression(X, b)) for a, b in ((q, y), (p, swapped)))
        close(other.value, one.value, 1e-8)
        close(other.derivative.g, one.derivative.g[order], 1e-8)
        close(other.derivative.H, one.derivative.H[order][:, order], 1e-7)

    def test_another_dtype(self):
        target, q = model(3), posterior("cholesky", 2 * DIM)
        e, other = Quadrature()(q, target), Quadrature()(q.float(), target.to(torch.float32))
        assert other.value.dtype == torch.float32
        close(other.value.double(), e.value, 1e-4)
        close(other.derivative.H.double(), e.derivative.H, 2e-3)

    def test_blocks_of_rows_leave_no_seam(self, monkeypatch):
        target, q = model(3), posterior("cholesky", 2 * DIM)
        whole = Quadrature()(q, target)
        monkeypatch.setattr("torchngvi.models.softmax._CELLS", 5000)
        parts = Quadrature()(q, target)
        close(parts.value, whole.value, EXACT)
        close(parts.derivative.H, whole.derivative.H, EXACT)


class TestClasses:
    """The coding of the labels does not depend on the rows that are at hand."""

    def test_parts_without_some_classes_add_up(self):
        """One part holds the classes 0 and 1, one 1 and 2, one 2 alone: with all of them named, the whole."""
        X, y = randn(12, DIM, seed=1), torch.tensor([0.0, 1, 0, 1, 1, 2, 1, 2, 2, 2, 2, 2], dtype=DTYPE)
        whole = SoftmaxRegression(X, y)
        theta = randn(5, whole.dim, seed=3)
        total = whole.prior.energy(theta)
        for rows in (slice(0, 4), slice(4, 8), slice(8, 12)):
            part = SoftmaxRegression(X[rows], y[rows], classes=[0, 1, 2])
            assert part.dim == whole.dim
            assert part.coding == whole.coding == (0.0, 1.0, 2.0)
            total = total - (part.log_joint(theta) + part.prior.energy(theta))
        close(total, -whole.log_joint(theta), EXACT)

    def test_their_order_is_that_given(self):
        X, y = randn(12, DIM, seed=1), labels(12, 3)
        target = SoftmaxRegression(X, y, classes=[2, 0, 1])
        assert target.y.tolist() == [[1, 2, 0][int(label)] for label in y]
        assert target.classes.tolist() == [2.0, 0.0, 1.0]

    @pytest.mark.parametrize("shape", [(12,), (2, 12)])
    @pytest.mark.parametrize("family", ["bernoulli_logit", "bernoulli_probit"])
    def test_of_a_bernoulli_family(self, family, shape):
        """The success last; one class alone will do."""
        y = 1.0 + (torch.arange(24.0, dtype=DTYPE)[: math.prod(shape)].reshape(shape) % 3 == 0)
        X = randn(12, DIM, seed=1)
        for classes, sign in (((1, 2), 1.0), ((2, 1), -1.0)):
            model = GeneralizedLinear(X, y, family, classes=classes)
            assert torch.equal(model.y, sign * (2 * y - 3))
            assert model.coding == classes
        assert GeneralizedLinear(X, y, family).coding == (1.0, 2.0)
        assert GeneralizedLinear(X, y - 1, family).coding == GeneralizedLinear(X, 2 * y - 3, family).coding
        assert GeneralizedLinear(X, torch.ones(12), family, classes=(1, 2)).y.tolist() == [-1.0] * 12

    @pytest.mark.parametrize(
        ("kind", "first", "second", "shown"),
        [
            (GeneralizedLinear, [0.0, 1.0, 1.0], [1.0, 2.0, 2.0], ("0, 1", "1, 2")),
            (SoftmaxRegression, [0.0, 1.0, 1.0], [1.0, 2.0, 2.0], ("0, 1", "1, 2")),
            (SoftmaxRegression, [0.0, 1.0, 2.0], [0.0, 1.0, 3.0], ("0, 1, 2", "0, 1, 3")),
        ],
    )
    def test_parts_coded_by_what_they_hold_do_not_merge(self, kind, first, second, shown):
        X = randn(3, DIM, seed=1)
        one, other = (kind(X, torch.tensor(y, dtype=DTYPE)) for y in (first, second))
        opt = VN(CholeskyGaussian(one.dim, dtype=DTYPE), lr=0.1)
        opt.step(one)
        opt.step(one.minibatch([0, 2]))
        text = (
            f"this posterior began on a model of the classes {shown[0]}; got one of the classes {shown[1]}, told from "
            "the labels that its part of the data happens to hold. Name all classes in classes= of every model; "
            "for another problem use a new posterior, or restart this one by initialize_()."
        )
        for again in (opt, copy.deepcopy(opt)):
            with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
                again.step(other)
        with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
            opt.evaluate(Regularized(other, ExpectedPenalty(0.1)))
        opt.step(GeneralizedLinear(X.repeat(1, one.dim // DIM), [1.0, 2.0, 3.0], "poisson_log"))  # has no classes

    @pytest.mark.parametrize("kind", [GeneralizedLinear, SoftmaxRegression])
    def test_nor_by_a_closure_by_gradients_or_under_a_new_optimizer(self, kind):
        X = randn(3, DIM, seed=1)
        one, other = (kind(X, torch.tensor(y, dtype=DTYPE)) for y in ([0.0, 1.0, 1.0], [1.0, 2.0, 2.0]))
        q = CholeskyGaussian(one.dim, dtype=DTYPE)
        opt = VN(q, lr=0.1)
        opt.step(lambda: one.negative_elbo(q))
        resumed = VN(q, lr=0.1)
        resumed.load_state_dict(opt.state_dict())
        refused = pytest.raises(
            InputError, match="^this posterior began on a model of the classes 0, 1; got one of the "
        )
        for step in (
            lambda: opt.step(lambda: other.negative_elbo(q)),
            lambda: other.negative_elbo(q).backward(),
            lambda: resumed.step(other),
            lambda: VN(copy.deepcopy(q)).evaluate(other),
        ):
            with refused:
                step()
        VN(q.initialize_()).step(other)  # another problem
        with pytest.raises(InputError, match="^this posterior began on a model of the classes 1, 2; got one of the "):
            one.negative_elbo(q)
