"""Steps of a given rate: bounded by default, the printed update on request, and no run that diverges in silence."""

import copy
import math
import pickle
import warnings

import pytest
import torch

import torchngvi as ngvi
from torchngvi import (
    BBVI,
    BWGD,
    IBLR,
    NGVI,
    SRVN,
    VN,
    CholeskyGaussian,
    DiagonalGaussian,
    GeneralizedLinear,
    KLRadius,
    NaturalGaussian,
    NaturalGradientVI,
    PrecisionCholeskyGaussian,
    Snngm,
    Stein,
    rules,
)
from torchngvi.errors import DivergenceWarning, InputError, RejectedStepError, RejectedStepWarning
from torchngvi.expectations import Independent, PathDerivative
from torchngvi.ifvb import AIFVB, IFVB, MeanFieldGaussian
from torchngvi.methods import CovarianceGD, NewtonCG, ProximalBBVI, RootGD, SVGDDensity, SymmetricSRVN
from torchngvi.momentum import Adam
from torchngvi.optim import Watch, evaluating
from torchngvi.stepsizes import Constant, Shortest
from torchngvi.structures import arrow, block_diagonal

DTYPE = torch.float64


def logistic(n=200, p=3, scale=3.0, dtype=DTYPE, seed=0):
    """A regression whose curvature is large at N(0, I)."""
    g = torch.Generator().manual_seed(seed)
    X = scale * torch.randn(n, p, dtype=DTYPE, generator=g)
    y = (torch.rand(n, dtype=DTYPE, generator=g) < (X @ torch.linspace(-1, 1, p, dtype=DTYPE)).sigmoid()).to(dtype)
    return GeneralizedLinear(X.to(dtype), y, prior_precision=1.0)


def poisson(dtype):
    g = torch.Generator().manual_seed(1)
    X = torch.randn(60, 3, dtype=DTYPE, generator=g)
    y = torch.poisson((X @ torch.tensor([1.0, -0.5, 0.2], dtype=DTYPE)).exp(), generator=g)
    return GeneralizedLinear(X.to(dtype), y.to(dtype), "poisson", prior_precision=1.0)


def banana(theta):
    return -0.125 * theta[..., 0] ** 2 - 2 * (theta[..., 1] - theta[..., 0] ** 2) ** 2


def student(theta):
    y = torch.tensor([-0.4, 0.1, 0.3, 0.9, 8.0], dtype=theta.dtype)
    away = (y - theta[..., :1] - theta[..., 1:]) / 0.3
    return -2.5 * torch.log1p(away.square() / 4).sum(-1) - 0.5 * theta.square().sum(-1)


def taken(opt, target, count):
    for _ in range(count):
        opt.step(target)


def test_srvn_with_a_rate_ends_at_the_posterior():
    """Three coefficients, rates of 0.1 and 0.3: without the bound |mean| ends beyond 1e50."""
    model = logistic()
    best = ngvi.fit(CholeskyGaussian(3, dtype=DTYPE), model, progress=False).loss
    for lr in (0.1, 0.3):
        opt = SRVN(CholeskyGaussian(3, dtype=DTYPE), lr=lr)
        taken(opt, model, 80)
        assert opt.step(model) - best < 1e-3
        assert opt.rejections == 0
        opt = SRVN(CholeskyGaussian(3, scale=4.0, dtype=DTYPE), lr=lr, step_size=Constant())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(RejectedStepError):
                taken(opt, model, 80)


def test_repr_shows_the_bound():
    q = CholeskyGaussian(2)
    assert "parts: NaturalGradient, KLRadius(0.2)" in repr(SRVN(q, lr=0.1))
    assert "parts: NaturalGradient, Constant()" in repr(SRVN(q, lr=0.1, step_size=Constant()))
    assert "Constant(0.1)" in repr(SRVN(q, step_size=Constant(0.1)))
    assert "KLRadius(0.5)" in repr(SRVN(q, lr=0.1, step_size=KLRadius(0.5)))


