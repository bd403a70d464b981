"""Every row of the table of refusals is one that somebody can meet."""

import contextlib
import re

import pytest
import torch
from arrow import ScalarArrow

import torchngvi as ngvi
from torchngvi.errors import PairError
from torchngvi.ifvb import Identity, MeanFieldGaussian, Recursive
from torchngvi.models import GeneralizedLinear
from torchngvi.optim import NaturalGradientVI, evaluating
from torchngvi.posteriors import Mixture
from torchngvi.rules import (
    Adam,
    BuresWasserstein,
    NaturalGradient,
    NormalizedMomentum,
    QuasiNewton,
    Retraction,
    RootGradient,
)
from torchngvi.stepsizes import Clip, SufficientDecrease


def dense():
    return ngvi.CholeskyGaussian(2)


def flat():
    return MeanFieldGaussian(torch.zeros(2))


def model():
    return GeneralizedLinear(torch.eye(2), [0.0, 1.0])


def after_backward():
    q = dense()
    opt = ngvi.VN(q)
    model().negative_elbo(q).backward()
    opt.step()


def one_draw():
    q = dense()
    ngvi.VN(q).step(lambda: q.rsample((2,)).square().sum(-1).mean() - q.entropy())


def arrow():
    return ngvi.PrecisionCholeskyGaussian(3, structure=ScalarArrow(3))


REFUSED = [
    lambda: ngvi.VN(dense(), estimator=ngvi.Stein()),
    lambda: NaturalGradientVI(flat(), NaturalGradient(), 0.1, metric=Recursive()),
    lambda: ngvi.VN(dense(), lr=0.1, metric=QuasiNewton()),
    lambda: NaturalGradientVI(dense(), BuresWasserstein(), 0.1, momentum=Adam()),
    lambda: NaturalGradientVI(dense(), RootGradient(), 0.1, momentum=NormalizedMomentum()),
    lambda: ngvi.SRVN(dense(), step_size=ngvi.KLRadius(0.1), momentum=Adam()),
    lambda: NaturalGradientVI(flat(), RootGradient(), step_size=ngvi.KLRadius(0.1), metric=Identity()),
    lambda: NaturalGradientVI(flat(), RootGradient(), step_size=ngvi.KLRadius(0.1)),
    lambda: NaturalGradientVI(dense(), BuresWasserstein(), step_size=Clip(1.0)),
    lambda: NaturalGradientVI(flat(), BuresWasserstein(), 0.1),
    lambda: NaturalGradientVI(arrow(), Retraction(), 0.1),
    lambda: NaturalGradientVI(ngvi.DiagonalGaussian(2), RootGradient(), 0.1, metric=Recursive()),
    lambda: NaturalGradientVI(flat(), NaturalGradient(), step_size=SufficientDecrease(), metric=QuasiNewton()),
    lambda: ngvi.VN(dense(), estimator=ngvi.Quadrature()).step(ngvi.LogJoint(lambda theta: -theta.square().sum(-1))),
    lambda: ngvi.VN(dense()).step(model().minibatch(torch.tensor([0]))),
    lambda: ngvi.VN([dense(), dense()], lr=0.1).step(model()),
    lambda: ngvi.VN(Mixture.of([dense(), dense()])),
    after_backward,
    one_draw,
]
TABLES = ["AMONG_PARTS", "WITH_POSTERIOR", "WITH_TARGET", "ONE_GRADIENT", "ASKED_TWICE", "ONE_POSTERIOR"]
ROWS = [row for name in TABLES for row in getattr(evaluating, name)]


def test_every_table_is_here():
    rows = {name for name, value in vars(evaluating).items() if isinstance(value, list)}
    assert rows == set(TABLES)


def test_every_row_is_met():
    said = []
    for refused in REFUSED:
        with pytest.raises(PairError) as caught:
            refused()
        said.append(str(caught.value))
    for _, sentence in ROWS:
        pattern = re.sub(r"\\{.*?\\}", ".+", re.escape(sentence))
        assert any(re.fullmatch(pattern, text) for text in said), f"nobody meets: {sentence}"


@pytest.mark.parametrize("refused", REFUSED)
def test_no_name_is_left_open(refused):
    with contextlib.suppress(PairError):
        refused()
        pytest.fail("it was not refused")
    with pytest.raises(PairError, match=r"^[^{}]*\.$"):
        refused()
