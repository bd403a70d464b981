"""The loop: it says whether it converged and why not, and it keeps q in a state that was accepted."""

import copy
import dataclasses
import io
import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from helpers import METHOD_PAIRS as PAIRS
from helpers import SMALL_BATCHES as BATCHES
from helpers import SMALL_DIM as DIM
from helpers import CountedModel, coordinates, make_model, make_posterior, refuses, same_bits
from sklearn.datasets import load_breast_cancer

import torchngvi as ngvi
from torchngvi.errors import DivergenceWarning, InputError, RejectedStepWarning
from torchngvi.expectations import Antithetic, Autograd, Fixed
from torchngvi.fitting.fit import ENGINES
from torchngvi.fitting.loop import Loop
from torchngvi.fitting.steps import usual_optimizer
from torchngvi.interfaces import Estimator, Posterior, Target
from torchngvi.methods import SVGDDensity
from torchngvi.models import SoftmaxRegression, StudentT
from torchngvi.registry import POSTERIORS
from torchngvi.stepsizes import Constant
from torchngvi.structures import arrow

METHODS = {"VN": ngvi.VN, "SRVN": ngvi.SRVN}


def quiet(q, target, optimizer=None, **options):
    return ngvi.fit(q, target, optimizer, progress=False, **options)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("method", "name"), PAIRS)
def test_the_default_converges(method, name, batch):
    model, q = make_model(batch, kind=CountedModel), make_posterior(name, batch)
    optimizer = METHODS[method](q)
    result = quiet(q, model, optimizer)
    assert result.converged is True
    assert result.reason == f"natural-gradient norm {result.norm:.2g}."
    assert result.norm <= 1e-5
    assert result.members_converged.shape == batch
    assert result.members_converged.all()
    assert result.evaluations == model.calls == optimizer.evaluations
    assert result.evaluations < 60
    status = optimizer.evaluate(model)
    assert float(status.loss.sum()) == result.loss
    assert float(status.norm2.max().sqrt()) == result.norm
    # the optimum, from elsewhere and by another method
    other = make_posterior(name, batch, seed=5)
    again = quiet(other, model, ngvi.VN(other), tolerance=1e-6)
    assert again.converged
    assert result.loss == pytest.approx(again.loss, abs=1e-9)


@pytest.mark.parametrize("name", ["cholesky", "natural", "precision", "diagonal"])
@pytest.mark.parametrize("batch", BATCHES)
def test_without_an_optimizer_a_convex_model_is_fitted_from_its_mode_by_newtons_method(name, batch):
    """The optimum of VN, for a third of its evaluations or less, with each pass over the data counted."""
    q, q0, model = make_posterior(name, batch), make_posterior(name, batch), make_model(batch)
    result, expected = quiet(q, model), quiet(q0, model, ngvi.VN(q0))
    assert result.converged
    assert result.loss == pytest.approx(expected.loss, abs=1e-9)
    torch.testing.assert_close(q.mean, q0.mean, rtol=0, atol=1e-4)
    assert result.evaluations <= 8
    assert result.gradients > result.evaluations  # the passes of the search for the mode
    again = quiet(q, model)  # near the optimum no mode is looked for
    assert (again.evaluations, again.gradients, again.loss) == (1, 1, result.loss)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_who_is_fitted_by_newtons_method():
    """Where L is convex and products with its Hessian cost less than evaluations; else the name of the run is VN."""
    X, y = torch.eye(4, dtype=torch.float64), torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    logistic, classes = ngvi.GeneralizedLinear(X, y), SoftmaxRegression(X, torch.arange(4) % 3)
    wide = ngvi.GeneralizedLinear(torch.eye(4, 201, dtype=torch.float64), y)

    def default(target, kind=ngvi.CholeskyGaussian, batch=(), **options):
        return type(usual_optimizer(kind(target.dim, batch, dtype=torch.float64, **options), target))

    assert default(logistic) is default(logistic, ngvi.NaturalGaussian) is ngvi.NewtonCG
    assert default(logistic, ngvi.DiagonalGaussian, (2,)) is default(classes, ngvi.DiagonalGaussian) is ngvi.NewtonCG
    assert default(wide, ngvi.DiagonalGaussian) is ngvi.NewtonCG
    assert default(wide) is default(logistic, batch=(2,)) is default(classes) is ngvi.VN
    assert default(logistic.minibatch([0, 1])) is ngvi.VN
    assert default(ngvi.GeneralizedLinear(X, y, StudentT(1.0, dof=4.0))) is ngvi.VN
    assert default(ngvi.GeneralizedLinear(X.to_sparse_csr(), y)) is ngvi.VN
    assert default(ngvi.GeneralizedLinear(X, y, temperature=0.0)) is ngvi.VN
    assert default(logistic, ngvi.NaturalGaussian, structure=arrow(groups=1, local=2, globals=2)) is ngvi.VN


