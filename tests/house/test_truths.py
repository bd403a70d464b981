"""The true moments of the benchmarks: by quadrature against importance sampling, and identities between the forms."""

import functools
import math

import pytest
import torch

from torchngvi.errors import InputError

pytest.importorskip("benchmarks", reason="needs the benchmarks of a clone: run python -m pytest in its root")

from benchmarks import posteriors_hierarchical as models  # noqa: E402
from benchmarks.posteriors_linear import regression  # noqa: E402
from benchmarks.truths import FAMILIES, curves, latents, margins, products, shapes, targets  # noqa: E402
from benchmarks.truths.__main__ import errors, wrong  # noqa: E402
from benchmarks.truths.target import by_quadrature, exactly, on_grid  # noqa: E402

QUICK_PARTS = ("tune", "held")
QUICK_FRESH = (  # of the others, what is made in a second
    margins.skew_t,
    margins.log_inverse_gaussian,
    margins.contaminated,
    margins.compositions,
    margins.johnson,
    margins.soft_truncation,
    margins.copulas,
    margins.unlike_normals,
    curves.changepoints,
    curves.logistic_growth,
    curves.zero_inflated,
    curves.autoregressive,
    curves.ratios,
)


@functools.cache
def quick():
    """Every target that is made in no time."""
    made = [target for part in QUICK_PARTS for target in targets(part)]
    return [*made, *(target for family in QUICK_FRESH for target in family())]


def named(name):
    (found,) = [target for target in quick() if target.name == name]
    return found


@pytest.mark.accuracy
def test_the_suite_has_two_halves_of_different_families():
    names = [target.name for target in quick()]
    assert len(set(names)) == len(names) >= 64
    every = [family for families in FAMILIES.values() for family in families]
    assert len(set(every)) == len(every)
    assert set(QUICK_FRESH) < {*FAMILIES["fresh 1"], *FAMILIES["fresh 2"]}
    assert {target.half for target in targets("held")} == {"held"}
    assert len(targets("held")) >= 50


@pytest.mark.accuracy
def test_every_target_is_batched_with_finite_gradients_and_an_accurate_truth():
    generator = torch.Generator().manual_seed(0)
    for target in quick():
        theta = torch.randn(2, 3, target.dim, generator=generator, dtype=torch.float64)
        theta[0, 0] = 0
        theta.requires_grad_()
        value = target.log_joint(theta)
        assert value.shape == (2, 3), target.name
        torch.testing.assert_close(value[1, 2], target.log_joint(theta[1, 2]), rtol=1e-10, atol=1e-10)
        (gradient,) = torch.autograd.grad(value.sum(), theta)
        assert bool(gradient.isfinite().all()), target.name
        assert target.mean.shape == target.sd.shape == (target.dim,), target.name
        assert bool((target.sd > 0).all())
        assert target.error < 5e-4, target.name


def student_draws(target, size, seed):
    """Draws of independent t's of 1.2 times the target's sds, and their log density."""
    torch.manual_seed(seed)
    x, scale = torch.distributions.StudentT(torch.tensor(4.0, dtype=torch.float64)), 1.2 * target.sd
    z = x.sample((size, target.dim))
    return target.mean + scale * z, (x.log_prob(z) - scale.log()).sum(-1)


def agree(target, theta, log_weight):
    """Moments and evidence by weighted draws are the truth to 4.5 standard errors, and these are small."""
    weight = torch.softmax(log_weight, 0)
    mean = weight @ theta
    square = weight @ (theta - mean).square()
    mean_error = (weight.square() @ (theta - mean).square()).sqrt()
    square_error = (weight.square() @ ((theta - mean).square() - square).square()).sqrt()
    assert float((mean_error / target.sd).max()) < 0.05
    assert float((square_error / target.sd.square()).max()) < 0.1
    assert float(((mean - target.mean).abs() / mean_error).max()) < 4.5
    assert float(((square - target.sd.square()).abs() / square_error).max()) < 4.5
    if target.log_evidence is not None:
        evidence = float(torch.logsumexp(log_weight, 0)) - math.log(len(theta))
        noise = float((len(theta) * weight.square().sum() - 1).sqrt()) / math.sqrt(len(theta))
        assert abs(evidence - target.log_evidence) < 4.5 * noise
        assert noise < 0.05


