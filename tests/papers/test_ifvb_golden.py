"""IFVB's numbers as they stand: λ after some twenty steps of every family, preconditioner, average and limit.

`ifvb_golden.json` holds λ, and the average where there is one, at full precision.  These are no statements of theory,
which the other files of IFVB make: they are there so that code may be moved and its numbers be seen not to have.
`python tests/papers/test_ifvb_golden.py` writes the file again, which is right where the numbers are meant to change.
"""

import copy
import json
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from torchngvi import DataLogJoint, ifvb
from torchngvi.errors import RejectedStepWarning
from torchngvi.rules import ExponentialAverage
from torchngvi.stepsizes import Clip, Constant, KLRadius, PowerSchedule, Shortest

FLOAT = torch.float64
FILE = Path(__file__).with_name("ifvb_golden.json")
TOLERANCE = 1e-12  # of the largest entry of λ


class Problem(NamedTuple):
    """What is fitted to what."""

    family: object  # () -> q at its start
    target: object  # what a step takes
    estimator: object

    def run(self, method="IFVB", steps=20, **settings):
        """λ after so many steps, and the average where there is one: all that is asked here of an optimizer.

        ``method`` is "IFVB", "AIFVB" or a metric.
        """
        settings, draws = {"warmup": 40} | settings, torch.Generator().manual_seed(7)
        alpha, offset = settings.pop("alpha", 0.75), settings.pop("offset", 100.0)
        names = {"samples", "eps", "c_beta", "beta"} & settings.keys()
        learnt = {"beta": (alpha - 0.5) / 2} | {name: settings.pop(name) for name in names}
        metric = ifvb.Recursive(**learnt) if isinstance(method, str) else copy.copy(method)
        metric.warmup, metric.generator = settings.pop("warmup"), draws
        estimator = copy.copy(self.estimator)
        estimator.generator = draws
        limits = [KLRadius(radius)] if (radius := settings.pop("radius", 0.1)) and metric.natural else []
        limits += [Clip(norm)] if (norm := settings.pop("clip", None)) else []
        parts = {"estimator": estimator, "step_size": Shortest(*limits) if limits else Constant()}
        if weight := settings.pop("momentum", None):
            parts["momentum"] = ExponentialAverage(weight)
        at_average = settings.pop("fisher_at_average", method == "AIFVB")
        averaging = settings.pop("averaging", None)
        if method == "AIFVB":
            averaging = ifvb.Averaging(settings.pop("w", 2.0), settings.pop("burn_in", 0))
        q, lr = self.family(), settings.pop("lr", 1.0)
        if averaging is None:
            opt = ifvb.PreconditionedVI(q, metric, lr, **parts)
        else:
            averaging = copy.copy(averaging)
            averaging.metric_at_average = at_average
            opt = ifvb.AIFVB(q, lr, metric=metric, averaging=averaging, **parts)
        assert not settings, f"{settings} are not handed on"
        schedule = LambdaLR(opt, PowerSchedule(alpha, offset))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RejectedStepWarning)  # steps that are not taken are numbers too
            for step in range(steps):
                opt.step(minibatch(step) if self.target is minibatch else self.target)
                schedule.step()
        ends = {"lambda": q.vector.detach()}
        return ends | ({} if averaging is None else {"average": opt.average})


# ------------------------------------------------------------------------------------ targets


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=seeded(seed), dtype=FLOAT)


def coin(theta):
    """Example 1: 57 successes in 200 trials."""
    return (57 * theta.log() + 143 * torch.log1p(-theta))[..., 0]


def coin_bound(lam):
    """Minus the divergence from the posterior of Example 1."""
    posterior = torch.distributions.Beta(*torch.tensor([58.0, 144.0], dtype=FLOAT))
    return -torch.distributions.kl_divergence(torch.distributions.Beta(lam[..., 0], lam[..., 1]), posterior)


DATA = torch.tensor([11.0, 12, 8, 10, 9, 8, 9, 10, 13, 7], dtype=FLOAT)


def normal_sample(theta):
    """Example 2: a mean and a variance, N(0, 10²) and IG(1, 1) before the data."""
    mean, variance = theta.unbind(-1)
    away = (DATA - mean[..., None]).square().sum(-1)
    return -5 * variance.log() - 0.5 * away / variance - mean.square() / 200 - 2 * variance.log() - 1 / variance


