"""Mixed models: every expectation against quadrature, draws and autograd; dense fits; published bounds."""

import csv
import gzip
import math
import os
import pathlib
import re

import numpy as np
import pytest
import torch
from helpers import DTYPE, PRECISION, Watch, close, posterior_in, randn, z_bound
from helpers import MIXED_FAMILIES as FAMILIES
from helpers import MIXED_PRIORS as PRIORS
from helpers import mixed_model as model_of
from helpers import mixed_problem as problem

from torchngvi import VN, CholeskyGaussian, NaturalGaussian, NaturalGradientVI, PrecisionCholeskyGaussian, fit
from torchngvi.errors import InputError
from torchngvi.models import HalfT, LogJoint, MixedLogJoint, MixedPrior, Wishart
from torchngvi.models.mixed_prior import Effects, Precision, half_squares, omega_of, root_of, starts
from torchngvi.posteriors import DiagonalGaussian
from torchngvi.rules import LocalExponential, NaturalGradient

families = pytest.mark.parametrize("family", FAMILIES)


def near(model, kind=PrecisionCholeskyGaussian, seed=3):
    """A q with every coupling, not far from where the posterior is."""
    q = posterior_in(kind, model.structure, (), seed)
    start = model.posterior()
    start.assign(
        type(start.coordinates)(
            0.3 * q.mean,
            2.5 * model.structure.eye(q.mean)
            + 0.3 * posterior_in(type(start), model.structure, (), seed).coordinates[1],
        ),
        torch.ones((), dtype=torch.bool),
    )
    if kind is PrecisionCholeskyGaussian:
        return start
    S = model.structure.congruence(start.coordinates.matrix, model.structure.eye(q.mean))
    q.assign(type(q.coordinates)(model.structure.smv(S, start.mean), S), torch.ones((), dtype=torch.bool))
    return q


