"""The flow of Example 5 with both orthogonal matrices on the move: its law, and that of its runs, are those of one."""

import pytest
import torch
from helpers import vec

from examples.papers.godichon2023 import flow, two_rotations
from examples.papers.godichon2023.two_rotations import TwoRotations
from torchngvi.ifvb import OrthogonalFlow
from torchngvi.posteriors.flat import flows as orthogonal_flow
from torchngvi.stepsizes import Constant
from torchngvi.testing import check_flat_posterior

FLOAT = torch.float64
STEPS = 12


def rotation(cosine):
    sine = (1 - cosine**2) ** 0.5
    return vec((cosine, -sine), (sine, cosine))


B1, B2, W2 = vec(0.3, -0.5), vec(0.1, 0.2), rotation(0.8)


def both(W1):
    return TwoRotations(W1, B1, W2, B2)


def log_joint(theta):
    return -0.5 * (theta - vec(0.6, 0.4)).square().sum(-1) / 0.3


@pytest.mark.parametrize("cosine", [1.0, 0.6, -0.28])
def test_the_contract_of_a_flat_posterior(cosine):
    check_flat_posterior(lambda: both(rotation(cosine)))


def test_the_law_does_not_depend_on_the_first_matrix(monkeypatch):
    """θ at the noise ε is the θ of the other flow at W₁ε, which is standard normal; the densities are the same."""
    W1, noise = rotation(-0.28), torch.randn(50, 2, dtype=FLOAT, generator=torch.Generator().manual_seed(0))
    q, one = both(W1), OrthogonalFlow(B1, W2, B2)
    monkeypatch.setattr(two_rotations, "normal", lambda *_: noise)
    monkeypatch.setattr(orthogonal_flow, "normal", lambda *_: noise @ W1.mT)
    theta = q.sample(50)
    assert torch.allclose(theta, one.sample(50), rtol=1e-13)
    assert torch.equal(q.log_prob(theta), one.log_prob(theta))
    assert q.score(theta)[:, :4].abs().max() == 0
    assert torch.equal(q.score(theta)[:, 4:], one.score(theta))


def run(q, build, steps=STEPS):
    """The λ of each step."""
    optimizer = build(q, torch.Generator().manual_seed(0))
    optimizer.step_size = Constant()  # without a clip, whose norm is that of all of λ
    path = []
    for _ in range(steps):
        optimizer.step(log_joint)
        path.append(q.vector.detach().clone())
    return torch.stack(path)


@pytest.mark.parametrize("name", ["ordinary gradient", "IFVB", "Adam"])
def test_runs_are_equal_in_law(name, monkeypatch):
    """Where the noise of one run is W₁ε of the other, (b₁, W₂, b₂) goes the same way; W₁ moves, and stays orthogonal.

    W₁ is a function of the noise before ε, so that W₁ε is standard normal and new at each step: the runs have one law.
    The dampings of the window and of the batch Fisher matrix are in units of a mean over all of λ, and differ.
    """
    q, generator, turned = both(rotation(0.6)), torch.Generator().manual_seed(1), []

    def drawn(shape, like, dim, _):
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        noise = torch.randn((*sizes, dim), dtype=FLOAT, generator=generator)
        turned.append(noise @ q.parts(q.vector)[0].mT)
        return noise

    monkeypatch.setattr(two_rotations, "normal", drawn)
    build = flow._flow_methods(5, 4)[name]
    path = run(q, build)
    again = iter(turned)
    monkeypatch.setattr(orthogonal_flow, "normal", lambda *_: next(again))
    other = run(OrthogonalFlow(B1, W2, B2), build)
    assert torch.allclose(path[:, 4:], other, rtol=1e-9, atol=1e-11)
    assert next(again, None) is None
    W1 = path[:, :4].unflatten(-1, (2, 2))
    assert float((W1.mT @ W1 - torch.eye(2, dtype=FLOAT)).abs().max()) < 1e-12
    assert float((W1[-1] - rotation(0.6)).abs().max()) > 1e-4
    assert float((path[-1, 4:] - OrthogonalFlow(B1, W2, B2).vector).abs().max()) > 1e-3
