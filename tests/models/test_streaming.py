"""Data in batches: `DataLogJoint`, and the first passes of a fit that keep a site a batch."""

import dataclasses
import itertools
import re
import weakref
from collections import namedtuple

import pytest
import torch
from helpers import DIFFERENCE, DTYPE, EXACT, IDENTITY, close, quiet, randn
from test_models_refusals import six
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from torchngvi import (
    VN,
    CholeskyGaussian,
    DataLogJoint,
    DiagonalGaussian,
    GeneralizedLinear,
    LogJoint,
    NaturalGaussian,
    Streamed,
)
from torchngvi.derivatives import energy_and_gradient
from torchngvi.errors import InputError
from torchngvi.expectations.draws import Fixed
from torchngvi.fitting import starts
from torchngvi.fitting.starts import stream_batches, stream_rows
from torchngvi.models import GaussianNoise, StudentT

FAMILIES = [CholeskyGaussian, NaturalGaussian, DiagonalGaussian]
DIM, ROWS, NOISE = 3, 24, 0.7
SIZES = [1, 7, 8, ROWS, 100]
PRIOR_ROOT = torch.tensor([[1.3, 0.0, 0.0], [0.4, 0.8, 0.0], [-0.2, 0.3, 1.1]], dtype=DTYPE)

families = pytest.mark.parametrize("family", FAMILIES)
gammas = pytest.mark.parametrize("gamma", [0.3, 1.0, 2.0])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def new(family=CholeskyGaussian, dim=DIM, **options):
    return family(dim, **{"dtype": DTYPE, **options})


def conjugate(gamma=1.0, full=True):
    """Weights, offsets, a prior mean and a prior precision that is a matrix; with the exact posterior."""
    X, y, offset = randn(ROWS, DIM, seed=1), 2 * randn(ROWS, seed=2), 0.3 * randn(ROWS, seed=3)
    weights, center = 0.2 + randn(ROWS, seed=4).abs(), randn(DIM, seed=5)
    precision = PRIOR_ROOT @ PRIOR_ROOT.mT if full else torch.tensor([0.5, 1.0, 2.0], dtype=DTYPE)
    model = GeneralizedLinear(
        X,
        y,
        GaussianNoise(NOISE),
        prior_precision=precision,
        prior_mean=center,
        weights=weights,
        offset=offset,
        temperature=gamma,
    )
    prior = precision if full else precision.diag()
    S = prior + X.mT @ (X * weights[:, None]) / NOISE**2 / gamma
    b = prior @ center + X.mT @ (weights * (y - offset)) / NOISE**2 / gamma
    return model, torch.linalg.solve(S, b), S


def logistic(rows=120, dim=4, precision=1.0, **options):
    X = randn(rows, dim, seed=1)
    y = (torch.rand(rows, generator=torch.Generator().manual_seed(2), dtype=DTYPE) < torch.sigmoid(X.sum(-1))).double()
    return GeneralizedLinear(X, y, prior_precision=precision, **options)


def black_box(model, size=30, kind=tuple, loader=None, likelihood=None, **options):
    """The same model, its data in batches; the prior of the model is tempered, that of a log joint is not."""

    def log_likelihood(theta, batch):
        X, y, weights, offset = batch.values() if isinstance(batch, dict) else batch
        eta = theta @ X.mT + offset
        return -(weights * model.likelihood.energy(eta, y)).sum(-1)

    rows = (model.X, model.y, model.weights, model.offset)
    parts = list(zip(*(tensor.split(size) for tensor in rows), strict=True))
    parts = [kind(zip("Xywo", part, strict=True)) if kind is dict else kind(part) for part in parts]
    return DataLogJoint(
        likelihood or log_likelihood,
        lambda theta: -model.temperature * model.prior.energy(theta),
        parts if loader is None else loader(TensorDataset(*rows)),
        num_data=len(model.y),
        **{"temperature": model.temperature, **options},
    )


def gap(q, model, lowest):
    with torch.no_grad():
        return float(model.negative_elbo(q)) - lowest


def lowest_of(model, family=CholeskyGaussian):
    return quiet(new(family, model.dim), model).loss


def set_numbers(monkeypatch, **numbers):
    """Other numbers of a start in passes."""
    monkeypatch.setattr(starts, "_SETTINGS", dataclasses.replace(starts._SETTINGS, **numbers))