X = torch.cat([torch.ones(40, 1, dtype=FLOAT), 0.5 * randn(40, 2, seed=1)], -1)
COUNTS = torch.poisson((X @ torch.tensor([1.0, 0.6, -0.4], dtype=FLOAT)).exp(), generator=seeded(2))


def poisson_prior(theta):
    return -theta.square().sum(-1) / 200


def poisson_likelihood(theta, batch):
    x, y = batch
    rate = theta @ x.mT
    return (y * rate - rate.exp()).sum(-1)


def poisson(theta):
    """Example 3, Poisson regression."""
    return poisson_likelihood(theta, (X, COUNTS)) + poisson_prior(theta)


def minibatch(step):
    """Ten rows of forty, others at each step."""
    model = DataLogJoint(poisson_likelihood, poisson_prior, [(X, COUNTS)], len(X))
    rows = slice(10 * (step % 4), 10 * (step % 4) + 10)
    return model.minibatch((X[rows], COUNTS[rows]))


NETWORK = ifvb.GroupLassoNetwork(randn(30, 2, seed=3), randn(30, seed=4), (2,))  # Example 4, d = 9


def curved(theta):
    """Two coordinates that are not normal together."""
    return -0.5 * theta[..., 0].square() - 2 * (theta[..., 1] - theta[..., 0].square()).square()


# ------------------------------------------------------------------------------------ families


def coupling():
    torch.manual_seed(0)
    return ifvb.ModuleFlow(ifvb.AffineCoupling(2, layers=2, hidden=2).double(), 2)


START = randn(9, seed=5), 0.3 * randn(9, seed=6), torch.full((9,), 0.2, dtype=FLOAT)
ZERO, EYE = torch.zeros(3, dtype=FLOAT), torch.eye(3, dtype=FLOAT)
TURNED = torch.linalg.qr(randn(2, 2, seed=8)).Q
PROBLEMS = {
    "beta": Problem(lambda: ifvb.Beta(torch.tensor([5.0, 45.0], dtype=FLOAT)), coin, ifvb.ControlVariate(50)),
    "normal inverse gamma": Problem(
        lambda: ifvb.NormalInverseGamma(torch.tensor([9.7, 0.5, 2.0, 3.0], dtype=FLOAT)),
        normal_sample,
        ifvb.ControlVariate(100),
    ),
    "mean field": Problem(lambda: ifvb.MeanFieldGaussian(torch.zeros(6, dtype=FLOAT)), poisson, ifvb.Pathwise(10)),
    "vec": Problem(lambda: ifvb.VecGaussian(ZERO, 0.1 * EYE), poisson, ifvb.Pathwise(10)),
    "vech": Problem(lambda: ifvb.VechGaussian(ZERO, 0.1 * EYE), poisson, ifvb.Pathwise(10)),
    "cholesky": Problem(lambda: ifvb.FlatCholesky(ZERO, 0.1 * EYE), poisson, ifvb.Pathwise(10)),
    "rank one": Problem(lambda: ifvb.RankOneGaussian(*START), NETWORK, ifvb.Pathwise(10)),
    "low rank": Problem(
        lambda: ifvb.LowRankGaussian(ZERO, 0.2 * randn(3, 2, seed=9), 0.3 + ZERO), poisson, ifvb.Pathwise(10)
    ),
    "orthogonal flow": Problem(
        lambda: ifvb.OrthogonalFlow(torch.zeros(2, dtype=FLOAT), TURNED, -0.5 * TURNED.sum(-1), TURNED.mT),
        curved,
        ifvb.Pathwise(10),
    ),
    "coupling flow": Problem(coupling, curved, ifvb.Pathwise(10)),
}
EXACT = ["beta", "normal inverse gamma", "mean field", "vech", "cholesky", "rank one"]

# ------------------------------------------------------------------------------------ cases

# whatever the family: the two algorithms, and every preconditioner
METHODS = {
    "IFVB": "IFVB",
    "AIFVB": "AIFVB",
    "identity": ifvb.Identity(),
    "adam": ifvb.Adam(),
    "exact": ifvb.Exact(),
    "matrix-free": ifvb.MatrixFree(20),
    "window": ifvb.Window(80, 20),
    "batch": ifvb.BatchFisher(40),
    "NAGVAC": ifvb.NAGVAC(),
    "published NAGVAC": ifvb.PublishedNAGVAC(),
}


