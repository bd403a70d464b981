"""A step at fixed addresses is the ordinary step bit for bit, and one graph for every posterior."""

import pytest
import torch
from helpers import SMALL_BATCHES as BATCHES
from helpers import coordinates, distance, make_model, make_posterior, needs_compile, same_bits
from torch._dynamo.testing import CompileCounterWithBackend

import torchngvi as ngvi
from torchngvi import VN, CholeskyGaussian, NaturalGaussian, Stein
from torchngvi.errors import InputError
from torchngvi.expectations import Autograd, Quasi
from torchngvi.models import SoftmaxRegression
from torchngvi.optim import CapturedStep
from torchngvi.registry import POSTERIORS
from torchngvi.stepsizes import Constant
from torchngvi.structures import arrow, block_diagonal

F64 = torch.float64
METHODS = {"trial": {}, "lr": {"lr": 0.5}, "kl radius": {"step_size": ngvi.KLRadius(0.1)}}
STRUCTURES = {"blocks": block_diagonal((1, 2)), "arrow": arrow(groups=2, local=1, globals=1)}
compiles = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def log_joint(theta):
    return -(torch.cosh(theta - 0.5) + 0.3 * theta.square()).sum(-1)


def both(make, target, steps, **settings):
    """Captured steps beside ordinary ones, from the same seed; the two optimizers, and the captured step."""
    optimizers = make(), make()
    step = CapturedStep(optimizers[0], target, **settings)
    for take in (step, lambda: optimizers[1].step(target)):
        torch.manual_seed(0)
        for _ in range(steps):
            take()
    return *optimizers, step


def agree(captured, ordinary):
    assert same_bits(captured.posteriors[0], ordinary.posteriors[0])
    names = ("evaluations", "gradients", "values", "rejections")
    assert [getattr(captured, name) for name in names] == [getattr(ordinary, name) for name in names]
    assert all(torch.equal(*pair) for pair in zip(captured.last, ordinary.last, strict=True))


@pytest.mark.sparse(5)
@pytest.mark.parametrize("settings", METHODS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", POSTERIORS)
def test_a_captured_step_is_the_ordinary_one(name, batch, settings):
    captured, ordinary, _ = both(lambda: VN(make_posterior(name, batch), **METHODS[settings]), make_model(batch), 10)
    agree(captured, ordinary)
    assert distance(captured.posteriors[0], make_posterior(name, batch)) > 0.05


@pytest.mark.sparse(3)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", [NaturalGaussian, ngvi.PrecisionCholeskyGaussian])
def test_a_captured_step_with_structure(kind, structure):
    agree(*both(lambda: VN(kind(3, structure=STRUCTURES[structure], dtype=F64)), make_model(), 8)[:2])


@pytest.mark.parametrize("estimator", [lambda: Stein(8), lambda: Stein(Quasi(8)), Autograd])
def test_draws_are_those_of_the_ordinary_step(estimator):
    target = make_model() if estimator is Autograd else ngvi.LogJoint(log_joint)
    agree(
        *both(lambda: VN(make_posterior("cholesky"), lr=0.1, estimator=estimator(), step_size=Constant()), target, 6)[
            :2
        ]
    )


def test_what_is_known_of_the_curvature_stays_where_it_is():
    captured, ordinary, step = both(lambda: VN(make_posterior("diagonal")), make_model(), 4)
    places = [values[name].data_ptr() for values, name in step._places]
    step()
    assert [values[name].data_ptr() for values, name in step._places] == places
    ordinary.step(make_model())
    kept, expected = captured._state(0)["metric"], ordinary._state(0)["metric"]
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[name], expected[name]) for name in kept)
    assert kept["s1"].abs().sum() > 0


def test_rejected_members_are_the_same():
    model = make_model((3,))
    model.X[1] *= 1e3
    with pytest.warns(ngvi.errors.RejectedStepWarning):
        captured, ordinary, _ = both(
            lambda: VN(make_posterior("natural", (3,)), lr=3.0, step_size=Constant()), model, 3
        )
    agree(captured, ordinary)
    assert captured.rejections > 0


@pytest.mark.parametrize("batch", BATCHES)
def test_at_the_optimum_everything_stands_still(batch):
    q, model = make_posterior("cholesky", batch), make_model(batch)
    step = CapturedStep(VN(q), model, tolerance=1e-6)
    assert not step.run(2)
    assert step.run(30, every=8)
    assert bool((step.status.norm2 <= 1e-12).all())
    there, state = q.snapshot(), [held.tensor.clone() for held in step._state]
    step()
    assert same_bits(q, list(there))
    assert all(torch.equal(held.tensor, before) for held, before in zip(step._state, state, strict=True))
    # one look in eight steps leaves q where one look a step does
    other = make_posterior("cholesky", batch)
    assert CapturedStep(VN(other), model, tolerance=1e-6).run(30, every=1)
    assert same_bits(other, q)


