"""Several latent functions in one call: steps of all means at once, the optimum and its gradient, refusals."""

import copy
import math
import warnings

import pytest
import torch

gp = pytest.importorskip("gpytorch")

from sparse_models import SparseModel, check_gradient  # noqa: E402
from test_gpytorch_latents import (  # noqa: E402
    Heteroskedastic,
    M,
    N,
    classes,
    close,
    inputs,
    marginals,
    model_of,
    regression,
)

from torchngvi.adapters.gpytorch import (  # noqa: E402
    NaturalGradientVariationalDistribution,
    refine_svgp,
    sparse_gp,
    train_svgp,
)
from torchngvi.adapters.gpytorch.energies import energy, expected_logsumexp, softmax_derivatives  # noqa: E402
from torchngvi.adapters.gpytorch.engines import Rounds  # noqa: E402
from torchngvi.adapters.gpytorch.model import kernels  # noqa: E402
from torchngvi.adapters.gpytorch.sparse_gp import ProfiledELBO  # noqa: E402
from torchngvi.adapters.gpytorch.starts import left_open  # noqa: E402
from torchngvi.errors import InputError, PairError, ScaleWarning  # noqa: E402

likelihoods, v = gp.likelihoods, gp.variational


def batch_of(functions):
    """A batch of models without tasks."""
    model = model_of(functions)
    model.variational_strategy = model.variational_strategy.base_variational_strategy
    return model


def noise_of(tasks, rank=0):
    torch.manual_seed(2)
    return likelihoods.MultitaskGaussianLikelihood(num_tasks=tasks, rank=rank)


def softmax_of(features=None):
    torch.manual_seed(2)
    return likelihoods.SoftmaxLikelihood(num_features=features, num_classes=3, mixing_weights=features is not None)


def problem(kind):
    """A model whose functions differ, its likelihood and its data."""
    x, y = regression()
    labels = classes()[1]
    model, likelihood, y = {
        "tasks": lambda: (model_of(3), noise_of(3), y),
        "correlated tasks": lambda: (model_of(3), noise_of(3, 2), y),
        "mixed": lambda: (model_of(2, 3), noise_of(3), y),
        "more functions than tasks": lambda: (model_of(5, 3), noise_of(3), y),
        "mixed and correlated": lambda: (model_of(2, 3), noise_of(3, 1), y),
        "batch": lambda: (batch_of(3), likelihoods.GaussianLikelihood(batch_shape=torch.Size([3])), y.mT),
        "softmax": lambda: (model_of(3), softmax_of(), labels),
        "softmax of features": lambda: (model_of(2), softmax_of(2), labels),
        "mixed softmax": lambda: (model_of(2, 3), softmax_of(), labels),
        "heteroskedastic": lambda: (model_of(2), Heteroskedastic(), y[:, 0]),
    }[kind]()
    model, likelihood = model.double(), likelihood.double()
    strategy = getattr(model.variational_strategy, "base_variational_strategy", model.variational_strategy)
    torch.manual_seed(3)
    strategy.inducing_points.data += 0.1 * torch.randn_like(strategy.inducing_points)
    scale = model.covar_module.base_kernel
    scale.raw_lengthscale.data += 0.3 * torch.randn_like(scale.raw_lengthscale)
    return model, likelihood, (x, y)


JOINT = ["correlated tasks", "mixed", "more functions than tasks", "mixed and correlated"]
KINDS = ["tasks", "batch", *JOINT, "softmax", "softmax of features", "mixed softmax", "heteroskedastic"]


def value_of(*problem):
    """The bound, summed over rows."""
    bound = ProfiledELBO(*problem)
    return bound.num_data * float(bound().detach())


def optimum(bound):
    """The point of a search, with its projection."""
    with torch.no_grad():
        projection = bound._whole(kernels(bound.target.strategy, bound.x).projection(torch.float64))
        return projection, bound._optimum(projection)


def differentiated(F, mean, variance):
    """F_n, its slopes in the means, twice those in the variances, and the Hessian in the means of a datum."""
    mean, variance = mean.clone().requires_grad_(), variance.clone().requires_grad_()
    value = F(mean, variance)
    slope, half = torch.autograd.grad(value.sum(), (mean, variance), create_graph=True)
    W = [torch.autograd.grad(part.sum(), mean, retain_graph=True)[0] for part in slope]
    return value.detach(), slope.detach(), 2 * half.detach(), torch.stack(W).permute(2, 0, 1)


