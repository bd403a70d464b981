"""IFVB and AIFVB as optimizers: their steps, estimators, averages, state, and what they do with bad input."""

import contextlib
import copy
import io
import math
import pathlib
import pickle
import re
import time

import pytest
import torch
from helpers import gpu, seeded
from ifvb_parts import AIFVB, IFVB, PreconditionedVI
from torch.utils._pytree import tree_leaves

from torchngvi import DataLogJoint, LogJoint, ifvb
from torchngvi.errors import InputError, RejectedStepWarning
from torchngvi.metrics.recursive import Perturbation
from torchngvi.stepsizes import Constant, PowerSchedule

FLOAT = torch.float64
Z_LIMIT = 4.5


def gaussian(*batch, dim=2):
    return ifvb.MeanFieldGaussian(torch.full((*batch, 2 * dim), 0.3, dtype=FLOAT))


def log_joint(theta):
    """A normal posterior N(1, ½) in each coordinate, up to a constant."""
    return -(theta - 1).square().sum(-1)


def bound(lam):
    """LB of a mean-field Gaussian on `log_joint`, its own constant left out."""
    mean, log_sd = lam.chunk(2, -1)
    return (log_sd - (mean - 1).square() - (2 * log_sd).exp()).sum(-1)


def gradient_of(function, lam):
    lam = lam.detach().requires_grad_()
    return torch.autograd.grad(function(lam).sum(), lam)[0]


def test_ifvb_step_by_hand():
    """Algorithm 1: gradient draws, then Fisher draws, two updates of P, step with α_{s+1} (s+1) P."""
    q = gaussian()
    opt = IFVB(
        q, 2.0, alpha=0.8, offset=3.0, samples=1, eps=0.7, c_beta=0.4, beta=0.2, warmup=0, clip=5.0, radius=None,
        estimator=ifvb.ScoreFunction(6), generator=seeded(),
    )  # fmt: skip
    generator, lam, P = seeded(), q.vector.detach().clone(), torch.eye(4, dtype=FLOAT) / 0.7
    for s in range(4):
        theta = q.sample(6, generator, lam)
        h = log_joint(theta) - q.log_prob(theta, lam)
        g = -(q.score(theta, lam) * h[:, None]).mean(0)
        phi = q.score(q.sample(1, generator, lam), lam)[0]
        Z = torch.randn((1, 4), generator=generator, dtype=FLOAT)[0]
        for vector, weight in ((phi, 1.0), (Z, 0.4 * (s + 1) ** -0.2)):
            u = P @ vector
            P = P - weight * torch.outer(u, u) / (1 + weight * vector @ u)
        direction = (s + 1) * P @ g
        direction = direction * min(1.0, 5.0 / float(direction.norm()))
        lam = lam - 2.0 * (3.0 + s + 1) ** -0.8 * direction
        loss = opt.step(log_joint)
        assert torch.allclose(q.vector, lam, rtol=1e-10)
        assert loss.item() == pytest.approx(-float(h.mean()))
    assert opt.memory["metric"]["fisher_draws"] == 4
    assert opt.gradients + opt.values == 24


@pytest.mark.parametrize("at_average", [True, False])
def test_aifvb_step_by_hand(at_average):
    """Algorithm 2: Fisher draws at the average (Eq 4.8) or at the iterate (Remark 4.2); step at the iterate."""
    q = gaussian()
    opt = AIFVB(
        q, samples=3, eps=0.7, c_beta=0.0, warmup=5, w=1.0, fisher_at_average=at_average, estimator=ifvb.ClosedForm(),
        generator=seeded(),
    )  # fmt: skip
    generator, lam, H = seeded(), q.vector.detach().clone(), 0.7 * torch.eye(4, dtype=FLOAT)
    average, weights, count = lam.clone(), [], 5
    phi = q.score(q.sample(5, generator, lam), lam)
    H = H + phi.mT @ phi
    iterates = []
    for s in range(5):
        g = -gradient_of(bound, lam)
        at = average if at_average else lam
        phi = q.score(q.sample(3, generator, at), at)
        H, count = H + phi.mT @ phi, count + 3
        lam = lam - (100.0 + s + 1) ** -0.75 * count * torch.linalg.solve(H, g)
        iterates.append(lam)
        weights.append(math.log(s + 1))
        total = sum(weights)
        average = sum(w * x for w, x in zip(weights, iterates, strict=True)) / total if total else lam
        opt.step(bound)
        assert torch.allclose(q.vector, lam, rtol=1e-10)
        assert torch.allclose(opt.average, average, rtol=1e-10)
    assert opt.memory["metric"]["fisher_draws"] == 20
    assert torch.allclose(opt.inverse_fisher(), count * torch.linalg.inv(H), rtol=1e-9)


