"""Batches of independent posteriors: what becomes of a member does not depend on the others."""

import pytest
import torch

from torchngvi import SRVN, VN, CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, NaturalGaussian, NewtonCG, fit
from torchngvi.errors import InputError
from torchngvi.fitting import steps
from torchngvi.momentum import Adam, ExponentialAverage, NormalizedMomentum

MEMBERS, ROWS, DIM = 6, 20, 3


@pytest.fixture(autouse=True)
def one_arithmetic(monkeypatch):
    """Calls of all sizes take the kernel, or none do: the two differ in the last digits."""
    monkeypatch.setenv("TORCHNGVI_KERNELS", "1")


def problem(family="bernoulli_logit", shared=False):
    """Members of very different difficulty: some are near the prior, some nearly separable."""
    generator = torch.Generator().manual_seed(3)
    scale = torch.logspace(-1.5, 1.0 if family == "bernoulli_logit" else -0.3, MEMBERS, dtype=torch.float64)
    X = torch.randn(MEMBERS, ROWS, DIM, generator=generator, dtype=torch.float64)
    X = X[0] if shared else scale[:, None, None] * X
    theta = torch.randn(MEMBERS, DIM, 1, generator=generator, dtype=torch.float64)
    eta = (X @ theta)[..., 0]
    if family == "poisson_log":
        return X, torch.poisson(eta.exp(), generator)
    uniform = torch.rand(MEMBERS, ROWS, generator=generator, dtype=torch.float64)
    return X, (uniform < torch.sigmoid(eta)).double()


def fitted(q, X, y, family, optimizer=None):
    model = GeneralizedLinear(X, y, family, classes=(0, 1) if family == "bernoulli_logit" else None)
    result = fit(q, model, None if optimizer is None else optimizer(q), progress=False)
    assert result.converged
    return result


