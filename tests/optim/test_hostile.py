"""Random hostile cases: each ends in a result or in one sentence, and what is called converged is."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from independent_norm import linear_norm, moderate, sampled_norm2

import torchngvi as ngvi
from torchngvi.errors import RejectedStepWarning, TorchngviError
from torchngvi.models.likelihoods import NegativeBinomial, StudentT
from torchngvi.optim import NaturalGradientVI

POSTERIORS = [ngvi.CholeskyGaussian, ngvi.DiagonalGaussian, ngvi.NaturalGaussian, ngvi.PrecisionCholeskyGaussian]
DTYPES = [torch.float64, torch.float32]


def cases(count):
    """So many of them, the same in every run."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def seeds():
    return st.integers(0, 2**31 - 1)


class OwnError(Exception):
    """What a user's function raises."""


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RejectedStepWarning)
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        yield


def sound(q):
    """q has finite coordinates, whatever happened to it."""
    return all(bool(torch.isfinite(part).all()) for part in q.coordinates)


def hashed(theta):
    """A number in [0, 1) that depends on every bit of the first coordinate."""
    return (theta[..., 0].detach().double() * 12345.678).sin().abs() * 1e4 % 1


LOG_JOINTS = {
    "gaussian": lambda x: -0.5 * x.square().sum(-1),
    "correlated": lambda x: -0.5 * (x.square().sum(-1) + 5 * x.sum(-1).square()),
    "flat": lambda x: 0 * x.sum(-1),
    "linear": lambda x: x.sum(-1),
    "improper": lambda x: x[..., 0].clamp_max(0),
    "rising": lambda x: x.square().sum(-1),
    "constant": lambda x: torch.zeros(x.shape[:-1], dtype=x.dtype),
    "kinked": lambda x: -x.abs().sum(-1),
    "kinked_and_smooth": lambda x: -x.abs().sum(-1) - 0.5 * x.square().sum(-1),
    "largest": lambda x: -x.abs().amax(-1),
    "root": lambda x: -(x.square().sum(-1) + 1e-12).sqrt(),
    "hinge": lambda x: -x.clamp_min(0).sum(-1) * 3 - 0.5 * x.square().sum(-1),
    "box": lambda x: torch.where(x.abs() < 2, 0 * x, -torch.inf).sum(-1) - 0.5 * x.square().sum(-1),
    "half_space": lambda x: torch.where(x > 0, (x.clamp_min(1e-300)).log() - x, -torch.inf).sum(-1),
    "half_space_nan": lambda x: (x.log() - x).sum(-1),
    "far_wall": lambda x: torch.where(x < 30, -0.5 * x.square(), torch.nan).sum(-1),
    "nan": lambda x: x.sum(-1) * torch.nan,
    "minus_infinity": lambda x: x.sum(-1) * 0 - torch.inf,
    "student": lambda x: -1.5 * torch.log1p(x.square()).sum(-1),
    "cauchy": lambda x: -torch.log1p(x.square()).sum(-1),
    "improper_tail": lambda x: -0.01 * torch.log1p(x.square()).sum(-1),
    "two_modes": lambda x: torch.logaddexp(-0.5 * (x - 4).square(), -0.5 * (x + 4).square()).sum(-1),
    "unequal_modes": lambda x: torch.logaddexp(-0.5 * (x - 3).square(), -5 * (x + 3).square() + 1).sum(-1),
    "quartic": lambda x: -x.pow(4).sum(-1),
    "double_well": lambda x: -(x.square() - 1).square().sum(-1),
    "exponential": lambda x: (x - x.exp()).sum(-1),
    "banana": lambda x: -0.5 * x[..., 0].square() - 0.5 * (x[..., 1:] - x[..., :1].square()).square().sum(-1),
    "funnel": lambda x: (
        -x[..., 0].square() / 18 - 0.5 * (x[..., 1:].square() * (-x[..., :1]).exp() + x[..., :1]).sum(-1)
    ),
    "waves": lambda x: -0.5 * x.square().sum(-1) + (7 * x).sin().sum(-1),
    "integer": lambda x: -x.square().sum(-1).long(),
    "boolean": lambda x: (x > 0).all(-1),
    "complex": lambda x: -x.square().sum(-1) * (1 + 0j),
    "number": lambda x: -1.0,
    "scalar": lambda x: -x.square().sum(),
    "column": lambda x: -x.square().sum(-1, keepdim=True),
    "not_summed": lambda x: -x.square(),
    "wide": lambda x: (-0.5 * x.double().square()).sum(-1),
    "narrow": lambda x: (-0.5 * x.float().square()).sum(-1),
    "huge": lambda x: -0.5e200 * x.square().sum(-1),
    "tiny": lambda x: -0.5e-200 * x.square().sum(-1),
    "offset": lambda x: -0.5 * x.square().sum(-1) - 1e12,
    "draws": lambda x: -0.5 * (x - torch.randn(())).square().sum(-1),
}
# never called converged
NO_MINIMUM = {"flat", "linear", "improper", "rising", "constant", "nan", "minus_infinity", "improper_tail"}
NO_LOG_JOINT = {"integer", "boolean", "complex", "number", "scalar", "column", "not_summed", "draws"}
RAISING = {
    "never": lambda theta: torch.zeros(theta.shape[:-1], dtype=torch.bool),
    "always": lambda theta: torch.ones(theta.shape[:-1], dtype=torch.bool),
    "one in a thousand": lambda theta: hashed(theta) < 1e-3,
    "one in a hundred": lambda theta: hashed(theta) < 1e-2,
    "far": lambda theta: (theta > 50).any(-1),
}