@pytest.mark.parametrize("w", [0.0, 0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("burn_in", [0, 4])
def test_average_is_the_weighted_mean(w, burn_in):
    """Recursion = direct mean with log(k)^w, k = 1.. after the burn-in; 0⁰ = 1; no 0/0 at the first."""
    rule, state = ifvb.Averaging(w, burn_in), {"average": torch.zeros(3, dtype=FLOAT), "weight": 0.0}
    iterates = torch.randn(30, 3, generator=seeded(), dtype=FLOAT)
    for index, iterate in enumerate(iterates):
        rule.update(state, iterate, index)
        used = iterates[burn_in : index + 1]
        weight = torch.arange(1, len(used) + 1, dtype=FLOAT).log() ** w
        if len(used) == 0 or float(weight.sum()) == 0:
            assert torch.equal(state["average"], iterate)
        else:
            assert torch.allclose(state["average"], (weight[:, None] * used).sum(0) / weight.sum())


def test_weights_inflate_the_variance_little():
    """s Σw²/(Σw)² for w = 2 is 1.155, 1.077, 1.045 at s = 100, 1000, 10,000."""
    for s, expected in ((100, 1.155), (1000, 1.077), (10_000, 1.045)):
        w = torch.arange(1, s + 1, dtype=FLOAT).log() ** 2
        assert float(s * w.square().sum() / w.sum() ** 2) == pytest.approx(expected, abs=6e-4)


def test_schedule_is_in_the_param_group():
    """α_k = c/(c' + k)^α, and whatever else is multiplied in, by a scheduler of torch."""
    q, power = gaussian(), PowerSchedule(0.6, 10.0)
    opt = ifvb.PreconditionedVI(q, ifvb.Identity(), 0.5, estimator=ifvb.ClosedForm())
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 0.5**t * power(t))
    for k in range(1, 5):
        before, g = q.vector.detach().clone(), gradient_of(bound, q.vector)
        opt.step(bound)
        alpha_k = 0.5 * 0.5 ** (k - 1) * (10 + k) ** -0.6
        assert torch.allclose(q.vector - before, alpha_k * g)
        assert opt.last.rho.item() == pytest.approx(alpha_k)
        schedule.step()


def test_clipping_bounds_the_step():
    q = gaussian(3)
    opt = PreconditionedVI(q, ifvb.Identity(), 1.0, alpha=0.0, clip=0.1, estimator=ifvb.ClosedForm())
    before = q.vector.detach().clone()
    opt.step(bound)
    assert torch.allclose((q.vector - before).norm(dim=-1), torch.full((3,), 0.1, dtype=FLOAT))
    assert (opt.last.rho < 1).all()
    q = gaussian()  # a short direction is not made longer
    before, g = q.vector.detach().clone(), gradient_of(bound, q.vector)
    opt = PreconditionedVI(q, ifvb.Identity(), 1.0, alpha=0.0, clip=100.0, estimator=ifvb.ClosedForm())
    opt.step(bound)
    assert torch.allclose(q.vector - before, g)


def test_no_step_is_longer_than_the_radius():
    """½ α² dᵀ∇L at most: the KL divergence of a step to second order; short steps are left alone, Adam's all are."""
    for radius, shortened in ((1e-4, True), (1e3, False)):
        q = gaussian(3)
        opt = PreconditionedVI(q, ifvb.Exact(), 0.01, alpha=0.0, radius=radius, estimator=ifvb.ClosedForm())
        before, g = q.vector.detach().clone(), gradient_of(bound, q.vector)
        natural = q.exact_fisher_solve(g, before).detach()
        opt.step(bound)
        moved = q.vector.detach() - before
        length = 0.5 * 0.01**2 * (natural * g).sum(-1)
        share = (radius / length).sqrt() if shortened else torch.ones(3, dtype=FLOAT)
        assert torch.allclose(moved, 0.01 * share[:, None] * natural)
        assert ((opt.last.rho < 0.01) == shortened).all()
        if shortened:  # in nats, by the divergence itself
            there = torch.distributions.Normal(q.vector[..., :2], q.vector[..., 2:].exp())
            here = torch.distributions.Normal(before[..., :2], before[..., 2:].exp())
            kl = torch.distributions.kl_divergence(there, here).sum(-1).detach()
            assert torch.allclose(kl, torch.full((3,), radius, dtype=FLOAT), rtol=0.02)
    for rule in (ifvb.Identity(), ifvb.Adam()):
        ends = []
        for radius in (1e-9, None):
            q = gaussian()
            PreconditionedVI(q, rule, 0.1, radius=radius, estimator=ifvb.ClosedForm()).step(bound)
            ends.append(q.vector.detach())
        assert torch.equal(*ends)
    q = gaussian()  # both limits: the shorter one
    opt = PreconditionedVI(q, ifvb.Exact(), 0.01, alpha=0.0, radius=1e3, clip=1e-3, estimator=ifvb.ClosedForm())
    before = q.vector.detach().clone()
    opt.step(bound)
    assert (q.vector.detach() - before).norm().item() == pytest.approx(1e-5)


SCALES = torch.tensor([1.0, 10.0, 100.0], dtype=FLOAT)
FAR = {
    "cholesky": lambda: ifvb.FlatCholesky(torch.zeros(3, dtype=FLOAT), torch.eye(3, dtype=FLOAT)),
    "low rank": lambda: ifvb.LowRankGaussian(
        torch.zeros(3, dtype=FLOAT), torch.full((3, 1), 0.1, dtype=FLOAT), torch.ones(3, dtype=FLOAT)
    ),
}


@pytest.mark.accuracy
@pytest.mark.parametrize("name", FAR)
@pytest.mark.parametrize("method", ["IFVB", "AIFVB", "batch"])
def test_defaults_reach_a_posterior_far_away(name, method):
    """Precisions from 1 to 100, up to ten standard deviations off; without the radius all end more than a nat away."""
    build = {"IFVB": IFVB, "AIFVB": AIFVB, "batch": lambda q, **k: PreconditionedVI(q, ifvb.BatchFisher(50), **k)}[
        method
    ]
    centre = torch.tensor([3.0, -2.0, 1.0], dtype=FLOAT)
    target = lambda theta: -0.5 * (SCALES * (theta - centre).square()).sum(-1)  # noqa: E731
    q = FAR[name]()
    opt = build(q, generator=seeded())
    for _ in range(300):
        opt.step(target)
    assert opt.rejections == 0
    evidence = 1.5 * math.log(2 * math.pi) - 0.5 * math.log(1000)
    assert float(ifvb.lower_bound(q, target, 4000, seeded(1))[0]) > evidence - 0.03


def test_a_step_whose_length_overflows_is_not_taken():
    """dᵀ∇L = ∞ - ∞ is no length that the radius could hold: λ stays, and the run says so."""
    q = ifvb.FlatCholesky(torch.zeros(2, dtype=FLOAT), torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=FLOAT))
    opt = PreconditionedVI(q, ifvb.Exact(), 1.0, alpha=0.0, estimator=ifvb.ClosedForm())
    before = q.vector.detach().clone()
    with pytest.warns(RejectedStepWarning, match="left the domain where every entry is finite or was not"):
        opt.step(lambda lam: 1e200 * (lam[0] - 0.5 * lam[1]))
    assert torch.equal(q.vector, before)
    assert opt.rejections == 1


