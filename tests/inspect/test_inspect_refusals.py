"""What is refused where fits are examined, compared and refined, each with words that say what to do."""

import copy
import dataclasses
import functools
import math
import pickle
import sys

import pytest
import torch
from arrow import ScalarArrow
from helpers import check_refusal, randn

from torchngvi import (
    CholeskyGaussian,
    DiagonalGaussian,
    GeneralizedLinear,
    LogJoint,
    MixedModel,
    NaturalGaussian,
    add,
    certificate,
    compare_models,
    fit,
    forget,
    leave_one_out,
    prior_by_evidence,
    refine,
    to_arviz,
)
from torchngvi.diagnostics import (
    Calibration,
    Residuals,
    accuracy,
    compare_estimators,
    elbo,
    examine,
    k_hat,
    log_predictive_density,
    predictive_mean,
    simulation_based_calibration,
)
from torchngvi.diagnostics.importance import smoothed
from torchngvi.diagnostics.linear_response import confirm, response_log_sd, tails, third_order, third_order_of_values
from torchngvi.diagnostics.verdict import Verdict
from torchngvi.errors import PairError
from torchngvi.expectations import LeastSquaresStein, Quadrature, Stein
from torchngvi.expectations.draws import Antithetic
from torchngvi.ifvb import FlatCholesky
from torchngvi.interfaces import Target
from torchngvi.models import SoftmaxRegression, StudentT
from torchngvi.models.likelihoods import BernoulliLogit, Likelihood
from torchngvi.refinement import LayeredGaussian, WeightedDraws
from torchngvi.solved import sensitivity, site_sum, solve, stacking_weights
from torchngvi.structures import Dense

DTYPE, N, D = torch.float64, 60, 4


X = randn(N, D)
CLASSES = (X[:, 0] + randn(N, seed=1) > 0).to(DTYPE)
COUNTS = torch.poisson((0.5 * X[:, 0]).exp(), generator=torch.Generator().manual_seed(2))
ONES, EYE = torch.ones(2, 2, dtype=DTYPE), torch.eye(2, dtype=DTYPE)


def normal(theta):
    return -0.5 * theta.square().sum(-1)


def q_of(dim=D, batch=(), **options):
    return CholeskyGaussian(dim, batch, **{"dtype": DTYPE, **options})


def diagonal():
    return DiagonalGaussian(D, dtype=DTYPE)


def logistic(X=X, y=CLASSES, **more):
    return GeneralizedLinear(X, y, **{"prior_precision": 0.3, **more})


def poisson(rows=slice(None), **more):
    return GeneralizedLinear(X[rows], COUNTS[rows], "poisson", **more)


def softmax():
    return SoftmaxRegression(X, torch.arange(N) % 3)


def fitted(model, q=None):
    return fit(q_of(model.dim) if q is None else q, model, tolerance=1e-9, progress=False)


@functools.cache
def one():
    return fitted(logistic())


@functools.cache
def counted():
    return fitted(poisson())


def patched(name, value, call):
    """A call while `solve` has something else under that name."""

    def refused():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"torchngvi.solved.response.{name}", value)
            call()

    return refused


def calibrated(prior=lambda generator: torch.randn(2, generator=generator), fit=lambda y: q_of(2), **options):
    simulate = options.pop("simulate", lambda theta, generator: theta + torch.randn(3, 2, generator=generator))
    return simulation_based_calibration(prior, simulate, fit, **{"runs": 2, **options})


def figure():
    return pytest.importorskip("matplotlib.figure").Figure()


def resumed(draws):
    return calibrated(resume=Calibration(("a",), torch.zeros(1, 1), draws, 1, 0))


def compared(two):
    return compare_models({"one": counted(), "two": two})


def zero_density():
    found = leave_one_out(counted().posterior, counted().target)
    found.density[7] = -math.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[compare_models.__module__], "leave_one_out", lambda q, model, flag, **_: found)
        compared(counted())


def estimators(*given, q=None, repeats=5):
    return compare_estimators(q_of(3) if q is None else q, normal, list(given) or None, repeats=repeats)


def small(**more):
    return GeneralizedLinear(EYE, [0.0, 1.0], **more)


def predicted(X, y, offset=None):
    return log_predictive_density(small(), q_of(2), X, y, offset)


class Counting(Likelihood):
    discrete = False
    energy = BernoulliLogit.energy
    expected = BernoulliLogit.expected

    def checked(self, y):
        return y


