"""Warps: increasing curves that keep mean 0 and sd 1, their densities, and posteriors that are bent by them."""

import math
import pickle
from copy import deepcopy

import pytest
import torch

from torchngvi import CholeskyGaussian, DiagonalGaussian, LogJoint, NaturalGaussian, PrecisionCholeskyGaussian
from torchngvi.models import WarpedTarget
from torchngvi.posteriors import warps
from torchngvi.posteriors.warps import SinhArcsinh, YeoJohnson

ALL = [getattr(warps, name)() for name in warps.__all__ if name != "Warp"]
EACH = pytest.mark.parametrize("warp", ALL, ids=repr)
COORDINATES = 20


def random_phi(warp, seed=0):
    """φ of 20 coordinates, up to strong warps."""
    return 0.6 * torch.randn(COORDINATES, warp.parameters, generator=torch.Generator().manual_seed(seed)).double()


def grid(end=9.0, number=40001):
    """Points ξ (K, 1) beside which the normal density vanishes, for the trapezoidal rule."""
    return torch.linspace(-end, end, number, dtype=torch.float64)[:, None]


def normal(xi):
    """The density of N(0, 1)."""
    return (-0.5 * xi.square()).exp() / math.sqrt(2 * math.pi)


@EACH
class TestCurves:
    def test_identity(self, warp):
        """φ = 0 is the identity, to rounding, its slope 1."""
        w, log_slope = warp.with_log_slope(grid(6.0, 101), torch.zeros(1, warp.parameters).double())
        assert torch.allclose(w, grid(6.0, 101), rtol=0, atol=1e-12)
        assert torch.allclose(log_slope, torch.zeros_like(w), rtol=0, atol=1e-12)

    def test_moments(self, warp):
        """E w = 0 and Var w = 1, by a rule that the class does not use."""
        xi, phi = grid(), random_phi(warp)
        w = warp.forward(xi.expand(-1, COORDINATES), phi)
        step = float(xi[1] - xi[0])
        assert torch.allclose(step * (normal(xi) * w).sum(0), torch.zeros(()).double(), rtol=0, atol=1e-8)
        assert torch.allclose(step * (normal(xi) * w.square()).sum(0), torch.ones(()).double(), rtol=0, atol=1e-7)

    def test_slopes(self, warp):
        """The slope is positive, and it and its derivative are those of finite differences."""
        xi, phi, h = grid(5.0, 200).expand(-1, COORDINATES), random_phi(warp), 1e-5
        w, log_slope = warp.with_log_slope(xi, phi)
        assert bool((w.diff(dim=0) > 0).all())
        slope = (warp.forward(xi + h, phi) - warp.forward(xi - h, phi)) / (2 * h)
        assert torch.allclose(log_slope.exp(), slope, rtol=1e-7, atol=1e-9)
        bend = (warp.log_slope(xi + h, phi) - warp.log_slope(xi - h, phi)) / (2 * h)
        assert torch.allclose(warp.bend(xi, phi), bend, rtol=1e-6, atol=1e-7)

    def test_inverse(self, warp):
        """It undoes the curve, and comes back from it, far out too."""
        xi, phi = grid(8.0, 161).expand(-1, COORDINATES), random_phi(warp)
        assert torch.allclose(warp.inverse(warp.forward(xi, phi), phi), xi, rtol=1e-9, atol=1e-9)

    def test_density(self, warp):
        """N(ξ(y); 0, 1)/w'(ξ(y)) integrates to one over y."""
        phi = 0.5 * random_phi(warp)
        low, high = (warp.forward(torch.full((COORDINATES,), end).double(), phi) for end in (-7.0, 7.0))
        u = torch.linspace(0, 1, 200_001, dtype=torch.float64)[:, None]
        y = low + (high - low) * u
        xi = warp.inverse(y, phi)
        density = normal(xi) * (-warp.log_slope(xi, phi)).exp()
        total = (density.sum(0) - 0.5 * (density[0] + density[-1])) * (y[1] - y[0])
        assert torch.allclose(total, torch.ones(()).double(), rtol=0, atol=1e-5)

    def test_gradients(self, warp):
        """Of values and slopes in ξ and φ by finite differences; at the identity too, and batched."""
        xi = torch.linspace(-2.3, 2.1, 5, dtype=torch.float64)[:, None, None].expand(-1, 2, 3).clone().requires_grad_()
        for phi in (random_phi(warp)[:6].reshape(2, 3, -1), torch.zeros(2, 3, warp.parameters).double()):
            phi = phi.clone().requires_grad_()
            assert torch.autograd.gradcheck(warp.with_log_slope, (xi, phi), eps=1e-6, atol=1e-6)

    def test_at_nought(self, warp):
        """A gradient at ξ = 0, where a curve may be bent, counts once."""
        xi = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
        phi = torch.zeros(1, warp.parameters).double()
        (slope,) = torch.autograd.grad(warp.forward(xi, phi).sum(), xi)
        assert abs(slope.item() - 1) < 1e-12

    def test_far_out(self, warp):
        """No overflow of a logarithmic slope at large coordinates, in either precision."""
        for dtype in (torch.float32, torch.float64):
            xi = torch.tensor([[-30.0], [30.0]], dtype=dtype)
            assert warp.log_slope(xi, random_phi(warp)[:1].to(dtype)).isfinite().all()

    def test_fisher(self, warp):
        """Its second moment of the score is minus the mean second derivative of log q, by automatic derivatives."""
        phi = 0.5 * random_phi(warp, 3)[0]
        y = warp.forward(grid(7.0, 401), phi[None]).detach()

        def log_q(point):
            xi = warp.inverse(y, point[None])
            return -0.5 * xi.square() - warp.log_slope(xi, point[None])

        weights = normal(grid(7.0, 401)) * 14 / 400
        expected = torch.autograd.functional.jacobian(log_q, phi)[:, 0]
        expected = expected.mT @ (weights * expected)
        assert torch.allclose(warp.fisher(phi), expected, rtol=1e-4, atol=1e-6)


