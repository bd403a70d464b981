"""Slips at the doors: calls of a few lines that do something else than they mean. Each is right, or is said.

A slip with a pattern is said: by an error of the library, or of the host that is asked first, by a note on an error of
the user's own function, by a warning, or in the words of the result.  A slip without one gives the right value, and its
function says so.  `test_right_usage_is_silent` holds the other side: what is right raises and warns of nothing.
"""

import math
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn.functional import softplus

import torchngvi as ngvi
from torchngvi.cli import main
from torchngvi.errors import TorchngviError
from torchngvi.models import RandomEffects, SoftmaxRegression


class Slip(NamedTuple):
    door: str
    name: str
    call: Callable[[], Any]
    said: str = ""  # a pattern; nothing where the value is right


SLIPS: list[Slip] = []


def slip(door: str, name: str, said: str = ""):
    def kept(call):
        SLIPS.append(Slip(door, name, call, said))
        return call

    return kept


def enter(door: str, slips: dict[str, tuple]):
    """Those of one expression: by name the call, and what is said."""
    SLIPS.extend(Slip(door, name, *slip) for name, slip in slips.items())


@pytest.fixture(autouse=True)
def in_float64(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def _words(call: Callable[[], Any]) -> tuple[str, Any]:
    """All that is said, and the value."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        value, text = None, ""
        try:
            value = call()
        except TorchngviError as error:
            text = str(error)
        except Exception as error:
            text = " ".join(getattr(error, "__notes__", ()))
            frame = error.__traceback__
            while frame.tb_next is not None:
                frame = frame.tb_next
            if not text and "sklearn" not in frame.tb_frame.f_code.co_filename:
                raise
            text = text or str(error)
    return " ".join([text, *(str(one.message) for one in heard), value if isinstance(value, str) else ""]), value


def ids(one: Slip) -> str:
    return f"{one.door}: {one.name}"


G = torch.Generator().manual_seed(0)
X = torch.randn(60, 3, generator=G, dtype=torch.float64)
LABELS = torch.bernoulli(torch.sigmoid(X @ torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)), generator=G)


def q(dim: int = 3, **keywords):
    return ngvi.CholeskyGaussian(dim, dtype=torch.float64, **keywords)


def fit(posterior, target, **keywords):
    return ngvi.fit(posterior, target, progress=False, **keywords)


def terms(theta, x=X, y=LABELS):
    eta = theta @ x.T
    return y * eta - softplus(eta)


def log_joint(theta):
    return terms(theta).sum(-1) - 0.5 * theta.square().sum(-1)


def model(y=LABELS, x=X, **keywords):
    return ngvi.GeneralizedLinear(x, y, **keywords)


def fitted():
    return fit(q(), model())


def same(one, other, tolerance=1e-6) -> bool:
    return bool((one.mean - other.mean).abs().max() < tolerance and (one.stddev - other.stddev).abs().max() < tolerance)


enter(
    "fit",
    {
        "a sum over draws too": (lambda: fit(q(), lambda theta: log_joint(theta).sum()), "one value a draw"),
        "a dimension that stays": (lambda: fit(q(), lambda theta: log_joint(theta)[:, None]), "one value a draw"),
        "labels as a column": (
            lambda: fit(q(), lambda theta: terms(theta, y=LABELS[:, None]).sum(-1)),
            "one value a draw",
        ),
        "the loss in place of the log joint": (
            lambda: fit(q(), lambda theta: -log_joint(theta)).reason,
            "does not confine q.*energy, return its negative",
        ),
        "NumPy inside": (
            lambda: fit(q(), lambda theta: torch.as_tensor(-0.5 * (theta.detach().numpy() ** 2).sum(-1))),
            "by torch operations",
        ),
        "q in single precision, data in double": (
            lambda: fit(ngvi.CholeskyGaussian(3, dtype=torch.float32), log_joint),
            "dtype torch.float32, that of q",
        ),
        "a function of one theta": (lambda: fit(q(), lambda theta: -0.5 * theta @ theta), "LogJoint.vmapped"),
    },
)


@slip("fit", "rows that are drawn at each call", "it draws.*DataLogJoint")
def _():
    def batch(theta):
        rows = torch.randint(60, (10,))
        return 6 * terms(theta, X[rows], LABELS[rows]).sum(-1) - 0.5 * theta.square().sum(-1)

    fit(q(), batch)


@slip("fit", "under no_grad")
def _():
    torch.manual_seed(1)
    with torch.no_grad():
        found = fit(q(), log_joint).posterior
    return same(found, fitted().posterior, 0.02)


enter(
    "GeneralizedLinear",
    {
        "labels 1 and 2": (lambda: same(fit(q(), model(LABELS + 1)).posterior, fitted().posterior),),
        "weights that sum to 1": (
            lambda: model(weights=torch.ones(60) / 60),
            "weights of the 60 rows sum to 1.*Multiply",
        ),
        "a precision for each row": (lambda: model(prior_precision=torch.ones(60)), "prior_precision must be a scalar"),
    },
)


@slip("SoftmaxRegression", "labels from 1")
def _():
    kinds = torch.arange(60) % 3
    one, other = (fit(q(6), SoftmaxRegression(X, labels)).posterior for labels in (kinds, kinds + 1))
    return same(one, other)


enter(
    "laplace",
    {
        "the loss in place of the log joint": (
            lambda: ngvi.laplace(q(), lambda theta: -log_joint(theta)),
            "has no maximum in 3 of 3 directions.*energy",
        ),
        "no prior in two directions": (
            lambda: ngvi.laplace(q(), lambda theta: -theta[:, 0].square()),
            "has no maximum in 2 of 3 directions",
        ),
    },
)


enter(
    "refine",
    {
        "another log joint than that of the fit": (
            lambda: ngvi.refine(fitted(), lambda theta: -0.5 * (theta - 5).square().sum(-1)),
            "cannot be told",
        )
    },
)


@slip("examine", "the wrong sign", "does not fit.*rises away from q.*energy")
def _():
    found = ngvi.examine(fitted().posterior, lambda theta: -log_joint(theta))
    return f"{found.word} {found.reasons}"


@slip("examine", "the result in place of q", "Pass its posterior")
def _():
    ngvi.examine(fitted(), log_joint)


@slip("leave_one_out", "a model of other labels", "fit it to this model first")
def _():
    ngvi.leave_one_out(fitted().posterior, model(1 - LABELS))


@slip("add", "labels of the other coding")
def _():
    result = fitted()
    one, other = (ngvi.add(result, X[:5], y).posterior for y in (LABELS[:5], 2 * LABELS[:5] - 1))
    return same(one, other)


@slip("merge", "posteriors in place of site sums", "takes what site_sum returns")
def _():
    ngvi.solved.merge([fitted().posterior] * 2)


V = torch.tensor([[4.0, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)


enter(
    "posteriors", {"the batch in the place of its shape": (lambda: q().__class__(5, 3), "batch_shape must be a tuple")}
)


@slip("posteriors", "moments of NumPy")
def _():
    found = ngvi.CholeskyGaussian.from_moments(np.zeros(3), V.numpy())
    return bool((found.covariance - V).abs().max() < 1e-12)


def loss(posterior, theta, sign=1.0):
    return -sign * (log_joint(theta) - posterior.log_prob(theta)).mean()


def steps(optimizer, count, sign=1.0):
    posterior = optimizer.posteriors[0]
    for _ in range(count):
        found = loss(posterior, posterior.rsample((32,)), sign)
        found.backward()
        optimizer.step()
    return posterior


enter(
    "optimizers",
    {
        "a missing minus in a loop": (
            lambda: steps(ngvi.SRVN(q(), lr=0.3, step_size=ngvi.KLRadius(0.5)), 200, -1.0),
            "the run diverges",
        )
    },
)


@slip("optimizers", "a closure of one loss a draw", "closure must return one loss.*loss.mean")
def _():
    posterior = q()

    def draw():
        return posterior.log_prob(theta := posterior.rsample((32,))) - log_joint(theta)

    ngvi.SRVN(posterior, lr=0.3).step(draw)


@slip("optimizers", "a closure that calls backward")
def _():
    def run(backward):
        torch.manual_seed(0)
        posterior = q()
        optimizer = ngvi.SRVN(posterior, lr=0.3)

        def closure():
            found = loss(posterior, posterior.rsample((32,)))
            if backward:
                found.backward()
            return found

        for _ in range(5):
            optimizer.step(closure)
        return posterior

    return same(run(True), run(False), 1e-12)


def batches(size=20, y=LABELS):
    return list(zip(X.split(size), y.split(size), strict=True))


def both(x, y, **keywords):
    return ngvi.GeneralizedLinear(x, y, classes=(0, 1), **keywords)


enter(
    "Streamed",
    {
        "a short last batch": (
            lambda: same(fit(q(), ngvi.Streamed(batches(25), 60, both)).posterior, fitted().posterior),
        )
    },
)


@slip("Streamed", "labels that are shuffled apart from their rows", "same rows with the same labels")
def _():
    class Apart:
        def __iter__(self):
            return zip(X.split(20), LABELS[torch.randperm(60)].split(20), strict=True)

    fit(q(), ngvi.Streamed(Apart(), 60, both))


@slip("Streamed", "rows that are drawn with replacement", "each row once, without a sampler with replacement")
def _():
    rows = torch.utils.data.TensorDataset(X, LABELS)
    sampler = torch.utils.data.RandomSampler(rows, replacement=True)
    loader = torch.utils.data.DataLoader(rows, batch_size=20, sampler=sampler)
    fit(q(), ngvi.Streamed(loader, 60, both))


pyro = pytest.importorskip("pyro")

import pyro.distributions as dist  # noqa: E402

from torchngvi.adapters.pyro import AutoGaussian, fit_guide  # noqa: E402

Y = X[:, :2] @ torch.tensor([1.0, -1.0], dtype=torch.float64) + 0.5 * torch.randn(60, generator=G, dtype=torch.float64)
BRIEF = {"progress": False, "examine": False}


def regression(y=None, law=lambda eta: dist.Normal(eta, 0.5), plate=60):
    def run():
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("rows", plate):
            pyro.sample("y", law(X[:, :2] @ w), obs=y)

    return run


def with_rows(run):
    return lambda x: run()


def guided(run, **keywords):
    pyro.clear_param_store()
    guide = AutoGaussian(run)
    fit_guide(run, guide, options=BRIEF, **keywords)
    return guide


@slip("Pyro", "the data are forgotten", "observes nothing: its sites w, y")
def _():
    pyro.clear_param_store()
    run = regression()
    fit_guide(with_rows(run), AutoGaussian(with_rows(run)), X, options={**BRIEF, "max_gradients": 100})


@slip("Pyro", "a site of another name is conditioned", "observes nothing")
def _():
    pyro.clear_param_store()
    run = with_rows(pyro.condition(regression(), data={"Y": Y}))
    fit_guide(run, AutoGaussian(run), X, options={**BRIEF, "max_gradients": 100})


enter(
    "Pyro",
    {
        "to_event within the plate": (
            lambda: guided(regression(Y, lambda eta: dist.Normal(eta, 0.5).to_event(1))),
            "repeats the observation of the site 'y', of shape .60,., 60 times",
        ),
        "y as a column": (lambda: guided(regression(Y[:, None])), r"Expected \[60\], actual \[60, 60\]"),
        "integer labels": (
            lambda: guided(regression(LABELS.long(), lambda eta: dist.Bernoulli(logits=eta))),
            "Bernoulli of the site 'y' cannot take its observations.*torch.int64",
        ),
        "observations of NumPy": (lambda: guided(regression(Y.numpy())), "cannot take its observations, a ndarray"),
        "logits for probabilities": (
            lambda: guided(regression(LABELS, dist.Bernoulli)),
            "satisfy the constraint Interval",
        ),
        "a keyword of the fit among those of the model": (
            lambda: guided(regression(Y), progress=False),
            r"options=\{'progress': False\}",
        ),
        "quantiles in per cent": (lambda: guided(regression(Y)).quantiles([2.5, 97.5]), "are shares.*got 2.5"),
    },
)


@slip("Pyro", "a factor that is summed within the plate", "repeats the factor of the site 'f'")
def _():
    def run():
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("rows", 60):
            pyro.factor("f", -2 * (Y - X[:, :2] @ w).square().sum())

    guided(run)


@slip("Pyro", "observations in single precision")
def _():
    one, other = (guided(regression(y)).median()["w"] for y in (Y, Y.float()))
    return bool((one - other).abs().max() < 1e-6)


gpytorch = pytest.importorskip("gpytorch")

from sparse_models import SparseModel  # noqa: E402

from torchngvi.adapters.gpytorch import (  # noqa: E402
    NaturalGradientVariationalDistribution,
    natural_optimizer,
    train_svgp,
)

AT = torch.linspace(0, 1, 60, dtype=torch.float64)[:, None]
WAVE = torch.sin(6 * AT[:, 0]) + 0.1 * torch.randn(60, generator=G, dtype=torch.float64)


def Model():  # noqa: N802
    return SparseModel(NaturalGradientVariationalDistribution(6), AT[::10].clone())


def trained(x=AT, y=WAVE, gp=None, likelihood=None):
    gp = gp or Model().double()
    likelihood = likelihood or gpytorch.likelihoods.GaussianLikelihood().double()
    train_svgp(gp, likelihood, (x, y), rounds=1, progress=False)
    return gp.eval()(AT).mean


enter(
    "GPyTorch",
    {
        "a model in single precision, data in double": (
            lambda: trained(gp=Model().float(), likelihood=gpytorch.likelihoods.GaussianLikelihood().float()),
            "call model.double",
        )
    },
)


@slip("GPyTorch", "inputs without the axis of features, a model in eval mode")
def _():
    one, other = trained(), trained(AT[:, 0], gp=Model().double().eval())
    return bool((one - other).abs().max() < 1e-6)


@slip("GPyTorch", "a missing minus in a loop", "weight -0.0166.*loss = -mll")
def _():
    gp, likelihood = Model().double(), gpytorch.likelihoods.GaussianLikelihood().double()
    mll = gpytorch.mlls.VariationalELBO(likelihood, gp, num_data=60)
    optimizer = natural_optimizer(mll)
    mll(gp(AT), WAVE).backward()
    optimizer.step()


pytest.importorskip("sklearn")

from torchngvi.adapters.sklearn import (  # noqa: E402
    BayesianLinearRegression,
    BayesianLogisticRegression,
    BayesianMixedRegressor,
)

FRAME = pd.DataFrame(X.numpy(), columns=["a", "b", "c"])
CLASSES = LABELS.numpy().astype(int)
VISITS = pd.DataFrame({"week": np.tile(np.arange(4.0), 15), "patient": np.repeat(np.arange(15), 4)})
PAIN = 5 - 0.5 * VISITS.week.to_numpy() + np.sin(VISITS.patient.to_numpy()) + 0.3 * Y.numpy()


@slip("scikit-learn", "labels as texts")
def _():
    found = BayesianLogisticRegression().fit(FRAME, np.where(CLASSES, "yes", "no"))
    return np.allclose(found.coef_, BayesianLogisticRegression().fit(FRAME, CLASSES).coef_)


enter(
    "scikit-learn",
    {
        "columns in another order": (
            lambda: BayesianLogisticRegression().fit(FRAME, CLASSES).predict(FRAME[["c", "a", "b"]]),
            "same order",
        )
    },
)


def mixed(formula, family="gaussian", **columns):
    table = VISITS.assign(pain=PAIN, one=np.arange(60), **columns)
    return ngvi.mixed(formula, table, family)


enter(
    "mixed",
    {
        "the response on both sides": (
            lambda: mixed("pain ~ week + pain + (1 | patient)"),
            "pain stands on both sides",
        ),
        "a group for each row": (lambda: mixed("pain ~ week + (1 | one)").fit(progress=False), "one row in each group"),
        "three classes": (
            lambda: mixed("kind ~ week + (1 | patient)", "bernoulli", kind=np.arange(60) % 3),
            "needs two classes in the outcome; got 3",
        ),
    },
)


@slip("mixed", "an exposure without its logarithm", "Did you mean offset.log")
def _():
    exposure = np.linspace(100, 2000, 60)
    mixed("n ~ week + offset(days) + (1 | patient)", "poisson", days=exposure, n=(exposure / 100).round())


WEEKS = torch.tensor(np.stack([np.ones(60), VISITS.week.to_numpy()], 1))
PATIENTS = torch.tensor(VISITS.patient.to_numpy())


@slip("MixedModel", "a matrix of the groups for the design within them", "a 1 in one of 15 columns")
def _():
    one_hot = torch.nn.functional.one_hot(PATIENTS).double()
    ngvi.MixedModel(WEEKS, PAIN, RandomEffects(one_hot, torch.zeros(60, dtype=torch.long)), "gaussian")


@slip("MixedModel", "groups from 1", "no row of group 0")
def _():
    ngvi.MixedModel(WEEKS, PAIN, RandomEffects(WEEKS[:, :1], PATIENTS + 1), "gaussian")


TABLE = FRAME[["a", "b"]].assign(died=CLASSES)


def command(table, *flags, separator=","):
    table.to_csv("table.csv", index=False, sep=separator)
    data = ["--data", "table.csv", "--no-progress", "--out", "run", "--overwrite"]
    return main(["fit", *data, *flags])


def printed(capsys) -> str:
    return " ".join("".join(capsys.readouterr()).replace("│", " ").split())


COMMANDS = [
    ("-999 for missing values", TABLE.assign(a=TABLE.a.where(TABLE.index > 10, -999)), (), "-999 in 11 of 60 rows"),
    ("rows that were pasted twice", pd.concat([TABLE, TABLE]), (), "120 of 120 rows are there more than once"),
    ("a copy of the target among the columns", TABLE.assign(outcome=TABLE.died), (), "outcome separates the classes"),
    ("dates", TABLE.assign(day=pd.date_range("2020", periods=60).astype(str)), (), "holds dates"),
    ("the share held out in per cent", TABLE, ("--test-fraction", "20"), "Take 0.2"),
    ("the target of another spelling", TABLE.rename(columns={"died": "Died"}), (), "Did you mean 'Died'"),
]


@pytest.mark.accuracy
@pytest.mark.parametrize(("name", "table", "flags", "said"), COMMANDS, ids=[one[0] for one in COMMANDS])
def test_slips_at_the_command_line(name, table, flags, said, capsys):
    command(table, "--target", "died", *flags)
    assert said in printed(capsys)


@pytest.mark.accuracy
def test_another_separator_at_the_command_line(capsys):
    found = []
    for separator in (",", ";"):
        assert command(TABLE, "--target", "died", separator=separator) == 0
        found.append(pd.read_csv("run/coefficients.csv"))
    pd.testing.assert_frame_equal(*found)


@pytest.mark.accuracy
@pytest.mark.parametrize("one", SLIPS, ids=ids)
def test_slips(one):
    text, value = _words(one.call)
    if one.said:
        assert re.search(one.said, text, re.DOTALL), text or value
    else:
        assert value is True, text


RIGHT = {
    "a log joint that is the same at each call": lambda: fit(q(), log_joint),
    "a log joint that is not there beyond a bound": lambda: fit(
        q(1), lambda theta: torch.where(theta[:, 0] > 0.9, math.nan, -50 * theta[:, 0].square())
    ),
    "weights of 0 and 1": lambda: model(weights=torch.eye(60)[0] + torch.eye(60)[1]),
    "a mask of one row": lambda: model(weights=torch.eye(60)[0]),
    "rows 0 and 1": lambda: (model().minibatch([0, 1, 1, 0]), ngvi.forget(fitted(), [0, 1])),
    "Laplace's method at a mode": lambda: ngvi.laplace(q(), log_joint),
    "an examination of a fit": lambda: ngvi.examine(fitted().posterior, log_joint),
    "a loss of each member of a batch": lambda: ngvi.SRVN(many := q(batch_shape=(2,)), lr=0.1).step(
        lambda: model().negative_elbo(many)
    ),
    "a run that falls far and arrives": lambda: fit(q(mean=50.0), log_joint),
    "batches in another order at each pass": lambda: fit(q(), ngvi.Streamed(Shuffled(), 60, both)),
    "a model in Pyro": lambda: guided(regression(Y)),
    "a prior alone in Pyro": lambda: guided(lambda: pyro.sample("w", dist.Normal(0.0, 1.0))),
    "y in the order of X": lambda: BayesianLinearRegression().fit(FRAME, pd.Series(Y.numpy())),
    "y of another index": lambda: BayesianLinearRegression().fit(FRAME, pd.Series(Y.numpy(), index=range(60, 120))),
    "new groups at a prediction": lambda: (
        BayesianMixedRegressor(groups="patient").fit(VISITS, PAIN).predict(VISITS.assign(patient=99))
    ),
    "a formula": lambda: mixed("pain ~ week + (1 | patient)").fit(progress=False),
}


class Shuffled:
    """Rows with their labels, in another order at each pass."""

    def __iter__(self):
        order = torch.randperm(60)
        return zip(X[order].split(20), LABELS[order].split(20), strict=True)


@pytest.mark.parametrize("name", RIGHT)
def test_right_usage_is_silent(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        RIGHT[name]()
