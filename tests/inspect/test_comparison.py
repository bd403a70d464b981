"""`torchngvi.compare_models` and stacking: identities, proofs, and what is refused."""

import dataclasses
import math
import sys

import pytest
import torch
from helpers import randn

from torchngvi import CholeskyGaussian, GeneralizedLinear, compare_models, fit, leave_one_out
from torchngvi.models import NegativeBinomial, StudentT
from torchngvi.solved import stacking_weights

DTYPE, N = torch.float64, 120


X = randn(N, 3)
COUNTS = torch.poisson((0.7 * X[:, 0]).exp(), generator=torch.Generator().manual_seed(1))


def fitted(columns=3, family="poisson", y=COUNTS, make=CholeskyGaussian, **more):
    rows = more.pop("rows", slice(None))
    model = GeneralizedLinear(X[rows, :columns], y[rows], family, **more)
    return fit(make(columns, dtype=DTYPE), model, tolerance=1e-8, progress=False)


def stacked(log_density, weights):
    """F(w), the mean log density of a mixture."""
    return (log_density + weights.log()).logsumexp(1).mean()


def test_a_model_and_its_copy_are_alike():
    """Equal models: no difference, no error of it, equal weights of either kind, to the bit."""
    found = compare_models({"one": fitted(), "two": fitted()})
    assert found.elpd_diff.tolist() == [0.0, 0.0]
    assert found.dse.tolist() == [0.0, 0.0]
    assert found.pseudo_bma.tolist() == [0.5, 0.5]
    torch.testing.assert_close(found.weight, torch.full((2,), 0.5, dtype=DTYPE), atol=1e-12, rtol=0)


def test_columns_are_those_of_leave_one_out_and_of_the_model():
    fits = {"narrow": fitted(1), "wide": fitted(3), "strict": fitted(3, prior_precision=50.0)}
    found = compare_models(fits)
    assert sorted(found.names) == sorted(fits)
    assert found.elpd.tolist() == sorted(found.elpd.tolist(), reverse=True)
    for k, name in enumerate(found.names):
        result = fits[name]
        alone = leave_one_out(result.posterior, result.target)
        assert torch.equal(found.loo[k].density, alone.density)
        assert found.elpd[k].item() == pytest.approx(alone.total, rel=1e-14)
        assert found.se[k].item() == pytest.approx(alone.standard_error, rel=1e-12)
        assert found.p_loo[k].item() == alone.complexity
        assert found.elbo[k].item() == pytest.approx(-result.loss, abs=1e-9)
        difference = found.loo[0].density - alone.density
        assert found.elpd_diff[k].item() == pytest.approx(difference.sum().item(), abs=1e-12)
        assert found.dse[k].item() == pytest.approx(math.sqrt(N * difference.var().item()), abs=1e-12)


def test_pairs_and_results_are_one():
    one, two = fitted(1), fitted(3)
    by_result = compare_models({"one": one, "two": two})
    by_pair = compare_models({"one": (one.posterior, one.target), "two": two})
    assert torch.equal(by_result.elpd, by_pair.elpd)


def test_the_interval_holds_the_difference_of_the_optima():
    """Of fits that were stopped early, whose own ELBOs differ by something else."""
    best = {"a": fitted(1), "b": fitted(3)}
    early = {}
    for name, result in best.items():
        q = result.posterior
        q = CholeskyGaussian(q.dim, mean=q.mean + 3e-5, scale=q.scale_tril * 1.0001, dtype=DTYPE)
        early[name] = (q, result.target)
    found = compare_models(early)
    low, high = found.elbo_difference("a", "b")
    truth = best["b"].loss - best["a"].loss
    assert low <= truth <= high
    assert high - low == pytest.approx(found.certificate.sum().item(), rel=1e-4)
    assert high - low > 1e-9  # they were not the optima
    assert [-x for x in found.elbo_difference("b", "a")] == pytest.approx([high, low], rel=1e-12)


def test_likelihoods_of_counts_are_comparable():
    found = compare_models({"poisson": fitted(), "more spread": fitted(family=NegativeBinomial(2.0))})
    assert found.elpd_diff[1] > 0
    assert found.certificate.max() < 1e-8


@pytest.mark.accuracy
def test_the_print_has_a_line_a_model_and_its_cautions():
    few = {"a": fitted(rows=slice(50)), "b": fitted(1, rows=slice(50))}
    found = compare_models(few)
    lines = str(found).splitlines()
    assert repr(found) == str(found)
    assert [line.split()[0] for line in lines[:3]] == ["elpd", *found.names]
    assert "With 50 rows standard errors are too small: below a hundred, two of them say little." in lines
    assert "predicts as well as" not in str(found)  # 2.13 nats behind with a standard error of 0.70
    found = compare_models(few | {"c": fitted(1, rows=slice(50), prior_precision=1.1)})
    first, second, _ = found.names
    close = f"{second} predicts as well as {first}, as far as these rows can tell: less than 4 nats and 2 standard"
    assert any(line.startswith(close) for line in str(found).splitlines())
    assert compare_models({1: few["a"], 2: few["b"]}).names in (("1", "2"), ("2", "1"))
    unproved = {"t": fitted(family=StudentT(1.0, 4.0), y=X[:, 0]), "normal": fitted(family="gaussian", y=X[:, 0])}
    found = compare_models(unproved)
    (row,) = (line for line in str(found).splitlines() if line.startswith("t "))
    assert row.endswith(" -")
    assert found.elbo_difference("t", "normal")[1] == math.inf


