"""The regression over the draws of many Gaussians, and the loop of `fit` that draws from q and uses every gradient."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import DTYPE, eight_schools, randn

from torchngvi import CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, NaturalGaussian, fit
from torchngvi.derivatives import energy_and_gradient
from torchngvi.fitting.loop import Loop
from torchngvi.fitting.pool import (
    Lot,
    Normal,
    Pool,
    PoolLoop,
    View,
    antithetic,
    displaced,
    displacement,
    from_natural,
    lower_root,
    minimise,
    natural_step,
)
from torchngvi.fitting.sample_average import SampleAverages
from torchngvi.fitting.starts import EngineSettings, Starts
from torchngvi.fitting.stopping import NormBelow
from torchngvi.models import LogJoint
from torchngvi.posteriors import PrecisionCholeskyGaussian
from torchngvi.structures import block_diagonal

DIM = 6
A = (lambda root: root @ root.mT + torch.eye(DIM, dtype=DTYPE))(randn(DIM, DIM, seed=1))
MU = randn(DIM, seed=2)


def quadratic(theta):
    return -0.5 * ((theta - MU) @ A * (theta - MU)).sum(-1)


def quartic(theta):
    return -theta.exp().sum(-1) + 0.7 * theta.sum(-1) - 0.05 * theta.pow(4).sum(-1)


def normal(seed, scale=1.0, dim=DIM):
    root = 0.05 * randn(dim, dim, seed=seed) + scale * torch.eye(dim, dtype=DTYPE)
    return Normal(0.1 * randn(dim, seed=seed + 1), lower_root(root))


def paired(half):
    """Mirror images beside each other."""
    return torch.stack([half, -half], 1).flatten(0, 1)


def drawn(place, function, z, blocks=1):
    theta = place.push(z)
    return Lot(place, theta, *energy_and_gradient(LogJoint(function), theta), blocks)


def lot(place, function, pairs, seed):
    return drawn(place, function, paired(randn(pairs, len(place.mean), seed=seed)))


def pool_of(*lots):
    pool = Pool()
    for each in lots:
        pool.add(each)
    return pool


def exact(place, function, pairs=100_000, seed=9):
    """(a, P) at a Gaussian, by many draws."""
    z = paired(randn(pairs, len(place.mean), seed=seed))
    pulled = energy_and_gradient(LogJoint(function), place.push(z))[1] @ place.root
    W = pulled.mT @ z / len(z)
    return pulled.mean(0), 0.5 * (W + W.mT) - torch.eye(len(place.mean), dtype=DTYPE)


def square(a, P):
    return a.square().sum() + 0.5 * P.square().sum()


class TestRegression:
    def test_it_is_exact_for_a_quadratic(self):
        """D pairs, half of them of one Gaussian and half of another, seen from a third and evaluated at a fourth."""
        pool = pool_of(*(lot(normal(10 * k), quadratic, DIM // 2, k) for k in (1, 2)))
        base, at = normal(50, 0.9), normal(60, 0.8)
        found = View(pool, base).fit(base.seen(at))
        W = at.root.mT @ A @ at.root
        assert torch.allclose(found.natural[1], W - torch.eye(DIM, dtype=DTYPE), rtol=1e-11, atol=1e-11)
        assert torch.allclose(found.natural[0], at.root.mT @ A @ (at.mean - MU), rtol=1e-11, atol=1e-11)
        entropy = at.log_det + 0.5 * DIM * (1 + math.log(2 * math.pi))
        assert torch.allclose(found.loss, -quadratic(at.mean) + 0.5 * W.trace() - entropy, rtol=1e-12)
        assert float(found.noise2) < 1e-22

    def test_a_mean_field_sees_the_diagonal(self):
        """Of a sum over coordinates two draws and their images tell a and the diagonal of P."""
        scale = torch.arange(1, DIM + 1, dtype=DTYPE)

        def separate(theta):
            return -0.5 * (scale * (theta - MU).square()).sum(-1)

        at = Normal(torch.zeros(DIM, dtype=DTYPE), torch.eye(DIM, dtype=DTYPE))
        found = View(pool_of(lot(at, separate, 2, 1)), at, diagonal=True).fit(at)
        assert torch.allclose(found.natural[1], scale - 1, atol=1e-12)
        assert torch.allclose(found.natural[0], -scale * MU, atol=1e-12)

    def test_draws_of_other_gaussians_tell_the_gradient_and_its_error(self):
        """The mean square of the error is noise², without a bias that more draws would show."""
        at = normal(70, 0.7)
        a, P = exact(at, quartic)
        errors, noises = [], []
        for seed in range(40):
            places = [normal(70, scale) for scale in (0.65, 0.75, 0.8)]
            pool = pool_of(*(lot(place, quartic, 150, 100 * seed + k) for k, place in enumerate(places)))
            found = View(pool, at).fit(Normal.origin(at))
            errors.append(square(found.natural[0] - a, found.natural[1] - P))
            noises.append(found.noise2)
        assert 0.7 < float(torch.stack(errors).mean() / torch.stack(noises).mean()) < 1.5

    @pytest.mark.parametrize("dim", [20])
    def test_noise_of_orthogonal_blocks_is_their_own(self, dim):
        """Less than that of independent pairs, and known with blocks as the units."""
        at, rows = Normal(torch.zeros(dim, dtype=DTYPE), 0.3 * torch.eye(dim, dtype=DTYPE)), randn(60, dim, seed=3)

        def poisson(theta):
            eta = theta @ rows.mT
            return (eta - eta.exp()).sum(-1) - 0.5 * theta.square().sum(-1)

        a, P = exact(at, poisson, 40_000)
        errors, noises, independent = [], [], []
        for seed in range(40):
            z, blocks = antithetic(at, 12 * dim, seed, near=True)
            assert blocks == 6
            found = View(pool_of(drawn(at, poisson, z, blocks)), at).fit(Normal.origin(at))
            errors.append(square(found.natural[0] - a, found.natural[1] - P))
            noises.append(found.noise2)
            found = View(pool_of(lot(at, poisson, 6 * dim, seed)), at).fit(Normal.origin(at))
            independent.append(square(found.natural[0] - a, found.natural[1] - P))
        error, noise = float(torch.stack(errors).mean()), float(torch.stack(noises).mean())
        assert 0.75 < error / noise < 1.35
        assert error < 0.7 * float(torch.stack(independent).mean())

    def test_the_directions_of_a_block_are_orthogonal_and_their_lengths_are_not_alike(self):
        at = normal(1, dim=4)
        z, blocks = antithetic(at, 16, 5, near=True)
        assert blocks == 2
        half = z[::2].unflatten(0, (blocks, 4))
        assert torch.equal(z[1::2], -z[::2])
        products = half @ half.mT
        assert torch.allclose(products, torch.diag_embed(products.diagonal(dim1=1, dim2=2)), atol=1e-12)
        assert float(half.norm(dim=-1).std()) > 0.1
        for number, near in ((10, True), (8, True), (16, False)):  # no whole block, no two of them, far
            z, blocks = antithetic(at, number, 5, near)
            assert blocks == 1
            products = z[::2] @ z[::2].mT
            assert float((products - torch.diag(products.diagonal())).abs().max()) > 1e-3

    def test_a_lot_that_comes_and_goes_leaves_the_same_bits(self):
        pool = pool_of(*(lot(normal(k), quartic, 10, k) for k in (1, 2, 3)))
        before = pool.terms.clone()
        pool.add(lot(normal(9), quartic, 10, 4))
        assert pool.terms.shape == (4, 80)
        pool.keep([True, True, True, False])
        assert torch.equal(pool.terms, before)
        assert pool.number.tolist() == [k for k in range(3) for _ in range(20)]

    def test_lots_without_weight_are_forgotten(self):
        """Draws far from q count for nothing; the lot that q has just drawn stays, and no more than so many do."""
        far = Normal(torch.full((DIM,), 30.0, dtype=DTYPE), torch.eye(DIM, dtype=DTYPE))
        pool = pool_of(lot(far, quadratic, 8, 1), *(lot(normal(k), quadratic, 8, k) for k in (2, 3, 4)))
        found = View(pool, normal(4)).fit(Normal.origin(far))
        pool.drop(found, 0.1, 40)
        assert len(pool.lots) == 3
        last = pool.lots[-1]
        pool.drop(View(pool, normal(4)).fit(Normal.origin(far)), 0.0, 2)
        assert len(pool.lots) == 2
        assert pool.lots[-1] is last


class TestMoves:
    def test_natural_coordinates_and_back(self):
        at, base = normal(3, 0.8), normal(1)
        again = from_natural(natural_step(View(pool_of(lot(base, quadratic, DIM, 1)), base).fit(at))[0], DIM, False)
        assert torch.allclose(again.mean, at.mean, atol=1e-12)
        assert torch.allclose(again.root, at.root, atol=1e-12)
        assert from_natural(torch.tensor([-1.0, 0.0, 0.0, -1.0, 0.0, 0.0], dtype=DTYPE), 2, diagonal=False) is None

    def test_a_displacement_and_back(self):
        """Half of the square of its length is KL to second order."""
        base, place = normal(1), normal(2)
        way = displacement(base, place)
        there = displaced(base, way)
        assert torch.allclose(there.mean, place.mean, atol=1e-12)
        assert torch.allclose(there.root @ there.root.mT, place.root @ place.root.mT, atol=1e-12)
        near = displaced(base, 1e-3 * way)
        kl = float(base.seen(near).kl_from_standard())
        assert kl == pytest.approx(0.5e-6 * float(way.square().sum()), rel=1e-2)

    def test_a_collapsed_root_is_not_squared(self):
        """Scales of 1 and 10⁻¹², whose product with itself would be singular: det C is that of R to many digits."""
        turn = torch.linalg.qr(randn(2, 2, seed=1))[0]
        root = normal(1, dim=2).root * torch.tensor([[1.0], [1e-12]], dtype=DTYPE)
        lower = lower_root(root @ turn)
        assert torch.equal(lower.triu(1), torch.zeros_like(lower))
        assert torch.allclose(lower, root, rtol=1e-3, atol=0)

    def test_a_quadratic_is_minimised_at_once(self):
        base = Normal(torch.zeros(DIM, dtype=DTYPE), torch.eye(DIM, dtype=DTYPE))
        view = View(pool_of(lot(base, quadratic, 10 * DIM, 1)), base)
        found = minimise(view, view.fit(base), 1e6, EngineSettings())
        assert float(found.norm2) < 1e-20
        assert torch.allclose(found.at.mean, MU, atol=1e-9)

    def test_no_step_leaves_the_trust_region(self):
        base = Normal(torch.zeros(DIM, dtype=DTYPE), torch.eye(DIM, dtype=DTYPE))
        view = View(pool_of(lot(base, lambda theta: 100 * quadratic(theta), 10 * DIM, 1)), base)
        found = minimise(view, view.fit(base), 0.5, EngineSettings())
        assert 0.1 < float(found.at.kl_from_standard()) <= 0.5
        assert float(found.loss) < float(view.fit(base).loss)


def logistic(dim, rows, seed):
    """A logistic regression, whose negative ELBO is known by quadrature; as a black box its `log_joint`."""
    X = randn(rows, dim, seed=seed)
    uniform = torch.rand(rows, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)
    y = (uniform < torch.sigmoid(X @ randn(dim, seed=seed + 1))).to(DTYPE)
    return GeneralizedLinear(X, y, prior_precision=0.25)


def run(log_joint, dim, seed=0, kind=CholeskyGaussian, dtype=DTYPE, **options):
    torch.manual_seed(seed)
    q = kind(dim, dtype=dtype)
    return q, fit(q, log_joint, progress=False, examine=False, **options)


def elbo(q, log_joint):
    z = paired(randn(16_384, q.dim, seed=99)).to(q.dtype)
    with torch.no_grad():
        return float(log_joint(q.push_noise(z)).mean() + q.entropy())


def gap(model, q):
    """Nats above the least negative ELBO."""
    best = CholeskyGaussian(model.dim, dtype=DTYPE)
    lowest = fit(best, model, progress=False).loss
    with torch.no_grad():
        return float(model.negative_elbo(q)) - lowest


KINDS = [CholeskyGaussian, NaturalGaussian, PrecisionCholeskyGaussian]


@pytest.mark.parametrize("kind", KINDS)
def test_a_quadratic_takes_one_lot(kind):
    q, result = run(quadratic, DIM, kind=kind)
    assert result.converged
    assert result.evaluations == 1
    assert result.trace[-1].gradients < 60
    assert torch.allclose(q.covariance, torch.linalg.inv(A), rtol=1e-8, atol=1e-10)
    assert torch.allclose(q.mean, MU, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_regression_takes_few_gradients(kind):
    """Within 0.01 nats of the exact optimum, of a log joint that is handed over as a function."""
    model = logistic(12, 100, 3)
    q, result = run(model.log_joint, 12, kind=kind)
    assert result.converged
    assert result.trace[-1].gradients < 700
    assert gap(model, q) < 0.01


@pytest.mark.accuracy
@pytest.mark.parametrize("centred", [False, True])
def test_eight_schools(centred):
    """Best ELBO 7.723 and 6.667, by fits that took 24,403 and 41,265 gradients; with another start each, in vain."""
    q, result = run(eight_schools(centred), 10)
    assert result.converged
    assert result.gradients + 0.4 * result.values < 9_000
    assert elbo(q, eight_schools(centred)) > (6.667 if centred else 7.723) - 0.03


def test_single_precision():
    q, result = run(lambda theta: quartic(theta.double()).to(theta.dtype), DIM, dtype=torch.float32)
    best, _ = run(quartic, DIM)
    assert result.converged
    assert elbo(q, quartic) == pytest.approx(elbo(best, quartic), abs=0.02)


def test_the_same_seed_has_the_same_bits():
    first, second = (run(eight_schools(False), 10, 3) for _ in range(2))
    assert torch.equal(first[0].scale_tril, second[0].scale_tril)
    assert first[1].trace[-1][:-1] == second[1].trace[-1][:-1]


def blocks(*sizes):
    return CholeskyGaussian(sum(sizes), structure=block_diagonal(list(sizes)), dtype=DTYPE)


def begun(q, rough, **options):
    """Whether a pool runs, whether it is to fit all of q, and whether with a mean field first."""
    pooled = SampleAverages(q, LogJoint(lambda theta: -theta.square().sum(-1), **options), 0.1).pooled
    pooled.begin(rough=rough)
    return pooled.runs, pooled._whole, pooled.diagonal


def test_who_is_served():
    trusted, refused = EngineSettings().widest
    roughest = EngineSettings().widest[0]
    assert begun(CholeskyGaussian(trusted), False) == (True, True, False)
    assert begun(CholeskyGaussian(refused), True) == (True, True, True)
    assert not begun(CholeskyGaussian(trusted + 1), False)[0]
    for q in (DiagonalGaussian(roughest), blocks(1, 3)):  # the rest is left to averages
        assert begun(q, True) == (True, False, True)
        assert not begun(q, False)[0]
    assert not any(begun(q, True)[0] for q in (DiagonalGaussian(roughest + 1), CholeskyGaussian(refused + 1)))
    assert not begun(CholeskyGaussian(3, batch_shape=(2,)), True)[0]
    assert not begun(CholeskyGaussian(3), True, temperature=0.0)[0]


@pytest.mark.usefixtures("no_mode")
def test_a_mean_field_of_independent_coordinates_is_exact():
    """Of a quadratic without correlations: the pairs of a lot tell all, and averages have nothing to add."""
    scale = torch.arange(1, DIM + 1, dtype=DTYPE)
    q, result = run(lambda theta: -0.5 * (scale * (theta - MU).square()).sum(-1), DIM, kind=DiagonalGaussian)
    assert result.converged
    torch.testing.assert_close(q.mean, MU, rtol=0, atol=1e-8)
    torch.testing.assert_close(q.variance.reciprocal(), scale, rtol=1e-8, atol=0)


@pytest.mark.accuracy
@pytest.mark.parametrize("make", [lambda: DiagonalGaussian(10, dtype=DTYPE), lambda: blocks(2, 8)])
def test_a_mean_field_hands_over_to_averages(make, monkeypatch):
    """They begin where it has ended, mostly within half a nat, and end where averages alone end."""
    left, widen = [], PoolLoop._widen

    def watched(loop):
        widen(loop)
        left.append((loop.runs, loop.done, loop.place.root.dim()))

    def fitted(seed):
        torch.manual_seed(seed)
        engine = SampleAverages(make(), LogJoint(eight_schools(True)), 0.1, False)
        result = Loop(engine, NormBelow(0.1), progress=False).run()
        assert result.converged, result.reason
        assert not engine.pooled.runs
        end = elbo(engine.q, eight_schools(True))
        return end, end + engine.starts.reached

    monkeypatch.setattr(PoolLoop, "_widen", watched)
    ends, gaps = zip(*(fitted(seed) for seed in range(3)), strict=True)
    assert left == [(False, True, 1)] * 3
    assert sorted(gaps)[1] < 0.5
    monkeypatch.setattr(PoolLoop, "begin", lambda loop, *, rough: None)
    assert ends == pytest.approx([fitted(0)[0]] * 3, abs=0.03)


@pytest.mark.parametrize(("settings", "most"), [({}, 65_536), ({"numbers": 4200}, 700), ({"most": 600}, 600)])
def test_draws_are_capped_by_their_number_and_by_memory(settings, most, monkeypatch):
    """D numbers a draw; the last lot may be one of the smallest beyond."""
    assert loop_of(quadratic, DIM, **settings)[1]._most == most
    if not settings:
        return
    monkeypatch.setattr("torchngvi.fitting.sample_average.EngineSettings", lambda: EngineSettings(**settings))
    engine = SampleAverages(CholeskyGaussian(DIM, dtype=DTYPE), LogJoint(quartic), 1e-3, False)
    result = Loop(engine, NormBelow(1e-3), progress=False).run()
    assert result.reason.startswith(f"because {engine.pooled.evaluated} draws leave a natural-gradient norm of ")
    assert most <= engine.pooled.evaluated <= most + engine.pooled.fewest


@pytest.mark.parametrize("seed", range(12))
def test_a_budget_of_evaluations_is_kept(seed):
    """Also where the norm is within the tolerance, and more lots would have to confirm it."""
    _, result = run(logistic(3, 40, 3).log_joint, 3, seed, max_evaluations=2)
    assert result.evaluations == 2


def test_a_wall_that_no_draw_has_met_is_not_passed_over():
    """A quadratic with a wall that the first 32 draws of this seed miss: fresh ones see it, and more are drawn."""

    def walled(theta):
        return -0.5 * theta.square().sum(-1) - 100 * (theta.norm(dim=-1) - 2.5).clamp_min(0).square()

    first, _ = run(lambda theta: -0.5 * theta.square().sum(-1), 3, 1)
    q, result = run(walled, 3, 1)
    assert result.converged
    assert result.evaluations > 1
    assert elbo(q, walled) > elbo(first, walled) + 0.3


def test_a_stiff_wall_is_no_want_of_a_prior():
    """A loss by few draws that is far below any number, and no surer than that, does not say that q is unconfined."""

    def stiff(theta):
        return -0.5 * theta.square().sum(-1) - 1e15 * (theta.norm(dim=-1) - 2.3).clamp_min(0).square()

    _, result = run(stiff, 3, dtype=torch.float32)
    assert "does not confine q" not in result.reason


@pytest.fixture
def no_mode(monkeypatch):
    """No mode is found: q begins where it is, with a mean field."""
    monkeypatch.setattr(Starts, "_searched", lambda self, budget=0: None)


@pytest.fixture
def astray(monkeypatch):
    """The radii of the first step from far away, which ends where the loss is higher, and of those after it."""
    radii = []

    def wrong(view, here, radius, settings):
        new, first = minimise(view, here, radius, settings), not radii
        if not first or float(here.norm2) > 100:
            radii.append(radius)
        return view.fit(Normal(new.at.mean + 1e3, new.at.root)) if first and radii else new

    monkeypatch.setattr("torchngvi.fitting.pool.minimise", wrong)
    return radii


@pytest.mark.usefixtures("no_mode")
def test_a_step_that_leads_up_is_taken_back(astray):
    """q goes back, nearer, and comes to the end."""
    q, result = run(lambda theta: quadratic(theta - 50), DIM)
    assert astray[1] < astray[0]
    assert result.converged
    assert torch.allclose(q.mean, MU + 50, atol=0.1)


@pytest.mark.parametrize(("hoped", "radius"), [(-3.0, 0.5), (0.0, 0.5), (3.0, 1.0)])
def test_a_step_that_promises_no_gain_shortens_the_next(hoped, radius):
    """Few draws say little of many coordinates: where they promise nothing, a small gain is luck."""
    loop, known = object.__new__(PoolLoop), dict.fromkeys(("norm2", "noise2", "error"), torch.ones(()))
    loop.descent, loop.q = SimpleNamespace(settings=EngineSettings()), SimpleNamespace(dim=10)
    loop.leaping, loop.hoped, loop.radius = False, hoped, 1.0
    here, was = (SimpleNamespace(loss=torch.tensor(loss), **known) for loss in (4.0, 5.0))
    assert not loop._rose(here, was)
    assert loop.radius == radius


@pytest.mark.usefixtures("no_mode", "astray")
def test_an_interrupt_after_a_step_back_leaves_q_where_the_record_is(monkeypatch):
    judge, kept = PoolLoop._judge, []

    def judged(loop):
        before = loop.place
        judge(loop)
        if loop.place is not before and not kept:
            kept.append(loop.place)

    def far(theta):
        if kept and theta.requires_grad:
            raise KeyboardInterrupt
        return quadratic(theta - 50)

    monkeypatch.setattr(PoolLoop, "_judge", judged)
    q, result = run(far, DIM)
    assert kept, "no step was taken back"
    assert not result.converged
    assert torch.allclose(q.mean, kept[0].mean, atol=1e-12)
    assert torch.allclose(q.scale_tril, kept[0].root, atol=1e-12)


def test_a_temperature_widens_q():
    """γ times the entropy: the covariance of a quadratic is γ times as large."""
    q = CholeskyGaussian(DIM, dtype=DTYPE)
    fit(q, LogJoint(quadratic, temperature=3.0), progress=False, examine=False)
    assert torch.allclose(q.covariance, 3 * torch.linalg.inv(A), rtol=1e-6)


@pytest.mark.accuracy
@pytest.mark.parametrize("number", [1, 4, 9])
def test_a_run_goes_on_to_the_last_bit(number, tmp_path):
    whole, result = run(eight_schools(False), 10)
    assert result.evaluations > 9
    file = tmp_path / "run.pt"
    options = {"checkpoint": file, "checkpoint_every": 1}
    _, cut = run(eight_schools(False), 10, max_evaluations=number, **options)
    assert not cut.converged
    q, again = run(eight_schools(False), 10, **options)
    assert torch.equal(q.scale_tril, whole.scale_tril)
    assert (again.reason, again.gradients, again.values) == (result.reason, result.gradients, result.values)


def loop_of(function, dim, **settings):
    """The loop of an engine that has put q at its start."""
    engine = SampleAverages(
        CholeskyGaussian(dim, dtype=DTYPE), LogJoint(function), 0.1, settings=EngineSettings(**settings)
    )
    return engine, engine.pooled


def test_where_there_are_no_numbers_q_goes_back():
    """Beyond a wall: the first lot is halved until it is inside, a later one goes back to where its step began."""

    def walled(theta):
        return torch.where((theta > -2).all(-1), -theta.exp().sum(-1) + 30 * theta.sum(-1), -math.inf)

    q, result = run(walled, 3)
    assert result.converged
    assert torch.allclose(q.mean, torch.full_like(q.mean, math.log(30)), atol=0.05)


def test_draws_that_fail_are_left_out_and_counted():
    def fails(theta):
        if bool((theta > 3.2).any()):
            raise ValueError("beyond")
        return -0.5 * theta.square().sum(-1) - 0.02 * theta.pow(4).sum(-1)

    _, result = run(fails, 40, tolerance=0.05)
    assert result.converged, result.reason
    assert "draws of the fit and" in result.reason
    assert "ValueError: beyond" in result.reason


@pytest.mark.accuracy
def test_a_pool_that_is_given_up_early_goes_on_until_its_draws_are_used_up(monkeypatch):
    """Another start is tried before that, once: it comes back."""
    tried, better = [], SampleAverages._better_start

    def watched(engine):
        tried.append((engine.pooled.failed, engine.looked, engine.pooled.evaluated))
        return better(engine)

    monkeypatch.setattr(SampleAverages, "_better_start", watched)
    monkeypatch.setattr("torchngvi.fitting.sample_average.EngineSettings", lambda: EngineSettings(early=50, most=2000))
    _, result = run(eight_schools(True), 10)
    assert [(failed, looked) for failed, looked, _ in tried] == [(True, False), (True, True)]
    assert tried[0][2] < 2000 <= tried[1][2]
    assert result.reason.startswith(f"because {tried[1][2]} draws leave a natural-gradient norm of ")


def measured(theta):
    """Measurements in groups about 300, in units of their own: the mean, log scales of groups and noise, the groups."""
    mu, log_s, log_e, local = theta[..., :1], theta[..., 1:2], theta[..., 2:3], theta[..., 3:]
    y = 300 + 30 * randn(9, 1, seed=1) + 10 * randn(9, 5, seed=2)
    top = -0.5 * ((mu / 1000).square() + ((log_s - 3) / 2).square() + ((log_e - 3) / 2).square())[..., 0]
    prior = (-0.5 * ((local - mu) * (-log_s).exp()).square() - log_s).sum(-1)
    z = (y - local[..., None]) * (-log_e).exp()[..., None]
    return top + prior + (-0.5 * z.square() - log_e[..., None]).sum((-2, -1))


@pytest.mark.accuracy
@pytest.mark.usefixtures("no_mode")
def test_leaps_lead_to_data_in_units_of_their_own(monkeypatch):
    """From N(0, I), where the log joint is lower by a million nats; of steps alone as many are too few."""
    q, result = run(measured, 12)
    assert result.converged, result.reason
    assert result.gradients < 10_000
    assert float(q.mean[0]) == pytest.approx(300, abs=30)
    assert float(q.mean[2]) == pytest.approx(math.log(10), abs=0.3)
    monkeypatch.setattr(PoolLoop, "_onward", lambda loop, there: None)
    assert not run(measured, 12, max_gradients=result.gradients)[1].converged


def test_a_collapsed_mode_is_no_start():
    """The mode of the centred schools is where the scale vanishes: q keeps its mean, and begins with a mean field."""
    engine = SampleAverages(CholeskyGaussian(10, dtype=DTYPE), LogJoint(eight_schools(True)), 0.1)
    engine.begin()
    assert engine.starts.refused is not None
    assert engine.pooled.runs
    assert engine.pooled.diagonal
    assert float(engine.q.mean.abs().max()) == 0.0


def test_values_say_how_far_to_go_on_along_a_valley():
    """A ridge that rises slowly for hundreds of standard deviations: one look along the last move ends near its top."""

    def ridge(theta):
        return -0.5 * ((theta[..., 0] - 400) / 100).square() - 0.5 * theta[..., 1].square()

    engine, loop = loop_of(ridge, 2)
    eye = torch.eye(2, dtype=DTYPE)
    loop.place = Normal(torch.tensor([2.0, 0.0], dtype=DTYPE), eye)
    loop.trail = [Normal(torch.tensor([x, 0.0], dtype=DTYPE), eye) for x in (0.0, 1.0)]
    before = engine.target.gradients
    with torch.no_grad():
        there = loop._onward(loop.place)
    assert float(there.mean[0]) == pytest.approx(2 + 3**5, rel=1e-9)
    assert engine.target.gradients == before
    loop.trail = [Normal(torch.tensor(x, dtype=DTYPE), eye) for x in ([2.0, 1.0], [1.0, 0.0])]  # at a right angle
    with torch.no_grad():
        assert loop._onward(loop.place) is None
