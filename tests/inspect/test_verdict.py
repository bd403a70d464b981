"""The verdict: right words on densities with known moments, a budget that is kept, and every sentence."""

import math
from dataclasses import replace

import pytest
import torch
from arrow import ScalarArrow
from test_refine import log_gamma

from torchngvi import CholeskyGaussian, DiagonalGaussian, LogJoint, NaturalGaussian, PrecisionCholeskyGaussian, fit
from torchngvi.derivatives import energy_and_gradient
from torchngvi.diagnostics import ExaminationSettings, Residuals, examine
from torchngvi.diagnostics.importance import Corrected, Quality, Sampled, heaviest
from torchngvi.diagnostics.verdict import (
    Allowance,
    Effort,
    Marginals,
    OtherMode,
    Shape,
    Verdict,
    examine_fitted,
    judge,
    undecided,
)
from torchngvi.errors import InputError
from torchngvi.expectations.draws import Fixed
from torchngvi.interfaces import Target
from torchngvi.mode import find_mode
from torchngvi.models import FactorTarget
from torchngvi.models.factors import Guarded
from torchngvi.refinement import refine
from torchngvi.structures import arrow

F64 = torch.float64


class Counting(Target):
    """A target that counts the gradients and values that are asked of it."""

    def __init__(self, function, temperature=1.0):
        self.inner, self.temperature = LogJoint(function), temperature
        self.gradients = self.values = 0

    def log_joint(self, theta):
        count = theta[..., 0].numel()
        self.gradients += count * theta.requires_grad
        self.values += count * (not theta.requires_grad)
        return self.inner.log_joint(theta)

    def tensors(self):
        return ()


def normal(theta):
    return -0.5 * theta.square().sum(-1)


def student(nu):
    return lambda theta: -0.5 * (nu + 1) * torch.log1p(theta.square() / nu).sum(-1)


def funnel(s):
    def log_joint(theta):
        v, x = theta[..., 0], theta[..., 1:]
        return -0.5 * (v / s).square() - 0.5 * ((-v).exp() * x.square().sum(-1) + x.shape[-1] * v)

    return log_joint


def banana(b):
    return lambda theta: -0.5 * theta[..., 0].square() - 2 * (theta[..., 1] - b * theta[..., 0].square()).square()


def two_normals(at, sd=1.0):
    return lambda theta: torch.logaddexp(normal((theta - at) / sd), normal((theta + at) / sd))


def fitted(function, dim, seed=0):
    torch.manual_seed(seed)
    return fit(CholeskyGaussian(dim, dtype=F64), function, progress=False).posterior


@pytest.mark.sparse(3)
@pytest.mark.parametrize(
    ("function", "dim", "word", "reason"),
    [
        (log_gamma(10.0), 5, "fits", None),
        (funnel(0.3), 5, "fits", None),
        (banana(0.1), 2, "fits", None),
        (student(10.0), 5, "fits", None),
        (banana(0.25), 2, "about right", "theta["),  # 1.26 and 1.23 times too small
        (funnel(1.5), 5, "does not fit", "theta["),
        (two_normals(3.0), 2, "does not fit", "1 other mode, at ("),
        (two_normals(0.75, 0.5), 5, "does not fit", "1 other mode, at ("),
    ],
    ids=["log-gamma", "funnel .3", "banana .1", "t 10", "banana .25", "funnel 1.5", "two normals", "two near normals"],
)
def test_words(function, dim, word, reason):
    q = fitted(function, dim)
    for seed in range(2):
        verdict = examine(q, function, seed=seed)
        assert verdict.word == word, str(verdict)
        assert any(each.startswith(reason) for each in verdict.reasons) if reason else not verdict.reasons


def test_heavy_tails():
    """Of Student's t with two and a half degrees of freedom, sd √5, the best Gaussian has the sd 1.28."""
    verdict = examine(fitted(student(2.5), 5), student(2.5))
    assert verdict.word != "fits"
    assert bool((verdict.shape.log_sd.abs() < 0.05).all())  # which the third order cannot see
    assert bool((verdict.shape.tails < -0.7).all())