def test_without_an_optimizer_it_is_vn():
    q, q0 = make_posterior("natural"), make_posterior("natural")
    data = make_model()
    model = ngvi.GeneralizedLinear(data.X, data.y, StudentT(1.0, dof=4.0))  # not log-concave
    result, expected = quiet(q, model), quiet(q0, model, ngvi.VN(q0))
    assert same_bits(q, q0)
    assert result.loss == expected.loss
    assert [record[:5] for record in result.trace] == [record[:5] for record in expected.trace]


def test_the_result_speaks():
    q = make_posterior("cholesky")
    result = quiet(q, make_model())
    assert str(result) == (
        f"converged, natural-gradient norm {result.norm:.2g}. "
        f"Negative ELBO {result.loss:.6f} after {result.evaluations} evaluations. "
        "Whether a Gaussian fits was not examined: summary() of the result does it."
    )


@pytest.mark.parametrize(
    ("loss", "text"), [(-1234567.8912345, "-1234567.891235"), (-9.8027889e52, "-9.80279e+52"), (math.nan, "nan")]
)
def test_a_loss_is_printed_with_digits_that_mean_something(loss, text):
    result = quiet(make_posterior("cholesky"), make_model())
    assert f"Negative ELBO {text} after" in str(dataclasses.replace(result, loss=loss))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-5), (torch.float32, 1e-2)])
@pytest.mark.parametrize(("method", "name"), PAIRS)
def test_the_default_tolerance_is_that_of_the_dtype(method, name, dtype, tolerance):
    q, model = make_posterior(name, dtype=dtype), make_model(dtype=dtype)
    result = quiet(q, model, METHODS[method](q))
    assert result.converged
    assert result.norm <= tolerance < result.trace[-2].norm
    assert q.dtype == dtype
    q64 = make_posterior(name)
    assert result.loss == pytest.approx(quiet(q64, make_model(), ngvi.VN(q64)).loss, rel=1e-4)


def test_a_start_at_the_optimum_takes_one_evaluation():
    q, model = make_posterior("cholesky"), make_model()
    quiet(q, model, tolerance=1e-7)
    end = coordinates(q)
    result = quiet(q, model)
    assert result.converged
    assert result.evaluations == len(result.trace) == 1
    assert same_bits(q, end)


def test_members_converge_apart():
    # the first member starts at its optimum
    model, q, alone = make_model((3,)), make_posterior("cholesky", (3,)), make_posterior("cholesky", (3,))
    quiet(alone, model, tolerance=1e-7)
    with torch.no_grad():
        q.mean[0], q.scale_tril[0] = alone.mean[0], alone.scale_tril[0]
    result = quiet(q, model, max_evaluations=1)
    assert not result.converged
    assert result.members_converged.tolist() == [True, False, False]
    assert quiet(q, model).members_converged.tolist() == [True, True, True]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("method", "name"), PAIRS)
def test_the_trace_of_trial_steps(method, name, batch):
    model, q, seen = make_model(batch), make_posterior(name, batch, seed=2), []
    start = model.negative_elbo(q).detach().sum()
    result = quiet(q, model, METHODS[method](q), callbacks=[seen.append])
    assert seen == result.trace
    first, last = result.trace[0], result.trace[-1]
    assert (first.evaluations, first.step, first.rejections) == (1, 0.0, 0)
    assert first.loss == pytest.approx(float(start), rel=1e-13)
    assert (last.evaluations, last.loss, last.norm) == (result.evaluations, result.loss, result.norm)
    for before, after in zip(result.trace, result.trace[1:], strict=False):
        assert after.evaluations == before.evaluations + 1
        assert after.loss <= before.loss + 3 * 64 * 2.3e-16 * max(1.0, abs(before.loss))  # a member's rounding
        assert 0 < after.step <= 1
        assert after.rejections >= before.rejections
        assert after.seconds >= before.seconds >= 0


def test_a_second_run_counts_its_own_evaluations_and_starts_at_step_zero():
    q, model = make_posterior("cholesky"), make_model()
    optimizer = ngvi.VN(q)
    quiet(q, model, optimizer, max_evaluations=3)
    result = quiet(q, model, optimizer, max_evaluations=3)
    assert [record.evaluations for record in result.trace] == [0, 1, 2, 3]  # the first packet is still good
    assert result.evaluations == 3
    assert result.trace[0].step == 0.0


@pytest.mark.parametrize("lr", [None, 0.3])
def test_a_step_takes_one_evaluation(lr):
    q, model = make_posterior("cholesky"), make_model(kind=CountedModel)
    result = quiet(q, model, ngvi.VN(q, lr), max_evaluations=6, tolerance=1e-12)
    assert [record.evaluations for record in result.trace] == [1, 2, 3, 4, 5, 6]
    assert model.calls == 6


@pytest.mark.parametrize("how", ["trials", "growing averages"])
def test_a_budget_of_numpy(how):
    target = make_model() if how == "trials" else make_model().log_joint
    results = [quiet(make_posterior("cholesky"), target, max_evaluations=budget) for budget in (2, np.int64(2))]
    assert results[0].evaluations == results[1].evaluations == 2


