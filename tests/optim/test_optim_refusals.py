"""What optimizers and their parts refuse, and the words of each refusal: what was got, and what to do."""

import copy
import math
from functools import partial

import pytest
import scipy.sparse
import torch
from helpers import BLACK_BOX, DIM, DTYPE, check_refusal, make_model, make_posterior, random_posterior

from torchngvi import (
    BWGD,
    SRVN,
    VN,
    CholeskyGaussian,
    DataLogJoint,
    DiagonalGaussian,
    GeneralizedLinear,
    KLRadius,
    LogJoint,
    NaturalGaussian,
    NaturalGradientVI,
    NewtonCG,
    PrecisionCholeskyGaussian,
    fit,
    ifvb,
    laplace,
)
from torchngvi.derivatives import mean_hessian
from torchngvi.errors import PairError
from torchngvi.expectations import (
    Antithetic,
    Autograd,
    Fixed,
    GaussNewton,
    Hessian,
    HessianVector,
    Independent,
    LeastSquaresStein,
    Quadrature,
    Quasi,
    ScoreFunction,
    Stein,
)
from torchngvi.methods import NGVI, RootGD
from torchngvi.models import GaussianNoise, PerDatum
from torchngvi.optim import CapturedStep
from torchngvi.rules import BuresWasserstein, QuasiNewton, RootNewton, SiteNewton
from torchngvi.stepsizes import Backtracking, Constant, SufficientDecrease
from torchngvi.structures import arrow

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")

NAN = math.nan
X, Y = torch.ones(5, 2), torch.arange(5.0)
THETA = torch.zeros(4, 2)


def log_joint(theta):
    return -theta.square().sum(-1)


def gaussian(*batch, dim=2):
    return CholeskyGaussian(dim, batch)


def vn(q=None, **options):
    """VN with a learning rate, which tries no steps."""
    return VN(gaussian() if q is None else q, **{"lr": 0.1, "step_size": Constant(), **options})


def linear(X=X, y=Y, family="gaussian", **options):
    return GeneralizedLinear(X, y, family, **options)


def joint_of(function, *arguments, way=LogJoint):
    return way(function, *arguments).log_joint(THETA)


def broken(theta):
    raise RuntimeError("no such table")


def after_backward():
    q = make_posterior("cholesky")
    q.entropy().backward()
    VN(q).step()


def closure_of_a_float():
    q, model = make_posterior("cholesky"), make_model()

    def closure():
        loss = model.negative_elbo(q)
        loss.backward()
        return loss.item()

    vn(q).step(closure)


def detached_closure():
    q = make_posterior("cholesky")
    vn(q).step(lambda: make_model().negative_elbo(q).detach())


def closure_of_a_sum():
    q, model = make_posterior("cholesky", (3,)), make_model((3,))
    VN(q).step(lambda: model.negative_elbo(q).sum())


def closure_of_two():
    q1, q2, model = *two(), make_model()
    VN([q1, q2]).step(lambda: model.negative_elbo(q1) + model.negative_elbo(q2))


def two():
    return [make_posterior("cholesky"), make_posterior("natural")]


def one_twice():
    q = gaussian()
    vn([q, q])


def state_of_all_parts():
    q = make_posterior("cholesky")
    opt = VN(q)
    opt.step(make_model())
    old = opt.state_dict()
    state = old["state"][0]
    old["state"] = {0: {**state["step_size"], **state["metric"], "rejections": state["rejections"]}}
    opt.load_state_dict(old)


def state_of_one(first):
    first.step(log_joint)
    return first.state_dict()


def captured(target=log_joint, q=None, estimator=None, **options):
    CapturedStep(vn(gaussian() if q is None else q, estimator=estimator), target, **options)


def captured_and_changed(change):
    """What is held is of before: the evaluation at q, and the state."""
    model, q = make_model(), make_posterior("cholesky")
    step = CapturedStep(VN(q), model)
    saved = copy.deepcopy((q.state_dict(), step.optimizer.state_dict()))
    for _ in range(3):
        step()
    change(step.optimizer, q, *saved)
    step()


CHANGES = {
    "a step": lambda optimizer, q, *saved: optimizer.step(make_model()),
    "a write": lambda optimizer, q, *saved: q.initialize_(mean=1.0),
    "q": lambda optimizer, q, *saved: q.load_state_dict(saved[0]),
    "the optimizer": lambda optimizer, q, *saved: optimizer.load_state_dict(saved[1]),
}