CLOSED = (
    "skew t (12, 5), rotated",
    "Johnson S_U (0.5, 3)",
    "composition of rare",
    "copula of heavy margins",
    "unlike normals on a line",
    "changepoint of 0.6 in 8",
    "zero-inflated 4",
    "skew normal α = 4",
    "logit-beta (5, 1.5), D = 6, rotated",
    "sinh-arcsinh (0.5, 1), rotated",
    "elliptical p = 0.8",
    "multivariate t ν = 20",
    "banana b = 0.3, s = 1",
    "tanh funnel a = 0.5",
    "slight cube shear",
    "three normals",
    "two near normals",
    "normal sample of 3",
    "logistic regression 10 x 3",
    "oxygen demand to 1.5, noise 2.5",
    "Weibull survival of 5",
    "two means 4 apart, n = 12",
    "ring",
)


@pytest.mark.accuracy
@pytest.mark.parametrize("name", CLOSED)
def test_truth_against_importance_sampling(name):
    target = named(name)
    theta, log_q = student_draws(target, 100_000, 1)
    agree(target, theta, target.log_joint(theta) - log_q)


def positive(draw):
    return draw.abs().log()


def prior_draws(name, size, seed):
    """Draws of the hyper-parameters and of the locals of a non-centred model from its prior, and their log density."""
    torch.manual_seed(seed)
    target = named(name)
    z = torch.randn(size, target.dim, dtype=torch.float64)
    density = -0.5 * z.square() - models.HALF_LOG_2PI
    theta = z.clone()
    if name.startswith("eight"):
        theta[:, 0] *= 5
        theta[:, 1] = positive(5 * torch.tan(0.5 * math.pi * torch.rand(size, dtype=torch.float64)))
        density[:, 0] -= math.log(5)
        density[:, 1] = models.half_cauchy(theta[:, 1], 5.0)
        return target, theta, density.sum(-1)
    top = 5.0 if name.startswith("vague") else 2.0
    theta[:, 0] *= top
    density[:, 0] -= math.log(top)
    theta[:, 1] = positive(z[:, 1])
    density[:, 1] = models.half_normal(theta[:, 1])
    return target, theta, density.sum(-1)


PRIORS = (
    "eight schools, non-centred",
    "vague groups, non-centred",
    "binomial intercepts 3 x 6, non-centred",
    "Poisson intercepts of 5 small counts, non-centred",
)


@pytest.mark.accuracy
@pytest.mark.parametrize("name", PRIORS)
def test_hierarchical_truth_against_draws_of_the_prior(name):
    """Of the non-centred form, and of the centred one at b = mu + s z, whose Jacobian is s^J."""
    target, theta, log_q = prior_draws(name, 200_000, 2)
    value = target.log_joint(theta)
    agree(target, theta, value - log_q)
    centred = named(name.replace("non-", ""))
    mu, log_s = theta[:, :1], theta[:, 1:2]
    image = torch.cat([theta[:, :2], mu + log_s.exp() * theta[:, 2:]], -1)
    torch.testing.assert_close(centred.log_joint(image) + (target.dim - 2) * log_s[:, 0], value)
    agree(centred, image, value - log_q)


@pytest.mark.accuracy
def test_locals_in_closed_form_against_importance_sampling():
    """The beta-binomial, the gamma-Poisson and the linear regression, by draws near their conditionals."""
    for name in ("beta-binomial 10 x 5", "four pumps", "linear regression 6 x 4"):
        target = named(name)
        theta, log_q = student_draws(target, 200_000, 4)
        agree(target, theta, target.log_joint(theta) - log_q)