def test_a_step_on_a_log_joint_takes_one_evaluation():
    q = make_posterior("cholesky")
    optimizer = ngvi.VN(q, lr=0.1, estimator=ngvi.Stein(Antithetic(4, torch.Generator().manual_seed(0))))
    result = quiet(q, make_model().log_joint, optimizer, max_evaluations=6, tolerance=1e-12)
    assert [record.evaluations for record in result.trace] == [1, 2, 3, 4, 5, 6]
    assert optimizer.evaluations == 6


@pytest.mark.parametrize("lr", [None, 0.3])
@pytest.mark.parametrize("budget", [1, 4])
def test_the_budget_holds(lr, budget):
    for target in (make_model(), make_model().log_joint):
        q = make_posterior("cholesky")
        options = {"lr": 0.01} if not hasattr(target, "dim") else {"lr": lr}
        optimizer = ngvi.VN(q, **options)
        result = quiet(q, target, optimizer, max_evaluations=budget, tolerance=1e-12)
        assert optimizer.evaluations == result.evaluations == budget


def test_not_converged_within_the_budget():
    q = make_posterior("cholesky")
    result = quiet(q, make_model(), max_evaluations=3)
    assert result.converged is False
    assert result.reason == (
        f"because the budget of 3 evaluations is used up (natural-gradient norm {result.norm:.2g} against a "
        "tolerance of 1e-05). Raise max_evaluations."
    )
    assert str(result).startswith("not converged, because the budget of 3 evaluations is used up (")
    assert result.evaluations == len(result.trace) + 1 == 3  # the start, the mode, and where a step has led
    assert not result.members_converged


def test_the_tolerance_is_on_the_norm_not_on_its_square():
    q, model = make_posterior("cholesky"), make_model()
    norm = quiet(q, model, tolerance=1e-2).norm
    result = quiet(q, model, tolerance=0.9 * norm, max_evaluations=1)
    assert 1e-6 < norm < 0.1
    assert not result.converged
    assert not result.members_converged
    assert quiet(q, model, tolerance=1.1 * norm, max_evaluations=1).members_converged


def test_not_converged_where_every_step_is_rejected():
    q = make_posterior("cholesky")
    start = coordinates(q)
    optimizer = ngvi.VN(q)
    result = quiet(q, AlwaysWorse(make_model()), optimizer)
    assert result.converged is False
    assert result.reason == (
        f"because 30 steps in a row were rejected (natural-gradient norm {result.norm:.2g} against a tolerance of "
        "1e-05): a smaller lr, float64, or a larger tolerance may be needed."
    )
    assert same_bits(q, start)
    assert optimizer.rejections == 30
    assert result.trace[-1].rejections == 30


class AlwaysWorse(CountedModel):
    """Reports a larger energy at every evaluation."""

    def __init__(self, model):
        self.__dict__.update(model.__dict__)

    def expected_energy(self, frame):
        value, sites = super().expected_energy(frame)
        return value + 1e6 * self.calls, sites


class NeverFinite(CountedModel):
    def __init__(self, model, value):
        self.__dict__.update(model.__dict__)
        self.value = value

    def expected_energy(self, frame):
        value, sites = super().expected_energy(frame)
        return value + self.value, sites


@pytest.mark.parametrize(("value", "evaluations"), [(math.nan, 1), (math.inf, 2)])  # one more at the mode
def test_a_start_that_is_not_finite(value, evaluations):
    q = make_posterior("cholesky")
    start = coordinates(q)
    result = quiet(q, NeverFinite(make_model(), value))
    assert result.converged is False
    assert result.reason == (
        f"because the negative ELBO is {value} at this q: start from another mean or a smaller scale (initialize_)."
    )
    assert result.evaluations == evaluations
    assert same_bits(q, start)


def test_a_norm_that_is_not_finite():
    class Spoiled(CountedModel):
        def expected_energy(self, frame):
            value, sites = super().expected_energy(frame)
            return value, sites._replace(alpha=sites.alpha * math.nan)

    q = make_posterior("cholesky")
    result = quiet(q, make_model(kind=Spoiled))
    assert not result.converged
    assert math.isnan(result.norm)
    assert result.evaluations == 1


def test_a_callback_stops_the_run():
    q, model = make_posterior("cholesky"), make_model()
    seen = []
    stops = [seen.append, lambda record: record.evaluations == 3, lambda record: None]
    result = quiet(q, model, ngvi.VN(q), callbacks=stops)
    assert not result.converged
    assert len(seen) == len(result.trace) == 3
    assert result.reason == f"because a callback stopped it at natural-gradient norm {result.norm:.2g}."


def test_a_callback_that_stops_at_the_optimum_does_not_hide_it():
    q, model = make_posterior("cholesky"), make_model()
    result = quiet(q, model, callbacks=[lambda record: record.norm < 1e-5])
    assert result.converged
    assert result.reason.startswith("natural-gradient norm ")


