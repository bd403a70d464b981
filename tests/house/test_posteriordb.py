"""The log joints of posteriordb: against their definitions written once more in SciPy, and the reference draws."""

import importlib
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import IDENTITY, close, randn
from scipy import stats
from scipy.integrate import solve_ivp

pytest.importorskip("benchmarks", reason="needs the benchmarks of a clone: run python -m pytest in its root")

from benchmarks.posteriordb.dynamics import concentrations, log_populations  # noqa: E402
from benchmarks.posteriordb.load import MODELS, NAMES, load, names_with_draws  # noqa: E402

pytestmark = pytest.mark.skipif(
    not (Path(os.environ.get("TORCHNGVI_DATA") or ".") / "posteriordb").is_dir(),
    reason="needs TORCHNGVI_DATA, a folder with posteriordb/data.json.gz and the reference draws",
)

Z_BOUND = 5.0  # of some thousand statistics of fixed draws
every_posterior = pytest.mark.parametrize("name", NAMES)


def some_theta(posterior, count):
    """A few of the reference draws, far apart."""
    draws = posterior.unconstrained_draws
    return draws[:: len(draws) // count][:count]


def parameters(posterior, theta):
    """What the model's density takes."""
    return posterior.model.recover(posterior.constrain(theta))


def test_every_reference_posterior_is_here():
    assert set(NAMES) == names_with_draws()
    assert set(MODELS) == {name.rsplit("-", 1)[1] for name in NAMES}


REGRESSIONS = {  # data, coefficients -> response, mean
    "blr": lambda d, b: (d.y, d.X @ b),
    "earn_height": lambda d, b: (d.earn, b[0] + b[1] * d.height),
    "logearn_height": lambda d, b: (np.log(d.earn), b[0] + b[1] * d.height),
    "log10earn_height": lambda d, b: (np.log10(d.earn), b[0] + b[1] * d.height),
    "logearn_height_male": lambda d, b: (np.log(d.earn), b[0] + b[1] * d.height + b[2] * d.male),
    "logearn_logheight_male": lambda d, b: (np.log(d.earn), b[0] + b[1] * np.log(d.height) + b[2] * d.male),
    "logearn_interaction": lambda d, b: (np.log(d.earn), b[0] + (b[1] + b[3] * d.male) * d.height + b[2] * d.male),
    "kidscore_momhs": lambda d, b: (d.kid_score, b[0] + b[1] * d.mom_hs),
    "kidscore_momiq": lambda d, b: (d.kid_score, b[0] + b[1] * d.mom_iq),
    "kidscore_interaction": lambda d, b: (d.kid_score, crossed(b, d.mom_hs, d.mom_iq)),
    "kidscore_interaction_c": lambda d, b: (
        d.kid_score,
        crossed(b, d.mom_hs - d.mom_hs.mean(), d.mom_iq - d.mom_iq.mean()),
    ),
    "kidscore_interaction_c2": lambda d, b: (d.kid_score, crossed(b, d.mom_hs - 0.5, d.mom_iq - 100)),
    "kidscore_mom_work": lambda d, b: (d.kid_score, b[0] + np.array([0, *b[1:]])[d.mom_work.astype(int) - 1]),
    "mesquite": lambda d, b: (
        d.weight,
        b[0] + b[1:] @ [d.diam1, d.diam2, d.canopy_height, d.total_height, d.density, d.group],
    ),
    "logmesquite": lambda d, b: (
        np.log(d.weight),
        b[0] + b[1:6] @ np.log([d.diam1, d.diam2, d.canopy_height, d.total_height, d.density]) + b[6] * d.group,
    ),
    "logmesquite_logvolume": lambda d, b: (np.log(d.weight), b[0] + b[1] * np.log(d.diam1 * d.diam2 * d.canopy_height)),
    "logmesquite_logvas": lambda d, b: (  # volume, area, shape
        np.log(d.weight),
        b[0]
        + (b[1] + b[2] + b[3]) * np.log(d.diam1)
        + (b[1] + b[2] - b[3]) * np.log(d.diam2)
        + b[1] * np.log(d.canopy_height)
        + b[4] * np.log(d.total_height)
        + b[5] * np.log(d.density)
        + b[6] * d.group,
    ),
    "nes": lambda d, b: (
        d.partyid7,
        b[[0, 1, 2, 6, 7, 8]] @ [d.real_ideo**0, d.real_ideo, d.race_adj, d.educ1, d.gender, d.income]
        + np.array([0, *b[3:6]])[d.age_discrete.astype(int) - 1],
    ),
}
REGRESSION_PRIORS = {
    "blr": lambda p: normal(p["beta"], 0, 10) + normal(p["sigma"], 0, 10),
    "kidscore_momhs": lambda p: cauchy(p["sigma"], 2.5),
    "kidscore_momiq": lambda p: cauchy(p["sigma"], 2.5),
    "kidscore_interaction": lambda p: cauchy(p["sigma"], 2.5),
}


def normal(x, mean, sd):
    return stats.norm.logpdf(x, mean, sd).sum()


def cauchy(x, scale):
    return stats.cauchy.logpdf(x, 0, scale).sum()


def lognormal(x, mean, sd):
    return stats.lognorm.logpdf(x, sd, scale=np.exp(mean)).sum()


def crossed(b, x, z):
    return b[0] + b[1] * x + b[2] * z + b[3] * x * z


def eight_schools_noncentered(d, p):
    theta = p["mu"] + p["tau"] * p["theta_trans"]
    prior = normal(p["theta_trans"], 0, 1) + normal(p["mu"], 0, 5) + cauchy(p["tau"], 5)
    return prior + normal(d.y, theta, d.sigma)


def low_dim_gauss_mix(d, p):
    prior = normal(p["sigma"], 0, 2) + normal(p["mu"], 0, 2) + stats.beta.logpdf(p["theta"], 5, 5)
    components = stats.norm.pdf(d.y[:, None], p["mu"], p["sigma"])
    return prior + np.log(components @ [p["theta"], 1 - p["theta"]]).sum()


def arK(d, p):
    total = normal(p["alpha"], 0, 10) + normal(p["beta"], 0, 10) + cauchy(p["sigma"], 2.5)
    for t in range(5, 200):
        total += normal(d.y[t], p["alpha"] + sum(p["beta"][k] * d.y[t - 1 - k] for k in range(5)), p["sigma"])
    return total


def arma11(d, p):
    total = normal(p["mu"], 0, 10) + normal([p["phi"], p["theta"]], 0, 2) + cauchy(p["sigma"], 2.5)
    previous, error = p["mu"], 0.0
    for y in d.y:
        error = y - (p["mu"] + p["phi"] * previous + p["theta"] * error)
        total, previous = total + normal(error, 0, p["sigma"]), y
    return total


def hmm_drive_0(d, p):
    transition = np.stack([p["theta1"], p["theta2"]])
    total = sum(stats.dirichlet.logpdf(row / row.sum(), a) for row, a in zip(transition, d.alpha, strict=True))
    total += normal(p["phi"], [0, 3], 1) + normal(p["lambda"], [0, 3], 1)
    forward = np.ones(2)
    for t, (u, v) in enumerate(zip(d.u, d.v, strict=True)):
        emission = stats.expon.pdf(u, scale=1 / p["phi"]) * stats.expon.pdf(v, scale=1 / p["lambda"])
        forward = (forward if t == 0 else forward @ transition) * emission
        total, forward = total + np.log(forward.sum()), forward / forward.sum()
    return total


def solved_populations(theta, z_init, times):
    def field(t, z):
        return (theta[0] - theta[1] * z[1]) * z[0], (-theta[2] + theta[3] * z[0]) * z[1]

    return solve_ivp(field, (0, times[-1]), z_init, "DOP853", t_eval=times, rtol=1e-11, atol=1e-11).y.T


def solved_concentrations(k_a, K_m, V_m, d):
    def field(t, C):
        return (d.D * k_a * np.exp(-k_a * t) - V_m * C / (K_m + C)) / d.V

    return solve_ivp(field, (0, d.times[-1]), [0.0], "Radau", t_eval=d.times, rtol=1e-10, atol=1e-12).y[0]


def lotka_volterra(d, p):
    theta, z_init, sigma = p["theta"], p["z_init"], p["sigma"]
    prior = normal(theta, [1, 0.05, 1, 0.05], [0.5, 0.05, 0.5, 0.05])
    prior += lognormal(sigma, -1, 1) + lognormal(z_init, np.log(10), 1)
    z = np.stack([z_init, *solved_populations(theta, z_init, d.ts)])
    return prior + lognormal(np.stack([d.y_init, *d.y]), np.log(z), sigma)


def one_comp_mm_elim_abs(d, p):
    C = solved_concentrations(p["k_a"], p["K_m"], p["V_m"], d)
    return sum(cauchy(x, 1) for x in p.values()) + lognormal(d.C_hat, np.log(C), p["sigma"])


OTHERS = {
    definition.__name__: definition
    for definition in (
        eight_schools_noncentered,
        low_dim_gauss_mix,
        arK,
        arma11,
        hmm_drive_0,
        lotka_volterra,
        one_comp_mm_elim_abs,
    )
}


def defined(model, d, p):
    """Data, parameters -> log density."""
    if model in OTHERS:
        return OTHERS[model](d, p)
    y, mean = REGRESSIONS[model](d, p["beta"])
    return normal(y, mean, p["sigma"]) + REGRESSION_PRIORS.get(model, lambda p: 0.0)(p)


@every_posterior
def test_density_is_the_defined_one(name):
    posterior = load(name)
    p = parameters(posterior, some_theta(posterior, 3))
    model = name.rsplit("-", 1)[1]
    d = SimpleNamespace(**{key: x.numpy() for key, x in posterior.data.items()})
    expected = [defined(model, d, {key: x[i].numpy() for key, x in p.items()}) for i in range(3)]
    solver = {"lotka_volterra": 1e-7, "one_comp_mm_elim_abs": 1e-7}
    close(posterior.model.log_density(p), torch.tensor(expected), solver.get(model, IDENTITY))


@pytest.mark.accuracy
def test_differential_equations():
    posterior = load("hudson_lynx_hare-lotka_volterra")
    p = posterior.constrain(some_theta(posterior, 5))
    times = posterior.data["ts"].numpy()
    expected = [solved_populations(*x, times) for x in zip(p["theta"].numpy(), p["z_init"].numpy(), strict=True)]
    close(log_populations(p["theta"], p["z_init"], [0.0, *times]), torch.tensor(np.array(expected)).log(), 3e-8)

    posterior = load("one_comp_mm_elim_abs-one_comp_mm_elim_abs")
    draws = posterior.unconstrained_draws
    p = posterior.constrain(draws[draws[:, 1].argsort()[[0, 20, 1000, -1]]])  # from the smallest K_m to the largest
    d = SimpleNamespace(**{key: x.numpy() for key, x in posterior.data.items()})
    expected = [
        solved_concentrations(*x, d) for x in zip(*(p[key].numpy() for key in ("k_a", "K_m", "V_m")), strict=True)
    ]
    C = concentrations(p["k_a"], p["K_m"], p["V_m"], float(d.D), float(d.V), [0.0, *d.times])
    close(C, torch.tensor(np.array(expected)), 3e-8)


@every_posterior
def test_constrain_and_unconstrain_are_inverse(name):
    posterior = load(name)
    draws = posterior.unconstrained_draws
    assert draws.shape == (2000, posterior.dim)
    assert bool(draws.isfinite().all())
    for key, value in posterior.constrain(draws).items():
        close(value, posterior.draws[key], IDENTITY)
    theta = randn(2, 50, posterior.dim, seed=0)
    close(posterior.unconstrain(posterior.constrain(theta)), theta, IDENTITY)
    close(posterior.unconstrain(posterior.constrain(draws)), draws, IDENTITY)


@every_posterior
def test_log_jacobian(name):
    posterior = load(name)
    sizes = {key: transform.inverse_shape(shape) for key, (transform, shape) in posterior.model.parameters.items()}

    def free(theta):
        """The parameters in one row; a simplex without its last entry."""
        p = parameters(posterior, theta)
        return torch.cat([p[key][: size[0]] if size else p[key][None] for key, size in sizes.items()])

    theta = some_theta(posterior, 3)
    jacobian = torch.func.vmap(torch.func.jacrev(free))(theta)
    log_density = posterior.model.log_density(parameters(posterior, theta))
    close(posterior.log_joint(theta) - log_density, torch.linalg.slogdet(jacobian).logabsdet, IDENTITY)


def largest_z(posterior, log_joint):
    """The largest z of E ∇ log p = 0 and of E θ (∇ log p)ᵀ = -I over the draws, θ centred and whitened.

    The first is sharpened by regression on the published quantities, whose means are known from five
    times as many draws.
    """
    draws = posterior.unconstrained_draws
    count = len(draws)
    root = torch.linalg.cholesky(draws.T.cov())
    theta = torch.linalg.solve_triangular(root, (draws - draws.mean(0)).T, upper=False).T
    leaf = draws.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(log_joint(leaf).sum(), leaf)
    score = gradient @ root

    def row(values):
        return torch.cat(
            [x.reshape(*x.shape[: x.ndim - posterior.mean[key].ndim], -1) for key, x in values.items()], -1
        )

    scale = row(posterior.sd)
    centre = row(posterior.draws).mean(0)
    controls, offset = (row(posterior.draws) - centre) / scale, (row(posterior.mean) - centre) / scale
    slope = torch.linalg.lstsq(controls, score, driver="gelsd").solution
    fitted = controls @ slope
    variance = (score - fitted).var(0) / count + fitted.var(0) / (5 * count)
    first = (score.mean(0) + offset @ slope) / variance.sqrt()

    products = theta[:, :, None] * score[:, None, :] + torch.eye(posterior.dim, dtype=theta.dtype)
    second = products.mean(0) / (products.std(0) / count**0.5)
    return float(torch.cat([first, second.flatten()]).abs().max())


@pytest.mark.accuracy
@every_posterior
def test_reference_draws_satisfy_steins_identity(name):
    posterior = load(name)
    assert largest_z(posterior, posterior.log_joint) < Z_BOUND


# where it moves the posterior by more than the draws' own error; see also test_log_jacobian
STRONG_JACOBIANS = [
    "bball_drive_event_0-hmm_drive_0",
    "eight_schools-eight_schools_noncentered",
    "hudson_lynx_hare-lotka_volterra",
    "mesquite-logmesquite_logvolume",
    "one_comp_mm_elim_abs-one_comp_mm_elim_abs",
]


@pytest.mark.accuracy
@pytest.mark.parametrize("name", STRONG_JACOBIANS)
def test_steins_identity_sees_a_missing_jacobian(name):
    posterior = load(name)
    assert largest_z(posterior, lambda theta: posterior.model.log_density(parameters(posterior, theta))) > Z_BOUND


STRONG_PRIORS = {  # normal: of which quantity, its mean and sd
    "eight_schools-eight_schools_noncentered": (lambda p: p["mu"], 0, 5),
    "bball_drive_event_0-hmm_drive_0": (lambda p: p["phi"][..., 1], 3, 1),
}


@pytest.mark.accuracy
@pytest.mark.parametrize("name", STRONG_PRIORS)
def test_steins_identity_sees_a_prior_of_twice_the_scale(name):
    posterior = load(name)
    quantity, mean, sd = STRONG_PRIORS[name]

    def log_joint(theta):
        standardized = (quantity(posterior.constrain(theta)) - mean) / sd
        return posterior.log_joint(theta) + 0.5 * (standardized.square() - (standardized / 2).square())

    assert largest_z(posterior, log_joint) > Z_BOUND


@pytest.mark.accuracy
@every_posterior
def test_batches(name):
    posterior = load(name)
    theta = some_theta(posterior, 6).reshape(2, 3, -1)
    value = posterior.log_joint(theta)
    close(torch.stack([torch.stack([posterior.log_joint(x) for x in row]) for row in theta]), value, IDENTITY)
    close(torch.func.vmap(posterior.log_joint)(theta), value, IDENTITY)


@pytest.mark.accuracy
@every_posterior
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, at its first forward mode
def test_derivatives_are_finite(name):
    posterior = load(name)
    mean = posterior.unconstrained_draws.mean(0)
    theta = torch.stack([torch.zeros_like(mean), mean])
    gradient = torch.func.vmap(torch.func.grad(posterior.log_joint))(theta)
    hessian = torch.func.vmap(torch.func.hessian(posterior.log_joint))(theta)
    assert bool(gradient.isfinite().all())
    assert bool(hessian.isfinite().all())
    close(hessian.mT, hessian, IDENTITY)


@every_posterior
def test_far_from_the_posterior_all_is_finite(name):
    posterior = load(name)
    theta = (5 * randn(20, posterior.dim, seed=0)).requires_grad_()
    value = posterior.log_joint(theta)
    (gradient,) = torch.autograd.grad(value.sum(), theta)
    assert bool(value.isfinite().all())
    assert bool(gradient.isfinite().all())


def test_the_comparison_can_be_imported():
    """What its table is made by."""
    pytest.importorskip("pyro")
    assert importlib.import_module("benchmarks.posteriordb.compare").Row