def test_what_was_computed_from_q_is_not_kept():
    q, model = make_posterior("natural"), make_model()
    step = CapturedStep(VN(q), model)
    step()
    before = q.mean.clone()
    step()
    assert not torch.equal(q.mean, before)
    assert torch.allclose(q.coordinates.matrix @ q.mean, q.coordinates.vector)
    step.optimizer.step(model)  # goes on from there
    assert step.optimizer.expectation is not None


def test_a_learning_rate_is_changed_in_place_or_not_at_all():
    model, ends = make_model(), []
    for captured in (True, False):
        q, lr = make_posterior("cholesky"), torch.tensor(0.5, dtype=F64)
        opt = VN(q, lr=lr, step_size=Constant())
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        step = CapturedStep(opt, model) if captured else None
        for _ in range(5):
            opt.step(model) if step is None else step()
            schedule.step()
        assert float(lr) == 0.5**6
        ends.append(coordinates(q))
    assert same_bits(*ends)
    step = CapturedStep(VN(make_posterior("cholesky"), lr=0.5, step_size=Constant()), model)
    step()
    step.optimizer.param_groups[0]["lr"] = 0.25
    with pytest.raises(InputError, match="^the learning rate is another than at the first call, and a graph holds it"):
        step()


@pytest.mark.accuracy
def test_a_captured_step_reads_nothing_back():
    for name in POSTERIORS:
        q, model = make_posterior(name).to("meta"), make_model().to("meta")
        step = CapturedStep(VN(q), model, tolerance=1e-3)
        for _ in range(3):
            step()
        assert step.done.is_meta


def one_graph(make, target, backend, steps=4):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    captured, ordinary, _ = both(make, target, steps, backend=counter)
    assert counter.frame_count == 1  # fullgraph, and no second one for the steps after the first
    agree(captured, ordinary)


@pytest.mark.accuracy
@compiles
@needs_compile
def test_the_default_step_is_one_graph():
    one_graph(lambda: VN(make_posterior("cholesky")), make_model(), "eager")


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(("batch", "settings"), [((), "trial"), ((3,), "trial"), ((), "lr"), ((), "kl radius")])
@pytest.mark.parametrize("name", POSTERIORS)
def test_every_posterior_is_one_graph(name, batch, settings):
    one_graph(lambda: VN(make_posterior(name, batch), **METHODS[settings]), make_model(batch), "aot_eager", 12)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", [NaturalGaussian, ngvi.PrecisionCholeskyGaussian])
def test_a_posterior_with_structure_is_one_graph(kind, structure):
    one_graph(lambda: VN(kind(3, structure=STRUCTURES[structure], dtype=F64)), make_model(), "eager")


@compiles
@pytest.mark.slow
def test_inductor_takes_the_step():
    torch._dynamo.reset()
    captured, ordinary, _ = both(lambda: VN(make_posterior("cholesky")), make_model(), 8, backend="inductor")
    assert distance(captured.posteriors[0], ordinary.posteriors[0]) < 1e-12


def test_expectation_is_what_was_evaluated_last():
    model = make_model()
    for name in ("cholesky", "precision", "natural"):
        q = make_posterior(name)
        opt = VN(q)
        assert opt.expectation is None
        opt.step(model)  # found by trial: evaluated where it led
        value, derivative = model.expected_energy(q.frame())
        expected, (g, H) = derivative.raw(), opt.expectation
        assert torch.allclose(g, expected.g, atol=1e-12)
        assert torch.allclose(H, expected.H, atol=1e-12)
    q = make_posterior("diagonal")
    opt = VN(q, lr=0.5, step_size=Constant())
    opt.evaluate(model)
    H = model.expected_energy(q.frame())[1].raw().H
    assert torch.allclose(opt.expectation.H, H.diagonal(), atol=1e-12)
    assert opt.evaluations == 1
    opt.step(model)
    assert opt.expectation is None  # q has moved on
    opt.evaluate(model)
    q.initialize_(mean=1.0)
    assert opt.expectation is None


def test_several_classes_in_a_captured_step():
    X = torch.randn(30, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    agree(*both(lambda: VN(CholeskyGaussian(4, dtype=F64)), SoftmaxRegression(X, torch.arange(30) % 3), 5)[:2])
