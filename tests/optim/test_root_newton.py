"""Newton's method in (m, C): its Hessian products against autograd, its solver, its steps, and its start."""

import itertools
import math

import pytest
import torch
from helpers import DTYPE, EXACT, IDENTITY, POSTERIORS, close, randn
from sklearn.datasets import load_breast_cancer, load_iris

import torchngvi.rules.newton as module
import torchngvi.rules.root_system as system
from torchngvi import VN, CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, NaturalGradientVI, NewtonCG, fit
from torchngvi.expectations import PiecewiseBound, Quadrature
from torchngvi.fitting.laplace import start_at_mode
from torchngvi.interfaces import Frame, Local, Trial
from torchngvi.interfaces.targets import bends
from torchngvi.models import NegativeBinomial, SoftmaxRegression, StudentT
from torchngvi.rules import RootNewton
from torchngvi.stepsizes import Backtracking, Constant
from torchngvi.structures import block_diagonal

DIM, ROWS, GAMMA = 4, 12, 0.8
FAMILIES = {
    "logit": "bernoulli_logit",
    "probit": "bernoulli_probit",
    "poisson": "poisson_log",
    "gaussian": "gaussian",
    "negative binomial": NegativeBinomial(2.0),
}
KINDS = ["cholesky", "natural", "precision", "diagonal", "blocks"]
RECTANGLE = (DIM, 9)


def regression(family="bernoulli_logit", *, full=False, batch=()):
    X, weights = randn(ROWS, DIM, seed=1), 0.5 + randn(ROWS, seed=2).square()
    y = (randn(*batch, ROWS, seed=3) > 0).to(DTYPE)
    x = randn(*RECTANGLE, seed=4)
    precision = x @ x.mT / 9 if full else 0.7
    return GeneralizedLinear(X, y, family, prior_precision=precision, weights=weights, temperature=GAMMA)