@pytest.mark.parametrize("kind", ["mixed", "correlated tasks", "softmax", "softmax of features"])
def test_a_step_of_all_means_stays_one_of_sites(kind, monkeypatch):
    """P⁻¹ Σ a (t - c μ) is m + Δ with Δ from the dense system of all functions."""
    solve = sparse_gp.conjugate_gradients
    monkeypatch.setattr(sparse_gp, "conjugate_gradients", lambda *parts: solve(*parts[:3], 1e-15))
    bound = ProfiledELBO(*problem(kind), 2 * N)
    with torch.no_grad():
        projection = bound._whole(kernels(bound.target.strategy, bound.x).projection(torch.float64))
        point = bound._at(projection, 0.1 * torch.ones_like(projection.mean), 0.2 * torch.ones_like(projection.mean))
        t, a = bound._sites_after(projection, point), projection.rows
    values, likelihood, y = bound.target.latents.values, bound.target.likelihood, bound.y.double()
    W = differentiated(lambda *moments: 2 * energy(likelihood, y, values(*moments)), point.e, point.v)[-1]
    size = point.mean.numel()
    J = torch.einsum("lni,nlk,knj->likj", a, W, a).reshape(size, size) + torch.eye(size).double()
    g = point.mean + torch.einsum("ln,lni->li", point.alpha, a)
    wanted = point.mean - torch.linalg.solve(J, g.flatten()).reshape(g.shape)
    P = torch.einsum("lni,ln,lnj->lij", a, point.beta, a) + torch.eye(M).double()
    found = torch.linalg.solve(P, torch.einsum("lni,ln->li", a, t - point.beta * projection.mean)[..., None])[..., 0]
    close(found, wanted, 1e-10)


@pytest.mark.parametrize("kind", JOINT)
def test_gaussian_noise_needs_one_step(kind):
    """Of tasks that are correlated or mixed: there the derivatives in m and in S are zero."""
    projection, point = optimum(ProfiledELBO(*problem(kind)))
    close(point.beta, point.c, 1e-12)
    slope = point.mean + torch.einsum("ln,lni->li", point.alpha, projection.rows)
    assert float(slope.abs().max()) < 1e-8 * float(point.alpha.abs().max())


def test_independent_tasks_are_bounds_of_their_own():
    """Their bound is the sum of those of each task, the tighter one of Gaussian noise; of one task it is the same."""
    model, likelihood, (x, y) = problem("tasks")
    total = 0.0
    for task in range(3):
        own, noise = model_of(1), likelihoods.GaussianLikelihood().double()
        base = model.variational_strategy.base_variational_strategy
        own.variational_strategy.base_variational_strategy.inducing_points.data = base.inducing_points[[task]].detach()
        own.covar_module.base_kernel.lengthscale = model.covar_module.base_kernel.lengthscale[[task]].detach()
        several = noise_of(1).double()
        noise.noise = likelihood.noise + likelihood.task_noises[task]
        several.noise, several.task_noises = 0.5 * noise.noise, 0.5 * noise.noise
        as_task = value_of(own, several, (x, y[:, [task]]))
        single = copy.deepcopy(own)
        single.variational_strategy = single.variational_strategy.base_variational_strategy
        alone = value_of(single, noise, (x, y[:, task][None]))
        assert math.isclose(as_task, alone, rel_tol=1e-12)
        total += alone
    assert math.isclose(value_of(model, likelihood, (x, y)), total, rel_tol=1e-12)


@pytest.mark.sparse(3)
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_by_differences(kind):
    """In every parameter, of rows that weigh more than one."""
    model, likelihood, batch = problem(kind)
    bound = ProfiledELBO(model, likelihood, batch, num_data=2 * N, tolerance=1e-13)
    check_gradient(bound, [*model.parameters(), *likelihood.parameters()], 1e-4)


