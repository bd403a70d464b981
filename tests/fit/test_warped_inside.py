"""Curves inside the root of a Gaussian, `q.warped(inside=True)`: the density, its directions, and what a fit finds."""

import math
from copy import deepcopy

import pytest
import torch
from helpers import randn

from torchngvi import CholeskyGaussian, DiagonalGaussian, LogJoint, NaturalGaussian, PrecisionCholeskyGaussian, fit
from torchngvi.errors import InputError
from torchngvi.fitting.warped import rotated_apart, skewed_directions
from torchngvi.models import WarpedTarget
from torchngvi.posteriors.warps import YeoJohnson
from torchngvi.structures import block_diagonal

DTYPE = torch.float64
FAMILIES = [CholeskyGaussian, PrecisionCholeskyGaussian, NaturalGaussian]


def rotation(dim, seed=0):
    return torch.linalg.qr(randn(dim, dim, seed=seed))[0]


def bent(make=CholeskyGaussian, dim=3, warp=None, size=0.3):
    """A warped posterior with curves and directions at random."""
    root = torch.tril(0.4 * randn(dim, dim, seed=1)) + torch.eye(dim, dtype=DTYPE)
    q = make(dim, mean=randn(dim, seed=2), scale=root, dtype=DTYPE).warped(warp, inside=True)
    with torch.no_grad():
        q.phi.copy_(size * randn(*q.phi.shape, seed=3))
        q.turn.copy_(rotation(dim, seed=4))
    return q


def log_gammas(a, turn):
    """Independent log-gamma densities of shape a, rotated: their sd is √ψ'(a)."""

    def log_joint(theta):
        eta = theta @ turn
        return (a * eta - eta.exp()).sum(-1)

    return log_joint


@pytest.mark.parametrize("make", FAMILIES)
def test_the_identity_is_the_gaussian(make):
    q = bent(make, size=0.0)
    theta = randn(5, 3, seed=5)
    torch.testing.assert_close(q.log_prob(theta), q.base.log_prob(theta), atol=1e-12, rtol=0)
    torch.testing.assert_close(q.entropy(), q.base.entropy(), atol=1e-12, rtol=0)
    torch.testing.assert_close(q.bent(theta)[0], theta, atol=1e-12, rtol=0)


@pytest.mark.parametrize("make", FAMILIES)
@pytest.mark.parametrize("warp", [None, YeoJohnson()])
def test_maps_undo_each_other_and_their_volume_is_the_jacobian(make, warp):
    q, x = bent(make, warp=warp), randn(6, 3, seed=6)
    theta, log_volume = q.bent(x)
    torch.testing.assert_close(q.unbent(theta), x, atol=1e-9, rtol=0)
    jacobian = torch.stack([torch.autograd.functional.jacobian(lambda one: q.bent(one)[0], point) for point in x])
    torch.testing.assert_close(log_volume, torch.linalg.slogdet(jacobian)[1], atol=1e-10, rtol=0)
    torch.testing.assert_close(q.log_prob(theta), q.base.log_prob(x) - log_volume, atol=1e-9, rtol=0)


@pytest.mark.accuracy
def test_the_density_in_the_plane():
    """Its mass, mean, covariance and entropy by a sum over a grid: mean and covariance are those of the base."""
    q = bent(dim=2, size=0.2)
    grid = torch.linspace(-14, 14, 1201, dtype=DTYPE)
    points = torch.stack(torch.meshgrid(grid, grid, indexing="ij"), -1)
    log_q, cell = q.log_prob(points), (grid[1] - grid[0]).square()
    p = cell * log_q.exp()
    assert p.sum().item() == pytest.approx(1.0, abs=1e-6)
    mean = torch.einsum("ab,abi->i", p, points)
    torch.testing.assert_close(mean, q.base.mean, atol=1e-5, rtol=0)
    apart = points - mean
    torch.testing.assert_close(torch.einsum("ab,abi,abj->ij", p, apart, apart), q.base.covariance, atol=1e-4, rtol=0)
    assert -(p * log_q).sum().item() == pytest.approx(q.entropy().item(), abs=1e-5)
    assert torch.equal(q.covariance, q.base.covariance)


def test_quantiles_are_those_of_draws():
    q = bent()
    draws = q.sample(200_000, torch.Generator().manual_seed(1))
    levels = [0.05, 0.5, 0.95]
    truth = torch.quantile(draws, torch.tensor(levels, dtype=DTYPE), 0)
    assert ((q.quantile(levels) - truth) / q.stddev).abs().max() < 0.04
    torch.testing.assert_close(draws.mean(0), q.mean, atol=0.02, rtol=0)


def test_state():
    """Curves and directions come with the state, and copies are their own."""
    q, p = bent(), CholeskyGaussian(3, dtype=DTYPE).warped(inside=True)
    p.load_state_dict(q.state_dict())
    theta = randn(4, 3)
    assert torch.equal(p.log_prob(theta), q.log_prob(theta))
    copied = deepcopy(q)
    with torch.no_grad():
        copied.turn.copy_(torch.eye(3, dtype=DTYPE))
    assert not torch.equal(copied.log_prob(theta), q.log_prob(theta))
    assert "inside" in repr(q)
    assert "inside" not in repr(CholeskyGaussian(3).warped())


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda: DiagonalGaussian(3), "DiagonalGaussian"),
        (lambda: CholeskyGaussian(3, (2,)), r"CholeskyGaussian\(3, batch_shape"),
        (lambda: CholeskyGaussian(4, structure=block_diagonal([2, 2])), "CholeskyGaussian"),
    ],
)
def test_refusals(make, got):
    with pytest.raises(InputError, match=rf"are for one dense Gaussian, without batch dimensions; got {got}.*"):
        make().warped(inside=True)
    assert make().warped() is not None