def softmax(classes):
    X, y = randn(ROWS, DIM // 2, seed=1), torch.arange(ROWS) % classes
    return SoftmaxRegression(X, y, prior_precision=0.7, temperature=GAMMA, num_nodes=64)


def somewhere(kind, dim, batch=(), width=0.6):
    """A posterior with correlations, away from any optimum."""
    x = randn(*batch, dim, 3 * dim, seed=5)
    root = width * torch.linalg.cholesky(x @ x.mT / (3 * dim))
    options = {"mean": 0.3 * randn(*batch, dim, seed=6), "dtype": DTYPE}
    if kind == "diagonal":
        return DiagonalGaussian(dim, batch, scale=root.diagonal(dim1=-2, dim2=-1), **options)
    if kind == "blocks":
        return CholeskyGaussian(dim, batch, scale=root, structure=block_diagonal([1, dim - 1]), **options)
    return POSTERIORS[kind](dim, batch, scale=root, **options)


def places(structure):
    """Rows and columns of the entries of a root."""
    kept = structure.to_dense(structure.tril(torch.ones(structure.shape, dtype=DTYPE))) != 0
    return kept.nonzero().unbind(-1)


def hessian(q, model):
    """∇²L at q in the coordinates (δ, T), by autograd of the bound along m + Cδ, C(I + T)."""
    frame, structure = q.frame(), q.structure
    C, eye, (rows, columns) = frame.dense(), torch.eye(q.dim, dtype=DTYPE), places(structure)

    def bound(x):
        K = torch.zeros(q.dim, q.dim, dtype=DTYPE).index_put((rows, columns), x[q.dim :])
        root = C @ (eye + (K.mT if frame.upper else K))
        there = Frame(
            frame.mean + C @ x[: q.dim], structure.from_dense(root.mT if frame.upper else root), structure, frame.upper
        )
        return model.expected_energy(there)[0] - model.temperature * torch.log(1 + K.diagonal()).sum()

    return torch.autograd.functional.hessian(bound, torch.zeros(q.dim + len(rows), dtype=DTYPE))


def vector(q, x):
    """(δ, T) as one vector."""
    rows, columns = places(q.structure)
    return torch.cat([x.delta, q.structure.to_dense(x.T)[rows, columns]])


def move(q, x):
    """The inverse of `vector`."""
    K = torch.zeros(q.dim, q.dim, dtype=DTYPE).index_put(places(q.structure), x[q.dim :])
    return system.Direction(x[: q.dim], q.structure.from_dense(K))


def product(q, model, monkeypatch):
    """The product with the Hessian that the rule gives to its solver."""
    found = []
    monkeypatch.setattr(module, "conjugate_gradients", lambda H, M, r, *more: found.append(H) or (r, 0))
    path = RootNewton()(q, Quadrature()(q, model))
    path.slope()
    return lambda x: vector(q, found[0](move(q, x)))


class TestProducts:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_of_regressions(self, kind, family, monkeypatch):
        q, model = somewhere(kind, DIM), regression(FAMILIES[family], full=kind != "precision")
        H, apply = hessian(q, model), product(q, model, monkeypatch)
        close(torch.stack([apply(x) for x in torch.eye(len(H), dtype=DTYPE)]), H, IDENTITY)
        assert float(torch.linalg.eigvalsh(H).min()) > 0  # the bound is convex in (m, C)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("classes", [2, 3, 4])
    def test_of_softmax_regression(self, kind, classes, monkeypatch):
        model = softmax(classes)
        q = somewhere(kind, model.dim)
        H, apply = hessian(q, model), product(q, model, monkeypatch)
        close(torch.stack([apply(x) for x in torch.eye(len(H), dtype=DTYPE)]), H, IDENTITY)

    def test_rows_that_are_evaluated_a_few_at_a_time(self, monkeypatch):
        model = softmax(3)
        q = somewhere("cholesky", model.dim)
        delta, K = randn(model.dim, seed=7), randn(model.dim, model.dim, seed=8).tril()
        whole = Quadrature()(q, model).derivative.change(q.frame())(delta, K)
        monkeypatch.setattr("torchngvi.models.softmax._CELLS", 3000)
        monkeypatch.setattr("torchngvi.models.softmax.bent.__defaults__", (0,))
        for part, other in zip(Quadrature()(q, model).derivative.change(q.frame())(delta, K), whole, strict=True):
            close(part, other, EXACT)

    def test_a_large_design_is_multiplied_in_single_precision(self, monkeypatch):
        q, model = somewhere("cholesky", DIM), regression()
        delta, K = randn(DIM, seed=7), randn(DIM, DIM, seed=8).tril()
        sites = Quadrature()(q, model).derivative
        whole = sites.change(q.frame())(delta, K)
        monkeypatch.setattr("torchngvi.interfaces.packets._LARGE", 0)
        for part, other in zip(sites.change(q.frame())(delta, K), whole, strict=True):
            assert part.dtype == DTYPE
            close(part, other, 1e-5)
            assert not torch.equal(part, other)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_curvature_of_a_row_is_differentiated(self, family):
        likelihood = regression(FAMILIES[family]).likelihood
        e, v = randn(30, seed=1).mul(3).requires_grad_(), randn(30, seed=2).square().requires_grad_()
        y = (randn(30, seed=3) > 0).to(DTYPE)
        y = 2 * y - 1 if likelihood.two_classes else y
        curvature = likelihood.expected(e, v, y).curvature
        slope, bend = bends(likelihood.expected, e, v, y)
        if family == "gaussian":
            assert not slope.any()
            assert not bend.any()
            return
        expected = torch.autograd.grad(curvature.sum(), (e, v))
        close(slope, expected[0], IDENTITY)
        close(bend, expected[1], IDENTITY)

    @pytest.mark.parametrize("family", ["logit", "probit", "negative binomial"])
    @pytest.mark.parametrize("sd", [1.0, 6.0, 30.0, 1e3])
    def test_the_curvature_of_a_row_whose_normal_is_wide(self, family, sd):
        """Against central differences of β: the nodes of a wide normal lie where 1/Φ(-x) is infinite."""
        likelihood = regression(FAMILIES[family]).likelihood
        e, v = torch.linspace(-4, 4, 5, dtype=DTYPE), torch.full((5,), sd * sd, dtype=DTYPE)
        y = torch.ones(5, dtype=DTYPE)
        slope, bend = bends(likelihood.expected, e, v, y)
        for found, de, dv in ((slope, 1e-4 * sd, 0.0), (bend, 0.0, 1e-4 * sd**2)):
            above, below = (likelihood.expected(e + s * de, v + s * dv, y).curvature for s in (1, -1))
            difference = (above - below) / (2 * (de + dv))
            assert float((found - difference).abs().max()) <= 1e-6 * float(difference.abs().max())

    def test_where_moments_are_bounds_nothing_is_known_of_their_changes(self):
        q, model = somewhere("cholesky", DIM), regression()
        packet = PiecewiseBound()(q, model).derivative
        assert packet.change(q.frame()) is None
        assert Quadrature()(q, model).derivative.raw().change(q.frame()) is None

    @pytest.mark.parametrize("of", ["regression", "softmax"])
    def test_packets_of_which_some_members_are_kept(self, of):
        """Those of the mask change as the new packet does, the others as the old one."""
        model = regression(batch=(3,)) if of == "regression" else softmax(3)
        old, new = (somewhere("cholesky", model.dim, (3,), width) for width in (0.6, 0.4))
        where = torch.tensor([True, False, True])
        delta, K = randn(3, model.dim, seed=7), randn(3, model.dim, model.dim, seed=8).tril()
        packets = [Quadrature()(q, model).derivative for q in (new, old)]
        both = CholeskyGaussian(model.dim, (3,), dtype=DTYPE)
        for name, buffer in both.named_buffers():
            if name in ("mean", "scale_tril"):
                pick = where[:, None] if name == "mean" else where[:, None, None]
                buffer.copy_(torch.where(pick, getattr(new, name), getattr(old, name)))
        merged = packets[0].merged(where, packets[1]).change(both.frame())(delta, K)
        for part, other in zip(
            merged, Quadrature()(both, model).derivative.change(both.frame())(delta, K), strict=True
        ):
            close(part, other, EXACT)


class TestSolver:
    @pytest.mark.parametrize("kind", KINDS)
    def test_it_solves_the_system(self, kind, monkeypatch):
        """To a small residual, the direction is -H⁻¹∇L of the dense Hessian by autograd."""
        monkeypatch.setattr(module, "_RESIDUAL", 1e-12)
        q, model = somewhere(kind, DIM), regression()
        e, found = Quadrature()(q, model), []

        def solved(*given):
            x, products = system.conjugate_gradients(*given)
            found.append((x, given[2]))
            return x, products

        monkeypatch.setattr(module, "conjugate_gradients", solved)
        path = RootNewton(most=200)(q, e)
        slope = path.slope()
        x, right = (vector(q, part) for part in found[0])
        local = q.local(e)
        close(right, -vector(q, system.Direction(local.a, q.structure.tril(local.P))), EXACT)
        expected = torch.linalg.solve(hessian(q, model), right)
        close(x, expected, 1e-8)
        close(slope, GAMMA * right @ x, IDENTITY)  # -dL/dρ, in units of 1/γ

    @pytest.mark.parametrize("kind", KINDS)
    def test_its_preconditioner_inverts_the_system_of_a_hessian_that_stands_still(self, kind):
        """(Wδ, tril[WT] + γ diag T) with W shifted; of a narrow q, all of the unshifted W for δ."""
        q, model = somewhere(kind, DIM), regression()
        e, structure, frame = Quadrature()(q, model), q.structure, q.frame()
        eye = structure.eye(frame.mean)
        W = q.local(e).P + GAMMA * eye
        right = move(q, randn(DIM + len(places(structure)[0]), seed=9))
        delta, T = system.still_solved(e, q.local(e), frame)(right)
        shifted = W + system._SHIFT * GAMMA * eye
        lower = structure.matmul(T, shifted) if frame.upper else structure.matmul(shifted, T)
        lower = structure.tril(lower)
        close(
            structure.with_diagonal(lower, structure.diagonal(lower) + GAMMA * structure.diagonal(T)), right.T, IDENTITY
        )
        C = frame.dense()
        full = C.mT @ e.derivative.raw().H @ C if structure.widest < DIM else shifted
        close(full @ delta, right.delta, IDENTITY)

    def test_a_gaussian_target(self):
        """H stands still: the mean is right after one step, and the root converges quadratically."""
        model = regression("gaussian")
        q = somewhere("cholesky", DIM)
        opt = NaturalGradientVI(q, RootNewton(), step_size=Backtracking())
        exact = CholeskyGaussian(DIM, dtype=DTYPE)
        VN(exact, lr=1 / GAMMA, step_size=Constant()).step(model)
        off = []
        for _ in range(7):
            opt.step(model)
            off.append(
                float(
                    (torch.linalg.solve_triangular(exact.scale_tril, q.scale_tril, upper=False) - torch.eye(4)).norm()
                )
            )
        close(q.mean, exact.mean, 1e-8)
        assert off[-1] < 1e-9
        assert opt.rejections == 0

    def test_the_mean_of_a_gaussian_target_after_one_exact_step(self, monkeypatch):
        monkeypatch.setattr(module, "_RESIDUAL", 1e-12)
        model, q = regression("gaussian"), somewhere("cholesky", DIM)
        exact = CholeskyGaussian(DIM, dtype=DTYPE)
        VN(exact, lr=1 / GAMMA, step_size=Constant()).step(model)
        NewtonCG(q).step(model)
        close(q.mean, exact.mean, IDENTITY)

    def test_without_entropy_a_step_is_one_of_newton_up_to_the_border(self, monkeypatch):
        """At temperature 0 the root would shrink to nothing: at ρ = 1 q goes the share `_INSIDE` of that way."""
        monkeypatch.setattr(module, "_RESIDUAL", 1e-12)
        model, q = regression("gaussian"), somewhere("cholesky", DIM)
        e = Quadrature()(q, model)._replace(temperature=0.0)
        g, H = e.derivative.raw()
        new, inside = q.moved(RootNewton(most=200)(q, e).at(torch.tensor(1.0, dtype=DTYPE)))
        assert bool(inside)
        close(new.vector, q.mean - module._INSIDE * torch.linalg.solve(H, g), 1e-6)
        close(new.matrix.diagonal(), (1 - module._INSIDE) * q.scale_tril.diagonal(), 1e-6)

    def test_curvature_that_is_not_positive_ends_it(self):
        """As for Student's t: no product is divided by a curvature below 0, and the first direction is kept."""
        structure = CholeskyGaussian(2, dtype=DTYPE).structure
        negative = lambda x: system.Direction(-x.delta, -x.T)  # noqa: E731
        right = system.Direction(torch.ones(2, dtype=DTYPE), torch.eye(2, dtype=DTYPE))
        half = lambda x: system.Direction(0.5 * x.delta, 0.5 * x.T)  # noqa: E731
        x, _ = system.conjugate_gradients(negative, half, right, torch.tensor(0.1, dtype=DTYPE), structure, 40)
        close(x.delta, 0.5 * right.delta, EXACT)
        close(x.T, 0.5 * right.T, EXACT)

    def test_members_do_not_wait_for_one_another(self):
        """A batch is its members, one of which has converged."""
        model, q = regression(batch=(3,)), somewhere("cholesky", DIM, (3,))
        ones = [
            CholeskyGaussian(DIM, mean=q.mean[k].clone(), scale=q.scale_tril[k].clone(), dtype=DTYPE) for k in range(3)
        ]
        fit(ones[1], (alone := member(model, 1)), NewtonCG(ones[1]), tolerance=1e-12, progress=False)
        q.mean[1], q.scale_tril[1] = ones[1].mean, ones[1].scale_tril
        opt = NewtonCG(q)
        opt.step(model)
        for k in range(3):
            target = alone if k == 1 else member(model, k)
            NewtonCG(ones[k]).step(target)
            close(q.mean[k], ones[k].mean, IDENTITY)
            close(q.scale_tril[k], ones[k].scale_tril, IDENTITY)

    def test_a_device_is_not_asked(self, monkeypatch):
        """Where the host is not to wait, as many products are made, and the step is a descent all the same."""
        q, model = somewhere("cholesky", DIM), regression()
        expected = RootNewton()(q, Quadrature()(q, model)).slope()
        monkeypatch.setattr(system, "may_be_asked", lambda mask: False)
        rule = RootNewton()
        slope = rule(q, Quadrature()(q, model)).slope()
        assert rule.products == system._WITHOUT_ASKING
        close(slope, expected, EXACT)  # members that have ended stay where they are


def member(model, k):
    return GeneralizedLinear(
        model.X,
        model.y[k],
        prior_precision=0.7,
        weights=model.weights[k] if model.weights.ndim > 1 else model.weights,
        temperature=GAMMA,
        classes=[-1.0, 1.0],
    )


class TestSteps:
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_path_is_a_straight_line_in_mean_and_root(self, kind):
        """m + ρCδ and C(I + ρT), whatever q holds, on which a convex bound is convex."""
        q, model = somewhere(kind, DIM), regression()
        path, frame = RootNewton()(q, Quadrature()(q, model)), q.frame()
        roots, means = [], []
        for rho in (0.0, 0.3, 0.6):
            there = type(q)(DIM, dtype=DTYPE, **({} if kind == "diagonal" else {"structure": q.structure}))
            new, inside = q.moved(path.at(torch.tensor(rho, dtype=DTYPE)))
            assert inside
            there.assign(new, torch.tensor(True))
            root = there.frame().dense()
            roots.append(root * root.diagonal().sign())
            means.append(there.frame().mean)
        close(roots[2] - roots[1], roots[1] - roots[0], IDENTITY)
        close(means[2] - means[1], means[1] - means[0], IDENTITY)
        close(roots[0], frame.dense(), IDENTITY)
        assert float((means[2] - means[1]).norm()) > 0.01

    def test_a_step_does_not_leave_the_cone(self):
        """From a wide q the root shrinks by nine tenths at most."""
        q, model = CholeskyGaussian(DIM, scale=1e4, dtype=DTYPE), regression()
        new, inside = q.moved(RootNewton()(q, Quadrature()(q, model)).at(torch.tensor(1 / GAMMA, dtype=DTYPE)))
        assert inside
        assert float((new.matrix.diagonal() / 1e4).min()) >= 0.1 - 1e-9

    def test_its_convergence_is_faster_than_linear(self):
        """The norm falls by more in each step than in the one before, down to rounding."""
        model = breast_cancer()
        q = CholeskyGaussian(model.dim, dtype=DTYPE)
        norms = [record.norm for record in fit(q, model, tolerance=1e-9, progress=False).trace]
        falls = [later / earlier for earlier, later in itertools.pairwise(norms)]
        assert falls[-1] < 0.01
        assert sum(norm < 0.1 for norm in norms) <= 4

    def test_a_likelihood_that_is_not_log_concave(self):
        X = randn(30, 3, seed=1)
        model = GeneralizedLinear(X, 3 * randn(30, seed=2), StudentT(0.5, dof=2.0))
        q, other = (CholeskyGaussian(3, dtype=DTYPE) for _ in range(2))
        result = fit(q, model, NewtonCG(q), progress=False)
        assert result.converged
        assert result.loss == pytest.approx(fit(other, model, VN(other), progress=False).loss, abs=1e-9)

    def test_a_refused_step_costs_no_products(self):
        """The way from q is the same, only shorter."""

        class Worse(GeneralizedLinear):
            calls = 0

            def expected_energy(self, frame):
                self.calls += 1
                value, sites = super().expected_energy(frame)
                return value + (100.0 if self.calls in (2, 3) else 0.0), sites

        X, y = randn(ROWS, DIM, seed=1), (randn(ROWS, seed=3) > 0).to(DTYPE)
        q, model = somewhere("cholesky", DIM), Worse(X, y)
        opt = NewtonCG(q)
        opt.step(model)
        made = opt.rule.products
        assert opt.rejections == 1
        opt.step(model)
        assert (opt.rejections, opt.rule.products) == (2, made)
        opt.step(model)
        assert opt.rejections == 2
        assert float(opt.last.rho) < 0.5

    def test_float32(self):
        X, y = randn(ROWS, DIM, seed=1).float(), (randn(ROWS, seed=3) > 0).float()
        q = CholeskyGaussian(DIM)
        assert fit(q, GeneralizedLinear(X, y), progress=False).converged


class TestBacktracking:
    def test_shares(self):
        """Whole, then the minimiser of the parabola between a tenth and a half, then whole again."""
        control, one = Backtracking(), torch.tensor(1.0, dtype=DTYPE)
        state = control.init(torch.zeros((), dtype=DTYPE))
        trial = torch.testing.assert_close
        kept, state = control.judge(Trial(one, 1.6 * one, 1.4 * one, one, one), state)
        assert not kept
        trial(state["share"], torch.tensor(0.35, dtype=DTYPE))  # ½ s / (s + rise)
        for after, share in ((math.inf, 0.035), (math.nan, 0.0035), (1.0, 0.00175)):
            kept, state = control.judge(Trial(one, after * one, one, one, one), state)
            assert not kept
            trial(state["share"], torch.tensor(share, dtype=DTYPE))
        kept, state = control.judge(Trial(one, 0.85 * one, one, one, one), state)
        assert kept
        assert state["share"] == 1

    def test_members_decide_alone(self):
        control, ones = Backtracking(), torch.ones(2, dtype=DTYPE)
        after = torch.tensor([0.5, 1.5], dtype=DTYPE)
        kept, state = control.judge(Trial(ones, after, ones, ones, ones), control.init(ones))
        assert kept.tolist() == [True, False]
        assert state["share"][0] == 1 > state["share"][1]


class TestMode:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_second_derivatives_of_regressions(self, family):
        self.check(regression(FAMILIES[family], full=True))

    @pytest.mark.parametrize("classes", [2, 3, 4])
    def test_second_derivatives_of_softmax_regression(self, classes):
        self.check(softmax(classes))

    def check(self, model):
        theta = randn(model.dim, seed=9)
        energy, (g, H) = model.second_order(theta)
        close(energy, -model.log_joint(theta), EXACT)
        close(g, torch.autograd.functional.jacobian(lambda t: -model.log_joint(t), theta), IDENTITY)
        close(H, torch.autograd.functional.hessian(lambda t: -model.log_joint(t), theta), IDENTITY)

    def test_rows_of_no_weight_are_not_there(self):
        """Also where their predictors are not finite."""
        X, y = randn(5, 2, seed=1), torch.tensor([0.0, 1.0, 2.0, 1.0, 0.0], dtype=DTYPE)
        X = torch.cat([X, torch.full((1, 2), 1e200, dtype=DTYPE)])
        weights = torch.tensor([1.0, 1, 1, 1, 1, 0], dtype=DTYPE)
        model = GeneralizedLinear(X, torch.cat([y, y[:1]]), "poisson_log", weights=weights)
        theta, other = randn(2, seed=3), GeneralizedLinear(X[:5], y, "poisson_log")
        close(model.second_order(theta)[1].H, other.second_order(theta)[1].H, EXACT)

    @pytest.mark.parametrize("batch", [(), (3,)])
    @pytest.mark.parametrize("kind", KINDS)
    def test_q_is_laplaces(self, kind, batch):
        """The precision is the Hessian over γ at a mode that is a tenth of a nat off at most."""
        model, q = regression(batch=batch), somewhere(kind, DIM, batch)
        assert start_at_mode(q, model) <= 8
        mean = q.frame().mean
        energy, (g, H) = model.second_order(mean)
        assert float((g * torch.linalg.solve(H, g)).sum(-1).max()) <= 0.1
        pattern = q.structure.from_dense(H / GAMMA)
        inverse = torch.linalg.inv(q.frame().dense() @ q.frame().dense().mT)
        close(q.structure.from_dense(inverse), pattern, 1e-8)

    def test_members_that_are_not_finite_stay(self):
        X, offset = torch.ones(3, 1, dtype=DTYPE), torch.tensor([[1e4] * 3, [0.0] * 3], dtype=DTYPE)
        model = GeneralizedLinear(X, torch.tensor([[0.0, 1.0, 2.0]] * 2, dtype=DTYPE), "poisson_log", offset=offset)
        q = CholeskyGaussian(1, (2,), mean=torch.tensor([[2.0], [0.0]], dtype=DTYPE), dtype=DTYPE)
        start_at_mode(q, model)
        assert q.mean[0].item() == 2.0
        assert q.scale_tril[0].item() == 1.0
        assert abs(q.mean[1].item()) < 0.5

    @pytest.mark.parametrize("mean", [-300.0, 30.0, 1e4])
    def test_it_begins_at_the_origin_where_that_is_lower(self, mean):
        """From η = 30 Newton's method would need 30 passes, and from 1e4 it is lost."""
        X = randn(50, 3, seed=1)
        model = GeneralizedLinear(X, (0.5 * X.sum(-1)).exp().round(), "poisson_log")
        q, near = CholeskyGaussian(3, mean=mean, dtype=DTYPE), CholeskyGaussian(3, dtype=DTYPE)
        assert start_at_mode(q, model) == start_at_mode(near, model) <= 8
        close(q.mean, near.mean, IDENTITY)
        assert fit(q.initialize_(mean), model, progress=False).converged


def breast_cancer():
    X, y = load_breast_cancer(return_X_y=True)
    X = torch.cat([torch.tensor((X - X.mean(0)) / X.std(0)), torch.ones(len(y), 1, dtype=DTYPE)], 1)
    return GeneralizedLinear(X, y, prior_precision=0.1)


OPTIMA = {CholeskyGaussian: 59.1019663775, DiagonalGaussian: 80.3561556353}  # of breast cancer, by VN to 1e-8


class TestFits:
    @pytest.mark.parametrize("kind", [CholeskyGaussian, DiagonalGaussian])
    @pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
    def test_breast_cancer(self, kind, scale):
        """To a norm of 1e-5, from near and far; VN takes 15 to 37 evaluations, 90 to 180 of a mean field."""
        model = breast_cancer()
        for mean in (0.0, 10**0.5 * randn(model.dim, seed=0)):
            q = kind(model.dim, mean=mean, scale=scale, dtype=DTYPE)
            result = fit(q, model, progress=False)
            assert result.converged
            assert result.evaluations <= 8
            assert result.loss == pytest.approx(OPTIMA[kind], abs=1e-9)

    @pytest.mark.parametrize("family", ["bernoulli_logit", "bernoulli_probit"])
    def test_more_columns_than_rows(self, family):
        """Whose rows have wide normals; VN takes 20 to 30 evaluations."""
        X = randn(50, 120, seed=1)
        model = GeneralizedLinear(X, X[:, :20].sum(-1) + randn(50, seed=2) > 0, family)
        result = fit(CholeskyGaussian(120, dtype=DTYPE), model, progress=False)
        assert result.converged
        assert result.evaluations <= 10

    @pytest.mark.parametrize("kind", [CholeskyGaussian, DiagonalGaussian])
    def test_iris(self, kind):
        """A mean field by Newton's method, a full covariance by VN: both from the mode."""
        X, y = load_iris(return_X_y=True)
        X = torch.cat([torch.tensor((X - X.mean(0)) / X.std(0)), torch.ones(len(y), 1, dtype=DTYPE)], 1)
        model = SoftmaxRegression(X, torch.tensor(y))
        q, other = (kind(model.dim, dtype=DTYPE) for _ in range(2))
        result, expected = fit(q, model, progress=False), fit(other, model, VN(other), progress=False)
        assert result.converged
        assert result.evaluations <= (8 if kind is CholeskyGaussian else 7) < expected.evaluations
        assert result.loss == pytest.approx(expected.loss, abs=1e-9)


def test_the_norm_is_that_of_the_gradient():
    q, model = somewhere("cholesky", DIM), regression()
    e = Quadrature()(q, model)
    local: Local = q.local(e)
    close(RootNewton()(q, e).norm2(), q.norm2(local), EXACT)
