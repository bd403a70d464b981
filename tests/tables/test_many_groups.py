"""Limits that grow with the number of groups: formulas, and evaluations of fits that they keep few."""

import functools

import pytest
import torch
from helpers import DTYPE, close
from test_mixed import epilepsy, hers, toenail

from torchngvi import SRVN, CholeskyGaussian, NaturalGradientVI, PrecisionCholeskyGaussian, fit
from torchngvi.interfaces import Local, Path, Trial
from torchngvi.metrics import QuasiNewton
from torchngvi.models import MixedLogJoint, MixedPrior
from torchngvi.rules import NaturalGradient
from torchngvi.stepsizes import SufficientDecrease, raised
from torchngvi.structures import Dense, Diagonal, arrow, block_diagonal, forest, nested

LOCAL = {"intercept": 1, "slope": 2}


@functools.cache
def model_of(family, effects, groups, prior=None):
    """Five rows a group, two fixed effects, random effects of standard deviation 0.7."""
    generator = torch.Generator().manual_seed(groups)
    number, r = torch.arange(groups).repeat_interleave(5), LOCAL[effects]
    x = torch.randn(len(number), dtype=DTYPE, generator=generator)
    X = torch.stack([torch.ones_like(x), x], -1)
    b = 0.7 * torch.randn(groups, r, dtype=DTYPE, generator=generator)
    eta = 0.5 * X.sum(-1) + (b[number] * X[:, :r]).sum(-1)
    if family == "poisson_log":
        y = torch.poisson(eta.exp(), generator)
    else:
        y = (torch.rand(len(number), dtype=DTYPE, generator=generator) < eta.sigmoid()).to(DTYPE)
    return MixedLogJoint(X, y, (X[:, :r], number), family, prior=prior)


def test_leaves():
    """Blocks without children are counted, and what a closed pattern has is one."""
    assert arrow(groups=7, local=2, globals=3).leaves == 7
    assert arrow(local=[1, 2, 2], globals=1).leaves == 3
    assert forest(parents=[4, 4, 3, 4, -1], sizes=[1, 1, 1, 1, 1]).leaves == 3
    assert nested([0, 0, 1, 2], [0, 0, 1], local=[1, 1, 1], globals=2).leaves == 4
    for pattern in (Dense(5), Diagonal(5), block_diagonal([2, 3])):
        assert pattern.leaves == 1


def test_the_limit_grows_with_the_groups_near_the_optimum_alone():
    norm2 = torch.tensor([0.0, 1000.0, 1000.1, torch.nan, torch.inf], dtype=DTYPE)
    close(raised(1.0, norm2, 1000), torch.tensor([100.0, 100.0, 1.0, 1.0, 1.0], dtype=DTYPE), 0.0)
    for least in (1.0, 4.0):
        for leaves in (1, 2, 10):  # of a tenth each: no more than the least
            close(raised(least, norm2, leaves), torch.full_like(norm2, least), 0.0)


def steps(norm2, leaves):
    return Path(lambda rho: None, lambda: norm2, lambda: norm2, leaves=leaves)


def test_the_first_reach_is_raised_until_a_trial_fails():
    control, norm2 = SufficientDecrease(), torch.tensor([900.0, 1100.0], dtype=DTYPE)
    state = control.init(norm2)
    reach = torch.tensor([200.0**0.5, 8.0**0.5], dtype=DTYPE)  # ½ reach² of 100, and of 4
    close(control.propose(steps(norm2, 1000), 1.0, norm2, state), reach / norm2.sqrt(), 1e-14)
    close(control.propose(steps(norm2, 1), 1.0, norm2, state), 8.0**0.5 / norm2.sqrt(), 1e-14)
    one = torch.ones_like(norm2)
    trial = Trial(one, 2 * one, norm2, reach, reach / norm2.sqrt())
    kept, state = control.judge(trial, state)
    assert not bool(kept.any())
    rho = control.propose(steps(norm2, 1000), 1.0, norm2, state)
    assert bool((rho * norm2.sqrt() <= 0.25 * reach).all())


@pytest.mark.parametrize(("size", "kept"), [(0.1, 1.0), (2.0, 0.0)])
def test_pairs_of_long_steps_are_kept_near_the_optimum_of_many_groups(size, kept):
    """A step of length 3: too long for a dense q, and short for 100 groups, where each has a gradient below 1."""
    for q, expected in (
        (PrecisionCholeskyGaussian(101, structure=arrow(groups=100, local=1, globals=1), dtype=DTYPE), kept),
        (CholeskyGaussian(101, dtype=DTYPE), 0.0),
    ):
        metric = QuasiNewton()
        state = metric.init(q)
        P = torch.zeros_like(q.coordinates.matrix)
        first = Local(torch.full((101,), 3 / 101**0.5 + size, dtype=DTYPE), P)
        _, state = metric(q, first, torch.zeros((), dtype=DTYPE), state)
        state["direction"] = state["direction"] * 3 / state["direction"].norm()
        _, state = metric(q, Local(torch.full((101,), size, dtype=DTYPE), P), torch.ones((), dtype=DTYPE), state)
        assert float(state["kept"].sum()) == expected


@pytest.mark.sparse(3)
@pytest.mark.parametrize("groups", [100, 1000])
@pytest.mark.parametrize(
    ("family", "effects", "most"),
    [
        ("poisson_log", "intercept", 10),
        ("poisson_log", "slope", 14),
        ("bernoulli_logit", "intercept", 14),
        ("bernoulli_logit", "slope", 32),
    ],
)
def test_evaluations_do_not_grow_with_the_groups(family, effects, most, groups):
    model = model_of(family, effects, groups, prior=MixedPrior(10.0, "kass-natarajan"))
    result = fit(model.posterior(), model, tolerance=1e-3, progress=False)
    assert result.converged
    assert result.evaluations <= most


@pytest.mark.accuracy
def test_a_start_far_away_is_not_lost():
    """From m = 0 and T = 1, with |∇L|² far above the number of groups, to the same optimum."""
    model = model_of("poisson_log", "slope", 100)
    best = fit(model.posterior(), model, tolerance=1e-3, progress=False)
    q = PrecisionCholeskyGaussian(model.dim, structure=model.structure, dtype=DTYPE)
    far = fit(q, model, tolerance=1e-3, max_evaluations=200, progress=False)
    assert far.trace[0].norm > 100
    assert far.converged
    assert far.loss == pytest.approx(best.loss, abs=1e-5)


@pytest.mark.sparse(2)
@pytest.mark.parametrize(("make", "least"), [(epilepsy, 687.239618), (toenail, 654.235130), (hers, 5052.105393)])
def test_square_root_variational_newton_is_as_quick(make, least):
    """SR-VN on T, to 1e-6 nats of the optimum: at most 20 evaluations with L-BFGS."""
    model = make()
    q = model.posterior()
    result = fit(q, model, SRVN(q), tolerance=1e-3, progress=False)
    assert result.converged
    assert result.loss < least + 2e-6
    assert result.evaluations <= 20


def test_square_root_variational_newton_without_memory_is_not_much_slower():
    model = epilepsy()
    q = model.posterior()
    plain = NaturalGradientVI(q, NaturalGradient(), step_size=SufficientDecrease())
    result = fit(q, model, plain, tolerance=2e-4, progress=False)
    assert result.converged
    assert result.loss < 687.239618 + 2e-6
    assert result.evaluations <= 65
