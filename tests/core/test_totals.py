"""A pattern that is spread over processes: two halves of a mean field, each in a thread, are the whole.

The structure of a half knows its own coordinates and adds the other half's scalar in `total`.  Wherever a sum or a
verdict over the coordinates is not completed by the structure, a half sees another number than the whole.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from torchngvi import (
    VN,
    CholeskyGaussian,
    GeneralizedLinear,
    LogJoint,
    NaturalGaussian,
    PrecisionCholeskyGaussian,
    fit,
    rules,
)
from torchngvi.expectations import Draws, PathDerivative, Quadrature, ScoreFunction, sampled
from torchngvi.expectations.sampled import SampleAverage
from torchngvi.interfaces import Cost, Expectation, Framed, Local, Rule, TractableTarget
from torchngvi.metrics import QuasiNewton, SiteNewton
from torchngvi.models import TractableFactors
from torchngvi.momentum import NormalizedMomentum
from torchngvi.structures import Dense, Diagonal, arrow

F64 = torch.float64
DIM, CUT = 5, 2
PARTS = [slice(0, CUT), slice(CUT, DIM)]
FAMILIES = [CholeskyGaussian, NaturalGaussian, PrecisionCholeskyGaussian]


class Meeting:
    """Where two threads exchange scalars; a total that one of them does not ask for is an error, not a hang."""

    def __init__(self) -> None:
        self.barrier, self.brought = threading.Barrier(2, timeout=20), [torch.zeros(())] * 2
        self.totals = 0

    def total(self, rank: int, scalar: Tensor) -> Tensor:
        self.brought[rank] = scalar.detach()
        self.barrier.wait()
        total = scalar + self.brought[1 - rank]
        self.barrier.wait()
        self.totals += rank
        return total


@dataclass(frozen=True)
class Half(Diagonal):
    """The coordinates of one process."""

    rank_here: int = 0
    meeting: Any = field(default=None, compare=False)

    @property
    def total_dim(self) -> int:
        return DIM

    def total(self, scalar: Tensor) -> Tensor:
        return self.meeting.total(self.rank_here, scalar)


@dataclass(frozen=True)
class HalfOfTwo(Dense):
    """One dense coordinate of two."""

    rank_here: int = 0
    meeting: Any = field(default=None, compare=False)

    @property
    def total_dim(self) -> int:
        return 2

    def total(self, scalar: Tensor) -> Tensor:
        return self.meeting.total(self.rank_here, scalar)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def on_both(run: Callable[[int, Meeting], Any]) -> list[Any]:
    """What each of the two threads gets."""
    meeting = Meeting()

    def inside(rank: int) -> Any:
        try:
            with torch.no_grad():
                return run(rank, meeting)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(2) as pool:
        results = [future.result() for future in [pool.submit(inside, rank) for rank in range(2)]]
    assert meeting.totals > 0, "nothing was totalled"
    return results


def of_whole(family: type, mean: Tensor, scale: Tensor) -> Any:
    return family(DIM, mean.shape[:-1], mean=mean, scale=scale, structure=Diagonal(DIM), dtype=F64)


def of_half(family: type, mean: Tensor, scale: Tensor, rank: int, meeting: Meeting) -> Any:
    part = PARTS[rank]
    mean, scale = mean[..., part], scale[..., part]
    structure = Half(mean.shape[-1], rank, meeting)
    return family(mean.shape[-1], mean.shape[:-1], mean=mean, scale=scale, structure=structure, dtype=F64)


def normals(seed: int = 0) -> tuple[Tensor, Tensor]:
    return draw(DIM, seed=seed), 0.5 + draw(DIM, seed=seed + 1).abs()


def agree(halves: list[Any], whole: Tensor) -> None:
    for half in halves:
        torch.testing.assert_close(torch.as_tensor(half), whole, rtol=1e-12, atol=1e-12)


def packet(part: slice = slice(None)) -> Expectation:
    derivative = Framed(draw(DIM, seed=5)[part], draw(DIM, seed=6)[part])
    return Expectation(torch.zeros((), dtype=F64), derivative, 0.7, True, Cost(1, 1))


SCALARS = {
    "norm2": lambda q, part: q.norm2(q.local(packet(part))),
    "entropy": lambda q, part: q.entropy(),
    "log_det_root": lambda q, part: q.log_det_root(),
    "log_prob": lambda q, part: q.log_prob(draw(3, DIM, seed=7)[..., part]),
    "norm2 of the structure": lambda q, part: q.structure.norm2(draw(DIM, seed=8)[part]),
    "entries_norm2": lambda q, part: q.structure.entries_norm2(draw(DIM, seed=8)[part]),
    "log_det": lambda q, part: q.structure.log_det(draw(DIM, seed=8)[part].abs()),
    "dot": lambda q, part: q.structure.dot(draw(DIM, seed=8)[part], draw(DIM, seed=9)[part]),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SCALARS)
def test_scalars(name, family):
    def run(rank, meeting):
        return SCALARS[name](of_half(family, *normals(), rank, meeting), PARTS[rank])

    with torch.no_grad():
        whole = SCALARS[name](of_whole(family, *normals()), slice(None))
    agree(on_both(run), whole)


def test_entropy_with_a_graph():
    """The probes are zero: with them in it, the value is the same."""

    def run(rank, meeting):
        with torch.enable_grad():
            return of_half(CholeskyGaussian, *normals(), rank, meeting).entropy().detach()

    agree(on_both(run), of_whole(CholeskyGaussian, *normals()).entropy().detach())


@pytest.mark.parametrize("other", FAMILIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_kl(family, other):
    def run(rank, meeting):
        q, p = of_half(family, *normals(), rank, meeting), of_half(other, *normals(20), rank, meeting)
        return q.kl(p)

    agree(on_both(run), of_whole(family, *normals()).kl(of_whole(other, *normals(20))).detach())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_in_the_cone_on_both_or_on_none(family):
    """Of two members one leaves the cone, in a coordinate that only the second half has."""
    mean, scale = (x.expand(2, DIM).contiguous() for x in normals())
    N = torch.ones(2, DIM, dtype=F64)
    N[1, -1] = -1.0

    def run(rank, meeting):
        q = of_half(family, mean, scale, rank, meeting)
        part = PARTS[rank]
        new, ok = q.moved(rules.VariationalNewton.emits(N[:, part], torch.zeros_like(mean[:, part])))
        return ok

    assert [ok.tolist() for ok in on_both(run)] == [[True, False]] * 2


def paths():
    for name in rules.__all__:
        kind = getattr(rules, name)
        if isinstance(kind, type) and issubclass(kind, Rule) and kind is not Rule:
            for family in FAMILIES:
                if kind.emits in family.takes:
                    yield pytest.param(kind, family, id=f"{name}-{family.__name__}")


@pytest.mark.parametrize(("rule", "family"), list(paths()))
def test_norms_and_slopes_of_the_rules(rule, family):
    try:
        made = rule()
    except TypeError:
        pytest.skip("needs arguments")
    path = made(of_whole(family, *normals()), packet())

    def run(rank, meeting):
        here = made(of_half(family, *normals(), rank, meeting), packet(PARTS[rank]))
        return here.norm2(), here.slope()

    halves = on_both(run)
    agree([norm2 for norm2, _ in halves], path.norm2())
    agree([slope for _, slope in halves], path.slope())


def test_inner_products_of_quasi_newton():
    """Bent gradients over six steps of a quadratic, and what is remembered."""
    curvature = 0.5 + draw(DIM, seed=9).abs()

    def bent(q, part):
        metric, local, out = QuasiNewton(3), None, []
        state, went = metric.init(q), torch.zeros((), dtype=F64)
        at = draw(DIM, seed=5)[part]
        for _ in range(6):
            local = Local(curvature[part] * at, 0.1 * curvature[part] * at)
            b, new = metric(q, local, went, state)
            state, went = state | new, torch.tensor(0.3, dtype=F64)
            at = at - 0.3 * b.local.a
            out.append((b.local, b.slope))
        return out

    whole = bent(of_whole(CholeskyGaussian, *normals()), slice(None))
    halves = on_both(lambda rank, meeting: bent(of_half(CholeskyGaussian, *normals(), rank, meeting), PARTS[rank]))
    for step, (local, slope) in enumerate(whole):
        agree([half[step][1] for half in halves], slope)
        for piece, kind in ((0, "a"), (1, "P")):
            joined = torch.cat([half[step][0][piece] for half in halves])
            torch.testing.assert_close(joined, local[piece], rtol=1e-12, atol=1e-12, msg=kind)


@pytest.mark.parametrize("norm", ["euclidean", "riemannian"])
def test_normalized_momentum(norm):
    def moved(q, part):
        momentum = NormalizedMomentum(norm)
        change = q.tangent(packet(part))
        return momentum(q, change, lambda: q.norm2(q.local(packet(part))), momentum.init(q))[0].vector

    whole = moved(of_whole(CholeskyGaussian, *normals()), slice(None))
    halves = on_both(lambda rank, meeting: moved(of_half(CholeskyGaussian, *normals(), rank, meeting), PARTS[rank]))
    torch.testing.assert_close(torch.cat(halves), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("second", "near"), [(0.1, True), (4.0, False)])
def test_site_newton(second, near):
    """Rows that see one coordinate of two each; whether the Newton point is used is decided together."""
    y = (draw(6, seed=3) > 0).double()
    model = GeneralizedLinear(torch.block_diag(draw(3, 1, seed=1), draw(3, 1, seed=2)), y, "poisson_log")
    parts = [
        GeneralizedLinear(model.X[3 * i : 3 * i + 3, i : i + 1], y[3 * i : 3 * i + 3], "poisson_log") for i in (0, 1)
    ]
    mean = torch.tensor([0.1, second], dtype=F64)  # the second half is near the optimum, or far

    def bent(q, target):
        metric = SiteNewton(target)
        return metric(q, q.local(Quadrature()(q, target)), torch.zeros((), dtype=F64), metric.init(q))

    whole, state = bent(CholeskyGaussian(2, mean=mean, scale=0.4, dtype=F64), model)

    def run(rank, meeting):
        structure = HalfOfTwo(1, rank, meeting)
        q = CholeskyGaussian(1, mean=mean[rank], scale=0.4, structure=structure, dtype=F64)
        return bent(q, parts[rank])

    halves = on_both(run)
    assert bool(state["newton"]) is near
    agree([half.slope for half, _ in halves], whole.slope)
    assert [bool(new["newton"]) for _, new in halves] == [bool(state["newton"])] * 2
    torch.testing.assert_close(torch.cat([half.local.a for half, _ in halves]), whole.local.a)


class Given(Draws):
    """Antithetic draws that are given: those of the whole, or of them what a half has."""

    comparable, independent, mirrored = False, True, True
    generator = pattern = None

    def __init__(self, z: Tensor) -> None:
        self.z, self.num_samples = torch.cat([z, -z]), 2 * len(z)

    def __call__(self, like: Tensor) -> Tensor:
        return self.z


@pytest.mark.parametrize("pairs", [4, 12])
@pytest.mark.parametrize("kind", [ScoreFunction, PathDerivative, SampleAverage])
def test_estimators_that_weigh_draws_by_their_length(kind, pairs, monkeypatch):
    """With 2 D pairs and more the noise² of a whole has no linear part; that of halves, not whitened together, has."""
    z = draw(pairs, DIM, seed=11)

    def estimated(q, part):
        structure = q.structure
        target = LogJoint(lambda theta: structure.total(-(theta**4).sum(-1)), 0.7)
        e = kind(Given(z[:, part]))(q, target)
        return (e.value, e.noise2) if e.noise2 is not None else (e.value, q.norm2(q.local(e)))

    with monkeypatch.context() as patched:
        patched.setattr(sampled, "_without_linear", lambda odd, z: odd)
        whole = estimated(of_whole(CholeskyGaussian, *normals()), slice(None))
    halves = on_both(lambda rank, meeting: estimated(of_half(CholeskyGaussian, *normals(), rank, meeting), PARTS[rank]))
    for place in range(2):
        agree([half[place] for half in halves], whole[place])


class Spread(TractableTarget):
    """The target of a half, whose values are those of both."""

    def __init__(self, model: GeneralizedLinear, structure: Half) -> None:
        self.model, self.structure, self.temperature = model, structure, model.temperature

    def log_joint(self, theta: Tensor) -> Tensor:
        return self.structure.total(self.model.log_joint(theta))

    def expected_energy(self, frame):
        value, derivative = self.model.expected_energy(frame)
        return self.structure.total(value), derivative

    def tensors(self) -> tuple[Tensor, ...]:
        return self.model.tensors()


@pytest.mark.accuracy
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fit_of_the_halves_is_that_of_the_whole(family):
    """With trials and L-BFGS: every decision is taken alike, and each half ends where the whole does."""
    X = torch.block_diag(draw(20, CUT, seed=1), draw(30, DIM - CUT, seed=2))
    y = torch.poisson(torch.full((50,), 2.0, dtype=F64), generator=torch.Generator().manual_seed(4))
    model = GeneralizedLinear(X, y, "poisson_log")
    rows = [slice(0, 20), slice(20, 50)]
    whole = of_whole(family, *normals())
    result = fit(whole, model, VN(whole), progress=False)

    def run(rank, meeting):
        q = of_half(family, *normals(), rank, meeting)
        target = GeneralizedLinear(X[rows[rank]][:, PARTS[rank]], y[rows[rank]], "poisson_log")
        return q, fit(q, Spread(target, q.structure), progress=False)

    halves = on_both(run)
    assert result.converged
    for _, here in halves:
        assert here.converged
        assert here.evaluations == result.evaluations
        assert here.loss == pytest.approx(result.loss, rel=1e-12)
    torch.testing.assert_close(torch.cat([q.mean for q, _ in halves]), whole.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.cat([q.stddev for q, _ in halves]), whole.stddev, rtol=1e-9, atol=1e-9)


class Shared(TractableTarget):
    """A piece of a sum of factors: the data of both processes are totalled, and the prior, which both have, is not."""

    def __init__(self, piece: TractableFactors, prior: TractableFactors, total: Callable[[Tensor], Tensor]) -> None:
        self.piece, self.own, self.total, self.temperature = piece, prior, total, piece.temperature

    def log_joint(self, theta: Tensor) -> Tensor:
        return self.total(self.piece.data_log_likelihood(theta)) + self.piece.log_prior(theta)

    def expected_energy(self, frame):
        (value, packet), (prior, own) = self.piece.data_energy(frame), self.own.data_energy(frame)
        summed = [self.total(part) + one for part, one in zip(packet, own, strict=True)]
        return self.total(value) + prior, Framed(*summed)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.piece.tensors()


def test_a_fit_of_the_pieces_of_factors_is_that_of_the_whole():
    """One half of the factors in each thread, q in both: the same fit, by the same steps."""
    groups, rows = arrow(groups=3, local=1, globals=1), []
    for seed in (1, 2, 3):
        X, y = draw(3, 4, 2, seed=seed), draw(3, 4, seed=seed + 10).exp().round()
        rows.append((0, GeneralizedLinear(X, y, "poisson_log", prior_precision=0.1)))
    root = (1, GeneralizedLinear(draw(1, 2, 1, seed=4), draw(1, 2, seed=5), "gaussian"))
    target, prior = TractableFactors(groups, rows, prior=[root]), TractableFactors(groups, [root])

    def fitted(model: TractableTarget) -> Any:
        q = PrecisionCholeskyGaussian(4, structure=groups, dtype=F64)
        return q, fit(q, model, VN(q), progress=False)  # without the start at the mode, which asks for second_order

    q, result = fitted(target)
    pieces = list(target.pieces(2))
    assert [len(piece.factors) for piece in pieces] == [2, 3]  # one and two of the data, and the prior
    halves = on_both(lambda rank, meeting: fitted(Shared(pieces[rank], prior, lambda part: meeting.total(rank, part))))
    assert result.converged
    for half, here in halves:
        assert here.converged
        assert here.evaluations == result.evaluations
        assert here.loss == pytest.approx(result.loss, rel=1e-12)
        for own, whole in zip(half.coordinates, q.coordinates, strict=True):
            torch.testing.assert_close(own, whole, rtol=1e-10, atol=1e-10)
