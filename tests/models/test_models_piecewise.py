"""Piecewise quadratic bounds of log(1 + eˣ): the table, the expectations, the hazard, the published values."""

import math
import os
import re
from pathlib import Path

import pytest
import torch
from helpers import DIFFERENCE, DIM, DTYPE, EXACT, POSTERIORS, close, difference, randn, random_model, random_posterior
from sklearn.datasets import load_svmlight_file
from sklearn.model_selection import train_test_split

from torchngvi import SRVN, VN, CholeskyGaussian, GeneralizedLinear, NaturalGaussian, fit
from torchngvi.errors import InputError, PairError
from torchngvi.expectations import PiecewiseBound, Quadrature
from torchngvi.expectations.quadrature import best_pieces
from torchngvi.models import NegativeBinomial
from torchngvi.numerics.gaussian_integrals import softplus

# gap by number of pieces, as printed
GAPS = {
    4: "3.30e-02",
    6: "7.42e-03",
    8: "2.76e-03",
    10: "1.31e-03",
    12: "7.23e-04",
    16: "2.87e-04",
    20: "1.42e-04",
    30: "4.02e-05",
    40: "1.66e-05",
}
# R = 20, the left half: low, c, b, a
TABLE = [
    (-math.inf, 0.0001421429, 0.0, 0.0),
    (-8.8586066071, 0.0250159298, 0.0058167623, 0.0003414692),
    (-6.1010364346, 0.1000487756, 0.0305803344, 0.0023884154),
    (-4.6712832131, 0.2123623341, 0.0788122993, 0.0075730696),
    (-3.6932771595, 0.3418335016, 0.1490396957, 0.0171066026),
    (-2.9379042401, 0.4678332597, 0.2348874066, 0.0317457662),
    (-2.3082943058, 0.5728371915, 0.3258756418, 0.0514832742),
    (-1.7507667161, 0.6454529599, 0.4087396534, 0.0751692668),
    (-1.2262828740, 0.6830035922, 0.4697285869, 0.1000275916),
    (-0.6905416595, 0.6931471806, 0.4984647320, 0.1206674273),
]
counts = pytest.mark.parametrize("R", GAPS)


def exact(x):
    return torch.logaddexp(torch.zeros_like(x), x)


def values(pieces, x):
    """The bound on a grid, piece by piece."""
    out = torch.full_like(x, torch.nan)
    for piece in pieces:
        inside = (x >= piece.low) & (x <= piece.high)
        out[inside] = ((piece.a * x + piece.b) * x + piece.c)[inside]
    return out


def brute(pieces, e, s, number=400_001):
    """E of the bound by a fine trapezoid rule in z."""
    z = torch.linspace(-10, 10, number, dtype=DTYPE)
    w = torch.exp(-0.5 * z.square())
    return float(values(pieces, e + s * z) @ w / w.sum())


