"""Several latent functions on the direct path: tasks, coregionalization, classes, a noise that depends on x."""

import contextlib
import copy
import math

import pytest
import torch
from sparse_models import SparseModel, several

from torchngvi import IBLR, VN
from torchngvi.adapters.gpytorch import (
    NaturalGradientVariationalDistribution,
    SparseGP,
    energies,
    natural_optimizer,
    refine_svgp,
    train_svgp,
    train_svgp_in_batches,
)
from torchngvi.adapters.gpytorch.energies import conjugate, energy, log_concave, nodes
from torchngvi.adapters.gpytorch.engines import Epochs, NaturalSteps
from torchngvi.errors import InputError, PairError
from torchngvi.stepsizes import Constant

gp = pytest.importorskip("gpytorch")
linear_operator = pytest.importorskip("linear_operator")
v = gp.variational
N, M, IDENTITY = 60, 8, 1e-10


def Several(functions, tasks=None):  # noqa: N802
    """Tasks of their own, or mixtures of latent functions."""
    q = NaturalGradientVariationalDistribution(M, (functions,), mean_init_std=0.0)
    return several(q, torch.linspace(-2, 2, M)[:, None].repeat(functions, 1, 1), functions, tasks)


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


def single():
    """One latent function."""
    q = NaturalGradientVariationalDistribution(M, mean_init_std=0.0)
    return SparseModel(q, torch.linspace(-2, 2, M)[:, None]).double().train()


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
    natural_direct = VN(SparseGP(direct, likelihood, []).posterior, lr=0.2, step_size=Constant())
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
    for task in range(3):
        one, noise = single(), gp.likelihoods.GaussianLikelihood().double()
        noise.noise = 0.03
        refine_svgp(one, noise, [(x, y[:, task])], progress=False)
        alone = one.variational_strategy._variational_distribution.posterior
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


def test_the_draws_of_a_likelihood_without_a_formula(monkeypatch):
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

    monkeypatch.setattr(energies, "nodes", nodes.__wrapped__)  # made again
    assert torch.equal(ours, energy(likelihood, y, values))
    seen = []

    class Unit(gp.likelihoods.Likelihood):
        def forward(self, f, *_, **__):
            seen.append(f.shape)
            return torch.distributions.Independent(torch.distributions.Normal(f, torch.ones_like(f)), 1)

    target_values = torch.randn(N, 3).double()
    exact = 0.5 * ((target_values - mean.mT).square() + variance.mT + math.log(2 * math.pi)).sum(-1)
    close(energy(Unit(), target_values, values), exact, 1e-12)
    assert seen == [(512, N, 3)]


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