def watch(monkeypatch, passes=None):
    """Every visit of `_visit`: (number, λ before it, λ of what is known, whether there is a target)."""
    visits, ends, original = [], [], starts._visit

    def spy(work, start, parts, optimizer, planned):
        def spied():
            for number, part in enumerate(parts()):

                def visited(known, number=number, part=part):
                    target = part(known)
                    visits.append((number, starts.natural_parameters(work), known, target is not None))
                    return target

                yield visited

        original(work, start, spied, optimizer, passes or planned)
        ends.append((start, starts.natural_parameters(work)))

    monkeypatch.setattr(starts, "_visit", spy)
    return visits, ends


def same_naturals(actual, expected, tolerance=IDENTITY):
    for one, other in zip(actual, expected, strict=True):
        close(one, other, tolerance)


class TestConjugate:
    @pytest.mark.sparse(3)
    @pytest.mark.parametrize("passes", [1, 2])
    @pytest.mark.parametrize("size", SIZES)
    @gammas
    def test_rows(self, gamma, size, passes, monkeypatch):
        """One pass is exact, whatever the batch size and the order; the second leaves it there."""
        set_numbers(monkeypatch, careful=ROWS, passes=passes)
        model, mean, S = conjugate(gamma)
        for seed in (0, 1):
            q = new(mean=1.0, scale=0.5)
            stream_rows(q, model, size, seed=seed)
            close(q.mean, mean, DIFFERENCE)
            close(q.precision, S, DIFFERENCE)

    @pytest.mark.sparse(3)
    @pytest.mark.parametrize("passes", [1, 2])
    @pytest.mark.parametrize("size", SIZES)
    @gammas
    def test_batches(self, gamma, size, passes, monkeypatch):
        """Whitened draws are exact for a quadratic log joint."""
        set_numbers(monkeypatch, careful=ROWS, passes=passes)
        model, mean, S = conjugate(gamma)
        q = new(mean=1.0, scale=0.5)
        stream_batches(q, black_box(model, size), seed=1)
        close(q.mean, mean, DIFFERENCE)
        close(q.precision, S, DIFFERENCE)

    @pytest.mark.parametrize("stream", ["rows", "batches"])
    @families
    def test_every_family_ends_at_its_optimum(self, family, stream):
        """Mean field at m and 1/√diag S, not at the marginal variances."""
        model, mean, S = conjugate(0.5, full=False)
        q = new(family)
        if stream == "rows":
            stream_rows(q, model, 5)
        else:
            stream_batches(q, black_box(model, 5), seed=1)
        close(q.mean, mean, DIFFERENCE)
        close(q.precision, S.diagonal().diag() if family is DiagonalGaussian else S, DIFFERENCE)

    def test_a_flat_prior(self):
        """The first batches determine nothing alone, and q stays a density."""
        model, *_ = conjugate()
        target = black_box(model, 2)
        target.prior = LogJoint(lambda theta: 0 * theta.sum(-1))
        q = new()
        stream_batches(q, target, seed=1)
        S = model.X.mT @ (model.X * model.weights[:, None]) / NOISE**2
        close(q.precision, S, 1e-6)

    @pytest.mark.accuracy
    def test_weak_rows_count(self):
        """Each moves q by less than the norm at which a fit to a batch ends, and all by much."""
        X, y = torch.full((200, 1), 0.1, dtype=DTYPE), torch.full((200,), 3.0, dtype=DTYPE)
        model = GeneralizedLinear(X, y, "gaussian", prior_precision=1.0)
        target, q = black_box(model, 1, loader=lambda data: DataLoader(data, batch_size=1, shuffle=True)), new(dim=1)
        stream_batches(q, target, seed=1)
        close(q.mean, torch.tensor([20.0], dtype=DTYPE), DIFFERENCE)  # 60 / (2 + 1)
        close(q.precision, torch.tensor([[3.0]], dtype=DTYPE), DIFFERENCE)

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
    def test_sparse_rows(self):
        model, mean, S = conjugate()
        model.X = model.X.to_sparse_csr()
        q = new()
        stream_rows(q, model, 5)
        close(q.mean, mean, DIFFERENCE)
        close(q.precision, S, DIFFERENCE)

    def test_the_model_stays(self):
        model, *_ = conjugate()
        before = [tensor.clone() for tensor in model.tensors()]
        stream_rows(new(), model, 5)
        assert all(torch.equal(*pair) for pair in zip(model.tensors(), before, strict=True))
        assert model.comparable