def test_exponential_family_natural_gradient():
    """I_F⁻¹∇LB in natural coordinates is ∇LB in mean coordinates: no Fisher matrix is needed (Example 3)."""
    rows = torch.tensor([0.3, -0.8], dtype=FLOAT)  # natural (V⁻¹m, -1/(2V)) of N(m, V)
    lam = rows.clone().requires_grad_()

    def moments(lam):
        V = -0.5 / lam[1]
        return torch.stack([V * lam[0], V + (V * lam[0]) ** 2])

    def objective(mean):
        return mean[0].sin() + mean[0] * mean[1].exp()

    fisher = torch.autograd.functional.jacobian(moments, lam)  # Cov(s) = ∂(mean)/∂λ
    (gradient,) = torch.autograd.grad(objective(moments(lam)), lam)
    by_mean = gradient_of(objective, moments(lam))
    assert torch.allclose(torch.linalg.solve(fisher, gradient), by_mean)
    V, m = -0.5 / rows[1], -0.5 / rows[1] * rows[0]
    theta = m + V.sqrt() * torch.randn(400_000, generator=seeded(), dtype=FLOAT)
    assert torch.allclose(torch.cov(torch.stack([theta, theta.square()])), fisher, rtol=0.02, atol=5e-3)


def family_and_bound():
    """Full covariance, so that gradients mix, and a bound in closed form."""
    q = ifvb.FlatCholesky(torch.tensor([0.3, -0.4], dtype=FLOAT), torch.tensor([[1.0, 0.4], [0.4, 0.5]], dtype=FLOAT))

    def closed(lam):
        mean, T = q.parts(lam)
        entropy = T.diagonal().log().sum() + 1 + math.log(2 * math.pi)
        return -(mean - 1).square().sum() - T.square().sum() + entropy

    return q, closed


@pytest.mark.parametrize("estimator", [ifvb.ScoreFunction(50), ifvb.ControlVariate(50), ifvb.Pathwise(50)])
def test_estimates_are_unbiased(estimator):
    """Value and gradient of the bound against their closed forms, by a z-test over repeats."""
    q, closed = family_and_bound()
    told, target = estimator, LogJoint(log_joint)
    estimator.generator = seeded(3)
    drawn = []
    for _ in range(400):
        e = told(q, target)
        told = estimator.recalling(e.learned or {})
        drawn.append(-torch.cat([e.value[None], e.derivative.a]))
    drawn = torch.stack(drawn)
    expected = torch.cat([closed(q.vector)[None], gradient_of(closed, q.vector)]).detach()
    z = (drawn.mean(0) - expected) / (drawn.std(0) / math.sqrt(len(drawn)))
    assert float(z.abs().max()) < Z_LIMIT


@pytest.mark.accuracy
def test_variances_are_in_order():
    """A constant in the log joint costs the plain estimator dear, the control variate nothing, the path nothing."""
    q, _ = family_and_bound()
    spread = []
    for kind in (ifvb.ScoreFunction, ifvb.ControlVariate, ifvb.Pathwise):
        for constant in (0.0, 100.0):
            told = estimator = kind(50, seeded(4))
            target, drawn = LogJoint(lambda theta, constant=constant: log_joint(theta) + constant), []
            for _ in range(100):
                e = told(q, target)
                drawn.append(e.derivative.a)
                told = estimator.recalling(e.learned or {})
            spread.append(float(torch.stack(drawn).var(0).sum()))
    plain, plain_shifted, control, control_shifted, path, path_shifted = spread
    assert plain_shifted > 100 * plain
    assert control_shifted == pytest.approx(control, rel=1e-6)
    assert path_shifted == pytest.approx(path, rel=1e-6)
    assert plain > path
    assert control > path
    assert control_shifted < 0.1 * plain_shifted


def test_pathwise_is_free_of_noise_at_the_posterior():
    q = ifvb.MeanFieldGaussian(torch.tensor([1.0, 1.0, -0.5 * math.log(2), -0.5 * math.log(2)], dtype=FLOAT))
    e = ifvb.Pathwise(3, seeded())(q, LogJoint(log_joint))
    assert float(e.derivative.a.abs().max()) < 1e-14


def test_control_variate_uses_the_batch_before():
    """c_i = Cov(φ_i h, φ_i)/Var(φ_i) of draws that are independent of those it is used on; one pilot batch."""
    q, _ = family_and_bound()
    estimator, target = ifvb.ControlVariate(20, seeded(5)), LogJoint(log_joint)
    twin = seeded(5)
    with torch.no_grad():
        first = estimator(q, target)
        batches = []
        for _ in range(2):
            theta = q.sample(20, twin)
            batches.append((q.score(theta), log_joint(theta) - q.log_prob(theta)))
        score, h = batches[0]
        both = torch.stack([torch.cov(torch.stack([s * h, s])) for s in score.T])
        c = both[:, 0, 1] / both[:, 1, 1]
        score, h = batches[1]
        assert torch.allclose(-first.derivative.a, (score * (h[:, None] - c)).mean(0))
        assert first.cost == (0, 0, 40)
        second = estimator.recalling(first.learned)(q, target)
        both = torch.stack([torch.cov(torch.stack([s * h, s])) for s in score.T])
        theta = q.sample(20, twin)
        score, h = q.score(theta), log_joint(theta) - q.log_prob(theta)
        assert torch.allclose(-second.derivative.a, (score * (h[:, None] - both[:, 0, 1] / both[:, 1, 1])).mean(0))
        assert second.cost == (0, 0, 20)
        assert estimator(q, target).cost == (0, 0, 40)  # it does not change: what it was not told it does not know


