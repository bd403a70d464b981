"""Steps inside GPyTorch's models: identities with closed forms and with GPyTorch's own natural gradient."""

import contextlib
import copy
import doctest
import math
import runpy
from pathlib import Path

import pytest
import torch

gpytorch = pytest.importorskip("gpytorch", reason="needs the extra gpytorch: pip install torchngvi[gpytorch]")

import linear_operator  # noqa: E402
from helpers import EXACT, IDENTITY, close  # noqa: E402
from sparse_models import SparseModel, tightening  # noqa: E402

from torchngvi import (  # noqa: E402
    IBLR,
    VN,
    CholeskyGaussian,
    DiagonalGaussian,
    KLRadius,
    NaturalGaussian,
    PrecisionCholeskyGaussian,
    Processes,
)
from torchngvi.adapters.gpytorch import (  # noqa: E402
    NaturalGradientVariationalDistribution,
    SparseGP,
    natural_optimizer,
    refine_svgp,
    train_svgp_in_batches,
    variational_posteriors,
)
from torchngvi.errors import InputError, PairError, RejectedStepWarning  # noqa: E402
from torchngvi.posteriors.flat import FlatCholesky  # noqa: E402
from torchngvi.stepsizes import Constant  # noqa: E402

# orthogonal decoupling builds sparse matrices by deprecated calls of torch
pytestmark = [
    pytest.mark.usefixtures("exact_probit"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.sparse.SparseTensor:UserWarning"),
]

ROOT = Path(__file__).parents[2]
gp = gpytorch
NGVD = NaturalGradientVariationalDistribution
FULL = [CholeskyGaussian, NaturalGaussian, PrecisionCholeskyGaussian]
M, N = 12, 60


class Model(SparseModel):
    """A sparse GP in one dimension; the distribution and the strategy are the test's."""

    def __init__(self, q, strategy=gp.variational.VariationalStrategy, batch=(), wrap=None, **options):
        Z = torch.linspace(-1.9, 1.9, q.num_inducing_points)[:, None]
        super().__init__(q, Z, strategy=strategy, wrap=wrap, batch=batch, **options)


def deep(network, layer, *sites):
    """Two layers of the classes of GPyTorch that are given, with so many quadrature sites where there are any."""

    class Layer(layer):
        def __init__(self, inputs, outputs):
            batch = torch.Size([] if outputs is None else [outputs])
            Z = torch.randn(*batch, M, inputs)
            super().__init__(gp.variational.VariationalStrategy(self, Z, NGVD(M, batch)), inputs, outputs, *sites)
            self.mean_module = gp.means.ConstantMean(batch_shape=batch)
            self.covar_module = gp.kernels.ScaleKernel(gp.kernels.RBFKernel(batch_shape=batch), batch_shape=batch)

        forward = SparseModel.forward

    class Deep(network):
        def __init__(self):
            super().__init__(*sites)
            self.hidden, self.last = Layer(1, 2), Layer(2, None)

        def forward(self, x):
            return self.last(self.hidden(x))

    return Deep().double()


def data(n=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(n, 1, dtype=torch.float64, generator=generator) - 2
    return x, torch.sin(3 * x[:, 0]) + 0.1 * torch.randn(n, dtype=torch.float64, generator=generator)


def gaussian(noise=0.01):
    likelihood = gp.likelihoods.GaussianLikelihood(noise_constraint=gp.constraints.GreaterThan(1e-9)).double()
    likelihood.noise = noise
    return likelihood


def model_with(q, **options):
    model = Model(q, **options).double()
    model.covar_module.base_kernel.lengthscale = 0.5
    return model.train()


def step(model, mll, optimizer, x, y):
    optimizer.zero_grad()
    loss = -mll(model(x), y).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def collapsed_bound(model, likelihood, x, y):
    """log N(y; μ, Q + σ²I) - tr(K - Q)/2σ² (Titsias 2009), with the jitter that GPyTorch adds."""
    with torch.no_grad():
        Z, jitter = model.variational_strategy.inducing_points, model.variational_strategy.jitter_val
        K = model.covar_module(Z).to_dense() + jitter * torch.eye(len(Z), dtype=x.dtype)
        A = torch.linalg.solve_triangular(torch.linalg.cholesky(K), model.covar_module(Z, x).to_dense(), upper=False)
        Q, noise = A.mT @ A, likelihood.noise[0]
        C = torch.linalg.cholesky(Q + noise * torch.eye(len(x), dtype=x.dtype))
        marginal = torch.distributions.MultivariateNormal(model.mean_module(x), scale_tril=C).log_prob(y)
        lost = model.covar_module(x, diag=True) + jitter - Q.diagonal()
        return marginal - 0.5 * lost.sum() / noise


class TestIdentities:
    @pytest.mark.parametrize("family", FULL)
    def test_one_step_is_the_collapsed_bound(self, family):
        x, y = data()
        model, likelihood = model_with(NGVD(M, posterior=family)), gaussian()
        model.mean_module.constant = 0.3
        mll = gp.mlls.VariationalELBO(likelihood, model, num_data=N)
        step(model, mll, natural_optimizer(mll, lr=1.0), x, y)
        close(mll(model(x), y).detach() * N, collapsed_bound(model, likelihood, x, y), IDENTITY)


def strategies():
    """Name -> the model, with what it needs."""
    v, two = gp.variational, torch.Size([2])
    return {
        "whitened": lambda family: model_with(NGVD(M, posterior=family)),
        "unwhitened": lambda family: model_with(NGVD(M, posterior=family), strategy=v.UnwhitenedVariationalStrategy),
        "large_batch": lambda family: model_with(NGVD(M, posterior=family), strategy=v.LargeBatchVariationalStrategy),
        "ciq": lambda family: model_with(NGVD(M, posterior=family), strategy=v.CiqVariationalStrategy),
        "batch_decoupled": lambda family: model_with(
            NGVD(M, posterior=family), strategy=v.BatchDecoupledVariationalStrategy, batch=(2,), mean_var_batch_dim=-1
        ),
        "batch": lambda family: model_with(NGVD(M, two, posterior=family), batch=(2,)),
        "multitask": lambda family: model_with(
            NGVD(M, two, posterior=family),
            batch=(2,),
            wrap=lambda s: v.IndependentMultitaskVariationalStrategy(s, num_tasks=2),
        ),
        "lmc": lambda family: model_with(
            NGVD(M, two, posterior=family),
            batch=(2,),
            wrap=lambda s: v.LMCVariationalStrategy(s, num_tasks=2, num_latents=2),
        ),
        "orthogonal": lambda family: model_with(
            NGVD(M, posterior=family),
            wrap=lambda s: v.OrthogonallyDecoupledVariationalStrategy(
                s, torch.linspace(-2, 2, 7)[:, None], v.DeltaVariationalDistribution(7)
            ),
        ),
    }


class TestStrategies:
    @pytest.mark.sparse(3)
    @pytest.mark.parametrize("family", [*FULL, DiagonalGaussian])
    @pytest.mark.parametrize("name", strategies())
    def test_the_objective_rises(self, name, family):
        torch.manual_seed(0)
        x, y = data()
        model = strategies()[name](family)
        tasks = name in ("multitask", "lmc")
        y = torch.stack([y, -y], -1) if tasks else y
        likelihood = gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=2).double() if tasks else gaussian(0.05)
        mll = gp.mlls.VariationalELBO(likelihood, model, num_data=N)
        natural = natural_optimizer(mll, lr=0.3)
        losses = [float(step(model, mll, natural, x, y)) for _ in range(9)]
        assert natural.rejections == 0
        if family is not DiagonalGaussian:  # whose steps can overshoot where coordinates are correlated
            assert all(after <= before + 1e-9 for before, after in zip(losses, losses[1:], strict=False))
        assert losses[-1] < losses[0] - 0.1

    def test_deep_gp(self):
        """Two layers, five draws: every layer's q moves, and the objective rises."""
        torch.manual_seed(0)
        x, y = data()
        model = deep(gp.models.deep_gps.DeepGP, gp.models.deep_gps.DeepGPLayer)
        mll = gp.mlls.DeepApproximateMLL(gp.mlls.VariationalELBO(gaussian(0.05), model, num_data=N))
        natural = natural_optimizer(mll, lr=0.1)
        assert [q.batch_shape for q in natural.posteriors] == [torch.Size([2]), torch.Size([])]
        before = [q.mean.clone() for q in natural.posteriors]
        with gp.settings.num_likelihood_samples(5):
            losses = [float(step(model, mll, natural, x, y)) for _ in range(30)]
        assert sum(losses[-5:]) / 5 < sum(losses[:3]) / 3 - 1
        assert all(bool((q.mean != old).all()) for q, old in zip(natural.posteriors, before, strict=True))


class TestDistribution:
    def test_the_start(self):
        torch.manual_seed(0)
        d = NGVD(3, mean_init_std=0.0).double()
        K = torch.tensor([[2.0, 0.5, 0.1], [0.5, 1.0, 0.2], [0.1, 0.2, 3.0]], dtype=torch.float64)
        mean = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        d.initialize_variational_distribution(gp.distributions.MultivariateNormal(mean, K))
        close(d.posterior.mean, mean, EXACT)
        close(d.posterior.covariance, K, EXACT)
        bad = linear_operator.to_linear_operator(K - 5 * torch.eye(3))
        with pytest.raises(InputError, match="the prior covariance of the inducing values is not positive definite"):
            d.initialize_variational_distribution(gp.distributions.MultivariateNormal(mean, bad))


class TestRefusals:
    def test_a_family_that_is_none(self):
        with pytest.raises(InputError, match="posterior is a Gaussian posterior such as CholeskyGaussian"):
            NGVD(3, posterior=torch.nn.Linear)

    def test_models_without_posteriors(self):
        with pytest.raises(InputError, match="Linear has no variational distribution; give an ApproximateGP"):
            variational_posteriors(torch.nn.Linear(1, 1))
        with pytest.raises(InputError, match="a point mass has no covariance, and no natural gradient"):
            variational_posteriors(Model(gp.variational.DeltaVariationalDistribution(M)))
        with pytest.raises(InputError, match="holds CholeskyVariationalDistribution, and no other variational"):
            variational_posteriors(Model(gp.variational.CholeskyVariationalDistribution(M)))

    def test_nearest_neighbours(self):
        strategy = gp.variational.NNVariationalStrategy.__new__(gp.variational.NNVariationalStrategy)
        torch.nn.Module.__init__(strategy)
        strategy.q = gp.variational.MeanFieldVariationalDistribution(M)
        with pytest.raises(InputError, match="the nearest-neighbour strategy takes GPyTorch's mean field only"):
            variational_posteriors(strategy)

    def test_no_objective(self):
        with pytest.raises(InputError, match="natural_optimizer reads the model and the number of data from the obj"):
            natural_optimizer(Model(NGVD(M)))

    def test_a_loss_of_another_scale(self):
        """A sum in the place of the mean, once; -mll, and its sum over a batch of models, are right."""
        x, y = data()
        model = model_with(NGVD(M, (2,)), batch=(2,))
        mll = gp.mlls.VariationalELBO(gaussian(), model, num_data=N, beta=0.5)
        natural = natural_optimizer(mll)
        (-mll(model(x), y).mean()).backward()
        with pytest.raises(
            InputError, match="the KL divergence has the weight 0.004167 in the loss .* 0.008333 = beta"
        ):
            natural.step()
        natural = natural_optimizer(mll)
        step(model, mll, natural, x, y)
        (-mll(model(x), y).mean()).backward()
        natural.step()  # asked once

    def test_direct_steps(self):
        x, y = data()
        with pytest.raises(PairError, match="for the whitened VariationalStrategy; got UnwhitenedVariationalStrategy"):
            SparseGP(model_with(NGVD(M), strategy=gp.variational.UnwhitenedVariationalStrategy), gaussian(), [(x, y)])
        with pytest.raises(PairError, match="the model's q is a CholeskyVariationalDistribution"):
            SparseGP(model_with(gp.variational.CholeskyVariationalDistribution(M)), gaussian(), [(x, y)])
        for likelihood in (
            gp.likelihoods.SoftmaxLikelihood(num_features=2, num_classes=2),
            gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=2),
        ):
            with pytest.raises(PairError, match="takes 2 latent values a datum, and the model gives 1. Wrap the Vari"):
                SparseGP(model_with(NGVD(M)), likelihood, [(x, y)])
        target = SparseGP(model_with(NGVD(M)), gaussian(), [(x, y)])
        with pytest.raises(PairError, match="SparseGP steps the posterior of its own model"):
            VN(CholeskyGaussian(M)).step(target)
        with pytest.raises(InputError, match=r"expectations for \(60,\) latent values"):
            VN(target.posterior).step(SparseGP(target.model, gaussian(), [(x, y.expand(2, N))]))
        with pytest.raises(InputError, match="SparseGP got no data"):
            VN(target.posterior).step(SparseGP(target.model, gaussian(), []))

    def test_training(self):
        x, y = data()
        model, likelihood = model_with(NGVD(M)), gaussian()
        adam = torch.optim.Adam(model.parameters())
        with pytest.raises(InputError, match="num_data counts the rows of an epoch and must .*; got 0"):
            train_svgp_in_batches(model, likelihood, [(x, y)], 0, adam)
        with pytest.raises(InputError, match="an epoch has 60 rows where num_data is 70"):
            train_svgp_in_batches(model, likelihood, [(x, y)], 70, adam, progress=False)
        q = variational_posteriors(model)[0]
        with pytest.raises(InputError, match="hyper_optimizer holds the posterior"):
            train_svgp_in_batches(model, likelihood, [(x, y)], N, torch.optim.Adam([q.mean_probe]), progress=False)
        for batches, options, text in (
            (3, {}, "batches is a DataLoader or a list of pairs .x, y. of tensors; got 3"),
            ([(x, y)], {"callbacks": [3]}, "callbacks is a list of functions of the epoch and its loss; got "),
            ([(x, y)], {"group": Processes.alone(), "refine": True}, "spread over 1. Leave refine= out"),
        ):
            with pytest.raises(InputError, match=text):
                train_svgp_in_batches(model, likelihood, batches, N, adam, progress=False, **options)
        with pytest.raises(InputError, match="inputs are in torch.float64 and the model is in torch.float32"):
            train_svgp_in_batches(model.float(), likelihood, [(x, y)], N, adam, progress=False)

    def test_a_flat_posterior(self):
        model = model_with(NGVD(M, posterior=FlatCholesky))
        with pytest.raises(PairError, match="reads the mean and the root of q, and FlatCholesky is a vector"):
            SparseGP(model, gaussian(), [data()])

    def test_a_summary_is_of_q_where_it_was_searched_for(self):
        model, likelihood, (x, y) = model_with(NGVD(M)), gaussian(), data()
        for refine in (False, True):
            adam = torch.optim.Adam(model.parameters())
            result = train_svgp_in_batches(
                model, likelihood, [(x, y)], N, adam, epochs=1, refine=refine, progress=False
            )
            first, *table = result.summary().splitlines()
            assert first == str(result)
            assert bool(table) == refine == (result.examination is not None)

    def test_coinciding_inducing_points(self):
        model = model_with(NGVD(M), jitter_val=0.0)
        with torch.no_grad():
            model.variational_strategy.inducing_points.fill_(0.0)
        with pytest.raises(InputError, match="K_ZZ is not positive definite: inducing points coincide"):
            refine_svgp(model, gaussian(), [data()], progress=False)


