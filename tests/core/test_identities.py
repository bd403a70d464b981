"""Identities that hold for every posterior, rule and packet, checked against `reference`."""

import itertools

import pytest
import reference
import torch
from helpers import (
    BASE,
    BATCHES,
    DIM,
    DTYPE,
    EXACT,
    EXCLUDED_RULES,
    IDENTITY,
    PAIRS,
    POSTERIORS,
    RULES,
    TEMPERATURES,
    batches,
    batches_at,
    close,
    every,
    for_each,
    kept,
    members,
    posteriors,
    randn,
    random_model,
    random_packet,
    random_posterior,
    random_root,
    random_symmetric,
    stationary_point,
    step,
)

from torchngvi import BWGD, SRVN, VN
from torchngvi.errors import PairError
from torchngvi.expectations import Quadrature
from torchngvi.interfaces import Affine, Frame, Framed, Local, Raw, Sites
from torchngvi.models import GaussianNoise, GeneralizedLinear
from torchngvi.numerics.linalg import cholesky, gram, positive_columns, reverse_cholesky, triangular_inverse, tril_half
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian, NaturalGaussian
from torchngvi.rules import BuresWasserstein, NaturalGradient, QuasiNewton, VariationalNewton
from torchngvi.stepsizes import Constant
from torchngvi.structures import Dense

unstructured = pytest.mark.parametrize("name", [name for name in POSTERIORS if name not in BASE])
temperatures = pytest.mark.parametrize("gamma", TEMPERATURES)
pairs = pytest.mark.parametrize(("name", "rule"), PAIRS)
vn_pairs = pytest.mark.parametrize(
    ("name", "rule"), [(n, "newton") for n in POSTERIORS] + [("natural", "natural_gradient")]
)


def moved(q, rule, e, rho):
    """Mean and covariance after one step of a rule."""
    return step(q, rule(q, e).at(every(rho, q.batch_shape)))


def mean_root(q):
    """m and the lower Cholesky root of V, without a graph."""
    return q.mean.detach().clone(), torch.linalg.cholesky(q.covariance.detach())


class TestQuadratics:
    """Where ℓ is quadratic, g = A(m - μ) and H = A: one VN step of ρ = 1/γ ends at N(μ, γ A⁻¹)."""

    @vn_pairs
    @batches
    def test_one_step_of_vn_on_linear_regression(self, name, rule, batch):
        q = random_posterior(name, batch, seed=1)
        X = (
            torch.diag(torch.tensor([0.5, -2.0, 1.0], dtype=DTYPE))
            if name in ("diagonal", *BASE)
            else randn(7, DIM, seed=2)
        )
        y, precision, noise = randn(*batch, len(X), seed=3), torch.tensor([0.3, 1.0, 2.0], dtype=DTYPE), 0.4
        model = GeneralizedLinear(X, y, GaussianNoise(noise), prior_precision=precision, prior_mean=0.75)
        NaturalGradientVI(q, RULES[rule](), lr=1.0, step_size=Constant()).step(model)
        A = X.mT @ X / noise**2 + torch.diag(precision)
        rhs = y @ X / noise**2 + 0.75 * precision
        close(q.covariance, torch.linalg.inv(A).expand(*batch, DIM, DIM), IDENTITY)
        close(q.mean.detach(), torch.linalg.solve(A, rhs[..., None])[..., 0], IDENTITY)