def test_the_optimizer_hands_on_what_a_call_has_learnt():
    """The constants of one step are those of the next, and are saved: a copy goes on with the same bits."""
    q, _ = family_and_bound()
    opt = PreconditionedVI(q, ifvb.Identity(), 0.1, estimator=ifvb.ControlVariate(20, seeded(5)))
    opt.step(log_joint)
    assert opt.values == 40
    opt.step(log_joint)
    assert opt.values == 60
    assert opt.state[q.mean_probe]["estimator"]["constants"].shape == q.vector.shape
    same, _ = family_and_bound()
    same.load_state_dict(q.state_dict())
    other = PreconditionedVI(same, ifvb.Identity(), 0.1, estimator=ifvb.ControlVariate(20, seeded(7)))
    other.load_state_dict(opt.state_dict())
    for one in (opt, other):
        one.step(log_joint)
    assert torch.equal(same.vector, q.vector)
    assert other.values == 20


@torch.no_grad()
def test_temperature_weighs_the_entropy():
    q, _ = family_and_bound()
    for kind in (ifvb.ScoreFunction, ifvb.Pathwise):
        hot = kind(9, seeded(1))(q, LogJoint(log_joint, 2.0))
        cold = kind(9, seeded(1))(q, LogJoint(log_joint, 0.0))
        theta = q.sample(9, seeded(1))
        assert -hot.value.item() == pytest.approx(float((log_joint(theta) - 2 * q.log_prob(theta)).mean()))
        assert -cold.value.item() == pytest.approx(float(log_joint(theta).mean()))
        assert not torch.allclose(hot.derivative.a, cold.derivative.a)


def test_minibatches_of_data():
    """The mean over all mini-batches of an epoch is the gradient from all rows, for the same draws."""
    X = torch.randn(12, 2, generator=seeded(), dtype=FLOAT)
    target = DataLogJoint(
        lambda theta, x: -(theta[:, None] - x).square().sum((-2, -1)), lambda theta: -theta.square().sum(-1), [X], 12
    )
    q, _ = family_and_bound()

    def gradient(target):
        return ifvb.Pathwise(5, seeded(2))(q, target).derivative.a

    parts = torch.stack([gradient(target.minibatch(rows)) for rows in X.split(4)])
    assert torch.allclose(parts.mean(0), gradient(target))
    assert not torch.allclose(parts[0], parts[1])
    opt = IFVB(q, 0.5, generator=seeded())
    for epoch in range(20):
        for rows in X[torch.randperm(12, generator=seeded(epoch))].split(4):
            opt.step(target.minibatch(rows))
    assert torch.allclose(q.parts()[0], X.sum(0) / 13, atol=0.15)


PRECONDITIONERS = {
    "identity": ifvb.Identity,
    "exact": ifvb.Exact,
    "recursive": lambda: ifvb.Recursive(5),
    "matrix-free": lambda: ifvb.MatrixFree(5),
    "window": lambda: ifvb.Window(50, 5),
    "batch": lambda: ifvb.BatchFisher(20),
    "blocks": lambda: ifvb.Blocks(ifvb.Recursive(5), [2, 2]),
    "adam": ifvb.Adam,
}


@pytest.mark.accuracy
@pytest.mark.parametrize("name", PRECONDITIONERS)
def test_every_preconditioner_gets_there(name):
    """The bound is that of the posterior, N(1, ½), from a batch of starts."""
    q = gaussian(4)
    opt = PreconditionedVI(q, PRECONDITIONERS[name](), 2.0, estimator=ifvb.Pathwise(5), warmup=100, generator=seeded())
    for _ in range(400):
        opt.step(log_joint)
    assert float((bound(q.vector.detach()) + 1 + math.log(2)).abs().max()) < 2e-3
    assert opt.rejections == 0


@pytest.mark.accuracy
@pytest.mark.parametrize("at_average", [True, False])
def test_both_variants_of_aifvb_have_one_limit(at_average):
    q = gaussian(4)
    opt = AIFVB(q, 2.0, fisher_at_average=at_average, estimator=ifvb.ControlVariate(20), generator=seeded())
    for _ in range(600):
        opt.step(log_joint)
    assert float((bound(opt.average) + 1 + math.log(2)).abs().max()) < 2e-3


@pytest.mark.accuracy
def test_flows_of_both_kinds_improve():
    """The orthogonal flow by manifold IFVB, W orthogonal throughout; the coupling flow past what a Gaussian can."""

    def crescent(theta):
        return -0.5 * theta[..., 0].square() - 2 * (theta[..., 1] - theta[..., 0].square()).square()

    torch.manual_seed(0)
    q = ifvb.ModuleFlow(ifvb.AffineCoupling(2, layers=2, hidden=6).double(), 2)
    opt = IFVB(q, 1.0, samples=20, estimator=ifvb.Pathwise(20), clip=5.0, generator=seeded())
    for _ in range(400):
        opt.step(crescent)
    best = math.log(2 * math.pi) - 0.5 * math.log(4)  # log evidence
    value, error = ifvb.lower_bound(q, crescent, 4000, seeded(1))
    gaussian_q = ifvb.FlatCholesky(torch.zeros(2, dtype=FLOAT), torch.eye(2, dtype=FLOAT))
    rival = PreconditionedVI(gaussian_q, ifvb.Exact(), 1.0, estimator=ifvb.Pathwise(20), generator=seeded())
    for _ in range(400):
        rival.step(crescent)
    assert float(value) > float(ifvb.lower_bound(gaussian_q, crescent, 4000, seeded(1))[0]) + 0.2
    assert float(value) < best + 4 * float(error)

    zero = torch.zeros(2, dtype=FLOAT)
    flow = ifvb.OrthogonalFlow(zero, torch.eye(2, dtype=FLOAT), zero + 1)
    for rule in (
        ifvb.Recursive(10, eps=1.0),
        ifvb.Identity(),
    ):  # manifold IFVB, and the ordinary gradient on the manifold
        q = flow.at(flow.vector)
        start = float(ifvb.lower_bound(q, crescent, 2000, seeded(1))[0])
        opt = PreconditionedVI(q, rule, 1.0, momentum=0.6, clip=10.0, estimator=ifvb.Pathwise(20), generator=seeded())
        for _ in range(150):
            opt.step(crescent)
        W = q.parts()[1].detach()
        assert float((W.mT @ W - torch.eye(2, dtype=FLOAT)).abs().max()) < 1e-12
        assert float(ifvb.lower_bound(q, crescent, 2000, seeded(1))[0]) > start + 1


