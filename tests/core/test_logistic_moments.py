"""Moments of the softplus under N(e, v): relative errors in both tails, derivatives, and rows that are not finite."""

import json
import math
import pathlib

import pytest
import torch
from helpers import DIFFERENCE, DTYPE, close, needs_compile

from torchngvi.numerics import kernels, logistic, logistic_mixture, logistic_rules
from torchngvi.numerics.logistic import softplus
from torchngvi.numerics.logistic_rules import BAND, COARSE, FINE, NARROW, TAIL, WIDE_BODY

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
    kernel = kernels.logistic(1, logistic._eager)
    if kernel is None:
        pytest.skip("needs a C compiler")
    return kernel


def forms(monkeypatch, form):
    """The moments by rows of many or of few, by what a device computes, and by the kernel."""
    if form == "kernel":
        compiled(monkeypatch)
        return torch.stack(softplus(M, S * S), -1)
    if form == "device":
        return torch.stack(logistic._on_device(M, S * S), -1)
    if form == "few":
        blocks = zip(M.split(40), (S * S).split(40), strict=True)
        return torch.cat([torch.stack(softplus(m, v), -1) for m, v in blocks])
    assert len(M) > logistic._FEW
    if form == "very many":
        monkeypatch.setattr(logistic, "_MANY", 0)
    return torch.stack(softplus(M, S * S), -1)


@pytest.mark.parametrize("form", ["very many", "many", "few", "device", "kernel"])
def test_relative_errors(form, monkeypatch):
    """Below 1e-12 for s from 0 to 1e4 and means down to -700, wherever the moment is a normal number."""
    error = ((forms(monkeypatch, form) - EXPECTED) / EXPECTED).abs()
    assert float(error[NORMAL].max()) <= RELATIVE


@pytest.mark.parametrize("form", ["eager", "few", "kernel"])
@pytest.mark.parametrize("bound", [NARROW, FINE, COARSE[0], WIDE_BODY[0], 60.0, 150.0, 290.0])
def test_on_both_sides_of_every_border(form, bound, monkeypatch):
    """Against steps of a half: rules meet where s is a bound, where |m| is so many s, and where m + v is."""
    s = torch.tensor([bound * (1 - 1e-9), bound * (1 + 1e-9)], dtype=DTYPE)[:, None]
    edges = torch.tensor([0.0, WIDE_BODY[1], COARSE[1], 6.0], dtype=DTYPE), torch.tensor([-BAND, -TAIL, 0.0, 3.0])
    m = torch.cat([-edges[0] * s, edges[1] * s - s * s], 1)[..., None] * torch.tensor([1 - 1e-9, 1 + 1e-9], dtype=DTYPE)
    m, v = m.clamp(-700, 0).flatten(), s.square().expand(2, 8)[..., None].expand(2, 8, 2).flatten()
    nodes = logistic_rules.table(0.03, DTYPE, torch.device("cpu"))
    tail = logistic_rules.tail(m, v)
    expected = logistic_rules.between(m, v, nodes.nodes, nodes.weights)
    expected = torch.where(m + v + (TAIL + 1e-8) * v.sqrt() < 0, tail, expected)
    if form == "kernel":
        kernel = compiled(monkeypatch)
        found = kernel(m, v)
    else:
        if form == "eager":
            monkeypatch.setattr(logistic, "_FEW", 0)
            monkeypatch.setattr(logistic, "_MANY", 0)
        found = logistic._eager(m, v)
    assert float(((torch.stack(found) - expected) / expected)[expected > 1e-300].abs().max()) <= RELATIVE


def test_the_golden_values_reach_far():
    assert float(EXPECTED[NORMAL].min()) < 1e-290
    assert {0.0, 1e4} <= set(S.tolist())
    for rule in (0.3, 0.6, 2.0, 20.0, 1e3):  # both sides of every border
        assert bool((rule > S).any())
        assert bool((rule < S).any())


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


# to rounding in half precision; in single, what is below 1e-7 is absolutely so
ROUNDING = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("form", [softplus, logistic_mixture.mixture, logistic_mixture.bends])
def test_every_precision(dtype, form):
    """The largest means and variances too: all is finite, and the rounding of what double precision gives."""
    most = torch.finfo(dtype).max
    e = torch.tensor([0.0, 1.0, -3.0, 10.0, -200.0, 257.0, -700.0, 3e4, most, -most, 0.0, 5.0], dtype=dtype)
    v = torch.tensor([1.0, 0.1, 4.0, 0.0, 400.0, 1e3, 6e4, 1.0, 1.0, 6e4, 6e4, 0.5 * most], dtype=dtype)
    reference = logistic_mixture.bends if form is logistic_mixture.bends else softplus
    for part, exact in zip(form(e, v), reference(e.double(), v.double()), strict=True):
        assert part.dtype is dtype
        assert bool(part.isfinite().all())
        size = exact.abs()
        if form is logistic_mixture.mixture:  # which cancels
            size = size.maximum(e.double().abs()).clamp_min(1)
        assert bool(((part.double() - exact).abs() <= ROUNDING[dtype] * size + 1e-7).all())


@pytest.mark.parametrize("dtype", ROUNDING)
def test_gradients_in_every_precision(dtype):
    """Those of the curvature are right where e² is infinite."""
    e, v = torch.tensor([300.0, -260.0, 2.0, torch.finfo(dtype).max], dtype=dtype), torch.ones(4, dtype=dtype)
    found = torch.autograd.grad(softplus(e.requires_grad_(), v.requires_grad_()).curvature.sum(), (e, v))
    exact = logistic_mixture.bends(e.detach().double(), v.detach().double())
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
@pytest.mark.parametrize("form", ["cpu", "device"])
def test_rows_at_the_edge(kernel, e, v, expected, form, monkeypatch):
    """NaN, infinities, and variances that are zero or less; the rows beside them are as they were."""
    monkeypatch.setenv("TORCHNGVI_KERNELS", kernel)
    means, variances = torch.tensor([1.0, e, -3.0], dtype=DTYPE), torch.tensor([2.0, v, 1.0], dtype=DTYPE)
    rows = logistic._on_device(means, variances) if form == "device" else softplus(means, variances)
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
    @pytest.mark.parametrize("device", [False, True])
    def test_against_differences(self, which, device, monkeypatch):
        if device:
            monkeypatch.setattr(logistic, "_on_cpu", logistic._on_device)
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
        close(third, logistic_mixture.bends(e, v)[0], 1e-14)
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
        tests = ("test_schema", "test_autograd_registration")
        torch.library.opcheck(logistic._moments, (e, v), test_utils=tests)

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
