"""Public questions about sparse GPs in GPyTorch, rebuilt on data of our own: Adam, NGD and ours in one run.

    python -m benchmarks.gpytorch_public [--only 1 6b ...] [--steps 200] [--log gpytorch_public.jsonl]

Every situation is a function with the address of its question.  Adam moves everything at .03; NGD takes steps of .1
beside Adam; ours is `train_svgp`, or where it refuses a model a loop of `natural_optimizer` beside Adam, as many steps.
The verdicts are those of `benchmarks.public`.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import gpytorch as gp
import torch
from linear_operator import to_linear_operator

from benchmarks.public import End, Questions
from torchngvi.adapters.gpytorch import (
    NaturalGradientVariationalDistribution,
    condition,
    natural_optimizer,
    refine_svgp,
    train_svgp,
)
from torchngvi.errors import PairError

v, K, L = gp.variational, gp.kernels, gp.likelihoods
KINDS = {
    "Adam": v.CholeskyVariationalDistribution,
    "NGD": v.NaturalVariationalDistribution,
    "ours": NaturalGradientVariationalDistribution,
}


class Problem(NamedTuple):
    """A model with its data, the score of what it predicts, and the bound below which that is right."""

    model: Any
    likelihood: Any
    x: torch.Tensor
    y: torch.Tensor
    score: Callable[[], float]
    right: float
    objective: Any = gp.mlls.VariationalELBO
    how: Callable[["Problem", str, int], None] | None = None  # in the place of the usual ways
    learn: bool = True  # hyper-parameters too


class Model(gp.models.ApproximateGP):
    def __init__(self, kind, Z, kernel=None, functions=(), wrap=None, strategy=v.VariationalStrategy, **options):
        shape = torch.Size(functions)
        base = strategy(self, Z, kind(Z.shape[-2], batch_shape=shape), **options)
        super().__init__(base if wrap is None else wrap(base))
        self.mean_module = gp.means.ConstantMean(batch_shape=shape)
        self.covar_module = kernel or K.ScaleKernel(K.RBFKernel(batch_shape=shape), batch_shape=shape)

    def forward(self, x):
        return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def uniform(rows, span=1.0, features=1, dtype=torch.float64):
    return (span * torch.rand(rows, features, dtype=torch.float64)).to(dtype)


def rms(a, b):
    return float((a - b).detach().square().mean().sqrt())


def regression(kind, x, f, noise, points, kernel=None, right=0.1, likelihood=None, score=None, **options):
    """A function with Gaussian noise; the score is the error of the mean."""
    y = f + noise * torch.randn(len(f)).to(f)
    model = Model(kind, x[torch.randperm(len(x))[:points]].clone(), kernel, **options).to(x)
    likelihood = (likelihood or L.GaussianLikelihood()).to(x)
    error = (lambda: rms(model.eval()(x).mean, f)) if score is None else lambda: score(model, likelihood, y)
    return Problem(model, likelihood, x, y, error, right)


# --------------------------------------------------------------------------------------- the usual ways


def loop(problem, method, steps):
    """A loop of Adam, with NGD or a `natural_optimizer` beside it."""
    model, likelihood, x, y = problem[:4]
    model.train(), likelihood.train()
    mll = problem.objective(likelihood, getattr(model, "elbo_model", model), num_data=len(y))
    own = list(model.parameters() if method != "NGD" else model.hyperparameters()) + list(likelihood.parameters())
    others = [torch.optim.Adam(own, lr=0.03)] if problem.learn or method == "Adam" else []
    if method == "NGD":
        others.append(gp.optim.NGD(model.variational_parameters(), num_data=len(y), lr=0.1))
    if method == "ours":
        others.append(natural_optimizer(mll, lr=0.1))
    for _ in range(steps):
        for optimizer in others:
            optimizer.zero_grad()
        (-mll(model(x), y)).backward()
        for optimizer in others:
            optimizer.step()


def run(problem, method, steps):
    """Train, by whichever of our ways takes the model; what was said about a bad end, and by which way."""
    if problem.how is not None:
        return problem.how(problem, method, steps) or ""
    if method != "ours":
        return loop(problem, method, steps) or ""
    try:
        if not problem.learn:
            refine_svgp(problem.model, problem.likelihood, [(problem.x, problem.y)], progress=False)
            return ""
        if problem.objective is not gp.mlls.VariationalELBO:
            raise PairError("train_svgp has the ELBO only")
        result = train_svgp(problem.model, problem.likelihood, (problem.x, problem.y), progress=False)
    except PairError:
        loop(problem, method, steps)
        return "by a loop"
    return "a constant function" if result.found == "constant" else ""


def play(make, method, steps):
    problem = make(KINDS[method])
    note = run(problem, method, steps)
    return End(float(problem.score()), problem.right, note, "constant" in note)


QUESTIONS = Questions(KINDS, play)
situation = QUESTIONS.situation


# --------------------------------------------------------------------------------------- the situations


@situation("1", "cornellius-gp/gpytorch/issues/1061")
def many_waves(kind):
    """sin(10 pi x) in 308 rows ends at a constant; error of the mean."""
    x = uniform(308)
    return regression(kind, x, torch.sin(10 * math.pi * x[:, 0]), 0.0, 50, right=0.05)


@situation("2", "GPflow/GPflow/issues/971")
def a_period(kind):
    """A period of 2 pi from that of ln 2; error of the mean."""
    x = uniform(400, 20.0)
    return regression(kind, x, torch.sin(x[:, 0]), 0.1, 30, K.ScaleKernel(K.PeriodicKernel()), 0.065)


@situation("3", "cornellius-gp/gpytorch/issues/1204")
def a_period_in_float32(kind):
    """A periodic kernel in float32 with 100 random inducing points; error of the mean."""
    x = uniform(400, 100.0, dtype=torch.float32)
    return regression(kind, x, torch.sin(math.pi * x[:, 0] / 10), 0.1, 100, K.ScaleKernel(K.PeriodicKernel()), 0.065)


@situation("4", "cornellius-gp/gpytorch/issues/624")
def wide_inputs(kind):
    """Inputs from 0 to 100, targets about 10, float32; error of the mean."""
    x = uniform(500, 100.0, dtype=torch.float32)
    return regression(kind, x, 10 + torch.sin(x[:, 0] / 5), 0.3, 30, right=0.12)


@situation("5", "cornellius-gp/gpytorch/issues/620")
def a_fixed_noise(kind):
    """A noise fixed at 1e-5, float32; error of the mean."""
    likelihood = L.GaussianLikelihood(noise_constraint=gp.constraints.GreaterThan(1e-7))
    likelihood.noise = 1e-5
    likelihood.raw_noise.requires_grad_(False)
    x = uniform(200, dtype=torch.float32)
    return regression(kind, x, torch.sin(6 * x[:, 0]), 0.0, 20, right=0.005, likelihood=likelihood)


def softmax(kind, functions, classes=50):
    x = uniform(400)
    y = (classes * x[:, 0]).long().clamp_max(classes - 1)
    several = lambda base: v.IndependentMultitaskVariationalStrategy(base, num_tasks=classes)  # noqa: E731
    model = Model(kind, uniform(15), None, functions, several).double()
    likelihood = L.SoftmaxLikelihood(num_features=classes, num_classes=classes, mixing_weights=False).double()
    model.covar_module.base_kernel.lengthscale = 0.1

    def wrong():
        return float((model.eval()(x).mean.argmax(-1) != y).double().mean())

    return Problem(model, likelihood, x, y, wrong, 0.6)


@situation("6", "cornellius-gp/gpytorch/issues/1667")
def softmax_over_one_function(kind):
    """A softmax of 50 classes over one shared GP; share of wrong labels."""
    return softmax(kind, ())


@situation("6b", "cornellius-gp/gpytorch/issues/1667")
def softmax_over_fifty_functions(kind):
    """The same with a GP for each class; share of wrong labels."""
    return softmax(kind, (50,))


def tasks(kind, functions, wrap):
    x = uniform(300)
    t = 2 * math.pi * x[:, 0]
    f = torch.stack([t.sin(), t.cos(), t.sin() + 2 * t.cos(), -t.cos()], -1)
    y = f + 0.2 * torch.randn_like(f)
    model = Model(kind, uniform(15).repeat(functions, 1, 1), None, (functions,), wrap).double()
    likelihood = L.MultitaskGaussianLikelihood(num_tasks=4, rank=0).double()
    return Problem(model, likelihood, x, y, lambda: rms(model.eval()(x).mean, f), 0.065)


@situation("7", "cornellius-gp/gpytorch/issues/1300")
def independent_tasks(kind):
    """Four tasks with inducing points of their own; error of the means."""
    return tasks(kind, 4, lambda base: v.IndependentMultitaskVariationalStrategy(base, num_tasks=4))


@situation("7b", "cornellius-gp/gpytorch/issues/1438")
def mixed_tasks(kind):
    """Four tasks that are mixtures of two functions (LMC); error of the means."""
    return tasks(kind, 2, lambda base: v.LMCVariationalStrategy(base, num_tasks=4, num_latents=2))


@situation("8", "cornellius-gp/gpytorch/issues/1269")
def more_rows(kind):
    """Twenty more rows for a model that was trained: GPyTorch's fantasy model, and `condition`; from the exact GP."""
    x = uniform(120, 4.0)
    y = torch.sin(3 * x[:, 0]) + 0.1 * torch.randn(120).double()
    model, likelihood = Model(KINDS["ours"], x[::3].clone()).double(), L.GaussianLikelihood().double()
    grid, state = torch.linspace(0, 4, 50).double()[:, None], {}

    def both(problem, method, steps):
        train_svgp(model, likelihood, (x[:100], y[:100]), rounds=2, progress=False)
        if method == "ours":
            state["mean"] = condition(model, likelihood, x[100:], y[100:]).eval()(grid).mean
        else:
            model.eval()(x[:1])
            model.likelihood = likelihood  # where GPyTorch looks for it
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                state["mean"] = model.get_fantasy_model(x[100:], y[100:])(grid).mean

    def apart():
        with torch.no_grad():
            joint = model.forward(torch.cat([x, grid]))
            C, mean = joint.covariance_matrix, joint.mean
            weights = torch.linalg.solve(C[:120, :120] + likelihood.noise * torch.eye(120), C[:120, 120:])
            return float((state["mean"] - mean[120:] - (y - mean[:120]) @ weights).abs().max())

    return Problem(model, likelihood, x, y, apart, 0.01, how=both)