class TestLogJoint:
    @families
    @pytest.mark.parametrize("r", [1, 2, 3])
    def test_is_that_of_the_distributions(self, family, r):
        """Every constant: the likelihood, N(b; 0, Ω⁻¹), N(β; 0, 4), and the Wishart with the Jacobian of ω."""
        model = model_of(family, r)
        (X, y, (Z, groups), _), settings = problem(family, r)
        theta = 0.5 * randn(model.dim, seed=5)
        b, beta, omega = model.rows.parts(theta)
        eta = X @ beta + (Z * b[groups]).sum(-1) + settings["offset"]
        D = torch.distributions
        likelihood = {
            "logit": lambda: D.Bernoulli(logits=eta),
            "probit": lambda: D.Bernoulli(torch.special.ndtr(eta)),
            "poisson": lambda: D.Poisson(eta.exp()),
            "negative binomial": lambda: D.NegativeBinomial(torch.tensor(3.0, dtype=DTYPE), logits=eta - math.log(3.0)),
            "gaussian": lambda: D.Normal(eta, torch.tensor(0.7, dtype=DTYPE)),
        }[family]()
        W = root_of(omega, r)
        Omega = W @ W.mT
        lower = torch.tril_indices(r, r)
        jacobian = torch.func.jacrev(lambda x: (root_of(x, r) @ root_of(x, r).mT)[lower[0], lower[1]])(omega)
        scale = torch.tensor(PRIORS[r].scale, dtype=DTYPE)
        expected = (
            (settings["weights"] * likelihood.log_prob(y)).sum()
            + D.MultivariateNormal(torch.zeros(r, dtype=DTYPE), precision_matrix=Omega).log_prob(b).sum()
            + D.Normal(torch.zeros((), dtype=DTYPE), 2.0 + torch.zeros((), dtype=DTYPE)).log_prob(beta).sum()
            + D.Wishart(torch.tensor(PRIORS[r].dof, dtype=DTYPE), covariance_matrix=scale).log_prob(Omega)
            + torch.linalg.slogdet(jacobian)[1]
        )
        close(model.log_joint(theta), expected, 1e-12)
        assert model.log_joint(theta.expand(2, 4, -1)).shape == (2, 4)

    @pytest.mark.parametrize("r", [1, 2, 3])
    def test_omega_is_the_root_column_by_column(self, r):
        omega = randn(2, r * (r + 1) // 2, seed=1)
        W = root_of(omega, r)
        close(W, W.tril(), 0.0)
        close(omega_of(W), omega, 1e-14)


class TestExpectations:
    @pytest.mark.parametrize(("r", "nodes"), [(1, 30), (2, 11), (3, 3)])
    def test_the_prior_of_effects_by_quadrature(self, r, nodes):
        """½E|Wᵀb|² under a dense Gaussian over (b, ω), against Gauss-Hermite in two, five and nine dimensions.

        For r = 3 the diagonal of W is known, so that three nodes are exact: what is left is of fourth degree.
        """
        q = r * (r + 1) // 2
        root = 0.2 * (randn(r + q, r + q, seed=1).tril() + torch.eye(r + q, dtype=DTYPE))
        if r == 3:
            root[r + torch.tensor(starts(r))] = 0.0
        mean, V = randn(r + q, seed=2), root @ root.mT
        x, w = (torch.tensor(part, dtype=DTYPE) for part in np.polynomial.hermite_e.hermegauss(nodes))
        z = torch.cartesian_prod(*[x] * (r + q))
        weight = torch.cartesian_prod(*[w / w.sum()] * (r + q)).prod(-1)
        theta = mean + z @ root.mT
        turned = (theta[:, None, :r] @ root_of(theta[:, r:], r))[:, 0]
        expected = (weight * 0.5 * turned.square().sum(-1)).sum()
        effects = Effects(mean[None, :r], mean[r:], V[None, :r, :r], V[None, r:, :r], V[r:, r:])
        close(half_squares(effects)[0], expected, 1e-11)

    @pytest.mark.parametrize("r", [1, 2, 3])
    def test_the_scale_of_the_wishart_prior(self, r):
        """½ tr(S⁻¹Ω) at a known ω."""
        prior = Precision(PRIORS[r], torch.zeros(1, dtype=DTYPE), r)
        omega = 0.5 * randn(r * (r + 1) // 2, seed=1)
        q, none = len(omega), torch.zeros((), dtype=DTYPE)
        known = Effects(none.expand(1, r), omega, none.expand(1, r, r), none.expand(1, q, r), none.expand(q, q))
        W = root_of(omega, r)
        close(prior.expected(known), 0.5 * torch.trace(torch.linalg.solve(prior.scale, W @ W.mT)), 1e-13)

    @pytest.mark.sparse(3)
    @families
    @pytest.mark.parametrize("r", [1, 2, 3])
    def test_the_value_is_the_mean_of_draws(self, family, r):
        model = model_of(family, r)
        q = near(model)
        z = randn(20_000, q.dim, seed=7)
        frame = q.frame()
        pairs = 0.5 * sum(-model.log_joint(frame.mean + sign * frame.push(z)) for sign in (1, -1))
        value, _ = model.expected_energy(frame)
        error = float(pairs.mean() - value) / float(pairs.std() / math.sqrt(len(pairs)))
        assert abs(error) < z_bound(15)

    @pytest.mark.sparse(3)
    @families
    @pytest.mark.parametrize("r", [1, 2, 3])
    def test_the_packet_is_the_derivative_of_the_value(self, family, r):
        model = model_of(family, r)
        q = near(model)
        value, _ = model.expected_energy(q.probed())
        gradients = torch.autograd.grad(value, (q.mean_probe, q.root_probe))
        a, W = model.expected_energy(q.frame())[1].framed(q.frame())
        close(a, gradients[0], 1e-10)
        close(model.structure.tril(W), model.structure.tril(gradients[1]), 1e-10)

    @pytest.mark.parametrize("r", [1, 2])
    @pytest.mark.parametrize("kind", PRECISION)
    def test_a_dense_q_sees_the_same(self, kind, r):
        """The packet in the frame of an arrow, taken out of it, is that of the same Gaussian in a dense one."""
        model = model_of("logit", r)
        q = near(model, kind)
        dense = CholeskyGaussian(q.dim, mean=q.mean.detach(), scale=torch.linalg.cholesky(q.covariance))
        value, (a, W) = model.expected_energy(q.frame())
        other, (g, H) = model.expected_energy(dense.frame())
        close(value, other, 1e-12)
        own_g, own_H = q.unframe(a, W)
        close(own_g, g, 1e-10)
        close(model.structure.full(own_H), H, 1e-10)
        close(H, H.mT, 0.0)

    def test_a_batch_of_posteriors(self):
        model = model_of("logit", 2)
        q = PrecisionCholeskyGaussian(model.dim, (2,), structure=model.structure, dtype=DTYPE)
        each = [near(model, seed=seed) for seed in (3, 13)]
        both = (torch.stack(x) for x in zip(*(one.coordinates for one in each), strict=True))
        q.assign(type(q.coordinates)(*both), torch.ones(2, dtype=torch.bool))
        value, (a, W) = model.expected_energy(q.frame())
        for k, one in enumerate(each):
            expected, packet = model.expected_energy(one.frame())
            for x, y in ((value[k], expected), (a[k], packet.a), (W[k], packet.W)):
                close(x, y, 1e-12)


class TestRows:
    def test_their_order_does_not_matter(self):
        (X, y, (Z, groups), family), settings = problem("poisson", 2, prior=False)
        prior = MixedPrior(precision="kass-natarajan")
        model, order = MixedLogJoint(X, y, (Z, groups), family, prior=prior, **settings), torch.arange(len(y)).flip(0)
        turned = {name: x[order] for name, x in settings.items()}
        other = MixedLogJoint(X[order], y[order], (Z[order], groups[order]), family, prior=prior, **turned)
        close(other.covariance_prior.scale, model.covariance_prior.scale, 1e-10)
        q = near(model)
        close(other.expected_energy(q.frame())[0], model.expected_energy(q.frame())[0], 1e-10)

    def test_a_weight_is_a_number_of_rows(self):
        """Two for a row that is there twice, none for one that is not there, though its loss be infinite."""
        (X, y, (Z, groups), family), _ = problem("poisson", 1)
        times = torch.ones(len(y), dtype=torch.long)
        times[:2], times[-1] = 2, 0
        prior = MixedPrior(2.0)
        offset = torch.zeros(len(y), dtype=DTYPE)
        offset[-1] = 1e6
        weighted = MixedLogJoint(X, y, (Z, groups), family, prior=prior, weights=times.to(DTYPE), offset=offset)
        X, y, Z, groups = (x.repeat_interleave(times, 0) for x in (X, y, Z, groups))
        written = MixedLogJoint(X, y, (Z, groups), family, prior=prior)
        q = near(written)
        for x, z in zip(weighted.expected_energy(q.frame())[1], written.expected_energy(q.frame())[1], strict=True):
            close(x, z, 1e-10)
        close(weighted.log_joint(q.mean), written.log_joint(q.mean), 1e-10)
        theta = q.mean.clone().requires_grad_()
        assert bool(torch.autograd.grad(weighted.log_joint(theta), theta)[0].isfinite().all())
        begun = (model.posterior().coordinates for model in (weighted, written))
        for x, z in zip(*begun, strict=True):
            close(x, z, 1e-10)

    def test_the_prior_of_kass_and_natarajan_of_counts(self):
        """An intercept alone: J is the mean number of counts in a group, which Poisson rates sum up to."""
        (X, y, (Z, groups), family), _ = problem("poisson", 1)
        model = MixedLogJoint(X, y, (Z, groups), family, prior=MixedPrior(1e6, "kass-natarajan"))
        assert model.covariance_prior.dof == 1.0
        close(model.covariance_prior.scale, y.sum().reshape(1, 1) / 3, 1e-5)
        arguments, settings = problem("poisson", 2, prior=False)
        model = MixedLogJoint(*arguments, prior=MixedPrior(precision="kass-natarajan"), **settings)
        assert model.covariance_prior.dof == 3.0


class TestFits:
    @pytest.mark.sparse(2)
    @pytest.mark.parametrize(
        ("family", "r"), [(family, 1) for family in FAMILIES if family != "negative binomial"] + [("poisson", 2)]
    )
    def test_the_optimum_is_that_of_a_dense_q(self, family, r):
        model = model_of(family, r, prior=False)
        q, dense = model.posterior(), CholeskyGaussian(model.dim, dtype=DTYPE, scale=0.5)
        results = [fit(one, model, tolerance=1e-9, progress=False) for one in (q, dense)]
        assert all(result.converged for result in results), [result.reason for result in results]
        assert results[0].loss == pytest.approx(results[1].loss, abs=1e-9)
        close(q.mean, dense.mean, 1e-8)
        close(q.covariance, dense.covariance, 1e-8)

    @pytest.mark.parametrize("rule", [NaturalGradient, LocalExponential])
    def test_other_rules_reach_it_too(self, rule):
        model = model_of("poisson", 1)
        q, other = model.posterior(), model.posterior()
        best = fit(q, model, tolerance=1e-8, progress=False)
        result = fit(other, model, NaturalGradientVI(other, rule()), tolerance=1e-8, progress=False)
        assert result.converged, result.reason
        assert result.loss == pytest.approx(best.loss, abs=1e-9)

    def test_a_natural_q_and_a_mean_field(self):
        model = model_of("logit", 1)
        q = model.posterior()
        best = fit(q, model, progress=False)
        natural = NaturalGaussian(model.dim, structure=model.structure, dtype=DTYPE, scale=0.5)
        assert fit(natural, model, progress=False).loss == pytest.approx(best.loss, abs=1e-9)
        field = DiagonalGaussian(model.dim, dtype=DTYPE, scale=0.5)
        assert fit(field, model, progress=False).loss > best.loss + 0.01

    def test_the_log_joint_by_draws_agrees(self):
        """The same function without its closed form, from draws, to what they lose."""
        model = model_of("poisson", 1)
        q = model.posterior()
        best = fit(q, model, progress=False)
        other = CholeskyGaussian(model.dim, dtype=DTYPE)
        torch.manual_seed(0)
        assert fit(other, LogJoint(model.log_joint), progress=False).converged
        assert best.loss - 1e-9 < float(model.negative_elbo(other).detach()) < best.loss + 0.05

    @pytest.mark.parametrize(("family", "r"), [("logit", 1), ("poisson", 2)])
    def test_many_groups_need_few_evaluations(self, family, r):
        """And nothing is D x D, the start and the prior included."""
        (X, y, random, family), settings = problem(family, r, n=400, prior=False)
        with Watch(400 * r):
            model = MixedLogJoint(X, y, random, family, **settings)
            q = model.posterior()
            VN(q).step(model)
        result = fit(q, model, tolerance=1e-3, progress=False)
        assert result.converged
        assert result.evaluations <= 30

    @pytest.mark.parametrize("r", [1, 2])
    def test_the_numbers_of_a_step_grow_with_the_groups_alone(self, r):
        """Those in all tensors that are made: twice for twice as many groups."""
        made = []
        for n in (500, 1000):
            (X, y, (Z, _), family), settings = problem("poisson", r, n=1000)
            groups, keep = torch.arange(3 * n) // 3, slice(3 * n)
            prior = settings["prior"]
            model = MixedLogJoint(X[keep], y[keep], (Z[keep], groups), family, prior=prior)
            q = model.posterior()
            with Watch(q.dim) as watch:
                VN(q).step(model)
            made.append(watch.made)
        assert 1.9 < made[1] / made[0] < 2.0

    @pytest.mark.accuracy
    @pytest.mark.parametrize(
        "make",
        [
            lambda x, b: (0 * x, "poisson_log"),
            lambda x, b: ((x > 0).to(DTYPE), "bernoulli_logit"),
            lambda x, b: ((b > 0).to(DTYPE), "bernoulli_logit"),
            lambda x, b: ((12 + b + x).exp().round(), "poisson_log"),
            lambda x, b: (1e4 + b + x, "gaussian"),
        ],
        ids=["zeros", "separable", "groups of one class", "large counts", "far away"],
    )
    def test_data_that_are_hard(self, make):
        groups = torch.arange(40).repeat_interleave(4)
        x, b = randn(160, seed=1), randn(40, seed=2)[groups]
        y, family = make(x, b)
        model = MixedLogJoint(
            torch.stack([torch.ones_like(x), x], -1), y, (torch.ones_like(x)[:, None], groups), family
        )
        q = model.posterior()
        result = fit(q, model, progress=False)
        assert result.converged, result.reason

    def test_single_precision(self):
        (X, y, (Z, groups), family), _ = problem("poisson", 1, n=20)
        model = MixedLogJoint(X.float(), y.float(), (Z.float(), groups), family)
        q = model.posterior()
        assert q.dtype == torch.float32
        assert fit(q, model, progress=False).converged


def table(name):
    path = pathlib.Path(os.environ.get("TORCHNGVI_DATA") or ".") / "glmm" / f"{name}.csv.gz"
    if not path.is_file():
        pytest.skip(f"needs glmm/{path.name}: set TORCHNGVI_DATA to the folder that has it")
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))

    def column(key, success=None):
        return torch.tensor([float(row[key] if success is None else row[key] == success) for row in rows], dtype=DTYPE)

    return column


