"""Slips at the doors to GPyTorch models: each is right, or said in a sentence that names the cause."""

import math
import warnings

import pytest
import torch

gpytorch = pytest.importorskip("gpytorch")

from gpytorch.distributions import MultivariateNormal  # noqa: E402
from sparse_models import SparseModel  # noqa: E402

from torchngvi import VN  # noqa: E402
from torchngvi.adapters.gpytorch import (  # noqa: E402
    NaturalGradientVariationalDistribution,
    SparseGP,
    natural_optimizer,
    refine_svgp,
    train_svgp,
    train_svgp_in_batches,
)
from torchngvi.errors import (  # noqa: E402
    InputError,
    PairError,
    RejectedStepError,
    RejectedStepWarning,
    ScaleWarning,
)
from torchngvi.optim import Watch  # noqa: E402


def Model(Z, tasks=None):  # noqa: N802
    """A sparse GP; of several tasks over one shared function where ``tasks`` is given."""
    several = gpytorch.variational.IndependentMultitaskVariationalStrategy
    wrap = None if tasks is None else lambda strategy: several(strategy, num_tasks=tasks)
    q = NaturalGradientVariationalDistribution(len(Z))
    return SparseModel(q, Z.clone(), wrap=wrap, learn_inducing_locations=False)


X = torch.linspace(0.0, 1.0, 100)[:, None]
WAVE = torch.sin(6 * X[:, 0])


def noise_fixed_at(value):
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-6))
    likelihood.noise = value
    likelihood.raw_noise.requires_grad_(False)
    return likelihood


