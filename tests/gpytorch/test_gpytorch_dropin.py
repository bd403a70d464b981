"""The drop-in distribution beside everything GPyTorch offers: strategies, objectives, settings, copies, wrong use."""

import copy
import math
import pickle

import pytest
import torch

gpytorch = pytest.importorskip("gpytorch", reason="needs the extra gpytorch: pip install torchngvi[gpytorch]")

import mpmath  # noqa: E402
from helpers import EXACT, IDENTITY, close  # noqa: E402
from test_gpytorch import (  # noqa: E402
    FULL,
    NGVD,
    M,
    Model,
    N,
    data,
    deep,
    gaussian,
    model_with,
    pytestmark,  # noqa: F401
    step,
    strategies,
)

from torchngvi import (  # noqa: E402
    BBVI,
    IBLR,
    NGVI,
    VN,
    CholeskyGaussian,
    DiagonalGaussian,
    KLRadius,
    NaturalGaussian,
    NaturalGradientVI,
)
from torchngvi.adapters.gpytorch import SparseGP, natural_optimizer, refine_svgp, variational_posteriors  # noqa: E402
from torchngvi.errors import InputError, PairError, RejectedStepWarning  # noqa: E402
from torchngvi.rules import ProjectedRootGradient  # noqa: E402
from torchngvi.stepsizes import Constant  # noqa: E402

gp = gpytorch
v = gp.variational


def elbo(model, likelihood=None, num_data=N, **options):
    return gp.mlls.VariationalELBO(likelihood or gaussian(0.05), model, num_data=num_data, **options)


class Grid(gp.models.ApproximateGP):
    """Interpolation from a grid of inducing points, in one dimension."""

    def __init__(self, q, additive=False):
        bounds = [(-2.5, 2.5)]
        if additive:
            strategy = v.AdditiveGridInterpolationVariationalStrategy(self, M, bounds, 1, q)
        else:
            strategy = v.GridInterpolationVariationalStrategy(self, M, bounds, q)
        super().__init__(strategy)
        self.mean_module = gp.means.ConstantMean()
        self.covar_module = gp.kernels.ScaleKernel(gp.kernels.RBFKernel())

    forward = Model.forward


STRATEGIES = strategies() | {
    "grid": lambda family: Grid(NGVD(M, posterior=family)).double().train(),
    "additive_grid": lambda family: Grid(NGVD(M, (1,), posterior=family), additive=True).double().train(),
}


def trained(name, family=CholeskyGaussian, steps=3):
    """A model of that strategy after a few steps, its objective and its optimizer."""
    torch.manual_seed(0)
    x, y = data()
    model, tasks = STRATEGIES[name](family), name in ("multitask", "lmc")
    likelihood = gp.likelihoods.MultitaskGaussianLikelihood(num_tasks=2).double() if tasks else gaussian(0.05)
    mll = elbo(model, likelihood)
    natural = natural_optimizer(mll, lr=0.3)
    losses = [float(step(model, mll, natural, x, torch.stack([y, -y], -1) if tasks else y)) for _ in range(steps)]
    return model, mll, natural, losses


