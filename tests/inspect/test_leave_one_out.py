"""`torchngvi.leave_one_out`: predictive densities of rows that were left out, beside fits without them."""

import importlib
import math

import pytest
import torch
from helpers import randn
from sklearn.datasets import load_breast_cancer

from torchngvi import CholeskyGaussian, GeneralizedLinear, NaturalGaussian, fit, leave_one_out
from torchngvi.errors import InputError
from torchngvi.models import GaussianNoise, NegativeBinomial
from torchngvi.solved.leave_one_out import Optimum

DTYPE, N, D = torch.float64, 50, 4


X = randn(N, D)
ETA = X @ torch.tensor([1.0, -1.0, 0.5, 0.0], dtype=DTYPE)
COUNTS = torch.poisson((0.5 * ETA).exp(), generator=torch.Generator().manual_seed(2))
CLASSES = (ETA + randn(N, seed=1) > 0).to(DTYPE)
MODELS = {
    "logistic": lambda **more: GeneralizedLinear(X, CLASSES, prior_precision=0.3, **more),
    "probit": lambda **more: GeneralizedLinear(X, CLASSES, "probit", prior_precision=0.3, **more),
    "Poisson": lambda **more: GeneralizedLinear(X, COUNTS, "poisson", offset=0.1 * ETA, **more),
    "negative binomial": lambda **more: GeneralizedLinear(X, COUNTS, NegativeBinomial(1.5), prior_mean=0.2, **more),
    "full prior": lambda **more: GeneralizedLinear(
        X, CLASSES, prior_precision=0.3 * torch.eye(D, dtype=DTYPE) + 0.1, **more
    ),
}


def fitted(model, make=CholeskyGaussian):
    q = make(model.dim, dtype=DTYPE)
    assert fit(q, model, tolerance=1e-8, progress=False).converged
    return q


def refitted(make, row, draws=400_000):
    """log p(y_i | the others) by a fit without the row and Monte Carlo of its density."""
    weights = torch.ones(N, dtype=DTYPE)
    weights[row] = 0.0
    model = make(weights=weights)
    q = fitted(model)
    mean = (X[row] @ q.mean + model.offset[row]).item()
    sd = (X[row] @ q.covariance @ X[row]).sqrt().item()
    grid = torch.linspace(-12, 12, 20_001, dtype=DTYPE)
    weight = -0.5 * grid.square() + math.log(grid[1] - grid[0]) - 0.5 * math.log(2 * math.pi)
    return (weight - model.likelihood.energy(mean + sd * grid, model.y[row])).logsumexp(0).item()


def test_a_normal_likelihood_is_exact():
    """Its sites do not respond: the Bayesian PRESS residuals, y - e_-i with the variance 1 + v_-i."""
    y = ETA + randn(N, seed=3)
    model = GeneralizedLinear(X, y, "gaussian", prior_precision=0.5)
    found = leave_one_out(fitted(model), model)
    V = torch.linalg.inv(X.mT @ X + 0.5 * torch.eye(D, dtype=DTYPE))
    leverage = ((X @ V) * X).sum(-1)
    residual = (y - X @ V @ X.mT @ y) / (1 - leverage)
    exact = torch.distributions.Normal(0.0, (1 / (1 - leverage)).sqrt()).log_prob(residual)
    assert torch.allclose(found.density, exact, rtol=1e-9)
    assert float(found.response.abs().max()) < 1e-12
    assert not found.resolved.any()


@pytest.mark.parametrize(("factor", "prior_precision"), [(1e2, 1e-2), (1e4, 1e-3), (1e5, 1e-4)])
def test_a_row_that_alone_determines_a_direction(factor, prior_precision):
    """Its leverage is 1 to the accuracy of q, so that taking its site out would leave rounding: it is fitted anew."""
    design = torch.cat([X, torch.zeros(N, 1, dtype=DTYPE)], 1)
    design[5, 4] = factor
    model = GeneralizedLinear(design, ETA, "gaussian", prior_precision=prior_precision)
    found = leave_one_out(fitted(model), model)
    rest = torch.arange(N) != 5
    V = torch.linalg.inv(design[rest].mT @ design[rest] + prior_precision * torch.eye(D + 1, dtype=DTYPE))
    e, v = design[5] @ V @ design[rest].mT @ ETA[rest], design[5] @ V @ design[5]
    exact = torch.distributions.Normal(e, (1 + v).sqrt()).log_prob(ETA[5])
    assert found.density[5].item() == pytest.approx(exact.item(), abs=1e-5)
    assert int(found.resolved.sum()) == int(found.response.isinf().sum()) <= 1


