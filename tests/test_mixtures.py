"""Mixtures of Gaussians: densities, natural gradients against those of one Gaussian, fits of targets that are known."""

import math

import pytest
import torch

from torchngvi import VN, CholeskyGaussian, DiagonalGaussian, NaturalGaussian, PrecisionCholeskyGaussian
from torchngvi.errors import InputError, PairError
from torchngvi.mode import Mode
from torchngvi.posteriors import Mixture
from torchngvi.posteriors.weighted import overlaps

DTYPE = torch.float64
KINDS = [CholeskyGaussian, DiagonalGaussian, NaturalGaussian, PrecisionCholeskyGaussian]


def vec(*numbers):
    return torch.tensor(numbers, dtype=DTYPE)


def some_mixture(kind=CholeskyGaussian, number=3, dim=4, seed=0):
    """Components of different means and covariances, with different weights."""
    generator = torch.Generator().manual_seed(seed)
    mean = 2 * torch.randn(number, dim, generator=generator, dtype=DTYPE)
    root = torch.eye(dim, dtype=DTYPE) + 0.3 * torch.randn(number, dim, dim, generator=generator, dtype=DTYPE).tril()
    weights = torch.rand(number, generator=generator, dtype=DTYPE).softmax(0)
    return Mixture(kind(dim, (number,), mean=mean, scale=root), weights)


def of_torch(q):
    """The same by torch.distributions."""
    each = torch.distributions.MultivariateNormal(q.components.mean, q.components.covariance)
    return torch.distributions.MixtureSameFamily(torch.distributions.Categorical(q.weights), each)


class TestPosterior:
    @pytest.mark.parametrize("kind", KINDS)
    def test_density_and_moments_against_torch(self, kind):
        q = some_mixture(kind)
        truth = of_torch(q)
        theta = 3 * torch.randn(5, 7, 4, generator=torch.Generator().manual_seed(1), dtype=DTYPE)
        assert torch.allclose(q.log_prob(theta), truth.log_prob(theta), rtol=1e-12, atol=1e-12)
        assert torch.allclose(q.mean, truth.mean, rtol=1e-12)
        assert torch.allclose(q.variance, truth.variance, rtol=1e-12)
        assert torch.allclose(q.covariance.diagonal(), q.variance, rtol=1e-12)
        assert torch.equal(q.stddev, q.variance.sqrt())

    def test_covariance_of_two_points_of_mass(self):
        q = Mixture(
            CholeskyGaussian(2, (2,), mean=torch.stack([vec(0.0, 0.0), vec(4.0, 8.0)]), scale=0.5), [0.25, 0.75]
        )
        expected = 0.25 * torch.eye(2, dtype=DTYPE) + 0.1875 * torch.outer(vec(4.0, 8.0), vec(4.0, 8.0))
        assert torch.allclose(q.covariance, expected, rtol=1e-14)

    def test_responsibilities_by_bayes(self):
        q = some_mixture()
        theta = torch.randn(6, 4, generator=torch.Generator().manual_seed(2), dtype=DTYPE)
        each = q.components.log_prob(theta[:, None].expand(6, 3, 4)).exp().mT * q.weights[:, None]
        assert torch.allclose(q.responsibilities(theta).mT, each / each.sum(0), rtol=1e-12)

    def test_moments_of_draws(self):
        """Within four standard errors, for 40,000 draws of a generator with a seed."""
        q = some_mixture()
        draws = q.sample(40_000, torch.Generator().manual_seed(3))
        assert draws.shape == (40_000, 4)
        assert bool(((draws.mean(0) - q.mean).abs() < 4 * q.stddev / 200).all())
        apart = (draws - q.mean).square()
        assert bool(((apart.mean(0) - q.variance).abs() < 4 * apart.std(0) / 200).all())
        shares = q.responsibilities(draws).mean(0)
        assert torch.allclose(shares, q.weights, atol=4 * 0.5 / 200)

    def test_shapes_of_samples(self):
        q = some_mixture()
        assert q.sample().shape == (4,)
        assert q.sample((2, 3)).shape == (2, 3, 4)
        assert q.sample(0).shape == (0, 4)
        with pytest.raises(InputError, match="a number of draws or of a shape"):
            q.sample("three")

    def test_state_and_copies(self):
        q, other = some_mixture(), some_mixture(seed=5)
        theta = torch.ones(4, dtype=DTYPE)
        assert sorted(q.state_dict()) == ["components.mean", "components.scale_tril", "log_weights"]
        place = other.snapshot()
        other.load_state_dict(q.state_dict())
        assert torch.equal(other.log_prob(theta), q.log_prob(theta))
        other.restore(place)
        assert not torch.equal(other.log_prob(theta), q.log_prob(theta))
        assert torch.equal(other.weights, some_mixture(seed=5).weights)
        assert other.float().log_prob(theta.float()).dtype == torch.float32
        assert other.dtype == other.components.dtype == other.mean_probe.dtype == torch.float32
        assert not list(q.parameters())

    def test_repr(self):
        assert (
            repr(Mixture(DiagonalGaussian(2, (2,)), [0.3, 0.7]))
            == "Mixture(2 x DiagonalGaussian, D = 2, weights 0.3, 0.7)"
        )

    def test_gradient_in_theta(self):
        """∇log q = Σ r_k ∇log N_k."""
        q = some_mixture()
        theta = torch.randn(5, 4, generator=torch.Generator().manual_seed(2), dtype=DTYPE).requires_grad_()
        (gradient,) = torch.autograd.grad(q.log_prob(theta).sum(), theta)
        with torch.no_grad():
            away = q.components.mean - theta[:, None]
            each = torch.einsum("kij,skj->ski", q.components.precision, away)
            assert torch.allclose(gradient, (q.responsibilities(theta)[..., None] * each).sum(1), rtol=1e-10)

    @pytest.mark.parametrize("kind", KINDS)
    def test_of_gaussians(self, kind):
        gaussians = [kind(2, mean=vec(k, -k), scale=0.5 + k, dtype=DTYPE) for k in range(3)]
        q = Mixture.of(gaussians, vec(0.0, math.log(2.0), math.log(5.0)))
        assert torch.allclose(q.weights, vec(0.125, 0.25, 0.625), rtol=1e-14)
        theta = vec(0.3, 0.7)
        each = torch.stack([one.log_prob(theta) for one in gaussians])
        assert torch.allclose(q.components.log_prob(theta.expand(3, 2)), each, rtol=1e-14)
        assert torch.allclose(Mixture.of(gaussians).weights, torch.full((3,), 1 / 3, dtype=DTYPE), rtol=1e-15)

    def test_of_modes_takes_each_mode_once(self):
        eye = torch.eye(2, dtype=DTYPE)
        modes = [Mode(vec(0.0, 0.0), eye, -1.0, True, 1), Mode(vec(0.1, 0.0), eye, -1.01, True, 1)]
        modes.append(Mode(vec(5.0, 0.0), 2 * eye, -1.0 + math.log(3.0), True, 1))
        q = Mixture.of_modes(modes)
        assert len(q) == 2
        assert torch.allclose(q.weights, vec(0.75, 0.25))
        assert q.components.mean.tolist() == [[5.0, 0.0], [0.0, 0.0]]
        assert len(Mixture.of_modes(modes, overlap=1.0)) == 3

    def test_overlap_by_numbers(self):
        q = CholeskyGaussian(1, (2,), mean=vec(0.0, 1.5)[:, None], scale=vec(1.0, 0.4)[:, None])
        x = torch.linspace(-12, 12, 20_001, dtype=DTYPE)[:, None, None].expand(-1, 2, 1)
        exact = (0.5 * q.log_prob(x).sum(-1)).exp().sum() * 24 / 20_000
        found = overlaps(q)
        assert torch.allclose(found.diagonal(), torch.ones(2, dtype=DTYPE), rtol=1e-14)
        assert torch.allclose(found[0, 1], exact, rtol=1e-10)


