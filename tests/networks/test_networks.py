"""Posteriors over the weights of a network: identities with the dense world, and the life of a training script."""

import io
import itertools
import math
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchngvi
from torchngvi import DiagonalGaussian, NaturalGradientVI, networks
from torchngvi.expectations import Hessian
from torchngvi.networks.families import normals
from torchngvi.rules import NaturalGradient, Retraction
from torchngvi.stepsizes import Constant
from torchngvi.structures import Diagonal

untrained = pytest.mark.filterwarnings("ignore:The posterior has seen no data:UserWarning")


def mlp(dtype=torch.float32, seed=0, outputs=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).to(dtype)


def data(n=40, dtype=torch.float32, seed=1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g, dtype=dtype)
    return x, (x @ torch.randn(4, 3, generator=g, dtype=dtype)).argmax(1)


def adamw(model, lr=0.1, **keywords):
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, **keywords)


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def attached(structure="diagonal", steps=20, lr=0.1, num_data=100, model=None, make=adamw, options=None, **keywords):
    """A network, its posterior with some options, its optimizer and the attachment, with keywords of `attach`."""
    model = mlp() if model is None else model
    q, optimizer = networks.network(model, num_data, structure, **(options or {})), make(model, lr=lr)
    return model, q, optimizer, networks.attach(optimizer, q, steps=steps, **keywords)


def step_plainly(optimizers, closure):
    value = closure()
    for optimizer in optimizers:
        optimizer.step()
    return value


def train(
    model, optimizer, steps, scheduler=None, first=0, loss=F.cross_entropy, batch=None, between=None, step=step_plainly
):
    """The losses of steps first, ..., first + steps - 1, each on its own batch if none is given."""
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    dtype, losses = next(model.parameters()).dtype, []
    for k in range(first, first + steps):
        x, y = data(20, dtype, seed=10 + k) if batch is None else batch

        def closure(x=x, y=y):
            model.zero_grad()
            for one in optimizers:
                one.zero_grad()
            value = loss(model(x), y)
            value.backward()
            return value

        losses.append(step(optimizers, closure))
        if scheduler is not None:
            scheduler.step()
        if between is not None:
            between()
    return losses


def fused(model, lr):
    return adamw(model, lr, fused=True)


def train_scaled(model, optimizer, steps, scale=2.0**10, factor=lambda k: 1.0, between=lambda: None):
    """The same loop under a GradScaler, which is returned."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for k in range(steps):
        x, y = data(20, seed=k)
        optimizer.zero_grad()
        scaler.scale(factor(k) * F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        between()
    return scaler


def adamw_of(lr):
    return lambda model: adamw(model, lr)


def fit_digits(make, steps, rows, schedule=None, radius=None):
    """The test NLL of digits after README's three lines."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x, y = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer, q = make(model), networks.network(model, rows)
    networks.attach(optimizer, q, steps=None if radius else steps, radius=radius)
    scheduler = schedule(optimizer, steps) if schedule else None
    for _ in range(steps):
        batch = torch.randint(rows, (50,))
        train(model, optimizer, 1, scheduler, batch=(x[batch], y[batch]))
    model.eval()
    return -q.log_prob(x[rows:], y[rows:]).mean().item()


def means(q):
    return torch.cat([m.flatten() for m in q.mean.values()])


def sds(q):
    return torch.cat([v.flatten() for v in q.variance.values()]).sqrt()


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors])


def like(vector, tensors):
    return [part.view_as(t) for part, t in zip(vector.split([t.numel() for t in tensors]), tensors, strict=True)]