class TestEveryStrategy:
    @pytest.mark.sparse(3)
    @pytest.mark.parametrize("name", STRATEGIES)
    def test_copies(self, name):
        """Straight after a step: deepcopy, pickle and state_dict carry q, and predictions agree."""
        model, _, natural, losses = trained(name)
        assert losses[-1] < losses[0]
        assert natural.rejections == 0
        copied = copy.deepcopy(model)
        pickled = pickle.loads(pickle.dumps(model))
        loaded = STRATEGIES[name](CholeskyGaussian)
        loaded.load_state_dict(model.state_dict())
        x = data()[0]
        with torch.no_grad():
            expected = model.eval()(x)
            for other in (copied, pickled, loaded):
                got = other.eval()(x)
                close(got.mean, expected.mean, EXACT)
                close(got.variance, expected.variance, EXACT)

    @pytest.mark.parametrize("name", sorted(set(STRATEGIES) - {"ciq"}))
    def test_another_dtype(self, name):
        """`.to(float32)` in place: the optimizer goes on with the tensors it holds."""
        model, mll, natural, _ = trained(name)
        q = natural.posteriors[0]
        before = q.mean.clone()
        mll.float()
        assert q.dtype == torch.float32
        close(q.mean.double(), before, 1e-6)
        x, y = (part.float() for part in data())
        y = torch.stack([y, -y], -1) if name in ("multitask", "lmc") else y
        assert math.isfinite(step(model, mll, natural, x, y))
        assert bool((q.mean.double() != before).all())

    @pytest.mark.sparse(2)
    @pytest.mark.parametrize("name", STRATEGIES)
    @pytest.mark.parametrize("training", [True, False])
    def test_memory_of_an_old_q_is_cleared(self, name, training):
        """What GPyTorch keeps of q is gone when q moves, in eval mode too, where nothing else clears it."""
        model, mll, natural, _ = trained(name)
        model.train(training)
        x, y = data()
        y = torch.stack([y, -y], -1) if name in ("multitask", "lmc") else y
        step(model, mll, natural, x, y)
        kept = copy.deepcopy(model)
        kept.train(not training)
        kept.train(training)  # which clears every memory
        with torch.no_grad():
            close(model(x).mean, kept(x).mean, EXACT)
            close(model.variational_strategy.kl_divergence(), kept.variational_strategy.kl_divergence(), EXACT)

    def test_ciq_has_the_divergence_in_its_loss(self):
        """GPyTorch's own pair of CIQ and natural gradients prints a bound without it."""
        model, mll, _, _ = trained("ciq")
        x, y = data()
        with torch.no_grad():
            f = model(x)
            divergence = variational_posteriors(model)[0].kl(CholeskyGaussian(M).double())
            close(mll(f, y) * N, mll.likelihood.expected_log_prob(y, f).sum() - divergence, IDENTITY)
        assert float(divergence) > 1.0