def check_function(model, likelihood, x, y):
    """A fit that ends at a function, of whose scale nothing is said."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScaleWarning)
        assert train_svgp(model, likelihood, (x, y), progress=False).found == "function"


def test_what_is_no_model_and_no_likelihood_of_gpytorch():
    """Modules of torch alone."""
    with pytest.raises(PairError, match="the model must be an ApproximateGP, .* got Linear"):
        train_svgp(torch.nn.Linear(1, 1), noise_fixed_at(0.1), (X, WAVE), progress=False)
    own = torch.nn.Identity()
    own.expected_log_prob = None
    with pytest.raises(InputError, match="is a likelihood of GPyTorch, such as a GaussianLikelihood; got a Identity"):
        train_svgp(Model(X[::5]), own, (X, WAVE), progress=False)


class TestTheEndAtAConstant:
    def test_a_fixed_noise_is_no_constant(self):
        """Under a noise of 1e-5 a constant costs thousands of nats a row, and no free noise is there to help it."""
        model = Model(X[::5])
        check_function(model, noise_fixed_at(1e-5), X, WAVE)
        assert (model.eval()(X).mean - WAVE).square().mean().sqrt() < 0.01

    @pytest.mark.sparse(2)
    @pytest.mark.parametrize(
        ("likelihood", "draw"),
        [
            (gpytorch.likelihoods.GaussianLikelihood, torch.randn),
            (lambda: noise_fixed_at(1.0), torch.randn),
            (gpytorch.likelihoods.BernoulliLikelihood, lambda n: (torch.rand(n) < 0.3).float()),
            (gpytorch.likelihoods.PoissonLikelihood, lambda n: torch.poisson(torch.full((n,), 2.0))),
        ],
        ids=["noise", "fixed noise", "classes", "counts"],
    )
    def test_targets_that_no_input_tells(self, likelihood, draw):
        torch.manual_seed(0)
        inputs = torch.randn(200, 2).double()
        model = Model(inputs[:15]).double()
        with pytest.warns(ScaleWarning, match="no better than that of a constant function"):
            result = train_svgp(model, likelihood().double(), (inputs, draw(200).double()), progress=False)
        assert result.found == "constant"
        assert "no better than a constant function" in result.reason
        assert "no better than a constant function" in str(result)

    @pytest.mark.accuracy
    def test_a_noise_with_a_lower_bound(self):
        """A constant may have no smaller noise than the fit: its own would be 0.12 here."""
        bound, x = gpytorch.constraints.GreaterThan(0.3), X.double()
        likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=bound).double()
        check_function(Model(x[::5]).double(), likelihood, x, 0.5 * torch.sin(20 * x[:, 0]))

    @pytest.mark.accuracy
    def test_classes_without_noise(self):
        """The end is looked at within rounding, on a copy of q, which the model does not know."""
        model, x = Model(X[::5].double()).double(), X.double()
        labels = (torch.sin(6 * x[:, 0]) > 0).double()
        result = train_svgp(model, gpytorch.likelihoods.BernoulliLikelihood().double(), (x, labels), progress=False)
        assert result.refined is not None
        assert result.refined.converged

    def test_counts_that_an_input_tells(self):
        torch.manual_seed(0)
        model, counts = Model(X[::10].double()).double(), torch.poisson((2 * WAVE.double() + 1).exp())
        check_function(model, gpytorch.likelihoods.PoissonLikelihood(), X.double(), counts)


class TestTheNumberOfRows:
    def loop(self, num_data, steps=1):
        model, likelihood = Model(X[::10]), gpytorch.likelihoods.GaussianLikelihood()
        mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=num_data)
        natural = natural_optimizer(mll)
        for _ in range(steps):
            loss = -mll(model(X), WAVE)
            loss.backward()
            natural.step()
        return mll

    def test_the_number_of_batches_in_its_place(self):
        with pytest.raises(InputError, match="num_data .* is 10 where one batch has 100 rows"):
            self.loop(10)
        model = Model(X[::10])
        target = SparseGP(model, gpytorch.likelihoods.GaussianLikelihood(), [(X, WAVE)], num_data=10)
        with pytest.raises(InputError, match="is 10 where one batch has 100 rows"):
            VN(target.posterior, lr=1.0).step(target)

    def test_the_right_number_leaves_the_objective_as_it_was(self):
        mll = self.loop(100, 2)
        assert "_log_likelihood_term" not in vars(mll)


class TestRowsThatAreForgotten:
    def test_new_rows_alone(self):
        x, y = X.double(), WAVE.double()
        model, likelihood = Model(x[::10]).double(), gpytorch.likelihoods.GaussianLikelihood().double()
        refine_svgp(model, likelihood, [(x, y)], progress=False)
        with pytest.warns(UserWarning, match="q was found for other rows before, of which 100% are not among the 20"):
            result = refine_svgp(model, likelihood, [(x[:20] + 2.0, y[:20])], progress=False)
        assert "forgotten" in result.reason

    def test_old_and_new_rows_together_and_in_another_order(self):
        x, y = X.double(), WAVE.double()
        model, likelihood = Model(x[::10]).double(), gpytorch.likelihoods.GaussianLikelihood().double()
        refine_svgp(model, likelihood, [(x, y)], progress=False)
        order = torch.randperm(100)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            refine_svgp(
                model, likelihood, [(x[order[:50]], y[order[:50]]), (x[order[50:]], y[order[50:]])], progress=False
            )
            result = refine_svgp(
                model, likelihood, [(torch.cat([x, x[:20] + 2.0]), torch.cat([y, y[:20]]))], progress=False
            )
        assert "forgotten" not in result.reason

    def test_a_training_begins_anew(self):
        """Folds of a cross-validation, and rows in another dtype, are no rows that were forgotten."""
        x, y = X.double(), WAVE.double()
        model, likelihood = Model(x[::10]).double(), gpytorch.likelihoods.GaussianLikelihood().double()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for fold in range(2):
                kept = torch.arange(100) % 2 == fold
                result = train_svgp(model, likelihood, (x[kept], y[kept]), rounds=1, progress=False)
                assert "forgotten" not in result.refined.reason
            result = refine_svgp(
                model.float(), likelihood.float(), [(x[kept].float(), y[kept].float())], progress=False
            )
            assert "forgotten" not in result.reason
            result = refine_svgp(model.double(), likelihood.double(), [(x[kept], y[kept])], progress=False)
            assert "forgotten" not in result.reason


class TestOneFunctionUnderASoftmax:
    @pytest.mark.parametrize("mixing", [True, False])
    def test_it_cannot_separate_classes(self, mixing):
        classes = torch.arange(100) % 5
        model = Model(X[::10], tasks=5)
        likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_features=5, num_classes=5, mixing_weights=mixing)
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        with pytest.raises(PairError, match="cannot separate classes. Give .*batch_shape=torch.Size..5"):
            train_svgp_in_batches(model, likelihood, [(X, classes)], 100, adam, progress=False)
        mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=100)
        with pytest.warns(ScaleWarning, match="cannot separate classes"):
            natural_optimizer(mll)


class TestThePredictiveObjective:
    def run(self, lr, watch=None, **options):
        torch.manual_seed(0)
        x = torch.linspace(-2.0, 2.0, 200)[:, None]
        y = torch.sin(3 * x[:, 0]) + 0.3 * torch.randn(200)
        model, likelihood = Model(x[::10]), gpytorch.likelihoods.GaussianLikelihood()
        mll = gpytorch.mlls.PredictiveLogLikelihood(likelihood, model, num_data=200)
        adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.02)
        natural = natural_optimizer(mll, lr=lr, **options)
        natural.watch = watch or natural.watch
        for _ in range(60):
            adam.zero_grad()
            loss = -mll(model(x), y)
            loss.backward()
            natural.step()
            adam.step()
        return loss.item(), natural

    @pytest.mark.parametrize("lr", [0.1, 1.0])
    def test_every_step_is_taken(self, lr):
        """VN at a rate of 1 stands still here, at a loss of 35.8, while Adam moves the hyper-parameters."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss, natural = self.run(lr)
        assert loss < 0.5
        assert type(natural).__name__ == "IBLR"

    def test_steps_that_are_all_rejected_end_in_an_error(self):
        """Of a method that was asked for, after as many as the user allows."""
        sentence = "6 steps in a row .* q has stood still"
        with pytest.warns(RejectedStepWarning), pytest.raises(RejectedStepError, match=sentence):
            self.run(1.0, Watch(rejections=5), method=VN)


class TestTheCauseIsNamed:
    def test_a_dense_kernel_matrix(self):
        model = Model(X[::10])
        model.forward = lambda x: MultivariateNormal(model.mean_module(x), model.covar_module(x).to_dense())
        with pytest.raises(InputError, match="forward gives MultivariateNormal its kernel matrix as a dense tensor"):
            train_svgp(model, gpytorch.likelihoods.GaussianLikelihood(), (X, WAVE), progress=False)

    @pytest.mark.accuracy
    def test_shares_of_zero_and_one(self):
        shares = torch.sigmoid(WAVE)
        shares[3], shares[40] = 0.0, 1.0
        with pytest.raises(InputError, match="2 of 100 targets .* under BetaLikelihood, the first of them [01],"):
            train_svgp(Model(X[::10]), gpytorch.likelihoods.BetaLikelihood(), (X, shares), progress=False)
        inside = shares.clamp(0.01, 0.99)
        result = train_svgp(Model(X[::10]), gpytorch.likelihoods.BetaLikelihood(), (X, inside), progress=False)
        assert math.isfinite(result.losses[-1])
