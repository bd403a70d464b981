"""Where a fit of a log joint starts: modes that are trusted, other starts, draws that fail, budgets."""

import itertools
import math
import re

import pytest
import torch
from helpers import eight_schools

from torchngvi import CholeskyGaussian, DiagonalGaussian, LogJoint, NaturalGaussian, fit
from torchngvi.expectations.draws import Fixed
from torchngvi.fitting import Gradients, Seconds
from torchngvi.fitting.loop import Loop
from torchngvi.fitting.sample_average import SampleAverages
from torchngvi.fitting.starts import EngineSettings, Starts, sampled_loss
from torchngvi.fitting.stopping import NormBelow
from torchngvi.mode import Mode, find_mode
from torchngvi.models.factors import Guarded
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
    starts = Starts(q, Guarded(LogJoint(function)), seed=1, settings=EngineSettings())
    with torch.no_grad():
        starts.first()
    return q, starts


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
        assert starts.trusted
        assert starts.evidence > -math.inf
        torch.testing.assert_close(q.mean, torch.full_like(q.mean, math.log(shape)), rtol=0, atol=0.3)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_correlations_that_a_family_lacks_are_no_distrust(self, family):
        """What a mean field misses of Laplace's evidence is known beforehand."""
        _, starts = started(correlated(8), 8, family)
        assert starts.trusted
        assert starts.target.gradients < 40

    @pytest.mark.parametrize("temperature", [0.1, 10.0])
    def test_the_promise_is_in_units_of_the_temperature(self, temperature):
        q = CholeskyGaussian(5, dtype=torch.float64)
        starts = Starts(
            q, Guarded(LogJoint(log_gamma(100.0), temperature=temperature)), seed=1, settings=EngineSettings()
        )
        with torch.no_grad():
            starts.first()
        assert starts.trusted

    @pytest.mark.parametrize(
        ("function", "dim"),
        [(product, 2), (eight_schools(False), 10), (funnel, 10), (banana, 2), (eight_schools(True), 10)],
    )
    def test_modes_that_are_not(self, function, dim):
        """Gaps of 1.5 nats a coordinate and more, or no mode at all: q keeps its mean, what was found is remembered."""
        q, starts = started(function, dim)
        assert not starts.trusted
        assert starts.refused is not None
        assert float(q.mean.abs().max()) == 0.0

    def test_a_trusted_mode_costs_what_the_search_does(self):
        """Six gradients in five dimensions: one, a Hessian, a step at least; then values alone."""
        _, starts = started(correlated(5), 5)
        assert starts.target.gradients <= 1 + 5 + 2 + 5
        assert starts.target.values < 100  # by which q as it was and q at the mode are judged

    def test_the_best_scale_of_a_mode_not_the_first_finite_one(self):
        """Beyond the mode the density falls off a cliff of finite height, which the scale 1 meets."""

        def cliff(theta):
            return -0.5 * theta.square().sum(-1) - 500 * (theta.abs() > 1).sum(-1)

        q = CholeskyGaussian(3, dtype=torch.float64)
        starts = Starts(q, Guarded(LogJoint(cliff)), seed=1, settings=EngineSettings())
        with torch.no_grad():
            found = find_mode(starts.target, starts.mean, 100)
            starts.place(found)
        assert float(q.stddev.max()) == pytest.approx(0.3, rel=1e-3)


@pytest.mark.parametrize("function", [product, banana])
def test_without_a_mode_q_takes_the_best_of_some_scales(function):
    """The least loss of those before the first rise."""
    q, starts = started(function, 2)
    scale, losses = float(q.stddev[0]), []
    for factor in Starts.scales:
        q.initialize_(0.0, factor)
        losses.append(sampled_loss(q, starts.target, 16, starts.seed + 2))
    rise = next(k for k in range(1, len(losses)) if losses[k] >= losses[k - 1])
    assert 1 < rise < len(losses)
    assert scale == pytest.approx(Starts.scales[rise - 1])
    assert starts.reached == pytest.approx(losses[rise - 1])


