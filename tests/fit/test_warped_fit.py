"""Fits of warped Gaussians: the objective of mean, root and curves, known targets, verdicts, interrupted runs."""

import dataclasses
import importlib
import math

import pytest
import torch
from torch import Tensor

from torchngvi import (
    CholeskyGaussian,
    DiagonalGaussian,
    GeneralizedLinear,
    LogJoint,
    NaturalGaussian,
    PrecisionCholeskyGaussian,
    examine,
    fit,
    refine,
)
from torchngvi.errors import InputError
from torchngvi.fitting.warped import Bending, WarpedAverages
from torchngvi.models import WarpedTarget
from torchngvi.models.factors import Guarded
from torchngvi.posteriors.warps import SinhArcsinh, YeoJohnson
from torchngvi.structures import arrow, block_diagonal

MEAN = torch.tensor([0.3, -0.2, 0.1, 0.4], dtype=torch.float64)
FACTOR = torch.tensor(
    [[1.0, 0, 0, 0], [0.4, 0.7, 0, 0], [-0.3, 0.2, 1.1, 0], [0.2, -0.5, 0.1, 0.6]], dtype=torch.float64
)
BASES = {
    "cholesky": lambda: CholeskyGaussian(4, mean=MEAN, scale=FACTOR),
    "natural": lambda: NaturalGaussian(4, mean=MEAN, scale=FACTOR),
    "precision": lambda: PrecisionCholeskyGaussian(4, mean=MEAN, scale=FACTOR),
    "diagonal": lambda: DiagonalGaussian(4, mean=MEAN, scale=FACTOR.diagonal()),
    "blocks": lambda: CholeskyGaussian(4, mean=MEAN, scale=FACTOR, structure=block_diagonal([1, 3])),
    "arrow": lambda: PrecisionCholeskyGaussian(
        4, mean=MEAN, scale=FACTOR, structure=arrow(groups=3, local=1, globals=1)
    ),
}
EACH = pytest.mark.parametrize("base", BASES.values(), ids=BASES)


def skewed(theta: Tensor) -> Tensor:
    """A log joint with skewed, correlated coordinates."""
    return (theta - theta.exp()).sum(-1) - 0.1 * theta.sum(-1).square()


def log_gamma(a):
    """θ is the logarithm of a gamma variable with shape a; its log joint, its sd and its quantiles (5, 95 %)."""
    sd = float(torch.special.polygamma(1, torch.tensor(a, dtype=torch.float64)).sqrt())
    x = torch.linspace(-160, 8, 400_001, dtype=torch.float64)
    mass = (a * x - x.exp()).exp().cumsum(0)
    levels = x[torch.searchsorted(mass / mass[-1], torch.tensor([0.05, 0.95]).double())]
    return lambda theta: (a * theta - theta.exp()).sum(-1), sd, levels


def log_half_normal(theta):
    """θ is the logarithm of |z|, z ~ N(0, 1)."""
    return (theta - 0.5 * (2 * theta).exp()).sum(-1)


def bending(base, warp=None, log_joint=skewed):
    return Bending(base().warped(warp), Guarded(LogJoint(log_joint)), 3, 0.1)