class TestAgainstLiteralAlgorithms:
    """Each pair of posterior and rule is the printed algorithm."""

    @batches_at
    def test_tans_form_with_the_gradient_in_the_root(self, batch, gamma):
        """Tan's Theorem 2 with G = ∂L/∂C by autograd, the full G or its lower part."""
        q, model = random_posterior("cholesky", batch, seed=1), random_model("bernoulli_logit", batch, 11, gamma)
        m, C = mean_root(q)

        def one(m, C, problem, part):
            grad_m, G = torch.func.grad(lambda m, C: problem.loss(m, C @ C.mT), argnums=(0, 1))(m, C)
            full = reference.tan(m, C, grad_m, G, 0.3)
            lower = reference.tan(m, C, grad_m, G.tril(), 0.3)
            assert torch.equal(full[1], lower[1])
            return full[part]

        e = Quadrature()(q, model.target)
        mean, covariance = moved(q, NaturalGradient(), e, 0.3)
        root = for_each(lambda *x: one(*x, 1), batch, m, C, model.problems)
        close(mean, for_each(lambda *x: one(*x, 0), batch, m, C, model.problems), EXACT)
        close(covariance, root @ root.mT, EXACT)

    @pytest.mark.sparse(5)
    @vn_pairs
    @batches_at
    def test_natural_parameters_by_a_fisher_solve(self, name, rule, batch, gamma):
        """λ' = λ - ρ F⁻¹∇L in natural parameters is VN; a diagonal q in one dimension."""
        q, model = random_posterior(name, batch, seed=1), random_model("bernoulli_logit", batch, 13, gamma)
        coordinates, rho = reference.COORDINATES["natural"], 0.4

        def one(m, V, problem):
            flat = coordinates.flat(m, V)
            new = flat - rho * reference.natural_gradient(coordinates, flat, problem.loss)
            return torch.cat([x.flatten() for x in coordinates.moments(new)])

        if name in ("diagonal", *BASE):  # masking to blocks commutes with natural coordinates

            def one(m, V, problem):
                g, H = problem.derivative(m, V)
                V = torch.linalg.inv((1 - gamma * rho) * torch.linalg.inv(V) + rho * kept(name, H))
                return torch.cat([m - rho * V @ g, V.flatten()])

        expected = for_each(one, batch, q.mean, q.covariance, model.problems)
        mean, covariance = moved(q, RULES[rule](), Quadrature()(q, model.target), rho)
        close(mean, expected[..., :DIM], IDENTITY)
        close(covariance, expected[..., DIM:].reshape(*batch, DIM, DIM), IDENTITY)


class TestNaturalGradient:
    """The tangent and the norm against Fisher matrices from autograd."""

    @pytest.mark.sparse(3)
    @posteriors
    @batches
    def test_packets_convert_into_one_another(self, name, batch):
        """Framed, Raw and Sites of the same expectation give the same tangent and the same gradient."""
        q = random_posterior(name, batch, seed=1)
        for own_design in (False, True):
            model = random_model("poisson_log", batch, 23, own_design=own_design)
            e = Quadrature()(q, model.target)
            sites = e.derivative
            g = for_each(lambda m, V, p: p.derivative(m, V)[0], batch, q.mean, q.covariance, model.problems)
            H = for_each(lambda m, V, p: p.derivative(m, V)[1], batch, q.mean, q.covariance, model.problems)
            close(sites.raw().g, g, IDENTITY)
            close(sites.raw().H, H, IDENTITY)
            root = q.frame().dense()
            W = root.mT @ H @ root
            close(sites.framed(q.frame()).a, (root.mT @ g[..., None])[..., 0], IDENTITY)
            close(sites.framed(q.frame()).W, q.structure.from_dense(W), IDENTITY)
            expected = q.tangent(e)
            for derivative in (sites.raw(), sites.framed(q.frame())):
                other = q.tangent(e._replace(derivative=derivative))
                close(other.vector, expected.vector, IDENTITY)
                close(other.matrix, expected.matrix, IDENTITY)