class Noisy(Target):
    """Another value at each call."""

    temperature, comparable = 1.0, False

    def log_joint(self, theta):
        return normal(theta)

    def tensors(self):
        return ()


def by_evidence(model=None, **arguments):
    return prior_by_evidence(q_of(2), model or small(), **arguments)


@functools.cache
def mixed():
    groups = torch.arange(N) // 5
    return MixedModel(X[:, :2], COUNTS, (X[:, :1], groups), "poisson").fit(progress=False)


def left_out(*parts, **more):
    return leave_one_out(q_of(), logistic(*parts, **more))


def changed(**parts):
    return dataclasses.replace(one(), **parts)


def by_groups(groups):
    return leave_one_out(one().posterior, one().target, groups=groups)


def solved(**more):
    """The log precision of a prior, and what `solve` gives for it."""
    log_precision = torch.zeros((), dtype=DTYPE, requires_grad=True)
    return log_precision, solve(q_of(), logistic(prior_precision=log_precision.exp(), **more))


def second_derivative(of):
    log_precision, found = solved()
    return torch.autograd.grad(getattr(found, of).sum(), log_precision, create_graph=True)


def written_to():
    design = X.clone()
    found = solved(X=design)[1]
    design.mul_(2.0)
    found.mean.sum().backward()


def exported(result, **options):
    pytest.importorskip("arviz_either", reason="arviz is in the extra test")
    return to_arviz(result, **options)


def residuals(z):
    return examine(q_of(2), normal, residuals=Residuals(z, z))


def vanishing(theta):
    return torch.where(theta[..., 0] > 0, normal(theta), -torch.inf)


COUNT, FIRST = "whole number, at least 1", "fit it to this model first"
DRAWS = Antithetic(64, torch.Generator().manual_seed(0))(torch.zeros(4, dtype=DTYPE))
LAYERED = LayeredGaussian(torch.zeros(2, dtype=DTYPE), EYE, ())
SHORT_FIT = functools.partial(fit, max_evaluations=2)
COLD = LogJoint(normal, temperature=0.0)

