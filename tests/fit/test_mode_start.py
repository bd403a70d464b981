"""The start of a fit at the mode: within its budgets, and over a forest the same as with H written out."""

import math

import pytest
import torch
from helpers import DTYPE, EXACT, IDENTITY, PRECISION, Watch, close, randn
from test_factors import poisson
from test_sparse_rows import compressed, intercepts

from torchngvi import CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, LogJoint, fit, laplace
from torchngvi.fitting.laplace import has_start, put_at, repaired, search, start_at_mode
from torchngvi.fitting.stopping import Criterion
from torchngvi.interfaces import Frame
from torchngvi.models import SoftmaxRegression, StudentT, TractableFactors
from torchngvi.structures import arrow


def counts(dim=3):
    X = randn(60, dim, seed=1)
    return GeneralizedLinear(X, (0.5 * X.sum(-1)).exp().round(), "poisson_log")


def far(dim=3):
    return CholeskyGaussian(dim, mean=2.0, dtype=DTYPE)


class Watched(Criterion):
    """Never ends a run between records, and says how often and of how much it was asked."""

    def __init__(self, within):
        self.within, self.costs = within, []

    def asked(self, standing):
        return None

    def over(self, cost, seconds):
        self.costs.append(cost)
        return len(self.costs) > self.within


class TestBudgets:
    @pytest.mark.parametrize("most", range(1, 13))
    def test_gradients(self, most):
        """Each is used up to the last one, and none more: three are too few for a pass with its evaluations."""
        whole = fit(far(), counts(), progress=False)
        result = fit(far(), counts(), max_gradients=most, progress=False)
        assert result.gradients == min(most, whole.gradients)
        assert result.converged == (most >= whole.gradients)
        if most <= 3:
            assert result.evaluations == most  # by steps alone
        elif most < whole.gradients:
            assert result.evaluations < most

    def test_seconds(self):
        """A clock that has run out before the first pass, and one that runs out after the second."""
        result = fit(far(), counts(), max_seconds=1e-9, progress=False)
        assert (result.gradients, result.evaluations) == (1, 1)
        watched = Watched(2)
        result = fit(far(), counts(), stop=watched, max_evaluations=2, progress=False)
        assert watched.costs == [1 + 1 + 1, 1 + 2 + 1, 1 + 3 + 1]  # before a pass: it, and the first of two evaluations
        assert (result.gradients, result.evaluations) == (4, 2)

    def test_a_model_that_is_not_convex(self):
        """Of D Hessian-vector products a pass counts D + 1."""
        X = randn(40, 2, seed=1)
        model = GeneralizedLinear(X, X.sum(-1), StudentT(1.0, 3.0))
        q, other = (CholeskyGaussian(2, mean=30.0, scale=1e4, dtype=DTYPE) for _ in range(2))
        assert not has_start(q, model)
        one, two = (fit(each, model, max_gradients=most, progress=False) for each, most in ((q, 5), (other, 6)))
        assert one.evaluations == one.gradients == 5  # no pass: 1 + 3 + 2 = 6
        assert two.gradients == 6 > two.evaluations

    def test_one_evaluation_leaves_the_mode_to_the_run_that_goes_on(self, tmp_path):
        whole, parts = far(), far()
        expected = fit(whole, counts(), progress=False)
        first = fit(parts, counts(), max_evaluations=1, checkpoint=tmp_path / "run.pt", progress=False)
        assert (first.evaluations, first.gradients) == (1, 1)
        result = fit(parts, counts(), checkpoint=tmp_path / "run.pt", progress=False)
        close(parts.mean, whole.mean, 0.0)
        close(parts.scale_tril, whole.scale_tril, 0.0)
        assert (result.evaluations, result.gradients) == (expected.evaluations, expected.gradients)
        assert result.trace[1:] != []
        assert [record.loss for record in result.trace[1:]] == [record.loss for record in expected.trace]


class TestSearch:
    def test_both_starts_are_one_search(self):
        """Laplace's approximation of a convex model is the start at the mode, but for the tolerance."""
        model, q, other = counts(), far().initialize_(0.0), far().initialize_(0.0)
        start_at_mode(q, model)
        result = laplace(other, model, tolerance=0.1**0.5)
        close(q.mean, other.mean, EXACT)
        close(q.covariance, other.covariance, IDENTITY)
        assert bool(result.converged)

    def test_a_budget_ends_it_where_the_last_step_has_led(self):
        target = LogJoint(lambda theta: -(theta.exp() - 3 * theta).sum(-1))

        def at(theta):
            return theta.exp().sum() - 3 * theta.sum(), theta.exp() - 3, repaired(torch.diag(theta.exp()))[0]

        found = search(target, torch.zeros(1, dtype=DTYPE), at, 1e-12, 50, lambda passes: passes > 1)
        assert (found.passes, found.theta.item()) == (1, 1.0)  # half of -(e^θ - 3)/e^θ = 2, where ℓ is larger
        found = search(target, torch.zeros(1, dtype=DTYPE), at, 1e-12, 50)
        assert found.theta.item() == pytest.approx(math.log(3), abs=1e-9)

    def test_members_that_are_left_out_stay(self):
        q, H = CholeskyGaussian(1, (2,), mean=5.0, dtype=DTYPE), torch.full((2, 1, 1), 4.0, dtype=DTYPE)
        put_at(q, torch.tensor([[1.0], [math.nan]], dtype=DTYPE), repaired(H)[0], 2.0, torch.tensor([True, False]))
        assert q.mean.flatten().tolist() == [1.0, 5.0]
        close(q.variance.flatten(), torch.tensor([0.5, 1.0], dtype=DTYPE), EXACT)


