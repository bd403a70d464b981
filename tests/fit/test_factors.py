"""Log joints that are sums over a forest: clique by clique, every estimator gives what it gives of the whole θ."""

import functools
import math
import pathlib
import re

import pytest
import torch
from helpers import DTYPE, PRECISION, Watch, close, posterior_in, randn

import torchngvi
from torchngvi import (
    VN,
    CholeskyGaussian,
    GeneralizedLinear,
    NaturalGaussian,
    NaturalGradientVI,
    PrecisionCholeskyGaussian,
    fit,
)
from torchngvi.errors import PairError
from torchngvi.expectations import (
    ClosedEntropyStein,
    Fixed,
    Hessian,
    HessianVector,
    PerFactor,
    Quadrature,
    Reparametrized,
    Stein,
)
from torchngvi.interfaces import Additive
from torchngvi.models import FactorTarget, TractableFactors
from torchngvi.posteriors import clique_marginals
from torchngvi.rules import LocalExponential, NaturalGradient
from torchngvi.structures import Dense, arrow, nested

GROUPS, ROWS, LOCAL, GLOBALS = 5, 4, 2, 2
ARROW = arrow(groups=GROUPS, local=LOCAL, globals=GLOBALS)
TREE = nested([0, 0, 1, 2, 2], [0, 1, 1], local=[1, 2, 1], globals=1)
SHARE = torch.tensor([1.0, 1.0, 0.5 / GROUPS, 0.5 / GROUPS], dtype=DTYPE)  # the prior counts once a group


@functools.cache
def poisson():
    """Counts of groups: as one term a group, and as one design of all D coordinates."""
    rows = 0.2 * randn(GROUPS, ROWS, LOCAL + GLOBALS, seed=1)
    counts = torch.poisson(rows.sum(-1).exp(), generator=torch.Generator().manual_seed(2))
    groups = GeneralizedLinear(rows, counts, "poisson_log", prior_precision=SHARE)
    places = ARROW.gather(torch.arange(ARROW.dim))[0]  # (n, k)
    whole = torch.zeros(GROUPS, ROWS, ARROW.dim, dtype=DTYPE)
    whole.scatter_(-1, places[:, None, :].expand(-1, ROWS, -1), rows)
    precision = torch.cat([torch.ones(GROUPS * LOCAL), torch.full((GLOBALS,), 0.5)]).to(DTYPE)
    dense = GeneralizedLinear(whole.flatten(0, 1), counts.flatten(), "poisson_log", prior_precision=precision)
    target = TractableFactors(ARROW, [(0, groups)])
    shares = GLOBALS * (GROUPS * math.log(0.5 / GROUPS / (2 * math.pi)) - math.log(0.5 / (2 * math.pi))) / 2
    return target, dense, shares  # the log normaliser of the prior in shares, beyond that of one


@functools.cache
def quadratic(structure):
    """A quadratic term of every clique, of which all estimators that are exact for quadratics know the same."""
    factors = []
    for k, kind in enumerate(structure.kinds):
        size = kind.size + kind.above
        A, b = 0.3 * randn(kind.nodes, size, size, seed=10 + k), randn(kind.nodes, size, seed=20 + k)
        H = A @ A.mT + torch.eye(size, dtype=DTYPE)
        factors.append(
            (
                k,
                lambda theta, H=H, b=b: (
                    (b * theta).sum(-1) - 0.5 * torch.einsum("...nk,nkl,...nl->...n", theta, H, theta)
                ),
            )
        )
    return FactorTarget(structure, factors)


def same_packet(one, other, q, shift=0.0):
    for x, y in zip(one.derivative.framed(q.frame()), other.derivative.framed(q.frame()), strict=True):
        close(x, y, 1e-12)
    close(one.value, other.value - shift, 1e-12)


