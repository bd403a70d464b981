"""What the host waits for, with tensors that pass for those of a device."""

import pytest
import torch

from torchngvi import VN, CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, NaturalGaussian, NewtonCG, fit
from torchngvi.errors import RejectedStepError
from torchngvi.models import SoftmaxRegression
from torchngvi.numerics.arrays import on_host
from torchngvi.optim import Watch
from torchngvi.optim.evaluating import Seen, speak

pytest.importorskip("benchmarks", reason="needs the benchmarks of a clone: run python -m pytest in its root")

from benchmarks.waits import Far, far, reads  # noqa: E402


def problem(tensors=far):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(100, 3, generator=generator, dtype=torch.float64)
    return tensors(GeneralizedLinear(X, (X.sum(-1) + 0.1 > 0).double(), classes=(0, 1)))


@pytest.mark.parametrize("kind", [CholeskyGaussian, NaturalGaussian, DiagonalGaussian])
def test_a_step_waits_for_nothing_and_a_fit_once_an_evaluation(kind, monkeypatch):
    monkeypatch.setenv("TORCHNGVI_KERNELS", "0")  # the expectations on a device are those of the operators
    q, model = far(kind(3, dtype=torch.float64)), problem()
    opt = VN(q)
    opt.step(model)
    assert not reads(lambda: opt.step(model))[1]
    q = far(kind(3, dtype=torch.float64))
    result, lines = reads(lambda: fit(q, model, VN(q), progress=False))
    assert result.converged
    assert sum(lines.values()) == result.evaluations, lines
    near = kind(3, dtype=torch.float64)
    again = fit(near, problem(lambda model: model), VN(near), progress=False)
    assert (again.evaluations, again.loss, again.norm) == (result.evaluations, result.loss, result.norm)
    assert torch.equal(near.mean, q.mean.as_subclass(torch.Tensor))


@pytest.mark.parametrize("kind", [CholeskyGaussian, NaturalGaussian, DiagonalGaussian])
def test_newtons_method_waits_once_an_evaluation_and_four_times_a_pass_of_its_start(kind):
    model, opt = problem(), NewtonCG(far(kind(3, dtype=torch.float64)))
    opt.step(model)
    assert not reads(lambda: opt.step(model))[1]
    q = far(kind(3, dtype=torch.float64))
    result, lines = reads(lambda: fit(q, model, progress=False))
    assert result.converged
    passes = result.gradients - result.evaluations
    assert lines.pop(next(line for line in lines if line.startswith("numerics/arrays.py"))) == result.evaluations, lines
    assert sum(lines.values()) <= 4 * passes + 3, lines


def test_a_step_on_several_classes_waits_for_nothing():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(30, 2, generator=generator, dtype=torch.float64)
    q, model = far(CholeskyGaussian(4, dtype=torch.float64)), far(SoftmaxRegression(X, torch.arange(30) % 3))
    opt = VN(q)
    opt.step(model)
    assert not reads(lambda: opt.step(model))[1]


def test_what_is_counted_of_a_step_waits_for_nothing_until_it_is_said():
    rho = torch.ones(2).as_subclass(Far)
    seen = Seen(torch.ones(2), rho, torch.tensor([True, False]), None, False)
    assert not reads(lambda: speak(Watch(), "VN", CholeskyGaussian(2, (2,)), seen, [30.0, 4.0], False))[1]
    with pytest.raises(RejectedStepError, match="the last of size 1: q has stood still"):
        speak(Watch(), "VN", CholeskyGaussian(2, (2,)), seen, [31.0, 0.0], False)


def test_a_factorisation_that_is_tested_is_a_wait():
    _, lines = reads(lambda: torch.linalg.cholesky(torch.eye(2).as_subclass(Far)))
    assert sum(lines.values()) == 1
    _, lines = reads(lambda: torch.linalg.cholesky_ex(torch.eye(2).as_subclass(Far)))
    assert not lines


def test_a_covariance_of_predictors_that_has_no_root_is_not_a_number():
    model = SoftmaxRegression(torch.ones(3, 1, dtype=torch.float64), torch.arange(3))
    mean, bad = torch.zeros(3, 2, dtype=torch.float64), -torch.eye(2, dtype=torch.float64).expand(3, 2, 2)
    assert all(part.isnan().all() for part in model._integrate(mean, bad))


def test_numbers_come_in_one_transfer():
    tensors = torch.tensor([1.5, 2.5]), torch.tensor(3), torch.tensor([[True], [False]])
    assert on_host(*tensors) == tensors
    moved, lines = reads(lambda: on_host(*(part.as_subclass(Far) for part in tensors)))
    assert sum(lines.values()) == 1
    for left, right in zip(moved, tensors, strict=True):
        assert type(left) is torch.Tensor
        assert torch.equal(left, right)
        assert left.dtype == right.dtype
