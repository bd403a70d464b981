"""Mixed models in batches of groups: the bound as a function of q(g), and fits that need memory for one batch."""

import functools
import re

import pytest
import torch
from helpers import DTYPE, close, randn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchngvi import VN, CholeskyGaussian, NaturalGaussian, PrecisionCholeskyGaussian, Quadrature, fit
from torchngvi.errors import InputError
from torchngvi.fitting import Evaluations, NormBelow
from torchngvi.fitting.steps import PassesOverGroups
from torchngvi.interfaces import Coordinates
from torchngvi.models import MixedLogJoint
from torchngvi.models.mixed_batches import MixedInBatches, moved
from torchngvi.structures import arrow

GROUPS = 24
CASES = [("poisson_log", 1), ("poisson_log", 2), ("bernoulli_logit", 1), ("bernoulli_logit", 2)]


def made(family, local, groups=GROUPS):
    """Groups of three to six rows, in a random order."""
    generator = torch.Generator().manual_seed(5)
    number = torch.cat([torch.full((3 + k % 4,), k) for k in range(groups)])
    number = number[torch.randperm(len(number), generator=generator)]
    X = torch.stack([torch.ones(len(number), dtype=DTYPE), randn(len(number), seed=1)], -1)
    effects = 0.7 * randn(groups, local, seed=2)
    eta = 0.4 * X.sum(-1) + (effects[number] * X[:, :local]).sum(-1)
    if family == "poisson_log":
        y = torch.poisson(eta.exp(), generator)
    else:
        y = (torch.rand(len(number), dtype=DTYPE, generator=generator) < eta.sigmoid()).double()
    weights, offset = 0.5 + torch.rand(len(number), dtype=DTYPE, generator=generator), 0.1 * randn(len(number), seed=3)
    return MixedLogJoint(X, y, (X[:, :local], number), family, weights=weights, offset=offset)


model_of = functools.cache(made)


@functools.cache
def best(family, local):
    q = model_of(family, local).posterior()
    return q, fit(q, model_of(family, local), tolerance=1e-9, progress=False).loss


def somewhere(family, local):
    """A q that is not at the optimum."""
    model = model_of(family, local)
    q = model.posterior()
    q.initialize_(q.mean + 0.1 * randn(q.dim, seed=4), q.stddev)
    fit(q, model, progress=False, max_evaluations=2)
    return q


def in_batches(model, q, groups, tolerance=1e-6):
    """The bound in batches with the groups of q, and q(g)."""
    reduced = MixedInBatches(model, groups, tolerance)
    top = reduced.begin_at(q.mean, q.whitener())
    shared = PrecisionCholeskyGaussian(reduced.dim, dtype=DTYPE)
    shared.restore(Coordinates(reduced.mean.clone(), top.clone()))
    return reduced, shared


def held(reduced):
    """The same with the groups as they are: nothing is solved."""
    reduced.gradient, reduced.tolerance = 10.0, 1e6
    return reduced


