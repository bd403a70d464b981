"""`MixedModel.fit`: quadrature against brute force and closed forms, answers against grids, and every refusal."""

import dataclasses
import math
import re
import sys
import warnings

import numpy as np
import pytest
import torch
from helpers import DTYPE, close, randn, z_bound
from helpers import MIXED_FAMILIES as FAMILIES
from helpers import MIXED_PRIORS as PRIORS
from helpers import mixed_problem as problem

import torchngvi
from torchngvi import MixedModel, fit
from torchngvi.errors import InputError
from torchngvi.mixed_models import asked, integrated, response
from torchngvi.mixed_models import fitted as mixed_models_fitted
from torchngvi.mixed_models import model as mixed_models_model
from torchngvi.mixed_models.integrated import Weighted, enough_nodes
from torchngvi.mixed_models.locals import ByQuadrature, Conditional
from torchngvi.mixed_models.predictions import inverse_link, responses
from torchngvi.mixed_models.table import Marginals, weighted_quantile
from torchngvi.models import GaussianNoise, Likelihood, MarginalMixed, MixedPrior, StudentT, Wishart, mixed_marginal
from torchngvi.models.mixed_prior import root_of, scales_of
from torchngvi.numerics.special import normal_rule

ALL = {**FAMILIES, "t": StudentT(0.8, 5.0)}


def model_of(family="poisson", r=1, n=3, **settings):
    base = "gaussian" if family == "t" else family
    (X, y, random, _), keywords = problem(base, r, n, **settings)
    return MixedModel(X, y, random, ALL[family], **keywords)


def globals_of(model, count=4, seed=5):
    size = model.dim - model.rows.n * model.rows.r
    return 0.5 * randn(count, size, seed=seed)


def grid(r, points, reach=14.0):
    """b on a grid wide enough for the integrand to vanish at its ends, with the log of a cell."""
    line = torch.linspace(-reach, reach, points, dtype=DTYPE)
    return torch.cartesian_prod(*[line] * r).reshape(-1, r), r * math.log(2 * reach / (points - 1))


def by_brute_force(model, theta, b, log_cell):
    """log p(y | g) of one g, and mean and covariance of the effects, from sums over a grid: the trapezoid rule."""
    rows = model.rows
    beta, omega = theta[: rows.p], theta[rows.p :]
    W = root_of(omega, rows.r)
    normal = torch.distributions.MultivariateNormal(torch.zeros(rows.r, dtype=DTYPE), precision_matrix=W @ W.mT)
    total, means, covariances = 0.0, [], []
    for i in range(rows.n):
        mine = rows.groups == i
        eta = (rows.X[mine] @ beta + rows.offset[mine])[:, None] + rows.Z[mine] @ b.mT
        terms = -(rows.weights[mine, None] * rows.likelihood.energy(eta, rows.y[mine, None])).sum(0) + normal.log_prob(
            b
        )
        total = total + torch.logsumexp(terms, 0) + log_cell
        share = terms.softmax(0)
        means.append(share @ b)
        covariances.append(torch.einsum("g,gi,gj->ij", share, b - means[-1], b - means[-1]))
    return total, torch.stack(means), torch.stack(covariances)


