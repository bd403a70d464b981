"""The regression over the draws of many Gaussians, and the sweeps of `fit` that use it."""

import math
import warnings

import pytest
import torch
from helpers import DTYPE, randn

from torchngvi import VN, CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, NaturalGaussian, fit
from torchngvi.derivatives import energy_and_gradient
from torchngvi.errors import RejectedStepWarning
from torchngvi.fitting.sweeps import Lot, Pool, PooledAverage, Sweeps
from torchngvi.models import LogJoint

DIM = 6
A = (lambda root: root @ root.mT + torch.eye(DIM, dtype=DTYPE))(randn(DIM, DIM, seed=1))
MU = randn(DIM, seed=2)


def quadratic(theta):
    return -0.5 * ((theta - MU) @ A * (theta - MU)).sum(-1)


def gaussian(kind, seed, scale=1.0):
    root = 0.05 * randn(DIM, DIM, seed=seed) + scale * torch.eye(DIM, dtype=DTYPE)
    return kind.from_moments(0.1 * randn(DIM, seed=seed + 1), root @ root.mT)


def lot(q, target, pairs, seed):
    half = randn(pairs, q.dim, seed=seed)
    theta = q.frame().mean + q.frame().push(torch.cat([half, -half]))
    return Lot.of(q, theta, *energy_and_gradient(target, theta))