def test_columns_of_the_print_stay_below_their_heads():
    """However large the numbers are: the deviance of a bad model of counts has more than eight digits."""
    large = fitted(1, y=1e7 * COUNTS)
    found = compare_models({"bad": large, "better": fitted(y=1e7 * COUNTS)})
    head, *lines = str(found).splitlines()[:3]
    assert min(float(x) for x in lines[1].split()[1:2]) < -1e8
    assert {len(line) for line in lines} == {len(head)}


def test_rows_in_single_precision_are_the_same_rows():
    single = GeneralizedLinear(X.float(), COUNTS.float(), "poisson")
    q = fit(CholeskyGaussian(3), single, tolerance=1e-4, progress=False)
    found = compare_models({"double": fitted(), "single": q})
    assert found.elpd_diff[1] < 1e-3


def test_the_order_is_that_of_the_elpd_in_single_precision(monkeypatch):
    """A sum in float32 may say otherwise, and the first would have less than the second."""
    one, two = fitted(), fitted(1)
    density = torch.tensor([-1e6] + 2 * [-0.03])
    better = density + torch.tensor([0.0, 0.01, 0.01])
    assert density.sum() == better.sum()
    found = {one.target: density, two.target: better}

    def left_out(q, model, flag, **_):
        return dataclasses.replace(leave_one_out(q, model, flag), density=found[model], in_sample=found[model])

    monkeypatch.setattr(sys.modules[compare_models.__module__], "leave_one_out", left_out)
    table = compare_models({"one": one, "two": two})
    assert table.names == ("two", "one")
    assert table.elpd_diff[1] > 0


def test_one_part_has_no_standard_error():
    model = GeneralizedLinear(X[:1], COUNTS[:1], "poisson")
    q = fit(CholeskyGaussian(3, dtype=DTYPE), model, progress=False).posterior
    assert math.isnan(leave_one_out(q, model).standard_error)


@pytest.mark.parametrize("models", [1, 2, 5])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_stacking_reaches_what_it_proves(models, scale):
    """F* - F(w) ≤ its bound, F* from 2,000 passes of expectation maximisation, which only climbs."""
    log_density = scale * randn(60, models, seed=3)
    weights, gap = stacking_weights(log_density)
    assert weights.min() >= 0
    assert weights.sum().item() == pytest.approx(1.0, abs=1e-14)
    assert 0 <= gap < 1e-8
    climbing = torch.full((models,), 1 / models, dtype=DTYPE)
    p = log_density.exp()
    for _ in range(2_000):
        climbing = climbing * (p / (p @ climbing)[:, None]).mean(0)
    assert stacked(log_density, climbing / climbing.sum()) - stacked(log_density, weights) <= gap + 1e-14


def test_stacking_of_two_in_closed_form():
    """Rows of which a share a has the ratio r, the others 1/r: w = (a r - (1 - a)) / (r - 1)."""
    a, r = 0.6, 3.0
    log_density = torch.tensor([[math.log(r), 0.0]] * 6 + [[0.0, math.log(r)]] * 4, dtype=DTYPE)
    weights, _ = stacking_weights(log_density)
    assert weights[0].item() == pytest.approx((a * r - (1 - a)) / (r - 1), abs=1e-8)


def test_stacking_leaves_out_what_is_never_needed():
    log_density = randn(40, 2, seed=4)
    worse = log_density.amin(1, keepdim=True) - 0.5
    weights, _ = stacking_weights(torch.cat([log_density, worse], 1))
    assert weights[2] == 0.0
    torch.testing.assert_close(weights[:2], stacking_weights(log_density)[0], atol=1e-6, rtol=0)
    far, _ = stacking_weights(torch.stack([randn(30), randn(30) - 5_000.0], 1))  # whose density is 0 in float64
    assert far.tolist() == [1.0, 0.0]


def test_stacking_in_float32():
    weights, gap = stacking_weights(randn(40, 3, seed=5).float())
    assert weights.dtype == torch.float32
    assert gap < 1e-8


def test_stacking_takes_what_other_software_hands_on():
    """Arrays, lists, whole numbers and tensors with a graph are one."""
    log_density = -torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 3.0]], dtype=DTYPE)
    weights, gap = stacking_weights(log_density)
    assert 0 < weights[1] < 0.5
    for other in (log_density.numpy(), log_density.clone().requires_grad_()):
        again, told = stacking_weights(other)
        assert torch.equal(again, weights)
        assert not again.requires_grad
        assert told == gap
    for other in (log_density.long(), log_density.tolist()):
        torch.testing.assert_close(stacking_weights(other)[0], weights.float())
