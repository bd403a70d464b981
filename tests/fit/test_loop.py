"""The loop and its criteria: what ends a run, what is kept of it, and what an engine has to bring."""

import gc
import itertools
import math
import re
import sys

import pytest
import torch
from helpers import make_model, make_posterior, quiet, same_bits
from test_sample_average import two
from torch.optim.lr_scheduler import LambdaLR

import torchngvi
from torchngvi import SRVN, VN, CholeskyGaussian, GeneralizedLinear, LogJoint, Stein, fit, ifvb
from torchngvi.errors import InputError
from torchngvi.fitting import Evaluations, Gradients, NormBelow, Seconds, SlopeBelow, SlopeStop, Stalled, Unimproved
from torchngvi.fitting.loop import Engine, Loop
from torchngvi.fitting.records import Record
from torchngvi.fitting.sample_average import SampleAverages
from torchngvi.fitting.stopping import Standing, Stop
from torchngvi.stepsizes import PowerSchedule


def standing(loss=1.0, norm=0.5, **options):
    record = Record(options.pop("evaluations", 3), loss, norm, 0.1, 0, 8, options.pop("seconds", 1.0))
    members = options.pop("members", torch.tensor(False))
    return Standing(record, members, torch.tensor(loss), (3, 8), tolerance=0.1, **options)


AT = r"\(natural-gradient norm \S+ against a tolerance of \S+\)"


class TestCriteria:
    @pytest.mark.parametrize(
        ("criterion", "where", "reason"),
        [
            (NormBelow(0.1), {"members": torch.tensor([True, True])}, r"natural-gradient norm 0\.5\."),
            (NormBelow(0.1), {"members": torch.tensor([True, False])}, None),
            (Evaluations(3), {}, rf"because the budget of 3 evaluations is used up {AT}\. Raise max_evaluations\."),
            (Evaluations(3), {"remedy": "Use more draws."}, rf"because the budget of 3 .* {AT}\. Use more draws\."),
            (Evaluations(3), {"climb": " It climbed."}, rf"because the budget of 3 .* {AT}\. It climbed\."),
            (Evaluations(3), {"settled": True}, None),
            (Evaluations(4), {}, None),
            (Gradients(8), {}, rf"because the budget of 8 gradients is used up {AT}\. Allow more gradients\."),
            (Gradients(9), {}, None),
            (Seconds(0.5), {}, rf"because the budget of 0\.5 seconds is used up {AT}\. Allow more time\."),
            (Seconds(1.5), {}, None),
            (Stalled(2), {"stalled": 2}, rf"because 2 steps in a row were rejected {AT}: a smaller lr, .*"),
            (Stalled(3), {"stalled": 2}, None),
        ],
    )
    def test_one(self, criterion, where, reason):
        stop = criterion.asked(standing(**where))
        assert stop is None if reason is None else re.fullmatch(reason, stop.reason)

    def test_unimproved(self):
        """No new best for so many steps; more than half of the last ones rejected; never finite."""
        stop = Unimproved(3)
        assert stop.asked(standing(best=2.0, idle=2)) is None
        reached = stop.asked(standing(best=2.0, idle=3))
        assert reached == Stop("the smoothed value has not improved for 3 steps.", converged=True)
        reached = stop.asked(standing(idle=3))
        assert reached == Stop("because the value was never finite: start elsewhere, or use a smaller lr.")
        stop, answers = Unimproved(3), []
        for rejections in (5, 6, 6, 6, 7, 8):
            here = standing()
            here = here._replace(record=here.record._replace(rejections=rejections))
            if len(answers) == 3:  # what it remembers goes on elsewhere
                memory, stop = stop.state_dict(), Unimproved(3)
                stop.load_state_dict(memory)
            answers.append(stop.asked(here))
        assert answers[:-1] == [None] * 5
        assert answers[-1].reason == (
            "because 2 of the last 3 steps were not finite or left the domain: use a smaller lr, a clip, or a larger "
            "eps."
        )

    def test_slope(self):
        stop = SlopeBelow(0.5, block=2)
        answers = [stop.asked(standing(-bound)) for bound in (0, 0, 2, 2, 4, 4, 4, 4, 4, 4)]
        assert answers[:-1] == [None] * 9
        assert re.fullmatch(rf"because the ELBO rises by 0 nats in 2 steps, less than 0\.5 {AT}\.", answers[-1].reason)
        capped = SlopeStop(block=2, max_steps=3)
        answers = [capped.asked(standing(-bound)) for bound in range(3)]
        assert answers[:2] == [None, None]
        assert answers[2].reason.startswith("because 3 steps were made (")

    def test_combined(self):
        """The first of those that say so gives the reason, all are asked, and what they are about is known."""
        slope = SlopeBelow(0.5, block=1)
        criterion = NormBelow(0.1) | (Evaluations(9) | Evaluations(3)) | slope | NormBelow(0.2)
        assert (criterion.tolerance, criterion.evaluations) == (0.2, 3)
        for _ in range(3):
            stop = criterion.asked(standing())
        assert stop.reason.startswith("because the budget of 3 evaluations")
        assert slope.steps == 3
        assert not stop.converged
        assert criterion.asked(standing(members=torch.tensor(True))).converged
        assert Seconds(1).evaluations == math.inf
        with pytest.raises(TypeError):
            Seconds(1) | 3

    def test_what_they_remember(self):
        first, second = (SlopeBelow(0.5, block=2) | Seconds(3) | SlopeBelow(0.1, block=3) for _ in range(2))
        for bound in range(5):
            first.asked(standing(-bound))
        state = first.state_dict()
        assert sorted(state) == ["SlopeBelow 1", "SlopeBelow 2"]
        first.asked(standing())  # what was given out stays
        second.load_state_dict(state)
        assert [second.parts[i].steps for i in (0, 2)] == [5, 5]
        assert second.parts[0].means == [-0.5 + 1, 2.5]
        text = r"^the averages are over blocks of 2 steps, and here block=5\. Say block=2\.$"
        with pytest.raises(InputError, match=text):
            SlopeBelow(block=5).load_state_dict(state["SlopeBelow 1"])