class TestQuadrature:
    @pytest.mark.parametrize("nodes", [1, 2, 7, 40])
    def test_the_rule_is_that_of_numpy(self, nodes):
        z, log_w = normal_rule(nodes, 1, torch.zeros((), dtype=DTYPE))
        x, w = np.polynomial.hermite_e.hermegauss(nodes)
        close(z[:, 0], torch.tensor(x), 1e-12)
        close(log_w, torch.tensor(np.log(w / w.sum())), 1e-10)

    def test_the_grid_is_exact_for_polynomials(self):
        z, log_w = normal_rule(4, 3, torch.zeros((), dtype=DTYPE))
        moment = (log_w.exp() * z[:, 0].pow(6) * z[:, 1].square() * z[:, 2].pow(4)).sum()
        assert float(moment) == pytest.approx(15.0 * 1.0 * 3.0, rel=1e-12)

    @pytest.mark.parametrize("family", [name for name in ALL if name != "t"])
    @pytest.mark.parametrize("r", [1, 2])
    def test_the_integral_is_that_of_brute_force(self, family, r):
        model = model_of(family, r)
        target = MarginalMixed(model, 61 if r == 1 else 31)
        theta = globals_of(model, 1)
        value = target.log_joint(theta)[0]
        b, cell = grid(r, 2001 if r == 1 else 281)
        integral, mean, covariance = by_brute_force(model, theta[0], b, cell)
        beta, omega = target.parts(theta[0])
        expected = integral - model.fixed.prior.energy(beta) - model.covariance_prior.energy(omega)
        assert float(value) == pytest.approx(float(expected), rel=1e-10)
        found = target.moments(theta)
        close(found[0][0], mean, 1e-8)
        close(found[1][0], covariance, 1e-8)

    def test_a_likelihood_that_is_not_log_concave(self):
        model = model_of("t", 1)
        target, theta = MarginalMixed(model, 61), globals_of(model, 1)
        integral = by_brute_force(model, theta[0], *grid(1, 4001))[0]
        beta, omega = target.parts(theta[0])
        expected = integral - model.fixed.prior.energy(beta) - model.covariance_prior.energy(omega)
        assert float(target.log_joint(theta)[0]) == pytest.approx(float(expected), rel=1e-6)

    @pytest.mark.parametrize("r", [1, 2, 3])
    def test_gaussian_noise_is_exact(self, r):
        """log N(y; Xβ + o, Z Ω⁻¹ Zᵀ + noise²), whatever the start, with its gradient."""
        (X, y, random, _), settings = problem("gaussian", r)
        settings = {"offset": settings["offset"], "prior": settings["prior"]}
        model = MixedModel(X, y, random, GaussianNoise(0.7), **settings)
        target = MarginalMixed(model)
        theta = globals_of(model).requires_grad_()
        value = target.log_joint(theta)
        (gradient,) = torch.autograd.grad(value.sum(), theta)
        rows = model.rows

        def closed(g):
            beta, omega = g[: rows.p], g[rows.p :]
            W = root_of(omega, r)
            Z = torch.zeros(len(rows.y), rows.n, r, dtype=DTYPE)
            Z[torch.arange(len(rows.y)), rows.groups] = rows.Z
            inside = torch.block_diag(*[torch.linalg.inv(W @ W.mT)] * rows.n)
            V = Z.flatten(1) @ inside @ Z.flatten(1).mT + 0.49 * torch.eye(len(rows.y), dtype=DTYPE)
            of = torch.distributions.MultivariateNormal(rows.X @ beta + rows.offset, V)
            return of.log_prob(rows.y) - model.fixed.prior.energy(beta) - model.covariance_prior.energy(omega)

        leaf = theta.detach().clone().requires_grad_()
        expected = torch.stack([closed(g) for g in leaf])
        close(value, expected, 1e-12)
        close(gradient, torch.autograd.grad(expected.sum(), leaf)[0], 1e-10)

    @pytest.mark.parametrize("family", ["logit", "poisson"])
    @pytest.mark.parametrize("r", [1, 2])
    def test_the_gradient_is_that_of_differences(self, family, r):
        model = model_of(family, r)
        target = MarginalMixed(model, 31 if r == 1 else 21)
        theta = globals_of(model, 2).requires_grad_()
        (gradient,) = torch.autograd.grad(target.log_joint(theta).sum(), theta)
        step = 1e-4 * torch.eye(target.dim, dtype=DTYPE)
        base = theta.detach()[:, None]
        differences = (target.log_joint(base + step) - target.log_joint(base - step)) / 2e-4
        close(gradient, differences, 1e-6)

    def test_in_chunks_nothing_changes(self, monkeypatch):
        model = model_of("logit", 2)
        target, theta = MarginalMixed(model, 5), globals_of(model, 6).requires_grad_()
        whole = target.log_joint(theta.reshape(2, 3, -1))
        (gradient,) = torch.autograd.grad(whole.sum(), theta)
        monkeypatch.setattr(mixed_marginal, "_AT_ONCE", 1)
        parts = target.log_joint(theta)
        close(parts, whole.flatten(), 1e-12)
        close(torch.autograd.grad(parts.sum(), theta)[0], gradient, 1e-12)
        assert whole.shape == (2, 3)

    def test_a_start_changes_nothing_but_the_way(self):
        model = model_of("logit", 1)
        near, theta = Conditional(model.posterior()), globals_of(model)
        start, plain = (MarginalMixed(model, 41, begin).log_joint(theta) for begin in (near.start, None))
        close(start, plain, 1e-9)

    def test_a_row_of_weight_0_is_not_there(self):
        (X, y, (Z, groups), family), _ = problem("poisson", 1)
        weights, offset = torch.ones(len(y), dtype=DTYPE), torch.zeros(len(y), dtype=DTYPE)
        weights[-1], offset[-1] = 0.0, 1e6
        prior = MixedPrior(2.0, PRIORS[1])
        model = MixedModel(X, y, (Z, groups), family, prior=prior, weights=weights, offset=offset)
        other = MixedModel(X[:-1], y[:-1], (Z[:-1], groups[:-1]), family, prior=prior)
        theta = globals_of(model).requires_grad_()
        value = MarginalMixed(model).log_joint(theta)
        close(value, MarginalMixed(other).log_joint(theta), 1e-10)
        assert bool(torch.autograd.grad(value.sum(), theta)[0].isfinite().all())


