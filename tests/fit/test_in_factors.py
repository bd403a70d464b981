"""A log joint in factors, from values and gradients alone: `fit` sees it clique by clique, by draws of each clique."""

import functools
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import DTYPE, Watch, close, randn
from test_factors import TREE, quadratic

from torchngvi import (
    CholeskyGaussian,
    DiagonalGaussian,
    GeneralizedLinear,
    NaturalGaussian,
    PrecisionCholeskyGaussian,
    Quadrature,
    fit,
)
from torchngvi.expectations import Fixed, PerFactor, SampleAverage
from torchngvi.fitting.fit import tolerance_by_draws
from torchngvi.fitting.pool import Descent, SampledObjective
from torchngvi.fitting.starts import EngineSettings, Starts
from torchngvi.models import FactorTarget, GroupedLogJoint, MixedLogJoint, MixedPrior, TractableFactors
from torchngvi.models.factors import Guarded, GuardedFactors, in_factors
from torchngvi.structures import arrow
from torchngvi.testing import check_estimator

GROUPS, ROWS = 60, 5


@functools.cache
def counts():
    """Counts of groups with an intercept each: the model that knows its expectation, and the same in factors."""
    generator = torch.Generator().manual_seed(3)
    number = torch.arange(GROUPS).repeat_interleave(ROWS)
    X = torch.stack([torch.ones(len(number), dtype=DTYPE), randn(len(number), seed=1)], -1)
    effects = 0.7 * randn(GROUPS, seed=2)
    y = torch.poisson((0.5 * X.sum(-1) + effects[number]).exp(), generator)
    prior = MixedPrior(10.0, "kass-natarajan")  # for the columns as they are
    model = MixedLogJoint(X, y, (X[:, :1], number), "poisson_log", prior=prior)
    rows, y = X.reshape(GROUPS, ROWS, 2), y.reshape(GROUPS, ROWS)

    def of_groups(theta):
        b, beta, omega = theta[..., 0], theta[..., 1:3], theta[..., 3]
        eta = torch.einsum("nip,snp->sni", rows, beta) + b[..., None]
        effects = omega - 0.5 * (2 * omega).exp() * b.square() - 0.5 * torch.log(torch.tensor(2 * torch.pi))
        return (y * eta - eta.exp() - torch.lgamma(y + 1)).sum(-1) + effects

    def of_globals(theta):
        return -model.fixed.prior.energy(theta[..., :2]) - model.covariance_prior.energy(theta[..., 2:])

    return model, FactorTarget(model.structure, [(0, of_groups), (-1, of_globals)])


def over(model, family=PrecisionCholeskyGaussian):
    return family(model.dim, structure=model.structure, dtype=DTYPE)


@functools.cache
def optimum():
    model, _ = counts()
    q = model.posterior()
    return q, fit(q, model, tolerance=1e-8, progress=False).loss


class TestDraws:
    def test_each_member_has_whitened_draws_of_its_own(self):
        draws, like = Fixed(16, seed=4, apart=True), torch.zeros(3, 5, dtype=DTYPE)
        z = draws(like)
        assert z.shape == (16, 3, 5)
        close(torch.einsum("snk,snl->nkl", z, z) / 16, torch.eye(5, dtype=DTYPE).expand(3, 5, 5), 1e-12)
        close(z[8:], -z[:8], 0.0)
        assert float((z[:, 0] - z[:, 1]).abs().min()) > 1e-6
        assert torch.equal(z, draws(like))
        assert torch.equal(z, Fixed(16, seed=4, apart=True)(like))

    def test_those_of_one_member_are_those_that_members_share(self):
        like = torch.zeros(1, 5, dtype=DTYPE)
        close(Fixed(16, seed=4, apart=True)(like), Fixed(16, seed=4)(like), 1e-15)

    def test_fresh_draws_are_apart_too(self):
        like = torch.zeros(2, 5, dtype=DTYPE)
        z = Fixed(16, apart=True).fresh(1)(like)
        assert len(z) == 1024
        assert not torch.equal(z[:, 0], z[:, 1])

    def test_draws_that_are_left_out(self):
        """With fewer draws than coordinates only the variances are made 1: the others keep their directions."""
        like = torch.zeros(2, 9, dtype=DTYPE)
        whole, rest = Fixed(8, apart=True)(like), Fixed(8, left_out=(1,), apart=True)(like)
        ratio = rest[0] / whole[0]
        for number, old in ((1, 2), (2, 3)):
            close(rest[number], ratio * whole[old], 1e-12)