class TestSites:
    @pytest.mark.parametrize("stream", ["rows", "batches"])
    def test_the_sites_and_the_start_are_q(self, stream, monkeypatch):
        """What is known at a visit is λ less the site of the batch, λ the start plus all sites."""
        visits, ends = watch(monkeypatch, passes=3)
        model, q = logistic(60, precision=0.3), new(dim=4)
        if stream == "rows":
            stream_rows(q, model, 20)
        else:
            stream_batches(q, black_box(model, 20), seed=1)
        (start, end), sites = ends[0], {}
        assert [visit[0] for visit in visits] == 3 * [0, 1, 2]
        after = [visit[1] for visit in visits[1:]] + [end]
        for (number, before, known, _), now in zip(visits, after, strict=True):
            if number in sites:
                same_naturals(known, before - sites[number])
            elif number:
                same_naturals(known, before)
            else:
                same_naturals(known, start)  # and not the q it begins with
            sites[number] = now - known
        total = start
        for site in sites.values():
            total = total + site
        same_naturals(total, end)

    def test_the_start_is_the_prior_or_nothing(self, monkeypatch):
        _, ends = watch(monkeypatch)
        model, *_ = conjugate()
        stream_rows(new(), model, 8)
        stream_batches(new(), black_box(model, 8), seed=1)
        same_naturals(ends[0][0], (model.prior.precision @ model.prior.mean, model.prior.precision))
        assert not any(bool(part.any()) for part in ends[1][0])

    def test_no_density_no_target(self, monkeypatch):
        kept = []
        monkeypatch.setattr(starts, "_visit", lambda work, start, parts, *_: kept.extend(parts()))
        stream_rows(new(), conjugate()[0], 8)
        good, bad = (starts.SiteSum(torch.zeros(3), S.double()) for S in (torch.eye(3), -torch.eye(3)))
        good = good._replace(vector=good.vector.double())
        bad = bad._replace(vector=bad.vector.double())
        assert len(kept) == 3
        assert all(part(bad) is None and part(good) is not None for part in kept)

    def test_a_skipped_batch_keeps_its_site(self):
        """Without a target, or where no step is taken, λ and the sites are what they were."""
        model, knowns, turns = logistic(40), [], itertools.count()
        work, start = new(dim=4), starts.SiteSum(torch.zeros(4, dtype=DTYPE), 2 * torch.eye(4, dtype=DTYPE))
        good, none = LogJoint(model.log_joint), LogJoint(lambda theta: theta.sum(-1) * torch.nan)

        def parts():
            turn = next(turns)

            def part(number):
                def visited(known):
                    knowns.append(known)
                    return [(none, none), (good, None), (None, none), (none, none)][turn][number]

                return visited

            return map(part, range(2))

        estimator = starts.SampleAverage(Fixed(32))
        starts._visit(work, start, parts, lambda work: VN(work, estimator=estimator), 4)
        for known in knowns[:3]:  # nothing was visited yet, though q is not the start
            same_naturals(known, start, 0.0)
        for first, second in zip(knowns[4::2], knowns[5::2], strict=True):
            same_naturals(first, start)
            same_naturals(second, starts.natural_parameters(work))

    def test_careful_first(self, monkeypatch):
        """The first batches of the first pass are fitted, every other visit is one step without a trial."""
        steps = []
        for name in ("evaluate", "step", "step_untried"):
            original = getattr(VN, name)

            def counted(self, target, name=name, original=original):
                steps.append(name)
                return original(self, target)

            monkeypatch.setattr(VN, name, counted)
        set_numbers(monkeypatch, careful=2)
        stream_rows(new(dim=4), logistic(60), 20)
        visits = " ".join(steps).split(" step_untried")
        assert len(visits) == 1 + 6
        assert all(re.fullmatch(" ?evaluate( step evaluate)+", visit) for visit in visits[:2])
        assert not any(visits[2:])

    def test_a_batch_is_fitted(self, monkeypatch):
        """The fit to a careful batch goes on until its norm is small."""
        model = logistic(60)
        set_numbers(monkeypatch, passes=1)
        gaps = {}
        for steps in (1, 12):
            set_numbers(monkeypatch, steps=steps)
            q = new(dim=4, mean=-4.0, scale=0.1)
            stream_rows(q, model, 60)
            gaps[steps] = gap(q, model, lowest_of(model))
        assert gaps[12] < 0.2 < gaps[1]

    def test_other_orders(self):
        model, ends = logistic(60), []
        for seed in (0, 0, 1):
            q = new(dim=4)
            stream_rows(q, model, 10, seed=seed)
            ends.append(q.mean)
        assert torch.equal(ends[0], ends[1])
        assert not torch.equal(ends[0], ends[2])

    def test_sites_that_would_not_fit_are_not_kept(self, monkeypatch):
        visits, _ = watch(monkeypatch)
        set_numbers(monkeypatch, kept=6 * 16 - 1)
        model, q = logistic(60), new(dim=4)
        stream_rows(q, model, 10)
        stream_batches(q, black_box(model, 10), seed=1)
        assert len(visits) == 12
        set_numbers(monkeypatch, kept=6 * 16)
        stream_rows(q, model, 10)
        stream_batches(q, black_box(model, 10), seed=1)
        assert len(visits) == 12 + 24