@pytest.mark.parametrize("kind", [CholeskyGaussian, NaturalGaussian])
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_the_regression_is_exact_for_a_quadratic(kind, gamma):
    """D antithetic pairs, half of them of one Gaussian and half of another, evaluated in the frame of a third."""
    target = LogJoint(quadratic, gamma)
    lots = [lot(gaussian(kind, 10 * k), target, DIM // 2, k) for k in (1, 2)]
    q = gaussian(kind, 50, 0.9)
    e = PooledAverage(Pool(lots))(q, target)
    frame = q.frame()
    root = frame.push(torch.eye(DIM, dtype=DTYPE)).mT
    W = root.mT @ A @ root
    value = -quadratic(q.mean) + 0.5 * W.trace()
    assert torch.allclose(e.derivative.W, W, rtol=1e-12, atol=1e-12)
    assert torch.allclose(e.derivative.a, root.mT @ A @ (q.mean - MU), rtol=1e-12, atol=1e-12)
    assert torch.allclose(e.value, value, rtol=1e-12)
    assert float(e.noise2) < 1e-24
    assert e.cost.gradients == 0


def quartic(theta):
    return -theta.exp().sum(-1) + 0.7 * theta.sum(-1) - 0.05 * theta.pow(4).sum(-1)


def test_draws_of_other_gaussians_give_the_derivative_at_this_one_and_its_error():
    """Against 200,000 draws of q: the mean square of the error is noise², without a bias that more draws would show."""
    target, q = LogJoint(quartic), gaussian(CholeskyGaussian, 70, 0.7)
    frame = q.frame()
    z = randn(100_000, DIM, seed=9)
    z = torch.cat([z, -z])
    pulled = frame.pull(energy_and_gradient(target, frame.mean + frame.push(z))[1])
    a, W = pulled.mean(0), pulled.mT @ z / len(z)
    W = 0.5 * (W + W.mT)
    errors, noises = [], []
    for seed in range(40):
        others = [gaussian(CholeskyGaussian, 70, scale) for scale in (0.65, 0.75, 0.8)]
        lots = [lot(other, target, 150, 100 * seed + k) for k, other in enumerate(others)]
        e = PooledAverage(Pool(lots))(q, target)
        errors.append((e.derivative.a - a).square().sum() + 0.5 * (e.derivative.W - W).square().sum())
        noises.append(e.noise2)
    ratio = float(torch.stack(errors).mean() / torch.stack(noises).mean())
    assert 0.7 < ratio < 1.5


@pytest.mark.parametrize("kind", [CholeskyGaussian, NaturalGaussian])
def test_the_last_two_places_are_not_computed_again(kind):
    """Where a step leads and where it had begun: the very same packets; elsewhere what a new average gives."""
    target, q = LogJoint(quartic), gaussian(kind, 70, 0.7)
    pool = Pool([lot(q, target, 50, 1)])
    average, here = PooledAverage(pool), q.snapshot()
    first = average(q, target)
    q.initialize_(q.mean + 0.1, 0.7 * torch.eye(DIM, dtype=DTYPE))
    second, there = average(q, target), q.snapshot()
    for place, known in ((here, first), (there, second), (here, first)):
        q.restore(place)
        assert average(q, target) is known
        assert torch.equal(known.derivative.W, PooledAverage(pool)(q, target).derivative.W)
    assert not torch.equal(first.derivative.a, second.derivative.a)
    assert float(average.effective(q, target)) == pytest.approx(len(pool))  # whose draws they are
    q.restore(there)
    assert float(average.effective(q, target)) < 0.9 * len(pool)


def logistic(dim, rows, seed):
    """A logistic regression, whose negative ELBO is known by quadrature; as a black box its `log_joint`."""
    X = randn(rows, dim, seed=seed)
    uniform = torch.rand(rows, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)
    y = (uniform < torch.sigmoid(X @ randn(dim, seed=seed + 1))).to(DTYPE)
    return GeneralizedLinear(X, y, prior_precision=0.25)


def run(log_joint, dim, seed=0, kind=CholeskyGaussian, **options):
    torch.manual_seed(seed)
    q = kind(dim, dtype=DTYPE)
    return q, fit(q, log_joint, progress=False, examine=False, **options)


def gap(model, q):
    """Nats above the least negative ELBO."""
    best = CholeskyGaussian(model.dim, dtype=DTYPE)
    lowest = fit(best, model, progress=False).loss
    with torch.no_grad():
        return float(model.negative_elbo(q)) - lowest


def test_a_fit_takes_few_gradients():
    """Within 0.01 nats of the exact optimum, of a log joint that is handed over as a function."""
    model = logistic(12, 100, 3)
    q, result = run(model.log_joint, 12)
    assert result.converged
    assert result.trace[-1].gradients < 700
    assert gap(model, q) < 0.01


def test_a_step_that_fresh_draws_refute_is_taken_back(monkeypatch):
    """Steps that lead 1.5 standard deviations astray in every coordinate: q comes back, and averages finish."""
    taken, solved, give_up = [], Sweeps._solved, Sweeps._give_up

    def astray(self, average, point):
        point = solved(self, average, point)
        frame = self.q.frame()
        self.q.initialize_(frame.mean + frame.push(1.5 * torch.ones_like(frame.mean)), frame.root)
        return point

    def lost(self):
        taken.append(self.failures)
        give_up(self)

    monkeypatch.setattr(Sweeps, "_solved", astray)
    monkeypatch.setattr(Sweeps, "_give_up", lost)
    monkeypatch.setattr("torchngvi.fitting.sweeps._NEAR", 0.0)  # no step is believed without draws of its own
    model = logistic(12, 100, 3)
    q, result = run(model.log_joint, 12)
    assert taken == [2]
    assert result.converged
    assert gap(model, q) < 0.01


@pytest.mark.parametrize(("tolerance", "given_up"), [(0.2, False), (0.05, True)])
def test_a_full_pool_is_confirmed_by_fresh_draws(tolerance, given_up, monkeypatch):
    """Sweeps end where the last draws are of q as it is, and within the tolerance; else averages judge."""
    ends, sweep = [], Sweeps.sweep

    def watched(self):
        again, q = sweep(self), self.q
        if not again:
            ends.append((self.lost, torch.equal(drawn[-1], q.mean), self.descent.point.total))
        return again

    drawn, draw = [], Sweeps._draw

    def drawing(self):
        draw(self)
        drawn.append(self.lots[-1].mean)

    monkeypatch.setattr(Sweeps, "sweep", watched)
    monkeypatch.setattr(Sweeps, "_draw", drawing)
    monkeypatch.setattr("torchngvi.fitting.sweeps._NEAR", 0.0)
    monkeypatch.setattr("torchngvi.fitting.descent.Descent.most", 160)
    model = logistic(12, 100, 3)
    _, result = run(model.log_joint, 12, tolerance=tolerance)
    ((lost, fresh, total),) = ends
    assert lost == given_up
    assert result.converged != given_up
    if not given_up:
        assert fresh
        assert total <= tolerance


def test_sweeps_that_creep_are_given_up(monkeypatch):
    """Sweeps in a row of the fewest draws, none of which confirms q: averages go on."""
    sizes, draw, give_up = [], Sweeps._draw, Sweeps._give_up
    monkeypatch.setattr(Sweeps, "_draw", lambda self: sizes.append(self.number) or draw(self))
    monkeypatch.setattr(Sweeps, "_next", lambda self: 2 * self.q.dim + 2)
    monkeypatch.setattr(Sweeps, "_give_up", lambda self: sizes.append("given up") or give_up(self))
    monkeypatch.setattr("torchngvi.fitting.sweeps._CREEPING", 3)
    monkeypatch.setattr("torchngvi.fitting.sweeps._NEAR", 0.0)
    model = logistic(12, 100, 3)
    q, result = run(model.log_joint, 12, tolerance=0.05)
    assert sizes == [26, 26, 26, "given up"]
    assert result.converged
    assert gap(model, q) < 0.01


def test_a_trial_that_leaves_the_domain_is_no_warning(monkeypatch):
    """Sweeps judge each trial and shorten it: a user, who gave no step size, is told of none that was not taken."""
    sizes = []

    class Leaving(VN):
        def step(self, target):
            sizes.append(self.param_groups[0]["lr"])
            self.param_groups[0]["lr"] = math.inf
            super().step(target)

    monkeypatch.setattr("torchngvi.fitting.sweeps.VN", Leaving)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RejectedStepWarning)
        run(logistic(12, 100, 3).log_joint, 12, max_gradients=600)
    assert sizes[:3] == pytest.approx([1.0, 0.4, 0.16])


def test_a_pool_that_grows_by_the_fewest_draws_is_given_up_near_the_optimum_too():
    """Four modes, whose draws one Gaussian cannot share: six draws a sweep would go on for a thousand sweeps."""
    at = torch.tensor([-5.0, -4.5, 4.6, 5.5], dtype=DTYPE)

    def log_joint(theta):
        first, second = theta[:, :1], theta[:, 1:]
        log_likelihood = -torch.log1p((at - first) ** 2) - torch.log1p((at + 1 - second) ** 2 / 4)
        return log_likelihood.sum(-1) - 0.5 * (theta / 10).square().sum(-1)

    _, result = run(log_joint, 2, seed=1, max_evaluations=100)
    assert result.converged


def test_a_log_joint_that_fails_at_a_draw_is_left_to_averages():
    """NaN beyond a bound that draws of q meet now and then: a result all the same."""
    log_joint = logistic(8, 40, 5).log_joint

    def cut(theta):
        value = log_joint(theta)
        return torch.where(theta[..., 0] > 4.0, torch.nan * theta[..., 0], value)

    _, result = run(cut, 8)
    assert torch.isfinite(torch.tensor(result.loss))


@pytest.mark.parametrize("case", ["batch", "diagonal"])
def test_no_pool_where_it_cannot_serve(case, monkeypatch):
    """Batches of posteriors and mean fields are fitted by averages, to the gradient as without a pool."""
    log_joint = logistic(6, 30, 8).log_joint

    def one(**options):
        torch.manual_seed(1)
        q = CholeskyGaussian(6, batch_shape=(2,), dtype=DTYPE) if case == "batch" else DiagonalGaussian(6, dtype=DTYPE)
        return fit(q, log_joint, progress=False, examine=False).trace[-1].gradients

    first = one()
    monkeypatch.setattr(Sweeps, "wanted", lambda self: False)
    assert one() == first


@pytest.mark.parametrize("examine", [False, True])
@pytest.mark.parametrize("most", [120, 300, 500, 900, 1300, 1700, 2500])
def test_a_budget_is_kept(most, examine):
    """In averages, in sweeps, in the checks and in the examination no call is made for which there is no room."""
    log_joint, seen = logistic(12, 100, 3).log_joint, [0, 0]

    def counted(theta):
        seen[not theta.requires_grad] += theta[..., 0].numel()
        return log_joint(theta)

    torch.manual_seed(0)
    q = CholeskyGaussian(12, dtype=DTYPE)
    result = fit(q, counted, progress=False, examine=examine, max_gradients=most, tolerance=0.05)
    assert [result.gradients, result.values] == seen
    assert seen[0] + 0.4 * seen[1] <= most
    assert bool(q.mean.isfinite().all())
    if not result.converged:
        assert result.reason.startswith(f"because the budget of {most} gradients is used up")
        assert result.loss == result.trace[-1].loss  # q is where it was evaluated last


def test_budgets_are_of_use():
    """Each of them that ends within the sweeps is nearer than the one before, and the last converges."""
    model = logistic(12, 100, 3)
    ends = [run(model.log_joint, 12, max_gradients=most) for most in (120, 220, 280, 3000)]
    gaps = [gap(model, q) for q, _ in ends]
    assert [result.converged for _, result in ends] == [False, False, False, True]
    assert gaps[0] > gaps[1] > gaps[2] > gaps[3]


def test_a_budget_that_the_search_for_a_start_uses_up_leaves_the_first_average():
    """Over 32 draws, without which there is no result; where even these have no room for those that fail there is none.

    The log joint then fails at draws of the first average, and at the draws that take their place.
    """
    model = logistic(12, 100, 3)
    _, result = run(model.log_joint, 12, max_gradients=5)
    assert len(result.trace) == 1
    assert result.gradients + 0.4 * result.values <= 5 + 32

    def cut(theta):
        value = model.log_joint(theta)
        return torch.where(theta[..., 0] > 1.0, torch.nan * theta[..., 0], value)

    q, result = run(cut, 12, max_gradients=5)
    assert str(result).startswith(
        "not converged, because the budget of 5 gradients was used up before q was evaluated. Allow more gradients."
    )
    assert not result.trace
    assert bool(q.mean.isfinite().all())


def test_a_run_that_was_cut_goes_on_as_if_it_had_not_been(tmp_path):
    """From the middle of the sweeps, with the pool of the file, to the same bits."""
    log_joint = logistic(12, 100, 3).log_joint
    q, whole = run(log_joint, 12, tolerance=0.03)
    file = tmp_path / "run.pt"
    _, cut = run(log_joint, 12, tolerance=0.03, checkpoint=file, max_evaluations=len(whole.trace) - 2)
    assert not cut.converged
    other, rest = run(log_joint, 12, seed=7, tolerance=0.03, checkpoint=file)
    assert rest.converged == whole.converged
    assert torch.equal(other.mean, q.mean)
    assert [record.loss for record in rest.trace] == [record.loss for record in whole.trace]