def codes(labels):
    return torch.unique(labels, return_inverse=True)[1]


TANS = MixedPrior(10.0, "kass-natarajan")  # the priors of the paper


def epilepsy():
    column = table("epil")
    base, treated, age = (column("base") / 4).log(), column("trt", "progabide"), column("age").log()
    visit = torch.tensor([-0.3, -0.1, 0.1, 0.3], dtype=DTYPE)[column("period").long() - 1]
    one = torch.ones_like(base)
    X = torch.stack([one, base, treated, base * treated, age - age.mean(), visit], -1)
    return MixedLogJoint(
        X, column("y"), (torch.stack([one, visit], -1), codes(column("subject"))), "poisson_log", prior=TANS
    )


def toenail():
    column = table("toenail")
    treated, time = column("treatment", "terbinafine"), column("time")
    time = (time - time.mean()) / time.std()
    one = torch.ones_like(time)
    X = torch.stack([one, treated, time, treated * time], -1)
    return MixedLogJoint(
        X, column("outcome", "moderate or severe"), (one[:, None], codes(column("patientID"))), prior=TANS
    )


def hers():
    column = table("hers")
    one = torch.ones_like(column("age"))
    X = torch.stack([one, *(column(name) for name in ("age", "bmi", "htn", "visit"))], -1)
    return MixedLogJoint(X, column("response"), (one[:, None], codes(column("id"))), prior=TANS)


