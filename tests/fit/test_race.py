"""Where a fit of a log joint starts: modes that are trusted, starts that race, draws that fail, budgets."""

import itertools
import math
import re

import pytest
import torch
from helpers import eight_schools

from torchngvi import CholeskyGaussian, DataLogJoint, DiagonalGaussian, LogJoint, NaturalGaussian, fit
from torchngvi.averaging import ExpectationAverage
from torchngvi.expectations.draws import Fixed
from torchngvi.fitting import Criterion, Gradients, Seconds
from torchngvi.fitting.engine import Stop
from torchngvi.fitting.race import Compared, Race, Start, put_at_best, sampled_loss
from torchngvi.fitting.rescue import Rescue
from torchngvi.fitting.sample_average import SampleAverages
from torchngvi.fitting.starts import Starts
from torchngvi.mode import find_mode
from torchngvi.models.guarded import Guarded
from torchngvi.posteriors import PrecisionCholeskyGaussian
from torchngvi.structures import block_diagonal

TUMOURS = (
    "0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1 2 2 2 2 2 2 2 2 2 1 5 2 5 3 2 7 7 3 3 2 9 10 "
    "4 4 4 4 4 4 4 10 4 4 4 5 11 12 5 5 6 5 6 6 6 6 16 15 15 9 4"
)
RATS = (
    "20 20 20 20 20 20 20 19 19 19 19 18 18 17 20 20 20 20 19 19 18 18 25 24 23 20 20 20 20 20 20 10 49 19 46 27 17 "
    "49 47 20 20 13 48 50 20 20 20 20 20 20 20 48 19 19 19 22 46 49 20 20 23 19 22 20 20 20 52 46 47 24 14"
)


def rats():
    """Tumours in 71 groups of rats (Gelman et al., Bayesian Data Analysis, chapter 5), less a constant."""
    y, n = (torch.tensor([float(x) for x in text.split()], dtype=torch.float64) for text in (TUMOURS, RATS))
    assert (int(n.sum()), int(y.sum())) == (1739, 267)
    ways = torch.lgamma(n + 1) - torch.lgamma(y + 1) - torch.lgamma(n - y + 1)

    def log_joint(theta):
        logit, size, p = theta[..., 0], 1 + theta[..., 1].exp(), theta[..., 2:]
        a, b = size * logit.sigmoid(), size * (-logit).sigmoid()
        top = -torch.nn.functional.softplus(torch.stack([logit, -logit], -1)).sum(-1)
        top = top + math.log(1.5) - 2.5 * size.log() + theta[..., 1]
        yes, no = -torch.nn.functional.softplus(-p), -torch.nn.functional.softplus(p)
        beta = torch.lgamma(size) - torch.lgamma(a) - torch.lgamma(b)
        return top + 71 * beta + ((a[..., None] + y) * yes + (b[..., None] + n - y) * no + ways).sum(-1)

    return log_joint


def log_gamma(shape):
    return lambda theta: (shape * theta - theta.exp()).sum(-1)


def funnel(theta):
    v, x = theta[..., 0], theta[..., 1:]
    return -v.square() / 18 - 0.5 * torch.exp(-v) * x.square().sum(-1) - 4.5 * v


def banana(theta):
    return -theta[..., 0].square() / 8 - 5 * (theta[..., 1] - theta[..., 0].square()).square()


def product(theta):
    return -0.5 * ((theta.prod(-1) - 1) / 0.2).square() - 0.5 * theta.square().sum(-1)


def poisson(rows=480, dim=240):
    generator = torch.Generator().manual_seed(0)
    X = 0.5 * torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    w = 0.1 * torch.randn(dim, generator=generator, dtype=torch.float64)
    y = torch.poisson((X @ w + 0.3).exp(), generator=generator)

    def log_joint(theta):
        eta = theta @ X.mT
        return (y * eta - eta.exp()).sum(-1) - 0.5 * theta.square().sum(-1)

    return log_joint


def quiet(q, target, seed=0, **options):
    torch.manual_seed(seed)
    return fit(q, target, progress=False, **options)


def started(function, dim, family=CholeskyGaussian, **options):
    """q where a fit begins, and the starts that led there."""
    q = family(dim, dtype=torch.float64, **options)
    starts = Starts(q, Guarded(LogJoint(function)), seed=1)
    with torch.no_grad():
        starts.first()
    return q, starts


# ------------------------------------------------------------------------------------ trust


def correlated(dim):
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    H = root @ root.mT + 0.1 * torch.eye(dim, dtype=torch.float64)
    return lambda theta: -0.5 * ((theta @ H) * theta).sum(-1)


FAMILIES = [CholeskyGaussian, NaturalGaussian, PrecisionCholeskyGaussian, DiagonalGaussian]