def test_momentum_is_carried_along_the_manifold():
    """M is projected to the tangent space at the new λ before it is used (the vector transport)."""
    zero = torch.zeros(3, dtype=FLOAT)
    q = ifvb.OrthogonalFlow(zero, torch.eye(3, dtype=FLOAT), zero)
    opt = PreconditionedVI(
        q, ifvb.Identity(), 0.3, alpha=0.0, momentum=0.5, clip=1.0, estimator=ifvb.Pathwise(3), generator=seeded()
    )
    for _ in range(4):
        before = q.vector.detach().clone()
        opt.step(log_joint)
        heading = opt.memory["momentum"]["mean_vector"]
        assert torch.allclose(q.projected(before, heading), heading)
        assert not torch.allclose(q.projected(q.vector.detach(), heading), heading, atol=1e-3)


def test_gradients_reach_the_preconditioner_along_the_manifold():
    """Their ambient part is taken off before, not only from the direction after."""
    seen = []

    class Recording(ifvb.Preconditioner):
        def direction(self, state, gradient, q):
            seen.append(gradient.clone())
            return torch.ones_like(gradient)

    zero = torch.zeros(2, dtype=FLOAT)
    q = ifvb.OrthogonalFlow(zero, torch.eye(2, dtype=FLOAT), zero)
    lam = q.vector.detach().clone()
    opt = PreconditionedVI(q, Recording(), 0.1, alpha=0.0, estimator=ifvb.Pathwise(3), generator=seeded())
    opt.step(log_joint)
    assert torch.allclose(q.projected(lam, seen[0]), seen[0])
    assert torch.allclose(q.vector, q.retracted(lam, -0.1 * q.projected(lam, torch.ones_like(lam))))
    ambient = ifvb.Pathwise(3, seeded())(q.at(lam), LogJoint(log_joint)).derivative.a
    assert not torch.allclose(ambient, seen[0], atol=1e-3)


@pytest.mark.accuracy
def test_low_cost_mode():
    """Remark 5.1: B = D and S = 1: O(sBD) in all, and it converges."""
    q = gaussian()
    opt = IFVB(q, 1.0, samples=1, estimator=ifvb.ControlVariate(4), generator=seeded())
    for _ in range(1500):
        opt.step(log_joint)
    assert float((bound(q.vector.detach()) + 1 + math.log(2)).abs()) < 0.01
    assert opt.gradients + opt.values == 1501 * 4
    assert opt.memory["metric"]["fisher_draws"] == 1500 + 1000


@pytest.mark.parametrize("name", PRECONDITIONERS)
def test_resume_is_bit_equal(name):
    """Stop, save, load into new objects, go on: as if nothing had happened, draws included."""

    def fresh(seed):
        q = gaussian(2, dim=8)
        rule = ifvb.Blocks(ifvb.Recursive(5), [8, 8]) if name == "blocks" else PRECONDITIONERS[name]()
        opt = PreconditionedVI(
            q, rule, 0.1, estimator=ifvb.ControlVariate(10), averaging=ifvb.Averaging(), momentum=0.5, warmup=20,
            generator=seeded(seed),
        )  # fmt: skip
        return q, opt

    q, opt = fresh(0)
    for _ in range(5):
        opt.step(log_joint)
    file = io.BytesIO()
    torch.save({"q": q.state_dict(), "opt": opt.state_dict(), "schedule": opt.schedule.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, opt2 = fresh(77)
    other.load_state_dict(saved["q"])
    opt2.load_state_dict(saved["opt"])
    opt2.schedule.load_state_dict(saved["schedule"])
    for _ in range(5):
        assert torch.equal(opt.step(log_joint), opt2.step(log_joint))
    assert torch.equal(q.vector, other.vector)
    assert torch.equal(opt.average, opt2.average)
    assert opt.memory["averaging"]["steps"] == opt2.memory["averaging"]["steps"] == 10


def test_copies_and_pickles_go_on_alike():
    """With draws of their own, which are those the original goes on to take."""
    q = gaussian()
    opt = AIFVB(q, samples=3, warmup=10, generator=seeded())
    opt.step(log_joint)
    twins = copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))
    expected = opt.step(log_joint)
    for twin in twins:
        assert twin.posterior is not q
        assert torch.equal(twin.step(log_joint), expected)
        assert torch.equal(twin.average, opt.average)
        assert torch.equal(twin.posterior.vector, q.vector)


@pytest.mark.parametrize("kind", [ifvb.Recursive, ifvb.MatrixFree])
def test_the_settings_of_a_recursion_are_read_from_pickles_of_0_2_0(kind):
    new = kind(7, eps=2.0, c_beta=0.5, beta=0.2, warmup=3)
    held, perturbation = dict(vars(new)), Perturbation()
    vars(perturbation).update(samples=7, **{name: held.pop(name) for name in ("eps", "c_beta", "beta")})
    old = kind.__new__(kind)
    vars(old).update(held, perturbation=perturbation)
    assert vars(pickle.loads(pickle.dumps(old))) == vars(copy.deepcopy(old)) == vars(new)


def test_an_average_begins_as_a_copy_of_its_own():
    q = gaussian()
    opt = AIFVB(q, samples=3, warmup=10, generator=seeded())
    start = q.vector.detach().clone()
    twin = copy.deepcopy(opt)
    with torch.no_grad():
        q.vector.zero_()
    assert torch.equal(opt.average, start)
    assert torch.equal(twin.posterior.vector, start)
    assert not opt.average.requires_grad