@pytest.mark.filterwarnings("ignore:refine, importance. Whether it is the posterior cannot be told")
@pytest.mark.parametrize(("sd", "word"), [(0.003, "not examined"), (0.03, "fits")])
def test_narrower_than_the_spacing_of_the_dtype(sd, word):
    """At 1e5 the numbers of float32 are 0.008 apart: q is right, and draws of it would call it far too wide."""
    torch.manual_seed(0)
    q = CholeskyGaussian(2)
    result = fit(q, LogJoint(lambda theta: normal((theta - 1e5) / sd)), progress=False)
    assert result.converged
    torch.testing.assert_close(q.stddev, torch.full((2,), sd), rtol=1e-3, atol=0)
    refined = refine(result, kind="importance").second
    assert result.verdict.word == examine(q, result.target).word == refined.word == word
    assert ("apart from rounding: give the parameter another origin, or compute" in str(result)) == (word != "fits")


def test_a_gaussian_in_all_families():
    S = torch.tensor([[2.0, 0.6], [0.6, 1.0]], dtype=F64)
    target = LogJoint(lambda theta: -0.5 * ((theta @ S) * theta).sum(-1), temperature=0.5)
    exact = CholeskyGaussian.from_moments(torch.zeros(2, dtype=F64), 0.5 * torch.linalg.inv(S))
    for q in (exact, NaturalGaussian.from_posterior(exact), PrecisionCholeskyGaussian.from_posterior(exact)):
        verdict = examine(q, target)
        assert verdict.word == "fits"
        assert verdict.shape.eigenvalue < 1e-6
        assert verdict.sampled.from_q.nats < 1e-8
        assert verdict.effort.unexamined == ()