class TestObjectives:
    @pytest.mark.parametrize("beta", [0.2, 1.0, 3.0])
    def test_one_full_step_whatever_beta(self, beta):
        """lr = 1 is exact for a Gaussian likelihood: S = I + Σ a aᵀ/(β σ²)."""
        x, y = data()
        model = model_with(NGVD(M))
        mll = elbo(model, beta=beta)
        step(model, mll, natural_optimizer(mll, lr=1.0), x, y)
        tempered = model_with(NGVD(M))
        likelihood = gaussian()
        likelihood.noise = beta * gaussian(0.05).noise.detach()
        exact = elbo(tempered, likelihood)
        step(tempered, exact, natural_optimizer(exact, lr=1.0), x, y)
        a, b = (variational_posteriors(m)[0] for m in (model, tempered))
        close(a.mean, b.mean, IDENTITY)
        close(a.covariance, b.covariance, IDENTITY)

    @pytest.mark.parametrize("objective", [gp.mlls.PredictiveLogLikelihood, gp.mlls.GammaRobustVariationalELBO])
    def test_other_objectives(self, objective):
        """They rise to where the gradient with respect to the probes vanishes."""
        x, y = data()
        model = model_with(NGVD(M))
        mll = objective(gaussian(0.05), model, num_data=N)
        natural = natural_optimizer(mll, lr=1.0, method=IBLR, step_size=KLRadius(4.0))
        losses = [float(step(model, mll, natural, x, y)) for _ in range(40)]
        assert natural.rejections == 0
        assert losses[-1] < losses[0] - 0.5
        q = natural.posteriors[0]
        (-mll(model(x), y)).backward()
        assert float(q.mean_probe.grad.norm() + q.structure.one_sided(q.root_probe.grad).norm()) * N < 1e-4

    @pytest.mark.accuracy
    def test_deep_sigma_points(self):
        """A DSPP: no draws, so that the objective is what it was when asked again; it rises, and every layer moves."""
        torch.manual_seed(0)
        x, y = data()
        dspp = gp.models.deep_gps.dspp
        model, likelihood = deep(dspp.DSPP, dspp.DSPPLayer, 3), gaussian(0.05)
        mll = gp.mlls.DeepPredictiveLogLikelihood(likelihood, model, num_data=N, beta=0.1)
        natural = natural_optimizer(mll, lr=0.1, method=IBLR, step_size=KLRadius(1.0))
        before = [q.mean.clone() for q in natural.posteriors]
        close((-mll(model(x), y)).detach(), (-mll(model(x), y)).detach(), EXACT)
        losses = [float(step(model, mll, natural, x, y)) for _ in range(60)]
        assert natural.rejections == 0
        assert losses[-1] < losses[0] - 0.2
        assert all(bool((q.mean != old).all()) for q, old in zip(natural.posteriors, before, strict=True))


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("family", FULL)
def test_q_as_a_distribution_of_torch(family, batch):
    """The factor is lower triangular, whatever q holds, and all that torch takes from it agrees with S, slopes too."""
    q = NGVD(4, batch, mean_init_std=0.0, posterior=family).double()
    torch.manual_seed(0)
    A = torch.randn(*batch, 4, 4).double()
    q.posterior.initialize_(A[..., 0], torch.linalg.cholesky(A @ A.mT + torch.eye(4).double()))
    x, probes = A[..., 1], (q.posterior.mean_probe, q.posterior.root_probe)
    u, S = q(), q.posterior.covariance
    assert (q.shape(), q.dtype, q.device) == (torch.Size([*batch, 4]), torch.float64, torch.device("cpu"))
    assert u.rsample(torch.Size([5])).shape == (5, *batch, 4)
    close(u.scale_tril, torch.linalg.cholesky(S), EXACT)
    close(u.lazy_covariance_matrix.cholesky(upper=True).to_dense(), torch.linalg.cholesky(S).mT, EXACT)
    close(u.precision_matrix, torch.linalg.inv(S), EXACT)
    right, solved = x[..., None], torch.linalg.solve(S, x[..., None])
    close(u.lazy_covariance_matrix._solve(right), solved, EXACT)
    close(u.lazy_covariance_matrix.solve(right, right.mT), right.mT @ solved, EXACT)
    dense = torch.distributions.MultivariateNormal(u.mean, u.covariance_matrix)
    torchs = torch.distributions.MultivariateNormal(u.mean, scale_tril=u.scale_tril)
    standard = torch.distributions.MultivariateNormal(torch.zeros_like(x), torch.eye(4).double())
    for distance in (lambda p: p.log_prob(x), lambda p: torch.distributions.kl_divergence(p, standard)):
        close(distance(torchs), distance(dense), EXACT)
        slopes = [torch.autograd.grad(distance(p).sum(), probes, retain_graph=True) for p in (torchs, dense)]
        close(*(a for a, _ in slopes), EXACT)
        close(*(q.posterior.structure.one_sided(R) for _, R in slopes), EXACT)  # what a step reads of them
    close(torch.distributions.MultivariateNormal.log_prob(u, x), dense.log_prob(x), EXACT)