@EACH
class TestObjective:
    def test_identity_has_the_elbo_of_the_gaussian(self, base):
        """To 1e-12, on the same draws."""
        bent = bending(base)
        bent.begin()
        bent.evaluate()
        q = base()
        elbo = skewed(q.push_noise(bent.z)).mean() + q.entropy()
        assert abs(bent.value + elbo.item()) < 1e-12

    def test_point(self, base):
        """The objective at any numbers is minus the mean of log p - log q at the draws of the q that is put there."""
        bent = bending(base)
        bent.begin()
        bent.trial = 0.3 * torch.randn(bent.here.shape, generator=torch.Generator().manual_seed(1)).double()
        bent.place(bent.trial)
        bent.evaluate()
        frame = bent.q.base.frame()
        x = frame.mean + frame.push(bent.z)
        target = WarpedTarget(LogJoint(skewed), bent.q)
        terms = target.log_joint(x) - bent.q.base.log_prob(x)
        assert abs(bent.value + terms.mean().item()) < 1e-10  # the draws are white: E|z|² = D exactly

    @pytest.mark.parametrize("warp", [SinhArcsinh(), YeoJohnson()], ids=repr)
    def test_gradient(self, base, warp):
        """That of finite differences, along ten directions at once."""
        bent, step = bending(base, warp), 1e-6
        bent.begin()
        generator = torch.Generator().manual_seed(2)
        at = 0.2 * torch.randn(bent.here.shape, generator=generator).double()
        _, gradient = bent._objective(at)
        for _ in range(10):
            along = torch.randn(at.shape, generator=generator).double()
            ahead, behind = (bent._objective(at + sign * step * along)[0] for sign in (1, -1))
            assert abs((ahead - behind) / (2 * step) - float(gradient @ along)) < 1e-6 * float(along.norm())

    def test_length(self, base):
        """The numbers are Fisher lengths: KL(q‖q₀) of a small change is half its square."""
        bent = bending(base)
        bent.begin()
        gaussian, size = base(), 1e-3
        change = torch.randn(bent.here.shape, generator=torch.Generator().manual_seed(3)).double()
        change[-bent.sizes[-1] :] = 0.0
        bent.place(size * change)
        assert bent.base.kl(gaussian).item() == pytest.approx(0.5 * size**2 * float(change.square().sum()), rel=5e-3)
        bent.place(size * torch.eye(len(change), dtype=torch.float64)[-1])
        phi = bent.q.phi.flatten(0, 1)[-2:]
        fisher = bent.q.warp.fisher(torch.zeros(2, dtype=torch.float64))
        assert float(phi @ fisher @ phi) == pytest.approx(size**2, rel=1e-9)

    @pytest.mark.accuracy
    def test_fit(self, base):
        """Every Gaussian can be warped, and the ELBO is the larger for it."""
        torch.manual_seed(0)
        q = base().warped()
        result = fit(q, skewed, progress=False, examine=False)
        assert result.posterior is q
        assert result.converged
        assert "the warp gains" in result.reason
        assert bool((q.phi != 0).any())


@pytest.mark.accuracy
@pytest.mark.parametrize(
    ("dim", "log_joint", "sd", "levels"),
    [
        (3, *log_gamma(0.5)),
        (3, *log_gamma(3.0)),
        (3, log_half_normal, math.pi / math.sqrt(8), torch.tensor([0.0627068, 1.9599640]).double().log()),
    ],
    ids=["log gamma 0.5", "log gamma 3", "log half-normal"],
)
def test_skewed_margins(dim, log_joint, sd, levels):
    """Standard deviations within 5 %, quantiles within a tenth of one, and the verdict says that it fits."""
    torch.manual_seed(0)
    q = CholeskyGaussian(dim, dtype=torch.float64).warped()
    result = fit(q, log_joint, progress=False)
    assert bool(((q.stddev / sd - 1).abs() < 0.05).all())
    assert bool(((q.quantile([0.05, 0.95]) - levels[:, None]).abs() < 0.1 * sd).all())
    assert result.verdict.word == "fits"
    assert str(result.verdict).startswith("the family of warped Gaussians: fits")
    assert result.approximation.endswith("q is the best warped Gaussian, and a warped Gaussian fits.")


@pytest.mark.accuracy
def test_rotated_skewness_is_told():
    """What is skewed along other directions than axes a curve around each coordinate does not mend."""
    log_joint, sd, _ = log_gamma(0.5)
    turn = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(8), dtype=torch.float64))[0]
    torch.manual_seed(0)
    q = CholeskyGaussian(5, dtype=torch.float64).warped()
    result = fit(q, lambda theta: log_joint(theta @ turn), progress=False)
    assert float((q.stddev / sd).min()) < 0.8
    assert result.verdict.word == "does not fit"
    assert "a warped Gaussian DOES NOT FIT" in result.approximation


