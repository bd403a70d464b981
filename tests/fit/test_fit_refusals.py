"""What fits refuse, each with the words that say what was given and what to do."""

import tempfile
from pathlib import Path

import pytest
import torch
from helpers import check_refusal, make_model, make_posterior

from torchngvi import (
    NGVI,
    SRVN,
    VN,
    CholeskyGaussian,
    GeneralizedLinear,
    LogJoint,
    PrecisionCholeskyGaussian,
    Stein,
    fit,
    laplace,
)
from torchngvi.diagnostics import laplace_margin
from torchngvi.errors import PairError
from torchngvi.expectations import Fixed, PerFactor, SampleAverage
from torchngvi.fitting import Evaluations, Gradients, NormBelow, Seconds, SlopeBelow, Stalled, Unimproved, checkpoints
from torchngvi.fitting.records import FitResult
from torchngvi.fitting.row_space import RowSpace
from torchngvi.models import ExpectedFactor, FactorGraph, FactorTarget, GroupedLogJoint, SiteFactor, TractableFactors
from torchngvi.models.factors import Guarded
from torchngvi.optim import Watch
from torchngvi.posteriors import Product, clique_marginals
from torchngvi.posteriors.flat import Gamma
from torchngvi.structures import Dense, arrow

DTYPE = torch.float64
ARROW = arrow(groups=5, local=2, globals=2)
X, Y = torch.eye(3, 5, dtype=DTYPE), torch.ones(2, dtype=DTYPE)
TERM = [(0, torch.sum)]
LOG = SiteFactor(torch.log, "x")
HEAD = b"torchngvi checkpoint, format %d\n"


def normal(theta):
    return -0.5 * theta.square().sum(-1)


def q_of(dim=2, batch=()):
    return CholeskyGaussian(dim, batch, dtype=DTYPE)


def run(q, target, *optimizer, **options):
    return fit(q, target, *optimizer, progress=False, **options)


def at_file(call):
    """A call with a checkpoint in a folder of its own."""

    def refused():
        with tempfile.TemporaryDirectory() as folder:
            call(Path(folder) / "run.pt")

    return refused


def resumed(file, *optimizer, target=None, dim=3):
    """A short fit that keeps a checkpoint, or goes on from one."""
    q = q_of(dim)
    target = make_model() if target is None else target
    methods = [method(q) for method in optimizer]
    return run(q, target, *methods, checkpoint=file, max_evaluations=2)


def resumed_from(content):
    """A fit goes on from a file of such bytes, or of such an object as torch saves it."""

    def refused(file):
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            torch.save(content, file)
        resumed(file, VN)

    return at_file(refused)


def state_of_an_object(file):
    q = make_posterior("cholesky")
    optimizer = VN(q)
    optimizer.param_groups[0]["note"] = object()
    run(q, make_model(), optimizer, checkpoint=file, max_evaluations=1)


def converted():
    """A packet of float64 serves no posterior in float32."""
    model, q = make_model(), make_posterior("cholesky")
    optimizer = VN(q)
    optimizer.step(model)
    q.float()
    optimizer.step(model)


def normal_gamma(memory=None, mean=0.0):
    q = Product(mu=q_of(1), tau=Gamma(torch.ones(2, dtype=DTYPE)))
    q["mu"].initialize_(mean)
    factors = [SiteFactor(lambda m, t: -t * (1 - m).square(), "mu", "tau"), SiteFactor(lambda t: -t, "tau")]
    return q, FactorGraph(factors, **({} if memory is None else {"memory": memory}))


def gamma():
    return Gamma(torch.ones(2, dtype=DTYPE))


def square(**options):
    return FactorGraph([SiteFactor(lambda x: -x.square(), "x")], **options)


def site():
    return Product(x=gamma())


def tractable():
    rows = GeneralizedLinear(torch.ones(5, 4, 4, dtype=DTYPE), torch.ones(5, 4), "poisson_log")
    return TractableFactors(ARROW, [(0, rows), (0, rows)])