class TestMethods:
    def test_steps_of_wu_and_gardner(self):
        """NGVI is VN that stays a convex combination, on every family; longer steps are refused."""
        x, y = data()
        for family in [*FULL, DiagonalGaussian]:
            models = [model_with(NGVD(M, mean_init_std=0.0, posterior=family)) for _ in range(2)]
            for model, method in zip(models, (NGVI, VN), strict=True):
                mll = elbo(model, beta=0.5)
                natural = natural_optimizer(mll, lr=0.3, method=method)
                for batch in torch.arange(N).split(20):
                    step(model, mll, natural, x[batch], y[batch])
            a, b = (variational_posteriors(model)[0] for model in models)
            close(a.mean, b.mean, EXACT)
            close(a.covariance, b.covariance, EXACT)
        model = model_with(NGVD(M))
        mll = elbo(model)
        with pytest.raises(InputError, match=r"is a convex combination, with lr in \[0, 1\]; got 1.5"):
            step(model, mll, natural_optimizer(mll, lr=1.5, method=NGVI), x, y)

    @pytest.mark.parametrize("family", [CholeskyGaussian, DiagonalGaussian])
    def test_projected_steps(self, family):
        """BBVI goes along the gradient in (v, C), with the diagonal of C at 1/√L or above."""
        x, y = data()
        drop_in, direct = (model_with(NGVD(M, mean_init_std=0.0, posterior=family)) for _ in range(2))
        mll, target = elbo(drop_in), SparseGP(direct, gaussian(0.05), [(x, y)])
        natural = natural_optimizer(mll, lr=0.01, method=BBVI, smoothness=9.0, step_size=Constant())
        exact = NaturalGradientVI(target.posterior, ProjectedRootGradient(1 / 3), step_size=Constant(0.01))
        for _ in range(3):
            step(drop_in, mll, natural, x, y)
            exact.step(target)
        q = natural.posteriors[0]
        close(q.mean, target.posterior.mean, IDENTITY)
        close(q.scale_tril, target.posterior.scale_tril, IDENTITY)
        close(q.scale_tril.diagonal().min(), torch.tensor(1 / 3, dtype=torch.float64), EXACT)

    def test_a_grad_scaler(self):
        """A scaled loss is refused at the first step; by hand the steps are those without a scaler."""
        x, y = data()
        models = [model_with(NGVD(M, mean_init_std=0.0)) for _ in range(2)]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        mll = elbo(models[0])
        natural = natural_optimizer(mll, lr=0.3)
        scaler.scale(-mll(models[0](x), y)).backward()
        with pytest.raises(InputError, match="the KL divergence has the weight 17.07 in the loss where the objective"):
            scaler.step(natural)
        natural.zero_grad()
        natural = VN(variational_posteriors(models[0]), lr=0.3, step_size=Constant(), loss_scale=N)
        for factor in (1.0, math.inf):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            scaler.scale(-factor * mll(models[0](x), y)).backward()
            scaler.step(natural)
            scaler.update()
        q = natural.posteriors[0]
        assert q.mean_probe.grad is not None  # of the step that was skipped
        mll = elbo(models[1])
        step(models[1], mll, natural_optimizer(mll, lr=0.3), x, y)
        close(q.mean, variational_posteriors(models[1])[0].mean, EXACT)

    def test_methods_that_it_cannot_build(self):
        mll = elbo(model_with(NGVD(M)))
        for method, name in (("VN", "'VN'"), (torch.optim.Adam, "Adam")):
            text = rf"steps Gaussian posteriors by gradients of the loss; got {name}. Give VN, SRVN, IBLR, NGVI or "
            with pytest.raises(InputError, match=text + r"BBVI; IFVB for a FlatCholesky"):
                natural_optimizer(mll, method=method)
        text = r"BBVI cannot be built with the options given: missing a required argument: 'smoothness'. Beside mll, "
        with pytest.raises(InputError, match=text + "lr and method .* are smoothness, step_size, estimator."):
            natural_optimizer(mll, method=BBVI)
        with pytest.raises(InputError, match="NGVI cannot be built with .*: got an unexpected keyword argument 'step"):
            natural_optimizer(mll, method=NGVI, step_size=KLRadius(1.0))
        with pytest.raises(PairError, match="ProjectedRootGradient moves q by Root, which NaturalGaussian cannot do"):
            natural_optimizer(elbo(model_with(NGVD(M, posterior=NaturalGaussian))), method=BBVI, smoothness=9.0)


