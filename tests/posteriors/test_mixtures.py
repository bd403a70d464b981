"""Mixtures of Gaussians: densities, natural gradients against those of one Gaussian, fits of targets that are known."""

import math

import pytest
import torch
from helpers import vec

from torchngvi import (
    CholeskyGaussian,
    DiagonalGaussian,
    KLRadius,
    LogJoint,
    NaturalGaussian,
    NaturalGradientVI,
    PrecisionCholeskyGaussian,
    Stein,
    fit,
    refinement,
)
from torchngvi.errors import InputError
from torchngvi.expectations import Fixed
from torchngvi.fitting import mixture_at_modes
from torchngvi.fitting.loop import Loop
from torchngvi.fitting.mixtures import MixtureSettings, MixtureSteps, usual_rule
from torchngvi.fitting.stopping import Evaluations, NormBelow
from torchngvi.mode import Mode
from torchngvi.models import MixtureIntegrand
from torchngvi.posteriors import Mixture
from torchngvi.posteriors.mixture import overlaps
from torchngvi.structures import arrow

DTYPE = torch.float64
KINDS = [CholeskyGaussian, DiagonalGaussian, NaturalGaussian, PrecisionCholeskyGaussian]


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


def normals(weights, mean, sd):
    """The density of a mixture of Gaussians with independent coordinates: log Z = 0."""
    each = torch.distributions.Independent(torch.distributions.Normal(mean, sd), 1)
    return torch.distributions.MixtureSameFamily(torch.distributions.Categorical(weights), each).log_prob


def about(mean, kind=PrecisionCholeskyGaussian, shift=1.0, seed=3):
    """Components of scale 1, each so far from the means, with equal weights."""
    away = torch.randn(mean.shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)
    mean = mean + shift * away / away.norm(dim=-1, keepdim=True)
    return Mixture(kind(mean.shape[-1], mean.shape[:1], mean=mean))


def two_modes(apart):
    return torch.tensor([[-apart / 2, 0.0], [apart / 2, 0.0]], dtype=DTYPE)


def ten_modes():
    """Ten modes in ten dimensions, with unequal sds and weights: weights, means, sds."""
    generator = torch.Generator().manual_seed(0)
    mean = 6 * torch.randn(10, 10, generator=generator, dtype=DTYPE)
    sd = 0.5 + torch.rand(10, 10, generator=generator, dtype=DTYPE)
    weights = 0.2 + torch.rand(10, generator=generator, dtype=DTYPE)
    return weights / weights.sum(), mean, sd


def label_switching():
    """The means of a mixture of two normals given 60 rows: the log joint, and log Z by a grid."""
    generator = torch.Generator().manual_seed(4)
    y = torch.randn(60, generator=generator, dtype=DTYPE) + vec(-1.5, 1.5).repeat(30)

    def log_joint(theta):
        each = torch.logaddexp(*(-0.5 * (y - theta[..., k, None]).square() for k in (0, 1)))
        normal = torch.distributions.Normal(0.0, 5.0).log_prob(theta).sum(-1)
        return each.sum(-1) - 60 * math.log(2) - 30 * math.log(2 * math.pi) + normal

    x = torch.linspace(-5, 5, 401, dtype=DTYPE)
    grid = torch.stack(torch.meshgrid(x, x, indexing="ij"), -1)
    return log_joint, float(log_joint(grid).logsumexp((0, 1))) + 2 * math.log(10 / 400)


