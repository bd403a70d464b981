"""A model whose q is one of GPyTorch's own, or of u, for a while with one of this library of v in its place.

The full Gaussians of GPyTorch, `CholeskyVariationalDistribution` and its natural and triangular natural forms, hold the
same q in other coordinates, for one latent function or for several.  The unwhitened strategy holds it, theirs or ours,
for u = μ_Z + L v in the place of v, K_ZZ = L Lᵀ.  The model is given back as it was, with the q that was found.

GPyTorch's modules keep values of an older q or kernel in eval mode, until a call of the model, which direct steps do
without.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.models import ApproximateGP
from gpytorch.variational import UnwhitenedVariationalStrategy, VariationalStrategy
from linear_operator.operators import CholLinearOperator, TriangularLinearOperator
from torch import Tensor

from torchngvi.adapters.gpytorch.distribution import FULL, NaturalGradientVariationalDistribution, moments_of
from torchngvi.adapters.gpytorch.kernels import kernels
from torchngvi.numerics.linalg import cholesky


def forget(model: torch.nn.Module) -> None:
    """Clear what strategies and kernels keep, so that the next prediction sees q and the kernels as they are."""
    for module in model.modules():
        if isinstance(module, gpytorch.Module):
            module._clear_cache()


def as_in_predictions(model: torch.nn.Module) -> None:
    """Put the layers of a network within a model in eval mode: without dropout, with the statistics that were kept."""
    for module in model.modules():
        if type(module).__module__.startswith("torch.nn."):
            module.eval()


@contextlib.contextmanager
def kept_modes(*owners: torch.nn.Module) -> Iterator[None]:
    """A block in which models may be evaluated, in any mode."""
    modes = [(module, module.training) for owner in owners for module in owner.modules()]
    for owner in owners:
        forget(owner)
    try:
        yield
    finally:
        for module, training in modes:  # a module before its parts, whose own mode comes last
            module.train(training)
        for owner in owners:
            forget(owner)


@contextlib.contextmanager
def lent_posterior(model: ApproximateGP) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """A block in which the model has a q of this library in the place of its own, which takes over what was found."""
    outer: Any = getattr(model, "variational_strategy", None)
    strategy: Any = getattr(outer, "base_variational_strategy", outer)  # of several functions
    own: Any = getattr(strategy, "_variational_distribution", None)
    whitened = type(strategy) is not UnwhitenedVariationalStrategy
    # a class of the user's that holds another q, or uses it in another way, has a method of its own
    theirs = isinstance(own, FULL) and type(own).forward in {kind.forward for kind in FULL}
    ours = isinstance(own, NaturalGradientVariationalDistribution) and not whitened
    ours = ours and own.posterior.framed and own.posterior.structure.widest > 1  # a full Gaussian
    single = outer is strategy
    if not (theirs or ours) or not (isinstance(strategy, VariationalStrategy) if whitened else single):
        yield contextlib.nullcontext
        return
    lent = NaturalGradientVariationalDistribution(own.num_inducing_points, own.batch_shape, mean_init_std=0.0)
    lent.to(dtype=own.dtype, device=own.device)
    begun = strategy.variational_params_initialized
    stand_in = strategy
    if not whitened:  # the whitened strategy over the same inducing points
        learn = isinstance(strategy.inducing_points, torch.nn.Parameter)
        stand_in = VariationalStrategy(model, strategy.inducing_points.detach(), lent, learn, strategy.jitter_val)
        stand_in.inducing_points = strategy.inducing_points
        stand_in.variational_params_initialized.copy_(begun)
        stand_in.train(strategy.training)
    if bool(begun):
        _give(own, lent, None if whitened else stand_in)

    def lend() -> None:
        stand_in._variational_distribution = lent
        if not whitened:
            model.variational_strategy = stand_in
        forget(model)

    def give_back() -> None:
        model.variational_strategy, strategy._variational_distribution = outer, own
        strategy.train(stand_in.training)
        begun.copy_(stand_in.variational_params_initialized)
        if bool(begun):
            _take(own, lent, None if whitened else stand_in)
        forget(model)

    @contextlib.contextmanager
    def returned() -> Iterator[None]:
        give_back()
        try:
            yield
        finally:
            lend()

    lend()
    try:
        yield returned
    finally:
        give_back()


@torch.no_grad()
def _prior(strategy: VariationalStrategy) -> tuple[Tensor, Tensor]:
    """μ_Z and L."""
    at_points = kernels(strategy, strategy.inducing_points)
    return at_points.mean.double(), at_points.factor


@torch.no_grad()
def _give(own: Any, lent: NaturalGradientVariationalDistribution, unwhitened: VariationalStrategy | None) -> None:
    """Give the one that is lent the moments of the model's own."""
    mean, root = (part.double() for part in moments_of(own))
    if unwhitened is not None:
        centre, L = _prior(unwhitened)
        mean = torch.linalg.solve_triangular(L, (mean - centre)[..., None], upper=False)[..., 0]
        root = torch.linalg.solve_triangular(L, root, upper=False)
    q = lent.posterior
    q.initialize_(mean.to(q.dtype), q.kept_covariance(root.to(q.dtype)))


@torch.no_grad()
def _take(own: Any, lent: NaturalGradientVariationalDistribution, unwhitened: VariationalStrategy | None) -> None:
    """Give the model's own the moments of the one that was lent, by the method with which a strategy starts it."""
    mean, (root, _) = lent.posterior.mean.double(), cholesky(lent.posterior.covariance.double())
    if unwhitened is not None:
        centre, L = _prior(unwhitened)
        mean, root = centre + (L @ mean[..., None])[..., 0], L @ root
    covariance = CholLinearOperator(TriangularLinearOperator(root.to(own.dtype)))
    noise, own.mean_init_std = own.mean_init_std, 0.0
    own.initialize_variational_distribution(MultivariateNormal(mean.to(own.dtype), covariance))
    own.mean_init_std = noise