class TestSettings:
    @pytest.mark.parametrize("policy", ["mask", "fill"])
    def test_missing_targets(self, policy):
        """One full step on data with gaps is the optimum for the targets there are."""
        x, y = data()
        y[::7] = torch.nan
        seen = ~y.isnan()
        model, fewer = model_with(NGVD(M)), model_with(NGVD(M))
        mll = elbo(model)
        with gp.settings.observation_nan_policy(policy):
            step(model, mll, natural_optimizer(mll, lr=1.0), x, y)
        refine_svgp(fewer, gaussian(0.05), [(x[seen], y[seen])], progress=False)
        a, b = (variational_posteriors(m)[0] for m in (model, fewer))
        # GPyTorch divides the sum over the present by all rows, and num_data counts all: the same weight
        close(a.mean, b.mean, IDENTITY)
        close(a.covariance, b.covariance, IDENTITY)

    def test_missing_targets_without_a_policy(self):
        """The loss is NaN; q stays where it was, and that is said."""
        x, y = data()
        y[3] = torch.nan
        model = model_with(NGVD(M))
        mll = elbo(model)
        natural = natural_optimizer(mll, lr=0.5)
        with pytest.warns(RejectedStepWarning, match="was not finite; q was left as it is"):
            step(model, mll, natural, x, y)
        assert natural.rejections == 1
        assert bool(torch.isfinite(natural.posteriors[0].mean).all())
        assert math.isfinite(step(model, mll, natural, x[4:], y[4:]))

    @pytest.mark.parametrize("locations", [5, 60])
    def test_quadrature(self, locations):
        """The likelihood takes the number of points that holds when it is built; both paths share it."""
        x, y = data()
        with gp.settings.num_gauss_hermite_locs(locations):
            likelihood = gp.likelihoods.StudentTLikelihood().double()
        assert likelihood.quadrature.locations.shape == (locations,)
        model, direct = model_with(NGVD(M)), model_with(NGVD(M))
        mll = elbo(model, likelihood)
        natural = natural_optimizer(mll, lr=0.5)
        for _ in range(40):
            loss = step(model, mll, natural, x, y)
        result = refine_svgp(direct, likelihood, [(x, y)], progress=False)
        assert abs(float(loss) * N - result.loss) < 1e-8 * abs(result.loss)

    def test_jitter(self):
        """The strategy's own, `variational_cholesky_jitter` of the dtype, is used and left as it was."""
        x, y = data()
        with gp.settings.variational_cholesky_jitter(double_value=1e-2):
            model = model_with(NGVD(M))
            mll = elbo(model)
            natural = natural_optimizer(mll, lr=1.0)
            step(model, mll, natural, x, y)
            jittered = mll(model(x), y).item()
        other = model_with(NGVD(M), jitter_val=1e-2)
        refine_svgp(other, gaussian(0.05), [(x, y)], progress=False)
        assert abs(jittered - elbo(other)(other(x), y).item()) < 1e-10
        assert gp.settings.variational_cholesky_jitter.value(torch.float64) == 1e-6

    def test_known_noise_on_mini_batches(self):
        """`FixedNoiseGaussianLikelihood` takes the noise of the batch beside the targets; every step is exact."""
        x, y = data()
        noise = 0.01 + 0.05 * torch.linspace(0, 1, N, dtype=torch.float64)
        model = model_with(NGVD(M))
        likelihood = gp.likelihoods.FixedNoiseGaussianLikelihood(noise=noise).double()
        mll = elbo(model, likelihood)
        natural = natural_optimizer(mll, lr=1.0)
        q, batches = natural.posteriors[0], torch.arange(N).split(20)
        precision, vector = torch.zeros(M, M, dtype=torch.float64), torch.zeros(M, dtype=torch.float64)
        strategy = model.variational_strategy
        with torch.no_grad():
            Z = strategy.inducing_points
            K = model.covar_module(Z).to_dense()
            L = torch.linalg.cholesky(K + strategy.jitter_val * torch.eye(M, dtype=torch.float64))
            A = torch.linalg.solve_triangular(L, model.covar_module(Z, x).to_dense(), upper=False)
        for count, batch in enumerate(batches, 1):
            natural.param_groups[0]["lr"] = 1 / count  # the mean over the batches
            natural.zero_grad()
            (-mll(model(x[batch]), y[batch], noise=noise[batch])).backward()
            natural.step()
            weighted = A[:, batch] / noise[batch]
            precision = precision + (weighted @ A[:, batch].mT * 3 - precision) / count
            vector = vector + (weighted @ y[batch] * 3 - vector) / count
            close(q.precision, torch.eye(M, dtype=torch.float64) + precision, IDENTITY)
            close((q.precision @ q.mean[:, None])[:, 0], vector, IDENTITY)