class TestConditional:
    @pytest.mark.parametrize("r", [1, 2])
    def test_it_is_that_of_the_dense_gaussian(self, r):
        model = model_of("poisson", r)
        q = model.posterior()
        near, local = Conditional(q), model.rows.n * r
        V = q.covariance
        theta = globals_of(model)
        solved = torch.linalg.solve(V[local:, local:], V[local:, :local]).mT
        mean = q.mean[:local] + (theta - q.mean[local:]) @ solved.mT
        close(near.start(theta).transpose(0, 1).flatten(1), mean, 1e-9)
        inside = V[:local, :local] - solved @ V[local:, :local]
        b = near.draw(theta, torch.Generator().manual_seed(0))
        expected = [
            torch.distributions.MultivariateNormal(m, 0.5 * (inside + inside.mT)).log_prob(x.flatten())
            for m, x in zip(mean, b, strict=True)
        ]
        close(near.log_prob(b, theta), torch.stack(expected), 1e-8)
        close(near.marginal().covariance, V[local:, local:], 1e-10)

    def test_draws_have_the_moments_of_the_quadrature(self):
        model = model_of("logit", 2)
        target = MarginalMixed(model, 9)
        theta = globals_of(model, 1)
        b = ByQuadrature(target).draw(theta.expand(4000, -1), torch.Generator().manual_seed(0))
        mean, covariance = (x[0] for x in target.moments(theta))
        sd = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
        assert bool(((b.mean(0) - mean).abs() < z_bound(6) * sd / math.sqrt(4000)).all())
        seen = torch.einsum("sni,snj->nij", b - mean, b - mean) / 4000
        assert bool(((seen - covariance).abs() < 0.12 * sd[:, :, None] * sd[:, None, :]).all())


