"""Several latent functions on the direct path: tasks, coregionalization, classes, a noise that depends on x."""

import copy
import math

import pytest
import torch

from torchngvi import VN
from torchngvi.adapters.gpytorch import (
    DualELBO,
    NaturalGradientVariationalDistribution,
    SparseGP,
    natural_optimizer,
    refine_svgp,
    train_svgp,
)
from torchngvi.adapters.gpytorch.latents import _draws, energy, log_concave
from torchngvi.adapters.gpytorch.training import _Run
from torchngvi.errors import InputError, PairError

gp = pytest.importorskip("gpytorch")
v = gp.variational
N, M, IDENTITY = 60, 8, 1e-10


class Several(gp.models.ApproximateGP):
    """Tasks of their own, or mixtures of latent functions."""

    def __init__(self, functions, tasks=None):
        q = NaturalGradientVariationalDistribution(M, (functions,), mean_init_std=0.0)
        Z = torch.linspace(-2, 2, M)[:, None].repeat(functions, 1, 1)
        base = v.VariationalStrategy(self, Z, q)
        if tasks is None:
            super().__init__(v.IndependentMultitaskVariationalStrategy(base, num_tasks=functions))
        else:
            super().__init__(v.LMCVariationalStrategy(base, num_tasks=tasks, num_latents=functions))
        shape = torch.Size([functions])
        self.mean_module = gp.means.ConstantMean(batch_shape=shape)
        self.covar_module = gp.kernels.ScaleKernel(gp.kernels.RBFKernel(batch_shape=shape), batch_shape=shape)

    def forward(self, x):
        return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Heteroskedastic(gp.likelihoods.Likelihood):
    """y ~ N(f_1, exp(f_2)²): not log-concave in its second value."""

    def forward(self, f, *_, **__):
        return torch.distributions.Normal(f[..., 0], f[..., 1].exp())


def inputs(rows=N):
    torch.manual_seed(1)
    return 4 * torch.rand(rows, 1).double() - 2


def model_of(*arguments):
    torch.manual_seed(0)
    return Several(*arguments).double().train()


def regression():
    x = inputs()
    y = torch.cat([torch.sin(3 * x), torch.cos(2 * x), x], -1)
    return x, y + 0.1 * torch.randn(N, 3).double()


def classes():
    x = inputs()
    return x, (x[:, 0] > -0.5).long() + (x[:, 0] > 0.8).long()


def close(a, b, tolerance):
    assert float((a - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("kind", ["tasks", "coregionalization"])
def test_same_as_through_autograd(kind):
    """Loss, steps of every function, gradients of every hyper-parameter, the mixing and the noise, on mini-batches."""
    x, y = regression()
    drop_in = model_of(3) if kind == "tasks" else model_of(2, 3)
    likelihood = gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=3).double()
    direct = copy.deepcopy(drop_in)
    mll = gp.mlls.VariationalELBO(likelihood, drop_in, num_data=N)
    natural = natural_optimizer(mll, lr=0.2)
    natural_direct = VN(SparseGP(direct, likelihood, []).posterior, lr=0.2)
    for batch in torch.arange(N).split(20):
        gradients = []
        for model in (drop_in, direct):
            model.zero_grad()
            likelihood.zero_grad()
            if model is drop_in:
                natural.zero_grad()
                loss = -mll(model(x[batch]), y[batch])
                loss.backward()
                natural.step()
            else:
                target = SparseGP(model, likelihood, [(x[batch], y[batch])], num_data=N, learn=True)
                close(natural_direct.step(target) / N, loss.detach(), IDENTITY)
                target.backward()
            gradients.append([p.grad for p in (*model.parameters(), *likelihood.parameters())])
        assert all(g is not None for g in gradients[0])
        for a, b in zip(*gradients, strict=True):
            close(b, a, IDENTITY)
    a, b = natural.posteriors[0], natural_direct.posteriors[0]
    close(a.covariance, b.covariance, IDENTITY)
    close(a.mean, b.mean, IDENTITY)


def test_independent_tasks_are_regressions_of_their_own():
    """With one noise for all, each task ends at the q of a fit to it alone."""
    x, y = regression()
    model, likelihood = model_of(3), gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=3, rank=0).double()
    likelihood.noise, likelihood.task_noises = 0.02, torch.full((3,), 0.01).double()
    assert refine_svgp(model, likelihood, [(x, y)], progress=False).converged
    q = model.variational_strategy.base_variational_strategy._variational_distribution.posterior

    class One(gp.models.ApproximateGP):
        def __init__(self):
            own = NaturalGradientVariationalDistribution(M)
            super().__init__(v.VariationalStrategy(self, torch.linspace(-2, 2, M)[:, None], own))
            self.mean_module = gp.means.ConstantMean()
            self.covar_module = gp.kernels.ScaleKernel(gp.kernels.RBFKernel())

        forward = Several.forward

    for task in range(3):
        single, noise = One().double(), gp.likelihoods.GaussianLikelihood().double()
        noise.noise = 0.03
        refine_svgp(single, noise, [(x, y[:, task])], progress=False)
        alone = single.variational_strategy._variational_distribution.posterior
        close(q.mean[task], alone.mean, 1e-6)
        close(q.covariance[task], alone.covariance, 1e-6)


