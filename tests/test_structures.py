"""The algebra of every pattern against dense matrices: closure, each verb, the metric, the refusals."""

import re
import warnings

import pytest
import torch
from arrow import ScalarArrow
from cases import BATCHES, DTYPE, EXACT, IDENTITY, close, randn

from torchngvi import CholeskyGaussian, NaturalGaussian, NaturalGradientVI, PrecisionCholeskyGaussian, rules
from torchngvi.averaging import ExpectationAverage
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Coordinates, Cost, Expectation, Frame, Framed, Local, Raw, RootTangent, Rule
from torchngvi.rules import LocalExponential, NormalizedMomentum, QuasiNewton
from torchngvi.structures import Dense, Diagonal, EqualBlocks, FullAlgebra, UnequalBlocks, block_diagonal

DIM = 6
PATTERNS = {
    "dense": Dense(DIM),
    "diagonal": Diagonal(DIM),
    "equal": EqualBlocks(3, 2),
    "unequal": UnequalBlocks((2, 1, 3)),
    "scattered": UnequalBlocks((1, 2, 1, 2)),
    "arrow": ScalarArrow(DIM),
}
FULL = [name for name, pattern in PATTERNS.items() if isinstance(pattern, FullAlgebra)]
batches = pytest.mark.parametrize("batch", BATCHES, ids=str)
patterns = pytest.mark.parametrize("name", PATTERNS)
full = pytest.mark.parametrize("name", FULL)


def mask(pattern) -> torch.Tensor:
    """1 where a symmetric matrix of the pattern has an entry, (D, D)."""
    rows, columns = (x.flatten() for x in pattern.positions())
    kept = torch.zeros(DIM, DIM, dtype=DTYPE)
    kept[rows, columns] = kept[columns, rows] = 1.0
    return kept


def root_of(pattern, batch=(), seed=0) -> torch.Tensor:
    """A dense root in the pattern, (*batch, D, D)."""
    x = 0.4 * randn(*batch, DIM, DIM, seed=seed)
    lower = x.tril(-1) + torch.diag_embed(0.7 * torch.exp(0.6 * x.diagonal(dim1=-2, dim2=-1)))
    return lower * mask(pattern)


def symmetric_of(pattern, batch=(), seed=0) -> torch.Tensor:
    x = randn(*batch, DIM, DIM, seed=seed)
    return 0.5 * (x + x.mT) * mask(pattern)


def definite_of(pattern, batch=(), seed=0) -> torch.Tensor:
    root = root_of(pattern, batch, seed)
    return root @ root.mT