def test_gaussian_latents_are_the_joint_density():
    """log p(theta) is the evidence given the hyper-parameters and a Gaussian in the rest, in both forms."""
    draw = torch.Generator().manual_seed(0)
    y, groups = torch.randn(6, generator=draw, dtype=torch.float64), 3
    chosen = torch.nn.functional.one_hot(torch.arange(groups).repeat_interleave(2), groups).double()

    def roots(hyper):
        return torch.diag_embed(hyper[..., :1].exp().expand(*hyper.shape[:-1], groups))

    def prior(hyper):
        return -0.5 * hyper.square().sum(-1)

    for states in (None, roots):
        target = latents.gaussian_latents(
            "", y, lambda h: chosen @ roots(h), lambda h: h[..., 1:], prior, ([-6.0, -6.0], [6.0, 6.0]), states
        )
        theta = torch.randn(5, 2 + groups, generator=draw, dtype=torch.float64)
        z = theta[:, 2:] if states is None else theta[:, 2:] * torch.exp(-theta[:, :1])
        parts = models.normal(y, (theta[:, :1].exp() * z) @ chosen.mT, theta[:, 1:2]).sum(-1) + models.normal(z).sum(-1)
        jacobian = 0.0 if states is None else groups * theta[:, 0]
        torch.testing.assert_close(target.log_joint(theta), parts + prior(theta[:, :2]) - jacobian)
        X, sd = chosen @ roots(theta[:, :2]), theta[:, 1:2].exp()
        evidence, mean, covariance = curves.linear_given(X, y, sd)
        total = X @ X.mT + torch.diag_embed(sd.square().expand(-1, 6))
        marginal = torch.distributions.MultivariateNormal(torch.zeros(6, dtype=torch.float64), total)
        torch.testing.assert_close(evidence, marginal.log_prob(y))
        torch.testing.assert_close(covariance, torch.linalg.inv(torch.eye(3) + X.mT @ X / sd[..., None].square()))
        torch.testing.assert_close(mean, (covariance @ X.mT @ y)[:, :] / sd.square())


def test_a_wide_regression_against_importance_sampling():
    """The row space on a grid, the rest of the coefficients by the prior."""
    for target in (
        curves.wide_regression("logistic", 2, 3, 3.0, 500),
        curves.wide_regression("Poisson", 2, 4, 1.0, 501),
    ):
        theta, log_q = student_draws(target, 100_000, 5)
        agree(target, theta, target.log_joint(theta) - log_q)


def test_quadrature_of_a_gaussian_is_exact():
    target = shapes.gaussian("", torch.tensor([1.0, -30.0]).double(), torch.tensor([[4.0, 3.9], [3.9, 4.0]]).double())
    found = on_grid("", target.log_joint, [-10.0, -10.0], [10.0, 10.0])  # the box does not hold it
    torch.testing.assert_close(found.mean, target.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.sd, target.sd, rtol=1e-6, atol=0)
    assert abs(found.log_evidence) < 1e-6
    assert found.error <= 1e-6


def test_quadrature_refuses_a_density_that_does_not_end():
    text = "the density does not vanish at the faces of the box; begin from a wider box, or give it a proper tail."
    with pytest.raises(InputError) as caught:
        by_quadrature(exactly(lambda theta: -0.5 * torch.log1p(theta[..., 0].square())), [-1.0], [1.0])
    assert str(caught.value) == text