def test_an_interrupt_in_a_callback_keeps_q():
    q, q0, model = make_posterior("cholesky"), make_posterior("cholesky"), make_model()

    def interrupt(record):
        if record.evaluations == 4:
            raise KeyboardInterrupt

    result = quiet(q, model, ngvi.VN(q), callbacks=[interrupt])
    assert result.converged is False
    assert result.reason == "because it was interrupted."
    assert str(result).startswith("not converged, because it was interrupted. Negative ELBO ")
    assert len(result.trace) == 4
    quiet(q0, model, ngvi.VN(q0), max_evaluations=4)
    assert same_bits(q, q0)
    assert result.loss == pytest.approx(float(model.negative_elbo(q).detach()), rel=1e-13)


class Interrupted(Estimator):
    """Quadrature, interrupted at one of its evaluations."""

    comparable, needs = True, ngvi.Quadrature.needs

    def __init__(self, at):
        self.at, self.calls = at, 0

    def __call__(self, q, target):
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return ngvi.Quadrature()(q, target)


def test_an_interrupt_within_a_trial_keeps_the_last_accepted_q():
    q, q0, model = make_posterior("cholesky"), make_posterior("cholesky"), make_model()
    result = quiet(q, model, ngvi.VN(q, estimator=Interrupted(4)))
    assert result.converged is False
    assert result.reason == "because it was interrupted."
    quiet(q0, model, ngvi.VN(q0), max_evaluations=3)
    assert same_bits(q, q0)
    assert result.loss == pytest.approx(float(model.negative_elbo(q).detach()), rel=1e-13)


def test_an_interrupt_at_the_optimum_does_not_hide_it():
    q = make_posterior("cholesky")

    def interrupt(record):
        if record.norm < 1e-5:
            raise KeyboardInterrupt

    result = quiet(q, make_model(), callbacks=[interrupt])
    assert str(result).startswith("converged, natural-gradient norm ")


def test_an_interrupt_before_the_first_evaluation_is_a_result():
    q = make_posterior("cholesky")
    result = quiet(q, make_model(), ngvi.VN(q, estimator=Interrupted(1)))
    assert result.reason == "because it was interrupted before q was evaluated."
    assert same_bits(q, make_posterior("cholesky"))


BOTH = pytest.mark.parametrize("target", [make_model(), make_model().log_joint], ids=["model", "log joint"])


OPTIONS = [
    ("tolerance", "bounds the natural-gradient norm and must be positive and finite", (0.0, -1e-3, math.nan, math.inf)),
    ("tolerance", "bounds the natural-gradient norm and must be a number", ("x", [1], True)),
    (
        "max_evaluations",
        "is a budget of expectations and must be a whole number, at least 1",
        (0, -3, math.nan, math.inf, 2.5, "x", None, True),
    ),
    ("checkpoint_every", "counts steps and must be a whole number, at least 1", (0, math.nan, "x", None)),
]


@BOTH
@pytest.mark.parametrize(("name", "rule", "value"), [(*rest, value) for *rest, values in OPTIONS for value in values])
def test_options_of_a_run_have_a_range(target, name, rule, value):
    with refuses(InputError, f"{name} {rule}; got {value!r}."):
        quiet(make_posterior("cholesky"), target, **{name: value})


@pytest.mark.parametrize("size", [0, 2.5, math.nan, "x"])
def test_a_batch_size_must_be_a_whole_number(size):
    with refuses(InputError, f"batch_size counts rows and must be a whole number, at least 1; got {size!r}."):
        quiet(make_posterior("cholesky"), make_model(), batch_size=size)


def test_numbers_of_other_kinds_are_numbers():
    result = quiet(make_posterior("cholesky"), make_model(), tolerance=torch.tensor(1e-3), max_evaluations=1e3)
    assert result.converged


@BOTH
@pytest.mark.parametrize(
    ("callbacks", "got"),
    [(print, "the function print. Of one function f pass [f]"), (None, "None"), (3, "3"), ([3], "[3]"), ("x", "'x'")],
)
def test_callbacks_are_a_list_of_functions(target, callbacks, got):
    text = f"callbacks is a list of functions that take the Record of a step; got {got}."
    with refuses(InputError, text):
        quiet(make_posterior("cholesky"), target, callbacks=callbacks)


