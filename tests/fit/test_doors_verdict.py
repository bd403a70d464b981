"""The verdict is a function of q, log joint and seed, and a lower bound counts as the worse word."""

import itertools
import math
import pickle
import time
import warnings

import pytest
import torch
from torch.nn.functional import logsigmoid

from torchngvi import CholeskyGaussian, DiagonalGaussian, LogJoint, examine, fit, refine
from torchngvi.diagnostics import ExaminationSettings, laplace_margin
from torchngvi.diagnostics.importance import corrected_moments
from torchngvi.diagnostics.verdict import agrees
from torchngvi.models import GroupedLogJoint
from torchngvi.models.factors import Guarded
from torchngvi.refinement import RefinementWarning

F64 = torch.float64


def funnel(theta):
    """Neal's, in three coordinates; half as wide, so that a Gaussian is about right or worse."""
    v, x = theta[..., 0], theta[..., 1:]
    return -0.5 * (v / 0.8).square() - 0.5 * ((-v).exp() * x.square().sum(-1) + x.shape[-1] * v)


def half_normal(theta):
    """A log joint whose budget decides: the scale of few numbers, in two coordinates."""
    mu, log_sd = theta[..., 0], theta[..., 1]
    y = torch.tensor([1.1, -0.4, 0.6], dtype=theta.dtype, device=theta.device)
    inner = -0.5 * ((y - mu[..., None]) / log_sd[..., None].exp()).square().sum(-1) - 3 * log_sd
    return inner - 0.5 * (mu / 3).square() - 0.5 * (2 * log_sd).exp() + log_sd


def told(verdict):
    """All of a verdict, bit for bit."""
    parts = [verdict.word, verdict.reasons, verdict.effort, str(verdict), verdict.margins, verdict.modes]
    if verdict.sampled is not None:
        found = verdict.sampled
        parts += [found.corrected.mean.tolist(), found.corrected.sd.tolist(), found.from_q, found.draws]
    if verdict.shape is not None:
        parts += [verdict.shape.log_sd.tolist(), verdict.shape.tails.tolist(), verdict.shape.confirmed.tolist()]
    return repr(parts)


CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")


def clock_of(step, monkeypatch):
    """Clocks of which each call is so many seconds after the last."""
    for name in CLOCKS:
        counted = itertools.count()
        monkeypatch.setattr(time, name, lambda counted=counted: 1e6 + step * next(counted))
        nanoseconds = itertools.count()
        monkeypatch.setattr(
            time, f"{name}_ns", lambda counted=nanoseconds: int(1e15 + 1e9 * step * next(counted)), raising=False
        )


def fitted(log_joint, dim, **options):
    torch.manual_seed(0)
    q = CholeskyGaussian(dim, dtype=F64)
    return q, fit(q, log_joint, progress=False, **options)


@pytest.mark.parametrize(("log_joint", "dim"), [(funnel, 3), (half_normal, 2)], ids=["funnel", "normal sample"])
def test_no_clock_decides_a_verdict(log_joint, dim, monkeypatch):
    """Clocks that stand still, and clocks that jump by hours: the same word, numbers, and number of calls."""
    expected = told(fitted(log_joint, dim)[1].verdict)
    for step in (0.0, 3600.0):
        with monkeypatch.context() as patched:
            clock_of(step, patched)
            assert told(fitted(log_joint, dim)[1].verdict) == expected


def pyro_guide():
    pyro = pytest.importorskip("pyro")
    pyro_parts = pytest.importorskip("torchngvi.adapters.pyro")
    normal, y = pyro.distributions.Normal, torch.tensor([0.3, -0.4, 0.9, 0.1], dtype=F64)

    def model():
        scale = pyro.sample("scale", pyro.distributions.HalfNormal(torch.ones((), dtype=F64)))
        with pyro.plate("groups", 4):
            effect = pyro.sample("effect", normal(torch.zeros((), dtype=F64), scale))
            pyro.sample("y", normal(effect, 0.5), obs=y)

    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    guide = pyro_parts.AutoGaussian(model)
    return pyro_parts.fit_guide(model, guide, options={"progress": False})


