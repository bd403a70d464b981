"""Controls of the step: how far a step goes, what is kept, and that members decide alone."""

import copy
import math

import pytest
import reference
import torch
from helpers import (
    BASE,
    DIFFERENCE,
    DIM,
    DTYPE,
    EXACT,
    FAMILIES,
    IDENTITY,
    POSTERIORS,
    RULES,
    STEP_SIZES,
    batches,
    close,
    every,
    for_each,
    kept,
    randn,
    random_model,
    random_packet,
    random_posterior,
    random_root,
    step,
    vec,
)
from helpers import PAIRS as ALL_PAIRS

from torchngvi import VN, CholeskyGaussian
from torchngvi.errors import PairError
from torchngvi.expectations import Quadrature
from torchngvi.interfaces import Trial
from torchngvi.models import GeneralizedLinear
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors.flat import MeanFieldGaussian
from torchngvi.rules import BuresWasserstein, QuasiNewton, RootGradient
from torchngvi.stepsizes import KLRadius, SufficientDecrease

SCALES = [0.01, 100.0]
# one rule of each move (test_rules_curves.py has the others), and natural gradients with the memory of past steps
PAIRS = [pair for pair in ALL_PAIRS if pair[1] in ("newton", "natural_gradient", "bures_wasserstein")]
NATURAL = [pair for pair in PAIRS if RULES[pair[1]].natural]
# on hard starts without blocks: a step is judged by norms, which test_structures.py compares for every pattern
WITH_MEMORY = [(*pair, 0) for pair in PAIRS if pair[0] not in BASE]
WITH_MEMORY += [(*pair, 5) for pair in NATURAL if pair[0] not in BASE]


def logistic(rows=40):
    X = 2 * randn(rows, DIM, seed=1)
    noise = randn(rows, seed=2)
    y = FAMILIES["bernoulli_logit"].targets(X @ vec(1.0, -2.0, 0.5) + noise)
    return GeneralizedLinear(X, y, prior_precision=0.5)


def hard_starts(name, scale, members=6):
    """Members, six unless fewer are enough: means from N(0, 10 I), roots of that size."""
    mean, root = math.sqrt(10) * randn(6, DIM, seed=3), scale * kept(name, random_root((6,), 4))
    return POSTERIORS[name](DIM, (members,), mean=mean[:members], scale=root[:members])


def member(name, q, i):
    return POSTERIORS[name](DIM, mean=q.mean[i].clone(), scale=q.scale_tril[i].clone())


def in_the_cone(q):
    """Everything finite, and V positive definite by a check of its own."""
    finite = all(bool(torch.isfinite(x).all()) for x in q.coordinates)
    root = q.structure.to_dense(q.coordinates.matrix)
    if hasattr(q, "precision_mean"):
        return finite and bool((torch.linalg.eigvalsh(root) > 0).all())
    return finite and bool((root.diagonal(dim1=-2, dim2=-1) > 0).all())


def with_trials(q, rule, memory):
    acceleration = QuasiNewton(memory) if memory else None
    return NaturalGradientVI(q, RULES[rule](), step_size=SufficientDecrease(), metric=acceleration)


class TestKLRadius:
    @pytest.mark.parametrize(("name", "rule"), NATURAL)
    @batches
    def test_it_is_the_divergence_to_second_order(self, name, rule, batch):
        """KL(q'‖q) = radius (1 + O(√radius)) for every rule that follows the natural gradient."""
        q, e = random_posterior(name, batch, seed=1), random_packet(batch, 5)
        e = e._replace(derivative=e.derivative._replace(H=kept(name, e.derivative.H)))
        path, moments = RULES[rule]()(q, e), (q.mean, q.covariance)
        errors = []
        for radius in (1e-4, 1e-6, 1e-8):
            rho = KLRadius(radius).propose(path, 1.0, every(0.0, batch), {})
            close(0.5 * rho**2 * path.norm2(), every(radius, batch), EXACT)
            kl = for_each(reference.gaussian_kl, batch, *step(q, path.at(rho)), *moments)
            errors.append(float((kl / radius - 1).abs().max()))
        assert errors[0] < 0.05
        assert errors[1] < 0.15 * errors[0]
        assert errors[2] < 1e-3

    @pytest.mark.sparse(3)
    @pytest.mark.parametrize(("name", "rule"), NATURAL)
    @pytest.mark.parametrize("scale", SCALES)
    def test_hard_starts_stay_in_the_cone(self, name, rule, scale):
        """Each step within the radius by the optimizer's own report, the loss lower in the end."""
        q, target = hard_starts(name, scale), logistic()
        opt = NaturalGradientVI(q, RULES[rule](), step_size=KLRadius(0.2))
        first = opt.evaluate(target)
        for _ in range(40):
            norm2 = opt.evaluate(target).norm2
            opt.step(target)
            assert bool((0.5 * opt.last.rho**2 * norm2 <= 0.2 * (1 + EXACT)).all())
            assert in_the_cone(q)
        assert bool((opt.evaluate(target).loss < first.loss).all())