class TestInferenceMode:
    """In `torch.inference_mode` tensors have neither gradients nor versions: a fit steps out of it."""

    @pytest.mark.sparse(3)
    @BOTH
    @pytest.mark.parametrize("name", POSTERIORS)
    @pytest.mark.parametrize("made", ["before", "in it"])
    def test_a_fit_is_the_same(self, target, name, made):
        torch.manual_seed(0)
        expected, q = make_posterior(name), make_posterior(name)
        wanted = quiet(expected, target)
        torch.manual_seed(0)
        with torch.inference_mode():
            if made == "in it":
                q = make_posterior(name)
            result = quiet(q, target)
        assert result.converged
        assert result.reason == wanted.reason
        assert same_bits(q, expected)

    def test_what_was_made_there_can_be_used_outside(self):
        with torch.inference_mode():
            q, model = make_posterior("natural"), make_model()
            q.sample((2,))
        assert quiet(q, model).converged
        ngvi.VN(q, lr=0.1, estimator=Autograd()).step(model)
        ngvi.VN(q, lr=0.1).step(lambda: model.negative_elbo(q))
        q.rsample((2,)).square().sum().backward()

    def test_steps(self):
        q, model = make_posterior("cholesky"), make_model()
        with torch.inference_mode():
            ngvi.VN(q, lr=0.1).step(model.log_joint)
            ngvi.VN(q, lr=0.1).step(lambda: model.negative_elbo(q))
            ngvi.VN(q).evaluate(model)
            ngvi.VN(q).step(model)
            assert bool(ngvi.laplace(q, model.log_joint).converged)

    @pytest.mark.parametrize("kind", [ngvi.CholeskyGaussian, ngvi.NaturalGaussian])
    def test_a_posterior_converted_there(self, kind):
        with torch.inference_mode():
            q = kind(DIM).double()
        model = make_model()
        assert not any(buffer.is_inference() for buffer in q.buffers())
        assert bool(torch.isfinite(q.mean).all())
        assert quiet(q, model).converged

    @pytest.mark.parametrize("kind", [ngvi.CholeskyGaussian, ngvi.NaturalGaussian])
    def test_a_posterior_copied_there_can_be_read(self, kind):
        with torch.inference_mode():
            q = copy.deepcopy(kind(DIM, mean=2.0, dtype=torch.float64))
        assert torch.allclose(q.frame().mean, torch.full((DIM,), 2.0, dtype=torch.float64))
        assert torch.allclose(q.mean, q.frame().mean)
        assert torch.allclose(ngvi.VN(q).evaluate(make_model()).loss, make_model().negative_elbo(q).detach())

    def test_rows_changed_there_are_seen(self):
        """Tensors of that mode keep no count of their changes: what was computed from them is not used again."""
        with torch.inference_mode():
            data = torch.zeros(3, dtype=torch.float64)

        class Shifted(Target):
            temperature = 1.0

            def tensors(self):
                return (data,)

            def log_joint(self, theta):
                return -0.5 * (theta - data).square().sum(-1)

        q, target = make_posterior("cholesky"), Shifted()
        opt = ngvi.VN(q, lr=0.1, estimator=ngvi.Stein(Fixed(32)))
        before = opt.evaluate(target).loss
        with torch.inference_mode():
            data += 1
        assert float(opt.evaluate(target).loss) > float(before)


@pytest.mark.parametrize(
    ("first", "text"),
    [
        (
            ngvi.CholeskyGaussian,
            "fit takes a posterior; got the class CholeskyGaussian. Make one of it: CholeskyGaussian(dim).",
        ),
        (
            lambda theta: theta.sum(-1),
            "fit takes a posterior first, such as CholeskyGaussian(dim), then the model or log joint; got function "
            "first.",
        ),
    ],
)
def test_a_posterior_comes_first(first, text):
    with refuses(InputError, text):
        quiet(first, make_model())


def test_the_optimizer_must_be_over_q():
    q, other = make_posterior("cholesky"), make_posterior("cholesky")
    text = "the optimizer must hold the posterior that is fitted, and no other; build it as VN(q)."
    for optimizer in (ngvi.VN(other), ngvi.VN([q, other], lr=0.1), "VN"):
        with refuses(InputError, text):
            quiet(q, make_model(), optimizer)


def test_the_bar_shows_loss_norm_step_and_rejections(monkeypatch):
    stream = io.StringIO()
    module = sys.modules["torchngvi.fitting.loop"]
    real, bars = module.tqdm, []

    def bar(*args, **kwargs):
        bars.append(real(*args, **kwargs, file=stream, mininterval=0, ncols=200))
        return bars[-1]

    monkeypatch.setattr(module, "tqdm", bar)
    q, model = make_posterior("cholesky"), make_model()
    result = ngvi.fit(q, model, ngvi.SRVN(q), max_evaluations=25)
    (shown,) = bars
    last = result.trace[-1]
    assert shown.postfix == (
        f"loss={last.loss:.6g}, norm={last.norm:.1e}, step={last.step:.2g}, rejected={last.rejections}"
    )
    assert (shown.n, shown.total, shown.unit) == (result.evaluations, result.evaluations, "eval")  # converged
    text = stream.getvalue()
    assert "1/25 " in text
    assert text.rstrip().split("\r")[-1].startswith("SRVN: ")
    assert f"norm={last.norm:.1e}" in text
    assert f"norm={result.trace[0].norm:.1e}" in text


