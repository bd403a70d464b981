"""Simulation-based calibration: the test of uniformity is exact, and finds what is wrong and only that."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

import torchngvi
from torchngvi import CholeskyGaussian, refine
from torchngvi.diagnostics import Calibration, Uniformity, holm, simulation_based_calibration
from torchngvi.errors import InputError

NOISE, ROWS = 0.5, 3


def prior(dim):
    return lambda generator: torch.randn(dim, generator=generator, dtype=torch.float64)


def simulate(theta, generator):
    return theta + NOISE * torch.randn(ROWS, len(theta), generator=generator, dtype=torch.float64)


def exact(y, shift=0.0, factor=1.0):
    """The conjugate posterior, its means shifted by so many sds and these multiplied by a factor, both (D,) or one."""
    precision = 1 + ROWS / NOISE**2
    sd = torch.full((y.shape[1],), precision**-0.5, dtype=y.dtype)
    mean = y.sum(0) / NOISE**2 / precision
    return CholeskyGaussian(len(sd), dtype=y.dtype).initialize_(mean + shift * sd, (factor * sd).diag())


def calibration(dim=2, fit=exact, **options):
    return simulation_based_calibration(prior(dim), simulate, fit, **options)


def test_p_values_are_exact_by_enumeration():
    """Of all 6⁴ outcomes of four ranks on 0..5: p is the share whose statistic is as small or smaller."""
    count, draws = 4, 5
    outcomes = torch.tensor(list(itertools.product(range(draws + 1), repeat=count))).mT
    test = Uniformity(count, draws)
    below = test.counts(outcomes)
    statistic = torch.ones(outcomes.shape[1], dtype=torch.float64)
    for z, x in zip(test.levels.tolist(), below, strict=True):
        mass = [math.comb(count, i) * z**i * (1 - z) ** (count - i) for i in range(count + 1)]
        two = torch.tensor([2 * min(sum(mass[: i + 1]), sum(mass[i:])) for i in range(count + 1)], dtype=torch.float64)
        statistic = torch.minimum(statistic, two.clamp_max(1.0)[x])
    share = (statistic <= statistic[:, None] * (1 + 1e-9)).double().mean(1)
    torch.testing.assert_close(test.p_values(outcomes), share, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("count", "draws"), [(1, 1), (30, 7), (200, 99)])
def test_p_values_hold_their_level(count, draws):
    """Uniform ranks have p <= α with a chance of α at most, and not much less where there are many."""
    ranks = torch.randint(draws + 1, (count, 4000), generator=torch.Generator().manual_seed(1))
    p = Uniformity(count, draws).p_values(ranks)
    for alpha in (0.01, 0.05, 0.2):
        error = math.sqrt(alpha * (1 - alpha) / ranks.shape[1])
        share = float((p <= alpha).double().mean())
        assert share <= alpha + 4 * error
        if count == 200:
            assert share >= 0.9 * alpha - 4 * error


def test_a_path_leaves_the_band_exactly_where_its_p_value_is_small():
    test, alpha = Uniformity(60, 19), 0.05
    generator = torch.Generator().manual_seed(0)
    ranks = (20 * torch.rand(60, 4000, generator=generator) ** 1.15).long()
    low, high = test.band(alpha)
    differences = test.differences(ranks)
    out = ((differences < low[:, None] - 1e-12) | (differences > high[:, None] + 1e-12)).any(0)
    assert 0.05 < float(out.double().mean()) < 0.9
    assert torch.equal(out, test.p_values(ranks) <= alpha)


def test_holm():
    p = torch.tensor([0.01, 0.04, 0.03, 0.9], dtype=torch.float64)
    expected = torch.tensor([0.04, 0.09, 0.09, 0.9], dtype=torch.float64)
    torch.testing.assert_close(holm(p), expected)


@pytest.mark.accuracy
def test_the_exact_posterior_is_calibrated():
    found = calibration(5, quantities={"log likelihood": lambda theta, y: loglik(theta, y)})
    assert found.calibrated
    assert found.flagged == ()
    assert found.ranks.shape == (100, 6)
    assert found.names[-1] == "log likelihood"
    assert (found.shift.abs() < 0.45).all()  # 3.6 standard errors
    assert ((found.spread > 0.7) & (found.spread < 1.5)).all()
    assert str(found).startswith("calibration over 100 of 100 simulations: nothing speaks against it in 6 quantities")


def loglik(theta, y):
    return -0.5 * ((y - theta[..., None, :]) / NOISE).square().sum((-2, -1))


@pytest.mark.accuracy
def test_a_halved_sd_is_flagged_and_measured():
    found = calibration(3, lambda y: exact(y, factor=0.5), runs=200)
    assert set(found.flagged) == {"theta[0]", "theta[1]", "theta[2]"}
    assert ((found.spread > 1.4) & (found.spread < 2.8)).all()
    assert (found.symmetry > 0.01).all()  # the means are right
    assert "NOT CALIBRATED in 3 of 3 quantities" in str(found)


def test_shift_and_spread_by_their_definitions():
    """Many ranks of normal posteriors with the sd 1/2 and the mean 0.3 sd off, against numbers in closed form."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(200_000, 1, generator=generator, dtype=torch.float64)
    for shift, factor in ((0.0, 0.5), (0.3, 1.0), (0.0, 3.0)):
        ranks = (100 * torch.special.ndtr(truth / factor - shift)).long().clamp_max(99)
        found = Calibration(("x",), ranks, 99, len(ranks), 0)
        assert abs(float(found.shift) - shift) < 0.03  # a rank is a hundredth
        if not shift:
            assert abs(float(found.spread) * factor - 1) < 0.02