class TestCurves:
    """Where paths start, and where they may not move."""

    @pytest.mark.sparse(4)
    @pairs
    @pytest.mark.parametrize(("family", "gamma"), [("bernoulli_logit", 2.0), ("poisson_log", 0.5)])
    def test_stationary_point(self, name, rule, gamma, family):
        """g = 0 and γ V⁻¹ = H (its pattern) is a fixed point of every rule, and nothing near it is."""
        model = random_model(family, (), 41, gamma)
        m, V = stationary_point(name, family, gamma)
        q = POSTERIORS[name](DIM, mean=m, scale=torch.linalg.cholesky(V))
        for rho in (0.05, 0.5):
            mean, covariance = moved(q, RULES[rule](), Quadrature()(q, model.target), rho)
            close(mean, m, IDENTITY)
            close(covariance, V, IDENTITY)
        near = POSTERIORS[name](DIM, mean=m + 1e-3, scale=1.001 * torch.linalg.cholesky(V))
        mean, covariance = moved(near, RULES[rule](), Quadrature()(near, model.target), 0.05)
        assert float((mean - near.mean).abs().max()) > 1e-6
        assert float((covariance - near.covariance).abs().max()) > 1e-6


class TestAppendixB:
    """SR-VN against VN in powers of ρ (Kumar et al., Appendix B)."""

    @staticmethod
    def terms(gamma):
        q = random_posterior("cholesky", (), seed=1)
        e = random_packet((), 47, gamma)
        C = q.scale_tril
        W = C.mT @ e.derivative.H @ C
        return q, e, C, W, reference.tril_half(W), torch.eye(DIM, dtype=DTYPE)

    @temperatures
    @pytest.mark.parametrize("rho", [0.01, 0.3, 0.9])
    def test_the_exact_form(self, gamma, rho):
        """V' = C [I + ρ(γI - W) + ρ²(γ²I/4 - γW/2 + ŴŴᵀ)] Cᵀ (39)."""
        q, e, C, W, half, eye = self.terms(gamma)
        square = gamma**2 * eye / 4 - gamma * W / 2 + half @ half.mT
        expected = C @ (eye + rho * (gamma * eye - W) + rho**2 * square) @ C.mT
        close(moved(q, NaturalGradient(), e, rho)[1], expected, EXACT)

    @temperatures
    def test_the_difference_is_of_second_order(self, gamma):
        """(V_SR - V_VN)/ρ² → C [-¾γ²I + 3/2 γW - W² + ŴŴᵀ] Cᵀ, with an error that falls linearly."""
        q, e, C, W, half, eye = self.terms(gamma)
        bracket = C @ (-0.75 * gamma**2 * eye + 1.5 * gamma * W - W @ W + half @ half.mT) @ C.mT
        errors = []
        for rho in (1e-2, 1e-3, 1e-4):
            gap = moved(q, NaturalGradient(), e, rho)[1] - moved(q, VariationalNewton(), e, rho)[1]
            errors.append(float((gap / rho**2 - bracket).norm() / bracket.norm()))
        assert errors[0] < 0.5
        for coarse, fine in itertools.pairwise(errors):
            assert 0.08 < fine / coarse < 0.13, errors


class TestFrames:
    """What changes with the root, and what does not."""

    @batches
    def test_rotations_keep_the_norm_and_the_congruence(self, batch):
        """The natural posterior's root T⁻ᵀ is C times a rotation: same norm, same VN step."""
        q = random_posterior("cholesky", batch, seed=1)
        other = NaturalGaussian(DIM, batch, mean=q.mean, scale=q.scale_tril)
        e = random_packet(batch, 59)
        close(other.norm2(other.local(e)), q.norm2(q.local(e)), IDENTITY)
        rotation = torch.linalg.solve(q.scale_tril, other.frame().dense())
        close(rotation @ rotation.mT, torch.eye(DIM, dtype=DTYPE).expand(*batch, DIM, DIM), IDENTITY)
        here, there = q.local(e), other.local(e)
        close(there.a, (rotation.mT @ here.a[..., None])[..., 0], IDENTITY)
        close(there.P, rotation.mT @ here.P @ rotation, IDENTITY)

    @pytest.mark.parametrize("name", ["cholesky", "diagonal"])
    def test_a_step_that_flips_a_column_of_the_printed_root_leaves_the_domain(self, name):
        """On the way a variance was zero; shorter SR-VN steps are the printed ones."""
        H, mu = kept(name, random_symmetric((), seed=67)), randn(DIM, seed=68)
        q = random_posterior(name, (), seed=1)
        q.initialize_(q.mean, 1.6 * q.scale_tril)
        m, C = mean_root(q)
        e = random_packet((), 0)._replace(derivative=Raw(H @ (m - mu), H))
        seen = set()
        for rho in (0.1, 0.3, 0.9, 2.0, 5.0):
            new, ok = q.moved(NaturalGradient()(q, e).at(every(rho, ())))
            mean, root = reference.srvn(m, C, H @ (m - mu), H, rho)
            assert bool(ok) == bool((root.diagonal() > 0).all())
            seen.add(bool(ok))
            if ok:
                close(new.vector, mean, IDENTITY)
                close(q.structure.to_dense(new.matrix), root, IDENTITY)
        assert seen == {True, False}