class TestTrust:
    @pytest.mark.parametrize("shape", [1.0, 3.0])
    def test_modes_that_are_trusted(self, shape):
        """Of log-gamma variables the gap is .12 and .04 nats a coordinate."""
        q, starts = started(log_gamma(shape), 5)
        assert not starts.raced
        assert starts.evidence > -math.inf
        torch.testing.assert_close(q.mean, torch.full_like(q.mean, math.log(shape)), rtol=0, atol=0.3)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_correlations_that_a_family_lacks_are_no_distrust(self, family):
        """What a mean field misses of Laplace's evidence is known beforehand."""
        q, starts = started(correlated(8), 8, family)
        assert not starts.raced
        assert starts.target.gradients < 40

    @pytest.mark.parametrize("temperature", [0.1, 10.0])
    def test_the_promise_is_in_units_of_the_temperature(self, temperature):
        q = CholeskyGaussian(5, dtype=torch.float64)
        starts = Starts(q, Guarded(LogJoint(log_gamma(100.0), temperature=temperature)), seed=1)
        with torch.no_grad():
            starts.first()
        assert not starts.raced

    @pytest.mark.parametrize(
        ("function", "dim"),
        [(product, 2), (eight_schools(False), 10), (funnel, 10), (banana, 2), (eight_schools(True), 10)],
    )
    def test_modes_that_are_not(self, function, dim):
        """Gaps of 1.5 nats a coordinate and more, or no mode at all."""
        _, starts = started(function, dim)
        assert starts.raced
        assert starts.evidence == -math.inf

    def test_a_trusted_mode_costs_what_the_search_does(self):
        """Six gradients in five dimensions: one, a Hessian, a step at least; then values alone."""
        _, starts = started(correlated(5), 5)
        assert starts.target.gradients <= 1 + 5 + 2 + 5
        assert starts.target.values == 2 * 32

    def test_the_best_scale_of_a_mode_not_the_first_finite_one(self):
        """Beyond the mode the density falls off a cliff of finite height, which the scale 1 meets."""

        def cliff(theta):
            return -0.5 * theta.square().sum(-1) - 500 * (theta.abs() > 1).sum(-1)

        q = CholeskyGaussian(3, dtype=torch.float64)
        starts = Starts(q, Guarded(LogJoint(cliff)), seed=1)
        with torch.no_grad():
            found = find_mode(starts.target, starts.mean, 100)
            starts.place(found)
        assert float(q.stddev.max()) == pytest.approx(0.3, rel=1e-3)


# ------------------------------------------------------------------------------------ the race


@pytest.mark.accuracy
@pytest.mark.parametrize("seed", range(3))
def test_rats(seed, pooled):
    """The mode is a collapse; the best Gaussian has an ELBO of -165.24."""
    q = CholeskyGaussian(73, dtype=torch.float64)
    result = quiet(q, rats(), seed, examine=False)
    assert result.converged, result.reason
    assert result.loss == pytest.approx(165.24, abs=0.1)
    assert result.gradients + 0.4 * result.values < 60_000
    assert ("from the best of the starts that raced" in result.reason) != pooled
    # the posterior of log(kappa - 1) by quadrature has the mean 2.58
    assert float(q.mean[1]) == pytest.approx(2.55, abs=0.15)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("no_pool")
def test_families_race_alike(family):
    q = family(10, dtype=torch.float64)
    result = quiet(q, funnel)
    assert result.converged, result.reason
    assert "from the best of the starts that raced" in result.reason
    if family is not DiagonalGaussian:
        assert -result.loss == pytest.approx(8.42, abs=0.15)


@pytest.mark.parametrize("family", FAMILIES[:3])
def test_families_by_a_pool_need_no_race(family):
    result = quiet(family(10, dtype=torch.float64), funnel)
    assert result.converged, result.reason
    assert "raced" not in result.reason
    assert -result.loss == pytest.approx(8.42, abs=0.15)


def test_blocks_race():
    q = CholeskyGaussian(10, structure=block_diagonal([1, 9]), dtype=torch.float64)
    result = quiet(q, funnel)
    assert result.converged, result.reason
    assert -result.loss == pytest.approx(8.42, abs=0.15)


@pytest.mark.usefixtures("no_pool")
def test_float32_races():
    q = CholeskyGaussian(10)
    result = quiet(q, funnel)
    assert q.dtype == torch.float32
    assert -result.loss == pytest.approx(8.42, abs=0.2)


@pytest.mark.usefixtures("no_pool")
def test_the_same_seed_is_the_same_race():
    runs = []
    for _ in range(2):
        q = CholeskyGaussian(10, dtype=torch.float64)
        result = quiet(q, eight_schools(True), 3, max_evaluations=5)
        runs.append((q.scale_tril.clone(), result.loss, result.gradients, result.values))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1:] == runs[1][1:]


def race_of(function, dim, *means, over=lambda: False):
    q = CholeskyGaussian(dim, dtype=torch.float64)
    target, starts = Guarded(LogJoint(function)), []
    for mean in means:
        q.initialize_(mean)
        starts.append(Start("", q.snapshot(), sampled_loss(q, target, 32, 3)))
    with torch.no_grad():
        race = Race(q, target, 1, over)
        race.run(starts)
    return q, target, starts, race


