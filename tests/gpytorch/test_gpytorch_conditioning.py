"""Rows beside a q that was found: added to it, taken from it, or near to those that are predicted."""

import copy

import pytest
import torch
from sparse_models import SparseModel

from torchngvi.adapters.gpytorch import (
    NaturalGradientVariationalDistribution,
    condition,
    fantasize,
    forget,
    predict_with_neighbours,
    refine_svgp,
)
from torchngvi.adapters.gpytorch.training import _fitted as remembered
from torchngvi.adapters.gpytorch.training import remember_rows
from torchngvi.errors import InputError, PairError

gp = pytest.importorskip("gpytorch")
N, JITTER = 60, 1e-6
SPANS = {"nothing": torch.linspace(90, 99, 4), "something": torch.linspace(-2, 2, 5), "all": torch.linspace(-2, 2, 40)}


class Model(SparseModel):
    def __init__(self, Z, kind=NaturalGradientVariationalDistribution, **options):
        super().__init__(kind(len(Z), torch.Size(options.get("batch", ()))), Z[:, None], jitter_val=JITTER, **options)


def problem(Z=SPANS["something"], likelihood=None, **options):
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(N, 1, generator=generator).double() - 2
    y = torch.sin(3 * x[:, 0]) + 0.2 * torch.randn(N, generator=generator).double()
    model = Model(Z, **options).double()
    model.covar_module.base_kernel.lengthscale, model.mean_module.constant = 0.4, 0.3
    if likelihood is None:
        likelihood = gp.likelihoods.GaussianLikelihood().double()
        likelihood.noise = 0.04
    return model, likelihood, x, y


class TestNeighbours:
    @pytest.mark.parametrize("rows", ["one noise", "a noise for each row"])
    @pytest.mark.parametrize("spans", SPANS)
    def test_all_rows_are_the_exact_process(self, spans, rows):
        """Whatever the inducing points span."""
        noise = torch.full((N,), 0.04).double() if rows == "one noise" else torch.linspace(0.01, 0.3, N).double()
        own = None if rows == "one noise" else gp.likelihoods.FixedNoiseGaussianLikelihood(noise)
        model, likelihood, x, y = problem(SPANS[spans], own)
        refine_svgp(model, likelihood, [(x, y)], progress=False)
        new = torch.linspace(-3, 3, 17).double()[:, None]
        with torch.no_grad():
            found = predict_with_neighbours(model, likelihood, new, x, y, neighbours=N)
            joint = model.forward(torch.cat([x, new]))
            K, mean = joint.covariance_matrix, joint.mean
            weights = torch.linalg.solve(K[:N, :N] + torch.diag(noise + JITTER), K[:N, N:])
            close = 1e-9 if spans != "all" else 1e-6  # where K_ZZ is nearly singular
            assert float((found.mean - mean[N:] - (y - mean[:N]) @ weights).abs().max()) < close
            wanted = K.diagonal()[N:] + JITTER - (K[:N, N:] * weights).sum(0)
            assert float((found.variance - wanted).abs().max()) < close

    def test_none_and_far_rows_are_the_prediction_of_q(self):
        model, likelihood, x, y = problem()
        refine_svgp(model, likelihood, [(x, y)], progress=False)
        new = torch.linspace(-3, 3, 17).double()[:, None]
        model.eval()
        with torch.no_grad():
            for rows, number, close in ((new, 0, 1e-9), (new + 50, 8, 1e-9)):
                found, wanted = predict_with_neighbours(model, likelihood, rows, x, y, number), model(rows)
                assert float((found.mean - wanted.mean).abs().max()) < close
                assert float((found.variance - wanted.variance).abs().max()) < close
        assert not model.training

    def test_a_few_rows_bring_most(self):
        """Between the two, and the rows are the ones that matter, whatever else is asked at once."""
        model, likelihood, x, y = problem()
        refine_svgp(model, likelihood, [(x, y)], progress=False)
        new = torch.linspace(-2, 2, 40).double()[:, None]
        few, one, exact = (predict_with_neighbours(model, likelihood, new, x, y, k) for k in (8, 0, N))
        errors = [float((found.mean - exact.mean).abs().mean()) for found in (few, one)]
        assert errors[0] < 0.35 * errors[1]
        again = predict_with_neighbours(model, likelihood, new[3:4], x, y)
        assert float((again.mean - few.mean[3:4]).abs()) < 1e-12
        assert likelihood(few).variance.min() > 0.04

    def test_float32_and_the_distributions_of_gpytorch(self):
        model, likelihood, x, y = problem(kind=gp.variational.CholeskyVariationalDistribution)
        refine_svgp(model, likelihood, [(x, y)], progress=False)
        wanted = predict_with_neighbours(model, likelihood, x, x, y)
        found = predict_with_neighbours(model.float(), likelihood.float(), x.float(), x.float(), y.float())
        assert found.mean.dtype == torch.float32
        assert float((found.mean - wanted.mean).abs().max()) < 1e-3

    @pytest.mark.parametrize("later", [False, True])
    def test_gradients_go_through_fantasies_of_fantasies(self, later):
        model, likelihood, x, y = problem()
        condition(model, likelihood, x[:40], y[:40])

        def predicted(new):
            first = fantasize(model, likelihood, new, y[40:41])
            second = fantasize(first, likelihood, x[41:42].clone().requires_grad_(later), y[41:42])
            return second.eval()(x[:3]).mean

        assert torch.autograd.gradcheck(predicted, (x[40:41].clone().requires_grad_(),), atol=1e-6)

    def test_refusals(self):
        model, likelihood, x, y = problem()
        with pytest.raises(PairError, match="corrected by rows near them for Gaussian noise; got BernoulliLikelihood"):
            predict_with_neighbours(model, gp.likelihoods.BernoulliLikelihood(), x, x, y)
        with pytest.raises(InputError, match="the inducing points have 1 features; got inputs of shape"):
            predict_with_neighbours(model, likelihood, x.expand(-1, 2), x, y)
        with pytest.raises(InputError, match="neighbours counts training rows"):
            predict_with_neighbours(model, likelihood, x, x, y, -1)