def test_no_bar_without_progress(capsys):
    quiet(make_posterior("cholesky"), make_model())
    assert capsys.readouterr() == ("", "")
    ngvi.fit(make_posterior("cholesky"), make_model())
    out, err = capsys.readouterr()
    assert out == ""
    assert "NewtonCG" in err


def breast_cancer():
    data = load_breast_cancer()
    X = torch.as_tensor(data.data, dtype=torch.float64)
    X = (X - X.mean(0)) / X.std(0, correction=0)
    X = torch.cat([X, torch.ones(len(X), 1, dtype=torch.float64)], 1)
    return CountedModel(X, torch.as_tensor(data.target, dtype=torch.float64), prior_precision=0.1)


OPTIMUM = 59.1019663775


@pytest.mark.parametrize("posterior", [ngvi.CholeskyGaussian, ngvi.NaturalGaussian])
@pytest.mark.parametrize("method", [ngvi.VN, ngvi.SRVN])
def test_breast_cancer_without_a_learning_rate(method, posterior):
    if (method, posterior) == (ngvi.SRVN, ngvi.NaturalGaussian):
        pytest.skip("SRVN moves a root of the covariance; NaturalGaussian has none")
    model = breast_cancer()
    q = posterior(model.dim, mean=0.0, scale=0.1**-0.5, dtype=torch.float64)
    losses = []
    result = quiet(q, model, method(q), callbacks=[lambda record: losses.append(record.loss)])
    assert result.converged, result
    assert model.calls == len(losses)
    rounding = 64 * 2.3e-16
    assert all(b <= a * (1 + rounding) for a, b in zip(losses, losses[1:], strict=False))
    needed = next(i for i, loss in enumerate(losses, 1) if loss - OPTIMUM < 1e-6)
    assert needed <= 30
    assert result.loss == pytest.approx(OPTIMUM, abs=1e-6)


def test_the_optimum_of_breast_cancer_to_ten_digits():
    # from sums of E[softplus] by a fine trapezoid rule and torch's KL of two Gaussians
    model = breast_cancer()
    q = ngvi.CholeskyGaussian(model.dim, mean=0.0, scale=0.1**-0.5, dtype=torch.float64)
    assert quiet(q, model).loss == pytest.approx(OPTIMUM, abs=1e-9)


def test_a_constant_step_of_one_half_diverges_on_breast_cancer():
    """Transport along the plain gradient, whose curvature at the prior is near 100; it says so on the way."""
    model = breast_cancer()
    q = ngvi.CholeskyGaussian(model.dim, mean=0.0, scale=0.1**-0.5, dtype=torch.float64)
    with pytest.warns((RejectedStepWarning, DivergenceWarning)):  # where the next step would make a variance infinite
        result = quiet(q, model, SVGDDensity(q, lr=0.1, step_size=Constant()), max_evaluations=200)
    losses = [record.loss for record in result.trace if not record.rejections]
    assert not result.converged
    assert losses[-1] > 1e100
    assert result.trace[-1].rejections == 30
    assert bool(q.variance.isfinite().all())
    assert result.reason.endswith(
        f" The negative ELBO climbed from {losses[0]:.6g} to {losses[-1]:.6g}, far above its start: use a smaller lr "
        "or radius, or neither."
    )
    assert "start from another mean" not in result.reason


def test_srvn_with_a_rate_of_one_half_converges_on_breast_cancer():
    """lr (W_ii - 1) < 2 does not hold at the prior, where W_ii is near 100: the printed update stays where it is."""
    model = breast_cancer()
    q = ngvi.CholeskyGaussian(model.dim, mean=0.0, scale=0.1**-0.5, dtype=torch.float64)
    assert quiet(q, model, ngvi.SRVN(q, lr=0.5), max_evaluations=100).loss == pytest.approx(OPTIMUM, abs=1e-3)
    q.initialize_(0.0, 0.1**-0.5)
    with pytest.warns(RejectedStepWarning):
        result = quiet(q, model, ngvi.SRVN(q, lr=0.5, step_size=Constant()), max_evaluations=100)
    assert "because 30 steps in a row were rejected" in result.reason


def test_a_run_that_diverged_is_not_told_to_start_elsewhere():
    model = breast_cancer()
    q = ngvi.CholeskyGaussian(model.dim, mean=0.0, scale=0.1**-0.5, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergenceWarning)
        reason = quiet(q, model, SVGDDensity(q, lr=1.0, step_size=Constant()), max_evaluations=200).reason
    assert reason.startswith("because the run diverged to a negative ELBO of ")
    assert "smaller lr" in reason
    assert "start from another mean" not in reason


