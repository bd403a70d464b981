"""Moments of the softplus under N(e, v): relative errors in both tails, derivatives, and rows that are not finite."""

import json
import math
import pathlib

import numpy as np
import pytest
import torch
from helpers import DIFFERENCE, DTYPE, close, needs_compile
from reference import precise_mean

from torchngvi.numerics import gaussian_integrals as logistic
from torchngvi.numerics import kernels
from torchngvi.numerics.gaussian_integrals import softplus

RELATIVE = 1e-12
# value, slope and curvature from sums of 30 digits: [m, s, F, α, β] with m = -|e|
GOLDEN = torch.tensor(
    json.loads((pathlib.Path(__file__).parent / "logistic_golden.json").read_text(encoding="utf-8")), dtype=DTYPE
)
M, S, EXPECTED = GOLDEN[:, 0], GOLDEN[:, 1], GOLDEN[:, 2:]
NORMAL = EXPECTED > 1e-300  # not below the smallest number


@pytest.fixture(autouse=True)
def _without_kernel(monkeypatch):
    monkeypatch.setenv("TORCHNGVI_KERNELS", "0")


def compiled(monkeypatch):
    monkeypatch.setenv("TORCHNGVI_KERNELS", "1")
    kernel = kernels.logistic(1, logistic.COEFFICIENTS, logistic._formula)
    if kernel is None:
        pytest.skip("needs a C compiler")
    return kernel


def five(form, monkeypatch, e, v):
    """E f to E f⁗, by either body."""
    return compiled(monkeypatch)(e, v, 5) if form == "kernel" else logistic._formula(e, v, 0, 5)


FORMS = pytest.mark.parametrize("form", ["operators", "kernel"])


@FORMS
def test_relative_errors(form, monkeypatch):
    """Below 1e-12 for s from 0 to 1e4 and means down to -700, wherever the moment is a normal number."""
    found = torch.stack(five(form, monkeypatch, M, S * S)[:3], -1)
    assert float(((found - EXPECTED) / EXPECTED).abs()[NORMAL].max()) <= RELATIVE


def test_blocks_of_rows():
    assert logistic._BLOCK_ROWS[True] == 1024
    e, v = M.repeat(2)[:1100], S.square().repeat(2)[:1100]
    blocks = [softplus(*block) for block in zip(e.split(40), v.split(40), strict=True)]
    for part, alone in zip(softplus(e, v), zip(*blocks, strict=True), strict=True):
        close(part, torch.cat(alone), 1e-15)


def functions(x):
    """The softplus and its first four derivatives, each without cancellation in its tails."""
    u = np.exp(-np.abs(x))
    sigma, sign = np.where(x > 0, 1, u) / (1 + u), np.sign(x)
    curvature = u / (1 + u) ** 2
    third, fourth = -sign * curvature * (1 - u) / (1 + u), curvature * (1 - 4 * u + u * u) / (1 + u) ** 2
    return np.maximum(x, 0) + np.log1p(u), sigma, curvature, third, fourth


# without those whose mass is not within the panels
GRID = [
    (e, v)
    for e in (0.0, 0.7, -3.0, 12.0, -25.0, 60.0, -90.0, 1e3, -1e4)
    for v in (0.0, 1e-300, 1e-10, 1e-5, 1e-3, 0.1, 2.0, 30.0, 1e3, 1e4, 1e6, 1e8)
    if v < 25 or e * e < 25 * v
]


@pytest.mark.sparse(5)
@FORMS
@pytest.mark.parametrize(("e", "v"), GRID)
def test_precise_quadrature(form, e, v, monkeypatch):
    """All five, the last two absolutely: they change sign."""
    s = math.sqrt(v)
    found = five(form, monkeypatch, *torch.tensor([[e], [v]], dtype=DTYPE))
    for order, part in enumerate(found):
        expected = precise_mean(lambda x, order=order: functions(x)[order], e, s)
        bound = {"rel": RELATIVE, "abs": 0} if order < 3 else {"rel": 0, "abs": (5e-13, 1e-11)[order - 3]}
        assert float(part) == pytest.approx(expected, **bound), order