# the prior's 1/(2S) or S, the bound with and without its constants, global means, most evaluations
PUBLISHED = {
    "epilepsy": (
        epilepsy,
        [11.0169, -0.1616, 0.5516],
        (3139.4560, -687.239619),
        [0.210, 0.886, -0.932, 0.339, 0.476, -0.267, 0.673, -0.014, 0.275],
        15,
    ),
    "toenail": (toenail, [0.4962], (-645.7142, -654.235116), [-3.232, -0.758, -1.641, -0.569, -1.272], 26),
    "HERS": (hers, [0.5079], (-5041.2935, -5052.105393), [-0.754, 0.501, 0.216, -0.354, 0.225, -0.639], 20),
}


@pytest.mark.sparse(2)
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_data_of_tan(name):
    """Table 6 of Tan (2025): priors to the printed digits, and the optimum above the printed bounds of GVA.

    The table leaves out the constants of the log joint, and (D/2) log 2π of the entropy.
    """
    make, printed, (dropped, bound), means, most = PUBLISHED[name]
    model = make()
    scale = model.covariance_prior.scale
    shown = 0.5 / scale.flatten() if len(scale) == 1 else torch.stack([scale[0, 0], scale[0, 1], scale[1, 1]])
    close(shown, torch.tensor(printed, dtype=DTYPE), 6e-5 / max(1.0, printed[0]))
    q = model.posterior()
    result = fit(q, model, tolerance=1e-3, progress=False)
    assert result.converged, result.reason
    assert result.evaluations <= most
    assert -result.loss == pytest.approx(bound, abs=1e-4)
    rows, counts = model.rows, model.rows.y
    constant = 0.5 * rows.n * rows.r * math.log(2 * math.pi) + 0.5 * rows.p * math.log(200 * math.pi)
    constant += model.covariance_prior.log_normaliser + (
        float(torch.lgamma(counts + 1).sum()) if name == "epilepsy" else 0.0
    )
    assert -result.loss + constant - 0.5 * model.dim * math.log(2 * math.pi) == pytest.approx(dropped, abs=1e-3)
    close(q.mean[-len(means) :], torch.tensor(means, dtype=DTYPE), 6e-4)