def test_kl_radius_measures_other_rules_too():
    """½ρ² of the Fisher length of the velocity, which is not the norm of the gradient that the rule follows."""
    target, q = logistic(), CholeskyGaussian(logistic().dim, dtype=DTYPE)
    before = copy.deepcopy(q)
    opt = NaturalGradientVI(q, BuresWasserstein(), 10.0, step_size=KLRadius(1e-6))
    opt.step(target)
    assert float(q.kl(before).detach()) == pytest.approx(1e-6, rel=1e-2)
    text = "KLRadius measures steps in the natural norm, which is not known of the curve of RootGradient for "
    with pytest.raises(PairError, match=text):
        NaturalGradientVI(MeanFieldGaussian(torch.zeros(2)), RootGradient(), step_size=KLRadius(0.1))


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_kl_radius_is_nearly_the_divergence(scale):
    """What the docstring promises of small radii: a third, for steps that widen and steps that narrow."""
    target = logistic()
    for radius in (0.02, 0.1):
        q = CholeskyGaussian(target.dim, scale=scale, dtype=DTYPE)
        before = copy.deepcopy(q)
        opt = VN(q, step_size=KLRadius(radius))
        opt.step(target)
        assert float(opt.last.rho) < 1, "the radius decides"
        with torch.no_grad():
            assert float(q.kl(before)) == pytest.approx(radius, rel=1 / 3)


class TestSufficientDecreaseAlone:
    """Propose and judge on numbers."""

    @staticmethod
    def judged(before, after, slope, rho, control=None, **state):
        control = control or SufficientDecrease()
        state = {**control.init(before), **state}
        return control.judge(Trial(before, after, slope, rho * slope.sqrt(), rho), state)

    def test_values_that_are_no_numbers(self):
        """NaN and +∞ are rejections that shorten the next step to a tenth; the state stays a number."""
        before, after = vec(1.0, 1.0), vec(math.nan, math.inf)
        accept, state = self.judged(before, after, vec(4.0, 4.0), vec(0.5, 0.5))
        assert accept.tolist() == [False, False]
        close(state["cap"], vec(0.05, 0.05), EXACT)
        close(state["reach"], vec(0.25, 0.25), EXACT)  # shrink 1/4 of ρ|∇L| = 1

    @pytest.mark.parametrize("ratio", [1.9, 3.0, 100.0])
    def test_the_cap_after_a_rejection_is_the_parabolas_minimum(self, ratio):
        """L - sρ + ½κρ² with ρ at ratio times its minimum s/κ; the factor is held within [0.1, 0.5]."""
        slope, kappa = 3.0, 2.0
        best = slope / kappa
        rho = ratio * best
        after = 5.0 - slope * rho + 0.5 * kappa * rho**2
        accept, state = self.judged(vec(5.0), vec(after), vec(slope), vec(rho))
        assert not bool(accept)
        close(state["cap"], vec(rho * min(max(1 / ratio, 0.1), 0.5)), EXACT)
        close(state["reach"], vec(0.25 * rho * math.sqrt(slope)), EXACT)

    @pytest.mark.parametrize(("ratio", "factor"), [(0.1, 2.0), (0.8, 1.25), (1.3, 1 / 1.3), (1.7, 0.7)])
    def test_the_cap_after_a_kept_step_follows_the_parabola(self, ratio, factor):
        slope, kappa = 3.0, 2.0
        rho = ratio * slope / kappa
        after = 5.0 - slope * rho + 0.5 * kappa * rho**2
        arguments = vec(5.0), vec(after), vec(slope), vec(rho)
        accept, state = self.judged(*arguments, cap=vec(rho))
        assert bool(accept)
        close(state["cap"], vec(rho * factor), EXACT)
        accept, state = self.judged(*arguments)  # no cap before the first rejection
        assert bool(accept & state["cap"].isinf())

    def test_rounding_is_forgiven(self):
        """Where the promise is below the loss's last digits, equal values are kept."""
        before = vec(1e6, 1e6)
        accept, _ = self.judged(before, before + vec(1e-10, 1e-4), vec(1e-14, 1e-14), vec(1.0, 1.0))
        assert accept.tolist() == [True, False]

    def test_rounding_is_no_reason_to_stay_short(self):
        """A promise below the last digits of the loss that is kept to those digits lets the reach grow."""
        accept, state = self.judged(vec(1e6), vec(1e6), vec(4e-14), vec(1.0), reach=vec(1e-9))
        assert bool(accept)
        close(state["reach"], vec(4 * 2e-7), EXACT)

    def test_noise_forgives_a_rise(self):
        """A step may lose the slack of a derivative that is one up to noise, and no more; it does not count as good."""
        rho, slope, slack = vec(1.0, 1.0), vec(0.04, 0.04), vec(0.1, 0.1)
        control = SufficientDecrease(decrease=0.25)
        state = control.init(rho) | {"reach": vec(0.3, 0.3)}
        trial = Trial(vec(1.0, 1.0), vec(1.089, 1.091), slope, rho * slope.sqrt(), rho, slack)
        accept, state = control.judge(trial, state)
        assert accept.tolist() == [True, False]  # a rise of slack - cρs = 0.09
        close(state["reach"], vec(0.3, 0.05), EXACT)