class TestNoise:
    def test_the_contract(self):
        check_estimator(lambda: PerFactor(SampleAverage(Fixed(64, apart=True))))

    def test_it_is_the_error_that_draws_of_each_clique_make(self):
        """|(a, W) - exact|² in the natural norm, on average over sets of draws."""
        model, target = counts()
        q, _ = optimum()
        exact, draws = Quadrature()(q, model), 64
        there = q.local(exact)
        errors, told = [], []
        for seed in range(40):
            e = PerFactor(SampleAverage(Fixed(draws, seed=seed, apart=True)))(q, target)
            errors.append(float(q.norm2(q.local(e))))
            told.append(float(e.noise2))
        assert float(q.norm2(there)) < 1e-12
        mean, least = sum(errors) / len(errors), draws / (draws - (1 + q.structure.parameters / q.dim))
        assert 0.6 < sum(told) / len(told) * least / mean < 1.7

    def test_it_vanishes_for_a_quadratic(self):
        """Whitened draws see the part of the gradient that is linear without error."""
        q = PrecisionCholeskyGaussian(TREE.dim, structure=TREE, dtype=DTYPE, scale=0.4)
        e = PerFactor(SampleAverage(Fixed(2 * TREE.widest, apart=True)))(q, quadratic(TREE))
        assert float(e.noise2) < 1e-20


class TestFactors:
    def test_terms_of_a_kind_are_one(self):
        model, target = counts()
        first, last = (factor.target for factor in target.factors)
        split = FactorTarget(model.structure, [(0, first), (-1, last), (0, lambda theta: -(theta[..., 0] ** 2))])
        assert [kind for kind, _ in split.by_kind()] == [0, 1]
        joined = FactorTarget(model.structure, split.by_kind())
        theta = randn(4, model.dim, seed=5)
        close(joined.log_joint(theta), split.log_joint(theta), 1e-10)
        q, estimator = over(model), PerFactor(SampleAverage(Fixed(16, apart=True)))
        assert float(estimator(q, split).noise2) == float(estimator(q, joined).noise2)

    def test_calls_are_counted_for_the_whole(self):
        model, target = counts()
        whole, factors = Guarded(target), GuardedFactors(target)
        PerFactor(SampleAverage(Fixed(16, apart=True)))(over(model), factors)
        factors.count_for(whole)
        assert (whole.gradients, whole.values) == (16, 0)
        factors.count_for(whole)
        assert whole.gradients == 16

    def test_when_they_are_seen_one_by_one(self):
        model, target = counts()
        assert in_factors(over(model), target)
        assert in_factors(over(model, NaturalGaussian), target)
        assert not in_factors(DiagonalGaussian(model.dim), target)
        assert not in_factors(over(model), model)
        batch = PrecisionCholeskyGaussian(model.dim, (2,), structure=model.structure)
        assert not in_factors(batch, target)

    @pytest.mark.accuracy
    def test_the_most_draws_are_bounded_by_memory(self):
        model, target = counts()
        wide = arrow(groups=400_000, local=1, globals=1)
        q = PrecisionCholeskyGaussian(wide.dim, structure=wide)
        descent = Descent(q, Guarded(FactorTarget(wide, [(0, torch.sum)])), 0, 0.1, EngineSettings())
        assert descent.most == 32  # 2 x 400,000 numbers each
        assert Descent(over(model), Guarded(target), 0, 0.1, EngineSettings()).most == 16_384