@situation("9", "botorch/issues/1339")
def botorch_model(kind):
    """BoTorch's SingleTaskVariationalGP: fit_gpytorch_mll as Adam and NGD; error of the mean, standard deviations."""
    from botorch import fit_gpytorch_mll
    from botorch.models import SingleTaskVariationalGP
    from botorch.models.transforms import Normalize, Standardize

    x = 50 + 100 * uniform(200, features=2)
    f = 1e3 * torch.sin(x.sum(-1, keepdim=True) / 30) + 5e3
    y = f + 100 * torch.randn_like(f)
    scaled = {"input_transform": Normalize(2), "outcome_transform": Standardize(1)}
    model = SingleTaskVariationalGP(x, y, inducing_points=40, **scaled)

    def both(problem, method, steps):
        if method == "ours":
            train_svgp(model, progress=False)
        else:
            fit_gpytorch_mll(gp.mlls.VariationalELBO(model.likelihood, model.model, num_data=len(y)))

    return Problem(model, model.likelihood, x, y, lambda: rms(model.posterior(x).mean, f) / 710, 0.06, how=both)


class Heteroskedastic(L.Likelihood):
    """y ~ N(f_1, exp(f_2)²)."""

    def forward(self, f, *_, **__):
        return torch.distributions.Normal(f[..., 0], f[..., 1].exp())


