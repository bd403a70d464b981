"""Expectations of any log joint: draws, the estimators that take them, and the functions they are of."""

import copy
import re

import pytest
import torch
from helpers import (
    BATCHES,
    BLACK_BOX,
    DIM,
    DRAWN,
    DRAWS,
    DTYPE,
    EXACT,
    EXCLUDED_DRAWS,
    IDENTITY,
    POSTERIORS,
    batches,
    batches_checks,
    close,
    posteriors,
    randn,
    random_model,
    random_posterior,
    random_symmetric,
    unbiased,
)
from torch.autograd.functional import hessian

from torchngvi import VN, CholeskyGaussian, DiagonalGaussian, fit, laplace
from torchngvi.derivatives import energy_and_gradient, mean_hessian, mean_hessian_products
from torchngvi.errors import InputError
from torchngvi.expectations import (
    Antithetic,
    ClosedEntropyStein,
    Fixed,
    Hessian,
    HessianVector,
    LeastSquaresStein,
    MonteCarlo,
    Quadrature,
    Quasi,
    ScoreFunction,
    Stein,
)
from torchngvi.expectations.sampled import SampleAverage
from torchngvi.interfaces import Framed, Raw
from torchngvi.models import LogJoint

estimators = pytest.mark.parametrize("kind", BLACK_BOX)
drawn = pytest.mark.parametrize(("kind", "draws"), DRAWN, ids=str)
of_one_and_several = pytest.mark.parametrize(("batch", "gamma"), [((), 0.5), ((2, 3), 2.0)], ids=str)
# every call the same objective
deterministic = pytest.mark.parametrize("kind", [kind for kind in BLACK_BOX if (kind, "fixed") not in EXCLUDED_DRAWS])


def make(draws, count=8, seed=1):
    """Draws of a kind, with a seed."""
    kind = DRAWS[draws]
    return kind(count, seed) if kind in (Quasi, Fixed) else kind(count, torch.Generator().manual_seed(seed))


def quadratic(mean, precision, gamma=1.0):
    """-ℓ = -½ (θ - μ)ᵀA(θ - μ)."""

    def log_joint(theta):
        shifted = theta - mean
        return -0.5 * ((precision @ shifted[..., None])[..., 0] * shifted).sum(-1)

    return LogJoint(log_joint, gamma)


MIX = 0.5 * randn(DIM, DIM, seed=21)


def uneven(theta):
    """A log joint without symmetries, with derivatives of every order, concave."""
    x = theta @ MIX
    return -(x.exp() - 0.3 * x).sum(-1) - 0.5 * theta.square().sum(-1) - 0.1 * (theta**4).sum(-1)


def exactly(text):
    return f"^{re.escape(text)}$"