LIKELIHOODS = {
    "gaussian": gaussian,
    "bernoulli": lambda: gp.likelihoods.BernoulliLikelihood().double(),
    "poisson": lambda: gp.likelihoods.PoissonLikelihood().double(),
    "student_t": lambda: gp.likelihoods.StudentTLikelihood().double(),
    "laplace": lambda: gp.likelihoods.LaplaceLikelihood().double(),
}


def targets(name, y):
    return {"bernoulli": (y > 0).double(), "poisson": (3 * y.abs()).round()}.get(name, y)


class TestDirect:
    @pytest.mark.parametrize("family", FULL)
    @pytest.mark.parametrize("name", LIKELIHOODS)
    def test_same_as_through_autograd(self, name, family):
        """Loss, step and the gradients of every hyper-parameter, on mini-batches; with what the tighter bound adds."""
        x, y = data()
        y, likelihood = targets(name, y), LIKELIHOODS[name]()
        drop_in = model_with(NGVD(M, mean_init_std=0.0, posterior=family))
        direct = copy.deepcopy(drop_in)
        mll = gp.mlls.VariationalELBO(likelihood, drop_in, num_data=N)
        natural = natural_optimizer(mll, lr=0.2, step_size=Constant())
        natural_direct = VN(SparseGP(direct, likelihood, []).posterior, lr=0.2, step_size=Constant())
        for batch in torch.arange(N).split(20):
            gradients = []
            for model in (drop_in, direct):
                model.zero_grad()
                likelihood.zero_grad()
                if model is drop_in:
                    added = tightening(model, likelihood, x[batch]) / len(batch)
                    loss = step(model, mll, natural, x[batch], y[batch]) - added.detach()
                    if name == "gaussian":
                        (-added).backward()
                else:
                    target = SparseGP(model, likelihood, [(x[batch], y[batch])], num_data=N, learn=True)
                    close(natural_direct.step(target) / N, loss, IDENTITY)
                    target.backward()
                gradients.append([p.grad for p in (*model.parameters(), *likelihood.parameters())])
            for a, b in zip(*gradients, strict=True):
                close(b, a, IDENTITY)
        a, b = natural.posteriors[0], natural_direct.posteriors[0]
        close(a.covariance, b.covariance, IDENTITY)
        close(a.mean, b.mean, IDENTITY)

    def test_a_batch_of_models(self):
        x, y = data()
        y = torch.stack([y, -2 * y])
        model, likelihood = model_with(NGVD(M, (2,)), batch=(2,)), gaussian()
        result = refine_svgp(model, likelihood, [(x[:40], y[:, :40]), (x[40:], y[:, 40:])], progress=False)
        assert result.converged
        mll = gp.mlls.VariationalELBO(likelihood, model, num_data=N)
        bounds = mll(model(x), y).detach() * N
        close(-bounds.sum(), torch.tensor(result.loss, dtype=torch.float64), IDENTITY)
        single = model_with(NGVD(M))
        refine_svgp(single, likelihood, [(x, y[1])], progress=False)
        close(variational_posteriors(model)[0].mean[1], variational_posteriors(single)[0].mean, IDENTITY)

    def test_new_hyper_parameters_are_seen(self):
        """GPyTorch's setters leave no trace in torch's version counts."""
        x, y = data()
        model, likelihood = model_with(NGVD(M)), gaussian()
        target = SparseGP(model, likelihood, [(x, y)])
        natural = VN(target.posterior)
        natural.evaluate(target)
        for change in ("lengthscale", "noise", "jitter"):
            if change == "lengthscale":
                model.covar_module.base_kernel.lengthscale = 0.8
            elif change == "noise":
                likelihood.noise = 0.1
            else:
                model.variational_strategy.jitter_val = 1e-3
            fresh = copy.deepcopy(model)
            expected = VN(SparseGP(fresh, likelihood, []).posterior).evaluate(SparseGP(fresh, likelihood, [(x, y)]))
            close(natural.evaluate(target).loss, expected.loss, EXACT)

    def test_log_joint(self):
        """E_q of the log joint at draws is the value, for a Gaussian likelihood, within its Monte Carlo error."""
        x, y = data()
        model, likelihood = model_with(NGVD(M)), gaussian(0.5)
        target = SparseGP(model, likelihood, [(x, y)])
        q = target.posterior.initialize_(0.1, 0.3)
        value = target.expected_energy(q.frame())[0].detach()
        draws = -target.log_joint(q.sample((4000,), torch.Generator().manual_seed(0))).detach()
        assert abs(float(draws.mean() - value)) < 5 * float(draws.std()) / 4000**0.5

    def test_the_value_is_differentiable_in_the_probes(self):
        x, y = data()
        model = model_with(NGVD(M))
        target = SparseGP(model, gaussian(), [(x, y)])
        q = target.posterior
        target.negative_elbo(q).backward()
        local = q.local(VN(q)._evaluate_target(target, q).e)
        close(q.mean_probe.grad, local.a, IDENTITY)
        close(q.structure.one_sided(q.root_probe.grad), local.P, IDENTITY)