@patterns
class TestPattern:
    @batches
    def test_it_is_a_group(self, name, batch):
        """Products, inverses and congruences of dense matrices with the pattern have it again."""
        pattern = PATTERNS[name]
        outside = 1 - mask(pattern)
        L, M, A = root_of(pattern, batch, 1), root_of(pattern, batch, 2), symmetric_of(pattern, batch, 3)
        for product in (L @ M, torch.linalg.inv(L), L @ A @ L.mT, L @ L.mT, torch.linalg.cholesky(L @ L.mT)):
            assert float((product * outside).abs().max()) < 1e-13

    @batches
    def test_stored_and_written_out(self, name, batch):
        pattern = PATTERNS[name]
        L, A, x = root_of(pattern, batch, 1), symmetric_of(pattern, batch, 2), randn(*batch, DIM, seed=3)
        root, symmetric = pattern.from_dense(L), pattern.from_dense(A)
        assert root.shape == (*batch, *pattern.shape)
        close(pattern.to_dense(root), L, 0.0)
        close(pattern.full(symmetric), A, 0.0)
        close(pattern.to_dense(pattern.eye(x)), torch.eye(DIM, dtype=DTYPE).expand(*batch, DIM, DIM), 0.0)
        close(pattern.diagonal(symmetric), A.diagonal(dim1=-2, dim2=-1), 0.0)
        replaced = L.clone()
        replaced.diagonal(dim1=-2, dim2=-1).copy_(x)
        close(pattern.to_dense(pattern.with_diagonal(root, x)), replaced, 0.0)
        half = A.tril()
        half.diagonal(dim1=-2, dim2=-1).mul_(0.5)
        close(pattern.to_dense(pattern.tril_half(symmetric)), half, 0.0)
        close(pattern.full(pattern.one_sided(pattern.from_dense(A.tril()))), A, 0.0)
        close(pattern.to_dense(pattern.tril(symmetric)), A.tril(), 0.0)
        close(pattern.scaled(x[..., 0], root), pattern.from_dense(x[..., 0, None, None] * L), 0.0)
        assert bool(pattern.is_finite(root).all())
        assert pattern.parameters == int(mask(pattern).tril().sum())

    @batches
    @pytest.mark.parametrize("sample", [(), (3,), (2, 3)], ids=str)
    def test_vectors(self, name, batch, sample):
        """Samples on the left of the batch, with sizes that coincide."""
        pattern = PATTERNS[name]
        L, A, x = root_of(pattern, batch, 1), symmetric_of(pattern, batch, 2), randn(*sample, *batch, DIM, seed=3)
        root, symmetric = pattern.from_dense(L), pattern.from_dense(A)

        def times(matrix):
            return torch.einsum("...ij,...j->...i", matrix, x)

        close(pattern.mv(root, x), times(L), EXACT)
        close(pattern.tmv(root, x), times(L.mT), EXACT)
        close(pattern.solve(root, x), times(torch.linalg.inv(L)), IDENTITY)
        close(pattern.tsolve(root, x), times(torch.linalg.inv(L).mT), IDENTITY)
        close(pattern.smv(symmetric, x), times(A), EXACT)
        close(pattern.neighbours(x), x @ mask(pattern), EXACT)
        for upper, C in ((False, L), (True, L.mT)):
            frame = Frame(x, root, pattern, upper)
            close(frame.push(x), times(C), EXACT)
            close(frame.pull(x), times(C.mT), EXACT)
            close(frame.dense(), C, 0.0)
            close(frame.variance, (C @ C.mT).diagonal(dim1=-2, dim2=-1), EXACT)

    @batches
    def test_matrices(self, name, batch):
        pattern = PATTERNS[name]
        L, M, A = root_of(pattern, batch, 1), root_of(pattern, batch, 2), symmetric_of(pattern, batch, 3)
        root, other, symmetric = (pattern.from_dense(x) for x in (L, M, A))
        kept, w = mask(pattern), randn(*batch, DIM, seed=4)
        close(pattern.to_dense(pattern.matmul(root, other)), L @ M, EXACT)
        close(pattern.to_dense(pattern.inverse(root)), torch.linalg.inv(L), IDENTITY)
        close(pattern.to_dense(pattern.tmatmul(root, symmetric)), (L.mT @ A).tril() * kept, EXACT)
        close(pattern.full(pattern.congruence(root, symmetric)), L @ A @ L.mT, EXACT)
        close(pattern.to_dense(pattern.scale_columns(root, w)), L * w[..., None, :], EXACT)
        factor, ok = pattern.cholesky(pattern.from_dense(L @ L.mT))
        assert ok.shape == batch
        assert bool(ok.all())
        close(pattern.to_dense(factor), L, IDENTITY)
        signs = torch.where(w > 0, 1.0, -1.0).to(DTYPE)
        turned, ok = pattern.positive_root(pattern.from_dense(L * signs[..., None, :]))
        close(pattern.to_dense(turned), L, EXACT)
        assert bool(ok.all())

    @batches
    @pytest.mark.parametrize("upper", [False, True])
    def test_what_the_data_bring(self, name, batch, upper):
        """Rows, draws and weights in the frame, masked by the pattern."""
        pattern = PATTERNS[name]
        L, X, H = root_of(pattern, batch, 1), randn(*batch, 5, DIM, seed=2), randn(*batch, DIM, DIM, seed=3)
        H, w, root = H + H.mT, randn(*batch, DIM, seed=4), pattern.from_dense(L)
        C, kept = (L.mT if upper else L), mask(pattern)
        frame = Frame(w, root, pattern, upper)
        close(frame.rows(X), X @ C, EXACT)
        close(frame.rows(X.reshape(-1, 5, DIM)[0]), X.reshape(-1, 5, DIM)[0] @ C, EXACT)
        close(pattern.full(frame.conjugate(H)), (C.mT @ H @ C) * kept, EXACT)
        close(pattern.full(frame.gram(w)), (C.mT @ torch.diag_embed(w) @ C) * kept, EXACT)
        close(pattern.full(frame.marginals()), (C @ C.mT) * kept, EXACT)
        outer = X.mT @ (2 * X + 1)
        close(pattern.to_dense(pattern.tril(pattern.lower(X, 2 * X + 1))), outer.tril() * kept, EXACT)
        close(pattern.full(pattern.sym_lower(X, 2 * X + 1)), 0.5 * (outer + outer.mT) * kept, EXACT)

    @pytest.mark.parametrize("upper", [False, True])
    def test_sparse_rows(self, name, upper):
        pattern = PATTERNS[name]
        L, X, b = root_of(pattern, (), 1), randn(5, DIM, seed=2), randn(5, seed=3)
        X = X * (X > 0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
            rows = X.to_sparse_csr()
        C, root = (L.mT if upper else L), pattern.from_dense(L)
        gram = pattern.sparse_gram(root, rows, b, upper)
        close(pattern.full(gram), C.mT @ X.mT @ torch.diag(b) @ X @ C * mask(pattern), EXACT)
        close(pattern.sparse_row_norms(root, rows, upper), (X @ C).square().sum(-1), EXACT)

    @batches
    def test_the_metric(self, name, batch):
        """`flat` is isometric for ½⟨A, A'⟩, whatever is stored once or twice."""
        pattern = PATTERNS[name]
        A, B = symmetric_of(pattern, batch, 1), symmetric_of(pattern, batch, 2)
        stored = [pattern.from_dense(x) for x in (A, B)]
        flat = [pattern.flat(x) for x in stored]
        assert flat[0].shape == (*batch, pattern.parameters)
        close((flat[0] * flat[1]).sum(-1), 0.5 * (A * B).sum((-2, -1)), EXACT)
        close(pattern.unflat(flat[0]), stored[0], EXACT)
        close(pattern.norm2(stored[0]), A.square().sum((-2, -1)), EXACT)
        L = root_of(pattern, batch, 3)
        close(pattern.entries_norm2(pattern.from_dense(L)), L.square().sum((-2, -1)), EXACT)
        close(pattern.log_det(pattern.from_dense(L)), torch.linalg.slogdet(L)[1], EXACT)

    def test_a_failed_factorisation_is_told_member_by_member(self, name):
        pattern = PATTERNS[name]
        good = definite_of(pattern, (), 1)
        S = torch.stack([good, -good, torch.full_like(good, torch.nan)])
        factor, ok = pattern.cholesky(pattern.from_dense(S))
        assert ok.tolist() == [True, False, False]
        close(pattern.to_dense(factor[0]), torch.linalg.cholesky(good), IDENTITY)
        roots = torch.stack([root_of(pattern, (), 2)] * 3)
        roots[1, 0, 0], roots[2, -1, -1] = 0.0, torch.inf
        assert pattern.positive_root(pattern.from_dense(roots))[1].tolist() == [True, False, False]

    def test_an_index_made_without_gradients_serves_with_them(self, name):
        pattern = PATTERNS[name]
        A = pattern.from_dense(symmetric_of(pattern, (), 1))
        with torch.inference_mode():
            pattern.flat(A)
        A = A.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(pattern.flat(A).square().sum(), A)
        assert bool(gradient.isfinite().all())


@full
class TestFullAlgebra:
    @batches
    def test_verbs(self, name, batch):
        pattern = PATTERNS[name]
        kept = mask(pattern)
        L, A, B = root_of(pattern, batch, 1), symmetric_of(pattern, batch, 2), randn(*batch, DIM, DIM, seed=3) * kept
        S, x = definite_of(pattern, batch, 4), randn(*batch, DIM, seed=5)
        root, symmetric, other = (pattern.from_dense(x) for x in (L, A, B))
        close(pattern.to_dense(pattern.matmul(symmetric, other)), A @ B, EXACT)
        close(pattern.mv(other, x), (B @ x[..., None])[..., 0], EXACT)
        close(pattern.to_dense(pattern.transpose(other)), B.mT, 0.0)
        close(pattern.to_dense(pattern.exp(symmetric)), torch.linalg.matrix_exp(A), EXACT)
        close(pattern.to_dense(pattern.right_solve(other, root)), B @ torch.linalg.inv(L), IDENTITY)
        close(pattern.entries_norm2(other), B.square().sum((-2, -1)), EXACT)
        lower = pattern.to_dense(pattern.lower_root(other))
        close(lower.tril(), lower, 0.0)
        close(lower @ lower.mT, B @ B.mT, EXACT)
        factor, ok = pattern.reverse_cholesky(pattern.from_dense(S))
        assert bool(ok.all())
        assert ok.shape == batch
        factor = pattern.to_dense(factor)
        close(factor.tril(), factor, 0.0)
        close(factor.mT @ factor, S, EXACT)
        a, W = pattern.unconjugate(root, x, symmetric)
        close(a, torch.linalg.solve(L.mT, x[..., None])[..., 0], IDENTITY)
        close(pattern.to_dense(W), torch.linalg.inv(L).mT @ A @ torch.linalg.inv(L), IDENTITY)

    def test_a_failed_reverse_factorisation_is_told_member_by_member(self, name):
        pattern = PATTERNS[name]
        good = definite_of(pattern, (), 1)
        S = torch.stack([good, -good, torch.full_like(good, torch.nan)])
        assert pattern.reverse_cholesky(pattern.from_dense(S))[1].tolist() == [True, False, False]


FAMILIES = [(CholeskyGaussian, name) for name in FULL] + [
    (kind, name) for kind in (PrecisionCholeskyGaussian, NaturalGaussian) for name in PATTERNS
]


def posterior_of(kind, name, batch=(), seed=0):
    """Away from zero and the identity."""
    pattern = PATTERNS[name]
    q = kind(DIM, batch, structure=pattern, mean=randn(*batch, DIM, seed=seed), dtype=DTYPE)
    matrix = root_of(pattern, batch, seed + 1)
    matrix = matrix @ matrix.mT if kind is NaturalGaussian else matrix
    mean = q.mean.clone()
    vector = (matrix @ mean[..., None])[..., 0] if kind is NaturalGaussian else mean
    q.assign(Coordinates(vector, pattern.from_dense(matrix)), torch.ones(batch, dtype=torch.bool))
    return q


@pytest.mark.parametrize(("kind", "name"), FAMILIES)
class TestFisher:
    """Norms, metrics and natural gradients against Fisher matrices from autograd, in the entries that q has."""

    @staticmethod
    def moments(kind, pattern, flat):
        """Mean and covariance of the coordinates (vector, entries on and below the diagonal), written out."""
        vector, entries = flat[:DIM], flat[DIM:]
        rows, columns = torch.where(mask(pattern).tril() > 0)
        lower = torch.zeros(DIM, DIM, dtype=DTYPE).index_put((rows, columns), entries)
        if kind is CholeskyGaussian:
            return vector, lower @ lower.mT
        if kind is PrecisionCholeskyGaussian:
            return vector, torch.linalg.inv(lower @ lower.mT)
        V = torch.linalg.inv(lower + lower.tril(-1).mT)
        return V @ vector, V

    def test_the_tangent_and_every_norm(self, kind, name):
        pattern = PATTERNS[name]
        q = posterior_of(kind, name, seed=1)
        g, H = randn(DIM, seed=3), symmetric_of(PATTERNS["dense"], (), 4)
        rows, columns = torch.where(mask(pattern).tril() > 0)

        def entries(vector, matrix):
            return torch.cat([vector, pattern.to_dense(matrix)[rows, columns]])

        here = entries(*q.coordinates)
        V = q.covariance
        G = H - torch.linalg.inv(V)

        def divergence(there):
            mean, other = self.moments(kind, pattern, there)
            shift, inverse = mean - q.mean, torch.linalg.inv(other)
            return 0.5 * ((inverse @ V).trace() + shift @ inverse @ shift + torch.logdet(other))

        def objective(there):  # to first order, what the packet (g, H) is the derivative of
            mean, other = self.moments(kind, pattern, there)
            return g @ mean + 0.5 * (G * other).sum()

        fisher = torch.func.hessian(divergence)(here)
        slope = torch.func.grad(objective)(here)
        expected = torch.linalg.solve(fisher, slope)
        e = Expectation(torch.zeros((), dtype=DTYPE), Raw(g, H), 1.0, True, Cost(1, 1))
        close(entries(*q.tangent(e)), expected, IDENTITY)
        local = q.local(e)
        close(q.norm2(local), slope @ expected, IDENTITY)
        close(q.norm2(local), local.a @ local.a + pattern.flat(local.P).square().sum(), EXACT)
        if RootTangent in q.takes:
            close(entries(*q.euclidean(e)), slope, IDENTITY)
        back = q.unframe(*Raw(g, H).framed(q.frame()))
        close(back[0], g, IDENTITY)
        if name == "dense":
            close(pattern.full(back[1]), H, IDENTITY)

    def test_the_memory_and_the_momentum_measure_with_it(self, kind, name):
        """QuasiNewton's first pair, and a Riemannian unit step: both in the metric of q."""
        q = posterior_of(kind, name, seed=1)
        e = Expectation(
            torch.zeros((), dtype=DTYPE),
            Raw(randn(DIM, seed=3), 5 * definite_of(Dense(DIM), (), 4)),
            1.0,
            True,
            Cost(1, 1),
        )
        local, memory = q.local(e), QuasiNewton()
        (bent, slope), new = memory(q, local, memory.init(q))
        close(slope, q.norm2(local), EXACT)
        other = Local(0.9 * local.a, 0.9 * local.P)
        state = {**memory.init(q), **new, "went": torch.tensor(0.01, dtype=DTYPE)}
        (_, _), new = memory(q, other, state)
        change = Local(other.a - local.a, other.P - local.P)
        assert new["kept"].tolist()[0] == 1
        close(new["y"][0].square().sum(), q.norm2(change), EXACT)
        close(new["s"][0].norm(), 0.01 * q.norm2(local).sqrt(), EXACT)
        momentum = NormalizedMomentum("riemannian", beta=0.0)
        velocity = q.tangent(e)
        change, _ = momentum(q, velocity, lambda: q.norm2(local), momentum.init(q))
        close(change.vector, velocity.vector / q.norm2(local).sqrt(), EXACT)

    @batches
    def test_densities(self, kind, name, batch):
        """Log density, entropy, draws and divergences are those of the Gaussian written out."""
        q, p = posterior_of(kind, name, batch, 1), posterior_of(kind, name, batch, 5)
        written, other = (
            torch.distributions.MultivariateNormal(x.mean.detach(), x.covariance.detach()) for x in (q, p)
        )
        theta = randn(4, *batch, DIM, seed=9)
        close(q.log_prob(theta), written.log_prob(theta), IDENTITY)
        close(q.entropy(), written.entropy(), IDENTITY)
        close(q.kl(p), torch.distributions.kl_divergence(written, other), IDENTITY)
        close(q.variance, q.covariance.diagonal(dim1=-2, dim2=-1), EXACT)
        z = randn(3, *batch, DIM, seed=10)
        close(q.whiten(q.push_noise(z) - q.mean), z, IDENTITY)


FACTORIES = {rules.ProjectedSquareRoot: lambda: rules.ProjectedSquareRoot(0.1)}
NEED_FULL = [
    rule for rule in vars(rules).values() if isinstance(rule, type) and issubclass(rule, Rule) and rule.full_algebra
]


@pytest.mark.parametrize("rule", NEED_FULL)
def test_rules_that_leave_the_pattern_are_refused_by_name(rule):
    q, made = PrecisionCholeskyGaussian(3, structure=ScalarArrow(3)), FACTORIES.get(rule, rule)()
    if rule.emits not in q.takes:
        with pytest.raises(PairError, match=f"^{rule.__name__} moves q by {rule.emits.__name__}, which"):
            NaturalGradientVI(q, made, lr=0.1)
        return
    text = (
        f"{rule.__name__} needs products of matrices that leave the pattern of ScalarArrow(dim=3). Use "
        "VariationalNewton(), NaturalGradient() or LocalExponential(), or a structure of blocks."
    )
    with pytest.raises(PairError, match=f"^{re.escape(text)}$"):
        NaturalGradientVI(q, made, lr=0.1)


@pytest.mark.parametrize(("kind", "name"), [pair for pair in FAMILIES if pair[0] is not NaturalGaussian])
def test_the_local_exponential_never_leaves_the_cone(kind, name):
    """diag Λ ≥ ½ for steps and curvatures of any size."""
    q = posterior_of(kind, name, (50,), 1)
    P = 50 * randn(50, *PATTERNS[name].shape, seed=2)
    packet = Framed(randn(50, DIM, seed=3), PATTERNS[name].one_sided(P))
    e = Expectation(torch.zeros(50, dtype=DTYPE), packet, 1.0, True, Cost(1, 1))
    for rho in (0.01, 0.1, 1.0, 10.0):
        new, ok = q.moved(LocalExponential()(q, e).at(torch.full((50,), rho, dtype=DTYPE)))
        assert bool(ok.all())
        ratio = q.structure.diagonal(new.matrix) / q.structure.diagonal(q.coordinates.matrix)
        assert float(ratio.min()) >= 0.5


class TestBlockDiagonal:
    def test_the_simplest_pattern_is_chosen(self):
        assert block_diagonal([4]) == Dense(4)
        assert block_diagonal([1, 1]) == Diagonal(2)
        assert block_diagonal([2, 2]) == EqualBlocks(2, 2)
        assert block_diagonal([2, 1]) == UnequalBlocks((2, 1)) != UnequalBlocks((1, 2))
        assert len({block_diagonal([2, 1]), UnequalBlocks((2, 1))}) == 1

    @pytest.mark.parametrize("sizes", [[], [0, 2], [True, 2], [1.0, 2]])
    def test_sizes(self, sizes):
        text = f"the sizes of blocks are positive integers, at least one; got {sizes}."
        with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
            block_diagonal(sizes)

    def test_a_structure_over_another_number_of_coordinates(self):
        text = "the structure must have D = 3 coordinates, as the posterior; got Dense(dim=4)."
        with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
            CholeskyGaussian(3, structure=Dense(4))

    def test_no_covariance_root_of_an_arrow(self):
        text = (
            "CholeskyGaussian holds a root of the covariance, which ScalarArrow does not have in its pattern: only "
            "that of the precision. Use a PrecisionCholeskyGaussian or a NaturalGaussian."
        )
        with pytest.raises(PairError, match=f"^{re.escape(text)}$"):
            CholeskyGaussian(3, structure=ScalarArrow(3))

    def test_no_average_of_the_moments_of_an_arrow(self):
        text = (
            "ExpectationAverage needs the blocks of a covariance; ScalarArrow(dim=3) keeps those of the precision. "
            "Use "
            "a posterior with a dense or block-diagonal structure."
        )
        with pytest.raises(PairError, match=f"^{re.escape(text)}$"):
            ExpectationAverage(NaturalGaussian(3, structure=ScalarArrow(3)))
