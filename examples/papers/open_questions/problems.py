"""The models of these studies, and the optimum of each by exact natural steps."""

from collections.abc import Callable

import torch
from torch import Tensor

from examples.compare_methods import datasets
from torchngvi import fit
from torchngvi.expectations import Quadrature
from torchngvi.methods import VN
from torchngvi.models import GeneralizedLinear
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.stepsizes import Constant

_POLISH = 60  # full exact steps after a fit: they contract where J has its eigenvalues in (0, 2)


def _libsvm(name: str) -> GeneralizedLinear:
    X, y = datasets.load(name)
    return GeneralizedLinear(torch.as_tensor(X), torch.as_tensor(y))


def counts(rows: int = 60, dim: int = 5) -> GeneralizedLinear:
    """A Poisson regression on drawn rows."""
    generator = torch.Generator().manual_seed(0)
    X = 0.5 * torch.randn(rows, dim, dtype=torch.float64, generator=generator)
    return GeneralizedLinear(X, torch.poisson(torch.exp(0.5 * X.sum(-1)), generator=generator), "poisson")


def few(rows: int = 30, dim: int = 4) -> GeneralizedLinear:
    """A logistic regression on few drawn rows under a wide prior, N(0, 100 I): far from Gaussian."""
    generator = torch.Generator().manual_seed(0)
    X = 0.5 * torch.randn(rows, dim, dtype=torch.float64, generator=generator)
    y = torch.rand(rows, dtype=torch.float64, generator=generator) < torch.sigmoid(2 * X.sum(-1))
    return GeneralizedLinear(X, y.double(), prior_precision=0.01)


MODELS: dict[str, Callable[[], GeneralizedLinear]] = {
    "australian": lambda: _libsvm("australian_scale"),
    "diabetes": lambda: _libsvm("diabetes_scale"),
    "breast-cancer": lambda: _libsvm("breast-cancer_scale"),
    "Poisson, 60 rows": counts,
    "logistic, 30 rows": few,
}


def solved(model: GeneralizedLinear) -> tuple[CholeskyGaussian, Tensor]:
    """The optimum, and its exact loss."""
    q = CholeskyGaussian(model.dim, dtype=torch.float64)
    fit(q, model, progress=False)
    opt = VN(q, lr=1.0, step_size=Constant())
    for _ in range(_POLISH):
        opt.step(model)
    return q, exact_loss(q, model)


@torch.no_grad()
def exact_loss(q: CholeskyGaussian, model: GeneralizedLinear) -> Tensor:
    """L by quadrature, (*batch,), in nats."""
    return q.loss(Quadrature()(q, model))


def repeated(q: CholeskyGaussian, count: int) -> CholeskyGaussian:
    """So many copies of one posterior, as a batch."""
    mean, root = q.mean.expand(count, q.dim), q.scale_tril.expand(count, q.dim, q.dim)
    return CholeskyGaussian(q.dim, (count,), mean=mean, scale=root, dtype=q.dtype)