def site_newton(q, **changes):
    target = make_model()
    target = GeneralizedLinear(changes.get("X", target.X), target.y)
    VN(q, metric=SiteNewton(target)).step(target)


CONSTANT = {
    "detached": lambda theta: log_joint(theta.detach()),
    "zero": lambda theta: torch.zeros(theta.shape[:-1], dtype=theta.dtype),
    "of something else": lambda theta: torch.ones(1, requires_grad=True).to(theta) * torch.ones(theta.shape[:-1]),
}
INTEGERS = {
    "counts": lambda theta: -(theta > 1).sum(-1),
    "rounded": lambda theta: log_joint(theta).round().long(),
    "truth": lambda theta: (theta > 0).all(-1),
}
INDEPENDENT = ("does not depend on theta", "no gradient", "without detach(), item() or NumPy")
TOO_FEW = ("LeastSquaresStein", "Use more, or Stein")
NO_ROOT = ("SRVN", "root of the covariance", "NaturalGaussian holds", "Use VN(q)", "CholeskyGaussian"), PairError
EMPTY = ("list of posteriors is empty", "pass q itself", "buffers")
CHANGED = ("q or the state of the optimizer was changed", "since the last call")

REFUSED = {
    # draws and estimators
    "Sobol points": (lambda: Quasi(4)(torch.zeros(21202)), ("up to 21201", "got 21202", "Use Antithetic")),
    "two draws": (lambda: ScoreFunction(2), ("ScoreFunction", "2 independent draws or 4", "got 2.")),
    "one draw": (lambda: ScoreFunction(Independent(1)), ("ScoreFunction", "2 independent", "got 1.")),
    "batch of GaussNewton": (
        lambda: vn(gaussian(2), estimator=GaussNewton(4)).step(PerDatum(lambda theta: theta, log_joint)),
        ("GaussNewton", "one posterior", "got a batch of (2,)", "Use Hessian()"),
        PairError,
    ),
    "target of GaussNewton": (
        lambda: vn(estimator=GaussNewton(4)).step(LogJoint(log_joint)),
        ("GaussNewton", "SeparableTarget", "got LogJoint"),
        PairError,
    ),
    "log_likelihoods": (lambda: PerDatum(3, log_joint), ("log_likelihoods", "function of theta", "got 3.")),
    "sum over the data": (
        lambda: PerDatum(log_joint, log_joint).log_joint(THETA),
        ("log_likelihoods", "(4, 2) to (S, N)", "got shape (4,)", "Do not sum"),
    ),
    # log joints
    "no function": (lambda: LogJoint(3), ("LogJoint", "function of theta", "got 3.")),
    "no function, vmapped": (lambda: LogJoint.vmapped(3), ("LogJoint", "function of theta", "got 3.")),
    "no function, looped": (lambda: LogJoint.looped(3), ("LogJoint", "function of theta", "got 3.")),
    "float": (lambda: joint_of(lambda theta: 1.0), ("log joint", "return a tensor", "got float.")),
    "no sum": (lambda: joint_of(lambda theta: theta), ("shape (4,)", "got shape (4, 2)", "Sum over data")),
    "sum": (lambda: joint_of(lambda theta: theta.sum()), ("(4,)", "got shape ()", "LogJoint.vmapped(f)")),
    "kept dimension": (
        lambda: joint_of(lambda theta: theta.sum(-1, keepdim=True)),
        ("theta of shape (4, 2)", "shape (4,)", "got shape (4, 1)", "Sum over data and coordinates"),
    ),
    "complex": (lambda: joint_of(lambda t: log_joint(t) * 1j), ("log joint", "complex64", "real part")),
    "its own error": (lambda: joint_of(broken, way=LogJoint.vmapped), ("no such table",), RuntimeError),
    # generalised linear models
    "X of one dimension": (lambda: linear(torch.ones(5)), ("X must be a matrix", "got shape (5,).")),
    "no rows": (lambda: linear(torch.ones(0, 2)), ("X", "one row and one column", "got shape (0, 2).")),
    "no columns": (lambda: linear(torch.ones(5, 0)), ("X", "one row and one column", "got shape (5, 0).")),
    "X of None": (lambda: linear(None), ("X must be numbers", "got NoneType (")),
    "X of text": (lambda: linear([["a"]]), ("X must be numbers", "got list (")),
    "X of SciPy": (
        lambda: linear(scipy.sparse.csr_matrix(X.numpy())),
        ("X", "a tensor or an array", "got csr_matrix", "torch.sparse_csr_tensor", "A.toarray()"),
    ),
    "complex X": (lambda: linear(X * 1j), ("X must be real", "got torch.complex64.")),
    "complex y": (lambda: linear(y=Y * 1j), ("y must be real", "got torch.complex64.")),
    "NaN in X": (lambda: linear([[1.0, NAN], [NAN, 0.0]]), ("X must be finite", "got 2 NaN", "Drop or")),
    "NaN in y": (lambda: linear(y=[1.0, 2.0, 3.0, 4.0, NAN]), ("y must be finite", "got 1 NaN", "Drop or")),
    "infinite weights": (lambda: linear(weights=Y / 0), ("weights must be finite", "got 5 NaN", "Drop or")),
    "infinite offset": (lambda: linear(offset=Y / 0), ("offset must be finite", "got 5 NaN", "Drop or")),
    "length of y": (lambda: linear(y=Y[:4]), ("y must have one entry", "5 rows of X", "got shape (4,).")),
    "one y": (lambda: linear(y=1.0), ("y must have one entry", "5 rows of X", "got shape ().")),
    "column y": (lambda: linear(y=Y[:, None]), ("y must have one entry", "5 rows", "got shape (5, 1).")),
    "one weight": (lambda: linear(weights=2.0), ("weights", "5 rows of X", "got shape ().")),
    "length of weights": (lambda: linear(weights=Y[:3]), ("weights", "5 rows of X", "got shape (3,).")),
    "length of offset": (lambda: linear(offset=Y[:3]), ("offset", "5 rows of X", "got shape (3,).")),
    "negative weights": (lambda: linear(weights=Y - 1.5), ("weights must not be negative", "got -1.5.")),
    "precisions": (lambda: linear(prior_precision=torch.ones(3)), ("prior_precision", "(2, 2)", "(3,).")),
    "means": (lambda: linear(prior_mean=torch.ones(3)), ("prior_mean", "a scalar or (2,)", "shape (3,).")),
    "prior_precision 0": (lambda: linear(prior_precision=0.0), ("prior_precision", "positive", "got 0.")),
    "prior -2": (lambda: linear(prior_precision=[1.0, -2.0]), ("prior_precision", "positive", "got -2.")),
    "NaN in prior": (lambda: linear(prior_precision=NAN), ("prior_precision", "finite", "got 1 NaN")),
    "prior_mean of text": (lambda: linear(prior_mean="a"), ("prior_mean must be numbers", "got str (")),
    "family": (
        lambda: linear(family="logit-normal"),
        ("family", "bernoulli_logit, bernoulli_probit, poisson_log, gaussian", "Likelihood", "got 'logit-normal'"),
    ),
    "one class": (
        lambda: linear(y=torch.ones(5), family="bernoulli_logit"),
        ("Bernoulli", "two classes in y", "the 5 targets is 1", "target column", "split", "classes=(0, 1)"),
    ),
    "five": (lambda: linear(family="bernoulli_probit"), ("two classes in y", "got 5", "Choose two")),
    "no counts": (
        lambda: linear(y=Y - 1.5, family="poisson_log"),
        ("Poisson", "counts 0, 1, 2", "got 5 other values, the first -1.5", "family='gaussian'"),
    ),
    # what is stepped, and on what
    "no target": (lambda: vn().step(torch.zeros(())), ("step takes a model", "closure", "got Tensor.")),
    "evaluated": (lambda: vn().evaluate(lambda: X.sum()), ("log joint of theta", "without arguments")),
    "no posterior": (lambda: vn([]), EMPTY),
    "parameters of a posterior": (lambda: vn(gaussian().parameters()), EMPTY),
    "one posterior twice": (one_twice, ("more than one parameter group",), ValueError),
    "BWGD without a root": (
        lambda: BWGD(NaturalGaussian(2), lr=0.1, step_size=Constant()),
        (
            "BuresWasserstein",
            "by Affine, which NaturalGaussian cannot",
            "takes Congruence, Tangent",
            "CholeskyGaussian",
        ),
        PairError,
    ),
    "RootGD without a root": (
        lambda: RootGD(NaturalGaussian(2), lr=0.1, step_size=Constant()),
        ("RootGradient", "by RootTangent, which NaturalGaussian cannot", "Congruence, Tangent", "CholeskyGaussian"),
        PairError,
    ),
    "SRVN without a root": (lambda: SRVN(NaturalGaussian(2)), *NO_ROOT),
    "SRVN of two": (lambda: SRVN([gaussian(), NaturalGaussian(2)], lr=0.1, step_size=Constant()), *NO_ROOT),
    "SRVN of groups": (lambda: SRVN([gaussian(), {"posterior": NaturalGaussian(2), "lr": 0.1}]), *NO_ROOT),
    "SRVN with a group": (lambda: SRVN(gaussian()).add_param_group({"posterior": NaturalGaussian(2)}), *NO_ROOT),
    "VN of a flat vector": (
        lambda: VN(ifvb.VechGaussian.standard(2), lr=0.1),
        ("VariationalNewton", "by Congruence, which VechGaussian cannot"),
        PairError,
    ),
    "NGVI": (lambda: NGVI(ifvb.VechGaussian.standard(2), lr=0.1), ("by Congruence, which VechGaussian",), PairError),
    "SRVN of a flat vector": (
        lambda: SRVN(ifvb.VechGaussian.standard(2), lr=0.1).step(log_joint),
        ("Stein reads the mean and the root of q", "VechGaussian is a vector"),
        PairError,
    ),
    "rate": (lambda: vn(metric=QuasiNewton()), ("Newton with Constant", "SufficientDecrease()"), PairError),
    "QuasiNewton with BuresWasserstein": (
        lambda: NaturalGradientVI(gaussian(), BuresWasserstein(), metric=QuasiNewton()),
        ("QuasiNewton", "got BuresWasserstein with SufficientDecrease", "VN or SRVN with SufficientDecrease()"),
        PairError,
    ),
    "step of two": (lambda: vn(two()).step(make_model()), ("a target", "has 2", "loss.backward()"), PairError),
    "value of two": (lambda: vn(two()).evaluate(make_model()), ("a target", "has 2", "loss.backward()"), PairError),
    "trial of two": (closure_of_two, ("a closure with SufficientDecrease", "has 2", "loss.backward()"), PairError),
    "gradients": (after_backward, ("after loss.backward()", "SufficientDecrease needs", "a closure"), PairError),
    "closure of None": (lambda: vn().step(lambda: None), ("closure", "a tensor", "got NoneType")),
    "closure of a float": (closure_of_a_float, ("closure", "a tensor", "got float.")),
    "closure without q": (detached_closure, ("closure's loss", "not depend on the posterior")),
    "summed losses": (closure_of_a_sum, ("(3,) posteriors", "got shape ()", "unsummed", "lr=")),
    "state of old": (state_of_all_parts, ("torchngvi 0.1", "one dict", "Load the posterior alone")),
    "state of one": (
        lambda: vn(gaussian(2)).load_state_dict(state_of_one(vn())),
        ("of the batch shape (), and q is of (2,).",),
    ),
    "half precision": (lambda: vn(gaussian().half()).step(log_joint), ("torch.float16; ", "by q.float()")),
    # parts of another kind
    "flat": (lambda: vn(estimator=ifvb.Pathwise()), ("Pathwise", "CholeskyGaussian", "Stein()"), PairError),
    "class of an estimator": (lambda: vn(estimator=Stein), ("estimator", "the class Stein, not called"), PairError),
    "name of an estimator": (lambda: vn(estimator="stein"), ("estimator", "expectations", "got str"), PairError),
    "class of a step size": (lambda: vn(step_size=KLRadius), ("step_size", "class KLRadius, not called"), PairError),
    "number for a metric": (lambda: vn(metric=3), ("metric", "torchngvi.metrics", "got int of builtins"), PairError),
    "ifvb.Adam": (lambda: vn(momentum=ifvb.Adam()), ("momentum", "got Adam of torchngvi.metrics"), PairError),
    # a captured step
    "captured batches": (
        lambda: captured(DataLogJoint(lambda theta, X: (theta @ X.mT).sum(-1), log_joint, [X], 5)),
        ("DataLogJoint", "in batches or by several processes", "Use step()"),
    ),
    "draws": (lambda: captured(LogJoint(log_joint), tolerance=0.1), ("a norm from draws", "end a run")),
    "captured draws on another device": (
        lambda: captured(q=gaussian().to("meta"), estimator=Stein(Antithetic(4, torch.Generator()))),
        ("a generator on cpu", "q is on meta", "a graph would"),
    ),
    "captured step of two": (
        lambda: captured(q=[gaussian(), gaussian()]),
        ("a captured step", "one posterior"),
        PairError,
    ),
    "captured step of torch": (
        lambda: CapturedStep(torch.optim.Adam([torch.zeros(1)]), log_joint),
        ("a captured step", "an optimizer of a posterior", "got Adam."),
        PairError,
    ),
    # rules and metrics
    "most": (lambda: RootNewton(0), ("most", "products in one step", "at least 1", "got 0.")),
    "RootNewton of an arrow": (
        lambda: NewtonCG(PrecisionCholeskyGaussian(5, structure=arrow(groups=2, local=2, globals=1))),
        ("RootNewton", "leave the pattern of Forest"),
        PairError,
    ),
    "SiteNewton": (lambda: SiteNewton(LogJoint(log_joint)), ("generalised linear model", "got LogJoint"), PairError),
    "temperature 0": (lambda: SiteNewton(make_model(temperature=0.0)), ("positive temperature", "got 0.")),
    "SiteNewton of a mean field": (
        lambda: site_newton(DiagonalGaussian(3, dtype=DTYPE)),
        ("SiteNewton", "full covariance", "got DiagonalGaussian", "CholeskyGaussian, or QuasiNewton()"),
        PairError,
    ),
    "SiteNewton of sparse rows": (
        lambda: site_newton(CholeskyGaussian(3, dtype=DTYPE), X=make_model().X.to_sparse_csr()),
        ("SiteNewton", "a dense X", "got a sparse one", "RowSpace(model).fit(), or X.to_dense()"),
        PairError,
    ),
}
for given in ("16", 16.0, True, None):
    words = ("draws", "antithetic draws", "Independent(16)", f"got {given!r}.")
    REFUSED[f"draws {given!r}"] = (partial(Stein, given), words)
