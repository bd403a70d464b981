"""What a likelihood says of a datum: the energy F = -E[log p(y | f)], and whether it is quadratic or convex.

As GPyTorch's own objectives, a likelihood of several values sees their marginals.
"""

from functools import lru_cache
from typing import Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    GaussianLikelihoodWithMissingObs,
    LaplaceLikelihood,
    Likelihood,
    PoissonLikelihood,
)
from gpytorch.settings import observation_nan_policy
from torch import Tensor

from torchngvi.errors import InputError

# of GPyTorch's likelihoods, asked by their methods: a class that inherits them has the same expectations
_QUADRATIC = {kind.expected_log_prob for kind in (GaussianLikelihood, GaussianLikelihoodWithMissingObs)}
_BY_QUADRATURE = {kind.expected_log_prob for kind in (PoissonLikelihood, BernoulliLikelihood)}
_CONVEX = {kind.forward for kind in (BernoulliLikelihood, PoissonLikelihood, LaplaceLikelihood)}  # -log p(y | f) in f
_DRAWS = 64  # of the latent values of each datum, where a likelihood has no formula


def energy(
    likelihood: Likelihood,
    y: Tensor,
    values: MultivariateNormal,
) -> Tensor:
    """F_n = -E[log p(y_n | f_n)] of each datum, by the likelihood's own formula or over draws that stay the same."""
    if isinstance(likelihood, FixedNoiseGaussianLikelihood) and likelihood.noise.shape[-1] != values.mean.shape[-1]:
        raise InputError(
            f"FixedNoiseGaussianLikelihood holds a noise for each of {likelihood.noise.shape[-1]} rows and cannot tell "
            f"which a batch of {values.mean.shape[-1]} are. Give all rows as one batch in their order, or use "
            "natural_optimizer with mll(model(x), y, noise=noise_of_the_batch)."
        )
    if _function(likelihood.expected_log_prob) is BernoulliLikelihood.expected_log_prob:
        sign = torch.where(y == 1, 1.0, torch.where((y == 0) | (y == -1), -1.0, torch.nan)).to(values.mean)
        result = -likelihood.quadrature(lambda f: torch.special.log_ndtr(f * sign), values)
    else:
        module = _Expected(likelihood)
        # q may be in float64 beside a float32 likelihood
        dtype = values.mean.dtype
        state = {name: p.to(dtype) for name, p in module.named_parameters() if p.dtype != dtype}
        # to mask is to fill, in a way that keeps the shape
        policy = observation_nan_policy.value()
        with observation_nan_policy("fill" if policy == "mask" else policy):
            try:
                result = -(torch.func.functional_call(module, state, (y, values)) if state else module(y, values))
            except ValueError as raised:  # of torch's distributions, where targets are outside of their support
                raise InputError(
                    f"{type(likelihood).__name__} cannot take these targets, of which the least is "
                    f"{float(y.min()):.4g} and the greatest {float(y.max()):.4g}, at these hyper-parameters: "
                    f"{str(raised).splitlines()[0]}"
                ) from raised
    several = isinstance(values, MultitaskMultivariateNormal)
    wanted = values.mean.shape[:-1] if several else values.mean.shape
    if result.shape == wanted[:-1]:
        raise InputError(
            f"{type(likelihood).__name__}.expected_log_prob sums over the data: it gives {tuple(result.shape)} where "
            f"steps from the derivatives of each datum need {tuple(wanted)}, an expectation of each. Leave the sum to "
            "the objective, or use loss.backward() with natural_optimizer(mll)."
        )
    if result.shape != wanted:
        raise InputError(
            f"the likelihood gives {tuple(result.shape)} expectations for {tuple(wanted)} latent values: "
            f"check the shape of the targets, {tuple(y.shape)}."
        )
    return result


class _Expected(torch.nn.Module):
    """The expectations of a likelihood as a module, whose parameters may be replaced; over draws where it has none."""

    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__()
        self.likelihood = likelihood

    def forward(self, y: Tensor, values: MultivariateNormal) -> Tensor:
        if _function(self.likelihood.expected_log_prob) is not Likelihood.expected_log_prob:
            return self.likelihood.expected_log_prob(y, values)
        z = _draws(_DRAWS, values.mean.shape, values.mean.dtype, values.mean.device)
        return self.likelihood(values.mean + values.variance.sqrt() * z).log_prob(y).mean(0)


@lru_cache(maxsize=4)
def _draws(count: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """z (count, *shape), in pairs z and -z and of variance 1 for each value."""
    z = torch.randn(count // 2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = z / z.square().mean(0).sqrt()
    return torch.cat([z, -z]).to(dtype=dtype, device=device)


def check_labels(likelihood: Likelihood, y: Tensor) -> None:
    """Check that a Bernoulli likelihood gets labels; what is missing may be NaN."""
    if not isinstance(likelihood, BernoulliLikelihood) or y.dtype is torch.bool:
        return
    if not bool(((y == 1) | (y == 0) | (y == -1) | y.isnan()).all()):
        raise InputError(
            f"{type(likelihood).__name__} takes the labels 0 and 1, or -1 and 1; got targets from {float(y.min()):.4g} "
            f"to {float(y.max()):.4g}. Make labels of them, as (y > threshold).to(y), or take another likelihood."
        )


def tightened(beta: Tensor, d: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """What each datum of Gaussian noise adds to a bound where q(f | v) is optimal too, and κ, twice its slope in d.

    With the variance d given v and β = c share it is ½ share (δ - log(1 + δ)), δ = c d (Titsias 2025).
    """
    delta = beta / share * d.clamp_min(0.0)
    return 0.5 * share * (delta - delta.log1p()), beta * delta / (1.0 + delta)


def conjugate(likelihood: Likelihood) -> bool:
    """Whether every F_n is quadratic in the latent values, so that a full natural step is exact."""
    return _function(likelihood.expected_log_prob) in _QUADRATIC


def log_concave(likelihood: Likelihood) -> bool:
    """Whether every 2 ∂F/∂v is known not to be negative, so that full steps stay in the cone."""
    declared = getattr(likelihood, "log_concave", None)
    if declared is not None:
        return bool(declared)
    by_quadrature = _function(likelihood.expected_log_prob) in _BY_QUADRATURE
    return conjugate(likelihood) or (by_quadrature and _function(likelihood.forward) in _CONVEX)


def _function(method: Any) -> Any:
    """What a method calls; of one that was set on the object, itself."""
    return getattr(method, "__func__", method)