class TestResponse:
    def test_it_is_the_derivative_of_the_mean(self):
        """All refits in one batch against one alone, and the symmetry that only the whole response has."""
        model = model_of("logit", 1, n=8)
        q = model.posterior()
        fit(q, model, tolerance=1e-8, progress=False)
        covariance, converged = response.response_covariance(model, q, model.rows.n * model.rows.r)
        assert converged
        close(covariance, covariance.mT, 0.0)
        local, k = model.rows.n, model.dim - 1
        t = 0.1 / q.variance[k].sqrt()
        means = []
        for sign in (1, -1):
            one = model.posterior()
            tilt = torch.zeros(model.dim, dtype=DTYPE)
            tilt[k] = sign * t
            fit(one, response.Tilted(model, tilt), tolerance=1e-8, progress=False)
            means.append(one.mean[local:].clone())
        close(covariance[-1], (means[0] - means[1]) / (2 * t), 1e-3)
        assert bool((covariance.diagonal() > q.variance[local:]).all())

    def test_of_gaussian_noise_it_is_exact_for_fixed_effects(self):
        """Given ω all is Gaussian: tilting β moves its mean by its covariance, and by next to nothing else."""
        model = model_of("gaussian", 1, n=30)
        result = model.fit(marginalise="response", progress=False)
        integrated_ = model.fit(progress=False)
        ratio = result.summary().fixed.sd / integrated_.summary().fixed.sd
        close(ratio, torch.ones_like(ratio), 0.08)

    def test_the_tilt_is_in_the_log_joint(self):
        model = model_of("poisson", 1)
        tilt, theta = randn(model.dim, seed=1), 0.3 * randn(2, model.dim, seed=2)
        target = response.Tilted(model, tilt)
        close(target.log_joint(theta), model.log_joint(theta) + theta @ tilt, 1e-12)
        q = model.posterior()
        value, packet = target.expected_energy(q.frame())
        probed = target.expected_energy(q.probed())[0]
        gradient = torch.autograd.grad(probed, q.mean_probe)[0]
        close(value, model.expected_energy(q.frame())[0] - tilt @ q.mean, 1e-12)
        close(packet.a, gradient, 1e-10)


class TestTables:
    def test_quantiles_of_equal_weights(self):
        draws = randn(1001, 2, seed=1)
        weights = torch.full((1001,), 1 / 1001, dtype=DTYPE)
        for share in (0.025, 0.5, 0.9):
            close(weighted_quantile(draws, weights, share), torch.quantile(draws, share, dim=0), 2e-2)
        of = Marginals.of(["a", "b"], draws, weights, 0.9)
        close(of.mean, draws.mean(0), 1e-12)
        close(of.sd, draws.std(0, correction=0), 1e-12)

    def test_a_weight_of_two_is_a_draw_that_is_there_twice(self):
        draws = torch.tensor([[1.0], [2.0], [4.0], [8.0]], dtype=DTYPE)
        weights = torch.tensor([0.2, 0.4, 0.2, 0.2], dtype=DTYPE)
        assert 1.5 < float(weighted_quantile(draws, weights, 0.4)) < 2.5

    def test_resampling_keeps_the_weights(self):
        theta = torch.arange(4.0, dtype=DTYPE)[:, None]
        weights = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=DTYPE)
        drawn = Weighted(theta, weights, 0.0, 1.0).resampled(1000, torch.Generator().manual_seed(0))
        counts = torch.bincount(drawn[:, 0].long(), minlength=4)
        assert bool(((counts - 1000 * weights).abs() <= 1.0).all())

    def test_equal_weights_give_different_draws_which_follow_the_generator(self):
        theta = torch.arange(8.0, dtype=DTYPE)[:, None]
        weighted = Weighted(theta, torch.full((8,), 0.125, dtype=DTYPE), 0.0, 1.0)
        drawn = [weighted.resampled(4, torch.Generator().manual_seed(seed))[:, 0].tolist() for seed in range(20)]
        assert all(len(set(one)) == 4 for one in drawn)
        assert len({tuple(sorted(one)) for one in drawn}) == 2  # a systematic sample of every second


@pytest.fixture(scope="module")
def fitted():
    model = model_of("poisson", 2, n=12)
    return model, model.fit(progress=False).named(["one", "time"], ["one", "time"])