class TestAgainstNGD:
    """Five steps on mini-batches: the same iterates, and whose digits are right where they differ."""

    @staticmethod
    def five_steps(q, likelihood, lr, classes=False):
        x, y = data()
        y = (y > 0).double() if classes else y
        model = model_with(q)
        mll = elbo(model, likelihood)
        if isinstance(q, NGVD):
            optimizer = natural_optimizer(mll, lr=lr)
        else:
            optimizer = gp.optim.NGD(model.variational_parameters(), num_data=N, lr=lr)
        batches = (torch.randperm(N, generator=torch.Generator().manual_seed(1)).split(20) * 2)[:5]
        for batch in batches:
            step(model, mll, optimizer, x[batch], y[batch])
        q = model.eval().variational_strategy.variational_distribution
        return model, batches, q.mean.detach(), q.covariance_matrix.detach()

    @pytest.mark.parametrize("family", FULL)
    @pytest.mark.parametrize("lr", [0.1, 0.3])
    @pytest.mark.parametrize("classes", [False, True])
    def test_equal(self, family, lr, classes):
        """Where K_ZZ has a condition number near 4,000 and S one near 1,000, to 1e-12."""
        likelihood = gp.likelihoods.BernoulliLikelihood().double() if classes else gaussian()
        ours = self.five_steps(NGVD(M, mean_init_std=0.0, posterior=family), likelihood, lr, classes)
        theirs = self.five_steps(v.NaturalVariationalDistribution(M, mean_init_std=0.0), likelihood, lr, classes)
        close(ours[2], theirs[2], EXACT)
        close(ours[3], theirs[3], EXACT)

    @pytest.mark.accuracy
    def test_digits(self):
        """Beside a noise of 1e-6, in 40 digits of mpmath, the error of ours is a tenth of NGD's or less."""
        noise, lr, points = 1e-6, 0.3, 30
        ours = self.five_steps(NGVD(points, mean_init_std=0.0), gaussian(noise), lr)
        theirs = self.five_steps(v.NaturalVariationalDistribution(points, mean_init_std=0.0), gaussian(noise), lr)
        model, batches, x, y = ours[0], ours[1], *data()
        with torch.no_grad():
            Z, strategy = model.variational_strategy.inducing_points, model.variational_strategy
            K = model.covar_module(Z).to_dense() + strategy.jitter_val * torch.eye(points, dtype=torch.float64)
            A = torch.linalg.solve_triangular(
                torch.linalg.cholesky(K), model.covar_module(Z, x).to_dense(), upper=False
            ).mT
        with mpmath.workdps(40):
            S, vector = mpmath.eye(points), mpmath.zeros(points, 1)
            exact_noise, rho = mpmath.mpf(gaussian(noise).noise.item()), mpmath.mpf(lr)
            for batch in batches:
                rows, weight = mpmath.matrix(A[batch].tolist()), mpmath.mpf(N) / len(batch) / exact_noise
                S = (1 - rho) * S + rho * (mpmath.eye(points) + weight * rows.T * rows)
                vector = (1 - rho) * vector + rho * weight * rows.T * mpmath.matrix(y[batch].tolist())
            mean = torch.tensor([float(entry) for entry in mpmath.lu_solve(S, vector)], dtype=torch.float64)
        errors = [float((got - mean).abs().max()) for got in (ours[2], theirs[2])]
        assert errors[0] < 1e-9
        assert errors[0] < 0.1 * errors[1]