def test_the_coefficients_are_those_of_the_functions():
    """The errors on (0, 1] that are written beside them: of three relative to the function, of two to u."""
    u = np.linspace(1 / 2000, 1, 2000)
    with np.errstate(all="raise"):
        functions = np.log1p(u), u / (1 + u), u / (1 + u) ** 2, u * (1 - u) / (1 + u) ** 3
    functions += (u * (1 - 4 * u + u * u) / (1 + u) ** 4,)
    for order, written in enumerate((5.5e-17, 9.8e-16, 2.0e-14, 1.6e-13, 2.3e-12)):
        error = np.abs(np.polyval([*logistic.COEFFICIENTS[order][::-1], 0], u) - functions[order])
        rounding = 1e-15 * sum(map(abs, logistic.COEFFICIENTS[order]))
        assert float(np.max(error / (functions[order] if order < 3 else u))) <= 1.02 * written + rounding


def test_the_golden_values_reach_far():
    assert float(EXPECTED[NORMAL].min()) < 1e-290
    assert {0.0, 1e4} <= set(S.tolist())
    for sd in (0.3, 0.6, 2.0, 20.0, 1e3):
        assert bool((sd > S).any())
        assert bool((sd < S).any())


def test_the_right_tail_is_the_left_one_turned_round():
    for left, right, turned in zip(softplus(M, S * S), softplus(-M, S * S), ("value", "slope", "even"), strict=True):
        expected = {"value": left - M, "slope": 1 - left, "even": left}[turned]
        assert torch.equal(right, torch.where(M < 0, expected, left))


@pytest.mark.parametrize("s", [0.0, 0.05, 1.5, 5.0, 25.0])
def test_far_left_it_is_the_log_normal_mean(s):
    """E log(1 + eˣ) -> e^(e + v/2), as do the other two."""
    e = torch.tensor([-(s * s) - 12 * s - 45], dtype=DTYPE)
    for part in softplus(e, torch.full_like(e, s * s)):
        assert float(part / torch.exp(e + 0.5 * s * s)) == pytest.approx(1, abs=1e-12)


def test_single_precision():
    kept = (EXPECTED > 1e-37).all(-1)
    m, s = M[kept].float(), S[kept].float()
    exact = torch.stack(softplus(m.double(), (s * s).double()), -1)
    found = torch.stack(softplus(m, s * s), -1)
    assert found.dtype is torch.float32
    assert float(((found - exact) / exact).abs().max()) <= 1.5e-7


def curvature_derivatives(e, v):
    """∂β/∂e and ∂β/∂v."""
    parts = logistic._expectations(e, v, 3, 2)
    return parts[0], 0.5 * parts[1]


# to rounding in half precision; in single, what is below 1e-7 is absolutely so
ROUNDING = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("form", ["moments", "derivatives", "transformed"])
def test_every_precision(dtype, form):
    """The largest means and variances too: all is finite, and the rounding of what double precision gives."""
    forms = {"moments": softplus, "derivatives": curvature_derivatives, "transformed": logistic._expanded}
    most = torch.finfo(dtype).max
    e = torch.tensor([0.0, 1.0, -3.0, 10.0, -200.0, 257.0, -700.0, 3e4, most, -most, 0.0, 5.0], dtype=dtype)
    v = torch.tensor([1.0, 0.1, 4.0, 0.0, 400.0, 1e3, 6e4, 1.0, 1.0, 6e4, 6e4, 0.5 * most], dtype=dtype)
    for part, exact in zip(forms[form](e, v), forms[form](e.double(), v.double()), strict=True):
        assert part.dtype is dtype
        assert bool(part.isfinite().all())
        assert bool(((part.double() - exact).abs() <= ROUNDING[dtype] * exact.abs() + 1e-7).all())


@pytest.mark.parametrize("dtype", ROUNDING)
def test_gradients_in_every_precision(dtype):
    """Those of the curvature are right where e² is infinite."""
    e, v = torch.tensor([300.0, -260.0, 2.0, torch.finfo(dtype).max], dtype=dtype), torch.ones(4, dtype=dtype)
    found = torch.autograd.grad(softplus(e.requires_grad_(), v.requires_grad_()).curvature.sum(), (e, v))
    exact = curvature_derivatives(e.detach().double(), v.detach().double())
    for part, expected in zip(found, exact, strict=True):
        close(part.double(), expected, ROUNDING[dtype])