def test_a_funnel_is_told():
    """No gain: q is the Gaussian again, which does not fit."""

    def funnel(theta):
        v, x = theta[..., 0], theta[..., 1:]
        return -0.5 * (v / 1.5).square() - 0.5 * (x.square() * (-v)[..., None].exp() + v[..., None]).sum(-1)

    torch.manual_seed(0)
    q = CholeskyGaussian(5, dtype=torch.float64).warped()
    result = fit(q, funnel, progress=False)
    assert not q.phi.any()
    assert "A warp changes the ELBO on 1024 fresh draws by" in result.reason
    assert "no gain: q is the Gaussian" in result.reason
    assert result.verdict.word == "does not fit"
    assert "a Gaussian DOES NOT FIT" in result.approximation


def test_nothing_to_gain():
    """Of a Gaussian density the fit is the Gaussian to the last digit, and costs little more."""
    torch.manual_seed(0)
    alone = CholeskyGaussian(2, dtype=torch.float64)
    plain = fit(alone, lambda theta: -theta.square().sum(-1), progress=False)
    torch.manual_seed(0)
    q = CholeskyGaussian(2, dtype=torch.float64).warped()
    result = fit(q, lambda theta: -theta.square().sum(-1), progress=False)
    assert result.converged
    assert torch.equal(q.mean, alone.mean)
    assert torch.equal(q.stddev, alone.stddev)
    assert result.loss == plain.loss
    assert result.verdict.word == "fits"


def test_a_model_is_a_log_joint():
    """A regression too: its closed forms are of no use to a warped posterior."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(10, 2, generator=generator, dtype=torch.float64)
    model = GeneralizedLinear(X, (X.sum(-1) > 0).double(), prior_precision=0.04)
    torch.manual_seed(0)
    result = fit(CholeskyGaussian(2, dtype=torch.float64).warped(), model, progress=False, examine=False)
    assert "the warp gains" in result.reason


def test_single_precision():
    torch.manual_seed(0)
    q = CholeskyGaussian(3).warped(YeoJohnson())
    assert fit(q, log_gamma(3.0)[0], progress=False, examine=False).converged
    assert q.mean.dtype == torch.float32


def test_tempered():
    """At γ = ½ the density is p², whose warped fit is the same as that of 2 log p."""
    losses = []
    for log_joint, gamma in ((skewed, 0.5), (lambda theta: 2 * skewed(theta), 1.0)):
        torch.manual_seed(0)
        q = CholeskyGaussian(2, dtype=torch.float64).warped()
        losses.append(fit(q, LogJoint(log_joint, temperature=gamma), progress=False, examine=False).loss / gamma)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.fixture(scope="module")
def fitted():
    torch.manual_seed(0)
    return fit(CholeskyGaussian(2, dtype=torch.float64).warped(), log_gamma(0.5)[0], progress=False)


def test_result(fitted):
    """Draws, names, a summary, an examination of one's own, and a refinement from the base."""
    assert fitted.sample(5).shape == (5, 2)
    assert fitted.named(["a", "b"]).verdict.marginals.names == ("a", "b")
    with pytest.raises(InputError, match="one entry a coordinate, 2; got 1"):
        fitted.named(["a"])
    assert "the family of warped Gaussians" in fitted.summary()
    verdict = examine(fitted.posterior, log_gamma(0.5)[0])
    assert verdict.word == "fits"
    assert verdict.family == "the family of warped Gaussians"
    found = verdict.sampled.corrected
    assert bool(((found.sd / log_gamma(0.5)[1]).log().abs() < 4 * found.log_sd_error).all())  # of θ, not of x
    assert refine(fitted, kind="importance").sample(3).shape == (3, 2)


def test_elbo_is_that_of_fresh_draws(fitted):
    q = fitted.posterior
    theta = q.sample(20_000, torch.Generator().manual_seed(1))
    terms = log_gamma(0.5)[0](theta) - q.log_prob(theta)
    assert abs(float(terms.mean()) + fitted.loss) < 0.05


def run(q, **settings):
    torch.manual_seed(5)
    return fit(q, skewed, progress=False, examine=False, **settings)


def start():
    return CholeskyGaussian(2, dtype=torch.float64).warped()