class TestRace:
    def test_the_nearer_start_wins(self):
        q, target, _, _ = race_of(lambda t: -0.5 * t.square().sum(-1), 2, 40.0, 0.5)
        assert float(q.mean.abs().max()) < 0.5
        # as long as the far one could overtake in another block both run, and for seven blocks at most; then two idle
        assert 2 * 512 <= target.gradients <= (2 * 7 + 2) * 512

    def test_ties_are_no_trouble(self):
        q, target, starts, _ = race_of(lambda t: -0.5 * t.square().sum(-1), 2, 0.0, 0.0)
        assert starts[0].coordinates.vector is not starts[1].coordinates.vector
        assert 2 * 512 <= target.gradients <= (2 + 2) * 512
        assert float(q.mean.abs().max()) < 0.5

    def test_a_start_that_is_not_finite_does_not_run(self):
        def half(theta):
            return torch.where(theta[..., 0] > -5, -0.5 * theta.square().sum(-1), -torch.inf)

        _, target, starts, _ = race_of(half, 2, 0.0, -50.0)
        assert starts[1].loss == math.inf
        assert target.gradients <= 3 * 512  # two blocks that gain nothing end the race

    def test_none_that_is_finite(self):
        q, target, _, _ = race_of(lambda t: t.sum(-1) * torch.nan, 2, 0.0)
        assert target.gradients == 0
        assert torch.equal(q.mean, torch.zeros_like(q.mean))

    def test_it_goes_on_while_it_gains(self):
        q, target, _, _ = race_of(lambda t: -0.5 * t.square().sum(-1), 3, 200.0)
        assert float(q.mean.abs().max()) < 2
        assert 512 < target.gradients <= 40 * 512

    def test_no_more_than_forty_blocks(self):
        """A density that can be gained from for ever."""
        _, target, _, _ = race_of(lambda t: 10 * t.sum(-1), 2, 0.0)
        assert target.gradients <= 40 * 512

    def test_a_budget_ends_it(self):
        _, target, _, _ = race_of(lambda t: -0.5 * t.square().sum(-1), 2, 40.0, over=lambda: True)
        assert target.gradients == 0

    def test_steps_that_are_never_finite_end_a_block(self):
        q, target, _, race = race_of(lambda t: -0.5 * t.square().sum(-1), 2, 0.0)
        race.target = Guarded(LogJoint(lambda t: t.sum(-1) * torch.nan))
        with torch.no_grad():
            assert race.steps(100, 0.1, 1) == []
        assert race.target.gradients == 8 * 16

    @pytest.mark.accuracy
    def test_the_finish_is_of_falling_steps_and_an_average(self):
        """From the better of two places, to within noise of the best: -E log p - entropy is 0 at N(0, 1)."""
        q, target, starts, race = race_of(log_gamma(3.0), 2, 3.0, 1.0)
        q.initialize_(6.0)
        better = starts[1].coordinates
        with torch.no_grad():
            before, after = race.finish(better)
        assert after.elbo > before.elbo
        gain = sampled_loss(q, target, 4096, 9)
        best = CholeskyGaussian(2, dtype=torch.float64)
        quiet(best, log_gamma(3.0), tolerance=0.01)
        assert gain < sampled_loss(best, target, 4096, 9) + 0.01

    @pytest.mark.parametrize("kind", [CholeskyGaussian, DiagonalGaussian])
    def test_a_member_whose_average_is_no_covariance_keeps_its_own_and_the_others_theirs(self, kind, monkeypatch):
        """As rounding may make it: what is compared there is the average of the means, with the spread of q."""
        q = kind(2, (3,), mean=3.0, dtype=torch.float64)
        race = Race(q, Guarded(LogJoint(log_gamma(3.0))), 1)
        taken, asked, update = [], [], ExpectationAverage.update

        def spoilt(average, q):
            update(average, q)
            taken.append(average.spread.clone())
            average.spread[1] = -average.spread[1].abs()

        def compared(q, target, places, *more):
            asked.append(places)
            return put_at_best(q, target, places, *more)

        monkeypatch.setattr(ExpectationAverage, "update", spoilt)
        monkeypatch.setattr("torchngvi.fitting.race.put_at_best", compared)
        with torch.no_grad():
            before, after = race.finish(share=0.05)
        assert after.elbo >= before.elbo
        here, mean = (kind(2, (3,), dtype=torch.float64) for _ in range(2))
        here.restore(asked[-1][1])
        mean.restore(asked[-1][2])
        spread = mean.frame().marginals()
        assert torch.allclose(spread[1], here.frame().marginals()[1], rtol=1e-12)
        assert torch.allclose(spread[::2], taken[-1][::2], rtol=1e-12)
        assert not (mean.mean == here.mean).any()