def test_a_shifted_mean_is_flagged_with_its_sign():
    found = calibration(2, lambda y: exact(y, shift=0.8), runs=100)
    assert len(found.flagged) == 2
    assert (found.shift - 0.8).abs().max() < 0.45
    assert (found.symmetry < 1e-3).all()


def test_one_wrong_coordinate_of_many_is_the_only_one_flagged():
    factor = torch.ones(20, dtype=torch.float64)
    factor[7] = 0.4
    found = calibration(20, lambda y: exact(y, factor=factor), names=[f"b{i}" for i in range(20)])
    assert found.flagged == ("b7",)
    assert "b7" in found.summary().splitlines()[2]


def test_the_chance_of_a_false_alarm_is_that_of_all_coordinates_together():
    """400 calibrations of 50 coordinates: at most 5 % flag anything; without the correction nearly all would."""
    generator = torch.Generator().manual_seed(0)
    names = tuple(map(str, range(50)))
    alarms, alone = 0, 0
    ranks = torch.randint(100, (400, 80, 50), generator=generator)
    p = Uniformity(80, 99).p_values(ranks.transpose(0, 1).flatten(1)).unflatten(0, (400, 50))
    for i in range(400):
        alarms += bool((holm(p[i]) < 0.05).any())
        alone += bool((p[i] < 0.05).any())
    assert alone > 300
    assert 4 <= alarms <= 20 + 4 * math.sqrt(20)  # nor is it never
    assert Calibration(names, ranks[0], 99, 80, 0).flagged == tuple(
        names[i] for i in p[0].argsort() if holm(p[0])[i] < 0.05
    )


def test_what_a_fit_returns():
    """A q, a result of fit, of refine, or draws: the same judgement."""

    def by_fit(y):
        def log_joint(theta):
            return loglik(theta, y) - 0.5 * theta.square().sum(-1)

        return torchngvi.fit(CholeskyGaussian(1, dtype=torch.float64), log_joint, progress=False, examine=False)

    found = calibration(1, by_fit, runs=6)
    assert found.ranks.shape == (6, 1)
    assert found.unconverged == 0

    def refined(y):
        q = exact(y)
        return refine(q, lambda theta: q.log_prob(theta), "fan")

    assert calibration(2, refined, runs=2).ranks.shape == (2, 2)
    assert calibration(2, lambda y: exact(y).sample((150,)), runs=20).calibrated
    mixed = SimpleNamespace(sample=lambda n: exact(y).sample(n), posterior=None)  # weighted draws, say, are its own
    y = simulate(torch.zeros(2).double(), torch.Generator().manual_seed(0))
    assert calibration(2, lambda y: mixed, runs=2).ranks.shape == (2, 2)
    q = exact(y)
    as_torch = torch.distributions.MultivariateNormal(q.mean, q.covariance)
    assert calibration(2, lambda y: as_torch, runs=2).ranks.shape == (2, 2)
    found = calibration(1, lambda y: SimpleNamespace(posterior=exact(y), converged=False), runs=3)
    assert "3 fits did not converge, and count" in str(found)


def test_ties_are_broken_at_random():
    """A constant quantity has uniform ranks; always above would be flagged."""
    found = calibration(1, quantities={"one": lambda theta, y: torch.ones(theta.shape[:-1])}, runs=200)
    assert found.calibrated


def test_an_interrupted_run_resumes_to_the_same_bits():
    whole = calibration(2, lambda y: exact(y).sample((99,)), runs=12, seed=3)
    calls = []

    def stopping(y):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return exact(y).sample((99,))

    part = calibration(2, stopping, runs=12, seed=3)
    assert part.interrupted
    assert part.runs == 4
    assert "4 of 4 simulations" in str(part)
    assert "interrupted; give it as resume= to go on" in str(part)
    rest = calibration(2, lambda y: exact(y).sample((99,)), runs=12, seed=3, resume=part)
    assert not rest.interrupted
    assert torch.equal(rest.ranks, whole.ranks)
    more = calibration(2, lambda y: exact(y).sample((99,)), runs=5, seed=3, resume=whole)
    assert more.runs == 12
    assert not torch.equal(calibration(2, runs=12, seed=4).ranks, whole.ranks)


