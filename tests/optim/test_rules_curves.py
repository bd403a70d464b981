"""Rules beyond VN, SR-VN and BW-GD: their printed updates, their cones, their convergence by trial.

What every rule must do (slope, norm, refusals) is in test_conformance, and each formula in test_printed_values.
"""

import re

import pytest
import reference
import torch
from helpers import (
    DIM,
    DTYPE,
    EXACT,
    IDENTITY,
    PAIRS,
    POSTERIORS,
    RULES,
    batches,
    batches_at,
    close,
    every,
    for_each,
    framed_packet,
    kept,
    members,
    randn,
    random_model,
    random_packet,
    random_posterior,
    random_root,
    random_symmetric,
    stationary_point,
    step,
)

from torchngvi import BWGD, IBLR, SRVN, VN, CholeskyGaussian, GeneralizedLinear, NaturalGaussian, fit
from torchngvi.errors import PairError
from torchngvi.expectations import Quadrature
from torchngvi.interfaces import Root
from torchngvi.methods import CovarianceGD, RootGD, SVGDDensity, SymmetricSRVN
from torchngvi.optim import NaturalGradientVI
from torchngvi.rules import BuresWasserstein, NaturalGradient, QuasiNewton, VariationalNewton
from torchngvi.stepsizes import Constant, SufficientDecrease

roots = pytest.mark.parametrize("name", ["cholesky", "diagonal"])


def svgd(name, m, V, g, H, rho, gamma):
    """m' = m + ε(Bm - g), V' = (I + εB) V (I + εB)ᵀ, B = γI - HV - gmᵀ; a kernel a block of the pattern."""
    eye = torch.eye(len(m), dtype=m.dtype)
    B = gamma * eye - H @ V - kept(name, torch.outer(g, m))
    M = eye + rho * B
    return m + rho * (B @ m - g), M @ V @ M.mT


def precision_root_gradient(name, m, V, g, H, rho, gamma):
    """m' = m - ρg, T' = T + ρ tril[V(H - γS)T⁻ᵀ]: minus the derivative of L in T, V = (TTᵀ)⁻¹."""
    S = torch.linalg.inv(V)
    T = torch.linalg.cholesky(S)
    new = T + rho * torch.tril(V @ (H - gamma * S) @ torch.linalg.inv(T).mT)
    return m - rho * g, torch.linalg.inv(new @ new.mT)


def precision_exponential(name, m, V, g, H, rho, gamma):
    """T' = T (I + ρK + ½ρ²K²), K = tril½[T⁻¹(H - γS)T⁻ᵀ]."""
    S, eye = torch.linalg.inv(V), torch.eye(len(m), dtype=m.dtype)
    T = torch.linalg.cholesky(S)
    C = torch.linalg.inv(T).mT
    K = rho * reference.tril_half(C.mT @ (H - gamma * S) @ C)
    new = T @ (eye + K + 0.5 * K @ K)
    return m - rho * V @ g, torch.linalg.inv(new @ new.mT)


PRINTED = [("svgd", svgd, name) for name in ("cholesky", "diagonal", "cholesky_blocks")] + [
    (rule, update, name)
    for rule, update in (("root_gradient", precision_root_gradient), ("local_exponential", precision_exponential))
    for name in ("precision", "precision_blocks")
]


@pytest.mark.parametrize(("rule", "printed", "name"), PRINTED)
@batches_at
def test_the_printed_update(name, rule, printed, batch, gamma):
    """What `test_printed_values.py`, of a dense q in (m, C), does not show."""
    q, e, rho = random_posterior(name, batch, seed=1), random_packet(batch, 7, gamma), 0.05
    H = kept(name, e.derivative.H)
    expected = [
        for_each(lambda *x, i=i: printed(name, *x, rho, gamma)[i], batch, q.mean, q.covariance, e.derivative.g, H)
        for i in (0, 1)
    ]
    mean, covariance = step(q, RULES[rule]()(q, e).at(every(rho, batch)))
    close(mean, expected[0], IDENTITY)
    close(covariance, expected[1], IDENTITY)