class TestFit:
    def test_draws_are_those_of_the_table(self, fitted):
        """β and ω in the order of the posterior, from the weighted draws that the summary is of."""
        _, result = fitted
        theta = result.sample(20_000, torch.Generator().manual_seed(0))
        assert theta.shape == (20_000, result.posterior.dim)
        table = result.summary()
        close(theta[:, :2].mean(0), table.fixed.mean, 0.02)
        close(theta[:, :2].std(0), table.fixed.sd, 0.02)
        assert torch.equal(
            result.sample(9, torch.Generator().manual_seed(1)), result.sample(9, torch.Generator().manual_seed(1))
        )
        with pytest.raises(InputError, match=r"^n is a number of draws and must be a whole number"):
            result.sample(0)

    def test_against_a_grid_over_the_globals(self):
        """An intercept and a variance: the posterior of both by sums over a grid, with quadrature of many nodes."""
        groups = torch.arange(48) // 6
        one = torch.ones(48, 1, dtype=DTYPE)
        b = randn(8, seed=1)[groups]
        y = (torch.rand(48, generator=torch.Generator().manual_seed(2), dtype=DTYPE) < (0.5 + b).sigmoid()).to(DTYPE)
        model = MixedModel(one, y, (one, groups), prior=MixedPrior(2.0, Wishart(3.0, [[0.5]])))
        result = model.fit(progress=False)
        assert result.converged, result.reason
        assert result.k_hat < 0.7
        line, omega = torch.linspace(-2, 3, 61, dtype=DTYPE), torch.linspace(-2, 3, 41, dtype=DTYPE)
        theta = torch.cartesian_prod(line, omega)
        log_joint = MarginalMixed(model, 25).log_joint(theta)
        share = log_joint.softmax(0)
        sd_of = scales_of(theta[:, 1:], 1)[0]
        exact = Marginals.of(["beta", "sd"], torch.cat([theta[:, :1], sd_of], -1), share, 0.95)
        table = result.summary()
        for k, of in enumerate((table.fixed, table.sd)):
            assert abs(float(of.mean[0] - exact.mean[k])) < 0.1 * float(exact.sd[k])
            assert abs(float(of.sd[0] / exact.sd[k]) - 1) < 0.08
            for ours, theirs in ((of.low, exact.low), (of.high, exact.high)):
                assert abs(float(ours[0] - theirs[k])) < 0.25 * float(exact.sd[k])
        evidence = torch.logsumexp(log_joint, 0) + math.log(float(line[1] - line[0]) * float(omega[1] - omega[0]))
        assert result.log_evidence == pytest.approx(float(evidence), abs=0.05)
        assert result.elbo < result.log_evidence

    def test_the_same_seed_gives_the_same_answer(self, fitted):
        model, result = fitted
        state = torch.get_rng_state()
        again = model.fit(progress=False)
        assert torch.equal(torch.get_rng_state(), state)
        close(again.weighted.theta, result.weighted.theta, 0.0)
        close(again.summary().fixed.mean, result.summary().fixed.mean, 0.0)

    def test_a_gaussian_over_everything_is_the_plain_fit(self):
        model = model_of("logit", 1, n=12)
        result = model.fit(marginalise="none", progress=False)
        q = model.posterior()
        plain = fit(q, model, progress=False)
        assert result.elbo == pytest.approx(-plain.loss, abs=1e-9)
        close(result.posterior.mean, q.mean[12:], 1e-8)
        close(result.posterior.variance, q.variance[12:], 1e-8)
        assert result.log_evidence is None
        whole = model.fit(progress=False)
        assert whole.elbo > result.elbo
        assert float(whole.summary().sd.sd) > float(result.summary().sd.sd)

    def test_three_effects_have_linear_response(self):
        model = model_of("poisson", 3, n=10)
        result = model.fit(progress=False, draws=400)
        assert "covariances by linear response" in result.method
        assert result.summary().correlation.names == ("0, 1", "0, 2", "1, 2")

    def test_many_rows_have_linear_response(self, monkeypatch):
        model = model_of("poisson", 1)
        assert model._default() == "quadrature"
        monkeypatch.setitem(mixed_models_model._ROWS, 1, 5)
        assert model._default() == "response"

    def test_nodes_that_are_enough(self, monkeypatch):
        model = model_of("logit", 1, n=12)
        q = model.posterior()
        fit(q, model, progress=False)
        monkeypatch.setitem(integrated._NODES, 1, (2, 9, 15, 25))
        assert enough_nodes(model, Conditional(q)) in (9, 15)
        gaussian = model_of("gaussian", 1)
        assert enough_nodes(gaussian, Conditional(gaussian.posterior())) == 3

    def test_heavy_tails_are_drawn_from_again(self):
        """Four groups: the weights of draws from q alone have a k-hat of 0.9."""
        groups, one = torch.arange(20) // 5, torch.ones(20, 1, dtype=DTYPE)
        y = torch.tensor([1.0, 0, 2, 1, 0, 5, 7, 4, 6, 5, 2, 3, 1, 2, 2, 0, 0, 1, 0, 0])
        prior = MixedPrior(10.0, "kass-natarajan")
        result = MixedModel(one, y, (one, groups), "poisson_log", prior=prior).fit(progress=False)
        assert isinstance(result.locals, ByQuadrature)
        first, elbo, _ = integrated.weighted(result.posterior, result.locals.target, 4096, 0)
        assert first.k_hat > 0.7
        assert result.k_hat < 0.5
        assert result.elbo == pytest.approx(elbo, abs=0.1)  # of an eighth of the draws
        sd = result.posterior.stddev
        assert float(result.summary().fixed.sd) > 1.2 * float(sd[0])

    def test_single_precision(self):
        (X, y, (Z, groups), family), _ = problem("poisson", 1, n=12)
        model = MixedModel(X.float(), y.float(), (Z.float(), groups), family)
        result = model.fit(progress=False)
        assert result.summary().fixed.mean.dtype == torch.float32
        assert result.predict(X[:2], Z[:2], [0, 3]).mean.isfinite().all()


