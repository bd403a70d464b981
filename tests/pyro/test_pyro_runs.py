"""Runs of `NaturalSVI`: falling steps and their average, what is said of them, and runs that were cut off."""

import functools
import math
import re

import pytest
import torch

import torchngvi as ngvi
from torchngvi.errors import InputError
from torchngvi.fitting import Gradients, Seconds
from torchngvi.models.likelihoods import GaussianNoise

pyro = pytest.importorskip("pyro", reason="needs Pyro: pip install 'torchngvi[pyro]'")

import pyro.distributions as dist  # noqa: E402
from pyro.distributions import constraints  # noqa: E402
from pyro.nn import PyroModule, PyroParam  # noqa: E402

from torchngvi.adapters.pyro import AutoGaussian, NaturalSVI  # noqa: E402

ROWS, SIZE = 400, 40


pytestmark = pytest.mark.usefixtures("pyro_in_float64")


@functools.cache
def regression(family, seed):
    """A regression on mini-batches as a model of Pyro, and the same with a known bound; (model, exact, least loss)."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    eta = X @ torch.randn(4, generator=generator, dtype=torch.float64)
    noise = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    y = eta + 0.5 * noise if family == "gaussian" else (torch.sigmoid(eta) > torch.special.ndtr(noise)).double()

    def model():
        w = pyro.sample("w", dist.Normal(0, 2).expand([4]).to_event(1))
        with pyro.plate("rows", ROWS, subsample_size=SIZE) as rows:
            eta = X[rows] @ w
            likelihood = dist.Normal(eta, 0.5) if family == "gaussian" else dist.Bernoulli(logits=eta)
            pyro.sample("y", likelihood, obs=y[rows])

    kind = GaussianNoise(0.5) if family == "gaussian" else "bernoulli_logit"
    exact = ngvi.GeneralizedLinear(X, y, family=kind, prior_precision=0.25)
    return model, exact, ngvi.fit(ngvi.CholeskyGaussian(4, dtype=torch.float64), exact, progress=False).loss


def above(guide, exact, best):
    with torch.no_grad():
        return exact.negative_elbo(guide.posterior).item() - best


@pytest.mark.accuracy
@pytest.mark.parametrize(("family", "seed"), [("gaussian", 1), ("logistic", 2)])
def test_minibatches_end_within_a_tenth_of_a_nat(family, seed):
    """By falling steps and their average, from a rate at which single steps are nats above the best."""
    model, exact, best = regression(family, seed)
    guide = AutoGaussian(model)
    svi = NaturalSVI(model, guide)
    result = svi.run(500, progress=False)
    assert above(guide, exact, best) < 0.1
    assert not result.converged  # which stochastic steps never say
    assert not bool(result.members_converged)
    said = re.fullmatch(
        r"as far as these steps can tell: the loss was steady at \S+ ± \S+, and the noise of the gradients leaves the "
        r"average about (\S+) nats above the best\.(?: For 0\.1 nats take .*)?",
        result.reason,
    )
    assert said is not None
    assert above(guide, exact, best) < 3 * float(said[1]) < 0.5
    assert svi.natural.param_groups[0]["lr"] == 0.1  # again


def test_what_a_short_run_is_short_of():
    """Two draws a step and few steps: the number of nats that is told is about right, with the steps that it takes."""
    model, exact, best = regression("gaussian", 1)
    guide = AutoGaussian(model)
    svi = NaturalSVI(model, guide, num_particles=2)
    svi.run(60, progress=False)
    result = svi.run(60, progress=False)
    said = re.search(
        r"about (\S+) nats above the best\. For 0\.1 nats take about (\d+) steps, or as many", result.reason
    )
    assert said is not None, result.reason
    nats, steps = float(said[1]), int(said[2])
    assert steps == pytest.approx(60 * nats / 0.1, rel=0.15)  # both are rounded to a digit
    assert nats / 5 < above(guide, exact, best) < 5 * nats


def test_where_the_loss_still_falls_q_is_the_last_step(monkeypatch):
    def model():
        pyro.sample("x", dist.Normal(300.0, 1.0))

    guide = AutoGaussian(model, init_loc_fn=lambda site: torch.tensor(0.0))
    svi = NaturalSVI(model, guide, natural=lambda q: ngvi.IBLR(q, lr=0.01, step_size=ngvi.KLRadius(0.5)))
    steps, step = [], svi.step

    def watched():
        loss = step()
        steps.append(guide.posterior.mean.clone())
        return loss

    monkeypatch.setattr(svi, "step", watched)
    result = svi.run(16, progress=False)
    assert re.match(r"because the loss still changed by -.* in the last quarter\. Take more steps\.", result.reason)
    assert torch.equal(guide.posterior.mean, steps[-1])


def test_the_rates_fall_unless_parameters_move():
    """As 2/(2/ρ + t) from the rate of the optimizer; q keeps up with an optimizer that moves parameters."""
    for optim, falls in (("none", True), ("pyro", False)):
        trace = made(optim, 3).run(40, Y, progress=False).trace
        steps = [record.step for record in trace[20:]]  # too short to be clipped
        assert steps == pytest.approx([2 / (20 + t * falls) for t in range(20, 40)])


class KilledError(BaseException):
    pass


class Scale(PyroModule):
    """A mean that is latent, a scale that is a parameter of the module, and rows that are subsampled."""

    def __init__(self):
        super().__init__()
        self.scale = PyroParam(torch.tensor(1.0), constraint=constraints.positive)

    def forward(self, y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y), subsample_size=5) as rows:
            pyro.sample("y", dist.Normal(x, self.scale), obs=y[rows])


def with_param(y):
    scale = pyro.param("scale", torch.tensor(1.0), constraint=constraints.positive)
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y), subsample_size=5) as rows:
        pyro.sample("y", dist.Normal(x, scale), obs=y[rows])


Y = torch.linspace(-1.0, 4.0, 20, dtype=torch.float64)


def made(optim, seed):
    """A new process: nothing but the seed."""
    pyro.clear_param_store()
    torch.manual_seed(seed)
    if optim == "none":
        return NaturalSVI(with_param, AutoGaussian(with_param))
    if optim == "pyro":
        return NaturalSVI(with_param, AutoGaussian(with_param), pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.99}))
    if optim == "scheduler":
        given = {"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.05}, "gamma": 0.9}
        return NaturalSVI(with_param, AutoGaussian(with_param), pyro.optim.ExponentialLR(given))
    model = Scale()
    return NaturalSVI(model, AutoGaussian(model), torch.optim.Adam(model.parameters(), lr=0.05))


def state(svi, result):
    q, scale = svi.guide.posterior, pyro.param("scale") if svi.model is with_param else svi.model.scale
    return [*(part.tolist() for part in q.coordinates), scale.tolist(), [r[:-1] for r in result.trace], str(result)]


@pytest.mark.sparse(3)
@pytest.mark.parametrize(
    ("optim", "call", "local"),
    [("none", 17, False), ("pyro", 1, False), ("pyro", 17, False), ("scheduler", 2, False), ("torch", 17, False)]
    + [("torch", 17, True)],  # parameters that the module keeps to itself
)
def test_a_run_that_was_killed_goes_on_to_the_last_bit(tmp_path, monkeypatch, optim, call, local):
    """Posterior, parameters, both optimizers, averages and generators; the second process begins with another seed."""
    with pyro.settings.context(module_local_params=local):
        whole = made(optim, 3)
        expected = state(whole, whole.run(30, Y, progress=False, checkpoint=tmp_path / "whole"))
        svi, calls = made(optim, 3), []
        step = svi.step

        def killed(*args):
            calls.append(1)
            if len(calls) == call:
                raise KilledError
            return step(*args)

        monkeypatch.setattr("torchngvi.adapters.pyro.svi._EVERY", 5)
        monkeypatch.setattr(svi, "step", killed)
        with pytest.raises(KilledError):
            svi.run(30, Y, progress=False, checkpoint=tmp_path / "run")
        resumed = made(optim, 99)
        again = []
        result = resumed.run(30, Y, progress=False, checkpoint=tmp_path / "run", callbacks=[again.append])
        assert state(resumed, result) == expected
        assert len(again) == 30 - max(call - 2, 0) // 5 * 5  # it went on from a file, and not from the start
        if optim != "none":
            assert expected[2] != 1.0


def test_a_checkpoint_does_not_change_the_run(tmp_path):
    runs = []
    for file in (None, tmp_path / "run"):
        svi = made("pyro", 3)
        runs.append(state(svi, svi.run(20, Y, progress=False, checkpoint=file)))
    assert runs[0] == runs[1]


def test_a_longer_run_goes_on(tmp_path):
    """The rates and the average do not depend on the number of steps."""
    svi = made("pyro", 3)
    expected = state(svi, svi.run(24, Y, progress=False))
    svi = made("pyro", 3)
    svi.run(12, Y, progress=False, checkpoint=tmp_path / "run")
    svi = made("pyro", 4)
    assert state(svi, svi.run(24, Y, progress=False, checkpoint=tmp_path / "run")) == expected


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    file = tmp_path / "run"
    made("pyro", 3).run(8, Y, progress=False, checkpoint=file)
    with pytest.raises(InputError, match="its fingerprint of the data is"):
        made("pyro", 3).run(8, Y + 1, progress=False, checkpoint=file)
    with pytest.raises(InputError, match="its optim is .*lrd.*, here it is"):
        made("scheduler", 3).run(8, Y, progress=False, checkpoint=file)
    svi = made("pyro", 3)
    svi.num_particles = 8
    with pytest.raises(InputError, match="its num_particles is 16, here it is 8"):
        svi.run(8, Y, progress=False, checkpoint=file)


def test_an_interrupt_within_a_step_leaves_the_best(monkeypatch):
    """After q has moved and before the parameters have: both are put back, or q is the average where there is one."""
    for optim, steps in (("pyro", 3), ("none", 3), ("none", 100)):
        svi = made(optim, 3)
        svi.guide.setup(Y)
        calls, step, seen = [], svi.natural.step, []

        def interrupted(steps=steps, calls=calls, step=step, seen=seen, svi=svi):
            seen.append((svi.guide.posterior.mean.item(), pyro.param("scale").item()))
            step()
            calls.append(1)
            if len(calls) == steps:
                raise KeyboardInterrupt

        monkeypatch.setattr(svi.natural, "step", interrupted)
        result = svi.run(400, Y, progress=False)
        assert result.reason == "because it was interrupted."
        assert len(result.trace) == steps - 1
        assert pyro.param("scale").item() == seen[-2][1]
        mean = svi.guide.posterior.mean.item()
        if steps == 3:
            assert mean == seen[-2][0]
        else:
            tail = torch.tensor([m for m, _ in seen[50:]])
            assert tail.min() < mean < tail.max()
            assert mean not in tail.tolist()
        assert svi.natural.param_groups[0]["lr"] == 0.1


def test_what_is_said_beside_parameters_that_move(monkeypatch):
    """At a rate that stays; q is that of the last step."""
    svi = made("pyro", 3)
    means, step = [], svi.step
    monkeypatch.setattr(svi, "step", lambda y: (step(y), means.append(svi.guide.posterior.mean.clone()))[0])
    result = svi.run(100, Y, progress=False)
    assert re.fullmatch(
        r"as far as these steps can tell: the loss was steady at \S+ ± \S+, which at a constant rate may be far above "
        r"the best\. Lower the rate of svi\.natural and compare, or end with fit_guide on all data\.",
        result.reason,
    )
    assert torch.equal(svi.guide.posterior.mean, means[-1])


def test_budgets_and_callbacks():
    svi, records = made("pyro", 3), []
    result = svi.run(100, Y, progress=False, stop=Gradients(160), callbacks=[records.append])
    assert (result.evaluations, result.gradients, len(records)) == (10, 160, 10)
    assert re.match(r"because the budget of 160 gradients is used up \(a loss of \S+ at step 10\)\. ", result.reason)
    result = svi.run(100, Y, progress=False, callbacks=[lambda record: record.evaluations == 9])
    assert re.match(r"because a callback stopped it at a loss of \S+ at step 9\. (The loss|As far as)", result.reason)
    result = svi.run(100, Y, progress=False, stop=Seconds(1e-9))
    assert result.reason.startswith("because the budget of 1e-09 seconds is used up")
    assert math.isfinite(result.loss)
    with pytest.raises(InputError, match="stop"):
        svi.run(8, Y, stop=3)
    with pytest.raises(InputError, match="callbacks is a list of functions"):
        svi.run(8, Y, callbacks=print)
