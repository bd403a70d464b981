"""Analytic natural gradients of a Cholesky factor (Tan 2025): algorithms 1a to 2b, momentum, the stopping rule."""

import itertools
import math
import pathlib
import re

import pytest
import reference
import torch
from helpers import (
    DIM,
    DTYPE,
    EXACT,
    IDENTITY,
    batches,
    batches_at,
    close,
    every,
    for_each,
    framed_packet,
    randn,
    random_model,
    random_posterior,
    random_root,
    random_symmetric,
    unbiased,
)

from torchngvi import (
    SRVN,
    VN,
    CholeskyGaussian,
    DiagonalGaussian,
    LogJoint,
    NaturalGaussian,
    NaturalGradientVI,
    PrecisionCholeskyGaussian,
    Snngm,
    fit,
)
from torchngvi.errors import InputError, PairError, RejectedStepWarning
from torchngvi.expectations import Hessian, Independent, PathDerivative, Quadrature, ScoreFunction, Stein
from torchngvi.expectations.draws import Draws
from torchngvi.fitting import SlopeStop
from torchngvi.interfaces import Coordinates
from torchngvi.methods import RootGD
from torchngvi.optim import Evaluation
from torchngvi.rules import Adam, LogNaturalGradient, LogRootGradient, NaturalGradient, NormalizedMomentum, RootGradient
from torchngvi.stepsizes import Constant

ROOTS = {"C": "cholesky", "T": "precision"}
forms = pytest.mark.parametrize("form", ROOTS)
naturals = pytest.mark.parametrize("natural", [False, True], ids=["euclidean", "natural"])
logs = pytest.mark.parametrize("log_diagonal", [False, True], ids=["plain", "log_diagonal"])
rooted = pytest.mark.parametrize("name", ["cholesky", "diagonal", "precision"])


class Given(Draws):
    """The same draws z (S, *batch, D) at each call, treated as random ones."""

    comparable, independent, mirrored, generator = False, True, False, None

    def __init__(self, z):
        self.z, self.num_samples = z, len(z)

    def __call__(self, like):
        return self.z.expand(len(self.z), *like.shape)


class InTurn(Draws):
    """One given draw after another, z (steps, *batch, D)."""

    comparable, independent, mirrored, generator, num_samples = False, True, False, None, 1

    def __init__(self, z):
        self.z = iter(z)

    def __call__(self, like):
        return next(self.z)[None].expand(1, *like.shape)


def from_root(form, mean, root):
    """The posterior that stores this very root."""
    q = {"C": CholeskyGaussian, "T": PrecisionCholeskyGaussian}[form](len(mean), dtype=DTYPE)
    q.assign(Coordinates(mean, root), torch.tensor(True))
    return q


def rule_of(natural, log_diagonal=False):
    if log_diagonal:
        return LogNaturalGradient() if natural else LogRootGradient()
    return NaturalGradient() if natural else RootGradient()


def flat(name, vector, matrix):
    return torch.cat([vector, matrix if name == "diagonal" else reference.vech(matrix)])


# a log joint that is not quadratic, and its gradient
def log_joint(theta):
    return -(0.3 * theta.square() + 2 * (theta - 0.5).cosh().log()).sum(-1) - 0.2 * theta.sum(-1).square()


def slope(theta):
    return torch.func.grad(log_joint)(theta)