class TestFits:
    @pytest.mark.parametrize("family", [PrecisionCholeskyGaussian, NaturalGaussian])
    def test_the_exact_optimum(self, family):
        model, target = counts()
        best, loss = optimum()
        q = over(model, family)
        torch.manual_seed(0)
        result = fit(q, target, progress=False, examine=False)
        assert result.converged, result.reason
        assert result.gradients <= 3500
        lost = float(model.negative_elbo(q).detach()) - loss
        assert -1e-9 < lost < 0.02
        assert lost < 0.5 * result.norm**2 + 0.01  # the nats that it tells
        assert float(((q.mean - best.mean) / best.stddev).abs().max()) < 0.1
        assert float((q.stddev / best.stddev).log().abs().max()) < 0.1

    def test_the_tolerance_is_that_of_each_coordinate(self):
        wide = arrow(groups=399, local=1, globals=1)
        target = FactorTarget(wide, [(0, lambda theta: -0.5 * (theta[..., 0] - theta[..., 1]) ** 2), (1, normal)])
        q = PrecisionCholeskyGaussian(400, structure=wide, dtype=DTYPE, scale=0.5)
        assert tolerance_by_draws(q) == pytest.approx(0.2)
        assert tolerance_by_draws(CholeskyGaussian(400, dtype=DTYPE)) == pytest.approx(0.2)
        assert tolerance_by_draws(CholeskyGaussian(100, dtype=DTYPE)) == 0.1
        reason = fit(q, target, progress=False, examine=False, max_evaluations=1).reason
        assert reason.endswith("against a tolerance of 0.2). Raise max_evaluations."), reason

    def test_factors_that_all_know_their_expectation(self):
        rows = randn(20, 4, 2, seed=8)
        model = GeneralizedLinear(rows, (rows.sum(-1) > 0).to(DTYPE), prior_precision=1.0)
        wide = arrow(groups=20, local=1, globals=1)
        losses = []
        for kind in (FactorTarget, TractableFactors):
            q = PrecisionCholeskyGaussian(wide.dim, structure=wide, dtype=DTYPE)
            result = fit(q, kind(wide, [(0, model)]), progress=False, examine=False, tolerance=1e-6)
            assert result.converged, result.reason
            losses.append(float(TractableFactors(wide, [(0, model)]).negative_elbo(q).detach()))
        assert losses[0] == pytest.approx(losses[1], abs=1e-10)

    @pytest.mark.accuracy
    def test_nothing_is_d_by_d(self):
        wide = arrow(groups=1500, local=1, globals=1)
        y = randn(1500, seed=6)

        def of_groups(theta):
            return -0.5 * (y - theta[..., 0]) ** 2 - 0.5 * (theta[..., 0] - theta[..., 1]) ** 2

        target = FactorTarget(wide, [(0, of_groups), (-1, normal)])
        q = PrecisionCholeskyGaussian(wide.dim, structure=wide, dtype=DTYPE, scale=30.0)
        with Watch(q.dim):
            result = fit(q, target, progress=False, examine=False)
        assert result.converged, result.reason
        close(q.mean[-1], y.sum() / 2 / (1 + 1500 / 2), 1e-6)

    def test_a_start_that_is_too_wide_is_narrowed_first(self):
        model, target = counts()
        q = PrecisionCholeskyGaussian(model.dim, structure=model.structure, dtype=DTYPE, scale=3.0)
        starts = Starts(q, Guarded(target), 0, EngineSettings())
        starts.first()
        assert float(q.stddev.max()) < 1.0
        assert starts.reached == starts.sampled_loss(32)

    def test_an_interrupted_run_goes_on_bit_for_bit(self, tmp_path):
        model, target = counts()
        runs = []
        for name, stops in (("whole", (1000,)), ("cut", (7, 1000))):
            for most in stops:
                q = over(model)
                torch.manual_seed(0)
                file = tmp_path / name
                result = fit(
                    q, target, progress=False, examine=False, max_evaluations=most, checkpoint=file, checkpoint_every=1
                )
            runs.append((q, result))
        (q, result), (other, again) = runs
        assert torch.equal(q.mean, other.mean)
        assert torch.equal(q.coordinates.matrix, other.coordinates.matrix)
        assert (result.loss, result.gradients) == (again.loss, again.gradients)

    def test_draws_at_which_a_factor_fails_are_left_out(self):
        model, target = counts()
        of_groups, of_globals = (factor.target.log_joint for factor in target.factors)
        best, _ = optimum()
        high = float(best.mean[-1] + 3.2 * best.stddev[-1])

        def fails(theta):
            if bool((theta[..., 3] > high).any()):
                raise ValueError("too large a precision")
            return of_groups(theta)

        q = over(model).initialize_(best.mean, best.stddev)
        torch.manual_seed(0)
        broken = FactorTarget(model.structure, [(0, fails), (-1, of_globals)])
        result = fit(q, broken, progress=False, examine=False)
        assert result.converged, result.reason
        assert re.search(r"The log joint failed \d+ times: ValueError: too large a precision\.", result.reason)