@pytest.mark.accuracy
def test_a_run_goes_on_to_the_last_bit(tmp_path):
    """From a file that was written among the curves, and from one before them."""
    whole = run(start())
    gaussian = run(CholeskyGaussian(2, dtype=torch.float64)).evaluations
    assert whole.evaluations > gaussian + 4
    for number in (2, gaussian + 3):
        file, q = tmp_path / f"{number}.pt", start()
        cut = run(q, checkpoint=file, checkpoint_every=1, max_evaluations=number)
        assert not cut.converged
        q = start()
        again = run(q, checkpoint=file)
        assert again.loss == whole.loss
        assert torch.equal(q.phi, whole.posterior.phi)
        assert torch.equal(q.base.scale_tril, whole.posterior.base.scale_tril)
        assert again.trace[-1][:-1] == whole.trace[-1][:-1]


@pytest.mark.accuracy
def test_an_interrupt_among_the_curves():
    """It leaves q at the last record, with the curves of that."""
    gaussian = run(CholeskyGaussian(2, dtype=torch.float64)).evaluations
    seen = []

    def interrupt(record):
        if record.evaluations == gaussian + 3:
            seen.append(q.phi.clone())
            raise KeyboardInterrupt

    q = start()
    result = run(q, callbacks=[interrupt])
    assert not result.converged
    assert "interrupted" in result.reason
    assert torch.equal(q.phi, seen[0])
    assert seen[0].any()


@pytest.mark.accuracy
def test_a_budget_among_the_curves():
    """It ends the run there."""
    gaussian = run(CholeskyGaussian(2, dtype=torch.float64)).gradients
    result = run(start(), max_gradients=gaussian + 1500)
    assert not result.converged
    assert gaussian < result.gradients <= gaussian + 1500


def offered(log_joint, dim):
    torch.manual_seed(0)
    result = fit(CholeskyGaussian(dim, dtype=torch.float64), log_joint, progress=False)
    return (
        result,
        "its margins are not normal: try torchngvi.fit(q.warped(), log_joint) too, or .warped(inside=True)"
        in result.verdict.next,
    )


@pytest.mark.accuracy
def test_a_warp_is_offered_where_margins_are_skewed():
    result, told = offered(log_gamma(0.5)[0], 3)
    assert told
    assert result.approximation.endswith(
        "its margins are not normal: try torchngvi.fit(result.posterior.warped(), result.target) too, or "
        ".warped(inside=True)."
    )
    assert "fit(q.warped(), log_joint)" in dataclasses.replace(result, target=None).approximation  # as of a copy
    bent = fit(result.posterior.warped(), result.target, progress=False)
    assert bent.posterior.phi.any()
    assert "warped()" not in str(bent)


@pytest.mark.accuracy
def test_a_warp_that_gained_nothing_is_not_offered_again(monkeypatch):
    """Of heavy tails on both sides third moments are noise, and a warp in vain is the end of that advice."""
    monkeypatch.setattr(WarpedAverages, "worth", 1.0)  # the few hundredths that it gains here are too little then

    def student(theta):
        apart = theta[..., 1] - 0.8 * theta[..., 0]
        return -2.5 * torch.log1p((theta[..., 0].square() + 4 * apart.square()) / 3)

    result, told = offered(student, 2)
    assert told
    assert "skewed" not in result.approximation
    for at_once in (True, False):
        q = CholeskyGaussian(2, dtype=torch.float64).warped()
        bent = fit(q, result.target, progress=False, examine=at_once)
        assert "which is no gain" in bent.reason
        assert "a Gaussian DOES NOT FIT" in bent.summary()
        assert "warped()" not in bent.summary()


@pytest.mark.parametrize(
    "log_joint",
    [
        lambda theta: (
            -0.5 * theta[..., 0].square()
            - 0.5 * (theta[..., 1:].square().sum(-1) * (-theta[..., 0]).exp() + 2 * theta[..., 0])
        ),
        lambda theta: torch.logaddexp(-0.5 * theta.square().sum(-1), -0.5 * (theta - 5).square().sum(-1)),
        lambda theta: -theta.square().sum(-1),
    ],
    ids=["funnel", "two modes", "normal"],
)
def test_a_warp_is_not_offered_elsewhere(log_joint):
    assert not offered(log_joint, 3)[1]


