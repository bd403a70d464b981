"""`torchngvi.certificate` of sparse Gaussian processes given their hyper-parameters: by the prior of v, N(0, I)."""

import gpytorch
import pytest
import torch
from helpers import randn
from sparse_models import SparseModel

from torchngvi import CholeskyGaussian, certificate
from torchngvi.adapters.gpytorch import SparseGP, refine_svgp
from torchngvi.errors import InputError

ROWS, DTYPE = 120, torch.float64


X = 4 * torch.rand(ROWS, 1, dtype=DTYPE, generator=torch.Generator().manual_seed(1))
F = torch.sin(3 * X[:, 0])
TARGETS = {"normal": F + 0.3 * randn(ROWS), "classes": (F + 0.3 * randn(ROWS) > 0).to(DTYPE)}
LIKELIHOODS = {"normal": gpytorch.likelihoods.GaussianLikelihood, "classes": gpytorch.likelihoods.BernoulliLikelihood}


class Model(SparseModel):
    def __init__(self, M=10):
        q = gpytorch.variational.CholeskyVariationalDistribution(M)
        super().__init__(q, X[:M].clone())


def refined(kind, **settings):
    model, likelihood = Model().double(), LIKELIHOODS[kind]().double()
    return refine_svgp(model, likelihood, [(X, TARGETS[kind])], progress=False, **settings)


def objective(target, q):
    with torch.no_grad():
        return (target.expected_energy(q.frame())[0] - q.entropy()).item()


@pytest.mark.parametrize("kind", sorted(LIKELIHOODS))
def test_the_bound_is_above_the_distance(kind):
    """At q near and far, the first of which are N(v; 0, s²I)."""
    result = refined(kind)
    assert isinstance(result.target, SparseGP)
    least, found = objective(result.target, result.posterior), result.certificate
    assert found.bound < 1e-5
    assert found.kind in ("prior", "rounding")
    own = result.posterior
    others = [CholeskyGaussian(10, scale=s, dtype=DTYPE) for s in (1e-2, 1.0, 10.0)]
    for k, s in enumerate((1.0, 1e-2, 1e-4)):
        near = own.mean + s * own.stddev * randn(10, seed=k)
        others.append(CholeskyGaussian(10, mean=near, scale=own.scale_tril * (1 + 0.3 * s), dtype=DTYPE))
    for q in others:
        told, gap = certificate(q, result.target), objective(result.target, q) - least
        assert told.kind == "prior"
        assert gap <= told.bound < 1e4 * gap


def test_a_normal_likelihood_that_is_solved_is_told():
    """Its optimum in closed form: S = I + Σ a aᵀ/σ²."""
    result = refined("normal")
    rows, b, c = (torch.cat(parts) for parts in zip(*result.target.sites(result.posterior, ROWS), strict=True))
    S = torch.eye(10, dtype=DTYPE) + (rows.mT * c) @ rows
    V = torch.linalg.inv(S)
    q = CholeskyGaussian(10, mean=V @ (rows.mT @ b), scale=torch.linalg.cholesky(V), dtype=DTYPE)
    assert certificate(q, result.target).bound < 1e-10


def test_where_nothing_is_proved():
    result = refined("classes")
    with pytest.raises(InputError, match="certificate got a q of D = 3 for a model of 10"):
        certificate(CholeskyGaussian(3, dtype=DTYPE), result.target)
    target = result.target
    target.likelihood.log_concave = False
    assert "BernoulliLikelihood is not known to be log-concave" in certificate(result.posterior, target).reason
    target.likelihood.log_concave = True
    target.comparable = False
    assert "mini-batch" in certificate(result.posterior, target).reason