class TestMatrices:
    """vech, K, L, D, N, and the Fisher matrix of a root (Tan, Lemmas 1 and 4)."""

    @pytest.mark.parametrize("dim", [1, 2, 3, 4])
    def test_what_they_do(self, dim):
        A = randn(dim, dim, seed=1)
        S, P = A + A.mT, A.tril()
        K, L, D = reference.commutation(dim), reference.elimination(dim), reference.duplication(dim)
        close(K @ reference.vec(A), reference.vec(A.mT), 0.0)
        close(L @ reference.vec(A), reference.vech(A), 0.0)
        close(D @ reference.vech(S), reference.vec(S), 0.0)
        close(L.mT @ reference.vech(P), reference.vec(P), 0.0)

    @pytest.mark.parametrize("dim", [1, 2, 3, 4])
    def test_lemma_4(self, dim):
        K, L, D = reference.commutation(dim), reference.elimination(dim), reference.duplication(dim)
        eye, small = torch.eye(dim * dim, dtype=DTYPE), torch.eye(dim * (dim + 1) // 2, dtype=DTYPE)
        N = 0.5 * (K + eye)
        P, Q = randn(dim, dim, seed=1).tril(), randn(dim, dim, seed=2).tril()
        product = reference.kron(P.mT, Q)
        close(eye + K, 2 * D @ torch.linalg.pinv(D), EXACT)
        close(L @ L.mT, small, 0.0)
        close(torch.linalg.inv(L @ N @ L.mT), 2 * small - L @ K @ L.mT, EXACT)
        close(N, D @ L @ N, 0.0)
        close(L.mT @ L @ product @ L.mT, product @ L.mT, EXACT)
        close(L @ product @ L.mT, D.mT @ product @ L.mT, EXACT)

    @pytest.mark.parametrize("seed", range(4))
    def test_lemma_1(self, seed):
        """Both forms of I(Λ), its inverse, and its action by the double bar."""
        root, G = random_root((), seed, dim=4), randn(4, 4, seed=seed + 9)
        L, eye = reference.elimination(4), torch.eye(4, dtype=DTYPE)
        N = 0.5 * (reference.commutation(4) + torch.eye(16, dtype=DTYPE))
        inverse = torch.linalg.inv(root)
        F = reference.root_fisher(root)
        other = 2 * L @ reference.kron(eye, inverse.mT) @ N @ reference.kron(eye, inverse) @ L.mT
        close(F, other, IDENTITY)
        close(reference.root_fisher_inverse(root) @ F, torch.eye(10, dtype=DTYPE), IDENTITY)
        action = root @ reference.tril_half(root.mT @ G.tril())
        close(reference.vech(action), torch.linalg.solve(F, reference.vech(G)), IDENTITY)

    def test_its_golden_values(self):
        root = torch.tensor([[2.0, 0.0], [1.0, 3.0]], dtype=DTYPE)
        F = torch.tensor([[19 / 36, -1 / 18, 0], [-1 / 18, 1 / 9, 0], [0, 0, 2 / 9]], dtype=DTYPE)
        inverse = torch.tensor([[2, 1, 0], [1, 9.5, 0], [0, 0, 4.5]], dtype=DTYPE)
        close(reference.root_fisher(root), F, EXACT)
        close(reference.root_fisher_inverse(root), inverse, EXACT)

    @pytest.mark.parametrize("system", ["mean_root", "mean_precision_root"])
    @pytest.mark.parametrize("seed", range(3))
    def test_theorem_2(self, system, seed):
        """F = blockdiag(S, I(Λ)) is the Hessian of the divergence, for Λ = C and Λ = T."""
        root, m = random_root((), seed), randn(DIM, seed=seed + 20)
        inverse = torch.linalg.inv(root)
        V, S = root @ root.mT, inverse.mT @ inverse
        V, S = (V, S) if system == "mean_root" else (S, V)
        coordinates = reference.COORDINATES[system]
        F = reference.fisher(coordinates, coordinates.flat(m, V))
        close(F, torch.block_diag(S, reference.root_fisher(root)), IDENTITY)

    def test_the_fisher_matrix_is_the_covariance_of_the_scores(self):
        """Scores C⁻ᵀz, vech[C⁻ᵀ(zzᵀ - I)] and T z, vech[T⁻ᵀ(I - zzᵀ)]."""
        root = random_root((), 3)
        z = torch.randn(20_000, DIM, dtype=DTYPE, generator=torch.Generator().manual_seed(0))
        eye, inverse = torch.eye(DIM, dtype=DTYPE), torch.linalg.inv(root)
        for sign in (1, -1):
            scores = torch.func.vmap(lambda z, s=sign: reference.vech(s * inverse.mT @ (torch.outer(z, z) - eye)))(z)
            unbiased(scores[:, :, None] * scores[:, None], reference.root_fisher(root))


class TestGoldenValues:
    """Λ = [[2, 0], [1, 3]], z = (1, -1), ∇ log p = (0.5, -1), m = 0."""

    ROOT = torch.tensor([[2.0, 0.0], [1.0, 3.0]], dtype=DTYPE)
    SLOPE = torch.tensor([0.5, -1.0], dtype=DTYPE)
    STEPS = {
        ("C", False): ([7 / 6, -4 / 3], [[7 / 6, 0], [-4 / 3, 4 / 3]]),
        ("C", True): ([2, -11], [[1, 0], [-11.5, 6]]),
        ("T", False): ([2.5, -3], [[-5 / 6, 0], [5 / 12, -17 / 36]]),
        ("T", True): ([31 / 36, -17 / 36], [[-1.25, 0], [3.125, -2.125]]),
    }
    NORM2 = {"C": 41.5, "T": 83 / 12}

    def one(self, form):
        q = from_root(form, torch.zeros(2, dtype=DTYPE), self.ROOT)
        z = torch.tensor([[1.0, -1.0]], dtype=DTYPE)
        return q, PathDerivative(Given(z)), LogJoint(lambda theta: theta @ self.SLOPE)

    @pytest.mark.parametrize(("form", "natural"), STEPS)
    def test_algorithms(self, form, natural):
        """1a and 2a are RootGD, 1b and 2b SRVN, with one draw."""
        q, estimator, target = self.one(form)
        method, lr = SRVN if natural else RootGD, 0.125
        method(q, lr=lr, estimator=estimator, step_size=Constant()).step(target)
        vector, matrix = (torch.tensor(x, dtype=DTYPE) for x in self.STEPS[form, natural])
        close(q.coordinates.vector, lr * vector, EXACT)
        close(q.coordinates.matrix, self.ROOT + lr * matrix, EXACT)

    @forms
    def test_the_draw_and_the_norm(self, form):
        q, estimator, target = self.one(form)
        theta = q.mean + q.frame().push(estimator.draws(q.mean))[0]
        close(theta, torch.tensor([2, -2] if form == "C" else [2 / 3, -1 / 3], dtype=DTYPE), EXACT)
        e = estimator(q, target)
        for natural in (True, False):
            close(rule_of(natural)(q, e).norm2(), torch.tensor(self.NORM2[form], dtype=DTYPE), EXACT)
        if form == "C":
            velocity = q.tangent(e)
            square = velocity.vector.square().sum() + velocity.matrix.square().sum()
            close(square, torch.tensor(294.25, dtype=DTYPE), EXACT)

    def test_a_diagonal_is_the_dense_step_masked(self):
        """1c with blocks of one: cross blocks of I(C) vanish between the columns' diagonals."""
        m, c, z = randn(DIM, seed=1), 0.4 + randn(DIM, seed=2).abs(), randn(1, DIM, seed=3)
        dense = from_root("C", m, torch.diag(c))
        diagonal = DiagonalGaussian(DIM, mean=m, scale=c)
        for q in (dense, diagonal):
            SRVN(q, lr=0.1, estimator=PathDerivative(Given(z)), step_size=Constant()).step(log_joint)
        close(diagonal.mean, dense.mean, EXACT)
        close(diagonal.scale, dense.scale_tril.diagonal(), EXACT)
        assert float(dense.scale_tril.tril(-1).abs().max()) > 1e-3

    def test_a_masked_dense_step_is_not_the_step_of_an_arrow(self):
        """Eq 9: F₁₁⁻¹g₁ = g̃₁ + F₁₁⁻¹F₁₂g̃₂, and on an arrow T the second part does not vanish."""
        T = torch.tensor([[2.0, 0, 0], [0, 1, 0], [0.5, -1, 4]], dtype=DTYPE)
        z, p = torch.tensor([1.0, -2.0, 0.5], dtype=DTYPE), torch.tensor([0.3, -0.7, 1.1], dtype=DTYPE)
        q = from_root("T", torch.zeros(3, dtype=DTYPE), T)
        e = PathDerivative(Given(z[None]))(q, LogJoint(lambda theta: theta @ p))
        dense, gradient = (reference.vech(-x.matrix) for x in (q.tangent(e), q.euclidean(e)))
        close(-q.euclidean(e).vector, torch.tensor([2.3, -2.7, 5.6], dtype=DTYPE), EXACT)
        inside = reference.vech(T) != 0
        F = reference.root_fisher(T)
        kept = torch.linalg.solve(F[inside][:, inside], gradient[inside])
        relation = dense[inside] + torch.linalg.solve(F[inside][:, inside], F[inside][:, ~inside] @ dense[~inside])
        close(relation, kept, IDENTITY)
        expected = torch.tensor([-1.15, -2.5875, -2.7, 8.1, -0.58125], dtype=DTYPE)  # column by column
        close(kept, expected, IDENTITY)
        close(dense[inside][1], torch.tensor(-4.8875, dtype=DTYPE), IDENTITY)


class TestLiteralAlgorithms:
    """Five steps of the library are five iterations as printed, and with the corrected log-diagonal lines."""

    @pytest.mark.sparse(5)
    @forms
    @naturals
    @logs
    @pytest.mark.parametrize("batch", [(), (3,)], ids=str)
    def test_steps(self, form, natural, log_diagonal, batch):
        root, m, rho = random_root(batch, 1), randn(*batch, DIM, seed=2), 0.05
        z = randn(5, *batch, DIM, seed=3)
        kind = {"C": CholeskyGaussian, "T": PrecisionCholeskyGaussian}[form]
        q = kind(DIM, batch, dtype=DTYPE)
        q.assign(Coordinates(m, root), torch.ones(batch, dtype=torch.bool))
        opt = NaturalGradientVI(
            q, rule_of(natural, log_diagonal), lr=rho, estimator=PathDerivative(InTurn(z)), step_size=Constant()
        )
        literal = reference.TanStep(form, natural, log_diagonal)

        def run(m, root, z, part):
            for one in z:
                *_, mean_step, root_step = literal.gradient(root, one, m, slope)
                m, root = literal.applied(m, root, rho * mean_step, rho * root_step)
            return (m, root)[part]

        for _ in range(5):
            opt.step(log_joint)
        members = z.movedim(0, -2)
        close(q.coordinates.vector, for_each(lambda *x: run(*x, 0), batch, m, root, members), EXACT)
        close(q.coordinates.matrix, for_each(lambda *x: run(*x, 1), batch, m, root, members), EXACT)

    def test_the_printed_log_diagonal_line_is_another(self):
        """With 1/C_ii in the Euclidean line, or C_ii in the natural one, the step is not that of the coordinates."""
        q, z = random_posterior("cholesky"), randn(1, DIM, seed=3)
        e = PathDerivative(Given(z))(q, LogJoint(log_joint))
        for natural in (True, False):
            change = rule_of(natural, True)(q, e).at(every(1.0, ())).change.matrix.diagonal()
            plain = rule_of(natural)(q, e).at(every(1.0, ())).change.matrix.diagonal()
            wrong = plain * q.scale_tril.diagonal() if natural else plain / q.scale_tril.diagonal()
            assert float((change - wrong).abs().max()) > 0.1


class TestCoordinates:
    """Gradients in (m, C), (m, T), (m, c) and with logarithms on the diagonal, against autograd and Fisher solves."""

    PLAIN = {"cholesky": "mean_root", "diagonal": "mean_scale", "precision": "mean_precision_root"}
    LOG = {"cholesky": "mean_log_root", "diagonal": "mean_log_scale", "precision": "mean_log_precision_root"}

    @rooted
    @batches_at
    def test_the_euclidean_gradient(self, name, batch, gamma):
        q, model = random_posterior(name, batch, seed=1), random_model("bernoulli_logit", batch, 17, gamma)
        coordinates, e = reference.COORDINATES[self.PLAIN[name]], Quadrature()(q, model.target)

        def expected(m, V, problem):
            return reference.gradient(coordinates, coordinates.flat(m, V), problem.loss)

        gradient = q.euclidean(e)
        actual = for_each(lambda *x: flat(name, *x), batch, gradient.vector, gradient.matrix)
        close(actual, for_each(expected, batch, q.mean, q.covariance, model.problems), IDENTITY)
        if name != "diagonal":
            assert float(gradient.matrix.triu(1).abs().max()) == 0

    @pytest.mark.sparse(5)
    @rooted
    @naturals
    @batches_at
    def test_the_log_diagonal(self, name, natural, batch, gamma):
        """Eq 4: velocities and gradients of the new coordinates, by their own Fisher matrix."""
        q, model = random_posterior(name, batch, seed=1), random_model("bernoulli_logit", batch, 17, gamma)
        coordinates, e = reference.COORDINATES[self.LOG[name]], Quadrature()(q, model.target)
        solve = reference.natural_gradient if natural else reference.gradient

        def expected(m, V, problem):
            return -solve(coordinates, coordinates.flat(m, V), problem.loss)

        change = rule_of(natural, True)(q, e).at(every(1.0, batch)).change
        actual = for_each(lambda *x: flat(name, *x), batch, change.vector, change.matrix)
        close(actual, for_each(expected, batch, q.mean, q.covariance, model.problems), IDENTITY)

    @rooted
    @batches
    def test_a_long_log_diagonal_step_stays_positive(self, name, batch):
        q = random_posterior(name, batch, seed=1)
        e = framed_packet(randn(*batch, DIM, seed=2), q.structure.from_dense(30 * random_symmetric(batch, 3)))
        before = q.structure.diagonal(q.coordinates.matrix)
        for sign in (1.0, -1.0):
            new, ok = q.moved(LogNaturalGradient()(q, e).at(every(sign, batch)))
            change = NaturalGradient()(q, e).at(every(sign, batch)).change.matrix
            expected = before * torch.exp(q.structure.diagonal(change) / before)
            assert bool(ok.all())
            close(q.structure.diagonal(new.matrix) / expected, torch.ones_like(expected), EXACT)
        assert bool(
            (before + q.structure.diagonal(change) < 0).any() or (before - q.structure.diagonal(change) < 0).any()
        )

    def test_natural_parameters_have_no_euclidean_step(self):
        with pytest.raises(NotImplementedError):
            NaturalGaussian(2).euclidean(framed_packet(torch.zeros(2), torch.eye(2)))

    def test_natural_parameters(self):
        """Eqs 6 and 7: with λ = (S m, -½Dᵀvec S) the natural gradient is ∂L/∂(m, vech(V + mmᵀ))."""
        q, model = random_posterior("natural", seed=1), random_model("bernoulli_logit", (), 17)
        m, V = q.mean, q.covariance
        problem = model.problems[0]

        def loss(first, second):
            return problem.loss(first, reference.symmetric(second) - torch.outer(first, first))

        by_mean, by_second = torch.func.grad(loss, argnums=(0, 1))(m, reference.vech(V + torch.outer(m, m)))
        velocity, D = q.tangent(Quadrature()(q, model.target)), reference.duplication(DIM)
        close(velocity.vector, by_mean, IDENTITY)
        close(-0.5 * D.mT @ reference.vec(velocity.matrix), by_second, IDENTITY)
        g, half = torch.func.grad(problem.loss, argnums=(0, 1))(m, V)
        half = 0.5 * (half + half.mT)
        close(velocity.vector, g - 2 * half @ m, IDENTITY)
        close(by_second, D.mT @ reference.vec(half), IDENTITY)

    def test_the_expected_updates_of_both_roots(self):
        """dV = -V E[∇²ℓ - S] V from C, and dS = E[∇²ℓ] - S from T: one direction."""
        e = framed_packet(torch.zeros(DIM, dtype=DTYPE), torch.eye(DIM, dtype=DTYPE))
        H = random_symmetric((), 5, definite=False)
        for name in ("cholesky", "precision"):
            q = random_posterior(name, seed=1)
            root = q.frame().dense()
            packet = e._replace(derivative=e.derivative._replace(W=root.mT @ H @ root))
            change, coordinate = -q.tangent(packet).matrix, q.coordinates.matrix
            product = change @ coordinate.mT + coordinate @ change.mT
            G = H - q.precision
            close(product, -q.covariance @ G @ q.covariance if name == "cholesky" else G, IDENTITY)


class TestDivergence:
    """The Fisher matrix as the second derivative of the divergence, and natural as Newton near the optimum."""

    @rooted
    @batches
    def test_of_a_short_step(self, name, batch):
        """2 KL(q‖q + ε a)/ε² → aᵀFa = |a|² + ½‖P‖², with an error that falls linearly."""
        q, model = random_posterior(name, batch, seed=1), random_model("bernoulli_logit", batch, 17).target
        path, other = NaturalGradient()(q, Quadrature()(q, model)), random_posterior(name, batch, seed=1)
        errors = []
        for epsilon in (1e-2, 1e-3, 1e-4):
            new, ok = q.moved(path.at(every(epsilon, batch)))
            other.assign(new, ok)
            errors.append((2 * q.kl(other).detach() / epsilon**2 / path.norm2() - 1).abs().max().item())
        for coarse, fine in itertools.pairwise(errors):
            assert 0.05 < fine / coarse < 0.2, errors

    @pytest.mark.parametrize("system", ["mean_root", "mean_precision_root"])
    def test_newton(self, system):
        """Where the posterior is q, the Hessian of L is F."""
        coordinates, m = reference.COORDINATES[system], randn(DIM, seed=1)
        V = random_symmetric((), 2)
        at = coordinates.flat(m, V)
        hessian = torch.autograd.functional.hessian(lambda x: reference.gaussian_kl(*coordinates.moments(x), m, V), at)
        close(hessian, reference.fisher(coordinates, at), IDENTITY)


class TestPathDerivative:
    """The gradient of one draw, as automatic differentiation of the root would give it."""

    @forms
    def test_is_the_derivative_of_the_draw(self, form):
        """∇ of ℓ(θ(λ)) + log q(θ(λ)), the λ of q held fixed, and the loss at the draw."""
        q, z = from_root(form, randn(DIM, seed=1), random_root((), 2)), randn(DIM, seed=3)
        fixed = torch.distributions.MultivariateNormal(q.mean, q.covariance)

        def loss(m, root):
            root = root.tril()
            theta = m + (root @ z if form == "C" else torch.linalg.solve(root.mT, z))
            return -log_joint(theta) + fixed.log_prob(theta)

        expected = torch.func.grad(loss, argnums=(0, 1))(*q.coordinates)
        e = PathDerivative(Given(z[None]))(q, LogJoint(log_joint))
        actual = q.euclidean(e)
        close(actual.vector, expected[0], IDENTITY)
        close(actual.matrix, expected[1], IDENTITY)
        close(e.value - q.entropy().detach(), loss(*q.coordinates), IDENTITY)

    @rooted
    @batches_at
    def test_nothing_is_left_at_an_exact_fit(self, name, batch, gamma):
        """Where q = p^(1/γ), each draw gives a = 0, P = 0 and the same loss."""
        q = random_posterior(name, batch, seed=1)
        S = torch.linalg.inv(q.covariance)
        m, z = q.mean.detach().clone(), randn(4, *batch, DIM, seed=2)

        def gaussian(theta):
            shift = theta - m
            return -0.5 * gamma * (shift * (S @ shift[..., None])[..., 0]).sum(-1)

        losses = []
        for one in z:
            e = PathDerivative(Given(one[None]))(q, LogJoint(gaussian, gamma))
            local = q.local(e)
            close(local.a, torch.zeros_like(local.a), IDENTITY)
            close(local.P, torch.zeros_like(local.P), IDENTITY)
            losses.append(e.value - gamma * q.entropy().detach())
        close(torch.stack(losses), losses[0].expand(4, *batch), IDENTITY)

    def test_the_default_is_one_independent_draw(self):
        draws = PathDerivative().draws
        assert type(draws) is Independent
        assert draws.num_samples == 1

    def test_stein_averages_both_triangles(self):
        q, z = random_posterior("cholesky"), randn(1, DIM, seed=3)
        one, both = (kind(Given(z))(q, LogJoint(log_joint)).derivative for kind in (PathDerivative, Stein))
        pulled = q.scale_tril.mT @ -slope(q.mean + q.scale_tril @ z[0]) - z[0]
        M = torch.outer(pulled, z[0])
        close(one.a, both.a, EXACT)
        close(one.W, torch.eye(DIM, dtype=DTYPE) + M.tril() + M.tril(-1).mT, EXACT)
        close(both.W, torch.eye(DIM, dtype=DTYPE) + 0.5 * (M + M.mT), EXACT)

    @rooted
    @batches
    def test_norm(self, name, batch):
        """⟨ĝ, g̃⟩ = |a|² + Σ_{i>j} H_ij² + ½ Σ H_ii², of one draw."""
        q, z = random_posterior(name, batch, seed=1), randn(1, *batch, DIM, seed=2)
        e = PathDerivative(Given(z))(q, LogJoint(log_joint))
        gradient, velocity = q.euclidean(e), q.tangent(e)
        product = (gradient.vector * velocity.vector).sum(-1)
        product = product + (gradient.matrix * velocity.matrix).flatten(len(batch)).sum(-1)
        close(NaturalGradient()(q, e).norm2(), product, IDENTITY)
        a, P = q.local(e)
        P = q.structure.to_dense(P)
        squares = P.tril(-1).square().sum((-2, -1)) + 0.5 * P.diagonal(dim1=-2, dim2=-1).square().sum(-1)
        close(product, a.square().sum(-1) + squares, IDENTITY)

    @forms
    @naturals
    def test_the_score_function(self, form, natural):
        """h (C z, C tril½[zzᵀ - I]) and h (T⁻ᵀz, T tril½[I - zzᵀ]), or the scores themselves, averaged over draws."""
        q, z = from_root(form, randn(DIM, seed=1), random_root((), 2)), randn(6, DIM, seed=3)
        root, eye = q.coordinates.matrix, torch.eye(DIM, dtype=DTYPE)
        inverse, sign = torch.linalg.inv(root), 1 if form == "C" else -1
        h = torch.stack([-log_joint(q.mean + q.frame().dense() @ one) - 0.5 * one @ one for one in z])
        h = (h - h.mean()) * 6 / 5  # minus the mean of the others
        if natural:
            vectors = [q.frame().dense() @ one for one in z]
            matrices = [sign * root @ reference.tril_half(torch.outer(one, one) - eye) for one in z]
        else:
            vectors = [torch.linalg.solve(q.frame().dense().mT, one) for one in z]
            matrices = [(sign * inverse.mT @ (torch.outer(one, one) - eye)).tril() for one in z]
        e = ScoreFunction(Given(z))(q, LogJoint(log_joint))
        actual = q.tangent(e) if natural else q.euclidean(e)
        close(actual.vector, torch.einsum("s,si->i", h, torch.stack(vectors)) / 6, IDENTITY)
        close(actual.matrix, torch.einsum("s,sij->ij", h, torch.stack(matrices)) / 6, IDENTITY)
        if natural:
            F = reference.root_fisher(root)
            score = reference.vech(sign * inverse.mT @ (torch.outer(z[0], z[0]) - eye))
            close(torch.linalg.solve(F, score), reference.vech(matrices[0]), IDENTITY)

    def test_a_step_of_the_precision_that_is_not_positive_definite(self):
        """S ← S + ρ(∇²ℓ - S) leaves the cone where ℓ is concave; the step of a root does not."""
        convex = LogJoint(lambda theta: theta.square().sum(-1))  # ∇²ℓ = -2
        q = NaturalGaussian(2, dtype=DTYPE)
        opt = VN(q, lr=0.9, estimator=Hessian(2), step_size=Constant())
        with pytest.warns(RejectedStepWarning, match="left the positive definite cone"):
            opt.step(convex)
        assert opt.rejections == 1
        close(q.precision, torch.eye(2, dtype=DTYPE), 0.0)
        for kind, lr in ((CholeskyGaussian, 0.9), (PrecisionCholeskyGaussian, 0.6)):  # T' = (1 - 3/2 ρ) T
            other = kind(2, dtype=DTYPE)
            SRVN(other, lr=lr, estimator=Hessian(2), step_size=Constant()).step(convex)
            assert bool(torch.linalg.eigvalsh(other.precision).min() > 0)


def packets(q, count):
    """Changes that belong to no model: dense, or a triangle, as the coordinates have it."""
    for step in range(count):
        yield framed_packet(
            randn(*q.batch_shape, DIM, seed=50 + step),
            q.structure.from_dense(random_symmetric(q.batch_shape, 70 + step, definite=False)),
        )


class TestSnngm:
    """Normalised momentum: the recursion, its norms, and what happens at zero, at NaN and at a turned column."""

    @staticmethod
    def literal(q, norm, beta, corrected, lr, count, step=None):
        """The recursion of section 4 on one vector of all coordinates, from natural gradients of exact packets."""
        m, trail = 0.0, []
        for t, e in enumerate(packets(q, count), 1):
            velocity, gradient = q.tangent(e), q.euclidean(e)
            v, g = (torch.cat([x.vector, x.matrix.flatten(len(q.batch_shape))], -1) for x in (velocity, gradient))
            size = ((v * v) if norm == "euclidean" else (v * g)).sum(-1, keepdim=True).sqrt()
            m = beta * m + (1 - beta) * v / size
            change = -lr * (m / (1 - beta**t) if corrected else m)
            vector, matrix = change.split([DIM, change.shape[-1] - DIM], -1)
            trail.append((vector, matrix.reshape(q.coordinates.matrix.shape)))
            new = Coordinates(q.coordinates.vector + vector, q.coordinates.matrix + trail[-1][1])
            q.assign(new, torch.ones(q.batch_shape, dtype=torch.bool))
        return trail

    @pytest.mark.sparse(7)
    @rooted
    @batches
    @pytest.mark.parametrize("norm", ["euclidean", "riemannian"])
    @pytest.mark.parametrize("corrected", [True, False])
    def test_the_recursion(self, name, batch, norm, corrected):
        q, expected = (random_posterior(name, batch, seed=1) for _ in range(2))
        opt = Snngm(q, lr=0.02, momentum=NormalizedMomentum(norm, beta=0.7, bias_correction=corrected))
        for e in packets(q, 4):
            opt._advance(0, Evaluation(e.value, e), opt._heading(0, e), None)
        self.literal(expected, norm, 0.7, corrected, 0.02, 4)
        assert opt.rejections == 0
        close(q.coordinates.vector, expected.coordinates.vector, EXACT)
        close(q.coordinates.matrix, expected.coordinates.matrix, EXACT)

    @rooted
    @batches
    def test_increments_have_unit_norm(self, name, batch):
        """What enters the average is a unit vector; with beta = 0 so is each step."""
        q, lr = random_posterior(name, batch, seed=1), 1e-3
        opt = Snngm(q, lr=lr, momentum=NormalizedMomentum("euclidean", beta=0.0))
        for e in packets(q, 3):
            before = q.snapshot()
            opt._advance(0, Evaluation(e.value, e), opt._heading(0, e), None)
            size2 = (q.coordinates.vector - before.vector).square().sum(-1)
            size2 = size2 + (q.coordinates.matrix - before.matrix).square().flatten(len(batch)).sum(-1)
            close(size2.sqrt() / lr, torch.ones(batch, dtype=DTYPE), IDENTITY)

    @rooted
    def test_the_riemannian_one_is_a_distance(self, name):
        """√(2 KL) of a step is its length, whatever the gradient."""
        q, lr = random_posterior(name, (4,), seed=1), 1e-4
        start = random_posterior(name, (4,), seed=1)
        opt = Snngm(q, lr=lr, momentum=NormalizedMomentum("riemannian"))
        e = next(packets(q, 1))
        opt._advance(0, Evaluation(e.value, e), opt._heading(0, e), None)
        ratio = (2 * start.kl(q).detach()).sqrt() / lr
        assert float((ratio - 1).abs().max()) < 1e-3

    def test_symmetric_coordinates_count_once(self):
        """On (S m, S) the norm is over vech."""
        q = random_posterior("natural", seed=1)
        e = next(packets(q, 1))
        velocity, before = q.tangent(e), q.snapshot()
        opt = Snngm(q, lr=1e-3)
        opt._advance(0, Evaluation(e.value, e), opt._heading(0, e), None)
        size = torch.cat([velocity.vector, reference.vech(velocity.matrix)]).norm()
        close(q.precision_mean - before.vector, -1e-3 * velocity.vector / size, IDENTITY)
        close(q.precision - before.matrix, -1e-3 * velocity.matrix / size, IDENTITY)

    @rooted
    @pytest.mark.parametrize("norm", ["euclidean", "riemannian"])
    def test_zero(self, name, norm):
        """A gradient that vanishes adds nothing: q goes on by what is averaged, and at the start it stays."""
        q = random_posterior(name, seed=1)
        zero = framed_packet(torch.zeros(DIM, dtype=DTYPE), q.structure.eye(q.mean.detach()))
        opt, start = Snngm(q, lr=0.1, momentum=NormalizedMomentum(norm)), q.snapshot()
        opt._advance(0, Evaluation(zero.value, zero), opt._heading(0, zero), None)
        close(q.coordinates.matrix, start.matrix, 0.0)
        e = next(packets(q, 1))
        opt._advance(0, Evaluation(e.value, e), opt._heading(0, e), None)
        before = {key: value.clone() for key, value in opt.state[q.mean_probe]["momentum"].items()}
        opt._advance(0, Evaluation(zero.value, zero), opt._heading(0, zero), None)
        after = opt.state[q.mean_probe]["momentum"]
        close(after["mean_vector"], 0.9 * before["mean_vector"], EXACT)
        close(after["mean_matrix"], 0.9 * before["mean_matrix"], EXACT)
        assert opt.rejections == 0

    @rooted
    @pytest.mark.parametrize("momentum", [NormalizedMomentum, Adam])
    @pytest.mark.parametrize("part", ["a", "W"])
    def test_what_is_not_finite_is_not_remembered(self, name, momentum, part):
        """Member by member: that step is not taken, and the next ones are as if it had not been."""
        q, other = (random_posterior(name, (2,), seed=1) for _ in range(2))
        opt, calm = (SRVN(x, lr=0.01, momentum=momentum()) for x in (q, other))
        first, second, third = packets(q, 3)
        value = getattr(second.derivative, part).clone()
        value[0, 1] = torch.nan
        broken = second._replace(derivative=second.derivative._replace(**{part: value}))
        opt._advance(0, Evaluation(first.value, first), opt._heading(0, first), None)
        with pytest.warns(RejectedStepWarning):
            opt._advance(0, Evaluation(broken.value, broken), opt._heading(0, broken), None)
        opt._advance(0, Evaluation(third.value, third), opt._heading(0, third), None)
        for e in (first, third):
            calm._advance(0, Evaluation(e.value, e), calm._heading(0, e), None)
        assert opt.state[q.mean_probe]["rejections"].tolist() == [1, 0]
        close(q.coordinates.matrix[0], other.coordinates.matrix[0], EXACT)
        assert opt.state[q.mean_probe]["momentum"]["averaged"].tolist() == [2, 3]

    @rooted
    @pytest.mark.parametrize("momentum", [NormalizedMomentum, Adam])
    def test_a_step_that_turns_a_column_is_not_taken(self, name, momentum):
        """The diagonal of a root stays positive: a step through zero leaves q where it is, and the average goes on."""
        q = random_posterior(name, seed=1)
        opt, before = SRVN(q, lr=50.0, momentum=momentum()), q.snapshot()
        sign = -1.0 if q.upper else 1.0  # in which the diagonal falls
        e = framed_packet(torch.zeros(DIM, dtype=DTYPE), q.structure.eye(q.mean) * (1 + 50 * sign))
        with pytest.warns(RejectedStepWarning):
            opt._advance(0, Evaluation(e.value, e), opt._heading(0, e), None)
        close(q.coordinates.matrix, before.matrix, 0.0)
        assert opt.state[q.mean_probe]["momentum"]["averaged"].item() == 1

    @pytest.mark.parametrize("momentum", [NormalizedMomentum, Adam])
    def test_a_step_that_is_not_taken_turns_nothing(self, momentum):
        """A diagonal that would change its sign in a step whose mean is not finite."""
        q = random_posterior("cholesky", seed=1)
        opt = SRVN(q, lr=0.01, momentum=momentum())
        e = next(packets(q, 1))
        opt._advance(0, Evaluation(e.value, e), opt._heading(0, e), None)
        average = opt.state[q.mean_probe]["momentum"]["mean_matrix"].clone()
        e = framed_packet(torch.full((DIM,), torch.nan, dtype=DTYPE), 50 * torch.eye(DIM, dtype=DTYPE))
        opt.param_groups[0]["lr"] = 1e3
        with pytest.warns(RejectedStepWarning):
            opt._advance(0, Evaluation(e.value, e), opt._heading(0, e), None)
        close(opt.state[q.mean_probe]["momentum"]["mean_matrix"], average, 0.0)

    @pytest.mark.parametrize(
        ("kind", "dim", "size", "lr"),
        [
            (CholeskyGaussian, 49, 1274, 0.0357),
            (PrecisionCholeskyGaussian, 49, 1274, 0.0357),
            (DiagonalGaussian, 49, 98, 0.0099),
            (CholeskyGaussian, 19, 209, 0.0145),
            (DiagonalGaussian, 19, 38, 0.0062),
            (PrecisionCholeskyGaussian, 20, 230, 0.0152),
            (DiagonalGaussian, 20, 40, 0.0063),
        ],
    )
    def test_the_default_step(self, kind, dim, size, lr):
        """α = 0.001 √ℓ, as tabulated; a batch has the same."""
        for batch in ((), (2,)):
            rate = Snngm(kind(dim, batch)).param_groups[0]["lr"]
            assert rate == pytest.approx(0.001 * math.sqrt(size), rel=1e-12)
            assert round(rate, 4) == lr

    def test_the_default_norm(self):
        for kind, norm in (
            (CholeskyGaussian, "euclidean"),
            (DiagonalGaussian, "euclidean"),
            (PrecisionCholeskyGaussian, "riemannian"),
        ):
            assert Snngm(kind(2)).momentum.norm == norm
            other = "riemannian" if norm == "euclidean" else "euclidean"
            assert Snngm(kind(2), momentum=NormalizedMomentum(other)).momentum.norm == other

    def test_several_posteriors(self):
        q, p = CholeskyGaussian(2), DiagonalGaussian(3)
        opt = Snngm([q, {"posterior": p, "lr": 0.5}])
        assert [group["lr"] for group in opt.param_groups] == [pytest.approx(0.001 * math.sqrt(5)), 0.5]
        text = (
            "Snngm has one norm, Riemannian on a PrecisionCholeskyGaussian and Euclidean otherwise; got posteriors "
            "of both kinds. Say momentum=NormalizedMomentum(norm), or use one optimizer each."
        )
        with pytest.raises(PairError, match=f"^{re.escape(text)}$"):
            Snngm([q, PrecisionCholeskyGaussian(2)])
        assert Snngm([q, PrecisionCholeskyGaussian(2)], momentum=NormalizedMomentum()).momentum.norm == "euclidean"
        with pytest.raises(InputError, match="updates posteriors such as"):
            Snngm(3.0)
        with pytest.raises(InputError, match="the list of posteriors is empty"):
            Snngm([])


class TestAdam:
    """Adam of torch on the flat coordinates, fed the same gradients."""

    @rooted
    @naturals
    def test_it_is_adam(self, name, natural):
        q, twin = (random_posterior(name, (2,), seed=1) for _ in range(2))
        opt = (SRVN if natural else RootGD)(q, lr=0.02, momentum=Adam((0.8, 0.95), eps=1e-3))
        vector, matrix = (x.detach().clone().requires_grad_() for x in twin.coordinates)
        expected = torch.optim.Adam([vector, matrix], lr=0.02, betas=(0.8, 0.95), eps=1e-3)
        for e in packets(q, 6):
            opt._advance(0, Evaluation(e.value, e), opt._heading(0, e), None)
            change = twin.tangent(e) if natural else twin.euclidean(e)
            vector.grad, matrix.grad = change
            expected.step()
            twin.assign(Coordinates(vector.detach(), matrix.detach()), torch.ones(2, dtype=torch.bool))
        assert bool((twin.structure.diagonal(twin.coordinates.matrix) > 0).all())
        close(q.coordinates.vector, twin.coordinates.vector, EXACT)
        close(q.coordinates.matrix, twin.coordinates.matrix, EXACT)

    @pytest.mark.parametrize("momentum", [NormalizedMomentum, Adam])
    def test_on_logarithms_of_the_diagonal(self, momentum):
        """The averages are of the change in the coordinates (log C_ii, C_ij)."""
        q, lr, below = random_posterior("cholesky", seed=1), 0.8, 0
        opt = NaturalGradientVI(q, LogNaturalGradient(), lr=lr, momentum=momentum())
        part, m, root = momentum(), q.mean.clone(), q.scale_tril.clone()
        state = part.init(q)
        for e in packets(q, 4):
            steep = e.derivative.W + 9 * torch.eye(DIM, dtype=DTYPE)
            e = e._replace(derivative=e.derivative._replace(W=steep))
            change = LogNaturalGradient()(q, e).at(every(1.0, ())).change
            step, state = part(q, change, NaturalGradient()(q, e).norm2, state)
            m = m + lr * step.vector
            root = reference._exp_diagonal(reference._log_diagonal(root) + lr * step.matrix)
            below += int((q.scale_tril.diagonal() + lr * step.matrix.diagonal() < 0).sum())
            opt._advance(0, Evaluation(e.value, e), opt._heading(0, e), None)
            close(q.mean, m, EXACT)
            close(q.scale_tril, root, EXACT)
        assert below > 0, "no column turns, also where a straight step would leave the cone"


class TestMomentum:
    """What both have in common: pairs, state, batches, the three ways to step."""

    def test_looking_does_not_advance_it(self):
        """`evaluate` before a step changes nothing of what is remembered."""
        model, runs = random_model("bernoulli_logit", (), 5).target, []
        for looks in (0, 2):
            q = random_posterior("cholesky", seed=1)
            opt = Snngm(q)
            for _ in range(3):
                for _ in range(looks):
                    opt.evaluate(model)
                opt.step(model)
            runs.append(q.scale_tril)
        assert torch.equal(*runs)

    def test_float32_and_conversion(self):
        q, model = random_posterior("cholesky", seed=1), random_model("bernoulli_logit", (), 5).target
        opt = Snngm(q)
        opt.step(model)
        q.float()
        state = opt._state(0)["momentum"]
        assert {state[key].dtype for key in ("mean_vector", "mean_matrix", "averaged")} == {torch.float32}

    def test_repr(self):
        assert "parts: NaturalGradient, Constant(), NormalizedMomentum" in repr(Snngm(CholeskyGaussian(2)))

    @pytest.mark.accuracy
    @pytest.mark.parametrize("kind", [CholeskyGaussian, PrecisionCholeskyGaussian])
    def test_it_fits(self, kind):
        """The ball about the optimum into which steps of 0.001 √ℓ end is small; one draw a step."""
        model = random_model("bernoulli_logit", (), 5).target
        q, best = kind(DIM, dtype=DTYPE), CholeskyGaussian(DIM, dtype=DTYPE)
        fit(best, model, progress=False)
        estimator = PathDerivative(Independent(1, torch.Generator().manual_seed(0)))
        opt = Snngm(q, lr=0.01, estimator=estimator)
        start = q.kl(best).item()
        for _ in range(600):
            opt.step(model)
        assert start > 0.2
        assert q.kl(best).item() < 0.01


class TestSlopeStop:
    """Block means, a line through the last three, a cap."""

    @staticmethod
    def run(bounds, **options):
        stop = SlopeStop(**options)
        for step, bound in enumerate(bounds, 1):
            if stop.add(bound):
                return step, stop
        return None, stop

    def test_the_slope_of_three_means(self):
        """(m_k - m_{k-2})/2 against 0.01: 0.021 rises, 0.019 does not."""
        means = [0.0, 5.0, 9.0, 9.010, 9.021, 9.029]
        step, stop = self.run([x for mean in means for x in (mean - 1, mean + 1)], block=2)
        assert step == 12
        assert stop.means == pytest.approx(means)
        assert stop.rise() == pytest.approx((9.029 - 9.010) / 2)
        assert stop.steps == 12

    @pytest.mark.accuracy
    def test_defaults(self):
        step, stop = self.run(itertools.repeat(torch.tensor(-3.0)))
        assert (step, stop.means) == (3000, [-3.0] * 3)
        rising = (float(k) for k in itertools.count())
        assert self.run(rising)[0] == 100_000
        assert self.run(0.0099e-3 * k for k in range(5000))[0] == 3000  # 0.0099 nats a block
        assert self.run(0.0101e-3 * k for k in range(5000))[0] is None

    def test_float32(self):
        """Bounds of millions of nats that rise by a quarter of a nat each five hundred steps: 0.5 a block."""
        bounds = (torch.tensor(-2e6, dtype=torch.float32) + 0.25 * (k // 500) for k in range(4000))
        step, stop = self.run(bounds)
        assert step is None
        assert stop.rise() == pytest.approx(0.5, rel=1e-6)

    def test_a_falling_bound_stops_and_a_rising_one_is_capped(self):
        assert self.run(-0.1 * k for k in range(100))[0] is None
        assert self.run((-0.1 * k for k in range(100)), block=10)[0] == 30
        assert self.run((float(k) for k in range(100)), block=10, max_steps=57)[0] == 57
        assert self.run((float(k) for k in range(100)), block=10, max_steps=50)[0] == 50

    def test_the_line_is_by_least_squares(self):
        y = [0.0, 3.0, 1.0, 7.0, 2.0]
        stop = self.run(y, block=1, blocks=5, slope=-100.0)[1]
        assert stop.rise() == pytest.approx((-2 * 0 - 3 + 7 + 2 * 2) / 10)
        assert SlopeStop().rise() == math.inf

    def test_what_is_not_finite_ends_nothing(self):
        assert self.run([1.0, 1.0, float("nan"), 1.0, 1.0], block=1)[0] is None
        assert self.run([1.0, 1.0, -math.inf, 1.0, 1.0], block=1)[0] is None
        assert self.run([-math.inf, 1.0, 1.0, 1.0], block=1)[0] == 4


class TestTheorem3:
    """The bound on E‖g_τ‖² for normalised natural gradients with momentum, corrected; and two counterexamples."""

    SCALE, START = 1e-3, torch.tensor([10.0, -10.0, 10.0], dtype=DTYPE)
    F = torch.tensor([0.5, 1.0, 2.0], dtype=DTYPE)

    def run(self, steps, alpha, beta, norm):
        """Exact gradients of 𝓛 = -s Σ(√(1 + λ²) - 1) under a constant F; squared gradient norms and averages."""
        q = DiagonalGaussian(3, dtype=DTYPE)  # for its shapes alone
        part = NormalizedMomentum(norm, beta=beta, bias_correction=False)
        state, at, zero, squares, sizes = part.init(q), self.START.clone(), torch.zeros(3, dtype=DTYPE), [], []
        for _ in range(steps):
            g = -self.SCALE * at / (1 + at.square()).sqrt()
            change, state = part(q, Coordinates(g / self.F, zero), lambda g=g: (g * g / self.F).sum(), state)
            squares.append(float(g @ g))
            sizes.append(float(change.vector.norm()))
            at = at + alpha * change.vector
        return squares, sizes

    def constants(self, steps, beta, alpha, norm):
        """R, R₁, R₂, T̃ and B(α), with Ls = s and 𝓛* - 𝓛(λ₁)."""
        R, R1, R2 = self.SCALE * math.sqrt(3), float(self.F.min()), float(self.F.max())
        gap = self.SCALE * float(((1 + self.START.square()).sqrt() - 1).sum())
        inner = alpha * math.sqrt(R1) if norm == "euclidean" else alpha
        B = gap / inner + steps * self.SCALE * inner / R1 * (beta / (1 - beta) + 0.5)
        return R, R1, R2, steps - beta / (1 - beta), B

    @staticmethod
    def tau_mean(values, beta):
        weights = [1 - beta ** (len(values) - j) for j in range(len(values))]
        return math.fsum(w * v for w, v in zip(weights, values, strict=True)) / math.fsum(weights)

    @pytest.mark.parametrize("norm", ["riemannian", "euclidean"])
    @pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
    @pytest.mark.parametrize("steps", [100, 1000])
    def test_the_corrected_bound(self, norm, beta, steps):
        alpha = 1 / math.sqrt(steps)
        squares, sizes = self.run(steps, alpha, beta, norm)
        R, R1, R2, tilde, B = self.constants(steps, beta, alpha, norm)
        assert self.tau_mean(squares, beta) <= R2 * R / (math.sqrt(R1) * tilde) * B
        assert max(sizes) <= (1 if norm == "euclidean" else 1 / math.sqrt(R1)) * (1 + 1e-12)

    @pytest.mark.parametrize("steps", [100, 1000])
    def test_the_printed_bound_fails(self, steps):
        """A bound on the norm itself, in place of its square, is violated a hundredfold."""
        alpha, beta = 1 / math.sqrt(steps), 0.9
        squares, _ = self.run(steps, alpha, beta, "riemannian")
        R, R1, R2, tilde, B = self.constants(steps, beta, alpha, "riemannian")
        printed = math.sqrt(R2 / R1) * R / tilde * B
        assert self.tau_mean([math.sqrt(x) for x in squares], beta) > 90 * printed

    def test_noise_may_defeat_it(self):
        """Unbiased, bounded, and ⟨g, ĝ⟩ of either sign: normalising follows the frequent sign, not the mean."""
        steps, beta = 100_000, 0.9
        alpha, R, at, m, squares = 1 / math.sqrt(steps), 19.0, -1.0, 0.0, []
        common = torch.rand(steps, generator=torch.Generator().manual_seed(0)).lt(0.9).tolist()
        for often in common:
            g = -at / math.sqrt(1 + at * at)
            noisy = g - 2 if often else g + 18
            m = beta * m + (1 - beta) * math.copysign(1, noisy)
            at += alpha * m
            squares.append(g * g)
        gap = math.sqrt(2) - 1
        bound = R / (steps - 9) * (gap / alpha + steps * alpha * (9 + 0.5))
        assert bound == pytest.approx(0.596, abs=0.01)
        assert self.tau_mean(squares, beta) > 0.99
        assert at < -100


def test_documentation():
    """The snippet of docs/tan.md runs as it stands, but for the number of its steps."""
    text = (pathlib.Path(__file__).parents[2] / "docs/tan.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "SlopeStop()" in snippet
    scope: dict = {}
    exec(compile(snippet.replace("SlopeStop()", "SlopeStop(block=20, max_steps=100)"), "docs/tan.md", "exec"), scope)
    assert scope["stop"].steps == 100
