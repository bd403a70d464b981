"""The published models of the benchmark: log joints against definitions, truths against closed forms."""

import itertools
import math

import pytest
import torch
from torch import distributions as dist

pytest.importorskip("benchmarks", reason="needs the benchmarks of a clone: run python -m pytest in its root")

from benchmarks.published import MODELS, hierarchies, mixtures, nuts, series  # noqa: E402
from benchmarks.published.__main__ import counted, main, worst  # noqa: E402
from benchmarks.published.model import Model, of_modes  # noqa: E402
from benchmarks.truths.target import Truth, normal  # noqa: E402


def points(model, count=5, scale=0.4):
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(count, model.dim, generator=generator, dtype=torch.float64)


def constant(difference):
    return float((difference - difference[0]).abs().max()) < 1e-9 * max(1.0, float(difference.abs().max()))


@pytest.mark.accuracy
def test_every_model_is_batched_with_finite_gradients_and_has_a_truth():
    for model in MODELS.values():
        theta = points(model, scale=0.2).requires_grad_()
        value = model.log_joint(theta)
        (gradient,) = torch.autograd.grad(value.sum(), theta)
        assert bool(gradient.isfinite().all()), model.name
        alone = torch.stack([model.log_joint(row) for row in theta])
        assert torch.allclose(value, alone, rtol=1e-12, atol=0), model.name
        known = model.truth is not None or len(nuts.kept()[model.name]["mean"]) == model.dim
        assert known, model.name


def test_the_moments_that_are_kept_are_those_of_the_runs_and_have_mixed():
    assert {*nuts.kept()} == {*nuts.RUNS, *nuts.UNORDERED.values()}
    for name, found in nuts.kept().items():
        assert found["r_hat"] < 1.01
        assert min(nuts.truth(MODELS[name]).sd) > 0
        assert "effective draws" in nuts.told(name)


def test_cafes_are_their_definition():
    model, (cafe, afternoon, wait) = MODELS["cafés"], hierarchies.waits()
    theta = points(model)
    expected = []
    for row in theta:
        a, b, log_a, log_b, arc, log_s = row[:6]
        rho, sds = arc.tanh(), torch.stack([log_a, log_b]).exp()
        correlation = torch.stack([torch.stack([torch.ones_like(rho), rho]), torch.stack([rho, torch.ones_like(rho)])])
        effects = dist.MultivariateNormal(torch.stack([a, b]), sds[:, None] * correlation * sds)
        each = row[6:].reshape(2, -1).mT
        factor = torch.linalg.cholesky(correlation)
        lkj = dist.LKJCholesky(2, torch.tensor(2.0).double()).log_prob(factor)
        # the density of a factor is one over ρ for D = 2: its only free entry
        value = lkj + (1 - rho.square()).log() + dist.Normal(5.0, 2.0).log_prob(a) + dist.Normal(-1.0, 0.5).log_prob(b)
        for log_sd in (log_a, log_b, log_s):
            value = value + dist.Exponential(torch.ones_like(a)).log_prob(log_sd.exp()) + log_sd
        mean = each[cafe, 0] + each[cafe, 1] * afternoon
        expected.append(value + effects.log_prob(each).sum() + dist.Normal(mean, log_s.exp()).log_prob(wait).sum())
    assert constant(model.log_joint(theta) - torch.stack(expected))


def test_the_mixture_is_its_definition_in_both_forms():
    model, x = MODELS["mixture of 60, ordered"], mixtures.sample(60)
    theta = points(model)
    mu, log_tau, sticks = theta.split([3, 3, 2], -1)
    means = torch.cat([mu[:, :1], mu[:, 1:].exp()], -1).cumsum(-1)
    w = dist.StickBreakingTransform()(sticks - torch.tensor([2.0, 1.0]).double().log().neg())
    parts = dist.Normal(means[:, None], (-0.5 * log_tau).exp()[:, None])
    likelihood = dist.MixtureSameFamily(dist.Categorical(w[:, None]), parts).log_prob(x).sum(-1)
    prior = dist.Normal(0.0, 10.0).log_prob(means).sum(-1) + mu[:, 1:].sum(-1)
    prior = prior + (dist.Gamma(torch.ones(1).double(), torch.ones(1).double()).log_prob(log_tau.exp()) + log_tau).sum(
        -1
    )
    stick = torch.sigmoid(sticks)
    volume = (stick * (1 - stick)).log().sum(-1) + (1 - stick[:, 0]).log()  # of w by the logits of the sticks
    assert torch.allclose(torch.stack([stick[:, 0], (1 - stick[:, 0]) * stick[:, 1]], -1), w[:, :2])
    assert constant(model.log_joint(theta) - likelihood - prior - volume)