def test_fewer_rows_than_coefficients():
    """Every row is the only one in some direction: nothing can be divided out, and all are fitted anew."""
    design, y = randn(6, 20), ETA[:6]
    model = GeneralizedLinear(design, y, GaussianNoise(0.1), prior_precision=1e-6)
    found = leave_one_out(fitted(model), model, flag=math.inf)
    assert bool(found.resolved.all())
    K = design @ design.mT / 1e-6 + 0.01 * torch.eye(6, dtype=DTYPE)
    for row in range(6):
        rest = torch.arange(6) != row
        k = torch.linalg.solve(K[rest][:, rest], K[rest, row])
        exact = torch.distributions.Normal(k @ y[rest], (K[row, row] - k @ K[rest, row]).sqrt()).log_prob(y[row])
        assert found.density[row].item() == pytest.approx(exact.item(), rel=1e-7)


def test_small_sets_of_which_rows_are_much():
    """Ten rows twice with either class, and a count far out: what is left below the flag, and below a narrower one."""
    rows = randn(40, D)
    eta = rows @ torch.tensor([1.0, -1.0, 0.5, 0.0], dtype=DTYPE)
    labels = (eta + randn(40, seed=1) > 0).to(DTYPE)[:10]
    counts = torch.poisson((0.5 * eta).exp(), generator=torch.Generator().manual_seed(2))
    far = rows.clone()
    far[3] *= 3.0
    counts[3] = 400.0
    for model, left in (
        (
            GeneralizedLinear(rows[:10].repeat(4, 1), torch.cat([labels, 1 - labels]).repeat(2), prior_precision=0.01),
            8e-4,
        ),
        (GeneralizedLinear(far, counts, "poisson", prior_precision=0.01), 6.5e-4),
    ):
        q = fitted(model)
        fits = leave_one_out(q, model, flag=0.0).density
        assert float((leave_one_out(q, model).density - fits).abs().max()) == pytest.approx(left, rel=0.1)
        assert float((leave_one_out(q, model, flag=1e-4).density - fits).abs().max()) < 0.1 * left


def test_inference_mode():
    model = MODELS["logistic"]()
    q = fitted(model)
    with torch.inference_mode():
        inside = leave_one_out(q, model)
    assert torch.equal(inside.density, leave_one_out(q, model).density)


@pytest.mark.sparse(2)
@pytest.mark.parametrize("name", MODELS)
def test_against_fits_without_the_row(name):
    make = MODELS[name]
    model = make()
    q = fitted(model)
    found, fits, sites = (leave_one_out(q, model, flag=flag) for flag in (1e-3, 0.0, math.inf))
    assert bool(fits.resolved.all())
    assert not sites.resolved.any()
    assert not found.resolved.all()
    for row in (0, int(found.density.argmin()), int(found.response.argmax())):
        assert fits.density[row].item() == pytest.approx(refitted(make, row), abs=1e-8)
    assert float((found.density - fits.density).abs().max()) < 3e-4  # rows below the flag
    error = (sites.density - fits.density).abs()
    low = found.response <= 1e-5
    assert float(error[low].max()) < 1e-6 if bool(low.any()) else True
    assert found.total == pytest.approx(fits.total, abs=2e-3)


@pytest.mark.accuracy
def test_breast_cancer():
    """All 569 rows, of which 65 are fitted anew, beside fits of all; without them the sum is off by 2.7 nats."""
    data = load_breast_cancer()
    design = torch.tensor((data.data - data.data.mean(0)) / data.data.std(0))
    design = torch.cat([design, torch.ones(len(design), 1, dtype=DTYPE)], 1)
    model = GeneralizedLinear(design, data.target, prior_precision=0.1)
    q = fitted(model)
    found = leave_one_out(q, model)
    assert found.total == pytest.approx(-48.5253, abs=2e-3)  # of 569 fits, with 400,001 points a row
    assert 50 < int(found.resolved.sum()) < 80
    assert leave_one_out(q, model, flag=math.inf).total > found.total + 2
    assert str(found) == "elpd -48.53 ± 12.99 nats over 569 rows, p_loo 24.05; 65 of them by a fit without the row."