class TestDivergence:
    """KL of any two posteriors."""

    @pytest.mark.sparse(4)
    @pytest.mark.parametrize(("name", "other"), list(itertools.product(POSTERIORS, POSTERIORS)))
    def test_of_two(self, name, other):
        """Of a batch or of one, to a batch or to one, also where the batch is as large as D."""
        for batch, of_other in (((2, DIM), (2, DIM)), ((DIM,), ()), ((), (DIM,))):
            q, p = random_posterior(name, batch, seed=1), random_posterior(other, of_other, seed=5)
            both = torch.broadcast_shapes(batch, of_other)
            moments = q.mean, q.covariance, p.mean, p.covariance
            given = [x.expand(*both, *x.shape[-k:]) for x, k in zip(moments, (1, 2, 1, 2), strict=True)]
            close(q.kl(p), for_each(reference.gaussian_kl, both, *given), IDENTITY)
            close(q.kl(q), torch.zeros(batch, dtype=DTYPE), EXACT)


class TestQuasiNewton:
    """The memory acts as dense BFGS in coordinates where |a|² + ½‖P‖²_F is the Euclidean norm."""

    @staticmethod
    def packed(name, x):
        """(*batch, K): a, the diagonal of P over √2, and its lower entries."""
        if name == "diagonal":
            return torch.cat([x.a, x.P / 2**0.5], -1)
        rows, columns = torch.tril_indices(DIM, DIM, -1)
        return torch.cat([x.a, x.P.diagonal(dim1=-2, dim2=-1) / 2**0.5, x.P[..., rows, columns]], -1)

    @staticmethod
    def unpacked(name, flat):
        a, diagonal, lower = flat.split([DIM, DIM, flat.shape[-1] - 2 * DIM], -1)
        if name == "diagonal":
            return Local(a, 2**0.5 * diagonal)
        rows, columns = torch.tril_indices(DIM, DIM, -1)
        P = torch.diag_embed(2**0.5 * diagonal)
        P[..., rows, columns] = P[..., columns, rows] = lower
        return Local(a, P)

    @staticmethod
    def bfgs(pairs, gradient):
        """B g from B = I and B' = (I - s yᵀ/sᵀy) B (I - y sᵀ/sᵀy) + s sᵀ/sᵀy, the oldest pair first."""
        eye = torch.eye(len(gradient), dtype=DTYPE)
        B = eye
        for s, y in pairs:
            left = eye - torch.outer(s, y) / (s @ y)
            B = left @ B @ left.mT + torch.outer(s, s) / (s @ y)
        return B @ gradient

    @unstructured
    @batches
    def test_it_is_bfgs(self, name, batch):
        """Five steps of a memory of three on a quadratic, each member its own."""
        q, memory, size = random_posterior(name, batch), 3, 2 * DIM + (0 if name == "diagonal" else 3)
        root = 0.5 * randn(*batch, size, size, seed=81)
        A = root @ root.mT + 0.2 * torch.eye(size, dtype=DTYPE)
        x, rho = 0.3 * randn(*batch, size, seed=82), every(0.2, batch)
        accelerate = QuasiNewton(memory)
        state, history, went = accelerate.init(q), [], every(0.0, batch)
        for _ in range(6):
            g = (A @ x[..., None])[..., 0]
            (bent, slope), new = accelerate(q, self.unpacked(name, g), went, state)
            direction = self.packed(name, bent)
            recent = history[-memory:]
            expected = for_each(
                lambda g, *flat: self.bfgs(list(zip(flat[::2], flat[1::2], strict=True)), g),
                batch,
                g,
                *(part for pair in recent for part in pair),
            )
            close(direction, expected, IDENTITY)
            close(slope, (g * direction).sum(-1), EXACT)
            step = -rho[..., None] * direction
            assert float(step.norm(dim=-1).max()) < 1.0, "longer steps are not remembered"
            x = x + step
            history.append((step, (A @ step[..., None])[..., 0]))
            state, went = {**state, **new}, rho

    def test_what_is_not_remembered(self):
        """A rejected step, negative curvature, and a step longer than one forget or skip the pair."""
        q, accelerate = random_posterior("diagonal", (4,)), QuasiNewton(2)
        g = randn(1, 2 * DIM, seed=83).expand(4, 2 * DIM)
        state = accelerate.init(q)
        _, new = accelerate(q, self.unpacked("diagonal", g), torch.zeros(4, dtype=DTYPE), state)
        went = torch.tensor([0.1, 0.0, 0.1, 10.0], dtype=DTYPE)
        change = torch.tensor([0.5, 0.5, 1.5, 0.5], dtype=DTYPE)[:, None]
        (bent, _), new = accelerate(q, self.unpacked("diagonal", change * g), went, {**state, **new})
        assert new["kept"].tolist() == [[1.0, 0.0, 0.0, 0.0], [0.0] * 4]
        direction = self.packed("diagonal", bent)
        close(direction[1:], (change * g)[1:], EXACT)
        close(direction[0], 0.1 / 0.5 * 0.5 * g[0], IDENTITY)  # y = -g/2 for s = -g/10: a fifth of the gradient