def test_which_step_size_a_rate_has():
    """The bound wherever the length of a step has a measure in nats; a momentum's averages are of one length."""
    q, flat = CholeskyGaussian(2), MeanFieldGaussian(torch.ones(4))
    bounded = [
        *(method(q, lr=0.1) for method in (VN, SRVN, IBLR, BWGD, RootGD, CovarianceGD, SVGDDensity, SymmetricSRVN)),
        *(NewtonCG(q, lr=0.1), BBVI(q, 0.1, 1.0), ProximalBBVI(q, 0.1), VN(NaturalGaussian(2), lr=0.1)),
        *(IFVB(flat), AIFVB(flat)),
    ]
    assert all(isinstance(opt.step_size, KLRadius) for opt in bounded)
    constant = [Snngm(q), Snngm(q, lr=0.1), SRVN(q, lr=0.1, momentum=Adam())]
    assert all(isinstance(opt.step_size, Constant) for opt in constant)
    assert type(NGVI(q).step_size).__name__ == "Convex"
    assert VN(q).step_size.needs_trial


def test_the_printed_update():
    """`Constant(rate)` is `lr=rate, step_size=Constant()` to the bit; VN's whole step is exact on a conjugate model."""
    model, ends = logistic(scale=0.3), []
    for parts in ({"lr": 0.25, "step_size": Constant()}, {"step_size": Constant(0.25)}):
        q = CholeskyGaussian(3, dtype=DTYPE)
        opt = SRVN(q, **parts)
        for _ in range(5):
            opt.step(model)
        ends.append((q.mean, q.scale_tril, opt.param_groups[0]["lr"]))
    for one, other in zip(*ends, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    q, model = CholeskyGaussian(1, dtype=DTYPE), GeneralizedLinear(torch.ones(3, 1, dtype=DTYPE), [1, 2, 3], "gaussian")
    VN(q, step_size=Constant(1.0)).step(model)
    assert torch.allclose(q.mean, torch.tensor([1.5], dtype=DTYPE))
    with pytest.raises(InputError, match="given twice, lr=0.1 and step_size=Constant\\(0.2\\)"):
        VN(q, lr=0.1, step_size=Constant(0.2))
    for rate in (0.0, -1.0, math.inf, math.nan, "x"):
        with pytest.raises(InputError, match="rate is a learning rate"):
            Constant(rate)


FULL = [
    rules.VariationalNewton(), rules.NaturalGradient(), rules.Retraction(), rules.Geodesic(), rules.SymmetricRoot(),
    rules.LogNaturalGradient(), rules.LocalExponential(), rules.BuresWasserstein(), rules.CovarianceGradient(),
    rules.SVGD(), rules.CenteredSVGD(), rules.RootGradient(), rules.LogRootGradient(),
    rules.ProjectedRootGradient(1e-6), rules.ProjectedSquareRoot(1e-6), rules.ProximalRootGradient(),
    rules.RootNewton(),
]  # fmt: skip


def start(kind, structure=None, batch=()):
    """A correlated q away from the posterior, of three coordinates."""
    C = torch.tensor([[0.5, 0, 0], [0.2, 0.4, 0], [-0.1, 0.1, 0.6]], dtype=DTYPE)
    mean = torch.tensor([0.5, -0.2, 0.1], dtype=DTYPE).expand(*batch, 3)
    more = {} if kind is DiagonalGaussian else {"structure": structure}
    return kind(3, batch, mean=mean, scale=C.expand(*batch, 3, 3), dtype=DTYPE, **more)


PLACES = {
    "cholesky": (CholeskyGaussian, None),
    "blocks": (CholeskyGaussian, block_diagonal([1, 2])),
    "diagonal": (DiagonalGaussian, None),
    "precision": (PrecisionCholeskyGaussian, None),
    "arrow": (PrecisionCholeskyGaussian, arrow(groups=2, local=1, globals=1)),
    "natural": (NaturalGaussian, None),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_step_is_as_long_as_its_radius(place):
    """KL(q'‖q) is the radius, for every rule and posterior that go together, natural or not."""
    model, radius, seen = logistic(40, scale=1.0), 1e-7, 0
    for rule in FULL:
        q, before = start(*PLACES[place]), start(*PLACES[place])
        if rule.emits not in q.takes or (rule.full_algebra and not q.structure.closed):
            continue
        if isinstance(rule, rules.ProjectedSquareRoot) and place != "cholesky":
            continue
        NaturalGradientVI(q, rule, lr=1e3, step_size=KLRadius(radius)).step(model)
        kl = float(q.kl(before).detach())
        assert abs(kl / radius - 1) < 0.02, f"{type(rule).__name__}: {kl:.3g} nats"
        seen += 1
    assert seen >= 4


@pytest.mark.parametrize("place", PLACES)
def test_the_default_radius_keeps_vn_in_the_cone_and_the_signs_of_a_root(place):
    """I + ρP ≥ (1 - 2√r) I, and 1 - ½ρP_ii ≥ 1 - √r: whatever the gradient, and however long the rate."""
    torch.manual_seed(0)
    for rule in (rules.VariationalNewton(), rules.NaturalGradient()):
        q = start(*PLACES[place], batch=(50,))
        opt = NaturalGradientVI(q, rule, lr=1e6)
        loss = (q.rsample((1,)) * 100 * torch.randn(50, 3, dtype=DTYPE)).square().sum()  # of either sign, and large
        (loss * torch.randn((), dtype=DTYPE).sign()).backward()
        opt.step()
        assert opt.rejections == 0


METHODS = {
    "vn": lambda p, d, lr: VN(CholeskyGaussian(p, dtype=d), lr),
    "vn natural": lambda p, d, lr: VN(NaturalGaussian(p, dtype=d), lr),
    "srvn": lambda p, d, lr: SRVN(CholeskyGaussian(p, dtype=d), lr),
    "srvn precision": lambda p, d, lr: SRVN(PrecisionCholeskyGaussian(p, dtype=d), lr),
    "srvn diagonal": lambda p, d, lr: SRVN(DiagonalGaussian(p, dtype=d), lr),
    "symmetric": lambda p, d, lr: SymmetricSRVN(CholeskyGaussian(p, dtype=d), lr),
    "iblr": lambda p, d, lr: IBLR(CholeskyGaussian(p, dtype=d), lr),
    "bwgd": lambda p, d, lr: BWGD(CholeskyGaussian(p, dtype=d), lr),
    "svgd": lambda p, d, lr: SVGDDensity(CholeskyGaussian(p, dtype=d), lr),
    "covariance": lambda p, d, lr: CovarianceGD(CholeskyGaussian(p, dtype=d), lr),
    "root": lambda p, d, lr: RootGD(CholeskyGaussian(p, dtype=d), lr),
    "snngm": lambda p, d, lr: Snngm(CholeskyGaussian(p, dtype=d), lr),
    "bbvi": lambda p, d, lr: BBVI(CholeskyGaussian(p, dtype=d), lr, 50.0),
    "proximal": lambda p, d, lr: ProximalBBVI(CholeskyGaussian(p, dtype=d), lr),
    "ngvi": lambda p, d, lr: NGVI(CholeskyGaussian(p, dtype=d), lr),
}
TARGETS = {
    "logistic": lambda d: (logistic(dtype=d), 3),
    "poisson": lambda d: (poisson(d), 3),
    "banana": lambda d: (banana, 2),
    "student": lambda d: (student, 2),
}


@pytest.mark.sparse(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("method", METHODS)
def test_no_method_runs_away_in_silence(method, target):
    """A run ends where it began or lower, or has said that it does not: by a warning or an error."""
    for dtype, lr, draws in ((DTYPE, 0.1, False), (DTYPE, 3.0, True), (torch.float32, 1.0, True)):
        if method == "ngvi" and lr > 1:
            continue
        torch.manual_seed(0)
        model, p = TARGETS[target](dtype)
        opt, losses, said = METHODS[method](p, dtype, lr), [], False
        if draws and method not in ("bbvi", "proximal"):
            opt.resample(Stein(8))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                losses = [float(opt.step(model)) for _ in range(50)]
            except RejectedStepError:
                said = True
        said |= any(issubclass(w.category, DivergenceWarning) for w in seen)
        size = float(opt.posteriors[0].mean.abs().max())
        last = sorted(losses[-11:])[5] if losses else math.nan
        assert said or (size < 50 and last < losses[0] + 10 * (abs(losses[0]) + p)), (dtype, lr, losses[-3:], size)


@pytest.mark.parametrize("place", ["cholesky", "blocks", "diagonal", "precision", "arrow"])
@pytest.mark.parametrize("rule", [rules.NaturalGradient(), rules.RootGradient()])
def test_a_step_that_turns_a_diagonal_entry_is_not_taken(place, rule):
    """Of two members one is stepped too far: it stays where it was, entries and mean; the other is moved."""
    q = start(*PLACES[place], batch=(2,))
    before, sign = q.snapshot(), -1.0 if q.upper else 1.0
    q.root_probe.grad = (
        q.structure.eye(q.mean_probe)
        * sign
        * torch.tensor([1.0, 100.0], dtype=DTYPE).reshape(2, *[1] * len(q.structure.shape))
    )  # the diagonal falls
    q.mean_probe.grad = torch.ones(2, 3, dtype=DTYPE)
    opt = NaturalGradientVI(q, rule, lr=0.05, step_size=Constant())
    with pytest.warns(RejectedStepWarning, match="left the positive definite cone"):
        opt.step()
    assert opt.last.accepted.tolist() == [True, False]
    assert torch.equal(q.coordinates.matrix[1], before.matrix[1])
    assert torch.equal(q.mean[1], before.vector[1])
    assert not torch.equal(q.coordinates.matrix[0], before.matrix[0])


def test_a_step_that_reflects_is_not_taken():
    """I - ½ρP with an eigenvalue below 0 has passed a q without a variance."""
    for kind in (CholeskyGaussian, DiagonalGaussian):
        q = kind(2, dtype=DTYPE)
        opt = NaturalGradientVI(q, rules.SymmetricRoot(), lr=1.0, step_size=Constant())
        q.root_probe.grad, q.mean_probe.grad = 4 * q.structure.eye(q.mean_probe), torch.zeros(2, dtype=DTYPE)
        with pytest.warns(RejectedStepWarning):
            opt.step()
        assert opt.rejections == 1
        assert torch.equal(q.variance, torch.ones(2, dtype=DTYPE))


def test_the_printed_step_of_bures_and_wasserstein():
    """V' = MVM whatever the sign of M: the runs of Table 3 of Kumar et al. begin so, and fall."""
    model = logistic()
    q = CholeskyGaussian(3, dtype=DTYPE)
    opt = BWGD(q, lr=0.02, step_size=Constant())
    before = opt.evaluate(model).loss.item()
    H = opt.expectation.H
    M = torch.eye(3, dtype=DTYPE) - 0.02 * (H - torch.eye(3, dtype=DTYPE))
    assert torch.linalg.eigvalsh(M)[0] < -0.1
    opt.step(model)
    torch.testing.assert_close(q.covariance, M @ M)
    for _ in range(20):
        opt.step(model)
    assert opt.rejections == 0
    assert opt.evaluate(model).loss.item() < before


def steep(theta):
    """Of curvature 100: plain steps of 0.1 multiply the mean by -9."""
    return -50 * theta.square().sum(-1)


def by_model(q):
    opt = SVGDDensity(q, lr=0.1, step_size=Constant(), estimator=Stein(64))
    return lambda: opt.step(steep)


def by_closure(q):
    opt = SVGDDensity(q, lr=0.1, step_size=Constant())
    return lambda: opt.step(lambda: -steep(q.rsample((64,))).mean() - q.entropy())


def by_backward(q):
    opt = SVGDDensity(q, lr=0.1, step_size=Constant())

    def step():
        (-steep(q.rsample((64,))).mean() - q.entropy()).backward()
        opt.step()

    return step


def by_fit(q):
    opt = SVGDDensity(q, lr=0.1, step_size=Constant(), estimator=Stein(64))
    return lambda: ngvi.fit(q, steep, opt, progress=False, max_evaluations=20)


@pytest.mark.parametrize("door", [by_model, by_closure, by_backward, by_fit])
def test_a_run_that_climbs_says_so_at_the_step(door):
    """Within 12 steps, once, at the line of the user."""
    torch.manual_seed(0)
    step = door(CholeskyGaussian(1, mean=1.0, dtype=DTYPE))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(1 if door is by_fit else 12):
            step()
    said = [w for w in seen if issubclass(w.category, DivergenceWarning)]
    assert len(said) == 1
    assert said[0].filename == __file__
    assert "the run diverges, at steps of size 0.1" in str(said[0].message)


@pytest.mark.accuracy
def test_a_noisy_run_is_not_said_to_diverge():
    """Single draws of a loss with long tails, from a start that is nearly right."""
    torch.manual_seed(0)
    for target, p in ((student, 2), (banana, 2), (poisson(DTYPE), 3)):
        opt = VN(CholeskyGaussian(p, scale=0.3, dtype=DTYPE), lr=0.05, estimator=PathDerivative())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(150):
                opt.step(target)


def frozen(batch=()):
    """A q whose steps are all refused, since the loss is not finite."""
    q = CholeskyGaussian(2, batch, dtype=DTYPE)
    return q, VN(q, lr=0.1)


def refuse(q, opt, where=None, resting=None):
    q.mean_probe.grad = torch.full_like(q.mean_probe, torch.nan if where is None else 0.0)
    if where is not None:
        q.mean_probe.grad[where] = torch.nan
    q.root_probe.grad = torch.zeros_like(q.root_probe)
    opt.step(resting=resting)


class TestDrawsOutsideOfTheSupport:
    def log_joint(self, theta, wall):
        return torch.where(theta[..., 0] > wall, -torch.inf, -0.5 * theta.square().sum(-1))

    def test_one_of_many_is_no_divergence(self):
        q = CholeskyGaussian(2, dtype=DTYPE)
        opt = SRVN(q, lr=0.02, estimator=Stein(Independent(4, torch.Generator().manual_seed(0))))
        with warnings.catch_warnings():
            warnings.simplefilter("error", DivergenceWarning)
            losses = [float(opt.step(lambda theta: self.log_joint(theta, 2.8))) for _ in range(300)]
        assert 0 < sum(map(math.isinf, losses)) < 20

    def test_all_of_them_are(self):
        q = CholeskyGaussian(2, dtype=DTYPE)
        opt = SRVN(q, lr=0.02, estimator=Stein(Independent(64, torch.Generator().manual_seed(0))))
        opt.step(lambda theta: self.log_joint(theta, math.inf))
        for _ in range(4):
            opt.step(lambda theta: self.log_joint(theta, -3.0))
        with pytest.warns(DivergenceWarning, match="unless the loss itself has grown"):
            opt.step(lambda theta: self.log_joint(theta, -3.0))


@pytest.mark.filterwarnings("ignore::torchngvi.errors.RejectedStepWarning")
class TestRejectionsInARow:
    def test_they_end_in_an_error(self):
        """30 are allowed, which `Watch` says, and one that is taken begins the count again."""
        q, opt = frozen()
        assert Watch().rejections == opt.watch.rejections == 30
        for _ in range(29):
            refuse(q, opt)
        q.entropy().backward()
        opt.step()
        for _ in range(30):
            refuse(q, opt)
        with pytest.raises(RejectedStepError, match="31 steps in a row left the positive definite cone or were not"):
            refuse(q, opt)

    def test_under_an_outer_optimizer(self):
        """Adam moves a parameter of the loss on, while no step of q is taken: the loop ends at the fourth step."""
        q = CholeskyGaussian(2, dtype=DTYPE)
        opt = VN(q, lr=1.0, step_size=Constant())
        opt.watch = Watch(rejections=3)
        sigma = torch.nn.Parameter(torch.tensor(1.0, dtype=DTYPE))
        adam = torch.optim.Adam([sigma], lr=0.1)
        for step in range(60):
            (-100 * q.rsample((8,)).square().sum() * sigma).backward()  # not concave: VN leaves the cone
            adam.step()
            if step == 3:
                with pytest.raises(RejectedStepError, match="whatever else the loop trains has moved on"):
                    opt.step()
                break
            opt.step()

    def test_one_member_of_many_does_not_end_the_others(self):
        q, opt = frozen((3,))
        opt.watch = Watch(rejections=2)
        for _ in range(5):
            refuse(q, opt, where=1)
        refuse(q, opt)
        refuse(q, opt)
        with pytest.raises(RejectedStepError):
            refuse(q, opt)

    def test_members_that_rest_do_not_count(self):
        q, opt = frozen((2,))
        opt.watch = Watch(rejections=2)
        resting = torch.tensor([True, False])
        refuse(q, opt, resting=resting)
        refuse(q, opt, resting=resting)
        with pytest.raises(RejectedStepError):
            refuse(q, opt, resting=resting)

    def test_copies_and_states_go_on_counting(self):
        q, opt = frozen()
        opt.watch = Watch(rejections=2)
        for _ in range(2):
            refuse(q, opt)
        for other in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
            assert other.watch == Watch(rejections=2)
            with pytest.raises(RejectedStepError):
                refuse(other.posteriors[0], other)
        new, loaded = frozen()
        loaded.load_state_dict(opt.state_dict())
        loaded.watch = Watch(rejections=2)
        with pytest.raises(RejectedStepError):
            refuse(new, loaded)

    def test_fit_ends_with_its_reason(self):
        """`fit` ends after as many, and says so in its result; steps by trial raise nothing."""
        q = CholeskyGaussian(1, dtype=DTYPE)
        result = ngvi.fit(
            q, lambda t: t.square().sum(-1), VN(q, lr=0.9, step_size=Constant(), estimator=Stein(8)), progress=False
        )
        assert not result.converged
        assert "30 steps in a row were rejected" in result.reason


def test_several_limits_keep_the_bound():
    q = CholeskyGaussian(2)
    assert Shortest(KLRadius(), Constant()).needs_natural
    assert "KLRadius" not in repr(SRVN(q))


def test_an_accelerator_is_not_waited_for(monkeypatch):
    """Steps are sent together and counted later, once they have arrived; meanwhile no others are sent."""

    class Late:
        sizes = []

        def __init__(self, numbers):
            Late.sizes.append(len(numbers))
            self.numbers, self.asked = numbers.tolist(), 0

        def read(self):
            self.asked += 1
            return self.numbers if self.asked == 2 else None

    monkeypatch.setattr(evaluating, "Fetched", Late)
    behind, seen, state = evaluating.Behind(), [], {"far": torch.tensor(torch.nan), "counts": torch.zeros(2)}
    for step in range(10):
        last = evaluating.Seen(torch.tensor(1.0), torch.ones(()), torch.tensor(step != 3), None, True)
        seen.append([counts[0] for _, counts in behind.counted(evaluating.Watch(), CholeskyGaussian(2), last, state)])
    assert seen == [[], [], [], [], [1.0, 2.0, 3.0], [], [], [0.0, 1.0, 2.0], [], []]
    assert Late.sizes == [9, 9, 9]
    assert (state["far"].tolist(), state["counts"].tolist()) == (3e6, [2.0, 0.0])