class TestLogistic:
    @pytest.mark.parametrize("stream", ["rows", "batches"])
    def test_gaps_after_a_pass_and_two(self, stream, monkeypatch):
        model, gaps = logistic(precision=0.1), []
        lowest = lowest_of(model)
        for passes in (1, 2):
            set_numbers(monkeypatch, passes=passes)
            q = new(dim=4)
            if stream == "rows":
                stream_rows(q, model, 12)
            else:
                stream_batches(q, black_box(model, 12), seed=1)
            gaps.append(gap(q, model, lowest))
        assert 0 <= gaps[1] < 0.5 * gaps[0] < 1.0
        assert gaps[1] < 0.1

    @families
    def test_fit_ends_where_it_ends_without(self, family):
        model = logistic()
        alone, q = new(family, 4), new(family, 4)
        plain, result = quiet(alone, model), quiet(q, model, batch_size=12)
        assert result.converged
        assert result.loss == pytest.approx(plain.loss, abs=1e-8)
        assert result.evaluations < plain.evaluations
        close(q.mean, alone.mean, 1e-4)

    @pytest.mark.parametrize("gamma", [0.0, 0.1, 10.0])
    def test_temperatures(self, gamma):
        model = logistic(temperature=gamma)
        plain, result = quiet(new(dim=4), model), quiet(new(dim=4), model, batch_size=12)
        assert result.converged
        assert result.loss == pytest.approx(plain.loss, abs=1e-8 if gamma else 1e-5)

    @pytest.mark.parametrize("size", [1, 7, 1000])
    def test_sizes(self, size):
        model = logistic(60)
        result = quiet(new(dim=4), model, batch_size=size)
        assert result.converged
        assert result.loss == pytest.approx(lowest_of(model), abs=1e-8)

    def test_float32(self):
        model = logistic().to(torch.float32)
        q = new(dim=4, dtype=torch.float32)
        result = quiet(q, model, batch_size=12)
        assert result.converged, result.reason
        assert q.dtype == torch.float32

    @pytest.mark.parametrize("precision", [1e-2, 1e-8])
    def test_a_prior_of_which_the_expectation_overflows(self, precision):
        """E[exp η] under a vague prior is infinite; q is where the fit starts, as without batches."""
        X = randn(80, 3, seed=1)
        y = torch.poisson(X.sum(-1).clamp(max=2).exp(), generator=torch.Generator().manual_seed(1))
        model = GeneralizedLinear(X, y, "poisson_log", prior_precision=precision)
        result = quiet(new(), model, batch_size=20)
        assert result.converged, result.reason
        assert result.loss == pytest.approx(lowest_of(model), abs=1e-8)

    @pytest.mark.accuracy
    @pytest.mark.parametrize("size", [1, 10])
    def test_not_log_concave(self, size, monkeypatch):
        """Outliers of Student's t bend the wrong way: what leaves no density is skipped."""
        visits, _ = watch(monkeypatch)
        X = randn(60, 3, seed=1)
        y = X.sum(-1) + 0.1 * randn(60, seed=2)
        y[::4] += 40 * randn(15, seed=3)
        model = GeneralizedLinear(X, y, StudentT(0.3, dof=3.0), prior_precision=0.01)
        torch.manual_seed(2)  # an order in which it happens
        result = quiet(new(), model, batch_size=size)
        assert result.converged, result.reason
        assert result.loss == pytest.approx(lowest_of(model), abs=1e-8)
        assert size > 1 or not all(visit[-1] for visit in visits)
        boxed = quiet(new(), black_box(model, size))
        assert boxed.converged, boxed.reason
        assert boxed.loss == pytest.approx(result.loss, abs=0.1)