class TestCone:
    """A move says which members stay in the cone, and `assign` writes those only."""

    @pytest.mark.parametrize("name", ["cholesky", "diagonal"])
    def test_singular_affine_maps(self, name):
        q = random_posterior(name, (2,), seed=1)
        M = torch.eye(DIM, dtype=DTYPE).repeat(2, 1, 1)
        M[1, 2, 2] = torch.nan
        assert q.moved(Affine(q.structure.from_dense(M), q.mean))[1].tolist() == [True, False]
        M[1, 2, 2] = 0.0
        assert q.moved(Affine(q.structure.from_dense(M), q.mean))[1].tolist() == [True, False]


class TestRefusedPairs:
    """A pair that cannot work is refused with a sentence."""

    @pytest.mark.parametrize(("name", "rule"), list(itertools.product(POSTERIORS, RULES)))
    def test_exactly_the_listed_pairs(self, name, rule):
        q = POSTERIORS[name](DIM)
        if (name, rule) in EXCLUDED_RULES:
            with pytest.raises(PairError, match="cannot do"):
                NaturalGradientVI(q, RULES[rule](), lr=0.1, step_size=Constant())
        else:
            assert NaturalGradientVI(q, RULES[rule](), lr=0.1, step_size=Constant()).posteriors == [q]

    def test_the_named_methods_choose_their_rules(self):
        assert type(VN(CholeskyGaussian(DIM)).rule) is VariationalNewton
        assert type(VN(DiagonalGaussian(DIM)).rule) is VariationalNewton
        assert type(VN(NaturalGaussian(DIM)).rule) is NaturalGradient
        assert type(SRVN(CholeskyGaussian(DIM)).rule) is NaturalGradient
        assert type(BWGD(CholeskyGaussian(DIM), lr=0.1, step_size=Constant()).rule) is BuresWasserstein


