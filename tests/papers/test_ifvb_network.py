"""The network with the group lasso, its closed forms, and the example of the IFVB paper."""

import math
import runpy
from pathlib import Path

import pytest
import torch
from helpers import randn, seeded
from ifvb_parts import AIFVB
from scipy import integrate, stats

from torchngvi.ifvb import GroupLassoNetwork, Pathwise, RankOneGaussian, run

FLOAT = torch.float64


def network(hidden=(4, 3), rows=30, **settings):
    X = randn(rows, 2)
    return GroupLassoNetwork(X, X[:, 0].sin() + 0.1 * randn(rows, seed=1), hidden, **settings)


def test_layout_and_size():
    """Two hidden layers of ten on eleven inputs: 241 weights, as in Example 4."""
    assert GroupLassoNetwork(torch.zeros(3, 11), torch.ones(3), (10, 10), prior=(10.0, 9.0)).dim == 241
    net = network()
    theta = randn(5, net.dim)
    one = theta[2]
    W1, b1, W2, b2, W3, b3 = one.split([8, 4, 12, 3, 3, 1])
    layer = (net.X @ W1.view(4, 2).mT + b1).relu()
    layer = (layer @ W2.view(3, 4).mT + b2).relu()
    expected = (layer @ W3.view(1, 3).mT + b3)[:, 0]
    assert torch.allclose(net.predict(theta)[2], expected)
    assert torch.equal(net.groups(one), W1.view(4, 2))


def test_log_joint():
    """-½E[1/σ²] RSS - ½ Σ E[1/τ_j]|w_j|², first-layer weights alone penalised."""
    net = network()
    net.inverse_tau = torch.tensor([2.0, 5.0], dtype=FLOAT)
    theta = randn(3, net.dim)
    rss = (net.y - net.predict(theta)).square().sum(-1)
    w = net.groups(theta)
    penalty = 2 * w[..., 0].square().sum(-1) + 5 * w[..., 1].square().sum(-1)
    assert torch.allclose(net.log_joint(theta), -0.5 * (net.inverse_variance * rss + penalty))
    parts = torch.stack([net.minibatch(rows).log_joint(theta) for rows in torch.arange(30).split(10)])
    assert torch.allclose(parts.mean(0), net.log_joint(theta))
    assert not net.minibatch(torch.arange(3)).comparable
    assert len(net.tensors()) == 4


def test_groups_in_closed_form():
    """q(τ) ∝ τ^{-1/2} exp(-E|w|²/(2τ) - γ²τ/2): E[1/τ] and E[τ] by quadrature; γ maximises E log p(τ | γ)."""
    net = network(gamma=0.7)
    mean, variance = randn(net.dim), 0.1 + randn(net.dim, seed=2).square()
    square = net.groups(mean.square() + variance).sum(0)
    net.update_groups(mean, variance)
    for j in range(2):
        E = float(square[j])

        def density(tau, E=E):
            return tau**-0.5 * math.exp(-E / (2 * tau) - 0.7**2 * tau / 2)

        total, inverse, first = (
            integrate.quad(lambda tau, p=p: tau**p * density(tau), 0, math.inf)[0] for p in (0, -1, 1)
        )
        assert net.inverse_tau[j].item() == pytest.approx(inverse / total, rel=1e-6)
        tau = first / total

        def expected_log_prior(gamma, tau=tau):
            return (4 + 1) / 2 * math.log(gamma**2 / 2) - gamma**2 / 2 * tau

        best = net.gamma[j].item()
        assert expected_log_prior(best) > max(expected_log_prior(0.99 * best), expected_log_prior(1.01 * best))
        assert best != 0.7


def test_noise_in_closed_form():
    """q(σ²) = IG(a₀ + n/2, b₀ + RSS/2), E[1/σ²] its ratio; b₀ = 9 sd(y) by default."""
    net = network(prior=(3.0, 2.0))
    mean = randn(net.dim)
    rss = float((net.y - net.predict(mean)).square().sum())
    net.update_noise(mean)
    law = stats.invgamma(3 + 15, scale=2 + rss / 2)
    assert net.inverse_variance.item() == pytest.approx(law.expect(lambda v: 1 / v), rel=1e-6)
    assert network().prior == (10.0, pytest.approx(9 * float(net.y.std())))


@pytest.mark.accuracy
def test_the_input_that_matters_is_kept():
    """y depends on the first input alone: its group is penalised less; early stopping keeps the best iterate."""
    net = network((6,), rows=80)
    valid = randn(40, 2, seed=7)
    target = valid[:, 0].sin()
    start = net.start(seeded(3))
    q = RankOneGaussian(start, 0.1 * randn(net.dim, seed=5), torch.full((net.dim,), 0.1, dtype=FLOAT))
    opt = AIFVB(q, 1.0, alpha=0.6, offset=100.0, estimator=Pathwise(5), clip=5.0, generator=seeded())

    def monitor():
        mean, b, c = q.vector.detach().chunk(3)
        net.update_groups(mean, b.square() + c.square())
        net.update_noise(mean)
        return float((net.predict(mean, valid) - target).square().mean())

    seen = []
    run(opt, net, 400, monitor=lambda: seen.append(monitor()) or seen[-1], window=1, patience=200)
    assert min(seen) < 0.15
    assert min(seen) == pytest.approx(monitor())
    assert float(net.inverse_tau[0]) < float(net.inverse_tau[1])


def test_start_is_in_its_range():
    net = network()
    start = net.start(seeded())
    assert start.shape == (net.dim,)
    assert float(start[:8].abs().max()) <= 1.0  # √(6/(2 + 4))
    assert start[8:12].tolist() == [0.0] * 4
    wide = network((200,))
    weights, bound = wide.start(seeded())[:400], math.sqrt(6 / 202)
    assert 0.98 * bound < float(weights.max()) <= bound
    assert -bound <= float(weights.min()) < -0.98 * bound
    assert abs(float(weights.mean())) < 4.5 * bound / math.sqrt(3 * 400)


def test_what_the_log_joint_depends_on():
    """The buffers themselves, so that a change of one is seen; E[1/σ²] starts at a₀/b₀."""
    net = network(prior=(10.0, 4.0))
    assert net.inverse_variance.item() == 2.5
    assert all(
        a is b for a, b in zip(net.tensors(), (net.X, net.y, net.inverse_tau, net.inverse_variance), strict=True)
    )


@pytest.mark.accuracy
def test_the_example(tmp_path, capsys):
    """Where the answer is known it is found, and a flow passes the best Gaussian on a crescent."""
    path = Path(__file__).parents[2] / "examples" / "ifvb_flow.py"
    arguments = ["--steps", "250", "--out", str(tmp_path / "figure.png")]
    beta, flow, gaussian = runpy.run_path(str(path))["main"](arguments)
    assert beta.vector.tolist() == pytest.approx([58, 144], rel=0.02)
    assert gaussian < flow < math.log(math.pi) + 0.05
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert "nats below the evidence: flow" in capsys.readouterr().out