def served(family, method):
    """Which of these are a pair."""
    if method == "exact":
        return family in EXACT
    return "rank one" in family if "NAGVAC" in method else (family, method) != ("orthogonal flow", "AIFVB")


# shorter steps where the metric does not limit them
SHORT = {"identity": {"lr": 0.1, "clip": 5.0}, "adam": {"lr": 0.5}}
CLIPPED = {family: {"clip": 5.0} for family in ("vech", "rank one", "low rank", "orthogonal flow", "coupling flow")}
CASES = {
    f"{family}, {name}": (
        PROBLEMS[family],
        {"method": method} | CLIPPED.get(family, {}) | SHORT.get(name, {}),
    )
    for family in PROBLEMS
    for name, method in METHODS.items()
    if served(family, name)
}
BETA, NORMAL, FIELD, CHOLESKY, VEC = (
    PROBLEMS[name] for name in ("beta", "normal inverse gamma", "mean field", "cholesky", "vec")
)
RANK_ONE, LOW_RANK, FLOW = (PROBLEMS[name] for name in ("rank one", "low rank", "orthogonal flow"))
CLOSED = BETA._replace(target=coin_bound, estimator=ifvb.ClosedForm())
SCORED = FIELD._replace(estimator=ifvb.ScoreFunction(50))
CLAMPED = CLOSED._replace(family=lambda: ifvb.Beta(torch.tensor([60.0, 5.0], dtype=FLOAT)))
TWO = BETA._replace(family=lambda: ifvb.Beta(torch.tensor([[5.0, 45.0], [25.0, 25.0]], dtype=FLOAT)))
AS_RUN = {"offset": 1.0, "warmup": 0, "radius": None}
ONE = AS_RUN | {"lr": 10.0, "eps": 100.0, "c_beta": 0.0, "samples": 10, "steps": 50}
NATURAL = {"alpha": 1.0, "offset": 1.0, "radius": None, "steps": 50}
TWO_ = AS_RUN | {"lr": 10.0, "eps": 1e4, "beta": 0.099, "alpha": 0.6, "steps": 30}
THREE = {"offset": 1000.0, "samples": 1, "eps": 1.0, "c_beta": 1.0, "beta": 0.1, "warmup": 200, "radius": None}
MANIFOLD = {"lr": 0.3, "clip": 2.0, "momentum": 0.6, "radius": None}
CASES |= {
    # the examples as the paper runs them
    "example 1, ordinary": (CLOSED, {"method": ifvb.Identity(), **NATURAL}),
    "example 1, natural": (CLOSED, {"method": ifvb.Exact(), **NATURAL}),
    "example 1, IFVB": (CLOSED, ONE | {"alpha": 0.8}),
    "example 1, AIFVB": (CLOSED, ONE | {"method": "AIFVB", "alpha": 0.55}),
    "example 1, Z terms": (CLOSED, ONE | {"alpha": 0.8, "c_beta": 1.0, "beta": 0.1}),
    "example 2, IFVB": (NORMAL, TWO_ | {"samples": 10, "c_beta": 0.01}),
    "example 2, AIFVB": (NORMAL, TWO_ | {"method": "AIFVB", "samples": 20, "c_beta": 0.001}),
    "example 3, IFVB": (CHOLESKY, THREE),
    "example 3, AIFVB": (CHOLESKY, THREE | {"method": "AIFVB"}),
    "example 3, as printed": (VEC, THREE | {"eps": 1e5, "warmup": 0}),
    "example 4, AIFVB": (RANK_ONE, MANIFOLD | {"method": "AIFVB"}),
    "example 5, IFVB": (FLOW, MANIFOLD),
    "example 5, ordinary": (FLOW, MANIFOLD | {"method": ifvb.Identity()}),
    # estimators and targets
    "score function": (SCORED, {}),
    "score function, AIFVB": (SCORED, {"method": "AIFVB", "radius": None, "clip": 1.0}),
    "control variate": (CHOLESKY._replace(estimator=ifvb.ControlVariate(30)), {}),
    "mini-batches": (CHOLESKY._replace(target=minibatch), {}),
    "mini-batches, AIFVB": (FIELD._replace(target=minibatch), {"method": "AIFVB"}),
    "a batch of runs": (TWO, {"method": "AIFVB"}),
    # averages
    "plain mean": (FIELD, {"method": "AIFVB", "w": 0.0}),
    "weights of power one": (FIELD, {"method": "AIFVB", "w": 1.0}),
    "burn-in": (FIELD, {"method": "AIFVB", "burn_in": 8}),
    "Fisher at the iterate": (FIELD, {"method": "AIFVB", "fisher_at_average": False}),
    "average of natural gradients": (FIELD, {"method": ifvb.Exact(), "averaging": ifvb.Averaging(1.0, 5)}),
    "batch Fisher at the average": (
        CHOLESKY,
        {"method": ifvb.BatchFisher(20), "averaging": ifvb.Averaging(), "fisher_at_average": True},
    ),
    # limits
    "no limit": (FIELD, {"radius": None}),
    "a short radius": (FIELD, {"radius": 1e-3}),
    "clip": (FIELD, {"radius": None, "clip": 0.5}),
    "clip and radius": (FIELD, {"method": "AIFVB", "radius": 0.01, "clip": 3.0}),
    "momentum": (FIELD, {"momentum": 0.6}),
    "momentum of Adam": (FIELD, {"method": ifvb.Adam((0.8, 0.9)), "lr": 0.1, "alpha": 0.0, "momentum": 0.6}),
    "a constant step": (FIELD, {"method": ifvb.Exact(), "lr": 0.2, "alpha": 0.0}),
    "a clamp": (CLAMPED, {"method": ifvb.Identity(), "lr": 40.0, "alpha": 0.0, "steps": 1}),
    # settings of the recursion, and of its rivals
    "default warm-up": (FIELD, {"warmup": None}),
    "no warm-up, one score": (FIELD, {"samples": 1, "warmup": 0, "steps": 50}),
    "many scores": (FIELD, {"samples": 150}),
    "eps and c_beta": (CHOLESKY, {"eps": 3.0, "c_beta": 0.2, "beta": 0.04, "alpha": 0.6, "offset": 20.0}),
    "dense recursion": (LOW_RANK, {"method": ifvb.Recursive(5, c_beta=0.0)}),
    "vectors dropped": (FIELD, {"method": ifvb.MatrixFree(5, keep=30), "clip": 0.5}),
    "blocks": (FIELD, {"method": ifvb.Blocks(ifvb.Recursive(5), [3, 3])}),
    "blocks of batches": (CHOLESKY, {"method": ifvb.Blocks(ifvb.BatchFisher(4, 0.1), [3, 3, 3])}),
    "undamped batch": (FIELD, {"method": ifvb.BatchFisher(40, rho=0.0)}),
    "small window": (CHOLESKY, {"method": ifvb.Window(4, 2, rho=0.1)}),
}
GOLDEN = json.loads(FILE.read_text()) if FILE.exists() else {}


