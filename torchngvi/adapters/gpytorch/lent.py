"""A model whose q is one of GPyTorch's own, for a while with one of this library in its place.

The full Gaussians of GPyTorch, `CholeskyVariationalDistribution` and its natural and triangular natural forms, hold the
same q in other coordinates.  So does the unwhitened strategy, where u = μ_Z + L v.  The model is given back as it was,
with the q that was found.
"""

import contextlib
from collections.abc import Iterator

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.models import ApproximateGP
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
    VariationalStrategy,
)
from gpytorch.variational._variational_distribution import _VariationalDistribution
from linear_operator.operators import CholLinearOperator, TriangularLinearOperator

from torchngvi.adapters.gpytorch.distribution import NaturalGradientVariationalDistribution
from torchngvi.adapters.gpytorch.memory import forget
from torchngvi.numerics.linalg import cholesky

_FULL = (CholeskyVariationalDistribution, NaturalVariationalDistribution, TrilNaturalVariationalDistribution)


@contextlib.contextmanager
def lent_posterior(model: ApproximateGP) -> Iterator[None]:
    """A block in which the model has a q of this library in the place of its own, which takes over what was found.

    Args:
        model: the model; one whose q is no full Gaussian of GPyTorch is left alone.

    Returns:
        A context manager.
    """
    strategy = getattr(model, "variational_strategy", None)
    own = getattr(strategy, "_variational_distribution", None)
    if not isinstance(strategy, VariationalStrategy) or not isinstance(own, _FULL):
        yield
        return
    lent = NaturalGradientVariationalDistribution(own.num_inducing_points, own.batch_shape, mean_init_std=0.0)
    lent.to(dtype=own.dtype, device=own.device)
    if bool(strategy.variational_params_initialized):
        lent.initialize_variational_distribution(own())
    strategy._variational_distribution = lent
    forget(model)
    try:
        yield
    finally:
        strategy._variational_distribution = own
        if bool(strategy.variational_params_initialized):
            _copy(lent, own)
        forget(model)


@torch.no_grad()
def _copy(lent: NaturalGradientVariationalDistribution, own: _VariationalDistribution) -> None:
    """Give GPyTorch's distribution the moments of the other, by the method with which a strategy starts it."""
    root, _ = cholesky(lent.posterior.covariance)
    noise, own.mean_init_std = own.mean_init_std, 0.0
    covariance = CholLinearOperator(TriangularLinearOperator(root.to(own.dtype)))
    own.initialize_variational_distribution(MultivariateNormal(lent.posterior.mean.to(own.dtype), covariance))
    own.mean_init_std = noise