class TestNaturalGradient:
    @pytest.mark.parametrize("kind", KINDS)
    def test_one_component_is_one_gaussian(self, kind):
        """With the draws of covariance I, -log q adds what the entropy takes off: the same steps to rounding."""
        target = LogJoint(lambda x: -0.5 * x.square().sum(-1) - torch.log1p(x.sum(-1).square()))
        one = kind(3, mean=vec(1.0, -2.0, 0.5), scale=0.7)
        q = Mixture(kind(3, (1,), mean=vec(1.0, -2.0, 0.5)[None], scale=0.7))
        parts = {"lr": 1.0, "estimator": Stein(Fixed(64)), "step_size": KLRadius(0.245)}
        alone = NaturalGradientVI(one, usual_rule(one), **parts)
        together = NaturalGradientVI(q.components, usual_rule(one), **parts)
        for _ in range(4):
            norm2 = alone.evaluate(target).norm2, together.evaluate(MixtureIntegrand(q, target)).norm2[0]
            assert torch.allclose(*norm2, rtol=1e-10)
            alone.step(target)
            loss = together.step(MixtureIntegrand(q, target))
            assert q.reweigh_(-loss[None]).item() == 1.0
            for mine, theirs in zip(q.components.coordinates, one.coordinates, strict=True):
                assert torch.allclose(mine[0], theirs, rtol=1e-12, atol=1e-12)
        assert q.log_weights.tolist() == [0.0]

    def test_against_the_derivative_of_the_elbo(self):
        """In one dimension, where the ELBO is an integral over a grid: dL/dm_k = π_k C⁻¹a_k, dL/d log s_k = π_k P_k."""
        log_p = normals(vec(0.4, 0.6), vec(-1.0, 2.0)[:, None], vec(0.6, 1.2)[:, None])
        mean, log_s, log_w = vec(-1.5, 1.0), vec(-0.3, 0.2), vec(0.3, 0.7).log()
        for tensor in (mean, log_s, log_w):
            tensor.requires_grad_()
        x = torch.linspace(-15, 15, 6001, dtype=DTYPE)[:, None]
        log_q = (torch.distributions.Normal(mean, log_s.exp()).log_prob(x) + log_w.log_softmax(0)).logsumexp(-1)
        elbo = (log_q.exp() * (log_p(x) - log_q)).sum() * 30 / 6000
        exact = torch.autograd.grad(elbo, (mean, log_s, log_w))
        q = Mixture(
            CholeskyGaussian(1, (2,), mean=mean.detach()[:, None], scale=log_s.detach().exp()[:, None]), [0.3, 0.7]
        )
        opt = NaturalGradientVI(q.components, usual_rule(q.components), 1.0, estimator=Stein(Fixed(40_000)))
        gains = -opt.evaluate(MixtureIntegrand(q, LogJoint(log_p))).loss
        g, H = opt.expectation
        assert torch.allclose(-q.weights * g[:, 0], exact[0], atol=0.01)
        assert torch.allclose(-q.weights * H[:, 0, 0] * q.components.variance[:, 0], exact[1], atol=0.01)
        assert torch.allclose(q.weights * (gains - q.weights @ gains), exact[2], atol=0.01)

    def test_weights_within_their_trust(self):
        q = Mixture(CholeskyGaussian(1, (2,), dtype=DTYPE), vec(0.2, 0.8))
        gains = vec(9.0, -1.0)
        length = (q.weights * (gains - q.weights @ gains).square()).sum().sqrt()
        assert q.reweigh_(gains).item() == pytest.approx(0.7 / float(length), rel=1e-12)
        before = q.weights
        q.reweigh_(vec(math.nan, 0.0))
        assert torch.equal(q.weights, before)

    def test_settings_and_temperature(self):
        """At γ = 2 it is the density to the power ½."""
        mean = two_modes(9.0)
        flat, whole = about(mean), about(mean)
        log_p = normals(vec(0.3, 0.7), mean, torch.ones(2, 2, dtype=DTYPE))
        torch.manual_seed(1)
        warm = fit(flat, LogJoint(log_p, temperature=2.0), progress=False)
        torch.manual_seed(1)
        cold = fit(whole, lambda x: 0.5 * log_p(x), progress=False)
        assert torch.allclose(flat.components.mean, whole.components.mean, atol=1e-12)
        assert warm.loss == pytest.approx(2 * cold.loss, rel=1e-12)


