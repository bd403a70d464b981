"""Algorithms 1c and 2c of Tan (2025): block-diagonal covariances and precisions with the pattern of an arrow."""

import functools
import math

import pytest
import reference
import torch
from helpers import DTYPE, EXACT, IDENTITY, Watch, close, randn
from test_tan import Given, InTurn, log_joint, slope

from torchngvi import SRVN, CholeskyGaussian, LogJoint, PrecisionCholeskyGaussian, Snngm
from torchngvi.expectations import Independent, PathDerivative
from torchngvi.interfaces import Coordinates
from torchngvi.methods import RootGD
from torchngvi.stepsizes import Constant
from torchngvi.structures import arrow, block_diagonal
from torchngvi.testing.claims import root_in

LOCALS, GLOBALS = (1, 2, 1), 3
DIM = sum(LOCALS) + GLOBALS
STARTS = [sum(LOCALS[:i]) for i in range(len(LOCALS) + 1)]
UNITS = [slice(a, b) for a, b in zip(STARTS, STARTS[1:], strict=False)]
TOP = slice(STARTS[-1], DIM)
SIZES = (*LOCALS, GLOBALS)
BLOCKS = [*UNITS, TOP]
ARROW = arrow(local=list(LOCALS), globals=GLOBALS)
naturals = pytest.mark.parametrize("natural", [False, True], ids=["euclidean", "natural"])


def posterior(kind, structure, mean, root):
    """The q that stores this very root."""
    q = kind(len(mean), structure=structure, dtype=DTYPE)
    q.assign(Coordinates(mean, structure.from_dense(root)), torch.tensor(True))
    return q


def places(columns):
    """Rows and columns of the entries of a root, unit by unit: the triangle of its square, then its border."""
    found = []
    for at in columns:
        below = [TOP] if columns is UNITS else []
        found += [(row, column) for column in span(at) for row in span(at) if row >= column]
        found += [(row, column) for part in below for column in span(at) for row in span(part)]
    return found


def span(at):
    return range(at.start, at.stop)


ENTRIES = {"arrow": places(UNITS) + places([TOP]), "blocks": places(BLOCKS)}


def flat(name, matrix):
    return torch.stack([matrix[place] for place in ENTRIES[name]])


@functools.cache
def coordinates(name):
    """λ = (m, the entries of the root)."""
    rows, columns = (torch.tensor(x) for x in zip(*ENTRIES[name], strict=True))

    def moments(x):
        root = torch.zeros(DIM, DIM, dtype=DTYPE).index_put((rows, columns), x[DIM:])
        V = root @ root.mT
        return x[:DIM], torch.linalg.inv(V) if name == "arrow" else V

    def entries(m, V):
        root = torch.linalg.cholesky(torch.linalg.inv(V) if name == "arrow" else V)
        return torch.cat([m, flat(name, root)])

    return reference.Coordinates(entries, moments)


def printed_2c(root, z, mean, slope, natural):
    """One iteration of Algorithm 2c, or of 2a on the pattern, unit by unit: the changes of mean and of T."""
    T_G, z_G = root[TOP, TOP], z[TOP]
    solve = torch.linalg.solve
    u_G = solve(T_G.mT, z_G)
    u = [solve(root[i, i].mT, z[i]) for i in UNITS]
    w = [solve(root[i, i].mT, z[i] - root[TOP, i].mT @ u_G) for i in UNITS]
    score = slope(mean + torch.cat([*w, u_G]))
    log_q = [root[i, i] @ z[i] for i in UNITS] + [sum(root[TOP, i] @ z[i] for i in UNITS) + T_G @ z_G]
    grad = score + torch.cat(log_q)
    v = [solve(root[i, i], grad[i]) for i in UNITS]
    v_G = solve(T_G, grad[TOP] - sum(root[TOP, i] @ v_i for i, v_i in zip(UNITS, v, strict=True)))
    step = torch.zeros_like(root)
    for i, u_i, w_i, v_i in zip(UNITS, u, w, v, strict=True):
        if not natural:
            step[i, i], step[TOP, i] = -torch.outer(w_i, v_i).tril(), -torch.outer(u_G, v_i)
            continue
        half = reference.tril_half(root[i, i].mT @ -torch.outer(u_i, v_i).tril())
        step[i, i] = root[i, i] @ half
        step[TOP, i] = root[TOP, i] @ half - torch.outer(T_G @ z_G, v_i)
    G = -torch.outer(u_G, v_G).tril()
    step[TOP, TOP] = T_G @ reference.tril_half(T_G.mT @ G) if natural else G
    if not natural:
        return grad, step
    x_G = solve(T_G.mT, v_G)
    x = [solve(root[i, i].mT, v_i - root[TOP, i].mT @ x_G) for i, v_i in zip(UNITS, v, strict=True)]
    return torch.cat([*x, x_G]), step