class TestAnswers:
    def test_summary(self):
        model = model_of("poisson", 2, n=12)
        q = model.posterior()
        fit(q, model, progress=False)
        summary = model.summary(q, draws=20_000)
        sd = q.variance.sqrt()
        close(summary.group, q.mean[:24].reshape(12, 2), 0.0)
        close(summary.group_sd, sd[:24].reshape(12, 2), 1e-12)
        close(summary.fixed, q.mean[24:26], 0.0)
        close(summary.fixed_sd, sd[24:26], 1e-12)
        draws = model.rows.parts(q.sample((20_000,), torch.Generator().manual_seed(5)))[2]
        covariance = torch.linalg.inv(root_of(draws, 2) @ root_of(draws, 2).mT)
        sds = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
        rho = covariance[:, 0, 1] / sds.prod(-1)
        for mean, spread, seen in ((summary.sd, summary.sd_sd, sds), (summary.correlation[0, 1], None, rho)):
            error = seen.std(0) * math.sqrt(2 / 20_000)
            assert bool(((mean - seen.mean(0)).abs() < z_bound(10) * error).all())
            if spread is not None:
                close(spread / seen.std(0), torch.ones_like(spread), 0.1)
        close(summary.correlation.diagonal(), torch.ones(2, dtype=DTYPE), 1e-12)
        assert bool((summary.sd_interval[0] < summary.sd).all() & (summary.sd < summary.sd_interval[1]).all())
        text = str(summary)
        assert text.startswith("fixed effects ")
        assert "  1 with 0 " in text
        assert text.endswith("12 groups")
        dense = CholeskyGaussian(q.dim, mean=q.mean.detach(), scale=torch.linalg.cholesky(q.covariance))
        close(model.summary(dense, draws=20_000).sd, summary.sd, 1e-10)

    def test_predictions_of_known_and_new_groups(self):
        model = model_of("poisson", 2, n=12)
        q = model.posterior()
        fit(q, model, progress=False)
        X, Z = torch.tensor([[1.0, 0.5], [1.0, -0.5]], dtype=DTYPE), torch.tensor([[1.0, 0.2], [1.0, 2.0]], dtype=DTYPE)
        eta = model.predict(q, X, Z, [4, 7], draws=40_000)
        places = torch.tensor([[8, 9, 24, 25], [14, 15, 24, 25]])
        rows = torch.cat([Z, X], -1)
        mean = (rows * q.mean[places]).sum(-1)
        variance = torch.stack([x @ q.covariance[p][:, p] @ x for x, p in zip(rows, places, strict=True)])
        assert bool(((eta.mean(0) - mean).abs() < z_bound(4) * (variance / 40_000).sqrt()).all())
        close(eta.var(0) / variance, torch.ones(2, dtype=DTYPE), 0.04)
        new = model.predict(q, X, Z, draws=40_000)
        omega = model.rows.parts(q.sample((40_000,), torch.Generator().manual_seed(6)))[2]
        inside = torch.linalg.inv(root_of(omega, 2) @ root_of(omega, 2).mT).mean(0)
        beta = q.covariance[24:26, 24:26]
        wider = torch.stack([x @ beta @ x + z @ inside @ z for x, z in zip(X, Z, strict=True)])
        close(new.var(0) / wider, torch.ones(2, dtype=DTYPE), 0.06)
        assert model.predict(q, X, Z, draws=2).shape == (2, 2)