class TestTraining:
    # the quadrature of a Laplace likelihood has kinks, where no gradient vanishes
    @pytest.mark.parametrize("name", sorted(set(LIKELIHOODS) - {"laplace"}))
    def test_refine_ends_at_the_optimum(self, name):
        """In a few evaluations, from wherever q was; `fit` alone agrees."""
        x, y = data()
        y, likelihood = targets(name, y), LIKELIHOODS[name]()
        model = model_with(NGVD(M))
        batches = list(zip(x.split(17), y.split(17), strict=True))
        result = refine_svgp(model, likelihood, batches, progress=False)
        assert result.converged
        assert result.evaluations <= (8 if name != "student_t" else 30)
        again = copy.deepcopy(model)
        variational_posteriors(again)[0].initialize_(1.0, 0.5)
        assert abs(refine_svgp(again, likelihood, batches, progress=False).loss - result.loss) < 1e-6
        if name == "gaussian":
            close(torch.tensor(-result.loss, dtype=torch.float64), collapsed_bound(model, likelihood, x, y), IDENTITY)

    @pytest.mark.sparse(2)
    @pytest.mark.parametrize("name", ["gaussian", "bernoulli", "student_t"])
    def test_joint(self, name):
        """Hyper-parameters and q in one pass, as good as GPyTorch's own loop with twice the epochs."""
        torch.manual_seed(0)
        x, y = data(200)
        y, likelihood = targets(name, y), LIKELIHOODS[name]()
        model, seen = model_with(NGVD(M)), []
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=40, shuffle=True)
        parameters = [*model.parameters(), *likelihood.parameters()]
        result = train_svgp_in_batches(
            model,
            likelihood,
            loader,
            200,
            torch.optim.Adam(parameters, lr=0.02),
            epochs=15,
            refine=True,
            callbacks=[lambda epoch, loss: seen.append(loss)],
            progress=False,
        )
        assert seen == result.losses
        assert result.rejections == 0
        assert result.refined is not None
        assert result.refined.converged
        assert result.losses[-1] < result.losses[0] - 0.02
        assert result.refined.loss / 200 < result.losses[-1] + 0.05
        assert "15 epochs, negative ELBO per datum" in str(result)
        stopped = train_svgp_in_batches(
            model, likelihood, loader, 200, torch.optim.Adam(parameters), callbacks=[lambda *_: True]
        )
        assert len(stopped.losses) == 1

    def test_priors_count(self):
        """A prior on a hyper-parameter has the weight it has in GPyTorch's objective."""
        x, y = data()
        gradients = []
        for direct in (False, True):
            model, likelihood = model_with(NGVD(M, mean_init_std=0.0)), gaussian()
            model.covar_module.register_prior("outputscale_prior", gp.priors.GammaPrior(2.0, 3.0), "outputscale")
            if direct:
                sgd = torch.optim.SGD([*model.parameters(), *likelihood.parameters()], lr=0.0)
                train_svgp_in_batches(model, likelihood, [(x, y)], N, sgd, epochs=1, progress=False)
            else:
                mll = gp.mlls.VariationalELBO(likelihood, model, num_data=N)
                (-mll(model(x), y) - tightening(model, likelihood, x) / N).backward()
            gradients.append(model.covar_module.raw_outputscale.grad)
        close(gradients[1], gradients[0], IDENTITY)

    @pytest.mark.parametrize("noise", [1e-4, 1e-6])
    def test_float32_beside_a_small_noise(self, noise):
        """A float32 model ends where the float64 one does, and trains; in float64 where it must, and says so."""
        x, y = data(500)
        losses = []
        for dtype in (torch.float32, torch.float64):
            model = Model(NGVD(64), jitter_val=1e-4).to(dtype)
            likelihood, batches = gaussian(noise).to(dtype), [(x.to(dtype), y.to(dtype))]
            result = refine_svgp(model, likelihood, batches, progress=False)
            assert result.converged
            assert model.variational_strategy._variational_distribution.posterior.dtype == dtype
            losses.append(result.loss)
        assert abs(losses[0] - losses[1]) < 1e-3 * abs(losses[1])
        model = Model(NGVD(64), jitter_val=1e-4)
        x, y = x.float(), y.float()
        batches = list(zip(x.split(100), y.split(100), strict=True))
        adam = torch.optim.Adam([*model.parameters(), *(likelihood := gaussian(noise).float()).parameters()], lr=0.01)
        said = pytest.warns(RejectedStepWarning, match="could not be taken in float32: q is kept in float64")
        with said if noise < 1e-5 else contextlib.nullcontext():
            result = train_svgp_in_batches(
                model, likelihood, batches, 500, adam, epochs=10, refine=True, progress=False
            )
        assert result.rejections == (noise < 1e-5)
        assert result.refined.converged
        assert result.refined.loss < losses[1]
        assert bool(torch.isfinite(model.eval()(x).mean).all())

    def test_a_float64_posterior_in_a_float32_model(self):
        x, y = (part.float() for part in data())
        model = Model(NGVD(M))
        variational_posteriors(model)[0].double()
        mll = gp.mlls.VariationalELBO(gaussian().float(), model, num_data=N)
        natural = natural_optimizer(mll, lr=1.0)
        before = step(model, mll, natural, x, y)
        assert natural.posteriors[0].dtype == torch.float64
        assert model(x).mean.dtype == torch.float32
        assert step(model, mll, natural, x, y) < before