def test_an_affine_map_keeps_the_moments():
    """E and cov of shift + A x by the empirical moments of x that have exactly mean and sd of the target."""
    line = products.product("", lambda x: -0.5 * x.square(), 0.0, 1.0, 5, "")
    mapped = products.mapped(line, 3, 100.0)
    theta = torch.randn(5, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(mapped.log_joint, theta)
    gradient = torch.autograd.functional.jacobian(mapped.log_joint, theta)
    covariance = torch.linalg.inv(-hessian)
    torch.testing.assert_close(covariance.diagonal().sqrt(), mapped.sd)
    torch.testing.assert_close(theta + covariance @ gradient, mapped.mean)
    spectrum = torch.linalg.eigvalsh(covariance)
    assert float(spectrum[-1] / spectrum[0]) == pytest.approx(100)


@pytest.mark.accuracy
def test_wrong_is_thirty_per_cent_of_an_sd_or_three_tenths_of_one():
    target = named("Gaussian of condition 1")
    for factor, shift, expected in ((1.0, 0.0, False), (1.29, 0.0, False), (1.31, 0.0, True), (1.0, 0.31, True)):
        assert wrong(*errors(target, target.mean + shift * target.sd, target.sd * factor)) == expected
    assert errors(target, target.mean, target.sd / 2)[0] == pytest.approx(-math.log(2))
    assert wrong(math.nan, 0.0)


@pytest.mark.parametrize("key", models.MODELS)
def test_a_hierarchical_model_is_batched_in_both_dtypes(key):
    _, dim, log_joint = models.MODELS[key]()
    theta = 0.2 * models.generator(0)(2, 3, dim)
    value = log_joint(theta)
    assert value.shape == (2, 3)
    torch.testing.assert_close(value[1, 2], log_joint(theta[1, 2]))
    single = theta.float().requires_grad_()
    again = log_joint(single)
    assert again.dtype == torch.float32
    torch.testing.assert_close(again.double(), value, rtol=1e-5, atol=1e-3)
    (gradient,) = torch.autograd.grad(again.sum(), single)
    assert bool(gradient.isfinite().all())


def test_the_tumours_are_those_of_the_book():
    y, n = models.counts(models.TUMOURS), models.counts(models.RATS)
    assert (len(y), len(n), int(y.sum()), int(n.sum())) == (71, 71, 267, 1739)
    assert bool((y <= n).all())


@pytest.mark.accuracy
def test_models_written_twice_are_the_same():
    for form in ("centred", "non-centred"):
        theta = 0.5 * models.generator(5)(4, 10)
        twice = models.eight_schools(form == "centred").log_joint(theta)
        torch.testing.assert_close(named(f"eight schools, {form}").log_joint(theta), twice)
    theta = 0.5 * models.generator(6)(4, 73)
    difference = models.rats().log_joint(theta) - named("tumours").log_joint(theta)
    torch.testing.assert_close(difference, difference[:1].expand(4))
    assert float(named("tumours").sd[1]) == pytest.approx(0.358, abs=5e-4)


def test_partial_correlations_have_the_lkj_density():
    """log p(x) = (shape - 1) log det R + log |dR/dx| up to a constant."""

    def correlations(x):
        L, _ = models.lkj(x, 4, 2.5)
        return (L @ L.mT)[*torch.tril_indices(4, 4, -1)]

    constants = []
    for seed in range(3):
        x = 0.6 * models.generator(seed)(6)
        L, density = models.lkj(x, 4, 2.5)
        R = L @ L.mT
        torch.testing.assert_close(R.diagonal(), torch.ones(4, dtype=torch.float64))
        jacobian = torch.linalg.slogdet(torch.autograd.functional.jacobian(correlations, x))[1]
        constants.append(density - 1.5 * torch.logdet(R) - jacobian)
    torch.testing.assert_close(constants[1], constants[0])
    torch.testing.assert_close(constants[2], constants[0])


def test_one_cell_is_negative_binomial():
    """A table of one row and one column, its count drawn again by the same seeds."""
    _, dim, log_joint = models.crossed(1, 1)
    assert dim == 6
    theta = torch.tensor([0.3, -0.2, 0.1, 0.7, 0.5, -0.4], dtype=torch.float64)
    mean, r = theta[0] + theta[1].exp() * theta[4] + theta[2].exp() * theta[5], theta[3].exp()
    random = torch.Generator().manual_seed(3)
    draw = models.generator(3)
    eta = 1 + 0.7 * draw(1, 1) + 0.4 * draw(1, 1)
    rate = torch._standard_gamma(torch.full_like(eta, 3.0), generator=random) / 3 * eta.exp()
    y = torch.poisson(rate, generator=random)[0, 0]
    share = mean.exp() / (mean.exp() + r)
    count = torch.distributions.NegativeBinomial(r, share).log_prob(y)
    prior = models.normal(theta[0], 0.0, math.log(2)) + models.half_normal(theta[1]) + models.half_normal(theta[2])
    prior = prior + models.half_normal(theta[3], 10.0) + models.normal(theta[4:]).sum()
    torch.testing.assert_close(log_joint(theta), prior + count)


def test_the_forms_of_the_horseshoe_differ_by_their_jacobian():
    """log p(b) + Σ log(tau lambda_j) = log p(z) at b = tau lambda z."""
    centred, other = models.horseshoe(True), models.horseshoe()
    theta = 0.5 * models.generator(8)(3, other.dim)
    scale, z = theta[:, :1] + theta[:, 2:52], theta[:, 52:]
    image = torch.cat([theta[:, :52], scale.exp() * z], -1)
    torch.testing.assert_close(centred.log_joint(image) + scale.sum(-1), other.log_joint(theta))


@pytest.mark.parametrize("family", ["logistic", "poisson", "student", "binomial"])
def test_a_regression_as_a_black_box_is_the_model(family):
    """Their log joints are the same number, constants included."""
    _, dim, log_joint, model = regression(family, 30)
    theta = torch.randn(7, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(log_joint(theta), model.log_joint(theta), rtol=1e-12, atol=1e-10)
