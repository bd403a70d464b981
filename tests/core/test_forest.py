"""Forests: each verb against dense matrices, the verbs of cliques, what moves q, and that all of it is linear in n."""

import copy
import pickle

import pytest
import torch
from helpers import DTYPE, EXACT, FORESTS, PRECISION, Watch, close, posterior_in, randn

from torchngvi import VN, GeneralizedLinear, NaturalGaussian, PrecisionCholeskyGaussian, Snngm, fit
from torchngvi.errors import InputError
from torchngvi.interfaces import Cost, Expectation, Framed
from torchngvi.models import TractableFactors
from torchngvi.numerics import linalg
from torchngvi.posteriors import DiagonalGaussian
from torchngvi.rules import VariationalNewton
from torchngvi.structures import Dense, EqualBlocks, Forest, arrow, forest, nested
from torchngvi.testing import check_structure
from torchngvi.testing.claims import definite_in, mask, root_in

forests = pytest.mark.parametrize("name", FORESTS)


def packet(a, W, temperature=1.0):
    value = torch.zeros(a.shape[:-1], dtype=a.dtype)
    return Expectation(value, Framed(a, W), temperature, True, Cost(1, 1))


@forests
class TestAlgebra:
    def test_it_keeps_the_contract(self, name):
        check_structure(FORESTS[name])

    def test_marginals_go_down_the_forest(self, name):
        """The entries of V = T⁻ᵀT⁻¹, from those of T⁻¹."""
        pattern = FORESTS[name]
        T = root_in(pattern, (2,), 1)
        inverse = pattern.inverse(pattern.from_dense(T))
        V = torch.linalg.inv(T @ T.mT)
        close(pattern.full(pattern.marginals(inverse, transposed=True)), V * mask(pattern), 1e-13)

    def test_the_frame_of_a_packet_is_that_of_its_cliques(self, name):
        """g and H as sums over all nodes with their ancestors, framed at once and clique by clique."""
        pattern, batch = FORESTS[name], (2,)
        T = pattern.from_dense(root_in(pattern, batch, 1))
        C = torch.linalg.inv(root_in(pattern, batch, 1)).mT
        g, H, vectors, matrices = 0.0, 0.0, [], []
        places = pattern.gather(torch.arange(pattern.dim))
        for k, (place, root) in enumerate(zip(places, pattern.cliques(T), strict=True)):
            n, size = place.shape
            g_c, X = randn(*batch, n, size, seed=10 + k), randn(*batch, n, size, size, seed=20 + k)
            C_c = torch.linalg.inv(root).mT
            vectors.append((C_c.mT @ g_c[..., None])[..., 0])
            matrices.append(C_c.mT @ (X + X.mT) @ C_c)
            to = torch.nn.functional.one_hot(place, pattern.dim).to(DTYPE)  # (n, k, D)
            g = g + torch.einsum("...nk,nkd->...d", g_c, to)
            H = H + torch.einsum("...nkl,nkd,nle->...de", X + X.mT, to, to)
        a, W = pattern.scatter(vectors, matrices)
        close(a, (C.mT @ g[..., None])[..., 0], 1e-13)
        close(pattern.full(W), C.mT @ H @ C, 1e-13)  # no mask: where H has the pattern, so has its frame

    def test_a_clique_is_a_marginal(self, name):
        """(T_c T_cᵀ)⁻¹ is the covariance of the coordinates of the clique."""
        pattern = FORESTS[name]
        T = root_in(pattern, (2,), 1)
        V = torch.linalg.inv(T @ T.mT)
        places = pattern.gather(torch.arange(pattern.dim))
        for place, root in zip(places, pattern.cliques(pattern.from_dense(T)), strict=True):
            close(root.tril(), root, 0.0)
            close(torch.linalg.inv(root @ root.mT), V[:, place[:, :, None], place[:, None, :]], 1e-13)

    def test_gather_takes_samples(self, name):
        pattern, x = FORESTS[name], randn(3, 2, FORESTS[name].dim, seed=1)
        for place, rows in zip(pattern.gather(torch.arange(pattern.dim)), pattern.gather(x), strict=True):
            close(rows, x[..., place], 0.0)

    def test_its_tables_follow_the_device(self, name):
        """On the meta device an index that stayed behind would be refused, and nothing is computed."""
        pattern = FORESTS[name]
        root, S = (pattern.from_dense(x(pattern, (2,), 1)).to("meta") for x in (root_in, definite_in))
        x = torch.zeros(2, pattern.dim, dtype=DTYPE, device="meta")
        made = [pattern.mv(root, x), pattern.tsolve(root, x), pattern.diagonal(S), pattern.row_norms(root)]
        assert {(tuple(y.shape), y.device.type) for y in made} == {((2, pattern.dim), "meta")}
        matrices = [
            pattern.matmul(root, root),
            pattern.cholesky(S)[0],
            pattern.congruence(root, S),
            pattern.marginals(root, transposed=True),
            pattern.unflat(pattern.flat(S)),
            pattern.scatter(pattern.gather(x), pattern.cliques(S))[1],
        ]
        assert {(tuple(y.shape), y.device.type) for y in matrices} == {((2, *pattern.shape), "meta")}

    @pytest.mark.parametrize("kind", PRECISION)
    def test_a_posterior_over_it_is_copied_saved_and_moved(self, name, kind):
        q = posterior_in(kind, FORESTS[name], (2,))
        twin = copy.deepcopy(q)
        assert twin.structure == q.structure
        other = kind(q.dim, (2,), structure=FORESTS[name], dtype=DTYPE)
        other.load_state_dict(q.state_dict())
        for x in (twin, other):
            close(x.mean, q.mean, 0.0)
            close(x.covariance, q.covariance, 0.0)
        close(q.to(torch.float32).variance, twin.variance.float(), 1e-4)