@pytest.mark.parametrize("kernel", ["0", "1"])
@pytest.mark.parametrize(
    ("e", "v", "expected"),
    [
        (math.nan, 1.0, (math.nan,) * 3),
        (0.0, math.nan, (math.nan,) * 3),
        (math.inf, 1.0, (math.inf, 1.0, 0.0)),
        (-math.inf, 1.0, (math.nan, 0.0, 0.0)),
        (2.0, math.inf, (math.inf, 0.5, 0.0)),
        (0.0, -1.0, (math.nan,) * 3),
        (0.0, -1e-17, (math.log(2), 0.5, 0.25)),
        (0.0, 0.0, (math.log(2), 0.5, 0.25)),
        (-1e300, 1.0, (0.0, 0.0, 0.0)),
    ],
)
@pytest.mark.parametrize("form", ["moments", "transformed"])
def test_rows_at_the_edge(kernel, e, v, expected, form, monkeypatch):
    """NaN, infinities, and variances that are zero or less; the rows beside them are as they were."""
    monkeypatch.setenv("TORCHNGVI_KERNELS", kernel)
    means, variances = torch.tensor([1.0, e, -3.0], dtype=DTYPE), torch.tensor([2.0, v, 1.0], dtype=DTYPE)
    rows = logistic._expanded(means, variances) if form == "transformed" else softplus(means, variances)
    for part, beside, value in zip(rows, softplus(means[::2], variances[::2]), expected, strict=True):
        close(part[::2], beside, 1e-13)
        assert float(part[1]) == pytest.approx(value, rel=1e-12, nan_ok=True)


def test_no_rows():
    empty = torch.zeros(2, 0, dtype=DTYPE)
    assert [part.shape for part in softplus(empty, empty)] == [(2, 0)] * 3


def test_a_mean_for_every_variance():
    e, v = torch.zeros(1, dtype=DTYPE), torch.ones(4, dtype=DTYPE)
    assert softplus(e, v).value.shape == (4,)


