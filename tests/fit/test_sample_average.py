"""`fit` on a log joint, without an optimizer: a rough mode, sample averages that grow, a check."""

import itertools
import math
import re
import types

import pytest
import torch
from helpers import quiet

from torchngvi import VN, CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, LogJoint, NaturalGaussian, fit, mode
from torchngvi.diagnostics.importance import smoothed
from torchngvi.expectations import Stein
from torchngvi.expectations.draws import Fixed
from torchngvi.expectations.sampled import SampleAverage
from torchngvi.fitting import sample_average
from torchngvi.fitting.pool import Point
from torchngvi.fitting.starts import EngineSettings
from torchngvi.models.factors import Guarded

FAMILIES = [CholeskyGaussian, NaturalGaussian, DiagonalGaussian]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def logistic(rows=60, dim=4):
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    y = (torch.rand(rows, generator=generator, dtype=torch.float64) < torch.sigmoid(X.sum(-1))).double()
    return GeneralizedLinear(X, y, prior_precision=1.0)


def quadratic(dim, seed=2):
    """H, m, and log N(m, H⁻¹) up to a constant."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    H = root @ root.mT + 0.1 * torch.eye(dim, dtype=torch.float64)
    m = torch.randn(dim, generator=generator, dtype=torch.float64)
    return H, m, lambda theta: -0.5 * (((theta - m) @ H) * (theta - m)).sum(-1)


class TestSampleAverage:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("gamma", [0.5, 1.0])
    def test_exact_on_quadratics(self, family, gamma):
        """a = Cᵀg and W = Π(CᵀHC) from any whitened draws, where E_q[ℓ] is a quadratic."""
        H, m, f = quadratic(3)
        q = family(3, mean=torch.tensor([0.3, -0.2, 0.1]), scale=torch.tensor([0.5, 1.0, 2.0]), dtype=torch.float64)
        e = SampleAverage(Fixed(8))(q, LogJoint(f, temperature=gamma))
        root = q.frame().dense()
        expected = root.mT @ H @ root
        if family is DiagonalGaussian:
            expected = expected.diagonal()
            torch.testing.assert_close(e.derivative.a, root.mT @ H @ (q.mean - m), rtol=0, atol=1e-12)
            return  # products of coordinates are not whitened, W is noisy
        torch.testing.assert_close(e.derivative.a, root.mT @ H @ (q.mean - m), rtol=0, atol=1e-12)
        torch.testing.assert_close(e.derivative.W, expected, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_noise_is_the_variance_over_seeds(self, family):
        """noise² is the mean of |∇L estimated - ∇L|²_F⁻¹ over independent draws, or more."""
        shares = {}
        for dim in (3, 12):
            model = logistic(rows=20, dim=dim)
            q, target = family(dim, dtype=torch.float64), LogJoint(model.log_joint)
            quiet(q, model)
            packets = [SampleAverage(Fixed(32, seed=seed))(q, target) for seed in range(200)]
            a, W = (torch.stack([getattr(e.derivative, name) for e in packets]) for name in ("a", "W"))
            spread = (a - a.mean(0)).square().sum(-1) + 0.5 * (W - W.mean(0)).flatten(1).square().sum(-1)
            shares[dim] = float(spread.mean() / torch.stack([e.noise2 for e in packets]).mean())
        assert min(shares.values()) > 0.03
        assert max(shares.values()) < 1.1
        assert shares[3] < shares[12] or family is DiagonalGaussian

    def test_less_noise_than_the_derivative_of_the_mean(self):
        """The symmetric part is nearer to the optimum than the triangle."""
        model = logistic(rows=20, dim=6)
        q = CholeskyGaussian(6, dtype=torch.float64)
        quiet(q, model)
        target, gaps = LogJoint(model.log_joint), []
        for estimator in (SampleAverage, Stein):
            packets = [estimator(Fixed(32, seed=seed))(q, target) for seed in range(100)]
            gaps.append(sum(float(q.norm2(q.local(e))) for e in packets))
        assert gaps[0] < 0.75 * gaps[1]


class TestMode:
    def test_quadratic(self):
        """One Hessian and one step; the covariance is H⁻¹, the evidence Laplace's, which is exact."""
        H, m, f = quadratic(5)
        found = mode.find_mode(LogJoint(f), torch.zeros(5, dtype=torch.float64), 100)
        assert found.found
        torch.testing.assert_close(found.theta, m, rtol=0, atol=1e-6)
        torch.testing.assert_close(found.root @ found.root.mT, torch.linalg.inv(H), rtol=1e-5, atol=1e-6)
        exact = 2.5 * math.log(2 * math.pi) - 0.5 * float(torch.logdet(H))
        assert found.log_evidence == pytest.approx(exact, abs=1e-5)
        assert found.gradients <= 1 + 5 + 2 + 5

    def test_bends_that_cancel(self):
        """Between kinks gradients do not change and sᵀHs vanishes: the update is left out."""
        f = LogJoint(lambda theta: -theta.abs().sum(-1))
        starts = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for found in mode.find_modes(f, starts, 260):
            assert found is not None
            assert float(found.theta.abs().max()) < 0.1
            assert bool(found.root.isfinite().all())

    def test_temperature(self):
        H, _, f = quadratic(3)
        found = mode.find_mode(LogJoint(f, temperature=0.25), torch.zeros(3, dtype=torch.float64), 100)
        torch.testing.assert_close(found.root @ found.root.mT, 0.25 * torch.linalg.inv(H), rtol=1e-4, atol=1e-6)

    def test_badly_scaled(self):
        scales = torch.tensor([1e-4, 1.0, 1e4], dtype=torch.float64)
        f = LogJoint(lambda theta: -torch.cosh((theta - scales) / scales).log().sum(-1))
        found = mode.find_mode(f, torch.zeros(3, dtype=torch.float64), 500)
        assert found.found
        assert bool(((found.theta - scales) / scales).abs().max() < 0.6)

    @pytest.mark.parametrize("start", [(0.1, 0.5), (0.0, 0.0)])
    def test_a_saddle_is_left(self, start):
        """At 0 the Hessian is indefinite: its eigenvalues are repaired, and the search goes on to a minimum."""
        f = LogJoint(lambda theta: -((theta[..., 0] ** 2 - 1) ** 2) - theta[..., 1] ** 2)
        found = mode.find_mode(f, torch.tensor(start, dtype=torch.float64), 500)
        assert found.found
        assert abs(float(found.theta[0])) == pytest.approx(1.0, abs=0.2)

    def test_nothing_finite(self):
        f = LogJoint(lambda theta: theta.sum(-1).log())
        assert mode.find_mode(f, -torch.ones(2, dtype=torch.float64), 100) is None

    def test_budget(self):
        f = LogJoint(lambda theta: -(theta.square().sum(-1) + 1).sqrt())
        start = 100 * torch.ones(4, dtype=torch.float64)
        found = mode.find_mode(f, start, 10)
        assert not found.found
        assert found.gradients <= 10 + 4 + 30

    def test_searches_side_by_side(self):
        """Each ends where it would alone, in as many calls as the longest takes; one outside the support is lost."""
        calls = []

        def f(theta):
            calls.append(len(theta))
            return torch.where(theta[..., 0] > -5, -(theta.pow(4).sum(-1) + (theta.sum(-1) - 1).square()), torch.nan)

        starts = 2 * torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        starts[2, 0] = -6.0
        together = mode.find_modes(LogJoint(f), starts, 500)
        most, rounds = 0, len(calls)
        for start, found in zip(starts, together, strict=True):
            calls.clear()
            alone = mode.find_mode(LogJoint(f), start, 500)
            most = max(most, len(calls))
            assert (alone is None) == (found is None)
            if alone is not None:
                torch.testing.assert_close(found.theta, alone.theta, rtol=1e-10, atol=1e-10)
                assert (found.found, found.gradients) == (alone.found, alone.gradients)
        assert together[2] is None
        assert rounds == most

    def test_flat(self):
        found = mode.find_mode(LogJoint(lambda theta: 0 * theta.sum(-1)), torch.zeros(2, dtype=torch.float64), 50)
        torch.testing.assert_close(found.root, torch.eye(2, dtype=torch.float64))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("pooled")