def test_members_of_a_batch_do_not_touch_one_another():
    """A member that is spoiled is left where it is; the others take the steps they take without it."""
    start = torch.full((3, 4), 0.3, dtype=FLOAT)

    def spoiled(theta):
        value = log_joint(theta)
        value[:, 1] = torch.nan
        return value

    ends = []
    for target in (log_joint, spoiled):
        q = ifvb.MeanFieldGaussian(start)
        opt = IFVB(q, samples=3, warmup=10, estimator=ifvb.ScoreFunction(10), generator=seeded())
        with pytest.warns(RejectedStepWarning) if target is spoiled else contextlib.nullcontext():
            for _ in range(3):
                opt.step(target)
        ends.append(q.vector.detach().clone())
    assert torch.equal(ends[0][[0, 2]], ends[1][[0, 2]])
    assert torch.equal(ends[1][1], start[1])
    assert opt.memory["rejections"].tolist() == [0, 3, 0]
    assert opt.memory["metric"]["P"].isfinite().all()


def test_a_step_out_of_the_domain_is_not_taken():
    """(μ, vec Σ) with a step that is too long: λ stays, is counted, and one warning says what to do."""
    q = ifvb.VecGaussian(torch.zeros(2, dtype=FLOAT), torch.eye(2, dtype=FLOAT))
    opt = PreconditionedVI(
        q, ifvb.Identity(), 100.0, alpha=0.0, estimator=ifvb.ClosedForm(), averaging=ifvb.Averaging()
    )
    before = q.vector.detach().clone()
    message = (
        r"AIFVB: a step of size 100 left the domain where Sigma is positive definite or was not finite; q was left as "
        r"it is.*Use a smaller lr, a limit such as step_size=Clip\(5.0\), or a metric with a larger eps or warmup"
    )
    with pytest.warns(RejectedStepWarning, match=message) as caught:
        opt.step(lambda lam: -lam.square().sum())
    assert caught[0].filename == __file__  # where the user's own loop is
    for _ in range(2):  # no other warning, which would be an error here
        opt.step(lambda lam: -lam.square().sum())
    assert torch.equal(q.vector, before)
    assert torch.equal(opt.average, before)
    assert opt.rejections == 3
    assert opt.last.accepted.item() is False


def test_a_clamp_does_not_hide_an_infinite_step():
    """Beta ends steps at 0.01, but one that is not finite is no step, on either side."""
    for sign in (1.0, -1.0):
        q = ifvb.Beta(torch.tensor([2.0, 3.0], dtype=FLOAT))
        opt = PreconditionedVI(q, ifvb.Identity(), estimator=ifvb.ClosedForm())
        with pytest.warns(RejectedStepWarning, match="was not finite"):
            opt.step(lambda lam, sign=sign: sign * math.inf * lam[0] + lam[1])
        assert (q.vector.tolist(), opt.rejections) == ([2.0, 3.0], 1)


def test_a_singular_fisher_matrix_is_not_stepped_along():
    """Two factors of four: I_F is singular at this λ; the exact direction is refused, the block one works."""
    b = torch.tensor([1.0, 0.7, 0.0, 0.0], dtype=FLOAT)
    q = ifvb.RankOneGaussian(torch.zeros(4, dtype=FLOAT), b, torch.ones(4, dtype=FLOAT))
    opt = PreconditionedVI(q, ifvb.Exact(), estimator=ifvb.Pathwise(3), generator=seeded())
    with pytest.warns(RejectedStepWarning, match="or was not finite; q was left as it is"):
        opt.step(log_joint)
    assert opt.rejections == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 1.1}, r"alpha is the power of the decay and must be at least 0, at most 1, finite; got 1.1"),
        (
            {"alpha": -0.1, "beta": 0.1},
            r"alpha is the power of the decay and must be at least 0, at most 1, finite; got -0.1",
        ),
        ({"beta": 0.5}, r"beta lies in \(0, alpha - 1/2\) and must be above 0, below 0\.5, finite; got 0.5"),
        ({"beta": 0.0}, r"beta lies in \(0, alpha - 1/2\) and must be above 0, below 0\.5, finite; got 0.0"),
        ({"eps": 0.0}, r"eps is that of H_0 = eps I, None for the scale of the scores, and must be positive"),
        ({"c_beta": -1.0}, r"c_beta must be 0 or larger"),
        ({"samples": 0}, r"samples counts draws and must be a whole number, at least 1; got 0"),
        ({"lr": math.nan}, r"lr is a number.*; got nan"),
        ({"offset": -1.0}, r"offset is c' of .* must be 0 or larger, and finite; got -1.0"),
        ({"warmup": -1}, r"warmup counts scores before the first step and must be a whole number, at least 0; got -1"),
        ({"clip": -1.0}, r"norm is the largest norm of a direction and must be positive; got -1.0"),
        ({"radius": -1.0}, r"radius is a KL divergence in nats and must be positive; got -1.0"),
        ({"momentum": 1.0}, r"weight is that of the past and must be at least 0, below 1, finite; got 1.0"),
    ],
)
def test_ranges(arguments, message):
    for method in (IFVB, AIFVB):
        with pytest.raises(InputError, match=message):
            method(gaussian(), **arguments)


def test_defaults():
    """Pathwise where it exists, a control variate elsewhere; max(2D, 1000) scores first; β = (α - ½)/2."""
    assert isinstance(IFVB(gaussian()).estimator, ifvb.Pathwise)
    assert isinstance(IFVB(ifvb.Beta(torch.ones(2))).estimator, ifvb.ControlVariate)
    zero, eye = torch.zeros(2), torch.eye(2)
    flow, field = ifvb.OrthogonalFlow(zero, eye, zero), ifvb.ModuleFlow(ifvb.AffineCoupling(2), 2)
    for q in (ifvb.VecGaussian(zero, eye), ifvb.VechGaussian(zero, eye), ifvb.FlatCholesky(zero, eye), flow, field):
        assert isinstance(IFVB(q).estimator, ifvb.Pathwise)
    for q in (ifvb.RankOneGaussian(zero, 1 + zero, 1 + zero), ifvb.LowRankGaussian(zero, eye, 1 + zero)):
        assert isinstance(IFVB(q).estimator, ifvb.Pathwise)
    averaging = ifvb.AIFVB(gaussian()).averaging
    assert (averaging.metric_at_average, averaging.w, averaging.burn_in) == (True, 2.0, 0)
    for dim, scores in ((400, 1600), (2, 1000)):
        opt = ifvb.IFVB(gaussian(dim=dim))
        opt.step(log_joint)
        assert opt.memory["metric"]["fisher_draws"] == scores + 10
        assert opt.metric.beta == pytest.approx(0.125)
    assert (PowerSchedule().alpha, PowerSchedule().offset) == (0.75, 100.0)


