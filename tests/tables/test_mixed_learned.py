"""Mixed models whose likelihood has a learned parameter, in closed form where noise is Gaussian; priors of sds."""

import math
import pickle
import re
import warnings

import pytest
import scipy.integrate
import scipy.stats
import torch
from helpers import DTYPE, close, randn
from helpers import MIXED_PRIORS as PRIORS
from helpers import mixed_problem as problem
from test_mixed_fit import by_brute_force, grid

from torchngvi import MixedModel
from torchngvi.errors import InputError
from torchngvi.mixed_models.table import Marginals
from torchngvi.models import (
    Exponential,
    GaussianMixed,
    GaussianNoise,
    HalfNormal,
    HalfT,
    MarginalMixed,
    MixedLogJoint,
    MixedPrior,
    NegativeBinomial,
    StudentT,
    Wishart,
    mixed_gaussian,
)
from torchngvi.models.learned import LEARNED, LearnedNoise, LearnedScale, LearnedSize, within
from torchngvi.models.mixed_prior import root_of, scales_of
from torchngvi.models.scale_priors import ScalesPrior

LINES = {"gaussian": GaussianNoise(0.7), "student_t": StudentT(0.7, 4.0), "negative_binomial": NegativeBinomial(3.0)}
VALUE = {"gaussian": 0.7, "student_t": 0.7, "negative_binomial": 3.0}


def arguments(family, r=1, n=3, **settings):
    base = "gaussian" if family == "student_t" else family.replace("_", " ")
    (X, y, random, _), keywords = problem(base, r, n, **settings)
    return (X, y, random), keywords


def globals_of(target, count=4, seed=5):
    return 0.4 * randn(count, target.dim, seed=seed)


def by_differences(target, theta, step=1e-5):
    moves = step * torch.eye(target.dim, dtype=DTYPE)
    return (target.log_joint(theta[:, None] + moves) - target.log_joint(theta[:, None] - moves)) / (2 * step)


def gradient_of(target, theta):
    theta = theta.clone().requires_grad_()
    return torch.autograd.grad(target.log_joint(theta).sum(), theta)[0]