def test_quadratics_are_exact(family):
    H, m, f = quadratic(4)
    q = family(4, dtype=torch.float64)
    result = quiet(q, f)
    assert result.converged
    if family is not DiagonalGaussian:
        assert result.trace[-1].gradients < 100
        torch.testing.assert_close(q.mean, m, rtol=0, atol=1e-6)
        torch.testing.assert_close(q.covariance, torch.linalg.inv(H), rtol=1e-6, atol=1e-6)
    else:
        torch.testing.assert_close(q.variance.reciprocal(), H.diagonal(), rtol=0.2, atol=0)


@pytest.mark.sparse(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gamma", [0.5, 1.0])
@pytest.mark.usefixtures("pooled")
def test_the_promised_gap(family, gamma):
    """A black box ends as near to the exact optimum as it says, within a factor of four."""
    model = logistic()
    model.temperature = gamma
    exact = family(4, dtype=torch.float64)
    lowest = quiet(exact, model).loss
    q = family(4, dtype=torch.float64)
    result = quiet(q, LogJoint(model.log_joint, temperature=gamma))
    assert result.converged, result.reason
    with torch.no_grad():
        gap = (float(model.negative_elbo(q)) - lowest) / gamma
    assert 0 <= gap < 4 * 0.5 * 0.1**2


@pytest.mark.usefixtures("pooled")
def test_a_smaller_tolerance_comes_nearer():
    model, gaps = logistic(), []
    exact = CholeskyGaussian(4, dtype=torch.float64)
    lowest = quiet(exact, model).loss
    for tolerance in (1.0, 0.1, 0.03):
        q = CholeskyGaussian(4, dtype=torch.float64)
        result = quiet(q, model.log_joint, tolerance=tolerance)
        assert result.converged
        with torch.no_grad():
            gaps.append(float(model.negative_elbo(q)) - lowest)
        assert gaps[-1] < 2 * tolerance**2
    assert gaps[2] < 1e-3


@pytest.mark.usefixtures("pooled")
def test_the_verdict_tells_all():
    q = CholeskyGaussian(4, dtype=torch.float64)
    result = quiet(q, logistic().log_joint)
    pattern = (
        r"^converged, natural-gradient norm \S+ with \d+ draws, typically about \S+ nats from the best q; on 1024 "
        r"fresh draws the ELBO is \S+ ± \S+, importance sampling would keep \d+% of them, and 8 other starts found "
        r"nothing better\. Negative ELBO \S+ after \d+ evaluations\. q is the best Gaussian, and a Gaussian fits\.$"
    )
    assert re.match(pattern, str(result)), str(result)
    gradients = [record.gradients for record in result.trace]
    assert gradients == sorted(gradients)
    assert result.norm <= 0.1


def heavy_weights(q):
    """Of Cauchy variables at the draws by which a fit is judged."""
    theta = q.push_noise(Fixed(1024, seed=0)(q.mean_probe.detach())).detach()
    return (-torch.log1p(theta.square()).sum(-1) - q.log_prob(theta)).detach()


def test_what_importance_sampling_would_keep():
    """By smoothed weights; heavy tails make it a rough number, and a few large among equal ones do not."""
    q = CholeskyGaussian(5, dtype=torch.float64)
    heavy = sample_average.judge(q, Guarded(LogJoint(lambda theta: -torch.log1p(theta.square()).sum(-1))), 0)
    terms = heavy_weights(q)
    assert heavy.share == pytest.approx(float(smoothed(terms).effective) / 1024)
    assert heavy.k_hat == pytest.approx(float(smoothed(terms).k_hat))
    assert heavy._replace(share=0.37, k_hat=0.8).kept == ("importance sampling would keep about 37% of them")
    exact = sample_average.judge(q, Guarded(LogJoint(lambda theta: -0.5 * theta.square().sum(-1))), 0)
    assert exact.kept == "importance sampling would keep 100% of them"
    assert exact._replace(k_hat=2.0).kept == exact.kept


@pytest.mark.usefixtures("pooled")
def test_the_same_seed_is_the_same_run():
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        q = CholeskyGaussian(4, dtype=torch.float64)
        quiet(q, logistic().log_joint)
        runs.append(q.scale_tril.clone())
    assert torch.equal(*runs)


def test_batches():
    """Two posteriors at once end where each ends alone, within their noise."""
    targets = torch.tensor([[0.5, -1.0], [2.0, 0.0]], dtype=torch.float64)
    f = LogJoint(lambda theta: -torch.cosh(theta - targets).log().sum(-1) - 0.1 * theta.square().sum(-1))
    q = CholeskyGaussian(2, (2,), dtype=torch.float64)
    result = quiet(q, f)
    assert result.converged
    assert result.members_converged.tolist() == [True, True]
    for i in range(2):
        alone = CholeskyGaussian(2, dtype=torch.float64)
        one = LogJoint(lambda theta, i=i: -torch.cosh(theta - targets[i]).log().sum(-1) - 0.1 * theta.square().sum(-1))
        quiet(alone, one)
        torch.testing.assert_close(q.mean[i], alone.mean, rtol=0, atol=0.15)


@pytest.mark.usefixtures("pooled")
def test_float32():
    q = CholeskyGaussian(4)
    model = logistic()
    result = quiet(q, lambda theta: model.log_joint(theta.double()).float())
    assert result.converged, result.reason
    assert q.dtype == torch.float32


def two(theta):
    """A narrow mode at 0, 3.8 nats of evidence below a wider one at 1.2 that steps from 0 do not reach."""
    near = -0.5 * theta.square().sum(-1) * 400 - 1
    far = -0.5 * (theta - 1.2).square().sum(-1) * 100 + 1.5
    return torch.logaddexp(near, far)


@pytest.mark.sparse(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("pooled")
def test_another_mode_is_found(seed, monkeypatch):
    """Started in the lesser of two modes, the check from other starts finds the better one."""
    torch.manual_seed(seed)
    q = CholeskyGaussian(2, dtype=torch.float64)
    result = quiet(q, two)
    assert result.converged, result.reason
    torch.testing.assert_close(q.mean, 1.2 * torch.ones(2, dtype=torch.float64), rtol=0, atol=0.1)
    assert "from the best of several starts" in result.reason

    monkeypatch.setattr(
        "torchngvi.fitting.sample_average.SampleAverages._better_start", lambda self, doubt=False: iter(())
    )
    q = CholeskyGaussian(2, dtype=torch.float64)
    quiet(q, two)
    torch.testing.assert_close(q.mean, torch.zeros(2, dtype=torch.float64), rtol=0, atol=0.1)


@pytest.mark.usefixtures("pooled")
def test_a_stop_at_another_start_is_a_stop():
    torch.manual_seed(1)
    q, seen = CholeskyGaussian(2, dtype=torch.float64), []

    def stop(record):
        seen.append(float(q.mean.abs().max()))
        return seen[-1] > 0.5  # on the way at the other start

    result = quiet(q, two, callbacks=[stop])
    assert seen[-1] > 0.5
    assert not result.converged
    assert re.match("because a callback stopped it at natural-gradient norm", result.reason)


@pytest.mark.usefixtures("pooled")
def test_a_good_start_is_kept():
    """At 0 the fourth power has no curvature, and a Laplace approximation there no sense."""
    q = CholeskyGaussian(1, dtype=torch.float64)
    result = quiet(q, lambda theta: -theta.pow(4).sum(-1))
    assert result.converged, result.reason
    # d/ds (3 s⁴ - log s) = 0
    assert float(q.stddev) == pytest.approx(12**-0.25, rel=0.05)
    model = logistic(rows=10)
    warm = CholeskyGaussian(4, dtype=torch.float64)
    quiet(warm, model)
    with torch.no_grad():
        before = float(model.negative_elbo(warm))
    quiet(warm, model.log_joint, max_evaluations=1)
    with torch.no_grad():
        assert float(model.negative_elbo(warm)) < before + 0.2


@pytest.mark.usefixtures("pooled")
def test_one_flat_coordinate_of_many():
    q = CholeskyGaussian(6, dtype=torch.float64)
    result = quiet(q, lambda theta: -0.5 * theta[..., 1:].square().sum(-1) + 0 * theta[..., 0])
    assert "does not confine q" in result.reason


@pytest.mark.usefixtures("pooled")
def test_draws_of_the_check_that_fail_are_counted():
    def f(theta):
        if bool((theta > 3.0).any()):  # beyond the draws that this fit takes, 16 of a pool or 32 of an average
            raise TypeError("out of range")
        return -0.5 * theta.square().sum(-1)

    result = quiet(CholeskyGaussian(2, dtype=torch.float64), f)
    assert result.converged
    count = re.search(
        r" Left out were 0 draws of the fit and (\d+) of the check at which the log joint fails or is NaN: q is fitted "
        r"to the posterior cut there\. The log joint failed \1 times?: TypeError: out of range\.$",
        result.reason,
    )
    assert count, result.reason
    assert 1 <= int(count[1]) <= 10  # the share of a normal distribution beyond 3, of two coordinates, is 3
    assert result.loss == pytest.approx(-math.log(2 * math.pi), abs=1e-6)


@pytest.mark.usefixtures("pooled")
def test_too_many_draws_at_once_are_halved():
    """A function that runs out of memory at 1024 draws does not at 512."""

    def f(theta):
        if len(theta) > 600:
            raise MemoryError
        return -0.5 * theta.square().sum(-1)

    assert quiet(CholeskyGaussian(2, dtype=torch.float64), f).converged


@pytest.mark.usefixtures("pooled")
def test_a_check_of_another_shape_does_not_lose_the_fit():
    q = CholeskyGaussian(2, dtype=torch.float64)
    result = quiet(q, lambda theta: -0.5 * (theta - 1).square().sum(-1)[:600])
    assert not result.converged
    assert result.reason.startswith(
        "because the check on 1024 fresh draws could not be made: the log joint must map theta of shape (1024, 2)"
    )
    torch.testing.assert_close(q.mean, torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.sparse(5)
@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("pooled")
def test_kinks(family, dim):
    """-Σ|θ| has no curvature but at the kinks: E|θ| = σ√(2/π), so that σ* = √(π/2)."""
    q = family(dim, dtype=torch.float64)
    result = quiet(q, lambda theta: -theta.abs().sum(-1))
    sd = math.sqrt(math.pi / 2)
    assert result.converged, result.reason
    best = -dim * (math.log(sd) + 0.5 * math.log(2 * math.pi * math.e) - 1)
    m, s = q.mean, q.stddev
    folded = s * math.sqrt(2 / math.pi) * torch.exp(-0.5 * (m / s).square()) + m * torch.erf(m / s / math.sqrt(2))
    assert best - 1e-9 < float((folded.sum() - q.entropy()).detach()) < best + 0.02


def test_curvature_beyond_the_range_of_squares():
    """Decrements underflow to 0 where the curvature is 1e200, and nothing is divided by them."""
    q = DiagonalGaussian(1, scale=1e-3, dtype=torch.float64)
    result = quiet(q, lambda theta: -0.5e200 * theta.square().sum(-1))
    assert result.converged, result.reason
    assert float(q.stddev) == pytest.approx(1e-100)


@pytest.mark.usefixtures("pooled")
def test_other_starts_that_fail_do_not_lose_the_fit(monkeypatch):
    def fail(*arguments, **options):
        raise torch.linalg.LinAlgError("linalg.eigh: no.")

    monkeypatch.setattr("torchngvi.fitting.starts.find_modes", fail)
    q = CholeskyGaussian(2, dtype=torch.float64)
    result = quiet(q, lambda theta: -0.5 * (theta - 1).square().sum(-1))
    assert result.converged
    assert result.reason.endswith(", and other starts could not be looked at (linalg.eigh: no).")
    torch.testing.assert_close(q.mean, torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-6)


def test_a_function_of_one_theta_is_told_of_vmapped():
    matrix = torch.eye(3, dtype=torch.float64)
    with pytest.raises(RuntimeError) as error:
        quiet(CholeskyGaussian(3, dtype=torch.float64), lambda theta: -theta @ matrix @ theta)
    assert error.value.__notes__ == [
        "(The log joint was called with theta of shape (1, 3), draws first, and dtype torch.float64, that of q. A "
        "function of one theta is wrapped as LogJoint.vmapped(f).)"
    ]


@pytest.mark.usefixtures("pooled")
def test_a_start_without_density():
    """log theta needs theta > 0, and q starts at 0."""
    f = LogJoint(
        lambda theta: torch.where(theta > 0, theta.clamp_min(1e-300).log() * 50 - 50 * theta, -torch.inf).sum(-1)
    )
    q = CholeskyGaussian(1, dtype=torch.float64)
    result = quiet(q, f)
    assert math.isfinite(result.loss)
    assert float(q.mean) == pytest.approx(1.0, abs=0.1)


@pytest.mark.usefixtures("pooled")
def test_a_log_joint_that_fails_now_and_then():
    calls = itertools.count(1)

    def f(theta):
        if next(calls) % 5 == 0:
            raise RuntimeError("disk on fire")
        return -0.5 * (theta - 1).square().sum(-1) - 0.1 * theta.pow(4).sum(-1)

    q = CholeskyGaussian(3, dtype=torch.float64)
    assert quiet(q, f).converged


@pytest.mark.usefixtures("pooled")
def test_a_log_joint_that_fails_for_good():
    calls = itertools.count(1)

    def f(theta):
        if next(calls) > 6:
            raise RuntimeError("gone")
        return -0.5 * (theta - 1).square().sum(-1) - 0.1 * theta.pow(4).sum(-1)

    q = CholeskyGaussian(3, dtype=torch.float64)
    result = quiet(q, f)
    assert not result.converged
    assert re.search(r"The log joint failed \d+ times?: RuntimeError: gone\.$", result.reason)
    assert bool(torch.isfinite(q.mean).all())


def test_an_error_at_the_first_call_is_the_users():
    with pytest.raises(ZeroDivisionError):
        quiet(CholeskyGaussian(2), lambda theta: 1 / 0)


@pytest.mark.usefixtures("pooled")
def test_improper():
    q = CholeskyGaussian(2, dtype=torch.float64)
    result = quiet(q, lambda theta: -theta[..., 0].square())
    assert not result.converged
    assert re.match(
        r"because the negative ELBO falls without bound, to \S+, and q spreads e\^\d+ times as wide as it started: the "
        r"log joint does not confine q\. Give every parameter a proper prior\.$",
        result.reason,
    ), result.reason


def test_never_finite(pooled):
    q = CholeskyGaussian(2, dtype=torch.float64)
    result = quiet(q, lambda theta: theta.sum(-1) * torch.nan)
    assert result.reason == (
        "because the negative ELBO is nan at this q: the log joint is not finite at some of "
        "its draws. Start from another mean or a smaller scale (initialize_), or transform constrained coordinates."
    )
    assert torch.equal(q.mean, torch.zeros(2, dtype=torch.float64))


@pytest.mark.usefixtures("pooled")
def test_a_support_no_gaussian_fits_in():
    """Finite at the draws of the fit, infinite at a few of the fresh ones."""
    f = LogJoint(lambda theta: torch.where(theta.abs() < 2.6, -0.5 * theta.square() * 1.2, -torch.inf).sum(-1))
    q = CholeskyGaussian(1, dtype=torch.float64)
    result = quiet(q, f)
    assert not result.converged
    assert re.match(
        r"because the log joint is not finite at \d+ of 1024 draws from q: no Gaussian fits inside its support\. "
        r"Transform the constrained coordinates\.$",
        result.reason,
    ), result.reason


def test_an_energy_in_the_place_of_a_log_joint(pooled):
    """Averages reject steps whose noise grows with q, and end before they have seen that nothing confines it."""
    q = CholeskyGaussian(3, dtype=torch.float64)
    result = quiet(q, lambda theta: 0.5 * theta.square().sum(-1))
    assert not result.converged
    assert pooled or "q is not at an optimum" in result.reason
    assert not pooled or re.match(
        r"because the negative ELBO falls without bound, to -\S+e\+\d+(, and q spreads e\^[1-9]\d* times as wide as it "
        r"started)?: the log joint does not confine q\. Give every parameter a proper prior\. If the function returns "
        r"-log p, an energy, return its negative\.$",
        result.reason,
    ), result.reason


def test_how_wide_q_spreads_is_said_where_it_does():
    def unconfined(loss, wider):
        starts = types.SimpleNamespace(unconfined=lambda loss: True, wider=lambda: wider)
        return sample_average.why_lost(Point(*torch.tensor([1.0, 1.0, loss], dtype=torch.float64)), starts, None)

    narrow = "because the negative ELBO falls without bound, to -9.8e+52: the log joint does not confine q. Give every "
    assert unconfined(-9.8e52, -28.0).startswith(narrow)
    wide = (
        "because the negative ELBO falls without bound, to -28.4, and q spreads e^15 times as wide as it started: the "
    )
    assert unconfined(-28.4, 15.0).startswith(wide)
    assert unconfined(-28.4, 15.0).endswith("Give every parameter a proper prior.")


@pytest.mark.parametrize(
    ("norm2", "first"),
    [(0.02, "Raise the tolerance"), (1e6, "Start from another mean or a smaller scale (initialize_)")],
)
def test_a_larger_tolerance_is_advised_near_an_optimum_only(norm2, first):
    point = Point(*(torch.tensor(x, dtype=torch.float64) for x in (norm2, 0.02, 0.0)))
    said = sample_average.why_not_enough(point, 1.0, 64, 0.1, None)
    assert said.endswith(f". {first}, or transform the model to be nearer to a Gaussian.")


def test_too_few_draws(monkeypatch, pooled):
    """Of one average, 64, six are averaged; of a pool all together, about as many as there may be."""
    monkeypatch.setattr("torchngvi.fitting.pool.Descent.most", 64)
    monkeypatch.setattr("torchngvi.fitting.sample_average.EngineSettings", lambda: EngineSettings(most=1000))
    q = CholeskyGaussian(4, dtype=torch.float64)
    result = quiet(q, logistic(rows=10).log_joint, tolerance=1e-3)
    said = re.match(
        r"because (\d+) draws leave a natural-gradient norm of \S+ against a tolerance of 0\.001, typically about \S+ "
        r"nats from the best q; on 1024 fresh draws the ELBO is \S+ ± \S+\. Raise the tolerance, or transform the "
        r"model to be nearer to a Gaussian\.$",
        result.reason,
    )
    assert said, result.reason
    assert 1000 <= int(said[1]) < 1100 if pooled else int(said[1]) == 384
    assert not result.converged


@pytest.mark.usefixtures("pooled")
def test_budget_and_callbacks():
    q = CholeskyGaussian(4, dtype=torch.float64)
    result = quiet(q, logistic(rows=10).log_joint, tolerance=1e-3, max_evaluations=3)
    assert not result.converged
    assert re.match(r"because the budget of 3 evaluations is used up \(natural-gradient norm", result.reason)
    assert result.evaluations >= 3
    seen = []
    result = quiet(
        CholeskyGaussian(4, dtype=torch.float64), logistic().log_joint, callbacks=[lambda r: seen.append(r) or 1]
    )
    assert len(seen) == 1
    assert re.match("because a callback stopped it at natural-gradient norm", result.reason)


@pytest.mark.usefixtures("pooled")
def test_an_interrupt_keeps_q():
    calls = itertools.count(1)
    model = logistic(rows=10)

    def f(theta):
        if next(calls) > 15:
            raise KeyboardInterrupt
        return model.log_joint(theta)

    q = CholeskyGaussian(4, dtype=torch.float64)
    result = quiet(q, f, tolerance=1e-3)
    assert result.reason == "because it was interrupted."
    with torch.no_grad():
        start = CholeskyGaussian(4, dtype=torch.float64)
        assert float(model.negative_elbo(q)) < float(model.negative_elbo(start))


@pytest.mark.usefixtures("pooled")
def test_resume_is_exact(tmp_path):
    model, runs = logistic(rows=10), []
    for stop in (None, 20):
        torch.manual_seed(5)
        calls = itertools.count(1)

        def f(theta, stop=stop, calls=calls):
            if stop is not None and next(calls) == stop:
                raise KeyboardInterrupt
            return model.log_joint(theta)

        file = tmp_path / f"{stop}.pt"
        q = CholeskyGaussian(4, dtype=torch.float64)
        result = quiet(q, f, tolerance=0.03, checkpoint=file)
        if stop is not None:
            assert result.reason == "because it was interrupted."
            torch.manual_seed(99)  # the checkpoint decides
            q = CholeskyGaussian(4, dtype=torch.float64)
            result = quiet(q, f, tolerance=0.03, checkpoint=file)
        assert result.converged, result.reason
        runs.append((q.scale_tril.clone(), result.trace[-1][:-1]))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


class TestGuarded:
    """log joint -½|θ|², which raises where a coordinate exceeds 2."""

    def target(self, bound=2.0):
        self.calls, self.seen = 0, 0

        def f(theta):
            self.calls, self.seen = self.calls + 1, self.seen + len(theta)
            if bool((theta > bound).any()):
                raise ValueError("beyond")
            return -0.5 * theta.square().sum(-1)

        target = Guarded(LogJoint(f))
        target.log_joint(torch.full((1, 2), -5.0))  # an answer
        self.calls = 0
        return target

    @pytest.mark.parametrize("failing", [[0], [511], [100, 101], [3, 77, 500]])
    def test_the_failing_thetas_are_found(self, failing):
        """NaN there, values and gradients of all others as they are, in 2 k log₂ S calls and the two of the whole."""
        theta = torch.randn(512, 2, generator=torch.Generator().manual_seed(0)).clamp(-1.9, 1.9)
        theta[failing] = 3.0
        theta.requires_grad_()
        target = self.target()
        value = target.log_joint(theta)
        good = torch.ones(512, dtype=torch.bool)
        good[failing] = False
        assert bool(value[~good].isnan().all())
        assert torch.equal(value[good], -0.5 * theta[good].square().sum(-1))
        (gradient,) = torch.autograd.grad(value.sum(), theta)
        torch.testing.assert_close(gradient[good], -theta[good].detach())
        assert bool(gradient[~good].isnan().all())
        assert self.calls <= 2 + 2 * len(failing) * 9
        times = "1 time" if len(failing) == 1 else f"{len(failing)} times"
        assert target.failures() == f" The log joint failed {times}: ValueError: beyond."

    def test_batches_of_posteriors(self):
        theta = torch.zeros(8, 3, 2)
        theta[5, 1] = 4.0
        value = self.target().log_joint(theta)
        assert value.shape == (8, 3)
        assert bool(value[5].isnan().all())
        assert bool((value[[0, 1, 2, 3, 4, 6, 7]] == 0).all())

    def test_calls_are_limited(self):
        target = self.target(bound=-1.0)
        value = target.log_joint(torch.zeros(1024, 2))
        assert self.calls == 2 + 256
        assert not bool(value.isfinite().any())

    def test_a_search_from_several_starts_loses_one(self):
        """The starts of `find_modes` share their calls."""
        target = self.target()
        starts = torch.tensor([[0.5, 0.5], [3.0, 0.0], [-1.0, 1.0]], dtype=torch.float64)
        first, second, third = mode.find_modes(target, starts, 100)
        assert second is None
        assert first.found
        assert third.found


def test_resample_keeps_the_memory():
    model = logistic()
    q = CholeskyGaussian(4, dtype=torch.float64)
    opt = VN(q, estimator=SampleAverage(Fixed(32, seed=1)))
    target = Guarded(LogJoint(model.log_joint))
    for _ in range(6):
        opt.step(target)
    kept = opt.state[q.mean_probe]["metric"]["kept"].clone()
    assert float(kept.sum()) > 0
    opt.resample(SampleAverage(Fixed(64, seed=2)))
    opt.evaluate(target)
    assert torch.equal(opt.state[q.mean_probe]["metric"]["kept"], kept)
    q.initialize_(1.0)
    opt.evaluate(target)
    assert float(opt.state[q.mean_probe]["metric"]["kept"].sum()) == 0


def test_an_untried_step_is_learnt_from():
    """The pair of the step joins the memory at the next evaluation, and what was known stays."""
    model = logistic()
    q = CholeskyGaussian(4, dtype=torch.float64)
    opt = VN(q, estimator=SampleAverage(Fixed(64, seed=1)))
    target = Guarded(LogJoint(model.log_joint))
    kept = []
    for step in (opt.step, opt.step, opt.step, opt.step, opt.step_untried, opt.step):
        step(target)
        kept.append(float(opt.state[q.mean_probe]["metric"]["kept"].sum()))
    assert kept == [0.0, 0.0, 0.0, 1.0, 2.0, 3.0]  # the first two steps are long and tell nothing


@pytest.mark.sparse(2)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.usefixtures("no_pool")
def test_the_minima_of_several_sets_are_averaged(monkeypatch, seed):
    """Each set more takes its share of what noise leaves, and the norm that is told is that of all of them."""
    model, gaps, results = logistic(rows=60, dim=20), [], []
    best = quiet(CholeskyGaussian(20, dtype=torch.float64), model, tolerance=1e-6).loss
    monkeypatch.setattr("torchngvi.fitting.pool.Descent.most", 256)
    for sets in (0, 96):  # draws a coordinate: none, and 6 of 256
        monkeypatch.setattr("torchngvi.fitting.pool.Descent.spread", sets)
        q = CholeskyGaussian(20, dtype=torch.float64)
        torch.manual_seed(seed)
        results.append(fit(q, model.log_joint, tolerance=1e-2, progress=False, examine=False))
        gaps.append(float(VN(q).evaluate(model).loss) - best)
    assert [re.match(r"because (\d+) draws", result.reason)[1] for result in results] == ["256", "1792"]
    assert gaps[1] < 0.35 * gaps[0]  # 1/8 on average
    error = math.sqrt(2 / 20) * results[0].norm ** 2  # of the norm that is told, which counts it
    assert 0.5 * error < results[1].norm ** 2 - 2 * gaps[1] < 1.5 * error