@pytest.mark.accuracy
@pytest.mark.parametrize("sd", [0.1, 3.0, 30.0])
def test_wide_predictors(sd):
    """A column that one row alone has: without the row its coefficient has the prior, and E Φ(a + sd z) is known."""
    column = torch.zeros(N, 1, dtype=DTYPE)
    column[0] = sd
    design = torch.cat([torch.cat([torch.zeros(1, D, dtype=DTYPE), X[1:]]), column], 1)
    offset = torch.zeros(N, dtype=DTYPE)
    offset[0] = 1.5
    y = torch.cat([torch.ones(1, dtype=DTYPE), CLASSES[1:]])
    model = GeneralizedLinear(design, y, "probit", offset=offset)
    found = leave_one_out(fitted(model), model, flag=0.0)
    exact = torch.special.log_ndtr(torch.tensor(1.5 / math.sqrt(1 + sd**2), dtype=DTYPE))
    assert found.density[0].item() == pytest.approx(exact.item(), abs=1e-8)


def test_shift_is_that_of_the_mean():
    model = MODELS["logistic"]()
    q = fitted(model)
    found = leave_one_out(q, model, flag=0.0)
    weights = torch.ones(N, dtype=DTYPE)
    weights[7] = 0.0
    without = fitted(MODELS["logistic"](weights=weights))
    assert torch.allclose(found.shift[7], (without.mean - q.mean) / q.stddev, atol=1e-6)


def test_any_dense_posterior_and_weights():
    weights = torch.ones(N, dtype=DTYPE)
    weights[3], weights[5] = 0.0, 2.0
    model = MODELS["logistic"](weights=weights)
    one = leave_one_out(fitted(model), model)
    other = leave_one_out(fitted(model, NaturalGaussian), model)
    assert torch.allclose(one.density, other.density, atol=1e-7)
    assert one.density[3].item() == pytest.approx(one.in_sample[3].item(), abs=1e-9)  # it was not in
    none = leave_one_out(fitted(model), model, flag=0.0)
    weights[5] = 0.0
    assert none.density[5].item() == pytest.approx(
        leave_one_out(fitted(MODELS["logistic"](weights=weights)), MODELS["logistic"](weights=weights))
        .in_sample[5]
        .item(),
        abs=1e-8,
    )


@pytest.mark.accuracy
def test_wide_designs_go_by_their_own_site():
    wide = randn(80, 70, seed=5)
    y = (wide[:, 0] + randn(80, seed=6) > 0).to(DTYPE)
    model = GeneralizedLinear(wide, y, prior_precision=2.0)
    q = fitted(model)
    found, fits = leave_one_out(q, model), leave_one_out(q, model, flag=0.0)
    assert 0 < int(found.resolved.sum()) < 80
    assert found.total == pytest.approx(fits.total, abs=0.1)


GROUPS = torch.arange(N) // 5


def test_groups_of_one_row_are_rows():
    model = MODELS["logistic"]()
    q = fitted(model)
    rows, groups = leave_one_out(q, model), leave_one_out(q, model, groups=torch.arange(N).flip(0).neg())
    for name in ("density", "in_sample", "response", "shift"):
        torch.testing.assert_close(getattr(groups, name), getattr(rows, name), atol=1e-10, rtol=1e-8)
    assert torch.equal(groups.resolved, rows.resolved)
    assert groups.error.tolist() == [0.0] * N


def test_groups_of_normal_rows_are_exact():
    """Draws hardly vary: the log density of a multivariate normal to rounding, of unequal groups that are mixed up."""
    y = ETA + randn(N, seed=3)
    model = GeneralizedLinear(X, y, "gaussian", prior_precision=0.5)
    names = ["abcd"[k % 3 if k % 7 else 3] for k in range(N)]
    found = leave_one_out(fitted(model), model, groups=names)
    assert found.groups == ("a", "b", "c", "d")
    eye = 0.5 * torch.eye(D, dtype=DTYPE)
    for k, name in enumerate(found.groups):
        out = torch.tensor([each == name for each in names])
        for there, told in ((~out, found.density[k]), (torch.ones_like(out), found.in_sample[k])):
            S = X[there].mT @ X[there] + eye
            mean = X[out] @ torch.linalg.solve(S, X[there].mT @ y[there])
            V = X[out] @ torch.linalg.inv(S) @ X[out].mT + torch.eye(int(out.sum()), dtype=DTYPE)
            truth = torch.distributions.MultivariateNormal(mean, V).log_prob(y[out])
            assert told.item() == pytest.approx(truth.item(), abs=1e-10)
    assert found.error.max() < 1e-12
    assert found.response.abs().max() < 1e-12
    assert not found.resolved.any()