def school(b, g, y):
    return -0.5 * (y - g[0] - g[1].exp() * b[0]) ** 2 - 0.5 * b[0] ** 2


def shared(g):
    return -0.5 * g.square().sum()


def schools(group=school, common=shared, data=(Y,), **numbers):
    return GroupedLogJoint(group, common, data, **{"local": 1, "globals": 2, **numbers})


def at_zeros(target, dim=4):
    return target.log_joint(torch.zeros(2, dim, dtype=DTYPE))


def rows(X=X, **options):
    return GeneralizedLinear(X, [0.0, 1.0, 1.0], **options)


def factors(*pairs, **options):
    return FactorTarget(ARROW, list(pairs), **options)


def mode_of(target=normal, **options):
    return laplace(q_of(1), target, **options)


def optimized(method):
    q = q_of()
    return run(q, normal, method(q))


def margin(**change):
    return laplace_margin(**{"q": q_of(), "target": LogJoint(normal), "coordinate": 0, **change})


def result(**parts):
    return FitResult(True, "done.", 1.0, 0.0, 3, torch.tensor(True), [], posterior=q_of(), **parts)


COLD = LogJoint(normal, temperature=0.0)
WARPED = q_of().warped()
OTHER_FILE = ("run.pt is no checkpoint of this version", "Remove it")
COUNT, POSITIVE = "whole number, at least 1", "positive and finite"