for draws, words in (
    (4, ("6 antithetic draws in 3 dimensions", "got 4.")),
    (Fixed(4), ("6 antithetic draws in 3 dimensions", "got 4.")),
    (Independent(3), ("4 draws in 3 dimensions", "got 3.")),
    (Quasi(3), ("4 draws in 3 dimensions", "got 3.")),
):
    call = partial(LeastSquaresStein(draws), random_posterior("diagonal"), LogJoint(log_joint))
    REFUSED[f"{type(draws).__name__} of least squares"] = (call, (*TOO_FEW, *words))
for draws in (Quasi, Fixed):
    words = ("ScoreFunction", f"{draws.__name__} depend on one another", "Use Independent or Antithetic")
    REFUSED[f"scores by {draws.__name__}"] = (partial(ScoreFunction, draws(8)), words, PairError)
for kind in (Hessian, HessianVector):
    words = ("chunk", "copies of theta", "at least 1", "got 0.")
    REFUSED[f"chunk of {kind.__name__}"] = (partial(kind, chunk=0), words)
for name, function in CONSTANT.items():
    target, q = LogJoint(function), random_posterior("cholesky")
    for kind in [kind for kind in BLACK_BOX if kind != "score_function"]:
        REFUSED[f"{name}, {kind}"] = (partial(BLACK_BOX[kind](8), q, target), INDEPENDENT)
    REFUSED[f"{name}, laplace"] = (partial(laplace, q, target), INDEPENDENT)
    REFUSED[f"{name}, Hessian"] = (partial(mean_hessian, target, torch.zeros(1, DIM, dtype=DTYPE), 4), INDEPENDENT)