X3, Y3 = torch.ones(3, 1, dtype=DTYPE), torch.tensor([1.0, 0.0, 2.0], dtype=DTYPE)
DOF = "the degrees of freedom of the Wishart prior must exceed r - 1 = 0; got 0.0."
REFUSALS = {
    "groups of another length": (
        lambda: MixedLogJoint(X3, Y3, (X3, [0, 1]), "poisson_log"),
        "groups must have one integer for each of the 3 rows of X; got shape (2,).",
    ),
    "an empty group": (
        lambda: MixedLogJoint(X3, Y3, (X3, [0, 2, 2]), "poisson_log"),
        "groups must be numbered 0, ..., n - 1, each with a row; got no row of group 1. Pass torch.unique(groups, "
        "return_inverse=True)[1].",
    ),
    "a negative group": (
        lambda: MixedLogJoint(X3, Y3, (X3, [0, -1, 1]), "poisson_log"),
        "groups must be numbered 0, ..., n - 1, each with a row; got a group -1. Pass torch.unique(groups, "
        "return_inverse=True)[1].",
    ),
    "groups that are no integers": (
        lambda: MixedLogJoint(X3, Y3, (X3, torch.tensor([0.0, 1.0, 1.5])), "poisson_log"),
        "groups must be integers; got torch.float32. Of labels, pass numpy.unique(labels, return_inverse=True)[1].",
    ),
    "groups that are labels": (
        lambda: MixedLogJoint(X3, Y3, (X3, ["a", "b", "b"]), "poisson_log"),
        "groups must be integers, one a row; got list (too many dimensions 'str'). Of labels, pass "
        "numpy.unique(labels, return_inverse=True)[1].",
    ),
    "columns of Z that depend on one another": (
        lambda: MixedLogJoint(X3, Y3, (X3 * torch.tensor([1.0, 2.0]).to(DTYPE), [0, 1, 1]), "poisson_log"),
        "the 2 columns of Z, the design of the random effects, must be linearly independent; their rank is 1. Leave a "
        "column out.",
    ),
    "rows of Z": (
        lambda: MixedLogJoint(X3, Y3, (X3[:2], [0, 1, 1]), "poisson_log"),
        "Z must have one row for each of the 3 rows of X, and a column a random effect; got shape (2, 1).",
    ),
    "no pair": (
        lambda: MixedLogJoint(X3, Y3, X3, "poisson_log"),
        "random is a pair of a design and groups, RandomEffects(Z, groups); got a tensor of shape (3, 1), "
        "torch.float64.",
    ),
    "a batch": (
        lambda: MixedLogJoint(X3.expand(2, 3, 1), Y3, (X3, [0, 1, 1]), "poisson_log"),
        "a MixedModel has one dense design X (N, p) and targets y (N,); got X of shape (2, 3, 1), torch.strided, and y "
        "of (3,).",
    ),
    "fixed_scale": (
        lambda: MixedLogJoint(X3, Y3, (X3, [0, 1, 1]), "poisson_log", prior=MixedPrior(0.0)),
        "fixed_scale is the prior standard deviation of a fixed effect, positive and finite; got 0.0.",
    ),
    "shape of the Wishart prior": (
        lambda: MixedLogJoint(
            X3, Y3, (X3, [0, 1, 1]), "poisson_log", prior=MixedPrior(1.0, Wishart(1.0, torch.eye(2)))
        ),
        "the scale of the Wishart prior must be a symmetric matrix (1, 1), one row a random effect; got shape (2, 2).",
    ),
    "scale of the Wishart prior": (
        lambda: MixedLogJoint(X3, Y3, (X3, [0, 1, 1]), "poisson_log", prior=MixedPrior(1.0, Wishart(1.0, -1.0))),
        "the scale of the Wishart prior must be positive definite; the Cholesky factorisation fails. Add a multiple of "
        "the identity.",
    ),
    "degrees of freedom": (
        lambda: MixedLogJoint(X3, Y3, (X3, [0, 1, 1]), "poisson_log", prior=MixedPrior(1.0, Wishart(0.0, 1.0))),
        DOF,
    ),
    "no prior of an sd": (
        lambda: MixedLogJoint(X3, Y3, (X3, [0, 1, 1]), "poisson_log", prior=MixedPrior(1.0, sd=3.0)),
        "sd is the prior of a standard deviation, HalfNormal, HalfT or Exponential; got 3.0.",
    ),
    "priors of sds": (
        lambda: MixedLogJoint(X3, Y3, (X3, [0, 1, 1]), "poisson_log", prior=MixedPrior(1.0, sd=[HalfT(), HalfT()])),
        "sd must be one prior, or one for each of the 1 random effects; got 2.",
    ),
    "two priors": (
        lambda: MixedLogJoint(
            X3, Y3, (X3, [0, 1, 1]), "poisson_log", prior=MixedPrior(1.0, Wishart(1.0, 1.0), sd=HalfT())
        ),
        "the random effects have one prior: give MixedPrior precision= or sd=, not both.",
    ),
    "a word for the prior": (
        lambda: MixedLogJoint(X3, Y3, (X3, [0, 1, 1]), "poisson_log", prior=MixedPrior(1.0, "wishart")),
        "precision of a prior is a torchngvi.models.Wishart(dof, scale), 'kass-natarajan' or None; got 'wishart'.",
    ),
    "rows that tell nothing of an effect": (
        lambda: MixedLogJoint(
            X3, Y3, (torch.eye(3)[:, :2], [0, 0, 1]), "poisson_log", prior=TANS, weights=torch.tensor([1.0, 0.0, 1.0])
        ),
        "the rows tell nothing of some random effect, which the prior of Kass and Natarajan needs. Leave precision= "
        "out for the default, or give Wishart(dof, scale).",
    ),
    "rows that tell nothing": (
        lambda: MixedLogJoint(X3, Y3, (X3, [0, 1, 1]), "poisson_log", weights=torch.zeros(3)),
        "no row has a positive weight, of which nothing can be learned. Give at least one.",
    ),
    "another q": (
        lambda: fit(CholeskyGaussian(2, dtype=DTYPE), MixedLogJoint(X3, Y3, (X3, [0, 1, 1]), "poisson_log")),
        "the model has 4 coefficients and q has 2; build q with dim=4.",
    ),
    "new rows": (
        lambda: model_of("poisson", 1).predict(model_of("poisson", 1).posterior(), X3, X3),
        "new rows need X of shape (M, 2) and Z of shape (M, 1); got (3, 1) and (3, 1).",
    ),
    "groups of new rows": (
        lambda: model_of("poisson", 1).predict(model_of("poisson", 1).posterior(), torch.ones(3, 2), X3, [0, 1, 3]),
        "groups of new rows must be those of the data, 0 to 2; got 0 to 3. Leave groups= out for a group that the data "
        "do not have.",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    call, text = REFUSALS[name]
    with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
        call()


class TestManyTargets:
    """One design and one set of groups, many sets of targets: each is fitted as by itself."""

    @pytest.mark.accuracy
    @pytest.mark.parametrize(("family", "r", "prior"), [("negative binomial", 1, False), ("logit", 2, True)])
    def test_each_is_its_own_fit(self, family, r, prior):
        (X, y, random, likelihood), settings = problem(family, r, n=6, prior=prior)
        shuffled = [y[torch.randperm(len(y), generator=torch.Generator().manual_seed(k))] for k in range(2)]
        Y, weights = torch.stack([y, *shuffled]), settings["weights"].repeat(3, 1)
        weights[1, :2] = 0.0  # rows that one of them does not have
        settings = {name: value for name, value in settings.items() if name != "weights"}
        if not prior:  # that of Kass and Natarajan, which each has for itself
            settings["prior"] = MixedPrior(10.0, "kass-natarajan")
        many = MixedLogJoint(X, Y, random, likelihood, weights=weights, **settings)
        q = many.posterior()
        assert q.batch_shape == (3,)
        result = fit(q, many, progress=False, tolerance=1e-9)
        assert bool(result.members_converged.all())
        theta = 0.3 * randn(4, 3, many.dim, seed=7)
        summary = many.summary(q, draws=100)
        for k in range(3):
            one = MixedLogJoint(X, Y[k], random, likelihood, weights=weights[k], **settings)
            close(many.log_joint(theta)[:, k], one.log_joint(theta[:, k]), 1e-11)
            own = one.posterior()
            alone = fit(own, one, progress=False, tolerance=1e-9)
            assert alone.converged
            close(q.mean[k].detach(), own.mean.detach(), 1e-8)
            close(q.variance[k].detach(), own.variance.detach(), 1e-8)
            expected = one.summary(own, draws=100)
            for name in ("fixed", "fixed_sd", "sd", "sd_sd", "sd_interval", "correlation", "group", "group_sd"):
                close(getattr(summary.member(k), name), getattr(expected, name), 1e-7)
            assert str(summary.member(k)) == str(expected)
        assert str(summary) == "3 mixed models of one design: member(k) is the table of one"

    def test_starts_are_no_worse_than_those_alone(self):
        (X, y, random, likelihood), settings = problem("poisson", 2, n=6)
        Y = torch.stack([y, torch.zeros_like(y), 20 * y])
        many = MixedLogJoint(X, Y, random, likelihood, **settings)
        q = many.posterior()
        losses = many.expected_energy(q.frame())[0] - q.entropy()
        for k in range(3):
            one = MixedLogJoint(X, Y[k], random, likelihood, **settings)
            own = one.posterior()
            assert losses[k] < one.expected_energy(own.frame())[0] - own.entropy() + 0.1

    def test_new_rows(self):
        (X, y, random, likelihood), settings = problem("poisson", 1, n=6)
        many = MixedLogJoint(X, torch.stack([y, y]), random, likelihood, **settings)
        q = many.posterior()
        Z, groups = random
        known = many.predict(q, X, Z, groups, draws=2000)
        assert known.shape == (2000, 2, len(X))
        b, beta, _ = many.rows.parts(q.mean.detach())
        eta = beta @ X.mT + (b[:, groups] * Z).sum(-1)
        assert ((known.mean(0) - eta).abs() < 5 * known.std(0) / 2000**0.5).all()
        assert many.predict(q, X, Z, draws=5).shape == (5, 2, len(X))

    def test_what_needs_one_set(self):
        (X, y, random, likelihood), settings = problem("poisson", 1)
        Y = torch.stack([y, y])
        many = MixedLogJoint(X, Y, random, likelihood, **settings)
        shape = re.escape(str(tuple(Y.shape)))
        ending = rf"takes one set of targets y \(N,\); got y of shape {shape}\. Fit many of them by fit"
        with pytest.raises(InputError, match=f"^a fit in batches of groups {ending}"):
            fit(many.posterior(), many, batch_groups=2)
        with pytest.raises(InputError, match=r"^the model holds a batch \(2,\) of data sets and q a batch \(3,\)"):
            many.check(PrecisionCholeskyGaussian(many.dim, (3,), structure=many.structure, dtype=DTYPE))