REFUSED = {
    # checkpoints
    "checkpoint_every": (lambda: run(q_of(), normal, checkpoint_every=0), ("checkpoint_every", "at least 1", "0.")),
    "an object in a file": (at_file(state_of_an_object), ("tensors, numbers and texts", "got object")),
    "a file of a tensor": (resumed_from(torch.ones(3)), OTHER_FILE),
    "a file of a list": (resumed_from([1]), OTHER_FILE),
    "a file of an earlier version": (resumed_from({"posterior": {}, "trace": []}), OTHER_FILE),
    "an empty file": (resumed_from(b""), OTHER_FILE),
    "a file of nonsense": (resumed_from(b"nonsense"), OTHER_FILE),
    "format 7": (resumed_from(HEAD % 7), ("format 7", "this version has 4", "Remove it")),
    "a file of another torch": (
        resumed_from(HEAD % 4 + checkpoints._digest(b"x") + b"x"),
        ("cannot be understood", "Remove it"),
    ),
    "another posterior": (
        at_file(lambda file: [resumed(file, target=LogJoint(normal), dim=dim) for dim in (5, 3)]),
        ("posterior mean", "(5,) float64", "here it is (3,) float64"),
    ),
    "another target": (
        at_file(lambda file: [resumed(file, target=LogJoint(normal)), resumed(file)]),
        ("is LogJoint", "here it is GeneralizedLinear", "Remove it"),
    ),
    "a checkpoint of other data": (
        at_file(lambda file: [resumed(file, target=rows(z)) for z in (X[:, :3], -X[:, :3])]),
        ("fingerprint of the data", "here it is", "Remove it"),
    ),
    "method": (at_file(lambda file: [resumed(file), resumed(file, SRVN)]), ("NewtonCG", "it is SRVN")),
    "a checkpoint of a model for its log joint": (
        at_file(lambda file: [resumed(file), resumed(file, target=make_model().log_joint)]),
        ("method is NewtonCG", "here it is VN by sample averages"),
    ),
    "a checkpoint of another log joint": (
        at_file(lambda file: [resumed(file, target=f) for f in (normal, lambda theta: normal(theta - 3))]),
        ("another problem", "negative ELBO"),
    ),
    # products of sites
    "domain": (lambda: run(*normal_gamma(memory=2, mean=-1.0)), ("positive for Gamma", "got Product(mu=")),
    "memory= alone": (lambda: run(site(), square(memory=2)), ("not conjugate", "Leave memory= out")),
    "memory= and local=": (lambda: FactorGraph([LOG], local=["x"], memory=2), ("all sites", "local=")),
    "a product and a log joint": (lambda: run(normal_gamma()[0], normal), ("FactorGraph", "got LogJoint")),
    "a product and VN": (lambda: run(*normal_gamma(), NGVI(gamma())), ("site by site", "optimizer")),
    "a graph and one site": (lambda: run(gamma(), square()), ("Product", "named sites", "got Gamma"), PairError),
    "a graph at theta": (lambda: square().log_joint(torch.ones(1)), ("vector theta", "use graph.value_at"), PairError),
    "batches for a list": (lambda: FactorGraph([LOG], batches=[1]), ("function", "got list and 1 batches")),
    "no batches": (lambda: FactorGraph(lambda batch: [LOG]), ("got function and no batches",)),
    "no factors of a graph": (lambda: FactorGraph([]), ("at least one", "got 'none'")),
    "a factor that is a number": (lambda: FactorGraph([3]), ("SiteFactors and ExpectedFactors", "got 3")),
    "no local site": (lambda: FactorGraph([LOG], local=["z"]).check(site()), ("lacks", "'z'")),
    "an expected factor": (
        lambda: FactorGraph([ExpectedFactor(torch.sum, "x")]).value_at({}, site()),
        ("ExpectedFactor", "no value"),
    ),
    "local=": (lambda: run(site(), square(local=["x"])), ("site 'x'", "exact messages", "not conjugate")),
    # steps and stops
    "a posterior that was converted": (converted, ("model is in torch.float64", "q in torch.float32")),
    "rejections of Watch": (lambda: Watch(rejections=0), ("rejections of Watch", "positive")),
    "stop, 3": (lambda: run(q_of(), normal, stop=3), ("stop is a criterion", "Seconds(60)", "got 3")),
    "stop, max": (lambda: run(q_of(), normal, stop=max), ("criterion", "got <built-in", "A function of")),
    "stop, a class": (lambda: run(q_of(), normal, stop=Seconds), ("stop is a criterion", "got <class")),
    "Evaluations": (lambda: Evaluations(0), ("max_evaluations", "expectations", COUNT, "got 0")),
    "Gradients": (lambda: Gradients(2.5), ("Gradients", "budget of gradients", COUNT, "got 2.5")),
    "Seconds": (lambda: Seconds(0), ("Seconds", "budget of time", POSITIVE, "got 0")),
    "Unimproved": (lambda: Unimproved(0), ("Unimproved", "without a new best", COUNT, "got 0")),
    "Stalled": (lambda: Stalled(0), ("Stalled", "rejected steps", COUNT, "got 0")),
    "NormBelow": (lambda: NormBelow(-1.0), ("tolerance", "natural-gradient norm", POSITIVE, "got -1.0")),
    "SlopeBelow, block": (lambda: SlopeBelow(block=0), ("block counts iterations", COUNT, "got 0")),
    "SlopeBelow, blocks": (lambda: SlopeBelow(blocks=1), ("blocks counts", "at least 2", "got 1")),
    "max_gradients of zero": (lambda: run(q_of(), normal, max_gradients=0), ("Gradients", "got 0")),
    "max_gradients of 1.5": (lambda: run(q_of(), normal, max_gradients=1.5), ("Gradients", "got 1.5")),
    "max_seconds below zero": (lambda: run(q_of(), normal, max_seconds=-1.0), ("Seconds", "got -1.0")),
    # log joints
    "no rate": (lambda: optimized(VN), ("SufficientDecrease", "before and after a step"), PairError),
    "a log joint that draws": (
        lambda: run(q_of(), LogJoint(lambda theta: normal(theta - torch.randn(2, dtype=DTYPE)))),
        ("at the same theta", "it draws", "keep the draws", "DataLogJoint", "VN(q, lr=0.1)"),
    ),
    "a log joint that mixes its draws": (lambda: run(q_of(), lambda x: normal(x - x.mean(0))), ("mixes its draws",)),
    "one that reads a draw": (lambda: run(q_of(), lambda x: normal(x) - x[0, 0] ** 2), ("row of theta", "sum(-1)")),
    "one that writes": (lambda: run(q_of(), lambda x: normal(x.add_(1))), ("writes into its theta", "theta.clone()")),
    "one for single draws": (
        lambda: run(q_of(), lambda x: normal(x) if x.sum(-1) > -9 else normal(2 * x)),
        ("one draw at a time", "Boolean value of Tensor", "LogJoint.looped(f)"),
    ),
    "one without a gradient": (
        lambda: run(q_of(), lambda x: torch.as_tensor(normal(x).numpy())),
        ("fails where its gradient is wanted", "torch operations, without NumPy"),
    ),
    "batch_size": (lambda: run(q_of(), normal, batch_size=5), ("batch_size", "one posterior")),
    "no sum": (lambda: at_zeros(Guarded(LogJoint(lambda theta: theta))), ("log joint must map theta",)),
    "a margin of coordinate 2": (lambda: margin(coordinate=2), ("the 2 coordinates", "got 2")),
    "a margin of coordinate -1": (lambda: margin(coordinate=-1), ("coordinate counts", "got -1")),
    "a margin of a name": (lambda: margin(coordinate="mean"), ("coordinate counts", "got 'mean'")),
    "a budget of a margin": (lambda: margin(max_gradients="many"), ("max_gradients is a budget", "'many'")),
    "margins of a batch": (lambda: margin(q=q_of(2, (3,))), ("one posterior at a time", "(3,)")),
    "a margin of nothing": (lambda: margin(q=None), ("laplace_margin", "None")),
    "three names of two": (lambda: result().named(["a", "b", "c"]), ("one entry a coordinate, 2", "got 3")),
    "one name": (lambda: run(q_of(), normal).verdict.named(["mu"]), ("a coordinate, 2", "got 1")),
    # factors
    "noise of a sum over cliques": (
        lambda: PerFactor(SampleAverage(Fixed(64)))(
            PrecisionCholeskyGaussian(ARROW.dim, structure=ARROW, dtype=DTYPE), FactorTarget(ARROW, [(0, normal)])
        ),
        ("SampleAverage", "share their draws", "Fixed(64, apart=True)"),
        PairError,
    ),
    "no pieces": (lambda: next(tractable().pieces(0)), ("at least one factor", "number=0")),
    "three pieces": (lambda: next(tractable().pieces(3)), ("pieces", "there are 2", "number=3")),
    "a prior of another kind": (lambda: factors((0, torch.sum), prior=[(2, torch.sum)]), ("kinds [0, 2]",)),
    "dense factors": (lambda: FactorTarget(Dense(3), TERM), ("Forest", "arrow(...)", "got Dense")),
    "no factors": (lambda: factors(), ("factors are pairs", "at least one", "got []")),
    "a factor of another kind": (lambda: factors((2, torch.sum)), ("from 0 to 1", "kinds [2]", str(ARROW))),
    "factors and q": (lambda: VN(q_of(3)).step(tractable()), ("D = 12 coordinates", "posterior of 3")),
    "a dense PerFactor": (
        lambda: PerFactor(Stein(8))(q_of(12), tractable()),
        (str(ARROW), "Use PrecisionCholeskyGaussian"),
        PairError,
    ),
    "a dense fit": (lambda: run(q_of(12), tractable()), ("cliques of a forest", str(ARROW), "over Dense"), PairError),
    "no cliques": (lambda: clique_marginals(q_of()), ("Dense(dim=2)", "Use PrecisionCholeskyGaussian"), PairError),
    "functions": (lambda: TractableFactors(ARROW, TERM), ("got a LogJoint", "Use FactorTarget")),
    # one function for all groups
    "groups in a tensor": (lambda: schools(data=torch.zeros(6, 2)), ("data is a list", "got Tensor")),
    "groups in a dictionary": (lambda: schools(data={"y": torch.zeros(6)}), ("data is a list", "got dict")),
    "no function of a group": (lambda: schools(None), ("group is the log density", "got NoneType")),
    "two numbers of groups": (lambda: schools(data=[Y, Y[:1]]), ("first dimension", "got [1, 2]")),
    "groups without data": (lambda: schools(data=[]), ("first dimension", "got none")),
    "a group of two": (lambda: at_zeros(schools(lambda b, g, y: b + g)), ("one number", "got shape (2,)")),
    "a branch": (lambda: at_zeros(schools(lambda b, g, y: g[b[0] > 0])), ("at once", "FactorTarget")),
    "beyond local": (lambda: at_zeros(schools(lambda b, g, y: b[1])), ("group", "local=1", "from 0", "index 1")),
    "beyond globals": (lambda: at_zeros(schools(common=lambda g: g[2])), ("shared takes", "globals=2", "index 2")),
    **{
        f"{name}={given!r}": (
            lambda name=name, given=given: schools(**{name: given}),
            (f"{name} is a number of parameters", "positive integer", f"got {given!r}"),
        )
        for name, given in (("local", 2.0), ("local", 0), ("globals", True), ("globals", "2"))
    },
    "arrow": (lambda: arrow(groups=3, local=2.0, globals=1), ("local is a number", COUNT, "got 2.0")),
    "parts": (lambda: schools().parts(torch.zeros(4, 9)), ("4 coordinates", "local=", "(4, 9)")),
    # laplace
    "laplace, tolerance": (lambda: mode_of(tolerance=0.0), ("tolerance", "Newton", POSITIVE, "got 0.0")),
    "laplace, iterations": (lambda: mode_of(max_iterations=0), ("max_iterations", COUNT, "got 0")),
    "laplace, start": (lambda: mode_of(lambda theta: theta.log().sum(-1)), ("q's mean", "-inf", "initialize_")),
    "laplace, temperature": (lambda: mode_of(COLD), ("covariance", "positive temperature", "got 0")),
    # the space of the rows
    "RowSpace, batch": (lambda: RowSpace(rows(X.expand(2, 3, 5))), ("one data set", "(2, 3, 5)", "y (3,)")),
    "RowSpace, prior": (lambda: RowSpace(rows(prior_precision=torch.eye(5))), ("RowSpace", "diagonal prior")),
    "RowSpace, q": (lambda: RowSpace(rows()).lift(q_of(4)), ("3 coordinates", "got 4", "batch ()")),
    "RowSpace, scale": (lambda: RowSpace(rows(1e200 * X)), ("products of", "Scale the columns of X")),
    # warped posteriors
    "warped": (lambda: run(WARPED, normal, SRVN(WARPED.base, 0.1)), ("leave optimizer= and batch",)),
    "warped batch": (lambda: run(q_of(2, (3,)).warped(), normal), ("one warped posterior", "shape (3,)")),
    "warped, cold": (lambda: run(q_of().warped(), COLD), ("got temperature 0", "there is none")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    check_refusal(*REFUSED[name])


@pytest.mark.parametrize("seed", range(6))
def test_a_maximum_of_all_draws_mixes_none(seed):
    """Taken off exponents and added again it has a derivative of rounding alone, some 1e-5 of the draw's in float32."""
    generator = torch.Generator().manual_seed(seed)
    x, theta = torch.randn(100, 10, generator=generator), 0.3 * torch.randn(4, 10, generator=generator)

    def log_joint(theta):
        parts = theta[:, None] * x
        return -(parts.max() + (parts - parts.max()).exp().sum(-1).log()).sum(-1)

    assert Guarded(LogJoint(log_joint)).log_joint(theta.requires_grad_()).shape == (4,)