def test_the_default_generator_is_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    calibration(1, lambda y: exact(y).sample((99,)), runs=2)
    assert torch.equal(torch.rand(1), expected)


def test_failing_fits_are_counted_and_said():
    calls = []

    def failing(y):
        calls.append(1)
        if len(calls) % 4 == 0:
            raise RuntimeError("no luck")
        if len(calls) % 4 == 1:
            return torch.full((99, 2), math.nan, dtype=torch.float64)
        return exact(y)

    found = calibration(2, failing, runs=20)
    assert found.ranks.shape == (10, 2)
    assert found.failed[3] == "RuntimeError: no luck"
    assert found.failed[0] == "draws of the posterior are not finite"
    assert "10 of 20 simulations" in str(found)
    assert "10 fits failed and are left out, first: draws of the posterior are not finite" in str(found)


def test_nothing_but_failures_is_an_error_with_the_first_reason():
    def never(y):
        raise RuntimeError("no luck")

    text = (
        r"^none of the 2 fits gave draws to be ranked\. Call fit\(simulate\(theta, generator\)\) by itself; the first "
        "reason was RuntimeError: no luck$"
    )
    with pytest.raises(InputError, match=text) as caught:
        calibration(1, never, runs=2)
    assert str(caught.value.__cause__) == "no luck"
    with pytest.raises(InputError, match="the first reason was draws of the posterior are not finite$"):
        calibration(1, lambda y: torch.full((99, 1), math.nan), runs=2)


def test_an_interrupt_before_the_first_rank_is_not_known():
    calls = []

    def failing(y):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        raise RuntimeError("no luck")

    found = calibration(1, failing, runs=3)
    assert not found.calibrated
    assert found.summary() == (
        "calibration over 0 of 1 simulations: not known; 1 fits failed and are left out, first: RuntimeError: no luck; "
        "interrupted; give it as resume= to go on."
    )


def test_draws_of_the_fit_are_independent_of_the_truth():
    """A fit that draws from torch's generator, as the prior does from its own, does not draw the truth."""
    truths, drawn = [], []

    def simulate(theta, generator):
        truths.append(theta)

    def fit(data):
        drawn.append(torch.randn(99, 1))
        return drawn[-1]

    simulation_based_calibration(lambda generator: torch.randn(1, generator=generator), simulate, fit, runs=3)
    for theta, draws in zip(truths, drawn, strict=True):
        assert not (draws == theta).any()


@pytest.mark.accuracy
def test_what_so_many_simulations_could_find():
    """The errors that are said to be found four times in five are, on normal posteriors that are not those it drew."""
    found = Calibration(tuple("abcdefghij"), torch.arange(100)[:, None].expand(-1, 10), 99, 100, 0).power
    test, generator = Uniformity(100, 99), torch.Generator().manual_seed(5)
    for factor, shift, wanted in ((found.sd, 0.0, True), (1.0, found.mean, True), (0.85 * found.sd, 0.0, False)):
        noise = torch.randn(100, 600, 1, generator=generator, dtype=torch.float64)
        posterior = torch.randn(100, 600, 99, generator=generator, dtype=torch.float64) + shift
        p = test.p_values((posterior < factor * noise).sum(-1))
        share = float((10 * p < 0.05).double().mean())
        assert (share > 0.74) if wanted else (share < 0.74)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1, "so few can hardly speak against anything: raise runs"),
        (20, "an sd 2.2 times too small or a mean 0.75 sd off"),
    ],
)
def test_few_simulations_say_what_they_could_find(count, text):
    ranks = ((torch.arange(count) + 0.5) * 100 / count).long()[:, None]
    found = Calibration(("x",), ranks, 99, count, 0)
    assert text in str(found)
    assert "nothing speaks against it in 1 quantity, and" in str(found)


def test_many_simulations_do_not_say_what_they_could_find():
    many = Calibration(("x",), torch.arange(201)[:, None] * 99 // 200, 99, 201, 0)
    assert str(many) == "calibration over 201 of 201 simulations: nothing speaks against it in 1 quantity."


@pytest.mark.accuracy
def test_picture(tmp_path):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    factor = torch.tensor([1.0, 0.4, 1.0], dtype=torch.float64)
    found = calibration(3, lambda y: exact(y, factor=factor))
    assert found.plot(figure) is figure
    assert len(found.plot().axes) == 2
    left, right = figure.axes
    assert len(left.lines) == 3
    assert right.get_title() == "ranks of theta[1], the worst"
    assert sum(patch.get_height() for patch in right.patches) == 100
    assert [text.get_text() for text in left.texts] == ["theta[1]"]
    figure.savefig(tmp_path / "calibration.png")