def printed_1c(root, z, mean, slope, natural):
    """One iteration of Algorithm 1c, or of 1a on the pattern, block by block: the changes of mean and of C."""
    grad = slope(mean + root @ z) + torch.linalg.solve(root.mT, z)
    step = torch.zeros_like(root)
    for i in BLOCKS:
        G = torch.outer(grad[i], z[i]).tril()
        step[i, i] = root[i, i] @ reference.tril_half(root[i, i].mT @ G) if natural else G
    return (root @ root.mT @ grad if natural else grad), step


FORMS = {
    "1c": (CholeskyGaussian, block_diagonal(SIZES), printed_1c, "blocks"),
    "2c": (PrecisionCholeskyGaussian, ARROW, printed_2c, "arrow"),
}
forms = pytest.mark.parametrize("form", FORMS)


class TestPrintedAlgorithms:
    """Steps of the library over a structure are the iterations as printed, for blocks of unequal sizes."""

    @forms
    @naturals
    def test_steps(self, form, natural):
        kind, structure, printed, _ = FORMS[form]
        m, root, rho = randn(DIM, seed=1), root_in(structure, (), 2), 0.05
        z = randn(5, DIM, seed=3)
        q = posterior(kind, structure, m, root)
        opt = (SRVN if natural else RootGD)(q, step_size=Constant(rho), estimator=PathDerivative(InTurn(z)))
        for one in z:
            opt.step(log_joint)
            mean_step, root_step = printed(root, one, m, slope, natural)
            m, root = m + rho * mean_step, root + rho * root_step
        close(q.coordinates.vector, m, EXACT)
        close(structure.to_dense(q.coordinates.matrix), root, EXACT)

    @forms
    def test_the_norm_is_the_product_of_both_gradients(self, form):
        """‖g̃‖²_F = ⟨ĝ, g̃⟩, with the Euclidean gradient in the place of the printed Ḡ₂ of the arrow."""
        kind, structure, printed, name = FORMS[form]
        m, root, z = randn(DIM, seed=1), root_in(structure, (), 2), randn(1, DIM, seed=3)
        q = posterior(kind, structure, m, root)
        e = PathDerivative(Given(z))(q, LogJoint(log_joint))
        plain, natural = (printed(root, z[0], m, slope, which) for which in (False, True))
        square = plain[0] @ natural[0] + flat(name, plain[1]) @ flat(name, natural[1])
        close(q.norm2(q.local(e)), square, EXACT)

    def test_blocks_are_the_dense_step_masked(self):
        """Cross blocks of I(C) vanish, so that 1c is 1b with what is outside the blocks left out."""
        m, root, z = randn(DIM, seed=1), root_in(FORMS["1c"][1], (), 2), randn(DIM, seed=3)
        dense = reference.TanStep("C", True)
        *_, mean_step, root_step = dense.gradient(root, z, m, slope)
        mean_block, root_block = printed_1c(root, z, m, slope, True)
        mask = torch.block_diag(*[torch.ones(size, size, dtype=DTYPE) for size in SIZES])
        close(mean_step, mean_block, EXACT)
        close(root_step * mask, root_block, EXACT)
        assert float((root_step * (1 - mask)).abs().max()) > 1e-3

    def test_an_arrow_is_not(self):
        """Of 2b the last row of the first column has more terms."""
        m, root, z = randn(DIM, seed=1), root_in(ARROW, (), 2), randn(DIM, seed=3)
        *_, root_step = reference.TanStep("T", True).gradient(root, z, m, slope)
        wrong = (root_step - printed_2c(root, z, m, slope, True)[1])[TOP, UNITS[0]]
        assert float(wrong.abs().max()) > 1e-2

    GOLDEN = {
        False: ([2.3, -2.7, 5.6], [-0.5390625, -5.0625, -0.14375, 0.3375, -0.07265625]),
        True: ([0.538671875, -2.5546875, 0.1453125], [-1.15, -2.7, -2.5875, 8.1, -0.58125]),
    }

    @naturals
    def test_golden_values(self, natural):
        """Two locals and a global, z = (1, -2, ½), ∇ log p = (0.3, -0.7, 1.1), m = 0."""
        T = torch.tensor([[2.0, 0, 0], [0, 1, 0], [0.5, -1, 4]], dtype=DTYPE)
        p = torch.tensor([0.3, -0.7, 1.1], dtype=DTYPE)
        q = posterior(PrecisionCholeskyGaussian, arrow(groups=2, local=1, globals=1), torch.zeros(3, dtype=DTYPE), T)
        one = PathDerivative(Given(torch.tensor([[1.0, -2.0, 0.5]], dtype=DTYPE)))
        (SRVN if natural else RootGD)(q, step_size=Constant(0.125), estimator=one).step(
            LogJoint(lambda theta: theta @ p)
        )
        vector, entries = (torch.tensor(x, dtype=DTYPE) for x in self.GOLDEN[natural])
        change = (q.precision_tril - T)[[0, 1, 2, 2, 2], [0, 1, 0, 1, 2]]
        close(q.mean, 0.125 * vector, EXACT)
        close(change, 0.125 * entries, EXACT)