class TestClosedForm:
    @pytest.mark.parametrize("r", [1, 2, 3, 5])
    @pytest.mark.parametrize("learned", [True, False])
    def test_is_the_density_of_a_multivariate_normal(self, r, learned):
        """log N(y; Xβ + o, Z Ω⁻¹ Zᵀ + σ²I) with scipy, group by group, and the priors beside it."""
        (X, y, (Z, groups)), settings = arguments("gaussian", min(r, 3), n=5)
        Z = torch.cat([Z, randn(len(Z), r - Z.shape[1], seed=9)], -1)
        prior = MixedPrior(2.0, Wishart(r + 1.0, torch.eye(r).tolist()))
        model = MixedLogJoint(X, y, (Z, groups), GaussianNoise(0.7), prior=prior, offset=settings["offset"])
        target = GaussianMixed(model, LearnedNoise() if learned else None)
        for theta in globals_of(target):
            beta, omega = target.parts(theta)
            W = root_of(omega, r)
            inside = torch.linalg.inv(W @ W.mT)
            sd = float(theta[-1].exp()) if learned else 0.7
            expected = -float(model.fixed.prior.energy(beta) + model.covariance_prior.energy(omega))
            if learned:
                half_t = math.log(2) + scipy.stats.t.logpdf(
                    sd, 3, scale=2.5 * float((y - settings["offset"]).std(correction=0))
                )
                expected += half_t + math.log(sd)
            for i in range(5):
                mine = groups == i
                V = Z[mine] @ inside @ Z[mine].mT + sd**2 * torch.eye(int(mine.sum()), dtype=DTYPE)
                mean = X[mine] @ beta + settings["offset"][mine]
                expected += scipy.stats.multivariate_normal(mean.numpy(), V.numpy()).logpdf(y[mine].numpy())
            assert float(target.log_joint(theta)) == pytest.approx(expected, rel=1e-11, abs=1e-10)

    @pytest.mark.parametrize("r", [1, 2, 3])
    def test_gradient_and_moments(self, r):
        """With weights, against quadrature, which is exact for Gaussian noise, and differences."""
        given, settings = arguments("gaussian", r, n=5)
        model = MixedLogJoint(*given, GaussianNoise(0.7), **settings)
        closed, quadrature = GaussianMixed(model, LearnedNoise()), MarginalMixed(model, learned=LearnedNoise())
        theta = globals_of(closed)
        close(closed.log_joint(theta), quadrature.log_joint(theta), 1e-11)
        close(gradient_of(closed, theta), by_differences(closed, theta), 1e-6)
        for ours, theirs in zip(closed.moments(theta), quadrature.moments(theta), strict=True):
            close(ours, theirs, 1e-10)

    @pytest.mark.parametrize("r", [1, 2])
    def test_groups_of_one_pattern_share_what_is_shared(self, r, monkeypatch):
        groups, time = torch.arange(100).repeat_interleave(4), torch.linspace(-1, 1, 4, dtype=DTYPE).repeat(100)
        X = torch.stack([torch.ones_like(time), time], -1)
        X = torch.cat([X, randn(400, 1, seed=1)], -1)
        Z = X[:, :r]
        weights = torch.where(groups < 50, 1.0, 2.0).to(DTYPE)
        model = MixedLogJoint(X, randn(400, seed=2), (Z, groups), GaussianNoise(0.7), weights=weights)
        shared = GaussianMixed(model, LearnedNoise())
        assert shared.patterns.C.shape == (r, 4, 2, 4 * r)
        assert shared.patterns.groups.tolist() == [50.0, 50.0]
        theta = globals_of(shared)
        value, gradient = shared.log_joint(theta), gradient_of(shared, theta)
        monkeypatch.setattr(mixed_gaussian, "_FEWER", 1000)
        single = GaussianMixed(model, LearnedNoise())
        assert single.patterns.C.shape[-2:] == (100, 1)
        close(value, single.log_joint(theta), 1e-11)
        close(gradient, gradient_of(single, theta), 1e-10)

    def test_in_chunks_nothing_changes(self, monkeypatch):
        given, settings = arguments("gaussian", 2, n=5)
        target = GaussianMixed(MixedLogJoint(*given, GaussianNoise(0.7), **settings))
        theta = globals_of(target, 7)
        whole = target.log_joint(theta)
        monkeypatch.setattr(mixed_gaussian, "_AT_ONCE", 1)
        close(target.log_joint(theta), whole, 1e-12)