REFUSED = {
    # calibration
    "prior, no draw": (lambda: calibrated(lambda: ONES), ("prior(generator)", "function of ()")),
    "simulate": (lambda: calibrated(simulate=lambda theta: theta), ("(theta, generator)", "of (theta)")),
    "runs": (lambda: calibrated(runs=0), ("runs counts simulations", COUNT, "got 0")),
    "names of coordinates": (lambda: calibrated(names=["a"]), ("names", "the 2 coordinates", "got 1")),
    "five draws": (lambda: calibrated(fit=lambda y: torch.zeros(5, 2)), ("99 draws of 2", "got (5, 2)")),
    "quantity": (lambda: calibrated(quantities={"sum": lambda theta, y: theta}), ("'sum' must map",)),
    "resume, draws": (lambda: resumed(9), ("resumed", "draws=9 and seed=0")),
    "resume, names": (lambda: resumed(99), ("resumed", "quantities a")),
    "prior, shape": (lambda: calibrated(lambda generator: torch.zeros(2, 2)), ("one theta", "(2, 2)")),
    "a fit of a text": (lambda: calibrated(fit=lambda y: "no"), ("fit", "sampled", "got str"), PairError),
    "figure": (lambda: calibrated(runs=1).plot(figure()), ("two fits or more", "got 1")),
    # certificates
    "certificate, size": (lambda: certificate(q_of(3), logistic()), ("4 coefficients", "q has 3")),
    "bound, batch": (lambda: certificate(q_of(), logistic(y=CLASSES.expand(2, N))), ("(2,) of data",)),
    "certificate, prior": (
        lambda: certificate(q_of(), logistic(prior_precision=X[:1, None] ** 2)),
        ("precision of shape (1, 1, 4)", "batch () of posteriors"),
    ),
    # estimators
    "estimators at a batch": (lambda: estimators(q=q_of(3, (2,))), ("one Gaussian", "shape (2,)")),
    "repeats": (lambda: estimators(repeats=1), ("repeats", "at least 2", "got 1")),
    "two estimators of one name": (lambda: estimators(Stein(2), Stein(4)), ("two", "'Stein'")),
    "no estimator": (lambda: estimators(LeastSquaresStein(8)), ("got none such", "LeastSquaresStein")),
    "quadrature": (lambda: estimators(Quadrature()), ("Quadrature", "TractableTarget", "got LogJoint"), PairError),
    "no name": (lambda: estimators(Stein(2))["Stien"], ("Stien was not compared", "mean 'Stein'"), KeyError),
    # comparison
    "stacking, shape": (lambda: stacking_weights(torch.zeros(3)), ("(N, K)", "got (3,)")),
    "stacking, no rows": (lambda: stacking_weights(torch.zeros(0, 2)), ("(N, K)", "got (0, 2)")),
    "stacking, NaN": (
        lambda: stacking_weights((EYE - EYE) / EYE),
        ("log_density must be finite", "2 NaN or infinite of 4"),
    ),
    "stacking, complex": (lambda: stacking_weights(1j * torch.ones(3, 2)), ("real", "torch.complex64")),
    "stacking, text": (lambda: stacking_weights([["a", "b"]]), ("log_density must be numbers", "got list")),
    "compare, rows": (lambda: compared(fitted(poisson(slice(59)))), ("'two', (59,)", "'one', (60,)")),
    "order": (lambda: compared(fitted(poisson(torch.arange(N).flip(0)))), ("same order", "y of 'two', (60,)")),
    "compare, weights": (lambda: compared(fitted(poisson(weights=1 + CLASSES))), ("the weights of 'two'",)),
    "compare, density": (
        lambda: compared(fitted(logistic(y=COUNTS, family="gaussian"))),
        ("density", "probability", "'two'"),
    ),
    "compare, one": (lambda: compare_models({"one": one()}), ("at least two models", "got 1")),
    "compare, a list": (lambda: compare_models([one(), one()]), ("at least two models", "got list")),
    "compare, softmax": (lambda: compared((q_of(8), softmax())), ("'two'", "CholeskyGaussian and Softmax"), PairError),
    "compare, no pair": (lambda: compared(("q", X)), ("of 'two'", "str and Tensor"), PairError),
    "compare, no result": (lambda: compared(X), ("of 'two'", "a Tensor")),
    "compare, names": (lambda: compare_models({1: one(), "1": one()}), ("differ as texts", "1, '1'")),
    "compare, a copy": (lambda: compared(copy.copy(counted())), ("'two' has no model", "copy")),
    "family": (lambda: compared(fitted(poisson(), diagonal())), ("leave_one_out", "dense Gaussian"), PairError),
    "compare, third": (lambda: compared(counted()).elbo_difference("one", "z"), ("one, two", "got 'z'")),
    "compare, a density of zero": (zero_density, ("number 7 under 'one' is -inf", "2 in all")),
    # predictions and draws
    "predict, columns": (lambda: predicted(torch.ones(2, 3), ONES[0]), ("the 2 columns", "shape (2, 3)")),
    "predict, targets": (lambda: predicted(EYE, torch.ones(3)), ("y must", "a row of X, 2", "(3,)")),
    "predict, offset": (lambda: predicted(EYE, ONES[0], torch.ones(3)), ("offset", "of X, 2", "(3,)")),
    "predict, classes": (lambda: predicted(ONES, torch.tensor([1.0, 2.0])), ("0/1 or -1/+1", "got 1, 2")),
    "predict, NaN": (lambda: predicted(math.nan * ONES, torch.ones(2)), ("X must be finite",)),
    "no likelihood": (lambda: predictive_mean(small(family=Counting()), q_of(2), EYE), ("got Counting",)),
    "accuracy": (lambda: accuracy(poisson(), q_of(), X, COUNTS), ("of classes", "got PoissonLog")),
    "elbo of one draw": (lambda: elbo(q_of(), normal, 1), ("num_samples", "at least 2", "got 1")),
    "k-hat of 20 draws": (lambda: k_hat(torch.zeros(20)), ("k-hat", "at least 100 draws", "got 20")),
    "weights": (lambda: smoothed(torch.zeros(20)), ("at least 100 draws", "got 20", "Raise num_samples")),
    # evidence
    "evidence, twice": (lambda: by_evidence(groups=[[0], [0]]), ("from 0 to 1", "got [[0], [0]]")),
    "evidence, coordinate 2": (lambda: by_evidence(groups=[[2]]), ("groups", "from 0 to 1", "got [[2]]")),
    "evidence, an empty group": (lambda: by_evidence(groups=[[]]), ("groups", "none empty", "got [[]]")),
    "evidence, no groups": (lambda: by_evidence(groups=[]), ("groups", "none empty", "got [].")),
    "evidence, noise": (lambda: by_evidence(noise=True), ("noise=True", "Gaussian", "BernoulliLogit")),
    "evidence, prior": (lambda: by_evidence(small(prior_precision=EYE)), ("diagonal", "is a matrix")),
    "prior, batch": (lambda: prior_by_evidence(q_of(2, (3,)), small()), ("by evidence", "one posterior")),
    # leaving out
    "worst, NaN": (lambda: mixed().leave_one_group_out(worst=math.nan), ("worst", "0 or larger", "nan")),
    "worst, text": (lambda: mixed().leave_one_group_out(worst="high"), ("worst", "a number", "'high'")),
    "seed of rows": (lambda: mixed().leave_one_out(seed="a"), ("seed", "'a'")),
    "one group": (lambda: by_groups([0] * N), ("60 rows", "at least two", "60 names of 1 groups")),
    "two names": (lambda: by_groups([0, 1]), ("60 rows", "got 2 names of 2")),
    "a number of groups": (lambda: by_groups(3), ("got 1 names of 1 groups",)),
    "groups, None": (lambda: by_groups([None, "a"] * 30), ("missing (None) in 30 rows",)),
    "groups, NaN": (lambda: by_groups([math.nan, 1.0] * 30), ("missing (nan) in 30 rows",)),
    "groups, kinds": (lambda: by_groups([1, "a"] * 30), ("all by numbers or all by texts", "[1, 'a']")),
    "groups, matrix": (lambda: by_groups(torch.zeros(N, 2)), ("[[0.0, 0.0]", "unhashable")),
    "leave out, softmax": (lambda: leave_one_out(q_of(8), softmax()), ("leave_one_out", "got Softmax"), PairError),
    "leave out, sparse": (lambda: left_out(X.to_sparse_csr()), ("(60, 4), torch.sparse_csr", "y of (60,)"), PairError),
    "leave out, data sets": (lambda: left_out(y=CLASSES.expand(2, -1)), ("torch.strided", "y of (2, 60)"), PairError),
    "leave out, family": (lambda: leave_one_out(diagonal(), logistic()), ("leave_one_out", "got Diagonal"), PairError),
    "leave out, size": (lambda: leave_one_out(q_of(3), logistic()), ("4 coefficients", "q has 3")),
    "leave out, dtype": (lambda: leave_one_out(CholeskyGaussian(D), logistic()), ("q in torch.float32",)),
    "leave out, float32": (
        lambda: leave_one_out(CholeskyGaussian(D), logistic().to(torch.float32)),
        (FIRST, "below 0.001, in float64"),
    ),
    "leave out, not fitted": (lambda: left_out(), ("leave_one_out", FIRST, "below 0.001.")),
    "leave out, flag": (lambda: leave_one_out(q_of(), logistic(), flag=-1), ("flag bounds", "got -1")),
    "leave out, cold": (lambda: left_out(temperature=0.5), ("leave_one_out", "temperature 1", "has 0.5")),
    # linear response
    "no pairs": (lambda: third_order(randn(64, 2), randn(64, 2)), ("antithetic draws", "got others")),
    **{
        f"{count} draws of {call.__name__}": (
            lambda call=call, draws=draws, values=values: call(draws, values),
            ("S even and at least 32", f"got shapes ({count}, 4)"),
        )
        for count, draws in ((30, DRAWS[:30]), (33, DRAWS[:33]))
        for call, values in ((third_order, draws), (third_order_of_values, draws[:, 0]), (tails, draws))
    },
    "an arrow": (lambda: third_order(DRAWS, DRAWS, ScalarArrow(4)), ("closed under products", "`confirm`")),
    # sensitivity
    "sensitivity, copy": (lambda: sensitivity(copy.copy(one())), ("Gaussian prior", "a copy of a result"), PairError),
    "tilted log joint": (lambda: sensitivity(changed(target=LogJoint(normal))), ("sensitivity", "LogJoint"), PairError),
    "sensitivity, batch": (lambda: sensitivity(fitted(logistic(), q_of(D, (2,)))), ("one Gaussian", "got"), PairError),
    "sensitivity, not fitted": (lambda: sensitivity(changed(posterior=q_of())), ("sensitivity", FIRST)),
    "conclusions, columns": (lambda: sensitivity(one(), X[:2, :2]), ("(K, 4) of factors", "got (2, 2)")),
    "conclusions, none": (lambda: sensitivity(one(), X[:0]), ("(K, 4) of factors", "got (0, 4)")),
    "conclusions, zero": (lambda: sensitivity(one(), torch.zeros(1, D)), ("all 0", "no coefficient")),
    "conclusions, names": (lambda: sensitivity(one(), X[:2], "ab"), ("a conclusion, 2", "got 'ab'")),
    # solve
    "solve, a log joint": (lambda: solve(q_of(), LogJoint(normal)), ("solve", "packets", "got LogJoint"), PairError),
    "solve, Student": (lambda: solve(q_of(), small(family=StudentT(1.0, dof=4))), ("with StudentT",), PairError),
    "solve, module": (lambda: solve(torch.nn.ReLU(), logistic()), ("a posterior first", "got ReLU")),
    "early end": (patched("fit", SHORT_FIT, lambda: solve(q_of(), logistic())), ("1e-08", "fit ended")),
    "solve twice": (lambda: second_derivative("mean"), ("first derivatives only", "create_graph=True")),
    "solve, bound": (lambda: second_derivative("elbo"), ("first derivatives only", "create_graph=True")),
    "solve, written data": (written_to, ("data", "written to between solve and the backward")),
    "hard": (patched("_PRODUCTS", 1, lambda: solved()[1].mean.sum().backward()), ("relative", "1e-06")),
    # ArviZ
    "arviz, a number": (lambda: exported(3), ("mixed model", "got a int")),
    "arviz, log joint": (lambda: exported(fitted(LogJoint(normal), q_of(1))), ("FitResult of a LogJoint",)),
    "arviz, pickle": (lambda: exported(pickle.loads(pickle.dumps(one()))), ("got a FitResult.",)),
    "arviz, one draw": (lambda: exported(one(), draws=1), ("draws", "2 or more", "got 1")),
    "arviz, draws=True": (lambda: exported(one(), draws=True), ("draws", "2 or more", "got True")),
    "arviz, batch": (lambda: exported(fitted(small(), q_of(2, (2,)))), ("one fit", "(2,)", "one by one")),
    # rows that come and go
    "site_sum, log joint": (lambda: site_sum(q_of(), LogJoint(normal)), ("site_sum", "got LogJoint"), PairError),
    "site_sum, batch": (lambda: site_sum(q_of(D, (2,)), logistic()), ("site_sum", "without batch")),
    "site_sum, cold": (lambda: site_sum(q_of(), logistic(temperature=0.5)), ("sites", "temperature 1")),
    "forget, softmax": (lambda: forget(fitted(softmax()), [0]), ("forget", "dense", "got SoftmaxRegr"), PairError),
    "forget, family": (lambda: forget(fitted(logistic(), diagonal()), [0]), ("forget is", "got Diagonal"), PairError),
    "forget, row 60": (lambda: forget(one(), [60]), ("from 0 to 59", "got 60")),
    "forget, row -1": (lambda: forget(one(), [-1, 2]), ("from 0 to 59", "got -1")),
    "forget, a short mask": (lambda: forget(one(), [True, False]), ("mask of all 60 rows", "torch.bool")),
    "forget, bytes": (lambda: forget(one(), CLASSES.to(torch.uint8)), ("all 60 rows", "torch.uint8")),
    "forget, a text": (lambda: forget(one(), "ab"), ("list of row numbers, or a mask", "got str")),
    "forget, None": (lambda: forget(one(), None), ("list of row numbers, or a mask", "got NoneType")),
    "forget, a set": (lambda: forget(one(), {1, 2}), ("list of row numbers, or a mask", "got set")),
    "forget, all": (lambda: forget(one(), list(range(N))), ("all 60 rows", "leaves the prior")),
    "add, a copy": (lambda: add(copy.copy(one()), X[:1], [1.0]), ("add", "model of the result", "copy"), PairError),
    "add, sparse": (lambda: add(one(), X[:2].to_sparse_csr(), [1.0, 0.0]), ("dense", "X.to_dense()")),
    "add, columns": (lambda: add(one(), X[:1, :3], [1.0]), ("(n, 4)", "got X of shape (1, 3)")),
    # examinations
    "examine, a batch": (lambda: examine(q_of(2, (3,)), normal), ("examine takes one posterior", "(3,)")),
    "examine, flat": (lambda: examine(FlatCholesky.standard(2), normal), ("Gaussian", "got FlatCholesky"), PairError),
    "examine, a result": (lambda: examine(one(), normal), ("got FitResult first", "Pass its posterior")),
    "examine, cold": (lambda: examine(q_of(2), COLD), ("examine", "density", "got temperature 0")),
    "examine, budget": (lambda: examine(q_of(2), normal, max_gradients=0), ("max_gradients", "got 0")),
    "examine, residuals": (lambda: residuals(torch.zeros(512, 3)), ("residuals", "shape (S, 2)", "got")),
    "examine, ones": (lambda: residuals(torch.ones(512, 2)), ("antithetic draws", "got others")),
    "draw nothing": (lambda: Verdict.none("no word").plot(), ("drawn", "there was none: no word")),
    "examine, around": (
        lambda: examine(q_of(2), normal, around=ONES),
        ("around must be a scalar or (2,)", "got shape (2, 2)"),
    ),
    "examine, modes": (lambda: examine(q_of(2), normal, modes=[3]), ("modes are those of the density",)),
    "confirm, coordinates": (
        lambda: confirm(q_of(2), LogJoint(normal), torch.tensor([0, 2])),
        ("coordinates are indices of coordinates from 0 to 1", "got [0, 2]"),
    ),
    "response, matrix": (
        lambda: response_log_sd(q_of(2).frame(), torch.eye(3, dtype=DTYPE)),
        ("M must be (..., 2, 2)", "got shape (3, 3)"),
    ),
    "third order, structure": (
        lambda: third_order(DRAWS, DRAWS, Dense(3)),
        ("z, residuals and the structure are of one number of coordinates",),
    ),
    "third order, integers": (
        lambda: third_order(DRAWS.long(), DRAWS),
        ("z must be a tensor of real numbers", "torch.int64"),
    ),
    "accuracy, y": (
        lambda: accuracy(logistic(), q_of(), X, CLASSES[1:]),
        ("y must have one entry a row of X, 60", "(59,)"),
    ),
    "accuracy, weights": (
        lambda: accuracy(logistic(), q_of(), X, CLASSES, weights=torch.ones(3)),
        ("weights must have one entry a row, 60", "(3,)"),
    ),
    "estimators": (
        lambda: compare_estimators(q_of(2), normal, [3]),
        ("estimators are estimators in a list, or by name", "got [3]"),
    ),
    "quantities": (
        lambda: simulation_based_calibration(lambda g: 0, lambda t, g: 0, lambda d: 0, quantities={"a": 3}),
        ("quantities are functions of θ and the data by name",),
    ),
    "solve, an arrow": (
        lambda: solve(NaturalGaussian(D, structure=ScalarArrow(D), dtype=DTYPE), logistic()),
        ("solve takes a Gaussian over a structure with all products", "dense, diagonal or blocks"),
        PairError,
    ),
    # refinement
    "refine, a text": (lambda: refine("q", normal), ("refine", "a CholeskyGaussian", "got str"), PairError),
    "refine, no log joint": (lambda: refine(q_of(2)), ("until it is pickled", "refine(q, log_joint)")),
    "refine, batch": (lambda: refine(q_of(2, (3,)), normal), ("one posterior", "(3,)", "Pass each member")),
    "refine, kind": (lambda: refine(q_of(2), normal, "flow"), ("fan, mixture, importance", "got 'flow'")),
    "refine, coordinate": (lambda: refine(q_of(2), normal, coordinate=2), ("from 0 to 1", "got 2")),
    "refine, starts": (lambda: refine(q_of(2), normal, starts=ONES[0]), ("starts", "(K, 2)", "shape (2,)")),
    "refine, -inf": (lambda: refine(q_of(2), vanishing), ("not finite at some", "Fit q first")),
    "refine, cold": (lambda: refine(q_of(2), COLD), ("temperature 0", "Use a positive temperature")),
    "refine, noise": (lambda: refine(q_of(2), Noisy()), ("Noisy gives others", "DataLogJoint")),
    "layers, theta": (lambda: LAYERED.log_prob(torch.zeros(3)), ("theta", "D = 2", "got shape (3,)")),
    "layers, level": (lambda: LAYERED.quantile([0.0]), ("levels", "between 0 and 1", "got [0.0]")),
    "no density": (lambda: WeightedDraws(EYE, ONES[0]).log_prob(ONES), ('kind="fan"', 'kind="mixture"')),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    check_refusal(*REFUSED[name])