ENGINES = {
    "steps": lambda q, **options: quiet(q, make_model().log_joint, VN(q, lr=0.1, estimator=Stein(8)), **options),
    "averages": lambda q, **options: quiet(q, make_model().log_joint, tolerance=1e-3, **options),
}
BOTH = pytest.mark.parametrize("engine", ENGINES)


@BOTH
def test_further_budgets_of_a_fit(engine):
    torch.manual_seed(0)
    result = ENGINES[engine](make_posterior("cholesky"), stop=Gradients(100))
    assert result.reason.startswith("because the budget of 100 gradients is used up (")
    if engine == "steps":  # it ends after the evaluation that uses the budget up
        assert result.trace[-1].gradients >= 100 > result.trace[-2].gradients
    else:  # before the call of the log joint that would exceed it
        assert result.trace[-1].gradients <= result.gradients <= result.gradients + 0.4 * result.values <= 100
        more = ENGINES[engine](make_posterior("cholesky"), stop=Gradients(10**9))
        assert more.trace[len(result.trace)].gradients > 100
    result = ENGINES[engine](make_posterior("cholesky"), stop=Seconds(1e-6) | Gradients(10**9))
    assert result.reason.startswith("because the budget of 1e-06 seconds is used up (")
    assert len(result.trace) == 1
    result = ENGINES[engine](make_posterior("cholesky"), stop=Gradients(10**9), max_evaluations=2)
    assert result.reason.startswith("because the budget of 2 evaluations is used up (")


def test_an_engine_that_sets_no_mark_is_refused(monkeypatch):
    monkeypatch.setattr(Engine, "mark", lambda engine: None)
    q = make_posterior("cholesky")
    before = q.snapshot()
    with pytest.raises(
        InputError, match=r"^Steps\.advance returned a standing without a mark: call self\.mark\(\) in "
    ):
        quiet(q, make_model(), VN(q))
    assert all(map(torch.equal, q.snapshot(), before))


def test_the_looser_tolerance_counts():
    result = quiet(make_posterior("cholesky"), make_model(), stop=NormBelow(0.1))
    assert result.converged
    assert 1e-3 < result.norm <= 0.1


@pytest.mark.parametrize("given", ["stop", "callback"])
def test_what_a_criterion_remembers_is_in_the_checkpoint(tmp_path, given):
    """Cut in the middle of a block, the run ends at the step where it would have ended."""
    lengths = []
    for cuts in ((), (17,), (3, 30)):
        torch.manual_seed(0)
        for cut in (*cuts, None):
            q, slope = (
                make_posterior("cholesky"),
                SlopeBelow(0.5, block=10) if given == "stop" else SlopeStop(10, 3, 0.5),
            )
            calls = [lambda record, cut=cut: record.evaluations == cut]
            options = {"stop": slope} if given == "stop" else {"callbacks": [slope]}
            options = {"callbacks": [*options.pop("callbacks", []), *calls], **options, "tolerance": 1e-3}
            file = tmp_path / f"{len(cuts)}.pt"
            result = quiet(q, make_model().log_joint, SRVN(q, lr=0.02, estimator=Stein(16)), checkpoint=file, **options)
        lengths.append(len(result.trace))
        assert slope.steps == len(result.trace) == 10 * len(slope.means)
    assert lengths == [lengths[0]] * 3
    assert 30 <= lengths[0] < 1000