@pytest.mark.accuracy
@pytest.mark.usefixtures("no_pool")
def test_noise_that_does_not_fall_ends_by_steps_of_falling_size(monkeypatch):
    """As under gradients with heavy tails, of which here all are taken to be."""
    monkeypatch.setattr("torchngvi.fitting.descent._HOPELESS", (32, 1e-3))
    monkeypatch.setattr("torchngvi.fitting.sample_average._TAME", 0.0)
    q = CholeskyGaussian(10, dtype=torch.float64)
    result = quiet(q, eight_schools(False))
    pattern = (
        r"because \d+ draws leave a natural-gradient norm of \S+ against a tolerance of 0\.1: such averages have no "
        r"useful minimum here\. Stochastic steps of falling size led from an ELBO of (\S+) ± \S+ to (\S+) ± \S+ on "
        r"fresh draws, and ended by their number\. Transform the model to be nearer to a Gaussian\."
    )
    told = re.fullmatch(pattern, result.reason)
    assert told, result.reason
    assert float(told[1]) < float(told[2])
    assert float(told[2]) == pytest.approx(-result.loss, abs=1e-3)
    best = CholeskyGaussian(10, dtype=torch.float64)
    quiet(best, eight_schools(False))
    target = Guarded(LogJoint(eight_schools(False)))
    assert sampled_loss(q, target, 8192, 9) < sampled_loss(best, target, 8192, 9) + 0.03


def test_more_than_two_hundred_dimensions():
    """A mode is looked for, and found in a few hundred gradients."""
    q = CholeskyGaussian(240, dtype=torch.float64)
    result = quiet(q, poisson(), max_evaluations=4)
    assert result.trace[0].gradients < 2000
    assert math.isfinite(result.loss)
    best = sampled_loss(q, Guarded(LogJoint(poisson())), 1024, 5)
    assert best < 480


def test_a_refused_mode_does_not_keep_another_away():
    """The evidence of a collapse is infinite, that of the mode which counts is not."""
    _, starts = started(eight_schools(True), 10)
    assert starts.evidence == -math.inf


# ------------------------------------------------------------------------------------ draws that fail


def quartic(theta):
    return -0.5 * (theta - 1).square().sum(-1) - 0.05 * theta.pow(4).sum(-1)


def failing(share, raises=True):
    """Fails at a share of all theta, by a hash of theta; not near 0, where it is asked first."""

    def f(theta):
        number = ((theta * 1e6).long() * 2654435761 + 777777) % 1_000_003
        bad = (number.sum(-1) % 1000 < 1000 * share) & (theta.abs().sum(-1) > 1e-3)
        if raises and bool(bad.any()):
            raise ValueError("lost")
        return torch.where(bad, torch.nan, quartic(theta))

    return f


class TestFailing:
    def test_pairs_give_way_to_later_ones(self):
        """Those that stay are the same; together they are whitened."""
        like = torch.zeros(2, dtype=torch.float64)
        fixed = Fixed(40, seed=3, left_out=(4, 7))
        z = fixed(like)
        torch.testing.assert_close(z.mT @ z / 40, torch.eye(2, dtype=torch.float64))
        assert torch.equal(z[:20], -z[20:])
        assert fixed.pairs() == [*range(4), 5, 6, *range(8, 22)]
        more = Fixed(40, seed=3, left_out=(4, 7, 20))
        assert more.pairs() == [*range(4), 5, 6, *range(8, 20), 21, 22]
        ratio = torch.linalg.lstsq(z[:18], more(like)[:18]).solution  # the same rows but for the whitening
        torch.testing.assert_close(z[:18] @ ratio, more(like)[:18])

    @pytest.mark.accuracy
    @pytest.mark.parametrize("raises", [True, False])
    @pytest.mark.parametrize("share", [0.001, 0.01, 0.1])
    def test_by_a_hash_of_theta(self, share, raises):
        """A result that says what was left out, or the sentence; never an error, and q is finite."""
        for seed in range(3):
            q = CholeskyGaussian(3, dtype=torch.float64)
            result = quiet(q, failing(share, raises), seed, tolerance=0.05)
            assert bool(q.mean.isfinite().all())
            assert bool(q.stddev.isfinite().all())
            if result.converged:
                torch.testing.assert_close(q.mean, torch.full_like(q.mean, 0.687), rtol=0, atol=0.05)
            else:
                assert re.match(
                    r"because (the negative ELBO is nan|the log joint (fails|is not finite) at)", result.reason
                )

    @pytest.mark.parametrize("raises", [True, False])
    def test_a_region_that_fails(self, raises):
        """One theta in sixty of the posterior: a Gaussian is fitted to the rest, and the result says so."""

        def f(theta):
            bad = (theta > 2.6).any(-1)
            if raises and bool(bad.any()):
                raise ValueError("beyond")
            return torch.where(bad, torch.nan, -0.5 * theta.square().sum(-1) - 0.01 * theta.pow(4).sum(-1))

        said = 0
        for seed in range(4):
            q = CholeskyGaussian(3, dtype=torch.float64)
            result = quiet(q, f, seed)
            assert result.converged, result.reason
            assert float((q.stddev - 0.95).abs().max()) < 0.1
            told = re.search(
                r" Left out were (\d+) draws of the fit and (\d+) of the check at which the log joint fails or is NaN: "
                r"q is fitted to the posterior cut there\.",
                result.reason,
            )
            assert told, result.reason
            said += int(told[1])
            assert ("ValueError: beyond" in result.reason) == raises
        assert said > 0

    def test_zero_density_is_not_a_failure(self):
        def f(theta):
            return torch.where((theta > 2.6).any(-1), -torch.inf, -0.5 * theta.square().sum(-1))

        result = quiet(CholeskyGaussian(3, dtype=torch.float64), f)
        assert not result.converged
        assert "not finite" in result.reason

    def test_kinks_do_not_crash(self):
        for seed in range(3):
            q = CholeskyGaussian(3, dtype=torch.float64)
            assert quiet(q, lambda theta: -theta.abs().sum(-1), seed).converged