class TestDataLogJoint:
    @pytest.mark.parametrize("kind", [tuple, list, dict])
    @pytest.mark.parametrize("size", [1, 7, 30, 120])
    def test_is_the_log_joint_of_the_whole(self, kind, size):
        model, theta = logistic(), randn(5, 4, seed=3)
        target = black_box(model, size, kind)
        with torch.no_grad():
            close(target.log_joint(theta), model.log_joint(theta), EXACT)
        for actual, expected in zip(energy_and_gradient(target, theta), energy_and_gradient(model, theta), strict=True):
            close(actual, expected, EXACT)

    def test_tensors_a_loader_and_tuples_with_names(self):
        """Every kind of batch; shapes (S, D), (S, B, D) and (D,)."""
        x, slope = randn(10, seed=1), randn(2, 1, seed=4)
        pair = namedtuple("pair", "a b")
        for batches, part in (
            (x.split(4), lambda batch: batch),
            (DataLoader(x, batch_size=4), lambda batch: batch),
            (DataLoader(x, batch_size=3, shuffle=True), lambda batch: batch),
            ([pair(x[:6], x[:6]), pair(x[6:], x[6:])], lambda batch: batch.b),
        ):
            for shape in ((4, 2), (4, 3, 2), (2,)):
                target = DataLogJoint(
                    lambda theta, batch, part=part: -0.5 * (part(batch) - theta @ slope).square().sum(-1),
                    lambda theta: -theta.square().sum(-1),
                    batches,
                    10,
                )
                theta = randn(*shape, seed=2).requires_grad_()
                whole = -0.5 * (x - theta @ slope).square().sum(-1) - theta.square().sum(-1)
                close(target.log_joint(theta), whole, EXACT)
                weight = randn(*shape[:-1], seed=3)
                (actual,) = torch.autograd.grad(target.log_joint(theta), theta, weight)
                (expected,) = torch.autograd.grad(whole, theta, weight)
                close(actual, expected, EXACT)

    def test_one_graph_at_a_time(self):
        """The graph of a batch is gone when the next one is asked for, and none is left in the value."""
        alive, most = [], []

        class Token:
            pass

        class Watched(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.token = Token()
                alive.append(weakref.ref(ctx.token))
                return x.clone()

            @staticmethod
            def backward(ctx, g):
                return g

        def log_likelihood(theta, batch):
            most.append(sum(token() is not None for token in alive))
            return -(batch - Watched.apply(theta)).square().sum(-1)

        x = randn(20, seed=1)
        target = DataLogJoint(log_likelihood, lambda theta: 0 * theta.sum(-1), x.split(2), 20)
        theta = randn(3, 1, seed=2).requires_grad_()
        value = target.log_joint(theta)
        assert max(most) <= 1
        assert not any(token() is not None for token in alive)
        calls = len(most)
        assert calls == 10 + 3  # and the check of the sum
        value.sum().backward()
        assert len(most) == calls
        close(theta.grad, 2 * (x.sum() - 20 * theta.detach()), EXACT)

    @pytest.mark.parametrize("shape", [(7, 4), (7, 3, 4), (4,)])
    def test_draws_times_rows_are_bounded(self, shape, monkeypatch):
        """Many draws of a large batch come to the function some at a time; values and gradients are the same."""
        monkeypatch.setattr("torchngvi.models.streamed._CELLS", 60)
        x, weight, seen = randn(40, 4, seed=1), randn(*shape[:-1], seed=3), []

        def log_likelihood(theta, batch):
            seen.append((len(theta) if theta.ndim > 1 else 1) * len(batch))
            return -(theta @ batch.mT).cosh().sum(-1)

        target = DataLogJoint(log_likelihood, lambda theta: -theta.square().sum(-1), x.split(20), 40)
        theta = randn(*shape, seed=2).requires_grad_()
        whole = -(theta @ x.mT).cosh().sum(-1) - theta.square().sum(-1)
        value = target.log_joint(theta)
        close(value, whole, EXACT)
        (actual,) = torch.autograd.grad(value, theta, weight)
        (expected,) = torch.autograd.grad(whole, theta, weight)
        close(actual, expected, EXACT)
        with torch.no_grad():
            close(target.log_joint(theta), whole, EXACT)
        assert max(seen) == (60 if theta.ndim > 1 else 20)

    def test_draws_of_rows_in_files_are_bounded(self, monkeypatch):
        monkeypatch.setattr("torchngvi.models.streamed._CELLS", 60)
        X, seen = randn(40, 4, seed=1), []

        class Watched(GeneralizedLinear):
            def data_log_likelihood(self, theta):
                seen.append(len(theta) * self.num_data)
                return super().data_log_likelihood(theta)

        y = (X.sum(-1) > 0).double()
        target = Streamed([(X[:20], y[:20]), (X[20:], y[20:])], 40, lambda X, y: Watched(X, y, classes=(0, 1)))
        theta = randn(7, 4, seed=2)
        for actual, expected in zip(
            energy_and_gradient(target, theta), energy_and_gradient(GeneralizedLinear(X, y), theta), strict=True
        ):
            close(actual, expected, EXACT)
        assert max(seen) == 60

    def test_a_batch_without_theta(self):
        """A batch may say nothing of theta, not all."""
        x = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=DTYPE)

        def log_likelihood(theta, batch):
            return -(batch * theta).square().sum(-1) if bool(batch.any()) else theta.new_zeros(len(theta))

        def prior(theta):
            return -theta.square().sum(-1)

        theta = torch.ones(2, 1, dtype=DTYPE)
        value, gradient = energy_and_gradient(DataLogJoint(log_likelihood, prior, x.split(2), 4), theta)
        assert value.tolist() == [3.0, 3.0]
        assert gradient.flatten().tolist() == [6.0, 6.0]
        detached = DataLogJoint(lambda theta, batch: log_likelihood(theta.detach(), batch), prior, x.split(2), 4)
        text = (
            "log_likelihood does not depend on theta in any batch. Compute it from the theta it is given, by torch "
            "operations without detach(), item() or NumPy."
        )
        with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
            energy_and_gradient(detached, theta)

    @pytest.mark.parametrize("kind", [tuple, dict])
    def test_a_partition_averages_to_the_whole(self, kind):
        model, theta = logistic(temperature=0.5), randn(5, 4, seed=3)
        target = black_box(model, 30, kind)
        parts = [energy_and_gradient(target.minibatch(batch), theta) for batch in target.batches]
        assert len(parts) == 4
        for actual, expected in zip(zip(*parts, strict=True), energy_and_gradient(target, theta), strict=True):
            close(torch.stack(actual).mean(0), expected, EXACT)
        assert target.minibatch(target.batches[0]).temperature == 0.5

    def test_steps_on_minibatches(self):
        model = logistic()
        target, q = black_box(model, 30), new(dim=4)
        lowest, opt = lowest_of(model), VN(q, lr=0.2)
        for batch in itertools.chain(*itertools.repeat(target.batches, 10)):
            opt.step(target.minibatch(batch))
        assert gap(q, model, lowest) < 1.0

    def test_tensors_are_unknown(self):
        assert black_box(logistic()).tensors() == ()