class TestLearned:
    @pytest.mark.parametrize("family", LEARNED)
    @pytest.mark.parametrize("r", [1, 2])
    def test_at_a_value_it_is_the_fixed_likelihood(self, family, r):
        given, settings = arguments(family, r)
        model = MixedLogJoint(*given, LINES[family], **settings)
        learned = LEARNED[family]()
        fixed, target = MarginalMixed(model, 9), MarginalMixed(model, 9, learned=learned)
        theta = globals_of(fixed)
        phi = torch.full((4, 1), math.log(VALUE[family]), dtype=DTYPE)
        expected = fixed.log_joint(theta) - learned.prior_energy(phi[:, 0], target.parameter_prior)
        close(target.log_joint(torch.cat([theta, phi], -1)), expected, 1e-11)

    @pytest.mark.parametrize(("family", "nodes"), [("negative_binomial", 41), ("student_t", 101)])
    def test_against_brute_force(self, family, nodes):
        """Sums over a grid of b, at another value of the parameter than that which the model holds."""
        given, settings = arguments(family)
        model, learned = MixedLogJoint(*given, LINES[family], **settings), LEARNED[family]()
        target = MarginalMixed(model, nodes, learned=learned)
        theta = globals_of(target, 1)
        phi = theta[0, -1]
        other = MixedLogJoint(*given, learned.at(float(phi.exp())), **settings)
        beta, omega = target.parts(theta[0])
        integral = by_brute_force(other, theta[0, :-1], *grid(1, 4001))[0]
        expected = integral - model.fixed.prior.energy(beta) - model.covariance_prior.energy(omega)
        expected = expected - learned.prior_energy(phi, target.parameter_prior)
        assert float(target.log_joint(theta)[0]) == pytest.approx(float(expected), rel=1e-6)

    @pytest.mark.parametrize("family", ["negative_binomial", "student_t"])
    def test_the_gradient_is_that_of_differences(self, family):
        given, settings = arguments(family)
        target = MarginalMixed(MixedLogJoint(*given, LINES[family], **settings), 61, learned=LEARNED[family]())
        theta = globals_of(target, 2)
        close(gradient_of(target, theta), by_differences(target, theta, 1e-4), 1e-3 if family == "student_t" else 1e-6)

    @pytest.mark.parametrize("learned", [LearnedNoise, LearnedScale, LearnedSize])
    @pytest.mark.parametrize("prior", [HalfT(3.0, 0.7), HalfNormal(1.3), Exponential(2.0)])
    def test_the_prior_of_the_logarithm_is_normalised(self, learned, prior):
        one = learned(prior)

        def density(phi):
            return math.exp(-float(one.prior_energy(torch.tensor(phi, dtype=DTYPE), one.prior)))

        assert scipy.integrate.quad(density, -60, 60, limit=400, points=[0.0])[0] == pytest.approx(1.0, abs=1e-6)

    def test_the_spread_within_groups(self):
        """Ten rows of each group: the least-squares residuals of a regression with an effect of each group."""
        groups, X = torch.arange(20).repeat_interleave(10), torch.ones(200, 1, dtype=DTYPE)
        y = 3 * randn(20, seed=1)[groups] + 0.5 * randn(200, seed=2)
        model = MixedLogJoint(X, y, (X, groups), "gaussian")
        apart = y - torch.zeros(20, dtype=DTYPE).index_add(0, groups, y / 10)[groups]
        assert within(model.rows) == pytest.approx(math.sqrt(float(apart.square().sum()) / 179), rel=1e-6)
        few = MixedLogJoint(X[:20], y[::10], (X[:20], groups[::10]), "gaussian")
        assert within(few.rows) == pytest.approx(float((0.5 * y[::10].var(correction=0)).sqrt()), rel=1e-9)

    def test_the_default_prior_of_noise_has_the_sd_of_y(self):
        """Half-t with the scale 2.5 s_y, a row of weight 2 being two rows."""
        X, y, weights = torch.ones(5, 1, dtype=DTYPE), [1.0, 2, 3, 4, 100], [2.0, 1, 1, 1, 0]
        rows = MixedLogJoint(X, y, (X, [0, 0, 1, 1, 1]), "gaussian", weights=weights).rows
        assert LearnedNoise().settled(rows).scale == pytest.approx(
            2.5 * torch.tensor([1.0, 1, 2, 3, 4]).std(correction=0)
        )