MOVED = {name: FORESTS[name] for name in ("arrow", "three levels", "ragged")}
moved = pytest.mark.parametrize("name", MOVED)


@moved
class TestMoves:
    @pytest.mark.sparse(4)
    @pytest.mark.parametrize("kind", PRECISION)
    @pytest.mark.parametrize("rho", [0.3, 1.0])
    def test_vn_moves_the_precision_to_the_hessian(self, name, kind, rho):
        """S' = (1 - ρ) S + ρH and m' = m - ρ S'⁻¹ g, in both coordinates: H has the pattern, and is kept whole."""
        pattern, batch = MOVED[name], (2,)
        q = posterior_in(kind, pattern, batch)
        m, S, C = q.mean.clone(), q.precision.clone(), q.frame().dense()
        g, H = randn(*batch, q.dim, seed=3), definite_in(pattern, batch, 4)
        a, W = (C.mT @ g[..., None])[..., 0], pattern.from_dense(C.mT @ H @ C)
        new, ok = q.moved(VariationalNewton()(q, packet(a, W)).at(torch.full(batch, rho, dtype=DTYPE)))
        assert bool(ok.all())
        q.assign(new, ok)
        expected = (1 - rho) * S + rho * H
        close(q.precision, expected, 1e-13)
        close(q.mean, m - rho * torch.linalg.solve(expected, g), 1e-13)

    def test_kl_and_conversions(self, name):
        """Of one pattern, and beside a mean field, against the Gaussians written out."""
        pattern, batch = MOVED[name], (2,)
        q, other = (posterior_in(PrecisionCholeskyGaussian, pattern, batch, seed) for seed in (1, 5))
        same = NaturalGaussian.from_posterior(q)
        back = PrecisionCholeskyGaussian.from_posterior(same)
        diagonal = DiagonalGaussian(q.dim, batch, mean=randn(*batch, q.dim, seed=9), scale=0.7, dtype=DTYPE)
        for x in (same, back):
            assert x.structure == pattern
            close(x.mean, q.mean, 1e-13)
            close(x.precision, q.precision, 1e-13)
        for one, two in [(q, other), (q, same), (same, other), (q, diagonal), (diagonal, q)]:
            p1, p2 = (
                torch.distributions.MultivariateNormal(x.mean.detach(), precision_matrix=x.precision.detach())
                for x in (one, two)
            )
            close(one.kl(two), torch.distributions.kl_divergence(p1, p2), 1e-13)