class TestFit:
    @pytest.mark.sparse(4)
    @families
    @gammas
    def test_converges_to_the_optimum_of_the_model(self, family, gamma):
        model = logistic(temperature=gamma)
        q = new(family, 4)
        result = quiet(q, black_box(model))
        assert result.converged, result.reason
        assert 0 <= gap(q, model, lowest_of(model, family)) / gamma < 4 * 0.5 * 0.1**2

    @pytest.mark.parametrize("seed", [0, 2])
    def test_counts_from_far_away(self, seed):
        """At N(0, I) rows have means of e^20 and more: no step by draws leads from there, the mode of a batch does."""
        generator = torch.Generator().manual_seed(3)
        X = torch.randn(100, 40, generator=generator, dtype=DTYPE)
        slopes = 0.5 * torch.randn(40, generator=generator, dtype=DTYPE)
        y = torch.poisson((X @ slopes).clamp(max=8).exp(), generator=generator)
        model, q = GeneralizedLinear(X, y, "poisson", prior_precision=1.0), new(dim=40)
        torch.manual_seed(seed)
        result = quiet(q, black_box(model, 25))
        assert result.converged, result.reason
        assert result.gradients <= 20_000
        assert 0 <= gap(q, model, lowest_of(model)) < 4 * 0.5 * 0.1**2

    def test_a_batch_of_posteriors(self):
        """They start where they are."""
        model, q = logistic(), new(dim=4, batch_shape=(2,))
        target = black_box(model)
        stream_batches(q, target, seed=1)
        assert not bool(q.mean.any())
        result = quiet(q, target)
        assert result.converged
        with torch.no_grad():
            assert float((model.negative_elbo(q) - lowest_of(model)).max()) < 4 * 0.5 * 0.1**2

    def test_mean_field_in_many_dimensions(self, monkeypatch):
        set_numbers(monkeypatch, widest=3)
        target, q, full = black_box(logistic()), new(DiagonalGaussian, 4), new(dim=4)
        stream_batches(q, target, seed=1)
        stream_batches(full, target, seed=1)
        assert not bool(q.mean.any())
        assert bool(full.mean.all())

    @pytest.mark.parametrize("size", [1, 7])
    def test_small_batches(self, size):
        model, q = logistic(30, 2), new(dim=2)
        assert quiet(q, black_box(model, size)).converged
        assert gap(q, model, lowest_of(model)) < 4 * 0.5 * 0.1**2

    def test_float32(self):
        q = new(dim=4, dtype=torch.float32)
        result = quiet(q, black_box(logistic().to(torch.float32)))
        assert result.converged, result.reason
        assert q.dtype == torch.float32

    class Stored(Dataset):
        """Batches as they are."""

        def __init__(self, batches):
            self.batches = batches

        def __len__(self):
            return len(self.batches)

        def __getitem__(self, index):
            return self.batches[index]

    class Streamed(IterableDataset):
        """Rows as they come."""

        def __init__(self, data):
            self.data = data

        def __iter__(self):
            return iter(self.data)

    class Passes:
        """Anything that can be iterated over."""

        def __init__(self, batches):
            self.batches = batches

        def __iter__(self):
            return iter(self.batches)

    @pytest.mark.parametrize(
        ("loader", "passes"),
        [
            (None, 2),
            (lambda data: tuple(DataLoader(data, batch_size=12)), 2),
            (lambda data: DataLoader(data, batch_size=12), 2),
            (lambda data: DataLoader(data, batch_size=12, shuffle=True), 1),
            (lambda data: DataLoader(data, sampler=RandomSampler(data), batch_size=12), 1),
            (lambda data: DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 12, False)), 2),
            (lambda data: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 12, False)), 1),
            (lambda data: DataLoader(data, batch_sampler=[[*range(60)], [*range(60, 120)]]), 1),
            (lambda data: DataLoader(TestFit.Stored([data[:60], data[60:]]), batch_size=None), 2),
            (lambda data: DataLoader(TestFit.Stored([data[:60], data[60:]]), batch_size=None, shuffle=True), 1),
            (lambda data: DataLoader(TestFit.Streamed(data), batch_size=12), 1),
            (lambda data: TestFit.Passes([data[:60], data[60:]]), 1),
        ],
    )
    def test_passes(self, loader, passes, monkeypatch):
        """Two where the batches come again as they were, one otherwise."""
        original, rows = DataLogJoint.one_pass, []

        def counted(self):
            rows.append(0)
            for batch in original(self):
                rows[-1] += len(batch[0])
                yield batch

        monkeypatch.setattr(DataLogJoint, "one_pass", counted)
        model, q = logistic(), new(dim=4)
        stream_batches(q, black_box(model, 12, loader=loader), seed=1)
        assert rows == [120] * passes
        assert gap(q, model, lowest_of(model)) < 0.5

    def test_a_log_joint_that_fails_now_and_then(self):
        """The first call is the user's; an error later on costs a step."""
        model, calls = logistic(), itertools.count(1)
        plain = black_box(model, 12).log_likelihood

        def flaky(theta, batch):
            if next(calls) % 10 in (0, 1) and len(theta) > 1 and fails:
                raise RuntimeError("disk on fire")
            return plain(theta, batch)

        fails, q = False, new(dim=4)
        target = black_box(model, 12, likelihood=flaky)
        target.log_joint(torch.zeros(1, 4, dtype=DTYPE))
        fails, calls = True, itertools.count(2)
        stream_batches(q, target, seed=1)
        assert next(calls) > 40
        assert gap(q, model, lowest_of(model)) < 2.0
        with pytest.raises(ZeroDivisionError):
            quiet(q, black_box(model, likelihood=lambda theta, batch: 1 / 0))