def test_a_run_that_climbs_far_above_its_start_says_so():
    """Whole steps of IBLR without a bound: nothing is rejected, and nothing gained."""
    model = breast_cancer()
    q = ngvi.CholeskyGaussian(model.dim, mean=0.0, scale=0.1**-0.5, dtype=torch.float64)
    with pytest.warns(DivergenceWarning, match="IBLR: the loss was far above its start"):
        result = quiet(q, model, ngvi.IBLR(q, lr=1.0, step_size=Constant()), max_evaluations=20)
    first, last = result.trace[0].loss, result.loss
    assert result.trace[-1].rejections == 0
    assert last > 2 * first
    assert result.reason == (
        f"because the budget of 20 evaluations is used up (natural-gradient norm {result.norm:.2g} against a "
        f"tolerance of 1e-05). The negative ELBO climbed from {first:.6g} to {last:.6g}, far above its start: use a "
        "smaller lr or radius, or neither."
    )
    q.initialize_(0.0, 0.1**-0.5)
    assert "climbed" not in quiet(q, model, ngvi.SRVN(q, lr=1e-4), max_evaluations=5).reason


def test_a_number_for_the_prior_precision_keeps_its_digits():
    model = breast_cancer()
    assert model.prior.precision.dtype == torch.float64
    assert model.prior.precision.tolist() == [0.1] * model.dim


def test_a_noisy_run_is_not_sent_to_a_larger_budget():
    q = make_posterior("cholesky")
    result = quiet(q, make_model().log_joint, ngvi.VN(q, lr=0.1), max_evaluations=5)
    assert not result.converged
    assert result.reason.endswith(
        "Its gradients are noisy and the norm has a floor: judge the run by its loss, or use more draws and "
        "a smaller lr."
    )