@pytest.mark.parametrize("rule", [NaturalGradient, Retraction])
def test_a_step_is_the_one_of_a_dense_posterior(rule):
    """Of a quadratic log joint: the precision as VN or as the retraction in the dense world, to rounding."""
    n, delta, rho = 50, 0.02, 0.3
    model = mlp(torch.float64)
    q = networks.network(model, n, prior_precision=n * delta, temperature=1.0)
    family = q.families[0]
    family.begin_()
    m, D = means(q).clone(), means(q).numel()
    H, b = n * (delta + torch.rand(D, dtype=torch.float64)), torch.randn(D, dtype=torch.float64)
    kinds = {NaturalGradient: torchngvi.NaturalGaussian, Retraction: DiagonalGaussian}
    shape = {"structure": Diagonal} if rule is NaturalGradient else {}
    dense = kinds[rule](D, mean=m, scale=sds(q), dtype=torch.float64, **shape)
    opt = NaturalGradientVI(dense, rule(), lr=rho, step_size=Constant(), estimator=Hessian(2))
    opt.step(lambda t: -0.5 * (H * (t - b).square()).sum(-1))

    step = family.natural(like((H * (m - b)) / n, family.mean))
    observed = like(H / n - delta, family.mean)
    if rule is NaturalGradient:
        family.absorb_(family.statistics([h.sqrt() for h in observed], 1.0), rho)
    else:
        q.seed = 3
        family.retract_(observed, rho)
    family.refresh_()
    torch.testing.assert_close(
        dense.variance.flatten()[:D] if rule is Retraction else 1 / dense.precision.diagonal(),
        sds(q) ** 2,
        rtol=1e-12,
        atol=0,
    )
    if rule is NaturalGradient:  # VN divides by the new precision, the retraction by the old one
        step = family.natural(like((H * (m - b)) / n, family.mean))
    torch.testing.assert_close(dense.mean, m - rho * flat(step), rtol=1e-12, atol=1e-13)


class Told(networks.Categorical):
    """A likelihood whose sampled labels are told."""

    def __init__(self, labels):
        super().__init__()
        self.labels = labels

    def sampled_losses(self, output, generator):
        return F.cross_entropy(output, self.labels, reduction="none")


@pytest.mark.parametrize("structure", ["diagonal", "dense"])
def test_sampled_labels_are_the_gauss_newton_matrix_in_the_mean(structure):
    """Over all label combinations of a batch of three, weighted by their probabilities."""
    model, (x, _) = mlp(torch.float64), data(3, torch.float64)
    q = networks.network(model, 10, structure)
    p = model(x).softmax(-1).detach()
    found, expected = 0.0, 0.0
    for labels in itertools.product(range(3), repeat=3):
        q.likelihood, q.draw, q.observed = Told(torch.tensor(labels)), 0, 0
        networks.SampledLabels().after_forward(q, model(x))  # the first observation is the running mean
        q.refresh_()
        seen = q.families[0].curvature
        found += p[torch.arange(3), list(labels)].prod() * (seen if structure == "dense" else flat(seen))
    for k in range(3):
        J = torch.stack([flat(torch.autograd.grad(model(x)[k, c], q.parameters_of_network)) for c in range(3)])
        expected += J.mT @ (p[k].diag() - p[k].outer(p[k])) @ J / 3
    expected = expected if structure == "dense" else expected.diagonal()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-16)


def kronecker(o=3, i=2, n=30):
    """A q over one matrix with random roots, and its dense root C = A ⊗ B."""
    torch.manual_seed(2)
    q = networks.network(nn.Linear(i, o, bias=False, dtype=torch.float64), n, "kronecker")
    family = q.families[0]
    for name, root in family.named_buffers():
        if not name.startswith("mean"):
            root.copy_(torch.eye(len(root)) + 0.3 * torch.randn_like(root).tril())
    (A, B) = family.roots()[0]
    return q, family, torch.kron(A, B)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-11), (torch.float32, 2e-4)])
def test_the_standard_deviation_remembers_the_curvature(dtype, rtol):
    """Running mean and its bound by the start against their definitions, over 300 observations of every size."""
    generator = torch.Generator().manual_seed(0)
    q = networks.network(mlp(dtype), 1000, prior_precision={"0.*": 1e-2, "*": 2.0}, temperature=1.0)
    family, D = q.families[0], means(q).numel()
    h, size = torch.zeros(D, dtype=torch.float64), 10 ** (8 * torch.rand(D, generator=generator).double() - 6)
    delta, start = (
        flat([torch.full_like(m, value, dtype=torch.float64) for m, value in zip(family.mean, values, strict=True)])
        for values in (family.prior, family.start)
    )
    for k in range(1, 301):
        g = (size.sqrt() * torch.randn(D, generator=generator).double()).to(dtype)
        q.observe_(like(g, family.mean), 2.0, 0.01)
        q.refresh_()
        h.lerp_(2 * g.double() ** 2, max(4 / (k + 3), 0.01))
        sd = (1000 * (h.maximum(start) + delta)).rsqrt()
        torch.testing.assert_close(sds(q).double(), sd, rtol=rtol, atol=0)
    torch.testing.assert_close(flat(family.curvature).double(), h, rtol=rtol, atol=0)