@pytest.mark.parametrize("kind", PRECISION)
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
class TestPackets:
    def test_exact_factors_add_up_to_the_exact_whole(self, kind, batch):
        q = posterior_in(kind, ARROW, batch, 3)
        factors, dense, shift = poisson()
        if not batch:
            expected = Quadrature()(q, dense)
            for estimator in (Quadrature(), PerFactor(Hessian(2))):
                same_packet(estimator(q, factors), expected, q, shift)
            grads = []
            for target, constant in ((factors, shift), (dense, 0.0)):
                loss = target.negative_elbo(q)
                grads.append((loss + constant, *torch.autograd.grad(loss, (q.mean_probe, q.root_probe))))
            for x, y in zip(*grads, strict=True):
                close(x, y, 1e-12)
        close(factors.log_joint(q.mean), dense.log_joint(q.mean) + shift, 1e-12)

    @pytest.mark.sparse(5)
    @pytest.mark.parametrize("structure", [ARROW, TREE], ids=["arrow", "tree"])
    @pytest.mark.parametrize("estimator", [Stein, Reparametrized, ClosedEntropyStein, Hessian, HessianVector])
    def test_every_estimator_of_cliques_is_that_of_the_whole(self, kind, batch, structure, estimator):
        """Whitened draws are exact for quadratics, 2k of them for a clique and 2D of them for the whole."""
        q, target = posterior_in(kind, structure, batch, 3), quadratic(structure)
        by_cliques = PerFactor(estimator(Fixed(2 * structure.widest)))(q, target)
        whole = estimator(Fixed(2 * structure.dim))(q, target)
        same_packet(by_cliques, whole, q)
        assert by_cliques.comparable is whole.comparable

    def test_a_clique_is_a_marginal_of_q(self, kind, batch):
        q = posterior_in(kind, TREE, batch, 3)
        for place, clique in zip(TREE.gather(torch.arange(TREE.dim)), clique_marginals(q), strict=True):
            close(clique.mean, q.mean[..., place], 0.0)
            close(clique.covariance, q.covariance[..., place[:, :, None], place[:, None, :]], 1e-12)
            assert clique.structure == Dense(place.shape[-1])


OPTIMIZERS = {
    "VN": lambda q: VN(q),
    "SR-VN": lambda q: NaturalGradientVI(q, NaturalGradient()),
    "local exponential": lambda q: NaturalGradientVI(q, LocalExponential()),
}


class TestFits:
    @pytest.mark.parametrize(
        ("kind", "name"), [(PrecisionCholeskyGaussian, name) for name in OPTIMIZERS] + [(NaturalGaussian, "VN")]
    )
    def test_the_optimum_is_the_dense_one(self, kind, name):
        """With steps found by trial and the memory of L-BFGS in the frame: bound, means and covariances."""
        factors, dense, shift = poisson()
        q, full = kind(ARROW.dim, structure=ARROW, dtype=DTYPE), CholeskyGaussian(ARROW.dim, dtype=DTYPE)
        result = fit(q, factors, OPTIMIZERS[name](q), tolerance=1e-9, progress=False)
        assert result.converged, result.reason
        best = fit(full, dense, tolerance=1e-9, progress=False)
        assert result.loss == pytest.approx(best.loss - shift, abs=1e-10)
        close(q.mean, full.mean, 1e-8)
        close(q.covariance, full.covariance, 1e-8)

    def test_from_gradients_at_draws_of_each_clique(self):
        """2k fixed draws suffice where the whole wants 2D."""
        q = PrecisionCholeskyGaussian(TREE.dim, structure=TREE, dtype=DTYPE)
        target, draws = quadratic(TREE), Fixed(2 * TREE.widest)
        assert fit(q, target, VN(q, estimator=PerFactor(Stein(draws))), tolerance=1e-9, progress=False).converged
        H = torch.func.hessian(lambda theta: -target.log_joint(theta))(q.mean.detach())
        close(q.precision, H, 1e-8)

    @pytest.mark.accuracy
    def test_noisy_draws_need_a_learning_rate(self):
        q = PrecisionCholeskyGaussian(TREE.dim, structure=TREE, dtype=DTYPE)
        with pytest.raises(PairError, match="PerFactor gives noisy values"):
            VN(q, estimator=PerFactor(Stein(8)))
        opt = VN(q, lr=0.2, estimator=PerFactor(Stein(8)))
        losses = [float(opt.step(quadratic(TREE))) for _ in range(60)]
        assert sum(losses[-10:]) < sum(losses[:10]) - 10

    def test_nothing_is_d_by_d(self):
        groups = 1000
        structure = arrow(groups=groups, local=1, globals=2)
        rows = randn(groups, 3, 3, seed=1)
        model = GeneralizedLinear(rows, (rows.sum(-1) > 0).to(DTYPE), prior_precision=1.0)
        target = FactorTarget(structure, [(0, model), (-1, lambda theta: -0.5 * theta.square().sum(-1))])
        q = PrecisionCholeskyGaussian(structure.dim, structure=structure, dtype=DTYPE)
        opt = VN(q, estimator=PerFactor(Stein(Fixed(8))))
        with Watch(q.dim):
            losses = [float(opt.step(target)) for _ in range(3)]
        assert losses[2] < losses[0]


