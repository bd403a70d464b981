"""Rows beside a q that was found: predictions corrected by those near them."""

import pytest
import torch
from sparse_models import SparseModel

from torchngvi.adapters.gpytorch import (
    NaturalGradientVariationalDistribution,
    predict_with_neighbours,
    refine_svgp,
)
from torchngvi.errors import InputError, PairError

gp = pytest.importorskip("gpytorch")
N, JITTER = 60, 1e-6
SPANS = {"nothing": torch.linspace(90, 99, 4), "something": torch.linspace(-2, 2, 5), "all": torch.linspace(-2, 2, 40)}


class Model(SparseModel):
    def __init__(self, Z, kind=NaturalGradientVariationalDistribution, **options):
        super().__init__(kind(len(Z)), Z[:, None], jitter_val=JITTER, **options)


def problem(Z=SPANS["something"], likelihood=None, **options):
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(N, 1, generator=generator).double() - 2
    y = torch.sin(3 * x[:, 0]) + 0.2 * torch.randn(N, generator=generator).double()
    model = Model(Z, **options).double()
    model.covar_module.base_kernel.lengthscale, model.mean_module.constant = 0.4, 0.3
    if likelihood is None:
        likelihood = gp.likelihoods.GaussianLikelihood().double()
        likelihood.noise = 0.04
    return model, likelihood, x, y


class TestNeighbours:
    @pytest.mark.parametrize("rows", ["one noise", "a noise for each row"])
    @pytest.mark.parametrize("spans", SPANS)
    def test_all_rows_are_the_exact_process(self, spans, rows):
        """Whatever the inducing points span."""
        noise = torch.full((N,), 0.04).double() if rows == "one noise" else torch.linspace(0.01, 0.3, N).double()
        own = None if rows == "one noise" else gp.likelihoods.FixedNoiseGaussianLikelihood(noise)
        model, likelihood, x, y = problem(SPANS[spans], own)
        refine_svgp(model, likelihood, [(x, y)], progress=False)
        new = torch.linspace(-3, 3, 17).double()[:, None]
        with torch.no_grad():
            found = predict_with_neighbours(model, likelihood, new, x, y, neighbours=N)
            joint = model.forward(torch.cat([x, new]))
            K, mean = joint.covariance_matrix, joint.mean
            weights = torch.linalg.solve(K[:N, :N] + torch.diag(noise + JITTER), K[:N, N:])
            close = 1e-9 if spans != "all" else 1e-6  # where K_ZZ is nearly singular
            assert float((found.mean - mean[N:] - (y - mean[:N]) @ weights).abs().max()) < close
            wanted = K.diagonal()[N:] + JITTER - (K[:N, N:] * weights).sum(0)
            assert float((found.variance - wanted).abs().max()) < close

    def test_none_and_far_rows_are_the_prediction_of_q(self):
        model, likelihood, x, y = problem()
        refine_svgp(model, likelihood, [(x, y)], progress=False)
        new = torch.linspace(-3, 3, 17).double()[:, None]
        model.eval()
        with torch.no_grad():
            for rows, number, close in ((new, 0, 1e-9), (new + 50, 8, 1e-9)):
                found, wanted = predict_with_neighbours(model, likelihood, rows, x, y, number), model(rows)
                assert float((found.mean - wanted.mean).abs().max()) < close
                assert float((found.variance - wanted.variance).abs().max()) < close
        assert not model.training

    def test_a_few_rows_bring_most(self):
        """Between the two, and the rows are the ones that matter, whatever else is asked at once."""
        model, likelihood, x, y = problem()
        refine_svgp(model, likelihood, [(x, y)], progress=False)
        new = torch.linspace(-2, 2, 40).double()[:, None]
        few, one, exact = (predict_with_neighbours(model, likelihood, new, x, y, k) for k in (8, 0, N))
        errors = [float((found.mean - exact.mean).abs().mean()) for found in (few, one)]
        assert errors[0] < 0.35 * errors[1]
        again = predict_with_neighbours(model, likelihood, new[3:4], x, y)
        assert float((again.mean - few.mean[3:4]).abs()) < 1e-12
        assert likelihood(few).variance.min() > 0.04

    def test_float32_and_the_distributions_of_gpytorch(self):
        model, likelihood, x, y = problem(kind=gp.variational.CholeskyVariationalDistribution)
        refine_svgp(model, likelihood, [(x, y)], progress=False)
        wanted = predict_with_neighbours(model, likelihood, x, x, y)
        found = predict_with_neighbours(model.float(), likelihood.float(), x.float(), x.float(), y.float())
        assert found.mean.dtype == torch.float32
        assert float((found.mean - wanted.mean).abs().max()) < 1e-3

    def test_refusals(self):
        model, likelihood, x, y = problem()
        with pytest.raises(PairError, match="corrected by rows near them for Gaussian noise; got BernoulliLikelihood"):
            predict_with_neighbours(model, gp.likelihoods.BernoulliLikelihood(), x, x, y)
        with pytest.raises(InputError, match="the inducing points have 1 features; got inputs of shape"):
            predict_with_neighbours(model, likelihood, x.expand(-1, 2), x, y)
        with pytest.raises(InputError, match="neighbours counts training rows"):
            predict_with_neighbours(model, likelihood, x, x, y, -1)