def test_fisher_at_the_identity():
    """Constants of the geometry: (.510, .227) and .144, and no correlation with location and scale."""
    F = SinhArcsinh().fisher(torch.zeros(2).double())
    assert torch.allclose(F, torch.diag(torch.tensor([0.510, 0.227]).double()), rtol=0, atol=6e-4)
    assert abs(YeoJohnson().fisher(torch.zeros(1).double()).item() - 0.144) < 6e-4


def test_skewness_has_the_sign_that_is_documented():
    xi = grid()
    for warp, phi in ((SinhArcsinh(), [0.5, 0.0]), (YeoJohnson(), [-0.5])):
        w = warp.forward(xi, torch.tensor([phi]).double())
        assert float((normal(xi) * w.pow(3)).sum()) > 0


def test_families_are_compared_by_their_class():
    assert SinhArcsinh() == SinhArcsinh()
    assert SinhArcsinh() != YeoJohnson()
    assert len({SinhArcsinh(), SinhArcsinh(), YeoJohnson()}) == 2
    assert repr(YeoJohnson()) == "YeoJohnson()"


CORRELATED = torch.tensor([[2.0, 0.9, 0.0], [0.9, 1.0, -0.3], [0.0, -0.3, 0.5]], dtype=torch.float64)
BASES = [
    lambda: CholeskyGaussian.from_moments(torch.tensor([1.0, -2.0, 0.5]).double(), CORRELATED),
    lambda: NaturalGaussian.from_moments(torch.tensor([1.0, -2.0, 0.5]).double(), CORRELATED),
    lambda: PrecisionCholeskyGaussian.from_moments(torch.tensor([1.0, -2.0, 0.5]).double(), CORRELATED),
    lambda: DiagonalGaussian(3, mean=1.0, scale=0.5, dtype=torch.float64),
]
BASE = pytest.mark.parametrize("base", BASES, ids=["cholesky", "natural", "precision", "diagonal"])


def bent(base, warp, seed=4):
    q = base().warped(warp)
    q.phi.copy_(0.4 * torch.randn(q.phi.shape, generator=torch.Generator().manual_seed(seed)).double())
    return q