@situation("10", "cornellius-gp/gpytorch/issues/1175")
def a_noise_that_varies(kind):
    """Two functions, the mean and the log standard deviation; error of the latter."""
    x = uniform(500, 4.0)
    log_sd = torch.sin(1.5 * x[:, 0]) - 1.0
    y = torch.sin(3 * x[:, 0]) + log_sd.exp() * torch.randn(500).double()
    wrap = lambda base: v.IndependentMultitaskVariationalStrategy(base, num_tasks=2)  # noqa: E731
    model = Model(kind, uniform(25, 4.0).repeat(2, 1, 1), None, (2,), wrap).double()
    return Problem(model, Heteroskedastic(), x, y, lambda: rms(model.eval()(x).mean[:, 1], log_sd), 0.15)


class Tasks(K.Kernel):
    """A kernel of the first input times one of the task number in the second."""

    def __init__(self):
        super().__init__()
        self.rows, self.task = K.ScaleKernel(K.RBFKernel()), K.IndexKernel(num_tasks=3, rank=2)

    def forward(self, a, b, diag=False, **options):
        B, i, j = self.task._eval_covar_matrix(), a[..., 1].long(), b[..., 1].long()
        rows = self.rows(a[..., :1], b[..., :1], diag=diag)
        return rows * B[i, j] if diag else rows.to_dense() * B[i[..., :, None], j[..., None, :]]