def test_averages_over_other_blocks_are_refused(tmp_path):
    q, file = make_posterior("cholesky"), tmp_path / "run.pt"
    quiet(q, make_model(), checkpoint=file, stop=SlopeBelow(block=2), max_evaluations=3)
    text = (
        r"does not hold what this run needs \(InputError: the averages are over blocks of 2 steps, and here block=3\."
    )
    with pytest.raises(InputError, match=text):
        quiet(make_posterior("cholesky"), make_model(), checkpoint=file, stop=SlopeBelow(block=3))
    result = quiet(make_posterior("cholesky"), make_model(), checkpoint=file)  # without it the run goes on
    assert result.converged


def test_under_its_short_names():
    assert torchngvi.fit is fit


class KilledError(BaseException):
    pass


def killing(function, call, error=KilledError):
    count = itertools.count(1)

    def f(theta):
        if next(count) == call:
            raise error
        return function(theta)

    return f


@pytest.mark.accuracy
@pytest.mark.parametrize("every", [1, 4])
def test_every_engine_writes_as_often_as_it_is_told(tmp_path, monkeypatch, every):
    """Also within one sample average, and the run goes on from there to the last bit."""
    written = []
    save = sys.modules["torchngvi.fitting.checkpoints"].Checkpoint.save
    monkeypatch.setattr(
        "torchngvi.fitting.checkpoints.Checkpoint.save",
        lambda file, state: (written.append(len(state["trace"])), save(file, state)),
    )

    def run(file, call=None, seed=5):
        torch.manual_seed(seed)
        q, f = CholeskyGaussian(3, dtype=torch.float64), make_model().log_joint
        result = quiet(
            q, f if call is None else killing(f, call), tolerance=0.01, checkpoint=file, checkpoint_every=every
        )
        return q, [record[:-1] for record in result.trace], str(result)

    wanted = run(tmp_path / "whole.pt")
    records = len(wanted[1])
    assert records > 7
    assert written == [0, *range(0, records, every), records - 1]
    for call in range(3, 200, 7):
        file = tmp_path / f"{call}.pt"
        try:
            got = run(file, call)
        except KilledError:
            got = run(file, seed=99)
        assert same_bits(got[0], wanted[0])
        assert got[1:] == wanted[1:]