for name, function in INTEGERS.items():
    REFUSED[f"{name}, fit"] = (partial(fit, gaussian(), function, progress=False), INDEPENDENT)
    REFUSED[f"{name}, vmapped"] = (partial(fit, gaussian(), LogJoint.vmapped(function), progress=False), INDEPENDENT)
    REFUSED[f"{name}, a step"] = (partial(VN(gaussian(), lr=0.1).step, function), INDEPENDENT)
    REFUSED[f"{name}, laplace"] = (partial(laplace, gaussian(), function), INDEPENDENT)
for way in (LogJoint.vmapped, LogJoint.looped):
    for function, words in (
        (lambda t: t, ("of one theta", "one number, of shape ()", "got shape (2,)", "Sum over data")),
        (lambda t: t.sum() * 1j, ("log joint must be real", "got torch.complex64", "real part")),
        (lambda t: 1.0, ("log joint", "return a tensor", "got float.")),
    ):
        REFUSED[f"{words[-2]}, {way.__name__}"] = (partial(joint_of, function, way=way), words)
for gamma in (-1.0, NAN, math.inf):
    words = ("0 or larger, and finite", f"got {gamma}.")
    REFUSED[f"temperature {gamma} of a log joint"] = (
        partial(LogJoint, log_joint, gamma),
        ("temperature", "the entropy", *words),
    )
    REFUSED[f"temperature {gamma}"] = (
        partial(linear, temperature=-0.5 if gamma < 0 else gamma),
        ("temperature", "KL(q‖prior)", "0 or larger, and finite", f"got {-0.5 if gamma < 0 else gamma}."),
    )