class TestFisher:
    """The Fisher matrix over the entries of a pattern: the Hessian of the divergence, and its printed blocks."""

    @staticmethod
    def unit(root, i):
        """F_i = [A_i, B_i; B_iᵀ, D_i] of (T_i, T_Gi), and its printed inverse."""
        T_i, T_G, size = root[i, i], root[TOP, TOP], i.stop - i.start
        eye, L = torch.eye(size, dtype=DTYPE), reference.elimination(size)
        Q = torch.linalg.solve(T_i.mT, root[TOP, i].mT)
        inner = torch.linalg.inv(T_G @ T_G.mT)
        A = reference.root_fisher(T_i) + L @ reference.kron(eye, Q @ inner @ Q.mT) @ L.mT
        B, D = -L @ reference.kron(eye, Q @ inner), reference.kron(eye, inner)
        F = torch.cat([torch.cat([A, B], 1), torch.cat([B.mT, D], 1)])
        inverse, turn = reference.root_fisher_inverse(T_i), L @ reference.kron(eye, Q)
        last = reference.kron(eye, T_G @ T_G.mT) + turn.mT @ inverse @ turn
        return F, torch.cat([torch.cat([inverse, inverse @ turn], 1), torch.cat([turn.mT @ inverse, last], 1)])

    def test_of_an_arrow(self):
        """F = blockdiag(S, F_1, ..., F_n, I(T_G))."""
        m, root = randn(DIM, seed=1), root_in(ARROW, (), 2)
        blocks = [self.unit(root, i)[0] for i in UNITS]
        F = torch.block_diag(root @ root.mT, *blocks, reference.root_fisher(root[TOP, TOP]))
        V = torch.linalg.inv(root @ root.mT)
        close(reference.fisher(coordinates("arrow"), coordinates("arrow").flat(m, V)), F, IDENTITY)

    @pytest.mark.parametrize("unit", range(len(LOCALS)))
    def test_the_inverse_of_a_unit(self, unit):
        """F_i⁻¹ as printed, and the Schur complement A_i - B_i D_i⁻¹ B_iᵀ = I(T_i)."""
        root = root_in(ARROW, (), 2)
        F, inverse = self.unit(root, UNITS[unit])
        size = LOCALS[unit] * (LOCALS[unit] + 1) // 2
        A, B, D = F[:size, :size], F[:size, size:], F[size:, size:]
        close(inverse @ F, torch.eye(len(F), dtype=DTYPE), IDENTITY)
        close(A - B @ torch.linalg.solve(D, B.mT), reference.root_fisher(root[UNITS[unit], UNITS[unit]]), IDENTITY)

    def test_of_blocks(self):
        """F = blockdiag(V⁻¹, I(C_1), ..., I(C_N))."""
        m, root = randn(DIM, seed=1), root_in(FORMS["1c"][1], (), 2)
        F = torch.block_diag(torch.linalg.inv(root @ root.mT), *[reference.root_fisher(root[i, i]) for i in BLOCKS])
        close(reference.fisher(coordinates("blocks"), coordinates("blocks").flat(m, root @ root.mT)), F, IDENTITY)

    @forms
    def test_the_step_solves_with_it(self, form):
        """F g̃ = ĝ for the gradients of the library at one draw."""
        kind, structure, _, name = FORMS[form]
        q = posterior(kind, structure, randn(DIM, seed=1), root_in(structure, (), 2))
        e = PathDerivative(Given(randn(1, DIM, seed=3)))(q, LogJoint(log_joint))
        natural, plain = (
            torch.cat([x.vector, flat(name, structure.to_dense(x.matrix))]) for x in (q.tangent(e), q.euclidean(e))
        )
        F = reference.fisher(coordinates(name), coordinates(name).flat(q.mean, q.covariance))
        close(F @ natural, plain, IDENTITY)