class TestSufficientDecreaseOnHardStarts:
    """Six members, means from N(0, 10 I), roots of 0.01 and 100 times unit size."""

    @pytest.mark.sparse(5)
    @pytest.mark.parametrize(("name", "rule", "memory"), WITH_MEMORY)
    @pytest.mark.parametrize("scale", SCALES)
    def test_no_member_ever_rises(self, name, rule, memory, scale):
        """Monotone to rounding for each member, in the cone, rejected members untouched bit by bit."""
        q, target = hard_starts(name, scale), logistic()
        opt = with_trials(q, rule, memory)
        losses = opt.evaluate(target).loss
        first = losses
        for _ in range(40):
            before = [x.clone() for x in q.coordinates]
            opt.step(target)
            now = opt.evaluate(target).loss
            assert bool((now <= losses + 1e-13 * losses.abs().clamp_min(1.0)).all())
            assert in_the_cone(q)
            assert bool((opt.last.rho > 0).all())
            for x, old in zip(q.coordinates, before, strict=True):
                assert torch.equal(x[~opt.last.accepted], old[~opt.last.accepted])
            losses = now
        assert bool((losses < first).all())

    @pytest.mark.sparse(3)
    @pytest.mark.parametrize(
        ("name", "rule", "memory"),
        [case for case in WITH_MEMORY if case[1] != "bures_wasserstein" and (case[0] != "diagonal" or case[2])],
    )
    @pytest.mark.parametrize("scale", SCALES)
    def test_members_converge(self, name, rule, memory, scale):
        """To the one optimum of a convex problem, from every start; a diagonal q with the memory."""
        q, target = hard_starts(name, scale), logistic()
        opt = with_trials(q, rule, memory)
        for _ in range(150):
            opt.step(target)
            status = opt.evaluate(target)
            if float(status.norm2.max()) < 1e-12:  # far below what is asked
                break
        assert float(status.norm2.max()) < 1e-9
        spread = status.loss.max() - status.loss.min()
        assert float(spread) < 1e-9

    @pytest.mark.sparse(3)
    @pytest.mark.parametrize(
        ("name", "rule", "memory", "control"),
        [
            (*case, control)
            for case in WITH_MEMORY
            for control in STEP_SIZES
            if not case[2] or STEP_SIZES[control].needs_trial
            if RULES[case[1]].natural or not STEP_SIZES[control].needs_natural  # refused, see test_kl_radius_is_natural
        ],
    )
    def test_a_batch_is_its_members(self, name, rule, memory, control):
        """Members decide independently: twelve steps of a batch equal the separate runs to rounding."""
        q, target = hard_starts(name, 3.0, members=3), logistic()
        lr = {"constant": 0.003, "kl_radius": 0.5, "sufficient_decrease": 1.0}[control]
        if rule == "bures_wasserstein":
            lr = min(lr, 0.01)
        alone = [member(name, q, i) for i in range(3)]
        acceleration = QuasiNewton(memory) if memory else None
        opt, *opts = (
            NaturalGradientVI(p, RULES[rule](), lr, step_size=STEP_SIZES[control](), metric=acceleration)
            for p in (q, *alone)
        )
        # trials and the memory divide by differences of losses and of gradients: near the optimum
        # these magnify the rounding in the next step size, not in q
        rho_tolerance = DIFFERENCE if STEP_SIZES[control].needs_trial else EXACT
        tolerance = IDENTITY if memory else EXACT
        mixed = 0
        for _ in range(12):
            opt.step(target)
            for other in opts:
                other.step(target)
            accepted = torch.stack([other.last.accepted for other in opts])
            assert torch.equal(opt.last.accepted, accepted)
            close(opt.last.rho, torch.stack([other.last.rho for other in opts]), rho_tolerance)
            mixed += int(accepted.any() and not accepted.all())
            close(q.mean, torch.stack([p.mean for p in alone]), tolerance)
            close(q.covariance, torch.stack([p.covariance for p in alone]), tolerance)
        if control == "sufficient_decrease" and rule == "natural_gradient" and name != "natural":
            assert mixed > 0, "no step was kept by one member and rejected by another"

    @batches
    def test_any_batch_shape(self, batch):
        """The masks have the posterior's batch shape, also (D,) and (2, D)."""
        q, target = random_posterior("cholesky", batch, seed=1), random_model("bernoulli_logit", batch, 3).target
        opt = NaturalGradientVI(q, RULES["natural_gradient"](), step_size=SufficientDecrease())
        for _ in range(60):
            opt.step(target)
            assert opt.last.rho.shape == opt.last.accepted.shape == torch.Size(batch)
        close(opt.evaluate(target).norm2, torch.zeros(batch, dtype=DTYPE), IDENTITY)


