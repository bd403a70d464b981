"""The algebra of every pattern against dense matrices: closure, each verb, and the metric."""

import pkgutil

import pytest
import torch
from arrow import ScalarArrow
from helpers import DTYPE, close, randn
from torch._functorch.eager_transforms import grad_increment_nesting
from torch._subclasses.fake_tensor import FakeTensorMode

import torchngvi as ngvi
from torchngvi.expectations import Fixed, PiecewiseBound
from torchngvi.interfaces import Coordinates, Cost, Expectation, Framed
from torchngvi.networks import families
from torchngvi.numerics import arrays, gaussian_integrals, special
from torchngvi.numerics.arrays import constant, remembered
from torchngvi.posteriors import warps
from torchngvi.rules import LocalExponential
from torchngvi.structures import Dense, Diagonal, EqualBlocks, Forest, FullAlgebra, UnequalBlocks, block_diagonal
from torchngvi.structures import pattern as pattern_module
from torchngvi.testing.claims import root_in

DIM = 6
PATTERNS = {
    "dense": Dense(DIM),
    "diagonal": Diagonal(DIM),
    "equal": EqualBlocks(3, 2),
    "unequal": UnequalBlocks((2, 1, 3)),
    "scattered": UnequalBlocks((1, 2, 1, 2)),
    "arrow": ScalarArrow(DIM),
    "forest": Forest((2, 2, 3, -1), (1, 2, 1, 2)),
}
FULL = [name for name, pattern in PATTERNS.items() if isinstance(pattern, FullAlgebra)]
patterns = pytest.mark.parametrize("name", PATTERNS)


@patterns
def test_a_closed_pattern_has_the_products_of_its_symmetric_matrices(name):
    """And no other pattern does: `closed` is what it says, and has the verbs of a full algebra."""
    pattern = PATTERNS[name]
    entries = pattern.full(torch.ones(pattern.shape, dtype=DTYPE))
    within = bool((entries @ entries)[entries == 0].eq(0).all())
    assert pattern.closed == within == isinstance(pattern, FullAlgebra)


FAMILIES = [(ngvi.CholeskyGaussian, name) for name in FULL] + [
    (kind, name) for kind in (ngvi.PrecisionCholeskyGaussian, ngvi.NaturalGaussian) for name in PATTERNS
]


def posterior_of(kind, name, batch=(), seed=0):
    """Away from zero and the identity."""
    pattern = PATTERNS[name]
    q = kind(DIM, batch, structure=pattern, mean=randn(*batch, DIM, seed=seed), dtype=DTYPE)
    matrix = root_in(pattern, batch, seed + 1)
    matrix = matrix @ matrix.mT if kind is ngvi.NaturalGaussian else matrix
    mean = q.mean.clone()
    vector = (matrix @ mean[..., None])[..., 0] if kind is ngvi.NaturalGaussian else mean
    q.assign(Coordinates(vector, pattern.from_dense(matrix)), torch.ones(batch, dtype=torch.bool))
    return q


@pytest.mark.parametrize(("kind", "name"), [pair for pair in FAMILIES if pair[0] is not ngvi.NaturalGaussian])
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

    def test_blocks_of_one_coordinate_are_a_mean_field(self):
        """Whatever stores them: a conversion takes the variances, and by default gives every entry room."""
        q = ngvi.PrecisionCholeskyGaussian(3, structure=EqualBlocks(3, 1), scale=torch.tensor([1.0, 2.0, 3.0]))
        new = ngvi.NaturalGaussian.from_posterior(q)
        assert new.structure == Dense(3)
        close(new.covariance, q.covariance, 1e-6)
        assert ngvi.NaturalGaussian.from_posterior(new, structure=EqualBlocks(3, 1)).structure == EqualBlocks(3, 1)


