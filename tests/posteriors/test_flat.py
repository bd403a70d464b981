"""Posteriors over a flat vector on the axes: what passes between them, limits and averages of steps."""

import copy
import functools
import math
import re

import pytest
import torch
from helpers import raises, seeded

from torchngvi import CholeskyGaussian, GeneralizedLinear, NaturalGaussian, NaturalGradientVI, fit, ifvb
from torchngvi.errors import InputError, PairError
from torchngvi.methods import RootGD
from torchngvi.posteriors.flat import Dirichlet
from torchngvi.registry import FLAT_POSTERIORS, POSTERIORS
from torchngvi.rules import ExponentialAverage, NaturalGradient, RootGradient
from torchngvi.stepsizes import Clip, Constant, KLRadius, Shortest
from torchngvi.structures import Dense, arrow
from torchngvi.structures.pattern import NoMatrix

FLOAT = torch.float64


def field(*batch):
    return ifvb.MeanFieldGaussian(torch.full((*batch, 4), 0.3, dtype=FLOAT))


def log_joint(theta):
    return -(theta - 1).square().sum(-1)


def bound(lam):
    mean, log_sd = lam.chunk(2, -1)
    return (log_sd - (mean - 1).square() - (2 * log_sd).exp()).sum(-1)


def test_conversion_keeps_the_tensors():
    """`.float()` in place: the optimizer goes on with the λ that it holds, its state converted."""
    q = field()
    opt = ifvb.IFVB(q, 0.1, metric=ifvb.Recursive(5, warmup=20), estimator=ifvb.Pathwise(5))
    opt.step(log_joint)
    vector = q.vector
    q.float()
    assert q.vector is vector
    assert q.vector.dtype == torch.float32
    opt.step(log_joint)
    assert opt.memory["metric"]["P"].dtype == torch.float32
    assert opt.rejections == 0


KINDS = [*POSTERIORS.values(), *(q.standard for q in FLAT_POSTERIORS.values()), lambda _: Dirichlet(torch.ones(3))]


@pytest.mark.parametrize("make", KINDS)
def test_log_prob_of_points_of_another_width_or_dtype(make):
    q = make(3)
    theta = q.sample(5, seeded())
    torch.testing.assert_close(q.log_prob(theta.double()).float(), q.log_prob(theta))
    with raises("theta must end in D = 3; got shape (5, 1)."):
        q.log_prob(theta[:, :1])


def test_exact_natural_gradients_need_no_metric():
    """`NaturalGradient` alone is the metric `Exact`, KL radius included."""
    ends = []
    for rule, metric in ((NaturalGradient(), None), (RootGradient(), ifvb.Exact())):
        q = field()
        opt = NaturalGradientVI(q, rule, 0.5, step_size=KLRadius(0.01), estimator=ifvb.ClosedForm(), metric=metric)
        opt.step(bound)
        ends.append((q.vector.clone(), opt.last.rho))
    assert torch.allclose(ends[0][0], ends[1][0], rtol=1e-14)
    assert ends[0][1].item() == pytest.approx(ends[1][1].item())
    assert ends[0][1] < 0.5


def test_steps_by_trial():
    """A bound that is known has values to compare: no step to choose, and the end is exact."""
    q = ifvb.Beta(torch.tensor([5.0, 45.0], dtype=FLOAT))
    posterior = torch.distributions.Beta(*torch.tensor([58.0, 144.0], dtype=FLOAT))

    def known(lam):
        return -torch.distributions.kl_divergence(torch.distributions.Beta(lam[..., 0], lam[..., 1]), posterior)

    opt = NaturalGradientVI(q, NaturalGradient(), estimator=ifvb.ClosedForm())
    result = fit(q, ifvb.LowerBound(known), opt, progress=False)
    assert result.converged
    assert q.vector.tolist() == pytest.approx([58.0, 144.0], rel=1e-5)


def test_status_measures_in_the_metric():
    """What `evaluate` calls the natural norm is dᵀ∇L."""
    q = field()
    opt = ifvb.PreconditionedVI(q, ifvb.Exact(), 0.1, estimator=ifvb.ClosedForm())
    lam = q.vector.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(bound(lam).sum(), lam)
    norm2 = (gradient * q.exact_fisher_solve(gradient)).sum()
    assert opt.evaluate(ifvb.LowerBound(bound)).norm2.item() == pytest.approx(norm2.item())