def test_a_constant_noise_is_the_usual_model():
    """Where the log standard deviation is a constant the ELBO is that of Gaussian noise."""
    model, likelihood, (x, y) = problem("heteroskedastic")
    model.covar_module.outputscale = torch.tensor([0.7, 1e-9])
    model.mean_module.raw_constant.data = torch.tensor([0.2, -1.0]).double()
    value = value_of(model, likelihood, (x, y))
    one, noise = model_of(1), noise_of(1).double()
    base = model.variational_strategy.base_variational_strategy
    one.variational_strategy.base_variational_strategy.inducing_points.data = base.inducing_points[[0]].detach()
    one.covar_module.base_kernel.lengthscale = model.covar_module.base_kernel.lengthscale[[0]].detach()
    one.covar_module.outputscale, one.mean_module.raw_constant.data = 0.7, torch.tensor([0.2]).double()
    noise.noise = noise.task_noises = 0.5 * math.exp(-2.0)
    bound = ProfiledELBO(one, noise, (x, y[:, None]))
    bound.tight = False  # as of 2009
    assert abs(value - N * float(bound().detach())) < 1e-3  # from the jitter of the second function


@pytest.mark.parametrize(("spread", "largest"), [(1.0, 0.3), (2.0, 2.0)])
def test_the_expectation_of_a_softmax(spread, largest):
    """The integral within the error of many draws, the points of the search near it; two classes as a logistic."""
    torch.manual_seed(0)
    mean, variance = spread * torch.randn(20, 5).double(), largest * torch.rand(20, 5).double()
    z = torch.randn(200_000, 5).double()
    draws = [(m + s.sqrt() * z).logsumexp(-1) for m, s in zip(mean, variance, strict=True)]
    error = expected_logsumexp(mean, variance) - torch.stack([each.mean() for each in draws])
    assert float((error / torch.stack([each.std() for each in draws])).abs().max()) < 4 / math.sqrt(len(z))
    likelihood = likelihoods.SoftmaxLikelihood(num_classes=5, mixing_weights=False).double()
    y = torch.arange(20) % 5
    by_points = energy(likelihood, y, marginals(mean, variance)) + mean.gather(-1, y[:, None])[:, 0]
    close(by_points, expected_logsumexp(mean, variance), 0.03)
    two = expected_logsumexp(mean[:, :2], variance[:, :2]) - mean[:, 0]
    logistic = gp.utils.quadrature.GaussHermiteQuadrature1D(60).double()
    difference = gp.distributions.MultivariateNormal(mean[:, 1] - mean[:, 0], torch.diag(variance[:, :2].sum(-1)))
    close(two, logistic(torch.nn.functional.softplus, difference), 1e-4)


@pytest.mark.parametrize("features", [None, 2])
def test_the_derivatives_of_a_softmax(features):
    """One pass gives what automatic differentiation of its energy gives, a few rows at a time."""
    likelihood, y, size = softmax_of(features).double(), classes()[1], features or 3
    mean, variance = torch.randn(size, N).double(), torch.rand(size, N).double()
    wanted = differentiated(lambda *moments: energy(likelihood, y, marginals(*(m.mT for m in moments))), mean, variance)
    *without, empty = softmax_derivatives(likelihood, y, marginals(mean.mT, variance.mT), 7, curved=False)
    assert not empty.numel()
    for a, b in zip(without, wanted[:3], strict=True):
        close(a, b, 1e-12)
    for a, b in zip(softmax_derivatives(likelihood, y, marginals(mean.mT, variance.mT), 7), wanted, strict=True):
        close(a, b, 1e-12)


@pytest.mark.parametrize("kind", ["softmax", "heteroskedastic"])
def test_a_search_that_ends_early(kind):
    """It misses the optimal value by less than the last fall, and without a share it finds it."""
    exact, bound = (ProfiledELBO(*problem(kind), tolerance=1e-12) for _ in range(2))
    bound.share, bound.fall = 0.1, 1.0
    early, bound.share = float(bound().detach()), 0.0
    value = float(bound().detach())
    assert early + 1e-8 < value < early + 1.0
    assert bound.fall == pytest.approx(value - early)
    assert value == pytest.approx(float(exact().detach()), abs=1e-9)