# ecosystem: what fails in float32 with GPyTorch's own natural gradient; (noise, lr, batch, objective, options)
HARD = {
    "noise 1e-4, lr 1": (1e-4, 1.0, None, "VariationalELBO", {}),
    "noise 1e-6": (1e-6, 0.1, None, "VariationalELBO", {"step_size": KLRadius(4.0)}),
    "batch of 16, lr 1": (1e-2, 1.0, 16, "VariationalELBO", {}),
    "predictive log likelihood": (
        1e-2,
        1.0,
        None,
        "PredictiveLogLikelihood",
        {"method": IBLR, "step_size": KLRadius(4.0)},
    ),
    "lr 2.1": (1e-2, 2.1, None, "VariationalELBO", {}),
}


class TestFailureTable:
    @pytest.mark.accuracy
    @pytest.mark.filterwarnings("ignore::torchngvi.errors.RejectedStepWarning")
    @pytest.mark.parametrize("name", HARD)
    def test_float32(self, name):
        """Hyper-parameters train too; the loss falls, and what could not be done is counted."""
        noise, lr, batch, objective, options = HARD[name]
        torch.manual_seed(0)
        x = 4 * torch.rand(500, 1) - 2
        y = torch.sin(3 * x[:, 0]) + noise**0.5 * torch.randn(500)
        model = Model(NGVD(64)).train()
        likelihood = gaussian(noise).float()
        mll = getattr(gp.mlls, objective)(likelihood, model, num_data=500)
        natural = natural_optimizer(mll, lr=lr, **options)
        adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.01)
        losses = []
        for _ in range(40):
            some = torch.randperm(500)[:batch]
            adam.zero_grad()
            losses.append(float(step(model, mll, natural, x[some], y[some])))
            adam.step()
        assert all(math.isfinite(loss) for loss in losses)
        assert losses[-1] < losses[0]
        assert math.isfinite(mll(model(x), y).item())

    def test_a_rejected_step_is_reported(self):
        """Student-t, data far from the prior: where GPyTorch raises, q stays and the first such step warns."""
        torch.manual_seed(0)
        x, y = data()
        likelihood = gp.likelihoods.StudentTLikelihood(noise_constraint=gp.constraints.GreaterThan(1e-6)).double()
        likelihood.noise = 1e-3
        model = model_with(NGVD(M))
        mll = gp.mlls.VariationalELBO(likelihood, model, num_data=N)
        natural = natural_optimizer(mll, lr=1.0, step_size=Constant())
        with pytest.warns(RejectedStepWarning, match="left the positive definite cone"):
            step(model, mll, natural, x, 10 * y + 5)
        assert natural.rejections == 1
        assert refine_svgp(model, likelihood, [(x, 10 * y + 5)], progress=False).converged