class Own(Heteroskedastic):
    """The same with the expectation in closed form, and a scale of its own."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.eye(1))

    def expected_log_prob(self, y, values):
        (a, b), (v, w) = values.mean.unbind(-1), values.variance.unbind(-1)
        square = (y - (a[:, None] @ self.scale)[:, 0]).square() + v
        return -b - 0.5 * square * (2 * w - 2 * b).exp() - 0.5 * math.log(2 * math.pi)


def marginals(mean, variance):
    """Of one value a datum, or of two."""
    if mean.ndim == 1:
        return gp.distributions.MultivariateNormal(mean, linear_operator.operators.DiagLinearOperator(variance))
    diagonal = linear_operator.operators.DiagLinearOperator(variance.flatten())
    return gp.distributions.MultitaskMultivariateNormal(mean, diagonal)


class TestTheLikelihoodIsAsked:
    def test_an_expectation_of_its_own(self):
        """In the place of draws of `forward`, with the derivatives of that formula; in float64 beside float32 too."""
        y, mean, variance = torch.randn(N).double(), torch.randn(N, 2).double(), torch.rand(N, 2).double()
        mean.requires_grad_()
        for likelihood in (Own(), Own().double()):
            values = marginals(mean, variance)
            ours = energy(likelihood, y, values)
            square = ((y - mean[:, 0]).square() + variance[:, 0]) * (2 * variance[:, 1] - 2 * mean[:, 1]).exp()
            exact = mean[:, 1] + 0.5 * square + 0.5 * math.log(2 * math.pi)
            close(ours.detach(), exact.detach(), 1e-12)
            close(*(torch.autograd.grad(e.sum(), mean, retain_graph=True)[0] for e in (ours, exact)), 1e-12)
            (gradient,) = torch.autograd.grad(ours.sum(), likelihood.scale)
            assert gradient.dtype == likelihood.scale.dtype
            assert float(gradient.abs()) > 0.1
        close(energy(Heteroskedastic(), y, values).detach(), ours.detach(), 1e-6)  # by quadrature
        replaced = Heteroskedastic()
        replaced.expected_log_prob = lambda y, values: torch.ones(N)
        close(energy(replaced, y, values), -torch.ones(N), 0.0)

    def test_its_optimum(self):
        """Counts with the expectation in closed form: refined to where a quadrature is, in as many evaluations."""

        class ByQuadrature(gp.likelihoods._OneDimensionalLikelihood):
            log_concave = True

            def forward(self, f, *_, **__):
                return torch.distributions.Poisson(f.exp())

        class InClosedForm(gp.likelihoods.Likelihood):
            log_concave, forward = True, ByQuadrature.forward

            def expected_log_prob(self, y, values):
                return y * values.mean - (values.mean + 0.5 * values.variance).exp() - (y + 1).lgamma()

        x, y = regression()
        y = (2 * y[:, 0].exp()).round()
        own, other = (
            refine_svgp(single(), kind().double(), [(x, y)], progress=False) for kind in (InClosedForm, ByQuadrature)
        )
        assert own.converged
        assert abs(own.loss - other.loss) < 1e-6 * abs(other.loss)
        assert own.evaluations == other.evaluations

    def test_sums_over_the_data(self):
        """The Pólya-Gamma bound as in GPyTorch's tutorial is refused for what it is; of each datum it is served."""

        class PGLikelihood(gp.likelihoods._OneDimensionalLikelihood):
            def expected_log_prob(self, y, values):
                second = values.variance + values.mean.square()
                c = second.detach().sqrt()
                return self.gathered((y - 0.5) * values.mean - 0.25 * torch.tanh(0.5 * c) / c * second)

            def gathered(self, terms):
                return terms.sum(-1)

            def forward(self, f, *_, **__):
                return torch.distributions.Bernoulli(logits=f)

        x, y = classes()
        y = (y > 0).double()
        text = r"PGLikelihood.expected_log_prob sums over the data: it gives \(\) where steps .* need \(60,\), an exp"
        with pytest.raises(
            InputError, match=text + r"ectation of each. Leave the sum to the objective, or use loss.ba"
        ):
            refine_svgp(single(), PGLikelihood(), [(x, y)], progress=False)
        likelihood = PGLikelihood()
        likelihood.gathered = lambda terms: terms
        m, v = torch.randn(N).double(), torch.rand(N).double()
        _, alpha, beta = SparseGP(single(), likelihood, [(x, y)])._moments(y, m, v, 1.0)
        c = (m.square() + v).sqrt()
        close(beta, 0.5 * torch.tanh(0.5 * c) / c, 1e-12)
        close(alpha, beta * m - (y - 0.5), 1e-12)
        likelihood.gathered = lambda terms: terms.expand(2, N)
        with pytest.raises(InputError, match=r"the likelihood gives \(2, 60\) expectations for \(60,\) latent values"):
            refine_svgp(single(), likelihood, [(x, y)], progress=False)

    KNOWN = (
        gp.likelihoods.GaussianLikelihood(),
        gp.likelihoods.BernoulliLikelihood(),
        gp.likelihoods.PoissonLikelihood(),
        gp.likelihoods.LaplaceLikelihood(),
    )
    OTHERS = (
        gp.likelihoods.StudentTLikelihood(),
        gp.likelihoods.BetaLikelihood(),
        gp.likelihoods.NegativeBinomialLikelihood(),
    )

    @pytest.mark.parametrize("likelihood", [*KNOWN, *OTHERS], ids=lambda likelihood: type(likelihood).__name__)
    def test_which_of_gpytorchs_are_log_concave(self, likelihood):
        """Those, and only those, whose 2 ∂F/∂v is nowhere negative over a grid of moments and targets."""
        supports = {gp.likelihoods.BetaLikelihood: [0.2, 0.9], gp.likelihoods.BernoulliLikelihood: [-1.0, 0.0, 1.0]}
        targets = supports.get(type(likelihood), [0.0, 1.0, 4.0, 20.0])
        mean, variance, y = torch.meshgrid(
            torch.linspace(-6, 6, 49).double(),
            torch.tensor([0.01, 0.3]).double(),
            torch.tensor(targets).double(),
            indexing="ij",
        )
        mean, variance, y = mean.flatten(), variance.flatten().requires_grad_(), y.flatten()
        (half,) = torch.autograd.grad(energy(likelihood.double(), y, marginals(mean, variance)).sum(), variance)
        assert log_concave(likelihood) == (likelihood in self.KNOWN)
        assert (float(half.min()) > -1e-6) == (likelihood in self.KNOWN), half.min()

    def test_which_are_known(self):
        """By what they inherit and what they say, not by what they are called."""

        class Counts(gp.likelihoods.PoissonLikelihood):
            pass

        class PoissonLikelihood(gp.likelihoods._OneDimensionalLikelihood):
            def forward(self, f, *_, **__):
                return torch.distributions.Poisson(f.square() + 1e-3)

        class Logit(gp.likelihoods._OneDimensionalLikelihood):
            log_concave = True

            def forward(self, f, *_, **__):
                return torch.distributions.Bernoulli(logits=f)

        class Robust(gp.likelihoods.GaussianLikelihood):
            def expected_log_prob(self, y, values, *_, **__):
                return -(1 + super().expected_log_prob(y, values).square()).log()

        class Cautious(Counts):
            log_concave = False

        assert all(log_concave(kind()) for kind in (Counts, Logit))
        assert log_concave(gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=2))
        assert not any(log_concave(kind()) for kind in (PoissonLikelihood, Robust, Cautious, Heteroskedastic))
        assert conjugate(gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=2))
        assert not any(conjugate(kind()) for kind in (Robust, Logit))
        x, y = classes()
        assert isinstance(NaturalSteps(SparseGP(single(), Logit(), []), N).optimizer, VN)
        assert isinstance(NaturalSteps(SparseGP(single(), PoissonLikelihood(), []), N).optimizer, IBLR)
        refined = refine_svgp(single(), Logit().double(), [(x, (y > 0).double())], progress=False)
        assert refined.converged
        assert refined.evaluations <= 6