class TestFit:
    """Rows of known targets, with nothing chosen: the ELBO on fresh draws to 1e-3 nats of log Z."""

    def test_far_apart(self):
        torch.manual_seed(0)
        mean = two_modes(8.5)
        q = about(mean)
        result = fit(q, normals(vec(0.3, 0.7), mean, torch.ones(2, 2, dtype=DTYPE)), progress=False)
        assert result.converged
        assert abs(result.loss) < 1e-3
        assert torch.allclose(q.weights, vec(0.3, 0.7), atol=1e-3)
        assert result.trace[-1].rejections == 0
        assert len(result.trace) < 10
        assert "E_k[log p - log q] is the same for all components" in result.reason
        assert "The weights are 0.3 and 0.7." in str(result)
        assert result.sample(3).shape == (3, 2)

    @pytest.mark.parametrize("kind", KINDS)
    def test_six_sds_apart_in_all_coordinates(self, kind):
        torch.manual_seed(0)
        mean = two_modes(6.0)
        q = about(mean, kind)
        result = fit(q, normals(vec(0.3, 0.7), mean, torch.ones(2, 2, dtype=DTYPE)), progress=False)
        assert result.converged
        assert abs(result.loss) < 1e-3
        assert torch.allclose(q.weights, vec(0.3, 0.7), atol=1e-3)

    @pytest.mark.parametrize("kind", [NaturalGaussian, PrecisionCholeskyGaussian])
    def test_components_over_an_arrow(self, kind):
        torch.manual_seed(0)
        mean = torch.tensor([[-4.0, 0.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0]], dtype=DTYPE)
        structure = arrow(groups=2, local=1, globals=2)
        q = Mixture(kind(4, (2,), mean=mean + 0.5, structure=structure))
        result = fit(q, normals(vec(0.3, 0.7), mean, torch.ones(2, 4, dtype=DTYPE)), progress=False)
        assert result.converged
        assert abs(result.loss) < 1e-3
        assert q.components.structure == structure

    @pytest.mark.parametrize("kind", [CholeskyGaussian, PrecisionCholeskyGaussian])
    def test_one_and_a_half_sds_apart(self, kind):
        """The weights are hardly determined; the density is, to half the square of the tolerance."""
        torch.manual_seed(0)
        mean = two_modes(1.5)
        q, log_p = about(mean, kind), normals(vec(0.3, 0.7), mean, torch.ones(2, 2, dtype=DTYPE))
        result = fit(q, log_p, progress=False)
        assert result.converged
        assert all(abs(record.loss - result.trace[-1].loss) < 1e-3 for record in result.trace[2:])  # after two steps
        x = torch.linspace(-9, 9, 361, dtype=DTYPE)
        grid = torch.stack(torch.meshgrid(x, x, indexing="ij"), -1)
        with torch.no_grad():
            log_q = q.log_prob(grid)
            gap = float((log_q.exp() * (log_q - log_p(grid))).sum()) * 0.05**2
        assert 0 < gap < 0.5 * 0.1**2

    def test_five_dimensions(self):
        torch.manual_seed(0)
        mean = torch.full((2, 5), 0.75, dtype=DTYPE) * vec(-1.0, 1.0)[:, None]
        q = about(mean, shift=0.5)
        result = fit(q, normals(vec(0.3, 0.7), mean, torch.full((2, 5), 0.5, dtype=DTYPE)), progress=False)
        assert result.converged
        assert abs(result.loss) < 1e-3
        assert torch.allclose(q.components.mean, mean, atol=1e-3)

    def test_ten_modes_without_a_rejection(self):
        torch.manual_seed(0)
        weights, mean, sd = ten_modes()
        q = about(mean)
        result = fit(q, normals(weights, mean, sd), progress=False)
        assert result.converged
        assert abs(result.loss) < 1e-3
        assert torch.allclose(q.weights, weights, atol=1e-3)
        assert torch.allclose(q.components.stddev, sd, rtol=1e-3)
        assert result.trace[-1].rejections == 0

    def test_label_switching_keeps_both_modes(self):
        torch.manual_seed(0)
        log_joint, log_z = label_switching()
        q = Mixture(PrecisionCholeskyGaussian(2, (2,), mean=torch.tensor([[-1.0, 1.0], [1.0, -1.0]], dtype=DTYPE)))
        result = fit(q, log_joint, progress=False)
        assert result.converged
        assert -1e-3 < log_z + result.loss < 2e-3  # of one mode it is log 2
        assert torch.allclose(q.weights, vec(0.5, 0.5), atol=1e-3)
        assert len(result.trace) < 12

    @pytest.mark.accuracy
    def test_without_trust_a_mode_is_lost_and_said(self):
        """At ρ = 1 the first step throws both means away; the one that comes back first takes all the weight."""
        torch.manual_seed(0)
        log_joint, _ = label_switching()
        q = Mixture(PrecisionCholeskyGaussian(2, (2,), mean=torch.tensor([[-1.0, 1.0], [1.0, -1.0]], dtype=DTYPE)))
        engine = MixtureSteps(q, LogJoint(log_joint), 0.1, MixtureSettings(trust=None))
        engine._halve_if_falling = lambda seen: None
        result = Loop(engine, NormBelow(0.1) | Evaluations(40), progress=False).run()
        assert not result.converged
        assert q.weights.min() < 1e-6
        assert "vanishing weight" in result.reason
        assert "a mode is lost there" in result.reason