def test_a_mean_field_of_a_correlated_gaussian_does_not_fit():
    S = torch.tensor([[1.0, 0.95], [0.95, 1.0]], dtype=F64)
    q = DiagonalGaussian(2, dtype=F64)
    verdict = examine(q, lambda theta: -0.5 * ((theta @ S) * theta).sum(-1))
    exact = torch.linalg.inv(S).diagonal().sqrt()
    assert verdict.word == "does not fit"
    assert "times too small" in verdict.reasons[0]
    torch.testing.assert_close(verdict.shape.log_sd, exact.log(), rtol=0, atol=1e-8)
    torch.testing.assert_close(verdict.sampled.corrected.sd, exact, rtol=0.1, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_both_dtypes(dtype):
    q = CholeskyGaussian(1, mean=-0.5, scale=1.0, dtype=dtype)  # of log-gamma with a = 1
    verdict = examine(q, log_gamma(1.0))
    assert verdict.word == "about right"
    assert verdict.sampled.corrected.sd.dtype == dtype
    assert float(verdict.sampled.corrected.sd) == pytest.approx(math.pi / math.sqrt(6), rel=0.06)


def test_a_seed_gives_the_same_verdict_and_leaves_the_generator_alone():
    q = CholeskyGaussian(2, mean=-0.5, dtype=F64)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first, second = (str(examine(q, log_gamma(1.0), seed=5)) for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)


def test_residuals_at_hand_save_gradients():
    q = CholeskyGaussian(3, mean=-0.5, dtype=F64)
    z = Fixed(1024)(torch.zeros(3, dtype=F64))
    residual = (q.mean + z).exp() - 1 - z
    target = Counting(log_gamma(1.0))
    alone = ExaminationSettings(margins=0)  # whose gradients are others
    verdict = examine(q, target, residuals=Residuals(z, residual), modes=(), settings=alone)
    assert target.gradients == verdict.effort.gradients == 0
    assert verdict.shape.draws == 1024
    few = examine(q, target, residuals=Residuals(z[:64], -z[:64]), modes=(), settings=alone)
    assert few.shape.draws == 512  # drawn again
    assert target.gradients == few.effort.gradients == 512


def test_modes_from_elsewhere():
    q = CholeskyGaussian(2, mean=3.0, dtype=F64)
    target = LogJoint(two_normals(3.0))
    modes = [find_mode(target, torch.full((2,), at, dtype=F64), 1000) for at in (-2.5, -3.5, 2.5)]
    verdict = examine(q, target, modes=modes)
    assert verdict.effort.starts == 0
    assert len(verdict.modes) == 1  # once, and not that of q
    other = verdict.modes[0]
    assert other.distance == pytest.approx(6 * math.sqrt(2), abs=1e-3)
    assert other.share == pytest.approx(0.5, abs=1e-3)


def test_a_mode_that_is_nearer_than_draws_of_q_in_many_dimensions():
    q = CholeskyGaussian(20, mean=3 * torch.eye(20, dtype=F64)[0], dtype=F64)
    target = LogJoint(lambda x: two_normals(3.0)(x[..., :1]) - 0.5 * x[..., 1:].square().sum(-1))
    modes = [find_mode(target, at * q.mean, 1000) for at in (1.0, -1.0)]
    verdict = examine(q, target, modes=modes)
    assert (verdict.word, verdict.modes[0].share) == ("does not fit", pytest.approx(0.5, abs=1e-3))


def test_modes_near_draws_of_large_weight():
    q = CholeskyGaussian(2, mean=3.0, dtype=F64)
    verdict = examine(q, two_normals(3.0), modes=())  # draws of the wide proposal come near, and have such weights
    assert (verdict.effort.starts, verdict.effort.climbed) == (0, 4)
    assert verdict.word == "does not fit"
    assert verdict.modes[0].share == pytest.approx(0.5, abs=1e-3)
    assert "1 other mode from 4 draws of large weight" in str(verdict)


def test_the_heaviest_draws_are_of_different_regions():
    x = torch.tensor([[0.0, 0.0], [0.1, 0.0], [5.0, 0.0], [5.0, 0.1], [0.0, 5.0], [2.5, 2.5], [9.0, 9.0]], dtype=F64)
    log_weights = torch.tensor([3.0, 2.9, 2.8, 5.0, 2.7, 2.6, 2.5], dtype=F64)
    assert heaviest(x, log_weights).tolist() == [3, 0, 4, 5]


def test_no_draw_is_climbed_from_where_weights_are_believed():
    q = CholeskyGaussian(2, dtype=F64)
    assert examine(q, normal, modes=()).effort.climbed == 0


def test_where_the_search_starts():
    q = CholeskyGaussian(2, mean=103.0, dtype=F64)
    both = lambda theta: two_normals(3.0)(theta - 100.0)  # noqa: E731
    assert examine(q, both, around=torch.full((2,), 100.0)).word == "does not fit"


def test_a_faint_mode_is_listed_and_no_reason():
    def function(theta):
        return torch.logaddexp(normal(theta), normal(theta - 5) - 4.5)

    q = CholeskyGaussian(1, dtype=F64)
    modes = [find_mode(LogJoint(function), torch.full((1,), 5.0, dtype=F64), 1000)]
    verdict = examine(q, function, modes=modes)
    assert len(verdict.modes) == 1
    assert verdict.modes[0].share == pytest.approx(0.011, abs=0.002)
    assert not any("other mode" in reason for reason in verdict.reasons)
    assert "1 other mode" not in str(verdict).splitlines()[0]


def test_confirmed_where_importance_sampling_is_not_trusted():
    """Neal's funnel: the response of the neck is near singular, and that of the others small."""
    q = fitted(funnel(3.0), 6)
    verdict = examine(q, funnel(3.0))
    assert verdict.word == "does not fit"
    assert bool(verdict.shape.confirmed[0])
    assert verdict.shape.log_sd[0] > 0.7
    assert ">= " in str(verdict) or "times too small" in str(verdict)


def best_for_funnel(s, dim):
    """The best q: var v = 1/(1/s² + (D - 1)/2) =: V, and the others have a standard deviation of e^(-V/4)."""
    V = 1 / (1 / s**2 + (dim - 1) / 2)
    sd = torch.tensor([math.sqrt(V), *[math.exp(-V / 4)] * (dim - 1)], dtype=F64)
    return CholeskyGaussian(dim, dtype=F64).initialize_(0.0, sd.diag())


@pytest.mark.parametrize(("s", "dim"), [(1.0, 41), (1.5, 21), (2.0, 21)])
def test_a_margin_is_followed_before_more_weights_use_up_the_budget(s, dim):
    allowed = Allowance(Guarded(LogJoint(funnel(s))), 2**62, 8000.0)
    verdict = examine_fitted(best_for_funnel(s, dim), allowed, modes=())
    assert (verdict.word, verdict.sampled.draws) == ("does not fit", 4096), str(verdict)


@pytest.mark.sparse(3)
@pytest.mark.parametrize("most", [1, 100, 511, 512, 600, 1500, 4000, 20_000])
def test_a_budget_is_kept(most):
    target = Counting(funnel(3.0))
    verdict = examine(best_for_funnel(3.0, 6), target, max_gradients=most)
    assert target.gradients == verdict.effort.gradients <= most
    assert target.values == verdict.effort.values
    text = str(verdict)
    if most < 512:
        assert f"tails (a budget of {most} gradients)" in text
    if most <= 100:
        assert f"other modes (a budget of {most} gradients)" in text
    if most in (512, 600):
        assert " beyond the third order (the budget, or a log joint that is not finite)" in text
        assert "times too small, by the third order alone" in text


def test_without_linear_response():
    """A pattern that has no third order, and a mean field on a budget without gradients: by importance sampling."""
    q = PrecisionCholeskyGaussian(4, structure=ScalarArrow, dtype=F64)
    verdict = examine(q, normal)
    assert "linear response (no third order for ScalarArrow(dim=4))" in str(verdict)
    assert verdict.word == "fits"
    mean_field = examine(DiagonalGaussian(2, dtype=F64), normal, max_gradients=1)
    assert "linear response and tails (a budget of 1 gradients)" in str(mean_field)
    assert mean_field.word == "fits"


def test_a_forest_of_factors_is_examined_as_a_full_q_is():
    """The same Gaussian, held by its sparse precision and whole: one matrix M, and one response of each coordinate."""
    structure = arrow(groups=3, local=1, globals=1)

    def group(theta):
        b, omega = theta[..., 0], theta[..., 1]
        return 2 * (b + omega) - (b + omega).exp() - 0.5 * b.square()

    target = FactorTarget(structure, [(0, group), (-1, lambda theta: -2 * theta[..., 0].square())])
    q = PrecisionCholeskyGaussian(4, structure=structure, dtype=F64)
    assert fit(q, target, progress=False, examine=False).converged
    whole = CholeskyGaussian(4, dtype=F64).initialize_(q.mean, q.scale_tril)
    z, shapes = Fixed(512, seed=1)(q.mean), []
    theta = q.mean + q.frame().push(z)
    gradient = energy_and_gradient(target, theta)[1]
    for each in (q, whole):
        z = torch.linalg.solve(each.frame().push(torch.eye(4, dtype=F64)).mT, (theta - q.mean).mT).mT
        z = torch.cat([z[:256], -z[:256]])
        residuals = Residuals(z, each.frame().pull(gradient) - z)
        shapes.append(examine(each, target, residuals=residuals, settings=ExaminationSettings(confirmed=2)).shape)
    assert shapes[0].eigenvalue == pytest.approx(shapes[1].eigenvalue, rel=1e-9)
    assert shapes[0].eigenvalue > 0.05
    assert torch.allclose(shapes[0].log_sd, shapes[1].log_sd, atol=1e-9)


@pytest.mark.accuracy
def test_wide_problems():
    q = DiagonalGaussian(2100, dtype=F64)
    verdict = examine(q, normal, max_gradients=1000)
    assert "linear response (D = 2100 is above 2000)" in str(verdict)
    assert "other modes (D = 2100 is not below 60)" in str(verdict)
    assert verdict.word == "fits"


@pytest.mark.accuracy
def test_weights_of_no_use_do_not_decide():
    """Many small misfits: each standard deviation is nearly right, and hardly a draw has any weight."""
    a = 5.0
    q = CholeskyGaussian(160, mean=math.log(a) - 0.5 / a, scale=a**-0.5, dtype=F64)
    verdict = examine(q, log_gamma(a))
    assert verdict.sampled.corrected.effective < 100
    assert verdict.effort.unexamined[0].startswith("importance weights (")
    assert verdict.word == "about right"
    assert verdict.reasons[0] == "importance weights do not tell more"
    assert verdict.shape.log_sd.median().item() == pytest.approx(-0.5 * math.log(1 - 0.5 / a), abs=0.01)


def test_a_log_joint_that_is_not_finite_or_raises():
    q = CholeskyGaussian(1, dtype=F64)
    broken = examine(q, lambda theta: torch.where(theta[..., 0].abs() < 0.5, normal(theta), torch.nan))
    assert broken.word == "not examined"
    assert "importance weights (log joint NaN at draws of q, or finite at none)" in str(broken)
    assert "linear response (log joint not finite at draws of q)" in str(broken)
    half = examine(q, lambda theta: torch.where(theta[..., 0] > 0, normal(theta), -torch.inf))
    assert half.word == "does not fit"  # the half normal has the sd 0.6

    def raises(theta):
        if bool((theta > 3.5).any()):
            raise ValueError("too large")
        return normal(theta)

    verdict = examine(q, raises)
    assert verdict.word == "fits"


@pytest.mark.parametrize("outside", [-torch.inf, torch.nan])
def test_a_mode_far_below_q_does_not_count_where_the_elbo_is_not_known(outside):
    """Draws of q are outside of the support: of NaN too many for importance weights."""

    def two(theta):
        normals = [-0.5 * ((theta - at) / 0.2).square().sum(-1) for at in (0.0, 1.6)]
        return torch.where(theta[..., 0] < -0.25, outside, torch.logaddexp(normals[0], normals[1] - 30))

    q, target = CholeskyGaussian(2, scale=0.2, dtype=F64), LogJoint(two)
    modes = [find_mode(target, torch.full((2,), at, dtype=F64), 200) for at in (0.1, 1.5)]
    assert examine(q, target, modes=modes).modes == ()
    level = [modes[0], modes[1]._replace(log_evidence=modes[0].log_evidence)]
    assert examine(q, target, modes=level).modes[0].share == pytest.approx(0.5)


def test_other_values_at_the_same_theta():
    class Drawing(Counting):
        comparable = False

    verdict = examine(fitted(funnel(3.0), 6), Drawing(funnel(3.0)))
    assert "a confirmation (the log joint gives other values at the same theta)" in str(verdict)


def sampled_of(log_sd, shift=0.0, k_hat=0.3, effective=3000.0, own=None, first=0.0):
    sd = torch.tensor([first, log_sd]).exp()
    mean = torch.tensor([0.0, shift * math.exp(log_sd)])
    error = torch.full((2,), 0.05)
    own = None if own is None else torch.tensor([math.nan, own])
    corrected = Corrected(mean, sd, error * sd, error, k_hat, effective, own)
    return Sampled(corrected, Quality(-1.0, math.nan, math.nan, 900.0, 0.2, 0.1), 4096)


def shape_of(log_sd, confirmed=False, singular=False, tails=0.0, first=0.0):
    two = torch.tensor([first, log_sd])
    flag = torch.tensor([False, True])
    return Shape(two, 0.1 * two, flag & confirmed, flag & singular, torch.tensor([0.0, tails]), 0.5, 512)


POOR = FEW = "importance weights do not tell more"
Q = Marginals(torch.zeros(2), torch.ones(2), ("mu", "log tau"))


def small(times, way="", of="log tau"):
    return f"{of}: sd {times} times too small{way}"


THIRD, THIRD_MORE = (small(f"about {times}", ", by the third order alone") for times in (2.2, 2.5))


@pytest.mark.parametrize(
    ("shape", "sampled", "word", "reasons"),
    [
        (shape_of(0.0), sampled_of(0.1), "fits", ()),
        (shape_of(0.0), sampled_of(0.25), "about right", (small("about 1.3"),)),
        (shape_of(0.0), sampled_of(-0.4), "does not fit", ("log tau: sd about 1.5 times too large",)),
        (shape_of(0.0), sampled_of(0.16, own=0.55), "fits", ()),  # the squares behind that sd are well behaved
        (shape_of(0.0), sampled_of(0.16, own=0.65), "about right", (small("about 1.2"),)),
        (shape_of(0.0), sampled_of(0.14, own=0.65), "fits", ()),
        (shape_of(0.0), sampled_of(0.3, own=0.65), "about right", (small("about 1.3"),)),
        # at least 1.3 times, beyond a standard error: a fit that is that wrong does not fit
        (shape_of(0.0), sampled_of(0.32, own=0.65), "does not fit", (small("at least about 1.4"),)),
        (shape_of(0.0), sampled_of(0.32, own=0.55), "about right", (small("about 1.4"),)),
        (shape_of(0.0), sampled_of(0.38, own=0.65), "does not fit", (small("at least about 1.5"),)),
        (shape_of(0.0), sampled_of(-0.25, own=0.8), "about right", ("log tau: sd about 1.3 times too large",)),
        (shape_of(0.0), sampled_of(0.0, shift=0.25), "about right", ("log tau: mean off by about 0.25 sd",)),
        (shape_of(0.0), sampled_of(0.0, shift=0.5), "does not fit", ("log tau: mean off by about 0.5 sd",)),
        (shape_of(0.9, confirmed=True), sampled_of(0.1), "fits", ()),  # sampling is trusted
        (shape_of(0.9), sampled_of(0.1, k_hat=0.8), "about right", (THIRD_MORE, POOR)),
        (shape_of(0.9, confirmed=True), sampled_of(0.1, k_hat=0.8), "does not fit", (small("about 2.5"),)),
        (
            shape_of(0.0, confirmed=True, singular=True),
            sampled_of(0.1, effective=150.0),
            "does not fit",
            (small("at least 3", ", by linear response"),),
        ),
        # both ways find the same, and the larger is said
        (shape_of(0.9, confirmed=True), sampled_of(0.6, k_hat=0.8), "does not fit", (small("about 2.5"),)),
        (shape_of(0.4, confirmed=True), sampled_of(0.9, k_hat=0.8), "does not fit", (small("at least about 2.5"),)),
        (shape_of(0.0), sampled_of(0.38, k_hat=0.8), "does not fit", (small("at least about 1.5"),)),
        (shape_of(0.0), sampled_of(0.3, k_hat=0.8), "about right", (small("about 1.3"), POOR)),
        (shape_of(0.0), sampled_of(0.1, k_hat=0.8), "about right", (POOR,)),
        (shape_of(0.0), sampled_of(0.9, effective=99.0), "about right", (FEW,)),  # which are not to be believed
        (shape_of(0.0), None, "about right", ("no importance weights to tell more",)),
        # no draw is of use, and the third order is far beyond its errors
        (shape_of(0.9), sampled_of(0.1, effective=99.0), "does not fit", (THIRD_MORE,)),
        (shape_of(0.8), sampled_of(0.1, effective=99.0), "about right", (THIRD, FEW)),
        (  # a confirmation has said less of a coordinate that the third order thought worse
            shape_of(0.3, confirmed=True, first=0.9),
            sampled_of(0.1, effective=99.0),
            "about right",
            (small("about 2.5", ", by the third order alone", "mu"), FEW),
        ),
        (shape_of(0.9), None, "about right", (THIRD_MORE, "no importance weights to tell more")),
        (shape_of(0.0, tails=-1.2), sampled_of(0.0), "fits", ()),  # sampling is trusted
        (
            shape_of(0.0, tails=-1.0),
            sampled_of(0.0, k_hat=0.8),
            "about right",
            ("tails much heavier than normal", POOR),
        ),
        (shape_of(0.0, tails=-1.2), None, "does not fit", ("tails much heavier than normal",)),
        (shape_of(0.0, tails=2.0), sampled_of(0.0, k_hat=0.8), "about right", (POOR,)),
        (None, sampled_of(0.0), "fits", ()),
        (None, sampled_of(0.0, k_hat=0.8), "not examined", (POOR,)),
        (None, sampled_of(0.9, k_hat=0.8), "does not fit", (small("at least about 2.5"),)),
        (None, None, "not examined", ("no importance weights to tell more",)),
    ],
)
def test_the_rule(shape, sampled, word, reasons):
    assert judge(Q, shape, sampled, ()) == (word, reasons)


def test_the_rule_on_modes():
    far = OtherMode(torch.tensor([0.0, 8.0]), -1.0, 8.0, 0.5)
    word, reasons = judge(Q, None, sampled_of(0.0), [far])
    assert (word, reasons) == ("does not fit", ("1 other mode, at (0, 8), evidence +0.0",))
    several = [far._replace(share=0.1, mean=torch.arange(2.0) * k) for k in (8, -8)]
    assert judge(Q, None, None, several)[1] == ("2 other modes, at (0, 8)",)


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        (sampled_of(0.05), False),
        (sampled_of(0.27), True),  # 0.17 to 0.37
        (sampled_of(0.15, own=0.6), False),
        (sampled_of(0.15, own=0.8), True),
        (sampled_of(0.05, own=0.8), False),
        (sampled_of(0.5, own=0.8), False),
        (sampled_of(0.6, first=0.27), False),  # the second decides
        (sampled_of(0.6, first=0.27, effective=90.0), True),
    ],
)
def test_when_more_draws_are_asked_for(sampled, expected):
    assert undecided(Q, sampled) == expected


