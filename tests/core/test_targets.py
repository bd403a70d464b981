"""What a target tells of itself: data that add up, a prior that is counted once, the marginals of its predictors."""

import math

import pytest
import torch
from torch import Tensor

from torchngvi import CholeskyGaussian, DiagonalGaussian, NaturalGaussian, fit
from torchngvi.expectations import Autograd, BonnetPrice, MonteCarlo, PiecewiseBound, Quadrature
from torchngvi.interfaces import Additive, AdditiveTractable, Frame, Raw, SeparableTarget, Sites
from torchngvi.models import (
    DataLogJoint,
    ExpectedPenalty,
    GeneralizedLinear,
    LogJoint,
    PerDatum,
    Regularized,
    SoftmaxRegression,
)
from torchngvi.models.factors import Guarded
from torchngvi.numerics.gaussian_integrals import Moments

F64 = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
ROWS, DIM, GAMMA = 9, 4, 0.7
CUTS = [slice(0, 2), slice(2, 9)]  # unequal parts
FULL = 0.5 * torch.eye(DIM, dtype=F64) + 0.1
FAMILIES = [CholeskyGaussian, NaturalGaussian, DiagonalGaussian]


def data(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """X, labels and weights, of which one is 0."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(ROWS, DIM, generator=generator, dtype=F64)
    weights = torch.rand(ROWS, generator=generator, dtype=F64)
    weights[3] = 0.0
    return X, (X.sum(-1) > 0).double(), weights


def logistic(rows: slice = slice(None), **options: object) -> GeneralizedLinear:
    X, y, w = (part[rows] for part in data())
    settings = {"prior_precision": 0.5, "prior_mean": 0.2, "temperature": GAMMA, "classes": (0, 1)}
    return GeneralizedLinear(X, y, weights=w, **settings | options)


def softmax(rows: slice = slice(None)) -> SoftmaxRegression:
    X, _, w = data()
    y = torch.arange(ROWS) % 3
    return SoftmaxRegression(
        X[rows, :2], y[rows], weights=w[rows], prior_precision=FULL, temperature=GAMMA, classes=(0, 1, 2)
    )


def batches(parts: list[Tensor]) -> DataLogJoint:
    return DataLogJoint(
        lambda theta, x: -(theta @ x.mT).cosh().sum(-1), lambda theta: -theta.square().sum(-1), parts, ROWS, GAMMA
    )


def per_datum() -> PerDatum:
    X, y, _ = data()
    return PerDatum(lambda theta: -(theta @ X.mT - y).square(), lambda theta: -theta.square().sum(-1), GAMMA)


ADDITIVE = {
    "generalised linear": logistic,
    "full prior": lambda: logistic(prior_precision=FULL),
    "softmax": softmax,
    "regularized": lambda: Regularized(logistic(), ExpectedPenalty(0.4)),
    "per datum": per_datum,
    "batches": lambda: batches(list(data()[0].split(4))),
}
TRACTABLE = {
    "generalised linear": logistic,
    "full prior": lambda rows: logistic(rows, prior_precision=FULL),
    "softmax": softmax,
}


def gaussian(family: type = CholeskyGaussian, *batch: int) -> CholeskyGaussian:
    generator = torch.Generator().manual_seed(3)
    mean, scale = (torch.randn(*batch, DIM, generator=generator, dtype=F64) for _ in range(2))
    return family(DIM, batch, mean=mean, scale=0.2 + scale.abs(), dtype=F64)


class Summed(AdditiveTractable):
    """The data of several targets, and the prior of one of them."""

    def __init__(self, parts: list[AdditiveTractable]) -> None:
        self.parts, self.prior, self.temperature = parts, parts[0].prior, parts[0].temperature

    def data_log_likelihood(self, theta: Tensor) -> Tensor:
        return sum(part.data_log_likelihood(theta) for part in self.parts)

    def data_energy(self, frame: Frame) -> tuple[Tensor, Raw]:
        values, packets = zip(*(part.data_energy(frame) for part in self.parts), strict=True)
        return sum(values), Raw(*(sum(part) for part in zip(*(packet.raw() for packet in packets), strict=True)))

    def pieces(self):
        yield from self.parts

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for part in self.parts for tensor in part.tensors())


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ADDITIVE)
def test_pieces_add_up_and_the_prior_is_counted_once(name):
    target, theta = ADDITIVE[name](), torch.randn(5, DIM, generator=torch.Generator().manual_seed(1), dtype=F64)
    assert isinstance(target, Additive)
    pieces = list(target.pieces())
    whole = sum(piece.data_log_likelihood(theta) for piece in pieces)
    close(whole, target.data_log_likelihood(theta))
    close(target.log_joint(theta), whole + target.log_prior(theta))
    for piece in pieces:
        close(piece.log_prior(theta), target.log_prior(theta))
        close(piece.log_joint(theta), piece.data_log_likelihood(theta) + target.log_prior(theta))


def test_there_is_one_piece_a_batch():
    pieces = list(batches(list(data()[0].split(4))).pieces())
    assert [piece.num_data for piece in pieces] == [4, 4, 1]
    wrapped = Regularized(Summed([logistic(rows) for rows in CUTS]), ExpectedPenalty(0.4))
    assert [type(piece) for piece in wrapped.pieces()] == [Regularized, Regularized]


def test_the_prior_weighs_as_its_kind_says():
    """A Gaussian one by the temperature, so that L holds γ KL; a function of θ as it is."""
    theta = torch.randn(5, DIM, generator=torch.Generator().manual_seed(1), dtype=F64)
    square = 0.5 * (theta - 0.2).square() - math.log(0.5) + math.log(2 * math.pi)  # of N(0.2, 1/0.5)
    close(logistic().log_prior(theta), -0.5 * GAMMA * square.sum(-1))
    close(per_datum().log_prior(theta), -theta.square().sum(-1))
    penalised = Regularized(logistic(), ExpectedPenalty(0.4))
    penalty = 0.4 * (theta.square() / (1 + theta.square())).sum(-1)
    close(penalised.log_prior(theta), logistic().log_prior(theta) - penalty)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: Regularized(model, ExpectedPenalty(0.4))])
@pytest.mark.parametrize("name", TRACTABLE)
def test_parts_of_the_data_give_the_packet_of_the_whole(name, wrap, family):
    """Value, a and W of the joint from the data's energies of two parts; prior and penalty once."""
    model = TRACTABLE[name]
    parts = wrap(Summed([model(rows) for rows in CUTS]))
    whole, q = wrap(model(slice(None))), gaussian(family)
    for estimator in (Quadrature(), Autograd()):
        one, other = estimator(q, whole), estimator(q, parts)
        for left, right in zip(one.derivative.framed(q.frame()), other.derivative.framed(q.frame()), strict=True):
            close(left, right)
        close(one.value, other.value)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("thin", [False, True])
def test_data_without_a_prior(family, thin):
    """The packet of the data is that of the joint less the prior's, in all three forms."""
    X, y, w = data()
    model = GeneralizedLinear(X.to_sparse_csr() if thin else X, y, weights=w, prior_precision=FULL, temperature=GAMMA)
    q = gaussian(family)
    frame, prior = q.frame(), model.prior.scaled(GAMMA)
    value, sites = model.data_energy(frame)
    joint, whole = model.expected_energy(frame)
    assert sites.prior is None
    close(joint - value, GAMMA * model.prior.expected_energy(frame))
    close(whole.framed(frame).a - sites.framed(frame).a, frame.pull(prior.force(q.mean)))
    close(whole.framed(frame).W - sites.framed(frame).W, prior.framed(frame))
    close(whole.raw().g - sites.raw().g, prior.force(q.mean))
    close(whole.raw().H - sites.raw().H, prior.precision)
    close(sites.raw().with_prior(prior, q.mean).H, whole.raw().H)


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_marginals_of_the_predictors(batch):
    X, y, w = data()
    offset = torch.linspace(-1, 1, ROWS, dtype=F64)
    model = GeneralizedLinear(X, y, weights=w, offset=offset)
    q = gaussian(CholeskyGaussian, *batch)
    rows = model.marginals(q.frame())
    here = w > 0
    close(rows.mean[..., here], (q.mean @ X.mT + offset)[..., here])
    close(rows.variance[..., here], (X @ q.covariance @ X.mT).diagonal(dim1=-2, dim2=-1)[..., here])
    assert rows.mean[..., 3].eq(0).all()  # a row of weight 0 is not there
    assert rows.variance[..., 3].eq(1).all()
    close(rows.projected, X @ q.scale_tril)
    assert rows.likelihood is model.likelihood
    assert torch.equal(rows.theta, q.mean)


def test_energy_from_any_moments():
    """Linear in them; those of the likelihood give the target's own energy."""
    model, q = logistic(), gaussian()
    frame = q.frame()
    rows = model.marginals(frame)
    exact = rows.expected()
    value, sites = model.energy_from(frame, rows, exact)
    own, packet = model.expected_energy(frame)
    assert torch.equal(value, own)
    assert isinstance(packet, Sites)
    assert torch.equal(sites.alpha, packet.alpha)
    twice, doubled = rows.energy_from(Moments(*(2 * part for part in exact)))
    close(twice, 2 * model.data_energy(frame)[0])
    close(doubled.beta, 2 * packet.beta)
    assert doubled.prior is None


@pytest.mark.parametrize("estimator", [PiecewiseBound(6), MonteCarlo(4), BonnetPrice(4)])
def test_estimators_need_nothing_but_marginals_and_a_prior(estimator):
    """A linear target of one's own: `marginals`, a prior, a temperature."""
    model, q = logistic(), gaussian()

    class Own(GeneralizedLinear):
        def __init__(self):
            self.prior, self.temperature = model.prior, model.temperature

        def marginals(self, frame):
            return model.marginals(frame)

        data_log_likelihood = tensors = settings = minibatch = None

    torch.manual_seed(0)
    first = estimator(q, model)
    torch.manual_seed(0)
    second = estimator(q, Own())
    assert torch.equal(first.value, second.value)


def test_separable_targets_are_additive():
    assert issubclass(SeparableTarget, Additive)
    target, theta = per_datum(), torch.zeros(2, DIM, dtype=F64)
    close(target.data_log_likelihood(theta), target.terms(theta).sum(-1))


def test_passes_over_data_are_told_through_a_guard():
    assert Guarded(batches([data()[0]])).in_passes
    assert not Guarded(LogJoint(lambda theta: -theta.square().sum(-1))).in_passes
    assert not logistic().in_passes


def test_a_sum_of_parts_is_fitted_as_the_whole():
    whole, parts = gaussian(), gaussian()
    fit(whole, logistic(), tolerance=1e-8, progress=False)
    fit(parts, Summed([logistic(rows) for rows in CUTS]), tolerance=1e-8, progress=False)
    torch.testing.assert_close(parts.mean, whole.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(parts.covariance, whole.covariance, rtol=1e-6, atol=1e-6)