def test_kronecker_verbs_are_those_of_the_dense_root():
    q, family, C = kronecker()
    g = torch.randn(3, 2, dtype=torch.float64)
    close = {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(family.colored([g])[0].flatten(), C @ g.flatten(), **close)
    torch.testing.assert_close(family.whitened([g])[0].flatten(), torch.linalg.solve(C, g.flatten()), **close)
    torch.testing.assert_close(family.natural([g])[0].flatten(), 30 * C @ C.mT @ g.flatten(), **close)
    torch.testing.assert_close(family.variances()[0].flatten(), (C @ C.mT).diagonal(), **close)
    torch.testing.assert_close(family.log_det(), torch.logdet(C @ C.mT), **close)


def test_kronecker_steps_follow_the_projected_natural_gradient():
    """The change of V is -C Π Cᵀ to first order, Π the projection of W - I on {E⊗I + I⊗F}; W = N Cᵀ(n gg' + δI)C."""
    q, family, C = kronecker()
    labels, delta, o, i = 7.0, family.prior[0], 3, 2
    gradients = torch.randn(4, o, i, dtype=torch.float64)
    W = sum(30 * C.mT @ (labels * torch.outer(g.flatten(), g.flatten())) @ C for g in gradients) / 4
    P = W + 30 * delta * C.mT @ C - torch.eye(o * i)
    basis = [torch.kron(E, torch.eye(i)) for E in torch.eye(o * o).view(-1, o, o)]
    basis += [torch.kron(torch.eye(o), F_) for F_ in torch.eye(i * i).view(-1, i, i)]
    basis = torch.stack(basis).flatten(1).double()
    projection = (torch.linalg.lstsq(basis.mT, P.flatten()[:, None], driver="gelsd").solution.mT @ basis).view(P.shape)
    statistics = [sum(parts) / 4 for parts in zip(*(family.statistics([g], labels) for g in gradients), strict=True)]
    (P_A, P_B) = family.projected(statistics)[0]
    together = torch.kron(P_A, torch.eye(i)) + torch.kron(torch.eye(o), P_B)
    torch.testing.assert_close(together, projection, rtol=1e-10, atol=1e-12)
    before = C @ C.mT
    family.absorb_(statistics, 1e-6)
    A, B = family.roots()[0]
    after = torch.kron(A @ A.mT, B @ B.mT)
    torch.testing.assert_close((after - before) / 1e-6, -C @ projection @ C.mT, rtol=1e-3, atol=1e-3)


def test_kronecker_settles_where_the_projection_vanishes():
    """From far, with the same statistic every time; the roots stay lower with positive diagonals."""
    q, family, _ = kronecker()
    gradients = torch.randn(6, 3, 2, dtype=torch.float64)
    for _ in range(400):
        each = [family.statistics([g], 2.0) for g in gradients]
        statistics = [sum(parts) / 6 for parts in zip(*each, strict=True)]
        family.absorb_(statistics, 0.2)
        assert all((root.diagonal() > 0).all() and (root.triu(1) == 0).all() for root in family.roots()[0])
    assert max(P.norm() for P in family.projected(statistics)[0]) < 1e-8


def test_sampled_labels_are_drawn_from_the_predictions():
    """Frequencies within four standard errors, for each likelihood."""
    g = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.3, -1.0, 0.5]).expand(20_000, 3).clone().requires_grad_()
    losses = networks.Categorical().sampled_losses(logits, g)
    expected = torch.special.entr(logits[0].softmax(-1)).sum()
    assert abs(losses.mean() - expected) < 4 * losses.std() / 20_000**0.5
    losses = networks.Bernoulli().sampled_losses(logits[:, 1], g)
    expected = torch.special.entr(torch.stack([logits[0, 1].sigmoid(), (-logits[0, 1]).sigmoid()])).sum()
    assert abs(losses.mean() - expected) < 4 * losses.std() / 20_000**0.5
    losses = networks.Gaussian(2.0).sampled_losses(logits[:, 0], g)
    assert abs(losses.mean() - 0.5) < 4 * losses.std() / 20_000**0.5
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert abs(gradient[:, 0].square().mean() - 0.25) < 0.02  # 1/scale²