def banana(theta):
    """Curved, with log Z = 0."""
    x, y = theta[..., 0] / 2, theta[..., 1] + 0.3 * (theta[..., 0].square() - 4)
    return -0.5 * (x.square() + y.square()) - math.log(4 * math.pi)


class TestEnds:
    def test_where_steps_circle_they_are_halved(self):
        """One Gaussian on a banana: at ρ = 1 it does not settle."""
        torch.manual_seed(0)
        q = Mixture(PrecisionCholeskyGaussian(2, (1,), dtype=DTYPE))
        engine = MixtureSteps(q, LogJoint(banana), 0.1)
        result = Loop(engine, NormBelow(0.1) | Evaluations(200), progress=False).run()
        assert result.converged
        assert engine.rho < 1
        assert engine.draws > 256  # they grew
        assert "all components" not in result.reason
        assert 0.3 < result.loss < 0.45

    def test_a_component_that_is_not_needed(self):
        """Far from everything, with a density that is low there: its weight vanishes while it stands still."""
        torch.manual_seed(0)
        mean, weights = torch.tensor([[0.0], [300.0]], dtype=DTYPE), vec(1.0 - 1e-9, 1e-9)
        q = Mixture(CholeskyGaussian(1, (2,), mean=mean))
        result = fit(q, normals(weights, mean, torch.ones(2, 1, dtype=DTYPE)), progress=False)
        assert result.converged
        assert "Component 2 has a vanishing weight (1e-09): without it q is the same." in result.reason
        assert "a mode is lost" not in result.reason

    def test_two_components_in_one_place(self):
        torch.manual_seed(0)
        q = Mixture(CholeskyGaussian(2, (2,), mean=torch.tensor([[0.1, 0.0], [-0.1, 0.0]], dtype=DTYPE)))
        result = fit(q, lambda x: -0.5 * x.square().sum(-1), progress=False)
        assert result.converged
        assert "Components 1 and 2 have come to one place, where one of them would do." in result.reason

    def test_more_noise_than_draws_can_tell(self):
        torch.manual_seed(0)
        q = Mixture(PrecisionCholeskyGaussian(2, (1,), dtype=DTYPE))
        result = fit(q, banana, tolerance=0.03, progress=False)
        assert not result.converged
        assert "fixed point over 4096 draws of each component, which are the most" in result.reason

    def test_values_that_are_not_finite(self):
        torch.manual_seed(0)
        q = Mixture(CholeskyGaussian(1, (2,), mean=vec(3.0, -3.0)[:, None], scale=0.1))
        result = fit(q, lambda x: -x[..., 0].log().square(), progress=False)
        assert not result.converged
        assert "not finite at draws of component 2: begin nearer to a mode, or narrower" in result.reason

    def test_budgets(self):
        torch.manual_seed(0)
        q = about(two_modes(1.5))
        log_p = normals(vec(0.3, 0.7), two_modes(1.5), torch.ones(2, 2, dtype=DTYPE))
        result = fit(q, log_p, max_evaluations=3, progress=False)
        assert not result.converged
        assert "budget of 3 evaluations is used up" in result.reason
        assert result.gradients == 3 * 2 * 256
        assert result.values == 4  # of the remarks
        assert "budget of 1000 gradients" in fit(q, log_p, max_gradients=1000, progress=False).reason


