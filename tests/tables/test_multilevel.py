"""Mixed models with several grouping factors: nested and crossed, against dense Gaussians and dense densities."""

import copy
import pickle

import numpy as np
import pandas
import pytest
import torch

from torchngvi import CholeskyGaussian, MixedModel, fit
from torchngvi.adapters.formula import Formula, mixed
from torchngvi.app.outputs import read_frame
from torchngvi.cli import main
from torchngvi.errors import InputError
from torchngvi.mixed_models import MultilevelModel
from torchngvi.mixed_models.multilevel_joint import Profile, splined
from torchngvi.models import (
    Exponential,
    GaussianMultilevel,
    GaussianNoise,
    HalfNormal,
    MixedLogJoint,
    MixedPrior,
    MultilevelLogJoint,
    RandomEffects,
    Wishart,
    multilevel_rows,
)
from torchngvi.models.learned import LearnedNoise
from torchngvi.models.mixed_prior import root_of, scales_of

N, A, B = 60, 12, 4


@pytest.fixture(autouse=True)
def doubles():
    torch.set_default_dtype(torch.float64)


def data(nested=False, seed=1, rows=N):
    generator = torch.Generator().manual_seed(seed)
    a = torch.cat([torch.arange(A), torch.randint(0, A, (rows - A,), generator=generator)])
    b = a % B if nested else torch.cat([torch.arange(B), torch.randint(0, B, (rows - B,), generator=generator)])
    X = torch.stack([torch.ones(rows), torch.randn(rows, generator=generator)], 1)
    effects = [0.5 * torch.randn(n, generator=generator) for n in (A, B)]
    eta = 0.5 + 0.3 * X[:, 1] + effects[0][a] + effects[1][b]
    return X, torch.poisson(eta.exp(), generator=generator), eta + 0.4 * torch.randn(rows, generator=generator), a, b


def model(nested=False, prior=None, family="poisson_log"):
    X, y, _, a, b = data(nested)
    return MultilevelLogJoint(X, y, {"a": (X, a), "b": (X[:, :1], b)}, family, prior=prior)


SCALES = MixedPrior(sd={"a": HalfNormal(1.0), "b": Exponential(2.0)}, concentration={"a": 2.0})
CASES = {"nested": (True, None), "crossed": (False, None), "crossed, priors of sds": (False, SCALES)}


@pytest.fixture(scope="module", params=CASES, ids=str)
def fitted(request):
    torch.set_default_dtype(torch.float64)
    target = model(*CASES[request.param])
    q = target.posterior()
    return target, q, fit(q, target, tolerance=1e-9, progress=False)