class TestSize:
    """The number of coordinates ℓ, and what a step makes, grow with the number of groups."""

    @pytest.mark.parametrize(
        ("groups", "local", "globals_", "arrows", "blocks"),
        [(59, 2, 9, 1411, 349), (294, 1, 5, 2078, 608), (2031, 1, 6, 16275, 4089)],
        ids=["epilepsy", "toenail", "HERS"],
    )
    def test_the_printed_step_sizes(self, groups, local, globals_, arrows, blocks):
        """α = 0.001 √ℓ, by the table of ℓ in section 6."""
        dim = groups * local + globals_
        q = PrecisionCholeskyGaussian(dim, structure=arrow(groups=groups, local=local, globals=globals_))
        assert Snngm(q).param_groups[0]["lr"] == pytest.approx(0.001 * math.sqrt(arrows), rel=1e-12)
        q = CholeskyGaussian(dim, structure=block_diagonal([local] * groups + [globals_]))
        assert Snngm(q).param_groups[0]["lr"] == pytest.approx(0.001 * math.sqrt(blocks), rel=1e-12)

    @pytest.mark.parametrize("method", [Snngm, RootGD])
    @forms
    def test_a_step_is_linear_in_the_groups(self, form, method):
        """Counted, not timed: the numbers in all tensors that a step makes; none of them has D² of them."""
        made = []
        for groups in (500, 1000, 2000):
            sizes, kind = [2] * groups, FORMS[form][0]
            structure = arrow(local=sizes, globals=4) if form == "2c" else block_diagonal([*sizes, 4])
            q = kind(2 * groups + 4, structure=structure, dtype=DTYPE)
            one = PathDerivative(Independent(1, torch.Generator().manual_seed(0)))
            opt = method(q, lr=1e-3, estimator=one)
            opt.step(quadratic)  # tables that are made once
            with Watch(q.dim) as watch:
                opt.step(quadratic)
            made.append(watch.made)
        assert made[2] - made[1] == pytest.approx(2 * (made[1] - made[0]), rel=1e-3)
        assert made[2] < 2.02 * made[1]


def quadratic(theta):
    return -0.5 * theta.square().sum(-1)