@situation("11", "cornellius-gp/gpytorch/issues/2392")
def rows_of_tasks(kind):
    """Rows that carry the number of their task, by an index kernel; error of the mean."""
    x = torch.cat([uniform(300, 4.0), torch.randint(3, (300, 1)).double()], -1)
    f = torch.sin(2 * x[:, 0] + x[:, 1])
    return regression(kind, x, f, 0.1, 45, Tasks(), 0.065, learn_inducing_locations=False)


def shares(kind, extremes):
    x = uniform(300)
    mean = torch.sigmoid(2 * torch.sin(6 * x[:, 0]))
    y = torch.distributions.Beta(20 * mean, 20 * (1 - mean)).sample().clamp(1e-3, 1 - 1e-3)
    if extremes:
        y[3], y[40] = 0.0, 1.0
    model, likelihood = Model(kind, x[:20].clone()).double(), L.BetaLikelihood().double()
    return Problem(model, likelihood, x, y, lambda: rms(model.eval()(x).mean.sigmoid(), mean), 0.08)


@situation("12", "cornellius-gp/gpytorch/issues/1579")
def shares_inside(kind):
    """Shares under a beta likelihood; error of the mean."""
    return shares(kind, False)


@situation("12b", "cornellius-gp/gpytorch/issues/2381")
def shares_of_zero_and_one(kind):
    """The same with an exact 0 and an exact 1."""
    return shares(kind, True)


@situation("13", "cornellius-gp/gpytorch/issues/1788")
def units_of_the_user(kind):
    """y = 300 + 50 sin, not standardised; noise variance over the true 40, away from 1."""
    x = uniform(400, 6.0)
    away = lambda model, likelihood, y: abs(likelihood.noise.item() / 40 - 1)  # noqa: E731
    return regression(kind, x, 300 + 50 * torch.sin(x[:, 0]), 40**0.5, 20, right=0.2, score=away)


@situation("14", "cornellius-gp/gpytorch/issues/2069")
def predictive_objective(kind):
    """The predictive log likelihood with natural gradients; minus it, .22 for the function itself."""
    x, objective = uniform(300, 4.0), gp.mlls.PredictiveLogLikelihood

    def loss(model, likelihood, y):
        return float(-objective(likelihood, model.train(), num_data=300)(model(x), y).detach())

    return regression(kind, x, torch.sin(3 * x[:, 0]), 0.3, 20, right=0.32, score=loss)._replace(objective=objective)


@situation("15", "GPflow/GPflow/issues/820")
def labels_of_a_step(kind):
    """Labels of a step at fixed hyper-parameters; nats a row above the optimal q."""
    x = uniform(200, 4.0)
    y = (x[:, 0] > 2).double()
    model, likelihood = Model(kind, x[:20].clone()).double(), L.BernoulliLikelihood()
    for part in (model, likelihood):
        for name, parameter in part.named_parameters():
            parameter.requires_grad_("_variational_distribution" in name)

    def above():
        model.train()
        loss = -gp.mlls.VariationalELBO(likelihood, model, num_data=200)(model(x), y).item()
        return loss - refine_svgp(model, likelihood, [(x, y)], progress=False).loss / 200

    return Problem(model, likelihood, x, y, above, 1e-3, learn=False)


@situation("16", "cornellius-gp/gpytorch/issues/1267")
def orthogonally_decoupled(kind):
    """An orthogonally decoupled strategy with natural gradients; error of the mean."""
    x = uniform(300, 4.0)
    extra = uniform(30, 4.0)

    def wrap(base):
        return v.OrthogonallyDecoupledVariationalStrategy(base, extra, v.DeltaVariationalDistribution(30))

    return regression(kind, x, torch.sin(3 * x[:, 0]), 0.2, 15, right=0.1, wrap=wrap)


class Layer(gp.models.deep_gps.DeepGPLayer):
    def __init__(self, kind, inputs, outputs):
        shape = torch.Size([] if outputs is None else [outputs])
        Z = torch.randn(*shape, 20, inputs)
        super().__init__(v.VariationalStrategy(self, Z, kind(20, batch_shape=shape)), inputs, outputs)
        self.mean_module = gp.means.ConstantMean(batch_shape=shape) if outputs is None else gp.means.LinearMean(inputs)
        self.covar_module = K.ScaleKernel(K.RBFKernel(batch_shape=shape, ard_num_dims=inputs), batch_shape=shape)

    forward = Model.forward