class TestDerivatives:
    """Of the moments, by every mode of torch."""

    @staticmethod
    def draw(count=12):
        generator = torch.Generator().manual_seed(0)
        e = 4 * torch.randn(count, dtype=DTYPE, generator=generator)
        return e, torch.rand(count, dtype=DTYPE, generator=generator).mul(4).square()

    @pytest.mark.parametrize("which", [0, 1, 2])
    @pytest.mark.parametrize("kernel", ["0", "1"])
    def test_against_differences(self, which, kernel, monkeypatch):
        monkeypatch.setenv("TORCHNGVI_KERNELS", kernel)
        e, v = (x.requires_grad_() for x in self.draw())
        by_mean, by_variance = torch.autograd.grad(softplus(e, v)[which].sum(), (e, v))
        step = 1e-5
        with torch.no_grad():
            close(by_mean, (softplus(e + step, v)[which] - softplus(e - step, v)[which]) / (2 * step), DIFFERENCE)
            close(by_variance, (softplus(e, v + step)[which] - softplus(e, v - step)[which]) / (2 * step), DIFFERENCE)

    def test_at_no_variance(self):
        """½ σ'(e), and not NaN by the root of v."""
        e, v = torch.tensor([0.0, -3.0], dtype=DTYPE), torch.zeros(2, dtype=DTYPE, requires_grad=True)
        (by_variance,) = torch.autograd.grad(softplus(e, v).value.sum(), v)
        close(by_variance, 0.5 * torch.sigmoid(e) * torch.sigmoid(-e), 1e-14)

    def test_third_order(self):
        """Nothing detaches: ∂³F/∂e³ is ∂β/∂e, and torch differentiates that again."""
        e, v = self.draw()
        e.requires_grad_()
        first = torch.autograd.grad(softplus(e, v).value.sum(), e, create_graph=True)[0]
        second = torch.autograd.grad(first.sum(), e, create_graph=True)[0]
        third = torch.autograd.grad(second.sum(), e, create_graph=True)[0]
        close(second, softplus(e, v).curvature, 1e-14)
        close(third, curvature_derivatives(e, v)[0], 1e-14)
        assert bool(torch.autograd.grad(third.sum(), e)[0].any())

    def test_transforms(self):
        """vmap, forward mode, and forward over reverse."""
        e, v = self.draw()
        value, slope, curvature = softplus(e, v)
        close(torch.func.vmap(lambda x, y: softplus(x, y).value)(e[:, None], v[:, None])[:, 0], value, 1e-13)
        close(torch.func.vmap(lambda x: softplus(x, v).slope)(e.expand(3, -1))[1], slope, 1e-13)
        one = torch.ones_like(e)
        close(torch.func.jvp(lambda x: softplus(x, v).value, (e,), (one,))[1], slope, 1e-13)
        close(torch.func.jvp(lambda x: softplus(e, x).value, (v,), (one,))[1], 0.5 * curvature, 1e-13)
        hessian = torch.func.hessian(lambda x: softplus(x, v).value.sum())(e)
        close(hessian, torch.diag(curvature), 1e-13)

    @pytest.mark.accuracy
    @needs_compile
    @pytest.mark.parametrize("kernel", ["0", "1"])
    def test_compiled(self, kernel, monkeypatch):
        """One graph, whose gradient is that of the eager moments."""
        monkeypatch.setenv("TORCHNGVI_KERNELS", kernel)
        e, v = self.draw()
        e.requires_grad_()

        def total(e, v):
            value, slope, curvature = softplus(e, v)
            return (value + 2 * slope + 3 * curvature).sum()

        compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
        close(compiled(e, v), total(e, v), 1e-13)
        pair = (torch.autograd.grad(f(e, v), e)[0] for f in (compiled, total))
        close(*pair, 1e-13)

    def test_the_operator(self):
        """Torch's own checks of the schema and the registered derivatives."""
        e, v = (x.requires_grad_() for x in self.draw(3))
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(logistic._operator, (e.detach(), v.detach(), 5), test_utils=tests)

    @pytest.mark.accuracy
    def test_transforms_in_a_graph(self):
        """What is transformed inside of a compiled graph is seen by it."""
        e, v = self.draw()
        value = lambda x: softplus(x, v).value  # noqa: E731
        jvp = torch.compile(
            lambda x: torch.func.jvp(value, (x,), (torch.ones_like(x),))[1], backend="aot_eager", fullgraph=True
        )
        close(jvp(e), softplus(e, v).slope, 1e-12)
        grad = torch.compile(torch.func.grad(lambda x: value(x).sum()), backend="aot_eager", fullgraph=True)
        close(grad(e), softplus(e, v).slope, 1e-12)

    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
    def test_traced(self):
        """A trace keeps the operators, not the numbers of one call."""
        e, v = self.draw(100)
        traced = torch.jit.trace(lambda x, y: softplus(x, y).value, (e, v))
        close(traced(e + 1, 2 * v), softplus(e + 1, 2 * v).value, 1e-12)

    def test_forward_mode(self):
        e, v = self.draw(100)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(e, torch.ones_like(e))
            tangent = torch.autograd.forward_ad.unpack_dual(softplus(dual, v).value).tangent
        close(tangent, softplus(e, v).slope, 1e-12)

    def test_a_recorded_moment_may_be_written_to(self):
        e, v = self.draw(100)
        value = softplus(e.requires_grad_(), v).value
        assert value.add_(1).grad_fn is not None

    def test_other_inputs(self):
        """Negations that are put off, integers and two dtypes."""
        e, v = self.draw(100)
        assert softplus(torch._neg_view(-e), torch._neg_view(-v)).value.equal(softplus(e, v).value)
        whole = torch.arange(3)
        assert softplus(whole, whole).value.equal(softplus(whole.float(), whole.float()).value)
        assert softplus(e.float(), v).value.equal(softplus(e.float().double(), v).value)