def warped():
    torch.manual_seed(1)
    return fit(CholeskyGaussian(2, dtype=F64).warped(), half_normal, progress=False)


def forest():
    torch.manual_seed(1)
    target = GroupedLogJoint(
        lambda b, g, y: -0.5 * (b[0] / g[0].exp()) ** 2 - g[0] - (y - b[0]) ** 2,
        lambda g: -0.5 * g[0] ** 2,
        [torch.tensor([0.3, -1.2, 2.0], dtype=F64)],
        local=1,
        globals=1,
    )
    return fit(target.posterior(), target, progress=False)


@pytest.mark.accuracy
@pytest.mark.parametrize("door", [pyro_guide, warped, forest])
def test_no_clock_decides_at_other_doors(door, monkeypatch):
    expected = door()
    assert expected.verdict.word in ("fits", "about right", "does not fit")
    clock_of(3600.0, monkeypatch)
    assert told(door().verdict) == told(expected.verdict)


@pytest.mark.accuracy
def test_a_slow_log_joint_is_examined_as_far():
    def slow(theta):
        time.sleep(0.02)
        return half_normal(theta)

    quick = fitted(half_normal, 2)[1]
    assert quick.verdict.effort.values > 1025  # it was looked at beyond the first glance
    q = CholeskyGaussian(2, dtype=F64)
    torch.manual_seed(0)
    assert told(fit(q, slow, progress=False).verdict) == told(quick.verdict)


@pytest.mark.accuracy
def test_the_bar_and_the_history_of_the_generator_make_no_difference():
    expected = told(fitted(funnel, 3)[1].verdict)
    torch.manual_seed(0)
    q = CholeskyGaussian(3, dtype=F64)
    assert told(fit(q, funnel, progress=True).verdict) == expected
    found = []
    for history in (0, 17):
        torch.manual_seed(3)
        torch.rand(history)
        before = torch.get_rng_state()
        found.append(told(examine(q, funnel, seed=4)))
        assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1]
    assert told(examine(q, funnel, seed=5)) != found[0]  # of which the seed is a part


@pytest.mark.accuracy
def test_threads_make_no_other_verdict():
    """Sums over threads are rounded in another order, from which no word and no count of calls may follow."""
    q, _ = fitted(funnel, 3, examine=False)
    threads = torch.get_num_threads()
    try:
        verdicts = []
        for number in (1, 2):
            torch.set_num_threads(number)
            verdicts.append(examine(q, funnel))
    finally:
        torch.set_num_threads(threads)
    first, second = verdicts
    assert (first.word, first.reasons, first.effort) == (second.word, second.reasons, second.effort)
    torch.testing.assert_close(first.sampled.corrected.sd, second.sampled.corrected.sd, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["mixture", "importance", "fan"])
def test_a_refinement_has_no_clock(kind, monkeypatch):
    """What it finds and what it warns of: the funnel is at the border of a warning."""
    q, _ = fitted(funnel, 3, examine=False)

    def refined():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = str(refine(q, funnel, kind=kind))
        assert all(issubclass(warning.category, RefinementWarning) for warning in caught)
        return found, [str(warning.message) for warning in caught]

    expected = refined()
    clock_of(3600.0, monkeypatch)
    assert refined() == expected


def test_settings_say_how_many_calls():
    q, _ = fitted(half_normal, 2, examine=False)
    usual = examine(q, half_normal)
    few = examine(q, half_normal, settings=ExaminationSettings(draws=1024, more_draws=2048))
    assert few.sampled.draws < usual.sampled.draws
    assert few.effort.values < usual.effort.values


def tournament(players, spread, seed):
    """Who won and who lost, each pair once."""
    generator = torch.Generator().manual_seed(seed)
    ability = spread * torch.randn(players, generator=generator, dtype=F64)
    i, j = torch.triu_indices(players, players, 1)
    won = torch.rand(len(i), generator=generator, dtype=F64) < torch.sigmoid(ability[i] - ability[j])
    return torch.where(won, i, j), torch.where(won, j, i)