class TestWrongUse:
    def test_sizes(self):
        model = Model(NGVD(M))
        model.variational_strategy._variational_distribution = NGVD(M - 2)
        text = r"q holds 10 inducing values where the strategy has 12 inducing points: build \w+\(12\)"
        with pytest.raises(InputError, match=text):
            natural_optimizer(elbo(model))
        with pytest.raises(InputError, match="q holds 10 inducing values"):
            VN(variational_posteriors(model))

    @pytest.mark.parametrize(("own", "wanted"), [((), (2,)), ((2,), (3,)), ((2, 1), (2,)), ((2,), (3, 2))])
    def test_batch_shapes(self, own, wanted):
        model = model_with(NGVD(M, own), batch=wanted)
        text = rf"q has the batch shape \({', '.join(map(str, own))},?\) where the inducing points and kernels have"
        with pytest.raises(InputError, match=text):
            natural_optimizer(elbo(model))

    @pytest.mark.parametrize(("own", "kernels"), [((2,), ()), ((2,), (1,)), ((3, 2), (2,)), ((3, 2), (3, 1))])
    def test_batch_shapes_that_broadcast(self, own, kernels):
        x, y = data()
        model = model_with(NGVD(M, own), batch=kernels)
        mll = elbo(model)
        assert math.isfinite(step(model, mll, natural_optimizer(mll, lr=0.1), x, y))

    @pytest.mark.parametrize("dim", [None, -1])
    def test_batch_decoupled(self, dim):
        """One batch dimension of the kernels belongs to the strategy, not to q."""
        strategy = v.BatchDecoupledVariationalStrategy
        options = {"strategy": strategy, "mean_var_batch_dim": dim}
        assert variational_posteriors(model_with(NGVD(M, (3,)), batch=(3, 2), **options))
        with pytest.raises(InputError, match=r"shape \(\) where the inducing points and kernels have \(3,\)"):
            variational_posteriors(model_with(NGVD(M), batch=(3, 2), **options))

    def test_nearest_neighbours(self):
        """GPyTorch's strategy reads a mean and standard deviations of its own class, and says so."""
        with pytest.raises(AssertionError, match="only supports MeanFieldVariationalDistribution"):
            v.NNVariationalStrategy(None, data()[0], NGVD(N), k=3)

    @pytest.mark.parametrize(("num_data", "beta"), [(0, 1.0), (N, 0.0), (-5, 1.0)])
    def test_a_scale_that_is_none(self, num_data, beta):
        with pytest.raises(InputError, match=rf"the objective has num_data = {num_data} and beta = {beta}: the number"):
            natural_optimizer(elbo(model_with(NGVD(M)), num_data=num_data, beta=beta))

    @pytest.mark.parametrize("strategy", [v.VariationalStrategy, v.UnwhitenedVariationalStrategy])
    def test_a_batch_of_inputs(self, strategy):
        """One q seen at three sets of inputs: the sum of the objectives holds its divergence three times."""
        x, y = data()
        model = model_with(NGVD(M), strategy=strategy)
        mll = elbo(model)
        natural = natural_optimizer(mll)
        several = (model(x.expand(3, N, 1)), y.expand(3, N))
        (-mll(*several).sum()).backward()
        with pytest.raises(InputError, match="has the weight 0.05 in the loss where the objective has 0.01667"):
            natural.step()
        natural.zero_grad()
        natural = natural_optimizer(mll, lr=0.1)
        (-mll(model(x.expand(3, N, 1)), y.expand(3, N)).mean()).backward()
        natural.step()
        assert natural.rejections == 0

    def test_gradients_that_pile_up(self):
        """A step on the sum of several passes says so; a warm-up of the hyper-parameters before does not matter."""
        x, y = data()
        model = model_with(NGVD(M))
        mll = elbo(model)
        natural = natural_optimizer(mll)
        for _ in range(3):  # Adam alone
            (-mll(model(x), y)).backward()
        natural.zero_grad()
        (-0.5 * mll(model(x), y)).backward()
        (-0.5 * mll(model(x), y)).backward()  # two halves of a batch
        natural.step()
        natural = natural_optimizer(mll)
        natural.zero_grad()
        half = 0.5 * (mll(model(x[:30]), y[:30]) + mll(model(x[30:]), y[30:]))
        (-half).backward()  # in one graph
        natural.step()
        natural = natural_optimizer(mll)
        for _ in range(2):
            (-mll(model(x), y)).backward()
        with pytest.raises(InputError, match=r"not averaged, of one batch a step; natural.zero_grad\(\) d"):
            natural.step()

    @pytest.mark.parametrize("who", ["model", "adam"])
    def test_gradients_that_nobody_clears(self, who):
        """``model.zero_grad()`` or ``adam.zero_grad()`` alone, as beside NGD: a step has the gradient of its batch."""
        ends = []
        for clears_q in (False, True):
            x, y = data()
            model = model_with(NGVD(M, mean_init_std=0.0))
            mll = elbo(model)
            natural = natural_optimizer(mll, lr=0.3)
            adam = torch.optim.Adam(model.parameters(), lr=0.02)
            for batch in torch.arange(N).split(15) * 5:
                (model if who == "model" else adam).zero_grad()
                if clears_q:
                    natural.zero_grad()
                loss = -mll(model(x[batch]), y[batch])
                loss.backward()
                natural.step()
                adam.step()
            ends.append((loss.item(), natural.posteriors[0].mean.clone()))
        assert ends[0][0] == ends[1][0]
        assert torch.equal(ends[0][1], ends[1][1])

    def test_gradients_of_before(self):
        """Of a warm-up of the hyper-parameters, which ends where the optimizer of q is built."""
        x, y = data()
        model, other = model_with(NGVD(M, mean_init_std=0.0)), model_with(NGVD(M, mean_init_std=0.0))
        for _ in range(3):
            (-elbo(model)(model(x), y)).backward()
        for each in (model, other):
            mll = elbo(each)
            natural = natural_optimizer(mll, lr=0.5)
            (-mll(each(x), y)).backward()
            natural.step()
        a, b = (variational_posteriors(each)[0] for each in (model, other))
        assert torch.equal(a.mean, b.mean)

    @pytest.mark.parametrize("which", ["mean_probe", "root_probe"])
    def test_another_optimizer_over_q(self, which):
        x, y = data()
        model = model_with(NGVD(M))
        mll = elbo(model)
        natural = natural_optimizer(mll, lr=0.1)
        everything = [b for name, b in model.named_buffers() if b.is_floating_point() and name.endswith(which)]
        adam = torch.optim.Adam([*model.parameters(), *everything], lr=0.1)
        step(model, mll, natural, x, y)
        adam.step()  # after the natural step, which has used up the gradients of q
        (-mll(model(x), y)).backward()
        adam.step()
        with pytest.raises(InputError, match=r"probes of q have to stay zero, and another optimizer has moved them"):
            model(x)

    def test_another_objective(self):
        likelihood = gp.likelihoods.GaussianLikelihood()
        exact = gp.models.ExactGP(torch.zeros(2, 1), torch.zeros(2), likelihood)
        with pytest.raises(InputError, match="got ExactMarginalLogLikelihood. Give a VariationalELBO"):
            natural_optimizer(gp.mlls.ExactMarginalLogLikelihood(likelihood, exact))