def test_the_first_rows_of_several_functions():
    """Fewer than of one, since a row costs as many times more."""
    x, y = torch.rand(5000, 1).double(), torch.rand(5000, 3).double()
    rows = Rounds(model_of(3), noise_of(3).double(), x, y, 1).rows
    assert [rows(number) for number in range(5)] == [500, 1000, 2000, 5000, 5000]


class TestTraining:
    @pytest.mark.accuracy
    def test_tasks(self):
        """Left-open points are chosen for all functions; the noise of each task is found."""
        x, y = regression()
        model, likelihood = model_of(3), noise_of(3).double()
        strategy = model.variational_strategy.base_variational_strategy
        strategy.inducing_points.data.zero_()
        result = train_svgp(model, likelihood, (x, y), progress=False)
        assert result.refined.converged
        assert not left_open(strategy)
        noise = likelihood.noise + likelihood.task_noises
        assert float((noise.detach().sqrt() - 0.1).abs().max()) < 0.04
        with torch.no_grad():
            assert float((model.eval()(x).mean - y).square().mean().sqrt()) < 0.12

    @pytest.mark.accuracy
    @pytest.mark.parametrize("kind", ["softmax", "heteroskedastic", "batch", "mixed"])
    def test_one_call(self, kind):
        """q is at its optimum at the end, by steps that `refine_svgp` need not add to, and the loss has fallen."""
        model, likelihood, (x, y) = problem(kind)
        before = -value_of(model, likelihood, (x, y)) / N
        result = train_svgp(model, likelihood, (x, y), rounds=2, progress=False)
        assert result.refined.converged
        assert result.losses[-1] < before - 0.1
        assert ("by an integral in the place of nodes" in result.reason) == (kind == "softmax")

    @pytest.mark.accuracy
    @pytest.mark.parametrize("tasks", [None, 3])
    def test_without_whitening(self, tasks):
        """The unwhitened strategy ends where the whitened one does, and keeps its place and its q."""
        x, y = regression()
        losses = []
        for strategy in (v.VariationalStrategy, v.UnwhitenedVariationalStrategy):
            model, likelihood = model_of(3, tasks), noise_of(3).double()
            outer = model.variational_strategy
            own = v.CholeskyVariationalDistribution(M, torch.Size([3]), mean_init_std=0.0)
            base = strategy(model, outer.base_variational_strategy.inducing_points.detach(), own, jitter_val=1e-4)
            outer.base_variational_strategy = base.double()
            losses.append(train_svgp(model, likelihood, (x, y), rounds=1, progress=False).losses[-1])
            assert outer.base_variational_strategy is base
            assert base._variational_distribution is own
            model.train()
            elbo = gp.mlls.VariationalELBO(likelihood, model, num_data=N)(model(x), y)
            slopes = torch.autograd.grad(elbo, list(own.parameters()))
            assert max(float(slope.abs().max()) for slope in slopes) < 1e-3
        assert math.isclose(*losses, rel_tol=1e-3)

    @pytest.mark.accuracy
    def test_more_points_for_several_functions(self):
        x, y = regression()
        model, likelihood = model_of(3), noise_of(3).double()
        result = train_svgp(model, likelihood, (x, y), rounds=4, inducing="auto", progress=False)
        assert result.inducing in (M, 2 * M)
        assert model.variational_strategy.base_variational_strategy.inducing_points.shape == (3, result.inducing, 1)

    def test_refined_at_once(self):
        """From the prior, where steps of each function alone go on for long."""
        model, likelihood, rows = problem("more functions than tasks")
        result = refine_svgp(model, likelihood, [rows], progress=False)
        assert result.converged
        assert result.evaluations == 1


def test_a_likelihood_of_two_functions_with_expectations_of_its_own():
    """Whatever it inherits, one target a datum is what it takes."""

    class Hetero(gp.likelihoods.likelihood._OneDimensionalLikelihood):
        def forward(self, f):
            return torch.distributions.Normal(f[..., 0], f[..., 1].exp())

        def expected_log_prob(self, y, values):
            mean, variance = values.mean, values.variance
            error = (y - mean[..., 0]).square() + variance[..., 0]
            return (
                -0.5 * (error * (2 * variance[..., 1] - 2 * mean[..., 1]).exp() + math.log(2 * math.pi)) - mean[..., 1]
            )

    x, y = regression()
    result = train_svgp(model_of(2), Hetero().double(), (x, y[:, 0]), rounds=1, progress=False)
    assert result.refined.converged