def normal(theta):
    return -0.5 * theta.square().sum(-1)


def school(b, g, y, error):
    return -0.5 * ((y - g[0] - g[1].exp() * b[0]) / error) ** 2 - 0.5 * b[0] ** 2


def shared(g):
    return -0.5 * g.square().sum()


SCHOOLS = [28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], [15, 10, 16, 11, 9, 11, 10, 18]


class TestGrouped:
    def test_it_is_the_sum_over_groups(self):
        target, (y, error) = GroupedLogJoint(school, shared, SCHOOLS, local=1, globals=2), SCHOOLS
        theta = randn(3, 10, seed=7)
        expected = []
        for one in theta:
            groups = [school(one[i : i + 1], one[8:], y[i], error[i]) for i in range(8)]
            expected.append(sum(groups) + shared(one[8:]))
        close(target.log_joint(theta), torch.stack(expected), 1e-12)
        close(target.log_joint(theta[0]), expected[0], 1e-12)
        batched = randn(3, 2, 10, seed=8)
        assert target.log_joint(batched).shape == (3, 2)

    def test_its_posterior_and_its_parts(self):
        target = GroupedLogJoint(school, shared, SCHOOLS, local=1, globals=2)
        q = target.posterior(mean=1.0, scale=0.5)
        assert (q.structure, q.dtype) == (target.structure, DTYPE)
        groups, common = target.parts(torch.stack([q.mean, q.stddev]))
        assert groups.shape == (2, 8, 1)
        assert common.tolist() == [[1.0, 1.0], [0.5, 0.5]]
        assert torch.equal(target.parts(torch.arange(10))[0][:, 0], torch.arange(8))
        single = GroupedLogJoint(school, shared, [torch.ones(3), np.ones(3)], local=1, globals=2)
        assert single.posterior().dtype == torch.float32
        counts = GroupedLogJoint(school, shared, [[1, 2, 3]], local=1, globals=2)
        assert counts.posterior().dtype == torch.float64
        assert counts.data[0].dtype == torch.int64


@pytest.mark.parametrize("groups", [1001, 7001, 20_002])
def test_the_most_draws_that_the_memory_allows_are_pairs(groups):
    objective = object.__new__(SampledObjective)
    objective.q = PrecisionCholeskyGaussian(groups + 2, structure=arrow(groups=groups, local=1, globals=2))
    objective.factors = SimpleNamespace(structure=objective.q.structure)
    assert objective.most(16_384) % 2 == 0
    assert objective.most(16_384) >= 32