def test_functions_that_explain_the_same_data():
    """Full steps of all at once would overshoot together: mixed functions step by 1/L, tasks of their own by 1."""
    x, y = regression()
    y = y[:, :2]
    likelihood = gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=2).double()
    likelihood.noise, likelihood.task_noises = 1e-3, torch.full((2,), 1e-3).double()
    still = torch.optim.SGD(likelihood.parameters(), lr=0.0)
    for functions in (3, 5):
        model = model_of(functions, 2)
        result = train_svgp_in_batches(model, likelihood, [(x, y)], N, still, epochs=12, progress=False)
        assert all(b <= a for a, b in zip(result.losses[6:], result.losses[7:], strict=False))
        assert result.losses[-1] < 0.01 * result.losses[0]
    own = train_svgp_in_batches(model_of(2), likelihood, [(x, y)], N, still, epochs=3, progress=False)
    assert abs(own.losses[2] - own.losses[1]) < 1e-9 * abs(own.losses[1])


def test_the_length_is_held_below_that():
    """Of mini-batches too, and where a tenth of the share of a batch is more."""
    x, y = regression()
    likelihood = gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=3).double()
    for functions in (5, 12):
        model = model_of(functions, 3)
        run = NaturalSteps(SparseGP(model, likelihood, []), N)
        run.set_length(N - 1)
        assert math.isclose(float(run.optimizer.param_groups[0]["lr"]), 1 / functions)
        for _ in range(3):
            run.follow(torch.ones(functions, M).double(), N - 1)
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
    run = Epochs(model, likelihood, [(x.float(), y)], N, adam, 2)
    run.q.double()
    first = run.advance().record.loss
    assert run.advance().record.loss < first
    assert all(p.dtype == torch.float32 for p in (*model.parameters(), *likelihood.parameters()))