class Deep(gp.models.deep_gps.DeepGP):
    def __init__(self, kind):
        super().__init__()
        self.hidden, self.last = Layer(kind, 1, 2), Layer(kind, 2, None)

    def forward(self, x):
        return self.last(self.hidden(x))


@situation("20", "cornellius-gp/gpytorch/issues/2674")
def deep(kind):
    """A deep GP of two layers on a step, by loops alone; error of the mean."""
    x = uniform(200, 4.0, dtype=torch.float32) - 2
    f = x[:, 0].sign()
    y = f + 0.1 * torch.randn(200)
    model, likelihood = Deep(kind), L.GaussianLikelihood()
    objective = lambda *a, **k: gp.mlls.DeepApproximateMLL(gp.mlls.VariationalELBO(*a, **k))  # noqa: E731
    return Problem(model, likelihood, x, y, lambda: rms(model.eval()(x).mean.mean(0), f), 0.35, objective)


class GPLVM(gp.models.gplvm.BayesianGPLVM):
    def __init__(self, kind, Y, latent=2):
        n, tasks_ = Y.shape
        shape = torch.Size([tasks_])
        start = torch.linalg.svd(Y - Y.mean(0), full_matrices=False)[0][:, :latent] * n**0.5
        prior = gp.priors.NormalPrior(torch.zeros(n, latent).double(), torch.ones(n, latent).double())
        X = gp.models.gplvm.VariationalLatentVariable(n, tasks_, latent, start.clone(), prior)
        super().__init__(X, v.VariationalStrategy(self, torch.randn(tasks_, 15, latent), kind(15, batch_shape=shape)))
        self.mean_module = gp.means.ZeroMean(ard_num_dims=latent)
        self.covar_module = K.ScaleKernel(K.RBFKernel(ard_num_dims=latent))

    forward = Model.forward


@situation("19", "cornellius-gp/gpytorch/issues/1041")
def latent_inputs(kind):
    """A Bayesian GPLVM, by loops alone; error of the reconstruction."""
    z = torch.randn(60, 2).double()
    f = torch.sin(z @ torch.randn(2, 5).double())
    Y = f + 0.1 * torch.randn(60, 5).double()
    model = GPLVM(kind, Y).double()
    likelihood = L.GaussianLikelihood(batch_shape=torch.Size([5])).double()

    def reconstruction():
        return rms(model.eval()(model.X.q_mu).mean.mT, f)

    def alone(problem, method, steps):
        mll = gp.mlls.VariationalELBO(likelihood, model, num_data=60)
        own = [*(model.hyperparameters() if method == "NGD" else model.parameters()), *likelihood.parameters()]
        both = [torch.optim.Adam(own, lr=0.03)]
        if method == "NGD":
            both.append(gp.optim.NGD(model.variational_parameters(), num_data=60, lr=0.1))
        if method == "ours":
            both.append(natural_optimizer(mll, lr=0.1))
        for _ in range(steps):
            for optimizer in both:
                optimizer.zero_grad()
            (-mll(model(model.sample_latent_variable()), Y.mT).sum()).backward()
            for optimizer in both:
                optimizer.step()
        return "by a loop" if method == "ours" else ""

    return Problem(model, likelihood, z, Y, reconstruction, 0.2, how=alone)


class Differences(Model):
    dense = False

    def forward(self, x):
        a, b = x[..., :1], x[..., 1:]
        k = self.covar_module
        C = k(a).to_dense() + k(b).to_dense() - k(a, b).to_dense() - k(b, a).to_dense()
        C = C if self.dense else to_linear_operator(C)
        return gp.distributions.MultivariateNormal(torch.zeros_like(x[..., 0]), C)


def preferences(kind, dense):
    x = uniform(200, 4.0, 2)
    y = (torch.sin(2 * x[:, 0]) > torch.sin(2 * x[:, 1])).double()
    model, likelihood = Differences(kind, x[:30].clone()).double(), L.BernoulliLikelihood()
    model.dense = dense

    def wrong():
        return float(((model.eval()(x).mean > 0) != y.bool()).double().mean())

    return Problem(model, likelihood, x, y, wrong, 0.08)


