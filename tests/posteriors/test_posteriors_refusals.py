"""What the posteriors refuse, and the words of each refusal: what was got, and what to do."""

import math
import tempfile
from pathlib import Path

import pytest
import torch
from helpers import DTYPE, POSTERIORS, check_refusal, vec

from torchngvi import (
    SRVN,
    VN,
    CholeskyGaussian,
    DataLogJoint,
    DiagonalGaussian,
    LogJoint,
    NaturalGaussian,
    NaturalGradientVI,
    Stein,
    fit,
    ifvb,
)
from torchngvi.errors import PairError
from torchngvi.fitting import mixture_at_modes
from torchngvi.ifvb import ClosedForm, Exact, FlatCholesky, LowerBound, MeanFieldGaussian, PreconditionedVI, Recursive
from torchngvi.interfaces import Local
from torchngvi.models import MixtureIntegrand
from torchngvi.posteriors import Mixture, Warped
from torchngvi.posteriors.flat import Beta, Categorical, Dirichlet, Gamma, Poisson, Wishart
from torchngvi.posteriors.warps import SinhArcsinh
from torchngvi.rules import ExponentialAverage, NaturalGradient, QuasiNewton, RootGradient
from torchngvi.stepsizes import Clip, KLRadius, PowerSchedule, Shortest, SufficientDecrease

NAN = math.nan


def log_joint(theta):
    return -theta.square().sum(-1)


def moments(covariance):
    return CholeskyGaussian.from_moments(torch.zeros_like(covariance[..., 0]), covariance)


def diagonal(*variances):
    return torch.tensor(variances).diag_embed()


def marginals(kind, entry):
    q = kind(2, (3,), dtype=DTYPE)
    entries = q.frame().marginals().clone()
    entries[1, 0] = entry
    return kind.from_marginals(q.mean, entries, q.structure)


def gaussian(*batch):
    return CholeskyGaussian(2, batch)


def field(*batch):
    return MeanFieldGaussian(torch.full((*batch, 4), 0.3, dtype=DTYPE))


def natural(q, **parts):
    return NaturalGradientVI(q, parts.pop("rule", NaturalGradient()), 0.1, **parts)


def gradient_of_another_shape():
    q, metric = field(3), Exact()
    metric(q, Local(torch.ones(4, dtype=DTYPE), q.no_matrix), torch.zeros(3), metric.init(q))


def each(name, call, *words):
    """One row for each kind of posterior."""
    return {f"{name}, {kind}": (lambda kind=kind: call(POSTERIORS[kind]), words) for kind in POSTERIORS}


def mixture(dim=4):
    return Mixture(CholeskyGaussian(dim, (3,), dtype=DTYPE))


def batches():
    return DataLogJoint(lambda theta, rows: log_joint(theta), log_joint, [vec(1.0)], 1)


def warped(*warp):
    return CholeskyGaussian(1).warped(*warp)


def resumed_with_another_posterior():
    with tempfile.TemporaryDirectory() as folder:
        options = {"checkpoint": Path(folder) / "run", "progress": False}
        fit(mixture(2), log_joint, max_evaluations=2, **options)
        fit(mixture(4), log_joint, **options)


MIXTURE = mixture()