class TestOverflow:
    """A Poisson rate exp(e + v/2) that is infinite: nothing moves, nothing breaks."""

    @staticmethod
    def poisson():
        return random_model("poisson_log", (), 3).target

    @pytest.mark.parametrize("name", POSTERIORS)
    def test_q_stays_as_it_is(self, name):
        """Members that can be evaluated go on, the others keep their coordinates."""
        scale = vec(100.0, 0.5)[:, None].expand(2, DIM)
        q, target = POSTERIORS[name](DIM, (2,), scale=scale), self.poisson()
        opt = NaturalGradientVI(q, RULES["newton"](), step_size=SufficientDecrease())
        before = [x.clone() for x in q.coordinates]
        assert opt.evaluate(target).loss.isinf().tolist() == [True, False]
        for _ in range(5):
            opt.step(target)
            assert in_the_cone(q)
        for x, old in zip(q.coordinates, before, strict=True):
            assert torch.equal(x[0], old[0])
            assert not torch.equal(x[1], old[1])

    @pytest.mark.sparse(2)
    @pytest.mark.parametrize("name", POSTERIORS)
    @pytest.mark.parametrize("memory", [0, 5])
    def test_a_new_start_is_taken(self, name, memory):
        """After `initialize_` to a sane place the same optimizer goes on."""
        q, target = POSTERIORS[name](DIM, scale=100.0, dtype=DTYPE), self.poisson()
        opt = with_trials(q, "newton", memory)
        for _ in range(3):
            opt.step(target)
        q.initialize_(0.0, 0.5)
        for _ in range(60):
            opt.step(target)
        assert float(opt.evaluate(target).norm2) < 1e-6


def test_the_packet_at_the_start_of_a_trial_is_not_evaluated_twice():
    """One evaluation a step once the loop runs: the accepted packet serves the next step."""
    q, target = random_posterior("cholesky"), logistic()
    opt = NaturalGradientVI(q, RULES["newton"](), step_size=SufficientDecrease())
    for _ in range(10):
        opt.step(target)
    assert opt.evaluations == 11
    value = Quadrature()(q, target).value - q.entropy()
    close(opt.evaluate(target).loss, value, EXACT)
    assert opt.evaluations == 11