class TestAlgebra:
    """The factorisations behind the verbs of the structures."""

    @batches
    def test_factorisations(self, batch):
        S, L = random_symmetric(batch, 1), random_root(batch, 2)
        close(cholesky(S)[0], torch.linalg.cholesky(S), EXACT)
        upper, ok = reverse_cholesky(S)
        close(upper @ upper.mT, S, EXACT)
        assert bool(ok.all())
        close(triangular_inverse(L) @ L, torch.eye(DIM, dtype=DTYPE).expand(*batch, DIM, DIM), EXACT)
        close(tril_half(S) + tril_half(S).mT, S, EXACT)
        signs = torch.where(randn(*batch, DIM, seed=3) > 0, 1.0, -1.0).to(DTYPE)
        fixed, ok = positive_columns(L * signs[..., None, :])
        close(fixed, L, 0.0)
        assert bool(ok.all())

    @batches
    @pytest.mark.parametrize("size", [3, 65, 129, 203])
    def test_in_blocks(self, batch, size):
        """Large matrices go block by block, in sizes that do not divide; rows may be shared by a batch of weights."""
        for rows, weights in ((batch, batch), ((), batch), (batch, ())):
            X, w = randn(*rows, 7, size, seed=0), randn(*weights, 7, seed=1)
            close(gram(X, w), torch.einsum("...ni,...n,...nj->...ij", X, w, X), EXACT)
        L = 0.05 * randn(*batch, size, size, seed=2).tril() + 2 * torch.eye(size, dtype=DTYPE)
        inverse = triangular_inverse(L)
        close(inverse @ L, torch.eye(size, dtype=DTYPE).expand_as(L), EXACT)
        close(inverse.tril(), inverse, 0.0)

    @batches
    def test_a_large_factorisation(self, batch):
        """It goes block by block; the member whose matrix has none is told, whichever half shows it."""
        size = 267
        L = 0.05 * randn(*batch, size, size, seed=2).tril() + 2 * torch.eye(size, dtype=DTYPE)
        S = L @ L.mT
        for matrix in (S, S.mT.contiguous().mT):
            factor, ok = cholesky(matrix)
            close(factor, L, EXACT)
            close(factor.tril(), factor, 0.0)
            assert bool(ok.all())
        with_graph = S.clone().requires_grad_()
        close(cholesky(with_graph)[0].detach(), L, EXACT)
        for place in (0, size - 1):
            for value in (-1.0, torch.nan, torch.inf):
                spoilt = torch.stack([S, S])
                spoilt[0, ..., place, place] = value
                factor, ok = cholesky(spoilt)
                assert not bool(ok[0].any())
                assert bool(ok[1].all())
                close(factor[1], L, EXACT)

    @batches
    def test_rows_of_a_large_frame(self, batch):
        """The curvature of sites, of which one triangle is multiplied out, is all of Σ β_n x_n x_nᵀ."""
        size = 131
        frame = Frame(
            torch.zeros(*batch, size, dtype=DTYPE), torch.eye(size, dtype=DTYPE).expand(*batch, -1, -1), Dense(size)
        )
        X, beta = randn(*batch, 7, size, seed=0), randn(*batch, 7, seed=1)
        W = Sites(X, X, beta, beta, None, frame.mean).framed(frame).W
        close(W, torch.einsum("...ni,...n,...nj->...ij", X, beta, X), EXACT)

    def test_a_failed_factorisation_is_told_member_by_member(self):
        S = torch.stack([4 * torch.eye(2), -torch.eye(2), torch.full((2, 2), torch.nan)]).to(DTYPE)
        for function in (cholesky, reverse_cholesky):
            factor, ok = function(S)
            assert ok.tolist() == [True, False, False]
            assert torch.equal(factor[0], 2 * torch.eye(2, dtype=DTYPE))


def test_framed_is_itself():
    packet = Framed(randn(DIM, seed=1), random_symmetric((), 2))
    assert packet.framed(random_posterior("cholesky").frame()) is packet


def test_members_are_all_visited():
    """The helper behind the batched comparisons, so that none of them is empty."""
    assert [len(list(members(batch))) for batch in BATCHES] == [1, 2, 3, 6]