class TestErrors:
    def test_construction_does_not_iterate(self):
        """No workers are started, no random numbers drawn."""
        before = torch.random.get_rng_state()
        six(DataLoader(torch.ones(6), batch_size=2, shuffle=True))
        assert torch.equal(torch.random.get_rng_state(), before)

    @pytest.mark.parametrize(
        ("batches", "num_data", "rows"),
        [
            (None, 7, 6),
            (None, 5, 6),
            ([], 6, 0),
            (DataLoader(torch.ones(6).double(), batch_size=4, drop_last=True), 6, 4),
        ],
    )
    def test_rows(self, batches, num_data, rows):
        """At the end of the first pass, with q where it was."""
        text = (
            f"a pass over the batches has {rows} rows where num_data is {num_data}: give the number of rows, and a "
            "DataLoader without drop_last."
        )
        target, q = six(batches, num_data), new(dim=1, mean=2.0)
        theta = torch.ones(2, 1, dtype=DTYPE)
        for run in (
            lambda: target.log_joint(theta),
            lambda: target.log_joint(theta.clone().requires_grad_()),
            lambda: stream_batches(q, target, seed=0),
            lambda: quiet(q, target),
        ):
            with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
                run()
        assert q.mean.item() == 2.0

    def test_the_sum_is_looked_at_once(self):
        calls = []

        def counted(theta, x):
            calls.append((len(theta), len(x)))
            return -0.5 * (x - theta).square().sum(-1)

        target = six(log_likelihood=counted)
        for _ in range(2):
            target.log_joint(torch.ones(4, 1, dtype=DTYPE))
        assert calls == [(1, 3), (1, 1), (1, 2), (4, 3), (4, 3), (4, 3), (4, 3)]