@pytest.mark.parametrize("family", FAMILIES[:2])
class TestOtherUnits:
    """Where q begins at which ℓ is far lower than at a mode, which is not trusted."""

    def first(self, function, family, dtype, monkeypatch):
        near = Mode(torch.zeros(3, dtype=dtype), 1e-6 * torch.eye(3, dtype=dtype), 0.0, False, 0)
        monkeypatch.setattr(Starts, "_searched", lambda self, budget=0: near)
        q = family(3, mean=0.1, scale=0.7, dtype=dtype)
        starts = Starts(q, Guarded(LogJoint(function)), seed=1, settings=EngineSettings())
        with torch.no_grad():
            starts.first()
        assert not starts.trusted
        torch.testing.assert_close(q.mean, torch.full_like(q.mean, 0.1))
        return q, starts

    def test_its_scale_is_kept_where_the_loss_is_known_to_a_nat(self, family, monkeypatch):
        """Though the loss of a narrower q would be smaller by ten powers of ten."""
        q, starts = self.first(lambda theta: -1e10 * theta.square().sum(-1), family, torch.float64, monkeypatch)
        torch.testing.assert_close(q.stddev, torch.full_like(q.stddev, 0.7), rtol=1e-14, atol=0)
        assert starts.reached == pytest.approx(3e10 * (0.7**2 + 0.1**2), rel=1e-9)  # the draws are whitened

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_where_values_overflow_it_is_the_widest_at_which_it_is_known(self, family, dtype, monkeypatch):
        """Of the scales that are tried it is the first with a loss below 1/eps; at q as it was ℓ is about -1e160."""
        q, starts = self.first(lambda theta: -torch.cosh(270 * theta).sum(-1), family, dtype, monkeypatch)
        narrow, losses = q.stddev.clone(), []
        for factor in Starts.scales:
            q.initialize_(0.1, factor * 0.7)
            losses.append(sampled_loss(q, starts.target, 16, starts.seed + 2))
        assert dtype is torch.float32 or 1e150 < losses[0] < 1e170
        first = next(k for k, loss in enumerate(losses) if loss * torch.finfo(torch.float64).eps < 1)
        assert first > 1
        torch.testing.assert_close(narrow, torch.full_like(narrow, 0.7 * Starts.scales[first]))
        assert starts.reached == pytest.approx(losses[first], rel=1e-4)


@pytest.mark.accuracy
@pytest.mark.parametrize("seed", range(3))
def test_rats(seed, pooled):
    """The mode is a collapse; the best Gaussian has an ELBO of -165.24, which took 18,600 by a race and averages."""
    q = CholeskyGaussian(73, dtype=torch.float64)
    result = quiet(q, rats(), seed, examine=False)
    assert result.converged, result.reason
    assert result.loss == pytest.approx(165.24, abs=0.1)
    assert result.gradients + 0.4 * result.values < (18_600 if pooled else 40_000)
    # the posterior of log(kappa - 1) by quadrature has the mean 2.58
    assert float(q.mean[1]) == pytest.approx(2.55, abs=0.15)


@pytest.mark.accuracy
@pytest.mark.parametrize(
    ("family", "options", "loss"),
    [
        (PrecisionCholeskyGaussian, {}, 165.24),
        (DiagonalGaussian, {}, 165.84),
        (CholeskyGaussian, {"structure": block_diagonal([2] + [1] * 71)}, 165.76),
        (CholeskyGaussian, {"batch_shape": (2,)}, 2 * 165.24),
    ],
    ids=["precision", "diagonal", "blocks", "batch"],
)
def test_rats_by_others(family, options, loss):
    q = family(73, dtype=torch.float64, **options)
    result = quiet(q, rats(), examine=False)
    assert result.converged, result.reason
    assert sampled_loss(q, Guarded(LogJoint(rats())), 4096, 9) == pytest.approx(loss, abs=0.15)
    assert result.gradients + 0.4 * result.values < 25_000


@pytest.mark.sparse(3)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {"dtype": torch.float64}) for family in FAMILIES),
        (CholeskyGaussian, {"structure": block_diagonal([1, 9]), "dtype": torch.float64}),
        (CholeskyGaussian, {"dtype": torch.float32}),
    ],
)
@pytest.mark.usefixtures("pooled")
def test_a_funnel(family, options):
    q = family(10, **options)
    result = quiet(q, funnel)
    assert result.converged, result.reason
    assert q.dtype == options["dtype"]
    assert -result.loss == pytest.approx(8.42, abs=0.15)