@pytest.mark.accuracy
def test_fit_by_an_optimizer_of_flat_vectors(tmp_path):
    """A verdict and a checkpoint as for any other posterior, where no Fisher matrix is known too."""
    torch.manual_seed(0)
    q = ifvb.ModuleFlow(ifvb.AffineCoupling(2, layers=2, hidden=2).double(), 2)
    opt = ifvb.PreconditionedVI(
        q, ifvb.BatchFisher(50, generator=seeded(1)), 0.05, estimator=ifvb.Pathwise(20, seeded())
    )
    result = fit(q, log_joint, opt, tolerance=2.0, max_evaluations=200, progress=False, checkpoint=tmp_path / "run")
    assert result.converged
    assert result.loss < result.trace[0].loss
    assert (tmp_path / "run").exists()


def test_several_posteriors_from_one_loss():
    """Each has a metric of its own, as each has a step."""
    torch.manual_seed(0)
    one, two = field(), ifvb.Beta(torch.tensor([2.0, 3.0], dtype=FLOAT))
    opt = ifvb.IFVB([one, {"posterior": two, "lr": 0.2}], 0.1, metric=ifvb.Recursive(5, warmup=30))
    before = one.vector.clone(), two.vector.clone()
    theta = one.rsample(10)
    beta = two.log_prob(torch.full((1, 1), 0.7, dtype=FLOAT))
    ((one.log_prob(theta) - log_joint(theta)).mean() - beta.sum()).backward()
    opt.step()
    assert not torch.equal(one.vector, before[0])
    assert float(two.vector[0] / two.vector.sum()) > 0.4  # towards 0.7
    assert [opt.state[q.mean_probe]["metric"]["P"].shape for q in (one, two)] == [(4, 4), (2, 2)]


def test_shapes_of_samples_that_are_none():
    q = field(3)
    for shape in (2.0, "a", (2, -1), None):
        message = f"a sample is of a number of draws or of a shape, such as 10 or (2, 5); got {shape!r}."
        with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
            q.sample(shape)


def test_moments_that_are_known():
    """As torch.distributions has them; those of a flow are to be had from draws."""
    beta, law = ifvb.Beta(torch.tensor([2.0, 5.0])), torch.distributions.Beta(2.0, 5.0)
    assert torch.allclose(torch.cat([beta.mean, beta.stddev]), torch.stack([law.mean, law.stddev]))
    q, law = ifvb.NormalInverseGamma(torch.tensor([0.5, 4.0, 3.0, 8.0])), torch.distributions.InverseGamma(3.0, 8.0)
    assert torch.allclose(q.mean, torch.stack([torch.tensor(0.5), law.mean]))
    assert torch.allclose(q.stddev, torch.stack([torch.tensor(2.0), law.stddev]))
    assert ifvb.NormalInverseGamma(torch.tensor([0.5, 4.0, 0.5, 8.0])).stddev[1].isinf()
    flow = ifvb.ModuleFlow(ifvb.AffineCoupling(2, layers=1), 2)
    for name, verb in (("mean", "mean"), ("variance", "var")):
        message = f"the {name} of ModuleFlow is not known. Take it from draws, q.sample(10000).{verb}(0)."
        with pytest.raises(PairError, match=f"^{re.escape(message)}$"):
            getattr(flow, name)


@pytest.mark.parametrize(
    "kind",
    [
        ifvb.RankOneGaussian,
        functools.partial(ifvb.LowRankGaussian.standard, rank=2),
        ifvb.FlatCholesky,
        ifvb.MeanFieldGaussian,
    ],
)
def test_a_standard_start(kind):
    """The marginal moments that are asked for, in their dtype, for each member."""
    scale = torch.tensor([1.0, 2.0, 0.5], dtype=FLOAT)
    q = getattr(kind, "standard", kind)(3, (2,), mean=1.0, scale=scale)
    assert (q.batch_shape, q.dtype) == ((2,), FLOAT)
    assert torch.allclose(q.mean, torch.ones(2, 3, dtype=FLOAT))
    assert torch.allclose(q.stddev, scale.expand(2, 3))
    assert torch.allclose(q.covariance.diagonal(dim1=-2, dim2=-1), q.variance)


def test_a_step_that_is_not_taken_leaves_the_metric_as_it_was():
    """An evaluation alone: the state of the optimizer is of the steps that were made."""
    q, draws = field(), seeded(1)
    opt = ifvb.PreconditionedVI(q, ifvb.Recursive(5, warmup=20, generator=draws), 0.1, estimator=ifvb.ClosedForm())
    opt.step(ifvb.LowerBound(bound))
    before = copy.deepcopy(opt.memory["metric"])
    opt.evaluate(ifvb.LowerBound(bound))
    after = opt.memory["metric"]
    assert all(torch.equal(after[name], before[name]) for name in ("P", "V", "count"))
    assert after["fisher_draws"] == before["fisher_draws"] == 25