for noise in (0.0, -1.0, NAN, math.inf):
    words = ("noise", "standard deviation", "positive and finite", f"got {noise}.")
    REFUSED[f"noise {noise}"] = (partial(GaussianNoise, noise), words)
for estimator in (Quadrature(), Autograd()):
    name = type(estimator).__name__
    words = (f"{name} evaluates a TractableTarget", "got LogJoint", "Leave estimator=None", "Stein()")
    for method in (VN, BWGD):
        step = method(gaussian(), lr=0.1, estimator=estimator, step_size=Constant()).step
        REFUSED[f"{method.__name__} by {name}"] = (partial(step, log_joint), words, PairError)
for method, given in (
    (VN, torch.nn.Linear(2, 1).parameters()),
    (VN, torch.nn.Linear(2, 1)),
    (SRVN, [torch.nn.Linear(2, 1)]),
    (VN, None),
):
    kind = {"generator": "Parameter", "list": "Linear"}.get(type(given).__name__, type(given).__name__)
    words = (f"{method.__name__} updates posteriors", "CholeskyGaussian(dim)", f"got {kind}.", "a torch optimizer")
    call = partial(method, given, lr=0.1, step_size=Constant())
    REFUSED[f"{method.__name__} of a {type(given).__name__}"] = (call, words)