@pytest.mark.accuracy
def test_a_noise_that_depends_on_x():
    """Two functions, mean and log noise; hyper-parameters learnt on mini-batches, and the noise is found."""
    x = inputs(600)
    noise = torch.exp(-2 + x[:, 0])
    y = torch.sin(2 * x[:, 0]) + noise * torch.randn(600).double()
    model, likelihood = model_of(2), Heteroskedastic()
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    batches = list(zip(x.split(100), y.split(100), strict=True))
    result = train_svgp_in_batches(model, likelihood, batches, 600, adam, epochs=15, refine=True, progress=False)
    assert result.refined.converged
    assert result.losses[-1] < result.losses[0]
    model.eval()
    with torch.no_grad():
        found = model(x).mean
    assert float((found[:, 0] - torch.sin(2 * x[:, 0])).abs().mean()) < 0.1
    assert float((found[:, 1] - noise.log()).abs().mean()) < 0.25


@pytest.mark.accuracy
@pytest.mark.parametrize("mixed", [None, 3])
def test_rows_of_one_task_each(mixed):
    """The sentence names the kernel that takes them; a likelihood of all values takes a target a row."""
    x, y = regression()
    for likelihood in (gp.likelihoods.GaussianLikelihood(), gp.likelihoods.BernoulliLikelihood()):
        with pytest.raises(InputError, match=r"a target for each, \(rows, 3\); got targets of .* IndexKernel"):
            SparseGP(model_of(3, mixed), likelihood, [(x, y[:, 0])])
    with pytest.raises(InputError, match="pairs .* got Tensor, Tensor, Tensor. .* IndexKernel"):
        SparseGP(model_of(3, mixed), gp.likelihoods.GaussianLikelihood(), [(x, x, y)])
    assert SparseGP(model_of(2), Heteroskedastic(), [(x, y[:, 0])]).batches
    x = torch.cat([x, torch.arange(N)[:, None] % 3], -1)
    kernel = gp.kernels.RBFKernel(active_dims=[0]) * gp.kernels.IndexKernel(num_tasks=3, active_dims=[1])
    model = SparseModel(gp.variational.CholeskyVariationalDistribution(24), torch.zeros(24, 2), kernel).double()
    likelihood = gp.likelihoods.GaussianLikelihood().double()
    train_svgp(model, likelihood, (x, torch.sin(2 * x[:, 0] + x[:, 1]) + 0.1 * y[:, 2]), rounds=2, progress=False)
    assert likelihood.noise.item() < 0.01
    assert torch.equal(model.variational_strategy.inducing_points[:, 1] % 1, torch.zeros(24))


@pytest.mark.parametrize("mixed", [None, 3])
@pytest.mark.parametrize("scale", [-1, 1, -150])
def test_a_loss_of_another_scale(mixed, scale):
    """The weight of the KL divergence of all functions is that of the objective."""
    x, y = regression()
    model, likelihood = model_of(3, mixed), gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=3).double()
    mll = gp.mlls.VariationalELBO(likelihood, model, num_data=len(x))
    natural = natural_optimizer(mll, lr=0.1)
    (scale * mll(model(x), y)).backward()
    with contextlib.nullcontext() if scale == -1 else pytest.raises(InputError, match="the KL divergence has the we"):
        natural.step()


def test_refusals():
    x, y = regression()
    likelihood = gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=2).double()
    with pytest.raises(PairError, match="takes 2 latent values a datum, and the model gives 3. Wrap the Variational"):
        SparseGP(model_of(3), likelihood, [(x, y)])
    model = model_of(3)
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