def test_what_to_do_next():
    far = OtherMode(torch.tensor([0.0, 8.0]), 1.0, 8.0, 0.5)
    effort = Effort(0, 0, 0, ())
    refine = "try torchngvi.refine(q, log_joint), or other coordinates of the parameters"
    words = {
        ("fits", ()): "",
        ("about right", ()): f"nothing found speaks against its means; where a standard deviation matters, {refine}",
        ("does not fit", ()): refine,
        ("does not fit", (far,)): 'try torchngvi.refine(q, log_joint, kind="mixture"), with a Gaussian at each mode',
        ("not examined", ()): "try torchngvi.examine(q, log_joint) with a larger max_gradients",
    }
    for (word, modes), then in words.items():
        verdict = Verdict(word, (), Q, None, None, modes, effort)
        assert verdict.next == then
        assert ("  next: " in str(verdict)) == bool(then)
    spoken = {
        "theta[0]: sd at least about 1.4 times too small": True,
        "theta[0]: sd about 1.2 times too small, by the third order alone": True,
        "theta[0]: mean off by about 0.25 sd": True,
        "theta[0]: sd about 1.3 times too large": False,
        POOR: False,
    }
    for reason, doubted in spoken.items():
        found = Verdict("about right", (POOR, reason), Q, None, None, (), effort).next
        assert (found == f"{refine}, before you rely on standard deviations or means") == doubted
        assert ("against its means" in found) == (not doubted)