@pytest.mark.accuracy
@pytest.mark.usefixtures("pooled")
def test_the_same_seed_is_the_same_run():
    """With another start on the way."""
    runs = []
    for _ in range(2):
        q = CholeskyGaussian(10, dtype=torch.float64)
        result = quiet(q, eight_schools(True), 1)
        runs.append((q.scale_tril.clone(), result.loss, result.gradients, result.values))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1:] == runs[1][1:]


@pytest.mark.accuracy
@pytest.mark.parametrize("scale", [3.0, 0.05])
def test_a_wide_q_and_a_narrow_one_end_alike(scale):
    """The exponential of many coordinates costs a wide q thousands of nats."""
    generator = torch.Generator().manual_seed(3)
    n = 20
    y = torch.poisson(torch.exp(1.5 + 0.5 * torch.randn(n, generator=generator).double()), generator=generator)

    def log_joint(theta):  # b_1 .. b_n, the mean, log of the standard deviation
        eta, log_sd = theta[..., :n] + theta[..., n, None], theta[..., n + 1]
        prior = 0.5 * (theta[..., :n] / log_sd.exp()[..., None]).square().sum(-1) + n * log_sd
        return (y * eta - eta.exp()).sum(-1) - prior - 0.005 * theta[..., n].square() - 0.5 * (log_sd + 0.5).square()

    ends = []
    for first in (1.0, scale):
        q = CholeskyGaussian(n + 2, dtype=torch.float64, scale=first)
        result = quiet(q, log_joint, examine=False)
        assert result.converged, result.reason
        ends.append(sampled_loss(q, Guarded(LogJoint(log_joint)), 4096, 9))
    assert ends[1] == pytest.approx(ends[0], abs=0.05)


@pytest.mark.accuracy
def test_more_than_two_hundred_dimensions():
    """A mode is looked for, and found in a few hundred gradients."""
    q = CholeskyGaussian(240, dtype=torch.float64)
    result = quiet(q, poisson(), max_evaluations=4)
    assert result.trace[0].gradients < 2000
    assert math.isfinite(result.loss)
    best = sampled_loss(q, Guarded(LogJoint(poisson())), 1024, 5)
    assert best < 480


@pytest.fixture
def no_other_start(monkeypatch):
    """Switches other starts off."""
    return lambda: monkeypatch.setattr(SampleAverages, "_better_start", lambda self, doubt=False: iter(()))


@pytest.mark.accuracy
@pytest.mark.usefixtures("pooled")
def test_a_mode_that_was_trusted_in_vain(monkeypatch):
    settings = EngineSettings(trust=(1e9, 0.0))
    monkeypatch.setattr("torchngvi.fitting.sample_average.EngineSettings", lambda: settings)
    result = quiet(CholeskyGaussian(10, dtype=torch.float64), funnel, examine=False)
    assert result.converged, result.reason
    assert -result.loss == pytest.approx(8.42, abs=0.15)