def test_the_radius_bounds_the_divergence_of_a_move():
    """A long natural step moves the mean by r nats a datum exactly; with lr at half its peak by a quarter."""
    model, radius = mlp(torch.float64), 1e-3
    q = networks.network(model, 50, temperature=0.5)
    optimizer = networks.VON(q, lr=100.0, radius=radius)
    for lr, share in [(100.0, 1.0), (50.0, 0.25)]:
        optimizer.param_groups[0]["lr"] = lr
        before = means(q).clone()
        train(model, optimizer, 1)
        kl = 0.5 * (flat(q.families[0].precisions()) * (means(q) - before).square()).sum() / 50
        torch.testing.assert_close(kl.item(), share * radius, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, {"rtol": 1e-4, "atol": 1e-6}), (torch.bfloat16, {"rtol": 1e-2, "atol": 5e-3})],
)
def test_a_step_in_parts_is_the_step(dtype, tolerance):
    """Parameters of every size and layout: the draw, the divergence and the share of a move against their equations."""
    wide = nn.Sequential(nn.Conv2d(3, 3, 300), nn.Linear(600, 600), nn.Linear(2, 1), nn.Conv2d(2, 2, 3)).to(dtype)
    wide[0].to(memory_format=torch.channels_last)
    q = networks.network(wide, 100, temperature=0.25)
    family, optimizer = q.families[0], torch.optim.SGD(wide.parameters(), lr=1.0)
    attachment = networks.attach(optimizer, q, radius=1e3)
    attachment.curvature = networks.Curvature()  # none is observed
    for k in range(2):
        for p, m, sd, name in zip(q.parameters_of_network, family.mean, family.stddev, q.names, strict=True):
            torch.testing.assert_close(p, (m + 0.5 * sd * normals(m, name, 0, k)).to(dtype))
        torch.manual_seed(k)
        moves = [torch.randn_like(p) for p in wide.parameters()]
        for p, move in zip(wide.parameters(), moves, strict=True):
            p.grad = move.clone()
        before = [m.clone() for m in family.mean]
        optimizer.step()
        dm = [-(g.float() + q.prior[name] * m) for g, m, name in zip(moves, before, q.names, strict=True)]
        share = float((1e3 / sum(0.5 * 0.01 * d.square().sum() for d in dm)) ** 0.5)
        assert 0.05 < share < 0.95
        for m, old, d in zip(family.mean, before, dm, strict=True):
            torch.testing.assert_close(m - old, share * d, **tolerance)


