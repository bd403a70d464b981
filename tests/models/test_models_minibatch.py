"""Mini-batches and Monte Carlo expectations: unbiased packets, and loops."""

import re

import pytest
import torch
from helpers import (
    DIM,
    DTYPE,
    EXACT,
    FAMILIES,
    IDENTITY,
    close,
    posteriors,
    randn,
    random_model,
    random_posterior,
    unbiased,
)

from torchngvi import BWGD, SRVN, VN, CholeskyGaussian, GeneralizedLinear, KLRadius, Stein, fit
from torchngvi.errors import PairError
from torchngvi.expectations import Antithetic, Autograd, Independent, MonteCarlo, PiecewiseBound, Quadrature
from torchngvi.interfaces import Cost, Expectation
from torchngvi.models import ExpectedPenalty, NegativeBinomial, Regularized, SoftmaxRegression, StudentT

ROWS = 24


def regression(seed=1, rows=ROWS, **options):
    X = randn(rows, DIM, seed=seed)
    y = (X.sum(-1) + randn(rows, seed=seed + 1) > 0).double()
    options = {"weights": randn(rows, seed=4).abs(), "offset": 0.3 * randn(rows, seed=5), **options}
    return GeneralizedLinear(X, y, prior_precision=torch.exp(randn(DIM, seed=6)), prior_mean=0.2, **options)


def softmax(rows=ROWS):
    y = (randn(rows, seed=2) > 0).double() + (randn(rows, seed=3) > 0.5).double()
    return SoftmaxRegression(randn(rows, DIM, seed=1), y, weights=randn(rows, seed=4).abs(), prior_mean=0.2)


def average(packets: list[Expectation]):
    """Value, g and H, averaged."""
    derivatives = [p.derivative if hasattr(p.derivative, "g") else p.derivative.raw() for p in packets]
    return (
        torch.stack([p.value for p in packets]).mean(0),
        torch.stack([d.g for d in derivatives]).mean(0),
        torch.stack([d.H for d in derivatives]).mean(0),
    )


class TestPackets:
    @pytest.mark.sparse(5)
    @pytest.mark.parametrize("estimator", [Quadrature(), PiecewiseBound(6)], ids=lambda x: type(x).__name__)
    @pytest.mark.parametrize("gamma", [0.0, 1.0, 2.0])
    @posteriors
    def test_a_partition_averages_to_the_full_packet(self, name, gamma, estimator):
        """Prior and temperature once, weights and offsets kept."""
        model, q = regression(temperature=gamma), random_posterior(name, (), seed=1)
        parts = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1)).reshape(4, -1)
        packets = [estimator(q, model.minibatch(part)) for part in parts]
        for actual, expected in zip(average(packets), average([estimator(q, model)]), strict=True):
            close(actual, expected, EXACT)
        assert all(p.temperature == gamma for p in packets)

    def test_of_softmax_and_regularized_models(self):
        parts = torch.arange(ROWS).reshape(6, 4)
        target = softmax()
        q = CholeskyGaussian(target.dim, mean=0.3, scale=0.7, dtype=DTYPE)
        for actual, expected in zip(
            average([Quadrature()(q, target.minibatch(part)) for part in parts]),
            average([Quadrature()(q, target)]),
            strict=True,
        ):
            close(actual, expected, EXACT)
        assert target.minibatch(parts[0]).num_data == ROWS
        wrapped = Regularized(target.minibatch(parts[0]), ExpectedPenalty())
        assert not Quadrature()(q, wrapped).comparable

    def test_log_joint(self):
        model, theta = regression(), randn(5, DIM, seed=3)
        parts = torch.arange(ROWS).reshape(3, -1)
        joint = torch.stack([model.minibatch(part).log_joint(theta) for part in parts])
        close(joint.mean(0), model.log_joint(theta), EXACT)

    def test_unequal_parts_average_by_their_size(self):
        """Each is an estimate of the whole; the last batch of a loader weighs as many rows as it has."""
        model, q = regression(), random_posterior("cholesky", (), seed=1)
        parts = torch.arange(ROWS).split(10)
        values = [Quadrature()(q, model.minibatch(part)).value * len(part) / ROWS for part in parts]
        close(torch.stack(values).sum(), Quadrature()(q, model).value, EXACT)

    def test_batches_of_posteriors(self):
        target = random_model("bernoulli_logit", (2,), 3, own_design=True).target
        q = random_posterior("cholesky", (2,), seed=1)
        packets = [Quadrature()(q, target.minibatch([i])) for i in range(target.num_data)]
        for actual, expected in zip(average(packets), average([Quadrature()(q, target)]), strict=True):
            close(actual, expected, EXACT)

    def test_a_batch_of_a_batch(self):
        """Still an estimate of all the data."""
        model = regression(weights=None)
        batch = model.minibatch(list(range(12))).minibatch([0, 5, 7])
        close(batch.weights, torch.full((3,), ROWS / 3, dtype=DTYPE), EXACT)
        assert batch.num_data == model.num_data == ROWS
        close(batch.X, model.X[[0, 5, 7]], 0.0)

    def test_the_model_is_left_as_it_was(self):
        model = regression()
        before = [tensor.clone() for tensor in model.tensors()]
        model.minibatch([1, 2])
        assert all(torch.equal(x, y) for x, y in zip(before, model.tensors(), strict=True))
        assert model.comparable

    @pytest.mark.parametrize("estimator", [Quadrature(), Autograd(), PiecewiseBound(6)], ids=lambda x: type(x).__name__)
    def test_not_comparable(self, estimator):
        model, q = regression(), random_posterior("cholesky", (), seed=1)
        assert estimator(q, model).comparable
        assert not estimator(q, model.minibatch([1, 2])).comparable


