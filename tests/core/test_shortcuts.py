"""What a step leaves out because it is known: the value is the same, and what is not known is still asked."""

import copy

import pytest
import torch
from helpers import SMALL_BATCHES as BATCHES
from helpers import make_model, make_posterior, same_bits

from torchngvi import VN, CholeskyGaussian, NaturalGaussian
from torchngvi.interfaces import Coordinates, Tangent, known_everywhere, once
from torchngvi.metrics import QuasiNewton
from torchngvi.numerics.linalg import finite
from torchngvi.registry import POSTERIORS
from torchngvi.structures import Dense
from torchngvi.structures.blocks import EqualBlocks

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_says_what_torch_says(dtype):
    limits = torch.finfo(dtype)
    entries = [0.0, -0.0, 1.0, limits.max, limits.min, limits.smallest_normal, NAN, -NAN, INF, -INF]
    x = torch.tensor(entries, dtype=dtype)
    assert torch.equal(finite(x), torch.isfinite(x))
    assert finite(x).sum() == 6
    assert torch.equal(finite(x.reshape(2, 5).mT), torch.isfinite(x.reshape(2, 5).mT))
    assert finite(x[:0]).shape == (0,)


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3)])
def test_a_mask_is_known_where_every_member_is_in_it(shape):
    mask = torch.ones(shape, dtype=torch.bool)
    assert known_everywhere(mask) is True
    mask.reshape(-1)[-1] = False
    assert known_everywhere(mask) is False
    assert known_everywhere(torch.full(shape, NAN) == NAN) is False


def test_a_mask_on_a_device_is_not_asked():
    assert known_everywhere(torch.ones(3, dtype=torch.bool, device="meta")) is False


def test_once_computes_at_the_first_call_and_not_before():
    calls = []

    def compute():
        calls.append(None)
        return torch.tensor(NAN)  # a value that is not equal to itself is kept too

    value = once(compute)
    assert not calls
    assert value() is value()
    assert len(calls) == 1


def test_once_asks_again_after_an_error():
    answers = [RuntimeError("not yet"), torch.ones(())]

    def compute():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    value = once(compute)
    with pytest.raises(RuntimeError, match="^not yet$"):
        value()
    assert value() == 1.0


def shift_mean(q, model):
    q.coordinates.vector.data.add_(0.1)


def double_rows(q, model):
    rows = model.X.numpy()
    rows *= 2.0


@pytest.mark.parametrize("edit", [shift_mean, double_rows])
@pytest.mark.parametrize("name", POSTERIORS)
def test_an_evaluation_at_once_compares_no_entries_and_the_next_step_does(name, edit):
    model, q = make_model(), make_posterior(name)
    opt = VN(q)
    opt.step(model)
    made = opt.evaluations
    known = opt.evaluate(model, at_once=True)
    assert opt.evaluations == made  # what the trial has found
    edit(q, model)  # behind torch's back: not at once
    assert torch.equal(opt.evaluate(model, at_once=True).loss, known.loss)
    assert opt.evaluations == made
    expected = model.negative_elbo(copy.deepcopy(q)).detach()
    assert abs(expected - known.loss) > 1e-4
    assert torch.allclose(opt.step(model), expected, rtol=1e-12)
    assert opt.evaluations == made + 2  # anew, and the trial


def test_an_evaluation_at_once_sees_what_torch_counts():
    model, q = make_model(), make_posterior("cholesky")
    opt = VN(q)
    opt.step(model)
    with torch.no_grad():
        q.mean.fill_(NAN)
    assert opt.evaluate(model, at_once=True).loss.isnan()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("structure", [Dense(5), EqualBlocks(2, 3), Dense(1)])
def test_a_symmetric_matrix_comes_back_from_its_vector(structure, batch):
    shape = (*batch, *structure.shape)
    half = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    symmetric = half + half.mT
    vector = structure.flat(symmetric)
    assert vector.shape == (*batch, structure.parameters)
    assert torch.allclose(vector.square().sum(-1), 0.5 * structure.norm2(symmetric), rtol=1e-13)
    back = structure.unflat(vector)
    assert torch.allclose(back, symmetric, rtol=1e-15, atol=0)
    assert torch.equal(back, back.mT)
    symmetric.flatten()[0] = NAN
    assert structure.flat(symmetric).isnan().sum() == 1