@situation("21", "cornellius-gp/gpytorch (preference pairs)")
def preference_pairs(kind):
    """Differences of a function as preferences, K as a linear operator; share of wrong pairs."""
    return preferences(kind, False)


@situation("21b", "cornellius-gp/gpytorch (preference pairs)")
def preference_pairs_dense(kind):
    """The same with a dense K from forward."""
    return preferences(kind, True)


@situation("22", "cornellius-gp/gpytorch/issues/2309")
def a_prior(kind):
    """A prior on a length scale, Z = X; relative distance from the length scale of the exact MAP."""
    x = uniform(60, 6.0)
    y = torch.sin(x[:, 0]) + 0.5 * torch.randn(60).double()

    def kernel():
        return K.ScaleKernel(K.RBFKernel(lengthscale_prior=gp.priors.GammaPrior(3.0, 2.0)))

    class Exact(gp.models.ExactGP):
        def __init__(self):
            super().__init__(x, y, L.GaussianLikelihood())
            self.mean_module, self.covar_module = gp.means.ConstantMean(), kernel()

        forward = Model.forward

    def apart():
        exact = Exact().double().train()
        mll = gp.mlls.ExactMarginalLogLikelihood(exact.likelihood, exact)
        lbfgs = torch.optim.LBFGS(exact.parameters(), max_iter=200, line_search_fn="strong_wolfe")

        def closure():
            lbfgs.zero_grad()
            loss = -mll(exact(x), y)
            loss.backward()
            return loss

        lbfgs.step(closure)
        wanted = exact.covar_module.base_kernel.lengthscale.item()
        return abs(model.covar_module.base_kernel.lengthscale.item() / wanted - 1)

    model = Model(kind, x.clone(), kernel(), learn_inducing_locations=False).double()
    return Problem(model, L.GaussianLikelihood().double(), x, y, apart, 0.01)


@situation("23", "cornellius-gp/gpytorch (duplicates)")
def duplicated_points(kind):
    """Matern in float32, 80 inducing points of which 20 are repeated; noise variance, from the true .1."""
    x = uniform(400, 4.0, dtype=torch.float32)
    y = torch.sin(3 * x[:, 0]) + 0.1**0.5 * torch.randn(400)
    model = Model(kind, torch.cat([x[:60], x[:20]]), K.ScaleKernel(K.MaternKernel(2.5)))
    likelihood = L.GaussianLikelihood()
    return Problem(model, likelihood, x, y, lambda: abs(likelihood.noise.item() - 0.1), 0.02)


@situation("25", "cornellius-gp/gpytorch/issues/557")
def products_of_inputs(kind):
    """sin(6 a) sin(6 b) of four inputs; error of the mean."""
    x = uniform(1000, 2.0, 4)
    kernel = K.ScaleKernel(K.RBFKernel(ard_num_dims=4))
    return regression(kind, x, torch.sin(6 * x[:, 0]) * torch.sin(6 * x[:, 1]), 0.1, 80, kernel, 0.2)


@situation("26", "cornellius-gp/gpytorch (spectral mixture)")
def spectral_mixture(kind):
    """A spectral mixture from initialize_from_data; error of the mean."""
    x = uniform(300, 10.0)
    f = torch.sin(2 * math.pi * x[:, 0]) + 0.5 * torch.sin(4.6 * math.pi * x[:, 0])
    kernel = K.SpectralMixtureKernel(num_mixtures=3)
    kernel.initialize_from_data(x, f)
    return regression(kind, x, f, 0.1, 60, kernel, 0.1)


class Nodes(K.Kernel):
    """A kernel between the nodes of a ring, by their numbers."""

    has_lengthscale = True

    def forward(self, a, b, diag=False, **options):
        angle = 2 * math.pi * (a - (b if diag else b.mT)) / 40
        k = (-(1 - angle.cos()) / self.lengthscale.square()).exp()
        return k[..., 0] if diag else k


@situation("30", "cornellius-gp/gpytorch (nodes)")
def nodes(kind):
    """A kernel over the numbers of nodes, which inducing points have to stay; error of the mean."""
    x = torch.randint(40, (300, 1)).double()
    f = torch.sin(2 * math.pi * x[:, 0] / 40)
    return regression(kind, x, f, 0.2, 20, K.ScaleKernel(Nodes()), 0.065, learn_inducing_locations=False)


def main(arguments=None):
    return QUESTIONS.main(__doc__, "gpytorch_public.jsonl", arguments, steps=200)


if __name__ == "__main__":
    main()