class TestRefusals:
    def test_labels(self):
        x, y = classes()
        with pytest.raises(InputError, match="SoftmaxLikelihood takes the labels 0 to 2; got targets from 1 to 3"):
            train_svgp(model_of(3), softmax_of().double(), (x, y + 1), progress=False)

    def test_targets_of_other_shapes(self):
        x, y = regression()
        labels = classes()[1]
        calls = {
            r"one label a datum, \(rows,\); got targets of shape \(\d+, 1\). Give y\[:, 0\]": (
                softmax_of(),
                labels[:, None],
            ),
            r"Give y.argmax\(-1\) for one-hot rows y": (softmax_of(), torch.nn.functional.one_hot(labels)),
            r"a target for each, \(rows, 3\); got targets of shape \(\d+, 2\)\.$": (noise_of(3), y[:, :2]),
            r"one value a datum, and the model gives 3. Give Multi": (likelihoods.GaussianLikelihood(), y),
            "the likelihood is the class SoftmaxLikelihood. Call it": (likelihoods.SoftmaxLikelihood, labels),
            r"got ndarray, Tensor. Give torch.as_tensor\(x\)": (noise_of(3), y),
        }
        for text, (likelihood, targets) in calls.items():
            rows = x.numpy() if "ndarray" in text else x
            with pytest.raises((InputError, PairError), match=text):
                train_svgp(model_of(3).double(), likelihood, (rows, targets), progress=False)

    @pytest.mark.accuracy
    def test_scales_of_their_own(self):
        """The task that is farthest from the model is named, and an end at constants is said, of classes too."""
        model, likelihood, (x, y) = problem("tasks")
        far, none = "the targets of task 2, of mean .* times as far from", "no better than that of a constant function"
        with pytest.warns(ScaleWarning, match=far), pytest.warns(ScaleWarning, match=none):
            train_svgp(model, likelihood, (x, y * y.new_tensor([1.0, 1.0, 1e5])), progress=False, rounds=1)
        model, _, _ = problem("tasks")
        model.mean_module, model.covar_module = gp.means.ConstantMean(), gp.kernels.ScaleKernel(gp.kernels.RBFKernel())
        known = (
            noise_of(3).requires_grad_(False).double()
        )  # one kernel for all functions, and a noise that is not learnt
        assert train_svgp(model.double(), known, (x, y), progress=False, rounds=1).found == "function"
        generator = torch.Generator().manual_seed(0)
        model, likelihood, (x, labels) = problem("softmax")
        for fresh, constant in ((labels, False), (torch.randint(0, 3, labels.shape, generator=generator), True)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = train_svgp(copy.deepcopy(model), likelihood, (x, fresh), progress=False, rounds=2)
            assert (result.found == "constant") is constant
            assert any("no better than that of a constant function, 1.0" in str(w.message) for w in caught) is constant

    def test_what_has_no_sites_of_rows(self):
        """Layers and inputs that are random, and a mean apart from its covariance."""
        x, y = classes()
        deep = gp.models.deep_gps.DeepGP()
        with pytest.raises(PairError, match="DeepGP has random inputs, its own or those of its layers"):
            train_svgp(deep, likelihoods.GaussianLikelihood(), (x, y.double()), progress=False)
        model = model_of(2)
        base = model.variational_strategy.base_variational_strategy
        model.variational_strategy = v.OrthogonallyDecoupledVariationalStrategy(
            base, inputs(12), v.DeltaVariationalDistribution(12, batch_shape=torch.Size([2]))
        )
        with pytest.raises(PairError, match="got Orthogonally.*, whose mean has inducing points of its own"):
            train_svgp(model, noise_of(2).double(), (x, y.double()), progress=False)
        plain = SparseModel(NaturalGradientVariationalDistribution(M), inputs(M))
        model = gp.models.gplvm.bayesian_gplvm.BayesianGPLVM(torch.nn.Identity(), plain.variational_strategy)
        with pytest.raises(PairError, match="BayesianGPLVM has random inputs"):
            train_svgp(model, likelihoods.GaussianLikelihood(), (x, y.double()), progress=False)
