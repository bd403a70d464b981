"""`MixedResult.leave_one_group_out`, and mixed models in `torchngvi.compare_models`."""

import math

import pytest
import torch

from torchngvi import CholeskyGaussian, GeneralizedLinear, MixedModel, compare_models, fit, leave_one_out
from torchngvi.errors import InputError
from torchngvi.mixed_models import left_out
from torchngvi.mixed_models.left_out import _marginal, _reweighed
from torchngvi.models import GaussianNoise, HalfNormal, MarginalMixed, MixedLogJoint, MixedPrior
from torchngvi.models.mixed_prior import root_of

DTYPE, GROUPS, EACH = torch.float64, 12, 6
G = torch.arange(GROUPS * EACH) // EACH


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))


X = torch.stack([torch.ones(len(G), dtype=DTYPE), randn(len(G), seed=1)], 1)
ETA = X @ torch.tensor([0.3, 0.5], dtype=DTYPE) + 0.8 * randn(GROUPS, seed=2)[G]
Y = {
    "gaussian": ETA + 0.5 * randn(len(G), seed=3),
    "poisson": torch.poisson(ETA.exp(), generator=torch.Generator().manual_seed(4)),
    "bernoulli": (torch.rand(len(G), generator=torch.Generator().manual_seed(5)) < ETA.sigmoid()).to(DTYPE),
}


def model(family, **more):
    return MixedModel(X, Y[family], (X[:, :1], G), family, **more)


def test_of_groups_adds_up_and_is_the_density_of_normal_groups():
    """log N(y_i; X_iβ, Z_iΩ⁻¹Z_iᵀ + σ²), with slopes too."""
    prior = MixedPrior(10.0, "kass-natarajan")  # for the columns as they are
    of_all = MarginalMixed(MixedLogJoint(X, Y["gaussian"], (X, G), GaussianNoise(0.5), prior=prior))
    theta = 0.3 * randn(7, of_all.dim, seed=6)
    found = of_all.of_groups(theta)
    torch.testing.assert_close(found.sum(-1), of_all.data(theta), atol=1e-10, rtol=0)
    beta, omega = of_all.parts(theta)
    W = root_of(omega, 2)
    for s in range(7):
        V = torch.linalg.inv(W[s] @ W[s].mT)
        for i in (0, 5):
            rows = i == G
            cov = X[rows] @ V @ X[rows].mT + 0.25 * torch.eye(EACH, dtype=DTYPE)
            truth = torch.distributions.MultivariateNormal(X[rows] @ beta[s], cov).log_prob(Y["gaussian"][rows])
            assert found[s, i].item() == pytest.approx(truth.item(), abs=1e-9)


def test_a_group_of_no_weight_was_left_out_anyway():
    """Its density is the same in and out, and that which a fit to all rows has when it leaves the group out."""
    prior = MixedPrior(sd=HalfNormal(1.0))
    weights = torch.where(G == 3, 0.0, torch.ones(len(G), dtype=DTYPE))
    found = model("poisson", weights=weights, prior=prior).fit(progress=False).leave_one_group_out()
    assert found.density[3].item() == pytest.approx(found.in_sample[3].item(), abs=1e-3)  # smoothed again
    whole = model("poisson", prior=prior).fit(progress=False).leave_one_group_out()
    assert found.density[3].item() == pytest.approx(whole.density[3].item(), abs=0.02)
    assert found.density[3] < -5


@pytest.mark.accuracy
@pytest.mark.parametrize("family", ["gaussian", "poisson"])
def test_densities_are_of_rows_without_their_weights(family):
    """As those of `leave_one_out` are: rows of weight 2 are in the posterior twice, and in the density once."""
    weights = torch.where(G < 4, 2.0, torch.ones(len(G), dtype=DTYPE))
    result = model(family, weights=weights).fit(progress=False)
    found, truth = result.leave_one_group_out(), result.leave_one_group_out(worst=0.0)
    kept = ~found.resolved
    assert kept.sum() >= GROUPS - 3
    assert (found.density - truth.density)[kept].abs().max() < 0.05
    of_all = _marginal(result.locals.target)
    as_they_are = _reweighed(of_all, torch.ones_like(weights)).of_groups(result.weighted.theta)
    told = (result.weighted.weights.log()[:, None] + as_they_are).logsumexp(0)
    torch.testing.assert_close(found.in_sample, told, atol=1e-10, rtol=0)
    twice = of_all.of_groups(result.weighted.theta)
    assert (twice[:, 5] == as_they_are[:, 5]).all()
    assert (twice[:, 0] < as_they_are[:, 0] - 1).all()