@pytest.mark.parametrize("kind", PRECISION, ids=lambda kind: kind.__name__)
def test_nodes_at_other_places_of_theta(kind):
    """A q over a forest in another order is the same q with its coordinates permuted, from draws to conversions."""
    parents, sizes, order = (3, 3, 4, 5, 5, -1), (1, 1, 2, 2, 1, 3), (7, 0, 9, 2, 4, 1, 8, 3, 6, 5)
    plain, other = Forest(parents, sizes), Forest(parents, sizes, order)
    assert plain != other
    assert plain == Forest(parents, sizes, tuple(range(10)))
    root = plain.with_diagonal(0.3 * plain.tril(randn(*plain.shape, seed=3)), 1 + randn(10, seed=4).abs())
    dense = torch.linalg.inv(plain.to_dense(root)).mT
    V, order = dense @ dense.mT, torch.tensor(order)
    back, z = torch.argsort(order), randn(5, 10, seed=1)
    q, p = kind.from_moments(z[0], V, structure=plain), kind.from_moments(z[0][back], V[back][:, back], structure=other)
    close(p.covariance, V[back][:, back], 1e-12)
    close(p.scale_tril, torch.linalg.cholesky(V[back][:, back]), 1e-12)
    close(p.variance, q.variance[back], 1e-13)
    close(p.log_prob(z[:, back]), q.log_prob(z), 1e-12)
    close(p.push_noise(z[:, back]), q.push_noise(z)[:, back], 1e-12)
    for x in (*(of.from_posterior(p) for of in PRECISION), copy.deepcopy(p)):
        close(x.covariance, p.covariance, 1e-12)
        close(x.kl(p), torch.zeros((), dtype=DTYPE), 1e-12)
    start = kind(10, structure=other, dtype=DTYPE)
    close(start.kept_precision(p.scale_tril), p.scale_tril, 1e-12)
    X = randn(7, 10, seed=2)
    close(p.marginal_variance(X[:, back]), q.marginal_variance(X), 1e-12)
    with pytest.raises(InputError, match="order has each of the 10 coordinates once"):
        Forest(parents, sizes, (0,) * 10)


def test_the_golden_step_of_tan_2c():
    """Algorithm 2c of Tan (2025) at one draw: n = 2 locals and one global, all numbers exact in binary but the last."""
    pattern = arrow(groups=2, local=1, globals=1)
    T = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, -1.0, 4.0]], dtype=DTYPE)
    q = PrecisionCholeskyGaussian(3, structure=pattern, dtype=DTYPE)
    q.assign(type(q.coordinates)(q.mean, pattern.from_dense(T)), torch.tensor(True))
    z, score = torch.tensor([1.0, -2.0, 0.5], dtype=DTYPE), torch.tensor([0.3, -0.7, 1.1], dtype=DTYPE)
    close(q.push_noise(z), torch.tensor([0.46875, -1.875, 0.125], dtype=DTYPE), EXACT)
    v = q.frame().pull(score) + z
    close(v, torch.tensor([1.15, -2.7, 0.58125], dtype=DTYPE), EXACT)
    e = packet(-v, q.one_triangle(-v, z), temperature=0.0)
    step = q.tangent(e)
    close(-step.vector, torch.tensor([0.538671875, -2.5546875, 0.1453125], dtype=DTYPE), EXACT)
    expected = torch.tensor([[-1.15, 0.0, 0.0], [0.0, -2.7, 0.0], [-2.5875, 8.1, -0.58125]], dtype=DTYPE)
    close(-pattern.to_dense(step.matrix), expected, EXACT)
    close(q.norm2(q.local(e)), torch.tensor(26.3869580078125, dtype=DTYPE), EXACT)