def bradley_terry(winner, loser, centred):
    """Abilities N(0, s²) of a half-normal s: θ = (log s, abilities), or (log s, abilities / s)."""

    def log_joint(theta):
        log_s, x = theta[..., :1], theta[..., 1:]
        ability = x if centred else log_s.exp() * x
        z = x / log_s.exp() if centred else x
        volume = -x.shape[-1] * log_s if centred else 0.0
        prior = -0.5 * (2 * log_s).exp() + log_s + volume
        games = logsigmoid(ability[..., winner] - ability[..., loser])
        return prior[..., 0] - 0.5 * z.square().sum(-1) + games.sum(-1)

    return log_joint


@pytest.mark.accuracy
@pytest.mark.parametrize("centred", [True, False], ids=["centred", "non-centred"])
def test_bradley_terry_does_not_fit_in_either_form(centred):
    """The sd of log s is .572 by quadrature over log s, 2.1 and 1.9 times that of the best Gaussians."""
    winner, loser = tournament(10, 1.0, 0)
    q, result = fitted(bradley_terry(winner, loser, centred), 11)
    assert result.verdict.word == "does not fit"
    assert 1.7 < 0.572 / float(q.stddev[0]) < 2.2
    for seed in range(2):
        verdict = examine(q, bradley_terry(winner, loser, centred), seed=seed)
        assert verdict.word == "does not fit", str(verdict)
        assert verdict.reasons[0].startswith("theta[0]: sd ")


def censored(theta):
    """Weibull survival times, four events and four that were censored: log shape and log scale."""
    y = torch.tensor([0.31, 0.52, 0.77, 0.95, 1.2, 1.2, 1.2, 1.2], dtype=theta.dtype)
    seen = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0], dtype=theta.dtype)
    log_shape, log_scale = theta[..., :1], theta[..., 1:]
    reach = log_shape.exp() * (y.log() - log_scale)
    hazard = log_shape + reach - y.log()
    return -0.5 * theta.square().sum(-1) + (seen * hazard - reach.exp()).sum(-1)


def truth_on_a_grid(log_joint, low, high, nodes=801):
    axis = torch.linspace(low, high, nodes, dtype=F64)
    theta = torch.cartesian_prod(axis, axis)
    weight = log_joint(theta).softmax(0)
    mean = weight @ theta
    return (weight @ (theta - mean).square()).sqrt()


def test_censored_survival_times_have_the_right_word():
    q, result = fitted(censored, 2)
    off = float((truth_on_a_grid(censored, -6.0, 9.0) / q.stddev).max())
    right = "does not fit" if off >= 1.42 else "about right" if off >= 1.22 else "fits"
    assert result.verdict.word == right, f"{off:.2f}: {result.verdict}"


@pytest.mark.parametrize("scale", [0.7, 0.8, 1.0])
def test_at_least_is_never_about_right(scale):
    def log_joint(theta):
        v, x = theta[..., 0], theta[..., 1:]
        return -0.5 * (v / scale).square() - 0.5 * ((-v).exp() * x.square().sum(-1) + x.shape[-1] * v)

    q, _ = fitted(log_joint, 5, examine=False)
    for seed in range(4):
        verdict = examine(q, log_joint, seed=seed)
        said = " ".join(verdict.reasons)
        assert "at least" not in said or verdict.word == "does not fit", str(verdict)


@pytest.mark.parametrize("family", [CholeskyGaussian, DiagonalGaussian])
def test_a_gaussian_fits_with_any_seed(family):
    sd = torch.tensor([1e-3, 1.0, 50.0], dtype=F64)
    q = family.from_moments(torch.zeros(3, dtype=F64), torch.diag(sd.square()))
    for seed in range(5):
        assert examine(q, lambda theta: -0.5 * (theta / sd).square().sum(-1), seed=seed).word == "fits"


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_margin_of_neals_funnel(dtype):
    """All others are Gaussian given the first: its margin is exact, N(0, 3²), from a q that is six times too narrow."""

    def neal(theta):
        v, x = theta[..., 0], theta[..., 1:]
        return -v.square() / 18 - 0.5 * ((-v).exp() * x.square().sum(-1) + x.shape[-1] * v)

    q = CholeskyGaussian(5, scale=0.5, dtype=dtype)
    found = laplace_margin(q, LogJoint(neal), 0)
    assert found.sd == pytest.approx(3.0, rel=0.01)
    assert abs(found.mean) < 0.02
    assert found.log_evidence == pytest.approx(math.log(3) + 2.5 * math.log(2 * math.pi), abs=0.01)