class TestPriors:
    @pytest.mark.parametrize(
        ("prior", "theirs"),
        [
            (HalfNormal(1.3), scipy.stats.halfnorm(scale=1.3)),
            (HalfT(3.0, 0.7), None),
            (Exponential(2.0), scipy.stats.expon(scale=0.5)),
        ],
    )
    def test_of_one_effect(self, prior, theirs):
        ours = ScalesPrior(prior, 1.0, 1)

        def density(omega):
            return math.exp(-float(ours.energy(torch.tensor([omega], dtype=DTYPE))))

        assert scipy.integrate.quad(density, -40, 40, limit=400, points=[0.0])[0] == pytest.approx(1.0, abs=1e-6)
        for sd in (0.1, 0.9, 4.0):
            half_t = math.log(2) + scipy.stats.t.logpdf(sd, 3, scale=0.7)
            expected = half_t if theirs is None else theirs.logpdf(sd)
            assert float(prior.log_prob(torch.tensor(sd, dtype=DTYPE))) == pytest.approx(expected, abs=1e-12)

    @pytest.mark.parametrize("concentration", [1.0, 2.5])
    def test_of_two_is_normalised(self, concentration):
        """The trapezoid rule in (log τ₁, u, log τ₂) with ρ = -tanh u: ω₁₁ = log cosh u - log τ₁, ω₂₁ = sinh u/τ₂."""
        prior = ScalesPrior([HalfNormal(1.3), Exponential(0.7)], concentration, 2)
        s, u = torch.linspace(-20, 6, 105, dtype=DTYPE), torch.linspace(-12, 12, 97, dtype=DTYPE)
        s1, t, s2 = torch.meshgrid(s, u, s, indexing="ij")
        omega = torch.stack([t.cosh().log() - s1, t.sinh() * torch.exp(-s2), -s2], -1)
        log_density = -prior.energy(omega) + t.cosh().log() - s2  # |∂ω/∂(s₁, u, s₂)|
        cell = (s[1] - s[0]).square() * (u[1] - u[0])
        assert float(log_density.exp().sum() * cell) == pytest.approx(1.0, abs=1e-6)

    def test_of_three_is_that_of_the_distributions(self):
        """p(τ) p(L) |∂(τ, L)/∂ω|, with the Cholesky factor L of R and its density by torch."""
        sds = [HalfNormal(1.3), Exponential(0.7), HalfT(4.0, 0.5)]
        omega = 0.5 * randn(6, seed=3)
        rows, columns = torch.tril_indices(3, 3, -1)

        def parts(omega):
            tau, R = scales_of(omega, 3)
            return torch.cat([tau, torch.linalg.cholesky(R)[rows, columns]])

        jacobian = torch.linalg.slogdet(torch.autograd.functional.jacobian(parts, omega))[1]
        tau, R = scales_of(omega, 3)
        lkj = torch.distributions.LKJCholesky(3, torch.tensor(1.7, dtype=DTYPE), validate_args=False)
        expected = lkj.log_prob(torch.linalg.cholesky(R)) + jacobian
        expected = expected + sum(prior.log_prob(tau[k]) for k, prior in enumerate(sds))
        close(-ScalesPrior(sds, 1.7, 3).energy(omega), expected, 1e-10)

    def test_the_integrated_log_joint_has_them(self):
        given, settings = arguments("gaussian", 2)
        model, prior = MixedLogJoint(*given, GaussianNoise(0.7), **settings), ScalesPrior(HalfT(), 2.0, 2)
        for kind in (GaussianMixed, MarginalMixed):
            plain, other = kind(model), kind(model, scales=prior)
            theta = globals_of(plain)
            omega = plain.parts(theta)[1]
            change = model.covariance_prior.energy(omega) - prior.energy(omega)
            close(other.log_joint(theta) - plain.log_joint(theta), change, 1e-10)
            assert other.settings() != plain.settings()


@pytest.fixture(scope="module")
def linear():
    groups, X = torch.arange(15).repeat_interleave(4), torch.ones(60, 1, dtype=DTYPE)
    y = 2.0 + 0.8 * randn(15, seed=1)[groups] + 0.5 * randn(60, seed=2)
    model = MixedModel(X, y, (X, groups), "gaussian", prior=MixedPrior(5.0, sd=HalfNormal(2.0)))
    return model, model.fit(progress=False)


@pytest.fixture(scope="module")
def counts():
    groups, X = torch.arange(40).repeat_interleave(5), torch.ones(200, 1, dtype=DTYPE)
    generator = torch.Generator().manual_seed(3)
    rate = torch.exp(1.5 + 0.5 * randn(40, seed=1)[groups])
    factor = torch._standard_gamma(torch.full_like(rate, 3.0), generator=generator) / 3
    model = MixedModel(X, torch.poisson(rate * factor, generator), (X, groups), "negative_binomial")
    return model, model.fit(progress=False)