class TestAnother:
    """Start, where no mode was trusted."""

    def engine(self, seed):
        torch.manual_seed(seed)
        engine = SampleAverages(CholeskyGaussian(10, dtype=torch.float64), LogJoint(eight_schools(True)), 0.1, False)
        return engine, Loop(engine, NormBelow(0.1), progress=False).run()

    def test_it_is_the_refused_mode_or_q_as_it_was_or_three_times_as_wide(self):
        """At .3 nats a coordinate above the loss of q the mode still is worth a try."""
        q, starts = started(eight_schools(True), 10)
        mode, loss = starts.refused
        mean, scale = torch.arange(10, dtype=torch.float64), started(correlated(10), 10)[0].scale_tril
        eye, wide = torch.eye(10, dtype=torch.float64), torch.diag(3 * scale.norm(dim=1))
        assert float(starts.q.stddev[0]) < 1.0
        with torch.no_grad():
            for other, place in ((loss - 2.99, None), (loss - 3.01, (0 * mean, eye)), (loss - 3.01, (mean, wide))):
                q.initialize_(mean, scale)
                assert starts.other(other) == (place is None)
                if place is None:
                    assert torch.equal(q.mean, mode.theta)
                else:
                    torch.testing.assert_close(q.mean, place[0])
                    torch.testing.assert_close(q.scale_tril, place[1])
                    starts.narrowed = None

    @pytest.mark.accuracy
    @pytest.mark.parametrize("seed", [0, 1])
    def test_one_that_comes_back_costs_no_more_and_leaves_all_as_it_was(self, seed, no_other_start):
        """q, its pool and the reason are those of a fit that tries no other, to the last bit."""
        tried, with_it = self.engine(seed)
        no_other_start()
        plain, without = self.engine(seed)
        assert tried.looked
        assert not tried.switched
        assert with_it.evaluations > without.evaluations
        assert with_it.gradients - without.gradients <= plain.pooled.evaluated
        assert all(torch.equal(*pair) for pair in zip(tried.q.snapshot(), plain.q.snapshot(), strict=True))
        assert torch.equal(tried.pooled.pool.terms, plain.pooled.pool.terms)
        assert (with_it.reason, with_it.loss) == (without.reason, without.loss)
        assert tried.pooled.evaluated == plain.pooled.evaluated

    @pytest.mark.accuracy
    def test_it_leads_out_of_a_collapsed_scale(self, no_other_start):
        """Measurements in groups, D = 43: the groups of the first end agree, at a loss of two nats."""
        pytest.importorskip("benchmarks", reason="needs the benchmarks of a clone: run python -m pytest in its root")
        from benchmarks.engine_table import elbo
        from benchmarks.posteriors_centred import measured_groups

        model, elbos = measured_groups(), []
        for off in (False, True):
            if off:
                no_other_start()
            q = CholeskyGaussian(model.dim, dtype=torch.float64)
            result = quiet(q, model.log_joint, 1, examine=False)
            assert result.converged, result.reason
            assert ("from the best of several starts" in result.reason) is not off
            elbos.append(elbo(q, model.log_joint)[0])
        assert elbos[0] == pytest.approx(-1300.11, abs=0.05)
        assert elbos[1] < -1302


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
                ends = r"because (the negative ELBO is nan|the log joint (fails|is not finite) at)"
                assert re.match(ends, result.reason)

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

    @pytest.mark.accuracy
    @pytest.mark.parametrize("seed", range(3))
    def test_kinks_do_not_crash(self, seed):
        q = CholeskyGaussian(3, dtype=torch.float64)
        assert quiet(q, lambda theta: -theta.abs().sum(-1), seed).converged


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
    @pytest.mark.sparse(4)
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

    @pytest.mark.accuracy
    def test_the_bar_says_the_phase(self, monkeypatch):
        said = []
        monkeypatch.setattr("torchngvi.fitting.loop.Loop._show_phase", lambda self, phase: said.append(phase))
        quiet(CholeskyGaussian(10, dtype=torch.float64), eight_schools(True), 2, examine=False)
        kinds = list(dict.fromkeys(re.sub(r"\d+", "n", phase) for phase in said))
        assert kinds[:3] == ["a rough mode", "n draws in a pool", "other starts"]
        assert kinds[3:] == ["another start, n draws in a pool", "fresh draws"]

    @pytest.mark.accuracy
    @pytest.mark.parametrize("function", [eight_schools(True), log_gamma(3.0)], ids=["schools", "log-gamma"])
    @pytest.mark.usefixtures("pooled")
    def test_an_interrupt_at_any_call(self, function):
        """In the search for a mode, in an average, at a lot of a pool: a result, and q is finite."""
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

    @pytest.mark.usefixtures("pooled")
    def test_an_interrupt_leaves_the_best_that_is_known(self):
        """After some averages, or some lots of a pool, q is nearer than where it was."""
        log_joint = Counted(rats())

        def f(theta):
            if log_joint.gradients > 3000:
                raise KeyboardInterrupt
            return log_joint(theta)

        q = CholeskyGaussian(73, dtype=torch.float64)
        target = Guarded(LogJoint(rats()))
        before = sampled_loss(q, target, 256, 1)
        result = quiet(q, f)
        assert result.reason == "because it was interrupted."
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