@pytest.mark.sparse(3)
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_those_of_before(name):
    problem, settings = CASES[name]
    ends = problem.run(**settings)
    assert ends.keys() == GOLDEN[name].keys()
    for key, value in ends.items():
        golden = torch.tensor(GOLDEN[name][key], dtype=FLOAT)
        assert value.shape == golden.shape
        assert float((value - golden).abs().max()) <= TOLERANCE * float(golden.abs().max()), key


def test_every_case_is_stored_and_has_moved():
    """No value without a case; no two cases with one end; no λ that stayed at its start, which would hold nothing."""
    assert GOLDEN.keys() == CASES.keys()
    assert len({json.dumps(ends) for ends in GOLDEN.values()}) == len(GOLDEN)
    for family, problem in PROBLEMS.items():
        start = problem.family().vector.detach()
        for name in (name for name in METHODS if served(family, name)):
            assert not torch.allclose(torch.tensor(GOLDEN[f"{family}, {name}"]["lambda"], dtype=FLOAT), start)


if __name__ == "__main__":
    found = {name: problem.run(**settings) for name, (problem, settings) in CASES.items()}
    rows = [
        f"{json.dumps(name)}: {json.dumps({k: v.tolist() for k, v in ends.items()})}" for name, ends in found.items()
    ]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