@pytest.mark.parametrize("rule", ["symmetric_root", "retraction", "geodesic"])
@batches
def test_curves_of_p_do_not_depend_on_the_root(rule, batch):
    """Permuting the coordinates of θ permutes q'; SR-VN's triangular half does not commute with that."""
    q, e = random_posterior("cholesky", batch, seed=1), random_packet(batch, 7)
    order = torch.tensor([2, 0, 1])
    V, g, H = q.covariance[..., order, :][..., order], e.derivative.g[..., order], e.derivative.H
    other = CholeskyGaussian(DIM, batch, mean=q.mean[..., order], scale=torch.linalg.cholesky(V))
    e2 = e._replace(derivative=e.derivative._replace(g=g, H=H[..., order, :][..., order]))

    def both(rule):
        here, there = (step(p, rule(p, d).at(every(0.4, batch))) for p, d in ((q, e), (other, e2)))
        return here[1][..., order, :][..., order], there[1]

    close(*both(RULES[rule]()), IDENTITY)
    expected, actual = both(RULES["natural_gradient"]())
    assert float((expected - actual).abs().max()) > 1e-3


@pytest.mark.parametrize("rule", ["newton", "retraction", "geodesic"])
@batches
def test_one_q_in_all_coordinates(rule, batch):
    q, e = random_posterior("cholesky", batch, seed=1), random_packet(batch, 37)
    other = NaturalGaussian(DIM, batch, mean=q.mean, scale=q.scale_tril)
    for actual, expected in zip(*(step(p, RULES[rule]()(p, e).at(every(0.4, batch))) for p in (other, q)), strict=True):
        close(actual, expected, IDENTITY)


@pytest.mark.parametrize(("name", "rule"), [p for p in PAIRS if not RULES[p[1]].natural])
def test_rules_that_do_not_follow_the_natural_gradient_take_no_memory(name, rule):
    q = random_posterior(name, seed=1)
    text = f"got {RULES[rule].__name__} with SufficientDecrease."
    with pytest.raises(PairError, match=re.escape(text)):
        NaturalGradientVI(q, RULES[rule](), step_size=SufficientDecrease(), metric=QuasiNewton())
    assert NaturalGradientVI(q, RULES[rule]()).metric is None
    assert isinstance(NaturalGradientVI(q, RULES[rule]()).step_size, SufficientDecrease)


def test_second_order_agreement():
    """exp, iBLR and VN differ in V⁻¹ by ½ρ²P² and ρ³P³/6, in the frame."""
    q, e = random_posterior("cholesky", seed=1), random_packet((), 29)
    P, C = q.local(e).P, q.scale_tril
    for rho in (1e-2, 1e-3):
        N = {
            rule: C.mT @ torch.linalg.inv(step(q, RULES[rule]()(q, e).at(every(rho, ())))[1]) @ C
            for rule in ("newton", "retraction", "geodesic")
        }
        close((N["retraction"] - N["newton"]) / rho**2, P @ P / 2, 1e-7)
        close((N["geodesic"] - N["retraction"]) / rho**3, P @ P @ P / 6, 10 * rho)


@pytest.mark.parametrize("rule", ["retraction", "geodesic"])
@pytest.mark.parametrize("name", POSTERIORS)
@pytest.mark.parametrize(("batch", "rho"), [((), 0.1), ((3,), 1.0), ((2, 3), 10.0)], ids=str)
def test_always_positive_definite(rule, name, batch, rho):
    """Whatever ρ and H, where VN leaves the cone."""
    q, e = random_posterior(name, batch, seed=1), random_packet(batch, 7, definite=False)
    e = e._replace(derivative=e.derivative._replace(H=-random_symmetric(batch, 5)))
    step(q, RULES[rule]()(q, e).at(every(rho, batch)))
    if rho > 1:
        assert not bool(q.moved(RULES["newton"]()(q, e).at(every(rho, batch)))[1].any())


@roots
def test_gradient_descent_in_v_leaves_the_cone_member_by_member(name):
    """V is wide, so that G is positive definite and a long step makes V' indefinite."""
    model = GeneralizedLinear(randn(9, DIM, seed=3), torch.arange(9) % 2)
    q = POSTERIORS[name](DIM, (4,), scale=10.0, dtype=DTYPE)
    rule, rho = RULES["covariance_gradient"](), torch.tensor([1e-3, 1e3, 1e-3, torch.nan], dtype=DTYPE)
    e = Quadrature()(q, model)
    assert q.moved(rule(q, e).at(rho))[1].tolist() == [True, False, True, False]
    opt, before = NaturalGradientVI(q, rule, lr=1e3, step_size=Constant()), q.covariance
    with pytest.warns(match="left the positive definite cone"):
        opt.step(model)
    assert torch.equal(q.covariance, before)
    assert opt.rejections == 4