@pytest.mark.parametrize("functions", [3, 2])
def test_softmax(functions):
    """Classes, each with a function or of mixed features: converges by trial, never up, and tells the classes apart."""
    x, y = classes()
    torch.manual_seed(0)
    mixed = functions == 2
    likelihood = gp.likelihoods.SoftmaxLikelihood(num_features=functions, num_classes=3, mixing_weights=mixed).double()
    model, seen = model_of(functions), []
    target = SparseGP(model, likelihood, [(x, y)])
    natural = VN(target.posterior)
    for _ in range(10):
        seen.append(float(natural.step(target)))
    assert all(b <= a + 1e-9 for a, b in zip(seen, seen[1:], strict=False))
    result = refine_svgp(model, likelihood, [(x, y)], progress=False)
    assert result.converged
    assert result.loss < seen[-1] + 0.1  # rows in another order have other draws
    model.eval()
    if not mixed:
        assert float((model(x).mean.argmax(-1) == y).double().mean()) > 0.9


def test_the_draws_of_a_likelihood_without_a_formula():
    """Within Monte Carlo error of GPyTorch's own draws, the same at each call, exact for quadratics."""
    x, y = classes()
    model, likelihood = model_of(3), gp.likelihoods.SoftmaxLikelihood(num_classes=3, mixing_weights=False).double()
    target = SparseGP(model, likelihood, [(x, y)])
    mean, variance = torch.randn(3, N).double(), torch.rand(3, N).double()
    values = target.latents.values(mean, variance)
    ours = energy(likelihood, y, values)
    assert torch.equal(ours, energy(likelihood, y, values))
    likelihood.train()
    with gp.settings.num_likelihood_samples(4000):
        samples = torch.stack([-likelihood.expected_log_prob(y, values) for _ in range(5)])
    spread = float((ours - samples.mean(0)).std())
    assert abs(float((ours - samples.mean(0)).mean())) < 5 * spread / N**0.5
    assert spread < 0.05

    _draws.cache_clear()
    assert torch.equal(ours, energy(likelihood, y, values))
    seen = []

    class Unit(gp.likelihoods.Likelihood):
        def forward(self, f, *_, **__):
            seen.append(f.shape)
            return torch.distributions.Independent(torch.distributions.Normal(f, torch.ones_like(f)), 1)

    target_values = torch.randn(N, 3).double()
    exact = 0.5 * ((target_values - mean.mT).square() + variance.mT + math.log(2 * math.pi)).sum(-1)
    close(energy(Unit(), target_values, values), exact, 1e-12)
    assert seen == [(64, N, 3)]


def test_log_of_the_normal_distribution_function():
    """GPyTorch's jumps at -1 by 0.0019, where no derivative tells; ours is smooth."""
    z = torch.tensor([-1.0 - 1e-9, -1.0 + 1e-9], dtype=torch.float64)
    assert abs(float(gp.functions.log_normal_cdf(z).diff())) > 1e-3
    likelihood = gp.likelihoods.BernoulliLikelihood().double()
    y, variance = torch.tensor([1.0, 0.0, -1.0]).double(), torch.full((3,), 1e-8).double()
    values = gp.distributions.MultivariateNormal(torch.tensor([-1.5, -1.5, 1.5]).double(), torch.diag(variance))
    exact = -torch.special.log_ndtr(torch.tensor([-1.5, 1.5, -1.5]).double())
    close(energy(likelihood, y, values), exact, 1e-7)
    assert energy(likelihood, torch.tensor([1.0, torch.nan, 0.0]).double(), values).isnan().tolist() == [
        False,
        True,
        False,
    ]


def test_which_likelihoods_are_log_concave():
    for likelihood in (
        gp.likelihoods.GaussianLikelihood(),
        gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=2),
        gp.likelihoods.BernoulliLikelihood(),
        gp.likelihoods.PoissonLikelihood(),
        gp.likelihoods.LaplaceLikelihood(),
    ):
        assert log_concave(likelihood)
    for likelihood in (gp.likelihoods.StudentTLikelihood(), gp.likelihoods.BetaLikelihood(), Heteroskedastic()):
        assert not log_concave(likelihood)