def test_a_tensor_of_orthogonal_directions_is_taken_apart():
    """Jacobi's rotations find them exactly, up to their order and signs, whatever their weights."""
    for dim, seed in ((2, 0), (5, 1), (9, 2)):
        Q, weights = rotation(dim, seed), randn(dim, seed=seed + 10).abs() + 0.5
        T = torch.einsum("ia,ja,ka,a->ijk", Q, Q, Q, weights)
        found = rotated_apart(T)
        torch.testing.assert_close(found.mT @ found, torch.eye(dim, dtype=DTYPE), atol=1e-12, rtol=0)
        assert (found.mT @ Q).abs().amax(0).min() > 1 - 1e-9


def test_noise_turns_nothing():
    T = 1e-3 * randn(4, 4, 4)
    T = sum(T.permute(p) for p in ((0, 1, 2), (1, 2, 0), (2, 0, 1), (0, 2, 1), (1, 0, 2), (2, 1, 0))) / 6
    assert torch.equal(rotated_apart(T, least=1e-4), torch.eye(4, dtype=DTYPE))
    normal = LogJoint(lambda theta: -0.5 * theta.square().sum(-1))
    found = skewed_directions(CholeskyGaussian(4, dtype=DTYPE), normal, seed=0)
    assert torch.equal(found, torch.eye(4, dtype=DTYPE))


@pytest.mark.accuracy
def test_skewness_along_directions_is_mended():
    """Where curves around the coordinates leave the standard deviations 30 % too small."""
    turn = rotation(4, seed=7)
    truth = math.sqrt(torch.special.polygamma(1, torch.tensor(0.5, dtype=DTYPE)))
    torch.manual_seed(0)
    q = CholeskyGaussian(4, dtype=DTYPE).warped(inside=True)
    result = fit(q, log_gammas(0.5, turn), progress=False)
    assert result.converged
    assert result.verdict.word == "fits"
    assert "the warp gains" in result.reason
    assert (q.stddev / truth - 1).abs().max() < 0.1
    along = (torch.linalg.cholesky(q.base.covariance) @ q.turn).mT @ turn / truth
    assert along.abs().amax(0).min() > 0.85  # each direction is one of the target's, and nearly as wide
    torch.manual_seed(0)
    around = CholeskyGaussian(4, dtype=DTYPE).warped()
    fit(around, log_gammas(0.5, turn), progress=False)
    assert (around.stddev / truth - 1).abs().max() > 0.2


def test_the_target_inside_is_consistent():
    """log p(θ(x)) + log volume less log N(x) is log p - log q at θ(x)."""
    q, target = bent(), LogJoint(log_gammas(1.0, torch.eye(3, dtype=DTYPE)))
    x = randn(5, 3, seed=8)
    theta, _ = q.bent(x)
    inside = WarpedTarget(target, q).log_joint(x) - q.base.log_prob(x)
    torch.testing.assert_close(inside, target.log_joint(theta) - q.log_prob(theta), atol=1e-9, rtol=0)


def test_nothing_to_gain_is_the_gaussian():
    torch.manual_seed(0)
    q = CholeskyGaussian(3, dtype=DTYPE).warped(inside=True)
    result = fit(q, lambda theta: -0.5 * theta.square().sum(-1), progress=False)
    assert "which is no gain: q is the Gaussian" in result.reason
    assert not q.phi.any()


@pytest.mark.accuracy
def test_a_run_goes_on_to_the_last_bit(tmp_path):
    """Stopped among the curves: the directions are those of the run that is gone on from."""
    log_joint = log_gammas(1.0, rotation(3, seed=9))

    def run(q, **options):
        torch.manual_seed(0)
        return fit(q, log_joint, progress=False, examine=False, **options)

    def make():
        return CholeskyGaussian(3, dtype=DTYPE).warped(inside=True)

    whole = make()
    result = run(whole)
    cut = make()
    stopped = run(cut, checkpoint=tmp_path / "run.pt", checkpoint_every=1, max_evaluations=result.evaluations - 3)
    assert not stopped.converged
    again = make()
    assert run(again, checkpoint=tmp_path / "run.pt").reason == result.reason
    assert torch.equal(again.turn, whole.turn)
    assert torch.equal(again.phi, whole.phi)
    assert torch.equal(again.mean, whole.mean)


def test_single_precision():
    torch.manual_seed(0)
    q = CholeskyGaussian(2).warped(inside=True)
    turn = rotation(2, seed=1).float()
    result = fit(q, log_gammas(1.0, turn), progress=False)
    assert result.converged
    assert q.turn.dtype == torch.float32
    assert (q.turn.mT @ q.turn - torch.eye(2)).abs().max() < 1e-5