def test_a_warp_is_offered_once(fitted):
    """Not of what is warped."""
    word = fitted.verdict
    skew = word.sampled._replace(corrected=word.sampled.corrected._replace(skewness=torch.full((2,), 2.0)))
    for family, told in ((word.family, False), ("the Gaussian family", True)):
        verdict = dataclasses.replace(word, word="does not fit", sampled=skew, family=family)
        assert ("q.warped()" in verdict.next) == told


def test_the_quantiles_of_the_benchmark():
    """By weighted draws: of a density whose quantiles are known, and none where the weights miss its moments."""
    pytest.importorskip("benchmarks", reason="needs the benchmarks of a clone: run python -m pytest in its root")
    table, suite = (importlib.import_module(f"benchmarks.{name}") for name in ("warps", "truths"))
    log_joint, sd, levels = log_gamma(3.0)
    truth = torch.full((2,), float(torch.special.digamma(torch.tensor(3.0).double()))).double()
    target = suite.Target("log-gamma", 2, log_joint, truth, torch.full((2,), sd).double(), "closed form")
    q = CholeskyGaussian(2, mean=truth, scale=1.3 * sd, dtype=torch.float64).warped()
    assert torch.allclose(table.quantiles(target, q), levels[:, None].expand(2, 2), rtol=0, atol=0.03)
    beside = dataclasses.replace(target, mean=truth + 1.0)
    assert table.quantiles(beside, q) is None
    flat = CholeskyGaussian(2, mean=1.0, scale=2.0, dtype=torch.float64)
    assert torch.allclose(table.of_gaussian(flat), flat.warped().quantile([0.05, 0.95]), rtol=0, atol=1e-12)


@pytest.mark.accuracy
def test_the_usual_tolerance_of_many_curves():
    """0.1 √(D/20), as accurate in each coordinate; a tolerance that is given holds for both."""
    torch.manual_seed(0)
    result = fit(DiagonalGaussian(80, dtype=torch.float64).warped(YeoJohnson()), log_gamma(1.0)[0], progress=False)
    assert result.converged
    assert 0.1 < result.norm <= 0.2
    torch.manual_seed(0)
    q = DiagonalGaussian(80, dtype=torch.float64).warped(YeoJohnson())
    result = fit(q, log_gamma(1.0)[0], tolerance=0.5, progress=False, examine=False)
    assert result.converged
    assert 0.2 < result.norm <= 0.5


@pytest.mark.parametrize("inside", [False, True])
def test_one_margin_keeps_its_curve(inside):
    """The logarithm of a gamma variable of shape two: a Gaussian loses 0.040 nats, and a curve gains half of them."""
    torch.manual_seed(0)
    gamma = torch.distributions.Gamma(torch.tensor(2.0, dtype=torch.float64), 1.0)
    q = CholeskyGaussian(1, dtype=torch.float64).warped(inside=inside)
    result = fit(q, lambda theta: (gamma.log_prob(theta.exp()) + theta).sum(-1), progress=False)
    assert bool(q.phi.any())
    assert -0.02 < -result.loss <= 0.01  # log evidence is 0
    digamma, trigamma = (torch.special.polygamma(k, torch.tensor(2.0, dtype=torch.float64)) for k in (0, 1))
    draws = q.sample((4000,), torch.Generator().manual_seed(1))[:, 0]
    assert abs(float(draws.mean() - digamma)) < 0.06
    assert abs(float(draws.var() / trigamma) - 1) < 0.12


def test_one_gaussian_margin_stays_gaussian():
    torch.manual_seed(0)
    q = CholeskyGaussian(1, dtype=torch.float64).warped()
    fit(q, lambda theta: -0.5 * ((theta - 1) / 3).square().sum(-1), progress=False)
    assert not bool(q.phi.any())