class TestTheBestGaussian:
    def test_it_is_that_over_all_matrices(self, fitted):
        """A dense Gaussian, from another start, has the same bound and the same moments."""
        target, q, found = fitted
        dense = CholeskyGaussian.from_moments(0.9 * q.mean.detach(), 1.1 * q.covariance.detach())
        other = fit(dense, target, tolerance=1e-9, progress=False)
        assert found.converged
        assert other.converged
        assert abs(found.loss - other.loss) < 1e-8
        torch.testing.assert_close(dense.mean, q.mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(dense.covariance, q.covariance, rtol=0, atol=1e-6)

    def test_derivatives_are_those_of_the_value(self, fitted):
        target, q, _ = fitted
        mean = (q.mean.detach() + 0.1).requires_grad_()
        V = target.structure.from_dense(1.2 * q.covariance.detach()).clone().requires_grad_()
        value, g, H = target.moments(mean, V)
        by_mean, by_V = torch.autograd.grad(value, (mean, V))
        torch.testing.assert_close(g.detach(), by_mean, rtol=1e-9, atol=1e-9)
        for whole, once in zip(target.structure.parts(H.detach()), target.structure.parts(by_V), strict=True):
            torch.testing.assert_close(whole.square, once.square + once.square.mT, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(whole.border, once.border, rtol=1e-9, atol=1e-9)

    def test_the_value_is_the_mean_over_draws(self, fitted):
        target, q, found = fitted
        energy = -target.log_joint(q.sample((20_000,), torch.Generator().manual_seed(0)).detach())
        apart = energy.mean() - (found.loss + q.entropy()).detach()
        assert abs(apart) < 4 * energy.std() / 20_000**0.5

    def test_the_order_of_rows_factors_and_labels_does_not_matter(self):
        X, y, _, a, b = data()
        order, relabel = torch.randperm(N), torch.randperm(A)
        first = MultilevelLogJoint(X, y, {"a": (X, a), "b": (X[:, :1], b)}, "poisson_log")
        X_, Z = X[order], X[order][:, :1]
        other = MultilevelLogJoint(X_, y[order], {"b": (Z, b[order]), "a": (X_, relabel[a[order]])}, "poisson_log")
        q, p = first.posterior(), other.posterior()
        losses = [fit(some, target, progress=False).loss for some, target in ((q, first), (p, other))]
        assert abs(losses[0] - losses[1]) < 1e-9
        (a_q, b_q), beta_q, _ = first.rows.parts(q.mean)
        (b_p, a_p), beta_p, _ = other.rows.parts(p.mean)
        torch.testing.assert_close(a_p[relabel], a_q, rtol=0, atol=1e-5)
        torch.testing.assert_close(b_p, b_q, rtol=0, atol=1e-5)
        torch.testing.assert_close(beta_p, beta_q, rtol=0, atol=1e-5)

    def test_a_factor_without_a_design_changes_nothing(self):
        """Effects that hardly reach the predictor leave those of the other factor as they are."""
        X, y, _, a, b = data()
        alone = MixedLogJoint(X, y, (X, a), "poisson_log")
        prior = MixedPrior(precision={"b": Wishart(1.0, 1.0)})  # the default would have the scale of the design
        both = MultilevelLogJoint(X, y, {"a": (X, a), "b": (1e-9 * X[:, :1], b)}, "poisson_log", prior=prior)
        q, p = alone.posterior(), both.posterior()
        for some, target in ((q, alone), (p, both)):
            fit(some, target, tolerance=1e-8, progress=False)
        effects, beta, omega = alone.rows.parts(q.mean)
        (own, _), own_beta, (own_omega, _) = both.rows.parts(p.mean)
        for x, y_ in ((effects, own), (beta, own_beta), (omega, own_omega)):
            torch.testing.assert_close(x, y_, rtol=0, atol=1e-6)

    def test_one_factor_is_the_mixed_model(self):
        X, y, _, a, _ = data()
        one, several = (
            MixedLogJoint(X, y, (X, a), "poisson_log"),
            MultilevelLogJoint(X, y, {"a": (X, a)}, "poisson_log"),
        )
        theta = torch.randn(3, one.dim)
        torch.testing.assert_close(several.log_joint(theta), one.log_joint(theta), rtol=1e-12, atol=0)

    def test_what_mixed_model_makes(self):
        X, y, _, a, b = data()
        several = MixedModel(X, y, [RandomEffects(X, a), RandomEffects(X[:, :1], b)], "poisson_log")
        assert isinstance(several, MultilevelModel)
        assert several.names == ("0", "1")
        prior = MixedPrior(sd={"a": HalfNormal(2.0)})
        one = MixedModel(X, y, {"a": (X[:, :1], a)}, "poisson_log", prior=prior)
        assert isinstance(one, MixedModel)
        assert one.covariance_prior.sd == [HalfNormal(2.0)]

    def test_many_members(self):
        target = model()
        q = target.posterior()
        V = target.structure.from_dense(q.covariance.detach())
        means = torch.stack([q.mean, q.mean + 0.1]).detach()
        value, g, H = target.moments(means, torch.stack([V, 2 * V]))
        for k in range(2):
            for one, many in zip(target.moments(means[k], (k + 1) * V), (value[k], g[k], H[k]), strict=True):
                torch.testing.assert_close(many, one, rtol=1e-12, atol=1e-12)


class TestForest:
    @pytest.mark.parametrize(
        ("groups", "chain", "root"),
        [
            (([0, 0, 1, 1], [0, 1, 2, 3]), (1, 0), ()),
            (([0, 0, 1, 1], [0, 1, 0, 1]), (0,), (1,)),
            (([0, 0, 1, 1], [0, 1, 2, 3], [0, 1, 0, 1]), (1, 0), (2,)),
            (([0, 0, 1, 1], [0, 0, 1, 1]), (0, 1), ()),
        ],
    )
    def test_nested_factors_are_levels_and_crossed_ones_stand_in_the_root(self, groups, chain, root):
        X = torch.ones(4, 1)
        random = [RandomEffects(X, some) for some in groups]
        assert MultilevelLogJoint(X, [1.0, 2, 0, 1], random, "poisson_log").rows.arrangement == (chain, root)

    def test_too_many_crossed_groups(self, monkeypatch):
        X, y, _, a, b = data()
        monkeypatch.setattr(multilevel_rows, "LARGEST_ROOT", 7)
        with pytest.raises(
            InputError, match=r"at most 7 rows, .* got 10 rows .* of 4 groups of 1 effect\. Leave out a"
        ):
            MultilevelLogJoint(X, y, {"a": (X, a), "b": (X[:, :1], b)}, "poisson_log")


def density(X, y, designs, omegas, log_sd, scale):
    """log N(y; 0, X X' s² + Σ Z Ω⁻¹ Z' + σ² I), each Z with a block for each group."""
    V = scale**2 * X @ X.mT + (2 * log_sd).exp() * torch.eye(len(y))
    for (Z, groups), omega in zip(designs, omegas, strict=True):
        root = torch.linalg.inv(root_of(omega, Z.shape[1])).mT
        same = groups[:, None] == groups
        V = V + same * ((Z @ root) @ (Z @ root).mT)
    return torch.distributions.MultivariateNormal(torch.zeros(len(y)), V).log_prob(y)


class TestGaussianNoise:
    def targets(self, shape):
        X, _, y, a, b = data(shape == "nested")
        random = {"a": (X if shape != "alike" else X[:, :1], torch.arange(N) % A if shape == "alike" else a)}
        random["b"] = (X[:, :1], b)
        joint = MultilevelLogJoint(X, y, random, GaussianNoise(0.5), prior=SCALES._replace(fixed_scale=10.0))
        return joint, GaussianMultilevel(joint, LearnedNoise()), (X, y, random)

    @pytest.mark.parametrize("shape", ["nested", "crossed", "alike"])
    def test_the_density_is_that_of_the_rows(self, shape):
        joint, target, (X, y, random) = self.targets(shape)
        assert (target.leaves is not None) == (shape == "alike")
        theta = (0.3 * torch.randn(3, target.dim)).requires_grad_()
        expected = []
        for one in theta:
            omegas = [one[at] for at in target.slices]
            prior = sum(of.energy(omega) for of, omega in zip(joint.priors, omegas, strict=True))
            prior = prior + target.learned.prior_energy(one[-1], target.parameter_prior)
            expected.append(density(X, y, random.values(), omegas, one[-1], 10.0) - prior)
        values = target.log_joint(theta)
        torch.testing.assert_close(values, torch.stack(expected), rtol=1e-9, atol=0)
        gradients = [torch.autograd.grad(some.sum(), theta)[0] for some in (values, torch.stack(expected))]
        torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-7)

    @pytest.mark.parametrize("shape", ["nested", "alike"])
    def test_effects_given_the_variances_are_those_of_the_joint_gaussian(self, shape):
        joint, target, _ = self.targets(shape)
        rows = joint.rows
        theta = torch.full((1, target.dim), 0.2)
        theta[0, -1] = -0.7
        given = joint.with_likelihood(GaussianNoise(float(theta[0, -1].exp())))
        at = torch.zeros(given.dim)
        at[rows.bare.dim :] = theta[0, :-1]
        # of (b, β) the log joint is quadratic: its mode and its Hessian are mean and precision
        some = at[: rows.bare.dim].requires_grad_()
        behind = at[rows.bare.dim :].detach()

        def energy(u):
            return -given.log_joint(torch.cat([u, behind]))

        H = torch.autograd.functional.hessian(energy, some)
        mean = -torch.linalg.solve(H, torch.autograd.grad(energy(some), some)[0])
        V = torch.linalg.inv(H)
        draws = 4000
        many, generator = theta.expand(draws, -1), torch.Generator().manual_seed(0)
        beta = target.fixed(many, generator)
        u = torch.cat([target.effects(many, beta, generator), beta], -1)
        z = (u.mean(0) - mean) / (V.diagonal() / draws).sqrt()
        assert z.abs().max() < 4.5
        white = (u - mean) @ torch.linalg.cholesky(H)
        assert (white.mT.cov() - torch.eye(len(mean))).abs().max() < 0.12

    def test_linear_response_and_the_bounds_agree_with_the_closed_form(self):
        """A Gaussian over all coordinates, with the residual sd explored, beside the exact posterior."""
        X, _, y, a, b = data(rows=240)
        prior = MixedPrior(10.0, "kass-natarajan")  # under which variances of few groups have no heavy tails
        one = MixedModel(X, y, {"a": (X[:, :1], a), "b": (X[:, :1], b)}, "gaussian", prior=prior)
        exact = one.fit(progress=False, draws=1000).summary()
        found = one.fit(progress=False, draws=1000, marginalise="response")
        table = found.summary()
        for ours, theirs in ((table.fixed, exact.fixed), (table.likelihood, exact.likelihood)):
            assert ((ours.mean - theirs.mean) / theirs.sd).abs().max() < 0.15
            assert (ours.sd / theirs.sd - 1).abs().max() < 0.15
        of, its = table.random["a"].sd, exact.random["a"].sd
        assert ((of.mean - its.mean) / its.sd).abs().max() < 0.5
        assert "the residual sd by the bounds at" in found.method

    def test_the_truth_is_inside(self):
        generator = torch.Generator().manual_seed(3)
        a, b = torch.arange(600) % 40, torch.arange(600) // 20
        effects = [sd * torch.randn(n, generator=generator) for sd, n in ((0.5, 40), (1.0, 30))]
        y = 2.0 + effects[0][a] + effects[1][b] + 0.4 * torch.randn(600, generator=generator)
        X = torch.ones(600, 1)
        result = MixedModel(X, y, {"a": (X, a), "b": (X, b)}, "gaussian").fit(progress=False, draws=500)
        table = result.summary()
        assert isinstance(result.model, MultilevelModel)
        for found, truth in (
            (table.fixed, 2.0),
            (table.likelihood, 0.4),
            (table.random["a"].sd, 0.5),
            (table.random["b"].sd, 1.0),
        ):
            assert found.low < truth < found.high
        apart = torch.stack([of.mean for of in result.random["a"]])[0] - effects[0]
        assert apart.std() < 0.2


class TestSample:
    @pytest.mark.parametrize("family", ["gaussian", "poisson_log"])
    def test_draws_of_the_globals_are_those_of_the_table(self, family):
        """(β, ω, log of the residual sd), weighted where fixed and random effects are integrated out."""
        X, counts, y, a, b = data()
        noisy = family == "gaussian"
        of = MixedModel(X, y if noisy else counts, {"a": (X, a), "b": (X[:, :1], b)}, family)
        result = of.fit(progress=False, draws=500, marginalise=None if noisy else "none")
        assert bool((result.weighted.weights.diff() == 0).all()) != noisy
        theta = result.sample(20_000, torch.Generator().manual_seed(0))
        assert theta.shape == (20_000, X.shape[1] + 3 + 1 + noisy)
        table, sds = result.summary(), {"a": (2, 5, 2), "b": (5, 6, 1)}
        pairs = [(theta[:, :2], table.fixed)]
        pairs += [(scales_of(theta[:, i:j], r)[0], table.random[key].sd) for key, (i, j, r) in sds.items()]
        if noisy:
            pairs.append((theta[:, 6:].exp(), table.likelihood))
        for draws, marginals in pairs:
            torch.testing.assert_close(draws.mean(0), marginals.mean, rtol=0, atol=1e-3)
            torch.testing.assert_close(draws.std(0), marginals.sd, rtol=1e-2, atol=0)
        again = [result.sample(9, torch.Generator().manual_seed(1)) for _ in range(2)]
        assert torch.equal(*again)
        with pytest.raises(InputError, match=r"^n is a number of draws and must be a whole number"):
            result.sample(0)


class TestProfile:
    def test_a_spline_of_a_parabola(self):
        x = torch.linspace(-3, 3, 13)
        at = torch.linspace(-2, 2, 50)
        assert (splined(x, -0.5 * x.square(), at) + 0.5 * at.square()).abs().max() < 0.01

    def test_draws_of_a_normal_density(self):
        x = torch.linspace(-5, 5, 21)
        profile = Profile(x, -0.5 * x.square(), torch.stack([x, 2 * x], 1))
        phi = profile.draw(4000, torch.Generator().manual_seed(0))
        assert abs(phi.mean()) < 0.01
        assert abs(phi.std() - 1) < 0.02
        assert abs(profile.log_evidence - 0.5 * np.log(2 * np.pi)) < 0.01
        torch.testing.assert_close(profile.mean_at(phi), torch.stack([phi, 2 * phi], 1))
        assert abs(profile.log_prob(torch.zeros(1)) + 0.5 * np.log(2 * np.pi)) < 0.01


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(2)
    rows, schools, classes = 240, 6, 4
    school, room, item = rng.integers(0, schools, rows), rng.integers(0, classes, rows), rng.integers(0, 5, rows)
    x = rng.normal(size=rows)
    y = 1 + 0.4 * x + 0.7 * rng.normal(size=schools)[school] + 0.5 * rng.normal(size=(schools, classes))[school, room]
    y = y + 0.3 * rng.normal(size=5)[item] + 0.5 * rng.normal(size=rows)
    counts = rng.poisson(np.exp(0.5 * y))
    days = pandas.Timestamp("2026-01-01") + pandas.to_timedelta(np.arange(rows), unit="D")
    names = {"school": [f"s{k}" for k in school], "room": room, "item": [f"i{k}" for k in item]}
    return pandas.DataFrame({"y": y, "x": x, "counts": counts, "day": days, **names})


@pytest.fixture(scope="module")
def result(table):
    torch.set_default_dtype(torch.float64)
    return mixed("counts ~ x + (1 | school/room) + (1 | item)", table, "poisson").fit(progress=False, draws=500)


class TestFormulas:
    def test_a_slash_is_two_factors(self, table):
        short, long = (
            Formula(f"y ~ x + {text}", table) for text in ("(1 | school/room)", "(1 | school) + (1 | school:room)")
        )
        assert list(short.groupings) == list(long.groupings) == ["school", "school:room"]
        for name, of in short.rows.random.items():
            np.testing.assert_array_equal(of.Z, long.rows.random[name].Z)
            np.testing.assert_array_equal(of.groups, long.rows.random[name].groups)
        assert short.groupings["school:room"].levels[0] == "s0:0"

    def test_two_bars_are_independent_effects(self, table):
        made = Formula("y ~ x + (1 + x || school) + (0 + x | item)", table)
        names = {name: grouping.random for name, grouping in made.groupings.items()}
        assert names == {"school": ["Intercept"], "school.x": ["x"], "item": ["x"]}
        np.testing.assert_array_equal(made.rows.random["school.x"].Z[:, 0], table.x)
        same = Formula("y ~ x + (1 | school) + (0 + x | school)", table)
        assert list(same.groupings) == ["school", "school.x"]
        correlated = Formula("y ~ x + (1 + x | school)", table)
        assert correlated.random == ["Intercept", "x"]
        mixed("y ~ x + (1 + x || school)", table).model.posterior()  # nested in itself

    def test_dates(self, table):
        with pytest.raises(InputError, match=r"^column 'day' holds dates or times such as '2026-01-01.*dt\.days"):
            Formula("y ~ day + (1 | school)", table)

    def test_a_fit(self, table, result):
        text = str(result)
        assert "groups: 6 of school, 24 of school:room, 5 of item" in text
        assert "standard deviations of random effects, school:room" in text
        assert result.random["item"][0].names == ("i0", "i1", "i2", "i3", "i4")
        assert result.converged

    def test_predictions_of_tables(self, table, result):
        new = table.head(3).drop(columns=["y", "counts"]).assign(school=["s0", "s0", "elsewhere"])
        known, fresh = result.predict(new), result.predict(new.drop(columns=["school", "room", "item"]))
        assert known.sd[0] < fresh.sd[0]
        assert known.sd[1] < known.sd[2]
        draws, rows = result.draws(), result.designs(new)
        eta = draws.fixed @ torch.as_tensor(rows.X).mT
        for name, of in rows.random.items():
            eta = eta + draws.effects[name][:, np.maximum(of.groups, 0), 0]
        torch.testing.assert_close(known.draws[:, :2], eta[:, :2].exp())

    def test_pickles_and_copies(self, table, result):
        again = pickle.loads(pickle.dumps(result))
        assert torch.equal(again.predict(table.head(2)).mean, result.predict(table.head(2)).mean)
        assert copy.copy(result.model).dim == result.model.dim

    def test_arviz(self, result):
        pytest.importorskip("arviz")
        posterior = result.to_arviz().posterior
        assert posterior["b_item"].dims == ("chain", "draw", "item", "random_item")
        assert posterior["sd_school"].shape[-1] == 1
        assert posterior["b_item"].coords["item"].to_numpy().tolist() == ["i0", "i1", "i2", "i3", "i4"]

    def test_a_plot(self, result):
        assert result.plot_effects("item", "Intercept").get_xlabel() == "item: Intercept"

    def test_from_a_shell(self, table, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        table.drop(columns="day").to_csv("t.csv", index=False)
        flags = ["--formula", "counts ~ x + (1 | school) + (1 | item)", "--family", "poisson", "--no-progress"]
        assert main(["fit", "--data", "t.csv", *flags]) == 0
        parameters = read_frame(tmp_path / "runs" / "t" / "parameters.csv")
        assert parameters.kind.tolist() == ["fixed effect", "fixed effect", "sd of school", "sd of item"]
        effects = read_frame(tmp_path / "runs" / "t" / "effects.csv")
        assert effects.effect.unique().tolist() == ["school: Intercept", "item: Intercept"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("random", "sentence"),
        [
            ({}, r"a dict from the name of each grouping factor, a string"),
            ({1: None, 2: None}, r"a dict from the name of each grouping factor, .* got \[1, 2\]"),
            ({"a": 1, "b": 2}, r"the random effects of a are a pair of a design and groups, .* got a int"),
            ({"a": ([[1.0]], [0, 0]), "b": ([[1.0]], [0])}, r"of the grouping factor a: Z must have one row for each"),
        ],
    )
    def test_random(self, random, sentence):
        with pytest.raises(InputError, match=sentence):
            MultilevelLogJoint(torch.ones(2, 1), [0.0, 1.0], random)

    @pytest.mark.parametrize(
        ("prior", "sentence"),
        [
            (MixedPrior(sd={"c": HalfNormal()}), r"sd of the prior is given for c; the grouping factors are a, b"),
            (MixedPrior(sd=HalfNormal(), precision=Wishart(3.0, 1.0)), r"the random effects of a have one prior: give"),
            (
                MixedPrior(sd={"b": [HalfNormal()] * 2}),
                r"of the grouping factor b: sd must be one prior, or one for each",
            ),
            (MixedPrior(precision={"b": Wishart(-1.0, 1.0)}), r"of the grouping factor b: the degrees of freedom"),
            (MixedPrior(fixed_scale=-1.0), r"fixed_scale is the prior standard deviation of a fixed effect"),
        ],
    )
    def test_priors(self, prior, sentence):
        with pytest.raises(InputError, match=sentence):
            model(prior=prior)

    def test_a_prior_by_name_of_the_only_factor(self):
        X, y, _, a, _ = data()
        with pytest.raises(InputError, match="^sd of the prior is given for b; the grouping factors are a"):
            MixedModel(X, y, {"a": (X, a)}, prior=MixedPrior(sd={"b": HalfNormal()}))
        with pytest.raises(InputError, match="^sd of the prior is given for b; the grouping factors are group"):
            MixedModel(X, y, (X, a), prior=MixedPrior(sd={"b": HalfNormal()}))

    def test_settings(self, result):
        X, y, _, a, b = data()
        of = MixedModel(X, y, {"a": (X, a), "b": (X[:, :1], b)}, "poisson_log")
        for settings, sentence in (
            ({"marginalise": "quadrature"}, "is done where noise is Gaussian; the likelihood is PoissonLog"),
            ({"marginalise": "all"}, "marginalise must be quadrature, response or none; got 'all'"),
            (
                {"draws": 10},
                "draws counts draws, which are to say something about a tail, and must be a whole number, at least 100",
            ),
            ({"max_seconds": 0}, "max_seconds bounds the time and must be positive"),
        ):
            with pytest.raises(InputError, match=sentence):
                of.fit(progress=False, **settings)

    def test_new_rows_and_names(self, table, result):
        X, Z = torch.ones(1, 2), torch.ones(1, 1)
        with pytest.raises(InputError, match=r"each grouping factor, school, school:room, item, .* got item\."):
            result.predict(X, {"item": (Z, None)})
        every = dict.fromkeys(result.model.names, (Z, [99]))
        with pytest.raises(InputError, match="of the grouping factor school: groups of new rows must be those of the"):
            result.predict(X, every)
        with pytest.raises(InputError, match="the grouping factors are school, school:room, item; got 'x'"):
            result.plot_effects("x")
        with pytest.raises(InputError, match=r"random\['item'\] must be 1 names"):
            result.named(random={"item": ["a", "b"]})
        with pytest.raises(InputError, match="kind must be one of mean"):
            result.predict(table, kind="all")

    def test_budgets(self):
        X, y, _, a, b = data()
        of = MixedModel(X, y, {"a": (X, a), "b": (X[:, :1], b)}, "poisson_log")
        assert not of.fit(progress=False, max_evaluations=1, draws=100).converged
        assert "NOT CONVERGED" in str(of.fit(progress=False, max_seconds=1e-9, draws=100))
        one = MixedModel(X, y, (X[:, :1], a), "poisson_log")
        assert not one.fit(progress=False, max_evaluations=1, marginalise="none", draws=100).converged


QUICK = {"progress": False, "draws": 100, "max_evaluations": 1, "marginalise": "none"}


class TestRemarks:
    def test_columns_that_depend(self):
        X, y, _, a, b = data()
        twice = torch.cat([X, X[:, 1:]], 1)
        sentence = r"^Column 2 is 1 in other units, a multiple of it plus a constant: the data cannot .* Leave one of"
        for random in ((X[:, :1], a), {"a": (X[:, :1], a), "b": (X[:, :1], b)}):
            with pytest.warns(UserWarning, match=sentence):
                MixedModel(twice, y, random, "poisson_log").fit(**QUICK)

    @pytest.mark.parametrize(("n", "words"), [(1, "1 group, which tells next"), (2, "2 groups, which tell next")])
    def test_hardly_any_groups(self, n, words):
        X, y, _, a, _ = data()
        few = torch.arange(N) % n
        one, several = (X[:, :1], few), {"a": (X[:, :1], a), "few": (X[:, :1], few)}
        for random, name in ((one, ""), (several, " few")):
            sentence = f"^The grouping factor{name} has {words} to nothing of a standard deviation"
            with pytest.warns(UserWarning, match=sentence):
                MixedModel(X, y, random, "poisson_log").fit(**QUICK)

    def test_separated_classes(self):
        X, _, _, a, _ = data()
        result = MixedModel(X, (X[:, 1] > 0).double(), (X[:, :1], a)).fit(progress=False, draws=500)
        assert "The data hardly bound 1: sd" in str(result)

    @pytest.mark.accuracy
    def test_counts_that_are_not_overdispersed(self):
        X, y, _, a, b = data()
        calm = MixedModel(X, torch.full((N,), 2.0), (X[:, :1], a), "negative_binomial").fit(progress=False, draws=500)
        sentence = "The posterior of the size has a tail so heavy that its mean and sd say nothing"
        assert sentence in str(calm)
        wild = MixedModel(X, y**2, {"a": (X[:, :1], a), "b": (X[:, :1], b)}, "negative_binomial")
        assert sentence not in str(wild.fit(progress=False, draws=500))


def test_tables_by_factor(result):
    """Of several factors, sds and correlations are dicts from their names, which say what the names are."""
    table = result.summary()
    assert list(table.sd) == list(table.correlation) == list(table.random)
    for name, of in table.random.items():
        assert table.sd[name] is of.sd
        assert table.correlation[name] is of.correlation
    names = ", ".join(table.random)
    for found in (table.random, table.sd, result.random):
        with pytest.raises(InputError, match=f"^the grouping factors are {names}; got 'foo'\\.$"):
            found["foo"]


def test_no_rows_of_a_table_to_predict(result, table):
    with pytest.raises(InputError, match=r"a prediction is of at least one row; the table, or X, has none\.$"):
        result.predict(table.iloc[:0])