def against(target, result, lines):
    """Means, sds and intervals of β, the sd of random effects and the parameter, by sums over a grid."""
    share = target.log_joint(torch.cartesian_prod(*lines)).softmax(0).reshape([len(line) for line in lines])
    values = (lines[0], (-lines[1]).exp(), lines[2].exp())
    margins = [share.sum([i for i in range(3) if i != k]) for k in range(3)]
    exact = [Marginals.of([""], x[:, None], w, 0.95) for x, w in zip(values, margins, strict=True)]
    table = result.summary()
    for k, of in enumerate((table.fixed, table.sd, table.likelihood)):
        assert abs(float(of.mean - exact[k].mean)) < 0.12 * float(exact[k].sd)
        assert abs(float(of.sd / exact[k].sd) - 1) < 0.1
        for ours, theirs in ((of.low, exact[k].low), (of.high, exact[k].high)):
            assert abs(float(ours - theirs)) < 0.3 * float(exact[k].sd)


class TestFit:
    def test_a_linear_mixed_model_against_a_grid(self, linear):
        model, result = linear
        assert result.converged, result.reason
        assert result.k_hat < 0.7
        lines = [torch.linspace(a, b, 61, dtype=DTYPE) for a, b in ((0.5, 3.5), (-1.5, 3.5), (-1.3, 0.2))]
        against(GaussianMixed(model, model.learned), result, lines)

    @pytest.mark.accuracy
    def test_a_size_against_a_grid(self, counts):
        model, result = counts
        assert result.converged, result.reason
        lines = [torch.linspace(a, b, k, dtype=DTYPE) for a, b, k in ((1.0, 1.8, 17), (-0.2, 2.2, 21), (0.1, 2.8, 25))]
        target = MarginalMixed(model, 9, result.locals.target.start, learned=model.learned)
        against(target, result, lines)

    def test_a_scale_of_heavy_tails(self):
        groups, X = torch.arange(30).repeat_interleave(6), torch.ones(180, 1, dtype=DTYPE)
        noise = 0.5 * torch.tensor(scipy.stats.t.rvs(4, size=180, random_state=4))
        y = randn(30, seed=1)[groups] + noise
        result = MixedModel(X, y, (X, groups), "student_t").fit(progress=False, draws=400)
        scale = result.summary().likelihood
        assert scale.names == ("scale",)
        assert float(scale.low) < 0.5 < float(scale.high)
        assert 0.02 < float(scale.sd) < 0.06

    def test_other_units_of_the_response_change_nothing_else(self):
        """Default priors follow the data: fixed effects have a wide prior, and all else scales with y."""
        groups, X = torch.arange(30).repeat_interleave(4), torch.ones(120, 1, dtype=DTYPE)
        y = 0.8 * randn(30, seed=1)[groups] + 0.5 * randn(120, seed=2)
        tables = [
            MixedModel(X, s * y, (X, groups), "gaussian", prior=MixedPrior(s * 10.0)).fit(progress=False).summary()
            for s in (1.0, 1000.0)
        ]
        for name in ("sd", "likelihood", "fixed"):
            one, other = (getattr(table, name) for table in tables)
            assert float((1000 * one.mean - other.mean).abs()[0]) < 0.02 * float(other.sd[0])

    def test_a_fixed_likelihood_is_held(self):
        given, settings = arguments("gaussian", 1, n=12)
        model = MixedModel(*given, GaussianNoise(0.7), **settings)
        result = model.fit(progress=False, draws=400)
        assert result.summary().likelihood is None
        assert result.draws(100).parameter is None
        assert "in closed form" in result.method
        nodes = model.fit(progress=False, draws=400, nodes=3)
        assert "with 3 nodes" in nodes.method
        close(result.summary().fixed.mean, nodes.summary().fixed.mean, 0.05)
        assert result.log_evidence == pytest.approx(nodes.log_evidence, abs=0.1)

    def test_three_effects_with_gaussian_noise_are_integrated_out(self):
        given, settings = arguments("gaussian", 3, n=40)
        result = MixedModel(*given, "gaussian", **settings).fit(progress=False, draws=400)
        assert "in closed form" in result.method
        assert result.summary().sd.names == ("0", "1", "2")

    def test_single_precision(self):
        groups, X = torch.arange(30).repeat_interleave(4), torch.ones(120, 1)
        y = (0.8 * randn(30, seed=1)[groups] + 0.5 * randn(120, seed=2)).float()
        result = MixedModel(X, y, (X, groups), "gaussian").fit(progress=False, draws=400)
        assert result.summary().likelihood.mean.dtype == torch.float32
        assert 0.4 < float(result.summary().likelihood.mean) < 0.6