class Interrupted(GeneralizedLinear):
    """Somebody presses Ctrl-C at the fifth expectation."""

    calls = 0

    def expected_energy(self, frame):
        Interrupted.calls += 1
        if Interrupted.calls == 5:
            raise KeyboardInterrupt
        return super().expected_energy(frame)


def test_an_interrupt_of_the_first_pass_leaves_q():
    """The stream hands over at its end; there is no record yet, and the result says so."""
    X, y = logistic().X, logistic().y
    Interrupted.calls = 0
    for target, options in (
        (Interrupted(X, y), {"batch_size": 10}),
        (black_box(logistic(), 12, likelihood=interrupting(black_box(logistic()).log_likelihood)), {}),
    ):
        q = new(dim=4, mean=0.3, scale=0.7)
        before = q.snapshot()
        result = quiet(q, target, **options)
        assert not result.converged
        assert result.evaluations == 0
        assert "interrupt" in result.reason
        assert all(torch.equal(*pair) for pair in zip(q.coordinates, before, strict=True))
    result = quiet(q, target)  # and the same target goes on from there
    assert result.converged


def interrupting(log_likelihood, at=8):
    calls = itertools.count(1)

    def stopped(theta, batch):
        if next(calls) == at:
            raise KeyboardInterrupt
        return log_likelihood(theta, batch)

    return stopped


def test_many_draws_share_a_pass():
    """Draws are split between calls to bound the memory, but not where each call is a pass over data."""
    calls = []
    theta = randn(5000, 2, seed=1)

    def likelihood(theta, batch):
        calls.append(len(theta))
        return -0.5 * (theta[..., :1] - batch).square().sum(-1)

    data = DataLogJoint(likelihood, lambda theta: -theta.square().sum(-1), [torch.ones(3, dtype=DTYPE)], 3)
    value, gradient = energy_and_gradient(data, theta)
    assert calls.count(5000) == 1
    assert calls.count(2048) == 0
    calls.clear()
    split = LogJoint(lambda theta: likelihood(theta, torch.ones(3, dtype=DTYPE)) - theta.square().sum(-1))
    again, slope = energy_and_gradient(split, theta)
    assert calls == [2048, 2048, 904]
    close(value, again, EXACT)
    close(gradient, slope, EXACT)