def test_a_draw_of_the_ordered_mixture_is_six_of_that_without_order():
    ordered, free = mixtures.mixture(60), mixtures.mixture(60, ordered=False)
    theta = points(ordered, 1)[0]
    images = mixtures.without_order(theta[None])
    jacobians = torch.autograd.functional.jacobian(lambda t: mixtures.without_order(t[None]), theta)
    for image, jacobian in zip(images, jacobians, strict=True):
        found = free.log_joint(image) + torch.linalg.slogdet(jacobian)[1]
        assert float(found) == pytest.approx(float(ordered.log_joint(theta)), abs=1e-9)
    assert len({tuple(row[:3].tolist()) for row in images}) == 6


def test_the_levels_of_the_nile_are_smoothed_as_a_normal_is_conditioned():
    hyper = torch.tensor([[0.2, -0.9], [-0.3, 0.4]], dtype=torch.float64)
    evidence, mean, variance, neighbours = series.smoothed(hyper)
    y = series._flow()
    for g, (noise, step) in enumerate((2 * hyper).exp().tolist()):
        t = torch.arange(len(y)).double()
        prior = 25.0 + step * torch.minimum(t[:, None], t)
        total = prior + noise * torch.eye(len(y)).double()
        gain = torch.linalg.solve(total, prior).mT
        covariance = prior - gain @ prior
        exact = dist.MultivariateNormal(torch.zeros_like(y), total).log_prob(y)
        assert float(evidence[g]) == pytest.approx(float(exact), rel=1e-10)
        assert torch.allclose(mean[g], gain @ y, atol=1e-9)
        assert torch.allclose(variance[g], covariance.diagonal(), atol=1e-9)
        assert torch.allclose(neighbours[g], covariance.diagonal(1), atol=1e-9)


def test_the_forms_of_the_nile_are_one_model():
    steps, levels, marginal = (MODELS[f"Nile, {form}"] for form in ("non-centred", "centred", "marginal"))
    theta = points(steps)
    hyper, first, rest = theta.split([2, 1, 99], -1)
    path = torch.cat([hyper, first, first + hyper[:, 1:].exp() * rest.cumsum(-1)], -1)
    assert torch.allclose(levels.log_joint(path), steps.log_joint(theta) - 99 * hyper[:, 1], rtol=1e-12)
    mean = series.smoothed(hyper[:1])[1]  # given the sds the levels are normal: Bayes' rule at their mean
    exact = levels.log_joint(torch.cat([hyper[:1], mean], -1))
    root = torch.linalg.cholesky(
        -torch.autograd.functional.hessian(lambda x: levels.log_joint(torch.cat([hyper[0], x])), mean[0])
    )
    whole = exact - root.diagonal().log().sum() + 50 * math.log(2 * math.pi)
    assert float(whole) == pytest.approx(float(marginal.log_joint(hyper[:1])), rel=1e-9)


def test_sparse_regression_is_the_model_of_pyro():
    pyro = pytest.importorskip("pyro")
    from pyro import distributions as of

    X, Y = hierarchies.sparse_data()
    model = MODELS["sparse regression"]

    def one(value):
        return torch.tensor(value, dtype=torch.float64)

    def written():  # after Pyro's examples/sparse_regression.py
        sigma = pyro.sample("sigma", of.HalfNormal(one(1.0)))
        eta1 = pyro.sample("eta1", of.HalfCauchy(sigma * (3 / one(60.0).sqrt()) / (8 - 3)))
        msq = pyro.sample("msq", of.InverseGamma(one(3.0), one(1.0)))
        xisq = pyro.sample("xisq", of.InverseGamma(one(3.0), one(1.0)))
        eta2 = eta1.square() * xisq.sqrt() / msq
        lam = pyro.sample("lambda", of.HalfCauchy(torch.ones(8).double()).to_event(1))
        kX = msq.sqrt() * lam / (msq + (eta1 * lam).square()).sqrt() * X
        k = 0.5 * eta2**2 * (1 + kX @ kX.mT).square() - 0.5 * eta2**2 * (kX.square() @ kX.square().mT)
        k = k + (eta1**2 - eta2**2) * (kX @ kX.mT) + 1 - 0.5 * eta2**2
        k = k + (1e-4 + sigma**2) * torch.eye(60).double()
        pyro.sample("Y", of.MultivariateNormal(torch.zeros(60).double(), covariance_matrix=k), obs=Y)

    theta, expected = points(model), []
    for row in theta:
        values = dict(zip(("sigma", "eta1", "msq", "xisq"), row[:4].exp(), strict=True), **{"lambda": row[4:].exp()})
        trace = pyro.poutine.trace(pyro.condition(written, data=values)).get_trace()
        expected.append(trace.log_prob_sum() + row.sum())
    assert constant(model.log_joint(theta) - torch.stack(expected).detach())