# ------------------------------------------------------------------------------------ budgets


class Counted:
    """How many theta were asked for, and the largest call."""

    def __init__(self, function):
        self.function, self.gradients, self.values, self.largest = function, 0, 0, 0

    def __call__(self, theta):
        if theta.requires_grad:
            self.gradients += len(theta)
        else:
            self.values += len(theta)
        self.largest = max(self.largest, len(theta))
        return self.function(theta)


class TestBudgets:
    @pytest.mark.parametrize("most", [1, 5, 20, 300, 1000, 3000, 8000])
    @pytest.mark.parametrize("function", [eight_schools(True), log_gamma(3.0)], ids=["schools", "log-gamma"])
    @pytest.mark.usefixtures("pooled")
    def test_gradients(self, function, most):
        """Kept to the call, whatever was going on, but for the 32 draws of the first average, and all of it counted."""
        counted, q = Counted(function), CholeskyGaussian(10, dtype=torch.float64)
        result = quiet(q, counted, max_gradients=most)
        assert (result.gradients, result.values) == (counted.gradients, counted.values)
        spent = counted.gradients + 0.4 * counted.values
        assert bool(q.mean.isfinite().all() & q.stddev.isfinite().all())
        if not result.converged:
            assert re.match(rf"because the budget of {most} gradients is used up", result.reason)
            assert len(result.trace) == 1 or spent <= most
        assert spent <= most + 32

    def test_it_is_the_criterion(self):
        runs = []
        for options in ({"max_gradients": 1500}, {"stop": Gradients(1500)}):
            q = CholeskyGaussian(10, dtype=torch.float64)
            runs.append((str(quiet(q, eight_schools(True), **options)), q.scale_tril))
        assert runs[0][0] == runs[1][0]
        assert torch.equal(runs[0][1], runs[1][1])

    @pytest.mark.usefixtures("pooled")
    def test_seconds(self, monkeypatch):
        """A clock that goes by a second a call of the log joint."""
        clock = [0.0]
        monkeypatch.setattr("torchngvi.fitting.loop.time.perf_counter", lambda: clock[0])

        def f(theta):
            clock[0] += 1
            return eight_schools(True)(theta)

        result = quiet(CholeskyGaussian(10, dtype=torch.float64), f, max_seconds=30)
        assert re.match(r"because the budget of 30 seconds is used up", result.reason)
        assert clock[0] <= 30 + 8

    def test_seconds_and_gradients_ask_between_records(self):
        both = Gradients(100) | Seconds(2.0)
        assert [both.over(99, 1.9), both.over(100, 0.0), both.over(0, 2.0)] == [False, True, True]

    @pytest.mark.usefixtures("no_pool")
    def test_the_bar_says_the_phase(self, monkeypatch):
        said = []
        monkeypatch.setattr("torchngvi.fitting.loop.Loop._show_phase", lambda self, phase: said.append(phase))
        quiet(CholeskyGaussian(10, dtype=torch.float64), eight_schools(True), max_gradients=16_000)
        assert said[0] == "a rough mode"
        assert "1 start, block 1" in said  # independent coordinates, which race then with the others
        assert any(re.fullmatch("[3-5] starts, block 1", phase) for phase in said)
        assert "32 draws" in said

    @pytest.mark.parametrize("function", [eight_schools(True), log_gamma(3.0)], ids=["schools", "log-gamma"])
    @pytest.mark.usefixtures("pooled")
    def test_an_interrupt_at_any_call(self, function):
        """In the search for a mode, in the race, in an average, at a lot of a pool: a result, and q is finite."""
        reasons = set()
        for call in (3, 5, 9, 30, 60, 100, 200, 300):
            calls = itertools.count(1)

            def f(theta, call=call, calls=calls):
                if next(calls) == call:
                    raise KeyboardInterrupt
                return function(theta)

            q = CholeskyGaussian(10, dtype=torch.float64)
            result = quiet(q, f)
            reasons.add(result.reason)
            assert bool(q.mean.isfinite().all() & q.stddev.isfinite().all())
        assert "because it was interrupted before q was evaluated." in reasons

    def test_an_interrupt_leaves_the_best_that_is_known(self, pooled):
        """After some blocks of a race, or some lots of a pool, q is nearer than where it was."""
        log_joint = Counted(rats())

        def f(theta):
            if log_joint.gradients > 3000:
                raise KeyboardInterrupt
            return log_joint(theta)

        q = CholeskyGaussian(73, dtype=torch.float64)
        target = Guarded(LogJoint(rats()))
        before = sampled_loss(q, target, 256, 1)
        result = quiet(q, f)
        assert result.reason == f"because it was interrupted{'' if pooled else ' before q was evaluated'}."
        assert result.gradients > 1000
        assert sampled_loss(q, target, 256, 1) < before - 20

    @pytest.mark.parametrize(
        "function", [lambda t: 0 * t.sum(-1), lambda t: -t[..., 0].square(), lambda t: t[..., 1] - t[..., 0].exp()]
    )
    def test_improper_targets_are_named_soon(self, function):
        result = quiet(CholeskyGaussian(3, dtype=torch.float64), function)
        assert re.search(
            r"the log joint does not confine q\. Give every parameter a proper prior\.( If the function .*)?$",
            result.reason,
        )
        assert result.gradients < 10_000