@pytest.mark.parametrize(("family", "local"), CASES)
class TestTheBound:
    @pytest.mark.sparse(3)
    def test_with_the_groups_held_it_is_that_of_the_whole(self, family, local):
        """Value, both parts of the natural norm, and the derivative in the frame of q(g)."""
        model, q = model_of(family, local), somewhere(family, local)
        reduced, shared = in_batches(model, q, 7)
        value, packet = held(reduced).expected_energy(shared.frame())
        close(value - shared.entropy().detach(), model.negative_elbo(q).detach(), 1e-11)
        whole = model.expected_energy(q.frame())[1].framed(q.frame())
        mine = packet.framed(shared.frame())
        P = reduced.dim
        close(mine.a, whole.a[-P:], 1e-10)
        close(mine.W, model.structure.parts(whole.W)[1].square[0], 1e-10)
        local_, shared_ = reduced.left, reduced.gradient
        norm2 = q.norm2(q.local(Quadrature()(q, model)))
        assert local_**2 + shared_**2 == pytest.approx(float(norm2), rel=1e-10)

    @pytest.mark.sparse(3)
    def test_the_steps_of_the_groups_are_those_of_variational_newton(self, family, local):
        """The precision of the groups and their border after S' = (1 - ρ)S + ρH of all coordinates."""
        model, q = model_of(family, local), somewhere(family, local)
        reduced, shared = in_batches(model, q, GROUPS)
        frame = shared.frame()
        V = frame.dense() @ frame.dense().mT
        here = reduced.locals._replace(rho=torch.full((GROUPS,), 0.5, dtype=DTYPE))
        seen = reduced._see(here, reduced._rows(reduced.order[0], 0), frame.mean, V)
        there = moved(here, seen)
        natural = NaturalGaussian.from_posterior(q)
        H = natural._raw(model.expected_energy(natural.frame())[1])[1]
        expected = model.structure.parts(torch.lerp(natural.coordinates.matrix, H, 0.5))[0]
        close(there.precision, expected.square, 1e-12)
        close(there.slope @ there.precision, expected.border, 1e-12)

    @pytest.mark.accuracy
    def test_its_derivative_is_that_of_the_bound_solved_again(self, family, local):
        """The envelope theorem, by central differences along a random direction."""
        model, q = model_of(family, local), somewhere(family, local)
        reduced, shared = in_batches(model, q, 10, tolerance=1e-9)
        P = reduced.dim
        x, R = 0.3 * randn(P, seed=6), 0.3 * randn(P, P, seed=7).tril()
        mean, root = shared.mean.clone(), shared.precision_tril.clone()
        eye = torch.eye(P, dtype=DTYPE)

        def bound(h):
            turned = root @ torch.linalg.inv(eye + h * R.mT).mT.tril() if h else root
            shared.restore(Coordinates(mean + torch.linalg.solve(root.mT, h * x), turned))
            for _ in range(3):  # with the tolerance that is left for the end
                reduced.gradient = 0.0
                value, packet = reduced.expected_energy(shared.frame())
            return float(value - shared.entropy().detach()), packet

        _, packet = bound(0.0)
        a, W = packet.framed(shared.frame())
        told = a @ x + ((W - eye) * R).sum()
        h = 1e-4
        found = (bound(h)[0] - bound(-h)[0]) / (2 * h)
        assert found == pytest.approx(float(told), rel=2e-6)

    @pytest.mark.accuracy
    @pytest.mark.parametrize("groups", [5, GROUPS])
    def test_the_optimum_is_that_of_the_whole(self, family, local, groups):
        model, (optimum, loss) = model_of(family, local), best(family, local)
        q = model.posterior()
        result = fit(q, model, batch_groups=groups, progress=False, tolerance=1e-6)
        assert result.converged, result.reason
        assert result.posterior is q
        assert result.loss == pytest.approx(loss, abs=1e-9)
        assert float(model.negative_elbo(q).detach()) == pytest.approx(loss, abs=1e-9)
        close(q.mean, optimum.mean, 1e-5)
        close(q.stddev, optimum.stddev, 1e-5)


@pytest.mark.accuracy
def test_from_the_standard_normal():
    """Far from the optimum no step leaves the cone, and none raises the bound."""
    model, (_, loss) = model_of("poisson_log", 2), best("poisson_log", 2)
    q = PrecisionCholeskyGaussian(model.dim, structure=model.structure, dtype=DTYPE, scale=0.5)
    seen = []
    result = fit(q, model, batch_groups=6, progress=False, callbacks=[lambda record: seen.append(record.loss)])
    assert result.converged, result.reason
    assert result.loss == pytest.approx(loss, abs=1e-8)
    assert all(after <= before + 1e-9 for before, after in zip(seen, seen[1:], strict=False))


def test_a_natural_gaussian_is_fitted_too():
    model, (_, loss) = model_of("bernoulli_logit", 1), best("bernoulli_logit", 1)
    q = NaturalGaussian.from_posterior(model.posterior())
    assert fit(q, model, batch_groups=10, progress=False).converged
    assert float(model.negative_elbo(q).detach()) == pytest.approx(loss, abs=1e-8)