class TestLoop:
    def test_steps_by_trial_are_refused(self):
        model, q = regression(), CholeskyGaussian(DIM, dtype=DTYPE)
        text = (
            "SufficientDecrease compares the objective before and after a step, and a mini-batch gives another "
            "objective than the next. Pass a learning rate, for example lr=0.1."
        )
        optimizer = VN(q)
        for use in (optimizer.step, optimizer.evaluate):
            with pytest.raises(PairError, match=f"^{re.escape(text)}$"):
                use(model.minibatch([0, 1]))
        with pytest.raises(PairError, match=f"^{re.escape(text)}$"):
            fit(q, model.minibatch([0, 1]), progress=False)
        assert torch.equal(q.mean, torch.zeros(DIM, dtype=DTYPE))

    @pytest.mark.parametrize("method", [VN, SRVN, BWGD])
    def test_a_loader_of_indices(self, method):
        """Constant lr, shuffled batches: near the optimum of all the data."""
        model = regression(rows=400, weights=None, offset=None)
        exact = CholeskyGaussian(DIM, dtype=DTYPE)
        best = fit(exact, model, progress=False).loss
        q = CholeskyGaussian(DIM, scale=0.3, dtype=DTYPE)
        optimizer = method(q, lr=0.002 if method is BWGD else 0.05)
        loader = torch.utils.data.DataLoader(
            range(400), batch_size=50, shuffle=True, generator=torch.Generator().manual_seed(1)
        )
        start = model.negative_elbo(q).item()
        for _ in range(30):
            for index in loader:
                optimizer.step(model.minibatch(index))
        gap = model.negative_elbo(q).item() - best
        assert gap < 0.3
        assert gap < 0.02 * (start - best)

    def test_stochastic_srvn(self):
        """Mini-batches with draws of the predictors (Kumar et al., appendix E): a noise floor, not divergence."""
        model = regression(rows=400, weights=None, offset=None)
        exact = CholeskyGaussian(DIM, dtype=DTYPE)
        best = fit(exact, model, progress=False).loss
        q = CholeskyGaussian(DIM, scale=0.3, dtype=DTYPE)
        generator = torch.Generator().manual_seed(2)
        optimizer = SRVN(q, lr=0.05, estimator=MonteCarlo(Antithetic(2, generator)))
        for _ in range(200):
            optimizer.step(model.minibatch(torch.randperm(400, generator=generator)[:50]))
        assert 0 < model.negative_elbo(q).item() - best < 0.5