@pytest.mark.accuracy
def test_run_keeps_the_best_and_says_why():
    q = gaussian()
    opt = IFVB(q, estimator=ifvb.Pathwise(10), generator=seeded())
    result = ifvb.run(opt, log_joint, 3000, window=50, patience=100)
    steps, losses = result.evaluations, [record.loss for record in result.trace]
    assert not result.converged
    assert not bool(result.members_converged)
    assert len(losses) == steps == result.trace[-1].evaluations
    smoothed = [sum(losses[k - 50 : k]) / 50 for k in range(50, steps + 1)]
    assert result.loss == min(smoothed)
    assert smoothed.index(result.loss) == steps - 100 - 50
    assert str(result) == (
        "not converged, because the smoothed value has not improved for 100 steps, which of stochastic steps does not "
        f"say that q is the best. Its best, {result.loss:.6g} at step {steps - 100}, is put back. "
        f"Negative ELBO {result.loss:.6f} after {steps} evaluations."
    )
    assert result.trace[-1].gradients == 10 * steps
    assert result.norm == result.trace[-1].norm
    assert 0 < result.norm < result.trace[0].norm
    assert float(bound(q.vector.detach())) == pytest.approx(-1 - math.log(2), abs=1e-3)


def test_run_by_a_monitor():
    """Early stopping on a value of one's own, asked at the average; the best iterate is put back; replays alike."""
    ends = []
    for _ in range(2):
        q = gaussian()
        opt = AIFVB(q, 1.0, estimator=ifvb.Pathwise(2), generator=seeded(3))
        seen = []

        def monitor(q=q, seen=seen):
            seen.append((float((q.vector.detach()[0] - 0.8).abs()), q.vector.detach().clone()))
            return seen[-1][0]

        result = ifvb.run(opt, log_joint, 400, monitor=monitor, window=1, patience=30)
        best = min(range(len(seen)), key=lambda i: seen[i][0])
        assert not result.converged
        assert result.reason.endswith(f"the best. Its best, {seen[best][0]:.6g} at step {best + 1}, is put back.")
        assert torch.equal(q.vector, seen[best][1])
        assert len(result.trace) == len(seen) == best + 31
        assert result.loss == result.trace[best].loss
        ends.append((best, q.vector.detach().clone()))
    assert ends[0][0] == ends[1][0]
    assert torch.equal(ends[0][1], ends[1][1])


def test_run_that_does_not_converge():
    q = gaussian()
    result = ifvb.run(IFVB(q, 0.01, generator=seeded()), log_joint, 20, window=5, patience=50)
    assert not result.converged
    text = r"not converged, because the budget of 20 evaluations is used up \(a best smoothed value of (\S+)\)\. "
    text += r"Raise max_steps\. Its best, (\S+) at step \d+, is put back\. Negative ELBO \S+ after 20 evaluations\."
    found = re.fullmatch(text, str(result))
    assert found[1] == found[2] == f"{result.loss:.6g}"

    q = ifvb.VecGaussian(torch.zeros(2, dtype=FLOAT), torch.eye(2, dtype=FLOAT))
    opt = PreconditionedVI(q, ifvb.Identity(), 100.0, alpha=0.0, estimator=ifvb.ClosedForm())
    with pytest.warns(RejectedStepWarning):
        result = ifvb.run(opt, lambda lam: -lam.square().sum(), 100, window=1, patience=10)
    assert not result.converged
    assert "10 of the last 10 steps were not finite or left the domain: use a smaller lr" in result.reason

    opt = PreconditionedVI(gaussian(), ifvb.Identity(), estimator=ifvb.ClosedForm())
    start = opt.posterior.vector.clone()
    result = ifvb.run(opt, bound, 100, monitor=lambda: math.nan, window=1, patience=10)
    assert not result.converged
    assert result.reason == "because the value was never finite: start elsewhere, or use a smaller lr."
    assert torch.equal(opt.posterior.vector, start)


def test_a_run_of_fewer_steps_than_the_window_stays_where_it_is():
    """Nobody knows its best; the start is not put back, nor of AIFVB the last iterate."""
    for make in (IFVB, AIFVB):
        q = gaussian()
        opt, start = make(q, 1.0, generator=seeded()), q.vector.clone()
        result = ifvb.run(opt, log_joint, 20)
        assert not torch.equal(q.vector, start)
        assert torch.equal(q.vector, opt.average if make is AIFVB else q.vector)
        assert result.loss == result.trace[-1].loss
        assert result.reason.endswith("is used up (a best smoothed value of inf). Raise max_steps.")


def test_run_goes_on_after_a_bad_start():
    """Six steps are lost at first: more than half of ``patience``, but hardly of its last steps."""
    q, seen = gaussian(), []

    def target(lam):
        seen.append(None)
        return bound(lam) * (torch.nan if len(seen) <= 6 else 1.0)

    opt = PreconditionedVI(q, ifvb.Exact(), 0.5, alpha=0.0, estimator=ifvb.ClosedForm())
    start = time.perf_counter()
    with pytest.warns(RejectedStepWarning):
        result = ifvb.run(opt, target, 200, window=1, patience=10)
    assert result.converged
    assert opt.rejections == result.trace[-1].rejections == 6
    assert result.loss == pytest.approx(1 + math.log(2))
    seconds = [record.seconds for record in result.trace]
    assert seconds == sorted(seconds)
    assert 0 < seconds[-1] <= time.perf_counter() - start