def test_a_margin_of_the_log_gamma_density():
    """Skewed: ψ(3) and √ψ'(3); with a temperature the density is p^(1/γ)."""
    q = CholeskyGaussian(2, mean=0.9, scale=0.6, dtype=F64)
    for gamma in (1.0, 2.0):
        a = torch.tensor(3.0 / gamma, dtype=F64)
        target = LogJoint(lambda theta: (3 * theta - theta.exp()).sum(-1), temperature=gamma)
        found = laplace_margin(q, target, 1)
        assert found.mean == pytest.approx(float(torch.digamma(a)) + math.log(gamma), abs=0.01)
        assert found.sd == pytest.approx(float(torch.polygamma(1, a)) ** 0.5, rel=0.01)


def test_a_margin_keeps_its_budget_and_says_where_there_is_none():
    q, target = CholeskyGaussian(3, scale=0.5, dtype=F64), Guarded(LogJoint(funnel))
    assert laplace_margin(q, target, 0, max_gradients=60) is None
    assert target.gradients <= 60
    assert laplace_margin(q, LogJoint(lambda theta: theta.square().sum(-1)), 0) is None  # no maximum
    assert laplace_margin(q, LogJoint(lambda theta: theta.sum(-1) * torch.nan), 0) is None


def test_a_margin_where_the_log_joint_raises():
    """As in `examine`, an error far away is a place without a value."""

    def guarded(theta):
        if bool((theta > 2).any()):
            raise ValueError("no such place")
        return -0.5 * theta.square().sum(-1)

    assert laplace_margin(CholeskyGaussian(2, dtype=F64), LogJoint(guarded), 0) is None
    with pytest.raises(ValueError, match="no such place"):  # at q itself
        laplace_margin(CholeskyGaussian(2, mean=torch.full((2,), 5.0), dtype=F64), LogJoint(guarded), 0)


def test_a_margin_is_left_out_where_the_evidence_says_that_the_method_does_not_hold():
    """One of two normals has half of the evidence, and margins that end between the two."""

    def two(theta):
        return torch.logaddexp(*(-0.5 * ((theta - at) / 0.5).square().sum(-1) for at in (0.0, 3.0)))

    q, target = CholeskyGaussian(2, scale=0.5, dtype=F64), LogJoint(two)
    margin = laplace_margin(q, target, 0)
    found = corrected_moments(q, target, num_samples=4096, seed=0)
    assert margin.sd == pytest.approx(0.5, rel=0.05)
    assert not agrees(margin, found)
    assert agrees(margin._replace(log_evidence=found.corrected.log_evidence - 0.3), found)
    assert examine(q, two, modes=()).margins == {}


def test_a_verdict_with_margins_goes_through_a_pickle_and_prints_them():
    q, _ = fitted(funnel, 3, examine=False)
    verdict = next(found for seed in range(8) if (found := examine(q, funnel, seed=seed)).margins)
    assert "along its margin, by Laplace's method: " in str(verdict)
    assert str(pickle.loads(pickle.dumps(verdict))) == str(verdict)


def test_a_verdict_of_0_2_0_is_read_and_printed():
    """It had no margins."""
    verdict = examine(CholeskyGaussian(2, dtype=torch.float64), lambda theta: -0.5 * theta.square().sum(-1))
    assert not verdict.margins
    state = {name: value for name, value in vars(verdict).items() if name != "margins"}
    older = type(verdict).__new__(type(verdict))
    older.__setstate__(state)
    assert str(older) == str(verdict)


def test_the_sentence_leaves_weights_to_the_table():
    q, result = fitted(half_normal, 2)
    assert "k-hat" not in str(result)
    assert "k-hat" in result.summary()