@pytest.mark.accuracy
def test_a_small_norm_of_one_draw_is_no_verdict():
    """One draw at times gives a norm that is too small: 15 seeds, and no verdict that the exact norm refutes."""
    X = torch.randn(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = ngvi.GeneralizedLinear(X, (X.sum(-1) > 0.3 * X[:, 0].square()).double())
    small = 0
    for seed in range(15):
        torch.manual_seed(seed)
        q = ngvi.CholeskyGaussian(2, dtype=torch.float64)
        result = quiet(q, model.log_joint, ngvi.BBVI(q, 0.01, smoothness=16.0), tolerance=0.1, max_evaluations=150)
        small += "over 16 fresh evaluations" in result.reason or result.converged
        true = float(ngvi.VN(q).evaluate(model).norm2.sqrt())
        assert not result.converged or true <= 0.1, (seed, true, result)
    assert small > 5


def test_draws_without_noise_at_the_optimum_converge():
    """The path derivative of a Gaussian target: the standard error vanishes with the norm."""
    precision = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    torch.manual_seed(0)
    q = ngvi.CholeskyGaussian(3, mean=1.0, dtype=torch.float64)
    result = quiet(
        q,
        lambda theta: -0.5 * (precision * theta.square()).sum(-1),
        ngvi.VN(q, lr=0.5, estimator=ngvi.Stein(2)),
        max_evaluations=500,
    )
    assert result.converged, result
    assert q.variance.tolist() == pytest.approx((1 / precision).tolist(), rel=1e-4)


def test_enough_draws_converge_where_the_tolerance_leaves_room_for_their_error():
    model = make_model()
    torch.manual_seed(0)
    q = make_posterior("cholesky")
    result = quiet(q, model.log_joint, ngvi.VN(q, lr=0.1, estimator=ngvi.Stein(512)), tolerance=0.1)
    true = float(ngvi.VN(q).evaluate(model).norm2.sqrt())
    assert result.converged, result
    assert true < result.norm <= 0.1


@pytest.mark.accuracy
def test_the_norm_over_fresh_evaluations_has_the_standard_error_of_their_mean():
    """Against the exact gradient, over many repetitions; and draws that repeat have none."""
    model, q = make_model(), make_posterior("cholesky")
    optimizer = ngvi.VN(q, lr=0.1, estimator=ngvi.Stein(Antithetic(2, torch.Generator().manual_seed(0))))
    exact = ngvi.Quadrature()(q, model)
    truth = q.norm2(q.local(exact))
    seen = [optimizer.averaged(ngvi.LogJoint(model.log_joint), 4) for _ in range(400)]
    noise2 = torch.stack([status.noise2 for status in seen]).mean()
    assert float(torch.stack([status.norm2 for status in seen]).mean() - noise2) == pytest.approx(float(truth), rel=0.1)
    assert float(noise2) > 0.1 * float(truth)
    assert optimizer.evaluations == 1600
    still = ngvi.VN(q, lr=0.1).averaged(model, 3)
    assert float(still.noise2) == 0.0
    assert float(still.norm2) == pytest.approx(float(truth), rel=1e-12)
    assert float(still.loss) == pytest.approx(float(model.negative_elbo(q).detach()), rel=1e-12)


def test_a_mini_batch_says_nothing_of_the_other_rows():
    model, q = make_model(), make_posterior("cholesky")
    result = quiet(q, model.minibatch(range(10)), ngvi.VN(q, lr=0.5), max_evaluations=100)
    assert not result.converged
    assert not result.members_converged
    assert result.norm < 1e-5


class TestFarStart:
    """E_q e^η grows as e^(ν²/2): counts with wide columns, from N(0, I)."""

    def model(self, width=3.0, **more):
        generator = torch.Generator().manual_seed(0)
        X = width * torch.randn(100, 2, dtype=torch.float64, generator=generator)
        y = torch.poisson(torch.exp(X @ torch.tensor([0.3, -0.2]).double() / width), generator)
        return ngvi.GeneralizedLinear(X, y, "poisson_log", prior_precision=0.1, **more)

    @pytest.mark.parametrize("kind", ["cholesky", "natural", "precision", "diagonal"])
    def test_it_begins_at_the_mode(self, kind):
        """The same optimum as from a narrow start, in a few evaluations; by steps alone 1,000 are not enough."""
        far, near = (POSTERIORS[kind](2, scale=scale, dtype=torch.float64) for scale in (1.0, 0.1))
        left, right = quiet(far, self.model()), quiet(near, self.model())
        assert left.converged
        assert left.evaluations < 12
        assert left.loss == pytest.approx(right.loss, abs=1e-8)
        assert left.trace[0].norm < 1.0

    def test_an_infinite_objective_at_the_start(self):
        q = POSTERIORS["cholesky"](2, scale=1.0, dtype=torch.float64)
        assert quiet(q, self.model(50.0)).converged

    def test_members_that_are_better_where_they_are_stay(self, monkeypatch):
        """Newton's method that leads nowhere good loses nothing."""
        q, model = POSTERIORS["cholesky"](2, scale=1.0, dtype=torch.float64), self.model(1.5)
        here = q.mean.clone(), q.scale_tril.clone()
        bad = lambda q, *rest: q.initialize_(torch.full((2,), 3.0, dtype=torch.float64))  # noqa: E731
        monkeypatch.setattr(sys.modules["torchngvi.fitting.steps"], "start_at_mode", lambda *given: (bad(*given), 1)[1])
        quiet(q, model, max_evaluations=2)
        assert torch.equal(q.mean, here[0])
        assert torch.equal(q.scale_tril, here[1])

    def test_a_run_goes_on_to_the_bit(self, tmp_path):
        whole, parts = (POSTERIORS["cholesky"](2, scale=1.0, dtype=torch.float64) for _ in range(2))
        quiet(whole, self.model())
        quiet(parts, self.model(), max_evaluations=3, checkpoint=tmp_path / "run.pt")
        result = quiet(parts, self.model(), checkpoint=tmp_path / "run.pt")
        assert result.converged
        assert torch.equal(whole.mean, parts.mean)
        assert torch.equal(whole.scale_tril, parts.scale_tril)


def own_engine(request):
    """An engine of one's own, which is that of steps by another name."""
    engine, criteria = request.engine("steps")
    engine.name = "own"
    return engine, criteria


class TestWords:
    REGRESSION = """
import sys, torch, torchngvi
torchngvi.fit(torchngvi.CholeskyGaussian(2), torchngvi.GeneralizedLinear(torch.eye(2), [0.0, 1.0]), progress=False)
print(*sys.modules)
"""

    def test_every_word_is_in_the_table(self):
        def kinds(cls):
            return {cls, *(each for below in cls.__subclasses__() for each in kinds(below))}

        words = {kind.engine for kind in kinds(Posterior) | kinds(Target) if kind.__module__.startswith("torchngvi.")}
        idle = set(ENGINES) - {"groups"} - words  # a keyword asks for groups
        assert not idle, f'no class has engine = "{min(idle)}": its row of ENGINES is asked for by nothing'
        assert words == set(ENGINES) - {"groups"} | {""}

    def test_an_engine_needs_no_more_than_a_row(self, monkeypatch):
        class Own(ngvi.CholeskyGaussian):
            engine = "own"

        monkeypatch.setitem(ENGINES, "own", f"{__name__}:own_engine")
        q, usual = Own(DIM, dtype=torch.float64), ngvi.CholeskyGaussian(DIM, dtype=torch.float64)
        names, run = [], Loop.run
        monkeypatch.setattr(Loop, "run", lambda loop: (names.append(loop.engine.name), run(loop))[1])
        assert quiet(q, make_model(())).loss == quiet(usual, make_model(())).loss
        assert names == ["own", "NewtonCG"]

    def test_a_word_that_no_row_has(self):
        class Own(ngvi.CholeskyGaussian):
            engine = "diesel"

        with pytest.raises(InputError, match="name the engine 'diesel', which the table .* does not have"):
            quiet(Own(DIM, dtype=torch.float64), make_model(()))

    @pytest.mark.accuracy
    def test_a_regression_imports_no_other_engine(self):
        done = subprocess.run(
            [sys.executable, "-c", self.REGRESSION], capture_output=True, text=True, timeout=120, check=True
        )
        modules = {place.split(":")[0] for place in ENGINES.values()} & set(done.stdout.split())
        assert modules == {"torchngvi.fitting.steps"}