class TestAnswers:
    def test_the_table_and_the_draws(self, linear):
        model, result = linear
        lines = str(result).splitlines()
        assert lines[lines.index("likelihood") + 1].split()[:2] == ["residual", "sd"]
        draws = result.draws()
        assert draws.parameter.shape == (1000,)
        assert draws.omega.shape == (1000, 1)
        one = result.predict([[1.0]], [[1.0]], [3], kind="response")
        mean = result.predict([[1.0]], [[1.0]], [3], kind="mean")
        noise = float(one.draws.var() - mean.draws.var())
        assert noise == pytest.approx(float(draws.parameter.square().mean()), rel=0.2)
        residual = (one.draws - mean.draws)[:, 0] / draws.parameter
        assert scipy.stats.kstest(residual.numpy(), "norm").pvalue > 1e-3

    def test_the_joint_gaussian_is_there_when_asked_for(self, linear):
        model, result = linear
        assert result.joint is result.joint
        held = math.exp(float(result.posterior.mean[-1]))
        assert model.holding(held).rows.likelihood.noise == pytest.approx(held)
        close(result.joint.mean[:15], result.draws().effects.mean(0)[:, 0], 0.1)

    def test_counts(self, counts):
        model, result = counts
        assert result.summary().likelihood.names == ("size",)
        y = result.predict([[1.0]] * 2, [[1.0]] * 2, [3, -1], kind="response").draws
        assert bool((y == y.round()).all())
        assert result.joint.mean.shape == (model.dim,)

    def test_arviz(self, linear):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            pytest.importorskip("arviz")
            data = linear[1].to_arviz()
        assert dict(data.posterior["residual_sd"].sizes) == {"chain": 1, "draw": 1000}