KINDS = [NaturalGradientVariationalDistribution, gp.variational.CholeskyVariationalDistribution]
STRATEGIES = [gp.variational.VariationalStrategy, gp.variational.UnwhitenedVariationalStrategy]
OTHERS = {
    "bernoulli": (gp.likelihoods.BernoulliLikelihood, lambda y: (y > 0).double()),
    "poisson": (gp.likelihoods.PoissonLikelihood, lambda y: y.exp().round()),
    "student": (gp.likelihoods.StudentTLikelihood, lambda y: y),
}


def moments(model, x):
    with torch.no_grad():
        found = model.eval()(x)
    return torch.stack([found.mean, found.stddev])


def apart(a, b, x):
    return float((moments(a, x) - moments(b, x)).abs().max())


class TestConditioning:
    @pytest.mark.sparse(3)
    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_gaussian_rows_are_as_a_refit_on_all(self, kind, strategy):
        """In whatever order they come; forgotten, they leave q as it was."""
        model, likelihood, x, y = problem(kind=kind, strategy=strategy)
        everything, other = copy.deepcopy(model), copy.deepcopy(model)
        refine_svgp(everything, likelihood, [(x, y)], progress=False)
        refine_svgp(model, likelihood, [(x[:30], y[:30])], progress=False)
        before = copy.deepcopy(model)
        assert condition(model, likelihood, x[30:], y[30:]) is model
        assert apart(model, everything, x) < 1e-10
        for part in torch.arange(N).flip(0).split(7):
            condition(other, likelihood, x[part], y[part])
        assert apart(other, everything, x) < 1e-10
        forget(model, likelihood, x[30:], y[30:])
        assert apart(model, before, x) < 1e-9

    @pytest.mark.parametrize("name", OTHERS)
    def test_other_likelihoods(self, name):
        """Nearly as a refit on all rows, and far nearer than before; forgotten again."""
        kind, targets = OTHERS[name]
        model, likelihood, x, y = problem(likelihood=kind().double())
        y, everything = targets(y), copy.deepcopy(model)
        refine_svgp(everything, likelihood, [(x, y)], progress=False)
        refine_svgp(model, likelihood, [(x[:40], y[:40])], progress=False)
        before = copy.deepcopy(model)
        condition(model, likelihood, x[40:], y[40:])
        assert apart(model, everything, x) < 0.05 * apart(before, everything, x)
        forget(model, likelihood, x[40:], y[40:])
        assert apart(model, before, x) < 1e-3

    def test_a_noise_for_each_row(self):
        noise = torch.linspace(0.01, 0.3, N).double()
        model, _, x, y = problem()
        everything = copy.deepcopy(model)
        refine_svgp(everything, gp.likelihoods.FixedNoiseGaussianLikelihood(noise), [(x, y)], progress=False)
        for part in (slice(20), slice(20, N)):
            condition(model, gp.likelihoods.FixedNoiseGaussianLikelihood(noise[part]), x[part], y[part])
        assert apart(model, everything, x) < 1e-10

    @pytest.mark.sparse(5)
    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize("name", ["gaussian", *OTHERS])
    @pytest.mark.parametrize("new", [[[-1.5], [2.5]], [[[-1.5], [2.5]], [[1.0], [1.0]]]])
    def test_a_batch_of_fantasies(self, new, name, strategy):
        """Each is the model conditioned on its targets, whitened, at inputs of all or its own; that stays as it was."""
        own = None if name == "gaussian" else OTHERS[name][0]().double()
        model, likelihood, x, y = problem(likelihood=own, strategy=strategy)
        y = y if name == "gaussian" else OTHERS[name][1](y)
        condition(model, likelihood, x, y)
        before, new = moments(model, x), torch.tensor(new).double()
        y = y[torch.arange(12)].reshape(3, 2, 2)
        fantasy = fantasize(model, likelihood, new, y)
        found = moments(fantasy, x)
        assert found.shape == (2, 3, 2, N)
        assert torch.equal(moments(model, x), before)
        for i in range(3):
            for j in range(2):
                one = condition(copy.deepcopy(model), likelihood, new.expand(2, 2, 1)[j], y[i, j])
                mean, sd = moments(one, x)
                sd = sd if strategy is STRATEGIES[0] else (sd.square() + JITTER).sqrt()
                assert float((mean - found[0, i, j]).abs().max()) < 1e-8
                assert float((sd - found[1, i, j]).abs().max()) < 1e-8

    @pytest.mark.parametrize("learnt", [False, True])
    @pytest.mark.parametrize("name", ["gaussian", "bernoulli"])
    def test_a_fantasy_of_a_fantasy(self, name, learnt):
        """One row after another, as in a loop of Bayesian optimisation, whether inputs are differentiated or not."""
        model, likelihood, x, y = problem(likelihood=None if name == "gaussian" else OTHERS[name][0]().double())
        y = y if name == "gaussian" else OTHERS[name][1](y)
        fantasy = condition(model, likelihood, x[:40], y[:40])
        for new, target in zip(x[40:43].split(1), y[40:43].split(1), strict=True):
            fantasy = fantasize(fantasy, likelihood, new.requires_grad_(learnt), target)
            condition(model, likelihood, new.detach(), target)
        assert apart(fantasy, model, x) < 1e-8
        found = fantasy.variational_strategy._variational_distribution.posterior.mean
        assert found.requires_grad == (learnt and name == "gaussian")

    def test_fantasies_of_gaussian_noise_are_differentiable(self):
        model, likelihood, x, y = problem()
        condition(model, likelihood, x, y)
        targets = torch.tensor([[1.0], [-0.5]]).double().requires_grad_()

        def predicted(new, targets):
            there = fantasize(model, likelihood, new, targets).eval()(x[:3])
            return there.mean, there.variance

        new = torch.tensor([[0.3]]).double().requires_grad_()
        assert torch.autograd.gradcheck(predicted, (new, targets), atol=1e-6)

    def test_refusals(self):
        model, likelihood, x, y = problem()
        with pytest.raises(InputError, match="q knows less than these 60 rows say: it was found for other rows"):
            forget(model, likelihood, x, y)
        with pytest.raises(PairError, match="rows are added to q and taken from it for one latent function"):
            condition(Model(SPANS["something"], batch=(2,)).double(), likelihood, x, y)
        with pytest.raises(InputError, match="takes the labels 0 and 1"):
            condition(model, gp.likelihoods.BernoulliLikelihood(), x, y)

    def test_a_long_stream_is_remembered_by_some_rows(self):
        """What a later refit is compared with does not grow with the rows."""
        model = problem()[0]
        for row in torch.linspace(-2, 2, 1000)[:, None, None]:
            remember_rows(model, [row])
        assert 100 < len(remembered[model]) <= 256
        assert remembered[model].aminmax() == (-2.0, 2.0)

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_refining_on_new_rows_alone_is_told(self, strategy):
        """What was conditioned on counts as rows that q was found for."""
        model, likelihood, x, y = problem(strategy=strategy)
        condition(model, likelihood, x[:30], y[:30])
        with pytest.warns(UserWarning, match="what the others said is forgotten. .* condition"):
            refine_svgp(model, likelihood, [(x[30:], y[30:])], progress=False)
        condition(model, likelihood, x[:30], y[:30])
        forget(model, likelihood, x[30:], y[30:])
        refine_svgp(model, likelihood, [(x[:30], y[:30])], progress=False)  # without a warning: the others were taken
        for part in range(0, 30, 10):  # until none is left
            forget(model, likelihood, x[part : part + 10], y[part : part + 10])