REFUSED = {
    # moments of a Gaussian
    "sizes": (
        lambda: CholeskyGaussian.from_moments(torch.zeros(2), torch.eye(3)),
        ("covariance must be (*batch, D, D)", "got (3, 3) for (2,)"),
    ),
    "no symmetry": (
        lambda: moments(torch.tensor([[1.0, 0.5], [0.0, 1.0]])),
        ("covariance must be symmetric", "(V + V.mT) / 2"),
    ),
    # flat vectors
    "a mean of others": (
        lambda: FlatCholesky.standard(3, mean=torch.zeros(2)),
        ("mean must be a scalar or (3,)", "got shape (2,)"),
    ),
    "no scale": (
        lambda: FlatCholesky.standard(3, scale=-1.0),
        ("scale holds standard deviations and must be positive", "got -1.0"),
    ),
    "two dtypes": (
        lambda: FlatCholesky(torch.zeros(2), torch.eye(2, dtype=DTYPE)),
        ("tensors of one dtype on one device", "torch.float32 on cpu, torch.float64 on cpu"),
    ),
    "parts of others": (
        lambda: FlatCholesky(torch.zeros(2), torch.eye(3)),
        ("with a mean of shape (2,) needs", "of shape (2, 2); got (3, 3)"),
    ),
    "a flow without parameters": (
        lambda: ifvb.ModuleFlow(torch.nn.Identity(), 2),
        ("flow has no parameters to fit", "got Identity"),
    ),
    "three numbers": (
        lambda: ifvb.NormalInverseGamma(torch.ones(3)),
        ("NormalInverseGamma starts at (m, v, a, b), (*batch, 4)",),
    ),
    "variance -1": (lambda: moments(diagonal(-1.0, 2.0)), ("covariance", "definite", "eigenvalue is -1.")),
    "variance 0": (lambda: moments(diagonal(0.0, 2.0)), ("covariance", "definite", "eigenvalue is 0.")),
    "a member": (
        lambda: moments(diagonal([1.0, 1.0], [-2.0, 1.0], [1.0, 1.0])),
        ("covariance", "positive definite", "eigenvalue is -2."),
    ),
    "all NaN": (lambda: moments(torch.full((2, 2), NAN)), ("covariance", "finite", "4 NaN", "of 4")),
    "NaN": (lambda: moments(vec([1.0, NAN], [NAN, 1.0])), ("covariance", "finite", "2 NaN", "of 4")),
    # a vector of parameters
    "gradient": (gradient_of_another_shape, ("gradient", "(3, 4)", "got (4,)")),
    "flat frame": (lambda: field().frame(), ("MeanFieldGaussian", "no mean and no root"), PairError),
    "flat entropy": (lambda: field().entropy(), ("entropy of MeanFieldGaussian", "closed form", "Write"), PairError),
    "Stein": (lambda: natural(field(), estimator=Stein()), ("Stein reads the mean", "MeanFieldG"), PairError),
    "ControlVariate": (
        lambda: natural(gaussian(), estimator=ifvb.ControlVariate(10)),
        ("ControlVariate", "flat", "got CholeskyGaussian", "Use Stein()"),
        PairError,
    ),
    "Recursive of a Gaussian": (
        lambda: natural(gaussian(), rule=RootGradient(), metric=Recursive()),
        ("Recursive", "CholeskyGaussian does not have", "Use QuasiNewton()"),
        PairError,
    ),
    "state": (lambda: Recursive().init(gaussian()), ("Recursive", "got CholeskyGaussian", "FlatCholesky"), PairError),
    "flat QuasiNewton": (
        lambda: NaturalGradientVI(field(), NaturalGradient(), step_size=SufficientDecrease(), metric=QuasiNewton()),
        ("QuasiNewton", "frame", "MeanFieldGaussian does not have", "Use Exact()"),
        PairError,
    ),
    "metric": (
        lambda: natural(field(), metric=Recursive()),
        ("NaturalGradient would", "Use RootGradient()"),
        PairError,
    ),
    "Clip of VN": (lambda: VN(gaussian(), step_size=Clip(1.0)), ("Clip", "straight line", "Congruence"), PairError),
    "KLRadius of Adam": (
        lambda: PreconditionedVI(field(), ifvb.Adam(), step_size=KLRadius(0.1)),
        ("KLRadius", "natural norm, which Adam", "Use Constant() or Clip"),
        PairError,
    ),
    "average of trials": (
        lambda: SRVN(gaussian(), step_size=SufficientDecrease(), momentum=ExponentialAverage(0.5)),
        ("ExponentialAverage", "SufficientDecrease needs the direction"),
        PairError,
    ),
    "Clip": (lambda: Clip(0.0), ("norm", "positive", "got 0.0")),
    "Shortest of none": (lambda: Shortest(), ("Shortest", "one step size or more", "got none")),
    "trials": (lambda: Shortest(Clip(1.0), SufficientDecrease()), ("SufficientDecrease", "by trial"), PairError),
    "weight": (lambda: ExponentialAverage(1.0), ("weight", "at least 0, below 1", "got 1.0")),
    "alpha": (lambda: PowerSchedule(1.5), ("alpha", "at least 0, at most 1", "got 1.5")),
    "offset": (lambda: PowerSchedule(0.5, -1.0), ("offset", "0 or larger", "got -1.0")),
    "steps taken": (lambda: PowerSchedule()(-1), ("t counts the steps", "at least 0", "got -1")),
    "dim of a flat one": (lambda: FlatCholesky.standard(0), ("dim ", "coordinates", "at least 1", "got 0")),
    "bound of theta": (lambda: LowerBound(log_joint).log_joint(vec(0.0)), ("not of theta", "ClosedForm()"), PairError),
    "ClosedForm": (
        lambda: natural(field(), estimator=ClosedForm()).step(LogJoint(log_joint)),
        ("LowerBound", "got LogJoint"),
        PairError,
    ),
    "warmup": (lambda: Recursive(warmup=-1), ("warmup", "whole number, at least 0", "got -1")),
    # exponential families
    "length of Gamma": (lambda: Gamma(vec(1, 2.0, 3.0)), ("Gamma", "a vector of 2", "got the shape (3,)")),
    "length of Dirichlet": (lambda: Dirichlet(vec(1.0)), ("concentration", "two classes", "got 1")),
    "length of Wishart": (lambda: Wishart(vec(2.0, 1.0, 1.0)), ("a vector of 2, 4, 7, 11", "got 3")),
    "domain of Dirichlet": (lambda: Dirichlet(vec(1.0, 0.0)), ("domain", "concentrations are positive")),
    "domain": (lambda: Wishart(vec(0.4, 1.0, 0.0, 1.0)), ("a is above (d - 1)/2", "definite")),
    "scale of Wishart": (
        lambda: Wishart.of(torch.tensor(3.0), -torch.eye(2)),
        ("scale", "symmetric and positive definite"),
    ),
    "probabilities": (lambda: Categorical.of(vec(0.0, 1.0)), ("probabilities are positive", "got")),
    "kl": (lambda: Gamma(vec(1.0, 2.0)).kl(Beta(vec(1.0, 2.0))), ("one family", "Gamma of 2", "Beta of 2"), PairError),
    "entropy of Poisson": (lambda: Poisson(vec(1.0)).entropy(), ("entropy", "no closed form"), PairError),
    # mixtures
    "one component": (lambda: Mixture(gaussian()), ("shape (K,)", "CholeskyGaussian of batch shape ()")),
    "list of components": (lambda: Mixture([gaussian()]), ("for two of them", "got list")),
    "kinds": (lambda: Mixture.of([gaussian(), DiagonalGaussian(2)]), ("one class", "DiagonalGaussian")),
    "no components": (lambda: Mixture.of([]), ("one class and one structure", "got []")),
    "log weights": (lambda: Mixture.of([gaussian()], [1.0, 2.0]), ("one finite number", "1 of")),
    "no modes": (lambda: Mixture.of_modes([]), ("at least one mode", "got none")),
    "theta of a mixture": (lambda: MIXTURE.log_prob(torch.zeros(3)), ("theta", "D = 4", "got shape (3,)")),
    "entropy of a mixture": (lambda: MIXTURE.entropy(), ("entropy of a Mixture", "closed form"), PairError),
    "optimizer of a mixture": (lambda: VN(MIXTURE), ("Mixture is none", "optimizer over q.components"), PairError),
    "batches": (lambda: MixtureIntegrand(MIXTURE, batches()), ("DataLogJoint", "mini-batches")),
    "temperature of a mixture": (
        lambda: MixtureIntegrand(MIXTURE, LogJoint(log_joint, temperature=0.0)),
        ("mixture", "temperature 0", "no entropy"),
    ),
    "other components": (
        lambda: VN(CholeskyGaussian(4, (3,), dtype=DTYPE), lr=0.1).step(MixtureIntegrand(MIXTURE, LogJoint(log_joint))),
        ("target of the components", "optimizer over q.components"),
    ),
    "steps of a mixture": (
        lambda: fit(MIXTURE, log_joint, VN(MIXTURE.components), progress=False),
        ("Mixture has its own steps", "components and weights"),
    ),
    "another checkpoint": (resumed_with_another_posterior, ("another run", "its posterior", "here")),
    "batch of modes": (lambda: mixture_at_modes(gaussian(2), log_joint), ("one Gaussian", "of shape (2,)")),
    "modes": (lambda: mixture_at_modes(MIXTURE, log_joint), ("CholeskyGaussian(3)", "got Mixture")),
    "starts": (
        lambda: mixture_at_modes(gaussian(), log_joint, starts=torch.zeros(2)),
        ("points (M, D)", "D = 2", "got shape (2,)"),
    ),
    "no mode": (
        lambda: mixture_at_modes(CholeskyGaussian(2, dtype=DTYPE), lambda x: x.square().sum(-1) - x.sum(-1)),
        ("none of 17 searches", "a mode"),
    ),
    # warps
    "warped module": (lambda: Warped(torch.nn.Linear(1, 1)), ("a Gaussian posterior", "got Linear"), PairError),
    "warped class": (lambda: Warped(CholeskyGaussian), ("a Gaussian", "got the class CholeskyGaussian"), PairError),
    "name of a warp": (lambda: warped("sinh"), ("warp ", "curves", "got 'sinh'")),
    "class of a warp": (lambda: warped(SinhArcsinh), ("warp ", "curves", "got the class SinhArcsinh")),
    "quantile": (lambda: warped().quantile([1.0]), ("between 0 and 1", "got [1.0]")),
    "theta of a warp": (lambda: warped().log_prob(torch.ones(2)), ("D = 1", "got shape (2,)")),
    "frame of a warp": (lambda: warped().frame(), ("no root to be read", "Fit it by"), PairError),
    "optimizer of a warp": (lambda: VN(warped()), ("Warped is none", "torchngvi.fit"), PairError),
}
for weights in ([0.5, 0.6], [1.0, 0.0], [1.0]):
    REFUSED[f"weights {weights}"] = (
        lambda weights=weights: Mixture(gaussian(2), weights),
        ("weights", "2 positive numbers", "the sum 1", f"got {weights}."),
    )