def test_functions_that_explain_the_same_data():
    """Full steps of all at once would overshoot together: mixed functions step by 1/L, tasks of their own by 1."""
    x, y = regression()
    y = y[:, :2]
    likelihood = gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=2).double()
    likelihood.noise, likelihood.task_noises = 1e-3, torch.full((2,), 1e-3).double()
    still = torch.optim.SGD(likelihood.parameters(), lr=0.0)
    for functions in (3, 5):
        model = model_of(functions, 2)
        result = train_svgp(model, likelihood, [(x, y)], N, still, epochs=12, progress=False)
        assert all(b <= a for a, b in zip(result.losses[6:], result.losses[7:], strict=False))
        assert result.losses[-1] < 0.01 * result.losses[0]
    own = train_svgp(model_of(2), likelihood, [(x, y)], N, still, epochs=3, progress=False)
    assert abs(own.losses[2] - own.losses[1]) < 1e-9 * abs(own.losses[1])


def test_the_length_is_held_below_that():
    """Of mini-batches too, and where a tenth of the share of a batch is more."""
    x, y = regression()
    likelihood = gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=3).double()
    for functions in (5, 12):
        model = model_of(functions, 3)
        run = _Run(model, likelihood, N, torch.optim.SGD(model.parameters(), lr=0.0))
        run._set_length(N - 1)
        assert math.isclose(float(run.natural.param_groups[0]["lr"]), 1 / functions)
        for _ in range(3):
            run._follow(torch.ones(functions, M).double(), N - 1)
        assert math.isclose(float(run.log_rho.exp()), 1 / functions)


@pytest.mark.parametrize("kind", ["mixed", "softmax"])
def test_float32(kind):
    """q is refined in float64 beside a mixing matrix in float32, of the strategy or of the likelihood."""
    x, y = regression() if kind == "mixed" else classes()
    model = (model_of(2, 3) if kind == "mixed" else model_of(2)).float()
    if kind == "mixed":
        likelihood, y = gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=3), y.float()
    else:
        likelihood = gp.likelihoods.SoftmaxLikelihood(num_features=2, num_classes=3)
    assert refine_svgp(model, likelihood, [(x.float(), y)], progress=False).converged
    adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.01)
    run = _Run(model, likelihood, N, adam)
    run.q.double()
    bar = type("Bar", (), {"disable": True, "update": lambda *_: None})()
    first = run.epoch([(x.float(), y)], bar)
    assert run.epoch([(x.float(), y)], bar) < first
    assert all(p.dtype == torch.float32 for p in (*model.parameters(), *likelihood.parameters()))


def test_a_noise_that_depends_on_x():
    """Two functions, mean and log noise; hyper-parameters learnt on mini-batches, and the noise is found."""
    x = inputs(600)
    noise = torch.exp(-2 + x[:, 0])
    y = torch.sin(2 * x[:, 0]) + noise * torch.randn(600).double()
    model, likelihood = model_of(2), Heteroskedastic()
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    batches = list(zip(x.split(100), y.split(100), strict=True))
    result = train_svgp(model, likelihood, batches, 600, adam, epochs=15, refine=True, progress=False)
    assert result.refined.converged
    assert result.losses[-1] < result.losses[0]
    model.eval()
    with torch.no_grad():
        found = model(x).mean
    assert float((found[:, 0] - torch.sin(2 * x[:, 0])).abs().mean()) < 0.1
    assert float((found[:, 1] - noise.log()).abs().mean()) < 0.25


def test_refusals():
    x, y = regression()
    likelihood = gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=2).double()
    with pytest.raises(PairError, match="takes 2 latent values a datum, and the model gives 3. Wrap the Variational"):
        SparseGP(model_of(3), likelihood, [(x, y)])
    model = model_of(3)
    with pytest.raises(InputError, match="DualELBO is for one latent function a datum; got several. Use train_svgp."):
        DualELBO(model, gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=3).double(), [(x, y)])
    base = model.variational_strategy.base_variational_strategy
    base._variational_distribution = NaturalGradientVariationalDistribution(M + 1, (3,))
    with pytest.raises(InputError, match="q holds 9 inducing values where the strategy has 8 inducing points: build"):
        SparseGP(model, gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=3), [(x, y)])
    base._variational_distribution = NaturalGradientVariationalDistribution(M, (2, 3))
    with pytest.raises(PairError, match=r"take one batch dimension, that of the tasks .* got batch shape \(2, 3\)"):
        SparseGP(model, gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=3), [(x, y)])
    model = model_of(3)
    outer = gp.Module()
    outer.base_variational_strategy = model.variational_strategy.base_variational_strategy
    model.variational_strategy = outer
    with pytest.raises(PairError, match="take an IndependentMultitaskVariationalStrategy or an LMC.*; got Module. Use"):
        SparseGP(model, gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=3), [(x, y)])
    model = model_of(3)
    model.variational_strategy.task_dim = -2
    with pytest.raises(PairError, match=r"take one batch dimension, that of the tasks .* got batch shape \(3,\)"):
        SparseGP(model, gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=3), [(x, y)])