def test_a_collapsed_mode_does_not_end_the_race():
    """Its standard deviations of e^-20 say nothing of how far the others may spread."""
    target = Guarded(LogJoint(lambda theta: -0.5 * theta.square().sum(-1)))
    q, starts = CholeskyGaussian(3, dtype=torch.float64), []
    for name, mean, scale in (("collapsed", 0.0, math.exp(-20)), ("far", 300.0, 0.5)):
        q.initialize_(mean, scale)
        starts.append(Start(name, q.snapshot(), sampled_loss(q, target, 32, 2)))
    begun = min(start.loss for start in starts)
    race = Race(q, target, 0)
    q.restore(starts[0].coordinates)
    race.run(starts)
    assert begun > 50
    assert sampled_loss(q, target, 256, 3) < -0.5 * 3 * math.log(2 * math.pi) + 0.5


@pytest.mark.usefixtures("no_pool")
def test_a_wide_q_has_a_narrower_start_beside_it(monkeypatch):
    """The exponential of many coordinates costs a wide q thousands of nats, which its steps do not shed in a block."""
    generator = torch.Generator().manual_seed(3)
    n = 40
    y = torch.poisson(torch.exp(1.5 + 0.5 * torch.randn(n, generator=generator).double()), generator=generator)

    def log_joint(theta):  # b_1 .. b_n, the mean, log of the standard deviation
        eta, log_sd = theta[..., :n] + theta[..., n, None], theta[..., n + 1]
        prior = 0.5 * (theta[..., :n] / log_sd.exp()[..., None]).square().sum(-1) + n * log_sd
        return (y * eta - eta.exp()).sum(-1) - prior - 0.005 * theta[..., n].square() - 0.5 * (log_sd + 0.5).square()

    raced, run = [], Race.run

    def watched(race, starts, *most):
        raced.append({start.name: start.loss for start in starts})
        run(race, starts, *most)

    class Over(Criterion):  # which lets what has begun come to its end
        def asked(self, standing):
            return Stop("because it is over.") if self.over(standing.cost, 0.0) else None

        def over(self, cost, seconds):
            return cost >= 2000

    monkeypatch.setattr(Race, "run", watched)
    for scale in (3.0, 0.05):
        torch.manual_seed(0)
        q = CholeskyGaussian(n + 2, dtype=torch.float64, scale=scale)
        fit(q, log_joint, progress=False, examine=False, stop=Over())
    wide, narrow = (starts for starts in raced if len(starts) > 1)  # beside independent coordinates alone
    assert wide["a narrower q"] < wide["q as it was"] - 0.3 * q.dim
    assert "a narrower q" not in narrow


# ------------------------------------------------------------------------------------ starts that fail later


def grouped(count=12, seed=5):
    """Counts in groups, centred: log joint, and its likelihood by rows with its prior."""
    generator = torch.Generator().manual_seed(seed)
    group = torch.arange(count).repeat_interleave(3)
    rate = (1 + 0.5 * torch.randn(count, generator=generator, dtype=torch.float64)[group]).exp()
    y = torch.poisson(rate, generator=generator)

    def log_prior(theta):  # the mean, log of the standard deviation, the groups
        mean, log_sd, local = theta[..., :1], theta[..., 1:2], theta[..., 2:]
        spread = -0.5 * ((local - mean) * torch.exp(-log_sd)).square() - log_sd
        return spread.sum(-1) - mean[..., 0].square() / 18 - log_sd[..., 0].square() / 8

    def log_likelihood(theta, batch):
        index, count = batch
        eta = theta[..., 2:][..., index]
        return (count * eta - eta.exp()).sum(-1)

    return lambda theta: log_prior(theta) + log_likelihood(theta, (group, y)), log_likelihood, log_prior, (group, y)