def user_function(name, shift, scale, raising):
    def log_joint(theta):
        if bool(RAISING[raising](theta).any()):
            raise OwnError("no value here")
        return LOG_JOINTS[name]((theta - shift) / scale)

    return log_joint


@pytest.mark.accuracy
@cases(130)
@given(
    name=st.sampled_from(sorted(LOG_JOINTS)),
    posterior=st.sampled_from(POSTERIORS),
    dtype=st.sampled_from(DTYPES),
    dim=st.integers(1, 6),
    shift=st.sampled_from([0.0, 0.0, 1.0, -30.0]),
    scale=st.sampled_from([1.0, 1.0, 1.0, 1e-3, 1e3, 1e-30, 1e30]),
    start=st.sampled_from([1.0, 1.0, 1e-3, 1e3, 1e-30, 1e30]),
    raising=st.sampled_from(["never", "never", "never", *RAISING]),
    gamma=st.sampled_from([1.0, 1.0, 0.1, 5.0, 0.0]),
    batch=st.sampled_from([(), (), (), (2,)]),
    seed=seeds(),
)
def test_log_joints(name, posterior, dtype, dim, shift, scale, start, raising, gamma, batch, seed):
    torch.manual_seed(seed)
    function = user_function(name, shift, scale, raising)
    try:
        q = posterior(dim, batch, scale=start, dtype=dtype)
        result = ngvi.fit(q, ngvi.LogJoint(function, gamma), progress=False, max_evaluations=60)
    except TorchngviError:
        return
    except OwnError:
        assert raising != "never"
        return
    assert result.reason
    assert sound(q)
    if not result.converged:
        return
    # without the entropy the norm is of the size of q: that of a point is 0
    assert gamma == 0 or name not in NO_MINIMUM | NO_LOG_JOINT, str(result)
    if batch or "apart from rounding" in str(result):  # draws that are all the mean tell nothing of its width
        return
    norm2, error, lost = sampled_norm2(q, lambda theta: LOG_JOINTS[name]((theta - shift) / scale), gamma, seed)
    assert lost < 0.01
    assert norm2 - 4 * error < 0.3**2, f"norm {norm2:.3g}, squared, ± {error:.2g}: {result}"


LIKELIHOODS = {
    "gaussian": "gaussian",
    "bernoulli_logit": "bernoulli_logit",
    "poisson_log": "poisson_log",
    "negative_binomial": NegativeBinomial(1.0),
    "student_t": StudentT(1.0, dof=4.0),
}


COLUMNS = {
    "usual": lambda x: x,
    "constant": lambda x: np.full_like(x, 3.0),
    "zero": np.zeros_like,
    "copy": lambda x: np.sign(np.arange(len(x)) % 3 - 0.5),
    "huge": lambda x: 1e6 * x,
    "tiny": lambda x: 1e-6 * x,
    "end of the range": lambda x: np.sign(x) * 1e308,
    "denormal": lambda x: x * 1e-310,
    "nan": lambda x: np.where(x > 1, np.nan, x),
    "infinite": lambda x: np.where(x > 1, np.inf, x),
}
TARGETS = {
    "usual": lambda eta, noise: eta + noise,
    "separated": lambda eta, noise: np.sign(eta),
    "classes": lambda eta, noise: (eta + noise > 0) * 1.0,
    "one class": lambda eta, noise: np.ones_like(eta),
    "counts": lambda eta, noise: np.floor(np.exp(np.clip(eta + noise, -5, 5))),
    "huge counts": lambda eta, noise: np.floor(1e9 * np.exp(np.clip(noise, -5, 5))),
    "nothing counted": lambda eta, noise: np.zeros_like(eta),
    "far": lambda eta, noise: 1e12 * noise,
    "nan": lambda eta, noise: np.where(noise > 1, np.nan, eta),
}
FITTING = {"bernoulli_logit": "classes", "poisson_log": "counts", "negative_binomial": "counts"}
WEIGHTS = {
    "none": lambda n: None,
    "some zero": lambda n: (np.arange(n) % 2) * 1.0,
    "all zero": np.zeros,
    "huge": lambda n: np.full(n, 1e12),
    "tiny": lambda n: np.full(n, 1e-12),
    "negative": lambda n: -np.ones(n),
    "wrong number": lambda n: np.ones(n + 1),
}