@pytest.mark.parametrize("name", ["logistic", "Poisson", "full prior"])
def test_groups_against_fits_without_them(name):
    """Densities by 400,000 draws of a fit without the group, whose error is about 2e-3."""
    model = MODELS[name]()
    found = leave_one_out(fitted(model), model, groups=GROUPS)
    assert found.error.max() < 0.01
    for group in (0, 4):
        weights = torch.where(group == GROUPS, 0.0, torch.ones(N, dtype=DTYPE))
        q = fitted(MODELS[name](weights=weights))
        theta = q.sample((400_000,), torch.Generator().manual_seed(1))
        rows = group == GROUPS
        log_p = -model.likelihood.energy(theta @ X[rows].mT + model.offset[rows], model.y[rows]).sum(-1)
        truth = log_p.logsumexp(0).item() - math.log(400_000)
        assert found.density[group].item() == pytest.approx(truth, abs=0.015)
        assert found.shift[group].abs().max() > 0
        divided = leave_one_out(fitted(model), model, flag=math.inf, groups=GROUPS)
        assert not divided.resolved.any()
        assert divided.density[group].item() == pytest.approx(truth, abs=0.1)


def test_a_group_that_alone_determines_a_direction_is_fitted_anew():
    """Of a column that is 0 elsewhere next to nothing is left."""
    column = torch.where(GROUPS == 2, X[:, 0], 0.0)
    design = torch.stack([X[:, 1], column], 1)
    model = GeneralizedLinear(design, CLASSES, prior_precision=1e-5)
    q = CholeskyGaussian(2, dtype=DTYPE)
    assert fit(q, model, tolerance=1e-3, progress=False).converged
    found = leave_one_out(q, model, flag=math.inf, groups=GROUPS)
    assert found.response[2] == math.inf
    assert found.resolved.nonzero()[:, 0].tolist() == [2]


def test_groups_come_as_they_are():
    """Arrays, columns of a table and numbers in any order are one."""
    np, pd = pytest.importorskip("numpy"), pytest.importorskip("pandas")
    model = MODELS["Poisson"]()
    q = fitted(model)
    names = [f"s{k % 7}" for k in range(N)]
    first = leave_one_out(q, model, groups=names)
    for other in (np.array(names), pd.Series(names, index=range(100, 100 + N)), pd.Categorical(names)):
        assert torch.equal(leave_one_out(q, model, groups=other).density, first.density)
    singles = leave_one_out(q, model, groups=[torch.tensor(k % 7) for k in range(N)])  # which are not equal as objects
    assert singles.groups == tuple(range(7))
    assert torch.equal(singles.density, first.density)
    for column in (pd.Series([k % 3 for k in range(N - 1)] + [None], dtype="Int64"), pd.Series([pd.NaT, 1] * 25)):
        with pytest.raises(InputError, match=r"it is missing \((<NA>|NaT)\) in (1|25) rows"):
            leave_one_out(q, model, groups=column)
    with pytest.raises(InputError, match=r"all by numbers or all by texts; got .*unhashable"):
        leave_one_out(q, model, groups=[np.zeros(2)] * N)
    assert leave_one_out(q, model, groups=torch.arange(N) % 7).groups == tuple(range(7))


def test_wide_designs_fit_every_group_anew():
    design = randn(80, 61, seed=9)
    model = GeneralizedLinear(design, (design[:, 0] > 0).double(), prior_precision=1.0)
    found = leave_one_out(fitted(model), model, groups=torch.arange(80) // 40)
    assert found.resolved.all()
    assert found.density.isfinite().all()


@pytest.mark.accuracy
def test_tables_of_rows_are_made_for_a_few_groups_at_a_time(monkeypatch):
    """Of wide designs too: as many groups as are held at once make no difference, and no more are asked for."""
    design, module = randn(80, 61, seed=9), importlib.import_module("torchngvi.solved.leave_one_out")
    model = GeneralizedLinear(design, (design[:, 0] > 0).double(), prior_precision=1.0)
    q, groups = fitted(model), torch.arange(80) // 8
    whole = leave_one_out(q, model, groups=groups)
    asked, divided = [], Optimum.divided

    def counted(self, out, times):
        asked.append(len(out))
        return divided(self, out, times)

    monkeypatch.setattr(module, "_AT_ONCE", 3 * 80 * 61)
    monkeypatch.setattr(Optimum, "divided", counted)
    parts = leave_one_out(q, model, groups=groups)
    assert asked == 2 * [3, 3, 3, 1]
    torch.testing.assert_close(parts.density, whole.density, atol=1e-7, rtol=0)