class TestRescue:
    @pytest.mark.usefixtures("no_pool")
    def test_a_mode_that_was_trusted_in_vain(self, monkeypatch):
        """Where averages see that q is worse than it was, the starts race after all."""
        races, again = [], Starts.again
        monkeypatch.setattr(Starts, "again", lambda *args: (races.append(1), again(*args)))
        monkeypatch.setattr("torchngvi.fitting.starts._TRUST", (1e9, 0.0))
        monkeypatch.setattr("torchngvi.fitting.rescue.Rescue.worse", lambda rescue, loss: True)
        result = quiet(CholeskyGaussian(10, dtype=torch.float64), funnel, examine=False)
        assert races == [1]
        assert result.converged, result.reason
        assert -result.loss == pytest.approx(8.42, abs=0.15)
        assert "from the best of the starts that raced" in result.reason

    def test_q_is_never_worse_than_where_it_started(self):
        """A budget that ends the run where an average is far above the start puts q back there."""
        q = CholeskyGaussian(14, dtype=torch.float64)
        engine = SampleAverages(q, LogJoint(grouped()[0]), 0.1)
        engine.begin()
        started, standing = engine.rescue.winner, engine.advance()
        q.initialize_(50.0)
        engine.descent.point = engine.descent.point._replace(loss=torch.tensor(1e20, dtype=torch.float64))
        ending = engine.ending(Stop("because of the test."), standing)
        assert not ending.converged
        assert ending.loss == engine.rescue.loss < 100
        assert all(torch.equal(a, b) for a, b in zip(q.snapshot(), started, strict=True))

    def test_data_in_batches(self, monkeypatch):
        """They race by passes of 64 draws."""
        log_joint, log_likelihood, log_prior, rows = grouped()
        target = Guarded(DataLogJoint(log_likelihood, log_prior, [rows], 36))
        q = CholeskyGaussian(14, dtype=torch.float64, scale=2.0)
        rescue = Rescue(Starts(q, target, 1))
        rescue.origin = q.snapshot()
        with torch.no_grad():
            assert rescue.races
            rescue.race()
        assert not rescue.races
        best = CholeskyGaussian(14, dtype=torch.float64)
        quiet(best, log_joint, examine=False)
        whole = Guarded(LogJoint(log_joint))
        assert sampled_loss(q, whole, 4096, 9) < sampled_loss(best, whole, 4096, 9) + 1.5

    @pytest.mark.accuracy
    def test_batches_of_posteriors(self):
        """Each member comes near to the best q of one alone."""
        log_joint = grouped()[0]
        q = CholeskyGaussian(14, batch_shape=(2,), dtype=torch.float64, scale=2.0)
        rescue = Rescue(Starts(q, Guarded(LogJoint(log_joint)), 1))
        rescue.origin = q.snapshot()
        with torch.no_grad():
            rescue.race()
        best = CholeskyGaussian(14, dtype=torch.float64)
        quiet(best, log_joint, examine=False)
        whole = Guarded(LogJoint(log_joint))
        assert sampled_loss(q, whole, 4096, 9) < 2 * sampled_loss(best, whole, 4096, 9) + 2.0

    def test_its_state(self):
        q = CholeskyGaussian(14, dtype=torch.float64)
        first, second = (Rescue(Starts(q, Guarded(LogJoint(grouped()[0])), 1)) for _ in range(2))
        first.origin = q.snapshot()
        first.begun()
        first.finished = (Compared(-2.0, 0.1), Compared(-1.0, 0.2))
        second.load_state_dict(first.state_dict())
        assert second.finished == first.finished
        assert torch.equal(second.winner.vector, first.winner.vector)
        assert second.loss == first.loss


def two_modes(theta):
    """Modes at ±5; of the first member the right one has e² times the mass of the left, of the second the left one."""
    sign = torch.tensor([1.0, -1.0], dtype=theta.dtype)[: theta.shape[-2]] if theta.ndim > 2 else 1.0
    x = theta[..., 0]
    return torch.logaddexp(-0.5 * (x - 5).square() + sign, -0.5 * (x + 5).square() - sign)