@pytest.mark.sparse(5)
@pytest.mark.parametrize("optimizer", [None, NewtonCG, lambda q: VN(q, lr=0.8)], ids=["default", "newton", "lr"])
@pytest.mark.parametrize("family", ["bernoulli_logit", "poisson_log"])
@pytest.mark.parametrize("kind", [CholeskyGaussian, DiagonalGaussian])
def test_members_in_parts(family, optimizer, kind):
    """The answer of a member is the same in batches of 1, of 4, and of all."""
    X, y = problem(family)
    whole = kind(DIM, (MEMBERS,), dtype=torch.float64)
    most = fitted(whole, X, y, family, optimizer)
    mean, covariance = whole.mean, whole.covariance
    for size in (1, 4):
        counts = []
        for first in range(0, MEMBERS, size):
            here = slice(first, first + size)
            q = kind(DIM, (len(y[here]),), dtype=torch.float64)
            counts.append(fitted(q, X[here], y[here], family, optimizer).evaluations)
            torch.testing.assert_close(q.mean, mean[here], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(q.covariance, covariance[here], rtol=1e-10, atol=1e-10)
        # where some are not better at the mode, all are evaluated once more, also those that are
        assert most.evaluations - max(counts) in ((0,) if family == "bernoulli_logit" else (0, 1))


def in_chunks_of(size, monkeypatch):
    """So many members of a chunk, or all."""
    monkeypatch.setattr(steps.ChunkedSteps, "numbers", 10**9 if size is None else size * ROWS * DIM)


def both(monkeypatch, model, kind=CholeskyGaussian, batch=(MEMBERS,), size=4, **settings):
    """The same fit of all at once, and in chunks."""
    found = []
    for chunk in (None, size):
        in_chunks_of(chunk, monkeypatch)
        q = kind(DIM, batch, dtype=torch.float64)
        assert (steps.members_at_once(q, model) is None) == (chunk is None)
        found.append((q, fit(q, model, progress=False, **settings)))
    return found


def assert_same(found):
    (q, whole), (r, parts) = found
    torch.testing.assert_close(r.mean, q.mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(r.covariance, q.covariance, rtol=1e-10, atol=1e-10)
    assert (parts.evaluations, parts.reason, parts.converged) == (whole.evaluations, whole.reason, whole.converged)
    assert parts.members_converged.equal(whole.members_converged)
    assert len(parts.trace) == len(whole.trace)
    rounding = 0.0  # of a step size, found from falls of the loss: their rounding over the fall, norm² before it
    for one, other in zip(parts.trace, whole.trace, strict=True):
        assert (*one[:3], *one[4:6]) == pytest.approx((*other[:3], *other[4:6]), rel=1e-9, abs=1e-10)
        assert one.step == pytest.approx(other.step, rel=1e-9, abs=1e-10 + rounding)
        rounding = torch.finfo(torch.float64).eps * abs(other.loss) / (other.norm**2 + 1e-12)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("kind", [CholeskyGaussian, DiagonalGaussian, NaturalGaussian])
def test_chunks(kind, size, monkeypatch):
    """In chunks every record of the run is what it is of all members at once."""
    X, y = problem()
    assert_same(both(monkeypatch, GeneralizedLinear(X, y), kind, size=size))


def test_chunks_of_shared_designs(monkeypatch):
    """Designs, weights and offsets that serve all members, and a batch of two dimensions."""
    X, y = problem(shared=True)
    weights = torch.linspace(0.5, 2.0, ROWS, dtype=torch.float64)
    assert_same(both(monkeypatch, GeneralizedLinear(X, y, weights=weights, offset=0.1 * y)))
    X, y = problem()
    model = GeneralizedLinear(X.reshape(3, 2, ROWS, DIM), y.reshape(3, 2, ROWS), prior_precision=torch.eye(DIM) * 2.0)
    assert_same(both(monkeypatch, model, batch=(3, 2), size=4))


def test_chunks_of_priors_and_weights_of_their_own(monkeypatch):
    """What differs from member to member besides the data goes with the member."""
    X, y = problem()
    generator = torch.Generator().manual_seed(5)
    own = torch.rand(3, MEMBERS, DIM, generator=generator, dtype=torch.float64) + 0.5
    weights = torch.rand(MEMBERS, ROWS, generator=generator, dtype=torch.float64)
    assert_same(both(monkeypatch, GeneralizedLinear(X, y, prior_mean=own[0], prior_precision=own[1], weights=weights)))
    one = GeneralizedLinear(X, y, prior_mean=own[0], prior_precision=torch.eye(DIM) + 0.1)
    assert_same(both(monkeypatch, one, size=1))


def test_chunks_to_a_budget(monkeypatch):
    """Members that have not converged when a budget ends the run are told."""
    X, y = problem()
    found = both(monkeypatch, GeneralizedLinear(X, y), max_evaluations=5)
    assert_same(found)
    assert not found[1][1].converged
    assert_same(both(monkeypatch, GeneralizedLinear(X, y), callbacks=[lambda record: record.evaluations > 3]))


def test_chunks_go_on_from_a_checkpoint(tmp_path, monkeypatch):
    """A run that was stopped ends bit for bit where one ends that was not; chunks of another size are refused."""
    X, y = problem("poisson_log")
    model = GeneralizedLinear(X, y, "poisson_log")
    in_chunks_of(4, monkeypatch)
    straight, stopped = (CholeskyGaussian(DIM, (MEMBERS,), dtype=torch.float64) for _ in range(2))
    whole = fit(straight, model, progress=False)
    file = tmp_path / "run.pt"
    first = fit(stopped, model, checkpoint=file, callbacks=[lambda record: record.evaluations > 4], progress=False)
    assert not first.converged
    again = CholeskyGaussian(DIM, (MEMBERS,), dtype=torch.float64)
    with monkeypatch.context() as other:
        in_chunks_of(2, other)
        with pytest.raises(InputError, match="members at once"):
            fit(again, model, checkpoint=file, progress=False)
    rest = fit(again, model, checkpoint=file, progress=False)
    assert again.mean.equal(straight.mean)
    assert again.scale_tril.equal(straight.scale_tril)
    assert [record[:6] for record in rest.trace] == [record[:6] for record in whole.trace]


def test_chunks_see_what_a_callback_writes(monkeypatch):
    """A callback may move q between two steps, and an interrupt puts all members back to the last record."""
    X, y = problem()

    def moves(record):
        if record.evaluations == 4:
            q.mean.add_(0.01)

    def interrupts(record):
        if record.evaluations == 4:
            raise KeyboardInterrupt

    for callback in (moves, interrupts):
        found = []
        for size in (None, 4):
            in_chunks_of(size, monkeypatch)
            q = CholeskyGaussian(DIM, (MEMBERS,), dtype=torch.float64)
            found.append((q, fit(q, GeneralizedLinear(X, y), callbacks=[callback], progress=False)))
        assert_same(found)
    assert "interrupted" in found[1][1].reason


def test_chunks_with_a_member_that_is_lost(monkeypatch):
    """A member whose loss is not finite is told of, in chunks as at once, and harms no other."""
    X, y = problem("poisson_log")
    X[2] *= 1e200
    found = both(monkeypatch, GeneralizedLinear(X, y, "poisson_log"), size=2)
    (q, whole), (r, parts) = found
    alive = torch.arange(MEMBERS) != 2
    torch.testing.assert_close(r.mean[alive], q.mean[alive], rtol=1e-10, atol=1e-10)
    assert parts.reason == whole.reason
    assert parts.members_converged.tolist() == whole.members_converged.tolist() == alive.tolist()


@pytest.mark.accuracy
@pytest.mark.parametrize("kind", [CholeskyGaussian, DiagonalGaussian, NaturalGaussian])
def test_the_step_size_learns_nothing_of_members_that_rest(kind):
    """One slow member beside four that rest: the optimizer takes these as well as before when they are wanted again."""
    generator = torch.Generator().manual_seed(2)
    X = torch.randn(5, ROWS, DIM, generator=generator, dtype=torch.float64)
    theta = torch.randn(5, DIM, 1, generator=generator, dtype=torch.float64)
    y = (torch.rand(5, ROWS, generator=generator, dtype=torch.float64) < (X @ theta)[..., 0].sigmoid()).double()
    y[4] = (X[4, :, 0] > 0).double()  # separable, under a flat prior
    precision = torch.ones(5, DIM, dtype=torch.float64)
    precision[4] = 1e-8
    model = GeneralizedLinear(X, y, prior_precision=precision)
    q = kind(DIM, (5,), dtype=torch.float64)
    optimizer = VN(q)
    first = fit(q, model, optimizer, max_evaluations=60, progress=False)
    assert first.members_converged.tolist() == [True, True, True, True, False]
    settled = {name: value[:4].clone() for name, value in optimizer._state(0)["step_size"].items()}
    optimizer.step(model, resting=torch.tensor([True, True, True, True, False]))
    for name, value in optimizer._state(0)["step_size"].items():
        assert value[:4].equal(settled[name])
    mean = q.mean.clone()
    mean[:4] += 1.5
    again = fit(q.initialize_(mean), model, optimizer, max_evaluations=60, progress=False)
    assert again.members_converged[:4].all()


@pytest.mark.parametrize(
    "momentum", [None, NormalizedMomentum(), Adam(), ExponentialAverage(0.6)], ids=lambda part: type(part).__name__
)
def test_a_member_that_rests_remembers_what_it_did(momentum):
    """q and all that an optimizer keeps of a member that rests are bit for bit what they were, and it goes on so."""
    X, y = problem()
    model = GeneralizedLinear(X, y)
    resting = torch.arange(MEMBERS) % 2 == 0

    def after(rests):
        q = CholeskyGaussian(DIM, (MEMBERS,), dtype=torch.float64)
        optimizer = SRVN(q, lr=0.05, momentum=momentum)
        for mask in (None, None, *rests):
            optimizer.step(model, resting=mask)
        state = optimizer._state(0)
        return q, [state["rejections"], *state.get("momentum", {}).values()]

    (there, start), (rested, kept) = after(()), after((resting, resting))
    for now, before in zip([*rested.coordinates, *kept], [*there.coordinates, *start], strict=True):
        assert now[resting].equal(before[resting])
    assert not (rested.mean == there.mean)[~resting].any()
    (whole, whole_state), (later, later_state) = after((None,)), after((resting, resting, None))
    for now, before in zip([*later.coordinates, *later_state], [*whole.coordinates, *whole_state], strict=True):
        assert now[resting].equal(before[resting])


def test_closures_and_gradients_have_members_that_rest_too():
    """Whatever gives the loss, the members of the mask stay; the others go where they went without it."""
    resting, start = torch.tensor([True, False, False]), torch.randn(3, 2, generator=torch.Generator().manual_seed(1))

    def moved(way, mask):
        q = CholeskyGaussian(2, (3,), mean=start)
        optimizer = SRVN(q, lr=0.1, momentum=NormalizedMomentum())

        def loss():
            there = q.probed()
            return 0.5 * (there.mean.square().sum() + there.variance.sum()) - q.entropy().sum()

        if way == "gradients":
            loss().backward()
        optimizer.step(*([loss] if way == "closure" else []), resting=mask)
        return q.mean

    for way in ("closure", "gradients"):
        part, whole = moved(way, resting), moved(way, None)
        assert part[resting].equal(start[resting])
        assert part[~resting].equal(whole[~resting])
        assert not (whole == start).any()