def test_run_by_a_monitor_without_an_average():
    """The value is the monitor's own, asked at the iterate."""
    q, seen = gaussian(), []

    def monitor():
        seen.append(float((q.vector.detach() - 0.2).square().sum()))
        return seen[-1]

    result = ifvb.run(IFVB(q, samples=3, warmup=20, generator=seeded()), log_joint, 5, monitor=monitor, window=1)
    best = min(range(5), key=lambda i: seen[i])
    assert len(seen) == 5
    assert f"Its best, {seen[best]:.6g} at step {best + 1}, is put back." in result.reason
    assert result.loss == result.trace[best].loss
    assert float((q.vector - 0.2).square().sum()) == min(seen)


def test_lower_bound_knows_its_error():
    """h = θ + const under N(0, 1): the mean of n draws has a standard error of 1/√n."""
    q = ifvb.MeanFieldGaussian(torch.zeros(2, dtype=FLOAT))
    value, error = ifvb.lower_bound(q, lambda theta: q.log_prob(theta).detach() + theta[..., 0], 10_000, seeded())
    assert error.item() == pytest.approx(0.01, rel=0.04)
    assert abs(value.item()) < 4.5 * 0.01


@pytest.mark.accuracy
def test_asymptotic_covariance():
    """I_F⁻¹ Cov(g) I_F⁻¹/s: for h = C the covariance of the gradient is C² I_F/B, so C² I_F⁻¹/(Bs)."""
    q = ifvb.MeanFieldGaussian(torch.zeros(2, dtype=FLOAT))
    opt = AIFVB(q, 1e-9, samples=50, c_beta=0.0, estimator=ifvb.ScoreFunction(4), warmup=10_000, generator=seeded())
    target = lambda theta: torch.distributions.Normal(0.0, 1.0).log_prob(theta).sum(-1) + 3.0  # noqa: E731
    for _ in range(10):
        opt.step(target)
    covariance = ifvb.asymptotic_covariance(opt, target, 4000)
    expected = torch.diag(torch.tensor([9.0, 4.5], dtype=FLOAT)) / (4 * 10)
    assert torch.allclose(covariance, expected, rtol=0.1, atol=0.01)

    theta = ifvb.marginal_sample(q, covariance, 20_000, seeded(1))
    widened = float(theta.var())
    # E exp(2 l) + Var m for l ~ N(0, v)
    assert widened == pytest.approx(math.exp(2 * float(covariance[1, 1])) + float(covariance[0, 0]), rel=0.1)
    assert widened > float(q.sample(20_000, seeded(1)).var()) * 1.3


def test_marginal_sample_stays_in_the_domain():
    q = ifvb.Beta(torch.tensor([1.0, 1.0], dtype=FLOAT))
    theta = ifvb.marginal_sample(q, torch.eye(2, dtype=FLOAT), 500, seeded())
    assert theta.shape == (500, 1)
    assert bool(((theta > 0) & (theta < 1)).all())


def test_marginal_sample_draws_anew_what_fell_outside(monkeypatch):
    """Every λ that θ is drawn at is inside, though a third of a first draw was not; and they spread as asked."""
    q, asked = ifvb.Beta(torch.tensor([1.0, 1.0], dtype=FLOAT)), []
    plain = q.sample
    monkeypatch.setattr(q, "sample", lambda n, generator, at: asked.append(at) or plain(n, generator, at))
    ifvb.marginal_sample(q, torch.eye(2, dtype=FLOAT), 4000, seeded())
    (points,) = asked
    assert q.in_domain(points).all()
    # N(1, 1) cut off at 0 has the mean 1 + φ(1)/Φ(1) = 1.2876
    assert torch.allclose(points.mean(0), torch.full((2,), 1.2876, dtype=FLOAT), atol=4.5 * 0.8 / math.sqrt(4000))


def test_an_exact_gradient_leaves_nothing_open():
    """Cov(g) = 0 wherever λ is, so that two repeats suffice to see it."""
    q = gaussian()
    opt = AIFVB(q, 0.01, samples=3, warmup=10, estimator=ifvb.ClosedForm(), generator=seeded())
    opt.step(bound)
    assert gradient_of(bound, opt.average).abs().max() > 0.1
    assert float(ifvb.asymptotic_covariance(opt, bound, 2).abs().max()) < 1e-20


def test_documentation():
    """The snippets of docs/ifvb.md run as they stand, but for the number of their steps."""
    text = (pathlib.Path(__file__).parents[2] / "docs/ifvb.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) == 2
    assert "log_joint, 5000, " in snippets[0]
    scope: dict = {}
    for snippet in snippets:
        exec(compile(snippet.replace("log_joint, 5000, ", "log_joint, 20, "), "docs/ifvb.md", "exec"), scope)
    assert scope["result"].evaluations == 20
    assert scope["opt"].rejections == 0
    assert scope["theta"].isfinite().all()


@gpu
@pytest.mark.parametrize("name", PRECONDITIONERS)
def test_on_a_gpu(name):
    """λ, draws and P stay on the device, and the run gets where it gets on the host."""
    q = gaussian(4).to("cuda")
    opt = PreconditionedVI(q, PRECONDITIONERS[name](), 2.0, estimator=ifvb.Pathwise(5), warmup=100)
    for _ in range(400):
        opt.step(log_joint)
    held = [part for part in [q.vector, *tree_leaves(dict(opt.state))] if torch.is_tensor(part)]
    assert {part.device.type for part in held if part.dim()} == {"cuda"}
    assert float((bound(q.vector.detach()) + 1 + math.log(2)).abs().max()) < 5e-3


@pytest.mark.parametrize("method", [ifvb.IFVB, ifvb.AIFVB])
def test_a_loss_that_is_divided_by_n(method):
    """The same steps as of the whole loss, with the factor told."""
    ends = []
    for scale in (1.0, 50.0):
        q = gaussian()
        opt = method(q, 0.1, metric=ifvb.Exact(), step_size=Constant(), loss_scale=scale)
        ((q.log_prob(torch.ones(1, 2, dtype=FLOAT)) - 3).sum() / scale).backward()
        opt.step()
        ends.append(q.vector.clone())
    assert torch.allclose(*ends, rtol=1e-12)
    assert not torch.equal(ends[0], gaussian().vector)