class TestMembers:
    def at(self, mean):
        q = CholeskyGaussian(1, batch_shape=(2,), dtype=torch.float64)
        q.initialize_(torch.tensor(mean, dtype=torch.float64)[:, None])
        return q

    def test_each_goes_to_its_best_place(self):
        q, target = self.at([5.0, 5.0]), Guarded(LogJoint(two_modes))
        places = [q.snapshot(), self.at([-5.0, -5.0]).snapshot(), self.at([0.0, 30.0]).snapshot()]
        found = put_at_best(q, target, places, 4096, 1)
        assert q.mean[:, 0].tolist() == [5.0, -5.0]
        assert abs(found.elbo - 2 * (1 + 0.5 * math.log(2 * math.pi))) < 5 * found.error + 1e-6

    def test_each_takes_the_better_of_two_starts(self):
        q, target, starts = self.at([5.0, 5.0]), Guarded(LogJoint(two_modes)), []
        for mean in ([5.0, 5.0], [-5.0, -5.0]):
            here = self.at(mean)
            starts.append(Start("", here.snapshot(), sampled_loss(here, target, 32, 3)))
        with torch.no_grad():
            Race(q, target, 1).run(starts)
        torch.testing.assert_close(q.mean[:, 0], torch.tensor([5.0, -5.0], dtype=torch.float64), rtol=0, atol=0.5)


class TestRegret:
    def engine(self, mean):
        q = CholeskyGaussian(1, dtype=torch.float64)
        engine = SampleAverages(q, LogJoint(two_modes), 0.1)
        engine.rescue.winner = q.initialize_(5.0).snapshot()
        q.initialize_(mean)
        return engine

    @pytest.mark.parametrize("mean", [5.0, 8.0])
    def test_no_better_start_is_none(self, mean):
        engine = self.engine(mean)
        engine.rescue.winner = engine.q.snapshot()
        engine.q.initialize_(5.0)
        assert engine.rescue.regret() is None

    def test_a_start_that_was_better_is_told_with_the_difference(self):
        """The lighter mode has 2 nats less."""
        lost = self.engine(-5.0).rescue.regret()
        assert abs(lost.elbo - 2) < 5 * lost.error + 1e-3

    def test_averages_go_on_from_there_once(self, monkeypatch):
        """A fit that begins at the lighter mode and is told, in the end, that it came from the heavier one."""
        begun = Rescue.begun

        def from_elsewhere(rescue):
            begun(rescue)
            rescue.winner = CholeskyGaussian(1, mean=5.0, dtype=torch.float64).snapshot()

        monkeypatch.setattr(Rescue, "begun", from_elsewhere)
        monkeypatch.setattr(SampleAverages, "_better_start", lambda self: iter(()))
        q = CholeskyGaussian(1, mean=-5.0, dtype=torch.float64)
        result = quiet(q, two_modes, examine=False)
        assert result.converged
        torch.testing.assert_close(q.mean, torch.full_like(q.mean, 5.0), rtol=0, atol=0.1)

    def test_a_second_time_it_is_said(self, monkeypatch, pooled):
        monkeypatch.setattr(Rescue, "begun", lambda self: setattr(self, "winner", better))
        monkeypatch.setattr(Rescue, "turn_back", lambda self: (self.best(), False))
        monkeypatch.setattr(SampleAverages, "_better_start", lambda self: iter(()))
        better = CholeskyGaussian(1, mean=5.0, dtype=torch.float64).snapshot()
        q = CholeskyGaussian(1, mean=-5.0, dtype=torch.float64)
        result = quiet(q, two_modes, examine=False)
        assert not result.converged
        assert re.fullmatch(
            r"because 32 draws lead to an optimum, natural-gradient norm \S+, whose "
            r"ELBO is 2 ± \S+ below that of their start; q is back there\. Transform the model to be nearer to a "
            r"Gaussian\.",
            result.reason,
        ), result.reason
        assert q.mean.item() == 5.0


def test_a_collapsed_mode_is_no_measure_of_how_wide_q_has_become():
    """Five groups that agree: the density is unbounded where their scale vanishes, and a mode there is trusted."""
    generator = torch.Generator().manual_seed(40)
    y = 4 + 0.5 * torch.randn(5, 1, generator=generator, dtype=torch.float64)
    y = y + 1.5 * torch.randn(5, 6, generator=generator, dtype=torch.float64)

    def log_joint(theta):  # the mean, log scales of the groups and of the noise, the groups
        mu, log_s, log_e, local = theta[..., 0], theta[..., 1], theta[..., 2], theta[..., 3:]
        top = -0.005 * mu.square() + log_s + log_e - torch.log1p(0.25 * (2 * log_s).exp())
        top = top - torch.log1p(0.25 * (2 * log_e).exp())
        z2 = ((y - local[..., None]) * (-log_e).exp()[..., None, None]).square()
        likelihood = (-2.5 * torch.log1p(z2 / 4) - log_e[..., None, None]).sum((-2, -1))
        prior = -0.5 * ((local - mu[..., None]) * (-log_s).exp()[..., None]).square() - log_s[..., None]
        return top + prior.sum(-1) + likelihood

    q = CholeskyGaussian(8, dtype=torch.float64)
    result = quiet(q, log_joint, 1, examine=False)
    assert result.converged, result.reason
    assert float(q.stddev.log().min()) > -5