@pytest.mark.accuracy
@cases(110)
@given(
    family=st.sampled_from(sorted(LIKELIHOODS)),
    posterior=st.sampled_from(POSTERIORS),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["dense", "dense", "sparse"]),
    columns=st.lists(st.sampled_from(["usual"] * 20 + list(COLUMNS)), min_size=1, max_size=6),
    rows=st.sampled_from([9, 6, 4, 2, 1, 0]),
    target=st.sampled_from(["fitting"] * 9 + list(TARGETS)),
    weights=st.sampled_from(["none"] * 9 + list(WEIGHTS)),
    precision=st.sampled_from([1.0, 1.0, 0.1, 0.1, 1e-8, 1e8, 1e-300, 0.0, -1.0]),
    start=st.sampled_from([1.0, 1.0, 1e-3, 1e3]),
    gamma=st.sampled_from([1.0, 1.0, 0.1, 5.0, 0.0]),
    seed=seeds(),
)
def test_linear_models(family, posterior, dtype, layout, columns, rows, target, weights, precision, start, gamma, seed):
    generator = np.random.default_rng(seed)
    X = np.stack([COLUMNS[name](generator.normal(size=rows)) for name in columns], 1)
    X[:1] = 0 if seed % 2 else X[:1]  # an empty row
    with np.errstate(all="ignore"):
        eta = np.nan_to_num(X, posinf=0, neginf=0) @ generator.normal(size=len(columns))
        y = TARGETS[FITTING.get(family, "usual") if target == "fitting" else target](eta, generator.normal(size=rows))
    w, offset = WEIGHTS[weights](rows), 0.1 * generator.normal(size=rows)
    try:
        design = torch.tensor(X).to(dtype)
        if layout == "sparse":
            design = design.to_sparse_csr()
        model = ngvi.GeneralizedLinear(
            design,
            torch.tensor(y).to(dtype),
            LIKELIHOODS[family],
            weights=w,
            offset=offset,
            prior_precision=precision,
            temperature=gamma,
        )
        q = posterior(len(columns), scale=start, dtype=dtype)
        result = ngvi.fit(q, model, progress=False, max_evaluations=150)
    except TorchngviError:
        return
    assert result.reason
    assert sound(q)
    if not result.converged:
        return
    if np.linalg.cond(q.precision.detach().double()) > 1 / torch.finfo(dtype).eps:
        return  # its coordinates do not determine V
    data = (model.X.to_dense() if layout == "sparse" else model.X, model.y, model.weights, model.offset)
    data = [part.double().numpy() for part in data]
    if family == "student_t" and not moderate(q, *data):
        return
    norm, terms = linear_norm(q, family, *data, float(model.prior.precision[0]), gamma)
    tolerance = 1e-5 if dtype == torch.float64 else 1e-2
    rounding = 1e2 * torch.finfo(dtype).eps * terms
    assert norm < 3 * tolerance + rounding, f"norm {norm:.3g}, rounding {rounding:.2g}: {result}"