class TestTable:
    @pytest.mark.sparse(3)
    @counts
    def test_upper_bound(self, R):
        """0 ≤ bound - log(1 + eˣ) ≤ ε(R), the gap reached on every piece and equal to the printed digits."""
        pieces = best_pieces(R)
        assert len(pieces) == R
        x = torch.linspace(-40, 40, 200_001, dtype=DTYPE)
        gap = values(pieces, x) - exact(x)
        assert float(gap.min()) >= -1e-13
        assert f"{float(gap.max()):.2e}" == GAPS[R]
        assert f"{PiecewiseBound(R).gap:.2e}" == GAPS[R]
        for piece in pieces:
            inside = gap[(x >= piece.low) & (x <= piece.high)]
            assert float(inside.max()) == pytest.approx(float(gap.max()), rel=1e-3)

    @pytest.mark.accuracy
    def test_the_pieces_fit_together(self):
        for R in GAPS:
            pieces = best_pieces(R)
            assert [p.high for p in pieces[:-1]] == [p.low for p in pieces[1:]]
            assert (pieces[0].low, pieces[R // 2].low, pieces[-1].high) == (-math.inf, 0.0, math.inf)

    def test_twenty_pieces(self):
        """Every printed coefficient, to the accuracy of the printed gap; and the mirror image."""
        pieces = best_pieces(20)
        for piece, (low, c, b, a) in zip(pieces, TABLE, strict=False):
            assert piece.low == pytest.approx(low, abs=2e-7)
            assert (piece.c, piece.b, piece.a) == pytest.approx((c, b, a), abs=1e-8)
        for left, right in zip(pieces, reversed(pieces), strict=True):
            assert right.low == -left.high
            assert (right.a, right.b, right.c) == pytest.approx((left.a, 1 - left.b, left.c), abs=1e-15)

    def test_two_tails(self):
        assert best_pieces(2) == ((-math.inf, 0.0, 0.0, 0.0, math.log(2)), (0.0, math.inf, 0.0, 1.0, math.log(2)))

    def test_the_gap_falls_with_the_cube(self):
        assert 0.9 < PiecewiseBound(40).gap * 8 / PiecewiseBound(20).gap < 1.1

    def test_a_table_of_ones_own(self):
        bound = PiecewiseBound(table=[tuple(piece) for piece in best_pieces(6)])
        assert bound.pieces == best_pieces(6)
        for bad in (
            [(-math.inf, math.inf, 0.0, 1.0, 1.0)],
            [(-math.inf, 0.0, 0.0, 0.0, 0.7), (1.0, math.inf, 0.0, 1.0, 0.7)],
            [(-9.0, 0.0, 0.0, 0.0, 0.7), (0.0, math.inf, 0.0, 1.0, 0.7)],
            [(-math.inf, 0.0, 0.0, 0.0, 0.7), (0.0, math.inf, 0.1, 1.0, 0.7)],
        ):
            text = (
                "a table has rows (low, high, a, b, c) from -inf to inf, each starting where the last ended, the "
                f"first and last with a = 0; got {len(bad)} rows that do not. Sort them by low."
            )
            with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
                PiecewiseBound(table=bad)


class TestExpectations:
    @pytest.mark.sparse(3)
    @pytest.mark.parametrize("R", [4, 20])
    @pytest.mark.parametrize("s", [0.3, 1.0, 5.0, 40.0])
    def test_value(self, R, s):
        bound = PiecewiseBound(R)
        for e in (-20.0, -3.0, -0.4, 0.0, 1.0, 7.0):
            value = bound.softplus(torch.tensor([e], dtype=DTYPE), torch.tensor([s * s], dtype=DTYPE)).value
            assert float(value) == pytest.approx(brute(bound.pieces, e, s), abs=2e-7 * max(1.0, s))

    @pytest.mark.sparse(3)
    @counts
    def test_error_of_the_value(self, R):
        """Between 0 and ε(R) at every mean and variance, so O(R⁻³)."""
        bound = PiecewiseBound(R)
        e = torch.linspace(-30, 30, 121, dtype=DTYPE)
        for s in (1e-6, 1e-3, 0.1, 1.0, 10.0, 1e3, 1e4):
            v = torch.full_like(e, s * s)
            error = bound.softplus(e, v).value - softplus(e, v).value
            assert float(error.min()) >= -1e-11 * max(1.0, s)
            assert float(error.max()) <= bound.gap + 1e-11 * max(1.0, s)

    @pytest.mark.parametrize("R", [2, 4, 20])
    @pytest.mark.parametrize("s", [0.05, 0.3, 1.0, 5.0, 100.0])
    def test_derivatives_are_those_of_the_value(self, R, s):
        """With the terms of the breakpoints: finite differences of the value, whatever the bound does there."""
        bound = PiecewiseBound(R)
        e, v = 4 * randn(80, seed=1), torch.full((80,), s * s, dtype=DTYPE)
        _, slope, curvature = bound.softplus(e, v)
        step = 1e-3 * min(s, 1.0)
        close(slope, difference(lambda h: bound.softplus(e + h, v).value, step), DIFFERENCE)
        numeric = 2 * difference(lambda h: bound.softplus(e, v * (1 + h)).value) / v
        close(curvature * s, numeric * s, 1e-7)

    def test_far_from_every_breakpoint(self):
        """No cancellation: the tails themselves."""
        bound = PiecewiseBound(20)
        e = torch.tensor([-1000.0, 1000.0], dtype=DTYPE)
        value, slope, curvature = bound.softplus(e, torch.ones_like(e))
        close(value, torch.tensor([bound.pieces[0].c, 1000 + bound.pieces[-1].c], dtype=DTYPE), EXACT)
        assert slope.tolist() == [0.0, 1.0]
        assert curvature.tolist() == [0.0, 0.0]

    def test_without_variance(self):
        """The bound itself, between breakpoints."""
        bound, e = PiecewiseBound(20), torch.tensor([-9.5, -1.0, 0.3, 5.0], dtype=DTYPE)
        value, slope, curvature = bound.softplus(e, torch.zeros_like(e))
        close(value, values(bound.pieces, e), EXACT)
        close(slope, difference(lambda h: values(bound.pieces, e + h)), DIFFERENCE)
        assert bool(torch.isfinite(curvature).all())


class TestHazard:
    """The curvature follows the steps of the bound where s is small."""

    @pytest.mark.parametrize(
        ("s", "printed"),
        [(1.0, 3e-5), (0.5, 2e-4), (0.2, 1.2e-3), (0.1, 5e-3), (0.05, 1.6e-2), (0.02, 0.09), (0.01, 0.35)],
    )
    def test_error_of_the_curvature(self, s, printed):
        """The printed order of magnitude."""
        e = torch.linspace(-10, 10, 20_001, dtype=DTYPE)
        v = torch.full_like(e, s * s)
        error = (PiecewiseBound(20).softplus(e, v).curvature - softplus(e, v).curvature).abs().max()
        assert 0.5 * printed < float(error) < 2 * printed

    @pytest.mark.parametrize(("s", "negative"), [(0.2, True), (0.1, True), (0.5, False), (1.0, False)])
    def test_negative_curvature(self, s, negative):
        e = torch.linspace(-10, 10, 20_001, dtype=DTYPE)
        curvature = PiecewiseBound(20).softplus(e, torch.full_like(e, s * s)).curvature
        assert bool((curvature < 0).any()) is negative

    def test_clipping(self):
        """max(β, 0), no longer a derivative: not comparable, and refused by steps found by trial."""
        X = torch.linspace(-10, 10, 200, dtype=DTYPE)[:, None]
        model = GeneralizedLinear(X, (X[:, 0] > 1).double(), prior_precision=1e-6)
        q = CholeskyGaussian(1, mean=1.0, scale=0.02, dtype=DTYPE)
        plain, clipped = (PiecewiseBound(20, clip=clip)(q, model) for clip in (False, True))
        assert float(plain.derivative.beta.min()) < 0
        close(clipped.derivative.beta, plain.derivative.beta.clamp_min(0.0), 0.0)
        close(clipped.derivative.alpha, plain.derivative.alpha, 0.0)
        close(clipped.value, plain.value, 0.0)
        assert (plain.comparable, clipped.comparable) == (True, False)
        VN(q, estimator=PiecewiseBound(20))
        text = (
            "SufficientDecrease compares the objective before and after a step, and PiecewiseBound gives noisy values. "
            "Pass a learning rate, for example lr=0.1, or step_size=KLRadius(0.1)."
        )
        with pytest.raises(PairError, match=f"^{re.escape(text)}$"):
            VN(q, estimator=PiecewiseBound(20, clip=True))
        loss = VN(q, lr=0.1, estimator=PiecewiseBound(20, clip=True)).step(model)
        assert math.isfinite(float(loss))

    @pytest.mark.accuracy
    def test_the_value_has_little_bias_the_curvature_a_lot(self):
        """The exact objective at the bound's fixed point approaches the optimum as R grows."""
        X = randn(60, DIM, seed=1)
        model = GeneralizedLinear(X, (X.sum(-1) + randn(60, seed=2) > 0).double())
        q = CholeskyGaussian(DIM, dtype=DTYPE)
        best, gaps = fit(q, model, progress=False, tolerance=1e-8).loss, []
        for R in (4, 8, 16, 32):
            p = CholeskyGaussian(DIM, dtype=DTYPE)
            assert fit(p, model, VN(p, estimator=PiecewiseBound(R)), progress=False).converged
            gaps.append(model.negative_elbo(p).item() - best)
        assert all(b < 0.5 * a for a, b in zip(gaps, gaps[1:], strict=False))
        assert gaps[-1] < 1e-5


class TestEstimator:
    @pytest.mark.parametrize("name", POSTERIORS)
    @pytest.mark.parametrize("batch", [(), (2,), (3,)])
    def test_packet(self, name, batch):
        """The derivative of its own value in q's frame, by finite differences."""
        target = random_model("bernoulli_logit", batch, 3, 0.5).target
        q, bound = random_posterior(name, batch, seed=1), PiecewiseBound(6)
        e = bound(q, target)
        g, H = e.derivative.raw()
        mean, root = q.mean.clone(), q.scale_tril.clone()

        def value(m, V):
            return bound(CholeskyGaussian(DIM, batch, mean=m, scale=torch.linalg.cholesky(V)), target).value

        V, d, D = root @ root.mT, randn(*batch, DIM, seed=7), randn(*batch, DIM, DIM, seed=8)
        D = 0.1 * (D + D.mT)
        close((g * d).sum(-1), difference(lambda h: value(mean + h * d, V)), DIFFERENCE)
        close(0.5 * (H * D).sum((-2, -1)), difference(lambda h: value(mean, V + h * D)), DIFFERENCE)
        exact_value = Quadrature()(q, target).value
        assert bool((e.value >= exact_value).all())
        assert bool((e.value <= exact_value + bound.gap * target.weights.sum(-1)).all())
        assert (e.temperature, e.comparable) == (0.5, True)

    @pytest.mark.accuracy
    def test_negative_binomial(self):
        X, y = randn(10, DIM, seed=1), (3 * randn(10, seed=2).abs()).round()
        model, q = GeneralizedLinear(X, y, NegativeBinomial(2.0)), random_posterior("cholesky", (), seed=1)
        bound = PiecewiseBound(40)
        error = bound(q, model).value - Quadrature()(q, model).value
        assert 0 < float(error) < bound.gap * float((y + 2.0).sum())

    def test_half_precision_of_double(self):
        """float32: the table is rounded, the value good to 1e-5."""
        e, v = randn(50, seed=1), randn(50, seed=2).square()
        single = PiecewiseBound(20).softplus(e.float(), v.float())
        close(single.value.double(), PiecewiseBound(20).softplus(e, v).value, 1e-5)


# metric of Kumar et al. (2025), Table 3, at the fixed point of 20 pieces: Σ F + β/2 |m|² - ½ log det V
GOLDEN = [
    ("australian_scale", 14, 1e-5, "196.8165", "54.608"),
    ("diabetes_scale", 8, 1e-2, "301.1736", "79.718"),
    ("breast-cancer_scale", 10, 1e-1, "52.8477", "13.621"),
]


@pytest.mark.parametrize(("file", "dim", "beta", "metric", "nll"), GOLDEN, ids=[row[0] for row in GOLDEN])
@pytest.mark.parametrize(("method", "family"), [(VN, NaturalGaussian), (SRVN, CholeskyGaussian)], ids=["vn", "srvn"])
def test_converged_values(file, dim, beta, metric, nll, method, family):
    path = Path(os.environ.get("TORCHNGVI_DATA") or ".") / "libsvm" / f"{file}.svm.gz"
    if not path.exists():
        pytest.skip(f"needs {path.name}: set TORCHNGVI_DATA to a folder with libsvm/{path.name}")
    X, y = load_svmlight_file(str(path), n_features=dim)
    X, X_test, y, y_test = (
        torch.as_tensor(part, dtype=DTYPE) for part in train_test_split(X.toarray(), y, test_size=0.2, random_state=42)
    )
    bound, model = PiecewiseBound(20), GeneralizedLinear(X, y, prior_precision=beta)
    q = family(dim, dtype=DTYPE)
    result = fit(q, model, method(q, estimator=bound), progress=False, max_evaluations=2000)
    assert result.converged, result
    full = result.loss + 0.5 * dim * (math.log(beta) + 1)
    assert f"{full - 0.5 * beta * float(q.variance.sum()):.4f}" == metric
    held_out = GeneralizedLinear(X_test, y_test)
    variance = q.marginal_variance(X_test).detach()
    moments = held_out.likelihood.expected(X_test @ q.mean, variance, held_out.y, bound.softplus)
    assert f"{float(moments.value.sum()):.3f}" == nll