@pytest.mark.accuracy
def test_records_tell_where_q_is():
    """A callback sees the q of which the record tells the loss, also after a step that was taken back."""
    model = model_of("bernoulli_logit", 1)
    q = PrecisionCholeskyGaussian(model.dim, structure=model.structure, dtype=DTYPE, scale=0.3)
    errors, rejected = [], []

    def compare(record):
        errors.append(abs(record.loss - float(model.negative_elbo(q).detach())))
        rejected.append(record.rejections)

    fit(q, model, batch_groups=10, progress=False, callbacks=[compare])
    assert max(errors) < 1e-9
    assert rejected[-1] > 0


@pytest.mark.accuracy
def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path):
    model, runs = model_of("poisson_log", 2), []
    for name, stops in (("whole", (100,)), ("cut", (3, 6, 100))):
        for most in stops:
            q = model.posterior()
            result = fit(
                q,
                model,
                batch_groups=7,
                progress=False,
                max_evaluations=most,
                checkpoint=tmp_path / name,
                checkpoint_every=1,
            )
        runs.append((q, result))
    (q, result), (other, again) = runs
    assert torch.equal(q.mean, other.mean)
    assert torch.equal(q.coordinates.matrix, other.coordinates.matrix)
    assert (result.loss, result.evaluations) == (again.loss, again.evaluations)
    assert result.converged


class Widest(TorchDispatchMode):
    """The largest tensor that is made, in numbers."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.most = max(self.most, tensor.numel())
        return result


@pytest.mark.accuracy
def test_a_pass_needs_memory_for_one_batch():
    """The largest tensor of a pass is of a batch: with twice as many groups it is as large."""
    widest = []
    for groups in (40, 80):
        model = made("poisson_log", 2, groups)
        reduced, shared = in_batches(model, model.posterior(), 10)
        with Widest() as seen:
            reduced.expected_energy(shared.frame())
        widest.append(seen.most)
    assert widest[0] == widest[1]


class TestRefusals:
    def refused(self, text, q, target, *optimizer, **settings):
        with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
            fit(q, target, *optimizer, progress=False, **{"batch_groups": 5, **settings})

    def test_settings(self):
        model = model_of("poisson_log", 1)
        q = model.posterior()
        text = "batch_groups= has its own steps and its own batches; leave optimizer= and batch_size= out."
        self.refused(text, q, model, VN(q))

    def test_targets_and_posteriors(self):
        model = model_of("poisson_log", 1)
        text = "batch_groups is for a Gaussian q of a MixedModel; leave it out for other targets."
        self.refused(text, model.posterior(), lambda theta: -theta.square().sum(-1))
        text = (
            f"batch_groups needs a q over the arrow of the model, {model.structure}, as model.posterior() makes; got a "
            f"CholeskyGaussian over Dense(dim={model.dim})."
        )
        self.refused(text, CholeskyGaussian(model.dim, dtype=DTYPE), model)

    def test_there_is_no_log_joint_of_the_globals(self):
        reduced = MixedInBatches(model_of("poisson_log", 1), 5, 1e-5)
        text = "a bound in batches of groups has no log joint of the globals alone."
        with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
            reduced.log_joint(torch.zeros(1, reduced.dim, dtype=DTYPE))


def test_an_interrupt_goes_back_to_both_parts():
    model = model_of("poisson_log", 1)
    q = PrecisionCholeskyGaussian(model.dim, structure=arrow(groups=GROUPS, local=1, globals=3), dtype=DTYPE, scale=0.3)
    engine = PassesOverGroups(q, model, 10, NormBelow(1e-5) | Evaluations(100))
    engine.begin()
    engine.advance()
    place, mean = engine.here(), q.mean.clone()
    engine.advance()
    assert not torch.equal(q.mean, mean)
    engine.go_back(place)
    close(q.mean, mean, 1e-14)