def test_clip_on_gaussians():
    """|d| over all stored coordinates of q; a short direction is left alone."""
    for norm in (0.1, 1e3):
        q = CholeskyGaussian(2, dtype=FLOAT)
        free = CholeskyGaussian(2, dtype=FLOAT)
        for p, step_size in ((q, Clip(norm)), (free, Constant())):
            opt = RootGD(p, lr=0.01, step_size=step_size)
            ((p.push_noise(torch.eye(2, dtype=FLOAT)) - 3).square().sum() - p.entropy()).backward()
            opt.step()
        moved = torch.cat([q.mean, (q.coordinates.matrix - torch.eye(2, dtype=FLOAT)).flatten()])
        unlimited = torch.cat([free.mean, (free.coordinates.matrix - torch.eye(2, dtype=FLOAT)).flatten()])
        length = float(unlimited.norm())
        share = min(1.0, norm * 0.01 / length)
        assert torch.allclose(moved, share * unlimited)


@pytest.mark.parametrize("structure", [arrow(groups=1, local=2, globals=1), arrow(groups=1, local=1, globals=2)])
def test_clip_counts_an_entry_once_whatever_the_storage(structure):
    """The same matrices, stored whole and as the squares and borders of a forest: the same step."""
    X = torch.randn(20, 3, generator=seeded(), dtype=FLOAT)
    ends = []
    for pattern in (Dense(3), structure):
        q = NaturalGaussian(3, scale=2.0, structure=pattern, dtype=FLOAT)
        opt = NaturalGradientVI(q, NaturalGradient(), 1.0, step_size=Clip(0.1))
        opt.step(GeneralizedLinear(X, torch.arange(20) % 2))
        ends.append(opt.last.rho)
    assert torch.allclose(*ends, rtol=1e-12)
    assert ends[0] < 0.1


def test_the_shortest_of_several_limits():
    """A NaN of one is no step."""
    q = field(3)
    parts = KLRadius(0.01), Clip(0.2)
    rhos = []
    for step_size in (*parts, Shortest(*parts)):
        p = copy.deepcopy(q)
        opt = ifvb.PreconditionedVI(p, ifvb.Exact(), 0.9, estimator=ifvb.ClosedForm(), step_size=step_size)
        opt.step(bound)
        rhos.append(opt.last.rho)
    assert torch.equal(torch.minimum(*rhos[:2]), rhos[2])
    nan = Shortest(Constant(), KLRadius(1.0))
    path = type("Path", (), {"length2": staticmethod(lambda: torch.tensor([torch.nan, 1.0]))})
    like = torch.zeros(2)
    assert nan.propose(path, 0.5, like, nan.init(like)).isnan().tolist() == [True, False]


@pytest.mark.parametrize("kind", [ifvb.FlatCholesky.standard, CholeskyGaussian])
def test_averages_of_limited_steps(kind):
    """M ← ωM + (1 - ω) s d with s what the step size left of d, whatever the posterior; the step is lr M."""
    q = kind(2, dtype=FLOAT)
    opt = NaturalGradientVI(q, NaturalGradient(), 0.4, step_size=KLRadius(0.02), momentum=ExponentialAverage(0.7))
    twin, M, z = kind(2, dtype=FLOAT), [0.0, 0.0], torch.randn(6, 2, generator=seeded(), dtype=FLOAT)
    limited = NaturalGradientVI(twin, NaturalGradient(), 0.4, step_size=KLRadius(0.02))

    def loss(p):
        root = p.moments()[1] if isinstance(p, ifvb.FlatCholesky) else p.probed().root
        mean = p.moments()[0] if isinstance(p, ifvb.FlatCholesky) else p.probed().mean
        return (mean + z @ root.mT - 2).square().sum(-1).mean() - root.diagonal().log().sum()

    for _ in range(3):
        twin.load_state_dict(q.state_dict())
        before = [x.clone() for x in twin.coordinates]
        loss(twin).backward()
        limited.step()
        M = [0.7 * m + 0.3 * (x - b) / 0.4 for m, x, b in zip(M, twin.coordinates, before, strict=True)]
        loss(q).backward()
        opt.step()
        assert opt.last.rho.item() == 0.4
        assert limited.last.rho < 0.4
        for x, b, m in zip(q.coordinates, before, M, strict=True):
            assert torch.allclose(x, b + 0.4 * m, rtol=1e-12)


def test_a_pattern_without_entries():
    pattern = NoMatrix(3)
    empty = pattern.eye(torch.zeros(2, 3))
    assert empty.shape == (2, 0)
    assert pattern.is_finite(empty).all()
    assert pattern.norm2(empty).tolist() == [0.0, 0.0]
    assert pattern.parameters == 0
    with pytest.raises(NotImplementedError, match="a pattern without entries has no root"):
        pattern.mv(empty, torch.zeros(3))
    assert math.isclose(float(pattern.log_det(empty).sum()), 0.0)