class TestAnswers:
    def test_the_table(self, fitted):
        text = str(fitted[1]).splitlines()
        assert text[0] == f"mixed model, PoissonLog: {len(fitted[0].rows.y)} rows, 12 groups"
        assert text[1].split() == ["mean", "sd", "2.5", "%", "97.5", "%"]
        assert [line.split()[0] for line in text[2:]][:11] == [
            *("fixed", "one", "time"),
            *("rate", "one", "time"),
            *("standard", "one", "time"),
            *("correlations", "one,"),
        ]
        assert "adaptive Gauss-Hermite quadrature with " in text[-2]
        assert re.fullmatch(r"global parameters, .*: k-hat -?\d\.\d\d, \d+ of 4096 draws", text[-1])

    def test_intervals_are_of_their_probability(self, fitted):
        result = fitted[1]
        half, most = result.summary(0.5), result.summary(0.95)
        for few, many in zip(half.sd[3:], most.sd[3:], strict=True):
            assert few.shape == many.shape
        assert bool((most.sd.low < half.sd.low).all() & (half.sd.high < most.sd.high).all())

    def test_what_is_not_to_be_trusted_is_said(self, fitted):
        result = fitted[1]
        bad = dataclasses.replace(
            result,
            weighted=result.weighted._replace(k_hat=0.9),
            fit=dataclasses.replace(result.fit, converged=False, reason="of a storm."),
        )
        lines = str(bad).splitlines()
        assert lines[-2] == "NOT CONVERGED: of a storm."
        assert lines[-1] == "k-hat 0.90 is above 0.7: take means and intervals for rough."

    @pytest.mark.parametrize(
        ("telling", "words"), [(10**6, "take means and intervals"), (3, "globals checked: weights")]
    )
    def test_weights_over_many_coordinates(self, fitted, monkeypatch, telling, words):
        """Their k-hat is that of all random effects together, and says nothing of the globals."""
        monkeypatch.setattr(asked, "TELLING", telling)
        monkeypatch.setattr(mixed_models_fitted, "TELLING", telling)
        result = fitted[0].fit(progress=False, marginalise="none", draws=100)
        bad = dataclasses.replace(result, weighted=result.weighted._replace(k_hat=0.9))
        assert words in str(bad)
        assert ("k-hat" in str(bad)) == (telling > 3)
        assert "k-hat" in str(dataclasses.replace(bad, log_evidence=0.0))  # weighted draws of the globals alone

    def test_predictions(self, fitted):
        model, result = fitted
        draws = result.draws()
        X = torch.tensor([[1.0, 0.5], [1.0, -0.5], [1.0, 0.5]], dtype=DTYPE)
        Z = torch.tensor([[1.0, 0.2], [1.0, 2.0], [1.0, 0.2]], dtype=DTYPE)
        known = result.predict(X, Z, [4, 7, 4], kind="linear", offset=[0.0, 1.0, 0.0])
        eta = draws.fixed @ X.mT + (draws.effects[:, [4, 7, 4]] * Z).sum(-1) + torch.tensor([0.0, 1.0, 0.0])
        close(known.draws, eta, 1e-12)
        close(known.draws[:, 0], known.draws[:, 2], 0.0)
        close(result.predict(X, Z, [4, 7, 4], kind="mean").draws, (eta - torch.tensor([0.0, 1.0, 0.0])).exp(), 1e-10)
        mixed = result.predict(X, Z, [-1, 7, -2], kind="linear")
        close(mixed.draws[:, 1] + 1, known.draws[:, 1], 1e-12)
        assert bool((mixed.sd[[0, 2]] > known.sd[[0, 2]]).all())
        assert not torch.equal(mixed.draws[:, 0], mixed.draws[:, 2])
        together = result.predict(X, Z, kind="linear").draws
        close(together[:, 0], together[:, 2], 0.0)
        W = root_of(draws.omega, 2)
        inside = torch.linalg.inv(W @ W.mT).mean(0)
        z = Z[0]
        assert float(together[:, 0].var() - (draws.fixed @ X[0]).var()) == pytest.approx(
            float(z @ inside @ z), rel=0.25
        )
        counts = result.predict(X, Z, [4, 7, 4], kind="response")
        assert bool((counts.draws == counts.draws.round()).all())
        assert bool((counts.low < counts.mean).all() & (counts.mean < counts.high).all())

    def test_effects_and_draws(self, fitted):
        model, result = fitted
        one, time = result.effects()
        assert one.mean.shape == (12,)
        assert bool((one.low < one.mean).all() & (one.mean < one.high).all())
        local = result.joint.mean[:24].reshape(12, 2)
        assert bool(((torch.stack([one.mean, time.mean], -1) - local).abs() < 0.5).all())
        assert result.draws() is result.draws()
        assert result.draws(50).effects.shape == (50, 12, 2)

    def test_arviz(self, fitted):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            pytest.importorskip("arviz")
            data = fitted[1].to_arviz()
        assert dict(data.posterior["b"].sizes) == {"chain": 1, "draw": 1000, "group": 12, "random": 2}
        close(torch.tensor(data.posterior["beta"].sel(fixed="time").values[0]), fitted[1].draws().fixed[:, 1], 0.0)
        assert data.observed_data["y"].shape == (len(fitted[0].rows.y),)

    def test_a_caterpillar(self, fitted):
        pytest.importorskip("matplotlib")
        axes = fitted[1].plot_effects(1)
        assert axes.get_xlabel() == "time"
        heights = axes.lines[0].get_xdata()
        assert list(heights) == sorted(heights)
        assert len(heights) == 12

    @pytest.mark.parametrize("name", ALL)
    def test_responses_have_the_mean_of_the_link(self, name):
        likelihood = torchngvi.models.BernoulliLogit() if name == "logit" else ALL[name]
        if isinstance(likelihood, str):
            likelihood = model_of(name).rows.likelihood
        eta = torch.tensor([-0.5, 0.4], dtype=DTYPE).expand(40_000, 2)
        y = responses(likelihood, eta, torch.Generator().manual_seed(0))
        error = (y.mean(0) - inverse_link(likelihood, eta[0])) / (y.std(0) / math.sqrt(len(y)))
        assert bool((error.abs() < z_bound(12)).all())
        energy = likelihood.energy(eta[0], 2 * y[0] - 1 if likelihood.discrete else y[0])
        assert bool(energy.isfinite().all())

    @pytest.mark.parametrize("likelihood", [torchngvi.models.PoissonLog(), torchngvi.models.NegativeBinomial(3.0)])
    def test_counts_of_means_beyond_integers(self, likelihood):
        """Far from the data means overflow integers of 64 bits; the counts are as large, and not negative."""
        eta = torch.tensor([0.0, 40.0, 60.0, 200.0], dtype=DTYPE).expand(2000, 4)
        y = responses(likelihood, eta, torch.Generator().manual_seed(0))
        torch.testing.assert_close(y.mean(0)[1:], eta[0, 1:].exp(), rtol=0.1, atol=0.0)
        assert bool((y >= 0).all())