REFUSED["weights of NaN"] = (lambda: Mixture(gaussian(2), [NAN, 1.0]), ("weights", "finite"))
for read, given in {"frame": (), "probed": (), "unframe": (0, 0), "tangent": (0,), "moved": (0,)}.items():
    REFUSED[f"{read} of a mixture"] = (
        lambda read=read, given=given: getattr(MIXTURE, read)(*given),
        ("no mean with one root", "no step of its own"),
        PairError,
    )
for kind in (CholeskyGaussian, DiagonalGaussian, NaturalGaussian):
    for entry in (-1.0, 0.0, NAN, math.inf):
        REFUSED[f"marginals {entry}, {kind.__name__}"] = (
            lambda kind=kind, entry=entry: marginals(kind, entry),
            ("marginals", "positive definite", "1 of 3 failed", "positive and finite"),
        )
for dim in (0, -1, 2.0, True, "3", None):
    REFUSED |= each(f"dim {dim!r}", lambda kind, dim=dim: kind(dim), "dim ", "latent", "at least 1", f"got {dim!r}.")
for dtype in (torch.int64, torch.bool, torch.complex128, "float64"):
    words = ("dtype must be", "floating-point", "torch.float64, or None", f"got {dtype!r}.")
    REFUSED |= each(f"dtype {dtype}", lambda kind, dtype=dtype: kind(2, dtype=dtype), *words)
    if dtype != "float64":
        mean = torch.zeros(2, dtype=dtype)
        REFUSED |= each(f"mean in {dtype}", lambda kind, mean=mean: kind(2, mean=mean), *words)