@pytest.mark.parametrize("kind", [ngvi.CholeskyGaussian, ngvi.PrecisionCholeskyGaussian, ngvi.NaturalGaussian])
def test_dense_matrices_need_no_table_of_their_entries(kind, monkeypatch):
    """It would be several times as large as the matrix."""

    def refused(structure, device):
        raise AssertionError(f"a table of the entries of {structure}")

    monkeypatch.setattr(pattern_module, "index_of", refused)
    model = ngvi.GeneralizedLinear(randn(20, 5, seed=1), torch.arange(20) % 2)
    assert ngvi.fit(kind(5, dtype=DTYPE), model, progress=False).converged
    assert ngvi.fit(kind(5, dtype=DTYPE), model.log_joint, progress=False).converged
    for rule in (ngvi.rules.RootGradient, ngvi.rules.LogNaturalGradient, ngvi.rules.LocalExponential):
        if rule.emits in kind.takes:
            ngvi.NaturalGradientVI(kind(5, dtype=DTYPE), rule(), lr=0.01, momentum=None).step(model)
    ngvi.Snngm(kind(5, dtype=DTYPE)).step(model.log_joint)


KEPT = (
    "numerics.arrays.constant numerics.special._line numerics.gaussian_integrals._constants posteriors.warps._halves "
    "numerics.gaussian_integrals._square_tensors expectations.quadrature._tensors networks.families._table"
)


@pytest.mark.parametrize("mode", [FakeTensorMode, torch.inference_mode, grad_increment_nesting])
def test_what_is_kept_serves_later_in_whatever_mode_it_was_made(mode, monkeypatch):
    """Nodes, coefficients, tables and draws that are kept, and what a posterior computes once from its coordinates."""
    for name in KEPT.split():
        monkeypatch.setattr(f"torchngvi.{name}", remembered(pkgutil.resolve_name(f"torchngvi.{name}").__wrapped__))
    x, draws, q = torch.zeros(3, dtype=DTYPE), Fixed(8), ngvi.NaturalGaussian(3, dtype=DTYPE).double()

    def make():
        of_softplus, of_log = gaussian_integrals.softplus(x, x + 1), gaussian_integrals.log1p_square(x, x + 1)
        curve = warps.SinhArcsinh().forward(x, torch.zeros(3, 2, dtype=DTYPE))
        noise, bound = families.windows(x, "weight", 7, 1), PiecewiseBound(6).softplus(x, x + 1)
        kept = arrays.constant(0.5, DTYPE, x.device), *special.normal_rule(13, 1, x), draws(x), q.mean
        return *of_softplus, *of_log, curve, *noise, *bound, *kept

    with mode(**{"allow_non_fake_inputs": True} if mode is FakeTensorMode else {}):
        make()
    assert not any(map(torch._C._functorch.is_functorch_wrapped_tensor, make()))
    for tensor in make():
        assert type(tensor) is torch.Tensor
        (torch.ones_like(tensor, requires_grad=True) * tensor).sum().backward()


def test_constants_that_are_kept_stay_what_they_are():
    """What was written to is made again, and nothing is kept that a mode has faked."""
    like, where = torch.zeros(7, dtype=torch.float64), torch.device("cpu")
    Dense(7).eye(like).mul_(2)
    constant(0.123, like.dtype, where).mul_(0)
    assert torch.equal(Dense(7).eye(like), torch.eye(7, dtype=like.dtype))
    assert constant(0.123, like.dtype, where) == 0.123
    tree, parts = Forest((2, 2, -1), (1, 1, 1), (2, 1, 0)), [torch.zeros(2, 1, 1), torch.zeros(1, 1, 1)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        Dense(8).flat(Dense(8).eye(torch.zeros(8))), constant(0.321, torch.float32, where)
        tree.join([part.to("meta") for part in parts])
    made = Dense(8).flat(Dense(8).eye(torch.zeros(8))), constant(0.321, torch.float32, where)
    columns = tree.join([part.to("meta") for part in parts])
    assert {*map(type, [*made, columns, *(kind.place for kind in tree.on(columns))])} == {torch.Tensor}
    pattern_module.index_of(ScalarArrow(3), where).rows.mul_(0)
    assert pattern_module.index_of(ScalarArrow(3), where).rows.tolist() == [0, 1, 2, 2, 2]