def test_nearly_equal_weights_and_a_large_k_hat_are_explained():
    verdict = Verdict("about right", (), Q, None, sampled_of(0.0, k_hat=1.4, effective=4000.0), (), Effort(0, 0, 0, ()))
    few = "nearly all have the same weight, and the others, of k-hat 1.40, may hide a part of the posterior"
    assert f"worth 4000 of 4096 draws ({few})" in str(verdict)


def test_draws_without_a_density():
    sampled = sampled_of(0.0)
    sampled = sampled._replace(from_q=sampled.from_q._replace(nats=math.inf))
    text = str(Verdict("fits", (), Q, None, sampled, (), Effort(0, 0, 0, ())))
    assert "\n  some draws of q are where the log joint has no value; importance weights of q: worth" in text
    assert "inf nats" not in text
    then = Verdict("does not fit", (), Q, None, sampled, (), Effort(0, 0, 0, ())).next  # `refine` refuses such a q
    assert "the logarithm of a scale" in then
    assert "refine" not in then


def test_the_table():
    effort = Effort(1234, 4096, 6, ("tails (a budget of 7 gradients)",))
    verdict = Verdict(
        "does not fit",
        ("theta[1]: sd about 2.5 times too small",),
        Q._replace(names=()),
        shape_of(0.9),
        sampled_of(0.9),
        (),
        effort,
    )
    assert str(verdict) == (
        "the Gaussian family: DOES NOT FIT; theta[1]: sd about 2.5 times too small\n"
        "  about 0.1 nats from the posterior as far as draws of q can tell; importance weights of q: worth "
        "900 of 2048 draws, k-hat 0.20; of a wider proposal: worth 3000 of 4096 draws, k-hat 0.30; linear response: "
        "top eigenvalue 0.5; no other modes from 6 starts in U(-2, 2)\n"
        "  coordinate       mean         sd   response sd   sampled mean   sampled sd\n"
        "  theta[1]            0          1         ~2.46              0         2.46 ± 0.1\n"
        "  theta[0]            0          1            ~1              0            1 ± 0.05\n"
        "  response sd is an estimate: ~ to third order alone, which overshoots where it is large\n"
        "  next: try torchngvi.refine(q, log_joint), or other coordinates of the parameters\n"
        "  not examined: tails (a budget of 7 gradients)"
    )
    far = replace(verdict, shape=shape_of(9.0, confirmed=True, singular=True))
    assert "theta[1]            0          1          >= 3" in str(far)
    assert (
        "\n  response sd is an estimate: ~ to third order alone, which overshoots where it is large; >= three sds of q "
        "or more, too far for linear response to measure\n"
    ) in str(far)
    assert "an estimate" not in str(replace(verdict, shape=None))
    named = verdict.named(["mu", "log tau"])
    assert named.reasons == ("log tau: sd about 2.5 times too small",)
    assert "\n  log tau " in str(named)
    with pytest.raises(InputError, match="names must have one entry a coordinate, 2; got 1"):
        verdict.named(["mu"])
    bare = Verdict("not examined", (), Q, None, None, (), Effort(0, 0, 0, ()))
    assert str(bare) == (
        "the Gaussian family: not examined\n"
        "  no numbers\n"
        "  next: try torchngvi.examine(q, log_joint) with a larger max_gradients"
    )


@pytest.mark.parametrize("begun", [6.0, -6.0])
def test_a_mirrored_mode_is_found_from_a_start_near_one_of_the_two(begun):
    def mirrored(theta):
        return -8.0 * (theta.abs() - 5).square().sum(-1)

    q = CholeskyGaussian(1, dtype=torch.float64)
    q.initialize_(torch.full((1,), begun, dtype=torch.float64), torch.eye(1, dtype=torch.float64))
    fitted = fit(q, mirrored, progress=False)
    assert math.copysign(1.0, fitted.posterior.mean.item()) == math.copysign(1.0, begun)
    assert fitted.verdict.word == "does not fit"
    assert examine(q, mirrored, around=torch.full((1,), begun, dtype=torch.float64)).word == "does not fit"