class TestCheckpoints:
    def test_a_run_goes_on_bit_for_bit(self, tmp_path):
        """Through halved steps and more draws, wherever it was cut."""

        def run(checkpoint=None, most=200):
            torch.manual_seed(0)
            q = Mixture(PrecisionCholeskyGaussian(2, (2,), mean=torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=DTYPE)))
            options = {"checkpoint": checkpoint, "checkpoint_every": 1, "progress": False}
            return q, fit(q, LogJoint(banana), max_evaluations=most, **options)

        whole, told = run()
        for cut in (1, 4, 9):
            file = tmp_path / f"{cut}"
            run(file, cut)
            again, result = run(file)
            assert str(result) == str(told)
            assert [record[:-1] for record in result.trace] == [record[:-1] for record in told.trace]
            for name, value in whole.state_dict().items():
                assert torch.equal(again.state_dict()[name], value)

    def test_an_interrupt_goes_back_to_the_last_record(self):
        torch.manual_seed(0)
        q, places = about(two_modes(6.0)), []

        def watch(record):
            if len(places) == 3:
                raise KeyboardInterrupt
            places.append({name: value.clone() for name, value in q.state_dict().items()})

        log_p = normals(vec(0.3, 0.7), two_modes(6.0), torch.ones(2, 2, dtype=DTYPE))
        result = fit(q, log_p, callbacks=[watch], progress=False)
        assert "interrupted" in result.reason
        assert len(result.trace) in (3, 4)
        last = places[-1] if len(result.trace) == 3 else q.state_dict()
        for name, value in q.state_dict().items():
            assert torch.equal(value, last[name])


class TestModes:
    @pytest.mark.parametrize("kind", KINDS)
    def test_one_component_a_mode(self, kind):
        """Far apart, Laplace's Gaussians are the answer before any step."""
        mean, sd = two_modes(8.0), torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=DTYPE)
        q = mixture_at_modes(kind(2, dtype=DTYPE), normals(vec(0.3, 0.7), mean, sd))
        assert type(q.components) is kind
        assert torch.allclose(q.weights, vec(0.7, 0.3), atol=1e-5)
        assert torch.allclose(q.components.mean, mean.flip(0), atol=1e-5)
        assert torch.allclose(q.components.stddev, sd.flip(0), atol=1e-5)

    def test_the_modes_of_label_switching(self):
        torch.manual_seed(0)
        log_joint, log_z = label_switching()
        q = mixture_at_modes(CholeskyGaussian(2, dtype=DTYPE), log_joint)
        assert len(q) == 2
        assert fit(q, log_joint, progress=False).converged
        assert torch.allclose(q.components.mean[0], q.components.mean[1].flip(0), atol=0.01)

    def test_small_modes_do_not_count(self):
        log_p = normals(vec(0.999, 0.001), two_modes(9.0), torch.ones(2, 2, dtype=DTYPE))
        assert len(mixture_at_modes(CholeskyGaussian(2, dtype=DTYPE), log_p)) == 1

    def test_starts_of_ones_own(self):
        log_p = normals(vec(0.5, 0.5), 10 * two_modes(9.0), torch.ones(2, 2, dtype=DTYPE))
        assert len(mixture_at_modes(CholeskyGaussian(2, dtype=DTYPE), log_p, starts=[[-40.0, 0.0], [40.0, 0.0]])) == 2

    def test_from_a_refinement(self):
        """Members that were fitted one by one are brought together where they overlap: the truth is in the family."""
        mean, sd = two_modes(3.0), torch.tensor([[0.7, 0.5], [0.5, 0.7]], dtype=DTYPE)
        refined = refinement.Mixture(vec(0.5, 0.5), 1.1 * mean, torch.diag_embed(1.2 * sd))
        q = refined.as_posterior()
        theta = torch.randn(9, 2, generator=torch.Generator().manual_seed(2), dtype=DTYPE)
        assert torch.allclose(q.log_prob(theta), refined.log_prob(theta), rtol=1e-12)
        torch.manual_seed(0)
        assert abs(fit(q, normals(vec(0.3, 0.7), mean, sd), progress=False).loss) < 1e-3
        assert torch.allclose(q.weights, vec(0.3, 0.7), atol=0.01)