def test_the_temperature_0_is_the_optimizer_alone_with_a_radius():
    """Without a radius the steps are those of Adam with the prior as decay; with one no move is longer."""
    plain, free, short = (mlp(torch.float64) for _ in range(3))
    q = networks.network(free, num_data=40, temperature=0, prior_precision=2.0)
    optimizers = [torch.optim.Adam(plain.parameters(), lr=0.1, weight_decay=2.0 / 40), adamw(free), adamw(short)]
    networks.attach(optimizers[1], q, radius=math.inf)
    limited = networks.network(short, num_data=40, temperature=0)
    networks.attach(optimizers[2], limited, radius=1e-5)
    before = means(limited)
    for model, optimizer in zip((plain, free, short), optimizers, strict=True):
        train(model, optimizer, 20)
    torch.testing.assert_close(flat(free.parameters()), flat(plain.parameters()), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(means(q), flat(free.parameters()), rtol=0, atol=0)  # in training, too
    assert 0 < (means(limited) - before).norm() < 0.2 * (means(q) - before).norm()
    assert not sds(q).any()
    assert q.kl() == math.inf
    x, y = data(20, torch.float64)
    assert q.predictive(x).epistemic.abs().max() < 1e-12
    found = networks.calibrate(q, [(x, y)])
    assert q.temperature == found.temperature > 0
    assert sds(q).all()


def test_noise_of_a_large_tensor_is_of_many_windows():
    """It has the moments of normal numbers, is the same each time, and no window of it is another one."""
    like = torch.empty(1000, 1000)
    noise = normals(like, "a", 0, 3)
    assert noise.shape == like.shape
    assert torch.equal(noise, normals(like, "a", 0, 3))
    assert not torch.equal(noise, normals(like, "b", 0, 3))
    assert abs(float(noise.mean())) < 5e-3
    assert abs(float(noise.std()) - 1) < 5e-3
    first, second = noise.flatten()[: 2**19].chunk(2)
    assert not torch.equal(first, second)


def test_ivon_takes_the_published_steps():
    """Thirty steps against the equations of Shen et al. (2024), written out, with the same noise."""
    n, lr, h0, b1, b2, delta, clip = 40, 0.1, 0.3, 0.9, 0.99, 1e-3, 0.5
    model = mlp(torch.float64)
    optimizer = networks.IVON(model, n, lr, h0, (b1, b2), delta, clip)
    other = mlp(torch.float64)
    m = [p.detach().clone() for p in other.parameters()]
    names = [name for name, _ in other.named_parameters()]
    momentum, hess = [torch.zeros_like(p) for p in m], [torch.full_like(p, h0) for p in m]
    for t in range(1, 31):
        train(model, optimizer, 1, first=t)
        noise = [normals(p, name, 0, t - 1) for p, name in zip(m, names, strict=True)]
        sd = [(n * (h + delta)).rsqrt() for h in hess]
        x, y = data(20, torch.float64, seed=10 + t)
        for p, a, e, s in zip(other.parameters(), m, noise, sd, strict=True):
            p.data = a + s * e
        other.zero_grad()
        F.cross_entropy(other(x), y).backward()
        for k, p in enumerate(other.parameters()):
            momentum[k] = b1 * momentum[k] + (1 - b1) * p.grad
            f = p.grad * noise[k] / sd[k]
            hess[k] = b2 * hess[k] + (1 - b2) * f + 0.5 * (1 - b2) ** 2 * (hess[k] - f) ** 2 / (hess[k] + delta)
            direction = (momentum[k] / (1 - b1**t) + delta * m[k]) / (hess[k] + delta)
            m[k] = m[k] - lr * (h0 + delta) * direction.clamp(-clip, clip)
    torch.testing.assert_close(means(optimizer.q), flat(m), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(flat(optimizer.q.families[0].curvature), flat(hess), rtol=1e-10, atol=1e-12)


def test_vogn_takes_the_published_steps():
    """Thirty steps against the equations of Khan et al. (2018), one example after the other, with the same noise."""
    n, lr, h0, b2, delta = 40, 0.02, 0.3, 0.95, 1e-3
    model, other = mlp(torch.float64), mlp(torch.float64)
    optimizer = networks.VOGN(model, n, lr, h0, (0.0, b2), delta)
    m = [p.detach().clone() for p in other.parameters()]
    names = [name for name, _ in other.named_parameters()]
    hess = [torch.full_like(p, h0) for p in m]
    for t in range(30):
        x, y = data(8, torch.float64, seed=t)
        optimizer.zero_grad()
        optimizer.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
        for p, a, name, h in zip(other.parameters(), m, names, hess, strict=True):
            p.data = a + normals(a, name, 0, t) / (n * (h + delta)).sqrt()
        g, squares = [0.0] * len(m), [0.0] * len(m)
        for i in range(8):
            each = torch.autograd.grad(F.cross_entropy(other(x[i : i + 1]), y[i : i + 1]), list(other.parameters()))
            g = [total + e / 8 for total, e in zip(g, each, strict=True)]
            squares = [total + e.square() / 8 for total, e in zip(squares, each, strict=True)]
        for k in range(len(m)):
            hess[k] = b2 * hess[k] + (1 - b2) * squares[k]
            m[k] = m[k] - lr * (g[k] + delta * m[k]) / (hess[k] + delta)
    torch.testing.assert_close(means(optimizer.q), flat(m), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(flat(optimizer.q.families[0].curvature), flat(hess), rtol=1e-10, atol=1e-12)


@pytest.mark.accuracy
def test_gradient_noise_has_the_variance_of_a_mean():
    """White noise of variance v/B in the gradients is observed as a curvature v, within four standard errors."""
    model = nn.Linear(1, 1, bias=False)
    q = networks.network(model, 100, likelihood=networks.Gaussian(1.0))
    curvature, B, v = networks.GradientNoise(batch_size=8), 8, 3.0
    g = torch.Generator().manual_seed(0)
    seen = []
    for _ in range(4000):
        noise = torch.randn(1, 1, generator=g) * (v / B) ** 0.5
        before, count = q.families[0].curvature[0].item(), q.observed
        curvature.before_step(q, {"weight": 0.7 + noise})
        q.refresh_()
        rate = max(0.01, 1 / max(q.observed, 1))
        if q.observed > count and q.observed > 100:
            seen.append((q.families[0].curvature[0].item() - (1 - rate) * before) / rate)
    seen = torch.tensor(seen)
    assert abs(seen.mean() - v) < 4 * seen.std() / len(seen) ** 0.5 * 1.5  # neighbours share a running mean


def test_parameters_hold_the_draw_in_training_and_the_mean_elsewhere():
    model, q, _, _ = attached(steps=None, radius=0.1)
    x, _ = data(5)
    start = means(q).clone()
    model(x)
    assert not torch.equal(flat(list(model.parameters())), start)
    assert torch.equal(flat(list(model.state_dict().values())), start)
    drawn = flat(list(model.parameters())).clone()
    model.eval()
    model(x)
    assert torch.equal(flat(list(model.parameters())), start)
    model.train()
    model(x)
    assert torch.equal(flat(list(model.parameters())), drawn)  # the same draw until a step
    model.eval()
    model[0](x)  # a part that is called alone
    assert torch.equal(flat(list(model.parameters())), start)


def test_evaluation_leaves_no_trace():
    """eval(), state_dict(), predict() after every step: the same means to the bit."""

    def run(between):
        model, q, optimizer, _ = attached(steps=20)
        train(model, optimizer, 20, between=lambda: between(model, q))
        return means(q)

    def look(model, q):
        model.eval()
        model(data(3)[0])
        model.state_dict()
        model.train()
        q.predict(data(3)[0], samples=2)

    assert torch.equal(run(look), run(lambda model, q: None))


@pytest.mark.parametrize(("make", "noise"), [(adamw, False), (fused, False), (adamw, True)])
def test_a_resumed_run_is_the_uninterrupted_one(make, noise):
    """Through bytes that are read with weights_only=True, in the middle of a cosine schedule."""

    def start():
        curvature = networks.GradientNoise(20) if noise else None
        model, q, optimizer, _ = attached(make=make, curvature=curvature)
        parts = [model, q, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)]
        return [*parts, curvature] if noise else parts

    model, q, optimizer, scheduler, *_ = start()
    train(model, optimizer, 20, scheduler=scheduler)
    half = start()
    train(half[0], half[2], 8, scheduler=half[3])
    file = io.BytesIO()
    torch.save([part.state_dict() for part in half], file)
    file.seek(0)
    other = start()
    train(other[0], other[2], 3)  # it has been elsewhere
    for part, state in zip(other, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    train(other[0], other[2], 12, scheduler=other[3], first=8)
    assert torch.equal(means(other[1]), means(q))
    assert torch.equal(sds(other[1]), sds(q))


def test_loading_the_network_sets_the_mean():
    model, q, _, _ = attached(steps=None, radius=0.1)
    other = mlp(seed=5)
    model(data(3)[0])
    model.load_state_dict(other.state_dict())
    assert torch.equal(means(q), flat([p.detach() for p in other.parameters()]))
    model(data(3)[0])
    part = mlp(seed=6)[0].state_dict()
    model[0].load_state_dict(part)  # a part alone; what is not loaded keeps its mean
    assert torch.equal(q.mean["0.weight"], part["weight"])
    assert torch.equal(q.mean["2.weight"], other[2].weight)


def test_tied_frozen_and_unused_parameters():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.unused, self.frozen = (nn.Linear(4, 4) for _ in range(4))
            self.b.weight = self.a.weight
            self.frozen.requires_grad_(False)
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(torch.tanh(self.frozen(self.b(torch.tanh(self.a(x))))))

    torch.manual_seed(0)
    model = Odd()
    frozen, unused = model.frozen.weight.clone(), model.unused.weight.detach().clone()
    _, q, optimizer, _ = attached(model=model, steps=10)
    assert "b.weight" not in q.names
    assert "frozen.weight" not in q.names
    train(model, optimizer, 10)
    state = model.state_dict()
    assert torch.equal(state["a.weight"], state["b.weight"])
    assert torch.equal(state["frozen.weight"], frozen)
    assert torch.equal(state["unused.weight"], unused)


def test_patterns_choose_what_is_bayesian_and_its_prior():
    model = mlp()
    q = networks.network(model, 100, structure={"2.*": "diagonal"}, prior_precision={"*.bias": 2.0, "*": 5.0})
    assert q.names == ["2.weight", "2.bias"]
    assert q.prior == {"2.weight": 0.05, "2.bias": 0.02}
    optimizer = adamw(model)
    networks.attach(optimizer, q, steps=5)
    before = model[0].weight.detach().clone()
    train(model, optimizer, 5)
    assert not torch.equal(model[0].weight, before)  # trained as ever


def test_several_optimizers_share_a_posterior():
    model = mlp()
    q = networks.network(model, 100)
    a = torch.optim.SGD(model[0].parameters(), lr=0.1)
    b = torch.optim.AdamW(model[2].parameters(), lr=0.1, weight_decay=0.0)
    networks.attach([a, b], q, steps=10)
    train(model, [a, b], 4)
    train(model, a, 1)  # as a scaler leaves one out
    train(model, [a, b], 5)
    assert q.draw == 10  # a's step alone is ended by the next forward pass


@pytest.mark.accuracy
def test_scaled_gradients_of_a_fused_optimizer():
    """A GradScaler leaves the unscaling to a fused optimizer; the posterior does it."""

    def run(scale):
        model, q, optimizer, _ = attached(steps=10, make=fused, curvature=networks.GradientNoise(20))
        train_scaled(model, optimizer, 10, scale)
        return means(q)

    torch.testing.assert_close(run(1024.0), run(1.0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [adamw, fused])
def test_an_overflow_loses_nothing(make):
    """Nor is a loss that is scaled taken for a sum over labels."""
    model, q, optimizer, _ = attached(steps=10, make=make)
    at = [means(q).clone()]
    factors = 1.0, 1.0, torch.inf, 1.0
    scaler = train_scaled(model, optimizer, 4, factor=lambda k: factors[k], between=lambda: at.append(means(q).clone()))
    assert [torch.equal(*pair) for pair in itertools.pairwise(at)] == [False, False, True, False]
    assert scaler.get_scale() == 2.0**9
    assert all(state["exp_avg"].isfinite().all() for state in optimizer.state.values())


def test_losses_that_stay_nan_warn_once_until_a_step_is_taken():
    model, q, optimizer, handle = attached(steps=20)
    x, y = data(20)
    told = []
    for factor in (torch.nan, torch.nan, torch.nan, 1.0, torch.nan, torch.nan):
        optimizer.zero_grad()
        (factor * F.cross_entropy(model(x), y)).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        told.append([str(warning.message) for warning in caught])
    assert [len(each) for each in told] == [1, 0, 0, 0, 1, 0]
    assert "will be left out without another warning until one is taken; look at the batch" in told[0][0]
    assert handle.skipped == 5


def test_clipping_accumulation_and_normalisation():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    _, q, optimizer, _ = attached(model=model)
    x, y = data(40)
    for _ in range(20):
        optimizer.zero_grad()
        for half in (slice(0, 20), slice(20, 40)):
            drawn = flat(list(model.parameters())).clone() if q.holds_draw else None
            (F.cross_entropy(model(x[half]), y[half]) / 2).backward()
            if half.start:
                assert torch.equal(flat(list(model.parameters())), drawn)  # one draw a step
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert q.draw == 20
    q.update_bn([x])
    with q.at_mean():
        statistics = F.linear(x, model[0].weight, model[0].bias).mean(0)
    torch.testing.assert_close(model[1].running_mean, statistics)
    model.eval()
    assert (model(x).argmax(1) == y).float().mean() > 0.7


@pytest.mark.accuracy
def test_a_compiled_network_is_the_same():
    def run(wrap):
        model, q, optimizer, _ = attached(steps=12)
        train(wrap(model), optimizer, 12)
        return means(q)

    compiled = run(lambda m: torch.compile(m, backend="eager"))
    torch.testing.assert_close(compiled, run(lambda m: m), rtol=1e-5, atol=1e-6)


@pytest.mark.accuracy
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_step_is_the_same():
    """The hooks are out of the compiler's sight, which would compile them anew for every draw."""
    graphs = []

    def backend(graph, examples):
        graphs.append(graph)
        return graph

    def run(wrap):
        model, q, optimizer, _ = attached(steps=12, make=sgd)
        optimizer.step = wrap(optimizer.step)
        train(model, optimizer, 12)
        return means(q)

    compiled = run(lambda step: torch.compile(step, backend=backend))
    assert len(graphs) < 4  # of the optimizer
    torch.testing.assert_close(compiled, run(lambda step: step), rtol=1e-5, atol=1e-6)


def test_half_precision_keeps_the_mean_in_single():
    model, q, optimizer, _ = attached(model=mlp(torch.bfloat16), steps=10)
    train(model, optimizer, 10)
    assert all(m.dtype == torch.float32 for m in q.mean.values())
    assert any(not torch.equal(m, m.bfloat16().float()) for m in q.mean.values())
    assert model.state_dict()["0.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(("dtype", "lr"), [(torch.bfloat16, 1e-3), (torch.float32, 1e-8)])
def test_a_rate_that_rounding_loses_is_named(dtype, lr):
    model, _, optimizer, _ = attached(model=mlp(dtype), steps=10, lr=lr)
    with pytest.warns(UserWarning, match=f"at the learning rate {lr:g} are lost in the rounding .* Take lr=1"):
        train(model, optimizer, 1)


def test_removed_hooks_leave_the_network_as_any_other():
    model, q, optimizer, handle = attached(steps=10)
    train(model, optimizer, 2)
    handle.remove()
    model(data(3)[0])
    assert torch.equal(flat(list(model.parameters())), means(q))
    q.release()
    train(model, optimizer, 2)
    assert not torch.equal(flat(list(model.parameters())), means(q))
    networks.network(model, 100)


@untrained
def test_predictions_average_over_draws():
    model = mlp()
    q = networks.network(model, 20)
    model[0].eval()
    x, y = data(7)
    p = q.predict(x, samples=5)
    torch.testing.assert_close(p.sum(-1), torch.ones(7))
    each = []
    for k in range(5):
        with q.drawn(k):
            each.append(model(x).softmax(-1).detach())
    torch.testing.assert_close(p, torch.stack(each).mean(0))
    torch.testing.assert_close(q.log_prob(x, y, samples=5), p.gather(1, y[:, None])[:, 0].log())
    assert model.training
    assert not model[0].training  # each module keeps its own mode
    found = q.predictive(x, samples=5)
    torch.testing.assert_close(found.total, torch.special.entr(p).sum(-1))
    assert (found.epistemic > 0).all()
    assert re.fullmatch(
        r"Predictive\(mean of shape \(\d+, 3\); epistemic [\d.e-]+, aleatoric [\d.e-]+ in the mean\)", repr(found)
    )


@untrained
def test_predictions_of_numbers_have_the_variance_of_a_linear_model():
    """Of a linear network: epistemic x'Vx, aleatoric the noise, within five standard errors of 2,000 draws."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    q = networks.network(model, 10, likelihood=networks.Gaussian(0.5))
    x = torch.randn(4, 3)
    found = q.predictive(x, samples=2000)
    expected = x.square() @ q.variance["weight"][0]
    torch.testing.assert_close(found.epistemic[:, 0], expected, rtol=5 * (2 / 2000) ** 0.5, atol=0)
    assert (found.aleatoric == 0.25).all()
    q = networks.network(nn.Linear(3, 1), 10, likelihood="bernoulli")
    assert ((q.predict(x) > 0) & (q.predict(x) < 1)).all()
    assert q.predictive(x).epistemic.shape == (4, 1)


@untrained
@pytest.mark.filterwarnings("ignore:The temperature chosen:torchngvi.errors.CalibrationWarning")
def test_calibrate_finds_the_temperature():
    """Labels drawn from the network at its mean: the less noise the better; wide noise is punished."""
    model = mlp()
    with torch.no_grad():
        model[2].weight *= 20
    q = networks.network(model, 5)
    x, _ = data(400)
    y = model(x).argmax(1)
    found = networks.calibrate(q, [(x[:200], y[:200]), (x[200:], y[200:])], samples=4)
    assert q.temperature == found.temperature < 0.1
    assert found.nll <= min(found.tried.values()) + 1e-3
    assert all(nll > found.nll for t, nll in found.tried.items() if t > found.temperature)
    wide = sds(q)
    q.temper_(4 * found.temperature)
    torch.testing.assert_close(sds(q), 2 * wide)