LIKELIHOODS = {
    **{name: (part.likelihood, part.targets) for name, part in FAMILIES.items()},
    "student_t": (lambda: StudentT(0.8, 3.0), lambda x: 2 * x),
    "negative_binomial": (lambda: NegativeBinomial(2.0), lambda x: (2 * x.abs()).round()),
}


class TestMonteCarlo:
    @pytest.mark.parametrize("family", LIKELIHOODS)
    @pytest.mark.parametrize("draws", [Independent, Antithetic])
    def test_unbiased(self, family, draws):
        """Value, α and β of every row by z-tests: a batch of equal posteriors gives independent draws."""
        likelihood, draw = LIKELIHOODS[family]
        X, y = 0.7 * randn(7, DIM, seed=1), draw(randn(7, seed=2))
        if family.startswith("bernoulli"):
            y[0], y[1] = 1.0, -1.0
        model = GeneralizedLinear(X, y, likelihood(), weights=0.2 + randn(7, seed=3).abs())
        one, count = random_posterior("cholesky", (), seed=1), 4000
        q = CholeskyGaussian(DIM, (count,), mean=one.mean, scale=one.scale_tril.expand(count, DIM, DIM))
        estimator = MonteCarlo(draws(2, torch.Generator().manual_seed(3)))
        e, exact = estimator(q, model), Quadrature()(one, model)
        if family.startswith("gaussian"):  # constant curvature
            close(e.derivative.beta, exact.derivative.beta.expand(count, -1).contiguous(), IDENTITY)
        else:
            unbiased(e.derivative.beta, exact.derivative.beta)
        if not (draws is Antithetic and family.startswith("gaussian")):
            unbiased(e.derivative.alpha, exact.derivative.alpha)
        unbiased(e.value, exact.value)
        assert (e.comparable, e.cost) == (False, Cost(2, 2))

    def test_rows_have_draws_of_their_own(self):
        """Two equal rows see different noise: the predictors are drawn, not θ."""
        model = GeneralizedLinear(torch.ones(2, DIM, dtype=DTYPE), [1.0, 2.0], "poisson_log")
        q = random_posterior("cholesky", (), seed=1)
        alpha = MonteCarlo(Independent(1, torch.Generator().manual_seed(1)))(q, model).derivative.alpha
        assert abs(float(alpha[0] + 1 - alpha[1] - 2)) > 1e-3

    def test_antithetic_draws_make_quadratics_exact(self):
        model = GeneralizedLinear(randn(5, DIM, seed=1), randn(5, seed=2), "gaussian")
        q = random_posterior("cholesky", (), seed=1)
        alpha = MonteCarlo(2)(q, model).derivative.alpha
        close(alpha, Quadrature()(q, model).derivative.alpha, EXACT)

    def test_each_call_draws_anew(self):
        model, q = regression(), random_posterior("cholesky", (), seed=1)
        estimator = MonteCarlo(Antithetic(2, torch.Generator().manual_seed(2)))
        first, second = (estimator(q, model).derivative.alpha for _ in range(2))
        assert not torch.equal(first, second)

    def test_steps_by_trial_are_refused(self):
        text = (
            "SufficientDecrease compares the objective before and after a step, and MonteCarlo gives noisy values. "
            "Pass a learning rate, for example lr=0.1, or step_size=KLRadius(0.1)."
        )
        with pytest.raises(PairError, match=f"^{re.escape(text)}$"):
            VN(CholeskyGaussian(DIM), estimator=MonteCarlo())
        VN(CholeskyGaussian(DIM), step_size=KLRadius(0.1), estimator=MonteCarlo())

    def test_stein_on_minibatches(self):
        """Unbiased too: gradients of a mini-batch's log joint at draws."""
        model, one = regression(), random_posterior("cholesky", (), seed=1)
        q = CholeskyGaussian(DIM, (2000,), mean=one.mean, scale=one.scale_tril.expand(2000, DIM, DIM))
        generator = torch.Generator().manual_seed(5)
        parts = torch.randperm(ROWS, generator=generator).reshape(4, -1)
        packets = [Stein(Antithetic(2, generator))(q, model.minibatch(part)) for part in parts]
        exact = Quadrature()(one, model).derivative.framed(one.frame())
        unbiased(torch.stack([p.derivative.a for p in packets]).mean(0), exact.a)