def test_inference_mode():
    result = model("bernoulli").fit(progress=False)
    with torch.inference_mode():
        inside = result.leave_one_group_out(worst=0.3)
    assert torch.equal(inside.density, result.leave_one_group_out(worst=0.3).density)


def test_weights_are_smoothed_for_a_few_groups_at_a_time(monkeypatch):
    result = model("poisson").fit(progress=False)
    whole = result.leave_one_group_out()
    monkeypatch.setattr(left_out, "_AT_ONCE", 5 * len(result.weighted.theta))
    parts = result.leave_one_group_out()
    torch.testing.assert_close(parts.density, whole.density, atol=1e-12, rtol=0)
    torch.testing.assert_close(parts.k_hat, whole.k_hat, atol=1e-12, rtol=0)


@pytest.mark.accuracy
@pytest.mark.parametrize("family", sorted(Y))
def test_against_fits_without_each_group(family):
    """Both by 4,096 draws; a model that is made without the group would have another prior of Ω."""
    result = model(family).fit(progress=False)
    found = result.leave_one_group_out()
    truth = result.leave_one_group_out(worst=0.0)
    assert truth.resolved.all()
    assert truth.evaluations > GROUPS
    kept = ~found.resolved
    assert kept.sum() >= GROUPS - 3
    assert (found.density - truth.density)[kept].abs().max() < 0.05
    assert (found.density < found.in_sample + 1e-9).all()
    assert 0 < found.complexity < 6
    text = str(found)
    assert text.startswith("elpd ")
    assert f"nats over {GROUPS} groups" in text
    assert repr(found).startswith("<GroupsLeftOut: elpd")


def test_it_equals_a_model_of_the_other_groups():
    """One that is made of them alone, under a prior of the variance that is given; the group is then a new one."""
    prior = MixedPrior(10.0, sd=HalfNormal(1.0))
    result = model("poisson", prior=prior).fit(progress=False)
    found = result.leave_one_group_out()
    keep = G != 7
    others = G[keep] - (G[keep] > 7).long()
    less = MixedModel(X[keep], Y["poisson"][keep], (X[keep, :1], others), "poisson", prior=prior).fit(progress=False)
    alone = MarginalMixed(
        MixedLogJoint(X[~keep], Y["poisson"][~keep], (X[~keep, :1], G[~keep] - 7), "poisson", prior=prior), 25
    )
    log_p = alone.of_groups(less.weighted.theta)[:, 0]
    truth = (less.weighted.weights.log() + log_p).logsumexp(0).item()
    assert found.density[7].item() == pytest.approx(truth, abs=0.03)


def test_a_fit_over_all_coordinates_is_refused():
    result = model("poisson").fit(marginalise="none", progress=False)
    with pytest.raises(InputError, match=r"needs the likelihood of each group.*fit with marginalise='quadrature'"):
        result.leave_one_group_out()
    integrated = model("poisson").fit(progress=False)
    with pytest.raises(InputError, match="worst bounds a k-hat and must be 0 or larger; got nan"):
        integrated.leave_one_group_out(worst=math.nan)
    with pytest.raises(InputError, match="worst bounds a k-hat and must be a number; got 'high'"):
        integrated.leave_one_group_out(worst="high")
    with pytest.raises(InputError, match="seed"):
        integrated.leave_one_group_out(seed="a")


@pytest.mark.accuracy
def test_comparison_with_and_without_effects_of_groups():
    plain = GeneralizedLinear(X, Y["poisson"], "poisson", prior_precision=0.01)
    q = CholeskyGaussian(2, dtype=DTYPE)
    fit(q, plain, progress=False)
    mixed = model("poisson").fit(progress=False)
    found = compare_models({"plain": (q, plain), "mixed": mixed})
    assert found.names == ("mixed", "plain")
    assert found.loo[0].density.tolist() == mixed.leave_one_group_out().density.tolist()
    assert found.loo[1].density.tolist() == leave_one_out(q, plain, groups=G).density.tolist()
    assert found.elbo[0].item() == mixed.elbo
    assert found.certificate[0] == math.inf
    assert "With 12 groups standard errors are too small" in str(found)
    rows = compare_models({"one": (q, plain), "two": (q, plain)}, groups=G)
    assert len(rows.loo[0].density) == GROUPS
    with pytest.raises(InputError, match="leaves out the same groups of all models"):
        compare_models({"plain": (q, plain), "mixed": mixed}, groups=G.flip(0))
    with pytest.raises(InputError, match="leaves out the same groups of all models"):
        compare_models(
            {"mixed": mixed, "other": MixedModel(X, Y["poisson"], (X[:, :1], G.flip(0)), "poisson").fit(progress=False)}
        )