for shape in (2.5, -1, (2, -1), "10"):
    words = ("number of draws or of a shape", "such as 10 or (2, 5)", f"got {shape!r}.")
    REFUSED |= each(f"sample {shape!r}", lambda kind, shape=shape: kind(2).sample(shape), *words)
for batch, shape in (((), (3,)), ((), (4, 2)), ((), (2, 1)), ((3,), (2, 2)), ((3,), (3,))):
    words, mean = ("mean must be", "a scalar or", f"{(*batch, 2)} for", f"got shape {shape}."), torch.zeros(shape)
    REFUSED |= each(f"mean {shape} of {batch}", lambda kind, b=batch, mean=mean: kind(2, b, mean=mean), *words)
    REFUSED |= each(f"start {shape} of {batch}", lambda kind, b=batch, mean=mean: kind(2, b).initialize_(mean), *words)
for batch, shape in (((), (3,)), ((), (3, 3)), ((3,), (2, 2))):
    words = ("scale must be", "a scalar or", f"{(*batch, 2)} or {(*batch, 2, 2)}", f"got shape {shape}.")
    scale = torch.ones(shape)
    REFUSED |= each(f"scale {shape} of {batch}", lambda kind, b=batch, scale=scale: kind(2, b, scale=scale), *words)
for bad in (NAN, math.inf, -math.inf):
    for what in ("mean", "scale"):
        for value, got in ((bad, "1 NaN or infinite of 1"), (torch.tensor([1.0, bad, bad]), "2 NaN or infinite of 3")):
            words, given = (f"{what} must be finite", f"got {got}"), {what: value}
            REFUSED |= each(f"{what} {bad}, {got}", lambda kind, given=given: kind(3, **given), *words)
for scale, got in ((0.0, "0"), (-1.5, "-1.5"), ([1.0, -2.0], "-2"), ([[1.0, 0.0], [0.0, 0.0]], "0")):
    words = ("scale must have", "positive diagonal", f"got {got}.")
    REFUSED |= each(f"scale {scale}", lambda kind, scale=scale: kind(2, scale=scale), *words)
for shape in ((3,), (4, 1), (5, 2, 3)):
    theta = torch.zeros(shape)
    words = ("theta", "D = 2", f"got shape {shape}.")
    REFUSED |= each(f"theta {shape}", lambda kind, theta=theta: kind(2).log_prob(theta), *words)
for other in POSTERIORS:
    words = ("KL", "same space", "got D = 2 and 3.")
    REFUSED |= each(f"kl to {other}", lambda kind, other=POSTERIORS[other]: kind(2).kl(other(3)), *words)
UPPER = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
REFUSED |= each("upper", lambda kind: kind(2, scale=UPPER), "scale", "lower triangular", "torch.linalg.cholesky(V)")
REFUSED |= each("rows", lambda kind: kind(2).marginal_variance(torch.zeros(4, 3)), "rows", "D = 2", "got shape (4, 3).")


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    check_refusal(*REFUSED[name])