class TestRefusals:
    def test_components(self):
        with pytest.raises(
            InputError, match=r"one Gaussian of batch shape \(K,\).*got CholeskyGaussian of batch shape \(\)"
        ):
            Mixture(CholeskyGaussian(2))
        with pytest.raises(InputError, match="for two of them; got list"):
            Mixture([CholeskyGaussian(2)])

    @pytest.mark.parametrize("weights", [[0.5, 0.6], [1.0, 0.0], [1.0], [math.nan, 1.0]])
    def test_weights(self, weights):
        with pytest.raises(InputError, match="weights are 2 positive numbers with the sum 1"):
            Mixture(CholeskyGaussian(2, (2,)), weights)

    def test_of(self):
        with pytest.raises(InputError, match="of one class and one structure"):
            Mixture.of([CholeskyGaussian(2), DiagonalGaussian(2)])
        with pytest.raises(InputError, match="of one class and one structure"):
            Mixture.of([])
        with pytest.raises(InputError, match="one finite number a Gaussian, 1 of them"):
            Mixture.of([CholeskyGaussian(2)], [1.0, 2.0])
        with pytest.raises(InputError, match="at least one mode; got none"):
            Mixture.of_modes([])

    def test_theta(self):
        with pytest.raises(InputError, match=r"theta must end in D = 4; got shape \(3,\)"):
            some_mixture().log_prob(torch.zeros(3))

    def test_what_one_gaussian_has(self):
        q = some_mixture()
        for ask in (q.frame, q.probed, lambda: q.unframe(None, None), lambda: q.tangent(None), lambda: q.moved(None)):
            with pytest.raises(PairError, match="no mean with one root, and no step of its own"):
                ask()
        with pytest.raises(PairError, match="entropy of a Mixture is not known in closed form"):
            q.entropy()
        with pytest.raises(PairError, match="build the optimizer over q.components"):
            VN(q)