BROAD = {
    "arrow": arrow(groups=1000, local=1, globals=3),
    "nested": nested([k // 8 for k in range(800)], [k // 10 for k in range(100)], local=[1, 2, 1], globals=2),
}
ONES = torch.ones(4, 1, dtype=DTYPE)


def broad_packet(q):
    a = torch.linspace(-1, 1, q.dim, dtype=DTYPE)
    return packet(a, 0.5 * q.structure.eye(a))


CALLS = {
    "rsample": lambda q: q.rsample((4,)).square().sum().backward(),
    "log_prob": lambda q: q.log_prob(q.mean).backward(),
    "entropy": lambda q: q.entropy().backward(),
    "kl": lambda q: q.kl(type(q)(q.dim, structure=q.structure, scale=2.0, dtype=DTYPE)).backward(),
    "kl to a mean field": lambda q: q.kl(DiagonalGaussian(q.dim, scale=2.0, dtype=DTYPE)).backward(),
    "marginal_variance": lambda q: q.marginal_variance(torch.ones(2, q.dim, dtype=DTYPE)).sum().backward(),
    "variance": lambda q: q.variance,
    "marginals": lambda q: q.frame().marginals(),
    "gram": lambda q: q.frame().gram(q.variance),
    "initialize_": lambda q: q.initialize_(1.0, torch.full((q.dim,), 2.0)),
    "from_posterior": lambda q: [kind.from_posterior(q) for kind in PRECISION],
    "snapshot": lambda q: q.assign(q.snapshot(), torch.tensor(True)),
    "one_triangle": lambda q: q.one_triangle(ONES.expand(4, q.dim), ONES.expand(4, q.dim)),
    "sym_outer": lambda q: q.sym_outer(ONES.expand(4, q.dim), ONES.expand(4, q.dim)),
    "euclidean": lambda q: q.euclidean(broad_packet(q)) if isinstance(q, PrecisionCholeskyGaussian) else None,
    "unframe": lambda q: q.unframe(*q.local(broad_packet(q))),
    "norm2": lambda q: q.norm2(q.local(broad_packet(q))),
    "tangent": lambda q: q.tangent(broad_packet(q)),
    "moved": lambda q: q.moved(VariationalNewton()(q, broad_packet(q)).at(torch.tensor(0.5, dtype=DTYPE))),
    "cliques": lambda q: q.structure.cliques(q.frame().root),
    "state_dict": lambda q: q.load_state_dict(q.state_dict()),
    "neighbours": lambda q: q.structure.neighbours(q.mean),
    "repr": repr,
}


@pytest.mark.parametrize("name", BROAD)
@pytest.mark.parametrize("kind", PRECISION)
class TestNothingIsDByD:
    @pytest.mark.sparse(3)
    @pytest.mark.parametrize("call", CALLS)
    def test_of_all_that_a_posterior_offers(self, kind, name, call):
        q = kind(BROAD[name].dim, structure=BROAD[name], dtype=DTYPE)
        with Watch(q.dim):
            CALLS[call](q)

    def test_but_what_returns_it(self, kind, name):
        q = kind(BROAD[name].dim, structure=BROAD[name], dtype=DTYPE)
        with Watch(q.dim), pytest.raises(AssertionError, match=f"makes {q.dim**2} numbers, D = {q.dim}"):
            q.covariance  # noqa: B018

    @pytest.mark.parametrize("optimizer", [VN, Snngm])
    def test_nor_of_a_step_by_draws(self, kind, name, optimizer):
        q = kind(BROAD[name].dim, structure=BROAD[name], dtype=DTYPE)
        opt = optimizer(q, lr=1e-3)
        with Watch(q.dim):
            opt.step(lambda theta: -0.5 * theta.square().sum(-1))


@pytest.mark.parametrize("kind", PRECISION)
def test_twice_the_groups_make_twice_the_numbers(kind):
    """All tensors of a VN step, values of expectations left out."""
    made = []
    for groups in (2000, 4000):
        q = kind(2 * groups + 3, structure=arrow(groups=groups, local=2, globals=3), dtype=DTYPE)
        e = broad_packet(q)
        with Watch(q.dim) as watch:
            q.assign(*q.moved(VariationalNewton()(q, e).at(torch.tensor(0.5, dtype=DTYPE))))
        made.append(watch.made)
    assert made[1] == pytest.approx(2 * made[0], rel=0.01)


class TestConstructors:
    def test_an_arrow_is_a_forest(self):
        same = forest(parents=[2, 2, None], sizes=[2, 2, 3])
        assert arrow(groups=2, local=2, globals=3) == arrow(local=[2, 2], globals=3) == same
        assert hash(same) == hash(Forest((2, 2, -1), (2, 2, 3)))
        assert same != arrow(groups=2, local=2, globals=2)
        assert same.dim == 7
        assert pickle.loads(pickle.dumps(same)) == copy.deepcopy(same) == same

    def test_nested_groups_are_a_forest(self):
        same = Forest((5, 5, 6, 6, 6, 7, 7, -1), (1, 1, 1, 1, 1, 2, 2, 3))
        assert nested([0, 0, 1, 1, 1], local=[1, 2], globals=3) == same
        assert nested([0, 0, 1, 1, 1], local=[1, 2]) == Forest((5, 5, 6, 6, 6, -1, -1), (1, 1, 1, 1, 1, 2, 2))

    def test_roots_alone_are_blocks(self):
        assert forest(parents=[-1, None], sizes=[2, 2]) == EqualBlocks(2, 2)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
class TestSmallBlocks:
    """Written out up to r = 4, torch's own above: the same factors, and the same verdicts."""

    def test_against_torch(self, size):
        A = definite_in(Dense(size), (2, 3), 1)
        L, B = torch.linalg.cholesky(A), randn(2, 3, size, 4, seed=2)
        factor, ok = linalg.small_cholesky(A)
        close(factor, L, 1e-13)
        assert bool(ok.all())
        close(linalg.small_solve(L, B), torch.linalg.solve_triangular(L, B, upper=False), 1e-13)
        close(linalg.small_tsolve(L, B), torch.linalg.solve_triangular(L.mT, B, upper=True), 1e-13)
        close(linalg.small_inverse(L), torch.linalg.inv(L), 1e-13)
        close(linalg.small_product(L, B), L @ B, 1e-13)

    def test_failures_are_told_member_by_member(self, size):
        A = definite_in(Dense(size), (5,), 1)
        A[1], A[2, -1, -1], A[3, -1, 0], A[4] = -A[1], torch.inf, torch.nan, 0.0
        assert linalg.small_cholesky(A)[1].tolist() == [True, False, False, False, False]


def test_float32_fits_too():
    """The same optimum to the tolerance of the type."""
    structure = arrow(groups=4, local=1, globals=2)
    rows = randn(4, 5, 3, seed=1)
    fitted = []
    for dtype in (torch.float32, DTYPE):
        model = GeneralizedLinear(rows.to(dtype), (rows.sum(-1) > 0).to(dtype))
        q = PrecisionCholeskyGaussian(structure.dim, structure=structure, dtype=dtype)
        assert fit(q, TractableFactors(structure, [(0, model)]), progress=False).converged
        fitted.append(q)
    close(fitted[0].mean.double(), fitted[1].mean, 1e-2)
    close(fitted[0].variance.double(), fitted[1].variance, 1e-2)