def test_influenza_begins_as_a_small_outbreak_and_ends_below_the_peak_that_is_known():
    beta, gamma = torch.tensor(1.7, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    infected = series._ill(beta, gamma)
    assert infected.shape == (14,)
    assert float(infected[0]) == pytest.approx(math.exp(1.2), rel=0.01)
    ratio = 763 * float(gamma / beta)  # S at the peak; I + S - ratio log S is kept (Kermack and McKendrick 1927)
    peak = 763 - ratio + ratio * math.log(ratio / 762)
    assert 0.95 * peak < float(infected.max()) <= peak  # the days are whole, the peak falls between two


def test_the_data_are_the_published_ones():
    coal = series.vectors(series.COAL.replace("\n", " "))
    assert (len(coal), float(coal.sum())) == (112, 191.0)  # Jarrett's 191 disasters of 1851 to 1962
    assert float(series._flow().mean() * 100 + 900) == pytest.approx(919.35)
    assert float(series.vectors(series.ILL).max()) == 298


def test_modes_far_apart_are_one_truth():
    def log_joint(theta):
        return torch.logsumexp(
            torch.stack(
                [
                    normal(theta[..., 0], -20.0, 1.0) + torch.tensor(0.75).log(),
                    normal(theta[..., 0], 20.0, 2.0) + torch.tensor(0.25).log(),
                ]
            ),
            0,
        )

    found = of_modes(log_joint, ([-24.0], [-16.0]), ([12.0], [28.0]))()
    assert float(found.mean) == pytest.approx(-10.0, abs=1e-4)
    assert float(found.sd) == pytest.approx((0.75 * 1 + 0.25 * 4 + 0.75 * 100 + 0.25 * 900) ** 0.5, rel=1e-4)
    assert found.log_evidence == pytest.approx(0.0, abs=1e-5)


def test_the_worst_coordinate_is_found_and_named():
    model = Model("two", "", ("a", "b"), lambda theta: theta.sum(-1))
    known = Truth(torch.zeros(2).double(), torch.ones(2).double(), 0.0, 0.0)
    off = worst(model, known, torch.tensor([0.1, -0.3]).double(), torch.tensor([2.0, 0.8]).double())
    assert off == (["0.50, a", "-0.30, b"], True)
    assert worst(model, known, known.mean, known.sd) == (["1.00, a", "+0.00, a"], False)


def test_wrong_fits_are_counted_by_their_words(capsys):
    one = {"fit": (True, "fits")}
    two = {"fit": (True, "does not fit"), "refine": (False, "fits")}
    counted([one, two, two])
    assert capsys.readouterr().out.splitlines() == [
        "fit, wrong: 2 does not fit, 1 fits",
        "fit, right: none",
        "refine, wrong: none",
        "refine, right: 2 fits",
    ]


def test_chains_give_the_moments_of_quadrature():
    pytest.importorskip("pyro")
    model = MODELS["m9.3"]
    known = model.truth()
    draws = torch.stack(
        [
            known.mean + known.sd * torch.randn(2000, 2, generator=g, dtype=torch.float64)
            for g in map(torch.Generator().manual_seed, (0, 1))
        ]
    )
    found = nuts.moments(draws)
    assert found["r_hat"] < 1.01
    assert found["ess"] > 2000
    assert torch.allclose(torch.tensor(found["mean"]).double(), known.mean, atol=0.06)
    assert torch.allclose(torch.tensor(found["sd"]).double(), known.sd, rtol=0.05)


def test_the_table_has_a_line_a_model_and_seed(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["published", "--only", "monks", "--seeds", "0", "1"])
    main()
    lines = capsys.readouterr().out.splitlines()
    table, counts = lines[:4], lines[5:]
    assert len(counts) == 4
    assert {line.count("|") for line in table} == {11}
    assert all(
        line.startswith(f"| monks, {seed} | 2 |") for seed, line in zip(itertools.count(), table[2:], strict=False)
    )


def test_the_sources_of_the_truths_are_told(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["published", "--truths", "--only", "m9.3", "60"])
    main()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("m9.3: McElreath")
    assert "quadrature, error" in first
    assert "NUTS, R-hat 1.007" in second