def several(tractable):
    """Terms of every kind of node, of which the two last are the prior too; functions, or tractable ones."""
    if not tractable:
        terms = [(factor.kind, factor.target) for factor in quadratic(TREE).factors]
        terms[0] = (0, lambda theta: -(theta**4).sum(-1))
        return FactorTarget(TREE, terms, 0.7, prior=terms[-2:])
    terms = []
    for k, kind in enumerate(TREE.kinds):
        rows = 0.2 * randn(kind.nodes, ROWS, kind.size + kind.above, seed=30 + k)
        terms.append((k, GeneralizedLinear(rows, randn(kind.nodes, ROWS, seed=40 + k), "gaussian")))
    return TractableFactors(TREE, terms, 0.7, prior=terms[-2:])


@pytest.mark.parametrize("number", [1, 2, 3])
class TestPieces:
    """Consecutive factors add up to the whole; the prior, which each has, is counted once."""

    @pytest.mark.parametrize("tractable", [False, True])
    def test_values_and_gradients(self, number, tractable):
        target, theta = several(tractable), randn(5, TREE.dim, seed=1).requires_grad_()
        pieces = list(target.pieces(number))
        assert len(pieces) == number
        assert [f for piece in pieces for f in piece.factors[:-2]] == target.factors[:-2]
        close(target.log_joint(theta), target.data_log_likelihood(theta) + target.log_prior(theta), 1e-12)
        whole = target.data_log_likelihood(theta)
        parts = sum(piece.data_log_likelihood(theta) for piece in pieces)
        close(parts, whole, 1e-12)
        close(*(torch.autograd.grad(value.sum(), theta)[0] for value in (parts, whole)), 1e-12)
        for piece in pieces:
            assert isinstance(piece, Additive)
            assert piece.temperature == 0.7
            close(piece.log_prior(theta), target.log_prior(theta), 0.0)
        assert float(target.log_prior(theta).detach().abs().min()) > 0.1

    @pytest.mark.parametrize("kind", PRECISION)
    @pytest.mark.parametrize("tractable", [False, True])
    def test_packets(self, number, kind, tractable):
        target, q = several(tractable), posterior_in(kind, TREE, (), 3)
        prior = type(target)(TREE, [(factor.kind, factor.target) for factor in target.factors[-2:]], 0.7)
        estimators = [PerFactor(Stein(Fixed(64)))] + [Quadrature()] * tractable
        for estimator in estimators:
            whole, once = (estimator(q, one).derivative.framed(q.frame()) for one in (target, prior))
            value = estimator(q, target).value + (number - 1) * estimator(q, prior).value
            packets = [estimator(q, piece) for piece in target.pieces(number)]
            close(sum(e.value for e in packets), value, 1e-12)
            for name in ("a", "W"):
                parts = sum(getattr(e.derivative.framed(q.frame()), name) for e in packets)
                close(parts, getattr(whole, name) + (number - 1) * getattr(once, name), 1e-12)

    def test_expectations_of_the_data_alone(self, number):
        target, q = several(True), posterior_in(PRECISION[0], TREE, (), 3)
        frame = q.frame()
        value, packet = target.data_energy(frame)
        prior = TractableFactors(TREE, [(factor.kind, factor.target) for factor in target.factors[-2:]], 0.7)
        (whole, joint), (once, own) = target.expected_energy(frame), prior.expected_energy(frame)
        close(value + once, whole, 1e-12)
        parts = [piece.data_energy(frame) for piece in target.pieces(number)]
        close(sum(part for part, _ in parts), value, 1e-12)
        for name in ("a", "W"):
            close(getattr(packet, name) + getattr(own, name), getattr(joint, name), 1e-12)
            close(sum(getattr(part, name) for _, part in parts), getattr(packet, name), 1e-12)


def test_the_page_of_groups(monkeypatch):
    """The snippet of arrows in docs/groups.md runs as it stands, and every fit of it converges."""
    text = (pathlib.Path(__file__).parents[2] / "docs/groups.md").read_text(encoding="utf-8")
    section = text.partition("\n## Precisions that are arrows or forests\n")[2].partition("\n## ")[0]
    (snippet,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    results = []

    def watched(*given, **settings):
        results.append(fit(*given, **settings, progress=False))

    monkeypatch.setattr(torchngvi, "fit", watched)
    torch.manual_seed(0)
    exec(compile(snippet, "docs/groups.md", "exec"), {})
    assert [result.converged for result in results] == [True] * 3
