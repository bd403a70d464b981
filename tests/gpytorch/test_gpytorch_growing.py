"""The number of inducing points doubles while that raises the bound: train_svgp(..., inducing="auto")."""

import math

import pytest
import torch
from sparse_models import SparseModel

from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, engines, train_svgp
from torchngvi.adapters.gpytorch.starts import double_inducing_points
from torchngvi.errors import InputError
from torchngvi.posteriors import NaturalGaussian

gp = pytest.importorskip("gpytorch")
CHOLESKY = gp.variational.CholeskyVariationalDistribution


class Model(SparseModel):
    def __init__(self, size=4, kind=CHOLESKY, **options):
        super().__init__(kind(size), torch.zeros(size, 1), **options)


def data(periods=6, rows=300, name="gaussian"):
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(rows, 1, generator=generator).double() - 2
    y = torch.sin(periods * x[:, 0]) + 0.2 * torch.randn(rows, generator=generator).double()
    return x, y if name == "gaussian" else (y > 0).double()


def learn(model, rows, likelihood=None, **options):
    likelihood = (likelihood or gp.likelihoods.GaussianLikelihood()).double()
    return train_svgp(model.double(), likelihood, rows, inducing="auto", progress=False, **options)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Rounds of few iterations."""
    monkeypatch.setattr(engines, "_ROUNDS", engines.RoundSettings(iterations=8))


@pytest.mark.accuracy
@pytest.mark.parametrize("strategy", [gp.variational.VariationalStrategy, gp.variational.UnwhitenedVariationalStrategy])
@pytest.mark.parametrize("kind", [CHOLESKY, NaturalGradientVariationalDistribution])
def test_it_grows_until_that_brings_little(kind, strategy):
    """With the exact evidence near; model and strategy stay the same objects, and predict."""
    model = Model(kind=kind, strategy=strategy)
    own, rows = model.variational_strategy, data()
    result = learn(model, rows)
    assert result.inducing in (16, 32)
    assert result.inducing == len(own.inducing_points) == own._variational_distribution.num_inducing_points
    assert model.variational_strategy is own
    assert isinstance(own._variational_distribution, kind)
    assert result.doubling < 0.01
    assert 0 < result.gap < 0.02
    assert "last doubling" not in result.reason
    assert result.refined.converged
    with torch.no_grad():
        assert float((model.eval()(rows[0]).mean - torch.sin(6 * rows[0][:, 0])).abs().mean()) < 0.1


@pytest.mark.accuracy
@pytest.mark.parametrize("kind", [CHOLESKY, NaturalGradientVariationalDistribution])
def test_it_ends_where_that_number_would_have_been_given(kind):
    """The hyper-parameters that fewer points have learnt are no start."""
    model, noise = Model(kind=kind).double(), gp.likelihoods.GaussianLikelihood().double()
    grown = train_svgp(model, noise, data(), inducing="auto", rounds=6, progress=False)
    assert grown.inducing > 4
    other, same = Model(grown.inducing, kind).double(), gp.likelihoods.GaussianLikelihood().double()
    given = train_svgp(other, same, data(), rounds=6, progress=False)
    assert grown.losses == given.losses
    assert torch.equal(noise.noise, same.noise)


@pytest.mark.accuracy
def test_points_that_were_given_stay_the_first():
    x, y = data()
    model = SparseModel(CHOLESKY(4), x[:4].clone(), learn_inducing_locations=False)
    result = learn(model, (x, y))
    assert result.inducing > 4
    assert bool((model.variational_strategy.inducing_points[:4] == x[:4]).all())


@pytest.mark.accuracy
def test_what_ends_it():
    """The budget of rounds, which the reason says, and half of the rows."""
    result = learn(Model(), data(), rounds=4)
    assert result.inducing == 8
    assert result.doubling > 0.01
    assert "the bound still rose by" in result.reason
    assert learn(Model(), data(3, rows=24)).inducing <= 12
    assert learn(Model(), iter([data(3, rows=24)])).inducing <= 12
    result = learn(Model(), data(), rounds=1)
    assert result.inducing == 4
    assert math.isnan(result.doubling)
    plain = train_svgp(Model().double(), gp.likelihoods.GaussianLikelihood().double(), data(), progress=False)
    assert plain.inducing == 0


@pytest.mark.accuracy
def test_another_likelihood():
    result = learn(Model(), data(3, name="bernoulli"), gp.likelihoods.BernoulliLikelihood())
    assert result.inducing >= 8
    assert math.isnan(result.gap)


def test_doubling_keeps_what_is_there():
    """The old points stay first, q has the class and dtype that it had, and what is not learned stays so."""
    x, _ = data()
    kind = NaturalGradientVariationalDistribution(4, posterior=NaturalGaussian)
    model = SparseModel(kind, x[:4].clone(), learn_inducing_locations=False).double()
    strategy = model.variational_strategy
    double_inducing_points(strategy, x)
    assert bool((strategy.inducing_points[:4] == x[:4]).all())
    assert len(strategy.inducing_points.unique(dim=0)) == 8
    assert not isinstance(strategy.inducing_points, torch.nn.Parameter)
    q = strategy._variational_distribution
    assert isinstance(q.posterior, NaturalGaussian)
    assert q.dtype == torch.float64
    assert q.num_inducing_points == 8


def test_refusals(tmp_path):
    with pytest.raises(InputError, match="a checkpoint holds a run with the inducing points that the model has"):
        learn(Model(), data(), checkpoint=tmp_path / "run.pt")
    with pytest.raises(InputError, match="inducing is one of given, auto; got 'aut'. Did you mean 'auto'?"):
        train_svgp(Model(), gp.likelihoods.GaussianLikelihood(), data(), inducing="aut")
