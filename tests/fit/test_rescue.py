"""What follows a race: short steps of falling size, tails by noise² that rises, pools, an end where more is in vain."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from torchngvi import CholeskyGaussian, LogJoint, fit
from torchngvi.fitting.loop import Loop
from torchngvi.fitting.points import Point
from torchngvi.fitting.race import Race, sampled_loss
from torchngvi.fitting.rescue import Rescue
from torchngvi.fitting.starts import Starts
from torchngvi.models.guarded import Guarded

DIM = 40


def normal(theta):
    return -0.5 * theta.square().sum(-1)


def at(mean, dim=DIM):
    return CholeskyGaussian(dim, dtype=torch.float64).initialize_(mean)


@pytest.mark.parametrize(("radius", "nats"), [(0.1, 0.1), (None, 2.0)])
def test_a_step_moves_q_by_so_many_nats(radius, nats):
    """A steep density a hundred standard deviations away: ½ρ²|∇L|² is the radius, in a race 0.05 a coordinate."""
    q = at(100.0)
    before = at(100.0)
    with torch.no_grad():
        Race(q, Guarded(LogJoint(normal)), 1).steps(1, 0.5, 1, None, radius)
    assert float(before.kl(q).detach()) == pytest.approx(nats, rel=0.2)


def test_steps_of_the_finish_are_short_in_any_number_of_dimensions(monkeypatch):
    """Longer ones let single draws with large gradients decide, and end farther from the best q."""
    seen = []
    monkeypatch.setattr(Race, "steps", lambda self, *args: seen.append((args[1], args[4])) or [])
    with torch.no_grad():
        Race(at(0.0), Guarded(LogJoint(normal)), 1).finish()
    rates, radii = zip(*seen, strict=True)
    assert set(radii) == {0.1}
    assert list(rates) == sorted(rates, reverse=True)


def rescue(raced=True, dim=2):
    starts = Starts(at(0.0, dim), Guarded(LogJoint(normal)), 1)
    starts.raced = raced
    return Rescue(starts)


def descent(noise2, norm2=0.0, seen=1, stalled=0, draws=512, **more):
    point = Point(*(torch.tensor(x, dtype=torch.float64) for x in (norm2, noise2, 0.0)))
    known = {"point": point, "evaluations": 10 + seen, "first": 10, "stalled": stalled, "draws": draws, "most": 16_384}
    return SimpleNamespace(**known, hopeless=lambda: False, tame=True, **more)


class TestTails:
    def test_noise_that_falls_is_none(self):
        known = rescue()
        assert not known.gives_up(descent(500.0))
        assert not known.gives_up(descent(300.0, seen=2))
        assert not known.gives_up(descent(80.0))
        assert not known.heavy

    def test_noise_that_rises_over_more_draws(self):
        known = rescue()
        assert not known.gives_up(descent(5.0))
        assert known.gives_up(descent(25.0))
        assert known.useless(descent(25.0))

    def test_noise_that_rises_and_is_small(self):
        known = rescue()
        assert not known.gives_up(descent(5.0))
        assert not known.gives_up(descent(15.0))

    def test_noise_that_rises_over_the_same_draws(self):
        """On the way to the minimum of one average; it is compared with the next."""
        known = rescue()
        assert not known.gives_up(descent(5.0))
        assert not known.gives_up(descent(50.0, seen=2))
        assert not known.gives_up(descent(30.0))

    @pytest.mark.parametrize(("noise2", "seen", "heavy"), [(75.0, 4, True), (15.0, 4, False), (75.0, 5, False)])
    def test_an_average_over_which_no_step_can_be_taken(self, noise2, seen, heavy):
        """Three rejections; after a step that was taken they say nothing."""
        assert rescue().gives_up(descent(noise2, seen=seen, stalled=3)) is heavy

    def test_where_no_start_has_raced_nothing_is_given_up(self):
        known = rescue(raced=False)
        assert not known.gives_up(descent(5.0))
        assert not known.gives_up(descent(50.0))
        assert not known.useless(descent(50.0, draws=16_384))

    def test_a_checkpoint_holds_them_and_another_race_forgets_them(self):
        known, other = rescue(), rescue()
        known.gives_up(descent(5.0))
        known.gives_up(descent(25.0))
        other.load_state_dict(known.state_dict())
        assert (other.heavy, other.noise2) == (True, 25.0)
        other.begun()
        assert (other.heavy, other.noise2) == (False, math.inf)


class TestInVain:
    """16,384 draws leave noise² · draws / 16,384."""

    @pytest.mark.parametrize(
        ("noise2", "norm2", "vain"),
        [(0.05, 0.01, True), (0.05, 0.2, False), (0.018, 0.0, False), (0.021, 0.0, True)],
    )
    def test_it_is_told_from_the_noise(self, noise2, norm2, vain):
        assert rescue().in_vain(descent(noise2, norm2, draws=8192), 0.1) is vain

    def test_not_without_a_race_nor_where_several_sets_are_averaged(self):
        assert not rescue(raced=False).in_vain(descent(0.05, draws=8192), 0.1)
        assert not rescue(dim=171).in_vain(descent(0.05, draws=8192), 0.1)

    def test_no_steps_of_falling_size_follow_the_largest_average_there(self):
        close, far = (descent(noise2, draws=16_384) for noise2 in (0.15, 0.25))
        close.tame = far.tame = False
        assert not rescue().useless(close)
        assert rescue().useless(far)


@pytest.mark.parametrize(("dim", "pools"), [(31, False), (32, True)])
def test_draws_are_pooled_after_a_race_where_averages_are_dear(monkeypatch, dim, pools):
    """Averages that have come near go on as a pool; fewer dimensions need none."""
    assert rescue(dim=dim).pools is pools
    shown = []
    monkeypatch.setattr(Starts, "before_a_pool", lambda starts, widest: False)
    monkeypatch.setattr(Starts, "first", lambda starts: setattr(starts, "raced", True))
    monkeypatch.setattr(Loop, "_show_phase", lambda loop, phase: shown.append(phase))
    result = fit(at(0.0, dim), lambda theta: (3 * theta - theta.exp()).sum(-1), progress=False, examine=False)
    assert result.converged, result.reason
    assert "; q is from the best of the starts that raced" in result.reason
    kinds = [re.sub(r"^\d+ ", "", phase) for phase in shown if "draws" in phase]
    assert list(dict.fromkeys(kinds)) == ["draws", *["draws in a pool"] * pools, "fresh draws"]


@pytest.mark.usefixtures("no_pool")
def test_heavy_tails_end_an_average_at_once(monkeypatch):
    """Here all gradients are taken to have them: of the first average one evaluation is made, and none of a second."""
    monkeypatch.setattr("torchngvi.fitting.race._RATES", (0.1, 0.1))
    monkeypatch.setattr(Starts, "first", lambda starts: setattr(starts, "raced", True))
    monkeypatch.setattr("torchngvi.fitting.sample_average._TAME", 0.0)
    monkeypatch.setattr(Rescue, "tails", lambda known, descent: setattr(known, "heavy", True) or True)
    q = at(0.0, 2)
    result = fit(q, lambda theta: (3 * theta - theta.exp()).sum(-1), progress=False, examine=False)
    assert result.evaluations == 1
    assert result.gradients == 32 + 2 * 250 * 16
    assert result.reason.startswith("because 32 draws leave a natural-gradient norm of ")
    assert "Stochastic steps of falling size led from an ELBO of " in result.reason
    best = at(0.0, 2)
    fit(best, lambda theta: (3 * theta - theta.exp()).sum(-1), progress=False, examine=False)
    target = Guarded(LogJoint(lambda theta: (3 * theta - theta.exp()).sum(-1)))
    assert sampled_loss(q, target, 4096, 9) < sampled_loss(best, target, 4096, 9) + 0.02