@roots
def test_symmetric_root_keeps_a_positive_diagonal(name):
    """A step at which an eigenvalue of I - ½ρP is zero or below leaves the cone."""
    q = POSTERIORS[name](2, dtype=DTYPE)
    W = q.structure.from_dense(torch.diag(torch.tensor([5.0, 1.0], dtype=DTYPE)))
    path = RULES["symmetric_root"]()(q, framed_packet(torch.zeros(2, dtype=DTYPE), W))
    close(step(q, path.at(every(0.4, ())))[1], torch.diag(torch.tensor([0.04, 1.0], dtype=DTYPE)), EXACT)
    for rho in (0.5, 1.0):  # 1 - ½ρ · 4 = 0 and -1
        assert not bool(q.moved(path.at(every(rho, ())))[1])


OF_OTHER_TESTS = (VariationalNewton, NaturalGradient, BuresWasserstein)  # in test_stepsizes.py
BUDGET = {"covariance_gradient": 3000, "root_gradient": 1500, "svgd": 1500, "centered_svgd": 400}


@pytest.mark.sparse(3)
@pytest.mark.parametrize(("name", "rule"), [pair for pair in PAIRS if RULES[pair[1]] not in OF_OTHER_TESTS])
def test_sufficient_decrease_works_with_every_rule(name, rule):
    """No learning rate, from a wrong start: never up, to the optimum of the reference."""
    model = random_model("bernoulli_logit", (), 41)
    m, V = stationary_point(name)
    q = POSTERIORS[name](DIM, mean=torch.ones(DIM, dtype=DTYPE), scale=2.0)
    losses = []
    result = fit(
        q,
        model.target,
        NaturalGradientVI(q, RULES[rule]()),
        tolerance=1e-6,
        max_evaluations=BUDGET.get(rule, 60),
        callbacks=[lambda record: losses.append(record.loss)],
        progress=False,
    )
    assert result.converged, (result, rule)
    assert all(b <= a + 1e-12 * abs(a) for a, b in zip(losses, losses[1:], strict=False))
    close(q.mean.detach(), m, 2e-6)
    close(q.covariance, V, 2e-6)


METHODS = {
    VN: "newton",
    SRVN: "natural_gradient",
    SymmetricSRVN: "symmetric_root",
    IBLR: "retraction",
    BWGD: "bures_wasserstein",
    SVGDDensity: "svgd",
    CovarianceGD: "covariance_gradient",
    RootGD: "root_gradient",
}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_named_methods_are_their_rules(method):
    """The same bits after three steps as the rule by hand; without lr steps are found by trial."""
    model = random_model("bernoulli_logit", (2,), 43).target
    q, p = (random_posterior("cholesky", (2,), seed=3) for _ in range(2))
    named = method(q, lr=1e-3, step_size=Constant())
    plain = NaturalGradientVI(p, RULES[METHODS[method]](), lr=1e-3, step_size=Constant())
    assert type(named.rule) is RULES[METHODS[method]]
    for _ in range(3):
        named.step(model)
        plain.step(model)
    assert all(torch.equal(a, b) for a, b in zip(q.coordinates, p.coordinates, strict=True))
    assert isinstance(method(q).step_size, SufficientDecrease)
    assert (method(q).metric is not None) == method(q).rule.natural


@roots
@batches
def test_the_root_move(name, batch):
    """Mean and root as they stand, columns with a positive diagonal; NaN and zero leave the cone."""
    q, C = random_posterior(name, batch, seed=1), kept(name, random_root(batch, 5))
    C[..., 1] *= -1
    stored, mean = q.structure.from_dense(C), randn(*batch, DIM, seed=6)
    new, ok = q.moved(Root(mean, stored))
    assert bool(ok.all())
    assert bool((q.structure.diagonal(new.matrix) > 0).all())
    close(new.vector, mean, 0.0)
    root = q.structure.to_dense(new.matrix)
    close(root @ root.mT, C @ C.mT, EXACT)
    for bad in (0.0, torch.nan):
        q.structure.diagonal(stored)[..., 0] = bad
        assert not bool(q.moved(Root(mean, stored))[1].any())
    assert len(list(members(batch))) == ok.numel()