class TestDocuments:
    @pytest.mark.accuracy
    def test_the_page(self):
        failed, tried = doctest.testfile(str(ROOT / "docs" / "gpytorch.md"), module_relative=False)
        assert tried > 10
        assert failed == 0

    @pytest.mark.accuracy
    def test_regression_example(self, tmp_path, capsys):
        arguments = ["--rows", "1000", "--epochs", "20", "--out", str(tmp_path / "figure.png")]
        result, error, noise = runpy.run_path(str(ROOT / "examples" / "svgp_regression.py"))["main"](arguments)
        assert result.refined.converged
        assert result.rejections == 0
        assert error < 0.2
        assert 0.1 < noise < 0.5
        assert "q converged, natural-gradient norm" in capsys.readouterr().out
        assert (tmp_path / "figure.png").stat().st_size > 10_000

    @pytest.mark.accuracy
    def test_classification_example(self, tmp_path, capsys):
        arguments = ["--rows", "800", "--epochs", "5", "--out", str(tmp_path / "figure.png")]
        accuracy, rejections = runpy.run_path(str(ROOT / "examples" / "svgp_classification.py"))["main"](arguments)
        assert accuracy > 0.9
        assert rejections == 0
        assert "held-out accuracy" in capsys.readouterr().out
        assert (tmp_path / "figure.png").stat().st_size > 10_000
