"""What lets mixed models have a million groups or thousands of sets of targets: parts that are equal to the whole."""

import math
import re

import pytest
import torch
from helpers import DTYPE, close, randn
from helpers import mixed_problem as problem

from torchngvi import GeneralizedLinear, PrecisionCholeskyGaussian
from torchngvi.errors import InputError
from torchngvi.interfaces import Local
from torchngvi.metrics import QuasiNewton
from torchngvi.models import BernoulliLogit, MixedLogJoint, NegativeBinomial, mixed
from torchngvi.models.mixed import row_moments
from torchngvi.numerics.gaussian_integrals import softplus
from torchngvi.structures import arrow, forest
from torchngvi.structures.forest import summed_product


@pytest.mark.parametrize("family", ["poisson", "logit"])
@pytest.mark.parametrize("r", [1, 2])
def test_rows_a_few_at_a_time(monkeypatch, family, r):
    arguments, settings = problem(family, r, n=9)
    model = MixedLogJoint(*arguments, **settings)
    q = model.posterior()
    whole = model.expected_energy(q.frame())
    monkeypatch.setattr(mixed, "_AT_ONCE", 5)
    blocks = model.rows.blocks()
    assert [len(block.y) for block in blocks[:-1]] == [5] * (len(blocks) - 1)
    assert torch.equal(torch.cat([block.groups for block in blocks]), model.rows.groups)
    value, packet = model.expected_energy(q.frame())
    for part, of in ((value, whole[0]), (packet.a, whole[1].a), (packet.W, whole[1].W)):
        close(part, of, 1e-12)
    several = MixedLogJoint(arguments[0], torch.stack([model.rows.y] * 2), *arguments[2:], **settings)
    assert several.rows.blocks() == [several.rows]


@pytest.mark.parametrize("batch", [(), (2,)])
def test_sums_over_siblings_a_few_at_a_time(batch):
    structure = arrow(groups=7, local=2, globals=3)
    entries = torch.randn(2, *batch, *structure.shape, dtype=DTYPE)
    root, other = structure.tril(entries[0]), structure.one_sided(entries[1])
    whole = structure.congruence(root, other)
    dense = structure.to_dense(root)
    close(structure.full(whole), dense @ structure.full(other) @ dense.mT, 1e-12)
    left, right = (torch.randn(*batch, 7, 2, 2, dtype=DTYPE) for _ in range(2))
    for entries in (1_000_000, 20):
        found = summed_product(structure.kinds[0], left, right, entries)
        close(found, (left @ right).sum(-3, keepdim=True), 1e-12)


@pytest.mark.parametrize("numbers", [(1, 1, 1), (4, 2, 5), (5, 3, 3)])
def test_kinds_of_an_arrow(numbers):
    """The same as those of a forest that is no arrow, but for its second root."""
    groups, local, common = numbers
    mine = arrow(groups=groups, local=local, globals=common).kinds
    other = forest(parents=[groups] * groups + [-1, -1], sizes=[local] * groups + [common, common + 1]).kinds
    for fast, slow in zip(mine, [kind for kind in other if kind.size != common + 1 or kind.above], strict=True):
        slow = slow._replace(up=fast.up)
        for name, x, y in zip(fast._fields, fast, slow, strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, name


def test_pairs_are_shared():
    """A step takes over the pairs that it keeps, without a copy."""
    structure, metric = arrow(groups=3, local=1, globals=2), QuasiNewton(3)
    q = PrecisionCholeskyGaussian(5, structure=structure, dtype=DTYPE)
    state, went = metric.init(q), torch.zeros((), dtype=DTYPE)
    for k in range(5):
        gradient = Local(0.1 * 0.5**k * torch.ones(5, dtype=DTYPE), 0.1 * 0.5**k * structure.eye(q.mean))
        _, new = metric(q, gradient, went, state)
        if k > 1:
            assert new["s1"] is state["s0"]
            assert new["y2"] is state["y1"]
        state, went = state | new, 0.5 * torch.ones((), dtype=DTYPE)
    assert state["kept"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("size", [0.5, 30.0])
def test_negative_binomial_from_one_softplus(size):
    likelihood, e, v = NegativeBinomial(size), 6 * randn(500, seed=1), 4 * randn(500, seed=2).square()
    y, delta = (9 * randn(500, seed=5)).abs().round(), e - math.log(size)
    zeros, ones = softplus(-delta, v), softplus(delta, v)
    value = y * zeros.value + size * ones.value + likelihood.energy(e, y) - y * (-delta).exp().log1p()
    value = value - size * delta.exp().log1p()  # the constant
    found = likelihood.expected(e, v, y)
    close(found.value, value, 1e-10)
    close(found.slope, size * ones.slope - y * zeros.slope, 1e-11)
    close(found.curvature, size * ones.curvature + y * zeros.curvature, 1e-11)


@pytest.mark.parametrize("likelihood", [BernoulliLogit(), NegativeBinomial(3.0)])
def test_a_start_needs_no_quadrature(likelihood):
    arguments, settings = problem("logit", 1, n=6)
    rows = MixedLogJoint(*arguments[:3], likelihood, **{**settings, "offset": None}).rows
    eta = randn(len(rows.y), seed=3).requires_grad_()
    energy = rows.weights * likelihood.energy(eta, rows.y)
    (slope,) = torch.autograd.grad(energy.sum(), eta, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), eta)
    for found, truth in zip(row_moments(rows, eta.detach()), (energy, slope, curvature), strict=True):
        close(found, truth.detach(), 1e-10)


def test_a_linear_model_knows_its_prior_at_once():
    X = torch.ones(8, 1, dtype=DTYPE)
    y = 300 * randn(8, seed=4)
    model = MixedLogJoint(X, y, (X, torch.arange(8) // 2), "gaussian")
    close(model.fixed.prior.precision, (2.5 * y.std(correction=0)).square().reciprocal()[None], 1e-12)
    close(model.fixed.prior.mean, y.mean()[None], 1e-12)


@pytest.mark.parametrize("name", ["weights", "offset"])
@pytest.mark.parametrize(("batch", "either"), [((), "(8,)"), ((3,), "(8,), or the shape of y, (3, 8)")])
def test_numbers_of_rows_of_another_batch(name, batch, either):
    X, groups = torch.ones(8, 1, dtype=DTYPE), torch.arange(8) // 2
    sentence = f"{name} must have one entry a row, {either}; got shape (2, 8)."
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        MixedLogJoint(X, torch.ones(*batch, 8), (X, groups), "poisson_log", **{name: torch.ones(2, 8)})


@pytest.mark.parametrize(("short", "whole"), [("poisson", "poisson_log"), ("bernoulli", "bernoulli_logit")])
def test_short_names_of_families(short, whole):
    X, y = torch.ones(8, 1, dtype=DTYPE), torch.tensor([0.0, 1.0] * 4, dtype=DTYPE)
    short_one, whole_one = (MixedLogJoint(X, y, (X, torch.arange(8) // 2), family) for family in (short, whole))
    assert type(short_one.rows.likelihood) is type(whole_one.rows.likelihood)
    assert type(GeneralizedLinear(X, y, short).likelihood) is type(GeneralizedLinear(X, y, whole).likelihood)