for option, what, must in (
    ("lr", "a number, or a tensor with one entry a member", "lr"),
    ("loss_scale", "factor on the gradients", "positive and finite"),
):
    for value in (-0.5, NAN):
        words, given = (f"{option} is", what, must, f"got {value}."), [{"posterior": gaussian(), option: value}]
        REFUSED[f"{option} {value}"] = (partial(VN, gaussian(), **{"lr": 0.1, option: value}), words)
        REFUSED[f"{option} {value} of a group"] = (partial(VN, given, lr=0.1, step_size=Constant()), words)
    for value in ("x", [0.1], True):
        call = partial(VN, gaussian(), **{"lr": 0.1, option: value})
        REFUSED[f"{option} {value!r}"] = (call, (f"{option} is", what, "a number", f"got {value!r}."))
for name, change in CHANGES.items():
    REFUSED[f"captured, and changed by {name}"] = (partial(captured_and_changed, change), CHANGED)
for radius in (0.0, -1.0, NAN):
    for kind in (KLRadius, SufficientDecrease):
        words = ("radius", "a KL divergence in nats", "positive", f"got {radius}.")
        REFUSED[f"radius {radius} of {kind.__name__}"] = (partial(kind, radius), words)
for kind, decreases in ((Backtracking, (0.0, 0.5, -1.0)), (SufficientDecrease, (0.0, 0.5, -0.1, NAN))):
    for decrease in decreases:
        words = ("decrease", "promised decrease", "above 0, below 0.5", f"got {decrease}.")
        REFUSED[f"decrease {decrease} of {kind.__name__}"] = (partial(kind, decrease=decrease), words)
for grow in (1.0, NAN):
    words = ("grow is a factor", "above 1, finite", f"got {grow}.")
    REFUSED[f"grow {grow}"] = (partial(SufficientDecrease, grow=grow, shrink=0.5), words)
for shrink in (1.0, 0.0, NAN):
    words = ("shrink is a factor", "above 0, below 1", f"got {shrink}.")
    REFUSED[f"shrink {shrink}"] = (partial(SufficientDecrease, grow=2.0, shrink=shrink), words)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    check_refusal(*REFUSED[name])