def test_a_first_pass_that_is_killed_is_made_again(tmp_path):
    """Over the same batches: their order is drawn after the first write."""
    calls = itertools.count(1)
    model = make_model()

    class Killed(GeneralizedLinear):
        def expected_energy(self, frame):
            if next(calls) == stop:
                raise KilledError
            return super().expected_energy(frame)

    ends = []
    for stop in (0, 5):
        torch.manual_seed(0)
        calls = itertools.count(1)
        for _ in range(2):
            q, file = make_posterior("cholesky"), tmp_path / f"{stop}.pt"
            try:
                result = quiet(q, Killed(model.X, model.y), batch_size=3, checkpoint=file)
            except KilledError:
                assert same_bits(q, make_posterior("cholesky"))
                torch.manual_seed(99)
        ends.append((q, [record[:-1] for record in result.trace]))
    assert same_bits(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_an_interrupt_at_another_start_goes_back():
    """q, the loss and the trace are of the last place before it."""
    torch.manual_seed(1)
    q = CholeskyGaussian(2, dtype=torch.float64)

    def interrupt(record):
        if float(q.mean.abs().max()) > 0.5:  # at the other start
            raise KeyboardInterrupt

    result = quiet(q, two, callbacks=[interrupt])
    assert result.reason == "because it was interrupted."
    assert float(q.mean.abs().max()) < 0.1
    assert (result.loss, result.norm) == (result.trace[-1].loss, result.trace[-1].norm)


def test_what_is_refused_on_the_way_leaves_q_at_the_last_record():
    q, model = CholeskyGaussian(3, dtype=torch.float64), make_model()
    seen = []

    def f(theta):
        if len(seen) == 3:
            raise InputError("no more")
        return model.log_joint(theta)

    with pytest.raises(InputError, match="^no more$"):
        quiet(q, f, tolerance=1e-3, callbacks=[lambda record: seen.append(q.snapshot())])
    assert all(torch.equal(*pair) for pair in zip(q.coordinates, seen[-1], strict=True))


def test_the_bar_names_the_phases(monkeypatch, pooled):
    phases = []
    show = Loop._show_phase
    monkeypatch.setattr(Loop, "_show_phase", lambda loop, phase: (show(loop, phase), phases.append(loop.bar.desc)))
    torch.manual_seed(0)
    fit(CholeskyGaussian(3, dtype=torch.float64), make_model().log_joint)
    assert [phase.rstrip(": ") for phase in phases[:2]] == [
        "VN, a rough mode",
        "VN, 32 draws in a pool" if pooled else "VN, 32 draws",
    ]
    assert [phase.rstrip(": ") for phase in phases[-2:]] == ["VN, other starts", "VN, whether a Gaussian fits"]
    phases.clear()
    fit(make_posterior("cholesky"), make_model(), batch_size=5)
    assert [phase.rstrip(": ") for phase in phases] == ["NewtonCG, a pass over mini-batches", "NewtonCG"]


class Halving(Engine):
    """Halves the mean of q, and ends by itself below a thousandth."""

    name = "Halving"

    def __init__(self, q, least=1e-3):
        super().__init__(q)
        self.count, self.least, self.moved = 0, least, False

    def advance(self):
        if self.moved:
            self.q.initialize_(self.q.mean / 2, self.q.scale_tril)
        self.moved = True
        self.mark()
        self.count += 1
        loss = self.q.mean.square().sum().detach()
        if float(loss) < self.least:
            return None
        record = Record(self.count, float(loss), float(loss) ** 0.5, 0.5, 0, self.count, 0.0)
        return Standing(record, torch.tensor(False), loss, (self.count, self.count))

    def ending(self, stop, last):
        return super().ending(stop or Stop("small enough.", converged=True), last)

    def state_dict(self):
        return {"posterior": self.q.state_dict(), "count": self.count}

    def load_state_dict(self, state):
        self.q.load_state_dict(state["posterior"])
        self.count, self.moved = state["count"], False


@pytest.mark.accuracy
def test_what_a_fit_held_is_freed_at_its_end():
    """The engine, with the optimizer and its matrices, goes without the collector of cycles."""
    gc.collect()
    gc.disable()
    try:
        fit(make_posterior("cholesky"), make_model(), progress=False)
        assert not any(issubclass(type(held), Engine) for held in gc.get_objects())
    finally:
        gc.enable()


def test_an_engine_of_ones_own(capsys):
    q = CholeskyGaussian(1, mean=1.0, dtype=torch.float64)
    result = Loop(Halving(q), Evaluations(100), progress=False).run()
    assert str(result) == "converged, small enough. Negative ELBO 0.003906 after 5 evaluations."
    assert [record.loss for record in result.trace] == [0.25**k for k in range(5)]
    q = CholeskyGaussian(1, mean=1.0, dtype=torch.float64)
    result = Loop(Halving(q), Evaluations(3), callbacks=[lambda record: None]).run()
    assert result.reason.startswith("because the budget of 3 evaluations is used up")
    assert "Halving" in capsys.readouterr().err
    result = Loop(Halving(q), Seconds(100), callbacks=[lambda record: record.loss < 0.05]).run()
    assert result.reason == "because a callback stopped it at natural-gradient norm 0.12."


def smoothed(file=None, steps=150, seed=0, method=ifvb.AIFVB, **options):
    """A run of IFVB with every kind of memory: a schedule, an average, learnt metric, and draws of two sources."""
    torch.manual_seed(seed)
    q = ifvb.MeanFieldGaussian(torch.tensor([1.0, 0.5, -0.3, 0.2]).double())
    draws = torch.Generator().manual_seed(seed)
    opt = method(q, 1.0, metric=ifvb.Recursive(20, beta=0.125, generator=draws), estimator=ifvb.Pathwise(4))
    schedule = LambdaLR(opt, PowerSchedule(0.75, 100.0))
    options = {"window": 20, "patience": 60, "schedule": schedule, **options}
    f = lambda theta: -0.5 * (theta - 0.2).square().sum(-1)  # noqa: E731
    result = ifvb.run(opt, f, steps, checkpoint=file, **options)
    return q.vector.clone(), [record[:-1] for record in result.trace], str(result), result


@pytest.mark.accuracy
@pytest.mark.parametrize("method", [ifvb.IFVB, ifvb.AIFVB])
def test_a_smoothed_run_goes_on_bit_for_bit(tmp_path, method):
    """Cut by callbacks, a budget and an interrupt, at the writes, between them, and a few steps before its best."""
    wanted = smoothed(method=method)
    best = int(re.search(r"at step (\d+)", wanted[2])[1])
    assert 20 < best < 140

    def interrupt(record):
        if record.evaluations == best + 7:
            raise KeyboardInterrupt

    file = tmp_path / "run.pt"
    cuts = [
        {"callbacks": [lambda record: record.evaluations == 3]},
        {"stop": Gradients(4 * (best - 5))},
        {"callbacks": [interrupt]},
        {},
    ]
    for cut in cuts:
        got = smoothed(file, seed=99 if file.exists() else 0, method=method, **cut)
    assert torch.equal(got[0], wanted[0])
    assert got[1:3] == wanted[1:3]


def test_a_smoothed_run_ends_as_any_other(tmp_path, capsys):
    """By criteria, callbacks and interrupts, with the best of what was there; and with a bar."""
    result = smoothed(stop=Gradients(100))[3]
    assert result.reason.startswith("because the budget of 100 gradients is used up (a best smoothed value of ")
    assert result.evaluations == 25
    result = smoothed(stop=Seconds(1e-6))[3]
    assert len(result.trace) == 1
    seen = []
    result = smoothed(callbacks=[lambda record: seen.append(record) or len(seen) == 30], progress=True)[3]
    assert result.reason.startswith("because a callback stopped it at a best smoothed value of ")
    assert seen == result.trace
    assert "AIFVB" in capsys.readouterr().err

    def interrupt(record):
        if record.evaluations == 40:
            raise KeyboardInterrupt

    result = smoothed(callbacks=[interrupt])[3]
    losses = [record.loss for record in result.trace]
    best = min(range(20, 41), key=lambda k: sum(losses[k - 20 : k]))
    assert len(losses) == 40
    assert result.reason.startswith("because it was interrupted. Its best, ")
    assert result.reason.endswith(f" at step {best}, is put back.")


def test_a_smoothed_run_refuses_the_file_of_another(tmp_path):
    file = tmp_path / "run.pt"
    smoothed(file, steps=5)
    for change, text in (
        ({"window": 30}, "its window is 20, here it is 30. Remove it"),
        ({"monitor": lambda: 1.0}, "its monitor is none, here it is a function. Remove it"),
        ({"schedule": None}, "its schedule is LambdaLR, here it is None. Remove it"),
        ({"method": ifvb.IFVB}, "its method is AIFVB, here it is IFVB. Remove it"),
    ):
        with pytest.raises(InputError, match=re.escape(text)):
            smoothed(file, **change)
    with pytest.raises(InputError, match=r"^stop is a criterion of torchngvi\.fitting"):
        smoothed(stop=3)
    with pytest.raises(InputError, match=r"^callbacks is a list of functions that take the Record of a step"):
        smoothed(callbacks=3)


@pytest.mark.accuracy
def test_the_front_door_of_a_flat_posterior():
    """Without an optimizer by IFVB, until the smoothed bound stops rising; the same as by the parts."""
    f = lambda theta: -0.5 * (theta - 0.2).square().sum(-1)  # noqa: E731
    start = torch.tensor([0.5, 0.0]).double()
    torch.manual_seed(0)
    q = ifvb.MeanFieldGaussian(start)
    result = quiet(q, f)
    assert not result.converged
    assert result.reason.startswith("because the smoothed value has not improved for 200 steps, which of stochastic ")
    assert abs(result.loss + 0.5 * math.log(2 * math.pi)) < 1e-3
    assert float((q.vector - torch.tensor([0.2, 0.0])).abs().max()) < 0.01
    ends = []
    for fitted in (
        lambda q, opt: quiet(q, f, max_evaluations=120),
        lambda q, opt: ifvb.run(opt, f, 120, schedule=LambdaLR(opt, PowerSchedule())),
    ):
        torch.manual_seed(0)
        q = ifvb.MeanFieldGaussian(start)
        ends.append((q, fitted(q, ifvb.IFVB(q))))
    assert torch.equal(ends[0][0].vector, ends[1][0].vector)
    assert ends[0][1].loss == ends[1][1].loss
    assert ". Raise max_evaluations. Its best, " in ends[0][1].reason
    text = "^tolerance bounds the natural-gradient norm, and that of stochastic gradients does not vanish: MeanFieldGa"
    with pytest.raises(InputError, match=text):
        quiet(q, f, tolerance=0.1)


def test_sample_averages_are_an_engine():
    torch.manual_seed(0)
    q = CholeskyGaussian(3, dtype=torch.float64)
    result = Loop(SampleAverages(q, LogJoint(make_model().log_joint), 0.1), NormBelow(0.1), progress=False).run()
    assert result.converged
