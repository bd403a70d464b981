"""`torchngvi.forget`, `add`, `site_sum` and `merge`, beside fits of the same rows."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from helpers import randn

import torchngvi as ngvi
from torchngvi.errors import InputError
from torchngvi.models import GaussianNoise, NegativeBinomial, SoftmaxRegression
from torchngvi.solved import merge, site_sum

DTYPE, N, D = torch.float64, 60, 4


X = randn(N, D)
ETA = X @ torch.tensor([1.0, -1.0, 0.5, 0.0], dtype=DTYPE)
COUNTS = torch.poisson((0.5 * ETA).exp(), generator=torch.Generator().manual_seed(2))
CLASSES = (ETA + randn(N, seed=1) > 0).to(DTYPE)
REAL = ETA + 0.5 * randn(N, seed=3)
WEIGHTS, OFFSET = 1 + 0.5 * randn(N, seed=4).tanh(), 0.2 * randn(N, seed=5)
FULL = 0.3 * torch.eye(D, dtype=DTYPE) + 0.1
KINDS = {  # targets, family, prior
    "logistic": (CLASSES, "bernoulli", {"prior_precision": 0.3}),
    "labels": (3 + 4 * CLASSES, "probit", {"prior_precision": FULL, "prior_mean": 0.2}),
    "Poisson": (COUNTS, "poisson", {}),
    "negative binomial": (COUNTS, NegativeBinomial(1.5), {"prior_mean": 0.1}),
    "normal": (REAL, GaussianNoise(0.5), {"prior_precision": FULL, "prior_mean": 0.2}),
}
SOME = [3, 7, 8, 20, 41]


def model(kind, rows=slice(None), **more):
    y, family, prior = KINDS[kind]
    classes = y.unique().tolist() if kind in ("logistic", "labels") else None
    return ngvi.GeneralizedLinear(
        X[rows], y[rows], family, weights=WEIGHTS[rows], offset=OFFSET[rows], classes=classes, **prior, **more
    )


def fitted(target, make=ngvi.CholeskyGaussian):
    result = ngvi.fit(make(target.dim, dtype=DTYPE), target, tolerance=1e-10, progress=False)
    assert result.converged
    return result


def without(rows):
    return [row for row in range(N) if row not in rows]


def apart(q, other):
    """Largest difference of mean and covariance, in standard deviations."""
    scale = other.stddev
    mean = ((q.mean - other.mean) / scale).abs().max()
    return max(float(mean), float(((q.covariance - other.covariance) / (scale[:, None] * scale)).abs().max()))


@pytest.mark.parametrize("kind", KINDS)
class TestAsIfFittedAnew:
    def test_forget(self, kind):
        result = fitted(model(kind))
        before = result.posterior.mean.clone()
        found = ngvi.forget(result, SOME)
        assert found.converged
        assert apart(found.posterior, fitted(model(kind, without(SOME))).posterior) < 1e-8
        assert torch.equal(result.posterior.mean, before)  # what was given stays
        assert len(result.target.y) == N == len(found.target.y) + len(SOME)

    def test_add(self, kind):
        y = KINDS[kind][0]
        result = fitted(model(kind, without(SOME)))
        found = ngvi.add(result, X[SOME], y[SOME], weights=WEIGHTS[SOME], offset=OFFSET[SOME])
        assert found.converged
        assert apart(found.posterior, fitted(model(kind)).posterior) < 1e-8
        assert len(found.target.y) == N == found.target.num_data

    def test_there_and_back(self, kind):
        y = KINDS[kind][0]
        result = fitted(model(kind))
        less = ngvi.forget(result, SOME)
        back = ngvi.add(less, X[SOME], y[SOME], weights=WEIGHTS[SOME], offset=OFFSET[SOME])
        assert apart(back.posterior, result.posterior) < 1e-8

    def test_merging_one_part_is_its_posterior(self, kind):
        result, prior = fitted(model(kind)), KINDS[kind][2]
        assert apart(merge([site_sum(result.posterior, result.target)], **prior), result.posterior) < 1e-9


def test_normal_targets_need_no_fit():
    """Their sites know nothing of q: the start is the optimum, found in one evaluation."""
    found = ngvi.forget(fitted(model("normal")), SOME)
    assert found.evaluations == 1
    rest = without(SOME)
    weights = WEIGHTS[rest] / 0.25
    S = FULL + (X[rest].mT * weights) @ X[rest]
    m = torch.linalg.solve(S, FULL.sum(-1) * 0.2 + X[rest].mT @ (weights * (REAL - OFFSET)[rest]))
    assert torch.allclose(found.posterior.mean, m, rtol=1e-10)
    assert torch.allclose(found.posterior.covariance, torch.linalg.inv(S), rtol=1e-10)


def test_the_start_saves_evaluations():
    """Of one row: two of the fit, where one from N(0, I) takes more."""
    result = fitted(model("logistic"))
    assert ngvi.forget(result, [3]).evaluations < result.evaluations


def test_the_order_does_not_matter():
    result = fitted(model("logistic"))
    one = ngvi.forget(ngvi.forget(result, [3]), [6, 7])  # 6 and 7 were 7 and 8
    other = ngvi.forget(ngvi.forget(result, [7, 8]), [3])
    assert apart(one.posterior, other.posterior) < 1e-8
    assert torch.equal(one.target.X, other.target.X)


def test_masks_and_repeats():
    result = fitted(model("logistic"))
    mask = torch.zeros(N, dtype=torch.bool)
    mask[SOME] = True
    assert torch.equal(ngvi.forget(result, mask).posterior.mean, ngvi.forget(result, SOME).posterior.mean)
    assert torch.equal(ngvi.forget(result, [*SOME, 3]).posterior.mean, ngvi.forget(result, SOME).posterior.mean)


@pytest.mark.parametrize("make", [ngvi.NaturalGaussian, ngvi.PrecisionCholeskyGaussian])
def test_the_class_of_q_stays(make):
    found = ngvi.forget(fitted(model("Poisson"), make), SOME)
    assert type(found.posterior) is make
    assert apart(found.posterior, fitted(model("Poisson", without(SOME))).posterior) < 1e-8


def test_nothing_is_kept_of_forgotten_rows():
    """Nor does the storage of its tensors hold them."""
    found = ngvi.forget(fitted(model("logistic")), SOME)
    for tensor in (found.target.X, found.target.y, found.target.weights, found.target.offset):
        assert len(tensor) == N - len(SOME)
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_a_q_far_from_its_optimum():
    """Its sites may be larger than its precision; the fit begins at q then, and ends where others do."""
    q = ngvi.CholeskyGaussian(D, scale=30.0, dtype=DTYPE)
    result = fitted(model("logistic"))
    S = torch.linalg.inv(q.covariance) - site_sum(q, model("logistic", SOME)).precision
    assert float(torch.linalg.eigvalsh(S)[0]) < 0
    found = ngvi.forget(dataclasses.replace(result, posterior=q), SOME)
    assert apart(found.posterior, fitted(model("logistic", without(SOME))).posterior) < 1e-8


def test_rows_in_every_way():
    """Numbers of any integer type, once or more, in any order, or a mask."""
    result = fitted(model("logistic"))
    once = ngvi.forget(result, [3, 5]).posterior
    mask = torch.zeros(N, dtype=torch.bool).index_fill(0, torch.tensor([3, 5]), True)
    for rows in ([5, 3, 5], (3, 5), np.array([3, 5], dtype=np.int32), torch.tensor([5, 3]).short(), mask, mask.numpy()):
        assert torch.equal(ngvi.forget(result, rows).posterior.mean, once.mean)


@pytest.mark.parametrize("labels", [(0.0, 1.0), (-1.0, 1.0), (2.0, 7.0)])
def test_added_rows_are_labelled_as_the_first(labels):
    """In the labels of the model, also where the new rows hold one of them alone."""
    y = torch.where(CLASSES > 0, labels[1], labels[0])
    result = fitted(ngvi.GeneralizedLinear(X, y))
    first = int((CLASSES == 0).nonzero()[0])
    for row in (first, int((CLASSES > 0).nonzero()[0])):
        assert ngvi.add(result, X[[row]], y[[row]]).target.y[-1] == result.target.y[row]
    with pytest.raises(InputError, match="the labels in y must be among the classes"):
        ngvi.add(result, X[:3], [labels[0], labels[1], 5.0])


PARTS = [slice(0, 20), slice(20, 45), slice(45, N)]


def test_merged_normal_parts_are_the_whole():
    kind = "normal"
    sums = [site_sum(fitted(model(kind, part)).posterior, model(kind, part)) for part in PARTS]
    assert apart(merge(sums, **KINDS[kind][2]), fitted(model(kind)).posterior) < 1e-10


@pytest.mark.parametrize("kind", ["logistic", "Poisson"])
def test_rounds_approach_the_whole(kind):
    """Each is a step of VN of length 1, and the gap falls in each."""
    whole, prior = model(kind), KINDS[kind][2]
    best = fitted(whole).posterior
    models = [model(kind, part) for part in PARTS]
    q = merge([site_sum(fitted(part).posterior, part) for part in models], **prior)
    gaps = [(whole.negative_elbo(q) - whole.negative_elbo(best)).item()]
    for _ in range(5):
        step = copy.deepcopy(q)
        ngvi.VN(step, lr=1.0).step(whole)
        q = merge([site_sum(q, part) for part in models], **prior)
        assert apart(q, step) < 1e-9
        gaps.append((whole.negative_elbo(q) - whole.negative_elbo(best)).item())
    assert all(new < 0.3 * old for old, new in zip(gaps, gaps[1:], strict=False))


def test_softmax_parts():
    classes = torch.arange(N) % 3
    whole = SoftmaxRegression(X, classes)
    result = fitted(whole)
    q = merge([site_sum(result.posterior, SoftmaxRegression(X[part], classes[part])) for part in PARTS])
    assert apart(q, result.posterior) < 1e-9  # at the optimum of the whole a round stands still


class TestRefusals:
    def test_merging(self):
        with pytest.raises(InputError, match="merge takes the site sum of at least one part; got none"):
            merge([])
        one = site_sum(ngvi.CholeskyGaussian(D, dtype=DTYPE), model("logistic"))
        with pytest.raises(InputError, match="merge takes what site_sum returns, one of each part; got CholeskyGauss"):
            merge([one, ngvi.CholeskyGaussian(D, dtype=DTYPE)])
        assert torch.equal(merge(one).mean, merge([one]).mean)
        two = site_sum(ngvi.CholeskyGaussian(1, dtype=DTYPE), ngvi.GeneralizedLinear(X[:, :1], CLASSES))
        with pytest.raises(InputError, match=r"the same coefficients; got sums over \[1, 4\] of them"):
            merge([one, two])
        with pytest.raises(InputError, match="the merged precision is not positive definite"):
            merge([one - one - one], prior_precision=1e-3)