class Unknown(Likelihood):
    discrete = False

    def energy(self, eta, y):
        return (eta - y).square()

    expected = checked = None


X3, Y3 = torch.ones(3, 1, dtype=DTYPE), torch.tensor([1.0, 0.0, 2.0], dtype=DTYPE)
OF_A_FIT = {
    "another word": (
        lambda m: m.fit(marginalise="laplace"),
        "marginalise must be quadrature, response or none; got 'laplace'.",
    ),
    "nodes of nothing": (
        lambda m: m.fit(marginalise="none", nodes=5),
        "nodes are those of marginalise='quadrature'; got marginalise='none'.",
    ),
    "few draws": (
        lambda m: m.fit(draws=99),
        "draws counts draws, which are to say something about a tail, and must be a whole number, at least 100; got "
        "99.",
    ),
    "one node": (
        lambda m: MarginalMixed(m, 1),
        "nodes is the number of quadrature nodes in each dimension and must be a whole number, at least 2; got 1.",
    ),
}
OF_A_RESULT = {
    "names": (lambda r: r.named(fixed=["one"]), "fixed must be 2 names, one for each; got 1."),
    "names of groups": (lambda r: r.named(groups=["ann"]), "groups must be 12 names, one for each; got 1."),
    "an interval": (
        lambda r: r.summary(95),
        "interval is the probability of an interval and must be above 0, below 1, finite; got 95.",
    ),
    "a kind": (
        lambda r: r.predict([[1.0, 0.0]], [[1.0, 0.0]], kind="median"),
        "kind must be one of mean, linear, response; got 'median'. Did you mean 'mean'?",
    ),
    "width": (
        lambda r: r.predict([[1.0]], [[1.0, 0.0]]),
        "new rows need X of shape (M, 2) and Z of shape (M, 2); got (1, 1) and (1, 2).",
    ),
    "a group that is not there": (
        lambda r: r.predict([[1.0, 0.0]], [[1.0, 0.0]], [12]),
        "groups of new rows must be those of the data, 0 to 11, or negative for groups that the data do not have; "
        "got 12.",
    ),
    "offsets": (
        lambda r: r.predict([[1.0, 0.0]], [[1.0, 0.0]], offset=[0.0, 1.0]),
        "offset must have one entry for each of the 1 new rows; got shape (2,).",
    ),
    "an effect": (
        lambda r: r.plot_effects(2),
        "effect is the number of a random effect, 0 to 1, or one of the names one, time; got 2.",
    ),
}