AVERAGES = {"Adam", "NormalizedMomentum", "QuasiNewton", "SiteNewton"}
RULES = [getattr(ngvi.rules, name) for name in ngvi.rules.__all__ if name not in AVERAGES]
STEP_SIZES = {
    "none": lambda: None,
    "constant": ngvi.stepsizes.Constant,
    "radius": lambda: ngvi.stepsizes.KLRadius(0.1),
    "wide radius": lambda: ngvi.stepsizes.KLRadius(1e6),
    "decrease": ngvi.stepsizes.SufficientDecrease,
    "convex": ngvi.stepsizes.Convex,
    "class": lambda: ngvi.stepsizes.KLRadius,
}
ESTIMATORS = {
    "none": lambda: None,
    "stein": lambda: ngvi.expectations.Stein(8),
    "fixed": lambda: ngvi.expectations.Stein(ngvi.expectations.Fixed(12)),
    "too few": lambda: ngvi.expectations.Stein(ngvi.expectations.Fixed(2)),
    "quasi": lambda: ngvi.expectations.Stein(ngvi.expectations.Quasi(8)),
    "score": lambda: ngvi.expectations.ScoreFunction(8),
    "hessian": lambda: ngvi.expectations.Hessian(2),
    "hessian products": lambda: ngvi.expectations.HessianVector(2),
    "least squares": lambda: ngvi.expectations.LeastSquaresStein(16),
    "path": lambda: ngvi.expectations.PathDerivative(8),
    "reparametrized": lambda: ngvi.expectations.Reparametrized(8),
    "closed entropy": lambda: ngvi.expectations.ClosedEntropyStein(8),
    "quadrature": ngvi.expectations.Quadrature,
    "monte carlo": lambda: ngvi.expectations.MonteCarlo(8),
    "bonnet": lambda: ngvi.expectations.BonnetPrice(8),
    "autograd": ngvi.expectations.Autograd,
    "piecewise": ngvi.expectations.PiecewiseBound,
    "of another package": ngvi.ifvb.Pathwise,
}
MOMENTA = {
    "none": lambda: None,
    "adam": ngvi.rules.Adam,
    "normalized": ngvi.rules.NormalizedMomentum,
    "memory": ngvi.rules.QuasiNewton,
}
LOSSES = {
    "kl": lambda q: q.kl(type(q)(q.dim, q.batch_shape, mean=1.0, dtype=q.dtype)),
    "kl, summed": lambda q: q.kl(type(q)(q.dim, q.batch_shape, mean=1.0, dtype=q.dtype)).sum(),
    "draws": lambda q: q.rsample((4,)).square().sum(-1).mean(0) - q.entropy(),
    "huge": lambda q: 1e300 * q.rsample((4,)).square().sum(-1).mean(0) - q.entropy(),
    "entropy": lambda q: -q.entropy(),
    "nan": lambda q: q.entropy() * math.nan,
    "infinite": lambda q: q.entropy() * math.inf,
    "constant": lambda q: torch.zeros(q.batch_shape),
    "wide": lambda q: q.entropy().double(),
    "not summed": lambda q: q.rsample((4,)),
    "number": lambda q: 1.0,
    "nothing": lambda q: None,
}


@pytest.mark.accuracy
@cases(60)
@given(
    rule=st.sampled_from(RULES),
    posterior=st.sampled_from([ngvi.CholeskyGaussian, *POSTERIORS]),
    dtype=st.sampled_from(DTYPES),
    dim=st.integers(1, 6),
    batch=st.sampled_from([(), (), (3,)]),
    start=st.sampled_from([1.0, 1.0, 1e-3, 1e3, 1e-30, 1e30]),
    lr=st.sampled_from([None, 1e-8, 1e-3, 0.1, 0.5, 1.0, 10.0, 1e8, math.inf]),
    step_size=st.sampled_from(["none"] * 9 + list(STEP_SIZES)),
    estimator=st.sampled_from(["none"] * 9 + list(ESTIMATORS)),
    momentum=st.sampled_from(["none"] * 9 + list(MOMENTA)),
    kind=st.sampled_from(["target", "closure", "gradients", "model"]),
    name=st.sampled_from(sorted(LOG_JOINTS)),
    loss=st.sampled_from(sorted(LOSSES)),
    seed=seeds(),
)
def test_steps(rule, posterior, dtype, dim, batch, start, lr, step_size, estimator, momentum, kind, name, loss, seed):
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    try:
        q = posterior(dim, batch, scale=start, dtype=dtype)
        part = MOMENTA[momentum]()
        optimizer = NaturalGradientVI(
            q,
            rule(0.1) if rule in (ngvi.rules.ProjectedRootGradient, ngvi.rules.ProjectedSquareRoot) else rule(),
            lr,
            step_size=STEP_SIZES[step_size](),
            estimator=ESTIMATORS[estimator](),
            **({"metric": part} if momentum == "memory" else {"momentum": part}),
        )
        X = torch.randn(5, dim, generator=generator, dtype=dtype)
        model = ngvi.GeneralizedLinear(X, [0.0, 1.0, 0.0, 1.0, 1.0])
        for _ in range(4):
            optimizer.zero_grad()
            if kind == "target":
                optimizer.step(ngvi.LogJoint(LOG_JOINTS[name]))
            elif kind == "model":
                optimizer.step(model)
            elif kind == "closure":
                optimizer.step(lambda: LOSSES[loss](q))
            else:
                value = LOSSES[loss](q)
                if not isinstance(value, torch.Tensor) or not value.requires_grad:
                    return  # torch has no backward pass for it
                value.sum().backward()
                optimizer.step()
            assert sound(q)
    except TorchngviError:
        return