@pytest.mark.parametrize("kind", PRECISION)
class TestForests:
    def problems(self, kind):
        X, y = intercepts(6)
        forest = arrow(groups=6, local=1, globals=2)
        factors, dense, _ = poisson()
        return [
            (kind(8, structure=forest, dtype=DTYPE), GeneralizedLinear(compressed(X), y), GeneralizedLinear(X, y)),
            (kind(factors.structure.dim, structure=factors.structure, dtype=DTYPE), factors, dense),
        ]

    def test_second_order_is_that_of_the_whole(self, kind):
        for q, model, dense in self.problems(kind):
            theta, structure = randn(q.dim, seed=4), q.structure
            energy, packet = model.second_order(theta)
            g, W = packet.framed(Frame(theta, structure.eye(theta), structure, upper=True))
            close(energy, -model.log_joint(theta), EXACT)
            close(g, dense.second_order(theta)[1].g, IDENTITY)
            close(structure.full(W), dense.second_order(theta)[1].H, IDENTITY)

    def test_the_start_is_the_dense_one(self, kind):
        """The same passes, mean and covariance; q over the forest loses nothing of H."""
        for q, model, dense in self.problems(kind):
            full = CholeskyGaussian(q.dim, dtype=DTYPE)
            assert has_start(q, model)
            assert start_at_mode(q, model) == start_at_mode(full, dense) > 1
            close(q.mean, full.mean, IDENTITY)
            close(q.covariance, full.covariance, IDENTITY)

    def test_the_gradient_is_zero_at_the_mode(self, kind):
        for q, model, dense in self.problems(kind):
            laplace(q, model, tolerance=1e-12)
            g = dense.second_order(q.mean.detach())[1].g
            assert float(g.abs().max()) <= 1e-10

    def test_a_fit_begins_there(self, kind):
        """The optimum is that of the dense model, from nearer by."""
        for q, model, dense in self.problems(kind):
            full = CholeskyGaussian(q.dim, dtype=DTYPE)
            start_at_mode(full, dense)
            at_mode = dense.negative_elbo(full).item()
            best = fit(full, dense, tolerance=1e-9, progress=False)
            result = fit(q.initialize_(2.0), model, tolerance=1e-9, progress=False)
            shift = (model.negative_elbo(q) - dense.negative_elbo(full)).item()  # normalisers of shares of the prior
            assert result.converged
            assert result.trace[0].loss - shift == pytest.approx(at_mode, abs=0.2)
            close(q.mean, full.mean, 1e-8)
            assert result.loss - shift == pytest.approx(best.loss, abs=1e-10)

    def test_nothing_is_d_by_d(self, kind):
        """Also of more dimensions than H is written out for."""
        X, y = intercepts(600, rows=1)
        model, forest = GeneralizedLinear(compressed(X), y), arrow(groups=600, local=1, globals=2)
        q = kind(602, structure=forest, dtype=DTYPE)
        with Watch(q.dim):
            assert has_start(q, model)
            assert 1 < start_at_mode(q, model) < 10


class TestWhichModels:
    def test_convex(self):
        """A q over no forest writes H out, of up to 500 dimensions; what is not convex has no such start."""
        X, y = intercepts(6)
        sparse, classes = GeneralizedLinear(compressed(X), y), SoftmaxRegression(X, y.long())
        assert sparse.convex
        assert not sparse.curved
        assert classes.convex
        assert classes.curved
        assert has_start(DiagonalGaussian(8, dtype=DTYPE), sparse)
        assert not has_start(CholeskyGaussian(8, dtype=DTYPE), GeneralizedLinear(X, y, temperature=0.0))
        wide = GeneralizedLinear(compressed(intercepts(600, 1)[0]), intercepts(600, 1)[1])
        assert not has_start(DiagonalGaussian(602, dtype=DTYPE), wide)
        heavy = GeneralizedLinear(randn(5, 2, 3, seed=1), randn(5, 2, seed=2), StudentT(1.0, 3.0))
        assert not TractableFactors(arrow(groups=5, local=2, globals=1), [(0, heavy)]).convex

    @pytest.mark.parametrize("kind", [CholeskyGaussian, DiagonalGaussian])
    def test_sparse_rows_without_a_forest(self, kind):
        """H is that of the dense X, and so is the start."""
        X, y = intercepts(6)
        q, other = kind(8, dtype=DTYPE), kind(8, dtype=DTYPE)
        assert start_at_mode(q, GeneralizedLinear(compressed(X), y)) == start_at_mode(other, GeneralizedLinear(X, y))
        close(q.mean, other.mean, IDENTITY)
        close(q.covariance, other.covariance, IDENTITY)
        assert fit(q, GeneralizedLinear(compressed(X), y), progress=False).converged