class Spread(Dense):
    """A pattern with a sum of its own, which has nothing to add here."""

    def total(self, scalar):
        self.__dict__["sums"] = self.__dict__.get("sums", 0) + 1
        return scalar


def test_a_pattern_with_a_sum_of_its_own_is_asked_for_it():
    model, sums = make_model(), []
    ends = []
    for structure in (Dense(model.dim), Spread(model.dim)):
        q = CholeskyGaussian(model.dim, structure=structure, dtype=torch.float64)
        opt = VN(q, metric=QuasiNewton())
        for _ in range(4):
            opt.step(model)
        ends.append([x.clone() for x in q.coordinates])
        sums.append(vars(structure).get("sums", 0))
    assert sums[0] == 0
    assert sums[1] == 5 * 3 + 4 * 3  # of a q: log determinant, all pairs, slope; of a step: two for the norm, the cone
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


class TestLargePrecision:
    """The root of a large precision is not inverted where its variances are known to be finite without that."""

    D = 80

    def moved(self, dim, precision):
        q = NaturalGaussian(dim, dtype=torch.float64)
        change = torch.eye(dim, dtype=torch.float64) * (precision - 1.0)
        new, ok = q.moved(Tangent(Coordinates(torch.zeros(dim, dtype=torch.float64), change)))
        return q, new, ok

    def test_the_root_is_that_of_the_inverse(self):
        q, new, ok = self.moved(self.D, 4.0)
        assert bool(ok)
        assert set(new.known) == {"mean", "factor"}
        q.assign(new, ok)
        factor = torch.linalg.cholesky(q.precision)
        assert torch.equal(q.frame().root, q.structure.inverse(factor))

    @pytest.mark.parametrize("precision", [-1.0, 0.0, NAN])
    def test_a_matrix_that_is_no_precision_is_refused(self, precision):
        assert not bool(self.moved(self.D, precision)[2])
        assert not bool(self.moved(4, precision)[2])

    @pytest.mark.parametrize("scale", [1e-320, 1e-200, 1e-10, 1.0, 1e10, 1e200, 1e307])
    def test_it_is_refused_where_a_small_one_is(self, scale):
        answers = []
        for dim in (4, self.D):
            q = NaturalGaussian(dim, dtype=torch.float64)
            q.coordinates.matrix.zero_()
            change = torch.eye(dim, dtype=torch.float64) * scale
            _, ok = q.moved(Tangent(Coordinates(torch.zeros(dim, dtype=torch.float64), change)))
            answers.append(bool(ok))
        assert answers[0] == answers[1] == (scale > 1e-308)

    def test_one_variance_of_many_that_overflows_is_refused(self):
        q = NaturalGaussian(self.D, dtype=torch.float64)
        q.coordinates.matrix.zero_()
        diagonal = torch.ones(self.D, dtype=torch.float64)
        diagonal[3] = 1e-320
        _, ok = q.moved(Tangent(Coordinates(torch.zeros(self.D, dtype=torch.float64), diagonal.diag())))
        assert not bool(ok)

    def test_a_rejected_member_keeps_its_root(self):
        q = NaturalGaussian(self.D, (2,), dtype=torch.float64)
        root = q.frame().root.clone()
        change = torch.eye(self.D, dtype=torch.float64) * torch.tensor([3.0, -2.0])[:, None, None]
        new, ok = q.moved(Tangent(Coordinates(torch.zeros(2, self.D, dtype=torch.float64), change)))
        assert ok.tolist() == [True, False]
        before = q.snapshot()
        q.assign(new, ok)
        assert torch.equal(q.frame().root[1], root[1])
        assert torch.allclose(q.frame().root[0], 0.5 * root[0], rtol=1e-15)
        q.restore(before)
        assert same_bits(q, list(before))