@BASE
class TestWarped:
    def test_identity_is_the_gaussian(self, base):
        """Density, entropy, draws, covariance and quantiles at φ = 0."""
        gaussian, q = base(), base().warped()
        theta = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).double()
        assert torch.allclose(q.log_prob(theta), gaussian.log_prob(theta), rtol=0, atol=1e-12)
        assert abs(q.entropy() - gaussian.entropy()) < 1e-12
        assert torch.allclose(q.covariance, gaussian.covariance, rtol=0, atol=1e-12)
        draws = [one.sample(5, torch.Generator().manual_seed(1)) for one in (q, gaussian)]
        assert torch.allclose(*draws, rtol=0, atol=1e-12)

    @pytest.mark.sparse(3)
    @EACH
    def test_moments_and_quantiles_are_those_of_draws(self, base, warp):
        """Mean, sd, covariance, quantiles and entropy, against 400,000 draws."""
        q, draws = bent(base, warp), 400_000
        theta = q.sample(draws, torch.Generator().manual_seed(2))
        apart = (theta - q.mean) / q.stddev
        error = 5 / math.sqrt(draws)
        assert bool((apart.mean(0).abs() < error).all())
        covariance = apart.mT @ apart / draws
        wanted = q.covariance / (q.stddev[:, None] * q.stddev)
        assert torch.allclose(covariance, wanted, rtol=0, atol=4 * error)
        below = torch.stack([(theta < level).double().mean(0) for level in q.quantile([0.05, 0.5, 0.95])])
        assert torch.allclose(below, torch.tensor([[0.05], [0.5], [0.95]]).double().expand(3, 3), rtol=0, atol=error)
        log_q = q.log_prob(theta)
        assert abs(float(-log_q.mean() - q.entropy())) < error * float(log_q.std())

    @EACH
    def test_maps_undo_each_other(self, base, warp):
        q = bent(base, warp)
        x = base().sample(50, torch.Generator().manual_seed(3))
        assert torch.allclose(q.unbent(q.bent(x)[0]), x, rtol=0, atol=1e-10)

    def test_target_and_density_are_one(self, base):
        """The weights of the base against the changed target are those of the warped q against the log joint."""
        q, log_joint = bent(base, SinhArcsinh()), LogJoint(lambda theta: -theta.pow(4).sum(-1))
        x = base().sample(20, torch.Generator().manual_seed(3))
        inside = WarpedTarget(log_joint, q).log_joint(x) - q.base.log_prob(x)
        theta = q.bent(x)[0]
        assert torch.allclose(inside, log_joint.log_joint(theta) - q.log_prob(theta), rtol=1e-10, atol=1e-9)
        assert torch.equal(WarpedTarget(log_joint, q).outward(x), theta)

    @EACH
    def test_it_is_a_gaussian_copula(self, base, warp):
        """q(θ) = N(ξ; 0, R)/Π N(ξ_i; 0, 1) Π f_i(θ_i), ξ_i = Φ⁻¹(F_i(θ_i)); F_i from `quantile`, f_i its derivative."""
        q, levels = bent(base, warp), torch.tensor([0.07, 0.5, 0.88], dtype=torch.float64)
        pick, h = torch.tensor([[0, 1, 2], [2, 0, 1], [1, 1, 0]]), 1e-6  # a level of each coordinate, by point
        low, theta, high = (q.quantile(levels + end).gather(0, pick) for end in (-h, 0.0, h))
        f = 2 * h / (high - low)  # dF/dθ
        xi = torch.special.ndtri(levels)[pick]
        sd = q.base.stddev
        R = q.base.covariance / (sd[:, None] * sd)
        joint = torch.distributions.MultivariateNormal(torch.zeros(3).double(), R).log_prob(xi)
        margins = torch.distributions.Normal(0.0, 1.0).log_prob(xi).sum(-1)
        assert torch.allclose(q.log_prob(theta), joint - margins + f.log().sum(-1), rtol=0, atol=1e-6)

    def test_state(self, base):
        """It is saved and loaded, copied and pickled, and converted."""
        q, other = bent(base, SinhArcsinh()), base().warped()
        other.load_state_dict(q.state_dict())
        theta = q.sample(4, torch.Generator().manual_seed(0))
        for copy in (other, deepcopy(q), pickle.loads(pickle.dumps(q))):
            assert torch.equal(copy.log_prob(theta), q.log_prob(theta))
        assert other.to(torch.float32).sample(2).dtype == torch.float32
        assert other.phi.dtype == torch.float32


def test_batches():
    """Each member is a posterior of its own."""
    q = CholeskyGaussian(2, (3,), dtype=torch.float64).warped(YeoJohnson())
    q.phi[1] = 0.7
    theta = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0)).double()
    one = CholeskyGaussian(2, dtype=torch.float64).warped(YeoJohnson())
    one.phi[:] = 0.7
    assert torch.allclose(q.log_prob(theta)[:, 1], one.log_prob(theta[:, 1]), rtol=0, atol=1e-12)
    assert q.quantile([0.1, 0.9]).shape == (2, 3, 2)
    assert q.covariance.shape == (3, 2, 2)
    assert q.entropy().shape == (3,)


def test_log_prob_is_differentiable_in_theta():
    q = bent(BASES[0], SinhArcsinh())
    theta = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    assert torch.autograd.gradcheck(q.log_prob, (theta,))