class TestRefusals:
    @pytest.mark.parametrize("name", OF_A_FIT)
    def test_of_a_fit(self, name):
        call, text = OF_A_FIT[name]
        with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
            call(MixedModel(X3, Y3, (X3, [0, 1, 1]), "poisson_log"))

    @pytest.mark.parametrize("name", OF_A_RESULT)
    def test_of_a_result(self, fitted, name):
        call, text = OF_A_RESULT[name]
        with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
            call(fitted[1])

    def test_a_family_without_draws(self):
        text = "the mean and draws of y are known for the families of this library; got Unknown. Use kind='linear'."
        with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
            inverse_link(Unknown(), torch.zeros(1))

    @pytest.mark.parametrize(("call", "module"), [("to_arviz", "arviz"), ("plot_effects", "matplotlib.figure")])
    def test_without_a_library(self, fitted, monkeypatch, call, module):
        name = module.partition(".")[0]
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ImportError, match=f"^{call} needs the library {name}: pip install {name}.$"):
            getattr(fitted[1], call)()


@pytest.mark.parametrize("given", ["0.9", True, None, [0.9]])
def test_an_interval_that_is_no_number(fitted, given):
    sentence = f"interval is the probability of an interval and must be a number; got {given!r}."
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        fitted[1].summary(given)
    assert fitted[1].summary(np.float32(0.5)).interval == 0.5


def test_a_factor_that_there_is_not(fitted):
    with pytest.raises(InputError, match=r"^the grouping factors are group; got 'patient'\.$"):
        fitted[1].random["patient"]
    assert "patient" not in fitted[1].random


def test_no_rows_to_predict(fitted):
    with pytest.raises(InputError, match=r"^a prediction is of at least one row; the table, or X, has none\.$"):
        fitted[1].predict(torch.zeros(0, 2), torch.zeros(0, 2))