class TestDraws:
    @batches
    @pytest.mark.parametrize("draws", DRAWS)
    def test_shape(self, draws, batch):
        for dtype in (torch.float32, torch.float64):
            z = make(draws, 6)(torch.zeros(*batch, DIM, dtype=dtype))
            assert (z.shape, z.dtype) == ((6, *batch, DIM), dtype)
            assert bool(torch.isfinite(z).all())

    @pytest.mark.parametrize("draws", DRAWS)
    def test_the_same_generator_gives_the_same_draws(self, draws):
        like = torch.zeros(2, DIM)
        assert torch.equal(make(draws)(like), make(draws)(like))
        assert not torch.equal(make(draws)(like), make(draws, seed=2)(like))

    @pytest.mark.parametrize("draws", DRAWS)
    def test_only_fixed_draws_are_the_same_at_each_call(self, draws):
        part, like = make(draws), torch.zeros(2, DIM)
        assert torch.equal(part(like), part(like)) is (draws == "fixed") is part.comparable

    @pytest.mark.parametrize("draws", DRAWS)
    def test_the_second_half_mirrors_the_first(self, draws):
        part = make(draws, 6)
        z = part(torch.zeros(2, DIM))
        assert torch.equal(z[3:], -z[:3]) is part.mirrored

    @pytest.mark.parametrize("draws", ["independent", "antithetic", "quasi"])
    def test_moments(self, draws):
        """z, zzᵀ and z⁴ by z-tests: a batch gives independent estimates."""
        z = make(draws, 4, seed=4)(torch.zeros(4000, DIM, dtype=DTYPE))
        if draws != "antithetic":
            unbiased(z.mean(0), torch.zeros(DIM, dtype=DTYPE))
        unbiased((z[..., :, None] * z[..., None, :]).mean(0), torch.eye(DIM, dtype=DTYPE))
        unbiased((z**4).mean(0), torch.full((DIM,), 3.0, dtype=DTYPE))

    def test_quasi_is_nearer_to_the_normal_distribution(self):
        """Errors of E[z] and E[z²] with 1024 points: 1e-3 and 5e-3, where independent ones have 0.03 and 0.04."""
        z = Quasi(1024, seed=3)(torch.zeros(20, DIM, dtype=DTYPE))
        assert float(z.mean(0).square().mean().sqrt()) < 1e-3
        assert float((z.square().mean(0) - 1).square().mean().sqrt()) < 5e-3

    def test_quasi_scrambles_anew(self):
        """Not the shift alone, which would leave the digits of two calls at one distance for all draws."""
        draws, like = Quasi(64), torch.zeros(1, dtype=DTYPE)
        first, second = (torch.special.ndtr(draws(like)) * 2**30 for _ in range(2))
        assert len((first.long() ^ second.long()).unique()) > 10
        close(first % 1, torch.full((64, 1), 0.5, dtype=DTYPE), 1e-5)  # the middles of cells, in double precision

    @pytest.mark.parametrize("draws", ["quasi", "fixed"])
    def test_the_global_generator_is_left_alone(self, draws):
        before = torch.get_rng_state()
        make(draws)(torch.zeros(DIM))
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize("count", [2 * DIM, 2 * DIM + 2, 50])
    def test_fixed_draws_are_white(self, count):
        """Mean 0 and covariance I; they are Z L⁻ᵀ with ZᵀZ/S = LLᵀ."""
        z = Fixed(count, seed=7)(torch.zeros(DIM, dtype=DTYPE))
        close(z.mean(0), torch.zeros(DIM, dtype=DTYPE), 1e-14)
        close(z.mT @ z / count, torch.eye(DIM, dtype=DTYPE), 1e-14)
        raw = randn(count // 2, DIM, seed=7)
        factor = torch.linalg.cholesky(raw.mT @ raw / (count // 2))
        close(z[: count // 2], raw @ torch.linalg.inv(factor).mT, IDENTITY)

    def test_few_fixed_draws_have_unit_variance(self):
        z = Fixed(4, seed=7)(torch.zeros(DIM, dtype=DTYPE))
        close(z.square().mean(0), torch.ones(DIM, dtype=DTYPE), 1e-14)
        raw = randn(2, DIM, seed=7)
        close(z[:2], raw / raw.square().mean(0).sqrt(), EXACT)

    def test_fixed_draws_depend_on_nothing_else(self):
        """One set for all members, of any dtype; kept, not made anew."""
        draws = Fixed(8)
        one = draws(torch.zeros(DIM, dtype=DTYPE))
        for batch in BATCHES:
            close(draws(torch.zeros(*batch, DIM, dtype=DTYPE)), one.expand(*batch, 8, DIM).movedim(-2, 0), 0.0)
        assert torch.equal(draws(torch.zeros(DIM)), one.float())
        assert draws(torch.zeros(2, DIM)).data_ptr() == draws(torch.zeros(DIM)).data_ptr()

    def test_a_number_means_antithetic_draws(self):
        assert isinstance(Stein(4).draws, Antithetic)
        assert (Stein(4).draws.num_samples, Stein().draws.num_samples) == (4, 16)

    @pytest.mark.parametrize("draws", DRAWS)
    def test_resume_is_exact(self, draws):
        """The state that the draws have reached is in state_dict; a copy goes its own way."""

        def run(opt, steps):
            return [opt.step(uneven).item() for _ in range(steps)]

        def fresh(seed):
            return VN(CholeskyGaussian(DIM, dtype=DTYPE), lr=0.1, estimator=Stein(make(draws, seed=seed)))

        first, other = fresh(1), fresh(1 if draws == "fixed" else 9)
        run(first, 3)
        other.posteriors[0].load_state_dict(first.posteriors[0].state_dict())
        other.load_state_dict(first.state_dict())
        twin = copy.deepcopy(first)
        expected = run(first, 3)
        assert run(other, 3) == expected
        assert run(twin, 3) == expected


roots = pytest.mark.parametrize("name", ["cholesky", "precision_blocks"])  # a lower and an upper root, dense and not


@roots
class TestEveryEstimator:
    @pytest.mark.sparse(3)
    @pytest.mark.parametrize(
        ("kind", "draws"),
        [(kind, draws) for kind, draws in DRAWN if draws != "fixed" and kind != "least_squares"],
        ids=str,
    )
    @pytest.mark.parametrize(("family", "gamma"), [("bernoulli_logit", 2.0), ("poisson_log", 0.5)])
    def test_unbiased(self, name, kind, draws, family, gamma):
        """a, W and the value: a batch of equal posteriors gives independent estimates."""
        count, model = 1000, random_model(family, (), 5, gamma).target
        one = random_posterior(name, (), seed=1)
        q = POSTERIORS[name](DIM, (count,), mean=one.mean, scale=one.scale_tril.expand(count, DIM, DIM))
        e = BLACK_BOX[kind](make(draws, 4, seed=6))(q, model)
        exact = Quadrature()(one, model)
        framed, packet = exact.derivative.framed(one.frame()), e.derivative.framed(q.frame())
        unbiased(e.value, exact.value)
        unbiased(packet.a, framed.a)
        unbiased(packet.W, framed.W)
        assert (e.temperature, e.comparable) == (gamma, False)

    @pytest.mark.sparse(5)
    @of_one_and_several
    @drawn
    def test_no_variance_at_an_exact_optimum(self, name, batch, gamma, kind, draws):
        """ℓ = γ/2 (θ - m)ᵀS(θ - m): the residual vanishes draw by draw, a = 0 and W = γI."""
        q = random_posterior(name, batch, seed=1)
        target = quadratic(q.mean.clone(), gamma * q.precision.clone(), gamma)
        packet = BLACK_BOX[kind](make(draws))(q, target).derivative.framed(q.frame())
        exact = Framed(torch.zeros(*batch, DIM, dtype=DTYPE), gamma * q.structure.eye(q.mean).contiguous())
        white = draws == "fixed"
        if white or kind not in ("closed_entropy", "hessian", "hessian_vector") or make(draws).mirrored:
            close(packet.a, exact.a, IDENTITY)
        if white or kind != "closed_entropy":
            close(packet.W, exact.W, IDENTITY)
        else:
            assert float((packet.W - exact.W).abs().max()) > 1e-3

    @pytest.mark.sparse(5)
    @of_one_and_several
    @drawn
    def test_quadratics(self, name, batch, gamma, kind, draws):
        """What is exact after one evaluation, whatever the draws, and what is not."""
        q, A, mu = random_posterior(name, batch, seed=1), random_symmetric(batch, 7), randn(*batch, DIM, seed=8)
        e = BLACK_BOX[kind](make(draws))(q, quadratic(mu, A, gamma))
        shift, packet = q.mean - mu, e.derivative.framed(q.frame())
        exact = Raw((A @ shift[..., None])[..., 0], A).framed(q.frame())
        value = 0.5 * (shift * (A @ shift[..., None])[..., 0]).sum(-1) + 0.5 * (A * q.covariance).sum((-2, -1))
        least, mirrored, white = kind == "least_squares", make(draws).mirrored, draws == "fixed"
        if least or (mirrored and kind != "score_function"):
            close(packet.a, exact.a, IDENTITY)
        if least or kind in ("hessian", "hessian_vector") or white:
            close(packet.W, exact.W, IDENTITY)
        if least or white:
            close(e.value, value, IDENTITY)
        elif kind == "stein":
            assert float((packet.W - exact.W).abs().max()) > 1e-3


@deterministic
def test_what_may_be_compared(kind):
    """Fixed draws of an estimator that differentiates their mean, and of a target that stays as it is."""
    q, model = random_posterior("cholesky"), random_model("bernoulli_logit").target
    estimator = BLACK_BOX[kind](Fixed(8))
    differentiates = kind in ("stein", "closed_entropy", "path_derivative")
    assert estimator.comparable is estimator(q, model).comparable is differentiates
    assert estimator(q, model.minibatch([0, 1])).comparable is False
    assert MonteCarlo(Fixed(8)).comparable is MonteCarlo(Fixed(8))(q, model).comparable is False


class Spelled:
    """The draws of a call, and ℓ, ∇ℓ and ∇²ℓ there, one after the other."""

    def __init__(self, q, draws):
        self.z = draws(q.mean_probe.detach())
        self.root = q.frame().dense()
        self.theta = [q.mean + self.root @ z for z in self.z]
        self.energies = torch.stack([-uneven(t) for t in self.theta])
        self.pulled = torch.stack([self.root.mT @ torch.func.grad(lambda t: -uneven(t))(t) for t in self.theta])

    def hessian(self):
        return torch.stack([hessian(lambda t: -uneven(t), t) for t in self.theta]).mean(0)


@roots
class TestDefinitions:
    @staticmethod
    def of(name, estimator, draws, gamma=2.0):
        q = random_posterior(name, (), seed=1)
        e = estimator(draws())(q, LogJoint(uneven, gamma))
        return q, e, Spelled(q, draws())

    @pytest.mark.parametrize("draws", ["independent", "antithetic", "quasi"])
    def test_least_squares(self, name, draws):
        """The regression of Cᵀ∇ℓ on 1 and z; the value less a quadratic of known mean."""
        q, e, s = self.of(name, LeastSquaresStein, lambda: make(draws))
        fit = torch.linalg.lstsq(torch.cat([torch.ones(8, 1, dtype=DTYPE), s.z], 1), s.pulled).solution
        a, W = fit[0], 0.5 * (fit[1:] + fit[1:].mT)
        rest = torch.stack([f - a @ z - 0.5 * z @ W @ z for f, z in zip(s.energies, s.z, strict=True)])
        close(e.derivative.a, a, IDENTITY)
        close(e.derivative.W, q.structure.from_dense(W), IDENTITY)
        close(e.value, rest.mean() + 0.5 * W.trace(), IDENTITY)

    @pytest.mark.parametrize("draws", ["independent", "antithetic"])
    def test_score_function(self, name, draws):
        """h less the mean of the other draws or pairs, times the scores z and zzᵀ - I."""
        gamma = 2.0
        q, e, s = self.of(name, ScoreFunction, lambda: make(draws), gamma)
        h, eye = s.energies - 0.5 * gamma * s.z.square().sum(-1), torch.eye(DIM, dtype=DTYPE)
        a, W = torch.zeros(DIM, dtype=DTYPE), gamma * eye
        for i in range(8):
            others = [j for j in range(8) if j != i and not (draws == "antithetic" and j % 4 == i % 4)]
            weight = (h[i] - h[others].mean()) / 8
            a, W = a + weight * s.z[i], W + weight * (torch.outer(s.z[i], s.z[i]) - eye)
        close(e.value, s.energies.mean(), EXACT)
        close(e.derivative.a, a, EXACT)
        close(e.derivative.W, q.structure.from_dense(W), EXACT)

    @pytest.mark.parametrize("chunk", [1, 3, 7, 8, 17, 1000])
    def test_hessian(self, name, chunk):
        """Hessians by torch's own, one draw at a time, however the calls are cut."""
        q, e, s = self.of(name, lambda draws: Hessian(draws, chunk=chunk), lambda: make("quasi"))
        H = s.hessian()
        close(e.value, s.energies.mean(), EXACT)
        close(q.frame().pull(e.derivative.g), s.pulled.mean(0), EXACT)
        close(e.derivative.H, H, EXACT)
        assert torch.equal(e.derivative.H, e.derivative.H.mT)

    @pytest.mark.parametrize("chunk", [1, 7, 1000])
    def test_hessian_vector(self, name, chunk):
        q, e, s = self.of(name, lambda draws: HessianVector(draws, chunk=chunk), lambda: make("quasi"))
        close(e.derivative.a, s.pulled.mean(0), EXACT)
        close(e.derivative.W, q.structure.from_dense(s.root.mT @ s.hessian() @ s.root), EXACT)


class TestDerivatives:
    """Batched double backward passes against torch's own, point by point."""

    @batches
    def test_hessian(self, batch):
        theta = 0.5 * randn(2, *batch, DIM, seed=1)
        expected = torch.stack([hessian(uneven, t) for t in theta.reshape(-1, DIM)])
        expected = -expected.reshape(2, *batch, DIM, DIM).mean(0)
        for chunk in (1, 2, 4, 100):
            close(mean_hessian(LogJoint(uneven), theta, chunk), expected, EXACT)

    @batches
    def test_products(self, batch):
        theta, v = 0.5 * randn(2, *batch, DIM, seed=1), randn(5, *batch, DIM, seed=2)
        H = mean_hessian(LogJoint(uneven), theta, 100)
        close(mean_hessian_products(LogJoint(uneven), theta, v, 3), (H @ v[..., None])[..., 0], EXACT)

    def test_calls_are_no_longer_than_the_chunk(self):
        rows = []

        def log_joint(theta):
            rows.append(len(theta))
            return uneven(theta)

        mean_hessian(LogJoint(log_joint), torch.zeros(2, DIM, dtype=DTYPE), 4)
        assert rows == [4, 2]
        rows.clear()
        mean_hessian(LogJoint(log_joint), torch.zeros(5, DIM, dtype=DTYPE), 4)
        assert rows == [4, 1] * DIM

    WEIGHTS = torch.ones(DIM, dtype=DTYPE, requires_grad=True)
    FLAT = {
        "linear": lambda theta: theta.sum(-1),
        "relu": lambda theta: theta.relu().sum(-1),
        "of trained weights": lambda theta: (theta * TestDerivatives.WEIGHTS).sum(-1),
    }

    @pytest.mark.parametrize("function", FLAT.values(), ids=FLAT)
    def test_no_curvature(self, function):
        theta = torch.ones(2, DIM, dtype=DTYPE)
        close(mean_hessian(LogJoint(function), theta, 4), torch.zeros(DIM, DIM, dtype=DTYPE), 0.0)

    def test_gradient(self):
        theta = 0.5 * randn(2, DIM, seed=1)
        energy, gradient = energy_and_gradient(LogJoint(uneven), theta)
        close(energy, -uneven(theta), 0.0)
        close(gradient, -torch.stack([torch.func.grad(uneven)(t) for t in theta]), EXACT)


@posteriors
class TestFixed:
    """The mean of ℓ over fixed draws is an ordinary function, and the packet is its derivative."""

    @pytest.mark.sparse(3)
    @of_one_and_several
    def test_steps_by_trial_converge(self, name, batch, gamma):
        """To a gradient of 1e-7 of the average, which never rises; no learning rate is given."""
        q, target = random_posterior(name, batch, seed=1), LogJoint(uneven, gamma)
        opt, losses = VN(q, estimator=Stein(Fixed(8))), []
        for _ in range(60):
            status = opt.evaluate(target)
            losses.append(status.loss)
            if float(status.norm2.max()) < 1e-14:
                break
            opt.step(target)
        assert float(opt.evaluate(target).norm2.max()) < 1e-14
        rises = torch.stack(losses).diff(dim=0)
        assert float(rises.max()) <= 1e-12 * float(losses[0].abs().max())

    @pytest.mark.sparse(2)
    @pytest.mark.parametrize("estimator", [Stein, SampleAverage])
    def test_a_fit_has_converged_where_fresh_draws_say_so(self, name, estimator):
        q = POSTERIORS[name](DIM, dtype=DTYPE)
        result = fit(q, LogJoint(uneven), VN(q, estimator=estimator(Fixed(1024))), tolerance=0.3, progress=False)
        assert result.converged, result.reason
        assert self.reference_norm(q) < result.norm <= 0.3

    @pytest.mark.sparse(3)
    def test_the_minimum_of_an_average_is_not_that_of_the_objective(self, name):
        q = POSTERIORS[name](DIM, dtype=DTYPE)
        opt = VN(q, estimator=Stein(Fixed(32)))
        result = fit(q, LogJoint(uneven), opt, tolerance=1e-5, progress=False)
        assert float(opt.evaluate(LogJoint(uneven)).norm2) < 1e-10  # of the average
        assert not result.converged
        assert not bool(result.members_converged)
        assert 1e-3 < self.reference_norm(q) < result.norm
        assert re.match(
            r"because q is at the minimum of the average over its fixed draws \(natural-gradient norm \S+e-06 against "
            r"a tolerance of 1e-05\), which is not known to be that of the negative ELBO: on fresh draws the norm is "
            r"0\.\d+, three standard errors included\. Use more draws, raise the tolerance, or leave the optimizer out",
            result.reason,
        ), result.reason

    @staticmethod
    def reference_norm(q):
        """From many draws."""
        packet = Stein(Fixed(2**17, seed=99))(q, LogJoint(uneven))
        return float(q.norm2(q.local(packet))) ** 0.5

    def test_of_a_quadratic_the_average_is_exact(self, name):
        q, target = POSTERIORS[name](DIM, dtype=DTYPE), LogJoint(lambda theta: -(theta - 1).square().sum(-1))
        result = fit(q, target, VN(q, estimator=Stein(Fixed(32))), tolerance=1e-5, progress=False)
        assert result.converged, result.reason

    @pytest.mark.sparse(3)
    def test_a_value_alone_is_judged_on_fresh_draws_too(self, name):
        """Of an estimator that is no derivative of its value, with a learning rate."""
        q = POSTERIORS[name](DIM, dtype=DTYPE)
        optimizer = VN(q, lr=0.5, estimator=Hessian(Fixed(32)))
        result = fit(q, LogJoint(uneven), optimizer, tolerance=1e-5, max_evaluations=400, progress=False)
        assert not result.converged, result.reason

    def test_too_few_for_a_full_covariance(self, name):
        q, target = random_posterior(name), LogJoint(uneven)
        for estimator in (Stein, ClosedEntropyStein):
            if name == "diagonal":
                estimator(Fixed(2))(q, target)
                continue
            size = q.structure.widest
            text = (
                f"fixed draws determine a full covariance in {size} dimensions if there are at least {2 * size} of "
                f"them: with fewer the objective has no minimum; got {2 * size - 2}. Use Fixed({2 * size}) or more, or "
                "a DiagonalGaussian."
            )
            with pytest.raises(InputError, match=exactly(text)):
                estimator(Fixed(2 * size - 2))(q, target)


class TestNeeds:
    def test_the_score_function_asks_for_no_gradient(self):
        """The detached function gives what the function gives."""
        q = random_posterior("cholesky")
        packets = [
            ScoreFunction(make("antithetic"))(q, LogJoint(f)).derivative
            for f in (lambda theta: -theta.detach().square().sum(-1), lambda theta: -theta.square().sum(-1))
        ]
        close(packets[0].a, packets[1].a, 0.0)
        close(packets[0].W, packets[1].W, 0.0)

    def test_least_squares_takes_the_fewest(self):
        q, A, mu = random_posterior("cholesky"), random_symmetric((), 7), randn(DIM, seed=8)
        exact = Raw(A @ (q.mean - mu), A).framed(q.frame())
        for draws in (Fixed(6), make("antithetic", 6), make("independent", 4), make("quasi", 4)):
            packet = LeastSquaresStein(draws)(q, quadratic(mu, A)).derivative
            close(packet.a, exact.a, 1e-8)
            close(packet.W, exact.W, 1e-8)


class TestOneTheta:
    """A function of θ (D,), by vmap or one draw after another."""

    WAYS = pytest.mark.parametrize("way", [LogJoint.vmapped, LogJoint.looped], ids=["vmapped", "looped"])

    @staticmethod
    def one(theta):
        assert theta.shape == (DIM,)
        return uneven(theta)

    @batches
    @WAYS
    def test_it_is_the_batched_function(self, way, batch):
        theta, target = randn(4, *batch, DIM, seed=1), way(self.one, 0.5)
        assert target.temperature == 0.5
        close(target.log_joint(theta), uneven(theta), EXACT)

    @pytest.mark.sparse(5)
    @deterministic
    @WAYS
    @posteriors
    def test_every_estimator_takes_it(self, way, kind, name):
        """First and second derivatives go through."""
        q, estimator = random_posterior(name, (2,), seed=1), BLACK_BOX[kind](Fixed(8))
        whole, e = estimator(q, LogJoint(uneven)), estimator(q, way(self.one))
        close(e.value, whole.value, EXACT)
        for part, expected in zip(e.derivative, whole.derivative, strict=True):
            close(part, expected, IDENTITY)

    @WAYS
    def test_laplace(self, way):
        q, p = CholeskyGaussian(DIM, dtype=DTYPE), CholeskyGaussian(DIM, dtype=DTYPE)
        laplace(q, way(self.one))
        laplace(p, uneven)
        close(q.covariance, p.covariance, IDENTITY)

    BRANCH = "vmap: It looks like you're attempting to use a Tensor in some data-dependent control flow"

    @pytest.mark.parametrize(
        ("function", "reason"),
        [
            (lambda t: t.sum() if t[0] > 0 else -t.sum(), BRANCH),
            (lambda t: torch.as_tensor(t.tolist()).sum(), "Cannot access data pointer of Tensor that doesn't have"),
        ],
    )
    def test_what_vmap_cannot_take(self, function, reason):
        with pytest.raises(InputError) as caught:
            LogJoint.vmapped(function).log_joint(torch.ones(4, 3))
        text = str(caught.value)
        assert text.startswith(f"torch.func.vmap cannot take this log joint ({reason}")
        assert text.endswith("). Write it for theta of shape (S, D), or use LogJoint.looped(f).")
        close(LogJoint.looped(function).log_joint(torch.ones(4, 3)), torch.full((4,), 3.0), 0.0)

    @batches_checks
    def test_parameters_out_of_range_are_not_there(self, monkeypatch):
        """The message of torch.distributions cannot be made under vmap; its density there is NaN."""
        normal = torch.distributions.Normal
        monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # its default, which Pyro changes
        one = lambda t: normal(t[0], t[1].exp()).log_prob(torch.ones(3)).sum()  # noqa: E731
        theta = torch.tensor([[0.0, -800.0], [0.0, 0.0]])
        value = LogJoint.vmapped(one).log_joint(theta)
        assert value[0].isnan()
        close(value[1], normal(0.0, 1.0).log_prob(torch.ones(3)).sum(), 1e-6)
        with pytest.raises(ValueError, match="to satisfy the constraint"):  # checked as before
            normal(0.0, torch.tensor(0.0))


def test_a_log_joint_that_is_not_finite_is_passed_on():
    """-inf on half the space is no error of the function; the packet says so."""
    q = DiagonalGaussian(DIM, dtype=DTYPE)
    target = LogJoint(lambda theta: torch.where(theta[..., 0] > 0, -theta.square().sum(-1), -torch.inf))
    assert not bool(Stein(8)(q, target).value.isfinite())


class TestDtypes:
    """What a function computes in is its own affair: its values come in the dtype of q."""

    @staticmethod
    def log_joint(theta, dtype):
        return -0.5 * (theta - 1).to(dtype).square().sum(-1)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    @pytest.mark.parametrize("kind", BLACK_BOX)
    def test_every_estimator(self, kind, dtype):
        """The packet of a float32 q is float32, and that of the same function computed in float32 up to rounding."""
        q = CholeskyGaussian(DIM, dtype=torch.float32)
        packets = []
        for own in (dtype, torch.float32):
            torch.manual_seed(0)
            packets.append(BLACK_BOX[kind](8)(q, LogJoint(lambda theta, own=own: self.log_joint(theta, own))))
        assert packets[0].value.dtype == torch.float32
        a, W = packets[0].derivative.framed(q.frame())
        assert (a.dtype, W.dtype) == (torch.float32, torch.float32)
        for left, right in zip((a, W), packets[1].derivative.framed(q.frame()), strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=1e-4)

    @pytest.mark.parametrize("wrap", [LogJoint, LogJoint.vmapped, LogJoint.looped])
    def test_a_fit_of_a_float64_function(self, wrap):
        q = CholeskyGaussian(DIM, dtype=torch.float32)
        result = fit(q, wrap(lambda theta: self.log_joint(theta, torch.float64)), progress=False)
        assert result.converged
        torch.testing.assert_close(q.mean, torch.ones(DIM), rtol=0, atol=1e-3)

    INTEGERS = {
        "counts": lambda theta: -(theta > 1).sum(-1),
        "rounded": lambda theta: -theta.square().sum(-1).round().long(),
        "truth": lambda theta: (theta > 0).all(-1),
    }

    @pytest.mark.parametrize("name", INTEGERS)
    def test_integers_have_scores(self, name):
        """`ScoreFunction` asks for values alone."""
        q, function = CholeskyGaussian(DIM), self.INTEGERS[name]
        torch.manual_seed(0)
        packet = ScoreFunction(8)(q, LogJoint(function))
        torch.manual_seed(0)
        same = ScoreFunction(8)(q, LogJoint(lambda theta: function(theta).to(theta.dtype)))
        assert torch.equal(packet.value, same.value)
        assert torch.equal(packet.derivative.W, same.derivative.W)