X3, GROUPS3 = torch.ones(6, 1, dtype=DTYPE), [0, 0, 1, 1, 2, 2]
Y3 = torch.tensor([1.0, 0.0, 2.0, 3.0, 1.0, 0.0], dtype=DTYPE)
REFUSED = {
    "a joint fit": (
        lambda: MixedModel(X3, Y3, (X3, GROUPS3), "gaussian").fit(marginalise="none"),
        "marginalise='none' fits a Gaussian over all coordinates, which cannot have a residual sd that is learned; use "
        "'quadrature', or give a likelihood with its parameter.",
    ),
    "a family": (
        lambda: MixedModel(X3, Y3, (X3, GROUPS3), "cauchy"),
        "family must be one of bernoulli_logit, bernoulli_probit, poisson_log, gaussian, student_t, negative_binomial, "
        "or a Likelihood; got 'cauchy'.",
    ),
    "a prior of nothing": (
        lambda: MixedModel(X3, Y3, (X3, GROUPS3), GaussianNoise(1.0), prior=MixedPrior(likelihood=HalfT())),
        "likelihood= of the prior is that of a learned parameter, of the families gaussian, student_t, "
        "negative_binomial; got family=GaussianNoise, which has none.",
    ),
    "two priors": (
        lambda: MixedModel(X3, Y3, (X3, GROUPS3), prior=MixedPrior(precision=PRIORS[1], sd=HalfT())),
        "the random effects have one prior: give MixedPrior precision= or sd=, not both.",
    ),
    "a word for no prior": (
        lambda: MixedLogJoint(X3, Y3, (X3, GROUPS3), "poisson_log", prior=MixedPrior(precision="wishart")),
        "precision of a prior is a torchngvi.models.Wishart(dof, scale), 'kass-natarajan' or None; got 'wishart'.",
    ),
    "nothing to hold": (
        lambda: MixedModel(X3, Y3, (X3, GROUPS3), "poisson_log").holding(1.0),
        "the likelihood PoissonLog has no parameter that is learned.",
    ),
    "a number of priors": (
        lambda: ScalesPrior([HalfT()], 1.0, 2),
        "sd must be one prior, or one for each of the 2 random effects; got 1.",
    ),
    "no prior": (
        lambda: ScalesPrior(2.5, 1.0, 1),
        "sd is the prior of a standard deviation, HalfNormal, HalfT or Exponential; got 2.5.",
    ),
    "a scale": (
        lambda: LearnedNoise(HalfT(3.0, -1.0)),
        "likelihood must have positive and finite numbers; got HalfT(dof=3.0, scale=-1.0).",
    ),
    "a concentration": (
        lambda: ScalesPrior(HalfT(), 0.0, 2),
        "concentration is that of the LKJ density, positive and finite; got 0.0.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    call, text = REFUSED[name]
    with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
        call()


def test_over_all_coordinates_a_parameter_is_held():
    """As a log joint over b too: the likelihood is that of an estimate, for q and for Kass and Natarajan's prior."""
    prior = MixedPrior(10.0, "kass-natarajan")
    model = MixedModel(X3, Y3, (X3, GROUPS3), "gaussian", prior=prior)
    same = MixedLogJoint(X3, Y3, (X3, GROUPS3), GaussianNoise(within(model.rows)), prior=prior)
    theta = randn(model.dim, seed=1)
    close(model.log_joint(theta), same.log_joint(theta), 1e-12)


@pytest.mark.parametrize("unit", [1.0, 1e-3])
def test_targets_far_from_zero(unit):
    """Incomes and reaction times: the default prior of fixed effects is as wide as the targets and columns ask for."""
    groups = torch.arange(40).repeat_interleave(4)
    x, b, noise = (
        torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (160, 40, 161)
    )
    X, y = torch.stack([torch.ones_like(x), unit * x], -1), b[groups] + x + 0.5 * noise[:160]
    near, far = (
        MixedModel(X, y + shift, (X[:, :1], groups), "gaussian").fit(progress=False).summary() for shift in (0.0, 1e4)
    )
    slope = near.fixed.mean[1]
    assert abs(unit * slope - 1) < 0.2
    torch.testing.assert_close(far.fixed.mean, near.fixed.mean + torch.tensor([1e4, 0.0]), rtol=1e-7, atol=0.01 / unit)
    torch.testing.assert_close(far.sd.mean, near.sd.mean, rtol=0.02, atol=0)


@pytest.mark.parametrize("family", ["gaussian", "student_t"])
def test_targets_without_noise_are_refused(family):
    with pytest.raises(InputError, match=r"^every target is 5, of which no noise can be learned\. Check y, or give"):
        MixedModel(X3, torch.full((len(X3),), 5.0), (X3, GROUPS3), family)


def test_a_result_is_pickled():
    result = MixedModel(X3, Y3, (X3, GROUPS3), "gaussian").fit(draws=200, progress=False)
    again = pickle.loads(pickle.dumps(result))
    assert str(again) == str(result)
    assert torch.equal(
        again.sample(5, torch.Generator().manual_seed(0)), result.sample(5, torch.Generator().manual_seed(0))
    )
    close(again.joint.mean, result.joint.mean, 1e-12)
